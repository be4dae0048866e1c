#!lua
-- start_ladder: starts a ladder in a bucket, once; looks back for an event that everybody waits for.
--
-- parts: clock, naming, window, manifest, ladder
-- KEYS[1] -> <ns>:{<p>}:timers
-- derived -> <ns>:{<p>}: ladder:<l> ladderargs:<l> ladderdef:<name> ladders:<k> ladders:<state> noticed:<k> manifest:<w>
--            outbox tenants:<sink> ready:<sink>:<tenant> policy:<flow> inflight attention stats
-- ARGV[1] -> the instant in ms of a namespace with a virtual clock; '' elsewhere
-- ARGV[2] -> nonce of the caller for the ladder's id, 12 characters [0-9a-z]
-- ARGV[3] -> bucket_key
-- ARGV[4] -> name of the ladder
-- ARGV[5] -> start_id; '' for one ladder of that name at a time
-- ARGV[6] -> version of its definition
-- ARGV[7] -> its definition as JSON
-- ARGV[8] -> anchor, an instant in ms
-- ARGV[9] -> '1': the anchor was given; '0': it is the start
-- ARGV[10] -> arguments as JSON
-- ARGV[11] -> send | skip: steps whose instant has passed
-- ARGV[12] -> '1': an event that came before does not count
-- ARGV[13] -> '1': it escalates after the last step
-- ARGV[14] -> instant after the final wait, ms; '': at once
-- ARGV[15] -> number of kinds that cancel it
-- ARGV[16...] -> these, then its steps in order: '<instant> <stale_after ms|-> <name>'
-- reply   -> {ladder_id, 'started'|'there', state, '1' where anchor or arguments of the one there differ}
-- errors  -> NOPOLICY <flow>
-- cost    -> O(steps + log timers)

local key, name, start_id, version = ARGV[3], ARGV[4], ARGV[5], ARGV[6]
local index, own = prefix .. 'ladders:' .. key, start_id ~= '' and 'start:' .. name .. ':' .. start_id or 'only:' .. name
local rules = policy_of(flow_of(key))
if not rules then
  return redis.error_reply('NOPOLICY ' .. flow_of(key))
end
local there = call('HGET', index, own)
if there then
  local l = load_ladder(there)
  local arguments = l.fields.args or call('GET', prefix .. 'ladderargs:' .. there)
  local differs = arguments ~= ARGV[10] or (ARGV[9] == '1' and l.fields.anchor ~= ARGV[8])
  return { there, 'there', l.state, differs and '1' or '0' }
end

local rest, kinds = { unpack(ARGV, 16) }, tonumber(ARGV[15])
local id = window_id(now)
local l = {
  id = id, key = prefix .. 'ladder:' .. id, bucket = key, next = 1, emitted = 0, notes = 0, rules = rules,
  ends = tonumber(ARGV[14]) or now,
  fields = { name = name, start = start_id ~= '' and start_id or nil, past = ARGV[11], escalates = ARGV[13] },
}
local fields = {
  'name', name, 'bucket', key, 'definition', version, 'anchor', ARGV[8], 'past', ARGV[11], 'escalates', ARGV[13],
  'began', now,
}
local function field(of, value)
  fields[#fields + 1], fields[#fields + 2] = of, value
end
if start_id ~= '' then
  field('start', start_id)
end
if #ARGV[10] <= 64 then
  field('args', ARGV[10])
else
  put_first('SET', prefix .. 'ladderargs:' .. id, ARGV[10]) -- a long field would cost all the others their compact form
end
for i = kinds + 1, #rest do
  l.fields['s' .. i - kinds] = rest[i]
  field('s' .. i - kinds, rest[i])
end
put_first('HSET', l.key, unpack(fields))
put_first('HSET', index, own, id)
if call('HEXISTS', prefix .. 'ladderdef:' .. name, version) == 0 then
  local definition = { version, ARGV[7] }
  for i = 1, kinds do
    definition[2 * i + 1], definition[2 * i + 2] = version .. ':on:' .. rest[i], 1
  end
  put_first('HSET', prefix .. 'ladderdef:' .. name, unpack(definition))
end
count('ladder:started')
set_state(l, 'running')
note(l, 'started')

local came, since
for i = 1, ARGV[12] == '1' and 0 or kinds do
  local at, event_id = match(call('HGET', prefix .. 'noticed:' .. key, rest[i]) or '', '^(%d+) (.*)$')
  if at and (not since or tonumber(at) < since) then
    came, since = event_id, tonumber(at)
  end
end
if came then
  cancel_ladder(l, 'event', came)
else
  advance(l, ARGV[9] == '1' and now or tonumber(ARGV[8]))
  save_ladder(l)
end
commit()
finish()
return { id, 'started', l.state, '0' }
