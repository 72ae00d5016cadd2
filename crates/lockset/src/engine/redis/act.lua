-- Gives back and takes many locks at once. KEYS: the locks to give back, those to take; the fences
-- of those to take; the queues in the order of the locks; the marks of those to take. ARGV: the
-- server's time when the connection was made, how many are given back, how many of those to take
-- (the first) are taken only if the one of the same place was given back; for each given back how
-- its value begins if it is ours; for each to take id, ttl, tail, claim ('' as tail: not a plain
-- mutex; the claim begins with 1 if it waits).
-- One answer each: given back 1 | 0; taken its token, or as of `acquire`, or untouched.
--
-- The usual case comes first, before anything else is even defined: nobody waits, no claim was
-- withdrawn, each lock is as expected. It costs few commands for all together, and one or two for
-- each; what it cannot do is left to the rules that follow.
local floor, given, both = tonumber(ARGV[1]), tonumber(ARGV[2]), tonumber(ARGV[3])
local taken = (#KEYS - 2 * given) / 4
local all = given + taken
local answers, left_over = {}, false
if redis.call('EXISTS', unpack(KEYS, all + taken + 1)) == 0 then
  if given > 0 then
    local values, ours, free = redis.call('MGET', unpack(KEYS, 1, given)), {}, 0
    for i = 1, given do
      local held = ARGV[3 + i]
      if values[i] and string.sub(values[i], 1, #held) == held then
        free = free + 1
        ours[free] = KEYS[i]
        answers[i] = 1
      else
        left_over = true
      end
    end
    if free > 0 then redis.call('DEL', unpack(ours)) end
  end
  local arg = 3 + given
  for i = given + 1, all do
    local tail = ARGV[arg + 3]
    local may = i > given + both or answers[i - given]
    local token = may and tail ~= '' and redis.pcall('INCR', KEYS[taken + i])
    -- A fence below the time of the connection was lost or never was: see `next_number`.
    if type(token) == 'number' and token >= floor then
      local done = redis.pcall('SET', KEYS[i],
        ARGV[arg + 1] .. ':' .. string.format('%.0f', token) .. tail, 'NX', 'PX', ARGV[arg + 2])
      if done and done.ok then answers[i] = token else left_over = true end
    else
      left_over = true
    end
    arg = arg + 4
  end
  if not left_over then return answers end
end
