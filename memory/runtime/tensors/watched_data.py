"""Weights at rest in host memory whose ``.data`` is watched.

[Note: data] A tensor from ``.data`` shares the memory of the weight but has its own version counter, so writes to it do
not show in the weight's counter. While a weight rests in host memory, a copy of it may be staged on a device, and the
next pass computes from that copy. Comparing the bytes would take as long as copying them again. So the parameter object
gets a class in which reading ``.data`` counts as a write; this costs a new staged copy and nothing else. Later writes
through the returned tensor or its views raise the counter that these share; it is checked together with the weight's
own. The object remains a parameter by torch's protocol for other tensor classes (``_is_param``), never computes on a
device, and becomes an `nn.Parameter` again when the module is released.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NoReturn, TypeVar

import torch
from torch import nn
from torch.autograd.graph import increment_version
from torch.utils._pytree import tree_map_only

from ...errors import UnsafeState
from .deep_copies import copy_view
from .form_functions import FORM, GIVES_MEMORY, LEFT_ALONE, writes
from .recomputing import RestingWeight, in_backward, is_recomputing, with_weights_on_device
from .reported_device import Asked, answer_device, device_in_backward, plainly
from .unread_weight import mark_unread, unread_of

__all__ = [
    "Aliases",
    "AnyTensor",
    "WatchedTensor",
    "end_sharing",
    "point_into",
    "refuse_absent",
    "refuse_overwritten",
    "refuse_sharing",
    "retire_data",
    "take_own_memory",
    "unwatch",
    "watch",
]

OWN = ("_is_param", "asked", "reader", "shown", "is_view", "is_data")
AnyTensor = TypeVar("AnyTensor", bound=torch.Tensor)
DATA: Any = torch.Tensor.data  # the descriptor
# The version counter that tensors from ``.data`` get when other values are written to their memory. No program writes
# to a tensor this often.
OVERWRITTEN = 1 << 31
IS_ALIAS_OF: Any = torch._C._is_alias_of  # type: ignore[attr-defined]


def is_same_view(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors show the same memory in the same order. Call it in `plainly`."""
    return (
        tensor.data_ptr() == other.data_ptr()
        and tensor.shape == other.shape
        and tensor.stride() == other.stride()
        and tensor.dtype is other.dtype
    )


class Aliases(list[torch.Tensor]):
    """Tensors from ``.data`` of one group's weights; each shares its version counter with all of one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.written: list[None] = []
        """Not empty if weights at rest may have been written to since it was cleared."""
        self.leave: Callable[[WatchedTensor], None] | None = None
        """Called with a weight, or a view of one, that is about to be written to: its memory is shared with others."""

    def leave_by(self, leave: Callable[[WatchedTensor], None] | None) -> None:
        """Set what is called before a weight is written to; None: its memory is its own."""
        self.leave = leave


class Shown:
    """The tensors returned by ``.data`` of a weight and of its views.

    Args:
        aliases: those of the weight's group; the counters of its tensors show writes through them.
    """

    def __init__(self, aliases: Aliases) -> None:
        self.aliases = aliases
        self.alias: torch.Tensor | None = None
        """The tensor of which all others of this weight are views; they share its counter."""

    def alias_of(self, whole: torch.Tensor) -> torch.Tensor:
        """Return the alias; a new one if the weight's memory has changed. Call it in `plainly`, not for inference
        tensors.
        """
        alias = self.alias
        if alias is None or not is_same_view(alias, whole):
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
        if function not in FORM and (writes(function, kwargs) or getattr(function, "__name__", "") in GIVES_MEMORY):
            for tensor in watched_in((args, kwargs)):
                note_write(tensor)
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
        refuse_overwritten(value)
        with plainly():
            count_write(self)
            if IS_ALIAS_OF(value, self) and (value.stride() != self.stride() or value.dtype is not self.dtype):
                value = value.clone()  # the new address makes the change visible to checks of addresses
            DATA.__set__(self, value)

    def numpy(self, *, force: bool = False) -> Any:
        """As `torch.Tensor.numpy`: the array is the weight's memory."""
        with plainly():
            count_write(self)
            return super().numpy(force=force)

    def share_memory_(self) -> NoReturn:
        """Refuse: torch would move the whole slab to other memory, and the engine would go on with the old one."""
        refuse_sharing()

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
    if isinstance(value, WatchedTensor) and value.is_meta:
        raise UnsafeState("the data of a weight that rests in its file was assigned to another: assign its clone()")


def refuse_overwritten(value: torch.Tensor) -> None:
    """Refuse former data of a weight as ``.data``: their memory has the weight's newer values by now."""
    with plainly():
        is_overwritten = not value.is_inference() and value._version >= OVERWRITTEN
    if is_overwritten:
        raise UnsafeState("this .data was overwritten since it was read; assign a clone()")


def refuse_sharing() -> NoReturn:
    """Refuse to move a weight to shared memory. Raises `UnsafeState`."""
    raise UnsafeState("a weight of a managed module cannot be moved to shared memory: release the module first")


def retire_data(weight: torch.Tensor) -> None:
    """Mark what ``.data`` of a weight has returned: other values are about to be written to its memory."""
    shown: Shown | None = vars(weight).get("shown") if isinstance(weight, WatchedTensor) else None
    if shown is not None and shown.alias is not None:
        torch._C._autograd._unsafe_set_version_counter((shown.alias,), (OVERWRITTEN,))
        weight.shown = Shown(shown.aliases)  # type: ignore[attr-defined]


def count_write(tensor: torch.Tensor) -> None:
    if not tensor.is_inference():  # inference tensors have no counter and are never weight stores
        increment_version(tensor)
    note_write(tensor)


def note_write(tensor: torch.Tensor) -> None:
    """Note that a weight at rest may have been written to: the copy of it on a device may be older now."""
    shown: Shown | None = vars(tensor).get("shown")
    if shown is not None and shown.aliases.leave is not None:
        shown.aliases.leave(tensor)  # type: ignore[arg-type]
    if shown is not None and not shown.aliases.written:
        shown.aliases.written.append(None)


def take_own_memory(tensor: torch.Tensor) -> None:
    """Give a watched tensor a copy of its memory, for itself."""
    with plainly(), torch.no_grad(), torch.inference_mode(tensor.is_inference()):
        DATA.__set__(tensor, DATA.__get__(tensor).clone())


def end_sharing(tensor: torch.Tensor) -> None:
    """Make a tensor a plain one whose memory others have, too: it is about to be pointed elsewhere."""
    shown: Shown | None = vars(tensor).get("shown") if isinstance(tensor, WatchedTensor) else None
    if shown is not None and shown.aliases.leave is not None:
        unwatch(tensor)


def point_into(tensor: torch.Tensor, slab: torch.Tensor, offset: int) -> None:
    """Point a watched tensor to bytes of a slab, which has there what the tensor's memory has."""
    with plainly(), torch.no_grad():
        num_bytes = (slab.numel() - offset) // tensor.itemsize * tensor.itemsize
        flat = slab[offset : offset + num_bytes].view(tensor.dtype)
        with torch.inference_mode(tensor.is_inference()):
            DATA.__set__(tensor, flat.as_strided(tensor.shape, tensor.stride()))


def watch(tensor: AnyTensor, asked: Asked | None = None, *, aliases: Aliases | None = None) -> AnyTensor:
    """Watch the ``.data`` of a plain parameter in memory; other tensors stay unchanged. Returns the same object.

    Args:
        asked: called when ``device`` is read; its result is reported unless it is None.
        aliases: those of its group; tensors that ``.data`` returns are added to them.
    """
    if type(tensor) is nn.Parameter:
        assert not tensor.is_meta
        if aliases is not None:
            tensor.shown = Shown(aliases)  # type: ignore[attr-defined]
        tensor.__class__ = WatchedTensor  # type: ignore[assignment]
        tensor._is_param = True
    elif isinstance(tensor, WatchedTensor) and aliases is not None:
        shown = vars(tensor).get("shown")
        if tensor.is_view or shown is None or shown.aliases is not aliases:
            # made by other code, from a weight or a view
            tensor.shown, tensor.is_view = Shown(aliases), False
    if isinstance(tensor, WatchedTensor):
        tensor.answer_with(asked)
    return tensor


def unwatch(tensor: AnyTensor) -> AnyTensor:
    """Make a watched parameter a plain one again, or an unread one that it was. Returns the same object."""
    if isinstance(tensor, WatchedTensor):
        unread = unread_of(tensor) if tensor.is_meta else None
        tensor.__class__ = nn.Parameter  # type: ignore[assignment]
        for name in OWN:
            vars(tensor).pop(name, None)
        if unread is not None:
            mark_unread(tensor, unread)
    return tensor
