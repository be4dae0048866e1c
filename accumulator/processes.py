"""Processes of a worker: RQ workers, and those that run handlers for the sink `direct`, each on a core of its own."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from time import monotonic
from typing import Any, Final

from accumulator import logs
from accumulator.client import Accumulator
from accumulator.errors import AccumulatorError, InternalError
from accumulator.handlers import load_handlers
from accumulator.role import SLICE, Role, stopped_by
from accumulator.runner import LEASE_MARGIN, DirectRunner
from accumulator.settings import Config, Settings
from accumulator.turns import InFlight

OVERDUE: Final = 124
"""Exit code of a process that ended because a handler in it was past its timeout (that of timeout(1))."""


class Processes(Role):
    """Keeps `count` processes running, each of which calls ``program(settings, *rest)``; one that ends is replaced.

    `program` is a function of a module, and the rest can be pickled. `ending` says how they are ended: each signal,
    and the seconds they have after it. What one did not settle is tried again when its lease ends. They end with this
    process too, however it does.
    """

    def __init__(
        self,
        accumulator: Accumulator,
        name: str,
        count: int,
        program: Callable[..., None],
        settings: Settings,
        *rest: Any,
        ending: Sequence[tuple[signal.Signals, float]],
    ) -> None:
        self.name = name
        super().__init__(accumulator)
        self._told = pickle.dumps((program, settings, rest))
        self._count = count
        self._ending = ending
        self._running: list[subprocess.Popen[bytes]] = []
        self._started_at = 0.0

    @property
    def pids(self) -> list[int]:
        """Their process ids."""
        return [process.pid for process in self._running]

    def step(self) -> None:
        for process in [process for process in self._running if process.poll() is not None]:
            self._running.remove(process)
            _sweep(process)
            code = process.returncode
            if code != OVERDUE:  # which says nothing against starting the next one
                how = f"ended with code {code}" if code >= 0 else f"was ended by a signal: {signal.strsignal(-code)}"
                self.stopping.wait(self.trouble.met(InternalError(f"a process of the role {self.name} {how}")))
        while len(self._running) < self._count and not self.stopping.is_set():
            self._running.append(self._start())
            self._started_at = monotonic()
        if monotonic() - self._started_at > 5:
            self.trouble.over()
        self.stopping.wait(SLICE)

    def close(self) -> None:
        for how, seconds in self._ending:
            self._end(how, seconds)
        for process in self._running:
            _sweep(process)
        self._running.clear()

    def _start(self) -> subprocess.Popen[bytes]:
        # Settings go through a pipe: a password must show in no list of processes.
        process = subprocess.Popen(
            [sys.executable, "-c", "from accumulator.processes import main; main()"],
            stdin=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C is for us, who stop it
        )
        assert process.stdin is not None
        try:
            process.stdin.write(self._told)
            process.stdin.flush()
        except OSError:
            self.log.error("process_not_started", pid=process.pid)
        return process

    def _end(self, how: signal.Signals, seconds: float) -> None:
        left = [process for process in self._running if process.poll() is None]
        for process in left:
            process.send_signal(how)
        until = monotonic() + seconds
        for process in left:
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, until - monotonic()))


def _sweep(process: subprocess.Popen[bytes]) -> None:
    """Ends what a process that has ended left behind: programs that a handler had started and waited for."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    if process.stdin is not None:
        with suppress(OSError):
            process.stdin.close()


def main() -> None:
    """The program of a process of :class:`Processes`: reads what it is told from its standard input, and ends when the
    other end of that is gone."""
    program, settings, rest = pickle.load(sys.stdin.buffer)
    # What a handler starts must not wait for what never comes, nor take it from us.
    told = os.dup(0)
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
    logs.configure(settings.log_level, settings.log_plain_keys)
    log = logs.get_logger("process")

    def follow() -> None:
        while os.read(told, 1):
            continue
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=follow, daemon=True).start()
    try:
        program(settings, *rest)
    except AccumulatorError as problem:
        log.error("not_started", problem=type(problem).__name__, detail=str(problem))
        sys.exit(1)
    except Exception as problem:  # no text of it: nobody knows what it repeats
        log.error("broke", problem=type(problem).__name__, where=logs.place(problem))
        sys.exit(1)


# --- the sink `direct` ------------------------------------------------------------------------------------------------


class _Watchdog:
    """Has the kernel end this process where a handler keeps every other thread from running past its timeout, as one
    may that blocks in a C extension: nothing else would get to do it. The lease of the manifest ends then.

    Before the first `sign`, nothing is watched.
    """

    MARGIN: Final = LEASE_MARGIN / 2000
    """s past a timeout, or of silence: less than a lease has, so that no second attempt runs beside the first."""
    PAUSE: Final = 1.0

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._until: list[float] = []
        signal.signal(signal.SIGALRM, signal.SIG_DFL)  # which the kernel does without us

    @contextmanager
    def handling(self, seconds: float) -> Iterator[None]:
        """A handler runs, and has so many seconds."""
        until = monotonic() + seconds
        with self._lock:
            self._until.append(until)
        self.sign()
        try:
            yield
        finally:
            with self._lock:
                self._until.remove(until)
            self.sign()

    def sign(self) -> None:
        """A sign of life."""
        with self._lock:
            now = monotonic()
            signal.setitimer(signal.ITIMER_REAL, max([now, *self._until]) - now + self.MARGIN)

    def keep(self) -> None:
        """Gives signs of life for as long as the process lives."""
        pause = threading.Event()
        while True:
            self.sign()
            pause.wait(self.PAUSE)


def run_handlers(settings: Settings, config: Config, threads: int) -> None:
    """Runs handlers of flows with the sink `direct` in this process, `threads` at a time, until SIGTERM or SIGINT,
    or until one is past its timeout: then its attempt is settled, the others are finished or given back, and the
    process ends with OVERDUE. Raises AccumulatorError where it can't begin."""
    with Accumulator.from_settings(settings) as accumulator:
        runner = DirectRunner(
            accumulator,
            threads,
            grace=2.0,
            in_flight=InFlight(accumulator, config.max_in_flight),
            limit=(watchdog := _Watchdog()).handling,
            expendable=True,
        )
        load_handlers(config.handlers)
        with stopped_by(runner.stop, signal.SIGTERM, signal.SIGINT):  # whatever the modules of the handlers made of it
            accumulator.store.perform(accumulator.operations.connect())
            threading.Thread(target=watchdog.keep, daemon=True).start()
            runner.run()
    if runner.abandoned:
        logs.get_logger("runner").info("process_ends", abandoned=runner.abandoned)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(OVERDUE)  # the usual way would wait for what the handler left behind
