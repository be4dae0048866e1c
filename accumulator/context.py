"""What a handler sees of a manifest or of a ladder's step, and what it may do: effects, stages, checkpoints.

All of it asks the server under the attempt's token. An attempt whose lease ran out can begin and confirm nothing more:
:class:`LeaseLost` ends it, and somebody else has taken over.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import secrets
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from functools import cached_property
from time import monotonic
from types import TracebackType
from typing import Any, Final, NamedTuple, Self

import orjson

from accumulator.client import Accumulator
from accumulator.emission import Emission
from accumulator.envelope import MISSING, Event
from accumulator.errors import InvalidInput
from accumulator.handlers import Diverged, Handler, NotDone, QueueFull, Superseded, Timeout
from accumulator.manifest import Manifest, StoredEvent
from accumulator.policy import Policy

MAX_CHECKPOINT: Final = 16 << 10
MAX_RESULT: Final = 64 << 10
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)

_PIECE: Final = 12
"""Characters of a payload's value that make a text one that quotes it."""


class LeaseLost(Exception):
    """The attempt's lease ran out, or a person decided otherwise: it has no say any more."""


class NeedsApproval(Exception):
    """A person has to approve the proposal."""


class Stale(Exception):
    """The proposal did not hold any more, three times in a row."""


class Uncertain(Exception):
    """An effect was begun and not confirmed, and nobody can tell whether it happened."""


class Ordered(NamedTuple):
    """An event in its source's own order: `gap` where the one before it is missing (by source_version), `late` where it
    came late."""

    entry: StoredEvent
    gap: bool
    late: bool


def _encode(value: object, field: str, most: int) -> str:
    try:
        text = orjson.dumps(value)
    except TypeError as problem:
        raise InvalidInput(field, f"must be a JSON value: {problem}") from None
    if len(text) > most:
        raise InvalidInput(field, f"must be at most {most} bytes of JSON, and is {len(text)}")
    return text.decode()


class Effect:
    """A consequence outside, under an idempotency `key`; see :meth:`Work.effect`.

    ``needed`` says whether it is to be done; where it is not, `result` is what was recorded when it was. Set `result`
    (a JSON value) to have it recorded.
    """

    def __init__(self, ctx: Work, name: str, verify: Callable[[str], Any] | None) -> None:
        self._ctx = ctx
        self._name = name
        self._verify = verify
        self._nonce = ""
        self.key = f"{ctx.effect_key}:{name}"
        self.needed = True
        self.result: Any = None

    def _step(self, step: str, result: str = "") -> str:
        told, recorded = self._ctx._ask("effect", self._name, step, self._nonce, result)
        if told == "refused":
            raise LeaseLost
        if told == "confirmed" and recorded:
            self.result = orjson.loads(recorded)
        return str(told)

    def __enter__(self) -> Self:
        self._nonce = secrets.token_hex(6)
        told = self._step("begin")
        if told == "uncertain":
            found = None if self._verify is None else self._ctx._resolve(self._verify(self.key))
            if found is None:
                raise Uncertain(self._name)
            if found is False:
                told = self._step("again")
            else:
                told = self._step("confirm", _encode(None if found is True else found, self._name, MAX_RESULT))
        self.needed = told == "begun"
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self.needed:
            return
        if error is None:
            self._step("confirm", _encode(self.result, self._name, MAX_RESULT))
        elif isinstance(error, NotDone):
            self._step("undo")
        elif isinstance(error, Exception) and not isinstance(error, LeaseLost):
            self._step("doubt")

    async def __aenter__(self) -> Self:
        return await asyncio.to_thread(self.__enter__)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await asyncio.to_thread(self.__exit__, kind, error, trace)


class Work(ABC):
    """What a handler gets of a manifest and of a ladder's step alike, and what it may do under this attempt.

    `window_id` is the id of what is handled, `effect_key` what the keys of its effects begin with. `results` holds what
    earlier stages returned, `left` the checkpoint it leaves. Only an attempt that holds its lease may do anything:
    LeaseLost else.
    """

    def __init__(
        self,
        accumulator: Accumulator,
        handler: Handler,
        window_id: str,
        effect_key: str,
        handled: Manifest | Emission,
        token: str,
        seconds: float | None = None,
    ) -> None:
        self._accumulator = accumulator
        self._token = token
        self._until = monotonic() + (handler.timeout / 1000 if seconds is None else seconds)
        self.left = ""
        self.handler = handler
        self.window_id = window_id
        self.effect_key = effect_key
        self.bucket_key = handled.bucket_key
        self.flow = handled.flow
        self.attempt = handled.attempt
        self.failures = handled.failures
        self.approved_by = handled.approved_by
        self.results: dict[str, Any] = {}

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.window_id} attempt {self.attempt}>"

    def _resolve(self, value: Any) -> Any:
        """The value, or what a coroutine gives, run to its end in a loop of its own, within the handler's timeout."""
        if value is None or not inspect.isawaitable(value):
            return value
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            return asyncio.run(self._bounded(value))
        # Asked for within an async handler, whose thread has a loop already.
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(asyncio.run, self._bounded(value)).result()

    async def _bounded(self, value: Any) -> Any:
        scope = asyncio.timeout(self._until - monotonic())
        try:
            async with scope:
                return await value
        except TimeoutError:
            if scope.expired():
                raise Timeout from None
            raise

    def _perform(self, name: str, *args: Any) -> Any:
        return self._accumulator.store.perform(getattr(self._accumulator.operations, name)(*args))

    def _ask(self, name: str, *args: Any) -> Any:
        return self._perform(name, self.window_id, self._token, *args)

    @property
    def remaining(self) -> float:
        """s until the handler is past its timeout. A call outside that may still arrive after that would come behind
        the back of `verify`: give it no more time than this."""
        return self._until - monotonic()

    def effect(self, name: str, *, event_id: str | None = None, verify: Callable[[str], Any] | None = None) -> Effect:
        """A consequence outside, once: ``with ctx.effect("charge") as effect: if effect.needed: …``, or ``async with``.

        It is begun in the ledger before the body runs and confirmed after it. Where an earlier attempt began and did
        not confirm it, `verify` is asked with the idempotency key: false (it did not happen), true or its result (it
        did), None (nobody can tell). Without `verify` such a manifest goes to reconciliation. An exception in the body
        leaves it in doubt, but for NotDone. `event_id` makes it an effect of that event, so that a retry skips the
        events that are done.
        """
        if not name or len(name) > 200 or ":" in name:
            raise InvalidInput("effect", "its name must be 1 to 200 characters without ':'")
        if name == "aside":
            raise InvalidInput("effect", "aside is the name under which events are set aside: choose another one")
        return Effect(self, name if event_id is None else f"{name}:{event_id}", verify)

    def once(
        self,
        name: str,
        call: Callable[[str], Any],
        *,
        event_id: str | None = None,
        verify: Callable[[str], Any] | None = None,
    ) -> Any:
        """``call(key)`` as an effect: its result, or the recorded one where it was done before."""
        with self.effect(name, event_id=event_id, verify=verify) as effect:
            if effect.needed:
                effect.result = self._resolve(call(effect.key))
        return effect.result

    def run(self) -> None:
        """Runs the handler to its end; raises what it raises, and NeedsApproval, Stale, Uncertain, Diverged."""
        if self.handler.stages is not None:
            self._run_stages(self.handler.stages)
        elif self.handler.function is not None:
            self._resolve(self.handler.function(self))

    @abstractmethod
    def quotes(self, text: str) -> bool:
        """Whether a text quotes what is not to be repeated: payloads, arguments."""

    def _run_stages(self, stages: Any) -> None:
        kept = self._perform("stages", self.window_id)
        self.results = {name: orjson.loads(text) for name, text in kept.items()}
        if not self._was_executed(stages):
            self._prepare(stages)
            if hasattr(stages, "execute"):
                with self._execution(stages) as effect:
                    if effect.needed:
                        effect.result = self._resolve(stages.execute(self, effect.key))
                self.results["execute"] = effect.result
        if hasattr(stages, "confirm") and self._resolve(stages.confirm(self)) is False:
            raise Diverged("confirm found that the world differs")

    def _execution(self, stages: Any) -> Effect:
        verify = getattr(stages, "verify", None)
        return self.effect("execute", verify=None if verify is None else lambda key: verify(self, key))

    def _was_executed(self, stages: Any) -> bool:
        """Whether an earlier attempt did execute, and if so with what result: asked before anything else, since what
        was right before it need not be so after it. Where it surely did not, it is as if it had not begun."""
        if self.attempt == 1 or not hasattr(stages, "execute"):
            return False
        if "execute" not in {e.name for e in self._perform("effects", self.window_id)}:
            return False
        with suppress(NotDone), self._execution(stages) as effect:
            if effect.needed:
                raise NotDone
            self.results["execute"] = effect.result
            return True
        return False

    def _prepare(self, stages: Any) -> None:
        """The stages before `execute`, until the proposal holds and is approved where it must be."""
        for _ in range(3):
            for name in ("load", "interpret", "propose"):
                self._stage(stages, name)
            if not hasattr(stages, "revalidate") or self._resolve(stages.revalidate(self)) is not False:
                # Nobody is asked to approve what does not hold; what was approved, since then held again.
                if self.approved_by is None and hasattr(stages, "approve") and self._resolve(stages.approve(self)):
                    raise NeedsApproval
                return
            self.results.clear()
            self.approved_by = None
            if not self._ask("drop_stages"):
                raise LeaseLost
        raise Stale

    def _stage(self, stages: Any, name: str) -> None:
        if name in self.results or not hasattr(stages, name):
            return
        text = _encode(self._resolve(getattr(stages, name)(self)), name, MAX_RESULT)
        if not self._ask("save_stage", name, text):
            raise LeaseLost
        self.results[name] = orjson.loads(text)  # what a later attempt finds


class Context(Work):
    """What a handler gets: the manifest, its events, and what it may do under this attempt.

    `manifests` are all that this hand-over holds, the oldest first, `manifest` the last of them; `events` those of all.
    """

    def __init__(
        self,
        accumulator: Accumulator,
        handler: Handler,
        manifests: tuple[Manifest, ...],
        token: str,
        seconds: float | None = None,
    ) -> None:
        self.manifests = manifests
        self.manifest = manifests[-1]
        window_id = self.manifest.window_id
        super().__init__(accumulator, handler, window_id, window_id, self.manifest, token, seconds)

    @property
    def events(self) -> tuple[StoredEvent, ...]:
        """Entries in order of acceptance, retracted ones left out."""
        return tuple(entry for manifest in self.manifests for entry in manifest.events)

    @cached_property
    def policy(self) -> Policy:
        """The policy that the window obeyed."""
        policy: Policy = self._perform("policy_of", self.manifest)
        return policy

    def in_order(self) -> Iterator[Ordered]:
        """The events by the flow's `order_by`, one source after the other in the order of their first event; without
        `order_by`, and those without an order value, in order of acceptance."""
        by = self.policy.order_by
        sources: dict[str, list[StoredEvent]] = {}
        for entry in self.events:
            sources.setdefault(entry.event.source if by else "", []).append(entry)

        def value(entry: StoredEvent) -> int | None:
            return entry.event.source_version if by == "source_version" else entry.event.occurred_ms

        for entries in sources.values():
            if by:
                known = [e for e in entries if value(e) is not None]
                known.sort(key=lambda e: value(e) or 0)
                entries = [*known, *(e for e in entries if value(e) is None)]
            before: int | None = None
            for entry in entries:
                now = entry.event.source_version if by == "source_version" else None
                yield Ordered(entry, before is not None and now is not None and now > before + 1, entry.late)
                before = now if now is not None else before

    @cached_property
    def predecessor(self) -> Manifest | None:
        """The manifest of the bucket's window before, with the state it is in; None where there is none any more."""
        before = self.manifests[0].previous_window_id
        found: Manifest | None = None if before is None else self._perform("manifest", before)
        return found

    @property
    def predecessor_state(self) -> str | None:
        """The state that this one is in; cheaper, where no more is wanted."""
        before = self.manifests[0].previous_window_id
        found: str | None = None if before is None else self._perform("state", before)
        return found

    @cached_property
    def checkpoint(self) -> Any:
        """What the last confirmed one of the bucket's windows before this one left for it, or None. A later window may
        have left another since (this one was replayed): that is not for it."""
        kept = self._perform("checkpoint", self.bucket_key)
        return None if kept is None or kept[0] >= self.manifests[0].window_version else orjson.loads(kept[1])

    def leave(self, checkpoint: Any) -> None:
        """Leaves a checkpoint (a JSON value, up to 16 KiB) to the bucket's next window, when this one is confirmed."""
        self.left = _encode(checkpoint, "checkpoint", MAX_CHECKPOINT)

    def superseded(self) -> None:
        """Raises Superseded where the bucket has a newer window, open or waiting to be handed over, and no effect of
        this one has begun. To be asked just before what others would see."""
        if self._perform("can_give_way", self.manifest):
            raise Superseded

    def set_aside(self, event_id: str, why: str) -> None:
        """Sends an event to reconciliation, so that the rest can be finished. Raises QueueFull where that holds all it
        may."""
        for entry in self.events:
            if entry.event.event_id == event_id:
                told = self._ask("set_aside", entry.event, why)
                if told == "refused":
                    raise LeaseLost
                if told == "full":
                    raise QueueFull
                return
        raise InvalidInput("event_id", "is not in this manifest")

    def quotes(self, text: str) -> bool:
        """Whether a text quotes one of the payloads: a value whole, or a good piece of it."""
        return any(part in text for entry in self.events for part in _texts(entry.event.payload))


class StepContext(Work):
    """What a handler gets of what a ladder emits: a step, or that it was cancelled or escalated (`event`).

    `ladder` is its name, `step` the step's, `attributes` what the configuration says of it, `args` what was given at
    the start. `key` is the idempotency key, made of ladder, bucket key, start id and step: the same in every attempt,
    and the beginning of the keys of its effects. `by_event` names the event that cancelled the ladder.
    """

    def __init__(
        self,
        accumulator: Accumulator,
        handler: Handler,
        emission: Emission,
        token: str,
        seconds: float | None = None,
    ) -> None:
        super().__init__(accumulator, handler, emission.emission_id, emission.key, emission, token, seconds)
        self.emission = emission
        self.ladder = emission.ladder
        self.ladder_id = emission.ladder_id
        self.event = emission.event
        self.step = emission.step
        self.attributes = emission.attributes
        self.args = emission.args
        self.key = emission.key
        self.start_id = emission.start_id
        self.by_event = emission.by_event
        self.reason = emission.reason
        self.anchor_at = _EPOCH + timedelta(milliseconds=emission.anchor_at)
        self.due_at = _EPOCH + timedelta(milliseconds=emission.due_at)

    @cached_property
    def cancelling_event(self) -> Event | None:
        """The event that cancelled the ladder, where it is still kept; None else."""
        if self.by_event is None:
            return None
        found: Event | None = self._perform("find_event", self.bucket_key, self.by_event)
        return found

    def quotes(self, text: str) -> bool:
        """Whether a text quotes one of the arguments."""
        return any(part in text for part in _texts(self.args))


def _texts(value: object) -> Iterator[str]:
    """How the values of a payload would look in a text: whole, as a literal, and in pieces, since a text may be cut."""
    if isinstance(value, dict):
        for part in value.values():
            yield from _texts(part)
    elif isinstance(value, list):
        for part in value:
            yield from _texts(part)
    elif value is not MISSING and value is not None and not isinstance(value, bool):
        text = value.decode(errors="replace") if isinstance(value, bytes) else str(value)
        if len(text) >= 4:
            yield text
            if not (text.isascii() and text.isprintable()):
                yield repr(value).strip("b'\"")
                yield json.dumps(text)[1:-1]
            yield from (text[i : i + _PIECE] for i in range(0, len(text) - _PIECE, _PIECE // 2))
            yield text[-_PIECE:]
