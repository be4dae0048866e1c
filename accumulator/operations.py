"""What is asked of the server, and how its answers are read: each operation once, for both clients.

An operation is a generator: it yields rounds of calls, is sent their replies and returns its result. It knows keys,
scripts and reply shapes, and neither sockets nor ``await``.
"""

from __future__ import annotations

import math
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, Final, NamedTuple, TypeVar, cast

from accumulator import keys
from accumulator.emission import is_emission
from accumulator.envelope import Event, check_bucket_key, check_event_id
from accumulator.errors import (
    AccumulatorError,
    InternalError,
    InvalidInput,
    NamespaceMismatch,
    ServerError,
    UnknownFlow,
)
from accumulator.health import Health, beat, end, read_health, read_setup
from accumulator.ladder_operations import LadderOperations
from accumulator.manifest import RELATIONS, TOGETHER, Contents, Manifest, StoredEvent, read_manifest, replay
from accumulator.policy import Policy, shown
from accumulator.scripts import script
from accumulator.store import Call, Operation, Reply, answer, as_pairs, as_stream

T = TypeVar("T")

FORMAT: Final = 1
"""Version of the storage format; a namespace with a higher one is refused."""

CALL_EVENTS: Final = 500
CALL_BYTES: Final = 1 << 20
ROUND_EVENTS: Final = 10_000
PAGE: Final = 1000
ATTENTION: Final = ("awaiting_approval", "uncertain", "dead", "reconciling")
"""States in which a manifest waits for somebody."""
_TROUBLED: Final = frozenset({"dead", "uncertain", "reconciling"})
UNSETTLED: Final = ("closed", "dispatched", "processing", "retrying", *ATTENTION)
DECISIONS: Final = ("approve", "refuse", "replay", "discard", "confirm")
RESOLUTIONS: Final = {"accept": "accepted", "discard": "discarded"}
"""What can be decided of a reconciliation item → what it then is."""

_CEILINGS: Final = {"max_unsettled": (keys.outbox, 1_000_000), "max_reconcile": (keys.reconcile, 100_000)}


def _nonce(length: int) -> str:
    return secrets.token_hex(length // 2)


class Outcome(StrEnum):
    """What became of an event."""

    ACCEPTED = "accepted"
    REVISED = "revised"
    DUPLICATE = "duplicate"
    CONFLICT = "conflict"
    REJECTED = "rejected"
    RECONCILED = "reconciled"
    UNKNOWN = "unknown"
    """No answer came: the event may have been taken. Sending it again is safe."""


_OUTCOMES = {
    "a": Outcome.ACCEPTED,
    "r": Outcome.REVISED,
    "d": Outcome.DUPLICATE,
    "k": Outcome.DUPLICATE,
    "c": Outcome.CONFLICT,
    "j": Outcome.REJECTED,
    "q": Outcome.RECONCILED,
}


class ClosedWindow(NamedTuple):
    """A window that became a manifest: `closed_at` in ms, `reason` as in the manifest."""

    window_id: str
    window_version: int
    reason: str
    closed_at: int


class Receipt(NamedTuple):
    """The answer to one pushed event.

    `window_id`, `window_version` (from 1) and `position` (from 1, among all entries the window took) where it was
    accepted or revised; a duplicate or conflict names the version of the window that holds the id, where one does.
    `closed` is the reason where this very event closed the window it went into; `closed_windows` are all manifests its
    push closed, an expired one included. `code` says why it was rejected or reconciled; `conflict` marks a duplicate
    of the same id with other content (`keep_first`); `error` is why no answer came.
    """

    outcome: Outcome
    event_id: str
    bucket_key: str
    window_id: str | None = None
    window_version: int | None = None
    position: int | None = None
    late: bool = False
    closed: str | None = None
    code: str | None = None
    conflict: bool = False
    closed_windows: tuple[ClosedWindow, ...] = ()
    error: str | None = None


class Flushed(NamedTuple):
    """The answer to a flush. `outcome`: ``flushed``, ``nothing_open``, or ``other_version`` where another version than
    the one named is open (`open_version`)."""

    outcome: str
    bucket_key: str
    open_version: int | None
    closed_windows: tuple[ClosedWindow, ...]


class Held(NamedTuple):
    """The answer to a hold: the version held and its true `due_at` in ms; both None where no window is open."""

    bucket_key: str
    window_version: int | None
    due_at: int | None
    closed_windows: tuple[ClosedWindow, ...]


class Retracted(NamedTuple):
    """The answer to a retract. `outcome`: ``retracted``; or why not: ``already``, ``closed`` (in window
    `window_version`), ``queued`` (for reconciliation only) or ``unknown``."""

    outcome: str
    bucket_key: str
    event_id: str
    window_version: int | None
    closed_windows: tuple[ClosedWindow, ...]


@dataclass(frozen=True)
class OpenWindow:
    """The open window of a bucket. Instants in ms; `due_at` is the true one, `due_reason` what it would close for.
    `duplicates` counts those that arrived while it was open."""

    window_id: str
    window_version: int
    opened_at: int
    last_event_at: int
    due_at: int
    due_reason: str
    entries: int
    event_count: int
    bytes: int
    weight: int
    policy_version: int
    flow_policy: int
    relation: str
    duplicates: int


@dataclass(frozen=True)
class Bucket:
    """A bucket as it stands at `now` (ms): its open window, if any, and the last window it closed."""

    bucket_key: str
    now: int
    open: OpenWindow | None
    last_version: int
    last_closed_window_id: str | None


class ReconcileItem(NamedTuple):
    """An event that waits for somebody to decide. `item_id` names it in the namespace: its partition, and its id in
    that one's queue; `queued_at` is in ms; `known` are the digests under the event's id. `window` is the version that
    was open then, or that set it aside, 0 for none; `why` is what a handler said that set it aside."""

    item_id: str
    queued_at: int
    code: str
    event: Event
    digest: str
    known: tuple[str, ...]
    window: int = 0
    why: str = ""


class Resolved(NamedTuple):
    """What became of a reconciliation item: ``accepted`` (with the `receipt` of its event), ``discarded``, or
    ``missing`` where it does not wait any more."""

    item_id: str
    outcome: str
    receipt: Receipt | None = None


class Waiting(NamedTuple):
    """A manifest that is not settled, in `state` since `since` (ms): the `cause` of its last transition, the error's
    class and text where it had one, the attempts made."""

    window_id: str
    bucket_key: str
    window_version: int
    state: str
    since: int
    cause: str
    error: str | None
    attempt: int


class Decided(NamedTuple):
    """The answer to a decision on a manifest: ``done``, ``wrong_state`` or ``missing``, and the state it is in now."""

    outcome: str
    state: str


class LoadedPolicy(NamedTuple):
    """What became of a policy: its `version` in the namespace, and whether it is ``new``, the ``same`` as before, or
    the one that was there is ``kept`` (and `differs`)."""

    flow: str
    version: int
    outcome: str

    @property
    def differs(self) -> bool:
        return self.outcome == "kept"


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


def _closed(texts: Iterable[bytes]) -> tuple[ClosedWindow, ...]:
    closed = []
    for text in texts:
        window_id, version, reason, at = text.decode().split(",")
        closed.append(ClosedWindow(window_id, int(version), reason, int(at)))
    return tuple(closed)


class _Part:
    """The events of one accept call, all of one partition: bucket_key → where its events stand in what was pushed."""

    __slots__ = ("bytes", "events", "groups", "partition")

    def __init__(self, partition: int) -> None:
        self.partition = partition
        self.groups: dict[str, list[int]] = {}
        self.events = 0
        self.bytes = 0


def _summary(events: Sequence[Event]) -> str:
    """What accept decides on for a group of several events."""
    sizes = [event.packed.size for event in events]
    instants = [event.occurred_ms for event in events]
    pv = events[0].policy_version
    others = {(event.policy_version, event.deadline_ms) for event in events} - {(pv, None)}
    plain = not others and len({event.event_id for event in events}) == len(events)
    weight = sum([event.weight for event in events])
    return f"{sum(sizes)} {max(sizes)} {weight} {min(instants)} {max(instants)} {pv} {plain:d}"


def _flow(bucket_key: str) -> str:
    return bucket_key.split(":", 2)[1]


class Operations(LadderOperations):
    """The operations on one namespace.

    `partitions` is the count the namespace must have; None takes what is there, or 64 for a new one. `clock` gives the
    instant (ms) in a namespace of a virtual clock, and makes a new namespace one.
    """

    def __init__(
        self,
        namespace: str = "acc",
        partitions: int | None = None,
        clock: Callable[[], int] | None = None,
        nonce: Callable[[int], str] = _nonce,
    ) -> None:
        self.namespace = keys.check_namespace(namespace)
        if partitions is not None and (type(partitions) is not int or not 1 <= partitions <= keys.MAX_PARTITIONS):
            raise NamespaceMismatch(f"a namespace has 1 to {keys.MAX_PARTITIONS} partitions, not {shown(partitions)}")
        self._wanted = partitions
        self._clock = clock
        self._nonce = nonce
        self.cluster = False
        """Whether the server is a cluster: then scripts are told the keys they derive."""
        self.partitions = 0
        self.prefixes: list[str] = []
        self._flows: set[str] = set()
        self._policies: dict[tuple[str, int], tuple[float, Policy]] = {}
        self._ceilings = {name: default for name, (_, default) in _CEILINGS.items()}
        self._allowances: dict[str, list[int]] | None = None
        self._counted = -math.inf

    # --- the namespace ---

    def connect(self) -> Operation[None]:
        """Meets the namespace, or makes it. Raises NamespaceMismatch where it was made for something else."""
        if not self.prefixes:
            yield from self.meet()

    def meet(self) -> Operation[bool]:
        """The same, also where it was met before: it may have been wiped since. Whether it was, and was made anew."""
        meta = keys.meta(self.namespace)
        mode = "live" if self._clock is None else "virtual"
        replies = yield [Call(("HGETALL", meta))]
        found = dict(as_pairs(replies[0]))
        new = not {b"format", b"partitions", b"mode"} <= found.keys()
        if new:
            self._flows.clear()
            replies = yield [
                Call(("HSETNX", meta, field, value))
                for field, value in (
                    ("format", FORMAT),
                    ("partitions", self._wanted or self.partitions or 64),
                    ("mode", mode),
                )
            ]
            for reply in replies:
                answer(reply)
            replies = yield [Call(("HGETALL", meta))]
            found = dict(as_pairs(replies[0]))
        if int(found[b"format"]) > FORMAT:
            raise NamespaceMismatch(
                f"namespace {self.namespace} is in format {int(found[b'format'])}, this release reads up to {FORMAT}: "
                "upgrade event-accumulator, or use another namespace"
            )
        there = int(found[b"partitions"])
        if self._wanted is not None and self._wanted != there:
            raise NamespaceMismatch(
                f"namespace {self.namespace} has {there} partitions, not {self._wanted}: set partitions to {there} (or "
                "leave it out), or use another namespace"
            )
        if found[b"mode"].decode() != mode:
            raise NamespaceMismatch(
                f"namespace {self.namespace} is {found[b'mode'].decode()}, this client {mode}: a namespace with a "
                "virtual clock is for tests and simulation only; use another namespace"
            )
        for name in _CEILINGS:
            self._ceilings[name] = int(found.get(name.encode(), self._ceilings[name]))
        anew = new and bool(self.prefixes)
        self.partitions = there
        self.prefixes = [keys.prefix(self.namespace, p) for p in range(there)]
        return anew

    def prefix_of(self, bucket_key: str) -> str:
        return self.prefixes[keys.partition_of(bucket_key, self.partitions)]

    def prefix_of_window(self, window_id: str, field: str = "window_id") -> str:
        """A window id names its partition, and so does a ladder's; one that no release made is refused."""
        text = str(window_id)  # a caller without types may give anything
        if text.isascii() and text.isalnum() and len(text) >= 20:
            try:
                return self.prefixes[int(text[11:14], 16)]
            except (ValueError, IndexError):
                pass
        raise InvalidInput(field, "is none of this namespace")

    def _now(self) -> int | str:
        return "" if self._clock is None else self._clock()

    def _script(self, name: str, prefix: str, *args: Any) -> Call:
        return Call.run(name, keys.timers(prefix), self._now(), *args)

    # --- ceilings ---

    @property
    def ceilings(self) -> dict[str, int]:
        """`max_unsettled` and `max_reconcile` of the namespace, as they were when it was met."""
        return dict(self._ceilings)

    def set_ceilings(self, max_unsettled: int, max_reconcile: int) -> Operation[None]:
        """How many unsettled manifests and reconciliation items the namespace may hold; kept in it, for all clients
        that connect from now on."""
        yield from self.connect()
        self._ceilings = {"max_unsettled": max_unsettled, "max_reconcile": max_reconcile}
        self._counted = -math.inf
        pairs = [part for pair in self._ceilings.items() for part in pair]
        replies = yield [Call(("HSET", keys.meta(self.namespace), *pairs))]
        answer(replies[0])

    def _measure(self) -> Operation[None]:
        """Counts what the ceilings bound, once a second, and before each call when one is near: when a round of calls
        could reach it. A partition may then hold what it holds plus what the namespace has left; far from the ceilings
        nothing is passed to the scripts."""
        if time.monotonic() - self._counted < 1:
            return
        replies = yield [
            Call(("ZCARD" if count is keys.outbox else "XLEN", count(prefix)))
            for count, _ in _CEILINGS.values()
            for prefix in self.prefixes
        ]
        counts = [int(answer(reply)) for reply in replies]
        near = False
        allowances = {}
        for i, name in enumerate(_CEILINGS):
            own = counts[i * self.partitions : (i + 1) * self.partitions]
            left = self._ceilings[name] - sum(own)
            near = near or left < max(3 * ROUND_EVENTS, self._ceilings[name] // 10)
            allowances[name] = [held + max(left, 0) for held in own]
        if near:
            self._counted, self._allowances = -math.inf, allowances
        else:
            self._counted, self._allowances = time.monotonic(), None

    def _careful(self, rounds: Iterable[list[T]]) -> Iterator[list[T]]:
        """The same calls; near a ceiling one by one, since each is bounded by what those before it left."""
        for calls in rounds:
            if self._allowances is None:
                yield calls
            else:
                yield from ([call] for call in calls)

    # --- policies ---

    def load_policy(self, flow: str, policy: Policy, only_new: bool = False) -> Operation[LoadedPolicy]:
        """Makes a policy the flow's latest, in every partition; equal content is no new version. `only_new`: where the
        flow has one already, that is kept."""
        yield from self.connect()
        replies = yield [
            Call.run(
                "number_policy",
                keys.meta(self.namespace),
                f"flow:{flow}",
                policy.canonical_json(),
                "1" if only_new else "0",
            )
        ]
        number, outcome, text = answer(replies[0])
        loaded = LoadedPolicy(flow, int(number), outcome.decode())
        yield from self._install(flow, loaded.version, Policy.from_json(text.decode()))
        return loaded

    def _install(self, flow: str, version: int, policy: Policy) -> Operation[None]:
        now = self._now()
        if now == "":
            replies = yield [Call(("TIME",))]
            now = int(answer(replies[0])[0]) * 1000
        fields = policy.fields(version, int(now))
        rules = fields.pop(str(version))
        rest = [part for pair in fields.items() for part in pair]
        replies = yield [
            Call.run("load_policy", keys.policy(prefix, flow), version, rules, *rest) for prefix in self.prefixes
        ]
        for reply in replies:
            answer(reply)
        self._flows.add(flow)

    def repair_policies(self) -> Operation[int]:
        """Brings every partition to the namespace's latest policies; the number of partitions and flows that were
        behind."""
        yield from self.connect()
        flows = yield from self.policies()
        behind = 0
        for flow, (version, policy) in flows.items():
            replies = yield [Call(("HGET", keys.policy(prefix, flow), "latest")) for prefix in self.prefixes]
            latest: list[bytes | None] = [answer(reply) for reply in replies]
            late = sum(1 for text in latest if text is None or not text.startswith(b"%d " % version))
            if late:
                behind += late
                yield from self._install(flow, version, policy)
        return behind

    def policies(self) -> Operation[dict[str, tuple[int, Policy]]]:
        """Flow → (version, policy), the latest of each."""
        yield from self.connect()
        replies = yield [Call(("HGETALL", keys.meta(self.namespace)))]
        found = {}
        for field, value in as_pairs(replies[0]):
            if field.startswith(b"flow:"):
                version, _, text = value.decode().partition(" ")
                found[field.decode().removeprefix("flow:")] = (int(version), Policy.from_json(text))
        return dict(sorted(found.items()))

    def _bring(self, unknown: UnknownFlow) -> Operation[None]:
        """Installs a flow's policy where the namespace has one that a partition does not; else raises UnknownFlow."""
        self._flows.clear()
        found = yield from self.policies()
        for flow in (unknown.flow, "default"):
            if flow in found:
                version, policy = found[flow]
                yield from self._install(flow, version, policy)
                return
        raise unknown

    def _know_flows(self, wanted: set[str]) -> Operation[None]:
        """Refuses a flow without a policy before anything is sent."""
        new = wanted - self._flows
        if not new:
            return
        flows = sorted(new)
        replies = yield [Call(("HMGET", keys.meta(self.namespace), "flow:default", *(f"flow:{f}" for f in flows)))]
        default, *own = answer(replies[0])
        for flow, text in zip(flows, own, strict=True):
            if text is None and default is None:
                raise UnknownFlow(flow)
        self._flows |= new

    # --- events ---

    def push(self, event: Event) -> Operation[Receipt]:
        """One event. Raises ServerError where no answer came or the server refused."""
        receipts, errors = yield from self._push([event])
        for error in errors:
            raise error
        return receipts[0]

    def push_many(self, events: Sequence[Event]) -> Operation[list[Receipt]]:
        """Any number of events of any buckets; the answers in the order given. A part without an answer is `unknown`
        for its events; raises ServerError only where no part got one."""
        receipts, errors = yield from self._push(events)
        if errors and all(receipt.outcome is Outcome.UNKNOWN for receipt in receipts):
            raise errors[0]
        return receipts

    def _push(self, events: Sequence[Event]) -> Operation[tuple[list[Receipt], list[AccumulatorError]]]:
        yield from self.connect()
        rounds, flows = self._rounds(events)
        yield from self._know_flows(flows)
        receipts: list[Receipt | None] = [None] * len(events)
        errors: list[AccumulatorError] = []
        yield from self._measure()
        for turn, parts in enumerate(self._careful(rounds)):
            replies: list[Reply]
            try:
                if turn:
                    yield from self._measure()
                replies = yield [self._accept(part, events) for part in parts]
            except ServerError as problem:  # these were not sent; what was answered before stands
                replies = [problem] * len(parts)
            for part, reply in zip(parts, replies, strict=True):
                if isinstance(reply, UnknownFlow):
                    # Nothing was done. Where the namespace knows the flow, this partition was behind.
                    try:
                        yield from self._bring(reply)
                        (reply,) = yield [self._accept(part, events)]
                    except ServerError as problem:
                        reply = problem
                if isinstance(reply, UnknownFlow):
                    raise reply
                if isinstance(reply, AccumulatorError):
                    errors.append(reply)
                    for key, indices in part.groups.items():
                        for i in indices:
                            receipts[i] = Receipt(Outcome.UNKNOWN, events[i].event_id, key, error=str(reply))
                else:
                    for (key, indices), answers in zip(part.groups.items(), reply, strict=True):
                        _read_group(key, indices, events, answers, receipts)
        return [receipt for receipt in receipts if receipt is not None], errors

    def _accept(self, part: _Part, events: Sequence[Event]) -> Call:
        ceilings: list[int | str] = ["", ""]
        if self._allowances is not None:
            ceilings = [allowances[part.partition] for allowances in self._allowances.values()]
        arguments: list[Any] = [self._nonce(12), *ceilings, len(part.groups)]
        for key, indices in part.groups.items():
            if len(indices) == 1:
                event = events[indices[0]]
                event_id, mark, facts, envelope, size = event.packed
                occurred, plain = event.occurred_ms, event.deadline_ms is None
                summary = f"{size} {size} {event.weight} {occurred} {occurred} {event.policy_version} {plain:d}"
                arguments += (key, _flow(key), 1, summary, event_id, mark, facts, envelope)
            else:
                group = [events[i] for i in indices]
                arguments += (key, _flow(key), len(group), _summary(group))
                for event in group:
                    arguments += event.packed[:4]
        prefix = self.prefixes[part.partition]
        call = self._script("accept", prefix, *arguments)
        if self.cluster:
            also = tuple(name(prefix, key) for key in part.groups for name in (keys.bucket, keys.ids, keys.events))
            call = replace(call, also=also)
        return call

    def _rounds(self, events: Sequence[Event]) -> tuple[list[list[_Part]], set[str]]:
        """Rounds of calls, each partition at most once a round, so that a bucket's events keep their order; and the
        flows."""
        partition_of, partitions = keys.partition_of, self.partitions
        parts: dict[int, list[_Part]] = {}
        of_key: dict[str, _Part] = {}
        for index, event in enumerate(events):
            key, size = event.bucket_key, len(event.packed.envelope)
            part = of_key.get(key)
            if part is None or part.events >= CALL_EVENTS or part.bytes + size > CALL_BYTES:
                p = partition_of(key, partitions) if part is None else part.partition
                same = parts.setdefault(p, [])
                if not same or same[-1].events >= CALL_EVENTS or same[-1].bytes + size > CALL_BYTES:
                    same.append(_Part(p))
                part = of_key[key] = same[-1]
            part.events += 1
            part.bytes += size
            group = part.groups.get(key)
            if group is None:
                part.groups[key] = [index]
            else:
                group.append(index)
        rounds: list[list[_Part]] = []
        for turn in range(max(map(len, parts.values()), default=0)):
            held = ROUND_EVENTS
            for same in parts.values():
                if turn < len(same):
                    if held >= ROUND_EVENTS:
                        rounds.append([])
                        held = 0
                    rounds[-1].append(same[turn])
                    held += same[turn].events
        return rounds, set(map(_flow, of_key))

    # --- what a person or a producer does to an open window ---

    def flush(self, bucket_key: str, window_version: int | None = None, partial: bool = False) -> Operation[Flushed]:
        """Closes the open window (of that version)."""
        check_bucket_key(bucket_key)
        if isinstance(window_version, bool) or not isinstance(window_version, int | None):
            raise InvalidInput("window_version", f"must be a whole number, not {type(window_version).__name__}")
        yield from self.connect()
        version = "" if window_version is None else window_version
        replies = yield [
            self._script(
                "flush",
                self.prefix_of(bucket_key),
                bucket_key,
                version,
                self._nonce(16),
                "1" if partial else "0",
            )
        ]
        outcome, open_version, *closed = answer(replies[0])
        name = outcome.decode()
        return Flushed(
            "flushed" if name == "repeated" else name, bucket_key, int(open_version) or None, _closed(closed)
        )

    def flush_where(self, tenant: str | None, flow: str | None, partial: bool = False) -> Operation[list[Flushed]]:
        """Flushes each bucket of a tenant or flow that is open now; not atomic."""
        yield from self.connect()
        found = yield from self.open_buckets()
        done = []
        for bucket_key, _ in found:
            own_tenant, own_flow, _ = bucket_key.split(":", 2)
            if tenant in (None, own_tenant) and flow in (None, own_flow):
                state = yield from self.bucket(bucket_key)
                if state.open is not None:
                    done.append((yield from self.flush(bucket_key, state.open.window_version, partial)))
        return done

    def hold(self, bucket_key: str, ms: int) -> Operation[Held]:
        """Keeps the open window open for `ms` from now."""
        check_bucket_key(bucket_key)
        yield from self.connect()
        replies = yield [self._script("hold", self.prefix_of(bucket_key), bucket_key, ms)]
        version, due, *closed = answer(replies[0])
        return Held(bucket_key, int(version) or None, int(due) or None, _closed(closed))

    def retract(self, bucket_key: str, event_id: str) -> Operation[Retracted]:
        """Takes an id's entries out of the open window."""
        check_bucket_key(bucket_key)
        check_event_id(event_id)
        yield from self.connect()
        replies = yield [self._script("retract", self.prefix_of(bucket_key), bucket_key, event_id)]
        outcome, version, *closed = answer(replies[0])
        return Retracted(outcome.decode(), bucket_key, event_id, int(version) or None, _closed(closed))

    # --- reading ---

    def bucket(self, bucket_key: str) -> Operation[Bucket]:
        """A bucket as it stands."""
        check_bucket_key(bucket_key)
        yield from self.connect()
        replies = yield [self._script("show", self.prefix_of(bucket_key), bucket_key)]
        now, due, reason, *flat = answer(replies[0])
        fields = dict(as_pairs(flat))
        window = None
        version = 0
        closed = None
        if b"prev" in fields:
            number, window_id, *_ = fields[b"prev"].decode().split(" ")
            version, closed = int(number), window_id
        if b"open" in fields:
            window_id, number, opened, policy, pv, _, _, relation, *_ = fields[b"open"].decode().split(" ")
            entries, ids, held, weight, last = (int(n) for n in fields[b"tally"].split(b" "))
            version = int(number)
            window = OpenWindow(
                window_id, version, int(opened), last, int(due), reason.decode(), entries, ids, held, weight, int(pv),
                int(policy), RELATIONS[relation], int(fields.get(b"dups", 0)),
            )  # fmt: skip
        return Bucket(bucket_key, int(now), window, version, closed)

    def open_buckets(self) -> Operation[list[tuple[str, int]]]:
        """(bucket_key, opened_at in ms) of every open bucket, the oldest first."""
        yield from self.connect()
        replies = yield [Call(("ZRANGE", keys.open_(prefix), 0, -1, "WITHSCORES")) for prefix in self.prefixes]
        found = [(key.decode(), int(at)) for reply in replies for key, at in as_pairs(reply)]
        return sorted(found, key=lambda pair: (pair[1], pair[0]))

    def manifests(self, bucket_key: str) -> Operation[list[Manifest]]:
        """The bucket's manifests, by version."""
        check_bucket_key(bucket_key)
        yield from self.connect()
        prefix = self.prefix_of(bucket_key)
        replies = yield [Call(("ZRANGE", keys.manifests(prefix, bucket_key), 0, -1))]
        found = []
        for window_id in answer(replies[0]):
            manifest = yield from self.manifest(window_id.decode())
            if manifest is not None:
                found.append(manifest)
        return found

    def manifest(self, window_id: str) -> Operation[Manifest | None]:
        """A manifest with its events, or None where there is none of that id; an emission's id is none."""
        yield from self.connect()
        prefix = self.prefix_of_window(window_id)
        if is_emission(window_id):
            return None
        replies = yield [
            Call(("HGETALL", keys.manifest(prefix, window_id))),
            Call(("GET", keys.kept(prefix, window_id))),
        ]
        fields = dict(as_pairs(replies[0]))
        if not fields:
            return None
        contents = yield from self._contents(
            keys.events(prefix, window_id), fields[b"bucket"].decode(), answer(replies[1])
        )
        return read_manifest(window_id, fields, contents)

    def find_event(self, bucket_key: str, event_id: str) -> Operation[Event | None]:
        """An event by its id, as last delivered: in the open window, a manifest that is kept, or the queue for
        reconciliation."""
        for entry in reversed((yield from self.open_events(bucket_key))):
            if entry.event.event_id == event_id:
                return entry.event
        for manifest in reversed((yield from self.manifests(bucket_key))):
            for entry in reversed(manifest.events):
                if entry.event.event_id == event_id:
                    return entry.event
        for item in reversed((yield from self.reconciliation())):
            if (item.event.bucket_key, item.event.event_id) == (bucket_key, event_id):
                return item.event
        return None

    def open_events(self, bucket_key: str) -> Operation[tuple[StoredEvent, ...]]:
        """The events of the bucket's open window, in order; empty where none is open."""
        check_bucket_key(bucket_key)
        yield from self.connect()
        prefix = self.prefix_of(bucket_key)
        replies = yield [Call(("GET", keys.kept(prefix, bucket_key)))]
        contents = yield from self._contents(keys.events(prefix, bucket_key), bucket_key, answer(replies[0]))
        return contents.events

    def _contents(self, stream: str, bucket_key: str, kept: bytes | None) -> Operation[Contents]:
        log = []
        start = "-"
        while True:
            replies = yield [Call(("XRANGE", stream, start, "+", "COUNT", PAGE))]
            page = as_stream(replies[0])
            log += page
            if len(page) < PAGE:
                return replay(bucket_key, log, kept)
            start = "(" + page[-1][0].decode()

    def reconciliation(self) -> Operation[list[ReconcileItem]]:
        """What waits for somebody, in the order it was queued."""
        yield from self.connect()
        found: list[ReconcileItem] = []
        for partition in range(self.partitions):
            page = yield from self.queued(partition, "", "+", PAGE)
            while page:
                found += page
                page = yield from self.queued(partition, page[-1].item_id, "+", PAGE)
        return sorted(found, key=lambda item: (item.queued_at, item.item_id))

    def queued(self, partition: int, after: str, until: str, count: int) -> Operation[list[ReconcileItem]]:
        """A page of a partition's reconciliation queue, in its order: what follows the item `after` ('': its
        beginning), up to the stream id `until`."""
        start = "(" + _stream_id(after) if after else "-"
        replies = yield [Call(("XRANGE", keys.reconcile(self.prefixes[partition]), start, until, "COUNT", count))]
        return [_read_item(partition, *entry) for entry in as_stream(replies[0])]

    def queue_length(self) -> Operation[int]:
        """How many events wait for somebody."""
        yield from self.connect()
        replies = yield [Call(("XLEN", keys.reconcile(prefix))) for prefix in self.prefixes]
        return sum(int(answer(reply)) for reply in replies)

    def reconcile_item(self, item_id: str) -> Operation[ReconcileItem | None]:
        """One item of the queue; None where none of that id waits."""
        yield from self.connect()
        stream_id = _stream_id(item_id)
        partition = int(item_id.partition("-")[0])
        if partition >= self.partitions:
            raise InvalidInput("item", "is none of this namespace")
        replies = yield [Call(("XRANGE", keys.reconcile(self.prefixes[partition]), stream_id, stream_id))]
        found = [_read_item(partition, *entry) for entry in as_stream(replies[0])]
        return found[0] if found else None

    def counters(self) -> Operation[dict[str, int]]:
        """The namespace's counters, summed over partitions."""
        yield from self.connect()
        replies = yield [Call(("HGETALL", keys.stats(prefix))) for prefix in self.prefixes]
        total: dict[str, int] = {}
        for reply in replies:
            for name, value in as_pairs(reply):
                text = name.decode()
                total[text] = total.get(text, 0) + int(value)
        return dict(sorted(total.items()))

    def health(self) -> Operation[Health]:
        """How it goes: see :mod:`accumulator.health`. Raises ServerError where the server can't be asked."""
        yield from self.connect()
        return (yield from read_health(self.namespace, self.prefixes, self._now(), self._ceilings))

    def server_warnings(self) -> Operation[list[str]]:
        """What of the server's set-up may lose what it accepted, a sentence each."""
        problems, warnings = yield from read_setup()
        return problems + warnings

    # --- what workers do ---

    @property
    def channel(self) -> str:
        """Where ``<partition> <instant ms>`` is published when an earlier timer appears; and, with the instant of the
        call, when a manifest's turn has come."""
        return f"{self.namespace}:wake"

    def server_time(self) -> Operation[int]:
        """The clock that the scripts go by, µs since the epoch; of several nodes' clocks the one that is furthest."""
        if self._clock is not None:
            return self._clock() * 1000
        replies = yield [Call(("TIME",))]
        reply = answer(replies[0])
        nodes = reply.values() if isinstance(reply, Mapping) else [reply]
        return max(int(seconds) * 1_000_000 + int(micros) for seconds, micros in nodes)

    def now(self) -> Operation[int]:
        """The same in ms."""
        return (yield from self.server_time()) // 1000

    def beat(self, sign: str) -> Operation[None]:
        """Gives a worker's sign of life."""
        yield from self.connect()
        yield from beat(self.namespace, (yield from self.now()), sign)

    def rest(self, sign: str) -> Operation[None]:
        """Takes a worker's sign of life back: it ends as it should."""
        yield from end(self.namespace, sign)

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
        yield from self.connect()
        replies = yield [Call(("HGETALL", keys.meta(self.namespace)))]
        part = f'"sink":"{sink}"'.encode()
        if any(name.startswith(b"flow:") and part in policy for name, policy in as_pairs(replies[0])):
            return True
        return any((yield from self.waiting(sink)))

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
        """Stage → its result as JSON, of those that were kept."""
        yield from self.connect()
        replies = yield [Call(("HGETALL", keys.stages(self.prefix_of_window(window_id), window_id)))]
        return {stage.decode(): value.decode() for stage, value in as_pairs(replies[0])}

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
        event_id, _, _, envelope = _packed(event)
        allowances = self._allowances
        most = "" if allowances is None else allowances["max_reconcile"][self.prefixes.index(prefix)]
        replies = yield [
            self._script("aside", prefix, window_id, token, event_id, event.content_digest, envelope, why[:1000], most)
        ]
        return str(answer(replies[0]).decode())

    def policy_of(self, manifest: Manifest) -> Operation[Policy]:
        """The policy that a manifest's window obeyed. Its version never changes; read anew once a minute all the same,
        since the namespace may have been wiped."""
        yield from self.connect()
        known = self._policies.get((manifest.flow, manifest.flow_policy))
        if known is not None and known[0] > time.monotonic():
            return known[1]
        prefix = self.prefix_of(manifest.bucket_key)
        field = f"{manifest.flow_policy}:json"
        replies = yield [Call(("HGET", keys.policy(prefix, flow), field)) for flow in (manifest.flow, "default")]
        for reply in replies:
            text = answer(reply)
            if text is not None:
                policy = Policy.from_json(text.decode())
                if len(self._policies) >= 1000:
                    self._policies.clear()
                self._policies[manifest.flow, manifest.flow_policy] = time.monotonic() + 60, policy
                return policy
        raise UnknownFlow(manifest.flow)

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

    # --- what people decide ---

    def attention(self) -> Operation[list[str]]:
        """Window ids of the manifests that wait for somebody (awaiting_approval, uncertain, dead, reconciling), the
        longest first."""
        return (yield from self._listed(keys.attention))

    def _listed(self, index: Callable[[str], str]) -> Operation[list[str]]:
        yield from self.connect()
        replies = yield [Call(("ZRANGE", index(prefix), 0, -1, "WITHSCORES")) for prefix in self.prefixes]
        found = [(float(at), window_id.decode()) for reply in replies for window_id, at in as_pairs(reply)]
        return [window_id for _, window_id in sorted(found)]

    def waiting_for_people(self, state: str | None = None) -> Operation[list[Waiting]]:
        """The manifests of :meth:`attention`, in its order; only those in `state`, where it is given. That may be any
        of UNSETTLED: those that wait for nobody come in the order in which they closed."""
        if state is not None:
            _choice("state", state, UNSETTLED)
        window_ids = yield from self._listed(keys.attention if state in (None, *ATTENTION) else keys.outbox)
        found: list[Waiting] = []
        names = ("bucket", "version", "state", "since", "attempt", "error", "steps")
        for i in range(0, len(window_ids), PAGE):
            some = [(w, keys.manifest(self.prefix_of_window(w), w)) for w in window_ids[i : i + PAGE]]
            replies = yield [Call(("HMGET", name, *names)) for _, name in some]
            rows = [
                (window_id, name, facts)
                for (window_id, name), reply in zip(some, replies, strict=True)
                if (facts := answer(reply))[0] is not None and state in (None, facts[2].decode())
            ]
            if rows:
                causes = yield [Call(("HGET", name, b"step" + (facts[6] or b"0"))) for _, name, facts in rows]
                found += [
                    Waiting(
                        window_id, facts[0].decode(), int(facts[1]), facts[2].decode(), int(facts[3]),
                        (answer(cause) or b"- - - closed").decode().split(" ", 3)[3],
                        facts[5].decode() if facts[5] else None,
                        int(facts[4] or 0),
                    )
                    for (window_id, _, facts), cause in zip(rows, causes, strict=True)
                ]  # fmt: skip
        return found

    def decide(self, window_id: str, decision: str, who: str, why: str, effects: str = "") -> Operation[Decided]:
        """A person's decision on a manifest, see lua/decide.lua."""
        _person(who, why)
        _choice("decision", decision, DECISIONS)
        _choice("effects", effects, ("", "done", "not_done"))
        yield from self.connect()
        prefix = self.prefix_of_window(window_id)
        replies = yield [self._script("decide", prefix, window_id, decision, who, why, effects, self._nonce(16))]
        told, state = answer(replies[0])
        return Decided(told.decode(), state.decode())

    def decide_where(
        self,
        decision: str,
        who: str,
        why: str,
        state: str | None = None,
        tenant: str | None = None,
        flow: str | None = None,
        older_than: int = 0,
        effects: str = "",
    ) -> Operation[dict[str, int]]:
        """``discard`` or ``replay`` of all manifests that are not settled when it begins and match every filter given,
        `older_than` in ms since they closed: outcome of :meth:`decide` → how many. Those that are processing are left
        (``wrong_state``). Not atomic."""
        _person(who, why)
        _choice("decision", decision, ("discard", "replay"))
        _choice("effects", effects, ("", "done", "not_done"))
        if state is not None:
            _choice("state", state, UNSETTLED)
        if state is None and tenant is None and flow is None and not older_than:
            raise InvalidInput("filter", "is missing: name a state, a tenant, a flow or an age")
        yield from self.connect()
        until = (yield from self.now()) - older_than
        wanted = {state} if state else _TROUBLED if decision == "replay" else set(UNSETTLED)
        counts = {"done": 0, "wrong_state": 0}
        for prefix in self.prefixes:
            replies = yield [Call(("ZRANGE", keys.outbox(prefix), "-inf", until, "BYSCORE"))]
            ids = [window_id.decode() for window_id in answer(replies[0])]
            for i in range(0, len(ids), PAGE):
                some = ids[i : i + PAGE]
                replies = yield [Call(("HMGET", keys.manifest(prefix, w), "state", "bucket", "leader")) for w in some]
                # What was handed over together is decided together, and once.
                together: dict[str, int] = {}
                for window_id, reply in zip(some, replies, strict=True):
                    held, key, leader = (value and value.decode() for value in answer(reply))
                    if held in wanted and tenant in (None, key.split(":", 1)[0]) and flow in (None, _flow(key)):
                        decided = leader or window_id
                        together[decided] = together.get(decided, 0) + 1
                replies = yield [
                    self._script("decide", prefix, window_id, decision, who, why, effects, self._nonce(16))
                    for window_id in together
                ]
                for number, reply in zip(together.values(), replies, strict=True):
                    told = answer(reply)[0].decode()
                    counts[told] = counts.get(told, 0) + number
        return counts

    def resolve(self, item: ReconcileItem | str, decision: str, who: str, why: str) -> Operation[Resolved]:
        """Takes an event out of the reconciliation queue, given the item or its id: ``accept`` (into the bucket's next
        window) or ``discard``."""
        _person(who, why)
        _choice("decision", decision, RESOLUTIONS)
        yield from self.connect()
        if isinstance(item, str):
            found = yield from self.reconcile_item(item)
            if found is None:
                return Resolved(item, "missing")
            item = found
        elif not isinstance(item, ReconcileItem):
            raise InvalidInput("item", f"must be a reconciliation item or its id, not {type(item).__name__}")
        event = item.event
        replies = yield [
            self._script(
                "resolve", self.prefix_of(event.bucket_key), self._nonce(12), "", "", _stream_id(item.item_id),
                decision, who, why, event.bucket_key, *_packed(event),
            )
        ]  # fmt: skip
        told, text = answer(replies[0])
        if told != b"done":
            return Resolved(item.item_id, "missing")
        receipt = _receipt(event, event.bucket_key, text) if text else None
        return Resolved(item.item_id, RESOLUTIONS[decision], receipt)

    def resolve_where(
        self,
        decision: str,
        who: str,
        why: str,
        code: str | None = None,
        tenant: str | None = None,
        flow: str | None = None,
        older_than: int = 0,
    ) -> Operation[dict[str, int]]:
        """The same for all items that wait when it begins and match every filter given, `older_than` in ms: outcome →
        how many. Not atomic."""
        _person(who, why)
        _choice("decision", decision, RESOLUTIONS)
        if code is None and tenant is None and flow is None and not older_than:
            raise InvalidInput("filter", "is missing: name a code, a tenant, a flow or an age")
        yield from self.connect()
        now = yield from self.now()
        counts = dict.fromkeys([RESOLUTIONS[decision], "missing"], 0)
        for partition, prefix in enumerate(self.prefixes):
            replies = yield [Call(("XREVRANGE", keys.reconcile(prefix), "+", "-", "COUNT", 1))]
            for last, _ in as_stream(replies[0]):
                page = yield from self.queued(partition, "", last.decode(), 100)
                while page:
                    for item in page:
                        if (
                            code in (None, item.code)
                            and tenant in (None, item.event.tenant)
                            and flow in (None, item.event.flow)
                            and item.queued_at + older_than <= now
                        ):
                            counts[(yield from self.resolve(item, decision, who, why)).outcome] += 1
                    page = yield from self.queued(partition, page[-1].item_id, last.decode(), 100)
        return counts


def _packed(event: Event) -> tuple[bytes, bytes, bytes, bytes]:
    """Id, mark, facts and envelope of an event that was read back. One whose payload was not kept has its digest in the
    envelope, since it can't be computed again."""
    event_id, mark, facts, envelope, _ = event.packed
    again, _, _ = Event.from_stored(event_id, event.bucket_key, envelope)
    if again.content_digest != event.content_digest:
        envelope = b'%b,"digest":"%b"}' % (envelope[:-1], event.content_digest.encode())
    return event_id, mark, facts, envelope


def _record(manifest: Manifest) -> list[Any]:
    """A manifest's record, as lua/manifest.lua's write_record reads it."""
    entries = [
        f"{e.content_digest} {e.received_at} {('l' * e.late + 'r' * e.revised + 'q' * e.reconciled) or '-'} "
        f"{len(e.event_id.encode())} {e.event_id}{e.ref or ''}"
        for e in manifest.record
    ]
    retracted = manifest.retracted_event_ids
    return [manifest.digest, manifest.anomaly or "", len(retracted), *retracted, *entries]


def _stream_id(item_id: str) -> str:
    """The id in its partition's queue of an item: what follows ``<partition>-``."""
    parts = str(item_id).split("-")
    if len(parts) != 3 or not all(part.isascii() and part.isdigit() and len(part) <= 19 for part in parts):
        raise InvalidInput("item", "is no id of a reconciliation item")
    return f"{parts[1]}-{parts[2]}"


def _read_item(partition: int, stream_id: bytes, pairs: Sequence[tuple[bytes, bytes]]) -> ReconcileItem:
    fields = dict(pairs)
    event, _, _ = Event.from_stored(fields[b"event_id"], fields[b"bucket_key"].decode(), fields[b"envelope"])
    return ReconcileItem(
        f"{partition}-{stream_id.decode()}",
        int(fields[b"at"]),
        fields[b"code"].decode(),
        event,
        fields[b"digest"].decode(),
        tuple(fields[b"known"].decode().split()),
        int(fields.get(b"window", 0)),
        fields.get(b"why", b"").decode(),
    )


def _choice(field: str, value: object, choices: Iterable[str]) -> None:
    if not isinstance(value, str) or value not in choices:
        raise InvalidInput(field, f"must be one of {', '.join(filter(None, choices))}")


def _person(who: object, why: object) -> None:
    for field, value, most in (("by", who, 200), ("reason", why, 1000)):
        if not isinstance(value, str) or not value.strip() or len(value) > most:
            raise InvalidInput(field, f"must be 1 to {most} characters")
        if any(ord(character) < 32 for character in value):
            raise InvalidInput(field, "must not contain control characters")
        if any(0xD800 <= ord(character) < 0xE000 for character in value):
            raise InvalidInput(field, "must not contain a lone surrogate")


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


def _read_group(
    key: str, indices: Sequence[int], events: Sequence[Event], reply: Reply, receipts: list[Receipt | None]
) -> None:
    if reply[0] == b"+":
        window_id, version = reply[1].decode(), int(reply[2])
        for position, i in enumerate(indices, int(reply[3])):
            receipts[i] = Receipt(Outcome.ACCEPTED, events[i].event_id, key, window_id, version, position)
        return
    for i, text in zip(indices, reply[1:], strict=True):
        letter, window_id, version, position, late, reason, code, *closed = text.decode().split(" ")
        if letter not in _OUTCOMES:
            raise InternalError(f"accept answers with an unknown outcome {letter!r}")
        receipts[i] = Receipt(
            _OUTCOMES[letter],
            events[i].event_id,
            key,
            None if window_id == "-" else window_id,
            int(version) or None,
            int(position) or None,
            late == "1",
            None if reason == "-" else reason,
            None if code == "-" else code,
            letter == "k",
            _closed(text.encode() for text in closed),
        )


def _receipt(event: Event, bucket_key: str, text: bytes) -> Receipt:
    letter, window_id, version, position, late, reason, code, *closed = text.decode().split(" ")
    if letter not in _OUTCOMES:
        raise InternalError(f"accept answers with an unknown outcome {letter!r}")
    return Receipt(
        _OUTCOMES[letter],
        event.event_id,
        bucket_key,
        None if window_id == "-" else window_id,
        int(version) or None,
        int(position) or None,
        late == "1",
        None if reason == "-" else reason,
        None if code == "-" else code,
        letter == "k",
        _closed(text.encode() for text in closed),
    )
