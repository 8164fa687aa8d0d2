"""Checks before a module comes under management: which modules, weights and splits are refused, and why."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

import torch
from torch import nn
from torch._subclasses import FakeTensor
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ..errors import InvalidInput
from ..planner.plan import ComponentPlan
from ..runtime.changes.other_offloaders import find_rival, is_scripted
from ..runtime.forwards.module_caches import address_of, computed_weights
from ..runtime.tensors.parameter_slots import split_owner
from ..runtime.tensors.unread_weight import unread_of
from ..runtime.weight_places import WeightPlaces
from ..weights.component import Component
from ..weights.source import WeightsSource
from .member import Member

__all__ = ["refuse_odd", "refuse_shared_split", "refuse_unsuitable"]


def refuse_unsuitable(
    module: nn.Module,
    component: Component,
    sharers: Iterable[WeightPlaces],
    members: Mapping[str, Member],
    source: WeightsSource | None,
    *,
    lent: Collection[tuple[nn.Module, str]] = (),
    borrowers: Collection[Member] = (),
) -> None:
    """Refuse weights that are on a device, have no memory, or are managed already; changes nothing.

    Args:
        sharers: the managed components, of every manager, that may have weights of the module.
        members: those of this manager.
        lent: the weights that other components own and lend to this one.
        borrowers: the members to which this one lends.
    """
    name = component.name
    rival = find_rival(module.modules())
    if rival is not None:
        raise InvalidInput(f"{name} has {rival}")
    managed = find_managed(sharers, members, borrowers)
    encoded = dict(component.encoded_as)  # whose codes are read from their file, wherever the others are
    for parameter_name, parameter in module.named_parameters():
        if lent and split_owner(module, parameter_name) in lent:
            continue
        if id(parameter) in managed:
            by = managed[id(parameter)]
            raise InvalidInput(f"{name}: {parameter_name!r} is managed already, {by}; release that first")
        unread, in_file = unread_of(parameter), component.has_file or parameter_name in encoded
        if unread is not None and parameter.is_meta and not in_file:
            raise InvalidInput(
                f"{name}: {unread.told}; manage the model as load_model returned it, or call load_weights(model) before"
            )
        if parameter.device.type != "cpu" and not (parameter.is_meta and in_file):
            raise InvalidInput(
                f"{name}: {parameter_name!r} is on {parameter.device}; allowed: cpu, move the module there first"
            )
    for spec in component.buffers:
        if module.get_buffer(spec.name).is_meta and not (source is not None and source.holds(spec)):
            raise InvalidInput(
                f"{name}: buffer {spec.name!r} is on meta, and no file has it as {spec.dtype} {list(spec.shape)}; "
                "load the buffer on the CPU, or name a file that contains it"
            )


def find_managed(
    sharers: Iterable[WeightPlaces], members: Mapping[str, Member], borrowers: Collection[Member]
) -> dict[int, str]:
    """Return the managed component of each parameter, by the parameter's id; borrowers do not count."""
    lent_to = {other.managed.places for other in borrowers}
    found: dict[int, str] = {}
    for places in sharers:
        member = members.get(places.owner)
        is_ours = member is not None and member.managed.places is places
        by = f"by {places.owner!r}" if is_ours else f"as {places.owner!r} of another MemoryManager"
        if places not in lent_to:
            found.update((id(parameter), by) for parameter in places.module.parameters())
    return found


def refuse_odd(name: str, module: nn.Module) -> None:
    """Refuse modules whose weights cannot be replaced from outside, or cannot be packed as they are.

    Raises:
        InvalidInput: a TorchScript module, or a weight that is lazy, sparse, nested, without memory,
            quantized by torch.ao, or seen elsewhere.
    """
    for path, part in module.named_modules():
        if is_scripted(part):
            raise InvalidInput(f"{name}: {path or 'it'} is a TorchScript module; allowed: the module it was made from")
    addresses: set[int] = set()
    for path, parameter in (*module.named_parameters(), *module.named_buffers()):
        what = f"{name}: {path!r}"
        if is_lazy(parameter):
            raise InvalidInput(f"{what} has no shape yet (a lazy module); call the module once before")
        if parameter.layout is torch.jagged or parameter.is_nested:
            raise InvalidInput(f"{what} is a nested tensor; allowed: dense, .to_padded_tensor(0.0)")
        if parameter.layout is not torch.strided:
            raise InvalidInput(f"{what} is {str(parameter.layout).removeprefix('torch.')}; allowed: dense, .to_dense()")
        if parameter.is_quantized:
            raise InvalidInput(
                f"{what} is quantized by torch.ao, which is not supported; use optimum-quanto or the unquantized model"
            )
        if parameter.numel() and not parameter.is_meta and not is_traceable_wrapper_subclass(parameter):
            if not has_memory(parameter):
                raise InvalidInput(f"{what} is a {type(parameter).__name__} without memory; allowed: a dense tensor")
            addresses.add(parameter.untyped_storage().data_ptr())
    for path, part in module.named_modules():
        computed = {attribute for attribute, _ in computed_weights(part)}
        for attribute, tensor in vars(part).items():
            if isinstance(tensor, torch.Tensor) and attribute not in computed and address_of(tensor) in addresses:
                raise InvalidInput(
                    f"{name}: {path + '.' if path else ''}{attribute} shares memory with a parameter; "
                    "register it as a parameter"
                )


def has_memory(tensor: torch.Tensor) -> bool:
    """Whether a tensor that is not on the meta device has its contents in memory of its own."""
    if isinstance(tensor, FakeTensor):
        return False
    try:
        return tensor.untyped_storage().data_ptr() != 0
    except RuntimeError:  # a wrapper around others (MaskedTensor), or zeros that are nowhere
        return False


def refuse_shared_split(module: nn.Module, component: Component, plan: ComponentPlan) -> None:
    """Refuse to split a module whose blocks share weights or buffers over devices: a tensor is on one device."""
    if len(plan.shares) == 1:
        return
    share_of = {component.blocks[number].name: share.device for share in plan.shares for number in share.blocks}
    for tensors in (module.named_parameters, module.named_buffers):
        homes: dict[int, set[str]] = {}
        for name, tensor in tensors(remove_duplicate=False):
            home = next((device for block, device in share_of.items() if name.startswith(f"{block}.")), "")
            homes.setdefault(id(tensor), set()).add(home or plan.shares[0].device)
            if len(homes[id(tensor)]) > 1:
                raise InvalidInput(
                    f"{component.name} cannot be split: {name!r} is shared by parts on several devices; place it on "
                    f"{plan.shares[0].device} alone"
                )
