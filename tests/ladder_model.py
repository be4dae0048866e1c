"""Section 7 of SPEC.md in plain Python: what ladders emit in a scenario, for comparison with the real scripts.

Written from that text, and independent of the package. Outcomes of pushes come from tests.model.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime, time, timedelta
from typing import Any
from zoneinfo import ZoneInfo

from tests.model import EPOCH, UNITS, instant, simulate

MOVES = ("start_ladder", "reschedule", "cancel_ladder", "pause_ladder", "resume_ladder")
DAY = UNITS["d"]


def without_ladders(scenario: Mapping[str, Any]) -> dict[str, Any]:
    """The same for the model of windows."""
    rest = {name: value for name, value in scenario.items() if name != "ladders"}
    return rest | {"steps": [step for step in scenario.get("steps", ()) if not set(step) & {"ladder", *MOVES}]}


def ms(text: str) -> int:
    found = re.fullmatch(r"(-?)(\d+)([a-z]+)", text)
    assert found
    return (-1 if found[1] else 1) * int(found[2]) * UNITS[found[3]]


def at_offset(anchor: int, offset: Any, zone: str) -> int:
    if isinstance(offset, str) and not offset.endswith("d"):
        return anchor + ms(offset)
    local = (EPOCH + timedelta(milliseconds=anchor)).astimezone(ZoneInfo(zone))
    days = offset["days"] if isinstance(offset, dict) else ms(offset) // DAY
    if offset in ("0d", "-0d"):
        return anchor
    clock = time.fromisoformat(offset["at"]) if isinstance(offset, dict) else local.time()
    wanted = datetime.combine(local.date() + timedelta(days=days), clock)
    # Of two instants the first; of a local time that is skipped, as much later as the clock jumped.
    return (wanted.replace(tzinfo=ZoneInfo(zone), fold=0) - EPOCH) // timedelta(milliseconds=1)


def holds(condition: Mapping[str, Any], args: Mapping[str, Any]) -> bool:
    if condition["arg"] not in args:
        return False
    given, value, op = args[condition["arg"]], condition["value"], condition["op"]
    if op == "in":
        return given in value
    if op in ("eq", "ne"):
        return (given == value) is (op == "eq")
    comparable = isinstance(given, str) == isinstance(value, str)
    return comparable and {"gt": given > value, "ge": given >= value, "lt": given < value, "le": given <= value}[op]


@dataclass
class Run:
    name: str
    key: str
    start_id: str | None
    definition: Mapping[str, Any]
    anchor: int
    args: Mapping[str, Any]
    order: int
    state: str = "running"
    steps: list[tuple[str, int, int | None]] = field(default_factory=list)
    scheduled_end: int = 0
    wait: int = 0
    sent: int | None = None
    done: int = 0

    def plan(self) -> None:
        zone = self.definition.get("timezone", "UTC")
        skip = self.definition.get("skip_to_escalate")
        self.steps, latest = [], None
        if skip is not None and holds(skip, self.args):
            self.scheduled_end = -1
            return
        for step in self.definition["steps"]:
            if "when" in step and not holds(step["when"], self.args):
                continue
            at = at_offset(self.anchor, step["offset"], zone)
            latest = at if latest is None else max(latest, at)
            self.steps.append((step["name"], latest, ms(step["stale_after"]) if "stale_after" in step else None))
        base = self.anchor if latest is None else latest
        self.scheduled_end = at_offset(base, self.definition.get("final_wait", "0s"), zone)
        self.wait = self.scheduled_end - base

    @property
    def ends(self) -> int:
        """Whoever was reminded has the final wait, also where that came late."""
        return self.scheduled_end if self.sent is None else max(self.scheduled_end, self.sent + self.wait)

    @property
    def due(self) -> int | None:
        if self.state != "running":
            return None
        return self.steps[self.done][1] if self.done < len(self.steps) else self.ends


class Ladders:
    """The ladders of a scenario, moved by its steps and by a clock."""

    def __init__(self, scenario: Mapping[str, Any]) -> None:
        self.definitions = dict(scenario.get("ladders", {}))
        self.runs: list[Run] = []
        self.came: set[tuple[str, str]] = set()
        self.told: list[tuple[tuple[int, int, int], dict[str, Any]]] = []
        self.now = 0

    def tell(self, run: Run, event: str, step: str | None, due: int, cause: int = 0) -> None:
        entry = {"ladder": run.name, "bucket_key": run.key, "event": event, "step": step, "at": self.now}
        self.told.append(((min(due, self.now), cause, run.order), entry))

    def take(self) -> list[dict[str, Any]]:
        """What was emitted since, in order."""
        told, self.told = sorted(self.told, key=lambda each: each[0]), []
        return [entry for _, entry in told]

    def advance(self, run: Run, past: int | None = None) -> None:
        while run.due is not None and run.due <= self.now:
            if run.done == len(run.steps):
                escalates = bool(run.definition.get("escalate", False)) or isinstance(
                    run.definition.get("escalate"), dict
                )
                run.state = "escalated" if escalates else "exhausted"
                step = "escalate" if escalates else None
                self.tell(run, run.state, step, self.now if run.ends < 0 or not escalates else run.ends)
                return
            name, at, stale = run.steps[run.done]
            run.done += 1
            left_out = past is not None and at < past and run.definition.get("past") == "skip"
            if not left_out and (stale is None or self.now <= at + stale):
                self.tell(run, "step", name, at)
                run.sent = self.now

    def cancel(self, run: Run, cause: int = 0) -> None:
        run.state = "cancelled"
        self.tell(run, "cancelled", None, self.now, cause)

    def find(self, given: Mapping[str, Any]) -> Run | None:
        start_id = given.get("start_id")
        same = [r for r in self.runs if (r.name, r.key, r.start_id) == (given["ladder"], given["bucket_key"], start_id)]
        if start_id is None:
            same = [r for r in same if r.state in ("running", "paused")]
        return same[0] if same else None

    def start(self, given: Mapping[str, Any], anchor: int) -> None:
        if self.find(given) is not None:
            return
        definition, key = self.definitions[given["ladder"]], given["bucket_key"]
        counted = definition.get("anchor") == "start"
        run = Run(given["ladder"], key, given.get("start_id"), definition, self.now if counted else anchor,
                  given.get("args", {}), len(self.runs))  # fmt: skip
        run.plan()
        self.runs.append(run)
        if not given.get("ignore_earlier") and any(
            (key, kind) in self.came for kind in definition.get("cancel_on", ())
        ):
            self.cancel(run)
        else:
            self.advance(run, run.anchor if counted else self.now)

    def reschedule(self, given: Mapping[str, Any], anchor: int) -> None:
        run = self.find(given)
        if run is not None and run.state in ("running", "paused") and run.anchor != anchor:
            run.anchor = anchor
            run.plan()
            self.advance(run, self.now)

    def deliver(self, key: str, kind: str, cause: int, known: bool) -> None:
        """An event that is no conflict came. `known`: as it stands, and so for ladders that start later too, whether or
        not one is defined by now; what was rejected, or ignored for another content, is not."""
        if known:
            self.came.add((key, kind))
        for run in self.runs:
            if run.key == key and run.state in ("running", "paused") and kind in run.definition.get("cancel_on", ()):
                self.cancel(run, cause)


def ladder_events(scenario: Mapping[str, Any]) -> list[dict[str, Any]]:
    """What the answer of a scenario says under that name."""
    start = instant(scenario["start"]) if "start" in scenario else instant("2026-01-01T00:00:00Z")
    outcomes = iter(simulate(without_ladders(scenario))["outcomes"])
    down = [(start + ms(a), start + ms(b)) for a, b in scenario.get("workers_down", [])]
    ladders = Ladders(scenario)
    ladders.now = start
    events: list[dict[str, Any]] = []
    pushed: dict[str, int] = {}

    def work(until: int, inclusive: bool) -> None:
        while True:
            due = min((run.due for run in ladders.runs if run.due is not None), default=None)
            if due is None:
                return
            at = max(due, ladders.now)
            for begins, ends in sorted(down):
                if begins <= at < ends:
                    at = ends
            if at > until or (at == until and not inclusive):
                return
            ladders.now = at
            for run in ladders.runs:
                ladders.advance(run)
            events.extend(ladders.take())

    at, count = 0, 0
    for step in scenario["steps"]:
        at = ms(step["at"])
        work(start + at, inclusive=False)
        ladders.now = start + at
        (action,) = set(step) - {"at"}
        given = step[action]
        if action == "push":
            batch = given if isinstance(given, list) else [given]
            for one in batch:
                pushed[one["event_id"]] = count
                count += 1
            for one in batch:
                outcome = next(outcomes)
                if outcome["outcome"] != "conflict":
                    known = outcome["outcome"] != "rejected" and not outcome.get("conflict")
                    ladders.deliver(one["bucket_key"], one.get("kind", "event"), pushed[one["event_id"]], known)
        elif action == "ladder":
            ladders.definitions |= given
        elif action in MOVES:
            anchor = instant(given["anchor_at"]) if "anchor_at" in given else start + ms(given.get("anchor", "0s"))
            run = ladders.find(given)
            if action == "start_ladder":
                ladders.start(given, anchor)
            elif action == "reschedule":
                ladders.reschedule(given, anchor)
            elif run is not None and run.state in ("running", "paused"):
                if action == "cancel_ladder":
                    ladders.cancel(run)
                elif action == "pause_ladder":
                    run.state = "paused"
                elif run.state == "paused":
                    run.state = "running"
                    ladders.advance(run, ladders.now)
        events.extend(ladders.take())
    work(start + max(at, ms(scenario.get("end", "0s"))), inclusive=True)
    return [event | {"at": event["at"] - start} for event in events]


# --- histories --------------------------------------------------------------------------------------------------------


def history(seed: int) -> dict[str, Any]:
    """A random scenario with ladders, the same for each seed."""
    dice = random.Random(seed)
    zone = dice.choice(("UTC", "America/New_York", "Australia/Lord_Howe", "America/Sao_Paulo"))

    def hours(low: int, high: int) -> str:
        return f"{dice.randint(low, high)}h"

    def ladder() -> dict[str, Any]:
        offsets: list[Any] = sorted(dice.randint(-72, 96) for _ in range(dice.randint(1, 4)))
        steps = []
        for number, offset in enumerate(offsets):
            step: dict[str, Any] = {"name": f"s{number}", "offset": f"{offset}h"}
            if offset % 24 == 0:
                step["offset"] = f"{offset // 24}d"
            if dice.random() < 0.2:
                step["stale_after"] = hours(1, 30)
            if dice.random() < 0.2:
                step["when"] = {"arg": "amount", "op": dice.choice(("gt", "le")), "value": 50}
            steps.append(step)
        made: dict[str, Any] = {"steps": steps, "timezone": zone, "final_wait": hours(0, 30)}
        if dice.random() < 0.3:
            made["anchor"] = "start"
        if dice.random() < 0.4:
            made["past"] = "skip"
        if dice.random() < 0.9:
            made["cancel_on"] = dice.sample(["paid", "left"], dice.randint(1, 2))
        if dice.random() < 0.6:
            made["escalate"] = True
            if dice.random() < 0.3:
                made["skip_to_escalate"] = {"arg": "amount", "op": "ge", "value": 90}
        return made

    names = ["a", "b"]
    ladders = {name: ladder() for name in names if dice.random() < 0.8}
    given_first, at = dict(ladders), 0
    steps: list[dict[str, Any]] = []
    for number in range(dice.randint(2, 14)):
        at += dice.choice((0, 0, 1, 3, 12, 24, 40))
        name, key = dice.choice(names), f"t:f:{dice.randint(1, 2)}"
        if dice.random() < 0.08 or not ladders:
            ladders[name] = ladder()
            steps.append({"at": f"{at}h", "ladder": {name: ladders[name]}})
        name = name if name in ladders else next(iter(ladders))
        given: dict[str, Any] = {"ladder": name, "bucket_key": key}
        if dice.random() < 0.25:
            given["start_id"] = dice.choice("XY")
        anchor = {"anchor": f"{at + dice.randint(-60, 90)}h"}
        action = dice.choice(("start_ladder",) * 4 + ("push",) * 3 + (*MOVES[1:], "reschedule"))
        if action == "push":
            id_ = f"E{dice.randint(0, number)}"
            given = {"event_id": id_, "bucket_key": key, "kind": dice.choice(("paid", "left", "other", "other"))}
            if dice.random() < 0.5:
                given["occurred"] = f"{dice.randint(-1, 1)}h"  # the very same event may come twice, or late
        elif action == "start_ladder":
            if ladders[name].get("anchor") != "start":
                given |= anchor
            if dice.random() < 0.6:
                given["args"] = {"amount": dice.randint(1, 100)}
            if dice.random() < 0.2:
                given["ignore_earlier"] = True
        elif action == "reschedule":
            given |= anchor
        steps.append({"at": f"{at}h", action: given})
    policy: dict[str, Any] = {"inactivity": "1h"}
    if dice.random() < 0.5:
        policy["kinds"] = ["other"]
    if dice.random() < 0.3:
        policy |= {"order_by": "occurred_at", "on_late": "reject"}
    if dice.random() < 0.5:
        policy["on_conflict"] = dice.choice(("keep_first", "reconcile", "accept_newer"))
    begins = dice.randint(0, at + 1)
    return {
        "start": dice.choice(("2026-03-06T09:30:00Z", "2026-04-03T02:15:00Z", "2026-10-30T12:00:00Z")),
        "policies": {"f": policy},
        "ladders": given_first,
        "workers_down": [[f"{begins}h", f"{begins + dice.randint(1, 60)}h"]] if dice.random() < 0.4 else [],
        "steps": steps,
        "end": f"{at + dice.randint(1, 200)}h",
    }
