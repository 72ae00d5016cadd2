-- Reads a name; changes nothing. KEYS the name's lock, queue and cell. Returns the lock's value and
-- what is left of its lease, the fence, the cell's version and value, then the holders (id, record,
-- left …) and the waiters (id, record …) in order.
local k = keys_of(KEYS[1], KEYS[2])
local value = call('GET', k.lock) or ''
local holders, waiters = {}, {}
if is_shared(value) then
  for _, id in ipairs(call('ZRANGEBYSCORE', k.holders, '(' .. num(now()), '+inf')) do
    holders[#holders + 1] = id
    holders[#holders + 1] = call('HGET', k.held, id) or ''
    holders[#holders + 1] = tonumber(call('ZSCORE', k.holders, id)) - now()
  end
end
for _, id in ipairs(call('ZRANGEBYSCORE', k.queue, 1, '+inf', 'LIMIT', 0, 10000)) do
  local record = call('HGET', k.waiters, id)
  if record and tonumber(string.match(record, '^(%d+)|')) > now() then
    waiters[#waiters + 1] = id
    waiters[#waiters + 1] = record
  end
end
local cell = call('HMGET', KEYS[3], 'version', 'value')
return { value, call('PTTL', k.lock), call('GET', k.fence) or '0', cell[1] or '0', cell[2] or '',
         holders, waiters }
