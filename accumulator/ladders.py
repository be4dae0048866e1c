"""Reminder ladders: steps around a due date, cancelled by the event everybody waits for.

::

    ladders:
      cobranca:
        timezone: America/Sao_Paulo
        steps:
          - {name: antes, offset: -3d, channel: email}
          - {name: no_dia, offset: {days: 0, at: "09:00"}, channel: email}
          - {name: depois, offset: 3d, channel: whatsapp, stale_after: 2d}
        cancel_on: [pago]
        skip_to_escalate: {arg: amount, op: gt, value: 10000}
        final_wait: 5d
        escalate: true

A ladder is data. When it starts, its conditions are decided and its offsets turned into instants; from then on the
server needs no calendar. An offset in days keeps the local time of day of the anchor in `timezone`; ``{days, at}`` is
that local time on the day so many days after the anchor's. A local time that a clock change skips falls as much later
as the clock jumped, one that comes twice counts the first time.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from typing import Any, Final, Literal, NamedTuple
from zoneinfo import ZoneInfo

from accumulator.errors import InvalidInput, InvalidLadder, InvalidPolicy
from accumulator.policy import Policy, parse_duration, shown

ESCALATE: Final = "escalate"
"""Name of the step that ends a ladder whose steps brought nothing."""
MAX_STEPS: Final = 100
MAX_KINDS: Final = 100
MAX_DEFINITION: Final = 64 << 10
MAX_ARGS: Final = 16 << 10

_TAKEN: Final = ("cancelled", ESCALATE, "exhausted")
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_MS: Final = timedelta(milliseconds=1)
_DAY_MS: Final = 86_400_000
_NAME: Final = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_TIME: Final = re.compile(r"([01]\d|2[0-3]):([0-5]\d)")
_OPTIONS: Final = frozenset(
    {"anchor", "timezone", "steps", "cancel_on", "final_wait", "escalate", "skip_to_escalate", "past"}
)
_STEP: Final = frozenset({"name", "offset", "when", "stale_after"})


class Condition(NamedTuple):
    """``{arg, op, value}``: whether the argument `arg` stands so to `value`. One that is missing never does; one of
    another type is not equal, nor above or below."""

    arg: str
    op: Literal["eq", "ne", "gt", "ge", "lt", "le", "in"]
    value: Any

    def __str__(self) -> str:
        return f"{self.arg} {self.op} {json.dumps(self.value, ensure_ascii=False)}"

    def holds(self, args: Mapping[str, Any]) -> bool:
        """Whether it holds of these arguments."""
        if self.arg not in args:
            return False
        given = args[self.arg]
        if self.op == "eq":
            return _equal(given, self.value)
        if self.op == "ne":
            return not _equal(given, self.value)
        if self.op == "in":
            return any(_equal(given, value) for value in self.value)
        number = isinstance(given, int | float) and isinstance(self.value, int | float)
        text = isinstance(given, str) and isinstance(self.value, str)
        if isinstance(given, bool) or isinstance(self.value, bool) or not (number or text):
            return False
        return bool(
            {
                "gt": given > self.value,
                "ge": given >= self.value,
                "lt": given < self.value,
                "le": given <= self.value,
            }[self.op]
        )


def _equal(given: object, value: object) -> bool:
    """Equal as JSON has it: true is not 1."""
    return given == value and isinstance(given, bool) == isinstance(value, bool)


class Offset(NamedTuple):
    """From the anchor: `ms`, or `days` in local time, at the time of day `at` where one is given."""

    ms: int | None
    days: int
    at: str | None


class Step(NamedTuple):
    """A step as the configuration has it; `stale_after` in ms; `attributes` are free."""

    name: str
    offset: Offset
    when: Condition | None
    stale_after: int | None
    attributes: dict[str, Any]


class Scheduled(NamedTuple):
    """A step at its instant (ms)."""

    name: str
    at: int
    stale_after: int | None


class Schedule(NamedTuple):
    """The steps whose conditions hold, in order, and the instant (ms) after the final wait. `now`: escalated at
    once."""

    steps: tuple[Scheduled, ...]
    ends: int
    now: bool


class Ladder(NamedTuple):
    """A ladder as the configuration has it. `anchor`: ``given`` at the start, or the ``start`` itself."""

    name: str
    anchor: Literal["given", "start"]
    timezone: str
    steps: tuple[Step, ...]
    cancel_on: tuple[str, ...]
    final_wait: Offset
    escalate: dict[str, Any] | None
    """Free attributes of the step after the final wait; None: there is none."""
    skip_to_escalate: Condition | None
    past: Literal["send", "skip"]
    options: str
    """The same as canonical JSON, as it was written: equal content, equal text."""

    @property
    def escalates(self) -> bool:
        return self.escalate is not None

    @classmethod
    def load(cls, name: str, options: object) -> Ladder:
        """Checks a ladder. Raises InvalidLadder: `flow` names the ladder, `field` the option or step."""
        return _Reader(name).ladder(options)

    @classmethod
    def from_json(cls, name: str, text: str) -> Ladder:
        """The ladder of a stored definition."""
        return cls.load(name, json.loads(text))

    def schedule(self, anchor_ms: int, args: Mapping[str, Any]) -> Schedule:
        """When its steps are, for an anchor and arguments."""
        if self.skip_to_escalate is not None and self.skip_to_escalate.holds(args):
            return Schedule((), anchor_ms, True)
        found: list[Scheduled] = []
        at = 0
        for step in self.steps:
            if step.when is None or step.when.holds(args):
                at = max(at, self._instant(anchor_ms, step.offset))
                found.append(Scheduled(step.name, at, step.stale_after))
        return Schedule(tuple(found), self._instant(found[-1].at if found else anchor_ms, self.final_wait), False)

    def left_out(self, args: Mapping[str, Any]) -> dict[str, str]:
        """Name → why, of the steps that :meth:`schedule` leaves out for these arguments."""
        if self.skip_to_escalate is not None and self.skip_to_escalate.holds(args):
            return dict.fromkeys((step.name for step in self.steps), f"skip_to_escalate holds: {self.skip_to_escalate}")
        return {
            step.name: f"when does not hold: {step.when}"
            for step in self.steps
            if step.when is not None and not step.when.holds(args)
        }

    def attributes(self, step: str) -> dict[str, Any]:
        """A step's free attributes."""
        if step == ESCALATE:
            return dict(self.escalate or {})
        return next((dict(s.attributes) for s in self.steps if s.name == step), {})

    def _instant(self, anchor_ms: int, offset: Offset) -> int:
        if offset.ms is not None:
            return anchor_ms + offset.ms
        if offset.days == 0 and offset.at is None:
            return anchor_ms  # also where its local time comes twice and this is the second
        zone = ZoneInfo(self.timezone)
        local = (_EPOCH + timedelta(milliseconds=anchor_ms)).astimezone(zone).replace(tzinfo=None)
        local += timedelta(days=offset.days)
        if offset.at is not None:
            hour, minute = offset.at.split(":")
            local = local.replace(hour=int(hour), minute=int(minute), second=0, microsecond=0)
        # fold=0: the first of two; of a time that is skipped, the offset before the change, so later by the jump.
        return (local.replace(tzinfo=zone, fold=0) - _EPOCH) // _MS


class _Reader:
    """Reads a ladder's options, one method for each shape."""

    def __init__(self, name: object) -> None:
        self.given = name
        self.name = name if isinstance(name, str) else shown(name)

    def wrong(self, field: str, rule: str) -> InvalidLadder:
        return InvalidLadder(self.name, field, rule)

    def ladder(self, options: object) -> Ladder:
        if not isinstance(self.given, str) or not _NAME.fullmatch(self.name):
            raise self.wrong("name", "must be 1 to 64 of A-Z, a-z, 0-9, _, . and -")
        given = self.mapping("options", options)
        odd = sorted(set(given) - _OPTIONS)
        if odd:
            raise self.wrong(shown(odd[0]), "is unknown")
        text = self.text_of(given)
        anchor = self.choice(given, "anchor", ("given", "start"))
        past = self.choice(given, "past", ("send", "skip"))
        timezone = given.get("timezone", "UTC")
        try:
            Policy.load("ladder", {"inactivity": None, "timezone": timezone})
        except InvalidPolicy as problem:
            raise self.wrong("timezone", problem.rule) from None
        raw = given.get("steps")
        if not isinstance(raw, list) or not 1 <= len(raw) <= MAX_STEPS:
            raise self.wrong("steps", f"must list 1 to {MAX_STEPS} steps")
        steps = tuple(self.step(index, step) for index, step in enumerate(raw))
        names = [step.name for step in steps]
        if len(set(names)) < len(names):
            raise self.wrong("steps", "two of them have one name")
        for before, after in pairwise(steps):
            if _rough(after.offset) < _rough(before.offset):
                raise self.wrong(after.name, f"comes before {before.name}: steps must be in the order of their offsets")
        escalate = given.get("escalate", False)
        if not isinstance(escalate, bool):
            escalate = dict(self.mapping("escalate", escalate))
        skip = self.condition("skip_to_escalate", given.get("skip_to_escalate"))
        if skip is not None and escalate is False:
            raise self.wrong("skip_to_escalate", "needs escalate")
        final = self.offset("final_wait", given.get("final_wait", "0s"))
        if final.at is not None or (final.ms or 0) < 0 or final.days < 0:
            raise self.wrong("final_wait", "must be a duration, not below zero")
        ending = None if escalate is False else {} if escalate is True else escalate
        return Ladder(self.name, anchor, timezone, steps, self.kinds(given), final, ending, skip, past, text)

    def text_of(self, given: Mapping[str, Any]) -> str:
        try:
            text = json.dumps(given, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
        except (TypeError, ValueError):
            raise self.wrong("options", "must be plain data, as JSON has it") from None
        try:
            size = len(text.encode())
        except UnicodeEncodeError:
            raise self.wrong("options", "must not contain a lone surrogate") from None
        if size > MAX_DEFINITION:
            raise self.wrong("options", f"must be at most {MAX_DEFINITION} bytes")
        return text

    def mapping(self, field: str, value: object) -> Mapping[str, Any]:
        if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
            raise self.wrong(field, f"must be a mapping, not {shown(value)}")
        return value

    def choice(self, given: Mapping[str, Any], field: str, allowed: tuple[str, str]) -> Any:
        value = given.get(field, allowed[0])
        if value not in allowed:
            raise self.wrong(field, f"must be {allowed[0]} or {allowed[1]}, not {shown(value)}")
        return value

    def kinds(self, given: Mapping[str, Any]) -> tuple[str, ...]:
        kinds = given.get("cancel_on", [])
        if not isinstance(kinds, list) or len(kinds) > MAX_KINDS:
            raise self.wrong("cancel_on", f"must list up to {MAX_KINDS} kinds")
        for kind in kinds:
            if not isinstance(kind, str) or not 1 <= len(kind.encode(errors="replace")) <= 128:
                raise self.wrong("cancel_on", f"{shown(kind)} is no kind: 1 to 128 bytes of text")
        return tuple(sorted(set(kinds)))

    def step(self, index: int, value: object) -> Step:
        given = self.mapping(f"steps[{index}]", value)
        name = given.get("name")
        if not isinstance(name, str) or not _NAME.fullmatch(name) or name in _TAKEN:
            rule = f"name must be 1 to 64 of A-Z, a-z, 0-9, _, . and -, and none of {', '.join(_TAKEN)}"
            raise self.wrong(f"steps[{index}]", rule)
        if "offset" not in given:
            raise self.wrong(name, "offset is required")
        stale = given.get("stale_after")
        return Step(
            name,
            self.offset(name, given["offset"]),
            self.condition(name, given.get("when")),
            None if stale is None else self.duration(name, stale, "stale_after: "),
            {key: item for key, item in given.items() if key not in _STEP},
        )

    def duration(self, field: str, value: object, of: str = "") -> int:
        try:
            return parse_duration(value)
        except InvalidInput as problem:
            raise self.wrong(field, of + problem.rule) from None

    def offset(self, field: str, value: object) -> Offset:
        if isinstance(value, Mapping):
            days, at = value.get("days"), value.get("at")
            if set(value) != {"days", "at"} or type(days) is not int or not -3650 <= days <= 3650:
                raise self.wrong(field, 'offset must be a duration, or {days: whole number, at: "HH:MM"}')
            if not isinstance(at, str) or not _TIME.fullmatch(at):
                raise self.wrong(field, f'at must be a time of day as in "09:00", not {shown(at)}')
            return Offset(None, days, at)
        negative = isinstance(value, str) and value.startswith("-")
        of = "" if field == "final_wait" else "offset: "
        ms = self.duration(field, value[1:] if isinstance(value, str) and negative else value, of)
        sign = -1 if negative else 1
        if isinstance(value, str) and value.endswith("d"):
            return Offset(None, sign * (ms // _DAY_MS), None)
        return Offset(sign * ms, 0, None)

    def condition(self, field: str, value: object) -> Condition | None:
        if value is None:
            return None
        given = self.mapping(field, value)
        if set(given) != {"arg", "op", "value"}:
            raise self.wrong(field, "a condition is {arg, op, value}")
        if not isinstance(given["arg"], str) or not given["arg"]:
            raise self.wrong(field, "arg must name an argument")
        if given["op"] not in ("eq", "ne", "gt", "ge", "lt", "le", "in"):
            raise self.wrong(field, f"op must be eq, ne, gt, ge, lt, le or in, not {shown(given['op'])}")
        if given["op"] == "in" and not isinstance(given["value"], list):
            raise self.wrong(field, "value must be a list for in")
        if given["op"] in ("gt", "ge", "lt", "le") and type(given["value"]) not in (int, float, str):
            raise self.wrong(field, f"value must be a number or a text for {given['op']}")
        return Condition(given["arg"], given["op"], given["value"])


def _rough(offset: Offset) -> int:
    """ms after the anchor, to a day: what can be said of the order of two offsets before there is an anchor."""
    return offset.ms if offset.ms is not None else offset.days * _DAY_MS
