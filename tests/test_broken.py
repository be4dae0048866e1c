"""What an attempt to break it found: each was a fault once."""

from __future__ import annotations

from datetime import date
from typing import Any

import pytest
import redis

from accumulator import Accumulator, AsyncAccumulator
from accumulator.errors import (
    AccumulatorError,
    InvalidInput,
    InvalidLadder,
    InvalidScenario,
    InvalidSettings,
    NamespaceMismatch,
)
from accumulator.simulate import differences, run_scenario
from accumulator.store import Store
from accumulator.testing import VirtualClock
from tests.conftest import MakeClient, event
from tests.invariants import contents

KEY = "t:f:1"


def test_positions_go_on_after_a_retraction(virtual: Accumulator, clock: VirtualClock) -> None:
    virtual.load_policy("f", {"inactivity": "10s"})
    assert virtual.push(event("1", at=clock)).position == 1
    virtual.retract(KEY, "1")
    assert virtual.push(event("2", at=clock)).position == 2
    clock.advance("1s")
    assert virtual.push(event("3", at=clock)).position == 3
    assert [r.position for r in virtual.push_many([event("4", at=clock), event("5", at=clock)])] == [4, 5]


def test_retract_names_the_last_window_of_an_id_remembered_twice(virtual: Accumulator, clock: VirtualClock) -> None:
    virtual.load_policy("f", {"inactivity": "1s", "max_age": "2s", "dedupe_ttl": "10s", "on_conflict": "accept_newer"})
    for number, (event_id, version) in enumerate([("A", 1), ("B", 1), ("A", 2), ("C", 1), ("D", 1)], 1):
        assert virtual.push(event(event_id, at=clock, source_version=version)).window_version == number
        clock.advance("11s")
    virtual.push(event("E", at=clock))
    refused = virtual.retract(KEY, "A")
    assert (refused.outcome, refused.window_version) == ("closed", 3)


ENCODINGS: list[dict[str, Any]] = [
    {"encoding": "latin-1", "decode_responses": True},
    {"encoding": "utf-16"},
    {"encoding": "ascii", "encoding_errors": "replace"},
]


@pytest.mark.parametrize("options", ENCODINGS, ids=lambda options: options["encoding"])
async def test_keys_are_utf8_whatever_the_client_encodes(
    live: Accumulator, make_client: MakeClient, redis_url: str, namespace: str, options: dict[str, Any]
) -> None:
    live.load_policy("f", {"inactivity": "1h", "max_age": "2h"})
    given = event("é", "t:f:é", kind="é", source="é")
    assert live.push(given).outcome == "accepted"
    assert Accumulator(make_client(**options), namespace=namespace).push(given).outcome == "duplicate"
    client = redis.asyncio.Redis.from_url(redis_url, **options)
    try:
        assert (await AsyncAccumulator(client, namespace=namespace).push(given)).outcome == "duplicate"
    finally:
        await client.aclose()


WRONG: dict[str, Any] = {
    "push_many": lambda a: a.push_many(None),
    "ladder": lambda a: a.ladder(None),
    "pause_ladder": lambda a: a.pause_ladder(7),
    "ladder name": lambda a: a.cancel_ladder((KEY, None), "r"),
    "emission": lambda a: a.emission(None),
    "resolve": lambda a: a.resolve(None, "accept", by="b", reason="r"),
    "resolve id": lambda a: a.resolve(f"0-{'9' * 20}-1", "accept", by="b", reason="r"),
    "decision": lambda a: a.resolve("0-1-1", [], by="b", reason="r"),
    "by": lambda a: a.approve("0" * 20, by="\ud800", reason="r"),
    "start_ladder": lambda a: a.start_ladder("\ud800", KEY),
    "start_id": lambda a: a.start_ladder("l", KEY, start_id="\ud800"),
}


@pytest.mark.parametrize("call", WRONG.values(), ids=WRONG)
def test_what_is_of_a_wrong_type_is_refused_by_name(live: Accumulator, make_client: MakeClient, call: Any) -> None:
    client = make_client()
    live.load_policy("f", {"inactivity": "10s"})
    live.load_ladder("l", {"anchor": "start", "steps": [{"name": "a", "offset": "1d"}]})
    before = contents(client)
    with pytest.raises(InvalidInput):
        call(live)
    assert contents(client) == before


def test_a_ladder_with_a_lone_surrogate_is_refused(live: Accumulator) -> None:
    with pytest.raises(InvalidLadder, match="surrogate"):
        live.load_ladder("l", {"steps": [{"name": "a", "offset": "1d", "text": "\ud800"}]})


@pytest.mark.parametrize("options", [{"namespace": None}, {"partitions": "4"}, {"partitions": True}])
def test_a_namespace_of_a_wrong_type_is_refused(make_client: MakeClient, options: dict[str, Any]) -> None:
    with pytest.raises(AccumulatorError) as refused:
        Accumulator(make_client(), **options)
    assert isinstance(refused.value, InvalidSettings | NamespaceMismatch)


PUSH: dict[str, Any] = {"event_id": "E", "bucket_key": KEY}
BASE: dict[str, Any] = {"policies": {"f": {"inactivity": "10s"}}, "steps": [{"at": "0s", "push": PUSH}]}


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"start": "9999-12-31T23:59:59+00:00"}, "start"),
        ({"start": "0001-01-01T00:00:00+00:00"}, "start"),
        ({"workers_down": [["40s", "10s"]]}, "workers_down"),
        ({"steps": [{"at": "0s", "hold": {"bucket_key": KEY, "for": "0s"}}]}, "for"),
        (
            {"steps": [{"at": "0s", "push": PUSH | {"deadline": "5s", "deadline_at": "2026-01-01T00:00:05Z"}}]},
            "deadline",
        ),
        ({"steps": [{"at": "0s", "push": PUSH | {"payload": 1, "payload_bytes": 5}}]}, "payload_bytes"),
    ],
)
def test_a_scenario_that_can_mean_nothing_is_refused(redis_url: str, change: dict[str, Any], field: str) -> None:
    store = Store.from_url(redis_url)
    try:
        with pytest.raises(InvalidScenario) as refused:
            run_scenario(store, BASE | change)
    finally:
        store.close()
    assert refused.value.field == field


def test_an_expectation_may_hold_any_plain_data() -> None:
    found = differences({"at": 1, "of": 2}, {"at": date(2026, 1, 1), "of": b"x", "more": {"a"}, 7: 8})
    assert found == [
        'at: expected "2026-01-01", got 1',
        "of: expected \"b'x'\", got 2",
        "more: expected \"{'a'}\", is not there",
        "7: expected 8, is not there",
    ]
