#!lua
-- accept: takes events of any buckets of one partition, by the steps that part judge names.
--
-- parts: clock, naming, fast, window, manifest, ladder, judge
-- KEYS[1] -> <ns>:{<p>}:timers
-- derived -> <ns>:{<p>}: bucket:<k> events:<k> ids:<k> ids.<n>:<k> order:<k> kept:<k> manifests:<k>
--            events:<w> stray:<w> kept:<w> manifest:<w> policy:<flow> tenants:<sink> ready:<sink>:<tenant> open
--            outbox reconcile audit stats watched noticed:<k> ladders:<k> ladders:<state> ladder:<l> ladderdef:<name>
--            inflight attention
-- ARGV[1] -> the instant in ms of a namespace with a virtual clock; '' elsewhere: the server's clock
-- ARGV[2] -> nonce of the caller for window ids, 12 characters [0-9a-z]
-- ARGV[3] -> how many manifests this partition's outbox may hold; '' for no ceiling
-- ARGV[4] -> how many items this partition's reconciliation queue may hold; '' for no ceiling
-- ARGV[5] -> number of groups; then for each group, the events of one bucket:
--            bucket_key, flow, n, summary, and n times event_id, mark, facts, envelope
--   summary  '<bytes> <largest> <weight> <earliest> <newest> <policy_version> <plain>': sums over the group, its
--            largest payload, its span of occurred_at in ms; plain is 1 where its ids differ from each other, all
--            share the policy_version and none has a deadline
--   mark     '<occurred_at> <source_version|-> <digest>'
--   facts    '<occurred_at> <source_version|-> <policy_version> <deadline_at|-> <weight> <size> <cut>
--            <bytes of kind> <kind><source>'; cut is the length of the envelope before its payload
-- reply   -> an array for each group: {'+', window_id, version, position of the first} where all were accepted
--            and nothing closed; else {'*', one text for each event}:
--            '<outcome> <window_id|-> <version> <position> <late> <own reason|-> <code|-> [<closed> ...]'
--            outcome: a accepted, r revised, d duplicate, k duplicate with conflict, c conflict, j rejected,
--            q reconciled; closed: '<window_id>,<version>,<reason>,<closed_at>'
-- errors  -> NOPOLICY <flow>: no policy and no `default`; nothing was written
-- cost    -> O(events); O(log open windows) for each window opened or closed

count('accepted', accepted)
for i = 1, #slow do
  replies[slow[i][1]] = judge_group(unpack(slow[i], 2))
end
finish(soonest)
return replies
