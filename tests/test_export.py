"""Settled manifests as JSON lines: all of them, while they are there, whatever happens meanwhile."""

from __future__ import annotations

import gzip
import json
import tracemalloc
from collections import Counter
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import redis

import accumulator.handlers
from accumulator import export as exporting
from accumulator.client import Accumulator
from accumulator.embedded import EmbeddedServer
from accumulator.errors import ServerUnavailable
from accumulator.export import export
from accumulator.handlers import Stages, handler, step_handler
from accumulator.manifest import pairs_digest
from accumulator.runner import run_attempt
from accumulator.testing import VirtualClock
from tests.conftest import MakeClient, Program, StartServer, event, wait_until
from tests.invariants import check_invariants

KEPT = {"inactivity": "1h", "terminal_kinds": ["end"], "sink": "none"}
HANDLED = KEPT | {"sink": "direct"}


def exported(accumulator: Accumulator, since: int = 0) -> list[dict[str, Any]]:
    return [json.loads(line) for line in export(accumulator, since)]


def settle(accumulator: Accumulator, window_id: str, ending: str) -> None:
    """Takes, begins and settles a manifest."""
    operations, perform = accumulator.operations, accumulator.store.perform
    for partition in range(operations.partitions):
        for taken in perform(operations.take(partition, "direct", 100, 30_000)):
            assert taken.window_id == window_id
            assert perform(operations.begin(window_id, taken.attempt, "t" * 16, 60_000, 5)).manifest is not None
            assert perform(
                operations.settle(window_id, "t" * 16, ending, "test", manifest=_read(accumulator, window_id))
            )


def _read(accumulator: Accumulator, window_id: str) -> Any:
    return accumulator.manifest(window_id)


def closed(accumulator: Accumulator, key: str, clock: VirtualClock, n: int = 1, **more: Any) -> str:
    """A window of one event, closed by it."""
    (window,) = accumulator.push(event(f"e{n}", key, clock, kind="end", **more)).closed_windows
    return window.window_id


# --- what is in it ----------------------------------------------------------------------------------------------------


def test_what_ladders_emitted_is_in_it_until_it_goes(
    virtual: Accumulator, clock: VirtualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(accumulator.handlers, "_steps", {})
    ttl = {"payload_ttl": "1d", "metadata_ttl": "4d"}
    virtual.load_policy("f", HANDLED | ttl)
    virtual.load_policy("quiet", KEPT | ttl)
    virtual.load_ladder("l", {"anchor": "start", "steps": [{"name": "s", "offset": "0s"}], "escalate": True})
    step_handler("l")(lambda ctx: ctx.once("mail", lambda key: {"sent": 1}))
    for flow in ("f", "quiet"):
        virtual.start_ladder("l", f"t:{flow}:1", args={"amount": 7})
    assert [line["event"] for line in exported(virtual)] == ["step", "escalated"]  # of the flow without a sink
    for partition in range(4):
        for _ in range(2):
            for taken in virtual.store.perform(virtual.operations.take(partition, "direct", 9, 30_000)):
                assert run_attempt(virtual, taken.window_id, taken.attempt) == "confirmed"
    lines = {(line["bucket_key"], line["event"]): line for line in exported(virtual)}
    assert len(lines) == 4
    line = lines["t:f:1", "step"]
    assert (line["ladder"], line["step"], line["args"], line["settled_at"]) == ("l", "s", {"amount": 7}, clock.now)
    assert [(effect["name"], effect["result"]) for effect in line["effects"]] == [("mail", {"sent": 1})]
    assert [step["state"] for step in line["timeline"]] == ["dispatched", "processing", "confirmed"]
    clock.advance("3d")
    assert len(exported(virtual)) == 4
    clock.advance("2d")
    assert exported(virtual) == []


def test_what_is_settled_is_there_and_nothing_else(virtual: Accumulator, clock: VirtualClock) -> None:
    virtual.load_policy("kept", KEPT)
    virtual.load_policy("handled", HANDLED)
    expected = {closed(virtual, "t:kept:1", clock): "confirmed"}
    virtual.push(event("e1", "t:kept:2", clock))
    virtual.retract("t:kept:2", "e1")
    expected[virtual.flush("t:kept:2").closed_windows[0].window_id] = "empty"
    for state, decision in {"confirmed": None, "discarded": "discard", "refused": "refuse"}.items():
        window_id = closed(virtual, f"t:handled:{state}", clock)
        expected[window_id] = state
        if decision is None:
            settle(virtual, window_id, "confirmed")
        else:
            settle(virtual, window_id, "awaiting_approval" if decision == "refuse" else "dead")
            virtual.store.perform(virtual.operations.decide(window_id, decision, "ana", "why"))
    for ending in ("dead", "uncertain", "reconciling", "awaiting_approval", "returned"):
        settle(virtual, closed(virtual, f"t:handled:not-{ending}", clock), ending)
    closed(virtual, "t:handled:closed", clock)
    virtual.push(event("e1", "t:kept:open", clock))
    assert {told["window_id"]: told["state"] for told in exported(virtual)} == expected


def test_a_line_holds_all_of_a_manifest(
    virtual: Accumulator, clock: VirtualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("accumulator.handlers._registry", {})

    @handler("handled")
    class Ship(Stages):
        def propose(self, ctx: Any) -> object:
            return {"to": "Lisbon"}

        def execute(self, ctx: Any, key: str) -> object:
            return {"parcel": 7}

    virtual.load_policy("handled", HANDLED | {"order_by": "source_version"})
    payload = {"big": 2**64 - 1, "small": -(2**63), "half": 0.5, "text": "ação\u0000\u2028", "none": None, "list": []}
    virtual.push(event("e1", "t:handled:1", clock, payload=payload, ref="db/1", source_version=2**63 - 1))
    virtual.push(event("e1", "t:handled:1", clock, payload=payload, ref="db/1", source_version=2**63 - 1))
    virtual.push(event("gone", "t:handled:1", clock, payload=1))
    virtual.retract("t:handled:1", "gone")
    virtual.push(event("e2", "t:handled:1", clock, payload=b"\x00\xff"))
    virtual.push(event("e3", "t:handled:1", clock, payload=None, deadline_at=clock.instant.replace(year=2099)))
    window_id = closed(virtual, "t:handled:1", clock, 4)
    clock.advance("3s")
    for partition in range(4):
        for taken in virtual.store.perform(virtual.operations.take(partition, "direct", 9, 30_000)):
            assert run_attempt(virtual, taken.window_id, taken.attempt) == "confirmed"
    manifest = virtual.manifest(window_id)
    assert manifest is not None
    (told,) = exported(virtual)
    for name in ("window_id", "bucket_key", "closed_at", "close_reason", "limits", "digest", "duplicates", "attempt"):
        assert told[name] == getattr(manifest, name)
    assert told["settled_at"] == clock()
    assert told["retracted_event_ids"] == ["gone"]
    assert [step["state"] for step in told["timeline"]] == ["dispatched", "processing", "confirmed"]
    assert told["timeline"][-1] == {"at": clock(), "state": "confirmed", "attempt": 1, "cause": "handled"}
    assert [(entry["event_id"], entry["ref"]) for entry in told["record"]] == [
        ("e1", "db/1"), ("e2", None), ("e3", None), ("e4", None)
    ]  # fmt: skip
    assert pairs_digest((e["event_id"], e["content_digest"]) for e in told["record"]) == told["digest"]
    first, second, third, last = told["events"]
    assert (first["payload"], first["source_version"]) == (payload, 2**63 - 1)
    assert second["payload_bytes"] == "AP8="
    assert (third["payload"], third["deadline_at"]) == (None, manifest.events[2].event.deadline_ms)
    assert not {"payload", "payload_bytes"} & last.keys()
    assert [event["position"] for event in told["events"]] == [1, 3, 4, 5]
    assert [(e["name"], e["state"], e["result"]) for e in told["effects"]] == [("execute", "confirmed", {"parcel": 7})]
    assert told["stages"] == {"propose": {"to": "Lisbon"}}


def test_a_debounce_has_its_one_payload(virtual: Accumulator, clock: VirtualClock) -> None:
    virtual.load_policy("doc", KEPT | {"keep": "last"})
    virtual.push(event("e1", "t:doc:1", clock, payload="first"))
    closed(virtual, "t:doc:1", clock, 2, payload="last")
    (told,) = exported(virtual)
    assert [event.get("payload") for event in told["events"]] == [None, "last"]


def test_a_long_window_is_there_to_its_end(virtual: Accumulator, clock: VirtualClock) -> None:
    virtual.load_policy("long", KEPT | {"max_events": 2500})
    virtual.push_many([event(f"e{n}", "t:long:1", clock) for n in range(2500)])
    (told,) = exported(virtual)
    assert [event["event_id"] for event in told["events"]] == [f"e{n}" for n in range(2500)]
    assert told["anomaly"] is None


# --- as things go -----------------------------------------------------------------------------------------------------


def test_payloads_go_first_then_all_of_it(make_client: MakeClient, namespace: str, clock: VirtualClock) -> None:
    client = make_client()
    one = clock.attach(Accumulator(client, namespace=namespace, partitions=4, clock=clock))
    one.load_policy("kept", KEPT | {"payload_ttl": "1h", "metadata_ttl": "3h", "dedupe_ttl": "1h"})
    window_id = closed(one, "t:kept:1", clock, payload="secret")
    manifest = one.manifest(window_id)
    assert manifest is not None
    (whole,) = exported(one)
    one.store.perform(one.operations.record(manifest))
    clock.advance("1h")
    (left,) = exported(one)
    assert left["events"] is None
    assert left["record"] == whole["record"]
    assert left["digest"] == whole["digest"]
    clock.advance("2h")
    assert exported(one) == []
    check_invariants(client, namespace, purged=True)


def test_what_goes_next_comes_first(make_client: MakeClient, namespace: str, clock: VirtualClock) -> None:
    one = Accumulator(make_client(), namespace=namespace, partitions=1, clock=clock)
    for flow, ttl in (("slow", "9h"), ("fast", "1h"), ("mid", "5h")):
        one.load_policy(flow, KEPT | {"payload_ttl": ttl})
        closed(one, f"t:{flow}:1", clock)
    assert [told["bucket_key"] for told in exported(one)] == ["t:fast:1", "t:mid:1", "t:slow:1"]


def test_many_that_go_at_one_instant(
    make_client: MakeClient, namespace: str, clock: VirtualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exporting, "PAGE", 20)
    one = Accumulator(make_client(), namespace=namespace, partitions=1, clock=clock)
    one.load_policy("kept", KEPT)
    for _ in range(2):
        one.push_many([event(f"e{clock()}", f"t:kept:{n}", clock, kind="end") for n in range(70)])
        one.push_many([event("open", f"t:kept:open-{n}", clock) for n in range(50)])
        clock.advance("1s")
    told = Counter(line["window_id"] for line in exported(one))
    assert (len(told), set(told.values())) == (140, {1})


def test_none_is_missed_while_retention_goes_on(
    make_client: MakeClient, namespace: str, clock: VirtualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exporting, "PAGE", 10)
    one = Accumulator(make_client(), namespace=namespace, partitions=1, clock=clock)
    one.load_policy("kept", KEPT | {"payload_ttl": "1h", "metadata_ttl": "9h"})
    for n in range(60):
        window_id = closed(one, f"t:kept:{n}", clock)
        manifest = one.manifest(window_id)
        assert manifest is not None
        one.store.perform(one.operations.record(manifest))
        clock.advance("1m", worker=False)
    found = set()
    for line in export(one):
        found.add(json.loads(line)["bucket_key"])
        clock.advance("3m")  # a worker purges payloads, and so moves what is still to come
    assert found == {f"t:kept:{n}" for n in range(60)}


def test_memory_does_not_grow_with_what_is_exported(live: Accumulator, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exporting, "_ROUND_BYTES", 200_000)
    live.load_policy("kept", KEPT | {"max_event_bytes": 1 << 20})
    live.push_many([event("e", f"t:kept:{n}", kind="end", payload="x" * 100_000) for n in range(150)])
    lines = export(live)
    next(lines)
    tracemalloc.start()
    count = 1 + sum(1 for _ in lines)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert count == 150
    assert peak < 8_000_000  # of 15,000,000; a payload takes twenty times its size while its digest is made


def test_it_only_reads_and_searches_nothing(live: Accumulator, make_client: MakeClient) -> None:
    live.load_policy("kept", KEPT)
    live.push_many([event(f"e{n}", f"t:kept:{n}", kind="end") for n in range(50)])
    client = make_client()
    client.config_resetstat()
    assert len(exported(live)) == 50
    used = {name.removeprefix("cmdstat_") for name in client.info("commandstats")}
    assert used - {"config|resetstat", "info", "client|setinfo", "hello"} == {
        "zrange", "hmget", "hgetall", "get", "xrange"
    }  # fmt: skip


def test_since_an_instant(virtual: Accumulator, clock: VirtualClock) -> None:
    virtual.load_policy("kept", KEPT)
    closed(virtual, "t:kept:1", clock)
    clock.advance("1h", worker=False)
    between = clock()
    closed(virtual, "t:kept:2", clock)
    assert [told["bucket_key"] for told in exported(virtual, between)] == ["t:kept:2"]
    assert exporting.start_of_next(virtual) == between - exporting.MARGIN


# --- on a cluster -----------------------------------------------------------------------------------------------------


@pytest.fixture
def cluster(start_server: StartServer) -> Iterator[redis.RedisCluster]:
    """A cluster of one node: it refuses what spans slots, as any does."""
    server = start_server(config={"cluster-enabled": "yes"})
    with redis.Redis.from_url(server.url, protocol=2) as control:
        control.execute_command("CLUSTER", "ADDSLOTSRANGE", 0, 16383)
        wait_until(lambda: control.cluster("info")["cluster_state"] == "ok")
    client = redis.RedisCluster(host="127.0.0.1", port=server.port)
    yield client
    client.close()


def test_on_a_cluster(cluster: redis.RedisCluster, namespace: str) -> None:
    accumulator = Accumulator(cluster, namespace=namespace, partitions=8)
    accumulator.load_policy("kept", KEPT | {"kinds": ["end"]})
    accumulator.push_many([event(f"e{n}", f"t:kept:{n}", kind="end", payload=n) for n in range(30)])
    told = exported(accumulator)
    assert sorted(line["events"][0]["payload"] for line in told) == list(range(30))
    accumulator.push_many([event(f"x{n}", f"t:kept:{n}", kind="odd") for n in range(30)])
    assert accumulator.resolve_where("accept", by="ana", reason="why", flow="kept")["accepted"] == 30
    assert accumulator.attention() == []


# --- the command ------------------------------------------------------------------------------------------------------


@pytest.fixture
def client(server: EmbeddedServer, namespace: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Accumulator]:
    """A client of the server that the program is told of, with three settled manifests."""
    monkeypatch.setenv("ACCUMULATOR_REDIS_URL", server.url)
    with Accumulator(server.url, namespace=namespace, partitions=4) as made:
        made.load_policy("kept", KEPT)
        made.push_many([event(f"e{n}", f"t:kept:{n}", kind="end", payload=n) for n in range(3)])
        yield made


def test_into_a_file_that_is_new(program: Program, client: Accumulator, tmp_path: Path) -> None:
    shown = program("export", "out.jsonl")
    assert shown.code == 0
    assert shown.out.startswith("3 manifests, ")
    lines = (tmp_path / "out.jsonl").read_text().splitlines()
    assert sorted(json.loads(line)["bucket_key"] for line in lines) == ["t:kept:0", "t:kept:1", "t:kept:2"]
    again = program("export", "out.jsonl")
    assert (again.code, again.err) == (2, "accumulator: out.jsonl: is there already\n")
    assert [path.name for path in tmp_path.iterdir()] == ["out.jsonl"]
    assert program("export", "nowhere/out.jsonl").code == 2


def test_compressed_and_as_json(program: Program, client: Accumulator, tmp_path: Path) -> None:
    (told,) = program("export", "out.jsonl.gz", "--json").json
    text = gzip.decompress((tmp_path / "out.jsonl.gz").read_bytes())
    assert (told["manifests"], told["bytes"], told["since"]) == (3, len(text), 0)
    assert len(text.splitlines()) == 3


def test_to_standard_output(program: Program, client: Accumulator) -> None:
    shown = program("export", "-")
    assert len(shown.json) == 3
    assert shown.err.startswith("3 manifests, ")


def test_since_what(program: Program, client: Accumulator) -> None:
    assert len(program("export", "-", "--since", "1h").json) == 3
    assert program("export", "-", "--since", "2099-01-01T00:00:00Z").json == []
    assert len(program("export", "-", "--since", "2026-01-01T00:00:00+02:00").json) == 3
    for wrong in ("yesterday", "1y", "", "-1h", "20260101T000000Z", "2026"):
        shown = program("export", "-", f"--since={wrong}")
        assert shown.code == 2, wrong
        assert shown.err.startswith("accumulator: --since: must be an instant, as in 2026-11-30T00:00:00Z, or an age")
    for wrong in ("2026-01-01", "2026-01-01T00:00:00", "2026-13-01T00:00:00Z"):
        shown = program("export", "-", f"--since={wrong}")
        assert (shown.code, shown.err.partition(" ")[2].partition(" ")[0]) == (2, "--since:"), wrong
    assert program("export", "-", "--since", "1h", "--position", "at").code == 2


def test_the_next_one_goes_on_where_this_one_began(program: Program, client: Accumulator, tmp_path: Path) -> None:
    before = datetime.now(UTC).timestamp() * 1000
    assert len(program("export", "-", "--position", "at").json) == 3
    noted = datetime.fromisoformat((tmp_path / "at").read_text().strip())
    assert abs(noted.timestamp() * 1000 - (before - exporting.MARGIN)) < 30_000
    (tmp_path / "at").write_text("2099-01-01T00:00:00Z\n")
    assert program("export", "-", "--position", "at").json == []
    (tmp_path / "at").write_text("yesterday")
    shown = program("export", "-", "--position", "at")
    assert shown.code == 2
    assert shown.err.startswith("accumulator: at: is not an RFC 3339 instant")


def test_one_that_breaks_off_leaves_nothing_and_is_made_again(
    program: Program, client: Accumulator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = exporting.export

    def broken(accumulator: Accumulator, since: int) -> Iterator[bytes]:
        yield next(whole(accumulator, since))
        raise ServerUnavailable("the server can't be reached: gone")

    monkeypatch.setattr("accumulator.cli_operate.export", broken)
    assert program("export", "out.jsonl", "--position", "at").code == 3
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setattr("accumulator.cli_operate.export", whole)
    assert program("export", "out.jsonl", "--position", "at").code == 0
    assert len((tmp_path / "out.jsonl").read_text().splitlines()) == 3
