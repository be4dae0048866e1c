"""Worker processes for tests."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from accumulator.client import Accumulator
from accumulator.keys import timers
from tests.conftest import wait_until

ROOT = Path(__file__).parent.parent


class Program:
    """A process of ours, and what it logs."""

    def __init__(self, process: subprocess.Popen[bytes], log: Path) -> None:
        self.process = process
        self.log = log

    @property
    def pid(self) -> int:
        return self.process.pid

    def lines(self) -> list[dict[str, Any]]:
        """Its log so far; whole lines."""
        text = self.log.read_bytes()
        # RQ's own lines are no JSON.
        return [json.loads(line) for line in text[: text.rfind(b"\n") + 1].splitlines() if line.startswith(b"{")]

    def said(self, event: str) -> list[dict[str, Any]]:
        return [line for line in self.lines() if line["event"] == event]

    def until(self, event: str, timeout: float = 20) -> None:
        """Returns once it has logged that event."""

        def found() -> bool:
            assert self.process.poll() is None, f"it ended: {self.log.read_text()}"
            return bool(self.said(event))

        wait_until(found, timeout, f"the process logs {event}")


@contextmanager
def program(
    arguments: Sequence[str], url: str, namespace: str, log: Path, environment: Mapping[str, str] | None = None
) -> Iterator[Program]:
    """Runs Python with `arguments` in the project's folder, on that server; kills it at the end where it still runs."""
    inherited = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}  # noqa: TID251
    given = {"ACCUMULATOR_REDIS_URL": url, "ACCUMULATOR_NAMESPACE": namespace, "ACCUMULATOR_CONFIG": str(config())}
    with log.open("wb") as out:
        process = subprocess.Popen(
            [sys.executable, *arguments],
            cwd=ROOT,
            env=inherited | given | dict(environment or {}),
            stdout=out,
            stderr=out,
            stdin=subprocess.DEVNULL,
        )
    try:
        yield Program(process, log)
    finally:
        if process.poll() is None:
            process.kill()
        process.wait(10)


def config() -> Path:
    """A configuration with the handlers of tests/sample_handlers.py and no policy."""
    return ROOT / "tests" / "sample_config.yaml"


def written(out: Path) -> list[list[Any]]:
    """What the handlers wrote: [what, bucket_key, window_version, attempt, event ids]."""
    return [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []


def let_pass(accumulator: Accumulator, kind: str = "m:") -> int:
    """As if the time had passed that every lease, watch and back-off waits for; how many there were."""
    client: Any = accumulator.store.client
    operations = accumulator.operations
    seconds, micros = client.time()
    soon = seconds * 1000 + micros // 1000 + 2
    moved = 0
    for partition, prefix in enumerate(operations.prefixes):
        for member in client.zrange(timers(prefix), 0, -1):
            if member.startswith(kind.encode()):
                client.zadd(timers(prefix), {member: soon}, xx=True)  # it may be settled by now
                client.publish(operations.channel, f"{partition} {soon}")
                moved += 1
    return moved
