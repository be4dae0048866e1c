"""What is asked about ladders: definitions, starts, moves, and what they emitted."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

import orjson

from accumulator import keys
from accumulator.emission import STATES, Emission, LadderRun, is_emission, read_emission, read_run
from accumulator.envelope import check_bucket_key, parse_instant
from accumulator.errors import InvalidInput, UnknownLadder
from accumulator.ladders import MAX_ARGS, Ladder
from accumulator.namespace import Namespace
from accumulator.store import Call, Operation, answer, as_pairs

Which = str | Sequence[str]
"""A ladder: its id; or (bucket_key, name), the one that runs without a start id, else the last one that did; or
(bucket_key, name, start_id)."""

_PAGE: Final = 500


class LoadedLadder(NamedTuple):
    """What became of a definition: its `version` in the namespace, and whether it is ``new``, the ``same`` as before,
    or the one that was there is ``kept`` (and `differs`)."""

    ladder: str
    version: int
    outcome: str

    @property
    def differs(self) -> bool:
        return self.outcome == "kept"


class LadderStarted(NamedTuple):
    """The answer to a start. `outcome`: ``started``, or ``there`` where one runs already, or the start id was used
    before; `differs` where that one has another anchor or other arguments. `state` is the one it is in now."""

    ladder_id: str
    outcome: str
    state: str
    differs: bool


class LadderMoved(NamedTuple):
    """The answer to cancel, reschedule, pause and resume. `outcome`: ``done``, ``same`` (it was so already),
    ``wrong_state`` (it has ended) or ``missing``; `state` is the one it is in, None where there is none."""

    ladder_id: str | None
    outcome: str
    state: str | None


class LadderOperations(Namespace):
    """Definitions, starts and moves of ladders."""

    # --- definitions ---

    def load_ladder(self, ladder: Ladder, only_new: bool = False) -> Operation[LoadedLadder]:
        """Makes a definition the latest of its name; equal content is no new version. `only_new`: where there is one
        already, that is kept."""
        yield from self.connect()
        meta = keys.meta(self.namespace)
        # First of all: from the moment on that it can be started, no awaited event goes unnoticed.
        yield from self._watch(ladder.cancel_on)
        replies = yield [
            Call.run("number_policy", meta, f"ladder:{ladder.name}", ladder.options, "1" if only_new else "0")
        ]
        number, outcome, _ = answer(replies[0])
        return LoadedLadder(ladder.name, int(number), outcome.decode())

    def watch(self) -> Operation[None]:
        """Has every partition notice the events that cancel any ladder, also one that lost its list of them."""
        definitions = yield from self.ladder_definitions()
        yield from self._watch(sorted({kind for _, ladder in definitions.values() for kind in ladder.cancel_on}))

    def _watch(self, kinds: Sequence[str]) -> Operation[None]:
        for start in range(0, len(kinds), _PAGE):
            page = kinds[start : start + _PAGE]
            for reply in (yield [self._script("watch", prefix, *page) for prefix in self.prefixes]):
                answer(reply)

    def ladder_definitions(self) -> Operation[dict[str, tuple[int, Ladder]]]:
        """Name → (version, definition), the latest of each."""
        yield from self.connect()
        replies = yield [Call(("HGETALL", keys.meta(self.namespace)))]
        found = {}
        for field, value in as_pairs(replies[0]):
            if field.startswith(b"ladder:"):
                name = field.decode().removeprefix("ladder:")
                version, _, text = value.decode().partition(" ")
                found[name] = (int(version), Ladder.from_json(name, text))
        return dict(sorted(found.items()))

    def left_out(self, run: LadderRun) -> Operation[dict[str, str]]:
        """Name → why, of the steps that a ladder never had, by its own version of its definition."""
        ladder = yield from self._definition(self.prefix_of(run.bucket_key), run.ladder, str(run.version))
        return ladder.left_out(run.args)

    def _definition(self, prefix: str, name: str, version: str) -> Operation[Ladder]:
        replies = yield [Call(("HGET", keys.ladderdef(prefix, name), version))]
        text = answer(replies[0])
        if text is None:
            raise UnknownLadder(name)
        return Ladder.from_json(name, text.decode())

    # --- starting and moving ---

    def start_ladder(
        self,
        name: str,
        bucket_key: str,
        anchor_at: object = None,
        args: Mapping[str, Any] | None = None,
        start_id: str | None = None,
        ignore_earlier: bool = False,
    ) -> Operation[LadderStarted]:
        """Starts a ladder in a bucket, once. Raises UnknownLadder, UnknownFlow and InvalidInput."""
        check_bucket_key(bucket_key)
        _text("ladder", name, 64)
        arguments = _arguments(args)
        if start_id is not None:
            _text("start_id", start_id, 256)
        yield from self.connect()
        replies = yield [Call(("HGET", keys.meta(self.namespace), f"ladder:{name}"))]
        held = answer(replies[0])
        if held is None:
            raise UnknownLadder(name)
        version, _, text = held.decode().partition(" ")
        ladder = Ladder.from_json(name, text)
        given = ladder.anchor == "given"
        if given and anchor_at is None:
            raise InvalidInput("anchor_at", f"is required: the ladder {name} is counted from a date that is given")
        if not given and anchor_at is not None:
            raise InvalidInput("anchor_at", f"must not be given: the ladder {name} is counted from its start")
        anchor = _instant(anchor_at) if given else (yield from self.now())
        schedule = ladder.schedule(anchor, json.loads(arguments))
        replies = yield [
            self._script(
                "start_ladder", self.prefix_of(bucket_key), self._nonce(12), bucket_key, name, start_id or "", version,
                ladder.options, anchor, "1" if given else "0", arguments, ladder.past, "1" if ignore_earlier else "0",
                "1" if ladder.escalates else "0", "" if schedule.now else schedule.ends, len(ladder.cancel_on),
                *ladder.cancel_on, *(orjson.dumps(kind).decode() for kind in ladder.cancel_on),
                *(f"{s.at} {'-' if s.stale_after is None else s.stale_after} {s.name}" for s in schedule.steps),
            )
        ]  # fmt: skip
        ladder_id, outcome, state, differs = (part.decode() for part in answer(replies[0]))
        return LadderStarted(ladder_id, outcome, state, differs == "1")

    def cancel_ladder(self, which: Which, reason: str) -> Operation[LadderMoved]:
        """Ends a ladder: nothing of it that has not begun is executed."""
        _text("reason", reason, 200)
        return (yield from self._move(which, "cancel", reason))

    def pause_ladder(self, which: Which) -> Operation[LadderMoved]:
        """Holds a ladder: no step is emitted until it is resumed; the awaited event still cancels it."""
        return (yield from self._move(which, "pause"))

    def resume_ladder(self, which: Which) -> Operation[LadderMoved]:
        """Lets a paused ladder go on; steps that have passed are sent at once or skipped, as its `past` says."""
        return (yield from self._move(which, "resume"))

    def reschedule_ladder(self, which: Which, anchor_at: object) -> Operation[LadderMoved]:
        """Moves the steps still to come, by the ladder's own version of its definition."""
        anchor = _instant(anchor_at)
        run = yield from self.ladder(which)
        if run is None:
            return LadderMoved(None, "missing", None)
        ladder = yield from self._definition(self.prefix_of(run.bucket_key), run.ladder, str(run.version))
        schedule = ladder.schedule(anchor, run.args)
        return (
            yield from self._move(
                run.ladder_id, "reschedule", str(anchor), schedule.ends, *(step.at for step in schedule.steps)
            )
        )

    def _move(
        self, which: Which, action: str, detail: str = "", ends: int | str = "", *at: int
    ) -> Operation[LadderMoved]:
        yield from self.connect()
        ladder_id = yield from self._find(which)
        if ladder_id is None:
            return LadderMoved(None, "missing", None)
        prefix = self.prefix_of_window(ladder_id, "ladder_id")
        replies = yield [self._script("move_ladder", prefix, ladder_id, action, detail, ends, *at)]
        outcome, state = (part.decode() for part in answer(replies[0]))
        return LadderMoved(ladder_id if state else None, outcome, state or None)

    def _find(self, which: Which) -> Operation[str | None]:
        if isinstance(which, str):
            return which
        if not _is_named(which):
            raise InvalidInput("ladder", "must be its id, (bucket_key, name) or (bucket_key, name, start_id)")
        bucket_key, name = check_bucket_key(which[0]), which[1]
        index = keys.ladders(self.prefix_of(bucket_key), bucket_key)
        field = f"start:{name}:{which[2]}" if len(which) == 3 else f"only:{name}"
        replies = yield [Call(("HGET", index, field))]
        found = answer(replies[0])
        if found is None and len(which) == 2:
            replies = yield [Call(("HGETALL", index))]
            found = max(
                (
                    field.removeprefix(b"ended:")
                    for field, value in as_pairs(replies[0])
                    if field.startswith(b"ended:") and value.decode() == name
                ),
                default=None,
            )
        return None if found is None else str(found.decode())

    # --- reading ---

    def ladder(self, which: Which) -> Operation[LadderRun | None]:
        """A ladder with its timeline, and the state of what it emitted; None where there is none."""
        yield from self.connect()
        ladder_id = yield from self._find(which)
        if ladder_id is None:
            return None
        prefix = self.prefix_of_window(ladder_id, "ladder_id")
        replies = yield [
            Call(("HGETALL", keys.ladder(prefix, ladder_id))),
            Call(("GET", keys.ladderargs(prefix, ladder_id))),
        ]
        fields = dict(as_pairs(replies[0]))
        if not fields:
            return None
        emissions = [f"{ladder_id}s{number}" for number in range(1, int(fields[b"emitted"]) + 1)]
        states = yield [Call(("HGET", keys.manifest(prefix, emission), "state")) for emission in emissions]
        known = {e: state.decode() for e, reply in zip(emissions, states, strict=True) if (state := answer(reply))}
        return read_run(ladder_id, fields, answer(replies[1]), known)

    def ladders(self, state: str | None = None, bucket_key: str | None = None) -> Operation[list[LadderRun]]:
        """Ladders in a `state` (None: in any), of one bucket or of all; those that are longest in it first."""
        if state is not None and state not in STATES:
            raise InvalidInput("state", f"must be one of {', '.join(STATES)}")
        yield from self.connect()
        places: list[tuple[str, str]] = []
        if bucket_key is not None:
            prefix = self.prefix_of(check_bucket_key(bucket_key))
            replies = yield [Call(("HGETALL", keys.ladders(prefix, bucket_key)))]
            for field, value in as_pairs(replies[0]):
                ended = field.startswith(b"ended:")
                places.append((prefix, (field.removeprefix(b"ended:") if ended else value).decode()))
        else:
            states = STATES if state is None else (state,)
            replies = yield [
                Call(("ZRANGE", keys.ladders(prefix, one), 0, -1)) for prefix in self.prefixes for one in states
            ]
            owners = [prefix for prefix in self.prefixes for _ in states]
            for prefix, reply in zip(owners, replies, strict=True):
                places += ((prefix, ladder_id.decode()) for ladder_id in answer(reply))
        found = []
        for start in range(0, len(places), _PAGE):
            page = places[start : start + _PAGE]
            replies = yield [
                call
                for prefix, ladder_id in page
                for call in (
                    Call(("HGETALL", keys.ladder(prefix, ladder_id))),
                    Call(("GET", keys.ladderargs(prefix, ladder_id))),
                )
            ]
            for i, (_, ladder_id) in enumerate(page):
                fields = dict(as_pairs(replies[2 * i]))
                if fields:  # it may have ended, and gone, meanwhile
                    run = read_run(ladder_id, fields, answer(replies[2 * i + 1]))
                    if state in (None, run.state):
                        found.append(run)
        return sorted(found, key=lambda run: (run.since, run.ladder_id))

    def emission(self, emission_id: str) -> Operation[Emission | None]:
        """What a ladder emitted, by its id; None where there is no such emission."""
        yield from self.connect()
        if not isinstance(emission_id, str):
            raise InvalidInput("emission_id", f"must be text, not {type(emission_id).__name__}")
        if not is_emission(emission_id):
            return None
        prefix = self.prefix_of_window(emission_id, "emission_id")
        replies = yield [Call(("HGETALL", keys.manifest(prefix, emission_id)))]
        fields = dict(as_pairs(replies[0]))
        if not fields:
            return None
        return (yield from self._read_emission(prefix, emission_id, fields))

    def begin_emission(
        self,
        emission_id: str,
        attempt: int,
        token: str,
        lease_ms: int,
        most: int,
        pause: tuple[int, int] = (1_000, 600_000),
    ) -> Operation[tuple[str, Emission | None]]:
        """As :meth:`Operations.begin`, of an emission: the state it is in, and itself where the attempt was granted.
        Refused for good where the awaited event has come."""
        yield from self.connect()
        prefix = self.prefix_of_window(emission_id, "emission_id")
        replies = yield [
            self._script("begin", prefix, token, emission_id, attempt, lease_ms, most, f"{pause[0]} {pause[1]}")
        ]
        [[granted, state, *rest]] = answer(replies[0])
        if granted != b"granted":
            return state.decode(), None
        return state.decode(), (yield from self._read_emission(prefix, emission_id, dict(as_pairs(rest[0]))))

    def _read_emission(self, prefix: str, emission_id: str, fields: dict[bytes, bytes]) -> Operation[Emission | None]:
        ladder_id = fields[b"ladder"].decode()
        replies = yield [
            Call(("HGETALL", keys.ladder(prefix, ladder_id))),
            Call(("GET", keys.ladderargs(prefix, ladder_id))),
        ]
        run = dict(as_pairs(replies[0]))
        if not run:
            return None  # it went meanwhile
        definition = yield from self._definition(prefix, fields[b"name"].decode(), run[b"definition"].decode())
        return read_emission(emission_id, fields, run, answer(replies[1]), definition)


def _is_named(which: object) -> bool:
    """Whether it is (bucket_key, name) or (bucket_key, name, start_id)."""
    return isinstance(which, tuple | list) and len(which) in (2, 3) and all(isinstance(part, str) for part in which)


def _instant(value: object) -> int:
    try:
        return parse_instant("anchor_at", value)
    except InvalidInput as problem:
        raise InvalidInput("anchor_at", problem.rule) from None


def _text(field: str, value: object, most: int) -> None:
    if type(value) is not str or not 1 <= len(value.encode(errors="replace")) <= most:
        raise InvalidInput(field, f"must be text of 1 to {most} bytes")
    if any(ord(character) < 32 or ord(character) == 127 for character in value):
        raise InvalidInput(field, "must not contain control characters")
    if any(0xD800 <= ord(character) < 0xE000 for character in value):
        raise InvalidInput(field, "must not contain a lone surrogate")


def _arguments(args: object) -> str:
    """Arguments as canonical JSON."""
    if args is None:
        args = {}
    if not isinstance(args, Mapping) or not all(isinstance(key, str) for key in args):
        raise InvalidInput("args", "must be a mapping of names to JSON values")
    try:
        text = json.dumps(args, sort_keys=True, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
        size = len(text.encode())
    except (TypeError, ValueError, RecursionError):
        raise InvalidInput("args", "must be plain data, as JSON has it") from None
    if size > MAX_ARGS:
        raise InvalidInput("args", f"must be at most {MAX_ARGS} bytes of JSON")
    return text
