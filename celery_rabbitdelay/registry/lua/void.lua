-- Note that messages must not run any more: see claim.lua.
--
-- KEYS  the records of the tasks
-- ARGV  for each: the message's copy, until when the record lives, and the copy of the message of
--       the same task that runs instead; empty if it is another task

for number, record in ipairs(KEYS) do
  local copy, lives, instead = ARGV[3 * number - 2], ARGV[3 * number - 1], ARGV[3 * number]
  void(record, copy, tonumber(lives), instead ~= '' and instead or nil)
end
return 'done'
