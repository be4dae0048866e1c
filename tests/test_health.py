"""Health: what has to be mended and what should be known; signs of life; the janitor."""

from __future__ import annotations

import configparser
import json
import re
import shlex
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import redis
from typer.testing import CliRunner

import accumulator.handlers
from accumulator import keys, pulse
from accumulator.cli import app
from accumulator.client import Accumulator
from accumulator.context import Context
from accumulator.embedded import EmbeddedServer
from accumulator.errors import HandlerMissing, ServerRefused, ServerUnavailable
from accumulator.handlers import PermanentError, RetryLater, Stages, handler, step_handler
from accumulator.health import ALIVE, FORGOTTEN, PATIENCE, UNSETTLED, Health, Queue, health_report, sign_of_life
from accumulator.janitor import Janitor
from accumulator.manifest import Manifest
from accumulator.pulse import Pulse
from accumulator.runner import run_attempt
from accumulator.settings import Config, Settings
from accumulator.store import Call, Operation, together
from accumulator.testing import VirtualClock
from accumulator.worker import Worker
from tests.conftest import MakeClient, StartServer, event, wait_until
from tests.processes import program
from tests.test_worker import at_work, own, running

ALL = ("closer", "dispatcher", "janitor", "runner", "webhook")
VOLATILE = "the server keeps nothing on disk: a restart loses everything (set appendonly yes)"
"""What every server of these tests is warned of."""


@pytest.fixture(autouse=True)
def registry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is registered."""
    for name in ("_registry", "_steps", "_names"):
        monkeypatch.setattr(accumulator.handlers, name, {})


def alive(
    target: Accumulator,
    roles: tuple[str, ...] = ALL,
    handlers: tuple[str, ...] = ("default",),
    webhooks: tuple[str, ...] = (),
    worker_id: str = "w1",
    ladders: tuple[str, ...] = (),
) -> None:
    """A worker gives a sign of life."""
    target.store.perform(target.operations.beat(sign_of_life(worker_id, roles, handlers, webhooks, ladders)))


def policy(target: Accumulator, flow: str = "f", **more: Any) -> None:
    target.load_policy(flow, {"inactivity": "10s", "sink": "direct"} | more)


def close(target: Accumulator, clock: VirtualClock, key: str = "t:f:1", event_id: str = "e1") -> Manifest:
    target.push(event(event_id, key, clock))
    target.flush(key)
    return target.manifests(key)[-1]


def attempt(target: Accumulator) -> None:
    """Takes all that is ready and runs it."""
    operations = target.operations
    for partition in range(operations.partitions):
        for taken in target.store.perform(operations.take(partition, "direct", 100, 30_000)):
            run_attempt(target, taken.window_id, taken.attempt)


# -- workers


def test_nobody_was_ever_there(virtual: Accumulator) -> None:
    health = virtual.health()
    assert health.problems == ("no worker is alive: those of the last hour, if any, were stopped and signed off",)
    assert health.warnings == (VOLATILE,)
    assert not health.ok


def test_all_is_well(virtual: Accumulator, clock: VirtualClock) -> None:
    policy(virtual)
    alive(virtual)
    health = virtual.health()
    assert health.ok
    assert health.warnings == (VOLATILE,)
    [worker] = health.workers
    assert (worker.worker_id, worker.age, worker.alive, worker.roles) == ("w1", 0, True, ALL)


def test_a_worker_that_fell_silent(virtual: Accumulator, clock: VirtualClock) -> None:
    alive(virtual)
    clock.advance(ALIVE)
    assert virtual.health().ok
    clock.advance(ALIVE * 4)
    assert virtual.health().problems == ("no worker is alive: the last was seen 1m40s ago",)


def test_it_is_forgotten_after_an_hour(virtual: Accumulator, clock: VirtualClock) -> None:
    alive(virtual, worker_id="old")
    clock.advance(FORGOTTEN)
    alive(virtual, worker_id="new")
    assert [worker.worker_id for worker in virtual.health().workers] == ["new"]
    client: Any = virtual.store.client
    assert client.zcard(keys.workers(virtual.operations.namespace)) == 2  # the clock's highest instant beside it


def test_workers_show_that_they_live_on_a_server_that_is_full(
    start_server: StartServer, server_kind: str, namespace: str
) -> None:
    server = start_server(config={"maxmemory-policy": "noeviction"})
    with redis.Redis.from_url(server.url) as control, Accumulator(server.url, namespace=namespace) as target:
        policy(target)
        control.config_set("maxmemory", "1mb")
        with pytest.raises(ServerRefused, match="OOM"):
            target.push(event("e1"))
        alive(target)
        health = target.health()
        assert [(worker.worker_id, worker.alive) for worker in health.workers] == [("w1", True)]
        assert not any("worker" in problem for problem in health.problems)
        control.config_set("maxmemory", "0")


LADDER = {"steps": [{"name": "s", "offset": "1d"}]}
NO_STEPS = "no worker that is alive has a step handler for ladder "


def test_ladders_whose_steps_nobody_runs(virtual: Accumulator) -> None:
    policy(virtual, "q", sink="rq")
    virtual.store.perform(virtual.operations.tell_queues({}))
    for name in ("a", "b", "c"):
        virtual.load_ladder(name, LADDER)
    alive(virtual)
    assert virtual.health().problems == (f"{NO_STEPS}a, b, c",)
    alive(virtual, ladders=("a",))
    alive(virtual, ("closer", "webhook"), ladders=("b",), worker_id="w2")  # runs no step
    assert virtual.health().problems == (f"{NO_STEPS}b, c",)
    alive(virtual, ("dispatcher",), ladders=("b", "c"), worker_id="w3")
    assert virtual.health().ok


def test_a_ladder_that_runs_where_no_handler_is_needed(virtual: Accumulator, clock: VirtualClock) -> None:
    policy(virtual, "hook", sink="webhook")
    virtual.load_ladder("a", LADDER)
    alive(virtual, webhooks=("default",))
    assert virtual.health().ok
    policy(virtual)
    assert virtual.health().problems == (f"{NO_STEPS}a",)
    virtual.start_ladder("a", "t:hook:1", clock.instant)
    assert virtual.health().ok
    virtual.start_ladder("a", "t:f:1", clock.instant)
    assert virtual.health().problems == (f"{NO_STEPS}a",)


def test_roles_that_nobody_runs(virtual: Accumulator) -> None:
    policy(virtual, "d")
    policy(virtual, "q", sink="rq")
    policy(virtual, "w", sink="webhook")
    policy(virtual, "n", sink="none")
    alive(virtual, ("runner",))
    health = virtual.health()
    assert health.problems == (
        "no closer is alive: nothing closes on time",
        "no dispatcher is alive: nobody takes what goes to the sink rq (flow q)",
        "no webhook is alive: nobody takes what goes to the sink webhook (flow w)",
    )
    assert health.warnings == (VOLATILE, "no janitor is alive: payloads that nobody was handed stay")


def test_flows_that_nobody_can_serve(virtual: Accumulator) -> None:
    for flow in ("a", "b", "c", "default"):
        policy(virtual, flow)
    policy(virtual, "q", sink="rq")
    policy(virtual, "w", sink="webhook")
    alive(virtual, ("closer", "janitor", "runner"), ("a",))
    alive(virtual, ("webhook",), ("b", "w"), ("elsewhere",), worker_id="w2")
    alive(virtual, ("rq",), ("q",), worker_id="w3")
    alive(virtual, ("dispatcher",), (), worker_id="w4")
    virtual.store.perform(virtual.operations.tell_queues({}))
    health = virtual.health()
    assert health.problems == (
        "no worker that is alive has a handler for flow b, c (sink direct)",
        "no worker that is alive has an endpoint for flow w (sink webhook)",
    )
    assert health.warnings[1:] == (
        "no worker that is alive has a handler for flows without a policy of their own (sink direct)",
    )
    alive(virtual, ("runner", "webhook"), ("default",), ("default",), worker_id="w5")
    assert virtual.health().ok


def test_many_flows_are_named_shortly(virtual: Accumulator) -> None:
    for i in range(8):
        policy(virtual, f"f{i}")
    alive(virtual, handlers=())
    assert virtual.health().problems == (
        "no worker that is alive has a handler for flow f0, f1, f2, f3, f4 and 3 more (sink direct)",
    )


def test_signs_of_another_release(virtual: Accumulator, clock: VirtualClock) -> None:
    alive(virtual)
    client: Any = virtual.store.client
    name = keys.workers(virtual.operations.namespace)
    for member in ("", "x", "[1]", "{}", '{"id": 1, "roles": 5, "handlers": [], "webhooks": []}', b"\xff"):
        client.zadd(name, {member: clock.now})
    health = virtual.health()
    assert (health.ok, len(health.workers)) == (True, 1)


# -- what is late


def test_windows_are_overdue(virtual: Accumulator, clock: VirtualClock) -> None:
    policy(virtual)
    for i in range(3):
        virtual.push(event("e1", f"t:f:{i}", clock))
    clock.advance("15s", worker=False)
    alive(virtual, tuple(role for role in ALL if role != "closer"))
    health = virtual.health()
    assert health.problems == (
        "no closer is alive: nothing closes on time",
        "3 windows are overdue, the oldest for 5s: no closer is alive",
    )
    assert (health.overdue, health.overdue_windows, health.overdue_ms) == (3, 3, 5_000)
    alive(virtual)
    assert virtual.health().problems == ("3 windows are overdue, the oldest for 5s: a closer is alive, but behind",)
    clock.advance()
    assert virtual.health().ok


def test_leases_are_overdue(virtual: Accumulator, clock: VirtualClock) -> None:
    policy(virtual)
    close(virtual, clock)
    for partition in range(4):
        virtual.store.perform(virtual.operations.take(partition, "direct", 1, 1_000))
    alive(virtual)
    clock.advance("6s", worker=False)
    [problem] = virtual.health().problems
    assert problem == "1 other timer is overdue, the oldest for 5s: a closer is alive, but behind"


def test_the_outbox_ages(virtual: Accumulator, clock: VirtualClock) -> None:
    policy(virtual)
    for i in range(3):
        close(virtual, clock, f"t:f:{i}")
    clock.advance(UNSETTLED - 1)
    alive(virtual)
    health = virtual.health()
    assert health.ok
    assert (health.unsettled, health.unsettled_ms, health.ready["direct"]) == (3, UNSETTLED - 1, 3)
    clock.advance(5_001)
    assert virtual.health().problems == ("the outbox ages: 3 manifests not settled within 10m, the oldest for 10m5s",)
    assert virtual.health().stuck == Queue(3, 605_000)


def test_what_is_tried_again_and_again_ages_too(virtual: Accumulator, clock: VirtualClock) -> None:
    @handler("f", max_attempts=100)
    def fail(_: Context) -> None:
        raise RetryLater("5m")

    policy(virtual)
    close(virtual, clock)
    for _ in range(3):
        attempt(virtual)
        clock.advance("5m")
    alive(virtual)
    assert virtual.health().stuck.count == 1


class Proposes(Stages):
    def propose(self, ctx: Context) -> int:
        return ctx.manifest.window_version

    def approve(self, _: Context) -> bool:
        return True


def test_what_waits_for_a_person_does_not_age_the_outbox(virtual: Accumulator, clock: VirtualClock) -> None:
    """Nor what waits behind it in its bucket, nor what gave way to a window that is still open."""
    handler("f", approval_limit="2h")(Proposes)

    @handler("g")
    def give_way(ctx: Context) -> None:
        ctx.superseded()

    policy(virtual)
    policy(virtual, "g", inactivity="1h")
    close(virtual, clock)
    attempt(virtual)
    close(virtual, clock, event_id="e2")
    close(virtual, clock, "t:g:1")
    virtual.push(event("e2", "t:g:1", clock))
    attempt(virtual)
    clock.advance(UNSETTLED + 60_000)
    alive(virtual)
    health = virtual.health()
    assert health.ok, health.problems
    assert health.unsettled == 3
    assert health.people == {"awaiting_approval": Queue(1, 660_000)}
    assert "1 manifest awaiting_approval, the oldest for 11m" in health.warnings


def test_what_ladders_emit_ages_too(virtual: Accumulator, clock: VirtualClock) -> None:
    policy(virtual)
    steps = [{"name": name, "offset": "1m"} for name in ("first", "second")]
    virtual.load_ladder("remind", {"steps": steps})
    virtual.start_ladder("remind", "t:f:1", clock.instant)
    clock.advance(60_000 + UNSETTLED)
    alive(virtual)
    assert virtual.health().stuck == Queue(2, UNSETTLED)


# -- what waits for people


def test_the_dead_are_told_of_with_their_age(virtual: Accumulator, clock: VirtualClock) -> None:
    @handler("f")
    def refuse(_: Context) -> None:
        raise PermanentError

    policy(virtual)
    for i in range(2):
        close(virtual, clock, f"t:f:{i}")
        attempt(virtual)
        clock.advance("1h")
    alive(virtual)
    health = virtual.health()
    assert health.ok
    assert health.warnings[1:] == ("2 manifests dead, the oldest for 2h",)
    clock.advance(PATIENCE)
    alive(virtual)
    assert virtual.health().problems == ("2 manifests dead, the oldest for 1d2h",)


def test_what_is_to_be_reconciled(virtual: Accumulator, clock: VirtualClock) -> None:
    policy(virtual, kinds=["known"])
    virtual.push(event("e1", "t:f:1", clock, kind="unheard-of"))
    clock.advance("5m")
    virtual.push(event("e2", "t:f:2", clock, kind="unheard-of"))
    alive(virtual)
    health = virtual.health()
    assert health.reconcile == Queue(2, 300_000)
    assert health.warnings[1:] == ("2 events to be reconciled, the oldest for 5m",)


def test_ceilings(virtual: Accumulator, clock: VirtualClock) -> None:
    policy(virtual)
    alive(virtual)
    virtual.store.perform(virtual.operations.set_ceilings(5, 10))
    for i in range(4):
        close(virtual, clock, f"t:f:{i}")
    health = virtual.health()
    assert (health.problems, health.warnings[1:]) == ((), ("max_unsettled is near: 4 of 5",))
    close(virtual, clock, "t:f:5")
    assert virtual.health().problems == ("max_unsettled is reached (5 of 5): new events are refused as overloaded",)


def test_ceilings_of_a_workers_file(live: Accumulator, server: EmbeddedServer, namespace: str) -> None:
    live.store.perform(live.operations.set_ceilings(7, 8))
    with at_work(
        Worker(Settings(redis_url=server.url, namespace=namespace), Config(max_reconcile=9), roles=["closer"])
    ):
        wait_until(lambda: seen(live))
    with own(server.url, namespace) as target:
        target.store.perform(target.operations.connect())
        assert target.operations.ceilings == {"max_unsettled": 7, "max_reconcile": 9}


# -- the server


def test_a_clock_that_went_back(make_client: MakeClient, namespace: str, clock: VirtualClock) -> None:
    now = clock.now
    target = Accumulator(make_client(), namespace=namespace, partitions=4, clock=lambda: now)
    policy(target)
    alive(target)
    assert target.health().ok
    now -= 185_000
    alive(target)
    wanted = ("the server's clock went back by 3m5s: what falls due is done that much later",)
    assert target.health().problems == wanted
    client: Any = target.store.client
    client.delete(keys.workers(namespace))  # nobody noted it: what it opened tells
    now += 185_000
    target.push(event("e1", "t:f:1", clock))
    now -= 185_000
    alive(target)
    assert target.health().problems == wanted


def test_the_servers_own_clock(live: Accumulator) -> None:
    alive(live)
    policy(live)
    live.push(event("e1", "t:f:1"))
    assert live.health().problems == ()
    client: Any = live.store.client
    seconds, _ = client.time()
    client.zadd(keys.workers(live.operations.namespace), {"clock": (seconds + 3600) * 1000})
    [problem] = live.health().problems
    assert problem.startswith("the server's clock went back by ")
    alive(live)  # what was once seen is not forgotten by a sign of life
    assert live.health().problems


@pytest.mark.parametrize(
    ("options", "problem", "warning"),
    [
        ({"config": {"maxmemory-policy": "allkeys-lru"}, "appendonly": True}, "allkeys-lru: set noeviction", None),
        ({"config": {"save": "60 1"}}, None, "snapshots only"),
        ({"appendonly": True}, None, None),
    ],
)
def test_how_the_server_is_set_up(
    server_kind: str,
    start_server: StartServer,
    namespace: str,
    options: dict[str, Any],
    problem: str | None,
    warning: str | None,
) -> None:
    server = start_server(**options)
    with own(server.url, namespace) as target:
        alive(target)
        health = target.health()
    for wanted, found in ((problem, health.problems), (warning, health.warnings)):
        assert len(found) == (wanted is not None)
        assert wanted is None or wanted in found[0]


def test_scripts_that_can_not_run(server_kind: str, start_server: StartServer, namespace: str) -> None:
    server = start_server()
    with own(server.url, namespace) as target, redis.Redis.from_url(server.url, protocol=2) as control:
        alive(target)
        control.acl_setuser("default", enabled=True, nopass=True, commands=["-eval", "-evalsha"])
        [problem] = target.health().problems
        control.acl_setuser("default", enabled=True, nopass=True, commands=["+eval", "+evalsha"])
    assert problem.startswith("scripts can't run: ")
    assert "evalsha" in problem


def test_a_full_server(server_kind: str, start_server: StartServer, namespace: str) -> None:
    server = start_server()
    with own(server.url, namespace) as target, redis.Redis.from_url(server.url, protocol=2) as control:
        alive(target)
        control.config_set("maxmemory", "1")
        [problem] = target.health().problems
        control.config_set("maxmemory", "0")
    assert problem == "scripts can't run: OOM: the server is over its maxmemory"


def test_a_replica(server_kind: str, start_server: StartServer, namespace: str) -> None:
    server = start_server()
    with own(server.url, namespace) as target, redis.Redis.from_url(server.url, protocol=2) as control:
        alive(target)
        control.execute_command("REPLICAOF", "127.0.0.1", "1")
        problems = target.health().problems
        control.execute_command("REPLICAOF", "NO", "ONE")
    assert problems[0] == "the server is a replica: nothing can be accepted or closed there"


def test_no_server(start_server: StartServer, namespace: str) -> None:
    server = start_server()
    with own(server.url, namespace) as target:
        server.kill()
        with pytest.raises(ServerUnavailable):
            target.health()


# -- told to people and programs


def test_the_report(virtual: Accumulator, clock: VirtualClock) -> None:
    policy(virtual)
    virtual.push(event("e1", "t:f:0", clock))
    close(virtual, clock)
    clock.advance("20s", worker=False)
    assert health_report(virtual.health()) == [
        "problem: no worker is alive: those of the last hour, if any, were stopped and signed off",
        "problem: 1 window is overdue, the oldest for 10s: no closer is alive",
        f"warning: {VOLATILE}",
        "workers: 0 alive",
        "overdue: 1, the oldest for 10s",
        "unsettled: 1, the oldest for 20s",
        "ready: 1 for direct",
        "reconciliation: none",
        "not healthy",
    ]


def test_the_report_of_a_healthy_one(virtual: Accumulator) -> None:
    alive(virtual)
    assert health_report(virtual.health()) == [
        f"warning: {VOLATILE}",
        "workers: 1 alive (closer, dispatcher, janitor, runner, webhook)",
        "overdue: none",
        "unsettled: none",
        "ready: nothing",
        "reconciliation: none",
        "healthy",
    ]
    told = json.loads(json.dumps(asdict(virtual.health())))
    assert (told["problems"], told["reconcile"]) == ([], {"count": 0, "oldest": 0})


def test_ages_as_people_read_them() -> None:
    ages = [0, 59_999, 60_000, 3_600_000, 3_660_000, 90_000_000, 86_400_000 * 3]
    shown = [health_report(Health(unsettled=1, unsettled_ms=age))[2].rpartition(" ")[2] for age in ages]
    assert shown == ["0s", "59s", "1m", "1h", "1h1m", "1d1h", "3d"]


# -- signs of life of real workers


def seen(target: Accumulator) -> list[tuple[str, ...]]:
    return [worker.roles for worker in target.health().workers]


def test_a_worker_gives_signs_of_life(
    live: Accumulator, server: EmbeddedServer, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pulse, "BEAT", 0.01)
    monkeypatch.setenv("HOOK_SECRET", "0123456789abcdef")
    handler("f")(lambda _: None)
    step_handler("l")(lambda _: None)
    config = Config(
        policies={"f": {"inactivity": "1h", "sink": "direct"}, "w": {"inactivity": "1h", "sink": "webhook"}},
        ladders={"l": LADDER},
        sinks={"w": {"url": "https://h.example/", "secret_env": "HOOK_SECRET"}},
    )
    with at_work(Worker(Settings(redis_url=server.url, namespace=namespace), config)):
        wait_until(lambda: seen(live))
        wait_until(lambda: live.health().ok)
        [worker] = live.health().workers
        assert (worker.roles, worker.handlers, worker.webhooks, worker.ladders) == (ALL, ("f",), ("w",), ("l",))
    assert seen(live) == []


def test_the_pulse_is_quiet_while_the_server_is_away(
    start_server: StartServer, namespace: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pulse, "BEAT", 0.01)
    server = start_server()
    with own(server.url, namespace) as one, own(server.url, namespace) as two, running(Pulse(one, ["closer"])):
        wait_until(lambda: seen(two))
        server.kill()
        server.restart()
        wait_until(lambda: seen(two))
    assert "trouble" not in caplog.text


def test_rq_workers_give_signs_of_life(
    live: Accumulator, server: EmbeddedServer, namespace: str, tmp_path: Any
) -> None:
    with program(["-m", "workers.rq_worker"], server.url, namespace, tmp_path / "log") as worker:
        wait_until(lambda: seen(live) == [("rq",)], timeout=30)
        assert "log" in live.health().workers[0].handlers
        worker.process.terminate()
        worker.process.wait(10)
    assert seen(live) == []


# -- the janitor


@pytest.fixture
def janitor(virtual: Accumulator, monkeypatch: pytest.MonkeyPatch) -> Janitor:
    monkeypatch.setattr(Janitor, "PAUSE", 0.0)
    return Janitor(virtual)


def unrecorded(target: Accumulator) -> list[str]:
    return target.store.perform(target.operations.unrecorded())


def test_what_nobody_was_handed_is_recorded(
    make_client: MakeClient, namespace: str, clock: VirtualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Janitor, "PAUSE", 0.0)
    target = clock.attach(Accumulator(make_client(), namespace=namespace, partitions=4, clock=clock))
    policy(target, sink="none")
    manifests = [close(target, clock, f"t:f:{i}") for i in range(5)]
    target.push(event("e1", "t:f:empty", clock))
    target.retract("t:f:empty", "e1")
    manifests.append(close_open(target, "t:f:empty"))
    assert len(unrecorded(target)) == 6
    Janitor(target).step()
    assert unrecorded(target) == []
    clock.advance("3d")
    for before in manifests:
        after = target.manifest(before.window_id)
        assert after is not None
        assert (after.events, after.record, after.digest) == ((), before.record, before.digest)


def close_open(target: Accumulator, key: str) -> Manifest:
    target.flush(key)
    return target.manifests(key)[-1]


def test_one_that_can_not_be_read_holds_up_nothing(
    virtual: Accumulator, clock: VirtualClock, janitor: Janitor, caplog: pytest.LogCaptureFixture
) -> None:
    policy(virtual, sink="none")
    odd, _, good = (close(virtual, clock, f"t:f:{i}") for i in range(3))
    client: Any = virtual.store.client
    name = keys.manifest(virtual.operations.prefix_of("t:f:0"), odd.window_id)
    version = client.hget(name, "version")
    client.hset(name, "version", "odd")
    for _ in range(3):
        janitor.step()
    assert unrecorded(virtual) == [odd.window_id]
    assert caplog.text.count("manifests_unreadable") == 1
    assert client.hexists(keys.manifest(virtual.operations.prefix_of("t:f:2"), good.window_id), "digest")
    client.hset(name, "version", version)
    janitor.step()
    assert unrecorded(virtual) == []


def test_manifests_are_recorded_side_by_side(
    virtual: Accumulator, clock: VirtualClock, janitor: Janitor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hundreds of thousands may close in a day: a batch of them costs as many waits for the server as one."""
    policy(virtual, sink="none")
    for i in range(janitor.BATCH):
        close(virtual, clock, f"t:f:{i}")
    send = virtual.store._send
    rounds: list[int] = []

    def counted(commands: Any) -> Any:
        rounds.append(len(commands))
        return send(commands)

    monkeypatch.setattr(virtual.store, "_send", counted)
    janitor.step()
    assert unrecorded(virtual) == []
    assert len(rounds) <= 6
    assert max(rounds) == 2 * janitor.BATCH


def test_operations_of_different_lengths_side_by_side(virtual: Accumulator) -> None:
    def echo(*words: str, fails: bool = False) -> Operation[list[str]]:
        heard = []
        for word in words:
            replies = yield [Call(("ECHO", word)), Call(("ECHO", word.upper()))]
            heard += [reply.decode() for reply in replies]
        if fails:
            raise HandlerMissing("f")
        return heard

    several = [echo("a", "b", "c"), echo(), echo("d", fails=True), echo("e")]
    first, none, failed, last = virtual.store.perform(together(several))
    assert (first, none, last) == (["a", "A", "b", "B", "c", "C"], [], ["e", "E"])
    assert isinstance(failed, HandlerMissing)
    assert virtual.store.perform(together([])) == []


def test_the_janitor_of_a_worker(live: Accumulator, server: EmbeddedServer, namespace: str) -> None:
    policy(live, sink="none")
    live.push(event("e1", "t:f:1"))
    live.flush("t:f:1")
    with at_work(Worker(Settings(redis_url=server.url, namespace=namespace), roles=["janitor"])):
        wait_until(lambda: unrecorded(live) == [])


# -- units and image


CONFIG = Path(__file__).parent.parent / "config"


def commands() -> dict[str, list[str]]:
    """Where it stands → the arguments given to `accumulator` there."""
    found = {}
    for unit in sorted((CONFIG / "systemd").glob("*.service")):
        parsed = configparser.RawConfigParser(strict=False)
        parsed.optionxform = str  # type: ignore[assignment, method-assign]
        parsed.read(unit, encoding="utf-8")
        found[unit.name] = shlex.split(parsed["Service"]["ExecStart"])[1:]
    text = (CONFIG / "Containerfile").read_text(encoding="utf-8")
    [usual] = re.findall(r"^CMD (.+)$", text, re.MULTILINE)
    found["image"] = json.loads(usual)
    for i, told in enumerate(
        re.findall(r"^#   podman run .*? accumulator((?: \S+)*?)(?: {2,}.*)?$", text, re.MULTILINE)
    ):
        found[f"image, example {i}"] = told.split()
    return found


@pytest.mark.parametrize("where", commands())
def test_units_and_image_say_what_there_is(
    where: str, redis_url: str, namespace: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[dict[str, Any]] = []

    class Made(Worker):
        def __init__(self, settings: Settings, config: Config | None, **options: Any) -> None:
            super().__init__(settings, config, **options)
            made.append(options)

        def run(self) -> int:
            self.accumulator.close()
            return 0

    monkeypatch.setattr("accumulator.worker.Worker", Made)
    monkeypatch.setattr("accumulator.logs.configure", lambda *_: None)
    monkeypatch.setenv("ACCUMULATOR_REDIS_URL", redis_url)
    monkeypatch.setenv("ACCUMULATOR_NAMESPACE", namespace)
    monkeypatch.setenv("ACCUMULATOR_CONFIG", str(CONFIG / "accumulator.yaml"))
    arguments = [
        str(CONFIG / "accumulator.yaml") if word == "/etc/accumulator/accumulator.yaml" else word
        for word in commands()[where]
    ]
    arguments = [word for word in arguments if word != "accumulator"] or ["worker"]
    result = CliRunner().invoke(app, arguments)
    if arguments[0] == "worker":
        assert (result.exit_code, len(made)) == (0, 1), result.output
        roles = made[0]["roles"]
        assert roles == (["rq"] if "--with-rq" in arguments else None), "all of them is what nobody has to name"
        assert made[0]["rq_workers"] == (4 if "--with-rq" in arguments else 0)
        assert made[0]["processes"] == (4 if "--processes" in arguments else 0)
    else:
        assert arguments == ["health"]
        assert "no worker is alive" in result.output


def test_every_command_is_found() -> None:
    assert len(commands()) == 7
