"""Tells the memory manager where ComfyUI's runs and nodes begin and end, and the page what the manager says.

[Note: boundaries] A run begins and ends where core calls a cache provider's ``on_prompt_start`` and
``on_prompt_end``; ours caches nothing. A node begins where core calls a progress handler. Core makes a new registry of
handlers for every prompt, right after ``on_prompt_start``: a handler that is added from there at once is thrown away,
one that is added by ``call_soon`` comes before the first node. Failed and interrupted nodes never finish: the next
node, or the end of the run, closes them. So does a node that waits for others (lazy inputs, node expansion): the first
part of it is its report.

A provider costs time even if it caches nothing, as core hashes every node's ancestors for it. So it is registered when
the first prompt comes that names a node of ours, or the panel is opened, and until then this file does nothing but look
at prompts.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from ..memory import default_manager, existing_manager
from .forecast.queue_forecast import MAX_PROMPTS, QueueForecast
from .free_requests import hear_free_requests
from .host.waiting_queue import read_queue
from .loaders import Loaders
from .page_messages import EVENT, page_message
from .prompts import digests_of, name_of_run, names_our_node, title_of, workflow_id_of

if TYPE_CHECKING:
    from ..memory import MemoryManager
    from .host.waiting_queue import QueuedPrompt

__all__ = ["Boundaries", "features", "install", "loader_rows"]

FEATURES = ("run_boundaries", "node_boundaries", "events", "forecast", "free")
NO_PROVIDERS = "missing: this ComfyUI has no cache providers; update it to 0.33 or newer"

log = logging.getLogger("highwater")


def quietly(feature: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Catch our errors so that the host goes on: each is logged once, and `features` reports it."""

    def wrap(method: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(method)
        def call(self: Boundaries, *arguments: Any) -> None:
            try:
                method(self, *arguments)
            except Exception as error:
                self.fail(feature, error)

        return call

    return wrap


class Boundaries:
    """Follows one run at a time, as ComfyUI runs one; creates the manager only for a run that needs it."""

    def __init__(
        self,
        server: Any,
        add_handler: Callable[[Boundaries], None],
        attach: Callable[[], None] = lambda: None,
        note_result: Callable[[str, Iterable[Any]], None] = lambda result, slots: None,
    ) -> None:
        """Follow the runs of a server.

        Args:
            server: the host's ``PromptServer``: its queue is read, its websocket written.
            add_handler: makes the host call `node_started` and `node_ended` for the nodes of this run.
            attach: makes the manager see the models that the host moves itself.
            note_result: takes what a node gives, by output, and what follows from it.
        """
        self.server = server
        self.add_handler = add_handler
        self.attach = attach
        self.note_result = note_result
        self.manager: MemoryManager | None = None
        self.run_id: str | None = None
        self.workflow_id: str | None = None
        # What the host calls the open node, and what the page calls it.
        self.open_node: str | None = None
        self.shown_node: str | None = None
        self.digests: dict[str, str] = {}
        """What the results of this run's nodes follow from."""
        self.started: set[str] = set()
        self.loaders = Loaders()
        self.forecast = QueueForecast()
        self.kept: frozenset[str] = frozenset()
        """What the results follow from that the host had when this run began, as far as is known."""
        self.revisited: set[str] = set()
        """The nodes of this run that ran in an earlier one, but were not in the one before."""
        # Features that are not in effect, and why.
        self.lost: dict[str, str] = {}

    def fail(self, feature: str, error: Exception) -> None:
        if feature not in self.lost:
            log.error("Highwater: %s failed: %s", feature.replace("_", " "), error, exc_info=error)
        self.lost[feature] = f"failed: {type(error).__name__}: {error}"

    # -- what the host calls

    @quietly("run_boundaries")
    def run_started(self, prompt_id: str) -> None:
        prompt = read_queue(self.server).running_prompt(prompt_id)
        graph = prompt.graph if prompt is not None else {}
        if existing_manager() is None and not names_our_node(graph):
            return
        workflow_id = workflow_id_of(prompt.extra_data) if prompt is not None else None
        self.manage().begin_run(prompt_id, name_of_run(graph, workflow_id))
        self.run_id, self.workflow_id = prompt_id, workflow_id
        before, self.digests, self.started = {*self.digests.values()}, digests_of(graph), set()
        self.kept = frozenset(self.loaders.computed_at if self.forecast.keeps_results else before)
        self.revisited = {
            id for id, digest in self.digests.items() if digest in self.loaders.computed_at and digest not in before
        }
        self.add_handler(self)
        self.foresee()
        self.read_loaders(prompt)

    @quietly("run_boundaries")
    def run_ended(self, prompt_id: str) -> None:
        if self.run_id is None or self.manager is None:
            return
        self.close_node()
        if self.revisited:
            self.forecast.note_results(are_kept=not self.revisited & self.started)
        self.run_id = self.workflow_id = None
        self.foresee()
        self.manager.end_run()
        if read_queue(self.server).frees:  # the host does so next
            self.follow_free()

    @quietly("node_boundaries")
    def node_started(self, node_id: str, graph: Any) -> None:
        """A node begins; ``graph`` is the host's ``DynamicPrompt``."""
        if self.run_id is None or self.manager is None:
            return
        self.close_node()
        node = graph.get_node(node_id)
        # What a node expands into has ids that the page does not know; there it is shown as the node itself.
        shown = graph.get_display_node_id(node_id)
        self.open_node, self.shown_node = node_id, shown
        self.started.add(shown)
        digest = self.digests.get(node_id, "")
        self.loaders.note_computed(digest, shown, self.workflow_id, self.manager.shown_components())
        self.manager.begin_node(shown, title_of(node), workflow_id=self.workflow_id)
        self.foresee()

    @quietly("events")
    def result_came(self, node_id: str, slots: Iterable[Any]) -> None:
        """The open node has computed this: it shows which models are its own."""
        result = self.digests.get(node_id)
        prompt = self.forecast.prompts.get(self.run_id or "")
        if result is None or prompt is None or node_id != self.open_node:
            return
        if self.loaders.trace(result, (self.digests.get(source, "") for source in prompt.links[node_id])):
            self.note_result(result, slots)

    @quietly("node_boundaries")
    def node_ended(self, node_id: str) -> None:
        """A node is done. The host calls this also for cached nodes, and for nodes that are closed already."""
        if node_id == self.open_node:
            self.close_node()

    @quietly("free")
    def free_requested(self) -> None:
        """The user asked the host to free its memory; while a prompt runs, it does so when that ends, and we too."""
        if self.run_id is None:
            self.follow_free()

    # -- what that means

    def follow_free(self) -> None:
        """Drop the weights that the manager kept of models which the host dropped, and give freed memory back."""
        manager = existing_manager()
        if manager is not None:
            manager.follow_free("ComfyUI was asked to free memory")

    def close_node(self) -> None:
        if self.open_node is not None and self.manager is not None:
            try:
                self.learn(self.manager.end_node())
            finally:
                self.open_node = self.shown_node = None

    @quietly("forecast")
    def learn(self, report: dict[str, Any]) -> None:
        """Learn from a node's report which components it computed with and which it loaded."""
        if self.manager is not None and self.run_id is not None:
            self.forecast.learn(self.run_id, report, self.manager.known_components())

    @quietly("events")
    def read_loaders(self, prompt: QueuedPrompt | None) -> None:
        """Note the loaders of the prompt that begins; the forecast has read it already."""
        if prompt is not None:
            read = self.forecast.read(prompt.id, prompt.graph, workflow_id=self.workflow_id, outputs=prompt.outputs)
            self.loaders.read(read)

    @quietly("forecast")
    def foresee(self) -> None:
        """Tell the manager which components the rest of this run and the waiting prompts will use."""
        queue = read_queue(self.server)
        if queue.lost is not None:
            self.lost["forecast"] = queue.lost
        if self.manager is None:
            return
        running = queue.running_prompt(self.run_id) if self.run_id is not None else None
        prompts = [*([running] if running is not None else []), *queue.waiting[:MAX_PROMPTS]]
        self.forecast.forget_others({prompt.id for prompt in prompts})
        for prompt in prompts:
            self.forecast.read(
                prompt.id, prompt.graph, workflow_id=workflow_id_of(prompt.extra_data), outputs=prompt.outputs
            )
        steps = self.forecast.foresee(
            running.id if running is not None else None,
            self.shown_node,
            self.started,
            [prompt.id for prompt in queue.waiting[:MAX_PROMPTS]],
            self.manager.known_components(),
            kept=self.kept if running is not None else self.digests.values(),
        )
        self.manager.foresee(steps.steps, steps.num_running)

    def manage(self) -> MemoryManager:
        """Return the manager that every workflow shares, and subscribe to its messages."""
        if self.manager is None:
            self.manager = default_manager()
            self.manager.subscribe(self.publish)
            self.attach()
        return self.manager

    @quietly("events")
    def publish(self, message: dict[str, Any]) -> None:
        """Send what the manager says to every page, with the node and the workflow in which it happened."""
        sent = page_message(message, node_id=self.shown_node, workflow_id=self.workflow_id, prompt_id=self.run_id)
        self.server.send_sync(EVENT, sent)


# -- in the real host

installed: list[Boundaries] = []


def features() -> dict[str, bool | str]:
    """Return for every feature True if it is in effect, else why not."""
    lost = installed[0].lost if installed else dict.fromkeys(FEATURES, "missing: this process is not ComfyUI")
    return {name: lost.get(name, True) for name in FEATURES}


def loader_rows() -> list[dict[str, Any]]:
    """Return which components each loader shows."""
    manager = installed[0].manager if installed else None
    return installed[0].loaders.rows(manager.shown_components()) if manager is not None else []


def install(server: Any) -> None:
    """Follow the host's prompts from the first one that names a node of ours; once per process.

    Args:
        server: the host's ``PromptServer``.
    """
    boundaries = Boundaries(server, add_handler, attach_to_core, note_core_result)
    installed.append(boundaries)
    try:
        from comfy_api.latest import Caching, ComfyAPISync
    except ImportError:
        boundaries.lost.update(dict.fromkeys(FEATURES, NO_PROVIDERS))
        return

    class RunBoundaries(Caching.CacheProvider):
        """Caches nothing; is told when prompts begin and end, and what nodes give."""

        def should_cache(self, context: Any, value: Any = None) -> bool:
            if value is not None:
                boundaries.result_came(context.node_id, value.outputs)
            return False

        async def on_lookup(self, context: Any) -> None:
            return None

        async def on_store(self, context: Any, value: Any) -> None:
            return None

        def on_prompt_start(self, prompt_id: str) -> None:
            boundaries.run_started(prompt_id)

        def on_prompt_end(self, prompt_id: str) -> None:
            boundaries.run_ended(prompt_id)

    unregistered = [RunBoundaries()]

    def look_at(request: dict[str, Any]) -> dict[str, Any]:
        """Called by the host with every request to queue a prompt, before it is queued."""
        try:
            if unregistered and (existing_manager() is not None or names_our_node(request.get("prompt"))):
                # Not the asynchronous form: it would come after the prompt was queued, and miss its beginning.
                ComfyAPISync().caching.register_provider(unregistered.pop())
        except Exception as error:
            boundaries.fail("run_boundaries", error)
        return request

    server.add_on_prompt_handler(look_at)
    hear_free_requests(server, boundaries.free_requested)


def attach_to_core() -> None:
    """Make the manager see core's models, also where a prompt has none of our loaders."""
    from .host import attach_to_core, observe_core

    attach_to_core()
    observe_core()


def note_core_result(result: str, slots: Iterable[Any]) -> None:
    """Note which of core's models are in what a node gives."""
    from .host import note_result

    note_result(result, slots)


def add_handler(boundaries: Boundaries) -> None:
    """Make the host tell of this run's nodes; called while it starts the run ([Note: boundaries])."""
    from comfy_execution.progress import ProgressHandler, add_progress_handler

    class NodeBoundaries(ProgressHandler):
        def set_registry(self, registry: Any) -> None:
            self.registry = registry

        def start_handler(self, node_id: str, state: Any, prompt_id: str) -> None:
            boundaries.node_started(node_id, self.registry.dynprompt)

        def finish_handler(self, node_id: str, state: Any, prompt_id: str) -> None:
            boundaries.node_ended(node_id)

    asyncio.get_running_loop().call_soon(add_progress_handler, NodeBoundaries("highwater"))
