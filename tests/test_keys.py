"""Names of keys, pinned: data outlives code, so a changed name here needs a new format version."""

from __future__ import annotations

import inspect
import re
import zlib
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from accumulator import keys
from accumulator.errors import InvalidSettings

KEY = "acme:order:Ü-{1}"
WINDOW = "0mzk1x9q"
PREFIX = "acc:{7}:"

GOLDEN: dict[str, tuple[tuple[str, ...], str]] = {
    "meta": (("acc",), "acc:meta"),
    "timers": ((PREFIX,), "acc:{7}:timers"),
    "open_": ((PREFIX,), "acc:{7}:open"),
    "outbox": ((PREFIX,), "acc:{7}:outbox"),
    "reconcile": ((PREFIX,), "acc:{7}:reconcile"),
    "audit": ((PREFIX,), "acc:{7}:audit"),
    "stats": ((PREFIX,), "acc:{7}:stats"),
    "bucket": ((PREFIX, KEY), "acc:{7}:bucket:acme:order:Ü-{1}"),
    "events": ((PREFIX, KEY), "acc:{7}:events:acme:order:Ü-{1}"),
    "ids": ((PREFIX, KEY), "acc:{7}:ids:acme:order:Ü-{1}"),
    "order": ((PREFIX, KEY), "acc:{7}:order:acme:order:Ü-{1}"),
    "kept": ((PREFIX, KEY), "acc:{7}:kept:acme:order:Ü-{1}"),
    "manifest": ((PREFIX, WINDOW), "acc:{7}:manifest:0mzk1x9q"),
    "manifests": ((PREFIX, KEY), "acc:{7}:manifests:acme:order:Ü-{1}"),
    "ready": ((PREFIX, "rq", "acme"), "acc:{7}:ready:rq:acme"),
    "tenants": ((PREFIX, "rq"), "acc:{7}:tenants:rq"),
    "inflight": ((PREFIX,), "acc:{7}:inflight"),
    "taking": ((PREFIX,), "acc:{7}:taking"),
    "attention": ((PREFIX,), "acc:{7}:attention"),
    "unrecorded": ((PREFIX,), "acc:{7}:unrecorded"),
    "effects": ((PREFIX, WINDOW), "acc:{7}:effects:0mzk1x9q"),
    "stages": ((PREFIX, WINDOW), "acc:{7}:stages:0mzk1x9q"),
    "checkpoint": ((PREFIX, KEY), "acc:{7}:checkpoint:acme:order:Ü-{1}"),
    "workers": (("acc",), "acc:workers"),
    "ladder": ((PREFIX, WINDOW), "acc:{7}:ladder:0mzk1x9q"),
    "ladderargs": ((PREFIX, WINDOW), "acc:{7}:ladderargs:0mzk1x9q"),
    "ladderdef": ((PREFIX, "dunning"), "acc:{7}:ladderdef:dunning"),
    "ladders": ((PREFIX, KEY), "acc:{7}:ladders:acme:order:Ü-{1}"),
    "watched": ((PREFIX,), "acc:{7}:watched"),
    "noticed": ((PREFIX, KEY), "acc:{7}:noticed:acme:order:Ü-{1}"),
    "policy": ((PREFIX, "order"), "acc:{7}:policy:order"),
}


@pytest.mark.parametrize("name", GOLDEN)
def test_names(name: str) -> None:
    arguments, key = GOLDEN[name]
    function: Callable[..., str] = getattr(keys, name)
    assert function(*arguments) == key


def test_every_key_function_is_pinned() -> None:
    functions = {
        name for name, function in inspect.getmembers(keys, inspect.isfunction) if function.__module__ == keys.__name__
    }
    assert functions - {"prefix", "partition_of", "check_namespace"} == set(GOLDEN)


def test_windows_have_their_own_names() -> None:
    assert keys.events(PREFIX, WINDOW) == "acc:{7}:events:0mzk1x9q"
    assert keys.kept(PREFIX, WINDOW) == "acc:{7}:kept:0mzk1x9q"
    assert ":" not in WINDOW  # which is why they can't meet a bucket's


def test_prefix_holds_the_hash_tag() -> None:
    assert keys.prefix("acc", 7) == PREFIX
    assert keys.prefix("my-ns_2", 4095) == "my-ns_2:{4095}:"


def hash_tag(key: str) -> str:
    """What Redis Cluster hashes: between the first brace and the next closing one."""
    found = re.search(r"\{([^}]*)\}", key)
    assert found is not None
    return found[1]


@given(st.text(st.characters(exclude_categories=["Cs"])), st.integers(0, 4095))
def test_no_bucket_key_changes_the_hash_tag(bucket_key: str, partition: int) -> None:
    prefix = keys.prefix("acc", partition)
    for key in (
        keys.bucket(prefix, bucket_key),
        keys.events(prefix, bucket_key),
        keys.ids(prefix, bucket_key),
    ):
        assert hash_tag(key) == str(partition)


@pytest.mark.parametrize(
    ("bucket_key", "partitions", "partition"),
    [
        ("acme:order:7", 64, 29),
        ("acme:order:7", 1, 0),
        ("acme:order:7", 4096, 925),
        ("客户-Ü-🙂:f:1", 64, 13),
        ("a:b:é", 64, 52),
        ("a:b:e\u0301", 64, 51),
    ],
)
def test_partitions(bucket_key: str, partitions: int, partition: int) -> None:
    assert keys.partition_of(bucket_key, partitions) == partition
    assert keys.partition_of(bucket_key.encode(), partitions) == partition
    assert zlib.crc32(bucket_key.encode()) % partitions == partition


@given(st.text(st.characters(exclude_categories=["Cs"])), st.integers(1, 4096))
def test_partitions_of_any_key(bucket_key: str, partitions: int) -> None:
    assert keys.partition_of(bucket_key, partitions) == keys.partition_of(bucket_key.encode(), partitions)
    assert 0 <= keys.partition_of(bucket_key, partitions) < partitions


@pytest.mark.parametrize("namespace", ["acc", "a", "x" * 32, "my-ns_2", "-", "0"])
def test_namespaces(namespace: str) -> None:
    assert keys.check_namespace(namespace) == namespace


@pytest.mark.parametrize("namespace", ["", "x" * 33, "Acc", "a:b", "a{b}", "a b", "acc\n", "é", "٣"])
def test_what_is_no_namespace(namespace: str) -> None:
    with pytest.raises(InvalidSettings, match="must be 1 to 32 characters") as caught:
        keys.check_namespace(namespace)
    assert caught.value.field == "namespace"
