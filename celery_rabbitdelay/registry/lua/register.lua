-- Record messages that RabbitMQ has confirmed.
--
-- KEYS  the record of every task
-- ARGV  per message: copy, life, attempt, due, key, order, kind, job, message; kind is empty if the task is
--       not tracked
-- Returns per message the state of its task: "waiting", "arrived" (this message was allowed to run),
-- "released" (another message of the attempt was allowed to run) or "cancelled".

local now_ms = clock()
local listed, kinds = {}, {}

local function list(record, kind, job, score)
  local id, due = id_of(record), indexes(record, kind, job)
  kinds[due[1]] = kinds[due[1]] or {}
  kinds[due[1]][kind] = true
  for _, key in ipairs(due) do
    local entries = listed[key] or {}
    listed[key] = entries
    table.insert(entries, score)
    table.insert(entries, id)
  end
end

local function register(record, copy, life, attempt, due, key, order, kind, job, message)
  local full = attempt_in(life, copy, attempt)
  local cancelled, not_before, winner, waits, first_due, listed_kind, sent = unpack(redis.call(
    'HMGET', record, 'cancelled', 'not_before', 'won:' .. full, 'waits', 'due', 'kind', 'sent'))
  if is_cancelled(cancelled, life) then
    return 'cancelled'
  end
  if winner then
    return winner == copy and 'arrived' or 'released'
  end
  if waits and life_in(full) < life_in(waits) then
    return 'waiting'
  end
  if waits == full and tonumber(first_due) < tonumber(due) then
    due = first_due
  end
  if listed_kind then
    unlist(record)
  end
  local fields = {'waits', full, 'copy', copy, 'due', due}
  if key ~= '' then
    fields[7], fields[8], fields[9], fields[10] = 'key', key, 'order', order
  elseif waits then
    redis.call('HDEL', record, 'key', 'order')
  end
  if kind ~= '' then
    local at = #fields
    fields[at + 1], fields[at + 2] = 'kind', kind
    fields[at + 3], fields[at + 4] = 'sent', waits == full and sent or string.format('%.0f', now_ms)
    if job ~= '' then
      fields[at + 5], fields[at + 6] = 'job', job
    end
    local lives = math.max(tonumber(due) + keep_ms, now_ms + 1000)
    redis.call('SET', message_of(record), message, 'PXAT', by_redis(lives))
    list(record, kind, job, math.max(tonumber(due), tonumber(not_before or '0')))
  end
  redis.call('HSET', record, unpack(fields))
  return 'waiting'
end

local states = of_each_key(function(record, copy, life, attempt, due, ...)
  local state = register(record, copy, life, attempt, due, ...)
  keep(record, tonumber(due) + keep_ms, now_ms)
  return state
end)
for key, entries in pairs(listed) do
  local last = 0
  for at = 1, #entries, 2 do
    last = math.max(last, entries[at])
  end
  -- Tasks that never arrived, for example because their queue was purged, leave the index after keep_ms.
  redis.call('ZREMRANGEBYSCORE', key, '-inf', string.format('(%.0f', now_ms - keep_ms))
  redis.call('ZADD', key, unpack(entries))
  keep(key, last + keep_ms, now_ms)
  if kinds[key] then
    local known = tag_of(key) .. 'kinds'
    for kind in pairs(kinds[key]) do
      redis.call('SADD', known, kind)
    end
    keep(known, last + keep_ms, now_ms)
  end
end
return cjson.encode(states)
