-- Gives back and takes locks: one of each at most, or many at once on equal terms.
-- KEYS: the locks to give back, those to take; the fences of those to take; the queues in the order
-- of the locks; the marks of those to take, which end with the claim's id.
-- ARGV: the server's time when the connection was made; how many are given back; how many of those
-- to take (the first) are taken only if the one of the same place was given back; ttl and tail of
-- the values of those to take ('' as tail: not plain mutexes); for each given back how its value
-- begins if it is ours; and, if only one is to be taken, its claim, which begins with 1 if it waits.
-- One answer each: given back 1 | 0; taken its token, or as of `acquire`, or untouched; of many
-- also nothing: to be asked for alone.
--
-- The usual case comes first, before anything else is even defined: nobody waits, no claim was
-- withdrawn, each lock is as expected. It costs few commands for all together, and two for each.
local floor, given, both = tonumber(ARGV[1]), tonumber(ARGV[2]), tonumber(ARGV[3])
local taken = (#KEYS - 2 * given) / 4
local all = given + taken
local answers, left_over = {}, false
for i = 1, all do answers[i] = false end
if redis.call('EXISTS', unpack(KEYS, all + taken + 1)) == 0 then
  if given > 0 then
    local values, ours, free = redis.call('MGET', unpack(KEYS, 1, given)), {}, 0
    for i = 1, given do
      if values[i] and string.find(values[i], ARGV[5 + i], 1, true) == 1 then
        free = free + 1
        ours[free] = KEYS[i]
        answers[i] = 1
      else
        left_over = true
      end
    end
    if free > 0 then redis.call('DEL', unpack(ours)) end
  end
  local ttl, tail = ARGV[4], ARGV[5]
  for i = given + 1, all do
    local may = tail ~= '' and (i > given + both or answers[i - given])
    local token = may and redis.pcall('INCR', KEYS[taken + i])
    -- A fence below the time of the connection was lost or never was: see `next_number`.
    if type(token) == 'number' and token >= floor then
      local id = string.sub(KEYS[all + taken + i + taken], -32)
      local value = string.format('%s:%.0f%s', id, token, tail)
      local done = redis.pcall('SET', KEYS[i], value, 'NX', 'PX', ttl)
      if done and done.ok then answers[i] = token else left_over = true end
    else
      left_over = true
    end
  end
else
  left_over = true
end
if not left_over or given > 1 or taken > 1 then return answers end
