-- KEYS lock and queue per claim; ARGV inbox, then an id per claim. One answer per claim, as of
-- acquire, or failed why.
local answers = {}
for i = 2, #ARGV do
  -- What is wrong with one name must not cost the others their places.
  local k = at(KEYS[2 * i - 3], KEYS[2 * i - 2])
  local fine, answer = pcall(heartbeat, k, ARGV[i], ARGV[1])
  answers[i - 1] = fine and answer or failure(answer)
end
return answers
