-- The fast path's next token of a fence, and the caller's own floor if it has one. No token: the
-- fence is not a number.
local function next_token(fence, floor)
  local token, exact = redis.pcall('INCR', fence), tonumber(floor)
  if type(token) ~= 'number' then return nil, exact end
  if exact then
    redis.call('SET', fence, token > exact and string.format('%.0f', token) or floor)
    token = math.max(token, exact)
  end
  return token, exact
end
