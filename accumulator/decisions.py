"""What people ask: what waits for them, and what they decide."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Final, NamedTuple

from accumulator import keys
from accumulator.envelope import Event, flow_of, packed_again, tenant_of
from accumulator.errors import InvalidInput
from accumulator.namespace import PAGE, Namespace
from accumulator.store import Call, Operation, answer, as_pairs, as_stream
from accumulator.windows import Receipt, read_receipt

ATTENTION: Final = ("awaiting_approval", "uncertain", "dead", "reconciling")
"""States in which a manifest waits for somebody."""
_TROUBLED: Final = frozenset({"dead", "uncertain", "reconciling"})
UNSETTLED: Final = ("closed", "dispatched", "processing", "retrying", *ATTENTION)
"""States of a manifest that is not settled."""
DECISIONS: Final = ("approve", "refuse", "replay", "discard", "confirm")
"""What can be decided of a manifest."""
RESOLUTIONS: Final = {"accept": "accepted", "discard": "discarded"}
"""What can be decided of a reconciliation item → what it then is."""
CODES: Final = (
    "conflict", "unknown_kind", "occurred_in_future", "stale_policy_version", "policy_changed", "late", "too_old",
    "set_aside",
)  # fmt: skip
"""What an event can be queued for."""


class ReconcileItem(NamedTuple):
    """An event that waits for somebody to decide. `item_id` names it in the namespace: its partition, and its id in
    that one's queue; `queued_at` is in ms; `known` are the digests under the event's id. `window` is the version that
    was open then, or that set it aside, 0 for none; `why` is what a handler said that set it aside."""

    item_id: str
    queued_at: int
    code: str
    event: Event
    digest: str
    known: tuple[str, ...]
    window: int = 0
    why: str = ""


class Resolved(NamedTuple):
    """What became of a reconciliation item: ``accepted`` (with the `receipt` of its event), ``discarded``, or
    ``missing`` where it does not wait any more."""

    item_id: str
    outcome: str
    receipt: Receipt | None = None


class Waiting(NamedTuple):
    """A manifest that is not settled, in `state` since `since` (ms): the `cause` of its last transition, the error's
    class and text where it had one, the attempts made."""

    window_id: str
    bucket_key: str
    window_version: int
    state: str
    since: int
    cause: str
    error: str | None
    attempt: int


class Decided(NamedTuple):
    """The answer to a decision on a manifest: ``done``, ``wrong_state`` or ``missing``, and the state it is in now."""

    outcome: str
    state: str


class Decisions(Namespace):
    """What people decide of manifests, and of events that could not be taken."""

    # --- manifests ---

    def attention(self) -> Operation[list[str]]:
        """Window ids of the manifests that wait for somebody (awaiting_approval, uncertain, dead, reconciling), the
        longest first."""
        return (yield from self._listed(keys.attention))

    def _listed(self, index: Callable[[str], str]) -> Operation[list[str]]:
        yield from self.connect()
        replies = yield [Call(("ZRANGE", index(prefix), 0, -1, "WITHSCORES")) for prefix in self.prefixes]
        found = [(float(at), window_id.decode()) for reply in replies for window_id, at in as_pairs(reply)]
        return [window_id for _, window_id in sorted(found)]

    def waiting_for_people(self, state: str | None = None) -> Operation[list[Waiting]]:
        """The manifests of :meth:`attention`, in its order; only those in `state`, where it is given. That may be any
        of UNSETTLED: those that wait for nobody come in the order in which they closed."""
        if state is not None:
            _choice("state", state, UNSETTLED)
        window_ids = yield from self._listed(keys.attention if state in (None, *ATTENTION) else keys.outbox)
        found: list[Waiting] = []
        names = ("bucket", "version", "state", "since", "attempt", "error", "steps")
        for i in range(0, len(window_ids), PAGE):
            some = [(w, keys.manifest(self.prefix_of_window(w), w)) for w in window_ids[i : i + PAGE]]
            replies = yield [Call(("HMGET", name, *names)) for _, name in some]
            rows = [
                (window_id, name, facts)
                for (window_id, name), reply in zip(some, replies, strict=True)
                if (facts := answer(reply))[0] is not None and state in (None, facts[2].decode())
            ]
            if rows:
                causes = yield [Call(("HGET", name, b"step" + (facts[6] or b"0"))) for _, name, facts in rows]
                found += [
                    Waiting(
                        window_id, facts[0].decode(), int(facts[1]), facts[2].decode(), int(facts[3]),
                        (answer(cause) or b"- - - closed").decode().split(" ", 3)[3],
                        facts[5].decode() if facts[5] else None,
                        int(facts[4] or 0),
                    )
                    for (window_id, _, facts), cause in zip(rows, causes, strict=True)
                ]  # fmt: skip
        return found

    def decide(self, window_id: str, decision: str, who: str, why: str, effects: str = "") -> Operation[Decided]:
        """A person's decision on a manifest, see lua/decide.lua. Raises InvalidInput for what is none."""
        _person(who, why)
        _choice("decision", decision, DECISIONS)
        _choice("effects", effects, ("", "done", "not_done"))
        yield from self.connect()
        prefix = self.prefix_of_window(window_id)
        replies = yield [self._script("decide", prefix, window_id, decision, who, why, effects, self._nonce(16))]
        told, state = answer(replies[0])
        return Decided(told.decode(), state.decode())

    def decide_where(
        self,
        decision: str,
        who: str,
        why: str,
        state: str | None = None,
        tenant: str | None = None,
        flow: str | None = None,
        older_than: int = 0,
        effects: str = "",
        dry_run: bool = False,
    ) -> Operation[dict[str, int]]:
        """``discard`` or ``replay`` of all manifests that are not settled when it begins and match every filter given,
        `older_than` in ms since they closed: outcome of :meth:`decide` → how many. Those that are processing are left
        (``wrong_state``). Not atomic. `dry_run`: only counts what would become of them."""
        _person(who, why)
        _choice("decision", decision, ("discard", "replay"))
        _choice("effects", effects, ("", "done", "not_done"))
        if state is not None:
            _choice("state", state, UNSETTLED)
        if state is None and tenant is None and flow is None and not older_than:
            raise InvalidInput("filter", "is missing: name a state, a tenant, a flow or an age")
        yield from self.connect()
        until = (yield from self.now()) - older_than
        wanted = {state} if state else _TROUBLED if decision == "replay" else set(UNSETTLED)
        counts = {"done": 0, "wrong_state": 0}
        for prefix in self.prefixes:
            replies = yield [Call(("ZRANGE", keys.outbox(prefix), "-inf", until, "BYSCORE"))]
            ids = [window_id.decode() for window_id in answer(replies[0])]
            for i in range(0, len(ids), PAGE):
                some = ids[i : i + PAGE]
                replies = yield [Call(("HMGET", keys.manifest(prefix, w), "state", "bucket", "leader")) for w in some]
                # What was handed over together is decided together, and once.
                together: dict[str, int] = {}
                for window_id, reply in zip(some, replies, strict=True):
                    held, key, leader = (value and value.decode() for value in answer(reply))
                    if held not in wanted or tenant not in (None, tenant_of(key)) or flow not in (None, flow_of(key)):
                        continue
                    if dry_run:
                        taken = held in _TROUBLED if decision == "replay" else held != "processing"
                        counts["done" if taken else "wrong_state"] += 1
                    else:
                        decided = leader or window_id
                        together[decided] = together.get(decided, 0) + 1
                replies = yield [
                    self._script("decide", prefix, window_id, decision, who, why, effects, self._nonce(16))
                    for window_id in together
                ]
                for number, reply in zip(together.values(), replies, strict=True):
                    told = answer(reply)[0].decode()
                    counts[told] = counts.get(told, 0) + number
        return counts

    # --- the reconciliation queue ---

    def reconciliation(self) -> Operation[list[ReconcileItem]]:
        """What waits for somebody, in the order it was queued."""
        yield from self.connect()
        found: list[ReconcileItem] = []
        for partition in range(self.partitions):
            page = yield from self.queued(partition, "", "+", PAGE)
            while page:
                found += page
                page = yield from self.queued(partition, page[-1].item_id, "+", PAGE)
        return sorted(found, key=lambda item: (item.queued_at, item.item_id))

    def queued(self, partition: int, after: str, until: str, count: int) -> Operation[list[ReconcileItem]]:
        """A page of a partition's reconciliation queue, in its order: what follows the item `after` ('': its
        beginning), up to the stream id `until`."""
        start = "(" + _stream_id(after) if after else "-"
        replies = yield [Call(("XRANGE", keys.reconcile(self.prefixes[partition]), start, until, "COUNT", count))]
        return [_read_item(partition, *entry) for entry in as_stream(replies[0])]

    def queue_length(self) -> Operation[int]:
        """How many events wait for somebody."""
        yield from self.connect()
        replies = yield [Call(("XLEN", keys.reconcile(prefix))) for prefix in self.prefixes]
        return sum(int(answer(reply)) for reply in replies)

    def reconcile_item(self, item_id: str) -> Operation[ReconcileItem | None]:
        """One item of the queue; None where none of that id waits."""
        yield from self.connect()
        stream_id = _stream_id(item_id)
        partition = int(item_id.partition("-")[0])
        if partition >= self.partitions:
            raise InvalidInput("item", "is none of this namespace")
        replies = yield [Call(("XRANGE", keys.reconcile(self.prefixes[partition]), stream_id, stream_id))]
        found = [_read_item(partition, *entry) for entry in as_stream(replies[0])]
        return found[0] if found else None

    def resolve(self, item: ReconcileItem | str, decision: str, who: str, why: str) -> Operation[Resolved]:
        """Takes an event out of the reconciliation queue, given the item or its id: ``accept`` (into the bucket's next
        window) or ``discard``."""
        _person(who, why)
        _choice("decision", decision, RESOLUTIONS)
        yield from self.connect()
        if isinstance(item, str):
            found = yield from self.reconcile_item(item)
            if found is None:
                return Resolved(item, "missing")
            item = found
        elif not isinstance(item, ReconcileItem):
            raise InvalidInput("item", f"must be a reconciliation item or its id, not {type(item).__name__}")
        event = item.event
        replies = yield [
            self._script(
                "resolve", self.prefix_of(event.bucket_key), self._nonce(12), "", "", _stream_id(item.item_id),
                decision, who, why, event.bucket_key, *packed_again(event),
            )
        ]  # fmt: skip
        told, text = answer(replies[0])
        if told != b"done":
            return Resolved(item.item_id, "missing")
        receipt = read_receipt(event, event.bucket_key, text) if text else None
        return Resolved(item.item_id, RESOLUTIONS[decision], receipt)

    def resolve_where(
        self,
        decision: str,
        who: str,
        why: str,
        code: str | None = None,
        tenant: str | None = None,
        flow: str | None = None,
        older_than: int = 0,
        dry_run: bool = False,
    ) -> Operation[dict[str, int]]:
        """The same for all items that wait when it begins and match every filter given, `older_than` in ms: outcome →
        how many. Not atomic. `dry_run`: only counts them."""
        _person(who, why)
        _choice("decision", decision, RESOLUTIONS)
        if code is not None:
            _choice("code", code, CODES)
        if code is None and tenant is None and flow is None and not older_than:
            raise InvalidInput("filter", "is missing: name a code, a tenant, a flow or an age")
        yield from self.connect()
        now = yield from self.now()
        counts = dict.fromkeys([RESOLUTIONS[decision], "missing"], 0)
        for partition, prefix in enumerate(self.prefixes):
            replies = yield [Call(("XREVRANGE", keys.reconcile(prefix), "+", "-", "COUNT", 1))]
            for last, _ in as_stream(replies[0]):
                page = yield from self.queued(partition, "", last.decode(), 100)
                while page:
                    for item in page:
                        if (
                            code in (None, item.code)
                            and tenant in (None, item.event.tenant)
                            and flow in (None, item.event.flow)
                            and item.queued_at + older_than <= now
                        ):
                            if dry_run:
                                outcome = RESOLUTIONS[decision]
                            else:
                                outcome = (yield from self.resolve(item, decision, who, why)).outcome
                            counts[outcome] += 1
                    page = yield from self.queued(partition, page[-1].item_id, last.decode(), 100)
        return counts


def _stream_id(item_id: str) -> str:
    """The id in its partition's queue of an item: what follows ``<partition>-``."""
    parts = str(item_id).split("-")
    if len(parts) != 3 or not all(part.isascii() and part.isdigit() and len(part) <= 19 for part in parts):
        raise InvalidInput("item", "is no id of a reconciliation item")
    return f"{parts[1]}-{parts[2]}"


def _read_item(partition: int, stream_id: bytes, pairs: Sequence[tuple[bytes, bytes]]) -> ReconcileItem:
    fields = dict(pairs)
    event, _, _ = Event.from_stored(fields[b"event_id"], fields[b"bucket_key"].decode(), fields[b"envelope"])
    return ReconcileItem(
        f"{partition}-{stream_id.decode()}",
        int(fields[b"at"]),
        fields[b"code"].decode(),
        event,
        fields[b"digest"].decode(),
        tuple(fields[b"known"].decode().split()),
        int(fields.get(b"window", 0)),
        fields.get(b"why", b"").decode(),
    )


def _choice(field: str, value: object, choices: Iterable[str]) -> None:
    if not isinstance(value, str) or value not in choices:
        raise InvalidInput(field, f"must be one of {', '.join(filter(None, choices))}")


def _person(who: object, why: object) -> None:
    for field, value, most in (("by", who, 200), ("reason", why, 1000)):
        if not isinstance(value, str) or not value.strip() or len(value) > most:
            raise InvalidInput(field, f"must be 1 to {most} characters")
        if any(ord(character) < 32 for character in value):
            raise InvalidInput(field, "must not contain control characters")
        if any(0xD800 <= ord(character) < 0xE000 for character in value):
            raise InvalidInput(field, "must not contain a lone surrogate")
