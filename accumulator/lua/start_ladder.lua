#!lua
-- start_ladder: starts a ladder in a bucket, once; looks back for an event that everybody waits for.
--
-- parts: clock, naming, window, manifest, ladder
-- KEYS[1] -> <ns>:{<p>}:timers
-- derived -> <ns>:{<p>}: ladder:<l> ladderargs:<l> ladderdef:<name> ladders:<k> ladders:<state> watched noticed:<k>
--            bucket:<k> events:<k> events:<w> manifests:<k> manifest:<w> reconcile outbox tenants:<sink>
--            ready:<sink>:<tenant> policy:<flow> inflight attention stats
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
-- ARGV[16...] -> these; the same as they stand in an envelope, as JSON; then its steps in order:
--            '<instant> <stale_after ms|-> <name>'
-- reply   -> {ladder_id, 'started'|'there', state, '1' where anchor or arguments of the one there differ}
-- errors  -> NOPOLICY <flow>
-- cost    -> O(steps + log timers); and the events that came before a kind was watched, while they are kept

local key, name, start_id, version = ARGV[3], ARGV[4], ARGV[5], ARGV[6]
local index, own = prefix .. 'ladders:' .. key, start_id ~= '' and 'start:' .. name .. ':' .. start_id or 'only:' .. name
local rules = policy_of(flow_of(key))
if not rules then
  return redis.error_reply('NOPOLICY ' .. flow_of(key))
end
local there = call('HGET', index, own)
local l = there and load_ladder(there)
if l then
  local arguments = l.fields.args or call('GET', prefix .. 'ladderargs:' .. there)
  if not arguments then
    sure_of_absence(prefix .. 'ladderargs:' .. there)
  end
  local differs = arguments ~= ARGV[10] or (ARGV[9] == '1' and l.fields.anchor ~= ARGV[8])
  return { there, 'there', l.state, differs and '1' or '0' }
end

sure_of_absence(index)

local rest, kinds = { unpack(ARGV, 16) }, tonumber(ARGV[15])

-- The first event that is known here of a kind that cancels; nil where there is none. A kind that is watched has a
-- note. What came before it was watched is looked for where it is still kept whole: in windows, and in the queue.
local function look_back()
  local came, first, wanted, before = nil, math.huge, {}, -1
  local function found(at, event_id)
    at = tonumber(at)
    if at < first then
      came, first = event_id, at
    end
  end
  -- In one question, since each of these may be missing and mean something.
  call('EXISTS', KEYS[1], prefix .. 'watched', prefix .. 'noticed:' .. key, prefix .. 'bucket:' .. key,
    prefix .. 'events:' .. key, prefix .. 'manifests:' .. key, prefix .. 'reconcile')
  for i = 1, kinds do
    local at, event_id = match(call('HGET', prefix .. 'noticed:' .. key, rest[i]) or '', '^(%d+) (.*)$')
    if at then
      found(at, event_id)
    else
      wanted[rest[kinds + i]] = true
      before = math.max(before, tonumber(call('HGET', prefix .. 'watched', rest[i]) or now))
    end
  end
  local function is_wanted(envelope)
    return wanted[match(envelope, '^{"size":%d+,"weight":%d+,"kind":(".-"),"occurred_at":') or '']
  end

  -- Shows `visit` the entries up to then, each a list of fields and values, until it says true.
  local function search(stream, visit)
    local from = '-'
    repeat
      local page = call('XRANGE', stream, from, format('%d', before), 'COUNT', 100)
      for i = 1, #page do
        if visit(match(page[i][1], '^%d+'), page[i][2]) then
          return true
        end
        from = '(' .. page[i][1]
      end
    until #page < 100
    return false
  end
  local function in_window(at, fields)
    for i = 1, #fields, 2 do
      if is_wanted(fields[i + 1]) then
        found(at, fields[i])
        return true
      end
    end
  end

  local function in_windows()
    local from = '-inf'
    repeat
      local page = call('ZRANGE', prefix .. 'manifests:' .. key, from, '+inf', 'BYSCORE', 'LIMIT', 0, 50, 'WITHSCORES')
      for i = 1, #page, 2 do
        sure_of_absence(prefix .. 'events:' .. page[i])
        local opened = tonumber(call('HGET', prefix .. 'manifest:' .. page[i], 'opened') or 0)
        if opened > before or search(prefix .. 'events:' .. page[i], in_window) then
          return
        end
        from = '(' .. page[i + 1]
      end
    until #page < 100
    search(prefix .. 'events:' .. key, in_window)
  end

  if before < 0 then
    return came
  end
  in_windows()
  local queued = tonumber(call('HGET', prefix .. 'bucket:' .. key, 'queued') or 0)
  if queued > 0 then
    search(prefix .. 'reconcile', function(_, fields)
      local item = {}
      for i = 1, #fields, 2 do
        item[fields[i]] = fields[i + 1]
      end
      if item.bucket_key == key then
        queued = queued - 1
        if is_wanted(item.envelope) then
          found(item.at, item.event_id)
          return true
        end
      end
      return queued <= 0
    end)
  end
  return came
end

local id = window_id(now)
l = {
  id = id, key = prefix .. 'ladder:' .. id, bucket = key, next = 1, emitted = 0, notes = 0, rules = rules,
  fields = { name = name, start = start_id ~= '' and start_id or nil, past = ARGV[11], escalates = ARGV[13] },
}
local fields = {
  'name', name, 'definition', version, 'anchor', ARGV[8], 'past', ARGV[11], 'escalates', ARGV[13],
  'began', now,
}
local function field(of, value)
  fields[#fields + 1], fields[#fields + 2] = of, value
end
local from, parts = 1, 0
while from <= #key do
  local upto = math.min(from + 63, #key)
  while string.find(key, '^[\128-\191]', upto + 1) do
    upto = upto - 1 -- between two characters
  end
  parts = parts + 1
  field('bucket' .. (parts > 1 and parts or ''), string.sub(key, from, upto))
  from = upto + 1
end
if start_id ~= '' then
  field('start', start_id)
end
if #ARGV[10] <= 64 then
  field('args', ARGV[10])
else
  put_first('SET', prefix .. 'ladderargs:' .. id, ARGV[10]) -- a long field would cost all the others their compact form
end
for i = 2 * kinds + 1, #rest do
  l.fields['s' .. i - 2 * kinds] = rest[i]
  field('s' .. i - 2 * kinds, rest[i])
end
set_end(l, tonumber(ARGV[14]) or now, (ladder_step(l, #rest - 2 * kinds)))
put_first('HSET', l.key, unpack(fields))
put_first('HSET', index, own, id)
if call('HEXISTS', prefix .. 'ladderdef:' .. name, version) == 0 then
  sure_of_absence(prefix .. 'ladderdef:' .. name)
  local definition = { version, ARGV[7] }
  for i = 1, kinds do
    definition[2 * i + 1], definition[2 * i + 2] = version .. ':on:' .. rest[i], 1
  end
  put_first('HSET', prefix .. 'ladderdef:' .. name, unpack(definition))
end
count('ladder:started')
set_state(l, 'running')
note(l, 'started')

local came = ARGV[12] ~= '1' and look_back()
if came then
  cancel_ladder(l, 'event', came)
else
  advance(l, ARGV[9] == '1' and now or tonumber(ARGV[8]))
  save_ladder(l)
end
commit()
finish()
return { id, 'started', l.state, '0' }
