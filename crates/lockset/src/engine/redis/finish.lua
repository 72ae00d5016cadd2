-- Release of a claim in doubt, and withdrawal. KEYS the name's lock and queue; ARGV id, token (''
-- to withdraw), mark life in ms, the server's time when the connection was made. Answers released |
-- not-held.
made = tonumber(ARGV[4])
local k = at(KEYS[1], KEYS[2])
-- A server that is out of memory refuses marks and grants, but what ends must end there too.
local marked, why = pcall(mark, k, ARGV[1], ARGV[3])
local outcome = finish(k, ARGV[1], ARGV[2])
if not marked then error(why) end
return { outcome }
