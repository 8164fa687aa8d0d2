"""One weight of a module: every place in the module tree that holds it, and putting other tensors there."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from ...errors import UnsafeState
from ...weights.component import TensorSpec
from ...weights.quantized_leaves import Wrapper, form_of
from ...weights.source import WeightsSource
from ...weights.storage_form import AS_STORED, EncodedForm, StorageForm
from .watched_data import unwatch

__all__ = [
    "ParameterSlot",
    "add_up",
    "as_held",
    "become",
    "differs_from_file",
    "fill_slots",
    "find_slots",
    "in_list",
    "read_weights",
    "repoint",
    "split_owner",
    "store_weight",
]

EMPTY = torch.empty(0)
# The dicts that every module has.
OWN_DICTS = frozenset(vars(nn.Module()))


@dataclass(slots=True)
class ParameterSlot:
    """One weight and every place in the module tree that holds it (tied weights have several)."""

    spec: TensorSpec
    owners: tuple[tuple[nn.Module, str], ...]
    """Changed by `set_owners`."""
    is_buffer: bool
    form: StorageForm = AS_STORED
    """How it rests."""
    is_inference: bool = False
    """Whether it was made in inference mode."""
    lists: list[tuple[nn.Module, str, Any]] = field(default_factory=list)
    """Where attributes of modules that are lists or dicts hold it too, or a weak reference to it.

    An LSTM has its weights in a list, and compares them with weak references to those of its last call: where these
    differ it makes the list anew, and packs the weights into device memory of its own.
    """

    places: list[Any] = field(default_factory=list)
    """What its group has worked out from the owners of its slots; cleared when these change."""

    def describe(self, spec: TensorSpec) -> None:
        """Take another name or other numbers."""
        self.spec = spec

    def become_as(self, found: ParameterSlot) -> None:
        """Take the numbers of a slot that was found for the same weight in the module as it is now."""
        self.spec, self.lists = found.spec, found.lists

    def rest_as(self, form: StorageForm) -> None:
        """Rest in another form from now on; its leaves are the caller's to write."""
        self.form = form

    def clear_with(self, places: list[Any]) -> None:
        """Clear this list whenever the owners change: a group works it out from them."""
        self.places = places

    def set_owners(self, owners: Iterable[tuple[nn.Module, str]]) -> None:
        """Have other places in the module tree from now on."""
        self.owners = tuple(owners)
        self.places.clear()

    @property
    def held(self) -> torch.Tensor:
        """What the module holds for it, at the first place that has anything.

        Empty where none has: the module has replaced a buffer by one of its own, or other code took the weight out.
        """
        for module, name in self.owners:
            tensor = (module._buffers if self.is_buffer else module._parameters).get(name)
            if tensor is not None:
                return tensor
        return EMPTY

    def tensors_of(self, module: nn.Module) -> dict[str, torch.Tensor]:
        """Return where a module has its weights of this kind."""
        return module._buffers if self.is_buffer else module._parameters  # type: ignore[return-value]

    @property
    def is_quantized(self) -> bool:
        """Whether the module holds a wrapper around its leaves."""
        return isinstance(self.form, Wrapper)

    @property
    def encoding(self) -> EncodedForm | None:
        """Its form if it computes from a copy that is made of its leaves."""
        return self.form if isinstance(self.form, EncodedForm) else None

    @property
    def is_plain_buffer(self) -> bool:
        return self.is_buffer and not self.is_quantized

    def hold(self, tensor: torch.Tensor) -> None:
        """Put a tensor where the module tree looks for it; native dict entries, no attribute hooks."""
        for module, name in self.owners:
            self.tensors_of(module)[name] = tensor
        for place in self.lists:
            put_in_list(place, tensor)


def find_slots(module: nn.Module, specs: Sequence[TensorSpec]) -> dict[str, ParameterSlot]:
    """Return a slot for each described weight of a module, by name.

    Raises:
        UnsafeState: the module has no weight of a name.
    """
    by_identity: dict[int, list[str]] = {}
    tensors: dict[str, tuple[torch.Tensor, bool]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        tensors[name] = parameter, False
        by_identity.setdefault(id(parameter), []).append(name)
    for name, buffer in module.named_buffers(remove_duplicate=False):
        tensors[name] = buffer, True
        by_identity.setdefault(id(buffer), []).append(name)
    lists = find_lists(module, by_identity)
    parts = dict(module.named_modules(remove_duplicate=False))
    slots = {}
    for spec in specs:
        if spec.name not in tensors:
            raise UnsafeState(f"{spec.name!r} is gone from its module: it is released; manage it again")
        tensor, is_buffer = tensors[spec.name]
        places = [name.rpartition(".") for name in by_identity[id(tensor)]]
        owners = tuple((parts[path], attribute) for path, _, attribute in places)
        slots[spec.name] = ParameterSlot(
            spec,
            owners,
            is_buffer,
            form=form_of(tensor),
            is_inference=tensor.is_inference(),
            lists=lists.get(id(tensor), []),
        )
    return slots


def find_lists(module: nn.Module, known: Collection[int]) -> dict[int, list[tuple[nn.Module, str, Any]]]:
    """Return where lists and dicts in the attributes of modules hold any of these tensors, by its identity."""
    found: dict[int, list[tuple[nn.Module, str, Any]]] = {}
    for part in module.modules():
        for name, holder in vars(part).items():
            if isinstance(holder, dict | list) and name not in OWN_DICTS:
                for key, value in holder.items() if isinstance(holder, dict) else enumerate(holder):
                    tensor = value() if isinstance(value, weakref.ref) else value
                    if isinstance(tensor, torch.Tensor) and id(tensor) in known:
                        found.setdefault(id(tensor), []).append((part, name, key))
    return found


def in_list(place: tuple[nn.Module, str, Any]) -> tuple[Any, Any]:
    """Return the list or dict that a module has there now, and what it holds; None for what is gone."""
    part, name, key = place
    holder = vars(part).get(name)
    if isinstance(holder, dict):
        return holder, holder.get(key)
    return (holder, holder[key]) if isinstance(holder, list) and key < len(holder) else (None, None)


def put_in_list(place: tuple[nn.Module, str, Any], tensor: torch.Tensor) -> None:
    """Put a tensor, or a weak reference to it, where a list or dict of a module holds one."""
    holder, held = in_list(place)
    if isinstance(held, torch.Tensor):
        holder[place[2]] = tensor
    elif isinstance(held, weakref.ref):
        holder[place[2]] = weakref.ref(tensor)


def split_owner(module: nn.Module, name: str) -> tuple[nn.Module, str]:
    path, _, attribute = name.rpartition(".")
    return module.get_submodule(path), attribute


def as_held(leaves: Iterator[torch.Tensor], slot: ParameterSlot, *, lasting: bool = False) -> torch.Tensor:
    """Return what the module holds for a weight whose next leaves these are; ``lasting``: as it came."""
    # A wrapper made outside of inference mode cannot be used inside it, one made inside can compute in both.
    keeps_mode = isinstance(slot.form, Wrapper) and slot.form.keeps_mode
    with torch.inference_mode(keeps_mode and (slot.is_inference or not lasting)):
        tensor = slot.form.assemble(leaves)
        if slot.is_buffer:
            return tensor
        if slot.is_quantized:
            tensor._is_param = True  # what nn.Parameter() does after a detach(), in which some wrappers copy
            return tensor
        # Weights are read-only at inference: device copies never ask for a gradient.
        return nn.Parameter(tensor, requires_grad=False)


def store_weight(
    slot: ParameterSlot, targets: Sequence[torch.Tensor], weight: torch.Tensor, *, may_lie_there: bool = False
) -> None:
    """Write a weight into views of its leaves, in its form; ``may_lie_there``: a leaf that does is not copied."""
    with torch.no_grad():
        for target, leaf in zip(targets, slot.form.encode(weight), strict=True):
            if not (may_lie_there and leaf.device.type == "cpu" and leaf.data_ptr() == target.data_ptr()):
                target.copy_(leaf.detach())


def read_weights(
    slots: Sequence[ParameterSlot],
    source: WeightsSource | None,
    *,
    progress: Callable[[int], None] | None = None,
    drop_pages: bool = False,
) -> list[torch.Tensor]:
    """Return weights of the files in memory of their own, read in one go; as `WeightsSource.read_into`."""
    with torch.inference_mode(False):
        weights = [torch.empty(slot.held.shape, dtype=slot.held.dtype) for slot in slots]
    if slots:
        assert source is not None
        targets = [(slot.spec.name, weight) for slot, weight in zip(slots, weights, strict=True)]
        source.read_into(targets, progress=progress, drop_pages=drop_pages)
    return weights


def differs_from_file(slot: ParameterSlot, source: WeightsSource) -> bool:
    """Whether the module holds another weight in host memory than the files have; reads the weight.

    Raises `InvalidInput` if a file has changed.
    """
    if slot.held.is_meta:
        return False
    (stored,) = read_weights([slot], source, drop_pages=True)
    with torch.inference_mode(slot.held.is_inference()), torch.no_grad():
        own, read = (each.detach().contiguous().reshape(-1).view(torch.uint8) for each in (slot.held, stored))
        return not torch.equal(own, read)


def fill_slots(
    slots: Sequence[ParameterSlot],
    source: WeightsSource | None,
    progress: Callable[[int], None] | None = None,
    *,
    mapped: Mapping[str, torch.Tensor] = MappingProxyType({}),
) -> None:
    """Give memory to those that the module has on the meta device, with what the files have of them.

    ``mapped``: weights by name in mappings of their files, which are not read.
    """
    for slot in slots:
        if slot.held.is_meta and slot.spec.name in mapped:
            repoint(slot, [mapped[slot.spec.name]])
    on_meta = [slot for slot in slots if slot.held.is_meta]
    for slot, weight in zip(on_meta, read_weights(on_meta, source, progress=progress), strict=True):
        repoint(slot, [weight])


def repoint(slot: ParameterSlot, leaves: Sequence[torch.Tensor], *, lasting: bool = False) -> torch.Tensor:
    """Point the held tensor object to other memory, and return it.

    The object stays the same for all who refer to it. Inference tensors cannot be repointed outside
    inference mode, quantized weights and those without memory not at all: these are replaced.
    """
    held = slot.held
    if held.is_inference() or slot.is_quantized or held.is_meta or leaves[0].is_meta:
        held = as_held(iter(leaves), slot, lasting=lasting)
        slot.hold(held)
    else:
        (leaf,) = leaves
        # A parameter that has gradients cannot be pointed to integers; for those the module holds another tensor.
        held.data = leaf if leaf.is_floating_point() or not held.requires_grad else leaf.view(torch.float8_e5m2)
    return held


def become(tensor: torch.Tensor, home: torch.Tensor) -> bool:
    """Point a tensor object that other code keeps to the memory of another tensor, in place of ours.

    Returns False for one that a graph of autograd refers to, which computes with it as it was.
    """
    if tensor._use_count() > 1:  # type: ignore[attr-defined]
        return False
    is_plain = type(unwatch(tensor)) in (nn.Parameter, torch.Tensor) and type(home) in (nn.Parameter, torch.Tensor)
    with torch.inference_mode(tensor.is_inference()), torch.no_grad():
        if is_plain and torch._has_compatible_shallow_copy_type(tensor, home):
            tensor.data = home.detach()
            return True
    try:
        with torch.inference_mode(home.is_inference()), torch.no_grad():
            plain = home.detach()
            if isinstance(tensor, nn.Parameter) and not isinstance(plain, nn.Parameter):
                plain = nn.Parameter(plain, requires_grad=False)
        torch.utils.swap_tensors(tensor, plain)  # type: ignore[no-untyped-call]
    except RuntimeError:  # there are weak references to it
        return False
    return True


def add_up(progress: Callable[[int], None] | None) -> Callable[[int], None] | None:
    """Return what takes the bytes done so far and passes on by how many they have grown."""
    if progress is None:
        return None
    last = 0

    def tell(num_done: int) -> None:
        nonlocal last
        last, grown = num_done, num_done - last
        progress(grown)

    return tell
