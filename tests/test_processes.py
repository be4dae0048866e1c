"""The sink `direct` in processes of the worker: real processes, on a real server."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from accumulator.client import Accumulator
from accumulator.embedded import EmbeddedServer
from accumulator.errors import InvalidSettings
from accumulator.manifest import Manifest
from accumulator.settings import Settings
from accumulator.worker import Worker
from tests.conftest import event, process_lives, wait_until
from tests.processes import Program, let_pass, program, written

pytestmark = pytest.mark.timeout(120)
one_server = pytest.mark.parametrize("server_kind", ["valkey"])
"""What these do has nothing to do with which server it is."""


@pytest.fixture
def out(tmp_path: Path) -> Path:
    """Where the handlers write what they do."""
    return tmp_path / "out"


@pytest.fixture
def started(server: EmbeddedServer, namespace: str, tmp_path: Path) -> Callable[..., Any]:
    """Runs a worker of two processes."""

    @contextmanager
    def start(*options: str, **environment: str) -> Iterator[Program]:
        arguments = ["-m", "accumulator", "worker", "--processes", "2", *options]
        with program(arguments, server.url, namespace, tmp_path / "log", environment) as worker:
            worker.until("started")
            yield worker
            if worker.process.poll() is None:
                worker.process.terminate()
                assert worker.process.wait(5) == 0
                assert worker.lines()[-1] | {"event": "stopped", "unfinished": ""} == worker.lines()[-1]

    return start


def flush(accumulator: Accumulator, flow: str, out: Path, buckets: int = 1, **payload: Any) -> None:
    """Closes a window of one event in each of so many buckets."""
    accumulator.load_policy(flow, {"inactivity": "1h", "sink": "direct"}, only_new=True)
    accumulator.push_many([event("e1", f"t:{flow}:{i}", payload={"out": str(out), **payload}) for i in range(buckets)])
    accumulator.flush_where(flow=flow)


def go(out: Path) -> None:
    """Lets the handlers of the flow `who` end."""
    out.with_name("go").touch()


def only(accumulator: Accumulator, flow: str) -> Manifest:
    [manifest] = accumulator.manifests(f"t:{flow}:0")
    return manifest


def causes(accumulator: Accumulator, flow: str) -> list[tuple[str, str]]:
    """What became of the manifest, and why, from its first attempt on."""
    return [(state, cause) for _, state, _, cause in only(accumulator, flow).timeline if state != "dispatched"][1:]


def pids(out: Path, what: str, flow: str = "") -> list[int]:
    """The processes in which handlers, those of the flow only, wrote that, in order."""
    found = [line for line in written(out) if flow in ("", line[1].split(":")[1])]
    return [int(line[0].split()[1]) for line in found if line[0].startswith(f"{what} ")]


@one_server
def test_two_processes_side_by_side(
    live: Accumulator, server: EmbeddedServer, started: Callable[..., Any], out: Path
) -> None:
    with started() as worker:
        flush(live, "who", out, 2)
        wait_until(lambda: len(pids(out, "begun")) == 2)
        both = pids(out, "begun")
        assert len({*both, worker.pid}) == 3
        for pid in both:
            assert server.url not in Path(f"/proc/{pid}/cmdline").read_text()
        go(out)
        wait_until(lambda: sorted(pids(out, "ended")) == sorted(both))
        wait_until(lambda: only(live, "who").state == "confirmed")


@one_server
def test_threads_of_a_process(live: Accumulator, started: Callable[..., Any], out: Path) -> None:
    with started("--threads", "3"):
        flush(live, "who", out, 6)
        wait_until(lambda: len(pids(out, "begun")) == 6)
        go(out)
        assert {pids(out, "begun").count(pid) for pid in pids(out, "begun")} == {3}


@one_server
@pytest.mark.parametrize(("flow", "how"), [("crash", "Killed"), ("fault", "Segmentation fault")])
def test_a_process_that_dies_is_replaced(
    live: Accumulator, started: Callable[..., Any], out: Path, flow: str, how: str
) -> None:
    """Of kill -9, and of a segmentation fault, in its handler: the lease ends, and another process goes on."""
    with started() as worker:
        flush(live, flow, out)
        wait_until(lambda: bool(worker.said("trouble")))
        assert worker.said("trouble")[0]["detail"].endswith(
            f"a process of the role runner was ended by a signal: {how}"
        )
        assert only(live, flow).state == "processing"
        assert let_pass(live) == 1
        wait_until(lambda: only(live, flow).state == "confirmed")
        assert causes(live, flow)[0] == ("retrying", "lease_ended")
        flush(live, "who", out, 2)
        wait_until(lambda: len({*pids(out, "begun", "who")}) == 2)
        go(out)


@one_server
def test_a_handler_that_does_not_end_is_killed(live: Accumulator, started: Callable[..., Any], out: Path) -> None:
    with started() as worker:
        flush(live, "spin", out)
        wait_until(lambda: only(live, "spin").state == "dead")
        spun = pids(out, "begun")
        assert len({*spun}) == 2
        assert [line for line in causes(live, "spin") if line[1] == "Timeout"] == [
            ("retrying", "Timeout"),
            ("dead", "Timeout"),
        ]
        wait_until(lambda: not any(process_lives(pid) for pid in spun))
        flush(live, "who", out, 2)
        wait_until(lambda: len({*pids(out, "begun", "who")} - {*spun}) == 2)
        go(out)
        assert worker.said("trouble") == []


@one_server
def test_what_a_killed_handler_had_started_ends_with_it(
    live: Accumulator, started: Callable[..., Any], out: Path
) -> None:
    with started():
        flush(live, "program", out)
        wait_until(lambda: only(live, "program").state == "dead")
        wait_until(lambda: not process_lives(pids(out, "begun")[0]))


@one_server
def test_what_a_handler_starts_has_nothing_to_read(live: Accumulator, started: Callable[..., Any], out: Path) -> None:
    with started():
        flush(live, "read", out)
        wait_until(lambda: only(live, "read").state == "confirmed")


@one_server
def test_a_module_of_handlers_that_ignores_signals(
    live: Accumulator, started: Callable[..., Any], out: Path, tmp_path: Path
) -> None:
    """As some frameworks do when they are imported: what a handler was at is given back all the same."""
    config = tmp_path / "config.yaml"
    config.write_text("handlers: [tests.deaf_handlers]\n")
    with started(ACCUMULATOR_CONFIG=str(config)):
        flush(live, "slow", out, seconds=60)
        wait_until(lambda: len(written(out)) == 1)
    assert causes(live, "slow")[-1] == ("retrying", "Stopped")


@one_server
def test_a_handler_that_blocks_every_thread(live: Accumulator, started: Callable[..., Any], out: Path) -> None:
    """Nothing of its process can settle it: the kernel ends it before its lease does."""
    with started():
        flush(live, "block", out)
        wait_until(lambda: len(pids(out, "begun")) == 1)
        [first] = pids(out, "begun")
        assert process_lives(first)
        wait_until(lambda: not process_lives(first))
        assert only(live, "block").state == "processing"
        assert let_pass(live) == 1
        wait_until(lambda: only(live, "block").state == "confirmed")
        assert causes(live, "block")[0] == ("retrying", "lease_ended")


@one_server
@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_lets_handlers_finish(
    live: Accumulator, started: Callable[..., Any], out: Path, how: signal.Signals
) -> None:
    with started() as worker:
        flush(live, "who", out)
        flush(live, "slow", out, seconds=60)
        wait_until(lambda: len(written(out)) == 2)
        worker.process.send_signal(how)
        worker.until("stopping")
        go(out)
        assert worker.process.wait(5) == 0
        assert worker.lines()[-1]["unfinished"] == ""
    assert only(live, "who").state == "confirmed"
    assert causes(live, "slow")[-1] == ("retrying", "Stopped")


@one_server
def test_another_tenant_begins_within_three_durations(
    live: Accumulator, started: Callable[..., Any], out: Path, tmp_path: Path
) -> None:
    """The limit of a tenant holds over all processes, so that the others need not wait for its hundreds."""
    config = tmp_path / "config.yaml"
    config.write_text("handlers: [tests.sample_handlers]\nmax_in_flight: 4\n")
    flush(live, "who", out, 300, seconds=0.05)
    with started("--processes", "4", ACCUMULATOR_CONFIG=str(config)):
        wait_until(lambda: len({*pids(out, "begun")}) == 4 and len(pids(out, "ended")) > 20)
        before = len(pids(out, "begun"))
        live.push(event("e1", "other:who:0", payload={"out": str(out), "seconds": 0.05}))
        live.flush("other:who:0")
        wait_until(lambda: any(line[1] == "other:who:0" for line in written(out)))
        order = [line[1] for line in written(out) if line[0].startswith("begun")]
        assert order.index("other:who:0") - before <= 3 * 4
        assert len(pids(out, "ended")) < 200  # the others still wait
        wait_until(lambda: len(pids(out, "ended")) == 301, timeout=60)


@one_server
def test_they_do_not_outlive_a_killed_worker(live: Accumulator, started: Callable[..., Any], out: Path) -> None:
    with started() as worker:
        flush(live, "who", out, 2)
        wait_until(lambda: len(pids(out, "begun")) == 2)
        worker.process.kill()
        wait_until(lambda: not any(process_lives(pid) for pid in pids(out, "begun")))
    assert causes(live, "who")[-1] == ("retrying", "Stopped")


def test_processes_need_the_role_and_the_settings() -> None:
    with pytest.raises(InvalidSettings, match="needs the role runner"):
        Worker(Settings(), roles=["closer"], processes=2)
    with (
        Accumulator("redis://127.0.0.1:1/0") as given,
        pytest.raises(InvalidSettings, match="connect as the settings say"),
    ):
        Worker(Settings(), processes=2, accumulator=given)
