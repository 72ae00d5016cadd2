-- What the scripts share. A script is this text followed by its own; `keys_of(lock, queue)` opens a
-- name. Replies are arrays of strings and numbers; the first word says which reply it is.
--
-- The keys of one name, all in one hash slot:
--   lock          STRING  exclusive: id:token:flag:ttl:note. Readers: '=s'. Permits: '=p:limit'.
--                         No token: no claim has queued since the grant; the fence is the token.
--   fence         STRING  the greatest queue number or token given so far
--   queue         ZSET    id -> queue number; '!' -> 0 while there may be tombstones, so that the
--                         fast path looks for one
--   waiters       HASH    id -> deadline|q|f|ttl|mode|take|limit|floor|inbox|note
--   holders       ZSET    id -> the end of the lease, for readers and holders of permits
--   held          HASH    id -> token|flag|mode|take|ttl|note; '*' -> the sum of the permits held
--   tombstone:ID  STRING  exists: this claim was withdrawn
--   handoffs      STRING  only with courtesy: since|token, when the current run of hand-offs began
--                         and the last token it gave; or 'free' while the lock is left free
-- flag is 1 if the lock is asked back; mode is x (exclusive), s (shared) or p (permits).
local call, fmt = redis.call, string.format
local clock
local function now_us()
  if not clock then
    local t = call('TIME')
    clock = t[1] * 1000000 + t[2]
  end
  return clock
end
local function now() return math.floor(now_us() / 1000) end
local function num(n) return fmt('%.0f', n) end

-- The reply for one claim of a batch whose commands failed. The error is a table since Redis 7, a
-- string before. A replica refuses all claims, and the client must know at once.
local function failure(why)
  local text = type(why) == 'table' and why.err or tostring(why)
  if string.find(text, 'READONLY', 1, true) then error(why) end
  return { 'failed', text }
end

-- The keys of a name, built on demand: all but the lock start as its queue does.
local function keys_of(lock, queue)
  local base = string.sub(queue, 1, -6)
  return setmetatable({ lock = lock, queue = queue }, { __index = function(_, what)
    return base .. what
  end })
end

-- Marks `id` as withdrawn, so that a late request for it is refused.
local function leave_tombstone(k, id, life)
  call('SET', k['tombstone:' .. id], '1', 'PX', life)
  call('ZADD', k.queue, 0, '!')
  call('PEXPIRE', k.queue, math.max(tonumber(life), call('PTTL', k.queue)))
end
local function is_withdrawn(k, id) return call('EXISTS', k['tombstone:' .. id]) == 1 end

-- Publishes a message to a client's inbox. Returns the number of receivers. A channel that ends
-- with '~' belongs to a slot of this node; if the slot has moved away, it has no receivers here.
-- One that ends with '^' is in a cluster of Redis 6: there a message reaches the subscribers of all
-- nodes, but only those of this node are counted. A grant that is received but not counted would be
-- used by the client and not kept here, so nothing is published unless there are receivers here.
local function publish(inbox, message)
  local last = string.byte(inbox, -1)
  local sharded = last == 126
  if last == 94 then
    local here = redis.pcall('PUBSUB', 'NUMSUB', inbox)
    if here.err or here[2] == 0 then return 0 end
  end
  local receivers = redis.pcall(sharded and 'SPUBLISH' or 'PUBLISH', inbox, message)
  return type(receivers) == 'number' and receivers or 0
end

-- A claim as an argument: q|f|ttl|mode|take|limit|floor|inbox|note. `floor` is the lower bound of
-- its token. With a leading '!' it is the caller's own and exact; otherwise it is the server's time
-- when the connection was opened.
local function parse(id, body)
  local q, f, ttl, mode, take, limit, floor, inbox, note =
    string.match(body, '^(%d+)|(%d+)|(%d+)|(%a)|(%d+)|(%d+)|(!?%d+)|([^|]*)|(.*)$')
  return { id = id, body = body, q = tonumber(q), f = tonumber(f), ttl = tonumber(ttl), mode = mode,
           take = tonumber(take), limit = tonumber(limit), floor = floor, inbox = inbox,
           note = note }
end

-- The server's time when the connection of this request was opened. Scripts that may hand the lock
-- over set it. A waiter's floor is as old as its first request: if the server has lost grants since
-- then, it would give their tokens again.
local connected_at = 0

-- The claim in the arguments that `acquire_fast.lua` describes, and whether it waits. That of a
-- claim with a fast path follows from its value.
local function claim_to_acquire()
  local connected, wait, q, f = string.match(ARGV[3], '^(%d+)|(%d)|(%d+)|(%d+)$')
  connected_at = tonumber(connected)
  if ARGV[1] == '' then return parse(ARGV[2], ARGV[4]), wait == '1' end
  local id, note = string.match(ARGV[1], '^(%x+)::0:%d+:(.*)$')
  local own = ARGV[4] and ARGV[4] ~= '' and '!' .. ARGV[4]
  local inbox = string.match(note, '^[^|]*')
  local body = { q, f, ARGV[2], 'x', '0', '0', own or connected, inbox, note }
  return parse(id, table.concat(body, '|')), wait == '1'
end

-- The next queue number or token for a claim: see `next_token.lua`.
local function next_number(k, c)
  local own = string.match(c.floor, '^!(%d+)$')
  local floor = own and 0 or math.max(tonumber(c.floor), connected_at)
  local number = next_token(k.fence, own, floor)
  if number then return number end
  -- Fails with the server's own words if the fence is not a number.
  call('INCR', k.fence)
  error('the tokens of this name are used up')
end

-- Id, token, flag, ttl and note of an exclusive holder.
local function holder_of(k, value)
  local id, token, flag, ttl, note = string.match(value or '', '^(%x+):(%d*):(%d):(%d+):(.*)$')
  -- '0': the fence was lost, and the holder is known by its id alone.
  if token == '' then token = call('GET', k.fence) or '0' end
  return id, token, flag, ttl, note
end

-- Stores the token in the lock's value before the fence grows.
local function store_token(k, value)
  if not value or not string.find(value, '^%x+::') then return end
  call('SET', k.lock, table.concat({ holder_of(k, value) }, ':'), 'KEEPTTL')
end

-- Whether readers or permits hold the lock. Only then are `holders` and `held` valid: what is left
-- in them after the lock's own key is gone (expired, evicted, deleted by a user) is void.
local function is_shared(value)
  return value == '=s' or (value and string.match(value, '^=p:%d+$') ~= nil)
end

-- Subtracts released permits from the sum; a reader has none.
local function return_permits(k, take)
  if take ~= '0' then call('HINCRBY', k.held, '*', '-' .. take) end
end

-- Removes readers and holders of permits whose lease is over. Returns the lock's value after that.
local function live_value(k)
  local value = call('GET', k.lock)
  if is_shared(value) then
    local over = call('ZRANGEBYSCORE', k.holders, '-inf', now())
    for _, id in ipairs(over) do
      local take = string.match(call('HGET', k.held, id) or '', '^%d+|%d|%a|(%d+)|')
      call('HDEL', k.held, id)
      if take then return_permits(k, take) end
    end
    if #over > 0 then call('ZREMRANGEBYSCORE', k.holders, '-inf', now()) end
    if call('ZCARD', k.holders) == 0 then
      call('DEL', k.lock, k.holders, k.held)
      return false
    end
  end
  return value
end

local function admits(k, value, c)
  if not value then return true end
  if c.mode == 's' then return value == '=s' end
  if c.mode == 'p' and value == '=p:' .. num(c.limit) then
    return tonumber(call('HGET', k.held, '*') or '0') + c.take <= c.limit
  end
  return false
end

local function clash_with(mode, limit, c)
  if mode == 'p' and c.mode == 'p' and limit == c.limit then return nil end
  if mode == 'p' then return 'semaphore:' .. num(limit) end
  if c.mode == 'p' then return 'lock' end
  return nil
end

local function first_waiter(k)
  return call('ZRANGEBYSCORE', k.queue, 1, '+inf', 'LIMIT', 0, 1)[1]
end

-- What the name is used as, if the claim cannot use it so; otherwise nil.
local function clash(k, value, c)
  if value and string.sub(value, 1, 3) == '=p:' then
    return clash_with('p', tonumber(string.sub(value, 4)), c)
  elseif value == '=s' or holder_of(k, value) then
    return clash_with('x', 0, c)
  end
  local first = first_waiter(k)
  local record = first and call('HGET', k.waiters, first)
  if record then
    local w = parse(first, string.match(record, '^%d+|(.*)$'))
    return clash_with(w.mode, w.limit, c)
  end
  return nil
end

-- Makes the keys of readers and permits live as long as the longest lease.
local function extend_shared(k, lease, is_first)
  if not is_first and call('PTTL', k.lock) >= lease then return end
  for _, key in ipairs({ k.lock, k.holders, k.held }) do call('PEXPIRE', key, lease) end
end

-- Makes `c` a holder for `lease` milliseconds. Returns the lock's new value.
local function add_holder(k, c, token, lease)
  if c.mode == 'x' then
    local value = c.id .. ':' .. num(token) .. ':0:' .. num(c.ttl) .. ':' .. c.note
    call('SET', k.lock, value, 'PX', lease)
    return value
  end
  local value = c.mode == 's' and '=s' or '=p:' .. num(c.limit)
  local is_first = call('SET', k.lock, value, 'NX', 'PX', lease)
  if is_first then call('DEL', k.holders, k.held) end
  call('ZADD', k.holders, num(now() + lease), c.id)
  call('HSET', k.held, c.id,
       table.concat({ num(token), c.flag or '0', c.mode, num(c.take), num(c.ttl), c.note }, '|'))
  call('HINCRBY', k.held, '*', num(c.take))
  extend_shared(k, lease, is_first)
  return value
end

-- A server that is out of memory lets a script continue that has already written. What is stored
-- must stay, so this first writes something that changes nothing.
local function allow_when_full(k) call('HDEL', k.held, '') end

local function dequeue(k, id)
  call('ZREM', k.queue, id)
  call('HDEL', k.waiters, id)
end

-- Courtesy. Clients that poll the key starve while the lock is handed from claim to claim. So after
-- COURTESY_MS of hand-offs (0: never) one release leaves the lock free for FREE_MS. Meanwhile it is
-- granted to no waiter; a message tells the first one to look when that time is over.
--
-- When the current run of hand-offs began, if this script ends a hold.
local run_since
local function is_left_free(k, value)
  return COURTESY_MS > 0 and not value and call('GET', k.handoffs) == 'free'
end

-- The run continues with this token.
local function continue_run(k, token)
  if run_since then call('SET', k.handoffs, num(run_since) .. '|' .. num(token), 'PX', 3600000) end
end

-- Tells the first live waiter that receives messages that the lock is left free for `ms`. Returns
-- whether there is one.
local function notify_first(k, ms)
  for position = 0, 63 do
    local id = call('ZRANGEBYSCORE', k.queue, 1, '+inf', 'LIMIT', position, 1)[1]
    local record = id and call('HGET', k.waiters, id)
    if not id then return false end
    if record and tonumber(string.match(record, '^(%d+)|')) > now() then
      local c = parse(id, string.match(record, '^%d+|(.*)$'))
      if publish(c.inbox, 'f' .. id .. ms) > 0 then return true end
    end
  end
  return false
end

-- Leaves the lock free after its release, if it is time for that. `token` is that of the last
-- holder. Without waiters, it is left free only if a `next` claim would take it over. Returns
-- whether it is left free.
local function leave_free(k, token, next)
  if COURTESY_MS == 0 or call('EXISTS', k.lock) == 1 then return false end
  local since, last = string.match(call('GET', k.handoffs) or '', '^(%d+)|(%d+)$')
  -- A greater token was given when the lock was free: the run had ended.
  run_since = last and tonumber(token) <= tonumber(last) and tonumber(since) or now()
  if now() - run_since < COURTESY_MS then return false end
  if not notify_first(k, FREE_MS) and not next then return false end
  call('SET', k.handoffs, 'free', 'PX', FREE_MS)
  return true
end

-- The waiter at this position of the queue; and whether there may be tombstones, if that is seen.
local function waiter_at(k, position)
  if position > 0 then
    return call('ZRANGEBYSCORE', k.queue, 1, '+inf', 'LIMIT', position, 1)[1]
  end
  local first = call('ZRANGE', k.queue, 0, 1)
  if first[1] == '!' then return first[2], true end
  return first[1], false
end

-- Grants the lock to the first live waiters, as far as they are admitted. The reply tells `me`, a
-- message all others. A waiter that is not subscribed at the moment is skipped and keeps its entry.
-- `value` is the lock's, if it is known. Returns the lock's value, the token of `me` if it was
-- granted, whether no waiter is left that comes before a new claim, and what is known after that:
-- the lease of a new exclusive holder, and whether there may be tombstones.
local function hand_over(k, me, value)
  local position, granted, unsubscribed, buried = 0, nil, {}, true
  if value == nil then value = live_value(k) end
  if is_left_free(k, value) then return value, nil, false end
  for _ = 1, 256 do
    local id, tombstones = waiter_at(k, position)
    if tombstones == false then buried = false end
    if not id then return value, granted, true, { buried = buried } end
    local record = call('HGET', k.waiters, id)
    local deadline = record and tonumber(string.match(record, '^(%d+)|'))
    if not record or deadline <= now() then
      dequeue(k, id)
    else
      local c = parse(id, string.match(record, '^%d+|(.*)$'))
      if not admits(k, value, c) then return value, granted, false end
      local token = (id == me or not unsubscribed[c.inbox]) and next_number(k, c)
      if token and (id == me or publish(c.inbox, 'g' .. id .. num(token)) > 0) then
        dequeue(k, id)
        value = add_holder(k, c, token, c.f)
        continue_run(k, token)
        if id == me then granted = token end
        -- An exclusive holder admits no others.
        if c.mode == 'x' then
          return value, granted, false, { left = c.f, buried = buried }
        end
      else
        -- All waiters of a process share its inbox, so one attempt is enough for all of them.
        unsubscribed[c.inbox] = true
        position = position + 1
      end
    end
  end
  return value, granted, false
end

-- The reply for a claim that holds the lock; nil if it does not.
local function held_reply(k, value, id)
  local owner, token = holder_of(k, value)
  -- The token is unknown here, so it cannot be reported any more.
  if owner == id and token == '0' then return { 'gone' } end
  if owner == id then return { 'granted', token, call('PTTL', k.lock) } end
  local ends = is_shared(value) and call('ZSCORE', k.holders, id)
  if ends then
    local token = string.match(call('HGET', k.held, id), '^(%d+)|')
    return { 'granted', token, tonumber(ends) - now() }
  end
  return nil
end

-- Whether this is a lock of another program: no script announces its release.
local function is_foreign(value)
  return value and not is_shared(value) and not string.find(value, '^%x+:%d*:%d:%d+:')
end

-- `left` is the rest of the holder's lease, if it is known.
local function queued_reply(k, id, fence, value, left)
  left = left or call('PTTL', is_left_free(k, value) and k.handoffs or k.lock)
  return { 'queued', fence, call('ZRANK', k.queue, id), left, is_foreign(value) and 1 or 0 }
end

-- Makes the queue entry of `c` live for another q. A queue of dead waiters expires by itself.
local function refresh_entry(k, c)
  call('HSET', k.waiters, c.id, num(now() + c.q) .. '|' .. c.body)
  local life = c.q * 2 + 60000
  for _, key in ipairs({ k.queue, k.waiters }) do
    -- Not every heartbeat has to extend them.
    if call('PTTL', key) < life - 20000 then call('PEXPIRE', key, life) end
  end
end

-- A waiter is alive. Never queues a claim.
local function heartbeat(k, id, inbox)
  if is_withdrawn(k, id) then return { 'gone' } end
  local value = live_value(k)
  local held = held_reply(k, value, id)
  if held then return held end
  local record = call('HGET', k.waiters, id)
  if not record or not call('ZSCORE', k.queue, id) then return { 'gone' } end
  local c = parse(id, string.match(record, '^%d+|(.*)$'))
  c.body = table.concat({ num(c.q), num(c.f), num(c.ttl), c.mode, num(c.take), num(c.limit),
                          c.floor, inbox, c.note }, '|')
  allow_when_full(k)
  refresh_entry(k, c)
  if not value or is_shared(value) then
    local granted
    value, granted = hand_over(k, id, value)
    if granted then return { 'granted', num(granted), c.f } end
  end
  return queued_reply(k, id, call('GET', k.fence) or '0', value)
end

-- A claim's first request, or its repetition. `after`: it comes with a release by the same client,
-- which left this (`value`, `left` and `buried`, as of `hand_over`); it is queued if that left the
-- lock free.
local function acquire(k, c, wait, after)
  local known = after or {}
  if known.buried ~= false and is_withdrawn(k, c.id) then return { 'gone' } end
  local value = known.value
  if value == nil then value = live_value(k) end
  local held = held_reply(k, value, c.id)
  if held then return held end
  -- If it must queue, adding it tells whether it is queued already.
  local must_queue = wait and value and not is_shared(value)
  if not must_queue and call('ZSCORE', k.queue, c.id) then return heartbeat(k, c.id, c.inbox) end
  -- Also for a claim that does not wait: else dead waiters in the queue would make the lock busy.
  local is_next, _ = not (is_left_free(k, value) and (after or first_waiter(k)))
  if is_next and (not value or is_shared(value)) and call('EXISTS', k.queue) == 1 then
    value, _, is_next = hand_over(k, nil, value)
  end
  local used_as = clash(k, value, c)
  if used_as then return { 'clash', used_as } end
  if is_next and admits(k, value, c) then
    local token = next_number(k, c)
    add_holder(k, c, token, c.ttl)
    continue_run(k, token)
    return { 'granted-now', num(token) }
  end
  if not wait then return { 'busy', call('PTTL', k.lock) } end
  store_token(k, value)
  local number = num(next_number(k, c))
  if call('ZADD', k.queue, 'NX', number, c.id) == 0 then return heartbeat(k, c.id, c.inbox) end
  refresh_entry(k, c)
  return queued_reply(k, c.id, number, value, known.left)
end

-- Removes a holder, whatever its token. Returns the token, or nil if it did not hold the lock; then
-- the lock's value, if it is known.
local function remove_holder(k, id)
  local value = live_value(k)
  local owner, token = holder_of(k, value)
  if owner == id then
    call('DEL', k.lock)
    return token, false
  end
  local record = is_shared(value) and call('HGET', k.held, id)
  if not record then return nil end
  local held, take = string.match(record, '^(%d+)|%d|%a|(%d+)|')
  call('ZREM', k.holders, id)
  call('HDEL', k.held, id)
  return_permits(k, take)
  if call('ZCARD', k.holders) == 0 then call('DEL', k.lock, k.holders, k.held) end
  return held
end

-- Release and withdrawal: removes the claim from the lock or the queue, and hands the lock over.
-- `next`: a claim of the same client follows. Also returns what `acquire` needs for that claim.
local function end_claim(k, id, token, next)
  local held, value = remove_holder(k, id)
  -- A holder is not queued.
  if not held then dequeue(k, id) end
  if held == '0' then held = token end
  -- If the lock cannot be handed over now, the waiters' heartbeats will find it free.
  local after, fine, is_free = {}
  if held then fine, is_free = pcall(leave_free, k, held, next) end
  if not (fine and is_free) then
    local done, now_held, _, _, known = pcall(hand_over, k, nil, value)
    if done and known then
      after = { value = now_held, left = known.left, buried = known.buried }
    end
  end
  return (held and held == token) and 'released' or 'not-held', after
end
