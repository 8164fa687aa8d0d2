"""`manage`: the public Python form. Takes a module, a dict of modules or a pipeline; returns a handle."""

from __future__ import annotations

from types import SimpleNamespace, TracebackType
from typing import Any

import torch
from torch import nn

from .default import default_manager
from .devices import list_devices
from .errors import InvalidInput
from .manager import MemoryManager
from .membership import Member
from .placement import parse_placement
from .plan import Plan
from .profile import parse_profile
from .upcast import parse_precision

__all__ = ["Managed", "discover_components", "manage"]


def discover_components(target: Any) -> dict[str, nn.Module]:
    """Return the modules of a target by name: a module itself, a dict's, or those of a pipeline's ``components``.

    Raises:
        InvalidInput: the target is none of these, or holds no module.
    """
    if isinstance(target, nn.Module):
        return {"model": target}
    parts = target if isinstance(target, dict) else getattr(target, "components", None)
    if not isinstance(parts, dict):
        raise InvalidInput(
            f"cannot manage a {type(target).__name__}; allowed: a torch module, a dict of modules, a diffusers pipeline"
        )
    modules = {str(name): part for name, part in parts.items() if isinstance(part, nn.Module)}
    if not modules:
        raise InvalidInput(f"nothing to manage: the {type(target).__name__} holds no torch module")
    return modules


class Managed:
    """Modules under management; `release` (or leaving the ``with`` block) gives them back as they were."""

    def __init__(self, manager: MemoryManager, members: list[Member], plan: Plan, pipeline: Any) -> None:
        self.manager = manager
        self.members = members
        self.plan = plan
        self.pipeline = pipeline
        self.mark_execution_device()

    @property
    def components(self) -> tuple[str, ...]:
        return tuple(member.name for member in self.members)

    @property
    def device(self) -> torch.device:
        """Where inputs and latents should live: the device of the diffusion model, else of the first component."""
        diffusion = (m for m in self.members if m.attachment.component.kind == "diffusion")
        return next(diffusion, self.members[0]).attachment.primary.torch_device

    def mark_execution_device(self) -> None:
        # A diffusers pipeline whose weights rest on the host asks its modules' `_hf_hook.execution_device` where to
        # make latents; the convention is accelerate's, the attribute is ours and leaves with `release`.
        if self.pipeline is not None:
            for member in self.members:
                member.attachment.module._hf_hook = SimpleNamespace(execution_device=self.device)  # type: ignore[assignment]

    def report(self) -> dict[str, Any]:
        """Return the manager's report, which these components are part of."""
        return self.manager.report()

    def release(self) -> None:
        """Leave every device and hook. Weights that rested in eight bits come back widened. Idempotent."""
        for member in self.members:
            self.manager.remove(member)
            if self.pipeline is not None and "_hf_hook" in vars(member.attachment.module):
                del member.attachment.module._hf_hook

    def __enter__(self) -> Managed:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.release()


def manage(
    target: Any,
    *,
    profile: str = "auto",
    placement: str = "auto",
    precision: str = "as stored",
    manager: MemoryManager | None = None,
    name: str | None = None,
    node_id: str | None = None,
) -> Managed:
    """Take modules under management; they move when they compute, and leave when others need the memory.

    Packs every weight into host slabs, pinned where that helps; nothing goes to a device yet. The module objects,
    and their parameter objects, stay the ones they were.

    Args:
        target: a module, a dict of modules, or a diffusers pipeline.
        profile: ``auto`` fills what is free; a budget such as ``6GiB`` or ``gpu:0=80%`` limits the weights.
        placement: where each component computes and rests, in the placement grammar.
        precision: ``as stored``, or ``fp8 scaled`` for the blocks' weights.
        manager: the manager to join; by default the process-wide one.
        name: a prefix for the components' ids; ``node_id`` the node that loads them, for the report.

    Raises:
        InvalidInput: one line naming the value and what is allowed; the target is as it was.
        DoesNotFit: a component's least form exceeds its device; the target is as it was.
    """
    modules = discover_components(target)
    devices = [device.name for device in list_devices()]
    components = list(modules)
    manager = manager or default_manager()
    members, plan = manager.add(
        modules,
        placement=parse_placement(placement, devices=devices, components=components),
        profile=parse_profile(profile, devices=devices, components=components),
        precision=parse_precision(precision),
        name=name,
        node_id=node_id,
    )
    is_pipeline = not isinstance(target, nn.Module | dict)
    return Managed(manager, members, plan, target if is_pipeline else None)
