-- Releases a lock. KEYS as of `acquire_fast.lua`. ARGV its value as the fast path stored it (only
-- its id if it has changed since), `token|connected_at` (the server's time when the connection was
-- opened). Returns 1, or 0 if it was not held.
--
-- The fast path comes first: a claim that queues stores the token in the value, so no claim waits.
if redis.call('GET', KEYS[1]) == ARGV[1] then return redis.call('DEL', KEYS[1]) end
