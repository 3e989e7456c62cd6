-- Say which task is the newest under a key: the one with the largest order, and of two with the same
-- order the one with the greater id, whoever says it first.
--
-- KEYS  what is known about each key: a text, the order and the id of its newest task
-- ARGV  for each: order, task id, due
-- Returns for each {"newest", the id of the task that was the newest before}; {"superseded", ""}, or
-- {"replaced", ""} if the newest message under the key is another one of the same task.

local now_ms = clock()

local function claim(key, order, id, due)
  local newest, lives = redis.call('GET', key), math.max(tonumber(due), now_ms) + keep_ms
  if not newest then
    redis.call('SET', key, order .. ' ' .. id, 'PXAT', string.format('%.0f', lives))
    return {'newest', ''}
  end
  local answer = {'newest', ''}
  local newest_order, newest_id = string.match(newest, '^(%d+) (.*)$')
  if tonumber(order) > tonumber(newest_order)
    or tonumber(order) == tonumber(newest_order) and id > newest_id then
    redis.call('SET', key, order .. ' ' .. id, 'KEEPTTL')
    answer[2] = newest_id
  elseif id ~= newest_id then
    answer[1] = 'superseded'
  elseif tonumber(order) < tonumber(newest_order) then
    answer[1] = 'replaced'
  end
  keep(key, lives, now_ms)
  return answer
end

local answers = {}
for number, key in ipairs(KEYS) do
  local readable, answer = pcall(claim, key, unpack(given[number]))
  answers[number] = readable and answer
    or {'!' .. tostring(type(answer) == 'table' and answer.err or answer), ''}
end
return cjson.encode(answers)
