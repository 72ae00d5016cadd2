-- KEYS the name's seven; ARGV id, claim, wait (1|0).
-- Answers granted-now token | granted token left | queued stamp place left | busy left | gone |
-- clash why.
return acquire(at(1), parse(ARGV[1], ARGV[2]), ARGV[3] == '1')
