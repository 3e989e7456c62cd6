-- Functions that all scripts share. The record of a task is a hash:
--
--   cancelled      the life (see below) up to which the task is cancelled; if the task had already run,
--                  this includes the next life
--   not_before     the due time that the task was postponed to
--   won:ATTEMPT    the name of the message that was allowed to run
--   once:ATTEMPT   with "@" and a queue: the mark of the last message that was allowed to run there: its
--                  name, the number of times it was put back, and its arrival's name, separated by dots
--   ran            the latest life of which a message was allowed to run
--   dropped        "superseded" and the key, or "expired" and the job, if the last attempt was dropped when
--                  it arrived, and no message has run since; no script reads it
--
-- and for the registered attempt that waits:
--
--   waits          the attempt
--   copy           the name of the message that was registered last
--   due            the earliest due time of its messages
--   key, order     the task's key, and its order among the tasks with that key
--   kind, job      the indexes of a tracked task; the kind is its name and its queue
--   sent           when the first message of a tracked task was registered
--
-- The message of a tracked task is stored in a key of its own, which keeps the record small.
--
-- All scripts take a list of keys, the time in milliseconds for which a decision is kept after its task, and a
-- JSON list of the arguments per key. All scripts return JSON, which Python parses faster than the reply that
-- Redis makes of a table.
--
-- All instants are milliseconds since 1970. An attempt is "LIFE.RETRIES.REPLACEMENTS". Sending a task
-- again under its id, after it has run, begins a new life: 1, 2, and so on. A message whose sender could
-- not ask Redis for its life has a life of its own: -1, or "?" and its name.

-- A time-traveling test adds its own time to the first argument, in microseconds, and shortens the
-- expiry of all keys as it travels.

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

-- Convert an instant of clock() to the clock of Redis, which decides when keys expire.
local function by_redis(ms)
  return string.format('%.0f', own_us and ms + (redis_us() - own_us) / 1000 or ms)
end

-- Call a function for every key with its arguments, and return the answers. If the key cannot be read,
-- its answer is "!" and the error; the other keys are not affected.
local function of_each_key(say)
  local answers = {}
  for number, key in ipairs(KEYS) do
    local is_readable, answer = pcall(say, key, unpack(given[number]))
    -- An error of Redis is a table, an error of Lua is a string.
    answers[number] = is_readable and answer
      or '!' .. tostring(type(answer) == 'table' and answer.err or answer)
  end
  return answers
end

-- Extend the expiry of a key to an instant.
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

-- Remove a task from the indexes of waiting tasks.
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

-- Delete the fields of the waiting attempt.
local function settle(record)
  unlist(record)
  redis.call('HDEL', record, 'waits', 'copy', 'due', 'key', 'order', 'dropped')
end

local function attempt_in(life, copy, attempt)
  return (life == '-1' and '?' .. copy or life) .. '.' .. attempt
end

local function life_in(attempt)
  return tonumber(string.match(attempt, '^(%d+)%.') or '-1')
end

-- Return the latest known life.
local function latest(ran, waits)
  return math.max(tonumber(ran or '0'), waits and life_in(waits) or 0)
end

-- Return the life of the next message under a task's id: later than all lives that ran or are cancelled.
local function next_life(ran, cancelled)
  return math.max(tonumber(ran), tonumber(cancelled or '0')) + 1
end

local function is_cancelled(cancelled, life)
  return cancelled and tonumber(life) <= tonumber(cancelled)
end

-- Return whether an arrival may replace the arrival that was allowed to run: both are the same arrival, and the
-- answer was lost; or the former arrival has put its message back; or RabbitMQ has redelivered the message.
--
-- first, mark   the marks of the arrival that was allowed to run, and of the arrival that asks: the name of the
--               message, how often it was put back, and the name of the arrival, separated by dots
-- former        the names of the arrivals that have put the message back, between dots
-- heir_of       the latest generation of which the asking arrival may replace any arrival; -1 for none
local function follows(first, mark, former, heir_of)
  local name, generation, arrival = string.match(first, '^([^.]*)%.(%d+)%.(.*)$')
  if not name then
    -- Another version has written this mark, and only the name of the message is known.
    name, generation, arrival = string.match(first, '^[^.]*'), 0, '?'
  end
  return first == mark or name == string.match(mark, '^[^.]*')
    and (tonumber(generation) <= heir_of or string.find(former, '.' .. arrival .. '.', 1, true))
end
