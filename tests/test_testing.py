"""The kit for other people's tests: its fixtures as a plugin, and its clock."""

from __future__ import annotations

import re
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import fakeredis
import pytest

import accumulator.handlers
from accumulator.client import Accumulator
from accumulator.errors import HandlerMissing, InvalidInput
from accumulator.handlers import handler
from accumulator.testing import START, VirtualClock, handle_waiting
from tests.conftest import MakeClient, event
from tests.invariants import check_invariants

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


class Project:
    """Somebody's folder of tests, run by a pytest of its own, without the plugins and settings of this one."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def write(self, name: str, text: str) -> None:
        self.path.joinpath(name).write_text(text)

    def run(self, *options: str) -> str:
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "no:cacheprovider",
            "-p",
            "accumulator.testing",
            *options,
        ]
        environment = {
            "PYTHONPATH": f"{self.path}:{ROOT}",
            "PYTHONDONTWRITEBYTECODE": "1",
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        }
        done = subprocess.run(
            command, cwd=self.path, env=environment, capture_output=True, text=True, timeout=50, check=False
        )
        return done.stdout + done.stderr


@pytest.fixture
def project(tmp_path: Path) -> Project:
    made = Project(tmp_path)
    made.write("pytest.ini", "[pytest]\nfilterwarnings = error\n")
    return made


def test_the_page_on_testing_a_handler_holds(project: Project) -> None:
    blocks = re.findall(r"^```python\n(.*?)^```", README, re.DOTALL | re.MULTILINE)
    [block] = [block for block in blocks if "def test_" in block]
    project.write("test_receipts.py", block)
    assert "1 passed" in project.run()


def test_handlers_are_run_in_order_until_none_waits(
    virtual: Accumulator, clock: VirtualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(accumulator.handlers, "_registry", {})
    handled: list[str] = []
    handler("f", max_attempts=2, backoff="1s")(lambda ctx: handled.extend(ctx.manifest.event_ids))
    for flow, sink in (("f", "direct"), ("g", "rq")):
        virtual.load_policy(flow, {"inactivity": "1h", "sink": sink})

    @handler("g", max_attempts=2, backoff="1s", max_backoff="1s")
    def fail(_: object) -> None:
        raise ValueError

    for n in range(3):
        for flow in "fg":
            virtual.push(event(f"e{n}", f"t:{flow}:1", at=clock))
            virtual.flush(f"t:{flow}:1")
    assert handle_waiting(virtual) == 3 + 1
    assert handled == ["e0", "e1", "e2"]
    assert handle_waiting(virtual) == 0
    clock.advance("1s")
    assert handle_waiting(virtual) == 1 + 1  # a dead one holds nobody up: the next one's first
    assert [m.state for m in virtual.manifests("t:g:1")] == ["dead", "retrying", "closed"]


def test_a_handler_that_was_not_imported_is_named(
    virtual: Accumulator, clock: VirtualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(accumulator.handlers, "_registry", {})
    handled: list[str] = []
    handler("f")(lambda ctx: handled.append(ctx.manifest.bucket_key))
    for flow in ("order", "f"):
        virtual.load_policy(flow, {"inactivity": "1h", "sink": "direct"})
        virtual.push(event("e1", f"t:{flow}:1", at=clock))
        virtual.flush(f"t:{flow}:1")
    with pytest.raises(HandlerMissing, match=r"^flow order: no handler is registered for it$"):
        handle_waiting(virtual)
    assert handled == ["t:f:1"]
    (manifest,) = virtual.manifests("t:order:1")
    assert (manifest.state, manifest.error) == (
        "retrying",
        "HandlerMissing: flow order: no handler is registered for it",
    )
    monkeypatch.setitem(accumulator.handlers._registry, "order", accumulator.handlers.find_handler("f"))
    clock.advance("5s")
    assert handle_waiting(virtual) == 1


def test_the_fixtures_serve_a_policy_test(project: Project) -> None:
    # The example of the module's docstring, word for word.
    docstring = (sys.modules["accumulator.testing"].__doc__ or "").split("::\n\n")[1]
    example = "\n".join(line.removeprefix("    ") for line in docstring.split("\nIt runs")[0].split("\n"))
    project.write("test_orders.py", example)
    project.write(
        "test_with_policies.py",
        """
import time
import pytest

@pytest.fixture
def accumulator_policies():
    return {"order": {"inactivity": "10s", "terminal_kinds": ["paid"]}}

@pytest.mark.parametrize("n", range(20))
def test_a_policy_test_takes_milliseconds(accumulator, accumulator_clock, n):
    begun = time.perf_counter()
    event = {"bucket_key": "t:order:7", "source": "s", "occurred_at": accumulator_clock.instant}
    assert accumulator.bucket("t:order:7").open is None, "each test has a server of its own"
    accumulator.push(event | {"event_id": "e1", "kind": "added"})
    accumulator_clock.advance("9s")
    assert accumulator.push(event | {"event_id": "e2", "kind": "paid"}).closed == "terminal"
    assert time.perf_counter() - begun < 2

def test_without(accumulator_clock):
    assert accumulator_clock.instant.isoformat() == "2026-01-01T00:00:00+00:00"
""",
    )
    assert "22 passed" in project.run()


def test_without_the_extra_the_fixture_says_what_is_missing_and_the_rest_works(project: Project) -> None:
    for name in ("fakeredis", "lupa"):
        project.write(
            "sitecustomize.py",
            f"""
import importlib.util, sys
found = importlib.util.find_spec
importlib.util.find_spec = lambda name, package=None: None if name == {name!r} else found(name, package)
sys.modules[{name!r}] = None
""",
        )
        project.write(
            "test_it.py",
            """
def test_that_wants_it(accumulator):
    pass

def test_that_does_not():
    pass
""",
        )
        output = project.run()
        assert "1 passed, 1 error" in output
        assert f"the fixture `accumulator` needs {name}: pip install 'event-accumulator[testing]'" in output
        assert "Traceback" not in output


def test_the_plugin_loads_nothing_before_it_is_used(project: Project) -> None:
    project.write(
        "test_it.py",
        """
import sys

def test_it():
    loaded = {name for name in sys.modules if name.split(".")[0] in ("accumulator", "redis", "pydantic", "fakeredis")}
    assert loaded <= {"accumulator", "accumulator.testing"}
""",
    )
    assert "1 passed" in project.run()


def test_pytest_finds_it_by_itself() -> None:
    project = tomllib.loads(ROOT.joinpath("pyproject.toml").read_text())["project"]
    assert project["entry-points"]["pytest11"] == {"accumulator": "accumulator.testing"}


def test_without_pytest_it_says_what_it_is(tmp_path: Path) -> None:
    program = "import sys; sys.modules['pytest'] = None; import accumulator.testing"
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=50, check=False
    )
    assert "accumulator.testing is a pytest plugin: pip install 'event-accumulator[testing]'" in done.stderr


# --- the clock


@pytest.fixture
def faked(fake: fakeredis.FakeServer, namespace: str, clock: VirtualClock) -> Iterator[Accumulator]:
    with fakeredis.FakeRedis(server=fake, protocol=2) as client:
        yield clock.attach(Accumulator(client, namespace=namespace, partitions=3, clock=clock))
        check_invariants(client, namespace, purged=True)


def test_the_clock_stands_still(faked: Accumulator, clock: VirtualClock) -> None:
    assert (clock.now, clock.instant, clock()) == (1_767_225_600_000, START, 1_767_225_600_000)
    faked.load_policy("f", {"inactivity": "10s"})
    faked.push(event("e1", at=clock))
    assert faked.bucket("t:f:1").now == clock.now
    clock.advance("9999ms")
    clock.advance()
    clock.advance(0)
    assert faked.bucket("t:f:1").open is not None
    clock.advance(1)
    assert faked.bucket("t:f:1").open is None
    assert clock.instant == START + timedelta(seconds=10)


def test_what_falls_due_is_done_at_its_instant(faked: Accumulator, clock: VirtualClock) -> None:
    faked.load_policy("f", {"inactivity": "10s"})
    for n in range(5):
        faked.push(event("e1", f"t:f:{n}", clock))
        clock.advance("1s")
    clock.advance("1h")
    for n in range(5):
        (manifest,) = faked.manifests(f"t:f:{n}")
        assert manifest.sealed_at == manifest.closed_at == START.timestamp() * 1000 + (n + 10) * 1000


def test_workers_may_be_down(faked: Accumulator, clock: VirtualClock) -> None:
    faked.load_policy("f", {"inactivity": "10s"})
    faked.push(event("e1", at=clock))
    clock.advance("1m", worker=False)
    assert faked.manifests("t:f:1") == []
    clock.advance()
    (manifest,) = faked.manifests("t:f:1")
    assert manifest.sealed_at - manifest.closed_at == 50_000


def test_many_at_one_instant(faked: Accumulator, clock: VirtualClock) -> None:
    faked.load_policy("f", {"inactivity": "10s"})
    faked.push_many([event("e1", f"t:f:{n}", clock) for n in range(1000)])
    clock.advance("10s")
    assert faked.open_buckets() == []
    assert faked.counters()["closed"] == 1000


def test_a_year_passes_quickly(faked: Accumulator, clock: VirtualClock) -> None:
    # Retention too: the janitor's part is done, and nobody looks every minute for what it would have written.
    faked.load_policy("f", {"inactivity": "10s", "sink": "none"})
    faked.push(event("e1", at=clock, payload=[1]))
    clock.advance("1h")
    assert list(faked.manifests("t:f:1")[0].payloads()) == [[1]]
    clock.advance("4d")
    (manifest,) = faked.manifests("t:f:1")
    assert (list(manifest.payloads()), manifest.event_ids, manifest.anomaly) == ([], ("e1",), None)
    begun = time.perf_counter()
    clock.advance("365d")
    assert time.perf_counter() - begun < 5
    assert faked.manifests("t:f:1") == []


def test_the_clock_goes_forward_only(clock: VirtualClock) -> None:
    clock.advance_to(datetime(2026, 1, 1, 1, tzinfo=UTC))
    assert clock.now - 1_767_225_600_000 == 3_600_000
    clock.advance_to(clock.instant)
    with pytest.raises(ValueError, match="can't go back"):
        clock.advance_to(START)
    with pytest.raises(ValueError, match="offset"):
        clock.advance_to(datetime(2027, 1, 1))
    with pytest.raises(ValueError, match="offset"):
        VirtualClock(datetime(2027, 1, 1))
    for wrong in ("", "1", "-1s", -1, True, 1.5, None):
        with pytest.raises((InvalidInput, ValueError)):
            clock.advance(wrong)  # type: ignore[arg-type]
    assert VirtualClock(datetime(2026, 1, 1, 0, 0, 0, 1999, UTC)).now == 1_767_225_600_001


def test_a_real_server_under_the_same_clock(make_client: MakeClient, namespace: str) -> None:
    clock = VirtualClock(datetime(2030, 6, 1, tzinfo=UTC))
    accumulator = clock.attach(Accumulator(make_client(), namespace=namespace, clock=clock))
    accumulator.load_policy("f", {"inactivity": None, "cutoffs": ["12:00"]})
    accumulator.push(event("e1", at=clock))
    clock.advance("1d")
    (manifest,) = accumulator.manifests("t:f:1")
    assert (manifest.close_reason, manifest.closed_at - manifest.opened_at) == ("max_age", 3_600_000)
