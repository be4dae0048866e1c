#!lua flags=allow-oom
-- effect: the ledger of a manifest's effects, effects:<window_id>: name ->
-- '<state> <attempt> <instant> <nonce> <result>', state begun, uncertain or confirmed. An effect that was begun and not
-- confirmed is never begun again unasked.
--
-- parts: clock, window, manifest
-- KEYS[1] -> <ns>:{<p>}:timers
-- derived -> <ns>:{<p>}: manifest:<w> effects:<w> policy:<flow> stats
-- ARGV[1] -> the instant in ms of a namespace with a virtual clock; '' elsewhere
-- ARGV[2] -> window_id
-- ARGV[3] -> token of the attempt
-- ARGV[4] -> name of the effect
-- ARGV[5] -> begin | again (it was found not to have happened) | confirm | doubt (the call may have happened) |
--            undo (the call did not happen)
-- ARGV[6] -> nonce of this beginning: the same step of the same beginning again says the same
-- ARGV[7] -> result as JSON, of confirm; ''
-- reply   -> {'begun'|'confirmed'|'uncertain'|'undone'|'refused', result}
-- cost    -> O(1)

local m = load_manifest(ARGV[2])
local ledger, name, step = prefix .. 'effects:' .. m.id, ARGV[4], ARGV[5]
local state, _, _, nonce, result = match(call('HGET', ledger, name) or '', '^(%a+) (%d+) (%d+) (%S+) (.*)$')
local function write(to, text)
  state, result = to, text or ''
  put('HSET', ledger, name, to .. ' ' .. m.attempt .. ' ' .. format('%d', now) .. ' ' .. ARGV[6] .. ' ' .. result)
  count('effect:' .. to)
end

local answer
if not holds(m, ARGV[3]) then
  answer = 'refused'
elseif state == 'confirmed' then
  answer = 'confirmed'
elseif state == 'begun' and nonce == ARGV[6] and (step == 'begin' or step == 'again') then
  answer = 'begun'
elseif (step == 'begin' and not state) or (step == 'again' and state == 'uncertain') then
  write('begun')
  answer = 'begun'
elseif step == 'begin' then
  if state == 'begun' then
    write('uncertain')
  end
  answer = 'uncertain'
elseif step == 'confirm' and state then
  write('confirmed', ARGV[7])
  answer = 'confirmed'
elseif step == 'doubt' and state then
  write('uncertain')
  answer = 'uncertain'
elseif step == 'undo' then
  put('HDEL', ledger, name)
  state, answer = nil, 'undone'
else
  answer = 'refused'
end
commit()
finish()
return { answer, result or '' }
