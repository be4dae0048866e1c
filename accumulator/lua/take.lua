#!lua flags=allow-oom
-- take: takes manifests whose turn has come, for a sink to run. Each stays watched: where its attempt does not begin
-- in time, tick puts it back, at doubling distances.
--
-- parts: clock, window, manifest
-- KEYS[1] -> <ns>:{<p>}:timers
-- derived -> <ns>:{<p>}: ready:<sink> manifest:<w> policy:<flow> stats
-- ARGV[1] -> the instant in ms of a namespace with a virtual clock; '' elsewhere
-- ARGV[2] -> sink
-- ARGV[3] -> how many at the most
-- ARGV[4] -> first watch, ms
-- reply   -> {window_id, attempt, bucket_key, ...}
-- cost    -> O(taken * log timers)

local ready, seen, taken = prefix .. 'ready:' .. ARGV[2], {}, {}
local turns = call('LRANGE', ready, 0, ARGV[3] - 1)
for i = 1, #turns do
  -- One that was put back by its watch and by its lease stands here twice.
  local m = seen[turns[i]] and {} or load_manifest(turns[i])
  seen[turns[i]] = true
  if m.state == 'closed' or m.state == 'retrying' or m.state == 'dispatched' then
    local cause = 'taken'
    if m.state == 'dispatched' then
      cause = 'taken_again'
    else
      m.attempt, m.dispatches = m.attempt + 1, 0
    end
    move(m, 'dispatched', cause, 'dispatches', m.dispatches + 1)
    put('ZADD', KEYS[1], now + ARGV[4] * 2 ^ math.min(m.dispatches, 10), 'm:' .. m.id)
    taken[#taken + 1], taken[#taken + 2], taken[#taken + 3] = m.id, m.attempt, m.bucket
  end
end
if #turns > 0 then
  put('LTRIM', ready, #turns, -1) -- last: what fails before is taken again
end
commit()
finish()
return taken
