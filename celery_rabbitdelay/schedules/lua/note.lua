-- Write fields of the record of a schedule.
--
-- KEYS  the record; see decide.lua
-- ARGV  names of fields, each with its value behind it; an empty value takes the field away
-- Returns an empty text.

local function note(record, field, value, ...)
  if field then
    if value == '' then
      redis.call('HDEL', record, field)
    else
      redis.call('HSET', record, field, value)
    end
    return note(record, ...)
  end
  return ''
end

return cjson.encode(of_each_key(note))
