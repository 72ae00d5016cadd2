-- Withdraws a claim, or releases one with a request that got no reply; leaves a tombstone. KEYS the
-- name's lock and queue; ARGV id, token ('' to withdraw), tombstone life in ms, the server's time
-- when the connection was opened. Returns released | not-held.
connected_at = tonumber(ARGV[4])
local k = keys_of(KEYS[1], KEYS[2])
-- A server that is out of memory refuses tombstones and grants, but a claim must end there too.
local fine, why = pcall(leave_tombstone, k, ARGV[1], ARGV[3])
local outcome = end_claim(k, ARGV[1], ARGV[2])
if not fine then error(why) end
return { outcome }
