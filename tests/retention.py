"""What is left of a million events when their times have passed: `make retention`.

Events go to many buckets, the windows are closed by the roles of a worker, half of them handled by its direct runner,
half of a flow with the sink `none`; then the clock goes on until payloads, manifests and buckets have had their times
by the usual policy. It is a virtual one that runs on by itself, on a real server. At the end exactly the keys must be
there that were before, and no more memory be in use.
"""

from __future__ import annotations

import argparse
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from itertools import islice
from typing import Any, Final

import redis
from pydantic import SecretStr

from accumulator import keys
from accumulator.client import Accumulator
from accumulator.embedded import EmbeddedServer
from accumulator.handlers import handler
from accumulator.settings import Settings
from accumulator.worker import Worker

HOUR: Final = 3_600_000
FLOWS: Final = {"handled": "direct", "kept": "none"}
BATCH: Final = 1000
SLACK: Final = 0.02
"""Share of what was added to the memory that may still be in use: tables that shrink at their leisure, and buffers."""


class Clock:
    """The time on the wall, and what it was set forward by (ms)."""

    ahead = 0

    def __call__(self) -> int:
        return time.time_ns() // 1_000_000 + self.ahead


class Retention:
    """A server, a namespace with its worker, and what is measured of them."""

    def __init__(self, server: EmbeddedServer, client: redis.Redis, accumulator: Accumulator, clock: Clock) -> None:
        self.server, self.client, self.accumulator, self.clock = server, client, accumulator, clock
        for flow, sink in FLOWS.items():
            accumulator.load_policy(flow, {"inactivity": "1h", "sink": sink})
        self._pushed = 0

    @contextmanager
    def at_work(self) -> Iterator[None]:
        """Closer, direct runner and janitor run."""
        settings = Settings(redis_url=SecretStr(self.server.url), namespace=self.accumulator.operations.namespace)
        roles = ["closer", "runner", "janitor"]
        with Accumulator(self.server.url, namespace=settings.namespace, clock=self.clock) as own:
            worker = Worker(settings, roles=roles, accumulator=own)
            thread = threading.Thread(target=worker.run)
            thread.start()
            try:
                yield
            finally:
                worker.stop()
                thread.join()

    def push(self, events: int, buckets: int) -> None:
        names = [f"tenant{n % 100}:{flow}:{n}" for n in range(buckets // 2) for flow in FLOWS]
        at = datetime.now(UTC)

        def each() -> Iterator[dict[str, Any]]:
            for number in range(events):
                yield {
                    "event_id": f"{self._pushed + number}",
                    "bucket_key": names[number % len(names)],
                    "kind": "k",
                    "source": "s",
                    "occurred_at": at,
                    "payload": {"number": number, "text": "x" * 80},
                }

        rest = each()
        while batch := list(islice(rest, BATCH)):
            outcomes = {result.outcome for result in self.accumulator.push_many(batch)}
            assert outcomes == {"accepted"}, outcomes
        self._pushed += events

    def pass_time(self, ms: int) -> None:
        """Sets the clock forward, and waits until all that is due by then is done."""
        self.clock.ahead += ms
        until(lambda: not any(due is not None and due <= self.clock() for due in self.due()))

    def due(self) -> list[int | None]:
        return self.accumulator.store.perform(self.accumulator.operations.next_due())

    def settled(self) -> bool:
        """Whether no manifest is unsettled, or without its record."""
        with self.client.pipeline(transaction=False) as pipe:
            for prefix in self.accumulator.operations.prefixes:
                pipe.exists(keys.outbox(prefix), keys.unrecorded(prefix))
            return not any(pipe.execute())

    def names(self) -> set[bytes]:
        return set(self.client.scan_iter(count=1000))

    def memory(self) -> int:
        return int(self.client.info("memory")["used_memory"])

    def live(self, events: int, buckets: int, tell: Callable[[str, float], None]) -> tuple[int, int]:
        """Lets so many events live and go; keys and memory when all was there."""

        def timed(what: str, act: Callable[[], None]) -> None:
            began = time.monotonic()
            act()
            tell(what, time.monotonic() - began)

        timed(f"{events:,} events pushed into {buckets:,} buckets", lambda: self.push(events, buckets))
        with self.at_work():
            timed("their windows closed", lambda: self.pass_time(HOUR))
            timed("all of them handled, and recorded", lambda: until(self.settled))
            full = len(self.names()), self.memory()
            timed("3 days later, payloads gone", lambda: self.pass_time(72 * HOUR))
            timed("14 days later, manifests and buckets gone", lambda: self.pass_time(264 * HOUR))
            timed("a day later, what was left", lambda: self.pass_time(24 * HOUR))
        return full


def until(condition: Callable[[], object]) -> None:
    """Returns once it holds; what takes no step for an hour is given up."""
    pause = threading.Event()
    give_up = time.monotonic() + 3600
    while not condition():
        assert time.monotonic() < give_up, "nothing happens any more"
        pause.wait(0.1)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.retention", description=__doc__)
    parser.add_argument("--events", type=int, default=1_000_000)
    parser.add_argument("--buckets", type=int, default=100_000)
    options = parser.parse_args(arguments)
    handler("handled")(lambda ctx: ctx.events)
    clock = Clock()
    with (
        EmbeddedServer() as server,
        redis.Redis.from_url(server.url, protocol=2) as client,
        Accumulator(server.url, clock=clock) as accumulator,
    ):
        retention = Retention(server, client, accumulator, clock)
        # A first few in every partition: counters and the audit's last entries stay, whatever comes.
        retention.live(4 * BATCH, 2 * BATCH, lambda *_: None)
        base, memory = retention.names(), retention.memory()
        print(f"{server.binary}\nbase: {len(base):,} keys, {memory / 1e6:.1f} MB", flush=True)
        full, most = retention.live(
            options.events, options.buckets, lambda what, seconds: print(f"  {seconds:7.1f} s  {what}", flush=True)
        )
        print(f"full: {full:,} keys, {most / 1e6:.1f} MB")
        left, over = retention.names(), retention.memory() - memory
        print(f"end:  {len(left):,} keys, {(memory + over) / 1e6:.1f} MB")
        kinds = Counter(name.split(b":")[2].decode() for name in left - base if name.count(b":") >= 2)
    wrong = [f"{count:,} keys of {kind} were left" for kind, count in sorted(kinds.items())]
    if left - base and not wrong:
        wrong.append("keys were left")
    if base - left:
        wrong.append(f"{len(base - left):,} keys of the base are gone")
    if over > SLACK * (most - memory) + 4e6:
        wrong.append(f"{over / 1e6:.1f} MB were left")
    for problem in wrong:
        print(f"WRONG: {problem}")
    if not wrong:
        print("back to the base")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
