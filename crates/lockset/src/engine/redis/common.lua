-- What the scripts share. A script is this text followed by its own; `at(lock, queue)` opens a
-- name. Answers are arrays of strings and numbers; the first word says which.
--
-- The keys of one name, all in one hash slot:
--   lock     STRING  exclusive: id:token:flag:ttl:note. Readers out: '=s'. Permits out: '=p:limit'.
--                    No token: nobody has queued since the grant, and it is what the fence says.
--   fence    STRING  the greatest ticket or token given so far
--   queue    ZSET    id -> ticket; '!' -> 0 while there may be marks: a queue keeps others from
--                    taking the lock without looking
--   waiters  HASH    id -> deadline|q|f|ttl|mode|take|limit|floor|inbox|note
--   holders  ZSET    id -> the end of the lease, while readers or permits are out
--   held     HASH    id -> token|flag|mode|take|ttl|note; '*' -> the sum of the permits out
--   mark     STRING  present: this claim was withdrawn
--   handoffs STRING  only with courtesy: since|token, when the running hand-offs began and the last
--                    token that they gave; or 'free' while the lock is left free
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

-- The answer for one claim of several whose commands failed: a table since Redis 7, before a text.
-- A replica refuses all of them, and the client must know at once.
local function failure(why)
  local text = type(why) == 'table' and why.err or tostring(why)
  if string.find(text, 'READONLY', 1, true) then error(why) end
  return { 'failed', text }
end

-- The keys of a name, found when they are needed: all but the lock begin as its queue does.
local function at(lock, queue)
  local beside = string.sub(queue, 1, -6)
  return setmetatable({ lock = lock, queue = queue }, { __index = function(_, what)
    return beside .. what
  end })
end
-- From now on `id` counts as withdrawn, so a late request for it is refused.
local function mark(k, id, life)
  call('SET', k['mark:' .. id], '1', 'PX', life)
  call('ZADD', k.queue, 0, '!')
  call('PEXPIRE', k.queue, math.max(tonumber(life), call('PTTL', k.queue)))
end
local function is_marked(k, id) return call('EXISTS', k['mark:' .. id]) == 1 end

-- Tells a client; how many listen. A channel that ends with '~' belongs to a slot of this node: if
-- it has moved away, nobody listens here. One that ends with '^' is of a cluster of Redis 6: there
-- a letter reaches the subscribers of all nodes, and only those of this one are counted. A grant
-- that is heard but not counted would be believed and not kept, so nothing is told elsewhere.
local function publish(inbox, letter)
  local last = string.byte(inbox, -1)
  local sharded = last == 126
  if last == 94 then
    local here = redis.pcall('PUBSUB', 'NUMSUB', inbox)
    if here.err or here[2] == 0 then return 0 end
  end
  local heard = redis.pcall(sharded and 'SPUBLISH' or 'PUBLISH', inbox, letter)
  return type(heard) == 'number' and heard or 0
end

-- A claim as it travels: q|f|ttl|mode|take|limit|floor|inbox|note. `floor` with a leading '!' is
-- the caller's own and exact; otherwise it is the server's time when the connection was made.
local function parse(id, body)
  local q, f, ttl, mode, take, limit, floor, inbox, note =
    string.match(body, '^(%d+)|(%d+)|(%d+)|(%a)|(%d+)|(%d+)|(!?%d+)|([^|]*)|(.*)$')
  return { id = id, body = body, q = tonumber(q), f = tonumber(f), ttl = tonumber(ttl), mode = mode,
           take = tonumber(take), limit = tonumber(limit), floor = floor, inbox = inbox,
           note = note }
end

-- The server's time when the connection of this request was made. A script that may hand on gets
-- it, for a waiter's own is as old as its first request: a server that has lost grants since would
-- give their tokens once more.
local made = 0

-- The next ticket or token: above all before, and not below the clock after lost state.
local function next_number(k, c)
  local n = call('INCR', k.fence)
  if string.sub(c.floor, 1, 1) == '!' then
    local exact = tonumber(string.sub(c.floor, 2))
    if n < exact then n = exact end
    call('SET', k.fence, num(n))
  elseif n < math.max(tonumber(c.floor), made) then
    n = math.max(n, tonumber(c.floor), made, now_us())
    call('SET', k.fence, num(n), 'PX', FENCE_IDLE_MS)
  end
  if n >= TOKENS_END then error('the tokens of this name are used up') end
  return n
end

-- Id, token, flag, ttl and note of an exclusive holder.
local function holder_of(k, value)
  local id, token, flag, ttl, note = string.match(value or '', '^(%x+):(%d*):(%d):(%d+):(.*)$')
  -- '0': the fence was lost, and the holder is known by its id alone.
  if token == '' then token = call('GET', k.fence) or '0' end
  return id, token, flag, ttl, note
end

-- Writes the token down before the fence goes on.
local function settle(k, value)
  if not value or not string.find(value, '^%x+::') then return end
  call('SET', k.lock, table.concat({ holder_of(k, value) }, ':'), 'KEEPTTL')
end

-- Whether readers or permits are out. Only then do `holders` and `held` mean anything: what is in
-- them after the lock's own key went (expired, evicted, deleted by somebody) is void.
local function is_shared(value)
  return value == '=s' or (value and string.match(value, '^=p:%d+$') ~= nil)
end

-- Permits that are free again; a reader has none.
local function give_back(k, take)
  if take ~= '0' then call('HINCRBY', k.held, '*', '-' .. take) end
end

-- Drops readers and permits whose lease is over; the lock's value as it then is.
local function value_of(k)
  local value = call('GET', k.lock)
  if is_shared(value) then
    local over = call('ZRANGEBYSCORE', k.holders, '-inf', now())
    for _, id in ipairs(over) do
      local take = string.match(call('HGET', k.held, id) or '', '^%d+|%d|%a|(%d+)|')
      call('HDEL', k.held, id)
      if take then give_back(k, take) end
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

-- Why the name cannot be used in this way, if so.
local function clash_with(mode, limit, c)
  if mode == 'p' and c.mode == 'p' and limit == c.limit then return nil end
  if mode == 'p' then return 'semaphore:' .. num(limit) end
  if c.mode == 'p' then return 'lock' end
  return nil
end
local function first_of(k)
  return call('ZRANGEBYSCORE', k.queue, 1, '+inf', 'LIMIT', 0, 1)[1]
end

local function clash(k, value, c)
  if value and string.sub(value, 1, 3) == '=p:' then
    return clash_with('p', tonumber(string.sub(value, 4)), c)
  elseif value == '=s' or holder_of(k, value) then
    return clash_with('x', 0, c)
  end
  local first = first_of(k)
  local record = first and call('HGET', k.waiters, first)
  if record then
    local w = parse(first, string.match(record, '^%d+|(.*)$'))
    return clash_with(w.mode, w.limit, c)
  end
  return nil
end

-- The keys of readers and permits live as long as the longest lease, and not longer.
local function outlast(k, lease, first)
  if not first and call('PTTL', k.lock) >= lease then return end
  for _, key in ipairs({ k.lock, k.holders, k.held }) do call('PEXPIRE', key, lease) end
end

-- Makes `c` a holder for `lease` milliseconds; the lock's value as it then is.
local function hold(k, c, token, lease)
  if c.mode == 'x' then
    local value = c.id .. ':' .. num(token) .. ':0:' .. num(c.ttl) .. ':' .. c.note
    call('SET', k.lock, value, 'PX', lease)
    return value
  end
  local value = c.mode == 's' and '=s' or '=p:' .. num(c.limit)
  local first = call('SET', k.lock, value, 'NX', 'PX', lease)
  if first then call('DEL', k.holders, k.held) end
  call('ZADD', k.holders, num(now() + lease), c.id)
  call('HSET', k.held, c.id,
       table.concat({ num(token), c.flag or '0', c.mode, num(c.take), num(c.ttl), c.note }, '|'))
  call('HINCRBY', k.held, '*', num(c.take))
  outlast(k, lease, first)
  return value
end

-- A server whose memory is full lets a script go on that has written before. What is kept already
-- is kept on, so this writes nothing, first.
local function even_if_full(k) call('HDEL', k.held, '') end

local function unqueue(k, id)
  call('ZREM', k.queue, id)
  call('HDEL', k.waiters, id)
end

-- Courtesy. Clients that poll the key starve while the lock is handed from claim to claim. So after
-- COURTESY_MS of hand-offs (0: never) one release leaves the lock free for FREE_MS. Nobody who
-- waits is granted it meanwhile; the first is told to look when that is over.
--
-- Since when hand-offs run, if this script ends a hold.
local run_since
local function is_left_free(k, value)
  return COURTESY_MS > 0 and not value and call('GET', k.handoffs) == 'free'
end

-- The run goes on with this token.
local function go_on(k, token)
  if run_since then call('SET', k.handoffs, num(run_since) .. '|' .. num(token), 'PX', 3600000) end
end

-- Tells the first waiter that lives and listens; whether there is one.
local function tell_first(k, letter)
  for place = 0, 63 do
    local id = call('ZRANGEBYSCORE', k.queue, 1, '+inf', 'LIMIT', place, 1)[1]
    local record = id and call('HGET', k.waiters, id)
    if not id then return false end
    if record and tonumber(string.match(record, '^(%d+)|')) > now() then
      local c = parse(id, string.match(record, '^%d+|(.*)$'))
      if publish(c.inbox, 'f' .. id .. letter) > 0 then return true end
    end
  end
  return false
end

-- Whether the lock that the holder of this token gave back is left free. `next` takes it over
-- otherwise, if nobody waits.
local function leave_free(k, token, next)
  if COURTESY_MS == 0 or call('EXISTS', k.lock) == 1 then return false end
  local since, last = string.match(call('GET', k.handoffs) or '', '^(%d+)|(%d+)$')
  -- A greater token was given when the lock was free: the run was over.
  run_since = last and tonumber(token) <= tonumber(last) and tonumber(since) or now()
  if now() - run_since < COURTESY_MS then return false end
  if not tell_first(k, FREE_MS) and not next then return false end
  call('SET', k.handoffs, 'free', 'PX', FREE_MS)
  return true
end

-- Grants to the first live waiters as far as they are admitted. `me` is told by the reply, all
-- others by their inbox; one that is not subscribed just now is passed over and keeps its place.
-- Answers the lock's value, the token of `me` if it was granted, and whether nobody is left who
-- comes before a newcomer.
local function hand_on(k, me)
  local value, place, granted, deaf = value_of(k), 0, nil, {}
  if is_left_free(k, value) then return value, nil, false end
  for _ = 1, 256 do
    local id = call('ZRANGEBYSCORE', k.queue, 1, '+inf', 'LIMIT', place, 1)[1]
    if not id then return value, granted, true end
    local record = call('HGET', k.waiters, id)
    local deadline = record and tonumber(string.match(record, '^(%d+)|'))
    if not record or deadline <= now() then
      unqueue(k, id)
    else
      local c = parse(id, string.match(record, '^%d+|(.*)$'))
      if not admits(k, value, c) then return value, granted, false end
      local token = (id == me or not deaf[c.inbox]) and next_number(k, c)
      if token and (id == me or publish(c.inbox, 'g' .. id .. num(token)) > 0) then
        unqueue(k, id)
        value = hold(k, c, token, c.f)
        go_on(k, token)
        if id == me then granted = token end
        -- Beside an exclusive holder nobody else comes in.
        if c.mode == 'x' then return value, granted, false end
      else
        -- All waiters of a process share its inbox: asked once, it need not be asked again.
        deaf[c.inbox] = true
        place = place + 1
      end
    end
  end
  return value, granted, false
end

-- The answer to one that holds; nil if it does not.
local function holding(k, value, id)
  local owner, token = holder_of(k, value)
  -- Whoever does not know its token cannot be told any more.
  if owner == id and token == '0' then return { 'gone' } end
  if owner == id then return { 'granted', token, call('PTTL', k.lock) } end
  local ends = is_shared(value) and call('ZSCORE', k.holders, id)
  if ends then
    local token = string.match(call('HGET', k.held, id), '^(%d+)|')
    return { 'granted', token, tonumber(ends) - now() }
  end
  return nil
end

-- Whether this is somebody else's lock: its end is not told by a script.
local function is_foreign(value)
  return value and not is_shared(value) and not string.find(value, '^%x+:%d*:%d:%d+:')
end

local function queued(k, id, fence, value)
  local left = call('PTTL', is_left_free(k, value) and k.handoffs or k.lock)
  return { 'queued', fence, call('ZRANK', k.queue, id), left, is_foreign(value) and 1 or 0 }
end

-- The place of `c` lives for another q. A queue of corpses vanishes by itself.
local function refresh(k, c)
  call('HSET', k.waiters, c.id, num(now() + c.q) .. '|' .. c.body)
  local life = c.q * 2 + 60000
  for _, key in ipairs({ k.queue, k.waiters }) do
    -- Not every sign of life has to say so again.
    if call('PTTL', key) < life - 20000 then call('PEXPIRE', key, life) end
  end
end

-- A waiter shows that it lives.
local function heartbeat(k, id, inbox)
  if is_marked(k, id) then return { 'gone' } end
  local value = value_of(k)
  local held = holding(k, value, id)
  if held then return held end
  local record = call('HGET', k.waiters, id)
  if not record or not call('ZSCORE', k.queue, id) then return { 'gone' } end
  local c = parse(id, string.match(record, '^%d+|(.*)$'))
  c.body = table.concat({ num(c.q), num(c.f), num(c.ttl), c.mode, num(c.take), num(c.limit),
                          c.floor, inbox, c.note }, '|')
  even_if_full(k)
  refresh(k, c)
  if not value or is_shared(value) then
    local granted
    value, granted = hand_on(k, id)
    if granted then return { 'granted', num(granted), c.f } end
  end
  return queued(k, id, call('GET', k.fence) or '0', value)
end

-- A claim's first request, or its repetition. `follows`: it comes with a release of its client, and
-- waits if that left the lock free.
local function acquire(k, c, wait, follows)
  if is_marked(k, c.id) then return { 'gone' } end
  local value = value_of(k)
  local held = holding(k, value, c.id)
  if held then return held end
  if call('ZSCORE', k.queue, c.id) then return heartbeat(k, c.id, c.inbox) end
  -- For one that only tries too: else the dead in the queue would make it busy.
  local nobody_before, _ = not (is_left_free(k, value) and (follows or first_of(k)))
  if nobody_before and (not value or is_shared(value)) and call('EXISTS', k.queue) == 1 then
    value, _, nobody_before = hand_on(k, nil)
  end
  local why = clash(k, value, c)
  if why then return { 'clash', why } end
  if nobody_before and admits(k, value, c) then
    local number = next_number(k, c)
    hold(k, c, number, c.ttl)
    go_on(k, number)
    return { 'granted-now', num(number) }
  end
  if not wait then return { 'busy', call('PTTL', k.lock) } end
  settle(k, value)
  local ticket = num(next_number(k, c))
  call('ZADD', k.queue, ticket, c.id)
  refresh(k, c)
  return queued(k, c.id, ticket, value)
end

-- Takes a holder out, whatever its token. Whether it was there, and by which token.
local function drop(k, id)
  local value = value_of(k)
  local owner, token = holder_of(k, value)
  if owner == id then
    call('DEL', k.lock)
    return token
  end
  local record = is_shared(value) and call('HGET', k.held, id)
  if not record then return nil end
  local held, take = string.match(record, '^(%d+)|%d|%a|(%d+)|')
  call('ZREM', k.holders, id)
  call('HDEL', k.held, id)
  give_back(k, take)
  if call('ZCARD', k.holders) == 0 then call('DEL', k.lock, k.holders, k.held) end
  return held
end

-- Release and withdrawal are one: whatever bears the id is removed, and the lock handed on. `next`:
-- a claim of the same client follows.
local function finish(k, id, token, next)
  local held = drop(k, id)
  -- One that held does not wait.
  if not held then unqueue(k, id) end
  if held == '0' then held = token end
  -- The waiters' signs of life find the lock if it cannot be handed on now.
  local fine, is_free
  if held then fine, is_free = pcall(leave_free, k, held, next) end
  if not (fine and is_free) then pcall(hand_on, k, nil) end
  return (held and held == token) and 'released' or 'not-held'
end
