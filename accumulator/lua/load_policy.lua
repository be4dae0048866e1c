#!lua flags=allow-oom
-- load_policy: writes a policy version into one partition; an older version than the latest changes no latest.
--
-- KEYS[1] -> <ns>:{<p>}:policy:<flow>
-- ARGV[1] -> version
-- ARGV[2] -> rules, as accumulator/policy.py writes them
-- ARGV[3...] -> field, value of what belongs to the version: '<v>:json', '<v>:cutoffs', '<v>:kind:<kind>'
-- reply   -> the latest version of the flow in this partition
-- cost    -> O(fields)

local call = redis.call
local latest = string.match(call('HGET', KEYS[1], 'latest') or '0', '^%d+')
if tonumber(ARGV[1]) > tonumber(latest) then
  latest = ARGV[1]
  call('HSET', KEYS[1], 'latest', ARGV[1] .. ' ' .. ARGV[2], ARGV[1], ARGV[2], unpack(ARGV, 3))
else
  call('HSET', KEYS[1], ARGV[1], ARGV[2], unpack(ARGV, 3))
end
return tonumber(latest)
