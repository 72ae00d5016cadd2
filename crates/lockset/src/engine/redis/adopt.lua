-- Makes a held lock another claim's: same token, same lease. KEYS the name's lock and queue; ARGV
-- id, token, the successor's id and note, tombstone life in ms. Returns done | gone (the successor
-- was withdrawn) | lost.
local k = keys_of(KEYS[1], KEYS[2])
local id, token, successor, note, life = unpack(ARGV)
if is_withdrawn(k, successor) then return { 'gone' } end
local value = live_value(k)
local owner, held, flag, ttl = holder_of(k, value)
if owner == successor and held == token then return { 'done' } end
if owner == id and (held == token or held == '0') then
  leave_tombstone(k, id, life)
  call('SET', k.lock, table.concat({ successor, token, flag, ttl, note }, ':'), 'KEEPTTL')
  return { 'done' }
end
local function record_of(claim)
  local record = is_shared(value) and call('HGET', k.held, claim) or ''
  local its, revoked, mode, take, full = string.match(record, '^(%d+)|(%d)|(%a)|(%d+)|(%d+)|')
  if its == token then return { its, revoked, mode, take, full, note } end
  return nil
end
if record_of(successor) then return { 'done' } end
local record, ends = record_of(id), is_shared(value) and call('ZSCORE', k.holders, id)
if not record or not ends then return { 'lost' } end
leave_tombstone(k, id, life)
call('HDEL', k.held, id)
call('ZREM', k.holders, id)
call('HSET', k.held, successor, table.concat(record, '|'))
call('ZADD', k.holders, ends, successor)
return { 'done' }
