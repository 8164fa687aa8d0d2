"""Records what operators do while a forward runs on the meta device: bytes, lifetimes and kernels, by block.

[Note: lifetimes] Python decides when a tensor dies, on the meta device as on any other: its storage is freed with its
last reference, and that moment is what is recorded. So the peak is that of eager execution. Views hold the storage of
their base. Tensors of other devices that meet the meta device are constants and weights; they are taken for tensors
that the device has, and scalars for what they are.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from .known_values import KnownValues, tensors_in
from .meta_twin import meta_like
from .operator_costs import GATHERS, INDEXING, SIZED_BY_VALUES, How, Operator, attend, bytes_of, flops_of, operator_of
from .result_forms import ResultForms
from .trace import EntryTrace, Kernel, Segment, Trace, Untraceable

__all__ = ["Recorder"]

NUMBERS = (bool, int, float, complex)


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A mode that records; active under `torch.inference_mode`, where composites arrive whole.

    Args:
        brings_back: whether floating-point values that are not known may be copied to the host, as results: they are
            zeros there. Else that cannot be traced, as what the host does with them might depend on them.
    """

    def __init__(self, *, brings_back: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.brings_back = brings_back
        self.live: dict[int, tuple[int, Any]] = {}
        """By storage: its bytes, and the weak reference that tells its end."""
        self.constants: dict[int, tuple[Tensor, Tensor]] = {}
        self.values = KnownValues()
        self.forms = ResultForms()
        self.held_bytes = 0
        self.segments: list[Segment] = []
        self.stack: list[str] = []
        self.carried: list[tuple[int, int]] = []
        """What each block returned, in bytes, behind so many segments."""
        self.entries: list[tuple[int, EntryTrace]] = []
        """The passes that an engine would see, each with the number of segments before it."""
        self.kernels: list[Kernel] = []
        self.entry_bytes = self.segment_peak = 0
        self.interned: dict[tuple[Kernel, ...], tuple[Kernel, ...]] = {}

    # -- blocks

    def enter(self, block: str) -> None:
        """Begin a block; one inside of another belongs to the outer one."""
        if not self.stack:
            self.end_segment("")
        self.stack.append(block)

    def leave(self, outputs: Iterable[Tensor]) -> None:
        """End the block that was entered last, which returns these."""
        block = self.stack.pop()
        if not self.stack:
            self.end_segment(block)
            self.carried.append((len(self.segments), sum(map(bytes_of, outputs))))

    def end_segment(self, block: str) -> None:
        if block or self.kernels or self.segment_peak > self.entry_bytes:
            kernels = tuple(self.kernels)
            self.segments.append(
                Segment(
                    block=block,
                    kernels=self.interned.setdefault(kernels, kernels),
                    entry_bytes=self.entry_bytes,
                    peak_bytes=self.segment_peak,
                )
            )
        self.kernels = []
        self.entry_bytes = self.segment_peak = self.held_bytes

    def trace_since(self, num_before: int, held_bytes: int, outputs: Iterable[Tensor]) -> Trace:
        """Return the trace of what ran after so many segments, beyond what was held then."""
        segments = tuple(
            replace(
                segment,
                entry_bytes=segment.entry_bytes - held_bytes,
                peak_bytes=max(0, segment.peak_bytes - held_bytes),
            )
            for segment in self.segments[num_before:]
        )
        peak_bytes = max((segment.peak_bytes for segment in segments), default=0)
        outputs = list(outputs)
        return Trace(
            segments=segments,
            peak_bytes=peak_bytes,
            output_bytes=self.held_of(outputs),
            output_shapes=tuple(tuple(tensor.shape) for tensor in outputs),
            carried_bytes=max((num_bytes for number, num_bytes in self.carried if number > num_before), default=0),
            entries=tuple(entry for number, entry in self.entries if number >= num_before),
        )

    # -- memory

    def note(self, tensor: Tensor) -> bool:
        """Enter a result in the books; return whether its memory is new, or has grown."""
        storage = tensor.untyped_storage()
        key, num_bytes = storage._cdata, storage.nbytes()
        before = self.live.get(key)
        if before is not None:
            if num_bytes == before[0]:
                return False
            self.held_bytes -= before[0]
            self.live[key] = (num_bytes, before[1])
        else:
            self.live[key] = (num_bytes, weakref.finalize(storage, self.freed, key))
            self.live[key][1].atexit = False
        self.held_bytes += num_bytes
        self.segment_peak = max(self.segment_peak, self.held_bytes)
        return True

    def freed(self, key: int) -> None:
        num_bytes, _ = self.live.pop(key, (0, None))
        self.held_bytes -= num_bytes

    def held_of(self, tensors: Iterable[Tensor]) -> int:
        """Return how many bytes of these tensors the forward has allocated."""
        keys = {tensor.untyped_storage()._cdata for tensor in tensors}
        return sum(self.live[key][0] for key in keys if key in self.live)

    def on_device(self, value: Any) -> Any:
        """Return an argument with the twins of weights and constants that other devices have."""
        if isinstance(value, Tensor):
            if value.is_meta or not value.dim():
                return value
            if id(value) not in self.constants:
                self.constants[id(value)] = value, meta_like(value)
            return self.constants[id(value)][1]
        if isinstance(value, list | tuple):
            return type(value)(map(self.on_device, value))
        return value

    # -- operators

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        operator = operator_of(function)
        device = kwargs.get("device")
        is_meta = any(tensor.is_meta for tensor in tensors_in((args, list(kwargs.values()))))
        if not is_meta and (device is None or torch.device(device).type != "meta"):
            if operator.key is None:
                return function(*args, **kwargs)
            # A part of it may reach the device.
            with self:
                return function._op_dk(operator.key, *args, **kwargs)
        if operator.how is How.COMPOSITE:
            with self:
                return function._op_dk(operator.key, *args, **kwargs)
        if operator.how is How.COPY:
            return self.copy(function, args, kwargs)
        if operator.how is How.READS_VALUES:
            return self.read_values(function, operator, args, kwargs)
        if operator.how is How.FROM_DATA:
            return self.take_over(function, args, kwargs)
        if operator.name in INDEXING:
            with self:
                args = self.with_indices(args)
        args, kwargs = self.on_device(args), {name: self.on_device(value) for name, value in kwargs.items()}
        if operator.how is How.VIEW:
            result = function(*args, **kwargs)
            self.values.follow(function, args, kwargs, result)
            return result
        if operator.how is How.LINEAR:
            with self:
                return linear(*args, **kwargs)
        if operator.how is How.ATTENTION:
            return self.attention(operator, args, kwargs)
        return self.kernel(function, operator, args, kwargs)

    def read_values(self, function: Any, operator: Operator, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Return a number that the host asks of the device, if it is known."""
        found = self.values.compute(function, args, kwargs)
        if found is None:
            raise Untraceable(f"{operator.name} reads the values of a tensor")
        self.kernels.append(Kernel(0, 0, args[0].element_size()))
        return found

    def take_over(self, function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Of a tensor that code made of numbers, the bytes come from the host."""
        result = function(*args, **kwargs)
        if result.is_meta and result.untyped_storage()._cdata not in self.live and self.note(result):
            self.kernels.append(Kernel(0, 0, result.untyped_storage().nbytes()))
        return result

    def with_indices(self, args: Sequence[Any]) -> list[Any]:
        """Return the arguments of an indexing with its indices on the device, masks as the places that they choose."""
        indices: list[Any] = []
        for index in args[1]:
            if not isinstance(index, Tensor):
                indices.append(index)
            elif index.dtype in (torch.bool, torch.uint8):
                indices.extend(index.nonzero().unbind(1))
            elif index.is_meta or not index.dim():
                indices.append(index)
            else:
                indices.append(index.to("meta"))
        return [args[0], indices, *args[2:]]

    def copy(self, function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        target, source = args[:2]
        if not target.is_meta:
            values = self.values.of(source)
            if values is None and not (self.brings_back and source.is_floating_point()):
                raise Untraceable("a tensor of the device is copied to the host")
            self.kernels.append(Kernel(0, 0, max(source.numel() * source.element_size(), 1)))
            return target.zero_() if values is None else target.copy_(values)
        if target.numel():
            if source.is_meta:
                self.kernels.append(Kernel(0, bytes_of(source) + bytes_of(target)))
            else:
                self.kernels.append(Kernel(0, 0, target.numel() * target.element_size()))
        result = function(*args, **kwargs) if source.is_meta else target
        self.values.follow(function, args, kwargs, result, [target])
        return result

    def attention(self, operator: Operator, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor:
        query, key, value = args[:3]
        output = attend(query, key, value, args[4] if len(args) > 4 else kwargs.get("dropout_p", 0.0))
        self.note(output)
        tensors = tensors_in((args, list(kwargs.values())))
        traffic_bytes = sum(map(bytes_of, tensors)) + bytes_of(output)
        self.kernels.append(Kernel(flops_of(operator, (query, key, value), output), traffic_bytes))
        return output

    def kernel(self, function: Any, operator: Operator, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        if any(index < len(args) and isinstance(args[index], NUMBERS) for index in operator.tensors):
            args = [
                torch.scalar_tensor(value) if index in operator.tensors and isinstance(value, NUMBERS) else value
                for index, value in enumerate(args)
            ]
        if operator.name in SIZED_BY_VALUES:
            result = self.of_values(function, operator, args, kwargs)
        elif operator.how is How.KERNEL and not (operator.written or operator.written_names):
            result = self.forms.call(function, args, kwargs)
        else:
            result = function(*args, **kwargs)
        given = [tensor for tensor in tensors_in((args, list(kwargs.values()))) if tensor.is_meta]
        storages = {tensor.untyped_storage()._cdata for tensor in given}
        written = [args[index] for index in operator.written if index < len(args)]
        written += [value for name, value in kwargs.items() if name in operator.written_names]
        targets = list(tensors_in(written))
        self.values.follow(function, args, kwargs, result, targets)
        for target in targets:
            if target.untyped_storage()._cdata in self.live:
                self.note(target)  # it may have been resized
        results = tensors_in(result if isinstance(result, list | tuple) else (result,))
        made = [tensor for tensor in results if tensor.untyped_storage()._cdata not in storages and self.note(tensor)]
        if operator.how is How.NO_KERNEL or not (made or targets):
            return result
        output = made[0] if made else targets[0]
        if operator.name in GATHERS:
            traffic_bytes = 2 * bytes_of(output)
        else:
            traffic_bytes = sum(map(bytes_of, given)) + sum(map(bytes_of, made))
            if operator.writes_twice:
                traffic_bytes += sum(map(bytes_of, targets))
        self.kernels.append(Kernel(flops_of(operator, args, output), traffic_bytes))
        return result

    def of_values(self, function: Any, operator: Operator, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Return the result of an operator that has as many elements as the values say."""
        found = self.values.compute(function, args, kwargs)
        if found is None:
            raise Untraceable(f"the size of what {operator.name} returns depends on the values of a tensor")
        self.kernels.append(Kernel(0, 0, 1))
        return tree_map_only(Tensor, meta_like, found)


def linear(source: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute a linear layer by the operators that torch takes for it on a device."""
    transposed, shape = weight.t(), (*source.shape[:-1], weight.shape[0])
    if bias is not None and (source.dim() == 2 or source.is_contiguous()):
        flat = source if source.dim() == 2 else source.reshape(-1, source.shape[-1])
        return torch.addmm(bias, flat, transposed).view(shape)
    if source.dim() > 2 and weight.requires_grad:  # views of weights have lost this in here, and matmul asks for it
        product = torch.mm(source.reshape(-1, source.shape[-1]), transposed).view(shape)
    else:
        product = torch.matmul(source, transposed)
    return product if bias is None else product.add_(bias)
