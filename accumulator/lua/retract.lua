#!lua
-- retract: takes an id's entries out of the open window. The stream is a log: an entry under the empty field name
-- names the id, and whoever reads the window leaves its payloads out.
--
-- parts: clock, window
-- KEYS[1] -> <ns>:{<p>}:timers
-- derived -> as accept, less order
-- ARGV[1] -> the instant in ms of a namespace with a virtual clock; '' elsewhere
-- ARGV[2] -> bucket_key
-- ARGV[3] -> event_id
-- reply   -> {'retracted'|'already'|'closed'|'queued'|'unknown', version of the window it is or was in, or 0,
--            <closed> ...}, closed as in flush
-- cost    -> O(entries of the window)

local b = load_bucket(ARGV[2])
local id = ARGV[3]
expire(b)
local w = b.window

local name = prefix .. 'ids:' .. b.key
local known = call('HGET', name, id)
if not known then
  for number in string.gmatch(b.older or '', '(%d+):%d+:%d+') do
    known = call('HGET', prefix .. 'ids.' .. number .. ':' .. b.key, id) or known -- the newest generation's word
  end
end

local answer, version = 'unknown', 0
local place, rest = match(known or '', '^(%S+) (.*)$')
if place == 'q' then
  answer = 'queued'
elseif place then
  version = tonumber(match(place, '(%d+)x?$'))
  if not (w and w.version == version) then
    answer = 'closed'
  elseif string.sub(place, -1) == 'x' then
    answer = 'already'
  else
    answer = 'retracted'
    local entries, bytes, weight, from = 0, 0, 0, '-'
    repeat
      local page = call('XRANGE', prefix .. 'events:' .. b.key, from, '+', 'COUNT', 500)
      for i = 1, #page do
        local fields = page[i][2]
        for j = 1, #fields, 2 do
          if fields[j] == id then
            local size, heavy = match(fields[j + 1], '^{"size":(%d+),"weight":(%d+)')
            entries, bytes, weight = entries + 1, bytes + size, weight + heavy
          end
        end
        from = '(' .. page[i][1]
      end
    until #page < 500
    w.entries, w.ids, w.weight = w.entries - entries, w.ids - 1, w.weight - weight
    w.gone, w.retracted = w.gone + entries, w.retracted + 1
    if w.policy.keep == 'a' then
      w.bytes = w.bytes - bytes
    elseif w.kept and w.kept.id == id then
      w.bytes, w.kept = 0, nil
      put('DEL', prefix .. 'kept:' .. b.key)
    end
    put('XADD', prefix .. 'events:' .. b.key, format('%d-*', b.now), '', id)
    put('HSET', name, id, place .. 'x ' .. rest)
    count('retracted')
  end
end
save_bucket(b)
commit()
finish()
return { answer, version, unpack(b.closed) }
