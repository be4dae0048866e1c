"""Random histories through the real scripts: the model agrees with the outcome, and the keys with each other.

The seeds are fixed, so that a run means the same twice; `make histories SEEDS=…` takes as many more as wanted.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
import redis

from accumulator.operations import Taken
from accumulator.simulate import _Run, run_scenario
from accumulator.store import Store
from tests.conftest import KINDS, MakeClient
from tests.histories import compare, differences, history
from tests.invariants import check_invariants
from tests.model import simulate

CHUNK = 25
CHUNKS = [
    pytest.param(kind, first, id=f"{kind}-{first}")
    for kind, seeds in (("valkey", 150), ("redis", 50))
    if kind in KINDS
    for first in range(0, seeds, CHUNK)
]


@pytest.mark.parametrize(("server_kind", "first"), CHUNKS)
def test_the_scripts_and_the_model_agree(make_client: MakeClient, first: int) -> None:
    store = Store(make_client())
    seeds = range(first, first + CHUNK)
    found = compare(lambda scenarios: [run_scenario(store, one) for one in scenarios], [history(s) for s in seeds])
    assert {seed: lines for seed, lines in zip(seeds, found, strict=True) if lines} == {}


class Worked(_Run):
    """A history in which runners take, begin and settle manifests between the steps, well and badly. After each step
    the keys are compared with each other."""

    def __init__(self, client: redis.Redis, scenario: dict[str, Any], seed: int, *, check: bool = True) -> None:
        super().__init__(Store(client), scenario)
        self.client = client
        self.random = random.Random(seed)
        self.begun: list[tuple[Taken, str]] = []
        self.handled = 0
        self.checked = check

    def check(self) -> None:
        if self.checked:
            check_invariants(self.client, self.operations.namespace)

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

    def handle(self) -> bool:
        """Whether anything was taken or settled."""
        perform, chance, done = self.store.perform, self.random.random, False
        for partition in range(self.operations.partitions):
            if chance() < 0.4:
                for taken in perform(self.operations.take(partition, "rq", 3, self.random.choice([1, 50, 60_000]))):
                    done = True
                    token = f"{self.random.getrandbits(64):016x}"
                    if chance() < 0.8 and perform(
                        self.operations.begin(
                            taken.window_id, taken.attempt, token, self.random.choice([1, 300, 60_000])
                        )
                    ):
                        assert perform(self.operations.begin(taken.window_id, taken.attempt, token, 60_000))
                        assert not perform(self.operations.begin(taken.window_id, taken.attempt, "0" * 16, 60_000))
                        self.begun.append((taken, token))
        self.random.shuffle(self.begun)
        while self.begun and chance() < 0.6:
            taken, token = self.begun.pop()
            state = self.random.choice(["confirmed", "confirmed", "retrying", "dead"])
            delay = self.random.choice([0, 1, 1000]) if state == "retrying" else 0
            self.handled += perform(self.operations.settle(taken.window_id, token, state, "ValueError", delay))
            assert not perform(self.operations.settle(taken.window_id, "0" * 16, "dead", "stale", 0))
            done = True
        return done


@pytest.mark.parametrize("first", range(1000, 1010, 5))
def test_the_keys_agree_after_every_operation(make_client: MakeClient, first: int) -> None:
    client = make_client()
    handled = 0
    for seed in range(first, first + 5):
        scenario = history(seed)
        run = Worked(client, scenario, seed)
        try:
            answer = run.run()
        except AssertionError as problem:
            pytest.fail(f"seed {seed}: {problem}")
        finally:
            run.drop()
        assert list(differences("answer", answer, simulate(scenario))) == [], f"seed {seed}"
        handled += run.handled
    assert handled
