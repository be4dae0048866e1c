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
import multiprocessing
import os
import random
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from importlib.metadata import version
from itertools import count, islice
from typing import Any, Final, NamedTuple

import redis
import rq
from pydantic import SecretStr

from accumulator import rq_sink
from accumulator.client import Accumulator
from accumulator.closer import Closer
from accumulator.context import Context
from accumulator.embedded import EmbeddedServer, ServerBinary, find_servers, wheel_server
from accumulator.envelope import Event
from accumulator.handlers import handler
from accumulator.runner import DirectRunner
from accumulator.settings import Settings
from accumulator.windows import Outcome

BUCKETS: Final = 1000
ENTRY_BYTES: Final = 300
Events = list[dict[str, Any]]
Entries = list[tuple[str, bytes]]
"""What is sent without us: stream and envelope."""
POLICIES: Final[dict[str, dict[str, Any]]] = {
    "stay": {"inactivity": "1h", "max_age": "2h", "max_events": 100_000},
    "soon": {"inactivity": "1ms"},
    "brief": {"inactivity": "200ms"},
    "noop": {"inactivity": "1ms", "sink": "direct"},
    "once": {"inactivity": "1ms", "sink": "direct"},
    "jobs": {"inactivity": "1ms", "sink": "rq"},
}
"""Windows of flow `stay` outlast every row; those of `soon` are due at once; those of `brief` when a worker sleeps."""

_ids = count()
_random = random.Random(1)


def bucket(number: int, flow: str = "stay") -> str:
    return f"tenant:{flow}:{number:06d}"


def anywhere(_: object = None) -> str:
    return bucket(_random.randrange(BUCKETS))


def fields(key: str) -> dict[str, Any]:
    """A new event whose stored envelope has ENTRY_BYTES."""
    number = next(_ids)
    return {
        "event_id": f"{os.getpid()}-{number:010d}",
        "bucket_key": key,
        "kind": "item_added",
        "occurred_at": _OCCURRED,
        "source": "shop",
        "payload": {"order": 10_000_000 + number, "sku": "AB-1234", "amount": 12.5, "note": _NOTE},
    }


def envelope(event: dict[str, Any]) -> bytes:
    return Event.of(event).packed.envelope


_OCCURRED: Final = datetime(2026, 10, 16, 14, 0, 0, 250_000, UTC)
_NOTE = "x" * 100
_NOTE += "x" * (ENTRY_BYTES - len(envelope(fields(bucket(0)))))


Batch = tuple[Sequence[bytes], int]
"""Commands that go in one write, encoded before the clock runs, and how many they are."""


class Figure(NamedTuple):
    value: float
    detail: str


class Bench:
    """One server with what talks to it. `scale` shrinks every row; `crowd_size` windows are open where many are."""

    def __init__(self, binary: ServerBinary, scale: float, crowd_size: int, stack: ExitStack) -> None:
        self.binary, self.scale, self.crowd_size, self._stack = binary, scale, crowd_size, stack
        self._crowds: dict[int, Bench] = {}
        self.server = stack.enter_context(EmbeddedServer(binary=binary))
        self.client = stack.enter_context(redis.Redis.from_url(self.server.url, protocol=2))
        self.connection = self.client.connection_pool.get_connection()
        self.accumulator = stack.enter_context(Accumulator(self.server.url))

    def many(self, number: int, least: int = 1) -> int:
        return max(least, int(number * self.scale))

    def fresh(self, partitions: int = 64, opened: int = BUCKETS) -> Accumulator:
        """An empty server and a namespace in which `opened` windows are open (and the scripts loaded)."""
        self.client.execute_command("FLUSHALL", "SYNC")
        made = self.accumulator = self._stack.enter_context(Accumulator(self.server.url, partitions=partitions))
        for flow, policy in POLICIES.items():
            made.load_policy(flow, policy)
        self.push(map(bucket, range(opened)))
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

    def encode(self, commands: Sequence[tuple[Any, ...]], at_once: int) -> list[Batch]:
        parts = [commands[i : i + at_once] for i in range(0, len(commands), at_once)]
        return [(self.connection.pack_commands(part), len(part)) for part in parts]

    def accepts(self, calls: Sequence[Sequence[str]], at_once: int) -> list[Batch]:
        """Accept calls as the client makes them, one for each list of bucket keys (of one partition)."""
        commands = []
        for keys in calls:
            operation = self.accumulator.operations.push_many([Event.of(fields(key)) for key in keys])
            asked = next(operation)
            while asked[0].script is None:  # what the client looks up now and then
                asked = operation.send([self.client.execute_command(*call.args) for call in asked])
            commands += [("EVALSHA", call.script.sha, 1, *call.args) for call in asked if call.script]
        return self.encode(commands, at_once)

    def xadds(self, calls: Sequence[Sequence[str]]) -> list[Batch]:
        entries = [("XADD", f"bare:{key}", "*", "e", envelope(fields(key))) for keys in calls for key in keys]
        return self.encode(entries, 100)

    def spent(self) -> float:
        """Seconds of CPU that the server's main thread has used so far."""
        info: dict[str, Any] = self.client.info("cpu")
        return float(info["used_cpu_user_main_thread"] + info["used_cpu_sys_main_thread"])

    def cpu(self, batches: Sequence[Batch]) -> float:
        """Seconds of the server that these take."""
        before = self.spent()
        for data, commands in batches:
            self.connection.send_packed_command(data, check_health=False)
            for _ in range(commands):
                self.connection.read_response()
        return self.spent() - before

    def close_due(self, limit: int = 100) -> list[tuple[int, float]]:
        """Closes what is due as a worker does: windows closed and seconds, for each round over all partitions."""
        operations = self.accumulator.operations
        rounds: list[tuple[int, float]] = []
        while not rounds or rounds[-1][0]:
            begun = time.perf_counter()
            ticks = self.accumulator.store.perform(operations.tick_all(range(operations.partitions), limit))
            took = time.perf_counter() - begun
            rounds.append((sum(0 if isinstance(tick, Exception) else tick.closed for tick in ticks), took))
        return rounds[:-1]

    def used_memory(self) -> int:
        info: dict[str, Any] = self.client.info("memory")
        return int(info["used_memory"])


def compare(chunk: Callable[[int], tuple[float, float]], chunks: int, each: int, what: str, other: str) -> Figure:
    """Theirs over ours: `chunk` gives the seconds of (ours, theirs) for `each` events; its first run does not count."""
    found = [chunk(n) for n in range(chunks + 1)][1:]
    ours, theirs = (statistics.median(column) / each * 1e6 for column in zip(*found, strict=True))
    return Figure(statistics.median(b / a for a, b in found), f"{ours:.2f} µs {what}, {theirs:.2f} {other}")


def timed(work: Callable[[], object]) -> float:
    begun = time.perf_counter()
    work()
    return time.perf_counter() - begun


# --- what the rows measure ------------------------------------------------------------------------


def accept(bench: Bench, size: int, draw: Callable[[int], str], same: bool = False) -> Figure:
    """Server CPU of accept calls of `size` events each, against bare XADD. `draw(n)` names the bucket of each call
    where it is the `same` for all of its events, else of each event."""
    bench.fresh(partitions=1)
    events, numbers = max(size, 1000), count()

    def chunk(_: int) -> tuple[float, float]:
        calls = [
            [draw(next(numbers))] * size if same else [draw(next(numbers)) for _ in range(size)]
            for _ in range(events // size)
        ]
        return bench.cpu(bench.accepts(calls, max(1, min(100, 1000 // size)))), bench.cpu(bench.xadds(calls))

    found = compare(chunk, bench.many(20), events, "of server CPU", "without us")
    assert "duplicates" not in bench.accumulator.counters()
    return found


def client(
    bench: Bench,
    ours: Callable[[Accumulator, Events], object],
    theirs: Callable[[redis.Redis, Entries], object],
    size: int = 1000,
    draw: Callable[[int], str] = anywhere,
) -> Figure:
    """Wall time of `size` events, given as mappings and checked by us, to buckets that `draw(chunk)` names for each."""
    accumulator = bench.fresh()

    def chunk(number: int) -> tuple[float, float]:
        events = [fields(draw(number)) for _ in range(size)]
        entries = [(f"bare:{event['bucket_key']}", envelope(event)) for event in events]
        return timed(lambda: ours(accumulator, events)), timed(lambda: theirs(bench.client, entries))

    return compare(chunk, bench.many(12 if size > 100 else 30), size, "an event", "by theirs")


def push_each(accumulator: Accumulator, events: Events) -> None:
    for event in events:
        accumulator.push(event)


def xadd_each(server: redis.Redis, entries: Entries) -> None:
    for key, entry in entries:
        server.xadd(key, {"e": entry})


def xadd_pipelined(server: redis.Redis, entries: Entries) -> None:
    pipe = server.pipeline(transaction=False)
    for key, entry in entries:
        pipe.xadd(key, {"e": entry})
    pipe.execute()


def enqueue_many(server: redis.Redis, entries: Entries) -> None:
    queue = rq.Queue("bare", connection=server)
    queue.enqueue_many([queue.prepare_data("job.run", (entry.decode(),)) for _, entry in entries])


def closings(bench: Bench) -> Figure:
    bench.fresh(opened=0)
    before = bench.many(26_000, 64)
    bench.push(bucket(n, "soon") for n in range(before))
    spent = bench.spent()
    rounds = bench.close_due()
    spent = bench.spent() - spent
    assert sum(closed for closed, _ in rounds) == before
    rates = [closed / took for closed, took in rounds if closed >= rounds[0][0] / 2]
    return Figure(statistics.median(rates), f"{spent / before * 1e6:.1f} µs of server CPU each, {before:,} windows")


def crowded(bench: Bench, events: int, cost: Callable[[Bench, int], float]) -> Figure:
    """`cost(server, windows open there)` of `events` with many windows over that with 1,000."""
    few, much = bench.crowd(1000), bench.crowd(bench.crowd_size)
    what, other = "with 1,000 open", f"with {bench.crowd_size:,}"
    return compare(lambda _: (cost(few, 1000), cost(much, bench.crowd_size)), bench.many(12), events, what, other)


def cost_of_accepts(where: Bench, windows: int) -> float:
    return where.cpu(where.accepts([[bucket(_random.randrange(windows))] for _ in range(1000)], 100))


def cost_of_closings(where: Bench, _: int) -> float:
    where.push(bucket(1_000_000 + next(_ids), "soon") for _ in range(1000))
    before = where.spent()
    assert sum(closed for closed, _ in where.close_due()) == 1000
    return where.spent() - before


def run_closer(url: str) -> None:
    with Accumulator(url) as accumulator:
        Closer(accumulator).run()


def run_pushes(url: str) -> None:
    with Accumulator(url) as accumulator:
        while True:
            accumulator.push_many([fields(anywhere()) for _ in range(500)])


def lateness(bench: Bench, others: Sequence[Callable[[str], None]]) -> Figure:
    """From due to sealed, by the server's clock, of windows that close one by one while these processes run."""
    crowd, pause, spawn = bench.crowd(bench.crowd_size), threading.Event(), multiprocessing.get_context("spawn")
    accumulator = crowd.accumulator

    def sealed(key: str) -> int:
        accumulator.push(fields(key))
        while not (closed := accumulator.manifests(key)):
            pause.wait(0.05)
        return closed[0].sealed_at - closed[0].closed_at

    processes = [spawn.Process(target=other, args=(crowd.server.url,), daemon=True) for other in others]
    keys = [bucket(10_000 * len(others) + n, "brief") for n in range(bench.many(500, 20))]
    accepted = accumulator.counters()["accepted"] + 2000 * (len(others) - 1)
    try:
        for process in processes:
            process.start()
        sealed(bucket(len(others), "brief"))
        while accumulator.counters()["accepted"] <= accepted:
            pause.wait(0.05)
        for key in keys:
            accumulator.push(fields(key))
            pause.wait(_random.uniform(0.001, 0.005))
        while accumulator.bucket(keys[-1]).open:
            pause.wait(0.05)
    finally:
        for process in processes:
            process.terminate()
            process.join()
    late = sorted(found.sealed_at - found.closed_at for key in keys for found in accumulator.manifests(key))
    detail = f"p50 {statistics.median(late):.0f} ms, at most {late[-1]} ms, {bench.crowd_size:,} open"
    return Figure(late[int(len(late) * 0.99)], detail)


def open_memory(bench: Bench) -> Figure:
    bench.fresh(opened=0)
    before, buckets = bench.used_memory(), bench.many(20_000, 100)
    bench.push(map(bucket, range(buckets)))
    return Figure((bench.used_memory() - before) / buckets, f"{buckets:,} buckets, all their keys")


def further_memory(bench: Bench, upto: int) -> Figure:
    buckets = bench.many(30_000 // upto, 100)
    bench.fresh(opened=buckets)
    before = bench.used_memory()
    for _ in range(upto - 1):
        bench.push(map(bucket, range(buckets)))
    return Figure((bench.used_memory() - before) / buckets / (upto - 1), f"2nd to {upto}th of a window")


LADDER: Final[dict[str, Any]] = {
    "timezone": "America/Sao_Paulo",
    "steps": [{"name": name, "offset": f"{days}d"} for name, days in zip("abcd", (-3, 0, 3, 10), strict=True)],
    "cancel_on": ["paid"],
    "final_wait": "5d",
    "escalate": True,
}


def ladder_memory(bench: Bench) -> Figure:
    accumulator = bench.fresh(opened=0)
    accumulator.load_ladder("dunning", LADDER)
    due, ladders = datetime.now(UTC) + timedelta(days=20), bench.many(20_000, 100)
    for number in range(-1000, 0):
        accumulator.start_ladder("dunning", bucket(number), due, {"amount": 1250.5})
    before = bench.used_memory()
    for number in range(ladders):
        accumulator.start_ladder("dunning", bucket(number), due, {"amount": 1250.5})
    return Figure((bench.used_memory() - before) / ladders, f"{ladders:,} ladders of four steps, all their keys")


@handler("noop")
def do_nothing(_: Context) -> None:
    """Its cost is ours alone."""


@handler("once")
def do_one_thing(ctx: Context) -> None:
    ctx.once("effect", str)


handler("jobs")(do_nothing)


def settled(bench: Bench, flow: str, threads: int) -> Figure:
    """Manifests a second from closed to confirmed, by the direct runner of one process."""
    accumulator = bench.fresh(opened=0)
    many = bench.many(5000, 20)
    bench.push(bucket(n, flow) for n in range(many))
    bench.close_due()
    runner = DirectRunner(accumulator, threads)
    thread = threading.Thread(target=runner.run)
    begun = time.perf_counter()
    thread.start()
    pause = threading.Event()
    while accumulator.counters().get("manifest:confirmed", 0) < many:
        pause.wait(0.02)
    took = time.perf_counter() - begun
    runner.stop()
    thread.join()
    return Figure(many / took, f"{took / many * 1e6:.0f} µs each, {many:,} manifests, {threads} threads")


def nothing() -> None:
    """What RQ alone runs."""


def run_ours(url: str, queue: str) -> None:
    """An RQ worker as `accumulator worker --with-rq` runs it."""
    rq_sink.work(Settings(redis_url=SecretStr(url), log_level="critical"), None, queue=queue, supervised=True)


def run_theirs(url: str, queue: str) -> None:
    """An RQ worker as it comes; with all that ours has loaded, since both begin with this module."""
    with redis.Redis.from_url(url) as connection:
        rq.Worker([rq.Queue(queue, connection=connection)], connection=connection).work(logging_level="WARNING")


def through_rq(bench: Bench, other: Callable[[str, str], None]) -> Figure:
    """Jobs a second, dispatch included, over those of RQ alone with empty jobs in a worker that `other` runs."""
    spawn, each = multiprocessing.get_context("spawn"), bench.many(60, 5)
    accumulator = bench.fresh(opened=0)
    numbers, pause = count(), threading.Event()
    programs = {"ours": run_ours, "theirs": other}
    processes = [spawn.Process(target=run, args=(bench.server.url, name)) for name, run in programs.items()]

    def done(queue: str) -> int:
        [worker] = bench.client.smembers(f"rq:workers:{queue}")
        return int(bench.client.hget(worker, "successful_job_count") or 0)

    def wait(queue: str, start: Callable[[], object]) -> float:
        """s from the start until RQ has counted as many jobs."""
        wanted, begun = done(queue) + each, time.perf_counter()
        start()
        while done(queue) < wanted:
            pause.wait(0.005)
        return time.perf_counter() - begun

    def ours() -> float:
        bench.push(bucket(next(numbers), "jobs") for _ in range(each))
        bench.close_due()
        dispatcher = rq_sink.Dispatcher(accumulator, bench.server.url, "ours")
        thread = threading.Thread(target=dispatcher.run)
        took = wait("ours", thread.start)
        dispatcher.stop()
        thread.join()
        return took

    def theirs() -> float:
        queue = rq.Queue("theirs", connection=bench.client)
        return wait("theirs", lambda: queue.enqueue_many([queue.prepare_data(nothing) for _ in range(each)]))

    def chunk(number: int) -> tuple[float, float]:
        if number % 2:
            return ours(), theirs()
        took = theirs()
        return ours(), took

    try:
        for process in processes:
            process.start()
        while not all(bench.client.exists(f"rq:workers:{name}") for name in programs):
            pause.wait(0.05)
        found = compare(chunk, 9, each, "a job", "by RQ alone")
    finally:
        for process in processes:
            process.terminate()
            process.join()
    assert accumulator.counters()["manifest:confirmed"] == next(numbers)
    return found


# --- the table ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """`floor` and `stretch`: the targets; None where a figure is only to be seen. The better one is the stretch."""

    name: str
    floor: float | None
    stretch: float | None
    unit: str
    measure: Callable[[Bench], Figure]

    def verdict(self, value: float) -> str:
        if self.floor is None or self.stretch is None:
            return ""
        sign = 1 if self.stretch > self.floor else -1
        if value * sign >= self.stretch * sign:
            return "stretch"
        return "ok" if value * sign >= self.floor * sign else "below"

    def line(self, value: float) -> str:
        cells = [f"{_shown(number, self.unit):>10}" for number in (value, self.floor, self.stretch)]
        return f"{self.name:{_WIDTH}} {' '.join(cells)}  {self.verdict(value):7}"


def _shown(value: float | None, unit: str) -> str:
    if value is None:
        return ""
    return f"{value:,.0f}{unit}" if value >= 100 else f"{value:.2f}".rstrip("0").rstrip(".") + unit


def _skewed(_: int) -> str:
    return bucket(int(_random.paretovariate(1)) % BUCKETS)


push_many = Accumulator.push_many
ROWS: Final = (
    Row("accept: one event a call, pipelined", 0.15, 0.20, "×", lambda b: accept(b, 1, lambda n: bucket(n % BUCKETS))),
    Row("accept: 100 events of one bucket a call", 0.70, 1.0, "×", lambda b: accept(b, 100, anywhere, same=True)),
    Row("accept: 100 events over random buckets a call", 0.18, 0.30, "×", lambda b: accept(b, 100, anywhere)),
    Row("accept: 500 events over skewed buckets a call", 0.27, 0.40, "×", lambda b: accept(b, 500, _skewed)),
    Row("push_many from one process, checks included", 0.45, 0.70, "×", lambda b: client(b, push_many, xadd_pipelined)),
    Row("push one at a time", 0.75, 0.85, "×", lambda b: client(b, push_each, xadd_each, size=100)),
    Row("push_many, random buckets, to RQ enqueue_many", 4, 6, "×", lambda b: client(b, push_many, enqueue_many)),
    Row(
        "push_many, one bucket, to RQ enqueue_many",
        8,
        12,
        "×",
        lambda b: client(b, push_many, enqueue_many, draw=bucket),
    ),
    Row("closings by one worker", 50_000, 65_000, "/s", closings),
    Row("server CPU of an accept, many windows open", 1.3, 1.1, "×", lambda b: crowded(b, 1000, cost_of_accepts)),
    Row("server CPU of a closing, many windows open", 1.3, 1.1, "×", lambda b: crowded(b, 1000, cost_of_closings)),
    Row("due to sealed, p99, idle", 5, 2, " ms", lambda b: lateness(b, [run_closer])),
    Row("due to sealed, p99, under pushes", 15, 5, " ms", lambda b: lateness(b, [run_closer, run_pushes])),
    Row("closed to confirmed, direct, no-op handler", 3000, 8000, "/s", lambda b: settled(b, "noop", 4)),
    Row("closed to confirmed, direct, one effect", 1000, 2500, "/s", lambda b: settled(b, "once", 2)),
    Row("closed to confirmed through RQ, to RQ alone", 0.9, 1.0, "×", lambda b: through_rq(b, run_theirs)),
    Row("closed to confirmed through RQ, both tuned alike", None, None, "×", lambda b: through_rq(b, run_ours)),
    Row("memory: open bucket with one 300-byte event", 1950, 1200, " B", open_memory),
    Row("memory: each further event", 430, 340, " B", lambda b: further_memory(b, 10)),
    Row("memory: each further event, longer window", None, None, " B", lambda b: further_memory(b, 100)),
    Row("memory: a running ladder", 1200, 900, " B", ladder_memory),
)
_WIDTH: Final = max(len(row.name) for row in ROWS)


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
    crowd_size = 1_000_000 if options.full else int(100_000 * min(1, options.scale))
    for binary in found.values():
        programs = f"redis-py {version('redis')}, rq {version('rq')}, Python {sys.version.split()[0]}"
        print(f"{binary}, {programs}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
        print(f"{'':{_WIDTH}} {'value':>10} {'floor':>10} {'stretch':>10}")
        with ExitStack() as stack:
            bench = Bench(binary, options.scale, crowd_size, stack)
            for row in rows:
                value, detail = row.measure(bench)
                print(f"{row.line(value)}  {detail}", flush=True)
        print()
    return 0


if __name__ == "__main__":
    sys.exit(main())
