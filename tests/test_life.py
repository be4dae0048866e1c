"""The life of a manifest after its window closed (SPEC, section 6): states, fencing, turns, effects, stages."""

from __future__ import annotations

import asyncio
import random
from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import Any

import pytest
import redis

import accumulator.handlers
from accumulator import runner
from accumulator.attempts import Ask, Grant, Settlement
from accumulator.context import Context
from accumulator.errors import AccumulatorError, InternalError, InvalidInput, ServerUnavailable
from accumulator.handlers import (
    PermanentError,
    RetryLater,
    Superseded,
    find_handler,
    handler,
)
from accumulator.manifest import SETTLED, TOGETHER, Manifest
from accumulator.runner import Attempt, _Slot, begin, run_attempt, settle
from accumulator.store import Operation
from tests.conftest import MakeClient, StartServer, event
from tests.life import DAY, KEY, LEASE, OTHER, TOKEN, WATCH, Life

SECRET = "sk-4242-4242-secret"


@pytest.fixture(autouse=True)
def registry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is registered."""
    monkeypatch.setattr(accumulator.handlers, "_registry", {})
    monkeypatch.setattr(accumulator.handlers, "_names", {})


@pytest.fixture
def life(make_client: MakeClient, namespace: str) -> Iterator[Life]:
    life = Life(make_client(), namespace)
    yield life
    life.check()


# --- states -----------------------------------------------------------------------------------------------------------

STATES = [
    "closed", "dispatched", "processing", "retrying", "awaiting_approval", "uncertain", "dead", "reconciling",
    "confirmed", "refused", "discarded", "superseded", "empty",
]  # fmt: skip
TROUBLED = {"dead", "uncertain", "reconciling"}


def bring(life: Life, state: str) -> str:
    """A manifest in that state, under TOKEN where it was begun."""
    if state == "empty":
        return life.close_empty()
    window_id = life.close("e1", "e2")
    if state == "closed":
        return window_id
    if state == "dispatched":
        assert life.taken() == [window_id]
        return window_id
    life.begun(window_id)
    if state == "retrying":
        assert life.settle(window_id, "failed", delay=1_000) == "done"
    elif state in ("refused", "discarded"):
        life.settle(window_id, "awaiting_approval", delay=1_000)
        assert life.decide(window_id, "refuse" if state == "refused" else "discard") == ("done", state)
    elif state == "superseded":
        life.push("e3")
        assert life.settle(window_id, "superseded") == "done"
        newer = life.close()
        life.begun(newer, OTHER)
        assert life.settle(newer, "confirmed", token=OTHER) == "done"
    elif state != "processing":
        assert life.settle(window_id, state, delay=1_000) == "done"
    return window_id


@pytest.mark.parametrize("state", STATES)
def test_what_is_allowed_in_a_state(life: Life, state: str) -> None:
    life.policy()
    window_id = bring(life, state)
    life.check()
    before = life.manifest(window_id)
    assert before.state == state
    assert before.settled == (state in SETTLED)
    attempt = before.attempt

    if state != "dispatched":
        refused = life.begin(window_id, attempt, OTHER)
        assert (refused.state, refused.manifest) == (state, None)
    for wrong in (0, attempt + 1):
        assert life.begin(window_id, wrong, OTHER).manifest is None
    if state != "processing":
        told = "done" if state not in ("closed", "dispatched", "empty") else "refused"
        assert life.settle(window_id, "dead") == told  # the token that ended it hears the same again
        assert life.effect(window_id, "pay", "begin") == "refused"
        assert not life.do(life.ops.save_stage(window_id, TOKEN, "load", "1"))
        if before.events:
            assert life.do(life.ops.set_aside(window_id, TOKEN, before.events[0].event, "odd")) == "refused"
    assert life.settle(window_id, "confirmed", token=OTHER) == "refused"
    assert life.effect(window_id, "pay", "begin", token=OTHER) == "refused"
    assert not life.do(life.ops.save_stage(window_id, OTHER, "load", "1"))
    assert life.manifest(window_id) == before
    assert life.do(life.ops.effects(window_id)) == []
    assert life.do(life.ops.stages(window_id)) == {}
    assert life.acc.reconciliation() == []

    wants = {
        "approve": "retrying" if state == "awaiting_approval" else None,
        "refuse": "refused" if state == "awaiting_approval" else None,
        "replay": "retrying" if state in TROUBLED else None,
        "confirm": "confirmed" if state in TROUBLED else None,
        "discard": "discarded" if state not in SETTLED | {"processing"} else None,
    }
    refused_ones = [decision for decision, to in wants.items() if to is None]
    for decision in refused_ones:
        assert life.decide(window_id, decision) == ("wrong_state", state)
    assert life.manifest(window_id) == before
    life.check()


@pytest.mark.parametrize(
    ("state", "decision", "to"),
    [
        ("awaiting_approval", "approve", "retrying"),
        ("awaiting_approval", "refuse", "refused"),
        ("awaiting_approval", "discard", "discarded"),
        *((state, "replay", "retrying") for state in sorted(TROUBLED)),
        *((state, "confirm", "confirmed") for state in sorted(TROUBLED)),
        *((state, "discard", "discarded") for state in sorted(TROUBLED)),
        *((state, "discard", "discarded") for state in ("closed", "dispatched", "retrying")),
    ],
)
def test_what_a_person_decides(life: Life, state: str, decision: str, to: str) -> None:
    life.policy()
    window_id = bring(life, state)
    assert life.do(life.ops.attention()) == ([window_id] if state in TROUBLED | {"awaiting_approval"} else [])
    life.tick(500)
    assert life.decide(window_id, decision) == ("done", to)
    assert life.story(window_id)[-1] == (500, to, 0 if state == "closed" else 1, f"{decision} by ana: seen")
    assert life.do(life.ops.attention()) == []
    life.check()
    if to == "retrying":
        [taken] = life.take()
        assert (taken.window_id, taken.attempt) == (window_id, 2)
        manifest = life.begin(window_id, 2, OTHER).manifest
        assert manifest is not None
        assert manifest.failures == 0
        assert manifest.approved_by == ("ana" if decision == "approve" else None)
    else:
        assert life.taken() == []


# --- giving up ---


@pytest.mark.parametrize("state", ["closed", "dispatched", "lost", "retrying", "ready again"])
@pytest.mark.parametrize("ordered", [True, False])
def test_what_is_given_up_lets_the_next_one_go(life: Life, state: str, ordered: bool) -> None:
    life.policy(ordered=ordered)
    first = life.close("e1")
    if state != "closed":
        assert life.taken() == [first]
    if state in ("retrying", "ready again"):
        life.begin(first)
        life.settle(first, "failed", delay=1_000)
    second = life.close("e2")
    if state == "lost":
        life.tick(WATCH)  # it stands in the list again, and its job may come all the same
    elif state == "ready again":
        life.tick(1_000)
    life.check()
    assert life.decide(first, "discard") == ("done", "discarded")
    life.check()
    assert life.do(life.ops.in_flight()) == [{}]
    assert not life.begin(first, life.manifest(first).attempt, OTHER).manifest
    life.tick(WATCH * 10)
    assert life.taken() == [second]
    life.begin(second)
    assert life.settle(second, "confirmed") == "done"
    assert life.states() == ["discarded", "confirmed"]
    life.pass_days(18)
    assert life.acc.manifests(KEY) == []


def test_what_is_at_work_is_not_given_up(life: Life) -> None:
    life.policy()
    first, second = life.close("e1"), life.close("e2")
    life.begun(first)
    assert life.decide(first, "discard") == ("wrong_state", "processing")
    assert life.effect(first, "pay", "begin") == "begun"
    assert life.decide(second, "discard") == ("done", "discarded")
    life.clock.advance(LEASE - 1, worker=False)
    assert life.decide(first, "discard") == ("wrong_state", "processing")
    life.clock.advance(1, worker=False)  # no worker is there to say that its lease has ended
    assert life.decide(first, "discard") == ("done", "discarded")
    assert life.do(life.ops.in_flight()) == [{}]
    assert life.effect(first, "pay", "confirm") == "refused"
    assert life.settle(first, "confirmed") == "refused"
    assert [e.state for e in life.do(life.ops.effects(first))] == ["begun"]  # the ledger keeps what is in doubt
    assert life.taken() == []


def test_what_waits_behind_another_is_given_up(life: Life) -> None:
    life.policy()
    windows = [life.close(f"e{n}") for n in range(4)]
    life.begun(windows[0])
    assert life.decide(windows[2], "discard") == ("done", "discarded")
    assert life.settle(windows[0], "dead") == "done"
    life.begun(windows[1], OTHER)
    assert life.decide(windows[0], "replay") == ("done", "retrying")
    life.check()
    assert life.decide(windows[0], "discard") == ("done", "discarded")  # it was waiting for its turn
    life.check()
    assert life.settle(windows[1], "confirmed", token=OTHER) == "done"
    assert life.taken() == [windows[3]]


@pytest.mark.parametrize("state", ["dispatched", "retrying"])
def test_those_handed_over_together_are_given_up_together(life: Life, state: str) -> None:
    life.policy(handover="together")
    windows = [life.close(f"e{n}") for n in range(3)]
    assert life.taken() == windows[2:]
    if state == "retrying":
        life.begin(windows[2])
        life.settle(windows[2], "failed", delay=1_000)
    fourth = life.close("e4")
    assert life.decide(windows[0], "discard") == ("done", "discarded")
    life.check()
    assert life.states() == ["discarded"] * 3 + ["closed"]
    assert life.taken() == [fourth]


@pytest.mark.parametrize("ordered", [True, False])
@pytest.mark.parametrize("opens", [True, False])
def test_those_that_gave_way_to_what_is_given_up_are_handed_over(life: Life, ordered: bool, opens: bool) -> None:
    life.policy(ordered=ordered)
    first = life.close("e1")
    life.begun(first)
    second = life.close("e2")
    assert life.settle(first, "superseded") == "done"
    if opens:
        life.push("e3")
    assert life.decide(second, "discard") == ("done", "discarded")
    life.check()
    if opens:
        assert life.taken() == []
        third = life.close()
        manifest = life.begun(third, OTHER)
        assert manifest.joined == (first,)
    else:
        manifest = life.begun(first, OTHER)
        assert manifest.joined == ()
    life.check()
    assert life.settle(manifest.window_id, "confirmed", token=OTHER) == "done"
    assert life.states()[:2] == ["superseded" if opens else "confirmed", "discarded"]


@pytest.mark.parametrize("ordered", [True, False])
def test_what_gave_way_is_given_up(life: Life, ordered: bool) -> None:
    life.policy(ordered=ordered)
    windows = []
    for n in range(3):
        windows.append(life.close("e0") if n == 0 else life.close())
        life.begun(windows[-1])
        life.push(f"e{n + 1}")
        assert life.settle(windows[-1], "superseded") == "done"
    assert life.decide(windows[1], "discard") == ("done", "discarded")
    life.check()
    last = life.close()
    manifest = life.begun(last)
    assert manifest.joined == (windows[0], windows[2])
    assert life.settle(last, "superseded") == "no_newer_window"
    assert life.settle(last, "confirmed") == "done"
    assert life.states() == ["superseded", "discarded", "superseded", "confirmed"]
    # The only one that gave way, whose turn it is after all: nothing is left of it.
    life.close("x1", key="t:f:2")
    [lonely] = life.taken()
    life.begin(lonely)
    life.push("x2", "t:f:2")
    life.settle(lonely, "superseded")
    life.acc.retract("t:f:2", "x2")
    life.close(key="t:f:2")
    assert life.ready() == {lonely: 1}
    assert life.decide(lonely, "discard") == ("done", "discarded")
    life.check()
    assert life.taken() == []


def test_all_that_match_are_given_up(life: Life) -> None:
    life.policy("gone")
    life.policy("f")
    life.policy("pair", handover="together")
    gone = [life.close("e", key=f"{tenant}:gone:{n}") for tenant in "ab" for n in range(40)]
    life.tick(3_600_000)
    young = life.close("e", key="a:gone:young")
    kept = life.close("e", key="a:f:1")
    pair = [life.close(f"e{n}", key="a:pair:1") for n in range(2)]
    [busy, lost, *_] = life.taken(5)
    life.begin(busy)
    decide = life.ops.decide_where
    with pytest.raises(InvalidInput, match="filter: is missing"):
        life.do(decide("discard", "ana", "seen"))
    with pytest.raises(InvalidInput, match="state: must be one of closed, dispatched"):
        life.do(decide("discard", "ana", "seen", "confirmed"))
    with pytest.raises(InvalidInput, match="decision: must be one of discard, replay"):
        life.do(decide("approve", "ana", "seen", flow="gone"))
    assert life.do(decide("discard", "ana", "seen", flow="gone", tenant="c")) == {"done": 0, "wrong_state": 0}
    assert life.do(decide("replay", "ana", "seen", flow="gone")) == {"done": 0, "wrong_state": 0}
    told = life.do(decide("discard", "ana", "seen", state="dispatched", flow="gone"))
    assert told == {"done": 4, "wrong_state": 0}
    assert life.state(lost) == "discarded"
    told = life.do(decide("discard", "ana", "seen", flow="gone", tenant="a", older_than=3_600_000))
    assert life.state(young) == "closed"
    rest = life.do(decide("discard", "ana", "seen", flow="gone"))
    assert (told["done"] + rest["done"], told["wrong_state"], rest["wrong_state"]) == (81 - 4 - 1, 1, 1)
    life.check()
    assert [w for w in [*gone, young] if life.state(w) != "discarded"] == [busy]
    assert life.story(young)[-1][1:] == ("discarded", 0, "discard by ana: seen")
    # What is handed over together is decided together, and counted one by one.
    assert sorted(life.taken()) == sorted([kept, pair[1]])
    assert life.do(decide("discard", "ana", "seen", flow="pair", older_than=0)) == {"done": 2, "wrong_state": 0}
    life.begin(kept)
    life.effect(kept, "pay", "begin")
    life.settle(kept, "dead")
    assert life.do(decide("replay", "ana", "seen", state="dead", effects="done")) == {"done": 1, "wrong_state": 0}
    assert [e.state for e in life.do(life.ops.effects(kept))] == ["confirmed"]
    life.check()


def test_a_decision_sent_twice_is_made_once(life: Life) -> None:
    life.policy()
    window_id = bring(life, "dead")
    life.ops._nonce = lambda length: "a" * length
    assert life.decide(window_id, "replay") == ("done", "retrying")
    assert life.decide(window_id, "replay") == ("done", "retrying")
    steps = len(life.story(window_id))
    manifest = life.begun(window_id, OTHER)
    assert life.settle(window_id, "dead", token=OTHER) == "done"
    assert life.decide(window_id, "replay") == ("done", "dead")  # the same one, come late: it has been made
    assert len(life.story(window_id)) == steps + 3
    life.ops._nonce = lambda length: "b" * length
    assert life.decide(window_id, "replay") == ("done", "retrying")
    assert manifest.attempt == 2


def test_nothing_of_a_manifest_that_there_is_not(life: Life) -> None:
    life.policy()
    window_id = life.close("e1")
    missing = window_id[:-2] + ("00" if window_id[-2:] != "00" else "11")
    assert life.begin(missing) == ("", None)
    assert life.settle(missing, "confirmed") == "refused"
    assert life.effect(missing, "pay", "begin") == "refused"
    assert life.decide(missing, "replay") == ("missing", "")
    assert life.do(life.ops.owner(missing)) is None
    with pytest.raises(InvalidInput, match="window_id"):
        life.begin("x")


# --- an attempt and its token -----------------------------------------------------------------------------------------


def test_an_attempt_is_granted_once(life: Life) -> None:
    life.policy()
    window_id = life.close("e1", "e2")
    assert life.begin(window_id) == ("closed", None)
    [taken] = life.take()
    assert (taken.window_id, taken.attempt, taken.bucket_key) == (window_id, 1, KEY)
    assert life.begin(window_id, 2) == ("dispatched", None)
    granted = life.begin(window_id)
    assert granted.manifest is not None
    assert [e.event.event_id for e in granted.manifest.events] == ["e1", "e2"]
    again = life.begin(window_id)  # its answer was lost
    assert again == granted
    assert life.begin(window_id, 1, OTHER) == ("processing", None)
    life.check()
    assert life.settle(window_id, "failed", "ValueError", delay=5_000) == "done"
    assert life.settle(window_id, "failed", "ValueError", delay=5_000) == "done"
    assert life.begin(window_id) == ("retrying", None)
    assert life.manifest(window_id).failures == 1
    life.tick(5_000)
    [taken] = life.take()
    assert taken.attempt == 2
    assert life.begin(window_id, 1) == ("dispatched", None)  # a second job of the first attempt
    assert life.begin(window_id, 2, OTHER).manifest is not None
    assert life.settle(window_id, "failed", "ValueError") == "done"  # that of the first, heard once more
    assert life.state(window_id) == "processing"
    assert life.settle(window_id, "confirmed", token=OTHER) == "done"
    assert life.settle(window_id, "failed", "ValueError") == "refused"
    assert life.settle(window_id, "confirmed", token=OTHER) == "done"
    assert life.state(window_id) == "confirmed"


def test_all_that_a_handler_gets_comes_with_the_grant(life: Life) -> None:
    life.policy()
    window_id = life.close(*(f"e{n}" for n in range(3)), payload={"n": [1, None]}, ref="ref:1")
    granted = life.begun(window_id)
    assert granted == life.manifest(window_id)
    assert [(e.event.payload, e.event.ref) for e in granted.events] == [({"n": [1, None]}, "ref:1")] * 3


def test_a_grant_of_many_events(life: Life) -> None:
    life.policy(max_events=2_500)
    life.acc.push_many([event(f"e{n}", KEY, life.clock) for n in range(2_499)])
    for n in range(2_499, 2_500):
        life.push(f"e{n}")
    [window_id] = life.taken()
    manifest = life.begin(window_id).manifest
    assert manifest is not None
    assert manifest.event_ids == tuple(f"e{n}" for n in range(2_500))
    assert life.settle(window_id, "confirmed", manifest=manifest) == "done"
    assert len(life.manifest(window_id).record) == 2_500


def test_a_lease_is_over_at_its_very_end(life: Life) -> None:
    life.policy()
    first, second = life.close("e1", key="t:f:1"), life.close("e1", key="t:f:2")
    for window_id in (first, second):
        life.begun(window_id)
    life.clock.advance(LEASE - 1, worker=False)
    assert life.effect(second, "pay", "begin") == "begun"
    assert life.settle(first, "confirmed") == "done"
    life.clock.advance(1, worker=False)  # its timer has not been handled yet
    assert life.effect(second, "pay", "confirm") == "refused"
    assert life.settle(second, "confirmed") == "refused"
    assert not life.do(life.ops.save_stage(second, TOKEN, "load", "1"))
    assert life.state(second) == "processing"
    life.tick()
    assert life.state(second) == "retrying"
    assert life.settle(second, "confirmed") == "refused"


def test_a_killed_attempt_is_recorded_as_a_failure(life: Life) -> None:
    life.policy()
    window_id = life.close("e1")
    for attempt in (1, 2, 3):
        assert life.taken() == [window_id]
        life.begin(window_id, attempt, most=3)
        life.tick(LEASE)
        life.check()
        life.tick(1)
    assert life.state(window_id) == "dead"
    assert life.manifest(window_id).failures == 3
    [waiting] = life.do(life.ops.waiting_for_people())
    assert (waiting.cause, (waiting.error or "").split(":")[0]) == ("lease_ended", "LeaseEnded")
    assert [step[1:] for step in life.story(window_id)] == [
        ("dispatched", 1, "taken"), ("processing", 1, "begun"), ("retrying", 1, "lease_ended"),
        ("dispatched", 2, "taken"), ("processing", 2, "begun"), ("retrying", 2, "lease_ended"),
        ("dispatched", 3, "taken"), ("processing", 3, "begun"), ("dead", 3, "lease_ended"),
    ]  # fmt: skip
    assert life.taken() == []


def test_a_killed_attempt_waits_as_one_that_failed(life: Life, monkeypatch: pytest.MonkeyPatch) -> None:
    class Killed(BaseException):
        """The process is gone."""

    @handler("f", max_attempts=6, timeout="20s", backoff="2s", max_backoff="9s")
    def poisonous(_: Context) -> None:
        raise Killed

    monkeypatch.setattr(random, "random", lambda: 1.0)
    life.policy()
    window_id = life.close("e1")
    monkeypatch.setattr(runner, "settle", lambda _: {})
    waited = []
    while life.state(window_id) != "dead":
        [taken] = life.take()
        assert Attempt(life.acc, *taken[:2]).run() is None
        life.tick(30_000)  # its timeout, and what a lease outlasts it
        life.check()
        if life.state(window_id) == "retrying":
            timer = life.client.zscore(f"{life.ops.prefixes[0]}timers", f"m:{window_id}")
            waited.append(int(timer) - life.clock.now)
            life.tick(waited[-1] - 1)
            assert life.taken() == []
            life.tick(1)
    assert waited == [2_001, 4_002, 8_004, 9_001, 9_001]
    assert life.manifest(window_id).failures == 6


def test_the_pauses_of_killed_attempts_are_spread() -> None:
    handler("f", backoff="100ms", max_backoff="1s")(print)
    spread = [find_handler("f").spread() for _ in range(300)]
    assert min(spread) >= (1, 1)
    assert max(spread) <= (100, 1_000)
    assert len(set(spread)) > 30
    assert {round(most / first) for first, most in spread if first > 50} == {10}


def test_a_lease_that_was_given_without_a_pause_has_one_all_the_same(life: Life) -> None:
    """An earlier release, which runs beside this one, gives none."""
    life.policy()
    window_id = life.close("e1")
    life.begun(window_id)
    life.client.hdel(f"{life.ops.prefixes[0]}manifest:{window_id}", "pause")
    life.tick(LEASE)
    life.tick(999)
    assert life.taken() == []
    life.tick(1)
    assert life.taken() == [window_id]


def test_a_timeline(life: Life) -> None:
    life.policy()
    window_id = life.close("e1")
    life.tick(10)
    life.begun(window_id)
    life.tick(20)
    life.settle(window_id, "failed", "ValueError", delay=1_000, error="ValueError: boom")
    assert life.manifest(window_id).error == "ValueError: boom"
    life.tick(999)
    assert life.taken() == []
    life.tick(1)
    life.begun(window_id, OTHER)
    life.settle(window_id, "returned", "Stopped", delay=50, token=OTHER)
    assert life.manifest(window_id).failures == 1
    life.tick(50)
    life.begun(window_id)
    life.settle(window_id, "awaiting_approval", "proposed", delay=5_000)
    life.tick(5_000)
    life.decide(window_id, "approve")
    life.begun(window_id, OTHER)
    life.settle(window_id, "uncertain", "effect", token=OTHER)
    life.tick(7)
    life.decide(window_id, "confirm")
    assert life.story(window_id) == [
        (10, "dispatched", 1, "taken"),
        (10, "processing", 1, "begun"),
        (30, "retrying", 1, "ValueError"),
        (1_030, "dispatched", 2, "taken"),
        (1_030, "processing", 2, "begun"),
        (1_030, "retrying", 2, "Stopped"),
        (1_080, "dispatched", 3, "taken"),
        (1_080, "processing", 3, "begun"),
        (1_080, "awaiting_approval", 3, "proposed"),
        (6_080, "awaiting_approval", 3, "overdue"),
        (6_080, "retrying", 3, "approve by ana: seen"),
        (6_080, "dispatched", 4, "taken"),
        (6_080, "processing", 4, "begun"),
        (6_080, "uncertain", 4, "effect"),
        (6_087, "confirmed", 4, "confirm by ana: seen"),
    ]


def test_a_timeline_of_years_stays_short(life: Life) -> None:
    life.policy(handover="together")
    joined, window_id = life.close("e0"), life.close("e1")
    decided = []
    for n in range(1, 401):
        [taken] = life.take()
        assert life.begin(window_id, taken.attempt, most=1_000).manifest is not None
        if n in (50, 51, 150):
            life.settle(window_id, "dead", "ValueError")
            life.decide(window_id, "replay")
            decided.append(life.now)
        else:
            life.settle(window_id, "returned", "HandlerMissing", delay=600_000)
            life.tick(600_000)
    for each, spared in (
        (joined, []),
        (window_id, decided),
    ):  # the first 20, the last 100, and what was decided between
        manifest = life.manifest(each)
        assert len(manifest.timeline) + manifest.left_out == 3 * 400 + 3
        assert len(manifest.timeline) == 20 + len(spared) + 100
        story = life.story(each)
        assert [step[2] for step in story[:20]] == [1 + n // 3 for n in range(20)]
        assert [step[0] for step in story[20 : 20 + len(spared)]] == spared
        assert [step[2] for step in story[-6:]] == [399] * 3 + [400] * 3
    assert [cause for *_, cause in life.story(window_id)[20:23]] == ["replay by ana: seen"] * 3
    assert life.client.hlen(f"{life.ops.prefixes[0]}manifest:{window_id}") < 170


def test_a_timeline_is_bounded_also_where_a_program_decides_without_end(life: Life) -> None:
    life.policy()
    window_id = life.close("e1")
    for _ in range(120):
        life.begun(window_id)
        life.settle(window_id, "dead", "ValueError")
        life.decide(window_id, "replay")
    manifest = life.manifest(window_id)
    assert (len(manifest.timeline), manifest.left_out) == (20 + 50 + 100, 120 * 4 - 170)
    assert life.do(life.ops.waiting_for_people()) == []
    life.begun(window_id)
    life.settle(window_id, "dead", "KeyError")
    assert [each.cause for each in life.do(life.ops.waiting_for_people())] == ["KeyError"]


# --- failing ----------------------------------------------------------------------------------------------------------


def test_the_back_off_doubles_up_to_its_most_with_jitter() -> None:
    handler("f", backoff="100ms", max_backoff="1s")(print)
    found = find_handler("f")
    for failures, most in ((1, 100), (2, 200), (3, 400), (4, 800), (5, 1_000), (50, 1_000), (1_000, 1_000)):
        delays = [found.delay(failures) for _ in range(300)]
        assert min(delays) >= 1
        assert max(delays) <= most
        assert len(set(delays)) > 30
        assert max(delays) > most // 2 > min(delays)


def test_a_retry_comes_when_its_back_off_is_over(life: Life, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(random, "randint", lambda low, high: high)

    @handler("f", max_attempts=4, backoff="1s", max_backoff="3s")
    def fail(_: Context) -> None:
        raise ValueError("boom")

    life.policy()
    window_id = life.close("e1")
    for attempt, delay in ((1, 1_000), (2, 2_000), (3, 3_000)):
        [taken] = life.take()
        assert run_attempt(life.acc, *taken[:2]) == "failed"
        assert (taken.attempt, life.state(window_id)) == (attempt, "retrying")
        life.tick(delay - 1)
        assert life.taken() == []
        life.tick(1)
    [taken] = life.take()
    assert run_attempt(life.acc, *taken[:2]) == "failed"
    manifest = life.manifest(window_id)
    assert (manifest.state, manifest.failures, manifest.error) == ("dead", 4, "ValueError: boom")
    life.tick(DAY)
    assert life.taken() == []
    assert life.decide(window_id, "replay") == ("done", "retrying")
    [taken] = life.take()
    assert taken.attempt == 5
    assert run_attempt(life.acc, *taken[:2]) == "failed"
    assert (life.state(window_id), life.manifest(window_id).failures) == ("retrying", 1)


def test_an_error_says_how_it_is_to_be_tried_again(life: Life) -> None:
    class CardExpired(PermanentError):
        pass

    raised: dict[str, Exception] = {"t:f:1": CardExpired("no card"), "t:f:2": RetryLater("10m")}

    @handler("f")
    def fail(ctx: Context) -> None:
        if ctx.attempt == 1:
            raise raised[ctx.bucket_key]

    life.policy()
    permanent, later = life.close("e1", key="t:f:1"), life.close("e1", key="t:f:2")
    for taken in life.take(2):
        run_attempt(life.acc, *taken[:2])
    assert (life.state(permanent), life.manifest(permanent).error) == ("dead", "CardExpired: no card")
    assert life.story(later)[-1][1:] == ("retrying", 1, "RetryLater")
    life.tick(599_999)
    assert life.taken() == []
    life.tick(1)
    [taken] = life.take()
    assert run_attempt(life.acc, *taken[:2]) == "confirmed"
    assert life.manifest(later).failures == 1


class Unspeakable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no")


@pytest.mark.parametrize(
    ("payload", "text", "kept"),
    [
        ({"card": SECRET}, "no stock", "no stock"),
        ({"card": SECRET}, f"bad card {SECRET}", None),
        ({"a": [{"card": SECRET}]}, f"{{'card': '{SECRET}'}}", None),
        ({"card": SECRET}, SECRET[2:], None),  # a part of it
        ("x" * 490 + SECRET, "x" * 490 + SECRET, None),
        ("p" * 5_000, "it says " + "p" * 450, None),  # cut by the handler
        (SECRET.encode(), repr(SECRET.encode()), None),
        (b"\xff\x00\x01secret", repr(b"\xff\x00\x01secret"), None),
        ({"phone": 5511999}, "no such number 5511999", None),
        ({"total": 1234.5}, "1234.5 is too much", None),
        ("José\nda Silva", "not found: José\\nda Silva", None),
        ("José", 'not found: "Jos\\u00e9"', None),
        ({"n": 12, "yes": True, "what": None}, "12 True None", "12 True None"),
        (None, "no stock \ud800", "no stock ?"),
        ({"card": SECRET}, "long " * 200, ("long " * 100)),
    ],
)
def test_an_error_is_kept_without_payload(life: Life, payload: Any, text: str, kept: str | None) -> None:
    @handler("f", max_attempts=1)
    def fail(_: Context) -> None:
        raise ValueError(text)

    life.policy()
    window_id = life.close("e1", payload=payload)
    [taken] = life.take()
    run_attempt(life.acc, *taken[:2])
    assert life.manifest(window_id).error == f"ValueError: {kept or '(its message quotes the payload)'}"


def test_an_error_that_has_no_text(life: Life) -> None:
    @handler("f", max_attempts=1)
    async def fail(_: Context) -> None:
        raise Unspeakable

    life.policy()
    window_id = life.close("e1")
    [taken] = life.take()
    assert run_attempt(life.acc, *taken[:2]) == "failed"
    assert (life.state(window_id), life.manifest(window_id).error) == (
        "dead", "Unspeakable: (its message can't be read)",
    )  # fmt: skip


@pytest.mark.parametrize("error", [asyncio.CancelledError, SystemExit, KeyboardInterrupt])
def test_whatever_ends_a_handler_is_a_failure(life: Life, error: type[BaseException]) -> None:
    @handler("f")
    def fail(_: Context) -> None:
        raise error

    life.policy()
    window_id = life.close("e1")
    [taken] = life.take()
    assert run_attempt(life.acc, *taken[:2]) == "failed"
    assert life.story(window_id)[-1][1:] == ("retrying", 1, error.__name__)


# --- lost jobs --------------------------------------------------------------------------------------------------------


def test_a_lost_job_is_handed_out_again_at_doubling_distances(life: Life) -> None:
    life.policy()
    window_id = life.close("e1")
    assert life.taken() == [window_id]
    distance = WATCH
    for n in range(14):
        life.tick(distance - 1)
        assert life.taken() == []
        life.tick(1)
        life.check()
        [taken] = life.take()
        assert (taken.window_id, taken.attempt) == (window_id, 1)
        distance = min(distance * 2, WATCH * 1024)
        assert distance == WATCH * 2 ** min(n + 1, 10)
    # Waiting used no lease and no failure up: the first of the jobs that comes begins, and has all of its lease.
    manifest = life.begin(window_id).manifest
    assert manifest is not None
    assert (manifest.attempt, manifest.failures) == (1, 0)
    life.tick(LEASE - 1)
    assert life.settle(window_id, "confirmed") == "done"
    assert [cause for _, _, _, cause in life.story(window_id)].count("taken_again") == 14


def test_a_job_that_was_thought_lost_begins_and_is_handed_out_no_more(life: Life) -> None:
    life.policy()
    window_id = life.close("e1")
    assert life.taken() == [window_id]
    life.tick(WATCH)
    assert life.ready() == {window_id: 1}
    assert life.do(life.ops.in_flight()) == [{}]
    assert life.begin(window_id).manifest is not None
    life.check()
    assert life.ready() == {}
    assert life.do(life.ops.in_flight()) == [{"t": 1}]
    assert life.settle(window_id, "failed", delay=3_600_000) == "done"
    life.tick(1_000)
    assert life.taken() == []  # its back-off holds
    life.tick(3_600_000)
    assert life.taken() == [window_id]


def test_a_lost_job_of_a_tenant_at_its_limit_is_handed_out_again(life: Life) -> None:
    life.policy()
    windows = [life.close("e1", key=f"t:f:{n}") for n in range(3)]
    assert life.taken(limits={None: 1}) == windows[:1]
    assert life.taken(limits={None: 1}) == []
    life.tick(WATCH)
    assert life.taken(limits={None: 1}) == windows[:1]  # itself, and none beside it
    assert life.taken(limits={None: 1}) == []
    life.check()


# --- turns ------------------------------------------------------------------------------------------------------------


def test_one_manifest_of_a_bucket_at_a_time_and_in_order(life: Life) -> None:
    life.policy()
    windows = {(bucket, n): life.close(f"e{n}", key=f"t:f:{bucket}") for n in range(1, 5) for bucket in range(8)}
    seen: dict[str, list[int]] = defaultdict(list)
    chance = random.Random(4)
    running: list[str] = []
    while True:
        for taken in life.take(3):
            assert life.begin(taken.window_id, taken.attempt, most=1_000).manifest is not None
            running.append(taken.window_id)
        life.check()
        if not running:
            break
        window_id = running.pop(chance.randrange(len(running)))
        manifest = life.manifest(window_id)
        at_work = [life.manifest(w).bucket_key for w in running]
        assert manifest.bucket_key not in at_work
        if chance.random() < 0.3:
            assert life.settle(window_id, "failed", delay=1) == "done"
            life.tick(1)
        else:
            assert life.settle(window_id, "confirmed") == "done"
            seen[manifest.bucket_key].append(manifest.window_version)
    assert seen == {f"t:f:{bucket}": [1, 2, 3, 4] for bucket in range(8)}
    assert {life.state(w) for w in windows.values()} == {"confirmed"}


@pytest.mark.parametrize("state", [*sorted(TROUBLED), "confirmed", "refused"])
def test_what_lets_the_next_one_go(life: Life, state: str) -> None:
    life.policy()
    first = bring(life, state) if state == "refused" else ""
    if not first:
        first = life.close("e1")
        life.begun(first)
    second = life.close("e5")
    third = life.close("e6")
    if state != "refused":
        assert life.taken() == []
        assert life.settle(first, state) == "done"
    manifest = life.begun(second, OTHER)
    assert life.taken() == []
    ctx = life.context(manifest, OTHER)
    assert ctx.predecessor is not None
    assert (ctx.predecessor.window_id, ctx.predecessor.state) == (first, state)
    assert manifest.relation == "after_close"
    assert life.settle(second, "confirmed", token=OTHER) == "done"
    assert life.taken() == [third]
    life.check()


def test_an_approval_is_waited_for_up_to_its_limit(life: Life) -> None:
    life.policy()
    first, second = life.close("e1"), life.close("e2")
    life.begun(first)
    assert life.settle(first, "awaiting_approval", "proposed", delay=10_000) == "done"
    life.tick(9_999)
    assert life.taken() == []
    since = life.do(life.ops.attention())
    life.tick(1)
    assert life.do(life.ops.attention()) == since == [first]
    manifest = life.begun(second, OTHER)
    predecessor = life.context(manifest, OTHER).predecessor
    assert predecessor is not None
    assert predecessor.state == "awaiting_approval"
    # Approved now, it waits for its turn: one manifest of a bucket at a time.
    third = life.close("e3")
    assert life.decide(first, "approve") == ("done", "retrying")
    life.check()
    assert life.taken() == []
    assert life.settle(second, "confirmed", token=OTHER) == "done"
    assert life.taken() == [first]
    life.begin(first, 2)
    assert life.taken() == []
    assert life.settle(first, "confirmed") == "done"
    assert life.taken() == [third]


def test_an_approval_in_time_keeps_the_turn(life: Life) -> None:
    life.policy()
    first, second = life.close("e1"), life.close("e2")
    life.begun(first)
    life.settle(first, "awaiting_approval", "proposed", delay=10_000)
    life.tick(9_999)
    assert life.decide(first, "approve") == ("done", "retrying")
    life.tick(10_000)
    assert life.taken() == [first]
    life.begin(first, 2)
    assert life.settle(first, "confirmed") == "done"
    assert life.taken() == [second]


def test_what_is_replayed_waits_for_its_turn_the_oldest_first(life: Life) -> None:
    life.policy()
    windows = [life.close(f"e{n}") for n in range(6)]
    for window_id in windows[:4]:
        life.begun(window_id)
        assert life.settle(window_id, "dead") == "done"
    life.begun(windows[4])
    for n in (2, 0, 3):
        assert life.decide(windows[n], "replay") == ("done", "retrying")
        life.check()
    assert life.taken() == []
    order = []
    life.settle(windows[4], "confirmed")
    while taken := life.take(10):
        [one] = taken
        order.append(windows.index(one.window_id))
        assert life.begin(one.window_id, one.attempt, OTHER).manifest is not None
        life.check()
        life.settle(one.window_id, "confirmed", token=OTHER)
    assert order == [0, 2, 3, 5]
    assert life.states() == ["confirmed", "dead", "confirmed", "confirmed", "confirmed", "confirmed"]


def test_a_window_that_closes_waits_for_one_that_is_replayed(life: Life) -> None:
    life.policy()
    first = bring(life, "dead")
    assert life.decide(first, "replay") == ("done", "retrying")
    second = life.close("e5")
    assert life.taken() == [first]
    life.begin(first, 2)
    life.check()
    life.settle(first, "confirmed")
    assert life.taken() == [second]


def test_unordered_manifests_do_not_wait(life: Life) -> None:
    life.policy(ordered=False)
    windows = [life.close(f"e{n}") for n in range(3)]
    assert life.taken(2) == windows[:2]
    assert life.taken() == windows[2:]
    for window_id in reversed(windows):
        assert life.begin(window_id).manifest is not None
    assert life.settle(windows[1], "dead") == "done"
    assert life.decide(windows[1], "replay") == ("done", "retrying")
    assert life.taken() == [windows[1]]
    life.check()


def test_a_turn_is_passed_over_a_hundred_that_need_none(life: Life) -> None:
    life.policy()
    first = life.close("e1")
    life.begun(first)
    for _ in range(120):
        life.close_empty()
    last = life.close("e2")
    life.settle(first, "confirmed")
    assert life.taken() == [last]


# --- together ---------------------------------------------------------------------------------------------------------


def test_all_that_wait_are_handed_over_together(life: Life) -> None:
    seen: list[Any] = []

    @handler("f")
    def handle(ctx: Context) -> None:
        ids = [e.event.event_id for e in ctx.events]
        seen.append(([m.window_version for m in ctx.manifests], ids, ctx.manifest.window_version, ctx.window_id))
        ctx.leave(len(seen))

    life.policy(handover="together")
    windows = [life.close(f"e{n}a", f"e{n}b") for n in range(4)]
    assert life.work() == [(windows[3], "confirmed")]
    assert seen == [([1, 2, 3, 4], [f"e{n}{x}" for n in range(4) for x in "ab"], 4, windows[3])]
    assert life.states() == ["confirmed"] * 4
    last = life.manifest(windows[3])
    assert last.joined == tuple(windows[:3])
    for window_id in windows[:3]:
        manifest = life.manifest(window_id)
        assert (manifest.leader, manifest.joined) == (windows[3], ())
        cause = f"with {windows[3]}"
        assert [step[1:] for step in life.story(window_id)] == [
            ("dispatched", 1, cause), ("processing", 1, cause), ("confirmed", 1, cause)
        ]  # fmt: skip
        assert manifest.digest == life.manifest(window_id).digest
        assert [e.event_id for e in manifest.record] == list(manifest.event_ids)
    assert life.do(life.ops.checkpoint(KEY)) == (4, "1")


@pytest.mark.parametrize("ending", ["dead", "uncertain", "reconciling", "awaiting_approval", "failed"])
def test_those_handed_over_together_share_their_fate(life: Life, ending: str) -> None:
    life.policy(handover="together")
    windows = [life.close(f"e{n}") for n in range(3)]
    assert life.taken() == windows[2:]
    assert life.do(life.ops.in_flight()) == [{"t": 1}]
    manifest = life.begin(windows[2]).manifest
    assert manifest is not None
    fourth = life.close("e4")
    assert life.settle(windows[2], ending, delay=1_000) == "done"
    state = "retrying" if ending == "failed" else ending
    assert life.states() == [state] * 3 + ["closed"]
    life.check()
    for window_id in windows[:2]:
        assert life.begin(window_id) == (state, None)
    if ending == "failed":
        life.tick(1_000)
    else:
        # Whichever of them is named: it is decided of all.
        assert life.decide(windows[0], "approve" if ending == "awaiting_approval" else "replay")[0] == "done"
    assert life.states()[:3] == ["retrying"] * 3
    life.check()
    if ending in TROUBLED:  # the turn has passed on
        life.begun(fourth, OTHER)
        assert life.taken() == []
        life.settle(fourth, "confirmed", token=OTHER)
    [taken] = life.take()
    assert (taken.window_id, taken.attempt) == (windows[2], 2)
    again = life.begin(windows[2], 2).manifest
    assert again is not None
    assert again.joined == tuple(windows[:2])
    life.check()
    life.tick(LEASE)  # killed
    life.tick(1)
    assert life.states()[:3] == ["retrying"] * 3
    assert life.taken() == [windows[2]]
    life.begin(windows[2], 3)
    assert life.settle(windows[2], "confirmed") == "done"
    assert life.states()[:3] == ["confirmed"] * 3


def test_together_without_one_that_is_dead(life: Life) -> None:
    life.policy(handover="together")
    first = bring(life, "dead")
    windows = [life.close(f"w{n}") for n in range(3)]
    manifest = life.begun(windows[2])
    assert manifest.joined == tuple(windows[:2])
    handler("f")(print)
    ctx = Context(life.acc, find_handler("f"), tuple(map(life.manifest, windows)), TOKEN)
    assert ctx.predecessor is not None
    assert (ctx.predecessor.window_id, ctx.predecessor.state, ctx.predecessor_state) == (first, "dead", "dead")
    # Replayed meanwhile, it waits for its turn, and comes before what closed since.
    assert life.decide(first, "replay") == ("done", "retrying")
    fifth = life.close("e9")
    assert life.taken() == []
    assert life.settle(windows[2], "confirmed") == "done"
    manifest = life.begun(first, OTHER)
    assert manifest.joined == ()
    assert life.taken() == []
    assert life.settle(first, "dead", token=OTHER) == "done"
    assert life.begun(fifth).joined == ()
    assert life.states() == ["dead", *["confirmed"] * 3, "processing"]
    life.check()


def test_together_and_unordered(life: Life) -> None:
    life.policy(handover="together", ordered=False)
    windows = [life.close(f"e{n}") for n in range(3)]
    other = life.close("e9", key="t:f:2")
    assert sorted(life.taken()) == sorted([windows[2], other])
    life.check()
    assert life.ready() == {}
    assert life.taken() == []
    life.tick(WATCH)
    life.check()
    assert sorted(life.taken()) == sorted([windows[2], other])
    life.begin(windows[2])
    life.tick(LEASE // 2)
    assert life.states() == ["processing"] * 3
    assert life.settle(windows[2], "confirmed") == "done"


def test_what_goes_to_another_sink_is_not_joined_and_keeps_its_place(life: Life) -> None:
    life.policy(handover="together")
    first = life.close("e1")
    life.policy(handover="together", sink="rq")
    second = life.close("e2")
    life.policy(handover="together")
    third = life.close("e3")
    assert life.taken() == [first]
    life.begin(first)
    life.settle(first, "confirmed")
    assert life.taken() == []
    assert life.taken(sink="rq") == [second]
    life.begin(second)
    life.settle(second, "confirmed")
    assert life.taken() == [third]


@pytest.mark.parametrize("ordered", [True, False])
def test_so_many_are_handed_over_together_and_the_rest_in_the_next_one(life: Life, ordered: bool) -> None:
    seen: list[list[int]] = []

    @handler("f")
    def handle(ctx: Context) -> None:
        seen.append([m.window_version for m in ctx.manifests])
        ctx.superseded()

    life.policy(handover="together", ordered=ordered, max_events=1)
    life.acc.push_many([event(f"e{n}", KEY, life.clock) for n in range(TOGETHER * 2 + 1)])
    life.work()
    # Those that were full gave way to nobody, though others waited.
    versions = list(range(1, TOGETHER * 2 + 2))
    assert seen == [versions[:TOGETHER], versions[TOGETHER:-1], versions[-1:]]
    assert life.states() == ["confirmed"] * len(versions)


# B012
@pytest.mark.parametrize("ordered", [True, False])
def test_ten_thousand_that_wait_together_hold_no_call_up(
    start_server: StartServer, server_kind: str, namespace: str, ordered: bool
) -> None:
    server = start_server(config={"slowlog-log-slower-than": "1000", "slowlog-max-len": "20000"})
    with redis.Redis.from_url(server.url) as client:
        life = Life(client, namespace)
        life.policy(handover="together", ordered=ordered, max_events=1)
        for start in range(0, 10_000, 1000):
            life.acc.push_many([event(f"e{start + n}", KEY, life.clock) for n in range(1000)])
        client.slowlog_reset()
        handed_over = 0
        while taken := life.take():
            for window_id, attempt, _ in taken:
                manifest = life.begin(window_id, attempt).manifest
                assert manifest is not None
                if attempt == 1:  # given back once
                    assert life.settle(window_id, "returned", delay=1) == "done"
                    life.tick(1)
                else:
                    assert life.settle(window_id, "confirmed") == "done"
                    handed_over += len(manifest.joined) + 1
        calls = sorted(entry["duration"] / 1000 for entry in client.slowlog_get(20000))
        print(f"10,000 that wait together: worst call {calls[-1]:.1f} ms")
        assert handed_over == 10_000
        # A machine with more processes than cores may interrupt a call or two.
        assert [took for took in calls[:-2] if took >= 50] == []


@pytest.mark.parametrize("ordered", [True, False])
def test_no_more_give_way_than_the_next_hand_over_takes(life: Life, ordered: bool) -> None:
    life.policy(handover="together", ordered=ordered, max_events=1)
    life.acc.push_many([event(f"e{n}", KEY, life.clock) for n in range(TOGETHER - 2)])
    [first] = life.take()
    life.begin(first.window_id)
    life.push("next")
    assert life.do(life.ops.can_give_way(life.manifest(first.window_id)))
    assert life.settle(first.window_id, "superseded") == "done"
    life.check()
    [second] = life.take()
    life.begin(second.window_id, second.attempt)
    life.push("one more")
    assert len(life.manifest(second.window_id).joined) == TOGETHER - 2
    assert life.do(life.ops.can_give_way(life.manifest(second.window_id)))
    assert life.settle(second.window_id, "superseded") == "done"
    life.check()
    [third] = life.take()
    life.begin(third.window_id, third.attempt)
    life.push("too many")
    assert len(life.manifest(third.window_id).joined) == TOGETHER - 1
    assert not life.do(life.ops.can_give_way(life.manifest(third.window_id)))
    assert life.settle(third.window_id, "superseded") == "no_newer_window"
    assert life.settle(third.window_id, "confirmed") == "done"
    assert life.states() == [*["superseded"] * (TOGETHER - 1), "confirmed", "closed"]
    life.check()


# --- giving way -------------------------------------------------------------------------------------------------------


def test_a_handler_gives_way_to_a_window_that_is_open(life: Life) -> None:
    seen: list[list[int]] = []

    @handler("f")
    def handle(ctx: Context) -> None:
        seen.append([m.window_version for m in ctx.manifests])
        if len(seen) == 1:
            life.push("e2")
        ctx.superseded()
        with ctx.effect("answer"):
            pass

    life.policy()
    first = life.close("e1")
    [taken] = life.take()
    assert run_attempt(life.acc, *taken[:2]) == "superseded"
    life.check()
    assert life.states() == ["closed"]
    life.tick(9_999)
    assert life.taken() == []
    second = life.close("e3")
    assert life.work() == [(second, "confirmed")]
    assert seen == [[1], [1, 2]]
    assert life.states() == ["superseded", "confirmed"]
    assert life.story(first)[2:] == [
        (0, "closed", 1, "gave_way"),
        *((at, state, 2, f"with {second}") for at, state in zip(
            (life.now, life.now, life.now), ("dispatched", "processing", "superseded"), strict=True
        )),
    ]  # fmt: skip
    assert [e.name for e in life.do(life.ops.effects(second))] == ["answer"]
    assert life.do(life.ops.effects(first)) == []


@pytest.mark.parametrize("ordered", [True, False])
@pytest.mark.parametrize("handover", ["each", "together"])
def test_a_handler_gives_way_to_a_window_that_waits(life: Life, ordered: bool, handover: str) -> None:
    life.policy(ordered=ordered, handover=handover)
    first = life.close("e1")
    life.begun(first)
    second, third = life.close("e2"), life.close("e3")
    assert life.do(life.ops.can_give_way(life.manifest(first)))
    assert life.settle(first, "superseded", "Superseded") == "done"
    life.check()
    assert life.settle(first, "superseded", "Superseded") == "done"
    assert life.do(life.ops.in_flight()) == [{}]
    [taken] = life.take()
    assert taken.window_id == (third if handover == "together" else second)
    manifest = life.begin(taken.window_id, taken.attempt, OTHER).manifest
    assert manifest is not None
    assert manifest.joined == ((first, second) if handover == "together" else (first,))
    life.check()
    assert life.settle(taken.window_id, "confirmed", token=OTHER) == "done"
    rest = ["confirmed"] if handover == "together" else ["closed"]
    assert life.states() == ["superseded", "confirmed", *rest]


def test_it_may_give_way_time_and_again(life: Life) -> None:
    life.policy()
    windows = []
    for n in range(5):
        window_id = life.close() if n else life.close("e0")
        windows.append(window_id)
        manifest = life.begun(window_id)
        assert manifest.joined == tuple(windows[:-1])
        life.push(f"e{n + 1}")
        assert life.settle(window_id, "superseded") == "done"
        life.check()
        assert life.taken() == []
        assert life.states() == ["closed"] * (n + 1)
    last = life.close()
    manifest = life.begun(last)
    assert manifest.joined == tuple(windows)
    assert manifest.attempt == 6  # no attempt of any of them has its number twice
    assert life.settle(last, "confirmed") == "done"
    assert life.states() == ["superseded"] * 5 + ["confirmed"]


@pytest.mark.parametrize("ordered", [True, False])
@pytest.mark.parametrize("how", ["emptied", "emptied, one before it gave way", "none"])
def test_a_window_that_others_gave_way_to_comes_to_nothing(life: Life, how: str, ordered: bool) -> None:
    life.policy(ordered=ordered)
    first = life.close("e1")
    life.begun(first)
    life.push("e2")
    life.settle(first, "superseded")
    leader = first
    joined: tuple[str, ...] = ()
    if how == "emptied":
        life.acc.retract(KEY, "e2")
        life.close()
    elif how == "none":
        life.close()
        second = life.manifest(life.acc.bucket(KEY).last_closed_window_id or "").window_id
        life.begun(second)
        life.policy(sink="none", ordered=ordered)
        life.push("e3")
        life.settle(second, "superseded")
        life.check()
        life.close()
        leader, joined = second, (first,)
    else:
        second = life.close()
        life.begun(second)
        life.push("e3")
        life.settle(second, "superseded")
        life.acc.retract(KEY, "e3")
        life.close()
        leader, joined = second, (first,)
    life.check()
    [taken] = life.take()
    assert taken.window_id == leader
    manifest = life.begin(leader, taken.attempt).manifest
    assert manifest is not None
    assert manifest.joined == joined
    assert life.settle(leader, "confirmed") == "done"
    assert life.state(leader) == "confirmed"
    assert {life.state(w) for w in joined} <= {"superseded"}
    fourth = life.close("e9")
    life.policy(ordered=ordered)
    assert fourth


def test_a_window_is_emptied_while_another_has_the_turn(life: Life) -> None:
    life.policy()
    first = bring(life, "dead")
    second = life.close("e5")
    life.begun(second)
    life.push("e6")
    assert life.settle(second, "superseded") == "done"
    assert life.decide(first, "replay") == ("done", "retrying")
    life.begun(first, OTHER)
    life.acc.retract(KEY, "e6")
    life.close()  # empty, and it is the turn of the first
    life.check()
    assert life.taken() == []
    assert life.settle(first, "confirmed", token=OTHER) == "done"
    assert life.taken() == [second]


def test_one_that_is_replayed_does_not_hand_over_what_gave_way_to_an_open_window(life: Life) -> None:
    life.policy()
    first = bring(life, "dead")
    second = life.close("e5")
    life.begun(second)
    life.push("e6")
    life.settle(second, "superseded")
    life.decide(first, "replay")
    life.begun(first, OTHER)
    life.settle(first, "confirmed", token=OTHER)
    assert life.taken() == []
    third = life.close()
    manifest = life.begun(third)
    assert manifest.joined == (second,)


def test_there_is_nobody_to_give_way_to(life: Life) -> None:
    seen: list[int] = []

    @handler("f", max_attempts=2, backoff="1ms", max_backoff="1ms")
    def handle(ctx: Context) -> None:
        seen.append(ctx.manifest.window_version)
        ctx.superseded()

    @handler("g", max_attempts=2, backoff="1ms", max_backoff="1ms")
    def insist(_: Context) -> None:
        raise Superseded

    life.policy()
    life.policy("g")
    life.close("e1")
    life.close_empty()  # a newer one, with nothing in it
    life.work()
    assert life.states() == ["confirmed", "empty"]
    # The newer one has been handled already.
    first = bring(life, "dead")
    second = life.close("e5")
    life.begun(second)
    life.settle(second, "confirmed")
    life.decide(first, "replay")
    life.work()
    assert life.states()[-2:] == ["confirmed", "confirmed"]
    # One that insists has failed.
    stubborn = life.close("e1", key="t:g:1")
    life.work()
    assert life.state(stubborn) == "dead"
    assert life.story(stubborn)[-1][1:] == ("dead", 2, "no_newer_window")


def test_after_an_effect_it_gives_way_no_more(life: Life) -> None:
    runs: list[int] = []

    @handler("f", max_attempts=3, backoff="1ms", max_backoff="1ms")
    def handle(ctx: Context) -> None:
        runs.append(ctx.attempt)
        ctx.superseded()
        ctx.once("answer", lambda key: str(life.push("e2").outcome))
        if ctx.attempt == 1:
            raise ValueError
        ctx.superseded()

    life.policy()
    first = life.close("e1")
    [taken] = life.take()
    assert run_attempt(life.acc, *taken[:2]) == "failed"
    assert not life.do(life.ops.can_give_way(life.manifest(first)))
    life.tick(1)
    [taken] = life.take()
    assert run_attempt(life.acc, *taken[:2]) == "confirmed"
    assert runs == [1, 2]

    second = life.close("e3")
    life.begun(second)
    life.effect(second, "pay", "begin")
    life.push("e4")
    assert life.settle(second, "superseded") == "effects_begun"
    assert life.state(second) == "processing"
    life.effect(second, "pay", "undo")
    assert life.settle(second, "superseded") == "done"


# --- tenants ----------------------------------------------------------------------------------------------------------


def test_ten_thousand_of_one_tenant_do_not_stand_before_anothers(life: Life) -> None:
    life.policy(max_events=1)
    life.acc.push_many([event("e", f"big:f:{n}", life.clock) for n in range(10_000)])
    assert [taken.bucket_key for taken in life.take(4)] == [f"big:f:{n}" for n in range(4)]
    small = life.acc.push(event("e", "small:f:1", life.clock)).window_id
    assert [taken.bucket_key for taken in life.take(2)] == ["big:f:4", "small:f:1"]
    assert life.do(life.ops.in_flight()) == [{"big": 5, "small": 1}]
    assert life.do(life.ops.waiting("direct")) == [1]
    assert small is not None
    life.client.delete(*life.client.keys("*"))  # ten thousand manifests are not checked one by one


def test_tenants_are_served_in_turn(life: Life) -> None:
    life.policy(max_events=1)
    for tenant, count in (("a", 6), ("b", 2), ("c", 1)):
        for n in range(count):
            life.push("e", f"{tenant}:f:{n}")
    served = []
    while taken := life.take(2):
        served.append([t.bucket_key[0] for t in taken])
        life.check()
    assert Counter(x for two in served for x in two) == {"a": 6, "b": 2, "c": 1}
    assert served[0] == ["a", "b"]
    assert "c" in served[1]
    assert served[2:] == [["a", "a"]] * (len(served) - 3) + [served[-1]] or "b" in served[1] + served[2]


def test_limits_of_tenants(life: Life) -> None:
    life.policy(max_events=1)
    for tenant in "abc":
        for n in range(5):
            life.push("e", f"{tenant}:f:{n}")
    limits: dict[str | None, int] = {"a": 1, "b": 3, None: 2}
    assert Counter(t.bucket_key[0] for t in life.take(100, limits=limits)) == {"a": 1, "b": 3, "c": 2}
    assert life.take(100, limits=limits) == []
    life.check()
    [of_a] = [w for w, fields in life.all_manifests().items()
              if fields["bucket"].startswith("a:") and fields["state"] == "dispatched"]  # fmt: skip
    life.begin(of_a)
    assert life.take(100, limits=limits) == []
    life.settle(of_a, "dead")
    assert [t.bucket_key[0] for t in life.take(100, limits=limits)] == ["a"]
    assert Counter(t.bucket_key[0] for t in life.take(100, limits={"c": 10, None: 0})) == {"c": 3}
    assert life.do(life.ops.in_flight()) == [{"a": 1, "b": 3, "c": 5}]


def test_two_hundred_tenants_at_their_limits_do_not_hide_the_next(life: Life) -> None:
    life.policy(max_events=1)
    events = [event("e", f"{n:03}:f:{x}", life.clock) for n in range(220) for x in range(2)]
    life.acc.push_many(events)
    limits: dict[str | None, int] = {None: 1}
    found: Counter[str] = Counter()
    for _ in range(4):
        found.update(t.bucket_key[:3] for t in life.take(1000, limits=limits))
    assert found == {f"{n:03}": 1 for n in range(220)}
    life.check()


# --- many at once -----------------------------------------------------------------------------------------------------


def test_many_begin_and_settle_in_one_call_each_for_itself(make_client: MakeClient, namespace: str) -> None:
    life = Life(make_client(), namespace, partitions=3)
    life.policy(ordered=False)
    windows = [life.close("e1", key=f"t:f:{n}") for n in range(8)]
    life.close("e2", key="t:f:0")  # its bucket's next one
    assert len(life.take(100)) == 9
    asks = [Ask(window_id, 2 if n == 3 else 1, LEASE, 2, (1, 1)) for n, window_id in enumerate(windows)]
    asks.insert(0, Ask("0" * 11 + "000" + "0" * 12, 1, LEASE, 2, (1, 1)))
    missing, *found = life.do(life.ops.begin_all(TOKEN, asks))
    assert missing == Grant("", None)
    assert found[3] == Grant("dispatched", None)
    manifests = [grant.manifest for grant in found if isinstance(grant, Grant) and grant.manifest is not None]
    assert [m.window_id for m in manifests] == [w for n, w in enumerate(windows) if n != 3]
    assert all([e.event.event_id for e in m.events] == ["e1"] and m.state == "processing" for m in manifests)
    endings = ["confirmed", "failed", "dead", "confirmed", "returned", "uncertain", "superseded", "confirmed"]
    told = life.do(
        life.ops.settle_all(
            [
                Settlement(w, OTHER if n == 7 else TOKEN, endings[n], "x", 5, manifest=found[n].manifest)  # type: ignore[union-attr]
                for n, w in enumerate(windows)
            ]
        )
    )
    assert told == ["done", "done", "done", "refused", "done", "done", "no_newer_window", "refused"]
    states = [life.manifest(w).state for w in windows]
    assert states == [
        "confirmed",
        "retrying",
        "dead",
        "dispatched",
        "retrying",
        "uncertain",
        "processing",
        "processing",
    ]
    assert all(life.manifest(w).record for w in windows)
    life.check()


@pytest.mark.parametrize("payload", [1, "x" * 2_000], ids=["long", "heavy"])
def test_what_would_make_a_reply_too_long_begins_later(life: Life, payload: object) -> None:
    life.policy(max_events=2_000, max_bytes=4 << 20, ordered=False)
    windows = [life.close(*(f"e{n}" for n in range(1_000)), key=f"t:f:{key}", payload=payload) for key in range(2)]
    windows.append(life.close("e1", key="t:f:2"))
    life.take(3)
    asks = [Ask(window_id, 1, LEASE, 1, (1, 1)) for window_id in windows]
    [first, second, third] = life.do(life.ops.begin_all(TOKEN, asks))
    assert isinstance(first, Grant)
    assert first.manifest is not None
    assert len(first.manifest.events) == 1_000
    assert (second, third) == (None, None)
    assert life.manifest(windows[1]).state == "dispatched"
    [second, third] = life.do(life.ops.begin_all(OTHER, asks[1:]))
    assert isinstance(second, Grant)
    assert second.manifest is not None
    assert third is None


def test_a_manifest_that_cannot_be_read_holds_up_no_other(life: Life) -> None:
    life.policy()
    handled: list[str] = []
    handler("f")(lambda ctx: handled.append(ctx.bucket_key))
    windows = [life.close("e1", key=f"t:f:{n}") for n in range(3)]
    attempts = [Attempt(life.acc, *taken) for taken in life.take(3)]
    name = f"{life.ops.prefixes[0]}manifest:{windows[1]}"
    held = life.client.hget(name, "reason")
    life.client.hdel(name, "reason")
    granted, later = begin(attempts)
    assert [attempt.window_id for attempt in granted] == [windows[0], windows[2]]
    assert later == []
    told = settle([(attempt, attempt.handle()) for attempt in granted])
    assert list(told.values()) == ["confirmed", "confirmed"]
    life.client.hset(name, "reason", held)
    assert [life.manifest(w).state for w in windows] == ["confirmed", "retrying", "confirmed"]
    assert "InternalError" in str(life.manifest(windows[1]).timeline[-1])


def test_one_of_many_that_the_server_stumbles_over_is_no_fault_of_the_others(life: Life) -> None:
    life.policy()
    life.policy("g")
    handler("f")(print)
    handler("g")(print)
    windows = [life.close("e1", key=f"t:{flow}:1") for flow in "fg"] + [life.close("e1", key="t:f:2")]
    attempts = [Attempt(life.acc, *taken) for taken in life.take(3)]
    granted, _ = begin(attempts)
    assert len(granted) == 3
    ended = [(attempt, attempt.handle()) for attempt in granted]
    rules = f"{life.ops.prefixes[0]}policy:g"
    held = life.client.hgetall(rules)
    life.client.delete(rules)
    assert [attempt.window_id for attempt in settle(ended)] == [w for w in windows if w != windows[1]]
    assert life.states("t:f:1") == life.states("t:f:2") == ["confirmed"]
    life.client.hset(rules, mapping=held)
    assert life.states("t:g:1") == ["processing"]


def test_one_of_many_that_cannot_begin_is_no_fault_of_the_others(life: Life, monkeypatch: pytest.MonkeyPatch) -> None:
    life.policy()
    handler("f", max_attempts=1)(print)
    windows = [life.close("e1", key=f"t:f:{n}") for n in range(3)]
    attempts = [Attempt(life.acc, *taken) for taken in life.take(3)]
    name = f"{life.ops.prefixes[0]}events:{windows[1]}"
    held = life.client.dump(name)
    life.client.delete(name)
    life.client.set(name, "no log")
    granted, later = begin(attempts)
    assert ([attempt.window_id for attempt in granted], later) == ([windows[0], windows[2]], [])
    settle([(attempt, attempt.handle()) for attempt in granted])
    life.client.delete(name)
    life.client.restore(name, 0, held)
    assert [life.manifest(w).state for w in (windows[0], windows[2])] == ["confirmed"] * 2
    assert life.manifest(windows[1]).state == "dead"


def test_an_attempt_that_is_given_up_before_it_is_handled_is_not(life: Life) -> None:
    handled: list[str] = []
    handler("f")(lambda ctx: handled.append(ctx.bucket_key))
    life.policy()
    window_id = life.close("e1")
    [attempt], _ = begin([Attempt(life.acc, *taken) for taken in life.take()])
    assert attempt.give_up("Stopped") == "returned"
    assert settle([(attempt, attempt.handle())]) == {}
    assert attempt.give_up("Timeout") is None
    assert handled == []
    assert life.story(window_id)[-1][1:] == ("retrying", 1, "Stopped")


def test_an_attempt_that_is_given_up_while_its_manifests_are_read_is_not_handled(
    life: Life, monkeypatch: pytest.MonkeyPatch
) -> None:
    handled: list[str] = []
    handler("f")(lambda ctx: handled.append(ctx.bucket_key))
    life.policy(handover="together")
    life.close("e1")
    life.close("e2")
    [attempt], _ = begin([Attempt(life.acc, *taken) for taken in life.take()])
    read = life.ops.manifest

    def stopped(window_id: str) -> Operation[Manifest | None]:
        attempt.give_up("Stopped")
        return read(window_id)

    with monkeypatch.context() as patch:
        patch.setattr(life.ops, "manifest", stopped)
        assert settle([(attempt, attempt.handle())]) == {}
    assert handled == []
    assert life.states() == ["retrying"] * 2


def test_a_thread_that_was_replaced_begins_nothing_more(life: Life, caplog: pytest.LogCaptureFixture) -> None:
    """What waits behind the one it was at goes back, and nobody is warned of that."""
    slot = _Slot(1)
    handled: list[str] = []

    @handler("f")
    def handle(ctx: Context) -> None:
        handled.append(ctx.bucket_key)
        at = slot.attempt
        assert at is not None
        assert slot.replace(Attempt(life.acc, *taken[0])) is None  # it was at another one, and goes on
        if len(handled) == 2:
            assert slot.replace(at) is at

    life.policy()
    for n in range(4):
        life.close("e1", key=f"t:f:{n}")
    taken = life.take(4)
    slot.run([Attempt(life.acc, *one) for one in taken])
    assert handled == [one.bucket_key for one in taken[:2]]
    assert [life.states(one.bucket_key) for one in taken] == [["confirmed"]] * 2 + [["retrying"]] * 2
    assert [life.story(one.window_id)[-1][3] for one in taken[2:]] == ["Waited"] * 2
    assert caplog.records == []
    assert slot.attempt is None


class Unprintable(BaseException):
    def __str__(self) -> str:
        raise SystemExit


def test_an_error_that_ends_what_reads_it(life: Life) -> None:
    @handler("f", max_attempts=1)
    def handle(_: Context) -> None:
        raise Unprintable

    life.policy()
    window_id = life.close("e1")
    assert life.work() == [(window_id, "failed")]
    assert life.manifest(window_id).error == "Unprintable: (its message can't be read)"


@pytest.mark.parametrize(
    ("problem", "state"), [(ServerUnavailable("away"), "retrying"), (InternalError("odd"), "dead"), (None, "confirmed")]
)
def test_those_handed_over_together_are_read_when_it_is_their_turn(
    life: Life, monkeypatch: pytest.MonkeyPatch, problem: AccumulatorError | None, state: str
) -> None:
    """Not when many begin: each of these may have its hundreds."""
    seen: list[int] = []
    handler("f", max_attempts=1)(lambda ctx: seen.append(len(ctx.manifests)))
    life.policy(handover="together")
    for n in range(3):
        life.close(f"a{n}", key="t:f:1")
        life.close(f"b{n}", key="t:f:2")
    before = life.client.info("commandstats")["cmdstat_hgetall"]["calls"]
    granted, _ = begin([Attempt(life.acc, *taken) for taken in life.take(2)])
    assert len(granted) == 2
    read = life.client.info("commandstats")["cmdstat_hgetall"]["calls"] - before
    assert read == 2

    def fail(_: str) -> Operation[Manifest | None]:
        assert problem is not None
        raise problem
        yield []

    monkeypatch.setattr(runner, "PATIENCE", 0)
    with monkeypatch.context() as patch:
        if problem is not None:
            patch.setattr(life.ops, "manifest", fail)
        endings = [(attempt, attempt.handle()) for attempt in granted]
    settle(endings)
    assert seen == ([] if problem else [3, 3])
    assert life.states("t:f:1") == life.states("t:f:2") == [state] * 3
    assert [life.manifest(attempt.window_id).failures for attempt in granted] == [int(state == "dead")] * 2
