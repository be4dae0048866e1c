"""Nobody waits for somebody else's thousands: turns of tenants, their limits, and what RQ is given."""

from __future__ import annotations

import itertools
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from math import inf
from pathlib import Path
from typing import Any

import pytest
import rq

import accumulator.handlers
from accumulator.attempts import Taken
from accumulator.client import Accumulator
from accumulator.closer import Closer
from accumulator.context import Context
from accumulator.embedded import EmbeddedServer
from accumulator.envelope import tenant_of
from accumulator.handlers import handler
from accumulator.keys import inflight
from accumulator.rq_sink import QUEUE, Dispatcher
from accumulator.runner import DirectRunner, run_attempt
from accumulator.settings import Config, RqSink, Settings
from accumulator.testing import VirtualClock
from accumulator.turns import InFlight, Turns
from accumulator.worker import Worker
from tests.conftest import MakeClient, event, wait_until
from tests.processes import let_pass, written
from tests.test_worker import at_work, own, running, settled

WATCH = 30_000


@pytest.fixture(autouse=True)
def registry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is registered."""
    monkeypatch.setattr(accumulator.handlers, "_registry", {})


def close(target: Accumulator, tenant: str, count: int, flow: str = "f", first: int = 0, **more: Any) -> None:
    """Closes a window in each of so many buckets of a tenant, `first` being the number of the first."""
    target.push_many([event("e1", f"{tenant}:{flow}:{i}", kind="end", **more) for i in range(first, first + count)])


def policy(target: Accumulator, sink: str, flow: str = "f", **more: Any) -> None:
    target.load_policy(flow, {"inactivity": "1h", "terminal_kinds": ["end"], "sink": sink} | more)


def step_until(step: Callable[[], None], condition: Callable[[], object]) -> None:
    """Takes steps until the condition is true."""

    def stepped() -> object:
        step()
        return condition()

    wait_until(stepped)


def flying(target: Accumulator) -> dict[str, int]:
    """Tenant → its manifests in flight, over all partitions."""
    total: Counter[str] = Counter()
    for counts in target.store.perform(target.operations.in_flight()):
        total.update(counts)
    return dict(total)


@pytest.fixture
def crowd(make_client: MakeClient, namespace: str) -> Accumulator:
    """As `live`, for thousands of manifests: checking all of them takes longer than the test."""
    return Accumulator(make_client(), namespace=namespace)


class Stage:
    """A handler that lasts until the test lets it end, and what it saw."""

    def __init__(self) -> None:
        self.begun: list[str] = []
        self.most: Counter[str] = Counter()
        self._now: Counter[str] = Counter()
        self._lock = threading.Lock()
        self._exits = threading.Semaphore(0)
        self._open = threading.Event()
        handler("f", timeout="5m")(self.handle)

    def handle(self, ctx: Context) -> None:
        tenant = tenant_of(ctx.bucket_key)
        with self._lock:
            self._now[tenant] += 1
            self.most[tenant] = max(self.most[tenant], self._now[tenant])
            self.begun.append(tenant)
        if not self._open.is_set():
            self._exits.acquire()
        with self._lock:
            self._now[tenant] -= 1

    def pass_duration(self, at_work: int) -> None:
        """Lets those at work end, so that as many others begin."""
        before = len(self.begun)
        self._exits.release(at_work)
        wait_until(lambda: len(self.begun) >= before + at_work)

    def open(self) -> None:
        self._open.set()
        self._exits.release(10_000)


@contextmanager
def on_stage() -> Iterator[Stage]:
    stage = Stage()
    try:
        yield stage
    finally:
        stage.open()


# -- threads of our own


@pytest.mark.parametrize(("waiting", "limits"), [(10_000, {"default": 4}), (1000, {})])
@pytest.mark.parametrize("server_kind", ["valkey"])
def test_another_tenant_begins_within_three_durations(
    crowd: Accumulator, server: EmbeddedServer, namespace: str, waiting: int, limits: Mapping[str, int]
) -> None:
    policy(crowd, "direct")
    close(crowd, "many", waiting)
    with ExitStack() as stack:
        stage = stack.enter_context(on_stage())
        one = stack.enter_context(own(server.url, namespace))
        runner = DirectRunner(one, 4, grace=0, in_flight=InFlight(one, limits))
        stack.enter_context(running(runner))
        wait_until(lambda: len(stage.begun) == 4)
        stage.pass_duration(4)
        close(crowd, "one", 1)
        # These durations are shorter than it takes to hear of it.
        wait_until(lambda: "one" in runner._turns._waiting)
        durations = 0
        while "one" not in stage.begun:
            durations += 1
            stage.pass_duration(4)
        assert durations <= 3
        assert stage.most["many"] <= 4
        if limits:  # without one, quick handlers are given some more at once
            assert flying(crowd).get("many", 0) <= 4


def test_another_tenant_begins_at_once_where_a_thread_is_free(
    crowd: Accumulator, server: EmbeddedServer, namespace: str
) -> None:
    policy(crowd, "direct")
    close(crowd, "many", 200)
    with ExitStack() as stack:
        stage = stack.enter_context(on_stage())
        one = stack.enter_context(own(server.url, namespace))
        stack.enter_context(running(DirectRunner(one, 6, grace=0, in_flight=InFlight(one, {"many": 4}))))
        wait_until(lambda: len(stage.begun) == 4)
        close(crowd, "one", 1)
        wait_until(lambda: "one" in stage.begun)
        assert stage.begun == ["many"] * 4 + ["one"]


def test_limits_are_kept_and_all_is_done(live: Accumulator, server: EmbeddedServer, namespace: str) -> None:
    policy(live, "direct")
    for tenant in ("a", "b", "c"):
        close(live, tenant, 40)
    with on_stage() as stage, own(server.url, namespace) as one:
        stage.open()
        with running(DirectRunner(one, 8, in_flight=InFlight(one, {"a": 1, "default": 2}))):
            wait_until(lambda: settled(live), timeout=30)
        assert Counter(stage.begun) == {"a": 40, "b": 40, "c": 40}
        assert stage.most["a"] == 1
        assert max(stage.most.values()) <= 2
    assert flying(live) == {}


def test_roles_of_one_process_share_a_limit(live: Accumulator, server: EmbeddedServer, namespace: str) -> None:
    """Two runners stand for any two roles: what one took, the other counts."""
    policy(live, "direct")
    close(live, "many", 50)
    with on_stage() as stage, own(server.url, namespace) as one:
        shared = InFlight(one, {"default": 3})
        with running(*(DirectRunner(one, 4, grace=0, in_flight=shared) for _ in range(2))):
            wait_until(lambda: len(stage.begun) == 3)
            for _ in range(3):
                stage.pass_duration(3)
            assert stage.most["many"] == 3


def test_a_tenant_whose_attempts_were_lost_is_not_stuck(
    live: Accumulator, server: EmbeddedServer, namespace: str
) -> None:
    """All that it may have in flight was taken by a process that died: the watches bring that back, over the limit, and
    past all that waits."""
    policy(live, "direct")
    close(live, "many", 30)
    dead = InFlight(live, {"default": 2})
    turns = Turns(live, "direct", dead)
    turns.listen(0)
    lost = [taken for _ in range(2) for taken in turns.take(1, WATCH)]
    assert turns.take(1, WATCH) == []
    turns.close()
    with on_stage() as stage, own(server.url, namespace) as one:
        stage.open()
        with running(DirectRunner(one, 4, in_flight=InFlight(one, {"default": 2})), Closer(one)):
            let_pass(live)
            wait_until(lambda: settled(live), timeout=30)
        assert len(stage.begun) == 30
        assert stage.most["many"] <= 2
    for taken in lost:
        manifest = live.manifest(taken.window_id)
        assert manifest is not None
        assert [step[3] for step in manifest.timeline][:2] == ["taken", "taken_again"]


# -- turns


def test_turns_of_tenants_wherever_their_manifests_lie(virtual: Accumulator, clock: VirtualClock) -> None:
    policy(virtual, "direct")
    for tenant, count in (("a", 40), ("b", 3), ("c", 2)):
        close(virtual, tenant, count, at=clock)
    turns = Turns(virtual, "direct")
    turns.listen(0)
    order = [tenant_of(taken.bucket_key) for _ in range(60) for taken in turns.take(1, WATCH)]
    assert Counter(order) == {"a": 40, "b": 3, "c": 2}
    assert order[:6] in [list(one) * 2 for one in ("abc", "acb", "bac", "bca", "cab", "cba")]
    assert not turns.waiting
    turns.close()


def test_a_share_of_each_call(virtual: Accumulator, clock: VirtualClock) -> None:
    policy(virtual, "direct")
    for tenant in ("a", "b"):
        close(virtual, tenant, 100, at=clock)
    turns = Turns(virtual, "direct")
    turns.listen(0)
    shares = [[tenant_of(taken.bucket_key) for taken in turns.take(20, WATCH)] for _ in range(2)]
    assert all(share in (["a", "b"] * 10, ["b", "a"] * 10) for share in shares)
    turns.close()


def test_one_call_takes_of_many_tenants_each_up_to_its_limit(make_client: MakeClient, namespace: str) -> None:
    one = Accumulator(make_client(), namespace=namespace, partitions=1)
    policy(one, "direct")
    for tenant in "abcd":
        close(one, tenant, 10)
    turns = Turns(one, "direct", InFlight(one, {"b": 4, "c": 0}))
    turns.listen(0)
    taken = [tenant_of(taken.bucket_key) for taken in turns.take(20, WATCH)]
    assert Counter(taken[:3]) == {"a": 1, "b": 1, "d": 1}
    assert Counter(taken) == {"a": 8, "b": 4, "d": 8}
    taken += [tenant_of(taken.bucket_key) for _ in range(10) for taken in turns.take(20, WATCH)]
    assert Counter(taken) == {"a": 10, "b": 4, "d": 10}
    assert turns.waiting
    turns.close()


def test_a_lost_wake_up_is_made_up_for(
    virtual: Accumulator, clock: VirtualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy(virtual, "direct")
    turns = Turns(virtual, "direct")
    turns.listen(0)
    assert turns.take(1, WATCH) == []
    monkeypatch.setattr(turns, "_subscription", Deaf())
    close(virtual, "a", 1, at=clock)
    step_until(lambda: turns.listen(0.05), lambda: turns.waiting)
    assert len(turns.take(1, WATCH)) == 1


class Deaf:
    """A subscription that hears nothing."""

    def wait(self, seconds: float) -> list[bytes]:
        threading.Event().wait(min(seconds, 0.05))
        return []

    def check(self, _: float) -> None:
        """As if all were well."""


def test_a_sink_without_a_policy_costs_a_slow_look(
    live: Accumulator, make_client: MakeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Turns, "IDLE", 0.02)
    live.load_policy("f", {"inactivity": "1h", "sink": "rq"})
    client = make_client()
    turns = Turns(live, "direct")
    turns.listen(0)
    turns.listen(0)
    assert not turns.active
    assert client.pubsub_numsub(live.operations.channel)[0][1] == 0
    policy(live, "direct", "g")
    step_until(lambda: turns.listen(0.01), lambda: turns.active)
    close(live, "t", 1, "g")
    step_until(lambda: turns.listen(0.05), lambda: turns.waiting)
    turns.close()


def test_an_older_policy_may_leave_something_for_its_sink(virtual: Accumulator, clock: VirtualClock) -> None:
    policy(virtual, "direct")
    close(virtual, "a", 1, at=clock)
    policy(virtual, "rq")
    assert virtual.store.perform(virtual.operations.uses("direct"))
    assert virtual.store.perform(virtual.operations.uses("rq"))
    assert not virtual.store.perform(virtual.operations.uses("webhook"))


def test_who_waits_is_woken(live: Accumulator) -> None:
    policy(live, "direct")
    turns = Turns(live, "direct")
    turns.listen(0)
    found: list[Taken] = []
    thread = threading.Thread(target=lambda: found.extend(turns.take(1, WATCH, 20) or turns.take(1, WATCH)))
    thread.start()
    close(live, "a", 1)
    while thread.is_alive():
        turns.listen(0.05)
    assert len(found) == 1
    turns.close()


# -- counting


def test_what_others_have_in_flight_counts(virtual: Accumulator, clock: VirtualClock) -> None:
    policy(virtual, "direct")
    close(virtual, "a", 8, at=clock)
    client: Any = virtual.store.client
    client.hset(inflight(virtual.operations.prefixes[0]), "a", 4)
    for partition in range(4):
        found, left = InFlight(virtual, {"a": 4}).take(partition, "direct", ["a"], 10, WATCH)
        assert (found, left["a"] > 0) == ([], True)
    client.hdel(inflight(virtual.operations.prefixes[0]), "a")


def test_one_takes_of_a_tenant_with_a_limit_at_a_time(virtual: Accumulator, clock: VirtualClock) -> None:
    policy(virtual, "direct")
    close(virtual, "a", 8, at=clock)
    close(virtual, "b", 8, at=clock)
    do, operations = virtual.store.perform, virtual.operations
    one, other = "1" * 16, "2" * 16
    assert set(do(operations.reserve(["a"], one, 1000))) == {"a"}
    assert set(do(operations.reserve(["a", "b"], other, 1000))) == {"b"}
    limited = InFlight(virtual, {"a": 4, "b": 4})
    assert limited.take(0, "direct", ["a", "b"], 10, WATCH) == ([], {})
    assert limited.full("a")
    assert limited.full("b")
    assert 0 < limited.pause() <= InFlight.BUSY
    do(operations.take_of(0, "direct", {"a": 0}, 1, WATCH, one, ["a"]))
    do(operations.take_of(0, "direct", {"b": 0}, 1, WATCH, one, ["b"]))  # not its own to let go
    limited.ended("a:f:0")
    assert not limited.full("a")
    _, left = limited.take(0, "direct", ["a", "b"], 10, WATCH)
    assert set(left) == {"a"}
    clock.advance(1000)  # the other one is dead
    _, left = limited.take(0, "direct", ["a", "b"], 10, WATCH)
    assert set(left) == {"a", "b"}
    assert not any(virtual.store.client.keys("*:taking"))


def test_a_dead_taker_holds_nobody_up_where_the_clock_is_set_back(virtual: Accumulator, clock: VirtualClock) -> None:
    do, operations = virtual.store.perform, virtual.operations
    later = virtual.operations._clock
    assert set(do(operations.reserve(["a"], "1" * 16, 1000))) == {"a"}
    assert set(do(operations.reserve(["a"], "2" * 16, 1000))) == set()
    virtual.operations._clock = lambda: clock.now - 3_600_000
    assert set(do(operations.reserve(["a"], "2" * 16, 1000))) == {"a"}
    virtual.operations._clock = later
    do(operations.take_of(0, "direct", {"a": 0}, 1, WATCH, "2" * 16, ["a"]))


def test_who_was_held_up_takes_nothing(
    virtual: Accumulator, clock: VirtualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it counted is not true any more."""
    policy(virtual, "direct")
    close(virtual, "a", 8, at=clock)
    partition = virtual.operations.prefixes.index(virtual.operations.prefix_of("a:f:0"))
    with monkeypatch.context() as patch:
        seconds = itertools.count(step=1.5)
        patch.setattr("accumulator.turns.monotonic", lambda: next(seconds))
        assert InFlight(virtual, {"a": 4}).take(partition, "direct", ["a"], 1, WATCH) == ([], {})
    clock.advance(InFlight.HOLD)
    assert len(InFlight(virtual, {"a": 4}).take(partition, "direct", ["a"], 1, WATCH)[0]) == 1
    assert not any(virtual.store.client.keys("*:taking"))


def test_threads_that_take_and_wait_side_by_side(virtual: Accumulator) -> None:
    """One thread looks how long to wait while others find tenants at their limit."""
    limited = InFlight(virtual, {"default": 1})
    going, failed = threading.Event(), []

    def wait() -> None:
        while not going.is_set():
            try:
                limited.pause()
            except RuntimeError as problem:
                failed.append(problem)

    thread = threading.Thread(target=wait)
    thread.start()
    for n in range(20_000):
        limited._full[f"t{n % 3000}"] = inf
        limited.ended(f"t{n * 7 % 3000}:f:1")
    going.set()
    thread.join()
    assert failed == []


def test_no_limit_costs_no_call(virtual: Accumulator, clock: VirtualClock, monkeypatch: pytest.MonkeyPatch) -> None:
    policy(virtual, "direct")
    close(virtual, "a", 1, at=clock)
    monkeypatch.setattr(virtual.operations, "reserve", None)
    free = InFlight(virtual, {"b": 1})
    partition = virtual.operations.prefixes.index(virtual.operations.prefix_of("a:f:0"))
    assert len(free.take(partition, "direct", ["a"], 10, WATCH)[0]) == 1
    free.ended("a:f:0")
    assert (free.limit("a"), free.full("a")) == (None, False)


@pytest.mark.parametrize(("limit", "workers"), [(1, 4), (3, 4), (4, 2)])
def test_a_limit_holds_over_all_workers(
    live: Accumulator, server: EmbeddedServer, namespace: str, limit: int, workers: int
) -> None:
    """Each has its own count, as another process would."""
    policy(live, "direct")
    close(live, "many", 150)
    close(live, "free", 50)
    with ExitStack() as stack:
        stage = stack.enter_context(on_stage())
        stage.open()
        runners = []
        for _ in range(workers):
            one = stack.enter_context(own(server.url, namespace))
            runners.append(DirectRunner(one, 4, grace=0, in_flight=InFlight(one, {"many": limit})))
        stack.enter_context(running(*runners))
        wait_until(lambda: settled(live), timeout=60)
    assert Counter(stage.begun) == {"many": 150, "free": 50}
    assert stage.most["many"] <= limit


# -- take.lua


def take(target: Accumulator, partition: int, count: int, limits: Mapping[str | None, int]) -> list[str]:
    operations = target.operations
    found = target.store.perform(operations.take(partition, "direct", count, WATCH, limits))
    return [taken.bucket_key for taken in found]


@pytest.fixture
def single(make_client: MakeClient, namespace: str, clock: VirtualClock) -> Accumulator:
    """One partition under a virtual clock."""
    made = clock.attach(Accumulator(make_client(), namespace=namespace, partitions=1, clock=clock))
    policy(made, "direct")
    return made


def test_only_the_named_are_taken(single: Accumulator, clock: VirtualClock) -> None:
    for i in range(250):
        close(single, f"t{i}", 1, at=clock)
    assert take(single, 0, 5, {None: 0, "t249": 9}) == ["t249:f:0"]
    assert take(single, 0, 5, {None: 0, "t249": 9}) == []
    assert take(single, 0, 5, {None: 0, "nobody": 9}) == []
    assert len(take(single, 0, 300, {})) == 200


def test_a_limit_of_a_partition(single: Accumulator, clock: VirtualClock) -> None:
    for tenant in ("a", "b"):
        close(single, tenant, 5, at=clock)
    assert sorted(take(single, 0, 10, {None: 2, "b": 1})) == ["a:f:0", "a:f:1", "b:f:0"]
    assert take(single, 0, 10, {None: 2, "b": 1}) == []
    assert take(single, 0, 10, {None: 0, "b": 2}) == ["b:f:1"]


def test_what_was_lost_is_taken_over_the_limit(single: Accumulator, clock: VirtualClock) -> None:
    close(single, "a", 5, at=clock)
    assert take(single, 0, 10, {None: 2}) == ["a:f:0", "a:f:1"]
    clock.advance(WATCH)
    close(single, "a", 1, first=9, at=clock)
    assert sorted(take(single, 0, 10, {None: 2})) == ["a:f:0", "a:f:1"]
    assert flying(single) == {"a": 2}
    assert take(single, 0, 10, {None: 2}) == []
    assert take(single, 0, 1, {None: 3}) == ["a:f:2"]


# -- RQ


@pytest.fixture
def queue(make_client: MakeClient) -> rq.Queue:
    """The usual queue as RQ sees it."""
    return rq.Queue(QUEUE, connection=make_client())


def tenants_of(live: Accumulator, queue: rq.Queue) -> list[str]:
    keys = [live.store.perform(live.operations.owner(job.args[0])) for job in queue.jobs]
    return [tenant_of(key) for key in keys if key is not None]


@pytest.mark.parametrize("server_kind", ["valkey"])
def test_rq_is_not_flooded(crowd: Accumulator, server: EmbeddedServer, namespace: str, queue: rq.Queue) -> None:
    live = crowd
    handler("f")(lambda _: None)
    policy(live, "rq")
    close(live, "many", 10_000)
    with own(server.url, namespace) as one:
        dispatcher = Dispatcher(one, server.url, in_flight=InFlight(one, {"default": 4}))
        try:
            for _ in range(5):
                dispatcher.step()
            assert tenants_of(live, queue) == ["many"] * 4
            close(live, "one", 1)
            # It comes before the fifth of the others, however many those are.
            step_until(dispatcher.step, lambda: queue.count == 5)
            assert tenants_of(live, queue) == ["many"] * 4 + ["one"]
            for job in queue.jobs[:2]:
                run_attempt(one, *job.args)
                queue.remove(job)
            step_until(dispatcher.step, lambda: queue.count == 5)
            dispatcher.step()
            assert Counter(tenants_of(live, queue)) == {"many": 4, "one": 1}
        finally:
            dispatcher.close()


def test_without_limits_tenants_share_what_rq_is_given(
    live: Accumulator, server: EmbeddedServer, namespace: str, queue: rq.Queue
) -> None:
    policy(live, "rq")
    for tenant in ("a", "b"):
        close(live, tenant, 300)
    with own(server.url, namespace) as one:
        dispatcher = Dispatcher(one, server.url, backlog=100)
        try:
            step_until(dispatcher.step, lambda: queue.count >= 100)
            dispatcher.step()
            found = Counter(tenants_of(live, queue))
            assert found.total() == 100
            assert min(found.values()) >= 30
        finally:
            dispatcher.close()


def test_a_busy_dispatcher_hears_of_others(
    live: Accumulator, server: EmbeddedServer, namespace: str, queue: rq.Queue
) -> None:
    policy(live, "rq")
    close(live, "many", 2000)
    with own(server.url, namespace) as one:
        dispatcher = Dispatcher(one, server.url)
        try:
            step_until(dispatcher.step, lambda: queue.count >= 100)
            close(live, "one", 1)
            before = queue.count
            step_until(dispatcher.step, lambda: "one" in tenants_of(live, queue))
            assert queue.count <= before + 500
        finally:
            dispatcher.close()


def test_a_queue_for_each_flow(
    live: Accumulator, server: EmbeddedServer, namespace: str, queue: rq.Queue, make_client: MakeClient
) -> None:
    for flow in ("f", "g", "h"):
        policy(live, "rq", flow)
        close(live, "t", 1, flow)
    options = {
        "g": RqSink(queue="heavy", result_ttl="90s", failure_ttl="1h"),
        "h": RqSink(queue="heavy"),
    }
    with own(server.url, namespace) as one:
        dispatcher = Dispatcher(one, server.url, options=lambda flow: options.get(flow, RqSink()))
        heavy = rq.Queue("heavy", connection=make_client())
        try:
            step_until(dispatcher.step, lambda: (queue.count, heavy.count) == (1, 2))
        finally:
            dispatcher.close()
    [usual] = queue.jobs
    told = {flow_of(live, job): (job.result_ttl, job.failure_ttl) for job in [usual, *heavy.jobs]}
    assert told == {"f": (1, 86_400), "g": (90, 3600), "h": (1, 86_400)}


def flow_of(live: Accumulator, job: Any) -> str:
    key = live.store.perform(live.operations.owner(job.args[0]))
    assert key is not None
    return key.split(":")[1]


def test_a_queue_that_nobody_works_on_holds_up_no_other(
    live: Accumulator, server: EmbeddedServer, namespace: str, queue: rq.Queue, make_client: MakeClient
) -> None:
    for flow in ("f", "g"):
        policy(live, "rq", flow)
    close(live, "t", 60, "g")
    with own(server.url, namespace) as one:
        dispatcher = Dispatcher(
            one, server.url, backlog=20, options=lambda flow: RqSink(queue="dead" if flow == "g" else None)
        )
        dead = rq.Queue("dead", connection=make_client())
        try:
            step_until(dispatcher.step, lambda: dead.count >= 20)
            close(live, "t", 5, "f")
            step_until(dispatcher.step, lambda: queue.count == 5)
        finally:
            dispatcher.close()


def test_rq_workers_of_ours_work_on_all_queues(
    live: Accumulator, server: EmbeddedServer, namespace: str, make_client: MakeClient, tmp_path: Path
) -> None:
    """`--with-rq`: what is in the usual queue, and in those of single flows."""
    names = ("log", "slow")
    config = Config(
        handlers=["tests.sample_handlers"],
        policies={flow: {"inactivity": "1h", "terminal_kinds": ["end"]} for flow in names},
        sinks={"slow": {"queue": "heavy", "result_ttl": "1h"}},
    )
    handler("default")(print)  # that module may be imported already; the RQ workers import it themselves
    worker = Worker(Settings(redis_url=server.url, namespace=namespace), config, rq_workers=1)
    with at_work(worker):
        wait_until(lambda: names[1] in live.policies())
        for flow in names:
            close(live, "t", 2, flow, payload={"out": str(tmp_path / "out"), "seconds": 0})
        wait_until(lambda: settled(live), timeout=40)
        wait_until(lambda: live.health().ok)
    heavy = rq.Queue("heavy", connection=make_client())
    assert len(heavy.finished_job_registry) == 2
    assert {tuple(line[:2]) for line in written(tmp_path / "out") if line[0] != "begun"} == {
        *(("handled", f"t:log:{i}") for i in range(2)),
        *(("ended", f"t:slow:{i}") for i in range(2)),
    }
