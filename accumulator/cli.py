"""The command line: every command, what it prints, and its exit code.

Exit codes: 0 it went well, 1 what was asked does not hold, 2 wrong usage or input, 3 the server can't be asked (or a
fault of ours), 130 interrupted. Tables are for people; `--json` prints one JSON object a line, with instants in ms
since the epoch.
"""

from __future__ import annotations

import errno
import json
import shlex
import sys
import traceback
from base64 import b64encode
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, fields
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Annotated, Any, BinaryIO, Final, cast
from urllib.parse import parse_qs, unquote, urlsplit

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text
from typer.core import TyperGroup

import accumulator
from accumulator import keys, simulate
from accumulator.client import Accumulator
from accumulator.envelope import check_bucket_key, check_event_id
from accumulator.errors import (
    AccumulatorError,
    InternalError,
    InvalidInput,
    InvalidPolicy,
    InvalidSettings,
    ServerError,
)
from accumulator.feed import BadLine, Fed, Source, feed
from accumulator.manifest import Manifest, StoredEvent
from accumulator.operations import Bucket, ClosedWindow, Flushed
from accumulator.policy import Policy, format_duration, parse_duration
from accumulator.settings import Config, Settings, find_config, load_yaml

_COUNTS: Final = frozenset({"max_events", "max_bytes", "max_weight", "max_event_bytes", "busy_streak_alert"})

FAILED: Final = 1
WRONG: Final = 2
SERVER: Final = 3
INTERRUPTED: Final = 130

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_CODES: Final = (
    "Exit codes: 0 it went well; 1 what was asked does not hold; 2 wrong usage or input; 3 the server can't be asked. "
    "The server comes from ACCUMULATOR_REDIS_URL, the configuration from ACCUMULATOR_CONFIG, else from "
    "config/accumulator.yaml where that is there."
)


class _Program(TyperGroup):
    """Turns what goes wrong into a plain message and an exit code."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except (ServerError, InternalError) as problem:
            _complain(problem)
            raise typer.Exit(SERVER) from None
        except AccumulatorError as problem:
            _complain(problem)
            raise typer.Exit(WRONG) from None
        except OSError as problem:
            if problem.errno == errno.EPIPE or problem.strerror is None:
                raise
            name = f"{problem.filename}: " if problem.filename is not None else ""
            _complain(f"{name}{problem.strerror}")
            raise typer.Exit(WRONG) from None


app = typer.Typer(
    cls=_Program,
    help="Accumulates events into business units on Redis and hands each over once, as a versioned manifest.",
    epilog=_CODES,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
policy_app = typer.Typer(no_args_is_help=True, help="The rules of each flow: check, load, show.")
reconcile_app = typer.Typer(no_args_is_help=True, help="What waits for a person to decide.")
app.add_typer(policy_app, name="policy")
app.add_typer(reconcile_app, name="reconcile")


def main() -> None:
    """The program `accumulator`."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
    try:
        app(prog_name="accumulator")
    except UnicodeEncodeError:
        _complain("what was given is not valid UTF-8")
        sys.exit(WRONG)
    except Exception as problem:
        # No text of it: nobody knows what it repeats.
        where = traceback.extract_tb(problem.__traceback__)[-1]
        _complain(
            f"a fault of ours, please report it: {type(problem).__name__} at {Path(where.filename).name}:{where.lineno}"
        )
        sys.exit(SERVER)


# --- what people see --------------------------------------------------------------------------------------------------


def _plain(value: object) -> str:
    """Text of others on one line: what a terminal would obey, or not show, is written as an escape."""
    text = str(value)
    return text if text.isprintable() else "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def _say(text: str = "") -> None:
    typer.echo(text)


def _tell(text: str) -> None:
    """Beside the answer: on standard error."""
    typer.echo(text, err=True)


def _complain(problem: AccumulatorError | str) -> None:
    text = str(problem)
    if isinstance(problem, InvalidInput) and not problem.field:
        text = problem.rule
    _tell(f"accumulator: {_plain(text)}")


def _json(value: object) -> None:
    utf8 = (getattr(sys.stdout, "encoding", None) or "").lower().replace("-", "") == "utf8"
    _say(json.dumps(value, ensure_ascii=not utf8))


def _table(columns: Sequence[str], rows: Iterable[Sequence[object]], numbers: Sequence[str] = ()) -> None:
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for name in columns:
        table.add_column(Text(name), justify="right" if name in numbers else "left", overflow="fold")
    for row in rows:
        table.add_row(*(Text(_plain(cell)) for cell in row))
    console = Console(highlight=False)
    # Into a pipe every row is one line, however long its key.
    console.print(table) if console.is_terminal else Console(highlight=False, width=4000).print(table)


def _facts(facts: Mapping[str, object]) -> None:
    width = max(map(len, facts))
    for name, value in facts.items():
        _say(f"{name:<{width}}  {_plain(value)}")


def _at(ms: int) -> str:
    """An instant as people read it, in UTC."""
    return (_EPOCH + timedelta(milliseconds=ms)).isoformat(sep=" ", timespec="milliseconds").removesuffix(
        "+00:00"
    ) + "Z"


def _span(ms: int) -> str:
    """A length of time, exact: 250ms, 13s, 1.5s, 2h3m."""
    if abs(ms) < 1000 and ms:
        return f"{ms}ms"
    sign, left = ("-", -ms) if ms < 0 else ("", ms)
    parts = []
    for unit, size in (("d", 86_400_000), ("h", 3_600_000), ("m", 60_000)):
        if left >= size:
            parts.append(f"{left // size}{unit}")
            left %= size
    if left or not parts:
        parts.append(f"{left / 1000:g}s")
    return sign + "".join(parts)


def _rough(ms: int) -> str:
    """A length of time at a glance: 1.2s, 3m12s, 2h5m, 4d3h."""
    if ms >= 60_000:
        unit = 1000 if ms < 3_600_000 else 60_000 if ms < 86_400_000 else 3_600_000
        return _span(ms // unit * unit)
    return f"{ms / 1000:.1f}s"


def _due(due_at: int, reason: str, now: int) -> str:
    when = f"in {_rough(due_at - now)}" if due_at > now else f"{_rough(now - due_at)} ago"
    return f"{_at(due_at)} ({when}): {reason}"


def _ids(ids: Sequence[str], most: int = 8) -> str:
    more = f", and {len(ids) - most} more" if len(ids) > most else ""
    return ", ".join(ids[:most]) + more or "none"


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


# --- what is asked of, and where --------------------------------------------------------------------------------------


@contextmanager
def _connected(config: Path | None = None) -> Iterator[tuple[Accumulator, Config | None]]:
    settings = Settings()
    found = find_config(settings, config)
    with Accumulator.from_settings(settings.with_config(found) if found else settings) as client:
        yield client, found


def _key(value: str) -> str:
    """A bucket key as it was typed; refused before any server is asked."""
    try:
        return check_bucket_key(value)
    except InvalidInput as problem:
        raise typer.BadParameter(problem.rule) from None


def _event_id(value: str) -> str:
    try:
        return check_event_id(value)
    except InvalidInput as problem:
        raise typer.BadParameter(problem.rule) from None


JsonOption = Annotated[bool, typer.Option("--json", help="One JSON object a line instead of a table.")]
ConfigOption = Annotated[
    Path | None, typer.Option("--config", metavar="FILE", help="The configuration file.", show_default=False)
]
KeyArgument = Annotated[str, typer.Argument(metavar="KEY", help="A bucket key: tenant:flow:object.", parser=_key)]
TenantOption = Annotated[
    str | None, typer.Option(help="Only this tenant, as it stands in the key.", show_default=False)
]
FlowOption = Annotated[str | None, typer.Option(help="Only this flow, as it stands in the key.", show_default=False)]


def _version(wanted: bool) -> None:
    if wanted:
        _say(f"accumulator {accumulator.__version__}")
        raise typer.Exit


@app.callback()
def _program(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    pass


# --- push -------------------------------------------------------------------------------------------------------------


@app.command()
def push(
    file: Annotated[
        str, typer.Argument(metavar="FILE", help="A file of JSON lines, plain or gzip; - is standard input.")
    ],
    strict: Annotated[bool, typer.Option("--strict", help="Stop at the first line that is no event.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="The summary as one JSON object.")] = False,
    config: ConfigOption = None,
) -> None:
    """Push a file of events, one JSON object a line, and say what became of them.

    A line that is no event is told by number and field and stops nothing, but with --strict. Pushing the same file
    again is safe: what was taken before is a duplicate. Exit code 1 where a line was bad, or an event got no answer.
    """
    with _connected(config) as (client, found), _source(file) as source:
        if found is not None:
            _install(client, found)
        fed = Fed()
        try:
            with _progress(source) as (on_bad, on_batch):
                feed(client, source, fed, strict=strict, on_bad=on_bad, on_batch=on_batch)
        except KeyboardInterrupt:
            _tell(f"interrupted, with answers for {fed.events:,} events; pushing the file again is safe")
            raise typer.Exit(INTERRUPTED) from None
    if as_json:
        _json(_fed_json(file, fed))
    else:
        _fed_table(fed)
    if fed.stopped_at is not None:
        _tell(f"stopped at line {fed.stopped_at}: nothing from there on was sent; before it {fed.events:,} events were")
    if fed.failure is not None:
        answered = fed.events - fed.outcomes["unknown"]
        _tell(f"ended early, with answers for {answered:,} events; pushing the file again is safe")
        raise fed.failure
    if fed.bad or fed.outcomes["unknown"]:
        raise typer.Exit(FAILED)


def _source(file: str) -> Source:
    if file == "-":
        return Source(None, cast(BinaryIO, sys.stdin.buffer))
    return Source(Path(file))


@contextmanager
def _progress(source: Source) -> Iterator[tuple[Callable[[BadLine], None], Callable[[Fed], None]]]:
    """A bar on a terminal; bad lines go above it."""
    if not sys.stderr.isatty():
        yield (lambda bad: _tell(_plain(bad))), (lambda fed: None)
        return
    console = Console(stderr=True, highlight=False)
    columns = (BarColumn(), TaskProgressColumn(), TextColumn("{task.fields[events]:,} events"), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("push", total=source.size, events=0)
        yield (
            lambda bad: console.print(Text(_plain(bad))),
            lambda fed: progress.update(task, completed=source.position, events=fed.events),
        )


def _fed_json(file: str, fed: Fed) -> dict[str, Any]:
    summary = {field.name: getattr(fed, field.name) for field in fields(fed)}
    return {
        "file": file,
        **summary,
        "bad_lines": [bad._asdict() for bad in fed.bad_lines],
        "failure": None if fed.failure is None else str(fed.failure),
        "seconds": round(fed.seconds, 3),
    }


def _fed_table(fed: Fed) -> None:
    rows: list[tuple[str, object]] = []
    for outcome in ("accepted", "revised", "duplicate", "conflict", "rejected", "reconciled", "unknown"):
        if fed.outcomes[outcome]:
            rows.append((outcome, fed.outcomes[outcome]))
            rows += [
                (f"  {code.partition(': ')[2]}", n)
                for code, n in sorted(fed.codes.items())
                if code.startswith(f"{outcome}:")
            ]
            if outcome == "unknown":
                rows += [(f"  {reason}", n) for reason, n in sorted(fed.errors.items())]
    if fed.late:
        rows.append(("late among them", fed.late))
    if fed.bad:
        rows.append(("bad lines", fed.bad))
    if fed.blank:
        rows.append(("blank lines", fed.blank))
    rows.append(("windows opened", fed.opened))
    rows.append(("windows closed", fed.closed.total()))
    rows += [(f"  {reason}", n) for reason, n in sorted(fed.closed.items())]
    _table(("outcome", "events"), [(name, f"{n:,}") for name, n in rows], numbers=("events",))
    rate = f", {fed.events / fed.seconds:,.0f} a second" if fed.seconds > 0.01 and fed.events else ""
    _say(f"{fed.events:,} events of {fed.lines:,} lines in {fed.seconds:.1f} s{rate}")


# --- simulate ---------------------------------------------------------------------------------------------------------


@app.command("simulate")
def simulate_(
    paths: Annotated[list[Path], typer.Argument(metavar="FILE|DIR…", help="Scenario files, or folders of them.")],
    as_json: Annotated[bool, typer.Option("--json", help="The answer as JSON, one scenario a line.")] = False,
) -> None:
    """Try policies under a virtual clock, through the real scripts on a server of our own.

    A scenario names policies, steps at instants, and what is expected of them; a folder runs in the order of the file
    names. Exit code 1 where an expectation does not hold or a scenario can't be read.
    """
    files = [file for path in paths for file in _scenario_files(path)]
    named = len(paths) > 1 or paths[0].is_dir()
    failed = 0
    with simulate.simulator_store() as store:
        for file in files:
            try:
                scenario = simulate.load_scenario(file)
                answer = simulate.run_scenario(store, scenario)
            except ServerError:
                raise
            except AccumulatorError as problem:
                failed += 1
                _tell(f"{_plain(file.name)}: {_plain(problem)}")
                continue
            except Exception as problem:  # whatever one file does to us, the others are run
                failed += 1
                _tell(f"{_plain(file.name)}: can't be run: {type(problem).__name__}")
                continue
            differences = simulate.differences(answer, scenario.get("expect") or {})
            failed += bool(differences)
            if as_json:
                _json({"file": file.name, **answer} if named else answer)
            else:
                _account(file.name, scenario, answer)
                if scenario.get("expect") is not None and not differences:
                    _say("  as expected")
            for difference in differences:
                (_tell if as_json else _say)(f"{_plain(file.name)}: {_plain(difference)}")
    if named and not as_json:
        _say(f"{_counted(len(files), 'scenario')}, {failed or 'none'} failed")
    if failed:
        raise typer.Exit(FAILED)


def _scenario_files(path: Path) -> list[Path]:
    if not path.is_dir():
        if not path.exists():
            raise InvalidSettings(str(path), "there is no such file or folder")
        return [path]
    found = [file for file in path.iterdir() if file.suffix in (".yaml", ".yml") and not file.name.startswith(".")]
    if not found:
        raise InvalidSettings(str(path), "holds no scenario (*.yaml)")
    return sorted(found, key=lambda file: file.name)


def _account(name: str, scenario: simulate.Scenario, answer: simulate.Answer) -> None:
    """What happened, in order: steps as written, and windows as they closed."""
    _say(_plain(scenario.get("name", name)) + (f" - {_plain(scenario['about'])}" if scenario.get("about") else ""))
    happened: list[tuple[int, int, str]] = []
    outcomes = iter(answer["outcomes"])
    for step in scenario.get("steps") or ():
        at = parse_duration(step["at"])
        happened += ((at, 0, line) for line in _step_account(step, outcomes))
    for m in answer["manifests"]:
        line = f"closed {m['bucket_key']} window {m['window_version']}: {m['close_reason']}"
        if m["sealed_at"] != m["closed_at"]:
            line += f", sealed {_span(m['sealed_at'] - m['closed_at'])} later"
        if m["relation"] not in ("first", "after_close"):
            line += f", {m['relation']}"
        happened.append((m["closed_at"], 1, f"{line}; {_ids(m['event_ids'])}"))
    for at, _, line in sorted(happened, key=lambda each: each[:2]):
        _say(f"  {_span(at):>8}  {_plain(line)}")
    for o in answer["open"]:
        window = f"{o['bucket_key']} window {o['window_version']}"
        _say(f"      open  {_plain(window)}, due at {_span(o['due_at'])}; {_plain(_ids(o['event_ids']))}")
    for r in answer["reconciliation"]:
        _say(f"   waiting  {_plain(r['bucket_key'])} {_plain(r['event_id'])}: {r['code']}")
    _say("  " + ", ".join(f"{what} {count}" for what, count in answer["counters"].items()))


def _step_account(step: Mapping[str, Any], outcomes: Iterator[Mapping[str, Any]]) -> Iterator[str]:
    for action in ("flush", "hold", "retract"):
        if action in step:
            rest = " ".join(f"{name} {value}" for name, value in step[action].items() if name != "bucket_key")
            yield f"{action} {step[action]['bucket_key']} {rest}"
    if "policy" in step:
        yield f"policy of {', '.join(step['policy'])} replaced"
    given = step.get("push", [])
    for event in given if isinstance(given, list) else [given]:
        o = next(outcomes)
        result = o["outcome"]
        if "code" in o:
            result += f" ({o['code']})"
        if "window_version" in o:
            result += f" into window {o['window_version']}"
        if o.get("late"):
            result += ", late"
        if o.get("conflict"):
            result += ", in conflict"
        if "closed" in o:
            result += f", closes it ({o['closed']})"
        yield f"push {event['event_id']} ({event.get('kind', 'event')}) to {event['bucket_key']}: {result}"


# --- policies ---------------------------------------------------------------------------------------------------------


def _install(client: Accumulator, config: Config) -> None:
    """Gives the flows that the server does not know their policy; says where it has another one than the file."""
    for flow, policy in config.policies.items():
        loaded = client.load_policy(flow, policy, only_new=True)
        if loaded.outcome == "new":
            _tell(f"policy {_plain(flow)}: installed as version {loaded.version}")
        elif loaded.differs:
            _tell(
                f"warning: policy {_plain(flow)}: version {loaded.version} rules, and the configuration differs: "
                "`accumulator policy load` would make it the next version"
            )


@policy_app.command("check")
def policy_check(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A configuration file.")],
    as_json: JsonOption = False,
) -> None:
    """Say what a configuration file gets wrong, without any server. Exit code 1 where it is anything."""
    try:
        values = load_yaml(file.read_bytes(), str(file))
    except OSError as problem:
        raise InvalidSettings(str(file), f"can't be read: {problem.strerror}") from None
    except InvalidInput as problem:
        raise _check_failed([problem], as_json) from None
    # Each flow by itself: one fault should not hide those of the others.
    policies = values.get("policies") if isinstance(values, dict) else None
    wrong = [p for flow, options in _pairs(policies) if (p := _policy_problem(flow, options)) is not None]
    if wrong:
        raise _check_failed(wrong, as_json)
    try:
        config = Config.load(file)
    except InvalidInput as problem:
        raise _check_failed([problem], as_json) from None
    for flow, policy in config.policies.items():
        if as_json:
            _json({"flow": flow, "ok": True, "policy": json.loads(policy.canonical_json())})
        else:
            _say(f"policy {_plain(flow)}: good ({_options_text(policy)})")


def _pairs(value: object) -> Iterable[tuple[Any, Any]]:
    return value.items() if isinstance(value, dict) else ()


def _policy_problem(flow: str, options: object) -> InvalidInput | None:
    try:
        Policy.load(flow, options)
    except InvalidPolicy as problem:
        return problem
    return None


def _check_failed(wrong: Sequence[InvalidInput], as_json: bool) -> typer.Exit:
    for problem in wrong:
        if as_json:
            flow = problem.flow if isinstance(problem, InvalidPolicy) else None
            _json({"flow": flow, "ok": False, "option": problem.field, "reason": problem.rule})
        else:
            _complain(problem)
    return typer.Exit(FAILED)


@policy_app.command("load")
def policy_load(
    flows: Annotated[
        list[str] | None, typer.Argument(metavar="[FLOW…]", help="Only these flows of the file.", show_default=False)
    ] = None,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Make the policies of the configuration file the latest: they rule the windows opened from now on.

    Equal content is no new version.
    """
    with _connected(config) as (client, found):
        if found is None:
            raise InvalidSettings("config", "is not there: give --config FILE or set ACCUMULATOR_CONFIG")
        wanted = flows or list(found.policies)
        for flow in wanted:
            if flow not in found.policies:
                raise InvalidSettings(flow, "is no flow of the configuration file")
        loaded = [client.load_policy(flow, found.policies[flow]) for flow in wanted]
    if as_json:
        for one in loaded:
            _json(one._asdict())
    else:
        _table(("flow", "version", "outcome"), loaded, numbers=("version",))


@policy_app.command("show")
def policy_show(
    flows: Annotated[
        list[str] | None, typer.Argument(metavar="[FLOW…]", help="Only these flows.", show_default=False)
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Show the policies that rule on the server, each flow's latest: the options that are not the default."""
    with _connected() as (client, _):
        there = client.policies()
    missing = [flow for flow in flows or () if flow not in there]
    shown = {flow: there[flow] for flow in flows or there if flow in there}
    if as_json:
        for flow, (version, policy) in shown.items():
            _json({"flow": flow, "version": version, "policy": json.loads(policy.canonical_json())})
    elif shown:
        _table(
            ("flow", "version", "options"),
            [(flow, version, _options_text(policy)) for flow, (version, policy) in shown.items()],
            numbers=("version",),
        )
    elif not flows:
        _say("no policy is loaded; `accumulator policy load` does that")
    for flow in missing:
        _complain(f"flow {flow}: there is no policy for it")
    if missing:
        raise typer.Exit(FAILED)


def _options_text(policy: Policy) -> str:
    usual = Policy(inactivity=None).model_dump()
    given = {name: value for name, value in policy.model_dump().items() if name == "inactivity" or value != usual[name]}
    return ", ".join(f"{name} {_option_text(name, value)}" for name, value in given.items())


def _option_text(name: str, value: object) -> str:
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    if isinstance(value, tuple):
        return "[" + ", ".join(value) + "]"
    return format_duration(value) if isinstance(value, int) and name not in _COUNTS else str(value)


# --- buckets ----------------------------------------------------------------------------------------------------------


@app.command()
def buckets(
    tenant: TenantOption = None,
    flow: FlowOption = None,
    limit: Annotated[int, typer.Option(min=1, help="At most so many, the oldest first.")] = 1000,
    as_json: JsonOption = False,
) -> None:
    """List the open buckets, the oldest first: age, events, when each closes and why."""
    with _connected() as (client, _):
        there = [key for key, _ in client.open_buckets() if _matches(key, tenant, flow)]
        found = [bucket for key in there[:limit] if (bucket := client.bucket(key)).open is not None]
    rows = []
    for bucket in found:
        window = bucket.open
        assert window is not None
        if as_json:
            _json(_bucket_json(bucket))
        else:
            age, due = _rough(bucket.now - window.opened_at), _due(window.due_at, window.due_reason, bucket.now)
            rows.append((bucket.bucket_key, window.window_version, age, window.event_count, due))
    if rows:
        _table(("bucket", "window", "age", "events", "closes at"), rows, numbers=("window", "age", "events"))
    elif not as_json:
        _say("no bucket is open")
    if len(there) > limit:
        _tell(f"and {len(there) - limit} more: --limit shows them")


def _matches(key: str, tenant: str | None, flow: str | None) -> bool:
    own_tenant, own_flow, _ = key.split(":", 2)
    return tenant in (None, own_tenant) and flow in (None, own_flow)


def _bucket_json(bucket: Bucket) -> dict[str, Any]:
    window = bucket.open
    more = {} if window is None else {"age": bucket.now - window.opened_at}
    return asdict(bucket) | more


@app.command("bucket")
def bucket_(
    key: KeyArgument,
    events: Annotated[bool, typer.Option("--events", help="The events of the open window too.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Show one bucket as it stands: its open window, when that closes and why."""
    with _connected() as (client, _):
        bucket = client.bucket(key)
        held = client.open_events(key) if events and bucket.open is not None else ()
    window = bucket.open
    if as_json:
        _json(_bucket_json(bucket) | ({"events": [_event_json(e) for e in held]} if events else {}))
        return
    facts: dict[str, object] = {"bucket": key}
    if window is None:
        facts["open"] = "no window"
    else:
        facts |= {
            "open": f"window {window.window_version} ({window.window_id}), {window.relation}",
            "opened at": _at(window.opened_at),
            "last event": _at(window.last_event_at),
            "closes at": _due(window.due_at, window.due_reason, bucket.now),
            "events": window.event_count,
            "entries": window.entries,
            "duplicates": window.duplicates,
            "bytes": window.bytes,
            "weight": window.weight,
            "policy": f"version {window.flow_policy} of the flow's; events are of {window.policy_version}",
        }
    if bucket.last_closed_window_id is not None:
        facts["last closed"] = bucket.last_closed_window_id
    _facts(facts)
    if held:
        _say()
        _events_table(held)


def _event_json(stored: StoredEvent) -> dict[str, Any]:
    event = {name: value for name, value in stored.event.model_dump().items() if value is not None or name == "payload"}
    event |= {"occurred_at": stored.event.occurred_ms}
    if stored.event.deadline_ms is not None:
        event["deadline_at"] = stored.event.deadline_ms
    if isinstance(event.get("payload"), bytes):
        event["payload_bytes"] = b64encode(event.pop("payload")).decode()
    event["content_digest"] = stored.event.content_digest
    return event | {
        "received_at": stored.received_at,
        "position": stored.position,
        "late": stored.late,
        "revised": stored.revised,
    }


def _events_table(events: Sequence[StoredEvent]) -> None:
    """Ids, kinds and instants; payloads are in the JSON."""
    _table(
        ("#", "event", "kind", "source", "version", "occurred", "received", ""),
        [
            (
                stored.position,
                stored.event.event_id,
                stored.event.kind,
                stored.event.source,
                "" if stored.event.source_version is None else stored.event.source_version,
                _at(stored.event.occurred_ms),
                _at(stored.received_at),
                " ".join(name for name, is_so in (("late", stored.late), ("revised", stored.revised)) if is_so),
            )
            for stored in events
        ],
        numbers=("#", "version"),
    )


@app.command()
def manifests(key: KeyArgument, as_json: JsonOption = False) -> None:
    """List the manifests of a bucket, by version."""
    with _connected() as (client, _):
        found = client.manifests(key)
    if as_json:
        for manifest in found:
            _json(_manifest_json(manifest))
    elif not found:
        _say("no window of this bucket has closed")
    else:
        _table(
            ("window", "id", "reason", "closed at", "events", "relation", "state"),
            [
                (m.window_version, m.window_id, m.close_reason, _at(m.closed_at), m.event_count, m.relation, m.state)
                for m in found
            ],
            numbers=("window", "events"),
        )


def _manifest_json(manifest: Manifest, events: bool = False) -> dict[str, Any]:
    shown = {f.name: getattr(manifest, f.name) for f in fields(manifest) if f.name != "events"}
    shown["timeline"] = [
        {"at": at, "state": state, "attempt": attempt, "cause": cause}
        for at, state, attempt, cause in manifest.timeline
    ]
    if events:
        shown["events"] = [_event_json(stored) for stored in manifest.events]
    return shown


@app.command("manifest")
def manifest_(
    window_id: Annotated[str, typer.Argument(metavar="WINDOW_ID", help="As `manifests` lists it.")],
    events: Annotated[bool, typer.Option("--events", help="Its events too.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Show one manifest: why it closed, what is in it, and its timeline."""
    with _connected() as (client, _):
        m = client.manifest(window_id)
    if m is None:
        _complain("there is no manifest of that id")
        raise typer.Exit(FAILED)
    if as_json:
        _json(_manifest_json(m, events))
        return
    limits = [f"{name} {_at(at)}" for name, at in sorted(m.limits.items(), key=lambda limit: limit[1])]
    facts: dict[str, object] = {
        "bucket": m.bucket_key,
        "window": f"{m.window_version} ({m.window_id}), {m.relation}"
        + (f" of {m.previous_window_id}" if m.previous_window_id else ""),
        "state": m.state + (f", attempt {m.attempt}" if m.attempt else ""),
        "reason": m.close_reason,
        "opened at": _at(m.opened_at),
        "last event": _at(m.last_event_at),
        "closed at": _at(m.closed_at)
        + (f", sealed {_span(m.sealed_at - m.closed_at)} later" if m.sealed_at != m.closed_at else ""),
        "limits": "; ".join(limits),
        "events": f"{m.event_count}: {_ids(m.event_ids)}",
        "entries": f"{m.entries}, {m.bytes} bytes, weight {m.weight}",
        "duplicates": m.duplicates,
        "policy": f"version {m.flow_policy} of the flow's; events are of {', '.join(map(str, m.policy_versions))}",
    }
    for name, ids in (
        ("late", m.late_event_ids),
        ("revised", m.revised_event_ids),
        ("retracted", m.retracted_event_ids),
    ):
        if ids:
            facts[name] = _ids(ids)
    facts["digest"] = m.digest
    if m.anomaly is not None:
        facts["anomaly"] = m.anomaly
    _facts(facts)
    if m.timeline:
        _say()
        _table(
            ("at", "state", "attempt", "cause"),
            [(_at(step[0]), *step[1:]) for step in m.timeline],
            numbers=("attempt",),
        )
    if events:
        _say()
        _events_table(m.events)


def _closed_text(closed: Sequence[ClosedWindow]) -> str:
    return "".join(
        f"; window {w.window_version} closed at {_at(w.closed_at)}: {w.reason} ({w.window_id})" for w in closed
    )


@app.command()
def flush(
    key: Annotated[
        str | None, typer.Argument(metavar="[KEY]", help="One bucket.", parser=_key, show_default=False)
    ] = None,
    version: Annotated[
        int | None, typer.Option(min=1, help="Only if this window version is open.", show_default=False)
    ] = None,
    partial: Annotated[bool, typer.Option("--partial", help="The next window may continue this one.")] = False,
    tenant: TenantOption = None,
    flow: FlowOption = None,
    as_json: JsonOption = False,
) -> None:
    """Close the open window of a bucket, or of each bucket of a tenant or flow, with reason `flush`.

    Nothing open is no error. Exit code 1 where another version than the one named is open.
    """
    if (key is None) == (tenant is None and flow is None):
        raise typer.BadParameter("name either a bucket, or a --tenant, a --flow or both")
    if key is None and version is not None:
        raise typer.BadParameter("--version goes with one bucket")
    with _connected() as (client, _):
        if key is not None:
            done = [client.flush(key, version, partial=partial)]
        else:
            done = client.flush_where(tenant=tenant, flow=flow, partial=partial)
    for one in done:
        _json(_answer_json(one)) if as_json else _say(_flushed_text(one))
    if not done and not as_json:
        _say("no such bucket is open")
    if any(one.outcome == "other_version" for one in done):
        raise typer.Exit(FAILED)


def _flushed_text(flushed: Flushed) -> str:
    said = {
        "flushed": "flushed",
        "nothing_open": "nothing is open",
        "other_version": f"not flushed: window {flushed.open_version} is open",
    }
    return f"{_plain(flushed.bucket_key)}: {said[flushed.outcome]}{_closed_text(flushed.closed_windows)}"


def _answer_json(answer: Any) -> dict[str, Any]:
    return {**answer._asdict(), "closed_windows": [window._asdict() for window in answer.closed_windows]}


@app.command()
def hold(
    key: KeyArgument,
    duration: Annotated[str, typer.Argument(metavar="FOR", help="How long from now: 20s, 5m.")],
    as_json: JsonOption = False,
) -> None:
    """Keep the open window of a bucket open without an event: it lifts the inactivity limit only.

    Exit code 1 where no window is open.
    """
    with _connected() as (client, _):
        held = client.hold(key, duration)
    if as_json:
        _json(_answer_json(held))
    elif held.window_version is None or held.due_at is None:
        _say(f"{_plain(key)}: no window is open{_closed_text(held.closed_windows)}")
    else:
        _say(f"{_plain(key)}: window {held.window_version} now closes at {_at(held.due_at)}")
    if held.window_version is None:
        raise typer.Exit(FAILED)


@app.command()
def retract(
    key: KeyArgument,
    event_id: Annotated[str, typer.Argument(metavar="EVENT_ID", parser=_event_id)],
    as_json: JsonOption = False,
) -> None:
    """Take an event out of the open window of its bucket: its payload is never handed over.

    Exit code 1 where it is in no open window.
    """
    with _connected() as (client, _):
        answer = client.retract(key, event_id)
    said = {
        "retracted": f"retracted from window {answer.window_version}",
        "already": "was retracted before",
        "closed": f"not retracted: it is in window {answer.window_version}, which is closed",
        "queued": "not retracted: it only waits for reconciliation",
        "unknown": "not retracted: no such event is known in this bucket",
    }
    if as_json:
        _json(_answer_json(answer))
    else:
        _say(f"{_plain(event_id)}: {said[answer.outcome]}{_closed_text(answer.closed_windows)}")
    if answer.outcome not in ("retracted", "already"):
        raise typer.Exit(FAILED)


# --- the namespace ----------------------------------------------------------------------------------------------------


@reconcile_app.command("list")
def reconcile_list(
    tenant: TenantOption = None,
    flow: FlowOption = None,
    as_json: JsonOption = False,
) -> None:
    """List what waits for somebody to decide, in the order it was queued."""
    with _connected() as (client, _):
        waiting = [item for item in client.reconciliation() if _matches(item.event.bucket_key, tenant, flow)]
    if as_json:
        for item in waiting:
            _json(
                {
                    "item_id": item.item_id,
                    "queued_at": item.queued_at,
                    "code": item.code,
                    "bucket_key": item.event.bucket_key,
                    "event_id": item.event.event_id,
                    "kind": item.event.kind,
                    "occurred_at": item.event.occurred_ms,
                    "digest": item.digest,
                    "known": item.known,
                }
            )
    elif not waiting:
        _say("nothing waits for reconciliation")
    else:
        _table(
            ("queued at", "code", "bucket", "event", "kind", "item"),
            [
                (_at(i.queued_at), i.code, i.event.bucket_key, i.event.event_id, i.event.kind, i.item_id)
                for i in waiting
            ],
        )


@app.command()
def counters(as_json: JsonOption = False) -> None:
    """Show the namespace's counters."""
    with _connected() as (client, _):
        counted = client.counters()
    if as_json:
        _json(counted)
    elif not counted:
        _say("nothing was counted yet")
    else:
        _table(("counter", "value"), counted.items(), numbers=("value",))


@app.command("redis-cli")
def redis_cli(
    key: Annotated[
        str | None,
        typer.Argument(metavar="[KEY]", help="Look at this bucket.", parser=_key, show_default=False),
    ] = None,
) -> None:
    """Print the redis-cli line for the server, or one that looks at a bucket. No password is shown."""
    settings = Settings()
    command = cli_line(settings)
    if key is not None:
        with _connected() as (client, _):
            client.store.perform(client.operations.connect())  # how many partitions there are
            command += ["HGETALL", keys.bucket(client.operations.prefix_of(key), key)]
    _say(shlex.join(command))
    if urlsplit(settings.url).password:
        _tell("put the password into the variable REDISCLI_AUTH first: redis-cli reads it from there")


def cli_line(settings: Settings) -> list[str]:
    """The redis-cli command for the server, as arguments, without its password."""
    parts = urlsplit(settings.url)
    query = parse_qs(parts.query)
    if parts.scheme == "unix":
        command = ["redis-cli", "-s", unquote(parts.path)]
    else:
        command = ["redis-cli", "-h", parts.hostname or "127.0.0.1", "-p", str(parts.port or 6379)]
    if parts.scheme == "rediss":
        command.append("--tls")
    if parts.username:
        command += ["--user", unquote(parts.username)]
    database = query.get("db", ["" if parts.scheme == "unix" else parts.path.strip("/")])[0]
    return [*command, "-n", database] if database not in ("", "0") else command


# --- programs that stay -----------------------------------------------------------------------------------------------


@app.command()
def worker(
    role: Annotated[
        list[str] | None,
        typer.Option(
            "--role",
            metavar="ROLE[,ROLE…]",
            help="closer, dispatcher (to RQ) or runner (of the sink direct); without it all of them.",
            show_default=False,
        ),
    ] = None,
    with_rq: Annotated[int, typer.Option("--with-rq", min=0, max=100, help="Run so many RQ worker processes too.")] = 0,
    threads: Annotated[int, typer.Option(min=1, max=1000, help="How many handlers the runner runs at a time.")] = 4,
    config: ConfigOption = None,
) -> None:
    """Run a worker until SIGTERM or Ctrl-C: it closes what is due, and hands manifests over.

    Any number may run side by side. It installs the policies of the configuration that the server does not know yet,
    and imports the handlers that it names.
    """
    # RQ takes as long to import as everything else here.
    from accumulator import logs
    from accumulator.worker import ROLES, Worker

    settings = Settings()
    roles = [name.strip() for names in role or [",".join(ROLES)] for name in names.split(",")]
    found = find_config(settings, config)
    logs.configure(settings.log_level, settings.log_plain_keys)
    raise typer.Exit(Worker(settings, found, roles=roles, threads=threads, rq_workers=with_rq).run())


@app.command()
def demo(
    stay: Annotated[bool, typer.Option("--stay", help="Go on until Ctrl-C.")] = False,
    data_dir: Annotated[Path, typer.Option(metavar="DIR", help="Where the embedded server keeps its data.")] = Path(
        "var"
    ),
    config: ConfigOption = None,
) -> None:
    """Run a server, workers and some sample orders, and tell what happens: windows open, redeliveries are dropped,
    windows close for a reason, handlers receive manifests.

    With ACCUMULATOR_REDIS_URL set it uses that server. Without --stay it ends by itself: exit code 0 when every sample
    manifest was handled, 1 otherwise. The next run finds the data again.
    """
    from accumulator import demo as demonstration

    settings = Settings()
    found = find_config(settings, config) or Config.load(demonstration.shipped_config())
    if not demonstration.run(settings, found, data_dir, stay, lambda s, *rest: shlex.join([*cli_line(s), *rest])):
        raise typer.Exit(FAILED)
