"""The commands about reminder ladders: which run, what was sent when, starting and moving them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Annotated, Any

import typer

from accumulator.client import Accumulator
from accumulator.emission import STATES, Coming, Happened, LadderRun
from accumulator.envelope import check_bucket_key
from accumulator.errors import InvalidInput
from accumulator.ladder_operations import LadderMoved, Which
from accumulator.terminal import (
    FAILED,
    ConfigOption,
    FlowOption,
    JsonOption,
    KeyArgument,
    TenantOption,
    complain,
    configured,
    connected,
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
    tell,
    tell_unknown_flow,
)

app = typer.Typer()
ladder_app = typer.Typer(no_args_is_help=True, help="Reminder ladders: show, start, move, cancel.")
app.add_typer(ladder_app, name="ladder")

WhichArgument = Annotated[
    str, typer.Argument(metavar="KEY|ID", help="A bucket key, or a ladder's id.", show_default=False)
]
NameOption = Annotated[
    str | None, typer.Option("--ladder", help="Its name, where the bucket has several.", show_default=False)
]
StartOption = Annotated[
    str | None, typer.Option("--start-id", help='Its start id; "" is the one without.', show_default=False)
]
LimitOption = Annotated[int, typer.Option(min=1, help="At most so many.")]


@app.command()
def ladders(
    state: Annotated[
        str | None, typer.Option(help=f"Only those in this state: {', '.join(STATES)}.", show_default=False)
    ] = None,
    tenant: TenantOption = None,
    flow: FlowOption = None,
    limit: LimitOption = 1000,
    as_json: JsonOption = False,
) -> None:
    """List the ladders that were started, the longest in their state first, with what comes next and when.

    `--state escalated` lists all that brought nothing.
    """
    with connected() as (client, _):
        now = client.store.perform(client.operations.now())
        found = [run for run in client.ladders(state) if matches(run.bucket_key, tenant, flow)]
        tell_unknown_flow(client, flow, len(found))
    if as_json:
        for run in found[:limit]:
            say_json(_object(run))
    elif found:
        say_table(
            ("state", "since", "ladder", "bucket", "start id", "id", "next"),
            [
                (
                    run.state,
                    instant(run.since),
                    run.ladder,
                    run.bucket_key,
                    run.start_id or "",
                    run.ladder_id,
                    _next(run.next, now),
                )
                for run in found[:limit]
            ],
        )
    else:
        say("no ladder was started" if state is None else f"no ladder is {state}")
    if len(found) > limit:
        tell(f"and {len(found) - limit} more: --limit shows them")


def _next(coming: Coming | None, now: int) -> str:
    if coming is None:
        return ""
    when = f"in {rough(coming.at - now)}" if coming.at > now else f"{rough(now - coming.at)} ago"
    return f"{coming.step} {instant(coming.at)} ({when})"


def _object(run: LadderRun) -> dict[str, Any]:
    return asdict(run) | {
        "coming": [each._asdict() for each in run.coming],
        "timeline": [each._asdict() for each in run.timeline],
        "next": None if run.next is None else run.next._asdict(),
    }


@ladder_app.command("show")
def show(
    which: WhichArgument, ladder: NameOption = None, start_id: StartOption = None, as_json: JsonOption = False
) -> None:
    """Show a ladder, or all of a bucket: what was sent when, what comes next and when, what was left out, why it
    ended."""
    key = _key(which, ladder, start_id)
    with connected() as (client, _):
        ids = [which] if key is None else [run.ladder_id for run in _of_bucket(client, key, ladder, start_id)]
        found = [run for ladder_id in ids if (run := client.ladder(ladder_id)) is not None]
        left_out = [client.store.perform(client.operations.left_out(run)) for run in found]
        now = client.store.perform(client.operations.now())
    for number, (run, left) in enumerate(zip(found, left_out, strict=True)):
        if as_json:
            say_json(_object(run) | {"left_out": left})
            continue
        if number:
            say()
        _tell(run, left, now)
    if not found:
        complain("there is no ladder of that id, or in that bucket")
        raise typer.Exit(FAILED)


def _tell(run: LadderRun, left_out: Mapping[str, str], now: int) -> None:
    facts: dict[str, object] = {
        "ladder": f"{run.ladder} ({run.ladder_id}), version {run.version}",
        "bucket": run.bucket_key,
        "state": f"{run.state} since {instant(run.since)}",
        "anchor": instant(run.anchor_at),
        "arguments": json.dumps(run.args, ensure_ascii=False),
    }
    if run.start_id is not None:
        facts["start id"] = run.start_id
    if run.state == "cancelled":
        facts["because"] = run.cause if run.by_event is None else f"of the event {run.by_event}"
    if run.next is not None:
        facts["next"] = _next(run.next, now) if run.state == "running" else f"{run.next.step}, when it is resumed"
    say_facts(facts)
    say()
    rows: list[tuple[object, ...]] = [
        (instant(each.at), each.event, each.step or "", _detail(each), each.state or "", each.emission_id or "")
        for each in run.timeline
    ]
    if run.state == "running":
        rows += [(instant(each.at), "to come", each.step, "", "", "") for each in run.coming]
    rows += [("", "left out", step, why, "", "") for step, why in left_out.items()]
    say_table(("at", "event", "step", "", "handled", "id"), rows)


def _detail(happened: Happened) -> str:
    if happened.event == "rescheduled":
        return f"to {instant(int(happened.detail))}"
    return "" if happened.detail == happened.step else happened.detail


@ladder_app.command("load")
def load(
    names: Annotated[
        list[str] | None, typer.Argument(metavar="[NAME…]", help="Only these ladders of the file.", show_default=False)
    ] = None,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Make the ladders of the configuration file the latest: they rule the ladders started from now on.

    Equal content is no new version.
    """
    with configured(config) as (client, found):
        load_named(names, found.ladders, "ladder", client.load_ladder, as_json)


@ladder_app.command("start")
def start(
    name: Annotated[str, typer.Argument(metavar="NAME", help="The ladder, as the configuration names it.")],
    key: KeyArgument,
    anchor: Annotated[
        str | None,
        typer.Option(metavar="INSTANT", help="What it is counted from: 2026-10-20T12:00:00Z.", show_default=False),
    ] = None,
    arg: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=VALUE", help="An argument; the value is JSON, or else text.", show_default=False),
    ] = None,
    start_id: Annotated[
        str | None, typer.Option(help="Names this start: the same one again starts nothing.", show_default=False)
    ] = None,
    ignore_earlier: Annotated[
        bool, typer.Option("--ignore-earlier", help="An awaited event that came before does not count.")
    ] = False,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Start a ladder in a bucket, once. Where one of that name runs there, it says so."""
    args = dict(_argument(text) for text in arg or ())
    with connected(config) as (client, found):
        if found is not None and name in found.ladders:
            client.load_ladder(name, found.ladders[name], only_new=True)
        started = client.start_ladder(name, key, anchor, args, start_id=start_id, ignore_earlier=ignore_earlier)
    if as_json:
        say_json(started._asdict())
        return
    said = "started" if started.outcome == "started" else "was started before"
    differs = ", with another anchor or other arguments" if started.differs else ""
    say(f"{plain(key)}: {plain(name)} {said}{differs}; it is {started.state} ({started.ladder_id})")


def _argument(text: str) -> tuple[str, Any]:
    name, sign, value = text.partition("=")
    if not sign or not name:
        raise typer.BadParameter("an argument is NAME=VALUE", param_hint="--arg")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value


def _key(which: str, ladder: str | None, start_id: str | None) -> str | None:
    """The bucket key, where that is what was given; None for an id."""
    if ":" in which:
        return check_bucket_key(which)
    if ladder is not None or start_id is not None:
        raise typer.BadParameter("--ladder and --start-id go with a bucket key")
    return None


def _of_bucket(client: Accumulator, key: str, ladder: str | None, start_id: str | None) -> list[LadderRun]:
    return [
        run
        for run in client.ladders(bucket_key=key)
        if ladder in (None, run.ladder) and start_id in (None, run.start_id or "")
    ]


def _which(client: Accumulator, key: str, ladder: str | None, start_id: str | None) -> Which:
    """The one of a bucket that is meant."""
    there = _of_bucket(client, key, ladder, start_id)
    found = [run for run in there if not run.ended] or there[-1:]
    if len(found) > 1:
        several = id_list(
            [f"{run.ladder} {'without one' if run.start_id is None else run.start_id}" for run in found], 8
        )
        raise InvalidInput(
            "",
            f"several run there, by name and start id: {several}. Say which with --ladder and --start-id "
            '(--start-id "" is the one without), or give its id',
        )
    return found[0].ladder_id if found else (key, ladder or "", start_id or "")


def _move(
    which: str,
    ladder: str | None,
    start_id: str | None,
    as_json: bool,
    done: str,
    move: Callable[[Accumulator, Which], LadderMoved],
) -> None:
    """Moves the ladder that is meant, and says what became of it."""
    key = _key(which, ladder, start_id)
    with connected() as (client, _):
        moved = move(client, which if key is None else _which(client, key, ladder, start_id))
    if as_json:
        say_json(moved._asdict())
    elif moved.outcome == "done":
        say(f"{plain(which)}: {done}" + (f"; it is {moved.state}" if moved.state != done else ""))
    elif moved.outcome == "same":
        say(f"{plain(which)}: was so before; it is {moved.state}")
    elif moved.outcome == "missing":
        say(f"{plain(which)}: there is no such ladder")
    else:
        say(f"{plain(which)}: not {done}: it is {moved.state}")
    if moved.outcome in ("missing", "wrong_state"):
        raise typer.Exit(FAILED)


@ladder_app.command("cancel")
def cancel(
    which: WhichArgument,
    reason: Annotated[str, typer.Option(help="Why; it stays in the record.", show_default=False)],
    ladder: NameOption = None,
    start_id: StartOption = None,
    as_json: JsonOption = False,
) -> None:
    """Cancel a ladder: nothing of it that has not begun is executed. Exit code 1 where it has ended or is not there."""
    _move(which, ladder, start_id, as_json, "cancelled", lambda client, one: client.cancel_ladder(one, reason))


@ladder_app.command("reschedule")
def reschedule(
    which: WhichArgument,
    anchor: Annotated[str, typer.Option(metavar="INSTANT", help="The new anchor.", show_default=False)],
    ladder: NameOption = None,
    start_id: StartOption = None,
    as_json: JsonOption = False,
) -> None:
    """Move the steps still to come to another anchor. Exit code 1 where it has ended or is not there."""
    _move(which, ladder, start_id, as_json, "rescheduled", lambda client, one: client.reschedule_ladder(one, anchor))


@ladder_app.command("pause")
def pause(
    which: WhichArgument, ladder: NameOption = None, start_id: StartOption = None, as_json: JsonOption = False
) -> None:
    """Hold a ladder until it is resumed. Exit code 1 where it has ended or is not there."""
    _move(which, ladder, start_id, as_json, "paused", lambda client, one: client.pause_ladder(one))


@ladder_app.command("resume")
def resume(
    which: WhichArgument, ladder: NameOption = None, start_id: StartOption = None, as_json: JsonOption = False
) -> None:
    """Let a paused ladder go on. Exit code 1 where it has ended or is not there."""
    _move(which, ladder, start_id, as_json, "resumed", lambda client, one: client.resume_ladder(one))
