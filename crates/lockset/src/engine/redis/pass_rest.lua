-- The end of `pass.lua`, after `common.lua`.
made = tonumber(ARGV[3])
local k = at(KEYS[1], KEYS[3])
if not given and finish(k, ARGV[8], ARGV[9], true) ~= 'released' then
  return { 0, { 'untouched' } }
end
-- The lock was given back, whatever becomes of the next.
local fine, answer = pcall(acquire, k, parse(ARGV[4], ARGV[5]), ARGV[6] == '1', true)
return { 1, fine and answer or failure(answer) }
