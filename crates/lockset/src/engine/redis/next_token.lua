-- The next token or queue number of a name. It is decided here, and nowhere else: above all numbers
-- of the fence so far; not below the caller's `own` floor, if it has one ('' or nil without one);
-- otherwise, after lost state, not below the clock. A fence below `floor`, the server's time when
-- the connection was opened, is new or was lost. Returns nothing if the fence is not a number, or
-- if the numbers are used up.
local function next_token(fence, own, floor)
  local exact = tonumber(own)
  if exact then
    -- Usually the caller's floor is above all numbers so far. Redis 6.0 has no SET with GET.
    local last = redis.pcall('SET', fence, own, 'GET')
    if last == false or (type(last) == 'string' and (tonumber(last) or exact) < exact) then
      return exact < TOKENS_END and exact or nil
    end
    if type(last) == 'string' then redis.call('SET', fence, last) end
  end
  local token = redis.pcall('INCR', fence)
  if type(token) ~= 'number' then return nil end
  if exact then
    redis.call('SET', fence, token > exact and string.format('%.0f', token) or own)
    token = math.max(token, exact)
  elseif token < floor then
    local time = redis.call('TIME')
    token = math.max(floor, time[1] * 1000000 + time[2])
    redis.call('SET', fence, string.format('%.0f', token), 'PX', FENCE_IDLE_MS)
  end
  return token < TOKENS_END and token or nil
end
