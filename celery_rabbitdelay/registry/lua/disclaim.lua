-- Forget messages under a key that are noted as superseded now: see claim.lua.
--
-- KEYS  what is known about the key
-- ARGV  the name of each message

for _, copy in ipairs(ARGV) do
  redis.call('HDEL', KEYS[1], 'copy:' .. copy)
end
return 'done'
