"""The worker processes of tests/chaos.py: their handlers, the world outside, and the places where they die.

The world outside is a file to which each call appends a line: it honours no idempotency key and refuses nothing, so a
call that is made twice stands in it twice. `happened` reads that file and is final, since a handler makes no call that
could still come after its attempt was given up (see `_call`).

A trap is a file named after a step and `before` or `after` it. Whichever process comes there first takes it, and kills
itself or the server with SIGKILL, or stalls until its lease is over, as the trap says.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Iterable
from multiprocessing import connection, parent_process
from pathlib import Path
from typing import Any, Final

import rq

from accumulator import logs, rq_sink, runner, scripts
from accumulator.client import Accumulator
from accumulator.context import Context, StepContext
from accumulator.handlers import NotDone, Stages, handler, on_cancelled, on_escalated, step_handler
from accumulator.settings import Config, Settings
from accumulator.store import Commands, Reply, Store
from accumulator.worker import Worker

STEPS: Final = (
    "tick", "take", "enqueue", "begin", "read", "stage", "effect-begin", "effect-again", "verify", "outside",
    "effect-confirm", "settle",
)  # fmt: skip
"""From a window's closing to its manifest's confirmation; each has a before and an after."""

RARE: Final = ("enqueue", "effect-again", "verify", "some")

POLICIES: Final[dict[str, dict[str, Any]]] = {
    "plain": {"sink": "direct"},
    "staged": {"sink": "direct"},
    "each": {"sink": "direct"},
    "together": {"sink": "direct", "handover": "together"},
    "giving": {"sink": "direct"},
    "loose": {"sink": "direct", "ordered": False},
    "rq-plain": {"sink": "rq"},
    "rq-staged": {"sink": "rq"},
}
"""Flow → what its policy has beside WINDOWS."""
WINDOWS: Final[dict[str, Any]] = {"inactivity": "150ms", "max_age": "2s", "max_events": 4, "terminal_kinds": ["end"]}

LADDER: Final[dict[str, Any]] = {
    "anchor": "start",
    "steps": [{"name": f"s{n}", "offset": f"{300 * n}ms"} for n in range(4)],
    "cancel_on": ["paid"],
    "final_wait": "300ms",
    "escalate": True,
}
"""Runs in buckets of the flows that LADDER_FLOWS names, one for each sink."""
LADDER_FLOWS: Final = ("plain", "rq-plain")

TIMEOUT: Final = 1000
"""ms that a handler may take; all of them take a few."""
STALL: Final = 2.5
"""s: longer than a lease."""
IN_TIME: Final = 700
"""ms after the beginning of its attempt in which a handler may call the world outside."""

_folder = Path()


class World:
    """The files that parent and workers share, in one folder."""

    def __init__(self, folder: Path) -> None:
        self.outside = folder / "outside.log"
        self.reminders = folder / "reminders.log"
        self.kills = folder / "kills.log"
        self.errors = folder / "errors.log"
        self.server = folder / "server.pid"
        self.traps = folder / "traps"

    def set_trap(self, place: str, victim: str, delay: float = 0.0) -> None:
        """`victim` is ``process`` or ``server``, which dies `delay` s after the place was passed, or ``stall``."""
        draft = self.traps / "draft"
        draft.write_text(f"{victim} {delay}")
        draft.rename(self.traps / place)


def _append(path: Path, line: str, sync: bool = False) -> None:
    out = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        os.write(out, line.encode() + b"\n")  # one write: a line is there whole or not at all
        if sync:
            os.fsync(out)
    finally:
        os.close(out)


def _pass(step: str, when: str) -> None:
    """A place where somebody may die. One that is passed often lets most go on, so that work is done meanwhile."""
    if step not in RARE and random.random() < 0.8:
        return
    world = World(_folder)
    taken = world.traps / f"taken-{os.getpid()}-{threading.get_ident()}"
    try:
        os.rename(world.traps / f"{step}-{when}", taken)
    except FileNotFoundError:
        return
    victim, delay = taken.read_text().split()
    taken.unlink()

    def kill() -> None:
        if victim == "server":
            try:
                os.kill(int(world.server.read_text()), signal.SIGKILL)
            except ProcessLookupError:
                return  # it is dead already
        _append(world.kills, f"{step}-{when} {victim}")
        if victim == "process":
            os.kill(os.getpid(), signal.SIGKILL)
        elif victim == "stall":
            threading.Event().wait(STALL)

    if float(delay):
        threading.Timer(float(delay), kill).start()
    else:
        kill()


# --- the world outside ------------------------------------------------------------------------------------------------


def happened(key: str) -> bool:
    """Whether a call was made under that key."""
    _pass("verify", "before")
    world, said = World(_folder), b'"key": "%s"' % key.encode()
    found = any(said in log.read_bytes() for log in (world.outside, world.reminders))
    _pass("verify", "after")
    return found


def _be_in_time(begun: int) -> None:
    if time.time() * 1000 - begun > IN_TIME:
        # Whoever takes over asks whether it happened, and that must be final.
        raise NotDone


def _call(ctx: Context, key: str, only: str | None = None) -> None:
    """One call to the world outside, for all that is handed over or for one event id `only`."""
    _be_in_time(ctx.manifest.timeline[-1][0])
    windows = [
        [m.window_id, m.window_version, [e.event.event_id for e in m.events if only in (None, e.event.event_id)]]
        for m in ctx.manifests
    ]
    line = json.dumps({"key": key, "bucket": ctx.bucket_key, "windows": windows})
    _pass("outside", "before")
    _append(World(_folder).outside, line, sync=True)
    _pass("outside", "after")


def _stumble() -> None:
    """An ordinary failure, now and then."""
    if random.random() < 0.01:
        raise ValueError("bad luck")


# --- handlers ---------------------------------------------------------------------------------------------------------

_OPTIONS: Final[dict[str, Any]] = {
    "timeout": f"{TIMEOUT}ms",
    "max_attempts": 1000,
    "backoff": "10ms",
    "max_backoff": "100ms",
}


@handler("plain", **_OPTIONS)
@handler("loose", **_OPTIONS)
@handler("together", **_OPTIONS)
@handler("rq-plain", **_OPTIONS)
def plain(ctx: Context) -> None:
    _stumble()
    with ctx.effect("do", verify=happened) as effect:
        if effect.needed:
            _call(ctx, effect.key)
            _stumble()
    _stumble()


@handler("giving", **_OPTIONS)
def give_way(ctx: Context) -> None:
    ctx.superseded()
    plain(ctx)


@handler("each", **_OPTIONS)
async def one_by_one(ctx: Context) -> None:
    for entry in ctx.events:
        event_id = entry.event.event_id
        async with ctx.effect("do", event_id=event_id, verify=happened) as effect:
            if effect.needed:
                _call(ctx, effect.key, event_id)


@handler("staged", **_OPTIONS)
@handler("rq-staged", **_OPTIONS)
class Staged(Stages):
    def load(self, ctx: Context) -> Any:
        before = ctx.predecessor
        return {"before": before and before.window_version, "checkpoint": ctx.checkpoint}

    def interpret(self, ctx: Context) -> list[str]:
        _stumble()
        return [entry.event.event_id for entry in ctx.events]

    def propose(self, ctx: Context) -> dict[str, Any]:
        return {"events": ctx.results["interpret"]}

    def execute(self, ctx: Context, key: str) -> dict[str, str]:
        _call(ctx, key)
        ctx.leave({"version": ctx.manifest.window_version})
        return {"key": key}

    def verify(self, ctx: Context, key: str) -> bool:
        return happened(key)

    def confirm(self, ctx: Context) -> bool:
        return happened(f"{ctx.window_id}:execute")


@step_handler("dunning", **_OPTIONS)
@on_cancelled("dunning", **_OPTIONS)
@on_escalated("dunning", **_OPTIONS)
def remind(ctx: StepContext) -> None:
    """A line when it begins, and one for the reminder itself."""
    begun = ctx.emission.timeline[-1][0]
    about = {"ladder": ctx.ladder_id, "what": ctx.step or ctx.event, "begun": begun}
    _append(World(_folder).reminders, json.dumps(about))
    _stumble()
    with ctx.effect("send", verify=happened) as effect:
        if effect.needed:
            _be_in_time(begun)
            _pass("outside", "before")
            _append(World(_folder).reminders, json.dumps(about | {"key": effect.key}), sync=True)
            _pass("outside", "after")
            _stumble()
    _stumble()


# --- processes --------------------------------------------------------------------------------------------------------

_scripts = {text: name for name in scripts.NAMES for text in (scripts.script(name).sha, scripts.script(name).source)}


def _steps_of(commands: Commands) -> Iterable[str]:
    found: dict[str, None] = {}
    for command in commands:
        if command[0] in ("EVALSHA", "EVAL"):
            script = _scripts[command[1]]
            found[f"effect-{command[8]}" if script == "effect" else script] = None
        elif any(part in str(command[1:2]) for part in (":manifest:", ":stages:", ":checkpoint:")):
            found["read"] = None
    return found


def _set_traps() -> None:
    send, enqueue_many = Store._send, rq.Queue.enqueue_many

    def send_past_traps(self: Store, commands: Commands) -> list[Reply]:
        steps = _steps_of(commands)
        for step in steps:
            _pass(step, "before")
        replies = send(self, commands)
        for step in steps:
            _pass(step, "after")
        if "begin" in steps:
            _pass("some", "moment")  # the parent may want the handler to die soon
        return replies

    def enqueue_past_traps(*args: Any, **options: Any) -> Any:
        _pass("enqueue", "before")
        jobs = enqueue_many(*args, **options)
        _pass("enqueue", "after")
        return jobs

    Store._send = send_past_traps  # type: ignore[method-assign]
    rq.Queue.enqueue_many = enqueue_past_traps  # type: ignore[method-assign]


# What a dead process held comes back within a second or two instead of half a minute.
_BRIEF: Final = ((runner, "LEASE_MARGIN", 1000), (runner, "WATCH", 500), (rq_sink, "WATCH", 2500))


def work(roles: str, folder: Path, url: str, namespace: str) -> None:
    """A worker process with `roles` of Worker, or ``rq``; ends with the process that asked for it."""
    global _folder
    _folder = folder
    errors = os.open(World(folder).errors, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    for stream in (1, 2):
        os.dup2(errors, stream)
    parent = parent_process()
    assert parent is not None

    def follow() -> None:
        connection.wait([parent.sentinel])
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=follow, daemon=True).start()
    logs.configure("warning", plain_keys=True)
    _set_traps()
    for module, name, value in _BRIEF:
        setattr(module, name, value)
    settings = Settings(redis_url=url, namespace=namespace)
    policies = {flow: WINDOWS | own for flow, own in POLICIES.items()}
    config = Config(handlers=[__name__], policies=policies, ladders={"dunning": LADDER})
    if roles == "rq":
        rq_sink.work(settings, config)
        return
    accumulator = Accumulator.from_settings(settings)
    sys.exit(Worker(settings, config, roles=roles.split(), accumulator=accumulator).run())
