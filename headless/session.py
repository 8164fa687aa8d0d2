"""Running workflows from a terminal: one runner, the plan before anything moves, a bar per node."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..memory import default_manager
from .console import Console
from .runner import WorkflowRunner

if TYPE_CHECKING:
    from .workflow import Workflow

__all__ = ["make_runner", "run_workflow"]


def make_runner(models: Path, out: Path) -> WorkflowRunner:
    """Return a runner on the process-wide manager; the output folder is made when something is written."""
    return WorkflowRunner(default_manager(), models_directory=models, output_directory=out)


def run_workflow(runner: WorkflowRunner, name: str, workflow: Workflow, console: Console) -> None:
    """Run a workflow; prints the plan of what it loads and the progress of its nodes.

    Raises:
        InvalidInput, NodeFailed, InterruptedRun: as `WorkflowRunner.run`.
    """
    manager = runner.manager
    planned = set(manager.members)

    def show_plan(message: dict[str, Any]) -> None:
        for member in list(manager.members.values()):
            if message["type"] == "node" and member.id not in planned:
                planned.add(member.id)
                console.say(member.attachment.plan.text())

    with console.progress() as progress:

        def show(event: str, *details: Any) -> None:
            if event == "cached" and details[0]:
                console.say(f"cached: {', '.join(workflow.nodes[id].title for id in details[0])}")
            elif event == "executing":
                finish_bars()
                progress.add_task(workflow.nodes[details[0]].title, total=1)
            elif event == "progress":
                _, value, maximum = details
                progress.update(progress.task_ids[-1], completed=value, total=maximum)

        def finish_bars() -> None:
            for task in progress.tasks:
                progress.update(task.id, completed=task.total)

        unsubscribe = manager.subscribe(show_plan)
        try:
            runner.run(workflow, name=name, listener=show)
            finish_bars()
        finally:
            unsubscribe()


def load_workflows(paths: Sequence[Path]) -> list[tuple[str, Workflow]]:
    """Return all workflows, checked, named by their files.

    Raises:
        InvalidInput: the first that is no good; none has run.
    """
    from .workflow import load_workflow

    return [(path.stem, load_workflow(path)) for path in paths]
