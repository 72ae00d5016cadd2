-- The end of `act.lua`, after `common.lua`: what the usual case left over of one that goes alone.
local k, arg = at(KEYS[all], KEYS[#KEYS]), 5 + all
if given == 1 and not answers[1] then
  local fine, outcome = pcall(finish, k, ARGV[arg + 1], ARGV[arg + 2])
  answers[1] = fine and (outcome == 'released' and 1 or 0) or failure(outcome)
end
if both == 1 and answers[1] ~= 1 then
  answers[2] = { 'untouched' }
elseif taken == 1 and not answers[all] then
  local id, body = ARGV[#ARGV - 1], ARGV[#ARGV]
  local c = parse(id, string.sub(body, 2))
  local fine, answer = pcall(acquire, k, c, string.sub(body, 1, 1) == '1')
  answers[all] = fine and answer or failure(answer)
end
return answers
