"""A short `make chaos`, and that its judge sees what it is there for."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.chaos import Answer, Reminded, check, check_ladders, delay_problems
from tests.processes import ROOT

BUCKET = "aurora:plain:1"
ANSWERS = [
    Answer("a", BUCKET, 1, "w1", 1),
    Answer("b", BUCKET, 1, "w1", 2),
    Answer("c", BUCKET, 2, None, None),  # accepted by a call whose answer was lost
]


def call(key: str, *windows: tuple[str, int, str], bucket: str = BUCKET) -> str:
    """A line of the world's log; windows are (window_id, version, "event ids")."""
    return json.dumps({"key": key, "bucket": bucket, "windows": [[w, v, ids.split()] for w, v, ids in windows]})


ONE, TWO = call("w1:do", ("w1", 1, "a b")), call("w2:do", ("w2", 2, "c"))


@pytest.mark.parametrize(
    ("log", "found"),
    [
        pytest.param([ONE, TWO], None, id="all-is-well"),
        pytest.param([call("w2:do", ("w1", 1, "a b"), ("w2", 2, "c"))], None, id="handed-over-together"),
        pytest.param([ONE, TWO, TWO], "w2:do: its effect happened 2 times", id="effect-twice"),
        pytest.param([ONE, TWO, call("w2:more", ("w2", 2, ""))], "w2 had 2 effects", id="window-twice"),
        pytest.param([ONE], "c was handed over 0 times", id="effect-missing"),
        pytest.param([call("w1:do", ("w1", 1, "a")), TWO], "b was handed over 0 times", id="event-lost"),
        pytest.param([ONE, call("w2:do", ("w2", 2, "c b"))], "b was handed over 2 times", id="event-in-two"),
        pytest.param([TWO, ONE], "version 1 came after 2", id="versions-out-of-order"),
        pytest.param([call("w1:do", ("w1", 1, "b a")), TWO], "not in order of acceptance", id="events-out-of-order"),
        pytest.param([ONE, call("w3:do", ("w3", 3, "c"))], "was told another window", id="another-version"),
        pytest.param([call("w9:do", ("w9", 1, "a b")), TWO], "was told another window", id="another-window"),
        pytest.param([ONE, call("w2:do", ("w2", 2, "c x"))], "nobody pushed x", id="invented"),
    ],
)
def test_the_judge(log: list[str], found: str | None) -> None:
    problems = check(ANSWERS, log)
    if found is None:
        assert problems == []
    else:
        assert any(found in problem for problem in problems), problems


def test_each_event_may_have_an_effect_of_its_own_and_some_flows_no_order() -> None:
    each, loose = "aurora:each:1", "aurora:loose:1"
    answers = [
        *(Answer(name, each, 1, "w1", n) for n, name in enumerate("ab", 1)),
        *(Answer(name, loose, n, f"v{n}", 1) for n, name in enumerate("cd", 1)),
    ]
    log = [
        *(call(f"w1:do:{name}", ("w1", 1, name), bucket=each) for name in "ab"),
        *(call(f"v{n}:do", (f"v{n}", n, name), bucket=loose) for n, name in ((2, "d"), (1, "c"))),
    ]
    assert check(answers, log) == []


def reminders(*told: str) -> list[str]:
    """The world's log of one ladder: "s0 5" began at 5 ms and was sent, "s0 5 -" began only."""
    lines = []
    for what, begun, *rest in (text.split(" ") for text in told):
        about = {"ladder": "L", "what": what, "begun": int(begun)}
        lines += [json.dumps(about)] + ([] if rest else [json.dumps(about | {"key": what})])
    return lines


STEPS = ["s0 1", "s1 2", "s2 3", "s3 4"]


@pytest.mark.parametrize(
    ("state", "paid_at", "log", "found"),
    [
        pytest.param("escalated", None, [*STEPS, "escalate 9"], None, id="all-is-well"),
        pytest.param("escalated", 50, STEPS, None, id="paid-before-the-escalation-began"),
        pytest.param("cancelled", 50, ["s0 1", "s1 2 -", "s1 7", "cancelled 60"], None, id="paid"),
        pytest.param("cancelled", 50, ["cancelled 60"], None, id="paid-at-once"),
        pytest.param("escalated", None, [*STEPS, "s3 5", "escalate 9"], "was sent", id="twice"),
        pytest.param("escalated", None, ["s0 1", "s2 3", "s1 2", "s3 4", "escalate 9"], "was sent", id="order"),
        pytest.param("escalated", None, [*STEPS[:3], "escalate 9"], "was sent", id="missing"),
        pytest.param("cancelled", 50, ["s1 1", "cancelled 60"], "was sent", id="skipped"),
        pytest.param("cancelled", 50, ["s0 1"], "was sent", id="nobody-told"),
        pytest.param("cancelled", 50, ["s0 51 -", "cancelled 60"], "s0 began after", id="after-the-payment"),
        pytest.param("cancelled", 30, ["cancelled 60"], "cancelled after its payment", id="late"),
        pytest.param("running", None, ["s0 1"], "is running", id="stuck"),
    ],
)
def test_the_judge_of_ladders(state: str, paid_at: int | None, log: list[str], found: str | None) -> None:
    problems = check_ladders([Reminded("L", state, 40, paid_at)], reminders(*log))
    if found is None:
        assert problems == []
    else:
        assert any(found in problem for problem in problems), problems
    assert check_ladders([], reminders("s0 1")) == ["L: nobody started it"]


def test_the_bound_on_delays_is_relative() -> None:
    quick, slow = [1] * 97 + [20] * 3, [1] * 90 + [200] * 10
    assert delay_problems([quick, quick], [quick, quick]) == []
    assert delay_problems([slow, slow], [slow, slow]) == []
    assert delay_problems([quick, quick], [slow, quick]) == []  # what others did on this machine, for a moment
    assert delay_problems([quick, quick], [slow, slow]) != []
    assert delay_problems([quick], [quick[1:]]) != []


@pytest.mark.timeout(240)
def test_processes_and_server_die_and_each_effect_happens_once() -> None:
    command = [sys.executable, "-m", "tests.chaos", "--rounds", "25", "--seed", "7", "--windows", "150"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=220, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    assert run.stderr == ""
    assert run.stdout.endswith("each effect once, in order, none missing\n")
