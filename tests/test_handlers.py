"""Handlers: registering them, and what becomes of a manifest when they succeed, fail, hang or are missing."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import accumulator.handlers
from accumulator import logs
from accumulator.attempts import Taken
from accumulator.client import Accumulator
from accumulator.context import Context
from accumulator.errors import HandlerMissing, InvalidSettings
from accumulator.handlers import (
    PermanentError,
    Timeout,
    find_handler,
    handler,
    load_handlers,
    missing_handlers,
    registered,
)
from accumulator.manifest import Manifest
from accumulator.policy import Policy
from accumulator.runner import Attempt, run_attempt
from accumulator.testing import VirtualClock
from tests.conftest import event

SECRET = "sk-4242-secret"


@pytest.fixture(autouse=True)
def registry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is registered."""
    monkeypatch.setattr(accumulator.handlers, "_registry", {})


@pytest.fixture
def log() -> Iterator[Callable[[], list[dict[str, Any]]]]:
    """What has been logged so far, at every level."""
    ours = logging.getLogger("accumulator")
    before = ours.handlers[:], ours.propagate, ours.level, logs._state.plain_keys, logs._state.render
    out = io.StringIO()
    logs.configure("debug", stream=out)
    yield lambda: [json.loads(line) for line in out.getvalue().splitlines()]
    ours.handlers[:], ours.propagate, ours.level, logs._state.plain_keys, logs._state.render = before


# -- registering


def test_a_handler_is_registered_with_its_rules() -> None:
    @handler("order", max_attempts=3, timeout="10s", backoff="2s", max_backoff="1m")
    def handle(_: Context) -> None: ...

    found = find_handler("order")
    assert (found.function, found.max_attempts, found.timeout, found.backoff, found.max_backoff) == (
        handle, 3, 10_000, 2_000, 60_000
    )  # fmt: skip
    assert list(registered()) == ["order"]


def test_default_serves_flows_without_their_own() -> None:
    handler("default")(lambda _: None)
    handler("order")(print)
    assert find_handler("order").flow == "order"
    assert find_handler("other").flow == "default"


def test_no_handler_is_named() -> None:
    with pytest.raises(HandlerMissing, match="flow order: no handler"):
        find_handler("order")


def test_flows_without_a_handler() -> None:
    def policies(**sinks: str) -> dict[str, Policy]:
        return {flow: Policy.load(flow, {"inactivity": "1s", "sink": sink}) for flow, sink in sinks.items()}

    handler("a")(print)
    assert missing_handlers(policies(a="rq", b="direct", c="rq", d="none")) == ["b", "c"]
    handler("default")(print)
    assert missing_handlers(policies(a="rq", b="direct")) == []


@pytest.mark.parametrize(
    ("flow", "options", "said"),
    [
        ("", {}, "must name a flow"),
        ("a:b", {}, "must name a flow"),
        ("f", {"max_attempts": 0}, "handler f: max_attempts: must be a whole number from 1"),
        ("f", {"max_attempts": True}, "max_attempts"),
        ("f", {"timeout": "0s"}, "timeout: must be above zero"),
        ("f", {"timeout": 5}, "timeout"),
        ("f", {"backoff": "soon"}, "backoff"),
        ("f", {"max_backoff": None}, "max_backoff"),
    ],
)
def test_wrong_options_are_refused_by_name(flow: str, options: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidSettings, match=said):
        handler(flow, **options)


def test_one_flow_has_one_handler() -> None:
    handler("f")(print)
    handler("f")(print)  # a module that is imported again
    with pytest.raises(InvalidSettings, match="print is registered already"):
        handler("f")(repr)
    with pytest.raises(InvalidSettings, match="must be a function"):
        handler("g")(7)  # type: ignore[type-var]


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], None]:
    """Writes a module into the current directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", sys.path[:])

    def write(name: str, text: str) -> None:
        (tmp_path / f"{name}.py").write_text(text)
        monkeypatch.delitem(sys.modules, name, raising=False)

    return write


def test_modules_register_when_they_are_loaded(module: Callable[[str, str], None]) -> None:
    module("shop_handlers", "from accumulator import handler\n@handler('order')\ndef f(ctx): ...\n")
    load_handlers(["shop_handlers"])
    assert list(registered()) == ["order"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "no_such_handlers can't be imported: there is no such module"),
        ("import no_such_thing", "it needs no_such_thing, which is not there"),
        ("1 / 0", "can't be imported: ZeroDivisionError at no_such_handlers.py:1 <module>: division by zero$"),
        ("def f(:", "can't be imported: SyntaxError at no_such_handlers.py:1: invalid syntax$"),
        ("import os\nX = os.environ['NOT_THERE']", "KeyError at no_such_handlers.py:2 <module>: 'NOT_THERE'$"),
        (
            "from accumulator import handler\n@handler('x', max_atempts=3)\ndef f(ctx): ...",
            "TypeError at no_such_handlers.py:2 <module>: .* unexpected keyword argument 'max_atempts'",
        ),
        (
            "from os import no_such_name",
            "ImportError at no_such_handlers.py:1 <module>: cannot import name 'no_such_name'",
        ),
        ("def f():\n    raise RuntimeError\nf()", "RuntimeError at no_such_handlers.py:2 f$"),
        ("raise ValueError('a\\nb' + 'x' * 999)", "<module>: a bx{297}$"),
        ("raise ValueError('no redis://u:se@cret@h/0')", r"<module>: no redis://\*\*\*@h/0$"),
        ("from accumulator import handler\nhandler('f', timeout='x')", "handler f: timeout"),
    ],
)
def test_a_module_that_fails_is_named(module: Callable[[str, str], None], text: str | None, said: str) -> None:
    if text is not None:
        module("no_such_handlers", text)
    with pytest.raises(InvalidSettings, match=said):
        load_handlers(["no_such_handlers"])


def test_pauses_grow_and_are_jittered() -> None:
    handler("f", backoff="1s", max_backoff="10s")(print)
    pause = find_handler("f").delay
    drawn = {n: [pause(n) for _ in range(200)] for n in (1, 2, 5, 1000)}
    assert all(1 <= ms <= 1_000 for ms in drawn[1])
    assert all(1 <= ms <= 2_000 for ms in drawn[2])
    assert max(drawn[2]) > 1_000 > min(drawn[2])
    assert max(drawn[5] + drawn[1000]) <= 10_000
    assert max(drawn[5]) > 5_000 > min(drawn[5])


# -- attempts


@pytest.fixture
def window(virtual: Accumulator, clock: VirtualClock) -> Callable[[], str]:
    """A window of two events that has closed; its id."""
    virtual.load_policy("f", {"inactivity": "5s", "sink": "direct"})

    def close() -> str:
        virtual.push(event("e1", at=clock, payload={"card": SECRET}))
        virtual.push(event("e2", at=clock))
        clock.advance("5s")
        return virtual.manifests("t:f:1")[-1].window_id

    return close


def take(accumulator: Accumulator) -> list[Taken]:
    operations = accumulator.operations
    taken = []
    for partition in range(operations.partitions):
        taken += accumulator.store.perform(operations.take(partition, "direct", 10, 30_000))
    return taken


def attempt(accumulator: Accumulator) -> str:
    """Takes the one manifest that is ready, and makes an attempt at it; the manifest's state after it."""
    [taken] = take(accumulator)
    assert run_attempt(accumulator, taken.window_id, taken.attempt) is not None
    return read(accumulator, taken.window_id).state


def read(accumulator: Accumulator, window_id: str) -> Manifest:
    found = accumulator.manifest(window_id)
    assert found is not None
    return found


def story(manifest: Manifest) -> list[tuple[str, int, str]]:
    return [(state, number, cause) for _, state, number, cause in manifest.timeline]


def test_a_handler_gets_the_manifest_and_its_events(virtual: Accumulator, window: Callable[[], str]) -> None:
    given: list[Context] = []
    handler("f")(given.append)
    window_id = window()
    assert attempt(virtual) == "confirmed"
    [context] = given
    assert (context.bucket_key, context.flow, context.window_id, context.attempt) == ("t:f:1", "f", window_id, 1)
    assert [entry.event.event_id for entry in context.events] == ["e1", "e2"]
    assert context.events[0].event.payload == {"card": SECRET}
    assert context.manifest.close_reason == "inactivity"
    manifest = read(virtual, window_id)
    assert manifest.settled
    assert story(manifest) == [("dispatched", 1, "taken"), ("processing", 1, "begun"), ("confirmed", 1, "handled")]
    assert take(virtual) == []


def test_an_asynchronous_handler(virtual: Accumulator, window: Callable[[], str]) -> None:
    given: list[str] = []

    @handler("f")
    async def handle(ctx: Context) -> str:
        await asyncio.sleep(0)
        given.append(ctx.window_id)
        return "nobody reads this"

    window_id = window()
    assert attempt(virtual) == "confirmed"
    assert given == [window_id]


def test_a_failing_handler_is_retried_then_dead(
    virtual: Accumulator, clock: VirtualClock, window: Callable[[], str]
) -> None:
    @handler("f", max_attempts=3, backoff="1s", max_backoff="1m")
    def handle(_: Context) -> None:
        raise ValueError(SECRET)

    window_id = window()
    assert attempt(virtual) == "retrying"
    assert take(virtual) == []
    clock.advance("1s")
    assert attempt(virtual) == "retrying"
    clock.advance("2s")
    assert attempt(virtual) == "dead"
    clock.advance("1h")
    assert take(virtual) == []
    manifest = read(virtual, window_id)
    assert manifest.attempt == 3
    assert not manifest.settled
    assert [cause for _, state, _, cause in manifest.timeline if state in ("retrying", "dead")] == ["ValueError"] * 3


def test_dead_lets_the_next_one_go(virtual: Accumulator, clock: VirtualClock, window: Callable[[], str]) -> None:
    @handler("f", max_attempts=1)
    def handle(_: Context) -> None:
        raise ValueError

    first = window()
    virtual.push(event("e3", at=clock))
    clock.advance("5s")
    assert [taken.window_id for taken in take(virtual)] == [first]
    assert run_attempt(virtual, first, 1) == "failed"
    assert read(virtual, first).state == "dead"
    [second] = take(virtual)
    assert second.window_id != first


def test_a_permanent_error_is_dead_at_once(virtual: Accumulator, window: Callable[[], str]) -> None:
    class CardExpired(PermanentError):
        pass

    @handler("f")
    def handle(_: Context) -> None:
        raise CardExpired(SECRET)

    window_id = window()
    assert attempt(virtual) == "dead"
    assert story(read(virtual, window_id))[-1] == ("dead", 1, "CardExpired")


@pytest.mark.parametrize("raised", [SystemExit, KeyboardInterrupt, GeneratorExit])
def test_whatever_a_handler_raises_is_a_failed_attempt(
    virtual: Accumulator, window: Callable[[], str], raised: type[BaseException]
) -> None:
    @handler("f")
    def handle(_: Context) -> None:
        raise raised

    window_id = window()
    assert attempt(virtual) == "retrying"
    assert story(read(virtual, window_id))[-1] == ("retrying", 1, raised.__name__)


def test_an_asynchronous_handler_past_its_timeout(virtual: Accumulator, window: Callable[[], str]) -> None:
    @handler("f", timeout="20ms")
    async def handle(_: Context) -> None:
        await asyncio.Event().wait()

    window_id = window()
    assert attempt(virtual) == "retrying"
    assert story(read(virtual, window_id))[-1] == ("retrying", 1, "Timeout")
    assert read(virtual, window_id).error == "Timeout: the handler was not done after 20ms"


def test_its_own_timeout_error_is_its_own(virtual: Accumulator, window: Callable[[], str]) -> None:
    @handler("f")
    async def handle(_: Context) -> None:
        raise TimeoutError

    window_id = window()
    assert attempt(virtual) == "retrying"
    assert story(read(virtual, window_id))[-1] == ("retrying", 1, "TimeoutError")
    assert read(virtual, window_id).error == "TimeoutError"  # it says nothing


def test_a_missing_handler_is_said_and_never_dead(
    virtual: Accumulator, clock: VirtualClock, window: Callable[[], str], log: Callable[[], list[dict[str, Any]]]
) -> None:
    window_id = window()
    for _ in range(8):
        assert attempt(virtual) == "retrying"
        clock.advance("10m")
    assert {cause for state, _, cause in story(read(virtual, window_id)) if state == "retrying"} == {"HandlerMissing"}
    assert {"event": "handler_missing", "flow": "f", "level": "error"}.items() <= log()[0].items()
    handler("f", max_attempts=1)(lambda _: None)
    assert attempt(virtual) == "confirmed"


def test_a_lease_that_ends_counts_as_a_failure(
    virtual: Accumulator, clock: VirtualClock, window: Callable[[], str]
) -> None:
    """As when the process dies with the handler, each time."""
    ran: list[int] = []
    handler("f", max_attempts=2, timeout="1m")(lambda ctx: ran.append(ctx.attempt))
    window_id = window()
    operations = virtual.operations
    for number in (1, 2):
        assert [taken.attempt for taken in take(virtual)] == [number]
        assert virtual.store.perform(operations.begin(window_id, number, f"{number:016}", 70_000, 2)).manifest
        clock.advance("71s")
    assert ran == []
    assert story(read(virtual, window_id))[-1] == ("dead", 2, "lease_ended")


def test_an_attempt_is_granted_once(virtual: Accumulator, clock: VirtualClock, window: Callable[[], str]) -> None:
    ran: list[int] = []
    handler("f")(lambda ctx: ran.append(ctx.attempt))
    window_id = window()
    take(virtual)
    clock.advance("30s")  # the watch takes the job for lost
    assert [(taken.window_id, taken.attempt) for taken in take(virtual)] == [(window_id, 1)]
    assert run_attempt(virtual, window_id, 1) == "confirmed"
    assert run_attempt(virtual, window_id, 1) is None
    assert run_attempt(virtual, window_id, 2) is None
    assert ran == [1]


def test_the_watch_waits_twice_as_long_each_time(
    virtual: Accumulator, clock: VirtualClock, window: Callable[[], str]
) -> None:
    window()
    [first] = take(virtual)
    for seconds in (30, 60, 120, 240):
        clock.advance(seconds * 1000 - 1)
        assert take(virtual) == []
        clock.advance(1)
        assert take(virtual) == [first]


def test_an_attempt_that_was_given_up_changes_nothing_more(virtual: Accumulator, window: Callable[[], str]) -> None:
    given_up: list[str | None] = []
    window_id = window()

    @handler("f")
    def handle(_: Context) -> None:
        given_up.append(running.give_up("Stopped"))

    [taken] = take(virtual)
    running = Attempt(virtual, taken.window_id, taken.attempt)
    assert running.run() is None
    assert running.give_up("Timeout") is None
    assert given_up == ["returned"]
    assert story(read(virtual, window_id))[-1] == ("retrying", 1, "Stopped")


def test_being_stopped_is_no_failure(virtual: Accumulator, clock: VirtualClock, window: Callable[[], str]) -> None:
    window()
    running: list[Attempt] = []

    @handler("f", max_attempts=1)
    def handle(_: Context) -> None:
        if running[-1].attempt < 4:
            running[-1].give_up("Stopped")

    for _ in range(4):
        [taken] = take(virtual)
        running.append(Attempt(virtual, taken.window_id, taken.attempt))
        running[-1].run()
        clock.advance("1s")
    assert virtual.manifests("t:f:1")[0].state == "confirmed"


def test_an_unknown_window(virtual: Accumulator, log: Callable[[], list[dict[str, Any]]]) -> None:
    assert run_attempt(virtual, "0" * 20, 1) is None
    assert log()[-1]["event"] == "manifest_unknown"


def test_an_attempt_that_ends_is_logged_without_what_it_handled(
    virtual: Accumulator, window: Callable[[], str], log: Callable[[], list[dict[str, Any]]]
) -> None:
    @handler("f")
    def handle(ctx: Context) -> None:
        raise ValueError(ctx.events[0].event.payload)

    window_id = window()
    attempt(virtual)
    [line] = log()
    assert line["event"] == "failed"
    assert (line["window_id"], line["attempt"], line["cause"]) == (window_id, 1, "ValueError")
    assert line["where"].startswith("test_handlers.py:")
    assert line["where"].endswith(" handle")
    assert SECRET not in str(log())
    assert "t:f:1" not in str(log())
    assert len(line["bucket"]) == 12


# -- logs


def test_keys_are_plain_where_the_operator_asks(log: Callable[[], list[dict[str, Any]]]) -> None:
    out = io.StringIO()
    logs.configure("info", plain_keys=True, stream=out)
    logs.get_logger("x").info("seen", bucket_key="t:f:客户🙂", payload={"a": SECRET})
    assert out.getvalue().isascii()
    line = json.loads(out.getvalue())
    assert line["bucket"] == "t:f:客户🙂"
    assert line["payload"] == "<dict>"
    assert list(line)[:4] == ["timestamp", "level", "logger", "event"]


def test_a_terminal_is_for_people(log: Callable[[], list[dict[str, Any]]]) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    out = Terminal()
    logs.configure("warning", stream=out)
    logs.get_logger("x").info("quiet")
    logs.get_logger("x").warning("loud", flow="f")
    assert "quiet" not in out.getvalue()
    assert "loud" in out.getvalue()


def test_a_program_that_sets_nothing_up_decides_itself(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="accumulator"):
        logs.get_logger("x").info("seen", bucket_key="t:f:1")
    [record] = caplog.records
    assert record.name == "accumulator.x"
    assert "seen" in record.getMessage()
    assert "t:f:1" not in record.getMessage()


def test_timeout_is_not_for_except_exception() -> None:
    assert not issubclass(Timeout, Exception)
