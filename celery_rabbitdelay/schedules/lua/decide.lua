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
--   winners      the messages that have decided the latest instants, the latest one last; for each the
--                instant, the message's name, how often it was put back, and its arrival
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
-- Returns for each whether it goes on (1 or 0), the instant whose message is to be published (empty for
-- none, or if it was published before), whether the schedule is paused, the order of that message, whether
-- Redis has lost what the schedule sends, and the time.

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

-- Note that a message has decided an instant; a new order takes what is sent with it.
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
  local winners, dropped = read(texts), {0, '', 0, order, 0, string.format('%.0f', now_ms)}
  local done = #winners > 0 and winners[#winners][1] or -1
  local is_new = not noted or tonumber(order) > tonumber(noted)
  instant, turns = tonumber(instant), tonumber(turns)
  if notes_again then
    if noted and not deleted and tonumber(order) >= tonumber(noted) and (is_new or done < instant) then
      while #winners > 0 and winners[#winners][1] >= instant do
        table.remove(winners)
      end
      table.insert(winners, {instant, name, turns, arrival})
      note(record, order, revision, following, winners, is_new)
    end
    return dropped
  end
  if is_new then
    -- Redis has lost the record, or an edit of it: the message has all that it takes.
    if not noted then
      redis.call('HSET', record, 'begun', order)
    end
    message = false
  elseif deleted then
    return dropped
  elseif tonumber(order) < tonumber(noted) then
    -- Unless Redis had lost the record, and the same was put again.
    if tonumber(order) >= tonumber(begun) or revision ~= known then
      return dropped
    end
    order = noted
  end
  local answer = {1, following, paused == '1' and 1 or 0, order, message and 0 or 1, dropped[6]}
  local own = {instant, name, turns, arrival}
  for number, winner in ipairs(winners) do
    if winner[1] == instant then
      local is_same = is_redelivered or arrival == winner[4]
      if name ~= winner[2] or turns < winner[3] or turns == winner[3] and not is_same then
        return dropped
      end
      winners[number] = own
      answer[2] = instant == done and ahead or ''
      redis.call('HSET', record, 'winners', write(winners))
      return answer
    end
  end
  if instant < done then
    -- It was left out as too old, or it is forgotten which message has decided it: then one that has come
    -- before counts as that.
    answer[2] = ''
    local is_known = #winners < WINNERS or instant > winners[1][1]
    return (is_redelivered or turns > 0) and not is_known and answer or dropped
  end
  table.insert(winners, own)
  note(record, order, revision, following, winners, is_new)
  return answer
end

return cjson.encode(of_each_key(decide))
