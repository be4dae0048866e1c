"""Handlers: the user's functions that receive manifests.

::

    from accumulator import Context, handler

    @handler("order", max_attempts=5, timeout="5m", backoff="1s", max_backoff="10m")
    def handle_order(ctx: Context) -> None:
        for entry in ctx.events:
            ...

The module is named in the configuration, and registers its handlers when it is imported. Delivery is at least once: an
attempt that dies is made again.
"""

from __future__ import annotations

import asyncio
import inspect
import random
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Final, TypeVar

from accumulator.errors import HandlerMissing, InvalidInput, InvalidSettings
from accumulator.manifest import Manifest, StoredEvent
from accumulator.policy import Policy, duration_option

__all__ = [
    "Context",
    "Handler",
    "PermanentError",
    "Timeout",
    "cause_of",
    "find_handler",
    "handler",
    "load_handlers",
    "missing_handlers",
    "registered",
]

DEFAULT: Final = "default"
HANDLED_SINKS: Final = frozenset({"rq", "direct"})
"""Sinks that need a handler."""

_MAX_ATTEMPTS: Final = 1000


class PermanentError(Exception):
    """Raised by a handler, or as the base of its own exceptions: trying again is of no use, the manifest is dead at
    once."""


class Timeout(BaseException):
    """Raised in a handler past its timeout, where it can be; no ``except Exception`` of its own catches it."""


@dataclass(frozen=True)
class Context:
    """What a handler is given: the manifest, frozen, with its `events` in order of acceptance, and which attempt this
    is, from 1."""

    manifest: Manifest
    attempt: int

    @property
    def events(self) -> tuple[StoredEvent, ...]:
        """The window's entries, retracted ones left out."""
        return self.manifest.events

    @property
    def bucket_key(self) -> str:
        """The business unit."""
        return self.manifest.bucket_key

    @property
    def flow(self) -> str:
        """The kind of unit, as it stands in the bucket key."""
        return self.manifest.flow

    @property
    def window_id(self) -> str:
        """Unique for ever; the same in every attempt."""
        return self.manifest.window_id


Function = Callable[[Context], Any]
F = TypeVar("F", bound=Function)


@dataclass(frozen=True)
class Handler:
    """A registered function with its rules; durations in ms."""

    flow: str
    function: Function
    max_attempts: int
    timeout: int
    backoff: int
    max_backoff: int

    def __call__(self, context: Context) -> None:
        """Runs the function to its end; what it returns is nobody's. An asynchronous one gets an event loop of its own,
        and Timeout where it overruns."""
        result = self.function(context)
        if inspect.isawaitable(result):
            asyncio.run(self._bounded(result))

    async def _bounded(self, result: Any) -> None:
        scope = asyncio.timeout(self.timeout / 1000)
        try:
            async with scope:
                await result
        except TimeoutError:
            if scope.expired():
                raise Timeout from None
            raise

    def delay(self, failures: int) -> int:
        """ms until the next attempt after so many failed ones (from 1): exponential, anywhere between none and all of
        it, so that what failed together does not come back together."""
        return random.randint(1, max(1, min(self.max_backoff, self.backoff << min(failures - 1, 40))))


_registry: dict[str, Handler] = {}


def handler(
    flow: str,
    *,
    max_attempts: int = 5,
    timeout: str = "5m",
    backoff: str = "1s",
    max_backoff: str = "10m",
) -> Callable[[F], F]:
    """Registers a function, plain or ``async``, for a flow as it stands in the bucket key (percent-encoded); the flow
    ``default`` serves all that have none of their own.

    An attempt that raises, or runs longer than `timeout`, is made again after an exponential, jittered pause that
    begins at `backoff` and never exceeds `max_backoff`; after `max_attempts` failed ones, or a PermanentError, the
    manifest is dead. Raises InvalidSettings for an option out of range, and where another function has the flow.
    """
    if not _is_flow(flow):
        raise InvalidSettings("handler", "must name a flow: 1 to 128 bytes, as it stands in the bucket key")
    if type(max_attempts) is not int or not 1 <= max_attempts <= _MAX_ATTEMPTS:
        raise _wrong(flow, "max_attempts", f"must be a whole number from 1 to {_MAX_ATTEMPTS}")
    spans = {}
    for name, text in (("timeout", timeout), ("backoff", backoff), ("max_backoff", max_backoff)):
        try:
            spans[name] = duration_option(text)
        except InvalidInput as problem:
            raise _wrong(flow, name, problem.rule) from None

    def register(function: F) -> F:
        if not callable(function):
            raise _wrong(flow, "function", "must be a function that takes the context")
        there = _registry.get(flow)
        if there is not None and _name(there.function) != _name(function):
            raise _wrong(flow, "function", f"{_name(there.function)} is registered already, besides {_name(function)}")
        _registry[flow] = Handler(flow, function, max_attempts, **spans)
        return function

    return register


def _is_flow(value: object) -> bool:
    return isinstance(value, str) and 1 <= len(value.encode(errors="replace")) <= 128 and ":" not in value


def _wrong(flow: str, option: str, rule: str) -> InvalidSettings:
    return InvalidSettings(f"handler {flow}", f"{option}: {rule}")


def _name(function: Function) -> str:
    return f"{getattr(function, '__module__', '?')}.{getattr(function, '__qualname__', type(function).__name__)}"


def find_handler(flow: str) -> Handler:
    """The handler of a flow. Raises HandlerMissing."""
    found = _registry.get(flow) or _registry.get(DEFAULT)
    if found is None:
        raise HandlerMissing(flow)
    return found


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
            raise InvalidSettings("handlers", f"{name} can't be imported: {type(problem).__name__}") from problem


def cause_of(error: BaseException) -> str:
    """What is recorded of an exception: the name of its class."""
    return re.sub(r"\W", "_", type(error).__name__)[:100]
