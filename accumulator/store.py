"""Runs calls, one by one or in a pipeline, on a redis-py client.

An operation (see :mod:`accumulator.operations`) yields rounds of calls and is sent their replies. :class:`Store` and
:class:`AsyncStore` drive the same operations; each knows how to run one round and nothing else. Replies come as bytes,
integers and lists, whatever the client decodes and whichever protocol it speaks. A reply that is an error comes as a
value of the round (a :class:`ServerError`), so that the other calls of the round keep theirs.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from time import monotonic
from typing import TYPE_CHECKING, Any, TypeVar

import redis
import redis.asyncio
from redis import exceptions as faults

from accumulator.connections import FAULTS, AsyncCluster, SyncCluster, async_client, sync_client, translate
from accumulator.errors import AccumulatorError, InvalidSettings
from accumulator.scripts import Script, script

if TYPE_CHECKING:
    SyncClient = redis.Redis | redis.RedisCluster
    AsyncClient = redis.asyncio.Redis | redis.asyncio.RedisCluster

T = TypeVar("T")
Reply = Any
"""bytes, int, None, a list of them, or an AccumulatorError."""


@dataclass(frozen=True, slots=True)
class Call:
    """One command, or one script with its first key and arguments.

    `also` names keys that the script derives and that may be absent: declared on a cluster, they make the server refuse
    the call while their slot moves and some of them are on the other node.
    """

    args: tuple[Any, ...]
    script: Script | None = None
    also: tuple[str, ...] = ()

    @classmethod
    def run(cls, name: str, key: str, *args: Any) -> Call:
        """The script `name` on the partition of `key`."""
        return cls((key, *args), script(name))


Round = Sequence[Call]
Operation = Generator[Round, list[Reply], T]


_UTF_8 = (("utf-8", "strict"), ("utf8", "strict"))
_NOT_RUN = (faults.NoScriptError, faults.TryAgainError, faults.AskError)


def _is_fake(client: object) -> bool:
    return any(base.__module__.startswith("fakeredis") for base in type(client).__mro__)


class _Wire:
    """How a call becomes a command of this client."""

    def __init__(self, client: object) -> None:
        self.plain = _is_fake(client)
        clusters = (redis.RedisCluster, redis.asyncio.RedisCluster, SyncCluster, AsyncCluster)
        self.cluster = isinstance(client, clusters)
        encoder = client.get_encoder()  # type: ignore[attr-defined]
        self.foreign = (encoder.encoding.lower().replace("_", "-"), encoder.encoding_errors) not in _UTF_8

    def command(self, call: Call, whole: bool = False) -> tuple[Any, ...]:
        command = self._command(call, whole)
        if not self.foreign:
            return command
        # A client that writes text in another encoding: keys and events are UTF-8 whoever sends them.
        return (command[0], *(part.encode() if isinstance(part, str) else part for part in command[1:]))

    def _command(self, call: Call, whole: bool) -> tuple[Any, ...]:
        if call.script is None:
            return call.args
        name: tuple[str, str]
        if whole:
            name = ("EVAL", call.script.plain if self.plain else call.script.source)
        else:
            name = ("EVALSHA", call.script.plain_sha if self.plain else call.script.sha)
        if call.also:
            return (*name, 1 + len(call.also), call.args[0], *call.also, *call.args[1:])
        return (*name, 1, *call.args)


Commands = Sequence[tuple[Any, ...]]


def drive(operation: Operation[T], wire: _Wire) -> Generator[Commands, list[Reply], T]:
    """An operation as rounds of commands. A call that was not run, since the server did not know the script or moves
    the slot, is sent again; the calls of one round touch different buckets, so order holds."""
    try:
        calls = next(operation)
        while True:
            replies = yield [wire.command(call) for call in calls]
            for whole in (True, False, False):
                again = [i for i, reply in enumerate(replies) if isinstance(reply, _NOT_RUN)]
                if not again:
                    break
                sent = yield [wire.command(calls[i], whole) for i in again]
                for i, reply in zip(again, sent, strict=True):
                    replies[i] = reply
            calls = operation.send([translate(r) if isinstance(r, BaseException) else r for r in replies])
    except StopIteration as end:
        result: T = end.value
        return result


def check_client(client: object, wanted: tuple[type, ...]) -> None:
    """Refuses what is no client of that kind, by name."""
    if not isinstance(client, wanted):
        names = " or ".join(f"{kind.__module__.partition('.client')[0]}.{kind.__name__}" for kind in wanted)
        raise InvalidSettings("client", f"must be a {names}, not {type(client).__module__}.{type(client).__name__}")


class Store:
    """Runs operations on a synchronous client."""

    def __init__(self, client: SyncClient | SyncCluster) -> None:
        check_client(client, (redis.Redis, redis.RedisCluster, SyncCluster))
        self._client = client
        self._wire = _Wire(client)
        self.cluster = self._wire.cluster

    @classmethod
    def from_url(cls, url: str, **options: Any) -> Store:
        """On a client of our own, which makes callers wait for a connection rather than fail. Raises InvalidSettings;
        the server is not asked yet."""
        return cls(sync_client(url, **options))

    @property
    def client(self) -> SyncClient:
        """redis-py's. That of a cluster's URL is made now, and asks it."""
        return self._client.client if isinstance(self._client, SyncCluster) else self._client

    def close(self) -> None:
        self._client.close()

    def subscription(self, channel: str) -> Subscription:
        """The messages of a channel, on a connection of its own; made when they are first waited for."""
        return Subscription(self._client, channel)

    def perform(self, operation: Operation[T]) -> T:
        """Runs an operation to its end."""
        driver = drive(operation, self._wire)
        try:
            commands = next(driver)
            while True:
                commands = driver.send(self._send(commands))
        except StopIteration as end:
            result: T = end.value
            return result

    def _send(self, commands: Commands) -> list[Reply]:
        if len(commands) == 1 or self._wire.cluster:
            return [self._send_one(command) for command in commands]
        try:
            with self.client.pipeline(transaction=False) as pipe:
                for command in commands:
                    pipe.execute_command(*command, NEVER_DECODE=True)
                return list(pipe.execute(raise_on_error=False))
        except FAULTS as error:
            return [error] * len(commands)

    def _send_one(self, command: tuple[Any, ...]) -> Reply:
        try:
            reply: Reply = self._client.execute_command(*command, NEVER_DECODE=True)  # type: ignore[no-untyped-call]
            return reply
        except FAULTS as error:
            return error


class Subscription:
    """The messages of one channel, for one thread."""

    def __init__(self, client: SyncClient | SyncCluster, channel: str) -> None:
        self._client = client
        self._channel = channel
        self._pubsub: Any = None
        self._heard = 0.0

    def wait(self, seconds: float) -> list[bytes]:
        """What came, at once where something has, else within `seconds`. An empty message stands for a subscription
        that has just begun: what was published before is not known. Raises ServerError, after which the next call
        subscribes anew."""
        found: list[bytes] = []
        try:
            if self._pubsub is None:
                self._pubsub = self._client.pubsub()
                self._pubsub.subscribe(self._channel)
                self._heard = monotonic()
            message = self._pubsub.get_message(timeout=max(0.0, seconds))
            while message is not None and len(found) < 1000:
                self._heard = monotonic()
                if message["type"] == "message":
                    data = message["data"]
                    found.append(data.encode() if isinstance(data, str) else data)
                elif message["type"] == "subscribe":
                    found.append(b"")
                message = self._pubsub.get_message(timeout=0.0)
        except FAULTS as error:
            self.close()
            raise translate(error) from None
        return found

    def check(self, patience: float) -> None:
        """Asks for a sign of life, and subscribes anew where none came for `patience` seconds: a peer that vanished
        says nothing. To be called now and then."""
        if self._pubsub is None:
            return
        if monotonic() - self._heard > patience:
            self.close()
            return
        try:
            self._pubsub.ping()
        except FAULTS:
            self.close()

    def close(self) -> None:
        pubsub, self._pubsub = self._pubsub, None
        if pubsub is not None:
            with suppress(*FAULTS):
                pubsub.close()


class AsyncStore:
    """Runs operations on a client of ``redis.asyncio``."""

    def __init__(self, client: AsyncClient | AsyncCluster) -> None:
        check_client(client, (redis.asyncio.Redis, redis.asyncio.RedisCluster, AsyncCluster))
        self._client = client
        self._wire = _Wire(client)
        self.cluster = self._wire.cluster

    @classmethod
    def from_url(cls, url: str, **options: Any) -> AsyncStore:
        """See :meth:`Store.from_url`."""
        return cls(async_client(url, **options))

    @property
    def client(self) -> AsyncClient:
        """redis-py's."""
        return self._client.client if isinstance(self._client, AsyncCluster) else self._client

    async def close(self) -> None:
        await self._client.aclose()

    async def perform(self, operation: Operation[T]) -> T:
        """Runs an operation to its end."""
        driver = drive(operation, self._wire)
        try:
            commands = next(driver)
            while True:
                commands = driver.send(await self._send(commands))
        except StopIteration as end:
            result: T = end.value
            return result

    async def _send(self, commands: Commands) -> list[Reply]:
        if len(commands) == 1 or self._wire.cluster:
            return [await self._send_one(command) for command in commands]
        try:
            async with self.client.pipeline(transaction=False) as pipe:
                for command in commands:
                    pipe.execute_command(*command, NEVER_DECODE=True)
                return list(await pipe.execute(raise_on_error=False))
        except FAULTS as error:
            return [error] * len(commands)

    async def _send_one(self, command: tuple[Any, ...]) -> Reply:
        try:
            return await self._client.execute_command(*command, NEVER_DECODE=True)
        except FAULTS as error:
            return error


# --- replies, whichever protocol and callback gave them --------------------------------------------------------------


def together(operations: Iterable[Operation[T]]) -> Operation[list[T | AccumulatorError]]:
    """Runs operations side by side, each round of all of them in one; what one of them raises is its result."""
    going = dict(enumerate(operations))
    results: dict[int, T | AccumulatorError] = {}
    replies: dict[int, list[Reply]] = {}
    while going:
        rounds: dict[int, Round] = {}
        for i, operation in list(going.items()):
            try:
                rounds[i] = operation.send(replies[i]) if i in replies else next(operation)
            except StopIteration as end:
                results[i] = end.value
                del going[i]
            except AccumulatorError as problem:
                results[i] = problem
                del going[i]
        answers = iter((yield [call for calls in rounds.values() for call in calls]) if rounds else [])
        replies = {i: list(islice(answers, len(calls))) for i, calls in rounds.items()}
    return [results[i] for i in sorted(results)]


def answer(reply: Reply) -> Reply:
    """The reply, or the error that it is, raised."""
    if isinstance(reply, AccumulatorError):
        raise reply
    return reply


def as_pairs(reply: Reply) -> list[tuple[Any, Any]]:
    """Pairs of a map or of a list of members with scores: flat, nested, or a dict."""
    reply = answer(reply)
    if reply is None:
        return []
    if not isinstance(reply, list) and isinstance(reply, Mapping):  # in this order: to ask about a Mapping is slow
        return list(reply.items())
    if reply and isinstance(reply[0], list | tuple):
        return [(pair[0], pair[1]) for pair in reply]
    return list(zip(reply[::2], reply[1::2], strict=True))


def as_instant(reply: Reply) -> int:
    """µs since the epoch, of TIME; where several nodes answer, of the clock that is furthest."""
    reply = answer(reply)
    nodes = reply.values() if isinstance(reply, Mapping) else [reply]
    return max(int(seconds) * 1_000_000 + int(micros) for seconds, micros in nodes)


def as_stream(reply: Reply) -> list[tuple[bytes, list[tuple[bytes, bytes]]]]:
    """Entries of a stream with their fields in order."""
    return [(entry[0], as_pairs(entry[1])) for entry in answer(reply) or []]
