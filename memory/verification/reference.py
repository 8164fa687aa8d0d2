"""A component that computes without the engine: its weights are plain copies on the device where it computes.

[Note: reference] Managed results are compared with those of the reference, so it moves weights without staging memory,
copy streams or the engine's forward hooks. Weights are copied one by one from where they rest, each copy is
synchronous, and everything computes on one device. The reference shares three things with the engine: the weight
stores, because nothing else has the weights; the record of which module holds which weight; and the copying of an
outermost call's arguments to one device and back (`DeviceHops.visit`), so that both sides see the same containers. It
uses its own `DeviceHops` object, without copies made by a split.

Encoded weights are decoded from their stored values, so their reference is exact, too. Weight stores of weights that
a file has are compared with the file separately (`find_changed_weights`).
"""

from __future__ import annotations

import itertools
import sys
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import torch
from torch import nn

from ..manager.manager import MemoryManager
from ..manager.member import Member
from ..planner.plan import ComponentPlan
from ..runtime.blocks.weight_group import WeightGroup
from ..runtime.blocks.weight_store import FileStore
from ..runtime.forwards.device_hops import DeviceHops, Visit
from ..runtime.forwards.forward_pass import Hold
from ..runtime.managed_component import ManagedComponent
from ..runtime.tensors.parameter_slots import ParameterSlot, as_held
from ..weights.quantized_leaves import leaves_of
from ..weights.source import WeightsSource
from ..weights.stored_encodings import leaf_name
from .comparison import same_bits
from .recording import remove_hooks_of
from .snapshot import go_through

__all__ = ["Reference", "find_changed_weights", "read_at_rest"]


class Reference:
    """One component without the engine, in the body of `entered`. Other threads wait for its end.

    A call copies the weights to the device and drops them at its end; block by block if they do not fit together.
    """

    def __init__(self, manager: MemoryManager, member: Member, *, by_blocks: bool = False) -> None:
        self.manager = manager
        self.member = member
        self.managed: ManagedComponent = member.managed
        self.module = self.managed.module
        self.device = self.managed.primary
        self.thread_id = threading.get_ident()
        self.by_blocks = by_blocks
        """Whether blocks are copied one by one; becomes True if they do not fit together."""
        self.first_held: dict[int, int] = {}
        self.depth = 0
        self.held: list[tuple[dict[str, Any], str, Any]] = []
        """The tables, names and tensors that weights replaced in the module, to be put back."""
        self.loaded: set[int] = set()
        """The blocks on the device, if they are copied one by one."""
        self.hops = DeviceHops()
        self.visit: Visit | None = None
        """The copying of the outermost call's arguments, if any were on another device."""
        self.handled: BaseException | None = None
        """The exception that the caller of the outermost call was handling; it was not raised in the call."""
        self.lenders: list[Reference] = []
        """References of the components that own weights of this module; loaded while it computes."""
        self.hold = Hold(self.module)
        self.plan: ComponentPlan | None = None
        """The plan with which the component was loaded before; None if it was not."""
        self.left_out: list[tuple[dict[int, Any], dict[int, Any]]] = []
        blocks = self.managed.component.blocks
        groups = [group for group in self.managed.groups if group.name]
        self.groups = {
            number: [group for group in groups if group.name == block.name] for number, block in enumerate(blocks)
        }
        """By block: its own group, and the group of layers added to it."""
        self.fixed = [group for group in self.managed.groups if not group.name]

    def borrow_from(self, lenders: Iterable[Reference]) -> None:
        """Load these components, too, while this one computes."""
        self.lenders = list(lenders)

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Compute without the engine in the body. At its end, also after errors, the engine manages the module again.

        The component is unloaded first, which saves what was written on its devices, and is loaded again afterwards.
        """
        with self.managed.passes.held(self.hold):
            try:
                self.begin()
                yield
            finally:
                go_through(self.end)

    def begin(self) -> None:
        self.plan = self.managed.plan if self.managed.is_loaded else None
        with self.manager.exclusive():
            self.manager.hold(self.member, self)
            self.managed.unload()
            self.managed.finish_copies()
        self.managed.hooks.detour()
        self.left_out = find_engine_hooks(self.module)
        for hooks, before in self.left_out:
            for number in [number for number, hook in before.items() if is_engines(hook)]:
                del hooks[number]
        self.hook()

    def end(self) -> None:
        """Undo `begin`, even an interrupted one. Idempotent; can be called again after an interrupt."""
        remove_hooks_of(self, self.module.modules())
        for hooks, before in self.left_out:
            added = {number: hook for number, hook in hooks.items() if number not in before}
            kept = {number: hook for number, hook in before.items() if number in hooks or is_engines(hook)}
            hooks.update(kept)
            for number in [*kept, *added]:  # in their old order, hooks that were added meanwhile last
                hooks[number] = hooks.pop(number)
        self.left_out = []
        self.unload()
        self.managed.hooks.end_detour()
        with self.manager.exclusive():
            if self.plan is not None and not self.managed.is_loaded:
                # If the memory is taken by now, the next forward makes a new plan.
                with suppress(torch.OutOfMemoryError):
                    self.managed.load(self.plan)
                    self.managed.finish_copies()
            self.manager.let_go(self.member, self)
        self.plan = None
        self.managed.passes.close(self.hold)

    # -- hooks of our own

    def hook(self) -> None:
        blocks = [self.module.get_submodule(block.name) for block in self.managed.component.blocks]
        for number, block in enumerate(blocks):
            for part in block.modules():
                part.register_forward_pre_hook(partial(self.before_part, number), prepend=True)
        modules = self.managed.find_hooked_modules()
        # Prepended later, so these run before the hooks of parts.
        for module in {*modules.entries, *modules.inner, *blocks}:
            module.register_forward_pre_hook(self.before_entry, with_kwargs=True, prepend=True)
            module.register_forward_hook(self.after_entry, always_call=True)

    def before_entry(self, module: nn.Module, args: Any, kwargs: Any = None) -> Any:
        if threading.get_ident() != self.thread_id:  # other threads wait at the engine's gate, after this hook
            return None
        self.depth += 1
        if self.depth > 1:
            return None
        self.handled = sys.exc_info()[1]
        for lender in self.lenders:
            lender.begin_lending()
        self.load()
        self.visit = self.hops.visit((args, kwargs), self.device.torch_device, source=None, target=None)
        return None if self.visit is None else self.visit.lent.value

    def after_entry(self, module: nn.Module, args: Any, output: Any) -> Any:
        if threading.get_ident() != self.thread_id:
            return None
        self.depth -= 1
        if self.depth:
            return None
        failed = output is None and sys.exc_info()[1] is not self.handled
        if self.visit is not None and not failed:
            output = self.visit.end(output)
        self.unload()
        for lender in self.lenders:
            lender.end_lending()
        return output

    def begin_lending(self) -> None:
        """Load the weights for a borrower's call, unless they are loaded."""
        self.depth += 1
        if self.depth == 1:
            self.load()

    def end_lending(self) -> None:
        """End what `begin_lending` began."""
        self.depth -= 1
        if not self.depth:
            self.unload()

    def before_part(self, number: int, module: nn.Module, args: Any) -> None:
        """Load one block in place of another. It stays until the next is loaded, as its parent may use its parts."""
        if threading.get_ident() != self.thread_id:
            return
        if self.by_blocks and number not in self.loaded and self.depth:
            for other in list(self.loaded):
                self.unload_block(other)
            self.first_held[number] = len(self.held)
            self.loaded.add(number)
            for group in self.groups[number]:
                self.put(group)

    # -- weights

    def load(self) -> None:
        """Load the weights: all of them, or only the non-block weights."""
        if self.device.is_cpu:
            self.by_blocks = False
        elif not self.by_blocks:
            self.by_blocks = not self.has_room()
        for group in self.fixed:
            self.put(group)
        if not self.by_blocks:
            for group in itertools.chain.from_iterable(self.groups.values()):
                self.put(group)

    def has_room(self) -> bool:
        """Whether all weights fit on the device, beside the memory that forwards needed there."""
        weights = sum(wide_bytes(group, slot) for group in self.managed.groups for slot in group.slots)
        margin = self.member.activation_bytes[self.device.name]
        return bool(weights + margin <= self.device.free_bytes())

    def put(self, group: WeightGroup) -> None:
        for index, slot in enumerate(group.slots):
            if not slot.owners:  # a buffer that the module replaced
                continue
            weight = self.plain(group, index, slot)
            for module, name in slot.owners:
                places: dict[str, Any] = module._buffers if slot.is_buffer else module._parameters
                self.held.append((places, name, places[name]))
                places[name] = weight

    def plain(self, group: WeightGroup, index: int, slot: ParameterSlot) -> torch.Tensor:
        """Return a weight for the module: a copy on the device, in the form in which it computes."""
        target = self.device.torch_device
        leaves = leaves_of(slot.held) if slot.is_buffer else read_at_rest(group, index)
        with torch.inference_mode(False), torch.no_grad():
            here = [leaf.detach().to(target, copy=True) for leaf in leaves]
            if slot.encoding is not None:
                here = [slot.encoding.decode(here, group.wide_dtypes[slot.spec.name])]
        return as_held(iter(here), slot)

    def unload_block(self, number: int) -> None:
        """Unload one block. It was loaded last: blocks are loaded after all other weights, and one at a time."""
        first = self.first_held.pop(number, len(self.held))
        self.put_back(first)
        self.loaded.discard(number)

    def put_back(self, first: int) -> None:
        while len(self.held) > first:
            places, name, before = self.held[-1]
            places[name] = before
            self.held.pop()  # last, so an interrupt before it only repeats the step

    def unload(self) -> None:
        """Put back what the module held. Idempotent; can be called again after an interrupt."""
        self.depth = 0
        self.put_back(0)
        self.loaded.clear()
        self.visit = self.handled = None
        self.hops.forget()


def find_engine_hooks(module: nn.Module) -> list[tuple[dict[int, Any], dict[int, Any]]]:
    """Return the hook tables with engine hooks other than those of `ForwardHooks`, each with a copy of its contents."""
    tables = [hooks for part in module.modules() for hooks in (part._forward_pre_hooks, part._forward_hooks)]
    return [(hooks, dict(hooks)) for hooks in tables if any(map(is_engines, hooks.values()))]


def is_engines(hook: Any) -> bool:
    while isinstance(hook, partial):
        hook = hook.func
    module = str(getattr(hook, "__module__", ""))
    package = __name__.rsplit(".", 2)[0]
    return module.startswith(f"{package}.") and module.rpartition(".")[2] not in (
        "forward_hooks",
        "recording",
        "reference",
    )


def read_at_rest(group: WeightGroup, index: int) -> list[torch.Tensor]:
    """Return the leaves of a weight at rest, in host memory. Reads a weight that rests in its file."""
    slot = group.slots[index]
    store = group.at_rest.store
    if isinstance(store, FileStore):
        first = group.layout.first_leaf(index)
        name = store.names[first]
        places = range(first, first + group.layout.num_leaves[index])
        if first in store.shown:
            return [store.read_encoded(place) for place in places]
        if name is not None:
            with torch.inference_mode(False):
                weight = torch.empty(slot.held.shape, dtype=slot.held.dtype)
            store.source.read_into([(name, weight)], drop_pages=True)
            kind = group.encoded.get(index)
            if kind is None:
                return [weight]
            return (slot.encoding or kind.measure(weight, name=name)).encode(weight)
        return [store.kept[place] for place in places]
    if group.host_slab is None:
        return leaves_of(slot.held)
    return group.layout.leaf_views(group.host_slab)[index]


def wide_bytes(group: WeightGroup, slot: ParameterSlot) -> int:
    """Return the bytes of a weight in the form in which it computes."""
    if slot.encoding is not None:
        return slot.spec.num_elements * group.wide_dtypes[slot.spec.name].itemsize
    return slot.spec.weight_bytes


def find_changed_weights(managed: ManagedComponent) -> list[tuple[str, str]]:
    """Return block and name of each weight in host memory that differs from its file.

    Reads all of the component's files. Leaves out weights that other code is known to have written to, and weights into
    which peft merged a LoRA.

    Raises:
        InvalidInput: a file has changed.
    """
    source = managed.source
    if source is None:
        return []
    changed = []
    with source.held():
        for group in managed.groups:
            if isinstance(group.at_rest.store, FileStore) or (
                group.at_rest.store is not None and managed.packing.written.is_known_of(group)
            ):
                continue
            for index, slot in enumerate(group.slots):
                if slot.is_buffer or not slot.owners or not source.holds(slot.spec):
                    continue
                if any(getattr(module, "merged", False) is True for module, _ in slot.owners):
                    continue
                own = read_at_rest(group, index)
                read = leaves_in_file(group, index, source, own)
                if not all(same_bits(one.detach().cpu(), other) for one, other in zip(own, read, strict=True)):
                    changed.append((group.name, slot.spec.name))
    return changed


def leaves_in_file(
    group: WeightGroup, index: int, source: WeightsSource, own: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """Return the leaves of a weight as its file has them, or as they are made of what it has."""
    slot = group.slots[index]
    name = slot.spec.name
    with torch.no_grad(), torch.inference_mode(False):
        if source.has_encoded(slot.spec, group.encoded.get(index)):
            read = [torch.empty(leaf.shape, dtype=leaf.dtype) for leaf in own]
            source.read_into([(leaf_name(name, number), leaf) for number, leaf in enumerate(read)], drop_pages=True)
            return read
        stored = torch.empty(slot.spec.shape, dtype=group.wide_dtypes[name])
        source.read_into([(name, stored)], drop_pages=True)
        return slot.form.encode(stored)
