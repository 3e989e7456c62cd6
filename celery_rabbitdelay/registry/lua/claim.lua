-- Say which task is the newest under a key: the one with the largest order, and of two with the same
-- order the one with the greater id, whoever says it first.
--
-- KEYS  what is known about each key: a text, the order and the id of its newest task
-- ARGV  for how many milliseconds that outlives the task; then for each: order, task id, due
-- Returns for each {"newest", the id of the task that was the newest before}; {"superseded", ""}, or
-- {"replaced", ""} if the newest message under the key is another one of the same task.

local keep_ms, now_ms = tonumber(ARGV[1]), clock()

local function claim(key, order, id, due)
  local newest_order, newest_id = string.match(redis.call('GET', key) or '0 ', '^(%d+) (.*)$')
  local answer = {'newest', ''}
  if tonumber(order) > tonumber(newest_order)
    or tonumber(order) == tonumber(newest_order) and id > newest_id then
    redis.call('SET', key, order .. ' ' .. id, 'KEEPTTL')
    answer[2] = newest_id
  elseif id ~= newest_id then
    answer[1] = 'superseded'
  elseif tonumber(order) < tonumber(newest_order) then
    answer[1] = 'replaced'
  end
  keep(key, math.max(tonumber(due), now_ms) + keep_ms, now_ms)
  return answer
end

local answers = {}
for number, key in ipairs(KEYS) do
  local at = 2 + (number - 1) * 3
  local readable, answer = pcall(claim, key, ARGV[at], ARGV[at + 1], ARGV[at + 2])
  answers[number] = readable and answer
    or {'!' .. tostring(type(answer) == 'table' and answer.err or answer), ''}
end
return answers
