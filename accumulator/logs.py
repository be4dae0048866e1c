"""Structured logs: what every module logs through, and what a program sets up.

An event is a fixed word with fields. Bucket keys are often personal: given as ``bucket_key=`` they are shown hashed,
or plain where the operator asks for it. Only words and numbers are shown, of anything else its type, so that no payload
gets in by mistake; nobody logs credentials.

Everything goes to the standard library's logger ``accumulator``, so a program that uses the package decides what
becomes of it. :func:`configure` is for our own programs.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import MutableMapping
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, TextIO

import structlog
from structlog.typing import Processor

__all__ = ["configure", "get_logger", "place"]

_ROOT = "accumulator"
_Fields = MutableMapping[str, Any]


@dataclass
class _State:
    plain_keys: bool
    render: Processor


_state = _State(False, structlog.processors.LogfmtRenderer())


def _hide(_: Any, __: str, fields: _Fields) -> _Fields:
    shown: _Fields = {name: fields.pop(name) for name in ("timestamp", "level", "logger", "event")}
    for name, value in fields.items():
        if name == "bucket_key":
            text = str(value)
            shown["bucket"] = text if _state.plain_keys else blake2b(text.encode(), digest_size=6).hexdigest()
        elif isinstance(value, str | int | float | bool | None):
            shown[name] = value
        else:
            shown[name] = f"<{type(value).__name__}>"
    return shown


def _render(logger: Any, method: str, fields: _Fields) -> Any:
    return _state.render(logger, method, fields)


def get_logger(name: str) -> structlog.stdlib.BoundLogger:
    """The logger ``accumulator.<name>``; each event names it as `logger`."""
    logger: structlog.stdlib.BoundLogger = structlog.wrap_logger(
        logging.getLogger(f"{_ROOT}.{name}"),
        wrapper_class=structlog.stdlib.BoundLogger,
        processors=[
            structlog.stdlib.filter_by_level,
            structlog.stdlib.add_log_level,
            structlog.processors.TimeStamper("iso", utc=True),
            _hide,
            _render,
        ],
        cache_logger_on_first_use=True,
    )
    return logger.bind(logger=name)


def configure(level: str = "info", plain_keys: bool = False, stream: TextIO | None = None) -> None:
    """Sends the logs to `stream` (by default standard error): to a terminal for people, elsewhere as JSON, a line each,
    in ASCII, which any locale can write. `level` is debug, info, warning, error or critical."""
    out = sys.stderr if stream is None else stream
    _state.plain_keys = plain_keys
    _state.render = (
        structlog.dev.ConsoleRenderer(colors=True, sort_keys=False)
        if out.isatty()
        else structlog.processors.JSONRenderer()
    )
    handler = logging.StreamHandler(out)
    handler.setFormatter(logging.Formatter("%(message)s"))
    root = logging.getLogger(_ROOT)
    root.handlers[:] = [handler]
    root.propagate = False
    root.setLevel(level.upper())


def place(error: BaseException) -> str:
    """Where an exception arose, ``module.py:12 function``: what of it may be logged beside its class, since its text
    may quote a payload."""
    trace = error.__traceback__
    if trace is None:
        return ""
    while trace.tb_next is not None:
        trace = trace.tb_next
    code = trace.tb_frame.f_code
    return f"{code.co_filename.rpartition('/')[2]}:{trace.tb_lineno} {code.co_name}"
