#!lua flags=allow-oom
-- flush: closes a bucket's open window because somebody says so.
--
-- parts: clock, window
-- KEYS[1] -> <ns>:{<p>}:timers
-- derived -> as accept, less ids and order
-- ARGV[1] -> the instant in ms of a namespace with a virtual clock; '' elsewhere
-- ARGV[2] -> bucket_key
-- ARGV[3] -> the version to close; '' for whichever is open
-- ARGV[4] -> nonce of this operation: the same flush sent again answers as the first did
-- ARGV[5] -> '1' for a partial flush, which the next window may continue
-- reply   -> {'flushed'|'repeated'|'nothing_open'|'other_version', version that is open or 0,
--            '<window_id>,<version>,<reason>,<closed_at>' ...}: the manifests closed, an expired one first
-- cost    -> O(log open windows)

local b = load_bucket(ARGV[2])
local answer = 'nothing_open'
local nonce, window_id = match(b.fields.flushed or '', '^(%S+) (%S+)')
if nonce == ARGV[4] then
  answer = 'repeated'
  b.closed = { window_id }
else
  expire(b)
  local w = b.window
  if w and (ARGV[3] == '' or tonumber(ARGV[3]) == w.version) then
    b.partial = ARGV[5] == '1'
    close_window(b, 'flush', b.now)
    b.flushed = ARGV[4] .. ' ' .. b.closed[#b.closed]
    answer = 'flushed'
  elseif w then
    answer = 'other_version'
  end
  save_bucket(b)
  commit()
end
finish()
return { answer, b.window and b.window.version or 0, unpack(b.closed) }
