"""Running handlers: one attempt at a manifest, and the threads that make attempts for the sink `direct`."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from time import monotonic
from typing import Final, TypeVar

from accumulator.client import Accumulator
from accumulator.context import Context, LeaseLost, NeedsApproval, StepContext, Uncertain, Work
from accumulator.emission import Emission, is_emission
from accumulator.errors import AccumulatorError, HandlerMissing, ServerError
from accumulator.handlers import (
    Diverged,
    Handler,
    PermanentError,
    RetryLater,
    Superseded,
    cause_of,
    find_handler,
    find_step_handler,
)
from accumulator.logs import get_logger, place
from accumulator.manifest import Manifest
from accumulator.role import SLICE, Role
from accumulator.turns import InFlight, Turns

T = TypeVar("T")

LEASE_MARGIN: Final = 10_000
"""ms that a lease outlasts the handler's timeout: to read the manifest before, and to settle after."""
WATCH: Final = 30_000
"""ms after which a manifest that was taken and has not begun is handed out again; doubled each time."""

PATIENCE: Final = 20.0
"""s that an attempt waits for a server that does not answer, before its handler runs."""

_BRIEF_LEASE: Final = 60_000
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
        self.token = secrets.token_hex(8)
        self.deadline: float | None = None
        """When its handler is past its timeout, by the monotonic clock; None while none runs."""
        self._limit = limit
        self._find = find
        self._find_step = find_step
        self._handler: Handler | None = None
        self._lease_until = 0.0
        self._group: tuple[Manifest, ...] = ()
        self._emission: Emission | None = None
        self._lock = threading.Lock()
        self._ended = False
        self._log = get_logger("runner").bind(window_id=window_id, attempt=attempt)

    def run(self) -> str | None:
        """How it ended, as settle takes it; None where this attempt had or has no say. Raises nothing of the handler's;
        ServerError where it could not even begin: then the manifest's watch brings it back."""
        store, operations = self.accumulator.store, self.accumulator.operations
        if is_emission(self.window_id):
            self._emission = _keep_trying(lambda: store.perform(operations.emission(self.window_id)), PATIENCE)
            self.bucket_key = None if self._emission is None else self._emission.bucket_key
        key = self.bucket_key or _keep_trying(lambda: store.perform(operations.owner(self.window_id)), PATIENCE)
        if key is None:
            self._log.error("manifest_unknown")
            return None
        self.bucket_key = key
        flow = key.split(":", 2)[1]
        self._log = self._log.bind(flow=flow, bucket_key=key)
        missing = False
        try:
            if self._emission is None:
                handler: Handler | None = self._find(flow)
            else:
                self._log = self._log.bind(ladder=self._emission.ladder)
                handler = self._find_step(self._emission)
        except HandlerMissing:
            handler, missing = None, True
        self._handler = handler
        lease = LEASE_MARGIN + handler.timeout if handler else _BRIEF_LEASE
        most = handler.max_attempts if handler else 0
        self._lease_until = monotonic() + lease / 1000
        try:
            begin = operations.begin if self._emission is None else operations.begin_emission
            state, granted = _keep_trying(
                lambda: store.perform(begin(self.window_id, self.attempt, self.token, lease, most)), PATIENCE
            )
            if granted is None:
                self._log.debug("not_granted", state=state)
                return None
            if isinstance(granted, Emission):
                self._emission = granted
            else:
                self._group = self._hand_over(granted)
        except ServerError:
            raise
        except AccumulatorError as problem:
            return self._settle(Ending("failed", cause_of(problem), 60_000, text=str(problem)))
        if handler is None and not missing:
            return self._settle(Ending("confirmed", "no_handler"))  # nobody wants to know
        if handler is None:
            self._log.error("handler_missing")
            return self._settle(Ending("returned", "HandlerMissing", self._pause()))
        return self._handle(handler)

    def _pause(self) -> int:
        """ms until somebody else may be there who can handle it."""
        return min(600_000, 5_000 << min(self.attempt - 1, 10))

    def _hand_over(self, manifest: Manifest) -> tuple[Manifest, ...]:
        """All manifests of this hand-over, the oldest first."""
        store, operations = self.accumulator.store, self.accumulator.operations

        def read(window_id: str) -> Manifest | None:
            return _keep_trying(lambda: store.perform(operations.manifest(window_id)), PATIENCE)

        others = [read(other) for other in manifest.joined]
        return (*sorted((m for m in others if m is not None), key=lambda m: m.window_version), manifest)

    def _handle(self, handler: Handler) -> str | None:
        # An answer to `begin` that came late has used some of the lease up: the handler must not outlive it.
        seconds = min(handler.timeout / 1000, self._lease_until - monotonic() - LEASE_MARGIN / 2000)
        if seconds <= 0:
            return self._settle(Ending("returned", "BeganLate", 1_000))
        ctx = self._context(handler, seconds)
        self.deadline = monotonic() + seconds
        try:
            odd = next((m.anomaly for m in self._group if m.anomaly), None)
            if odd is not None:
                ending = Ending("reconciling", odd)
            elif isinstance(ctx, Context) and not handler.loads and _must_load(ctx):
                ending = Ending("returned", "NeedsLoad", self._pause())
            else:
                with self._limit(seconds):
                    ctx.run()
                ending = Ending("confirmed", "handled", checkpoint=ctx.left)
        except BaseException as error:  # whatever a handler raises is an attempt that ended
            ending = _ending(error, handler, ctx)
        self.deadline = None
        return self._settle(ending)

    def _context(self, handler: Handler, seconds: float) -> Context | StepContext:
        if self._emission is not None:
            return StepContext(self.accumulator, handler, self._emission, self.token, seconds)
        return Context(self.accumulator, handler, self._group, self.token, seconds)

    def give_up(self, cause: str) -> str | None:
        """Ends the attempt from another thread while its handler still runs: what that does from now on changes
        nothing. None where it ended by itself meanwhile."""
        with self._lock:
            if self._ended or self.deadline is None:
                return None
            self._ended = True
        if cause == "Stopped" or self._handler is None:
            return self._settle(Ending("returned", cause, 1_000), by_other=True)
        ending = Ending("failed", cause, self._handler.delay(self._failures() + 1))
        return self._settle(ending, by_other=True)

    def _failures(self) -> int:
        """Failed attempts before this one."""
        if self._emission is not None:
            return self._emission.failures
        return self._group[-1].failures if self._group else 0

    def _settle(self, ending: Ending, by_other: bool = False) -> str | None:
        with self._lock:
            if self._ended and not by_other:
                return None
            self._ended = True
        if ending.name == "lost":
            self._log.warning("lease_lost")
            return None
        store, operations = self.accumulator.store, self.accumulator.operations

        def settle(ending: Ending) -> str:
            for other in self._group[:-1]:
                store.perform(operations.record(other))
            return store.perform(
                operations.settle(
                    self.window_id,
                    self.token,
                    ending.name,
                    ending.cause,
                    ending.delay,
                    ending.text,
                    ending.checkpoint,
                    self._group[-1] if self._group else None,
                )
            )

        try:
            told = _keep_trying(lambda: settle(ending), self._lease_until - monotonic())
            if told in ("effects_begun", "no_newer_window"):
                # It can't give way: it is an attempt like any other that failed.
                failures = self._failures() + 1
                ending = Ending("failed", told, self._handler.delay(failures) if self._handler else 1_000)
                told = _keep_trying(lambda: settle(ending), self._lease_until - monotonic())
        except AccumulatorError as problem:
            # Its lease ends, and the manifest is tried again.
            self._log.error("not_settled", ending=ending.name, cause=ending.cause, problem=type(problem).__name__)
            return None
        if told != "done":
            self._log.warning("settled_too_late", ending=ending.name, cause=ending.cause)
            return None
        if ending.name == "confirmed":
            self._log.debug("confirmed")
        else:
            last = self._handler is not None and self._failures() + 1 >= self._handler.max_attempts
            name = "dead" if ending.name == "failed" and last else ending.name
            tell = self._log.error if name == "dead" else self._log.warning
            tell(name, cause=ending.cause, where=ending.where, delay_ms=0 if name == "dead" else ending.delay)
        return ending.name


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


def _must_load(ctx: Context) -> bool:
    return not {e.event.kind for e in ctx.events}.isdisjoint(ctx.policy.requery_kinds)


def _ending(error: BaseException, handler: Handler, ctx: Work) -> Ending:
    cause, where = cause_of(error), place(error)
    text = f"{cause}: {_message(error, ctx)}"
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


def _message(error: BaseException, ctx: Work) -> str:
    """What the error says, as far as it can be kept: short, valid text that quotes no payload."""
    try:
        text = str(error)[:100_000].encode(errors="replace").decode()
    except Exception:  # a handler's own class may do anything here
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
    """One thread of the runner and what it is at."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.thread: threading.Thread | None = None
        self.attempt: Attempt | None = None
        self.replaced = False


class DirectRunner(Role):
    """Runs handlers in `threads` threads of this process: the sink ``direct``.

    Each thread takes one manifest when it is free, so that nothing waits here. A thread can't be killed: where a
    handler is past its timeout, its attempt is ended without it and another thread takes its place; `abandoned` counts
    them. When the runner stops, handlers have `grace` seconds; attempts that still run are given back at once.
    """

    name = "runner"
    sink = "direct"

    def __init__(
        self, accumulator: Accumulator, threads: int = 4, grace: float = 2.5, in_flight: InFlight | None = None
    ) -> None:
        super().__init__(accumulator)
        self.abandoned = 0
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
        for attempt in self._running():
            if attempt.deadline is not None:
                pause = min(pause, max(0.0, attempt.deadline - monotonic()))
        self._turns.listen(pause)
        self.trouble.over()
        self._replace_overdue()

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
            slot.replaced = True
            if slot.attempt is not None:
                givers.append(self._spawn(slot, slot.attempt.give_up, "Stopped"))
        until = monotonic() + 1.0
        for thread in givers:
            thread.join(max(0.0, until - monotonic()))
        self._slots.clear()
        self._turns.close()

    def _running(self) -> list[Attempt]:
        return [attempt for slot in self._slots if (attempt := slot.attempt) is not None]

    def _spawn(self, slot: _Slot, target: Callable[..., object], *args: object) -> threading.Thread:
        # As daemons, since a handler that hangs must not keep the process.
        thread = threading.Thread(target=target, args=args, name=f"{self.sink}-{slot.number}", daemon=True)
        thread.start()
        return thread

    def _replace_overdue(self) -> None:
        now = monotonic()
        for slot in list(self._slots):
            attempt = slot.attempt
            if attempt is not None and attempt.deadline is not None and attempt.deadline <= now:
                slot.replaced = True
                self._slots.remove(slot)
                self.abandoned += 1
                self.log.error("thread_abandoned", window_id=attempt.window_id, abandoned=self.abandoned)
                self._spawn(slot, attempt.give_up, "Timeout")

    def _work(self, slot: _Slot) -> None:
        while not (slot.replaced or self.stopping.is_set()):
            try:
                for taken in self._turns.take(1, WATCH, SLICE):
                    if slot.replaced:
                        return  # it stopped meanwhile: the manifest's watch brings it back
                    slot.attempt = Attempt(
                        self.accumulator,
                        taken.window_id,
                        taken.attempt,
                        taken.bucket_key,
                        find=self.find,
                        find_step=self.find_step,
                    )
                    slot.attempt.run()
                    self._turns.ended(taken.bucket_key)
            except Exception as problem:  # a thread that ended would be missing for ever
                self.stopping.wait(self.trouble.met(problem))
            finally:
                slot.attempt = None
