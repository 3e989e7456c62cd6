-- Pause or resume the tasks of a name or for a queue, or look what is paused.
--
-- KEYS  what is paused: a hash, for each "task:NAME" and "queue:NAME" since when
-- ARGV  what to do: "pause", "resume" or "look"; the field, which "look" does not need
-- Returns since when it is paused, for "resume" since when it was; an empty text if it is not, or was
-- not. For "look" all fields, each with its value behind it. If the hash cannot be read, a text that
-- begins with "!".

local function call(paused, verb, field)
  if verb == 'look' then
    return redis.call('HGETALL', paused)
  end
  if verb == 'pause' then
    redis.call('HSETNX', paused, field, string.format('%.0f', clock()))
  end
  local since = redis.call('HGET', paused, field)
  if verb == 'resume' then
    redis.call('HDEL', paused, field)
  end
  return since or ''
end

return cjson.encode(of_each_key(call))
