-- For the benchmark: stores the token at once in the value of a mutex, which starts with the id.
local function store_early(lock, value, token)
  redis.call('SET', lock, string.sub(value, 1, 33) .. string.format('%.0f', token)
    .. string.sub(value, 34), 'KEEPTTL')
end
