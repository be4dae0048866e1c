#!lua flags=allow-oom
-- settle: ends an attempt: confirmed, to be retried, or dead.
--
-- parts: clock, window, manifest
-- KEYS[1] -> <ns>:{<p>}:timers
-- derived -> <ns>:{<p>}: manifest:<w> manifests:<k> bucket:<k> ready:<sink> policy:<flow> outbox stats
-- ARGV[1] -> the instant in ms of a namespace with a virtual clock; '' elsewhere
-- ARGV[2] -> window_id
-- ARGV[3] -> token of the attempt
-- ARGV[4] -> confirmed | retrying | dead
-- ARGV[5] -> cause: the class of an error, never its text
-- ARGV[6] -> back-off, ms, of retrying; else 0
-- reply   -> {'done'|'refused', state or ''}; the same token saying the same again is done again
-- cost    -> O(log timers)

local m = load_manifest(ARGV[2])
local answer = 'refused'
if m.token == ARGV[3] and m.state == 'processing' then
  answer = 'done'
  if ARGV[4] == 'retrying' then
    wake = now + math.max(ARGV[6], 1)
    put('ZADD', KEYS[1], wake, 'm:' .. m.id)
    move(m, 'retrying', ARGV[5])
  else
    leave(m, ARGV[4], ARGV[5])
  end
elseif m.token == ARGV[3] and m.state == ARGV[4] then
  answer = 'done'
end
commit()
finish()
return { answer, m.state or '' }
