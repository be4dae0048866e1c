"""The worker: a process in which some or all roles run, each in a thread of its own.

closer      closes windows that are due, ends leases and back-offs
dispatcher  makes RQ jobs of manifests whose flow has the sink `rq`
runner      runs the handlers of flows with the sink `direct`, in threads or in processes of its own
webhook     posts the manifests of flows with the sink `webhook`
janitor     records what nobody was handed, so that its payloads may go
rq          keeps RQ worker processes running
pulse       gives signs of life; always there
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Sequence
from time import monotonic
from typing import Final

from accumulator import logs
from accumulator.address import Address
from accumulator.client import Accumulator
from accumulator.closer import Closer
from accumulator.errors import AuthenticationFailed, InvalidSettings, MissingRight, ServerError
from accumulator.handlers import (
    DEFAULT,
    load_handlers,
    missing_handlers,
    missing_step_handlers,
    registered,
    with_step_handler,
)
from accumulator.janitor import Janitor
from accumulator.policy import Policy
from accumulator.processes import Processes, run_handlers
from accumulator.pulse import Pulse
from accumulator.role import Role, Trouble, stopped_by
from accumulator.rq_sink import Dispatcher, work
from accumulator.runner import DirectRunner
from accumulator.settings import USUAL_CONFIG, Config, Settings
from accumulator.turns import InFlight
from accumulator.webhook import Endpoint, WebhookRunner

ROLES: Final = ("closer", "dispatcher", "runner", "webhook", "janitor")
"""What runs where nothing else is said; `rq` comes along with `rq_workers`, or alone with one RQ worker."""

THREADS: Final = 4

STOP_WITHIN: Final = 4.5
"""s that stopping takes at the most, with handlers at work."""

ENDING: Final = ((signal.SIGTERM, 3.8), (signal.SIGKILL, 0.4))
RQ_ENDING: Final = ((signal.SIGTERM, 2.0), (signal.SIGTERM, 1.0), (signal.SIGKILL, 0.5))
"""How processes are ended: signals, and the seconds after each. RQ finishes its job at the first SIGTERM and drops it
at a second one, a second later at the earliest."""


class Worker:
    """Runs `roles` of ROLES or `rq`, and `rq_workers` RQ worker processes, on what `settings` and `config` name. By
    default those are all of ROLES; on a Redis Cluster, where RQ can't live, without the dispatcher unless RQ has a
    server of its own.

    `threads` is how many handlers the role `runner` runs at a time, and how many requests the role `webhook` makes:
    by default THREADS. With `processes`, the runner is so many processes, of one thread where `threads` is not given;
    they connect by the settings' URL. `accumulator` gives a connection instead of that. `rq_url` is RQ's server where
    it is another one than settings and configuration say. `start_within`: seconds in which the server must answer at
    the start; later, however long it is away, the worker waits for it. Raises InvalidSettings for an unknown role,
    for `processes` without a runner or with an `accumulator`, for a role that needs RQ where it has no server, and for
    a webhook's secret that is not there.
    """

    def __init__(
        self,
        settings: Settings,
        config: Config | None = None,
        *,
        roles: Sequence[str] | None = None,
        threads: int | None = None,
        processes: int = 0,
        rq_workers: int = 0,
        rq_url: str | None = None,
        accumulator: Accumulator | None = None,
        start_within: float = 30.0,
    ) -> None:
        chosen = roles is not None
        roles = ROLES if roles is None else roles
        odd = sorted(set(roles) - {*ROLES, "rq"})
        if odd:
            raise InvalidSettings("roles", f"there is no role {odd[0]!r}: choose of {', '.join((*ROLES, 'rq'))}")
        if processes and "runner" not in roles:
            raise InvalidSettings("processes", "needs the role runner, whose handlers they run")
        if processes and accumulator is not None:
            raise InvalidSettings("processes", "connect as the settings say: they can't use a client that is given")
        rq_workers = rq_workers or int("rq" in roles)
        self.settings = settings if config is None else settings.with_config(config)
        self.config = Config() if config is None else config
        self._source = "none" if config is None else config.path or "given by the program"
        rq_server = rq_url or self.settings.rq_server
        self._homeless = Address.of(rq_server, "rq_url").kind == "cluster"
        if self._homeless:
            if rq_workers or (chosen and "dispatcher" in roles):
                raise InvalidSettings(
                    "rq_url", "is not set, and RQ can't live on a Redis Cluster: name a server for it"
                )
            roles = [role for role in roles if role != "dispatcher"]
        self.log = logs.get_logger("worker")
        self.roles: list[Role] = []
        self._own = accumulator is None
        self.endpoints = {
            flow: Endpoint.of(flow, sink) for flow, sink in self.config.webhooks.items() if "webhook" in roles
        }
        self.accumulator = accumulator or Accumulator.from_settings(self.settings)
        ours = self.accumulator
        flying = InFlight(ours, self.config.max_in_flight)
        makers: dict[str, Callable[[], Role]] = {
            "closer": lambda: Closer(ours, self._upkeep),
            "dispatcher": lambda: Dispatcher(
                ours, rq_server, self.config.rq.queue, options=self.config.rq_sink, in_flight=flying
            ),
            "runner": lambda: DirectRunner(ours, threads or THREADS, in_flight=flying),
            "webhook": lambda: WebhookRunner(ours, self.endpoints, threads or THREADS, in_flight=flying),
            "janitor": lambda: Janitor(ours),
            "rq": lambda: Processes(
                ours, "rq", rq_workers, work, self.settings, config, rq_server, None, True, ending=RQ_ENDING
            ),
        }
        if processes:
            makers["runner"] = lambda: Processes(
                ours, "runner", processes, run_handlers, self.settings, self.config, threads or 1, ending=ENDING
            )
        self._names = [name for name in makers if name in roles or (name == "rq" and rq_workers)]
        self._makers = [makers[name] for name in self._names]
        self._makers.append(lambda: Pulse(ours, self._names, self.endpoints))
        self._start_within = start_within
        self._stopping = threading.Event()
        self._warned: set[str] = set()

    def stop(self) -> None:
        """Asks the worker to end; from any thread or a signal handler."""
        self._stopping.set()

    def run(self) -> int:
        """Works until SIGTERM, SIGINT or `stop()`, and returns 0 within STOP_WITHIN seconds of it: handlers have a few
        seconds to finish; an attempt that still runs then is given back, one in an RQ worker is tried again when its
        lease ends. Raises what keeps it from starting: InvalidSettings, NamespaceMismatch, ServerError …"""
        signals = signal.SIGTERM, signal.SIGINT
        try:
            with stopped_by(self.stop, *signals):
                if self._source == "none":
                    self.log.warning("no_configuration", remedy=f"--config FILE, ACCUMULATOR_CONFIG or {USUAL_CONFIG}")
                load_handlers(self.config.handlers)
                with stopped_by(self.stop, *signals):  # a module of theirs may have taken them for itself
                    if self._begin():
                        self._work()
        finally:
            if self._own:
                self.accumulator.close()
        return 0

    # --- the beginning ---

    def _begin(self) -> bool:
        """Meets the server, and says what is wrong with its set-up or ours. False where it was stopped before."""
        trouble = Trouble(self.log)
        until = monotonic() + self._start_within
        while not self._stopping.is_set():
            try:
                self._meet()
            except (AuthenticationFailed, MissingRight):
                raise
            except ServerError as problem:
                if monotonic() > until:
                    raise
                self._stopping.wait(trouble.met(problem))
            else:
                trouble.over()
                return True
        return False

    def _meet(self) -> None:
        store, operations = self.accumulator.store, self.accumulator.operations
        store.perform(operations.connect())
        # Of every partition: a URL that leads to one node of a cluster finds some of them only, and is refused here.
        store.perform(operations.next_due())
        self._upkeep()
        self._set_ceilings()
        for warning in store.perform(operations.server_warnings()):
            self.log.warning("server", detail=warning)
        policies = {flow: policy for flow, (_, policy) in store.perform(operations.policies()).items()}
        for flow in missing_handlers(policies):
            self.log.error("handler_missing", flow=flow, sink=policies[flow].sink)
        if self._homeless:
            for flow, policy in policies.items():
                if policy.sink == "rq":
                    self.log.error("rq_server_missing", flow=flow, remedy="ACCUMULATOR_RQ_URL, or the sink direct")
        for name in missing_step_handlers(store.perform(operations.ladder_definitions())):
            self.log.warning("handler_missing", ladder=name)
        if "webhook" in self._names:
            for flow, policy in policies.items():
                if policy.sink == "webhook" and not {flow, DEFAULT} & self.endpoints.keys():
                    self.log.error("endpoint_missing", flow=flow, remedy="sinks in the configuration")

    def _set_ceilings(self) -> None:
        """Those that the file names become the namespace's."""
        there = self.accumulator.operations.ceilings
        wanted = there | {name: getattr(self.config, name) for name in there.keys() & self.config.model_fields_set}
        if wanted != there:
            self.accumulator.store.perform(self.accumulator.operations.set_ceilings(**wanted))
            self.log.info("ceilings_set", **wanted)

    def _upkeep(self) -> None:
        """Installs the file's policies where the server has none, warns once where it has others, and brings partitions
        that missed one up to date."""
        store, operations = self.accumulator.store, self.accumulator.operations
        there = store.perform(operations.policies())
        for flow, policy in self.config.policies.items():
            found = there.get(flow)
            if found is None:
                loaded = store.perform(operations.load_policy(flow, policy, True))
                self.log.info("policy_installed", flow=flow, version=loaded.version)
            elif _differs(found[1], policy) and flow not in self._warned:
                self._warned.add(flow)
                self.log.warning("policy_differs", flow=flow, version=found[0], remedy="accumulator policy load")
        definitions = store.perform(operations.ladder_definitions())
        for name, ladder in self.config.ladders.items():
            known = definitions.get(name)
            if known is None:
                made = store.perform(operations.load_ladder(ladder, True))
                self.log.info("ladder_installed", ladder=name, version=made.version)
            elif known[1].options != ladder.options and f"ladder:{name}" not in self._warned:
                self._warned.add(f"ladder:{name}")
                self.log.warning("ladder_differs", ladder=name, version=known[0], remedy="accumulator ladder load")
        store.perform(operations.watch())
        behind = store.perform(operations.repair_policies())
        if behind:
            self.log.warning("policies_repaired", partitions=behind)

    # --- the work ---

    def _work(self) -> None:
        self.roles = [make() for make in self._makers]
        threads = [
            threading.Thread(target=self._supervise, args=(i,), name=role.name, daemon=True)
            for i, role in enumerate(self.roles)
        ]
        for thread in threads:
            thread.start()
        self.log.info(
            "started",
            roles=" ".join(self._names),
            namespace=self.settings.namespace,
            config=self._source,
            handlers=len(registered()),
            step_handlers=len(with_step_handler()),
        )
        while not self._stopping.wait(1.0):
            continue
        self.log.info("stopping")
        until = monotonic() + STOP_WITHIN
        for role in self.roles:
            role.stop()
        for thread in threads:
            thread.join(max(0.0, until - monotonic()))
        held = [thread.name for thread in threads if thread.is_alive()]
        self.log.info("stopped", unfinished=" ".join(held))

    def _supervise(self, index: int) -> None:
        """Runs a role; one that breaks, by a fault of ours, is made anew and the others never notice."""
        role = self.roles[index]
        trouble = Trouble(role.log)
        while True:
            began = monotonic()
            try:
                role.run()
            except Exception as problem:
                if monotonic() - began > 60:
                    trouble.over()
                role.log.debug("broke", problem=type(problem).__name__, where=logs.place(problem))
                self._stopping.wait(trouble.met(problem))
            if self._stopping.is_set():
                return
            role = self.roles[index] = self._makers[index]()


def _differs(one: Policy, other: Policy) -> bool:
    return one.canonical_json() != other.canonical_json()
