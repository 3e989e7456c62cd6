-- Open, join, commit, abort or look at a job: a hash with its state ("open", "committed" or
-- "aborted") and with the instant at which it turns from open to aborted ("expires").
--
-- KEYS  the job
-- ARGV  what to do: "open", "join", "commit", "abort" or "look"; for how many milliseconds it stays
--       open ("open"); until when it lives ("open", "join")
-- Returns {state}, with "expired" as a second word if it was not committed in time; an empty state
-- if there is no such job, and for "open" the state that it had before.

local job, verb = KEYS[1], ARGV[1]
local now = redis.call('TIME')
local now_ms = now[1] * 1000 + math.floor(now[2] / 1000)
local state, expires = unpack(redis.call('HMGET', job, 'state', 'expires'))
local before = state or ''
if state == 'open' and now_ms >= tonumber(expires) then
  state = 'aborted'
  redis.call('HSET', job, 'state', state, 'expired', '1')
end
if verb == 'open' and not state then
  redis.call('HSET', job, 'state', 'open', 'expires', string.format('%.0f', now_ms + ARGV[2]))
  keep(job, tonumber(ARGV[3]))
elseif verb == 'join' and state then
  keep(job, tonumber(ARGV[3]))
elseif state == 'open' and verb == 'commit' then
  state = 'committed'
  redis.call('HSET', job, 'state', state)
elseif state == 'open' and verb == 'abort' then
  state = 'aborted'
  redis.call('HSET', job, 'state', state)
end
if verb == 'open' then
  state = before
end
if state == 'aborted' and redis.call('HEXISTS', job, 'expired') == 1 then
  return {state, 'expired'}
end
return {state or ''}
