-- Find the newest task of a key: the largest order wins, and among equal orders the greater id. The result
-- does not depend on the order of the calls.
--
-- KEYS  the record of every key: a string with the order and the id of its newest task
-- ARGV  per key: order, task id, due
-- Returns per key "newest", a space, and the id of the previous newest task; "superseded"; or "replaced" if
-- the newest message of the key is another message of the same task.

local now_ms = clock()

local function claim(key, order, id, due)
  local newest, lives = redis.call('GET', key), math.max(tonumber(due), now_ms) + keep_ms
  if not newest then
    redis.call('SET', key, order .. ' ' .. id, 'PXAT', by_redis(lives))
    return 'newest '
  end
  local answer = 'newest '
  local newest_order, newest_id = string.match(newest, '^(%d+) (.*)$')
  if tonumber(order) > tonumber(newest_order)
    or tonumber(order) == tonumber(newest_order) and id > newest_id then
    redis.call('SET', key, order .. ' ' .. id, 'KEEPTTL')
    answer = answer .. newest_id
  elseif id ~= newest_id then
    answer = 'superseded'
  elseif tonumber(order) < tonumber(newest_order) then
    answer = 'replaced'
  end
  keep(key, lives, now_ms)
  return answer
end

return cjson.encode(of_each_key(claim))
