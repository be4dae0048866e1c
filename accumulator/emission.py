"""What the server holds of a ladder that was started, and what it emitted, as they are read."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import blake2b
from itertools import count, takewhile
from typing import Any, Final, NamedTuple

from accumulator.envelope import flow_of
from accumulator.errors import InternalError
from accumulator.ladders import ESCALATE, Ladder
from accumulator.manifest import Timeline, read_timeline

STATES: Final = ("running", "paused", "cancelled", "exhausted", "escalated")
ENDED: Final = frozenset({"cancelled", "exhausted", "escalated"})
EVENTS: Final = ("step", "cancelled", "escalated")
"""What a ladder emits."""

_ID_LENGTH: Final = 20


def is_emission(window_id: str) -> bool:
    """Whether an id is that of an emission (``<ladder_id>s<number>``) rather than of a window."""
    return "s" in window_id[_ID_LENGTH:]


def idempotency_key(ladder: str, bucket_key: str, start: str, step: str) -> str:
    """The key of a step: 32 hexadecimal digits made of these four, the same in every attempt and process."""
    text = json.dumps([ladder, bucket_key, start, step], ensure_ascii=False, separators=(",", ":"))
    return blake2b(text.encode(), digest_size=16).hexdigest()


class Happened(NamedTuple):
    """An entry of a ladder's timeline. `event`: started, step, skipped, rescheduled, paused, resumed, cancelled,
    escalated or exhausted; `detail` is the step's name, why it was skipped, or the new anchor; `emission_id` and the
    `state` it is in (None: not asked for) where something was emitted. `at` is in ms."""

    at: int
    event: str
    step: str | None
    detail: str
    emission_id: str | None
    state: str | None


class Coming(NamedTuple):
    """A step to come (``escalate``, or ``exhausted`` where nothing follows) and its instant (ms)."""

    step: str
    at: int


@dataclass(frozen=True)
class LadderRun:
    """A ladder that was started. Instants in ms; `version` is that of its definition; `state` one of STATES, `since`
    then. `coming` lists what is still to come, while it is paused as it would be. `by_event` is the event that
    cancelled it, `cause` ``event`` or the reason somebody gave."""

    ladder_id: str
    ladder: str
    bucket_key: str
    start_id: str | None
    version: int
    anchor_at: int
    args: dict[str, Any]
    state: str
    since: int
    started_at: int
    coming: tuple[Coming, ...]
    emitted: int
    cause: str | None
    by_event: str | None
    timeline: tuple[Happened, ...]

    @property
    def ended(self) -> bool:
        return self.state in ENDED

    @property
    def next(self) -> Coming | None:
        """What comes next."""
        return self.coming[0] if self.coming else None


@dataclass(frozen=True)
class Emission:
    """What a ladder emitted: a `step`, or that it was ``cancelled`` or ``escalated`` (`event`). It lives like a
    manifest. Instants in ms: it was due at `due_at` and emitted at `emitted_at`.

    `key` is its idempotency key, of ladder, bucket key, start id and step. `by_event` is the event that cancelled the
    ladder, `reason` what somebody said who did.
    """

    emission_id: str
    ladder: str
    ladder_id: str
    number: int
    bucket_key: str
    event: str
    step: str
    attributes: dict[str, Any]
    args: dict[str, Any]
    anchor_at: int
    due_at: int
    emitted_at: int
    start_id: str | None
    key: str
    by_event: str | None
    reason: str | None
    state: str
    attempt: int
    failures: int
    error: str | None
    approved_by: str | None
    timeline: Timeline
    left_out: int

    @property
    def flow(self) -> str:
        """Second part of the bucket key, as it stands there."""
        return flow_of(self.bucket_key)


Fields = Mapping[bytes, bytes]


def bucket_of(text: Mapping[str, str]) -> str:
    """The bucket of a ladder's hash, in which a long key stands in parts."""
    more = takewhile(text.__contains__, (f"bucket{part}" for part in count(2)))
    return "".join(text[name] for name in ("bucket", *more))


def read_run(ladder_id: str, fields: Fields, args: bytes | None, states: Mapping[str, str] | None = None) -> LadderRun:
    """A ladder of the hash ``ladder:<id>`` and its long arguments, if any; `states` by emission id."""
    try:
        text = {name.decode(): value.decode() for name, value in fields.items()}
        notes = int(text["notes"])
        timeline = tuple(
            _happened(ladder_id, text[f"n{n}"], states or {}) for n in range(1, notes + 1) if f"n{n}" in text
        )
        coming = []
        if text["state"] not in ENDED:
            number = int(text["next"])
            while f"s{number}" in text:
                at, _, name = text[f"s{number}"].split(" ", 2)
                coming.append(Coming(name, int(at)))
                number += 1
            coming.append(Coming(ESCALATE if text["escalates"] == "1" else "exhausted", int(text["ends"])))
        of_state = ("started", "paused", "resumed", *ENDED)
        return LadderRun(
            ladder_id=ladder_id,
            ladder=text["name"],
            bucket_key=bucket_of(text),
            start_id=text.get("start"),
            version=int(text["definition"]),
            anchor_at=int(text["anchor"]),
            args=json.loads(text["args"] if args is None else args),
            state=text["state"],
            since=max(h.at for h in timeline if h.event in of_state),
            started_at=int(text["began"]),
            coming=tuple(coming),
            emitted=int(text["emitted"]),
            cause=text.get("cause"),
            by_event=text.get("by"),
            timeline=timeline,
        )
    except (KeyError, ValueError) as problem:
        raise InternalError(f"ladder {ladder_id} can't be read: {type(problem).__name__}") from None


def _happened(ladder_id: str, note: str, states: Mapping[str, str]) -> Happened:
    at, event, number, detail = note.split(" ", 3)
    emission = None if number == "-" else f"{ladder_id}s{number}"
    step = None
    if event == "skipped":
        step, _, detail = detail.partition(" ")
    elif event in ("step", "escalated"):
        step = detail
    return Happened(int(at), event, step, detail, emission, None if emission is None else states.get(emission))


def read_emission(
    emission_id: str, fields: Fields, of_ladder: Fields, args: bytes | None, definition: Ladder
) -> Emission:
    """An emission of its hash ``manifest:<id>``, its ladder's hash, and the ladder's definition."""
    try:
        text = {name.decode(): value.decode() for name, value in fields.items()}
        run = {name.decode(): value.decode() for name, value in of_ladder.items()}
        event, step, ladder_id = text["event"], text["step"], text["ladder"]
        start = run.get("start")
        timeline, left_out = read_timeline(fields)
        cancelled = event == "cancelled"
        return Emission(
            emission_id=emission_id,
            ladder=text["name"],
            ladder_id=ladder_id,
            number=int(text["version"]),
            bucket_key=text["bucket"],
            event=event,
            step=step,
            attributes=definition.attributes(step),
            args=json.loads(run["args"] if args is None else args),
            anchor_at=int(run["anchor"]),
            due_at=int(text["due"]),
            emitted_at=int(text["sealed"]),
            start_id=start,
            key=idempotency_key(text["name"], text["bucket"], start or ladder_id, step or event),
            by_event=run.get("by") if cancelled else None,
            reason=run.get("cause") if cancelled and "by" not in run else None,
            state=text["state"],
            attempt=int(text.get("attempt", 0)),
            failures=int(text.get("failures", 0)),
            error=text.get("error"),
            approved_by=text.get("approved"),
            timeline=timeline,
            left_out=left_out,
        )
    except (KeyError, ValueError) as problem:
        raise InternalError(f"emission {emission_id} can't be read: {type(problem).__name__}") from None
