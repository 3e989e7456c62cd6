-- Postpone a task.
--
-- KEYS  the task's record
-- ARGV  the new due time, until when the record lives
-- Returns {"done", key}, where the key is empty if the task has none; {"released"}, {"cancelled"} or
-- {"unknown"} (done, but nothing is known about the task); or if it is to run earlier, what it takes
-- to send the task anew: {"earlier", copy, message}, where the message is empty if the task is not
-- tracked.

local record, due, lives = KEYS[1], tonumber(ARGV[1]), tonumber(ARGV[2])
local state, copy, known, name, job, message, key =
  unpack(redis.call('HMGET', record, 'state', 'copy', 'due', 'name', 'job', 'message', 'key'))
if state then
  return {outcome_of(state)}
end
if copy and redis.call('HEXISTS', record, 'void:' .. copy) == 1 then
  return {'cancelled'}
end
if known and due < tonumber(known) then
  return {'earlier', copy, message or ''}
end
redis.call('HSET', record, 'later', ARGV[1])
if name then
  index(record, name, job, due, lives)
end
keep(record, lives)
if not copy then
  return {'unknown'}
end
return {'done', key or ''}
