"""The clients: what they answer, on which connections, and what they say when the server does not do its part."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import fakeredis
import pytest
import redis
import redis.asyncio
from redis._parsers import _HiredisParser, _RESP2Parser, _RESP3Parser
from redis.backoff import NoBackoff
from redis.retry import Retry

from accumulator import windows
from accumulator.client import Accumulator, AsyncAccumulator
from accumulator.embedded import EmbeddedServer
from accumulator.envelope import Event
from accumulator.errors import (
    AccumulatorError,
    AuthenticationFailed,
    InvalidInput,
    InvalidSettings,
    MissingRight,
    NamespaceMismatch,
    ServerRefused,
    ServerUnavailable,
    UnknownFlow,
)
from accumulator.namespace import FORMAT
from accumulator.store import Store
from accumulator.testing import VirtualClock
from accumulator.windows import Outcome, Receipt
from tests.conftest import MakeClient, StartServer, event
from tests.invariants import check_invariants, contents
from tests.proxy import Do, Proxy

ONCE = Retry(NoBackoff(), 0)


# --- what they answer -------------------------------------------------------------------------------------------------


def test_push_answers_where_the_event_went(virtual: Accumulator, clock: VirtualClock) -> None:
    virtual.load_policy("f", {"inactivity": "10s", "max_events": 2})
    first = virtual.push(event("e1", at=clock))
    assert first.window_id is not None
    assert first == Receipt(Outcome.ACCEPTED, "e1", "t:f:1", first.window_id, 1, 1)
    again = virtual.push(event("e1", at=clock))
    assert again == Receipt(Outcome.DUPLICATE, "e1", "t:f:1", None, 1)
    second = virtual.push(**event("e2", at=clock))
    assert (second.outcome, second.position, second.closed) == (Outcome.ACCEPTED, 2, "max_events")
    (closed,) = second.closed_windows
    assert closed == (first.window_id, 1, "max_events", clock.now)
    virtual.push(Event(**event("e3", at=clock)))
    clock.advance("1h", worker=False)
    late = virtual.push(event("e4", at=clock))
    assert (late.outcome, late.window_version, late.closed) == (Outcome.ACCEPTED, 3, None)
    assert [(c.window_version, c.reason) for c in late.closed_windows] == [(2, "inactivity")]
    assert virtual.push_many([]) == []


def test_a_bucket_as_it_stands(virtual: Accumulator, clock: VirtualClock) -> None:
    virtual.load_policy("f", {"inactivity": "10s", "max_age": "15s"})
    empty = virtual.bucket("t:f:1")
    assert (empty.open, empty.last_version, empty.last_closed_window_id, empty.now) == (None, 0, None, clock.now)
    opened = clock.now
    receipt = virtual.push(event("e1", at=clock, payload="four", weight=3, policy_version=7))
    clock.advance("2s")
    virtual.push_many([event("e1", at=clock), event("e2", at=clock, policy_version=7)])
    window = virtual.bucket("t:f:1").open
    assert window is not None
    assert window.window_id == receipt.window_id
    assert (window.window_version, window.opened_at, window.last_event_at) == (1, opened, clock.now)
    assert (window.due_at, window.due_reason, window.relation) == (opened + 12_000, "inactivity", "first")
    assert (window.entries, window.event_count, window.bytes, window.weight) == (2, 2, 6, 4)
    assert (window.policy_version, window.flow_policy, window.duplicates) == (7, 1, 0)
    # The first id came with another occurred_at: a conflict, no duplicate.
    assert virtual.counters()["conflicts"] == 1
    clock.advance("1s")
    assert virtual.hold("t:f:1", "1h").due_at == opened + 15_000
    window = virtual.bucket("t:f:1").open
    assert window is not None
    assert (window.due_at, window.due_reason) == (opened + 15_000, "max_age")
    assert virtual.open_buckets() == [("t:f:1", opened)]
    clock.advance("12s")
    after = virtual.bucket("t:f:1")
    assert (after.open, after.last_version, after.last_closed_window_id) == (None, 1, receipt.window_id)
    assert virtual.open_buckets() == []
    assert virtual.open_events("t:f:1") == ()


def test_a_manifest_says_why_it_closed_and_holds_its_events(virtual: Accumulator, clock: VirtualClock) -> None:
    policy = {
        "inactivity": "10s",
        "max_age": "1m",
        "deadline_margin": "1s",
        "terminal_kinds": ["end"],
        "terminal_grace": "4s",
    }
    virtual.load_policy("f", policy)
    start, due = clock.now, clock.instant + timedelta(seconds=30)
    receipt = virtual.push(event("e1", at=clock, payload=[1], deadline_at=due))
    clock.advance("3s")
    virtual.push_many([event("e2", at=clock, payload=b"\x00"), event("e1", at=clock), event("e3", at=clock)])
    virtual.hold("t:f:1", "20s")
    assert virtual.retract("t:f:1", "e3").outcome == "retracted"
    virtual.push(event("e4", at=clock, kind="end"))
    clock.advance("1m")
    (manifest,) = virtual.manifests("t:f:1")
    assert receipt.window_id is not None
    assert virtual.manifest(receipt.window_id) == manifest
    assert manifest.limits == {
        "max_age": start + 60_000, "inactivity": start + 23_000, "hold": start + 23_000, "deadline": start + 29_000,
        "terminal": start + 7000,
    }  # fmt: skip
    assert (manifest.close_reason, manifest.closed_at, manifest.sealed_at) == ("terminal", start + 7000, start + 7000)
    assert (manifest.opened_at, manifest.first_event_at, manifest.last_event_at) == (start, start, start + 3000)
    assert (manifest.event_ids, manifest.retracted_event_ids) == (("e1", "e2", "e4"), ("e3",))
    assert (manifest.event_count, manifest.entries, manifest.bytes, manifest.weight) == (3, 3, 4, 3)
    assert (manifest.relation, manifest.previous_window_id, manifest.anomaly) == ("first", None, None)
    assert (manifest.state, manifest.settled, manifest.flow, manifest.flow_policy) == ("closed", False, "f", 1)
    assert list(manifest.payloads()) == [[1], b"\x00"]
    assert [entry.position for entry in manifest.events] == [1, 2, 4]
    assert [entry.received_at - start for entry in manifest.events] == [0, 3000, 3000]
    # Anybody can recompute the digest: the JSON list of the pairs, BLAKE2b-128, base64url after the format digit.
    from base64 import urlsafe_b64encode
    from hashlib import blake2b

    pairs = ",".join(f'["{e.event.event_id}","{e.event.content_digest}"]' for e in manifest.events)
    raw = blake2b(f"[{pairs}]".encode(), digest_size=16).digest()
    assert manifest.digest == "1" + urlsafe_b64encode(raw).decode().rstrip("=")


def test_flush_hold_and_retract_say_what_they_met(virtual: Accumulator, clock: VirtualClock) -> None:
    virtual.load_policy("f", {"inactivity": "10s", "kinds": ["k"]})
    nothing = virtual.flush("t:f:1")
    assert (nothing.outcome, nothing.open_version, nothing.closed_windows) == ("nothing_open", None, ())
    held = virtual.hold("t:f:1", "10s")
    assert (held.window_version, held.due_at) == (None, None)
    assert virtual.retract("t:f:1", "e1").outcome == "unknown"

    virtual.push(event("e1", at=clock))
    assert virtual.flush("t:f:1", 2)[:3] == ("other_version", "t:f:1", 1)
    assert virtual.retract("t:f:1", "e1")[:4] == ("retracted", "t:f:1", "e1", 1)
    assert virtual.retract("t:f:1", "e1").outcome == "already"
    flushed = virtual.flush("t:f:1", 1)
    assert (flushed.outcome, [c.reason for c in flushed.closed_windows]) == ("flushed", ["flush"])
    (manifest,) = virtual.manifests("t:f:1")
    assert (manifest.state, manifest.event_ids, manifest.retracted_event_ids) == ("empty", (), ("e1",))
    assert virtual.flush("t:f:1", 1)[:3] == ("nothing_open", "t:f:1", None)

    virtual.push(event("e2", at=clock))
    virtual.push(event("e3", at=clock, kind="odd"))
    assert virtual.retract("t:f:1", "e3").outcome == "queued"
    assert virtual.hold("t:f:1", 60_000)[:3] == ("t:f:1", 2, clock.now + 60_000)
    clock.advance("2m", worker=False)
    # Each expires first what is due.
    gone = virtual.retract("t:f:1", "e2")
    assert (gone.outcome, gone.window_version, [c.reason for c in gone.closed_windows]) == ("closed", 2, ["inactivity"])
    virtual.push(event("e4", at=clock))
    clock.advance("2m", worker=False)
    late = virtual.hold("t:f:1", "1m")
    assert (late.window_version, [c.window_version for c in late.closed_windows]) == (None, [3])
    virtual.push(event("e5", at=clock))
    clock.advance("2m", worker=False)
    late_flush = virtual.flush("t:f:1")
    assert (late_flush.outcome, [c.reason for c in late_flush.closed_windows]) == ("nothing_open", ["inactivity"])


def test_a_flush_with_the_same_nonce_is_one_flush(virtual: Accumulator, clock: VirtualClock) -> None:
    virtual.load_policy("f", {"inactivity": "10s"})
    numbers = iter_nonce()
    virtual.operations._nonce = lambda length: "n" * 16 if length == 16 else numbers(length)
    virtual.push(event("e1", at=clock))
    first = virtual.flush("t:f:1")
    virtual.push(event("e2", at=clock))
    # The answer was lost and the call is made again: not a second flush, which would close what came since.
    assert virtual.flush("t:f:1")[0::3] == first[0::3]
    assert [entry.event.event_id for entry in virtual.open_events("t:f:1")] == ["e2"]


def test_flush_of_a_flow_or_a_tenant(virtual: Accumulator, clock: VirtualClock) -> None:
    virtual.load_policy("default", {"inactivity": "10s"})
    buckets = [f"{tenant}:{flow}:{n}" for tenant in ("a", "b") for flow in ("f", "g") for n in range(3)]
    virtual.push_many([event("e1", key, clock) for key in buckets])
    done = virtual.flush_where(tenant="a", flow="f")
    assert sorted(one.bucket_key for one in done) == ["a:f:0", "a:f:1", "a:f:2"]
    assert {one.outcome for one in done} == {"flushed"}
    assert len(virtual.flush_where(flow="f")) == 3
    assert len(virtual.flush_where(tenant="b", partial=True)) == 3
    assert [key for key, _ in virtual.open_buckets()] == ["a:g:0", "a:g:1", "a:g:2"]
    assert virtual.flush_where(tenant="a%3A") == []


def test_policies_are_numbered_once_for_the_namespace(
    virtual: Accumulator, make_client: MakeClient, clock: VirtualClock
) -> None:
    other = Accumulator(make_client(), namespace=virtual.operations.namespace, clock=clock)
    first = virtual.load_policy("f", {"inactivity": "10s"})
    assert (first.version, first.outcome, first.differs) == (1, "new", False)
    assert other.load_policy("f", {"inactivity": "10000ms"}).outcome == "same"
    assert other.load_policy("g", {"inactivity": "20s"}).version == 2
    kept = other.load_policy("f", {"inactivity": "30s"}, only_new=True)
    assert (kept.version, kept.outcome, kept.differs) == (1, "kept", True)
    assert other.load_policy("f", {"inactivity": "30s"}).version == 3
    assert {flow: version for flow, (version, _) in virtual.policies().items()} == {"f": 3, "g": 2}
    # A partition that was left behind is brought up.
    client = make_client()
    for key in client.scan_iter(match="*:{2}:policy:*"):
        client.delete(key)
    assert virtual.store.perform(virtual.operations.repair_policies()) == 2
    assert virtual.store.perform(virtual.operations.repair_policies()) == 0


def without_ids(receipts: list[Receipt]) -> list[tuple[Any, ...]]:
    """Window ids are unique, so they differ between namespaces."""
    return [(*r[:3], *r[4:10], [window[1:] for window in r.closed_windows]) for r in receipts]


@pytest.mark.namespaces("one-by-one")
def test_push_many_answers_as_the_same_pushes_one_by_one(
    virtual: Accumulator, make_client: MakeClient, clock: VirtualClock
) -> None:
    one_by_one = Accumulator(make_client(), namespace="one-by-one", partitions=4, clock=clock)
    policies: dict[str, dict[str, Any]] = {
        "f": {"inactivity": "1h"},
        "g": {"inactivity": "1h", "max_events": 7, "on_conflict": "accept_newer", "terminal_kinds": ["end"]},
        "h": {
            "inactivity": "1h",
            "max_events": 4,
            "order_by": "source_version",
            "on_late": "reconcile",
            "keep": "last",
        },
    }
    for accumulator in (virtual, one_by_one):
        for flow, policy in policies.items():
            accumulator.load_policy(flow, policy)
    # Each bucket sees an id again and again: the same, newer or older; now and then one that closes its window.
    flows, kinds = itertools.cycle("ffghffh"), itertools.cycle(["k"] * 10 + ["end"])
    events = [
        Event(
            **event(
                f"e{n // 280 % 8}", f"t:{next(flows)}:{n % 280}", clock, kind=next(kinds), source_version=n % 97,
                payload="x" * (n % 23), content_key="same" if n // 280 % 4 < 2 else None,
            )
        )
        for n in range(10_000)
    ]  # fmt: skip
    many = virtual.push_many(events)
    singly = [one_by_one.push(one) for one in events[:2500]]
    for first in range(2500, 10_000, 700):  # the rest in other parts than push_many made of it, which takes less time
        singly += one_by_one.push_many(events[first : min(first + 700, 10_000)])
    assert [(r.event_id, r.bucket_key) for r in many] == [(one.event_id, one.bucket_key) for one in events]
    assert without_ids(many) == without_ids(singly)
    assert {r.outcome for r in many} == set(Outcome) - {Outcome.UNKNOWN, Outcome.REJECTED}
    assert virtual.counters() == one_by_one.counters()
    for key in {one.bucket_key for one in events[:500]}:
        assert [m.digest for m in virtual.manifests(key)] == [m.digest for m in one_by_one.manifests(key)]
        assert virtual.open_events(key) == one_by_one.open_events(key)
    check_invariants(make_client(), "one-by-one")


def test_push_many_splits_what_is_big(
    virtual: Accumulator, clock: VirtualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    virtual.load_policy("f", {"inactivity": "1h", "max_bytes": 2**27, "max_event_bytes": 2**20})
    sizes: list[int] = []
    send = Store._send

    def measured(store: Store, commands: Any) -> list[Any]:
        sizes.extend(sum(len(part) for part in command if isinstance(part, bytes)) for command in commands)
        return send(store, commands)

    monkeypatch.setattr(Store, "_send", measured)
    receipts = virtual.push_many([event(f"e{n}", at=clock, payload=bytes(100_000)) for n in range(40)])
    assert [receipt.position for receipt in receipts] == list(range(1, 41))
    assert max(sizes) < 2**20 + 10_000 < sum(sizes)


# --- the same on every kind of connection -----------------------------------------------------------------------------


def everything(accumulator: Accumulator, clock: VirtualClock) -> list[Any]:
    """What every method answers in a small history."""
    accumulator.operations._nonce = iter_nonce()
    said: list[Any] = [accumulator.load_policy("f", {"inactivity": "10s", "kinds": ["k"], "cutoffs": ["00:01"]})]
    payloads: list[Any] = [{"a": [], "b": 2**63}, b"\x00\xff", None, "🙂", 1e21]
    keys = ["t:f:é 🙂", "t:f:{x}", "t:f:2"]
    said.append(
        accumulator.push_many(
            [event(f"é{n}", key, clock, payload=value) for key in keys for n, value in enumerate(payloads)]
        )
    )
    said.append(accumulator.push(event("é1", keys[0], clock, payload=b"\x00\xff")))
    said.append(accumulator.push(event("odd", keys[0], clock, kind="ödd", payload=b"\xff")))
    said.append(accumulator.push(event("é1", keys[0], clock, payload="other")))
    said.append(accumulator.retract(keys[0], "é0"))
    said.append(accumulator.hold(keys[1], "30s"))
    said.append([accumulator.bucket(key) for key in keys])
    said.append(accumulator.open_buckets())
    said.append([accumulator.open_events(key) for key in keys])
    said.append(accumulator.flush(keys[2]))
    clock.advance("25s")
    said.append(accumulator.push(event("é9", keys[0], clock)))
    clock.advance("1h")
    said.append([accumulator.manifests(key) for key in keys])
    said.append([(item.code, item.event, item.digest, item.known) for item in accumulator.reconciliation()])
    said.append(accumulator.counters())
    said.append(accumulator.policies())
    said.append(accumulator.flush_where(tenant="t"))
    operations, perform = accumulator.operations, accumulator.store.perform
    for partition in range(4):
        for taken in perform(operations.take(partition, "rq", 10, 1000)):
            said.append(taken)
            said.append(perform(operations.begin(taken.window_id, taken.attempt, "token", 1000, 3)))
            said.append(perform(operations.settle(taken.window_id, "token", "confirmed", "ok")))
    said.append(perform(operations.waiting("rq")))
    said.append(perform(operations.next_due()))
    return said


def iter_nonce() -> Callable[[int], str]:
    numbers = itertools.count()
    return lambda length: f"{next(numbers):0{length}x}"


@pytest.mark.parametrize("hiredis", [True, False])
@pytest.mark.parametrize("protocol", [2, 3])
@pytest.mark.parametrize("decode_responses", [False, True])
def test_b041_every_kind_of_connection_gives_the_same(
    make_client: MakeClient,
    namespace: str,
    fake: fakeredis.FakeServer,
    hiredis: bool,
    protocol: int,
    decode_responses: bool,
) -> None:
    parser = _HiredisParser if hiredis else _RESP3Parser if protocol == 3 else _RESP2Parser
    client = make_client(protocol=protocol, decode_responses=decode_responses)
    client.connection_pool.connection_kwargs["parser_class"] = parser
    clock = VirtualClock()
    said = everything(clock.attach(Accumulator(client, namespace=namespace, partitions=4, clock=clock)), clock)
    used = client.connection_pool.get_connection()
    assert type(used._parser) is parser
    client.connection_pool.release(used)

    clock = VirtualClock()
    with fakeredis.FakeRedis(server=fake) as plain:
        other = clock.attach(Accumulator(plain, namespace=namespace, partitions=4, clock=clock))
        assert said == everything(other, clock)
    check_invariants(make_client(), namespace)


@pytest.mark.parametrize("protocol", [2, 3])
@pytest.mark.parametrize("decode_responses", [False, True])
async def test_the_asynchronous_client_gives_the_same(
    redis_url: str, namespace: str, protocol: int, decode_responses: bool
) -> None:
    clock, blocking = VirtualClock(), VirtualClock()
    async with redis.asyncio.Redis.from_url(redis_url, protocol=protocol, decode_responses=decode_responses) as client:
        mine = AsyncAccumulator(client, namespace=namespace, partitions=4, clock=clock)
        with fakeredis.FakeRedis(server=fakeredis.FakeServer(version=(7, 0), server_type="redis")) as fake:
            theirs = Accumulator(fake, namespace=namespace, partitions=4, clock=blocking)
            mine.operations._nonce, theirs.operations._nonce = iter_nonce(), iter_nonce()
            policy = {"inactivity": "10s", "on_conflict": "reconcile"}
            assert await mine.load_policy("f", policy) == theirs.load_policy("f", policy)
            events = [event(f"e{n}", f"t:f:{n % 5}", clock, payload=[n]) for n in range(100)]
            assert await mine.push_many(events) == theirs.push_many(events)
            assert await mine.push(events[0]) == theirs.push(events[0])
            assert await mine.push(**events[1] | {"payload": 0}) == theirs.push(**events[1] | {"payload": 0})
            assert await mine.hold("t:f:1", "1m") == theirs.hold("t:f:1", "1m")
            assert await mine.retract("t:f:2", "e7") == theirs.retract("t:f:2", "e7")
            assert await mine.bucket("t:f:2") == theirs.bucket("t:f:2")
            assert await mine.open_buckets() == theirs.open_buckets()
            assert await mine.open_events("t:f:2") == theirs.open_events("t:f:2")
            assert await mine.flush("t:f:2") == theirs.flush("t:f:2")
            assert await mine.flush_where(flow="f") == theirs.flush_where(flow="f")
            assert await mine.manifests("t:f:2") == theirs.manifests("t:f:2")
            window_id = theirs.manifests("t:f:3")[0].window_id
            assert await mine.manifest(window_id) == theirs.manifest(window_id)
            assert await mine.reconciliation() == theirs.reconciliation()
            assert await mine.counters() == theirs.counters()
            assert await mine.policies() == theirs.policies()
            with pytest.raises(InvalidInput):
                await mine.flush_where()
            with pytest.raises(UnknownFlow):
                await mine.push(event("e1", "t:g:1"))
            await mine.close()  # a client that was given stays open
            assert await client.ping()


async def test_a_client_of_our_own_is_closed(redis_url: str, namespace: str) -> None:
    with Accumulator(redis_url, namespace=namespace) as accumulator:
        accumulator.load_policy("f", {"inactivity": "1h"})
    async with AsyncAccumulator(redis_url, namespace=namespace) as other:
        assert (await other.push(event("e1"))).outcome is Outcome.ACCEPTED
        # Noscript in a pipeline, and more tasks than connections.
        with redis.Redis.from_url(redis_url) as control:
            control.script_flush()
        receipts = await other.push_many([event(f"m{n}", f"t:f:{n}") for n in range(300)])
        assert {r.outcome for r in receipts} == {Outcome.ACCEPTED}


@pytest.mark.parametrize(
    ("make", "wrong"),
    [
        (Accumulator, lambda: redis.asyncio.Redis()),
        (AsyncAccumulator, lambda: redis.Redis()),
        (Accumulator, lambda: redis.ConnectionPool()),
        (Accumulator, lambda: None),
        (AsyncAccumulator, lambda: object()),
        (Accumulator, lambda: b"redis://127.0.0.1"),
    ],
)
def test_what_is_no_client_is_refused_by_name(make: Any, wrong: Callable[[], Any]) -> None:
    with pytest.raises(InvalidSettings, match=r"client: must be a redis\.") as caught:
        make(wrong())
    assert "not " in str(caught.value)


@pytest.mark.parametrize(
    ("url", "rule"),
    [
        *((url, "must begin with redis://") for url in ("", "localhost", "http://localhost", "redis+x://h")),
        ("redis://:s3cr3t-marker@h:port/0", "can't be read as a URL"),
        ("redis://:s3cr3t-marker@h/0?db=s3cr3t-marker", "holds an option that redis-py does not know, or a value"),
        ("redis://:s3cr3t-marker@h/0?s3cr3t-marker=1", "holds an option that redis-py does not know, or a value"),
        ("redis+cluster://:s3cr3t-marker@h,i?protocol=9", "holds an option that redis-py does not know, or a value"),
        ("redis+sentinel://:s3cr3t-marker@h,i/m?timout=1", "holds an option that redis-py does not know, or a value"),
    ],
)
def test_what_is_no_url_is_refused_without_repeating_it(url: str, rule: str) -> None:
    for make in (Accumulator, AsyncAccumulator):
        with pytest.raises(InvalidSettings, match=f"redis_url: {rule}") as caught:
            make(url)
        assert "marker" not in str(caught.value)


# --- namespaces -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["", "A", "a b", "a:b", "{a}", "x" * 33, "é", "a\n"])
def test_a_namespace_has_a_plain_name(make_client: MakeClient, name: str) -> None:
    with pytest.raises(InvalidSettings, match="namespace: must be 1 to 32 characters"):
        Accumulator(make_client(), namespace=name)


@pytest.mark.parametrize("partitions", [0, -1, 4097])
def test_a_namespace_has_some_partitions(make_client: MakeClient, partitions: int) -> None:
    with pytest.raises(AccumulatorError, match="1 to 4096 partitions"):
        Accumulator(make_client(), partitions=partitions)


def test_a_namespace_is_met_as_it_was_made(make_client: MakeClient, namespace: str) -> None:
    client = make_client()
    Accumulator(client, namespace=namespace, partitions=7).load_policy("f", {"inactivity": "1h"})
    before = contents(client)
    assert Accumulator(client, namespace=namespace).push(event("e1")).outcome is Outcome.ACCEPTED
    assert client.hgetall(f"{namespace}:meta")[b"partitions"] == b"7"
    Accumulator(client, namespace=namespace).flush("t:f:1")

    refused: list[tuple[Accumulator, str]] = [
        (Accumulator(client, namespace=namespace, partitions=8), "has 7 partitions, not 8: set partitions to 7"),
        (Accumulator(client, namespace=namespace, clock=lambda: 1), "is live, this client virtual.*another namespace"),
    ]
    for accumulator, words in refused:
        with pytest.raises(NamespaceMismatch, match=words):
            accumulator.push(event("e2"))
        with pytest.raises(NamespaceMismatch, match=words):
            accumulator.counters()
    client.hset(f"{namespace}:meta", "format", FORMAT + 1)
    newer = Accumulator(client, namespace=namespace)
    with pytest.raises(NamespaceMismatch, match=r"format 2, this release reads up to 1: upgrade"):
        newer.push(event("e3"))
    with pytest.raises(NamespaceMismatch):
        newer.store.perform(newer.operations.tick(0, 10))
    client.hset(f"{namespace}:meta", "format", FORMAT)
    assert set(contents(client)) > set(before)
    check_invariants(client, namespace)


def test_a_virtual_namespace_is_refused_in_production(virtual: Accumulator, make_client: MakeClient) -> None:
    virtual.load_policy("f", {"inactivity": "1h"})
    live = Accumulator(make_client(), namespace=virtual.operations.namespace)
    with pytest.raises(
        NamespaceMismatch, match="is virtual, this client live: a namespace with a virtual clock is for tests"
    ):
        live.push(event("e1"))


def test_first_clients_of_a_namespace_agree(make_client: MakeClient, namespace: str) -> None:
    # The second reads while nothing is there, and writes after the first: HSETNX leaves what the first wrote.
    client = make_client()
    slow = Accumulator(client, namespace=namespace, partitions=8)
    driver = slow.operations.connect()
    next(driver)
    driver.send([[]])
    Accumulator(client, namespace=namespace, partitions=4).load_policy("f", {"inactivity": "1h"})
    with pytest.raises(NamespaceMismatch, match="has 4 partitions, not 8"):
        slow.push(event("e1"))


# --- a server that does not do its part -------------------------------------------------------------------------------


def refused_everywhere(accumulator: Accumulator, error: type[Exception], words: str) -> None:
    calls: list[Callable[[], Any]] = [
        lambda: accumulator.push(event("e1")),
        lambda: accumulator.push_many([event("e1")]),
        lambda: accumulator.flush("t:f:1"),
        lambda: accumulator.bucket("t:f:1"),
        lambda: accumulator.counters(),
        lambda: accumulator.load_policy("f", {"inactivity": "1s"}),
    ]
    for call in calls:
        with pytest.raises(error, match=words) as caught:
            call()
        shown = f"{caught.value!r} {caught.value}"
        assert "marker" not in shown
        assert isinstance(caught.value, AccumulatorError)


def test_no_server(unused_port: int) -> None:
    with Accumulator(f"redis://user:s3cr3t-marker@127.0.0.1:{unused_port}/0") as accumulator:
        refused_everywhere(accumulator, ServerUnavailable, "can't be reached: .*refused")


async def test_no_server_asynchronously(unused_port: int) -> None:
    async with AsyncAccumulator(f"redis://:s3cr3t-marker@127.0.0.1:{unused_port}/0") as accumulator:
        with pytest.raises(ServerUnavailable, match="can't be reached") as caught:
            await accumulator.push(event("e1"))
    assert "marker" not in str(caught.value)


@pytest.fixture
def unused_port() -> int:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


async def test_a_wrong_password(start_server: StartServer, server_kind: str) -> None:
    server = start_server(password="right-marker")
    for credentials in ("", ":wrong-marker@", "user:wrong-marker@"):
        url = f"redis://{credentials}127.0.0.1:{server.port}/0"
        with Accumulator(url) as accumulator:
            refused_everywhere(accumulator, AuthenticationFailed, "check user and password")
        async with AsyncAccumulator(url) as other:
            with pytest.raises(AuthenticationFailed):
                await other.push(event("e1"))


def test_over_maxmemory_pushes_are_refused_and_what_drains_goes_on(
    start_server: StartServer, server_kind: str, namespace: str
) -> None:
    server = start_server(config={"maxmemory-policy": "noeviction"})
    clock = VirtualClock()
    with (
        redis.Redis.from_url(server.url) as control,
        Accumulator(server.url, namespace=namespace, partitions=4, clock=clock) as accumulator,
    ):
        clock.attach(accumulator)
        accumulator.load_policy("f", {"inactivity": "10s"})
        accumulator.push_many([event(f"e{n}", f"t:f:{n}", clock) for n in range(20)])
        control.config_set("maxmemory", "1mb")
        for call in (
            lambda: accumulator.push(event("e1", "t:f:new", clock)),
            lambda: accumulator.push_many([event("e1", f"t:f:new{n}", clock) for n in range(20)]),
        ):
            with pytest.raises(ServerRefused, match="OOM: the server is over its maxmemory") as caught:
                call()
            assert caught.value.code == "OOM"
        check_invariants(control, namespace)
        clock.advance("10s")
        assert accumulator.open_buckets() == []
        assert accumulator.flush("t:f:1").outcome == "nothing_open"
        perform, tried = accumulator.store.perform, accumulator.operations
        for partition in range(4):
            for taken in perform(tried.take(partition, "rq", 100, 1000)):
                assert perform(tried.begin(taken.window_id, taken.attempt, "token", 1000, 3)).manifest is not None
                assert perform(tried.settle(taken.window_id, "token", "confirmed", "ok")) == "done"
        control.config_set("maxmemory", "0")
        assert accumulator.counters()["manifest:confirmed"] == 20
        assert accumulator.push(event("e1", "t:f:new", clock)).outcome is Outcome.ACCEPTED
        check_invariants(control, namespace)


def test_over_maxmemory_people_decide_all_the_same(start_server: StartServer, server_kind: str, namespace: str) -> None:
    server = start_server(config={"maxmemory-policy": "noeviction"})
    clock = VirtualClock()
    who: dict[str, Any] = {"by": "ana", "reason": "it is full"}
    with (
        redis.Redis.from_url(server.url) as control,
        Accumulator(server.url, namespace=namespace, partitions=4, clock=clock) as accumulator,
    ):
        clock.attach(accumulator)
        perform, operations = accumulator.store.perform, accumulator.operations
        accumulator.load_policy("f", {"inactivity": "10s", "kinds": ["k"]})
        accumulator.push_many([event("e", f"t:f:{n}", clock) for n in range(8)])
        clock.advance("10s")
        taken = [one for p in range(4) for one in perform(operations.take(p, "rq", 100, 1000))]
        endings = ["dead"] * 3 + ["awaiting_approval"] * 2 + ["uncertain", "reconciling"]
        for one, ending in zip(taken, endings, strict=False):
            assert perform(operations.begin(one.window_id, 1, "token", 1000, 3)).manifest is not None
            assert perform(operations.settle(one.window_id, "token", ending, "x", 1000)) == "done"
        accumulator.push(event("e2", "t:f:0", clock))
        accumulator.push_many([event(f"q{n}", f"t:f:{n}", clock, kind="odd", payload="x") for n in range(6)])
        control.script_flush()
        control.config_set("maxmemory", "1mb")
        with pytest.raises(ServerRefused, match="OOM"):
            accumulator.push(event("e1", "t:f:new", clock))
        ids = [one.window_id for one in taken]
        decided = [
            accumulator.replay(ids[0], **who),
            accumulator.confirm(ids[1], **who),
            accumulator.discard(ids[2], **who),
            accumulator.approve(ids[3], **who),
            accumulator.refuse(ids[4], **who),
            accumulator.discard(ids[5], **who),
            accumulator.replay(ids[6], effects="done", **who),
        ]
        assert [told.outcome for told in decided] == ["done"] * 7
        assert accumulator.attention() == []
        # An event of the queue was taken in before: it moves, also into a window that has to be opened for it.
        items = {item.event.bucket_key: item for item in accumulator.reconciliation()}
        for key, version in (("t:f:0", 2), ("t:f:1", 2)):
            accepted = accumulator.resolve(items[key], "accept", **who).receipt
            assert accepted is not None
            assert (accepted.outcome, accepted.window_version) == (Outcome.ACCEPTED, version)
        assert accumulator.resolve(items["t:f:2"], "discard", **who).outcome == "discarded"
        assert accumulator.resolve_where("discard", code="unknown_kind", **who) == {"discarded": 3, "missing": 0}
        clock.advance("10s")
        assert (accumulator.open_buckets(), accumulator.reconciliation()) == ([], [])
        assert [m.event_ids for m in accumulator.manifests("t:f:0")] == [("e",), ("e2", "q0")]
        control.config_set("maxmemory", "0")
        check_invariants(control, namespace)


@pytest.mark.parametrize("database", ["99", "16"])
async def test_a_database_that_is_not_there_is_a_setting(
    start_server: StartServer, server_kind: str, database: str
) -> None:
    server = start_server(password="right-marker")
    url = f"redis://:right-marker@127.0.0.1:{server.port}/{database}"
    told = "^redis_url: names a database that the server does not have$"
    with Accumulator(url) as accumulator, pytest.raises(InvalidSettings, match=told):
        accumulator.push(event("e1"))
    async with AsyncAccumulator(url) as other:
        with pytest.raises(InvalidSettings, match=told):
            await other.push(event("e1"))


def test_a_read_only_server(start_server: StartServer, server_kind: str, namespace: str) -> None:
    server = start_server()
    with redis.Redis.from_url(server.url) as control, Accumulator(server.url, namespace=namespace) as accumulator:
        accumulator.load_policy("f", {"inactivity": "10s"})
        control.replicaof("127.0.0.1", server.port)
        with pytest.raises(ServerRefused) as caught:
            accumulator.push(event("e1"))
        assert caught.value.code in ("READONLY", "MASTERDOWN")
        control.replicaof("NO", "ONE")
        assert accumulator.push(event("e1")).outcome is Outcome.ACCEPTED


def test_missing_rights_are_named(start_server: StartServer, server_kind: str, namespace: str) -> None:
    server = start_server()
    with redis.Redis.from_url(server.url) as control, Accumulator(server.url, namespace=namespace) as first:
        first.load_policy("f", {"inactivity": "10s"})
        control.acl_setuser(
            "poor", True, passwords=["+s3cr3t-marker"], keys=[f"{namespace}:*"], commands=["+@all", "-evalsha", "-eval"]
        )
        url = f"redis://poor:s3cr3t-marker@127.0.0.1:{server.port}"
        with (
            Accumulator(url, namespace=namespace) as poor,
            pytest.raises(MissingRight, match=r"(?i)evalsha") as caught,
        ):
            poor.push(event("e1"))
        assert "marker" not in str(caught.value)


def push_seen(data: bytes) -> bool:
    return b"EVALSHA" in data or b"EVAL" in data


def test_a_part_without_an_answer_is_unknown_and_may_be_sent_again(
    live: Accumulator, redis_url: str, server: EmbeddedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    live.load_policy("f", {"inactivity": "1h"})
    live.push(event("warm", "t:f:warm"))
    monkeypatch.setattr(windows, "ROUND_EVENTS", 10)
    fields = [event(f"e{n}", f"t:f:{n}") for n in range(40)]
    with (
        Proxy(server.port) as proxy,
        Accumulator(proxy.url, namespace=live.operations.namespace, retry=ONCE) as accumulator,
    ):
        accumulator.push(event("warm", "t:f:warm2"))
        rounds = itertools.count()
        actions = {1: Do.CUT_BEFORE, 2: Do.CUT_AFTER}
        proxy.on_request = lambda data: actions.get(next(rounds), Do.PASS) if push_seen(data) else Do.PASS
        receipts = accumulator.push_many(fields)
        outcomes = [r.outcome for r in receipts]
        unknown = [n for n, outcome in enumerate(outcomes) if outcome is Outcome.UNKNOWN]
        assert {Outcome.ACCEPTED, Outcome.UNKNOWN} == set(outcomes)
        assert 20 <= len(unknown) <= 22
        assert [(r.event_id, r.bucket_key) for r in receipts] == [(f["event_id"], f["bucket_key"]) for f in fields]
        for n in unknown:
            assert "can't be reached" in (receipts[n].error or "")
            assert receipts[n].window_id is None
        there = {key for key, _ in live.open_buckets()}
        again = accumulator.push_many([fields[n] for n in unknown])
        for n, receipt in zip(unknown, again, strict=True):
            was_there = fields[n]["bucket_key"] in there
            assert receipt.outcome is (Outcome.DUPLICATE if was_there else Outcome.ACCEPTED)
        assert {r.outcome for r in again} == {Outcome.DUPLICATE, Outcome.ACCEPTED}
        # Where no part got an answer, the error itself is raised.
        proxy.on_request = lambda data: Do.CUT_AFTER if push_seen(data) else Do.PASS
        with pytest.raises(ServerUnavailable):
            accumulator.push_many(fields)
        with pytest.raises(ServerUnavailable):
            accumulator.push(event("e99", "t:f:99"))
        proxy.on_request = lambda _: Do.PASS
        assert accumulator.push(event("e99", "t:f:99")).outcome in (Outcome.CONFLICT, Outcome.DUPLICATE)
    counters = live.counters()
    assert counters["accepted"] == 43


def test_what_was_answered_stands_when_the_ceilings_can_not_be_measured(
    live: Accumulator, server: EmbeddedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    live.load_policy("f", {"inactivity": "1h"})
    live.store.perform(live.operations.set_ceilings(20, 20))
    monkeypatch.setattr(windows, "ROUND_EVENTS", 10)
    with (
        Proxy(server.port) as proxy,
        Accumulator(proxy.url, namespace=live.operations.namespace, retry=ONCE) as accumulator,
    ):
        accumulator.push(event("warm", "t:f:warm"))
        measured = itertools.count()
        proxy.on_request = lambda data: Do.CUT_BEFORE if b"ZCARD" in data and next(measured) == 2 else Do.PASS
        receipts = accumulator.push_many([event(f"e{n}", f"t:f:{n}") for n in range(40)])
    outcomes = Counter(receipt.outcome for receipt in receipts)
    assert outcomes.keys() == {Outcome.ACCEPTED, Outcome.UNKNOWN}
    assert live.counters()["accepted"] == 1 + outcomes[Outcome.ACCEPTED]
    assert {receipt.bucket_key for receipt in receipts if receipt.outcome is Outcome.ACCEPTED} == {
        key for key, _ in live.open_buckets()
    } - {"t:f:warm"}


@pytest.mark.parametrize("late", [2, 9])
def test_b055_what_the_client_sends_again_happens_once(live: Accumulator, server: EmbeddedServer, late: int) -> None:
    live.load_policy("f", {"inactivity": "1h"})
    fields = event("e1")
    with (
        Proxy(server.port) as proxy,
        redis.Redis.from_url(proxy.url, socket_timeout=0.1, retry=Retry(NoBackoff(), 3), protocol=2) as client,
    ):
        accumulator = Accumulator(client, namespace=live.operations.namespace)
        accumulator.push(event("warm", "t:f:warm"))
        accumulator.flush("t:f:warm")
        proxy.delay = 0.2
        scripts = itertools.count()

        def delayed(data: bytes) -> Do:
            return Do.LATE if push_seen(data) and next(scripts) < late else Do.PASS

        proxy.on_request = delayed
        if late < 4:  # an answer comes in the end: that of the last time it was sent
            receipt = accumulator.push(fields)
            assert (receipt.outcome, receipt.window_version) == (Outcome.DUPLICATE, 1)
            scripts = itertools.count()
            flushed = accumulator.flush("t:f:1")
            assert (flushed.outcome, len(flushed.closed_windows)) == ("flushed", 1)
        else:
            with pytest.raises(ServerUnavailable, match="no answer from the server in time"):
                accumulator.push(fields)
            scripts = itertools.count()
            with pytest.raises(ServerUnavailable, match="no answer from the server in time"):
                accumulator.flush("t:f:1")
            scripts = itertools.count(late)
            assert accumulator.push(fields).outcome is Outcome.DUPLICATE
            assert accumulator.flush("t:f:1").outcome == "nothing_open"
    (manifest,) = live.manifests("t:f:1")
    assert (manifest.event_ids, manifest.window_version) == (("e1",), 1)
    counters = live.counters()
    assert (counters["accepted"], counters["closed"]) == (2, 2)


def test_errors_can_be_pickled(tmp_path: Path) -> None:
    import pickle

    for error in (ServerRefused("OOM", "text"), UnknownFlow("f"), NamespaceMismatch("m"), InvalidSettings("f", "rule")):
        again = pickle.loads(pickle.dumps(error))
        assert (type(again), str(again), again.args) == (type(error), str(error), error.args)
