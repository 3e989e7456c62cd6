-- Let a key live longer, because a task that was sent under it was postponed.
--
-- KEYS  what is known about the key
-- ARGV  until when it lives

if redis.call('EXISTS', KEYS[1]) == 1 then
  keep(KEYS[1], tonumber(ARGV[1]))
end
return 'done'
