#!lua flags=allow-oom
-- begin: grants attempts of manifests, each once. From here its lease runs. A step whose ladder was called off is
-- refused.
--
-- parts: clock, window, manifest
-- KEYS[1] -> <ns>:{<p>}:timers
-- derived -> <ns>:{<p>}: manifest:<w> events:<w> kept:<w> bucket:<k> policy:<flow> tenants:<sink> ready:<sink>:<tenant>
--            inflight outbox attention ladder:<l> stats
-- ARGV[1] -> the instant in ms of a namespace with a virtual clock; '' elsewhere
-- ARGV[2] -> token that will fence these attempts, 16 characters [0-9a-z]
-- ARGV[3...] -> of each five of them: window_id, attempt, lease in ms, how many failures the handler allows, and
--            '<ms> <ms>': what it waits for where its lease ends, doubled with each failure, and at the most
-- reply   -> for each {'granted', state, fields of the manifest, the payload it keeps or '', the first 1000 entries of
--            its events}; {'refused', state or ''}; {'later'}: nothing was done, since the reply is long enough with
--            those before. The same token asking again is granted again
-- cost    -> O(entries + manifests * log timers)

local LONG, HEAVY = 1000, 1048576 -- entries and bytes of payloads after which no further one is granted

local token, entries, bytes, replies = ARGV[2], 0, 0, {}
for at = 3, #ARGV, 5 do
  local reply = { 'later' }
  if entries < LONG and bytes < HEAVY then
    local m = load_manifest(ARGV[at])
    local granted = false
    if m.state == 'dispatched' and called_off(m) then
      leave(m, 'discarded', 'cancelled')
    elseif m.state == 'dispatched' and m.attempt == tonumber(ARGV[at + 1]) and not m.leader then
      granted = true
      m.most = tonumber(ARGV[at + 3])
      if m.back then
        unready(m)
      end
      move(m, 'processing', 'begun', 'token', token, 'lease', now + ARGV[at + 2], 'most', m.most,
        'pause', ARGV[at + 4])
      put('ZADD', KEYS[1], now + ARGV[at + 2], 'm:' .. m.id)
    elseif m.state == 'processing' and m.token == token then
      granted = true
    end
    commit()
    reply = { 'refused', m.state or '' }
    if granted then
      reply = {
        'granted', m.state, call('HGETALL', m.name), call('GET', prefix .. 'kept:' .. m.id) or '',
        call('XRANGE', prefix .. 'events:' .. m.id, '-', '+', 'COUNT', 1000),
      }
      local sizes = call('HMGET', m.name, 'entries', 'bytes')
      entries, bytes = entries + (sizes[1] or 0), bytes + (sizes[2] or 0)
    end
  end
  replies[#replies + 1] = reply
end
finish()
return replies
