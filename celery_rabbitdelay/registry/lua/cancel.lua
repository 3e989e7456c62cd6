-- Cancel tasks.
--
-- KEYS  the record of each task
-- ARGV  nothing for each; then for how many milliseconds a cancel is kept if it is not known when the
--       task is due
-- Returns for each task what was found: "done", "released", "cancelled" or "unknown".

local unknown_ms, now_ms = tonumber(ARGV[3]), clock()

local function cancel(record)
  local cancelled, not_before, ran, waits, due =
    unpack(redis.call('HMGET', record, 'cancelled', 'not_before', 'ran', 'waits', 'due'))
  local life = latest(ran, waits)
  local outcome = is_cancelled(cancelled, life) and 'cancelled'
    or waits and 'done' or ran and 'released' or 'unknown'
  -- Once the task has run, a message of the next life may be on its way that is not registered.
  redis.call('HSET', record, 'cancelled', ran and math.max(life, next_life(ran, cancelled)) or life)
  local last = math.max(tonumber(due or '0'), tonumber(not_before or '0'), now_ms)
  keep(record, last + (waits and keep_ms or unknown_ms), now_ms)
  if waits then
    settle(record)
  end
  return outcome
end

return cjson.encode(of_each_key(cancel))
