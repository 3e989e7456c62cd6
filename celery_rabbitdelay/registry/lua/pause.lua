-- Pause or resume the tasks of a name or for a queue, or look what is paused.
--
-- KEYS  what is paused: a hash, for each "task:NAME" and "queue:NAME" since when, and behind a blank until
--       when, if it ends by itself
-- ARGV  what to do: "pause", "resume" or "look"; the field, and until when, empty for no end; "look" needs
--       neither
-- Returns since when it is paused, for "resume" since when it was; an empty text if it is not, or was
-- not. For "look" all fields, each with its value behind it. If the hash cannot be read, a text that
-- begins with "!".

local now_ms = clock()

local function end_of(value)
  return tonumber(string.match(value, ' (%d+)$'))
end

local function look(paused)
  local lasting, told = {}, redis.call('HGETALL', paused)
  for at = 1, #told, 2 do
    if (end_of(told[at + 1]) or now_ms + 1) <= now_ms then
      redis.call('HDEL', paused, told[at])
    else
      table.insert(lasting, told[at])
      table.insert(lasting, told[at + 1])
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
