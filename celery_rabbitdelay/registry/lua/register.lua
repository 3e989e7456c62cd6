-- Note a message that was sent, once the broker has confirmed it.
--
-- KEYS  the task's record
-- ARGV  copy, due, until when the record lives, key, name, job, message; name is empty if the task
--       is not tracked
-- Returns the state of the task: "waiting", "released" (it has arrived already), "cancelled", or
-- "superseded" (a newer one has the key already).

local record = KEYS[1]
local copy, due, lives, key, name, job, message = unpack(ARGV)
local state, arrived, is_void, known, later =
  unpack(redis.call('HMGET', record, 'state', 'arrived:' .. copy, 'void:' .. copy, 'copy', 'later'))
if arrived then
  if state == 'expired' and known ~= copy then
    -- An earlier message was dropped with its job, and this one has run already.
    redis.call('HSET', record, 'state', 'released', 'copy', copy)
  end
  return 'released'
end
if state == 'cancelled' then
  return 'cancelled'
end
if is_void then
  return 'superseded'
end
if state or known then
  -- A retry of a task that has run, for example: it was an earlier message that was postponed.
  redis.call('HDEL', record, 'state', 'later')
  later = false
end
redis.call('HSET', record, 'copy', copy, 'due', due)
if key ~= '' then
  redis.call('HSET', record, 'key', key)
else
  redis.call('HDEL', record, 'key')
end
if name ~= '' then
  local last = math.max(tonumber(due), tonumber(later or due))
  forget(record)
  redis.call('HSET', record, 'name', name, 'job', job, 'message', message)
  index(record, name, job, last, tonumber(lives) + last - tonumber(due))
end
keep(record, tonumber(lives))
return 'waiting'
