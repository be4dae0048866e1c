#!lua
-- start_ladder: starts a ladder in a bucket, once; looks back for an event that everybody waits for.
--
-- parts: clock, naming, window, manifest, ladder
-- KEYS[1] -> <ns>:{<p>}:timers
-- derived -> <ns>:{<p>}: ladder:<l> ladders:<k> ladders:<state> noticed:<k> bucket:<k> manifest:<l>s<n> outbox
--            tenants:<sink> ready:<sink>:<tenant> policy:<flow> stats
-- ARGV[1] -> the instant in ms of a namespace with a virtual clock; '' elsewhere
-- ARGV[2] -> nonce of the caller for the ladder's id, 6 characters [0-9a-z]
-- ARGV[3] -> bucket_key
-- ARGV[4] -> name of the ladder
-- ARGV[5] -> start_id; '' for one ladder of that name at a time
-- ARGV[6] -> version of its definition
-- ARGV[7] -> anchor, an instant in ms
-- ARGV[8] -> arguments as JSON
-- ARGV[9] -> send | skip: steps whose instant has passed
-- ARGV[10] -> '1': an event that came before does not count
-- ARGV[11] -> '1': it escalates after the last step
-- ARGV[12] -> instant after the final wait, ms; 0: now
-- ARGV[13] -> number of kinds that cancel it, then these, then its steps in order: '<instant> <stale_after ms|-> <name>'
-- reply   -> {ladder_id, 'started'|'there', state, '1' where anchor or arguments of the one there differ}
-- errors  -> NOPOLICY <flow>
-- cost    -> O(steps + log timers)

local key, name, start_id = ARGV[3], ARGV[4], ARGV[5]
local index = prefix .. 'ladders:' .. key
local rules = policy_of(flow_of(key))
if not rules then
  return redis.error_reply('NOPOLICY ' .. flow_of(key))
end
local there = call('HGET', index, start_id ~= '' and 'start:' .. start_id or 'only:' .. name)
if there then
  local l = load_ladder(there)
  local differs = l.fields.anchor ~= ARGV[7] or l.fields.args ~= ARGV[8] or l.fields.name ~= name
  return { there, 'there', l.state, differs and '1' or '0' }
end

local kinds = tonumber(ARGV[13])
local l = {
  id = window_id(now), bucket = key, next = 1, ends = ARGV[12] == '0' and now or tonumber(ARGV[12]), emitted = 0, steps = 0, rules = rules,
  fields = { name = name, start_id = start_id, past = ARGV[9], escalates = ARGV[11] },
}
l.key = prefix .. 'ladder:' .. l.id
local fields = {
  'name', name, 'bucket', key, 'start_id', start_id, 'definition', ARGV[6], 'anchor', ARGV[7], 'args', ARGV[8],
  'past', ARGV[9], 'escalates', ARGV[11], 'began', now,
}
for i = 1, kinds do
  fields[#fields + 1], fields[#fields + 2] = 'on:' .. ARGV[13 + i], 1
end
for i = 14 + kinds, #ARGV do
  local field = 's' .. (i - 13 - kinds)
  l.fields[field] = ARGV[i]
  fields[#fields + 1], fields[#fields + 2] = field, ARGV[i]
end
put_first('HSET', l.key, unpack(fields))
put_first('HSET', index, 'id:' .. l.id, name, start_id ~= '' and 'start:' .. start_id or 'only:' .. name, l.id)
count('ladder:started')
set_state(l, 'running')
note(l, 'started')

local came
for i = 1, ARGV[10] == '1' and 0 or kinds do
  local seen = call('HGET', prefix .. 'noticed:' .. key, ARGV[13 + i])
  came = came or (seen and match(seen, '^%d+ (.*)$'))
end
if came then
  cancel_ladder(l, 'event', came)
else
  advance(l, true)
  save_ladder(l)
end
commit()
finish()
return { l.id, 'started', l.state, '0' }
