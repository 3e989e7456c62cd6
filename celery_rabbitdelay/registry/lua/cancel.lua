-- Cancel tasks.
--
-- KEYS  the record of each task
-- ARGV  the margin in milliseconds; for how many milliseconds the record of a task lives whose due
--       time is unknown
-- Returns for each task what was found: "done", "released", "cancelled" or "unknown".

local margin, long = tonumber(ARGV[1]), tonumber(ARGV[2])
local now = redis.call('TIME')
local now_ms = now[1] * 1000 + math.floor(now[2] / 1000)
local outcomes = {}
for number, record in ipairs(KEYS) do
  local state, copy, due, later = unpack(redis.call('HMGET', record, 'state', 'copy', 'due', 'later'))
  local outcome = state
  if not state then
    outcome = 'unknown'
    if copy then
      outcome = 'done'
      if redis.call('HEXISTS', record, 'void:' .. copy) == 1 then
        outcome = 'cancelled'
      end
    end
    redis.call('HSET', record, 'state', 'cancelled')
    forget(record)
    local last = tonumber(later) or tonumber(due)
    keep(record, (last and last + margin) or (now_ms + long))
  end
  outcomes[number] = outcome
end
return outcomes
