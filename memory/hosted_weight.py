"""Access to single weights of a hosted component, for its host."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from .runtime.blocks.block_state import BlockState
from .runtime.blocks.computing_views import FactorLayer
from .runtime.blocks.weight_group import WeightGroup
from .runtime.blocks.weight_store import FileStore
from .runtime.tensors.parameter_slots import ParameterSlot
from .verification.comparison import same_bits
from .verification.reference import read_at_rest
from .weights.mapped_files import map_again
from .weights.movable import is_packed
from .weights.quantized_leaves import PackedForm, leaves_of
from .weights.side_factors import SideFactors, add_product
from .weights.storage_form import StorageForm

__all__ = ["HostedWeight", "Rescale"]


@dataclass(frozen=True, slots=True)
class HostedWeight:
    """One managed weight, which the host can read and write."""

    group: WeightGroup
    slot: ParameterSlot

    @property
    def block(self) -> str:
        """The name of its block; empty for non-block weights."""
        return self.group.name

    @property
    def owner(self) -> nn.Module:
        """The first module that holds the weight."""
        return self.slot.owners[0][0]

    @property
    def is_encoded(self) -> bool:
        """Whether it rests in an encoded form."""
        return self.slot.encoding is not None

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape in which it computes."""
        return self.slot.spec.shape

    @property
    def is_packed(self) -> bool:
        """Whether its bytes mean nothing without the attributes of its tensor."""
        return is_packed(self.slot.held)

    @property
    def attributes(self) -> dict[str, Any]:
        """What the tensors of a packed weight say of its bytes; a copy."""
        return dict(self.packed_form.attributes)

    @property
    def packed_form(self) -> PackedForm:
        assert isinstance(self.slot.form, PackedForm)
        return self.slot.form

    def say(self, attributes: Mapping[str, Any]) -> None:
        """Make all tensors of a packed weight say this of its bytes."""
        self.packed_form.say(attributes)

    @contextmanager
    def saying(self) -> Iterator[None]:
        """In the body the host may say more of a packed weight, also on another tensor that it puts in its place."""
        resting = self.slot.held
        try:
            yield
            self.say(vars(self.slot.held))
        finally:
            self.slot.hold(resting)

    @property
    def factor(self) -> float | None:
        """The factor that decodes what the module holds at rest by a product; None if it needs none, or another way."""
        if self.slot.encoding is None or self.group.at_rest.shows(self.slot):
            return None
        return self.slot.encoding.factor

    def reader(self) -> tuple[torch.Tensor, Callable[..., torch.Tensor] | None]:
        """Return the tensor at rest, and a function that decodes it; None if it needs no decoding.

        Neither references the module.
        """
        stored = self.mapped() if self.rests_in_file else self.at_rest()
        return stored, None if self.factor is None else partial(multiply, self.factor)

    def at_rest(self) -> torch.Tensor:
        """Return the tensor at rest; the one on the device of a weight whose file has it otherwise."""
        index, copy = self.group.index_of(self.slot.spec.name), self.group.copy
        if copy is not None and isinstance(self.group.at_rest.store, FileStore):
            return copy.views[index]
        return self.group.at_rest.tensors[index]

    @property
    def rests_in_file(self) -> bool:
        """Whether its file has it, and no copy of it is in host memory; one on a device may be there, unchanged."""
        copy = self.group.copy
        is_changed = copy is not None and copy.find_written()[0]
        return self.slot.spec.name in self.group.at_rest.names_in_file and not is_changed

    def mapped(self) -> torch.Tensor:
        """Return a weight that rests in its file as a tensor in a private mapping of that, which costs no memory.

        Raises:
            InvalidInput: the file has changed.
        """
        store, name = self.group.at_rest.store, self.slot.spec.name
        assert isinstance(store, FileStore)
        return map_again(store.source, [name])[name]

    def original(self) -> torch.Tensor:
        """Return the weight in host memory of its own, in the form in which it computes, or mapped as `mapped`."""
        return self.mapped() if self.rests_in_file else self.wide(torch.device("cpu"))

    def wide(self, device: torch.device) -> torch.Tensor:
        """Return a copy on a device, in the form in which the weight computes."""
        if self.rests_in_file:
            return self.mapped().to(device, copy=True)
        return self.group.wide(self.slot.spec.name, device)

    def takes_factors(self, factors: SideFactors) -> bool:
        """Whether they can be added in decoding (`HostedComponent.set_factors`), and are no larger than what rests."""
        name, spec = self.slot.spec.name, self.slot.spec
        wide = self.group.wide_dtypes[name]
        num_bytes = (factors.up.numel() + factors.down.numel()) * wide.itemsize
        index = self.group.index_of(name)
        return (
            self.group.decodes_plainly(name)
            and factors.suit(spec.shape)
            and num_bytes <= sum(form.num_bytes for form in self.group.layout.leaf_forms(index))
        )

    @property
    def factor_layer(self) -> FactorLayer | None:
        """What is added to it in decoding, if anything."""
        return self.group.views.factors.get(self.group.index_of(self.slot.spec.name))

    def add_factors(self, weight: torch.Tensor) -> torch.Tensor:
        """Return what it computes as, from the weight in that dtype; a copy where factors are added."""
        layer = self.factor_layer
        return weight if layer is None else sum_of(weight, layer)

    def adder(self) -> AddFactors | None:
        """Return the function that a host's layer applies to the weight if it reads it outside its block, or None."""
        layer = self.factor_layer
        return None if layer is None else AddFactors(self.group, layer)

    def leaves_at_rest(self) -> tuple[StorageForm, list[torch.Tensor]]:
        """Return how an encoded weight rests, in host memory of its own, for `put_leaves`.

        Encoded once more, what it decodes to would not be the same bits in every form.
        """
        index = self.group.index_of(self.slot.spec.name)
        with torch.inference_mode(False), torch.no_grad():
            return self.slot.form, [leaf.detach().to("cpu", copy=True) for leaf in self.group.newest_leaves(index)]

    def put_leaves(self, form: StorageForm, leaves: Sequence[torch.Tensor]) -> None:
        """Make an encoded weight rest as it did. The caller must have settled the component."""
        self.group.overwrite_leaves(self.slot.spec.name, form, leaves)

    def overwrite(self, weight: torch.Tensor) -> None:
        """Overwrite the weight at rest; its block is then in host memory. The caller must have settled the component.

        Raises:
            InvalidInput: the block rests in its file, and that has changed.
        """
        if self.group.copy is None and isinstance(self.group.at_rest.store, FileStore):
            assert self.group.read_idle is not None
            self.group.read_idle(self.group)
        self.group.overwrite(self.slot.spec.name, weight)

    @contextmanager
    def held_on(self, device: torch.device) -> Iterator[None]:
        """In the body the module holds a wide copy on a device, which is written to the weight at rest afterwards."""
        resting = self.slot.held
        with torch.inference_mode(False):
            self.slot.hold(nn.Parameter(self.wide(device), requires_grad=False))
        try:
            yield
            written = self.slot.held
        finally:
            self.slot.hold(resting)
        self.overwrite(written)

    def rescale(self) -> Rescale | None:
        """Return the function that a host's layer applies to the weight if it reads it outside its block, or None."""
        if self.factor is None:
            return None
        module, attribute = self.slot.owners[0]
        form = self.group.at_rest.held_form(self.group.index_of(self.slot.spec.name))
        return Rescale(module, attribute, self.factor, form.dtype)

    def read_stored(self) -> torch.Tensor:
        """Return a copy of the weight at rest in host memory, in the dtype in which it computes."""
        name, encoding = self.slot.spec.name, self.slot.encoding
        leaves = [leaf.detach() for leaf in read_at_rest(self.group, self.group.index_of(name))]
        if encoding is not None:
            return encoding.decode(leaves, self.group.wide_dtypes[name])
        (leaf,) = leaves
        return leaf.clone()

    def is_same(self, read: torch.Tensor) -> bool:
        """Whether the weight at rest equals the one that the host read; True if the host's has another form."""
        own = read_at_rest(self.group, self.group.index_of(self.slot.spec.name))
        theirs = leaves_of(read)
        if [(leaf.dtype, leaf.shape) for leaf in own] != [(leaf.dtype, leaf.shape) for leaf in theirs]:
            return True
        return all(same_bits(one.detach(), other.detach().cpu()) for one, other in zip(own, theirs, strict=True))


def multiply(factor: float, weight: torch.Tensor, **_: Any) -> torch.Tensor:
    return weight * factor


class Rescale:
    """Multiplies an encoded weight by its factor if the module holds it at rest. References the module weakly."""

    def __init__(self, module: nn.Module, attribute: str, factor: float, dtype: torch.dtype) -> None:
        self.module = weakref.ref(module)
        self.attribute = attribute
        self.factor = factor
        self.dtype = dtype
        """The dtype of the weight at rest."""

    def __call__(self, weight: torch.Tensor) -> torch.Tensor:
        module = self.module()
        held = module._parameters[self.attribute] if module is not None else None
        return weight * self.factor if held is not None and held.dtype == self.dtype else weight


class AddFactors:
    """Adds side factors to a weight unless its block computes, where they were added in decoding."""

    def __init__(self, group: WeightGroup, layer: FactorLayer) -> None:
        self.group = weakref.ref(group)
        self.layer = layer

    def __call__(self, weight: torch.Tensor) -> torch.Tensor:
        group = self.group()
        if group is None or group.state is BlockState.COMPUTING:
            return weight
        return sum_of(weight, self.layer)


def sum_of(weight: torch.Tensor, layer: FactorLayer) -> torch.Tensor:
    """Return a copy of a weight with the product of side factors, as decoding makes it."""
    summed = weight.detach().clone(memory_format=torch.contiguous_format)
    up, down = (layer.get_parameter(part).detach().to(summed.device, summed.dtype) for part in ("up", "down"))
    add_product(summed, up, down)
    return summed
