-- Cancel tasks.
--
-- KEYS  the record of every task
-- ARGV  nothing per task; then how many milliseconds a cancel is kept if the task does not wait, and whether
--       to record the cancel of an unknown task ("1")
-- Returns per task the outcome: "done", "released", "cancelled", "noted" or "unknown". If the task has a key,
-- "done" is followed by its order and its key.

local note_ms, notes, now_ms = tonumber(ARGV[3]), ARGV[4] == '1', clock()

-- Count a cancelled task by its kind until its message is due and dropped.
local function list_cancelled(record, due)
  local kind = redis.call('HGET', record, 'kind')
  if kind then
    local index = tag_of(record) .. 'cancelled:' .. kind
    redis.call('ZREMRANGEBYSCORE', index, '-inf', string.format('(%.0f', now_ms))
    redis.call('ZADD', index, due, id_of(record))
    keep(index, tonumber(due), now_ms)
  end
end

local function cancel(record)
  local cancelled, not_before, ran, waits, due, order, key =
    unpack(redis.call('HMGET', record, 'cancelled', 'not_before', 'ran', 'waits', 'due', 'order', 'key'))
  local life = latest(ran, waits)
  local outcome = is_cancelled(cancelled, life) and 'cancelled'
    or waits and 'done' or ran and 'released' or notes and 'noted' or 'unknown'
  if not (waits or ran or notes) then
    return outcome
  end
  -- Once the task has run, an unregistered message of its next life may be on its way.
  redis.call('HSET', record, 'cancelled', ran and math.max(life, next_life(ran, cancelled)) or life)
  local last = math.max(tonumber(due or '0'), tonumber(not_before or '0'), now_ms)
  keep(record, last + (waits and keep_ms or note_ms), now_ms)
  if waits then
    list_cancelled(record, due)
    settle(record)
  end
  return outcome == 'done' and key and 'done ' .. order .. ' ' .. key or outcome
end

return cjson.encode(of_each_key(cancel))
