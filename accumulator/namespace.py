"""What every operation stands on: the namespace, its partitions, clock, ceilings and policies."""

from __future__ import annotations

import math
import secrets
import time
from collections.abc import Callable
from typing import Any, Final, NamedTuple

from accumulator import keys
from accumulator.errors import InvalidInput, NamespaceMismatch, UnknownFlow
from accumulator.health import Health, read_health, read_setup
from accumulator.manifest import Contents, Manifest, replay
from accumulator.policy import Policy, shown
from accumulator.store import Call, Operation, answer, as_instant, as_pairs, as_stream

FORMAT: Final = 1
"""Version of the storage format; a namespace with a higher one is refused."""

ROUND_EVENTS: Final = 10_000
PAGE: Final = 1000

_CEILINGS: Final = {"max_unsettled": (keys.outbox, 1_000_000), "max_reconcile": (keys.reconcile, 100_000)}


def _nonce(length: int) -> str:
    return secrets.token_hex(length // 2)


class LoadedPolicy(NamedTuple):
    """What became of a policy: its `version` in the namespace, and whether it is ``new``, the ``same`` as before, or
    the one that was there is ``kept`` (and `differs`)."""

    flow: str
    version: int
    outcome: str

    @property
    def differs(self) -> bool:
        return self.outcome == "kept"


class Namespace:
    """One namespace, as its operations know it.

    `partitions` is the count the namespace must have; None takes what is there, or 64 for a new one. `clock` gives the
    instant (ms) in a namespace of a virtual clock, and makes a new namespace one.
    """

    def __init__(
        self,
        namespace: str = "acc",
        partitions: int | None = None,
        clock: Callable[[], int] | None = None,
        nonce: Callable[[int], str] = _nonce,
    ) -> None:
        self.namespace = keys.check_namespace(namespace)
        if partitions is not None and (type(partitions) is not int or not 1 <= partitions <= keys.MAX_PARTITIONS):
            raise NamespaceMismatch(f"a namespace has 1 to {keys.MAX_PARTITIONS} partitions, not {shown(partitions)}")
        self._wanted = partitions
        self._clock = clock
        self._nonce = nonce
        self.cluster = False
        """Whether the server is a cluster: then scripts are told the keys they derive."""
        self.partitions = 0
        self.prefixes: list[str] = []
        self._flows: set[str] = set()
        self._policies: dict[tuple[str, int], tuple[float, Policy]] = {}
        self._ceilings = {name: default for name, (_, default) in _CEILINGS.items()}
        self._allowances: dict[str, list[int]] | None = None
        self._counted = -math.inf

    def connect(self) -> Operation[None]:
        """Meets the namespace, or makes it. Raises NamespaceMismatch where it was made for something else."""
        if not self.prefixes:
            yield from self.meet()

    def meet(self) -> Operation[bool]:
        """The same, also where it was met before: it may have been wiped since. Whether it was, and was made anew."""
        meta = keys.meta(self.namespace)
        mode = "live" if self._clock is None else "virtual"
        replies = yield [Call(("HGETALL", meta))]
        found = dict(as_pairs(replies[0]))
        new = not {b"format", b"partitions", b"mode"} <= found.keys()
        if new:
            self._flows.clear()
            replies = yield [
                Call(("HSETNX", meta, field, value))
                for field, value in (
                    ("format", FORMAT),
                    ("partitions", self._wanted or self.partitions or 64),
                    ("mode", mode),
                )
            ]
            for reply in replies:
                answer(reply)
            replies = yield [Call(("HGETALL", meta))]
            found = dict(as_pairs(replies[0]))
        if int(found[b"format"]) > FORMAT:
            raise NamespaceMismatch(
                f"namespace {self.namespace} is in format {int(found[b'format'])}, this release reads up to {FORMAT}: "
                "upgrade event-accumulator, or use another namespace"
            )
        there = int(found[b"partitions"])
        if self._wanted is not None and self._wanted != there:
            raise NamespaceMismatch(
                f"namespace {self.namespace} has {there} partitions, not {self._wanted}: set partitions to {there} (or "
                "leave it out), or use another namespace"
            )
        if found[b"mode"].decode() != mode:
            raise NamespaceMismatch(
                f"namespace {self.namespace} is {found[b'mode'].decode()}, this client {mode}: a namespace with a "
                "virtual clock is for tests and simulation only; use another namespace"
            )
        for name in _CEILINGS:
            self._ceilings[name] = int(found.get(name.encode(), self._ceilings[name]))
        anew = new and bool(self.prefixes)
        self.partitions = there
        self.prefixes = [keys.prefix(self.namespace, p) for p in range(there)]
        return anew

    def prefix_of(self, bucket_key: str) -> str:
        return self.prefixes[keys.partition_of(bucket_key, self.partitions)]

    def prefix_of_window(self, window_id: str, field: str = "window_id") -> str:
        """A window id names its partition, and so does a ladder's; one that no release made is refused."""
        text = str(window_id)  # a caller without types may give anything
        if text.isascii() and text.isalnum() and len(text) >= 20:
            try:
                return self.prefixes[int(text[11:14], 16)]
            except (ValueError, IndexError):
                pass
        raise InvalidInput(field, "is none of this namespace")

    def _script(self, name: str, prefix: str, *args: Any) -> Call:
        return Call.run(name, keys.timers(prefix), self._now(), *args)

    # --- its clock ---

    def _now(self) -> int | str:
        return "" if self._clock is None else self._clock()

    def server_time(self) -> Operation[int]:
        """The clock that the scripts go by, µs since the epoch; of several nodes' clocks the one that is furthest."""
        if self._clock is not None:
            return self._clock() * 1000
        replies = yield [Call(("TIME",))]
        return as_instant(replies[0])

    def now(self) -> Operation[int]:
        """The same in ms."""
        return (yield from self.server_time()) // 1000

    @property
    def channel(self) -> str:
        """Where ``<partition> <instant ms>`` is published when an earlier timer appears; and, with the instant of the
        call, when a manifest's turn has come."""
        return f"{self.namespace}:wake"

    # --- ceilings ---

    @property
    def ceilings(self) -> dict[str, int]:
        """`max_unsettled` and `max_reconcile` of the namespace, as they were when it was met."""
        return dict(self._ceilings)

    def set_ceilings(self, max_unsettled: int, max_reconcile: int) -> Operation[None]:
        """How many unsettled manifests and reconciliation items the namespace may hold; kept in it, for all clients
        that connect from now on."""
        yield from self.connect()
        self._ceilings = {"max_unsettled": max_unsettled, "max_reconcile": max_reconcile}
        self._counted = -math.inf
        pairs = [part for pair in self._ceilings.items() for part in pair]
        replies = yield [Call(("HSET", keys.meta(self.namespace), *pairs))]
        answer(replies[0])

    def _measure(self) -> Operation[None]:
        """Counts what the ceilings bound, once a second, and before each call when one is near: when a round of calls
        could reach it. A partition may then hold what it holds plus what the namespace has left; far from the ceilings
        nothing is passed to the scripts."""
        if time.monotonic() - self._counted < 1:
            return
        replies = yield [
            Call(("ZCARD" if count is keys.outbox else "XLEN", count(prefix)))
            for count, _ in _CEILINGS.values()
            for prefix in self.prefixes
        ]
        counts = [int(answer(reply)) for reply in replies]
        near = False
        allowances = {}
        for i, name in enumerate(_CEILINGS):
            own = counts[i * self.partitions : (i + 1) * self.partitions]
            left = self._ceilings[name] - sum(own)
            near = near or left < max(3 * ROUND_EVENTS, self._ceilings[name] // 10)
            allowances[name] = [held + max(left, 0) for held in own]
        if near:
            self._counted, self._allowances = -math.inf, allowances
        else:
            self._counted, self._allowances = time.monotonic(), None

    # --- policies ---

    def load_policy(self, flow: str, policy: Policy, only_new: bool = False) -> Operation[LoadedPolicy]:
        """Makes a policy the flow's latest, in every partition; equal content is no new version. `only_new`: where the
        flow has one already, that is kept."""
        yield from self.connect()
        replies = yield [
            Call.run(
                "number_policy",
                keys.meta(self.namespace),
                f"flow:{flow}",
                policy.canonical_json(),
                "1" if only_new else "0",
            )
        ]
        number, outcome, text = answer(replies[0])
        loaded = LoadedPolicy(flow, int(number), outcome.decode())
        yield from self._install(flow, loaded.version, Policy.from_json(text.decode()))
        return loaded

    def _install(self, flow: str, version: int, policy: Policy) -> Operation[None]:
        fields = policy.fields(version, (yield from self.now()))
        rules = fields.pop(str(version))
        rest = [part for pair in fields.items() for part in pair]
        replies = yield [
            Call.run("load_policy", keys.policy(prefix, flow), version, rules, *rest) for prefix in self.prefixes
        ]
        for reply in replies:
            answer(reply)
        self._flows.add(flow)

    def repair_policies(self) -> Operation[int]:
        """Brings every partition to the namespace's latest policies; the number of partitions and flows that were
        behind."""
        yield from self.connect()
        flows = yield from self.policies()
        behind = 0
        for flow, (version, policy) in flows.items():
            replies = yield [Call(("HGET", keys.policy(prefix, flow), "latest")) for prefix in self.prefixes]
            latest: list[bytes | None] = [answer(reply) for reply in replies]
            late = sum(1 for text in latest if text is None or not text.startswith(b"%d " % version))
            if late:
                behind += late
                yield from self._install(flow, version, policy)
        return behind

    def policies(self) -> Operation[dict[str, tuple[int, Policy]]]:
        """Flow → (version, policy), the latest of each."""
        yield from self.connect()
        replies = yield [Call(("HGETALL", keys.meta(self.namespace)))]
        found = {}
        for field, value in as_pairs(replies[0]):
            if field.startswith(b"flow:"):
                version, _, text = value.decode().partition(" ")
                found[field.decode().removeprefix("flow:")] = (int(version), Policy.from_json(text))
        return dict(sorted(found.items()))

    def policy_of(self, manifest: Manifest) -> Operation[Policy]:
        """The policy that a manifest's window obeyed. Its version never changes; read anew once a minute all the same,
        since the namespace may have been wiped."""
        yield from self.connect()
        known = self._policies.get((manifest.flow, manifest.flow_policy))
        if known is not None and known[0] > time.monotonic():
            return known[1]
        prefix = self.prefix_of(manifest.bucket_key)
        field = f"{manifest.flow_policy}:json"
        replies = yield [Call(("HGET", keys.policy(prefix, flow), field)) for flow in (manifest.flow, "default")]
        for reply in replies:
            text = answer(reply)
            if text is not None:
                policy = Policy.from_json(text.decode())
                if len(self._policies) >= 1000:
                    self._policies.clear()
                self._policies[manifest.flow, manifest.flow_policy] = time.monotonic() + 60, policy
                return policy
        raise UnknownFlow(manifest.flow)

    def _bring(self, unknown: UnknownFlow) -> Operation[None]:
        """Installs a flow's policy where the namespace has one that a partition does not; else raises UnknownFlow."""
        self._flows.clear()
        found = yield from self.policies()
        for flow in (unknown.flow, "default"):
            if flow in found:
                version, policy = found[flow]
                yield from self._install(flow, version, policy)
                return
        raise unknown

    def _know_flows(self, wanted: set[str]) -> Operation[None]:
        """Refuses a flow without a policy before anything is sent."""
        new = wanted - self._flows
        if not new:
            return
        flows = sorted(new)
        replies = yield [Call(("HMGET", keys.meta(self.namespace), "flow:default", *(f"flow:{f}" for f in flows)))]
        default, *own = answer(replies[0])
        for flow, text in zip(flows, own, strict=True):
            if text is None and default is None:
                raise UnknownFlow(flow)
        self._flows |= new

    # --- reading ---

    def counters(self) -> Operation[dict[str, int]]:
        """The namespace's counters, summed over partitions."""
        yield from self.connect()
        replies = yield [Call(("HGETALL", keys.stats(prefix))) for prefix in self.prefixes]
        total: dict[str, int] = {}
        for reply in replies:
            for name, value in as_pairs(reply):
                text = name.decode()
                total[text] = total.get(text, 0) + int(value)
        return dict(sorted(total.items()))

    def health(self) -> Operation[Health]:
        """How it goes: see :mod:`accumulator.health`. Raises ServerError where the server can't be asked."""
        yield from self.connect()
        return (yield from read_health(self.namespace, self.prefixes, self._now(), self._ceilings))

    def server_warnings(self) -> Operation[list[str]]:
        """What of the server's set-up may lose what it accepted, a sentence each."""
        problems, warnings, _ = yield from read_setup()
        return problems + warnings

    def _contents(self, stream: str, bucket_key: str, kept: bytes | None) -> Operation[Contents]:
        log = []
        start = "-"
        while True:
            replies = yield [Call(("XRANGE", stream, start, "+", "COUNT", PAGE))]
            page = as_stream(replies[0])
            log += page
            if len(page) < PAGE:
                return replay(bucket_key, log, kept)
            start = "(" + page[-1][0].decode()
