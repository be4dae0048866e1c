"""Whose turn it is: how a worker takes manifests of a sink, over all partitions, so that nobody waits for somebody
else's thousands.

A partition tells which tenants have manifests ready there. Tenants are served in turn, wherever their manifests lie,
each up to its limit; partitions of one tenant in turn too.
"""

from __future__ import annotations

import random
import secrets
import threading
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from math import inf
from time import monotonic
from typing import Final

from accumulator.attempts import Taken
from accumulator.client import Accumulator
from accumulator.envelope import tenant_of
from accumulator.role import SILENCE, read_wake, server_offset

DEFAULT: Final = "default"
_NO_LIMIT: Final = 1 << 40


class InFlight:
    """How many manifests of each tenant may be dispatched or processing: `limits` maps tenants, and ``default`` for all
    others, to that number; who is in neither has no limit.

    Kept exactly, whatever the number of workers: one at a time counts what a tenant with a limit has in flight, and
    takes. Tenants without one cost nothing of this.
    """

    FULL: Final = 0.05
    """s after which a tenant at its limit is counted again, where nothing of it ended here."""
    BUSY: Final = 0.002
    """s after which it is tried again where somebody else takes of it."""
    HOLD: Final = 2_000
    """ms after which a taker that does not let go is taken for dead."""

    def __init__(self, accumulator: Accumulator, limits: Mapping[str, int] | None = None) -> None:
        self._accumulator = accumulator
        self._limits = dict(limits or {})
        self._full: dict[str, float] = {}  # tenant → when to try again

    def limit(self, tenant: str) -> int | None:
        return self._limits.get(tenant, self._limits.get(DEFAULT))

    def full(self, tenant: str) -> bool:
        """Whether nothing of a tenant can be taken just now, by what is known here."""
        return self._full.get(tenant, 0.0) > monotonic()

    def take(
        self, partition: int, sink: str, tenants: Sequence[str], count: int, watch_ms: int
    ) -> tuple[list[Taken], dict[str, int]]:
        """Takes up to `count` manifests of these tenants in a partition, in turn; and how many each has left there,
        those aside that can't be taken of now. Raises ServerError."""
        perform, operations = self._accumulator.store.perform, self._accumulator.operations
        limits = dict.fromkeys(tenants, _NO_LIMIT)
        limited = [tenant for tenant in tenants if self.limit(tenant) is not None]
        if not limited:
            return perform(operations.take_of(partition, sink, limits, count, watch_ms))
        token, asked = secrets.token_hex(8), monotonic()
        counts = perform(operations.reserve(limited, token, self.HOLD))
        if monotonic() - asked > self.HOLD / 2000:
            counts = {}  # it took so long that it may be somebody else's turn by now
        for tenant in limited:
            counted = counts.get(tenant)
            if counted is None:
                del limits[tenant]
                self._full[tenant] = monotonic() + random.uniform(self.BUSY / 2, self.BUSY)
            else:
                limits[tenant] = counted[partition] + max(0, (self.limit(tenant) or 0) - sum(counted))
        if not limits:
            return [], {}
        found, left = perform(operations.take_of(partition, sink, limits, count, watch_ms, token, list(counts)))
        taken = Counter(tenant_of(one.bucket_key) for one in found)
        for tenant, counted in counts.items():
            if sum(counted) + taken[tenant] >= (self.limit(tenant) or 0):
                self._full[tenant] = monotonic() + self.FULL
        return found, left

    def pause(self) -> float:
        """s until something of a tenant may be taken again."""
        now = monotonic()
        full = {tenant: until for tenant, until in self._full.copy().items() if until > now}  # others write to it
        pause = min((until - now for until in full.values()), default=self.FULL)
        self._full = full
        return pause

    def ended(self, bucket_key: str) -> None:
        """One that was taken here is not in flight any more."""
        self._full.pop(tenant_of(bucket_key), None)


class Turns:
    """Takes manifests of `sink`, tenants in turn.

    One thread listens for news, any number take. What the wake-up channel tells of is there at once; what it failed to
    tell of, within a second. A sink that no policy has costs one look every two seconds.
    """

    LOOK: Final = 1.0
    IDLE: Final = 2.0
    GATHER: Final = 0.005
    """s in which news are gathered, so that not each costs a call."""

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
        choice = self._choose(count)
        if choice is None:
            if patience:
                with self._news:
                    if self._marks == mark:
                        self._news.wait(min(patience, self._in_flight.pause()) if self._waiting else patience)
            return []
        partition, tenants, most, reads = choice
        found, left = self._in_flight.take(partition, self._sink, tenants, most, watch_ms)
        with self._news:
            # Unless what was read meanwhile knows better.
            if self._reads.get(partition) == reads:
                for tenant, number in left.items():
                    if not number:
                        self._forget(tenant, partition)
        return found

    def _choose(self, count: int) -> tuple[int, list[str], int, int | None] | None:
        """The partition of the tenant whose turn it is, the tenants to take from there, how many, and how often the
        partition was read."""
        with self._news:
            full = self._in_flight.full
            first = next((tenant for tenant in self._waiting if not full(tenant)), None)
            if first is None:
                return None
            partition = next(iter(self._waiting[first]))
            others = (t for t in self._there[partition] if t != first and not full(t))
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
