-- Acquires a lock. KEYS the name's lock, and its queue if the other keys do not follow from the
-- lock (then all others too, in a cluster). ARGV of a claim with a fast path: its value, its ttl,
-- `connected_at|wait|q|f` (the server's time when the connection was opened, in 16 digits; wait is
-- 1|0), and the caller's own floor if it has one. Any other claim: '', its id, the same, its body.
-- Returns the token of a lock that the fast path acquired, or the reply of `acquire` in
-- `common.lua`.
--
-- The fast path comes first, before anything else is defined: no claim waits, this claim was not
-- withdrawn, the lock is free. The token is not stored until a claim queues.
local lock, value = KEYS[1], ARGV[1]
local base = KEYS[2] and string.sub(KEYS[2], 1, -6) or '{' .. lock .. '}:'
if value ~= '' then
  local call = redis.call
  local free = call('EXISTS', base .. 'queue') == 0
  if not free then
    local entries = call('ZRANGE', base .. 'queue', 0, 1)
    free = #entries == 1 and entries[1] == '!'
      and call('EXISTS', base .. 'tombstone:' .. string.sub(value, 1, 32)) == 0
  end
  if free then
    local set = redis.pcall('SET', lock, value, 'NX', 'PX', ARGV[2])
    if set and set.ok then
      local token = next_token(base .. 'fence', ARGV[4], tonumber(string.sub(ARGV[3], 1, 16)))
      if token and not LATE_TOKENS then store_early(lock, value, token) end
      if token then return token end
      call('DEL', lock)
    end
  end
end
