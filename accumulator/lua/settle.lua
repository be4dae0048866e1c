#!lua flags=allow-oom
-- settle: ends an attempt. What the token may say depends on nothing but its lease: whoever comes late has no say.
--
-- parts: clock, window, manifest
-- KEYS[1] -> <ns>:{<p>}:timers
-- derived -> <ns>:{<p>}: manifest:<w> manifests:<k> bucket:<k> effects:<w> checkpoint:<k> policy:<flow> tenants:<sink>
--            ready:<sink>:<tenant> inflight outbox attention unrecorded audit ladder:<l> stats
-- ARGV[1] -> the instant in ms of a namespace with a virtual clock; '' elsewhere
-- ARGV[2] -> window_id
-- ARGV[3] -> token of the attempt
-- ARGV[4] -> confirmed | failed (retrying, or dead after the last failure allowed) | returned (retrying, no failure) |
--            dead | awaiting_approval | uncertain | reconciling | superseded
-- ARGV[5] -> cause: one word, such as the class of an error
-- ARGV[6] -> ms: back-off of failed and returned, time limit of awaiting_approval; else 0
-- ARGV[7] -> text of the error, without payload; ''
-- ARGV[8] -> of confirmed, a checkpoint for the bucket's next window; ''
-- ARGV[9] -> from here on, the record of the window, as write_record says; ''
-- reply   -> {'done'|'refused'|'effects_begun'|'no_newer_window', state or ''}: no_newer_window where none is open or waits,
--            that it could join; the same token again is done again
-- cost    -> O(entries recorded + log timers)

local m = load_manifest(ARGV[2])
local to, cause, delay = ARGV[4], ARGV[5], tonumber(ARGV[6])
local answer = 'refused'
if holds(m, ARGV[3]) then
  answer = 'done'
  write_record(m, 9)
  local extra = { 'settled_by', ARGV[3] }
  if ARGV[7] ~= '' then
    extra[3], extra[4] = 'error', ARGV[7]
  end
  if to == 'failed' then
    fail(m, cause, delay, unpack(extra))
  elseif to == 'returned' then
    move(m, 'retrying', cause, 'token', '', unpack(extra))
    wake = now + math.max(delay, 1)
    put('ZADD', KEYS[1], wake, 'm:' .. m.id)
  elseif to == 'awaiting_approval' then
    move(m, to, cause, 'token', '', unpack(extra))
    put('HDEL', m.name, 'approved')
    put('ZADD', KEYS[1], now + delay, 'm:' .. m.id)
  elseif to == 'superseded' then
    if call('EXISTS', prefix .. 'effects:' .. m.id) == 1 then
      answer = 'effects_begun'
    elseif not newer_waits(m) then
      answer = 'no_newer_window'
    else
      local bucket = prefix .. 'bucket:' .. m.bucket
      local joins = with_id(call('HGET', bucket, 'joins'), m)
      put('HSET', m.name, 'gave_way', 1)
      for id in string.gmatch(m.joined or '', '%w+') do
        joins = with_id(joins, load_manifest(id))
        put('HSET', prefix .. 'manifest:' .. id, 'gave_way', 1)
        put('HDEL', prefix .. 'manifest:' .. id, 'leader')
      end
      put('HSET', bucket, 'joins', joins)
      move(m, 'closed', 'gave_way', 'token', '', unpack(extra))
      put('HDEL', m.name, 'joined')
      put('ZREM', KEYS[1], 'm:' .. m.id)
      commit()
      release(m)
    end
  else
    local checkpoint = prefix .. 'checkpoint:' .. m.bucket
    if to == 'confirmed' and ARGV[8] ~= '' and m.version >= tonumber(match(call('GET', checkpoint) or '0', '^%d+')) then
      put_first('SET', checkpoint, m.version .. ' ' .. ARGV[8])
    end
    leave(m, to, cause, 'token', '', unpack(extra))
  end
elseif m.state and call('HGET', m.name, 'settled_by') == ARGV[3] then
  answer = 'done'
end
commit()
finish()
return { answer, m.state or '' }
