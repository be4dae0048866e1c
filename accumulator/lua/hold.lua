#!lua
-- hold: keeps a bucket's open window open for a while without an event; lifts the inactivity limit only.
--
-- parts: clock, window
-- KEYS[1] -> <ns>:{<p>}:timers
-- derived -> as accept, less ids and order
-- ARGV[1] -> the instant in ms of a namespace with a virtual clock; '' elsewhere
-- ARGV[2] -> bucket_key
-- ARGV[3] -> how long from now, ms
-- reply   -> {version held or 0 where none is open, its due_at, <closed> ...}, closed as in flush
-- cost    -> O(log open windows)

local b = load_bucket(ARGV[2])
expire(b)
local w = b.window
if w then
  w.hold = math.max(w.hold, b.now + ARGV[3])
end
save_bucket(b)
commit()
finish()
return { w and w.version or 0, w and due_at(w) or 0, unpack(b.closed) }
