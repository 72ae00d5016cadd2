-- Heartbeats of waiters. KEYS lock and queue per claim; ARGV inbox, the server's time when the
-- connection was opened, then an id per claim. Returns per claim the reply of `acquire` in
-- `common.lua`, or failed why.
connected_at = tonumber(ARGV[2])
local replies = {}
for i = 1, #ARGV - 2 do
  -- What is wrong with one name must not cost the others their queue entries.
  local k = keys_of(KEYS[2 * i - 1], KEYS[2 * i])
  local fine, reply = pcall(heartbeat, k, ARGV[i + 2], ARGV[1])
  replies[i] = fine and reply or failure(reply)
end
return replies
