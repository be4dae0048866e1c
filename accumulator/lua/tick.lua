#!lua flags=allow-oom
-- tick: what is due in a partition, a bounded number at a time.
--
-- parts: clock, window, manifest, ladder, retention
-- KEYS[1] -> <ns>:{<p>}:timers
-- derived -> as accept, and orphans inflight attention unrecorded effects:<w> stages:<w> checkpoint:<k> ladderargs:<l>
-- ARGV[1] -> the instant in ms of a namespace with a virtual clock; '' elsewhere
-- ARGV[2] -> how many timers at the most; fewer where these write much
-- reply   -> {timers handled, the next due instant or -1, windows closed, timers whose record is not to be seen,
--            what went wrong with one of them, or '', the instant of this call}
-- cost    -> O(limit * log open windows)

local orphans, failure = 0, nil
local due = call('ZRANGE', KEYS[1], '-inf', format('%d', now), 'BYSCORE', 'LIMIT', 0, ARGV[2])
local suspected = call('EXISTS', prefix .. 'orphans') == 1

-- A record that is not to be seen may be on its way to another node: it is looked for again a minute later.
local function orphan(member)
  if not call('ZSCORE', KEYS[1], member) then
    return -- it went with another one that was due
  end
  orphans = orphans + 1
  count('orphans')
  local since = call('HGET', prefix .. 'orphans', member)
  if since and tonumber(call('ZSCORE', KEYS[1], member)) ~= since + 60000 then
    since = nil -- its bucket was alive since
  end
  if since then
    audit(now, 'anomaly', string.sub(member, 3), '', 'code', 'orphan_timer_dropped')
    put('HDEL', prefix .. 'orphans', member)
    put('ZREM', prefix .. 'open', string.sub(member, 3))
    put('ZREM', KEYS[1], member)
  else
    put('HSET', prefix .. 'orphans', member, now)
    audit(now, 'anomaly', string.sub(member, 3), '', 'code', 'orphan_timer')
    put('ZADD', KEYS[1], now + 60000, member)
  end
  commit()
end

local closed = 0
local function handle(member)
  local kind, key = string.sub(member, 1, 2), string.sub(member, 3)
  local found = true
  if kind == 'w:' then
    local b = load_bucket(key)
    if not b.window then
      found = false
    elseif expire(b) then
      closed = closed + 1
      save_bucket(b)
      commit()
    else
      call('ZADD', KEYS[1], due_at(b.window), member)
    end
  elseif kind == 'm:' then
    found = manifest_timer(key)
  elseif kind == 'p:' then
    found = purge_payloads(key)
  elseif kind == 'x:' then
    found = purge_manifest(key)
  elseif kind == 'l:' then
    found = ladder_timer(key)
  elseif kind == 'y:' then
    found = purge_ladder(key)
  else
    found = kind == 'r:' and purge_bucket(key)
  end
  if not found then
    orphan(member)
  elseif suspected then
    call('HDEL', prefix .. 'orphans', member)
  end
end

-- A timer may be a ladder's whose hundred steps are due at once: what is left is for the next call.
local ENOUGH = 3000
local handled = 0
while handled < #due and written < ENOUGH do
  handled = handled + 1
  local ok, problem = pcall(handle, due[handled])
  if not ok then
    -- One bucket that can't be closed must not keep the others from it.
    journal, ahead, listed, flights = {}, 1, {}, {}
    count('anomalies')
    call('ZADD', KEYS[1], now + 10000, due[handled])
    failure = type(problem) == 'table' and problem.err or problem
  end
end
finish()
local next_due = call('ZRANGE', KEYS[1], 0, 0, 'WITHSCORES')[2]
return { handled, next_due or '-1', closed, orphans, failure or '', format('%d', now) }
