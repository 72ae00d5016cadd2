-- Releases a lock and acquires it for another claim of the same client: as `release_fast.lua`, then
-- as `acquire_fast.lua` if it was released. KEYS as of `acquire_fast.lua`. ARGV its four (''
-- without an own floor), then the first of `release_fast.lua`, and the token. Returns both replies.
--
-- The fast path comes first: only this client wants the lock. Not with courtesy, which must know
-- since when a lock is handed over.
local lock, value, released = KEYS[1], ARGV[1], false
local base = KEYS[2] and string.sub(KEYS[2], 1, -6) or '{' .. lock .. '}:'
if COURTESY_MS == 0 and value ~= '' and redis.call('GET', lock) == ARGV[5]
  and redis.call('EXISTS', base .. 'queue') == 0 then
  local token = next_token(base .. 'fence', ARGV[4], tonumber(string.sub(ARGV[3], 1, 16)))
  if token then
    redis.call('SET', lock, value, 'PX', ARGV[2])
    if not LATE_TOKENS then store_early(lock, value, token) end
    return { 1, token }
  end
  -- The fence has grown, so it is no longer the token of the stored value.
  redis.call('DEL', lock)
  released = true
end
