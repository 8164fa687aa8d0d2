"""Tells the memory manager where ComfyUI's runs and nodes begin and end, and the page what the manager says.

[Note: boundaries] A run begins and ends where core calls a cache provider's ``on_prompt_start`` and
``on_prompt_end``; ours caches nothing. A node begins where core calls a progress handler. Core makes a new registry of
handlers for every prompt, right after ``on_prompt_start``: a handler that is added from there at once is thrown away,
one that is added by ``call_soon`` comes before the first node. Failed and interrupted nodes never finish: the next
node, or the end of the run, closes them. So does a node that waits for others (lazy inputs, node expansion): the first
part of it is its report.

A provider costs time even if it caches nothing, as core hashes every node's ancestors for it. So it is registered
when the first prompt comes that names a node of ours, and until then this file does nothing but look at prompts.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ..memory import default_manager, existing_manager
from .prompts import digests_of, names_our_node, title_of, workflow_id_of

if TYPE_CHECKING:
    from ..memory import MemoryManager

__all__ = ["EVENT", "Boundaries", "features", "install", "shown_as"]

EVENT = "highwater.memory"
# Of so many nodes it is remembered where they ran last.
NUM_REMEMBERED = 20_000
FEATURES = ("run_boundaries", "node_boundaries", "events")
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

    def __init__(self, server: Any, add_handler: Callable[[Boundaries], None]) -> None:
        """Follow the runs of a server.

        Args:
            server: the host's ``PromptServer``: its queue is read, its websocket written.
            add_handler: makes the host call `node_started` and `node_ended` for the nodes of this run.
        """
        self.server = server
        self.add_handler = add_handler
        self.manager: MemoryManager | None = None
        self.run_id: str | None = None
        self.workflow_id: str | None = None
        # What the host calls the open node, and what the page calls it.
        self.open_node: str | None = None
        self.shown_node: str | None = None
        self.digests: dict[str, str] = {}
        """What the results of this run's nodes follow from."""
        self.started: set[str] = set()
        self.ran_at: dict[str, tuple[str, str | None]] = {}
        """Digest -> the node and the workflow that computed it last."""
        self.shown_as: dict[tuple[str, str | None], tuple[str, str | None]] = {}
        """A node whose result was there already -> the one that computed it: the page shows the same of both."""
        # Features that are not in effect, and why.
        self.lost: dict[str, str] = {}

    def fail(self, feature: str, error: Exception) -> None:
        if feature not in self.lost:
            log.error("Highwater: %s failed: %s", feature.replace("_", " "), error, exc_info=error)
        self.lost[feature] = f"failed: {type(error).__name__}: {error}"

    # -- what the host calls

    @quietly("run_boundaries")
    def run_started(self, prompt_id: str) -> None:
        graph, extra_data = self.running_prompt(prompt_id)
        if existing_manager() is None and not names_our_node(graph):
            return
        workflow_id = workflow_id_of(extra_data)
        self.manage().begin_run(prompt_id, workflow_id or f"prompt {prompt_id[:8]}")
        self.run_id, self.workflow_id = prompt_id, workflow_id
        self.digests, self.started = digests_of(graph or {}), set()
        self.add_handler(self)

    @quietly("run_boundaries")
    def run_ended(self, prompt_id: str) -> None:
        if self.run_id is None or self.manager is None:
            return
        self.close_node()
        self.tell_results_of_others()
        self.run_id = self.workflow_id = None
        self.manager.end_run()

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
        remember(self.ran_at, self.digests.get(node_id, ""), (shown, self.workflow_id))
        self.manager.begin_node(shown, title_of(node), workflow_id=self.workflow_id)

    @quietly("node_boundaries")
    def node_ended(self, node_id: str) -> None:
        """A node is done. The host calls this also for cached nodes, and for nodes that are closed already."""
        if node_id == self.open_node:
            self.close_node()

    # -- what that means

    def close_node(self) -> None:
        if self.open_node is not None and self.manager is not None:
            try:
                self.manager.end_node()
            finally:
                self.open_node = self.shown_node = None

    def tell_results_of_others(self) -> None:
        """Tell the page of nodes of this workflow that did not run, because another node had the same result."""
        before = self.pairs()
        for node_id, digest in self.digests.items():
            here, there = (node_id, self.workflow_id), self.ran_at.get(digest)
            if node_id in self.started or there == here:
                self.shown_as.pop(here, None)
            elif there is not None:
                remember(self.shown_as, here, there)
        pairs = self.pairs()
        if pairs != before:
            told = [pair for pair in pairs if pair["workflow_id"] == self.workflow_id]
            self.publish({"type": "shown_as", "nodes": told})

    def pairs(self) -> list[dict[str, str | None]]:
        """Return the nodes whose result another node computed, with that node."""
        return [
            {"node_id": node_id, "workflow_id": workflow_id, "as_node_id": there[0], "as_workflow_id": there[1]}
            for (node_id, workflow_id), there in list(self.shown_as.items())
        ]

    def manage(self) -> MemoryManager:
        """Return the manager that every workflow shares, and subscribe to its messages."""
        if self.manager is None:
            self.manager = default_manager()
            self.manager.subscribe(self.publish)
        return self.manager

    @quietly("events")
    def publish(self, message: dict[str, Any]) -> None:
        """Send what the manager says to every page, with the node and the workflow in which it happened."""
        where = {"node_id": self.shown_node, "workflow_id": self.workflow_id, "prompt_id": self.run_id}
        self.server.send_sync(EVENT, where | message)

    def running_prompt(self, prompt_id: str) -> tuple[Any, Any]:
        """Return the graph of a running prompt and what was sent beside it; Nones for one that is not queued."""
        running, _ = self.server.prompt_queue.get_current_queue_volatile()
        # The items have more fields in newer hosts: take them by their place, never apart.
        return next(((item[2], item[3]) for item in running if item[1] == prompt_id), (None, None))


def remember(known: dict[Any, Any], key: Any, value: Any) -> None:
    """Put a pair last; the oldest one leaves where there are too many."""
    known.pop(key, None)
    known[key] = value
    if len(known) > NUM_REMEMBERED:
        del known[next(iter(known))]


# -- in the real host

installed: list[Boundaries] = []


def features() -> dict[str, bool | str]:
    """Return for every feature True if it is in effect, else why not."""
    lost = installed[0].lost if installed else dict.fromkeys(FEATURES, "missing: this process is not ComfyUI")
    return {name: lost.get(name, True) for name in FEATURES}


def shown_as() -> list[dict[str, str | None]]:
    """Return the nodes whose result another node computed, for a page that opens."""
    return installed[0].pairs() if installed else []


def install(server: Any) -> None:
    """Follow the host's prompts from the first one that names a node of ours; once per process.

    Args:
        server: the host's ``PromptServer``.
    """
    boundaries = Boundaries(server, add_handler)
    installed.append(boundaries)
    try:
        from comfy_api.latest import Caching, ComfyAPISync
    except ImportError:
        boundaries.lost.update(dict.fromkeys(FEATURES, NO_PROVIDERS))
        return

    class RunBoundaries(Caching.CacheProvider):
        """Caches nothing; is told when prompts begin and end."""

        def should_cache(self, context: Any, value: Any = None) -> bool:
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
