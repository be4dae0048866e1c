-- part judge: the groups that the fast path left, one event at a time, each by these steps in their order: expire, duplicate,
-- size, conflict, incompatible, late, policy change, starter, room, append, close at once, timer.
local SOURCES = 64
local max_outbox, max_queue = tonumber(ARGV[3]), tonumber(ARGV[4])
local queued = max_queue and call('XLEN', prefix .. 'reconcile') or 0
local waiting = max_outbox and call('ZCARD', prefix .. 'outbox') or 0

-- What the dedupe set knows of an id: '<place> <occurred_at> <source_version|-> <digest> [<digest>...]', the highest
-- values that any accepted or queued version carried. place: 'q' only queued, '<first>' or '<first>,<last>' version of
-- the windows that took it, with a trailing 'x' where it was retracted.
local function parse_known(text)
  local place, occurred, source_version, digests = match(text, '^(%S+) (%d+) (%S+) (.+)$')
  local first, last = match(place, '^(%d+),?(%d*)')
  return {
    first = tonumber(first), last = tonumber(last) or tonumber(first), retracted = string.sub(place, -1) == 'x',
    occurred = occurred, source_version = source_version, digests = digests,
  }
end

local function known_text(k)
  local place = 'q'
  if k.first then
    place = k.first .. (k.last ~= k.first and ',' .. k.last or '') .. (k.retracted and 'x' or '')
  end
  return place .. ' ' .. k.occurred .. ' ' .. k.source_version .. ' ' .. k.digests
end

local function has_digest(k, digest)
  return string.find(' ' .. k.digests .. ' ', ' ' .. digest .. ' ', 1, true) ~= nil
end

-- Outcomes after which this very content is known.
local KNOWN = { a = true, r = true, d = true, q = true }

-- Reads what is known of the wanted ids, the newest generation first.
local function lookup_ids(b, wanted)
  local known = {}
  local names = { prefix .. 'ids:' .. b.key }
  for number in string.gmatch(b.older or '', '(%d+):%d+:%d+') do
    table.insert(names, 2, prefix .. 'ids.' .. number .. ':' .. b.key)
  end
  for k = 1, #names do
    for from = 1, #wanted, 1000 do
      local found = call('HMGET', names[k], unpack(wanted, from, math.min(from + 999, #wanted)))
      for i = 1, #found do
        local id = wanted[from + i - 1]
        if found[i] and not known[id] then
          known[id] = parse_known(found[i])
        end
      end
    end
  end
  return known
end

-- The bucket stays for as long as it has to remember something.
local function hold_bucket(b, p)
  p = p or b.window and b.window.policy or policy_of(b.flow)
  if not b.since then
    b.since, b.remembered = b.now, 0
  end
  b.remembered = math.max(b.remembered, b.now + p.dedupe_ttl)
  if not b.window and not b.prev then
    put('ZADD', KEYS[1], b.remembered, 'r:' .. b.key)
  end
end

local function remember(b, e, p, version)
  local k = b.known[e.id]
  if not k then
    k = { occurred = e.occurred, source_version = e.source_version, digests = e.digest }
    b.known[e.id] = k
  else
    k.occurred = higher(k.occurred, e.occurred)
    k.source_version = higher(k.source_version, e.source_version)
    if not has_digest(k, e.digest) then
      k.digests = k.digests .. ' ' .. e.digest
    end
  end
  if version then
    k.first, k.last = k.first or version, version
  end
  hold_bucket(b, p)
  b.written = true
  put('HSET', prefix .. 'ids:' .. b.key, e.id, known_text(k))
end

local function kind_flags(policy, kind)
  if not policy.kinded or policy.kinded == '0' then
    return ''
  end
  policy.kinds = policy.kinds or {}
  local flags = policy.kinds[kind]
  if not flags then
    flags = call('HGET', prefix .. 'policy:' .. policy.hash, policy.version .. ':kind:' .. kind) or ''
    policy.kinds[kind] = flags
  end
  return flags
end

local function has_flag(policy, kind, letter)
  return string.find(kind_flags(policy, kind), letter, 1, true) ~= nil
end

local function order_value(order, e)
  if order == 'v' then
    return e.source_version ~= '-' and e.source_version or nil
  elseif order == 'o' then
    return e.occurred
  end
end

-- order:<bucket_key> holds for each source, under source_version and under occurred_at, '<highest in closed windows|->
-- <highest in the window> <version of that window>', or '- - -'. A window's value joins the closed ones when a later
-- window is met, so closing need not touch them.
local function order_record(b, order, source)
  local both = b.orders[source]
  if both == nil then
    local text = call('HGET', prefix .. 'order:' .. b.key, source)
    both = false
    if text then
      both = { v = {}, o = {} }
      both.v.closed, both.v.own, both.v.version, both.o.closed, both.o.own, both.o.version =
        match(text, '^(%S+) (%S+) (%S+) (%S+) (%S+) (%S+)')
    end
    b.orders[source] = both
  end
  if not both then
    return
  end
  local r = both[order]
  if r.own ~= '-' and tonumber(r.version) ~= (b.window and b.window.version) then
    r.closed, r.own, r.version = higher(r.closed, r.own), '-', '-'
  end
  return r, both
end

local function is_late_by_order(b, p, e)
  local value = order_value(p.order, e)
  local r = value and order_record(b, p.order, e.source)
  return r and r.closed ~= '-' and digits_below(value, r.closed)
end

local function raise_order(b, w, e)
  local value = order_value(w.policy.order, e)
  if not value then
    return
  end
  local r, both = order_record(b, w.policy.order, e.source)
  if not r then
    b.sources = b.sources or call('HLEN', prefix .. 'order:' .. b.key)
    if b.sources >= SOURCES then
      count('unordered_sources')
      return
    end
    b.sources = b.sources + 1
    both = {
      v = { closed = '-', own = '-', version = '-' }, o = { closed = '-', own = '-', version = '-' },
    }
    r, b.orders[e.source] = both[w.policy.order], both
  end
  r.own, r.version = higher(r.own, value), w.version
  local v, o = both.v, both.o
  put('HSET', prefix .. 'order:' .. b.key, e.source, v.closed .. ' ' .. v.own .. ' ' .. v.version .. ' ' .. o.closed .. ' '
    .. o.own .. ' ' .. o.version)
end

local function first_cutoff(policy, after)
  local first
  local runs = call('HGET', prefix .. 'policy:' .. policy.hash, policy.version .. ':cutoffs') or ''
  for start, length in string.gmatch(runs, '(%d+) (%d+)') do
    local days = math.max(0, math.floor((after - start) / 86400000) + 1)
    local instant = start + days * 86400000
    if days < tonumber(length) and (not first or instant < first) then
      first = instant
    end
  end
  return first
end

local function open_window(b, e)
  local p = policy_of(b.flow)
  local w = {
    id = window_id(b.now), version = b.version + 1, opened = b.now,
    policy = p, pv = e.pv, pvs = e.pv, hold = b.now, entries = 0, ids = 0, bytes = 0, weight = 0, last = b.now,
    dups = 0, gone = 0, retracted = 0, stored = true, fresh = true, timer = math.huge, hard = b.now + p.max_age,
  }
  if p.cutoffs == '1' then
    w.cutoff = first_cutoff(p, b.now)
    w.hard = math.min(w.hard, w.cutoff or w.hard)
  end
  w.relation = 'f'
  if b.prev then
    w.relation = 'a'
    if b.prev.silent == 'p' then
      w.relation = 'p'
    elseif b.prev.silent ~= '-' and b.now < tonumber(b.prev.silent) then
      w.relation = 'c'
    end
  end
  if not b.fields.open and not b.opened and call('EXISTS', prefix .. 'events:' .. b.key) == 1 then
    -- The record of a window went and its events did not: they must not join this one, and are kept for who looks.
    put('RENAME', prefix .. 'events:' .. b.key, prefix .. 'stray:' .. w.id)
    count('anomalies')
    audit(b.now, 'anomaly', b.key, '', 'code', 'stray_events', 'window', w.id)
  end
  b.opened = true
  -- A new generation of the dedupe set, so that what may be forgotten can go as one key.
  if b.since and b.now - b.since >= p.dedupe_ttl and call('EXISTS', prefix .. 'ids:' .. b.key) == 1
    and not b.written then
    local number = (tonumber(match(b.older or '', '(%d+):%d+:%d+$')) or 0) + 1
    put('RENAME', prefix .. 'ids:' .. b.key, prefix .. 'ids.' .. number .. ':' .. b.key)
    b.older = (b.older and b.older .. ' ' or '') .. number .. ':' .. b.remembered .. ':' .. b.version
    put('ZADD', KEYS[1], b.remembered, 'r:' .. b.key)
    b.since = b.now
  end
  if not b.since then
    b.since, b.remembered = b.now, 0
  end
  b.window, b.version = w, w.version
end

-- Whether the payload of e becomes the one that a `keep: last` window holds.
local function replaces_kept(w, e)
  local value, kept = order_value(w.policy.order, e), w.kept
  return not (value and kept and kept.order ~= '-' and kept.source == e.source and digits_below(value, kept.order))
end

local function bytes_with(w, e)
  if w.policy.keep == 'a' then
    return w.bytes + e.size
  end
  return replaces_kept(w, e) and e.size or w.bytes
end

local function has_policy_version(list, pv)
  return string.find(' ' .. list .. ' ', ' ' .. pv .. ' ', 1, true) ~= nil
end

local function append(b, e, late, revised, reconciled)
  local w = b.window
  local p = w.policy
  local envelope = e.envelope
  local flags = (late and ',"late":true' or '') .. (revised and ',"revised":true' or '')
    .. (reconciled and ',"reconciled":true' or '')
  w.bytes = bytes_with(w, e)
  w.entries, w.weight, w.last = w.entries + 1, w.weight + e.weight, b.now
  local position = w.entries + w.gone
  if p.keep == 'l' then
    if replaces_kept(w, e) then
      w.kept = { position = position, order = order_value(p.order, e) or '-', source = e.source, id = e.id, written = true }
      put('SET', prefix .. 'kept:' .. b.key, position .. ' ' .. envelope)
    end
    envelope = string.sub(envelope, 1, e.cut) .. flags .. ',"digest":"' .. e.digest .. '"}'
  elseif flags ~= '' then
    envelope = string.sub(envelope, 1, -2) .. flags .. '}'
  end
  put('XADD', prefix .. 'events:' .. b.key, format('%d-*', b.now), e.id, envelope)
  w.stored = true
  local k = b.known[e.id]
  if not (k and k.last == w.version) then
    w.ids = w.ids + 1
  end
  remember(b, e, p, w.version)
  if not has_policy_version(w.pvs, e.pv) then
    w.pvs = w.pvs .. ' ' .. e.pv
  end
  raise_order(b, w, e)
  local terminal = has_flag(p, e.kind, 't')
  if e.deadline then
    local deadline = e.deadline - p.deadline_margin
    w.deadline = math.min(w.deadline or deadline, deadline)
    w.hard = math.min(w.hard, w.deadline)
  end
  if terminal and p.terminal_grace > 0 and not w.terminal then
    w.terminal = b.now + p.terminal_grace
    w.hard = math.min(w.hard, w.terminal)
  end
  local reason
  if terminal and p.terminal_grace == 0 then
    reason = 'terminal'
  elseif w.entries >= p.max_events then
    reason = 'max_events'
  elseif w.bytes >= p.max_bytes then
    reason = 'max_bytes'
  elseif p.max_weight and w.weight >= p.max_weight then
    reason = 'max_weight'
  elseif w.deadline and w.deadline <= b.now then
    reason = 'deadline'
  end
  if reason then
    close_window(b, reason, b.now)
  end
  return w, position, reason
end

local function queue(b, e, code, known)
  put('XADD', prefix .. 'reconcile', shared_id(), 'at', b.now, 'code', code, 'bucket_key', b.key, 'event_id', e.id,
    'digest', e.digest, 'known', known or '', 'window', b.window and b.window.version or 0, 'envelope', e.envelope)
  queued, b.queued = queued + 1, (b.queued or 0) + 1
end

-- Steps 7 to 11: room is made, the event joins. Returns outcome letter, window id, version, position, late, own reason.
local function take_in(b, e, p, late, revised, reconciled)
  local w = b.window
  if w and p.change == 's' and tonumber(e.pv) > tonumber(w.pv) then
    close_window(b, 'policy_change', b.now)
  end
  w = b.window
  if w and has_flag(p, e.kind, 's') then
    close_window(b, 'starter', b.now)
  elseif w and w.ids > 0 then
    if bytes_with(w, e) > p.max_bytes then
      close_window(b, 'max_bytes', b.now)
    elseif p.max_weight and w.weight + e.weight > p.max_weight then
      close_window(b, 'max_weight', b.now)
    end
  end
  if not b.window then
    open_window(b, e)
  end
  local taken, position, reason = append(b, e, late, revised, reconciled)
  count(revised and 'revised' or 'accepted')
  if late then
    count('late')
  end
  return revised and 'r' or 'a', taken.id, taken.version, position, late, reason
end

-- One event. Returns outcome letter, window id, version, position, late, own reason, code.
local function judge(b, e, p)
  local k = b.known[e.id]
  if k and has_digest(k, e.digest) then
    count('duplicates')
    if b.window then
      b.window.dups = b.window.dups + 1
    end
    audit(b.now, 'duplicate', b.key, e.id, 'digest', e.digest)
    return 'd', nil, k.last
  end

  local function refuse(code)
    count('rejected')
    count('rejected:' .. code)
    audit(b.now, 'rejected', b.key, e.id, 'code', code, 'digest', e.digest)
    return 'j', nil, nil, nil, nil, nil, code
  end

  local function reconcile(code)
    if max_queue and queued >= max_queue then
      return refuse('overloaded')
    end
    count('reconciled')
    count('reconciled:' .. code)
    queue(b, e, code, k and k.digests)
    remember(b, e, p)
    return 'q', nil, nil, nil, nil, nil, code
  end

  local function conflict()
    count('conflicts')
    audit(b.now, 'conflict', b.key, e.id, 'digest', e.digest, 'known', k.digests)
    return 'c', nil, k.last
  end

  if max_outbox and waiting + handed_over >= max_outbox then
    return refuse('overloaded')
  end
  if e.size > p.max_event_bytes then
    return refuse('payload_too_large')
  end

  local revised = false
  if k then
    if p.conflict == 'k' then
      count('duplicates')
      count('kept_first')
      if b.window then
        b.window.dups = b.window.dups + 1
      end
      audit(b.now, 'duplicate', b.key, e.id, 'code', 'conflict', 'digest', e.digest, 'known', k.digests)
      return 'k', nil, k.last
    elseif p.conflict == 'q' then
      return reconcile('conflict')
    elseif p.conflict == 'r' or k.retracted then
      return conflict()
    end
    if p.order == 'o' then
      revised = digits_below(k.occurred, e.occurred)
    else
      revised = e.source_version ~= '-' and k.source_version ~= '-' and digits_below(k.source_version, e.source_version)
    end
    if not revised then
      return conflict()
    end
  end

  local w = b.window
  if p.restricted == '1' and not has_flag(p, e.kind, 'k') then
    return reconcile('unknown_kind')
  elseif p.max_future and tonumber(e.occurred) > b.now + p.max_future then
    return reconcile('occurred_in_future')
  elseif w and p.change ~= 'k' and tonumber(e.pv) < tonumber(w.pv) then
    return reconcile('stale_policy_version')
  elseif w and p.change == 'q' and tonumber(e.pv) > tonumber(w.pv) then
    return reconcile('policy_changed')
  end

  local rule, code
  if p.max_delay and b.now - e.occurred > p.max_delay then
    rule, code = p.too_old, 'too_old'
  elseif (revised and k.first and k.first ~= (w and w.version)) or is_late_by_order(b, p, e) then
    rule, code = p.late, 'late'
  end
  if rule == 'q' then
    return reconcile(code)
  elseif rule == 'r' then
    return refuse(code)
  end

  return take_in(b, e, p, rule ~= nil, revised)
end

local function parse_event(a)
  local occurred, source_version, pv, deadline, weight, size, cut, kind_bytes, rest =
    match(ARGV[a + 2], '^(%d+) (%S+) (%d+) (%S+) (%d+) (%d+) (%d+) (%d+) (.*)$')
  return {
    id = ARGV[a], digest = match(ARGV[a + 1], '^%d+ %S+ (%S+)'), occurred = occurred, source_version = source_version,
    pv = pv, deadline = tonumber(deadline), weight = tonumber(weight), size = tonumber(size), cut = tonumber(cut),
    kind = string.sub(rest, 1, kind_bytes), source = string.sub(rest, kind_bytes + 1), envelope = ARGV[a + 3],
  }
end

-- An event's answer: what judge or take_in returned, and the windows closed since the last answer.
local function told(b, outcome, window, version, position, late, reason, code)
  local answer = outcome .. ' ' .. (window or '-') .. ' ' .. (version or 0) .. ' ' .. (position or 0) .. ' '
    .. (late and 1 or 0) .. ' ' .. (reason or '-') .. ' ' .. (code or '-')
  for j = 1, #b.closed do
    answer = answer .. ' ' .. b.closed[j]
  end
  b.closed = {}
  return answer
end

local function judge_group(key, flow, n, first)
  local b = load_bucket(key)
  b.orders = {}
  local events, wanted = {}, {}
  for i = 1, n do
    events[i] = parse_event(first + 4 * i - 4)
    wanted[i] = events[i].id
  end
  b.known, b.called_off = lookup_ids(b, wanted), {}
  expire(b)
  local answers = { '*' }
  for i = 1, n do
    local e = events[i]
    local judged = { judge(b, e, b.window and b.window.policy or policy_of(flow)) }
    -- Whatever became of it, it came: a payment that waits for a person has been paid.
    if judged[1] ~= 'c' and watched and call('HEXISTS', prefix .. 'watched', e.kind) == 1 then
      notice(b, e.kind, e.id)
      if KNOWN[judged[1]] then
        note_known(b, b.now, e.kind, e.id)
        hold_bucket(b)
      end
    end
    answers[i + 1] = told(b, unpack(judged, 1, 7))
  end
  save_bucket(b)
  commit()
  return answers
end
