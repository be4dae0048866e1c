"""Workers and servers that die by SIGKILL: nothing is lost, nothing is closed or handed over twice."""

from __future__ import annotations

import signal
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from accumulator.client import Accumulator
from accumulator.embedded import EmbeddedServer
from accumulator.errors import ServerError
from accumulator.windows import Outcome, Receipt
from tests.conftest import StartServer, event, wait_until
from tests.invariants import check_invariants
from tests.processes import let_pass, program, written

pytestmark = pytest.mark.timeout(120)


def settled(accumulator: Accumulator) -> bool:
    try:
        health = accumulator.store.perform(accumulator.operations.health())
        return health.unsettled == 0 and not accumulator.open_buckets()
    except ServerError:
        return False


def push(accumulator: Accumulator, flow: str, buckets: int, out: Path, **payload: Any) -> list[str]:
    keys = [f"t:{flow}:{i}" for i in range(buckets)]
    told = {"out": str(out), **payload}
    accumulator.push_many([event(f"e{i}", key, payload=told) for key in keys for i in range(2)])
    return keys


def test_a_killed_worker_with_windows_open(
    live: Accumulator, server: EmbeddedServer, namespace: str, tmp_path: Path
) -> None:
    """Another worker closes them all, once each."""
    live.load_policy("log", {"inactivity": "700ms", "sink": "direct"})
    out = tmp_path / "out"
    with program(["-m", "workers.all"], server.url, namespace, tmp_path / "one") as first:
        first.until("started")
        keys = push(live, "log", 200, out)
        first.process.kill()
        first.process.wait(5)
    assert live.counters().get("closed", 0) < 200
    with program(["-m", "workers.all"], server.url, namespace, tmp_path / "two") as second:
        second.until("started")
        wait_until(lambda: settled(live))
    for key in keys:
        [manifest] = live.manifests(key)
        assert (manifest.event_ids, manifest.close_reason, manifest.state) == (("e0", "e1"), "inactivity", "confirmed")
    assert Counter(line[1] for line in written(out)) == dict.fromkeys(keys, 1)


def test_a_worker_that_is_killed_while_it_closes(
    live: Accumulator, server: EmbeddedServer, namespace: str, tmp_path: Path
) -> None:
    """Again and again; what was closed stays, what was handed over and not settled is handed over again."""
    live.load_policy("log", {"inactivity": "300ms", "sink": "direct"})
    out = tmp_path / "out"
    every: list[str] = []
    for turn in range(3):
        with program(["-m", "workers.all"], server.url, namespace, tmp_path / f"log{turn}") as worker:
            worker.until("started")
            told = {"out": str(out)}
            keys = [f"t:log:{turn}-{i}" for i in range(150)]
            live.push_many([event(f"e{i}", key, payload=told) for key in keys for i in range(2)])
            every += keys
            wait_until(lambda: live.counters().get("closed", 0) > 150 * turn)  # noqa: B023
            worker.process.kill()
            worker.process.wait(5)
    with program(["-m", "workers.all"], server.url, namespace, tmp_path / "last") as worker:
        worker.until("started")
        wait_until(lambda: not live.open_buckets())
        let_pass(live)  # what the killed ones held
        wait_until(lambda: settled(live))
    for key in every:
        [manifest] = live.manifests(key)
        assert manifest.event_ids == ("e0", "e1")
        assert manifest.state == "confirmed"
    handled = Counter(line[1] for line in written(out))
    assert set(handled) == set(every)
    again = {line[1] for line in written(out) if line[3] > 1}
    assert {key for key, times in handled.items() if times > 1} <= again


def test_a_process_that_dies_with_its_handler(
    live: Accumulator, server: EmbeddedServer, namespace: str, tmp_path: Path
) -> None:
    """Its lease ends, and the next attempt is somebody else's."""
    live.load_policy("crash", {"inactivity": "100ms", "sink": "direct"})
    out = tmp_path / "out"
    with program(["-m", "workers.all"], server.url, namespace, tmp_path / "one") as first:
        first.until("started")
        [key] = push(live, "crash", 1, out)
        assert first.process.wait(10) == -signal.SIGKILL
    assert live.manifests(key)[0].state == "processing"
    with program(["-m", "workers.all"], server.url, namespace, tmp_path / "two") as second:
        second.until("started")
        assert let_pass(live) == 1
        wait_until(lambda: settled(live))
    [manifest] = live.manifests(key)
    assert (manifest.state, manifest.attempt) == ("confirmed", 2)
    assert [line[3] for line in written(out)] == [1, 2]
    assert "lease_ended" in [cause for _, _, _, cause in manifest.timeline]


# -- a server that dies


class Producer:
    """Pushes from a thread, and keeps what was answered."""

    def __init__(self, url: str, namespace: str, name: str, flow: str, out: Path) -> None:
        self.receipts: list[Receipt] = []
        self.stop = threading.Event()
        self._accumulator = Accumulator(url, namespace=namespace, socket_timeout=5)
        self._name = name
        self._flow = flow
        self._told = {"out": str(out)}
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        number = 0
        while not self.stop.is_set():
            number += 1
            keys = [f"t:{self._flow}:{self._name}-{number % 20}-{i}" for i in range(5)]
            events = [event(f"{number}", key, payload=self._told) for key in keys]
            while not self.stop.is_set():
                try:
                    receipts = self._accumulator.push_many(events)
                except ServerError:
                    receipts = []
                answered = [receipt for receipt in receipts if receipt.outcome is not Outcome.UNKNOWN]
                self.receipts += answered
                if len(answered) == len(events):
                    break
                self.stop.wait(0.02)  # the same events again: what was taken before is a duplicate

    @contextmanager
    def at_work(self) -> Iterator[None]:
        self._thread.start()
        try:
            yield
        finally:
            self.stop.set()
            self._thread.join(20)
            self._accumulator.close()


def test_a_killed_server_under_pushes(
    server_kind: str, start_server: StartServer, namespace: str, tmp_path: Path
) -> None:
    """With the append-only file, synced always: all that was answered is there, nothing twice, and the same worker
    goes on."""
    server = start_server(data_dir=tmp_path / "data")
    out = tmp_path / "out"
    with Accumulator(server.url, namespace=namespace, socket_timeout=5) as reader:
        reader.load_policy("log", {"inactivity": "200ms", "max_events": 3, "sink": "direct"})
        one, two = (Producer(server.url, namespace, name, "log", out) for name in ("a", "b"))
        with program(["-m", "workers.all"], server.url, namespace, tmp_path / "log") as worker:
            worker.until("started")
            with one.at_work(), two.at_work():
                for kills in (1, 2, 3):
                    wait_until(lambda: min(len(one.receipts), len(two.receipts)) > 150 * kills)  # noqa: B023
                    server.kill()
                    server.restart()
            wait_until(lambda: not reader.open_buckets(), timeout=20)
            let_pass(reader)
            wait_until(lambda: settled(reader), timeout=20)
            assert worker.process.poll() is None

        answered = {
            (receipt.bucket_key, receipt.event_id)
            for receipt in one.receipts + two.receipts
            if receipt.outcome in (Outcome.ACCEPTED, Outcome.DUPLICATE)
        }
        assert {receipt.outcome for receipt in one.receipts + two.receipts} <= {Outcome.ACCEPTED, Outcome.DUPLICATE}
        held: Counter[tuple[str, str]] = Counter()
        for key in {key for key, _ in answered}:
            for manifest in reader.manifests(key):
                assert manifest.anomaly is None
                held.update((key, event_id) for event_id in manifest.event_ids)
        assert answered <= set(held)
        assert max(held.values()) == 1
        handed = Counter((line[1], line[2]) for line in written(out) if line[3] == 1)
        assert max(handed.values()) == 1
        assert {(line[1], event_id) for line in written(out) for event_id in line[4]} >= answered
        check_invariants(reader.store.client, namespace)  # type: ignore[arg-type]
