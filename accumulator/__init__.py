"""An event accumulator on Redis: push an event, get a manifest.

    from accumulator import Accumulator

    with Accumulator("redis://127.0.0.1:6379/0") as accumulator:
        receipt = accumulator.push(event_id="e1", bucket_key="shop:order:7", kind="paid", source="web", occurred_at=at)

Each name below is imported when it is first asked for, so that importing the package costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from accumulator.client import Accumulator, AsyncAccumulator
    from accumulator.context import Context, StepContext
    from accumulator.emission import Emission, LadderRun
    from accumulator.envelope import MISSING, Event, bucket_key
    from accumulator.errors import (
        AccumulatorError,
        AuthenticationFailed,
        HandlerMissing,
        InternalError,
        InvalidEvent,
        InvalidInput,
        InvalidLadder,
        InvalidPolicy,
        InvalidScenario,
        InvalidSettings,
        MissingRight,
        NamespaceMismatch,
        ServerError,
        ServerRefused,
        ServerUnavailable,
        UnknownFlow,
        UnknownLadder,
    )
    from accumulator.handlers import (
        Diverged,
        NotDone,
        PermanentError,
        QueueFull,
        RetryLater,
        Stages,
        Superseded,
        handler,
        on_cancelled,
        on_escalated,
        step_handler,
    )
    from accumulator.ladders import Ladder
    from accumulator.manifest import Manifest, StoredEvent
    from accumulator.policy import Policy
    from accumulator.windows import Outcome, Receipt

__version__ = "0.1.0"

_HOMES = {
    "client": ("Accumulator", "AsyncAccumulator"),
    "envelope": ("MISSING", "Event", "bucket_key"),
    "errors": (
        "AccumulatorError",
        "AuthenticationFailed",
        "HandlerMissing",
        "InternalError",
        "InvalidEvent",
        "InvalidInput",
        "InvalidLadder",
        "InvalidPolicy",
        "InvalidScenario",
        "InvalidSettings",
        "MissingRight",
        "NamespaceMismatch",
        "ServerError",
        "ServerRefused",
        "ServerUnavailable",
        "UnknownFlow",
        "UnknownLadder",
    ),
    "context": ("Context", "StepContext"),
    "emission": ("Emission", "LadderRun"),
    "handlers": (
        "Diverged",
        "NotDone",
        "PermanentError",
        "QueueFull",
        "RetryLater",
        "Stages",
        "Superseded",
        "handler",
        "on_cancelled",
        "on_escalated",
        "step_handler",
    ),
    "ladders": ("Ladder",),
    "manifest": ("Manifest", "StoredEvent"),
    "policy": ("Policy",),
    "windows": ("Outcome", "Receipt"),
}
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}

__all__ = [
    "MISSING",
    "Accumulator",
    "AccumulatorError",
    "AsyncAccumulator",
    "AuthenticationFailed",
    "Context",
    "Diverged",
    "Emission",
    "Event",
    "HandlerMissing",
    "InternalError",
    "InvalidEvent",
    "InvalidInput",
    "InvalidLadder",
    "InvalidPolicy",
    "InvalidScenario",
    "InvalidSettings",
    "Ladder",
    "LadderRun",
    "Manifest",
    "MissingRight",
    "NamespaceMismatch",
    "NotDone",
    "Outcome",
    "PermanentError",
    "Policy",
    "QueueFull",
    "Receipt",
    "RetryLater",
    "ServerError",
    "ServerRefused",
    "ServerUnavailable",
    "Stages",
    "StepContext",
    "StoredEvent",
    "Superseded",
    "UnknownFlow",
    "UnknownLadder",
    "__version__",
    "bucket_key",
    "handler",
    "on_cancelled",
    "on_escalated",
    "step_handler",
]


if not TYPE_CHECKING:  # a type checker should miss what is not there

    def __getattr__(name: str) -> Any:
        if name not in _HOME_OF:
            raise AttributeError(f"module 'accumulator' has no attribute {name!r}")
        value = getattr(import_module(f"accumulator.{_HOME_OF[name]}"), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted(globals().keys() | set(__all__))
