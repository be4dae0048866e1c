-- part naming: ids of the windows that this call opens; ARGV[2] is the caller's nonce.
local nonce, opened = ARGV[2], 0
local partition = format('%03x', match(prefix, '{(%d+)}'))

-- Unique for ever, by the instant and the caller's nonce; names the partition, so that a manifest is found by it.
local function window_id(instant)
  opened = opened + 1
  return format('%011x', instant) .. partition .. nonce .. (opened > 1 and opened or '')
end
