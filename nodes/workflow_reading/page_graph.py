"""Graphs in the page's format, as the prompt that the page would queue: what it shows is not what runs.

Subgraphs are replaced by their nodes, whose ids become ``outer:inner``; reroutes, primitives, and muted and bypassed
nodes by what is linked to them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ...memory.errors import InvalidInput, quoted
from .broken_parts import label_of, why_no_node
from .widget_names import read_widgets

__all__ = ["MAX_NODES", "is_page_graph", "prompt_of_page"]

# As many as are looked at in a prompt; subgraphs inside of subgraphs multiply.
MAX_NODES = 5_000
MAX_DEPTH = 32
SHOWN_ONLY = ("Note", "MarkdownNote")
MUTED, BYPASSED = 2, 4
# The two ends of a subgraph, in its own links.
INPUTS, OUTPUTS = "-10", "-20"

WidgetsOf = Callable[[str], "Sequence[str] | None"]
"""The names of the widgets of a class, in the order in which the page keeps their values; None for an unknown class."""


@dataclass(frozen=True, slots=True)
class Given:
    """A value that a link carries from a primitive node or an outer widget."""

    value: Any


@dataclass(frozen=True, slots=True)
class Scope:
    """The graph itself, or the subgraph behind one node of another scope."""

    prefix: str
    nodes: dict[str, dict[str, Any]]
    links: dict[Any, tuple[str, int]]
    """Where each link begins."""
    results: dict[int, Any] = field(default_factory=dict)
    """The link to each output of a subgraph."""
    inputs: Sequence[str] = ()
    """The names of a subgraph's inputs."""
    outer: Scope | None = None
    instance: str = ""
    """The node of the outer scope."""
    inner: dict[str, Scope] = field(default_factory=dict)
    """The subgraphs behind its own nodes."""


def is_page_graph(graph: Any) -> bool:
    return isinstance(graph, Mapping) and isinstance(graph.get("nodes"), list)


def prompt_of_page(graph: Mapping[str, Any], widgets_of: WidgetsOf) -> tuple[dict[str, dict[str, Any]], list[str]]:
    """Return the graph in API format, and a line for what of it is broken, which is left out.

    Raises:
        InvalidInput: a subgraph contains itself, or there are more than `MAX_NODES` nodes.
    """
    page = PageGraph(graph, widgets_of)
    return page.prompt(), page.broken


class PageGraph:
    """One graph, with its subgraphs by their ids."""

    def __init__(self, graph: Mapping[str, Any], widgets_of: WidgetsOf) -> None:
        self.widgets_of = widgets_of
        self.subgraphs: dict[str, Mapping[str, Any]] = {}
        definitions = graph.get("definitions")
        found = definitions.get("subgraphs") if isinstance(definitions, Mapping) else None
        for subgraph in found if isinstance(found, list) else ():
            if isinstance(subgraph, Mapping) and isinstance(subgraph.get("id"), str):
                self.subgraphs[subgraph["id"]] = subgraph
        self.num_nodes = 0
        self.broken: list[str] = []
        self.followed: dict[tuple[str, Any], tuple[str, int] | Given | None] = {}
        self.root = self.open(graph)

    def open(self, graph: Mapping[str, Any], outer: Scope | None = None, instance: str = "", depth: int = 0) -> Scope:
        if depth > MAX_DEPTH:
            raise InvalidInput(
                f"subgraph {quoted(graph.get('name'))}: is nested more than {MAX_DEPTH} deep, or contains itself"
            )
        prefix = f"{outer.prefix}{instance}:" if outer else ""
        nodes, muted = {}, set()
        found = graph.get("nodes")
        for number, node in enumerate(found if isinstance(found, list) else ()):
            node_id = id_of(node.get("id")) if isinstance(node, dict) else None
            why = why_no_node(node, "type") or ("has no id" if node_id is None else "")
            if why or node_id is None:
                which = f"node {prefix}{node_id}" if node_id is not None else f"entry {number} of the nodes"
                self.broken.append(f"{which}: {why}; it is left out")
            elif node.get("mode") == MUTED:
                muted.add(node_id)
            else:
                if node_id in nodes:
                    label = label_of(prefix + node_id, nodes[node_id]["type"])
                    self.broken.append(f"{label}: another node has its id; it is left out")
                nodes[node_id] = node
        self.num_nodes += len(nodes)
        if self.num_nodes > MAX_NODES:
            raise InvalidInput(f"the workflow has more than {MAX_NODES} nodes, which are not read; make it smaller")
        links, results = {}, {}
        for link_id, origin, slot, target, target_slot in links_of(graph):
            links[link_id] = (origin, slot)
            if target == OUTPUTS:
                results[target_slot] = link_id
        scope = Scope(
            prefix=prefix,
            nodes=nodes,
            links=links,
            results=results,
            inputs=[str(given.get("name")) for given in listed(graph, "inputs")],
            outer=outer,
            instance=instance,
        )
        self.broken += broken_inputs(scope, muted)
        for node_id, node in nodes.items():
            if node["type"] in self.subgraphs:
                scope.inner[node_id] = self.open(self.subgraphs[node["type"]], scope, node_id, depth + 1)
        return scope

    def prompt(self) -> dict[str, dict[str, Any]]:
        """Return all nodes that run, in the order of the page."""
        found: dict[str, dict[str, Any]] = {}
        waiting = [self.root]
        while waiting:
            scope = waiting.pop()
            for node_id, node in scope.nodes.items():
                if node_id in scope.inner:
                    if node.get("mode") != BYPASSED:
                        waiting.append(scope.inner[node_id])
                elif runs(node):
                    title = node.get("title")
                    found[scope.prefix + node_id] = {
                        "class_type": node["type"],
                        "inputs": self.inputs_of(scope, node_id),
                        "_meta": {"title": title if isinstance(title, str) else ""},
                    }
        return found

    def inputs_of(self, scope: Scope, node_id: str) -> dict[str, Any]:
        node = scope.nodes[node_id]
        inputs = self.widgets(scope, node_id)
        for given in listed(node, "inputs"):
            name, link = given.get("name"), given.get("link")
            if isinstance(name, str) and link is not None:
                source = self.follow(scope, link)
                if isinstance(source, Given):
                    inputs[name] = source.value
                elif source is not None:
                    inputs[name] = list(source)
        return inputs

    def widgets(self, scope: Scope, node_id: str) -> dict[str, Any]:
        """Return the values of a node's widgets: its own, or those that the node around its subgraph shows for it."""
        node = scope.nodes[node_id]
        values = read_widgets(node, self.widgets_of(node["type"]))
        if scope.outer is not None:
            properties = scope.outer.nodes[scope.instance].get("properties")
            shown = properties.get("proxyWidgets") if isinstance(properties, Mapping) else None
            outer_values = scope.outer.nodes[scope.instance].get("widgets_values")
            if isinstance(shown, list) and isinstance(outer_values, list) and len(shown) == len(outer_values):
                for place, value in zip(shown, outer_values, strict=True):
                    if (
                        isinstance(place, list)
                        and len(place) >= 2
                        and id_of(place[0]) == node_id
                        and isinstance(place[1], str)
                        and place[1] in values
                    ):
                        values[place[1]] = value
        return values

    def follow(self, scope: Scope, link: Any) -> tuple[str, int] | Given | None:
        """Return the node and output where a link really begins, or the value that it carries; None: nothing does."""
        seen: list[tuple[str, Any]] = []
        while is_key(link) and link in scope.links and (scope.prefix, link) not in self.followed:
            seen.append((scope.prefix, link))
            self.followed[scope.prefix, link] = None  # what it stays in a cycle
            origin, slot = scope.links[link]
            if origin == INPUTS and scope.outer is not None:
                outer, instance = scope.outer, scope.outer.nodes[scope.instance]
                name = scope.inputs[slot] if 0 <= slot < len(scope.inputs) else None
                link = next(
                    (given.get("link") for given in listed(instance, "inputs") if given.get("name") == name), None
                )
                if link is None:
                    return self.note(seen, self.shown_value(instance, name))
                scope = outer
                continue
            node = scope.nodes.get(origin)
            if node is None:  # muted, or not there
                return None
            if node.get("mode") == BYPASSED:
                link = bypass(node, slot)
            elif origin in scope.inner:
                scope = scope.inner[origin]
                link = scope.results.get(slot)
            elif node["type"] == "Reroute":
                link = next((given.get("link") for given in listed(node, "inputs")), None)
            elif node["type"] == "PrimitiveNode":
                values = node.get("widgets_values")
                return self.note(seen, Given(values[0]) if isinstance(values, list) and values else None)
            else:
                return self.note(seen, (scope.prefix + origin, slot))
        known = is_key(link) and link in scope.links
        return self.note(seen, self.followed[scope.prefix, link] if known else None)

    def note(
        self, links: list[tuple[str, Any]], source: tuple[str, int] | Given | None
    ) -> tuple[str, int] | Given | None:
        """Remember where links begin that lead to one place."""
        self.followed.update(dict.fromkeys(links, source))
        return source

    def shown_value(self, instance: Mapping[str, Any], name: str | None) -> Given | None:
        """Return the value of a widget of a subgraph's node; None where its inner node has the value."""
        names = [given.get("name") for given in listed(instance, "inputs") if isinstance(given.get("widget"), Mapping)]
        values = instance.get("widgets_values")
        if isinstance(values, list) and len(values) == len(names) and name in names:
            return Given(values[names.index(name)])
        return None


def broken_inputs(scope: Scope, muted: Collection[str]) -> Iterator[str]:
    """Yield which inputs of nodes have links that are not there, or that begin at nodes that are not.

    Args:
        muted: nodes that are there and do not run.
    """
    for node_id, node in scope.nodes.items():
        for given in listed(node, "inputs"):
            link = given.get("link")
            if link is None:
                continue
            found = f"{label_of(scope.prefix + node_id, node['type'])}: input {quoted(given.get('name'))}"
            origin, _ = scope.links.get(link, (None, 0)) if is_key(link) else (None, 0)
            if origin is None:
                yield f"{found} has link {quoted(link)}, which is not in the workflow"
            elif origin not in scope.nodes and origin not in muted and not (origin == INPUTS and scope.outer):
                yield f"{found} is linked to node {scope.prefix}{origin}, which is not in the workflow"


def bypass(node: Mapping[str, Any], slot: int) -> Any:
    """Return the link that a bypassed node passes on: that of the input of an output's place and type, or the first."""
    outputs, inputs = listed(node, "outputs"), listed(node, "inputs")
    kind = outputs[slot].get("type") if 0 <= slot < len(outputs) else None
    same_place = inputs[slot : slot + 1] if slot >= 0 else []
    return next((given.get("link") for given in [*same_place, *inputs] if given.get("type") == kind), None)


def runs(node: Mapping[str, Any]) -> bool:
    """Whether a node is one of the prompt: not bypassed, and not of the page alone."""
    return node.get("mode") != BYPASSED and node["type"] not in (*SHOWN_ONLY, "Reroute", "PrimitiveNode")


def links_of(graph: Mapping[str, Any]) -> Iterator[tuple[Any, str, int, str, int]]:
    """Yield each link's id, origin, its output, target, its input; the page writes lists, and objects in subgraphs."""
    links = graph.get("links")
    for link in links if isinstance(links, list) else ():
        if isinstance(link, Mapping):
            fields: list[Any] = [
                link.get(name) for name in ("id", "origin_id", "origin_slot", "target_id", "target_slot")
            ]
        elif isinstance(link, list) and len(link) >= 5:
            fields = link[:5]
        else:
            continue
        origin, target = id_of(fields[1]), id_of(fields[3])
        if is_key(fields[0]) and origin is not None and target is not None and is_int(fields[2]) and is_int(fields[4]):
            yield fields[0], origin, fields[2], target, fields[4]


def listed(holder: Mapping[str, Any], name: str) -> list[dict[str, Any]]:
    found = holder.get(name)
    return [item for item in found if isinstance(item, dict)] if isinstance(found, list) else []


def id_of(value: Any) -> str | None:
    return str(value) if isinstance(value, str) or (is_int(value) and abs(value) < 1 << 63) else None


def is_key(value: Any) -> bool:
    return isinstance(value, str) or is_int(value)


def is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
