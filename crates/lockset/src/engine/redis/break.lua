-- KEYS the name's seven; ARGV now (1|0). Answers who held: value and what is left if exclusive,
-- then the other holders as of look. Holders learn by their next renewal, or by the caller.
local k = at(1)
local value = value_of(k) or ''
local owner, token, _, ttl, note = holder_of(value)
local left = call('PTTL', k.lock)
local holders = {}
local sharing = is_shared(value) and call('ZRANGE', k.holders, 0, -1) or {}
for _, id in ipairs(sharing) do
  local record = call('HGET', k.held, id) or ''
  holders[#holders + 1] = id
  holders[#holders + 1] = record
  holders[#holders + 1] = tonumber(call('ZSCORE', k.holders, id)) - now()
  call('HSET', k.held, id, (string.gsub(record, '^(%d+)|%d|', '%1|1|')))
end
if owner then
  call('SET', k.lock, owner .. ':' .. token .. ':1:' .. ttl .. ':' .. note, 'PX', math.max(left, 1))
end
if ARGV[1] == '1' then
  call('DEL', k.lock, k.holders, k.held)
  hand_on(k, nil)
end
return { value, left, holders }
