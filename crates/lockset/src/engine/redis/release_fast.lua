-- Releases a lock. KEYS the name's lock and queue; ARGV its value as the fast path stored it ('' if
-- it has changed since), id, token, and the server's time when the connection was opened. Returns
-- 1, or 0 if it was not held.
--
-- The fast path comes first: a claim that queues stores the token in the value, so no claim waits.
if ARGV[1] ~= '' and redis.call('MGET', KEYS[1])[1] == ARGV[1] then
  redis.call('DEL', KEYS[1])
  return 1
end
