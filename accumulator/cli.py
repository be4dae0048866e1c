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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, fields
from pathlib import Path
from typing import Annotated, Any, BinaryIO, Final, cast

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn
from rich.text import Text
from typer.core import TyperGroup

import accumulator
from accumulator import cli_ladder, cli_operate, keys, simulate
from accumulator.address import Address
from accumulator.client import Accumulator
from accumulator.connections import find_primary
from accumulator.errors import (
    AccumulatorError,
    InternalError,
    InvalidInput,
    InvalidLadder,
    InvalidPolicy,
    InvalidSettings,
    ServerError,
)
from accumulator.export import event_object, manifest_object
from accumulator.feed import BadLine, Fed, Source, feed
from accumulator.ladders import Ladder
from accumulator.manifest import StoredEvent
from accumulator.policy import Policy, format_duration, parse_duration
from accumulator.settings import Config, Settings, find_config, load_yaml
from accumulator.terminal import (
    FAILED,
    INTERRUPTED,
    SERVER,
    WRONG,
    ConfigOption,
    FlowOption,
    JsonOption,
    KeyArgument,
    TenantOption,
    complain,
    configured,
    connected,
    count_of,
    due_text,
    id_list,
    instant,
    load_named,
    matches,
    plain,
    rough,
    say,
    say_facts,
    say_json,
    say_table,
    span,
    tell,
    typed_event_id,
    typed_key,
)
from accumulator.windows import Bucket, ClosedWindow, Flushed

_COUNTS: Final = frozenset({"max_events", "max_bytes", "max_weight", "max_event_bytes", "busy_streak_alert"})

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
            complain(problem)
            raise typer.Exit(SERVER) from None
        except AccumulatorError as problem:
            complain(problem)
            raise typer.Exit(WRONG) from None
        except OSError as problem:
            if problem.errno == errno.EPIPE or problem.strerror is None:
                raise
            name = f"{problem.filename}: " if problem.filename is not None else ""
            complain(f"{name}{problem.strerror}")
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
app.add_typer(policy_app, name="policy")
app.add_typer(cli_operate.app)
app.add_typer(cli_ladder.app)


def main() -> None:
    """The program `accumulator`."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
    try:
        app(prog_name="accumulator")
    except UnicodeEncodeError:
        complain("what was given is not valid UTF-8")
        sys.exit(WRONG)
    except Exception as problem:
        # No text of it: nobody knows what it repeats.
        where = traceback.extract_tb(problem.__traceback__)[-1]
        complain(
            f"a fault of ours, please report it: {type(problem).__name__} at {Path(where.filename).name}:{where.lineno}"
        )
        sys.exit(SERVER)


def _version(wanted: bool) -> None:
    if wanted:
        say(f"accumulator {accumulator.__version__}")
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
    with connected(config) as (client, found), _source(file) as source:
        if found is not None:
            _install(client, found)
        fed = Fed()
        try:
            with _progress(source) as (on_bad, on_batch):
                feed(client, source, fed, strict=strict, on_bad=on_bad, on_batch=on_batch)
        except KeyboardInterrupt:
            tell(f"interrupted, with answers for {fed.events:,} events; pushing the file again is safe")
            raise typer.Exit(INTERRUPTED) from None
    if as_json:
        say_json(_fed_json(file, fed))
    else:
        _fed_table(fed)
    if fed.stopped_at is not None:
        tell(f"stopped at line {fed.stopped_at}: nothing from there on was sent; before it {fed.events:,} events were")
    if fed.failure is not None:
        answered = fed.events - fed.outcomes["unknown"]
        tell(f"ended early, with answers for {answered:,} events; pushing the file again is safe")
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
        yield (lambda bad: tell(plain(bad))), (lambda fed: None)
        return
    console = Console(stderr=True, highlight=False)
    columns = (BarColumn(), TaskProgressColumn(), TextColumn("{task.fields[events]:,} events"), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("push", total=source.size, events=0)
        yield (
            lambda bad: console.print(Text(plain(bad))),
            lambda fed: progress.update(task, completed=source.position, events=fed.events),
        )


def _fed_json(file: str, fed: Fed) -> dict[str, Any]:
    summary = {field.name: getattr(fed, field.name) for field in fields(fed)}
    return {
        "file": file,
        **summary,
        "bad_lines": [bad._asdict() for bad in fed.bad_lines],
        "not_taken": [one._asdict() for one in fed.not_taken],
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
    say_table(("outcome", "events"), [(name, f"{n:,}") for name, n in rows], numbers=("events",))
    for one in fed.not_taken:
        say(plain(one))
    more = sum(fed.outcomes[outcome] for outcome in ("conflict", "rejected", "reconciled")) - len(fed.not_taken)
    if more:
        say(f"and {count_of(more, 'event')} more in no window")
    rate = f", {fed.events / fed.seconds:,.0f} a second" if fed.seconds > 0.01 and fed.events else ""
    say(f"{count_of(fed.events, 'event')} of {count_of(fed.lines, 'line')} in {fed.seconds:.1f} s{rate}")


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
                said = str(problem).removeprefix(f"{file.name}: ")  # the file itself may be the field
                tell(f"{plain(file.name)}: {plain(said)}")
                continue
            except Exception as problem:  # whatever one file does to us, the others are run
                failed += 1
                tell(f"{plain(file.name)}: can't be run: {type(problem).__name__}")
                continue
            differences = simulate.differences(answer, scenario.get("expect") or {})
            failed += bool(differences)
            if as_json:
                say_json({"file": file.name, **answer} if named else answer)
            else:
                _account(file.name, scenario, answer)
                if scenario.get("expect") is not None and not differences:
                    say("  as expected")
            for difference in differences:
                (tell if as_json else say)(f"{plain(file.name)}: {plain(difference)}")
    if named and not as_json:
        say(f"{count_of(len(files), 'scenario')}, {failed or 'none'} failed")
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
    say(plain(scenario.get("name", name)) + (f" - {plain(scenario['about'])}" if scenario.get("about") else ""))
    happened: list[tuple[int, int, str]] = []
    outcomes = iter(answer["outcomes"])
    for step in scenario.get("steps") or ():
        at = parse_duration(step["at"])
        happened += ((at, 0, line) for line in _step_account(step, outcomes))
    for m in answer["manifests"]:
        line = f"closed {m['bucket_key']} window {m['window_version']}: {m['close_reason']}"
        if m["sealed_at"] != m["closed_at"]:
            line += f", sealed {span(m['sealed_at'] - m['closed_at'])} later"
        if m["relation"] not in ("first", "after_close"):
            line += f", {m['relation']}"
        happened.append((m["closed_at"], 1, f"{line}; {id_list(m['event_ids'])}"))
    for e in answer.get("ladder_events", ()):
        what = e["event"] if e["step"] is None else f"{e['event']} {e['step']}"
        happened.append((e["at"], 1, f"ladder {e['ladder']} of {e['bucket_key']}: {what}"))
    for at, _, line in sorted(happened, key=lambda each: each[:2]):
        say(f"  {span(at):>8}  {plain(line)}")
    for o in answer["open"]:
        window = f"{o['bucket_key']} window {o['window_version']}"
        say(f"      open  {plain(window)}, due at {span(o['due_at'])}; {plain(id_list(o['event_ids']))}")
    for r in answer["reconciliation"]:
        say(f"   waiting  {plain(r['bucket_key'])} {plain(r['event_id'])}: {r['code']}")
    say("  " + ", ".join(f"{what} {count}" for what, count in answer["counters"].items()))


def _step_account(step: Mapping[str, Any], outcomes: Iterator[Mapping[str, Any]]) -> Iterator[str]:
    for action in ("flush", "hold", "retract"):
        if action in step:
            rest = " ".join(f"{name} {value}" for name, value in step[action].items() if name != "bucket_key")
            yield f"{action} {step[action]['bucket_key']} {rest}"
    for action in simulate.LADDER_STEPS:
        if action in step:
            given = dict(step[action])
            rest = " ".join(f"{name} {value}" for name, value in given.items() if name not in ("ladder", "bucket_key"))
            yield f"{action} {given['ladder']} {given['bucket_key']} {rest}"
    if "ladder" in step:
        yield f"ladder {', '.join(step['ladder'])} loaded"
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
            tell(f"policy {plain(flow)}: installed as version {loaded.version}")
        elif loaded.differs:
            tell(
                f"warning: policy {plain(flow)}: version {loaded.version} rules, and the configuration differs: "
                "`accumulator policy load` would make it the next version"
            )
    for name, ladder in config.ladders.items():
        made = client.load_ladder(name, ladder, only_new=True)
        if made.outcome == "new":
            tell(f"ladder {plain(name)}: installed as version {made.version}")
        elif made.differs:
            tell(
                f"warning: ladder {plain(name)}: version {made.version} rules, and the configuration differs: "
                "`accumulator ladder load` would make it the next version"
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
    ladders = values.get("ladders") if isinstance(values, dict) else None
    wrong += [p for name, options in _pairs(ladders) if (p := _ladder_problem(name, options)) is not None]
    if wrong:
        raise _check_failed(wrong, as_json)
    try:
        config = Config.load(file)
    except InvalidInput as problem:
        raise _check_failed([problem], as_json) from None
    for flow, policy in config.policies.items():
        if as_json:
            say_json({"flow": flow, "ok": True, "policy": json.loads(policy.canonical_json())})
        else:
            say(f"policy {plain(flow)}: good ({_options_text(policy)})")
    for name, ladder in config.ladders.items():
        if as_json:
            say_json({"ladder": name, "ok": True, "steps": [step.name for step in ladder.steps]})
        else:
            say(f"ladder {plain(name)}: good ({', '.join(step.name for step in ladder.steps)})")


def _pairs(value: object) -> Iterable[tuple[Any, Any]]:
    return value.items() if isinstance(value, dict) else ()


def _policy_problem(flow: str, options: object) -> InvalidInput | None:
    try:
        Policy.load(flow, options)
    except InvalidPolicy as problem:
        return problem
    return None


def _ladder_problem(name: str, options: object) -> InvalidInput | None:
    try:
        Ladder.load(name, options)
    except InvalidLadder as problem:
        return problem
    return None


def _check_failed(wrong: Sequence[InvalidInput], as_json: bool) -> typer.Exit:
    for problem in wrong:
        if as_json:
            of = "ladder" if isinstance(problem, InvalidLadder) else "flow"
            name = problem.flow if isinstance(problem, InvalidPolicy) else None
            say_json({of: name, "ok": False, "option": problem.field, "reason": problem.rule})
        else:
            complain(problem)
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
    with configured(config) as (client, found):
        load_named(flows, found.policies, "flow", client.load_policy, as_json)


@policy_app.command("show")
def policy_show(
    flows: Annotated[
        list[str] | None, typer.Argument(metavar="[FLOW…]", help="Only these flows.", show_default=False)
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Show the policies that rule on the server, each flow's latest: the options that are not the default."""
    with connected() as (client, _):
        there = client.policies()
    missing = [flow for flow in flows or () if flow not in there]
    shown = {flow: there[flow] for flow in flows or there if flow in there}
    if as_json:
        for flow, (version, policy) in shown.items():
            say_json({"flow": flow, "version": version, "policy": json.loads(policy.canonical_json())})
    elif shown:
        say_table(
            ("flow", "version", "options"),
            [(flow, version, _options_text(policy)) for flow, (version, policy) in shown.items()],
            numbers=("version",),
        )
    elif not flows:
        say("no policy is loaded; `accumulator policy load` does that")
    for flow in missing:
        complain(f"flow {flow}: there is no policy for it")
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
    with connected() as (client, _):
        there = [key for key, _ in client.open_buckets() if matches(key, tenant, flow)]
        found = [bucket for key in there[:limit] if (bucket := client.bucket(key)).open is not None]
    rows = []
    for bucket in found:
        window = bucket.open
        assert window is not None
        if as_json:
            say_json(_bucket_json(bucket))
        else:
            age, due = rough(bucket.now - window.opened_at), due_text(window.due_at, window.due_reason, bucket.now)
            rows.append((bucket.bucket_key, window.window_version, age, window.event_count, due))
    if rows:
        say_table(("bucket", "window", "age", "events", "closes at"), rows, numbers=("window", "age", "events"))
    elif not as_json:
        say("no bucket is open")
    if len(there) > limit:
        tell(f"and {len(there) - limit} more: --limit shows them")


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
    with connected() as (client, _):
        bucket = client.bucket(key)
        held = client.open_events(key) if events and bucket.open is not None else ()
    window = bucket.open
    if as_json:
        say_json(_bucket_json(bucket) | ({"events": [event_object(e) for e in held]} if events else {}))
        return
    facts: dict[str, object] = {"bucket": key}
    if window is None:
        facts["open"] = "no window"
    else:
        facts |= {
            "open": f"window {window.window_version} ({window.window_id}), {window.relation}",
            "opened at": instant(window.opened_at),
            "last event": instant(window.last_event_at),
            "closes at": due_text(window.due_at, window.due_reason, bucket.now),
            "events": window.event_count,
            "entries": window.entries,
            "duplicates": window.duplicates,
            "bytes": window.bytes,
            "weight": window.weight,
            "policy": f"version {window.flow_policy} of the flow's; events are of {window.policy_version}",
        }
    if bucket.last_closed_window_id is not None:
        facts["last closed"] = bucket.last_closed_window_id
    say_facts(facts)
    if held:
        say()
        _events_table(held)


def _events_table(events: Sequence[StoredEvent]) -> None:
    """Ids, kinds and instants; payloads are in the JSON."""
    say_table(
        ("#", "event", "kind", "source", "version", "occurred", "received", ""),
        [
            (
                stored.position,
                stored.event.event_id,
                stored.event.kind,
                stored.event.source,
                "" if stored.event.source_version is None else stored.event.source_version,
                instant(stored.event.occurred_ms),
                instant(stored.received_at),
                " ".join(flag for flag in ("late", "revised", "reconciled") if getattr(stored, flag)),
            )
            for stored in events
        ],
        numbers=("#", "version"),
    )


@app.command()
def manifests(key: KeyArgument, as_json: JsonOption = False) -> None:
    """List the manifests of a bucket, by version."""
    with connected() as (client, _):
        found = client.manifests(key)
    if as_json:
        for manifest in found:
            say_json(manifest_object(manifest))
    elif not found:
        say("no window of this bucket has closed")
    else:
        say_table(
            ("window", "id", "reason", "closed at", "events", "relation", "state"),
            [
                (
                    m.window_version,
                    m.window_id,
                    m.close_reason,
                    instant(m.closed_at),
                    m.event_count,
                    m.relation,
                    m.state,
                )
                for m in found
            ],
            numbers=("window", "events"),
        )


@app.command("manifest")
def manifest_(
    window_id: Annotated[str, typer.Argument(metavar="WINDOW_ID", help="As `manifests` lists it.")],
    events: Annotated[bool, typer.Option("--events", help="Its events too.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Show one manifest: why it closed, what is in it, and its timeline."""
    with connected() as (client, _):
        m = client.manifest(window_id)
    if m is None:
        complain("there is no manifest of that id")
        raise typer.Exit(FAILED)
    if as_json:
        say_json(manifest_object(m, events))
        return
    limits = [f"{name} {instant(at)}" for name, at in sorted(m.limits.items(), key=lambda limit: limit[1])]
    facts: dict[str, object] = {
        "bucket": m.bucket_key,
        "window": f"{m.window_version} ({m.window_id}), {m.relation}"
        + (f" of {m.previous_window_id}" if m.previous_window_id else ""),
        "state": m.state + (f", attempt {m.attempt}" if m.attempt else ""),
        "reason": m.close_reason,
        "opened at": instant(m.opened_at),
        "last event": instant(m.last_event_at),
        "closed at": instant(m.closed_at)
        + (f", sealed {span(m.sealed_at - m.closed_at)} later" if m.sealed_at != m.closed_at else ""),
        "limits": "; ".join(limits),
        "events": f"{m.event_count}: {id_list(m.event_ids)}",
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
            facts[name] = id_list(ids)
    facts["digest"] = m.digest
    if m.anomaly is not None:
        facts["anomaly"] = m.anomaly
    say_facts(facts)
    if m.timeline:
        say()
        say_table(
            ("at", "state", "attempt", "cause"),
            [(instant(step[0]), *step[1:]) for step in m.timeline],
            numbers=("attempt",),
        )
    if events:
        say()
        _events_table(m.events)


def _closed_text(closed: Sequence[ClosedWindow]) -> str:
    return "".join(
        f"; window {w.window_version} closed at {instant(w.closed_at)}: {w.reason} ({w.window_id})" for w in closed
    )


@app.command()
def flush(
    key: Annotated[
        str | None, typer.Argument(metavar="[KEY]", help="One bucket.", parser=typed_key, show_default=False)
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
    with connected() as (client, _):
        if key is not None:
            done = [client.flush(key, version, partial=partial)]
        else:
            done = client.flush_where(tenant=tenant, flow=flow, partial=partial)
    for one in done:
        say_json(_answer_json(one)) if as_json else say(_flushed_text(one))
    if not done and not as_json:
        say("no such bucket is open")
    if any(one.outcome == "other_version" for one in done):
        raise typer.Exit(FAILED)


def _flushed_text(flushed: Flushed) -> str:
    said = {
        "flushed": "flushed",
        "nothing_open": "nothing is open",
        "other_version": f"not flushed: window {flushed.open_version} is open",
    }
    return f"{plain(flushed.bucket_key)}: {said[flushed.outcome]}{_closed_text(flushed.closed_windows)}"


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
    with connected() as (client, _):
        held = client.hold(key, duration)
    if as_json:
        say_json(_answer_json(held))
    elif held.window_version is None or held.due_at is None:
        say(f"{plain(key)}: no window is open{_closed_text(held.closed_windows)}")
    else:
        say(f"{plain(key)}: window {held.window_version} now closes at {instant(held.due_at)}")
    if held.window_version is None:
        raise typer.Exit(FAILED)


@app.command()
def retract(
    key: KeyArgument,
    event_id: Annotated[str, typer.Argument(metavar="EVENT_ID", parser=typed_event_id)],
    as_json: JsonOption = False,
) -> None:
    """Take an event out of the open window of its bucket: its payload is never handed over.

    Exit code 1 where it is in no open window.
    """
    with connected() as (client, _):
        answer = client.retract(key, event_id)
    said = {
        "retracted": f"retracted from window {answer.window_version}",
        "already": "was retracted before",
        "closed": f"not retracted: it is in window {answer.window_version}, which is closed",
        "queued": "not retracted: it only waits for reconciliation",
        "unknown": "not retracted: no such event is known in this bucket",
    }
    if as_json:
        say_json(_answer_json(answer))
    else:
        say(f"{plain(event_id)}: {said[answer.outcome]}{_closed_text(answer.closed_windows)}")
    if answer.outcome not in ("retracted", "already"):
        raise typer.Exit(FAILED)


# --- the namespace ----------------------------------------------------------------------------------------------------


@app.command()
def counters(as_json: JsonOption = False) -> None:
    """Show the namespace's counters."""
    with connected() as (client, _):
        counted = client.counters()
    if as_json:
        say_json(counted)
    elif not counted:
        say("nothing was counted yet")
    else:
        say_table(("counter", "value"), counted.items(), numbers=("value",))


@app.command("redis-cli")
def redis_cli(
    key: Annotated[
        str | None,
        typer.Argument(metavar="[KEY]", help="Look at this bucket.", parser=typed_key, show_default=False),
    ] = None,
) -> None:
    """Print the redis-cli line for the server, or one that looks at a bucket. No password is shown."""
    settings = Settings()
    command = cli_line(settings)
    if key is not None:
        with connected() as (client, _):
            client.store.perform(client.operations.connect())  # how many partitions there are
            command += ["HGETALL", keys.bucket(client.operations.prefix_of(key), key)]
    say(shlex.join(command))
    if Address.of(settings.url).has_password:
        tell("put the password into the variable REDISCLI_AUTH first: redis-cli reads it from there")


def cli_line(settings: Settings) -> list[str]:
    """The redis-cli command for the server, as arguments, without its password; behind Sentinels for the primary that
    they name, and raises where they don't."""
    address = Address.of(settings.url)
    command = ["redis-cli"]
    if address.socket:
        command += ["-s", address.socket]
    else:
        host, port = address.hosts[0]
        if address.kind == "sentinel":
            host, port = find_primary(settings.url, **settings.timeouts)
        command += ["-h", host, "-p", str(port)]
    if address.kind == "cluster":
        command.append("-c")
    if address.tls:
        command.append("--tls")
    if address.user:
        command += ["--user", address.user]
    return [*command, "-n", address.database] if address.database not in ("", "0") else command


# --- programs that stay -----------------------------------------------------------------------------------------------


@app.command()
def worker(
    role: Annotated[
        list[str] | None,
        typer.Option(
            "--role",
            metavar="ROLE[,ROLE…]",
            help="closer, dispatcher (to RQ), runner (of the sink direct), webhook, janitor: without it all of these. "
            "Or rq: RQ workers alone, as many as --with-rq says.",
            show_default=False,
        ),
    ] = None,
    with_rq: Annotated[int, typer.Option("--with-rq", min=0, max=100, help="Run so many RQ worker processes too.")] = 0,
    processes: Annotated[
        int, typer.Option(min=0, max=100, help="Run the runner's handlers in so many processes instead of here.")
    ] = 0,
    threads: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=1000,
            help="How many handlers the runner runs at a time, and requests the webhook role makes: 4; "
            "in each of --processes: 1.",
            show_default=False,
        ),
    ] = None,
    config: ConfigOption = None,
) -> None:
    """Run a worker until SIGTERM or Ctrl-C: it closes what is due, and hands manifests over.

    Any number may run side by side. It installs the policies of the configuration that the server does not know yet,
    and imports the handlers that it names.
    """
    # RQ takes as long to import as everything else here.
    from accumulator import logs
    from accumulator.worker import Worker

    settings = Settings()
    roles = [name.strip() for names in role for name in names.split(",")] if role else None
    found = find_config(settings, config)
    logs.configure(settings.log_level, settings.log_plain_keys)
    made = Worker(settings, found, roles=roles, threads=threads, processes=processes, rq_workers=with_rq)
    raise typer.Exit(made.run())


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
