"""Which of two moves a model's weights: core's dynamic VRAM, or our block mover; and why."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import comfy.model_management
import torch

from ...memory.errors import InvalidInput
from ...memory.hosted_component import device_name
from ...memory.options.precision import precision_for
from ...memory.options.profile import covers
from . import aimdo
from .hosted import AUTO_ENGINE, BLOCKS, DYNAMIC, Request

__all__ = ["Choice", "choose_engine", "text_of_off"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """What moves a model, and what its node says of that."""

    engine: str
    notes: tuple[str, ...] = ()

    @property
    def is_dynamic(self) -> bool:
        return self.engine == DYNAMIC


def choose_engine(
    request: Request, *, name: str, kind: str, loaded_on: torch.device | None = None, reads_itself: bool = True
) -> Choice:
    """Return the engine for a model: what was asked for, or where that is ``auto``, core's where it can do the job.

    Args:
        loaded_on: the device of a dynamic model that another loader made; it cannot be dynamic elsewhere.
        reads_itself: core reads its file as it is.

    Raises:
        InvalidInput: ``dynamic`` was asked for, together with what only blocks can do.
    """
    if request.engine == BLOCKS:
        return Choice(engine=BLOCKS)
    if not aimdo.is_on():
        if request.engine == AUTO_ENGINE:
            return Choice(engine=BLOCKS)
        return Choice(engine=BLOCKS, notes=(text_of_off(),))
    reason = why_blocks(request, name, kind, loaded_on) if reads_itself else "ComfyUI cannot read its file by itself"
    if reason is None:
        return Choice(engine=DYNAMIC)
    if request.engine == DYNAMIC:
        raise InvalidInput(f"engine dynamic of {name}: {reason}; allowed: engine auto or blocks")
    return Choice(engine=BLOCKS, notes=(f"engine blocks: {reason}",))


def text_of_off() -> str:
    """Return what a node says where dynamic VRAM was asked for and is off."""
    return f"engine dynamic: dynamic VRAM is off ({aimdo.why_off()}), so engine blocks is used"


def why_blocks(request: Request, name: str, kind: str, loaded_on: torch.device | None) -> str | None:
    """Return what was asked for that dynamic VRAM cannot do, None if it can do everything."""
    profile, item = request.profile, request.placement.items[0]
    precision = precision_for(request.precision, name, kind)
    if len(request.devices) > 1:
        return f"dynamic VRAM cannot split a model over {' and '.join(request.devices)}"
    if request.devices == ("cpu",):
        return "dynamic VRAM is for GPUs, not for placement cpu"
    if item.tier is not None:
        return f"dynamic VRAM chooses by itself where weights rest; tier {item.tier} was asked for"
    if loaded_on is not None and request.devices and request.devices[0] != device_name(loaded_on):
        return f"its loader put it on {device_name(loaded_on)}, and placement {request.devices[0]} was asked for"
    index = loaded_on.index if loaded_on is not None else device_index(request)
    if not aimdo.is_on_for(index or 0):
        return f"dynamic VRAM is off for gpu:{index or 0}"
    if precision is None and covers(profile.quantize, name, kind):
        return f"profile {profile.name} asks for {profile.form}, and dynamic VRAM keeps weights as stored"
    if precision is not None and not precision.is_as_stored:
        return f"dynamic VRAM keeps weights as stored; precision {precision.name} was asked for"
    asked = settings_for_blocks(request, name, kind)
    return f"the profile sets {' and '.join(asked)}, which dynamic VRAM does not have" if asked else None


def settings_for_blocks(request: Request, name: str, kind: str) -> Sequence[str]:
    """Return the settings of the profile that concern a model and that only blocks have, as they are written."""
    profile = request.profile
    asked = {
        "prefetch=": profile.prefetch_blocks is not None,
        "pinned=": not covers(profile.pinned, name, kind),
        "unload=": covers(profile.unload, name, kind),
        "compile=": profile.compile,
    }
    return [setting for setting, is_asked in asked.items() if is_asked]


def device_index(request: Request) -> int | None:
    """Return the number of the accelerator that a placement names, else of core's own choice."""
    if request.devices:
        return int(request.devices[0].partition(":")[2])
    index: int | None = comfy.model_management.get_torch_device().index
    return index
