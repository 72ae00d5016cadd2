-- Follows `handover_fast.lua` and `common.lua`: does what the fast path did not do.
local k, claim, wait = keys_of(lock, base .. 'queue'), claim_to_acquire()
local outcome, after = 'released', {}
if not released then
  outcome, after = end_claim(k, string.sub(ARGV[5], 1, 32), ARGV[6], true)
end
if outcome ~= 'released' then return { 0, { 'untouched' } } end
-- The lock was released, whatever happens to the next claim.
local fine, reply = pcall(acquire, k, claim, wait, after)
return { 1, fine and reply or failure(reply) }
