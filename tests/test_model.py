"""The model of the contract against every scenario's `expect`, and the random histories for what they cover.

No server: what is tested here is the yardstick.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterator
from datetime import UTC, datetime, time
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from zoneinfo import ZoneInfo

import pytest
import yaml

from accumulator.policy import Policy
from tests.histories import as_yaml, compare, history, main, shrink
from tests.ladder_model import ladder_events, without_ladders
from tests.model import Unreadable, compare_expect, first_cutoff_after, instant, simulate

SCENARIOS = sorted(Path(__file__).with_name("scenarios").glob("*.yaml"))
SEEDS = range(300)


@pytest.mark.parametrize("path", SCENARIOS, ids=lambda path: path.stem)
def test_scenarios_hold(path: Path) -> None:
    scenario = yaml.safe_load(path.read_text(encoding="utf-8"))
    assert scenario["expect"]
    answer = simulate(without_ladders(scenario))
    if "ladder_events" in scenario["expect"]:
        answer["ladder_events"] = ladder_events(scenario)
    assert compare_expect(answer, scenario["expect"]) == []


def test_an_answer_has_all_the_fields_of_the_description_and_no_other() -> None:
    event = {"event_id": "E1", "bucket_key": "t:pedido:1"}
    policies = {"pedido": {"inactivity": "10s", "kinds": ["event"], "on_conflict": "keep_first", "max_events": 2}}
    steps: list[dict[str, Any]] = [
        {"at": "0s", "push": [event, event, event | {"weight": 2}, event | {"event_id": "E2", "kind": "x"}]},
        {"at": "1s", "push": [event | {"event_id": "E3"}, event | {"event_id": "E4"}]},
    ]
    assert simulate({"policies": policies, "steps": steps, "end": "5s"}) == {
        "outcomes": [
            {"outcome": "accepted", "window_version": 1, "late": False},
            {"outcome": "duplicate"},
            {"outcome": "duplicate", "conflict": True},
            {"outcome": "reconciled", "code": "unknown_kind"},
            {"outcome": "accepted", "window_version": 1, "late": False, "closed": "max_events"},
            {"outcome": "accepted", "window_version": 2, "late": False},
        ],
        "manifests": [
            {
                "bucket_key": "t:pedido:1",
                "window_version": 1,
                "close_reason": "max_events",
                "opened_at": 0,
                "first_event_at": 0,
                "last_event_at": 1000,
                "closed_at": 1000,
                "sealed_at": 1000,
                "event_ids": ["E1", "E3"],
                "event_count": 2,
                "bytes": 0,
                "weight": 2,
                "policy_version": 0,
                "policy_versions": [0],
                "late_event_ids": [],
                "revised_event_ids": [],
                "retracted_event_ids": [],
                "relation": "first",
            }
        ],
        "reconciliation": [{"event_id": "E2", "bucket_key": "t:pedido:1", "code": "unknown_kind"}],
        "open": [{"bucket_key": "t:pedido:1", "window_version": 2, "event_ids": ["E4"], "due_at": 11000}],
        "counters": {"received": 6, "accepted": 3, "duplicates": 2, "closed": 1},
    }


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"policies": {"g": {"inactivity": "1s"}}}, "step 1: no policy for the flow 'f'"),
        ({"steps": [{"at": "2s", "hold": {"bucket_key": "t:f:1", "for": 5}}]}, "step 1: 5 is no duration"),
        ({"steps": [{"at": "2s", "policy": {}}, {"at": "1s", "policy": {}}]}, "step 2: the clock went back"),
        ({"steps": [{"at": "2s", "close": {}}]}, "step 1: unknown step 'close'"),
        ({"policies": {"f": {"max_age": "1s"}}}, "a policy without inactivity"),
        ({"policies": {"f": {"inactivity": "1s", "max_ages": "1s"}}}, "unknown options"),
        ({"start": datetime(2026, 1, 1)}, "no instant with an offset"),
        ({"end": "999ms"}, "the end lies before the last step"),
    ],
)
def test_what_can_not_be_run_is_unreadable(changes: dict[str, Any], words: str) -> None:
    scenario: dict[str, Any] = {
        "policies": {"f": {"inactivity": "1s"}},
        "steps": [{"at": "1s", "push": {"event_id": "a", "bucket_key": "t:f:1"}}],
    }
    simulate(scenario)
    with pytest.raises(Unreadable, match=words):
        simulate(scenario | changes)


def test_expect_names_what_differs() -> None:
    answer = {
        "outcomes": [{"outcome": "accepted", "late": False}],
        "counters": {"received": 1, "accepted": 1},
    }
    assert compare_expect(answer, {"outcomes": [{"late": False, "closed": None}], "counters": {"received": 1}}) == []
    assert compare_expect(answer, {"outcomes": [{"late": True}, {}], "counters": {"accepted": 2}, "opened": []}) == [
        "outcomes: 1 entries, expected 2",
        "outcomes[0]: late is False, expected True",
        "counters: accepted is 1, expected 2",
        "opened: the answer has no such part",
    ]


@pytest.mark.parametrize(
    ("opened", "local", "zone", "cutoff"),
    [
        ("2026-05-05T11:59:59.999Z", "12:00", "UTC", "2026-05-05T12:00Z"),
        ("2026-05-05T12:00Z", "12:00", "UTC", "2026-05-06T12:00Z"),
        ("2026-05-05T23:30Z", "00:00", "Europe/Lisbon", "2026-05-06T23:00Z"),
        (
            "2018-11-03T12:00Z",
            "00:30",
            "America/Sao_Paulo",
            "2018-11-04T03:30Z",
        ),  # midnight is skipped: 01:30
        ("2011-12-30T00:00Z", "12:00", "Pacific/Apia", "2011-12-30T22:00Z"),  # the 30th is skipped: the 31st
        ("2011-12-30T22:00Z", "12:00", "Pacific/Apia", "2011-12-31T22:00Z"),
        (
            "2026-11-01T05:30Z",
            "01:30",
            "America/New_York",
            "2026-11-02T06:30Z",
        ),  # the second 01:30 does not count
    ],
)
def test_cutoffs_in_local_time(opened: str, local: str, zone: str, cutoff: str) -> None:
    found = first_cutoff_after(instant(opened), [time.fromisoformat(local)], ZoneInfo(zone))
    assert datetime.fromtimestamp(found / 1000, UTC) == datetime.fromisoformat(cutoff)


# Histories ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def histories() -> list[dict[str, Any]]:
    return [history(seed) for seed in SEEDS]


def test_a_history_is_its_seed(histories: list[dict[str, Any]]) -> None:
    for seed in SEEDS[::30]:
        again = history(seed)
        assert again == histories[seed]
        assert yaml.safe_load(as_yaml(again)) == again
        assert simulate(again) == simulate(again)
    assert len({repr(scenario["steps"]) for scenario in histories}) == len(SEEDS)


def test_histories_keep_to_the_rules_of_policies(histories: list[dict[str, Any]]) -> None:
    loads = [scenario["policies"] for scenario in histories]
    loads += [step["policy"] for scenario in histories for step in scenario["steps"] if "policy" in step]
    for flow, options in (item for load in loads for item in load.items()):
        Policy.load(flow, options)


def test_histories_cover_the_contract(histories: list[dict[str, Any]]) -> None:
    """Every outcome, code, reason and relation comes up, not just once."""
    seen: Counter[str] = Counter()
    for scenario in histories:
        answer = simulate(scenario)
        for outcome in answer["outcomes"]:
            seen[outcome["outcome"]] += 1
            seen["late " + outcome["outcome"]] += outcome.get("late", False)
            seen["keep_first"] += outcome.get("conflict", False)
            if "code" in outcome:
                seen[f"{outcome['outcome']} {outcome['code']}"] += 1
            if "closed" in outcome:
                seen[f"closed {outcome['closed']}"] += 1
        for manifest in answer["manifests"]:
            seen[f"reason {manifest['close_reason']}"] += 1
            seen[f"relation {manifest['relation']}"] += 1
            seen["emptied"] += not manifest["event_ids"]
            seen["retracted"] += bool(manifest["retracted_event_ids"])
            seen["sealed later"] += manifest["sealed_at"] > manifest["closed_at"]
            seen["several policy versions"] += len(manifest["policy_versions"]) > 1
        seen["still open"] += len(answer["open"])
    expected = """
        accepted|revised|duplicate|conflict|rejected|reconciled|late accepted|late revised|keep_first
        rejected payload_too_large|rejected late|rejected too_old
        reconciled conflict|reconciled unknown_kind|reconciled occurred_in_future|reconciled late
        reconciled stale_policy_version|reconciled policy_changed|reconciled too_old
        closed terminal|closed max_events|closed max_bytes|closed max_weight|closed deadline
        reason inactivity|reason max_age|reason max_events|reason max_bytes|reason max_weight|reason terminal
        reason starter|reason cutoff|reason deadline|reason policy_change|reason flush
        relation first|relation continuation|relation policy_change|relation after_close
        emptied|retracted|sealed later|several policy versions|still open
    """
    rare = {
        what: seen[what]
        for line in expected.split("\n")
        for what in line.strip().split("|")
        if what and seen[what] < 20
    }
    assert rare == {}


def test_histories_lose_nothing_and_double_nothing(histories: list[dict[str, Any]]) -> None:
    """What the contract says of any answer, whatever the rules of section 4 decided."""
    for seed, scenario in zip(SEEDS, histories, strict=True):
        assert list(faults(scenario, simulate(scenario))) == [], f"seed {seed}"


def faults(scenario: dict[str, Any], answer: dict[str, Any]) -> Iterator[str]:
    pushed = [
        event
        for step in scenario["steps"]
        for event in (step["push"] if isinstance(step.get("push"), list) else [step["push"]] if "push" in step else [])
    ]
    windows = {(m["bucket_key"], m["window_version"]): m for m in [*answer["manifests"], *answer["open"]]}
    if len(windows) != len(answer["manifests"]) + len(answer["open"]):
        yield "a window closed twice"
    went: dict[tuple[str, int], list[str]] = {}
    for event, outcome in zip(pushed, answer["outcomes"], strict=True):
        if outcome["outcome"] in ("accepted", "revised"):
            went.setdefault((event["bucket_key"], outcome["window_version"]), []).append(event["event_id"])
    if went.keys() != windows.keys():
        yield "a window without an accepted event, or an accepted event without a window"
    for place, window in windows.items():
        held, left = window["event_ids"], window.get("retracted_event_ids")
        accepted = list(dict.fromkeys(went.get(place, [])))
        if left is None:
            left = [event_id for event_id in accepted if event_id not in held]
        if [event_id for event_id in accepted if event_id not in left] != held or set(left) & set(held):
            yield f"{place}: holds {held} of {accepted}, retracted {left}"
    for bucket_key in {key for key, _ in windows}:
        versions = sorted(version for key, version in windows if key == bucket_key)
        if versions != list(range(1, len(versions) + 1)):
            yield f"{bucket_key}: versions {versions}"
    for manifest in answer["manifests"]:
        instants = [manifest[name] for name in ("opened_at", "last_event_at", "closed_at", "sealed_at")]
        if instants != sorted(instants) or manifest["first_event_at"] != manifest["opened_at"]:
            yield f"{manifest['bucket_key']}: instants {instants}"
        if not {*manifest["late_event_ids"], *manifest["revised_event_ids"]} <= set(manifest["event_ids"]):
            yield f"{manifest['bucket_key']}: late or revised, and not in it"
    queued = [
        {"event_id": event["event_id"], "bucket_key": event["bucket_key"], "code": outcome["code"]}
        for event, outcome in zip(pushed, answer["outcomes"], strict=True)
        if outcome["outcome"] == "reconciled"
    ]
    if queued != answer["reconciliation"]:
        yield "the queue for reconciliation differs from the outcomes"


def flawed(scenarios: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A simulator with a fault: a revision that closes its window is told as accepted."""
    answers = [simulate(scenario) for scenario in scenarios]
    for answer in answers:
        for outcome in answer["outcomes"]:
            if outcome["outcome"] == "revised" and "closed" in outcome:
                outcome["outcome"] = "accepted"
    return answers


def test_a_difference_is_found_and_shrunk() -> None:
    scenario = next(one for one in map(history, range(1000)) if compare(flawed, [one])[0])
    before = copy.deepcopy(scenario)
    small = shrink(flawed, scenario)
    assert scenario == before
    pushes = [step["push"] for step in small["steps"] if "push" in step]
    assert len(small["steps"]) <= 4
    assert sum(len(push) if isinstance(push, list) else 1 for push in pushes) <= 3
    (line,) = compare(flawed, [small])[0]
    assert line.endswith(".outcome: 'accepted', 'revised' by the model")


def test_the_command_says_what_differs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    first = next(seed for seed in range(1000) if compare(flawed, [history(seed)])[0])
    simulator = SimpleNamespace(run_scenarios=flawed)
    monkeypatch.setattr("importlib.import_module", lambda name: simulator)
    assert main(["--seeds", "3", "--start", str(first)]) == 1
    out = capsys.readouterr().out
    assert f"seed {first}: the scripts and the model differ" in out
    assert "The least that still differs" in out
    simulator.run_scenarios = lambda scenarios: [simulate(scenario) for scenario in scenarios]
    assert main(["--seeds", "3", "--start", str(first)]) == 0
    assert "agree" in capsys.readouterr().out
    assert main(["--show", str(first)]) == 0
    assert yaml.safe_load(capsys.readouterr().out) == history(first)
