"""Faults that people met in systems that do this job: each test is named after its case.

The cases of the worker are in test_worker.py, B041 and B055 in test_client.py, B069 in test_scripts.py.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import orjson
import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from accumulator.client import Accumulator
from accumulator.embedded import EmbeddedServer
from accumulator.envelope import Event, bucket_key
from accumulator.errors import InvalidEvent, InvalidPolicy, ServerError
from accumulator.manifest import Manifest
from accumulator.policy import Policy
from accumulator.testing import START, VirtualClock
from accumulator.windows import Outcome
from tests.conftest import MakeClient, StartServer, event, wait_until
from tests.invariants import check_invariants, contents
from tests.proxy import Do, Proxy

P1 = {
    "inactivity": "5s", "max_age": "30s", "max_events": 100, "max_bytes": 65_536, "terminal_kinds": ["done"],
    "dedupe_ttl": "24h",
}  # fmt: skip
KEY = "t:f:1"


def closings(manifests: list[Manifest], clock_start: int) -> list[tuple[str, int, int]]:
    """(reason, closed_at after the start in ms, events) of each manifest."""
    return [(m.close_reason, m.closed_at - clock_start, m.event_count) for m in manifests]


def test_b002_steady_traffic_never_starves_a_window(virtual: Accumulator, clock: VirtualClock) -> None:
    virtual.load_policy("f", P1 | {"max_age": "20s"})
    start = clock.now
    for n in range(65):
        virtual.push(event(f"e{n}", at=clock))
        clock.advance("1s")
    clock.advance("1m")
    manifests = virtual.manifests(KEY)
    assert closings(manifests, start) == [
        ("max_age", 20_000, 20), ("max_age", 40_000, 20), ("max_age", 60_000, 20), ("inactivity", 69_000, 5),
    ]  # fmt: skip
    assert sorted(i for m in manifests for i in m.event_ids) == sorted(f"e{n}" for n in range(65))
    assert [m.relation for m in manifests] == ["first", "continuation", "continuation", "continuation"]
    for before, after in itertools.pairwise(manifests):
        assert after.previous_window_id == before.window_id
    assert manifests[0].previous_window_id is None


@pytest.mark.parametrize("worker", [True, False])
def test_b003_the_last_second_does_not_stretch_a_window(
    virtual: Accumulator, clock: VirtualClock, worker: bool
) -> None:
    virtual.load_policy("f", P1)
    start = clock.now
    for at in (*range(0, 29_000, 4000), 29_500, 30_200):
        clock.advance(start + at - clock.now, worker=worker)
        virtual.push(event(f"e{at}", at=clock))
    clock.advance("1m")
    first, second = virtual.manifests(KEY)
    assert (first.close_reason, first.closed_at - start) == ("max_age", 30_000)
    assert (first.event_ids[-1], second.event_ids) == ("e29500", ("e30200",))
    assert second.opened_at - start == 30_200
    assert first.sealed_at - start == (30_000 if worker else 30_200)


def test_b013_twenty_thousand_events_in_one_window(live: Accumulator) -> None:
    live.load_policy("f", {"inactivity": "1h", "max_events": 20_001})
    ids = [f"e{n}" for n in range(20_000)]
    receipts = live.push_many([event(event_id, payload=[1]) for event_id in ids])
    assert [receipt.position for receipt in receipts] == list(range(1, 20_001))
    assert live.retract(KEY, "e19999").outcome == "retracted"
    (closed,) = live.flush(KEY).closed_windows
    manifest = live.manifest(closed.window_id)
    assert manifest is not None
    assert manifest.event_ids == tuple(ids[:-1])
    assert (manifest.event_count, manifest.entries, manifest.bytes) == (19_999, 19_999, 3 * 19_999)
    assert (manifest.anomaly, manifest.retracted_event_ids) == (None, ("e19999",))
    assert len(list(manifest.payloads())) == 19_999
    assert {receipt.outcome for receipt in live.push_many([event(i) for i in ids[:50]])} == {Outcome.CONFLICT}
    perform, operations = live.store.perform, live.operations
    (partition,) = [p for p, waiting in enumerate(perform(operations.waiting("rq"))) if waiting]
    (taken,) = perform(operations.take(partition, "rq", 1, 1000))
    grant = perform(operations.begin(taken.window_id, taken.attempt, "token", 60_000, 1))
    assert grant.manifest is not None
    assert grant.manifest.event_ids == manifest.event_ids
    assert perform(operations.settle(taken.window_id, "token", "confirmed", "ok", manifest=manifest)) == "done"


def test_b013_the_ceiling_is_a_documented_one() -> None:
    assert Policy.load("f", {"inactivity": "1h", "max_events": 100_000}).max_events == 100_000
    with pytest.raises(InvalidPolicy, match=r"max_events: .*100000"):
        Policy.load("f", {"inactivity": "1h", "max_events": 100_001})


def test_b016_a_timer_belongs_to_its_window(virtual: Accumulator, clock: VirtualClock) -> None:
    virtual.load_policy("f", P1 | {"max_events": 3})
    start = clock.now
    clock.advance("1s")
    virtual.push_many([event(f"e{n}", at=clock) for n in range(3)])
    clock.advance("3900ms")
    virtual.push(event("e3", at=clock))
    clock.advance("1m")
    assert closings(virtual.manifests(KEY), start) == [("max_events", 1000, 3), ("inactivity", 9900, 1)]


@pytest.fixture
def in_zone(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """Makes this process live in a zone."""

    def set_zone(name: str) -> None:
        monkeypatch.setenv("TZ", name)
        time.tzset()

    yield set_zone
    monkeypatch.undo()
    time.tzset()


@pytest.mark.parametrize("zone", ["Asia/Shanghai", "America/Los_Angeles", "UTC"])
def test_b021_the_hosts_zone_shifts_nothing(
    virtual: Accumulator, clock: VirtualClock, in_zone: Callable[[str], None], zone: str
) -> None:
    in_zone(zone)
    virtual.load_policy("f", P1 | {"max_age": "1h", "inactivity": None})
    start = clock.now
    naive = datetime(2026, 1, 1, 0, 0, 20)
    for field in ("occurred_at", "deadline_at"):
        with pytest.raises(InvalidEvent, match=f"{field}: must carry an offset"):
            virtual.push(event("e1", at=clock) | {field: naive})
        with pytest.raises(InvalidEvent, match=f"{field}: must carry an offset"):
            virtual.push(event("e1", at=clock) | {field: naive.isoformat()})
    # astimezone() puts the host's offset on: another spelling of the same instant, and the same content.
    local = naive.replace(tzinfo=UTC).astimezone()
    virtual.push(event("e1", at=local, deadline_at=local))
    virtual.push(event("e1", at=datetime(2026, 1, 1, 0, 0, 20, tzinfo=UTC), deadline_at="2026-01-01T08:00:20+08:00"))
    clock.advance("1h")
    (manifest,) = virtual.manifests(KEY)
    (entry,) = manifest.events
    assert (manifest.close_reason, manifest.closed_at - start, manifest.duplicates) == ("deadline", 20_000, 1)
    assert entry.event.occurred_at == entry.event.deadline_at == START + timedelta(seconds=20)
    assert entry.event.content_digest == "1ROLpHk7BOYLoxChnehHtOg"


def test_b022_one_wrong_instant_makes_no_other_event_late(virtual: Accumulator, clock: VirtualClock) -> None:
    virtual.load_policy("default", P1 | {"order_by": "source_version"})
    virtual.load_policy("ordered", P1 | {"order_by": "occurred_at"})
    ahead = clock.instant + timedelta(days=2)
    for flow, outcome in (("f", Outcome.ACCEPTED), ("ordered", Outcome.RECONCILED)):
        keys = [f"t:{flow}:1", f"t:{flow}:2"]
        wrong = virtual.push(event("e1", keys[0], ahead))
        assert wrong.outcome is outcome
        assert wrong.code == (None if outcome is Outcome.ACCEPTED else "occurred_in_future")
        for n in range(10):
            clock.advance("6s")  # each in a window of its own: after what the ones before it held
            for key in keys:
                receipt = virtual.push(event(f"c{n}", key, clock))
                assert (receipt.outcome, receipt.late) == (Outcome.ACCEPTED, False)
        # Seconds where milliseconds belong lie in 1970, milliseconds where seconds belong in a far year.
        for instant in (datetime.fromtimestamp(clock.now / 1e6, UTC), datetime(2286, 11, 20, 17, 46, 40, tzinfo=UTC)):
            with pytest.raises(InvalidEvent, match="must lie between 2000-01-01 and 2100-01-01"):
                virtual.push(event("e2", keys[0], instant))
    (item,) = virtual.reconciliation()
    assert (item.code, item.event.event_id) == ("occurred_in_future", "e1")


def test_b023_a_late_event_joins_and_a_too_late_one_waits(virtual: Accumulator, clock: VirtualClock) -> None:
    options = {"order_by": "occurred_at", "on_late": "accept", "max_delay": "60s", "on_too_old": "reconcile"}
    virtual.load_policy("f", P1 | options)
    start, at = clock.now, clock.instant
    virtual.push(event("e1", at=at + timedelta(seconds=3)))
    clock.advance("5s")
    (first,) = virtual.manifests(KEY)
    before = contents_of(virtual, first)
    clock.advance("3s")
    late = virtual.push(event("l1", at=at + timedelta(seconds=2)))
    assert (late.outcome, late.late, late.window_version) == (Outcome.ACCEPTED, True, 2)
    clock.advance(start + 120_000 - clock.now)
    too_old = virtual.push(event("l2", at=at + timedelta(seconds=3)))
    assert (too_old.outcome, too_old.code) == (Outcome.RECONCILED, "too_old")
    first_again, second = virtual.manifests(KEY)
    assert first_again == first
    assert contents_of(virtual, first) == before
    assert (second.event_ids, second.late_event_ids) == (("l1",), ("l1",))
    assert (second.previous_window_id, second.relation) == (first.window_id, "after_close")
    (item,) = virtual.reconciliation()
    assert (item.event.event_id, item.code) == ("l2", "too_old")


def contents_of(accumulator: Accumulator, manifest: Manifest) -> dict[str, Any]:
    """All keys of a closed window, as they are."""
    client = accumulator.store.client
    assert isinstance(client, redis.Redis)
    return contents(client, f"{accumulator.operations.namespace}:*{manifest.window_id}")


def test_b026_fifty_producers_open_one_window(live: Accumulator, redis_url: str) -> None:
    live.load_policy("f", {"inactivity": "1h"})
    producers, rounds = 50, 200
    barrier = threading.Barrier(producers)
    faults: list[BaseException] = []
    with Accumulator(redis_url, namespace=live.operations.namespace) as shared:
        shared.push(event("first", "t:f:first"))

        def produce(number: int) -> None:
            try:
                made = [Event(**event(f"e{number}", f"t:f:{n}")) for n in range(rounds)]
                for one in made:
                    barrier.wait(30)
                    assert shared.push(one).outcome is Outcome.ACCEPTED
            except BaseException as fault:
                faults.append(fault)
                barrier.abort()

        threads = [threading.Thread(target=produce, args=(number,)) for number in range(producers)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(50)
    assert faults == []
    for n in range(rounds):
        (closed,) = live.flush(f"t:f:{n}").closed_windows
        assert closed.window_version == 1
    for n in range(0, rounds, 10):
        (manifest,) = live.manifests(f"t:f:{n}")
        assert sorted(manifest.event_ids) == sorted(f"e{number}" for number in range(producers))
    counters = live.counters()
    assert (counters["accepted"], counters["closed"]) == (producers * rounds + 1, rounds)


@pytest.mark.parametrize("fault", [Do.CUT_BEFORE, Do.CUT_AFTER])
def test_b029_no_window_without_a_timer_wherever_a_producer_dies(
    server: EmbeddedServer, make_client: MakeClient, namespace: str, fault: Do
) -> None:
    control = make_client()
    with Proxy(server.port) as proxy:
        for stop_at in itertools.count():
            control.flushall()
            control.script_flush()
            clock = VirtualClock()
            other = clock.attach(Accumulator(control, namespace=namespace, partitions=2, clock=clock))
            calls = itertools.count()

            def cut(data: bytes, calls: Iterator[int] = calls, stop_at: int = stop_at) -> Do:
                if b"CLIENT" in data or b"HELLO" in data:
                    return Do.PASS  # a connection's own greetings are no calls of ours
                return fault if next(calls) == stop_at else Do.PASS

            proxy.on_request = cut
            with redis.Redis.from_url(proxy.url, retry=Retry(NoBackoff(), 0), protocol=2) as dying:
                producer = Accumulator(dying, namespace=namespace, partitions=2, clock=clock)
                first = event("e1", at=clock)
                died = False
                try:
                    producer.load_policy("f", P1)
                    producer.push(first)
                except ServerError:
                    died = True
                check_invariants(control, namespace)
            proxy.on_request = lambda _: Do.PASS
            other.load_policy("f", P1)
            # In the gap another one delivers what happened ten seconds before; then the first tries again.
            clock.advance("2s")
            older = other.push(event("e0", at=clock.instant - timedelta(seconds=12)))
            again = other.push(first)
            assert older.outcome is Outcome.ACCEPTED
            assert again.outcome in (Outcome.ACCEPTED, Outcome.DUPLICATE)
            assert not (again.outcome is Outcome.ACCEPTED and not died)
            window = other.bucket(KEY).open
            assert window is not None
            assert window.due_at == clock.now + 5000
            check_invariants(control, namespace)
            clock.advance("1m")
            (manifest,) = other.manifests(KEY)
            assert set(manifest.event_ids) == {"e0", "e1"}
            assert manifest.event_ids == (("e0", "e1") if again.outcome is Outcome.ACCEPTED else ("e1", "e0"))
            check_invariants(control, namespace)
            if not died:
                break
    assert stop_at > 5


def test_b031_ids_are_unique_within_a_bucket(virtual: Accumulator, clock: VirtualClock) -> None:
    virtual.load_policy("f", P1)
    first = event("m-1", "tenant-a:f:u1", clock, source="s1")
    assert virtual.push(first).outcome is Outcome.ACCEPTED
    assert virtual.push(event("m-1", "tenant-b:f:u1", clock, source="s2")).outcome is Outcome.ACCEPTED
    assert virtual.push(event("m-1", "tenant-a:f:u2", clock, source="s2")).outcome is Outcome.ACCEPTED
    assert virtual.push(first).outcome is Outcome.DUPLICATE
    clock.advance("1h")
    assert virtual.push(first).outcome is Outcome.DUPLICATE, "also after the window closed"


@pytest.mark.parametrize("closed", [False, True])
@pytest.mark.parametrize("rule", ["reject", "reconcile"])
def test_b032_same_id_other_content_is_told(
    virtual: Accumulator, make_client: MakeClient, clock: VirtualClock, rule: str, closed: bool
) -> None:
    virtual.load_policy("f", P1 | {"on_conflict": rule})
    one, other = (Event(**event("e1", at=clock, payload={"q": n})) for n in (1, 2))
    virtual.push(one)
    if closed:
        clock.advance("5s")
    receipt = virtual.push(other)
    clock.advance("1m")
    (manifest,) = virtual.manifests(KEY)
    assert list(manifest.payloads()) == [{"q": 1}]
    if rule == "reject":
        assert (receipt.outcome, receipt.window_version, receipt.code) == (Outcome.CONFLICT, 1, None)
        ((_, fields),) = contents(make_client(), f"{virtual.operations.prefix_of(KEY)}audit").popitem()[1]
        audited = dict(zip(fields[::2], fields[1::2], strict=True))
        assert audited["outcome"] == "conflict"
        assert (audited["event_id"], audited["bucket_key"]) == ("e1", KEY)
        assert (audited["digest"], audited["known"]) == (other.content_digest, one.content_digest)
        assert virtual.push(other).outcome is Outcome.CONFLICT
        assert virtual.reconciliation() == []
    else:
        assert (receipt.outcome, receipt.code) == (Outcome.RECONCILED, "conflict")
        (item,) = virtual.reconciliation()
        assert (item.event, item.code, item.known) == (other, "conflict", (one.content_digest,))
        assert item.digest == other.content_digest
        assert virtual.push(other).outcome is Outcome.DUPLICATE
    assert virtual.push(one).outcome is Outcome.DUPLICATE


def failing(do: Do) -> Callable[[bytes], Do]:
    """What a proxy does with calls of scripts."""
    return lambda data: do if b"EVAL" in data else Do.PASS


def test_b035_nothing_is_lost_between_flushes_that_fail_half_way(
    live: Accumulator, server: EmbeddedServer, redis_url: str
) -> None:
    live.load_policy("f", {"inactivity": "1h", "max_events": 100_000})
    producers, each = 4, 2500
    done = threading.Event()
    faults: list[BaseException] = []

    def produce(number: int) -> None:
        sizes = itertools.cycle([1, 1, 1, 7, 40, 1, 100])
        made = [Event(**event(f"p{number}-{n}", KEY)) for n in range(each)]
        try:
            with Accumulator(redis_url, namespace=live.operations.namespace) as producer:
                while made:
                    size = next(sizes)
                    part, made = made[:size], made[size:]
                    assert {r.outcome for r in producer.push_many(part)} == {Outcome.ACCEPTED}
        except BaseException as fault:
            faults.append(fault)

    threads = [threading.Thread(target=produce, args=(number,)) for number in range(producers)]
    flushed = failed = 0
    with (
        Proxy(server.port) as proxy,
        Accumulator(proxy.url, namespace=live.operations.namespace, retry=Retry(NoBackoff(), 0)) as flusher,
    ):
        flusher.flush(KEY)
        for thread in threads:
            thread.start()
        for turn in itertools.count():
            if not any(thread.is_alive() for thread in threads):
                break
            half_way = [Do.CUT_BEFORE, Do.CUT_AFTER][turn // 5 % 2]
            proxy.on_request = failing(half_way if turn % 5 == 4 else Do.PASS)
            try:
                flushed += flusher.flush(KEY).outcome == "flushed"
            except ServerError:
                failed += 1
            done.wait(0.002)
    assert faults == []
    live.flush(KEY)
    manifests = live.manifests(KEY)
    ids = Counter(event_id for manifest in manifests for event_id in manifest.event_ids)
    assert set(ids) == {f"p{number}-{n}" for number in range(producers) for n in range(each)}
    assert max(ids.values()) == 1
    assert all(manifest.event_count == len(manifest.event_ids) > 0 for manifest in manifests)
    assert [manifest.window_version for manifest in manifests] == list(range(1, len(manifests) + 1))
    assert flushed > 3
    assert failed > 1
    for number in range(producers):  # each producer's own order holds, within and across windows
        mine = [i for m in manifests for i in m.event_ids if i.startswith(f"p{number}-")]
        assert mine == [f"p{number}-{n}" for n in range(each)]


def test_b037_keys_that_look_alike_stay_apart(virtual: Accumulator, clock: VirtualClock) -> None:
    virtual.load_policy("f", P1)
    tuples = [
        ("t", "f", "123/abc"), ("t", "f", "123/def"), ("a|b", "f", "c"), ("a", "f", "b|c"), ("t", "f", " x"),
        ("t", "f", "x"), ("t", "f", "X"), ("t", "f", "x "), ("t", "f", "a:b"), ("t", "f", "a", "b"),
        ("t", "f", "a%3Ab"), ("t", "f", "é"), ("t", "f", "e\u0301"), ("t", "f", "{a}"), ("t", "f", "a"),
    ]  # fmt: skip
    keys = [bucket_key(*parts) for parts in tuples]
    assert len(set(keys)) == len(keys)
    for turn in range(2):
        for key in keys:
            virtual.push(event(f"e{turn}", key, clock))
    assert sorted(key for key, _ in virtual.open_buckets()) == sorted(keys)
    clock.advance("5s")
    for key in keys:
        (manifest,) = virtual.manifests(key)
        assert (manifest.event_ids, manifest.bucket_key) == (("e0", "e1"), key)


def test_b042_numbers_come_out_as_they_went_in(
    virtual: Accumulator, make_client: MakeClient, clock: VirtualClock
) -> None:
    virtual.load_policy("f", P1 | {"order_by": "source_version"})
    payload = {"id": 9007199254740993, "u": 18446744073709551615, "m": 0.1, "e": 1e21, "z": -0.0}
    event_id = "12345678901234567890"
    micros = datetime(2026, 1, 1, 0, 0, 0, 123_456, UTC)
    with pytest.raises(InvalidEvent, match="occurred_at: is a bare number"):
        virtual.push(event(event_id) | {"occurred_at": 1_767_225_600_123_456})
    pushed = Event(**event(event_id, at=micros, payload=payload, source_version=2**63 - 1, weight=2**31 - 1))
    virtual.push(pushed)
    newer = virtual.push(event("newer", at=clock, source_version=2**63 - 2))
    assert not newer.late  # in the same window nothing is late
    clock.advance("5s")
    (manifest,) = virtual.manifests(KEY)
    entry = manifest.events[0].event
    assert (entry.event_id, entry.source_version, entry.occurred_at) == (
        event_id,
        2**63 - 1,
        micros.replace(microsecond=123_000),
    )
    assert repr(entry.payload) == repr(payload)
    log = contents(make_client(), f"{virtual.operations.prefix_of(KEY)}events:{manifest.window_id}").popitem()[1]
    sent = orjson.dumps(payload).decode()
    head, _, body = log[0][1][1].partition(',"payload":')
    assert (log[0][1][0], body) == (event_id, f"{sent}}}")
    assert '"source_version":9223372036854775807' in head
    assert entry.content_digest == pushed.content_digest
    # One below the highest of the closed window is late, to the last digit.
    late = virtual.push(event("late", at=clock, source_version=2**63 - 2))
    equal = virtual.push(event("equal", at=clock, source_version=2**63 - 1))
    assert (late.late, equal.late) == (True, False)


def test_b043_empty_lists_stay_lists(virtual: Accumulator, clock: VirtualClock) -> None:
    virtual.load_policy("f", P1 | {"on_conflict": "reconcile", "keep": "last"})
    payload: dict[str, Any] = {"items": [], "meta": {}, "n": None, "nested": [[], {}]}
    pushed = Event(**event("e1", at=clock, payload=payload))
    virtual.push(pushed)
    virtual.push(event("e1", at=clock, payload=payload | {"items": {}}))
    clock.advance("5s")
    (manifest,) = virtual.manifests(KEY)
    (entry,) = manifest.events
    assert entry.event.payload == payload
    assert entry.event.content_digest == pushed.content_digest
    assert (manifest.late_event_ids, manifest.revised_event_ids, manifest.retracted_event_ids) == ((), (), ())
    (item,) = virtual.reconciliation()
    assert item.event.payload == payload | {"items": {}}
    resolved = virtual.store.perform(virtual.operations.resolve(item, "accept", "ana", "both are wanted"))
    assert resolved.outcome == "accepted"
    clock.advance("5s")
    again = virtual.manifests(KEY)[1]
    assert list(again.payloads()) == [payload | {"items": {}}]
    assert again.events[0].event.content_digest == item.digest


def test_b045_one_event_above_the_cap_is_alone(virtual: Accumulator, clock: VirtualClock) -> None:
    virtual.load_policy("f", P1 | {"max_bytes": 1000})
    closed = []
    for n, size in enumerate((300, 300, 5000, 100)):
        receipt = virtual.push(event(f"e{n}", at=clock, payload=bytes(size)))
        assert receipt.outcome is Outcome.ACCEPTED
        closed.append((receipt.window_version, receipt.closed, [c.reason for c in receipt.closed_windows]))
    assert closed == [(1, None, []), (1, None, []), (2, "max_bytes", ["max_bytes", "max_bytes"]), (3, None, [])]
    clock.advance("5s")
    manifests = virtual.manifests(KEY)
    assert [(m.bytes, m.event_ids, m.close_reason) for m in manifests] == [
        (600, ("e0", "e1"), "max_bytes"), (5000, ("e2",), "max_bytes"), (100, ("e3",), "inactivity"),
    ]  # fmt: skip


def test_b053_the_script_cache_is_flushed(virtual: Accumulator, make_client: MakeClient, clock: VirtualClock) -> None:
    client = make_client()
    virtual.load_policy("f", P1)
    client.script_flush()
    virtual.push(event("e1", at=clock))
    client.script_flush()
    virtual.push(event("e2", at=clock))
    virtual.push_many([event("e3", f"t:f:{n}", clock) for n in range(20)])
    client.script_flush()
    virtual.push_many([event("e4", f"t:f:{n}", clock) for n in range(20)])
    client.script_flush()
    clock.advance("5s")
    (manifest,) = virtual.manifests(KEY)
    assert manifest.event_ids == ("e1", "e2", "e3", "e4")


def test_b053_the_server_restarts_and_a_node_takes_over_that_never_saw_the_scripts(
    start_server: StartServer, server_kind: str, tmp_path: Path, namespace: str
) -> None:
    primary = start_server(data_dir=tmp_path / "a", config={"repl-diskless-sync-delay": "0"})
    with Proxy(primary.port) as proxy, Accumulator(proxy.url, namespace=namespace) as accumulator:
        accumulator.load_policy("f", {"inactivity": "1h"})
        accumulator.push(event("e1"))
        primary.kill()
        with pytest.raises(ServerError):
            accumulator.push(event("e2"))
        primary.restart()
        assert accumulator.push(event("e2")).outcome is Outcome.ACCEPTED

        replica = start_server()
        with redis.Redis.from_url(replica.url) as control:
            control.replicaof("127.0.0.1", primary.port)
            wait_until(
                lambda: control.info("replication").get("master_link_status") == "up", what="the replica is there"
            )
            wait_until(lambda: control.exists(*control.scan_iter(match="*:open")), what="its data is there")
            control.replicaof("NO", "ONE")
            primary.kill()
            proxy.target = replica.port
            proxy.drop()
            receipts = []
            for event_id in ("e2", "e3"):
                try:
                    receipts.append(accumulator.push(event(event_id)))
                except ServerError:  # the connection that was cut says so once
                    receipts.append(accumulator.push(event(event_id)))
            assert receipts[1].window_version == 1
            assert accumulator.flush(KEY).outcome == "flushed"
            (manifest,) = accumulator.manifests(KEY)
            assert manifest.event_ids == ("e1", "e2", "e3")
            check_invariants(control, namespace)
