-- Acquires a lock. KEYS the name's lock, fence and queue; ARGV the value of a mutex acquired by the
-- fast path ('' if the claim has none), its ttl, the server's time when the connection was opened,
-- id, claim, wait (1|0), and the caller's own floor if it has one. Returns the token of a lock that
-- the fast path acquired, or the reply of `acquire` in `common.lua`.
--
-- The fast path comes first, before anything else is defined: no claim waits, this claim was not
-- withdrawn, the lock is free. The token is not stored until a claim queues.
local function no_claim_waits()
  if redis.call('EXISTS', KEYS[3]) == 0 then return true end
  local entries = redis.call('ZRANGE', KEYS[3], 0, 1)
  return #entries == 1 and entries[1] == '!'
    and redis.call('EXISTS', string.sub(KEYS[3], 1, -6) .. 'tombstone:' .. ARGV[4]) == 0
end
if ARGV[1] ~= '' and no_claim_waits() then
  local set = redis.pcall('SET', KEYS[1], ARGV[1], 'NX', 'PX', ARGV[2])
  if set and set.ok then
    local token = next_token(KEYS[2], ARGV[7], tonumber(ARGV[3]))
    if token and not LATE_TOKENS then store_early(KEYS[1], ARGV[1], token) end
    if token then return token end
    redis.call('DEL', KEYS[1])
  end
end
