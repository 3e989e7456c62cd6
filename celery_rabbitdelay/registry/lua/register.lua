-- Note a message that was sent, once the broker has confirmed it.
--
-- KEYS  the task's record
-- ARGV  copy, due, until when the record lives, key, name, job, message; name is empty if the task
--       is not tracked
-- Returns the state of the task: "waiting", "released" (it has arrived already) or "cancelled".

local record = KEYS[1]
local copy, due, lives, key, name, job, message = unpack(ARGV)
local state, arrived = unpack(redis.call('HMGET', record, 'state', 'arrived'))
if arrived == copy then
  return 'released'
end
if state == 'cancelled' then
  return 'cancelled'
end
-- A retry of a task that has run, for example.
redis.call('HDEL', record, 'state', 'later')
redis.call('HSET', record, 'copy', copy, 'due', due)
if key ~= '' then
  redis.call('HSET', record, 'key', key)
end
if name ~= '' then
  redis.call('HSET', record, 'name', name, 'job', job, 'message', message)
  index(record, name, job, due)
end
keep(record, tonumber(lives))
return 'waiting'
