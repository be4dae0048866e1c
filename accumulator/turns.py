"""Whose turn it is: how a worker takes manifests of a sink, over all partitions, so that nobody waits for somebody
else's thousands.

A partition tells which tenants have manifests ready there. Tenants are served in turn, wherever their manifests lie,
each up to its limit; partitions of one tenant in turn too.
"""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from math import inf
from time import monotonic
from typing import Final

from accumulator.client import Accumulator
from accumulator.keys import partition_of
from accumulator.operations import Taken
from accumulator.role import SILENCE, read_wake, server_offset

DEFAULT: Final = "default"
_NO_LIMIT: Final = 1 << 40


def _tenant(bucket_key: str) -> str:
    return bucket_key.split(":", 1)[0]


class InFlight:
    """How many manifests of each tenant are dispatched or processing, and how many may be: `limits` maps tenants, and
    ``default`` for all others, to that number; who is in neither has no limit.

    Counted on the server once a second, and just before each taking when a limit is near. One for all roles of a
    process, which then keep to it exactly; workers side by side may exceed it by what they take at the same moment.
    """

    STALE: Final = 1.0
    NEAR: Final = 0.02
    """s that a count is good for, far from a limit and near it."""

    def __init__(self, accumulator: Accumulator, limits: Mapping[str, int] | None = None) -> None:
        self._lock = threading.RLock()
        self._accumulator = accumulator
        self._limits = dict(limits or {})
        self._counts: list[dict[str, int]] = []  # by partition
        self._totals: dict[str, int] = {}
        self._counted_at = -inf

    def limit(self, tenant: str) -> int | None:
        return self._limits.get(tenant, self._limits.get(DEFAULT))

    def room(self, tenant: str) -> int:
        """How many more of a tenant may be taken, by the last count."""
        limit = self.limit(tenant)
        return _NO_LIMIT if limit is None else limit - self._totals.get(tenant, 0)

    def count(self, older_than: float) -> bool:
        """Counts anew, where the last count is older than so many seconds. Raises ServerError."""
        if not self._limits:
            return False
        with self._lock:
            if monotonic() - self._counted_at < older_than:
                return False
            operations = self._accumulator.operations
            self._counts = self._accumulator.store.perform(operations.in_flight())
            totals: dict[str, int] = {}
            for counts in self._counts:
                for tenant, number in counts.items():
                    totals[tenant] = totals.get(tenant, 0) + number
            self._totals = totals
            self._counted_at = monotonic()
            return True

    def _add(self, partition: int, tenant: str, number: int) -> None:
        counts = self._counts[partition]
        number = max(number, -counts.get(tenant, 0))
        counts[tenant] = counts.get(tenant, 0) + number
        self._totals[tenant] = self._totals.get(tenant, 0) + number

    def take(
        self, partition: int, sink: str, tenants: Sequence[str], count: int, watch_ms: int
    ) -> tuple[list[Taken], dict[str, int]]:
        """Takes up to `count` manifests of these tenants in a partition, in turn; and how many each has left there.
        Raises ServerError."""
        limits = dict.fromkeys(tenants, _NO_LIMIT)
        limited = [tenant for tenant in tenants if self.limit(tenant) is not None]
        if not limited:
            return self._take(partition, sink, limits, count, watch_ms)
        with self._lock:
            self.count(self.STALE)
            if any(self.room(tenant) <= max(count, (self.limit(tenant) or 0) // 4) for tenant in limited):
                self.count(self.NEAR)
            for tenant in limited:
                # By halves, since others may be at it at this very moment.
                room = max(0, self.room(tenant))
                limits[tenant] = self._counts[partition].get(tenant, 0) + min(count, (room + 1) // 2)
            found, left = self._take(partition, sink, limits, count, watch_ms)
            taken = Counter(_tenant(one.bucket_key) for one in found)
            for tenant in limited:
                self._add(partition, tenant, taken[tenant])
            if any(left[tenant] and not taken[tenant] for tenant in limited):
                self.count(0.0)  # others came first
            return found, left

    def take_lost(self, partition: int, sink: str, tenant: str, count: int, watch_ms: int) -> list[Taken]:
        """Takes only such as are in flight already, and whose watch said that they were lost. Raises ServerError."""
        return self._take(partition, sink, {tenant: -1}, count, watch_ms)[0]

    def _take(
        self, partition: int, sink: str, limits: Mapping[str, int], count: int, watch_ms: int
    ) -> tuple[list[Taken], dict[str, int]]:
        operations = self._accumulator.operations
        return self._accumulator.store.perform(operations.take_of(partition, sink, limits, count, watch_ms))

    def ended(self, bucket_key: str) -> None:
        """One that was taken here is not in flight any more."""
        tenant = _tenant(bucket_key)
        if self.limit(tenant) is None:
            return
        with self._lock:
            if self._counts:
                self._add(partition_of(bucket_key, len(self._counts)), tenant, -1)


class Turns:
    """Takes manifests of `sink`, tenants in turn.

    One thread listens for news, any number take. What the wake-up channel tells of is there at once; what it failed to
    tell of, within a second. A sink that no policy has costs one look every two seconds.
    """

    LOOK: Final = 1.0
    IDLE: Final = 2.0
    FULL: Final = 0.05
    """s after which tenants at their limit are counted again."""
    GATHER: Final = 0.005
    """s in which news are gathered, so that not each costs a call."""
    LOST: Final = 256
    """Lists of tenants at their limit that are looked into at each look: for those in flight that were lost."""

    def __init__(self, accumulator: Accumulator, sink: str, in_flight: InFlight | None = None) -> None:
        self._accumulator = accumulator
        self._operations = accumulator.operations
        self._store = accumulator.store
        self._sink = sink
        self._in_flight = in_flight or InFlight(accumulator)
        self._subscription = self._store.subscription(self._operations.channel)
        self.active = False
        """Whether any policy has this sink, or had it and something is left of it."""
        self._offset = 0.0
        self._look_at = 0.0
        self._heard: set[int] = set()
        self._read_at = -inf
        self._news = threading.Condition()
        self._marks = 0
        self._waiting: dict[str, dict[int, None]] = {}  # tenant → partitions, both in the order they are served
        self._there: dict[int, set[str]] = {}  # the same by partition
        self._reading = threading.Lock()
        self._reads: dict[int, int] = {}  # partition → how many times it was read
        self._lost: list[tuple[str, int]] = []

    # --- news ---

    def listen(self, seconds: float) -> None:
        """Waits for news, `seconds` at the most. Raises ServerError."""
        now = monotonic()
        if now >= self._look_at:
            self._look()
        elif not self.active:
            with self._news:
                self._news.wait(min(seconds, self._look_at - now))
        else:
            until = min(now + seconds, self._look_at)
            if self._heard:
                until = min(until, self._read_at + self.GATHER)
            for message in self._subscription.wait(max(0.0, until - now)):
                if not message:
                    self._look()
                    return
                news = read_wake(message, self._operations.partitions)
                # A timer of the future is the closer's.
                if news is not None and news[1] <= (monotonic() + self._offset) * 1000 + 50:
                    self._heard.add(news[0])
            if self._heard and monotonic() >= self._read_at + self.GATHER:
                self._read(self._heard)
                self._heard = set()

    def _look(self) -> None:
        if not self.active:
            self.active = self._store.perform(self._operations.uses(self._sink))
        self._look_at = monotonic() + (self.LOOK if self.active else self.IDLE)
        if not self.active:
            return
        self._offset = server_offset(self._store.perform, self._operations)
        self._subscription.check(SILENCE)
        self._heard = set()
        self._read(range(self._operations.partitions))
        with self._news:
            full = [
                (tenant, p) for tenant, ps in self._waiting.items() if self._in_flight.room(tenant) <= 0 for p in ps
            ]
            self._lost = random.sample(full, min(len(full), self.LOST))

    def _read(self, partitions: Iterable[int]) -> None:
        """Learns which tenants have something ready there."""
        partitions = sorted(partitions)
        with self._reading:  # what was read first is applied first
            found = self._store.perform(self._operations.tenants(self._sink, partitions))
            self._read_at = monotonic()
            with self._news:
                for partition, tenants in zip(partitions, found, strict=True):
                    self._reads[partition] = self._reads.get(partition, 0) + 1
                    for tenant in self._there.get(partition, set()).difference(tenants):
                        self._forget(tenant, partition)
                    for tenant in tenants:
                        self._waiting.setdefault(tenant, {}).setdefault(partition)
                    self._there[partition] = set(tenants)
                if self._waiting:
                    self._tell()

    def _forget(self, tenant: str, partition: int) -> None:
        self._there.get(partition, set()).discard(tenant)
        partitions = self._waiting.get(tenant, {})
        partitions.pop(partition, None)
        if not partitions:
            self._waiting.pop(tenant, None)

    def _tell(self) -> None:
        self._marks += 1
        self._news.notify_all()

    # --- taking ---

    @property
    def waiting(self) -> bool:
        """Whether something waits, by what is known."""
        return bool(self._waiting)

    def take(self, count: int, watch_ms: int, patience: float = 0.0) -> list[Taken]:
        """Takes up to `count` manifests in one partition: of the tenant whose turn it is, and of others that have some
        there, of each its share. Each is put back after `watch_ms` where it was not begun. Where nothing can be taken,
        waits up to `patience` seconds for that to change, and is empty. Raises ServerError."""
        with self._news:
            mark = self._marks
            lost = self._lost.pop() if self._lost else None
        if lost is not None:
            tenant, partition = lost
            found = self._in_flight.take_lost(partition, self._sink, tenant, count, watch_ms)
            if found:
                return found
        choice = self._choose(count)
        if choice is None and self._waiting and self._in_flight.count(self.FULL):
            choice = self._choose(count)
        if choice is None:
            if patience:
                with self._news:
                    if self._marks == mark:
                        self._news.wait(min(patience, self.FULL) if self._waiting else patience)
            return []
        partition, tenants, most, reads = choice
        found, left = self._in_flight.take(partition, self._sink, tenants, most, watch_ms)
        with self._news:
            # Unless what was read meanwhile knows better.
            if self._reads.get(partition) == reads:
                for tenant in tenants:
                    if not left[tenant]:
                        self._forget(tenant, partition)
        return found

    def _choose(self, count: int) -> tuple[int, list[str], int, int | None] | None:
        """The partition of the tenant whose turn it is, the tenants to take from there, how many, and how often the
        partition was read."""
        with self._news:
            room = self._in_flight.room
            first = next((tenant for tenant in self._waiting if room(tenant) > 0), None)
            if first is None:
                return None
            partition = next(iter(self._waiting[first]))
            others = (t for t in self._there[partition] if t != first and room(t) > 0)
            tenants = [first, *islice(others, count - 1)]
            most = max(len(tenants), count * len(tenants) // len(self._waiting))
            for tenant in tenants:
                partitions = self._waiting.pop(tenant)
                del partitions[partition]
                partitions[partition] = None
                self._waiting[tenant] = partitions
            return partition, tenants, most, self._reads.get(partition)

    def ended(self, bucket_key: str) -> None:
        """The attempt at a manifest that was taken here has ended."""
        self._in_flight.ended(bucket_key)

    def wake(self) -> None:
        """Ends the waiting of all that take."""
        with self._news:
            self._tell()

    def close(self) -> None:
        self._subscription.close()
