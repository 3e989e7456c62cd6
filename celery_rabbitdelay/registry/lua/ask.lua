-- Look at what has to be known before tasks are sent. Changes nothing.
--
-- KEYS  records of tasks, and keys that tasks are sent with
-- ARGV  for each: "task" or "key"
-- Returns the time in microseconds; then for each task the latest life that has run, for each key its
-- newest order and task; empty where there is none.

local now = redis.call('TIME')
local answers = {now[1] .. string.format('%06d', now[2])}
for number, key in ipairs(KEYS) do
  local found = given[number][1] == 'task' and redis.call('HGET', key, 'ran')
    or given[number][1] == 'key' and redis.call('GET', key)
  table.insert(answers, found or '')
end
return cjson.encode(answers)
