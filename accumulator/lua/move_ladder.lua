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
-- ARGV[5] -> of reschedule: new instant after the final wait, ms; then each step's new instant, ms, in order
-- reply   -> {'done'|'same'|'wrong_state'|'missing', state or ''}
-- cost    -> O(steps + log timers)

local l = load_ladder(ARGV[2])
local action, answer = ARGV[3], 'done'
if not l then
  return { 'missing', '' }
elseif action == 'cancel' and l.state == 'cancelled' then
  answer = 'same'
elseif ENDED[l.state] then
  answer = 'wrong_state'
elseif action == 'cancel' then
  cancel_ladder(l, ARGV[4])
elseif action == 'reschedule' then
  if l.fields.anchor == ARGV[4] then
    answer = 'same'
  else
    for i = 6, #ARGV do
      local number = i - 5
      if number >= l.next then
        local _, stale, name = ladder_step(l, number)
        l.fields['s' .. number] = ARGV[i] .. ' ' .. (stale or '-') .. ' ' .. name
        put('HSET', l.key, 's' .. number, l.fields['s' .. number])
      end
    end
    l.ends = tonumber(ARGV[5])
    put('HSET', l.key, 'anchor', ARGV[4])
    note(l, 'rescheduled', nil, ARGV[4])
    advance(l, true)
    save_ladder(l)
  end
elseif action == 'pause' then
  if l.state == 'paused' then
    answer = 'same'
  else
    set_state(l, 'paused')
    note(l, 'paused')
    save_ladder(l)
  end
else
  if l.state == 'running' then
    answer = 'same'
  else
    set_state(l, 'running')
    note(l, 'resumed')
    advance(l, true)
    save_ladder(l)
  end
end
commit()
finish()
return { answer, l.state }
