"""Which components each loader of the workflows shows: those that it loaded, or that it gives without having run.

[Note: loaders] ComfyUI loads a model when another node needs it, keeps results of nodes between prompts, and names no
node of what its own loaders read. So the components of a node are, the first that there are of: those that carry its
id and its workflow; those of the node that computed the same result; those that came in its result first, and those
that no node of the workflow claims, that are called like the file that it names, and whose result was not seen. Of what
has no file's name either (of GGUF loaders, *Load ControlNet Model*, *Load CLIP Vision*): where there is one model of a
kind, and one loader that gives that kind and has none, they belong together. A host may keep results of a node's
earlier inputs, and their models: of the components that carry a node's id, those count that came while it computed what
it gives now.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
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
    kinds: frozenset[str] = frozenset()
    """The kinds of components that others take from it, if it is a loader of the host's or of another pack."""


class Loaders:
    """Remembers the loaders of the prompts that ran."""

    def __init__(self) -> None:
        self.givers: dict[Place, Giver] = {}
        self.computed_at: dict[str, Place] = {}
        """Digest -> the node and the workflow that computed it last."""
        self.last_digests: dict[Place, str] = {}
        """What a node computed last."""
        self.made_for: dict[str, str] = {}
        """Component -> what its node computed when it came; without those that came since a node began last."""
        self.traced: dict[str, None] = {}
        """Digests of results of which it is known in which result each of their models came first."""

    def read(self, prompt: PromptGraph) -> None:
        """Take the loaders of a prompt that begins; those that its workflow has no more are forgotten."""
        workflow = prompt.workflow_id
        for place in [place for place in self.givers if place[1] == workflow and place[0] not in prompt.nodes]:
            del self.givers[place]
        for node_id in prompt.nodes:
            names = tuple(prompt.file_names(node_id))
            is_ours = prompt.class_of(node_id).startswith(OUR_PREFIX)
            if names or is_ours:
                kinds = frozenset() if is_ours else frozenset(prompt.kinds_made(node_id))
                remember(self.givers, (node_id, workflow), Giver(prompt.digests.get(node_id, ""), names, kinds))

    def note_computed(
        self, digest: str, node_id: str, workflow_id: str | None, components: Iterable[KnownComponent]
    ) -> None:
        """Note that a node begins to compute what follows from a digest; ``components`` exist already."""
        self.made_for = {component.id: self.digest_of(component) for component in components}
        remember(self.computed_at, digest, (node_id, workflow_id))
        remember(self.last_digests, (node_id, workflow_id), digest)

    def trace(self, digest: str, sources: Iterable[str]) -> bool:
        """Return whether what came in no earlier result came in this one first.

        Args:
            digest: of what a node has computed.
            sources: the digests of what it was given. Where one of them was computed before anyone looked, a model in
                this result may be of that one.
        """
        is_traced = all(source in self.traced for source in sources)
        if is_traced:
            remember(self.traced, digest, None)
        return is_traced

    def digest_of(self, component: KnownComponent) -> str:
        """Return what a component's node computed when it came; "" where that is not known."""
        if component.node_id is None:
            return ""
        return self.made_for.get(component.id) or self.last_digests.get((component.node_id, component.workflow_id), "")

    def rows(self, components: Iterable[KnownComponent]) -> list[dict[str, Any]]:
        """Return the loaders that have components now, with the ids of these; JSON-able."""
        known, givers = Known(components), dict(self.givers)
        owned = {place: self.components_of(place, giver, known, givers) for place, giver in givers.items()}
        for place, id in unnamed_of(givers, owned, known).items():
            owned[place].append(id)
        return [
            {"node_id": node_id, "workflow_id": workflow_id, "components": ids}
            for (node_id, workflow_id), ids in owned.items()
            if ids
        ]

    def components_of(self, place: Place, giver: Giver, known: Known, givers: dict[Place, Giver]) -> list[str]:
        source = self.computed_at.get(giver.digest, place)
        owned = known.by_node.get(place) or known.by_node.get(source)
        if owned is None:
            named = [component for name in giver.names for component in known.by_file.get(name, ())]
            owned = [
                *known.by_result.get(giver.digest, ()),
                *(part for part in named if not part.result and not is_claimed(part, place, givers)),
            ]
        else:
            owned = [component for component in owned if self.digest_of(component) == giver.digest] or owned
        return list(dict.fromkeys(component.id for component in owned))


def is_claimed(component: KnownComponent, place: Place, givers: dict[Place, Giver]) -> bool:
    """Whether a component is another loader's, or another workflow's; what a node manages is its loader's, too."""
    if component.node_id is None:
        return False
    owner = givers.get((component.node_id, component.workflow_id))
    return component.workflow_id != place[1] or owner is None or bool(owner.names)


def unnamed_of(givers: Mapping[Place, Giver], owned: Mapping[Place, Sequence[str]], known: Known) -> dict[Place, str]:
    """Return the components without a file's name or a result that belong to loaders without a component of that kind.

    Equal loaders, as in two workflows, have one model. Where there are several, nothing tells which is whose.
    """
    by_kind: dict[str, list[str]] = {}
    for component in known.by_id.values():
        if not component.names_file and component.node_id is None and not component.result:
            by_kind.setdefault(component.kind, []).append(component.id)
    found = {}
    for kind, ids in by_kind.items():
        lacking = {
            place: giver.digest or place
            for place, giver in givers.items()
            if kind in giver.kinds and not any(known.by_id[id].kind == kind for id in owned[place])
        }
        if len(ids) == 1 and len(set(lacking.values())) == 1:
            found |= dict.fromkeys(lacking, ids[0])
    return found
