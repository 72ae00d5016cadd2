-- Breaks a lock, or asks for it back. KEYS the name's lock and queue; ARGV now (1|0), the server's
-- time when the connection was opened. Returns the holders: the lock's value, token and what is
-- left if it is exclusive, then the other holders as in `inspect.lua`. Holders get a message; one
-- that does not receive it finds out by its next renewal.
connected_at = tonumber(ARGV[2])
local k = keys_of(KEYS[1], KEYS[2])
local value = live_value(k) or ''
local left = call('PTTL', k.lock)
local function notify(id, note)
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
  notify(id, string.match(record, '^%d+|%d|%a|%d+|%d+|(.*)$') or '')
end
local owner, token, _, ttl, note = holder_of(k, value)
if owner then
  call('SET', k.lock, owner .. ':' .. token .. ':1:' .. ttl .. ':' .. note, 'PX', math.max(left, 1))
  notify(owner, note)
end
if ARGV[1] == '1' then
  call('DEL', k.lock, k.holders, k.held)
  hand_over(k, nil)
end
return { value, token or '', left, holders }
