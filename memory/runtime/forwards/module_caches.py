"""What forwards leave in a module beside its weights: caches, weights that hooks compute, tensors in new places.

[Note: computed weights] ``torch.nn.utils.weight_norm``, ``spectral_norm`` and ``prune`` keep a layer's weight as a
plain attribute, which a hook before each forward computes on the device from parameters of other names. It is needed
until that forward is over, and goes then: the layer has its former tensor again, which nothing reads.

[Note: caches] What else a forward leaves on a device (tables made once, buffers registered late) stays there with the
next forward in mind, and comes to the host when the component is released, or gets another profile. When the module is
managed again, its plain attributes go where it computes then, as its forward would have made them there.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from ..tensors.absent_weight import AbsentWeight
from ..tensors.deep_copies import OwnHook
from ..tensors.encoded_weight import EncodedWeight
from ..tensors.parameter_slots import OWN_DICTS
from ..tensors.reported_device import plainly
from ..tensors.watched_data import WatchedTensor, unwatch
from .compiled_blocks import untraced

__all__ = ["ModuleCaches", "address_of", "at_home", "computed_weights"]

COMPUTED_FROM = ("_orig", "_g")

Place = tuple[Any, Any, torch.Tensor]
"""A dict or a list, the key, and the tensor there."""

brought_home: WeakKeyDictionary[nn.Module, list[Place]] = WeakKeyDictionary()
"""The caches that were on a device when their module was released."""


class ModuleCaches:
    """The caches and computed weights that forwards leave in one component's module while it is managed.

    Args:
        others: the parts of the module that another component owns.
    """

    def __init__(self, module: nn.Module, others: Collection[nn.Module] = ()) -> None:
        self.module = module
        self.parts = [part for part in module.modules() if part not in others]
        self.early = {id(tensor) for part in self.parts for *_, tensor in caches_of(part) if is_away(tensor)}
        """Caches that were on a device before the component was managed."""
        self.to_send = [place for part in self.parts for place in brought_home.pop(part, [])]

    def hook(self, owner: str) -> Iterator[RemovableHandle]:
        """Free computed weights after the forward for which they were computed."""
        for part in self.parts:
            for name, weight in computed_weights(part):
                hook = OwnHook.on(part, forget_computed, name, weight, owner=owner)
                yield part.register_forward_hook(hook, always_call=True)

    def send_back(self, device: torch.device) -> None:
        """Bring back to a device, once, the caches that an earlier release took from it."""
        places, self.to_send = self.to_send, []
        for holder, key, tensor in places:
            if holds(holder, key, tensor):
                holder[key] = tensor.to(device)

    def return_to_host(
        self,
        slabs: Collection[torch.Tensor],
        *,
        others: Collection[nn.Module] = (),
        lent: Collection[tuple[nn.Module, str]] = (),
    ) -> None:
        """Bring caches on devices to plain host memory, and tensors in the slabs of weights that are gone.

        Args:
            others, lent: the parts and places that another component owns, which stay as they are.
        """
        storages = {slab.untyped_storage()._cdata for slab in slabs}

        def is_left(tensor: torch.Tensor) -> bool:
            if isinstance(tensor, AbsentWeight):  # else its file could not be read
                return getattr(tensor.reader, "home", None) is not None
            return (
                is_away(tensor)
                or isinstance(tensor, WatchedTensor | EncodedWeight)
                or (bool(storages) and bool(address_of(tensor)) and tensor.untyped_storage()._cdata in storages)
            )

        with torch.no_grad(), torch.inference_mode(False):
            for part in [part for part in self.module.modules() if part not in others]:
                for places in (part._parameters, part._buffers):
                    for name, tensor in list(places.items()):
                        if tensor is not None and (part, name) not in lent and is_left(tensor):
                            places[name] = at_home(tensor)
                for holder, key, tensor in list(caches_of(part)):
                    if id(tensor) not in self.early and is_left(tensor):
                        was_away = is_away(tensor)
                        holder[key] = home = plain_copy(tensor)
                        if was_away:
                            brought_home.setdefault(part, []).append((holder, key, home))


def at_home(tensor: torch.Tensor) -> Any:
    """Return a parameter or buffer in plain host memory, the same object where torch allows that."""
    home = plain_copy(tensor)
    is_plain = not tensor.is_inference() and not isinstance(tensor, AbsentWeight | EncodedWeight)
    if is_plain and torch._has_compatible_shallow_copy_type(unwatch(tensor), home):
        tensor.data = home
        return tensor
    return nn.Parameter(home, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else home


def plain_copy(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy in host memory; of torch's own class where the tensor is of one of ours."""
    if isinstance(tensor, AbsentWeight):
        tensor = tensor.present()
    if isinstance(tensor, EncodedWeight):
        tensor = tensor.plain()
    with plainly():
        return tensor.detach().to("cpu", copy=True)


def computed_weights(module: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """Return the plain attributes of a layer that its hooks compute before each forward."""
    if not module._forward_pre_hooks:
        return []
    names = {name.removesuffix(end) for name in module._parameters for end in COMPUTED_FROM if name.endswith(end)}
    return [(name, vars(module)[name]) for name in names if isinstance(vars(module).get(name), torch.Tensor)]


@untraced
def forget_computed(name: str, weight: torch.Tensor, module: nn.Module, args: Any, output: Any) -> None:
    if name in vars(module):
        vars(module)[name] = weight


def caches_of(module: nn.Module) -> Iterator[Place]:
    """Yield the tensors in a module's plain attributes, and in dicts and lists among them."""
    own = vars(module)
    for name, value in own.items():
        if isinstance(value, torch.Tensor):
            yield own, name, value
        elif name not in OWN_DICTS and isinstance(value, dict | list):
            for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
                if isinstance(inner, torch.Tensor) and not isinstance(inner, nn.Parameter):
                    yield value, key, inner


def is_away(tensor: torch.Tensor) -> bool:
    return tensor.device.type not in ("cpu", "meta")


def address_of(tensor: torch.Tensor) -> int:
    """Return where a tensor's memory begins; 0 for one without any of its own."""
    if tensor.is_meta or tensor.layout is not torch.strided or torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        return 0
    try:
        return tensor.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):  # a wrapper around others
        return 0


def holds(holder: Any, key: Any, tensor: torch.Tensor) -> bool:
    """Whether a dict or a list has the tensor where it had it."""
    if isinstance(holder, list):
        return key < len(holder) and holder[key] is tensor
    return holder.get(key) is tensor
