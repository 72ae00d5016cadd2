-- Releases a lock and acquires it for another claim of the same client: as `release_fast.lua`, then
-- as `acquire_fast.lua` if it was released. KEYS the name's lock, fence and queue; ARGV those of
-- `acquire_fast.lua` (six), then those of `release_fast.lua` (three), and the caller's own floor if
-- it has one. Returns both replies.
--
-- The fast path comes first: only this client wants the lock. Not with courtesy, which must know
-- since when a lock is handed over.
local released = false
if COURTESY_MS == 0 and ARGV[1] ~= '' and ARGV[7] ~= ''
  and redis.call('EXISTS', KEYS[3]) == 0 and redis.call('MGET', KEYS[1])[1] == ARGV[7] then
  local token = next_token(KEYS[2], ARGV[10], tonumber(ARGV[3]))
  if token then
    redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
    if not LATE_TOKENS then store_early(KEYS[1], ARGV[1], token) end
    return { 1, token }
  end
  -- The fence has grown, so it is no longer the token of the stored value.
  redis.call('DEL', KEYS[1])
  released = true
end
