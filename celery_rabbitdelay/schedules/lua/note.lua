-- Write fields of the record of a schedule.
--
-- KEYS  the record; see decide.lua
-- ARGV  alternating names and values of fields; an empty value deletes the field
-- Returns an empty string.

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
