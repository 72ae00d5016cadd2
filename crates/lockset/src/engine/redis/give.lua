-- Gives one lock back. KEYS the name's lock and queue; ARGV its value if it is ours and nothing has
-- happened since ('' if something has), id, token, and the server's time when the connection was
-- made. Answers 1 | 0: it was not held.
--
-- The usual case comes first: whoever queues writes the token into the value, so nobody waits.
if ARGV[1] ~= '' and redis.call('MGET', KEYS[1])[1] == ARGV[1] then
  redis.call('DEL', KEYS[1])
  return 1
end
