"""Random lives: whatever pushes, workers that die and people do, nothing happens twice, out of order, or never."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Generator
from typing import Any, Final, TypeVar

import pytest

from accumulator.attempts import Grant, Taken
from accumulator.manifest import SETTLED, Manifest
from tests.conftest import MakeClient
from tests.life import ATTENTION, LEASE, Life

T = TypeVar("T")

FLOWS: Final[dict[str, dict[str, Any]]] = {
    "each": {"max_events": 3},
    "bot": {"max_events": 2, "handover": "together"},
    "free": {"max_events": 2, "ordered": False},
    "pack": {"max_events": 2, "ordered": False, "handover": "together"},
    "none": {"max_events": 2, "sink": "none"},
}
MOST: Final = 3
LIMITS: Final[list[dict[str | None, int] | None]] = [None, {None: 1}, {"a": 2, None: 3}]
RETENTION: Final = {"payload_ttl": "1d", "metadata_ttl": "2d", "dedupe_ttl": "1d"}


class Machine:
    """Workers, people and a world outside. An outside call is made in the same step in which its beginning is granted:
    what a target without idempotency keys can't rule out is not played."""

    def __init__(self, life: Life, seed: int) -> None:
        self.life = life
        self.random = random.Random(seed)
        life.ops._nonce = lambda length: f"{self.random.getrandbits(4 * length):0{length}x}"
        self.world: Counter[str] = Counter()
        self.workers: list[Generator[None]] = []
        self.jobs: list[Taken] = []
        self.by_hand: set[str] = set()
        self.pushed: dict[str, list[str]] = {}
        self.said: list[str] = []
        for flow, options in FLOWS.items():
            life.policy(flow, **options, **RETENTION)
        self.keys = [f"{tenant}:{flow}:{n}" for tenant in "ab" for flow in FLOWS for n in (1, 2)]

    def chance(self, probability: float) -> bool:
        return self.random.random() < probability

    def twice(self, call: Callable[[], T]) -> T:
        """Now and then a call is sent again, since its answer was lost: it says the same."""
        said = call()
        if self.chance(0.2):
            assert call() == said
        return said

    # --- workers ---

    def worker(self, taken: Taken, plan: str) -> Generator[None]:
        """One attempt, parted where it may die or stand still."""
        life, window_id = self.life, taken.window_id
        token = f"{self.random.getrandbits(64):016x}"
        grant: Grant = self.twice(lambda: life.begin(window_id, taken.attempt, token, most=MOST))
        if grant.manifest is None:
            return
        self.check_hand_over(grant.manifest)
        yield
        if plan != "superseded":
            for name in self.random.sample(["mail", "log", "tell"], self.random.randint(0, 2)):
                if (yield from self.effect(window_id, name, token)) == "refused":
                    return
                yield
        if plan == "confirmed":
            done = yield from self.effect(window_id, "main", token)
            if done == "refused":
                return
            plan = "confirmed" if done == "confirmed" else "failed"
            yield
        told = self.twice(lambda: life.settle(window_id, plan, plan, token, delay=5_000))
        if told in ("effects_begun", "no_newer_window"):
            life.settle(window_id, "failed", told, token, delay=1_000)

    def effect(self, window_id: str, name: str, token: str) -> Generator[None, None, str]:
        """What became of it: confirmed, undone, uncertain, or refused where the attempt has no say any more."""
        nonce, key = f"{self.random.getrandbits(32):08x}", f"{window_id}:{name}"

        def ask(step: str) -> str:
            return self.twice(lambda: self.life.effect(window_id, name, step, nonce, token=token))

        told = ask("begin")
        if told == "uncertain":
            if self.chance(0.3):
                yield
            told = ask("confirm" if self.world[key] else "again")
        if told == "begun":
            if self.chance(0.1):
                return ask("undo")  # it could not be called
            self.world[key] += 1
            if self.chance(0.4):
                yield
            told = ask("doubt" if self.chance(0.2) else "confirm")
        return told

    def check_hand_over(self, manifest: Manifest) -> None:
        """Nothing older waits that should have come before."""
        life = self.life
        if not FLOWS[manifest.flow].get("ordered", True):
            return
        prefix = life.ops.prefix_of(manifest.bucket_key)
        waits = (life.client.hget(f"{prefix}bucket:{manifest.bucket_key}", "waits") or b"").decode().split()
        group = {manifest.window_id, *manifest.joined}
        for other in life.acc.manifests(manifest.bucket_key):
            if other.window_id in group or other.leader in waits or other.window_version > manifest.window_version:
                continue
            late = other.window_id in waits and other.state == "retrying"
            assert other.state in SETTLED | ATTENTION or late, f"{other.window_id} is {other.state}"

    # --- what happens ---

    def step(self) -> None:
        what: Callable[[], None] = self.random.choices(
            [self.push, self.flush, self.empty, self.wait, self.take, self.start, self.go, self.die, self.lose,
             self.decide, self.give_up, self.life.record],
            [22, 6, 3, 12, 14, 14, 40, 3, 2, 5, 3, 1],
        )[0]  # fmt: skip
        self.said.append(f"{self.life.now} {what.__name__}")
        what()

    def push(self) -> None:
        key = self.random.choice(self.keys)
        event_id = f"e{len(self.pushed.setdefault(key, []))}"
        assert self.life.push(event_id, key).outcome == "accepted"
        self.pushed[key].append(event_id)

    def flush(self) -> None:
        self.life.acc.flush(self.random.choice(self.keys))

    def empty(self) -> None:
        key = self.random.choice(self.keys)
        for entry in self.life.acc.open_events(key):
            assert self.life.acc.retract(key, entry.event.event_id).outcome == "retracted"
            self.pushed[key].remove(entry.event.event_id)
            self.pushed[key].append(f"-{entry.event.event_id}")

    def wait(self) -> None:
        most = self.random.choice([10, 1_000, 12_000, LEASE])
        self.life.tick(self.random.randint(0, most))

    def take(self) -> None:
        self.jobs += self.life.take(self.random.randint(1, 4), limits=self.random.choice(LIMITS))

    def start(self) -> None:
        if self.jobs:
            job = self.jobs[-1] if self.chance(0.1) else self.jobs.pop(self.random.randrange(len(self.jobs)))
            plans = ["confirmed", "failed", "returned", "superseded", "dead", "uncertain", "reconciling"]
            plans.append("awaiting_approval")
            self.workers.append(self.worker(job, self.random.choices(plans, [40, 12, 3, 20, 4, 4, 4, 6])[0]))

    def go(self) -> None:
        if self.workers:
            worker = self.random.choice(self.workers)
            if next(worker, worker) is worker:
                self.workers.remove(worker)

    def die(self) -> None:
        if self.workers:
            self.workers.pop(self.random.randrange(len(self.workers))).close()

    def lose(self) -> None:
        self.jobs.clear()

    def decide(self) -> None:
        self.answer("approve", "refuse", "replay", "replay", "discard", "confirm")

    def give_up(self) -> None:
        """A person discards whatever it is."""
        unsettled = {w: f["state"] for w, f in self.life.all_manifests().items() if f["state"] not in SETTLED}
        if unsettled:
            window_id = self.random.choice(sorted(unsettled))
            told = self.life.decide(window_id, "discard")
            assert told.outcome == ("wrong_state" if unsettled[window_id] == "processing" else "done")

    def answer(self, *decisions: str) -> None:
        """A person decides on one of the manifests that wait for one; what they say of effects in doubt is true."""
        waiting = self.life.do(self.life.ops.attention())
        if not waiting:
            return
        window_id, decision = self.random.choice(waiting), self.random.choice(decisions)
        led = self.life.manifest(window_id).leader or window_id  # what was handed over together is decided together
        unsure = [e.name for e in self.life.do(self.life.ops.effects(led)) if e.state != "confirmed"]
        happened = {bool(self.world[f"{led}:{name}"]) for name in unsure}
        truth = "" if len(happened) != 1 else "done" if True in happened else "not_done"
        told, _ = self.life.decide(window_id, decision, truth if self.chance(0.5) else "")
        if told == "done" and decision == "confirm":
            self.by_hand.add(led)

    # --- the end ---

    def finish(self) -> None:
        """With workers that live and people who answer, everything comes to its end."""
        life = self.life
        self.workers.clear()
        self.jobs.clear()
        for key in self.keys:
            life.acc.flush(key)
        unsettled: dict[str, str] = {}
        for turn in range(200):
            life.tick(1_800_000 if turn % 3 else 1_000)
            for taken in life.take(20):
                for _ in self.worker(taken, "confirmed"):
                    pass
            life.check()
            unsettled = {w: f["state"] for w, f in life.all_manifests().items() if f["state"] not in SETTLED}
            if not unsettled:
                break
            if set(unsettled.values()) <= ATTENTION:
                self.answer("approve", "replay")
        else:
            raise AssertionError(f"never settled: {unsettled}")

    def check_end(self) -> None:
        life = self.life
        assert life.ready() == {}
        assert life.do(life.ops.in_flight()) == [{}] * life.ops.partitions
        assert life.do(life.ops.attention()) == []
        left = life.all_keys()
        assert not {key for key in left if key.endswith((":outbox", ":attention", ":inflight"))}
        for key in self.keys:
            fields = life.client.hkeys(f"{life.ops.prefix_of(key)}bucket:{key}")
            assert not {b"turn", b"waits", b"joins"} & set(fields)
        assert set(self.world.values()) <= {1}
        for key in self.keys:
            manifests = life.acc.manifests(key)
            handed = [event_id for m in manifests for event_id in m.event_ids]
            assert sorted(handed) == sorted(e for e in self.pushed.get(key, []) if not e.startswith("-"))
            for m in manifests:
                led = m.leader or m.window_id
                if m.state in ("confirmed", "superseded") and m.flow != "none" and led not in self.by_hand:
                    assert self.world[f"{led}:main"] == 1
                if m.state == "superseded":
                    assert m.leader is not None


@pytest.mark.parametrize("seed", range(3))
def test_a_random_life(make_client: MakeClient, namespace: str, seed: int) -> None:
    life = Life(make_client(), namespace, partitions=2)
    base = life.all_keys()
    machine = Machine(life, seed)
    base |= life.all_keys()
    try:
        for n in range(400):
            machine.step()
            if n % 3 == 0:
                life.check()
        life.check()
        machine.finish()
        machine.check_end()
    except AssertionError as problem:
        raise AssertionError("\n".join([f"seed {seed}, after:", *machine.said[-12:], str(problem)])) from problem
    # And when their times have passed, nothing is left.
    for _ in range(24):
        life.tick(6 * 3_600_000)
        life.record()
    left = {key for key in life.all_keys() - base if not key.endswith((":stats", ":audit"))}
    assert left == set()
