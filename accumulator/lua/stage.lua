#!lua flags=allow-oom
-- stage: keeps what a stage of the handler made, so that a retry continues and does not begin anew.
--
-- parts: clock, attempt
-- KEYS[1] -> <ns>:{<p>}:timers
-- derived -> <ns>:{<p>}: manifest:<w> stages:<w>
-- ARGV[1] -> the instant in ms of a namespace with a virtual clock; '' elsewhere
-- ARGV[2] -> window_id
-- ARGV[3] -> token of the attempt
-- ARGV[4] -> stage; '' drops what was kept of all, and the approval of what was proposed
-- ARGV[5] -> its result as JSON
-- reply   -> 'done' | 'refused'
-- cost    -> O(1)

local m = load_attempt(ARGV[2])
if not holds(m, ARGV[3]) then
  return 'refused'
end
local stages = prefix .. 'stages:' .. m.id
if ARGV[4] == '' then
  call('UNLINK', stages)
  call('HDEL', m.name, 'approved')
else
  call('HSET', stages, ARGV[4], ARGV[5])
end
return 'done'
