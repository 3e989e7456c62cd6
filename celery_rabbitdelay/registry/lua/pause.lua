-- Pause or resume the tasks of a name or for a queue, or list the pauses.
--
-- KEYS  the pauses: a hash from "task:NAME" and "queue:NAME" to the start, followed by a space and the end
--       if the pause has one
-- ARGV  "pause", "resume" or "look"; the field; the end, empty for none ("look" needs neither)
-- Returns the start of the pause, empty if there is none; for "look" a list of alternating fields and values.
-- If the hash cannot be read, a string that begins with "!".

local now_ms = clock()

local function end_of(value)
  return tonumber(string.match(value, ' (%d+)$'))
end

local function look(paused)
  local lasting, all = {}, redis.call('HGETALL', paused)
  for at = 1, #all, 2 do
    if (end_of(all[at + 1]) or now_ms + 1) <= now_ms then
      redis.call('HDEL', paused, all[at])
    else
      table.insert(lasting, all[at])
      table.insert(lasting, all[at + 1])
    end
  end
  return lasting
end

local function call(paused, verb, field, until_ms)
  local lasting = look(paused)
  if verb == 'look' then
    return lasting
  end
  local value = redis.call('HGET', paused, field)
  local since = value and string.gsub(value, ' %d+$', '')
  if verb == 'pause' then
    since = since or string.format('%.0f', now_ms)
    redis.call('HSET', paused, field, until_ms == '' and since or since .. ' ' .. until_ms)
  else
    redis.call('HDEL', paused, field)
  end
  return since or ''
end

return cjson.encode(of_each_key(call))
