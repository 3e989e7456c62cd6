-- Decide whether arrived tasks run: the rule of the registry.
-- shared.lua explains the words life, attempt, won, once and mark.
--
-- KEYS  the record of every task
-- ARGV  per task: copy, life, attempt, due, the queue if only one message of the attempt may run there, the
--       mark of this arrival, the names of the arrivals that put the message back (between dots), the latest
--       generation of which this arrival may replace any arrival, whether the task was sent with an option of
--       the registry, the instant until which the task was last put back, the verdict of its key and job
--       ("run", "later", "expired", "superseded" or "replaced", or a string that begins with "!" if one of them
--       cannot be read), the reason to record if that verdict drops the task, and whether the task is paused;
--       then whether to record the decision ("1")
-- Returns per task the verdict, "paused" if only a pause keeps the task from running, or the due time that the
-- task was postponed to.

local notes, now_ms = ARGV[3] == '1', clock()

local function arrive(record, copy, life, attempt, due, queue, mark, former, heir_of, has_options, put_back,
  word, dropped, is_paused)
  due = tonumber(due)
  local full = attempt_in(life, copy, attempt)
  local won, once = 'won:' .. full, 'once:' .. attempt .. '@' .. queue
  local cancelled, not_before, winner, first, waits, first_due, ran =
    unpack(redis.call('HMGET', record, 'cancelled', 'not_before', won, once, 'waits', 'due', 'ran'))
  if is_cancelled(cancelled, life) then
    return 'cancelled'
  end
  if copy ~= '' and winner and winner ~= copy then
    return 'replaced'
  end
  if queue ~= '' and first then
    if not follows(first, mark, former, heir_of) then
      return 'duplicate'
    end
    if notes then
      -- Record the mark even if the message is put back, so that its later arrivals may replace this arrival.
      redis.call('HSET', record, once, mark)
      keep(record, math.max(due, now_ms) + keep_ms, now_ms)
    end
    return is_paused and 'paused' or 'run'
  end
  if copy == '' or not winner then
    if string.sub(word, 1, 1) == '!' then
      return word
    end
    if word == 'superseded' or word == 'replaced' or word == 'expired' then
      if notes and waits == full and redis.call('HGET', record, 'copy') == copy then
        settle(record)
        if dropped ~= '' then
          redis.call('HSET', record, 'dropped', dropped)
          keep(record, math.max(due, now_ms) + keep_ms, now_ms)
        end
      end
      return word
    end
    if word == 'later' then
      if notes and waits then
        keep(record, now_ms + keep_ms, now_ms)
      end
      return word
    end
    local is_known = waits == full and tonumber(first_due) <= due
    if has_options and not is_known and math.max(due, put_back) + keep_ms < now_ms then
      return 'forgotten'
    end
    if not_before and tonumber(not_before) > due then
      if notes and waits == full then
        -- The message waits in the levels until then, so "earlier" means earlier than not_before.
        redis.call('HSET', record, 'due', not_before)
      end
      return not_before
    end
  end
  if is_paused then
    if notes then
      keep(record, now_ms + keep_ms, now_ms)
    end
    return 'paused'
  end
  if notes and (copy ~= '' or queue ~= '') then
    if copy ~= '' and not winner then
      redis.call('HSET', record, won, copy, 'ran', math.max(tonumber(ran or '0'), tonumber(life), 0))
      if waits == full then
        settle(record)
      else
        redis.call('HDEL', record, 'dropped')
      end
    end
    if queue ~= '' then
      redis.call('HSET', record, once, mark)
    end
    keep(record, math.max(due, now_ms) + keep_ms, now_ms)
  end
  return 'run'
end

return cjson.encode(of_each_key(arrive))
