-- Open, join, commit, abort or look at a job: a hash with its state ("open", "committed" or
-- "aborted") and with the instant at which it turns from open to aborted ("expires").
--
-- KEYS  the job
-- ARGV  what to do: "open", "join", "commit", "abort" or "look"; for how many milliseconds it stays
--       open ("open"); until when it lives ("open", "join")
-- Returns {state, milliseconds that it still lives}, with "expired" as a third word if it was not
-- committed in time, and "now" as a fourth one if nobody had found that out before; an empty state
-- if there is no such job, and for "open" the state that it had before.

local job, verb, now_ms = KEYS[1], ARGV[1], clock()
local state, expires, expired = unpack(redis.call('HMGET', job, 'state', 'expires', 'expired'))
local is_new = state == 'open' and now_ms >= tonumber(expires)
if is_new then
  state, expired = 'aborted', '1'
  redis.call('HSET', job, 'state', state, 'expired', expired)
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
local answer = {state or '', redis.call('PTTL', job)}
if expired then
  table.insert(answer, 'expired')
end
if is_new then
  table.insert(answer, 'now')
end
return answer
