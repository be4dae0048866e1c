-- part ladder: reminder ladders. Fields of the hash ladder:<ladder_id>
--   name, bucket, start_id ('' without one), definition (version), anchor, args (JSON), past ('send'|'skip'),
--   state (running, paused, cancelled, exhausted, escalated), began, next (number of the step to come, from 1),
--   ends (instant after the last step's final_wait), escalates ('1' where that has a step), emitted, turn,
--   s1, s2 ...: '<instant> <stale_after ms|-> <name>' of the steps; on:<kind> of the kinds that cancel it;
--   steps and step1, step2 ...: the timeline, '<instant> <event> <emission|-> <detail>'
-- ladders:<bucket_key> names a bucket's ladders: id:<ladder_id> -> name, start:<start_id> -> ladder_id,
-- only:<name> -> the one that runs without a start_id. ladders:<state> lists them by state and since when. watched holds
-- the kinds that cancel any ladder, noticed:<bucket_key> the last event of each of these kinds: '<instant> <event_id>'.
local ENDED = { cancelled = true, exhausted = true, escalated = true }

local function load_ladder(id)
  local flat = call('HGETALL', prefix .. 'ladder:' .. id)
  if #flat == 0 then
    return nil
  end
  local f = {}
  for i = 1, #flat, 2 do
    f[flat[i]] = flat[i + 1]
  end
  local l = { id = id, key = prefix .. 'ladder:' .. id, fields = f, bucket = f.bucket, state = f.state }
  l.next, l.ends, l.emitted, l.steps = tonumber(f.next), tonumber(f.ends), tonumber(f.emitted), tonumber(f.steps)
  l.turn = f.turn
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

local function note(l, event, emission, detail)
  l.steps = l.steps + 1
  put('HSET', l.key, 'steps', l.steps, 'step' .. l.steps,
    format('%d', now) .. ' ' .. event .. ' ' .. (emission or '-') .. ' ' .. (detail or ''))
end

-- An emission joins the outbox like a manifest, and lives like one; those of one ladder keep their order.
local function emit(l, event, step, due)
  l.emitted = l.emitted + 1
  local id = l.id .. 's' .. l.emitted
  put_first('HSET', prefix .. 'manifest:' .. id, 'bucket', l.bucket, 'version', l.emitted, 'state', 'closed', 'since', now,
    'ladder', l.id, 'event', event, 'step', step, 'due', due, 'sealed', now, 'policy', l.rules.version, 'digest', '-')
  put_first('ZADD', prefix .. 'outbox', now, id)
  if not l.turn then
    l.turn = id
    make_ready(id, l.bucket, l.rules)
  end
  note(l, event, id, step)
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
  put('HSET', l.key, 'state', l.state, 'next', l.next, 'emitted', l.emitted, 'ends', l.ends)
  if l.turn then
    put('HSET', l.key, 'turn', l.turn)
  end
  if ENDED[l.state] then
    put('ZREM', KEYS[1], 'l:' .. l.id)
    put('ZADD', KEYS[1], now + l.rules.metadata_ttl, 'y:' .. l.id)
    if l.fields.start_id == '' then
      put('HDEL', prefix .. 'ladders:' .. l.bucket, 'only:' .. l.fields.name)
    end
  elseif l.state == 'paused' then
    put('ZREM', KEYS[1], 'l:' .. l.id)
  else
    local at = ladder_step(l, l.next) or l.ends
    put('ZADD', KEYS[1], at, 'l:' .. l.id)
    wake = math.min(wake or at, at)
  end
end

-- Emits what is due: at its time by the timer, or because its instant had passed when the ladder started, moved or was
-- resumed (`passed`, where `past: skip` leaves it out).
local function advance(l, passed)
  while l.state == 'running' do
    local at, stale, name = ladder_step(l, l.next)
    if not at then
      if l.ends > now then
        return
      end
      if l.fields.escalates == '1' then
        emit(l, 'escalated', 'escalate', l.ends)
        set_state(l, 'escalated')
      else
        note(l, 'exhausted')
        count('ladder:exhausted')
        set_state(l, 'exhausted')
      end
      return
    elseif at > now then
      return
    end
    if passed and l.fields.past == 'skip' then
      note(l, 'skipped', nil, name .. ' (past)')
    elseif stale and now > at + stale then
      note(l, 'skipped', nil, name .. ' (stale)')
    else
      emit(l, 'step', name, at)
    end
    l.next = l.next + 1
  end
end

-- From here on no step is emitted, and one that was emitted and has not begun is not executed.
local function cancel_ladder(l, cause, event_id)
  for number = 1, l.emitted do
    local m = load_manifest(l.id .. 's' .. number)
    if m.state == 'closed' or m.state == 'dispatched' or m.state == 'retrying' then
      move(m, 'discarded', 'cancelled')
      put('ZREM', KEYS[1], 'm:' .. m.id)
      if l.turn == m.id then
        l.turn = nil
        put('HDEL', l.key, 'turn')
      end
    end
  end
  put('HSET', l.key, 'cause', cause, 'by_event', event_id or '')
  emit(l, 'cancelled', event_id or '', now)
  set_state(l, 'cancelled')
  save_ladder(l)
end

-- An event was delivered to this bucket: it may be what ladders wait for.
local function notice(b, kind, event_id)
  put('HSET', prefix .. 'noticed:' .. b.key, kind, format('%d', b.now) .. ' ' .. event_id)
  local ladders = call('HGETALL', prefix .. 'ladders:' .. b.key)
  for i = 1, #ladders, 2 do
    local id = match(ladders[i], '^id:(.*)$')
    local l = id and not b.cancelled[id] and load_ladder(id)
    if l and not ENDED[l.state] and l.fields['on:' .. kind] then
      b.cancelled[id] = true
      cancel_ladder(l, 'event', event_id)
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

local function purge_ladder(id)
  local l = load_ladder(id)
  if not l then
    return false
  end
  local unsettled = false
  for number = 1, l.emitted do
    local state = call('HGET', prefix .. 'manifest:' .. id .. 's' .. number, 'state')
    unsettled = unsettled or (state and not SETTLED[state])
  end
  if unsettled then
    put('ZADD', KEYS[1], now + 3600000, 'y:' .. id)
  else
    put('HDEL', prefix .. 'ladders:' .. l.bucket, 'id:' .. id, 'start:' .. l.fields.start_id)
    put('ZREM', prefix .. 'ladders:' .. l.state, id)
    put('ZREM', KEYS[1], 'y:' .. id)
    put('UNLINK', l.key)
    put('ZADD', KEYS[1], now, 'r:' .. l.bucket)
  end
  commit()
  return true
end
