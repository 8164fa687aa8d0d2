"""The benchmark of plans that say before: its cases can be asked for by number, and are always the same ones."""

from __future__ import annotations

import sys

import pytest

from highwater.benchmarks import __main__ as command
from highwater.benchmarks import forecast
from highwater.benchmarks.case import Result


def test_a_number_is_always_the_same_case() -> None:
    assert forecast.random_case(19) == forecast.random_case(19) != forecast.random_case(18)


def test_single_cases_are_run_by_number_and_are_no_result_to_keep(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[dict[str, object]] = []

    def measure(**options: object) -> Result:
        asked.append(options)
        return Result(question="", rows=[{"found": 1}], ratio=1.0, meaning="")

    monkeypatch.setattr(forecast, "measure", measure)
    monkeypatch.setattr(command, "write_result", lambda *_: pytest.fail("kept"))
    monkeypatch.setattr(sys, "argv", ["benchmarks", "forecast", "--only", "1", "19"])
    assert command.main() == 0
    assert asked == [{"only": [1, 19]}]
    assert "ratio: 1.0" in capsys.readouterr().out
    for wrong in (["overlap", "--only", "1"], ["forecast", "--only", "-1"]):
        monkeypatch.setattr(sys, "argv", ["benchmarks", *wrong])
        with pytest.raises(SystemExit):
            command.main()
