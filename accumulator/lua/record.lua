#!lua flags=allow-oom
-- record: writes ids, digests and flags of a window into its manifest, where they stay when the payloads go. Done by
-- settle; apart from it for those that were handed over with the manifest that is settled, and by the janitor where
-- there was no attempt. The same record again changes nothing.
--
-- parts: clock, window, manifest
-- KEYS[1] -> <ns>:{<p>}:timers
-- derived -> <ns>:{<p>}: manifest:<w> unrecorded policy:<flow> audit stats
-- ARGV[1] -> the instant in ms of a namespace with a virtual clock; '' elsewhere
-- ARGV[2] -> window_id
-- ARGV[3] -> from here on, the record of the window, as write_record says
-- reply   -> 'done' | 'missing'
-- cost    -> O(entries)

local m = load_manifest(ARGV[2])
if not m.state then
  return 'missing'
end
write_record(m, 3, #ARGV)
commit()
finish()
return 'done'
