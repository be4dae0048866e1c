"""The demo: what it tells, what it finds again, how it ends."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import SecretStr

from accumulator import demo
from accumulator.client import Accumulator
from accumulator.embedded import EmbeddedServer
from accumulator.handlers import missing_step_handlers, registered
from accumulator.settings import Config, Settings
from tests.conftest import StartServer, process_lives, wait_until

REPOSITORY = Path(__file__).parent.parent

Run = Callable[..., bool]


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> Config:
    """Everything ten times as fast, handled by the worker itself."""
    monkeypatch.setattr(demo, "SAMPLES", tuple(s._replace(at=s.at / 10) for s in demo.SAMPLES))
    policies: dict[str, Any] = {
        "pedido": {"inactivity": "300ms", "terminal_kinds": ["pago"], "order_by": "source_version", "sink": "direct"},
        "default": {"inactivity": "500ms", "keep": "last", "sink": "direct"},
    }
    ladder = {
        "anchor": "start",
        "steps": [{"name": "a", "offset": "50ms", "channel": "push"}],
        "cancel_on": ["frete_escolhido"],
    }
    ladder |= {"final_wait": "1d"}
    return Config(policies=policies, handlers=["accumulator.demo"], ladders={"lembrete": ladder})


@pytest.fixture
def run(server: EmbeddedServer, namespace: str, tmp_path: Path) -> Run:
    """The demo in this process, on `server`; whether all samples were handled."""
    settings = Settings(redis_url=SecretStr(server.url), namespace=namespace, log_level="critical")

    def run(config: Config, stay: bool = False) -> bool:
        return demo.run(settings, config, tmp_path / "unused", stay, lambda _, *rest: " ".join(rest))

    return run


def words(text: str) -> list[str]:
    """The second column."""
    return [line.split()[1] for line in text.splitlines()]


# --- samples ----------------------------------------------------------------------------------------------------------


def test_the_samples_come_in_order_and_a_redelivery_is_the_same_event() -> None:
    assert [s.at for s in demo.SAMPLES] == sorted(s.at for s in demo.SAMPLES)
    first: dict[tuple[str, str], str] = {}
    again = 0
    for sample in demo.SAMPLES:
        event = sample.event
        again += (event.bucket_key, event.event_id) in first
        assert first.setdefault((event.bucket_key, event.event_id), event.content_digest) == event.content_digest
    assert again == 1
    assert len({event_id for _, event_id in first}) == len(first), "people read the ids alone"


def test_the_configuration_that_comes_along_serves_the_samples() -> None:
    assert demo.shipped_config() == REPOSITORY / "config" / "accumulator.yaml"
    config = Config.load(demo.shipped_config())
    assert "accumulator.demo" in config.handlers
    flows = {key.split(":")[1] for key in demo.BUCKETS}
    assert flows <= config.policies.keys()
    assert flows | {"default"} <= registered().keys()
    assert set(config.ladders["lembrete"].cancel_on) & {s.event.kind for s in demo.SAMPLES}
    assert missing_step_handlers(config.ladders) == []
    kinds = {s.event.kind for s in demo.SAMPLES if s.event.flow == "pedido"}
    assert kinds & set(config.policies["pedido"].terminal_kinds)
    # All of it within 15 seconds: the last sample, its silence, and room.
    assert max(s.at for s in demo.SAMPLES) * 1000 + (config.policies["pedido"].inactivity or 0) < 11_000


# --- in this process --------------------------------------------------------------------------------------------------


def test_a_fresh_namespace_and_then_the_same_again(
    run: Run, quick: Config, capsys: pytest.CaptureFixture[str], server: EmbeddedServer, namespace: str
) -> None:
    assert run(quick)
    told = capsys.readouterr().out
    found = words(told)
    assert found[0] == "server"
    for word, least in (("policy", 2), ("fresh", 1), ("opened", 4), ("duplicate", 1), ("closed", 4), ("handler", 4)):
        assert found.count(word) >= least, told
    assert found[-1] == "handled"
    assert "aurora:pedido:PED-106 window 1: terminal" in told
    assert "inactivity" in told
    assert "3 edits, the last text is 'Contrato de compra'" in told
    assert "HGETALL" in told
    assert "aurora:pedido:PED-105 lembrete: started" in told
    assert "aurora:pedido:PED-105 cancelled by E5" in told

    assert run(quick)
    told = capsys.readouterr().out
    found = words(told)
    assert found.count("duplicate") == len(demo.SAMPLES)
    assert not {"opened", "accepted", "closed", "handler", "policy", "fresh"} & set(found)
    with Accumulator(server.url, namespace=namespace) as client:
        assert client.counters()["accepted"] == len({s.event.event_id for s in demo.SAMPLES})


def test_a_run_that_was_cut_off_is_finished(
    run: Run, quick: Config, capsys: pytest.CaptureFixture[str], server: EmbeddedServer, namespace: str
) -> None:
    with Accumulator(server.url, namespace=namespace) as client:
        for flow, policy in quick.policies.items():
            client.load_policy(flow, policy)
        client.push_many([sample.event for sample in demo.SAMPLES[:6]])
    assert run(quick)
    told = capsys.readouterr().out
    assert "that run was cut off" in told
    assert words(told).count("duplicate") == 7
    assert words(told)[-1] == "handled"


def test_nothing_is_delivered_again_once_ids_may_be_forgotten(
    run: Run, quick: Config, capsys: pytest.CaptureFixture[str], server: EmbeddedServer, namespace: str
) -> None:
    assert run(quick)
    with Accumulator(server.url, namespace=namespace) as client:
        client.load_policy("pedido", {"inactivity": "300ms", "dedupe_ttl": "1s", "sink": "direct"})
        before = client.counters()
        capsys.readouterr()
        assert run(quick)
        told = capsys.readouterr().out
        assert client.counters() == before
    assert "nothing is delivered again" in told
    assert "warning   policy pedido: version 4 rules, and the configuration file differs" in told


def test_what_no_handler_takes_is_not_handled(
    run: Run, quick: Config, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("accumulator.handlers._registry", {})
    monkeypatch.setattr(demo, "PATIENCE", 2.0)
    # Loaded before, the module registers nothing any more.
    assert not run(quick)
    assert "handled" not in words(capsys.readouterr().out)


def test_dead_manifests_are_told_and_not_handled(
    run: Run, quick: Config, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object) -> None:
        from accumulator.handlers import PermanentError

        raise PermanentError

    monkeypatch.setattr(demo, "_received", fail)
    monkeypatch.setattr(demo, "PATIENCE", 2.5)
    assert not run(quick)
    assert "aurora:pedido:PED-106 window 1: its handler failed" in capsys.readouterr().out


def test_a_server_that_goes_away_is_told_once_and_waited_for(
    start_server: StartServer, namespace: str, tmp_path: Path, quick: Config, capsys: pytest.CaptureFixture[str]
) -> None:
    server = start_server(data_dir=tmp_path / "data")
    with Accumulator(server.url, namespace=namespace, socket_timeout=0.2, retry=None) as client:
        for flow, policy in quick.policies.items():
            client.load_policy(flow, policy)
        story = demo.Story(client)
        stop = threading.Event()
        thread = threading.Thread(target=story.run, args=(stop, True))
        thread.start()
        try:
            wait_until(lambda: client.open_buckets(), what="the first window is open")
            server.kill()
            told = ""

            def warned() -> bool:
                nonlocal told
                told += capsys.readouterr().out
                return "warning" in told

            wait_until(warned, what="it says that the server is away")
            server.restart()
            wait_until(lambda: client.counters().get("accepted") == 12, what="all samples are delivered")
        finally:
            stop.set()
            thread.join()
            story.close()
        told += capsys.readouterr().out
        assert words(told).count("warning") == 1


def test_without_a_worker_the_demo_ends(run: Run, quick: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: object) -> int:
        raise RuntimeError("broken")

    monkeypatch.setattr("accumulator.worker.Worker.run", fail)
    with pytest.raises(RuntimeError, match="broken"):
        run(quick, stay=True)


def test_a_story_in_a_terminal_is_not_spoken_to_by_text_of_others(capsys: pytest.CaptureFixture[str]) -> None:
    demo.tell("closed", "a\x1b[2Jb [bold]")
    assert capsys.readouterr().out.endswith(r"closed    a\x1b[2Jb [bold]" + "\n")


# --- as a person runs it ----------------------------------------------------------------------------------------------


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts `accumulator demo …` in an empty folder."""
    started: list[subprocess.Popen[str]] = []

    def start(*arguments: str) -> subprocess.Popen[str]:
        environment = os.environ | {"PYTHONPATH": str(REPOSITORY)}  # noqa: TID251
        process = subprocess.Popen(
            [sys.executable, "-m", "accumulator", "demo", *arguments],
            cwd=tmp_path, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        started.append(process)
        return process

    yield start
    for process in started:
        if process.poll() is None:
            process.kill()
        process.communicate()


def read_until(process: subprocess.Popen[str], word: str) -> str:
    """What it said up to a line with `word`; the test's time limit ends it where there is none."""
    assert process.stdout is not None
    told = ""
    for line in process.stdout:
        told += line
        if word in line:
            return told
    pytest.fail(f"it ended without {word!r}:\n{told}")


def test_the_demo_tells_everything_and_finds_its_data_again(
    start: Callable[..., subprocess.Popen[str]], tmp_path: Path
) -> None:
    begun = time.monotonic()
    first = start()
    told = read_until(first, "handled")
    took = time.monotonic() - begun
    rest, err = first.communicate()
    out = told + rest
    assert (first.returncode, err) == (0, ""), out + err
    assert took < 45, out  # 12 s on an idle machine; here other tests run beside it
    found = words(out)
    for word in ("opened", "duplicate", "closed", "handler"):
        assert word in found
    assert len(re.findall(r"handler .*\((inactivity|terminal)\)", out)) == 7
    assert (tmp_path / "var" / "appendonlydir").is_dir()

    second = start()
    out, err = second.communicate()
    assert (second.returncode, err) == (0, "")
    assert "the data of an earlier run: 7 manifests" in out
    assert words(out).count("duplicate") == len(demo.SAMPLES)
    assert "opened" not in words(out)


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_it_stays_until_it_is_told_to_stop(
    start: Callable[..., subprocess.Popen[str]], how: signal.Signals, tmp_path: Path
) -> None:
    process = start("--stay", "--data-dir", "data")
    told = read_until(process, "duplicate")
    found = re.search(r"redis://127\.0\.0\.1:(\d+)/0", told)
    assert found is not None
    children = [int(pid) for pid in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()]

    other = start("--data-dir", "data")
    _, err = other.communicate()
    assert other.returncode == 3
    assert "data is in use by another embedded server" in err

    begun = time.monotonic()
    process.send_signal(how)
    out, err = process.communicate()
    assert time.monotonic() - begun < 10  # 5 s, and what the other tests take of the machine
    assert (process.returncode, err) == (0, ""), out + err
    assert words(out)[-1] == "stopping"
    wait_until(lambda: not any(map(process_lives, children)), what="nothing of it lives on")

    again = start("--stay", "--data-dir", "data")
    assert "the data of an earlier run" in read_until(again, "duplicate")
    again.kill()  # even so
    again.communicate()
    last = start("--stay", "--data-dir", "data")
    read_until(last, "found")
    last.send_signal(signal.SIGTERM)
    last.communicate()
    assert last.returncode == 0


def test_a_folder_that_cannot_be_made_is_2(start: Callable[..., subprocess.Popen[str]], tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    process = start("--data-dir", "file/var")
    out, err = process.communicate()
    assert (process.returncode, out) == (2, "")
    assert re.fullmatch(r"accumulator: .*: Not a directory\n", err)
