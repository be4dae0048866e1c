#!lua flags=allow-oom
-- reserve: makes one taker at a time take of a tenant that has a limit, wherever its manifests lie: it counts what is
-- in flight, takes, and lets go. One that does not let go loses it after a while.
--
-- parts: clock
-- KEYS[1] -> <ns>:{<p>}:timers
-- derived -> <ns>:{<p>}: taking
-- ARGV[1] -> the instant in ms of a namespace with a virtual clock; '' elsewhere
-- ARGV[2] -> tenant
-- ARGV[3] -> token of the taker, 16 characters [0-9a-z]
-- ARGV[4] -> for how long, ms; 0: lets go
-- reply   -> 1, or 0 where somebody else takes
-- cost    -> O(1)

local taking, tenant, token, ms = prefix .. 'taking', ARGV[2], ARGV[3], tonumber(ARGV[4])
local by, till = match(call('HGET', taking, tenant) or '', '^(%w+) (%d+)$')
-- One that ends later than a new one would was made before the clock was set back.
if by and by ~= token and now < tonumber(till) and (ms == 0 or tonumber(till) <= now + ms) then
  return 0
elseif ms > 0 then
  call('HSET', taking, tenant, token .. ' ' .. format('%d', now + ms))
elseif by == token then
  call('HDEL', taking, tenant)
end
return 1
