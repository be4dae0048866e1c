-- part manifest: the life of a manifest after its window closed; what a ladder emits has the same one, and its id an s
-- (<ladder_id>s<number>). Fields of the hash manifest:<window_id> that change:
--   state, since (instant of the state), attempt (from 1), failures, most (attempts the handler allows), token (fences
--   the attempt that is processing), lease (its end), dispatches (hand-outs of this attempt), back (its job may be
--   lost: it stands in the ready list again, and is not in flight), approved (by whom), joined (manifests handed over
--   with this one), leader (the one it was handed over with), gave_way (to a newer window, once), settled_by (the token
--   that ended an attempt last), decided (the nonce of the last decision), error;
--   steps and step1, step2 ...: the timeline, '<instant> <state> <attempt> <cause>'; of many the first and the last,
--   and between them what people decided (spared: how many of these);
--   pause: '<back-off ms> <longest ms>' of the attempt, for one whose lease ends;
--   digest, and e1, e2 ... and x1, x2 ...: its entries and retracted ids, once they were recorded (write_record)
-- Beside it: effects:<window_id>, the ledger, and stages:<window_id>, what the stages of its handler made.
local SETTLED = { confirmed = true, refused = true, discarded = true, superseded = true, empty = true }
local RELEASES = { dead = true, uncertain = true, reconciling = true }
local ATTENTION = { dead = true, uncertain = true, reconciling = true, awaiting_approval = true }
local IN_FLIGHT = { dispatched = true, processing = true }

-- Its policy is looked up when it is first asked for.
local LAZY = {
  __index = function(m, field)
    if field == 'rules' then
      m.rules = policy_of(m.flow, m.policy)
      return m.rules
    end
  end,
}

local function load_manifest(window_id)
  local m = setmetatable({ id = window_id, name = prefix .. 'manifest:' .. window_id }, LAZY)
  m.bucket, m.state, m.attempt, m.failures, m.token, m.lease, m.dispatches, m.steps, m.policy, m.version, m.joined, m.most,
    m.leader, m.back, m.ladder, m.event =
    unpack(call('HMGET', m.name, 'bucket', 'state', 'attempt', 'failures', 'token', 'lease', 'dispatches', 'steps',
      'policy', 'version', 'joined', 'most', 'leader', 'back', 'ladder', 'event'))
  m.attempt, m.failures, m.lease, m.dispatches = tonumber(m.attempt or 0), tonumber(m.failures or 0), tonumber(m.lease or 0),
    tonumber(m.dispatches or 0)
  m.steps, m.version, m.most = tonumber(m.steps or 0), tonumber(m.version or 0), tonumber(m.most or 0)
  if m.bucket then
    m.tenant, m.flow = match(m.bucket, '^([^:]+):([^:]+)')
  end
  return m
end

-- How many of a tenant's hand-overs run, or are to: those whose job may be lost do not count.
local function in_flight(m)
  return IN_FLIGHT[m.state] and not m.back and not m.leader
end

-- A manifest may be tried for years: what lies between the first steps and the last goes. Not what a person decided,
-- but for those programs that decide without end.
local FIRST, LAST, SPARED = 20, 100, 50
local function forget_step(m, number)
  local spared = string.find(call('HGET', m.name, 'step' .. number) or '', ' by ', 1, true)
    and tonumber(call('HGET', m.name, 'spared') or 0)
  if spared and spared < SPARED then
    put('HSET', m.name, 'spared', spared + 1)
  else
    put('HDEL', m.name, 'step' .. number)
  end
end

local flights = {} -- tenant -> in flight, as this script leaves it
local function tally(m, flew)
  local by = (in_flight(m) and 1 or 0) - (flew and 1 or 0)
  if by ~= 0 then
    local flying = (flights[m.tenant] or tonumber(call('HGET', prefix .. 'inflight', m.tenant) or 0)) + by
    flights[m.tenant] = math.max(flying, 0)
    if flying > 0 then
      put('HSET', prefix .. 'inflight', m.tenant, flying)
    else
      put('HDEL', prefix .. 'inflight', m.tenant)
    end
  end
end

local function move(m, state, cause, ...)
  local before, flew = m.state, in_flight(m)
  if m.back then
    put('HDEL', m.name, 'back')
  end
  m.state, m.steps, m.back = state, m.steps + 1, nil
  tally(m, flew)
  put('HSET', m.name, 'state', state, 'since', now, 'attempt', m.attempt, 'failures', m.failures, 'steps', m.steps,
    'step' .. m.steps, format('%d', now) .. ' ' .. state .. ' ' .. m.attempt .. ' ' .. cause, ...)
  if m.steps > FIRST + LAST then
    forget_step(m, m.steps - LAST)
  end
  if ATTENTION[state] and not ATTENTION[before] then
    put_first('ZADD', prefix .. 'attention', now, m.id)
  elseif ATTENTION[before] and not ATTENTION[state] then
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

-- Shows `visit` the bucket's manifests that are newer than m, the oldest first, until it says true.
local function later(m, visit)
  local from = '(' .. m.version
  repeat
    local page = call('ZRANGE', prefix .. 'manifests:' .. m.bucket, from, '+inf', 'BYSCORE', 'LIMIT', 0, 50, 'WITHSCORES')
    for i = 1, #page, 2 do
      if visit(load_manifest(page[i])) then
        return true
      end
      from = '(' .. page[i + 1]
    end
  until #page < 100
  return false
end

-- How many are handed over together at the most, those that gave way included: each costs the server a while.
local TOGETHER = 200

-- Whether there is somebody to give way to: a newer window that is open, or waits to be handed over.
local function newer_waits(m)
  local open = match(call('HGET', prefix .. 'bucket:' .. m.bucket, 'open') or '', '^%w+ (%d+)')
  return tonumber(open or 0) > m.version or later(m, function(other)
    return other.state == 'closed'
  end)
end

local function listed_in(list, id)
  return string.find(' ' .. (list or '') .. ' ', ' ' .. id .. ' ', 1, true) ~= nil
end

-- A list of window ids in order of version, with m's in it, which most often is the newest.
local function with_id(list, m)
  local last = match(list or '', '(%w+)$')
  if not last then
    return m.id
  elseif load_manifest(last).version < m.version then
    return list .. ' ' .. m.id
  end
  local ids = {}
  for id in string.gmatch(list, '%w+') do
    if m and load_manifest(id).version > m.version then
      ids[#ids + 1], m = m.id, nil
    end
    ids[#ids + 1] = id
  end
  return table.concat(ids, ' ')
end

-- What a ladder emits keeps its order.
local function release_step(m)
  local ladder = prefix .. 'ladder:' .. m.ladder
  local turn, emitted = unpack(call('HMGET', ladder, 'turn', 'emitted'))
  if turn ~= m.id then
    return
  end
  for number = m.version + 1, tonumber(emitted) do
    local following = load_manifest(m.ladder .. 's' .. number)
    if following.state == 'closed' then
      put('HSET', ladder, 'turn', following.id)
      make_ready(following.id, m.bucket, following.rules)
      return
    end
  end
  put('HDEL', ladder, 'turn')
end

local function give_turn(m)
  put('HSET', prefix .. 'bucket:' .. m.bucket, 'turn', m.id)
  make_ready(m.id, m.bucket, m.rules)
end

-- The bucket's turn passes on: to what came back, the oldest first; to its next manifest that waits; where the window
-- that others gave way to came to nothing, to the last of them.
local function release(m)
  if m.ladder then
    release_step(m)
    return
  end
  local bucket = prefix .. 'bucket:' .. m.bucket
  local turn, waits, joins, open = unpack(call('HMGET', bucket, 'turn', 'waits', 'joins', 'open'))
  if turn ~= m.id then
    return
  end
  local first, rest = match(waits or '', '^(%w+) ?(.*)$')
  if first then
    if rest == '' then
      put('HDEL', bucket, 'waits')
    else
      put('HSET', bucket, 'waits', rest)
    end
    give_turn(load_manifest(first))
    return
  end
  local given = later(m, function(other)
    if other.state == 'closed' and other.rules.ordered == '1' and not listed_in(joins, other.id) then
      give_turn(other)
      return true
    end
  end)
  if given then
    return
  elseif joins and not open then
    give_turn(load_manifest(match(joins, '(%w+)$')))
  else
    put('HDEL', bucket, 'turn')
  end
end

-- Back to be handed over, when its bucket's turn is free.
local function resume(m)
  if m.ladder then
    if call('HEXISTS', prefix .. 'ladder:' .. m.ladder, 'turn') == 0 then
      put('HSET', prefix .. 'ladder:' .. m.ladder, 'turn', m.id)
    end
    make_ready(m.id, m.bucket, m.rules)
    return
  end
  local bucket = prefix .. 'bucket:' .. m.bucket
  local turn, waits = unpack(call('HMGET', bucket, 'turn', 'waits'))
  if m.rules.ordered == '0' then
    make_ready(m.id, m.bucket, m.rules)
  elseif turn and turn ~= m.id then
    put('HSET', bucket, 'waits', with_id(waits, m))
  else
    give_turn(m)
  end
end

local function leave(m, state, cause, ...)
  move(m, state, cause, ...)
  put('ZREM', KEYS[1], 'm:' .. m.id)
  if SETTLED[state] or RELEASES[state] then
    release(m)
  end
end

-- Whether what everybody waited for has come, so that this step is to be done no more.
local function called_off(m)
  return m.ladder and m.event ~= 'cancelled' and call('HEXISTS', prefix .. 'ladder:' .. m.ladder, 'off') == 1
end

local function retry(m, cause, delay, ...)
  move(m, 'retrying', cause, 'token', '', ...)
  if called_off(m) then
    leave(m, 'discarded', 'cancelled')
    return
  end
  wake = math.min(wake or math.huge, now + math.max(delay, 1))
  put('ZADD', KEYS[1], now + math.max(delay, 1), 'm:' .. m.id)
end

-- An attempt failed, or died.
local function fail(m, cause, delay, ...)
  m.failures = m.failures + 1
  if m.most > 0 and m.failures >= m.most then
    leave(m, 'dead', cause, 'token', '', ...)
  else
    retry(m, cause, delay, ...)
  end
end

-- Ids, digests and flags of the window, where they stay when the payloads go. From ARGV[at] to ARGV[last], where there
-- is any: the manifest's digest, an anomaly found on reading or '', the number of retracted ids, these in order, then
-- an entry's text each: '<digest> <received_at> <flags|-> <bytes of event_id> <event_id><ref>', flags l late, r
-- revised, q reconciled.
local function write_record(m, at, last)
  if at > last or call('HGET', m.name, 'digest') then
    return
  end
  local retracted = tonumber(ARGV[at + 2])
  local fields = { 'digest', ARGV[at] }
  if ARGV[at + 1] ~= '' then
    fields[3], fields[4] = 'anomaly', ARGV[at + 1]
    count('anomalies')
    audit(now, 'anomaly', m.bucket, '', 'code', ARGV[at + 1], 'window', m.id)
  end
  for i = at + 3, last do
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

-- Takes it out of the list of what is ready: it was handed over otherwise, or came to nothing.
local function unready(m)
  local list = prefix .. 'ready:' .. m.rules.sink .. ':' .. m.tenant
  put('LREM', list, 1, m.id)
  commit()
  if call('EXISTS', list) == 0 then
    put('LREM', prefix .. 'tenants:' .. m.rules.sink, 0, m.tenant)
  end
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
    m.back = '1'
    tally(m, true)
    put('HSET', m.name, 'back', 1)
    make_ready(m.id, m.bucket, m.rules, true)
  elseif m.state == 'processing' then
    -- Its process was killed, perhaps by what it had at hand: it waits as one that failed.
    local pause, longest = match(call('HGET', m.name, 'pause') or '1000 600000', '^(%d+) (%d+)$')
    fail(m, 'lease_ended', math.min(tonumber(longest), pause * 2 ^ math.min(m.failures, 40)), 'error',
      'LeaseEnded: its process was killed, or did not say in time how it ended')
  elseif m.state == 'retrying' then
    make_ready(m.id, m.bucket, m.rules)
  elseif m.state == 'awaiting_approval' then
    move(m, 'awaiting_approval', 'overdue')
    release(m)
  end
  commit()
  return true
end
