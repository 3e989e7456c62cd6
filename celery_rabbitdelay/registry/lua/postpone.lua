-- Postpone a task.
--
-- KEYS  the task's record
-- ARGV  the new due time, until when the record lives
-- Returns "done", "released", "cancelled", "unknown" (done, but nothing is known about the task), or
-- what it takes to send the task anew, if it is to run earlier: {"earlier", copy, message}; message
-- is empty if the task is not tracked.

local record, due, lives = KEYS[1], tonumber(ARGV[1]), tonumber(ARGV[2])
local state, copy, known, later, name, job, message =
  unpack(redis.call('HMGET', record, 'state', 'copy', 'due', 'later', 'name', 'job', 'message'))
if state then
  return {state}
end
if copy and redis.call('HEXISTS', record, 'void:' .. copy) == 1 then
  return {'cancelled'}
end
if known and due < tonumber(known) then
  return {'earlier', copy, message or ''}
end
redis.call('HSET', record, 'later', ARGV[1])
if name then
  index(record, name, job, due)
end
keep(record, lives)
return {copy and 'done' or 'unknown'}
