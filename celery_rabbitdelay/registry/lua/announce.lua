-- Note that a second message of a task is about to be sent, of which one alone may run: the one that
-- arrives first voids the others (decide.lua), even if its sender dies before it can tell which of
-- them counts (replace.lua).
--
-- KEYS  the task's record
-- ARGV  the first message's copy, the second one's, until when the record lives
-- Returns "done", "released" (the first one has arrived) or "cancelled"; in the latter two cases the
-- second one must not be sent.

local record, first, second, lives = KEYS[1], ARGV[1], ARGV[2], tonumber(ARGV[3])
local state, arrived, either =
  unpack(redis.call('HMGET', record, 'state', 'arrived:' .. first, 'either'))
if arrived then
  return 'released'
end
if state then
  return outcome_of(state)
end
if not is_listed(first, either) then
  either = first
end
redis.call('HSET', record, 'either', either .. ' ' .. second)
keep(record, lives)
return 'done'
