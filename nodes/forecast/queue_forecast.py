"""The steps to come of the prompt that runs and of those that wait, and what was learned of nodes for that.

[Note: graphs] A graph names files, links and values, no components and no types. So three things are put together:

- Which components a node gives. A node that was seen to load some gives them again wherever its digest is found; else
  the file that it names tells, by its name, or the node's id, which the components carry.
- Which kinds of components a node computes with. The names of its inputs tell (``model``, ``clip``, ``vae``), unless it
  only passes them on, and what nodes of its class were seen to use.
- Which nodes run at all. A host keeps the results of the prompt before, so what has the same digest there does not.

Of the nodes before it, the nearest that gives a kind counts. All of this may be wrong; then eviction chooses a worse
order, and nothing else depends on it.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..prompts import OUR_PREFIX
from .prompt_graph import ANY_KIND, PromptGraph

if TYPE_CHECKING:
    from ...memory.manager.forecast import KnownComponent

__all__ = ["MAX_PROMPTS", "Known", "QueueForecast", "Steps", "remember"]

NUMBERED = re.compile(r"#\d+$")
# So many prompts that wait are looked at.
MAX_PROMPTS = 32
# Of so many nodes, classes or digests something is remembered.
MAX_REMEMBERED = 20_000


def remember(known: dict[Any, Any], key: Any, value: Any) -> None:
    """Put a pair last; the oldest one leaves where there are too many."""
    known.pop(key, None)
    known[key] = value
    if len(known) > MAX_REMEMBERED:
        del known[next(iter(known))]


@dataclass(frozen=True, kw_only=True, slots=True)
class Steps:
    """The components of each step to come, those of the node that runs now first: as `MemoryManager.foresee` takes."""

    steps: list[frozenset[str]]
    num_running: int


class QueueForecast:
    """Reads prompts, learns from the nodes that run, and says which components will be used in which order.

    Args:
        keeps_results: whether the host keeps the results of all prompts (True) or of the one before (False). None: what
            runs tell of it (`note_results`), which is False before they tell.
    """

    def __init__(self, *, keeps_results: bool | None = None) -> None:
        self.keeps_results = bool(keeps_results)
        self.learns_of_results = keeps_results is None
        self.given: dict[str, tuple[str, ...]] = {}
        """The components that a node with this digest loaded."""
        self.kinds: dict[str, tuple[str, ...]] = {}
        """The kinds that nodes of this class computed with, in the order of their first use."""
        self.prompts: dict[str, PromptGraph] = {}
        """What was read of the prompts that are in the queue, by their ids."""
        self.sources: dict[str, dict[str, dict[str, tuple[str, ...]]]] = {}
        """By prompt, of each node that may compute with components: by kind the nodes that may give it one, the nearest
        first."""

    # -- what runs tell

    def learn(self, prompt_id: str, report: Mapping[str, Any], components: Iterable[KnownComponent]) -> None:
        """Learn from the manager's report of a node with which components it computed, and which ones it loaded."""
        prompt, node_id = self.prompts.get(prompt_id), report.get("node_id")
        if prompt is None or node_id not in prompt.nodes:
            return
        by_id = {component.id: component for component in components}
        used = [by_id[name].kind for name in report["components"] if name in by_id]
        class_type = prompt.class_of(node_id)
        before = self.kinds.get(class_type, ())
        kinds = tuple(dict.fromkeys([*used, *before]))
        if kinds != before:
            remember(self.kinds, class_type, kinds)
            self.sources.clear()
        here = node_id, prompt.workflow_id
        loaded = tuple(part.id for part in by_id.values() if (part.node_id, part.workflow_id) == here)
        digest = prompt.digests.get(node_id)
        if digest is not None and loaded and self.given.get(digest) != loaded:
            remember(self.given, digest, loaded)
            self.sources.clear()

    def note_results(self, *, are_kept: bool) -> None:
        """Note whether the host still had results that were not of the prompt before."""
        if self.learns_of_results:
            self.keeps_results = are_kept

    # -- what is in the queue

    def read(
        self, prompt_id: str, graph: Any, *, workflow_id: str | None = None, outputs: Collection[str] = ()
    ) -> PromptGraph:
        """Return what a prompt says; it is read once as long as it is in the queue."""
        if prompt_id not in self.prompts:
            self.prompts[prompt_id] = PromptGraph(graph, workflow_id=workflow_id, outputs=[*outputs])
        return self.prompts[prompt_id]

    def forget_others(self, prompt_ids: Collection[str]) -> None:
        """Forget the prompts that are not in the queue any more."""
        if self.prompts.keys() - prompt_ids:
            self.prompts = {known: prompt for known, prompt in self.prompts.items() if known in prompt_ids}
            self.sources = {key: found for key, found in self.sources.items() if key in prompt_ids}

    # -- what is to come

    def foresee(
        self,
        running: str | None,
        now: str | None,
        done: Collection[str],
        waiting: Iterable[str],
        components: Iterable[KnownComponent],
        *,
        kept: Collection[str] = (),
    ) -> Steps:
        """Return the steps to come.

        Args:
            running: the id of the prompt that runs; it and those that wait were read.
            now: the node of it that runs; None between nodes.
            done: the nodes of it that have run.
            kept: the digests whose results the host has.
        """
        known = Known(components)
        found: list[frozenset[str]] = []
        num_running = 0
        results = set(kept)
        if running is not None:
            prompt = self.prompts[running]
            if now is not None:
                found += self.steps_of(running, now, known)
                found = found or [frozenset()]
                num_running = len(found)
            found += self.steps_to_run(running, {*done, now} - {None}, results, known)
            results = self.results_after(prompt, results)
        for prompt_id in list(waiting)[:MAX_PROMPTS]:
            prompt = self.prompts[prompt_id]
            found += self.steps_to_run(prompt_id, (), results, known)
            results = self.results_after(prompt, results)
        return Steps(steps=found, num_running=num_running)

    def results_after(self, prompt: PromptGraph, results: set[str]) -> set[str]:
        """Return the digests of the results that the host has after a prompt."""
        own = set(prompt.digests.values())
        return results | own if self.keeps_results else own

    def steps_to_run(
        self, prompt_id: str, done: Collection[str], kept: Collection[str], known: Known
    ) -> Iterator[frozenset[str]]:
        """Yield the steps of the nodes of a prompt that still have to run."""
        rest = self.prompts[prompt_id].to_run(done, kept)
        for node_id in self.sources_of(prompt_id):
            if node_id in rest:
                yield from self.steps_of(prompt_id, node_id, known)

    def steps_of(self, prompt_id: str, node_id: str, known: Known) -> list[frozenset[str]]:
        """Return the components with which a node will compute: a step for each kind, in the order of their use."""
        prompt = self.prompts[prompt_id]
        found: dict[str, frozenset[str]] = {}
        by_kind = self.sources_of(prompt_id).get(node_id, {})
        turns = {kind: turn for turn, kind in enumerate(self.kinds_of(prompt, node_id))} if by_kind else {}
        for kind, sources in by_kind.items():
            for source in sources:
                given = [part for part in self.given_by(prompt, source, known) if kind in (ANY_KIND, part.kind)]
                for part in given:
                    found[part.kind] = found.get(part.kind, frozenset()) | {part.id}
                if given:
                    break
        return [found[kind] for kind in sorted(found, key=lambda kind: turns.get(kind, len(turns)))]

    def kinds_of(self, prompt: PromptGraph, node_id: str) -> tuple[str, ...]:
        """Return the kinds that a node computes with, in the order of their first use as far as that is known."""
        learned = self.kinds.get(prompt.class_of(node_id), ())
        return tuple(dict.fromkeys([*learned, *prompt.kinds[node_id]]))

    def sources_of(self, prompt_id: str) -> dict[str, dict[str, tuple[str, ...]]]:
        """Return what `sources` has for a prompt, in the order of its nodes; remembered until something is learned."""
        if prompt_id not in self.sources:
            prompt = self.prompts[prompt_id]
            found = {node_id: self.find_sources(prompt, node_id) for node_id in prompt.order}
            self.sources[prompt_id] = {node_id: by_kind for node_id, by_kind in found.items() if by_kind}
        return self.sources[prompt_id]

    def find_sources(self, prompt: PromptGraph, node_id: str) -> dict[str, tuple[str, ...]]:
        kinds = self.kinds_of(prompt, node_id)
        found = {}
        for kind in [ANY_KIND] if ANY_KIND in kinds else kinds:
            nodes = prompt.upstream(node_id, kind, lambda other, kind=kind: kind in self.kinds_of(prompt, other))
            givers = [node for node in nodes if prompt.digests.get(node) in self.given or self.may_load(prompt, node)]
            if givers:
                found[kind] = tuple(givers)
        return found

    def may_load(self, prompt: PromptGraph, node_id: str) -> bool:
        """Whether a node may give components: it names a file, or is one of ours."""
        return any(True for _ in prompt.file_names(node_id)) or prompt.class_of(node_id).startswith(OUR_PREFIX)

    def given_by(self, prompt: PromptGraph, node_id: str, known: Known) -> list[KnownComponent]:
        """Return the components that a node gives: those that it loaded, or with the name of its file, or its id."""
        ids = self.given.get(prompt.digests.get(node_id, ""), ())
        found = [known.by_id[component] for component in ids if component in known.by_id]
        if found:
            return found
        names = list(prompt.file_names(node_id))
        if names:
            return [component for name in names for component in known.by_file.get(name, ())]
        return known.by_node.get((node_id, prompt.workflow_id), [])


class Known:
    """The components that exist, by what graphs say of them."""

    def __init__(self, components: Iterable[KnownComponent]) -> None:
        self.by_id: dict[str, KnownComponent] = {}
        self.by_file: dict[str, list[KnownComponent]] = {}
        self.by_node: dict[tuple[str, str | None], list[KnownComponent]] = {}
        self.by_result: dict[str, list[KnownComponent]] = {}
        for component in components:
            self.by_id[component.id] = component
            group = NUMBERED.sub("", component.id.partition("/")[0])
            for name in {group, *component.name.partition("/")[0].split("+")}:
                self.by_file.setdefault(name, []).append(component)
            if component.node_id is not None:
                self.by_node.setdefault((component.node_id, component.workflow_id), []).append(component)
            if component.result:
                self.by_result.setdefault(component.result, []).append(component)
