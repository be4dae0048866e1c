"""Random histories through the real scripts: the model agrees with the outcome, and the keys with each other.

The seeds are fixed, so that a run means the same twice; `make histories SEEDS=…` takes as many more as wanted.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import redis

from accumulator import keys
from accumulator.attempts import Taken
from accumulator.simulate import PARTITIONS, _Run, run_scenario
from accumulator.store import Store
from tests.conftest import KINDS, MakeClient
from tests.histories import compare, differences, history
from tests.invariants import check_invariants, contents, problems
from tests.model import simulate

CHUNK = 25
CHUNKS = [
    pytest.param(kind, first, id=f"{kind}-{first}")
    for kind, seeds in (("valkey", 150), ("redis", 50))
    if kind in KINDS
    for first in range(0, seeds, CHUNK)
]
DAY = 86_400_000


@pytest.mark.parametrize(("server_kind", "first"), CHUNKS)
def test_the_scripts_and_the_model_agree(make_client: MakeClient, first: int) -> None:
    store = Store(make_client())
    seeds = range(first, first + CHUNK)
    found = compare(lambda scenarios: [run_scenario(store, one) for one in scenarios], [history(s) for s in seeds])
    assert {seed: lines for seed, lines in zip(seeds, found, strict=True) if lines} == {}


class Worked(_Run):
    """A history with runners and people: between the steps manifests are taken, begun and settled, well and badly, and
    decided. None of it may change what becomes of the events. After each step the keys are compared with each other.

    `drain` then brings everything to its end, and lets the time of retention pass: nothing is left.
    """

    def __init__(self, client: redis.Redis, scenario: dict[str, Any], seed: int, *, check: bool = True) -> None:
        super().__init__(Store(client), scenario)
        self.client = client
        self.random = random.Random(seed)
        self.begun: list[tuple[Taken, str]] = []
        self.endings: set[str] = set()
        self.checked = check
        self.purged = False

    def check(self) -> None:
        if self.checked:
            check_invariants(self.client, self.operations.namespace, purged=self.purged)

    def _step(self, index: int, action: str, given: object, at: int) -> None:
        super()._step(index, action, given, at)
        self.check()
        if self.handle():
            self.check()

    def _work_until(self, until: int, inclusive: bool) -> None:
        before = self.now
        super()._work_until(until, inclusive)
        if self.now > before:
            self.check()

    def chance(self, probability: float) -> bool:
        return self.random.random() < probability

    def handle(self, calm: bool = False) -> bool:
        """What runners and people do at this instant; whether it was anything. `calm`: everything is taken, and ends
        well or is given up."""
        perform, operations, pick = self.store.perform, self.operations, self.random.choice
        done = False
        for partition in range(operations.partitions):
            if calm or self.chance(0.4):
                limits: list[dict[str | None, int]] = [{}, {}, {None: 1}, {"t": 2, None: 3}]
                watch = pick([1, 50, 60_000])
                if not calm and self.chance(0.3):
                    found = self.take_limited(partition, watch)
                else:
                    found = perform(operations.take(partition, "rq", 3, watch, {} if calm else pick(limits)))
                for taken in found:
                    done = True
                    if calm or self.chance(0.8):
                        self.begin(taken, calm)
        self.random.shuffle(self.begun)
        while self.begun and (calm or self.chance(0.6)):
            done = True
            self.settle(*self.begun.pop(), calm)
        for window_id in perform(operations.attention()):
            if calm or self.chance(0.3):
                done = True
                decision = "discard" if calm else pick(["approve", "refuse", "replay", "discard", "confirm"])
                decided = perform(
                    operations.decide(window_id, decision, "ana", "a reason", pick(["", "done", "not_done"]))
                )
                assert decided.outcome in ("done", "wrong_state", "joined")
        return done

    def take_limited(self, partition: int, watch: int) -> list[Taken]:
        """As one does whose tenants have a limit over all partitions."""
        perform, operations = self.store.perform, self.operations
        token = f"{self.random.getrandbits(64):016x}"
        [tenants] = perform(operations.tenants("rq", [partition]))
        if not tenants:
            return []
        counts = perform(operations.reserve(tenants, token, 1000))
        assert counts.keys() == set(tenants)
        assert perform(operations.reserve(tenants, "0" * 16, 1000)) == {}
        limits = {tenant: count[partition] + max(0, 2 - sum(count)) for tenant, count in counts.items()}
        found, left = perform(operations.take_of(partition, "rq", limits, 3, watch, token, tenants))
        assert left.keys() == set(tenants)
        return found

    def begin(self, taken: Taken, calm: bool) -> None:
        perform, operations = self.store.perform, self.operations
        token = f"{self.random.getrandbits(64):016x}"
        lease, most = self.random.choice([1, 300, 60_000]), self.random.choice([1, 2, 5])
        granted = perform(operations.begin(taken.window_id, taken.attempt, token, lease, most))
        other = perform(operations.begin(taken.window_id, taken.attempt, "0" * 16, lease, most))
        assert other.manifest is None
        if granted.manifest is not None:
            again = perform(operations.begin(taken.window_id, taken.attempt, token, lease, most))
            assert again.manifest == granted.manifest
            assert granted.manifest.anomaly is None
            self.begun.append((taken, token))
            if self.chance(0.3):
                for step in ("begin", self.random.choice(["confirm", "doubt", "undo", "begin"])):
                    perform(operations.effect(taken.window_id, token, "mail", step, token[:6], "{}"))
            if self.chance(0.3):
                perform(operations.save_stage(taken.window_id, token, "load", '{"a":1}'))
            # Only at the end: the answer of a history counts what its pushes queued.
            if calm and granted.manifest.events and self.chance(0.3):
                aside = self.random.choice(granted.manifest.events).event
                for _ in range(2):
                    assert perform(operations.set_aside(taken.window_id, token, aside, "a reason"))

    def settle(self, taken: Taken, token: str, calm: bool) -> None:
        perform, operations = self.store.perform, self.operations
        ending = "confirmed" if calm else self.random.choice(
            [
                "confirmed", "confirmed", "failed", "returned", "dead", "awaiting_approval", "uncertain", "reconciling",
                "superseded",
            ]
        )  # fmt: skip
        manifest = None
        if calm or self.chance(0.5):
            manifest = perform(operations.manifest(taken.window_id))
        checkpoint = self.random.choice(["", '{"seen":1}'])
        assert perform(operations.settle(taken.window_id, "0" * 16, "dead", "stale")) == "refused"
        answer = perform(
            operations.settle(
                taken.window_id,
                token,
                ending,
                "ValueError",
                self.random.choice([0, 1, 1000]),
                "text",
                checkpoint,
                manifest,
            )
        )
        if answer == "done":
            self.endings.add(ending)

    # --- to the end

    def drain(self, *, last: bool = True) -> None:
        """Everything comes to its end; with `last`, the time of retention passes too, and nothing is left."""
        perform, operations = self.store.perform, self.operations
        self.down = []
        for turn in range(2000):
            busy = self.resolve()
            for key, _ in self.accumulator.open_buckets():
                self.accumulator.flush(key)
            busy = self.handle(calm=True) or busy
            if turn % 20 == 0:
                self.check()
            if not busy:
                if not sum(self.client.zcard(keys.outbox(prefix)) for prefix in operations.prefixes):
                    break
                self.pass_time(60_000)
        else:
            pytest.fail("a manifest does not come to its end")
        self.check()
        self.purged = True
        for _ in range(5):  # the janitor at work: it records what nobody was handed
            for window_id in sorted(perform(operations.unrecorded())):
                self.record(window_id)
            self.pass_time(DAY)
        for key in sorted(self.client.scan_iter(match=f"{operations.namespace}:*:manifest:*", count=1000)):
            self.record(key.decode().rpartition(":")[2])
        if not last:
            return
        for _ in range(3):
            self.pass_time(4000 * DAY)  # no policy asks for more than 3650 days
        prefix = f"{operations.namespace}:"
        left = {name.rpartition("}:")[2].partition(":")[0] for name in contents(self.client, f"{prefix}*")}
        assert left <= {prefix.rstrip(":"), "policy", "stats", "audit", "reconcile"}
        for partition in range(PARTITIONS):
            assert self.client.xlen(keys.reconcile(keys.prefix(operations.namespace, partition))) == 0

    def resolve(self) -> bool:
        """Decides everything in the reconciliation queue; whether there was anything."""
        items = self.store.perform(self.operations.reconciliation())
        for item in items:
            decision = self.random.choice(["accept", "discard"])
            resolved = self.store.perform(self.operations.resolve(item, decision, "ana", "a reason"))
            assert resolved.outcome in ("accepted", "discarded")
            self.check()
        return bool(items)

    def record(self, window_id: str) -> None:
        manifest = self.store.perform(self.operations.manifest(window_id))
        assert manifest is not None
        self.store.perform(self.operations.record(manifest))

    def pass_time(self, ms: int) -> None:
        until = self.now + ms
        super()._work_until(until, True)
        self.now = until
        self.check()


@pytest.mark.parametrize("seeds", [(1000, 1003, 1004), (1006, 1008, 1010)], ids=str)
def test_the_keys_agree_after_every_operation_and_nothing_is_left(
    make_client: MakeClient, seeds: tuple[int, ...]
) -> None:
    client = make_client()
    endings: set[str] = set()
    for seed in seeds:
        scenario = history(seed)
        run = Worked(client, scenario, seed)
        try:
            answer = run.run()
            assert list(differences("answer", answer, simulate(scenario))) == []
            run.drain()
        except AssertionError as problem:
            pytest.fail(f"seed {seed}: {problem}")
        finally:
            run.drop()
        endings |= run.endings
    assert len(endings) > 3


Break = Callable[[redis.Redis, str], object]
BREAKS: dict[str, tuple[Break, str]] = {
    "a timer is gone": (lambda c, p: c.zrem(f"{p}timers", "w:t:f:1"), "is open and has no timer"),
    "a timer is too late": (lambda c, p: c.zincrby(f"{p}timers", 5000, "w:t:f:1"), "after it is due"),
    "an orphan timer": (lambda c, p: c.zadd(f"{p}timers", {"w:t:f:9": 1}), "has no open window"),
    "no index": (lambda c, p: c.delete(f"{p}open"), "stands in `open` at None"),
    "another tally": (lambda c, p: c.hset(f"{p}bucket:t:f:1", "tally", "9 9 9 9 9"), "its tally says"),
    "a lost stream": (lambda c, p: c.delete(f"{p}events:t:f:1"), "has no stream"),
    "a lost event": (lambda c, p: c.xtrim(f"{p}events:t:f:1", 1, approximate=False), "its tally says"),
    "a forgotten id": (lambda c, p: c.hdel(f"{p}ids:t:f:1", "e1"), "is not known"),
    "an id of nothing": (lambda c, p: c.hset(f"{p}ids:t:f:1", "e9", "1 1 - d"), "e9 is known as 1"),
    "an unsettled manifest out of the outbox": (lambda c, p: c.delete(f"{p}outbox"), "stands in the outbox at None"),
    "nobody's turn": (lambda c, p: c.delete(f"{p}ready:rq:t"), "is closed and 0 times ready"),
    "twice ready": (lambda c, p: c.rpush(f"{p}ready:rq:t", *c.lrange(f"{p}ready:rq:t", 0, 0)), "2 times ready"),
    "a tenant that is not served": (lambda c, p: c.delete(f"{p}tenants:rq"), "tenants:rq lists"),
    "a counter": (lambda c, p: c.hincrby(f"{p}stats", "accepted", 1), "stats count"),
    "a key that expires": (lambda c, p: c.expire(f"{p}bucket:t:f:1", 1000), "expires by itself"),
    "a key of another type": (lambda c, p: c.set(f"{p}checkpoints", "x"), "by its name nothing known"),
    "a key in another partition": (lambda c, p: c.hset(f"{p}bucket:t:f:4", "seen", 1), "belongs to partition"),
    "a key outside": (lambda c, p: c.set(f"{p.partition(':')[0]}:else", "x"), "lies in no partition"),
    "a bucket for ever": (lambda c, p: c.hset(f"{p}bucket:t:f:3", "seen", 1), "stays for ever"),
    "a missing manifest": (lambda c, p: c.delete(*c.scan_iter(match=f"{p.replace('{', '?')}manifest:*")), "is missing"),
}  # fmt: skip


@pytest.mark.parametrize("name", BREAKS)
def test_what_disagrees_is_noticed(fake: Any, namespace: str, name: str) -> None:
    import fakeredis

    from accumulator.client import Accumulator
    from accumulator.testing import VirtualClock
    from tests.conftest import event

    clock = VirtualClock()
    with fakeredis.FakeRedis(server=fake, protocol=2) as client:
        accumulator = Accumulator(client, namespace=namespace, partitions=2, clock=clock)
        accumulator.load_policy("f", {"inactivity": "10s"})
        accumulator.push_many([event("e1", at=clock), event("e2", at=clock)])
        accumulator.flush("t:f:1")
        accumulator.push(event("e3", at=clock))
        accumulator.push(event("e4", at=clock))
        check_invariants(client, namespace)
        spoil, words = BREAKS[name]
        spoil(client, accumulator.operations.prefix_of("t:f:1"))
        assert any(words in line for line in problems(client, namespace)), list(problems(client, namespace))
        client.flushall()
