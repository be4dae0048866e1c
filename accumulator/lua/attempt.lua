-- part attempt: what an attempt may say of its manifest (ARGV[2]), without all that is needed to move one.
local manifest = prefix .. 'manifest:' .. ARGV[2]

-- The attempt's number where its token has a say: it is processing, and its lease has not ended. As `holds` in part manifest.
local function say_of(token)
  local state, by, lease, attempt = unpack(call('HMGET', manifest, 'state', 'token', 'lease', 'attempt'))
  return state == 'processing' and by == token and now < tonumber(lease) and attempt
end
