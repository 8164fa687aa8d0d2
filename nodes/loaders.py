"""Which components each loader of the workflows shows: those that it loaded, or that it gives without having run.

[Note: loaders] ComfyUI loads a model when another node needs it, keeps results of nodes between prompts, and names no
node of what its own loaders read. So the components of a node are, the first that there are of: those that carry its
id and its workflow; those of the node that computed the same result; those that no node of the workflow claims and
that are called like the file that it names.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .forecast.prompt_graph import PromptGraph
from .forecast.queue_forecast import Known, remember
from .prompts import OUR_PREFIX

if TYPE_CHECKING:
    from ..memory.manager.forecast import KnownComponent

__all__ = ["Loaders"]

Place = tuple[str, "str | None"]
"""A node and its workflow; None for a prompt that has no workflow's id."""


@dataclass(frozen=True, slots=True)
class Giver:
    """A node that may give components."""

    digest: str
    """What its result follows from."""
    names: tuple[str, ...]
    """The model files that it names, without their endings."""


class Loaders:
    """Remembers the loaders of the prompts that ran."""

    def __init__(self) -> None:
        self.givers: dict[Place, Giver] = {}
        self.computed_at: dict[str, Place] = {}
        """Digest -> the node and the workflow that computed it last."""

    def read(self, prompt: PromptGraph) -> None:
        """Take the loaders of a prompt that begins; those that its workflow has no more are forgotten."""
        workflow = prompt.workflow_id
        for place in [place for place in self.givers if place[1] == workflow and place[0] not in prompt.nodes]:
            del self.givers[place]
        for node_id in prompt.nodes:
            names = tuple(prompt.file_names(node_id))
            if names or prompt.class_of(node_id).startswith(OUR_PREFIX):
                remember(self.givers, (node_id, workflow), Giver(prompt.digests.get(node_id, ""), names))

    def note_computed(self, digest: str, node_id: str, workflow_id: str | None) -> None:
        """Note that a node computes what follows from a digest."""
        remember(self.computed_at, digest, (node_id, workflow_id))

    def rows(self, components: Iterable[KnownComponent]) -> list[dict[str, Any]]:
        """Return the loaders that have components now, with the ids of these; JSON-able."""
        known, givers = Known(components), dict(self.givers)
        rows = []
        for place, giver in givers.items():
            ids = self.components_of(place, giver, known, givers)
            if ids:
                rows.append({"node_id": place[0], "workflow_id": place[1], "components": ids})
        return rows

    def components_of(self, place: Place, giver: Giver, known: Known, givers: dict[Place, Giver]) -> list[str]:
        source = self.computed_at.get(giver.digest, place)
        owned = known.by_node.get(place) or known.by_node.get(source)
        if owned is None:
            named = [component for name in giver.names for component in known.by_file.get(name, ())]
            owned = [component for component in named if not is_claimed(component, place, givers)]
        return list(dict.fromkeys(component.id for component in owned))


def is_claimed(component: KnownComponent, place: Place, givers: dict[Place, Giver]) -> bool:
    """Whether a component is another loader's, or another workflow's; what a node manages is its loader's, too."""
    if component.node_id is None:
        return False
    owner = givers.get((component.node_id, component.workflow_id))
    return component.workflow_id != place[1] or owner is None or bool(owner.names)
