-- Make a message the newest one under a key.
--
-- KEYS  what is known about the key: a hash with the id of the newest task ("newest"), and for each
--       task that waits, "task:ID" with its message's name, until when its record lives, and the
--       name of its record
-- ARGV  task id (empty if the newest task has no delay, so that nothing waits), copy, until when its record lives, its record, whether it is a retry ("1"),
--       whether all keys are on this server ("1")
-- Returns {"superseded"} if the message is a retry and a newer task has the key. Otherwise the
-- messages that must not run any more, three words each: record, copy, until when the record lives;
-- nothing if all keys are on this server, where that is noted here.

local key = KEYS[1]
local id, copy, lives, record, is_retry, here = unpack(ARGV)
if is_retry == '1' then
  local newest = redis.call('HGET', key, 'newest')
  if newest and newest ~= id then
    if here == '1' then
      void(record, copy, tonumber(lives))
    end
    return {'superseded'}
  end
end
local older = {}
local found = redis.call('HGETALL', key)
for at = 1, #found, 2 do
  if string.sub(found[at], 1, 5) == 'task:' then
    local their_copy, their_lives, their_record = string.match(found[at + 1], '^(%S+) (%S+) (.+)$')
    if their_copy ~= copy then
      if here == '1' then
        void(their_record, their_copy, tonumber(their_lives))
        redis.call('HDEL', key, found[at])
      else
        table.insert(older, their_record)
        table.insert(older, their_copy)
        table.insert(older, their_lives)
      end
    end
  end
end
redis.call('HSET', key, 'newest', id)
if id ~= '' then
  redis.call('HSET', key, 'task:' .. id, copy .. ' ' .. lives .. ' ' .. record)
end
keep(key, tonumber(lives))
return older
