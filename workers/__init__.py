"""One thin entry program per role: ``python -m workers.closer``. The logic is in `accumulator`; `accumulator worker`
runs the same roles."""

from __future__ import annotations

import sys

from accumulator import logs
from accumulator.errors import AccumulatorError, ServerError
from accumulator.settings import Settings, find_config
from accumulator.worker import Worker


def start(*roles: str) -> int:
    """Runs a worker with these roles, or all, by what the environment says; the exit code: 0 it was stopped, 2 wrong
    settings, 3 no server."""
    try:
        settings = Settings()
        logs.configure(settings.log_level, settings.log_plain_keys)
        return Worker(settings, find_config(settings), roles=roles or None).run()
    except AccumulatorError as problem:
        print(f"accumulator: {problem}", file=sys.stderr)
        return 3 if isinstance(problem, ServerError) else 2
