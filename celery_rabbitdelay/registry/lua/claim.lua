-- Say which task is the newest under a key: the one with the largest order, and of two with the same
-- order the one with the greater id, whoever says it first.
--
-- KEYS  what is known about each key: a text, the order and the id of its newest task
-- ARGV  for each: order, task id, due
-- Returns for each "newest", a space, and the id of the task that was the newest before; "superseded";
-- or "replaced" if the newest message under the key is another one of the same task.

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
