-- part manifest: the life of a manifest after its window closed. Fields of the hash manifest:<window_id> that change:
--   state, attempt (from 1), token (fences the attempt that is processing), dispatches (hand-outs of this attempt),
--   steps and step1, step2 ...: the timeline, '<instant> <state> <attempt> <cause>'
local RELEASES = { confirmed = true, refused = true, discarded = true, superseded = true, dead = true }
local SETTLED = { confirmed = true, refused = true, discarded = true, superseded = true, empty = true }

local function load_manifest(window_id)
  local m = { id = window_id, name = prefix .. 'manifest:' .. window_id }
  m.bucket, m.state, m.attempt, m.token, m.dispatches, m.steps, m.policy, m.version =
    unpack(call('HMGET', m.name, 'bucket', 'state', 'attempt', 'token', 'dispatches', 'steps', 'policy', 'version'))
  m.attempt, m.dispatches, m.steps = tonumber(m.attempt or 0), tonumber(m.dispatches or 0), tonumber(m.steps or 0)
  if m.bucket then
    m.flow = flow_of(m.bucket)
    m.rules = policy_of(m.flow, m.policy)
  end
  return m
end

local function move(m, state, cause, ...)
  m.state, m.steps = state, m.steps + 1
  put('HSET', m.name, 'state', state, 'attempt', m.attempt, 'steps', m.steps, 'step' .. m.steps,
    format('%d', now) .. ' ' .. state .. ' ' .. m.attempt .. ' ' .. cause, ...)
  count('manifest:' .. state)
end

local function make_ready(m)
  put('RPUSH', prefix .. 'ready:' .. m.rules.sink, m.id)
  wake = now
end

-- The bucket's turn passes to its next manifest that waits.
local function release(m)
  if m.rules.ordered == '0' or call('HGET', prefix .. 'bucket:' .. m.bucket, 'turn') ~= m.id then
    return
  end
  local from = '(' .. m.version
  while true do
    local page = call('ZRANGE', prefix .. 'manifests:' .. m.bucket, from, '+inf', 'BYSCORE', 'LIMIT', 0, 50, 'WITHSCORES')
    for i = 1, #page, 2 do
      local state, version = unpack(call('HMGET', prefix .. 'manifest:' .. page[i], 'state', 'policy'))
      local rules = state == 'closed' and policy_of(m.flow, version)
      if rules and rules.ordered == '1' then
        put('RPUSH', prefix .. 'ready:' .. rules.sink, page[i])
        put('HSET', prefix .. 'bucket:' .. m.bucket, 'turn', page[i])
        wake = now
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
  if RELEASES[state] then
    release(m)
  end
  move(m, state, cause, ...)
  put('ZREM', KEYS[1], 'm:' .. m.id)
  if SETTLED[state] then
    put('ZREM', prefix .. 'outbox', m.id)
  end
end

-- A watch, a lease or a back-off of this manifest ended.
local function manifest_timer(window_id)
  local m = load_manifest(window_id)
  if m.state == 'dispatched' or m.state == 'retrying' then
    make_ready(m) -- a job that was dispatched may be lost; whichever of the two comes first begins
  elseif m.state == 'processing' then
    make_ready(m)
    move(m, 'retrying', 'lease_ended', 'token', '', 'dispatches', 0)
  end
  if m.state then
    put('ZREM', KEYS[1], 'm:' .. window_id)
  end
  commit()
  return m.state
end
