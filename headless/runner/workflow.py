"""Workflows in API format: checked in full, and turned into a graph whose order is known.

The checks follow ComfyUI's, with two that it lacks: an unknown input is an error, and a number is not made of a
text. Everything is checked before the first node runs; each complaint is one line that names the node.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from ...memory.errors import InvalidInput, allowed_values
from ...nodes.prompts import title_of
from ..comfy_stub.comfy_api import list_node_classes
from ..comfy_stub.comfy_io import ComfyNode, Schema
from .node_inputs import MAX_TOLD, Link, check_link, check_value, describe, expectation, validated_names
from .workflow_file import read_graph

__all__ = [
    "InvalidWorkflow",
    "Workflow",
    "WorkflowNode",
    "load_workflow",
    "parse_workflow",
]


class InvalidWorkflow(InvalidInput):
    """A workflow that cannot run; ``node_id`` and ``input_name`` say where, for the page to mark it."""

    def __init__(self, message: str, *, node_id: str | None = None, input_name: str | None = None) -> None:
        super().__init__(message)
        self.node_id = node_id
        self.input_name = input_name


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkflowNode:
    """One checked node: every required input is there, values have their types."""

    id: str
    title: str
    node_class: type[ComfyNode]
    schema: Schema
    inputs: Mapping[str, Any]  # a value, or a Link

    @property
    def links(self) -> Iterator[Link]:
        return (value for value in self.inputs.values() if isinstance(value, Link))

    @property
    def label(self) -> str:
        return f"node {self.id} ({self.title})"


@dataclass(frozen=True, kw_only=True, slots=True)
class Workflow:
    """A checked graph. ``order`` holds the nodes that an output node needs, each after what it needs."""

    source: str
    nodes: Mapping[str, WorkflowNode]
    order: tuple[str, ...]
    prompt: Mapping[str, Any]  # the graph as it was given, which images carry in their metadata

    @property
    def output_ids(self) -> tuple[str, ...]:
        return tuple(id for id in self.order if self.nodes[id].schema.is_output_node)


def load_workflow(
    path: str | Path, *, node_classes: Mapping[str, type[ComfyNode]] | None = None, ask_nodes: bool = True
) -> Workflow:
    """Read and check an API-format workflow file. What a combo offers comes from the configured folders.

    Args:
        ask_nodes: let the nodes check their values too, against this machine; a plan for another one does without.

    Raises:
        InvalidInput: the file is missing or not JSON; `InvalidWorkflow` where a node is to blame.
    """
    return parse_workflow(read_graph(path), source=str(path), node_classes=node_classes, ask_nodes=ask_nodes)


def parse_workflow(
    graph: Any,
    *,
    source: str = "prompt",
    node_classes: Mapping[str, type[ComfyNode]] | None = None,
    ask_nodes: bool = True,
) -> Workflow:
    """Check a graph in API format.

    Args:
        source: named first in every complaint.
        node_classes: by class id; ours when not given.

    Raises:
        InvalidInput: the graph as a whole is not usable; `InvalidWorkflow` where a node is to blame.
    """
    classes = list_node_classes() if node_classes is None else node_classes
    check_format(graph, source)
    by_class: dict[str, Schema] = {}  # what a combo offers is read from the folders, once for all nodes of a class
    schemas = {id: find_schema(id, entry, classes, source, by_class) for id, entry in graph.items()}
    nodes = {id: check_node(id, graph, schemas, classes[graph[id]["class_type"]], source) for id in graph}
    order = order_nodes(nodes, source)
    if ask_nodes:
        for id in order:
            check_with_node(nodes[id], source)
    return Workflow(source=source, nodes=nodes, order=order, prompt=graph)


def check_format(graph: Any, source: str) -> None:
    """Require an object of nodes, and say what to do with what the page saves by default."""
    expected = 'expected {"id": {"class_type": ..., "inputs": {...}}, ...}'
    if not isinstance(graph, dict):
        raise InvalidInput(f"{source}: a workflow is a JSON object, not {describe(graph)}; {expected}")
    if isinstance(graph.get("nodes"), list):
        raise InvalidInput(
            f"{source}: this is the format of the ComfyUI page, not the API format; "
            "open it in ComfyUI and choose Workflow > Export (API)"
        )
    if not graph:
        raise InvalidInput(f"{source}: the workflow has no nodes; {expected}")
    for id, entry in graph.items():
        if not isinstance(entry, dict) or not isinstance(entry.get("class_type"), str):
            raise InvalidWorkflow(f"{source}: node {id} has no class_type: {describe(entry)}; {expected}", node_id=id)
        if not isinstance(entry.get("inputs", {}), dict):
            raise InvalidWorkflow(
                f"{source}: node {id}: inputs is {describe(entry['inputs'])}, expected an object", node_id=id
            )


def find_schema(
    id: str,
    entry: Mapping[str, Any],
    classes: Mapping[str, type[ComfyNode]],
    source: str,
    by_class: dict[str, Schema],
) -> Schema:
    class_type = entry["class_type"]
    if class_type not in classes:
        raise InvalidWorkflow(
            f"{source}: node {id}: class_type {class_type[:100]!r} is unknown; "
            f"{allowed_values(class_type[:100], sorted(classes))}",
            node_id=id,
        )
    if class_type not in by_class:
        by_class[class_type] = classes[class_type].GET_SCHEMA()
    return by_class[class_type]


def check_node(
    id: str,
    graph: Mapping[str, Any],
    schemas: Mapping[str, Schema],
    node_class: type[ComfyNode],
    source: str,
) -> WorkflowNode:
    """Check the inputs of one node against its schema and against the nodes that it is linked to."""
    schema = schemas[id]
    entry = graph[id]
    title = title_of(entry, schema.display_name)
    given = entry.get("inputs", {})
    known = {item.id: item for item in schema.inputs}

    def fail(name: str, problem: str) -> NoReturn:
        raise InvalidWorkflow(f"{source}: node {id} ({title}): input {name!r} {problem}", node_id=id, input_name=name)

    for name in given:
        if name not in known:
            fail(name, f"is unknown; {allowed_values(name, known)}")
    inputs: dict[str, Any] = {}
    for name, item in known.items():
        if name not in given:
            if not item.optional:
                fail(name, f"is missing; expected {expectation(item)}")
        elif isinstance(given[name], list):
            try:
                inputs[name] = check_link(given[name], item, schemas)
            except ValueError as error:
                fail(name, str(error))
        else:
            own_check = name in validated_names(node_class)
            try:
                inputs[name] = check_value(given[name], item, limits=not own_check)
            except ValueError as error:
                fail(name, str(error))
    return WorkflowNode(id=id, title=title, node_class=node_class, schema=schema, inputs=inputs)


def order_nodes(nodes: Mapping[str, WorkflowNode], source: str) -> tuple[str, ...]:
    """Return the nodes that output nodes need, each after its ancestors and close before its first use.

    Output nodes without any link come first, as in ComfyUI: they set the scene (a watermark).

    Raises:
        InvalidInput: no output node, or a cycle anywhere.
    """
    outputs = [id for id, node in nodes.items() if node.schema.is_output_node]
    if not outputs:
        raise InvalidInput(f"{source}: no output node, so nothing would run; add one such as HighwaterSaveImage")
    outputs.sort(key=lambda id: any(True for _ in nodes[id].links))
    needed = visit(outputs, nodes, source)
    visit(list(nodes), nodes, source)  # a cycle among nodes that no output needs is a mistake, too
    return tuple(needed)


def visit(roots: list[str], nodes: Mapping[str, WorkflowNode], source: str) -> list[str]:
    """Return the roots and their ancestors, ancestors first; iterative, as chains may be long."""
    done: dict[str, None] = {}
    for root in roots:
        path: dict[str, Iterator[Link]] = {root: nodes[root].links}
        while path:
            id, links = next(reversed(path.items()))
            link = next((link for link in links if link.node_id not in done), None)
            if link is None:
                del path[id]
                done[id] = None
            elif link.node_id in path:
                ids = list(path)
                cycle = [*ids[ids.index(link.node_id) :], link.node_id]
                names = " <- ".join(f"{id} ({nodes[id].title})" for id in cycle[:MAX_TOLD])
                names += f" <- and {len(cycle) - MAX_TOLD} more" if len(cycle) > MAX_TOLD else ""
                raise InvalidWorkflow(f"{source}: the links form a cycle: {names}", node_id=link.node_id)
            else:
                path[link.node_id] = nodes[link.node_id].links
    return list(done)


def check_with_node(node: WorkflowNode, source: str) -> None:
    """Ask the node about the inputs that it named; a linked one is not known yet and comes as None."""
    names = validated_names(node.node_class)
    if not names:
        return
    values = {
        name: None if isinstance(node.inputs[name], Link) else node.inputs[name]
        for name in names
        if name in node.inputs
    }
    verdict = node.node_class.validate_inputs(**values)  # type: ignore[attr-defined]
    if verdict is not True:
        reason = verdict if isinstance(verdict, str) else f"inputs {', '.join(values)} are refused"
        raise InvalidWorkflow(f"{source}: {node.label}: {reason}", node_id=node.id)
