"""The shares of a component, one per device of its plan, of blocks that are packed already and of new groups."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from ..planner.plan import ComponentPlan
from ..planner.sizes import fixed_tensors
from ..transfer.devices import Device
from ..weights.component import Component
from ..weights.source import WeightsSource
from .blocks.bundle import Bundle
from .blocks.read_on_use import ReadOnUse
from .blocks.weight_group import WeightGroup
from .devices.device_share import DeviceShare
from .devices.ledger import Ledger
from .kept_blocks import Home, find_kept
from .packing import Packing
from .tensors.absent_weight import AbsentWeight
from .tensors.parameter_slots import ParameterSlot, find_slots

__all__ = ["build_shares"]


def build_shares(
    owner: str,
    module: nn.Module,
    component: Component,
    plan: ComponentPlan,
    devices: Mapping[str, Device],
    ledger: Ledger,
    *,
    source: WeightsSource | None,
    earlier: Packing | None,
    for_host: bool,
) -> list[DeviceShare]:
    """Return the shares of a plan, not loaded; nothing is packed yet but what stays packed.

    Unpacks the blocks of an earlier packing, which handed over, that this plan does not go on with.

    Args:
        source: the files that the weights may rest in.
        for_host: whether a host reads and writes single weights by itself.
    """
    kept: dict[Home, Bundle] = {}
    if earlier is not None:
        kept = find_kept(
            earlier.left,
            module,
            component,
            plan,
            source=source,
            written=earlier.written.names,
            cpus=[name for name, device in devices.items() if device.is_cpu],
        )
        earlier.unpack_left(list(kept.values()), reads=not component.has_file)
    specs = [tensor for block in [*component.blocks, component.non_block] for tensor in block.tensors]
    slots = find_slots(module, [*specs, *component.buffers])
    for slot in [slot for bundle in kept.values() for group in bundle.groups for slot in group.slots]:
        slot.become_as(slots[slot.spec.name])
    for slot in slots.values():
        take_home(slot)
    shares = []
    for index, part in enumerate(plan.shares):
        blocks = {}
        for number in part.blocks:
            block = component.blocks[number]
            bundle = kept.get((index, number))
            if bundle is None:
                own = [slots[tensor.name] for tensor in block.tensors]
                # A host reads single weights by itself, but not those of layers that their own parents read.
                shows_wide = not for_host or component.is_in_layers
                bundle = Bundle(WeightGroup(block.name, own, forms=plan.forms, shows_wide=shows_wide))
            blocks[number] = bundle
        fixed = kept.get((index, None))
        if fixed is None:
            tensors = fixed_tensors(component, part.blocks, first=index == 0)
            fixed = Bundle(WeightGroup("", [slots[tensor.name] for tensor in tensors]))
        share = DeviceShare(
            owner,
            devices[part.device],
            fixed,
            blocks,
            ledger,
            host_replaces=for_host,
            widens_whole=component.widens_whole,
            store=devices[plan.store] if plan.store else None,
        )
        shares.append(share)
    return shares


def take_home(slot: ParameterSlot) -> None:
    """Give the module a weight itself where it holds what stood for one in its file, and that block has ended.

    What other code has exchanged is another weight than the one that the file has of this name.
    """
    held = slot.held
    home = held.reader.home if isinstance(held, AbsentWeight) and isinstance(held.reader, ReadOnUse) else None
    if home is not None:
        with torch.inference_mode(False):
            slot.hold(nn.Parameter(home.detach(), requires_grad=held.requires_grad))
