-- Follows `release_fast.lua` and `common.lua`: releases the lock if the fast path did not.
local token, connected = string.match(ARGV[2], '^(%d+)|(%d+)$')
connected_at = tonumber(connected)
local k = keys_of(KEYS[1], KEYS[2] or '{' .. KEYS[1] .. '}:queue')
return end_claim(k, string.sub(ARGV[1], 1, 32), token) == 'released' and 1 or 0
