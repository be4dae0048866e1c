"""What the loops of a worker have in common: how they wait, how they go on after a failure, how they end."""

from __future__ import annotations

import signal
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from queue import SimpleQueue
from time import monotonic
from typing import Any, Final, TypeVar

from accumulator.client import Accumulator
from accumulator.errors import AccumulatorError
from accumulator.logs import get_logger
from accumulator.store import Operation

T = TypeVar("T")

SLICE: Final = 0.5
"""s a role waits at the most before it looks whether it is to stop."""

SILENCE: Final = 15.0
"""s without a sign of life after which a subscription is made anew."""

_FIRST_PAUSE: Final = 0.1
# Well below the 3 s within which everything that is due is closed after the server has come back.
_LONGEST_PAUSE: Final = 2.0


@contextmanager
def stopped_by(stop: Callable[[], None], *signals: signal.Signals) -> Iterator[None]:
    """These signals call `stop`; only the main thread of a program can say so, elsewhere they stay as they are.

    It is called in a thread of its own: what a signal interrupts may hold the lock that it needs, and so may an earlier
    signal that another one interrupts.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    asked: SimpleQueue[bool] = SimpleQueue()

    def follow() -> None:
        if asked.get():
            stop()

    threading.Thread(target=follow, daemon=True).start()
    before = {name: signal.signal(name, lambda *_: asked.put(True)) for name in signals}
    try:
        yield
    finally:
        for name, handler in before.items():
            signal.signal(name, handler)
        asked.put(False)


class Trouble:
    """A burst of failures: pauses that double, one line in the log when it begins, and one when it has been over for a
    second."""

    CALM: Final = 1.0

    def __init__(self, log: Any) -> None:
        self._log = log
        self._lock = threading.Lock()
        self._failures = 0
        self._in_row = 0
        self._since = 0.0
        self._well_since: float | None = None

    def met(self, problem: BaseException) -> float:
        """Counts a failure; the pause (s) before the next try."""
        with self._lock:
            if not self._failures:
                self._since = monotonic()
                self._log.warning("trouble", problem=type(problem).__name__, detail=_detail(problem))
            self._failures += 1
            self._in_row += 1
            self._well_since = None
            return min(_LONGEST_PAUSE, _FIRST_PAUSE * (1 << min(self._in_row - 1, 10)))

    def over(self) -> None:
        """It went well, this time."""
        if not self._failures:
            return
        with self._lock:
            now = monotonic()
            self._in_row = 0
            if self._well_since is None:
                self._well_since = now
            elif self._failures and now - self._well_since >= self.CALM:
                seconds = round(self._well_since - self._since, 1)
                self._log.info("recovered", failures=self._failures, seconds=seconds)
                self._failures, self._well_since = 0, None


def _detail(problem: BaseException) -> str:
    return str(problem) if isinstance(problem, AccumulatorError) else ""


class Role(ABC):
    """One of a worker's loops. `run()` returns after `stop()`, and survives whatever the server does."""

    name: str

    def __init__(self, accumulator: Accumulator) -> None:
        self.accumulator = accumulator
        self.operations = accumulator.operations
        self.log = get_logger(self.name)
        self.stopping = threading.Event()
        self.trouble = Trouble(self.log)

    def perform(self, operation: Operation[T]) -> T:
        return self.accumulator.store.perform(operation)

    def run(self) -> None:
        """Works until it is stopped."""
        try:
            while not self.stopping.is_set():
                try:
                    self.step()
                except AccumulatorError as problem:
                    self.stopping.wait(self.trouble.met(problem))
        finally:
            self.close()

    def stop(self) -> None:
        """Asks it to end; from any thread."""
        self.stopping.set()

    @abstractmethod
    def step(self) -> None:
        """Waits a little, works a little; calls ``trouble.over()`` once the server has answered well."""

    @abstractmethod
    def close(self) -> None:
        """Gives back what it holds."""


def server_offset(perform: Any, operations: Any) -> float:
    """s that the server's clock is ahead of this process's monotonic one: no other clock of this host counts."""
    before = monotonic()
    micros = perform(operations.server_time())
    return float(micros / 1e6 - (before + monotonic()) / 2)


def read_wake(message: bytes, partitions: int) -> tuple[int, int] | None:
    """(partition, instant in ms) of a wake-up; None for what is none: anybody may publish there."""
    partition, _, instant = message.partition(b" ")
    if not partition.isdigit() or not instant.isdigit() or len(message) > 40 or int(partition) >= partitions:
        return None
    return int(partition), int(instant)
