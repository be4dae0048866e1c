#!lua flags=allow-oom
-- take: takes manifests whose turn has come, for a sink to run, tenants in turn. Each stays watched: where its attempt
-- does not begin in time, tick puts it back, at doubling distances.
--
-- parts: clock, window, manifest
-- KEYS[1] -> <ns>:{<p>}:timers
-- derived -> <ns>:{<p>}: tenants:<sink> ready:<sink>:<tenant> manifest:<w> manifests:<k> bucket:<k> policy:<flow> inflight
--            outbox attention stats
-- ARGV[1] -> the instant in ms of a namespace with a virtual clock; '' elsewhere
-- ARGV[2] -> sink
-- ARGV[3] -> how many at the most
-- ARGV[4] -> first watch, ms
-- ARGV[5] -> how many of one tenant may be in flight in this partition; '' for no limit; 0: only the tenants named next
-- ARGV[6] -> then pairs of tenant, its own limit in this partition
-- reply   -> {window_id, attempt, bucket_key, ...}
-- cost    -> O((tenants looked at + taken) * log timers)

local sink, most = ARGV[2], tonumber(ARGV[3])
local limits = {}
for i = 6, #ARGV, 2 do
  limits[ARGV[i]] = tonumber(ARGV[i + 1])
end
local default = tonumber(ARGV[5])

-- A manifest whose hand-over takes others along: all that wait (handover: together), and those that gave way to it.
local function gather(m)
  local joined, last = {}, m
  local given_way = call('HGET', prefix .. 'bucket:' .. m.bucket, 'joins')
  for id in string.gmatch(given_way or '', '%w+') do
    if id ~= m.id then
      joined[#joined + 1] = load_manifest(id)
    end
  end
  if given_way then
    put('HDEL', prefix .. 'bucket:' .. m.bucket, 'joins')
  end
  if m.rules.handover == 't' then
    local from = '(' .. m.version
    repeat
      local page = call('ZRANGE', prefix .. 'manifests:' .. m.bucket, from, '+inf', 'BYSCORE', 'LIMIT', 0, 50, 'WITHSCORES')
      for i = 1, #page, 2 do
        local other = load_manifest(page[i])
        if other.state == 'closed' and other.rules.sink == sink and other.rules.handover == 't' then
          joined[#joined + 1], last = last, other
        end
        from = '(' .. page[i + 1]
      end
    until #page < 100
  end
  if #joined > 0 then
    local ids = {}
    for i = 1, #joined do
      ids[i] = joined[i].id
      put('HSET', joined[i].name, 'leader', last.id)
      joined[i].leader = last.id
      if joined[i].joined then
        ids[i] = ids[i] .. ' ' .. joined[i].joined
        for id in string.gmatch(joined[i].joined, '%w+') do
          put('HSET', prefix .. 'manifest:' .. id, 'leader', last.id)
        end
        put('HDEL', joined[i].name, 'joined')
        joined[i].joined = nil
      end
    end
    last.joined = table.concat(ids, ' ')
    put('HSET', last.name, 'joined', last.joined)
    if last.id ~= m.id and m.rules.ordered == '1' then
      put('HSET', prefix .. 'bucket:' .. m.bucket, 'turn', last.id)
    end
    commit()
    last.joined = table.concat(ids, ' ')
  end
  return last
end

local taken = {}
local tenants = {}
if default == 0 then
  for i = 6, #ARGV, 2 do
    tenants[#tenants + 1] = ARGV[i]
  end
else
  tenants = call('LRANGE', prefix .. 'tenants:' .. sink, 0, 199)
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

local count_taken, progress, seen = 0, true, {}
while count_taken < most and progress do
  progress = false
  for i = 1, #queues do
    local q = queues[i]
    if not q.shut and count_taken < most then
      local window_id = q.waiting[1]
      if not window_id then
        q.waiting = call('LRANGE', q.list, q.at, q.at + math.ceil(most / #queues))
        window_id = q.waiting[1]
      end
      -- One that was put back by its watch and by its lease stands here twice.
      local m = window_id and not seen[window_id] and load_manifest(window_id) or {}
      if window_id and q.room <= 0 and (m.state == 'closed' or m.state == 'retrying') then
        q.shut = true -- only what is in flight already, and was lost, may be taken over the limit; it stands in front
      elseif window_id then
        table.remove(q.waiting, 1)
        q.at, progress = q.at + 1, true
        seen[window_id] = true
        if m.state == 'closed' or m.state == 'retrying' or m.state == 'dispatched' then
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
          count_taken = count_taken + 1
          q.room = q.room - (cause == 'taken' and 1 or 0)
        end
      end
    end
  end
end
-- The tenants that were served go to the end of the order; those with nothing left leave it.
for i = 1, #queues do
  local q = queues[i]
  if q.at > 0 then
    put('LTRIM', q.list, q.at, -1)
    put('LREM', prefix .. 'tenants:' .. sink, 0, q.tenant)
    if call('LLEN', q.list) > q.at then
      put('RPUSH', prefix .. 'tenants:' .. sink, q.tenant)
    end
  end
end
commit()
finish()
return taken
