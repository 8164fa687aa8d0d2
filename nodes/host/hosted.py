"""The state that all of core's patchers of one model share: the request, and the managed component."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import comfy.model_management
import torch
from torch.utils.hooks import RemovableHandle

from ...memory.hosted_component import HostedComponent, SideFactors
from ...memory.options.placement import AUTO_PLACEMENT, Placement
from ...memory.options.precision import DEFAULT_PRECISION, PrecisionRequest
from ...memory.options.profile import OffloadProfile

__all__ = [
    "AUTO_ENGINE",
    "BLOCKS",
    "DYNAMIC",
    "PARTS",
    "UNLIMITED_BYTES",
    "Hosted",
    "Request",
    "hosted_of",
    "is_cpu",
    "patcher_of",
]

# What moves a model's weights: core's dynamic VRAM, our block mover, or whichever can do what is asked.
AUTO_ENGINE, DYNAMIC, BLOCKS = "auto", "dynamic", "blocks"
# What the parts of a checkpoint are called, by their kinds.
PARTS = {"diffusion": "model", "text": "clip", "vae": "vae"}
# Core says "everything" with this many bytes.
UNLIMITED_BYTES = 1e30

Resting: TypeAlias = tuple[Any, list[torch.Tensor]]
"""The form in which a weight rests, and its leaves."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """What a node asks for: its widgets' texts, read once."""

    profile: OffloadProfile = field(default_factory=OffloadProfile)
    precision: PrecisionRequest = DEFAULT_PRECISION
    placement: Placement = AUTO_PLACEMENT
    node_id: str | None = None
    engine: str = AUTO_ENGINE
    origin: object = field(default_factory=object, compare=False, repr=False)
    """The same one in the requests of all parts of one checkpoint."""

    @property
    def devices(self) -> tuple[str, ...]:
        """The devices that it names, the first computes the ends; none where core chooses."""
        return tuple(share.device for share in self.placement.items[0].devices)

    def of_part(self, kind: str) -> Request:
        """Return what it asks for a checkpoint's part of this kind: its placement alone differs from other parts'."""
        item = replace(self.placement.item_for("", kind), component="*")
        return replace(self, placement=Placement(items=(item,)))


class Token:
    """Every patcher of one model holds the same token: with the last patcher it is freed, which ends the component."""


class Hosted(HostedComponent):
    """A component of core's model, and the other state that all clones of its patcher share."""

    def __init__(self, name: str, kind: str, request: Request, notes: Iterable[str] = ()) -> None:
        super().__init__(
            name,
            kind,
            profile=request.profile,
            precision=request.precision,
            placement=request.placement,
            node_id=request.node_id,
        )
        self.request = request
        self.patched: dict[str, tuple[list[Any], Resting | None]] = {}
        """The patches that weights contain now, by their keys, and how encoded ones rested without them."""
        self.factored: dict[str, tuple[list[Any], SideFactors]] = {}
        """The patches that are added to encoded weights in decoding, and what they add, by their keys."""
        self.hooked: dict[str, Resting] = {}
        """How encoded weights rested before a hook wrote to them, by their keys; what is over may still be there."""
        self.is_repatching = False
        """Whether core takes patches off to put others on: what stays the same may stay where it is."""
        self.said: dict[str, dict[str, Any]] = {}
        """What packed weights said of themselves before their patches were hung on them, by their keys."""
        self.patchable: frozenset[str] | None = None
        """The keys of weights to which core's loader applies patches; None until core was asked."""
        self.notes = list(notes)
        """What its node tells the user."""
        self.reasons = tuple(self.notes)
        self.loaded_on: torch.device | None = None
        """The device on which core loaded it last; a deep copy of the model does not take it over."""
        self.check: RemovableHandle | None = None
        """The hook that checks a ControlNet's inputs."""
        self.token_ref: Callable[[], Token | None] = lambda: None

    def __deepcopy__(self, memo: dict[int, Any]) -> Hosted:
        return Hosted(self.name, self.kind, self.request)  # streams and slabs are not copied

    def add_notes(self, notes: Iterable[str]) -> None:
        self.notes += notes

    def note_loaded(self, device: torch.device | None) -> None:
        """Note where core has it loaded now."""
        self.loaded_on = device

    def note_patchable(self, keys: frozenset[str]) -> None:
        """Note what core's loader patches: it follows from the modules, and so holds for all clones."""
        self.patchable = keys

    def note_patched(self, key: str, patches: list[Any], resting: Resting | None) -> None:
        """Note that a weight contains its patches."""
        self.patched[key] = list(patches), resting

    def take_patched(self, key: str) -> None:
        """Note that a weight is its original again."""
        self.patched.pop(key, None)

    def note_hooked(self, key: str, resting: Resting) -> None:
        """Note how an encoded weight rests, before a hook writes to it."""
        self.hooked[key] = resting

    def set_patch_factors(self, factored: dict[str, tuple[list[Any], SideFactors]]) -> None:
        """Add to encoded weights what these patches add, and nothing to others. Raises as `set_factors`."""
        had, self.factored = self.factored, factored  # should it fail, there may be some of them
        if factored or had:
            self.set_factors({key: factors for key, (_, factors) in factored.items()})

    def note_repatching(self, is_repatching: bool) -> None:
        """Note whether core takes patches off to put others on at once."""
        self.is_repatching = is_repatching

    def check_inputs(self, module: torch.nn.Module, check: Callable[..., None]) -> None:
        """Call a function before each forward of its module, before all hooks that are there by now."""
        if self.check is not None:
            self.check.remove()
        self.check = module.register_forward_pre_hook(check, with_kwargs=True, prepend=True)

    def token(self) -> Token:
        token = self.token_ref()
        if token is None:
            token = Token()
            self.token_ref = weakref.ref(token)
            weakref.finalize(token, self.end).atexit = False
        return token

    def end(self) -> None:
        """The last patcher is gone: remove the model from core's list, then release its memory.

        Core's cache drops what the next prompt does not name, so what its file has of it may be kept.
        """
        forget_dead_entries()
        self.leave()


def forget_dead_entries() -> None:
    """Remove models without a patcher from core's list, as core does when a model is gone."""
    listed = comfy.model_management.current_loaded_models
    for index in reversed(range(len(listed))):
        slot = listed[index]
        if slot.model is None and slot.real_model is not None:
            listed.pop(index)
            if slot.model_finalizer is not None:
                slot.model_finalizer.detach()


def hosted_of(model: Any) -> Hosted | None:
    """Return what hangs on a model of ours; None for others, and for what is no model."""
    hosted: Hosted | None = getattr(model, "highwater", None)
    return hosted


def patcher_of(part: Any) -> Any:
    """Return the patcher of a text encoder or VAE; None for what a loader gives where a file lacks that part."""
    return getattr(part, "patcher", None)


def is_cpu(device: Any) -> bool:
    return torch.device(device).type == "cpu"
