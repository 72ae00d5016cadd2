-- Takes one lock. KEYS the name's lock, fence and queue; ARGV the value of a mutex that is taken at
-- once ('' if it is no plain mutex), its ttl, the server's time when the connection was made, id,
-- claim, wait (1|0). Answers the token of one that was taken at once, or as of `acquire`.
--
-- The usual case comes first, before anything else is even defined: nobody waits, no claim was
-- withdrawn, the lock is free. The token is not written down before somebody queues.
if ARGV[1] ~= '' and redis.call('EXISTS', KEYS[3]) == 0 then
  local set = redis.pcall('SET', KEYS[1], ARGV[1], 'NX', 'PX', ARGV[2])
  if set and set.ok then
    local token = redis.pcall('INCR', KEYS[2])
    if type(token) == 'number' and token >= tonumber(ARGV[3]) and token < TOKENS_END then
      return token
    end
    -- A fence below the time of the connection was lost or never was: see `next_number`.
    redis.call('DEL', KEYS[1])
  end
end
