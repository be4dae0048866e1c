#!lua flags=allow-oom
-- decide: what a person, or a program in a person's place, decides of a manifest; their name and reason stay in its
-- timeline.
--
-- parts: clock, window, manifest
-- KEYS[1] -> <ns>:{<p>}:timers
-- derived -> as settle, and effects:<w>
-- ARGV[1] -> the instant in ms of a namespace with a virtual clock; '' elsewhere
-- ARGV[2] -> window_id
-- ARGV[3] -> approve | refuse (of awaiting_approval) | replay (of dead, uncertain, reconciling) | discard (of any of
--            these) | confirm (of dead, uncertain, reconciling: it has happened)
-- ARGV[4] -> who
-- ARGV[5] -> why
-- ARGV[6] -> how uncertain effects are to be taken by a replay: done | not_done | '' (as they stand)
-- ARGV[7] -> nonce of this decision: the same one again is done again
-- reply   -> {'done'|'wrong_state'|'missing', state or ''}
-- cost    -> O(effects + log timers)

local m = load_manifest(ARGV[2])
if m.leader and not SETTLED[m.state] then
  m = load_manifest(m.leader) -- what was handed over together is decided together
end
local decision = ARGV[3]
local cause = decision .. ' by ' .. ARGV[4] .. ': ' .. ARGV[5]
local troubled = m.state == 'dead' or m.state == 'uncertain' or m.state == 'reconciling'
local waits = m.state == 'awaiting_approval'
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
elseif decision == 'discard' and (waits or troubled) then
  leave(m, 'discarded', cause, 'decided', ARGV[7])
elseif decision == 'confirm' and troubled then
  leave(m, 'confirmed', cause, 'decided', ARGV[7])
else
  answer = 'wrong_state'
end
commit()
finish()
return { answer, m.state or '' }
