-- Take a lease, keep it, or give it back.
--
-- KEYS  the lease, whose value is the token of who has it
-- ARGV  the token; for how many milliseconds from now on it is taken or kept, 0 to give it back; and what
--       a token begins with that it is taken over from, empty for none
-- Returns a list of whether it has this token now: 1 or 0.

local lease, token, lasts_ms, family = KEYS[1], unpack(given[1])
local held = redis.call('GET', lease)
if lasts_ms == 0 then
  if held == token then
    redis.call('DEL', lease)
  end
elseif held == token then
  redis.call('PEXPIRE', lease, lasts_ms) -- also when Redis is full
  return '[1]'
elseif not held or family ~= '' and string.sub(held, 1, string.len(family)) == family then
  redis.call('SET', lease, token, 'PX', lasts_ms)
  return '[1]'
end
return '[0]'
