"""What the commands share: how answers are written for people and programs, and how the server is reached.

Tables are for people; `--json` prints one JSON object a line, with instants in ms since the epoch.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Annotated, Final, TypeVar

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from accumulator.client import Accumulator
from accumulator.envelope import check_bucket_key, check_event_id
from accumulator.errors import AccumulatorError, InvalidInput, InvalidSettings
from accumulator.ladder_operations import LoadedLadder
from accumulator.namespace import LoadedPolicy
from accumulator.settings import Config, Settings, find_config

T = TypeVar("T")

FAILED: Final = 1
WRONG: Final = 2
SERVER: Final = 3
INTERRUPTED: Final = 130

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)

# --- what people see --------------------------------------------------------------------------------------------------


def plain(value: object) -> str:
    """Text of others on one line: what a terminal would obey, or not show, is written as an escape."""
    text = str(value)
    return text if text.isprintable() else "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def say(text: str = "") -> None:
    """The answer, on standard output."""
    typer.echo(text)


def tell(text: str) -> None:
    """Beside the answer: on standard error."""
    typer.echo(text, err=True)


def complain(problem: AccumulatorError | str) -> None:
    """What is wrong, in a line on standard error."""
    text = str(problem)
    if isinstance(problem, InvalidInput) and not problem.field:
        text = problem.rule
    tell(f"accumulator: {plain(text)}")


def say_json(value: object) -> None:
    """An object on a line of its own."""
    utf8 = (getattr(sys.stdout, "encoding", None) or "").lower().replace("-", "") == "utf8"
    say(json.dumps(value, ensure_ascii=not utf8))


def say_table(columns: Sequence[str], rows: Iterable[Sequence[object]], numbers: Sequence[str] = ()) -> None:
    """A table; `numbers` names the columns that are aligned to the right."""
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for name in columns:
        table.add_column(Text(name), justify="right" if name in numbers else "left", overflow="fold")
    for row in rows:
        table.add_row(*(Text(plain(cell)) for cell in row))
    console = Console(highlight=False)
    # Into a pipe every row is one line, however long its key.
    console.print(table) if console.is_terminal else Console(highlight=False, width=4000).print(table)


def say_facts(facts: Mapping[str, object]) -> None:
    """A name and a value a line, aligned."""
    width = max(map(len, facts))
    for name, value in facts.items():
        say(f"{name:<{width}}  {plain(value)}")


def instant(ms: int) -> str:
    """An instant as people read it, in UTC."""
    return (_EPOCH + timedelta(milliseconds=ms)).isoformat(sep=" ", timespec="milliseconds").removesuffix(
        "+00:00"
    ) + "Z"


def span(ms: int) -> str:
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


def rough(ms: int) -> str:
    """A length of time at a glance: 1.2s, 3m12s, 2h5m, 4d3h."""
    if ms >= 60_000:
        unit = 1000 if ms < 3_600_000 else 60_000 if ms < 86_400_000 else 3_600_000
        return span(ms // unit * unit)
    return f"{ms / 1000:.1f}s"


def due_text(due_at: int, reason: str, now: int) -> str:
    """When something falls due, and what for."""
    when = f"in {rough(due_at - now)}" if due_at > now else f"{rough(now - due_at)} ago"
    return f"{instant(due_at)} ({when}): {reason}"


def id_list(ids: Sequence[str], most: int = 8) -> str:
    """The first of some ids, and how many more there are."""
    more = f", and {len(ids) - most} more" if len(ids) > most else ""
    return ", ".join(ids[:most]) + more or "none"


def count_of(number: int, noun: str) -> str:
    """1 event, 2,000 events."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


# --- what is asked of, and where --------------------------------------------------------------------------------------


@contextmanager
def connected(config: Path | None = None) -> Iterator[tuple[Accumulator, Config | None]]:
    """A client of the server that the environment names, and the configuration file where there is one."""
    settings = Settings()
    found = find_config(settings, config)
    with Accumulator.from_settings(settings.with_config(found) if found else settings) as client:
        yield client, found


@contextmanager
def configured(config: Path | None) -> Iterator[tuple[Accumulator, Config]]:
    """The same for what needs a configuration file. Raises InvalidSettings where there is none."""
    with connected(config) as (client, found):
        if found is None:
            raise InvalidSettings("config", "is not there: give --config FILE or set ACCUMULATOR_CONFIG")
        yield client, found


def load_named(
    names: Sequence[str] | None,
    there: Mapping[str, T],
    what: str,
    load: Callable[[str, T], LoadedPolicy | LoadedLadder],
    as_json: bool,
) -> None:
    """Loads those of the configuration file's flows or ladders (`what`) that are named, or all, and says what became of
    each. Raises InvalidSettings where one is not there, before any is loaded."""
    for name in names or ():
        if name not in there:
            hint = ": a file goes to --config" if os.path.isfile(name) else ""
            raise InvalidSettings(name, f"is no {what} of the configuration file{hint}")
    loaded = [load(name, there[name]) for name in names or there]
    if as_json:
        for one in loaded:
            say_json(one._asdict())
    else:
        say_table((what, "version", "outcome"), loaded, numbers=("version",))


def typed_key(value: str) -> str:
    """A bucket key as it was typed; refused before any server is asked."""
    try:
        return check_bucket_key(value)
    except InvalidInput as problem:
        raise typer.BadParameter(problem.rule) from None


def typed_event_id(value: str) -> str:
    """An event id as it was typed; refused before any server is asked."""
    try:
        return check_event_id(value)
    except InvalidInput as problem:
        raise typer.BadParameter(problem.rule) from None


JsonOption = Annotated[bool, typer.Option("--json", help="One JSON object a line instead of a table.")]
ConfigOption = Annotated[
    Path | None, typer.Option("--config", metavar="FILE", help="The configuration file.", show_default=False)
]
KeyArgument = Annotated[str, typer.Argument(metavar="KEY", help="A bucket key: tenant:flow:object.", parser=typed_key)]
TenantOption = Annotated[
    str | None, typer.Option(help="Only this tenant, as it stands in the key.", show_default=False)
]
FlowOption = Annotated[str | None, typer.Option(help="Only this flow, as it stands in the key.", show_default=False)]


def matches(key: str, tenant: str | None, flow: str | None) -> bool:
    """Whether a bucket key is of a tenant and flow; None is any."""
    own_tenant, own_flow, _ = key.split(":", 2)
    return tenant in (None, own_tenant) and flow in (None, own_flow)


def tell_unknown_flow(client: Accumulator, flow: str | None, found: int) -> None:
    """Where nothing was found of a flow that has no policy: it may be a slip of the pen."""
    if flow is not None and not found and flow not in client.policies():
        tell(f"there is no policy for the flow {plain(flow)}")
