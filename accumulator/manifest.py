"""What a closed window is read as: the manifest, its events, and the digest that proves them.

An open or closed window is one stream, its log. An entry of it holds one or more fields ``event_id → envelope``; an
entry under the empty field name retracts the id it names. :func:`replay` reads the log in order, and everything that a
manifest says about ids follows from it.
"""

from __future__ import annotations

from base64 import urlsafe_b64encode
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import NamedTuple

import orjson

from accumulator.envelope import MISSING, Event
from accumulator.errors import InternalError

RELATIONS = {"f": "first", "c": "continuation", "p": "policy_change", "a": "after_close"}

Timeline = tuple[tuple[int, str, int, str], ...]
FIRST_STEPS = 20
"""So many transitions of a manifest stay at the beginning of its timeline, however many there are."""
TOGETHER = 200
"""Manifests that one hand-over holds at the most (`handover: together`, and those that gave way)."""

SETTLED = frozenset({"confirmed", "refused", "discarded", "superseded", "empty"})
"""States in which a manifest needs nobody any more."""


@dataclass(frozen=True, slots=True)
class StoredEvent:
    """An entry of a window: the event as pushed, `received_at` (ms), its `position` among all entries the window took,
    from 1, and whether it came late, revises an earlier version of its id, or came out of the reconciliation queue."""

    event: Event
    received_at: int
    position: int
    late: bool
    revised: bool
    reconciled: bool = False


class Entry(NamedTuple):
    """What stays of a window's entry when its payload goes: id, content digest, `received_at` (ms), whether it came
    late or revised an earlier version, the reference to the authorised record (None: none was given), and whether it
    came out of the reconciliation queue."""

    event_id: str
    content_digest: str
    received_at: int
    late: bool
    revised: bool
    ref: str | None
    reconciled: bool = False


@dataclass(frozen=True)
class Contents:
    """What a window's log holds: `events` in order of acceptance, retracted ones left out, and ids retracted, in
    order."""

    events: tuple[StoredEvent, ...] = ()
    retracted_event_ids: tuple[str, ...] = ()

    @property
    def record(self) -> tuple[Entry, ...]:
        """The same without payloads."""
        return tuple(
            Entry(e.event.event_id, e.event.content_digest, e.received_at, e.late, e.revised, e.event.ref, e.reconciled)
            for e in self.events
        )


def pairs_digest(pairs: Iterable[tuple[str, str]]) -> str:
    """BLAKE2b-128 of the JSON list ``[["id","digest"],…]`` without spaces, as base64url after the format digit 1."""
    raw = blake2b(orjson.dumps([list(pair) for pair in pairs]), digest_size=16).digest()
    return "1" + urlsafe_b64encode(raw)[:22].decode()


def replay(
    bucket_key: str,
    log: Iterable[tuple[bytes, Sequence[tuple[bytes, bytes]]]],
    kept: bytes | None = None,
) -> Contents:
    """Reads a window's log, ``(entry id, fields)`` in order. `kept` is the payload that a ``keep: last`` window holds
    (``<position> <envelope>``), which then is the only one."""
    kept_position, _, kept_envelope = (kept or b"0").partition(b" ")
    entries: list[StoredEvent] = []
    retracted: dict[str, None] = {}
    position = 0
    for entry_id, fields in log:
        received_at = int(entry_id.partition(b"-")[0])
        for name, value in fields:
            if not name:
                gone = value.decode()
                retracted[gone] = None
                entries = [e for e in entries if e.event.event_id != gone]
                continue
            position += 1
            event, late, revised = Event.from_stored(name, bucket_key, value)
            reconciled = event.reconciled
            if position == int(kept_position):
                event, _, _ = Event.from_stored(name, bucket_key, kept_envelope)
            entries.append(StoredEvent(event, received_at, position, late, revised, reconciled))
    return Contents(tuple(entries), tuple(retracted))


@dataclass(frozen=True)
class Manifest:
    """A closed window, frozen. Instants are ms since the epoch; `limits` holds the instant of each limit as it stood
    (``max_age``, and where they applied ``inactivity``, ``hold``, ``cutoff``, ``deadline``, ``terminal``).

    `record` says what it holds, entry by entry, and stays; `events` are the same entries with their payloads, empty
    once these went. `digest` can be recomputed from either with :func:`pairs_digest`. `timeline` has an (instant,
    state, attempt, cause) for each transition after the closing; of very many only the FIRST_STEPS first, the last
    hundred and what people decided: `left_out` is how many more there were. `joined` are the manifests handed over with
    this one, `leader` the one that this one was handed over with.
    """

    bucket_key: str
    window_id: str
    window_version: int
    opened_at: int
    first_event_at: int
    last_event_at: int
    closed_at: int
    sealed_at: int
    close_reason: str
    event_ids: tuple[str, ...]
    event_count: int
    entries: int
    bytes: int
    weight: int
    policy_version: int
    policy_versions: tuple[int, ...]
    flow_policy: int
    late_event_ids: tuple[str, ...]
    revised_event_ids: tuple[str, ...]
    retracted_event_ids: tuple[str, ...]
    duplicates: int
    previous_window_id: str | None
    relation: str
    digest: str
    limits: dict[str, int]
    state: str
    attempt: int
    failures: int = 0
    anomaly: str | None = None
    error: str | None = None
    approved_by: str | None = None
    joined: tuple[str, ...] = ()
    leader: str | None = None
    timeline: Timeline = ()
    left_out: int = 0
    record: tuple[Entry, ...] = field(default=(), repr=False)
    events: tuple[StoredEvent, ...] = field(default=(), repr=False)

    @property
    def settled(self) -> bool:
        """Whether nobody needs to do anything about it any more."""
        return self.state in SETTLED

    @property
    def flow(self) -> str:
        """Second part of the bucket key, as it stands there."""
        return self.bucket_key.split(":", 2)[1]

    def payloads(self) -> Iterator[object]:
        """The payloads of `events` in order, those without one left out."""
        return (e.event.payload for e in self.events if e.event.payload is not MISSING)


def read_manifest(window_id: str, fields: dict[bytes, bytes], contents: Contents) -> Manifest:
    """A manifest of the hash ``manifest:<window_id>`` and the window's log. Raises InternalError for a hash that no
    release wrote."""

    def number(name: bytes) -> int:
        return int(fields[name])

    try:
        record, retracted = contents.record, contents.retracted_event_ids
        recorded = b"digest" in fields
        if recorded and not contents.events:
            record = tuple(_read_entry(fields[b"e%d" % n]) for n in _numbered(fields, b"e"))
            retracted = tuple(fields[b"x%d" % n].decode() for n in _numbered(fields, b"x"))
        versions = {int(v) for v in fields.get(b"pvs", fields[b"pv"]).split()}
        limits = {
            name.removesuffix(b"_at").decode(): int(value) for name, value in fields.items() if name.endswith(b"_at")
        }
        timeline, left_out = read_timeline(fields)
        anomaly = fields.get(b"anomaly", b"").decode() or None
        if b"lost" in fields:
            anomaly = "events_missing"
        elif len(record) != number(b"entries"):
            anomaly = "events_incomplete"
        text = {name: fields[name].decode() for name in (b"prev", b"error", b"approved", b"leader") if name in fields}
        return Manifest(
            bucket_key=fields[b"bucket"].decode(),
            window_id=window_id,
            window_version=number(b"version"),
            opened_at=number(b"opened"),
            first_event_at=number(b"opened"),
            last_event_at=number(b"last"),
            closed_at=number(b"closed"),
            sealed_at=number(b"sealed"),
            close_reason=fields[b"reason"].decode(),
            event_ids=tuple(dict.fromkeys(e.event_id for e in record)),
            event_count=number(b"ids"),
            entries=number(b"entries"),
            bytes=number(b"bytes"),
            weight=number(b"weight"),
            policy_version=number(b"pv"),
            policy_versions=tuple(sorted(versions)),
            flow_policy=number(b"policy"),
            late_event_ids=tuple(dict.fromkeys(e.event_id for e in record if e.late)),
            revised_event_ids=tuple(dict.fromkeys(e.event_id for e in record if e.revised)),
            retracted_event_ids=retracted,
            duplicates=int(fields.get(b"dups", 0)),
            previous_window_id=text.get(b"prev"),
            relation=RELATIONS[fields[b"relation"].decode()],
            digest=fields[b"digest"].decode() if recorded else pairs_digest(entry[:2] for entry in record),
            limits=limits,
            state=fields[b"state"].decode(),
            attempt=int(fields.get(b"attempt", 0)),
            failures=int(fields.get(b"failures", 0)),
            anomaly=anomaly,
            error=text.get(b"error"),
            approved_by=text.get(b"approved"),
            joined=tuple(fields.get(b"joined", b"").decode().split()),
            leader=text.get(b"leader"),
            timeline=timeline,
            left_out=left_out,
            record=record,
            events=contents.events,
        )
    except (KeyError, ValueError) as problem:
        raise InternalError(f"manifest {window_id} can't be read: {type(problem).__name__}") from None


def read_timeline(fields: Mapping[bytes, bytes]) -> tuple[Timeline, int]:
    """The transitions that a hash ``manifest:<id>`` keeps, and how many it does not. Raises ValueError."""
    numbers = sorted(int(name[4:]) for name in fields if name[:4] == b"step" and name[4:].isdigit())
    steps = [fields[b"step%d" % n].decode().split(" ", 3) for n in numbers]
    timeline = tuple((int(at), state, int(attempt), cause) for at, state, attempt, cause in steps)
    return timeline, int(fields.get(b"steps", 0)) - len(numbers)


def _numbered(fields: dict[bytes, bytes], letter: bytes) -> list[int]:
    return sorted(int(name[1:]) for name in fields if name[:1] == letter and name[1:].isdigit())


def _read_entry(text: bytes) -> Entry:
    digest, received_at, flags, length, rest = text.split(b" ", 4)
    event_id, ref = rest[: int(length)], rest[int(length) :]
    return Entry(
        event_id.decode(),
        digest.decode(),
        int(received_at),
        b"l" in flags,
        b"r" in flags,
        ref.decode() or None,
        b"q" in flags,
    )
