-- Count the waiting tracked tasks by kind (name and queue).
--
-- KEYS  the list of kinds of one hash tag
-- ARGV  the earliest due time that still counts as waiting; the limit of separately counted kinds, largest
--       first; an instant; then further instants in order
-- Returns {tasks of all other kinds, kinds}, and per kind: the kind, the number of waiting tasks, the earliest
-- due time, the earliest due time from the instant on (both empty for none), the number of cancelled tasks
-- whose messages are due at the instant or later, and the number of tasks due before every further instant.

-- Return the earliest due time from an instant on.
local function due_from(key, instant)
  return redis.call('ZRANGEBYSCORE', key, instant, '+inf', 'WITHSCORES', 'LIMIT', 0, 1)[2] or ''
end

-- Count the tasks due before every instant, by bisection: equal counts at both ends need no more calls.
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
