"""That the measurements run: one row of each kind, tiny. Their figures are no test."""

from __future__ import annotations

import pytest

from tests.bench import ROWS, main


def test_rows_run_on_each_server(server_kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--rows", "push one at a time", "--server", server_kind, "--scale", "0.01"]) == 0
    assert main(["--rows", "accept: 100 events over*", "--server", server_kind, "--scale", "0.01"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len([line for line in lines if "µs" in line]) == 2


def test_a_row_that_does_not_exist_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--rows", "no such thing"]) == 2
    assert capsys.readouterr().err == "no such row\n"


def test_a_verdict_knows_which_way_is_better() -> None:
    for row in ROWS:
        if row.floor is not None and row.stretch is not None:
            better = 1.01 if row.stretch > row.floor else 0.99
            found = [row.verdict(value) for value in (row.floor / better, row.floor * better, row.stretch * better)]
            assert found == ["below", "ok", "stretch"], row.name
