-- part clock: the prefix of the partition's keys, and the instant of this call (ARGV[1], or the server's clock).
local call, match, format = redis.call, string.match, string.format
local prefix = string.sub(KEYS[1], 1, -7)
local now
if ARGV[1] ~= '' then
  now = tonumber(ARGV[1])
else
  local time = call('TIME')
  now = time[1] * 1000 + math.floor(time[2] / 1000)
end

-- Raises where this partition's slot is on its way to another node and the key may be there: that it is not to be seen
-- here then means nothing. (The server refuses a command on several keys of a moving slot, some of which are missing.)
local function sure_of_absence(key)
  call('EXISTS', KEYS[1], key)
end
