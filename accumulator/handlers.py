"""Handlers: the user's code, and which flow it serves.

::

    @handler("order")
    def ship(ctx: Context) -> None: ...

    @handler("order", max_attempts=8, timeout="2m")
    class Ship(Stages):
        def load(self, ctx): ...
        def propose(self, ctx): ...
        def execute(self, ctx, key): ...

    @step_handler("dunning")
    def remind(ctx: StepContext) -> None: ...

    @on_cancelled("dunning")
    def thank(ctx: StepContext) -> None: ...

A handler serves the flow it names; one named ``default`` serves flows that have none. Modules that register handlers
are named in the configuration and imported by the processes that run them.
"""

from __future__ import annotations

import inspect
import random
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from importlib import import_module
from traceback import format_exception_only, walk_tb
from typing import Any, Final, TypeVar

from accumulator.emission import Emission
from accumulator.errors import HandlerMissing, InvalidInput, InvalidSettings
from accumulator.policy import HANDLED_SINKS, Policy, duration_option

DEFAULT: Final = "default"
STAGES: Final = ("load", "interpret", "propose", "revalidate", "approve", "execute", "verify", "confirm")

_MAX_ATTEMPTS: Final = 1000


class PermanentError(Exception):
    """Raised by a handler, or as the base of its own exceptions: trying again is of no use, the manifest is dead at
    once."""


class Timeout(BaseException):
    """Raised in a handler past its timeout, where it can be; no ``except Exception`` of its own catches it."""


class RetryLater(Exception):
    """Raised by a handler: the attempt failed, and the next one comes after `after` (``"10m"``), whatever the back-off
    says."""

    def __init__(self, after: str) -> None:
        super().__init__(after)
        self.after_ms = duration_option(after)


class Superseded(Exception):
    """A newer window of the bucket exists: the manifest joins the next hand-over. Raised by ``ctx.superseded()``,
    before any effect has begun."""


class Diverged(Exception):
    """Raised by ``confirm``: the world is not as the effect should have left it; the manifest goes to
    reconciliation."""


class NotDone(Exception):
    """Raised within an effect: the call surely did not happen, so that it may be tried again without being verified."""


class QueueFull(Exception):
    """Raised by ``ctx.set_aside``: the reconciliation queue holds all that it may (`max_reconcile`), and nothing was
    set aside. A handler that lets it pass has failed, and is tried again."""

    def __init__(self) -> None:
        super().__init__("the reconciliation queue holds all that it may (max_reconcile)")


class Stages:
    """A handler in stages; each is optional and gets the context, ``ctx.results`` holds what earlier ones returned
    (JSON values, kept with the manifest, so that a retry continues where it stopped).

    load        the official state, now
    interpret   what the events mean
    propose     what should be done
    revalidate  whether version, permission and deadline still hold; false drops what was kept, and the stages begin
                anew. Asked again after an approval, since that may have taken long
    approve     whether a person must approve the proposal (true or false)
    execute     does it, once, under the idempotency key that it gets as second argument
    verify      whether an `execute` that was begun and not confirmed did happen: false, or true, or its result; None is
                "nobody can tell", which goes to reconciliation
    confirm     whether it worked; raises Diverged, or returns false, where the world is otherwise

    Any of them may be ``async``.
    """


F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True)
class Handler:
    """What is registered for a flow, or what a ladder emits: a `function` of the context, or `stages`; durations in
    ms."""

    flow: str
    function: Callable[..., Any] | None
    stages: Stages | None
    max_attempts: int
    timeout: int
    backoff: int
    max_backoff: int
    approval_limit: int

    @property
    def loads(self) -> bool:
        """Whether it loads the official state, as `requery_kinds` demand."""
        return hasattr(self.stages, "load")

    def delay(self, failures: int) -> int:
        """ms until the next attempt after so many failed ones (from 1): exponential, anywhere between none and all of
        it, so that what failed together does not come back together."""
        return random.randint(1, max(1, min(self.max_backoff, self.backoff << min(failures - 1, 40))))

    def spread(self) -> tuple[int, int]:
        """The same for an attempt that can't say that it failed, since its process was killed: ms, for the server to
        double with each failure, and at the most."""
        share = random.random()
        return 1 + int(share * self.backoff), 1 + int(share * self.max_backoff)


_registry: dict[str, Handler] = {}
_steps: dict[tuple[str, str], Handler] = {}
_names: dict[str, str] = {}


def handler(
    flow: str,
    *,
    max_attempts: int = 5,
    timeout: str = "5m",
    backoff: str = "1s",
    max_backoff: str = "10m",
    approval_limit: str = "1d",
) -> Callable[[F], F]:
    """Registers a function of the context, plain or ``async``, or a class of Stages, for a flow as it stands in the
    bucket key (percent-encoded); the flow ``default`` serves all that have none of their own.

    An attempt that raises, or runs longer than `timeout`, is made again after an exponential, jittered pause that
    begins at `backoff` and never exceeds `max_backoff`; after `max_attempts` failed ones, or a PermanentError, the
    manifest is dead, which a person may replay. The bucket's next manifest waits for an approval up to
    `approval_limit`. Raises InvalidSettings for an option out of range, and where another function has the flow.
    """
    if not _is_flow(flow):
        raise InvalidSettings("handler", "must name a flow: 1 to 128 bytes, as it stands in the bucket key")
    spans = _spans(flow, max_attempts, timeout, backoff, max_backoff, approval_limit)

    def register(function: F) -> F:
        _registry[flow] = _made(flow, flow, _registry.get(flow), function, max_attempts, spans)
        return function

    return register


def step_handler(
    ladder: str,
    *,
    max_attempts: int = 5,
    timeout: str = "5m",
    backoff: str = "1s",
    max_backoff: str = "10m",
    approval_limit: str = "1d",
) -> Callable[[F], F]:
    """Registers what runs each step of a ladder: a function of a StepContext, or a class of Stages, with the options of
    :func:`handler`."""
    return _of_ladder(ladder, "step", max_attempts, timeout, backoff, max_backoff, approval_limit)


def on_cancelled(
    ladder: str,
    *,
    max_attempts: int = 5,
    timeout: str = "5m",
    backoff: str = "1s",
    max_backoff: str = "10m",
    approval_limit: str = "1d",
) -> Callable[[F], F]:
    """The same for what is to be done once a ladder was cancelled: ``ctx.by_event`` names the event,
    ``ctx.cancelling_event`` reads it. Without one nothing is done."""
    return _of_ladder(ladder, "cancelled", max_attempts, timeout, backoff, max_backoff, approval_limit)


def on_escalated(
    ladder: str,
    *,
    max_attempts: int = 5,
    timeout: str = "5m",
    backoff: str = "1s",
    max_backoff: str = "10m",
    approval_limit: str = "1d",
) -> Callable[[F], F]:
    """The same for the end of a ladder whose steps brought nothing. Without one nothing is done."""
    return _of_ladder(ladder, "escalated", max_attempts, timeout, backoff, max_backoff, approval_limit)


def _of_ladder(ladder: str, event: str, max_attempts: int, *durations: str) -> Callable[[F], F]:
    if type(ladder) is not str or not ladder:
        raise InvalidSettings("handler", "must name a ladder")
    name = f"{ladder} ({event})"
    spans = _spans(name, max_attempts, *durations)

    def register(function: F) -> F:
        there = _steps.get((ladder, event))
        _steps[ladder, event] = _made(name, ladder, there, function, max_attempts, spans)
        return function

    return register


def _spans(
    flow: str, max_attempts: int, timeout: str, backoff: str, max_backoff: str, approval_limit: str
) -> dict[str, int]:
    if type(max_attempts) is not int or not 1 <= max_attempts <= _MAX_ATTEMPTS:
        raise _wrong(flow, "max_attempts", f"must be a whole number from 1 to {_MAX_ATTEMPTS}")
    spans = {}
    for name, text in (
        ("timeout", timeout),
        ("backoff", backoff),
        ("max_backoff", max_backoff),
        ("approval_limit", approval_limit),
    ):
        try:
            spans[name] = duration_option(text)
        except InvalidInput as problem:
            raise _wrong(flow, name, problem.rule) from None

    return spans


def _made(
    name: str, flow: str, there: Handler | None, function: Any, max_attempts: int, spans: Mapping[str, int]
) -> Handler:
    stages: Stages | None = None
    if inspect.isclass(function) and issubclass(function, Stages):
        stages = function()
        odd = [each for each in vars(function) if not each.startswith("_") and each not in STAGES]
        if odd:
            raise _wrong(name, odd[0], "is no stage: begin names of your own with _")
        if not hasattr(stages, "propose") and not hasattr(stages, "execute"):
            raise _wrong(name, "stages", "must have propose or execute")
    elif not callable(function):
        raise _wrong(name, "function", "must be a function that takes the context, or a class of Stages")
    if there is not None and _names.get(name) != _name(function):
        raise _wrong(name, "function", f"{_names[name]} is registered already, besides {_name(function)}")
    _names[name] = _name(function)
    return Handler(flow, None if stages is not None else function, stages, max_attempts, **spans)


def _is_flow(value: object) -> bool:
    return isinstance(value, str) and 1 <= len(value.encode(errors="replace")) <= 128 and ":" not in value


def _wrong(flow: str, option: str, rule: str) -> InvalidSettings:
    return InvalidSettings(f"handler {flow}", f"{option}: {rule}")


def _name(function: object) -> str:
    return f"{getattr(function, '__module__', '?')}.{getattr(function, '__qualname__', type(function).__name__)}"


def find_handler(flow: str) -> Handler:
    """The handler of a flow. Raises HandlerMissing."""
    found = _registry.get(flow) or _registry.get(DEFAULT)
    if found is None:
        raise HandlerMissing(flow)
    return found


def find_step_handler(emission: Emission) -> Handler | None:
    """What runs for what a ladder emitted; None where nothing is to be done. Raises HandlerMissing for a step."""
    found = _steps.get((emission.ladder, emission.event))
    if found is None and emission.event == "step":
        raise HandlerMissing(emission.ladder, "ladder")
    return found


def longest_step() -> int:
    """The longest timeout (ms) of what runs for ladders; 0 without any."""
    return max((handler.timeout for handler in _steps.values()), default=0)


def missing_step_handlers(ladders: Iterable[str]) -> list[str]:
    """Of these ladders, those whose steps nothing runs."""
    return sorted(name for name in ladders if (name, "step") not in _steps)


def with_step_handler() -> list[str]:
    """The ladders whose steps something runs, of what has been imported so far."""
    return sorted(ladder for ladder, event in _steps if event == "step")


def registered() -> Mapping[str, Handler]:
    """Flow → handler, of what has been imported so far."""
    return dict(_registry)


def missing_handlers(policies: Mapping[str, Policy]) -> list[str]:
    """The flows whose sink needs a handler and that have none."""
    return sorted(
        flow
        for flow, policy in policies.items()
        if policy.sink in HANDLED_SINKS and flow not in _registry and DEFAULT not in _registry
    )


def load_handlers(modules: Iterable[str]) -> None:
    """Imports modules, from the current directory too, so that they register. Raises InvalidSettings with the module
    and what went wrong; the exception behind it is its cause."""
    if "" not in sys.path:
        sys.path.append("")
    for name in modules:
        try:
            import_module(name)
        except InvalidSettings:
            raise
        except ModuleNotFoundError as problem:
            what = "there is no such module" if problem.name == name else f"it needs {problem.name}, which is not there"
            raise InvalidSettings("handlers", f"{name} can't be imported: {what}") from problem
        except Exception as problem:
            raise InvalidSettings("handlers", f"{name} can't be imported: {_failed(name, problem)}") from problem


def _failed(name: str, problem: Exception) -> str:
    """Why the import of a module failed, and where in it: ``KeyError at shop.py:3 <module>: 'DB_URL'``. No payload is
    about at an import, so the exception's own words are told; a URL's user and password are not."""
    kind = type(problem).__name__
    if isinstance(problem, SyntaxError):
        where, text = f"{(problem.filename or name).rpartition('/')[2]}:{problem.lineno}", problem.msg
    else:
        frames = list(walk_tb(problem.__traceback__))
        own = [(frame, line) for frame, line in frames if frame.f_globals.get("__name__") == name]
        frame, line = (own or frames)[-1]
        where = f"{frame.f_code.co_filename.rpartition('/')[2]}:{line} {frame.f_code.co_name}"
        text = format_exception_only(problem)[0].partition(":")[2]
    said = re.sub(r"//\S*@", "//***@", " ".join(text.split()))[:300]
    return f"{kind} at {where}" + (f": {said}" if said else "")


def cause_of(error: BaseException) -> str:
    """What is recorded of an exception: the name of its class."""
    return re.sub(r"\W", "_", type(error).__name__)[:100]
