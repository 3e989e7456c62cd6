-- Postpone a task, to later or to earlier.
--
-- KEYS  the task's record
-- ARGV  the new due time; the order of the newest task under the key of this one, and that key; both
--       empty if it is not known whether it has one; then whether to note it if nothing is known of the
--       task ("1")
-- Returns {outcome}; or {"key", key} if that has to be known; or if it is to run earlier than its first
-- message is due, {"earlier", kind, message}, where the message is empty, and nothing was changed, if the
-- task is not tracked.

local record, due, newest, of_key = KEYS[1], unpack(given[1])
local cancelled, ran, waits, known, kind, job, key, order = unpack(redis.call(
  'HMGET', record, 'cancelled', 'ran', 'waits', 'due', 'kind', 'job', 'key', 'order'))
if is_cancelled(cancelled, latest(ran, waits)) then
  return cjson.encode({'cancelled'})
end
if key and key ~= of_key then
  return cjson.encode({'key', key})
end
if key and newest ~= '' and tonumber(order) < tonumber(newest) then
  return cjson.encode({'cancelled'})
end
if ran and not waits then
  return cjson.encode({'released'})
end
if not waits and ARGV[3] ~= '1' then
  return cjson.encode({'unknown'})
end
local is_earlier = known and tonumber(due) < tonumber(known)
local message = is_earlier and kind and redis.call('GET', message_of(record))
if is_earlier and not message then
  return cjson.encode({'earlier', '', ''})
end
redis.call('HSET', record, 'not_before', due)
local now_ms, last = clock(), tonumber(due) + keep_ms
keep(record, last, now_ms)
if is_earlier then
  return cjson.encode({'earlier', kind, message})
end
if kind then
  keep(message_of(record), last, now_ms)
  keep(tag_of(record) .. 'kinds', last, now_ms)
  for _, each in ipairs(indexes(record, kind, job)) do
    redis.call('ZADD', each, due, id_of(record))
    keep(each, last, now_ms)
  end
end
return cjson.encode({waits and 'done' or 'noted'})
