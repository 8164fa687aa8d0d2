"""Weights at rest in host memory whose ``.data`` is watched.

[Note: data] A tensor from ``.data`` shares the memory of the weight but has its own version counter, so writes to it do
not show in the weight's counter. While a weight rests in host memory, a copy of it may be staged on a device, and the
next pass computes from that copy. Comparing the bytes would take as long as copying them again. So the parameter object
gets a class in which reading ``.data`` counts as a write; this costs a new staged copy and nothing else. Later writes
through the returned tensor or its views raise the counter that these share; it is checked together with the weight's
own. The object remains a parameter by torch's protocol for other tensor classes (``_is_param``), never computes on a
device, and becomes an `nn.Parameter` again when the module is released.

[Note: absent] A weight that rests in its file has a form (shape, dtype) but no memory: writes to it would be lost, and
results computed from it would be meaningless. Torch functions that need only its form get it as it is. For all other
functions its block is read into host memory, where it stays, and they get the real weight. A tensor returned by
``.data`` behaves in the same way.

[Note: asked] A forward may read a weight's ``device``, to create a tensor there, while the weight's block is not
loaded. During the forward the weight at rest reports the device of the activations. At all other times, for example
when a LoRA is added, it reports the device that holds it. Torch's operators do not read this attribute, so they are not
affected.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol, TypeVar

import torch
from torch import nn
from torch.autograd.graph import increment_version
from torch.utils._pytree import tree_leaves, tree_map_only

from ..errors import UnsafeState
from .deep_copies import Copied, copy_view
from .recomputing import RestingWeight, in_backward, is_recomputing, with_weights_on_device

__all__ = [
    "AbsentWeight",
    "Asked",
    "Reader",
    "WatchedTensor",
    "answer_device",
    "device_in_backward",
    "device_of",
    "plainly",
    "unwatch",
    "watch",
]

OWN = ("_is_param", "asked", "bring", "shown", "is_view", "is_data")
AnyTensor = TypeVar("AnyTensor", bound=torch.Tensor)
Asked = Callable[[], torch.device | None]
"""Returns the device that a weight at rest reports: in a forward that of the activations, in a recomputation by a
backward pass that on which its block computes; None at all other times.
"""
DATA: Any = torch.Tensor.data  # the descriptor
DEVICE: Any = torch.Tensor.device
IS_ALIAS_OF: Any = torch._C._is_alias_of  # type: ignore[attr-defined]
plainly = torch._C.DisableTorchFunctionSubclass
"""A context in which watched weights behave like plain tensors; checking many of them is faster in it."""


def device_of(tensor: torch.Tensor) -> torch.device:
    """Return the device that holds a tensor, whatever its ``device`` reports."""
    with plainly():
        return DEVICE.__get__(tensor)  # type: ignore[no-any-return]


def answer_device(tensor: torch.Tensor) -> torch.device:
    """Return what the ``device`` of a weight at rest reports ([Note: asked])."""
    asked: Asked | None = vars(tensor).get("asked")
    device = (asked() if asked is not None else None) or device_of(tensor)
    # Libraries create added layers on the weight's device; on the meta device they would lose their values.
    return torch.device("cpu") if device.type == "meta" else device


def device_in_backward(tensor: torch.Tensor) -> torch.device | None:
    """As `RestingWeight.device_in_backward`."""
    asked: Asked | None = vars(tensor).get("asked")
    device = asked() if asked is not None else None
    return device if device != device_of(tensor) else None


class Reader(Protocol):
    """Reads a weight that rests in its file."""

    def __call__(self) -> torch.Tensor:
        """Read the weight into memory; returns the tensor that the module then holds."""
        ...

    def read_on(self, device: torch.device) -> torch.Tensor:
        """Return a copy on a device; the weight still rests in its file."""
        ...


class Shown:
    """The tensors returned by ``.data`` of a weight and of its views.

    Args:
        aliases: a list of the weight's group; the counters of its tensors show writes through them.
    """

    def __init__(self, aliases: list[torch.Tensor]) -> None:
        self.aliases = aliases
        self.alias: torch.Tensor | None = None
        """The tensor of which all others of this weight are views; they share its counter."""

    def alias_of(self, whole: torch.Tensor) -> torch.Tensor:
        """Return the alias; a new one if the weight's memory has changed. Call it in `plainly`, not for inference
        tensors.
        """
        alias = self.alias
        if alias is None or alias.data_ptr() != whole.data_ptr() or alias.shape != whole.shape:
            with torch.inference_mode(False):
                self.alias = alias = DATA.__get__(whole)
            self.aliases.append(alias)
        return alias


class WatchedTensor(RestingWeight, torch.Tensor):
    """A weight for which reading ``.data``, also of its views, counts as a write ([Note: data])."""

    shown: Shown
    """Shared with the weight's views and detached tensors. Holds no reference to a weight, because references to
    weights are counted ([Note: swaps] in `weight_swaps.py`).
    """
    is_view = False

    def __new__(cls, data: Any = None, requires_grad: bool = True) -> Any:
        """Return a plain parameter: other libraries create parameters by ``type(old)(data)``."""
        return nn.Parameter(data, requires_grad)

    @classmethod
    def __torch_function__(
        cls, function: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if in_backward() and function not in FORM:
            given = with_weights_on_device(function, args, kwargs or {}, leaves_alone=LEFT_ALONE)
            if given is not None:
                return function(*given[0], **given[1])
        if not all(issubclass(kind, WatchedTensor) for kind in types):
            return call_others(function, args, kwargs or {})
        with plainly():
            result = function(*args, **(kwargs or {}))
            if function in FORM:
                return result
            if isinstance(result, torch.Tensor):
                watch_views((result,), args, kwargs)
            elif isinstance(result, tuple | list):
                watch_views(result, args, kwargs)
            elif getattr(function, "__name__", "") in GIVES_MEMORY:
                for tensor in watched_in((args, kwargs)):
                    count_write(tensor)
            return result

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return answer_device(self)

    @property
    def data(self) -> torch.Tensor:
        if (copy := self.recomputed()) is not None:
            return copy
        with plainly():
            count_write(self)
            shown = vars(self).get("shown")
            if shown is None or self.is_inference():
                return DATA.__get__(self)  # type: ignore[no-any-return]
            return view_like(self, shown.alias) if self.is_view else shown.alias_of(self).detach()

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        refuse_absent(value)
        with plainly():
            count_write(self)
            if IS_ALIAS_OF(value, self) and value.stride() != self.stride():
                value = value.clone()  # the new address makes the changed strides visible to checks of addresses
            DATA.__set__(self, value)

    def numpy(self, *, force: bool = False) -> Any:
        """As `torch.Tensor.numpy`: the array is the weight's memory."""
        with plainly():
            count_write(self)
            return super().numpy(force=force)

    def detach(self) -> torch.Tensor:
        """As `torch.Tensor.detach`; returns a tensor of the same class, which `nn.Parameter()` requires."""
        if (copy := self.recomputed()) is not None:
            return copy
        # Not `as_subclass`: its result is a view, which would keep our memory alive after ``.data`` is assigned.
        detached = torch.Tensor._make_subclass(WatchedTensor, self)
        share_shown(self, detached, is_view=self.is_view)
        return detached

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(self.unbind())

    def recomputed(self) -> torch.Tensor | None:
        """Return a copy if a backward pass recomputes a part now ([Note: recomputed parts] in `recomputing.py`)."""
        device = device_in_backward(self) if is_recomputing() else None
        return self.copy_on(device) if device is not None else None

    def device_in_backward(self) -> torch.device | None:
        return device_in_backward(self)

    def copy_on(self, device: torch.device) -> torch.Tensor:
        with plainly(), torch.no_grad():
            return super().detach().to(device, copy=True)

    def plain(self) -> torch.Tensor:
        """Return a tensor or parameter of torch's own class in the same memory."""
        with plainly():
            tensor = super().detach()
            return nn.Parameter(tensor, self.requires_grad) if isinstance(self, nn.Parameter) else tensor

    def __deepcopy__(self, memo: dict[Any, Any]) -> torch.Tensor:
        """Return a plain copy ([Note: deep copies] in `deep_copies.py`)."""
        if id(self) in memo:
            return memo[id(self)]  # type: ignore[no-any-return]
        own = self.plain()
        copied: torch.Tensor
        if isinstance(own, nn.Parameter):
            copied = nn.Parameter(own.detach().clone(), self.requires_grad)
        elif not self.is_leaf:
            with plainly():
                return torch.Tensor.__deepcopy__(self, memo)  # type: ignore[no-untyped-call, no-any-return]  # raises
        else:
            shown: Shown | None = vars(self).get("shown")
            whole = shown.alias if shown is not None and shown.alias is not None else own
            copied = copy_view(own, whole, memo).requires_grad_(self.requires_grad)
            copied.grad = copy.deepcopy(self.grad, memo)
            vars(copied).update(copy.deepcopy({k: v for k, v in vars(self).items() if k not in OWN}, memo))
        memo[id(self)] = copied
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.plain().__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return repr(self.plain())


class AbsentWeight(WatchedTensor):
    """A weight that rests in its file, or its ``.data`` ([Note: absent])."""

    bring: Reader
    """Reads the weight into memory; returns the tensor that the module then holds."""
    is_data = False

    @classmethod
    def __torch_function__(
        cls, function: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if in_backward() and function not in FORM:
            on_device = with_weights_on_device(function, args, kwargs or {}, leaves_alone=LEFT_ALONE)
            if on_device is not None:
                return function(*on_device[0], **on_device[1])
        given: Any = (args, dict(kwargs or {}))
        name = getattr(function, "__name__", "")
        converts = name in CONVERSIONS and not args[0].is_data
        asks = converts or name in ASKS_FOR_FORM or function in FORM
        # If another argument has no memory either (a layer before its weights are loaded), only the form matters.
        if not asks and not any(map(has_no_memory, tree_leaves(given))):
            given = tree_map_only(AbsentWeight, AbsentWeight.present, given)
        with torch._C.DisableTorchFunctionSubclass():
            return function(*given[0], **given[1])

    def present(self) -> torch.Tensor:
        """Return the weight, read into memory.

        Raises:
            UnsafeState: the weight's component computes now.
            InvalidInput: the file has changed.
        """
        weight = self.bring()
        return weight.data if self.is_data else weight

    @property
    def data(self) -> torch.Tensor:
        return self.detach()

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        refuse_absent(value)
        self.bring().data = value

    def copy_on(self, device: torch.device) -> torch.Tensor:
        return self.bring.read_on(device)

    def detach(self) -> torch.Tensor:
        if (copy := self.recomputed()) is not None:
            return copy
        alias = torch.Tensor._make_subclass(AbsentWeight, self)
        alias.bring, alias.is_data = self.bring, True
        return alias

    def numpy(self, *, force: bool = False) -> Any:
        return self.present().numpy(force=force)

    def __deepcopy__(self, memo: dict[Any, Any]) -> torch.Tensor:
        if id(self) not in memo:
            present = self.present()
            Copied.of(memo).kept.append(present)
            memo[id(self)] = copy.deepcopy(present, memo)
        return memo[id(self)]  # type: ignore[no-any-return]

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.present().__reduce_ex__(protocol)  # type: ignore[no-untyped-call]


# Calls that ``Module.to`` and similar methods make for each parameter. The engine undoes them, so they read no file.
CONVERSIONS = frozenset(("to", "cpu", "cuda", "xpu", "npu", "half", "bfloat16", "float", "double", "type"))
# Functions and attributes that use only a tensor's form, or create another tensor of the same form.
FORM_FUNCTIONS = """
    size stride dim ndimension numel nelement element_size is_floating_point is_complex is_contiguous is_inference
    is_signed data_ptr detach requires_grad_ __len__ __hash__ storage_offset get_device type_as empty_like zeros_like
    ones_like rand_like randn_like full_like new_empty new_zeros new_ones new_full new_tensor has_names untyped_storage
    is_same_size is_set_to is_pinned is_shared __reduce_ex__
"""
FORM_ATTRIBUTES = """
    shape dtype device layout ndim nbytes itemsize is_meta is_cuda is_cpu is_sparse is_sparse_csr is_quantized is_leaf
    is_nested is_mkldnn is_mps is_xpu is_xla is_ipu is_vulkan is_maia is_mtia is_hpu names name requires_grad grad
    grad_fn retains_grad output_nr _version _base _backward_hooks _cdata
"""
ASKS_FOR_FORM = frozenset(FORM_FUNCTIONS.split())
MAKES_LIKE = """
    type_as empty_like zeros_like ones_like rand_like randn_like full_like new_empty new_zeros new_ones new_full
    new_tensor
"""
FORM = frozenset(
    vars(torch._C.TensorBase)[name].__get__ for name in FORM_ATTRIBUTES.split() if name in vars(torch._C.TensorBase)
)


# Functions that return the memory of a tensor as something other than a tensor.
GIVES_MEMORY = frozenset(["untyped_storage", "storage", "_typed_storage", "__array__", "__dlpack__", "to_dlpack"])

# Functions that in a backward pass get the weight itself, not a copy on the device.
LEFT_ALONE = (ASKS_FOR_FORM - frozenset(MAKES_LIKE.split())) | GIVES_MEMORY


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors among the arguments of a torch function."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, tuple | list | dict):
        for each in value.values() if isinstance(value, dict) else value:
            yield from tensors_in(each)


def watched_in(values: object) -> list[WatchedTensor]:
    return [tensor for tensor in tensors_in(values) if isinstance(tensor, WatchedTensor)]


def share_shown(tensor: WatchedTensor, other: Any, *, is_view: bool) -> None:
    shown: Shown | None = vars(tensor).get("shown")
    if shown is not None:
        other.shown, other.is_view = shown, is_view
        if is_view and not tensor.is_view and not tensor.is_inference():
            shown.alias_of(tensor)


def watch_views(results: Sequence[Any], args: Sequence[Any], kwargs: Mapping[str, Any] | None) -> None:
    """Watch the results of a function that are new views of a watched weight in its arguments."""
    given: list[torch.Tensor] | None = None
    for result in results:
        if type(result) is not torch.Tensor or result.layout is not torch.strided:
            continue
        if given is None:
            given = list(tensors_in((args, kwargs)))
        if any(result is value for value in given) or torch._C._functorch.is_functorch_wrapped_tensor(result):
            continue
        for tensor in given:
            if isinstance(tensor, WatchedTensor) and IS_ALIAS_OF(result, tensor):
                result.__class__ = WatchedTensor
                share_shown(tensor, result, is_view=True)
                break


def call_others(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Call a function that another tensor subclass handles as well. It gets plain tensors in the weights' memory."""
    with plainly():
        plain = {id(tensor): (torch.ops.aten.alias(tensor), tensor) for tensor in watched_in((args, kwargs))}
    given = tree_map_only(WatchedTensor, lambda tensor: plain[id(tensor)][0], (tuple(args), dict(kwargs)))
    result = function(*given[0], **given[1])
    return next((tensor for alias, tensor in plain.values() if alias is result), result)


def view_like(view: torch.Tensor, alias: torch.Tensor | None) -> torch.Tensor:
    """Return ``view.data`` as a view of the weight's alias, so that writes to it raise the alias's counter."""
    data: torch.Tensor = DATA.__get__(view)
    if alias is None:
        return data
    offset = view.data_ptr() - alias.data_ptr()
    if not (alias.is_contiguous() and IS_ALIAS_OF(view, alias) and 0 <= offset <= alias.nbytes):
        return data  # a view of memory that the weight no longer uses
    if view.is_conj() or view.is_neg():
        return data
    flat = alias.detach().view(-1)
    if view.dtype is not alias.dtype:
        flat = flat.view(torch.uint8)
        flat = flat[offset % view.itemsize :]
        flat = flat[: len(flat) // view.itemsize * view.itemsize].view(view.dtype)
    return flat.as_strided(view.shape, view.stride(), flat.storage_offset() + offset // view.itemsize)


def refuse_absent(value: torch.Tensor) -> None:
    """Refuse a weight without memory as another weight's ``.data``: both would share what no memory has."""
    if isinstance(value, AbsentWeight):
        raise UnsafeState("the data of a weight that rests in its file was assigned to another: assign its clone()")


def has_no_memory(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.is_meta and not isinstance(value, AbsentWeight)


def count_write(tensor: torch.Tensor) -> None:
    if not tensor.is_inference():  # inference tensors have no counter and are never weight stores
        increment_version(tensor)


def watch(
    tensor: AnyTensor,
    asked: Asked | None = None,
    *,
    aliases: list[torch.Tensor] | None = None,
    bring: Reader | None = None,
) -> AnyTensor:
    """Watch the ``.data`` of a plain parameter; other tensors stay unchanged. Returns the same object.

    Args:
        asked: called when ``device`` is read; its result is reported unless it is None.
        aliases: a list; tensors that ``.data`` returns are added to it.
        bring: for a weight without memory: reads it, and returns the tensor that the module then holds.
    """
    if type(tensor) is nn.Parameter:
        if tensor.is_meta:
            assert bring is not None
            tensor.bring = bring  # type: ignore[attr-defined]
        elif aliases is not None:
            tensor.shown = Shown(aliases)  # type: ignore[attr-defined]
        tensor.__class__ = AbsentWeight if tensor.is_meta else WatchedTensor  # type: ignore[assignment]
        tensor._is_param = True
    elif isinstance(tensor, AbsentWeight) and bring is not None:
        tensor.bring = bring  # a component that was released before could not read it
    elif isinstance(tensor, WatchedTensor) and aliases is not None:
        shown = vars(tensor).get("shown")
        if (
            tensor.is_view or shown is None or shown.aliases is not aliases
        ):  # made by other code, from a weight or a view
            tensor.shown, tensor.is_view = Shown(aliases), False
    if isinstance(tensor, WatchedTensor):
        vars(tensor)["asked"] = asked
    return tensor


def unwatch(tensor: AnyTensor) -> AnyTensor:
    """Make a watched parameter a plain one again. Returns the same object."""
    if isinstance(tensor, WatchedTensor):
        tensor.__class__ = nn.Parameter  # type: ignore[assignment]
        for name in OWN:
            vars(tensor).pop(name, None)
    return tensor
