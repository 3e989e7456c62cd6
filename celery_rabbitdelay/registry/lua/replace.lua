-- Let a second message of a task replace the first one, once the broker has confirmed it.
--
-- KEYS  the task's record
-- ARGV  the first message's copy, the second one's, the due time of the second, until when the
--       record lives
-- Returns "done", "released" (the first one has arrived) or "cancelled"; in the latter two cases the
-- second one must not run.

local record, first, second, due, lives = KEYS[1], ARGV[1], ARGV[2], ARGV[3], tonumber(ARGV[4])
local state, arrived, name, job = unpack(redis.call('HMGET', record, 'state', 'arrived', 'name', 'job'))
if arrived == second then
  void(record, first, lives)
  return 'done'
end
if state then
  void(record, second, lives)
  return state
end
redis.call('HSET', record, 'void:' .. first, 'superseded', 'copy', second, 'due', due)
redis.call('HDEL', record, 'later')
if name then
  index(record, name, job, due)
end
keep(record, lives)
return 'done'
