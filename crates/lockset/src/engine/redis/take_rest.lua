-- The end of `take.lua`, after `common.lua`.
made = tonumber(ARGV[3])
return acquire(at(KEYS[1], KEYS[3]), parse(ARGV[4], ARGV[5]), ARGV[6] == '1')
