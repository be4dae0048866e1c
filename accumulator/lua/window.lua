-- part window: a bucket and its open window, as every script that opens, changes or closes one sees them.
--
-- Fields of the hash bucket:<bucket_key>
--   open     '<window_id> <version> <opened_at> <policy> <policy_version> <hard> <hold> <relation>' of the open window;
--            hard (earliest limit that does not slide) and hold in ms after opened_at; relation f c p a (first,
--            continuation, policy_change, after_close); a trailing ' *' keeps the fast path away
--   tally    '<entries> <ids> <bytes> <weight> <last accepted at>'
--   limits   '<cutoff|-> <deadline|-> <terminal|->' where it has any: instants
--   dups, gone (entries retracted), retracted (ids), pvs (policy versions it took, where several)
--   kept     '<position> <order value|-> <source>', kept_id: whose payload a `keep: last` window holds
--   prev     '<version> <window_id> <silent at|p|-> <streak>' of the window before: what `relation` is made of
--   ids      '<generation began> <remembered until>'; older: '<number>:<remembered until>:<last version>' of
--            each older generation
--   seen     an instant this bucket has seen, where later than its last acceptance
--   turn     the manifest of an ordered bucket whose turn it is; waits: those that came back (replayed, approved late)
--            and wait for it; joins: those that gave way to the next one handed over. Both lists are in order of
--            version
--   queued   how many of its events wait in the reconciliation queue
--   flushed  '<nonce> <window_id>' of the last flush that named no version; resolved: '<nonce> <item> <answer>' of the
--            last item that was resolved
--   settled  version up to which all manifests are known to be settled
--
-- A script decides on these tables, and writes through `put` when all is decided: Redis undoes nothing.
local journal, ahead, stats, wake, handed_over = {}, 1, {}, nil, 0

local function put(...)
  journal[#journal + 1] = { ... }
end

local function count(name, by)
  stats[name] = (stats[name] or 0) + (by or 1)
end

-- For what may write to a key that is not there yet: such a write fails, before any other, where the slot is moving.
local function put_first(...)
  table.insert(journal, ahead, { ... })
  ahead = ahead + 1
end

local written = 0 -- commands, by which a script knows how long it runs
local function commit()
  for i = 1, #journal do
    call(unpack(journal[i]))
  end
  written = written + #journal
  journal, ahead = {}, 1
end

-- Last of all in a script: the counters, and the wake-up of workers that sleep longer than this.
local function finish(soonest)
  for name, by in pairs(stats) do
    call('HINCRBY', prefix .. 'stats', name, by)
  end
  if wake and (not soonest or wake < soonest) then
    soonest = wake
  end
  if soonest then
    redis.pcall('PUBLISH', match(prefix, '^(.-):{') .. ':wake', match(prefix, '{(%d+)}') .. ' ' .. soonest)
  end
end

-- Shared streams take the server's ids, which never go back, but in a namespace with a virtual clock.
local function shared_id()
  return ARGV[1] == '' and '*' or now .. '-*'
end

local function audit(at, outcome, key, id, ...)
  put('XADD', prefix .. 'audit', 'MAXLEN', '~', 10000, shared_id(), 'at', at, 'outcome', outcome, 'bucket_key', key,
    'event_id', id, ...)
end

-- Digit strings without leading zeros, compared without becoming a Lua number: exact up to 2^63-1 and beyond.
local function digits_below(a, b)
  if #a ~= #b then
    return #a < #b
  end
  return a < b
end

local function higher(a, b)
  if a == '-' or (b ~= '-' and digits_below(a, b)) then
    return b
  end
  return a
end

local policies = {}

local function parse_policy(name, version, text)
  local p = { hash = name, version = version }
  local rest
  p.payload_ttl, p.metadata_ttl = match(text, ' (%d+) (%d+)$')
  p.inactivity, p.max_age, p.max_events, p.max_bytes, p.max_weight, p.max_event_bytes, p.max_delay, p.max_future,
    p.deadline_margin, p.terminal_grace, p.dedupe_ttl, p.busy, rest =
    match(text, '^(%S+) (%d+) (%d+) (%d+) (%S+) (%d+) (%S+) (%S+) (%d+) (%d+) (%d+) (%d+) (.*)$')
  for option, value in pairs(p) do
    if option ~= 'hash' and option ~= 'version' then
      p[option] = tonumber(value)
    end
  end
  local _
  _, p.conflict, p.order, p.late, p.too_old, p.change, p.keep, p.ordered, p.restricted, p.kinded, p.cutoffs, p.handover,
    p.sink = match(rest, '^(%d) (%a) (%S) (%a) (%a) (%a) (%a) (%d) (%d) (%d) (%d) (%a) (%S+)')
  return p
end

-- The policy `version` of a flow, or its latest. Versions are numbered once for a namespace, so that a window opened
-- under `default` finds its own again after the flow got one.
local function policy_of(flow, version)
  local memo = flow .. ' ' .. (version or 'latest')
  if policies[memo] == nil then
    local found = false
    for _, name in ipairs({ flow, 'default' }) do
      local text = call('HGET', prefix .. 'policy:' .. name, version or 'latest')
      if text then
        if version then
          found = parse_policy(name, version, text)
        else
          local latest, rules = match(text, '^(%d+) (.*)$')
          found = parse_policy(name, latest, rules)
        end
        break
      end
      sure_of_absence(prefix .. 'policy:' .. name)
    end
    policies[memo] = found
  end
  return policies[memo]
end

-- Whose turn has come: ready:<sink>:<tenant> lists a tenant's manifests, tenants:<sink> the tenants that have any, in
-- the order they are served, so that one tenant's thousands never stand before another's one.
local listed = {}
local function make_ready(window_id, bucket_key, rules, in_front)
  local tenant = match(bucket_key, '^[^:]+')
  local list = prefix .. 'ready:' .. rules.sink .. ':' .. tenant
  if not listed[list] and call('EXISTS', list) == 0 then
    put_first('RPUSH', prefix .. 'tenants:' .. rules.sink, tenant)
  end
  listed[list] = true
  put_first(in_front and 'LPUSH' or 'RPUSH', list, window_id)
  wake = math.min(wake or now, now)
end

local function flow_of(key)
  return match(key, '^[^:]+:([^:]+):')
end

local function due_at(w)
  local due = w.hard
  if w.policy.inactivity then
    due = math.min(due, math.max(w.last + w.policy.inactivity, w.hold))
  end
  return due
end

local function reason_at(w, due)
  if w.deadline == due then
    return 'deadline'
  elseif w.cutoff == due then
    return 'cutoff'
  elseif w.opened + w.policy.max_age == due then
    return 'max_age'
  elseif w.terminal == due then
    return 'terminal'
  end
  return 'inactivity'
end

local function load_bucket(key)
  local flat = call('HGETALL', prefix .. 'bucket:' .. key)
  if #flat == 0 then
    sure_of_absence(prefix .. 'bucket:' .. key)
  end
  local b = { key = key, flow = flow_of(key), fields = {}, now = now, version = 0, closed = {} }
  local f = b.fields
  for i = 1, #flat, 2 do
    f[flat[i]] = flat[i + 1]
  end
  b.turn, b.waits, b.joins, b.older, b.queued, b.settled = f.turn, f.waits, f.joins, f.older, f.queued, f.settled
  if f.seen then
    b.now = math.max(b.now, tonumber(f.seen))
  end
  if f.prev then
    local version, window, silent, streak = match(f.prev, '^(%d+) (%w+) (%S+) (%d+)')
    b.version, b.prev = tonumber(version), { id = window, silent = silent, streak = tonumber(streak) }
  end
  if f.ids then
    local since, remembered = match(f.ids, '^(%d+) (%d+)')
    b.since, b.remembered = tonumber(since), tonumber(remembered)
  end
  if f.open then
    local id, version, opened, policy, pv, hard, hold, relation =
      match(f.open, '^(%w+) (%d+) (%d+) (%d+) (%d+) (%d+) (%d+) (%a)')
    local w = { id = id, pv = pv, relation = relation, opened = tonumber(opened) }
    w.policy = policy_of(b.flow, policy)
    if not w.policy then
      error({ err = 'NOPOLICY ' .. b.flow })
    end
    b.version = tonumber(version)
    w.version, w.hard, w.hold = b.version, w.opened + hard, w.opened + hold
    local entries, ids, bytes, weight, last = match(f.tally, '^(%d+) (%d+) (%d+) (%d+) (%d+)')
    w.entries, w.ids, w.bytes, w.weight, w.last =
      tonumber(entries), tonumber(ids), tonumber(bytes), tonumber(weight), tonumber(last)
    if f.limits then
      local cutoff, deadline, terminal = match(f.limits, '^(%S+) (%S+) (%S+)')
      w.cutoff, w.deadline, w.terminal = tonumber(cutoff), tonumber(deadline), tonumber(terminal)
    end
    w.dups, w.gone, w.retracted = tonumber(f.dups or 0), tonumber(f.gone or 0), tonumber(f.retracted or 0)
    w.pvs = f.pvs or pv
    if f.kept then
      local position, order, source = match(f.kept, '^(%d+) (%S+) (.*)$')
      w.kept = { position = position, order = order, source = source, id = f.kept_id }
    end
    w.timer = due_at(w)
    w.stored = call('EXISTS', prefix .. 'events:' .. key, prefix .. 'bucket:' .. key) == 2
    b.now = math.max(b.now, w.last)
    b.window = w
  end
  return b
end

local OPTIONAL = { 'limits', 'dups', 'gone', 'retracted', 'pvs', 'kept', 'kept_id' }

-- The fields of the bucket as they stand now, written once a script.
local function save_bucket(b)
  local name, f, w, new = prefix .. 'bucket:' .. b.key, b.fields, b.window, {}
  if w then
    new.open = w.id .. ' ' .. w.version .. ' ' .. w.opened .. ' ' .. w.policy.version .. ' ' .. w.pv .. ' '
      .. (w.hard - w.opened) .. ' ' .. math.max(w.hold - w.opened, 0) .. ' ' .. w.relation
      .. ((b.older or w.gone > 0 or b.now > w.last) and ' *' or '')
    new.tally = format('%d %d %d %.0f %d', w.entries, w.ids, w.bytes, w.weight, w.last)
    if w.cutoff or w.deadline or w.terminal then
      new.limits = (w.cutoff or '-') .. ' ' .. (w.deadline or '-') .. ' ' .. (w.terminal or '-')
    end
    new.dups = w.dups > 0 and w.dups or nil
    new.gone = w.gone > 0 and w.gone or nil
    new.retracted = w.retracted > 0 and w.retracted or nil
    new.pvs = w.pvs ~= w.pv and w.pvs or nil
    if w.kept then
      new.kept, new.kept_id = w.kept.position .. ' ' .. w.kept.order .. ' ' .. w.kept.source, w.kept.id
    end
  end
  if b.prev then
    new.prev = format('%d', b.closed_version or match(f.prev, '^%d+')) .. ' ' .. b.prev.id .. ' ' .. b.prev.silent .. ' '
      .. b.prev.streak
  end
  if b.since then
    new.ids = b.since .. ' ' .. b.remembered
  end
  new.turn, new.waits, new.joins, new.older, new.queued, new.settled =
    b.turn, b.waits, b.joins, b.older, b.queued, b.settled
  new.flushed, new.resolved = b.flushed or f.flushed, b.resolved or f.resolved
  if next(new) and b.now > (w and w.last or 0) then
    new.seen = b.now
  end
  local set, gone = {}, {}
  for field, value in pairs(new) do
    if f[field] ~= tostring(value) then
      set[#set + 1], set[#set + 2] = field, value
    end
  end
  for field in pairs(f) do
    if new[field] == nil then
      gone[#gone + 1] = field
    end
  end
  if #set > 0 then
    put('HSET', name, unpack(set))
  end
  if #gone > 0 then
    put('HDEL', name, unpack(gone))
  end
  if w then
    local due = due_at(w)
    if w.fresh then
      put('ZADD', KEYS[1], due, 'w:' .. b.key)
      put('ZADD', prefix .. 'open', w.opened, b.key)
    elseif due < w.timer then
      put('ZADD', KEYS[1], 'LT', due, 'w:' .. b.key)
    end
    if (w.fresh or due < w.timer) and (not wake or due < wake) then
      wake = due
    end
  elseif f.open then
    put('ZREM', KEYS[1], 'w:' .. b.key)
    put('ZREM', prefix .. 'open', b.key)
  end
end

-- The one piece of code that closes: the window becomes a manifest, frozen, and the manifest joins the outbox.
local function close_window(b, reason, closed_at)
  local w, p, at = b.window, b.window.policy, b.now
  local manifest = prefix .. 'manifest:' .. w.id
  if w.stored then
    put('RENAME', prefix .. 'events:' .. b.key, prefix .. 'events:' .. w.id)
  end
  if w.kept and (w.kept.written or call('EXISTS', prefix .. 'kept:' .. b.key, prefix .. 'bucket:' .. b.key) == 2) then
    put('RENAME', prefix .. 'kept:' .. b.key, prefix .. 'kept:' .. w.id)
  end
  local state = 'closed'
  if w.ids == 0 then
    state = 'empty'
  elseif p.sink == 'none' then
    state = 'confirmed'
  end
  local facts = {
    'bucket', b.key, 'version', w.version, 'state', state, 'since', at, 'opened', w.opened, 'last', w.last, 'closed', closed_at,
    'sealed', at, 'reason', reason, 'entries', w.entries, 'ids', w.ids, 'bytes', w.bytes,
    'weight', format('%.0f', w.weight), 'pv', w.pv, 'policy', p.version, 'relation', w.relation,
    'max_age_at', w.opened + p.max_age,
  }
  local function fact(name, value)
    if value then
      facts[#facts + 1], facts[#facts + 2] = name, value
    end
  end
  fact('inactivity_at', p.inactivity and math.max(w.last + p.inactivity, w.hold))
  fact('hold_at', w.hold > w.opened and w.hold)
  fact('cutoff_at', w.cutoff)
  fact('deadline_at', w.deadline)
  fact('terminal_at', w.terminal)
  fact('pvs', w.pvs ~= w.pv and w.pvs)
  fact('dups', w.dups > 0 and w.dups)
  fact('gone', w.gone > 0 and w.gone)
  fact('retracted', w.retracted > 0 and w.retracted)
  fact('prev', b.prev and b.prev.id)
  fact('kept', w.kept and w.kept.position)
  fact('lost', not w.stored and 1)
  put('HSET', manifest, unpack(facts))
  put('ZADD', prefix .. 'manifests:' .. b.key, w.version, w.id)
  if state == 'closed' then
    handed_over = handed_over + 1
    put('ZADD', prefix .. 'outbox', at, w.id)
    if p.ordered == '0' or not b.turn then
      make_ready(w.id, b.key, p)
      if p.ordered == '1' then
        b.turn = w.id
      end
    end
  else
    put('ZADD', KEYS[1], at + p.payload_ttl, 'p:' .. w.id)
    put('SADD', prefix .. 'unrecorded', w.id)
    if b.joins and not b.turn then
      -- The window that others gave way to came to nothing: the last of them is handed over after all.
      b.turn = match(b.joins, '(%w+)$')
      make_ready(b.turn, b.key, policy_of(b.flow, call('HGET', prefix .. 'manifest:' .. b.turn, 'policy')))
    end
  end
  if not w.stored then
    count('anomalies')
    audit(at, 'anomaly', b.key, '', 'code', 'events_missing', 'window', w.id)
  end
  local silent = '-'
  if reason == 'policy_change' then
    silent = 'p'
  elseif p.inactivity and (reason == 'max_events' or reason == 'max_bytes' or reason == 'max_weight'
    or reason == 'max_age' or b.partial) then
    silent = math.max(w.last + p.inactivity, w.hold)
  end
  local streak = w.relation == 'c' and (b.prev and b.prev.streak or 0) + 1 or 0
  if streak > 0 and streak % p.busy == 0 then
    count('busy_streaks')
    audit(at, 'alert', b.key, '', 'code', 'busy_streak', 'window', w.id, 'streak', streak)
  end
  count('closed')
  count('closed:' .. reason)
  count('delay_ms', at - closed_at)
  b.prev, b.closed_version = { id = w.id, silent = silent, streak = streak }, w.version
  b.remembered = math.max(b.remembered, w.last + p.dedupe_ttl)
  b.closed[#b.closed + 1] = w.id .. ',' .. w.version .. ',' .. reason .. ',' .. closed_at
  b.window = nil
end

-- Step 1 of push, flush, hold and retract, and the work of tick.
local function expire(b)
  if b.window then
    local due = due_at(b.window)
    if b.now >= due then
      close_window(b, reason_at(b.window, due), due)
      return true
    end
  end
  return false
end
