#!lua flags=allow-oom
-- beat: a worker's sign of life; also over maxmemory, where workers drain and must not seem dead.
--
-- KEYS[1] -> <ns>:workers
-- ARGV[1] -> the worker with its roles and handlers, as JSON
-- ARGV[2] -> instant in ms
-- ARGV[3] -> instant in ms up to which a worker's last sign is forgotten
-- reply   -> how many workers were forgotten
-- cost    -> O(log workers)

local call = redis.call
call('ZADD', KEYS[1], ARGV[2], ARGV[1])
call('ZADD', KEYS[1], 'GT', ARGV[2], 'clock')
return call('ZREMRANGEBYSCORE', KEYS[1], '-inf', ARGV[3])
