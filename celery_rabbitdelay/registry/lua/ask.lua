-- Look at what has to be known before tasks are sent. Changes nothing.
--
-- KEYS  records of tasks, and keys that tasks are sent with
-- ARGV  for each: "task" or "key"
-- Returns for each task the life of what is sent under its id now, empty if it has not run; for each key
-- the order of what is sent with it now: the time in microseconds, or more if its newest task has no less.

local now_us = clock_us()

local function look(name, kind)
  if kind == 'key' then
    -- What cannot be read has no order.
    local newest = redis.pcall('GET', name)
    local order = type(newest) == 'string' and tonumber(string.match(newest, '^(%d+) '))
    return string.format('%.0f', math.max(now_us, order and order + 1 or 0))
  end
  local ran, cancelled = unpack(redis.call('HMGET', name, 'ran', 'cancelled'))
  return ran and string.format('%.0f', next_life(ran, cancelled)) or ''
end

return cjson.encode(of_each_key(look))
