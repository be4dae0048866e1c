"""The documents promise only what is there: blocks of the README are run, tables compared, links followed."""

from __future__ import annotations

import inspect
import io
import os
import re
import shlex
import subprocess
from collections.abc import Iterator
from contextlib import redirect_stdout
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml

import accumulator.handlers
from accumulator import keys, simulate
from accumulator.client import Accumulator, AsyncAccumulator
from accumulator.context import Context, StepContext
from accumulator.decisions import ATTENTION
from accumulator.embedded import EmbeddedServer
from accumulator.handlers import STAGES, registered
from accumulator.health import sign_of_life
from accumulator.manifest import SETTLED
from accumulator.policy import HANDLED_SINKS, OPTIONS
from accumulator.runner import run_attempt
from accumulator.settings import Config
from accumulator.windows import Outcome
from accumulator.worker import ROLES
from tests.conftest import Program

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
NOW = datetime(2026, 10, 16, 14, tzinfo=UTC)


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", README, re.DOTALL | re.MULTILINE)


def table(*header: str) -> list[list[str]]:
    """The rows of the table with that header, cell by cell."""
    line = "| " + " | ".join(header) + " |\n"
    assert README.count(line) == 1, f"there is one table {line!r}"
    rows = README.partition(line)[2].partition("\n\n")[0].splitlines()[1:]
    return [[cell.strip().replace("\\|", "|") for cell in re.split(r"(?<!\\)\|", row)[1:-1]] for row in rows]


# --- tables -----------------------------------------------------------------------------------------------------------


def test_the_policy_table_is_that_of_the_options() -> None:
    rows = table("option", "default", "meaning")
    assert rows == [[f"`{option}`", default, meaning] for option, (default, meaning) in OPTIONS.items()]


def test_the_states_are_those_of_the_contract() -> None:
    rows = table("state", "means", "settled", "the bucket's next one waits")
    states = {row[0].strip("`"): row[1:] for row in rows}
    assert {state for state, (_, settled, _) in states.items() if settled == "yes"} == SETTLED
    waiting = {state for state, (_, settled, _) in states.items() if settled == "no"}
    assert waiting == {"closed", "dispatched", "processing", "retrying", *ATTENTION}
    goes_on = {state for state, (_, _, waits) in states.items() if waits == "no"}
    assert goes_on == SETTLED | {"uncertain", "dead", "reconciling"}


def test_the_calls_are_there_for_both_clients() -> None:
    names = [name for row in table("call", "what it does") for name in re.findall(r"([a-z_]+)(?=[(`])", row[0])]
    assert len(names) >= 20
    for name in names:
        assert callable(getattr(Accumulator, name)), name
        assert callable(getattr(AsyncAccumulator, name)), name


STEP = inspect.getsource(StepContext)


def test_what_a_context_has_is_named() -> None:
    for name in re.findall(r"`ctx\.([a-z_]+)", README):
        given = ("manifest", "manifests", "attempt", "results", "approved_by", "left")
        assert name in given or hasattr(Context, name) or f"self.{name}" in STEP or hasattr(StepContext, name), name


def test_roles_sinks_stages_and_outcomes() -> None:
    assert [row[0] for row in table("role", "does")] == [f"`{role}`" for role in (*ROLES, "rq")]
    sinks = {row[0].strip("`") for row in table("sink", "what happens")}
    assert sinks == HANDLED_SINKS | {"webhook", "none"}
    for outcome in Outcome:
        assert f"`{outcome}`" in README
    for stage in STAGES:
        assert f"def {stage}(self" in README or f"`{stage}`" in README


# --- python -----------------------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def _no_handlers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accumulator.handlers, "_registry", {})
    monkeypatch.setattr(accumulator.handlers, "_steps", {})
    monkeypatch.setattr(accumulator.handlers, "_names", {})


@pytest.fixture
def acc(server: EmbeddedServer) -> Iterator[Accumulator]:
    """A client of the namespace that the documents name, of one partition."""
    with Accumulator(server.url, partitions=1) as made:
        yield made


def run(block: str, url: str = "") -> dict[str, Any]:
    """Runs a block as a module of its own; what it names."""
    names: dict[str, Any] = {"__name__": "readme"}
    exec(compile(block.replace("redis://127.0.0.1:6379/0", url), "README.md", "exec"), names)
    return names


@pytest.mark.namespaces("acc")
def test_every_python_block_runs(acc: Accumulator, server: EmbeddedServer, tmp_path: Path) -> None:
    """In their order, on a server that holds what the page's configurations install, as a worker does, and no more."""
    assert acc.policies() == {}  # and the namespace has its one partition
    for number, block in enumerate(blocks("python")):
        if number == 1:  # the very first is for a server on which there is nothing
            for config in configurations(tmp_path):
                for flow, policy in config.policies.items():
                    acc.load_policy(flow, policy, only_new=True)
                for name, ladder in config.ladders.items():
                    acc.load_ladder(name, ladder, only_new=True)
        said = io.StringIO()
        before = set(registered())
        with redirect_stdout(said):
            names = run(block, server.url)
        if "accumulator" in names:
            names["accumulator"].close()
        assert said.getvalue().splitlines() == re.findall(r"^print\(.*#\s*(.*)$", block, re.MULTILINE)
        assert len(set(registered()) - before) == block.count("@handler(")


class Play(NamedTuple):
    """A flow of the README: its handler, and payloads for a window."""

    flow: str
    payloads: list[Any]
    state: str


PLAYS = [
    Play("order", [{"item": 7}], "confirmed"),
    Play("invoice", [1, 2, 3], "confirmed"),
    Play("refund", [{"cents": 2_000}, {"cents": 500}], "confirmed"),
    Play("refund", [{"cents": 20_000}], "awaiting_approval"),
    Play("chat", ["hello", "are you there?"], "confirmed"),
]


@pytest.mark.namespaces("acc")
@pytest.mark.parametrize("play", PLAYS, ids=lambda play: f"{play.flow}-{play.state}")
def test_every_handler_of_the_page_does_what_it_says(acc: Accumulator, play: Play) -> None:
    (block,) = (block for block in blocks("python") if f'@handler("{play.flow}"' in block)
    names = run(block)
    window_id = closed(acc, play.flow, play.payloads)
    assert work(acc) == [play.state]
    effects = acc.effects(window_id)
    if play.flow == "invoice":
        assert [effect.name for effect in effects] == ["book:e0", "book:e1", "book:e2"]
        assert len(names["books"].booked) == 3
    if play.state == "awaiting_approval":
        assert names["bank"].refunds == {}
        assert acc.approve(window_id, by="ana", reason="fine by me").outcome == "done"
        assert work(acc) == ["confirmed"]
        assert list(names["bank"].refunds.values()) == [{"cents": 20_000, "state": "paid"}]


def closed(acc: Accumulator, flow: str, payloads: list[Any], key: str = "acme:{}:7", event_id: str = "e") -> str:
    """A window of the flow, closed, with these payloads."""
    acc.load_policy(flow, {"inactivity": "1h", "sink": "direct"}, only_new=True)
    key = key.format(flow)
    for n, payload in enumerate(payloads):
        acc.push(event_id=f"{event_id}{n}", bucket_key=key, kind="k", source="web", occurred_at=NOW, payload=payload)
    (window,) = acc.flush(key).closed_windows
    return window.window_id


def work(acc: Accumulator) -> list[str | None]:
    """What a runner does, once."""
    with redirect_stdout(io.StringIO()):
        return [
            run_attempt(acc, taken.window_id, taken.attempt, taken.bucket_key)
            for taken in acc.store.perform(acc.operations.take(0, "direct", 10, 30_000))
        ]


@pytest.mark.namespaces("acc")
def test_the_invoice_ladder_of_the_page_does_what_it_says(acc: Accumulator, tmp_path: Path) -> None:
    (text,) = (block for block in blocks("yaml") if "ladders" in block and "expect" not in block)
    (tmp_path / "c.yaml").write_text(text)
    ladder = Config.load(tmp_path / "c.yaml").ladders["cobranca"]
    (block,) = (block for block in blocks("python") if "@step_handler" in block)
    sent = run(block)["sent"]
    acc.load_policy("fatura", {"inactivity": "1h", "sink": "direct"})
    acc.load_ladder("cobranca", ladder)
    now = datetime.now(UTC)
    acc.start_ladder("cobranca", "acme:fatura:1", now, {"amount": 300})
    acc.start_ladder("cobranca", "acme:fatura:2", now, {"amount": 20_000})
    assert set(work(acc)) == {"confirmed"}
    work(acc)
    assert sent[0][:3] == ("antes", "email", 300)
    assert ("case for", "juridico") in sent
    acc.push(event_id="p1", bucket_key="acme:fatura:1", kind="pago", source="bank", occurred_at=now)
    work(acc)
    assert sent[-1] == ("thanks for", "p1")


# --- yaml -------------------------------------------------------------------------------------------------------------


def test_the_scenario_holds() -> None:
    scenarios = [found for block in blocks("yaml") if "steps" in (found := yaml.safe_load(block))]
    assert len(scenarios) == 2
    with simulate.simulator_store() as store:
        for scenario in scenarios:
            answer = simulate.run_scenario(store, scenario)
            assert answer["manifests"]
            assert list(simulate.differences(answer, scenario["expect"])) == []


def configurations(folder: Path) -> list[Config]:
    """Every configuration of the page."""
    found = []
    for block in blocks("yaml"):
        if "steps" not in yaml.safe_load(block):
            (folder / "c.yaml").write_text(block)
            found.append(Config.load(folder / "c.yaml"))
    return found


def test_configurations_are_read(tmp_path: Path) -> None:
    found = configurations(tmp_path)
    assert found
    assert all(config.policies for config in found)


# --- sh ---------------------------------------------------------------------------------------------------------------


def lines(program: str) -> list[list[str]]:
    """Every line of the page that calls a program, as its arguments."""
    found = [line for block in blocks("sh") for line in block.splitlines() if line.startswith(program + " ")]
    assert found
    return [shlex.split(line, comments=True)[1:] for line in found]


def test_every_command_of_the_page_is_one(program: Program) -> None:
    inline = [shlex.split(call)[1:] for call in re.findall(r"`(accumulator [a-z][^`]*)`", README)]
    helped: dict[tuple[str, ...], str] = {}
    for arguments in lines("accumulator") + inline:
        command = tuple(arguments[: 2 if arguments[0] in ("policy", "reconcile", "ladder") else 1])
        if command not in helped:
            shown = program(*command, "--help")
            assert shown.code == 0, command
            helped[command] = shown.out
        for option in (word.partition("=")[0] for word in arguments if word.startswith("--")):
            assert re.search(rf"{option}\b", helped[command]), f"{' '.join(command)} has no {option}"
    assert len(helped) >= 15


def test_every_target_of_make_is_one() -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert {line[0] for line in lines("make")} <= targets


BUCKET = "acme:refund:7"


@pytest.fixture
def sample(acc: Accumulator) -> dict[str, str]:
    """A namespace in which every question of the page has an answer; what its placeholders stand for."""
    (block,) = (block for block in blocks("python") if '@handler("refund"' in block)
    names = run(block)
    names["Refund"].approve = lambda self, ctx: ctx.leave({"seen": 1})
    acc.load_policy("refund", {"inactivity": "1h", "sink": "direct", "kinds": ["k"]})
    acc.load_ladder("dunning", {"steps": [{"name": "s", "offset": "1d"}], "cancel_on": ["never"]})
    ladder = acc.start_ladder("dunning", BUCKET, datetime.now(UTC)).ladder_id
    closed(acc, "refund", [{"cents": 500}], BUCKET)
    assert work(acc) == ["confirmed"]
    names["Refund"].confirm = lambda self, ctx: False
    window_id = closed(acc, "refund", [{"cents": 500}], BUCKET, "again")
    assert work(acc) == ["reconciling"]
    push = {"bucket_key": BUCKET, "kind": "k", "source": "web", "occurred_at": NOW}
    acc.push(event_id="n1", **push)
    acc.push(event_id="n1", **push)
    acc.push(event_id="n2", **push | {"kind": "unlisted"})
    for other in ("acme:refund:8", "acme:refund:9"):
        closed(acc, "refund", [{"cents": 1}], other)
    assert len(acc.store.perform(acc.operations.take(0, "direct", 1, 30_000))) == 1
    acc.store.perform(acc.operations.beat(sign_of_life("w1", ["closer"])))
    return {"WINDOW": window_id, "LADDER": ladder, "BUCKET": BUCKET, "FLOW": "refund", "TENANT": "acme", "P": "0"}


@pytest.mark.namespaces("acc")
def test_every_redis_cli_line_answers(sample: dict[str, str], server: EmbeddedServer, redis_cli: str) -> None:
    for arguments in lines("redis-cli"):
        words = [re.sub("|".join(sample), lambda found: sample[found[0]], word) for word in arguments]
        done = subprocess.run(
            [redis_cli, "-h", "127.0.0.1", "-p", str(server.port), *words],
            capture_output=True,
            text=True,
            timeout=10,
            env={"PATH": os.environ["PATH"]},  # noqa: TID251
        )
        shown = shlex.join(words)
        assert done.returncode == 0, shown
        assert done.stderr == "", shown
        assert done.stdout.strip(), f"{shown} says nothing"
        assert not re.match(r"\(error\)|(ERR|WRONGTYPE) ", done.stdout), f"{shown}: {done.stdout}"


# --- the architecture -------------------------------------------------------------------------------------------------

ARCHITECTURE = (ROOT / "ARCHITECTURE.md").read_text()


def test_every_key_is_in_the_architecture() -> None:
    for name, function in inspect.getmembers(keys, inspect.isfunction):
        first, *rest = inspect.signature(function).parameters
        if first == "namespace" and name not in ("check_namespace", "prefix"):
            assert f"`{function('acc')}`" in ARCHITECTURE, name
        elif first == "prefix":
            key = function("acc:{p}:", *(f"<{parameter}>" for parameter in rest)).partition("<")[0]
            assert f"`{key}" in ARCHITECTURE, name


def test_every_module_and_part_is_in_the_architecture() -> None:
    package = ROOT / "accumulator"
    for path in package.glob("[a-z]*.py"):
        assert f"`{path.stem}`" in ARCHITECTURE, path.name
    for path in (package / "lua").glob("*.lua"):
        if path.read_text().startswith("-- part "):
            assert f"`{path.stem}`" in ARCHITECTURE, path.name


# --- links ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(path.name for path in ROOT.glob("*.md")))
def test_links_and_paths_exist(name: str) -> None:
    text = (ROOT / name).read_text()
    for target in re.findall(r"\]\(([^)]+)\)", text):
        if not target.startswith(("http://", "https://", "#")):
            assert (ROOT / target.partition("#")[0]).exists(), target
    for path in re.findall(r"`((?:accumulator|config|tests|workers|\.ci)/[\w./-]*)`", text):
        assert (ROOT / path).exists(), path


def test_the_pages_name_no_machine() -> None:
    for page in ROOT.glob("*.md"):
        assert not re.search(r"/(home|root|tmp|work|Users)/", page.read_text()), page.name
