-- Follows `acquire_fast.lua` and `common.lua`: acquires the lock if the fast path did not.
return acquire(keys_of(lock, base .. 'queue'), claim_to_acquire())
