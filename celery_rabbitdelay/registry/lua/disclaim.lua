-- Forget messages under a key that are noted as superseded now: see claim.lua.
--
-- KEYS  what is known about the key
-- ARGV  for each message: its task's id, its copy

for at = 1, #ARGV, 2 do
  local field = 'task:' .. ARGV[at]
  local found = redis.call('HGET', KEYS[1], field)
  if found and string.match(found, '^(%S+) ') == ARGV[at + 1] then
    redis.call('HDEL', KEYS[1], field)
  end
end
return 'done'
