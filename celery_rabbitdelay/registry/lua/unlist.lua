-- Take tasks that are superseded from the lists of those that wait.
--
-- KEYS  the record of each task
-- ARGV  for each: the order of the task that has superseded it
-- Returns for each whether it was one (1) or not (0).

local answers = {}
for number, record in ipairs(KEYS) do
  local order = redis.call('HGET', record, 'order')
  answers[number] = order and tonumber(order) < tonumber(given[number][1]) and 1 or 0
  if answers[number] == 1 then
    unlist(record)
  end
end
return cjson.encode(answers)
