"""What people decide: the commands and calls for manifests that wait for somebody, and for the reconciliation queue."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import redis

import accumulator.handlers
from accumulator import cli_operate, decisions
from accumulator.client import Accumulator, AsyncAccumulator
from accumulator.context import Context
from accumulator.decisions import ATTENTION, Decided, Resolved
from accumulator.embedded import EmbeddedServer
from accumulator.errors import InvalidInput
from accumulator.handlers import Stages, handler
from accumulator.health import sign_of_life
from accumulator.manifest import Manifest
from accumulator.runner import run_attempt
from tests.conftest import Program, wait_until
from tests.invariants import check_invariants

BY = ("--by", "ana", "--reason", "I asked the bank")
SECRET = "sk-4242-secret"
FLOWS = ("good", "dead", "uncertain", "approval", "diverged")
STATES = {"dead": "dead", "uncertain": "uncertain", "approval": "awaiting_approval", "diverged": "reconciling"}


@pytest.fixture(autouse=True)
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Registers a handler for each of FLOWS; what they did to the world outside."""
    done: list[str] = []
    monkeypatch.setattr(accumulator.handlers, "_registry", {})
    monkeypatch.setattr(accumulator.handlers, "_names", {})

    @handler("good")
    def good(ctx: Context) -> None:
        with ctx.effect("charge") as effect:
            done.append("charge")
            effect.result = {"receipt": SECRET}
        for entry in ctx.events:
            if entry.event.kind == "odd":
                ctx.set_aside(entry.event.event_id, "can't be read")

    @handler("dead", max_attempts=1)
    def dead(ctx: Context) -> None:
        done.append("dead")
        raise ValueError("there is no such order")

    @handler("uncertain", backoff="1ms", max_backoff="1ms")
    def uncertain(ctx: Context) -> None:
        with ctx.effect("charge") as effect:
            if effect.needed:
                done.append("pay")
                if done.count("pay") == 1:
                    raise OSError("the answer was lost")

    @handler("approval")
    class Refund(Stages):
        def load(self, ctx: Context) -> object:
            return {"balance": SECRET}

        def propose(self, ctx: Context) -> object:
            return "refund"

        def approve(self, ctx: Context) -> bool:
            return True

        def execute(self, ctx: Context, key: str) -> None:
            done.append("refund")

    @handler("diverged")
    class Diverging(Stages):
        def execute(self, ctx: Context, key: str) -> None: ...

        def confirm(self, ctx: Context) -> bool:
            return False

    return done


@pytest.fixture
def client(server: EmbeddedServer, namespace: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Accumulator]:
    """A client of the server that the program is told of, with a policy for each flow."""
    monkeypatch.setenv("ACCUMULATOR_REDIS_URL", server.url)
    with Accumulator(server.url, namespace=namespace, partitions=4) as made:
        for flow in FLOWS:
            made.load_policy(
                flow, {"inactivity": "1h", "terminal_kinds": ["end"], "kinds": ["end", "odd"], "sink": "direct"}
            )
        yield made
        with redis.Redis.from_url(server.url, protocol=2) as control:
            check_invariants(control, namespace)


def event(n: int | str, key: str, kind: str = "end", **more: Any) -> dict[str, Any]:
    at = datetime(2026, 10, 16, 14, tzinfo=UTC)
    return {"event_id": f"e{n}", "bucket_key": key, "kind": kind, "source": "test", "occurred_at": at} | more


def work(client: Accumulator) -> None:
    """What a worker does, once."""
    for partition in range(4):
        client.store.perform(client.operations.tick(partition, 100))
        for taken in client.store.perform(client.operations.take(partition, "direct", 100, 30_000)):
            run_attempt(client, taken.window_id, taken.attempt, taken.bucket_key)


def handled(client: Accumulator, flow: str, n: int = 1) -> Manifest:
    """A manifest of a flow, once its handler has come to its end."""
    key = f"shop:{flow}:{n}"
    client.push(event(1, key, payload={"card": SECRET}, ref="db/1"))
    return until(client, key, STATES.get(flow, "confirmed"))


def until(client: Accumulator, key: str, state: str) -> Manifest:
    def there() -> bool:
        work(client)
        return client.manifests(key)[-1].state == state

    wait_until(there, what=f"{key} is {state}")
    return client.manifests(key)[-1]


def causes(client: Accumulator, window_id: str) -> list[str]:
    manifest = client.manifest(window_id)
    assert manifest is not None
    return [cause for *_, cause in manifest.timeline]


# --- what waits -------------------------------------------------------------------------------------------------------


def test_attention_lists_what_waits_for_a_person(program: Program, client: Accumulator) -> None:
    assert program("attention").out == "no manifest waits for a person\n"
    assert program("attention", "--json") == (0, "", "")
    waiting = {flow: handled(client, flow) for flow in FLOWS}
    listed = {each["window_id"]: each for each in program("attention", "--json").json}
    assert {each["state"] for each in listed.values()} == set(ATTENTION)
    assert waiting["good"].window_id not in listed
    dead = listed[waiting["dead"].window_id]
    assert (dead["bucket_key"], dead["window_version"], dead["attempt"]) == ("shop:dead:1", 1, 1)
    assert (dead["cause"], dead["error"]) == ("ValueError", "ValueError: there is no such order")
    assert dead["since"] == waiting["dead"].timeline[-1][0]
    assert 0 <= dead["age"] < 60_000
    shown = program("attention")
    assert shown.code == 0
    for text in ("awaiting_approval", "ValueError: there is no such order", "proposed", "shop:uncertain:1"):
        assert text in shown.out
    for flow, state in STATES.items():
        (only,) = program("attention", "--state", state, "--json").json
        assert only["window_id"] == waiting[flow].window_id
    (only,) = program("attention", "--flow", "dead", "--json").json
    assert only["state"] == "dead"
    assert program("attention", "--tenant", "other").out == "no manifest waits for a person\n"
    few = program("attention", "--limit", "1")
    assert len(few.out.splitlines()) == 2
    assert few.err == "and 3 more: --limit shows them\n"
    assert program("attention", "--state", "confirmed").code == 2
    assert [each.since for each in client.attention()] == sorted(each.since for each in client.attention())


def test_attention_lists_what_waits_for_nobody_where_it_is_asked_for(program: Program, client: Accumulator) -> None:
    assert program("attention", "--state", "retrying").out == "no manifest is retrying\n"
    client.load_policy("lost", {"inactivity": "1h", "terminal_kinds": ["end"], "sink": "direct"})
    client.push_many([event(n, "shop:lost:1") for n in range(3)])
    work(client)
    first, *others = client.manifests("shop:lost:1")
    assert client.attention() == []
    (row,) = program("attention", "--state", "retrying", "--json").json
    assert (row["window_id"], row["cause"], row["attempt"]) == (first.window_id, "HandlerMissing", 1)
    for shown in (program("attention", "--state", "retrying"), program("timeline", first.window_id)):
        assert "flow lost: no handler is registered for it" in shown.out
    rows = program("attention", "--state", "closed", "--flow", "lost", "--json").json
    assert [(row["window_id"], row["cause"], row["attempt"]) for row in rows] == [
        (m.window_id, "closed", 0) for m in others
    ]
    assert len(program("attention", "--state", "closed").out.splitlines()) == 3
    assert client.attention("processing") == []


def test_attention_names_the_queue_too(program: Program, client: Accumulator) -> None:
    client.push(event(1, "shop:good:1", "unlisted"))
    assert program("attention").err == "1 event in the queue besides: `accumulator reconcile list`\n"


def test_timeline_shows_the_whole_life(program: Program, client: Accumulator) -> None:
    manifest = handled(client, "good")
    shown = program("timeline", manifest.window_id)
    rows = [line.split()[3:] for line in shown.out.splitlines() if line.startswith("20")]
    assert [row[0] for row in rows] == ["opened", "closed", "dispatched", "processing", "confirmed"] or [
        row[-1] for row in rows
    ] == ["first", "terminal", "taken", "begun", "handled"]
    assert "charge" in shown.out
    assert SECRET not in shown.out
    asked = program("timeline", manifest.window_id, "--payload")
    assert SECRET in asked.out
    (told,) = program("timeline", manifest.window_id, "--json").json
    assert [step["state"] for step in told["timeline"]] == ["dispatched", "processing", "confirmed"]
    assert [(effect["name"], effect["state"], effect["attempt"]) for effect in told["effects"]] == [
        ("charge", "confirmed", 1)
    ]
    assert SECRET not in json.dumps(told)
    (told,) = program("timeline", manifest.window_id, "--json", "--payload").json
    assert told["effects"][0]["result"] == {"receipt": SECRET}
    assert client.effects(manifest.window_id)[0].result == json.dumps({"receipt": SECRET}, separators=(",", ":"))


def test_an_error_that_was_got_over_is_the_last_one(program: Program, client: Accumulator) -> None:
    manifest = handled(client, "uncertain")
    assert f"\nerror     {manifest.error}\n" in program("timeline", manifest.window_id).out
    client.replay(manifest.window_id, by="ana", reason="it was paid", effects="done")
    until(client, manifest.bucket_key, "confirmed")
    assert f"\nlast error  {manifest.error}\n" in program("timeline", manifest.window_id).out


def test_a_confirm_that_says_no_is_a_reason(program: Program, client: Accumulator) -> None:
    handled(client, "diverged")
    assert "Diverged: confirm found that the world differs\n" in program("attention").out


def test_what_came_out_of_the_queue_is_marked(program: Program, client: Accumulator) -> None:
    client.push(event("odd", "shop:good:1", "unlisted"))
    (item,) = client.reconciliation()
    client.resolve(item, "accept", by="ana", reason="a new kind")
    manifest = handled(client, "good")
    rows = program("manifest", manifest.window_id, "--events").out.splitlines()[-2:]
    assert [row.split()[1] for row in rows] == ["eodd", "e1"]
    assert [row.endswith(" reconciled") for row in rows] == [True, False]


def test_a_timeline_of_very_many_transitions_says_how_many_it_leaves_out(program: Program, client: Accumulator) -> None:
    manifest = handled(client, "dead")
    for _ in range(60):
        client.replay(manifest.window_id, by="ana", reason="again")
        manifest = until(client, manifest.bucket_key, "dead")
    assert (len(manifest.timeline), manifest.left_out) == (20 + 30 + 100, 243 - 150)
    shown = program("timeline", manifest.window_id)
    rows = shown.out.splitlines()
    (at,) = [n for n, row in enumerate(rows) if row.endswith("93 more transitions, not kept")]
    head = next(n for n, row in enumerate(rows) if row.startswith("at "))
    assert at - head - 1 == 2 + 20
    assert len(rows) - at - 1 == 30 + 100
    (told,) = program("timeline", manifest.window_id, "--json").json
    assert (told["left_out"], len(told["timeline"])) == (93, 150)
    client.discard(manifest.window_id, by="ana", reason="enough")
    (line,) = program("export", "-").json
    assert (line["left_out"], len(line["timeline"])) == (93, 151)  # it makes room for a decision


def test_who_has_to_approve_reads_the_proposal(
    program: Program, client: Accumulator, server: EmbeddedServer, namespace: str
) -> None:
    manifest = handled(client, "approval")
    shown = program("timeline", manifest.window_id)
    assert shown.out.endswith("\nstages finished: load, propose\n")
    assert SECRET not in shown.out
    asked = program("timeline", manifest.window_id, "--payload")
    assert [line.split() for line in asked.out.splitlines()[-3:]] == [
        ["stage", "result"],
        ["load", f'{{"balance":"{SECRET}"}}'],
        ["propose", '"refund"'],
    ]
    (told,) = program("timeline", manifest.window_id, "--json").json
    assert told["stages"] == ["load", "propose"]
    assert told["state"] == "awaiting_approval"
    assert SECRET not in json.dumps(told)
    (told,) = program("timeline", manifest.window_id, "--json", "--payload").json
    assert told["results"] == {"load": {"balance": SECRET}, "propose": "refund"}
    kept = {"load": json.dumps({"balance": SECRET}, separators=(",", ":")), "propose": '"refund"'}
    assert client.stages(manifest.window_id) == kept

    async def ask() -> dict[str, str]:
        async with AsyncAccumulator(server.url, namespace=namespace) as accumulator:
            return await accumulator.stages(manifest.window_id)

    assert asyncio.run(ask()) == kept


def test_a_manifest_that_is_not_there(program: Program, client: Accumulator) -> None:
    window_id = handled(client, "dead").window_id
    absent = window_id[:-1] + ("0" if window_id[-1] != "0" else "1")
    assert program("timeline", absent) == (1, "", "accumulator: there is no manifest of that id\n")
    for decision in ("approve", "refuse", "replay", "discard", "confirm"):
        shown = program(decision, absent, *BY)
        assert (shown.code, shown.out) == (1, f"{absent}: there is no manifest of that id\n")
    assert client.discard(absent, by="ana", reason="why") == Decided("missing", "")
    for wrong in ("nonsense", "1" * 20, "é" * 20, ""):
        shown = program("timeline", wrong)
        assert (shown.code, shown.err) == (2, "accumulator: window_id: is none of this namespace\n"), wrong
        assert program("approve", *BY, wrong) == (1, f"{wrong}: there is no manifest of that id\n", "")


def test_what_is_no_id_is_named_and_the_others_are_decided(program: Program, client: Accumulator) -> None:
    first, second = (handled(client, "dead", n).window_id for n in (1, 2))
    shown = program("replay", first, "zz\nz", second, *BY)
    assert shown == (
        1,
        f"{first}: handed out again\nzz\\nz: there is no manifest of that id\n{second}: handed out again\n",
        "",
    )
    told = program("discard", first, "zzz", second, *BY, "--json").json
    assert [(each["window_id"], each["outcome"]) for each in told] == [
        (first, "done"),
        ("zzz", "missing"),
        (second, "done"),
    ]
    assert program("discard", "zzz", "--by", "", "--reason", "why").code == 2  # that is wrong for all of them
    for n in (1, 2):
        client.push(event(n, "shop:good:1", "unlisted"))
    one, two = (item.item_id for item in client.reconciliation())
    shown = program("reconcile", "accept", one, "zzz", "9-1-1", two, *BY)
    assert (shown.code, shown.err) == (1, "")
    assert [line.split(": ")[1] for line in shown.out.splitlines()] == [
        "accepted into window 1",
        "no such item waits",
        "no such item waits",
        "accepted into window 1",
    ]
    assert shown.out.splitlines()[1:3] == ["zzz: no such item waits", "9-1-1: no such item waits"]


# --- decisions --------------------------------------------------------------------------------------------------------


def test_approved_it_is_done_once_and_says_by_whom(program: Program, client: Accumulator, calls: list[str]) -> None:
    manifest = handled(client, "approval")
    assert calls == []
    shown = program("approve", manifest.window_id, *BY)
    assert shown == (0, f"{manifest.window_id}: approved\n", "")
    done = until(client, manifest.bucket_key, "confirmed")
    assert calls == ["refund"]
    assert done.approved_by == "ana"
    assert "approve by ana: I asked the bank" in causes(client, manifest.window_id)
    shown = program("timeline", manifest.window_id)
    assert "approve by ana: I asked the bank" in shown.out
    again = program("approve", manifest.window_id, *BY)
    assert (again.code, again.out) == (1, f"{manifest.window_id}: not approved: it is confirmed\n")


def test_refused_it_is_settled_and_nothing_is_done(program: Program, client: Accumulator, calls: list[str]) -> None:
    manifest = handled(client, "approval")
    (told,) = program("refuse", manifest.window_id, *BY, "--json").json
    assert told == {"window_id": manifest.window_id, "decision": "refuse", "outcome": "done", "state": "refused"}
    work(client)
    assert calls == []
    assert causes(client, manifest.window_id)[-1] == "refuse by ana: I asked the bank"
    assert program("attention", "--json").json == []
    (told,) = program("refuse", manifest.window_id, *BY, "--json").json
    assert (told["outcome"], told["state"]) == ("wrong_state", "refused")


def test_a_dead_one_is_replayed_with_its_failures_forgotten(
    program: Program, client: Accumulator, calls: list[str]
) -> None:
    manifest = handled(client, "dead")
    assert program("replay", manifest.window_id, *BY).out == f"{manifest.window_id}: handed out again\n"
    replayed = client.manifest(manifest.window_id)
    assert replayed is not None
    assert (replayed.state, replayed.failures) == ("retrying", 0)
    until(client, manifest.bucket_key, "dead")
    assert calls == ["dead", "dead"]


@pytest.mark.parametrize(("effects", "charged"), [("done", 1), ("not-done", 2)])
def test_a_person_says_what_became_of_an_effect_in_doubt(
    program: Program, client: Accumulator, calls: list[str], effects: str, charged: int
) -> None:
    manifest = handled(client, "uncertain")
    assert calls == ["pay"]
    assert program("replay", manifest.window_id, *BY).code == 0  # nobody says: it stays in doubt, and is not repeated
    until(client, manifest.bucket_key, "uncertain")
    assert calls == ["pay"]
    assert program("replay", manifest.window_id, *BY, "--effects", "maybe").code == 2
    assert program("replay", manifest.window_id, *BY, "--effects", effects).code == 0
    until(client, manifest.bucket_key, "confirmed")
    assert len(calls) == charged
    assert [effect.state for effect in client.effects(manifest.window_id)] == ["confirmed"]


@pytest.mark.parametrize("flow", ["dead", "uncertain", "diverged"])
def test_what_has_happened_is_confirmed_by_hand(program: Program, client: Accumulator, flow: str) -> None:
    manifest = handled(client, flow)
    assert program("approve", manifest.window_id, *BY).code == 1
    assert program("refuse", manifest.window_id, *BY).code == 1
    assert program("confirm", manifest.window_id, *BY).out == f"{manifest.window_id}: confirmed\n"
    settled = client.manifest(manifest.window_id)
    assert settled is not None
    assert settled.settled
    assert causes(client, manifest.window_id)[-1] == "confirm by ana: I asked the bank"


@pytest.mark.parametrize("flow", ["dead", "uncertain", "diverged", "approval"])
def test_what_waits_may_be_discarded(program: Program, client: Accumulator, flow: str) -> None:
    manifest = handled(client, flow)
    assert program("discard", manifest.window_id, *BY).out == f"{manifest.window_id}: discarded\n"
    settled = client.manifest(manifest.window_id)
    assert settled is not None
    assert settled.state == "discarded"
    assert client.attention() == []


def test_a_backlog_that_nobody_will_handle_is_given_up(program: Program, client: Accumulator) -> None:
    client.load_policy("lost", {"inactivity": "1h", "terminal_kinds": ["end"], "sink": "direct"})
    client.push_many([event(n, f"shop:lost:{n % 7}") for n in range(20)])
    first = client.manifests("shop:lost:0")[0]
    waiting = handled(client, "dead")
    assert client.manifests("shop:lost:0")[0].state == "retrying"  # HandlerMissing
    shown = program("discard", first.window_id, *BY)
    assert shown == (0, f"{first.window_id}: discarded\n", "")
    assert program("discard", "--flow", "lost", "--older-than", "1h", *BY).out == "0 manifests discarded\n"
    (told,) = program("discard", "--flow", "lost", "--state", "closed", "--json", *BY).json
    assert told == {"done": 13, "wrong_state": 0}
    assert program("discard", "--flow", "lost", *BY).out == "6 manifests discarded\n"
    assert {m.state for n in range(7) for m in client.manifests(f"shop:lost:{n}")} == {"discarded"}
    assert causes(client, client.manifests("shop:lost:6")[1].window_id) == ["discard by ana: I asked the bank"]
    assert client.discard(first.window_id, by="ana", reason="why") == Decided("wrong_state", "discarded")
    # One that an attempt is at work on is left.
    client.push(event(1, "shop:good:9"))
    [taken] = [one for p in range(4) for one in client.store.perform(client.operations.take(p, "direct", 9, 30_000))]
    grant = client.store.perform(client.operations.begin(taken.window_id, 1, "t" * 16, 60_000, 3))
    assert grant.manifest is not None
    shown = program("discard", taken.window_id, *BY)
    assert (shown.code, shown.out) == (1, f"{taken.window_id}: not discarded: it is processing\n")
    shown = program("discard", "--tenant", "shop", *BY)
    assert shown.out.splitlines() == [
        "1 manifest discarded", "1 manifest left: an attempt is at work, or it was settled meanwhile",
    ]  # fmt: skip
    assert client.manifest(waiting.window_id).state == "discarded"  # type: ignore[union-attr]
    named = [taken.window_id]
    for wrong in ([], [*named, "--flow", "good"], ["--state", "gone"], ["--older-than", "soon"], [*named, "--dry-run"]):
        assert program("discard", *wrong, *BY).code == 2, wrong
        assert program("replay", *wrong, *BY).code == 2, wrong


def test_a_dry_run_says_how_many_and_changes_nothing(program: Program, client: Accumulator) -> None:
    for n in range(3):
        handled(client, "dead", n)
    client.push(event("w", "shop:good:1"))
    client.push_many([event(n, f"shop:good:{n}", "unlisted") for n in range(4)])
    before = {window.window_id: window.state for n in range(3) for window in client.manifests(f"shop:dead:{n}")}
    for command, told in (
        (("discard", "--flow", "dead"), "3 manifests would be discarded\n"),
        (("discard", "--tenant", "shop", "--state", "closed"), "1 manifest would be discarded\n"),
        (("discard", "--older-than", "1h"), "0 manifests would be discarded\n"),
        (("replay", "--tenant", "shop"), "3 manifests would be handed out again\n"),
        (
            ("replay", "--state", "closed"),
            "0 manifests would be handed out again\n1 manifest would be left: not dead, uncertain or reconciling\n",
        ),
        (("reconcile", "accept", "--code", "unknown_kind"), "4 events would be accepted\n"),
        (("reconcile", "discard", "--flow", "good"), "4 events would be discarded\n"),
    ):
        assert program(*command, "--dry-run", *BY) == (0, told, ""), command
    assert program("discard", "--flow", "dead", "--dry-run", "--json", *BY).json == [{"done": 3, "wrong_state": 0}]
    [taken] = [one for p in range(4) for one in client.store.perform(client.operations.take(p, "direct", 9, 30_000))]
    assert client.store.perform(client.operations.begin(taken.window_id, 1, "t" * 16, 60_000, 3)).manifest is not None
    left = "0 manifests would be discarded\n1 manifest would be left: an attempt is at work\n"
    assert program("discard", "--flow", "good", "--dry-run", *BY).out == left
    assert {w.window_id: w.state for n in range(3) for w in client.manifests(f"shop:dead:{n}")} == before
    assert set(before.values()) == {"dead"}
    assert len(client.reconciliation()) == 4
    assert not [b for b, _ in client.open_buckets()]


def test_a_flow_without_a_policy_and_a_code_that_is_none_are_named(program: Program, client: Accumulator) -> None:
    for command in (
        ("attention",), ("discard", *BY), ("replay", "--dry-run", *BY), ("reconcile", "list"),
        ("reconcile", "accept", *BY), ("reconcile", "discard", *BY), ("ladders",),
    ):  # fmt: skip
        assert program(*command, "--flow", "goood").err == "there is no policy for the flow goood\n", command
        assert program(*command, "--flow", "good").err == "", command
    for command in (("reconcile", "list"), ("reconcile", "accept", *BY), ("reconcile", "discard", *BY)):
        shown = program(*command, "--code", "nonsense")
        assert shown.code == 2, command
        assert "conflict, unknown_kind, occurred_in_future" in " ".join(shown.err.replace("│", " ").split()), shown.err
    with pytest.raises(InvalidInput, match="code: must be one of conflict"):
        client.resolve_where("discard", by="ana", reason="why", code="nonsense")


def test_every_code_of_the_queue_can_be_asked_for() -> None:
    lua = Path(decisions.__file__).parent / "lua"
    text = "\n".join(path.read_text() for path in lua.glob("*.lua"))
    queued = re.findall(r"reconcile\('(\w+)'\)|'code', '(set_aside)'|rule, code = p\.\w+, '(\w+)'", text)
    assert {"".join(code) for code in queued} == set(decisions.CODES)


def test_all_that_are_dead_are_replayed(program: Program, client: Accumulator, calls: list[str]) -> None:
    for n in range(3):
        handled(client, "dead", n)
    assert program("replay", "--flow", "good", *BY).out == "0 manifests handed out again\n"
    assert program("replay", "--flow", "dead", "--effects", "not-done", *BY).out == "3 manifests handed out again\n"
    for n in range(3):
        until(client, f"shop:dead:{n}", "dead")
    assert calls == ["dead"] * 6


def test_reminders_that_wait_are_given_up(client: Accumulator) -> None:
    client.load_policy("bill", {"inactivity": "1h", "sink": "direct"})
    client.load_ladder("dun", {"steps": [{"name": f"s{n}", "offset": f"{n}s"} for n in range(4)], "final_wait": "9h"})
    started = client.start_ladder("dun", "shop:bill:1", datetime.now(UTC) - timedelta(hours=1))
    emitted = [f"{started.ladder_id}s{n}" for n in range(1, 5)]

    def states() -> list[str]:
        return [found.state for one in emitted if (found := client.emission(one))]

    assert states() == ["closed"] * 4
    work(client)
    assert states() == ["retrying", "closed", "closed", "closed"]  # nothing runs its steps
    assert client.discard(emitted[0], by="ana", reason="why").outcome == "done"
    assert client.discard(emitted[2], by="ana", reason="why").outcome == "done"
    [taken] = [one for p in range(4) for one in client.store.perform(client.operations.take(p, "direct", 9, 30_000))]
    assert taken.window_id == emitted[1]
    assert client.discard(emitted[1], by="ana", reason="why").outcome == "done"
    assert states() == ["discarded"] * 3 + ["closed"]
    assert client.decide_where("discard", by="ana", reason="why", flow="bill") == {"done": 1, "wrong_state": 0}


def test_of_several_each_is_decided(program: Program, client: Accumulator) -> None:
    first, good, second = handled(client, "dead", 1), handled(client, "good"), handled(client, "dead", 2)
    shown = program("discard", first.window_id, good.window_id, second.window_id, *BY)
    assert shown.code == 1
    assert shown.out.splitlines() == [
        f"{first.window_id}: discarded",
        f"{good.window_id}: not discarded: it is confirmed",
        f"{second.window_id}: discarded",
    ]


def test_who_and_why_are_asked_for(program: Program, client: Accumulator) -> None:
    manifest = handled(client, "dead")
    for who in (
        ["--by", "ana"],
        ["--reason", "x"],
        ["--by", " ", "--reason", "x"],
        ["--by", "ana", "--reason", "a\nb"],
    ):
        assert program("discard", manifest.window_id, *who).code == 2, who
        assert program("reconcile", "discard", "--code", "late", *who).code == 2, who
    assert [each.state for each in client.attention()] == ["dead"]
    with pytest.raises(InvalidInput, match="decision: must be one of approve"):
        client.store.perform(client.operations.decide(manifest.window_id, "burn", "ana", "why"))
    with pytest.raises(InvalidInput, match="effects: must be one of done, not_done"):
        client.replay(manifest.window_id, by="ana", reason="why", effects="perhaps")


# --- the reconciliation queue -----------------------------------------------------------------------------------------


def test_the_queue_is_listed_with_ages_and_without_payloads(program: Program, client: Accumulator) -> None:
    client.push(event(1, "shop:good:1", "unlisted", payload=SECRET))
    client.push(event(2, "zoo:dead:1", "unlisted", payload=SECRET))
    client.push(event(3, "shop:good:2", "odd"))
    client.push(event(4, "shop:good:2"))
    until(client, "shop:good:2", "confirmed")
    items = program("reconcile", "list", "--json").json
    assert [item["code"] for item in items] == ["unknown_kind", "unknown_kind", "set_aside"]
    assert (items[2]["event_id"], items[2]["why"], items[2]["window_version"]) == ("e3", "can't be read", 1)
    assert all(0 <= item["age"] < 60_000 for item in items)
    assert SECRET not in json.dumps(items) + program("reconcile", "list").out

    def listed(*filters: str) -> list[str]:
        return [item["event_id"] for item in program("reconcile", "list", "--json", *filters).json]

    assert listed("--code", "set_aside") == ["e3"]
    assert listed("--flow", "dead") == ["e2"]
    assert listed("--tenant", "shop", "--code", "unknown_kind") == ["e1"]
    assert listed("--older-than", "1h") == []
    assert program("reconcile", "list", "--older-than", "soon").code == 2
    few = program("reconcile", "list", "--limit", "2")
    assert len(few.out.splitlines()) == 3
    assert few.err == "and 1 more: --limit shows them\n"


def test_an_item_is_shown_and_its_payload_only_when_asked_for(program: Program, client: Accumulator) -> None:
    client.push(event(1, "shop:good:1", "unlisted", payload={"card": SECRET}, ref="db/7", source_version=3))
    (item,) = client.reconciliation()
    shown = program("reconcile", "show", item.item_id)
    assert shown.code == 0
    for text in (item.item_id, "unknown_kind", "shop:good:1", "e1 (unlisted) of test", "db/7"):
        assert text in shown.out
    assert SECRET not in shown.out
    assert json.dumps({"card": SECRET}) in program("reconcile", "show", item.item_id, "--payload").out
    (told,) = program("reconcile", "show", item.item_id, "--json").json
    assert "payload" not in told
    (told,) = program("reconcile", "show", item.item_id, "--json", "--payload").json
    assert told["payload"] == {"card": SECRET}
    client.push(event(2, "shop:good:1", "unlisted", payload=b"\x00\xff"))
    (told,) = program("reconcile", "show", client.reconciliation()[-1].item_id, "--json", "--payload").json
    assert told["payload_bytes"] == "AP8="


def test_an_accepted_event_joins_the_next_window(program: Program, client: Accumulator) -> None:
    client.push(event(1, "shop:good:1", "unlisted", payload=7))
    (item,) = client.reconciliation()
    shown = program("reconcile", "accept", item.item_id, *BY)
    assert shown == (0, f"{item.item_id}: accepted into window 1\n", "")
    (stored,) = client.open_events("shop:good:1")
    assert (stored.event.event_id, stored.event.payload, stored.reconciled) == ("e1", 7, True)
    assert client.reconciliation() == []
    again = program("reconcile", "accept", item.item_id, *BY)
    assert (again.code, again.out) == (1, f"{item.item_id}: no such item waits\n")
    assert program("reconcile", "show", item.item_id) == (1, "", "accumulator: no such item waits\n")
    client.push(event(2, "shop:good:1"))
    done = until(client, "shop:good:1", "confirmed")
    assert [entry.reconciled for entry in done.record] == [True, False]


def test_who_resolved_an_item_and_why_is_kept(program: Program, client: Accumulator, namespace: str) -> None:
    client.push(event(1, "shop:good:1", "unlisted"))
    (item,) = client.reconciliation()
    (told,) = program("reconcile", "discard", item.item_id, *BY, "--json").json
    assert told == {"item_id": item.item_id, "outcome": "discarded", "window_version": None}
    partition = item.item_id.split("-")[0]
    with redis.Redis.from_url(program_url(client), protocol=2) as control:
        ((_, fields),) = control.xrevrange(f"{namespace}:{{{partition}}}:audit", count=1)
    assert (fields[b"outcome"], fields[b"by"], fields[b"why"]) == (b"discarded", b"ana", b"I asked the bank")


def program_url(client: Accumulator) -> str:
    options = client.store.client.connection_pool.connection_kwargs  # type: ignore[union-attr]
    return f"redis://{options['host']}:{options['port']}/0"


def test_items_of_one_instant_have_ids_of_their_own(client: Accumulator) -> None:
    for n in range(8):
        client.push(event(n, f"shop:good:{n}", "unlisted"))
    items = client.reconciliation()
    assert len({item.item_id for item in items}) == 8
    for item in items:
        assert client.store.perform(client.operations.reconcile_item(item.item_id)) == item


def test_all_that_match_are_resolved(program: Program, client: Accumulator) -> None:
    client.push_many([event(n, f"shop:good:{n % 7}", "unlisted") for n in range(450)])
    client.push_many([event(n, f"zoo:good:{n}", "unlisted") for n in range(3)])
    client.push(event(1, "shop:dead:1", "unlisted"))
    assert program("reconcile", "discard", *BY, "--flow", "good", "--older-than", "1h").out == "0 events discarded\n"
    shown = program("reconcile", "discard", *BY, "--flow", "good", "--tenant", "shop", "--code", "unknown_kind")
    assert shown == (0, "450 events discarded\n", "")
    assert program("reconcile", "accept", *BY, "--flow", "good", "--json").json == [{"accepted": 3, "missing": 0}]
    assert sorted(key for key, _ in client.open_buckets()) == ["zoo:good:0", "zoo:good:1", "zoo:good:2"]
    (left,) = client.reconciliation()
    assert left.event.flow == "dead"
    assert client.resolve_where("discard", by="ana", reason="why", older_than=1) in (
        {"discarded": 1, "missing": 0},
        {"discarded": 0, "missing": 0},
    )


def test_a_filter_or_items_never_both_and_never_none(program: Program, client: Accumulator) -> None:
    client.push(event(1, "shop:good:1", "unlisted"))
    (item,) = client.reconciliation()
    for arguments in ([], [item.item_id, "--code", "unknown_kind"]):
        for command in ("accept", "discard"):
            assert program("reconcile", command, *BY, *arguments).code == 2
    with pytest.raises(InvalidInput, match="filter: is missing"):
        client.resolve_where("discard", by="ana", reason="why")
    with pytest.raises(InvalidInput, match="decision: must be one of accept, discard"):
        client.resolve(item, "keep", by="ana", reason="why")
    assert len(client.reconciliation()) == 1


def test_ids_that_no_queue_gave_are_refused(program: Program, client: Accumulator) -> None:
    for wrong in ("", "x", "1-2", "1-2-x", "-1-2-3", "99-1-1", "1-2-3-4", "1-٣-3"):
        assert program("reconcile", "show", "--", wrong).code == 2, wrong
        assert program("reconcile", "discard", *BY, "--", wrong) == (1, f"{wrong}: no such item waits\n", "")
    assert client.resolve("1-1-1", "accept", by="ana", reason="why") == Resolved("1-1-1", "missing")


# --- health, and everything else --------------------------------------------------------------------------------------


def test_health_says_what_is_wrong(program: Program, client: Accumulator) -> None:
    shown = program("health")
    assert shown.code == 1
    assert "problem: no worker is alive" in shown.out
    assert shown.out.endswith("not healthy\n")
    sign = sign_of_life("w1", ["closer", "runner", "janitor"], FLOWS)
    client.store.perform(client.operations.beat(sign))
    handled(client, "dead")
    shown = program("health")
    assert shown.code == 0
    assert "warning: 1 manifest dead" in shown.out
    (told,) = program("health", "--json").json
    assert (told["ok"], told["problems"], told["people"]["dead"]["count"]) == (True, [], 1)
    assert client.health().ok


def test_the_same_for_asyncio(client: Accumulator, server: EmbeddedServer, namespace: str) -> None:
    approval, second = handled(client, "approval", 1), handled(client, "approval", 2)
    dead, other, third = (handled(client, "dead", n) for n in (1, 2, 3))
    client.push_many([event(n, f"shop:good:{n}", "unlisted") for n in range(3)])
    one, two, _ = client.reconciliation()
    why: dict[str, Any] = {"by": "ana", "reason": "why"}

    async def decide() -> None:
        async with AsyncAccumulator(server.url, namespace=namespace) as mine:
            assert await mine.attention() == client.attention()
            assert await mine.attention("dead") == client.attention("dead")
            assert await mine.effects(dead.window_id) == []
            assert await mine.approve(approval.window_id, **why) == Decided("done", "retrying")
            assert await mine.refuse(second.window_id, **why) == Decided("done", "refused")
            assert await mine.replay(dead.window_id, **why) == Decided("done", "retrying")
            assert await mine.confirm(other.window_id, **why) == Decided("done", "confirmed")
            assert await mine.decide_where("discard", state="dead", **why) == {
                "done": 1,
                "wrong_state": 0,
            }
            assert await mine.discard(third.window_id, **why) == Decided("wrong_state", "discarded")
            accepted = await mine.resolve(one, "accept", **why)
            assert accepted.receipt is not None
            assert (accepted.outcome, accepted.receipt.window_version) == ("accepted", 1)
            assert await mine.resolve(two.item_id, "discard", **why) == Resolved(two.item_id, "discarded")
            assert await mine.resolve_where("discard", flow="good", **why) == {"discarded": 1, "missing": 0}
            assert not (await mine.health()).ok

    asyncio.run(decide())


COMMANDS = [
    *([c.name or getattr(c.callback, "__name__", "")] for c in cli_operate.app.registered_commands),
    *(["reconcile", c.name or ""] for c in cli_operate.reconcile_app.registered_commands),
]


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_each_command_has_its_help(program: Program, command: list[str]) -> None:
    shown = program(*command, "--help")
    assert shown.code == 0
    assert f"Usage: accumulator {' '.join(command)}" in shown.out


@pytest.mark.parametrize(
    "arguments",
    [
        ["attention"],
        ["timeline", "1" * 20],
        ["discard", "1" * 20, *BY],
        ["reconcile", "list"],
        ["reconcile", "show", "1-1-1"],
        ["reconcile", "discard", "1-1-1", *BY],
        ["reconcile", "discard", "--code", "late", *BY],
        ["health"],
        ["export", "-"],
    ],
    ids=lambda arguments: " ".join(arguments[:2]),
)
def test_no_server_is_3_and_one_line(program: Program, monkeypatch: pytest.MonkeyPatch, arguments: list[str]) -> None:
    monkeypatch.setenv("ACCUMULATOR_REDIS_URL", "redis://:geheim@127.0.0.1:1/0")
    shown = program(*arguments)
    assert shown.code == 3
    assert "accumulator: the server can't be reached" in shown.err
    assert "geheim" not in shown.err
    assert len(shown.err.splitlines()) == 1
