"""The plan of a workflow's file, for this machine or for a described one, and its picture."""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from ...memory.errors import InvalidInput
from ...memory.weights.file_writer import refuse_existing

if TYPE_CHECKING:
    from ...memory.options.marks import Marks
    from ...memory.planner.capacity import Machine
    from ...memory.planner.plan import Plan
    from ...memory.planner.run_plan import RunPlan
    from ...nodes.described_hardware import Hardware
    from ...nodes.workflow_plans import WorkflowPlan

__all__ = ["plan_workflow", "refuse_picture", "write_picture"]

PNG = ".png"


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


def refuse_picture(path: Path, *, num_plans: int) -> None:
    """Refuse a path to which no picture can be written, and several plans: a picture shows one. Changes nothing.

    Raises:
        InvalidInput: names the path, and what is allowed.
    """
    if num_plans > 1:
        raise InvalidInput(f"--picture {path}: draws one plan; name one workflow, or files alone")
    if path.suffix.lower() != PNG:
        raise InvalidInput(
            f"--picture {path}: {f'ends in {path.suffix}' if path.suffix else 'has no ending'}; allowed: {PNG}"
        )
    refuse_existing(path, replaces=True)


def write_picture(path: Path, plans: Mapping[str, Plan], run: RunPlan | None, machine: Machine) -> None:
    """Draw plans of one machine as a PNG; a file that is there is replaced, whole or not at all.

    Raises:
        OSError: of the system, such as a full disk.
    """
    from ...nodes.plan_picture import draw_plan

    picture = draw_plan(plans, run, machine)
    unfinished = path.with_name(f".{path.name[:100]}.{secrets.token_hex(4)}.unfinished")
    try:
        with open(unfinished, "xb") as file:
            picture.save(file, format="PNG")
        os.replace(unfinished, path)
    except BaseException as error:
        with suppress(OSError):
            unfinished.unlink()
        if isinstance(error, OSError):
            raise type(error)(error.errno, error.strerror, str(path)) from None  # the path that its user named
        raise
