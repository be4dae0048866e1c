"""A real cluster of three primaries: every key a script touches lies in its partition's slot (B047, B048)."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import redis
import redis.asyncio

from accumulator import handlers, keys
from accumulator.client import Accumulator, AsyncAccumulator
from accumulator.embedded import EmbeddedServer
from accumulator.envelope import Event
from accumulator.errors import AuthenticationFailed, InvalidSettings, ServerError, ServerRefused
from accumulator.rq_sink import rq_client
from accumulator.runner import run_attempt
from accumulator.settings import Settings
from accumulator.store import Store
from accumulator.windows import Outcome, Receipt
from accumulator.worker import Worker
from tests.conftest import Program as CommandLine
from tests.conftest import event, wait_until
from tests.processes import program, written

AT = datetime(2026, 1, 1, tzinfo=UTC)


@pytest.fixture(scope="module")
def cluster() -> Iterator[list[EmbeddedServer]]:
    """Three primaries that share the 16384 slots."""
    with ExitStack() as stack:
        options = {"cluster-enabled": "yes", "cluster-node-timeout": "2000", "cluster-allow-replica-migration": "no"}
        servers = [stack.enter_context(EmbeddedServer(config=options)) for _ in range(3)]
        clients = [stack.enter_context(redis.Redis(port=server.port)) for server in servers]
        bounds = [0, 5461, 10923, 16384]
        for client, (first, after) in zip(clients, pairwise(bounds), strict=True):
            _run(client, "CLUSTER", "ADDSLOTSRANGE", first, after - 1)
        for server in servers[1:]:
            _run(clients[0], "CLUSTER", "MEET", "127.0.0.1", server.port)
        wait_until(lambda: all(_ready(client) for client in clients), timeout=30)
        yield servers


def _run(node: redis.Redis, *command: object) -> Any:
    return node.execute_command(*command)


def _ready(client: redis.Redis) -> bool:
    info = _run(client, "CLUSTER", "INFO")
    text = info if isinstance(info, dict) else dict(line.split(":", 1) for line in info.decode().split() if ":" in line)
    return (text["cluster_state"], text["cluster_known_nodes"]) == ("ok", "3")


def _event(number: int, bucket: int, kind: str = "changed") -> Event:
    return Event(
        event_id=f"e{number}",
        bucket_key=f"acme:order:{bucket}",
        kind=kind,
        occurred_at=AT + timedelta(seconds=number),
        source="test",
        source_version=number,
        payload={"n": number},
    )


def test_b047_everything_on_a_cluster(cluster: list[EmbeddedServer], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handlers, "_registry", {})
    now = 1_767_225_600_000
    client = redis.RedisCluster(host="127.0.0.1", port=cluster[0].port)
    try:
        accumulator = Accumulator(client, namespace="t-cluster", clock=lambda: now)
        perform, operations = accumulator.store.perform, accumulator.operations
        accumulator.load_policy("order", {"inactivity": "10s", "sink": "direct", "order_by": "source_version"})

        first = accumulator.push_many([_event(i, i % 200) for i in range(600)])
        assert Counter(receipt.outcome for receipt in first) == {Outcome.ACCEPTED: 600}
        again = accumulator.push_many([_event(i, i % 200) for i in range(600)])
        assert Counter(receipt.outcome for receipt in again) == {Outcome.DUPLICATE: 600}
        assert len(accumulator.open_buckets()) == 200

        assert accumulator.flush("acme:order:0").outcome == "flushed"
        assert accumulator.hold("acme:order:1", "20s").window_version == 1
        assert accumulator.retract("acme:order:2", "e2").outcome == "retracted"

        now += 10_000
        for partition in range(operations.partitions):
            perform(operations.tick(partition, 1000))
        assert len(accumulator.open_buckets()) == 1

        late = accumulator.push(_event(3, 3, "again").model_copy(update={"event_id": "late"}))
        assert (late.outcome, late.late, late.window_version) == (Outcome.ACCEPTED, True, 2)

        manifests = accumulator.manifests("acme:order:2")
        assert [m.event_ids for m in manifests] == [("e202", "e402")]
        assert manifests[0].retracted_event_ids == ("e2",)

        taken = [t for p in range(operations.partitions) for t in perform(operations.take(p, "direct", 500, 30_000))]
        assert len({t.window_id for t in taken}) == 199
        assert run_attempt(accumulator, taken[0].window_id, taken[0].attempt) == "returned"  # no handler registered
        assert accumulator.counters()["accepted"] == 601

        slots = {
            client.keyslot(key)
            for node in client.get_primaries()
            for key in client.scan_iter(match="t-cluster:{*", target_nodes=node)
        }
        assert slots == {client.keyslot(keys.timers(prefix)) for prefix in operations.prefixes}
    finally:
        client.close()


async def test_async_client_on_a_cluster(cluster: list[EmbeddedServer]) -> None:
    client = redis.asyncio.RedisCluster(host="127.0.0.1", port=cluster[0].port)
    try:
        accumulator = AsyncAccumulator(client, namespace="t-acluster")
        await accumulator.load_policy("order", {"inactivity": "10s"})
        receipts = await accumulator.push_many([_event(i, i % 50) for i in range(200)])
        assert {receipt.outcome for receipt in receipts} == {Outcome.ACCEPTED}
        assert len(await accumulator.open_buckets()) == 50
        flushed = await asyncio.gather(*(accumulator.flush(f"acme:order:{i}") for i in range(50)))
        assert {answer.outcome for answer in flushed} == {"flushed"}
    finally:
        await client.aclose()


def test_a_slot_that_moves_delays_and_loses_nothing(cluster: list[EmbeddedServer]) -> None:
    """A partition's slot is moved key by key while its buckets are pushed to and closed."""
    client = redis.RedisCluster(host="127.0.0.1", port=cluster[0].port)
    nodes = [redis.Redis(port=server.port) for server in cluster]
    try:
        now = 1_767_225_600_000
        accumulator = Accumulator(client, namespace="t-moving", partitions=1, clock=lambda: now)
        perform, operations = accumulator.store.perform, accumulator.operations
        accumulator.load_policy("order", {"inactivity": "10s", "max_events": 7, "sink": "direct"})
        slot = client.keyslot(keys.timers(operations.prefixes[0]) if operations.prefixes else "t-moving:{0}:timers")
        ids = [_run(node, "CLUSTER", "MYID").decode() for node in nodes]
        owner = next(i for i, node in enumerate(nodes) if _run(node, "CLUSTER", "COUNTKEYSINSLOT", slot))
        target = (owner + 1) % 3
        answered: set[str] = set()

        def push(number: int) -> None:
            receipt = accumulator.push(_event(number, number % 20))
            assert receipt.outcome in (Outcome.ACCEPTED, Outcome.DUPLICATE)
            answered.add(receipt.event_id)

        for i in range(100):
            push(i)
        _run(nodes[target], "CLUSTER", "SETSLOT", slot, "IMPORTING", ids[owner])
        _run(nodes[owner], "CLUSTER", "SETSLOT", slot, "MIGRATING", ids[target])
        number = 100
        while names := _run(nodes[owner], "CLUSTER", "GETKEYSINSLOT", slot, 7):
            for i in range(number, number + 5):
                taken = _try(accumulator, _event(i, i % 20))  # those that are refused for now are sent again below
                if taken is not None:
                    answered.add(taken.event_id)
            number += 5
            _run(nodes[owner], "MIGRATE", "127.0.0.1", cluster[target].port, "", 0, 5000, "KEYS", *names)
        for node in (nodes[target], nodes[owner], nodes[3 - owner - target]):
            _run(node, "CLUSTER", "SETSLOT", slot, "NODE", ids[target])
        for i in range(100, number):
            push(i)
        assert answered == {f"e{i}" for i in range(number)}

        now += 10_000
        while perform(operations.tick(0, 1000)).handled:
            continue
        assert accumulator.open_buckets() == []
        found = [i for b in range(20) for m in accumulator.manifests(f"acme:order:{b}") for i in m.event_ids]
        assert sorted(found) == sorted(answered)
        assert len(found) == number
    finally:
        for node in nodes:
            node.close()
        client.close()


def test_no_payment_is_missed_while_a_slot_moves(cluster: list[EmbeddedServer]) -> None:
    """Whichever key has not moved yet, the event that cancels does so, and a start sees what there is; or they are
    refused for now."""
    client = redis.RedisCluster(host="127.0.0.1", port=cluster[0].port)
    nodes = [redis.Redis(port=server.port) for server in cluster]
    try:
        now = 1_767_225_600_000
        accumulator = Accumulator(client, namespace="t-ladders", partitions=1, clock=lambda: now)
        accumulator.load_policy("order", {"inactivity": "10s", "sink": "direct"})
        accumulator.load_ladder("dunning", {"steps": [{"name": "s", "offset": "1d"}], "cancel_on": ["paid"]})
        slot = client.keyslot(keys.timers(accumulator.operations.prefixes[0]))
        ids = [_run(node, "CLUSTER", "MYID").decode() for node in nodes]

        def holder() -> int:
            return next(i for i, node in enumerate(nodes) if _run(node, "CLUSTER", "COUNTKEYSINSLOT", slot))

        owner = holder()
        target = (owner + 1) % 3
        for bucket in (1, 2, 3):
            accumulator.push(_event(bucket, bucket, "paid" if bucket == 2 else "changed"))
        for bucket in (1, 3):  # 1 is paid below, 2 was before; in 3 one runs
            accumulator.start_ladder("dunning", f"acme:order:{bucket}", AT + timedelta(days=9))
        held = _run(nodes[owner], "CLUSTER", "GETKEYSINSLOT", slot, 1000)
        behind = [name for name in held if name != f"{accumulator.operations.prefixes[0]}timers".encode()]
        refused = Counter[str]()
        for left in sorted(behind, key=lambda name: (name.endswith(b"}:stats"), name)):
            _run(nodes[target], "CLUSTER", "SETSLOT", slot, "IMPORTING", ids[owner])
            _run(nodes[owner], "CLUSTER", "SETSLOT", slot, "MIGRATING", ids[target])
            moved = [name for name in _run(nodes[owner], "CLUSTER", "GETKEYSINSLOT", slot, 1000) if name != left]
            _run(nodes[owner], "MIGRATE", "127.0.0.1", cluster[target].port, "", 0, 5000, "KEYS", *moved)
            told: dict[str, object] = {}
            for what, call in {
                "paid": lambda: accumulator.push(_event(9, 1, "paid")).outcome,
                "looks back": lambda: accumulator.start_ladder("dunning", "acme:order:2", AT + timedelta(days=9)).state,
                "runs": lambda: accumulator.start_ladder("dunning", "acme:order:3", AT + timedelta(days=9)).outcome,
            }.items():
                with suppress(ServerRefused):
                    told[what] = call()
            _run(nodes[owner], "CLUSTER", "SETSLOT", slot, "STABLE")
            there = _run(nodes[target], "CLUSTER", "GETKEYSINSLOT", slot, 1000)
            assert left not in there, "it was made anew"
            _run(nodes[target], "MIGRATE", "127.0.0.1", cluster[owner].port, "", 0, 5000, "KEYS", *there)
            _run(nodes[target], "CLUSTER", "SETSLOT", slot, "STABLE")
            refused.update({"paid", "looks back", "runs"} - set(told))
            state = accumulator.ladders(bucket_key="acme:order:1")[0].state
            assert state == ("cancelled" if "paid" in told else "running"), left
            assert told.get("looks back", "cancelled") == "cancelled", left
            assert told.get("runs", "there") == "there", left
            if "paid" in told or "looks back" in told:
                break  # as it should be; the rest would find it done
        assert refused["paid"] > 3
        assert accumulator.push(_event(9, 1, "paid")).outcome in (Outcome.ACCEPTED, Outcome.DUPLICATE)
        assert accumulator.start_ladder("dunning", "acme:order:2", AT + timedelta(days=9)).state == "cancelled"
        assert Counter(run.state for run in accumulator.ladders()) == {"running": 1, "cancelled": 2}
    finally:
        for node in nodes:
            node.close()
        client.close()


def _try(accumulator: Accumulator, event: Event) -> Receipt | None:
    """The answer, or None where the server refuses for now."""
    with suppress(ServerRefused):
        return accumulator.push(event)
    return None


def test_b048_partitions_share_the_load() -> None:
    counts = Counter(keys.partition_of(f"acme:order:{i}", 64) for i in range(10_000))
    assert len(counts) == 64
    assert max(counts.values()) <= 2 * 10_000 / 64


def test_cluster_store_is_recognised(cluster: list[EmbeddedServer]) -> None:
    client = redis.RedisCluster(host="127.0.0.1", port=cluster[0].port)
    try:
        assert Store(client).perform(Accumulator(client, namespace="t-x").operations.server_time()) > 0
    finally:
        client.close()


# --- by URL -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def command(request: pytest.FixtureRequest) -> CommandLine:
    """`accumulator …` in this process; `program` here is one of its own."""
    found: CommandLine = request.getfixturevalue("program")
    return found


def url_of(cluster: list[EmbeddedServer], credentials: str = "", options: str = "") -> str:
    """The cluster's, by a node that is not there and two that are."""
    hosts = ",".join(["127.0.0.1:1", *(f"127.0.0.1:{server.port}" for server in cluster[1:])])
    return f"redis+cluster://{credentials}{hosts}/{options}"


@pytest.mark.parametrize("processes", [0, 2])
def test_a_worker_by_url(cluster: list[EmbeddedServer], namespace: str, tmp_path: Path, processes: int) -> None:
    """It closes windows when they are due and runs handlers of the sink direct, in threads or in processes."""
    url, out, log = url_of(cluster), tmp_path / "out", tmp_path / "log"
    arguments = ["-m", "accumulator", "worker", "--processes", str(processes)]
    with (
        program(arguments, url, namespace, log) as worker,
        Accumulator(url, namespace=namespace) as accumulator,
    ):
        worker.until("started")
        [started] = worker.said("started")
        assert "dispatcher" not in started["roles"]
        accumulator.load_policy("log", {"inactivity": "200ms", "sink": "direct"})
        sent = [event(f"e{i}", f"t:log:{i}", payload={"out": str(out)}) for i in range(20)]
        assert {receipt.outcome for receipt in accumulator.push_many(sent)} == {Outcome.ACCEPTED}
        wait_until(lambda: len(written(out)) == 20, 20)
        wait_until(lambda: {accumulator.manifests(f"t:log:{i}")[0].state for i in range(20)} == {"confirmed"})
        worker.process.terminate()
        assert worker.process.wait(10) == 0
        assert worker.said("trouble") == []


def test_the_command_line_by_url(
    cluster: list[EmbeddedServer],
    namespace: str,
    command: CommandLine,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("ACCUMULATOR_REDIS_URL", url_of(cluster, options="?protocol=3&socket_timeout=9"))
    policies = tmp_path / "policies.yaml"
    policies.write_text("policies: {order: {inactivity: 1h, sink: direct}, chat: {inactivity: 1h, sink: rq}}")
    events = tmp_path / "events.jsonl"
    events.write_bytes(b"".join(_event(i, i % 20).model_dump_json().encode() + b"\n" for i in range(60)))
    pushed = command("push", events, "--config", policies, "--json")
    assert (pushed.code, pushed.json[0]["outcomes"]["accepted"]) == (0, 60)
    assert command("bucket", "acme:order:3", "--json").json[0]["open"]["entries"] == 3
    assert len(command("buckets", "--json").json) == 20
    assert command("counters", "--json").json[0]["accepted"] == 60
    judged = command("health")
    assert judged.code == 1
    assert "no worker is alive" in judged.out


def test_health_is_green(
    cluster: list[EmbeddedServer], namespace: str, command: CommandLine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = url_of(cluster)
    with (
        program(["-m", "accumulator", "worker"], url, namespace, tmp_path / "log") as worker,
        Accumulator(url, namespace=namespace) as accumulator,
    ):
        worker.until("started")
        accumulator.load_policy("log", {"inactivity": "1h", "sink": "direct"})
        wait_until(lambda: accumulator.health().ok)
        monkeypatch.setenv("ACCUMULATOR_REDIS_URL", url)
        assert command("health").code == 0
        accumulator.load_policy("chat", {"inactivity": "1h", "sink": "rq"})
        (problem,) = accumulator.health().problems
        assert problem.startswith("no dispatcher is alive: nobody takes what goes to the sink rq (flow chat)")
        assert "ACCUMULATOR_RQ_URL" in problem


async def test_the_asynchronous_client_by_url(cluster: list[EmbeddedServer], namespace: str) -> None:
    accumulator = AsyncAccumulator(url_of(cluster, options="?max_connections=3&protocol=3"), namespace=namespace)
    await accumulator.load_policy("order", {"inactivity": "10s"})
    receipts = await asyncio.gather(*(accumulator.push(_event(i, i)) for i in range(50)))
    assert {receipt.outcome for receipt in receipts} == {Outcome.ACCEPTED}
    await accumulator.close()


@pytest.mark.parametrize("protocol", [2, 3])
def test_wake_ups_come_from_every_node(cluster: list[EmbeddedServer], namespace: str, protocol: int) -> None:
    with Accumulator(url_of(cluster, options=f"?protocol={protocol}"), namespace=namespace) as accumulator:
        accumulator.load_policy("order", {"inactivity": "1h"})
        news = accumulator.store.subscription(accumulator.operations.channel)
        assert news.wait(5) == [b""]
        accumulator.push_many([_event(i, i) for i in range(100)])
        wanted = {keys.partition_of(f"acme:order:{i}", accumulator.operations.partitions) for i in range(100)}
        heard: set[int] = set()

        def all_heard() -> bool:
            heard.update(int(message.split()[0]) for message in news.wait(0.5))
            return heard == wanted

        wait_until(all_heard)
        news.close()


def test_credentials_in_the_url(cluster: list[EmbeddedServer], namespace: str) -> None:
    for server in cluster:
        with redis.Redis(port=server.port) as node:
            _run(node, "ACL", "SETUSER", "ana", "on", ">s3cr3t/+", "~*", "&*", "+@all")
    with Accumulator(url_of(cluster, "ana:s3cr3t%2F%2B@"), namespace=namespace) as accumulator:
        assert accumulator.counters() == {}
        client: Any = accumulator.store.client
        assert _run(client, "ACL", "WHOAMI") == b"ana"
    with (
        # Of a node that can't be reached besides, redis-py may tell that one's error.
        Accumulator(
            f"redis+cluster://ana:s3cr3t-wrong@127.0.0.1:{cluster[0].port}", namespace=namespace
        ) as accumulator,
        pytest.raises(AuthenticationFailed, match="check user and password") as caught,
    ):
        accumulator.counters()  # of several nodes, redis-py tells what the last of them said
    assert "s3cr3t" not in str(caught.value)


def test_rq_cannot_live_there(cluster: list[EmbeddedServer], namespace: str, tmp_path: Path) -> None:
    url, own = url_of(cluster), "redis://127.0.0.1:6380/0"
    for options in ({"roles": ["dispatcher"]}, {"roles": ["rq"]}, {"rq_workers": 1}):
        with pytest.raises(InvalidSettings, match="rq_url: is not set, and RQ can't live on a Redis Cluster"):
            Worker(Settings(redis_url=url), **options)
        Worker(Settings(redis_url=url, rq_url=own), **options)
    with pytest.raises(InvalidSettings, match="rq_url: is a Redis Cluster's, and RQ can't live there"):
        rq_client(url)
    with (
        program(["-m", "accumulator", "worker"], url, namespace, tmp_path / "log") as worker,
        Accumulator(url, namespace=namespace) as accumulator,
    ):
        accumulator.load_policy("chat", {"inactivity": "1h", "sink": "rq"})
        worker.until("started")
    with program(["-m", "accumulator", "worker"], url, namespace, tmp_path / "log") as worker:
        worker.until("started")
        [said] = worker.said("rq_server_missing")
        assert said["flow"] == "chat"


def test_the_wrong_kind_of_url(cluster: list[EmbeddedServer], namespace: str, start_server: Any) -> None:
    with (
        Accumulator(f"redis://127.0.0.1:{cluster[0].port}", namespace=namespace) as accumulator,
        pytest.raises(
            InvalidSettings, match=r"redis_url: names a node of a Redis Cluster: begin it with redis\+cluster"
        ),
    ):
        accumulator.open_buckets()
    with pytest.raises(InvalidSettings, match="names a node of a Redis Cluster"):
        Worker(Settings(redis_url=f"redis://127.0.0.1:{cluster[0].port}", namespace=namespace)).run()
    one = start_server()
    with (
        Accumulator(f"redis+cluster://127.0.0.1:{one.port}", namespace=namespace) as accumulator,
        pytest.raises(InvalidSettings, match="redis_url: is a cluster's, and the server there is none"),
    ):
        accumulator.open_buckets()


async def test_the_wrong_kind_of_url_asynchronously(cluster: list[EmbeddedServer], start_server: Any) -> None:
    accumulator = AsyncAccumulator(f"redis+cluster://127.0.0.1:{start_server().port}")
    with pytest.raises(InvalidSettings, match="redis_url: is a cluster's, and the server there is none"):
        await accumulator.counters()
    await accumulator.close()


def test_a_cluster_that_comes_back_elsewhere_is_found_by_its_url(namespace: str) -> None:
    """Its nodes have other addresses; one of the URL's hosts leads there."""
    options = {"cluster-enabled": "yes"}
    with EmbeddedServer(config=options) as first, EmbeddedServer(config=options) as second:
        for server in (first, second):
            with redis.Redis(port=server.port) as node:
                _run(node, "CLUSTER", "ADDSLOTSRANGE", 0, 16383)
                wait_until(lambda: b"cluster_state:ok" in _run(node, "CLUSTER", "INFO"))
        url = f"redis+cluster://127.0.0.1:{first.port},127.0.0.1:{second.port}"
        with Accumulator(url, namespace=namespace) as accumulator:
            client: Any = accumulator.store.client
            assert accumulator.counters() == {}
            (used,) = {node.port for node in client.get_nodes()}
            (first if used == first.port else second).kill()
            with pytest.raises(ServerError):
                accumulator.counters()
            wait_until(lambda: _counts(accumulator), 20)


def _counts(accumulator: Accumulator) -> bool:
    with suppress(ServerError):
        return accumulator.counters() == {}
    return False
