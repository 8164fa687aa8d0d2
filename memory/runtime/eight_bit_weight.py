"""What a module holds at rest for a weight in eight bits: a tensor that is wide when it is read or written.

[Note: eight bits at rest] Others compute with weights that rest: peft adds a LoRA to them, gives its own layers their
dtype, and takes sums apart again. With float8 values without their scale all of that would fail, or be wrong without a
word. So the tensor at rest has the dtype in which the weight computes, each operation on it widens it first, and what
is written to it is brought into eight bits again, with a scale of its own. Reading costs the wide copy, writing three
of them; whatever is written loses what eight bits lose. While the block computes the module holds plain tensors.

A view cannot share memory with eight bits. It is one of a wide copy, the window, which is compared and taken over
before the weight is used the next time. What is written to the whole goes to a window, too, until another weight is
written to: what follows in one go, such as the sums of two LoRAs, is rounded once.
"""

from __future__ import annotations

import weakref
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import increment_version
from torch.utils._pytree import tree_map_only

from ..errors import InvalidInput
from ..weights.fp8 import find_scale, quantize_fp8, upcast_into
from .deep_copies import Copied
from .parameter_slots import ParameterSlot
from .recomputing import RestingWeight, in_backward, with_weights_on_device
from .watched_data import LEFT_ALONE, answer_device, device_in_backward, device_of

__all__ = ["EightBitWeight", "EightBits", "stored_leaf"]

DATA: Any = torch.Tensor.data  # the descriptor
SAME = (torch.ops.aten.detach.default, torch.ops.aten.alias.default)


class EightBits:
    """The eight-bit values of one weight where they rest, for all tensors that show them.

    Args:
        leaf: float8_e4m3fn, in the group's slab.
        opened: takes this when a window is opened, for `settle` to be called.
    """

    written: weakref.ref[EightBits] | None = None
    """The one that was written to last, of all."""

    def __init__(self, leaf: torch.Tensor, slot: ParameterSlot, dtype: torch.dtype, opened: list[EightBits]) -> None:
        self.leaf = leaf
        self.slot = slot
        self.dtype = dtype
        self.opened = opened
        self.window: torch.Tensor | None = None
        self.has_views = False
        """Whether others have views of the window."""
        self.asked_dtype: torch.dtype | None = None
        """What the weight was to be converted to."""
        self.has_ended = False
        """Whether it shows a plain tensor now."""

    def end(self, plain: torch.Tensor) -> None:
        """Show this plain tensor from now on: the weight leaves its eight bits."""
        self.window = self.leaf = plain.detach()
        self.opened, self.has_ended = [], True

    def widened(self, device: torch.device | None = None) -> torch.Tensor:
        """Return a wide copy, where the values are or on another device."""
        assert self.slot.scale is not None
        with torch.no_grad():
            leaf = self.leaf if device is None else self.leaf.to(device)
            wide = torch.empty_like(leaf, dtype=self.dtype)
            upcast_into(wide, leaf, self.slot.scale)
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
        before = EightBits.written() if EightBits.written is not None else None
        EightBits.written = weakref.ref(self)
        if before is not None and before is not self and not before.has_views:
            before.settle()

    def store(self, weight: torch.Tensor) -> None:
        """Bring a wide weight into eight bits. Raises `InvalidInput` for NaN and infinity; nothing has changed then."""
        with torch.no_grad():
            scale = find_scale(weight, name=self.slot.spec.name)
            before = self.leaf._version
            self.leaf.copy_(quantize_fp8(weight, scale))
            if self.leaf._version == before:  # below the layer of torch that counts writes
                increment_version(self.leaf)
        self.slot.scale = scale

    def settle(self) -> None:
        """Take over what was written to the window. Raises as `store`."""
        if self.has_ended:
            return
        window, self.window, self.has_views = self.window, None, False
        if window is not None and not torch.equal(window, self.widened()):
            self.store(window)


class EightBitWeight(RestingWeight, torch.Tensor):
    """A weight that rests in eight bits, shown in the form in which it computes ([Note: eight bits at rest])."""

    bits: EightBits
    rests_narrower = True
    """Tells `component.leaf_bytes` to describe it as the plain weight that it represents."""

    @staticmethod
    def __new__(cls, bits: EightBits) -> EightBitWeight:
        leaf = bits.leaf
        with torch.inference_mode(False):
            weight: EightBitWeight = torch.Tensor._make_wrapper_subclass(
                cls, leaf.shape, strides=leaf.stride(), dtype=bits.dtype, device=leaf.device, requires_grad=False
            )
        weight.bits = bits
        return weight

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if in_backward():
            given = with_weights_on_device(function, args, kwargs or {}, leaves_alone=LEFT_ALONE)
            if given is not None:
                return function(*given[0], **given[1])
        others = [kind for kind in types if not issubclass(kind, EightBitWeight)]
        if others:  # as if this class had no function of its own
            return others[0].__torch_function__(function, others, args, kwargs or {})
        with torch._C.DisableTorchFunctionSubclass():
            return function(*args, **(kwargs or {}))

    def device_in_backward(self) -> torch.device:
        # Wherever it rests: torch chooses other operators for classes of others, which save other tensors.
        return device_in_backward(self) or device_of(self)

    def copy_on(self, device: torch.device) -> torch.Tensor:
        bits = self.bits
        return bits.window.to(device, copy=True) if bits.window is not None else bits.widened(device)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in SAME:
            return EightBitWeight(args[0].bits)
        returns = func._schema.returns
        is_view = any(value.alias_info is not None and not value.alias_info.is_write for value in returns)
        shown: dict[int, tuple[EightBitWeight, torch.Tensor]] = {}

        def show(weight: EightBitWeight) -> torch.Tensor:
            bits = weight.bits
            if id(bits) not in shown:
                opens = is_view or func._schema.is_mutable
                wide = bits.open_window(for_views=is_view) if opens else bits.current()
                shown[id(bits)] = weight, wide
            return shown[id(bits)][1]

        def conceal(result: torch.Tensor) -> torch.Tensor:
            return next((weight for weight, wide in shown.values() if wide is result), result)

        wide_args, wide_kwargs = tree_map_only(EightBitWeight, show, (args, kwargs))
        with torch.inference_mode(False) if is_view else nullcontext():
            output = func(*wide_args, **wide_kwargs)
        if func._schema.is_mutable:
            for weight in written_weights(func._schema, args, kwargs):
                weight.bits.note_write()
        return output if is_view else tree_map_only(torch.Tensor, conceal, output)

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["leaf"], None

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, torch.Tensor], context: None, size: Any, stride: Any) -> torch.Tensor:
        return inner["leaf"]

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return self.bits.leaf.device if self.bits.has_ended else answer_device(self)

    @property
    def leaf(self) -> torch.Tensor:
        return self.bits.leaf

    @property
    def data(self) -> torch.Tensor:
        return DATA.__get__(self)  # type: ignore[no-any-return]

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        if isinstance(value, EightBitWeight) and value.bits is self.bits:
            return  # what was written to it is there already
        if value.shape != self.shape:
            name, has = self.bits.slot.spec.name, list(self.shape)
            raise InvalidInput(f"weight {name!r} has the shape {has}; allowed: that one, not {list(value.shape)}")
        if value.dtype is not self.dtype and not self.bits.has_ended:
            self.bits.asked_dtype = value.dtype
            self.bits.opened.append(self.bits)
        with torch.no_grad():
            given = value.detach().to(self.leaf.device, self.dtype)
            if not torch.equal(given, self.bits.current()):  # else it was moved
                self.copy_(given)

    def plain(self) -> torch.Tensor:
        """Return a wide copy of torch's own class."""
        wide = self.bits.current().clone()
        return nn.Parameter(wide, requires_grad=False) if isinstance(self, nn.Parameter) else wide

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        if id(self) in memo:
            return memo[id(self)]  # type: ignore[no-any-return]
        bits, shared = self.bits, Copied.of(memo)
        if isinstance(self, nn.Parameter):
            copied = self.plain()
        elif bits.window is not None:  # views of it are copied with it
            shared.kept.append(shown := bits.window.detach())
            copied = shown.__deepcopy__(memo)  # type: ignore[no-untyped-call]
        else:
            shared.kept.append(bits)
            copied = shared.found.setdefault(("bits", id(bits)), self.plain()).detach()
        memo[id(self)] = copied
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.plain().__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    def __repr__(self, **options: Any) -> str:  # type: ignore[override]
        return repr(self.plain())


def written_weights(schema: Any, args: Any, kwargs: Any) -> list[EightBitWeight]:
    """Return the weights that an operation writes to."""
    found = []
    for place, argument in enumerate(schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[place] if place < len(args) else kwargs.get(argument.name)
            for each in value if isinstance(value, list | tuple) else [value]:
                if isinstance(each, EightBitWeight):
                    found.append(each)
    return found


def stored_leaf(tensor: torch.Tensor) -> torch.Tensor:
    """Return the eight-bit values of a weight that rests in them; any other tensor itself."""
    return tensor.bits.leaf if isinstance(tensor, EightBitWeight) else tensor
