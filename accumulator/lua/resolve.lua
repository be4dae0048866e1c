#!lua flags=allow-oom
-- resolve: an event that waits in the reconciliation queue joins its bucket's next window, or is discarded; who decided
-- and why is kept. Over maxmemory too: the event is one that was taken in already, and moves.
--
-- parts: clock, naming, window, manifest, ladder, judge
-- KEYS[1] -> <ns>:{<p>}:timers
-- derived -> as accept
-- ARGV[1] -> the instant in ms of a namespace with a virtual clock; '' elsewhere
-- ARGV[2] -> nonce of the caller for window ids, 12 characters [0-9a-z]
-- ARGV[3] -> ''
-- ARGV[4] -> ''
-- ARGV[5] -> item id in reconcile
-- ARGV[6] -> accept | discard
-- ARGV[7] -> who
-- ARGV[8] -> why
-- ARGV[9] -> bucket_key, then event_id, mark, facts, envelope of the item's event, as in accept
-- reply   -> {'done'|'missing', as accept says of an event, or ''}; the same nonce again is answered as before
-- cost    -> O(log open windows)

local key, id = ARGV[9], ARGV[10]
local item = call('XRANGE', prefix .. 'reconcile', ARGV[5], ARGV[5])[1]
local fields = {}
for i = 1, item and #item[2] or 0, 2 do
  fields[item[2][i]] = item[2][i + 1]
end
local b, seal = load_bucket(key), ARGV[2] .. ' ' .. ARGV[5]
if fields.bucket_key ~= key or fields.event_id ~= id then
  local same, said = match(b.fields.resolved or '', '^(%S+ %S+) (.*)$')
  return same == seal and { 'done', said } or { 'missing', '' }
end
b.orders = {}
expire(b)
local answer, e = '', parse_event(10)
note_known(b, fields.at, e.kind, id) -- where a ladder that starts later looks for it, it stands no more
if ARGV[6] == 'accept' then
  local p = b.window and b.window.policy or policy_of(b.flow)
  b.known = lookup_ids(b, { id })
  local k = b.known[id]
  local revised = k ~= nil and k.first ~= nil and fields.code ~= 'set_aside'
  if k and k.retracted then
    k.retracted, k.last = false, nil -- it counts anew
  end
  answer = told(b, take_in(b, e, p, fields.code == 'late' or fields.code == 'too_old', revised, true))
end
b.queued = b.queued and tonumber(b.queued) > 1 and b.queued - 1 or nil
put('XDEL', prefix .. 'reconcile', ARGV[5])
audit(b.now, ARGV[6] == 'accept' and 'resolved' or 'discarded', key, id, 'code', fields.code, 'by', ARGV[7], 'why', ARGV[8])
count('resolved')
if not b.queued then
  put('ZADD', KEYS[1], 'LT', b.remembered or b.now, 'r:' .. key)
end
b.resolved = seal .. ' ' .. answer
save_bucket(b)
commit()
finish()
return { 'done', answer }
