"""Scenarios through the simulator: the conformance suite, what can't be read, and that the real scripts run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import redis
import yaml

from accumulator.errors import InvalidScenario
from accumulator.simulate import differences, load_scenario, run_scenario, run_scenarios
from accumulator.store import Store
from tests.conftest import MakeClient
from tests.ladder_model import ladder_events, without_ladders
from tests.model import simulate

SCENARIOS = sorted(Path(__file__).with_name("scenarios").glob("*.yaml"))

Fields = dict[str, Any]
PUSH: Fields = {"event_id": "e1", "bucket_key": "t:f:1"}
GOOD: Fields = {"policies": {"f": {"inactivity": "10s"}}, "steps": [{"at": "1s", "push": PUSH}], "end": "60s"}


@pytest.fixture
def store(make_client: MakeClient) -> Store:
    return Store(make_client())


def test_the_scenarios_are_there() -> None:
    assert len(SCENARIOS) >= 45


@pytest.mark.parametrize("path", SCENARIOS, ids=lambda path: path.stem)
def test_a_scenario_holds(store: Store, path: Path) -> None:
    scenario = load_scenario(path)
    answer = run_scenario(store, scenario)
    assert scenario["expect"]
    assert differences(answer, scenario["expect"]) == []
    # Not only what the scenario names: the models of the contract say the same of everything.
    written = yaml.safe_load(path.read_text(encoding="utf-8"))
    told = answer.pop("ladder_events", None)
    assert answer == simulate(without_ladders(written))
    assert told is None or told == ladder_events(written)


def test_nothing_is_left_of_a_scenario(store: Store) -> None:
    client = store.client
    assert isinstance(client, redis.Redis)
    run_scenario(store, GOOD)
    with pytest.raises(InvalidScenario):
        run_scenario(store, GOOD | {"steps": [*GOOD["steps"], {"at": "2s", "push": PUSH | {"weight": -1}}]})
    assert client.dbsize() == 0


def test_every_pushed_event_goes_through_the_scripts(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    # Each event is written once, whatever becomes of it: to its window's stream, to the audit trail, or to the queue.
    policies = {
        "f": {"inactivity": "10s", "max_events": 4, "kinds": ["event"], "max_event_bytes": 50},
        "g": {"inactivity": "3s", "on_conflict": "reconcile", "keep": "last"},
    }
    steps: list[Fields] = []
    fields: Fields
    for n in range(120):
        # Each bucket sees an id twice, the second time with the same content or with another.
        size = n % 6 * 10 + (n >= 60 and n % 5 == 0)
        fields = {"event_id": f"e{n // 6 % 10}", "bucket_key": f"t:{'fg'[n % 2]}:{n % 6}", "occurred": "0s"}
        fields["payload_bytes"] = size + 20 * (n % 6 == 4 and n % 11 == 0)
        fields["kind"] = "odd" if n % 13 == 0 else "event"
        steps.append({"at": f"{n}s", "push": fields})
    sent: list[str] = []
    send = Store._send

    def watched(self: Store, commands: Any) -> list[Any]:
        sent.extend(command[0] for command in commands)
        return send(self, commands)

    monkeypatch.setattr(Store, "_send", watched)
    answer = run_scenario(store, {"policies": policies, "steps": steps, "end": "200s"})
    outcomes = {outcome["outcome"] for outcome in answer["outcomes"]}
    assert outcomes == {"accepted", "duplicate", "conflict", "rejected", "reconciled"}
    assert (len(answer["outcomes"]), answer["counters"]["received"]) == (120, 120)
    client = store.client
    assert isinstance(client, redis.Redis)
    stats: dict[str, Any] = client.info("commandstats")
    # XADD is a command of the scripts alone: none was sent by the client.
    assert stats["cmdstat_xadd"]["calls"] == 120
    assert "XADD" not in sent
    assert set(sent) <= {
        "EVALSHA",
        "EVAL",
        "HGETALL",
        "HGET",
        "HMGET",
        "HSETNX",
        "GET",
        "ZRANGE",
        "XRANGE",
        "ZCARD",
        "XLEN",
    }
    ran = stats["cmdstat_evalsha"]["calls"] - stats["cmdstat_evalsha"]["failed_calls"]
    ran += stats["cmdstat_eval"]["calls"]
    assert ran == sent.count("EVALSHA") - stats["cmdstat_evalsha"]["failed_calls"] + sent.count("EVAL") >= 120


UNREADABLE: list[tuple[Fields, str | None, int | None, str]] = [
    # (changes, field, step, words)
    ({"step": []}, "'step'", None, "unknown"),
    ({"policies": []}, "policies", None, "must be a mapping"),
    ({"policies": {"f": {}}}, "policies", None, "inactivity"),
    ({"policies": {"f": {"inactivity": "10 s"}}}, "policies", None, "inactivity"),
    ({"policies": {"f": {"inactivity": "10s", "max_evnts": 3}}}, "policies", None, "max_evnts"),
    ({"policies": {"g": {"inactivity": "10s"}}}, "push", 0, "no policy"),
    ({"start": "2026-01-01T00:00:00"}, "start", None, "offset"),
    ({"start": "soon"}, "start", None, "offset"),
    ({"start": 7}, "start", None, "offset"),
    ({"end": "soon"}, "end", None, "unit"),
    ({"end": 60}, "end", None, "unit"),
    ({"workers_down": [["1s"]]}, "workers_down", None, "from, to"),
    ({"workers_down": [["1s", 2]]}, "workers_down", None, ""),
    ({"workers_down": {"1s": "2s"}}, "workers_down", None, "list"),
    ({"steps": {}}, "steps", None, "must be a list"),
    ({"steps": ["push"]}, "step", 0, "must be a mapping"),
    ({"steps": [{"push": PUSH}]}, "at", 0, "missing"),
    ({"steps": [{"at": "2s", "push": PUSH}, {"at": "1s", "push": PUSH}]}, "at", 1, "decrease"),
    ({"steps": [{"at": 1, "push": PUSH}]}, "at", 0, "unit"),
    ({"steps": [{"at": "-1s", "push": PUSH}]}, "at", 0, ""),
    ({"steps": [{"at": "1s"}]}, "step", 0, "one of push"),
    ({"steps": [{"at": "1s", "push": PUSH, "flush": {"bucket_key": "t:f:1"}}]}, "step", 0, "one of push"),
    ({"steps": [{"at": "1s", "close": {}}]}, "'close'", 0, "unknown"),
    ({"steps": [{"at": "1s", "push": "e1"}]}, "push", 0, "must be a mapping"),
    ({"steps": [{"at": "1s", "push": [PUSH, 7]}]}, "push", 0, "must be a mapping"),
    ({"steps": [{"at": "1s", "push": {"event_id": "e1"}}]}, "bucket_key", 0, "required"),
    ({"steps": [{"at": "1s", "push": PUSH | {"bucket_key": "t:f"}}]}, "bucket_key", 0, "three parts"),
    ({"steps": [{"at": "1s", "push": PUSH | {"event_id": 7}}]}, "event_id", 0, "must be text"),
    ({"steps": [{"at": "1s", "push": PUSH | {"knd": "x"}}]}, "knd", 0, "not a field"),
    ({"steps": [{"at": "1s", "push": PUSH | {"occurred": 3}}]}, "occurred", 0, "unit"),
    ({"steps": [{"at": "1s", "push": PUSH | {"occurred": "1s", "occurred_at": "2026"}}]}, "occurred", 0, "exclude"),
    ({"steps": [{"at": "1s", "push": PUSH | {"payload_bytes": -1}}]}, "payload_bytes", 0, "whole number"),
    ({"steps": [{"at": "1s", "push": PUSH | {"source_version": 2**63}}]}, "source_version", 0, "at most"),
    ({"steps": [{"at": "1s", "flush": {}}]}, "bucket_key", 0, "missing"),
    ({"steps": [{"at": "1s", "flush": {"bucket_key": "t"}}]}, "bucket_key", 0, "three parts"),
    ({"steps": [{"at": "1s", "flush": {"bucket_key": "t:f:1", "window_version": "1"}}]}, "flush", 0, "number"),
    ({"steps": [{"at": "1s", "flush": {"bucket_key": "t:f:1", "partial": "yes"}}]}, "flush", 0, "true or false"),
    ({"steps": [{"at": "1s", "hold": {"bucket_key": "t:f:1"}}]}, "for", 0, "missing"),
    ({"steps": [{"at": "1s", "hold": {"bucket_key": "t:f:1", "for": 5}}]}, "for", 0, "unit"),
    ({"steps": [{"at": "1s", "retract": {"bucket_key": "t:f:1"}}]}, "event_id", 0, "missing"),
    ({"steps": [{"at": "1s", "retract": {"bucket_key": "t:f:1", "event_id": ""}}]}, "event_id", 0, "empty"),
    ({"steps": [{"at": "1s", "policy": {"f": {"inactivity": "0s"}}}]}, "policy", 0, "inactivity"),
    ({"steps": [{"at": "1s", "policy": ["f"]}]}, "policy", 0, "must be a mapping"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "field", "index", "words"),
    UNREADABLE,
    ids=[f"{n}-{field}" for n, (_, field, _, _) in enumerate(UNREADABLE)],
)
def test_what_can_not_be_read_is_named(
    fake_store: Store, changes: Fields, field: str, index: int | None, words: str
) -> None:
    with pytest.raises(InvalidScenario) as caught:
        run_scenario(fake_store, GOOD | changes)
    assert (caught.value.field, caught.value.index) == (field, index)
    assert words in caught.value.rule
    assert "Traceback" not in str(caught.value)


@pytest.fixture
def fake_store(fake: Any) -> Store:
    import fakeredis

    return Store(fakeredis.FakeRedis(server=fake, protocol=2))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "must be a mapping"),
        ("- a\n", "must be a mapping"),
        ("a: [\n", "line 2, column 1"),
        ("1: x\n", "must be a mapping"),
        ("a: 1\na: 2\n", "twice"),
        ("a: !!python/object:os.system {}\n", "tag"),
        ("\x00", "YAML"),
    ],
)
def test_a_file_that_is_no_scenario(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "odd.yaml"
    path.write_text(text)
    with pytest.raises(InvalidScenario, match=words):
        load_scenario(path)
    with pytest.raises(InvalidScenario, match="can't be read"):
        load_scenario(tmp_path / "missing.yaml")
    path.write_bytes(b"\xff\xfe\xff")
    with pytest.raises(InvalidScenario):
        load_scenario(path)


def test_it_brings_a_server_of_its_own() -> None:
    first, second = run_scenarios([GOOD, GOOD | {"end": "5s"}])
    assert [manifest["closed_at"] for manifest in first["manifests"]] == [11_000]
    assert second["open"] == [{"bucket_key": "t:f:1", "window_version": 1, "event_ids": ["e1"], "due_at": 11_000}]


def test_a_step_at_the_very_instant_comes_before_the_worker(store: Store) -> None:
    steps = [{"at": "0s", "push": PUSH}, {"at": "10s", "flush": {"bucket_key": "t:f:1"}}]
    (manifest,) = run_scenario(store, GOOD | {"steps": steps})["manifests"]
    assert (manifest["close_reason"], manifest["closed_at"], manifest["sealed_at"]) == ("inactivity", 10_000, 10_000)


def test_workers_are_down_up_to_the_instant_at_which_they_are_up(store: Store) -> None:
    (manifest,) = run_scenario(store, GOOD | {"workers_down": [["11s", "20s"], ["20s", "30s"]]})["manifests"]
    assert (manifest["closed_at"], manifest["sealed_at"]) == (11_000, 30_000)


def test_differences_compare_what_is_named() -> None:
    answer = {"outcomes": [{"outcome": "accepted", "late": False}], "counters": {"received": 1}, "open": []}
    assert differences(answer, {}) == []
    assert differences(answer, {"outcomes": [{"late": False, "code": None}], "open": []}) == []
    assert differences(answer, {"outcomes": [{"late": 0}]}) == ["outcomes[0].late: expected 0, got false"]
    assert differences(answer, {"outcomes": []}) == [
        'outcomes: expected [], got [{"outcome": "accepted", "late": false}]'
    ]
    assert differences(answer, {"outcomes": [{}, {}]}) == ["outcomes: expected 2 entries, got 1"]
    assert differences(answer, {"counters": {"closed": 0}}) == ["counters.closed: expected 0, is not there"]
    assert differences(answer, {"manifests": []}) == ["manifests: expected [], is not there"]
    assert differences(answer, {"counters": [1]}) == ['counters: expected [1], got {"received": 1}']
