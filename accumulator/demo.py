"""The demo: a server, workers, and some orders whose changes come in bursts.

Its handlers are an example of a module that the configuration names; they say what they were given, and nothing else.
The events have fixed ids, so that delivering them again, in the next run, shows duplicates.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from shutil import which
from time import monotonic
from typing import Any, Final, NamedTuple

from pydantic import SecretStr
from rich.console import Console
from rich.text import Text

from accumulator import keys, logs
from accumulator.client import Accumulator
from accumulator.context import Context, StepContext
from accumulator.embedded import EmbeddedServer
from accumulator.envelope import Event
from accumulator.errors import ServerError
from accumulator.handlers import Stages, handler, load_handlers, on_cancelled, step_handler
from accumulator.manifest import Manifest
from accumulator.role import stopped_by
from accumulator.settings import Config, Settings
from accumulator.windows import ClosedWindow, Outcome
from accumulator.worker import Worker

# --- handlers ---------------------------------------------------------------------------------------------------------


@handler("pedido", timeout="10s")
class Order(Stages):
    """All changes of an order since the last time, at once, in stages: what each returns stays with the manifest."""

    def load(self, ctx: Context) -> dict[str, Any]:
        """The official state, now: a real shop would ask its database."""
        return {"order": ctx.bucket_key.rpartition(":")[2]}

    def propose(self, ctx: Context) -> dict[str, Any]:
        """What is to be done, from all the changes together."""
        return {**ctx.results["load"], "changes": [entry.event.kind for entry in ctx.events]}

    def execute(self, ctx: Context, key: str) -> dict[str, Any]:
        """The effect, once: a real shop would give `key` to whoever reserves the stock."""
        _received(ctx, ", ".join(ctx.results["propose"]["changes"]))
        return {"reserved": True}

    def verify(self, ctx: Context, key: str) -> bool:
        """Whether an attempt that died had got so far: here, telling it again harms nobody."""
        return False

    def confirm(self, ctx: Context) -> bool:
        """Whether it worked."""
        return bool(ctx.results["execute"]["reserved"])


@handler("documento", timeout="10s")
def document(ctx: Context) -> None:
    """The last text of a document (`keep: last`), however many edits there were."""
    last = [payload for payload in ctx.manifest.payloads() if isinstance(payload, dict)]
    _received(
        ctx, f"{len(ctx.manifest.event_ids)} edits, the last text is {last[-1].get('text')!r}" if last else "no text"
    )


@handler("default", timeout="10s")
def anything(ctx: Context) -> None:
    """Whatever has no handler of its own."""
    _received(ctx, f"{len(ctx.manifest.event_ids)} events")


@step_handler("lembrete", timeout="10s")
def remind(ctx: StepContext) -> None:
    """A reminder of an order that was left behind; a real shop would send it, under `effect.key`."""
    with ctx.effect("send") as effect:
        if effect.needed:
            tell("reminder", f"{ctx.bucket_key} {ctx.step}: by {ctx.attributes['channel']}")


@on_cancelled("lembrete", timeout="10s")
def stop_reminding(ctx: StepContext) -> None:
    """What everybody waited for has come."""
    tell("reminder", f"{ctx.bucket_key} cancelled by {ctx.by_event}: no further one is sent")


def _received(ctx: Context, what: str) -> None:
    window = ctx.manifest
    tell("handler", f"{ctx.bucket_key} window {window.window_version} ({window.close_reason}): {what}")


# --- samples ----------------------------------------------------------------------------------------------------------


class Sample(NamedTuple):
    """A delivery: seconds after the beginning, and the event."""

    at: float
    event: Event


_DAY: Final = datetime(2026, 10, 16, 14, tzinfo=UTC)


def _sample(
    at: float, event_id: str, key: str, kind: str, version: int, happened: float | None = None, **payload: Any
) -> Sample:
    """`happened` where it is delivered later than it happened."""
    event = Event(
        event_id=event_id,
        bucket_key=key,
        kind=kind,
        occurred_at=_DAY + timedelta(seconds=at if happened is None else happened),
        source="loja",
        source_version=version,
        payload=payload,
    )
    return Sample(at, event)


def _samples() -> Iterator[Sample]:
    """Two orders, one delivery of them twice; an order that is paid; a document that is being written."""
    one, two, paid = (f"aurora:pedido:PED-{n}" for n in (104, 105, 106))
    text = "aurora:documento:contrato"
    yield _sample(0.0, "E1", one, "item_adicionado", 1, sku="CAFE-500", quantidade=2)
    yield _sample(0.1, "E8", paid, "item_adicionado", 1, sku="CHA-100", quantidade=1)
    yield _sample(0.2, "D1", text, "editado", 1, text="Con")
    yield _sample(0.4, "E2", one, "endereco_atualizado", 2, cep="01310-100")
    yield _sample(0.5, "E3", two, "item_adicionado", 1, sku="MEL-250", quantidade=1)
    yield _sample(0.6, "D2", text, "editado", 2, text="Contrato de")
    yield _sample(0.9, "E2", one, "endereco_atualizado", 2, happened=0.4, cep="01310-100")
    yield _sample(1.2, "D3", text, "editado", 3, text="Contrato de compra")
    yield _sample(1.5, "E9", paid, "pago", 2, valor="18.90")
    # Three seconds of silence have closed both orders by now.
    yield _sample(3.9, "E4", one, "cupom_aplicado", 3, cupom="PRIMEIRA10")
    yield _sample(4.0, "E5", two, "frete_escolhido", 2, frete="expresso")
    yield _sample(4.2, "E6", two, "cupom_aplicado", 3, cupom="PRIMEIRA10")
    yield _sample(7.6, "E7", two, "item_removido", 4, sku="MEL-250")


SAMPLES: Final = tuple(_samples())
BUCKETS: Final = tuple(dict.fromkeys(sample.event.bucket_key for sample in SAMPLES))
LADDER: Final = "lembrete"
REMINDED: Final = next(sample.event.bucket_key for sample in SAMPLES if sample.event.kind == "frete_escolhido")
LOOK: Final = 0.1
PATIENCE: Final = 60.0
"""s in which every sample manifest must have been handled."""


# --- what is shown ----------------------------------------------------------------------------------------------------

_STYLES: Final = {"opened": "green", "duplicate": "yellow", "closed": "blue", "handler": "magenta", "warning": "red"}


def tell(what: str, text: str) -> None:
    """A line of the story: the local time, a word, and what happened."""
    plain = text if text.isprintable() else "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)
    now = datetime.now().astimezone().strftime("%H:%M:%S.%f")[:-5]
    line = Text.assemble((f"{now}  ", "dim"), (f"{what:<10}", _STYLES.get(what, "")), plain)
    Console(highlight=False, soft_wrap=True).print(line)


class Story:
    """Delivers the samples, and tells what becomes of them."""

    def __init__(self, client: Accumulator) -> None:
        self._client = client
        self._told: set[str] = set()
        self._dead: set[str] = set()
        self._away = False
        self._news = client.store.subscription(client.operations.channel)

    def close(self) -> None:
        self._news.close()

    def run(self, stop: threading.Event, stay: bool) -> bool:
        """Tells the story once, then, with `stay`, what else happens to the sample buckets until `stop`. Whether every
        sample is in a manifest that was handled."""
        deliveries, pace = self._prepare()
        reminding = not deliveries
        begun = monotonic()
        done = False
        while not stop.is_set():
            try:
                if not reminding:
                    self._remind()
                    reminding = True
                while deliveries and (not pace or monotonic() >= begun + deliveries[0].at):
                    self._deliver(deliveries[0])
                    deliveries = deliveries[1:]
                handled = self._look() and not deliveries
                self._away = False
            except ServerError as problem:
                handled = False
                if not self._away:
                    tell("warning", str(problem))
                self._away = True
            if handled and not done:
                done = True
                self._tell_end()
                if stay:
                    tell("ready", "running until Ctrl-C")
            if not stay and (done or monotonic() > begun + PATIENCE):
                break
            self._wait(stop)
        return done

    def _wait(self, stop: threading.Event) -> None:
        """Until something becomes ready, or a little while."""
        try:
            self._news.wait(LOOK)
        except ServerError:
            stop.wait(LOOK)

    def _prepare(self) -> tuple[Sequence[Sample], bool]:
        """What is to be delivered, and whether at its pace: everything on fresh data, and where an earlier run was cut
        off; else all of it again at once, while its ids are remembered."""
        manifests = [m for key in BUCKETS for m in self._client.manifests(key)]
        known = {(m.bucket_key, event_id) for m in manifests for event_id in m.event_ids}
        known |= {(key, entry.event.event_id) for key in BUCKETS for entry in self._client.open_events(key)}
        if not known:
            tell("fresh", "no data of an earlier run: the sample orders are delivered")
            return SAMPLES, True
        self._told |= {m.window_id for m in manifests if m.settled}
        tell("found", f"the data of an earlier run: {_counted(len(manifests), 'manifest')}")
        if not known >= {(sample.event.bucket_key, sample.event.event_id) for sample in SAMPLES}:
            tell("found", "that run was cut off: the sample orders are delivered again")
            return SAMPLES, True
        now = self._client.bucket(BUCKETS[0]).now
        memory = min((policy.dedupe_ttl for _, policy in self._client.policies().values()), default=0)
        if any(now - m.opened_at > memory - 3_600_000 for m in manifests):
            tell("found", "so old that its ids may be forgotten: nothing is delivered again")
            return (), False
        tell("found", "the sample orders are delivered once more, as after a producer's crash:")
        return SAMPLES, False

    def _remind(self) -> None:
        """Starts the ladder of the order whose customer thinks it over, once."""
        if LADDER in self._client.ladder_definitions():
            started = self._client.start_ladder(LADDER, REMINDED, start_id="demo")
            if started.outcome == "started":
                tell("ladder", f"{REMINDED} {LADDER}: started, until the customer goes on")

    def _deliver(self, sample: Sample) -> None:
        event = sample.event
        receipt = self._client.push(event)
        what = f"{event.bucket_key} {event.event_id} {event.kind}"
        for window in receipt.closed_windows:
            if window.reason != receipt.closed:
                self._tell_closed(window, event.bucket_key)
        match receipt.outcome:
            case Outcome.ACCEPTED if receipt.position == 1:
                tell("opened", f"{what}: the first event of window {receipt.window_version}")
            case Outcome.ACCEPTED:
                tell("accepted", f"{what}: into window {receipt.window_version}")
            case Outcome.DUPLICATE:
                tell("duplicate", f"{what}: was delivered before, dropped")
            case other:
                tell(str(other), f"{what}{': ' + receipt.code if receipt.code else ''}")
        for window in receipt.closed_windows:
            self._tell_closed(window, event.bucket_key)

    def _look(self) -> bool:
        """Tells what closed; whether all samples are in manifests that were handled."""
        handled = True
        kept: set[tuple[str, str]] = set()
        for key in BUCKETS:
            for manifest in self._client.manifests(key):
                self._tell_closed(manifest, key)
                kept |= {(key, event_id) for event_id in manifest.event_ids}
                if manifest.state == "dead" and manifest.window_id not in self._dead:
                    self._dead.add(manifest.window_id)
                    tell("dead", f"{key} window {manifest.window_version}: its handler failed")
                handled &= manifest.state == "confirmed"
        return handled and kept >= {(sample.event.bucket_key, sample.event.event_id) for sample in SAMPLES}

    def _tell_closed(self, window: ClosedWindow | Manifest, key: str) -> None:
        if window.window_id in self._told:
            return
        self._told.add(window.window_id)
        reason = window.reason if isinstance(window, ClosedWindow) else window.close_reason
        tell("closed", f"{key} window {window.window_version}: {reason}")

    def _tell_end(self) -> None:
        manifests = [m for key in BUCKETS for m in self._client.manifests(key)]
        events = sum(m.event_count for m in manifests)
        shown = next((m for m in manifests if m.flow == "pedido"), None)
        if shown is not None:
            steps = [f"{state} ({cause})" for _, state, _, cause in shown.timeline]
            effects = [f"effect {e.name} {e.state}" for e in self._client.effects(shown.window_id)]
            life = ", ".join([f"closed ({shown.close_reason})", *steps[:-1], *effects, *steps[-1:]])
            tell("timeline", f"{shown.bucket_key} window {shown.window_version}: {life}")
        tell("handled", f"{_counted(len(manifests), 'manifest')} with {_counted(events, 'event')}: all of the samples")


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


# --- the program ------------------------------------------------------------------------------------------------------


def shipped_config() -> Path:
    """The configuration that comes with the package: in a wheel beside this module, in a checkout under ``config/``."""
    here = Path(__file__).parent
    packed = here / "accumulator.yaml"
    return packed if packed.is_file() else here.parent / "config" / "accumulator.yaml"


def run(settings: Settings, config: Config, data_dir: Path, stay: bool, cli_line: Callable[..., str]) -> bool:
    """Runs it all until the story is told, or with `stay` until SIGTERM or Ctrl-C. Whether every sample manifest was
    handled; with `stay` it is well anyhow. `cli_line` makes a redis-cli line of settings and arguments."""
    load_handlers(config.handlers)
    settings = settings.with_config(config)
    if "log_level" not in settings.model_fields_set:
        settings = settings.model_copy(update={"log_level": "error"})  # the story is told here
    logs.configure(settings.log_level, settings.log_plain_keys)
    with ExitStack() as stack:
        stop = threading.Event()
        stack.enter_context(stopped_by(stop.set, signal.SIGTERM, signal.SIGINT))
        if "redis_url" not in settings.model_fields_set:
            server = stack.enter_context(EmbeddedServer(data_dir))
            settings = settings.model_copy(update={"redis_url": SecretStr(server.url)})
            tell("server", f"{server.binary}, its data in {data_dir}{os.sep}")
            us = sys.argv[0] if Path(sys.argv[0]).name == "accumulator" and not which("accumulator") else "accumulator"
            tell("look", f"export ACCUMULATOR_REDIS_URL={server.url}   # then: {us} buckets, {us} --help")
        client = stack.enter_context(Accumulator.from_settings(settings))
        _introduce(client, settings, config, cli_line)
        stack.enter_context(_working(Worker(settings, config, rq_workers=_rq_workers(client)), stop))
        story = Story(client)
        stack.callback(story.close)
        handled = story.run(stop, stay)
        if stop.is_set():
            tell("stopping", "")
    return handled or stay


def _introduce(client: Accumulator, settings: Settings, config: Config, cli_line: Callable[..., str]) -> None:
    """What a person needs to look around by themselves, and what is wrong with the server."""
    store, operations = client.store, client.operations
    store.perform(operations.connect())
    key = BUCKETS[0]
    tell("server", settings.shown_url)
    tell("look", cli_line(settings, "HGETALL", keys.bucket(operations.prefix_of(key), key)))
    for warning in store.perform(operations.server_warnings()):
        tell("warning", warning)
    for flow, policy in config.policies.items():
        loaded = client.load_policy(flow, policy, only_new=True)
        if loaded.outcome == "new":
            tell("policy", f"{flow}: installed as version {loaded.version}")
        elif loaded.differs:
            tell("warning", f"policy {flow}: version {loaded.version} rules, and the configuration file differs")
    for name, ladder in config.ladders.items():
        made = client.load_ladder(name, ladder, only_new=True)
        if made.outcome == "new":
            tell("ladder", f"{name}: installed as version {made.version}")
        elif made.differs:
            tell("warning", f"ladder {name}: version {made.version} rules, and the configuration file differs")


def _rq_workers(client: Accumulator) -> int:
    """One where a flow wants RQ."""
    return int(any(policy.sink == "rq" for _, policy in client.policies().values()))


@contextmanager
def _working(worker: Worker, stop: threading.Event) -> Iterator[None]:
    """The worker, in a thread; what ends it ends the demo."""
    failures: list[BaseException] = []

    def work() -> None:
        try:
            worker.run()
        except BaseException as problem:
            failures.append(problem)
        finally:
            stop.set()

    thread = threading.Thread(target=work, name="worker")
    thread.start()
    try:
        yield
    finally:
        worker.stop()
        thread.join()
    if failures:
        raise failures[0]
