-- Cancel tasks.
--
-- KEYS  the record of each task
-- ARGV  nothing for each; then for how many milliseconds a cancel is kept if nothing of the task waits,
--       and whether to note it if nothing is known of the task ("1")
-- Returns for each task what was found: "done", "released", "cancelled", "noted", or if nothing was noted,
-- "unknown". Behind "done" the order and the key of the task, if it has one.

local note_ms, notes, now_ms = tonumber(ARGV[3]), ARGV[4] == '1', clock()

-- Until its message is due, which is dropped then, a cancelled task is counted by its kind.
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
  -- Once the task has run, a message of the next life may be on its way that is not registered.
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
