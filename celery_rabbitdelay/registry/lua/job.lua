-- Open, join, commit, abort or look at a job. Its record is a hash:
--
--   id             tells it from other jobs of the same name
--   state          "open", "committed" or "aborted"
--   expires        when it turns from open to aborted
--   expired        set if it was not committed in time
--   free           until when no other job can have its name
--   was:ID         the state of a former job of that name
--
-- The names of the jobs of each hash tag are listed by when they were opened; those that are open also by
-- when they expire.
--
-- KEYS  the job
-- ARGV  what to do: "open", "join", "commit", "abort", "look", or "confirm" that it was committed, which
--       Redis may have lost; the job's id ("open"; "confirm"; "look", where it may be empty); for how
--       many milliseconds it stays open ("open"), or when its task is due ("join"); for how many
--       milliseconds its name is not free after that
-- Returns {state, id, expires}, and "now" if it was not committed in time and nobody had found that out
-- before; an empty state if there is no such job; for "open" "opened" if it is open now, otherwise the
-- state of the job that has the name. If the record cannot be read, a text that begins with "!".

local states, now_ms = {open = true, committed = true, aborted = true}, clock()

local function number(value)
  return string.format('%.0f', value)
end

-- Let a job live until then at least, and with it the lists of jobs.
local function keep_job(job, until_ms)
  keep(job, until_ms, now_ms)
  keep(tag_of(job) .. 'jobs', until_ms, now_ms)
  keep(tag_of(job) .. 'open', until_ms, now_ms)
end

local function name_of(job)
  return string.sub(job, string.len(tag_of(job) .. 'job:') + 1)
end

-- Note what has become of a job that was open, or seemed to have expired.
local function close(job, state)
  redis.call('HSET', job, 'state', state)
  redis.call('ZREM', tag_of(job) .. 'open', name_of(job))
end

-- For each job that is listed, the two oldest ones leave the list if they are gone.
local function list(job, expires)
  local jobs, before = tag_of(job) .. 'jobs', tag_of(job) .. 'job:'
  for _, name in ipairs(redis.call('ZRANGE', jobs, 0, 1)) do
    if redis.call('EXISTS', before .. name) == 0 then
      redis.call('ZREM', jobs, name)
    end
  end
  redis.call('ZADD', jobs, number(now_ms), name_of(job))
  redis.call('ZREMRANGEBYSCORE', tag_of(job) .. 'open', '-inf', number(now_ms))
  redis.call('ZADD', tag_of(job) .. 'open', expires, name_of(job))
end

local function call(job, verb, own, instant, margin_ms)
  local state, id, expires, expired, free =
    unpack(redis.call('HMGET', job, 'state', 'id', 'expires', 'expired', 'free'))
  if state and not states[state] then
    error('its state is ' .. state)
  end
  local is_new = state == 'open' and now_ms >= tonumber(expires)
  if is_new then
    state, expired = 'aborted', '1'
    redis.call('HSET', job, 'state', state, 'expired', expired)
  end
  if verb == 'open' then
    if state and (state ~= 'open' or id ~= own) then
      if state == 'open' or now_ms < tonumber(free) then
        return {state, id, expires}
      end
      redis.call('HSET', job, 'was:' .. id, state)
      redis.call('HDEL', job, 'expired')
    end
    if id ~= own or state ~= 'open' then
      expires = number(now_ms + instant)
      redis.call('HSET', job, 'state', 'open', 'id', own, 'expires', expires,
        'free', number(now_ms + instant + margin_ms))
      list(job, expires)
    end
    keep_job(job, now_ms + instant + margin_ms + keep_ms)
    return {'opened', own, ''}
  elseif verb == 'join' and state then
    redis.call('HSET', job, 'free', number(math.max(tonumber(free), instant + margin_ms)))
    keep_job(job, instant + margin_ms + keep_ms)
  elseif state == 'open' and (verb == 'commit' or verb == 'abort') then
    state = verb == 'commit' and 'committed' or 'aborted'
    close(job, state)
  elseif verb == 'confirm' and own == id and (state == 'open' or expired) then
    state, is_new = 'committed', false
    close(job, state)
  elseif verb == 'confirm' and redis.call('HGET', job, 'was:' .. own) == 'aborted' then
    redis.call('HSET', job, 'was:' .. own, 'committed')
  elseif verb == 'look' and own ~= '' and own ~= id then
    state, is_new = redis.call('HGET', job, 'was:' .. own), false
  end
  local answer = {state or '', id or '', expires or ''}
  if is_new then
    table.insert(answer, 'now')
  end
  return answer
end

return cjson.encode(of_each_key(call))
