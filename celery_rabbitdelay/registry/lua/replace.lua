-- Let a second message of a task replace the first one, once the broker has confirmed it.
--
-- KEYS  the task's record
-- ARGV  the first message's copy, the second one's, the due time of the second, until when the
--       record lives
-- Returns "done", "released" (the first one has arrived) or "cancelled"; in the latter two cases the
-- second one must not run.

local record, first, second, due, lives = KEYS[1], ARGV[1], ARGV[2], ARGV[3], tonumber(ARGV[4])
local state, copy, name, job, first_arrived, second_arrived = unpack(redis.call(
  'HMGET', record, 'state', 'copy', 'name', 'job', 'arrived:' .. first, 'arrived:' .. second))
if second_arrived then
  void(record, first, lives, second)
  if not state and (not copy or copy == first) then
    redis.call('HSET', record, 'state', 'released', 'copy', second)
  end
  return 'done'
end
if first_arrived then
  void(record, second, lives, first)
  return 'released'
end
if state then
  void(record, second, lives, state == 'released' and first or nil)
  return outcome_of(state)
end
-- Another call may have replaced the first message meanwhile: the later call wins.
local current = copy or first
if current == second then
  return 'done'
end
if redis.call('HEXISTS', record, 'void:' .. current) == 1 then
  void(record, second, lives)
  return 'cancelled'
end
redis.call('HSET', record, 'void:' .. current, second, 'copy', second, 'due', due)
redis.call('HDEL', record, 'later')
if name then
  index(record, name, job, tonumber(due), lives)
end
keep(record, lives)
return 'done'
