"""The Lua scripts: their contracts, exact keys in and out, and the same replies from the fake and from real servers."""

from __future__ import annotations

import itertools
import json
import math
import re
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import lru_cache
from importlib.resources import files
from typing import Any

import fakeredis
import pytest
import redis

from accumulator import keys, scripts
from accumulator.client import Accumulator
from accumulator.decisions import ReconcileItem
from accumulator.envelope import Event
from accumulator.health import beat
from accumulator.ladders import Ladder
from accumulator.manifest import read_manifest, replay
from accumulator.operations import Operations
from accumulator.policy import Policy
from accumulator.scripts import script
from accumulator.store import Store
from tests.conftest import MakeClient, event
from tests.histories import differences, history
from tests.invariants import SINGLE, WINDOW_ID, check_invariants, contents
from tests.model import simulate
from tests.test_histories import Worked

ELSEWHERE = {"start_ladder", "move_ladder", "watch", "beat"}
"""What no history of windows calls; see test_ladders.py and test_health.py."""
LUA = sorted(path.name.removesuffix(".lua") for path in files("accumulator").joinpath("lua").iterdir())
PARTS = [name for name in LUA if not scripts.read(name).startswith("#!")]


# --- contracts --------------------------------------------------------------------------------------------------------


@dataclass
class Contract:
    """A script's header, as it stands above it."""

    about: str
    items: dict[str, str]

    @classmethod
    def of(cls, name: str) -> Contract:
        shebang, *lines = scripts.read(name).split("\n")
        assert re.fullmatch(r"#!lua( flags=allow-oom)?", shebang), f"{name}: its first line is {shebang}"
        items: dict[str, str] = {"about": ""}
        current = "about"
        for line in itertools.takewhile(lambda line: line.startswith("--"), lines):
            found = re.match(
                r"-- (parts|KEYS\[\d+\]|derived|ARGV\[\d+(?:\.\.\.)?\]|reply|errors|cost) *(?:->|:) (.+)$", line
            )
            if found:
                current = found[1]
                assert current not in items, f"{name}: {current} stands twice"
                items[current] = found[2]
            else:
                items[current] += "\n" + line.removeprefix("--")
        return cls(items.pop("about"), items)

    @property
    def parts(self) -> list[str]:
        return self.items["parts"].split(", ") if "parts" in self.items else []

    @property
    def arguments(self) -> list[str]:
        return [name[5:-1] for name in self.items if name.startswith("ARGV[")]

    @property
    def goes_on(self) -> bool:
        """Whether the last argument stands for any number of them."""
        last = list(self.items)[max(n for n, name in enumerate(self.items) if name.startswith("ARGV["))]
        return last.endswith("...]") or re.search(r"\bthen\b|\bfrom here on\b", self.items[last]) is not None

    @property
    def derived(self) -> set[str]:
        """Names of the keys it may touch beside KEYS[1], as in ``bucket:<k>``."""
        text = self.items.get("derived", "")
        named = set(re.findall(r"[a-z]+(?:\.<n>)?(?::<\w+>)*", text.partition("<p>}:")[2]))
        if as_other := re.match(r"as (\w+)(?:, less ([\w ]+))?(?:, and ([\w<>: ]+))?$", text):
            less, more = (as_other[2] or "").split(" and "), (as_other[3] or "").split(" ")
            named = {one for one in Contract.of(as_other[1]).derived if one.partition(":")[0].split(".")[0] not in less}
            named |= set(filter(None, more))
        return named


def code(name: str) -> str:
    """The file without its comments."""
    return re.sub(r"--.*", "", scripts.read(name).partition("\n")[2] if name not in PARTS else scripts.read(name))


def test_every_file_is_a_script_with_a_name_or_a_part_of_one() -> None:
    assert set(scripts.NAMES) == set(LUA) - set(PARTS)
    assert set(PARTS) == {part for name in scripts.NAMES for part in Contract.of(name).parts}
    for part in PARTS:
        assert scripts.read(part).startswith(f"-- part {part}: ")


@pytest.mark.parametrize("name", scripts.NAMES)
def test_header_and_body_agree(name: str) -> None:
    contract = Contract.of(name)
    assert contract.about.startswith(f"\n {name}: ")
    assert {"KEYS[1]", "reply", "cost"} <= contract.items.keys()
    assert contract.items["KEYS[1]"].startswith("<ns>:")
    assert set(contract.parts) <= set(PARTS)
    numbers = [argument.removesuffix("...") for argument in contract.arguments]
    assert numbers == [str(n + 1) for n in range(len(numbers))]
    body = code(name)
    whole = "\n".join([*(code(part) for part in contract.parts), body])
    used = set(re.findall(r"ARGV\[(\d+)\]", whole))
    # A last argument that goes on is read from there on by a loop, a part, or unpack.
    goes_on = contract.goes_on
    assert set(numbers) - used <= ({numbers[-1]} if goes_on else set())
    assert {n for n in used - set(numbers) if not goes_on or int(n) < int(numbers[-1])} == set()
    assert set(re.findall(r"KEYS\[(\d+)\]", whole)) == {"1"}
    assert "cjson" not in whole
    assert "cmsgpack" not in whole
    assert script(name).source.count("#!") == 1
    assert script(name).source == script(name).source.split("\n")[0] + "\n" + script(name).plain


def test_only_what_drains_may_write_over_maxmemory() -> None:
    eager = {name for name in scripts.NAMES if "allow-oom" in scripts.read(name).split("\n")[0]}
    assert {"tick", "take", "begin", "settle", "flush", "decide", "resolve", "beat"} <= eager
    assert not eager & {"accept", "aside", "hold", "retract"}


def test_every_derived_key_is_named_in_a_header_and_in_keys_py() -> None:
    named = set().union(*(Contract.of(name).derived for name in scripts.NAMES))
    written = {
        f"{head}{'.<n>' if dot else ''}"
        for name in LUA
        for head, dot in re.findall(r"prefix \.\. '([a-z]+)(\.?)", code(name))
    }
    assert written <= {one.partition(":")[0] for one in named}
    functions = {name.removesuffix("_") for name in vars(keys) if callable(getattr(keys, name))}
    assert {one.partition(":")[0].partition(".")[0] for one in named} - {"orphans", "stray"} <= functions


def after(operation: Any, reply: bytes) -> Any:
    """The round that follows the first one, which is answered so."""
    next(operation)
    return operation.send([reply])


@pytest.mark.parametrize("name", scripts.NAMES)
def test_callers_give_what_the_header_says(name: str) -> None:
    operations = Operations("t", 1, lambda: T0)
    operations.partitions, operations.prefixes = 1, [keys.prefix("t", 0)]
    operations._flows.add("f")
    operations._counted = math.inf
    w, k, one = "0" * 20, "t:f:1", Event.of(event("e1"))
    policy = Policy.load("f", {"inactivity": "10s"})
    ladder = Ladder.load("dunning", {"steps": [{"name": "s", "offset": "1d"}], "cancel_on": ["paid"]})
    fields = {field.encode(): value.encode() for field, value in MANIFEST.items()}
    log = [(f"{T0}-0".encode(), [(b"e1", J1.encode())])]
    item = ReconcileItem("0-1-1", T0, "late", one, one.content_digest, ())
    made: dict[str, Callable[[], Any]] = {
        "accept": lambda: operations.push(one),
        "aside": lambda: operations.set_aside(w, "t", one, "why"),
        "beat": lambda: beat("t", 1, "{}"),
        "begin": lambda: operations.begin(w, 1, "t", 1, 1),
        "decide": lambda: operations.decide(w, "confirm", "ana", "why"),
        "effect": lambda: operations.effect(w, "t", "mail", "begin", "n"),
        "flush": lambda: operations.flush(k),
        "hold": lambda: operations.hold(k, 1),
        "load_policy": lambda: operations._install("f", 1, policy),
        "move_ladder": lambda: operations.pause_ladder(w),
        "number_policy": lambda: operations.load_policy("f", policy),
        "record": lambda: operations.record(read_manifest(W1, fields, replay(k, log))),
        "reserve": lambda: operations.reserve(["t"], "t" * 16, 1),
        "resolve": lambda: operations.resolve(item, "accept", "ana", "why"),
        "retract": lambda: operations.retract(k, "e1"),
        "settle": lambda: operations.settle(w, "t", "confirmed", "c"),
        "show": lambda: operations.bucket(k),
        "start_ladder": lambda: after(
            operations.start_ladder("dunning", k, "2026-10-20T12:00:00Z"), b'7 {"steps":[{"name":"s","offset":"1d"}]}'
        ),
        "stage": lambda: operations.save_stage(w, "t", "load", "{}"),
        "take": lambda: operations.take(0, "rq", 1, 1),
        "tick": lambda: operations.tick(0, 1),
        "watch": lambda: operations.load_ladder(ladder),
    }
    made_now = made[name]()
    call, *others = made_now if isinstance(made_now, list) else next(made_now)
    assert not any(other.script for other in others)
    assert call.script is script(name)
    given, contract = len(call.args) - 1, Contract.of(name)
    if contract.goes_on:
        assert given >= len(contract.arguments) - 1
    else:
        assert given == len(contract.arguments)
    if name == "accept":
        assert given == len(contract.arguments) + 4 + 4  # one group of one event
    pattern = re.escape(contract.items["KEYS[1]"]).replace("<ns>", "t").replace("<p>", "0").replace("<flow>", "f")
    assert re.fullmatch(pattern, call.args[0])


def test_a_script_touches_its_declared_and_derived_keys_only(make_client: MakeClient) -> None:
    client = make_client()
    names = {client.script_load(script(name).source): name for name in scripts.NAMES}
    touched: dict[str, set[str]] = defaultdict(set)
    with make_client().monitor() as monitor:  # type: ignore[no-untyped-call]
        for seed in (1008, 1013, 1034):
            # MONITOR's lines are parted by spaces, so there may be none in a key.
            scenario = json.loads(json.dumps(history(seed)).replace("\\u00e7\\u00e3o ", ""))
            run = Worked(client, scenario, seed, check=False)
            run.run()
            run.drain()
            run.drop()
        client.echo("the end")
        running = prefix = ""
        for line in monitor.listen():
            verb, *args = line["command"].split(" ")
            if verb == "ECHO":
                break
            if line["client_type"] != "lua":
                running = names[args[0]] if verb == "EVALSHA" else ""
                prefix = args[2].rpartition("timers")[0] if running else ""
                continue
            if not running or verb in ("TIME", "PUBLISH"):
                continue
            for key in args if verb == "RENAME" else args[:1]:
                if running in ("load_policy", "number_policy"):
                    continue
                assert key.startswith(prefix), f"{running} touches {key}, in another partition than {prefix}"
                touched[running].add(pattern_of(key.removeprefix(prefix)))
    for name, found in touched.items():
        assert found <= Contract.of(name).derived | {"timers"}, name
    derived = {key for key in Contract.of("accept").derived if not key.startswith(("ladder", "noticed"))}
    assert touched["accept"] >= derived - {"ids.<n>:<k>", "stray:<w>", "watched", "inflight", "attention"}
    assert set(touched) == set(scripts.NAMES) - {"load_policy", "number_policy"} - ELSEWHERE


def pattern_of(name: str) -> str:
    if name in SINGLE:
        return name
    head, _, rest = name.partition(":")
    if head in ("policy", "ready", "tenants"):
        return f"{head}:<{'flow' if head == 'policy' else 'sink'}>" + (":<tenant>" if head == "ready" else "")
    head = re.sub(r"\.\d+$", ".<n>", head)
    return f"{head}:<w>" if WINDOW_ID.fullmatch(rest) else f"{head}:<k>"


# --- exact keys in, exact keys out ------------------------------------------------------------------------------------

Held = dict[str, Any]

T0 = 1_767_225_600_000  # 2026-01-01T00:00:00Z
DAY = 86_400_000
W1, W2 = "19b76daa800000nonce1", "19b76dacf10000nonce2"  # opened at T0, and ten seconds later
D1, D2 = "1_sGQ8kklQGocpF3clX0rUQ", "1aZowxswpbe5nJ8YmLTh4ew"
J1 = f'{{"size":2,"weight":1,"kind":"k","occurred_at":{T0},"source":"s","payload":{{}}}}'
J2 = f'{{"size":0,"weight":1,"kind":"k","occurred_at":{T0},"source":"s"}}'
# event_id, mark, facts, envelope
E1 = ("e1", f"{T0} - {D1}", f"{T0} - 0 - 1 2 72 1 ks", J1)
E2 = ("e2", f"{T0} - {D2}", f"{T0} - 0 - 1 0 72 1 ks", J2)
ONE = f"2 2 1 {T0} {T0} 0 1"
NONE = f"0 0 1 {T0} {T0} 0 1"
POLICY = Policy.load("f", {"inactivity": "10s", "max_age": "1m", "max_events": 3})
POLICIES: Held = {"policy:f": POLICY.fields(1, T0) | {"latest": f"1 {POLICY.rules()}"}}
OPENED = f"{W1} 1 {T0} 1 0 60000 0 f"
OPEN: Held = {  # as one event at T0 leaves it
    "bucket:t:f:1": {"open": OPENED, "tally": f"1 1 2 1 {T0}", "ids": f"{T0} 0"},
    "events:t:f:1": [[f"{T0}-0", ["e1", J1]]],
    "ids:t:f:1": {"e1": f"1 {T0} - {D1}"},
    "open": {"t:f:1": T0},
    "stats": {"accepted": "1"},
    "timers": {"w:t:f:1": T0 + 10_000},
}
MANIFEST: Held = {
    "bucket": "t:f:1", "version": "1", "state": "closed", "since": f"{T0 + 10_000}", "opened": f"{T0}", "last": f"{T0}",
    "closed": f"{T0 + 10_000}", "sealed": f"{T0 + 10_000}", "reason": "inactivity", "entries": "1", "ids": "1",
    "bytes": "2", "weight": "1", "pv": "0", "policy": "1", "relation": "f", "max_age_at": f"{T0 + 60_000}",
    "inactivity_at": f"{T0 + 10_000}",
}  # fmt: skip
CLOSED: Held = {  # as a tick at T0 + 10 s leaves it
    "bucket:t:f:1": {"ids": f"{T0} {T0 + DAY}", "seen": f"{T0 + 10_000}", "prev": f"1 {W1} - 0", "turn": W1},
    f"events:{W1}": [[f"{T0}-0", ["e1", J1]]],
    "ids:t:f:1": {"e1": f"1 {T0} - {D1}"},
    f"manifest:{W1}": MANIFEST,
    "manifests:t:f:1": {W1: 1},
    "outbox": {W1: T0 + 10_000},
    "ready:rq:t": [W1],
    "tenants:rq": ["t"],
    "stats": {"accepted": "1", "closed": "1", "closed:inactivity": "1", "delay_ms": "0"},
}
DISPATCHED: Held = CLOSED | {
    f"manifest:{W1}": MANIFEST
    | {
        "state": "dispatched", "since": f"{T0 + 11_000}", "attempt": "1", "failures": "0", "dispatches": "1",
        "steps": "1", "step1": f"{T0 + 11_000} dispatched 1 taken",
    },
    "inflight": {"t": "1"},
    "stats": CLOSED["stats"] | {"manifest:dispatched": "1"},
    "timers": {f"m:{W1}": T0 + 71_000},
}  # fmt: skip
del DISPATCHED["ready:rq:t"], DISPATCHED["tenants:rq"]
TOKEN = "token-of-a-runner"
PROCESSING: Held = DISPATCHED | {
    f"manifest:{W1}": DISPATCHED[f"manifest:{W1}"]
    | {
        "state": "processing", "since": f"{T0 + 12_000}", "token": TOKEN, "lease": f"{T0 + 312_000}", "most": "3",
        "pause": "1 9", "steps": "2", "step2": f"{T0 + 12_000} processing 1 begun",
    },
    "stats": DISPATCHED["stats"] | {"manifest:processing": "1"},
    "timers": {f"m:{W1}": T0 + 312_000},
}  # fmt: skip


@dataclass
class Row:
    """What is held, what is called, what is answered, and what changes: None where a key goes."""

    held: Held
    call: tuple[Any, ...]
    reply: Any
    changes: Held


def audited(at: int, outcome: str, event_id: str, *more: str) -> list[Any]:
    return [f"{at}-0", ["at", f"{at}", "outcome", outcome, "bucket_key", "t:f:1", "event_id", event_id, *more]]


def accept(at: int, *groups: tuple[Any, ...], nonce: str = "nonce1") -> tuple[Any, ...]:
    return "accept", at, nonce, "", "", len(groups), *itertools.chain(*groups)


CLOSED_BY_FLUSH = f"{W1},1,flush,{T0 + 1000}"
ROWS = {
    "accept, first event": Row(
        {},
        accept(T0, ("t:f:1", "f", 1, ONE, *E1)),
        [["+", W1, "1", 1]],
        OPEN,
    ),
    "accept, second event": Row(
        OPEN,
        accept(T0 + 1000, ("t:f:1", "f", 1, NONE, *E2)),
        [["+", W1, "1", 2]],
        {
            "bucket:t:f:1": OPEN["bucket:t:f:1"] | {"tally": f"2 2 2 2 {T0 + 1000}"},
            "events:t:f:1": [*OPEN["events:t:f:1"], [f"{T0 + 1000}-0", ["e2", J2]]],
            "ids:t:f:1": OPEN["ids:t:f:1"] | {"e2": f"1 {T0} - {D2}"},
            "stats": {"accepted": "2"},
        },
    ),
    "accept, two buckets": Row(
        {},
        accept(T0, ("t:f:1", "f", 1, ONE, *E1), ("t:f:2", "f", 2, f"2 2 2 {T0} {T0} 0 1", *E1, *E2)),
        [["+", W1, "1", 1], ["+", f"{W1}2", "1", 1]],
        OPEN
        | {
            "bucket:t:f:2": {
                "open": f"{W1}2 1 {T0} 1 0 60000 0 f", "tally": f"2 2 2 2 {T0}", "ids": f"{T0} 0",
            },
            "events:t:f:2": [[f"{T0}-0", ["e1", J1, "e2", J2]]],
            "ids:t:f:2": {"e1": f"1 {T0} - {D1}", "e2": f"1 {T0} - {D2}"},
            "open": {"t:f:1": T0, "t:f:2": T0},
            "stats": {"accepted": "3"},
            "timers": {"w:t:f:1": T0 + 10_000, "w:t:f:2": T0 + 10_000},
        },
    ),
    "accept, duplicate": Row(
        OPEN,
        accept(T0 + 1000, ("t:f:1", "f", 1, ONE, *E1)),
        [["*", "d - 1 0 0 - -"]],
        {
            "bucket:t:f:1": OPEN["bucket:t:f:1"] | {"open": f"{OPENED} *", "dups": "1", "seen": f"{T0 + 1000}"},
            "audit": [audited(T0 + 1000, "duplicate", "e1", "digest", D1)],
            "stats": {"accepted": "1", "duplicates": "1"},
        },
    ),
    "accept, conflict": Row(
        OPEN,
        accept(T0, ("t:f:1", "f", 1, NONE, "e1", *E2[1:])),
        [["*", "c - 1 0 0 - -"]],
        {
            "audit": [audited(T0, "conflict", "e1", "digest", D2, "known", D1)],
            "stats": {"accepted": "1", "conflicts": "1"},
        },
    ),
    "accept, a third of three closes": Row(
        OPEN,
        accept(T0 + 1000, ("t:f:1", "f", 2, f"0 0 2 {T0} {T0} 0 1", *E2, "e3", *E2[1:])),
        [["*", f"a {W1} 1 2 0 - -", f"a {W1} 1 3 0 max_events - {W1},1,max_events,{T0 + 1000}"]],
        {
            "bucket:t:f:1": {
                "ids": f"{T0} {T0 + 1000 + DAY}", "seen": f"{T0 + 1000}", "turn": W1,
                "prev": f"1 {W1} {T0 + 11_000} 0",
            },
            "events:t:f:1": None,
            f"events:{W1}": [[f"{T0}-0", ["e1", J1]], [f"{T0 + 1000}-0", ["e2", J2]], [f"{T0 + 1000}-1", ["e3", J2]]],
            "ids:t:f:1": OPEN["ids:t:f:1"] | {"e2": f"1 {T0} - {D2}", "e3": f"1 {T0} - {D2}"},
            f"manifest:{W1}": MANIFEST
            | {
                "reason": "max_events", "closed": f"{T0 + 1000}", "sealed": f"{T0 + 1000}",
                "since": f"{T0 + 1000}", "last": f"{T0 + 1000}",
                "entries": "3", "ids": "3", "weight": "3", "inactivity_at": f"{T0 + 11_000}",
            },
            "manifests:t:f:1": {W1: 1},
            "open": None,
            "outbox": {W1: T0 + 1000},
            "ready:rq:t": [W1],
    "tenants:rq": ["t"],
            "stats": {"accepted": "3", "closed": "1", "closed:max_events": "1", "delay_ms": "0"},
            "timers": None,
        },
    ),
    "accept, at the very instant at which the window is due": Row(
        OPEN,
        accept(T0 + 10_000, ("t:f:1", "f", 1, NONE, *E2), nonce="nonce2"),
        [["*", f"a {W2} 2 1 0 - - {W1},1,inactivity,{T0 + 10_000}"]],
        {
            "bucket:t:f:1": {
                "open": f"{W2} 2 {T0 + 10_000} 1 0 60000 0 a", "tally": f"1 1 0 1 {T0 + 10_000}",
                "ids": f"{T0} {T0 + 10_000 + DAY}", "prev": f"1 {W1} - 0", "turn": W1,
            },
            "events:t:f:1": [[f"{T0 + 10_000}-0", ["e2", J2]]],
            f"events:{W1}": [[f"{T0}-0", ["e1", J1]]],
            "ids:t:f:1": OPEN["ids:t:f:1"] | {"e2": f"2 {T0} - {D2}"},
            f"manifest:{W1}": MANIFEST,
            "manifests:t:f:1": {W1: 1},
            "open": {"t:f:1": T0 + 10_000},
            "outbox": {W1: T0 + 10_000},
            "ready:rq:t": [W1],
    "tenants:rq": ["t"],
            "stats": CLOSED["stats"] | {"accepted": "2"},
            "timers": {"w:t:f:1": T0 + 20_000},
        },
    ),
    "accept, the outbox is full": Row(
        CLOSED,
        ("accept", T0 + 11_000, "nonce2", 1, "", 1, "t:f:1", "f", 1, NONE, *E2),
        [["*", "j - 0 0 0 - overloaded"]],
        {
            "bucket:t:f:1": CLOSED["bucket:t:f:1"] | {"seen": f"{T0 + 11_000}"},
            "audit": [audited(T0 + 11_000, "rejected", "e2", "code", "overloaded", "digest", D2)],
            "stats": CLOSED["stats"] | {"rejected": "1", "rejected:overloaded": "1"},
        },
    ),
    "flush": Row(
        OPEN,
        ("flush", T0 + 1000, "t:f:1", "", "nonce", "0"),
        ["flushed", 0, CLOSED_BY_FLUSH],
        CLOSED
        | {
            "bucket:t:f:1": CLOSED["bucket:t:f:1"]
            | {"seen": f"{T0 + 1000}", "flushed": f"nonce {CLOSED_BY_FLUSH}"},
            "events:t:f:1": None,
            "ids:t:f:1": ...,
            f"manifest:{W1}": MANIFEST
            | {"reason": "flush", "closed": f"{T0 + 1000}", "sealed": f"{T0 + 1000}", "since": f"{T0 + 1000}"},
            "open": None,
            "outbox": {W1: T0 + 1000},
            "stats": {"accepted": "1", "closed": "1", "closed:flush": "1", "delay_ms": "0"},
            "timers": None,
        },
    ),
    "flush, partial": Row(
        OPEN,
        ("flush", T0 + 1000, "t:f:1", 1, "nonce", "1"),
        ["flushed", 0, CLOSED_BY_FLUSH],
        CLOSED
        | {
            "bucket:t:f:1": CLOSED["bucket:t:f:1"]
            | {"seen": f"{T0 + 1000}", "flushed": f"nonce {CLOSED_BY_FLUSH}", "prev": f"1 {W1} {T0 + 10_000} 0"},
            "events:t:f:1": None,
            "ids:t:f:1": ...,
            f"manifest:{W1}": MANIFEST
            | {"reason": "flush", "closed": f"{T0 + 1000}", "sealed": f"{T0 + 1000}", "since": f"{T0 + 1000}"},
            "open": None,
            "outbox": {W1: T0 + 1000},
            "stats": {"accepted": "1", "closed": "1", "closed:flush": "1", "delay_ms": "0"},
            "timers": None,
        },
    ),
    "flush, sent again": Row(
        CLOSED | {"bucket:t:f:1": CLOSED["bucket:t:f:1"] | {"flushed": f"nonce {CLOSED_BY_FLUSH}"}},
        ("flush", T0 + 20_000, "t:f:1", "", "nonce", "0"),
        ["repeated", 0, CLOSED_BY_FLUSH],
        {},
    ),
    "flush, another version": Row(
        OPEN,
        ("flush", T0, "t:f:1", 2, "nonce", "0"),
        ["other_version", 1],
        {},
    ),
    "flush, nothing open": Row({}, ("flush", T0, "t:f:1", "", "nonce", "0"), ["nothing_open", 0], {}),
    "hold": Row(
        OPEN,
        ("hold", T0, "t:f:1", 30_000),
        [1, T0 + 30_000],
        {"bucket:t:f:1": OPEN["bucket:t:f:1"] | {"open": f"{W1} 1 {T0} 1 0 60000 30000 f"}},
    ),
    "hold, shorter than the gap": Row(
        OPEN,
        ("hold", T0, "t:f:1", 3000),
        [1, T0 + 10_000],
        {"bucket:t:f:1": OPEN["bucket:t:f:1"] | {"open": f"{W1} 1 {T0} 1 0 60000 3000 f"}},
    ),
    "hold, nothing open": Row({}, ("hold", T0, "t:f:1", 30_000), [0, 0], {}),
    "retract": Row(
        OPEN,
        ("retract", T0, "t:f:1", "e1"),
        ["retracted", 1],
        {
            "bucket:t:f:1": OPEN["bucket:t:f:1"]
            | {"open": f"{OPENED} *", "tally": f"0 0 0 0 {T0}", "gone": "1", "retracted": "1"},
            "events:t:f:1": [*OPEN["events:t:f:1"], [f"{T0}-1", ["", "e1"]]],
            "ids:t:f:1": {"e1": f"1x {T0} - {D1}"},
            "stats": {"accepted": "1", "retracted": "1"},
        },
    ),
    "retract, unknown": Row(OPEN, ("retract", T0, "t:f:1", "e2"), ["unknown", 0], {}),
    "retract, closed": Row(CLOSED, ("retract", T0 + 10_000, "t:f:1", "e1"), ["closed", 1], {}),
    "tick, nothing due": Row(OPEN, ("tick", T0 + 9999, 10), [0, f"{T0 + 10_000}", 0, 0, "", f"{T0 + 9999}"], {}),
    "tick, a lazy timer": Row(
        OPEN | {"bucket:t:f:1": OPEN["bucket:t:f:1"] | {"open": f"{W1} 1 {T0} 1 0 60000 30000 f"}},
        ("tick", T0 + 10_000, 10),
        [1, f"{T0 + 30_000}", 0, 0, "", f"{T0 + 10_000}"],
        {"timers": {"w:t:f:1": T0 + 30_000}},
    ),
    "tick, due": Row(
        OPEN,
        ("tick", T0 + 10_000, 10),
        [1, "-1", 1, 0, "", f"{T0 + 10_000}"],
        CLOSED | {"events:t:f:1": None, "ids:t:f:1": ..., "open": None, "timers": None},
    ),
    "tick, overdue": Row(
        OPEN,
        ("tick", T0 + 15_000, 10),
        [1, "-1", 1, 0, "", f"{T0 + 15_000}"],
        CLOSED
        | {
            "bucket:t:f:1": CLOSED["bucket:t:f:1"] | {"seen": f"{T0 + 15_000}"},
            "events:t:f:1": None,
            "ids:t:f:1": ...,
            f"manifest:{W1}": MANIFEST | {"sealed": f"{T0 + 15_000}", "since": f"{T0 + 15_000}"},
            "open": None,
            "outbox": {W1: T0 + 15_000},
            "stats": CLOSED["stats"] | {"delay_ms": "5000"},
            "timers": None,
        },
    ),
    "take": Row(
        CLOSED,
        ("take", T0 + 11_000, "rq", 5, 60_000, ""),
        [W1, 1, "t:f:1"],
        {name: value for name, value in DISPATCHED.items() if value != CLOSED.get(name)}
        | {"ready:rq:t": None, "tenants:rq": None},
    ),
    "take, nothing there": Row(OPEN, ("take", T0 + 11_000, "rq", 5, 60_000, ""), [], {}),
    "take, a tenant at its limit": Row(CLOSED, ("take", T0 + 11_000, "rq", 5, 60_000, "", "t", 0), [], {}),
    "begin": Row(
        DISPATCHED,
        ("begin", T0 + 12_000, TOKEN, W1, 1, 300_000, 3, "1 9"),
        [["granted", "processing"]],
        {name: value for name, value in PROCESSING.items() if value != DISPATCHED.get(name)},
    ),
    "begin, sent again": Row(
        PROCESSING, ("begin", T0 + 12_001, TOKEN, W1, 1, 300_000, 3, "1 9"), [["granted", "processing"]], {}
    ),
    "begin, somebody else": Row(
        PROCESSING, ("begin", T0 + 12_001, "other", W1, 1, 300_000, 3, "1 9"), [["refused", "processing"]], {}
    ),
    "begin, another attempt": Row(
        DISPATCHED, ("begin", T0 + 12_000, TOKEN, W1, 2, 300_000, 3, "1 9"), [["refused", "dispatched"]], {}
    ),
    "settle": Row(
        PROCESSING,
        ("settle", T0 + 13_000, W1, TOKEN, "confirmed", "ok", 0, "", "", 0),
        [["done", "confirmed"]],
        {
            "bucket:t:f:1": {name: v for name, v in CLOSED["bucket:t:f:1"].items() if name != "turn"},
            "inflight": None,
            f"manifest:{W1}": PROCESSING[f"manifest:{W1}"]
            | {
                "state": "confirmed", "since": f"{T0 + 13_000}", "token": "", "settled_by": TOKEN, "steps": "3",
                "step3": f"{T0 + 13_000} confirmed 1 ok",
            },
            "outbox": None,
            "stats": PROCESSING["stats"] | {"manifest:confirmed": "1"},
            "timers": {f"p:{W1}": T0 + 13_000 + 3 * DAY},
        },
    ),
    "settle, to be retried": Row(
        PROCESSING,
        ("settle", T0 + 13_000, W1, TOKEN, "failed", "ValueError", 2000, "", "", 0),
        [["done", "retrying"]],
        {
            "inflight": None,
            f"manifest:{W1}": PROCESSING[f"manifest:{W1}"]
            | {
                "state": "retrying", "since": f"{T0 + 13_000}", "token": "", "settled_by": TOKEN, "failures": "1",
                "steps": "3", "step3": f"{T0 + 13_000} retrying 1 ValueError",
            },
            "stats": PROCESSING["stats"] | {"manifest:retrying": "1"},
            "timers": {f"m:{W1}": T0 + 15_000},
        },
    ),
    "settle, after its lease": Row(
        PROCESSING,
        ("settle", T0 + 312_000, W1, TOKEN, "confirmed", "ok", 0, "", "", 0),
        [["refused", "processing"]],
        {},
    ),
    "settle, by a token that has no say": Row(
        PROCESSING,
        ("settle", T0 + 13_000, W1, "other", "confirmed", "ok", 0, "", "", 0),
        [["refused", "processing"]],
        {},
    ),
}  # fmt: skip


def encoded(reply: Any) -> Any:
    """A reply in text."""
    if isinstance(reply, list):
        return [encoded(one) for one in reply]
    return reply.decode() if isinstance(reply, bytes) else reply


def check_row(client: redis.Redis, namespace: str, row: Row) -> None:
    prefix = keys.prefix(namespace, 0)
    client.hset(f"{namespace}:meta", mapping={"format": 1, "partitions": 1, "mode": "virtual"})
    for name, value in (POLICIES | row.held).items():
        write(client, prefix + name, value)

    def read() -> Held:
        return {name.removeprefix(prefix): held for name, held in contents(client, f"{namespace}:{{*").items()}

    before = read()
    assert before == POLICIES | row.held, "the table is not what was written"
    check_invariants(client, namespace)
    name, *args = row.call
    whole = script(name)
    reply = client.eval(
        whole.plain if isinstance(client, fakeredis.FakeRedis) else whole.source, 1, f"{prefix}timers", *args
    )
    after = read()
    changed = {key: after.get(key) for key in {**before, **after} if before.get(key) != after.get(key)}
    # What begin grants is the whole manifest, which stands in the table.
    assert ([each[:2] for each in encoded(reply)] if name == "begin" else encoded(reply)) == row.reply
    assert changed == {key: value for key, value in row.changes.items() if value is not ...}
    check_invariants(client, namespace)


def write(client: redis.Redis, key: str, value: Any) -> None:
    if isinstance(value, dict) and all(isinstance(score, int) for score in value.values()):
        client.zadd(key, value)
    elif isinstance(value, dict):
        client.hset(key, mapping=value)
    elif isinstance(value[0], list):
        for entry_id, fields in value:
            client.xadd(key, dict(zip(fields[::2], fields[1::2], strict=True)), entry_id)
    else:
        client.rpush(key, *value)


@pytest.mark.parametrize("name", ROWS)
def test_exact_keys_on_the_fake(fake: fakeredis.FakeServer, namespace: str, name: str) -> None:
    with fakeredis.FakeRedis(server=fake, protocol=2) as client:
        check_row(client, namespace, ROWS[name])


@pytest.mark.parametrize("name", ROWS)
def test_exact_keys_on_a_server(make_client: MakeClient, namespace: str, name: str) -> None:
    check_row(make_client(), namespace, ROWS[name])


def test_the_table_holds_what_the_envelope_packs() -> None:
    first = event("e1", at=datetime(2026, 1, 1, tzinfo=UTC))
    for made, fields in ((E1, first | {"payload": {}}), (E2, first | {"event_id": "e2"})):
        assert [part.decode() for part in Event.of(fields).packed[:4]] == list(made)


@pytest.mark.parametrize("name", ["", "judged:"])
def test_a_flow_without_a_policy_changes_nothing(make_client: MakeClient, namespace: str, name: str) -> None:
    client = make_client()
    prefix = keys.prefix(namespace, 0)
    for key, value in (POLICIES | OPEN).items():
        write(client, prefix + key, value)
    before = contents(client)
    call = accept(T0, ("t:f:1", "f", 1, NONE if not name else ONE, *(E1 if name else E2)), ("t:g:1", "g", 1, ONE, *E1))
    with pytest.raises(redis.ResponseError, match=r"^NOPOLICY g$"):
        client.eval(script("accept").source, 1, f"{prefix}timers", *call[1:])
    assert contents(client) == before
    client.delete(*before)


# --- the fake and the servers -----------------------------------------------------------------------------------------

SEEDS = (1007, 1008, 1013)
NAMED_BY = {
    text: name
    for name in scripts.NAMES
    for text in (script(name).sha, script(name).plain_sha, script(name).source, script(name).plain)
}


class Recorded(Store):
    """Keeps the scripts' replies."""

    def __init__(self, client: redis.Redis) -> None:
        super().__init__(client)
        self.replies: list[Any] = []

    def _send(self, commands: Any) -> list[Any]:
        replies = super()._send(commands)
        for command, reply in zip(commands, replies, strict=True):
            if command[0] in ("EVAL", "EVALSHA") and not isinstance(reply, redis.exceptions.NoScriptError):
                name, told = NAMED_BY[command[1]], encoded(reply)
                # The fields of a hash come in any order.
                if name == "show":
                    told = [told[:3], sorted(zip(told[3::2], told[4::2], strict=True))]
                elif name == "begin":
                    for granted in (each for each in told if each[0] == "granted"):
                        granted[2] = sorted(zip(granted[2][::2], granted[2][1::2], strict=True))
                self.replies.append((name, told))
        return replies


def recorded(client: redis.Redis, seed: int) -> tuple[list[Any], Held]:
    """The replies of all scripts in a history, and the keys at its end; nonces and tokens are the same each time."""
    run = Worked(client, history(seed), seed, check=False)
    run.store = run.accumulator.store = store = Recorded(client)
    numbers = itertools.count()
    run.operations._nonce = lambda length: f"{next(numbers):0{length}x}"
    try:
        run.run()
        run.drain(last=False)
        prefix = f"{run.operations.namespace}:"
        held = {name.removeprefix(prefix): value for name, value in contents(client, f"{prefix}*").items()}
    finally:
        run.drop()
    return store.replies, held


@lru_cache
def by_the_fake(seed: int) -> tuple[list[Any], Held]:
    with fakeredis.FakeRedis(server=fakeredis.FakeServer(version=(7, 0), server_type="redis"), protocol=2) as client:
        return recorded(client, seed)


@pytest.mark.parametrize("protocol", [2, 3])
def test_b069_the_fake_and_a_server_reply_the_same(make_client: MakeClient, protocol: int) -> None:
    client, called = make_client(protocol=protocol), set()
    for seed in SEEDS:
        replies, held = recorded(client, seed)
        fake_replies, fake_held = by_the_fake(seed)
        for one, other in itertools.zip_longest(replies, fake_replies):
            assert one == other, f"seed {seed}"
            called.add(one[0])
        assert held == fake_held
    assert called == set(scripts.NAMES) - ELSEWHERE


# --- the script cache -------------------------------------------------------------------------------------------------


def test_noscript_in_a_pipeline_keeps_every_event_and_their_order(make_client: MakeClient, namespace: str) -> None:
    client = make_client()
    accumulator = Accumulator(client, namespace=namespace, partitions=16)
    accumulator.load_policy("f", {"inactivity": "1h"})
    client.script_flush()
    # More than one call for a partition: its second must not overtake its first, which is sent again.
    events = [event(f"e{n}", f"t:f:{n % 40}") for n in range(9000)]
    receipts = accumulator.push_many(events)
    assert [receipt.outcome for receipt in receipts] == ["accepted"] * 9000
    for n in range(40):
        stored = [entry.event.event_id for entry in accumulator.open_events(f"t:f:{n}")]
        assert stored == [f"e{m}" for m in range(n, 9000, 40)]
        assert [receipt.position for receipt in receipts[n::40]] == list(range(1, 226))
    check_invariants(client, namespace)


@pytest.mark.parametrize("seed", [1007, 1013])
def test_the_script_cache_may_be_flushed_between_any_two_calls(
    make_client: MakeClient, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    client, flushes, send = make_client(), [0], Store._send

    def forgetful(store: Store, commands: Any) -> list[Any]:
        client.script_flush()
        flushes[0] += 1
        return send(store, commands)

    monkeypatch.setattr(Store, "_send", forgetful)
    scenario = history(seed)
    run = Worked(client, scenario, seed)
    try:
        assert list(differences("answer", run.run(), simulate(scenario))) == []
    finally:
        run.drop()
    assert flushes[0] > 50
