"""What a module holds at rest for an encoded weight: a tensor that is wide when it is read or written.

[Note: encoded at rest] Others compute with weights that rest: peft adds a LoRA to them, gives its own layers their
dtype, and takes sums apart again. With float8 values without their scale all of that would fail, or be wrong without a
word. So the tensor at rest has the dtype in which the weight computes, each operation on it decodes it first, and what
is written to it is encoded again, measured anew. Reading costs the wide copy, writing three of them; whatever is
written loses what its form loses. While the block computes the module holds plain tensors.

A view cannot share memory with encoded leaves. It is one of a wide copy, the window, which is compared and taken over
before the weight is used the next time. What is written to the whole goes to a window, too, until another weight is
written to: what follows in one go, such as the sums of two LoRAs, is rounded once.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import increment_version
from torch.utils._pytree import tree_map_only

from ..errors import InvalidInput
from ..transfer.slabs import Form
from .deep_copies import Copied
from .parameter_slots import ParameterSlot
from .recomputing import RestingWeight, in_backward, with_weights_on_device
from .watched_data import LEFT_ALONE, answer_device, device_in_backward, device_of

__all__ = ["EncodedLeaves", "EncodedWeight"]

DATA: Any = torch.Tensor.data  # the descriptor
LEAF = "leaf"
"""The names of its leaves begin so for the flatten protocol of torch."""
SAME = (torch.ops.aten.detach.default, torch.ops.aten.alias.default)


class EncodedLeaves:
    """The leaves of one encoded weight where they rest, for all tensors that show them.

    Args:
        leaves: in the group's slab.
        wide: what the weight is when it computes.
        opened: takes this when a window is opened, for `settle` to be called.
    """

    written: weakref.ref[EncodedLeaves] | None = None
    """The one that was written to last, of all."""

    def __init__(
        self, leaves: Sequence[torch.Tensor], slot: ParameterSlot, wide: Form, opened: list[EncodedLeaves]
    ) -> None:
        self.leaves = list(leaves)
        self.slot = slot
        self.wide = wide
        self.opened = opened
        self.window: torch.Tensor | None = None
        self.has_views = False
        """Whether others have views of the window."""
        self.asked_dtype: torch.dtype | None = None
        """What the weight was to be converted to."""
        self.has_ended = False
        """Whether it shows a plain tensor now."""

    def end(self, plain: torch.Tensor) -> None:
        """Show this plain tensor from now on: the weight is encoded no more."""
        self.window = plain.detach()
        self.leaves = [self.window]
        self.opened, self.has_ended = [], True

    def widened(self, device: torch.device | None = None) -> torch.Tensor:
        """Return a wide copy, where the values are or on another device."""
        assert self.slot.encoding is not None
        with torch.no_grad():
            leaves = self.leaves if device is None else [leaf.to(device) for leaf in self.leaves]
            wide = self.wide.allocate(leaves[0].device)
            self.slot.encoding.decode_into(wide, leaves)
        return wide

    def current(self) -> torch.Tensor:
        return self.window if self.window is not None else self.widened()

    def open_window(self, *, for_views: bool) -> torch.Tensor:
        self.has_views = self.has_views or for_views
        if self.window is None:
            with torch.inference_mode(False):
                self.window = self.widened()
            self.opened.append(self)
        return self.window

    def note_write(self) -> None:
        """The window was written to: take over what was written to another one before, if it has no views."""
        before = EncodedLeaves.written() if EncodedLeaves.written is not None else None
        EncodedLeaves.written = weakref.ref(self)
        if before is not None and before is not self and not before.has_views:
            before.settle()

    def store(self, weight: torch.Tensor) -> None:
        """Encode a wide weight. Raises `InvalidInput` for NaN and infinity; nothing has changed then."""
        assert self.slot.encoding is not None
        with torch.no_grad():
            form = self.slot.encoding.measure(weight, name=self.slot.spec.name)
            before = self.leaves[0]._version
            for leaf, encoded in zip(self.leaves, form.encode(weight), strict=True):
                leaf.copy_(encoded)
            if self.leaves[0]._version == before:  # below the layer of torch that counts writes
                increment_version(self.leaves[0])
        self.slot.form = form

    def settle(self) -> None:
        """Take over what was written to the window. Raises as `store`."""
        if self.has_ended:
            return
        window, self.window, self.has_views = self.window, None, False
        if window is not None and not torch.equal(window, self.widened()):
            self.store(window)


class EncodedWeight(RestingWeight, torch.Tensor):
    """A weight that rests encoded, shown in the form in which it computes ([Note: encoded at rest])."""

    encoded: EncodedLeaves
    rests_narrower = True
    """Tells `component.leaf_bytes` to describe it as the plain weight that it represents."""

    @staticmethod
    def __new__(cls, encoded: EncodedLeaves) -> EncodedWeight:
        wide, device = encoded.wide, encoded.leaves[0].device
        with torch.inference_mode(False):
            weight: EncodedWeight = torch.Tensor._make_wrapper_subclass(
                cls, wide.shape, strides=wide.strides, dtype=wide.dtype, device=device, requires_grad=False
            )
        weight.encoded = encoded
        return weight

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if in_backward():
            given = with_weights_on_device(function, args, kwargs or {}, leaves_alone=LEFT_ALONE)
            if given is not None:
                return function(*given[0], **given[1])
        others = [kind for kind in types if not issubclass(kind, EncodedWeight)]
        if others:  # as if this class had no function of its own
            return others[0].__torch_function__(function, others, args, kwargs or {})
        with torch._C.DisableTorchFunctionSubclass():
            return function(*args, **(kwargs or {}))

    def device_in_backward(self) -> torch.device:
        # Wherever it rests: torch chooses other operators for classes of others, which save other tensors.
        return device_in_backward(self) or device_of(self)

    def copy_on(self, device: torch.device) -> torch.Tensor:
        encoded = self.encoded
        return encoded.window.to(device, copy=True) if encoded.window is not None else encoded.widened(device)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in SAME:
            return EncodedWeight(args[0].encoded)
        returns = func._schema.returns
        is_view = any(value.alias_info is not None and not value.alias_info.is_write for value in returns)
        shown: dict[int, tuple[EncodedWeight, torch.Tensor]] = {}

        def show(weight: EncodedWeight) -> torch.Tensor:
            encoded = weight.encoded
            if id(encoded) not in shown:
                opens = is_view or func._schema.is_mutable
                wide = encoded.open_window(for_views=is_view) if opens else encoded.current()
                shown[id(encoded)] = weight, wide
            return shown[id(encoded)][1]

        def conceal(result: torch.Tensor) -> torch.Tensor:
            return next((weight for weight, wide in shown.values() if wide is result), result)

        wide_args, wide_kwargs = tree_map_only(EncodedWeight, show, (args, kwargs))
        with torch.inference_mode(False) if is_view else nullcontext():
            output = func(*wide_args, **wide_kwargs)
        if func._schema.is_mutable:
            for weight in written_weights(func._schema, args, kwargs):
                weight.encoded.note_write()
        return output if is_view else tree_map_only(torch.Tensor, conceal, output)

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return [f"{LEAF}{number}" for number in range(len(self.encoded.leaves))], None

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, torch.Tensor], context: None, size: Any, stride: Any) -> torch.Tensor:
        return inner[f"{LEAF}0"]

    def __getattr__(self, name: str) -> torch.Tensor:
        if name.startswith(LEAF):
            return self.encoded.leaves[int(name.removeprefix(LEAF))]
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return self.encoded.leaves[0].device if self.encoded.has_ended else answer_device(self)

    @property
    def data(self) -> torch.Tensor:
        return DATA.__get__(self)  # type: ignore[no-any-return]

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        if isinstance(value, EncodedWeight) and value.encoded is self.encoded:
            return  # what was written to it is there already
        if value.shape != self.shape:
            name, has = self.encoded.slot.spec.name, list(self.shape)
            raise InvalidInput(f"weight {name!r} has the shape {has}; allowed: that one, not {list(value.shape)}")
        if value.dtype is not self.dtype and not self.encoded.has_ended:
            self.encoded.asked_dtype = value.dtype
            self.encoded.opened.append(self.encoded)
        with torch.no_grad():
            given = value.detach().to(self.encoded.leaves[0].device, self.dtype)
            if not torch.equal(given, self.encoded.current()):  # else it was moved
                self.copy_(given)

    def plain(self) -> torch.Tensor:
        """Return a wide copy of torch's own class."""
        wide = self.encoded.current().clone()
        return nn.Parameter(wide, requires_grad=False) if isinstance(self, nn.Parameter) else wide

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        if id(self) in memo:
            return memo[id(self)]  # type: ignore[no-any-return]
        encoded, shared = self.encoded, Copied.of(memo)
        if isinstance(self, nn.Parameter):
            copied = self.plain()
        elif encoded.window is not None:  # views of it are copied with it
            shared.kept.append(shown := encoded.window.detach())
            copied = shown.__deepcopy__(memo)  # type: ignore[no-untyped-call]
        else:
            shared.kept.append(encoded)
            copied = shared.found.setdefault(("encoded", id(encoded)), self.plain()).detach()
        memo[id(self)] = copied
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.plain().__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    def __repr__(self, **options: Any) -> str:  # type: ignore[override]
        return repr(self.plain())


def written_weights(schema: Any, args: Any, kwargs: Any) -> list[EncodedWeight]:
    """Return the weights that an operation writes to."""
    found = []
    for place, argument in enumerate(schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[place] if place < len(args) else kwargs.get(argument.name)
            for each in value if isinstance(value, list | tuple) else [value]:
                if isinstance(each, EncodedWeight):
                    found.append(each)
    return found
