-- Reserve room for a number of tasks at a rate that several senders share.
--
-- KEYS  the rate, whose value is the instant from which the next tasks may be sent, in milliseconds
-- ARGV  the number of tasks; the rate in tasks per second
-- Returns a list of the milliseconds to wait before sending the tasks.

local rate, now_ms = KEYS[1], clock()
local free_ms = math.max(tonumber(redis.call('GET', rate) or now_ms), now_ms)
local next_ms = free_ms + given[1][1] * 1000 / given[1][2]
redis.call('SET', rate, string.format('%.3f', next_ms), 'PX', math.ceil(next_ms - now_ms) + 1000)
return cjson.encode({math.ceil(free_ms - now_ms)})
