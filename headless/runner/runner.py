"""Runs workflows one after another with one memory manager, and runs again only what changed.

The order of one run: every needed node is signed (class, values, fingerprint, ancestors), what the cache knows is
reported as cached, the rest is executed. The manager hears of the run, and of every node that executes, also when
it fails.
"""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...memory.errors import InvalidInput
from ...nodes.forecast.queue_forecast import MAX_PROMPTS, QueueForecast
from ...nodes.loaders import Loaders
from ...nodes.progress import showing_loadings
from ..comfy_stub import folder_paths
from ..comfy_stub.comfy_api import executing_node, install
from ..comfy_stub.comfy_io import HiddenHolder, NodeOutput
from .node_inputs import Link
from .output_cache import CacheEntry, OutputCache, sign_node
from .workflow import InvalidWorkflow, Workflow, WorkflowNode

if TYPE_CHECKING:
    from ...memory import MemoryManager

__all__ = ["InterruptedRun", "NodeFailed", "RunResult", "Upcoming", "WorkflowRunner"]

# ("executing", node_id), ("cached", [node_ids]), ("progress", node_id, value, max), ("executed", node_id, ui),
# ("loading", node_id, component, bytes done, bytes in all), ("error", node_id, exception)
Listener = Callable[..., None]


class InterruptedRun(BaseException):
    """The run was asked to stop. Not an ``Exception``, like ComfyUI's own since 0.33: no node may swallow it."""


class NodeFailed(RuntimeError):
    """A node raised; the message names it, the cause is what it raised."""

    def __init__(self, message: str, *, node_id: str) -> None:
        super().__init__(message)
        self.node_id = node_id


@dataclass(frozen=True, kw_only=True, slots=True)
class Upcoming:
    """A workflow that waits; its id is no other's that waits or runs."""

    id: str
    name: str
    workflow: Workflow


@dataclass(frozen=True, kw_only=True, slots=True)
class RunResult:
    """What one run did; ``outputs`` holds what output nodes show, by node id, cached ones too."""

    run_id: str
    outputs: Mapping[str, Mapping[str, list[Any]]]
    executed: tuple[str, ...]
    cached: tuple[str, ...]
    seconds: float


class WorkflowRunner:
    """Holds the cache between runs. One run at a time: a second call of `run` waits for the first."""

    def __init__(
        self,
        manager: MemoryManager,
        *,
        models_directory: str | Path,
        output_directory: str | Path,
        on_progress: Callable[[str, float, float], None] | None = None,
        cache: OutputCache | None = None,
    ) -> None:
        """Set the process's folders, which the nodes' choices depend on: make the runner before loading workflows.

        Args:
            manager: the one that the nodes use, `default_manager()`.
            on_progress: called with node id, value and maximum, in every run.
            cache: where results of nodes are kept between runs; by default a new one.
        """
        install()
        folder_paths.configure(models=models_directory, output=output_directory)
        self.manager = manager
        self.cache = OutputCache() if cache is None else cache
        self.on_progress = on_progress
        self.running = threading.Lock()
        self.stop = threading.Event()
        self.forecast = QueueForecast(keeps_results=True)
        self.loaders = Loaders()
        self.results: dict[str, None] = {}
        """The digests of the nodes that have run: their results are kept, most of them at least."""

    @property
    def is_running(self) -> bool:
        return self.running.locked()

    def loader_rows(self) -> list[dict[str, Any]]:
        """Return which components each loader shows (`Loaders.rows`)."""
        return self.loaders.rows(self.manager.known_components())

    def note_results(self, digests: Iterable[str]) -> None:
        """Note the digests of nodes that have run."""
        self.results |= dict.fromkeys(digests)

    def forget_results(self) -> bool:
        """Forget all cached results, and with them the models that they hold; returns False while a workflow runs."""
        from ...memory.transfer.host_heap import give_back_heap

        if not self.running.acquire(blocking=False):
            return False
        try:
            self.cache.clear()
            self.results.clear()
            give_back_heap()
        finally:
            self.running.release()
        return True

    def interrupt(self) -> None:
        """Make the current run stop at its next step, node or loaded block; from any thread; nothing when none runs."""
        self.stop.set()

    def run(
        self,
        workflow: Workflow,
        *,
        name: str,
        extra_pnginfo: Mapping[str, Any] | None = None,
        listener: Listener | None = None,
        run_id: str | None = None,
        upcoming: Callable[[], Sequence[Upcoming]] = list,
    ) -> RunResult:
        """Execute what the workflow's output nodes need and what is not cached.

        Args:
            name: of the workflow, for the report; nodes of equal names belong together there.
            extra_pnginfo: what images carry in their metadata beside the prompt.
            upcoming: returns the workflows that wait behind this one, the next first; asked before each node.

        Raises:
            InvalidWorkflow: a node found one of its inputs unusable.
            NodeFailed: a node failed otherwise. Results of the nodes before it stay cached in both cases.
            InterruptedRun: after `interrupt`.
        """
        with self.running:
            self.stop.clear()
            run = Run(
                runner=self,
                workflow=workflow,
                name=name,
                extra_pnginfo=extra_pnginfo,
                tell=listener or ignore,
                run_id=run_id or uuid.uuid4().hex,
                upcoming=upcoming,
            )
            self.manager.begin_run(run.run_id, name)
            try:
                return run.execute_all()
            finally:
                self.manager.end_run()


def ignore(*event: Any) -> None:
    """Ignore an event: the default listener of a run."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """One execution of one workflow."""

    runner: WorkflowRunner
    workflow: Workflow
    name: str
    extra_pnginfo: Mapping[str, Any] | None
    tell: Listener
    run_id: str
    upcoming: Callable[[], Sequence[Upcoming]]

    def execute_all(self) -> RunResult:
        """Execute the nodes in their order; cached ones only lend their values."""
        begin_s = time.perf_counter()
        cache, order = self.runner.cache, self.workflow.order
        signatures = self.sign_nodes()
        needed = frozenset(signatures.values())
        kept = frozenset(self.runner.results)
        done = {id for id in order if cache.find(signatures[id]) is not None}
        self.tell("cached", [id for id in order if id in done])
        read = self.runner.forecast.read(
            self.run_id, self.workflow.prompt, workflow_id=self.name, outputs=self.workflow.output_ids
        )
        self.runner.loaders.read(read)
        found: dict[str, CacheEntry] = {}
        executed: dict[str, None] = {}
        outputs: dict[str, Mapping[str, list[Any]]] = {}
        for id in order:
            entry = cache.find(signatures[id])
            if entry is None:
                cache.trim(needed)
                self.foresee(id, done, kept)
                entry = self.execute_node(self.workflow.nodes[id], found)
                cache.store(signatures[id], entry)
                executed[id] = None
            found[id] = entry
            done.add(id)
            if entry.ui:
                outputs[id] = entry.ui
                self.tell("executed", id, entry.ui)
        cache.trim(needed)
        return RunResult(
            run_id=self.run_id,
            outputs=outputs,
            executed=tuple(executed),
            cached=tuple(id for id in order if id not in executed),
            seconds=time.perf_counter() - begin_s,
        )

    def sign_nodes(self) -> dict[str, str | None]:
        """Return each needed node's signature; asks every node for its fingerprint once."""
        signatures: dict[str, str | None] = {}
        for id in self.workflow.order:
            node = self.workflow.nodes[id]
            fingerprint = getattr(node.node_class, "fingerprint_inputs", None)
            # Linked values are not known yet: a fingerprint depends on constants only, as in ComfyUI.
            constants = {name: None if isinstance(value, Link) else value for name, value in node.inputs.items()}
            with self.naming(node):
                value = fingerprint(**constants) if fingerprint else None
            signatures[id] = sign_node(node, value, signatures)
        return signatures

    def execute_node(self, node: WorkflowNode, found: Mapping[str, CacheEntry]) -> CacheEntry:
        """Run one node on a clone of its class, which carries the hidden values."""
        manager = self.runner.manager
        self.tell("executing", node.id)
        with self.naming(node), executing_node(lambda value, maximum: self.progress(node.id, value, maximum)):
            self.check_interrupt()
            inputs = {
                name: found[value.node_id].values[value.output] if isinstance(value, Link) else value
                for name, value in node.inputs.items()
            }
            hidden = HiddenHolder(unique_id=node.id, prompt=self.workflow.prompt, extra_pnginfo=self.extra_pnginfo)
            digest = self.runner.forecast.prompts[self.run_id].digests.get(node.id, "")
            self.runner.loaders.note_computed(digest, node.id, self.name, manager.known_components())
            manager.begin_node(node.id, node.title, workflow_id=self.name)
            try:
                with showing_loadings(partial(self.loading, node.id), manager):
                    output = node.node_class.with_hidden(hidden).execute(**inputs)
            finally:
                self.runner.forecast.learn(self.run_id, manager.end_node(), manager.known_components())
            return make_entry(node, output)

    def foresee(self, now: str, done: Collection[str], kept: Collection[str]) -> None:
        """Tell the manager which components the rest of this run and the workflows that wait will use.

        Args:
            now: the node that runs next.
            done: the nodes that have run, and those whose results are cached.
            kept: the digests of the nodes that ran before this run.
        """
        forecast, manager = self.runner.forecast, self.runner.manager
        own = Upcoming(id=self.run_id, name=self.name, workflow=self.workflow)
        waiting = [each for each in self.upcoming() if each.id != self.run_id]
        forecast.forget_others({each.id for each in (own, *waiting)})
        for each in (own, *waiting[:MAX_PROMPTS]):
            if each.id not in forecast.prompts:
                workflow = each.workflow
                forecast.read(each.id, workflow.prompt, workflow_id=each.name, outputs=workflow.output_ids)
        ids = [each.id for each in waiting]
        told = forecast.foresee(self.run_id, now, done, ids, manager.known_components(), kept=kept)
        digests = forecast.prompts[self.run_id].digests
        self.runner.note_results(filter(None, map(digests.get, (now, *done))))
        manager.foresee(told.steps, told.num_running)

    def progress(self, node_id: str, value: float, maximum: float) -> None:
        """Pass on what a node reports, and stop it here when the run was interrupted."""
        self.tell("progress", node_id, value, maximum)
        if self.runner.on_progress is not None:
            self.runner.on_progress(node_id, value, maximum)
        self.check_interrupt()

    def loading(self, node_id: str, component: str, done_bytes: int, total_bytes: int) -> None:
        """Pass on that a block of a component has been loaded, and cancel the loading when the run was interrupted."""
        self.tell("loading", node_id, component, done_bytes, total_bytes)
        self.check_interrupt()

    def check_interrupt(self) -> None:
        if self.runner.stop.is_set():
            raise InterruptedRun(f"{self.name}: interrupted")

    @contextmanager
    def naming(self, node: WorkflowNode) -> Iterator[None]:
        """Give what a node raises the node's name, and tell the listener. Everything is raised again."""
        try:
            try:
                yield
            except InvalidInput as error:
                raise InvalidWorkflow(f"{node.label}: {error}", node_id=node.id) from error
            except (Exception, SystemExit, GeneratorExit) as error:  # a node that wants the process to end, too
                message = f"{node.label} failed: {type(error).__name__}: {error}"
                raise NodeFailed(message, node_id=node.id) from error
        except (InvalidWorkflow, NodeFailed, InterruptedRun) as failure:
            self.tell("error", node.id, failure)
            raise


def make_entry(node: WorkflowNode, output: NodeOutput) -> CacheEntry:
    """Return what a node gave, checked against its schema."""
    if not isinstance(output, NodeOutput) or len(output.args) < len(node.schema.outputs):
        raise TypeError(f"{node.schema.node_id} must return a NodeOutput of {len(node.schema.outputs)} values")
    return CacheEntry(values=output.args, ui=output.ui_dict())
