#!lua flags=allow-oom
-- settle: ends attempts. What a token may say depends on nothing but its lease: whoever comes late has no say.
--
-- parts: clock, attempt, window, manifest
-- KEYS[1] -> <ns>:{<p>}:timers
-- derived -> <ns>:{<p>}: manifest:<w> manifests:<k> bucket:<k> effects:<w> checkpoint:<k> policy:<flow> tenants:<sink>
--            ready:<sink>:<tenant> inflight outbox attention unrecorded audit ladder:<l> stats
-- ARGV[1] -> the instant in ms of a namespace with a virtual clock; '' elsewhere
-- ARGV[2...] -> of each attempt eight of them, and a record:
--            window_id
--            token of the attempt
--            confirmed | failed (retrying, or dead after the last failure allowed) | returned (retrying, no failure) |
--            dead | awaiting_approval | uncertain | reconciling | superseded
--            cause: one word, such as the class of an error
--            ms: back-off of failed and returned, time limit of awaiting_approval; else 0
--            text of the error, without payload; ''
--            of confirmed, a checkpoint for the bucket's next window; ''
--            how many of the arguments that follow are the record of the window, as write_record says; 0: none is given
-- reply   -> for each {'done'|'refused'|'effects_begun'|'no_newer_window', state or ''}: no_newer_window where none is
--            open or waits, that it could join, or as many as may be handed over together join it; the same token
--            again is done again
-- cost    -> O(entries recorded + attempts * log timers)

local function give_way(m, extra)
  if call('EXISTS', prefix .. 'effects:' .. m.id) == 1 then
    return 'effects_begun'
  elseif not newer_waits(m) then
    return 'no_newer_window'
  end
  local bucket, ways = prefix .. 'bucket:' .. m.bucket, { m }
  local joins = call('HGET', bucket, 'joins') or ''
  for id in string.gmatch(joins .. ' ' .. (m.joined or ''), '%w+') do
    ways[#ways + 1] = load_manifest(id)
  end
  if #ways >= TOGETHER then
    return 'no_newer_window' -- the next hand-over has no room for them
  end
  table.sort(ways, function(one, other)
    return one.version < other.version
  end)
  for i, other in ipairs(ways) do
    ways[i] = other.id
  end
  put('HSET', m.name, 'gave_way', 1)
  for id in string.gmatch(m.joined or '', '%w+') do
    put('HSET', prefix .. 'manifest:' .. id, 'gave_way', 1)
    put('HDEL', prefix .. 'manifest:' .. id, 'leader')
  end
  put('HSET', bucket, 'joins', table.concat(ways, ' '))
  move(m, 'closed', 'gave_way', 'token', '', unpack(extra))
  put('HDEL', m.name, 'joined')
  put('ZREM', KEYS[1], 'm:' .. m.id)
  commit()
  release(m)
  return 'done'
end

local function settle(m, token, to, cause, delay, text, checkpoint, first, last)
  if not holds(m, token) then
    return m.state and call('HGET', m.name, 'settled_by') == token and 'done' or 'refused'
  end
  write_record(m, first, last)
  local extra = { 'settled_by', token }
  if text ~= '' then
    extra[3], extra[4] = 'error', text
  end
  if to == 'failed' then
    fail(m, cause, delay, unpack(extra))
  elseif to == 'returned' then
    retry(m, cause, delay, unpack(extra))
  elseif to == 'awaiting_approval' then
    move(m, to, cause, 'token', '', unpack(extra))
    put('HDEL', m.name, 'approved')
    put('ZADD', KEYS[1], now + delay, 'm:' .. m.id)
  elseif to == 'superseded' then
    return give_way(m, extra)
  else
    local kept = prefix .. 'checkpoint:' .. m.bucket
    if to == 'confirmed' and checkpoint ~= '' and m.version >= tonumber(match(call('GET', kept) or '0', '^%d+')) then
      put_first('SET', kept, m.version .. ' ' .. checkpoint)
    end
    leave(m, to, cause, 'token', '', unpack(extra))
  end
  return 'done'
end

local replies, at = {}, 2
while at <= #ARGV do
  local m, last = load_manifest(ARGV[at]), at + 7 + ARGV[at + 7]
  local told = settle(m, ARGV[at + 1], ARGV[at + 2], ARGV[at + 3], tonumber(ARGV[at + 4]), ARGV[at + 5], ARGV[at + 6],
    at + 8, last)
  commit()
  replies[#replies + 1] = { told, m.state or '' }
  at = last + 1
end
finish()
return replies
