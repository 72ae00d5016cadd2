-- Follows `release_fast.lua` and `common.lua`: releases the lock if the fast path did not.
connected_at = tonumber(ARGV[4])
return end_claim(keys_of(KEYS[1], KEYS[2]), ARGV[2], ARGV[3]) == 'released' and 1 or 0
