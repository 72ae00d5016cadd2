-- Gives back and takes locks: one of each at most, or many at once with the same ttl.
-- KEYS: the locks to give back, those to take; the fences of those to take, and their queues; if it
-- goes alone, in a cluster all others of the name, and its queue once more.
-- ARGV: the server's time when the connection was made; how many are given back, how many taken,
-- how many of those to take (the first) are taken only if the one of the same place was given back;
-- the ttl; for each given back its value if it is ours and nothing has happened since; for each to
-- take the value it gets ('' if it is no plain mutex); if it goes alone, id and token to give back,
-- id and claim to take, which begins with 1 if it waits.
-- One answer each: given back 1 | 0; taken its token, or as of `acquire`, or untouched; of many
-- also nothing: to be asked for alone.
--
-- The usual case comes first, before anything else is even defined: nobody waits, no claim was
-- withdrawn, each lock is as expected. It costs few commands for all together, and two for each.
local floor, given, taken, both = tonumber(ARGV[1]), tonumber(ARGV[2]), tonumber(ARGV[3]),
  tonumber(ARGV[4])
local all = given + taken
local answers, left_over, free = {}, false, 0
for i = 1, all do answers[i] = false end
if given > 0 then
  local values, ours = redis.call('MGET', unpack(KEYS, 1, given)), {}
  for i = 1, given do
    if values[i] == ARGV[5 + i] then
      free = free + 1
      ours[free] = KEYS[i]
      answers[i] = 1
    end
  end
  if free > 0 then redis.call('DEL', unpack(ours)) end
end
if taken > 0 and redis.call('EXISTS', unpack(KEYS, all + taken + 1, all + 2 * taken)) == 0 then
  for i = given + 1, all do
    local value = ARGV[5 + i]
    local may = value ~= '' and (i > given + both or answers[i - given])
    local set = may and redis.pcall('SET', KEYS[i], value, 'NX', 'PX', ARGV[5])
    if set and set.ok then
      local fence = KEYS[taken + i]
      local token = redis.pcall('INCR', fence)
      if type(token) ~= 'number' then
        redis.call('DEL', KEYS[i])
      else
        -- A fence below the time of the connection was lost or never was: see `next_number`.
        if token < floor then
          local time = redis.call('TIME')
          token = math.max(token, floor, time[1] * 1000000 + time[2])
          redis.call('SET', fence, string.format('%.0f', token), 'PX', FENCE_IDLE_MS)
        end
        answers[i] = token
        free = free + 1
      end
    end
  end
end
if free == all or all > 1 + both then return answers end
