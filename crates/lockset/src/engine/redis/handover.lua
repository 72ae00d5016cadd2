-- Follows `handover_fast.lua` and `common.lua`: does what the fast path did not do.
connected_at = tonumber(ARGV[3])
local k = keys_of(KEYS[1], KEYS[3])
if not released and end_claim(k, ARGV[8], ARGV[9], true) ~= 'released' then
  return { 0, { 'untouched' } }
end
-- The lock was released, whatever happens to the next claim.
local fine, reply = pcall(acquire, k, parse(ARGV[4], ARGV[5]), ARGV[6] == '1', true)
return { 1, fine and reply or failure(reply) }
