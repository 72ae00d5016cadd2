-- The end of `act.lua`, after `common.lua`: whatever the usual case left over.
if given == 1 and not answers[1] then
  local id, token = string.match(ARGV[6], '^(%x+):(%d+):$')
  local fine, outcome = pcall(finish, at(KEYS[1], KEYS[all + taken + 1]), id, token)
  answers[1] = fine and (outcome == 'released' and 1 or 0) or failure(outcome)
end
if both == 1 and answers[1] ~= 1 then
  answers[all] = { 'untouched' }
elseif taken == 1 and not answers[all] then
  local body = ARGV[#ARGV]
  local c = parse(string.sub(KEYS[#KEYS], -32), string.sub(body, 2))
  local k = at(KEYS[all], KEYS[all + taken + all])
  local fine, answer = pcall(acquire, k, c, string.sub(body, 1, 1) == '1')
  answers[all] = fine and answer or failure(answer)
end
return answers
