-- Change the due time of a task to a later or an earlier time.
--
-- KEYS  the task's record
-- ARGV  the new due time; the order of the newest task with the same key, and the key, both empty if the key
--       is not known yet; then whether to record the postponement of an unknown task ("1")
-- Returns {outcome}; or {"key", key} if the caller has to repeat the call with the key; or, if the new due time
-- is earlier than the due time of the first message, {"earlier", kind, message}. For a task that is not
-- tracked, the message is empty, and nothing was changed.

local also_future, now_ms = ARGV[3] == '1', clock()

local function postpone(record, due, newest, of_key)
  local cancelled, ran, waits, known, kind, job, key, order = unpack(redis.call(
    'HMGET', record, 'cancelled', 'ran', 'waits', 'due', 'kind', 'job', 'key', 'order'))
  if is_cancelled(cancelled, latest(ran, waits)) then
    return {'cancelled'}
  end
  if key and key ~= of_key then
    return {'key', key}
  end
  if key and newest ~= '' and tonumber(order) < tonumber(newest) then
    return {'cancelled'}
  end
  if ran and not waits then
    return {'released'}
  end
  if not waits and not also_future then
    return {'unknown'}
  end
  local is_earlier = known and tonumber(due) < tonumber(known)
  local message = is_earlier and kind and redis.call('GET', message_of(record))
  if is_earlier and not message then
    return {'earlier', '', ''}
  end
  redis.call('HSET', record, 'not_before', due)
  local last = tonumber(due) + keep_ms
  keep(record, last, now_ms)
  if is_earlier then
    return {'earlier', kind, message}
  end
  if kind then
    keep(message_of(record), last, now_ms)
    keep(tag_of(record) .. 'kinds', last, now_ms)
    for _, each in ipairs(indexes(record, kind, job)) do
      redis.call('ZADD', each, due, id_of(record))
      keep(each, last, now_ms)
    end
  end
  return {waits and 'done' or 'noted'}
end

return cjson.encode(of_each_key(postpone))
