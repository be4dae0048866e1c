"""Handlers for worker processes that tests start. They write what they did into the file that the first event's payload
names, a line each, so that a test sees it whatever became of the process."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import threading
from pathlib import Path
from typing import Any

from accumulator import Context, handler


def _told(ctx: Context) -> dict[str, Any]:
    payload = ctx.events[0].event.payload
    assert isinstance(payload, dict)
    return payload


def _write(ctx: Context, what: str) -> None:
    line = [what, ctx.bucket_key, ctx.manifest.window_version, ctx.attempt, list(ctx.manifest.event_ids)]
    out = os.open(_told(ctx)["out"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    try:
        os.write(out, json.dumps(line).encode() + b"\n")  # one write: lines of several processes do not mix
    finally:
        os.close(out)


@handler("log")
def write_down(ctx: Context) -> object:
    _write(ctx, "handled")
    return ctx.events[0].event.payload


@handler("slow", timeout="5m")
def take_long(ctx: Context) -> None:
    _write(ctx, "begun")
    threading.Event().wait(_told(ctx)["seconds"])
    _write(ctx, "ended")


@handler("hang", timeout="200ms", max_attempts=2, backoff="1ms")
def overrun(ctx: Context) -> None:
    _write(ctx, "begun")
    try:
        threading.Event().wait(60)
    except Exception:  # a timeout must not be swallowed by what catches everything
        _write(ctx, "caught")


@handler("fail", max_attempts=3, backoff="1ms", max_backoff="2ms")
def fail(ctx: Context) -> None:
    _write(ctx, "failed")
    raise ValueError(_told(ctx)["secret"])


@handler("crash", timeout="5m")
def crash(ctx: Context) -> None:
    _write(ctx, "begun")
    if ctx.attempt == 1:
        os.kill(os.getpid(), signal.SIGKILL)


@handler("who", timeout="5m")
def tell_which_process(ctx: Context) -> None:
    """Lasts so many seconds, or until there is the file `go` beside what it writes."""
    _write(ctx, f"begun {os.getpid()}")
    go, pause = Path(_told(ctx)["out"]).with_name("go"), threading.Event()
    if (seconds := _told(ctx).get("seconds")) is not None:
        pause.wait(seconds)
    else:
        while not go.exists():
            pause.wait(0.02)
    _write(ctx, f"ended {os.getpid()}")


@handler("spin", timeout="300ms", max_attempts=2, backoff="1ms")
def spin(ctx: Context) -> None:
    _write(ctx, f"begun {os.getpid()}")
    while True:
        pass


@handler("block", timeout="100ms")
def block_every_thread(ctx: Context) -> None:
    _write(ctx, f"begun {os.getpid()}")
    if ctx.attempt == 1:
        ctypes.PyDLL(None).sleep(60)  # as a C extension that keeps the GIL


@handler("fault", timeout="5m")
def segmentation_fault(ctx: Context) -> None:
    _write(ctx, f"begun {os.getpid()}")
    if ctx.attempt == 1:
        ctypes.string_at(0)


@handler("program", timeout="300ms", max_attempts=1)
def wait_for_a_program(ctx: Context) -> None:
    with subprocess.Popen(["sleep", "300"]) as child:
        _write(ctx, f"begun {child.pid}")


@handler("read", timeout="20s", max_attempts=1)
def read_standard_input(ctx: Context) -> None:
    """As a program does that is started without a thought of what it reads."""
    subprocess.run(["cat"], check=True)
    _write(ctx, "handled")
