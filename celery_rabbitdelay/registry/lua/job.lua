-- Open, join, commit, abort or read a job. Its record is a hash:
--
--   id             distinguishes jobs of the same name
--   state          "open", "committed" or "aborted"
--   expires        when an open job becomes aborted
--   expired        set if the job was not committed in time
--   free           the instant from which another job may have the name
--   was:ID         the state of a former job of the name
--
-- Every hash tag has a list of its jobs by time of opening, and a list of its open jobs by expiry.
--
-- KEYS  the job
-- ARGV  "open", "join", "commit", "abort", "look", or "confirm" (restores a commit that Redis may have lost);
--       the job's id ("open"; "confirm"; "look", where it may be empty); how many milliseconds the job stays
--       open ("open"), or when its task is due ("join"); for how many further milliseconds its name stays taken
-- Returns {state, id, expires}, and "now" if this call is the first to find that the job was not committed in
-- time; an empty state if the job does not exist. "open" returns "opened", or the state of the job that has
-- the name. If the record cannot be read, a string that begins with "!".

local states, now_ms = {open = true, committed = true, aborted = true}, clock()

local function number(value)
  return string.format('%.0f', value)
end

-- Extend the expiry of a job and of the lists of jobs to an instant.
local function keep_job(job, until_ms)
  keep(job, until_ms, now_ms)
  keep(tag_of(job) .. 'jobs', until_ms, now_ms)
  keep(tag_of(job) .. 'open', until_ms, now_ms)
end

local function name_of(job)
  return string.sub(job, string.len(tag_of(job) .. 'job:') + 1)
end

-- Store the final state of a job.
local function close(job, state)
  redis.call('HSET', job, 'state', state)
  redis.call('ZREM', tag_of(job) .. 'open', name_of(job))
end

-- List a job. Every call also checks the two oldest jobs, and removes them from the list if their records have
-- expired.
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
    error('invalid state ' .. state)
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
