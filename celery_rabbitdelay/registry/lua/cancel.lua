-- Cancel tasks.
--
-- KEYS  the record of each task
-- ARGV  nothing for each; then for how many milliseconds a cancel is kept if nothing is known of the task
-- Returns for each task what was found: "done", "released", "cancelled" or "unknown".

local unknown_ms, now_ms = tonumber(ARGV[3]), clock()
local outcomes = {}
for number, record in ipairs(KEYS) do
  local cancelled, not_before, ran, waits, due =
    unpack(redis.call('HMGET', record, 'cancelled', 'not_before', 'ran', 'waits', 'due'))
  local life = latest(ran, waits)
  if is_cancelled(cancelled, life) then
    outcomes[number] = 'cancelled'
  else
    outcomes[number] = waits and 'done' or ran and 'released' or 'unknown'
    redis.call('HSET', record, 'cancelled', life)
    local last = math.max(tonumber(due or '0'), tonumber(not_before or '0'), now_ms)
    keep(record, last + ((waits or ran) and keep_ms or unknown_ms), now_ms)
    if waits then
      settle(record)
    end
  end
end
return cjson.encode(outcomes)
