-- Take tasks that are superseded from the lists of those that wait.
--
-- KEYS  the record of each task
-- ARGV  for each: the order of the task that has superseded it
-- Returns an empty text for each.

return cjson.encode(of_each_key(function(record, newer)
  local order = redis.call('HGET', record, 'order')
  return order and tonumber(order) < tonumber(newer) and unlist(record) or ''
end))
