-- Follows `acquire_fast.lua` and `common.lua`: acquires the lock if the fast path did not.
connected_at = tonumber(ARGV[3])
return acquire(keys_of(KEYS[1], KEYS[3]), parse(ARGV[4], ARGV[5]), ARGV[6] == '1')
