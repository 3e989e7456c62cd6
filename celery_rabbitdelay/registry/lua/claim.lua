-- Make a message the newest one under a key.
--
-- KEYS  what is known about the key: a hash with the newest message's name and its task's id
--       ("newest"), and for each message that may wait, "copy:NAME" with until when its task's
--       record lives, and the name of that record
-- ARGV  task id (empty if the newest task has no delay, so that nothing waits), copy, until when its
--       record lives, its record, whether it is a retry ("1"), whether all keys are on this server
--       ("1")
-- Returns {"superseded"} if a newer message has the key: the message is a retry, or was here before.
-- Otherwise the messages that must not run any more, three words each: record, copy, until when the
-- record lives; nothing if all keys are on this server, where that is noted here.
--
-- On a cluster, it is noted in a further step, and only then are they forgotten here (disclaim.lua).
-- So if a process dies in between, whoever claims the key next gets them again.

local key = KEYS[1]
local id, copy, lives, record, is_retry, here = unpack(ARGV)
local own = 'copy:' .. copy
if here == '1' and redis.call('HEXISTS', record, 'void:' .. copy) == 1 then
  return {'superseded'}
end
local known, newest = redis.call('HEXISTS', key, own) == 1, redis.call('HGET', key, 'newest')
local newest_copy, newest_id = string.match(newest or '', '^(%S+) (.*)$')
if (known and newest_copy ~= copy) or (is_retry == '1' and newest and newest_id ~= id) then
  if here == '1' then
    void(record, copy, tonumber(lives))
  else
    redis.call('HSET', key, own, lives .. ' ' .. record)
    keep(key, tonumber(lives))
  end
  return {'superseded'}
end
local older = {}
local found = redis.call('HGETALL', key)
for at = 1, #found, 2 do
  local their_copy = string.match(found[at], '^copy:(.+)$')
  if their_copy and their_copy ~= copy then
    local their_lives, their_record = string.match(found[at + 1], '^(%S+) (.+)$')
    if here == '1' then
      void(their_record, their_copy, tonumber(their_lives), their_record == record and copy or nil)
      redis.call('HDEL', key, found[at])
    else
      table.insert(older, their_record)
      table.insert(older, their_copy)
      table.insert(older, their_lives)
    end
  end
end
redis.call('HSET', key, 'newest', copy .. ' ' .. id)
if id ~= '' then
  redis.call('HSET', key, own, lives .. ' ' .. record)
end
keep(key, tonumber(lives))
return older
