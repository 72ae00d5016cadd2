-- The end of `act.lua`, after `common.lua`: whatever the usual case left over.
for i = 1, given do
  if not answers[i] then
    local id, token = string.match(ARGV[3 + i], '^(%x+):(%d+):$')
    local fine, outcome = pcall(finish, at(KEYS[i], KEYS[all + taken + i]), id, token)
    answers[i] = fine and (outcome == 'released' and 1 or 0) or failure(outcome)
  end
end
for i = 1, taken do
  local which, arg = given + i, 3 + given + (i - 1) * 4
  if i <= both and answers[i] ~= 1 then
    answers[which] = { 'untouched' }
  elseif not answers[which] then
    local body = ARGV[arg + 4]
    local c = parse(ARGV[arg + 1], string.sub(body, 2))
    local k = at(KEYS[which], KEYS[all + taken + which])
    local fine, answer = pcall(acquire, k, c, string.sub(body, 1, 1) == '1')
    answers[which] = fine and answer or failure(answer)
  end
end
return answers
