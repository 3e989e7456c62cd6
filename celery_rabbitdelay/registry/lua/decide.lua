-- Decide what becomes of tasks that have arrived.
--
-- KEYS  the record of each task
-- ARGV  the margin in milliseconds; then for each task: copy, due, once, the mark that this message
--       leaves if it is the first one there, whether the broker has delivered it before ("1"), and
--       what the task's job says: "run", "later" or "expired"
-- Returns for each task the verdict, or the instant until which it was postponed.

local margin, now_ms = tonumber(ARGV[1]), clock()
local verdicts = {}

-- Note that a message does not wait any more; of_record if it is the task's registered one.
local function settle(record, copy, of_record, state, lives)
  redis.call('HSET', record, 'arrived:' .. copy, '1')
  if of_record then
    redis.call('HSET', record, 'state', state)
    if state == 'expired' then
      -- It may not have been registered.
      redis.call('HSET', record, 'copy', copy)
    end
    forget(record)
  end
  keep(record, lives)
end

for number, record in ipairs(KEYS) do
  local at = 2 + (number - 1) * 6
  local copy, due, once = ARGV[at], tonumber(ARGV[at + 1]), ARGV[at + 2]
  local mark, redelivered, job = ARGV[at + 3], ARGV[at + 4] == '1', ARGV[at + 5]
  local state, later, registered, is_void, first, either = unpack(redis.call(
    'HMGET', record, 'state', 'later', 'copy', 'void:' .. copy, 'once:' .. once, 'either'))
  -- Another message of the same task may wait, of a retry for example, while this one is delivered
  -- again.
  local of_record = copy ~= '' and (not registered or registered == copy)
  local lives = math.max(due, now_ms) + margin
  local verdict = 'run'
  if state == 'cancelled' then
    verdict = 'cancelled'
  elseif copy ~= '' and is_void then
    verdict = is_void == 'superseded' and 'superseded' or 'replaced'
  elseif job == 'expired' or (state == 'expired' and registered == copy) then
    verdict = 'expired'
    if copy ~= '' then
      settle(record, copy, of_record, 'expired', lives)
    end
  elseif later and tonumber(later) > due and (of_record or copy == '') then
    verdict = later
    if of_record then
      -- Until then it waits in the levels again, so that "earlier" means earlier than that.
      redis.call('HSET', record, 'due', later)
    end
  elseif once ~= '' and first and first ~= mark and not redelivered then
    verdict = 'duplicate'
    if copy ~= '' then
      settle(record, copy, of_record, 'released', lives)
    end
  elseif job == 'run' then
    if once ~= '' then
      redis.call('HSET', record, 'once:' .. once, mark)
      keep(record, lives)
    end
    if copy ~= '' then
      if is_listed(copy, either) then
        for other in string.gmatch(either, '%S+') do
          if other ~= copy then
            void(record, other, lives, copy)
          end
        end
        -- The registered one is void now, unless it is a retry's.
        of_record = of_record or is_listed(registered, either)
      end
      settle(record, copy, of_record, 'released', lives)
    end
  else
    -- Its job may stay open for longer than the margin.
    keep(record, lives)
  end
  verdicts[number] = verdict
end
return verdicts
