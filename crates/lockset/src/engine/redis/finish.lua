-- Release and withdrawal. KEYS the name's seven, then the mark of the next claim; ARGV id, token
-- ('' to withdraw), mark life in ms (0: no mark), then the next claim's id and claim, if any.
-- Answers released | not-held, followed by the next claim's answer as of acquire, if one was given.
local k = at(1)
local id, token, life = ARGV[1], ARGV[2], ARGV[3]
if life ~= '0' then call('SET', k.mark, '1', 'PX', life) end
unqueue(k, id)
local held = drop(k, id)
local outcome = (held and held == token) and 'released' or 'not-held'
if not ARGV[4] or outcome == 'not-held' then
  hand_on(k, nil)
  return { outcome }
end
local c = parse(ARGV[4], ARGV[5])
k.mark = KEYS[8]
hand_on(k, c.id)
return { outcome, acquire(k, c, true) }
