"""How the server is reached: a client of our own for each kind of URL, and what redis-py raises in our words.

Behind Sentinels each connection asks them where the primary is. A cluster's client asks its nodes.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from time import monotonic
from typing import Any, Final, TypeVar

import redis
import redis.asyncio
import redis.asyncio.cluster
import redis.asyncio.retry
import redis.asyncio.sentinel
import redis.cluster
import redis.sentinel
from redis import exceptions as faults
from redis.backoff import NoBackoff
from redis.connection import parse_url
from redis.retry import Retry

from accumulator.address import Address
from accumulator.errors import (
    AccumulatorError,
    AuthenticationFailed,
    InternalError,
    InvalidSettings,
    MissingRight,
    ServerRefused,
    ServerUnavailable,
    UnknownFlow,
)

P = TypeVar("P", bound=redis.ConnectionPool)

FAULTS: Final = (faults.RedisError, faults.RedisClusterException, OSError)
"""What redis-py raises where a call has no answer, or an error for one."""

CONNECTIONS: Final = 100
"""How many connections a client of our own has: who needs another one waits for it."""
PATIENCE: Final = 20
"""s that it waits at the most; then the call fails."""

_REFUSALS = (
    *("BUSY", "CLUSTERDOWN", "LOADING", "MASTERDOWN", "MISCONF", "NOREPLICAS", "OOM", "READONLY", "TRYAGAIN"),
    *("UNBLOCKED", "UNKILLABLE", "ASK", "MOVED"),
)


def translate(error: BaseException, setting: str = "redis_url") -> AccumulatorError:
    """Our exception for one of redis-py's, on a connection whose URL is that `setting`. Error texts of the server name
    commands and keys' patterns, not payloads; what it might quote of an argument is left out."""
    text = str(error)
    code = text.partition(" ")[0]
    if isinstance(error, _NoPrimary):
        return error.problem
    if isinstance(error, faults.RedisClusterException):
        if isinstance(error.__cause__, Exception):  # what the last of its nodes said
            return translate(error.__cause__, setting)
        if "mode is not enabled" in text:
            return InvalidSettings(setting, "is a cluster's, and the server there is none: begin it with redis://")
        return ServerRefused("CLUSTERDOWN", "the cluster has no node for some of its slots")
    if isinstance(error, faults.MovedError):
        return InvalidSettings(
            setting, "names a node of a Redis Cluster: begin it with redis+cluster://, or give a RedisCluster"
        )
    if isinstance(error, faults.AuthenticationError):
        return AuthenticationFailed("the server wants other credentials: check user and password of its URL")
    if isinstance(error, faults.NoPermissionError) or code == "NOPERM":
        return MissingRight(text.removeprefix("NOPERM ")[:200])
    if isinstance(error, faults.BusyLoadingError):
        return ServerRefused("LOADING", "the server is loading its data")
    if isinstance(error, faults.ReadOnlyError):
        return ServerRefused("READONLY", "the server is a read-only replica")
    if isinstance(error, faults.OutOfMemoryError):
        return ServerRefused("OOM", "the server is over its maxmemory")
    if isinstance(error, faults.TimeoutError | TimeoutError):
        return ServerUnavailable("no answer from the server in time")
    if isinstance(error, faults.ConnectionError | OSError):
        return ServerUnavailable(f"the server can't be reached: {text[:200]}")
    if isinstance(error, faults.ClusterError):
        return ServerRefused("CLUSTERDOWN", "the cluster does not find a node for it, or a slot is moving")
    if isinstance(error, faults.ResponseError):
        if code == "NOPOLICY":
            return UnknownFlow(text.partition(" ")[2].split(" ")[0])
        if "non local key" in text:
            return ServerRefused("TRYAGAIN", "a slot of the cluster is moving")
        if "DB index" in text or text.startswith("SELECT is not allowed"):
            return InvalidSettings(setting, "names a database that the server does not have")
        for refusal in _REFUSALS:
            if code == refusal or f"-{refusal} " in text:
                return ServerRefused(refusal, "the server refuses for now")
        return InternalError(f"the server answers with an error: {text[:200]}")
    return InternalError(f"{type(error).__name__} from the client")


# --- Sentinels --------------------------------------------------------------------------------------------------------

_ASK: Final = "SENTINEL GET-MASTER-ADDR-BY-NAME"


class _NoPrimary(faults.ConnectionError):
    """The Sentinels name no primary, and why."""

    def __init__(self, problem: AccumulatorError) -> None:
        super().__init__(str(problem))
        self.problem = problem


class _Sentinels:
    """Where the primary is, by the first of the Sentinels that knows. redis-py's connections take this for their pool.

    They are asked for each connection that is made, and once a second while connections are used: a primary that was
    put out of office goes on taking what will be lost, until somebody tells it.
    """

    is_master = True
    check_connection = False

    FRESH: Final = 1.0
    """s for which an answer is taken for true."""
    SILENT: Final = 10.0
    """s after which they are asked again where none of them knew."""
    TIMEOUT: Final = 2.0

    def __init__(self, address: Address, options: Mapping[str, Any], setting: str) -> None:
        self.service_name = address.service
        self.primary: tuple[str, int] | None = None
        self._hosts = list(address.hosts)
        self._ask_at = 0.0
        self._options = {name: value for name, value in options.items() if name.startswith(("socket_", "ssl_"))}
        self._options |= {"socket_timeout": self.TIMEOUT, "socket_connect_timeout": self.TIMEOUT}
        self._options |= {"ssl": address.tls, "decode_responses": True}
        self._options |= {"username": address.sentinel_user, "password": address.sentinel_password}
        self._setting = setting
        self._lock = threading.Lock()

    def _found(self, host: tuple[str, int], reply: Sequence[object]) -> tuple[str, int]:
        self._hosts = [host, *(other for other in self._hosts if other != host)]  # who knew is asked first
        self.primary = (str(reply[0]), int(str(reply[1])))
        self._ask_at = monotonic() + self.FRESH
        return self.primary

    def _is_to_ask(self) -> bool:
        """Whether the last answer is old; to one caller."""
        now = monotonic()
        with self._lock:
            is_old = now >= self._ask_at
            if is_old:
                self._ask_at = now + self.SILENT
        return is_old

    def _nobody(self, failures: Sequence[BaseException]) -> _NoPrimary:
        """`failures` are of the Sentinels that gave no answer."""
        if not failures:
            return _NoPrimary(InvalidSettings(self._setting, "names a service that none of its Sentinels watches"))
        problems = [self._problem(failure) for failure in failures]
        return _NoPrimary(next((one for one in problems if type(one) is not ServerUnavailable), problems[0]))

    def _problem(self, failure: BaseException) -> AccumulatorError:
        problem = translate(failure, self._setting)
        if isinstance(problem, AuthenticationFailed):
            rule = "check sentinel_username and sentinel_password of its URL"
            return AuthenticationFailed(f"a Sentinel wants other credentials: {rule}")
        if isinstance(problem, ServerUnavailable):
            return ServerUnavailable(f"no Sentinel can be reached: {str(failure)[:200]}")
        if "unknown command" in str(failure):
            return InvalidSettings(self._setting, "names a server that is no Sentinel: begin it with redis://")
        return problem


class _SyncSentinels(_Sentinels):
    def get_master_address(self) -> tuple[str, int]:
        failures: list[BaseException] = []
        for host in self._hosts:
            try:
                with redis.Redis(*host, retry=Retry(NoBackoff(), 0), **self._options) as client:
                    reply = client.execute_command(_ASK, self.service_name)
            except FAULTS as failure:
                failures.append(failure)
                continue
            if reply:
                return self._found(host, reply)
        raise self._nobody(failures)

    def follow(self, connection: _Following) -> None:
        """Parts a connection from where the primary is no longer."""
        if self._is_to_ask():
            with suppress(_NoPrimary):
                self.get_master_address()
        if (connection.host, connection.port) != self.primary:
            connection.disconnect()


class _AsyncSentinels(_Sentinels):
    async def get_master_address(self) -> tuple[str, int]:
        failures: list[BaseException] = []
        for host in self._hosts:
            once = redis.asyncio.retry.Retry(NoBackoff(), 0)
            try:
                async with redis.asyncio.Redis(host=host[0], port=host[1], retry=once, **self._options) as client:
                    reply = await client.execute_command(_ASK, self.service_name)
            except FAULTS as failure:
                failures.append(failure)
                continue
            if reply:
                return self._found(host, reply)
        raise self._nobody(failures)

    async def follow(self, connection: _AsyncFollowing) -> None:
        if self._is_to_ask():
            with suppress(_NoPrimary):
                await self.get_master_address()
        if (connection.host, connection.port) != self.primary:
            await connection.disconnect()


class _Following(redis.sentinel.SentinelManagedConnection):
    def connect(self) -> None:
        """Called before each use."""
        if self._sock:
            self.connection_pool.follow(self)
        super().connect()


class _FollowingTls(_Following, redis.sentinel.SentinelManagedSSLConnection):
    pass


class _AsyncFollowing(redis.asyncio.sentinel.SentinelManagedConnection):
    async def connect(self) -> None:
        if self.is_connected:
            await self.connection_pool.follow(self)
        await super().connect()


class _AsyncFollowingTls(_AsyncFollowing, redis.asyncio.sentinel.SentinelManagedSSLConnection):
    pass


def find_primary(url: str, **options: Any) -> tuple[str, int]:
    """Host and port of the primary, by a URL of Sentinels. Raises ServerError and InvalidSettings."""
    address = Address.of(url)
    try:
        return _SyncSentinels(address, options | _options(address), "redis_url").get_master_address()
    except _NoPrimary as nobody:
        raise nobody.problem from None


# --- Redis Cluster ----------------------------------------------------------------------------------------------------


class _Cluster:
    """What both clients of a cluster have in common. `client` is redis-py's: made when it is first used, since it asks
    the cluster as it is made; and made anew once it found none of the nodes it knew, so that those of the URL are asked
    again."""

    def __init__(self, address: Address, options: Mapping[str, Any]) -> None:
        self._hosts = address.hosts
        self._options: dict[str, Any] = {"ssl": address.tls, **options, **_options(address)}
        self._connections = int(self._options.pop("max_connections", CONNECTIONS))
        for name in ("timeout", "db"):
            self._options.pop(name, None)

    def get_encoder(self) -> Any:
        """How text becomes bytes."""
        names = ("encoding", "encoding_errors", "decode_responses")
        return redis.ConnectionPool(**{n: self._options[n] for n in names if n in self._options}).get_encoder()


class SyncCluster(_Cluster):
    """A client of the cluster that a URL names. Calls wait where as many as may be are under way."""

    def __init__(self, address: Address, options: Mapping[str, Any]) -> None:
        super().__init__(address, options)
        self._room = threading.Semaphore(self._connections)
        self._lock = threading.Lock()
        self._client: redis.RedisCluster | None = None

    @property
    def client(self) -> redis.RedisCluster:
        """Raises what redis-py raises where the cluster does not answer."""
        client = self._client
        if client is not None:
            return client
        nodes = [redis.cluster.ClusterNode(*host) for host in self._hosts]
        made = redis.RedisCluster(startup_nodes=nodes, max_connections=1 << 31, **self._options)
        with self._lock:
            client = self._client = self._client or made
        if client is not made:  # another thread was first
            made.close()
        return client

    def execute_command(self, *command: Any, **options: Any) -> Any:
        with self._room:
            client = self.client
            try:
                return client.execute_command(*command, **options)
            except faults.RedisClusterException:
                with self._lock:
                    if self._client is client:
                        self._client = None
                client.close()
                raise

    def pubsub(self) -> Any:
        return self.client.pubsub()

    def close(self) -> None:
        with self._lock:
            client, self._client = self._client, None
        if client is not None:
            client.close()


class AsyncCluster(_Cluster):
    """The same on ``redis.asyncio``."""

    def __init__(self, address: Address, options: Mapping[str, Any]) -> None:
        super().__init__(address, options)
        self._room = asyncio.Semaphore(self._connections)
        self._client: redis.asyncio.RedisCluster | None = None

    @property
    def client(self) -> redis.asyncio.RedisCluster:
        if self._client is None:
            nodes = [redis.asyncio.cluster.ClusterNode(*host) for host in self._hosts]
            self._client = redis.asyncio.RedisCluster(startup_nodes=nodes, max_connections=1 << 31, **self._options)
        return self._client

    async def execute_command(self, *command: Any, **options: Any) -> Any:
        async with self._room:
            client = self.client
            try:
                return await client.execute_command(*command, **options)
            except faults.RedisClusterException:
                if self._client is client:
                    self._client = None
                await client.aclose()
                raise

    async def aclose(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            await client.aclose()


# --- by URL -----------------------------------------------------------------------------------------------------------


def sync_client(url: str, **options: Any) -> redis.Redis | SyncCluster:
    """A client for a URL of any kind, with `options` for redis-py; those of the URL come first. Raises InvalidSettings;
    the server is not asked yet."""
    address = _read(url, options)
    if address.kind == "cluster":
        return SyncCluster(address, options)
    waiting = {"timeout": PATIENCE, "max_connections": CONNECTIONS, **options}
    return redis.Redis.from_pool(sync_pool(redis.BlockingConnectionPool, url, **waiting))


def async_client(url: str, **options: Any) -> redis.asyncio.Redis | AsyncCluster:
    """The same for ``redis.asyncio``."""
    address = _read(url, options)
    if address.kind == "cluster":
        return AsyncCluster(address, options)
    waiting = {"timeout": PATIENCE, "max_connections": CONNECTIONS, **options}
    if address.kind == "server":
        return redis.asyncio.Redis.from_pool(redis.asyncio.BlockingConnectionPool.from_url(url, **waiting))
    waiting |= _options(address)
    pool = redis.asyncio.BlockingConnectionPool(
        connection_class=_AsyncFollowingTls if address.tls else _AsyncFollowing,
        connection_pool=_AsyncSentinels(address, waiting, "redis_url"),
        **waiting,
    )
    return redis.asyncio.Redis.from_pool(pool)


def sync_pool(kind: type[P], url: str, setting: str = "redis_url", **options: Any) -> P:
    """A pool of that kind for the URL of a server or of Sentinels, which `setting` holds. Raises InvalidSettings."""
    address = _read(url, options, setting)
    if address.kind == "cluster":
        raise InvalidSettings(setting, "is a Redis Cluster's, and RQ can't live there: name a server of its own")
    if address.kind == "server":
        return kind.from_url(url, **options)
    options |= _options(address)
    return kind(
        connection_class=_FollowingTls if address.tls else _Following,
        connection_pool=_SyncSentinels(address, options, setting),
        **options,
    )


def _read(url: str, options: Mapping[str, Any], setting: str = "redis_url") -> Address:
    """The URL, with options that redis-py takes."""
    address = Address.of(url, setting)
    own = options if address.kind != "cluster" else {}  # which has others
    try:
        redis.BlockingConnectionPool.from_url(address.plain, **own).make_connection()
    except (TypeError, ValueError, faults.RedisError):
        pass
    else:
        return address
    # Outside of the except block: what is raised here keeps no hold of what was refused.
    raise InvalidSettings(setting, "holds an option that redis-py does not know, or a value that it does not take")


def _options(address: Address) -> dict[str, Any]:
    """redis-py's options in a URL, and the credentials."""
    apart = ("host", "port", "path", "connection_class")
    return {name: value for name, value in parse_url(address.plain).items() if name not in apart}
