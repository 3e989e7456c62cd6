-- The rule of schedules: what becomes of a message that has arrived.
--
-- An instant is decided once, by the first of its messages that arrives and has the schedule's latest
-- order. What follows it is published and confirmed before that message is acknowledged. The record of a
-- schedule is a hash:
--
--   order        grows with each edit, and with the deletion
--   begun        the order of the first put that Redis still knows of; 0 after a deletion. A message of a
--                lower order may be of the same put, if Redis had lost it
--   revision     stands for all that was put
--   ahead        the instant whose message waits; empty if none follows
--   winners      the messages that have decided the latest instants, in the order of the decisions; for
--                each the instant, the message's name, how often it was put back, and its arrival
--   paused       whether occurrences do not run
--   deleted      whether it was deleted: such a record only says that older messages do not run
--   occurrence, message   what the schedule sends
--   unsent, missed, healed, last   see record.py
--
-- KEYS  the records
-- ARGV  for each: the message's instant, order, revision, name, how often it was put back, the name of its
--       arrival, whether RabbitMQ has delivered it before, and the instant that follows it (empty for none);
--       then whether to note again what was decided before, because Redis may have gone back in time: then
--       each message is the one that has decided the latest instant
-- Returns for each whether it goes on (1), or is dropped (0); the instant whose message is to be published
-- before that (empty for none, or if it was published before); whether the schedule is paused, the order of
-- that message, whether Redis has lost what the schedule sends, and the time.

local WINNERS = 8
local notes_again, now_ms = ARGV[3] == '1', clock()

local function read(text)
  local winners = {}
  for instant, name, turns, arrival in string.gmatch(text or '', '(%d+):(%x*):(%d+):(%x*)') do
    table.insert(winners, {tonumber(instant), name, tonumber(turns), arrival})
  end
  return winners
end

local function write(winners)
  local texts = {}
  for number = math.max(1, #winners - WINNERS + 1), #winners do
    table.insert(texts, string.format('%.0f:%s:%.0f:%s', unpack(winners[number])))
  end
  return table.concat(texts, ' ')
end

-- Note what has decided the latest instants, and what is ahead; a new order takes what is sent with it.
local function note(record, order, revision, ahead, winners, is_new)
  redis.call('HSET', record, 'order', order, 'revision', revision, 'ahead', ahead,
    'winners', write(winners))
  redis.call('HDEL', record, 'missed', 'healed', 'unsent')
  if is_new then
    redis.call('HDEL', record, 'deleted', 'occurrence', 'message')
  end
  if ahead == '' then
    keep(record, now_ms + keep_ms, now_ms)
  else
    redis.call('PERSIST', record)
  end
end

local function decide(record, instant, order, revision, name, turns, arrival, is_redelivered, following)
  local noted, begun, known, ahead, texts, paused, deleted, message =
    unpack(redis.call('HMGET', record, 'order', 'begun', 'revision', 'ahead', 'winners', 'paused',
      'deleted', 'message'))
  local winners, time = read(texts), string.format('%.0f', now_ms)
  local dropped = {0, '', 0, order, 0, time}
  local done = #winners > 0 and winners[#winners][1] or -1
  local is_new, is_backlog = not noted or tonumber(order) > tonumber(noted), false
  instant, turns = tonumber(instant), tonumber(turns)
  ahead = tonumber(ahead or '')
  if notes_again then
    if noted and tonumber(order) >= tonumber(noted) and (is_new or done < instant) then
      local before = {}
      for _, winner in ipairs(winners) do
        if winner[1] < instant then
          table.insert(before, winner)
        end
      end
      table.insert(before, {instant, name, turns, arrival})
      note(record, order, revision, following, before, is_new)
    end
    return dropped
  end
  if is_new then
    -- Redis has lost the record, or an edit of it: the message has all that it takes.
    redis.call('HSETNX', record, 'begun', order)
    ahead, message = instant, false
    note(record, order, revision, string.format('%.0f', instant), winners, true)
  elseif deleted then
    return dropped
  elseif tonumber(order) < tonumber(noted) then
    -- Unless Redis had lost the record, and the same was put again: then this is the backlog. What is later
    -- than the instant ahead comes in its turn.
    if tonumber(order) >= tonumber(begun) or revision ~= known or ahead and instant > ahead then
      return dropped
    end
    order, is_backlog = noted, true
  end
  if not is_new and known then
    revision = known
  end

  local answer = {1, following, paused == '1' and 1 or 0, order, message and 0 or 1, time}

  -- Drop a message of an instant that was decided; if that was ahead, what follows it is.
  local function pass_over()
    if ahead ~= instant then
      return dropped
    end
    note(record, order, revision, following, winners, false)
    answer[1] = 0
    return answer
  end

  local own = {instant, name, turns, arrival}
  for number, winner in ipairs(winners) do
    if winner[1] == instant then
      local is_same = is_redelivered or arrival == winner[4]
      if name ~= winner[2] or turns < winner[3] or turns == winner[3] and not is_same then
        return pass_over()
      end
      winners[number] = own
      answer[2] = instant == done and ahead and string.format('%.0f', ahead) or ''
      redis.call('HSET', record, 'winners', write(winners))
      return answer
    end
  end
  -- What has decided a later instant may have been sent since Redis has lost the record.
  if instant < done and not ((is_backlog or instant == ahead) and #winners < WINNERS) then
    -- It was left out as too old, or it is forgotten which message has decided it: then one that has come
    -- before counts as that.
    if #winners < WINNERS or instant > winners[1][1] or not (is_redelivered or turns > 0) then
      return pass_over()
    end
    answer[2] = ''
    return answer
  end
  if is_backlog and tonumber(following) ~= ahead then
    -- What was put again is further ahead: it waits until the backlog comes to it.
    order = string.format('%.0f', tonumber(order) + 1)
    answer[4] = order
  end
  table.insert(winners, own)
  note(record, order, revision, following, winners, false)
  return answer
end

return cjson.encode(of_each_key(decide))
