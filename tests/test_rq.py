"""The sink `rq`: real RQ workers, ours and those of the user."""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import redis
import rq
from rq.registry import FailedJobRegistry
from typer.testing import CliRunner

import accumulator.handlers
from accumulator import rq_sink
from accumulator.cli import app
from accumulator.client import Accumulator
from accumulator.closer import Closer
from accumulator.embedded import EmbeddedServer
from accumulator.handlers import Timeout
from accumulator.health import ALIVE, UNSETTLED, RqQueue, health_report, sign_of_life
from accumulator.manifest import Manifest
from accumulator.pulse import Pulse
from accumulator.rq_sink import DESCRIPTION, QUEUE, Dispatcher, rq_client
from accumulator.settings import Config, RqSink, Settings
from accumulator.testing import VirtualClock
from accumulator.worker import ROLES, Worker
from tests.conftest import MakeClient, event, process_lives, wait_until
from tests.processes import config, let_pass, program, written
from tests.test_worker import Ears, own, running, settled

pytestmark = pytest.mark.timeout(180)


@pytest.fixture(autouse=True)
def registry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is registered, and this process has done no job."""
    monkeypatch.setattr(accumulator.handlers, "_registry", {})
    monkeypatch.setattr(rq_sink, "_process", None)


@pytest.fixture
def queue(make_client: MakeClient) -> rq.Queue:
    """The queue as RQ sees it."""
    return rq.Queue(QUEUE, connection=make_client())


@contextmanager
def rq_worker(
    server: EmbeddedServer, namespace: str, log: Path, queue: str = QUEUE, url: str | None = None
) -> Iterator[None]:
    """The user's own `rq worker accumulator`, which knows the environment and nothing else."""
    arguments = ["-m", "rq.cli", "worker", queue, "--url", url or server.url]
    with program(arguments, server.url, namespace, log) as worker:
        wait_until(lambda: b"Listening on" in worker.log.read_bytes(), timeout=30)
        yield
        worker.process.terminate()
        worker.process.wait(20)


def flush(accumulator: Accumulator, flow: str, out: Path, buckets: int = 1, **payload: Any) -> list[str]:
    """Closes a window of one event in each of so many buckets."""
    keys = [f"t:{flow}:{i}" for i in range(buckets)]
    accumulator.push_many([event("e1", key, payload={"out": str(out), **payload}) for key in keys])
    accumulator.flush_where(flow=flow)
    return keys


def only(accumulator: Accumulator, key: str) -> Manifest:
    [manifest] = accumulator.manifests(key)
    return manifest


def test_a_job_carries_two_words(
    live: Accumulator, server: EmbeddedServer, namespace: str, queue: rq.Queue, tmp_path: Path
) -> None:
    accumulator.handlers.handler("log", timeout="90s")(print)
    live.load_policy("log", {"inactivity": "1h"})
    flush(live, "log", tmp_path / "out")
    with own(server.url, namespace) as one, running(Dispatcher(one, server.url)):
        wait_until(lambda: queue.count == 1)
    [job] = queue.jobs
    manifest = only(live, "t:log:0")
    assert job.id == f"{manifest.window_id}-1"
    assert job.func_name == "accumulator.rq_sink.run_job"
    assert (job.args, job.kwargs) == ((manifest.window_id, 1), {})
    assert job.description == DESCRIPTION
    assert (job.timeout, job.result_ttl, job.failure_ttl) == (95, 1, 86_400)
    assert "t:log" not in str(queue.connection.hgetall(f"rq:job:{job.id}"))
    assert manifest.state == "dispatched"


def test_the_users_own_rq_worker(
    live: Accumulator, server: EmbeddedServer, namespace: str, queue: rq.Queue, tmp_path: Path
) -> None:
    live.load_policy("log", {"inactivity": "300ms"})
    out = tmp_path / "out"
    keys = [f"t:log:{i}" for i in range(5)]
    with (
        own(server.url, namespace) as one,
        rq_worker(server, namespace, tmp_path / "log"),
        running(Closer(one), Dispatcher(one, server.url)),
    ):
        live.push_many([event("e1", key, payload={"out": str(out), "text": "客户 🙂"}) for key in keys])
        wait_until(lambda: not live.open_buckets() and settled(live), timeout=100)
    assert Counter(line[1] for line in written(out)) == dict.fromkeys(keys, 1)
    assert [only(live, key).state for key in keys] == ["confirmed"] * 5
    wait_until(lambda: queue.connection.keys("rq:job:*") == [])  # a job that ended well leaves nothing


@pytest.fixture
def with_rq(server: EmbeddedServer, namespace: str) -> Iterator[Callable[[], Worker]]:
    """Starts a worker with an RQ worker process of our own."""
    started: list[tuple[Worker, threading.Thread]] = []

    def start() -> Worker:
        settings = Settings(redis_url=server.url, namespace=namespace)
        worker = Worker(settings, Config.load(config()), roles=["closer", "dispatcher"], rq_workers=1)
        thread = threading.Thread(target=worker.run)
        thread.start()
        started.append((worker, thread))
        with redis.Redis.from_url(server.url, protocol=2) as control:
            wait_until(lambda: control.scard("rq:workers") == 1, timeout=30)
        return worker

    yield start
    for worker, thread in started:
        worker.stop()
        thread.join(15)
        assert not thread.is_alive()


def test_our_rq_workers(
    live: Accumulator, server: EmbeddedServer, with_rq: Callable[[], Worker], queue: rq.Queue, tmp_path: Path
) -> None:
    """A handler that succeeds, one that fails until it is dead, one that hangs, and a process that dies."""
    flows = ("log", "fail", "hang", "crash")
    for flow in flows:
        live.load_policy(flow, {"inactivity": "1h"})
    with_rq()
    outs = {flow: tmp_path / flow for flow in flows}
    for flow in flows:
        flush(live, flow, outs[flow], secret="sk-4242")
    wait_until(lambda: only(live, "t:fail:0").state == "dead", timeout=40)
    wait_until(lambda: only(live, "t:hang:0").state == "dead", timeout=40)
    wait_until(lambda: len(written(outs["crash"])) == 1 and only(live, "t:log:0").state == "confirmed", timeout=40)

    failed = only(live, "t:fail:0")
    assert [line[3] for line in written(outs["fail"])] == [1, 2, 3]
    assert [cause for _, _, _, cause in failed.timeline if cause == "ValueError"] == ["ValueError"] * 3
    assert [line[0] for line in written(outs["hang"])] == ["begun", "begun"]
    hung = only(live, "t:hang:0")
    assert [cause for _, _, _, cause in hung.timeline if cause == "Timeout"] == ["Timeout"] * 2

    # The process that killed itself: its lease ends, and it is tried again.
    assert only(live, "t:crash:0").state == "processing"
    assert let_pass(live) == 1
    wait_until(lambda: only(live, "t:crash:0").state == "confirmed", timeout=40)
    assert [line[3] for line in written(outs["crash"])] == [1, 2]

    # Of all these, RQ itself saw one fail: the one that it found dead.
    assert set(FailedJobRegistry(queue=queue).get_job_ids()) == {f"{only(live, 't:crash:0').window_id}-1"}


def test_a_queue_that_is_flushed(
    live: Accumulator, server: EmbeddedServer, namespace: str, queue: rq.Queue, tmp_path: Path
) -> None:
    """The jobs are gone: the manifests' watches bring them back."""
    live.load_policy("log", {"inactivity": "1h"})
    out = tmp_path / "out"
    with own(server.url, namespace) as one, running(Closer(one), Dispatcher(one, server.url)):
        keys = flush(live, "log", out, 8)
        wait_until(lambda: queue.count == 8)
        for name in queue.connection.keys("rq:*"):
            queue.connection.delete(name)
        assert let_pass(live) == 8
        wait_until(lambda: queue.count == 8)
        with rq_worker(server, namespace, tmp_path / "log"):
            wait_until(lambda: settled(live), timeout=100)
    assert Counter(line[1] for line in written(out)) == dict.fromkeys(keys, 1)
    assert {only(live, key).attempt for key in keys} == {1}


def test_a_job_that_is_there_twice(
    live: Accumulator, server: EmbeddedServer, namespace: str, queue: rq.Queue, tmp_path: Path
) -> None:
    """Its watch took it for lost: whichever comes first begins, the other does nothing."""
    live.load_policy("log", {"inactivity": "1h"})
    out = tmp_path / "out"
    with own(server.url, namespace) as one, running(Closer(one), Dispatcher(one, server.url)):
        flush(live, "log", out, 3)
        wait_until(lambda: queue.count == 3)
        let_pass(live)
        wait_until(lambda: queue.count == 6)
        with rq_worker(server, namespace, tmp_path / "log"):
            wait_until(lambda: settled(live) and queue.count == 0, timeout=100)
    assert len(written(out)) == 3
    assert FailedJobRegistry(queue=queue).count == 0


def test_no_more_than_a_backlog_waits_in_rq(
    live: Accumulator, server: EmbeddedServer, namespace: str, queue: rq.Queue, tmp_path: Path
) -> None:
    live.load_policy("log", {"inactivity": "1h"})
    flush(live, "log", tmp_path / "out", 30)
    with own(server.url, namespace) as one, running(Dispatcher(one, server.url, backlog=10)):
        wait_until(lambda: queue.count == 10)
        for _ in range(10):
            queue.connection.lpop(queue.key)
        wait_until(lambda: queue.count == 10)


def test_an_rq_server_that_is_away(live: Accumulator, server: EmbeddedServer, namespace: str, tmp_path: Path) -> None:
    """Nothing is lost between taking and enqueueing: what is held is enqueued when it is back."""
    other = EmbeddedServer(tmp_path / "rq")
    with other:
        live.load_policy("log", {"inactivity": "1h"})
        with own(server.url, namespace) as one:
            dispatcher = Dispatcher(one, other.url)
            dispatcher.log = Ears()  # type: ignore[assignment]
            with running(dispatcher):
                flush(live, "log", tmp_path / "out")
                with redis.Redis.from_url(other.url, protocol=2) as control:
                    wait_until(lambda: control.llen(f"rq:queue:{QUEUE}") == 1)
                other.kill()
                live.load_policy("more", {"inactivity": "1h"})
                flush(live, "more", tmp_path / "out", 5)
                wait_until(lambda: dispatcher.trouble._failures > 2)
                other.restart()
                with redis.Redis.from_url(other.url, protocol=2) as control:
                    wait_until(lambda: control.llen(f"rq:queue:{QUEUE}") == 6, timeout=20)


def test_rq_worker_processes_are_replaced_and_end_with_us(
    live: Accumulator, server: EmbeddedServer, namespace: str, with_rq: Callable[[], Worker], tmp_path: Path
) -> None:
    worker = with_rq()
    processes: Any = next(role for role in worker.roles if role.name == "rq")
    [first] = processes.pids
    os.kill(first, 9)
    wait_until(lambda: processes.pids and processes.pids[0] != first, timeout=30)
    [second] = processes.pids
    command = Path(f"/proc/{second}/cmdline").read_bytes()
    assert server.url.encode() not in command
    worker.stop()
    wait_until(lambda: not process_lives(second), timeout=15)


def test_rq_workers_do_not_outlive_a_killed_worker(
    live: Accumulator, server: EmbeddedServer, namespace: str, tmp_path: Path
) -> None:
    source = """\
import sys
from accumulator import logs
from accumulator.settings import Settings
from accumulator.worker import Worker
logs.configure()
Worker(Settings(), roles=["closer"], rq_workers=1).run()
"""
    with (
        program(["-c", source], server.url, namespace, tmp_path / "log") as worker,
        redis.Redis.from_url(server.url, protocol=2) as control,
    ):
        wait_until(lambda: control.scard("rq:workers") == 1, timeout=30)
        [key] = control.smembers("rq:workers")
        pid = int(control.hget(key, "pid") or 0)
        assert process_lives(pid)
        worker.process.kill()
        wait_until(lambda: not process_lives(pid), timeout=20)


def test_options_of_a_flow(
    live: Accumulator, server: EmbeddedServer, namespace: str, queue: rq.Queue, tmp_path: Path
) -> None:
    """A queue of its own, on RQ's own server; how long its result is kept; waiting there counts as no attempt."""
    live.load_policy("log", {"inactivity": "1h"})
    with EmbeddedServer(tmp_path / "rq") as other, redis.Redis.from_url(other.url, protocol=2) as control:
        slow = rq.Queue("slow", connection=control)
        sink = RqSink.model_validate({"queue": "slow", "result_ttl": "1h"})
        with (
            own(server.url, namespace) as one,
            running(Closer(one), Dispatcher(one, other.url, options=lambda _: sink)),
        ):
            flush(live, "log", tmp_path / "out")
            wait_until(lambda: slow.count == 1)
            let_pass(live)
            wait_until(lambda: slow.count == 2)
            waiting = only(live, "t:log:0")
            assert (waiting.state, waiting.attempt, waiting.failures) == ("dispatched", 1, 0)
            with rq_worker(server, namespace, tmp_path / "log", "slow", other.url):
                wait_until(lambda: settled(live) and slow.count == 0, timeout=100)
            [job] = control.scan_iter("rq:job:*")
            assert 3000 < control.ttl(job) <= 3600
        assert queue.count == 0
    assert only(live, "t:log:0").state == "confirmed"


def test_a_job_connects_once(
    live: Accumulator, server: EmbeddedServer, with_rq: Callable[[], Worker], tmp_path: Path
) -> None:
    """RQ's connection serves the attempt too, where it is one to our server."""
    live.load_policy("log", {"inactivity": "1h"})
    with_rq()
    client: Any = live.store.client

    def connections(jobs: int) -> int:
        before: int = client.info("stats")["total_connections_received"]
        flush(live, "log", tmp_path / "out", jobs)
        wait_until(lambda: settled(live), timeout=60)
        after: int = client.info("stats")["total_connections_received"]
        return after - before

    connections(5)
    assert 20 <= connections(25) < 25  # five of these buckets have had their event


def test_an_interrupted_call_leaves_no_answer_behind(live: Accumulator) -> None:
    client: Any = live.store.client

    def ask() -> None:
        connection = client.connection_pool.get_connection()
        try:
            connection.send_command("BLPOP", "nothing", "0.5")
            threading.Event().wait(60)
        finally:
            client.connection_pool.release(connection)

    with pytest.raises(Timeout), rq_sink._alarm(live, 0.2):
        ask()
    assert client.echo("mine") == b"mine"


def test_queues_of_rq(virtual: Accumulator, clock: VirtualClock) -> None:
    sign = sign_of_life("w1", ROLES, ["default"])

    def told(**queues: RqQueue) -> None:
        virtual.store.perform(virtual.operations.tell_queues(queues))

    virtual.load_policy("q", {"inactivity": "1h"})
    virtual.store.perform(virtual.operations.beat(sign))
    away = "no dispatcher reaches RQ's server: nothing gets to the sink rq"
    assert virtual.health().problems == (away,)
    told(a=RqQueue(1, 5, UNSETTLED), b=RqQueue(2))
    health = virtual.health()
    assert (health.problems, health.rq) == ((), {"a": RqQueue(1, 5, UNSETTLED), "b": RqQueue(2)})
    assert health_report(health)[5:7] == ["queue a: 5 jobs, 1 RQ worker", "queue b: 0 jobs, 2 RQ workers"]
    told(a=RqQueue(1, 5, UNSETTLED + 1), b=RqQueue(0), c=RqQueue(0, 1, 2_000))
    assert virtual.health().problems == (
        "RQ workers of the queue a are alive, but behind: 5 jobs in it, the oldest for 10m",
        "no RQ worker is alive for the queue b: it is empty",
        "no RQ worker is alive for the queue c: 1 job in it, the oldest for 2s",
    )
    clock.advance(ALIVE + 1)
    virtual.store.perform(virtual.operations.beat(sign))
    assert virtual.health().problems == (away,)
    virtual.load_policy("q", {"inactivity": "1h", "sink": "direct"})  # now nobody needs RQ
    assert virtual.health().ok


def test_what_a_dispatcher_said_ends_with_it(virtual: Accumulator) -> None:
    virtual.load_policy("q", {"inactivity": "1h"})
    one, two = (sign_of_life(name, ROLES, ["default"]) for name in ("w1", "w2"))
    for sign in one, two:
        virtual.store.perform(virtual.operations.beat(sign))
    virtual.store.perform(virtual.operations.tell_queues({"a": RqQueue(1)}))
    virtual.store.perform(virtual.operations.rest(one))
    assert (virtual.health().problems, virtual.health().rq) == ((), {"a": RqQueue(1)})
    virtual.store.perform(virtual.operations.rest(two))
    assert virtual.health().rq is None
    assert virtual.health().problems == (
        "no worker is alive: those of the last hour, if any, were stopped and signed off",
    )


def test_health_tells_of_queues_and_their_workers(
    live: Accumulator, server: EmbeddedServer, namespace: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rq_sink, "BEAT", 0.1)
    live.load_policy("log", {"inactivity": "1h"})
    live.load_policy("fail", {"inactivity": "1h"})
    options = {"log": RqSink(), "fail": RqSink(queue="other")}
    behind = "RQ workers of the queue accumulator are alive, but behind"

    def problems() -> list[str]:
        return [text for text in live.health().problems if "RQ" in text]

    def until(*texts: str) -> None:
        wait_until(lambda: [text.partition(":")[0] for text in problems()] == list(texts), timeout=30)

    with EmbeddedServer(tmp_path / "rq") as other, own(server.url, namespace) as one:
        dispatcher = Dispatcher(one, other.url, options=options.__getitem__)
        with running(Pulse(one, ["dispatcher"]), dispatcher):
            until("no RQ worker is alive for the queue accumulator", "no RQ worker is alive for the queue other")
            flush(live, "log", tmp_path / "out", 3)
            wait_until(lambda: "3 jobs in it" in problems()[0])
            shown = CliRunner().invoke(
                app, ["health"], env={"ACCUMULATOR_REDIS_URL": server.url, "ACCUMULATOR_NAMESPACE": namespace}
            )
            assert shown.exit_code == 1
            assert "no RQ worker is alive for the queue accumulator: 3 jobs in it" in shown.output
            with rq_worker(server, namespace, tmp_path / "log", "other", other.url):
                until("no RQ worker is alive for the queue accumulator")
                with redis.Redis.from_url(other.url, protocol=2) as control, rq_client(other.url) as client:
                    idle: Any = rq.Worker([QUEUE], connection=client)
                    idle.register_birth()
                    until()
                    [first] = control.lrange(f"rq:queue:{QUEUE}", 0, 0)
                    control.hset(f"rq:job:{first.decode()}", "enqueued_at", "2026-01-01T00:00:00.000000Z")
                    until(behind)
            until(behind, "no RQ worker is alive for the queue other")


def test_a_client_that_decodes_is_no_matter(server: EmbeddedServer) -> None:
    with rq_sink.rq_client(f"{server.url}?decode_responses=true&protocol=3") as client:
        client.set("rq:x", "é")
        assert client.get("rq:x") == "é".encode()
        client.delete("rq:x")
