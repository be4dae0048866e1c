-- part attempt: what decides whether an attempt has a say of its manifest.
local function holds(m, token)
  return m.state == 'processing' and m.token == token and now < m.lease
end

-- As much of a manifest as that takes: part manifest loads all that moving one does.
local function load_attempt(window_id)
  local m = { id = window_id, name = prefix .. 'manifest:' .. window_id }
  m.state, m.token, m.lease, m.attempt = unpack(call('HMGET', m.name, 'state', 'token', 'lease', 'attempt'))
  m.lease = tonumber(m.lease or 0)
  return m
end
