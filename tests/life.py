"""A namespace under a clock that a test moves, and what must hold in it at any time: for the tests of what happens to a
manifest after its window closed."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import Any, Final, TypeVar

from accumulator.attempts import Grant, Taken
from accumulator.client import Accumulator
from accumulator.context import Context
from accumulator.decisions import Decided, ReconcileItem, Resolved
from accumulator.handlers import Handler, find_handler
from accumulator.manifest import SETTLED, Manifest
from accumulator.namespace import LoadedPolicy
from accumulator.runner import run_attempt
from accumulator.store import Operation
from accumulator.testing import VirtualClock
from accumulator.windows import Receipt
from tests.conftest import event

T = TypeVar("T")

TOKEN: Final = "0123456789abcdef"
OTHER: Final = "fedcba9876543210"
LEASE: Final = 60_000
WATCH: Final = 30_000
DAY: Final = 86_400_000
KEY: Final = "t:f:1"

ATTENTION: Final = {"dead", "uncertain", "reconciling", "awaiting_approval"}
IN_FLIGHT: Final = {"dispatched", "processing"}
TURN: Final = {"closed", "dispatched", "processing", "retrying", "awaiting_approval"}


class Life:
    """One namespace. `now` is ms since the beginning; `check` says after each step what does not agree."""

    def __init__(self, client: Any, namespace: str, partitions: int = 1) -> None:
        self.client = client
        self.clock = VirtualClock()
        self.start = self.clock.now
        self.acc = Accumulator(client, namespace=namespace, partitions=partitions, clock=self.clock)
        self.ops = self.acc.operations
        self.do(self.ops.connect())

    @property
    def now(self) -> int:
        return self.clock.now - self.start

    def do(self, operation: Operation[T]) -> T:
        return self.acc.store.perform(operation)

    # --- before the closing ---

    def policy(self, flow: str = "f", **options: Any) -> LoadedPolicy:
        return self.acc.load_policy(flow, {"inactivity": "10s", "sink": "direct", **options})

    def push(self, event_id: str, key: str = KEY, **fields: Any) -> Receipt:
        return self.acc.push(event(event_id, key, self.clock, **fields))

    def close(self, *ids: str, key: str = KEY, **fields: Any) -> str:
        """Pushes these events, closes the window, and gives its id."""
        for event_id in ids:
            self.push(event_id, key, **fields)
        return self.acc.flush(key).closed_windows[-1].window_id

    def close_empty(self, key: str = KEY) -> str:
        """A window that was emptied before it closed."""
        event_id = f"gone {self.now} {self.client.dbsize()}"
        self.push(event_id, key)
        assert self.acc.retract(key, event_id).outcome == "retracted"
        return self.close(key=key)

    # --- after it ---

    def tick(self, ms: int = 0) -> None:
        """Lets `ms` pass, and does what is due then."""
        self.clock.advance(ms, worker=False)
        for partition in range(self.ops.partitions):
            while True:
                tick = self.do(self.ops.tick(partition, 500))
                assert tick.failure is None
                assert tick.orphans == 0
                if tick.handled < 500 and (tick.next_due is None or tick.next_due > self.clock.now):
                    break

    def pass_days(self, days: int) -> None:
        """As tick, hour by hour, with a janitor."""
        for _ in range(days * 24):
            self.tick(3_600_000)
            self.record()

    def record(self) -> None:
        """What the janitor does."""
        for window_id in self.do(self.ops.unrecorded()):
            manifest = self.acc.manifest(window_id)
            assert manifest is not None
            self.do(self.ops.record(manifest))

    def take(self, count: int = 1, sink: str = "direct", limits: dict[str | None, int] | None = None) -> list[Taken]:
        return [
            taken
            for partition in range(self.ops.partitions)
            for taken in self.do(self.ops.take(partition, sink, count, WATCH, limits))
        ]

    def taken(self, count: int = 100, **options: Any) -> list[str]:
        return [taken.window_id for taken in self.take(count, **options)]

    def begin(
        self, window_id: str, attempt: int = 1, token: str = TOKEN, lease: int = LEASE, most: int = 5, **more: Any
    ) -> Grant:
        return self.do(self.ops.begin(window_id, attempt, token, lease, most, **{"pause": (1, 1), **more}))

    def begun(self, window_id: str, token: str = TOKEN, most: int = 5) -> Manifest:
        """Takes the next manifest, which is that one, and begins."""
        [taken] = self.take()
        assert taken.window_id == window_id
        manifest = self.begin(window_id, taken.attempt, token, most=most).manifest
        assert manifest is not None
        return manifest

    def settle(
        self, window_id: str, ending: str, cause: str = "x", token: str = TOKEN, delay: int = 0, **options: Any
    ) -> str:
        return self.do(self.ops.settle(window_id, token, ending, cause, delay, **options))

    def effect(self, window_id: str, name: str, step: str, nonce: str = "n1", result: str = "", **token: str) -> str:
        return self.do(self.ops.effect(window_id, token.get("token", TOKEN), name, step, nonce, result))[0]

    def decide(self, window_id: str, decision: str, effects: str = "") -> Decided:
        return self.do(self.ops.decide(window_id, decision, "ana", "seen", effects))

    def resolve(self, item: ReconcileItem, decision: str) -> Resolved:
        return self.do(self.ops.resolve(item, decision, "ana", "seen"))

    def manifest(self, window_id: str) -> Manifest:
        manifest = self.acc.manifest(window_id)
        assert manifest is not None
        return manifest

    def state(self, window_id: str) -> str:
        return self.manifest(window_id).state

    def states(self, key: str = KEY) -> list[str]:
        return [manifest.state for manifest in self.acc.manifests(key)]

    def story(self, window_id: str) -> list[tuple[int, str, int, str]]:
        """The timeline, in ms since the beginning."""
        return [(at - self.start, *rest) for at, *rest in self.manifest(window_id).timeline]  # type: ignore[misc]

    def context(self, manifest: Manifest, token: str = TOKEN) -> Context:
        """What a handler gets."""
        return Context(self.acc, _handler(manifest.flow), (manifest,), token)

    def work(self, step: int = 1_000, turns: int = 1_000) -> list[tuple[str, str | None]]:
        """Runs the registered handlers until nothing is left to do: (window id, how it ended) of each attempt."""
        ended = []
        for _ in range(turns):
            self.tick(step)
            for taken in self.take(20):
                ended.append((taken.window_id, run_attempt(self.acc, taken.window_id, taken.attempt)))
                self.check()
            busy = {"dispatched", "processing", "retrying"}
            if not any(fields.get("state") in busy for fields in self.all_manifests().values()) and not self.ready():
                return ended
        raise AssertionError("there is no end to it")

    # --- what there is ---

    def all_keys(self) -> set[str]:
        return {key.decode() for key in self.client.scan_iter(count=5000)}

    def all_manifests(self) -> dict[str, dict[str, str]]:
        return Snapshot(self).manifests

    def ready(self) -> Counter[str]:
        return Snapshot(self).ready

    def check(self) -> None:
        """Fails where a manifest and the indices over it do not agree."""
        wrong = list(Snapshot(self).wrong())
        assert not wrong, "\n".join(wrong)


class Snapshot:
    """All that stands on the server about manifests, read at once."""

    def __init__(self, life: Life) -> None:
        reads = {
            "manifest:": "hgetall", "bucket:": "hgetall", "policy:": "hgetall", "inflight": "hgetall",
            "ready:": "lrange", "tenants:": "lrange", "timers": "zrange", "outbox": "zrange", "attention": "zrange",
        }  # fmt: skip
        self.prefixes = life.ops.prefixes
        self.prefix_of = life.ops.prefix_of
        found: list[tuple[str, str]] = []
        pipe = life.client.pipeline(transaction=False)
        for key in sorted(life.all_keys()):
            prefix, _, name = key.partition("}:")
            kind = name.partition(":")[0] + (":" if ":" in name else "")
            if kind in reads:
                found.append((prefix + "}:", name))
                options: Any = {"hgetall": (), "lrange": (0, -1), "zrange": (0, -1, False, True)}[reads[kind]]
                getattr(pipe, reads[kind])(key, *options)
        self.held: dict[tuple[str, str], Any] = {}
        for where, reply in zip(found, pipe.execute(), strict=True):
            if isinstance(reply, dict):
                self.held[where] = {name.decode(): value.decode() for name, value in reply.items()}
            elif reply and isinstance(reply[0], tuple):
                self.held[where] = {member.decode(): score for member, score in reply}
            else:
                self.held[where] = [member.decode() for member in reply]
        self.manifests: dict[str, dict[str, str]] = self.named("manifest")
        self.ready = Counter(w for (_, name), listed in self.held.items() if name.startswith("ready:") for w in listed)

    def named(self, kind: str) -> dict[str, Any]:
        """What follows ``<prefix><kind>:`` → what is there."""
        return {
            name.removeprefix(f"{kind}:"): held for (_, name), held in self.held.items() if name.startswith(f"{kind}:")
        }

    def wrong(self) -> Iterator[str]:
        buckets: dict[str, list[str]] = defaultdict(list)
        for window_id in sorted(self.manifests, key=lambda w: int(self.manifests[w]["version"])):
            buckets[self.manifests[window_id]["bucket"]].append(window_id)
        for prefix in self.prefixes:
            own = {w: f for w, f in self.manifests.items() if self.prefix_of(f["bucket"]) == prefix}
            yield from self.indices(prefix, own)
            yield from self.tenants(prefix)
        for key, window_ids in buckets.items():
            yield from self.bucket(key, {w: self.manifests[w] for w in window_ids})
        for window_id in self.ready.keys() - self.manifests.keys():
            yield f"{window_id} is ready, and not known"

    def indices(self, prefix: str, manifests: dict[str, dict[str, str]]) -> Iterator[str]:
        unsettled = {w for w, fields in manifests.items() if fields["state"] not in SETTLED}
        outbox = self.held.get((prefix, "outbox"), {}).keys()
        if outbox != unsettled:
            yield f"unsettled are {sorted(unsettled)}, in the outbox {sorted(outbox)}"
        waiting = {w for w, fields in manifests.items() if fields["state"] in ATTENTION}
        attention = self.held.get((prefix, "attention"), {}).keys()
        if attention != waiting:
            yield f"{sorted(waiting)} wait for somebody, listed are {sorted(attention)}"
        flying = Counter(
            fields["bucket"].partition(":")[0]
            for fields in manifests.values()
            if fields["state"] in IN_FLIGHT and not {"leader", "back"} & fields.keys()
        )
        counted = {tenant: int(n) for tenant, n in self.held.get((prefix, "inflight"), {}).items()}
        if flying != counted:
            yield f"in flight are {dict(flying)}, counted {counted}"
        timers = self.held.get((prefix, "timers"), {})
        for window_id, fields in manifests.items():
            state, timer = fields["state"], timers.get(f"m:{window_id}")
            if state == "processing" and "leader" not in fields:
                if timer != float(fields["lease"]):
                    yield f"{window_id}: its lease ends at {fields['lease']}, its timer at {timer}"
            elif timer and (state not in ("dispatched", "retrying", "awaiting_approval") or "leader" in fields):
                yield f"{window_id} is {state}, and has a timer"
            if (state in SETTLED) != bool({f"p:{window_id}", f"x:{window_id}"} & timers.keys()):
                yield f"{window_id} is {state}, and its retention is {'not ' if state in SETTLED else ''}timed"

    def tenants(self, prefix: str) -> Iterator[str]:
        """A tenant stands among those of a sink, once, as long as it has anything ready."""
        waiting: dict[str, list[str]] = defaultdict(list)
        for at, name in self.held:
            kind, _, rest = name.partition(":")
            if at == prefix and kind == "ready":
                sink, _, tenant = rest.partition(":")
                waiting[sink].append(tenant)
        for sink in {name.partition(":")[2] for at, name in self.held if at == prefix and name.startswith("tenants:")}:
            if sorted(self.held[prefix, f"tenants:{sink}"]) != sorted(waiting[sink]):
                yield f"tenants of {sink} are {self.held[prefix, f'tenants:{sink}']}, and {waiting[sink]} wait"
            del waiting[sink]
        if waiting:
            yield f"{dict(waiting)} wait, and nobody knows of them"

    def bucket(self, key: str, manifests: dict[str, dict[str, str]]) -> Iterator[str]:
        """What waits for its turn, and why; who is ready."""
        prefix = self.prefix_of(key)
        bucket = self.held.get((prefix, f"bucket:{key}"), {})
        turn, waits, joins = bucket.get("turn"), bucket.get("waits", "").split(), bucket.get("joins", "").split()
        timers = self.held.get((prefix, "timers"), {})
        rules = self.held[prefix, f"policy:{key.split(':')[1]}"]
        for name, listed in (("waits", waits), ("joins", joins)):
            versions = [int(manifests[w]["version"]) for w in listed]
            if versions != sorted(set(versions)):
                yield f"{key}: {name} holds the versions {versions}"
        others = [w for w, fields in manifests.items() if fields["state"] == "closed" and w not in joins]
        for window_id, fields in manifests.items():
            state, leader = fields["state"], fields.get("leader", window_id)
            ordered = rules[manifests[leader]["policy"]].split()[19] == "1"
            wanted = 0
            if state == "closed":
                wanted = 1 if turn == window_id or (not ordered and window_id not in joins) else 0
                if not wanted and not (turn or "open" in bucket or (not ordered and others)):
                    yield f"{window_id} is closed, and nobody's turn it is"
            elif state == "retrying" and "leader" not in fields:
                wanted = 0 if window_id in waits or f"m:{window_id}" in timers else 1
            elif state == "dispatched" and "leader" not in fields:
                wanted = 1 if "back" in fields else 0
                if not wanted and f"m:{window_id}" not in timers:
                    yield f"{window_id} is dispatched, and nobody watches it"
            if self.ready[window_id] != wanted:
                yield f"{window_id} ({fields['version']}) is {state}, and {self.ready[window_id]} times ready"
            at_work = state in ("dispatched", "processing") or (state == "retrying" and leader not in waits)
            if ordered and at_work and turn != leader:
                yield f"{window_id} ({fields['version']}) is {state}, and the turn is {turn}"
            if window_id in waits and state != "retrying":
                yield f"{window_id} waits for its turn, and is {state}"
            if window_id in joins and state != "closed":
                yield f"{window_id} gave way, and is {state}"
        if turn is not None and manifests[turn]["state"] not in TURN:
            yield f"{key}: it is the turn of one that is {manifests[turn]['state']}"
        if waits and turn is None:
            yield f"{key}: {waits} wait, and nobody's turn it is"


def _handler(flow: str) -> Handler:
    try:
        return find_handler(flow)
    except Exception:
        return Handler(flow, None, None, 5, 60_000, 1_000, 600_000, DAY)
