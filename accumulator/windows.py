"""What producers ask: pushing events, closing, holding, taking back, and reading what became of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, Final, NamedTuple, TypeVar

from accumulator import keys
from accumulator.emission import is_emission
from accumulator.envelope import Event, check_bucket_key, check_event_id, flow_of
from accumulator.errors import AccumulatorError, InternalError, InvalidInput, ServerError, UnknownFlow
from accumulator.manifest import RELATIONS, Manifest, StoredEvent, read_manifest
from accumulator.namespace import ROUND_EVENTS, Namespace
from accumulator.store import Call, Operation, Reply, answer, as_pairs

T = TypeVar("T")

CALL_EVENTS: Final = 500
CALL_BYTES: Final = 1 << 20


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


class Windows(Namespace):
    """What is done to windows, and what is to be seen of them."""

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

    def _careful(self, rounds: Iterable[list[T]]) -> Iterator[list[T]]:
        """The same calls; near a ceiling one by one, since each is bounded by what those before it left."""
        for calls in rounds:
            if self._allowances is None:
                yield calls
            else:
                yield from ([call] for call in calls)

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
                arguments += (key, flow_of(key), 1, summary, event_id, mark, facts, envelope)
            else:
                group = [events[i] for i in indices]
                arguments += (key, flow_of(key), len(group), _summary(group))
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
        return rounds, set(map(flow_of, of_key))

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

    def open_events(self, bucket_key: str) -> Operation[tuple[StoredEvent, ...]]:
        """The events of the bucket's open window, in order; empty where none is open."""
        check_bucket_key(bucket_key)
        yield from self.connect()
        prefix = self.prefix_of(bucket_key)
        replies = yield [Call(("GET", keys.kept(prefix, bucket_key)))]
        contents = yield from self._contents(keys.events(prefix, bucket_key), bucket_key, answer(replies[0]))
        return contents.events


def _closed(texts: Iterable[bytes]) -> tuple[ClosedWindow, ...]:
    closed = []
    for text in texts:
        window_id, version, reason, at = text.decode().split(",")
        closed.append(ClosedWindow(window_id, int(version), reason, int(at)))
    return tuple(closed)


def _read_group(
    key: str, indices: Sequence[int], events: Sequence[Event], reply: Reply, receipts: list[Receipt | None]
) -> None:
    if reply[0] == b"+":
        window_id, version = reply[1].decode(), int(reply[2])
        for position, i in enumerate(indices, int(reply[3])):
            receipts[i] = Receipt(Outcome.ACCEPTED, events[i].event_id, key, window_id, version, position)
        return
    for i, text in zip(indices, reply[1:], strict=True):
        receipts[i] = read_receipt(events[i], key, text)


def read_receipt(event: Event, bucket_key: str, text: bytes) -> Receipt:
    """The receipt of an event, of what accept.lua answers to it."""
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
