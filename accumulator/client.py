"""The producer's and reader's SDK: :class:`Accumulator`, and :class:`AsyncAccumulator` for ``asyncio``.

Both are thin shells: what is asked and how answers are read stands in :mod:`accumulator.operations`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from datetime import datetime
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from accumulator.attempts import Effect
from accumulator.decisions import Decided, ReconcileItem, Resolved, Waiting
from accumulator.emission import Emission, LadderRun
from accumulator.envelope import Event
from accumulator.errors import InvalidEvent, InvalidInput
from accumulator.health import Health
from accumulator.ladder_operations import LadderMoved, LadderStarted, LoadedLadder, Which
from accumulator.ladders import Ladder
from accumulator.manifest import Manifest, StoredEvent
from accumulator.namespace import LoadedPolicy
from accumulator.operations import Operations
from accumulator.policy import Policy, duration_option
from accumulator.store import AsyncStore, Store
from accumulator.windows import Bucket, Flushed, Held, Receipt, Retracted

if TYPE_CHECKING:
    from accumulator.settings import Settings
    from accumulator.store import AsyncClient, SyncClient

EventLike = Event | Mapping[str, Any]


def _one(event: EventLike | None, fields: dict[str, Any]) -> Event:
    if event is None:
        return Event.of(fields)
    if fields:
        raise InvalidEvent("event", "give an event, or its fields by name, not both")
    return Event.of(event)


def _many(events: Iterable[EventLike]) -> list[Event]:
    if not isinstance(events, Iterable):
        raise InvalidEvent("events", f"must be a list or another iterable, not {type(events).__name__}")
    return [Event.of(event, index) for index, event in enumerate(events)]


def _duration(value: str | int, field: str = "duration") -> int:
    """ms of '20s' or of a whole number of ms."""
    if isinstance(value, int) and not isinstance(value, bool):
        value = f"{value}ms"
    try:
        return duration_option(value)
    except ValueError as problem:
        raise InvalidInput(field, problem.rule if isinstance(problem, InvalidInput) else str(problem)) from None


def _policy(flow: str, policy: Policy | Mapping[str, Any]) -> Policy:
    return policy if isinstance(policy, Policy) else Policy.load(flow, policy)


def _ladder(name: str, ladder: Ladder | Mapping[str, Any]) -> Ladder:
    return ladder if isinstance(ladder, Ladder) else Ladder.load(name, ladder)


def _which(tenant: str | None, flow: str | None) -> None:
    if tenant is None and flow is None:
        raise InvalidInput("flow", "name a tenant, a flow or both")


class Accumulator:
    """Pushes events and reads buckets, over a synchronous connection.

    `server` is the URL of a server (``redis://…``, ``unix://…``), a Redis Cluster (``redis+cluster://…``) or Sentinels
    (``redis+sentinel://…``; ``rediss`` for TLS), for which a client of our own is made with `options` for redis-py; or
    an existing ``redis.Redis`` or ``RedisCluster``: any protocol, decoding or not. `namespace` and `partitions` (None:
    what the namespace has, 64 for a new one) name the key space. `clock` (ms) puts a namespace under a virtual clock:
    for tests only.

    Every method raises ServerUnavailable, ServerRefused or MissingRight where the server does not do it, and
    NamespaceMismatch where the namespace was made for something else; each is safe to repeat. Safe to share between
    threads.
    """

    def __init__(
        self,
        server: str | SyncClient,
        *,
        namespace: str = "acc",
        partitions: int | None = None,
        clock: Callable[[], int] | None = None,
        **options: Any,
    ) -> None:
        self._own = isinstance(server, str)
        self.operations = Operations(namespace, partitions, clock)
        self.store = Store.from_url(server, **options) if isinstance(server, str) else Store(server)
        self.operations.cluster = self.store.cluster

    @classmethod
    def from_settings(cls, settings: Settings, client: SyncClient | None = None, **options: Any) -> Self:
        """What the settings name, on a `client` of that server where one is given. A partition count that nobody chose
        is the namespace's own."""
        if client is None:
            options |= settings.timeouts
        return cls(
            settings.url if client is None else client,
            namespace=settings.namespace,
            partitions=settings.partitions if "partitions" in settings.model_fields_set else None,
            **options,
        )

    def close(self) -> None:
        """Closes the connections that were made here; a client that was given stays open."""
        if self._own:
            self.store.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def push(self, event: EventLike | None = None, /, **fields: Any) -> Receipt:
        """Delivers one event, given as an Event, a mapping, or by its fields. Raises InvalidEvent (nothing was sent)
        and UnknownFlow."""
        return self.store.perform(self.operations.push(_one(event, fields)))

    def push_many(self, events: Iterable[EventLike]) -> list[Receipt]:
        """Delivers any number of events of any buckets: the same answers, in order, as one push each; not atomic across
        buckets. An invalid event stops the call before anything is sent, with its index and field. A part that got no
        answer is `unknown` for its events; where no part got one, the error is raised."""
        return self.store.perform(self.operations.push_many(_many(events)))

    def flush(self, bucket_key: str, window_version: int | None = None, *, partial: bool = False) -> Flushed:
        """Closes the open window (of that version) with reason `flush`; a partial one may be continued by the next."""
        return self.store.perform(self.operations.flush(bucket_key, window_version, partial))

    def flush_where(
        self, *, tenant: str | None = None, flow: str | None = None, partial: bool = False
    ) -> list[Flushed]:
        """Flushes each bucket of a tenant or flow (as they stand in the key) that is open when it begins; not
        atomic."""
        _which(tenant, flow)
        return self.store.perform(self.operations.flush_where(tenant, flow, partial))

    def hold(self, bucket_key: str, duration: str | int) -> Held:
        """Keeps the open window open until now + `duration` (``"20s"``, or ms); lifts the inactivity limit only."""
        return self.store.perform(self.operations.hold(bucket_key, _duration(duration)))

    def retract(self, bucket_key: str, event_id: str) -> Retracted:
        """Takes an id's entries out of the open window: its payload is never handed over."""
        return self.store.perform(self.operations.retract(bucket_key, event_id))

    def bucket(self, bucket_key: str) -> Bucket:
        """A bucket as it stands, with its open window and true `due_at`."""
        return self.store.perform(self.operations.bucket(bucket_key))

    def open_buckets(self) -> list[tuple[str, int]]:
        """(bucket_key, opened_at in ms) of every open bucket, the oldest first."""
        return self.store.perform(self.operations.open_buckets())

    def open_events(self, bucket_key: str) -> tuple[StoredEvent, ...]:
        """The events of the open window, in order of acceptance."""
        return self.store.perform(self.operations.open_events(bucket_key))

    def manifests(self, bucket_key: str) -> list[Manifest]:
        """The bucket's manifests by version, with their events."""
        return self.store.perform(self.operations.manifests(bucket_key))

    def manifest(self, window_id: str) -> Manifest | None:
        """One manifest with its events."""
        return self.store.perform(self.operations.manifest(window_id))

    def reconciliation(self) -> list[ReconcileItem]:
        """What waits for somebody to decide, in the order it was queued."""
        return self.store.perform(self.operations.reconciliation())

    def health(self) -> Health:
        """How it goes: what has to be mended, what should be known."""
        return self.store.perform(self.operations.health())

    def counters(self) -> dict[str, int]:
        """The namespace's counters."""
        return self.store.perform(self.operations.counters())

    def load_policy(self, flow: str, policy: Policy | Mapping[str, Any], *, only_new: bool = False) -> LoadedPolicy:
        """Makes a policy the flow's latest: it rules the windows opened from now on. Equal content is no new version;
        `only_new` keeps one that is there. Raises InvalidPolicy."""
        return self.store.perform(self.operations.load_policy(flow, _policy(flow, policy), only_new))

    def policies(self) -> dict[str, tuple[int, Policy]]:
        """Flow → (version, policy), the latest of each."""
        return self.store.perform(self.operations.policies())

    # --- what people decide: their name (`by`) and `reason` stay in the timeline, or in the audit stream ---

    def attention(self, state: str | None = None) -> list[Waiting]:
        """The manifests that wait for somebody (awaiting_approval, uncertain, dead, reconciling), the longest first;
        only those in `state`, where it is given: that may be closed, dispatched, processing or retrying too."""
        return self.store.perform(self.operations.waiting_for_people(state))

    def effects(self, window_id: str) -> list[Effect]:
        """The ledger of a manifest's effects, by name."""
        return self.store.perform(self.operations.effects(window_id))

    def stages(self, window_id: str) -> dict[str, str]:
        """What the finished stages of a manifest's handler returned, such as what is proposed to who has to approve it:
        stage → JSON, by name. They go with the payloads."""
        return self.store.perform(self.operations.stages(window_id))

    def approve(self, window_id: str, *, by: str, reason: str) -> Decided:
        """Approves a proposal that awaits it: the handler goes on with it, once it has been revalidated."""
        return self.store.perform(self.operations.decide(window_id, "approve", by, reason))

    def refuse(self, window_id: str, *, by: str, reason: str) -> Decided:
        """Refuses a proposal that awaits approval: the manifest is settled, and nothing is done."""
        return self.store.perform(self.operations.decide(window_id, "refuse", by, reason))

    def replay(self, window_id: str, *, by: str, reason: str, effects: str | None = None) -> Decided:
        """Hands a dead, uncertain or reconciling manifest out again, its failures forgotten. `effects` says what became
        of those in doubt: ``done`` (they count as confirmed) or ``not_done`` (they are made again); None leaves it to
        the handler's verify."""
        return self.store.perform(self.operations.decide(window_id, "replay", by, reason, effects or ""))

    def discard(self, window_id: str, *, by: str, reason: str) -> Decided:
        """Settles a manifest without doing anything, whatever it waits for; not one that is processing, since an
        attempt is at work on it."""
        return self.store.perform(self.operations.decide(window_id, "discard", by, reason))

    def confirm(self, window_id: str, *, by: str, reason: str) -> Decided:
        """Settles a dead, uncertain or reconciling manifest as confirmed: what it stands for has happened."""
        return self.store.perform(self.operations.decide(window_id, "confirm", by, reason))

    def decide_where(
        self,
        decision: str,
        *,
        by: str,
        reason: str,
        state: str | None = None,
        tenant: str | None = None,
        flow: str | None = None,
        older_than: str | int | None = None,
        effects: str | None = None,
        dry_run: bool = False,
    ) -> dict[str, int]:
        """``discard`` or ``replay``, of all manifests that are not settled now and match every filter given, of which
        there must be one: how many were ``done``, and how many were left in the ``wrong_state`` (processing). `state`
        is one of UNSETTLED, `older_than` ``"2h"``, or ms, since they closed. Not atomic. `dry_run` changes nothing, and
        says what would become of them."""
        age = 0 if older_than is None else _duration(older_than, "older_than")
        return self.store.perform(
            self.operations.decide_where(decision, by, reason, state, tenant, flow, age, effects or "", dry_run)
        )

    def resolve(self, item: ReconcileItem | str, decision: str, *, by: str, reason: str) -> Resolved:
        """Takes an item, or the one of that id, out of the reconciliation queue: ``accept`` (its event joins the
        bucket's next window) or ``discard``."""
        return self.store.perform(self.operations.resolve(item, decision, by, reason))

    def resolve_where(
        self,
        decision: str,
        *,
        by: str,
        reason: str,
        code: str | None = None,
        tenant: str | None = None,
        flow: str | None = None,
        older_than: str | int | None = None,
        dry_run: bool = False,
    ) -> dict[str, int]:
        """The same for all items that wait now and match every filter given, of which there must be one: outcome → how
        many. `code` is one of CODES, `older_than` ``"2h"``, or ms. Not atomic. `dry_run` changes nothing, and says how
        many match."""
        age = 0 if older_than is None else _duration(older_than, "older_than")
        return self.store.perform(self.operations.resolve_where(decision, by, reason, code, tenant, flow, age, dry_run))

    def load_ladder(self, name: str, ladder: Ladder | Mapping[str, Any], *, only_new: bool = False) -> LoadedLadder:
        """Makes a ladder's definition the latest of its name: it rules the ladders started from now on. Equal content
        is no new version; `only_new` keeps one that is there. Raises InvalidLadder."""
        return self.store.perform(self.operations.load_ladder(_ladder(name, ladder), only_new))

    def ladder_definitions(self) -> dict[str, tuple[int, Ladder]]:
        """Name → (version, definition), the latest of each."""
        return self.store.perform(self.operations.ladder_definitions())

    def start_ladder(
        self,
        ladder: str,
        bucket_key: str,
        anchor_at: datetime | str | None = None,
        args: Mapping[str, Any] | None = None,
        *,
        start_id: str | None = None,
        ignore_earlier: bool = False,
    ) -> LadderStarted:
        """Starts a ladder in a bucket, counted from `anchor_at` (not where its definition counts from the start), with
        arguments for its conditions and steps (JSON values, up to 16 KiB). Safe to repeat: the same `start_id` returns
        the first; without one, one of that name runs at a time in a bucket. An awaited event that came before cancels
        it at once, unless `ignore_earlier`. Raises UnknownLadder, UnknownFlow and InvalidInput."""
        return self.store.perform(
            self.operations.start_ladder(ladder, bucket_key, anchor_at, args, start_id, ignore_earlier)
        )

    def cancel_ladder(self, which: Which, reason: str) -> LadderMoved:
        """Ends a ladder, named by its id, (bucket_key, name) or (bucket_key, name, start_id): nothing of it that has
        not begun is executed."""
        return self.store.perform(self.operations.cancel_ladder(which, reason))

    def reschedule_ladder(self, which: Which, anchor_at: datetime | str) -> LadderMoved:
        """Moves the steps still to come to another anchor; those whose instant is past by then are sent at once, or
        skipped with `past: skip`."""
        return self.store.perform(self.operations.reschedule_ladder(which, anchor_at))

    def pause_ladder(self, which: Which) -> LadderMoved:
        """Holds a ladder: no step is emitted until it is resumed; the awaited event still cancels it."""
        return self.store.perform(self.operations.pause_ladder(which))

    def resume_ladder(self, which: Which) -> LadderMoved:
        """Lets a paused ladder go on; steps that have passed meanwhile are sent at once, or skipped with `past:
        skip`."""
        return self.store.perform(self.operations.resume_ladder(which))

    def ladder(self, which: Which) -> LadderRun | None:
        """A ladder with its timeline and what comes next; None where there is none."""
        return self.store.perform(self.operations.ladder(which))

    def ladders(self, state: str | None = None, *, bucket_key: str | None = None) -> list[LadderRun]:
        """Ladders in a state (``running``, ``paused``, ``cancelled``, ``exhausted``, ``escalated``; None: in any), of
        one bucket or of all; those that are longest in it first."""
        return self.store.perform(self.operations.ladders(state, bucket_key))

    def emission(self, emission_id: str) -> Emission | None:
        """What a ladder emitted, by its id."""
        return self.store.perform(self.operations.emission(emission_id))


class AsyncAccumulator:
    """The same as :class:`Accumulator` on ``redis.asyncio``; see there for arguments, results and errors."""

    def __init__(
        self,
        server: str | AsyncClient,
        *,
        namespace: str = "acc",
        partitions: int | None = None,
        clock: Callable[[], int] | None = None,
        **options: Any,
    ) -> None:
        self._own = isinstance(server, str)
        self.operations = Operations(namespace, partitions, clock)
        self.store = AsyncStore.from_url(server, **options) if isinstance(server, str) else AsyncStore(server)
        self.operations.cluster = self.store.cluster

    async def close(self) -> None:
        """Closes the connections that were made here; a client that was given stays open."""
        if self._own:
            await self.store.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def push(self, event: EventLike | None = None, /, **fields: Any) -> Receipt:
        """See :meth:`Accumulator.push`."""
        return await self.store.perform(self.operations.push(_one(event, fields)))

    async def push_many(self, events: Iterable[EventLike]) -> list[Receipt]:
        """See :meth:`Accumulator.push_many`."""
        return await self.store.perform(self.operations.push_many(_many(events)))

    async def flush(self, bucket_key: str, window_version: int | None = None, *, partial: bool = False) -> Flushed:
        """See :meth:`Accumulator.flush`."""
        return await self.store.perform(self.operations.flush(bucket_key, window_version, partial))

    async def flush_where(
        self, *, tenant: str | None = None, flow: str | None = None, partial: bool = False
    ) -> list[Flushed]:
        """See :meth:`Accumulator.flush_where`."""
        _which(tenant, flow)
        return await self.store.perform(self.operations.flush_where(tenant, flow, partial))

    async def hold(self, bucket_key: str, duration: str | int) -> Held:
        """See :meth:`Accumulator.hold`."""
        return await self.store.perform(self.operations.hold(bucket_key, _duration(duration)))

    async def retract(self, bucket_key: str, event_id: str) -> Retracted:
        """See :meth:`Accumulator.retract`."""
        return await self.store.perform(self.operations.retract(bucket_key, event_id))

    async def bucket(self, bucket_key: str) -> Bucket:
        """See :meth:`Accumulator.bucket`."""
        return await self.store.perform(self.operations.bucket(bucket_key))

    async def open_buckets(self) -> list[tuple[str, int]]:
        """See :meth:`Accumulator.open_buckets`."""
        return await self.store.perform(self.operations.open_buckets())

    async def open_events(self, bucket_key: str) -> tuple[StoredEvent, ...]:
        """See :meth:`Accumulator.open_events`."""
        return await self.store.perform(self.operations.open_events(bucket_key))

    async def manifests(self, bucket_key: str) -> list[Manifest]:
        """See :meth:`Accumulator.manifests`."""
        return await self.store.perform(self.operations.manifests(bucket_key))

    async def manifest(self, window_id: str) -> Manifest | None:
        """See :meth:`Accumulator.manifest`."""
        return await self.store.perform(self.operations.manifest(window_id))

    async def reconciliation(self) -> list[ReconcileItem]:
        """See :meth:`Accumulator.reconciliation`."""
        return await self.store.perform(self.operations.reconciliation())

    async def health(self) -> Health:
        """See :meth:`Accumulator.health`."""
        return await self.store.perform(self.operations.health())

    async def counters(self) -> dict[str, int]:
        """See :meth:`Accumulator.counters`."""
        return await self.store.perform(self.operations.counters())

    async def load_policy(
        self, flow: str, policy: Policy | Mapping[str, Any], *, only_new: bool = False
    ) -> LoadedPolicy:
        """See :meth:`Accumulator.load_policy`."""
        return await self.store.perform(self.operations.load_policy(flow, _policy(flow, policy), only_new))

    async def policies(self) -> dict[str, tuple[int, Policy]]:
        """See :meth:`Accumulator.policies`."""
        return await self.store.perform(self.operations.policies())

    async def attention(self, state: str | None = None) -> list[Waiting]:
        """See :meth:`Accumulator.attention`."""
        return await self.store.perform(self.operations.waiting_for_people(state))

    async def effects(self, window_id: str) -> list[Effect]:
        """See :meth:`Accumulator.effects`."""
        return await self.store.perform(self.operations.effects(window_id))

    async def stages(self, window_id: str) -> dict[str, str]:
        """See :meth:`Accumulator.stages`."""
        return await self.store.perform(self.operations.stages(window_id))

    async def approve(self, window_id: str, *, by: str, reason: str) -> Decided:
        """See :meth:`Accumulator.approve`."""
        return await self.store.perform(self.operations.decide(window_id, "approve", by, reason))

    async def refuse(self, window_id: str, *, by: str, reason: str) -> Decided:
        """See :meth:`Accumulator.refuse`."""
        return await self.store.perform(self.operations.decide(window_id, "refuse", by, reason))

    async def replay(self, window_id: str, *, by: str, reason: str, effects: str | None = None) -> Decided:
        """See :meth:`Accumulator.replay`."""
        return await self.store.perform(self.operations.decide(window_id, "replay", by, reason, effects or ""))

    async def discard(self, window_id: str, *, by: str, reason: str) -> Decided:
        """See :meth:`Accumulator.discard`."""
        return await self.store.perform(self.operations.decide(window_id, "discard", by, reason))

    async def confirm(self, window_id: str, *, by: str, reason: str) -> Decided:
        """See :meth:`Accumulator.confirm`."""
        return await self.store.perform(self.operations.decide(window_id, "confirm", by, reason))

    async def decide_where(
        self,
        decision: str,
        *,
        by: str,
        reason: str,
        state: str | None = None,
        tenant: str | None = None,
        flow: str | None = None,
        older_than: str | int | None = None,
        effects: str | None = None,
        dry_run: bool = False,
    ) -> dict[str, int]:
        """See :meth:`Accumulator.decide_where`."""
        age = 0 if older_than is None else _duration(older_than, "older_than")
        return await self.store.perform(
            self.operations.decide_where(decision, by, reason, state, tenant, flow, age, effects or "", dry_run)
        )

    async def resolve(self, item: ReconcileItem | str, decision: str, *, by: str, reason: str) -> Resolved:
        """See :meth:`Accumulator.resolve`."""
        return await self.store.perform(self.operations.resolve(item, decision, by, reason))

    async def resolve_where(
        self,
        decision: str,
        *,
        by: str,
        reason: str,
        code: str | None = None,
        tenant: str | None = None,
        flow: str | None = None,
        older_than: str | int | None = None,
        dry_run: bool = False,
    ) -> dict[str, int]:
        """See :meth:`Accumulator.resolve_where`."""
        age = 0 if older_than is None else _duration(older_than, "older_than")
        return await self.store.perform(
            self.operations.resolve_where(decision, by, reason, code, tenant, flow, age, dry_run)
        )

    async def load_ladder(
        self, name: str, ladder: Ladder | Mapping[str, Any], *, only_new: bool = False
    ) -> LoadedLadder:
        """See :meth:`Accumulator.load_ladder`."""
        return await self.store.perform(self.operations.load_ladder(_ladder(name, ladder), only_new))

    async def ladder_definitions(self) -> dict[str, tuple[int, Ladder]]:
        """See :meth:`Accumulator.ladder_definitions`."""
        return await self.store.perform(self.operations.ladder_definitions())

    async def start_ladder(
        self,
        ladder: str,
        bucket_key: str,
        anchor_at: datetime | str | None = None,
        args: Mapping[str, Any] | None = None,
        *,
        start_id: str | None = None,
        ignore_earlier: bool = False,
    ) -> LadderStarted:
        """See :meth:`Accumulator.start_ladder`."""
        return await self.store.perform(
            self.operations.start_ladder(ladder, bucket_key, anchor_at, args, start_id, ignore_earlier)
        )

    async def cancel_ladder(self, which: Which, reason: str) -> LadderMoved:
        """See :meth:`Accumulator.cancel_ladder`."""
        return await self.store.perform(self.operations.cancel_ladder(which, reason))

    async def reschedule_ladder(self, which: Which, anchor_at: datetime | str) -> LadderMoved:
        """See :meth:`Accumulator.reschedule_ladder`."""
        return await self.store.perform(self.operations.reschedule_ladder(which, anchor_at))

    async def pause_ladder(self, which: Which) -> LadderMoved:
        """See :meth:`Accumulator.pause_ladder`."""
        return await self.store.perform(self.operations.pause_ladder(which))

    async def resume_ladder(self, which: Which) -> LadderMoved:
        """See :meth:`Accumulator.resume_ladder`."""
        return await self.store.perform(self.operations.resume_ladder(which))

    async def ladder(self, which: Which) -> LadderRun | None:
        """See :meth:`Accumulator.ladder`."""
        return await self.store.perform(self.operations.ladder(which))

    async def ladders(self, state: str | None = None, *, bucket_key: str | None = None) -> list[LadderRun]:
        """See :meth:`Accumulator.ladders`."""
        return await self.store.perform(self.operations.ladders(state, bucket_key))

    async def emission(self, emission_id: str) -> Emission | None:
        """See :meth:`Accumulator.emission`."""
        return await self.store.perform(self.operations.emission(emission_id))
