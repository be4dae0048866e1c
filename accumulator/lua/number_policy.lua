#!lua flags=allow-oom
-- number_policy: gives a flow's policy, or a ladder's definition, its number, one sequence for the whole namespace.
-- Equal content keeps its number.
--
-- KEYS[1] -> <ns>:meta
-- ARGV[1] -> flow:<flow> | ladder:<name>
-- ARGV[2] -> the policy or definition as canonical JSON
-- ARGV[3] -> '1': only where there is none yet
-- reply   -> {number, 'new'|'same'|'kept', the JSON that holds}
-- cost    -> O(1)

local call = redis.call
local held = call('HGET', KEYS[1], ARGV[1])
if held then
  local number, json = string.match(held, '^(%d+) (.*)$')
  if json == ARGV[2] then
    return { tonumber(number), 'same', json }
  elseif ARGV[3] == '1' then
    return { tonumber(number), 'kept', json }
  end
end
local number = call('HINCRBY', KEYS[1], 'policies', 1)
call('HSET', KEYS[1], ARGV[1], number .. ' ' .. ARGV[2])
return { number, 'new', ARGV[2] }
