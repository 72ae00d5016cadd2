-- The next token of a fence, in the usual case, and the caller's own floor if it has one. No token:
-- the fence cannot be counted on.
local function draw(fence, own)
  local token, exact = redis.pcall('INCR', fence), tonumber(own)
  if type(token) ~= 'number' then return nil, exact end
  if exact then
    redis.call('SET', fence, token > exact and string.format('%.0f', token) or own)
    token = math.max(token, exact)
  end
  return token, exact
end
