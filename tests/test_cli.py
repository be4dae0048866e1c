"""The command line, as a person runs it: what it prints, and its exit codes."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from accumulator import cli, simulate
from accumulator.client import Accumulator
from accumulator.embedded import EmbeddedServer
from accumulator.policy import Policy
from accumulator.settings import Settings
from tests.conftest import Program, StartServer, wait_until

SCENARIOS = Path(__file__).parent / "scenarios"
POLICIES = {"order": {"inactivity": "1h", "terminal_kinds": ["paid"]}}


@pytest.fixture
def client(server: EmbeddedServer, namespace: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Accumulator]:
    """A client of the server that the program is told of, with a policy for `order`."""
    monkeypatch.setenv("ACCUMULATOR_REDIS_URL", server.url)
    with Accumulator(server.url, namespace=namespace) as made:
        for flow, policy in POLICIES.items():
            made.load_policy(flow, policy)
        yield made


def event(n: int | str, key: str = "shop:order:7", kind: str = "edited", **more: Any) -> dict[str, Any]:
    at = datetime(2026, 10, 16, 14, tzinfo=UTC).isoformat()
    return {"event_id": f"e{n}", "bucket_key": key, "kind": kind, "source": "test", "occurred_at": at} | more


def lines(*events: dict[str, Any]) -> bytes:
    return b"".join(json.dumps(e).encode() + b"\n" for e in events)


# --- the program ------------------------------------------------------------------------------------------------------


def test_version_and_help(program: Program) -> None:
    assert program("--version") == (0, "accumulator 0.1.0\n", "")
    shown = program("--help")
    assert shown.code == 0
    for name in ("push", "simulate", "policy", "buckets", "manifests", "worker", "demo", "Exit codes"):
        assert name in shown.out


@pytest.mark.parametrize("command", [c.name or c.callback.__name__ for c in cli.app.registered_commands if c.callback])
def test_each_command_has_its_help(program: Program, command: str) -> None:
    shown = program(command.rstrip("_").replace("_", "-"), "--help")
    assert shown.code == 0
    assert "Usage: accumulator" in shown.out


def test_wrong_usage_is_2(program: Program) -> None:
    for arguments in (["nonsense"], ["push"], ["buckets", "--limit", "0"], ["hold", "a:b:c"], ["policy", "nonsense"]):
        assert program(*arguments).code == 2, arguments


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("ACCUMULATOR_REDIS_URL", "http://user:geheim@host", "redis_url: must begin with redis://"),
        ("ACCUMULATOR_PARTITIONS", "0", "partitions: must be"),
        ("ACCUMULATOR_NAMESPACE", "a:b", "namespace: "),
        ("ACCUMULATOR_CONFIG", "none.yaml", "none.yaml: can't be read"),
    ],
)
def test_wrong_settings_are_2(
    program: Program, monkeypatch: pytest.MonkeyPatch, name: str, value: str, said: str
) -> None:
    monkeypatch.setenv(name, value)
    shown = program("counters")
    assert shown.code == 2
    assert shown.err.startswith(f"accumulator: {said}")
    assert "geheim" not in shown.err
    assert shown.err.count("\n") == 1


def test_no_server_is_3_and_one_line(program: Program, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("ACCUMULATOR_REDIS_URL", "redis://:geheim@127.0.0.1:1/0")
    (tmp_path / "events").write_bytes(lines(event(1)))
    for arguments in (["counters"], ["buckets"], ["bucket", "a:b:c"], ["push", "events"], ["policy", "show"]):
        shown = program(*arguments)
        assert shown.code == 3
        assert "accumulator: the server can't be reached" in shown.err
        assert "geheim" not in shown.err
        assert len(shown.err.splitlines()) <= 2


def test_a_wrong_password_is_3(program: Program, start_server: StartServer, monkeypatch: pytest.MonkeyPatch) -> None:
    server = start_server(password="right")
    monkeypatch.setenv("ACCUMULATOR_REDIS_URL", server.url.replace("right", "wrong"))
    shown = program("counters")
    assert shown.code == 3
    assert "credentials" in shown.err
    assert "wrong" not in shown.err


def test_another_partition_count_is_2_and_says_what_to_do(
    program: Program, client: Accumulator, monkeypatch: pytest.MonkeyPatch
) -> None:
    client.counters()
    monkeypatch.setenv("ACCUMULATOR_PARTITIONS", "8")
    shown = program("counters")
    assert shown.code == 2
    assert "64 partitions, not 8: set partitions to 64" in shown.err


def test_a_fault_of_ours_is_a_line_without_its_text(program: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise KeyError("secret")

    monkeypatch.setattr(Accumulator, "from_settings", fail)
    shown = program("counters")
    assert shown.code == 3
    assert re.fullmatch(r"accumulator: a fault of ours, please report it: KeyError at test_cli\.py:\d+\n", shown.err)


def test_what_is_no_utf8_is_refused(program: Program) -> None:
    assert program("bucket", "a:b:\udcff").code == 2
    assert program("policy", "check", "\udcff").code == 2


# --- push -------------------------------------------------------------------------------------------------------------


def test_push_a_file_and_standard_input(program: Program, client: Accumulator, tmp_path: Path) -> None:
    path = tmp_path / "orders.jsonl"
    path.write_bytes(lines(event(1), event(2), event(1), event(3, "shop:order:8", "paid")))
    shown = program("push", path)
    assert shown.code == 0
    assert shown.err == ""
    table = dict(re.findall(r"^ *(.+?)  +([\d,]+) *$", shown.out, re.MULTILINE))
    assert table == {"accepted": "3", "duplicate": "1", "windows opened": "2", "windows closed": "1", "terminal": "1"}
    assert "4 events of 4 lines in" in shown.out
    assert "1 event of 1 line in" in program("push", "-", stdin=lines(event(1))).out

    (summary,) = program("push", "-", "--json", stdin=path.read_bytes()).json
    assert summary["outcomes"] == {"duplicate": 4}
    assert summary["file"] == "-"
    assert client.counters()["accepted"] == 3


def test_push_tells_bad_lines_and_is_1(program: Program, client: Accumulator, tmp_path: Path) -> None:
    path = tmp_path / "orders.jsonl"
    path.write_bytes(
        lines(event(1), event(2, occurred_at="yesterday", payload="secret"), event(3, "shop:chat:1"), event(4))
    )
    shown = program("push", path, "--json")
    assert shown.code == 1
    told = shown.err.splitlines()
    assert told[0] == "line 2: occurred_at: is not an RFC 3339 instant such as 2026-10-16T14:00:00.250Z"
    assert told[1].startswith("line 3: bucket_key: flow chat: there is no policy for it")
    assert "secret" not in shown.err
    (summary,) = shown.json
    assert summary["bad"] == 2
    assert [bad["number"] for bad in summary["bad_lines"]] == [2, 3]
    assert summary["outcomes"] == {"accepted": 2}


def test_push_names_what_it_could_not_take(program: Program, client: Accumulator, tmp_path: Path) -> None:
    path = tmp_path / "orders.jsonl"
    path.write_bytes(b"\n" + lines(*(event(n) for n in range(12)), *(event(n, payload="secret") for n in range(12))))
    said = program("push", path).out
    named = [text for text in said.splitlines() if text.startswith("line ")]
    assert named == [f"line {14 + n}: {event(n)['event_id']}: conflict" for n in range(10)]
    assert "and 2 events more in no window" in said
    assert "secret" not in said
    (summary,) = program("push", path, "--json").json
    first = {"number": 14, "event_id": event(0)["event_id"], "outcome": "conflict", "code": None}
    assert (summary["not_taken"][0], len(summary["not_taken"])) == (first, 10)


def test_push_strict_stops_and_says_what_was_sent(program: Program, client: Accumulator, tmp_path: Path) -> None:
    path = tmp_path / "orders.jsonl"
    path.write_bytes(lines(event(1), event(2)) + b"nonsense\n" + lines(event(3)))
    shown = program("push", path, "--strict")
    assert shown.code == 1
    assert "line 3: is not JSON" in shown.err
    assert "stopped at line 3: nothing from there on was sent; before it 2 events were" in shown.err
    assert [e.event.event_id for e in client.open_events("shop:order:7")] == ["e1", "e2"]


def test_push_of_what_is_not_there_is_2(program: Program, client: Accumulator, tmp_path: Path) -> None:
    assert program("push", tmp_path / "none").code == 2
    assert program("push", tmp_path).code == 2


def test_push_ends_with_3_when_the_server_goes(
    program: Program, client: Accumulator, monkeypatch: pytest.MonkeyPatch
) -> None:
    def gone(*_: object) -> None:
        from accumulator.errors import ServerUnavailable

        raise ServerUnavailable("the server can't be reached: gone")

    monkeypatch.setattr(Accumulator, "push_many", gone)
    monkeypatch.setattr("accumulator.feed.RESENDS_AFTER", (0,))
    shown = program("push", "-", stdin=lines(event(1)))
    assert shown.code == 3
    assert re.search(r"unknown +1", shown.out)
    assert "pushing the file again is safe" in shown.err


def test_push_interrupted_says_how_far_it_came(
    program: Program, client: Accumulator, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Accumulator, "push_many", interrupt)
    shown = program("push", "-", stdin=lines(event(1)))
    assert shown.code == 130
    assert "with answers for 0 events" in shown.err


def test_push_installs_the_policies_of_the_configuration(program: Program, client: Accumulator, tmp_path: Path) -> None:
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "accumulator.yaml").write_text(
        "policies: {order: {inactivity: 30m}, chat: {inactivity: 5s}}\n"
    )
    shown = program("push", "-", stdin=lines(event(1, "shop:chat:1")))
    assert shown.code == 0
    assert "policy chat: installed as version 2" in shown.err
    assert "warning: policy order: version 1 rules, and the configuration differs" in shown.err
    assert client.policies()["order"][1] == Policy.load("order", POLICIES["order"])


def test_push_shows_a_bar_on_a_terminal_only(
    program: Program, client: Accumulator, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = tmp_path / "orders.jsonl"
    path.write_bytes(lines(event(1)) + b"nonsense\n")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    shown = program("push", path)
    assert "1 events" in shown.err
    assert "line 2: is not JSON" in shown.err


# --- simulate ---------------------------------------------------------------------------------------------------------


def test_simulate_prints_the_object_and_nothing_else(program: Program) -> None:
    file = SCENARIOS / "01-seed-simulation.yaml"
    shown = program("simulate", file, "--json")
    assert (shown.code, shown.err) == (0, "")
    (answer,) = shown.json
    assert list(answer) == ["outcomes", "manifests", "reconciliation", "open", "counters"]
    assert simulate.differences(answer, simulate.load_scenario(file)["expect"]) == []


def test_simulate_a_folder_in_the_order_of_names(program: Program) -> None:
    shown = program("simulate", SCENARIOS, "--json")
    assert (shown.code, shown.err) == (0, "")
    assert [answer["file"] for answer in shown.json] == sorted(path.name for path in SCENARIOS.glob("*.yaml"))


def test_simulate_says_what_differs(program: Program, tmp_path: Path) -> None:
    file = tmp_path / "wrong.yaml"
    file.write_text(
        (SCENARIOS / "01-seed-simulation.yaml")
        .read_text()
        .replace("closed: 5", "closed: 4")
        .replace("[E1, E2]", "[E1]")
    )
    shown = program("simulate", file, "--json")
    assert shown.code == 1
    assert len(shown.json) == 1
    assert "wrong.yaml: counters.closed: expected 4, got 5" in shown.err
    assert 'wrong.yaml: manifests[0].event_ids: expected ["E1"], got ["E1", "E2"]' in shown.err
    shown = program("simulate", file)
    assert shown.code == 1
    assert "counters.closed: expected 4, got 5" in shown.out


def test_simulate_goes_on_after_what_it_cannot_read(program: Program, tmp_path: Path) -> None:
    good = "policies: {p: {inactivity: 1s}}\nsteps: [{at: 0s, push: {event_id: a, bucket_key: 't:p:1'}}]\nend: 5s\n"
    for name, text in {
        "1-good.yaml": good,
        "2-not-yaml.yaml": "a: [",
        "3-no-mapping.yml": "[]",
        "4-no-policy.yaml": good.replace("p: {i", "q: {i"),
        "5-odd.yaml": good.replace("steps", "stepps"),
        "6-odd-key.yaml": good.replace("steps: [", "steps: [{at: 0s, flush: {bucket_key: 5}},"),
        "7-good.yaml": good,
        "README.md": "not one",
        ".hidden.yaml": "a: [",
    }.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "8-binary.yaml").write_bytes(b"\xff\x00")
    shown = program("simulate", tmp_path, "--json")
    assert shown.code == 1
    assert [answer["file"] for answer in shown.json] == ["1-good.yaml", "7-good.yaml"]
    told = shown.err.splitlines()
    assert [line.partition(":")[0] for line in told] == [
        "2-not-yaml.yaml",
        "3-no-mapping.yml",
        "4-no-policy.yaml",
        "5-odd.yaml",
        "6-odd-key.yaml",
        "8-binary.yaml",
    ]
    assert "step 1" in told[2]
    assert "flow p" in told[2]
    assert program("simulate", tmp_path / "3-no-mapping.yml", "--json").code == 1
    assert "8 scenarios, 6 failed" in program("simulate", tmp_path).out


def test_simulate_of_nothing_is_2(program: Program, tmp_path: Path) -> None:
    assert program("simulate", tmp_path / "none").code == 2
    assert program("simulate", tmp_path).code == 2


def test_simulate_tells_the_story(program: Program) -> None:
    shown = program("simulate", SCENARIOS / "01-seed-simulation.yaml")
    assert shown.code == 0
    told = [" ".join(line.split()) for line in shown.out.splitlines()]
    assert told[0].startswith("two-orders - Eight deliveries")
    assert told[1] == "0s push E1 (item_adicionado) to empresa_aurora:pedido:PED-104: accepted into window 1"
    assert told[4] == "5s push E2 (endereco_atualizado) to empresa_aurora:pedido:PED-104: duplicate"
    assert told[5] == "13s closed empresa_aurora:pedido:PED-104 window 1: inactivity; E1, E2"
    assert told[-2:] == ["received 8, accepted 7, duplicates 1, closed 5", "as expected"]


def test_simulate_tells_every_kind_of_story(program: Program) -> None:
    shown = program("simulate", *sorted(SCENARIOS.glob("*.yaml")))
    assert shown.code == 0
    for said in (
        "closes it (terminal)",
        "reconciled (",
        "late",
        "continuation",
        "sealed",
        "hold ",
        "retract ",
        "policy of",
    ):
        assert said in shown.out


def test_simulate_runs_300_short_scenarios(program: Program, tmp_path: Path) -> None:
    texts = [path.read_text() for path in sorted(SCENARIOS.glob("*.yaml"))]
    for n in range(300):
        (tmp_path / f"{n:03}.yaml").write_text(texts[n % len(texts)])
    shown = program("simulate", tmp_path, "--json")
    assert shown.code == 0
    assert len(shown.json) == 300


# --- policies ---------------------------------------------------------------------------------------------------------


def test_policy_check_tells_every_flow_that_is_wrong(program: Program, tmp_path: Path) -> None:
    file = tmp_path / "accumulator.yaml"
    file.write_text(
        "policies: {a: {inactivity: 10}, b: {inactivity: 5s}, c: {inactivity: 2h}, d: {inactivity: 5s, max_evnts: 3}}\n"
    )
    shown = program("policy", "check", file)
    assert shown.code == 1
    told = shown.err.splitlines()
    assert len(told) == 3
    assert told[0].startswith("accumulator: policy a: inactivity: 10 is a bare number")
    assert told[1].startswith("accumulator: policy c: inactivity: must not be above max_age")
    assert told[2] == "accumulator: policy d: max_evnts: is unknown; did you mean max_events?"
    assert [line["option"] for line in program("policy", "check", file, "--json").json] == [
        "inactivity",
        "inactivity",
        "max_evnts",
    ]


@pytest.mark.parametrize("text", ["polices: {}", "policies: [1]", "a: [", "5", "1: 2", "handlers: 5"])
def test_policy_check_of_a_wrong_file_is_1(program: Program, tmp_path: Path, text: str) -> None:
    file = tmp_path / "accumulator.yaml"
    file.write_text(text)
    shown = program("policy", "check", file)
    assert shown.code == 1
    assert shown.err.startswith("accumulator: ")
    assert shown.err.count("\n") == 1


def test_policy_check_of_what_is_good_needs_no_server(program: Program) -> None:
    shown = program("policy", "check", Path(__file__).parent.parent / "config" / "accumulator.yaml")
    assert (shown.code, shown.err) == (0, "")
    assert "policy pedido: good (inactivity 3s, max_age 1m, max_events 100" in shown.out
    assert program("policy", "check", "none.yaml").code == 2


def test_policy_load_and_show(program: Program, client: Accumulator, tmp_path: Path) -> None:
    file = tmp_path / "accumulator.yaml"
    file.write_text("policies: {order: {inactivity: 2s, ordered: false}, chat: {inactivity: null, max_age: 5m}}\n")
    assert program("policy", "load", "--config", file, "--json").json == [
        {"flow": "order", "version": 2, "outcome": "new"},
        {"flow": "chat", "version": 3, "outcome": "new"},
    ]
    assert program("policy", "load", "--config", file, "chat", "--json").json == [
        {"flow": "chat", "version": 3, "outcome": "same"}
    ]
    assert "same" in program("policy", "load", "--config", file).out
    assert program("policy", "load", "--config", file, "none").code == 2
    for command in "policy", "ladder":
        assert "a file goes to --config" in program(command, "load", "--config", file, file).err
        assert "--config" not in program(command, "load", "--config", file, "x" * 5000).err
    assert program("policy", "load").code == 2
    shown = program("policy", "show").out
    assert re.search(r"order +2 +inactivity 2s, ordered false", shown)
    assert re.search(r"chat +3 +inactivity null, max_age 5m", shown)
    assert program("policy", "show", "chat", "--json").json[0]["policy"]["max_age"] == 300_000
    missing = program("policy", "show", "none")
    assert (missing.code, missing.err) == (1, "accumulator: flow none: there is no policy for it\n")


@pytest.mark.parametrize("option", sorted(Policy.model_fields))
def test_every_option_is_shown_as_it_is_written(option: str) -> None:
    written: dict[str, Any] = {
        "inactivity": "90s", "max_age": "2h", "max_events": 1500, "max_bytes": 5000, "max_weight": 7000,
        "max_event_bytes": 2000, "terminal_kinds": ["a", "b"], "starter_kinds": ["a"], "terminal_grace": "1500ms",
        "cutoffs": ["12:00"], "timezone": "America/Sao_Paulo", "deadline_margin": "2m", "dedupe_ttl": "2d",
        "on_conflict": "keep_first", "order_by": "occurred_at", "on_late": "reject", "max_delay": "3h",
        "on_too_old": "reconcile", "max_future": "1m", "kinds": ["a"], "on_policy_change": "keep", "keep": "last",
        "ordered": False, "payload_ttl": "1d", "metadata_ttl": "30d", "handover": "together", "requery_kinds": ["a"],
        "busy_streak_alert": 3, "sink": "direct",
    }  # fmt: skip
    policy = Policy.load("order", {"inactivity": "1s", option: written[option]})
    value = written[option]
    text = "[" + ", ".join(value) + "]" if isinstance(value, list) else "false" if value is False else value
    assert f"{option} {text}" in cli._options_text(policy)


def test_an_empty_namespace_has_nothing_to_show(
    program: Program, server: EmbeddedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ACCUMULATOR_REDIS_URL", server.url)
    for arguments, said in (
        (["policy", "show"], "no policy is loaded"),
        (["buckets"], "no bucket is open"),
        (["manifests", "a:b:c"], "no window of this bucket has closed"),
        (["reconcile", "list"], "nothing waits for reconciliation"),
        (["counters"], "nothing was counted yet"),
        (["flush", "--flow", "order"], "no such bucket is open"),
        (["flush", "a:b:c"], "a:b:c: nothing is open"),
    ):
        shown = program(*arguments)
        assert (shown.code, said in shown.out) == (0, True), arguments
    assert program("buckets", "--json").out == ""


# --- buckets and manifests --------------------------------------------------------------------------------------------


def test_open_buckets_are_listed_oldest_first(program: Program, client: Accumulator) -> None:
    for n, key in enumerate(("shop:order:1", "shop:order:2", "zoo:order:1")):
        client.push(event(n, key))
        client.push(event(f"{n}b", key))
    shown = program("buckets")
    rows = [line.split() for line in shown.out.splitlines()[1:]]
    assert [row[0] for row in rows] == ["shop:order:1", "shop:order:2", "zoo:order:1"]
    assert {(row[1], row[3], row[-1]) for row in rows} == {("1", "2", "max_age")}
    listed = program("buckets", "--json").json
    assert [bucket["bucket_key"] for bucket in listed] == ["shop:order:1", "shop:order:2", "zoo:order:1"]
    state = client.bucket("shop:order:1").open
    assert state is not None
    assert listed[0]["open"]["due_at"] == state.due_at
    assert listed[0]["age"] >= 0
    assert [b["bucket_key"] for b in program("buckets", "--json", "--tenant", "zoo").json] == ["zoo:order:1"]
    assert program("buckets", "--json", "--flow", "chat").json == []
    assert len(program("buckets", "--json", "--tenant", "shop", "--flow", "order").json) == 2
    limited = program("buckets", "--json", "--limit", "2")
    assert (len(limited.json), limited.err) == (2, "and 1 more: --limit shows them\n")


def test_one_bucket_and_its_events(program: Program, client: Accumulator) -> None:
    client.push(event(1, payload={"n": 2**63}))
    client.push(event(2, payload=b"\x00\xff", source_version=7, deadline_at="2099-01-01T00:00:00Z"))
    client.push(event(2, payload=b"\x00\xff", source_version=7, deadline_at="2099-01-01T00:00:00Z"))
    shown = program("bucket", "shop:order:7", "--events")
    assert shown.code == 0
    facts = dict(re.findall(r"^(\S+(?: \S+)?)  +(.+)$", shown.out, re.MULTILINE))
    assert facts["events"] == "2"
    assert facts["duplicates"] == "1"
    assert re.fullmatch(r"[\d-]+ [\d:.]+Z \(in 59m\d+s\): max_age", facts["closes at"])
    assert re.search(r"2 +e2 +edited +test +7 ", shown.out)
    (answer,) = program("bucket", "shop:order:7", "--events", "--json").json
    assert answer["open"]["event_count"] == 2
    one, two = answer["events"]
    assert one["payload"] == {"n": 2**63}
    assert two["payload_bytes"] == "AP8="
    assert two["deadline_at"] == 4070908800000
    assert one["occurred_at"] == 1792159200000
    assert "payload" not in two
    (closed,) = program("bucket", "shop:order:none", "--json", "--events").json
    assert (closed["open"], closed["events"]) == (None, [])
    assert "no window" in program("bucket", "shop:order:none").out


@pytest.mark.parametrize("key", ["", "a", "a:b", "a::c", "a:b:\x07", "x" * 600 + ":b:c"])
def test_a_wrong_key_is_2_before_any_server_is_asked(program: Program, key: str) -> None:
    for arguments in (["bucket", key], ["manifests", key], ["flush", key], ["hold", key, "5s"], ["retract", key, "e"]):
        shown = program(*arguments)
        assert (shown.code, shown.out) == (2, ""), arguments


def test_manifests_of_a_bucket(program: Program, client: Accumulator) -> None:
    client.push(event(1))
    client.push(event(2, kind="paid"))
    client.push(event(3, kind="paid", payload={"a": [1]}))
    first, second = program("manifests", "shop:order:7", "--json").json
    assert (first["close_reason"], first["event_ids"], second["relation"]) == ("terminal", ["e1", "e2"], "after_close")
    assert "events" not in first
    rows = program("manifests", "shop:order:7").out.splitlines()[1:]
    assert [row.split()[:3] for row in rows] == [
        ["1", first["window_id"], "terminal"],
        ["2", second["window_id"], "terminal"],
    ]

    shown = program("manifest", second["window_id"], "--events")
    assert shown.code == 0
    for said in ("shop:order:7", "terminal", "after_close", first["window_id"], second["digest"], "1: e3", "max_age"):
        assert said in shown.out
    (answer,) = program("manifest", second["window_id"], "--events", "--json").json
    assert answer["events"][0]["payload"] == {"a": [1]}
    assert answer["timeline"] == [dict(step) for step in answer["timeline"]]
    assert program("manifest", second["window_id"][:-4] + "0000").code == 1
    assert program("manifest", "nonsense").code == 2


def test_text_of_others_cannot_speak_to_the_terminal(program: Program, client: Accumulator) -> None:
    client.push(event("\x1b[2J\n\u202e[red]", "shop:order:[bold]7", kind="paid"))
    (manifest,) = client.manifests("shop:order:[bold]7")
    shown = program("manifest", manifest.window_id, "--events")
    assert r"e\x1b[2J\n\u202e[red]" in shown.out
    assert "\x1b" not in shown.out
    assert "shop:order:[bold]7" in shown.out
    assert "\x1b" not in program("manifest", manifest.window_id, "--events", "--json").out


# --- what people do ---------------------------------------------------------------------------------------------------


def test_flush_one_bucket(program: Program, client: Accumulator) -> None:
    client.push(event(1))
    other = program("flush", "shop:order:7", "--version", "2")
    assert (other.code, other.out) == (1, "shop:order:7: not flushed: window 1 is open\n")
    shown = program("flush", "shop:order:7", "--version", "1")
    assert shown.code == 0
    assert re.match(r"shop:order:7: flushed; window 1 closed at .*Z: flush \([0-9a-z]+\)\n", shown.out)
    (again,) = program("flush", "shop:order:7", "--json").json
    assert again["outcome"] == "nothing_open"
    client.push(event(2))
    (flushed,) = program("flush", "shop:order:7", "--partial", "--json").json
    assert (flushed["outcome"], flushed["closed_windows"][0]["window_version"]) == ("flushed", 2)
    client.push(event(3))
    state = client.bucket("shop:order:7").open
    assert state is not None
    assert state.relation == "continuation"


def test_flush_a_tenant_or_flow(program: Program, client: Accumulator) -> None:
    for n, key in enumerate(("shop:order:1", "shop:order:2", "other:order:1")):
        client.push(event(n, key))
    assert {f["bucket_key"] for f in program("flush", "--tenant", "shop", "--json").json} == {
        "shop:order:1",
        "shop:order:2",
    }
    assert program("flush", "--flow", "order").out.startswith("other:order:1: flushed")
    assert program("flush").code == 2
    assert program("flush", "a:b:c", "--flow", "b").code == 2
    assert program("flush", "--flow", "b", "--version", "1").code == 2


def test_hold(program: Program, client: Accumulator) -> None:
    client.load_policy("order", {"inactivity": "10s"})
    client.push(event(1))
    shown = program("hold", "shop:order:7", "40s")
    assert (shown.code, "window 1 now closes at" in shown.out) == (0, True)
    (held,) = program("hold", "shop:order:7", "40s", "--json").json
    state = client.bucket("shop:order:7").open
    assert state is not None
    assert held["due_at"] == state.due_at > state.opened_at + 35_000
    assert program("hold", "shop:order:8", "40s").code == 1
    wrong = program("hold", "shop:order:7", "forty")
    assert (wrong.code, "must be a whole number and a unit" in wrong.err) == (2, True)


def test_retract(program: Program, client: Accumulator) -> None:
    client.push(event(1))
    client.push(event(2))
    assert program("retract", "shop:order:7", "e1").out == "e1: retracted from window 1\n"
    assert program("retract", "shop:order:7", "e1").out == "e1: was retracted before\n"
    unknown = program("retract", "shop:order:7", "e9")
    assert (unknown.code, "no such event" in unknown.out) == (1, True)
    client.flush("shop:order:7")
    (closed,) = program("retract", "shop:order:7", "e2", "--json").json
    assert (closed["outcome"], closed["window_version"]) == ("closed", 1)
    assert program("retract", "shop:order:7", "e2").code == 1
    assert program("retract", "shop:order:7", "").code == 2
    assert program("retract", "shop:order:7", "x" * 300).code == 2


# --- the namespace ----------------------------------------------------------------------------------------------------


def test_reconcile_list(program: Program, client: Accumulator) -> None:
    client.load_policy("chat", {"inactivity": "5s", "kinds": ["msg"]})
    client.push(event(1, "shop:chat:1", payload="secret"))
    (item,) = program("reconcile", "list", "--json").json
    assert (item["code"], item["event_id"], item["bucket_key"]) == ("unknown_kind", "e1", "shop:chat:1")
    shown = program("reconcile", "list")
    assert "unknown_kind" in shown.out
    assert "secret" not in shown.out
    assert program("reconcile", "list", "--tenant", "other", "--json").json == []


def test_counters(program: Program, client: Accumulator) -> None:
    client.push(event(1))
    client.push(event(1))
    (counted,) = program("counters", "--json").json
    assert (counted["accepted"], counted["duplicates"]) == (1, 1)
    assert re.search(r"accepted +1", program("counters").out)


def test_a_printed_redis_cli_line_works(program: Program, client: Accumulator, redis_cli: str) -> None:
    client.push(event(1, "shop:order:it's $HOME"))
    shown = program("redis-cli", "shop:order:it's $HOME")
    assert (shown.code, shown.err) == (0, "")
    command = shlex.split(shown.out)
    assert command[0] == "redis-cli"
    found = subprocess.run([redis_cli, *command[1:]], capture_output=True, text=True, check=True).stdout
    assert "tally" in found
    ping = subprocess.run(
        [redis_cli, *shlex.split(program("redis-cli").out)[1:], "PING"], capture_output=True, text=True, check=True
    )
    assert ping.stdout == "PONG\n"


@pytest.mark.parametrize(
    ("url", "line"),
    [
        ("redis://:geheim@db:6380/3", "redis-cli -h db -p 6380 -n 3"),
        ("rediss://ana:geheim@db", "redis-cli -h db -p 6379 --tls --user ana"),
        ("unix:///run/my%20redis.sock?db=2", "redis-cli -s '/run/my redis.sock' -n 2"),
        ("redis://[::1]/0", "redis-cli -h ::1 -p 6379"),
        ("rediss+cluster://ana:geheim@[::1]:7000,b:7001", "redis-cli -h ::1 -p 7000 -c --tls --user ana"),
    ],
)
def test_the_redis_cli_line_never_shows_a_password(
    program: Program, monkeypatch: pytest.MonkeyPatch, url: str, line: str
) -> None:
    monkeypatch.setenv("ACCUMULATOR_REDIS_URL", url)
    shown = program("redis-cli")
    assert shown.out == f"{line}\n"
    assert "geheim" not in shown.err
    assert ("REDISCLI_AUTH" in shown.err) == ("geheim" in url)
    assert cli.cli_line(Settings()) == shlex.split(line)


# --- as a process -----------------------------------------------------------------------------------------------------


def test_the_module_is_the_program(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "accumulator", "--version"],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parent.parent,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "accumulator 0.1.0\n", "")


def test_a_reader_that_goes_away_is_no_fault(client: Accumulator, namespace: str) -> None:
    client.push_many([event(n, f"shop:order:{n}") for n in range(3000)])
    head = shutil.which("head")
    assert head is not None
    program = subprocess.Popen(
        [sys.executable, "-m", "accumulator", "buckets", "--json", "--limit", "3000"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=Path(__file__).parent.parent,
        env=os.environ | {"ACCUMULATOR_NAMESPACE": namespace, "ACCUMULATOR_CONFIG": os.devnull},  # noqa: TID251
    )
    assert program.stdout is not None
    assert program.stderr is not None
    with program:
        assert b"bucket_key" in program.stdout.readline()
        program.stdout.close()
        assert b"Traceback" not in program.stderr.read()


def test_importing_the_package_is_light_and_its_names_are_there() -> None:
    code = """
import sys, accumulator
heavy = {"rq", "typer", "fakeredis", "redis", "pydantic", "rich", "yaml"} & set(sys.modules)
assert not heavy, heavy
for name in accumulator.__all__:
    assert getattr(accumulator, name) is not None, name
assert set(accumulator.__all__) <= set(dir(accumulator))
heavy = {"rq", "typer", "fakeredis", "rich", "pytest"} & set(sys.modules)
assert not heavy, heavy
try:
    accumulator.nonsense
except AttributeError as error:
    print(error)
from accumulator import *
Accumulator, Event, handler, MISSING
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=Path(__file__).parent.parent
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "module 'accumulator' has no attribute 'nonsense'\n"


def test_the_exceptions_are_all_there() -> None:
    import accumulator as package
    from accumulator import errors

    public = {name for name, value in vars(errors).items() if isinstance(value, type) and issubclass(value, Exception)}
    assert public <= set(package.__all__)


# --- the worker -------------------------------------------------------------------------------------------------------


def test_a_worker_that_cannot_begin_says_why(
    program: Program, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, client: Accumulator
) -> None:
    assert program("worker", "--role", "closer,cleaner").code == 2
    shown = program("worker", "--role", "closer", "--processes", "2")
    assert (shown.code, "processes" in shown.err) == (2, True)
    assert program("worker", "--config", "none.yaml").code == 2
    (tmp_path / "c.yaml").write_text("handlers: [there_is_no_such_module]\n")
    shown = program("worker", "--config", "c.yaml")
    assert shown.code == 2
    assert "there_is_no_such_module can't be imported: there is no such module" in shown.err


def test_a_worker_closes_what_is_due_until_it_is_stopped(client: Accumulator, namespace: str, tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text(
        "handlers: [handling]\npolicies: {chat: {inactivity: 100ms, sink: direct}, order: {inactivity: 10m}}\n"
    )
    (tmp_path / "handling.py").write_text(
        "from accumulator import Context, handler\n\n@handler('chat')\ndef chat(ctx: Context) -> None:\n"
        "    print('handled', *ctx.manifest.event_ids, flush=True)\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-m", "accumulator", "worker", "--role", "closer", "--role", "runner", "--config", "c.yaml"],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ  # noqa: TID251
        | {"ACCUMULATOR_NAMESPACE": namespace, "PYTHONPATH": str(Path(__file__).parent.parent)},
    )
    with process:
        assert process.stdout is not None
        assert process.stderr is not None
        try:
            wait_until(lambda: "chat" in client.policies(), what="the worker has installed its policies")
            client.push(event(1, "shop:chat:1"))
            assert process.stdout.readline() == "handled e1\n"
            process.terminate()
            begun = time.monotonic()
            assert process.wait(10) == 0
            assert time.monotonic() - begun < 10  # 5 s, and what the other tests take of the machine
            told = process.stderr.read()
            assert "policy_differs" in told
            assert "Traceback" not in told
        finally:
            process.kill()
