"""A file of events, pushed: one JSON object a line, plain or gzip, of any size in constant memory.

A line that is no event is told by number and field and costs nobody else anything. Pushing is safe to repeat, so a part
without an answer is sent again, and a file that broke off can be pushed again from its beginning.
"""

from __future__ import annotations

import contextlib
import gzip
import io
import os
import stat
import threading
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, Final, NamedTuple, NoReturn, Protocol, Self, cast

from accumulator.envelope import Event, parse_json_line
from accumulator.errors import (
    AccumulatorError,
    AuthenticationFailed,
    InvalidEvent,
    InvalidSettings,
    MissingRight,
    NamespaceMismatch,
    ServerRefused,
    ServerUnavailable,
    UnknownFlow,
)
from accumulator.windows import Outcome, Receipt

MAX_LINE: Final = 16 << 20
BATCH_EVENTS: Final = 2000
BATCH_BYTES: Final = 8 << 20
SHOWN_BAD_LINES: Final = 1000
SHOWN_NOT_TAKEN: Final = 10
RESENDS_AFTER: Final = (0.2, 1.0)
"""Seconds before an unanswered part is sent the second and the third time."""

_GZIP: Final = b"\x1f\x8b"


class BadLine(NamedTuple):
    """A line that is no event: its number from 1, the field at fault (`line` for the whole) and the rule in words."""

    number: int
    field: str
    rule: str

    def __str__(self) -> str:
        where = "" if self.field == "line" else f"{self.field}: "
        return f"line {self.number}: {where}{self.rule}"


class NotTaken(NamedTuple):
    """An event that is in no window, a conflict or rejected or reconciled: its line from 1, and why."""

    number: int
    event_id: str
    outcome: str
    code: str | None

    def __str__(self) -> str:
        return f"line {self.number}: {self.event_id}: {self.outcome}" + (f" ({self.code})" if self.code else "")


_NOT_TAKEN: Final = frozenset({Outcome.CONFLICT, Outcome.REJECTED, Outcome.RECONCILED})


@dataclass
class Fed:
    """What became of a file. `codes` counts ``rejected: late`` and the like, `closed` manifests by reason, `opened`
    windows that an event of this file opened; `bad_lines` holds the first of them, `bad` counts all; `not_taken` holds
    the first of those that `outcomes` counts as conflict, rejected or reconciled."""

    lines: int = 0
    blank: int = 0
    events: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    codes: Counter[str] = field(default_factory=Counter)
    late: int = 0
    opened: int = 0
    closed: Counter[str] = field(default_factory=Counter)
    bad: int = 0
    bad_lines: list[BadLine] = field(default_factory=list)
    not_taken: list[NotTaken] = field(default_factory=list)
    resent: int = 0
    errors: Counter[str] = field(default_factory=Counter)
    """Why events stayed `unknown`."""
    stopped_at: int | None = None
    """The line that ended it: a bad one under `strict`, or where the compressed data is damaged."""
    failure: AccumulatorError | None = None
    """Why the server ended it, before the end of the file."""
    seconds: float = 0.0

    def count(self, number: int, receipt: Receipt) -> None:
        """Counts the answer to the event of a line."""
        self.events += 1
        self.outcomes[receipt.outcome.value] += 1
        if receipt.code is not None:
            self.codes[f"{receipt.outcome.value}: {receipt.code}"] += 1
        elif receipt.conflict:
            self.codes[f"{receipt.outcome.value}: conflict"] += 1
        if receipt.outcome in _NOT_TAKEN and len(self.not_taken) < SHOWN_NOT_TAKEN:
            self.not_taken.append(NotTaken(number, receipt.event_id, receipt.outcome.value, receipt.code))
        self.late += receipt.late
        self.opened += receipt.position == 1
        self.closed.update(window.reason for window in receipt.closed_windows)


class Pusher(Protocol):
    """What of an Accumulator is needed."""

    def push_many(self, events: list[Event]) -> list[Receipt]: ...


class Source:
    """A file, or an open stream such as standard input, as lines; gzip is known by its first bytes. Raises
    InvalidSettings where it can't be read."""

    def __init__(self, path: Path | None, stream: BinaryIO | None = None) -> None:
        self.size: int | None = None
        """Bytes of the file as it lies there; None where that is not known."""
        self._stack = contextlib.ExitStack()
        try:
            if path is not None:
                raw = self._stack.enter_context(path.open("rb"))
                status = os.fstat(raw.fileno())
                self.size = status.st_size if stat.S_ISREG(status.st_mode) else None
            elif isinstance(stream, io.BufferedReader):
                raw = stream
            else:
                raw = io.BufferedReader(cast(io.RawIOBase, stream))
                self._stack.callback(raw.detach)
            packed = raw.peek(2)[:2] == _GZIP
        except OSError as problem:
            self._stack.close()
            raise InvalidSettings(str(path or "-"), f"can't be read: {problem.strerror}") from None
        self._raw = raw
        self._lines = self._stack.enter_context(gzip.GzipFile(fileobj=raw)) if packed else raw

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    @property
    def position(self) -> int:
        """Bytes read so far, of `size`."""
        return 0 if self.size is None else self._raw.tell()

    def lines(self) -> Iterator[bytes | None]:
        """The lines; None for one of more than 16 MiB. Raises OSError, EOFError or zlib.error where it is damaged."""
        while line := self._lines.readline(MAX_LINE + 1):
            if len(line) > MAX_LINE and not line.endswith(b"\n"):
                while line and not line.endswith(b"\n"):
                    line = self._lines.readline(1 << 20)
                yield None
            else:
                yield line


class _Stopped(Exception):
    """Nothing more is to be read."""


def feed(
    pusher: Pusher,
    source: Source,
    fed: Fed | None = None,
    *,
    strict: bool = False,
    on_bad: Callable[[BadLine], None] = lambda bad: None,
    on_batch: Callable[[Fed], None] = lambda fed: None,
) -> Fed:
    """Pushes every event of `source`, in order, and says what became of them. `strict`: the first line that is no event
    ends it; what stands before that line is sent, nothing after it. `fed` is counted into as it goes, and returned.
    What stands in the file, and what the server answers, raises nothing: see `Fed.failure`."""
    return _Feed(pusher, Fed() if fed is None else fed, strict, on_bad, on_batch).run(source)


class _Feed:
    def __init__(
        self,
        pusher: Pusher,
        fed: Fed,
        strict: bool,
        on_bad: Callable[[BadLine], None],
        on_batch: Callable[[Fed], None],
    ) -> None:
        self._pusher = pusher
        self._strict = strict
        self._on_bad = on_bad
        self._on_batch = on_batch
        self._fed = fed
        self._batch: list[tuple[int, Event]] = []
        self._bytes = 0
        self._pause = threading.Event()

    def run(self, source: Source) -> Fed:
        begun = time.monotonic()
        with contextlib.suppress(_Stopped):
            self._read(source)
            self._send()
        self._fed.seconds = time.monotonic() - begun
        return self._fed

    def _read(self, source: Source) -> None:
        fed = self._fed
        lines = source.lines()
        while True:
            try:
                line = next(lines)
            except StopIteration:
                return
            except (OSError, EOFError, zlib.error):
                number = fed.lines + 1
                self._bad(BadLine(number, "line", "the file is damaged or cut off here: the rest can't be read"))
                fed.stopped_at = number
                return
            fed.lines += 1
            if line is None:
                self._bad(BadLine(fed.lines, "line", f"is longer than {MAX_LINE >> 20} MiB"))
            elif not line.strip():
                fed.blank += 1
            else:
                try:
                    event = Event.of(parse_json_line(line))
                except InvalidEvent as problem:
                    self._bad(BadLine(fed.lines, problem.field, problem.rule))
                    continue
                self._batch.append((fed.lines, event))
                self._bytes += len(line)
                if len(self._batch) >= BATCH_EVENTS or self._bytes >= BATCH_BYTES:
                    self._send()

    def _bad(self, bad: BadLine) -> None:
        """Tells it; under `strict` what stands before it is sent, and that was all."""
        if self._strict:
            self._send()
            self._stop(bad)
        self._tell(bad)

    def _stop(self, bad: BadLine) -> NoReturn:
        self._fed.stopped_at = bad.number
        self._tell(bad)
        raise _Stopped

    def _tell(self, bad: BadLine) -> None:
        self._fed.bad += 1
        if len(self._fed.bad_lines) < SHOWN_BAD_LINES:
            self._fed.bad_lines.append(bad)
        self._on_bad(bad)

    def _send(self) -> None:
        """Sends the batch. The lines of a flow without a policy are bad ones: the server hears nothing of them."""
        stop: BadLine | None = None
        while self._batch:
            try:
                self._deliver()
            except UnknownFlow as problem:
                odd = [i for i, (_, event) in enumerate(self._batch) if event.flow == problem.flow]
                if not odd:  # a name that the server's answer did not carry whole
                    self._fed.failure = problem
                    raise _Stopped from None
                bad = [BadLine(self._batch[i][0], "bucket_key", str(problem)) for i in odd]
                if self._strict:
                    stop = bad[0]
                    del self._batch[odd[0] :]
                else:
                    self._batch = [pair for pair in self._batch if pair[1].flow != problem.flow]
                    for one in bad:
                        self._tell(one)
        self._bytes = 0
        self._on_batch(self._fed)
        if stop is not None:
            self._stop(stop)

    def _deliver(self) -> None:
        """Pushes the batch until it is empty: every event has its answer, or is given up as `unknown`."""
        fed = self._fed
        failure, reasons = self._push()
        for wait in RESENDS_AFTER:
            if not self._batch or not _may_pass(failure):
                break
            fed.resent += len(self._batch)
            self._pause.wait(wait)
            failure, reasons = self._push()
        if not self._batch:
            return
        fed.failure = failure
        if failure is None or not isinstance(failure, AuthenticationFailed | MissingRight | NamespaceMismatch):
            fed.events += len(self._batch)
            fed.outcomes[Outcome.UNKNOWN.value] += len(self._batch)
            fed.errors += reasons
        self._batch = []
        if failure is not None:
            self._on_batch(fed)
            raise _Stopped

    def _push(self) -> tuple[AccumulatorError | None, Counter[str]]:
        """Pushes the batch once and keeps in it what got no answer; the error where nothing got one, and why."""
        try:
            receipts = self._pusher.push_many([event for _, event in self._batch])
        except UnknownFlow:
            raise
        except AccumulatorError as problem:
            return problem, Counter({str(problem): len(self._batch)})
        left = []
        reasons: Counter[str] = Counter()
        for pair, receipt in zip(self._batch, receipts, strict=True):
            if receipt.outcome is Outcome.UNKNOWN:
                left.append(pair)
                reasons[receipt.error or "no answer"] += 1
            else:
                self._fed.count(pair[0], receipt)
        self._batch = left
        return None, reasons


def _may_pass(failure: AccumulatorError | None) -> bool:
    if isinstance(failure, AuthenticationFailed):
        return False
    return failure is None or isinstance(failure, ServerUnavailable | ServerRefused)
