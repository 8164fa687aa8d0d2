"""Running workflows from a terminal: one runner, the plan before anything moves, a bar per node."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...memory import default_manager
from ..runner.runner import InterruptedRun, Upcoming, WorkflowRunner
from .console import Console

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

    from ..runner.workflow import Workflow, WorkflowNode

__all__ = ["make_runner", "run_workflow"]

REPORT = "HighwaterMemoryReport"
MAX_BARS = 40
"""Bars of nodes that are drawn anew with each step; when there are more, those of ended nodes are printed for good."""


def make_runner(models: Path, out: Path) -> WorkflowRunner:
    """Return a runner on the process-wide manager; the output folder is made when something is written."""
    return WorkflowRunner(default_manager(), models_directory=models, output_directory=out)


def run_workflow(
    runner: WorkflowRunner, name: str, workflow: Workflow, console: Console, then: Sequence[tuple[str, Workflow]] = ()
) -> None:
    """Run a workflow; prints the plan of what it loads and the progress of its nodes and loadings.

    Args:
        then: the workflows that run after it, with their names.

    Raises:
        InvalidInput, NodeFailed: as `WorkflowRunner.run`.
        KeyboardInterrupt: also for an interrupt of the runner.
    """
    manager = runner.manager
    planned = set(manager.plans())
    upcoming = [Upcoming(id=f"then {turn}", name=name, workflow=each) for turn, (name, each) in enumerate(then)]

    def show_plan(message: dict[str, Any]) -> None:
        for id, plan in manager.plans().items() if message["type"] == "node" else ():
            if id not in planned:
                planned.add(id)
                console.say(plan.text())

    with console.progress() as progress:
        bars = Bars(progress, console)

        def show(event: str, *details: Any) -> None:
            if event == "cached" and details[0]:
                console.say(f"cached: {', '.join(workflow.nodes[id].title for id in details[0])}")
            elif event == "executed":
                show_notes(workflow.nodes[details[0]], details[1], console)
            elif event == "executing":
                bars.begin_node(workflow.nodes[details[0]].title)
            elif event == "progress":
                bars.step(*details[1:])
            elif event == "loading":
                bars.load(*details[1:])

        unsubscribe = manager.subscribe(show_plan)
        try:
            with waiting_for_blocks(runner):
                runner.run(workflow, name=name, listener=show, upcoming=lambda: upcoming)
            bars.finish()
        except InterruptedRun as stopped:
            raise KeyboardInterrupt from stopped
        finally:
            bars.end_loading()
            unsubscribe()


def show_notes(node: WorkflowNode, shown: Mapping[str, Sequence[Any]], console: Console) -> None:
    """Print what a node says, such as that it uses another device than it was told; a report is in the summary."""
    if node.schema.node_id != REPORT:
        for line in shown.get("text", ()):
            console.note(f"{node.label}: {line}")


class Bars:
    """A bar per node, and on a terminal one below them while a component is loaded."""

    def __init__(self, progress: Progress, console: Console) -> None:
        self.progress = progress
        self.console = console
        self.node: TaskID | None = None
        self.loading: TaskID | None = None

    def begin_node(self, title: str) -> None:
        self.finish()
        if len(self.progress.tasks) >= MAX_BARS:
            self.print_ended()
        self.node = self.progress.add_task(title, total=1)

    def step(self, value: float, maximum: float) -> None:
        if self.node is not None:
            self.progress.update(self.node, completed=value, total=maximum)

    def load(self, component: str, done_bytes: int, total_bytes: int) -> None:
        if not self.console.is_live:
            return
        if self.loading is None:
            self.loading = self.progress.add_task(f"loading {component}", total=total_bytes, in_bytes=True)
        self.progress.update(self.loading, completed=done_bytes, total=total_bytes)
        if done_bytes >= total_bytes:
            self.end_loading()

    def end_loading(self) -> None:
        if self.loading is not None:
            self.progress.remove_task(self.loading)
            self.loading = None

    def finish(self) -> None:
        """Fill the bars of nodes that have ended: not every node reports steps."""
        self.end_loading()
        for task in self.progress.tasks:
            self.progress.update(task.id, completed=task.total)

    def print_ended(self) -> None:
        """Print all bars, whose nodes have ended, as plain lines: a live display redraws all its bars every time."""
        ended = self.progress.tasks
        self.console.out.print(self.progress.make_tasks_table(ended))
        for task in ended:
            self.progress.remove_task(task.id)


@contextmanager
def waiting_for_blocks(runner: WorkflowRunner) -> Iterator[None]:
    """Delay Ctrl-C until the block is loaded that the manager is loading; a second Ctrl-C interrupts at once.

    An exception in the middle of a block would leave bytes on a device that are not in the ledger.
    """
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(before):
        yield  # signals go elsewhere, or the shell has told this process to ignore this one
        return

    def interrupt(*_: Any) -> None:
        if runner.stop.is_set() or not runner.manager.is_busy_here:
            raise KeyboardInterrupt
        runner.interrupt()

    signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def load_workflows(paths: Sequence[Path]) -> list[tuple[str, Workflow]]:
    """Return all workflows, checked, named by their files.

    Raises:
        InvalidInput: the first that is no good; none has run.
    """
    from ..runner.workflow import load_workflow

    return [(path.stem, load_workflow(path)) for path in paths]
