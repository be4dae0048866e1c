"""The closer: does what falls due, at the instant at which it does.

It knows when each partition's next timer is due, sleeps until the first of them, and is woken when an earlier one
appears. Any number of closers may run side by side, on any hosts: each timer is handled once, by whichever script comes
first, and due instants are the server's, whatever a host's clock says.
"""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic
from typing import Final

from accumulator.attempts import Tick
from accumulator.client import Accumulator
from accumulator.errors import AccumulatorError
from accumulator.role import SILENCE, SLICE, Role, read_wake, server_offset


class Closer(Role):
    """Closes windows that are due, and ends the leases, watches and back-offs of manifests.

    `upkeep` is called at the start and each minute, by default to bring partitions that missed a policy up to date.
    """

    name = "closer"

    POLL: Final = 5.0
    """s between looks at every partition: the net under lost wake-ups."""
    LIMIT: Final = 200
    """Timers a script call handles at the most: a few ms of the server's time."""
    ROUND: Final = 512
    """Timers of one round of calls, during which the server may serve nobody else."""
    PARTITIONS: Final = 32
    """Partitions of one round."""

    def __init__(self, accumulator: Accumulator, upkeep: Callable[[], None] | None = None) -> None:
        super().__init__(accumulator)
        self._upkeep = upkeep or self._repair
        self._subscription = accumulator.store.subscription(self.operations.channel)
        self._offset: list[float] = []  # by partition: a cluster's nodes have clocks of their own
        self._due: dict[int, float] = {}  # partition → when its next timer is due, by our monotonic clock
        self._ticked: dict[int, int] = {}  # partition → the server's instant (ms) of our last tick
        self._poll_at = 0.0
        self._upkeep_at = 0.0
        self._told: dict[str, float] = {}

    def step(self) -> None:
        now = monotonic()
        if now >= self._poll_at:
            self._poll()
        if now >= self._upkeep_at:
            self._upkeep()
            self._upkeep_at = monotonic() + 60
        due = sorted((at, partition) for partition, at in self._due.items() if at <= now)
        if due:
            self._tick([partition for _, partition in due[: self.PARTITIONS]])
            pause = 0.0
        else:
            pause = min([self._poll_at, now + SLICE, *self._due.values()]) - now
        for message in self._subscription.wait(pause):
            self._hear(message)
        if not due:
            self.trouble.over()

    def close(self) -> None:
        self._subscription.close()

    def _poll(self) -> None:
        if self.perform(self.operations.meet()):
            self.log.warning("namespace_made_anew")
            self._upkeep_at = 0.0
        offset = server_offset(self.perform, self.operations)
        heads = self.perform(self.operations.next_due())
        self._offset = [offset] * len(heads)
        self._due = {p: head / 1000 - offset for p, head in enumerate(heads) if head is not None}
        self._ticked = {}
        self._subscription.check(SILENCE)
        self._poll_at = monotonic() + self.POLL

    def _hear(self, message: bytes) -> None:
        news = read_wake(message, len(self._offset))
        if news is None:
            if not message:
                self._poll_at = 0.0  # subscribed just now: whatever was published before is to be looked for
            return
        partition, instant = news
        # What was due by our last tick there is done: this tells of a manifest that is ready.
        if instant > self._ticked.get(partition, 0):
            at = instant / 1000 - self._offset[partition]
            self._due[partition] = min(at, self._due.get(partition, at))

    def _tick(self, partitions: list[int]) -> None:
        limit = max(10, min(self.LIMIT, self.ROUND // len(partitions)))
        ticks = self.perform(self.operations.tick_all(partitions, limit))
        failed = next((tick for tick in ticks if isinstance(tick, AccumulatorError)), None)
        pause = self.trouble.met(failed) if failed else 0.0
        now = monotonic()
        for partition, tick in zip(partitions, ticks, strict=True):
            if isinstance(tick, AccumulatorError):
                self._due[partition] = now + pause
            else:
                self._next(partition, tick, now, limit)
        if failed is None:
            self.trouble.over()

    def _next(self, partition: int, tick: Tick, now: float, limit: int) -> None:
        self._ticked[partition] = tick.now
        # The poll's measure is finer; this one sees a clock that was set, or a node's own.
        if abs(tick.now / 1000 - now - self._offset[partition]) > 0.05:
            self._offset[partition] = tick.now / 1000 - now
        if tick.handled >= limit:
            self._due[partition] = now
        elif tick.next_due is None:
            self._due.pop(partition, None)
        else:
            self._due[partition] = tick.next_due / 1000 - self._offset[partition]
        if tick.closed:
            self.log.debug("closed", partition=partition, windows=tick.closed)
        if tick.failure is not None:
            self._tell("tick_failed", partition=partition, detail=tick.failure[:200])
        if tick.orphans:
            self._tell("orphan_timers", partition=partition, timers=tick.orphans)

    def _tell(self, event: str, **fields: object) -> None:
        """At most once a minute for each event."""
        if monotonic() - self._told.get(event, -60.0) >= 60:
            self._told[event] = monotonic()
            self.log.error(event, **fields)

    def _repair(self) -> None:
        self.perform(self.operations.watch())
        behind = self.perform(self.operations.repair_policies())
        if behind:
            self.log.warning("policies_repaired", partitions=behind)
