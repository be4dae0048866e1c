"""What people and programs give by mistake: taken exactly, or refused by field and rule before anything is written."""

from __future__ import annotations

import math
from collections import OrderedDict
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import pytest

from accumulator.client import Accumulator
from accumulator.envelope import MISSING, Event, bucket_key
from accumulator.errors import AccumulatorError, InvalidEvent, InvalidInput, UnknownFlow
from accumulator.testing import VirtualClock
from accumulator.windows import Outcome
from tests.conftest import MakeClient, event
from tests.invariants import contents


def nested(depth: int) -> Any:
    value: Any = []
    for _ in range(depth - 1):
        value = [value]
    return value


# (changes to a good event, the field that is named, words of the rule)
REFUSED: list[tuple[dict[str, Any], str, str]] = [
    # text: empty, oversized, of another type, no UTF-8
    ({"event_id": ""}, "event_id", "must not be empty"),
    ({"event_id": "x" * 257}, "event_id", "at most 256 bytes"),
    ({"event_id": "é" * 129}, "event_id", "at most 256 bytes of UTF-8, and has 258"),
    ({"event_id": 12345678901234567890}, "event_id", "must be text"),
    ({"event_id": b"bytes"}, "event_id", "must be text"),
    ({"event_id": None}, "event_id", "must be text"),
    ({"event_id": MISSING}, "event_id", "is required"),
    ({"event_id": "\ud800"}, "event_id", "lone surrogate"),
    ({"kind": ""}, "kind", "must not be empty"),
    ({"kind": "k" * 129}, "kind", "at most 128 bytes"),
    ({"source": ""}, "source", "must not be empty"),
    ({"source": "🙂" * 33}, "source", "at most 128 bytes"),
    ({"ref": "r" * 513}, "ref", "at most 512 bytes"),
    ({"content_key": "c" * 257}, "content_key", "at most 256 bytes"),
    ({"trace": "00-xyz"}, "trace", "traceparent"),
    # bucket keys
    ({"bucket_key": ""}, "bucket_key", "must not be empty"),
    ({"bucket_key": "t"}, "bucket_key", "at least three parts"),
    ({"bucket_key": "t:f"}, "bucket_key", "at least three parts"),
    ({"bucket_key": "t:f:"}, "bucket_key", "empty part"),
    ({"bucket_key": ":f:1"}, "bucket_key", "empty part"),
    ({"bucket_key": "t::1"}, "bucket_key", "empty part"),
    ({"bucket_key": "t:f:1::2"}, "bucket_key", "empty part"),
    ({"bucket_key": "t:f:a\nb"}, "bucket_key", "control characters"),
    ({"bucket_key": "t:f:\x00"}, "bucket_key", "control characters"),
    ({"bucket_key": "t:f:\x7f"}, "bucket_key", "control characters"),
    ({"bucket_key": "t:f:\x85"}, "bucket_key", "control characters"),
    ({"bucket_key": "t:f:" + "o" * 509}, "bucket_key", "at most 512 bytes"),
    ({"bucket_key": "t:f:\udc80"}, "bucket_key", "lone surrogate"),
    ({"bucket_key": ["t", "f", "1"]}, "bucket_key", "must be text"),
    # instants
    ({"occurred_at": MISSING}, "occurred_at", "is required"),
    ({"occurred_at": None}, "occurred_at", "must be a datetime"),
    ({"occurred_at": datetime(2026, 1, 1)}, "occurred_at", "must carry an offset"),
    ({"occurred_at": "2026-01-01T00:00:00"}, "occurred_at", "must carry an offset"),
    ({"occurred_at": 1_767_225_600}, "occurred_at", "is a bare number"),
    ({"occurred_at": 1_767_225_600_000}, "occurred_at", "is a bare number"),
    ({"occurred_at": 1.5}, "occurred_at", "is a bare number"),
    ({"occurred_at": datetime.fromtimestamp(1_767_225, UTC)}, "occurred_at", "seconds where milliseconds belong?"),
    ({"occurred_at": "1999-12-31T23:59:59.999Z"}, "occurred_at", "between 2000-01-01 and 2100-01-01"),
    ({"occurred_at": "2100-01-01T00:00:00.001Z"}, "occurred_at", "between 2000-01-01 and 2100-01-01"),
    ({"occurred_at": datetime(2286, 11, 20, tzinfo=UTC)}, "occurred_at", "between 2000-01-01 and 2100-01-01"),
    ({"occurred_at": datetime(1, 1, 1, tzinfo=timezone(timedelta(hours=14)))}, "occurred_at", "between 2000"),
    ({"occurred_at": "2026-02-30T00:00:00Z"}, "occurred_at", "does not exist"),
    ({"occurred_at": "yesterday"}, "occurred_at", "RFC 3339"),
    ({"deadline_at": datetime(2026, 1, 1)}, "deadline_at", "must carry an offset"),
    ({"deadline_at": 60}, "deadline_at", "is a bare number"),
    # integers
    ({"weight": -1}, "weight", "must not be negative"),
    ({"weight": 2**31}, "weight", "at most 2147483647"),
    ({"weight": 1.0}, "weight", "must be an integer"),
    ({"weight": True}, "weight", "must be an integer"),
    ({"weight": "1"}, "weight", "must be an integer"),
    ({"policy_version": -1}, "policy_version", "must not be negative"),
    ({"policy_version": 2**31}, "policy_version", "at most 2147483647"),
    ({"source_version": -1}, "source_version", "must not be negative"),
    ({"source_version": 2**63}, "source_version", "at most 9223372036854775807"),
    ({"source_version": "7"}, "source_version", "must be an integer"),
    # payloads
    ({"payload": nested(129)}, "payload", "nested deeper than 128"),
    ({"payload": {"a": nested(128)}}, "payload", "nested deeper than 128"),
    ({"payload": [math.nan]}, "payload", "NaN or Infinity"),
    ({"payload": -math.inf}, "payload", "NaN or Infinity"),
    ({"payload": 2**64}, "payload", "outside -2^63"),
    ({"payload": {"a": [-(2**63) - 1]}}, "payload", "outside -2^63"),
    ({"payload": "\ud83d"}, "payload", "lone surrogate"),
    ({"payload": {"\ud83d": 1}}, "payload", "lone surrogate"),
    ({"payload": {1: "one"}}, "payload", "no text"),
    ({"payload": {"a": b"bytes"}}, "payload", "only a whole payload may be bytes"),
    ({"payload": {"a": {1, 2}}}, "payload", "holds a value of type set"),
    ({"payload": object()}, "payload", "holds a value of type object"),
    ({"payload": datetime(2026, 1, 1, tzinfo=UTC)}, "payload", "holds a value of type datetime"),
    # what is no field
    ({"window_id": "x"}, "window_id", "not a field"),
    ({"Kind": "x"}, "Kind", "not a field"),
]
IDS = [f"{field}-{n}" for n, (_, field, _) in enumerate(REFUSED)]


def broken(changes: dict[str, Any]) -> dict[str, Any]:
    fields = event("e1") | changes
    return {name: value for name, value in fields.items() if value is not MISSING}


@pytest.mark.parametrize(("changes", "field", "rule"), REFUSED, ids=IDS)
def test_an_event_is_refused_by_field_and_rule(changes: dict[str, Any], field: str, rule: str) -> None:
    with pytest.raises(InvalidEvent) as caught:
        Event.of(broken(changes), 3)
    assert (caught.value.field, caught.value.index) == (field, 3)
    assert rule in caught.value.rule
    assert str(caught.value) == f"event 3: {field}: {caught.value.rule}"
    assert len(str(caught.value)) < 200
    with pytest.raises(InvalidEvent) as caught:
        Event(**broken(changes))
    assert (caught.value.field, caught.value.index) == (field, None)


def test_nothing_is_written_for_what_is_refused(virtual: Accumulator, make_client: MakeClient) -> None:
    control = make_client()
    for changes, field, _ in REFUSED:
        with pytest.raises(InvalidEvent) as caught:
            virtual.push(broken(changes))
        assert caught.value.field == field
    assert control.dbsize() == 0, "a refused event made the namespace"

    virtual.load_policy("f", {"inactivity": "10s"})
    virtual.push(event("known", at=datetime(2026, 1, 1, tzinfo=UTC)))
    before = contents(control)
    good = [event(f"g{n}", f"t:f:{n}") for n in range(5)]
    for changes, field, _ in REFUSED:
        with pytest.raises(InvalidEvent) as caught:
            virtual.push_many([*good[:3], broken(changes), *good[3:]])
        assert (caught.value.field, caught.value.index) == (field, 3)
    for wrong in (None, 7, "e1", [event("e1")], b"{}"):
        with pytest.raises(InvalidEvent):
            virtual.push_many([wrong])  # type: ignore[list-item]
    with pytest.raises(InvalidEvent, match="not both"):
        virtual.push(event("e1"), kind="k")
    assert contents(control) == before


def test_a_flow_without_a_policy_is_an_error_until_there_is_a_default(
    virtual: Accumulator, make_client: MakeClient
) -> None:
    control = make_client()
    virtual.load_policy("f", {"inactivity": "10s"})
    before = contents(control)
    with pytest.raises(UnknownFlow, match=r"flow g: there is no policy for it and none named 'default'"):
        virtual.push(event("e1", "t:g:1"))
    with pytest.raises(UnknownFlow):
        virtual.push_many([event("e1"), event("e2", "t:g:1"), event("e3")])
    assert contents(control) == before
    virtual.load_policy("default", {"inactivity": "10s"})
    assert virtual.push(event("e1", "t:g:1")).outcome is Outcome.ACCEPTED


def test_a_partition_that_lost_its_policy_is_brought_up(
    virtual: Accumulator, make_client: MakeClient, clock: VirtualClock
) -> None:
    control = make_client()
    virtual.load_policy("f", {"inactivity": "10s"})
    virtual.push(event("e1", at=clock))
    control.delete(*control.scan_iter(match="*:policy:f"))
    assert virtual.push(event("e2", "t:f:2", clock)).outcome is Outcome.ACCEPTED
    # Where the namespace does not know it either, that is the error, and nothing is written.
    control.delete(*control.scan_iter(match="*:policy:f"))
    version_and_policy = control.hget(f"{virtual.operations.namespace}:meta", "flow:f")
    assert version_and_policy is not None
    control.hdel(f"{virtual.operations.namespace}:meta", "flow:f")
    before = contents(control)
    with pytest.raises(UnknownFlow):
        virtual.push(event("e3", "t:f:3", clock))
    assert contents(control) == before
    control.hset(f"{virtual.operations.namespace}:meta", "flow:f", version_and_policy)
    assert virtual.push(event("e3", "t:f:3", clock)).outcome is Outcome.ACCEPTED
    virtual.store.perform(virtual.operations.repair_policies())


@pytest.mark.parametrize("wrong", ["", "t:f", "t::1", "a\nb:c:d", "t:f:" + "x" * 600, 7, None, b"t:f:1", "t:f:\ud800"])
def test_other_calls_refuse_what_is_no_bucket_key(virtual: Accumulator, make_client: MakeClient, wrong: Any) -> None:
    calls: list[Any] = [
        lambda: virtual.flush(wrong),
        lambda: virtual.hold(wrong, "1s"),
        lambda: virtual.retract(wrong, "e1"),
        lambda: virtual.bucket(wrong),
        lambda: virtual.manifests(wrong),
        lambda: virtual.open_events(wrong),
    ]
    for call in calls:
        with pytest.raises(InvalidEvent) as caught:
            call()
        assert caught.value.field == "bucket_key"
    assert make_client().dbsize() == 0


def test_other_calls_refuse_their_other_arguments(virtual: Accumulator, make_client: MakeClient) -> None:
    calls: list[tuple[str, Any]] = [
        ("event_id", lambda: virtual.retract("t:f:1", "")),
        ("event_id", lambda: virtual.retract("t:f:1", "x" * 257)),
        ("event_id", lambda: virtual.retract("t:f:1", 7)),  # type: ignore[arg-type]
        ("event_id", lambda: virtual.retract("t:f:1", "\ud800")),
        ("window_version", lambda: virtual.flush("t:f:1", "1")),  # type: ignore[arg-type]
        ("window_version", lambda: virtual.flush("t:f:1", 1.0)),  # type: ignore[arg-type]
        ("window_version", lambda: virtual.flush("t:f:1", True)),
        ("flow", lambda: virtual.flush_where()),
    ]
    for field, call in calls:
        with pytest.raises(InvalidInput) as caught:
            call()
        assert caught.value.field == field
    for duration in ("", "10", "10 s", "1.5s", "-1s", "0s", 0, -5, True, 1.5, None, "4000d", "٣s"):
        with pytest.raises((InvalidInput, ValueError)):
            virtual.hold("t:f:1", duration)  # type: ignore[arg-type]
    policies: list[Any] = [
        {},
        {"inactivity": 10},
        {"inactivity": "10s", "max_evnts": 3},
        {"inactivity": "2h"},
        None,
        [],
    ]
    for policy in policies:
        with pytest.raises(InvalidInput):
            virtual.load_policy("f", policy)
    for flow in ("", "a:b", "x" * 129, 7, "a\nb"):
        with pytest.raises(InvalidInput):
            virtual.load_policy(flow, {"inactivity": "10s"})  # type: ignore[arg-type]
    assert make_client().dbsize() == 0

    virtual.load_policy("f", {"inactivity": "10s"})
    virtual.push(event("e1"))
    for window_id in ("", "x" * 19, "0" * 11 + "fff" + "0" * 6, "é" * 20, "0" * 30 + "\n", "..", None, 7):
        with pytest.raises(InvalidInput) as caught:
            virtual.manifest(window_id)  # type: ignore[arg-type]
        assert caught.value.field == "window_id"
    assert virtual.manifest("0" * 20) is None


ODD_TEXTS = [
    "x", " x", "x ", " ", "a b", "{chave}", "}{", "{}", "::", "a:b", "%", "%3A", "-", "0", "00", "+", "*", "2 3 4", "'",
    '"', "\\", "\\n", "a\nb", "\r\n", "\t", "\x00", "a\x00b", "\x1b[0m", "\x7f", "\x85", "é", "e\u0301", "客户-Ü-🙂",
    "id\u200d", "\u202ertl", "\ufeff", "\u2028", "\U0010ffff", "12345678901234567890", "1e400",
    "nil", "null", "true", "[]",
]  # fmt: skip
PAYLOADS: list[Any] = [
    MISSING, None, True, False, 0, -0.0, 0.1, 1e21, 1e-7, 5e-324, 1.7976931348623157e308, 2**53 + 1, 2**64 - 1,
    -(2**63), "", "\x00", "🙂", "\\u0000", [], {}, [[], {}], {"": ""}, {"b": 1, "a": 2}, {"a": [None, {"b": []}]},
    nested(128), b"", b"\x00\xff", bytes(range(256)), {"size": 1, "weight": 2, "late": True, "payload_bytes": "AA=="},
    {"é": "e\u0301", "\x01": "\x7f"}, "x" * 60_000, {"items": [], "meta": {}, "n": None, "nested": [[], {}]},
]  # fmt: skip


def exact(virtual: Accumulator, given: list[dict[str, Any]]) -> None:
    """Each event is accepted, stands in the open window and in the manifest exactly as it was made, and is known."""
    events = [Event.of(fields) for fields in given]
    assert [receipt.outcome for receipt in virtual.push_many(given)] == ["accepted"] * len(events)
    for key in {one.bucket_key for one in events}:
        mine = [one for one in events if one.bucket_key == key]
        stored = [entry.event for entry in virtual.open_events(key)]
        virtual.flush(key)
        (manifest,) = virtual.manifests(key)
        for found in (stored, [entry.event for entry in manifest.events]):
            assert found == mine
            for one, made in zip(found, mine, strict=True):
                assert (
                    one.payload is made.payload if made.payload is MISSING else repr(one.payload) == repr(made.payload)
                )
                assert (one.content_digest, one.packed) == (made.content_digest, made.packed)
        assert manifest.event_ids == tuple(one.event_id for one in mine)
        assert manifest.bytes == sum(one.packed.size for one in mine)
        assert manifest.weight == sum(one.weight for one in mine)
        assert manifest.bucket_key == key
    assert {receipt.outcome for receipt in virtual.push_many(given)} == {Outcome.DUPLICATE}


@pytest.fixture
def loaded(virtual: Accumulator) -> Accumulator:
    virtual.load_policy("default", {"inactivity": "1m", "max_events": 1000, "max_bytes": 2**27, "max_weight": 2**40})
    # Under this one every event is judged by the slow path.
    virtual.load_policy("judged", {"inactivity": "1m", "order_by": "source_version", "kinds": [*ODD_TEXTS, "k"]})
    return virtual


@pytest.mark.parametrize("flow", ["f", "judged"])
def test_odd_texts_are_taken_exactly(loaded: Accumulator, clock: VirtualClock, flow: str) -> None:
    key = f"t:{flow}:1"
    exact(loaded, [event(text, key, clock) for text in ODD_TEXTS])
    exact(loaded, [event(f"k{n}", f"t:{flow}:2", clock, kind=text) for n, text in enumerate(ODD_TEXTS)])
    exact(loaded, [event(f"s{n}", f"t:{flow}:3", clock, source=text) for n, text in enumerate(ODD_TEXTS)])
    exact(loaded, [event(f"r{n}", f"t:{flow}:4", clock, ref=text) for n, text in enumerate(["", *ODD_TEXTS])])
    exact(loaded, [event(f"c{n}", f"t:{flow}:5", clock, content_key=t) for n, t in enumerate(["", *ODD_TEXTS])])
    exact(loaded, [event("e", bucket_key(text, flow, text, text), clock) for text in ODD_TEXTS])
    exact(loaded, [event("e", bucket_key("t", text, "1"), clock) for text in ODD_TEXTS])


def test_payloads_are_taken_exactly(loaded: Accumulator, clock: VirtualClock) -> None:
    exact(loaded, [event(f"e{n}", "t:f:1", clock, payload=value) for n, value in enumerate(PAYLOADS)])
    exact(loaded, [event(f"e{n}", f"t:f:1:{n}", clock, payload=value) for n, value in enumerate(PAYLOADS)])
    exact(loaded, [event(f"e{n}", "t:judged:1", clock, payload=value) for n, value in enumerate(PAYLOADS)])
    exact(loaded, [event("e", "t:f:2", clock, payload=OrderedDict(b=(1, 2), a="x"))])


def test_edges_are_taken_exactly(loaded: Accumulator, clock: VirtualClock) -> None:
    changes: list[dict[str, Any]] = [
        {"event_id": "x" * 256}, {"event_id": "🙂" * 64}, {"kind": "k"}, {"source": "é" * 64}, {"ref": "r" * 512},
        {"content_key": "c" * 256}, {"trace": "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"},
        {"weight": 0}, {"weight": 2**31 - 1}, {"policy_version": 0}, {"source_version": 0},
        {"source_version": 2**53 + 1}, {"source_version": 2**63 - 1}, {"deadline_at": "2100-01-01T00:00:00Z"},
        {"occurred_at": "2000-01-01T00:00:00Z"}, {"occurred_at": "2100-01-01T00:00:00Z"},
        {"occurred_at": "2026-01-01T00:00:00.123999+05:45"}, {"occurred_at": datetime(2026, 1, 1, 0, 0, 0, 999, UTC)},
        {"occurred_at": datetime(2026, 1, 1, tzinfo=timezone(-timedelta(hours=12)))},
    ]  # fmt: skip
    for flow in ("f", "judged"):
        exact(
            loaded, [event(f"e{n}", f"t:{flow}:1", clock, source=f"s{n}") | change for n, change in enumerate(changes)]
        )
    exact(loaded, [event("e", f"t:f:{'o' * 508}", clock), event("e", f"t:f:{'🙂' * 127}", clock)])
    received = event("r", "t:f:9", clock, received_at="whatever it says")
    assert loaded.push(received).outcome is Outcome.ACCEPTED
    assert loaded.open_events("t:f:9")[0].received_at == clock.now
    loaded.push(event("r", "t:f:10", datetime(2026, 1, 1, 0, 0, 0, 999_999, UTC)))
    assert loaded.open_events("t:f:10")[0].event.occurred_at == datetime(2026, 1, 1, 0, 0, 0, 999_000, UTC)


def test_caps_are_exact(loaded: Accumulator, clock: VirtualClock) -> None:
    loaded.load_policy("capped", {"inactivity": "1m", "max_event_bytes": 10, "max_bytes": 100})
    sizes: list[tuple[Any, str | None]] = [
        (b"x" * 10, None), (b"x" * 11, "payload_too_large"), ("x" * 8, None), ("x" * 9, "payload_too_large"),
        ("é" * 4, None), ("é" * 5, "payload_too_large"), (MISSING, None), (1234567890, None),
        (12345678901, "payload_too_large"),
    ]  # fmt: skip
    for n, (payload, code) in enumerate(sizes):
        fields = event(f"e{n}", "t:capped:1", clock, payload=payload)
        receipt = loaded.push(fields)
        assert (receipt.outcome, receipt.code) == (Outcome.REJECTED if code else Outcome.ACCEPTED, code)
        if code:  # a refused one is not remembered
            assert loaded.push(fields).outcome is Outcome.REJECTED
    assert loaded.counters()["rejected:payload_too_large"] == 8


def test_errors_are_of_one_tree_and_say_no_payload_and_no_key(virtual: Accumulator) -> None:
    virtual.load_policy("f", {"inactivity": "10s"})
    key = "tenant-marker:f:object-marker\n"
    attempts: list[dict[str, Any]] = [
        {"bucket_key": key},
        {"payload": {"pii-marker": math.nan}},
        {"payload": "pii-marker\ud800"},
        {"occurred_at": "pii-marker"},
    ]
    for changes in attempts:
        with pytest.raises(AccumulatorError) as caught:
            virtual.push(event("e1") | changes)
        assert "marker" not in str(caught.value)
        assert "marker" not in repr(caught.value)
