-- Take, renew or release a lease.
--
-- KEYS  the lease, whose value is the token of its holder
-- ARGV  the token; the duration in milliseconds from now, 0 to release the lease; and the beginning of the
--       holders' tokens from which the lease may be taken over, empty for none
-- Returns a list of whether this token holds the lease now: 1 or 0.

local lease, token, lasts_ms, family = KEYS[1], unpack(given[1])
local held = redis.call('GET', lease)
if lasts_ms == 0 then
  if held == token then
    redis.call('DEL', lease)
  end
elseif held == token then
  redis.call('PEXPIRE', lease, lasts_ms) -- works even if Redis is full
  return '[1]'
elseif not held or family ~= '' and string.sub(held, 1, string.len(family)) == family then
  redis.call('SET', lease, token, 'PX', lasts_ms)
  return '[1]'
end
return '[0]'
