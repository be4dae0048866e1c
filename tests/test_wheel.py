"""The built wheel, in a project of its own that has a package named `workers`."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

from tests.conftest import StartServer

REPOSITORY = Path(__file__).parent.parent


def _quiet(*command: str | Path, cwd: Path, **environment: str) -> str:
    """What a program says on standard output; it must end well."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "ACCUMULATOR_"))}  # noqa: TID251
    done = subprocess.run(
        list(map(str, command)), cwd=cwd, env=clean | environment, capture_output=True, text=True, timeout=50
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of this tree, as `make wheel` builds it."""
    out = tmp_path_factory.mktemp("dist")
    _quiet(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", out, cwd=REPOSITORY)
    (built,) = out.iterdir()
    return built


@pytest.fixture(scope="module")
def project(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project with an environment of its own: the wheel, and what it depends on from the one that runs the tests."""
    project = tmp_path_factory.mktemp("project")
    venv.create(project / "venv", with_pip=False, symlinks=True)
    packages = project / "venv" / "lib" / f"python{sysconfig.get_python_version()}" / "site-packages"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(packages)
    # A link for each package there, but for an editable install of this tree: that is a .pth file.
    there = {Path(sysconfig.get_path(name)) for name in ("purelib", "platlib")}
    for path in (path for folder in there for path in folder.iterdir()):
        if path.suffix != ".pth" and not path.name.startswith(("accumulator", "event_accumulator", "_event_accum")):
            (packages / path.name).symlink_to(path)
    (project / "workers").mkdir()
    (project / "workers" / "__init__.py").write_text("WHOSE = 'theirs'\n")
    (project / "handling.py").write_text(
        "from accumulator import Context, handler\n\n\n"
        "@handler('order')\ndef order(ctx: Context) -> None:\n    print(ctx.bucket_key)\n"
    )
    return project


@pytest.fixture
def python(project: Path) -> Path:
    return project / "venv" / "bin" / "python"


def test_the_wheel_holds_what_runs_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    here = {
        str(path.relative_to(REPOSITORY))
        for path in (REPOSITORY / "accumulator").rglob("*")
        if path.is_file() and path.suffix in (".py", ".lua", ".typed")
    }
    assert sum(name.endswith(".lua") for name in here) >= 10
    held = {name for name in names if ".dist-info/" not in name}
    assert held == here | {"accumulator/accumulator.yaml"}
    assert not any(name.startswith(("tests/", "workers/")) for name in names)
    with zipfile.ZipFile(wheel) as archive:
        assert archive.read("accumulator/accumulator.yaml") == (REPOSITORY / "config" / "accumulator.yaml").read_bytes()


def test_the_package_is_the_wheels_and_workers_are_the_users(project: Path, python: Path) -> None:
    code = "import accumulator, workers; print(accumulator.__file__); print(workers.WHOSE)"
    where, whose = _quiet(python, "-c", code, cwd=project).split()
    assert Path(where).is_relative_to(project)
    assert whose == "theirs"


def test_the_program_says_its_version_and_checks_the_configuration(project: Path, python: Path, wheel: Path) -> None:
    version = wheel.name.split("-")[1]
    assert _quiet(python, "-m", "accumulator", "--version", cwd=project) == f"accumulator {version}\n"
    code = (
        "from importlib.metadata import entry_points\n"
        "(program,) = [e for e in entry_points(group='console_scripts') if e.name == 'accumulator']\n"
        "program.load()()"
    )
    assert _quiet(python, "-c", code, "--version", cwd=project) == f"accumulator {version}\n"


def test_an_event_goes_through(project: Path, python: Path, start_server: StartServer, namespace: str) -> None:
    server = start_server()
    code = f"""
import sys
from datetime import UTC, datetime
import workers
from accumulator import Accumulator, Outcome
from accumulator.handlers import load_handlers, registered
load_handlers(["handling"])
assert registered()["order"].function.__module__ == "handling"
with Accumulator(sys.argv[1], namespace={namespace!r}) as accumulator:
    accumulator.load_policy("order", {{"inactivity": "1h"}})
    at = datetime.now(UTC)
    receipt = accumulator.push(event_id="e1", bucket_key="shop:order:7", kind="paid", source="web", occurred_at=at)
    assert receipt.outcome is Outcome.ACCEPTED
    accumulator.flush("shop:order:7")
    (manifest,) = accumulator.manifests("shop:order:7")
    print(manifest.close_reason, *manifest.event_ids)
"""
    assert _quiet(python, "-c", code, server.url, cwd=project) == "flush e1\n"
    counters = _quiet(
        python, "-m", "accumulator", "counters", "--json",
        cwd=project, ACCUMULATOR_REDIS_URL=server.url, ACCUMULATOR_NAMESPACE=namespace,
    )  # fmt: skip
    assert '"accepted": 1' in counters


def test_a_scenario_runs_from_the_wheel(project: Path, python: Path) -> None:
    scenario = REPOSITORY / "tests" / "scenarios" / "01-seed-simulation.yaml"
    assert "as expected" in _quiet(python, "-m", "accumulator", "simulate", scenario, cwd=project)
