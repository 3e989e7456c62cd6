-- Return the lives and orders for tasks that are about to be sent. The script changes nothing.
--
-- KEYS  records of tasks, and keys of tasks
-- ARGV  per key: "task" or "key"
-- Returns for a task the life of the next message under its id, empty if the task has not run; for a key the
-- order of its next task: the time in microseconds, or one more than the order of its newest task.

local now_us = clock_us()

local function look(name, kind)
  if kind == 'key' then
    -- An unreadable key has no order.
    local newest = redis.pcall('GET', name)
    local order = type(newest) == 'string' and tonumber(string.match(newest, '^(%d+) '))
    return string.format('%.0f', math.max(now_us, order and order + 1 or 0))
  end
  local ran, cancelled = unpack(redis.call('HMGET', name, 'ran', 'cancelled'))
  return ran and string.format('%.0f', next_life(ran, cancelled)) or ''
end

return cjson.encode(of_each_key(look))
