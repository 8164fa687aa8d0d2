"""A workflow run once managed and once without the engine, one denoising step each, and compared."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from ...memory import default_manager
from ...memory.errors import InvalidInput
from ...memory.transfer.devices import list_devices
from ...memory.verification.findings import Verification
from ...memory.verify import verify
from ..comfy_stub.comfy_api import list_node_classes
from ..comfy_stub.comfy_io import ComfyNode
from ..runner.output_cache import CacheEntry, OutputCache
from ..runner.runner import WorkflowRunner
from ..runner.workflow import InvalidWorkflow, Workflow, parse_workflow, visit
from ..runner.workflow_file import read_graph

__all__ = ["verify_workflow"]

# What output nodes may do here: write images, which go to a temporary folder, print, and set limits of this process.
HARMLESS_OUTPUTS = frozenset({"HighwaterSaveImage", "HighwaterMemoryReport", "HighwaterWatermark", "HighwaterLimits"})
STEPS = "steps"


class RecordingCache(OutputCache):
    """A cache that lists what was stored last, and can forget that; it keeps for good what was there at `keep`."""

    def __init__(self) -> None:
        super().__init__()
        self.new: dict[str, CacheEntry] = {}

    def store(self, signature: str | None, entry: CacheEntry) -> None:
        super().store(signature, entry)
        if signature is not None:
            self.new[signature] = entry

    def keep(self) -> None:
        """Keep all that was stored until now, and list only what comes after it."""
        self.new = {}

    def forget(self) -> None:
        """Remove what was stored since `keep`."""
        for signature in self.new:
            self.entries.pop(signature, None)
        self.keep()


def load_for_verifying(path: Path, *, node_classes: Mapping[str, type[ComfyNode]] | None = None) -> Workflow:
    """Read a workflow, with one step for every sampler.

    Raises:
        InvalidInput: as `load_workflow`; also for a node that only ComfyUI has, and for one with effects outside.
    """
    graph = read_graph(path)
    classes = list_node_classes() if node_classes is None else node_classes
    if isinstance(graph, dict):
        refuse_nodes_of_comfyui(graph, classes, str(path))
    workflow = parse_workflow(graph, source=str(path), node_classes=classes)
    for id in workflow.output_ids:
        node = workflow.nodes[id]
        if node.schema.node_id not in HARMLESS_OUTPUTS:
            raise InvalidWorkflow(
                f"{path}: node {id} ({node.schema.node_id}) has effects outside of this process, and verify runs "
                f"nodes three times; allowed output nodes: {', '.join(sorted(HARMLESS_OUTPUTS))}",
                node_id=id,
            )
    shortened = copy.deepcopy(graph)
    for id, node in workflow.nodes.items():
        if any(item.id == STEPS and item.io_type == "INT" for item in node.schema.inputs):
            shortened[id]["inputs"][STEPS] = 1
    return parse_workflow(shortened, source=str(path), node_classes=classes)


def refuse_nodes_of_comfyui(graph: Mapping[str, Any], classes: Mapping[str, Any], source: str) -> None:
    for id, entry in graph.items():
        kind = entry.get("class_type") if isinstance(entry, dict) else None
        if isinstance(kind, str) and kind not in classes:
            raise InvalidWorkflow(
                f"{source}: node {id} ({kind[:80]}) needs ComfyUI, which this command does not use: in ComfyUI, "
                "the Verify node verifies its models; allowed here: " + ", ".join(sorted(classes)),
                node_id=id,
            )


def verify_workflow(path: Path, *, models: Path) -> Verification:
    """Run a workflow's loaders once and all else three times: twice managed, once without the engine.

    Images go to a temporary folder, which is deleted; the models are released at the end.

    Raises:
        InvalidInput: as `load_for_verifying`; also where nothing is managed.
        NodeFailed: a node failed in both ways, or was refused.
    """
    manager = default_manager()
    with tempfile.TemporaryDirectory(prefix="highwater-verify-") as out:
        cache = RecordingCache()
        runner = WorkflowRunner(manager, models_directory=models, output_directory=out, cache=cache)
        workflow = load_for_verifying(path)
        before = set(manager.members)
        try:
            found = compare_runs(runner, cache, workflow)
        finally:
            cache.clear()
            for member in reversed([member for id, member in manager.members.items() if id not in before]):
                manager.discard(member)  # a borrower before its lender
    notes = [*found.notes, "each sampler ran one step"]
    if len(list_devices()) == 1:
        notes.append("no accelerator found, so all computed on the CPU and nothing moved; --devices simulates one")
    return replace(found, subject=path.name, notes=tuple(notes))


def compare_runs(runner: WorkflowRunner, cache: RecordingCache, workflow: Workflow) -> Verification:
    manager = runner.manager
    before = set(manager.members)
    runner.run(loaders_of(workflow), name=workflow.source)
    members = [member for id, member in manager.members.items() if id not in before]
    if not members:
        raise InvalidInput(f"{workflow.source}: no node loads a model, so there is nothing to verify")
    pipelines = [getattr(value, "pipe", None) for entry in cache.new.values() for value in entry.values]
    cache.keep()

    def run() -> list[Any]:
        cache.forget()
        runner.run(workflow, name=workflow.source)
        return [entry.values for entry in cache.new.values()]

    return verify(manager, members, run, objects=[pipe for pipe in pipelines if pipe is not None])


def loaders_of(workflow: Workflow) -> Workflow:
    """Return the part of a workflow that loads pipelines, with the output nodes that set the scene."""
    from ...nodes.pipelines.sampling_inputs import PipelineType  # importable only where a host, or its stand-in, is

    loaders = [
        id
        for id in workflow.order
        if any(output.io_type == PipelineType.io_type for output in workflow.nodes[id].schema.outputs)
    ]
    scene = [id for id in workflow.output_ids if not any(True for _ in workflow.nodes[id].links)]
    return replace(workflow, order=tuple(visit([*scene, *loaders], dict(workflow.nodes), workflow.source)))
