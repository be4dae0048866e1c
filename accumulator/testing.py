"""For tests of your own policies: an accumulator on a fake server, under a clock that you move.

A pytest plugin, so its fixtures are there without an import::

    def test_an_order_closes_after_ten_quiet_seconds(accumulator, accumulator_clock):
        accumulator.load_policy("order", {"inactivity": "10s"})
        accumulator.push(
            event_id="e1", bucket_key="shop:order:7", kind="paid", source="web", occurred_at=accumulator_clock.instant
        )
        accumulator_clock.advance("10s")
        (manifest,) = accumulator.manifests("shop:order:7")
        assert manifest.close_reason == "inactivity"

It runs the scripts that run in production, in this process and within milliseconds; `handle_waiting` runs handlers. The
fake needs the extra ``testing`` (``pip install 'event-accumulator[testing]'``); without it everything else of pytest
works, and the fixture says what is missing. A real server under the same clock::

    clock.attach(Accumulator(url, namespace="test", clock=clock))
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import UTC, datetime, timedelta
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Final

try:
    import pytest
except ModuleNotFoundError:  # pytest loads this module itself; whoever else does should hear what it is
    raise ModuleNotFoundError(
        "accumulator.testing is a pytest plugin: pip install 'event-accumulator[testing]'", name="pytest"
    ) from None

# Nothing of the package is imported here: this module is loaded into every pytest run on a machine that has it.
if TYPE_CHECKING:
    from accumulator.client import Accumulator

START: Final = datetime(2026, 1, 1, tzinfo=UTC)
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_MS: Final = timedelta(milliseconds=1)
_LIMIT: Final = 200


class VirtualClock:
    """The only clock of the accumulators attached to it. It stands still, but for `advance` and `advance_to`, and acts
    for their workers: whatever falls due on the way is done at the very instant at which it does.

    `start` is an aware datetime, cut to the millisecond.
    """

    def __init__(self, start: datetime = START) -> None:
        self._now = _ms(start)
        self._accumulators: list[Accumulator] = []

    @property
    def now(self) -> int:
        """ms since the epoch."""
        return self._now

    @property
    def instant(self) -> datetime:
        """The same as a datetime in UTC."""
        return _EPOCH + self._now * _MS

    def __call__(self) -> int:
        """`now`: what an accumulator takes as its `clock`."""
        return self._now

    def attach(self, accumulator: Accumulator) -> Accumulator:
        """Acts for the workers of that accumulator, which was made with this clock; returns it."""
        self._accumulators.append(accumulator)
        return accumulator

    def advance(self, duration: str | int = "0s", *, worker: bool = True) -> None:
        """Goes on by `duration` (``"10s"``, or ms), the last instant included. Without `worker`, nothing that falls due
        is done: as if every worker were down. Raises InvalidInput for what is no duration."""
        from accumulator.policy import duration_option

        text = f"{duration}ms" if isinstance(duration, int) and not isinstance(duration, bool) else duration
        self._go(self._now + duration_option(text, zero=True), worker)

    def advance_to(self, instant: datetime, *, worker: bool = True) -> None:
        """Goes on to an aware datetime, that instant included. Raises ValueError where it lies in the past."""
        until = _ms(instant)
        if until < self._now:
            raise ValueError(f"the clock can't go back, from {self.instant.isoformat()} to {instant.isoformat()}")
        self._go(until, worker)

    def _go(self, until: int, worker: bool) -> None:
        while worker:
            due = [d for a in self._accumulators for d in a.store.perform(a.operations.next_due()) if d is not None]
            if not due or min(due) > until:
                break
            self._now = max(self._now, min(due))
            for accumulator in self._accumulators:
                self._tick(accumulator)
        self._now = until

    @staticmethod
    def _tick(accumulator: Accumulator) -> None:
        from accumulator.errors import AccumulatorError

        operations, perform = accumulator.operations, accumulator.store.perform
        for tick in perform(operations.tick_all(range(operations.partitions), _LIMIT)):
            if isinstance(tick, AccumulatorError):
                raise tick
            if tick.failure:
                raise AccumulatorError(f"the worker's tick failed: {tick.failure}")
        for window_id in perform(operations.unrecorded()):  # the janitor's part, without which no payload goes
            manifest = perform(operations.manifest(window_id))
            if manifest is not None:
                perform(operations.record(manifest))


def handle_waiting(accumulator: Accumulator) -> int:
    """Does what the runners of the sinks `direct` and `rq` do: makes an attempt at each manifest, and at each step of a
    ladder, whose turn has come, one after the other in this thread, until there is none. Returns how many.

    Handlers are those that were registered, by importing their module; raises HandlerMissing where one is not. What a
    handler raised is not raised here: it is in the state and the error of its manifest, and another attempt waits for
    the clock.
    """
    from accumulator.policy import HANDLED_SINKS
    from accumulator.runner import WATCH, Attempt

    operations, perform = accumulator.operations, accumulator.store.perform
    attempts = 0
    while True:
        taken = [
            one
            for partition in range(operations.partitions)
            for sink in sorted(HANDLED_SINKS)
            for one in perform(operations.take(partition, sink, _LIMIT, WATCH))
        ]
        made = [Attempt(accumulator, one.window_id, one.attempt, one.bucket_key) for one in taken]
        for attempt in made:
            attempt.run()
        for attempt in made:  # raised once all have had their turn: none is left taken
            if attempt.missing is not None:
                raise attempt.missing
        if not taken:
            return attempts
        attempts += len(taken)


def _ms(instant: datetime) -> int:
    if instant.utcoffset() is None:
        raise ValueError("the instant must carry an offset: datetime(…, tzinfo=UTC)")
    return (instant - _EPOCH) // _MS


@pytest.fixture
def accumulator_clock() -> VirtualClock:
    """The clock of the fixture `accumulator`, at 2026-01-01T00:00:00Z."""
    return VirtualClock()


@pytest.fixture
def accumulator_policies() -> Mapping[str, Any]:
    """Flow → policy, to be loaded at the beginning: none. Define a fixture of this name to have yours in every test,
    say ``return Config.load("config/accumulator.yaml").policies``."""
    return {}


@pytest.fixture
def accumulator(accumulator_clock: VirtualClock, accumulator_policies: Mapping[str, Any]) -> Iterator[Accumulator]:
    """An Accumulator on an empty fake server of its own, under `accumulator_clock`."""
    missing = [name for name in ("fakeredis", "lupa") if find_spec(name) is None]
    if missing:
        pytest.fail(
            f"the fixture `accumulator` needs {' and '.join(missing)}: pip install 'event-accumulator[testing]'",
            pytrace=False,
        )
    import fakeredis

    from accumulator.client import Accumulator

    # One partition: what becomes of a bucket does not depend on their number, what a call of the fake costs does.
    with fakeredis.FakeRedis(server=fakeredis.FakeServer(version=(7, 0), server_type="redis")) as client:
        made = Accumulator(client, namespace="test", partitions=1, clock=accumulator_clock)
        for flow, policy in accumulator_policies.items():
            made.load_policy(flow, policy)
        yield accumulator_clock.attach(made)
