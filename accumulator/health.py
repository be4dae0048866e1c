"""How it goes, read from the server alone: what has to be mended (`problems`) and what should be known (`warnings`).

Workers give signs of life in ``<ns>:workers``: each says which roles it runs and which flows it can serve. Whatever
else is judged here shows in the keys themselves: what is overdue, what ages, what waits for a person.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Final

import orjson

from accumulator import keys
from accumulator.emission import bucket_of, is_emission
from accumulator.envelope import flow_of
from accumulator.errors import AccumulatorError
from accumulator.policy import HANDLED_SINKS
from accumulator.store import Call, Operation, Reply, answer, as_instant, as_pairs, as_stream

BEAT: Final = 5.0
"""s between a worker's signs of life."""
ALIVE: Final = 20_000
"""ms after its last one in which a worker counts as alive."""
FORGOTTEN: Final = 3_600_000
"""ms after which a worker is not remembered any more."""
OVERDUE: Final = 5_000
"""ms past its instant after which a timer says that no closer keeps up; also how far clocks of nodes may differ."""
UNSETTLED: Final = 600_000
"""ms after which a manifest that is not settled, and waits for no person, says that nobody gets it done."""
PATIENCE: Final = 86_400_000
"""ms after which what waits for a person says that nobody looks."""
ROLE_OF: Final = {"rq": "dispatcher", "direct": "runner", "webhook": "webhook"}
"""Sink → the role that takes its manifests."""

_CLOCK: Final = b"clock"
_SAMPLE: Final = 200
_PEOPLE: Final = 1000
_SHOWN: Final = 5


@dataclass(frozen=True)
class WorkerSeen:
    """A worker's last sign of life, `age` ms ago: its roles, the flows it has handlers for, and those it has endpoints
    for (``default`` stands for all that have none of their own), and the ladders whose steps it has a handler for."""

    worker_id: str
    age: int
    roles: tuple[str, ...]
    handlers: tuple[str, ...] = ()
    webhooks: tuple[str, ...] = ()
    ladders: tuple[str, ...] = ()

    @property
    def alive(self) -> bool:
        return self.age <= ALIVE

    def serves(self, flow: str, sink: str) -> bool:
        """Whether it can do what that sink asks for this flow. Of the sink `rq`, a dispatcher speaks for the RQ workers
        too: they load the same configuration."""
        able = self.webhooks if sink == "webhook" else self.handlers
        roles = {"rq", "dispatcher"} if sink == "rq" else {ROLE_OF[sink]}
        return bool(roles & set(self.roles)) and (flow in able or "default" in able)


@dataclass(frozen=True)
class Queue:
    """How many wait, and the longest for how many ms."""

    count: int = 0
    oldest: int = 0


@dataclass(frozen=True)
class RqQueue:
    """A queue of RQ as a dispatcher saw it last: RQ workers that listen to it, jobs that wait in it, the oldest for so
    many ms."""

    workers: int
    jobs: int = 0
    oldest: int = 0


@dataclass(frozen=True)
class Health:
    """How it goes. `problems` have to be mended, `warnings` should be known, a sentence each.

    `overdue`: timers that nobody handled for more than 5 s, the oldest for `overdue_ms`; `overdue_windows` of them (of
    the first 200 of each partition) are windows. `unsettled`: manifests in the outbox, the oldest for `unsettled_ms`;
    `stuck` those of them that are older than 10 min and wait for no person (of the first 200 of each partition).
    `ready`: sink → manifests whose turn has come and that nobody took yet. `people`: state → what waits for somebody
    (of the first 1000 of each partition); `reconcile` the events that do. `workers` are those of the last hour. `rq`:
    the queues of RQ that flows go to; None where no dispatcher is alive, or none has seen them for 20 s.
    """

    problems: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    overdue: int = 0
    overdue_ms: int = 0
    overdue_windows: int = 0
    unsettled: int = 0
    unsettled_ms: int = 0
    stuck: Queue = field(default_factory=Queue)
    ready: dict[str, int] = field(default_factory=dict)
    people: dict[str, Queue] = field(default_factory=dict)
    reconcile: Queue = field(default_factory=Queue)
    workers: tuple[WorkerSeen, ...] = ()
    rq: dict[str, RqQueue] | None = None

    @property
    def ok(self) -> bool:
        """Whether nothing has to be mended."""
        return not self.problems


def health_report(health: Health) -> list[str]:
    """The lines that people read of it: what is wrong, what should be known, and how much there is."""
    alive = [worker for worker in health.workers if worker.alive]
    roles = sorted({role for worker in alive for role in worker.roles})
    ready = ", ".join(f"{n} for {sink}" for sink, n in health.ready.items() if n)
    lines = [f"problem: {text}" for text in health.problems]
    lines += [f"warning: {text}" for text in health.warnings]
    lines.append(f"workers: {len(alive)} alive" + (f" ({', '.join(roles)})" if roles else ""))
    lines.append(f"overdue: {_queue(Queue(health.overdue, health.overdue_ms))}")
    lines.append(f"unsettled: {_queue(Queue(health.unsettled, health.unsettled_ms))}")
    lines.append(f"ready: {ready or 'nothing'}")
    for name, seen in (health.rq or {}).items():
        lines.append(f"queue {name}: {_count(seen.jobs, 'job')}, {_count(seen.workers, 'RQ worker')}")
    lines += [f"{state}: {_queue(queue)}" for state, queue in health.people.items()]
    lines.append(f"reconciliation: {_queue(health.reconcile)}")
    lines.append("healthy" if health.ok else "not healthy")
    return lines


def _queue(queue: Queue) -> str:
    return f"{queue.count}, the oldest for {_span(queue.oldest)}" if queue.count else "none"


def _span(ms: int) -> str:
    """About how long: 13s, 2m5s, 3h10m, 4d2h."""
    seconds = max(0, ms) // 1000
    units = (("d", 86_400), ("h", 3600), ("m", 60), ("s", 1))
    for (name, size), (lesser, part) in pairwise(units):
        if seconds >= size:
            rest = seconds % size // part
            return f"{seconds // size}{name}" + (f"{rest}{lesser}" if rest else "")
    return f"{seconds}s"


def _some(names: Iterable[str]) -> str:
    found = sorted(names)
    more = f" and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
    return ", ".join(found[:_SHOWN]) + more


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


# --- signs of life ----------------------------------------------------------------------------------------------------


def sign_of_life(
    worker_id: str,
    roles: Iterable[str],
    handlers: Iterable[str] = (),
    webhooks: Iterable[str] = (),
    ladders: Iterable[str] = (),
) -> str:
    """What stands for a worker in ``<ns>:workers``; it stays the same as long as the worker lives."""
    told = {"id": worker_id, "roles": sorted(roles), "handlers": sorted(handlers), "webhooks": sorted(webhooks)}
    told["ladders"] = sorted(ladders)
    return orjson.dumps(told).decode()


def beat(namespace: str, now: int, sign: str) -> Operation[None]:
    """Gives it, at `now` (ms), and forgets those that gave none for an hour."""
    replies = yield [Call.run("beat", keys.workers(namespace), sign, now, now - FORGOTTEN)]
    answer(replies[0])


def end(namespace: str, sign: str) -> Operation[None]:
    """Takes it back: the worker ends as it should."""
    replies = yield [Call(("ZREM", keys.workers(namespace), sign))]
    answer(replies[0])


def sinks_of(meta: Reply) -> dict[str, str]:
    """Flow → sink, of the latest policies in the hash ``<ns>:meta``."""
    return {
        name.decode().removeprefix("flow:"): str(orjson.loads(text.partition(b" ")[2])["sink"])
        for name, text in as_pairs(meta)
        if name.startswith(b"flow:")
    }


def tell_queues(namespace: str, now: int, queues: Mapping[str, RqQueue]) -> Operation[None]:
    """Says what a dispatcher sees of RQ's queues at `now` (ms)."""
    told = {name: (queue.workers, queue.jobs, queue.oldest) for name, queue in queues.items()}
    replies = yield [Call(("HSET", keys.meta(namespace), "rq", f"{now} {orjson.dumps(told).decode()}"))]
    answer(replies[0])


def _queues(meta: Mapping[bytes, bytes], now: int) -> dict[str, RqQueue] | None:
    at, _, told = meta.get(b"rq", b"").partition(b" ")
    try:
        queues = {name: RqQueue(*map(int, of)) for name, of in orjson.loads(told).items()}
        return queues if now - int(at) <= ALIVE else None
    except (ValueError, TypeError, AttributeError):
        return None  # nobody told it yet, or a release that tells it otherwise


def _workers(pairs: Iterable[tuple[Any, Any]], now: int) -> Iterator[WorkerSeen]:
    for member, at in pairs:
        try:
            told = orjson.loads(member)
            yield WorkerSeen(
                str(told["id"]),
                max(0, now - int(float(at))),
                *(tuple(map(str, told[name])) for name in ("roles", "handlers", "webhooks", "ladders")),
            )
        except (ValueError, KeyError, TypeError):
            continue  # of a release that tells it otherwise, or `clock`


# --- the server -------------------------------------------------------------------------------------------------------


def read_setup() -> Operation[tuple[list[str], list[str], bool]]:
    """What of the server's set-up loses what it accepted, and what may: problems and warnings; and whether it is a
    cluster, of which one node is looked at."""
    replies = yield [Call(("INFO",)), Call(("CONFIG", "GET", "save"))]
    facts = replies[0]
    if isinstance(facts, AccumulatorError) or not isinstance(facts, Mapping):
        unread = "the server's set-up can't be read (INFO): it may evict what it accepted, or keep nothing on disk"
        return [], [unread], False
    if "maxmemory_policy" not in facts:
        facts = next((node for node in facts.values() if isinstance(node, Mapping)), {})
    problems, warnings = [], []
    evicts = facts.get("maxmemory_policy", "unknown")
    if evicts == "unknown":
        warnings.append("the server does not tell its maxmemory-policy: all but noeviction drop what it accepted")
    elif evicts != "noeviction":
        problems.append(f"the server's maxmemory-policy is {evicts}: set noeviction, or it drops what it accepted")
    if facts.get("role") == "slave":
        problems.append("the server is a replica: nothing can be accepted or closed there")
    if not int(facts.get("aof_enabled", 0)):
        saves = replies[1]
        if isinstance(saves, AccumulatorError) or not as_pairs(saves):
            warnings.append("the server keeps no append-only file, and does not tell whether it saves snapshots")
        elif as_pairs(saves)[0][1]:
            warnings.append("the server saves snapshots only: a crash loses what came since (set appendonly yes)")
        else:
            warnings.append("the server keeps nothing on disk: a restart loses everything (set appendonly yes)")
    return problems, warnings, bool(int(facts.get("cluster_enabled", 0)))


# --- everything -------------------------------------------------------------------------------------------------------


def read_health(
    namespace: str, prefixes: Sequence[str], instant: int | str, ceilings: Mapping[str, int]
) -> Operation[Health]:
    """Reads and judges. `instant` is that of a virtual clock, or empty; `ceilings` are `max_unsettled` and
    `max_reconcile`."""
    problems, warnings, cluster = yield from read_setup()
    probe = Call.run("show", keys.timers(prefixes[0]), instant, "health:health:0")
    replies = yield [
        Call(("TIME",)),
        Call(("HGETALL", keys.meta(namespace))),
        Call(("ZRANGE", keys.workers(namespace), 0, -1, "WITHSCORES")),
        probe,
    ]
    if isinstance(replies[3], AccumulatorError):
        problems.append(f"scripts can't run: {replies[3]}")
    now = as_instant(replies[0]) // 1000 if instant == "" else int(instant)
    signs = as_pairs(replies[2])
    workers = tuple(sorted(_workers(signs, now), key=lambda worker: (worker.age, worker.worker_id)))
    sinks = sinks_of(replies[1])
    problems += _judge_workers(workers, sinks, warnings, cluster)
    problems += yield from _judge_ladders(workers, sinks, replies[1], prefixes)

    columns = yield from _columns(prefixes, now)
    late, ahead = columns.total("late"), columns.scores("opened") + columns.scores("sealed")
    ahead += [int(float(at)) for member, at in signs if member == _CLOCK]
    back = max(ahead, default=now) - now
    if back > OVERDUE:
        problems.append(f"the server's clock went back by {_span(back)}: what falls due is done that much later")

    windows = sum(member.startswith(b"w:") for reply in columns["overdue"] for member in answer(reply))
    overdue_ms = max((now - at for at in columns.scores("first")), default=0) if late else 0
    if late:
        known = min(windows, late)
        what = [_count(known, "window")] if known else []
        what += [_count(late - known, "other timer")] if late > known else []
        closers = any(worker.alive and "closer" in worker.roles for worker in workers)
        why = "a closer is alive, but behind" if closers else "no closer is alive"
        verb = "is" if late == 1 else "are"
        problems.append(f"{' and '.join(what)} {verb} overdue, the oldest for {_span(overdue_ms)}: {why}")

    waiting = [
        (prefix, name, int(float(at)))
        for prefix, reply in zip(prefixes, columns["people"], strict=True)
        for name, at in as_pairs(reply)
    ]
    people = yield from _people(waiting, now)
    stuck = yield from _stuck(prefixes, columns["aged"], now)
    if stuck.count:
        problems.append(
            f"the outbox ages: {_count(stuck.count, 'manifest')} not settled within {_span(UNSETTLED)}, the oldest for "
            f"{_span(stuck.oldest)}"
        )
    oldest_item = [int(entry[0].partition(b"-")[0]) for reply in columns["item"] for entry in as_stream(reply)]
    reconcile = Queue(columns.total("items"), max((now - at for at in oldest_item), default=0))
    for what_waits, queue in (*people.items(), ("to be reconciled", reconcile)):
        if queue.count:
            noun = "event" if queue is reconcile else "manifest"
            text = f"{_count(queue.count, noun)} {what_waits}, the oldest for {_span(queue.oldest)}"
            (problems if queue.oldest > PATIENCE else warnings).append(text)

    queues = None
    if any(worker.alive and "dispatcher" in worker.roles for worker in workers):
        queues = _queues(dict(as_pairs(replies[1])), now)  # what one said that has signed off holds no more
        if "rq" in sinks.values():
            problems += _judge_queues(queues)

    unsettled = columns.total("outbox")
    for name, held in (("max_unsettled", unsettled), ("max_reconcile", reconcile.count)):
        if held >= ceilings[name]:
            problems.append(f"{name} is reached ({held} of {ceilings[name]}): new events are refused as overloaded")
        elif held * 5 >= ceilings[name] * 4:
            warnings.append(f"{name} is near: {held} of {ceilings[name]}")
    return Health(
        tuple(problems),
        tuple(warnings),
        overdue=late,
        overdue_ms=overdue_ms,
        overdue_windows=windows,
        unsettled=unsettled,
        unsettled_ms=max((now - at for at in columns.scores("eldest")), default=0),
        stuck=stuck,
        ready=(yield from _ready(prefixes, columns)),
        people=people,
        reconcile=reconcile,
        workers=workers,
        rq=queues,
    )


def _judge_workers(
    workers: Sequence[WorkerSeen], sinks: Mapping[str, str], warnings: list[str], cluster: bool
) -> Iterator[str]:
    alive = [worker for worker in workers if worker.alive]
    if not alive:
        last = min((worker.age for worker in workers), default=None)
        gone = "those of the last hour, if any, were stopped and signed off"
        yield f"no worker is alive: {gone if last is None else f'the last was seen {_span(last)} ago'}"
        return
    roles = {role for worker in alive for role in worker.roles}
    if "closer" not in roles:
        yield "no closer is alive: nothing closes on time"
    if "janitor" not in roles:
        warnings.append("no janitor is alive: payloads that nobody was handed stay")
    for sink, role in ROLE_OF.items():
        flows = [flow for flow, its in sinks.items() if its == sink]
        if flows and role not in roles:
            elsewhere = "; RQ can't live on a Redis Cluster: set ACCUMULATOR_RQ_URL" if cluster and sink == "rq" else ""
            yield f"no {role} is alive: nobody takes what goes to the sink {sink} (flow {_some(flows)}){elsewhere}"
            continue
        without = [flow for flow in flows if not any(worker.serves(flow, sink) for worker in alive)]
        what = "an endpoint" if sink == "webhook" else "a handler"
        if "default" in without:
            # Whatever flows there are may have one of their own.
            without.remove("default")
            warnings.append(f"no worker that is alive has {what} for flows without a policy of their own (sink {sink})")
        if without:
            yield f"no worker that is alive has {what} for flow {_some(without)} (sink {sink})"


def _judge_ladders(
    workers: Sequence[WorkerSeen], sinks: Mapping[str, str], meta: Reply, prefixes: Sequence[str]
) -> Operation[list[str]]:
    """Ladders whose steps no worker has a handler for, unless they are seen to run only where the sink needs none."""
    alive = [worker for worker in workers if worker.alive]
    able = {name for worker in alive if {"rq", "dispatcher", "runner"} & set(worker.roles) for name in worker.ladders}
    names = {name.decode().removeprefix("ladder:") for name, _ in as_pairs(meta) if name.startswith(b"ladder:")}
    without = names - able
    if not alive or not without or not HANDLED_SINKS & set(sinks.values()):
        return []
    spared: set[str] = set()
    if set(sinks.values()) - HANDLED_SINKS:
        listed = yield [Call(("ZRANGE", keys.ladders(prefix, "running"), 0, _SAMPLE - 1)) for prefix in prefixes]
        runs = [(prefix, one.decode()) for prefix, reply in zip(prefixes, listed, strict=True) for one in answer(reply)]
        facts = yield [Call(("HGETALL", keys.ladder(prefix, one))) for prefix, one in runs]
        needing: set[str] = set()
        for reply in facts:
            run = {name.decode(): value.decode() for name, value in as_pairs(reply)}
            if run:
                flow = flow_of(bucket_of(run))
                needs = sinks.get(flow, sinks.get("default")) in HANDLED_SINKS
                (needing if needs else spared).add(run["name"])
        spared -= needing
    without -= spared
    return [f"no worker that is alive has a step handler for ladder {_some(without)}"] if without else []


class _Columns(dict[str, list[Reply]]):
    """Name → the replies of all partitions."""

    def total(self, name: str) -> int:
        return sum(int(answer(reply)) for reply in self[name])

    def scores(self, name: str) -> list[int]:
        return [int(float(pairs[0][1])) for reply in self[name] if (pairs := as_pairs(reply))]


def _columns(prefixes: Sequence[str], now: int) -> Operation[_Columns]:
    """What is read of every partition."""

    def calls(prefix: str) -> dict[str, Call]:
        timers, outbox = keys.timers(prefix), keys.outbox(prefix)
        due, aged = now - OVERDUE, now - UNSETTLED
        return {
            "late": Call(("ZCOUNT", timers, "-inf", due)),
            "overdue": Call(("ZRANGE", timers, "-inf", due, "BYSCORE", "LIMIT", 0, _SAMPLE)),
            "first": Call(("ZRANGE", timers, 0, 0, "WITHSCORES")),
            "opened": Call(("ZRANGE", keys.open_(prefix), 0, 0, "REV", "WITHSCORES")),
            "outbox": Call(("ZCARD", outbox)),
            "eldest": Call(("ZRANGE", outbox, 0, 0, "WITHSCORES")),
            "sealed": Call(("ZRANGE", outbox, 0, 0, "REV", "WITHSCORES")),
            "aged": Call(("ZRANGE", outbox, "-inf", aged, "BYSCORE", "LIMIT", 0, _SAMPLE, "WITHSCORES")),
            "people": Call(("ZRANGE", keys.attention(prefix), 0, _PEOPLE - 1, "WITHSCORES")),
            "items": Call(("XLEN", keys.reconcile(prefix))),
            "item": Call(("XRANGE", keys.reconcile(prefix), "-", "+", "COUNT", 1)),
            **{sink: Call(("LRANGE", keys.tenants(prefix, sink), 0, -1)) for sink in ROLE_OF},
        }

    rows = [calls(prefix) for prefix in prefixes]
    replies = iter((yield [call for row in rows for call in row.values()]))
    columns = _Columns()
    for row in rows:
        for name in row:
            columns.setdefault(name, []).append(next(replies))
    return columns


def _judge_queues(queues: Mapping[str, RqQueue] | None) -> Iterator[str]:
    if queues is None:
        yield "no dispatcher reaches RQ's server: nothing gets to the sink rq"
        return
    for name, queue in queues.items():
        waits = f"{_count(queue.jobs, 'job')} in it, the oldest for {_span(queue.oldest)}"
        if not queue.workers:
            yield f"no RQ worker is alive for the queue {name}: {waits if queue.jobs else 'it is empty'}"
        elif queue.oldest > UNSETTLED:
            yield f"RQ workers of the queue {name} are alive, but behind: {waits}"


def _people(waiting: Sequence[tuple[str, bytes, int]], now: int) -> Operation[dict[str, Queue]]:
    found: dict[str, Queue] = {}
    if waiting:
        states = yield [Call(("HGET", keys.manifest(prefix, name.decode()), "state")) for prefix, name, _ in waiting]
        for (_, _, at), reply in zip(waiting, states, strict=True):
            state = (answer(reply) or b"gone").decode()
            so_far = found.get(state, Queue())
            found[state] = Queue(so_far.count + 1, max(so_far.oldest, now - at))
    return dict(sorted(found.items()))


def _stuck(prefixes: Sequence[str], aged: Sequence[Reply], now: int) -> Operation[Queue]:
    """Of the manifests that are old, those that wait neither for a person nor behind one that does, nor for the next
    window, to which they gave way."""
    old = [
        (prefix, name.decode(), int(float(at)))
        for prefix, reply in zip(prefixes, aged, strict=True)
        for name, at in as_pairs(reply)
    ]
    if not old:
        return Queue()
    facts = yield [Call(("HMGET", keys.manifest(prefix, name), "state", "bucket")) for prefix, name, _ in old]
    closed, count, oldest = [], 0, 0
    for (prefix, name, at), reply in zip(old, facts, strict=True):
        state, bucket = answer(reply)
        if state == b"closed":
            closed.append((prefix, name, at, bucket.decode()))
        elif state in (b"dispatched", b"processing", b"retrying"):
            count, oldest = count + 1, max(oldest, now - at)
    if closed:
        replies = yield [
            Call(("HMGET", _line(prefix, name, bucket), "turn", "joins", "open")) for prefix, name, _, bucket in closed
        ]
        turns = [answer(reply) for reply in replies]
        before = yield [
            Call(("HGET", keys.manifest(prefix, (turn[0] or b"-").decode()), "state"))
            for (prefix, *_), turn in zip(closed, turns, strict=True)
        ]
        for (_, name, at, _), (_, joins, window), state in zip(closed, turns, before, strict=True):
            gave_way = window is not None and name.encode() in (joins or b"").split()
            if not gave_way and answer(state) != b"awaiting_approval":
                count, oldest = count + 1, max(oldest, now - at)
    return Queue(count, oldest)


def _line(prefix: str, name: str, bucket_key: str) -> str:
    """What a manifest waits in line with: its bucket; what a ladder emitted, with that ladder."""
    return keys.ladder(prefix, name.rpartition("s")[0]) if is_emission(name) else keys.bucket(prefix, bucket_key)


def _ready(prefixes: Sequence[str], columns: _Columns) -> Operation[dict[str, int]]:
    lists = [
        (sink, keys.ready(prefix, sink, tenant.decode()))
        for sink in ROLE_OF
        for prefix, reply in zip(prefixes, columns[sink], strict=True)
        for tenant in answer(reply)
    ]
    ready = dict.fromkeys(ROLE_OF, 0)
    if lists:
        lengths = yield [Call(("LLEN", name)) for _, name in lists]
        for (sink, _), length in zip(lists, lengths, strict=True):
            ready[sink] += int(answer(length))
    return ready
