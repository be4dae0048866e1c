"""Reminder ladders: definitions, starts and moves, what becomes of what they emit, and how little they cost."""

from __future__ import annotations

import json
import random
import threading
from collections import Counter, defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

import fakeredis
import pytest
from pydantic import SecretStr

import accumulator.handlers
from accumulator import keys, simulate
from accumulator.attempts import Taken
from accumulator.client import Accumulator, AsyncAccumulator
from accumulator.context import StepContext
from accumulator.embedded import EmbeddedServer
from accumulator.emission import Emission, idempotency_key, is_emission
from accumulator.errors import InvalidInput, InvalidLadder, UnknownFlow, UnknownLadder
from accumulator.handlers import PermanentError, on_cancelled, on_escalated, step_handler
from accumulator.ladder_operations import LadderMoved, LadderStarted
from accumulator.ladders import Ladder
from accumulator.runner import run_attempt
from accumulator.scripts import NAMES, script
from accumulator.settings import Config, Settings
from accumulator.store import Store
from accumulator.testing import VirtualClock
from accumulator.webhook import emission_body
from accumulator.worker import Worker
from tests.conftest import MakeClient, Program, event, wait_until
from tests.invariants import check_invariants
from tests.ladder_model import history, ladder_events
from tests.test_scripts import Contract

KEY = "t:fatura:1"
DAY = 86_400_000
INVOICE: dict[str, Any] = {
    "timezone": "America/Sao_Paulo",
    "steps": [
        {"name": "antes", "offset": "-3d", "channel": "email"},
        {"name": "no_dia", "offset": {"days": 0, "at": "09:00"}, "channel": "email"},
        {"name": "depois", "offset": "3d", "channel": "whatsapp"},
        {"name": "ultima", "offset": "10d", "channel": "whatsapp"},
    ],
    "cancel_on": ["pago"],
    "final_wait": "5d",
    "escalate": True,
}


@pytest.fixture(autouse=True)
def registry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is registered."""
    for name in ("_registry", "_steps", "_names"):
        monkeypatch.setattr(accumulator.handlers, name, {})


# --- definitions ------------------------------------------------------------------------------------------------------

STEP = {"name": "s", "offset": "1d"}


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ([], "ladder x: options: must be a mapping"),
        ({"steps": [STEP], "stpes": []}, "ladder x: 'stpes': is unknown"),
        ({}, "ladder x: steps: must list 1 to 100"),
        ({"steps": []}, "ladder x: steps: must list 1 to 100"),
        ({"steps": [{"offset": "1d"}]}, r"ladder x: steps\[0\]: name must be"),
        ({"steps": [STEP | {"name": "escalate"}]}, "none of cancelled, escalate, exhausted"),
        ({"steps": [STEP, STEP]}, "ladder x: steps: two of them have one name"),
        ({"steps": [STEP, {"name": "t", "offset": "-1d"}]}, "ladder x: t: comes before s"),
        ({"steps": [{"name": "s"}]}, "ladder x: s: offset is required"),
        ({"steps": [STEP | {"offset": 3}]}, "ladder x: s: offset: 3 is a bare number"),
        ({"steps": [STEP | {"offset": {"days": 1}}]}, "ladder x: s: offset must be a duration, or"),
        ({"steps": [STEP | {"offset": {"days": 1, "at": "24:00"}}]}, "ladder x: s: at must be a time of day"),
        ({"steps": [STEP | {"offset": {"days": True, "at": "09:00"}}]}, "ladder x: s: offset must"),
        ({"steps": [STEP | {"stale_after": "soon"}]}, "ladder x: s: stale_after: must be a whole number and a unit"),
        ({"steps": [STEP | {"when": {"arg": "a", "op": "le", "value": True}}]}, "s: value must be a number or a text"),
        ({"steps": [STEP], "final_wait": "x"}, "ladder x: final_wait: must be a whole number"),
        ({"steps": [STEP | {"when": {"arg": "a", "op": "like", "value": 1}}]}, "ladder x: s: op must be eq"),
        ({"steps": [STEP | {"when": {"arg": "a", "op": "in", "value": 1}}]}, "ladder x: s: value must be a list"),
        ({"steps": [STEP | {"when": {"arg": "a"}}]}, "ladder x: s: a condition is"),
        ({"steps": [STEP | {"since": datetime(2026, 1, 1, tzinfo=UTC)}]}, "ladder x: options: must be plain data"),
        ({"steps": [STEP], "timezone": "Mars"}, "ladder x: timezone: "),
        ({"steps": [STEP], "anchor": "end"}, "ladder x: anchor: must be given or start"),
        ({"steps": [STEP], "past": "ask"}, "ladder x: past: must be send or skip"),
        ({"steps": [STEP], "cancel_on": "pago"}, "ladder x: cancel_on: must list"),
        ({"steps": [STEP], "cancel_on": [""]}, "ladder x: cancel_on: .* is no kind"),
        ({"steps": [STEP], "final_wait": "-1d"}, "ladder x: final_wait: must be a duration, not below zero"),
        ({"steps": [STEP], "escalate": "yes"}, "ladder x: escalate: must be a mapping"),
        ({"steps": [STEP], "skip_to_escalate": {"arg": "a", "op": "gt", "value": 1}}, "needs escalate"),
    ],
)
def test_wrong_definitions_are_refused_with_step_and_reason(options: object, said: str) -> None:
    with pytest.raises(InvalidLadder, match=said):
        Ladder.load("x", options)


def test_a_name_is_checked_too() -> None:
    with pytest.raises(InvalidLadder, match="name: must be 1 to 64"):
        Ladder.load("a b", {"steps": [STEP]})


@pytest.mark.parametrize(
    ("op", "value", "given", "holds"),
    [
        ("gt", 10, 11, True), ("gt", 10, 10, False), ("ge", 10, 10, True), ("lt", 10, 9.5, True), ("le", 10, 10, True),
        ("gt", 10, "11", False), ("gt", "a", "b", True), ("gt", 0, True, False), ("eq", "x", "x", True),
        ("eq", 1, True, False), ("ne", 1, 2, True), ("in", ["a", "b"], "b", True), ("in", ["a"], "c", False),
        ("gt", 10, None, False), ("ge", "a", 1, False), ("lt", 10, 10, False), ("lt", 10, "9", False),
        ("le", 10, [9], False), ("le", 1, True, False), ("eq", 1, 1.0, True), ("eq", 1, "1", False),
        ("eq", None, None, True), ("eq", [1], [1], True), ("ne", 1, 1, False), ("ne", 1, "1", True),
        ("ne", 1, True, True), ("in", [1, 2], True, False), ("in", [1, 2], 2.0, True), ("in", ["1"], 1, False),
        ("in", [{"a": 1}], {"a": 1}, True), ("gt", 2**63, 2**63 + 1, True), ("gt", "é", "z", False),
    ],
)  # fmt: skip
def test_conditions_are_data(op: str, value: Any, given: Any, holds: bool) -> None:
    ladder = Ladder.load("x", {"steps": [STEP | {"when": {"arg": "a", "op": op, "value": value}}]})
    assert bool(ladder.schedule(0, {"a": given}).steps) is holds
    assert not ladder.schedule(0, {}).steps


def test_attributes_are_free() -> None:
    ladder = Ladder.load("x", {"steps": [STEP | {"channel": "email", "n": [1]}], "escalate": {"to": "juridico"}})
    assert ladder.attributes("s") == {"channel": "email", "n": [1]}
    assert ladder.attributes("escalate") == {"to": "juridico"}


def test_days_keep_the_local_time_of_day() -> None:
    def at(*parts: int) -> int:
        return int(datetime(*parts, tzinfo=UTC).timestamp() * 1000)  # type: ignore[arg-type,misc]

    ladder = Ladder.load(
        "x",
        {
            "timezone": "America/New_York",
            "steps": [
                {"name": "a", "offset": "0d"},
                {"name": "b", "offset": "1d"},
                {"name": "c", "offset": {"days": 1, "at": "23:00"}},
            ],
            "final_wait": "1d",
        },
    )
    steps, ends, _ = ladder.schedule(at(2026, 3, 7, 17), {})  # noon, the day before the clocks jump at 02:00
    assert [step.at for step in steps] == [at(2026, 3, 7, 17), at(2026, 3, 8, 16), at(2026, 3, 9, 3)]
    assert ends == at(2026, 3, 10, 3)
    skipped = Ladder.load(
        "x", {"timezone": "America/New_York", "steps": [STEP | {"offset": {"days": 0, "at": "02:30"}}]}
    )
    assert skipped.schedule(at(2026, 3, 8, 12), {}).steps[0].at == at(2026, 3, 8, 7, 30)  # 03:30 there
    assert skipped.schedule(at(2026, 11, 1, 12), {}).steps[0].at == at(2026, 11, 1, 7, 30)
    twice = Ladder.load("x", {"timezone": "America/New_York", "steps": [STEP | {"offset": {"days": 0, "at": "01:30"}}]})
    assert twice.schedule(at(2026, 11, 1, 12), {}).steps[0].at == at(2026, 11, 1, 5, 30)  # the first of two


ZONES = [
    "UTC", "America/New_York", "America/Sao_Paulo", "America/Havana", "Africa/Cairo", "Africa/Casablanca",
    "Asia/Gaza", "Asia/Tehran", "Asia/Kathmandu", "Australia/Lord_Howe", "Europe/Dublin", "Pacific/Apia",
]  # fmt: skip


def first_instant(local: datetime, zone: ZoneInfo) -> datetime:
    """When a clock there first shows it; of a time that it never shows, as much later as it jumped."""
    before, after = (
        (local + timedelta(hours=hours)).replace(tzinfo=UTC).astimezone(zone).utcoffset() or timedelta()
        for hours in (-30, 30)
    )
    instants = [(local - offset).replace(tzinfo=UTC) for offset in (before, after)]
    shown = [one for one in instants if one.astimezone(zone).replace(tzinfo=None) == local]
    return min(shown, default=instants[0])


@pytest.mark.parametrize("name", ZONES)
@pytest.mark.parametrize("days", [-3, 0, 3])
def test_a_time_of_day_is_that_of_the_place_whatever_its_clock_does(name: str, days: int) -> None:
    zone = ZoneInfo(name)
    at = ["00:00", "00:30", "01:30", "02:00", "02:30", "03:30", "09:00", "23:30"]
    steps = [{"name": f"s{n}", "offset": {"days": days, "at": one}} for n, one in enumerate(at)]
    steps.append({"name": "same", "offset": f"{days}d"})
    ladders = [Ladder.load("x", {"timezone": name, "steps": [step]}) for step in steps]
    odd = 0
    for year in (2011, 2018, 2026):
        for day in range(365):
            anchor = datetime(year, 1, 1, 12, 45, 1, 7000, tzinfo=zone) + timedelta(days=day)
            there = anchor.replace(tzinfo=None) + timedelta(days=days)
            if day % 30 and (anchor - timedelta(days=5)).utcoffset() == (anchor + timedelta(days=5)).utcoffset():
                continue  # nothing happens to its clocks
            wanted = [there.replace(hour=int(t[:2]), minute=int(t[3:]), second=0, microsecond=0) for t in at] + [there]
            ms = round(anchor.timestamp() * 1000)
            if anchor.astimezone(UTC).astimezone(zone).replace(tzinfo=None) != anchor.replace(tzinfo=None):
                continue  # a day that is not in that calendar is nobody's anchor
            found = [ladder.schedule(ms, {}).steps[0].at for ladder in ladders]
            assert found == [round(first_instant(one, zone).timestamp() * 1000) for one in wanted]
            odd += any(
                datetime.fromtimestamp(one / 1000, zone).replace(tzinfo=None) != local
                for one, local in zip(found[:-1], wanted[:-1], strict=True)
            )
    assert (odd > 0) == (name not in ("UTC", "Asia/Kathmandu"))


def test_no_days_are_the_anchor_itself_also_in_the_hour_that_comes_twice() -> None:
    second = int(datetime(2026, 11, 1, 6, 30, tzinfo=UTC).timestamp() * 1000)  # 01:30 in New York, for the second time
    ladder = Ladder.load("x", {"timezone": "America/New_York", "steps": [STEP | {"offset": "0d"}], "final_wait": "0d"})
    assert ladder.schedule(second, {}) == (((("s", second, None)),), second, False)


def test_a_definition_is_versioned_and_a_running_ladder_keeps_its_own(
    virtual: Accumulator, clock: VirtualClock
) -> None:
    virtual.load_policy("fatura", {"inactivity": "10s", "sink": "direct"})
    first = virtual.load_ladder("cobranca", INVOICE)
    assert (first.outcome, first.differs) == ("new", False)
    assert virtual.load_ladder("cobranca", dict(reversed(INVOICE.items()))) == ("cobranca", first.version, "same")
    started = virtual.start_ladder("cobranca", KEY, clock.instant + timedelta(days=4))
    changed = INVOICE | {"steps": [{"name": "outra", "offset": "1d"}], "cancel_on": ["quitado"]}
    assert virtual.load_ladder("cobranca", changed, only_new=True) == ("cobranca", first.version, "kept")
    second = virtual.load_ladder("cobranca", changed)
    assert second.outcome == "new"
    assert second.version > first.version
    assert virtual.ladder_definitions()["cobranca"][0] == second.version
    assert virtual.reschedule_ladder(started.ladder_id, clock.instant + timedelta(days=5)).outcome == "done"
    virtual.push(event("e1", KEY, clock, kind="quitado"))
    run = virtual.ladder(started.ladder_id)
    assert run is not None
    assert (run.version, run.state) == (first.version, "running")
    assert [coming.step for coming in run.coming] == ["antes", "no_dia", "depois", "ultima", "escalate"]
    virtual.push(event("e2", KEY, clock, kind="pago"))
    assert virtual.ladder(started.ladder_id).state == "cancelled"  # type: ignore[union-attr]


# --- starting and moving ----------------------------------------------------------------------------------------------


@pytest.fixture
def ready(virtual: Accumulator) -> Accumulator:
    virtual.load_policy("fatura", {"inactivity": "10s", "sink": "direct"})
    virtual.load_ladder("cobranca", INVOICE)
    return virtual


def in_days(clock: VirtualClock, days: float) -> datetime:
    return clock.instant + timedelta(days=days)


def test_a_start_is_idempotent(ready: Accumulator, clock: VirtualClock) -> None:
    anchor = in_days(clock, 4)
    first = ready.start_ladder("cobranca", KEY, anchor, {"amount": 1})
    assert (first.outcome, first.state, first.differs) == ("started", "running", False)
    again = ready.start_ladder("cobranca", KEY, anchor, {"amount": 1})
    assert again == (first.ladder_id, "there", "running", False)
    assert ready.start_ladder("cobranca", KEY, in_days(clock, 5), {"amount": 1}).differs
    assert ready.start_ladder("cobranca", KEY, anchor, {"amount": 2}).differs
    named = ready.start_ladder("cobranca", KEY, anchor, {"amount": 1}, start_id="F-1")
    assert named.ladder_id != first.ladder_id
    assert ready.cancel_ladder((KEY, "cobranca", "F-1"), "typo").outcome == "done"
    assert ready.start_ladder("cobranca", KEY, anchor, {"amount": 1}, start_id="F-1") == (
        named.ladder_id, "there", "cancelled", False
    )  # fmt: skip
    assert ready.cancel_ladder((KEY, "cobranca"), "typo").outcome == "done"
    after = ready.start_ladder("cobranca", KEY, anchor, {"amount": 1})
    assert (after.outcome, after.ladder_id != first.ladder_id) == ("started", True)
    assert {run.ladder_id for run in ready.ladders(bucket_key=KEY)} == {
        first.ladder_id, named.ladder_id, after.ladder_id
    }  # fmt: skip


def test_long_arguments_are_compared_and_read_too(ready: Accumulator, clock: VirtualClock) -> None:
    args = {"text": "x" * 200}
    first = ready.start_ladder("cobranca", KEY, in_days(clock, 4), args)
    assert not ready.start_ladder("cobranca", KEY, in_days(clock, 4), args).differs
    assert ready.start_ladder("cobranca", KEY, in_days(clock, 4), {"text": "x" * 201}).differs
    assert ready.ladder(first.ladder_id).args == args  # type: ignore[union-attr]


def test_what_can_not_be_started_is_refused(ready: Accumulator, clock: VirtualClock) -> None:
    ready.load_ladder("daily", {"anchor": "start", "steps": [STEP]})
    with pytest.raises(UnknownLadder, match="ladder nope: there is no definition"):
        ready.start_ladder("nope", KEY, clock.instant)
    with pytest.raises(UnknownFlow):
        ready.start_ladder("cobranca", "t:other:1", clock.instant)
    for anchor, args, start_id, field in (
        (None, {}, None, "anchor_at"),
        (datetime(2026, 1, 1), {}, None, "anchor_at"),
        ("soon", {}, None, "anchor_at"),
        (clock.instant, {"a": object()}, None, "args"),
        (clock.instant, {"a": "x" * 17_000}, None, "args"),
        (clock.instant, [1], None, "args"),
        (clock.instant, {}, "", "start_id"),
        (clock.instant, {}, "a\n", "start_id"),
    ):
        with pytest.raises(InvalidInput) as refused:
            ready.start_ladder("cobranca", KEY, anchor, args, start_id=start_id)  # type: ignore[arg-type]
        assert refused.value.field == field
    with pytest.raises(InvalidInput, match="must not be given"):
        ready.start_ladder("daily", KEY, clock.instant)
    with pytest.raises(InvalidInput, match="state"):
        ready.ladders("gone")
    with pytest.raises(InvalidInput, match=r"^ladder_id: is none of this namespace"):
        ready.ladder("zzz")
    with pytest.raises(InvalidInput, match=r"^ladder_id: "):
        ready.cancel_ladder("zzz", "x")
    with pytest.raises(InvalidInput, match=r"^emission_id: "):
        ready.emission("z" * 20 + "s1")
    assert ready.ladders() == []


def test_a_ladder_that_ended_is_not_moved(ready: Accumulator, clock: VirtualClock) -> None:
    which = (KEY, "cobranca")
    assert ready.pause_ladder(which) == (None, "missing", None)
    assert ready.reschedule_ladder(which, clock.instant) == (None, "missing", None)
    assert ready.pause_ladder("0" * 20) == LadderMoved(None, "missing", None)
    started = ready.start_ladder("cobranca", KEY, in_days(clock, 4))
    assert ready.resume_ladder(which) == (started.ladder_id, "same", "running")
    assert ready.pause_ladder(which) == (started.ladder_id, "done", "paused")
    assert ready.pause_ladder(which) == (started.ladder_id, "same", "paused")
    assert ready.reschedule_ladder(which, in_days(clock, 4)).outcome == "same"
    assert ready.cancel_ladder(which, "paid in cash") == (started.ladder_id, "done", "cancelled")
    assert ready.cancel_ladder(which, "paid in cash") == (started.ladder_id, "same", "cancelled")
    for move in (ready.pause_ladder, ready.resume_ladder):
        assert move(which) == (started.ladder_id, "wrong_state", "cancelled")
    assert ready.reschedule_ladder(which, clock.instant).outcome == "wrong_state"
    run = ready.ladder(which)
    assert run is not None
    assert (run.cause, run.by_event, run.next) == ("paid in cash", None, None)


def test_the_timeline_says_what_was_sent_when_and_what_comes_next(ready: Accumulator, clock: VirtualClock) -> None:
    began = clock.now
    started = ready.start_ladder("cobranca", KEY, in_days(clock, 4), {"amount": 7})
    clock.advance("2d")
    assert ready.ladders("running") == ready.ladders()
    run = ready.ladder(started.ladder_id)
    assert run is not None
    assert [(h.at - began, h.event, h.step, h.state) for h in run.timeline] == [
        (0, "started", None, None), (DAY, "step", "antes", "closed"),
    ]  # fmt: skip
    assert run.next is not None
    assert run.next.step == "no_dia"
    assert (run.args, run.anchor_at - began, run.started_at) == ({"amount": 7}, 4 * DAY, began)
    emission = ready.emission(run.timeline[1].emission_id or "")
    assert emission is not None
    assert (emission.step, emission.event, emission.attributes, emission.due_at - began, emission.key) == (
        "antes", "step", {"channel": "email"}, DAY, idempotency_key("cobranca", KEY, started.ladder_id, "antes")
    )  # fmt: skip
    assert ready.manifest(emission.emission_id) is None
    assert ready.emission(started.ladder_id) is None
    ready.push(event("P", KEY, clock, kind="pago"))
    run = ready.ladder(started.ladder_id)
    assert run is not None
    assert (run.state, run.since, run.by_event, run.cause) == ("cancelled", clock.now, "P", "event")
    assert [(h.event, h.state) for h in run.timeline[1:]] == [("step", "discarded"), ("cancelled", "closed")]


@pytest.mark.parametrize("kind", ["pago", "outro"])
def test_only_the_awaited_kind_cancels_whatever_becomes_of_it(
    ready: Accumulator, clock: VirtualClock, kind: str
) -> None:
    ready.load_policy("fatura", {"inactivity": "10s", "max_event_bytes": 10, "sink": "direct"})
    ready.start_ladder("cobranca", KEY, in_days(clock, 4))
    assert ready.push(event("e", KEY, clock, kind=kind, payload="x" * 99)).outcome == "rejected"
    assert len(ready.ladders("running")) == (kind != "pago")


def test_a_conflict_cancels_nothing_and_a_duplicate_does(ready: Accumulator, clock: VirtualClock) -> None:
    ready.push(event("e", KEY, clock, kind="pago", payload=1))
    ready.start_ladder("cobranca", KEY, in_days(clock, 4), ignore_earlier=True)
    assert ready.push(event("e", KEY, clock, kind="pago", payload=2)).outcome == "conflict"
    assert ready.ladders("running")
    assert ready.push(event("e", KEY, clock, kind="pago", payload=1)).outcome == "duplicate"
    assert ready.ladders("cancelled")


def test_one_event_cancels_all_that_wait_for_it_and_no_other(ready: Accumulator, clock: VirtualClock) -> None:
    ready.load_ladder("other", INVOICE | {"cancel_on": ["left"]})
    for start_id in ("a", "b"):
        ready.start_ladder("cobranca", KEY, in_days(clock, 1), start_id=start_id)
    ready.start_ladder("other", KEY, in_days(clock, 4))
    ready.start_ladder("cobranca", "t:fatura:2", in_days(clock, 4))
    taken = [one for p in range(4) for one in ready.store.perform(ready.operations.take(p, "direct", 9, 30_000))]
    assert len(taken) == 2  # both are in flight, and leave it together
    ready.push_many([event("P", KEY, clock, kind="pago"), event("P", KEY, clock, kind="pago")])
    assert {(run.ladder, run.bucket_key, run.state) for run in ready.ladders()} == {
        ("cobranca", KEY, "cancelled"), ("other", KEY, "running"), ("cobranca", "t:fatura:2", "running"),
    }  # fmt: skip


def accepted(acc: Accumulator, clock: VirtualClock) -> None:
    acc.push(event("P", KEY, clock, kind=KIND))


def closed(acc: Accumulator, clock: VirtualClock) -> None:
    acc.push_many([event(f"x{n}", KEY, clock) for n in range(5)])
    clock.advance("1h")
    accepted(acc, clock)
    clock.advance("1h")
    acc.push(event("y", KEY, clock))


def among_many(acc: Accumulator, clock: VirtualClock) -> None:
    for window in range(120):
        acc.push_many([event(f"{window}-{n}", KEY, clock) for n in range(3)])
        acc.flush(KEY)
    acc.push_many([event("x", KEY, clock), event("P", KEY, clock, kind=KIND), event("Q", KEY, clock, kind=KIND)])
    for n in range(210):
        acc.push(event(f"y{n}", KEY, clock))


def only_a_digest(acc: Accumulator, clock: VirtualClock) -> None:
    acc.load_policy("fatura", {"inactivity": "10s", "keep": "last"})
    accepted(acc, clock)
    acc.push(event("x", KEY, clock, payload=1))


def revised(acc: Accumulator, clock: VirtualClock) -> None:
    acc.load_policy("fatura", {"inactivity": "10s", "on_conflict": "accept_newer"})
    acc.push(event("P", KEY, clock, source_version=1))
    assert acc.push(event("P", KEY, clock, kind=KIND, source_version=2)).outcome == "revised"


def late(acc: Accumulator, clock: VirtualClock) -> None:
    acc.load_policy("fatura", {"inactivity": "10s", "max_delay": "1m", "on_late": "accept"})
    assert acc.push(event("P", KEY, clock, kind=KIND, occurred_at=in_days(clock, -1))).late


def retracted(acc: Accumulator, clock: VirtualClock) -> None:
    accepted(acc, clock)
    assert acc.retract(KEY, "P").outcome == "retracted"


def queued(acc: Accumulator, clock: VirtualClock) -> None:
    acc.load_policy("fatura", {"inactivity": "10s", "kinds": ["other"]})
    home = acc.operations.prefix_of
    beside = next(key for n in range(9, 99) if home(key := f"t:fatura:{n}") == home(KEY))
    acc.push_many([event(f"x{n}", beside, clock) for n in range(150)])
    assert acc.push(event("P", KEY, clock, kind=KIND)).outcome == "reconciled"


def resolved(acc: Accumulator, clock: VirtualClock) -> None:
    queued(acc, clock)
    clock.advance("1h")
    acc.resolve(acc.reconciliation()[-1], "accept", by="ana", reason="seen")


def discarded(acc: Accumulator, clock: VirtualClock) -> None:
    queued(acc, clock)
    acc.resolve(acc.reconciliation()[-1], "discard", by="ana", reason="twice")


def twice(acc: Accumulator, clock: VirtualClock) -> None:
    accepted(acc, clock)
    assert acc.push(event("P", KEY, clock, kind=KIND)).outcome == "duplicate"


KIND = 'pa"go\\ \n ç","occurred_at":'
KNOWN = [
    accepted, closed, among_many, only_a_digest, revised, late, retracted, queued, resolved, discarded, twice
]  # fmt: skip


@pytest.mark.parametrize("watched_first", [True, False])
@pytest.mark.parametrize("known", KNOWN)
def test_a_start_looks_back_at_all_that_is_known(
    virtual: Accumulator,
    clock: VirtualClock,
    make_client: MakeClient,
    known: Callable[[Accumulator, VirtualClock], None],
    watched_first: bool,
) -> None:
    virtual.load_policy("fatura", {"inactivity": "10s"})
    definition = INVOICE | {"cancel_on": ["never", KIND]}
    if watched_first:
        virtual.load_ladder("cobranca", definition)
    known(virtual, clock)
    virtual.load_ladder("cobranca", definition)
    clock.advance("1m")
    started = virtual.start_ladder("cobranca", KEY, in_days(clock, 4))
    assert started.state == "cancelled"
    run = virtual.ladder(started.ladder_id)
    assert run is not None
    assert (run.by_event, run.emitted) == ("P", 1)
    assert virtual.start_ladder("cobranca", "t:fatura:2", in_days(clock, 4)).state == "running"
    assert virtual.start_ladder("cobranca", KEY, in_days(clock, 4), ignore_earlier=True).state == "running"
    check_invariants(make_client(), virtual.operations.namespace)


def test_one_that_was_queued_is_known_wherever_it_went(virtual: Accumulator, clock: VirtualClock) -> None:
    queued(virtual, clock)
    virtual.load_ladder("cobranca", INVOICE | {"cancel_on": [KIND]})
    clock.advance("1h")
    assert virtual.resolve(virtual.reconciliation()[-1], "accept", by="ana", reason="seen").outcome == "accepted"
    run = virtual.ladder(virtual.start_ladder("cobranca", KEY, in_days(clock, 4)).ladder_id)
    assert run is not None
    assert (run.state, run.by_event) == ("cancelled", "P")


def test_what_went_with_the_payloads_is_known_where_it_was_noticed(make_client: MakeClient, namespace: str) -> None:
    clock = VirtualClock()
    acc = clock.attach(Accumulator(make_client(), namespace=namespace, partitions=1, clock=clock))
    acc.load_policy("fatura", {"inactivity": "10s", "sink": "direct", "payload_ttl": "1d"})
    acc.load_ladder("cobranca", INVOICE)
    accumulator.handlers.handler("fatura")(lambda ctx: None)
    acc.push_many([event("P", KEY, clock, kind="pago"), event("O", KEY, clock, kind="outro")])
    clock.advance("1m")
    [taken] = acc.store.perform(acc.operations.take(0, "direct", 10, 30_000))
    assert run_attempt(acc, taken.window_id, taken.attempt) == "confirmed"
    clock.advance("2d")
    assert acc.manifests(KEY)[0].events == ()
    for cancel_on, state in ((["pago"], "cancelled"), (["outro"], "running")):
        acc.load_ladder("cobranca", INVOICE | {"cancel_on": cancel_on})
        assert acc.start_ladder("cobranca", KEY, in_days(clock, 4)).state == state


@pytest.mark.parametrize("watched_first", [True, False])
def test_what_was_refused_or_ignored_is_not_known(
    virtual: Accumulator, clock: VirtualClock, watched_first: bool
) -> None:
    rules = {"inactivity": "10s", "max_event_bytes": 10, "on_conflict": "keep_first"}
    virtual.load_policy("fatura", rules)
    if watched_first:
        virtual.load_ladder("cobranca", INVOICE)
    assert virtual.push(event("P", KEY, clock, kind="pago", payload="x" * 99)).outcome == "rejected"
    virtual.push(event("E", KEY, clock))
    assert virtual.push(event("E", KEY, clock, kind="pago")).conflict
    virtual.load_ladder("cobranca", INVOICE)
    assert virtual.start_ladder("cobranca", KEY, in_days(clock, 4)).state == "running"


def test_the_first_of_several_is_named(ready: Accumulator, clock: VirtualClock) -> None:
    ready.load_policy("fatura", {"inactivity": "10s", "kinds": ["pago"]})
    for event_id, kind in (("A", "outro"), ("B", "pago"), ("C", "pago")):
        ready.push(event(event_id, KEY, clock, kind=kind))
        clock.advance("1s")
    for cancel_on, named in ((["pago"], "B"), (["pago", "outro"], "A")):  # B was noticed, A was not
        ready.load_ladder("cobranca", INVOICE | {"cancel_on": cancel_on})
        started = ready.start_ladder("cobranca", KEY, in_days(clock, 4))
        assert ready.ladder(started.ladder_id).by_event == named  # type: ignore[union-attr]


def test_looking_back_reads_no_window_that_opened_later(ready: Accumulator, clock: VirtualClock) -> None:
    clock.advance("1m")
    for number in range(20):
        ready.push(event(f"x{number}", KEY, clock))
        clock.advance("1m")
    client = ready.store.client
    before = client.info("commandstats").get("cmdstat_xrange", {"calls": 0})["calls"]
    assert ready.start_ladder("cobranca", KEY, in_days(clock, 4)).state == "running"
    ran = client.info("commandstats").get("cmdstat_xrange", {"calls": 0})["calls"] - before
    assert ran <= 1  # the open one, up to when the kind came to be watched


def test_a_long_bucket_key_is_whole_again(ready: Accumulator, clock: VirtualClock, make_client: MakeClient) -> None:
    for tail in ("x" * 500, "é" * 250, "x" * 55, "x" * 56, "x" * 54 + "é", "日本語" * 50):
        key = f"t:fatura:{tail}"
        started = ready.start_ladder("cobranca", key, in_days(clock, 4))
        run = ready.ladder(started.ladder_id)
        assert run is not None
        assert run.bucket_key == key
        assert ready.pause_ladder((key, "cobranca")).outcome == "done"
        ready.push(event("P", key, clock, kind="pago"))
        assert ready.ladder((key, "cobranca")).state == "cancelled"  # type: ignore[union-attr]
    check_invariants(make_client(), ready.operations.namespace)


async def test_the_asynchronous_client_does_the_same(redis_url: str, namespace: str) -> None:
    async with AsyncAccumulator(redis_url, namespace=namespace, partitions=2, protocol=2) as acc:
        await acc.load_policy("fatura", {"inactivity": "10s"})
        await acc.load_ladder("cobranca", INVOICE)
        anchor = datetime.now(UTC) + timedelta(days=9)
        started = await acc.start_ladder("cobranca", KEY, anchor, {"amount": 1}, start_id="s")
        which = (KEY, "cobranca", "s")
        assert (await acc.pause_ladder(which)).state == "paused"
        assert (await acc.resume_ladder(which)).state == "running"
        assert (await acc.reschedule_ladder(which, anchor + timedelta(days=1))).outcome == "done"
        run = await acc.ladder(which)
        assert run is not None
        assert run.next is not None
        assert run.next.step == "antes"
        assert [each.ladder_id for each in await acc.ladders("running")] == [started.ladder_id]
        assert (await acc.cancel_ladder(which, "over")).state == "cancelled"
        assert list(await acc.ladder_definitions()) == ["cobranca"]
        emission = (await acc.ladder(which)).timeline[-1].emission_id  # type: ignore[union-attr]
        assert (await acc.emission(emission or "")).reason == "over"  # type: ignore[union-attr]


# --- against the model ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seeds", [range(n, n + 15) for n in range(0, 60, 15)], ids=str)
def test_histories_emit_what_the_model_says(make_client: MakeClient, seeds: range, namespace: str) -> None:
    client = make_client()
    store = Store(client)
    for seed in seeds:
        scenario = history(seed)
        run = simulate._Run(store, scenario)
        try:
            assert run.run()["ladder_events"] == ladder_events(scenario), f"seed {seed}"
            check_invariants(client, run.operations.namespace)
        finally:
            run.drop()


def test_the_fake_emits_the_same() -> None:
    with fakeredis.FakeRedis(server=fakeredis.FakeServer(version=(7, 0), server_type="redis")) as fake:
        for seed in range(4):
            scenario = history(seed)
            assert simulate.run_scenario(Store(fake), scenario)["ladder_events"] == ladder_events(scenario)


def test_scripts_touch_declared_keys_only(make_client: MakeClient) -> None:
    client = make_client()
    names = {client.script_load(script(name).source): name for name in NAMES}
    touched: dict[str, set[str]] = defaultdict(set)
    with make_client().monitor() as monitor:  # type: ignore[no-untyped-call]
        for seed in range(20):
            simulate.run_scenario(Store(client), history(seed))
        client.echo("the end")
        running = ""
        for line in monitor.listen():
            verb, *args = line["command"].split(" ")
            if verb == "ECHO":
                break
            if line["client_type"] != "lua":
                running = names[args[0]] if verb == "EVALSHA" else ""
            elif running in ("start_ladder", "move_ladder", "accept", "tick") and verb not in ("TIME", "PUBLISH"):
                touched[running] |= {arg.partition("}:")[2].partition(":")[0] for arg in args if "}:" in arg}
    for name, found in touched.items():
        named = {one.partition(":")[0] for one in Contract.of(name).derived} | {"timers"}
        assert found <= named, name
    assert {"ladder", "ladders", "ladderdef", "noticed", "outbox"} <= touched["start_ladder"]


# --- handlers ---------------------------------------------------------------------------------------------------------


class Hands:
    """Workers of a namespace under a virtual clock."""

    def __init__(self, acc: Accumulator, clock: VirtualClock) -> None:
        self.acc, self.clock = acc, clock

    def take(self) -> list[tuple[str, int]]:
        operations = self.acc.operations
        found = [t for p in range(4) for t in self.acc.store.perform(operations.take(p, "direct", 10, 30_000))]
        return [(taken.window_id, taken.attempt) for taken in found]

    def all(self) -> list[str | None]:
        """Runs what is ready, until nothing is."""
        endings = []
        while taken := self.take():
            endings += [run_attempt(self.acc, window_id, attempt) for window_id, attempt in taken]
        return endings


@pytest.fixture
def work(ready: Accumulator, clock: VirtualClock) -> Hands:
    return Hands(ready, clock)


def test_a_step_handler_gets_what_it_needs(ready: Accumulator, clock: VirtualClock, work: Hands) -> None:
    seen: list[Any] = []

    @step_handler("cobranca")
    def remind(ctx: StepContext) -> None:
        with ctx.effect("mail") as effect:
            assert effect.key == f"{ctx.key}:mail"
        seen.append((ctx.ladder, ctx.step, ctx.attributes["channel"], ctx.args, ctx.key, ctx.attempt, ctx.due_at))

    @on_cancelled("cobranca")
    async def thank(ctx: StepContext) -> None:
        seen.append((ctx.event, ctx.by_event, ctx.cancelling_event and ctx.cancelling_event.payload))

    ready.start_ladder("cobranca", KEY, in_days(clock, 3), {"amount": 7}, start_id="F1")
    due = clock.instant
    assert work.all() == ["confirmed"]
    assert seen == [
        ("cobranca", "antes", "email", {"amount": 7}, idempotency_key("cobranca", KEY, "F1", "antes"), 1, due)
    ]
    ready.push(event("P", KEY, clock, kind="pago", payload={"v": 1}))
    assert work.all() == ["confirmed"]
    assert seen[1:] == [("cancelled", "P", {"v": 1})]
    run = ready.ladder((KEY, "cobranca", "F1"))
    assert run is not None
    assert [h.state for h in run.timeline] == [None, "confirmed", "confirmed"]


def test_without_a_handler_an_ending_is_confirmed_and_a_step_waits(
    ready: Accumulator, clock: VirtualClock, work: Hands
) -> None:
    ready.start_ladder("cobranca", KEY, in_days(clock, 3))
    assert work.all() == ["returned"]  # HandlerMissing, and not lost
    step_handler("cobranca")(lambda ctx: None)
    clock.advance("1m")
    assert work.all() == ["confirmed"]
    ready.cancel_ladder((KEY, "cobranca"), "over")
    assert work.all() == ["confirmed"]


def test_escalation_has_its_handler(ready: Accumulator, clock: VirtualClock, work: Hands) -> None:
    seen: list[tuple[str, str, dict[str, Any]]] = []
    ready.load_ladder("one", {"steps": [STEP], "escalate": {"to": "juridico"}, "final_wait": "1d"})
    step_handler("one")(lambda ctx: seen.append((ctx.event, ctx.step, ctx.attributes)))
    on_escalated("one")(lambda ctx: seen.append((ctx.event, ctx.step, ctx.attributes)))
    ready.start_ladder("one", KEY, clock.instant)
    clock.advance("3d")
    assert work.all() == ["confirmed", "confirmed"]
    assert seen == [("step", "s", {}), ("escalated", "escalate", {"to": "juridico"})]
    assert [run.state for run in ready.ladders("escalated")] == ["escalated"]


@pytest.mark.parametrize("ending", ["failed", "returned", "lease"])
def test_a_step_that_fails_after_the_payment_is_not_tried_again(
    ready: Accumulator, clock: VirtualClock, work: Hands, ending: str
) -> None:
    """And what is to be done for the payment does not wait for its back-off."""
    told: list[str] = []
    accumulator.handlers.handler("fatura")(lambda ctx: None)
    on_cancelled("cobranca")(lambda ctx: told.append(str(ctx.by_event)))
    ready.start_ladder("cobranca", KEY, in_days(clock, 4))
    clock.advance("1d")
    [(emission_id, attempt)] = work.take()
    do, operations, token = ready.store.perform, ready.operations, "t" * 16
    do(operations.begin_emission(emission_id, attempt, token, 60_000, 5))
    ready.push(event("P", KEY, clock, kind="pago"))
    work.all()
    assert told == []
    if ending == "lease":
        clock.advance("61s")
    else:
        assert do(operations.settle(emission_id, token, ending, "x", 600_000)) == "done"
    emission = do(operations.emission(emission_id))
    assert emission is not None
    assert [step[1] for step in emission.timeline][-2:] == ["retrying", "discarded"]
    work.all()
    assert told == ["P"]
    clock.advance("1h")
    work.all()
    assert told == ["P"]
    assert do(operations.emission(emission_id)) == emission


def test_a_step_that_has_not_begun_is_not_executed(ready: Accumulator, clock: VirtualClock, work: Hands) -> None:
    step_handler("cobranca")(lambda ctx: pytest.fail("it was sent"))
    for key in (KEY, "t:fatura:2"):
        ready.start_ladder("cobranca", key, in_days(clock, 3))
    taken = work.take()
    assert len(taken) == 2
    ready.push(event("P", KEY, clock, kind="pago"))
    ready.push(event("P", "t:fatura:2", clock, kind="pago"))
    assert [run_attempt(ready, *each) for each in taken] == [None, None]
    assert work.all() == ["confirmed", "confirmed"]  # both `cancelled`


def test_a_retry_after_the_payment_is_not_executed(
    ready: Accumulator, clock: VirtualClock, work: Hands, caplog: pytest.LogCaptureFixture
) -> None:
    begun: list[str] = []

    @step_handler("cobranca", backoff="1s")
    def fail(ctx: StepContext) -> None:
        begun.append(ctx.step)
        ready.push(event("P", KEY, clock, kind="pago"))  # the payment comes while it runs
        raise ValueError(ctx.args["secret"])

    accumulator.handlers.handler("fatura")(lambda ctx: None)
    started = ready.start_ladder("cobranca", KEY, in_days(clock, 3), {"secret": "sk-12345678"})
    assert work.all() == ["failed", "confirmed"]  # `cancelled` waits for no back-off
    clock.advance("10m")
    assert work.all() == ["confirmed"]  # the window's
    assert begun == ["antes"]
    run = ready.ladder(started.ladder_id)
    assert run is not None
    assert [h.state for h in run.timeline] == [None, "discarded", "confirmed"]
    failed = ready.emission(run.timeline[1].emission_id or "")
    assert failed is not None
    assert failed.error == "ValueError: (its message quotes the payload)"
    assert started.ladder_id in caplog.text
    assert "sk-1234" not in caplog.text


def test_steps_of_a_ladder_keep_their_order(ready: Accumulator, clock: VirtualClock, work: Hands) -> None:
    sent: list[str] = []

    @step_handler("cobranca", backoff="1s", max_attempts=3)
    def remind(ctx: StepContext) -> None:
        if ctx.step == "antes" and ctx.attempt == 1:
            raise ValueError
        if ctx.step == "no_dia":
            raise PermanentError
        sent.append(ctx.step)

    ready.start_ladder("cobranca", KEY, in_days(clock, -4))
    assert work.all() == ["failed"]
    clock.advance("5s")
    assert work.all() == ["confirmed", "dead", "confirmed"]
    assert sent == ["antes", "depois"]
    [waiting] = ready.attention()
    assert is_emission(waiting.window_id)
    assert waiting.state == "dead"
    step_handler("outra")(lambda ctx: None)
    assert ready.replay(waiting.window_id, by="ana", reason="again").outcome == "done"
    assert work.all() == ["dead"]
    assert ready.discard(waiting.window_id, by="ana", reason="no").outcome == "done"
    assert ready.attention() == []


def test_each_step_goes_where_its_policy_said(ready: Accumulator, clock: VirtualClock, work: Hands) -> None:
    step_handler("cobranca")(lambda ctx: None)
    ready.start_ladder("cobranca", KEY, in_days(clock, 3))
    ready.load_policy("fatura", {"inactivity": "10s", "sink": "rq"})
    clock.advance("3d")  # the second step waits behind the first
    assert work.all() == ["confirmed"]
    taken = [one for p in range(4) for one in ready.store.perform(ready.operations.take(p, "rq", 9, 30_000))]
    assert [ready.emission(one.window_id).step for one in taken] == ["no_dia"]  # type: ignore[union-attr]


def test_what_waits_is_called_off_also_after_the_escalation(
    ready: Accumulator, clock: VirtualClock, work: Hands
) -> None:
    ready.load_ladder("cobranca", INVOICE | {"final_wait": "0s"})
    ready.start_ladder("cobranca", KEY, in_days(clock, -40))  # all at once, and nobody has begun
    assert [run.state for run in ready.ladders()] == ["escalated"]
    ready.push(event("P", KEY, clock, kind="pago"))
    assert work.all() == []
    run = ready.ladder((KEY, "cobranca"))
    assert run is not None
    assert (run.state, {h.state for h in run.timeline[1:]}) == ("escalated", {"discarded"})


def test_a_flow_without_a_sink_records_only(virtual: Accumulator, clock: VirtualClock) -> None:
    virtual.load_policy("fatura", {"inactivity": "10s", "sink": "none"})
    virtual.load_ladder("cobranca", INVOICE)
    started = virtual.start_ladder("cobranca", KEY, in_days(clock, 3))
    run = virtual.ladder(started.ladder_id)
    assert run is not None
    assert [h.state for h in run.timeline] == [None, "confirmed"]


# --- races and kills --------------------------------------------------------------------------------------------------


class Machine:
    """Producers, ticks, two workers that die, and people, in any order."""

    MOST = 3

    def __init__(self, acc: Accumulator, clock: VirtualClock, seed: int) -> None:
        self.acc, self.clock, self.dice = acc, clock, random.Random(seed)
        acc.operations._nonce = lambda length: f"{self.dice.getrandbits(4 * length):0{length}x}"
        self.keys = ["t:fatura:1", "t:fatura:2", "u:fatura:3"]
        self.jobs: list[tuple[str, int]] = []
        self.running: list[tuple[Emission, str, str]] = []
        self.world: Counter[str] = Counter()
        self.begun: list[tuple[str, int]] = []
        self.off: set[str] = set()
        self.number = 0

    def do(self, operation: Any) -> Any:
        return self.acc.store.perform(operation)

    def tick(self) -> None:
        for tick in self.do(self.acc.operations.tick_all(range(4), 100)):
            assert tick.failure is None
            assert tick.orphans == 0

    def note_off(self) -> None:
        self.off |= {run.ladder_id for run in self.acc.ladders("cancelled")}

    def step(self) -> None:
        key, ops = self.dice.choice(self.keys), self.acc.operations
        action = self.dice.choice(
            ["start", "start", "pay", "wait", "wait", "tick", "take", "take", "begin", "begin", "effect", "end", "end",
             "die", "move", "people"]
        )  # fmt: skip
        if action == "start":
            anchor = self.clock.instant + timedelta(hours=self.dice.randint(-200, 100))
            start_id = self.dice.choice([None, "A", "B"])
            started = self.acc.start_ladder("cobranca", key, anchor, start_id=start_id, ignore_earlier=True)
            if started.state in ("running", "paused") or start_id is not None:
                again = self.acc.start_ladder("cobranca", key, anchor, start_id=start_id, ignore_earlier=True)
                assert again.ladder_id == started.ladder_id
        elif action == "pay":
            self.number += 1
            if self.dice.random() < 0.5:
                self.acc.push(event(f"P{self.number}", key, self.clock, kind="pago"))
                for run in self.acc.ladders(bucket_key=key):
                    assert run.ended, "a ladder survived the payment"
                    self.off.add(run.ladder_id)
        elif action == "wait":
            self.clock.advance(f"{self.dice.choice([1, 60, 3600, 86_400])}s", worker=False)
        elif action == "tick":
            self.tick()
        elif action == "take":
            for partition in range(4):
                for taken in self.do(ops.take(partition, "direct", 2, 30_000)):
                    if is_emission(taken.window_id):
                        self.jobs.append((taken.window_id, taken.attempt))
        elif action == "begin" and self.jobs:
            window_id, attempt = self.dice.choice(self.jobs)
            token = f"{self.dice.getrandbits(64):016x}"
            _, emission = self.do(ops.begin_emission(window_id, attempt, token, 60_000, self.MOST))
            if emission is not None:
                assert emission.event == "cancelled" or emission.ladder_id not in self.off, "it was called off"
                assert (window_id, attempt) not in self.begun, "an attempt was granted twice"
                self.begun.append((window_id, attempt))
                self.running.append((emission, token, ""))
        elif action == "effect" and self.running:
            # Once an attempt: as a handler does.
            at = self.dice.randrange(len(self.running))
            emission, token, said = self.running[at]
            if said:
                return
            told, _ = self.do(ops.effect(emission.emission_id, token, "mail", "begin", token[:12]))
            if told == "uncertain":  # asked, the target knows
                step = "confirm" if self.world[emission.key] else "again"
                told, _ = self.do(ops.effect(emission.emission_id, token, "mail", step, token[:12], "1"))
            if told == "begun":
                self.world[emission.key] += 1
                if self.dice.random() < 0.7:
                    told, _ = self.do(ops.effect(emission.emission_id, token, "mail", "confirm", token[:12], "1"))
            self.running[at] = emission, token, told
        elif action == "end" and self.running:
            emission, token, said = self.running.pop(self.dice.randrange(len(self.running)))
            ending = "confirmed" if said == "confirmed" else self.dice.choice(["failed", "failed", "returned", "dead"])
            self.do(ops.settle(emission.emission_id, token, ending, "x", 1000))
        elif action == "die" and self.running:
            self.running.pop(self.dice.randrange(len(self.running)))  # its lease ends by itself
        elif action == "move":
            which = (key, "cobranca")
            move: Callable[[], Any] = self.dice.choice([
                lambda: self.acc.pause_ladder(which),
                lambda: self.acc.resume_ladder(which),
                lambda: self.acc.resume_ladder(which),
                lambda: self.acc.cancel_ladder(which, "x"),
                lambda: self.acc.reschedule_ladder(
                    which, self.clock.instant + timedelta(hours=self.dice.randint(-300, 300))
                ),
            ])  # fmt: skip
            move()
        elif action == "people":
            for waiting in self.acc.attention():
                decide = self.dice.choice([self.acc.replay, self.acc.discard, self.acc.confirm])
                decide(waiting.window_id, by="ana", reason="seen")
        self.note_off()

    def drain(self) -> None:
        """Healthy workers, and time."""
        ops = self.acc.operations
        self.running.clear()
        for _ in range(400):
            self.clock.advance("2h", worker=False)
            self.tick()
            for run in self.acc.ladders("paused"):
                self.acc.resume_ladder(run.ladder_id)
            for waiting in self.acc.attention():
                self.acc.discard(waiting.window_id, by="ana", reason="seen")
            busy = False
            for partition in range(4):
                for taken in self.do(ops.take(partition, "direct", 50, 30_000)):
                    busy = True
                    if not is_emission(taken.window_id):
                        grant = self.do(ops.begin(taken.window_id, taken.attempt, "t" * 16, 60_000, 3))
                        self.do(ops.settle(taken.window_id, "t" * 16, "confirmed", "x", manifest=grant.manifest))
                        continue
                    token = f"{self.dice.getrandbits(64):016x}"
                    _, emission = self.do(ops.begin_emission(taken.window_id, taken.attempt, token, 60_000, 3))
                    if emission is not None:
                        assert emission.event == "cancelled" or emission.ladder_id not in self.off
                        self.do(ops.settle(taken.window_id, token, "confirmed", "x"))
            if not busy and not self.acc.ladders("running"):
                break


@pytest.mark.parametrize("seed", range(12))
def test_whatever_races_and_dies_nothing_is_sent_twice_or_after_the_payment(
    make_client: MakeClient, namespace: str, seed: int
) -> None:
    client, clock = make_client(), VirtualClock()
    acc = Accumulator(client, namespace=namespace, partitions=4, clock=clock)
    acc.load_policy("fatura", {"inactivity": "10s", "sink": "direct", "dedupe_ttl": "400d"})
    acc.load_ladder("cobranca", INVOICE)
    machine = Machine(acc, clock, seed)
    for number in range(250):
        machine.step()
        if number % 10 == 0:
            check_invariants(client, namespace, purged=True)
    machine.drain()
    check_invariants(client, namespace, purged=True)
    assert all(count == 1 for count in machine.world.values()), "an effect happened twice"
    assert acc.ladders("running") == []
    assert acc.health().unsettled == 0
    for run in acc.ladders():
        steps = [h.step for h in run.timeline if h.event in ("step", "skipped")]
        assert steps == [step["name"] for step in INVOICE["steps"][: len(steps)]]


def together(*works: Callable[[], object]) -> None:
    """Runs them at the same moment, in threads; raises what one of them raises."""
    gate = threading.Barrier(len(works))
    with ThreadPoolExecutor(len(works)) as pool:
        for done in [pool.submit(lambda work=work: (gate.wait(), work())) for work in works]:  # type: ignore[misc]
            done.result()


@pytest.mark.parametrize("start_id", [None, "F-1"])
def test_of_starts_that_race_one_starts(live: Accumulator, make_client: MakeClient, start_id: str | None) -> None:
    live.load_policy("fatura", {"inactivity": "10s"})
    live.load_ladder("cobranca", INVOICE)
    due = datetime.now(UTC) + timedelta(days=9)
    clients = [Accumulator(make_client(), namespace=live.operations.namespace) for _ in range(4)]
    for number in range(10):
        answers: list[LadderStarted] = []

        def start(acc: Accumulator, key: str = f"t:fatura:{number}", into: list[LadderStarted] = answers) -> None:
            into.append(acc.start_ladder("cobranca", key, due, start_id=start_id))

        together(*(partial(start, acc) for acc in clients))
        assert Counter(answer.outcome for answer in answers) == {"started": 1, "there": 3}
        assert len({answer.ladder_id for answer in answers}) == 1


def test_no_start_that_races_the_payment_goes_on(live: Accumulator, make_client: MakeClient) -> None:
    live.load_policy("fatura", {"inactivity": "10s"})
    live.load_ladder("cobranca", INVOICE)
    due = datetime.now(UTC) - timedelta(days=1)
    one, two = (Accumulator(make_client(), namespace=live.operations.namespace) for _ in range(2))
    for number in range(40):
        key = f"t:fatura:{number}"
        together(
            partial(one.start_ladder, "cobranca", key, due), partial(two.push, event(f"P{number}", key, kind="pago"))
        )
        [run] = live.ladders(bucket_key=key)
        assert (run.state, run.by_event) == ("cancelled", f"P{number}")
    # Whatever was emitted before it came.
    assert all(h.state == "discarded" for run in live.ladders() for h in live.ladder(run.ladder_id).timeline if h.step)  # type: ignore[union-attr]


def test_a_thousand_due_at_once_are_a_few_short_scripts(ready: Accumulator, clock: VirtualClock) -> None:
    for number in range(1000):
        ready.start_ladder("cobranca", f"t:fatura:{number}", in_days(clock, 4))
    clock.advance("1d", worker=False)
    handled = [ready.store.perform(ready.operations.tick(p, 100)).handled for _ in range(4) for p in range(4)]
    assert max(handled) == 100
    assert ready.counters()["ladder:step"] == sum(handled) == 1000
    assert {run.emitted for run in ready.ladders("running")} == {1}


# --- what it costs ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("args", [{"amount": 1250.5}, {"amount": 1250.5, "name": "Maria " * 12, "link": "x" * 40}])
@pytest.mark.parametrize("tail", ["1234-5678", "550e8400-e29b-41d4-a716-446655440000:parcela-3-de-12:2026"])
def test_a_running_ladder_is_small(ready: Accumulator, clock: VirtualClock, args: dict[str, Any], tail: str) -> None:
    client, ops = ready.store.client, ready.operations

    def used() -> int:
        names = list(client.scan_iter(match=f"{ops.namespace}:{{*", count=1000))
        return sum(int(client.memory_usage(name, samples=0) or 0) for name in names)

    ready.start_ladder("cobranca", "t:fatura:0000-0000-0000", in_days(clock, 9), args)
    before = used()
    for number in range(200):
        ready.start_ladder("cobranca", f"t:fatura:{number:04}-{tail}", in_days(clock, 9), args)
    assert (used() - before) / 200 <= 1200


def test_a_ladder_that_waits_costs_no_timer(ready: Accumulator, clock: VirtualClock) -> None:
    started = ready.start_ladder("cobranca", KEY, in_days(clock, 300))
    clock.advance("296d")
    counted = ready.counters()
    ops = ready.operations
    due = [d for d in ready.store.perform(ops.next_due()) if d is not None]
    assert due == [clock.now + DAY]
    assert ready.store.client.zcard(keys.timers(ops.prefix_of(KEY))) == 1
    assert "ladder:step" not in counted
    assert ready.ladder(started.ladder_id).emitted == 0  # type: ignore[union-attr]


def test_an_ended_ladder_goes_after_its_metadata_ttl(make_client: MakeClient, namespace: str) -> None:
    client, clock = make_client(), VirtualClock()
    acc = clock.attach(Accumulator(client, namespace=namespace, partitions=1, clock=clock))
    acc.load_policy("fatura", {"inactivity": "10s", "sink": "direct", "payload_ttl": "1d", "metadata_ttl": "4d",
                               "dedupe_ttl": "1d"})  # fmt: skip
    acc.load_ladder("cobranca", INVOICE)
    step_handler("cobranca")(lambda ctx: ctx.once("mail", lambda key: None))
    accumulator.handlers.handler("fatura")(lambda ctx: None)
    warm = acc.start_ladder("cobranca", "t:fatura:0", in_days(clock, 3), {"text": "x" * 100})
    acc.cancel_ladder(warm.ladder_id, "over")

    def run() -> None:
        while taken := acc.store.perform(acc.operations.take(0, "direct", 10, 30_000)):
            for one in taken:
                run_attempt(acc, one.window_id, one.attempt)

    run()
    acc.push(event("P", KEY, clock, kind="pago"))
    acc.start_ladder("cobranca", KEY, in_days(clock, 3), {"text": "x" * 100}, start_id="A", ignore_earlier=True)
    acc.start_ladder("cobranca", KEY, in_days(clock, -40), {"text": "x" * 100}, ignore_earlier=True)
    run()
    clock.advance("6d")
    run()
    clock.advance("14d")
    run()
    assert [run.start_id for run in acc.ladders()] == ["A"]  # it ended two days ago, the others more than four
    check_invariants(client, namespace, purged=True)
    clock.advance("60d")
    assert acc.ladders() == []
    left = {name.decode().partition("}:")[2] for name in client.scan_iter(match=f"{namespace}:{{*")}
    assert left == {"policy:fatura", "ladderdef:cobranca", "watched", "stats"}


def test_what_nobody_took_leaves_no_key(make_client: MakeClient, namespace: str) -> None:
    client, clock = make_client(), VirtualClock()
    acc = clock.attach(Accumulator(client, namespace=namespace, partitions=1, clock=clock))
    acc.load_policy("fatura", {"inactivity": "10s", "sink": "direct", "max_event_bytes": 1})
    acc.load_ladder("cobranca", INVOICE | {"final_wait": "0s"})
    refused = event("P", KEY, clock, kind="pago", payload="xx")

    def left() -> set[str]:
        return {name.decode().partition("}:")[2] for name in client.scan_iter(match=f"{namespace}:{{*")}

    acc.push(refused)
    for days in (3, -40):  # one that escalated is called off too, and says nothing more
        acc.start_ladder("cobranca", KEY, in_days(clock, days), start_id=str(days))
    base = {"policy:fatura", "ladderdef:cobranca", "watched", "stats", "audit"}
    acc.push(refused)
    assert {"ready:direct:t", "tenants:direct"} <= left() - base
    acc.cancel_ladder((KEY, "cobranca", "3"), "x")
    [taken] = acc.store.perform(acc.operations.take(0, "direct", 1, 30_000))
    assert run_attempt(acc, taken.window_id, taken.attempt) == "confirmed"
    acc.start_ladder("cobranca", "u:fatura:1", in_days(clock, -40))
    acc.push(refused | {"bucket_key": "u:fatura:1"})
    check_invariants(client, namespace)
    clock.advance("60d")
    check_invariants(client, namespace, purged=True)
    assert acc.ladders() == []
    assert left() == base


# --- as people meet it ------------------------------------------------------------------------------------------------


def test_the_command_line_shows_starts_and_moves_them(
    live: Accumulator, program: Program, server: EmbeddedServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("ACCUMULATOR_REDIS_URL", server.url)
    config = tmp_path / "c.yaml"
    config.write_text(json.dumps({"policies": {"fatura": {"inactivity": "10s"}}, "ladders": {"cobranca": INVOICE}}))
    monkeypatch.setenv("ACCUMULATOR_CONFIG", str(config))
    assert program("policy", "check", config).out.endswith("ladder cobranca: good (antes, no_dia, depois, ultima)\n")
    live.load_policy("fatura", {"inactivity": "10s"})
    assert "no ladder was started" in program("ladders").out
    assert json.loads(program("ladder", "load", "--json").out)["outcome"] == "new"
    anchor = (datetime.now(UTC) + timedelta(days=40)).isoformat()
    start = ("ladder", "start", "cobranca", KEY, "--anchor", anchor, "--arg", "amount=12.5", "--arg", "who=ana")
    assert "t:fatura:1: cobranca started; it is running" in program(*start).out
    again = json.loads(program(*start, "--arg", "amount=13", "--json").out)
    assert (again["outcome"], again["differs"]) == ("there", True)
    run = json.loads(program("ladders", "--state", "running", "--json").out)
    assert (run["args"], run["next"]["step"]) == ({"amount": 12.5, "who": "ana"}, "antes")
    shown = program("ladder", "show", KEY).out
    assert "to come  ultima" in shown
    assert "in 36d" in shown or "in 37d" in shown
    later = (datetime.now(UTC) + timedelta(days=50)).isoformat()
    for command, said in (
        (("pause", KEY), f"{KEY}: paused\n"),
        (("pause", KEY), "was so before"),
        (("reschedule", KEY, "--anchor", later), "rescheduled; it is paused"),
        (("resume", KEY), "resumed; it is running"),
        (("cancel", again["ladder_id"], "--reason", "cash"), ": cancelled\n"),
    ):
        shown_ = program("ladder", *command)
        assert (shown_.code, said in shown_.out) == (0, True), shown_
    assert program("ladder", "resume", KEY).code == 1
    assert program("ladder", "pause", "0" * 20).code == 1
    assert program("ladder", "show", "t:fatura:9").code == 1
    assert program("ladder", "start", "nope", KEY).code == 2
    assert program("ladder", "start", "cobranca", KEY, "--anchor", "soon").code == 2
    assert program("ladder", "start", "cobranca", KEY, "--anchor", anchor, "--arg", "x").code == 2
    assert program("ladder", "show", "zzz").err == "accumulator: ladder_id: is none of this namespace\n"
    assert "because    cash" in program("ladder", "show", again["ladder_id"]).out
    # Of several, the one that runs is meant; where more than one does, it has to be named.
    assert "started" in program(*start, "--start-id", "F-1").out
    assert "was so before" not in program("ladder", "pause", KEY).out
    assert program("ladder", "resume", KEY, "--start-id", "F-1").code == 0
    assert "started" in program(*start, "--start-id", "F-2").out
    several = program("ladder", "pause", KEY)
    assert several.code == 2
    assert "by name and start id: cobranca F-1, cobranca F-2. Say which with --ladder and --start-id" in several.err
    rows = [line.split() for line in program("ladders", "--state", "running").out.splitlines()[1:]]
    assert sorted(row[5] for row in rows) == ["F-1", "F-2"]
    for options in (("--start-id", "F-2"), ("--start-id", "F-2", "--ladder", "cobranca")):
        assert [run["start_id"] for run in program("ladder", "show", KEY, *options, "--json").json] == ["F-2"]
    assert [run["start_id"] for run in program("ladder", "show", KEY, "--start-id", "", "--json").json] == [None]
    assert program("ladder", "show", KEY, "--ladder", "nope").code == 1
    assert program("ladder", "show", again["ladder_id"], "--start-id", "F-2").code == 2
    assert "started" in program(*start).out
    assert "cobranca without one. Say which" in program("ladder", "pause", KEY).err
    assert program("ladder", "cancel", KEY, "--start-id", "", "--reason", "x").code == 0
    assert program("ladder", "cancel", KEY, "--start-id", "F-2", "--reason", "x").code == 0
    assert program("ladder", "cancel", KEY, "--ladder", "cobranca", "--reason", "x").code == 0
    assert program("ladder", "pause", KEY, "--start-id", "F-9").out == f"{KEY}: there is no such ladder\n"
    assert "no ladder is escalated" in program("ladders", "--state", "escalated").out
    emission = live.ladder(again["ladder_id"]).timeline[-1].emission_id  # type: ignore[union-attr]
    assert "emitted  cancelled" in program("timeline", emission or "").out
    assert json.loads(program("timeline", emission or "", "--json").out)["event"] == "cancelled"


def test_steps_that_a_condition_left_out_are_shown(
    live: Accumulator, program: Program, server: EmbeddedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ACCUMULATOR_REDIS_URL", server.url)
    steps = [{"name": "mail", "offset": "1d"}, {"name": "call", "offset": "2d", "when": above(500)}]
    live.load_policy("fatura", {"inactivity": "10s"})
    live.load_ladder("dun", {"steps": steps, "escalate": True, "skip_to_escalate": above(10_000)})
    started = {n: live.start_ladder("dun", f"t:fatura:{n}", datetime.now(UTC), {"n": n}) for n in (1, 501, 10_001)}
    live.load_ladder("dun", {"steps": [{"name": "other", "offset": "1d", "when": above(10**6)}]})  # not theirs
    shown = {n: program("ladder", "show", one.ladder_id, "--json").json[0]["left_out"] for n, one in started.items()}
    skipped = "skip_to_escalate holds: n gt 10000"
    assert shown == {1: {"call": "when does not hold: n gt 500"}, 501: {}, 10_001: {"mail": skipped, "call": skipped}}
    rows = [line.split() for line in program("ladder", "show", started[1].ladder_id).out.splitlines()]
    assert ["left", "out", "call", "when", "does", "not", "hold:", "n", "gt", "500"] in rows


def above(value: int) -> dict[str, Any]:
    return {"arg": "n", "op": "gt", "value": value}


def test_a_wrong_ladder_is_refused_at_load(program: Program, tmp_path: Path) -> None:
    config = tmp_path / "c.yaml"
    config.write_text("ladders: {a: {steps: [{name: s}]}, b: {steps: []}}\npolicies: {f: {inactivity: 1s}}\n")
    shown = program("policy", "check", config)
    assert shown.code == 1
    assert "ladder a: s: offset is required" in shown.err
    assert "ladder b: steps: must list" in shown.err
    with pytest.raises(InvalidLadder, match="offset is required"):
        Config.load(config)


def test_a_worker_installs_it_and_runs_its_steps(live: Accumulator, server: EmbeddedServer, namespace: str) -> None:
    sent: list[str] = []
    step_handler("cobranca")(lambda ctx: sent.append(ctx.step))
    on_escalated("cobranca")(lambda ctx: sent.append(ctx.step))
    ladder = {
        "anchor": "start",
        "steps": [{"name": "a", "offset": "0s"}, {"name": "b", "offset": "300ms"}],
        "final_wait": "200ms",
        "escalate": True,
    }
    config = Config(policies={"fatura": {"inactivity": "1s", "sink": "direct"}}, ladders={"cobranca": ladder})
    settings = Settings(redis_url=SecretStr(server.url), namespace=namespace, log_level="critical")
    worker = Worker(settings, config, roles=["closer", "runner"])
    thread = threading.Thread(target=worker.run)
    thread.start()
    try:
        wait_until(lambda: live.ladder_definitions(), what="the worker has installed it")
        live.start_ladder("cobranca", KEY)
        wait_until(lambda: sent == ["a", "b", "escalate"], what="all was sent, in order and in time")
        wait_until(lambda: live.health().unsettled == 0, what="all is settled")
    finally:
        worker.stop()
        thread.join(10)
    assert [run.state for run in live.ladders()] == ["escalated"]


def test_a_webhook_gets_what_was_emitted(ready: Accumulator, clock: VirtualClock) -> None:
    started = ready.start_ladder("cobranca", KEY, in_days(clock, 3), {"amount": 7})
    run = ready.ladder(started.ladder_id)
    assert run is not None
    emission = ready.emission(run.timeline[-1].emission_id or "")
    assert emission is not None
    body = json.loads(emission_body(emission))
    assert (body["ladder"], body["step"], body["attributes"], body["args"]) == (
        "cobranca", "antes", {"channel": "email"}, {"amount": 7}
    )  # fmt: skip


def test_ladders_of_a_hundred_steps_that_are_due_at_once_hold_no_call_up(
    make_client: MakeClient, namespace: str, clock: VirtualClock
) -> None:
    """As after a weekend without a worker: what a call does is counted by what it writes."""
    acc = clock.attach(Accumulator(make_client(), namespace=namespace, partitions=1, clock=clock))
    acc.load_policy("fatura", {"inactivity": "10s", "sink": "direct"})
    acc.load_ladder("cobranca", {"steps": [{"name": f"s{n}", "offset": "1d"} for n in range(100)]})
    for n in range(20):
        acc.start_ladder("cobranca", f"t:fatura:{n}", clock.instant)
    clock.advance("2d", worker=False)
    handled: list[int] = []
    while not handled or handled[-1]:
        tick = acc.store.perform(acc.operations.tick(0, 200))
        assert tick.failure is None
        handled.append(tick.handled)
        assert (tick.next_due is not None and tick.next_due <= clock.now) == (sum(handled) < 20)
    assert handled == [10, 10, 0]
    assert acc.counters()["ladder:step"] == 2000
    check_invariants(make_client(), namespace)


def test_thousands_that_were_called_off_hold_no_taking_up(
    make_client: MakeClient, namespace: str, clock: VirtualClock
) -> None:
    """They stand in the list of what is ready still; a call passes a thousand of them."""
    client = make_client()
    acc = clock.attach(Accumulator(client, namespace=namespace, partitions=1, clock=clock))
    acc.load_policy("fatura", {"inactivity": "10s", "sink": "direct"})
    acc.load_ladder("cobranca", {"steps": [{"name": "s", "offset": "1d"}], "final_wait": "9d", "cancel_on": ["pago"]})
    for n in range(2500):
        acc.start_ladder("cobranca", f"t:fatura:{n}", clock.instant)
    clock.advance("1d")
    acc.push_many([event("P", f"t:fatura:{n}", clock, kind="pago") for n in range(2500)])
    acc.flush("t:fatura:1")
    ready = keys.ready(acc.operations.prefixes[0], "direct", "t")
    standing = [client.llen(ready)]
    taken: list[Taken] = []
    while not taken:
        taken = acc.store.perform(acc.operations.take(0, "direct", 1, 30_000))
        standing.append(client.llen(ready))
    assert standing[:3] == [5001, 4001, 3001]
    [emission] = [acc.store.perform(acc.operations.emission(one.window_id)) for one in taken]
    assert emission is not None
    assert emission.event == "cancelled"
