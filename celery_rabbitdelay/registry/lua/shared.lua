-- Functions that all scripts share. The record of a task is a hash:
--
--   cancelled      the life (see below) up to which the task is cancelled; at least one that no message
--                  had begun by then, if the task had run
--   not_before     until when it was postponed
--   won:ATTEMPT    the name of the message that was let run
--   once:ATTEMPT   with "@" and a queue: the mark of what was let run there last: the message's name, how
--                  often it was put back, and the name of its arrival, with dots between them
--   ran            the latest life that a message was let run of
--
-- and of the attempt that waits, if it is registered:
--
--   waits          which one
--   copy           the name of the message that was registered last
--   due            when the first of its messages is due
--   key, order     its key, and its order among the tasks of that key
--   kind, job      of a tracked task: what it is indexed by; the kind is its name and its queue
--   sent           likewise: when its first message was registered
--
-- What it takes to send a tracked task anew is a text beside its record, which stays small that way.
--
-- All scripts take a list of keys, for how many milliseconds a decision outlives what it is about, and
-- a list in JSON with the arguments for each key. They return JSON, which Python reads faster than what
-- Redis makes of a table.
--
-- All instants are milliseconds since 1970. An attempt is "LIFE.RETRIES.REPLACEMENTS". A task that
-- is sent anew under its id, after it has run, begins a new life: 1, 2, and so on. A message whose
-- sender could not ask for its life has one of its own: -1, or "?" and its name.

-- A test that travels in time adds its own time to the first argument, in microseconds, and shortens
-- the lives of all keys on its way.

local keep_ms, own_us = string.match(ARGV[1], '^(%d+) ?(%d*)$')
local given = ARGV[2] and cjson.decode(ARGV[2])
keep_ms, own_us = tonumber(keep_ms), tonumber(own_us)

local function redis_us()
  local now = redis.call('TIME')
  return now[1] * 1000000 + now[2]
end

local function clock_us()
  return own_us or redis_us()
end

local function clock()
  return math.floor(clock_us() / 1000)
end

-- An instant of clock() by the clock of Redis, which the expiry of a key goes by.
local function by_redis(ms)
  return string.format('%.0f', own_us and ms + (redis_us() - own_us) / 1000 or ms)
end

-- Return what a function says of each key and its arguments. If Redis or Lua cannot read what is noted
-- there, its answer begins with "!" and says so, and the other keys have theirs.
local function of_each_key(say)
  local answers = {}
  for number, key in ipairs(KEYS) do
    local is_readable, answer = pcall(say, key, unpack(given[number]))
    -- What Redis refuses is a table, and what Lua refuses is a text.
    answers[number] = is_readable and answer
      or '!' .. tostring(type(answer) == 'table' and answer.err or answer)
  end
  return answers
end

-- Let a key live until then at least.
local function keep(key, until_ms, now_ms)
  local left = redis.call('PTTL', key)
  if left < 0 or left < until_ms - now_ms then
    redis.call('PEXPIREAT', key, by_redis(math.max(until_ms, now_ms + 1000)))
  end
end

local function tag_of(key)
  return string.match(key, '^(.-}:)')
end

local function indexes(record, kind, job)
  local index = tag_of(record) .. 'due'
  if job and job ~= '' then
    return {index, index .. ':kind:' .. kind, index .. ':job:' .. job}
  end
  return {index, index .. ':kind:' .. kind}
end

local function id_of(record)
  return string.sub(record, string.len(string.match(record, '^.-}:task:')) + 1)
end

local function message_of(record)
  return (string.gsub(record, '}:task:', '}:message:', 1))
end

-- Take a task from the lists of those that wait.
local function unlist(record)
  local kind, job = unpack(redis.call('HMGET', record, 'kind', 'job'))
  if kind then
    for _, key in ipairs(indexes(record, kind, job)) do
      redis.call('ZREM', key, id_of(record))
    end
    redis.call('HDEL', record, 'kind', 'job', 'sent')
    redis.call('DEL', message_of(record))
  end
end

-- Forget all that was noted about the attempt that waits.
local function settle(record)
  unlist(record)
  redis.call('HDEL', record, 'waits', 'copy', 'due', 'key', 'order')
end

local function attempt_in(life, copy, attempt)
  return (life == '-1' and '?' .. copy or life) .. '.' .. attempt
end

local function life_in(attempt)
  return tonumber(string.match(attempt, '^(%d+)%.') or '-1')
end

-- The latest life of which anything is known.
local function latest(ran, waits)
  return math.max(tonumber(ran or '0'), waits and life_in(waits) or 0)
end

-- The life of what is sent under a task's id after it has run: neither that nor cancelled.
local function next_life(ran, cancelled)
  return math.max(tonumber(ran), tonumber(cancelled or '0')) + 1
end

local function is_cancelled(cancelled, life)
  return cancelled and tonumber(life) <= tonumber(cancelled)
end
