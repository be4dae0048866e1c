#!lua flags=allow-oom
-- move_ladder: what is done to a ladder that runs: cancelled, moved to another anchor, paused, resumed.
--
-- parts: clock, window, manifest, ladder
-- KEYS[1] -> <ns>:{<p>}:timers
-- derived -> as start_ladder
-- ARGV[1] -> the instant in ms of a namespace with a virtual clock; '' elsewhere
-- ARGV[2] -> ladder_id
-- ARGV[3] -> cancel | reschedule | pause | resume
-- ARGV[4] -> reason of cancel; new anchor (ms) of reschedule; else ''
-- ARGV[5] -> of reschedule: new instant after the final wait, ms; else ''
-- ARGV[6...] -> of reschedule: each step's new instant, ms, in order
-- reply   -> {'done'|'same'|'wrong_state'|'missing', state or ''}
-- cost    -> O(steps + log timers)

local l = load_ladder(ARGV[2])
local action, answer = ARGV[3], 'done'
if not l then
  return { 'missing', '' }
end

local function go_on()
  advance(l, now)
  save_ladder(l)
end

if (action == 'cancel' and l.state == 'cancelled') or (action == 'pause' and l.state == 'paused')
  or (action == 'resume' and l.state == 'running') or (action == 'reschedule' and l.fields.anchor == ARGV[4]
  and not ENDED[l.state]) then
  answer = 'same'
elseif ENDED[l.state] then
  answer = 'wrong_state'
elseif action == 'cancel' then
  cancel_ladder(l, ARGV[4])
elseif action == 'reschedule' then
  local instants = { unpack(ARGV, 6) }
  for number = l.next, #instants do
    local _, stale, name = ladder_step(l, number)
    l.fields['s' .. number] = instants[number] .. ' ' .. (stale or '-') .. ' ' .. name
    put('HSET', l.key, 's' .. number, l.fields['s' .. number])
  end
  local sent = call('HGET', prefix .. 'manifest:' .. l.id .. 's' .. l.emitted, 'sealed')
  set_end(l, tonumber(ARGV[5]), tonumber(instants[#instants]), sent and tonumber(sent))
  put('HSET', l.key, 'anchor', ARGV[4])
  note(l, 'rescheduled', nil, ARGV[4])
  go_on()
elseif action == 'pause' then
  set_state(l, 'paused')
  note(l, 'paused')
  save_ladder(l)
else
  set_state(l, 'running')
  note(l, 'resumed')
  go_on()
end
commit()
finish()
return { answer, l.state }
