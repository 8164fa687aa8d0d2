"""The thousandth run behaves like the first: it leaves nothing behind. `make soak` does 1,000 runs, `make test` 24."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from highwater.tests.headless.soak_process import ANEW_EVERY
from highwater.tests.soak import MOST_BYTES_PER_RUN, bytes_per_run, differences, keep_row

NUM_RUNS = int(os.environ.get("HIGHWATER_SOAK_RUNS", "24"))
IS_SAMPLE = NUM_RUNS < 100


@pytest.mark.soak
@pytest.mark.timeout(0)
def test_runs_leave_nothing_behind(models_directory: Path, tmp_path: Path) -> None:
    """Counts after two runs of the same workflow, equally long after all was loaded; in the whole soak bytes, too."""
    counted = (12, 24) if IS_SAMPLE else (ANEW_EVERY * 2 - 6, (NUM_RUNS // ANEW_EVERY) * ANEW_EVERY - 6)
    command = [sys.executable, "-m", "highwater.tests.headless.soak_process", str(models_directory), str(tmp_path)]
    done = subprocess.run([*command, str(NUM_RUNS), *map(str, counted)], capture_output=True, text=True)
    if "NOT TESTED" in done.stderr and os.environ.get("CI") != "true":
        pytest.skip(done.stderr.strip())
    assert done.returncode == 0, done.stderr
    runs = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(runs) == NUM_RUNS
    assert all(run["evictions"] and run["executed"] >= 3 for run in runs[3:ANEW_EVERY])  # they do not fit together
    first, last = (runs[turn - 1] for turn in counted)
    assert differences(first["held"], last["held"]) == {}
    assert first["books"] == last["books"]
    if IS_SAMPLE:
        return
    measured = runs[NUM_RUNS // 10 :]
    keep_row("simulated devices", runs, measured, ANEW_EVERY)
    for name in ("rss", "pinned", "device"):
        assert bytes_per_run([run[name] for run in measured], ANEW_EVERY) < MOST_BYTES_PER_RUN, name


def test_the_slope_is_that_of_the_line_under_a_sawtooth() -> None:
    """By ordinary least squares its teeth, which end anywhere, would count."""
    assert bytes_per_run([7 * turn for turn in range(100)]) == pytest.approx(7)
    teeth = [7 * turn + 1e6 * (turn % 30 == 0) for turn in range(905)]
    assert bytes_per_run(teeth, 30) == pytest.approx(7)
    assert bytes_per_run(teeth) != pytest.approx(7)
