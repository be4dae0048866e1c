"""Faults that people met in systems that hand work over: each test is named after its case."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest
import redis
from pydantic import SecretStr

import accumulator.handlers
from accumulator.attempts import Taken
from accumulator.client import Accumulator
from accumulator.context import Context
from accumulator.errors import ServerRefused
from accumulator.handlers import Stages, handler
from accumulator.policy import Policy
from accumulator.runner import run_attempt
from accumulator.settings import Config, Settings
from accumulator.windows import Outcome
from accumulator.worker import Worker
from tests.conftest import MakeClient, StartServer, event, wait_until
from tests.invariants import check_invariants
from tests.life import KEY, OTHER, WATCH, Life
from tests.test_worker import at_work

HOUR = 3_600_000


@pytest.fixture(autouse=True)
def registry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is registered."""
    monkeypatch.setattr(accumulator.handlers, "_registry", {})
    monkeypatch.setattr(accumulator.handlers, "_names", {})


@pytest.fixture
def life(make_client: MakeClient, namespace: str) -> Iterator[Life]:
    life = Life(make_client(), namespace)
    yield life
    life.check()


def test_b001_a_window_without_a_closer_is_handed_over_once_there_is_one(life: Life) -> None:
    seen: list[Any] = []
    handler("f")(lambda ctx: seen.append((ctx.manifest.close_reason, ctx.manifest.event_ids)))
    life.policy(inactivity="5s")
    life.push("a1")
    life.clock.advance("1s", worker=False)
    life.push("a2")
    life.clock.advance("59s", worker=False)
    open_ = life.acc.bucket(KEY).open
    assert open_ is not None
    assert life.clock.now - open_.due_at == 54_000
    life.work(step=0, turns=1)
    assert seen == [("inactivity", ("a1", "a2"))]
    [manifest] = life.acc.manifests(KEY)
    assert manifest.sealed_at - manifest.closed_at == 54_000


def test_b033_what_comes_while_a_handler_runs_is_in_later_windows(life: Life) -> None:
    seen: list[tuple[int, tuple[str, ...]]] = []

    @handler("f", timeout="30s")
    def handle(ctx: Context) -> None:
        seen.append((life.now, ctx.manifest.event_ids))
        if len(seen) == 1:
            life.tick(2_000)
            life.push("second")
            life.tick(7_950)
            life.push("third")
            life.tick(50)

    life.policy(inactivity="5s")
    life.push("first")
    life.tick(5_000)
    life.work(step=1_000)
    life.tick(4_000)
    life.work(step=0)
    assert seen == [(6_000, ("first",)), (17_000, ("second",)), (21_000, ("third",))]
    assert [m.closed_at - life.start for m in life.acc.manifests(KEY)] == [5_000, 13_000, 20_950]


class Dies(BaseException):
    """The process is gone."""


def kill_after(life: Life, calls: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process dies when the answer to that many further calls has come."""
    send = life.acc.store._send
    left = [calls]

    def dying(commands: Any) -> Any:
        if left[0] == 0:
            raise Dies
        left[0] -= 1
        replies = send(commands)
        if left[0] == 0:
            raise Dies
        return replies

    monkeypatch.setattr(life.acc.store, "_send", dying)


CALLS = 21  # that many come through


@pytest.mark.parametrize("calls", range(1, CALLS + 1))
def test_b072_a_process_dies_after_any_call(life: Life, calls: int, monkeypatch: pytest.MonkeyPatch) -> None:
    world: Counter[str] = Counter()

    def call(key: str) -> int:
        world[key] += 1
        return 7

    @handler("f", backoff="1ms", max_backoff="1ms")
    def handle(ctx: Context) -> None:
        assert ctx.once("charge", call, verify=lambda key: bool(world[key])) in (7, None)
        ctx.set_aside("e1", "odd")
        ctx.once("mail", call, verify=lambda key: bool(world[key]))
        ctx.leave(1)

    life.policy(max_events=3)
    with monkeypatch.context() as patch:
        kill_after(life, calls, patch)
        with suppress(Dies):
            for n in range(3):
                life.push(f"e{n}", payload="x" * n)
            [taken] = life.take()
            assert run_attempt(life.acc, *taken[:2]) == "confirmed"
            assert calls == CALLS
    life.check()
    for n in range(3):  # a producer that got no answer sends again
        assert life.push(f"e{n}", payload="x" * n).outcome in (Outcome.ACCEPTED, Outcome.DUPLICATE)
    life.tick(WATCH)
    life.work(step=60_000)
    [manifest] = [m for m in life.acc.manifests(KEY) if m.window_version == 1]
    assert (manifest.state, manifest.event_ids, manifest.bytes) == ("confirmed", ("e0", "e1", "e2"), 9)
    assert [e.received_at for e in manifest.events] == sorted(e.received_at for e in manifest.events)
    assert manifest.anomaly is None
    assert world == {f"{manifest.window_id}:charge": 1, f"{manifest.window_id}:mail": 1}
    assert [item.event.event_id for item in life.acc.reconciliation()] == ["e1"]
    assert life.do(life.ops.checkpoint(KEY)) == (1, "1")
    assert life.acc.counters()["closed"] == 1


def test_b076_a_back_off_longer_than_the_lease(life: Life) -> None:
    life.policy()
    window_id = life.close("e1")
    [taken] = life.take()
    life.begin(taken.window_id, 1, lease=HOUR)
    life.settle(window_id, "failed", delay=2 * HOUR)
    for _ in range(119):
        life.tick(60_000)
        assert life.take() == []
    life.tick(60_000)
    assert [(t.window_id, t.attempt) for t in life.take()] == [(window_id, 2)]


def test_b076_three_hundred_wait_behind_a_slow_one_for_longer_than_the_lease(life: Life) -> None:
    life.policy(max_events=1)
    life.acc.push_many(event("e", f"t:f:{n}", life.clock) for n in range(300))
    queue: list[Taken] = life.take(1_000)
    assert len(queue) == 300
    ran: Counter[tuple[str, int]] = Counter()
    while queue:
        job = queue.pop(0)
        if life.begin(job.window_id, job.attempt, lease=60_000).manifest is not None:
            ran[job.window_id, job.attempt] += 1
            life.tick(50_000)  # each takes nearly a minute: the last one waits for four hours
            assert life.settle(job.window_id, "confirmed") == "done"
        queue += life.take(1_000)
    assert set(ran.values()) == {1}
    assert {(f["state"], f["attempt"], f["failures"]) for f in life.all_manifests().values()} == {
        ("confirmed", "1", "0")
    }
    assert len(ran) == 300


def test_b077_a_limit_comes_from_the_handler_and_a_killed_attempt_is_recorded(life: Life) -> None:
    """Handlers of 170 s, 200 s and 20 min, under the timeout of 5 min that nobody set, and under one of 30 min."""
    ran: list[tuple[str, int]] = []
    spans = {"170": 170_000, "200": 200_000, "1200": 1_200_000}

    def handle(ctx: Context) -> None:
        ran.append((ctx.bucket_key, ctx.attempt))
        life.tick(spans[ctx.bucket_key.rpartition(":")[2]])
        ctx.once("charge", lambda key: None)

    handler("unset", max_attempts=2, backoff="1s", max_backoff="1s")(handle)
    handler("set", max_attempts=2, timeout="30m")(handle)
    for flow in ("unset", "set"):
        life.policy(flow)
        for span in spans:
            life.close("e1", key=f"t:{flow}:{span}")
    life.work()
    found = {fields["bucket"]: fields["state"] for fields in life.all_manifests().values()}
    assert found == {f"t:{flow}:{span}": "confirmed" for flow in ("unset", "set") for span in spans} | {
        "t:unset:1200": "dead"
    }
    assert Counter(key for key, _ in ran) == Counter(found.keys()) + Counter({"t:unset:1200": 1})
    [killed] = life.acc.manifests("t:unset:1200")
    assert [cause for _, state, _, cause in killed.timeline if state in ("retrying", "dead")] == ["lease_ended"] * 2
    assert life.do(life.ops.effects(killed.window_id)) == []


def test_b083_the_dead_keep_all_that_they_were(life: Life) -> None:
    @handler("f", max_attempts=2, backoff="1ms", max_backoff="1ms")
    def handle(ctx: Context) -> None:
        if ctx.attempt <= 2:
            raise ValueError("no stock")

    life.policy()
    given: dict[str, Any] = {
        "kind": "paid", "source": "shop", "source_version": 2**63 - 1, "policy_version": 4, "weight": 2,
        "payload": {"a": [1, None]}, "ref": "r:1", "trace": "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01",
    }  # fmt: skip
    windows = [life.close("e1", key=f"t:f:{n}", **given) for n in range(2)]
    before = [life.manifest(window_id) for window_id in windows]
    life.work()
    for window_id, was in zip(windows, before, strict=True):
        now = life.manifest(window_id)
        assert (now.state, now.attempt, now.failures, now.error) == ("dead", 2, 2, "ValueError: no stock")
        changed = {"state", "attempt", "failures", "error", "timeline"}
        assert {n: v for n, v in vars(now).items() if n not in changed} == {
            n: v for n, v in vars(was).items() if n not in changed
        }
        [entry] = now.events
        assert {name: getattr(entry.event, name) for name in given} == given
        assert len(now.timeline) == 6
    for window_id in reversed(windows):
        assert life.decide(window_id, "replay") == ("done", "retrying")
    assert life.work() == [(window_id, "confirmed") for window_id in reversed(windows)]


def test_b087_steps_of_one_customer_stay_in_order_and_happen_once(life: Life) -> None:
    life.policy(max_events=5)
    for n in range(1, 51):
        life.push(f"{n}")
    done: list[str] = []
    workers: list[Callable[[], None]] = []
    chance = random.Random(7)
    attempts = 0
    while life.do(life.ops.waiting("direct")) != [0] or workers:
        while len(workers) < 6 and (taken := life.take()):
            attempts += 1
            fails = attempts % 3 == 0
            manifest = life.begin(taken[0].window_id, taken[0].attempt, OTHER, most=100).manifest
            assert manifest is not None

            def finish(manifest: Any = manifest, fails: bool = fails) -> None:
                if not fails:
                    done.extend(manifest.event_ids)
                ending = "failed" if fails else "confirmed"
                assert life.settle(manifest.window_id, ending, token=OTHER, delay=3) == "done"

            workers.append(finish)
        workers.pop(chance.randrange(len(workers)))()
        life.tick(5)
        life.check()
    assert done == [str(n) for n in range(1, 51)]
    assert attempts > 10


# --- a full server ----------------------------------------------------------------------------------------------------


def test_a_worker_that_starts_on_a_full_server_empties_it(
    start_server: StartServer, server_kind: str, namespace: str
) -> None:
    """Windows close, stages and effects are kept, manifests settle; only what is new is refused."""
    server = start_server(config={"maxmemory-policy": "noeviction"})
    done: Counter[str] = Counter()

    @handler("f")
    class Careful(Stages):
        def load(self, ctx: Context) -> object:
            return {"so many": len(ctx.events)}

        def execute(self, ctx: Context, key: str) -> object:
            done[key] += 1
            ctx.leave({"until": ctx.manifest.window_version})
            return ctx.results["load"]

    policy = {"inactivity": "200ms", "sink": "direct"}
    with redis.Redis.from_url(server.url) as control, Accumulator(server.url, namespace=namespace) as client:
        client.load_policy("f", policy)
        client.push_many([event(f"e{n}", f"t:f:{n % 20}") for n in range(100)])
        control.config_set("maxmemory", "1mb")
        with pytest.raises(ServerRefused, match="OOM"):
            client.push(event("new", "t:f:new"))
        settings = Settings(redis_url=SecretStr(server.url), namespace=namespace)
        with at_work(Worker(settings, Config(policies={"f": Policy.load("f", policy)}))):
            wait_until(lambda: client.counters().get("manifest:confirmed") == 20)
        assert set(done.values()) == {1}
        assert len(done) == 20
        control.config_set("maxmemory", "0")
        assert all(m.state == "confirmed" for n in range(20) for m in client.manifests(f"t:f:{n}"))
        check_invariants(control, namespace)
