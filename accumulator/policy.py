"""The rules of a flow: reading, checking, and the plain text the scripts obey.

Everything a person may write stands in :class:`Policy`, one field an option, with its default and meaning.
Durations are written as text (``250ms``, ``10s``, ``5m``, ``2h``, ``3d``) and kept as integer milliseconds.
"""

from __future__ import annotations

import contextlib
import difflib
import json
import re
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime, timedelta
from functools import lru_cache
from typing import Annotated, Any, Final, Literal, Self
from zoneinfo import ZoneInfo

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from accumulator.errors import InvalidInput, InvalidPolicy

__all__ = [
    "DEFAULT_FLOW",
    "MAX_DURATION_MS",
    "OPTIONS",
    "Policy",
    "format_duration",
    "parse_duration",
]

DEFAULT_FLOW: Final = "default"
"""The flow whose policy serves every flow that has none of its own."""
HANDLED_SINKS: Final = frozenset({"rq", "direct"})
"""Sinks that need a handler."""

DAY_MS: Final = 86_400_000
MAX_DURATION_MS: Final = 3650 * DAY_MS
MAX_KINDS: Final = 1000
MAX_KIND_BYTES: Final = 128
MAX_FLOW_BYTES: Final = 128
MAX_CUTOFFS: Final = 48
# The largest integer a Lua number holds exactly.
MAX_EXACT: Final = 2**53 - 1
KIB: Final = 1024
MIB: Final = 1024 * KIB

_UNITS: Final = {"ms": 1, "s": 1000, "m": 60_000, "h": 3_600_000, "d": DAY_MS}
_DURATION: Final = re.compile(r"(-?)([0-9]{1,18})(ms|s|m|h|d)")
_TIME_OF_DAY: Final = re.compile(r"(?:[01][0-9]|2[0-3]):[0-5][0-9]")
_ZONE: Final = re.compile(r"[A-Za-z0-9_+-]+(?:/[A-Za-z0-9_+-]+)*")
_UNNAMED: Final = "(unnamed)"
_CONTROL: Final = re.compile(r"[\x00-\x1f\x7f-\x9f]")


# Words for messages


def shown(value: object) -> str:
    """What a message says of a wrong value: short, on one line, never the inside of a container."""
    if isinstance(value, str):
        return repr(value if len(value) <= 40 else value[:40] + "…")
    if isinstance(value, bool):
        return "true" if value else "false"
    if value is None:
        return "null"
    if isinstance(value, int):
        return str(value) if value.bit_length() <= 64 else "a very large number"
    if isinstance(value, float):
        return repr(value)
    if isinstance(value, Mapping):
        return "a mapping"
    if isinstance(value, list | tuple):
        return "a list"
    return f"a {type(value).__name__}"


def broken(rule: str, field: str = "") -> InvalidInput:
    """What a validator raises; `field` where it sees more than one."""
    return InvalidInput(field, rule)


def first_problem(error: ValidationError, fields: Iterable[str]) -> tuple[str, str]:
    """(field, rule) of what to mend first; with the refused value only where a validator of ours shows it."""
    problems = error.errors(include_url=False, include_input=False)
    # A misspelt name before the field that is missing because of it.
    problem = next((p for p in problems if p["type"] == "extra_forbidden"), problems[0])
    context = problem.get("ctx", {})
    field = str(problem["loc"][0]) if problem["loc"] else ""
    match problem["type"]:
        case "value_error" if isinstance(context["error"], InvalidInput):
            return field or context["error"].field, context["error"].rule
        case "extra_forbidden":
            close = difflib.get_close_matches(field[:40], fields, n=1)
            hint = f"; did you mean {close[0]}?" if close else ""
            return field if len(field) <= 40 else f"{field[:40]}…", f"is unknown{hint}"
        case "missing":
            return field, "is required"
        case "literal_error":
            return field, f"must be {context['expected']}"
        case "bool_type" | "bool_parsing":
            return field, "must be true or false"
        case "string_type":
            return field, "must be text"
        case _:
            return field, problem["msg"]


def flow_problem(flow: object) -> str | None:
    """Why `flow` can't be a flow's name as it stands in a bucket key, or None."""
    if not isinstance(flow, str):
        return f"must be text: put quotes around {shown(flow)}"
    size = _utf8_size(flow)
    if size is None or not 1 <= size <= MAX_FLOW_BYTES:
        return f"must be 1 to {MAX_FLOW_BYTES} bytes of UTF-8"
    if ":" in flow or _CONTROL.search(flow):
        return "must stand as in a bucket key, with ':' and control characters percent-encoded (%3A)"
    return None


def _utf8_size(text: str) -> int | None:
    try:
        return len(text.encode())
    except UnicodeEncodeError:  # a lone surrogate
        return None


# Durations


def parse_duration(value: object) -> int:
    """Milliseconds of a text such as ``250ms``, ``10s``, ``5m``, ``2h`` or ``3d``; from 0 to 3650 days.

    Raises InvalidInput (field ``duration``) for anything else: another unit, a sign, a space, a bare number.
    """
    if isinstance(value, int | float) and not isinstance(value, bool):
        raise InvalidInput("duration", f"{shown(value)} is a bare number: write it with its unit, as in 10s")
    found = _DURATION.fullmatch(value) if isinstance(value, str) else None
    if found is None:
        rule = f"must be a whole number and a unit (ms, s, m, h, d), as in 10s, not {shown(value)}"
        raise InvalidInput("duration", rule)
    sign, digits, unit = found.groups()
    if sign:
        raise InvalidInput("duration", f"must not be negative, and is {shown(value)}")
    ms = int(digits) * _UNITS[unit]
    if ms > MAX_DURATION_MS:
        most = format_duration(MAX_DURATION_MS)
        raise InvalidInput("duration", f"must be at most {most}, not {shown(value)}")
    return ms


def format_duration(ms: int) -> str:
    """The shortest text that :func:`parse_duration` reads back as `ms`; zero is ``0s``."""
    if ms == 0:
        return "0s"
    unit = next(name for name in reversed(_UNITS) if ms % _UNITS[name] == 0)
    return f"{ms // _UNITS[unit]}{unit}"


def duration_option(value: object, *, zero: bool = False) -> int:
    """Validator of a field that holds a duration; with `zero` also none, which needs no unit."""
    if zero and type(value) is int and value == 0:
        return 0
    ms = parse_duration(value)
    if ms > 0 or zero:
        return ms
    raise broken(f"must be above zero, not {shown(value)}")


def whole_number(value: object, low: int, high: int) -> int:
    """Validator of a field that holds an integer; booleans, floats and texts are none."""
    if type(value) is int and low <= value <= high:
        return value
    raise broken(f"must be a whole number from {low} to {high}, not {shown(value)}")


def _cap(high: int) -> BeforeValidator:
    return BeforeValidator(lambda value: whole_number(value, 1, high))


# Lists and zones


def _text_list(value: object, most: int, what: str, problem: Callable[[str], str | None]) -> tuple[str, ...]:
    """Sorted, since the order of such a list means nothing: equal content, equal policy."""
    if not isinstance(value, list | tuple):
        raise broken(f"must be a list of {what}, not {shown(value)}")
    if len(value) > most:
        raise broken(f"must list at most {most} {what}")
    for item in value:
        if not isinstance(item, str):
            raise broken(f"must list texts, not {shown(item)}: put quotes around it")
        reason = problem(item)
        if reason is not None:
            raise broken(reason)
    if len(set(value)) < len(value):
        twice = next(item for item in value if value.count(item) > 1)
        raise broken(f"lists {shown(twice)} twice")
    return tuple(sorted(value))


def _kind_problem(kind: str) -> str | None:
    size = _utf8_size(kind)
    if size is not None and 1 <= size <= MAX_KIND_BYTES:
        return None
    return f"must list kinds of 1 to {MAX_KIND_BYTES} bytes of UTF-8, not {shown(kind)}"


def _kind_list(value: object) -> tuple[str, ...]:
    return () if value is None else _text_list(value, MAX_KINDS, "kinds", _kind_problem)


def _allowed_kinds(value: object) -> tuple[str, ...]:
    kinds = _text_list(value, MAX_KINDS, "kinds", _kind_problem)
    if not kinds:
        raise broken("must list at least one kind: with none, no event would be accepted (null: any kind)")
    return kinds


def _cutoff_list(value: object) -> tuple[str, ...]:
    def problem(text: str) -> str | None:
        if _TIME_OF_DAY.fullmatch(text):
            return None
        return f'must list local times of day from "00:00" to "23:59", not {shown(text)}'

    if isinstance(value, list | tuple):
        # YAML reads 12:30 as 12 × 60 + 30.
        number = next((item for item in value if type(item) is int and 60 <= item < 1440), None)
        if number is not None:
            hour, minute = divmod(number, 60)
            read = f"YAML reads {hour}:{minute:02} without quotes as {number}"
            raise broken(f'must list texts: {read}; write "{hour:02}:{minute:02}"')
    return () if value is None else _text_list(value, MAX_CUTOFFS, "local times of day", problem)


def _zone_name(value: object) -> str:
    # `localtime` differs from host to host, `right/` counts leap seconds: not the same instants everywhere.
    host_bound = ("localtime", "posixrules", "Factory", "posix/", "right/")
    named = isinstance(value, str) and len(value) <= 64 and _ZONE.fullmatch(value)
    if isinstance(value, str) and named and not value.startswith(host_bound):
        with contextlib.suppress(KeyError, ValueError, OSError):
            return ZoneInfo(value).key
    raise broken(f"must be a zone of the IANA database, as in America/Sao_Paulo, not {shown(value)}")


# The policy

Duration = Annotated[int, BeforeValidator(duration_option)]
DurationOrZero = Annotated[int, BeforeValidator(lambda value: duration_option(value, zero=True))]
KindList = Annotated[tuple[str, ...], BeforeValidator(_kind_list)]
Late = Literal["accept", "reconcile", "reject"]


def _option(default: Any, meaning: str) -> Any:
    """An option with its default as a person would write it; validated like anything written."""
    return Field(default, description=meaning, validate_default=True)


class Policy(BaseModel):
    """The rules of one flow. ``Policy(inactivity="10s", max_events=50)``; raises InvalidPolicy.

    As read back, durations are integer milliseconds; lists are sorted tuples; ``kinds`` is None for any.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)

    inactivity: Duration | None = Field(
        description="the sliding gap: closes when no event was accepted for this long; null for no such gap"
    )
    max_age: Duration = _option("1h", "closes this long after the first accepted event")
    max_events: Annotated[int, _cap(100_000)] = _option(1000, "closes at so many entries; at most 100,000")
    max_bytes: Annotated[int, _cap(256 * MIB)] = _option(
        MIB, "closes at so many bytes, the sum of the payloads' encoded sizes; at most 256 MiB"
    )
    max_weight: Annotated[int, _cap(MAX_EXACT)] | None = _option(None, "closes at this sum of weights")
    max_event_bytes: Annotated[int, _cap(8 * MIB)] = _option(
        64 * KIB, "a larger payload is refused (`payload_too_large`); at most 8 MiB"
    )
    terminal_kinds: KindList = _option(None, "an event of such a kind closes the window, and is in it")
    starter_kinds: KindList = _option(
        None, "an event of such a kind closes the open window and is the first of the next"
    )
    terminal_grace: DurationOrZero = _option(0, "how long the window still takes stragglers after a terminal event")
    cutoffs: Annotated[tuple[str, ...], BeforeValidator(_cutoff_list)] = _option(
        None, 'local times of day, `["12:00", "17:30"]`, at which an open window closes'
    )
    timezone: Annotated[str, BeforeValidator(_zone_name)] = _option(
        "UTC", "the zone of `cutoffs`, by its IANA name; daylight saving is respected"
    )
    deadline_margin: DurationOrZero = _option(0, "closes this long before the earliest `deadline_at` in the window")
    dedupe_ttl: Duration = _option(
        "24h", "an `event_id` and its digests are remembered at least this long after it was last accepted"
    )
    on_conflict: Literal["reject", "keep_first", "accept_newer", "reconcile"] = _option(
        "reject", "same id, other content: `reject`, `keep_first`, `accept_newer` or `reconcile`"
    )
    order_by: Literal["source_version", "occurred_at"] | None = _option(
        None, "what order means in this flow, per source: `source_version` or `occurred_at`"
    )
    on_late: Late = _option("accept", "an event out of order: `accept` (flagged), `reconcile` or `reject`")
    max_delay: Duration | None = _option(None, "an event that happened longer ago than this is too old")
    on_too_old: Late = _option("accept", "the same three, for what is too old")
    max_future: DurationOrZero | None = _option(
        None, "an event further ahead of the server's clock than this goes to reconciliation"
    )
    kinds: Annotated[tuple[str, ...], BeforeValidator(_allowed_kinds)] | None = _option(
        None, "an event of an unlisted kind goes to reconciliation"
    )
    on_policy_change: Literal["split", "keep", "reconcile"] = _option(
        "split",
        "another `policy_version` than the open window's: `split` (a higher one opens the next window, a "
        "lower one goes to reconciliation), `keep` (takes either) or `reconcile` (either goes to a person)",
    )
    keep: Literal["all", "last"] = _option("all", "`last`: only the last payload is kept (a debounce)")
    ordered: Annotated[bool, Field(strict=True)] = _option(
        True, "manifests of one bucket are processed one at a time, in order"
    )
    payload_ttl: Duration = _option("3d", "how long payloads stay after the manifest settled")
    metadata_ttl: Duration = _option(
        "14d", "how long ids, digests, refs, reasons and versions stay after the manifest settled"
    )
    handover: Literal["each", "together"] = _option(
        "each", "`together`: all waiting manifests of a bucket, up to 200, go in one call, the rest in the next"
    )
    requery_kinds: KindList = _option(
        None, "a manifest with such an event may only go to a handler that loads the official state"
    )
    busy_streak_alert: Annotated[int, _cap(2**31 - 1)] = _option(
        10, "so many `continuation` windows in a row raise an alert"
    )
    sink: Literal["rq", "direct", "webhook", "none"] = _option(
        "rq", "who gets the manifests: `rq`, `direct` (the worker itself), `webhook` or `none`"
    )

    def __init__(self, /, **options: Any) -> None:
        try:
            super().__init__(**options)
            return
        except ValidationError as error:
            option, reason = first_problem(error, type(self).model_fields)
        if (option, reason) == ("inactivity", "is required"):
            reason = "is required: the gap the process itself shows, as in 10s, or null for none"
        raise InvalidPolicy(_UNNAMED, option, reason)

    @model_validator(mode="before")
    @classmethod
    def _defaults_that_follow(cls, options: dict[str, Any]) -> dict[str, Any]:
        follow: dict[str, Any] = {}
        if "on_late" in options:
            follow["on_too_old"] = options["on_late"]
        if options.get("order_by") == "occurred_at":
            follow["max_future"] = "5m"
        return follow | options

    @model_validator(mode="after")
    def _without_contradiction(self) -> Self:
        if self.inactivity is not None and self.inactivity > self.max_age:
            gap, age = format_duration(self.inactivity), format_duration(self.max_age)
            raise broken(f"must not be above max_age: {gap} against {age}", "inactivity")
        if self.payload_ttl > self.metadata_ttl:
            payload, metadata = format_duration(self.payload_ttl), format_duration(self.metadata_ttl)
            raise broken(f"must not be above metadata_ttl: {payload} against {metadata}", "payload_ttl")
        if self.kinds is not None:
            for option in ("terminal_kinds", "starter_kinds", "requery_kinds"):
                outside = [kind for kind in getattr(self, option) if kind not in self.kinds]
                if outside:
                    raise broken(f"lists {shown(outside[0])}, which kinds does not let in", option)
        return self

    @classmethod
    def load(cls, flow: str, options: object) -> Self:
        """The policy of `flow` from what a file says. Raises InvalidPolicy with flow, option and reason."""
        problem = flow_problem(flow)
        if problem is not None:
            raise InvalidPolicy(shown(flow), "flow", problem)
        if not isinstance(options, Mapping):
            raise InvalidPolicy(flow, "policy", f"must be a mapping of options, not {shown(options)}")
        odd = next((name for name in options if not isinstance(name, str)), None)
        if odd is not None:
            raise InvalidPolicy(flow, shown(odd), "is unknown")
        try:
            return cls(**options)
        except InvalidPolicy as error:
            option, reason = error.field, error.rule
        raise InvalidPolicy(flow, option, reason)

    def canonical_json(self) -> str:
        """Every option, keys sorted, durations in ms. Two policies are equal exactly if these texts are."""
        return json.dumps(self.model_dump(), sort_keys=True, separators=(",", ":"), ensure_ascii=False)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """The policy of a :meth:`canonical_json`. An option it lacks (older release) gets its default."""
        try:
            options = json.loads(text)
        except (ValueError, RecursionError):
            options = None
        if not isinstance(options, dict):
            raise InvalidPolicy(_UNNAMED, "policy", "is not the JSON text of a policy")
        for option in _DURATIONS & options.keys():
            if type(options[option]) is int:
                options[option] = f"{options[option]}ms"
        return cls(**options)

    def rules(self) -> str:
        """What the scripts read: tokens and single spaces; ``-`` is none, ``1`` and ``0`` are yes and no."""
        listed = bool(self.terminal_kinds or self.starter_kinds or self.kinds or self.requery_kinds)
        # For the fast path of accept: 0 none, 1 always, 2 where the kinds are ordinary, 3 where they are listed too.
        plain = 0
        if self.order_by is None and self.keep == "all" and not self.cutoffs:
            plain = 1 if not listed else 2 if self.kinds is None else 3
        tokens: list[int | str | None] = [
            self.inactivity,
            self.max_age,
            self.max_events,
            self.max_bytes,
            self.max_weight,
            self.max_event_bytes,
            self.max_delay,
            self.max_future,
            self.deadline_margin,
            self.terminal_grace,
            self.dedupe_ttl,
            self.busy_streak_alert,
            plain,
            _LETTER[self.on_conflict],
            self.order_by and _LETTER[self.order_by],
            _LETTER[self.on_late],
            _LETTER[self.on_too_old],
            _LETTER[self.on_policy_change],
            _LETTER[self.keep],
            self.ordered,
            self.kinds is not None,
            listed,
            bool(self.cutoffs),
            _LETTER[self.handover],
            self.sink,
            self.payload_ttl,
            self.metadata_ttl,
        ]
        return " ".join("-" if t is None else t if isinstance(t, str) else str(int(t)) for t in tokens)

    def kind_flags(self) -> dict[str, str]:
        """Each listed kind with its letters, in this order: t terminal, s starter, k `kinds`, q requery."""
        flags: dict[str, str] = {}
        lists = (self.terminal_kinds, self.starter_kinds, self.kinds or (), self.requery_kinds)
        for letter, kinds in zip("tskq", lists, strict=True):
            for kind in kinds:
                flags[kind] = flags.get(kind, "") + letter
        return flags

    def cutoff_runs(self, from_ms: int, years: int = 10) -> str:
        """The coming cut-off instants: ``start count start count …``, each pair `count` instants a day apart.

        From one to two days before `from_ms` on, for `years`; pairs by ascending start, may interleave.
        The same text for any `from_ms` of one UTC day. Empty without cutoffs.
        """
        if not self.cutoffs:
            return ""
        return _cutoff_runs(self.cutoffs, self.timezone, from_ms // DAY_MS - 1, years * 366 + 1)

    def fields(self, version: int, from_ms: int) -> dict[str, str]:
        """The fields that version `version` of this policy takes in a partition's hash of the flow."""
        fields = {str(version): self.rules(), f"{version}:json": self.canonical_json()}
        if self.cutoffs:
            fields[f"{version}:cutoffs"] = self.cutoff_runs(from_ms)
        for kind, flags in self.kind_flags().items():
            fields[f"{version}:kind:{kind}"] = flags
        return fields


_DURATIONS: Final = {
    "inactivity",
    "max_age",
    "terminal_grace",
    "deadline_margin",
    "dedupe_ttl",
    "max_delay",
    "max_future",
    "payload_ttl",
    "metadata_ttl",
}
_LETTER: Final = {
    "reject": "r",
    "keep_first": "k",
    "accept_newer": "n",
    "reconcile": "q",
    "source_version": "v",
    "occurred_at": "o",
    "accept": "a",
    "split": "s",
    "keep": "k",
    "all": "a",
    "last": "l",
    "each": "e",
    "together": "t",
}


# Cut-offs


@lru_cache(maxsize=256)
def _cutoff_runs(cutoffs: tuple[str, ...], timezone: str, first_day: int, days: int) -> str:
    """Days count from the epoch, UTC.

    A zone's offset is looked up once a day, at local midnight; each cut-off is looked up only on days between
    two different ones. `fold` 0 is the rule for odd local times: the offset before the change, so that a
    skipped one falls as much later as the clock jumped, and one that comes twice counts the first time.
    """
    epoch = datetime(1970, 1, 1, tzinfo=ZoneInfo(timezone))

    def offset(local_ms: int) -> int:
        # Adding to an aware datetime moves its wall clock.
        delta = (epoch + timedelta(milliseconds=local_ms)).utcoffset()
        return 0 if delta is None else delta // timedelta(milliseconds=1)

    # One or two local days more on either side, as local and UTC days differ by up to 14 hours.
    midnights = [day * DAY_MS for day in range(first_day - 2, first_day + days + 3)]
    offsets = [offset(midnight) for midnight in midnights]
    # First midnight, days, offset; None where it changes that day.
    stretches: list[tuple[int, int, int | None]] = []
    for midnight, before, after in zip(midnights, offsets, offsets[1:], strict=False):
        steady = before if before == after else None
        if stretches and steady is not None and stretches[-1][2] == steady:
            stretches[-1] = (stretches[-1][0], stretches[-1][1] + 1, steady)
        else:
            stretches.append((midnight, 1, steady))

    first, last = first_day * DAY_MS, (first_day + days) * DAY_MS
    found: list[tuple[int, int]] = []
    for cutoff in cutoffs:
        time_ms = (int(cutoff[:2]) * 60 + int(cutoff[3:])) * 60_000
        runs: list[tuple[int, int]] = []
        for midnight, count, steady in stretches:
            local = midnight + time_ms
            _add_run(runs, local - (offset(local) if steady is None else steady), count)
        for start, count in runs:
            skipped = max(0, -((start - first) // DAY_MS))
            start, count = start + skipped * DAY_MS, count - skipped
            count = min(count, (last - start) // DAY_MS + 1)
            if count > 0:
                found.append((start, count))
    return " ".join(f"{start} {count}" for start, count in sorted(found))


def _add_run(runs: list[tuple[int, int]], start: int, count: int) -> None:
    if runs:
        begun, length = runs[-1]
        following = begun + length * DAY_MS
        # Where a zone skipped a whole day, that day's cut-off and the next day's are one instant.
        if start == following - DAY_MS:
            start, count = following, count - 1
        if start == following:
            runs[-1] = (begun, length + count)
            return
    runs.append((start, count))


# The options as a table


def _default_text(option: str) -> str:
    said = {
        "inactivity": "required",
        "on_too_old": "as `on_late`",
        "max_future": "5m with `order_by: occurred_at`, else none",
        "kinds": "any",
    }
    default = Policy.model_fields[option].default
    if option in said:
        return said[option]
    if isinstance(default, bool):
        return "true" if default else "false"
    if isinstance(default, int) and default % KIB == 0 and default:
        return f"{default // MIB} MiB" if default % MIB == 0 else f"{default // KIB} KiB"
    return "none" if default is None else str(default)


OPTIONS: Final[dict[str, tuple[str, str]]] = {
    name: (_default_text(name), str(field.description)) for name, field in Policy.model_fields.items()
}
"""Option → (default as a person reads it, meaning), in the order of the documentation."""
