"""The plan of a workflow's file, for this machine or for a described one."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ...memory.options.marks import Marks
    from ...nodes.described_hardware import Hardware
    from ...nodes.workflow_plans import WorkflowPlan

__all__ = ["plan_workflow"]


def plan_workflow(path: Path, hardware: Hardware | None, models: Path, marks: Mapping[str, Marks]) -> WorkflowPlan:
    """Plan a workflow's file, as `plan_graph` does.

    Args:
        models: the folder of models, in which the workflow's files are looked for.
    """
    from ..comfy_stub import folder_paths
    from ..comfy_stub.comfy_api import install

    install()
    from ...nodes.graph_plans import plan_graph
    from ..runner.workflow_file import read_graph

    folder_paths.configure(models=models, output=Path("out"))
    return plan_graph(read_graph(path), source=str(path), hardware=hardware, marks=marks)
