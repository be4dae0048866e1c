"""Short histories under a virtual clock, through the real scripts on a server of our own.

A scenario is a mapping as the file format says (README, "Try a policy without waiting"): policies, steps at instants
counted from a start, spans without workers, an end. :func:`run_scenario` answers with what came of it, in the same
counting: outcomes, manifests, reconciliation, open windows, counters.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from itertools import count
from pathlib import Path
from typing import Any, Final

from accumulator import keys
from accumulator.client import Accumulator
from accumulator.embedded import EmbeddedServer
from accumulator.emission import EVENTS
from accumulator.envelope import Event
from accumulator.errors import AccumulatorError, InvalidInput, InvalidScenario, UnknownFlow, UnknownLadder
from accumulator.ladders import Ladder
from accumulator.operations import Operations
from accumulator.policy import MAX_DURATION_MS, Policy, duration_option, shown
from accumulator.settings import load_yaml
from accumulator.store import Store
from accumulator.windows import Outcome, Receipt

PARTITIONS: Final = 4
DEFAULT_START: Final = datetime(2026, 1, 1, tzinfo=UTC)
_FIELDS: Final = frozenset({"name", "about", "start", "policies", "ladders", "workers_down", "steps", "end", "expect"})
LADDER_STEPS: Final = {
    "start_ladder": ("anchor", "anchor_at", "args", "start_id", "ignore_earlier"),
    "reschedule": ("anchor", "anchor_at", "start_id"),
    "cancel_ladder": ("start_id", "reason"),
    "pause_ladder": ("start_id",),
    "resume_ladder": ("start_id",),
}
_ACTIONS: Final = ("push", "flush", "hold", "retract", "policy", "ladder", *LADDER_STEPS)
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_MS: Final = timedelta(milliseconds=1)
_EARLIEST: Final = datetime(1980, 1, 1, tzinfo=UTC)
_LATEST: Final = datetime(2200, 1, 1, tzinfo=UTC)
_runs = count(1)

Scenario = Mapping[str, Any]
Answer = dict[str, Any]


# --- the file ---------------------------------------------------------------------------------------------------------


def load_scenario(path: Path) -> Scenario:
    """A scenario file, as plain data. Raises InvalidScenario."""
    try:
        loaded = load_yaml(path.read_bytes(), path.name)
    except InvalidInput as problem:
        raise InvalidScenario(problem.field, problem.rule) from None
    except OSError as problem:
        raise InvalidScenario(path.name, f"can't be read: {problem.strerror}") from None
    return _mapping(loaded, "scenario")


def _mapping(value: object, field: str, index: int | None = None) -> Mapping[str, Any]:
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise InvalidScenario(field, f"must be a mapping, not {shown(value)}", index)
    return value


def _list(value: object, field: str, index: int | None = None) -> Sequence[Any]:
    if not isinstance(value, list | tuple):
        raise InvalidScenario(field, f"must be a list, not {shown(value)}", index)
    return value


def _known(given: Iterable[str], allowed: Iterable[str], index: int | None = None) -> None:
    odd = sorted(set(given) - set(allowed))
    if odd:
        raise InvalidScenario(shown(odd[0]), "is unknown here", index)


def _span(value: object, field: str, index: int | None = None, signed: bool = False) -> int:
    """ms of a duration, zero allowed; `signed`: below zero too."""
    negative = signed and isinstance(value, str) and value.startswith("-")
    try:
        ms = duration_option(value[1:] if negative and isinstance(value, str) else value, zero=True)
    except InvalidInput as problem:
        raise InvalidScenario(field, problem.rule, index) from None
    except ValueError as problem:
        raise InvalidScenario(field, str(problem), index) from None
    return -ms if negative else ms


def _instant(ms: int) -> datetime:
    return _EPOCH + timedelta(milliseconds=ms)


def _start(scenario: Scenario) -> int:
    value = scenario.get("start", DEFAULT_START)
    if isinstance(value, str):
        try:
            value = datetime.fromisoformat(value)
        except ValueError:
            value = None
    if not isinstance(value, datetime) or value.utcoffset() is None:
        raise InvalidScenario("start", "must be an instant with offset, as in 2026-10-16T14:00:00Z")
    if not _EARLIEST <= value < _LATEST:
        raise InvalidScenario("start", f"must lie between {_EARLIEST:%Y} and {_LATEST:%Y}")
    return (value - _EPOCH) // _MS


def _policies(given: object, index: int | None = None) -> dict[str, Policy]:
    field = "policies" if index is None else "policy"
    try:
        return {flow: Policy.load(flow, options) for flow, options in _mapping(given, field, index).items()}
    except InvalidScenario:
        raise
    except InvalidInput as problem:
        raise InvalidScenario(field, str(problem), index) from None


def _ladders(given: object, index: int | None = None) -> dict[str, Ladder]:
    field = "ladders" if index is None else "ladder"
    try:
        return {name: Ladder.load(name, options) for name, options in _mapping(given, field, index).items()}
    except InvalidScenario:
        raise
    except InvalidInput as problem:
        raise InvalidScenario(field, str(problem), index) from None


def _event(given: object, step: int, start: int, at: int) -> Event:
    fields = dict(_mapping(given, "push", step))
    if "occurred" in fields:
        if "occurred_at" in fields:
            raise InvalidScenario("occurred", "and occurred_at exclude each other", step)
        fields["occurred_at"] = _instant(start + _span(fields.pop("occurred"), "occurred", step, signed=True))
    fields.setdefault("occurred_at", _instant(start + at))
    for short, full in (("deadline", "deadline_at"), ("payload_bytes", "payload")):
        if short in fields and full in fields:
            raise InvalidScenario(short, f"and {full} exclude each other", step)
    if "deadline" in fields:
        fields["deadline_at"] = _instant(start + _span(fields.pop("deadline"), "deadline", step, signed=True))
    if "payload_bytes" in fields:
        size = fields.pop("payload_bytes")
        if type(size) is not int or not 0 <= size <= 8 << 20:
            raise InvalidScenario("payload_bytes", "must be a whole number up to 8 MiB", step)
        fields["payload"] = bytes(size)
    try:
        return Event.of({"kind": "event", "source": "sim", **fields})
    except InvalidInput as problem:
        raise InvalidScenario(problem.field, problem.rule, step) from None


# --- the run ----------------------------------------------------------------------------------------------------------


class _Run:
    """One scenario in a namespace of its own."""

    def __init__(self, store: Store, scenario: Scenario) -> None:
        _known(scenario, _FIELDS)
        self.start = _start(scenario)
        self.now = self.start
        self.scenario = scenario
        self.accumulator = Accumulator(
            store.client, namespace=f"sim-{next(_runs)}", partitions=PARTITIONS, clock=lambda: self.now
        )
        self.operations: Operations = self.accumulator.operations
        self.store = store
        self.receipts: list[tuple[Event, Receipt]] = []
        self.started: dict[str, int] = {}  # ladder id → how much of its timeline was told
        self.has_ladders = "ladders" in scenario
        self.ladder_events: list[dict[str, Any]] = []
        self.down = [
            (self.start + _span(a, "workers_down"), self.start + _span(b, "workers_down"))
            for a, b in (self._pair(span) for span in _list(scenario.get("workers_down", []), "workers_down"))
        ]
        if any(down > up for down, up in self.down):
            raise InvalidScenario("workers_down", "each span is [from, to], the later instant last")

    @staticmethod
    def _pair(span: object) -> tuple[object, object]:
        ends = _list(span, "workers_down")
        if len(ends) != 2:
            raise InvalidScenario("workers_down", "each span is [from, to]")
        return ends[0], ends[1]

    def run(self) -> Answer:
        for flow, policy in _policies(self.scenario.get("policies", {})).items():
            self._load(flow, policy)
        for name, ladder in _ladders(self.scenario.get("ladders", {})).items():
            self.accumulator.load_ladder(name, ladder)
        at = 0
        for index, given in enumerate(_list(self.scenario.get("steps", []), "steps")):
            step = _mapping(given, "step", index)
            _known(step, ("at", *_ACTIONS), index)
            if "at" not in step:
                raise InvalidScenario("at", "is missing", index)
            when = _span(step["at"], "at", index)
            if when < at:
                raise InvalidScenario("at", "must not decrease", index)
            at = when
            actions = [name for name in _ACTIONS if name in step]
            if len(actions) != 1:
                raise InvalidScenario("step", f"must have one of {', '.join(_ACTIONS)}", index)
            self._work_until(self.start + at, inclusive=False)
            self.now = self.start + at
            self._step(index, actions[0], step[actions[0]], at)
            self._follow()
        end = max(at, _span(self.scenario["end"], "end")) if "end" in self.scenario else at
        self._work_until(self.start + end, inclusive=True)
        self.now = self.start + end
        return self._answer()

    def _load(self, flow: str, policy: Policy) -> None:
        # What a scenario asks for at its end must be there, however long it runs.
        lasting = dict.fromkeys(("payload_ttl", "metadata_ttl", "dedupe_ttl"), MAX_DURATION_MS)
        self.accumulator.load_policy(flow, policy.model_copy(update=lasting))

    def _step(self, index: int, action: str, given: object, at: int) -> None:
        try:
            if action == "push":
                many = given if isinstance(given, list | tuple) else [given]
                events = [_event(one, index, self.start, at) for one in many]
                self.receipts += zip(events, self.accumulator.push_many(events), strict=True)
            elif action == "policy":
                for flow, policy in _policies(given, index).items():
                    self._load(flow, policy)
            elif action == "ladder":
                self.has_ladders = True
                for name, ladder in _ladders(given, index).items():
                    self.accumulator.load_ladder(name, ladder)
            elif action in LADDER_STEPS:
                self._move(index, action, _mapping(given, action, index))
            else:
                fields = _mapping(given, action, index)
                optional = {
                    "flush": ("window_version", "partial"),
                    "hold": ("for",),
                    "retract": ("event_id",),
                }[action]
                _known(fields, ("bucket_key", *optional), index)
                for name in ("bucket_key", *(optional if action != "flush" else ())):
                    if name not in fields:
                        raise InvalidScenario(name, "is missing", index)
                key = fields["bucket_key"]
                if action == "flush":
                    version, partial = fields.get("window_version"), fields.get("partial", False)
                    if not (version is None or type(version) is int) or not isinstance(partial, bool):
                        raise InvalidScenario(
                            "flush", "takes window_version: a number, and partial: true or false", index
                        )
                    self.accumulator.flush(key, version, partial=partial)
                elif action == "hold":
                    ms = _span(fields["for"], "for", index)
                    if ms == 0:
                        raise InvalidScenario("for", "must be above zero", index)
                    self.accumulator.hold(key, ms)
                else:
                    self.accumulator.retract(key, fields["event_id"])
        except (UnknownFlow, UnknownLadder) as problem:
            raise InvalidScenario(action, str(problem), index) from None
        except InvalidScenario:
            raise
        except InvalidInput as problem:
            raise InvalidScenario(problem.field, problem.rule, index) from None

    def _move(self, index: int, action: str, given: Mapping[str, Any]) -> None:
        _known(given, ("ladder", "bucket_key", *LADDER_STEPS[action]), index)
        for name in ("ladder", "bucket_key"):
            if not isinstance(given.get(name), str):
                raise InvalidScenario(name, "must be given, as text", index)
        if "anchor" in given and "anchor_at" in given:
            raise InvalidScenario("anchor", "and anchor_at exclude each other", index)
        anchor = given.get("anchor_at")
        if "anchor" in given:
            anchor = _instant(self.start + _span(given["anchor"], "anchor", index, signed=True))
        ladder, key, start_id = given["ladder"], given["bucket_key"], given.get("start_id")
        which = (key, ladder) if start_id is None else (key, ladder, start_id)
        if action == "start_ladder":
            earlier = given.get("ignore_earlier", False)
            if not isinstance(earlier, bool):
                raise InvalidScenario("ignore_earlier", "must be true or false", index)
            started = self.accumulator.start_ladder(
                ladder, key, anchor, given.get("args"), start_id=start_id, ignore_earlier=earlier
            )
            self.started.setdefault(started.ladder_id, 0)
        elif action == "reschedule":
            if anchor is None:
                raise InvalidScenario("anchor", "is missing", index)
            self.accumulator.reschedule_ladder(which, anchor)
        elif action == "cancel_ladder":
            self.accumulator.cancel_ladder(which, given.get("reason", "scenario"))
        else:
            getattr(self.accumulator, action)(which)

    def _follow(self) -> None:
        """Notes what ladders emitted since this was last called, in order."""
        if not self.started:
            return
        pushed = {event.event_id: i for i, (event, _) in enumerate(self.receipts)}
        found = []
        for order, (ladder_id, told) in enumerate(self.started.items()):
            run = self.accumulator.ladder(ladder_id)
            if run is None or len(run.timeline) == told:
                continue
            news = [h for h in run.timeline[told:] if h.event in (*EVENTS, "exhausted")]
            self.started[ladder_id] = len(run.timeline)
            cause = pushed.get(run.by_event, 0) if run.by_event is not None else 0
            for happened in news:
                emission = happened.emission_id and self.accumulator.emission(happened.emission_id)
                due = emission.due_at if emission else happened.at
                told_as = {
                    "ladder": run.ladder,
                    "bucket_key": run.bucket_key,
                    "event": happened.event,
                    "step": happened.step,
                    "at": happened.at - self.start,
                }
                found.append(((min(due, happened.at), cause, order), told_as))
        self.ladder_events += [told for _, told in sorted(found, key=lambda each: each[0])]

    def _work_until(self, until: int, inclusive: bool) -> None:
        """The worker acts at every instant at which something falls due, but while it is down."""
        due = min((d for d in self.store.perform(self.operations.next_due()) if d is not None), default=None)
        while due is not None:
            at = max(due, self.now)
            for down, up in sorted(self.down):
                if down <= at < up:
                    at = up
            if at > until or (at == until and not inclusive):
                return
            self.now = at
            ticks = self.store.perform(self.operations.tick_all(range(PARTITIONS), 1000))
            for tick in ticks:
                if isinstance(tick, AccumulatorError):
                    raise tick
                if tick.failure:
                    raise AccumulatorError(f"tick failed: {tick.failure}")
            self._follow()
            due = min(
                (t.next_due for t in ticks if not isinstance(t, AccumulatorError) and t.next_due is not None),
                default=None,
            )

    def _answer(self) -> Answer:
        start = self.start
        buckets = sorted({event.bucket_key for event, _ in self.receipts})
        manifests = [m for key in buckets for m in self.accumulator.manifests(key)]
        manifests.sort(key=lambda m: (m.sealed_at, m.closed_at, m.bucket_key.encode(), m.window_version))
        queued = {
            (event.bucket_key, event.event_id, event.content_digest): i
            for i, (event, receipt) in enumerate(self.receipts)
            if receipt.outcome is Outcome.RECONCILED
        }
        waiting = self.accumulator.reconciliation()
        waiting.sort(key=lambda item: queued[item.event.bucket_key, item.event.event_id, item.digest])
        open_ = []
        for key in buckets:
            window = self.accumulator.bucket(key).open
            if window is not None:
                ids = dict.fromkeys(e.event.event_id for e in self.accumulator.open_events(key))
                open_.append(
                    {
                        "bucket_key": key,
                        "window_version": window.window_version,
                        "event_ids": list(ids),
                        "due_at": window.due_at - start,
                    }
                )
        counted = self.accumulator.counters()

        def total(*names: str) -> int:
            return sum(counted.get(name, 0) for name in names)

        answer: Answer = {
            "outcomes": [_outcome(receipt) for _, receipt in self.receipts],
            "manifests": [
                {
                    "bucket_key": m.bucket_key,
                    "window_version": m.window_version,
                    "close_reason": m.close_reason,
                    "opened_at": m.opened_at - start,
                    "first_event_at": m.first_event_at - start,
                    "last_event_at": m.last_event_at - start,
                    "closed_at": m.closed_at - start,
                    "sealed_at": m.sealed_at - start,
                    "event_ids": list(m.event_ids),
                    "event_count": m.event_count,
                    "bytes": m.bytes,
                    "weight": m.weight,
                    "policy_version": m.policy_version,
                    "policy_versions": list(m.policy_versions),
                    "late_event_ids": list(m.late_event_ids),
                    "revised_event_ids": list(m.revised_event_ids),
                    "retracted_event_ids": list(m.retracted_event_ids),
                    "relation": m.relation,
                }
                for m in manifests
            ],
            "reconciliation": [
                {"event_id": i.event.event_id, "bucket_key": i.event.bucket_key, "code": i.code} for i in waiting
            ],
            "open": open_,
            "counters": {
                "received": total("accepted", "revised", "duplicates", "conflicts", "rejected", "reconciled"),
                "accepted": total("accepted", "revised"),
                "duplicates": total("duplicates"),
                "closed": total("closed"),
            },
        }
        if self.has_ladders:
            answer["ladder_events"] = self.ladder_events
        return answer

    def drop(self) -> None:
        """Leaves nothing of this scenario on the server."""
        names = [keys.meta(self.operations.namespace)]
        names += self.store.client.scan_iter(match=f"{self.operations.namespace}:{{*", count=1000)
        self.store.client.unlink(*names)


def _outcome(receipt: Receipt) -> dict[str, Any]:
    outcome: dict[str, Any] = {"outcome": str(receipt.outcome)}
    if receipt.outcome in (Outcome.ACCEPTED, Outcome.REVISED):
        outcome |= {"window_version": receipt.window_version, "late": receipt.late}
    if receipt.closed:
        outcome["closed"] = receipt.closed
    if receipt.outcome in (Outcome.REJECTED, Outcome.RECONCILED):
        outcome["code"] = receipt.code
    if receipt.conflict:
        outcome["conflict"] = True
    return outcome


@contextmanager
def simulator_store() -> Iterator[Store]:
    """A connection to a server of our own that keeps nothing."""
    with EmbeddedServer() as server:
        store = Store.from_url(server.url)
        try:
            yield store
        finally:
            store.close()


def run_scenario(store: Store, scenario: Scenario) -> Answer:
    """What comes of a scenario. Raises InvalidScenario with the step (counted from 0) and the field."""
    run = _Run(store, scenario)
    try:
        return run.run()
    finally:
        run.drop()


def run_scenarios(scenarios: Iterable[Scenario]) -> list[Answer]:
    """The answers of many scenarios, on one server."""
    with simulator_store() as store:
        return [run_scenario(store, scenario) for scenario in scenarios]


def _json(value: object) -> str:
    """For a message: what `expect` holds may be any plain data of YAML, a date too."""
    return json.dumps(value, ensure_ascii=False, default=str, skipkeys=True)


def differences(answer: object, expected: object, where: str = "") -> list[str]:
    """What of `expected` does not hold, a line each: lists entry by entry, of mappings the named fields."""
    if isinstance(expected, Mapping):
        if not isinstance(answer, Mapping):
            return [f"{where}: expected a mapping, got {_json(answer)}"]
        found = []
        for name, value in expected.items():
            below = f"{where}.{name}" if where else str(name)
            if name not in answer:
                if value is None:
                    continue  # a field that is not there has no value
                found.append(f"{below}: expected {_json(value)}, is not there")
            else:
                found += differences(answer[name], value, below)
        return found
    if isinstance(expected, list) and isinstance(answer, list) and any(isinstance(e, Mapping) for e in expected):
        found = []
        if len(answer) != len(expected):
            found.append(f"{where}: expected {len(expected)} entries, got {len(answer)}")
        for i, (got, want) in enumerate(zip(answer, expected, strict=False)):
            found += differences(got, want, f"{where}[{i}]")
        return found
    if answer != expected or (isinstance(answer, bool) != isinstance(expected, bool)):
        return [f"{where}: expected {_json(expected)}, got {_json(answer)}"]
    return []
