"""The sink ``rq``: manifests become RQ jobs. The only module that knows RQ.

A job carries the window id and the attempt, nothing else. Its id is made of both; a job that is lost is enqueued again
by the manifest's watch, and of two jobs of one attempt the second does nothing. A handler that fails is settled by us,
so the job itself ends well: RQ retries nothing, and its registry of failed jobs holds only what could not even begin.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from datetime import UTC, datetime, timedelta
from functools import partial
from math import ceil
from time import monotonic
from typing import Any, Final

import redis
import rq
from redis import exceptions as faults
from redis.backoff import NoBackoff
from redis.retry import Retry
from rq.job import Job
from rq.utils import utcparse
from rq.worker import DequeueStrategy

from accumulator.attempts import Taken
from accumulator.client import Accumulator
from accumulator.connections import sync_pool, translate
from accumulator.emission import is_emission
from accumulator.envelope import flow_of
from accumulator.errors import HandlerMissing
from accumulator.handlers import Timeout, find_handler, load_handlers, longest_step
from accumulator.health import BEAT, RqQueue
from accumulator.pulse import Pulse
from accumulator.role import SLICE, Role
from accumulator.runner import WATCH, run_attempt
from accumulator.settings import Config, RqSink, Settings, find_config
from accumulator.turns import InFlight, Turns

QUEUE: Final = "accumulator"
DESCRIPTION: Final = "accumulator manifest"

MARGIN: Final = 5
"""s that RQ gives a job beyond its handler's timeout, which the job keeps itself: less than the lease has."""
_USUAL_TIMEOUT: Final = 300_000


def rq_client(url: str) -> redis.Redis:
    """A client as RQ wants it: replies as bytes, whatever the URL says. Raises InvalidSettings for a cluster's.

    Each job's process connects anew, and redis-py would read its own version from disk first, then tell it, its name,
    the protocol and a wish in a call each: here it connects and nothing else.
    """
    pool = sync_pool(redis.ConnectionPool, url, "rq_url", retry=Retry(NoBackoff(), 1))
    pool.connection_kwargs["decode_responses"] = False
    pool.connection_kwargs.setdefault("protocol", 2)
    if hasattr(pool.make_connection(), "driver_info"):  # a release that can be told to leave it out
        pool.connection_kwargs["driver_info"] = None
    return redis.Redis.from_pool(pool)


# --- from the outbox to the queue -------------------------------------------------------------------------------------


class Dispatcher(Role):
    """Takes manifests whose turn has come and enqueues a job for each, in RQ queues on the server `url`.

    `options` gives what the configuration says of a flow; `queue` is the usual one. Up to `backlog` jobs wait in a
    queue, so that nothing is enqueued twice for waiting long. Where one queue is full and another is not, taking goes
    on, since what is next in turn may belong to either: until one holds SPREAD times as many.
    """

    name = "dispatcher"

    BATCH: Final = 100
    SPREAD: Final = 10

    def __init__(
        self,
        accumulator: Accumulator,
        url: str,
        queue: str = QUEUE,
        backlog: int = 2000,
        options: Callable[[str], RqSink] = lambda _: RqSink(),
        in_flight: InFlight | None = None,
    ) -> None:
        super().__init__(accumulator)
        self._client = rq_client(url)
        self._usual = queue
        self._queues = {queue: rq.Queue(queue, connection=self._client)}
        self._backlog = backlog
        self._options = options
        self._turns = Turns(accumulator, "rq", in_flight)
        self._held: list[Taken] = []
        self._tell_at = 0.0

    def step(self) -> None:
        try:
            self._enqueue()
            if monotonic() >= self._tell_at:
                self._tell()
            room = self._room() if self._turns.waiting else 0
        except (faults.RedisError, OSError) as error:
            raise translate(error, "rq_url") from None
        most = min(self.BATCH, room)
        while len(self._held) < most:
            found = self._turns.take(most - len(self._held), WATCH)
            if not found:
                break
            self._held += found
        self.trouble.over()
        # With its hands full it listens all the same, for those whose turn is next.
        self._turns.listen(0.0 if self._held else InFlight.FULL if self._turns.waiting else SLICE)

    def close(self) -> None:
        self._turns.close()
        self._client.close()

    def _room(self) -> int:
        counts = [queue.count for queue in self._queues.values()]
        return min(self._backlog - min(counts), self._backlog * self.SPREAD - max(counts))

    def _tell(self) -> None:
        """Says how RQ is doing, for :mod:`accumulator.health`, which may not reach RQ's server."""
        flows = self.perform(self.operations.flows("rq"))
        names = {self._options(flow).queue or self._usual for flow in flows}
        if "default" in flows:
            names |= self._queues.keys() - {self._usual}  # it stands for flows that are not known before they come
        queues = {name: self._seen(name) for name in sorted(names)}
        self.perform(self.operations.tell_queues(queues))
        # RQ workers that have just been started are not reported missing for long.
        self._tell_at = monotonic() + (BEAT if all(queue.workers for queue in queues.values()) else 1.0)

    def _seen(self, name: str) -> RqQueue:
        queue = rq.Queue(name, connection=self._client)
        workers = rq.Worker.all_keys(queue=queue)  # also of those that died: their own keys expire
        first = queue.get_job_ids(0, 1)
        told: Any = self._client.hget(Job.key_for(first[0]), "enqueued_at") if first else None
        oldest = datetime.now(UTC) - utcparse(told.decode()) if told else timedelta(0)
        return RqQueue(
            int(self._client.exists(*workers)) if workers else 0,
            queue.count,
            max(0, oldest // timedelta(milliseconds=1)),
        )

    def _enqueue(self) -> None:
        jobs: dict[str, list[Any]] = {}
        for taken in self._held:
            flow = flow_of(taken.bucket_key)
            options = self._options(flow)
            jobs.setdefault(options.queue or self._usual, []).append(_job(taken, flow, options))
        for name, some in jobs.items():
            if name not in self._queues:
                self._queues[name] = rq.Queue(name, connection=self._client)
            self._queues[name].enqueue_many(some)
        if self._held:
            self.log.debug("enqueued", jobs=len(self._held))
            self._held = []


def _job(taken: Taken, flow: str, options: RqSink) -> Any:
    try:
        # Which ladder it is of is not known here.
        timeout = longest_step() or _USUAL_TIMEOUT if is_emission(taken.window_id) else find_handler(flow).timeout
    except HandlerMissing:
        timeout = _USUAL_TIMEOUT  # the RQ worker may know more than we do; else it says so
    return rq.Queue.prepare_data(
        "accumulator.rq_sink.run_job",
        args=(taken.window_id, taken.attempt),
        timeout=ceil(timeout / 1000) + MARGIN,
        result_ttl=ceil(options.result_ttl / 1000),
        failure_ttl=ceil(options.failure_ttl / 1000),
        description=DESCRIPTION,
        job_id=f"{taken.window_id}-{taken.attempt}",
    )


# --- in the RQ worker -------------------------------------------------------------------------------------------------

_process: Accumulator | None = None
_process_lock = threading.Lock()


def _prepare(settings: Settings, config: Config | None, client: redis.Redis | None = None) -> Accumulator:
    """The accumulator of this process, with the handlers there; on RQ's own `client` where one is given, so that a
    job's process makes one connection instead of two. In a worker that forks it is made before."""
    global _process
    with _process_lock:
        if _process is None:
            if config is not None:
                settings = settings.with_config(config)
                load_handlers(config.handlers)
            _process = Accumulator.from_settings(settings, client)
        return _process


def run_job(window_id: str, attempt: int) -> None:
    """The job: one attempt at a manifest. In an RQ worker that is not ours, the environment says which server and
    configuration."""
    accumulator = _process
    if accumulator is None:
        settings = Settings()
        accumulator = _prepare(settings, find_config(settings))
    try:
        run_attempt(accumulator, window_id, attempt, limit=partial(_alarm, accumulator))
    except BaseException:
        accumulator.store.close()  # RQ, too, may have interrupted a call, and uses the connection after us
        raise


@contextmanager
def _alarm(accumulator: Accumulator, seconds: float) -> Iterator[None]:
    """Raises Timeout in the block after so many seconds, and leaves RQ's own alarm as it was. Only the main thread can
    be interrupted; elsewhere RQ's own timeout has to do. A call that was interrupted may have left its answer unread:
    those that follow go over other connections."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    rang = False

    def ring(*_: object) -> None:
        nonlocal rang
        rang = True
        raise Timeout

    began = monotonic()
    before = signal.signal(signal.SIGALRM, ring)
    left, _ = signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        if left:
            signal.setitimer(signal.ITIMER_REAL, max(0.001, left - (monotonic() - began)))
        if rang:
            accumulator.store.close()


def work(
    settings: Settings,
    config: Config | None,
    url: str | None = None,
    queue: str | None = None,
    supervised: bool = False,
) -> None:
    """An RQ worker in this process, until SIGTERM. Raises AccumulatorError where it can't begin.

    `url` is RQ's server where it is another one than settings and configuration say, `queue` the only queue it works
    on. It gives signs of life, but where it is `supervised` by a worker that does.
    """
    settings = settings if config is None else settings.with_config(config)
    server = settings.rq_server if url is None else url
    client = rq_client(server)
    accumulator = _prepare(settings, config, client if server == settings.url else None)
    accumulator.store.perform(accumulator.operations.warm())
    accumulator.store.close()  # each job's process makes connections of its own
    names = (queue,) if queue is not None else (QUEUE,) if config is None else config.queues
    with client, nullcontext() if supervised else _pulse(settings):
        queues = [rq.Queue(name, connection=client) for name in names]
        worker = rq.Worker(queues, connection=client, log_job_description=False)
        # In turn: by default RQ looks into a queue only while all before it are empty.
        worker.work(logging_level="WARNING", dequeue_strategy=DequeueStrategy.ROUND_ROBIN)


@contextmanager
def _pulse(settings: Settings) -> Iterator[None]:
    """Gives signs of life, on a connection of its own: the processes of the jobs must not share it."""
    with Accumulator.from_settings(settings) as accumulator:
        pulse = Pulse(accumulator, ["rq"])
        thread = threading.Thread(target=pulse.run, daemon=True)
        thread.start()
        try:
            yield
        finally:
            pulse.stop()
            thread.join(1.0)
