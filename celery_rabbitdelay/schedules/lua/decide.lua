-- Decide whether an arrived message of a schedule is processed: the rule of schedules.
--
-- An instant is decided once, by the first of its messages that arrives with the schedule's latest order.
-- Afterwards, only that message is processed, and only if it names the arrival that decided, or if RabbitMQ has
-- redelivered it. If Redis knows only that a later instant was decided, a message that has arrived before is
-- processed, because Redis may have lost its decision. The following message is published and confirmed before
-- the arrived message is acknowledged.
-- The record of a schedule is a hash:
--
--   order        a number that grows with every edit and with the deletion
--   begun        the order of the first put that Redis still knows of; 0 after a deletion. Messages of a lower
--                order may belong to the same put, if Redis had lost its record: the backlog
--   first        the earliest instant that this put or a later put began with: earlier instants belong to the
--                backlog
--   behind       the latest instant of the backlog that was decided
--   revision     a fingerprint of the arguments of put
--   ahead        the instant whose message waits; empty if no message waits
--   done         the instant that was decided last, not counting the backlog
--   winners      the arrivals that decided the latest instants, in the order of the decisions: the
--                instant and the arrival's mark; see follows() in shared.lua
--   paused       whether the schedule is paused: its occurrences do not run
--   deleted      whether the schedule was deleted: the record is kept to drop older messages
--   occurrence, message   the occurrence and the message that the schedule sends
--   unsent, missed, healed, last   see record.py
--
-- KEYS  the records
-- ARGV  per key: the message's instant, order and revision; the mark of its arrival, the former arrivals, and
--       the generation, for follows(); and the following instant (empty for none); then whether to restore
--       decisions that Redis may have lost by restarting from an older copy: the given messages then decided
--       the latest instants
-- Returns per key whether the message is processed (or dropped); the instant whose message must be published
-- first (empty for none, or if it was published already); whether the schedule is paused; the order of the
-- message to publish; and whether Redis has lost the schedule's message.

-- The minimum and the maximum number of winners to keep; in between, keep the winners of the last ten minutes.
local WINNERS, MOST, RECENT_MS = 8, 128, 600000
local notes_again, now_ms = ARGV[3] == '1', clock()

local function text_of(number)
  return number and string.format('%.0f', number) or ''
end

local function read(text)
  local winners = {}
  for instant, mark in string.gmatch(text or '', '(%d+):(%S+)') do
    table.insert(winners, {tonumber(instant), mark})
  end
  return winners
end

local function note_winners(record, winners)
  local last, texts = winners[#winners], {}
  while #winners > MOST or #winners > WINNERS and math.abs(winners[1][1] - last[1]) > RECENT_MS do
    table.remove(winners, 1)
  end
  for number, winner in ipairs(winners) do
    texts[number] = string.format('%.0f:%s', unpack(winner))
  end
  redis.call('HSET', record, 'winners', table.concat(texts, ' '))
end

-- Store the instant ahead; a new order deletes the stored message.
local function note_ahead(record, order, revision, ahead, is_new)
  redis.call('HSET', record, 'order', order, 'revision', revision, 'ahead', ahead)
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

local function decide(record, instant, order, revision, mark, former, heir_of, following)
  local noted, begun, first, behind, known, ahead, done, texts, paused, deleted, message =
    unpack(redis.call('HMGET', record, 'order', 'begun', 'first', 'behind', 'revision', 'ahead', 'done',
      'winners', 'paused', 'deleted', 'message'))
  local winners, dropped = read(texts), {false, '', false, order, false}
  local is_new = not noted or tonumber(order) > tonumber(noted)
  local is_backlog = not is_new and tonumber(order) < tonumber(noted)
  instant, following = tonumber(instant), tonumber(following)
  ahead, done, behind = tonumber(ahead or ''), tonumber(done or '-1'), tonumber(behind or '-1')
  local own = {instant, mark}
  if notes_again then
    if noted and not is_backlog and (is_new or done < instant) then
      local before = {}
      for _, winner in ipairs(winners) do
        if winner[1] ~= instant then
          table.insert(before, winner)
        end
      end
      table.insert(before, own)
      note_winners(record, before)
      note_ahead(record, order, revision, text_of(following), is_new)
      redis.call('HSET', record, 'done', text_of(instant))
    end
    return dropped
  end
  if is_new then
    -- Redis has lost the record, or an edit of it, and the message contains everything that the record needs.
    if not noted then
      redis.call('HSET', record, 'begun', order, 'first', text_of(instant))
    end
    ahead, message = instant, false
    note_ahead(record, order, revision, text_of(instant), true)
  else
    if deleted then
      return dropped
    end
    -- A lower order belongs to an edited schedule, unless Redis had lost the record and the same schedule
    -- was put again.
    if is_backlog and (tonumber(order) >= tonumber(begun) or revision ~= known or instant >= tonumber(first)) then
      return dropped
    end
    revision = known or revision
  end
  if is_backlog and following and following >= tonumber(first) then
    following = nil -- put has sent the message of this instant
  end
  local answer = {true, text_of(following), paused == '1', order, not message}

  -- Drop a message of a decided instant; if that instant was ahead, the following instant becomes ahead.
  local function pass_over()
    if ahead ~= instant then
      return dropped
    end
    answer[1], answer[4] = false, is_new and order or noted
    note_ahead(record, answer[4], revision, text_of(following), false)
    return answer
  end

  for number, winner in ipairs(winners) do
    if winner[1] == instant then
      if not follows(winner[2], mark, former, heir_of) then
        return pass_over()
      end
      winners[number] = own
      note_winners(record, winners)
      if is_backlog then
        answer[2] = instant == behind and answer[2] or ''
      else
        answer[2] = instant == done and text_of(ahead) or ''
      end
      return answer
    end
  end
  local is_passed = instant < done and instant ~= ahead -- it may be ahead if Redis had lost the record
  if is_backlog then
    is_passed = instant <= behind
  end
  if is_passed then
    -- No winner of this instant is noted: no message of it was decided, Redis has lost that decision, or the
    -- winner is no longer kept. A message that has arrived before counts as the winner.
    local came_before = heir_of >= 0 or former ~= '..'
    if not came_before then
      return pass_over()
    end
    if #winners < WINNERS or instant > winners[1][1] then -- an old one must not displace later ones
      table.insert(winners, own)
      note_winners(record, winners)
    end
    answer[2] = ''
    return answer
  end
  table.insert(winners, own)
  note_winners(record, winners)
  if is_backlog then
    redis.call('HSET', record, 'behind', text_of(instant))
  else
    redis.call('HSET', record, 'done', text_of(instant))
    note_ahead(record, order, revision, text_of(following), false)
  end
  return answer
end

return cjson.encode(of_each_key(decide))
