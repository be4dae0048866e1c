#!lua flags=allow-oom
-- record: writes ids, digests and flags of a window into its manifest, where they stay when the payloads go. Done at the
-- first hand-out, or by the janitor; the same record again changes nothing.
--
-- parts: clock, window, manifest
-- KEYS[1] -> <ns>:{<p>}:timers
-- derived -> <ns>:{<p>}: manifest:<w> unrecorded policy:<flow>
-- ARGV[1] -> the instant in ms of a namespace with a virtual clock; '' elsewhere
-- ARGV[2] -> window_id
-- ARGV[3] -> the manifest's digest
-- ARGV[4] -> anomaly found on reading, or ''
-- ARGV[5] -> number of retracted ids, then they in order, then the entries' texts in order:
--            '<digest> <received_at> <flags|-> <bytes of event_id> <event_id><ref>'; flags l late, r revised
-- reply   -> 'done' | 'missing'
-- cost    -> O(entries)

local m = load_manifest(ARGV[2])
if not m.state then
  return 'missing'
end
if not call('HGET', m.name, 'digest') then
  local retracted = tonumber(ARGV[5])
  local fields = {}
  for i = 6, #ARGV do
    local k = #fields
    if i <= 5 + retracted then
      fields[k + 1] = 'x' .. (i - 5)
    else
      fields[k + 1] = 'e' .. (i - 5 - retracted)
    end
    fields[k + 2] = ARGV[i]
    if #fields >= 1000 then
      put('HSET', m.name, unpack(fields))
      fields = {}
    end
  end
  if #fields > 0 then
    put('HSET', m.name, unpack(fields))
  end
  if ARGV[4] ~= '' then
    put('HSET', m.name, 'anomaly', ARGV[4])
    count('anomalies')
    audit(now, 'anomaly', m.bucket, '', 'code', ARGV[4], 'window', m.id)
  end
  put('HSET', m.name, 'digest', ARGV[3])
  put('SREM', prefix .. 'unrecorded', m.id)
  commit()
end
finish()
return 'done'
