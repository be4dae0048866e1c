"""What a handler is told and may do (SPEC, section 6): effects, stages, approvals, checkpoints."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from typing import Any

import pytest

import accumulator.handlers
from accumulator.context import Context, LeaseLost, NeedsApproval, Uncertain
from accumulator.errors import InvalidInput
from accumulator.handlers import Diverged, NotDone, PermanentError, Stages, handler
from accumulator.runner import Attempt, run_attempt
from tests.conftest import MakeClient
from tests.life import KEY, LEASE, OTHER, TOKEN, Life


@pytest.fixture(autouse=True)
def registry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is registered."""
    monkeypatch.setattr(accumulator.handlers, "_registry", {})
    monkeypatch.setattr(accumulator.handlers, "_names", {})


@pytest.fixture
def life(make_client: MakeClient, namespace: str) -> Iterator[Life]:
    life = Life(make_client(), namespace)
    yield life
    life.check()


# --- effects ----------------------------------------------------------------------------------------------------------


def test_the_ledger(life: Life) -> None:
    life.policy()
    window_id = life.close("e1")
    life.begun(window_id)
    ask = life.effect
    # Steps without a beginning.
    assert [ask(window_id, "pay", step) for step in ("confirm", "doubt", "again")] == ["refused"] * 3
    assert ask(window_id, "pay", "undo") == "undone"
    assert life.do(life.ops.effects(window_id)) == []
    # Each step twice.
    assert [ask(window_id, "pay", "begin") for _ in range(2)] == ["begun"] * 2
    assert [ask(window_id, "pay", "undo") for _ in range(2)] == ["undone"] * 2
    assert [ask(window_id, "pay", "begin", "n2") for _ in range(2)] == ["begun"] * 2
    assert [ask(window_id, "pay", "doubt", "n2") for _ in range(2)] == ["uncertain"] * 2
    assert ask(window_id, "pay", "begin", "n2") == "uncertain"  # not even the one that began it begins again unasked
    assert ask(window_id, "pay", "begin", "n3") == "uncertain"
    assert [ask(window_id, "pay", "again", "n3") for _ in range(2)] == ["begun"] * 2
    assert ask(window_id, "pay", "again", "n4") == "refused"
    assert ask(window_id, "pay", "begin", "n4") == "uncertain"
    assert ask(window_id, "pay", "again", "n4") == "begun"
    life.tick(5)
    told = [life.do(life.ops.effect(window_id, TOKEN, "pay", "confirm", "n4", f'"r{n}"')) for n in range(2)]
    assert told == [("confirmed", '"r0"')] * 2
    for step in ("begin", "again", "confirm", "doubt", "undo"):
        assert life.do(life.ops.effect(window_id, TOKEN, "pay", step, "n5", '"r5"')) == ("confirmed", '"r0"')
    assert life.do(life.ops.effects(window_id)) == [("pay", "confirmed", 1, life.clock.now, '"r0"')]


def test_an_effect_of_an_attempt_that_died_is_uncertain(life: Life) -> None:
    life.policy()
    window_id = life.close("e1")
    life.begun(window_id)
    assert life.effect(window_id, "pay", "begin", "n1") == "begun"
    assert life.effect(window_id, "tell", "begin", "n2") == "begun"
    assert life.effect(window_id, "tell", "confirm", "n2", "7") == "confirmed"
    life.tick(LEASE)
    life.tick(1)
    life.taken()
    life.begin(window_id, 2, OTHER)
    assert life.effect(window_id, "pay", "confirm", "n1") == "refused"  # the dead one has no say
    assert life.effect(window_id, "pay", "begin", "n3", token=OTHER) == "uncertain"
    assert life.do(life.ops.effect(window_id, OTHER, "tell", "begin", "n4", "")) == ("confirmed", "7")
    assert [e[:3] for e in life.do(life.ops.effects(window_id))] == [("pay", "uncertain", 2), ("tell", "confirmed", 1)]


class World:
    """What the effects of a handler change outside; `dies` makes the call lose its answer."""

    def __init__(self) -> None:
        self.done: Counter[str] = Counter()
        self.asked: list[str] = []
        self.dies = 0

    def call(self, key: str) -> str:
        self.done[key] += 1
        if self.dies:
            self.dies -= 1
            raise ConnectionError("no answer")
        return f"receipt of {key}"

    def verify(self, key: str) -> Any:
        self.asked.append(key)
        return f"receipt of {key}" if self.done[key] else False


def test_an_effect_is_done_once_and_its_result_returned(life: Life) -> None:
    world, results = World(), []

    @handler("f", backoff="1ms", max_backoff="1ms")
    def handle(ctx: Context) -> None:
        results.append(ctx.once("charge", world.call))
        with ctx.effect("mail") as mail:
            if mail.needed:
                mail.result = {"to": [1, None]}
        results.append(mail.result)
        with ctx.effect("nothing") as nothing:
            results.append(nothing.needed)
        assert nothing.result is None
        if ctx.attempt < 3:
            raise ValueError

    life.policy()
    window_id = life.close("e1")
    assert [how for _, how in life.work()] == ["failed", "failed", "confirmed"]
    key = f"{window_id}:charge"
    assert world.done == {key: 1}
    once = [f"receipt of {key}", {"to": [1, None]}]
    assert results == [*once, True, *once, False, *once, False]


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("happened", [True, False])
def test_verify_decides_what_became_of_an_uncertain_effect(life: Life, happened: bool, is_async: bool) -> None:
    world, results = World(), []

    def call(key: str) -> str:
        if happened or world.dies == 0:
            return world.call(key)
        world.dies -= 1
        raise ConnectionError

    async def verify_async(key: str) -> Any:
        await asyncio.sleep(0)
        return world.verify(key)

    @handler("f", backoff="1ms", max_backoff="1ms")
    def handle(ctx: Context) -> None:
        results.append(ctx.once("charge", call, verify=verify_async if is_async else world.verify))

    world.dies = 1
    life.policy()
    window_id = life.close("e1")
    assert [how for _, how in life.work()] == ["failed", "confirmed"]
    key = f"{window_id}:charge"
    assert (world.done, world.asked, results) == ({key: 1}, [key], [f"receipt of {key}"])
    [ledger] = life.do(life.ops.effects(window_id))
    assert (ledger.state, ledger.attempt, ledger.result) == ("confirmed", 2, f'"receipt of {key}"')


@pytest.mark.parametrize("verify", [None, lambda key: None])
def test_an_effect_that_nobody_can_tell_of_waits_for_a_person(life: Life, verify: Callable[[str], Any] | None) -> None:
    world = World()

    @handler("f", backoff="1ms", max_backoff="1ms")
    def handle(ctx: Context) -> None:
        ctx.once("charge", world.call, verify=verify)

    world.dies = 1
    life.policy()
    window_id, second = life.close("e1"), life.close("e2")
    assert [how for _, how in life.work()] == ["failed", "uncertain", "confirmed"]
    manifest = life.manifest(window_id)
    assert (manifest.state, manifest.error) == ("uncertain", "Uncertain: charge")
    assert life.state(second) == "confirmed"
    assert world.done[f"{window_id}:charge"] == 1
    # As it stands, it is uncertain again.
    assert life.decide(window_id, "replay") == ("done", "retrying")
    assert life.work() == [(window_id, "uncertain")]
    assert world.done[f"{window_id}:charge"] == 1


def test_a_verify_that_raises_is_asked_again_and_the_effect_stays_in_doubt(life: Life) -> None:
    world, asked = World(), []

    def verify(key: str) -> bool:
        asked.append(key)
        if len(asked) < 3:
            raise ConnectionError("the bank does not answer")
        return bool(world.done[key])

    @handler("f", max_attempts=9, backoff="1ms", max_backoff="1ms")
    def handle(ctx: Context) -> None:
        ctx.once("charge", world.call, verify=verify)

    world.dies = 1
    life.policy()
    window_id = life.close("e1")
    [taken] = life.take()
    run_attempt(life.acc, *taken[:2])
    life.tick(1)
    [taken] = life.take()
    assert run_attempt(life.acc, *taken[:2]) == "failed"
    assert life.manifest(window_id).error == "ConnectionError: the bank does not answer"
    assert [e.state for e in life.do(life.ops.effects(window_id))] == ["uncertain"]
    assert [how for _, how in life.work()] == ["failed", "confirmed"]
    assert (world.done[f"{window_id}:charge"], len(asked)) == (1, 3)


def test_verify_says_only_that_it_happened(life: Life) -> None:
    world, results = World(), []

    @handler("f", backoff="1ms", max_backoff="1ms")
    def handle(ctx: Context) -> None:
        results.append(ctx.once("charge", world.call, verify=lambda key: True))

    world.dies = 1
    life.policy()
    window_id = life.close("e1")
    life.work()
    assert (life.state(window_id), results) == ("confirmed", [None])


def test_a_call_that_surely_did_not_happen_is_made_again(life: Life) -> None:
    tries = []

    @handler("f", backoff="1ms", max_backoff="1ms")
    def handle(ctx: Context) -> None:
        with ctx.effect("charge") as effect:
            tries.append(effect.key)
            if len(tries) < 3:
                raise NotDone

    life.policy()
    window_id = life.close("e1")
    assert [how for _, how in life.work()] == ["failed", "failed", "confirmed"]
    assert tries == [f"{window_id}:charge"] * 3


def test_effects_of_single_events_are_skipped_once_they_are_done(life: Life) -> None:
    done: list[str] = []

    @handler("f", backoff="1ms", max_backoff="1ms")
    def handle(ctx: Context) -> None:
        for entry in ctx.events:
            with ctx.effect("post", event_id=entry.event.event_id) as effect:
                if effect.needed:
                    if entry.event.event_id == "e:7" and ctx.attempt == 1:
                        raise NotDone
                    done.append(effect.key)

    life.policy()
    window_id = life.close(*(f"e:{n}" for n in range(1, 11)))
    assert [how for _, how in life.work()] == ["failed", "confirmed"]
    assert done == [f"{window_id}:post:e:{n}" for n in range(1, 11)]
    assert {(e.name, e.attempt) for e in life.do(life.ops.effects(window_id))} == {
        (f"post:e:{n}", 1 if n < 7 else 2) for n in range(1, 11)
    }


def test_asynchronous_effects(life: Life) -> None:
    world, results = World(), []

    async def call(key: str) -> str:
        await asyncio.sleep(0)
        return world.call(key)

    async def verify(key: str) -> Any:
        await asyncio.sleep(0)
        return world.verify(key)

    @handler("f", backoff="1ms", max_backoff="1ms")
    async def handle(ctx: Context) -> None:
        async with ctx.effect("mail", verify=verify) as mail:
            if mail.needed:
                mail.result = await call(mail.key)
        results.append(mail.result)
        results.append(ctx.once("charge", call, verify=verify))

    life.policy()
    world.dies = 1
    window_id = life.close("e1")
    assert [how for _, how in life.work()] == ["failed", "confirmed"]
    assert world.done == {f"{window_id}:mail": 1, f"{window_id}:charge": 1}
    assert results == [f"receipt of {window_id}:mail", f"receipt of {window_id}:charge"]


def test_one_effect_object_begins_anew_each_time(life: Life) -> None:
    life.policy()
    window_id = life.close("e1")
    ctx = life.context(life.begun(window_id))
    effect = ctx.effect("charge")
    with pytest.raises(ValueError), effect:  # noqa: PT011
        raise ValueError
    with pytest.raises(Uncertain, match="charge"), effect:
        raise AssertionError("begun again unasked")
    [ledger] = life.do(life.ops.effects(window_id))
    assert ledger.state == "uncertain"


def test_a_lease_that_ends_within_an_effect(life: Life) -> None:
    life.policy()
    window_id = life.close("e1")
    ctx = life.context(life.begun(window_id))
    with pytest.raises(LeaseLost), ctx.effect("charge"):
        life.tick(LEASE)
    life.tick(1)
    with pytest.raises(LeaseLost), ctx.effect("mail"):
        raise AssertionError("begun without a lease")
    with pytest.raises(LeaseLost):
        ctx.set_aside("e1", "odd")
    assert [(e.name, e.state) for e in life.do(life.ops.effects(window_id))] == [("charge", "begun")]
    assert life.state(window_id) == "retrying"


def test_a_handler_that_lost_its_lease_says_nothing(life: Life) -> None:
    @handler("f", timeout="50s")
    def handle(ctx: Context) -> None:
        if ctx.attempt == 1:
            life.tick(LEASE)
            ctx.once("charge", print)

    life.policy()
    window_id = life.close("e1")
    [taken] = life.take()
    assert run_attempt(life.acc, *taken[:2]) is None
    assert life.story(window_id)[-1][1:] == ("retrying", 1, "lease_ended")
    life.work()
    assert life.state(window_id) == "confirmed"


@pytest.mark.parametrize("name", ["", "a:b", "x" * 201, "aside"])
def test_names_of_effects(life: Life, name: str) -> None:
    life.policy()
    ctx = life.context(life.begun(life.close("e1")))
    with pytest.raises(InvalidInput, match="effect"):
        ctx.effect(name)


def test_a_result_that_is_no_json_is_refused_and_the_effect_stays_in_doubt(life: Life) -> None:
    life.policy()
    window_id = life.close("e1")
    ctx = life.context(life.begun(window_id))
    for result in (object(), "x" * 70_000):
        with pytest.raises(InvalidInput, match="charge"), ctx.effect("charge", verify=lambda key: False) as effect:
            effect.result = result
    assert [e.state for e in life.do(life.ops.effects(window_id))] == ["begun"]


# --- stages -----------------------------------------------------------------------------------------------------------


class Staged:
    """Registers a handler in stages whose steps are written down; `fails` names stages that raise once."""

    def __init__(self, **stages: Any) -> None:
        self.told: list[str] = []
        self.fails: list[str] = []
        outer = self

        def made(name: str, what: Any) -> Callable[..., Any]:
            def stage(self: Stages, ctx: Context, *key: str) -> Any:
                outer.told.append(name)
                if name in outer.fails:
                    outer.fails.remove(name)
                    raise ValueError(name)
                return what(ctx, *key) if callable(what) else what

            return stage

        kind = type("Made", (Stages,), {name: made(name, what) for name, what in stages.items()})
        handler("f", backoff="1ms", max_backoff="1ms")(kind)

    def since(self) -> list[str]:
        told, self.told = self.told, []
        return told


def test_stages_in_their_order(life: Life) -> None:
    staged = Staged(
        load={"stock": 3},
        interpret=lambda ctx: ctx.results["load"]["stock"],
        propose=lambda ctx: ctx.results["interpret"],
        approve=False,
        revalidate=True,
        execute=lambda ctx, key: [key, ctx.results["propose"]],
        confirm=lambda ctx: ctx.results["execute"][1] == 3,
    )
    life.policy()
    window_id = life.close("e1")
    assert life.work() == [(window_id, "confirmed")]
    assert staged.told == ["load", "interpret", "propose", "revalidate", "approve", "execute", "confirm"]
    assert life.do(life.ops.stages(window_id)) == {"load": '{"stock":3}', "interpret": "3", "propose": "3"}
    [effect] = life.do(life.ops.effects(window_id))
    assert (effect.name, effect.state) == ("execute", "confirmed")


@pytest.mark.parametrize("failing", ["load", "interpret", "propose", "approve", "revalidate", "confirm"])
def test_a_retry_goes_on_where_the_stages_stopped(life: Life, failing: str) -> None:
    staged = Staged(
        load=1, interpret=2, propose=3, approve=False, revalidate=True, execute=lambda ctx, key: "done", confirm=True
    )
    staged.fails = [failing]
    life.policy()
    life.close("e1")
    assert [how for _, how in life.work()] == ["failed", "confirmed"]
    paid = ["load", "interpret", "propose"]
    free = ["revalidate", "approve"]
    if failing in paid:
        done = paid[: paid.index(failing)]
        assert staged.told == [*done, failing, *paid[len(done) :], *free, "execute", "confirm"]
    elif failing in free:
        first = free[: free.index(failing) + 1]
        assert staged.told == [*paid, *first, *free, "execute", "confirm"]
    else:
        # What was executed is not executed again, nor proposed or validated anew: the world is another one by now.
        assert staged.told == [*paid, *free, "execute", "confirm", "confirm"]


@pytest.mark.parametrize("happened", [False, True, None])
def test_an_execute_that_lost_its_answer(life: Life, happened: bool | None) -> None:
    staged = Staged(
        propose=1, revalidate=True, execute=lambda ctx, key: "done", verify=happened,
        confirm=lambda ctx: ctx.results["execute"] in ("done", None),
    )  # fmt: skip
    staged.fails = ["execute"]
    life.policy()
    window_id = life.close("e1")
    endings = [how for _, how in life.work()]
    before = ["propose", "revalidate", "execute", "verify"]
    if happened is None:
        assert (endings, staged.told) == (["failed", "uncertain"], before)
        assert life.decide(window_id, "replay", "done") == ("done", "retrying")
        life.work()
        assert staged.told == [*before, "confirm"]
    elif happened:
        assert (endings, staged.told) == (["failed", "confirmed"], [*before, "confirm"])
    else:
        assert endings == ["failed", "confirmed"]
        assert staged.told == [*before, "revalidate", "execute", "confirm"]
    assert life.state(window_id) == "confirmed"


def test_a_proposal_that_does_not_hold_any_more_is_made_anew(life: Life) -> None:
    valid = iter([False, True])
    loads = iter([1, 2])
    staged = Staged(
        load=lambda ctx: next(loads), propose=lambda ctx: ctx.results["load"], revalidate=lambda ctx: next(valid),
        execute=lambda ctx, key: ctx.results["propose"],
    )  # fmt: skip
    life.policy()
    window_id = life.close("e1")
    assert life.work() == [(window_id, "confirmed")]
    assert staged.told == ["load", "propose", "revalidate", "load", "propose", "revalidate", "execute"]
    assert life.do(life.ops.effects(window_id))[0].result == "2"


def test_a_proposal_that_never_holds_has_failed(life: Life) -> None:
    staged = Staged(propose=1, revalidate=False, execute=lambda ctx, key: None)
    life.policy()
    window_id = life.close("e1")
    [taken] = life.take()
    assert run_attempt(life.acc, *taken[:2]) == "failed"
    assert staged.told == ["propose", "revalidate"] * 3
    assert life.story(window_id)[-1][1:] == ("retrying", 1, "Stale")
    assert life.do(life.ops.stages(window_id)) == {}
    assert life.do(life.ops.effects(window_id)) == []


def test_an_approval_and_what_comes_after_it(life: Life) -> None:
    staged = Staged(propose="pay 7", approve=True, revalidate=True, execute=lambda ctx, key: ctx.approved_by)
    life.policy()
    window_id = life.close("e1")
    assert life.work() == [(window_id, "awaiting_approval")]
    assert staged.since() == ["propose", "revalidate", "approve"]
    assert life.do(life.ops.attention()) == [window_id]
    life.tick(60_000)
    assert life.decide(window_id, "approve") == ("done", "retrying")
    assert life.work() == [(window_id, "confirmed")]
    assert staged.since() == ["revalidate", "execute"]
    assert life.do(life.ops.effects(window_id))[0].result == '"ana"'
    assert (*life.story(window_id)[3][1:],) == ("retrying", 1, "approve by ana: seen")
    assert life.manifest(window_id).approved_by == "ana"

    refused = life.close("e2")
    assert life.work() == [(refused, "awaiting_approval")]
    assert life.decide(refused, "refuse") == ("done", "refused")
    assert life.work() == []
    assert life.story(refused)[-1][1:] == ("refused", 1, "refuse by ana: seen")
    assert life.do(life.ops.effects(refused)) == []


def test_an_approval_is_of_one_proposal_only(life: Life) -> None:
    """A proposal that fell with its revalidation takes its approval along, also where the process dies right then."""
    valid, versions = [True, False, True], iter(range(1, 9))
    first = ["propose", "revalidate", "approve"]
    staged = Staged(
        propose=lambda ctx: next(versions), approve=True, revalidate=lambda ctx: not valid or valid.pop(0),
        execute=lambda ctx, key: ctx.results["propose"],
    )  # fmt: skip
    life.policy()
    window_id = life.close("e1")
    life.work()
    assert life.decide(window_id, "approve") == ("done", "retrying")
    # The second attempt dies after it has dropped what was approved and made another proposal.
    life.tick(1)
    [taken] = life.take()
    manifest = life.begin(window_id, taken.attempt).manifest
    assert manifest is not None
    ctx = life.context(manifest)
    with pytest.raises(NeedsApproval):
        ctx.run()
    assert staged.since() == [*first, "revalidate", *first]
    life.tick(LEASE)
    assert life.manifest(window_id).approved_by is None
    assert life.work() == [(window_id, "awaiting_approval")]
    assert life.decide(window_id, "approve") == ("done", "retrying")
    life.work()
    assert life.do(life.ops.effects(window_id))[0].result == "2"


def test_nobody_is_asked_to_approve_what_does_not_hold(life: Life) -> None:
    valid = iter([False, True, True])
    staged = Staged(propose=1, revalidate=lambda ctx: next(valid), approve=True, execute=lambda ctx, key: None)
    life.policy()
    window_id = life.close("e1")
    assert life.work() == [(window_id, "awaiting_approval")]
    assert staged.since() == ["propose", "revalidate", "propose", "revalidate", "approve"]
    assert life.decide(window_id, "approve") == ("done", "retrying")
    assert life.work() == [(window_id, "confirmed")]
    assert staged.since() == ["revalidate", "execute"]


def test_a_world_that_diverged_goes_to_reconciliation(life: Life) -> None:
    def diverged(_: Context) -> None:
        raise Diverged("there are two parcels")

    staged = Staged(execute=lambda ctx, key: "sent", confirm=diverged)
    life.policy()
    window_id, second = life.close("e1"), life.close("e2")
    assert life.work() == [(window_id, "reconciling"), (second, "reconciling")]
    assert life.manifest(window_id).error == "Diverged: there are two parcels"
    assert life.decide(window_id, "confirm") == ("done", "confirmed")
    assert life.decide(second, "replay") == ("done", "retrying")
    staged.since()
    assert life.work() == [(second, "reconciling")]
    assert staged.since() == ["confirm"]


def test_confirm_says_no(life: Life) -> None:
    Staged(execute=lambda ctx, key: "sent", confirm=False)
    life.policy()
    window_id = life.close("e1")
    assert life.work() == [(window_id, "reconciling")]


def test_asynchronous_stages(life: Life) -> None:
    told = []

    async def load(ctx: Context) -> int:
        await asyncio.sleep(0)
        told.append("load")
        return 7

    async def execute(ctx: Context, key: str) -> int:
        told.append("execute")
        return int(ctx.results["load"])

    Staged(load=load, execute=execute)
    life.policy()
    window_id = life.close("e1")
    assert life.work() == [(window_id, "confirmed")]
    assert told == ["load", "execute"]
    assert life.do(life.ops.effects(window_id))[0].result == "7"


def test_what_a_stage_made_is_the_same_for_each_attempt(life: Life) -> None:
    seen = []
    staged = Staged(
        load=lambda ctx: {"at": datetime(2026, 1, 1, tzinfo=UTC), "pair": (1, 2)},
        propose=lambda ctx: seen.append(ctx.results["load"]),
        approve=True,
        execute=lambda ctx, key: seen.append(ctx.results["load"]),
    )
    life.policy()
    window_id = life.close("e1")
    life.work()
    assert life.decide(window_id, "approve") == ("done", "retrying")
    assert life.work() == [(window_id, "confirmed")]
    assert seen == [{"at": "2026-01-01T00:00:00+00:00", "pair": [1, 2]}] * 2
    assert staged.told == ["load", "propose", "approve", "execute"]


def test_what_a_stage_keeps_is_bounded(life: Life) -> None:
    Staged(load=lambda ctx: "x" * 70_000, propose=1)
    life.policy()
    window_id = life.close("e1")
    [taken] = life.take()
    assert run_attempt(life.acc, *taken[:2]) == "failed"
    assert life.story(window_id)[-1][1:] == ("retrying", 1, "InvalidInput")
    assert life.do(life.ops.stages(window_id)) == {}


# --- what a handler is told -------------------------------------------------------------------------------------------


def test_a_checkpoint_goes_to_the_next_window(life: Life) -> None:
    told: list[Any] = []
    fail = [True]

    @handler("f", backoff="1ms", max_backoff="1ms")
    def handle(ctx: Context) -> None:
        before = ctx.predecessor
        told.append((ctx.checkpoint, ctx.manifest.relation, before and before.close_reason))
        ctx.leave({"seen": ctx.manifest.window_version})
        if ctx.manifest.window_version == 2 and fail:
            fail.pop()
            raise ValueError
        if ctx.manifest.window_version == 3:
            raise PermanentError

    life.policy()
    windows = [life.close(f"e{n}") for n in range(4)]
    life.work()
    assert told == [
        (None, "first", None),
        ({"seen": 1}, "after_close", "flush"),
        ({"seen": 1}, "after_close", "flush"),
        ({"seen": 2}, "after_close", "flush"),
        ({"seen": 2}, "after_close", "flush"),  # one that died leaves nothing
    ]
    # One that is replayed neither sees nor overwrites what later ones left.
    life.decide(windows[2], "discard")
    third = life.close("e9")
    life.begun(third)
    life.settle(third, "dead", checkpoint='"dead"')
    assert life.do(life.ops.checkpoint(KEY)) == (4, '{"seen":4}')
    fourth = life.close("e10")
    life.begun(fourth)
    assert life.settle(fourth, "confirmed", checkpoint='"sixth"') == "done"
    assert life.decide(third, "replay") == ("done", "retrying")
    assert life.context(life.begun(third, OTHER), OTHER).checkpoint is None
    assert life.settle(third, "confirmed", token=OTHER, checkpoint='"fifth"') == "done"
    assert life.do(life.ops.checkpoint(KEY)) == (6, '"sixth"')


def test_a_checkpoint_is_bounded(life: Life) -> None:
    life.policy()
    ctx = life.context(life.begun(life.close("e1")))
    ctx.leave("x" * ((16 << 10) - 2))
    for value in ("x" * (16 << 10), object()):
        with pytest.raises(InvalidInput, match="checkpoint"):
            ctx.leave(value)


def test_events_in_the_order_of_their_sources(life: Life) -> None:
    life.policy(order_by="source_version", max_events=100)
    life.close("old", source="crm", source_version=4)
    for event_id, source, version in [
        ("a7", "crm", 7), ("b1", "erp", 1), ("a5", "crm", 5), ("n", "crm", None), ("a8", "crm", 8), ("b3", "erp", 3),
        ("a3", "crm", 3), ("big", "erp", 2**63 - 1),
    ]:  # fmt: skip
        life.push(event_id, source=source, source_version=version)
    second = life.close()
    [first] = life.taken()
    life.begin(first)
    life.settle(first, "confirmed")
    ctx = life.context(life.begun(second, OTHER), OTHER)
    assert [(o.entry.event.event_id, o.gap, o.late) for o in ctx.in_order()] == [
        ("a3", False, True), ("a5", True, False), ("a7", True, False), ("a8", False, False), ("n", False, False),
        ("b1", False, False), ("b3", True, False), ("big", True, False),
    ]  # fmt: skip
    assert [e.event.event_id for e in ctx.events] == ["a7", "b1", "a5", "n", "a8", "b3", "a3", "big"]


def test_events_by_their_instants_and_by_acceptance(life: Life) -> None:
    life.policy(order_by="occurred_at")
    early, late = life.clock.instant, life.clock.instant.replace(second=30)
    life.push("x", occurred_at=late)
    life.push("y", source="other")
    life.push("z", occurred_at=early)
    ctx = life.context(life.begun(life.close()))
    assert [(o.entry.event.event_id, o.gap) for o in ctx.in_order()] == [("z", False), ("x", False), ("y", False)]
    life.policy("g")
    life.push("x", "t:g:1", source_version=9)
    life.push("y", "t:g:1", source="other")
    life.push("z", "t:g:1", source_version=1)
    ctx = life.context(life.begun(life.close(key="t:g:1")))
    assert [o.entry.event.event_id for o in ctx.in_order()] == ["x", "y", "z"]


def test_requery_kinds_go_only_to_a_handler_that_loads(life: Life) -> None:
    handled = []
    handler("f")(lambda ctx: handled.append(ctx.manifest.event_ids))
    life.policy(requery_kinds=["changed"])
    window_id = life.close("e1", kind="changed")
    plain = life.close("e1", key="t:f:2", kind="other")
    for taken in life.take(2):
        run_attempt(life.acc, *taken[:2])
    assert handled == [("e1",)]
    assert life.state(plain) == "confirmed"
    assert life.story(window_id)[-1][1:] == ("retrying", 1, "NeedsLoad")
    assert life.manifest(window_id).failures == 0
    accumulator.handlers._registry.clear()
    Staged(load=1, execute=lambda ctx, key: None)
    life.work()
    assert life.state(window_id) == "confirmed"


def test_a_manifest_whose_events_are_missing_is_not_handled(life: Life) -> None:
    handler("f")(lambda ctx: pytest.fail("handled"))
    life.policy()
    window_id = life.close("e1", "e2")
    name = f"{life.ops.prefixes[0]}events:{window_id}"
    [(first, _), _] = life.client.xrange(name)
    life.client.xdel(name, first)
    assert life.work() == [(window_id, "reconciling")]
    manifest = life.manifest(window_id)
    assert (manifest.anomaly, life.story(window_id)[-1][3]) == ("events_incomplete", "events_incomplete")
    assert life.acc.counters()["anomalies"] == 1


def test_an_attempt_ended_from_outside_changes_nothing_more(life: Life) -> None:
    attempts: list[Attempt] = []

    @handler("f")
    def handle(_: Context) -> None:
        assert attempts[0].give_up("Timeout") == "failed"

    life.policy()
    window_id = life.close("e1")
    [taken] = life.take()
    attempts.append(Attempt(life.acc, *taken[:2]))
    assert attempts[0].run() is None
    assert life.story(window_id)[-1][1:] == ("retrying", 1, "Timeout")
    assert life.manifest(window_id).error == "Timeout: the handler was not done after 5m"
