-- Gives back and takes many locks at once: the usual case of `give.lua`, `take.lua` and `pass.lua`
-- only, in few commands for all together and two for each.
-- KEYS: the locks to give back, those to take; the fences of those to take, and their queues.
-- ARGV: the server's time when the connection was made; how many are given back, how many taken,
-- how many of those to take (the first) are taken only if the one of the same place was given back;
-- the ttl; the values of those to give back, and of those to take; the floors of those to take
-- whose callers have their own ('' if not), or nothing if none has.
-- One answer each: given back 1, taken its token, or nothing: to be asked for alone.
local floor, given, taken, both = tonumber(ARGV[1]), tonumber(ARGV[2]), tonumber(ARGV[3]),
  tonumber(ARGV[4])
local all, answers = given + taken, {}
for i = 1, all do answers[i] = false end
if given > 0 then
  local values, ours, free = redis.call('MGET', unpack(KEYS, 1, given)), {}, 0
  for i = 1, given do
    if values[i] == ARGV[5 + i] then
      free = free + 1
      ours[free] = KEYS[i]
      answers[i] = 1
    end
  end
  if free > 0 then redis.call('DEL', unpack(ours)) end
end
if taken == 0 then return answers end
local nobody_waits = redis.call('EXISTS', unpack(KEYS, all + taken + 1)) == 0
-- As in `take.lua`; the value begins with the id.
local function nobody_waits_for(queue, value)
  local line = redis.pcall('ZRANGE', queue, 0, 1)
  -- Of the wrong type: one that is asked for alone, not a batch refused.
  if line.err then return false end
  return #line == 0 or (#line == 1 and line[1] == '!' and redis.call('EXISTS',
    string.sub(queue, 1, -6) .. 'mark:' .. string.match(value, '^%x+')) == 0)
end
for i = given + 1, all do
  local may = (i > given + both or answers[i - given])
    and (nobody_waits or nobody_waits_for(KEYS[2 * taken + i], ARGV[5 + i]))
  local set = may and redis.pcall('SET', KEYS[i], ARGV[5 + i], 'NX', 'PX', ARGV[5])
  if set and set.ok then
    local token, exact = draw(KEYS[taken + i], ARGV[5 + taken + i])
    if token and not exact and token < floor then
      -- A fence below the time of the connection was lost or never was: see `next_number`.
      local time = redis.call('TIME')
      token = math.max(floor, time[1] * 1000000 + time[2])
      redis.call('SET', KEYS[taken + i], string.format('%.0f', token), 'PX', FENCE_IDLE_MS)
    end
    if token and token < TOKENS_END then
      answers[i] = token
    else
      redis.call('DEL', KEYS[i])
    end
  end
end
return answers
