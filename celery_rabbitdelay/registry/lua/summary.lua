-- Count the tracked tasks that wait, by their kinds: their names and queues.
--
-- KEYS  the kinds of one hash tag
-- ARGV  when the oldest task was due that still counts as waiting; how many kinds are counted at most, those
--       with the most tasks; then instants
-- Returns {tasks of the kinds that were left out, kinds}, and of each kind: itself, how many tasks of it
-- wait, when the first was due or will be, when the first is due that is due at the first instant or later
-- (each empty for none), how many are cancelled whose messages are not due at the first instant, and how
-- many are due before each instant.

-- When the first task is due that is due at an instant or later.
local function due_from(key, instant)
  return redis.call('ZRANGEBYSCORE', key, instant, '+inf', 'WITHSCORES', 'LIMIT', 0, 1)[2] or ''
end

local function call(known, least_ms, most, ...)
  local tag, least, instants, kinds = tag_of(known), string.format('%.0f', least_ms), {}, {}
  for at, instant in ipairs({...}) do
    instants[at] = string.format('%.0f', instant)
  end
  for _, kind in ipairs(redis.call('SMEMBERS', known)) do
    local key, cancelled = tag .. 'due:kind:' .. kind, tag .. 'cancelled:' .. kind
    local total = redis.call('ZCARD', key)
    if total == 0 and redis.call('EXISTS', cancelled) == 0 then
      redis.call('SREM', known, kind)
    else
      table.insert(kinds, {total, kind, key, cancelled})
    end
  end
  table.sort(kinds, function(one, other)
    return one[1] > other[1]
  end)
  local left_out, counted = 0, {}
  for at, each in ipairs(kinds) do
    local total, kind, key, cancelled = unpack(each)
    if at > most then
      left_out = left_out + total
    else
      local counts = {kind, redis.call('ZCOUNT', key, least, '+inf'), due_from(key, least),
        due_from(key, instants[1]), redis.call('ZCOUNT', cancelled, instants[1], '+inf')}
      for _, instant in ipairs(instants) do
        table.insert(counts, redis.call('ZCOUNT', key, least, '(' .. instant))
      end
      counted[#counted + 1] = counts
    end
  end
  return {left_out, counted}
end

return cjson.encode(of_each_key(call))
