-- Count the tracked tasks that wait, by their kinds: their names and queues.
--
-- KEYS  the kinds of one hash tag
-- ARGV  when the oldest task was due that still counts as waiting; how many kinds are counted at most, those
--       with the most tasks; an instant; then instants, in their order
-- Returns {tasks of the kinds that were left out, kinds}, and of each kind: itself, how many tasks of it
-- wait, when the first was due or will be, when the first is due that is due at the instant or later (each
-- empty for none), how many are cancelled whose messages are not due at the instant, and how many are due
-- before each of the other instants.

-- When the first task is due that is due at an instant or later.
local function due_from(key, instant)
  return redis.call('ZRANGEBYSCORE', key, instant, '+inf', 'WITHSCORES', 'LIMIT', 0, 1)[2] or ''
end

-- Return how many are due before each instant. Where nothing is due for a while, none is counted in between.
local function due_before(key, least, instants)
  local counts = {}
  local function count(at)
    counts[at] = counts[at] or redis.call('ZCOUNT', key, least, '(' .. instants[at])
    return counts[at]
  end
  local function fill(first, last)
    if count(first) == count(last) then
      for at = first + 1, last - 1 do
        counts[at] = counts[first]
      end
    elseif last - first > 1 then
      local middle = math.floor((first + last) / 2)
      fill(first, middle)
      fill(middle, last)
    end
  end
  fill(1, #instants)
  return counts
end

local function call(known, least_ms, most, start_ms, ...)
  local tag, least, instants, kinds = tag_of(known), string.format('%.0f', least_ms), {}, {}
  local start = string.format('%.0f', start_ms)
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
        due_from(key, start), redis.call('ZCOUNT', cancelled, start, '+inf'),
        due_before(key, least, instants)}
      counted[#counted + 1] = counts
    end
  end
  return {left_out, counted}
end

return cjson.encode(of_each_key(call))
