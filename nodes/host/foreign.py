"""Patchers of other packs: which of them can stand behind ours, and the class that joins both.

[Note: joined] A pack with a format of its own subclasses core's patcher. ComfyUI-GGUF's hangs patches on the tensors of
packed weights, for its layers to apply as they unpack them, and loads as core's static patcher does. There the joined
class has ours first: we move the bytes, theirs patches and unpatches. What else a patcher overrides says that it moves
weights by itself (Nunchaku's ``load`` and ``detach`` move the whole model, and leave it where its own offloading does
that): such a model stays with its pack, and with core.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import comfy.model_patcher
import torch
from comfy.model_patcher import ModelPatcher

from ...memory.hosted_component import HostedWeight, has_packed_weights
from .core_fields import set_class
from .patcher import HighwaterPatcher

__all__ = ["class_behind", "class_beside", "why_not_joined"]

# ComfyUI 0.8.0 has no dynamic one.
CORES = {ModelPatcher, getattr(comfy.model_patcher, "ModelPatcherDynamic", ModelPatcher)}
# What a patcher of packed weights overrides: the patching is theirs. Its ``load`` is core's, and makes core patch all
# weights at once and copy them out of their file: ours does both anyway.
PATCHING = frozenset(
    {"clone", "load", "patch_weight_to_device", "pin_weight_to_device", "unpatch_model", "unpin_weight"}
)


class JoinedPatcher(HighwaterPatcher):
    """Ours before another pack's patcher of packed weights."""

    can_repatch = False  # theirs takes all patches off its tensors

    def clone(self, *args: Any, **options: Any) -> ModelPatcher:
        """As core's; also where the other pack's returns a patcher of its own class."""
        clone: Any = super().clone(*args, **options)
        set_class(clone, type(self))
        clone.take_model()
        return clone  # type: ignore[no-any-return]

    def write_patch(self, key: str, weight: HostedWeight, device: torch.device) -> None:
        """Have the other pack hang its patches on a packed weight, whose bytes stay as they are."""
        if not weight.is_packed:
            super().write_patch(key, weight, device)
            return
        self.hosted.said[key] = weight.attributes
        self.hosted.note_patched(key, self.patches[key], None)
        with weight.saying():
            self.patch_weight_to_device(key, device_to=torch.device("cpu"))

    def write_original(self, key: str) -> None:
        if key not in self.hosted.said:
            super().write_original(key)
            return
        self.hosted.weights[key].say(self.hosted.said[key])
        self.hosted.said.pop(key)
        self.hosted.take_patched(key)


@cache
def class_beside(kind: type[ModelPatcher]) -> type[HighwaterPatcher]:
    """Return the class of our patchers for models of another class of patchers; always the same one."""
    if kind in CORES:
        return HighwaterPatcher
    if issubclass(kind, HighwaterPatcher):
        return kind
    return type(f"Managed{kind.__name__}", (JoinedPatcher, kind), {})


def class_behind(kind: type[HighwaterPatcher]) -> type[ModelPatcher]:
    """Return the class of the patcher that moves a model of ours without us: core's, or another pack's."""
    return kind.__bases__[1] if issubclass(kind, JoinedPatcher) else ModelPatcher


def why_not_joined(patcher: ModelPatcher) -> str | None:
    """Return why ours cannot stand before a patcher, None if it can."""
    kind = type(patcher)
    if kind in CORES or issubclass(kind, HighwaterPatcher):
        return None
    own = overridden(kind)
    if "patch_weight_to_device" in own and own <= PATCHING and has_packed_weights(patcher.model):
        return None
    whose = f"another pack's {kind.__name__}"
    moved_by = " and ".join(sorted(own - PATCHING | own & {"load"}))
    return f"{whose} moves it by its own {moved_by}" if moved_by else f"{whose} loads it"


def overridden(kind: type[ModelPatcher]) -> frozenset[str]:
    """Return the methods of core's patcher that a class has of its own."""
    own = kind.__mro__[: kind.__mro__.index(ModelPatcher)]
    return frozenset(
        name for base in own for name, value in vars(base).items() if callable(value) and hasattr(ModelPatcher, name)
    ) - {"__init__", "__doc__"}
