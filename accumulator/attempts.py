"""What workers ask: timers, turns, and attempts with their effects and stages."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, cast

from accumulator import keys
from accumulator.envelope import Event, packed_again
from accumulator.errors import AccumulatorError
from accumulator.health import RqQueue, beat, end, sinks_of, tell_queues
from accumulator.manifest import TOGETHER, Manifest, read_manifest, replay
from accumulator.namespace import PAGE, Namespace
from accumulator.scripts import script
from accumulator.store import Call, Operation, Reply, answer, as_pairs, as_stream


class Taken(NamedTuple):
    """A manifest handed to a sink: attempts count from 1."""

    window_id: str
    attempt: int
    bucket_key: str


class Grant(NamedTuple):
    """What asking for an attempt gave: the `manifest` with its events where it was granted, else None, and the state it
    is in (empty: there is no such manifest)."""

    state: str
    manifest: Manifest | None


class Ask(NamedTuple):
    """What is asked for an attempt, as :meth:`Operations.begin` says."""

    window_id: str
    attempt: int
    lease_ms: int
    most: int
    pause: tuple[int, int]

    def arguments(self) -> tuple[Any, ...]:
        """As the script takes it."""
        return (*self[:4], f"{self.pause[0]} {self.pause[1]}")


class Settlement(NamedTuple):
    """How an attempt is to end, as lua/settle.lua says it; `manifest` is recorded along."""

    window_id: str
    token: str
    ending: str
    cause: str
    delay_ms: int = 0
    error: str = ""
    checkpoint: str = ""
    manifest: Manifest | None = None

    def arguments(self) -> list[Any]:
        """As the script takes it."""
        record = _record(self.manifest) if self.manifest else []
        return [*self[:5], self.error[:2000], self.checkpoint, len(record), *record]


class Effect(NamedTuple):
    """An entry of a manifest's ledger: `state` begun, uncertain or confirmed, since `at` (ms) in `attempt`; `result` is
    JSON, or empty."""

    name: str
    state: str
    attempt: int
    at: int
    result: str


class Tick(NamedTuple):
    """What a tick did: timers handled, the next due instant (ms) or None, windows closed, timers whose record is not to
    be seen, what went wrong with one of them, and the server's instant (ms) of it."""

    handled: int
    next_due: int | None
    closed: int
    orphans: int
    failure: str | None
    now: int


class Attempts(Namespace):
    """What workers do."""

    def beat(self, sign: str) -> Operation[None]:
        """Gives a worker's sign of life."""
        yield from self.connect()
        yield from beat(self.namespace, (yield from self.now()), sign)

    def rest(self, sign: str) -> Operation[None]:
        """Takes a worker's sign of life back: it ends as it should."""
        yield from end(self.namespace, sign)

    def flows(self, sink: str) -> Operation[list[str]]:
        """Flows whose latest policy has that sink."""
        yield from self.connect()
        replies = yield [Call(("HGETALL", keys.meta(self.namespace)))]
        return sorted(flow for flow, its in sinks_of(replies[0]).items() if its == sink)

    def tell_queues(self, queues: Mapping[str, RqQueue]) -> Operation[None]:
        """Says what a dispatcher sees of RQ's queues now."""
        yield from self.connect()
        yield from tell_queues(self.namespace, (yield from self.now()), queues)

    def warm(self) -> Operation[None]:
        """Learns what every attempt needs, so that processes that fork from this one know it."""
        yield from self.connect()
        for flow, (number, policy) in (yield from self.policies()).items():
            self._policies[flow, number] = math.inf, policy
        for name in ("begin", "settle"):
            script(name)

    def owner(self, window_id: str) -> Operation[str | None]:
        """The bucket key of a manifest; None where there is none of that id."""
        yield from self.connect()
        replies = yield [Call(("HGET", keys.manifest(self.prefix_of_window(window_id), window_id), "bucket"))]
        key = answer(replies[0])
        return None if key is None else str(key.decode())

    def state(self, window_id: str) -> Operation[str | None]:
        """The state of a manifest; None where there is none of that id."""
        yield from self.connect()
        replies = yield [Call(("HGET", keys.manifest(self.prefix_of_window(window_id), window_id), "state"))]
        state = answer(replies[0])
        return None if state is None else str(state.decode())

    def tick(self, partition: int, limit: int) -> Operation[Tick]:
        """Handles up to `limit` due timers of a partition."""
        yield from self.connect()
        replies = yield [self._script("tick", self.prefixes[partition], limit)]
        return _read_tick(replies[0])

    def tick_all(self, partitions: Sequence[int], limit: int) -> Operation[list[Tick | AccumulatorError]]:
        """The same for several partitions in one round; a failure is a value."""
        yield from self.connect()
        replies = yield [self._script("tick", self.prefixes[p], limit) for p in partitions]
        return [reply if isinstance(reply, AccumulatorError) else _read_tick(reply) for reply in replies]

    def next_due(self) -> Operation[list[int | None]]:
        """The instant (ms) at which each partition's next timer falls due."""
        yield from self.connect()
        replies = yield [Call(("ZRANGE", keys.timers(prefix), 0, 0, "WITHSCORES")) for prefix in self.prefixes]
        return [int(float(found[0][1])) if (found := as_pairs(reply)) else None for reply in replies]

    def take(
        self, partition: int, sink: str, count: int, watch_ms: int, limits: Mapping[str | None, int] | None = None
    ) -> Operation[list[Taken]]:
        """Takes manifests of a sink whose turn has come, tenants in turn; each is put back where it does not begin in
        time. `limits`: tenant → how many of it may be in flight in this partition; None stands for the others."""
        yield from self.connect()
        given = dict(limits or {})
        default = given.pop(None, "")
        pairs = [part for tenant, limit in given.items() for part in (tenant, limit)]
        replies = yield [self._script("take", self.prefixes[partition], sink, count, watch_ms, default, *pairs)]
        return _read_taken(replies[0])

    def take_of(
        self,
        partition: int,
        sink: str,
        limits: Mapping[str, int],
        count: int,
        watch_ms: int,
        token: str = "",
        reserved: Sequence[str] = (),
    ) -> Operation[tuple[list[Taken], dict[str, int]]]:
        """The same of these tenants only, of each of which up to its limit may be in flight in this partition; and how
        many each has left there. What `token` had `reserved` is let go."""
        yield from self.connect()
        prefix = self.prefixes[partition]
        pairs = [part for pair in limits.items() for part in pair]
        take = [
            self._script("take", prefix, sink, count, watch_ms, 0, *pairs),
            *(Call(("LLEN", keys.ready(prefix, sink, tenant))) for tenant in limits),
        ]
        let_go = [self._script("reserve", self._home(tenant), tenant, token, 0) for tenant in reserved]
        if let_go and self.cluster:  # where the calls of a round are in no order
            replies = yield take
            yield let_go
        else:
            replies = yield [*take, *let_go]
        left = {tenant: int(answer(reply)) for tenant, reply in zip(limits, replies[1:], strict=False)}
        return _read_taken(replies[0]), left

    def reserve(self, tenants: Sequence[str], token: str, hold_ms: int) -> Operation[dict[str, list[int]]]:
        """Makes `token` the only one to take of these tenants, for `hold_ms` at the most or until `take_of`: how many
        each has in flight, for each partition, those aside of which somebody else takes."""
        yield from self.connect()
        ask = [self._script("reserve", self._home(tenant), tenant, token, hold_ms) for tenant in tenants]
        read = [Call(("HMGET", keys.inflight(prefix), *tenants)) for prefix in self.prefixes]
        if self.cluster:
            told = [*(yield ask), *(yield read)]
        else:
            told = yield [*ask, *read]
        counts = [[int(number or 0) for number in answer(reply)] for reply in told[len(ask) :]]
        return {
            tenant: [count[i] for count in counts]
            for i, (tenant, reply) in enumerate(zip(tenants, told, strict=False))
            if int(answer(reply))
        }

    def _home(self, tenant: str) -> str:
        return self.prefixes[keys.partition_of(tenant, self.partitions)]

    def tenants(self, sink: str, partitions: Sequence[int]) -> Operation[list[list[str]]]:
        """The tenants (at most 1000) that have manifests of a sink ready, for each of these partitions."""
        yield from self.connect()
        replies = yield [Call(("LRANGE", keys.tenants(self.prefixes[p], sink), 0, 999)) for p in partitions]
        return [[tenant.decode() for tenant in answer(reply)] for reply in replies]

    def uses(self, sink: str) -> Operation[bool]:
        """Whether a flow's latest policy has that sink, or a manifest of it is ready."""
        return bool((yield from self.flows(sink))) or any((yield from self.waiting(sink)))

    def waiting(self, sink: str) -> Operation[list[int]]:
        """How many tenants have manifests of a sink ready, for each partition."""
        yield from self.connect()
        replies = yield [Call(("LLEN", keys.tenants(prefix, sink))) for prefix in self.prefixes]
        return [int(answer(reply)) for reply in replies]

    def in_flight(self) -> Operation[list[dict[str, int]]]:
        """Tenant → how many of its manifests are dispatched or processing, for each partition."""
        yield from self.connect()
        replies = yield [Call(("HGETALL", keys.inflight(prefix))) for prefix in self.prefixes]
        return [{tenant.decode(): int(n) for tenant, n in as_pairs(reply)} for reply in replies]

    def begin(
        self,
        window_id: str,
        attempt: int,
        token: str,
        lease_ms: int,
        most: int,
        pause: tuple[int, int] = (1_000, 600_000),
    ) -> Operation[Grant]:
        """Asks for an attempt: granted once, to one token, for `lease_ms`. `most`: failures the handler allows;
        `pause`: ms until the next attempt where the lease ends, doubled with each failure, and at the most."""
        [found] = yield from self.begin_all(token, [Ask(window_id, attempt, lease_ms, most, pause)])
        return cast(Grant, answer(found))

    def begin_all(self, token: str, asks: Sequence[Ask]) -> Operation[list[Grant | AccumulatorError | None]]:
        """The same for many at once. None: nothing was done about it, ask again; an error where it could not be asked,
        or what was granted can't be read."""
        yield from self.connect()
        parts = self._by_partition(ask.window_id for ask in asks)
        replies = yield [
            self._script("begin", prefix, token, *(arg for i in indices for arg in asks[i].arguments()))
            for prefix, indices in parts.items()
        ]
        found: list[Grant | AccumulatorError | None] = [None] * len(asks)
        for (prefix, indices), reply in zip(parts.items(), replies, strict=True):
            if isinstance(reply, AccumulatorError):
                for i in indices:
                    found[i] = reply
                continue
            for i, (told, *rest) in zip(indices, reply, strict=True):
                try:
                    if told == b"granted":
                        found[i] = yield from self._granted(prefix, asks[i].window_id, rest)
                    elif told == b"refused":
                        found[i] = Grant(rest[0].decode(), None)
                except AccumulatorError as problem:
                    found[i] = problem
        return found

    def _granted(self, prefix: str, window_id: str, reply: Sequence[Reply]) -> Operation[Grant]:
        state, pairs, kept, entries = reply
        fields, page = dict(as_pairs(pairs)), as_stream(entries)
        bucket_key = fields[b"bucket"].decode()
        if len(page) < PAGE:
            contents = replay(bucket_key, page, kept or None)
        else:
            contents = yield from self._contents(keys.events(prefix, window_id), bucket_key, kept or None)
        return Grant(state.decode(), read_manifest(window_id, fields, contents))

    def _by_partition(self, window_ids: Iterable[str]) -> dict[str, list[int]]:
        """Prefix of a partition → the positions of these window ids that lie in it, in order."""
        parts: dict[str, list[int]] = {}
        for i, window_id in enumerate(window_ids):
            parts.setdefault(self.prefix_of_window(window_id), []).append(i)
        return parts

    def settle(
        self,
        window_id: str,
        token: str,
        ending: str,
        cause: str,
        delay_ms: int = 0,
        error: str = "",
        checkpoint: str = "",
        manifest: Manifest | None = None,
    ) -> Operation[str]:
        """Ends an attempt, see lua/settle.lua for the endings; `manifest` is recorded along. ``done``; or
        ``refused`` where the token has no say any more, ``effects_begun`` or ``no_newer_window`` where it can't give
        way."""
        [told] = yield from self.settle_all(
            [Settlement(window_id, token, ending, cause, delay_ms, error, checkpoint, manifest)]
        )
        return cast(str, answer(told))

    def settle_all(self, settlements: Sequence[Settlement]) -> Operation[list[str | AccumulatorError]]:
        """The same for many at once; an error where that one could not be settled."""
        yield from self.connect()
        parts = self._by_partition(one.window_id for one in settlements)
        replies = yield [
            self._script("settle", prefix, *(arg for i in indices for arg in settlements[i].arguments()))
            for prefix, indices in parts.items()
        ]
        told: list[str | AccumulatorError] = [""] * len(settlements)
        for indices, reply in zip(parts.values(), replies, strict=True):
            for n, i in enumerate(indices):
                told[i] = reply if isinstance(reply, AccumulatorError) else reply[n][0].decode()
        return told

    def effect(
        self, window_id: str, token: str, name: str, step: str, nonce: str, result: str = ""
    ) -> Operation[tuple[str, str]]:
        """A step in the ledger of effects, see lua/effect.lua: the answer, and the recorded result as JSON."""
        yield from self.connect()
        prefix = self.prefix_of_window(window_id)
        replies = yield [self._script("effect", prefix, window_id, token, name, step, nonce, result)]
        told, recorded = answer(replies[0])
        return told.decode(), recorded.decode()

    def effects(self, window_id: str) -> Operation[list[Effect]]:
        """The ledger of a manifest's effects, by name."""
        yield from self.connect()
        replies = yield [Call(("HGETALL", keys.effects(self.prefix_of_window(window_id), window_id)))]
        return read_effects(replies[0])

    def stage_names(self, window_id: str) -> Operation[list[str]]:
        """The stages whose results are kept with a manifest, without these."""
        yield from self.connect()
        replies = yield [Call(("HKEYS", keys.stages(self.prefix_of_window(window_id), window_id)))]
        return sorted(name.decode() for name in answer(replies[0]))

    def save_stage(self, window_id: str, token: str, stage: str, result: str) -> Operation[bool]:
        """Keeps a stage's result (JSON); False where the token has no say any more."""
        yield from self.connect()
        prefix = self.prefix_of_window(window_id)
        replies = yield [self._script("stage", prefix, window_id, token, stage, result)]
        return bool(answer(replies[0]) == b"done")

    def drop_stages(self, window_id: str, token: str) -> Operation[bool]:
        """Drops the results of all stages, and the approval of what was proposed; False as in `save_stage`."""
        return (yield from self.save_stage(window_id, token, "", ""))

    def stages(self, window_id: str) -> Operation[dict[str, str]]:
        """Stage → its result as JSON, of those that were kept, by name."""
        yield from self.connect()
        replies = yield [Call(("HGETALL", keys.stages(self.prefix_of_window(window_id), window_id)))]
        return {stage.decode(): value.decode() for stage, value in sorted(as_pairs(replies[0]))}

    def checkpoint(self, bucket_key: str) -> Operation[tuple[int, str] | None]:
        """The bucket's last checkpoint: version of the window that left it, and its JSON."""
        yield from self.connect()
        replies = yield [Call(("GET", keys.checkpoint(self.prefix_of(bucket_key), bucket_key)))]
        kept = answer(replies[0])
        if kept is None:
            return None
        version, _, value = kept.decode().partition(" ")
        return int(version), value

    def can_give_way(self, manifest: Manifest) -> Operation[bool]:
        """Whether the bucket has a newer window that is open or waits to be handed over, and has room for this one;
        and no effect has begun."""
        yield from self.connect()
        prefix, key = self.prefix_of(manifest.bucket_key), manifest.bucket_key
        newer = ("ZRANGE", keys.manifests(prefix, key), f"({manifest.window_version}", "+inf", "BYSCORE")
        replies = yield [
            Call(("EXISTS", keys.effects(prefix, manifest.window_id))),
            Call(("HMGET", keys.bucket(prefix, key), "open", "joins")),
            Call(newer),
        ]
        begun, (opened, joins), window_ids = (answer(reply) for reply in replies)
        if begun or len((joins or b"").split()) + len(manifest.joined) + 1 >= TOGETHER:
            return False
        if opened or not window_ids:
            return opened is not None
        replies = yield [Call(("HGET", keys.manifest(prefix, w.decode()), "state")) for w in window_ids]
        return any(answer(reply) == b"closed" for reply in replies)

    def set_aside(self, window_id: str, token: str, event: Event, why: str) -> Operation[str]:
        """Queues an event of a manifest for reconciliation, once: ``done``; ``refused`` where the token has no say
        any more, ``full`` where the namespace holds `max_reconcile` items."""
        yield from self.connect()
        yield from self._measure()
        prefix = self.prefix_of_window(window_id)
        event_id, _, _, envelope = packed_again(event)
        allowances = self._allowances
        most = "" if allowances is None else allowances["max_reconcile"][self.prefixes.index(prefix)]
        replies = yield [
            self._script("aside", prefix, window_id, token, event_id, event.content_digest, envelope, why[:1000], most)
        ]
        return str(answer(replies[0]).decode())

    def record(self, manifest: Manifest) -> Operation[None]:
        """Writes ids, digests and flags into the manifest, where they outlive its payloads."""
        yield from self.connect()
        prefix = self.prefix_of_window(manifest.window_id)
        replies = yield [self._script("record", prefix, manifest.window_id, *_record(manifest))]
        answer(replies[0])

    def unrecorded(self, count: int = 1000) -> Operation[list[str]]:
        """Settled manifests without a record of their ids, up to `count` of each partition."""
        yield from self.connect()
        replies = yield [Call(("SRANDMEMBER", keys.unrecorded(prefix), count)) for prefix in self.prefixes]
        return [window_id.decode() for reply in replies for window_id in answer(reply) or []]


def _record(manifest: Manifest) -> list[Any]:
    """A manifest's record, as lua/manifest.lua's write_record reads it."""
    entries = [
        f"{e.content_digest} {e.received_at} {('l' * e.late + 'r' * e.revised + 'q' * e.reconciled) or '-'} "
        f"{len(e.event_id.encode())} {e.event_id}{e.ref or ''}"
        for e in manifest.record
    ]
    retracted = manifest.retracted_event_ids
    return [manifest.digest, manifest.anomaly or "", len(retracted), *retracted, *entries]


def read_effects(reply: Reply) -> list[Effect]:
    """The entries of the hash ``effects:<window_id>``, by name."""
    found = []
    for name, value in as_pairs(reply):
        state, attempt, at, _, result = value.decode().split(" ", 4)
        found.append(Effect(name.decode(), state, int(attempt), int(at), result))
    return sorted(found)


def _read_taken(reply: Reply) -> list[Taken]:
    flat = answer(reply)
    return [Taken(flat[i].decode(), int(flat[i + 1]), flat[i + 2].decode()) for i in range(0, len(flat), 3)]


def _read_tick(reply: Reply) -> Tick:
    handled, next_due, closed, orphans, failure, now = answer(reply)
    due = int(float(next_due))
    return Tick(int(handled), None if due < 0 else due, int(closed), int(orphans), failure.decode() or None, int(now))
