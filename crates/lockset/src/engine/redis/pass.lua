-- Gives a lock back and takes it for another claim of the same client: as `give.lua`, then as
-- `take.lua` if it was given back. KEYS the name's lock, fence and queue; ARGV as of `take.lua`,
-- then as of `give.lua`, and the caller's own floor if it has one. Answers both.
--
-- The usual case comes first: only this client wants the lock. Not with courtesy, which has to know
-- since when a lock is passed on.
local given = false
if COURTESY_MS == 0 and ARGV[1] ~= '' and ARGV[7] ~= ''
  and redis.call('EXISTS', KEYS[3]) == 0 and redis.call('MGET', KEYS[1])[1] == ARGV[7] then
  local token, exact = draw(KEYS[2], ARGV[10])
  if token and token >= (exact or tonumber(ARGV[3])) and token < TOKENS_END then
    redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
    return { 1, token }
  end
  -- The fence has gone on, so it does not say any more which token the value meant.
  redis.call('DEL', KEYS[1])
  given = true
end
