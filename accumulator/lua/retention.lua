-- part retention: what settled goes, payloads first. Timers: p:<window_id> its payloads, x:<window_id> the manifest,
-- r:<bucket_key> the bucket, or generations of its dedupe set. Nothing here touches what is open, unsettled, queued or
-- to be remembered.
local HOUR = 3600000

local function purge_payloads(window_id)
  local m = load_manifest(window_id)
  if not m.state then
    return false
  elseif not SETTLED[m.state] then
    put('ZREM', KEYS[1], 'p:' .. window_id)
  elseif not call('HGET', m.name, 'digest') then
    -- Ids and digests come first: the janitor writes them, and this is looked at again.
    put('SADD', prefix .. 'unrecorded', window_id)
    put('ZADD', KEYS[1], now + 60000, 'p:' .. window_id)
  else
    put('UNLINK', prefix .. 'events:' .. window_id, prefix .. 'kept:' .. window_id, prefix .. 'stages:' .. window_id)
    put('ZREM', KEYS[1], 'p:' .. window_id)
    put('ZADD', KEYS[1], now + math.max(m.rules.metadata_ttl - m.rules.payload_ttl, 0), 'x:' .. window_id)
  end
  commit()
  return true
end

local function purge_manifest(window_id)
  local m = load_manifest(window_id)
  if not m.state then
    return false
  elseif m.ladder then -- what a ladder emitted goes with it
    put('ZREM', KEYS[1], 'x:' .. window_id)
    commit()
    return true
  end
  put('ZREM', prefix .. 'manifests:' .. m.bucket, window_id)
  put('UNLINK', m.name, prefix .. 'effects:' .. window_id)
  put('ZREM', KEYS[1], 'x:' .. window_id)
  if call('ZCARD', prefix .. 'manifests:' .. m.bucket) <= 1 then
    put('ZADD', KEYS[1], now, 'r:' .. m.bucket)
  end
  commit()
  return true
end

-- The version up to which all manifests of the bucket are settled: looked at from where it was left, since what settled
-- stays so, and a bucket may have many.
local function settled_up_to(b)
  local done = tonumber(b.settled or 0)
  local page = call('ZRANGE', prefix .. 'manifests:' .. b.key, '(' .. done, '+inf', 'BYSCORE', 'LIMIT', 0, 500, 'WITHSCORES')
  for i = 1, #page, 2 do
    if not SETTLED[call('HGET', prefix .. 'manifest:' .. page[i], 'state')] then
      return done
    end
    done = tonumber(page[i + 1])
    b.settled = format('%d', done)
  end
  return #page < 1000 and math.huge or done
end

local function purge_bucket(key)
  local b = load_bucket(key)
  local f = b.fields
  if not next(f) then
    put('UNLINK', prefix .. 'noticed:' .. key)
    put('ZREM', KEYS[1], 'r:' .. key)
    commit()
    return true
  end
  local again
  if b.older and not b.queued then
    local settled, left = settled_up_to(b), {}
    for number, remembered, version in string.gmatch(b.older, '(%d+):(%d+):(%d+)') do
      if now >= tonumber(remembered) and tonumber(version) <= settled then
        put('UNLINK', prefix .. 'ids.' .. number .. ':' .. key)
      else
        left[#left + 1] = number .. ':' .. remembered .. ':' .. version
        again = math.min(again or math.huge, math.max(tonumber(remembered), now + HOUR))
      end
    end
    b.older = #left > 0 and table.concat(left, ' ') or nil
  elseif b.older then
    again = now + HOUR
  end
  local held = call('ZCARD', prefix .. 'manifests:' .. key) > 0 or call('EXISTS', prefix .. 'ladders:' .. key) == 1
  if not b.window and not held and not b.queued and not b.older then
    if now >= (b.remembered or 0) then
      put('UNLINK', prefix .. 'bucket:' .. key, prefix .. 'ids:' .. key, prefix .. 'order:' .. key,
        prefix .. 'checkpoint:' .. key, prefix .. 'noticed:' .. key)
      put('ZREM', KEYS[1], 'r:' .. key)
      commit()
      return true
    end
    again = math.min(again or math.huge, b.remembered)
  end
  save_bucket(b)
  if again then
    put('ZADD', KEYS[1], again, 'r:' .. key)
  else
    put('ZREM', KEYS[1], 'r:' .. key)
  end
  commit()
  return true
end
