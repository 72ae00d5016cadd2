-- Changes a held lock. KEYS the name's lock and queue; ARGV id, token, what (note|downgrade|raise),
-- the new note or token, the server's time when the connection was opened. Returns done | lost.
connected_at = tonumber(ARGV[5])
local k = keys_of(KEYS[1], KEYS[2])
local id, token, what, to = ARGV[1], ARGV[2], ARGV[3], ARGV[4]
local value = live_value(k)
local owner, held, flag, ttl, note = holder_of(k, value)
if owner == id and what == 'raise' and held == to then return { 'done' } end
if owner == id and (held == token or held == '0') then
  local left = math.max(call('PTTL', k.lock), 1)
  if what == 'note' then
    call('SET', k.lock, id .. ':' .. token .. ':' .. flag .. ':' .. ttl .. ':' .. to, 'PX', left)
  elseif what == 'raise' then
    if tonumber(call('GET', k.fence) or '0') > tonumber(to) then return { 'lost' } end
    call('SET', k.fence, to)
    call('SET', k.lock, id .. ':' .. to .. ':' .. flag .. ':' .. ttl .. ':' .. note, 'PX', left)
  else
    call('DEL', k.lock)
    local reader =
      { id = id, mode = 's', take = 0, ttl = tonumber(ttl), note = note, flag = flag }
    add_holder(k, reader, tonumber(token), left)
    hand_over(k, nil)
  end
  return { 'done' }
end
local record = is_shared(value) and call('HGET', k.held, id) or ''
local its, revoked, mode, take, life = string.match(record, '^(%d+)|(%d)|(%a)|(%d+)|(%d+)|')
if its ~= token or what == 'raise' then return { 'lost' } end
if what == 'note' then
  call('HSET', k.held, id, table.concat({ its, revoked, mode, take, life, to }, '|'))
end
return { 'done' }
