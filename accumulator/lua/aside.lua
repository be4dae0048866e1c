#!lua
-- aside: a handler sets an event of its manifest aside, to reconciliation, and finishes the rest.
--
-- parts: clock, attempt, window, manifest
-- KEYS[1] -> <ns>:{<p>}:timers
-- derived -> <ns>:{<p>}: manifest:<w> effects:<w> bucket:<k> reconcile policy:<flow> stats audit
-- ARGV[1] -> the instant in ms of a namespace with a virtual clock; '' elsewhere
-- ARGV[2] -> window_id
-- ARGV[3] -> token of the attempt
-- ARGV[4] -> event_id
-- ARGV[5] -> digest of the event
-- ARGV[6] -> its envelope
-- ARGV[7] -> why
-- ARGV[8] -> how many items the partition's queue may hold; '' for no limit
-- reply   -> 'done' | 'refused' | 'full'; the same event again is done again
-- cost    -> O(1)

local m = load_manifest(ARGV[2])
if not holds(m, ARGV[3]) then
  return 'refused'
end
local ledger, name = prefix .. 'effects:' .. m.id, 'aside:' .. ARGV[4]
if not call('HGET', ledger, name) then
  if ARGV[8] ~= '' and call('XLEN', prefix .. 'reconcile') >= tonumber(ARGV[8]) then
    return 'full'
  end
  local bucket = prefix .. 'bucket:' .. m.bucket
  local queued = tonumber(call('HGET', bucket, 'queued') or 0)
  put('XADD', prefix .. 'reconcile', shared_id(), 'at', now, 'code', 'set_aside', 'bucket_key', m.bucket, 'event_id',
    ARGV[4], 'digest', ARGV[5], 'known', ARGV[5], 'window', m.version, 'envelope', ARGV[6], 'why', ARGV[7])
  put('HSET', ledger, name, 'confirmed ' .. m.attempt .. ' ' .. format('%d', now) .. ' - ')
  put('HSET', bucket, 'queued', queued + 1)
  count('reconciled:set_aside')
  commit()
end
finish()
return 'done'
