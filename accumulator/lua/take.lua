#!lua flags=allow-oom
-- take: takes manifests whose turn has come, for a sink to run, tenants in turn. Each stays watched: where its attempt
-- does not begin in time, tick puts it back, at doubling distances.
--
-- parts: clock, window, manifest
-- KEYS[1] -> <ns>:{<p>}:timers
-- derived -> <ns>:{<p>}: tenants:<sink> ready:<sink>:<tenant> manifest:<w> manifests:<k> bucket:<k> policy:<flow>
--            inflight outbox attention stats
-- ARGV[1] -> the instant in ms of a namespace with a virtual clock; '' elsewhere
-- ARGV[2] -> sink
-- ARGV[3] -> how many at the most
-- ARGV[4] -> first watch, ms
-- ARGV[5] -> how many of one tenant may be in flight in this partition; '' for no limit; 0: only the tenants named next
-- ARGV[6] -> then pairs of tenant, its own limit in this partition
-- reply   -> {window_id, attempt, bucket_key, ...}; none does not say that none is ready, where many were called off
-- cost    -> O((tenants looked at + taken) * log timers)

local sink, most = ARGV[2], tonumber(ARGV[3])
local limits = {}
for i = 6, #ARGV, 2 do
  limits[ARGV[i]] = tonumber(ARGV[i + 1])
end
local default = tonumber(ARGV[5])

-- A manifest's hand-over takes others along: those that gave way, and (handover: together) all that wait behind it, up
-- to one that goes elsewhere, or as many as there may be. They are handed over under the last of them.
local unlisted = {}
local function gather(m)
  local bucket, group = prefix .. 'bucket:' .. m.bucket, { m }
  local turn, joins = unpack(call('HMGET', bucket, 'turn', 'joins'))
  for id in string.gmatch(joins or '', '%w+') do
    if id ~= m.id then
      group[#group + 1] = load_manifest(id)
    end
  end
  if joins then
    put('HDEL', bucket, 'joins')
  end
  if m.rules.handover == 't' then
    later(m, function(other)
      if other.state ~= 'closed' or listed_in(joins, other.id) then
        return false
      elseif #group == TOGETHER or other.rules.sink ~= sink or other.rules.handover ~= 't' then
        return true
      end
      group[#group + 1] = other
    end)
  end
  if #group == 1 then
    return m
  end
  table.sort(group, function(one, other)
    return one.version < other.version
  end)
  local last, ids, has_turn = table.remove(group), {}, false
  for i, other in ipairs(group) do
    has_turn = has_turn or turn == other.id
    last.attempt = math.max(last.attempt, other.attempt) -- no attempt of any of them has its number twice
    ids[i] = other.id
    put('HSET', other.name, 'leader', last.id)
  end
  last.joined = table.concat(ids, ' ')
  put('HSET', last.name, 'joined', last.joined)
  if has_turn then
    put('HSET', bucket, 'turn', last.id)
  end
  group[#group + 1] = last
  for _, other in ipairs(group) do
    if other.id ~= m.id and (other.rules.ordered == '0' or turn == other.id) then
      unlisted[#unlisted + 1] = other -- it was ready by itself
    end
  end
  commit() -- move looks at the leader of each
  return last
end

local LOOKED_AT = 200
local taken = {}
local tenants = {}
if default == 0 then
  for i = 6, #ARGV, 2 do
    tenants[#tenants + 1] = ARGV[i]
  end
else
  tenants = call('LRANGE', prefix .. 'tenants:' .. sink, 0, LOOKED_AT - 1)
end
local queues = {}
for i = 1, #tenants do
  local tenant = tenants[i]
  local limit = limits[tenant] or default
  local room = most
  if limit then
    room = math.min(most, limit - tonumber(call('HGET', prefix .. 'inflight', tenant) or 0))
  end
  queues[i] = { tenant = tenant, list = prefix .. 'ready:' .. sink .. ':' .. tenant, room = room, at = 0, waiting = {} }
end

-- Of what was called off meanwhile, which stands here still, a call passes so many.
local PASSED = 1000
local count_taken, passed, progress = 0, 0, true
while count_taken < most and passed < PASSED and progress do
  progress = false
  for i = 1, #queues do
    local q = queues[i]
    if q.room > 0 and count_taken < most then
      local window_id = q.waiting[1]
      if not window_id then
        q.waiting = call('LRANGE', q.list, q.at, q.at + math.ceil(most / #queues))
        window_id = q.waiting[1]
      end
      if window_id then
        table.remove(q.waiting, 1)
        q.at, progress = q.at + 1, true
        local m = load_manifest(window_id)
        -- One that was gathered by another one may stand here still.
        if not m.leader and (m.state == 'closed' or m.state == 'retrying' or (m.state == 'dispatched' and m.back)) then
          local cause = 'taken'
          if m.state == 'dispatched' then
            cause = 'taken_again'
          else
            if m.state == 'closed' and not m.ladder then
              m = gather(m)
            end
            m.attempt, m.dispatches = m.attempt + 1, 0
          end
          move(m, 'dispatched', cause, 'dispatches', m.dispatches + 1)
          put('ZADD', KEYS[1], now + ARGV[4] * 2 ^ math.min(m.dispatches, 10), 'm:' .. m.id)
          commit()
          taken[#taken + 1], taken[#taken + 2], taken[#taken + 3] = m.id, m.attempt, m.bucket
          count_taken, q.room = count_taken + 1, q.room - 1
        else
          passed = passed + 1
        end
      end
    end
  end
end
for i = 1, #queues do
  if queues[i].at > 0 then
    put('LTRIM', queues[i].list, queues[i].at, -1)
  end
end
commit()
for _, other in ipairs(unlisted) do
  unready(other)
end
commit()
-- The tenants that were served go to the end of the order, as do those at their limit where more tenants wait than were
-- looked at; those with nothing left leave it.
for i = 1, #queues do
  local q = queues[i]
  if q.at > 0 or #queues == LOOKED_AT then
    if call('EXISTS', q.list) == 1 then
      call('RPUSH', prefix .. 'tenants:' .. sink, q.tenant)
      call('LREM', prefix .. 'tenants:' .. sink, 1, q.tenant)
    else
      call('LREM', prefix .. 'tenants:' .. sink, 0, q.tenant)
    end
  end
end
finish()
return taken
