#!lua
-- show: a bucket as it stands, at one instant; reads only.
--
-- parts: clock, window
-- KEYS[1] -> <ns>:{<p>}:timers
-- derived -> <ns>:{<p>}: bucket:<k> events:<k> policy:<flow>
-- ARGV[1] -> the instant in ms of a namespace with a virtual clock; '' elsewhere
-- ARGV[2] -> bucket_key
-- reply   -> {now, due_at or 0, the reason it would close for, field, value ...} of bucket:<k>; due_at is the true one
-- cost    -> O(fields)

local b = load_bucket(ARGV[2])
local reply = { format('%d', b.now), '0', '' }
if b.window then
  local due = due_at(b.window)
  reply[2], reply[3] = format('%d', due), reason_at(b.window, due)
end
for field, value in pairs(b.fields) do
  reply[#reply + 1], reply[#reply + 2] = field, value
end
return reply
