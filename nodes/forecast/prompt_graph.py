"""One prompt's graph: its nodes, the order in which they run, and which of them still have to."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any

from ..prompts import digests_of, is_link

__all__ = ["ANY_KIND", "KINDS_OF_INPUTS", "PromptGraph"]

# What a component given to an input of this name is for; of a pipeline all parts are used.
ANY_KIND = "*"
KINDS_OF_INPUTS = {
    "model": "diffusion",
    "clip": "text",
    "vae": "vae",
    "control_net": "control",
    "clip_vision": "vision",
    "pipeline": ANY_KIND,
}
MODEL_FILE = re.compile(r"\.(safetensors|sft|ckpt|pt|pth|bin|gguf)$", re.IGNORECASE)
# A graph of more nodes is not looked at.
MAX_NODES = 5_000


class PromptGraph:
    """A graph in API format, whatever it is: what is odd in it is left out.

    Args:
        outputs: the nodes for which it is run; without them, those to which no other is linked.
    """

    def __init__(self, graph: Any, *, workflow_id: str | None = None, outputs: Sequence[str] = ()) -> None:
        self.workflow_id = workflow_id
        self.nodes = checked(graph)
        self.links = {node_id: links_in(node, self.nodes) for node_id, node in self.nodes.items()}
        try:
            self.digests = digests_of(self.nodes)
        except (TypeError, ValueError, RecursionError):  # values that no JSON has
            self.digests = {}
        linked = {source for sources in self.links.values() for source in sources}
        ends = [node_id for node_id in self.nodes if node_id not in linked]
        self.roots = [output for output in outputs if output in self.nodes] or ends
        self.order = tuple(self.in_order())
        """The nodes that its roots need, each after those that it needs."""
        self.given = self.find_given()
        """By node, the kinds of components that others take from it, as far as the names of their inputs tell."""
        self.kinds = self.find_kinds()
        self.walked: Walk | None = None

    def in_order(self) -> dict[str, None]:
        """Return the roots and what they need, each after what it needs; a cycle is cut somewhere."""
        done: dict[str, None] = {}
        entered: set[str] = set()
        for root in self.roots:
            path = [(root, iter(self.links[root]))] if root not in entered else []
            entered.add(root)
            while path:
                node_id, links = path[-1]
                source = next((link for link in links if link not in entered), None)
                if source is None:
                    path.pop()
                    done[node_id] = None
                else:
                    entered.add(source)
                    path.append((source, iter(self.links[source])))
        return done

    def to_run(self, done: Collection[str], kept: Collection[str]) -> Collection[str]:
        """Return the nodes that still have to run, in their order.

        The graph is walked once for a run: what is done since the last call is left out of its result.

        Args:
            done: nodes that have run.
            kept: digests whose results the host has: such a node does not run, nor does what only it needs.
        """
        done, kept = frozenset(done), frozenset(kept)
        if self.walked is None or not self.walked.is_continued_by(done, kept, self.links):
            self.walked = Walk(done, kept, dict.fromkeys(self.walk(done, kept)))
        return self.walked.rest.keys()

    def walk(self, done: frozenset[str], kept: frozenset[str]) -> list[str]:
        needed = set(self.roots)
        found = []
        for node_id in reversed(self.order):
            if node_id in needed and node_id not in done and self.digests.get(node_id) not in kept:
                needed.update(self.links[node_id])
                found.append(node_id)
        return found[::-1]

    def class_of(self, node_id: str) -> str:
        name: str = self.nodes[node_id]["class_type"]
        return name

    def kinds_made(self, node_id: str) -> set[str]:
        """Return the kinds of components that others take from a node and that it takes from none itself."""
        taken = {KINDS_OF_INPUTS.get(name) for name, _ in self.links_by_name(node_id)}
        return self.given[node_id] - taken

    def find_given(self) -> dict[str, set[str]]:
        given: dict[str, set[str]] = {node_id: set() for node_id in self.nodes}
        for node_id in self.nodes:
            for name, value in self.links_by_name(node_id):
                if name in KINDS_OF_INPUTS:
                    given[value[0]].add(KINDS_OF_INPUTS[name])
        return given

    def find_kinds(self) -> dict[str, tuple[str, ...]]:
        """Return by node the kinds of components that the names of its inputs tell, but for what it only passes on."""
        asked: dict[str, dict[str, None]] = {node_id: {} for node_id in self.nodes}
        for node_id in self.nodes:
            for name, _ in self.links_by_name(node_id):
                if name in KINDS_OF_INPUTS:
                    asked[node_id][KINDS_OF_INPUTS[name]] = None
        return {
            node_id: tuple(kind for kind in asked[node_id] if kind not in self.given[node_id]) for node_id in self.nodes
        }

    def links_by_name(self, node_id: str) -> Iterator[tuple[str, list[Any]]]:
        for name, value in self.nodes[node_id]["inputs"].items():
            if is_link(value, self.nodes):
                yield name, value

    def upstream(self, node_id: str, kind: str, computes: Callable[[str], bool]) -> Iterator[str]:
        """Yield the nodes before a node that may give it a component of a kind, the nearest first.

        The walk begins at the input that is named for the kind, where there is one. It ends at nodes that compute with
        that kind themselves: what is before them is theirs.
        """
        named = [value[0] for name, value in self.links_by_name(node_id) if KINDS_OF_INPUTS.get(name) == kind]
        queue = deque(dict.fromkeys(named or self.links[node_id]))
        seen = {node_id, *queue}
        while queue:
            here = queue.popleft()
            yield here
            if not computes(here):
                new = [source for source in dict.fromkeys(self.links[here]) if source not in seen]
                seen.update(new)
                queue.extend(new)

    def file_names(self, node_id: str) -> Iterator[str]:
        """Yield the names of the model files, or of a pipeline's folder, that a node's values name."""
        for name, value in self.nodes[node_id]["inputs"].items():
            if isinstance(value, str) and MODEL_FILE.search(value):
                yield PurePosixPath(value.replace("\\", "/")).stem
            elif isinstance(value, str) and value and KINDS_OF_INPUTS.get(name) == ANY_KIND:
                yield PurePosixPath(value.replace("\\", "/")).name


class Walk:
    """The nodes that still have to run, as they were found, without those that are done since."""

    def __init__(self, done: frozenset[str], kept: frozenset[str], rest: dict[str, None]) -> None:
        self.done, self.kept, self.rest = done, kept, rest

    def is_continued_by(self, done: frozenset[str], kept: frozenset[str], links: Mapping[str, Sequence[str]]) -> bool:
        """Take out what is done now; returns whether the rest is what a new walk would find.

        It would not if something that is done never needed one of its inputs: then perhaps nothing needs it.
        """
        if kept != self.kept or not done >= self.done:
            return False
        new, self.done = done - self.done, done
        for node_id in new:
            self.rest.pop(node_id, None)
        return not any(source in self.rest for node_id in new for source in links.get(node_id, ()))


def checked(graph: Any) -> dict[str, dict[str, Any]]:
    """Return what of a graph is nodes with inputs; nothing of one that is too large to look at."""
    if not isinstance(graph, Mapping) or len(graph) > MAX_NODES:
        return {}
    nodes = {}
    for node_id, node in graph.items():
        if isinstance(node_id, str) and isinstance(node, Mapping):
            inputs = node.get("inputs")
            named: Iterable[tuple[Any, Any]] = inputs.items() if isinstance(inputs, Mapping) else ()
            plain = {name: value for name, value in named if isinstance(name, str)}
            nodes[node_id] = {"class_type": str(node.get("class_type")), "inputs": plain}
    return nodes


def links_in(node: Mapping[str, Any], nodes: Mapping[str, Any]) -> list[str]:
    return [value[0] for value in node["inputs"].values() if is_link(value, nodes)]
