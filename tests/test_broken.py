"""What an attempt to break it found: each was a fault once."""

from __future__ import annotations

from typing import Any

import pytest
import redis

from accumulator import Accumulator, AsyncAccumulator
from accumulator.errors import AccumulatorError, InvalidInput, InvalidLadder, InvalidSettings, NamespaceMismatch
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
    virtual.load_policy(
        "f", {"inactivity": "1s", "max_age": "2s", "dedupe_ttl": "10s", "on_conflict": "accept_newer"}
    )
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
def test_what_is_of_a_wrong_type_is_refused_by_name(live: Accumulator, call: Any) -> None:
    live.load_policy("f", {"inactivity": "10s"})
    live.load_ladder("l", {"anchor": "start", "steps": [{"name": "a", "offset": "1d"}]})
    before = contents(live.store.client)
    with pytest.raises(InvalidInput):
        call(live)
    assert contents(live.store.client) == before


def test_a_ladder_with_a_lone_surrogate_is_refused(live: Accumulator) -> None:
    with pytest.raises(InvalidLadder, match="surrogate"):
        live.load_ladder("l", {"steps": [{"name": "a", "offset": "1d", "text": "\ud800"}]})


@pytest.mark.parametrize("options", [{"namespace": None}, {"partitions": "4"}, {"partitions": True}])
def test_a_namespace_of_a_wrong_type_is_refused(make_client: MakeClient, options: dict[str, Any]) -> None:
    with pytest.raises(AccumulatorError) as refused:
        Accumulator(make_client(), **options)
    assert isinstance(refused.value, InvalidSettings | NamespaceMismatch)
