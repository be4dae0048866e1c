"""What settled goes when its time has passed, payloads first; what anybody may still need stays, however old it is."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

import accumulator.handlers
from accumulator.closer import Closer
from accumulator.envelope import MISSING
from accumulator.janitor import Janitor
from accumulator.manifest import SETTLED, Manifest, pairs_digest
from accumulator.windows import Outcome
from tests import retention
from tests.conftest import MakeClient, event
from tests.life import DAY, KEY, LEASE, OTHER, TOKEN, Life

HOUR = 3_600_000
SHORT: dict[str, Any] = {"payload_ttl": "1d", "metadata_ttl": "3d", "dedupe_ttl": "1d"}


@pytest.fixture
def life(make_client: MakeClient, namespace: str) -> Iterator[Life]:
    life = Life(make_client(), namespace)
    yield life
    life.check()


def handled(life: Life, *ids: str, key: str = KEY, **fields: Any) -> str:
    """A window that a handler confirmed."""
    window_id = life.close(*ids, key=key, **fields)
    manifest = life.begun(window_id)
    assert life.settle(window_id, "confirmed", manifest=manifest) == "done"
    return window_id


def without_payloads(manifest: Manifest) -> dict[str, Any]:
    return {name: getattr(manifest, name) for name in Manifest.__dataclass_fields__ if name != "events"}


def names(life: Life, *ids: str) -> set[str]:
    """The keys that hold any of these in their names, without prefix and id."""
    prefix = life.ops.prefixes[0]
    return {
        key.removeprefix(prefix).replace(one, "*") for key in life.all_keys() for one in ids if key.endswith(f":{one}")
    }


# --- payloads, then the rest ------------------------------------------------------------------------------------------


def test_payloads_go_first_and_all_else_stays_until_its_time(life: Life) -> None:
    life.policy(order_by="source_version", **SHORT)
    handled(life, "e0", source_version=5)
    life.push("e1", payload={"a": [1, None]}, ref="ref: 1 2", source_version=7)
    life.push("e 2 é", source_version=3)
    life.push("gone")
    life.acc.retract(KEY, "gone")
    window_id = handled(life, "e4", payload=b"\x00", source_version=8)
    before = life.manifest(window_id)
    assert before.late_event_ids == ("e 2 é",)
    life.tick(DAY - 1)
    assert life.manifest(window_id) == before
    life.tick(1)
    after = life.manifest(window_id)
    assert after.events == ()
    assert without_payloads(after) == without_payloads(before)
    assert after.event_ids == ("e1", "e 2 é", "e4")
    assert [e.ref for e in after.record] == ["ref: 1 2", None, None]
    assert after.retracted_event_ids == ("gone",)
    assert after.digest == pairs_digest(entry[:2] for entry in after.record)
    assert names(life, window_id) == {"manifest:*"}
    life.check()
    life.tick(2 * DAY - 1)
    assert life.manifest(window_id) == after
    life.tick(1)
    assert life.acc.manifest(window_id) is None
    assert names(life, window_id) == set()


def test_what_was_not_recorded_keeps_its_payloads_until_it_is(life: Life) -> None:
    life.policy(sink="none", **SHORT)
    window_id = life.close("e1", "e2", payload="p")
    before = life.manifest(window_id)
    assert (before.state, life.do(life.ops.unrecorded())) == ("confirmed", [window_id])
    life.tick(2 * DAY)
    assert life.manifest(window_id) == before
    life.record()
    assert life.do(life.ops.unrecorded()) == []
    life.tick(60_000)
    after = life.manifest(window_id)
    assert (after.events, without_payloads(after)) == ((), without_payloads(before))
    life.tick(2 * DAY)
    assert life.acc.manifest(window_id) is None


def test_one_that_no_attempt_ended_is_recorded_before_it_goes(life: Life) -> None:
    life.policy(**SHORT)
    window_id = life.close("e1", payload="p")
    life.begun(window_id, most=1)
    life.tick(LEASE)
    assert life.decide(window_id, "discard") == ("done", "discarded")
    life.tick(DAY)
    assert [e.event.payload for e in life.manifest(window_id).events] == ["p"]
    assert life.do(life.ops.unrecorded()) == [window_id]
    life.record()
    life.tick(60_000)
    assert life.manifest(window_id).events == ()
    assert life.manifest(window_id).event_ids == ("e1",)


def test_a_record_is_written_once(life: Life) -> None:
    life.policy(**SHORT)
    window_id = life.close("e1")
    manifest = life.begun(window_id)
    life.settle(window_id, "failed", manifest=manifest)
    fields = life.all_manifests()[window_id]
    life.do(life.ops.record(manifest))
    life.do(life.ops.record(life.manifest(window_id)))
    assert life.all_manifests()[window_id] == fields
    assert {name for name in fields if name[0] in "ex" and name[1:].isdigit()} == {"e1"}


@pytest.mark.parametrize("state", ["confirmed", "refused", "discarded", "superseded", "empty"])
def test_every_settled_state_comes_to_its_end(life: Life, state: str) -> None:
    life.policy(**SHORT)
    base = life.all_keys()
    if state == "empty":
        life.push("e1")
        life.acc.retract(KEY, "e1")
        window_id = life.close()
    else:
        window_id = life.close("e1", payload="p")
        manifest = life.begun(window_id)
        if state == "superseded":
            life.push("e2")
            life.settle(window_id, "superseded", manifest=manifest)
            newer = life.close()
            life.begun(newer, OTHER)
            life.settle(newer, "confirmed", token=OTHER)
        elif state == "confirmed":
            life.effect(window_id, "pay", "begin")
            life.effect(window_id, "pay", "confirm", result="1")
            life.do(life.ops.save_stage(window_id, TOKEN, "load", "1"))
            life.settle(window_id, "confirmed", checkpoint="1", manifest=manifest)
        else:
            life.settle(window_id, "awaiting_approval", delay=1, manifest=manifest)
            life.decide(window_id, "refuse" if state == "refused" else "discard")
    assert life.state(window_id) == state
    for _ in range(5 * 24):
        life.tick(HOUR)
        life.record()
    assert life.all_keys() - base <= {f"{life.ops.prefixes[0]}{name}" for name in ("stats", "audit")}


def test_stages_go_with_the_payloads_and_effects_with_the_rest(life: Life) -> None:
    life.policy(**SHORT)
    window_id = life.close("e1")
    manifest = life.begun(window_id)
    life.do(life.ops.save_stage(window_id, TOKEN, "load", '"the customer"'))
    life.effect(window_id, "pay", "begin")
    life.effect(window_id, "pay", "confirm", result="1")
    life.settle(window_id, "confirmed", manifest=manifest)
    assert names(life, window_id) == {"manifest:*", "events:*", "stages:*", "effects:*"}
    life.tick(DAY)
    assert names(life, window_id) == {"manifest:*", "effects:*"}
    life.tick(2 * DAY)
    assert names(life, window_id) == set()


def test_the_kept_payload_goes_too(life: Life) -> None:
    life.policy(keep="last", **SHORT)
    window_id = handled(life, "e1", "e2", payload="p")
    before = life.manifest(window_id)
    assert names(life, window_id) == {"manifest:*", "events:*", "kept:*"}
    life.tick(DAY)
    assert names(life, window_id) == {"manifest:*"}
    assert without_payloads(life.manifest(window_id)) == without_payloads(before)


def test_those_handed_over_together_go_together(life: Life) -> None:
    life.policy(handover="together", **SHORT)
    windows = [life.close(f"e{n}", payload="p") for n in range(3)]
    assert life.taken() == windows[2:]
    leader = life.begin(windows[2]).manifest
    for window_id in windows[:2]:
        life.do(life.ops.record(life.manifest(window_id)))
    life.settle(windows[2], "confirmed", manifest=leader)
    life.tick(DAY)
    assert [(m.events, len(m.record)) for m in life.acc.manifests(KEY)] == [((), 1)] * 3
    life.tick(2 * DAY)
    assert life.acc.manifests(KEY) == []


# --- what never goes --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "state", ["closed", "dispatched", "processing", "retrying", "awaiting_approval", "uncertain", "dead", "reconciling"]
)
def test_nothing_unsettled_ever_goes(life: Life, state: str) -> None:
    life.policy(**SHORT)
    window_id = life.close("e1", "e2", payload={"a": 1})
    if state not in ("closed", "dispatched"):
        life.begun(window_id, most=1_000)
        life.do(life.ops.save_stage(window_id, TOKEN, "load", "1"))
        life.effect(window_id, "pay", "begin")
    if state == "dispatched":
        assert life.taken() == [window_id]
    elif state == "retrying":
        life.settle(window_id, "failed", delay=100 * DAY)
    elif state not in ("closed", "processing"):
        life.settle(window_id, state, delay=1)
    before = life.manifest(window_id)
    for _ in range(60):
        life.tick(DAY)
        life.record()
        life.check()
    after = life.manifest(window_id)
    assert after.state == ("retrying" if state == "processing" else state)
    assert after.events == before.events
    held = {"manifest:*", "events:*"} | ({"stages:*", "effects:*"} if state not in ("closed", "dispatched") else set())
    assert names(life, window_id) == held
    # Its events are known for as long.
    [first, _] = before.events
    again = life.push("e1", payload={"a": 1}, occurred_at=first.event.occurred_at)
    assert (again.outcome, again.window_version) == (Outcome.DUPLICATE, 1)


def test_the_oldest_is_dead_and_a_thousand_later_ones_settled(life: Life) -> None:
    life.policy(max_events=1, **SHORT)
    base = life.all_keys()
    first = life.push("e0", payload="the first")
    assert first.window_id is not None
    life.begun(first.window_id)
    life.settle(first.window_id, "dead")
    life.acc.push_many(event(f"e{n}", KEY, life.clock, payload="later") for n in range(1, 1001))
    for n in range(1000):
        [taken] = life.take()
        manifest = life.begin(taken.window_id, 1, OTHER).manifest
        assert manifest is not None
        assert manifest.window_version == n + 2
        assert life.settle(taken.window_id, "confirmed", token=OTHER, manifest=manifest) == "done"
    prefix = life.ops.prefixes[0]
    for _ in range(10):
        life.tick(DAY)
    assert [key for key in life.all_keys() if key.startswith(f"{prefix}events:")] == [
        f"{prefix}events:{first.window_id}"
    ]
    assert len(life.all_manifests()) == 1
    again = life.manifest(first.window_id)
    assert (again.state, [e.event.payload for e in again.events]) == ("dead", ["the first"])
    assert life.push("e0", payload="the first", occurred_at=again.events[0].event.occurred_at).outcome == "duplicate"
    assert life.decide(first.window_id, "replay") == ("done", "retrying")
    manifest = life.begun(first.window_id)
    assert [e.event.payload for e in manifest.events] == ["the first"]
    life.settle(first.window_id, "confirmed", manifest=manifest)
    for _ in range(5 * 24):
        life.tick(HOUR)
    assert life.all_keys() - base <= {f"{prefix}stats", f"{prefix}audit"}


def test_an_open_window_never_goes(life: Life) -> None:
    life.policy(inactivity=None, max_age="1000d", **SHORT)
    handled(life, "e1")
    life.push("e2", payload="p")
    for _ in range(40):
        life.tick(DAY)
    assert life.acc.manifests(KEY) == []
    assert [e.event.event_id for e in life.acc.open_events(KEY)] == ["e2"]
    assert life.push("e2", payload="q").outcome is Outcome.CONFLICT
    second = life.close()
    assert life.manifest(second).window_version == 2


def test_a_queued_item_never_goes_and_holds_its_bucket(life: Life) -> None:
    life.policy(kinds=["k"], **SHORT)
    base = life.all_keys()
    handled(life, "e1")
    life.push("q", kind="odd", payload="p")
    life.push("r", "t:f:2", kind="odd")  # a bucket that holds nothing else
    for _ in range(40):
        life.tick(DAY)
    assert life.acc.manifests(KEY) == []
    items = life.acc.reconciliation()
    assert [item.event.event_id for item in items] == ["q", "r"]
    assert items[0].event.payload == "p"
    for item in items:
        again = life.push(item.event.event_id, item.event.bucket_key, kind="odd",
                          occurred_at=item.event.occurred_at, payload=item.event.payload)  # fmt: skip
        assert again.outcome is Outcome.DUPLICATE
    assert life.resolve(items[0], "accept").outcome == "accepted"
    assert life.resolve(items[1], "discard").outcome == "discarded"
    assert names(life, "t:f:2") == {"bucket:*", "ids:*", "noticed:*"}
    life.tick()
    assert names(life, "t:f:2") == set()
    life.tick(10_000)
    [window_id] = life.taken()
    manifest = life.begin(window_id).manifest
    life.settle(window_id, "confirmed", manifest=manifest)
    for _ in range(5 * 24):
        life.tick(HOUR)
    left = {key.removeprefix(life.ops.prefixes[0]) for key in life.all_keys() - base}
    assert left <= {"stats", "audit", "reconcile"}
    assert life.client.xlen(f"{life.ops.prefixes[0]}reconcile") == 0


def test_one_that_was_set_aside_holds_its_bucket(life: Life) -> None:
    life.policy(**SHORT)
    base = life.all_keys()
    window_id = life.close("e1", "e2")
    manifest = life.begun(window_id)
    life.context(manifest).set_aside("e1", "odd")
    life.settle(window_id, "confirmed", manifest=manifest)
    for _ in range(20):
        life.tick(DAY)
    assert names(life, KEY) == {"bucket:*", "ids:*"}
    [item] = life.acc.reconciliation()
    life.resolve(item, "discard")
    life.tick()
    assert {key.removeprefix(life.ops.prefixes[0]) for key in life.all_keys() - base} <= {"stats", "audit", "reconcile"}


# --- what is remembered -----------------------------------------------------------------------------------------------


def test_ids_are_remembered_for_their_time_and_no_longer(life: Life) -> None:
    life.policy(**SHORT)
    handled(life, "e0")
    known = {}
    for n in range(1, 20):  # every twelve hours a new one, so that the bucket never falls silent
        life.tick(12 * HOUR)
        known[n] = event(f"e{n}", KEY, life.clock)
        assert life.acc.push(known[n]).outcome is Outcome.ACCEPTED
        window_id = life.close()
        life.begun(window_id)
        life.settle(window_id, "confirmed")
        life.record()
        if n > 1:
            assert life.acc.push(known[n - 1]).outcome is Outcome.DUPLICATE
        generations = [key for key in life.all_keys() if ":ids." in key]
        assert len(generations) <= 3
    life.tick(2 * DAY)
    assert life.acc.push(known[2]).outcome is Outcome.ACCEPTED  # long forgotten


def test_generations_go_however_many_manifests_are_kept(life: Life) -> None:
    life.policy(sink="none", max_events=1, dedupe_ttl="1d")  # manifests are kept for two weeks
    for day in range(8):
        life.acc.push_many(event(f"{day}:{n}", KEY, life.clock) for n in range(200))
        life.tick(DAY)
    life.tick(2 * HOUR)
    assert len(life.all_manifests()) == 1_600
    assert len([key for key in life.all_keys() if ":ids." in key]) <= 2


@pytest.mark.parametrize("holder", ["dead", "queued", None])
def test_a_generation_goes_only_when_nobody_needs_it(life: Life, holder: str | None) -> None:
    life.policy(kinds=["k"], **SHORT)
    if holder == "queued":
        life.push("q", kind="odd")
    first = life.close("e1", payload="p")
    known = life.manifest(first).events[0].event
    manifest = life.begun(first)
    life.settle(first, holder if holder == "dead" else "confirmed", manifest=manifest)
    for n in range(2, 12):
        life.tick(DAY)
        handled(life, f"e{n}")
    again = life.push("e1", payload="p", occurred_at=known.occurred_at)
    generations = sorted(key.removeprefix(life.ops.prefixes[0]) for key in life.all_keys() if ":ids." in key)
    if holder is None:
        assert again.outcome is Outcome.ACCEPTED
        assert len(generations) <= 2
        return
    assert again.outcome is Outcome.DUPLICATE
    assert f"ids.1:{KEY}" in generations
    if holder == "dead":
        life.decide(first, "discard")
    else:
        life.resolve(life.acc.reconciliation()[0], "discard")
    life.tick(2 * HOUR)
    assert len([key for key in life.all_keys() if ":ids." in key]) <= 2
    assert life.push("e1", payload="p", occurred_at=known.occurred_at).outcome is Outcome.ACCEPTED


def test_a_bucket_that_comes_back_begins_anew(life: Life) -> None:
    life.policy(**SHORT)
    first = life.close("e1")
    manifest = life.begun(first)
    life.settle(first, "confirmed", checkpoint='"left"', manifest=manifest)
    life.tick(3 * DAY - 1)
    second = handled(life, "e2")  # a moment before: it goes on
    assert life.manifest(second).window_version == 2
    assert life.do(life.ops.checkpoint(KEY)) == (1, '"left"')
    for _ in range(4 * 24):
        life.tick(HOUR)
    assert names(life, KEY) == set()
    third = handled(life, "e3")
    manifest = life.manifest(third)
    assert (manifest.window_version, manifest.relation, manifest.previous_window_id) == (1, "first", None)
    assert life.do(life.ops.checkpoint(KEY)) is None
    assert len({first, second, third}) == 3


def test_a_bucket_is_opened_at_the_very_instant_at_which_it_would_go(life: Life) -> None:
    life.policy(**SHORT)
    handled(life, "e1")
    life.clock.advance(3 * DAY, worker=False)
    assert life.push("e2").window_version == 2  # before the tick that would take it away
    life.tick()
    assert names(life, KEY) == {"bucket:*", "ids:*", "events:*"} | {
        n for n in names(life, KEY) if "ids." in n or "mani" in n
    }
    life.tick(10_000)
    [window_id] = life.taken()
    assert life.manifest(window_id).event_ids == ("e2",)


# --- all of it --------------------------------------------------------------------------------------------------------


def test_b064_the_number_of_keys_is_back_to_the_base(make_client: MakeClient, namespace: str) -> None:
    life = Life(make_client(), namespace, partitions=4)
    flows: dict[str, dict[str, Any]] = {
        "plain": {},
        "none": {"sink": "none"},
        "last": {"keep": "last"},
        "order": {"order_by": "source_version", "on_late": "reconcile"},
        "bot": {"handover": "together"},
        "free": {"ordered": False, "max_events": 4},
    }
    for flow, options in flows.items():
        life.policy(flow, **options, **SHORT)
    base = life.all_keys()
    keys = [f"t{n % 7}:{flow}:{n}" for n in range(34) for flow in flows][:200]
    events = [
        event(f"e{n}", key, life.clock, payload={"n": n}, source=f"s{n % 3}", source_version=n * (n % 4))
        for n in range(10)
        for key in keys
    ]
    assert len(events) == 2_000
    for half in (events[:1_000], events[1_000:]):
        life.acc.push_many(half)
        for key in keys[::10]:
            life.acc.retract(key, half[0]["event_id"])
        life.tick(10_000)
    lost = life.close_empty(keys[0])
    for _ in range(12):
        for taken in life.take(100):
            manifest = life.begin(taken.window_id, taken.attempt).manifest
            assert manifest is not None
            life.do(life.ops.save_stage(taken.window_id, TOKEN, "load", "1"))
            life.effect(taken.window_id, "pay", "begin")
            life.effect(taken.window_id, "pay", "confirm", result="1")
            assert life.settle(taken.window_id, "confirmed", checkpoint="1", manifest=manifest) == "done"
    assert {fields["state"] for fields in life.all_manifests().values()} == {"confirmed", "empty"}
    assert life.state(lost) == "empty"
    life.check()
    assert len(life.all_keys()) > len(base) + 1_000
    for item in life.acc.reconciliation():
        life.resolve(item, "discard")
    for _ in range(14):
        life.tick(6 * HOUR)
        life.record()
    life.check()
    for _ in range(10):
        life.tick(6 * HOUR)
    left = {key.partition("}:")[2] for key in life.all_keys() - base}
    assert left <= {"stats", "audit", "reconcile"}
    assert len(life.all_keys()) <= len(base) + 3 * 4


def test_of_a_purged_manifest_nothing_can_be_asked(life: Life) -> None:
    life.policy(**SHORT)
    window_id = handled(life, "e1")
    follower = life.close("e2")
    life.tick(DAY)
    assert life.decide(window_id, "replay") == ("wrong_state", "confirmed")
    assert [e.event.payload for e in life.manifest(window_id).events] == []
    life.tick(2 * DAY)
    assert life.decide(window_id, "replay") == ("missing", "")
    assert life.begin(window_id) == ("", None)
    ctx = life.context(life.begun(follower))
    assert ctx.manifest.previous_window_id == window_id
    assert ctx.predecessor is None


def test_purging_is_done_in_bounded_steps(life: Life) -> None:
    life.policy(sink="none", max_events=1, **SHORT)
    life.acc.push_many(event("e", f"t:f:{n}", life.clock) for n in range(50))
    life.record()
    life.clock.advance(DAY, worker=False)
    for n in range(1, 6):
        tick = life.do(life.ops.tick(0, 10))
        assert (tick.handled, tick.failure) == (10, None)
        assert len([key for key in life.all_keys() if ":events:" in key]) == 50 - 10 * n
    assert {fields["state"] for fields in life.all_manifests().values()} <= SETTLED


def test_payloads_that_went_are_missing_and_not_null(life: Life) -> None:
    life.policy(keep="last", **SHORT)
    window_id = handled(life, "e1", "e2", payload=None)
    payloads = [e.event.payload for e in life.manifest(window_id).events]
    assert payloads == [MISSING, None]


# --- all of it --------------------------------------------------------------------------------------------------------


@pytest.fixture
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """No handler is registered; who looks every few seconds looks more often."""
    monkeypatch.setattr(accumulator.handlers, "_registry", {})
    monkeypatch.setattr(Closer, "POLL", 0.2)
    monkeypatch.setattr(Janitor, "PAUSE", 0.2)


# B064
@pytest.mark.usefixtures("_quick")
def test_nothing_is_left_of_what_was_handled(capsys: pytest.CaptureFixture[str]) -> None:
    """A small `make retention`, with a worker at work."""
    assert retention.main(["--events", "2000", "--buckets", "200"]) == 0
    assert capsys.readouterr().out.endswith("back to the base\n")


@pytest.mark.usefixtures("_quick")
def test_what_is_left_is_told(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(retention.Retention, "pass_time", lambda self, _: self.accumulator.flush_where(flow="kept"))
    monkeypatch.setattr(retention.Retention, "settled", lambda _: True)
    assert retention.main(["--events", "200", "--buckets", "20"]) == 1
    assert "WRONG: 10 keys of manifest were left" in capsys.readouterr().out
