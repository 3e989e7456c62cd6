-- Functions that all scripts share. The record of a task is a hash:
--
--   state          "cancelled", or "released" once the task has arrived; otherwise it waits
--   copy           the name of the message that was registered last
--   void:NAME      why the message of this name must not run: "superseded"
--   arrived        the name of the message that has arrived
--   due            when the registered message is due, in milliseconds since 1970
--   later          until when it was postponed, in milliseconds since 1970
--   once:WHERE     a message has arrived there
--   name, job      of a tracked task: what it is indexed by
--   key            the key that it was sent with
--   message        of a tracked task: what it takes to send it anew
--
-- A record lives until its task is due, and a margin longer.

local function keep(key, until_ms)
  local left = redis.call('PTTL', key)
  local now = redis.call('TIME')
  local now_ms = now[1] * 1000 + math.floor(now[2] / 1000)
  if left < 0 or left < until_ms - now_ms then
    redis.call('PEXPIREAT', key, string.format('%.0f', math.max(until_ms, now_ms + 1000)))
  end
end

local function indexes(record, name, job)
  local index = string.match(record, '^(.-}):') .. ':due'
  local keys = {index, index .. ':task:' .. name}
  if job and job ~= '' then
    table.insert(keys, index .. ':job:' .. job)
  end
  return keys
end

local function id_of(record)
  return string.sub(record, string.len(string.match(record, '^.-}:task:')) + 1)
end

local function index(record, name, job, due_ms)
  for _, key in ipairs(indexes(record, name, job)) do
    redis.call('ZADD', key, due_ms, id_of(record))
  end
end

local function forget(record)
  local name, job = unpack(redis.call('HMGET', record, 'name', 'job'))
  if name then
    for _, key in ipairs(indexes(record, name, job)) do
      redis.call('ZREM', key, id_of(record))
    end
    redis.call('HDEL', record, 'name', 'job', 'message')
  end
end

-- The message of this name must not run, unless it has arrived already.
local function void(record, copy, until_ms)
  local found = redis.call('HMGET', record, 'arrived', 'copy')
  if found[1] == copy then
    return 0
  end
  redis.call('HSET', record, 'void:' .. copy, 'superseded')
  if found[2] == copy then
    forget(record)
  end
  keep(record, until_ms)
  return 1
end
