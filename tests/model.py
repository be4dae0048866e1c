"""The contract (sections 1 to 5 of SPEC.md) in plain Python, for comparison with the real scripts.

Written from that text and the description of scenarios alone, and independent of the package: where this file
and the scripts disagree, one of them misreads the contract. It is made to be read beside the text.

    simulate(scenario) -> answer        a scenario as parsed from YAML, and its answer object
    compare_expect(answer, expect)      what differs from an `expect` block, one line each
    Simulation(scenario).step(step) …   the same step by step, with buckets and windows open to the eye

Instants inside are integer milliseconds since the epoch; those of an answer count from the scenario's start.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from typing import Any
from zoneinfo import ZoneInfo

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
UNITS = {"ms": 1, "s": 1_000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}
SOURCES_KEPT = 64
ORDERS = ("source_version", "occurred_at")
CUTS = frozenset({"max_events", "max_bytes", "max_weight", "max_age"})

# Options that change nothing a scenario shows. `dedupe_ttl` is a lower bound, and no scenario reaches it.
NOT_MODELLED = frozenset(
    {
        "dedupe_ttl",
        "ordered",
        "payload_ttl",
        "metadata_ttl",
        "handover",
        "requery_kinds",
        "busy_streak_alert",
        "sink",
    }
)

Outcome = dict[str, Any]


class Unreadable(ValueError):
    """The scenario can't be run; the message names the step."""


# What is written in a scenario ------------------------------------------------------------------


def duration(text: object) -> int:
    """`"250ms"`, `"-3s"` … in milliseconds."""
    found = re.fullmatch(r"(-?\d+)(ms|s|m|h|d)", text) if isinstance(text, str) else None
    if found is None:
        raise Unreadable(f"{text!r} is no duration")
    return int(found[1]) * UNITS[found[2]]


def instant(value: object) -> int:
    """An aware datetime, or RFC 3339 text with an offset, cut to the millisecond."""
    moment = datetime.fromisoformat(value) if isinstance(value, str) else value
    if not isinstance(moment, datetime) or moment.tzinfo is None:
        raise Unreadable(f"{value!r} is no instant with an offset")
    return (moment - EPOCH) // timedelta(milliseconds=1)


def first_cutoff_after(opened_at: int, cutoffs: Sequence[time], zone: ZoneInfo) -> int:
    """The first cut-off strictly after an instant.

    A local time that a clock change skips is read with the offset from before the change, so it falls as
    much later as the clock jumped; one that comes twice counts the first time. Both are what fold=0 means.
    """

    def at(day: date, local: time) -> int:
        return instant(datetime.combine(day, local, tzinfo=zone))

    today = (EPOCH + timedelta(milliseconds=opened_at)).astimezone(zone).date()
    days = [today + timedelta(days=n) for n in range(-2, 4)]
    return min(at(day, local) for day in days for local in cutoffs if at(day, local) > opened_at)


@dataclass(frozen=True)
class Policy:
    """Section 3, the options that decide what a scenario shows."""

    inactivity: int | None
    max_age: int
    max_events: int
    max_bytes: int
    max_weight: int | None
    max_event_bytes: int
    terminal_kinds: frozenset[str]
    starter_kinds: frozenset[str]
    terminal_grace: int
    cutoffs: tuple[time, ...]
    zone: ZoneInfo
    deadline_margin: int
    on_conflict: str
    order_by: str | None
    on_late: str
    max_delay: int | None
    on_too_old: str
    max_future: int | None
    kinds: frozenset[str] | None
    on_policy_change: str
    keep: str

    @classmethod
    def parse(cls, options: Mapping[str, Any]) -> Policy:
        left = dict(options)

        def optional_duration(name: str, default: str | None = None) -> int | None:
            value = left.pop(name, default)
            return None if value is None else duration(value)

        if "inactivity" not in left:
            raise Unreadable("a policy without inactivity")
        inactivity = optional_duration("inactivity")
        order_by = left.pop("order_by", None)
        on_late = left.pop("on_late", "accept")
        kinds = left.pop("kinds", None)
        policy = cls(
            inactivity=inactivity,
            max_age=duration(left.pop("max_age", "1h")),
            max_events=left.pop("max_events", 1_000),
            max_bytes=left.pop("max_bytes", 1024 * 1024),
            max_weight=left.pop("max_weight", None),
            max_event_bytes=left.pop("max_event_bytes", 64 * 1024),
            terminal_kinds=frozenset(left.pop("terminal_kinds", None) or ()),
            starter_kinds=frozenset(left.pop("starter_kinds", None) or ()),
            terminal_grace=duration(left.pop("terminal_grace", "0s")),
            cutoffs=tuple(time.fromisoformat(local) for local in left.pop("cutoffs", None) or ()),
            zone=ZoneInfo(left.pop("timezone", "UTC")),
            deadline_margin=duration(left.pop("deadline_margin", "0s")),
            on_conflict=left.pop("on_conflict", "reject"),
            order_by=order_by,
            on_late=on_late,
            max_delay=optional_duration("max_delay"),
            on_too_old=left.pop("on_too_old", None) or on_late,
            max_future=optional_duration("max_future", "5m" if order_by == "occurred_at" else None),
            kinds=None if kinds is None else frozenset(kinds),
            on_policy_change=left.pop("on_policy_change", "split"),
            keep=left.pop("keep", "all"),
        )
        unknown = set(left) - NOT_MODELLED
        if unknown:
            raise Unreadable(f"unknown options {sorted(unknown)}")
        return policy


def canonical(value: object) -> object:
    """A JSON value with its numbers as RFC 8785 tells them apart: 1.0 is 1, -0.0 is 0."""
    if isinstance(value, float) and value.is_integer() and abs(value) < 1e21:
        return int(Decimal(repr(value)))  # the shortest digits, padded with zeros, as JavaScript writes them
    if isinstance(value, dict):
        return {key: canonical(item) for key, item in value.items()}
    if isinstance(value, list):
        return [canonical(item) for item in value]
    return value


@dataclass(frozen=True)
class Event:
    """Section 2. `content` stands for the digest: two events have the same content where it is equal."""

    event_id: str
    bucket_key: str
    kind: str
    occurred_at: int
    source: str
    source_version: int | None
    policy_version: int
    deadline_at: int | None
    weight: int
    size: int
    content: str

    @classmethod
    def parse(cls, fields: Mapping[str, Any], start: int, now: int) -> Event:
        """An event as a scenario writes it, pushed at `now`."""
        left = dict(fields)

        def moment(name: str, offset: str) -> int | None:
            value, shift = left.pop(name, None), left.pop(offset, None)
            if value is not None and shift is not None:
                raise Unreadable(f"both {name} and {offset}")
            if shift is not None:
                return start + duration(shift)
            return None if value is None else instant(value)

        occurred = moment("occurred_at", "occurred")
        if occurred is None:
            occurred = now
        deadline = moment("deadline_at", "deadline")
        payload: tuple[str, object] = ("none", None)
        size = 0
        if "payload" in left and "payload_bytes" in left:
            raise Unreadable("both payload and payload_bytes")
        if "payload" in left:
            value = left.pop("payload")
            payload = ("json", canonical(value))
            size = len(json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode())
        elif "payload_bytes" in left:
            size = left.pop("payload_bytes")
            payload = ("bytes", size)

        event_id, bucket_key = left.pop("event_id"), left.pop("bucket_key")
        kind, source = left.pop("kind", "event"), left.pop("source", "sim")
        source_version, policy_version = left.pop("source_version", None), left.pop("policy_version", 0)
        weight, ref = left.pop("weight", 1), left.pop("ref", None)
        content_key = left.pop("content_key", None)
        left.pop("trace", None)
        left.pop("received_at", None)
        if left:
            raise Unreadable(f"unknown fields {sorted(left)}")
        content: object = {"content_key": content_key}
        if content_key is None:
            content = [kind, occurred, source, source_version, policy_version, deadline, weight, ref, payload]
        return cls(
            event_id=event_id,
            bucket_key=bucket_key,
            kind=kind,
            occurred_at=occurred,
            source=source,
            source_version=source_version,
            policy_version=policy_version,
            deadline_at=deadline,
            weight=weight,
            size=size,
            content=json.dumps(content, sort_keys=True),
        )

    @property
    def flow(self) -> str:
        return self.bucket_key.split(":")[1]

    def order_value(self, order_by: str | None) -> int | None:
        """What order means in the flow; None where the event has no such value."""
        if order_by == "occurred_at":
            return self.occurred_at
        return self.source_version if order_by == "source_version" else None


# Windows and buckets ----------------------------------------------------------------------------


@dataclass
class Entry:
    """One accepted version of an event, in a window."""

    event: Event
    late: bool
    revision: bool


@dataclass
class Window:
    bucket_key: str
    version: int
    policy: Policy
    policy_version: int
    opened_at: int
    relation: str
    last_at: int
    cutoff_at: int | None
    entries: list[Entry] = field(default_factory=list)
    kept: Event | None = None  # with keep: last, the event whose payload is kept
    retracted: list[str] = field(default_factory=list)
    policy_versions: set[int] = field(default_factory=set)
    highest: dict[str, int] = field(default_factory=dict)  # per source, under the policy's order_by
    earliest_deadline: int | None = None
    terminal_at: int | None = None
    held_until: int | None = None
    duplicates: int = 0
    # Set when it closes.
    close_reason: str | None = None
    closed_at: int | None = None
    sealed_at: int | None = None
    partial: bool = False

    # What it holds; retracted entries are gone from all of it.

    @property
    def event_ids(self) -> list[str]:
        return list(dict.fromkeys(entry.event.event_id for entry in self.entries))

    @property
    def late_event_ids(self) -> list[str]:
        return list(dict.fromkeys(entry.event.event_id for entry in self.entries if entry.late))

    @property
    def revised_event_ids(self) -> list[str]:
        return list(dict.fromkeys(entry.event.event_id for entry in self.entries if entry.revision))

    @property
    def bytes(self) -> int:
        if self.policy.keep == "last":
            return self.kept.size if self.kept else 0
        return sum(entry.event.size for entry in self.entries)

    @property
    def weight(self) -> int:
        return sum(entry.event.weight for entry in self.entries)

    def replaces_kept(self, event: Event) -> bool:
        """With keep: last, whether the event's payload takes the place of the kept one."""
        if self.kept is None or self.kept.source != event.source:
            return True
        value, kept = event.order_value(self.policy.order_by), self.kept.order_value(self.policy.order_by)
        return value is None or kept is None or value >= kept

    def bytes_with(self, event: Event) -> int:
        """Its bytes once the event is in."""
        if self.policy.keep == "last":
            return event.size if self.replaces_kept(event) else self.bytes
        return self.bytes + event.size

    # When it falls due (step 11).

    @property
    def silence_ends(self) -> int | None:
        """Last accepted + inactivity, or the end of a hold, if later."""
        if self.policy.inactivity is None:
            return None
        return max(self.last_at + self.policy.inactivity, self.held_until or 0)

    @property
    def deadline_instant(self) -> int | None:
        if self.earliest_deadline is None:
            return None
        return self.earliest_deadline - self.policy.deadline_margin

    def limits(self) -> dict[str, int]:
        """Reason → instant, in the order that decides between limits of the same instant (section 5)."""
        limits = {
            "deadline": self.deadline_instant,
            "cutoff": self.cutoff_at,
            "max_age": self.opened_at + self.policy.max_age,
            "terminal": None if self.terminal_at is None else self.terminal_at + self.policy.terminal_grace,
            "inactivity": self.silence_ends,
        }
        return {reason: at for reason, at in limits.items() if at is not None}

    @property
    def due_at(self) -> int:
        return min(self.limits().values())

    @property
    def due_reason(self) -> str:
        return next(reason for reason, at in self.limits().items() if at == self.due_at)

    # What happens to it.

    def append(self, entry: Entry, now: int) -> None:
        event = entry.event
        if self.policy.keep == "last" and self.replaces_kept(event):
            self.kept = event
        self.entries.append(entry)
        self.last_at = now
        self.policy_versions.add(event.policy_version)
        value = event.order_value(self.policy.order_by)
        if value is not None:
            self.highest[event.source] = max(value, self.highest.get(event.source, value))
        if event.deadline_at is not None:
            self.earliest_deadline = min(event.deadline_at, self.earliest_deadline or event.deadline_at)
        if event.kind in self.policy.terminal_kinds and self.terminal_at is None:
            self.terminal_at = now

    def closes_at_once(self, event: Event, now: int) -> str | None:
        """Step 10: the reason why the event just appended closes the window, if it does."""
        policy = self.policy
        if event.kind in policy.terminal_kinds and policy.terminal_grace == 0:
            return "terminal"
        if len(self.entries) >= policy.max_events:
            return "max_events"
        if self.bytes >= policy.max_bytes:
            return "max_bytes"
        if policy.max_weight is not None and self.weight >= policy.max_weight:
            return "max_weight"
        if self.deadline_instant is not None and self.deadline_instant <= now:
            return "deadline"
        return None

    def retract(self, event_id: str) -> None:
        self.entries = [entry for entry in self.entries if entry.event.event_id != event_id]
        self.retracted.append(event_id)
        if self.kept is not None and self.kept.event_id == event_id:
            self.kept = None


@dataclass
class Known:
    """What is remembered of an event id: every version accepted or queued under it."""

    versions: list[Event] = field(default_factory=list)
    first_window: int | None = None  # of its first accepted version; None where it was only ever queued
    retracted: bool = False

    def has(self, content: str) -> bool:
        return any(version.content == content for version in self.versions)

    def is_older_than(self, event: Event, order_by: str | None) -> bool:
        """Whether the event is strictly newer than every version so far."""
        by = "occurred_at" if order_by == "occurred_at" else "source_version"
        carried = [value for version in self.versions if (value := version.order_value(by)) is not None]
        new = event.order_value(by)
        return new is not None and bool(carried) and new > max(carried)


@dataclass
class Bucket:
    bucket_key: str
    window: Window | None = None  # the open one
    closed: list[Window] = field(default_factory=list)
    known: dict[str, Known] = field(default_factory=dict)
    queued: list[tuple[Event, str]] = field(default_factory=list)
    # Over the closed windows: order_by → source → highest order value, for the first sources that had one.
    highest: dict[str, dict[str, int]] = field(default_factory=lambda: {by: {} for by in ORDERS})
    sources: list[str] = field(default_factory=list)
    untracked: int = 0  # entries of further sources, never late by order
    busy_streak: int = 0  # continuation windows in a row, the last opened included

    # Section 4 -----------------------------------------------------------------------------------

    def push(self, event: Event, now: int, latest: Policy) -> Outcome:
        """One event; `latest` is the flow's latest policy."""
        # 1. Expire.
        self.expire(now)
        policy = self.window.policy if self.window else latest

        # 2. Duplicate.
        known = self.known.get(event.event_id)
        if known and known.has(event.content):
            return self.duplicate()

        # 3. Size.
        if event.size > policy.max_event_bytes:
            return {"outcome": "rejected", "code": "payload_too_large"}

        # 4. Conflict.
        revision = revises_closed = False
        if known:
            if policy.on_conflict == "keep_first":
                return self.duplicate() | {"conflict": True}
            if policy.on_conflict == "reconcile":
                return self.queue(event, "conflict")
            if policy.on_conflict == "reject":
                return {"outcome": "conflict"}
            if known.retracted or not known.is_older_than(event, policy.order_by):
                return {"outcome": "conflict"}
            revision = True
            open_version = self.window.version if self.window else None
            revises_closed = known.first_window is not None and known.first_window != open_version

        # 5. Incompatible.
        code = self.incompatible(event, now, policy)
        if code:
            return self.queue(event, code)

        # 6. Late.
        code, action = "", ""
        if policy.max_delay is not None and now - event.occurred_at > policy.max_delay:
            code, action = "too_old", policy.on_too_old
        elif revises_closed or self.late_by_order(event, policy):
            code, action = "late", policy.on_late
        if action == "reconcile":
            return self.queue(event, code)
        if action == "reject":
            return {"outcome": "rejected", "code": code}
        late = action == "accept"

        # 7. Policy change.
        higher = self.window is not None and event.policy_version > self.window.policy_version
        if higher and policy.on_policy_change == "split":
            self.close("policy_change", now, now)

        # 8. Starter. Room.
        if self.window and event.kind in policy.starter_kinds:
            self.close("starter", now, now)
        if self.window and self.window.entries:
            if self.window.bytes_with(event) > policy.max_bytes:
                self.close("max_bytes", now, now)
            elif policy.max_weight is not None and self.window.weight + event.weight > policy.max_weight:
                self.close("max_weight", now, now)

        # 9. Append.
        if self.window is None:
            self.window = self.open(event, now, latest)
        window = self.window
        window.append(Entry(event, late, revision), now)
        self.count_source(event, window.policy)
        remembered = self.remember(event)
        if remembered.first_window is None:
            remembered.first_window = window.version
        outcome: Outcome = {
            "outcome": "revised" if revision else "accepted",
            "window_version": window.version,
            "late": late,
        }

        # 10. Close at once. 11. Timer: `Window.due_at` is computed whenever it is asked for.
        reason = window.closes_at_once(event, now)
        if reason:
            self.close(reason, now, now)
            outcome["closed"] = reason
        return outcome

    def expire(self, now: int) -> None:
        """Close the open window if it is due, as if a worker had been there in time."""
        if self.window and now >= self.window.due_at:
            self.close(self.window.due_reason, self.window.due_at, now)

    def duplicate(self) -> Outcome:
        if self.window:
            self.window.duplicates += 1
        return {"outcome": "duplicate"}

    def queue(self, event: Event, code: str) -> Outcome:
        self.queued.append((event, code))
        self.remember(event)
        return {"outcome": "reconciled", "code": code}

    def remember(self, event: Event) -> Known:
        known = self.known.setdefault(event.event_id, Known())
        known.versions.append(event)
        return known

    def incompatible(self, event: Event, now: int, policy: Policy) -> str:
        """The first code of step 5 that applies, or nothing."""
        if policy.kinds is not None and event.kind not in policy.kinds:
            return "unknown_kind"
        if policy.max_future is not None and event.occurred_at > now + policy.max_future:
            return "occurred_in_future"
        if self.window:
            if event.policy_version < self.window.policy_version and policy.on_policy_change != "keep":
                return "stale_policy_version"
            if event.policy_version > self.window.policy_version and policy.on_policy_change == "reconcile":
                return "policy_changed"
        return ""

    def late_by_order(self, event: Event, policy: Policy) -> bool:
        value = event.order_value(policy.order_by)
        if value is None or policy.order_by is None:
            return False
        highest = self.highest[policy.order_by].get(event.source)
        return highest is not None and value < highest

    def count_source(self, event: Event, policy: Policy) -> None:
        if event.order_value(policy.order_by) is None or event.source in self.sources:
            return
        if len(self.sources) < SOURCES_KEPT:
            self.sources.append(event.source)
        else:
            self.untracked += 1

    def open(self, event: Event, now: int, latest: Policy) -> Window:
        previous = self.closed[-1] if self.closed else None
        relation = self.relation_to(previous, now)
        self.busy_streak = self.busy_streak + 1 if relation == "continuation" else 0
        return Window(
            bucket_key=self.bucket_key,
            version=previous.version + 1 if previous else 1,
            policy=latest,
            policy_version=event.policy_version,
            opened_at=now,
            relation=relation,
            last_at=now,
            cutoff_at=first_cutoff_after(now, latest.cutoffs, latest.zone) if latest.cutoffs else None,
        )

    # Section 5 -----------------------------------------------------------------------------------

    def relation_to(self, previous: Window | None, now: int) -> str:
        if previous is None:
            return "first"
        if previous.close_reason == "policy_change":
            return "policy_change"
        cut = previous.close_reason in CUTS or previous.partial
        silence_ends = previous.silence_ends
        if cut and silence_ends is not None and now < silence_ends:
            return "continuation"
        return "after_close"

    def close(self, reason: str, closed_at: int, now: int) -> None:
        window = self.window
        assert window is not None
        window.close_reason, window.closed_at, window.sealed_at = reason, closed_at, now
        if window.policy.order_by is not None:
            highest = self.highest[window.policy.order_by]
            for source, value in window.highest.items():
                if source in self.sources:
                    highest[source] = max(value, highest.get(source, value))
        self.closed.append(window)
        self.window = None

    def flush(self, now: int, version: int | None, partial: bool) -> None:
        self.expire(now)
        if self.window and version in (None, self.window.version):
            self.window.partial = partial
            self.close("flush", now, now)

    def hold(self, now: int, lasts: int) -> None:
        self.expire(now)
        if self.window:
            self.window.held_until = max(now + lasts, self.window.held_until or 0)

    def retract(self, now: int, event_id: str) -> None:
        self.expire(now)
        if self.window and event_id in self.window.event_ids:
            self.window.retract(event_id)
            self.known[event_id].retracted = True


# A scenario -------------------------------------------------------------------------------------

STEPS = frozenset({"push", "flush", "hold", "retract", "policy"})


class Simulation:
    """A scenario under way: the virtual clock, the flows' latest policies, the workers and the buckets."""

    def __init__(self, scenario: Mapping[str, Any]) -> None:
        """Takes the scenario's head; its steps are given to `step`, its end to `finish`."""
        self.start = instant(scenario.get("start", "2026-01-01T00:00:00Z"))
        self.now = self.start
        given = scenario.get("policies") or {}
        self.policies = {flow: Policy.parse(options) for flow, options in given.items()}
        self.down = sorted(
            (self.start + duration(begin), self.start + duration(stop))
            for begin, stop in scenario.get("workers_down") or ()
        )
        self.buckets: dict[str, Bucket] = {}
        self.outcomes: list[Outcome] = []
        self.queued: list[dict[str, Any]] = []
        self.steps = 0

    def step(self, step: Mapping[str, Any]) -> list[Outcome]:
        """Run one step, and all that workers do before it; answers the outcomes of the events it pushed."""
        self.steps += 1
        try:
            return self._step(step)
        except (KeyError, ValueError) as problem:
            raise Unreadable(f"step {self.steps}: {problem}") from problem

    def _step(self, step: Mapping[str, Any]) -> list[Outcome]:
        now = self.start + duration(step["at"])
        if now < self.now:
            raise Unreadable("the clock went back")
        # At the very instant at which a window falls due a step comes before the worker.
        self.workers_act(before=now)
        self.now = now
        (verb,) = set(step) - {"at"}
        if verb not in STEPS:
            raise Unreadable(f"unknown step {verb!r}")
        given = step[verb]
        if verb == "push":
            return [self.push(fields) for fields in (given if isinstance(given, list) else [given])]
        if verb == "policy":
            self.policies |= {flow: Policy.parse(options) for flow, options in given.items()}
            return []
        bucket = self.bucket(given["bucket_key"])
        if verb == "flush":
            bucket.flush(now, given.get("window_version"), bool(given.get("partial", False)))
        elif verb == "hold":
            bucket.hold(now, duration(given["for"]))
        else:
            bucket.retract(now, given["event_id"])
        return []

    def push(self, fields: Mapping[str, Any]) -> Outcome:
        event = Event.parse(fields, self.start, self.now)
        latest = self.policies.get(event.flow) or self.policies.get("default")
        if latest is None:
            raise Unreadable(f"no policy for the flow {event.flow!r}, and no default")
        bucket = self.bucket(event.bucket_key)
        outcome = bucket.push(event, self.now, latest)
        if outcome["outcome"] == "reconciled":
            self.queued.append({"event_id": event.event_id, "bucket_key": event.bucket_key, "code": outcome["code"]})
        self.outcomes.append(outcome)
        return outcome

    def bucket(self, bucket_key: str) -> Bucket:
        return self.buckets.setdefault(bucket_key, Bucket(bucket_key))

    def worker_comes(self, due_at: int) -> int:
        """The first instant from `due_at` on at which a worker is up."""
        for begin, stop in self.down:
            if begin <= due_at < stop:
                due_at = stop
        return due_at

    def workers_act(self, before: int) -> None:
        for bucket in self.buckets.values():
            if bucket.window and (comes := self.worker_comes(bucket.window.due_at)) < before:
                bucket.expire(comes)

    def finish(self, end: int) -> dict[str, Any]:
        """Let the clock run on to `end` (inclusive), and give the answer."""
        if end < self.now:
            raise Unreadable("the end lies before the last step")
        self.workers_act(before=end + 1)
        self.now = end
        return self.answer()

    def answer(self) -> dict[str, Any]:
        windows = [window for bucket in self.buckets.values() for window in bucket.closed]
        manifests = sorted(
            (self.manifest(window) for window in windows),
            key=lambda m: (m["sealed_at"], m["closed_at"], m["bucket_key"], m["window_version"]),
        )
        still_open = [bucket.window for _, bucket in sorted(self.buckets.items()) if bucket.window]
        names = [outcome["outcome"] for outcome in self.outcomes]
        return {
            "outcomes": list(self.outcomes),
            "manifests": manifests,
            "reconciliation": list(self.queued),
            "open": [
                {
                    "bucket_key": window.bucket_key,
                    "window_version": window.version,
                    "event_ids": window.event_ids,
                    "due_at": window.due_at - self.start,
                }
                for window in still_open
            ],
            "counters": {
                "received": len(names),
                "accepted": names.count("accepted") + names.count("revised"),
                "duplicates": names.count("duplicate"),
                "closed": len(manifests),
            },
        }

    def manifest(self, window: Window) -> dict[str, Any]:
        assert window.closed_at is not None
        assert window.sealed_at is not None
        return {
            "bucket_key": window.bucket_key,
            "window_version": window.version,
            "close_reason": window.close_reason,
            "opened_at": window.opened_at - self.start,
            "first_event_at": window.opened_at - self.start,
            "last_event_at": window.last_at - self.start,
            "closed_at": window.closed_at - self.start,
            "sealed_at": window.sealed_at - self.start,
            "event_ids": window.event_ids,
            "event_count": len(window.event_ids),
            "bytes": window.bytes,
            "weight": window.weight,
            "policy_version": window.policy_version,
            "policy_versions": sorted(window.policy_versions),
            "late_event_ids": window.late_event_ids,
            "revised_event_ids": window.revised_event_ids,
            "retracted_event_ids": window.retracted,
            "relation": window.relation,
        }


def simulate(scenario: Mapping[str, Any]) -> dict[str, Any]:
    """The answer object of a scenario as parsed from YAML; its `expect` is not looked at.

    Without an `end` the clock stops at the last step. Raises `Unreadable`, naming the step.
    """
    simulation = Simulation(scenario)
    for step in scenario.get("steps") or ():
        simulation.step(step)
    end = scenario.get("end")
    return simulation.finish(simulation.now if end is None else simulation.start + duration(end))


def compare_expect(answer: Mapping[str, Any], expect: Mapping[str, Any]) -> list[str]:
    """What of an answer differs from an `expect` block, one line each; empty where nothing does.

    Lists have the same number of entries in the same order; of each entry, and of the counters, just the
    named fields are compared. A field expected as null may be absent.
    """
    differences: list[str] = []

    def compare(place: str, got: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
        differences.extend(
            f"{place}: {name} is {got.get(name)!r}, expected {value!r}"
            for name, value in wanted.items()
            if got.get(name) != value
        )

    for part, wanted in expect.items():
        got = answer.get(part)
        if got is None:
            differences.append(f"{part}: the answer has no such part")
        elif isinstance(wanted, Mapping):
            compare(part, got, wanted)
        else:
            if len(got) != len(wanted):
                differences.append(f"{part}: {len(got)} entries, expected {len(wanted)}")
            for index, (entry, named) in enumerate(zip(got, wanted, strict=False)):
                compare(f"{part}[{index}]", entry, named)
    return differences
