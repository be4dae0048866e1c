"""Random histories: the real scripts against the model of the contract.

    history(seed) -> scenario     deterministic, valid, made to collide
    python -m tests.histories --seeds 1000 [--start N]

The second runs the histories through the package's simulator and through the model. Where the answers differ
it prints the seed and the difference, shrinks the history as long as they do, prints it as YAML, and exits 1.

A history is made with the model running along, so that its instants can lie at, just before and just after
what falls due, and its payloads and weights at the edge of the caps.
"""

from __future__ import annotations

import argparse
import copy
import importlib
import itertools
import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, date, datetime, time, timedelta, timezone
from typing import Any
from zoneinfo import ZoneInfo

import yaml

from tests.model import (
    EPOCH,
    UNITS,
    Bucket,
    Policy,
    Simulation,
    Unreadable,
    first_cutoff_after,
    instant,
    simulate,
)

Fields = dict[str, Any]

HOUR = UNITS["h"]
LONGEST = 20 * HOUR  # within every dedupe_ttl that is used here: what may be forgotten is not specified
LONGEST_WITH_CUTOFFS = 96 * HOUR

KINDS = ["event", "msg", "novo", "fim", "pago", "pago 2"]
VERSIONS = [0, 9, 10, 99, 100, 2**53 - 1, 2**53, 2**53 + 1, 2**53 + 2, 2**63 - 2, 2**63 - 1]
# JSON values that are the same content, or look as if they were.
TWINS: list[list[Any]] = [
    [1, 1.0, True, "1"], [0, -0.0, False, ""], ["é", "e\u0301"], [[], {}], [[[], {}], [{}, []]],
    [{"a": 1, "b": 2}, {"b": 2, "a": 1}, {"a": 1.0, "b": 2}, {"a": 1, "b": 2.5}],
    [2**53, 2**53 + 1], [2**64 - 1, 2**64 - 2, -(2**63)],
]  # fmt: skip
PAYLOADS: list[Any] = [
    *(value for twins in TWINS for value in twins),
    None, None, 0.5, "🚚", 'a"\\\n\u0001', "x" * 40, list(range(20)), {"a": 1.0, "b": [None, False]},
]  # fmt: skip
ODD_IDS = ["0", "-", " x", "x ", "X", "a b c", "a\nb", "\0", "12345678901234567890", "açã-🚚", "{a}:b", "*", "i" * 256]
SOURCES = ["crm", "crm", "erp", "sim", "café", "sim 2", "1 - 1", "-"]
OBJECTS = ["1", "2", "{chave}", "coração 🚚", "7:2026-10-16", "a%3Ab"]
# Options that contradict no other; the rest of a policy goes together.
FREE_OPTIONS = [
    "max_events", "max_bytes", "max_weight", "max_event_bytes", "on_conflict", "order_by", "on_late",
    "max_delay", "keep", "on_policy_change",
]  # fmt: skip
TRACE = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
# Local cut-offs near clock changes: skipped, doubled, at midnight, by half an hour, a whole day left out.
CUTOFF_DAYS = [
    ("UTC", date(2026, 5, 5), ["00:00", "12:00", "17:30"]),
    ("America/New_York", date(2026, 3, 8), ["02:30"]),
    ("America/New_York", date(2026, 3, 8), ["03:00", "02:00", "01:59"]),
    ("America/New_York", date(2026, 11, 1), ["01:30"]),
    ("America/New_York", date(2026, 11, 1), ["01:30", "02:00", "00:45"]),
    ("Europe/Lisbon", date(2026, 3, 29), ["01:00", "01:30"]),
    ("Australia/Lord_Howe", date(2026, 10, 4), ["02:15"]),
    ("Australia/Lord_Howe", date(2026, 4, 5), ["01:45", "02:00"]),
    ("America/Sao_Paulo", date(2018, 11, 4), ["00:00", "00:30"]),
    ("Pacific/Apia", date(2011, 12, 30), ["12:00"]),
    ("Asia/Kathmandu", date(2026, 7, 1), ["09:15"]),
]


def text(ms: int) -> str:
    """A duration as a policy writes it, in the largest unit that fits."""
    for unit in ("h", "m", "s"):
        if ms and ms % UNITS[unit] == 0:
            return f"{ms // UNITS[unit]}{unit}"
    return f"{ms}ms"


class Maker:
    """One history in the making; `simulation` is the model that runs along."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.random = random.Random(seed)
        self.unit: int = self.pick([1, 3, 20, 1_000, 1_000, 5_000])
        self.style = self.random.choices(["mixed", "plain", "sources", "cutoffs"], [65, 18, 5, 12])[0]
        self.cutoffs: list[str] = []
        self.zone = "UTC"
        self.lead = 0
        self.head = self.make_head()
        self.policies: dict[str, Fields] = copy.deepcopy(self.head["policies"])
        self.simulation = Simulation(self.head)
        self.start = self.simulation.start
        self.longest = LONGEST_WITH_CUTOFFS if self.style == "cutoffs" else LONGEST
        self.sent: dict[str, list[Fields]] = {bucket: [] for bucket in self.buckets}
        self.steps: list[Fields] = []
        self.fresh = 0
        self.focus = self.buckets[0]  # where something other than a push happened last
        self.retracted = ""

    # Small words

    def pick(self, values: Sequence[Any]) -> Any:
        return self.random.choice(values)

    def chance(self, probability: float) -> bool:
        return self.random.random() < probability

    def units(self, *counts: int) -> int:
        return int(self.pick(counts)) * self.unit

    def near(self, value: int) -> int:
        offset: int = self.pick([-1, 0, 0, 1])
        return value + offset

    # The head: flows, policies, workers

    def make_head(self) -> Fields:
        flows = self.random.sample(["pedido", "chat", "documento", "envio"], self.random.randint(1, 4))
        head: Fields = {"name": f"history-{self.seed}"}
        if self.style == "cutoffs":
            self.zone, day, self.cutoffs = self.pick(CUTOFF_DAYS)
            zone, local = ZoneInfo(self.zone), [time.fromisoformat(at) for at in self.cutoffs]
            around = instant(datetime.combine(day, time(0), tzinfo=zone)) - self.random.randint(0, 3 * HOUR)
            self.lead = self.units(0, 1, 2, 5, 20)
            start = first_cutoff_after(around, local, zone) - self.lead
            head["start"] = f"{EPOCH + timedelta(milliseconds=start):%Y-%m-%dT%H:%M:%S.%f}"[:-3] + "Z"
        elif self.chance(0.3):
            head["start"] = self.pick(["2026-10-16T14:00:00Z", "2026-10-16T14:00:00.123-03:00", "2003-02-01T00:00:00Z"])
        # Some flow may be served by `default` alone.
        served = [*flows[1:], "default"] if self.chance(0.2) else flows
        head["policies"] = {flow: self.make_policy() for flow in served}
        if self.chance(0.4):
            head["workers_down"] = [self.make_span() for _ in range(self.random.randint(1, 3))]
        count = self.pick([1, 1, 1, 2, 2, 3, 4, 5])
        keys = [f"{self.pick('tu')}:{flow}:{name}" for flow in flows for name in OBJECTS]
        self.buckets = self.random.sample(keys, count)
        return head

    def make_span(self) -> list[str]:
        begin = self.units(0, 1, 3, 10, 20, 40)
        return [text(begin), text(begin + self.units(1, 2, 10, 30, 100))]

    def make_policy(self) -> Fields:
        """A policy of mixed options, or one with caps only."""
        pick, units = self.pick, self.units
        density = pick([0.3, 0.6, 1.0])  # few options, so that windows live, or many at once

        def chance(probability: float) -> bool:
            return self.chance(probability * density)

        inactivity = None if chance(0.12) else units(1, 2, 3, 5, 10)
        policy: Fields = {"inactivity": None if inactivity is None else text(inactivity)}
        if self.style == "cutoffs" and self.chance(0.8):
            policy |= {"cutoffs": list(self.cutoffs), "timezone": self.zone, "max_age": "48h"}
            if self.lead and chance(0.4):  # all fall due at the cut-off
                policy |= {"inactivity": pick([None, text(self.lead)]), "max_age": text(self.lead)}
            elif inactivity is not None and chance(0.5):
                policy["inactivity"] = "30h"
        elif inactivity is None or chance(0.6):
            policy["max_age"] = text((inactivity or self.unit * 5) * pick([1, 2, 3, 5]))
        if chance(0.45):
            policy["max_events"] = pick([1, 2, 3, 3, 4, 5, 7, 20])
        if chance(0.35):
            policy["max_bytes"] = pick([10, 40, 50, 100, 200])
        if chance(0.3):
            policy["max_weight"] = pick([1, 3, 5, 10, 10, 30])
        if chance(0.2):
            policy["max_event_bytes"] = pick([5, 20, 60, 300])
        if chance(0.3):
            policy["on_conflict"] = pick(["reject", "keep_first", "reconcile"])
        if self.style == "cutoffs":
            policy["dedupe_ttl"] = "30d"
        elif chance(0.1):
            policy["dedupe_ttl"] = pick(["24h", "3d"])
        if chance(0.1):
            policy |= {"ordered": pick([True, False]), "busy_streak_alert": pick([1, 3])}
        if chance(0.05):
            policy |= {"payload_ttl": "2d", "metadata_ttl": "7d", "handover": pick(["each", "together"])}
        if self.style == "plain":
            return policy

        named: set[str] = set()
        if chance(0.3):
            policy["terminal_kinds"] = self.random.sample(["fim", "pago", "novo"], self.random.randint(1, 2))
            named |= set(policy["terminal_kinds"])
            if chance(0.5):
                policy["terminal_grace"] = text(units(0, 1, 2, 3))
        if chance(0.25):
            policy["starter_kinds"] = self.random.sample(["novo", "msg"], self.random.randint(1, 2))
            named |= set(policy["starter_kinds"])
        if chance(0.05):
            policy["requery_kinds"] = ["msg"]
            named.add("msg")
        if chance(0.2):
            policy["kinds"] = sorted(named | {"event", pick(KINDS)})
        if chance(0.25):
            policy["deadline_margin"] = text(units(0, 1, 2))
        if self.chance(0.75):
            policy["on_conflict"] = pick(["reject", "keep_first", *["accept_newer"] * 4, "reconcile"])
        if self.style == "sources" or self.chance(0.4):
            policy["order_by"] = pick(["source_version", "source_version", "occurred_at"])
        if self.chance(0.4):
            policy["on_late"] = pick(["accept", "reconcile", "reject"])
        if chance(0.3):
            policy["max_delay"] = text(units(1, 2, 5, 20))
        if chance(0.3):
            policy["on_too_old"] = pick(["accept", "reconcile", "reject"])
        if chance(0.35):
            policy["max_future"] = pick([None, "0s", text(self.unit), text(3 * self.unit), "5m"])
        if chance(0.5):
            policy["on_policy_change"] = pick(["split", "keep", "reconcile"])
        if self.chance(0.25):
            policy["keep"] = pick(["last", "last", "last", "all"])
        return policy

    # The clock

    def make_instant(self) -> int:
        """The next step's instant, often at the edge of something."""
        now, latest = self.simulation.now, self.start + self.longest
        edges: list[int] = []
        for bucket in self.simulation.buckets.values():
            if bucket.window:
                edges += [bucket.window.due_at] * 3 + list(bucket.window.limits().values())
            elif bucket.closed and bucket.closed[-1].silence_ends is not None:
                edges.append(bucket.closed[-1].silence_ends)
        edges += [edge for span in self.simulation.down for edge in span]
        edges = [edge for edge in map(self.near, edges) if now <= edge <= latest]
        soon = [edge for edge in edges if edge <= now + 30 * self.unit] or edges
        dice = self.random.random()
        if dice < 0.25:
            return now
        if dice < 0.35:
            return now + 1
        if edges and dice < 0.75:
            return int(self.pick(soon if self.chance(0.85) else edges))
        if dice < 0.97:
            return now + self.random.randint(0, 2 * self.unit)
        return min(now + self.units(10, 50, 200), max(now, latest))

    # Events

    def policy_of(self, bucket_key: str, bucket: Bucket | None) -> Policy:
        if bucket and bucket.window:
            return bucket.window.policy
        flow = bucket_key.split(":")[1]
        policies = self.simulation.policies
        return policies[flow] if flow in policies else policies["default"]

    def some_bucket(self) -> str:
        return self.focus if self.chance(0.4) else str(self.pick(self.buckets))

    def make_event(self, bucket_key: str) -> Fields:
        bucket = self.simulation.buckets.get(bucket_key)
        sent = self.sent[bucket_key]
        again = [event for event in sent if event["event_id"] == self.retracted]
        dice = self.random.random()
        if again and self.chance(0.3):
            event = self.change(dict(self.pick(again)), bucket_key, bucket)
        elif sent and dice < 0.13:
            event = dict(self.pick(sent))  # a redelivery
        elif sent and dice < (0.25 if self.style == "plain" else 0.35):
            event = self.change(dict(self.pick(sent)), bucket_key, bucket)
        else:
            event = self.new_event(bucket_key, bucket)
        if self.chance(0.02):
            event["trace"] = TRACE
        return event

    def new_event(self, bucket_key: str, bucket: Bucket | None) -> Fields:
        policy = self.policy_of(bucket_key, bucket)
        event: Fields = {"event_id": self.new_id(bucket_key), "bucket_key": bucket_key}
        simple = self.style == "plain" and self.chance(0.8)
        if not simple:
            event["kind"] = self.pick(KINDS) if self.chance(0.95) else "strange"
            if policy.kinds is not None and self.chance(0.8):
                event["kind"] = self.pick(sorted(policy.kinds))
        if self.chance(0.15 if simple else 0.6):
            event["source"] = self.source()
        versioned = policy.order_by is not None or policy.on_conflict == "accept_newer"
        if self.chance(0.85 if versioned else 0.3):
            event["source_version"] = self.version(event.get("source", "sim"), bucket)
        if not simple:
            event |= self.moments(policy, bucket)
            if self.chance(0.25):
                event["policy_version"] = self.policy_version(bucket)
            if self.chance(0.05):
                event["content_key"] = self.pick(["k", "K"])
            if self.chance(0.05):
                event["ref"] = self.pick(["r1", "r2"])
        if self.chance(0.6):
            event |= self.payload(policy, bucket)
        if self.chance(0.3):
            event["weight"] = self.weight(policy, bucket)
        return event

    def new_id(self, bucket_key: str) -> str:
        if self.chance(0.02):
            # The same id may live in another bucket: they share nothing.
            other = self.pick(self.sent[self.pick(self.buckets)] or [{"event_id": "E"}])
            return str(other["event_id"])
        if self.chance(0.02):
            return str(self.pick(ODD_IDS))
        self.fresh += 1
        return f"e{self.fresh}"

    def source(self) -> str:
        if self.style == "sources":
            return f"s{self.random.randint(1, 70)}"
        return str(self.pick(SOURCES))

    def version(self, source: str, bucket: Bucket | None) -> int:
        """Small, large or at the edge of the highest of its source."""
        highest = bucket.highest["source_version"].get(source) if bucket else None
        if highest is not None and self.chance(0.5):
            return min(max(self.near(highest), 0), 2**63 - 1)
        return int(self.pick(VERSIONS)) if self.chance(0.25) else self.random.randint(1, 8)

    def policy_version(self, bucket: Bucket | None) -> int:
        if self.chance(0.01):
            return 2**31 - 1
        opened = bucket.window.policy_version if bucket and bucket.window else 0
        return min(max(0, self.near(opened)), 2**31 - 1) if self.chance(0.8) else self.random.randint(0, 3)

    def moments(self, policy: Policy, bucket: Bucket | None) -> Fields:
        """When it happened and until when it is needed, often at the edge of a rule."""
        now = self.simulation.now
        given: Fields = {}
        if self.chance(0.5):
            at = now - self.random.randint(-2 * self.unit, 4 * self.unit)
            edges = []
            if policy.max_delay is not None:
                edges.append(now - policy.max_delay)
            if policy.max_future is not None:
                edges.append(now + policy.max_future)
            if bucket:
                edges += list(bucket.highest["occurred_at"].values())
            if edges and self.chance(0.6):
                at = self.near(self.pick(edges))
            if self.chance(0.02):
                at = now + self.pick([-400, 400]) * UNITS["d"]
            given |= self.written("occurred", "occurred_at", at)
        if self.chance(0.08):
            margin = policy.deadline_margin
            edges = [self.near(now), now + self.units(1, 2, 5), now + self.units(-1, 1, 10)]
            if bucket and bucket.window:
                edges.append(self.near(bucket.window.due_at))
            at = self.pick(edges) + margin
            given |= self.written("deadline", "deadline_at", at)
        return given

    def written(self, offset: str, name: str, at: int) -> Fields:
        """An instant, counted from the start or with a date and some zone."""
        if self.chance(0.9):
            return {offset: f"{at - self.start}ms"}
        moment = EPOCH + timedelta(milliseconds=at)
        if self.chance(0.3):
            moment += timedelta(microseconds=999)  # is cut
        zone = self.pick([UTC, timezone(timedelta(hours=5, minutes=45)), timezone(-timedelta(hours=3))])
        return {name: moment.astimezone(zone).isoformat()}

    def payload(self, policy: Policy, bucket: Bucket | None) -> Fields:
        held = bucket.window.bytes if bucket and bucket.window else 0
        dice = self.random.random()
        if dice < 0.45:
            return {"payload": copy.deepcopy(self.pick(PAYLOADS))}
        if dice < 0.55:
            return {"payload_bytes": max(0, self.near(policy.max_event_bytes)) if policy.max_event_bytes < 500 else 7}
        if dice < 0.75 and policy.max_bytes < 1000:
            room = policy.max_bytes - (held if policy.keep == "all" else 0)
            return {"payload_bytes": max(0, self.near(room))}
        if dice < 0.82 and policy.max_bytes < 1000:
            return {"payload_bytes": self.near(policy.max_bytes)}
        return {"payload_bytes": self.pick([0, 1, 5, 9, 10, 30, 100])}

    @staticmethod
    def without_payload(event: Fields) -> Fields:
        return {name: value for name, value in event.items() if name not in ("payload", "payload_bytes")}

    def twin(self, event: Fields) -> Fields:
        """A payload that is the same content as the event's, or nearly."""
        if event.get("payload") is None:
            none: list[Fields] = [{}, {"payload": None}, {"payload_bytes": 0}]
            return dict(self.pick(none))
        same = [twins for twins in TWINS if repr(event["payload"]) in map(repr, twins)]
        return {"payload": copy.deepcopy(self.pick(same[0]))} if same else {}

    def weight(self, policy: Policy, bucket: Bucket | None) -> int:
        held = bucket.window.weight if bucket and bucket.window else 0
        if policy.max_weight is not None and self.chance(0.4):
            return max(0, self.near(policy.max_weight - (held if self.chance(0.8) else 0)))
        return int(self.pick([0, 1, 2, 3, 10])) if self.chance(0.98) else 2**31 - 1

    def change(self, event: Fields, bucket_key: str, bucket: Bucket | None) -> Fields:
        """The same id with other content; often what would make it a revision, or just not."""
        policy = self.policy_of(bucket_key, bucket)
        known = bucket.known.get(event["event_id"]) if bucket else None
        versions = [v.source_version for v in known.versions if v.source_version is not None] if known else []
        by_instant = policy.on_conflict == "accept_newer" and policy.order_by == "occurred_at"
        newest = max((v.occurred_at for v in known.versions), default=0) if known else self.simulation.now
        if policy.on_conflict == "accept_newer" and self.chance(0.5):  # a revision, as a rule
            event["source_version"] = min(max(versions, default=0) + 1, 2**63 - 1)
            if by_instant:
                event.pop("occurred_at", None)
                event["occurred"] = f"{newest + 1 - self.start}ms"
            return event
        for _ in range(self.random.randint(1, 2)):
            dice = self.random.random()
            if dice < (0.1 if by_instant else 0.5):
                highest = max(versions, default=0)
                event["source_version"] = min(max(highest + self.pick([-1, 0, 1, 1, 1, 2]), 0), 2**63 - 1)
                if self.chance(0.05):
                    event.pop("source_version")
            elif dice < 0.6:
                event.pop("occurred_at", None)
                event |= {"occurred": f"{self.near(newest) - self.start}ms"}
            elif dice < 0.8:
                payload = self.twin(event) if self.chance(0.6) else self.payload(policy, bucket)
                event = self.without_payload(event) | payload
            elif dice < 0.9:
                event["kind"] = self.pick([*KINDS, "strange"])
            elif dice < 0.95:
                event["policy_version"] = self.policy_version(bucket)
            elif dice < 0.98:
                event["weight"] = self.weight(policy, bucket)
            else:
                event["content_key"] = self.pick(["k", "K", "other"])
        return event

    # Steps

    def do(self, at: int, verb: str, given: object) -> None:
        step = {"at": f"{at - self.start}ms", verb: given}
        self.steps.append(step)
        self.simulation.step(step)

    def push_one_by_one(self, at: int, count: int, make: Callable[[], Fields]) -> None:
        """One push step of `count` events, each made in sight of what the ones before it did."""
        if at != self.simulation.now:
            self.simulation.step({"at": f"{at - self.start}ms", "policy": {}})  # move the clock
        events = []
        for _ in range(count):
            event = make()
            events.append(event)
            self.simulation.step({"at": f"{at - self.start}ms", "push": event})
            # What a redelivery sends again happened when this one says, not when the redelivery is sent.
            if "occurred_at" not in event:
                event = {"occurred": f"{at - self.start}ms"} | event
            self.sent[event["bucket_key"]].append(event)
        one = count == 1 and self.chance(0.8)
        self.steps.append({"at": f"{at - self.start}ms", "push": events[0] if one else events})

    def make_push(self, at: int) -> None:
        dice = self.random.random()
        if dice < 0.6:
            self.push_one_by_one(at, 1, lambda: self.make_event(self.some_bucket()))
        elif dice < 0.8:
            self.push_one_by_one(at, self.random.randint(2, 8), lambda: self.make_event(self.some_bucket()))
        elif dice < 0.9:
            bucket_key = self.some_bucket()
            self.push_one_by_one(at, self.random.randint(2, 12), lambda: self.make_event(bucket_key))
        elif dice < 0.95 or self.style in ("plain", "sources"):
            # Many that are alike: the way a fast path is taken, with perhaps a few strangers among them.
            bucket_keys = self.random.sample(self.buckets, self.random.randint(1, min(2, len(self.buckets))))
            strangers = self.pick([0.0, 0.0, 0.03])
            alike = {
                name: value
                for name, value in self.new_event(bucket_keys[0], None).items()
                if name not in ("event_id", "bucket_key", "source_version", "payload", "source")
            }
            numbered = self.chance(0.5)

            def uniform() -> Fields:
                bucket_key = self.pick(bucket_keys)
                if self.chance(strangers):
                    return self.make_event(bucket_key)
                event = {"event_id": self.new_id(bucket_key), "bucket_key": bucket_key} | alike
                if self.style == "sources":
                    event["source"] = f"s{self.fresh % 70 + 1}"
                if numbered:
                    event["source_version"] = self.fresh
                return event

            self.push_one_by_one(at, self.random.choices([10, 25, 60, 130, 400], [4, 4, 4, 3, 1])[0], uniform)
        else:
            self.push_one_by_one(at, self.random.randint(10, 40), lambda: self.make_event(self.some_bucket()))

    def make_sources(self) -> None:
        """More sources than a bucket keeps highest values for, and some of them again after the close."""
        bucket_key = self.buckets[0]

        def first() -> Fields:
            event = {
                "event_id": self.new_id(bucket_key),
                "bucket_key": bucket_key,
                "source": f"s{self.fresh}",
            }
            return event | {"source_version": self.near(5)}

        def again() -> Fields:
            return first() | {"source": f"s{self.random.randint(60, 68)}"}

        self.push_one_by_one(self.start, 68, first)
        window = self.simulation.buckets[bucket_key].window
        self.push_one_by_one(window.due_at if window else self.start, 25, again)

    def make_step(self) -> None:
        at = self.make_instant()
        verb = self.random.choices(["push", "flush", "hold", "retract", "policy", "several"], [64, 7, 7, 9, 7, 6])[0]
        bucket_key = self.some_bucket()
        bucket = self.simulation.buckets.get(bucket_key)
        if verb == "push":
            self.make_push(at)
            return
        self.focus = bucket_key
        if verb == "several":
            self.make_several(at, bucket_key)
        elif verb == "flush":
            given: Fields = {"bucket_key": bucket_key}
            if self.chance(0.5):
                current = bucket.window.version if bucket and bucket.window else 1
                given["window_version"] = max(1, current + self.pick([-1, 0, 0, 0, 1]))
            if self.chance(0.5):
                given["partial"] = self.pick([True, True, False])
            self.do(at, verb, given)
        elif verb == "hold":
            lasts = self.units(1, 2, 3, 5, 20)
            if bucket and bucket.window and bucket.window.due_at > at and self.chance(0.4):
                lasts = max(1, self.near(bucket.window.due_at - at))
            self.do(at, verb, {"bucket_key": bucket_key, "for": text(lasts)})
        elif verb == "retract":
            ids = [event["event_id"] for event in self.sent[bucket_key]]
            if bucket and bucket.window and self.chance(0.6):
                ids = bucket.window.event_ids or ids
                if bucket.window.kept is not None and self.chance(0.5):
                    ids = [bucket.window.kept.event_id]
            event_id = "never-seen" if not ids or self.chance(0.05) else self.pick(ids[-8:])
            self.retracted = event_id
            self.do(at, verb, {"bucket_key": bucket_key, "event_id": event_id})

        else:
            self.do(at, verb, self.new_policies(bucket_key))

    def make_several(self, at: int, bucket_key: str) -> None:
        """A few steps that only together meet a rule; chance alone would seldom put them in a row."""
        policy = self.policy_of(bucket_key, self.simulation.buckets.get(bucket_key))

        def push(*events: Fields, after: int = 0) -> None:
            given = iter(events)
            self.push_one_by_one(max(at, self.simulation.now) + after, len(events), lambda: next(given))

        def event(**fields: object) -> Fields:
            return {"event_id": self.new_id(bucket_key), "bucket_key": bucket_key, **fields}

        def retract(event_id: str) -> None:
            self.do(max(at, self.simulation.now), "retract", {"bucket_key": bucket_key, "event_id": event_id})

        what = self.pick(["holds", "emptied", "same", "terminal", "kept", "revisions", "policy"])
        if what == "holds":
            for lasts in self.random.sample([self.units(2), self.units(5), self.units(9)], 2):
                self.do(at, "hold", {"bucket_key": bucket_key, "for": text(lasts)})
        elif what == "emptied":
            due = at + policy.deadline_margin + self.units(1, 2) - self.start
            push(event(source_version=5, policy_version=1))
            push(event(kind=self.pick(sorted(policy.terminal_kinds) or KINDS), deadline=f"{due}ms"))
            bucket = self.simulation.buckets[bucket_key]
            for event_id in bucket.window.event_ids[:6] if bucket.window else []:
                retract(event_id)
            size, weight = min(policy.max_bytes, 5000) + 1, (policy.max_weight or 10) + 1
            push(event(payload_bytes=size, weight=weight), after=self.pick([0, 1]))
        elif what == "same":
            first = event(payload=copy.deepcopy(self.pick(PAYLOADS)), occurred=f"{at - self.start}ms")
            push(first, *(self.without_payload(first) | self.twin(first) for _ in range(3)))
        elif what == "terminal":
            kinds = sorted(policy.terminal_kinds) or KINDS
            push(event(kind=self.pick(kinds)))
            if self.chance(0.4):
                retract(self.sent[bucket_key][-1]["event_id"])
            push(event(kind=self.pick(kinds)), after=self.near(policy.terminal_grace or 1) // 2)
        elif what == "kept":
            if self.chance(0.5):
                flow = bucket_key.split(":")[1]
                options = self.policies.get(flow) or self.policies["default"]
                options = options | {"keep": "last", "order_by": "source_version", "max_bytes": self.pick([10, 50])}
                self.policies[flow] = options
                self.do(at, "policy", {flow: copy.deepcopy(options)})
                self.do(at, "flush", {"bucket_key": bucket_key})
                policy = self.simulation.policies[flow]
            sources = [self.source(), self.source()]
            sizes = [3, 5, 8] if policy.max_bytes > 1000 else [3, policy.max_bytes - 1, policy.max_bytes + 1]
            for _ in range(3):
                fields: Fields = {"source": self.pick(sources), "payload_bytes": self.pick(sizes)}
                push(event(source_version=self.pick([4, 5, 6]), **fields))
            if self.chance(0.6):
                retract(self.sent[bucket_key][self.pick([-1, -2])]["event_id"])
                push(event(source=self.pick(sources), source_version=3, payload_bytes=4))
        elif what == "revisions":
            first = event(source_version=5, occurred=f"{at - self.start}ms")
            for n in range(self.random.randint(2, 5)):
                moment = f"{at - self.start + n}ms"
                push(
                    first | {"source_version": 5 + n, "occurred": moment},
                    after=self.pick([0, 0, 1, self.unit]),
                )
                if self.chance(0.2):
                    self.do(self.simulation.now, "flush", {"bucket_key": bucket_key})
                if self.chance(0.15):
                    retract(first["event_id"])
        else:
            push(event(policy_version=1))
            self.do(at, "policy", self.new_policies(bucket_key))
            version = self.pick([0, 1, 2, 2])
            push(event(policy_version=version, kind=self.pick(KINDS), payload_bytes=self.pick([0, 30, 100])))
            push(*(event(policy_version=version, payload_bytes=10, source_version=5) for _ in range(4)))

    def new_policies(self, bucket_key: str) -> Fields:
        """A policy for a flow in use or, at times, for `default`: all new, or an option or two exchanged."""
        flow = bucket_key.split(":")[1] if self.chance(0.9) else "default"
        policy = self.make_policy()
        before = self.policies.get(flow)
        if before is not None and self.chance(0.5):
            names = self.random.sample(FREE_OPTIONS, self.random.randint(0, 2))
            exchanged = {name: policy[name] for name in names if name in policy}
            policy = {name: value for name, value in before.items() if name not in names} | exchanged
        self.policies[flow] = policy
        return {flow: copy.deepcopy(policy)}

    def scenario(self) -> Fields:
        if self.style == "sources":
            self.make_sources()
        elif self.style == "cutoffs":
            self.push_one_by_one(self.start, 1, lambda: self.make_event(self.some_bucket()))
        for _ in range(self.random.randint(4, 45)):
            self.make_step()
        now = self.simulation.now
        windows = [bucket.window for bucket in self.simulation.buckets.values() if bucket.window]
        end = now + self.units(0, 1, 5, 100, 1000)
        if windows and self.chance(0.6):
            end = max(now, self.near(max(window.due_at for window in windows)))
        return copy.deepcopy(self.head) | {"steps": self.steps, "end": f"{end - self.start}ms"}


def history(seed: int) -> Fields:
    """A random scenario without `expect`; the same for the same seed."""
    return Maker(seed).scenario()


# Comparison and shrinking ------------------------------------------------------------------------


Answer = dict[str, Any]
Runner = Callable[[list[Fields]], list[Answer]]


def differences(place: str, got: object, wanted: object) -> Iterator[str]:
    """Where two answers part, one line each."""
    if isinstance(got, Mapping) and isinstance(wanted, Mapping):
        for name in dict.fromkeys([*wanted, *got]):
            if name not in got or name not in wanted:
                side, value = ("the model", wanted[name]) if name in wanted else ("the scripts", got[name])
                yield f"{place}.{name}: only {side} has it: {value!r}"
            else:
                yield from differences(f"{place}.{name}", got[name], wanted[name])
    elif isinstance(got, list) and isinstance(wanted, list) and not all(isinstance(x, str) for x in wanted):
        if len(got) != len(wanted):
            yield f"{place}: {len(got)} entries, {len(wanted)} by the model"
        for index, (one, other) in enumerate(zip(got, wanted, strict=False)):
            yield from differences(f"{place}[{index}]", one, other)
    elif got != wanted:
        yield f"{place}: {got!r}, {wanted!r} by the model"


def run_all(run: Runner, scenarios: list[Fields]) -> list[Answer | str]:
    """The answers of the scripts; a scenario that raised gives the words of its exception."""
    try:
        return list(run(copy.deepcopy(scenarios)))
    except Exception as problem:  # whatever it is, it is this scenario's difference
        if len(scenarios) == 1:
            return [f"{type(problem).__name__}: {problem}"]
        return [answer for scenario in scenarios for answer in run_all(run, [scenario])]


def compare(run: Runner, scenarios: list[Fields]) -> list[list[str]]:
    """For each scenario, how the scripts' answer differs from the model's."""
    found = []
    for scenario, answer in zip(scenarios, run_all(run, scenarios), strict=True):
        if isinstance(answer, str):
            found.append([answer])
        else:
            found.append(list(differences("answer", answer, simulate(scenario))))
    return found


Path = tuple[str | int, ...]
NEEDED = {"inactivity", "event_id", "bucket_key"}


def cuts(scenario: Fields) -> Iterator[tuple[Path, Any]]:
    """What could be left out, as (where, key or slice): the boldest first."""

    def spans(length: int) -> Iterator[slice]:
        size = length
        while size:
            yield from (slice(begin, begin + size) for begin in range(0, length, size))
            size //= 2

    steps = scenario["steps"]
    yield from ((("steps",), span) for span in spans(len(steps)))
    pushes: list[tuple[Path, list[Fields]]] = [
        (("steps", n, "push"), step["push"]) for n, step in enumerate(steps) if isinstance(step.get("push"), list)
    ]
    for path, events in pushes:
        yield from ((path, span) for span in spans(len(events)) if span != slice(0, len(events)))
    yield from (((), name) for name in ("workers_down", "start") if name in scenario)

    plain: list[tuple[Path, Fields]] = []
    loaded: list[tuple[Path, Fields]] = [(("policies",), scenario["policies"])]
    for n, step in enumerate(steps):
        if "policy" in step:
            loaded.append((("steps", n, "policy"), step["policy"]))
        elif isinstance(step.get("push"), dict):
            plain.append((("steps", n, "push"), step["push"]))
    for path, policies in loaded:
        yield from ((path, flow) for flow in policies)
        plain += [((*path, flow), options) for flow, options in policies.items()]
    plain += [((*path, n), event) for path, events in pushes for n, event in enumerate(events)]
    for path, options in plain:
        yield from ((path, name) for name in options if name not in NEEDED)


def without(scenario: Fields, path: Path, key: object) -> Fields:
    copied = copy.deepcopy(scenario)
    inside: Any = copied
    for part in path:
        inside = inside[part]
    del inside[key]
    return copied


def readable(scenario: Fields) -> bool:
    try:
        simulate(scenario)
    except Unreadable:
        return False
    return True


def shrink(run: Runner, scenario: Fields, batch: int = 16) -> Fields:
    """The scenario with all left out that its difference does not need."""

    def raises(found: list[str]) -> bool:
        return len(found) == 1 and not found[0].startswith("answer")

    # A cut may make a policy contradict itself: one that raises is no smaller case of one that does not.
    raised = raises(compare(run, [scenario])[0])
    while True:
        candidates = filter(readable, (without(scenario, *cut) for cut in cuts(scenario)))
        while chunk := list(itertools.islice(candidates, batch)):
            found = compare(run, chunk)
            still = [one for one, differs in zip(chunk, found, strict=True) if differs and raises(differs) == raised]
            if still:
                scenario = still[0]
                break
        else:
            return scenario


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.histories", description=__doc__.split("\n")[0])
    parser.add_argument("--seeds", type=int, default=300, help="how many histories (300)")
    parser.add_argument("--start", type=int, default=0, help="the first seed (0)")
    parser.add_argument("--batch", type=int, default=50, help="how many go to the simulator in one call (50)")
    parser.add_argument("--show", type=int, metavar="SEED", help="print one history as YAML, and run nothing")
    options = parser.parse_args(arguments)
    if options.show is not None:
        print(as_yaml(history(options.show)), end="")
        return 0

    run: Runner = importlib.import_module("accumulator.simulate").run_scenarios
    seeds = range(options.start, options.start + options.seeds)
    for first in range(seeds.start, seeds.stop, options.batch):
        chunk = seeds[first - seeds.start :][: options.batch]
        scenarios = [history(seed) for seed in chunk]
        for seed, scenario, found in zip(chunk, scenarios, compare(run, scenarios), strict=True):
            if found:
                report(run, seed, scenario, found)
                return 1
    print(f"{len(seeds)} histories from seed {seeds.start}: the scripts and the model agree")
    return 0


def report(run: Runner, seed: int, scenario: Fields, found: list[str]) -> None:
    print(f"seed {seed}: the scripts and the model differ")
    print(*(f"  {line}" for line in found[:10]), sep="\n")
    small = shrink(run, scenario)
    print("\nThe least that still differs:\n")
    print(as_yaml(small))
    print(*(f"  {line}" for line in compare(run, [small])[0]), sep="\n")


def as_yaml(scenario: Fields) -> str:
    class Plain(yaml.SafeDumper):
        def ignore_aliases(self, data: object) -> bool:
            return True

    return str(
        yaml.dump(scenario, Dumper=Plain, allow_unicode=True, sort_keys=False, default_flow_style=None, width=200)
    )


if __name__ == "__main__":
    sys.exit(main())
