-- Release and withdrawal. KEYS the name's seven, then the mark of the next claim; ARGV id, token
-- ('' to withdraw), mark life in ms (0: no mark), then the next claim's id and claim, if any.
-- Answers released | not-held, followed by the next claim's answer as of acquire, if one was given.
local k = at(1)
local id, token, life = ARGV[1], ARGV[2], ARGV[3]
-- A server that is out of memory refuses marks and grants, but what ends must end there too.
local marked = life == '0' and {} or redis.pcall('SET', k.mark, '1', 'PX', life)
unqueue(k, id)
local held = drop(k, id)
if marked.err then return marked end
local outcome = (held and held == token) and 'released' or 'not-held'
if not ARGV[4] or outcome == 'not-held' then
  -- The waiters' signs of life find the lock if it cannot be handed on now.
  pcall(hand_on, k, nil)
  return { outcome }
end
local c = parse(ARGV[4], ARGV[5])
k.mark = KEYS[8]
local fine, answer = pcall(function()
  if call('ZSCORE', k.queue, c.id) then refresh(k, c) end
  hand_on(k, c.id)
  return acquire(k, c, true)
end)
if not fine then return { outcome } end
return { outcome, answer }
