"""What a closed window is read as: the manifest, its events, and the digest that proves them.

An open or closed window is one stream, its log. An entry of it holds one or more fields ``event_id → envelope``; an
entry under the empty field name retracts the id it names. :func:`replay` reads the log in order, and everything that a
manifest says about ids follows from it.
"""

from __future__ import annotations

from base64 import urlsafe_b64encode
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

import orjson

from accumulator.envelope import MISSING, Event
from accumulator.errors import InternalError

RELATIONS = {"f": "first", "c": "continuation", "p": "policy_change", "a": "after_close"}

SETTLED = frozenset({"confirmed", "refused", "discarded", "superseded", "empty"})
"""States in which a manifest needs nobody any more."""


@dataclass(frozen=True, slots=True)
class StoredEvent:
    """An entry of a window: the event as pushed, `received_at` (ms), its `position` among all entries the window took,
    from 1, and whether it came late or revises an earlier version of its id."""

    event: Event
    received_at: int
    position: int
    late: bool
    revised: bool


@dataclass(frozen=True)
class Contents:
    """What a window's log holds: `entries` in order of acceptance, retracted ones left out."""

    entries: tuple[StoredEvent, ...] = ()
    retracted_event_ids: tuple[str, ...] = ()

    @property
    def event_ids(self) -> tuple[str, ...]:
        """In order of acceptance, each once."""
        return tuple(dict.fromkeys(e.event.event_id for e in self.entries))

    @property
    def late_event_ids(self) -> tuple[str, ...]:
        """Each once, in the order of its first late entry."""
        return tuple(dict.fromkeys(e.event.event_id for e in self.entries if e.late))

    @property
    def revised_event_ids(self) -> tuple[str, ...]:
        """Each once, in the order of its first revising entry."""
        return tuple(dict.fromkeys(e.event.event_id for e in self.entries if e.revised))

    @property
    def digest(self) -> str:
        """Digest over the (event_id, content_digest) pairs, in order; see :func:`pairs_digest`."""
        return pairs_digest((e.event.event_id, e.event.content_digest) for e in self.entries)


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
            if position == int(kept_position):
                event, _, _ = Event.from_stored(name, bucket_key, kept_envelope)
            entries.append(StoredEvent(event, received_at, position, late, revised))
    return Contents(tuple(entries), tuple(retracted))


@dataclass(frozen=True)
class Manifest:
    """A closed window, frozen. Instants are ms since the epoch; `limits` holds the instant of each limit as it stood
    (``max_age``, and where they applied ``inactivity``, ``hold``, ``cutoff``, ``deadline``, ``terminal``).

    `events` holds the window's entries where they were read along. `digest` can be recomputed from them with
    :func:`pairs_digest`.
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
    anomaly: str | None = None
    timeline: tuple[tuple[int, str, int, str], ...] = ()
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
        versions = {int(v) for v in fields.get(b"pvs", fields[b"pv"]).split()}
        limits = {
            name.removesuffix(b"_at").decode(): int(value) for name, value in fields.items() if name.endswith(b"_at")
        }
        steps = [fields[b"step%d" % n].decode().split(" ", 3) for n in range(1, int(fields.get(b"steps", 0)) + 1)]
        anomaly = None
        if b"lost" in fields:
            anomaly = "events_missing"
        elif len(contents.entries) != number(b"entries"):
            anomaly = "events_incomplete"
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
            event_ids=contents.event_ids,
            event_count=number(b"ids"),
            entries=number(b"entries"),
            bytes=number(b"bytes"),
            weight=number(b"weight"),
            policy_version=number(b"pv"),
            policy_versions=tuple(sorted(versions)),
            flow_policy=number(b"policy"),
            late_event_ids=contents.late_event_ids,
            revised_event_ids=contents.revised_event_ids,
            retracted_event_ids=contents.retracted_event_ids,
            duplicates=int(fields.get(b"dups", 0)),
            previous_window_id=fields[b"prev"].decode() if b"prev" in fields else None,
            relation=RELATIONS[fields[b"relation"].decode()],
            digest=contents.digest,
            limits=limits,
            state=fields[b"state"].decode(),
            attempt=int(fields.get(b"attempt", 0)),
            anomaly=anomaly,
            timeline=tuple((int(at), state, int(attempt), cause) for at, state, attempt, cause in steps),
            events=contents.entries,
        )
    except (KeyError, ValueError) as problem:
        raise InternalError(f"manifest {window_id} can't be read: {type(problem).__name__}") from None
