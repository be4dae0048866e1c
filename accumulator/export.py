"""What settled, written out before it goes: one JSON object a line, for each manifest all that is kept of it, and
for what ladders emitted (it has `emission_id` instead of `window_id`).

A settled manifest is found by the timer of its retention, partition by partition and what goes next first, so that
nothing is searched for and one manifest at a time is in memory. Whatever was settled when an export began, and has not
gone, is in it at least once.
"""

from __future__ import annotations

import errno
import gzip
import os
from base64 import b64encode
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import IO, Any, Final

import orjson

from accumulator import keys
from accumulator.attempts import Effect, read_effects
from accumulator.client import Accumulator
from accumulator.emission import Emission, is_emission
from accumulator.manifest import SETTLED, Manifest, StoredEvent, read_manifest, replay
from accumulator.namespace import PAGE
from accumulator.operations import Operations
from accumulator.store import Call, Operation, Reply, answer, as_pairs, as_stream

MARGIN: Final = 60_000
"""ms by which the next export begins earlier than this one did: the nodes of a cluster, and a replica that took over,
do not share one clock."""

_ROUND_MANIFESTS: Final = 100
_ROUND_BYTES: Final = 4 << 20
_ENTRY_BYTES: Final = 300
"""What an entry takes beside its payload, roughly."""


def event_object(stored: StoredEvent) -> dict[str, Any]:
    """An entry of a window as JSON holds it: instants in ms, a payload of bytes as base64 in `payload_bytes`."""
    event = {name: value for name, value in stored.event.model_dump().items() if value is not None or name == "payload"}
    event |= {"occurred_at": stored.event.occurred_ms}
    if stored.event.deadline_ms is not None:
        event["deadline_at"] = stored.event.deadline_ms
    if isinstance(event.get("payload"), bytes):
        event["payload_bytes"] = b64encode(event.pop("payload")).decode()
    event["content_digest"] = stored.event.content_digest
    return event | {
        "received_at": stored.received_at,
        "position": stored.position,
        "late": stored.late,
        "revised": stored.revised,
        "reconciled": stored.reconciled,
    }


def manifest_object(manifest: Manifest, events: bool = False) -> dict[str, Any]:
    """A manifest as JSON holds it. With `events` these too; null once they went."""
    shown = {f.name: getattr(manifest, f.name) for f in fields(manifest) if f.name != "events"}
    shown["timeline"] = timeline_object(manifest)
    shown["record"] = [entry._asdict() for entry in manifest.record]
    if events:
        gone = manifest.record and not manifest.events
        shown["events"] = None if gone else [event_object(stored) for stored in manifest.events]
    return shown


def emission_object(emission: Emission) -> dict[str, Any]:
    """What a ladder emitted, as JSON holds it."""
    return asdict(emission) | {"timeline": timeline_object(emission)}


def timeline_object(manifest: Manifest | Emission) -> list[dict[str, Any]]:
    """The transitions after the closing, in order."""
    return [
        {"at": at, "state": state, "attempt": attempt, "cause": cause}
        for at, state, attempt, cause in manifest.timeline
    ]


def effect_object(effect: Effect, result: bool = True) -> dict[str, Any]:
    """An entry of the ledger; its recorded `result` may be left out."""
    shown = effect._asdict()
    shown["result"] = orjson.loads(effect.result) if effect.result else None
    if not result:
        del shown["result"]
    return shown


def start_of_next(accumulator: Accumulator) -> int:
    """From which instant (ms) the next export must take what settled, if this one begins now."""
    return accumulator.store.perform(accumulator.operations.now()) - MARGIN


def export(accumulator: Accumulator, since: int = 0) -> Iterator[bytes]:
    """A line for each settled manifest, those only that settled at `since` (ms) or later. Raises ServerError."""
    store, operations = accumulator.store, accumulator.operations
    store.perform(operations.connect())
    for partition in range(operations.partitions):
        start, seen = 0, frozenset[bytes]()
        while True:
            page = store.perform(_timers(operations, partition, start, len(seen) + PAGE))
            new = [member for member, _ in page if member not in seen]
            if not new:
                break
            start = page[-1][1]
            # What falls due at the same instant as the last one may stand on the next page too.
            seen = frozenset(member for member, at in page if at == start)
            settled = [member[2:].decode() for member in new if member[:2] in (b"p:", b"x:")]
            for some in store.perform(_rounds(operations, settled, since)):
                for told in store.perform(_read(operations, some)):
                    yield orjson.dumps(told) + b"\n"


def _timers(operations: Operations, partition: int, start: int, count: int) -> Operation[list[tuple[bytes, int]]]:
    """A page of a partition's timers, from the instant `start` on."""
    name = keys.timers(operations.prefixes[partition])
    replies = yield [Call(("ZRANGE", name, start, "+inf", "BYSCORE", "LIMIT", 0, count, "WITHSCORES"))]
    return [(member, int(float(at))) for member, at in as_pairs(replies[0])]


def _rounds(operations: Operations, window_ids: Sequence[str], since: int) -> Operation[list[list[str]]]:
    """Those that settled since then, in parts that are small enough to be read at a time."""
    if not window_ids:
        return []
    replies = yield [
        Call(("HMGET", _manifest(operations, window_id), "state", "since", "bytes", "entries"))
        for window_id in window_ids
    ]
    rounds: list[list[str]] = []
    room = 0
    for window_id, reply in zip(window_ids, replies, strict=True):
        state, at, size, entries = answer(reply)
        if state is None or state.decode() not in SETTLED or int(at) < since:
            continue
        weight = int(size or 0) + _ENTRY_BYTES * int(entries or 1)
        if not rounds or weight > room or len(rounds[-1]) >= _ROUND_MANIFESTS:
            rounds.append([])
            room = _ROUND_BYTES
        rounds[-1].append(window_id)
        room -= weight
    return rounds


def _read(operations: Operations, window_ids: Sequence[str]) -> Operation[list[dict[str, Any]]]:
    emitted = yield from _read_emitted(operations, [each for each in window_ids if is_emission(each)])
    window_ids = [each for each in window_ids if not is_emission(each)]
    if not window_ids:
        return emitted
    calls = []
    for window_id in window_ids:
        prefix = operations.prefix_of_window(window_id)
        calls += [
            Call(("HGETALL", keys.manifest(prefix, window_id))),
            Call(("HGETALL", keys.effects(prefix, window_id))),
            Call(("HGETALL", keys.stages(prefix, window_id))),
            Call(("GET", keys.kept(prefix, window_id))),
            Call(("XRANGE", keys.events(prefix, window_id), "-", "+", "COUNT", PAGE)),
        ]
    replies = yield calls
    found = emitted
    for i, window_id in enumerate(window_ids):
        facts, effects, stages, kept, log = replies[5 * i : 5 * i + 5]
        hash_ = dict(as_pairs(facts))
        if not hash_:
            continue  # it went meanwhile
        page = as_stream(log)
        manifest: Manifest | None
        if len(page) < PAGE:
            manifest = read_manifest(window_id, hash_, replay(hash_[b"bucket"].decode(), page, answer(kept)))
        else:
            manifest = yield from _read_long(operations, window_id)
        if manifest is not None:
            told = manifest_object(manifest, events=True) | {"settled_at": int(hash_[b"since"])}
            found.append(told | _done(effects, stages))
    return found


def _read_emitted(operations: Operations, emission_ids: Sequence[str]) -> Operation[list[dict[str, Any]]]:
    found = []
    for emission_id in emission_ids:
        emission = yield from operations.emission(emission_id)
        if emission is not None:
            prefix = operations.prefix_of_window(emission_id)
            effects, stages = yield [
                Call(("HGETALL", keys.effects(prefix, emission_id))),
                Call(("HGETALL", keys.stages(prefix, emission_id))),
            ]
            settled_at = emission.timeline[-1][0] if emission.timeline else emission.emitted_at
            found.append(emission_object(emission) | {"settled_at": settled_at} | _done(effects, stages))
    return found


def _done(effects: Reply, stages: Reply) -> dict[str, Any]:
    return {
        "effects": [effect_object(effect) for effect in read_effects(effects)],
        "stages": {name.decode(): orjson.loads(result) for name, result in as_pairs(stages)},
    }


def _read_long(operations: Operations, window_id: str) -> Operation[Manifest | None]:
    """One of many pages, between which its payloads may go: then its record is read."""
    manifest = yield from operations.manifest(window_id)
    if manifest is not None and manifest.anomaly is not None:
        manifest = yield from operations.manifest(window_id)
    return manifest


def _manifest(operations: Operations, window_id: str) -> str:
    return keys.manifest(operations.prefix_of_window(window_id), window_id)


def write_file(path: Path, lines: Iterable[bytes]) -> tuple[int, int]:
    """Writes lines into a new file, compressed where its name ends in .gz: it has that name only once all of it is on
    the disk. How many lines and bytes they were. Raises FileExistsError and other OSErrors."""
    if path.exists():
        raise FileExistsError(errno.EEXIST, "is there already", str(path))
    part = path.with_name(path.name + ".part")
    try:
        with part.open("wb") as raw:
            if path.suffix == ".gz":
                with gzip.GzipFile(fileobj=raw, mode="wb", filename="", compresslevel=6) as packed:
                    counts = write_lines(packed, lines)
            else:
                counts = write_lines(raw, lines)
            raw.flush()
            os.fsync(raw.fileno())
    except BaseException:
        part.unlink(missing_ok=True)
        raise
    part.rename(path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
    return counts


def write_lines(file: IO[bytes] | gzip.GzipFile, lines: Iterable[bytes]) -> tuple[int, int]:
    """Writes lines, and says how many lines and bytes they were."""
    count = size = 0
    for line in lines:
        file.write(line)
        count, size = count + 1, size + len(line)
    return count, size
