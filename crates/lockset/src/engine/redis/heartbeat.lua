-- KEYS lock and queue per claim; ARGV inbox, the server's time when the connection was made, then
-- an id per claim. One answer per claim, as of acquire, or failed why.
made = tonumber(ARGV[2])
local answers = {}
for i = 1, #ARGV - 2 do
  -- What is wrong with one name must not cost the others their places.
  local k = at(KEYS[2 * i - 1], KEYS[2 * i])
  local fine, answer = pcall(heartbeat, k, ARGV[i + 2], ARGV[1])
  answers[i] = fine and answer or failure(answer)
end
return answers
