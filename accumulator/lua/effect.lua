#!lua flags=allow-oom
-- effect: the ledger of a manifest's effects, effects:<window_id>: name ->
-- '<state> <attempt> <instant> <nonce> <result>', state begun, uncertain or confirmed. An effect that was begun and not
-- confirmed is never begun again unasked.
--
-- parts: clock, attempt
-- KEYS[1] -> <ns>:{<p>}:timers
-- derived -> <ns>:{<p>}: manifest:<w> effects:<w> stats
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

local m = load_attempt(ARGV[2])
local ledger, name, step = prefix .. 'effects:' .. m.id, ARGV[4], ARGV[5]
local state, _, _, nonce, result = match(call('HGET', ledger, name) or '', '^(%a+) (%d+) (%d+) (%S+) (.*)$')
local function write(to, text)
  state, result = to, text or ''
  call('HSET', ledger, name, to .. ' ' .. m.attempt .. ' ' .. format('%d', now) .. ' ' .. ARGV[6] .. ' ' .. result)
  call('HINCRBY', prefix .. 'stats', 'effect:' .. to, 1)
  return to
end

local answer = 'refused'
if not holds(m, ARGV[3]) then
  answer = 'refused'
elseif state == 'confirmed' then
  answer = 'confirmed'
elseif state == 'begun' and nonce == ARGV[6] and (step == 'begin' or step == 'again') then
  answer = 'begun'
elseif (step == 'begin' and not state) or (step == 'again' and state == 'uncertain') then
  answer = write('begun')
elseif step == 'begin' then
  answer = state == 'begun' and write('uncertain') or 'uncertain'
elseif step == 'confirm' and state then
  answer = write('confirmed', ARGV[7])
elseif step == 'doubt' and state then
  answer = write('uncertain')
elseif step == 'undo' then
  call('HDEL', ledger, name)
  result, answer = nil, 'undone'
end
return { answer, result or '' }
