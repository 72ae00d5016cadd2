-- Releases and acquires many locks at once: the fast paths of release, acquire and hand-over only,
-- with few commands for all together and two for each.
-- KEYS: the locks to release, those to acquire; their other keys follow from these.
-- ARGV: the server's time when the connection was opened; the number of releases, of acquisitions,
-- and of hand-overs (the first acquisitions, each only if the release with the same index is done);
-- the ttl; the values of the locks to release, and of those to acquire; the callers' own floors of
-- those to acquire ('' without one), or nothing if none has one.
-- Returns per release 1, per acquisition its token, or nothing: to be sent alone.
local connected_at, releases = tonumber(ARGV[1]), tonumber(ARGV[2])
local acquires, handovers, ttl = tonumber(ARGV[3]), tonumber(ARGV[4]), ARGV[5]
local call, pcall, all, replies = redis.call, redis.pcall, releases + acquires, {}
for i = 1, all do replies[i] = false end
if releases > 0 then
  local values, ours, count = call('MGET', unpack(KEYS, 1, releases)), {}, 0
  for i = 1, releases do
    if values[i] == ARGV[5 + i] then
      count = count + 1
      ours[count] = KEYS[i]
      replies[i] = 1
    end
  end
  if count > 0 then call('DEL', unpack(ours)) end
end
if acquires == 0 then return replies end
local queues = {}
for i = 1, acquires do queues[i] = '{' .. KEYS[releases + i] .. '}:queue' end
local no_claim_waits = call('EXISTS', unpack(queues)) ~= 0 and function(queue, value)
  -- As in `acquire_fast.lua`. A queue of the wrong type: that request is sent alone, and the batch
  -- goes on.
  local entries = pcall('ZRANGE', queue, 0, 1)
  if entries.err then return false end
  return #entries == 0 or (#entries == 1 and entries[1] == '!' and call('EXISTS',
    string.sub(queue, 1, -6) .. 'tombstone:' .. string.sub(value, 1, 32)) == 0)
end
for i = releases + 1, all do
  local lock, value = KEYS[i], ARGV[5 + i]
  if (i > releases + handovers or replies[i - releases])
    and (not no_claim_waits or no_claim_waits(queues[i - releases], value)) then
    local set = pcall('SET', lock, value, 'NX', 'PX', ttl)
    if set and set.ok then
      local fence = '{' .. lock .. '}:fence'
      replies[i] = next_token(fence, ARGV[5 + acquires + i], connected_at) or false
      if not replies[i] then
        call('DEL', lock)
      elseif not LATE_TOKENS then
        store_early(lock, value, replies[i])
      end
    end
  end
end
return replies
