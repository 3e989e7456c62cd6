-- Functions that all scripts share. The record of a task is a hash:
--
--   state          "cancelled"; or once the registered message has arrived, "released", or "expired"
--                  if it was dropped with its job: the task can be sent again; otherwise it waits
--   copy           the name of the message that was registered last
--   void:NAME      the message of this name must not run: "superseded", or the name of the message
--                  that was sent in its place
--   arrived:NAME   the message of this name has arrived, and has run or was dropped for good
--   either         the names of messages of which one alone may run
--   due            when the registered message is due, in milliseconds since 1970
--   later          until when it was postponed, in milliseconds since 1970
--   once:WHERE     a message has arrived there
--   name, job      of a tracked task: what it is indexed by
--   key            the key that it was sent with
--   message        of a tracked task: what it takes to send it anew
--
-- A record lives until its task is due, and a margin longer. An index lives as long as the record
-- in it that lives longest.

local function clock()
  local now = redis.call('TIME')
  return now[1] * 1000 + math.floor(now[2] / 1000)
end

local function keep(key, until_ms)
  local left, now_ms = redis.call('PTTL', key), clock()
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

local function index(record, name, job, due_ms, until_ms)
  -- Tasks that never arrived, because their queue was purged, leave when their records expire.
  local expired = string.format('(%.0f', clock() - math.max(until_ms - due_ms, 0))
  for _, key in ipairs(indexes(record, name, job)) do
    redis.call('ZREMRANGEBYSCORE', key, '-inf', expired)
    redis.call('ZADD', key, due_ms, id_of(record))
    keep(key, until_ms)
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

-- What a caller is told about a task that does not wait any more.
local function outcome_of(state)
  return state == 'expired' and 'cancelled' or state
end

local function is_listed(name, names)
  return name and names and string.find(' ' .. names .. ' ', ' ' .. name .. ' ', 1, true) ~= nil
end

local function void_chain(record, copy, instead)
  while copy and copy ~= 'superseded' do
    local arrived, registered, replaced_by =
      unpack(redis.call('HMGET', record, 'arrived:' .. copy, 'copy', 'void:' .. copy))
    if arrived then
      return
    end
    redis.call('HSET', record, 'void:' .. copy, instead or 'superseded')
    if registered == copy then
      forget(record)
    end
    copy = replaced_by
  end
end

-- The message of this name must not run, nor the one that was sent in its place, unless it has
-- arrived already. "instead" is the name of the message of the same task that runs instead; without
-- it, the message is superseded by another task, as is each message that could run in its place.
local function void(record, copy, until_ms, instead)
  local either = not instead and redis.call('HGET', record, 'either')
  if is_listed(copy, either) then
    for each in string.gmatch(either, '%S+') do
      void_chain(record, each, instead)
    end
  else
    void_chain(record, copy, instead)
  end
  keep(record, until_ms)
end
