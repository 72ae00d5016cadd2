-- Checks a token, raises the mark and executes the guarded command, in one step.
-- KEYS: the hash with the marks of the resource, then the key to write, if there is one.
-- ARGV: the lock, the token, then the command and its arguments, if there is one.
-- Returns the mark as a string if the token is stale, otherwise the number that the command
-- returned. The field without a name is the version of the hash; no lock has an empty name.
local marks, lock, token, command = KEYS[1], ARGV[1], ARGV[2], ARGV[3]

-- Numbers are doubles here, and a string is compared by the locale of the server: two halves of
-- a token are exact.
local function halves(text)
  local padded = string.rep('0', 19 - #text) .. text
  return tonumber(string.sub(padded, 1, 10)), tonumber(string.sub(padded, 11))
end

local found = redis.call('HMGET', marks, '', lock)
local version, seen = found[1], found[2]
if version and version ~= '1' then
  return redis.error_reply('LOCKSETVERSION ' .. marks .. ' has version ' .. version)
end
if seen then
  if not version or #seen > 19 or not string.find(seen, '^[1-9]%d*$') then
    return redis.error_reply('LOCKSETMARK ' .. marks .. ' has no valid mark for this lock')
  end
  local high, low = halves(token)
  local seen_high, seen_low = halves(seen)
  if high < seen_high or (high == seen_high and low < seen_low) then
    return seen
  end
end

-- First the mark: if the command fails then, nothing stale was written.
if seen ~= token then
  redis.call('HSET', marks, '', '1', lock, token)
end
if command == 'SET' then
  redis.call('SET', KEYS[2], ARGV[4])
  return 1
elseif command == 'DEL' then
  return redis.call('DEL', KEYS[2])
elseif command == 'HSET' then
  -- One field at a time: the arguments of one call are limited.
  local added = 0
  for at = 4, #ARGV, 2 do
    added = added + redis.call('HSET', KEYS[2], ARGV[at], ARGV[at + 1])
  end
  return added
end
return 0
