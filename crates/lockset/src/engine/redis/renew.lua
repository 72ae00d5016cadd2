-- KEYS seven per claim; ARGV per claim id, token, ttl, add (1: the ttl is added to what is left, for
-- a fixed lease that began short). Answers per claim: renewed left | revoked | lost.
local answers = {}
for i = 0, #ARGV / 4 - 1 do
  local k = at(i * 7 + 1)
  local id, token, ttl, add = ARGV[i * 4 + 1], ARGV[i * 4 + 2], tonumber(ARGV[i * 4 + 3]), ARGV[i * 4 + 4]
  local answer = { 'lost' }
  local value = value_of(k)
  local owner, held, flag = holder_of(value)
  if owner == id and held == token then
    if flag == '1' then
      answer = { 'revoked' }
    else
      if add == '1' then ttl = ttl + call('PTTL', k.lock) end
      call('PEXPIRE', k.lock, ttl)
      answer = { 'renewed', ttl }
    end
  else
    local record = call('HGET', k.held, id) or ''
    local its, revoked = string.match(record, '^(%d+)|(%d)|')
    if its == token then
      if revoked == '1' then
        answer = { 'revoked' }
      else
        if add == '1' then ttl = ttl + tonumber(call('ZSCORE', k.holders, id)) - now() end
        call('ZADD', k.holders, now() + ttl, id)
        if call('PTTL', k.lock) < ttl then call('PEXPIRE', k.lock, ttl) end
        answer = { 'renewed', ttl }
      end
    end
  end
  answers[i + 1] = answer
end
return answers
