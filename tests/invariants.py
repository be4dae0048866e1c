"""What agreement between the keys means: read from the server directly, by none of the package's operations.

`check_invariants(client, namespace)` fails with everything that does not hold. It knows the key space (see
accumulator/keys.py and the parts in accumulator/lua/) and SPEC.md, and may be called after any operation, at any
instant at which no call is under way.
"""

from __future__ import annotations

import itertools
import re
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple

import orjson
import redis

from accumulator.envelope import Event

STATES = {"closed", "dispatched", "processing", "retrying", "awaiting_approval", "uncertain", "dead", "reconciling"}
SETTLED = {"confirmed", "refused", "discarded", "superseded", "empty"}
REASONS = {
    "inactivity", "max_age", "max_events", "max_bytes", "max_weight", "terminal", "starter", "cutoff", "deadline",
    "policy_change", "flush",
}  # fmt: skip
TURN = {"closed", "dispatched", "processing", "retrying", "awaiting_approval"}
ATTENTION = {"dead", "uncertain", "reconciling", "awaiting_approval"}
# Of these the window ends by the clock alone, strictly after its last acceptance.
BY_CLOCK = {"inactivity", "max_age", "cutoff"}
CODES = {
    "conflict", "unknown_kind", "occurred_in_future", "stale_policy_version", "policy_changed", "too_old", "late",
    "set_aside",
}  # fmt: skip

SINGLE = {
    "timers": "zset", "open": "zset", "outbox": "zset", "attention": "zset", "reconcile": "stream", "audit": "stream",
    "stats": "hash", "watched": "hash", "orphans": "hash", "inflight": "hash", "taking": "hash", "unrecorded": "set",
}  # fmt: skip
NAMED = {
    "bucket": "hash", "ids": "hash", "order": "hash", "manifests": "zset", "manifest": "hash", "policy": "hash",
    "events": "stream", "kept": "string", "effects": "hash", "stages": "hash", "checkpoint": "string",
    "tenants": "list", "ready": "list", "ladder": "hash", "ladderargs": "string", "ladderdef": "hash",
    "ladders": "hash", "noticed": "hash", "stray": "stream",
}  # fmt: skip
LADDER_STATES = ("running", "paused", "cancelled", "exhausted", "escalated")
WINDOW_ID = re.compile(r"[0-9a-z]{20,}")

# A stream through a script, since the client's XRANGE gives a dict, which would hide a field that is there twice.
READ: dict[str, Callable[[Any, Any], object]] = {
    "hash": lambda pipe, key: pipe.hgetall(key),
    "zset": lambda pipe, key: pipe.zrange(key, 0, -1, withscores=True),
    "list": lambda pipe, key: pipe.lrange(key, 0, -1),
    "set": lambda pipe, key: pipe.smembers(key),
    "string": lambda pipe, key: pipe.get(key),
    "stream": lambda pipe, key: pipe.eval("return redis.call('XRANGE', KEYS[1], '-', '+')", 1, key),
}

Log = list[tuple[int, list[tuple[str, bytes]]]]


def check_invariants(client: redis.Redis, namespace: str, *, purged: bool = False) -> None:
    """Fails, naming all, where the namespace's keys disagree. `client` does not decode. `purged`: retention may have
    taken some of what was accepted."""
    found = list(problems(client, namespace, purged))
    assert not found, f"{len(found)} invariants are broken:\n  " + "\n  ".join(found[:20])


def problems(client: redis.Redis, namespace: str, purged: bool = False) -> Iterator[str]:
    """What does not hold, a line each."""
    names = sorted(client.scan_iter(match=f"{namespace}:*", count=1000))
    if not names:
        return
    with client.pipeline(transaction=False) as pipe:
        for name in names:
            pipe.type(name)
            pipe.pttl(name)
        replies = pipe.execute()
    types = {name.decode(): kind.decode() for name, kind in zip(names, replies[::2], strict=True)}
    for name, ttl in zip(names, replies[1::2], strict=True):
        if ttl >= 0:
            yield f"{name.decode()} expires by itself"

    if types.pop(f"{namespace}:workers", "zset") != "zset":
        yield f"{namespace}:workers is no sorted set"
    meta = types.pop(f"{namespace}:meta", None)
    if meta != "hash":
        yield f"{namespace}:meta is {meta or 'missing'}"
        return
    count = int(client.hget(f"{namespace}:meta", "partitions") or 0)
    partitions: dict[int, dict[str, str]] = {}
    for name, kind in types.items():
        tag = re.match(r"[^{]*:\{(\d+)\}:(.+)$", name, re.DOTALL)
        if tag is None or not name.startswith(f"{namespace}:{{") or int(tag[1]) >= count:
            yield f"{name} lies in no partition"
            continue
        partitions.setdefault(int(tag[1]), {})[tag[2]] = kind
    for number, keys in sorted(partitions.items()):
        partition = Partition(number, count, f"{namespace}:{{{number}}}:", purged)
        for line in partition.load(client, keys):
            yield f"{{{number}}} {line}"
        for line in partition.problems():
            yield f"{{{number}}} {line}"


def contents(client: redis.Redis, match: str = "*") -> dict[str, Any]:
    """Key → what it holds, as text: a dict of fields or scores, a list, a text, or a stream's [(id, fields …)]."""
    names = sorted(client.scan_iter(match=match, count=1000))
    with client.pipeline(transaction=False) as pipe:
        for name in names:
            pipe.type(name)
        kinds = [kind.decode() for kind in pipe.execute()]
        for name, kind in zip(names, kinds, strict=True):
            READ[kind](pipe, name)
        replies = pipe.execute()

    def text(value: Any) -> Any:
        if isinstance(value, bytes):
            return value.decode()
        if isinstance(value, float):
            return int(value)
        if isinstance(value, dict):
            return {text(field): text(held) for field, held in value.items()}
        return [text(one) for one in value]

    held = {text(name): text(reply) for name, reply in zip(names, replies, strict=True)}
    return {name: dict(held[name]) if kind == "zset" else held[name] for name, kind in zip(held, kinds, strict=True)}


@lru_cache(10_000)
def digest_of(envelope: bytes) -> str:
    """The content digest of a stored event, made anew from its content."""
    return Event.from_stored("", "t:f:1", envelope)[0].content_digest


@lru_cache(1000)
def policy_of(text: str) -> dict[str, Any]:
    loaded: dict[str, Any] = orjson.loads(text)
    return loaded


class Taken(NamedTuple):
    """An entry that a window took, retracted or not; `at` in ms."""

    event_id: str
    envelope: dict[str, Any]
    digest: str
    at: int


@dataclass
class Window:
    """What a window's log says, open or closed."""

    ids: list[str] = field(default_factory=list)
    entries: int = 0
    bytes: int = 0
    weight: int = 0
    last: int = 0
    gone: int = 0
    retracted: list[str] = field(default_factory=list)
    policy_versions: list[int] = field(default_factory=list)
    taken: list[Taken] = field(default_factory=list)


def read_log(key: str, log: Log) -> Iterator[str | Window]:
    """Problems, and the window at last."""
    window = Window()
    present: list[tuple[str, dict[str, Any]]] = []
    before = 0
    for at, fields in log:
        if at < before:
            yield f"{key}: the log goes back in time"
        before = at
        if len({name for name, _ in fields}) < len(fields):
            yield f"{key}: an entry of the log holds an id twice"
        for name, value in fields:
            if not name:
                gone = value.decode()
                kept = [one for one in present if one[0] != gone]
                if len(kept) == len(present):
                    yield f"{key}: {gone} is retracted and has no entry"
                window.gone += len(present) - len(kept)
                window.retracted.append(gone)
                present = kept
                continue
            if name in window.retracted:
                yield f"{key}: {name} came back after it was retracted"
            envelope = orjson.loads(value)
            window.taken.append(Taken(name, envelope, digest_of(value), at))
            window.last = at
            present.append((name, envelope))
    window.ids = list(dict.fromkeys(name for name, _ in present))
    window.entries = len(present)
    window.bytes = sum(envelope["size"] for _, envelope in present)
    window.weight = sum(envelope["weight"] for _, envelope in present)
    window.policy_versions = sorted({one.envelope.get("policy_version", 0) for one in window.taken})
    yield window


class Partition:
    """All of one partition's keys."""

    def __init__(self, number: int, count: int, prefix: str, purged: bool) -> None:
        self.purged = purged
        self.number = number
        self.count = count
        self.prefix = prefix
        self.hashes: dict[str, dict[str, str]] = {}
        self.zsets: dict[str, dict[str, float]] = {}
        self.lists: dict[str, list[str]] = {}
        self.logs: dict[str, Log] = {}
        self.texts: dict[str, bytes] = {}
        self.windows: dict[str, Window] = {}  # by bucket key or window id
        self.seen: dict[tuple[str, str], list[int]] = {}  # (bucket key, event id) → versions that took it
        self.digests: dict[tuple[str, str], set[str]] = {}
        self.once: set[tuple[str, str, str]] = set()

    # --- reading

    def load(self, client: redis.Redis, keys: dict[str, str]) -> Iterator[str]:
        names = []
        with client.pipeline(transaction=False) as pipe:
            for name, kind in keys.items():
                head, _, rest = name.partition(":")
                wanted = SINGLE.get(name) if not rest else NAMED.get(head)
                if re.fullmatch(r"ids\.\d+", head) and rest:
                    wanted = "hash"
                if head == "ladders" and rest in LADDER_STATES:
                    wanted = "zset"
                if wanted != kind:
                    yield f"{name} is a {kind}, and by its name {wanted or 'nothing known'}"
                    continue
                names.append(name)
                READ[kind](pipe, self.prefix + name)
            replies = pipe.execute()
        for name, reply in zip(names, replies, strict=True):
            kind = keys[name]
            if kind == "hash":
                self.hashes[name] = {f.decode(): v.decode() for f, v in reply.items()}
            elif kind == "zset":
                self.zsets[name] = {member.decode(): score for member, score in reply}
            elif kind in ("list", "set"):
                self.lists[name] = [member.decode() for member in reply]
            elif kind == "string":
                self.texts[name] = reply
            else:
                self.logs[name] = list(_stream(reply))

    def named(self, kind: str) -> list[str]:
        """What stands after `kind:` in the names of the keys of that kind."""
        known = [*self.hashes, *self.zsets, *self.lists, *self.logs, *self.texts]
        return [name.partition(":")[2] for name in known if name.startswith(f"{kind}:")]

    def closed(self) -> list[str]:
        """Ids of closed windows: of manifests that no ladder emitted."""
        return [window_id for window_id in self.named("manifest") if "s" not in window_id[20:]]

    def policy(self, bucket_key: str, version: str) -> dict[str, Any]:
        for flow in (bucket_key.split(":")[1], "default"):
            text = self.hashes.get(f"policy:{flow}", {}).get(f"{version}:json")
            if text is not None:
                return policy_of(text)
        return {}

    @property
    def stats(self) -> dict[str, int]:
        return {name: int(value) for name, value in self.hashes.get("stats", {}).items()}

    @property
    def resolved(self) -> int:
        """How many items have left the reconciliation queue."""
        return self.stats.get("resolved", 0)

    # --- agreement

    def problems(self) -> Iterator[str]:
        yield from self.places()
        for key in self.named("events"):
            for found in read_log(key, self.logs[f"events:{key}"]):
                if isinstance(found, Window):
                    self.windows[key] = found
                else:
                    yield found
        for key in self.named("bucket"):
            yield from self.open_window(key, self.hashes[f"bucket:{key}"])
        yield from self.indices()
        for window_id in self.closed():
            yield from self.manifest(window_id, self.hashes[f"manifest:{window_id}"])
        for key in self.named("manifests"):
            yield from self.succession(key)
        yield from self.turns()
        yield from self.ladders()
        yield from self.emissions()
        yield from self.queues()
        yield from self.retention()
        yield from self.known_ids()
        yield from self.orders()
        yield from self.counters()

    def places(self) -> Iterator[str]:
        """Each key lies in the partition that its bucket key or window id names."""
        for kind in (*NAMED, *(name.partition(":")[0] for name in self.hashes if re.match(r"ids\.\d+:", name))):
            for rest in self.named(kind):
                if kind in ("policy", "ready", "tenants", "ladderdef") or rest in LADDER_STATES:
                    continue
                if ":" in rest:
                    home = zlib.crc32(rest.encode()) % self.count
                elif WINDOW_ID.fullmatch(rest):
                    home = int(rest[11:14], 16)
                else:
                    yield f"{kind}:{rest} names neither a bucket nor a window"
                    continue
                if home != self.number:
                    yield f"{kind}:{rest} belongs to partition {home}"

    def open_window(self, key: str, fields: dict[str, str]) -> Iterator[str]:
        where = f"bucket {key}"
        older = re.findall(r"(\d+):\d+:\d+", fields.get("older", ""))
        for number in older:
            if f"ids.{number}:{key}" not in self.hashes:
                yield f"{where}: generation {number} of its ids is missing"
        if "open" not in fields:
            for name in ("tally", "limits", "dups", "gone", "retracted", "pvs", "kept", "kept_id"):
                if name in fields:
                    yield f"{where}: nothing is open, and it has {name}"
            return
        window_id, version, opened_, policy_, pv, hard, hold, *rest = fields["open"].split(" ")
        opened, due = int(opened_), int(opened_) + int(hard)
        if not WINDOW_ID.fullmatch(window_id) or rest not in ([r, *s] for r in "fcpa" for s in ([], ["*"])):
            yield f"{where}: open can't be read: {fields['open']}"
        policy = self.policy(key, policy_)
        if not policy:
            yield f"{where}: version {policy_} of its policy is missing"
            return
        window = self.windows.get(key)
        if window is None:
            yield f"{where}: is open and has no stream"
            return
        entries, ids, size, weight, last = (int(n) for n in fields["tally"].split(" "))
        has = (window.entries, len(window.ids), self.size_of(key, window, policy), window.weight, window.last)
        if (entries, ids, size, weight, last) != has:
            yield f"{where}: its tally says {fields['tally']}, its stream {' '.join(map(str, has))}"
        yield from self.facts(where, window, fields, pv, window_id)
        yield from self.note(key, window, int(version))

        limits = dict(zip(("cutoff", "deadline", "terminal"), fields.get("limits", "- - -").split(" "), strict=True))
        for name, wanted in self.limits(window, policy).items():
            if limits[name] != str(wanted or "-"):
                yield f"{where}: its {name} is {limits[name]}, by its events {wanted}"
        ends = [opened + policy["max_age"], *(int(at) for at in limits.values() if at != "-")]
        if bool(policy["cutoffs"]) != (limits["cutoff"] != "-"):
            yield f"{where}: cutoff is {limits['cutoff']} with cutoffs {policy['cutoffs']}"
        if due != min(ends):
            yield f"{where}: its hard limit is {due}, by its limits {min(ends)}"
        if policy["inactivity"] is not None:
            due = min(due, max(last + policy["inactivity"], opened + int(hold)))
        score = self.zsets.get("timers", {}).get(f"w:{key}")
        if score is None:
            yield f"{where}: is open and has no timer"
        elif score > due:
            yield f"{where}: its timer is at {score:.0f}, after it is due at {due}"
        if self.zsets.get("open", {}).get(key) != opened:
            yield f"{where}: opened at {opened}, and stands in `open` at {self.zsets.get('open', {}).get(key)}"
        if f"manifest:{window_id}" in self.hashes:
            yield f"{where}: its open window {window_id} is a manifest already"
        payload = self.texts.get(f"kept:{key}", b"- -").split(b" ")[0].decode()
        if fields.get("kept", "-").split(" ")[0] != payload:
            yield f"{where}: it keeps {fields.get('kept')}, and the payload of {payload}"

    def facts(self, where: str, window: Window, fields: dict[str, str], pv: str, window_id: str) -> Iterator[str]:
        """What an open window and a manifest write alike."""
        if window.taken and window.taken[0].envelope.get("policy_version", 0) != int(pv):
            yield f"{where}: policy_version is {pv}, and its first event's is {window.taken[0].envelope}"
        if sorted({int(v) for v in fields.get("pvs", pv).split(" ")}) != window.policy_versions:
            yield f"{where}: pvs is {fields.get('pvs', pv)}, by its events {window.policy_versions}"
        for name, wanted in (("gone", window.gone), ("retracted", len(window.retracted))):
            if int(fields.get(name, 0)) != wanted:
                yield f"{where}: {name} is {fields.get(name, 0)}, by its stream {wanted}"
        if int(window_id[11:14], 16) != self.number:
            yield f"{where}: window {window_id} names another partition"

    def limits(self, window: Window, policy: dict[str, Any]) -> dict[str, int | None]:
        """The deadline and the terminal instant that the events make, retracted ones included."""
        deadlines = [one.envelope["deadline_at"] for one in window.taken if "deadline_at" in one.envelope]
        ends = [one.at for one in window.taken if one.envelope["kind"] in policy["terminal_kinds"]]
        return {
            "deadline": min(deadlines) - policy["deadline_margin"] if deadlines else None,
            "terminal": min(ends) + policy["terminal_grace"] if ends and policy["terminal_grace"] else None,
        }

    def size_of(self, key: str, window: Window, policy: dict[str, Any]) -> int:
        if policy["keep"] == "all":
            return window.bytes
        kept = self.texts.get(f"kept:{key}")
        return int(orjson.loads(kept.partition(b" ")[2])["size"]) if kept else 0

    def note(self, key: str, window: Window, version: int) -> Iterator[str]:
        for event_id, envelope, digest, _ in window.taken:
            self.seen.setdefault((key, event_id), []).append(version)
            digests = self.digests.setdefault((key, event_id), set())
            # What a handler set aside may be handed over again, by somebody's decision.
            if not envelope.get("reconciled"):
                if (key, event_id, digest) in self.once:
                    yield f"bucket {key}: {event_id} was accepted twice with the same content, in version {version}"
                self.once.add((key, event_id, digest))
            digests.add(digest)

    def indices(self) -> Iterator[str]:
        """Nothing in an index without its record."""
        for key in self.zsets.get("open", {}):
            if "open" not in self.hashes.get(f"bucket:{key}", {}):
                yield f"{key} stands in `open`, and is not"
        for member in self.zsets.get("timers", {}):
            kind, rest = member[:2], member[2:]
            if kind == "w:" and "open" not in self.hashes.get(f"bucket:{rest}", {}):
                yield f"timer {member} has no open window"
            elif kind in ("m:", "p:", "x:") and f"manifest:{rest}" not in self.hashes:
                yield f"timer {member} has no manifest"
            elif kind in ("l:", "y:") and f"ladder:{rest}" not in self.hashes:
                yield f"timer {member} has no ladder"
            elif kind == "r:" and f"bucket:{rest}" not in self.hashes:
                yield f"timer {member} has no bucket"
            elif kind not in ("w:", "m:", "p:", "x:", "r:", "l:", "y:"):
                yield f"timer {member} is of no known kind"
        for name in ("outbox", "attention"):
            for window_id in self.zsets.get(name, {}):
                if f"manifest:{window_id}" not in self.hashes:
                    yield f"{window_id} stands in {name}, and has no manifest"
        for kind in ("effects", "stages"):
            for window_id in self.named(kind):
                if f"manifest:{window_id}" not in self.hashes:
                    yield f"{kind}:{window_id} belongs to no manifest"
        for kind in ("ids", "order", "checkpoint"):
            for key in self.named(kind):
                if f"bucket:{key}" not in self.hashes:
                    yield f"{kind}:{key} belongs to no bucket"
        for window_id in self.lists.get("unrecorded", []):
            if "digest" in self.hashes.get(f"manifest:{window_id}", {"digest": ""}):
                yield f"{window_id} is to be recorded, and is already or has no manifest"
        for key in self.windows:
            if ":" in key:
                if "open" not in self.hashes.get(f"bucket:{key}", {}):
                    yield f"events:{key} belongs to no open window"
            elif f"manifest:{key}" not in self.hashes:
                yield f"events:{key} belongs to no manifest"
        for key in self.named("kept"):
            owner = self.hashes.get(f"bucket:{key}" if ":" in key else f"manifest:{key}", {})
            if "kept" not in owner:
                yield f"kept:{key} belongs to nothing"

    def manifest(self, window_id: str, fields: dict[str, str]) -> Iterator[str]:
        key, version, state = fields["bucket"], int(fields["version"]), fields["state"]
        where = f"manifest {window_id} ({key}, {version})"
        if self.zsets.get(f"manifests:{key}", {}).get(window_id) != version:
            yield f"{where}: is not among its bucket's"
        window = self.windows.get(window_id)
        policy = self.policy(key, fields["policy"])
        if not policy:
            yield f"{where}: version {fields['policy']} of its policy is missing"
            return
        recorded = self.recorded(fields)
        if window is None:
            if state not in SETTLED or f"x:{window_id}" not in self.zsets.get("timers", {}) or recorded is None:
                yield f"{where}: is {state}, and has no stream"
            return
        if recorded is not None and recorded != [(one.event_id, one.digest) for one in self.left(window)]:
            yield f"{where}: has recorded {recorded}"
        has = {
            "entries": window.entries, "ids": len(window.ids), "bytes": self.size_of(window_id, window, policy),
            "weight": window.weight, "last": window.last,
        }  # fmt: skip
        for name, wanted in has.items():
            if int(fields[name]) != wanted:
                yield f"{where}: {name} is {fields[name]}, by its stream {wanted}"
        yield from self.facts(where, window, fields, fields["pv"], window_id)
        yield from self.note(key, window, version)

        opened, last, closed, sealed = (int(fields[name]) for name in ("opened", "last", "closed", "sealed"))
        reason = fields["reason"]
        if not opened <= last <= closed <= sealed or (reason in BY_CLOCK and last == closed):
            yield f"{where}: {reason}, opened {opened}, last {last}, closed {closed}, sealed {sealed}"
        if reason not in REASONS:
            yield f"{where}: closed for {reason!r}"
        if int(fields["max_age_at"]) != opened + policy["max_age"]:
            yield f"{where}: max_age_at is {fields['max_age_at']}"
        for name in ("inactivity", "max_age", "cutoff", "terminal"):
            at = int(fields.get(f"{name}_at", closed))
            if closed > at or (reason == name and name in BY_CLOCK and closed != at):
                yield f"{where}: closed for {reason} at {closed}, and its {name} is at {at}"
        for name, at_ in self.limits(window, policy).items():
            if fields.get(f"{name}_at") != (None if at_ is None else str(at_)):
                yield f"{where}: {name}_at is {fields.get(f'{name}_at')}, by its events {at_}"

        waits = self.zsets.get("outbox", {}).get(window_id)
        if state in SETTLED and waits is not None:
            yield f"{where}: is {state}, and stands in the outbox"
        elif state in STATES and waits != sealed:
            yield f"{where}: is {state}, sealed at {sealed}, and stands in the outbox at {waits}"
        elif state not in SETTLED | STATES:
            yield f"{where}: is in the state {state!r}"
        if (state == "empty") != (not window.ids):
            yield f"{where}: is {state} with {len(window.ids)} events"
        if (state in ATTENTION) != (window_id in self.zsets.get("attention", {})):
            yield f"{where}: is {state}, and attention to it is {self.zsets.get('attention', {}).get(window_id)}"
        ready = self.ready(fields).count(window_id)
        timers = self.zsets.get("timers", {})
        timed, led = f"m:{window_id}" in timers, "leader" in fields
        waiting = window_id in self.hashes.get(f"bucket:{key}", {}).get("waits", "").split(" ")
        moves_on = {
            "processing": timed,
            "dispatched": ready == 1 if "back" in fields else timed,
            "retrying": timed or ready == 1 or waiting,
        }
        if not led and not moves_on.get(state, True):
            yield f"{where}: is {state}, and neither timed nor ready"
        if timed and (led or state not in ("dispatched", "processing", "retrying", "awaiting_approval")):
            yield f"{where}: is {state}, and has a timer"
        if state in SETTLED and (f"p:{window_id}" in timers) == (f"x:{window_id}" in timers):
            yield f"{where}: is {state}, and has not one timer for its retention"
        if policy["sink"] == "none" and state not in SETTLED:
            yield f"{where}: is {state} with sink none"
        steps = int(fields.get("steps", 0))
        kept = [n for n in range(1, steps + 1) if n <= 20 or n > steps - 100 or f"step{n}" in fields]
        timeline = [fields.get(f"step{n}", "").split(" ", 3) for n in kept]
        if any(len(step) != 4 for step in timeline) or (timeline and timeline[-1][1] != state):
            yield f"{where}: is {state}, and its timeline is {timeline}"
        if len(kept) > 20 + 50 + 100:
            yield f"{where}: its timeline has {len(kept)} entries"

    def ready(self, fields: dict[str, str]) -> list[str]:
        """The list in which a manifest waits when its turn has come."""
        sink = self.policy(fields["bucket"], fields["policy"])["sink"]
        return self.lists.get(f"ready:{sink}:{fields['bucket'].partition(':')[0]}", [])

    @staticmethod
    def left(window: Window) -> list[Taken]:
        """The entries that were not retracted."""
        return [one for one in window.taken if one.event_id not in window.retracted]

    @staticmethod
    def recorded(fields: dict[str, str]) -> list[tuple[str, str]] | None:
        """(event_id, digest) of each entry, as a manifest keeps them when its payloads are gone."""
        if "digest" not in fields:
            return None
        found = []
        for number in itertools.count(1):
            if f"e{number}" not in fields:
                break
            digest, _, _, length, rest = fields[f"e{number}"].split(" ", 4)
            found.append((rest.encode()[: int(length)].decode(), digest))
        return found

    def succession(self, key: str) -> Iterator[str]:
        """A bucket's windows follow each other, by version, by instant and by link."""
        ordered = sorted(self.zsets[f"manifests:{key}"].items(), key=lambda pair: pair[1])
        before: tuple[int, str] | None = None
        for window_id, version in ordered:
            fields = self.hashes.get(f"manifest:{window_id}")
            if fields is None:
                yield f"bucket {key}: manifest {window_id} is missing"
                continue
            if fields["bucket"] != key:
                yield f"bucket {key}: manifest {window_id} is of {fields['bucket']}"
            if before is not None:
                closed = self.hashes[f"manifest:{before[1]}"]["closed"]
                if version <= before[0] or int(fields["opened"]) < int(closed):
                    yield f"bucket {key}: {version:.0f} opened at {fields['opened']}, {before[0]} closed at {closed}"
                if version == before[0] + 1 and (fields.get("prev") != before[1] or fields["relation"] == "f"):
                    yield f"bucket {key}: {version:.0f} follows {fields.get('prev')}, not {before[1]}"
            before = int(version), window_id
        state = self.hashes.get(f"bucket:{key}", {})
        if before is None or not state:
            yield f"bucket {key}: has manifests, and no record"
            return
        last, last_id = state.get("prev", "0 -").split(" ")[:2]
        if int(last) < before[0] or (int(last) == before[0] and last_id != before[1]):
            yield f"bucket {key}: its last window is {before}, and it says {state.get('prev')}"
        if "open" in state and int(state["open"].split(" ")[1]) != int(last) + 1:
            yield f"bucket {key}: {state['open']} is open after {last}"

    def turns(self) -> Iterator[str]:
        """A closed manifest is ready exactly once, or waits behind the one of its bucket whose turn it is, or for the
        window that it gave way to."""
        for window_id in self.closed():
            fields = self.hashes[f"manifest:{window_id}"]
            policy = self.policy(fields["bucket"], fields["policy"])
            if fields["state"] != "closed" or not policy:
                continue
            bucket = self.hashes.get(f"bucket:{fields['bucket']}", {})
            turn, gave_way = bucket.get("turn"), window_id in bucket.get("joins", "").split(" ")
            ready = self.ready(fields).count(window_id)
            wanted = 1 if not policy["ordered"] or turn == window_id else 0
            if ready != wanted and not (gave_way and ready == 0):
                yield f"manifest {window_id}: is closed and {ready} times ready; the turn is {turn}"
            if policy["ordered"] and turn is None and not gave_way:
                yield f"manifest {window_id}: is closed, and nobody's turn it is"
        for key in self.named("bucket"):
            turn = self.hashes[f"bucket:{key}"].get("turn")
            if turn is not None:
                state = self.hashes.get(f"manifest:{turn}", {}).get("state")
                if state not in ("closed", "dispatched", "processing", "retrying", "awaiting_approval"):
                    yield f"bucket {key}: it is the turn of {turn}, which is {state}"

    def ladders(self) -> Iterator[str]:
        """A ladder stands in the list of its state, has one timer, and what it emitted goes in order."""
        timers = self.zsets.get("timers", {})
        for ladder_id in self.named("ladder"):
            fields = self.hashes[f"ladder:{ladder_id}"]
            where, state, name = f"ladder {ladder_id}", fields["state"], fields["name"]
            listed = [one for one in LADDER_STATES if ladder_id in self.zsets.get(f"ladders:{one}", {})]
            if listed != [state]:
                yield f"{where}: is {state}, and stands among the {listed}"
            wanted = {"running": ["l:"], "paused": []}.get(state, ["y:"])
            if (timed := [kind for kind in ("l:", "y:") if f"{kind}{ladder_id}" in timers]) != wanted:
                yield f"{where}: is {state}, and has the timers {timed}"
            own = f"start:{name}:{fields['start']}" if "start" in fields else f"only:{name}"
            if "start" not in fields and wanted == ["y:"]:
                own = f"ended:{ladder_id}"
            parts = sorted((name for name in fields if name.startswith("bucket")), key=lambda name: (len(name), name))
            key = "".join(fields[name] for name in parts)
            index = self.hashes.get(f"ladders:{key}", {})
            if index.get(own) not in (ladder_id, name):
                yield f"{where}: is {state}, and its bucket's index says {index}"
            if ("args" in fields) == (f"ladderargs:{ladder_id}" in self.texts):
                yield f"{where}: has no arguments, or two"
            if fields["definition"] not in self.hashes.get(f"ladderdef:{name}", {}):
                yield f"{where}: its definition is missing"
            emitted = [f"{ladder_id}s{n}" for n in range(1, int(fields["emitted"]) + 1)]
            states = {one: self.hashes.get(f"manifest:{one}", {}).get("state") for one in emitted}
            if None in states.values():
                yield f"{where}: what it emitted is {states}"
            steps = [self.hashes[f"manifest:{one}"]["step"] for one in emitted if states[one]]
            if len(set(steps)) < len(steps):
                yield f"{where}: a step was emitted twice: {steps}"
            turn = fields.get("turn")
            if turn is not None and states.get(turn) not in TURN:
                yield f"{where}: it is the turn of {turn}, which is {states.get(turn)}"
            for one, is_ in states.items():
                ready = self.ready(self.hashes[f"manifest:{one}"]).count(one)
                if is_ == "closed" and (turn is None or ready != (turn == one)):
                    yield f"{where}: {one} is closed and {ready} times ready; the turn is {turn}"
        for key in (key for key in self.named("ladders") if key not in LADDER_STATES):
            for name, value in self.hashes[f"ladders:{key}"].items():
                if f"ladder:{name.removeprefix('ended:') if name.startswith('ended:') else value}" not in self.hashes:
                    yield f"bucket {key}: its index names {name}, which is not there"

    def emissions(self) -> Iterator[str]:
        """What a ladder emitted is where its state says, as manifests are."""
        timers = self.zsets.get("timers", {})
        for window_id in set(self.named("manifest")) - set(self.closed()):
            fields = self.hashes[f"manifest:{window_id}"]
            where, state = f"emission {window_id}", fields["state"]
            if f"ladder:{fields['ladder']}" not in self.hashes:
                yield f"{where}: its ladder is missing"
            if (state in SETTLED) == (window_id in self.zsets.get("outbox", {})):
                yield f"{where}: is {state}, and its place in the outbox says otherwise"
            if (state in ATTENTION) != (window_id in self.zsets.get("attention", {})):
                yield f"{where}: is {state}, and attention to it says otherwise"
            ready, timed = self.ready(fields).count(window_id), f"m:{window_id}" in timers
            if (state in ("dispatched", "retrying") and not (timed or ready)) or (state == "processing" and not timed):
                yield f"{where}: is {state}, and neither timed nor ready"
            if timed and state not in TURN:
                yield f"{where}: is {state}, and has a timer"

    def queues(self) -> Iterator[str]:
        """What counts and lists manifests by tenant agrees with them."""
        held: dict[str, list[str]] = {}
        for name in self.named("ready"):
            sink, tenant = name.split(":", 1)
            held.setdefault(sink, []).append(tenant)
            for window_id in self.lists[f"ready:{name}"]:
                fields = self.hashes.get(f"manifest:{window_id}")
                if fields is None or fields["bucket"].partition(":")[0] != tenant:
                    yield f"{window_id} is ready for {name}, and is {fields}"
        for sink in {*held, *self.named("tenants")}:
            listed = self.lists.get(f"tenants:{sink}", [])
            if sorted(listed) != sorted(held.get(sink, [])):
                yield f"tenants:{sink} lists {listed}, and ready are {held.get(sink)}"
        flying = Counter(
            fields["bucket"].partition(":")[0]
            for window_id in self.named("manifest")
            if (fields := self.hashes[f"manifest:{window_id}"])["state"] in ("dispatched", "processing")
            and not {"leader", "back"} & fields.keys()
        )
        counted = {tenant: int(number) for tenant, number in self.hashes.get("inflight", {}).items()}
        if counted != dict(flying):
            yield f"inflight counts {counted}, and there are {dict(flying)}"
        queued = Counter(
            value.decode()
            for _, pairs in self.logs.get("reconcile", [])
            for name, value in pairs
            if name == "bucket_key"
        )
        for key in {*queued, *self.named("bucket")}:
            number = self.hashes.get(f"bucket:{key}", {}).get("queued", "0")
            if int(number) != queued[key]:
                yield f"bucket {key}: counts {number} of its events in the queue, and there are {queued[key]}"

    def retention(self) -> Iterator[str]:
        """What is to go one day has a timer that takes it."""
        for key in self.named("bucket"):
            fields = self.hashes[f"bucket:{key}"]
            kept = "open" in fields or f"manifests:{key}" in self.zsets or "queued" in fields
            kept = kept or f"ladders:{key}" in self.hashes
            if (not kept or "older" in fields) and f"r:{key}" not in self.zsets.get("timers", {}):
                yield f"bucket {key}: nothing is open, closed or queued, and it stays for ever: {fields}"

    def known_ids(self) -> Iterator[str]:
        """The ids that are remembered are those that were accepted or queued, with all their digests."""
        queued: dict[tuple[str, str], set[str]] = {}
        for _, pairs in self.logs.get("reconcile", []):
            item = {name: value.decode() for name, value in pairs}
            if item["code"] not in CODES:
                yield f"reconcile: {item['event_id']} has the code {item['code']!r}"
            if digest_of(item["envelope"].encode()) != item["digest"]:
                yield f"reconcile: {item['event_id']} has another digest than its envelope"
            queued.setdefault((item["bucket_key"], item["event_id"]), set()).add(item["digest"])
        records: dict[tuple[str, str], str] = {}
        for name in sorted(self.hashes, key=_generation):
            if re.match(r"ids(\.\d+)?:", name):
                for event_id, text in self.hashes[name].items():
                    records[name.partition(":")[2], event_id] = text
        for (key, event_id), versions in self.seen.items():
            record = records.get((key, event_id))
            if record is None:
                yield f"bucket {key}: {event_id} was accepted in {versions} and is not known"
                continue
            place, occurred, source_version, *digests = record.split(" ")
            span = [int(v) for v in place.removesuffix("x").split(",")] if place != "q" else []
            ends = (span[0] if span and self.purged else min(versions), max(versions))
            if not span or (span[0], span[-1]) != ends:
                yield f"bucket {key}: {event_id} lies in {versions}, and is known in {place}"
            if missing := self.digests[key, event_id] - set(digests):
                yield f"bucket {key}: {event_id} was accepted with {missing}, known are {digests}"
            if place.endswith("x") != self.is_retracted(key, event_id, max(versions)) and not self.resolved:
                yield f"bucket {key}: {event_id} is known as {record}, against its window"
        for (key, event_id), record in records.items():
            place, occurred, source_version, *digests = record.split(" ")
            if not self.purged and (place == "q") != ((key, event_id) not in self.seen):
                yield f"bucket {key}: {event_id} is known as {place}"
            known = self.digests.get((key, event_id), set()) | queued.get((key, event_id), set())
            if not (self.purged or self.resolved) and set(digests) != known:
                yield f"bucket {key}: {event_id} is known with {digests}, taken were {sorted(known)}"
            if not known <= set(digests) or len(digests) != len(set(digests)):
                yield f"bucket {key}: {event_id} is known with {digests}, taken were {sorted(known)}"
            if not occurred.isdigit() or not (source_version == "-" or source_version.isdigit()):
                yield f"bucket {key}: {event_id} has the record {record}"
        for key, event_id in queued.keys() - records.keys():
            yield f"bucket {key}: {event_id} is queued and not known"

    def is_retracted(self, key: str, event_id: str, version: int) -> bool:
        for window_id, number in self.zsets.get(f"manifests:{key}", {}).items():
            if number == version:
                return event_id in self.windows[window_id].retracted
        return event_id in self.windows[key].retracted if key in self.windows else False

    def orders(self) -> Iterator[str]:
        """The highest order value kept of each source is the highest that its windows hold."""
        for key in self.named("order"):
            records = self.hashes[f"order:{key}"]
            if len(records) > 64:
                yield f"bucket {key}: keeps the order of {len(records)} sources"
            held = list(self.order_values(key))
            for source, text in records.items():
                parts = text.split(" ")
                for name, (closed, own, version) in zip(
                    ("source_version", "occurred_at"), (parts[:3], parts[3:]), strict=True
                ):
                    values = {(v, number) for order, by, number, v in held if (order, by) == (name, source)}
                    highest = max((int(v) for v in (closed, own) if v != "-"), default=None)
                    if highest != max((v for v, _ in values), default=None) and not self.purged:
                        yield f"bucket {key}: the highest {name} of {source} is {text}, by its events {values}"
                    if version != "-" and any(number > int(version) for _, number in values):
                        yield f"bucket {key}: the highest {name} of {source} is {text}, and a later window holds one"

    def order_values(self, key: str) -> Iterator[tuple[str, str, int, int]]:
        """(what orders, source, version, value) of every entry of a window that ran under an order."""
        windows = [
            (self.hashes[f"manifest:{w}"], self.windows[w])
            for w in self.zsets.get(f"manifests:{key}", {})
            if w in self.windows
        ]
        bucket = self.hashes.get(f"bucket:{key}", {})
        if "open" in bucket and key in self.windows:
            _, version, _, policy, *_ = bucket["open"].split(" ")
            windows.append(({"version": version, "policy": policy}, self.windows[key]))
        for fields, window in windows:
            name = self.policy(key, fields["policy"]).get("order_by")
            for one in window.taken:
                if name is not None and name in one.envelope:
                    yield name, one.envelope["source"], int(fields["version"]), one.envelope[name]

    def counters(self) -> Iterator[str]:
        """The counters are those of what is there, where nothing was purged."""

        def total(*names: str) -> int:
            return sum(self.stats.get(name, 0) for name in names)

        manifests = [self.hashes[f"manifest:{w}"] for w in self.closed()]
        for names, wanted in (
            (("accepted", "revised"), sum(len(window.taken) for window in self.windows.values())),
            (("closed",), len(manifests)),
            (("reconciled", "reconciled:set_aside"), len(self.logs.get("reconcile", [])) + self.resolved),
            (("retracted",), sum(len(window.retracted) for window in self.windows.values())),
            (("late",), sum(one.envelope.get("late", False) for w in self.windows.values() for one in w.taken)),
        ):
            if total(*names) < wanted or (total(*names) != wanted and not self.purged):
                yield f"stats count {total(*names)} {' and '.join(names)}, and there are {wanted}"
        reasons = Counter(fields["reason"] for fields in manifests)
        for reason in REASONS:
            counted = total(f"closed:{reason}")
            if counted < reasons[reason] or (counted != reasons[reason] and not self.purged):
                yield f"stats count {counted} closed for {reason}, and there are {reasons[reason]}"
        if any(value < 0 for value in self.stats.values()):
            yield f"stats are below zero: {self.stats}"


def _generation(name: str) -> tuple[int, float]:
    """Older generations of ids first, so that a newer record wins."""
    found = re.match(r"ids\.(\d+):", name)
    return (0, int(found[1])) if found else (1, 0)


def _stream(reply: Any) -> Iterator[tuple[int, list[tuple[str, bytes]]]]:
    """(ms, fields) of each entry."""
    for entry_id, flat in reply:
        pairs = zip(flat[::2], flat[1::2], strict=True)
        yield int(entry_id.partition(b"-")[0]), [(name.decode(), value) for name, value in pairs]
