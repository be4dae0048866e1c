"""Handlers of a module that takes signals for itself, for worker processes that tests start."""

from __future__ import annotations

import signal

from tests import sample_handlers

__all__ = ["sample_handlers"]

for name in (signal.SIGTERM, signal.SIGINT):
    signal.signal(name, signal.SIG_IGN)
