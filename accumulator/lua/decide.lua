#!lua flags=allow-oom
-- decide: what a person, or a program in a person's place, decides of a manifest; their name and reason stay in its
-- timeline.
--
-- parts: clock, window, manifest
-- KEYS[1] -> <ns>:{<p>}:timers
-- derived -> as settle, and effects:<w>
-- ARGV[1] -> the instant in ms of a namespace with a virtual clock; '' elsewhere
-- ARGV[2] -> window_id
-- ARGV[3] -> approve | refuse (of awaiting_approval) | replay (of dead, uncertain, reconciling) | discard (of all that
--            is not settled, but for one that is processing under its lease: its handler is at work, and the bucket's
--            next one must not begin beside it) | confirm (of dead, uncertain, reconciling: it has happened)
-- ARGV[4] -> who
-- ARGV[5] -> why
-- ARGV[6] -> how uncertain effects are to be taken by a replay: done | not_done | '' (as they stand)
-- ARGV[7] -> nonce of this decision: the same one again is done again
-- reply   -> {'done'|'wrong_state'|'missing', state or ''}
-- cost    -> O(effects + log timers)

-- What nobody has begun stands in lists: those of its bucket, and the one it is taken from once its turn has come.
local function withdraw(m)
  local bucket, timed = prefix .. 'bucket:' .. m.bucket, call('ZSCORE', KEYS[1], 'm:' .. m.id)
  local turn, waits, joins
  if m.ladder then
    turn = call('HGET', prefix .. 'ladder:' .. m.ladder, 'turn')
  else
    turn, waits, joins = unpack(call('HMGET', bucket, 'turn', 'waits', 'joins'))
  end
  if m.back or (m.state == 'retrying' and not timed and not listed_in(waits, m.id))
    or (m.state == 'closed' and (turn == m.id or m.rules.ordered == '0')) then
    unready(m)
  end
  for field, list in pairs({ waits = waits or nil, joins = joins or nil }) do
    local rest = {}
    for id in string.gmatch(list, '%w+') do
      rest[#rest + 1] = id ~= m.id and id or nil
    end
    if #rest > 0 then
      put('HSET', bucket, field, table.concat(rest, ' '))
    else
      put('HDEL', bucket, field)
    end
  end
  commit()
end

-- Those of an unordered bucket that gave way to what was discarded are handed over after all, where nobody else comes.
local function hand_back(m)
  local turn, joins, open = unpack(call('HMGET', prefix .. 'bucket:' .. m.bucket, 'turn', 'joins', 'open'))
  if m.ladder or turn or open or not joins then
    return
  end
  local comes = later({ bucket = m.bucket, version = 0 }, function(other)
    return other.state == 'closed' and not listed_in(joins, other.id)
  end)
  if not comes then
    give_turn(load_manifest(match(joins, '(%w+)$')))
  end
end

local m = load_manifest(ARGV[2])
if m.leader and not SETTLED[m.state] then
  m = load_manifest(m.leader) -- what was handed over together is decided together
end
local decision = ARGV[3]
local cause = decision .. ' by ' .. ARGV[4] .. ': ' .. ARGV[5]
local troubled = m.state == 'dead' or m.state == 'uncertain' or m.state == 'reconciling'
local waits = m.state == 'awaiting_approval'
local idle = m.state == 'closed' or m.state == 'dispatched' or m.state == 'retrying'
  or (m.state == 'processing' and now >= m.lease)
local answer = 'done'
if not m.state then
  answer = 'missing'
elseif call('HGET', m.name, 'decided') == ARGV[7] then
  answer = 'done'
elseif (decision == 'approve' and waits) or (decision == 'replay' and troubled) then
  local ledger = prefix .. 'effects:' .. m.id
  if ARGV[6] ~= '' then
    local effects = call('HGETALL', ledger)
    for i = 1, #effects, 2 do
      local state, rest = match(effects[i + 1], '^(%a+) (.*)$')
      if state ~= 'confirmed' then
        if ARGV[6] == 'done' then
          put('HSET', ledger, effects[i], 'confirmed ' .. rest)
        else
          put('HDEL', ledger, effects[i])
        end
      end
    end
  end
  m.failures = 0
  if decision == 'approve' then
    put('HSET', m.name, 'approved', ARGV[4])
  end
  put('ZREM', KEYS[1], 'm:' .. m.id)
  move(m, 'retrying', cause, 'decided', ARGV[7])
  resume(m)
elseif decision == 'refuse' and waits then
  leave(m, 'refused', cause, 'decided', ARGV[7])
elseif decision == 'discard' and (waits or troubled or idle) then
  if idle then
    withdraw(m)
  end
  leave(m, 'discarded', cause, 'decided', ARGV[7])
  if idle then
    commit()
    hand_back(m)
  end
elseif decision == 'confirm' and troubled then
  leave(m, 'confirmed', cause, 'decided', ARGV[7])
else
  answer = 'wrong_state'
end
commit()
finish()
return { answer, m.state or '' }
