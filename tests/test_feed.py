"""Files of events: lines, gzip, what is wrong with them, and what is sent again."""

from __future__ import annotations

import gzip
import io
import json
import tracemalloc
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import redis

from accumulator import feed as feeding
from accumulator.client import Accumulator
from accumulator.embedded import EmbeddedServer
from accumulator.envelope import Event
from accumulator.errors import (
    AuthenticationFailed,
    InvalidSettings,
    NamespaceMismatch,
    ServerRefused,
    ServerUnavailable,
    UnknownFlow,
)
from accumulator.feed import BATCH_EVENTS, MAX_LINE, BadLine, Fed, Source, feed
from accumulator.windows import ClosedWindow, Outcome, Receipt
from tests.conftest import StartServer


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is sent again is so without a pause."""
    monkeypatch.setattr(feeding, "RESENDS_AFTER", (0, 0))


def line(n: int | str, key: str = "shop:order:1", **more: Any) -> bytes:
    fields = {"event_id": f"e{n}", "bucket_key": key, "kind": "edited", "source": "test"}
    return json.dumps(fields | {"occurred_at": "2026-10-16T14:00:00Z"} | more).encode() + b"\n"


class Recorder:
    """Takes events, and answers as told: with an error, or with these numbers of the call unknown."""

    def __init__(self, *answers: BaseException | Iterable[int]) -> None:
        self.answers = list(answers)
        self.calls: list[list[Event]] = []
        self.taken: list[str] = []

    def push_many(self, events: list[Event]) -> list[Receipt]:
        answer = self.answers.pop(0) if self.answers else ()
        self.calls.append(list(events))
        if isinstance(answer, BaseException):
            raise answer
        lost = set(answer)
        receipts = []
        for i, event in enumerate(events):
            if i in lost:
                receipts.append(Receipt(Outcome.UNKNOWN, event.event_id, event.bucket_key, error="no answer came"))
            else:
                self.taken.append(event.event_id)
                receipts.append(Receipt(Outcome.ACCEPTED, event.event_id, event.bucket_key))
        return receipts


def run(content: bytes, recorder: Recorder | None = None, **options: Any) -> tuple[Fed, list[BadLine], Recorder]:
    recorder = recorder or Recorder()
    told: list[BadLine] = []
    with Source(None, io.BytesIO(content)) as source:
        fed = feed(recorder, source, on_bad=told.append, **options)
    return fed, told, recorder


# --- lines ------------------------------------------------------------------------------------------------------------


def test_every_line_is_pushed_in_order_and_the_last_needs_no_end() -> None:
    fed, told, recorder = run(line(1) + b"\n  \r\n" + line(2) + line(3).rstrip())
    assert recorder.taken == ["e1", "e2", "e3"]
    assert (fed.lines, fed.blank, fed.events, fed.bad, told) == (5, 2, 3, 0, [])
    assert fed.outcomes == {"accepted": 3}


def test_bad_lines_are_told_by_number_and_field_without_their_text_and_stop_nothing() -> None:
    secret = "secret-41"
    lines = [
        line(1),
        json.dumps({"event_id": secret}).encode() + b"\n",
        b'{"payload": "' + secret.encode() + b'", nonsense\n',
        line(2, occurred_at="2026-10-16T14:00:00"),
        line(3, weight=-1, payload=secret),
        line(4, key="shop"),
        line(5, source_version=2**63),
        line(6, payload=[2**64, secret]),
        b"\xff\xfe" + secret.encode() + b"\n",
        b"[1, 2]\n",
        b'{"a":' * 2000 + b"1" + b"}" * 2000 + b"\n",
        line(7, odd=secret),
        line(8),
    ]
    fed, told, recorder = run(b"".join(lines))
    assert recorder.taken == ["e1", "e8"]
    assert [(bad.number, bad.field) for bad in told] == [
        (2, "bucket_key"),
        (3, "line"),
        (4, "occurred_at"),
        (5, "weight"),
        (6, "bucket_key"),
        (7, "source_version"),
        (8, "payload"),
        (9, "line"),
        (10, "line"),
        (11, "line"),
        (12, "odd"),
    ]
    assert not any(secret in str(bad) for bad in told)
    assert str(told[2]) == "line 4: occurred_at: must carry an offset: Z or ±hh:mm"
    assert str(told[8]) == "line 10: is not a JSON object"
    assert fed.bad == 11
    assert fed.bad_lines == told


def test_only_the_first_bad_lines_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feeding, "SHOWN_BAD_LINES", 2)
    fed, told, _ = run(b"{}\n" * 5)
    assert (fed.bad, len(fed.bad_lines), len(told)) == (5, 2, 5)


def test_a_line_too_long_is_bad_and_the_next_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feeding, "MAX_LINE", 400)
    exact = line(1, payload="")
    exact = line(1, payload="x" * (400 - len(exact)))
    assert len(exact) == 400
    fed, told, recorder = run(exact + line(2, payload="x" * 3000) + line(3) + b"z" * 5000)
    assert recorder.taken == ["e1", "e3"]
    assert [bad.number for bad in told] == [2, 4]
    assert (fed.lines, fed.bad) == (4, 2)


def test_memory_stays_bounded_whatever_a_gzip_holds() -> None:
    packer = zlib.compressobj(wbits=31)
    bomb = bytearray(packer.compress(line(1)))
    for _ in range(16):
        bomb += packer.compress(bytes(4 << 20))
    bomb += packer.compress(b"\n" + line(2)) + packer.flush()
    tracemalloc.start()
    try:
        _, told, recorder = run(bytes(bomb))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert recorder.taken == ["e1", "e2"]
    assert [(bad.number, bad.rule) for bad in told] == [(2, "is longer than 16 MiB")]
    assert peak < 3 * MAX_LINE < 64 << 20


def test_batches_are_bounded_by_events_and_by_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    _, _, recorder = run(b"".join(map(line, range(BATCH_EVENTS + 1))))
    assert [len(call) for call in recorder.calls] == [BATCH_EVENTS, 1]
    monkeypatch.setattr(feeding, "BATCH_BYTES", 1000)
    _, _, recorder = run(b"".join(line(n, payload="x" * 300) for n in range(7)))
    assert [len(call) for call in recorder.calls] == [3, 3, 1]


# --- sources ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pack", [bytes, gzip.compress, lambda b: gzip.compress(b[:9]) + gzip.compress(b[9:])])
def test_gzip_is_known_by_its_first_bytes_in_files_and_streams(pack: Any, tmp_path: Path) -> None:
    content = line(1) + line(2)
    _, _, recorder = run(pack(content))
    assert recorder.taken == ["e1", "e2"]
    path = tmp_path / "events.txt"
    path.write_bytes(pack(content))
    recorder = Recorder()
    with Source(path) as source:
        assert source.size == path.stat().st_size
        feed(recorder, source)
        assert source.position == source.size
    assert recorder.taken == ["e1", "e2"]


@pytest.mark.parametrize("strict", [False, True])
def test_a_damaged_gzip_ends_there_and_says_so(strict: bool) -> None:
    packed = gzip.compress(b"".join(line(n, payload=f"{n * 7919 % 1009}") for n in range(3000)))
    fed, told, recorder = run(packed[: len(packed) // 2], strict=strict)
    assert 100 < len(recorder.taken) < 2900
    assert recorder.taken == [f"e{n}" for n in range(len(recorder.taken))]
    assert fed.stopped_at == len(recorder.taken) + 1
    assert [bad.number for bad in told] == [fed.stopped_at]
    assert "can't be read" in told[0].rule


def test_a_flipped_byte_in_a_gzip_is_noticed() -> None:
    packed = bytearray(gzip.compress(line(1) * 10))
    packed[-6] ^= 0xFF  # the checksum
    fed, told, _ = run(bytes(packed))
    assert (len(told), fed.bad) == (1, 1)


def test_what_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidSettings, match="No such file"):
        Source(tmp_path / "none.jsonl")
    with pytest.raises(InvalidSettings, match="directory"):
        Source(tmp_path)


def test_an_empty_file_is_no_event(tmp_path: Path) -> None:
    fed, told, recorder = run(b"")
    assert (fed.lines, fed.events, told, recorder.calls) == (0, 0, [], [])


# --- strict -----------------------------------------------------------------------------------------------------------


def test_strict_sends_what_stands_before_the_first_bad_line_and_nothing_after() -> None:
    fed, told, recorder = run(line(1) + line(2) + b"{}\n" + line(3) + b"{}\n", strict=True)
    assert recorder.taken == ["e1", "e2"]
    assert (fed.stopped_at, fed.events, fed.bad) == (3, 2, 1)
    assert [bad.number for bad in told] == [3]


# --- flows without a policy -------------------------------------------------------------------------------------------


class Choosy(Recorder):
    """Knows the flow `order` only."""

    def push_many(self, events: list[Event]) -> list[Receipt]:
        for flow in sorted({event.flow for event in events} - {"order"}):
            raise UnknownFlow(flow)
        return super().push_many(events)


def test_lines_of_a_flow_without_policy_are_bad_ones() -> None:
    content = line(1) + line(2, key="shop:chat:1") + line(3, key="shop:xyz:1") + line(4) + line(5, key="shop:chat:2")
    fed, told, recorder = run(content, Choosy())
    assert recorder.taken == ["e1", "e4"]
    assert sorted((bad.number, bad.field) for bad in told) == [(2, "bucket_key"), (3, "bucket_key"), (5, "bucket_key")]
    assert "chat" in told[0].rule
    assert (fed.bad, fed.events) == (3, 2)


def test_strict_stops_at_the_first_line_of_a_flow_without_policy() -> None:
    content = line(1) + line(2, key="shop:xyz:1") + line(3, key="shop:chat:1") + line(4) + b"{}\n"
    fed, told, recorder = run(content, Choosy(), strict=True)
    assert recorder.taken == ["e1"]
    assert (fed.stopped_at, [bad.number for bad in told]) == (2, [2])


def test_a_flow_that_the_answer_does_not_name_whole_ends_it() -> None:
    fed, _, recorder = run(line(1), Recorder(UnknownFlow("something")))
    assert isinstance(fed.failure, UnknownFlow)
    assert recorder.taken == []


# --- no answer --------------------------------------------------------------------------------------------------------


def test_what_got_no_answer_is_sent_again() -> None:
    content = b"".join(map(line, range(6)))
    fed, _, recorder = run(content, Recorder([1, 4], [0]))
    assert [[event.event_id for event in call] for call in recorder.calls] == [
        ["e0", "e1", "e2", "e3", "e4", "e5"],
        ["e1", "e4"],
        ["e1"],
    ]
    assert (fed.outcomes, fed.events, fed.resent) == ({"accepted": 6}, 6, 3)


def test_what_still_got_none_is_unknown_and_the_rest_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feeding, "BATCH_EVENTS", 3)
    fed, _, recorder = run(b"".join(map(line, range(5))), Recorder([1], [0], [0]))
    assert recorder.taken == ["e0", "e2", "e3", "e4"]
    assert fed.outcomes == {"accepted": 4, "unknown": 1}
    assert fed.errors == {"no answer came": 1}
    assert (fed.events, fed.failure) == (5, None)


def test_a_server_that_comes_back_is_used() -> None:
    away = ServerUnavailable("away")
    fed, _, recorder = run(line(1) + line(2), Recorder(away, away))
    assert recorder.taken == ["e1", "e2"]
    assert (fed.failure, fed.outcomes) == (None, {"accepted": 2})


@pytest.mark.parametrize("error", [ServerUnavailable("away"), ServerRefused("OOM", "the server is over its maxmemory")])
def test_a_server_that_stays_away_ends_it(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feeding, "BATCH_EVENTS", 2)
    fed, _, recorder = run(b"".join(map(line, range(9))), Recorder((), error, error, error))
    assert recorder.taken == ["e0", "e1"]
    assert fed.failure is error
    assert fed.outcomes == {"accepted": 2, "unknown": 2}
    assert fed.errors == {str(error): 2}
    assert len(recorder.calls) == 4


@pytest.mark.parametrize("error", [AuthenticationFailed("no"), NamespaceMismatch("other")])
def test_what_will_not_pass_is_not_tried_again(error: Exception) -> None:
    fed, _, recorder = run(line(1), Recorder(error))
    assert fed.failure is error
    assert (fed.outcomes, len(recorder.calls)) == ({}, 1)


# --- counting ---------------------------------------------------------------------------------------------------------


def test_outcomes_codes_and_windows_are_counted() -> None:
    closed = ClosedWindow("w", 1, "max_events", 5)
    fed = Fed()
    receipts = (
        Receipt(Outcome.ACCEPTED, "a", "k", "w", 1, 1),
        Receipt(Outcome.ACCEPTED, "b", "k", "w", 1, 2, late=True, closed="max_events", closed_windows=(closed,)),
        Receipt(Outcome.DUPLICATE, "b", "k", conflict=True),
        Receipt(Outcome.REJECTED, "c", "k", code="payload_too_large"),
        Receipt(Outcome.RECONCILED, "d", "k", code="late", closed_windows=(closed, closed)),
    )
    for number, receipt in enumerate(receipts, 1):
        fed.count(number, receipt)
    assert list(map(str, fed.not_taken)) == ["line 4: c: rejected (payload_too_large)", "line 5: d: reconciled (late)"]
    assert fed.outcomes == {"accepted": 2, "duplicate": 1, "rejected": 1, "reconciled": 1}
    assert fed.codes == {"duplicate: conflict": 1, "rejected: payload_too_large": 1, "reconciled: late": 1}
    assert (fed.late, fed.opened, fed.closed) == (1, 1, {"max_events": 3})


def test_progress_is_told_after_each_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feeding, "BATCH_EVENTS", 2)
    told: list[int] = []
    run(b"".join(map(line, range(5))), on_batch=lambda fed: told.append(fed.events))
    assert told == [2, 4, 5]


# --- a real server ----------------------------------------------------------------------------------------------------


def test_a_file_goes_in_once_however_often_it_is_pushed(server: EmbeddedServer, namespace: str, tmp_path: Path) -> None:
    path = tmp_path / "edits.jsonl.gz"
    path.write_bytes(
        gzip.compress(
            b"".join(line(f"{n}/{n % 97}", key=f"docs:document:{n % 97}", payload={"n": n}) for n in range(5000))
        )
    )
    with Accumulator(server.url, namespace=namespace) as accumulator:
        accumulator.load_policy("document", {"inactivity": "1h"})
        with Source(path) as source:
            first = feed(accumulator, source)
        with Source(path) as source:
            second = feed(accumulator, source)
        assert first.outcomes == {"accepted": 5000}
        assert first.opened == 97
        assert second.outcomes == {"duplicate": 5000}
        assert len(accumulator.open_events("docs:document:3")) == len(range(3, 5000, 97))


def test_a_server_that_is_full_is_told_and_pushing_again_finishes_the_file(
    start_server: StartServer, namespace: str, tmp_path: Path
) -> None:
    server = start_server()
    content = b"".join(line(n, key=f"docs:document:{n}", payload="x" * 500) for n in range(4000))
    with Accumulator(server.url, namespace=namespace) as accumulator, redis.Redis.from_url(server.url) as control:
        accumulator.load_policy("document", {"inactivity": "1h"})
        used = int(control.info("memory")["used_memory"])
        control.config_set("maxmemory", used + (2 << 20))
        with Source(None, io.BytesIO(content)) as source:
            fed = feed(accumulator, source)
        assert isinstance(fed.failure, ServerRefused)
        assert fed.outcomes["unknown"] > 0
        control.config_set("maxmemory", 0)
        with Source(None, io.BytesIO(content)) as source:
            again = feed(accumulator, source)
        assert again.outcomes["accepted"] + fed.outcomes["accepted"] == 4000
        assert again.outcomes["duplicate"] == fed.outcomes["accepted"]
        assert len(accumulator.open_buckets()) == 4000
