-- KEYS the name's lock and queue; ARGV now (1|0), the server's time when the connection was made.
-- Answers who held: value, token and what is left if exclusive, then the other holders as of look.
-- Holders are told; if nobody hears it, the next renewal tells.
made = tonumber(ARGV[2])
local k = at(KEYS[1], KEYS[2])
local value = value_of(k) or ''
local left = call('PTTL', k.lock)
local function tell(id, note)
  local inbox = string.match(note, '^([^|]+)|')
  if inbox then publish(inbox, (ARGV[1] == '1' and 'b' or 'r') .. id) end
end
local holders = {}
local sharing = is_shared(value) and call('ZRANGE', k.holders, 0, -1) or {}
for _, id in ipairs(sharing) do
  local record = call('HGET', k.held, id) or ''
  holders[#holders + 1] = id
  holders[#holders + 1] = record
  holders[#holders + 1] = tonumber(call('ZSCORE', k.holders, id)) - now()
  call('HSET', k.held, id, (string.gsub(record, '^(%d+)|%d|', '%1|1|')))
  tell(id, string.match(record, '^%d+|%d|%a|%d+|%d+|(.*)$') or '')
end
local owner, token, _, ttl, note = holder_of(k, value)
if owner then
  call('SET', k.lock, owner .. ':' .. token .. ':1:' .. ttl .. ':' .. note, 'PX', math.max(left, 1))
  tell(owner, note)
end
if ARGV[1] == '1' then
  call('DEL', k.lock, k.holders, k.held)
  hand_on(k, nil)
end
return { value, token or '', left, holders }
