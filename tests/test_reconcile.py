"""What waits for somebody to decide: events in the reconciliation queue, manifests in trouble, and the ceilings."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest

import accumulator.handlers
from accumulator.context import Context
from accumulator.decisions import ReconcileItem, Resolved
from accumulator.errors import InvalidInput
from accumulator.handlers import QueueFull, RetryLater, handler
from accumulator.manifest import pairs_digest
from accumulator.runner import run_attempt
from accumulator.windows import Outcome, Receipt
from tests.conftest import MakeClient, event
from tests.life import KEY, LEASE, OTHER, TOKEN, Life

CAUTIOUS: dict[str, Any] = {
    "on_conflict": "reconcile",
    "kinds": ["k", "start"],
    "order_by": "source_version",
    "on_late": "reconcile",
    "max_delay": "1h",
    "max_future": "1m",
    "on_policy_change": "reconcile",
}


@pytest.fixture
def life(make_client: MakeClient, namespace: str) -> Iterator[Life]:
    life = Life(make_client(), namespace)
    yield life
    life.check()


def queue(life: Life, code: str) -> ReconcileItem:
    """One event that the flow's rules send to reconciliation for that reason; window 1 is closed, window 2 open."""
    life.policy(**CAUTIOUS)
    life.close("e1", "e2", source_version=5, policy_version=3)
    life.push("e3", source_version=9, policy_version=3)
    special: dict[str, dict[str, Any]] = {
        "conflict": {"event_id": "e3", "payload": "other"},
        "unknown_kind": {"kind": "odd"},
        "occurred_in_future": {"occurred_at": life.clock.instant + timedelta(minutes=2)},
        "stale_policy_version": {"policy_version": 2},
        "policy_changed": {"policy_version": 4},
        "too_old": {"occurred_at": life.clock.instant - timedelta(hours=2)},
        "late": {"source_version": 4},
    }
    fields = {
        "event_id": "q",
        "payload": {"n": [1, None]},
        "ref": "r:1",
        "source_version": 12,
        "policy_version": 3,
        **special[code],
    }
    receipt = life.push(**fields)
    assert (receipt.outcome, receipt.code) == (Outcome.RECONCILED, code)
    [item] = life.acc.reconciliation()
    assert (item.code, item.queued_at, item.event.event_id, item.window) == (
        code,
        life.clock.now,
        fields["event_id"],
        2,
    )
    return item


CODES = ["conflict", "unknown_kind", "occurred_in_future", "stale_policy_version", "policy_changed", "too_old", "late"]


# --- events -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("code", CODES)
def test_an_event_is_accepted_into_the_next_window(life: Life, code: str) -> None:
    item = queue(life, code)
    life.tick(1_000)
    done = nonces(life, lambda: life.resolve(item, "accept"))
    assert done.outcome == "accepted"
    receipt = done.receipt
    assert receipt is not None
    late, revised = code in ("too_old", "late"), code == "conflict"
    assert (receipt.outcome, receipt.late) == (Outcome.REVISED if revised else Outcome.ACCEPTED, late)
    assert (receipt.window_version, receipt.position) == (2, 2)
    assert life.acc.reconciliation() == []
    entry = life.acc.open_events(KEY)[-1]
    assert (entry.event, entry.received_at, entry.position) == (item.event, life.clock.now, 2)
    assert (entry.late, entry.revised, entry.reconciled) == (late, revised, True)
    assert not life.acc.open_events(KEY)[0].reconciled
    # The same call again, since its answer was lost; and another one.
    assert nonces(life, lambda: life.resolve(item, "accept")) == done
    assert life.resolve(item, "accept") == Resolved(item.item_id, "missing")
    assert life.push("q" if not revised else "e3", **_fields(item)).outcome is Outcome.DUPLICATE
    [resolved] = [entry for entry in audit(life) if entry["outcome"] == "resolved"]
    assert {name: resolved[name] for name in ("event_id", "bucket_key", "code", "by", "why")} == {
        "event_id": item.event.event_id, "bucket_key": KEY, "code": code, "by": "ana", "why": "seen",
    }  # fmt: skip
    window_id = life.close()
    manifest = life.manifest(window_id)
    assert manifest.event_count == (1 if revised else 2)
    assert manifest.entries == 2
    assert manifest.late_event_ids == (("q",) if late else ())
    assert manifest.revised_event_ids == (("e3",) if revised else ())
    life.do(life.ops.record(manifest))
    assert [e.reconciled for e in life.manifest(window_id).record] == [False, True]
    assert manifest.digest == pairs_digest((e.event.event_id, e.event.content_digest) for e in manifest.events)


def nonces(life: Life, call: Callable[[], Resolved]) -> Resolved:
    """A call as it is sent again: with the nonce that it had."""
    made = life.ops._nonce
    life.ops._nonce = lambda length: "c0ffee"
    try:
        return call()
    finally:
        life.ops._nonce = made


def _fields(item: ReconcileItem) -> dict[str, Any]:
    given = item.event
    return {
        "kind": given.kind, "occurred_at": given.occurred_at, "source_version": given.source_version, "ref": given.ref,
        "policy_version": given.policy_version, "payload": given.payload,
    }  # fmt: skip


def audit(life: Life) -> list[dict[str, str]]:
    return [
        {name.decode(): value.decode() for name, value in fields.items()}
        for prefix in life.ops.prefixes
        for _, fields in life.client.xrange(f"{prefix}audit")
    ]


@pytest.mark.parametrize("code", CODES)
def test_an_event_is_discarded_with_a_reason(life: Life, code: str) -> None:
    item = queue(life, code)
    before = life.acc.open_events(KEY)
    assert life.resolve(item, "discard") == Resolved(item.item_id, "discarded")
    assert life.resolve(item, "discard") == Resolved(item.item_id, "missing")
    assert life.resolve(item, "accept") == Resolved(item.item_id, "missing")
    assert life.acc.reconciliation() == []
    assert life.acc.open_events(KEY) == before
    [entry] = [entry for entry in audit(life) if entry["outcome"] == "discarded"]
    assert (entry["code"], entry["by"], entry["why"]) == (code, "ana", "seen")
    # It is remembered, and not queued again.
    assert life.push(item.event.event_id, **_fields(item)).outcome is Outcome.DUPLICATE
    assert life.acc.counters()["resolved"] == 1


@pytest.mark.parametrize(
    ("who", "why"), [("", "seen"), ("ana", " "), ("a\nb", "seen"), ("x" * 201, "x"), ("ana", "x" * 1001)]
)
def test_who_and_why_are_named(life: Life, who: str, why: str) -> None:
    item = queue(life, "late")
    with pytest.raises(InvalidInput):
        life.do(life.ops.resolve(item, "accept", who, why))
    assert life.acc.reconciliation() == [item]


def test_an_accepted_event_opens_a_window_where_none_is_open(life: Life) -> None:
    item = queue(life, "late")
    life.tick(10_000)
    assert life.acc.bucket(KEY).open is None
    receipt = life.resolve(item, "accept").receipt
    assert receipt is not None
    assert (receipt.window_version, receipt.position, receipt.closed_windows) == (3, 1, ())
    open_ = life.acc.bucket(KEY).open
    assert open_ is not None
    assert open_.due_at == life.clock.now + 10_000
    life.tick(10_000)
    assert [m.close_reason for m in life.acc.manifests(KEY)] == ["flush", "inactivity", "inactivity"]


def test_a_window_that_is_due_closes_before_the_event_joins(life: Life) -> None:
    item = queue(life, "late")
    life.clock.advance(10_000, worker=False)
    receipt = life.resolve(item, "accept").receipt
    assert receipt is not None
    assert receipt.window_version == 3
    assert [(c.window_version, c.reason) for c in receipt.closed_windows] == [(2, "inactivity")]
    item = queue_again(life)
    life.clock.advance(10_000, worker=False)
    assert life.resolve(item, "discard").outcome == "discarded"
    assert len(life.acc.manifests(KEY)) == 3


def queue_again(life: Life) -> ReconcileItem:
    assert life.push("q2", kind="odd", policy_version=3).outcome is Outcome.RECONCILED
    [item] = life.acc.reconciliation()
    return item


def test_an_accepted_event_makes_room_and_closes_as_any_other(life: Life) -> None:
    life.policy(kinds=["k"], max_events=2, max_bytes=20, starter_kinds=["k"])
    life.push("q1", kind="odd", payload="x" * 10)
    life.push("q2", kind="odd", payload="x" * 10)
    life.push("q3", kind="odd", payload="y")
    items = life.acc.reconciliation()
    life.push("e1", payload="z")
    first, second, third = (life.resolve(item, "accept").receipt for item in items)
    assert first is not None
    assert second is not None
    assert third is not None
    assert (first.window_version, first.closed, first.closed_windows[0].reason) == (1, "max_events", "max_events")
    assert (second.window_version, second.closed, second.closed_windows) == (2, None, ())
    assert (third.window_version, third.closed) == (2, "max_events")


def test_a_higher_policy_version_splits(life: Life) -> None:
    life.policy(kinds=["k"])
    life.push("q", kind="odd", policy_version=2)
    [item] = life.acc.reconciliation()
    life.push("e1", policy_version=1)
    receipt = life.resolve(item, "accept").receipt
    assert receipt is not None
    assert (receipt.window_version, receipt.closed_windows[0].reason) == (2, "policy_change")


def test_an_item_whose_id_was_retracted_counts_anew(life: Life) -> None:
    life.policy(on_conflict="reconcile")
    life.push("e1", payload="a")
    assert life.acc.retract(KEY, "e1").outcome == "retracted"
    assert life.push("e1", payload="b").outcome is Outcome.RECONCILED
    [item] = life.acc.reconciliation()
    assert life.resolve(item, "accept").outcome == "accepted"
    open_ = life.acc.bucket(KEY).open
    assert open_ is not None
    assert (open_.entries, open_.event_count) == (1, 1)
    window_id = life.close()
    manifest = life.manifest(window_id)
    assert (manifest.state, manifest.event_ids, manifest.retracted_event_ids) == ("closed", ("e1",), ("e1",))
    assert [e.event.payload for e in manifest.events] == ["b"]
    assert manifest.anomaly is None


def test_the_last_payload_is_the_accepted_one(life: Life) -> None:
    life.policy(keep="last", kinds=["k"])
    life.push("q", kind="odd", payload="from the queue")
    [item] = life.acc.reconciliation()
    life.push("e1", payload="first")
    assert life.resolve(item, "accept").outcome == "accepted"
    window_id = life.close()
    manifest = life.manifest(window_id)
    assert list(manifest.payloads()) == ["from the queue"]
    assert [(e.event.event_id, e.reconciled) for e in manifest.events] == [("e1", False), ("q", True)]
    assert manifest.digest == pairs_digest((e.event.event_id, e.event.content_digest) for e in manifest.events)


# --- set aside --------------------------------------------------------------------------------------------------------


def test_a_handler_sets_an_event_aside_once(life: Life) -> None:
    life.policy()
    window_id = life.close("e1", "e2", payload={"a": 1})
    ctx = life.context(life.begun(window_id))
    ctx.set_aside("e2", "no such customer")
    ctx.set_aside("e2", "no such customer")
    with pytest.raises(InvalidInput, match="event_id"):
        ctx.set_aside("e3", "?")
    life.settle(window_id, "failed")
    life.tick(1)
    ctx = life.context(life.begun(window_id, OTHER), OTHER)
    ctx.set_aside("e2", "no such customer")
    life.settle(window_id, "confirmed", token=OTHER)
    [item] = life.acc.reconciliation()
    assert (item.code, item.why, item.window, item.event) == (
        "set_aside", "no such customer", 1, life.manifest(window_id).events[1].event,
    )  # fmt: skip
    assert item.known == (item.digest,)
    assert life.acc.counters()["reconciled:set_aside"] == 1
    assert life.push("e2", payload={"a": 1}, occurred_at=item.event.occurred_at).outcome is Outcome.DUPLICATE
    # Accepted, it is the same content once more, and no revision.
    receipt = life.resolve(item, "accept").receipt
    assert receipt is not None
    assert (receipt.outcome, receipt.window_version) == (Outcome.ACCEPTED, 2)
    [entry] = life.acc.open_events(KEY)
    assert (entry.event, entry.revised, entry.reconciled) == (item.event, False, True)
    manifest = life.manifest(life.close())
    assert (manifest.event_ids, manifest.event_count, manifest.revised_event_ids) == (("e2",), 1, ())


def test_an_event_without_its_payload_is_set_aside_with_its_digest(life: Life) -> None:
    life.policy(keep="last")
    window_id = life.close("e1", "e2", payload="p")
    manifest = life.begun(window_id)
    life.context(manifest).set_aside("e1", "odd")
    [item] = life.acc.reconciliation()
    assert item.digest == item.event.content_digest == manifest.record[0].content_digest
    life.policy(keep="all")
    assert life.resolve(item, "accept").outcome == "accepted"
    newer = life.manifest(life.close())
    assert newer.record[0].content_digest == item.digest
    assert newer.anomaly is None


def test_an_event_of_any_manifest_that_was_handed_over(life: Life) -> None:
    life.policy(handover="together")
    windows = [life.close(f"e{n}") for n in range(3)]
    assert life.taken() == windows[2:]
    leader = life.begin(windows[2]).manifest
    assert leader is not None
    first = life.manifest(windows[0])
    assert life.do(life.ops.set_aside(windows[2], TOKEN, first.events[0].event, "odd")) == "done"
    assert life.do(life.ops.set_aside(windows[0], TOKEN, first.events[0].event, "odd")) == "refused"
    [item] = life.acc.reconciliation()
    assert item.event.event_id == "e0"


# --- manifests --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("effects", "pay", "mail"),
    [("", "uncertain", "begun"), ("done", "confirmed", "confirmed"), ("not_done", None, None)],
)
@pytest.mark.parametrize("state", ["dead", "uncertain", "reconciling"])
def test_a_replay_says_what_became_of_effects_in_doubt(
    life: Life, state: str, effects: str, pay: str | None, mail: str | None
) -> None:
    life.policy()
    window_id = life.close("e1")
    life.begun(window_id)
    life.effect(window_id, "pay", "begin")
    life.effect(window_id, "pay", "doubt")
    life.effect(window_id, "mail", "begin")
    life.effect(window_id, "log", "begin")
    life.effect(window_id, "log", "confirm", result="7")
    life.settle(window_id, state)
    assert life.decide(window_id, "replay", effects) == ("done", "retrying")
    ledger = {e.name: (e.state, e.result) for e in life.do(life.ops.effects(window_id))}
    wanted = {"log": ("confirmed", "7"), "pay": (pay, ""), "mail": (mail, "")}
    assert ledger == {name: entry for name, entry in wanted.items() if entry[0] is not None}
    life.begun(window_id, OTHER)
    told = {"": "uncertain", "done": "confirmed", "not_done": "begun"}[effects]
    assert life.effect(window_id, "pay", "begin", "n9", token=OTHER) == told
    assert life.effect(window_id, "log", "begin", "n9", token=OTHER) == "confirmed"


@pytest.mark.parametrize("decision", ["confirm", "discard"])
def test_what_a_person_settles_lets_go_of_all_that_waited(life: Life, decision: str) -> None:
    life.policy()
    first, second = life.close("e1"), life.close("e2")
    life.begun(first)
    life.effect(first, "pay", "begin")
    life.settle(first, "uncertain")
    life.begun(second, OTHER)
    assert life.decide(first, decision)[0] == "done"
    assert life.manifest(first).settled
    assert life.states() == ["confirmed" if decision == "confirm" else "discarded", "processing"]
    assert life.decide(first, decision)[0] == "wrong_state"
    life.settle(second, "confirmed", token=OTHER)
    assert life.do(life.ops.attention()) == []


def test_an_attempt_that_a_person_ended_has_no_say(life: Life) -> None:
    """It was killed, was dead, and a person settled it; its thread lives on somewhere."""
    life.policy()
    window_id = life.close("e1")
    life.begun(window_id, most=1)
    life.effect(window_id, "pay", "begin")
    life.tick(LEASE)
    assert life.state(window_id) == "dead"
    assert life.decide(window_id, "discard") == ("done", "discarded")
    assert life.effect(window_id, "pay", "confirm") == "refused"
    assert life.settle(window_id, "confirmed") == "refused"
    assert life.state(window_id) == "discarded"


def test_what_waits_longest_is_listed_first(life: Life) -> None:
    life.policy()
    windows = []
    for n, state in enumerate(["dead", "uncertain", "reconciling", "awaiting_approval"]):
        window_id = life.close("e", key=f"t:f:{n}")
        life.begun(window_id)
        life.tick(10)
        life.settle(window_id, state, delay=1_000_000)
        windows.append(window_id)
    assert life.do(life.ops.attention()) == windows
    life.decide(windows[0], "replay")
    life.begun(windows[0])
    life.tick(10)
    life.settle(windows[0], "dead")
    assert life.do(life.ops.attention()) == [*windows[1:], windows[0]]


# --- ceilings ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def wide(make_client: MakeClient, namespace: str) -> Life:
    """A namespace of eight partitions, with room for five manifests and three items."""
    life = Life(make_client(), namespace, partitions=8)
    life.do(life.ops.set_ceilings(5, 3))
    return life


def outcomes(receipts: list[Receipt]) -> Counter[tuple[str, str | None]]:
    return Counter((str(receipt.outcome), receipt.code) for receipt in receipts)


def test_b085_the_ceiling_of_unsettled_manifests_is_exact(wide: Life) -> None:
    wide.policy(max_events=1)
    events = [event(f"e{n}", f"t:f:{n}", wide.clock) for n in range(40)]
    receipts = wide.acc.push_many(events)
    assert outcomes(receipts) == {("accepted", None): 5, ("rejected", "overloaded"): 35}
    assert len({wide.ops.prefix_of(r.bucket_key) for r in receipts}) == 8
    # A duplicate is still one, and what was refused was not taken.
    taken = [n for n, r in enumerate(receipts) if r.outcome is Outcome.ACCEPTED]
    again = wide.acc.push_many([events[n] for n in taken])
    assert outcomes(again) == {("duplicate", None): 5}
    assert outcomes([wide.push("new", f"t:f:{taken[0]}")]) == {("rejected", "overloaded"): 1}
    assert wide.acc.open_buckets() == []
    # Each one that settles makes room for one.
    windows = wide.taken()
    assert len(windows) == 5
    for window_id in windows[:2]:
        wide.begin(window_id)
        assert wide.settle(window_id, "confirmed") == "done"
        again = wide.acc.push_many(events)
        assert outcomes(again)["accepted", None] == 1
    wide.check()


def test_a_window_that_is_due_closes_at_the_ceiling_all_the_same(wide: Life) -> None:
    wide.policy()
    for n in range(5):
        wide.close("e1", key=f"t:f:{n}")
        wide.push("e2", f"t:f:{n}") if n == 0 else None
    assert wide.push("e3", "t:f:9").outcome is Outcome.REJECTED
    wide.clock.advance(10_000, worker=False)
    receipt = wide.push("e3", "t:f:0")
    assert (receipt.outcome, receipt.code) == (Outcome.REJECTED, "overloaded")
    assert [c.reason for c in receipt.closed_windows] == ["inactivity"]
    wide.tick()
    wide.check()
    # Flushing and closing go on; an empty window, and one of sink none, take no room.
    assert len(wide.do(wide.ops.attention())) == 0
    wide.policy("n", sink="none")
    assert wide.push("e", "t:n:1").outcome is Outcome.REJECTED


def test_the_ceiling_of_the_reconciliation_queue_is_exact(wide: Life) -> None:
    wide.policy(kinds=["k"])
    events = [event(f"e{n}", f"t:f:{n}", wide.clock, kind="odd") for n in range(40)]
    receipts = wide.acc.push_many(events)
    assert outcomes(receipts) == {("reconciled", "unknown_kind"): 3, ("rejected", "overloaded"): 37}
    assert len(wide.acc.reconciliation()) == 3
    assert wide.push("fine", "t:f:1").outcome is Outcome.ACCEPTED
    queued = [n for n, r in enumerate(receipts) if r.outcome is Outcome.RECONCILED]
    assert wide.acc.push(events[queued[0]]).outcome is Outcome.DUPLICATE
    first, second, _ = wide.acc.reconciliation()
    wide.resolve(first, "discard")
    wide.resolve(second, "accept")
    receipts = wide.acc.push_many(event(f"f{n}", f"t:f:{n}", wide.clock, kind="odd") for n in range(20))
    assert outcomes(receipts) == {("reconciled", "unknown_kind"): 2, ("rejected", "overloaded"): 18}


@pytest.mark.parametrize("caught", [False, True])
def test_at_its_ceiling_the_queue_takes_nothing_that_is_set_aside(
    wide: Life, monkeypatch: pytest.MonkeyPatch, caught: bool
) -> None:
    monkeypatch.setattr(accumulator.handlers, "_registry", {})
    monkeypatch.setattr(accumulator.handlers, "_names", {})
    done: list[str] = []

    @handler("f", max_attempts=2, backoff="1ms", max_backoff="1ms")
    def handle(ctx: Context) -> None:
        for entry in ctx.events:
            if entry.event.event_id != "odd":
                ctx.once("post", done.append, event_id=entry.event.event_id)
                continue
            try:
                ctx.set_aside("odd", "can't be read")
            except QueueFull:
                if not caught:
                    raise
                raise RetryLater("1h") from None

    wide.policy(kinds=["k"])
    for n in range(3):
        assert wide.push("e", f"t:f:{n}", kind="unlisted").outcome is Outcome.RECONCILED
    window_id = wide.close("fine", "odd", key="t:f:8")
    [taken] = wide.take()
    assert run_attempt(wide.acc, *taken[:2]) == "failed"
    manifest = wide.manifest(window_id)
    assert manifest.timeline[-1][1:] == ("retrying", 1, "RetryLater" if caught else "QueueFull")
    if not caught:
        assert manifest.error == "QueueFull: the reconciliation queue holds all that it may (max_reconcile)"
        wide.tick(1)
        [taken] = wide.take()
        assert run_attempt(wide.acc, *taken[:2]) == "failed"
        assert wide.state(window_id) == "dead"
    assert len(wide.acc.reconciliation()) == 3
    # Once there is room, it is set aside; what was done is not done again.
    wide.resolve(wide.acc.reconciliation()[0], "discard")
    wide.tick(3_600_000)
    if not caught:
        assert wide.decide(window_id, "replay") == ("done", "retrying")
    [taken] = wide.take()
    assert run_attempt(wide.acc, *taken[:2]) == "confirmed"
    assert done == [f"{window_id}:post:fine"]
    assert [item.code for item in wide.acc.reconciliation()] == ["unknown_kind"] * 2 + ["set_aside"]
    # Asked again by an attempt that did not hear the answer, it is there already, at the ceiling too.
    other = wide.close("e1", key="t:f:9")
    wide.begun(other, OTHER)
    wide.resolve(wide.acc.reconciliation()[0], "discard")
    event_ = wide.manifest(other).events[0].event
    assert [wide.do(wide.ops.set_aside(other, OTHER, event_, "odd")) for _ in range(2)] == ["done"] * 2
    assert len(wide.acc.reconciliation()) == 3
    wide.check()


def test_ceilings_are_those_of_the_namespace(wide: Life, make_client: MakeClient, namespace: str) -> None:
    wide.policy(max_events=1)
    other = Life(make_client(), namespace, partitions=8)
    assert outcomes([other.push("e", f"t:f:{n}") for n in range(9)])["accepted", None] == 5
    assert wide.push("e", "t:f:99").code == "overloaded"
    wide.do(wide.ops.set_ceilings(7, 3))
    assert outcomes([wide.push("e", f"t:f:{n}") for n in range(20, 29)])["accepted", None] == 2


def test_far_from_the_ceilings_nothing_is_counted(life: Life) -> None:
    life.policy()
    life.push("e0")
    life.client.config_resetstat()
    for n in range(1, 20):
        life.push(f"e{n}")
    counted = life.client.info("commandstats")
    assert "cmdstat_zcard" not in counted
    assert "cmdstat_xlen" not in counted
