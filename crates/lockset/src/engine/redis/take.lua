-- Takes one lock. KEYS the name's lock, fence and queue; ARGV the value of a mutex that is taken at
-- once ('' if it is no plain mutex), its ttl, the server's time when the connection was made, id,
-- claim, wait (1|0), and the caller's own floor if it has one. Answers the token of one that was
-- taken at once, or as of `acquire`.
--
-- The usual case comes first, before the rest is even defined: nobody waits, this claim was
-- not withdrawn, the lock is free. The token is not written down before somebody queues.
local function nobody_waits()
  if redis.call('EXISTS', KEYS[3]) == 0 then return true end
  local line = redis.call('ZRANGE', KEYS[3], 0, 1)
  return #line == 1 and line[1] == '!'
    and redis.call('EXISTS', string.sub(KEYS[3], 1, -6) .. 'mark:' .. ARGV[4]) == 0
end
if ARGV[1] ~= '' and nobody_waits() then
  local set = redis.pcall('SET', KEYS[1], ARGV[1], 'NX', 'PX', ARGV[2])
  if set and set.ok then
    local token, exact = draw(KEYS[2], ARGV[7])
    if token and token >= (exact or tonumber(ARGV[3])) and token < TOKENS_END then
      return token
    end
    -- A fence below the time of the connection was lost or never was: see `next_number`.
    redis.call('DEL', KEYS[1])
  end
end
