-- part ladder: reminder ladders. Fields of the hash ladder:<ladder_id>, each short, so that it stays small:
--   name, bucket (its first 64 bytes; bucket2 ... the rest of a long one), start (the start_id, where one was given),
--   definition (version), anchor, args (JSON; in ladderargs:<ladder_id> where long), past ('send'|'skip'), escalates
--   ('1' where its end has a step), began;
--   state (running, paused, cancelled, exhausted, escalated), next (number of the step to come, from 1), ends (instant
--   after the final wait), wait (ms of that), emitted (how many emissions), turn (the emission whose turn it is), off
--   ('1': the awaited event came, or it was cancelled: nothing that has not begun is executed), by (that event), cause;
--   s1, s2 ...: '<instant> <stale_after ms|-> <name>' of the steps;
--   notes and n1, n2 ...: the timeline, '<instant> <event> <number of the emission|-> <detail>'
-- ladders:<bucket_key> names a bucket's ladders: start:<name>:<start_id> and, without one, only:<name> of the one that
-- runs -> ladder_id; ended:<ladder_id> -> name. ladders:<state> lists them by the instant of the state.
-- ladderdef:<name> has '<version>' -> definition as JSON, '<version>:on:<kind>' of the kinds that cancel. watched has
-- the kinds that cancel any ladder -> since when, noticed:<bucket_key> the first known event of each of these:
-- '<instant> <event_id>'.
local ENDED = { cancelled = true, exhausted = true, escalated = true }
local NOTES = 300

local function load_ladder(id)
  local flat = call('HGETALL', prefix .. 'ladder:' .. id)
  if #flat == 0 then
    sure_of_absence(prefix .. 'ladder:' .. id)
    return nil
  end
  local f = {}
  for i = 1, #flat, 2 do
    f[flat[i]] = flat[i + 1]
  end
  local bucket, part = f.bucket, 2
  while f['bucket' .. part] do
    bucket, part = bucket .. f['bucket' .. part], part + 1
  end
  local l = { id = id, key = prefix .. 'ladder:' .. id, fields = f, bucket = bucket, state = f.state, turn = f.turn }
  l.next, l.ends, l.wait, l.emitted, l.notes =
    tonumber(f.next), tonumber(f.ends), tonumber(f.wait), tonumber(f.emitted), tonumber(f.notes)
  l.rules = policy_of(flow_of(l.bucket))
  return l
end

local function ladder_step(l, number)
  local text = l.fields['s' .. number]
  if text then
    local at, stale, name = match(text, '^(%d+) (%S+) (.*)$')
    return tonumber(at), tonumber(stale), name
  end
end

-- The final wait begins with the last step's instant; whoever was reminded later than that has all of it all the same.
local function set_end(l, ends, last, sent)
  l.wait = last and ends - last or 0
  l.ends = math.max(ends, sent and sent + l.wait or 0)
end

local function note(l, event, emission, detail)
  l.notes = l.notes + 1
  put('HSET', l.key, 'notes', l.notes, 'n' .. l.notes,
    format('%d', now) .. ' ' .. event .. ' ' .. (emission or '-') .. ' ' .. (detail or ''))
  if l.notes > NOTES then
    put('HDEL', l.key, 'n' .. (l.notes - NOTES + 1)) -- but never the first
  end
end

-- An emission joins the outbox like a manifest, and lives like one; those of one ladder keep their order.
local function emit(l, event, step, due)
  l.emitted = l.emitted + 1
  local id, name = l.id .. 's' .. l.emitted, prefix .. 'manifest:' .. l.id .. 's' .. l.emitted
  put_first('HSET', name, 'bucket', l.bucket, 'version', l.emitted, 'state', 'closed', 'since', now, 'ladder', l.id,
    'name', l.fields.name, 'event', event, 'step', step, 'due', due, 'sealed', now, 'policy', l.rules.version, 'digest', '-')
  if l.rules.sink == 'none' then
    put('HSET', name, 'state', 'confirmed') -- nobody handles what this flow makes
    put('ZADD', KEYS[1], now + l.rules.payload_ttl, 'p:' .. id)
  else
    put_first('ZADD', prefix .. 'outbox', now, id)
    if not l.turn then
      l.turn = id
      make_ready(id, l.bucket, l.rules)
    end
  end
  note(l, event, l.emitted, step)
  count('ladder:' .. event)
end

local function set_state(l, state)
  if l.state ~= state then
    if l.state then
      put('ZREM', prefix .. 'ladders:' .. l.state, l.id)
    end
    put_first('ZADD', prefix .. 'ladders:' .. state, now, l.id)
    l.state = state
  end
end

local function save_ladder(l)
  put('HSET', l.key, 'state', l.state, 'next', l.next, 'emitted', l.emitted, 'ends', l.ends, 'wait', l.wait)
  if l.turn then
    put('HSET', l.key, 'turn', l.turn)
  end
  if ENDED[l.state] then
    put('ZREM', KEYS[1], 'l:' .. l.id)
    put('ZADD', KEYS[1], now + l.rules.metadata_ttl, 'y:' .. l.id)
    if not l.fields.start then
      put('HDEL', prefix .. 'ladders:' .. l.bucket, 'only:' .. l.fields.name)
      put('HSET', prefix .. 'ladders:' .. l.bucket, 'ended:' .. l.id, l.fields.name)
    end
  elseif l.state == 'paused' then
    put('ZREM', KEYS[1], 'l:' .. l.id)
  else
    local at = ladder_step(l, l.next) or l.ends
    put('ZADD', KEYS[1], at, 'l:' .. l.id)
    wake = math.min(wake or at, at)
  end
end

-- Emits what is due: at its time by the timer, or because its instant lay before `past` when the ladder started, moved
-- or was resumed, where `past: skip` leaves it out.
local function advance(l, past)
  while l.state == 'running' do
    local at, stale, name = ladder_step(l, l.next)
    if (at or l.ends) > now then
      return
    elseif not at then
      if l.fields.escalates == '1' then
        emit(l, 'escalated', 'escalate', l.ends)
        set_state(l, 'escalated')
      else
        note(l, 'exhausted')
        count('ladder:exhausted')
        set_state(l, 'exhausted')
      end
      return
    end
    if past and at < past and l.fields.past == 'skip' then
      note(l, 'skipped', nil, name .. ' past')
      count('ladder:skipped')
    elseif stale and now > at + stale then
      note(l, 'skipped', nil, name .. ' stale')
      count('ladder:skipped')
    else
      emit(l, 'step', name, at)
      l.ends = math.max(l.ends, now + l.wait)
    end
    l.next = l.next + 1
  end
end

-- From here on, what was emitted and has not begun is not executed: begin refuses the rest.
local function call_off(l)
  put('HSET', l.key, 'off', 1)
  if not l.turn then
    return
  end
  for number = 1, l.emitted do
    local m = load_manifest(l.id .. 's' .. number)
    if m.state == 'closed' or m.state == 'dispatched' or m.state == 'retrying' or m.state == 'awaiting_approval' then
      move(m, 'discarded', 'cancelled')
      put('ZREM', KEYS[1], 'm:' .. m.id)
      if l.turn == m.id then
        l.turn = nil
        put('HDEL', l.key, 'turn')
      end
    end
  end
end

local function cancel_ladder(l, cause, event_id)
  call_off(l)
  put('HSET', l.key, 'cause', cause)
  if event_id then
    put('HSET', l.key, 'by', event_id)
  end
  emit(l, 'cancelled', '', now)
  set_state(l, 'cancelled')
  save_ladder(l)
end

-- An event is known in this bucket, for ladders that start later.
local function note_known(b, at, kind, event_id)
  local noticed = prefix .. 'noticed:' .. b.key
  if call('HEXISTS', noticed, kind) == 0 then
    sure_of_absence(noticed)
    put_first('HSETNX', noticed, kind, format('%d', at) .. ' ' .. event_id)
  end
end

local function is_awaited(l, kind)
  local definition = prefix .. 'ladderdef:' .. l.fields.name
  if call('HEXISTS', definition, l.fields.definition .. ':on:' .. kind) == 1 then
    return true
  end
  sure_of_absence(definition)
  return false
end

-- An event was delivered to this bucket: it may be what ladders wait for.
local function notice(b, kind, event_id)
  local ladders = call('HGETALL', prefix .. 'ladders:' .. b.key)
  if #ladders == 0 then
    sure_of_absence(prefix .. 'ladders:' .. b.key)
  end
  for i = 1, #ladders, 2 do
    local id = match(ladders[i], '^ended:(.*)$') or ladders[i + 1]
    local l = not b.called_off[id] and load_ladder(id)
    if l and l.state ~= 'cancelled' and is_awaited(l, kind) then
      b.called_off[id] = true
      if not ENDED[l.state] then
        cancel_ladder(l, 'event', event_id)
      elseif l.turn then
        call_off(l)
      end
    end
  end
end

-- A step's time has come.
local function ladder_timer(id)
  local l = load_ladder(id)
  if not l then
    return false
  end
  if l.state == 'running' then
    advance(l)
    save_ladder(l)
  else
    put('ZREM', KEYS[1], 'l:' .. id)
  end
  commit()
  return true
end

-- A ladder goes with all that it emitted, once none of that is to be kept.
local function purge_ladder(id)
  local l = load_ladder(id)
  if not l then
    return false
  end
  local again, unlisted = 0, {}
  for number = 1, l.emitted do
    local m = load_manifest(id .. 's' .. number)
    local since = call('HGET', m.name, 'since')
    again = math.max(again, SETTLED[m.state] and since + l.rules.metadata_ttl or now + 3600000)
    if m.state == 'discarded' then
      unlisted[#unlisted + 1] = m -- where nobody took anything since, it is still in the list of what is ready
    end
  end
  if again > now then
    put('ZADD', KEYS[1], again, 'y:' .. id)
  else
    for number = 1, l.emitted do
      local emission = id .. 's' .. number
      put('UNLINK', prefix .. 'manifest:' .. emission, prefix .. 'effects:' .. emission, prefix .. 'stages:' .. emission)
      put('ZREM', KEYS[1], 'p:' .. emission, 'x:' .. emission)
    end
    put('HDEL', prefix .. 'ladders:' .. l.bucket, 'ended:' .. id, 'start:' .. l.fields.name .. ':' .. (l.fields.start or ''))
    put('ZREM', prefix .. 'ladders:' .. l.state, id)
    put('UNLINK', l.key, prefix .. 'ladderargs:' .. id)
    put('ZREM', KEYS[1], 'y:' .. id)
    if call('EXISTS', prefix .. 'bucket:' .. l.bucket) == 1 then
      put('ZADD', KEYS[1], now, 'r:' .. l.bucket)
    end
    commit()
    for _, m in ipairs(unlisted) do
      unready(m)
    end
  end
  commit()
  return true
end
