"""Names of all Redis keys: one function each, so that the key space can be read in one place.

Everything one script touches carries the same hash tag ``{p}``, the partition, so the same code runs on Redis
Cluster. `prefix` is made by :func:`prefix`. A bucket key holds at least two colons and a window id none, so
the two can't meet under one name.
"""

from __future__ import annotations

import re
import zlib

from accumulator.errors import InvalidSettings

MAX_PARTITIONS = 4096
_NAMESPACE = re.compile(r"[a-z0-9_-]{1,32}")


def check_namespace(namespace: object) -> str:
    """The namespace itself, if it is 1 to 32 of ``a-z 0-9 _ -``; else InvalidSettings."""
    if not isinstance(namespace, str) or _NAMESPACE.fullmatch(namespace) is None:
        raise InvalidSettings("namespace", "must be 1 to 32 characters out of a-z, 0-9, '_' and '-'")
    return namespace


def partition_of(bucket_key: str | bytes, partitions: int) -> int:
    """The bucket's partition, 0 … partitions−1: CRC-32 (as in zlib) of the key's UTF-8 bytes, modulo
    `partitions`."""
    data = bucket_key.encode() if isinstance(bucket_key, str) else bucket_key
    return zlib.crc32(data) % partitions


def meta(namespace: str) -> str:
    """Hash: format version, partition count, created at, policy version numbers. This and `workers` are the only keys
    without a hash tag."""
    return f"{namespace}:meta"


def workers(namespace: str) -> str:
    """Sorted set: worker, as JSON with what it can do → its last sign of life, in ms; and ``clock`` → the highest
    instant that any of them saw. Entries older than an hour are removed by whoever gives a sign of life."""
    return f"{namespace}:workers"


def prefix(namespace: str, partition: int) -> str:
    """Beginning of every key of a partition, its hash tag included: ``acc:{7}:``."""
    return f"{namespace}:{{{partition}}}:"


def timers(prefix: str) -> str:
    """Sorted set: member → instant in ms at which something falls due."""
    return f"{prefix}timers"


def open_(prefix: str) -> str:
    """Sorted set: open buckets by opened_at in ms."""
    return f"{prefix}open"


def outbox(prefix: str) -> str:
    """Sorted set: unsettled manifests by age."""
    return f"{prefix}outbox"


def reconcile(prefix: str) -> str:
    """Stream: what somebody has to resolve; never trimmed."""
    return f"{prefix}reconcile"


def audit(prefix: str) -> str:
    """Stream, capped: what was ignored, refused or late."""
    return f"{prefix}audit"


def stats(prefix: str) -> str:
    """Hash: counters and histograms for metrics."""
    return f"{prefix}stats"


def bucket(prefix: str, bucket_key: str) -> str:
    """Hash: the bucket's state and its open window."""
    return f"{prefix}bucket:{bucket_key}"


def events(prefix: str, key_or_window_id: str) -> str:
    """Stream: the open window's events (by bucket key), or a closed one's (by window id)."""
    return f"{prefix}events:{key_or_window_id}"


def ids(prefix: str, bucket_key: str) -> str:
    """Hash: event_id → known digests and where it went."""
    return f"{prefix}ids:{bucket_key}"


def order(prefix: str, bucket_key: str) -> str:
    """Hash: the highest order value of each source."""
    return f"{prefix}order:{bucket_key}"


def kept(prefix: str, key_or_window_id: str) -> str:
    """The one payload that is kept under `keep: last`, of the open window (by bucket key) or a closed one."""
    return f"{prefix}kept:{key_or_window_id}"


def manifest(prefix: str, window_id: str) -> str:
    """Hash: a closed window with its facts, limits, state and timeline."""
    return f"{prefix}manifest:{window_id}"


def manifests(prefix: str, bucket_key: str) -> str:
    """Sorted set: the bucket's manifests."""
    return f"{prefix}manifests:{bucket_key}"


def ready(prefix: str, sink: str, tenant: str) -> str:
    """List: manifests of a tenant and a sink whose turn has come."""
    return f"{prefix}ready:{sink}:{tenant}"


def tenants(prefix: str, sink: str) -> str:
    """List: tenants that have manifests of a sink ready, in the order they are served."""
    return f"{prefix}tenants:{sink}"


def inflight(prefix: str) -> str:
    """Hash: tenant → manifests dispatched or processing."""
    return f"{prefix}inflight"


def taking(prefix: str) -> str:
    """Hash: tenant with a limit → who takes of it just now, and until when at the most."""
    return f"{prefix}taking"


def attention(prefix: str) -> str:
    """Sorted set: manifests that wait for somebody, by since when."""
    return f"{prefix}attention"


def unrecorded(prefix: str) -> str:
    """Set: settled manifests whose ids and digests are not written into them yet."""
    return f"{prefix}unrecorded"


def effects(prefix: str, window_id: str) -> str:
    """Hash: the ledger of a manifest's effects."""
    return f"{prefix}effects:{window_id}"


def stages(prefix: str, window_id: str) -> str:
    """Hash: what the stages of a manifest's handler made, as JSON."""
    return f"{prefix}stages:{window_id}"


def checkpoint(prefix: str, bucket_key: str) -> str:
    """What the bucket's last window left for its next one."""
    return f"{prefix}checkpoint:{bucket_key}"


def ladder(prefix: str, ladder_id: str) -> str:
    """Hash: a ladder that was started: its steps, how far it is, its timeline."""
    return f"{prefix}ladder:{ladder_id}"


def ladderargs(prefix: str, ladder_id: str) -> str:
    """A ladder's arguments as JSON, where they are long."""
    return f"{prefix}ladderargs:{ladder_id}"


def ladderdef(prefix: str, name: str) -> str:
    """Hash: version → a ladder's definition as JSON, and the kinds that cancel it."""
    return f"{prefix}ladderdef:{name}"


def ladders(prefix: str, bucket_key_or_state: str) -> str:
    """Hash: a bucket's ladders by name or start id. Sorted set, by the name of a state: ladders by since when they are
    in it."""
    return f"{prefix}ladders:{bucket_key_or_state}"


def watched(prefix: str) -> str:
    """Hash: the kinds that cancel any ladder."""
    return f"{prefix}watched"


def noticed(prefix: str, bucket_key: str) -> str:
    """Hash: kind → the bucket's last event of it, of the kinds that cancel any ladder."""
    return f"{prefix}noticed:{bucket_key}"


def policy(prefix: str, flow: str) -> str:
    """Hash: policy version → policy of the flow."""
    return f"{prefix}policy:{flow}"
