"""The measurements of `make bench`: each figure beside the same work without us, on the same server, in one run.

Ours and theirs alternate in small chunks and the median of the chunks' ratios counts, since a machine is never quiet.
Rows of the server compare its CPU time (of its main thread), rows of a client the time on the wall. Entries have 300
bytes and go to 1,000 buckets; the append-only file is off. "Theirs" is redis-py's XADD of the same entries to streams
of the same buckets in the same order, or RQ's `enqueue_many` of as many jobs with the same bytes. BullMQ is a program
of another language and left out.
"""

from __future__ import annotations

import argparse
import fnmatch
import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from itertools import islice
from typing import Any, Final, NamedTuple

import redis
import rq

from accumulator.client import Accumulator
from accumulator.embedded import EmbeddedServer, ServerBinary, find_servers, wheel_server
from accumulator.envelope import Event
from accumulator.operations import Outcome

BUCKETS: Final = 1000
ENTRY_BYTES: Final = 300
ALL_AT_ONCE: Final = 1000
"""Events in a `push_many` or a pipeline of a client row."""

POLICIES: Final[dict[str, dict[str, Any]]] = {
    "stay": {"inactivity": "1h", "max_age": "2h", "max_events": 100_000},
    "soon": {"inactivity": "1ms"},
}
"""Windows of flow `stay` outlast every row; those of `soon` are due at once."""

_ids = iter(range(sys.maxsize))
_random = random.Random(1)


def bucket(number: int, flow: str = "stay") -> str:
    return f"tenant:{flow}:{number:06d}"


def fields(key: str) -> dict[str, Any]:
    """A new event whose stored envelope has ENTRY_BYTES."""
    number = next(_ids)
    payload = {"order": 10_000_000 + number, "sku": "AB-1234", "amount": 12.5, "note": _NOTE}
    return {
        "event_id": f"event-{number:010d}",
        "bucket_key": key,
        "kind": "item_added",
        "occurred_at": _OCCURRED,
        "source": "shop",
        "payload": payload,
    }


def envelope(event: dict[str, Any]) -> bytes:
    return Event.of(event).packed.envelope


_OCCURRED: Final = datetime(2026, 10, 16, 14, 0, 0, 250_000, UTC)
_NOTE = "x" * 100
_NOTE += "x" * (ENTRY_BYTES - len(envelope(fields(bucket(0)))))


class Figure(NamedTuple):
    """What a row found. `value` stands in the column that has a target."""

    value: float
    detail: str


class Batch(NamedTuple):
    """Commands that go in one write, encoded before the clock runs."""

    data: Sequence[bytes]
    commands: int


class Bench:
    """One server with what talks to it; `scale` shrinks every row."""

    def __init__(self, binary: ServerBinary, scale: float, crowd: int, stack: ExitStack) -> None:
        self.scale = scale
        self.crowd_size = crowd
        self._stack = stack
        self._crowds: dict[int, Bench] = {}
        self.binary = binary
        self.server = stack.enter_context(EmbeddedServer(binary=binary))
        self.client = stack.enter_context(redis.Redis.from_url(self.server.url, protocol=2))
        self.connection = self.client.connection_pool.get_connection()
        self.accumulator = stack.enter_context(Accumulator(self.server.url))

    def many(self, count: int, least: int = 1) -> int:
        return max(least, int(count * self.scale))

    def fresh(self, partitions: int = 64, opened: int = BUCKETS) -> Accumulator:
        """An empty server and a namespace in which `opened` windows are open (and the scripts loaded)."""
        self.client.flushall()
        made = Accumulator(self.server.url, partitions=partitions)
        self.accumulator = self._stack.enter_context(made)
        for flow, policy in POLICIES.items():
            made.load_policy(flow, policy)
        self.push(bucket(n) for n in range(opened))
        return made

    def push(self, keys: Iterator[str]) -> None:
        while part := [fields(key) for key in islice(keys, 5000)]:
            receipts = self.accumulator.push_many(part)
            assert all(receipt.outcome is Outcome.ACCEPTED for receipt in receipts)

    def crowd(self, windows: int) -> Bench:
        """Another server of the same kind with so many windows open; it stays for the rows that follow."""
        if windows not in self._crowds:
            found = self._crowds[windows] = Bench(self.binary, self.scale, self.crowd_size, self._stack)
            found.fresh(opened=windows)
        return self._crowds[windows]

    # --- the server's side

    def encode(self, commands: Sequence[tuple[Any, ...]], at_once: int) -> list[Batch]:
        parts = [commands[i : i + at_once] for i in range(0, len(commands), at_once)]
        return [Batch(self.connection.pack_commands(part), len(part)) for part in parts]

    def accepts(self, calls: Sequence[Sequence[str]], at_once: int) -> list[Batch]:
        """Accept calls as the client makes them, one for each list of bucket keys (of one partition)."""
        commands = []
        for keys in calls:
            for call in next(self.accumulator.operations.push_many([Event.of(fields(key)) for key in keys])):
                assert call.script is not None
                commands.append(("EVALSHA", call.script.sha, 1, *call.args))
        return self.encode(commands, at_once)

    def xadds(self, calls: Sequence[Sequence[str]]) -> list[Batch]:
        return self.encode(
            [("XADD", f"bare:{key}", "*", "e", envelope(fields(key))) for keys in calls for key in keys], 100
        )

    def cpu(self, batches: Sequence[Batch]) -> float:
        """Seconds of the server's main thread that these take."""
        before = self._spent()
        for batch in batches:
            self.connection.send_packed_command(batch.data, check_health=False)
            for _ in range(batch.commands):
                self.connection.read_response()
        return self._spent() - before

    def _spent(self) -> float:
        info: dict[str, Any] = self.client.info("cpu")
        return float(info["used_cpu_user_main_thread"] + info["used_cpu_sys_main_thread"])

    def close_due(self, limit: int = 100) -> list[tuple[int, float]]:
        """Closes what is due as a worker does: windows closed and seconds, for each round over all partitions."""
        operations = self.accumulator.operations
        rounds: list[tuple[int, float]] = []
        partitions = range(operations.partitions)
        while True:
            begun = time.perf_counter()
            ticks = self.accumulator.store.perform(operations.tick_all(partitions, limit))
            took = time.perf_counter() - begun
            closed = 0
            for tick in ticks:
                assert not isinstance(tick, Exception)
                closed += tick.closed
            if not closed:
                return rounds
            rounds.append((closed, took))

    def used_memory(self) -> int:
        info: dict[str, Any] = self.client.info("memory")
        return int(info["used_memory"])


def compare(pairs: Iterator[tuple[float, float]], events: int, what: str) -> Figure:
    """Theirs over ours, of (ours, theirs) seconds for `events` each."""
    found = list(pairs)
    ours, theirs = (statistics.median(column) / events * 1e6 for column in zip(*found, strict=True))
    return Figure(statistics.median(b / a for a, b in found), f"{ours:.2f} µs {what}, {theirs:.2f} without us")


def timed(work: Callable[[], object]) -> float:
    begun = time.perf_counter()
    work()
    return time.perf_counter() - begun


# --- the rows -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    name: str
    floor: float | None
    stretch: float | None
    unit: str
    measure: Callable[[Bench], Figure]

    def verdict(self, value: float) -> str:
        if self.floor is None or self.stretch is None:
            return ""
        more = self.stretch > self.floor
        if value >= self.stretch if more else value <= self.stretch:
            return "stretch"
        return "ok" if (value >= self.floor if more else value <= self.floor) else "below"


ROWS: list[Row] = []


def row(
    name: str, floor: float | None = None, stretch: float | None = None, unit: str = "×"
) -> Callable[[Callable[[Bench], Figure]], Callable[[Bench], Figure]]:
    def register(measure: Callable[[Bench], Figure]) -> Callable[[Bench], Figure]:
        ROWS.append(Row(name, floor, stretch, unit, measure))
        return measure

    return register


def accept(bench: Bench, draw: Callable[[int], list[str]], size: int, chunks: int = 32) -> Figure:
    """Server CPU of accept calls of `size` events each, whose buckets `draw(call)` names, against bare XADD."""
    bench.fresh(partitions=1)
    events = max(size, 2000)
    numbers = iter(range(sys.maxsize))

    def chunk() -> tuple[float, float]:
        calls = [draw(next(numbers)) for _ in range(events // size)]
        return bench.cpu(bench.accepts(calls, max(1, min(100, 1000 // size)))), bench.cpu(bench.xadds(calls))

    chunk()  # the streams of theirs exist as well
    found = compare((chunk() for _ in range(bench.many(chunks))), events, "of server CPU")
    assert "duplicates" not in bench.accumulator.counters()
    return found


@row("accept: one event a call, pipelined", 0.15, 0.20)
def _(bench: Bench) -> Figure:
    return accept(bench, lambda call: [bucket(call % BUCKETS)], 1)


@row("accept: 100 events of one bucket a call", 0.70, 1.0)
def _(bench: Bench) -> Figure:
    return accept(bench, lambda call: [bucket(call % BUCKETS)] * 100, 100)


@row("accept: 100 events over random buckets a call", 0.18, 0.30)
def _(bench: Bench) -> Figure:
    return accept(bench, lambda _: [bucket(_random.randrange(BUCKETS)) for _ in range(100)], 100)


@row("accept: 500 events over skewed buckets a call", 0.27, 0.40)
def _(bench: Bench) -> Figure:
    return accept(bench, lambda _: [bucket(int(_random.paretovariate(1)) % BUCKETS) for _ in range(500)], 500)


def push_many(bench: Bench, checked: bool) -> Figure:
    """`push_many` of mappings, or of events `checked` before, against a pipeline of redis-py, over random buckets."""
    accumulator = bench.fresh()

    def theirs(parts: list[tuple[str, dict[Any, Any]]]) -> None:
        pipe = bench.client.pipeline(transaction=False)
        for key, entry in parts:
            pipe.xadd(key, entry)
        pipe.execute()

    def chunk() -> tuple[float, float]:
        events = [fields(bucket(_random.randrange(BUCKETS))) for _ in range(ALL_AT_ONCE)]
        parts: list[tuple[str, dict[Any, Any]]] = [(f"bare:{e['bucket_key']}", {"e": envelope(e)}) for e in events]
        given = [Event.of(event) for event in events] if checked else events
        return timed(lambda: accumulator.push_many(given)), timed(lambda: theirs(parts))

    chunk()
    return compare((chunk() for _ in range(bench.many(30))), ALL_AT_ONCE, "an event")


@row("push_many from one process, checks included", 0.45, 0.70)
def _(bench: Bench) -> Figure:
    return push_many(bench, checked=False)


@row("push_many of Event objects made before")
def _(bench: Bench) -> Figure:
    return push_many(bench, checked=True)


@row("push one at a time", 0.75, 0.85)
def _(bench: Bench) -> Figure:
    accumulator, count = bench.fresh(), 100

    def chunk() -> tuple[float, float]:
        events = [fields(bucket(_random.randrange(BUCKETS))) for _ in range(count)]
        parts = [(f"bare:{event['bucket_key']}", envelope(event)) for event in events]
        return (
            timed(lambda: [accumulator.push(event) for event in events]),
            timed(lambda: [bench.client.xadd(key, {"e": entry}) for key, entry in parts]),
        )

    chunk()
    return compare((chunk() for _ in range(bench.many(40))), count, "an event")


def against_rq(bench: Bench, one_bucket: bool) -> Figure:
    accumulator = bench.fresh()
    queue = rq.Queue("bare", connection=bench.client)

    def chunk(number: int) -> tuple[float, float]:
        keys = [bucket(number if one_bucket else _random.randrange(BUCKETS)) for _ in range(ALL_AT_ONCE)]
        events = [fields(key) for key in keys]
        entries = [envelope(event).decode() for event in events]
        return (
            timed(lambda: accumulator.push_many(events)),
            timed(lambda: queue.enqueue_many([queue.prepare_data("job.run", (entry,)) for entry in entries])),
        )

    chunk(0)
    return compare((chunk(n) for n in range(bench.many(12))), ALL_AT_ONCE, "an event")


@row("against RQ enqueue_many, random buckets", 4, 6)
def _(bench: Bench) -> Figure:
    return against_rq(bench, one_bucket=False)


@row("against RQ enqueue_many, events of one bucket", 8, 12)
def _(bench: Bench) -> Figure:
    return against_rq(bench, one_bucket=True)


@row("closings by one worker", 50_000, 65_000, "/s")
def _(bench: Bench) -> Figure:
    bench.fresh(opened=0)
    before = bench.many(48_000, 64)
    bench.push(bucket(n, "soon") for n in range(before))
    spent = bench._spent()
    rounds = bench.close_due()
    spent = bench._spent() - spent
    closed = sum(count for count, _ in rounds)
    assert closed == before
    rates = [count / took for count, took in rounds if count >= rounds[0][0] / 2]
    return Figure(statistics.median(rates), f"{spent / closed * 1e6:.1f} µs of server CPU each, {closed} windows")


@row("server CPU of an accept, many open windows against 1,000", 1.3, 1.1)
def _(bench: Bench) -> Figure:
    few, many = bench.crowd(1000), bench.crowd(bench.crowd_size)

    def cost(where: Bench, windows: int) -> float:
        calls = [[bucket(_random.randrange(windows))] for _ in range(2000)]
        return where.cpu(where.accepts(calls, 100))

    pairs = ((cost(few, 1000), cost(many, bench.crowd_size)) for _ in range(bench.many(16)))
    found = compare(pairs, 2000, "with 1,000 open")
    return Figure(found.value, found.detail.replace("without us", f"with {bench.crowd_size:,}"))


@row("server CPU of a closing, many open windows against 1,000", 1.3, 1.1)
def _(bench: Bench) -> Figure:
    few, many = bench.crowd(1000), bench.crowd(bench.crowd_size)
    count = 2000
    numbers = iter(range(1_000_000, sys.maxsize))

    def cost(where: Bench) -> float:
        where.push(bucket(next(numbers), "soon") for _ in range(count))
        before = where._spent()
        closed = sum(closed for closed, _ in where.close_due())
        assert closed == count
        return where._spent() - before

    found = compare(((cost(few), cost(many)) for _ in range(bench.many(8))), count, "with 1,000 open")
    return Figure(found.value, found.detail.replace("without us", f"with {bench.crowd_size:,}"))


@row("memory: open bucket with one 300-byte event", 1950, 1200, " B")
def _(bench: Bench) -> Figure:
    bench.fresh(opened=0)
    before, count = bench.used_memory(), bench.many(20_000, 100)
    bench.push(bucket(n) for n in range(count))
    return Figure((bench.used_memory() - before) / count, f"{count} buckets, all their keys")


def further(bench: Bench, upto: int) -> Figure:
    count = bench.many(40_000 // upto, 100)
    bench.fresh(opened=count)
    before = bench.used_memory()
    for _ in range(upto - 1):
        bench.push(bucket(n) for n in range(count))
    return Figure((bench.used_memory() - before) / count / (upto - 1), f"2nd to {upto}th of a window")


@row("memory: each further event", 430, 340, " B")
def _(bench: Bench) -> Figure:
    return further(bench, 10)


@row("memory: each further event of a longer window", unit=" B")
def _(bench: Bench) -> Figure:
    return further(bench, 100)


# --- the table ------------------------------------------------------------------------------------


def shown(value: float | None, unit: str) -> str:
    if value is None:
        return ""
    return f"{value:,.0f}{unit}" if value >= 100 else f"{value:.2f}".rstrip("0").rstrip(".") + unit


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bench", description=__doc__.split("\n")[0])
    parser.add_argument("--rows", default="*", metavar="PATTERN", help="only rows whose name holds this")
    parser.add_argument("--server", choices=("redis", "valkey", "both"), default="both", help="which server (both)")
    parser.add_argument("--full", action="store_true", help="1,000,000 open windows instead of 100,000: minutes, 3 GB")
    parser.add_argument("--scale", type=float, default=1.0, help="so much of each row's work (1)")
    options = parser.parse_args(arguments)
    rows = [row for row in ROWS if fnmatch.fnmatch(row.name, f"*{options.rows}*")]
    found: dict[str, ServerBinary] = {}
    for binary in filter(None, [*find_servers(), wheel_server()]):
        if options.server in (binary.kind, "both"):
            found.setdefault(binary.kind, binary)
    if not rows or not found:
        print("no such row" if not rows else "no such server here", file=sys.stderr)
        return 2
    width = max(len(row.name) for row in rows)
    crowd = 1_000_000 if options.full else int(100_000 * min(1, options.scale))
    for binary in found.values():
        print(f"{binary}, redis-py {version('redis')}, rq {version('rq')}, Python {sys.version.split()[0]},", end=" ")
        print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
        print(f"{'':{width}} {'value':>10} {'floor':>9} {'stretch':>9}")
        with ExitStack() as stack:
            bench = Bench(binary, options.scale, crowd, stack)
            for row in rows:
                value, detail = row.measure(bench)
                targets = f"{shown(row.floor, row.unit):>9} {shown(row.stretch, row.unit):>9}  {row.verdict(value):7}"
                print(f"{row.name:{width}} {shown(value, row.unit):>10} {targets}  {detail}", flush=True)
        print()
    return 0


if __name__ == "__main__":
    sys.exit(main())
