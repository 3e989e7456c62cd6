-- Cancel tasks.
--
-- KEYS  the record of each task
-- ARGV  the margin in milliseconds; for how many milliseconds the record of a task lives whose due
--       time is unknown
-- Returns for each task what was found: "done", "released", "cancelled" or "unknown".

local margin, long, now_ms = tonumber(ARGV[1]), tonumber(ARGV[2]), clock()
local outcomes = {}
for number, record in ipairs(KEYS) do
  local state, copy, due, later = unpack(redis.call('HMGET', record, 'state', 'copy', 'due', 'later'))
  local outcome = outcome_of(state)
  -- A task whose message was dropped with its job may have been sent again.
  if not state or state == 'expired' then
    outcome = outcome or 'unknown'
    if copy and not state then
      outcome = 'done'
      if redis.call('HEXISTS', record, 'void:' .. copy) == 1 then
        outcome = 'cancelled'
      end
    end
    redis.call('HSET', record, 'state', 'cancelled')
    forget(record)
    if due then
      -- A task that is due already may be waiting for its job, or for a worker.
      keep(record, math.max(tonumber(later) or tonumber(due), now_ms) + margin)
    else
      keep(record, now_ms + long)
    end
  end
  outcomes[number] = outcome
end
return outcomes
