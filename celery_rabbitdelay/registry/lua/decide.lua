-- Decide what becomes of tasks that have arrived.
--
-- KEYS  the record of each task
-- ARGV  the margin in milliseconds; then for each task: copy, due, once, the mark that this message
--       leaves if it is the first one there, whether the broker has delivered it before ("1"), and
--       what the task's job says: "run", "later" or "expired"
-- Returns for each task the verdict, or the instant until which it was postponed.

local margin = tonumber(ARGV[1])
local verdicts = {}
for number, record in ipairs(KEYS) do
  local at = 2 + (number - 1) * 6
  local copy, due, once = ARGV[at], tonumber(ARGV[at + 1]), ARGV[at + 2]
  local mark, redelivered, job = ARGV[at + 3], ARGV[at + 4] == '1', ARGV[at + 5]
  local state, later = unpack(redis.call('HMGET', record, 'state', 'later'))
  local first = once ~= '' and redis.call('HGET', record, 'once:' .. once)
  local verdict = 'run'
  if state == 'cancelled' then
    verdict = 'cancelled'
  elseif copy ~= '' and redis.call('HEXISTS', record, 'void:' .. copy) == 1 then
    verdict = 'superseded'
  elseif later and tonumber(later) > due then
    verdict = later
    if copy ~= '' then
      -- The message goes back into the levels until then.
      redis.call('HSET', record, 'due', later)
    end
  elseif first and first ~= mark and not redelivered then
    verdict = 'duplicate'
  elseif job == 'expired' then
    verdict = 'expired'
    forget(record)
  elseif job == 'run' then
    if once ~= '' then
      redis.call('HSET', record, 'once:' .. once, mark)
      keep(record, due + margin)
    end
    if copy ~= '' then
      redis.call('HSET', record, 'state', 'released', 'arrived', copy)
      keep(record, due + margin)
      forget(record)
    end
  end
  verdicts[number] = verdict
end
return verdicts
