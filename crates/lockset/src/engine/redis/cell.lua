-- Writes or removes a cell if it has the expected version. KEYS the cell; ARGV the version, write
-- (1|0), the value. Returns done version | found version value. No version is used twice: a new one
-- is not below the clock.
local found = redis.call('HMGET', KEYS[1], 'version', 'value')
if (found[1] or '0') ~= ARGV[1] then return { 'found', found[1] or '0', found[2] or '' } end
if ARGV[2] == '0' then
  redis.call('DEL', KEYS[1])
  return { 'done', '0' }
end
local t = redis.call('TIME')
local version = string.format('%.0f', math.max(tonumber(ARGV[1]) + 1, t[1] * 1000000 + t[2]))
redis.call('HSET', KEYS[1], 'version', version, 'value', ARGV[3])
return { 'done', version }
