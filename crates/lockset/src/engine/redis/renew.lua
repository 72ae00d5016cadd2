-- Renews leases. KEYS lock and queue per claim; ARGV the inbox ('' leaves it as it is), then per
-- claim id, token, ttl, add (1: the ttl is added to what is left, up to the full ttl; for a fixed
-- lease that began with a first lease). Returns per claim: renewed left | revoked | lost | failed
-- why.

-- The note with the inbox of the client that renews, so that it is told of a break; nil if the note
-- has that inbox already.
local inbox = ARGV[1]
local function with_inbox(note)
  if inbox == '' or string.sub(note, 1, #inbox + 1) == inbox .. '|' then return nil end
  return inbox .. (string.match(note, '|.*$') or '||')
end

local function renew(k, id, token, ttl, add)
  local value = live_value(k)
  local owner, held, flag, life, note = holder_of(k, value)
  if owner == id and (held == token or held == '0') then
    if flag == '1' then return { 'revoked' } end
    if add then ttl = math.min(ttl + call('PTTL', k.lock), tonumber(life)) end
    local other = with_inbox(note)
    if other or string.find(value, '^%x+::') then
      -- A stored token does not depend on the life of the fence.
      allow_when_full(k)
      value = table.concat({ id, token, flag, life, other or note }, ':')
      call('SET', k.lock, value, 'PX', num(ttl))
    else
      call('PEXPIRE', k.lock, ttl)
    end
    return { 'renewed', ttl }
  end
  local record = is_shared(value) and call('HGET', k.held, id) or ''
  local its, revoked, full, note = string.match(record, '^(%d+)|(%d)|%a|%d+|(%d+)|(.*)$')
  local ends = its == token and call('ZSCORE', k.holders, id)
  if not ends then return { 'lost' } end
  if revoked == '1' then return { 'revoked' } end
  if add then ttl = math.min(ttl + tonumber(ends) - now(), tonumber(full)) end
  allow_when_full(k)
  call('ZADD', k.holders, num(now() + ttl), id)
  local other = with_inbox(note)
  if other then
    call('HSET', k.held, id, string.sub(record, 1, #record - #note) .. other)
  end
  extend_shared(k, ttl, false)
  return { 'renewed', ttl }
end

local replies = {}
for i = 0, (#ARGV - 1) / 4 - 1 do
  local id, token, ttl, add = unpack(ARGV, i * 4 + 2, i * 4 + 5)
  -- If a key was overwritten with another type, one lock is lost; the batch goes on.
  local k = keys_of(KEYS[2 * i + 1], KEYS[2 * i + 2])
  local fine, reply = pcall(renew, k, id, token, tonumber(ttl), add == '1')
  replies[i + 1] = fine and reply or failure(reply)
end
return replies
