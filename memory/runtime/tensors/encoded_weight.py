"""The tensor that a module holds at rest for an encoded weight: it decodes on reading and encodes on writing.

[Note: encoded at rest] Other code computes with weights at rest: peft merges and unmerges LoRAs in them, and gives its
own layers their dtype. With float8 values without their scale this would fail or give wrong results silently. So the
tensor at rest has the dtype in which the weight computes. Each operation decodes it first, and written values are
encoded again with a newly measured scale. Reading costs one wide copy, writing three; written values are rounded to the
weight's form. While the block computes, the module holds plain tensors.

A view cannot share memory with encoded leaves. So it is a view of a wide copy, the window. Before the weight is used
again, the window is compared with the leaves and encoded if it differs. Writes to the whole weight go to a window, too,
until another weight is written to: several writes in a row, such as merging two LoRAs, are rounded once.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any, NoReturn

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.graph import increment_version
from torch.utils._pytree import tree_map_only

from ...errors import InvalidInput, UnsafeState
from ...transfer.slabs import Form
from .deep_copies import Copied
from .form_functions import LEFT_ALONE
from .parameter_slots import ParameterSlot
from .recomputing import RestingWeight, in_backward, with_weights_on_device
from .reported_device import answer_device, device_in_backward, device_of
from .watched_data import refuse_overwritten, refuse_sharing

__all__ = ["NOT_TRACED", "EncodedLeaves", "EncodedWeight"]

NOT_TRACED = "a managed module cannot be exported or traced: release it first"
BLOCKS = "granularity 'block'"

DATA: Any = torch.Tensor.data  # the descriptor
LEAF = "leaf"
"""The prefix of leaf names in torch's flatten protocol."""
SAME = (torch.ops.aten.detach.default, torch.ops.aten.alias.default)


class EncodedLeaves:
    """The leaves of one encoded weight where they rest; shared by all tensors that show the weight.

    Args:
        leaves: the leaves in the group's slab.
        wide: the form in which the weight computes.
        opened: a list to which this object adds itself when it opens a window; its caller then calls `settle`.
        known: a set to which this object adds itself.
    """

    written: weakref.ref[EncodedLeaves] | None = None
    """The object of this class that was written to last."""

    def __init__(
        self,
        leaves: Sequence[torch.Tensor],
        slot: ParameterSlot,
        wide: Form,
        opened: list[EncodedLeaves],
        known: weakref.WeakSet[EncodedLeaves],
    ) -> None:
        self.leaves = list(leaves)
        self.slot = slot
        self.wide = wide
        self.opened = opened
        self.window: torch.Tensor | None = None
        self.has_views = False
        """Whether other code has views of the window."""
        self.has_ended = False
        """Whether the leaves are no longer the weight's: `window` is then a plain tensor in place of them."""
        self.known = known
        known.add(self)

    def end(self, plain: torch.Tensor) -> None:
        """Show this plain tensor from now on: the weight is no longer encoded, or has other data. Idempotent."""
        if self.has_ended:
            return
        self.window = plain.detach()
        self.leaves = [self.window]
        self.opened, self.has_ended = [], True

    def decoded(self, device: torch.device | None = None) -> torch.Tensor:
        """Return a wide copy on a device; by default on that of the leaves."""
        assert self.slot.encoding is not None
        with torch.no_grad():
            leaves = self.leaves if device is None else [leaf.to(device) for leaf in self.leaves]
            wide = self.wide.allocate(leaves[0].device)
            self.slot.encoding.decode_into(wide, leaves)
        return wide

    def current(self) -> torch.Tensor:
        return self.window if self.window is not None else self.decoded()

    def open_window(self, *, for_views: bool) -> torch.Tensor:
        self.has_views = self.has_views or for_views
        if self.window is None:
            with torch.inference_mode(False):
                self.window = self.decoded()
            self.opened.append(self)
        return self.window

    def note_write(self) -> None:
        """Note a write to the window, and encode the window that was written to before, unless it has views."""
        before = EncodedLeaves.written() if EncodedLeaves.written is not None else None
        EncodedLeaves.written = weakref.ref(self)
        if before is not None and before is not self and not before.has_views:
            before.settle()

    def store(self, weight: torch.Tensor) -> None:
        """Encode a wide weight into the leaves. For NaN and infinity raises `InvalidInput` and changes nothing."""
        assert self.slot.encoding is not None
        with torch.no_grad():
            try:
                form = self.slot.encoding.measure(weight, name=self.slot.spec.name)
            except InvalidInput as error:
                raise InvalidInput(f"{error}; what was written to it is undone") from None
            before = self.leaves[0]._version
            for leaf, encoded in zip(self.leaves, form.encode(weight), strict=True):
                leaf.copy_(encoded)
            if self.leaves[0]._version == before:  # called below the layer in which torch counts writes
                increment_version(self.leaves[0])
        self.slot.rest_as(form)

    def converted(self, plain: torch.Tensor) -> EncodedLeaves:
        """Return an object that shows a plain tensor of another dtype or shape; aliases of former data stay with this.

        The group sees that and gives the weight up ([Note: given up] in `converted_weights.py`).
        """
        self.end(self.current())
        other = EncodedLeaves([plain], self.slot, Form.of(plain), [], self.known)
        other.end(plain)
        return other

    def leave_to_aliases(self) -> EncodedLeaves:
        """Return an object for the weight, whose ``.data`` is assigned. The aliases of the former data stay with this.

        They show the former data, in memory of its own. The other object's window is open if this one's was.
        """
        other = EncodedLeaves(self.leaves, self.slot, self.wide, self.opened, self.known)
        if self.window is not None:
            other.open_window(for_views=False)
        self.end(self.current())
        return other

    def settle(self) -> None:
        """Encode what was written to the window, and close it. Raises as `store`."""
        if self.has_ended:
            return
        window, self.window, self.has_views = self.window, None, False
        if window is not None and not torch.equal(window, self.decoded()):
            self.store(window)


class EncodedWeight(RestingWeight, torch.Tensor):
    """A weight that rests encoded, shown in the form in which it computes ([Note: encoded at rest])."""

    encoded: EncodedLeaves
    rests_narrower = True
    """Tells `module_component.leaf_bytes` to describe the tensor as the plain weight that it represents."""

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
        if others:  # as if this class had no ``__torch_function__``
            return others[0].__torch_function__(function, others, args, kwargs or {})
        with torch._C.DisableTorchFunctionSubclass():
            return function(*args, **(kwargs or {}))

    def device_in_backward(self) -> torch.device:
        # Not None even on the same device: for tensor subclasses torch uses other operators, which save other tensors.
        return device_in_backward(self) or device_of(self)

    def copy_on(self, device: torch.device) -> torch.Tensor:
        encoded = self.encoded
        return encoded.window.to(device, copy=True) if encoded.window is not None else encoded.decoded(device)

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
        if any(isinstance(leaf, FakeTensor) for leaf in inner.values()):  # `torch.export`, before it calls the module
            raise UnsafeState(f"{NOT_TRACED}; compiled code that reads a weight outside its layer needs {BLOCKS}")
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
            return  # writes to it are in the window already
        refuse_overwritten(value)
        with torch.no_grad():
            if value.dtype is not self.dtype or value.shape != self.shape:
                plain = (value.encoded.current() if isinstance(value, EncodedWeight) else value).detach()
                self.encoded = self.encoded.converted(plain)
                DATA.__set__(self, plain)
                return
            given = value.detach().to(self.encoded.leaves[0].device, self.dtype)
            if isinstance(given, EncodedWeight):
                given = given.encoded.current()
            is_equal = torch.equal(given, self.encoded.current())  # then the weight was only moved
            if not self.encoded.has_ended:
                self.encoded = self.encoded.leave_to_aliases()
            if not is_equal or self.encoded.window is not None:
                self.copy_(given)

    def share_memory_(self) -> NoReturn:
        """Refuse, as for weights that rest as stored."""
        refuse_sharing()

    def show_as(self, other: EncodedWeight) -> None:
        """Show the same leaves as another weight from now on."""
        self.encoded = other.encoded
        if (self.dtype, self.shape) != (other.dtype, other.shape):  # it was converted
            DATA.__set__(self, other)

    def plain(self) -> torch.Tensor:
        """Return a wide copy as a plain tensor or parameter."""
        wide = self.encoded.current().clone()
        return nn.Parameter(wide, requires_grad=False) if isinstance(self, nn.Parameter) else wide

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        if id(self) in memo:
            return memo[id(self)]  # type: ignore[no-any-return]
        encoded, shared = self.encoded, Copied.of(memo)
        if isinstance(self, nn.Parameter):
            copied = self.plain()
        elif encoded.window is not None:  # views of the window are copied together with it
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
