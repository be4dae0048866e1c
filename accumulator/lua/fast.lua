-- part fast: the groups that need no judgement: new ids that join or open a window, under a plain policy, and
-- close nothing. It decides on the group's summary; every other group is left in `slow` for the steps of part
-- judge, which would give the same outcome. All reads come before the first write: nothing here is undone
-- when a later group fails.
local groups = tonumber(ARGV[5])
local replies, latest, plans, slow = {}, {}, {}, {}
local accepted = 0
-- Counted twice and asked for with the timers: one question, which is refused where it may be on its way (see clock).
local watched = call('EXISTS', KEYS[1], prefix .. 'watched', prefix .. 'watched') >= 2
-- Whether no event of the group is of a kind that closes, opens, is refused or cancels a ladder.
local function all_ordinary(policy, n, first)
  for i = 0, n - 1 do
    local length, rest = match(ARGV[first + 4 * i + 2], '^%d+ %S+ %d+ %S+ %d+ %d+ %d+ (%d+) (.*)$')
    local kind = string.sub(rest, 1, length)
    local ordinary = policy.kinds[kind]
    if ordinary == nil then
      local flags = policy.plain > 1 and call('HGET', policy.hash, policy.version .. ':kind:' .. kind) or ''
      ordinary = not string.find(flags, '[ts]') and (policy.plain < 3 or string.find(flags, 'k', 1, true) ~= nil)
        and not (watched and call('HEXISTS', prefix .. 'watched', kind) == 1)
      policy.kinds[kind] = ordinary
    end
    if not ordinary then
      return false
    end
  end
  return true
end

local full = ARGV[3] ~= '' and call('ZCARD', prefix .. 'outbox') >= tonumber(ARGV[3])

local arg = 6
for g = 1, groups do
  local key, flow, n, first = ARGV[arg], ARGV[arg + 1], tonumber(ARGV[arg + 2]), arg + 4
  local bytes, largest, weight, earliest, newest, pv, plain =
    match(ARGV[arg + 3], '^(%d+) (%d+) (%d+) (%d+) (%d+) (%d+) (%d)$')
  arg = first + 4 * n

  local policy = latest[flow]
  if not policy then
    local hash = prefix .. 'policy:' .. flow
    local text = call('HGET', hash, 'latest')
    if not text then
      sure_of_absence(hash)
      hash = prefix .. 'policy:default'
      text = call('HGET', hash, 'latest')
    end
    if not text then
      sure_of_absence(hash)
      return redis.error_reply('NOPOLICY ' .. flow)
    end
    local version, inactivity, max_age, max_events, max_bytes, max_weight, max_event_bytes, max_delay, max_future,
      dedupe_ttl, is_plain = match(text,
      '^(%d+) (%S+) (%d+) (%d+) (%d+) (%S+) (%d+) (%S+) (%S+) %d+ %d+ (%d+) %d+ (%d)')
    policy = {
      hash = hash, version = version, plain = tonumber(is_plain), kinds = {}, inactivity = tonumber(inactivity), max_age = tonumber(max_age),
      max_events = tonumber(max_events), max_bytes = tonumber(max_bytes), max_weight = tonumber(max_weight),
      max_event_bytes = tonumber(max_event_bytes), max_delay = tonumber(max_delay),
      max_future = tonumber(max_future), dedupe_ttl = tonumber(dedupe_ttl),
    }
    latest[flow] = policy
  end

  local plan
  if plain == '1' and policy.plain > 0 and not full and tonumber(largest) <= policy.max_event_bytes
    and not (policy.max_future and tonumber(newest) > now + policy.max_future)
    and not (policy.max_delay and tonumber(earliest) < now - policy.max_delay) then
    local name = prefix .. 'bucket:' .. key
    local entries, ids, window, version, due, start, prev = 0, 0, nil, nil, nil, nil, nil
    bytes, weight = tonumber(bytes), tonumber(weight)
    local open, tally = unpack(call('HMGET', name, 'open', 'tally'))
    if open then
      local id, number, opened_at, under, window_pv, hard, hold =
        match(open, '^(%w+) (%d+) (%d+) (%d+) (%d+) (%d+) (%d+) %a$')
      if under == policy.version and window_pv == pv then
        local held, weighed, last
        entries, ids, held, weighed, last = match(tally, '^(%d+) (%d+) (%d+) (%d+) (%d+)')
        due = opened_at + hard
        if policy.inactivity then
          due = math.min(due, math.max(last + policy.inactivity, opened_at + hold))
        end
        if now < due and tonumber(last) <= now then
          window, version, bytes, weight = id, number, bytes + held, weight + weighed
        end
      end
    else
      local since, seen, older
      prev, since, seen, older = unpack(call('HMGET', name, 'prev', 'ids', 'seen', 'older'))
      if (not since and call('EXISTS', prefix .. 'events:' .. key) == 0) or (prev and match(prev, '^%d+ %w+ (%S+)') == '-' and not older and tonumber(seen or 0) <= now
        and now - match(since, '^%d+') < policy.dedupe_ttl) then
        window = window_id(now)
        version = prev and format('%d', match(prev, '^%d+') + 1) or '1'
        start = window .. ' ' .. version .. ' ' .. now .. ' ' .. policy.version .. ' ' .. pv .. ' ' .. policy.max_age
          .. ' 0 ' .. (prev and 'a' or 'f')
        due = now + math.min(policy.max_age, policy.inactivity or policy.max_age)
      end
    end
    if window and (policy.plain > 1 or watched) and not all_ordinary(policy, n, first) then
      window = nil
    end
    if window and entries + n < policy.max_events and bytes < policy.max_bytes
      and not (policy.max_weight and weight >= policy.max_weight) then
      local fresh = true
      if n == 1 then
        fresh = not call('HGET', prefix .. 'ids:' .. key, ARGV[first])
      else
        local wanted = {}
        for i = 1, n do
          wanted[i] = ARGV[first + 4 * i - 4]
        end
        local known = call('HMGET', prefix .. 'ids:' .. key, unpack(wanted))
        for i = 1, n do
          if known[i] then
            fresh = false
            break
          end
        end
      end
      if fresh then
        plan = { key, n, first, version, start,
          format('%d %d %d %.0f %d', entries + n, ids + n, bytes, weight, now), prev, due }
        plans[#plans + 1] = plan
        replies[g] = { '+', window, version, entries + 1 }
      end
    end
  end
  if not plan then
    slow[#slow + 1] = { g, key, flow, n, first }
  end
end

local soonest
if opened > 0 then
  local timers, opens = {}, {}
  for i = 1, #plans do
    local plan = plans[i]
    if plan[5] then
      local k = #timers
      timers[k + 1], timers[k + 2] = plan[8], 'w:' .. plan[1]
      opens[k + 1], opens[k + 2] = now, plan[1]
      if not soonest or plan[8] < soonest then
        soonest = plan[8]
      end
    end
  end
  if soonest then
    local head = call('ZRANGE', KEYS[1], 0, 0, 'WITHSCORES')
    if head[2] and tonumber(head[2]) <= soonest then
      soonest = nil
    end
    call('ZADD', KEYS[1], unpack(timers))
    call('ZADD', prefix .. 'open', unpack(opens))
  end
end

for i = 1, #plans do
  local key, n, first, version, start, tally, prev = unpack(plans[i], 1, 7)
  local events, known = prefix .. 'events:' .. key, prefix .. 'ids:' .. key
  if n == 1 then
    local id = ARGV[first]
    call('XADD', events, now .. '-*', id, ARGV[first + 3])
    call('HSET', known, id, version .. ' ' .. ARGV[first + 1])
  else
    local entry, marks = {}, {}
    for j = 1, 2 * n, 2 do
      local id, at = ARGV[first], first
      entry[j], entry[j + 1] = id, ARGV[at + 3]
      marks[j], marks[j + 1] = id, version .. ' ' .. ARGV[at + 1]
      first = first + 4
    end
    call('XADD', events, now .. '-*', unpack(entry))
    call('HSET', known, unpack(marks))
  end
  if not start then
    call('HSET', prefix .. 'bucket:' .. key, 'tally', tally)
  elseif prev then
    call('HSET', prefix .. 'bucket:' .. key, 'open', start, 'tally', tally)
  else
    call('HSET', prefix .. 'bucket:' .. key, 'open', start, 'tally', tally, 'ids', now .. ' 0')
  end
  accepted = accepted + n
end

if #slow == 0 then
  call('HINCRBY', prefix .. 'stats', 'accepted', accepted)
  if soonest then
    redis.pcall('PUBLISH', match(prefix, '^(.-):{') .. ':wake', match(prefix, '{(%d+)}') .. ' ' .. soonest)
  end
  return replies
end
