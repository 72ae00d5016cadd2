-- Releases and acquires many locks at once: the fast paths of release, acquire and hand-over only,
-- with few commands for all together and two for each.
-- KEYS: the locks to release, those to acquire; the fences of those to acquire, and their queues.
-- ARGV: the server's time when the connection was opened; the number of releases, of acquisitions,
-- and of hand-overs (the first acquisitions, each only if the release with the same index is done);
-- the ttl; the values of the locks to release, and of those to acquire; the callers' own floors of
-- those to acquire ('' without one), or nothing if none has one.
-- Returns per release 1, per acquisition its token, or nothing: to be sent alone.
local connected_at, releases = tonumber(ARGV[1]), tonumber(ARGV[2])
local acquires, handovers = tonumber(ARGV[3]), tonumber(ARGV[4])
local all, replies = releases + acquires, {}
for i = 1, all do replies[i] = false end
if releases > 0 then
  local values, ours, count = redis.call('MGET', unpack(KEYS, 1, releases)), {}, 0
  for i = 1, releases do
    if values[i] == ARGV[5 + i] then
      count = count + 1
      ours[count] = KEYS[i]
      replies[i] = 1
    end
  end
  if count > 0 then redis.call('DEL', unpack(ours)) end
end
if acquires == 0 then return replies end
local no_queues = redis.call('EXISTS', unpack(KEYS, all + acquires + 1)) == 0
-- As in `acquire_fast.lua`; the value starts with the id.
local function no_claim_waits(queue, value)
  local entries = redis.pcall('ZRANGE', queue, 0, 1)
  -- A queue of the wrong type: that request is sent alone, and the batch goes on.
  if entries.err then return false end
  return #entries == 0 or (#entries == 1 and entries[1] == '!' and redis.call('EXISTS',
    string.sub(queue, 1, -6) .. 'tombstone:' .. string.match(value, '^%x+')) == 0)
end
for i = releases + 1, all do
  local may = (i > releases + handovers or replies[i - releases])
    and (no_queues or no_claim_waits(KEYS[2 * acquires + i], ARGV[5 + i]))
  local set = may and redis.pcall('SET', KEYS[i], ARGV[5 + i], 'NX', 'PX', ARGV[5])
  if set and set.ok then
    replies[i] = next_token(KEYS[acquires + i], ARGV[5 + acquires + i], connected_at) or false
    if not replies[i] then
      redis.call('DEL', KEYS[i])
    elseif not LATE_TOKENS then
      store_early(KEYS[i], ARGV[5 + i], replies[i])
    end
  end
end
return replies
