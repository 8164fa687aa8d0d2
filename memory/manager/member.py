"""Members of the manager: components under its care, and which modules cannot join."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from weakref import WeakSet

import torch
from torch import nn
from torch._subclasses import FakeTensor
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ..errors import InvalidInput
from ..options.profile import OffloadProfile
from ..planner.plan import ComponentPlan
from ..runtime.input_size import Size
from ..runtime.managed_component import ManagedComponent
from ..runtime.module_caches import address_of, computed_weights
from ..runtime.other_offloaders import find_rival, is_scripted
from ..runtime.parameter_slots import split_owner
from ..weights.component import Component
from ..weights.sharing import Shared, named_tensors
from ..weights.source import WeightsSource

__all__ = ["Member", "refuse_apart", "refuse_shared_split", "refuse_unsuitable"]


class Member:
    """One component under the manager: its managed component, how it was asked for, and when it was used."""

    def __init__(
        self, member_id: str, name: str, node_id: str | None, workflow_id: str | None, profile: OffloadProfile
    ) -> None:
        self.id = member_id
        self.name = name
        self.node_id = node_id
        self.workflow_id = workflow_id
        self.profile = profile
        self.managed: ManagedComponent
        self.is_hosted = False
        """A host decides when it comes and goes: entering it takes a lease and loads nothing."""
        self.call: WeakSet[Member] = WeakSet([self])
        """Those that came with the same call of `Registry.add`: they share a profile's budget for a device."""
        self.look: Callable[[], None] | None = None
        """Called before it computes; raises if the pipeline that it is a part of has an unmanaged part now."""
        self.patterns: Mapping[str, str] | None = None
        self.lenders: tuple[Member, ...] = ()
        """The owners of weights that its module borrows ([Note: sharing] in `weights/sharing.py`), by their ranks."""
        self.borrowers: WeakSet[Member] = WeakSet()
        """Those whose lender it is, or was before they were released."""
        self.rank = 0
        """Of the members that hold a weight, the one with the lowest rank owns it."""
        self.num_holders = 1
        """The number of calls of `Registry.add` that returned it and have not released it."""
        self.choices: tuple[object, ...] = ()
        """Placement, profile and precision that the first of those calls chose for it."""
        self.evict_last = False
        """It leaves a device only when nothing else is left to leave."""
        self.restores = True
        """Its module gets ordinary weights when it is released; not if the module is no longer used."""
        self.leases: set[object] = set()
        """What keeps it from being evicted now: passes, and leases for other uses."""
        self.last_use = 0
        self.last_use_s: float | None = None
        self.planned_in_epoch = -1
        self.activation_bytes: Counter[str] = Counter()
        """What its forwards needed of a device beside what was there, in this run and the last."""
        self.activation_before: Counter[str] = Counter()
        self.allocated_at_entry: dict[str, int] = {}
        self.foreign_at_plan: dict[str, int] = {}
        """What others than torch's allocator had of each device when it was planned."""
        self.settled: set[Size] = set()
        """The sizes of input for which what is loaded now leaves enough free, as far as is known."""
        self.is_wary = False
        """Another part of the same call ran out of memory, and this one has not run through since."""
        self.short_on: set[str] = set()
        """The devices that had not enough memory for what was planned to be loaded."""
        self.spoiled: set[Size] = set()
        """The sizes of which a pass ran out of memory as another program took some: that is an excuse only once."""
        self.num_passes = 0
        """Those that came through outside of runs since its peaks were last looked at anew."""
        self.digest: str | None = None
        """That of its component's content."""
        self.block_seconds: dict[int, float] | None = None
        """What each block was seen to take to compute, in the order in which they ran."""
        self.taken_seconds: dict[str, dict[int, float]] = {}
        """The same by device, until all devices of a split have timed theirs, which may be in different passes."""

    def come_with(self, other: Member) -> None:
        """Share a device's budget with all that came under management by the call with which the other one came."""
        self.call.discard(self)
        self.call = other.call
        self.call.add(self)

    def borrow_from(self, lenders: Iterable[Member]) -> None:
        """Take others as the owners of weights that its module has, too."""
        self.lenders = tuple(lenders)
        for lender in self.lenders:
            lender.borrowers.add(self)


def refuse_unsuitable(
    module: nn.Module,
    component: Component,
    sharers: Iterable[ManagedComponent],
    members: Mapping[str, Member],
    source: WeightsSource | None,
    *,
    lent: Collection[tuple[nn.Module, str]] = (),
    borrowers: Collection[Member] = (),
) -> None:
    """Refuse weights that are on a device, have no memory, or are managed already, before anything is changed.

    Args:
        sharers: the managed components, of every manager, that may have weights of the module.
        members: those of this manager.
        lent: the places of weights that other components own and lend.
        borrowers: the members to which this one lends.
    """
    name = component.name
    rival = find_rival(module.modules())
    if rival is not None:
        raise InvalidInput(f"{name} has {rival}")
    managed = find_managed(sharers, members, borrowers)
    for parameter_name, parameter in module.named_parameters():
        if lent and split_owner(module, parameter_name) in lent:
            continue
        if id(parameter) in managed:
            by = managed[id(parameter)]
            raise InvalidInput(f"{name}: {parameter_name!r} is managed already, {by}; release that first")
        if parameter.device.type != "cpu" and not (parameter.is_meta and component.has_file):
            raise InvalidInput(
                f"{name}: {parameter_name!r} is on {parameter.device}; allowed: cpu, move the module there first"
            )
    for spec in component.buffers:
        if module.get_buffer(spec.name).is_meta and not (source is not None and source.holds(spec)):
            raise InvalidInput(
                f"{name}: buffer {spec.name!r} is on meta, and no file has it as {spec.dtype} {list(spec.shape)}; "
                "allowed: one that its file has as it is, or with memory on cpu"
            )


def find_managed(
    sharers: Iterable[ManagedComponent], members: Mapping[str, Member], borrowers: Collection[Member]
) -> dict[int, str]:
    """Return by what each parameter is managed, by id, except by borrowers."""
    lent_to = {id(other.managed) for other in borrowers}
    found: dict[int, str] = {}
    for managed in sharers:
        member = members.get(managed.owner)
        is_ours = member is not None and member.managed is managed
        by = f"by {managed.owner!r}" if is_ours else f"as {managed.owner!r} of another MemoryManager"
        if id(managed) not in lent_to:
            found.update((id(parameter), by) for parameter in managed.module.parameters())
    return found


def refuse_odd(name: str, module: nn.Module) -> None:
    """Refuse modules whose weights cannot be given to them from outside, or cannot be packed as they are.

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
                f"{what} is {parameter.dtype}, of torch.ao; allowed: optimum-quanto, or as it was before"
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
                    f"{name}: {path + '.' if path else ''}{attribute}, which is no parameter, shows the memory of one, "
                    "which will move; make it one"
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
    """Refuse to split a module over devices whose blocks share weights or buffers: a tensor has one device."""
    if len(plan.shares) == 1:
        return
    share_of = {component.blocks[number].name: share.device for share in plan.shares for number in share.blocks}
    for tensors in (module.named_parameters, module.named_buffers):
        homes: dict[int, set[str]] = {}
        for name, tensor in tensors(remove_duplicate=False):
            home = next((device for block, device in share_of.items() if name.startswith(f"{block}.")), "")
            homes.setdefault(id(tensor), set()).add(home or plan.shares[0].device)
            if len(homes[id(tensor)]) > 1:
                raise InvalidInput(f"{component.name} cannot be split: {name!r} is shared by parts on both devices")


def refuse_apart(
    modules: Mapping[str, nn.Module],
    parts: Mapping[str, tuple[Component, ComponentPlan]],
    shared: Mapping[str, Shared],
) -> None:
    """Refuse plans under which a shared weight would not be on the device that computes with it.

    Args:
        modules, parts, shared: those of all components that share weights, by id.

    Raises:
        InvalidInput: borrower and owner compute on two devices, or a block that uses such a weight does not
                compute where the weight is.
    """
    for name, common in shared.items():
        component, plan = parts[name]
        for owner in common.owners:
            ours, theirs = plan.shares[0].device, parts[owner][1].shares[0].device
            if ours != theirs:
                raise InvalidInput(
                    f"{name} and {owner} share {common.samples[owner]!r}, which can be on one device, not on {ours} "
                    f"and {theirs}: give both the same placement"
                )
        away = {component.blocks[number].name: share.device for share in plan.shares[1:] for number in share.blocks}
        in_blocks = {tensor.name for block in component.blocks for tensor in block.tensors}
        for path, tensor in named_tensors(modules[name]) if away else ():
            block = next((block for block in away if path.startswith(f"{block}.")), None)
            is_common = id(tensor) in common.borrowed or (id(tensor) in common.lent and path not in in_blocks)
            if block is not None and is_common:
                partners = [owner for owner in (common.borrowed.get(id(tensor)),) if owner]
                partners += [other for other, its in shared.items() if id(tensor) in its.borrowed and other != name]
                raise InvalidInput(
                    f"{name} and {partners[0] if partners else 'another component'} share {path!r}, which is on "
                    f"{plan.shares[0].device}, and block {block} computes on {away[block]}: place {name} on one device"
                )
