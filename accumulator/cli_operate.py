"""The commands of those who run it: what waits for a person, decisions, the reconciliation queue, export, health.

No command prints a payload unless it is asked to.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from accumulator.attempts import Effect
from accumulator.client import Accumulator
from accumulator.decisions import (
    ATTENTION,
    CODES,
    RESOLUTIONS,
    UNSETTLED,
    Decided,
    ReconcileItem,
    Resolved,
    Waiting,
)
from accumulator.emission import Emission
from accumulator.envelope import parse_instant
from accumulator.errors import InvalidInput, InvalidSettings
from accumulator.export import (
    effect_object,
    emission_object,
    event_object,
    export,
    start_of_next,
    timeline_object,
    write_file,
    write_lines,
)
from accumulator.health import health_report
from accumulator.manifest import FIRST_STEPS, Manifest, StoredEvent
from accumulator.policy import parse_duration, shown
from accumulator.terminal import (
    FAILED,
    FlowOption,
    JsonOption,
    TenantOption,
    complain,
    connected,
    count_of,
    instant,
    matches,
    plain,
    rough,
    say,
    say_facts,
    say_json,
    say_table,
    span,
    tell,
    tell_unknown_flow,
)

app = typer.Typer()
reconcile_app = typer.Typer(no_args_is_help=True, help="Events that wait for a person to decide: list, show, resolve.")
app.add_typer(reconcile_app, name="reconcile")

WindowArgument = Annotated[
    str, typer.Argument(metavar="WINDOW_ID", help="As `attention` and `manifests` list it.", show_default=False)
]
WindowsArgument = Annotated[
    list[str], typer.Argument(metavar="WINDOW_ID", help="As `attention` lists them.", show_default=False)
]
AnyWindowsArgument = Annotated[
    list[str] | None, typer.Argument(metavar="WINDOW_ID", help="As `attention` lists them.", show_default=False)
]
StateOption = Annotated[
    str | None, typer.Option(help=f"Only those in this state: {', '.join(UNSETTLED)}.", show_default=False)
]
ByOption = Annotated[str, typer.Option(help="Who decides; it stays in the record.", show_default=False)]
ReasonOption = Annotated[str, typer.Option(help="Why; it stays in the record.", show_default=False)]


def _typed_code(value: str) -> str:
    if value not in CODES:
        raise typer.BadParameter(f"must be one of {', '.join(CODES)}")
    return value


CodeOption = Annotated[
    str | None,
    typer.Option(
        metavar="CODE",
        help=f"Only items queued for this: {', '.join(CODES)}.",
        parser=_typed_code,
        show_default=False,
    ),
]
DryRunOption = Annotated[bool, typer.Option("--dry-run", help="With filters: say how many match, and change nothing.")]
LimitOption = Annotated[int, typer.Option(min=1, help="At most so many.")]
AgeOption = Annotated[
    str | None, typer.Option(metavar="AGE", help="Only what has waited longer: 30m, 2d.", show_default=False)
]

ClosedOption = Annotated[
    str | None, typer.Option(metavar="AGE", help="Only what closed longer ago: 30m, 2d.", show_default=False)
]


# --- manifests --------------------------------------------------------------------------------------------------------


@app.command()
def attention(
    state: StateOption = None,
    tenant: TenantOption = None,
    flow: FlowOption = None,
    limit: LimitOption = 1000,
    as_json: JsonOption = False,
) -> None:
    """List the manifests that wait for a person, the longest first: since when, and why. With --state also those that
    wait for nobody, or are at work.

    `timeline` shows one, `approve`, `refuse`, `replay`, `confirm` and `discard` decide.
    """
    with connected() as (client, _):
        now = client.store.perform(client.operations.now())
        found = [each for each in client.attention(state) if matches(each.bucket_key, tenant, flow)]
        queued = client.store.perform(client.operations.queue_length())
        tell_unknown_flow(client, flow, len(found))
    for each in found[:limit] if as_json else ():
        say_json({**each._asdict(), "age": now - each.since})
    if not as_json and found:
        say_table(
            ("waiting", "state", "bucket", "window", "id", "attempts", "why"),
            [
                (
                    rough(max(0, now - each.since)),
                    each.state,
                    each.bucket_key,
                    each.window_version,
                    each.window_id,
                    each.attempt,
                    _why(each),
                )
                for each in found[:limit]
            ],
            numbers=("waiting", "window", "attempts"),
        )
    elif not as_json:
        say("no manifest waits for a person" if state in (None, *ATTENTION) else f"no manifest is {state}")
    if len(found) > limit:
        tell(f"and {len(found) - limit} more: --limit shows them")
    if queued and not as_json:
        tell(f"{count_of(queued, 'event')} in the queue besides: `accumulator reconcile list`")


def _why(waiting: Waiting) -> str:
    return waiting.error if waiting.error and waiting.state != "awaiting_approval" else waiting.cause


@app.command()
def timeline(
    window_id: WindowArgument,
    payload: Annotated[
        bool, typer.Option("--payload", help="What effects and stages returned, too; it may hold anything.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Show the life of a manifest: every transition with its instant and cause, its effects, its finished stages."""
    with connected() as (client, _):
        manifest = client.manifest(window_id)
        emission = client.emission(window_id) if manifest is None else None
        if manifest is None and emission is None:
            complain("there is no manifest of that id")
            raise typer.Exit(FAILED)
        effects = client.effects(window_id)
        names = client.store.perform(client.operations.stage_names(window_id))
        results = client.stages(window_id) if payload else {}
    done: dict[str, Any] = {"effects": [effect_object(effect, result=payload) for effect in effects], "stages": names}
    if payload:
        done["results"] = {name: json.loads(text) for name, text in results.items()}
    if emission is not None and as_json:
        say_json(emission_object(emission) | done)
        return
    if manifest is not None and as_json:
        say_json(
            {
                "window_id": window_id,
                "bucket_key": manifest.bucket_key,
                "window_version": manifest.window_version,
                "state": manifest.state,
                "attempt": manifest.attempt,
                "failures": manifest.failures,
                "opened_at": manifest.opened_at,
                "closed_at": manifest.closed_at,
                "close_reason": manifest.close_reason,
                "approved_by": manifest.approved_by,
                "error": manifest.error,
                "anomaly": manifest.anomaly,
                "joined": manifest.joined,
                "leader": manifest.leader,
                "timeline": timeline_object(manifest),
                "left_out": manifest.left_out,
                **done,
            }
        )
        return
    if manifest is not None:
        _tell_life(manifest)
    elif emission is not None:
        _tell_emission(emission)
    _tell_effects(effects, payload)
    if results:
        say()
        say_table(("stage", "result"), list(results.items()))
    elif names:
        say()
        say(f"stages finished: {', '.join(map(plain, names))}")


def _tell_emission(emission: Emission) -> None:
    facts: dict[str, object] = {
        "bucket": emission.bucket_key,
        "ladder": f"{emission.ladder} ({emission.ladder_id})",
        "emitted": f"{emission.event} {emission.step}".strip(),
        "state": emission.state,
        "due at": instant(emission.due_at),
    }
    say_facts(facts | ({_error_name(emission.state): emission.error} if emission.error else {}))
    say()
    rows: list[Sequence[object]] = [(instant(emission.emitted_at), "emitted", "", "")]
    rows += [(instant(at), state, attempt or "", cause) for at, state, attempt, cause in emission.timeline]
    if emission.left_out:
        rows.insert(1 + FIRST_STEPS, ("", "…", "", _left_out(emission.left_out)))
    say_table(("at", "state", "attempt", "cause"), rows, numbers=("attempt",))


def _tell_life(manifest: Manifest) -> None:
    facts: dict[str, object] = {
        "bucket": manifest.bucket_key,
        "window": f"{manifest.window_version} ({manifest.window_id})",
        "state": manifest.state,
    }
    more = {
        "failures": manifest.failures,
        _error_name(manifest.state): manifest.error,
        "approved by": manifest.approved_by,
        "anomaly": manifest.anomaly,
        "handed over": manifest.leader and f"with {manifest.leader}",
        "took along": ", ".join(manifest.joined),
    }
    say_facts(facts | {name: value for name, value in more.items() if value})
    say()
    steps = [
        (manifest.opened_at, "opened", "", manifest.relation),
        (manifest.closed_at, "closed", "", manifest.close_reason),
        *((at, state, attempt or "", cause) for at, state, attempt, cause in manifest.timeline),
    ]
    before = [steps[0][0], *(step[0] for step in steps)]
    rows: list[Sequence[object]] = [
        (instant(at), "" if i == 0 else span(at - before[i]), state, attempt, cause)
        for i, (at, state, attempt, cause) in enumerate(steps)
    ]
    if manifest.left_out:
        rows.insert(2 + FIRST_STEPS, ("", "", "…", "", _left_out(manifest.left_out)))
    say_table(("at", "after", "state", "attempt", "cause"), rows, numbers=("after", "attempt"))


def _error_name(state: str) -> str:
    """What the error of a manifest is called: one that was got over is no error of what is confirmed."""
    return "last error" if state == "confirmed" else "error"


def _left_out(number: int) -> str:
    return f"{count_of(number, 'more transition')}, not kept"


def _tell_effects(effects: Sequence[Effect], payload: bool) -> None:
    if not effects:
        return
    say()
    columns = ("effect", "state", "attempt", "at", *(("result",) if payload else ()))
    rows = [
        (effect.name, effect.state, effect.attempt, instant(effect.at), *((effect.result,) if payload else ()))
        for effect in effects
    ]
    say_table(columns, rows, numbers=("attempt",))


_DONE: Final = {
    "approve": "approved",
    "refuse": "refused",
    "replay": "handed out again",
    "discard": "discarded",
    "confirm": "confirmed",
}


def _decide(
    window_ids: Sequence[str], decision: str, by: str, reason: str, as_json: bool, effects: str | None = None
) -> None:
    failed = False
    with connected() as (client, _):
        for window_id in window_ids:
            try:
                told = client.store.perform(client.operations.decide(window_id, decision, by, reason, effects or ""))
            except InvalidInput as problem:
                if problem.field != "window_id":
                    raise
                told = Decided("missing", "")  # no id at all: those that follow are decided all the same
            failed = failed or told.outcome != "done"
            if as_json:
                say_json({"window_id": window_id, "decision": decision, **told._asdict()})
            elif told.outcome == "done":
                say(f"{window_id}: {_DONE[decision]}")
            elif told.outcome == "missing":
                say(f"{plain(window_id)}: there is no manifest of that id")
            else:
                say(f"{window_id}: not {_DONE[decision]}: it is {told.state}")
    if failed:
        raise typer.Exit(FAILED)


_LEFT: Final = {"discard": "an attempt is at work", "replay": "not dead, uncertain or reconciling"}


def _no_dry_run(dry_run: bool) -> None:
    if dry_run:
        raise typer.BadParameter("--dry-run goes with filters")


def _decide_where(
    window_ids: Sequence[str] | None,
    filters: tuple[str | None, str | None, str | None, str | None],
    decision: str,
    by: str,
    reason: str,
    as_json: bool,
    dry_run: bool,
    effects: str | None = None,
) -> None:
    state, tenant, flow, older_than = filters
    if bool(window_ids) == any(value is not None for value in filters):
        raise typer.BadParameter("name either manifests, or a --state, a --tenant, a --flow, an --older-than")
    if window_ids:
        _no_dry_run(dry_run)
        _decide(window_ids, decision, by, reason, as_json, effects)
        return
    with connected() as (client, _):
        counts = client.decide_where(
            decision,
            by=by,
            reason=reason,
            state=state,
            tenant=tenant,
            flow=flow,
            older_than=older_than,
            effects=effects,
            dry_run=dry_run,
        )
        tell_unknown_flow(client, flow, sum(counts.values()))
    if as_json:
        say_json(counts)
        return
    if dry_run:
        say(f"{count_of(counts['done'], 'manifest')} would be {_DONE[decision]}")
        if left := counts["wrong_state"]:
            say(f"{count_of(left, 'manifest')} would be left: {_LEFT[decision]}")
        return
    say(f"{count_of(counts['done'], 'manifest')} {_DONE[decision]}")
    if left := sum(counts.values()) - counts["done"]:
        say(f"{count_of(left, 'manifest')} left: {_LEFT[decision]}, or it was settled meanwhile")


@app.command()
def approve(window_ids: WindowsArgument, by: ByOption, reason: ReasonOption, as_json: JsonOption = False) -> None:
    """Approve what awaits it: the handler revalidates the proposal, and goes on.

    Exit code 1 where it does not await approval.
    """
    _decide(window_ids, "approve", by, reason, as_json)


@app.command()
def refuse(window_ids: WindowsArgument, by: ByOption, reason: ReasonOption, as_json: JsonOption = False) -> None:
    """Refuse what awaits approval: the manifest is settled, and nothing is done.

    Exit code 1 where it does not await approval.
    """
    _decide(window_ids, "refuse", by, reason, as_json)


@app.command()
def replay(
    by: ByOption,
    reason: ReasonOption,
    window_ids: AnyWindowsArgument = None,
    state: StateOption = None,
    tenant: TenantOption = None,
    flow: FlowOption = None,
    older_than: ClosedOption = None,
    dry_run: DryRunOption = False,
    effects: Annotated[
        str | None,
        typer.Option(
            metavar="done|not-done",
            help="What became of effects in doubt; without it the handler's verify is asked.",
            show_default=False,
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Hand dead, uncertain or reconciling manifests out again, their failures forgotten: those named, or all that match
    every filter given.

    What is confirmed in the ledger is not done again. Exit code 1 where one that is named is in another state.
    """
    if effects not in (None, "done", "not-done"):
        raise typer.BadParameter("--effects is done or not-done")
    filters = (state, tenant, flow, older_than)
    ledger = effects and effects.replace("-", "_")
    _decide_where(window_ids, filters, "replay", by, reason, as_json, dry_run, ledger)


@app.command()
def discard(
    by: ByOption,
    reason: ReasonOption,
    window_ids: AnyWindowsArgument = None,
    state: StateOption = None,
    tenant: TenantOption = None,
    flow: FlowOption = None,
    older_than: ClosedOption = None,
    dry_run: DryRunOption = False,
    as_json: JsonOption = False,
) -> None:
    """Settle manifests without doing anything, whatever they wait for: those named, or all that match every filter.

    One that is processing is left: wait for its attempt to end. Exit code 1 where one that is named is left or settled.
    """
    _decide_where(window_ids, (state, tenant, flow, older_than), "discard", by, reason, as_json, dry_run)


@app.command()
def confirm(window_ids: WindowsArgument, by: ByOption, reason: ReasonOption, as_json: JsonOption = False) -> None:
    """Settle a dead, uncertain or reconciling manifest as confirmed: what it stands for has happened.

    Exit code 1 where it is in another state.
    """
    _decide(window_ids, "confirm", by, reason, as_json)


# --- the reconciliation queue -----------------------------------------------------------------------------------------


def _items(client: Accumulator) -> Iterator[ReconcileItem]:
    """All that waits, a page at a time, partition by partition."""
    operations = client.operations
    client.store.perform(operations.connect())
    for partition in range(operations.partitions):
        page = client.store.perform(operations.queued(partition, "", "+", 100))
        while page:
            yield from page
            page = client.store.perform(operations.queued(partition, page[-1].item_id, "+", 100))


def _item_object(item: ReconcileItem, now: int) -> dict[str, Any]:
    return {
        "item_id": item.item_id,
        "queued_at": item.queued_at,
        "age": now - item.queued_at,
        "code": item.code,
        "why": item.why,
        "bucket_key": item.event.bucket_key,
        "window_version": item.window or None,
        "event_id": item.event.event_id,
        "kind": item.event.kind,
        "source": item.event.source,
        "occurred_at": item.event.occurred_ms,
        "digest": item.digest,
        "known": item.known,
    }


@reconcile_app.command("list")
def reconcile_list(
    code: CodeOption = None,
    tenant: TenantOption = None,
    flow: FlowOption = None,
    older_than: AgeOption = None,
    limit: LimitOption = 1000,
    as_json: JsonOption = False,
) -> None:
    """List the events that wait for somebody to decide, in the order they were queued."""
    age = _age(older_than)
    with connected() as (client, _):
        now = client.store.perform(client.operations.now())
        found = [
            _item_object(item, now)
            for item in _items(client)
            if code in (None, item.code)
            and matches(item.event.bucket_key, tenant, flow)
            and item.queued_at + age <= now
        ]
        tell_unknown_flow(client, flow, len(found))
    found.sort(key=lambda item: (item["queued_at"], item["item_id"]))
    for item in found[:limit] if as_json else ():
        say_json(item)
    if not as_json and found:
        say_table(
            ("waiting", "code", "bucket", "event", "kind", "item"),
            [
                (
                    rough(max(0, item["age"])),
                    item["code"],
                    item["bucket_key"],
                    item["event_id"],
                    item["kind"],
                    item["item_id"],
                )
                for item in found[:limit]
            ],
            numbers=("waiting",),
        )
    elif not as_json:
        say("nothing waits for reconciliation")
    if len(found) > limit:
        tell(f"and {len(found) - limit} more: --limit shows them")


ItemArgument = Annotated[str, typer.Argument(metavar="ITEM", help="As `list` names it.", show_default=False)]
ItemsArgument = Annotated[
    list[str] | None, typer.Argument(metavar="ITEM", help="As `list` names them.", show_default=False)
]


@reconcile_app.command("show")
def reconcile_show(
    item_id: ItemArgument,
    payload: Annotated[bool, typer.Option("--payload", help="The event's payload too.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Show an event that waits, and what is known of its id. Exit code 1 where it does not wait any more."""
    with connected() as (client, _):
        now = client.store.perform(client.operations.now())
        item = client.store.perform(client.operations.reconcile_item(item_id))
    if item is None:
        complain("no such item waits")
        raise typer.Exit(FAILED)
    shown = _item_object(item, now)
    if payload:
        event = event_object(StoredEvent(item.event, item.queued_at, 0, False, False))
        shown |= {name: value for name, value in event.items() if name in ("payload", "payload_bytes")}
    if as_json:
        say_json(shown)
        return
    facts: dict[str, object] = {
        "item": item.item_id,
        "waiting": f"{rough(max(0, shown['age']))}, since {instant(item.queued_at)}",
        "code": item.code,
        "bucket": item.event.bucket_key,
        "window": item.window or "none was open",
        "event": f"{item.event.event_id} ({item.event.kind}) of {item.event.source}",
        "occurred at": instant(item.event.occurred_ms),
        "digest": item.digest,
        "known": ", ".join(item.known) or "nothing under this id",
    }
    if item.why:
        facts["why"] = item.why
    for name in ("source_version", "ref"):
        if (value := getattr(item.event, name)) is not None:
            facts[name.replace("_", " ")] = value
    for name in ("payload", "payload_bytes"):
        if name in shown:
            facts[name.replace("_", " ")] = json.dumps(shown[name], ensure_ascii=False)
    say_facts(facts)


def _age(text: str | None) -> int:
    if text is None:
        return 0
    try:
        return parse_duration(text)
    except InvalidInput as problem:
        raise typer.BadParameter(f"--older-than: {problem.rule}") from None


def _resolve(
    decision: str,
    items: Sequence[str] | None,
    filters: tuple[str | None, str | None, str | None, str | None],
    by: str,
    reason: str,
    as_json: bool,
    dry_run: bool,
) -> None:
    code, tenant, flow, older_than = filters
    filtered = any(value is not None for value in filters)
    if bool(items) == filtered:
        raise typer.BadParameter("name either items, or a --code, a --tenant, a --flow, an --older-than")
    if items:
        _no_dry_run(dry_run)
    with connected() as (client, _):
        if not items:
            counts = client.resolve_where(
                decision,
                by=by,
                reason=reason,
                code=code,
                tenant=tenant,
                flow=flow,
                older_than=older_than,
                dry_run=dry_run,
            )
            tell_unknown_flow(client, flow, sum(counts.values()))
            if as_json:
                say_json(counts)
            elif dry_run:
                say(f"{count_of(counts[RESOLUTIONS[decision]], 'event')} would be {RESOLUTIONS[decision]}")
            else:
                for outcome, count in counts.items():
                    if count or outcome != "missing":
                        say(f"{count_of(count, 'event')} {outcome}")
            return
        missing = 0
        for item_id in items:
            try:
                told = client.resolve(item_id, decision, by=by, reason=reason)
            except InvalidInput as problem:
                if problem.field != "item":
                    raise
                told = Resolved(item_id, "missing")
            missing += told.outcome == "missing"
            if as_json:
                receipt = told.receipt
                version = None if receipt is None else receipt.window_version
                say_json({"item_id": item_id, "outcome": told.outcome, "window_version": version})
            elif told.outcome == "missing":
                say(f"{plain(item_id)}: no such item waits")
            else:
                into = f" into window {told.receipt.window_version}" if told.receipt else ""
                say(f"{item_id}: {told.outcome}{into}")
    if missing:
        raise typer.Exit(FAILED)


@reconcile_app.command("accept")
def reconcile_accept(
    by: ByOption,
    reason: ReasonOption,
    items: ItemsArgument = None,
    code: CodeOption = None,
    tenant: TenantOption = None,
    flow: FlowOption = None,
    older_than: AgeOption = None,
    dry_run: DryRunOption = False,
    as_json: JsonOption = False,
) -> None:
    """Let events join their buckets' next windows: those named, or all that match every filter given.

    Exit code 1 where one that is named does not wait any more.
    """
    _resolve("accept", items, (code, tenant, flow, older_than), by, reason, as_json, dry_run)


@reconcile_app.command("discard")
def reconcile_discard(
    by: ByOption,
    reason: ReasonOption,
    items: ItemsArgument = None,
    code: CodeOption = None,
    tenant: TenantOption = None,
    flow: FlowOption = None,
    older_than: AgeOption = None,
    dry_run: DryRunOption = False,
    as_json: JsonOption = False,
) -> None:
    """Take events out of the queue without doing anything: those named, or all that match every filter given.

    Exit code 1 where one that is named does not wait any more.
    """
    _resolve("discard", items, (code, tenant, flow, older_than), by, reason, as_json, dry_run)


# --- the namespace ----------------------------------------------------------------------------------------------------


@app.command()
def health(as_json: JsonOption = False) -> None:
    """Say how it goes: what has to be mended, what should be known, and how much waits.

    Exit code 1 where something has to be mended: windows are overdue, no worker is alive, a role or a handler is
    missing, the outbox ages, the server evicts or is a replica, a ceiling is reached, something waits for a person for
    more than a day.
    """
    with connected() as (client, _):
        found = client.health()
    if as_json:
        say_json({"ok": found.ok, **asdict(found)})
    else:
        for line in health_report(found):
            say(plain(line))
    if not found.ok:
        raise typer.Exit(FAILED)


@app.command("export")
def export_(
    file: Annotated[
        str, typer.Argument(metavar="FILE", help="A new file; compressed if it ends in .gz; - is standard output.")
    ],
    since: Annotated[
        str | None,
        typer.Option(
            metavar="INSTANT|AGE",
            help="Only what settled since then: 2026-11-30T00:00:00Z, or 2d for two days ago.",
            show_default=False,
        ),
    ] = None,
    position: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Begin where the last export with this file began, and note there where the next one must.",
            show_default=False,
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="The summary as one JSON object.")] = False,
) -> None:
    """Write the settled manifests out before they go, one JSON object a line: facts, record, timeline, effects, stages,
    and events with their payloads while these are there.

    Payloads go `payload_ttl` after a manifest settled, the rest `metadata_ttl` after it: exporting more often than that
    misses nothing. What settled while an export ran may stand in the next one too (`window_id` tells).
    """
    if since is not None and position is not None:
        raise typer.BadParameter("give --since or --position, not both")
    with connected() as (client, _):
        following = start_of_next(client)
        start = _start(since, position, following)
        lines = export(client, start)
        if file == "-":
            count, size = write_lines(sys.stdout.buffer, lines)
            sys.stdout.buffer.flush()
        else:
            count, size = write_file(Path(file), lines)
        if position is not None:
            _note(position, following)
    if as_json and file != "-":
        say_json({"file": file, "manifests": count, "bytes": size, "since": start, "next": following})
    else:
        (tell if file == "-" else say)(
            f"{count_of(count, 'manifest')}, {size:,} bytes; the next export may begin with --since {_rfc(following)}"
        )


def _start(since: str | None, position: Path | None, now: int) -> int:
    if position is not None:
        try:
            return parse_instant("position", position.read_text().strip())
        except FileNotFoundError:
            return 0
        except InvalidInput as problem:
            raise InvalidSettings(str(position), problem.rule) from None
    if since is None:
        return 0
    if since[:4].isdecimal() and since[4:5] == "-":
        return parse_instant("--since", since)
    try:
        return now - parse_duration(since)
    except InvalidInput:
        rule = f"must be an instant, as in 2026-11-30T00:00:00Z, or an age, as in 2d, not {shown(since)}"
        raise InvalidInput("--since", rule) from None


def _note(position: Path, at: int) -> None:
    part = position.with_name(position.name + ".part")
    part.write_text(_rfc(at) + "\n")
    part.replace(position)


def _rfc(ms: int) -> str:
    return instant(ms).replace(" ", "T")
