-- Release of a claim in doubt, and withdrawal. KEYS the name's lock and queue; ARGV id, token (''
-- to withdraw), mark life in ms, the server's time when the connection was made. Answers released |
-- not-held.
made = tonumber(ARGV[4])
local k = at(KEYS[1], KEYS[2])
-- A server that is out of memory refuses marks and grants, but what ends must end there too.
local marked = redis.pcall('SET', k['mark:' .. ARGV[1]], '1', 'PX', ARGV[3])
if not marked.err then marked = redis.pcall('ZADD', k.queue, 0, '!') end
if type(marked) == 'number' then
  call('PEXPIRE', k.queue, math.max(tonumber(ARGV[3]), call('PTTL', k.queue)))
  marked = {}
end
local outcome = finish(k, ARGV[1], ARGV[2])
if marked.err then return marked end
return { outcome }
