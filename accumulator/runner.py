"""Running handlers: attempts at manifests, and the threads that make attempts for the sink `direct`."""

from __future__ import annotations

import secrets
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from logging import DEBUG
from math import inf
from statistics import median
from time import monotonic
from typing import Final, TypeVar

from structlog.stdlib import BoundLogger

from accumulator.attempts import Ask, Grant, Settlement
from accumulator.client import Accumulator
from accumulator.context import Context, LeaseLost, NeedsApproval, StepContext, Uncertain, Work
from accumulator.emission import Emission, is_emission
from accumulator.envelope import flow_of
from accumulator.errors import AccumulatorError, HandlerMissing, ServerError
from accumulator.handlers import (
    Diverged,
    Handler,
    PermanentError,
    RetryLater,
    Superseded,
    Timeout,
    cause_of,
    find_handler,
    find_step_handler,
)
from accumulator.logs import get_logger, place
from accumulator.manifest import Manifest
from accumulator.policy import format_duration
from accumulator.role import SLICE, Role
from accumulator.store import answer, together
from accumulator.turns import InFlight, Turns

T = TypeVar("T")

_log = get_logger("runner")

LEASE_MARGIN: Final = 10_000
"""ms that a lease outlasts the handler's timeout: to read the manifest before, and to settle after."""
WATCH: Final = 30_000
"""ms after which a manifest that was taken and has not begun is handed out again; doubled each time."""

PATIENCE: Final = 20.0
"""s that an attempt waits for a server that does not answer, before its handler runs."""

_BRIEF_LEASE: Final = 60_000  # of an attempt for which no handler is to run

HASTE: Final = 0.01
"""s of handling that a thread of the runner takes at once, and that what is over waits to be settled, while no handler
is slow."""
SLOW: Final = 0.1
"""s that one handler may hold up others that were taken with it."""
MOST: Final = 50
"""Manifests taken at once."""

Guard = Callable[[float], AbstractContextManager[object]]
"""Makes what limits a block to so many seconds by raising Timeout in it, where that can be done."""


def _unlimited(_: float) -> AbstractContextManager[object]:
    return nullcontext()


class Attempt:
    """One attempt at a manifest: begin, read, handle, settle. Made once; what is granted to it is granted to no other.

    `bucket_key` saves a call where it is known. `limit` is the guard its handler runs under; `find` gives the handler
    of a flow or raises HandlerMissing, `find_step` that of a ladder and of what it emitted.
    """

    def __init__(
        self,
        accumulator: Accumulator,
        window_id: str,
        attempt: int,
        bucket_key: str | None = None,
        limit: Guard = _unlimited,
        find: Callable[[str], Handler] = find_handler,
        find_step: Callable[[Emission], Handler | None] = find_step_handler,
    ) -> None:
        self.accumulator = accumulator
        self.window_id = window_id
        self.attempt = attempt
        self.bucket_key = bucket_key
        self.of_ladder = is_emission(window_id)
        self.token = ""
        self.deadline: float | None = inf
        """When its handler is past its timeout, by the monotonic clock; None once it has ended."""
        self._limit = limit
        self._find = find
        self._find_step = find_step
        self._handler: Handler | None = None
        self.missing: HandlerMissing | None = None
        """Set once it has been asked for, where no handler was found."""
        self._lease_until = 0.0
        self._group: tuple[Manifest, ...] = ()
        self._emission: Emission | None = None
        self._lock = threading.Lock()
        self._ended = False

    @property
    def log(self) -> BoundLogger:
        log: BoundLogger = _log.bind(window_id=self.window_id, attempt=self.attempt)
        if self.bucket_key is not None:
            log = log.bind(flow=flow_of(self.bucket_key), bucket_key=self.bucket_key)
        return log if self._emission is None else log.bind(ladder=self._emission.ladder)

    def run(self) -> str | None:
        """How it ended, as settle takes it; None where this attempt had or has no say. Raises nothing of the handler's;
        ServerError where it could not even begin: then the manifest's watch brings it back."""
        granted, _ = begin([self])
        return settle([(self, self.handle())]).get(self) if granted else None

    def ask(self, token: str) -> Ask | None:
        """What to ask the server for; None where there is no such manifest. Raises ServerError."""
        store, operations = self.accumulator.store, self.accumulator.operations
        self.token = token
        if self.of_ladder:
            self._emission = _keep_trying(lambda: store.perform(operations.emission(self.window_id)), PATIENCE)
            self.bucket_key = None if self._emission is None else self._emission.bucket_key
        elif self.bucket_key is None:
            self.bucket_key = _keep_trying(lambda: store.perform(operations.owner(self.window_id)), PATIENCE)
        if self.bucket_key is None:
            self.log.error("manifest_unknown")
            return None
        try:
            if self._emission is None:
                self._handler = self._find(flow_of(self.bucket_key))
            else:
                self._handler = self._find_step(self._emission)
        except HandlerMissing as problem:
            self.missing = problem
        handler = self._handler
        lease = LEASE_MARGIN + handler.timeout if handler else _BRIEF_LEASE
        self._lease_until = monotonic() + lease / 1000
        if handler is None:
            return Ask(self.window_id, self.attempt, lease, 0, (1_000, 60_000))
        return Ask(self.window_id, self.attempt, lease, handler.max_attempts, handler.spread())

    def granted(self, state: str, handled: Manifest | Emission | None) -> bool:
        """Takes what was answered to that; whether it may go on."""
        if handled is None:
            self.log.debug("not_granted", state=state)
            return False
        if isinstance(handled, Emission):
            self._emission = handled
        else:
            self._group = (handled,)
        return True

    def handle(self) -> Ending:
        """Runs the handler to its end, whichever that is; not where the attempt was given up before it began."""
        try:
            if self._handler is not None:
                self._read_others()
                return self._handle(self._handler)
            if self.missing is None:
                return Ending("confirmed", "no_handler")  # nobody wants to know
            self.log.error("handler_missing")
            return Ending("returned", "HandlerMissing", self._pause(), f"HandlerMissing: {self.missing}")
        except ServerError as problem:
            return Ending("returned", cause_of(problem), 1_000)
        except AccumulatorError as problem:
            return _unreadable(problem)
        finally:
            self.deadline = None

    def _pause(self) -> int:
        """ms until somebody else may be there who can handle it."""
        return min(600_000, 5_000 << min(self.attempt - 1, 10))

    def _read_others(self) -> None:
        """All manifests of this hand-over, the oldest first: those that were joined are read only now, since many may
        begin at once. Raises AccumulatorError."""
        joined = self._group[-1].joined if self._group else ()
        if not joined:
            return
        store, operations = self.accumulator.store, self.accumulator.operations

        def read() -> list[Manifest | None]:
            return [answer(found) for found in store.perform(together(map(operations.manifest, joined)))]

        others = [other for other in _keep_trying(read, PATIENCE) if other is not None]
        self._group = (*sorted(others, key=lambda m: m.window_version), *self._group)

    def _handle(self, handler: Handler) -> Ending:
        # An answer to `begin` that came late has used some of the lease up: the handler must not outlive it.
        seconds = min(handler.timeout / 1000, self._lease_until - monotonic() - LEASE_MARGIN / 2000)
        if seconds <= 0:
            return Ending("returned", "BeganLate", 1_000)
        ctx = self._context(handler, seconds)
        with self._lock:
            if self._ended:
                return Ending("lost", "given_up")
            self.deadline = monotonic() + seconds
        try:
            odd = next((m.anomaly for m in self._group if m.anomaly), None)
            if odd is not None:
                return Ending("reconciling", odd)
            if isinstance(ctx, Context) and not handler.loads and _must_load(ctx):
                return Ending("returned", "NeedsLoad", self._pause())
            with self._limit(seconds):
                ctx.run()
            return Ending("confirmed", "handled", checkpoint=ctx.left)
        except BaseException as error:  # whatever a handler raises is an attempt that ended
            return _ending(error, handler, ctx)

    def _context(self, handler: Handler, seconds: float) -> Context | StepContext:
        if self._emission is not None:
            return StepContext(self.accumulator, handler, self._emission, self.token, seconds)
        return Context(self.accumulator, handler, self._group, self.token, seconds)

    def give_up(self, cause: str) -> str | None:
        """Ends the attempt from another thread while its handler still runs, or before it does: what that does from now
        on changes nothing. None where it ended by itself meanwhile."""
        if self.deadline is None:
            return None
        ending = self._failed(cause) if cause != "Stopped" else Ending("returned", cause, 1_000)
        return settle([(self, ending)]).get(self)

    def claim(self) -> bool:
        """Whether the caller is the first to end it."""
        with self._lock:
            first, self._ended = not self._ended, True
            return first

    def settlement(self, ending: Ending) -> Settlement:
        """What to tell the server. Raises ServerError."""
        store, operations = self.accumulator.store, self.accumulator.operations
        for told in store.perform(together(map(operations.record, self._group[:-1]))):
            answer(told)
        return Settlement(
            self.window_id,
            self.token,
            ending.name,
            ending.cause,
            ending.delay,
            ending.text,
            ending.checkpoint,
            self._group[-1] if self._group else None,
        )

    def answered(self, ending: Ending, told: str | AccumulatorError, pause: float) -> Ending | None:
        """Takes what was answered to that. Where the server is to be told again, after `pause` seconds: with what."""
        if isinstance(told, ServerError) and monotonic() + pause <= self._lease_until:
            return ending
        if told in ("effects_begun", "no_newer_window"):
            return self._failed(str(told))  # it can't give way: it is an attempt like any other that failed
        if isinstance(told, AccumulatorError):
            # Its lease ends, and the manifest is tried again.
            self.log.error("not_settled", ending=ending.name, cause=ending.cause, problem=type(told).__name__)
        elif told != "done":
            self.log.warning("settled_too_late", ending=ending.name, cause=ending.cause)
        else:
            if ending.name == "confirmed" or ending.cause == "Waited":  # as things go
                if _log.isEnabledFor(DEBUG):
                    self.log.debug(ending.name, cause=ending.cause)
                return None
            last = self._handler is not None and self._failures() + 1 >= self._handler.max_attempts
            name = "dead" if ending.name == "failed" and last else ending.name
            tell = self.log.error if name == "dead" else self.log.warning
            tell(name, cause=ending.cause, where=ending.where, delay_ms=0 if name == "dead" else ending.delay)
        return None

    def _failed(self, cause: str) -> Ending:
        handler = self._handler
        text = _timed_out(handler) if cause == "Timeout" and handler is not None else ""
        return Ending("failed", cause, 1_000 if handler is None else handler.delay(self._failures() + 1), text)

    def _failures(self) -> int:
        """Failed attempts before this one."""
        if self._emission is not None:
            return self._emission.failures
        return self._group[-1].failures if self._group else 0


@dataclass(frozen=True)
class Ending:
    """How an attempt ended: `name` as settle takes it (``lost``: it has no say any more), the `cause` in a word, the
    `delay` (ms) that goes with it, the error's `text` for the manifest, `where` it arose for the log."""

    name: str
    cause: str
    delay: int = 0
    text: str = ""
    where: str = ""
    checkpoint: str = ""


def begin(attempts: Sequence[Attempt]) -> tuple[list[Attempt], list[Attempt]]:
    """Asks for attempts, as many at once as will do: those that may go on, and those that are to be asked for later.
    What a ladder emitted begins alone, just before it runs, since until then it may be called off. Raises ServerError.
    """
    first, token = attempts[0], secrets.token_hex(8)
    store, operations = first.accumulator.store, first.accumulator.operations
    if first.of_ladder:
        now, later = [first], list(attempts[1:])
    else:
        now, later = [a for a in attempts if not a.of_ladder], [a for a in attempts if a.of_ladder]
    asked = [(attempt, ask) for attempt in now if (ask := attempt.ask(token)) is not None]

    def perform(asks: Sequence[Ask]) -> list[Grant | tuple[str, Emission | None] | AccumulatorError | None]:
        if first.of_ladder:
            return [
                store.perform(
                    operations.begin_emission(ask.window_id, ask.attempt, token, ask.lease_ms, ask.most, ask.pause)
                )
                for ask in asks
            ]
        found = store.perform(operations.begin_all(token, asks))
        for each in found:
            if isinstance(each, ServerError):
                raise each
        if len(asks) > 1 and any(isinstance(each, AccumulatorError) for each in found):
            # What is wrong with one of them is no fault of the others, which the same token is granted again.
            return [each for ask in asks for each in perform([ask])]
        return [*found]

    going, broken = [], []
    answers = _keep_trying(lambda: perform([ask for _, ask in asked]), PATIENCE)
    for (attempt, _), found in zip(asked, answers, strict=True):
        try:
            if found is None:
                later.append(attempt)
            elif attempt.granted(*answer(found)):
                going.append(attempt)
        except AccumulatorError as problem:
            broken.append((attempt, _unreadable(problem)))
    settle(broken)
    return going, later


def settle(ended: Sequence[tuple[Attempt, Ending]]) -> dict[Attempt, str]:
    """Tells the server how attempts ended, as many at once as will do: the name of each one's ending, but of those that
    had no say any more."""
    claimed = [(attempt, ending) for attempt, ending in ended if attempt.claim()]
    for attempt, ending in claimed:
        if ending.name == "lost":
            attempt.log.warning("lease_lost")
    left = [(attempt, ending) for attempt, ending in claimed if ending.name != "lost"]
    names, pause = {}, 0.05
    while left:
        again, refused = [], False
        for (attempt, ending), told in zip(left, _tell(left), strict=True):
            if told == "done":
                names[attempt] = ending.name
            other = attempt.answered(ending, told, pause)
            if other is not None:
                again.append((attempt, other))
                refused |= isinstance(told, ServerError)
        if refused:
            threading.Event().wait(pause)
            pause = min(1.0, pause * 2)
        left = again
    return names


def _tell(ended: Sequence[tuple[Attempt, Ending]]) -> Sequence[str | AccumulatorError]:
    accumulator = ended[0][0].accumulator
    told: list[str | AccumulatorError]
    try:
        settlements = [attempt.settlement(ending) for attempt, ending in ended]
        told = accumulator.store.perform(accumulator.operations.settle_all(settlements))
    except AccumulatorError as problem:
        told = [problem] * len(ended)
    if len(ended) > 1:  # what is wrong with one of them is no fault of the others
        for i, each in enumerate(told):
            if isinstance(each, AccumulatorError) and not isinstance(each, ServerError):
                [told[i]] = _tell([ended[i]])
    return told


def _unreadable(problem: AccumulatorError) -> Ending:
    return Ending("failed", cause_of(problem), 60_000, text=str(problem))


def _must_load(ctx: Context) -> bool:
    return not {e.event.kind for e in ctx.events}.isdisjoint(ctx.policy.requery_kinds)


def _ending(error: BaseException, handler: Handler, ctx: Work) -> Ending:
    cause, where = cause_of(error), place(error)
    said = _message(error, ctx)
    text = _timed_out(handler) if isinstance(error, Timeout) else f"{cause}: {said}" if said else cause
    if isinstance(error, LeaseLost):
        return Ending("lost", cause)
    if isinstance(error, NeedsApproval):
        return Ending("awaiting_approval", "proposed", handler.approval_limit)
    if isinstance(error, Superseded) and isinstance(ctx, Context):
        return Ending("superseded", cause)
    if isinstance(error, Uncertain):
        return Ending("uncertain", "effect", text=text)
    if isinstance(error, Diverged):
        return Ending("reconciling", cause, text=text)
    if isinstance(error, PermanentError):
        return Ending("dead", cause, text=text, where=where)
    delay = error.after_ms if isinstance(error, RetryLater) else handler.delay(ctx.failures + 1)
    return Ending("failed", cause, delay, text, where)


def _timed_out(handler: Handler) -> str:
    return f"Timeout: the handler was not done after {format_duration(handler.timeout)}"


def _message(error: BaseException, ctx: Work) -> str:
    """What the error says, as far as it can be kept: short, valid text that quotes no payload."""
    try:
        text = str(error)[:100_000].encode(errors="replace").decode()
    except BaseException:  # a handler's own class may do anything here
        return "(its message can't be read)"
    return "(its message quotes the payload)" if ctx.quotes(text) else text[:500]


def _keep_trying(call: Callable[[], T], seconds: float) -> T:
    """Makes a call until the server takes it; raises ServerError after `seconds`."""
    until = monotonic() + seconds
    pause = 0.05
    while True:
        try:
            return call()
        except ServerError:
            if monotonic() + pause > until:
                raise
        threading.Event().wait(pause)
        pause = min(1.0, pause * 2)


def run_attempt(
    accumulator: Accumulator, window_id: str, attempt: int, bucket_key: str | None = None, limit: Guard = _unlimited
) -> str | None:
    """Makes one attempt at a manifest; see :class:`Attempt`."""
    return Attempt(accumulator, window_id, attempt, bucket_key, limit).run()


class _Slot:
    """One thread of the runner: the attempt it is at, since when (s, monotonic), those that wait for it, and those that
    are over and not settled yet."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.thread: threading.Thread | None = None
        self.attempt: Attempt | None = None
        self.since = 0.0
        self.replaced = False
        self._lock = threading.Lock()
        self._waiting: deque[Attempt] = deque()
        self._over: list[tuple[Attempt, Ending]] = []

    @property
    def holds(self) -> bool:
        """Whether others wait for the one it is at."""
        return bool(self._waiting or self._over)

    def run(self, attempts: Sequence[Attempt]) -> list[float]:
        """Begins, runs and settles them, one after the other; how long (s) each handler took. Raises ServerError."""
        took: list[float] = []
        later = list(attempts)
        try:
            while later and not self.replaced:
                granted, later = begin(later)
                self._waiting.extend(granted)
                told = monotonic()
                while (attempt := self._next()) is not None:
                    ending = attempt.handle()
                    self.attempt = None
                    now = monotonic()
                    took.append(now - self.since)
                    with self._lock:
                        self._over.append((attempt, ending))
                    if now - told >= HASTE:
                        self.settle()
                        told = monotonic()
                self.settle()
        finally:
            self.attempt = None
            self.settle("Waited")  # what it begins no more
        return took

    def _next(self) -> Attempt | None:
        with self._lock:
            self.since = monotonic()
            self.attempt = self._waiting.popleft() if self._waiting and not self.replaced else None
            return self.attempt

    def replace(self, attempt: Attempt | None = None) -> Attempt | None:
        """Lets the thread begin nothing more, if it is still at that `attempt` where one is given: what it is at."""
        with self._lock:
            if attempt is None or self.attempt is attempt:
                self.replaced = True
                return self.attempt
            return None

    def settle(self, cause: str | None = None) -> None:
        """Settles what is over; with a `cause`, gives back what waits as well. From any thread."""
        with self._lock:
            over, self._over = self._over, []
            if cause is not None:
                over += [(attempt, Ending("returned", cause, 1)) for attempt in self._waiting]
                self._waiting.clear()
        settle(over)


class DirectRunner(Role):
    """Runs handlers in `threads` threads of this process: the sink ``direct``.

    A free thread takes one manifest, so that nothing waits here; where handlers are quick, as many as they finish in
    HASTE, so that the server is asked once for all of them. A thread can't be killed: where a handler is past its
    timeout, its attempt is ended without it and another thread takes its place; `abandoned` counts them. In a
    process that is `expendable` the runner stops then, so that the handler can end with the process. When the runner
    stops, handlers have `grace` seconds; attempts that still run are given back at once. Handlers run under `limit`.
    """

    name = "runner"
    sink = "direct"

    def __init__(
        self,
        accumulator: Accumulator,
        threads: int = 4,
        grace: float = 2.5,
        in_flight: InFlight | None = None,
        limit: Guard = _unlimited,
        expendable: bool = False,
    ) -> None:
        super().__init__(accumulator)
        self.abandoned = 0
        self._limit = limit
        self._expendable = expendable
        self._threads = threads
        self._grace = grace
        self._turns = Turns(accumulator, self.sink, in_flight)
        self._slots: list[_Slot] = []
        self._kept = 0

    def find(self, flow: str) -> Handler:
        """What runs for a flow. Raises HandlerMissing."""
        return find_handler(flow)

    def find_step(self, emission: Emission) -> Handler | None:
        """What runs for what a ladder emitted; None where nothing is to be done. Raises HandlerMissing."""
        return find_step_handler(emission)

    def step(self) -> None:
        while self._turns.active and len(self._slots) < self._threads:
            self._kept += 1
            slot = _Slot(self._kept)
            self._slots.append(slot)
            slot.thread = self._spawn(slot, self._work, slot)
        pause = SLICE
        for slot in self._slots:
            if slot.holds:
                pause = min(pause, SLOW)
            if (attempt := slot.attempt) is not None and (deadline := attempt.deadline) is not None:
                pause = min(pause, max(0.0, deadline - monotonic()))
        self._turns.listen(pause)
        self.trouble.over()
        self._watch()

    def stop(self) -> None:
        super().stop()
        self._turns.wake()

    def close(self) -> None:
        until = monotonic() + self._grace
        for slot in self._slots:
            if slot.thread is not None:
                slot.thread.join(max(0.0, until - monotonic()))
        givers = []
        for slot in self._slots:
            attempt = slot.replace()
            givers.append(self._spawn(slot, slot.settle, "Stopped"))
            if attempt is not None:
                givers.append(self._spawn(slot, attempt.give_up, "Stopped"))
        until = monotonic() + 1.0
        for thread in givers:
            thread.join(max(0.0, until - monotonic()))
        self._slots.clear()
        self._turns.close()

    def _spawn(self, slot: _Slot, target: Callable[..., object], *args: object) -> threading.Thread:
        # As daemons, since a handler that hangs must not keep the process.
        thread = threading.Thread(target=target, args=args, name=f"{self.sink}-{slot.number}", daemon=True)
        thread.start()
        return thread

    def _watch(self) -> None:
        """Looks after threads that are long at one handler: what is past its timeout ends; for others nobody waits."""
        now = monotonic()
        for slot in list(self._slots):
            attempt = slot.attempt
            if attempt is None:
                continue
            deadline = attempt.deadline
            overdue = deadline is not None and deadline <= now
            if slot.holds and not (overdue and self._expendable) and (overdue or now - slot.since >= SLOW):
                self._spawn(slot, slot.settle, "Waited")
            if overdue and slot.replace(attempt):
                self._slots.remove(slot)
                self.abandoned += 1
                if self._expendable:
                    slot.settle("Waited")
                    attempt.give_up("Timeout")
                    self.stop()
                    continue
                self.log.error("thread_abandoned", window_id=attempt.window_id, abandoned=self.abandoned)
                self._spawn(slot, attempt.give_up, "Timeout")

    def _work(self, slot: _Slot) -> None:
        count = 1
        while not (slot.replaced or self.stopping.is_set()):
            try:
                taken = self._turns.take(count, WATCH, SLICE)
                if not taken:
                    continue
                took = slot.run(
                    [
                        Attempt(
                            self.accumulator,
                            one.window_id,
                            one.attempt,
                            one.bucket_key,
                            self._limit,
                            find=self.find,
                            find_step=self.find_step,
                        )
                        for one in taken
                    ]
                )
                for one in taken:
                    self._turns.ended(one.bucket_key)
                # By the usual one, since a thread may wait for the others; a slow one says that there are such.
                quick = took and max(took) < SLOW and HASTE / max(median(took), 1e-6)
                count = max(1, min(MOST, count * 2, int(quick or 1)))
            except BaseException as problem:  # a thread that ended would be missing for ever
                count = 1
                self.stopping.wait(self.trouble.met(problem))
