-- Look at what has to be known before tasks are sent. Changes nothing.
--
-- KEYS  records of tasks, and keys that tasks are sent with
-- ARGV  for each: "task" or "key"
-- Returns for each task the life of what is sent under its id now, for each key its newest order and
-- task, empty where there is none; then the time in microseconds.

local function look(key, kind)
  if kind == 'key' then
    return redis.call('GET', key) or ''
  end
  local ran, cancelled = unpack(redis.call('HMGET', key, 'ran', 'cancelled'))
  return ran and string.format('%.0f', next_life(ran, cancelled)) or ''
end

local answers, now = of_each_key(look), redis.call('TIME')
table.insert(answers, now[1] .. string.format('%06d', now[2]))
return cjson.encode(answers)
