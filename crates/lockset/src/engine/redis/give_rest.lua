-- The end of `give.lua`, after `common.lua`.
made = tonumber(ARGV[4])
return finish(at(KEYS[1], KEYS[2]), ARGV[2], ARGV[3]) == 'released' and 1 or 0
