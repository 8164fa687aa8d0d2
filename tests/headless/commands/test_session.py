"""Running from a terminal: the bar of a loading, and Ctrl-C while weights move."""

from __future__ import annotations

import io
import json
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console as RichConsole

from highwater.headless.commands.console import Console
from highwater.headless.commands.session import make_runner, run_workflow
from highwater.headless.runner.workflow import parse_workflow
from highwater.memory import default_manager
from highwater.memory.units import MIB

WORKFLOW = Path(__file__).parents[3] / "headless" / "workflows" / "demo_flux.json"


class Runner:
    """Stands for a runner whose one node loads a component in three blocks."""

    def __init__(self) -> None:
        self.manager = SimpleNamespace(plans=dict, subscribe=lambda listener: lambda: None, depth=0)

    def run(self, workflow: Any, *, name: str, listener: Any, upcoming: Any = ()) -> None:
        listener("executing", "1")
        for block in (1, 2, 3):
            listener("loading", "1", "tiny/unet", block * MIB, 3 * MIB)
            listener("progress", "1", block, 3)


@pytest.mark.parametrize(("terminal", "quiet"), [(True, False), (False, False), (True, True)])
def test_a_loading_has_a_bar_on_a_terminal_only(terminal: bool, quiet: bool) -> None:
    printed = io.StringIO()
    console = Console()
    console.out = RichConsole(file=printed, force_terminal=terminal, quiet=quiet, width=100)
    workflow = SimpleNamespace(nodes={"1": SimpleNamespace(title="Sample")})
    runner = Runner()
    listen = runner.run

    def run_and_draw(workflow: Any, *, name: str, listener: Any, **rest: Any) -> None:
        listen(workflow, name=name, **rest, listener=lambda *event: (listener(*event), drawn.refresh()))

    runner.run = run_and_draw  # type: ignore[method-assign]
    drawn = console.progress()
    console.progress = lambda: drawn  # type: ignore[method-assign]
    run_workflow(runner, "test", workflow, console)  # type: ignore[arg-type]
    text = printed.getvalue()
    assert ("loading tiny/unet" in text) == ("1.00MiB of 3.00MiB" in text) == (terminal and not quiet)
    assert ("Sample" in text) == (not quiet)
    assert [task.description for task in drawn.tasks] == ["Sample"], "the bar of the loading is gone"


SCRIPT = """
import json, os, signal, sys
from types import SimpleNamespace
from highwater.headless.cli import main
from highwater.headless.commands.demo import choose_hardware
from highwater.headless.commands.hardware import simulate
from highwater.memory import default_manager
from highwater.memory.runtime.blocks.weight_group import WeightGroup

where, out, workflow = sys.argv[1:]
simulate(choose_hardware())
manager = default_manager()
blocks = []

def interrupt(*_):
    blocks.append(None)
    if len(blocks) == 3:
        os.kill(os.getpid(), signal.SIGINT)

if where == "between blocks":
    manager.watch_loading(interrupt)
else:
    load = WeightGroup.load
    WeightGroup.load = lambda self, *args: (load(self, *args), interrupt())[0]
code = main(["run", workflow, "--out", out])
manager.ledger.check()
print(json.dumps({"code": code, "blocks": len(blocks), "used": manager.ledger.used("gpu:0")}))
"""


@pytest.mark.parametrize("where", ["between blocks", "within a block"])
def test_ctrl_c_ends_a_loading_after_its_block(sim, tmp_path: Path, where: str) -> None:
    command = [sys.executable, "-c", SCRIPT, where, str(tmp_path / "out"), str(WORKFLOW)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr == "highwater: interrupted\n"
    told = json.loads(done.stdout.splitlines()[-1])
    assert told == {"code": 130, "blocks": 3, "used": 0}


def calls_of_reports(count: int, tmp_path: Path) -> int:
    """Return how many calls a run of so many Memory Report nodes in a chain makes, what it prints included."""
    graph: dict[str, Any] = {
        str(number): {
            "class_type": "HighwaterMemoryReport",
            "inputs": {"after": [str(number - 1), 0]} if number else {},
            "_meta": {"title": f"Report {number}"},
        }
        for number in range(count)
    }
    runner = make_runner(tmp_path, tmp_path)
    workflow = parse_workflow(graph)
    printed = io.StringIO()
    console = Console()
    console.out = RichConsole(file=printed, width=120)
    calls = Counter[str]()
    sys.setprofile(lambda frame, event, argument: calls.update([event]))
    try:
        run_workflow(runner, "reports", workflow, console)
    finally:
        sys.setprofile(None)
    bars = re.findall(r"Report (\d+)\b.*1/1", printed.getvalue())
    assert bars == [str(number) for number in range(count)], "each node has one bar, in order"
    return calls["call"] + calls["c_call"]


def test_twice_as_many_reports_take_twice_as_many_calls(tmp_path: Path) -> None:
    calls_of_reports(2, tmp_path)  # what is imported and learned once
    few, many = (calls_of_reports(count, tmp_path) for count in (100, 300))
    assert many < 3.6 * few


@pytest.mark.parametrize("quiet", [False, True])
def test_a_watermark_for_a_device_that_is_not_here_is_told(tmp_path: Path, quiet: bool, capsys, monkeypatch) -> None:
    monkeypatch.setattr(default_manager(), "set_watermark", lambda *marks: None)  # other tests use this manager
    inputs = {"device": "gpu:77", "low": "1MiB", "high": "2MiB"}
    graph = {"1": {"class_type": "HighwaterWatermark", "inputs": inputs}}
    run_workflow(make_runner(tmp_path, tmp_path), "marks", parse_workflow(graph), Console(quiet=quiet))
    told = capsys.readouterr()
    line = "node 1 (Watermark): watermark gpu:77: this machine has no gpu:77, so it applies to every device (*)"
    assert (told.err if quiet else told.out).count(line) == 1
    assert not quiet or told.out == ""
