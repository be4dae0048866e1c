"""A primary, a replica and a Sentinel that watches them: its URL is all that clients and workers know."""

from __future__ import annotations

import socket
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, TypeVar

import pytest
import redis

from accumulator import cli
from accumulator.client import Accumulator, AsyncAccumulator
from accumulator.embedded import EmbeddedServer
from accumulator.errors import AuthenticationFailed, InvalidSettings, ServerError, ServerUnavailable
from accumulator.rq_sink import rq_client
from accumulator.settings import Settings
from accumulator.windows import Outcome
from tests.conftest import KINDS, event, wait_until
from tests.processes import program, written

pytestmark = pytest.mark.timeout(120)

PASSWORD, SENTINEL_PASSWORD = "s3cr3t-server", "s3cr3t/sentinel+%"
T = TypeVar("T")
DEAD = "127.0.0.1:1"


class Watched:
    """The servers and their Sentinel, which looks for a failure only when it is told to be quick."""

    def __init__(self, stack: ExitStack, kind: str, folder: Path) -> None:
        own = {"masterauth": PASSWORD, "repl-diskless-sync-delay": "0", "repl-ping-replica-period": "1"}
        start = {"password": PASSWORD, "binary": KINDS[kind]}
        self.primary = stack.enter_context(EmbeddedServer(config=own, **start))  # type: ignore[arg-type]
        own["replicaof"] = ("127.0.0.1", str(self.primary.port))  # type: ignore[assignment]
        self.replica = stack.enter_context(EmbeddedServer(config=own, **start))  # type: ignore[arg-type]
        wait_until(lambda: self.ask(self.replica, "INFO", "replication")["master_link_status"] == "up")
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        setup = folder / "sentinel.conf"
        setup.write_text(
            f"bind 127.0.0.1\nport {self.port}\nrequirepass {SENTINEL_PASSWORD}\ndir {folder}\n"
            f"sentinel monitor mine 127.0.0.1 {self.primary.port} 1\nsentinel auth-pass mine {PASSWORD}\n"
            "sentinel down-after-milliseconds mine 60000\nsentinel failover-timeout mine 20000\n"
        )
        log = stack.enter_context((folder / "sentinel.log").open("wb"))
        process = stack.enter_context(
            subprocess.Popen([KINDS[kind].path, setup, "--sentinel"], stdout=log, stderr=log, cwd=folder)
        )
        stack.callback(process.kill)
        self.sentinel = stack.enter_context(
            redis.Redis(port=self.port, password=SENTINEL_PASSWORD, decode_responses=True)
        )
        wait_until(self._ready, what=f"the Sentinel knows both: {folder / 'sentinel.log'}")

    @property
    def url(self) -> str:
        own = "sentinel_password=s3cr3t/sentinel%2B%25"
        return f"redis+sentinel://:{PASSWORD}@{DEAD},127.0.0.1:{self.port}/mine/0?{own}"

    def ask(self, server: EmbeddedServer, *command: Any) -> Any:
        with redis.Redis(port=server.port, password=PASSWORD, decode_responses=True) as client:
            return client.execute_command(*command)

    def _ready(self) -> bool:
        try:
            (replica,) = self.sentinel.sentinel_slaves("mine")
        except (redis.exceptions.ConnectionError, ValueError):
            return False
        return bool(replica["flags"] == "slave" and replica["master-link-status"] == "ok")

    def fail_over(self) -> None:
        """The replica becomes the primary, and the primary its replica."""

        def begun() -> bool:
            try:
                return bool(self.sentinel.sentinel_failover("mine"))
            except redis.exceptions.ResponseError:  # NOGOODSLAVE, for a moment
                return False

        wait_until(begun, 20)
        self.until_over()

    def kill(self) -> None:
        """The primary is gone. What it told nobody is lost, so that the replica is waited for first."""
        assert self.ask(self.primary, "WAIT", 1, 10_000) == 1
        self.sentinel.sentinel_set("mine", "down-after-milliseconds", 300)
        self.primary.kill()

    def until_over(self) -> None:
        port = self.replica.port
        wait_until(lambda: self.sentinel.sentinel_get_master_addr_by_name("mine") == ("127.0.0.1", port), 30)
        self.primary, self.replica = self.replica, self.primary


@pytest.fixture
def watched(tmp_path: Path, server_kind: str) -> Iterator[Watched]:
    with ExitStack() as stack:
        yield Watched(stack, server_kind, tmp_path)


def until_answered(call: Callable[[], T]) -> T:
    """While the primary changes a call may fail; it is repeated until one does not."""
    answers: list[T] = []

    def answered() -> bool:
        with suppress(ServerError):
            answers.append(call())
        return bool(answers)

    wait_until(answered, 30)
    return answers[0]


@pytest.mark.parametrize("protocol", [2, 3])
def test_a_failover_is_followed_at_once(watched: Watched, namespace: str, protocol: int) -> None:
    """The old primary is not told for some seconds, and would take what comes."""
    with Accumulator(f"{watched.url}&protocol={protocol}", namespace=namespace) as accumulator:
        accumulator.load_policy("f", {"inactivity": "1h"})
        receipts = accumulator.push_many([event(f"e{i}", f"t:f:{i % 5}") for i in range(50)])
        assert {receipt.outcome for receipt in receipts} == {Outcome.ACCEPTED}
        assert watched.ask(watched.primary, "WAIT", 1, 10_000) == 1
        before = watched.primary
        watched.fail_over()
        assert watched.ask(before, "ROLE")[0] == "master", "it was told: this shows nothing"
        with Accumulator(watched.primary.url, namespace=namespace) as there:
            answered: list[str] = []

            def has_arrived() -> bool:
                sent = event(f"x{len(answered)}", "t:f:x")
                until_answered(lambda: accumulator.push(sent))
                answered.append(sent["event_id"])
                return answered[-1] in ids(there, "t:f:x")

            wait_until(has_arrived, 4)
            assert sorted(one for i in range(5) for one in ids(there, f"t:f:{i}")) == sorted(f"e{i}" for i in range(50))


def ids(accumulator: Accumulator, bucket: str) -> list[str]:
    return [one.event.event_id for one in accumulator.open_events(bucket)]


async def test_both_clients_survive_the_death_of_the_primary(watched: Watched, namespace: str) -> None:
    sent = event("e1", "t:f:1")
    asynchronous = AsyncAccumulator(watched.url, namespace=namespace)
    await asynchronous.load_policy("f", {"inactivity": "1h"})
    assert (await asynchronous.push(sent)).outcome == Outcome.ACCEPTED
    with Accumulator(watched.url, namespace=namespace) as accumulator:
        news = accumulator.store.subscription(accumulator.operations.channel)
        assert b"" in news.wait(5)
        watched.kill()
        watched.until_over()
        assert until_answered(lambda: accumulator.push(sent)).outcome == Outcome.DUPLICATE
        answers: list[Outcome] = []
        while not answers:
            with suppress(ServerError):
                answers.append((await asynchronous.push(sent)).outcome)
        assert answers == [Outcome.DUPLICATE]
        heard: list[bytes] = []

        def hear() -> list[bytes]:
            accumulator.push(event(f"x{len(heard)}", f"t:f:x{len(heard)}"))
            heard.extend(until_answered(lambda: news.wait(0.2)))
            return [message for message in heard if message]

        wait_until(hear, 30, "wake-ups come from the new primary")
        news.close()
    await asynchronous.close()


def test_a_worker_survives_the_death_of_the_primary(watched: Watched, namespace: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    with (
        program(
            ["-m", "accumulator", "worker", "--processes", "1"], watched.url, namespace, tmp_path / "log"
        ) as worker,
        Accumulator(watched.url, namespace=namespace) as accumulator,
    ):
        worker.until("started")
        accumulator.load_policy("log", {"inactivity": "300ms", "sink": "direct"})

        def handled(bucket: str) -> bool:
            return any(line[1] == bucket for line in written(out))

        accumulator.push(event("e1", "t:log:1", payload={"out": str(out)}))
        wait_until(lambda: handled("t:log:1"), 20)
        wait_until(lambda: accumulator.manifests("t:log:1")[0].state == "confirmed")
        watched.kill()
        watched.until_over()

        sent = event("e2", "t:log:2", payload={"out": str(out)})
        until_answered(lambda: accumulator.push(sent))
        wait_until(lambda: handled("t:log:2"), 30)
        worker.until("recovered")
        told = [line for line in worker.said("trouble") if line["logger"].endswith("closer")]
        assert len(told) == 1
        assert [m.event_ids for m in accumulator.manifests("t:log:1")] == [("e1",)]
        worker.process.terminate()
        assert worker.process.wait(10) == 0
        assert "s3cr3t" not in worker.log.read_text()


def test_the_command_line_and_rq(watched: Watched, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    settings = Settings(redis_url=watched.url)
    assert cli.cli_line(settings) == ["redis-cli", "-h", "127.0.0.1", "-p", str(watched.primary.port)]
    with rq_client(watched.url) as client:
        assert client.set("rq:x", "1", px=60_000)
        assert client.get("rq:x") == b"1"


def test_the_sink_rq(watched: Watched, namespace: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    arguments = ["-m", "accumulator", "worker", "--with-rq", "1"]
    with (
        program(arguments, watched.url, namespace, tmp_path / "log") as worker,
        Accumulator(watched.url, namespace=namespace) as accumulator,
    ):
        worker.until("started")
        accumulator.load_policy("log", {"inactivity": "200ms", "sink": "rq"})
        accumulator.push(event("e1", "t:log:1", payload={"out": str(out)}))
        wait_until(lambda: len(written(out)) == 1, 30)
        wait_until(lambda: accumulator.manifests("t:log:1")[0].state == "confirmed")
        worker.process.terminate()
        assert worker.process.wait(10) == 0
        assert worker.said("trouble") == []


def test_what_is_wrong_is_said_without_what_is_secret(watched: Watched) -> None:
    here = f"127.0.0.1:{watched.port}"
    own = "sentinel_password=s3cr3t/sentinel%2B%25"
    for url, kind, said in [
        (f"redis+sentinel://:{PASSWORD}@{DEAD},{here}/mine", AuthenticationFailed, "check sentinel_username and"),
        (f"redis+sentinel://:{PASSWORD}@{here}/other?{own}", InvalidSettings, "names a service that none of its"),
        (f"redis+sentinel://:wrong-{PASSWORD}@{here}/mine?{own}", AuthenticationFailed, "check user and password"),
        (f"redis+sentinel://:{PASSWORD}@{DEAD}/mine?{own}", ServerUnavailable, "no Sentinel can be reached"),
        (
            f"redis+sentinel://:{PASSWORD}@127.0.0.1:{watched.primary.port}/mine?sentinel_password={PASSWORD}",
            InvalidSettings,
            "names a server that is no Sentinel",
        ),
    ]:
        with Accumulator(url) as accumulator, pytest.raises(kind, match=said) as caught:
            accumulator.counters()
        assert "s3cr3t" not in str(caught.value) + repr(accumulator) + repr(accumulator.store)


def test_more_threads_than_connections_wait_their_turn(watched: Watched, namespace: str) -> None:
    with (
        Accumulator(f"{watched.url}&max_connections=2", namespace=namespace) as accumulator,
        ThreadPoolExecutor(16) as threads,
    ):
        accumulator.load_policy("f", {"inactivity": "1h"})
        receipts = threads.map(lambda i: accumulator.push(event(f"e{i}", f"t:f:{i}")), range(200))
        assert {receipt.outcome for receipt in receipts} == {Outcome.ACCEPTED}
