-- part manifest: the life of a manifest after its window closed; what a ladder emits has the same one, and its id an s
-- (<ladder_id>s<number>). Fields of the hash manifest:<window_id> that change:
--   state, since (instant of the state), attempt (from 1), failures, most (attempts the handler allows), token (fences
--   the attempt that is processing), lease (its end), dispatches (hand-outs of this attempt), approved (by whom),
--   joined (manifests handed over with this one), leader (the one it was handed over with), error;
--   steps and step1, step2 ...: the timeline, '<instant> <state> <attempt> <cause>';
--   digest, and e1, e2 ...: '<digest> <flags> <ref?> <event_id>' once it was handed out (record)
-- Beside it: effects:<window_id>, the ledger, and stages:<window_id>, what the stages of its handler made.
local SETTLED = { confirmed = true, refused = true, discarded = true, superseded = true, empty = true }
local RELEASES = { dead = true, uncertain = true, reconciling = true }
local ATTENTION = { dead = true, uncertain = true, reconciling = true, awaiting_approval = true }
local IN_FLIGHT = { dispatched = true, processing = true }

local function load_manifest(window_id)
  local m = { id = window_id, name = prefix .. 'manifest:' .. window_id }
  m.bucket, m.state, m.attempt, m.failures, m.token, m.lease, m.dispatches, m.steps, m.policy, m.version, m.joined, m.most,
    m.leader, m.ladder, m.event =
    unpack(call('HMGET', m.name, 'bucket', 'state', 'attempt', 'failures', 'token', 'lease', 'dispatches', 'steps',
      'policy', 'version', 'joined', 'most', 'leader', 'ladder', 'event'))
  for _, field in ipairs({ 'attempt', 'failures', 'lease', 'dispatches', 'steps', 'version', 'most' }) do
    m[field] = tonumber(m[field] or 0)
  end
  if not m.bucket then
    sure_of_absence(m.name)
  else
    m.flow, m.tenant = flow_of(m.bucket), match(m.bucket, '^[^:]+')
    m.rules = policy_of(m.flow, m.policy)
  end
  return m
end

local flights = {} -- tenant -> in flight, as this script leaves it
local function move(m, state, cause, ...)
  local before = m.state
  if (IN_FLIGHT[before] or false) ~= (IN_FLIGHT[state] or false) and not m.leader then
    local flying = (flights[m.tenant] or tonumber(call('HGET', prefix .. 'inflight', m.tenant) or 0))
      + (IN_FLIGHT[state] and 1 or -1)
    flights[m.tenant] = math.max(flying, 0)
    if flying > 0 then
      put('HSET', prefix .. 'inflight', m.tenant, flying)
    else
      put('HDEL', prefix .. 'inflight', m.tenant)
    end
  end
  m.state, m.steps = state, m.steps + 1
  put('HSET', m.name, 'state', state, 'since', now, 'attempt', m.attempt, 'failures', m.failures, 'steps', m.steps,
    'step' .. m.steps, format('%d', now) .. ' ' .. state .. ' ' .. m.attempt .. ' ' .. cause, ...)
  if ATTENTION[state] then
    put_first('ZADD', prefix .. 'attention', now, m.id)
  elseif ATTENTION[before] then
    put('ZREM', prefix .. 'attention', m.id)
  end
  if SETTLED[state] then
    put('ZREM', prefix .. 'outbox', m.id)
    put('ZADD', KEYS[1], now + m.rules.payload_ttl, 'p:' .. m.id)
  end
  count('manifest:' .. state)
  -- Those handed over with it share its fate; one that gave way to a newer window is settled as superseded.
  for id in string.gmatch(m.joined or '', '%w+') do
    local other = load_manifest(id)
    if other.leader == m.id and not SETTLED[other.state] then
      other.attempt = m.attempt
      local own = state
      if state == 'confirmed' and call('HGET', other.name, 'gave_way') then
        own = 'superseded'
      end
      move(other, own, 'with ' .. m.id)
    end
  end
end

-- The bucket's turn passes to its next manifest that waits.
local function release(m)
  if m.ladder then
    -- Steps of one ladder keep their order among themselves.
    local ladder = prefix .. 'ladder:' .. m.ladder
    if call('HGET', ladder, 'turn') ~= m.id then
      return
    end
    for number = m.version + 1, tonumber(call('HGET', ladder, 'emitted')) do
      local following = m.ladder .. 's' .. number
      if call('HGET', prefix .. 'manifest:' .. following, 'state') == 'closed' then
        put('HSET', ladder, 'turn', following)
        make_ready(following, m.bucket, m.rules)
        return
      end
    end
    put('HDEL', ladder, 'turn')
    return
  end
  if call('HGET', prefix .. 'bucket:' .. m.bucket, 'turn') ~= m.id then
    return
  end
  local from = '(' .. m.version
  while true do
    local page = call('ZRANGE', prefix .. 'manifests:' .. m.bucket, from, '+inf', 'BYSCORE', 'LIMIT', 0, 50, 'WITHSCORES')
    for i = 1, #page, 2 do
      local next_one = load_manifest(page[i])
      if next_one.state == 'closed' and next_one.rules.ordered == '1' then
        put('HSET', prefix .. 'bucket:' .. m.bucket, 'turn', page[i])
        make_ready(next_one.id, next_one.bucket, next_one.rules)
        return
      end
      from = '(' .. page[i + 1]
    end
    if #page < 100 then
      put('HDEL', prefix .. 'bucket:' .. m.bucket, 'turn')
      return
    end
  end
end

local function leave(m, state, cause, ...)
  move(m, state, cause, ...)
  put('ZREM', KEYS[1], 'm:' .. m.id)
  if SETTLED[state] or RELEASES[state] then
    release(m)
  end
end

-- An attempt failed, or died.
local function fail(m, cause, delay, ...)
  m.failures = m.failures + 1
  if m.most > 0 and m.failures >= m.most then
    leave(m, 'dead', cause, 'token', '', ...)
  else
    move(m, 'retrying', cause, 'token', '', ...)
    wake = math.min(wake or math.huge, now + math.max(delay, 1))
    put('ZADD', KEYS[1], now + math.max(delay, 1), 'm:' .. m.id)
  end
end

local function holds(m, token)
  return m.state == 'processing' and m.token == token and now < m.lease
end

-- Ids, digests and flags of the window, where they stay when the payloads go. From ARGV[at] on: the manifest's digest ('':
-- no record is given), an anomaly found on reading or '', the number of retracted ids, these in order, then an entry's text
-- each: '<digest> <received_at> <flags|-> <bytes of event_id> <event_id><ref>', flags l late, r revised, q reconciled.
local function write_record(m, at)
  if (ARGV[at] or '') == '' or call('HGET', m.name, 'digest') then
    return
  end
  local retracted = tonumber(ARGV[at + 2])
  local fields = { 'digest', ARGV[at] }
  if ARGV[at + 1] ~= '' then
    fields[3], fields[4] = 'anomaly', ARGV[at + 1]
    count('anomalies')
    audit(now, 'anomaly', m.bucket, '', 'code', ARGV[at + 1], 'window', m.id)
  end
  for i = at + 3, #ARGV do
    local k, n = #fields, i - at - 2
    fields[k + 1] = n <= retracted and 'x' .. n or 'e' .. n - retracted
    fields[k + 2] = ARGV[i]
    if k >= 1000 then
      put('HSET', m.name, unpack(fields))
      fields = {}
    end
  end
  if #fields > 0 then
    put('HSET', m.name, unpack(fields))
  end
  put('SREM', prefix .. 'unrecorded', m.id)
end

-- A watch, a lease, a back-off or a time limit of this manifest ended.
local function manifest_timer(window_id)
  local m = load_manifest(window_id)
  if not m.state then
    return false
  end
  put('ZREM', KEYS[1], 'm:' .. window_id)
  if m.state == 'dispatched' then
    -- The job may be lost; whichever of the two comes first begins. In front, since a tenant at its limit has to get
    -- past it.
    make_ready(m.id, m.bucket, m.rules, true)
  elseif m.state == 'processing' then
    fail(m, 'lease_ended', 0)
  elseif m.state == 'retrying' then
    make_ready(m.id, m.bucket, m.rules)
  elseif m.state == 'awaiting_approval' then
    move(m, 'awaiting_approval', 'overdue')
    release(m)
  end
  commit()
  return true
end
