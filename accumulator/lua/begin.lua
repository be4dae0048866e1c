#!lua flags=allow-oom
-- begin: grants an attempt of a manifest, once. From here its lease runs. A step whose ladder was called off is refused.
--
-- parts: clock, window, manifest
-- KEYS[1] -> <ns>:{<p>}:timers
-- derived -> <ns>:{<p>}: manifest:<w> events:<w> kept:<w> bucket:<k> policy:<flow> tenants:<sink> ready:<sink>:<tenant>
--            inflight outbox attention ladder:<l> stats
-- ARGV[1] -> the instant in ms of a namespace with a virtual clock; '' elsewhere
-- ARGV[2] -> window_id
-- ARGV[3] -> attempt
-- ARGV[4] -> token that will fence this attempt, 16 characters [0-9a-z]
-- ARGV[5] -> lease, ms
-- ARGV[6] -> how many failures the handler allows
-- ARGV[7] -> '<ms> <ms>': what it waits for where its lease ends, doubled with each failure, and at the most
-- reply   -> {'granted'|'refused', state or '', and where granted: fields of the manifest, the payload it keeps or '',
--            the first 1000 entries of its events}; the same token asking again is granted again
-- cost    -> O(entries + log timers)

local m = load_manifest(ARGV[2])
local granted = false
if m.ladder and m.state == 'dispatched' and m.event ~= 'cancelled'
  and call('HEXISTS', prefix .. 'ladder:' .. m.ladder, 'off') == 1 then
  leave(m, 'discarded', 'cancelled') -- what everybody waited for has come
elseif m.state == 'dispatched' and m.attempt == tonumber(ARGV[3]) and not m.leader then
  granted = true
  m.most = tonumber(ARGV[6])
  if m.back then
    unready(m)
  end
  move(m, 'processing', 'begun', 'token', ARGV[4], 'lease', now + ARGV[5], 'most', m.most,
    'pause', ARGV[7])
  put('ZADD', KEYS[1], now + ARGV[5], 'm:' .. m.id)
elseif m.state == 'processing' and m.token == ARGV[4] then
  granted = true
end
commit()
finish()
if not granted then
  return { 'refused', m.state or '' }
end
return {
  'granted', m.state, call('HGETALL', m.name), call('GET', prefix .. 'kept:' .. m.id) or '',
  call('XRANGE', prefix .. 'events:' .. m.id, '-', '+', 'COUNT', 1000),
}
