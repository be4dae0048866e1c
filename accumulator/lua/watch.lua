#!lua flags=allow-oom
-- watch: from now on this partition notices the events of these kinds, which cancel ladders. Since when it does stays
-- what it was.
--
-- parts: clock
-- KEYS[1] -> <ns>:{<p>}:timers
-- derived -> <ns>:{<p>}: watched
-- ARGV[1] -> the instant in ms of a namespace with a virtual clock; '' elsewhere
-- ARGV[2...] -> the kinds
-- reply   -> how many of them it did not notice before
-- cost    -> O(kinds)

local added = 0
for i = 2, #ARGV do
  added = added + call('HSETNX', prefix .. 'watched', ARGV[i], format('%d', now))
end
return added
