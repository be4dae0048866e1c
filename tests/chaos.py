"""`make chaos`: workers and their server die by SIGKILL, over and over, and each manifest's effect happens once.

Producers push events of many buckets, start reminder ladders, move and pay them, while processes are killed at every
step between a window's closing, or a reminder's instant, and its confirmation, and at random moments. What is judged
are two things only: what the producers were answered, and the logs of the world outside (tests/chaos_handlers.py).
Then 20,000 manifests wait for nobody, and windows must be closed as soon as without them.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import random
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from datetime import UTC, datetime, timedelta
from functools import partial
from itertools import count
from pathlib import Path
from time import monotonic
from typing import Any, Final, NamedTuple, TypeVar

from accumulator.client import Accumulator
from accumulator.embedded import EmbeddedServer, ServerBinary, find_servers, wheel_server
from accumulator.errors import ServerError
from accumulator.windows import Outcome, Receipt
from tests.chaos_handlers import LADDER, LADDER_FLOWS, POLICIES, STEPS, WINDOWS, World, work

T = TypeVar("T")

TENANTS: Final = ("aurora", "boreal")
REMINDING: Final = ("cobre", "delta")
"""Tenants of ladders: served in turn with the others, whose windows may wait in great number."""
OBJECTS: Final = 6
"""Buckets of each tenant and flow."""
FLEET: Final = ("closer", "dispatcher", "runner", "closer dispatcher runner", "rq", "rq")
"""Roles of the processes that are kept running."""
MOST_WAITING: Final = {"direct": 80, "rq": 20}
"""Windows of a sink without an effect beyond which producers push no more to it: the end is near when the kills are
over, and a job of RQ takes its time."""
MOST_REMINDED: Final = 12
"""Ladders that run, beyond which no other is started."""
TURNS: Final = 3
"""Runs of windows without, and with, manifests that wait."""
TO_SETTLE: Final = 90.0
"""s within which everything must be confirmed once nobody dies any more."""
STUCK: Final = 30.0
"""s without any effect, whoever dies, after which something is wrong."""

PATIENCE: Final = 0.2
"""s that the next kill waits for some work to be done."""

VICTIMS: Final = ("process", "server", "stall")
PLACES: Final = [
    (f"{step}-{when}", victim)
    for step in STEPS
    for when in ("before", "after")
    for victim in VICTIMS
    # A call that is made after its attempt was given up is the one thing that no `verify` can know of.
    if (step, when, victim) != ("outside", "before", "stall")
]
"""A step, and who dies there; or the process stalls, and what it does afterwards must change nothing."""


# --- what must hold ---------------------------------------------------------------------------------------------------


class Answer(NamedTuple):
    """What a producer was told of an event; `window_id` and `position` only where it was the first to be answered."""

    event_id: str
    bucket: str
    version: int | None
    window_id: str | None
    position: int | None


def check(answers: Iterable[Answer], log: Iterable[str]) -> list[str]:
    """What does not hold, a line each. `log` is the world's: JSON objects with `key`, `bucket` and `windows`, each
    (window_id, version, event ids)."""
    told = list(answers)
    buckets = {answer.event_id: answer.bucket for answer in told}
    positions = {answer.event_id: answer.position for answer in told}
    problems = []
    keys: Counter[str] = Counter()
    seen: defaultdict[str, list[tuple[str, int]]] = defaultdict(list)
    effects: defaultdict[tuple[str, str], int] = defaultdict(int)
    latest: defaultdict[str, int] = defaultdict(int)
    for line in log:
        call = json.loads(line)
        bucket, flow = call["bucket"], call["bucket"].split(":")[1]
        keys[call["key"]] += 1
        for window_id, version, event_ids in call["windows"]:
            effects[bucket, window_id] += 1
            if version < latest[bucket] and flow != "loose":
                problems.append(f"{bucket}: version {version} came after {latest[bucket]}")
            latest[bucket] = max(latest[bucket], version)
            for event_id in event_ids:
                seen[event_id].append((window_id, version))
                if buckets.get(event_id) != bucket:
                    problems.append(f"{bucket}: nobody pushed {event_id}")
            known = [p for event_id in event_ids if (p := positions.get(event_id)) is not None]
            if known != sorted(set(known)):
                problems.append(f"{bucket}: the events of version {version} are not in order of acceptance")
    problems += [f"{key}: its effect happened {times} times" for key, times in keys.items() if times > 1]
    problems += [
        f"{bucket}: window {window_id} had {times} effects"
        for (bucket, window_id), times in effects.items()
        if times > 1 and bucket.split(":")[1] != "each"
    ]
    for answer in told:
        where = seen[answer.event_id]
        if len(where) != 1:
            problems.append(f"{answer.bucket}: {answer.event_id} was handed over {len(where)} times")
        elif answer.version != where[0][1] or answer.window_id not in (None, where[0][0]):
            problems.append(f"{answer.bucket}: {answer.event_id} was told another window than it was handed over in")
    return problems


class Reminded(NamedTuple):
    """A ladder as the server has it in the end: its `state` and since when (ms). `paid_at`: when its payment was
    answered, None where there was none."""

    ladder_id: str
    state: str
    since: int
    paid_at: int | None


def check_ladders(ladders: Iterable[Reminded], log: Iterable[str]) -> list[str]:
    """What does not hold of ladders, a line each. `log` has a JSON object for each beginning of a handler, and one with
    `key` for each reminder that was sent: `ladder`, `what` (a step, ``cancelled`` or ``escalate``), `begun` (ms)."""
    steps = [step["name"] for step in LADDER["steps"]]
    problems = []
    sent: defaultdict[str, list[str]] = defaultdict(list)
    begun: defaultdict[str, list[tuple[str, int]]] = defaultdict(list)
    for line in log:
        told = json.loads(line)
        if "key" in told:
            sent[told["ladder"]].append(told["what"])
        elif told["what"] != "cancelled":
            begun[told["ladder"]].append((told["what"], told["begun"]))
    for ladder_id, state, since, paid_at in ladders:
        got = sent.pop(ladder_id, [])
        if state == "escalated":
            wanted = [*steps, "escalate"]
            if paid_at is not None:  # it was over, or what was not yet begun is left out
                wanted = wanted[: len(got)]
        else:
            wanted = [*steps[: max(len(got) - 1, 0)], "cancelled"]
        if got != wanted:
            problems.append(f"{ladder_id}: {state}, and {got} was sent")
        if state not in ("escalated", "cancelled"):
            problems.append(f"{ladder_id}: is {state}")
        if paid_at is not None:
            if since > paid_at:
                problems.append(f"{ladder_id}: {state} after its payment was answered")
            late = [what for what, at in begun[ladder_id] if at > paid_at]
            problems += [f"{ladder_id}: {what} began after its payment was answered" for what in late]
    problems += [f"{ladder_id}: nobody started it" for ladder_id in sent]
    return problems


# --- processes --------------------------------------------------------------------------------------------------------


class Process:
    """A worker process, forked from one that has imported everything: it works within a few hundredths of a second."""

    _context = multiprocessing.get_context("forkserver")
    _context.set_forkserver_preload(["tests.chaos_handlers"])

    def __init__(self, roles: str, folder: Path, url: str, namespace: str) -> None:
        self.roles = roles
        self._process = self._context.Process(target=work, args=(roles, folder, url, namespace), daemon=True)
        self._process.start()

    @property
    def lives(self) -> bool:
        return self._process.is_alive()

    @property
    def ended_by_itself(self) -> bool:
        """Whether it ended, and not by a kill. RQ's worker does where the server goes away at some moments."""
        return self._process.exitcode not in (None, -signal.SIGKILL) and self.roles != "rq"

    def kill(self) -> None:
        self._process.kill()
        self._process.join()

    def ask_to_stop(self) -> None:
        self._process.terminate()

    def stopped(self, seconds: float) -> bool:
        """Whether it ends within so many seconds; it is killed where not."""
        self._process.join(seconds)
        if self.lives:
            self.kill()
            return False
        return True


def _kinds() -> dict[str, ServerBinary]:
    return {binary.kind: binary for binary in reversed([*find_servers(), *filter(None, [wheel_server()])])}


def _server(folder: Path, binary: ServerBinary | None) -> EmbeddedServer:
    """A server that loses nothing it has answered, and rewrites its file often."""
    return EmbeddedServer(folder / "data", binary=binary, config={"auto-aof-rewrite-min-size": "2mb"})


def _sink(bucket: str) -> str:
    sink: str = POLICIES[bucket.split(":")[1]]["sink"]
    return sink


def _pause(seconds: float) -> None:
    threading.Event().wait(seconds)


class Chaos:
    """One run: `rounds` kills, at most about `rate` in a second."""

    NAMESPACE = "chaos"

    def __init__(self, rounds: int, seed: int, folder: Path, binary: ServerBinary | None, rate: float) -> None:
        self.binary = binary
        self.rounds = rounds
        self.rate = rate
        self.random = random.Random(seed)
        self.folder = folder
        self.world = World(folder)
        self.world.traps.mkdir()
        self.world.outside.touch()
        self.world.reminders.touch()
        self.world.kills.touch()
        self.answers: dict[str, Answer] = {}
        self.ladders: dict[str, int | None] = {}  # ladder id → when its payment was answered, if there was one
        self.problems: list[str] = []
        self.struck: Counter[str] = Counter()
        self.restarts = 0
        self._fleet: list[Process] = []
        self._set: dict[str, tuple[tuple[str, str], float]] = {}  # trap → its place in PLACES, and until when it waits
        self._to_set: list[tuple[str, str]] = []
        self._windows: dict[str, set[tuple[str, int | None]]] = {"direct": set(), "rq": set()}
        self._done: dict[str, set[tuple[str, int | None]]] = {"direct": set(), "rq": set()}
        self._read: Counter[Path] = Counter()  # bytes of the world's logs
        self._effects = 0
        self._reminders = 0
        self._over: set[str] = set()
        self._closing = threading.Event()
        self._seed = seed

    def run(self) -> None:
        """Kills, lets everything settle, and judges. What is wrong is in `problems` afterwards."""
        with (
            _server(self.folder, self.binary) as self.server,
            Accumulator(self.server.url, namespace=self.NAMESPACE, partitions=8) as accumulator,
        ):
            self.accumulator = accumulator
            self._note_server()
            for flow, policy in POLICIES.items():
                accumulator.load_policy(flow, WINDOWS | policy)
            accumulator.load_ladder("dunning", LADDER)
            self._fleet = [self._process(roles) for roles in FLEET]
            jobs = ((self._push_on, 0), (self._push_on, 1), (self._remind_on, 2))
            producers = [threading.Thread(target=self._produce, args=job, daemon=True) for job in jobs]
            for producer in producers:
                producer.start()
            try:
                self._strike_on()
                self._closing.set()
                self._until(lambda: not any(p.is_alive() for p in producers), 30, "the producers have their answers")
                self._settle()
                self._judge()
                self._stop()
            finally:
                self._closing.set()
                for process in self._fleet:
                    process.kill()

    # --- keeping it going ---

    def _process(self, roles: str) -> Process:
        return Process(roles, self.folder, self.server.url, self.NAMESPACE)

    def _note_server(self) -> None:
        self.world.server.write_text(str(self.server.pid))

    def _keep(self) -> None:
        """Whatever died lives again."""
        if not self.server.running:
            self.server.restart()
            self.restarts += 1
            self._note_server()
        for i, process in enumerate(self._fleet):
            if not process.lives:
                if process.ended_by_itself:
                    self.problems.append(f"{process.roles} ended by itself")
                self._fleet[i] = self._process(process.roles)

    def _until(self, condition: Callable[[], bool], seconds: float, what: str) -> bool:
        until = monotonic() + seconds
        while monotonic() < until:
            self._keep()
            try:
                if condition():
                    return True
            except ServerError:
                continue
            _pause(0.05)
        self.problems.append(f"not within {seconds:g} s: {what}")
        return False

    def _unsettled(self) -> int:
        return self.accumulator.store.perform(self.accumulator.operations.health()).unsettled

    def _follow(self) -> None:
        """Reads on in the world's logs."""
        for call in self._news(self.world.outside):
            self._effects += 1
            self._done[_sink(call["bucket"])].update((call["bucket"], version) for _, version, _ in call["windows"])
        for call in self._news(self.world.reminders):
            self._reminders += "key" in call
            if call["what"] in ("cancelled", "escalate"):
                self._over.add(call["ladder"])

    def _news(self, path: Path) -> Iterator[dict[str, Any]]:
        with path.open("rb") as log:
            log.seek(self._read[path])
            text = log.read()
        whole = text[: text.rfind(b"\n") + 1]
        self._read[path] += len(whole)
        yield from map(json.loads, whole.splitlines())

    def _reminding(self) -> int:
        """Ladders that are neither paid nor over."""
        return sum(paid is None and ladder_id not in self._over for ladder_id, paid in [*self.ladders.items()])

    def _waiting(self, sink: str) -> int:
        """Windows, open or closed, that had no effect yet."""
        return len(self._windows[sink]) - len(self._done[sink])

    # --- killing ---

    @property
    def kills(self) -> Counter[str]:
        """Where somebody died, or stalled → how often."""
        return self.struck + Counter(self.world.kills.read_text().splitlines())

    def _killed(self) -> int:
        return sum(times for place, times in self.kills.items() if not place.endswith(" stall"))

    def _strike_on(self) -> None:
        began = told = moved = monotonic()
        at, before, last = began, 0, 0
        while (kills := self._killed()) < self.rounds:
            self._keep()
            now = monotonic()
            if now >= at and (self._effects > before + 1 or now > at + PATIENCE):
                self._strike()
                at, before = now + self.random.expovariate(self.rate), self._effects
            if self._effects > last:
                moved, last = now, self._effects
            elif now > moved + STUCK:
                self.problems.append(f"no effect for {STUCK:g} s")
                return
            if now >= told + 5:
                self._say(kills, now - began)
                told = now
            self._follow()
            _pause(0.02)
        self._say(self._killed(), monotonic() - began)

    def _say(self, kills: int, seconds: float) -> None:
        waiting = " and ".join(f"{self._waiting(sink)} {sink}" for sink in self._windows)
        print(
            f"  {kills:5} of {self.rounds} kills ({kills / seconds:4.1f}/s), server back {self.restarts} times; "
            f"{len(self.answers)} events answered, {self._effects} effects, {waiting} windows wait; "
            f"{len(self.ladders)} ladders, {self._reminders} reminders",
            flush=True,
        )

    def _strike(self) -> None:
        """Two of three kills at a step, the others at any moment."""
        kind = self.random.choices(("step", "server", "handler", "process"), (20, 1, 4, 5))[0]
        if kind == "step":
            self._set_trap()
        elif kind == "handler":
            # Some time after a beginning: this is how a handler of an RQ worker, a process of its own, is met.
            self.world.set_trap("some-moment", "process", self.random.uniform(0.0005, 0.02))
        elif kind == "server":
            if self.server.running:
                self.server.kill()
                self.struck["any moment: server"] += 1
        else:
            process = self.random.choice(self._fleet)
            if process.lives:
                process.kill()
                self.struck[f"any moment: {process.roles}"] += 1

    def _set_trap(self) -> None:
        now = monotonic()
        for name, (place, until) in list(self._set.items()):
            trap = self.world.traps / name
            if not trap.exists():
                del self._set[name]
            elif now > until:
                trap.unlink(missing_ok=True)  # nobody came along: another time
                del self._set[name]
                self._to_set.insert(self.random.randint(0, len(self._to_set)), place)
        if len(self._set) >= 6:
            return
        if not self._to_set:
            # A server's death stops everybody for a while.
            more = [place for place in PLACES if place[1] == "process"]
            self._to_set = self.random.sample([*PLACES, *more], len(PLACES) + len(more))
        place = self._to_set.pop()
        if place[0] in self._set:
            self._to_set.insert(0, place)
            return
        self.world.set_trap(*place)
        self._set[place[0]] = (place, now + 5)

    # --- pushing ---

    def _produce(self, job: Callable[[Accumulator, int], None], number: int) -> None:
        try:
            with Accumulator(self.server.url, namespace=self.NAMESPACE) as accumulator:
                job(accumulator, number)
        except Exception as problem:
            self.problems.append(f"a producer failed: {type(problem).__name__}: {problem}")
            raise

    def _push_on(self, accumulator: Accumulator, number: int) -> None:
        chance = random.Random(self._seed * 10 + number)
        names = (f"p{number}-{n}" for n in count())
        sent: list[dict[str, Any]] = []
        while not self._closing.is_set():
            sinks = [sink for sink, most in MOST_WAITING.items() if self._waiting(sink) < most]
            flows = [flow for flow, policy in POLICIES.items() if policy["sink"] in sinks]
            if not flows:
                _pause(0.05)
                continue
            batch = [
                self._event(
                    chance,
                    next(names),
                    f"{chance.choice(TENANTS)}:{chance.choice(flows)}:{chance.randrange(OBJECTS)}",
                    "end" if chance.random() < 0.2 else "item",
                )
                for _ in range(chance.choice((1, 1, 2, 5)))
            ]
            if sent and chance.random() < 0.1:
                batch.append(chance.choice(sent))  # a delivery twice
            self._deliver(accumulator, batch)
            sent = [*sent[-50:], *batch]
            if chance.random() < 0.05:
                with suppress(ServerError):
                    accumulator.flush(batch[0]["bucket_key"])
            _pause(chance.expovariate(60))

    def _remind_on(self, accumulator: Accumulator, number: int) -> None:
        """Ladders, each in a bucket of its own, started, moved, held, paid; asked again where no answer came."""
        chance = random.Random(self._seed * 10 + number)
        unpaid: list[tuple[str, str]] = []  # ladder id, bucket

        def until_answered(call: Callable[[], T]) -> T:
            while True:
                try:
                    return call()
                except ServerError:
                    _pause(0.02)

        for n in count():
            if self._closing.is_set():
                break
            if self._reminding() < MOST_REMINDED:
                bucket = f"{chance.choice(REMINDING)}:{chance.choice(LADDER_FLOWS)}:L{n}"
                start = partial(accumulator.start_ladder, "dunning", bucket, start_id="one")
                ladder_id = until_answered(start).ladder_id
                self.ladders[ladder_id] = None
                unpaid.append((ladder_id, bucket))
                if until_answered(start).ladder_id != ladder_id:
                    self.problems.append(f"{bucket}: the same start started another ladder")
            _pause(chance.expovariate(8))
            if not unpaid:
                continue
            ladder_id, bucket = unpaid.pop(chance.randrange(len(unpaid)))
            act = chance.choice(("pay", "pay", "move", "move", "hold", "leave"))
            if act == "pay":
                self._deliver(accumulator, [self._event(chance, f"p{number}-{n}", bucket, "paid")])
                self.ladders[ladder_id] = int(time.time() * 1000)
                continue
            if act == "move":
                anchor = datetime.now(UTC) + timedelta(milliseconds=chance.randint(-1500, 500))
                until_answered(partial(accumulator.reschedule_ladder, ladder_id, anchor))
            elif act == "hold":
                until_answered(partial(accumulator.pause_ladder, ladder_id))
                _pause(chance.uniform(0, 0.3))
                until_answered(partial(accumulator.resume_ladder, ladder_id))
            if act != "leave":
                unpaid.append((ladder_id, bucket))

    def _event(self, chance: random.Random, name: str, bucket: str, kind: str) -> dict[str, Any]:
        return {
            "event_id": name,
            "bucket_key": bucket,
            "kind": kind,
            "source": "chaos",
            "occurred_at": datetime.now(UTC),
            "payload": {"n": name},
        }

    def _deliver(self, accumulator: Accumulator, events: list[dict[str, Any]]) -> None:
        """Until every event has an answer: the same again where none came."""
        while events:
            try:
                receipts = accumulator.push_many(events)
            except ServerError:
                _pause(0.02)
                continue
            events = [e for e, r in zip(events, receipts, strict=True) if r.outcome is Outcome.UNKNOWN]
            for receipt in receipts:
                if receipt.outcome is not Outcome.UNKNOWN:
                    self._note(receipt)

    def _note(self, receipt: Receipt) -> None:
        event_id = receipt.event_id
        self._windows[_sink(receipt.bucket_key)].add((receipt.bucket_key, receipt.window_version))
        before = self.answers.get(event_id)
        if receipt.outcome is Outcome.ACCEPTED and before is None:
            self.answers[event_id] = Answer(
                event_id, receipt.bucket_key, receipt.window_version, receipt.window_id, receipt.position
            )
        elif receipt.outcome is not Outcome.DUPLICATE:
            self.problems.append(f"{event_id} was answered {receipt.outcome} {receipt.code}, before: {before}")
        elif before is None:
            # Accepted by a call whose answer was lost.
            self.answers[event_id] = Answer(event_id, receipt.bucket_key, receipt.window_version, None, None)
        elif before.version != receipt.window_version:
            self.problems.append(f"{event_id} was answered version {before.version}, then {receipt.window_version}")

    # --- the end ---

    def _settle(self) -> None:
        for trap in self.world.traps.iterdir():
            if not trap.name.startswith("taken"):
                trap.unlink(missing_ok=True)
        began = monotonic()

        def settled() -> bool:
            waits = self.accumulator.open_buckets() or self.accumulator.ladders("running")
            return not waits and self._unsettled() == 0

        if self._until(settled, TO_SETTLE, "every manifest is confirmed"):
            print(f"  all is settled {monotonic() - began:.1f} s after the last kill", flush=True)

    def _judge(self) -> None:
        log = self.world.outside.read_text().splitlines()
        self.problems += check(self.answers.values(), log)
        runs = {run.ladder_id: run for run in self.accumulator.ladders()}
        missing = self.ladders.keys() - runs
        self.problems += [f"{ladder_id}: the ladder is gone" for ladder_id in missing]
        seen = [Reminded(i, runs[i].state, runs[i].since, at) for i, at in self.ladders.items() if i in runs]
        self.problems += check_ladders(seen, self.world.reminders.read_text().splitlines())
        operations, perform = self.accumulator.operations, self.accumulator.store.perform
        waiting = perform(operations.attention())
        self.problems += [f"{window_id} waits for a person: {self._tell(window_id)}" for window_id in waiting[:10]]
        unsettled = self._unsettled()
        flying = [tenants for tenants in perform(operations.in_flight()) if tenants]
        if flying and not unsettled:
            self.problems.append(f"nothing is unsettled, and yet in flight: {flying}")
        if unsettled:
            for bucket in sorted({answer.bucket for answer in self.answers.values()}):
                for manifest in self.accumulator.manifests(bucket):
                    if not manifest.settled:
                        self.problems.append(f"{bucket} is not settled: {self._tell(manifest.window_id)}")

    def _tell(self, window_id: str) -> str:
        """A manifest's last steps and its ledger."""
        manifest = self.accumulator.manifest(window_id)
        assert manifest is not None
        effects = self.accumulator.store.perform(self.accumulator.operations.effects(window_id))
        steps = [f"{at % 1_000_000} {state} {attempt} {cause}" for at, state, attempt, cause in manifest.timeline[-12:]]
        return f"version {manifest.window_version} {manifest.state} {manifest.error} {effects} {steps}"

    def _stop(self) -> None:
        """Asked to, everything ends: the workers, and the jobs that an RQ worker's death left alone."""
        for process in self._fleet:
            process.ask_to_stop()
        for process in self._fleet:
            if not process.stopped(6):
                self.problems.append(f"{process.roles} did not stop within 6 s")
        client: Any = self.accumulator.store.client
        until = monotonic() + 10
        while len(client.client_list()) > 1 and monotonic() < until:
            _pause(0.05)

    def missed(self) -> list[str]:
        """Places where nobody died."""
        kills = self.kills
        return [f"{place} {victim}" for place, victim in PLACES if not kills[f"{place} {victim}"]]


# --- closing, while thousands wait ------------------------------------------------------------------------------------


def closing_delays(
    waiting: int, windows: int, folder: Path, binary: ServerBinary | None
) -> tuple[list[list[int]], list[list[int]]]:
    """ms between the due instant and the closing of `windows` windows in each of a few runs, without and with `waiting`
    manifests that nobody runs. Both kinds of run alternate, on one server."""
    policies: dict[str, dict[str, Any]] = {"soon": {"inactivity": "300ms", "sink": "none"}}
    for sink in ("direct", "rq"):
        policies[f"{sink}-waits"] = {"inactivity": "1h", "max_events": 1, "sink": sink}
    found: dict[str, list[list[int]]] = {"without": [], "with": []}
    (folder / "traps").mkdir()
    with ExitStack() as stack:
        server = stack.enter_context(_server(folder, binary))
        spaces = {name: stack.enter_context(Accumulator(server.url, namespace=name)) for name in found}
        for accumulator in spaces.values():
            for flow, policy in policies.items():
                accumulator.load_policy(flow, policy)
        of_whom = [f"{tenant}:{sink}-waits" for tenant in TENANTS for sink in ("direct", "rq")]
        spaces["with"].push_many(_one_event(f"{of_whom[n % 4]}:{n}") for n in range(waiting))
        for turn in range(TURNS):
            for name, accumulator in spaces.items():
                keys = [f"t:soon:{turn}-{n}" for n in range(windows)]
                workers = [Process(role, folder, server.url, name) for role in ("closer", "dispatcher")]
                try:
                    found[name].append(_delays(accumulator, keys))
                finally:
                    for worker in workers:
                        worker.kill()
        unsettled = spaces["with"].store.perform(spaces["with"].operations.health()).unsettled
        assert unsettled == waiting, f"{unsettled} manifests wait"
    return found["without"], found["with"]


def _delays(accumulator: Accumulator, keys: Sequence[str]) -> list[int]:
    first = f"{keys[0]}-first"
    accumulator.push(_one_event(first))
    until = monotonic() + 20
    while not accumulator.manifests(first) and monotonic() < until:
        _pause(0.01)  # a new process sees what is there before it is quick
    for key in keys:
        accumulator.push(_one_event(key))
        _pause(0.002)
    while accumulator.open_buckets() and monotonic() < until:
        _pause(0.05)
    return [manifest.sealed_at - manifest.closed_at for key in keys for manifest in accumulator.manifests(key)]


def _one_event(key: str) -> dict[str, Any]:
    return {"event_id": "1", "bucket_key": key, "kind": "k", "source": "s", "occurred_at": datetime.now(UTC)}


def p99(values: Sequence[int]) -> float:
    return statistics.quantiles(values, n=100)[98]


def delay_problems(without: Sequence[Sequence[int]], with_them: Sequence[Sequence[int]]) -> list[str]:
    """A generous bound on the quietest runs: what others do on this machine is no fault. Were each closing to pass the
    thousands that wait, every run would be far above it."""
    if len({len(run) for run in (*without, *with_them)}) != 1:
        return ["not all windows were closed"]
    if min(map(p99, with_them)) > 2 * min(map(p99, without)) + 20:
        return ["windows close later while manifests wait"]
    return []


# --- the program ------------------------------------------------------------------------------------------------------


def _report(kills: Mapping[str, int], errors: Path | None) -> None:
    print(f"\n  at a step, before and after: {', '.join(VICTIMS)}")
    for step in STEPS:
        row = [[kills.get(f"{step}-{when} {victim}", 0) for victim in VICTIMS] for when in ("before", "after")]
        print(f"  {step:20}", *(f"{a:8}{b:6}{c:6}" for a, b, c in row))
    for name in sorted(kills):
        if name.startswith(("any", "some")):
            print(f"  {name:45}{kills[name]:5}")
    if errors is not None and errors.exists():
        print("\nthe last lines of the workers:", *errors.read_text().splitlines()[-60:], sep="\n  ")


def main(arguments: Sequence[str] | None = None) -> int:
    kinds = _kinds()
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--rounds", type=int, default=100, help="how often somebody is killed")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--server", choices=sorted(kinds), default=min(kinds, default=None), help="its kind")
    parser.add_argument("--rate", type=float, default=12.0, help="kills that are tried in a second")
    parser.add_argument("--waiting", type=int, default=20_000, help="manifests that wait while windows are closed")
    parser.add_argument("--windows", type=int, default=800, help="windows that are closed in each run")
    options = parser.parse_args(arguments)
    binary = kinds.get(options.server)
    problems: list[str] = []
    with tempfile.TemporaryDirectory(prefix="chaos-") as name:
        if options.rounds:
            folder = Path(name, "kills")
            folder.mkdir()
            chaos = Chaos(options.rounds, options.seed, folder, binary, options.rate)
            print(f"{options.rounds} kills, seed {options.seed}, {binary}", flush=True)
            try:
                chaos.run()
            finally:
                problems += chaos.problems
                _report(chaos.kills, chaos.world.errors if problems else None)
            if options.rounds >= 5 * len(PLACES) and (missed := chaos.missed()):
                problems.append(f"nobody died at {', '.join(missed)}")
        if options.waiting:
            folder = Path(name, "waiting")
            folder.mkdir()
            without, with_them = closing_delays(options.waiting, options.windows, folder, binary)
            print(f"\nsealed_at - closed_at in ms, p50 and p99 of {options.windows} windows in each of {TURNS} runs")
            for runs, what in ((without, "nothing waits"), (with_them, f"{options.waiting} manifests wait")):
                shown = "   ".join(f"{statistics.median(run):3.0f} {p99(run):4.0f}" for run in runs)
                print(f"  {what:24} {shown}")
            problems += delay_problems(without, with_them)
    for problem in problems[:100]:
        print(f"WRONG: {problem}")
    print(f"\n{len(problems)} problems" if problems else "\neach effect once, in order, none missing")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
