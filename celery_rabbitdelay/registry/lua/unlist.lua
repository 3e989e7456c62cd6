-- Remove superseded tasks from the indexes of waiting tasks.
--
-- KEYS  the record of every task
-- ARGV  per task: the order of the task that supersedes it
-- Returns an empty string per task.

return cjson.encode(of_each_key(function(record, newer)
  local order = redis.call('HGET', record, 'order')
  return order and tonumber(order) < tonumber(newer) and unlist(record) or ''
end))
