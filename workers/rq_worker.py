"""An RQ worker with the handlers loaded beforehand; any number may run."""

import sys

from accumulator import logs, rq_sink
from accumulator.errors import AccumulatorError
from accumulator.settings import Settings, find_config

if __name__ == "__main__":
    try:
        settings = Settings()
        logs.configure(settings.log_level, settings.log_plain_keys)
        rq_sink.work(settings, find_config(settings))
    except AccumulatorError as problem:
        sys.exit(f"accumulator: {problem}")
