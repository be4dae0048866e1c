"""Handlers: the user's code, and which flow it serves.

::

    @handler("order")
    def ship(ctx: Context) -> None: ...

    @handler("order", max_attempts=8, timeout="2m")
    class Ship(Stages):
        def load(self, ctx): ...
        def propose(self, ctx): ...
        def execute(self, ctx, key): ...

A handler serves the flow it names; one named ``default`` serves flows that have none. Modules that register handlers
are named in the configuration and imported by the processes that run them.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TypeVar

from accumulator.errors import HandlerMissing, InvalidSettings
from accumulator.policy import duration_option, whole_number

if TYPE_CHECKING:
    from accumulator.attempt import Context

T = TypeVar("T")

STAGES: Final = ("load", "interpret", "propose", "revalidate", "approve", "execute", "verify", "confirm")


class PermanentError(Exception):
    """Raised by a handler: no retry will help; the manifest is dead at once."""


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


class Stages:
    """A handler in stages; each is optional and gets the context, ``ctx.results`` holds what earlier ones returned
    (JSON values, kept with the manifest, so that a retry continues where it stopped).

    load        the official state, now
    interpret   what the events mean
    propose     what should be done
    approve     whether a person must approve the proposal (true or false)
    revalidate  whether version, permission and deadline still hold, asked before `execute` and so after an approval;
                false drops what was kept, and the stages begin anew
    execute     does it, once, under the idempotency key that it gets as second argument
    verify      whether an `execute` that was begun and not confirmed did happen: false, or true, or its result; None is
                "nobody can tell", which goes to reconciliation
    confirm     whether it worked; raises Diverged, or returns false, where the world is otherwise

    Any of them may be ``async``.
    """


@dataclass(frozen=True)
class Handler:
    """A registered handler. Durations in ms; `run` is a function of the context, or `stages` an instance of Stages."""

    flow: str
    name: str
    run: Callable[[Context], Any] | None
    stages: Stages | None
    max_attempts: int
    timeout: int
    backoff: int
    max_backoff: int
    approval_limit: int

    @property
    def loads(self) -> bool:
        """Whether it loads the official state, as `requery_kinds` demand."""
        return self.stages is not None and hasattr(self.stages, "load")


_registry: dict[str, Handler] = {}


def handler(
    flow: str,
    *,
    max_attempts: int = 5,
    timeout: str = "5m",
    backoff: str = "1s",
    max_backoff: str = "10m",
    approval_limit: str = "1d",
) -> Callable[[T], T]:
    """Registers a function ``(ctx)``, plain or ``async``, or a class of stages, for a flow.

    A failure is retried after `backoff`, doubled each time up to `max_backoff`, with jitter, until it failed
    `max_attempts` times; then the manifest is dead, which a person can replay. `timeout` bounds an attempt. An approval
    is waited for up to `approval_limit` before the bucket's next manifest passes. Raises InvalidSettings.
    """

    def register(what: T) -> T:
        run: Callable[[Context], Any] | None = None
        stages: Stages | None = None
        if inspect.isclass(what) and issubclass(what, Stages):
            stages = what()
            odd = [name for name in vars(what) if not name.startswith("_") and name not in STAGES]
            if odd and callable(getattr(what, odd[0])):
                raise InvalidSettings("handler", f"{what.__name__}.{odd[0]} is no stage: begin other names with _")
            if not hasattr(stages, "execute") and not hasattr(stages, "propose"):
                raise InvalidSettings("handler", f"{what.__name__} has no stage that does anything")
        elif callable(what):
            run = what
        else:
            raise InvalidSettings("handler", "must be a function, or a class of Stages")
        if flow in _registry:
            raise InvalidSettings("handler", f"flow {flow} has two: {_registry[flow].name} and {_name(what)}")
        try:
            made = Handler(
                flow=flow,
                name=_name(what),
                run=run,
                stages=stages,
                max_attempts=whole_number(max_attempts, 1, 1000),
                timeout=duration_option(timeout),
                backoff=duration_option(backoff),
                max_backoff=duration_option(max_backoff),
                approval_limit=duration_option(approval_limit),
            )
        except ValueError as problem:
            raise InvalidSettings("handler", f"{_name(what)}: {problem}") from None
        _registry[flow] = made
        return what

    return register


def _name(what: object) -> str:
    return f"{getattr(what, '__module__', '?')}.{getattr(what, '__qualname__', type(what).__name__)}"


def handler_for(flow: str) -> Handler:
    """The flow's handler, or that of ``default``. Raises HandlerMissing."""
    found = _registry.get(flow) or _registry.get("default")
    if found is None:
        raise HandlerMissing(flow)
    return found


def registered() -> dict[str, Handler]:
    """Flow → handler, as they stand."""
    return dict(_registry)


def forget_handlers() -> None:
    """Empties the registry: for tests."""
    _registry.clear()


def load_handlers(modules: Iterable[str]) -> None:
    """Imports the modules that register handlers. Raises InvalidSettings, naming the module."""
    for module in modules:
        try:
            importlib.import_module(module)
        except InvalidSettings:
            raise
        except Exception as problem:
            raise InvalidSettings(
                "handlers", f"{module} can't be imported: {type(problem).__name__}: {problem}"
            ) from problem
