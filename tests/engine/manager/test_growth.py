"""What a workflow needed at its last run outlives the process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from highwater.memory import MemoryManager, manage
from highwater.memory.manager.needs_file import NeedsFile
from highwater.memory.manager.runs_file import MAX_WORKFLOWS, RunsFile, digest_name
from highwater.memory.units import MIB

X = torch.ones(1, 3, 64)
RUN = {"0" * 32: {"weight_bytes": 5, "activation_bytes": 0, "choices": {"precision": "as stored"}}}


def process(sim, toys, folder: Path, precision: str, *, host: str = "host 1", workflow: str = "secret") -> list[str]:
    """Run a workflow in a manager of its own, as another process would; returns what it says of growth."""
    with sim.cluster([sim.SimDeviceSpec(total_bytes=8 * MIB)]), torch.no_grad():
        manager = MemoryManager(needs_file=NeedsFile(folder / "needs.sqlite3", host=host))
        net = toys.build_net()
        choices = {"placement": "hidden=gpu:0", "profile": "hidden=6MiB"}
        with manage({"hidden": net}, precision=precision, manager=manager, **choices):
            for number in range(2):
                manager.begin_run(str(number), workflow)
                net(X)
                manager.end_run()
        return [event["reason"] for event in manager.report()["events"] if event["kind"] == "growth"]


def test_a_new_process_says_what_needs_more_since_which_change(sim, toys, tmp_path: Path) -> None:
    assert process(sim, toys, tmp_path, "fp8 scaled") == []
    assert process(sim, toys, tmp_path, "fp8 scaled") == []
    assert process(sim, toys, tmp_path, "as stored", workflow="another") == []
    (reason,) = process(sim, toys, tmp_path, "as stored", host="host 2")
    assert reason.startswith("secret needs ") and "more than at its last run: weights of hidden take " in reason
    assert reason.endswith("(since precision as stored, was fp8 scaled, host host 2, was host 1)")
    assert process(sim, toys, tmp_path, "as stored", host="host 2") == []


def test_the_file_has_no_names_and_is_written_only_for_news(sim, toys, tmp_path: Path) -> None:
    process(sim, toys, tmp_path, "as stored")
    file = tmp_path / "runs.json"
    written = file.stat().st_mtime_ns
    for kept in (file, *tmp_path.glob("*.json")):
        text = kept.read_text()
        assert "secret" not in text and "hidden" not in text and str(tmp_path) not in text
    process(sim, toys, tmp_path, "as stored")
    assert file.stat().st_mtime_ns == written and [*tmp_path.glob("tmp*")] == []


@pytest.mark.parametrize("what", ["a folder", "read-only"])
def test_a_file_that_cannot_be_had_costs_only_the_comparison(sim, toys, tmp_path: Path, what: str) -> None:
    if what == "a folder":
        (tmp_path / "runs.json").mkdir()
    else:
        (tmp_path / "file").write_text("")
        tmp_path = tmp_path / "file"
    assert process(sim, toys, tmp_path, "as stored") == []
    assert not RunsFile(tmp_path / "runs.json").write("0", RUN)


values: Any = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(
        ["format", "runs", "weight_bytes", "activation_bytes", "choices", "x"]), inner, max_size=5),
    max_leaves=12,
)  # fmt: skip


@given(content=st.binary(max_size=40) | st.builds(lambda value: json.dumps(value).encode(), values), runs=values)
def test_nothing_in_the_file_raises(tmp_path_factory: Any, content: bytes, runs: Any) -> None:
    path = tmp_path_factory.mktemp("runs") / "runs.json"
    for found in (content, json.dumps({"format": 1, "runs": runs}).encode()):
        path.write_bytes(found)
        RunsFile(path).read()
        assert RunsFile(path).write("0", RUN)
        assert RunsFile(path).read()["0"] == RUN


def test_the_oldest_workflows_are_forgotten(tmp_path: Path) -> None:
    file = RunsFile(tmp_path / "runs.json")
    for number in range(MAX_WORKFLOWS + 3):
        file.write(digest_name(str(number)), RUN)
    assert [*file.read()] == [digest_name(str(number)) for number in range(3, MAX_WORKFLOWS + 3)]


def test_needs_that_are_deleted_take_the_runs_with_them(sim, toys, tmp_path: Path) -> None:
    process(sim, toys, tmp_path, "fp8 scaled")
    NeedsFile(tmp_path / "needs.sqlite3").reset()
    assert not [*tmp_path.glob("*.json")]
    assert process(sim, toys, tmp_path, "as stored") == []
