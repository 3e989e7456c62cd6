-- Store an edit or the deletion of a schedule, unless its record has changed meanwhile.
--
-- KEYS  the record; see decide.lua
-- ARGV  the order and the instant ahead as read before, empty for none; the new order; the instant whose
--       message is sent now; the revision, the occurrence and the message (all empty for a deletion); and
--       whether the schedule is paused: "1", "0", or empty for no change; then for how many milliseconds
--       longer a deletion is kept
-- Returns whether the edit was stored: 1 or 0.

local now_ms = clock()

local function edit(record, was_order, was_ahead, order, ahead, revision, occurrence, message, paused)
  local noted, known, deleted, begun, first =
    unpack(redis.call('HMGET', record, 'order', 'ahead', 'deleted', 'begun', 'first'))
  if (noted or '') ~= was_order or (known or '') ~= was_ahead then
    return 0
  end
  redis.call('HDEL', record, 'deleted', 'missed', 'healed')
  if deleted or revision == '' then
    redis.call('HDEL', record, 'paused', 'last')
  end
  redis.call('HSET', record, 'order', order, 'ahead', ahead)
  if revision == '' then
    redis.call('HDEL', record, 'revision', 'occurrence', 'message', 'unsent')
    redis.call('HSET', record, 'deleted', '1', 'begun', '0')
    keep(record, math.max(tonumber(known) or 0, now_ms) + keep_ms + ARGV[3], now_ms)
    return 1
  end
  if not begun or tonumber(ahead) < tonumber(first) then
    redis.call('HSET', record, 'begun', begun or order, 'first', ahead)
  end
  redis.call('HSET', record, 'revision', revision, 'occurrence', occurrence, 'message', message, 'unsent', '1')
  if paused ~= '' then
    redis.call('HSET', record, 'paused', paused)
  end
  redis.call('PERSIST', record)
  return 1
end

return cjson.encode(of_each_key(edit))
