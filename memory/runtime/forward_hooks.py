"""The forward hooks of a module: they stay in place while the managed components that they call come and go.

[Note: one set of hooks] Another thread may come to the module at any time, also while it gets another profile or is
released. So it meets hooks until its weights are whole again; they lead it into the wait for the manager's lock, and
afterwards to the managed component that the module has by then, for which it may be another block. torch takes the
list of hooks before it calls the first; one that is removed meanwhile is still called, but without the keyword
arguments that it was registered for.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

import torch
from torch import nn
from torch._C import _get_tracing_state, _len_torch_dispatch_stack
from torch._C._functorch import TransformType, peek_interpreter_stack
from torch.fx import _symbolic_trace as fx
from torch.utils.hooks import RemovableHandle

from ..errors import UnsafeState
from .compiled_blocks import untraced
from .deep_copies import OwnHook

__all__ = ["Hooked", "Hooks", "remove_hooks_of"]


class Hooked(Protocol):
    """What the hooks call, and for which modules."""

    entries: frozenset[nn.Module]
    """Through which a forward may come."""
    inner: frozenset[nn.Module]
    """Modules outside of blocks, deeper inside: an entry if one is called while no pass is open."""
    blocks: dict[nn.Module, int]
    """The number of each block's module; one may be an entry, too."""
    parts: dict[nn.Module, int]
    """What is inside the blocks, with the number of its block, as far as it has to be told of."""

    def enter(self, module: nn.Module, inputs: Any) -> bool:
        """Enter through a module, into a pass of its own if none is open; False if the component is another's now."""
        ...

    def is_entered(self) -> bool:
        """Whether this thread is in the middle of a pass."""
        ...

    def is_outermost(self, module: nn.Module) -> bool:
        """Whether this thread has entered through this module."""
        ...

    def before_entry(self, module: nn.Module, args: Any, kwargs: Any) -> Any: ...

    def after_entry(self, module: nn.Module, output: Any) -> Any: ...

    def before_block(self, number: int, module: nn.Module, args: Any, kwargs: Any) -> Any: ...

    def after_block(self, number: int, module: nn.Module, output: Any) -> Any: ...

    def before_part(self, number: int, module: nn.Module, args: Any, kwargs: Any) -> Any: ...

    def after_part(self, number: int, module: nn.Module, output: Any) -> Any: ...

    def dismiss(self) -> None:
        """Refuse new passes."""
        ...


class Hooks:
    """The hooks of one component's module, on its entries, its blocks and what is inside these.

    They call the managed component that has it now.
    """

    def __init__(self) -> None:
        self.target: Hooked | None = None
        self.before_detour: Hooked | None = None
        self.handles: dict[nn.Module, list[RemovableHandle]] = {}

    def lead_to(self, target: Hooked, *, owner: str, root: nn.Module) -> None:
        """Call this managed component from now on, in place of the one before.

        Args:
            owner: the component's name.
            root: its module, whose copies are refused.
        """
        wanted = {*target.entries, *target.inner, *target.blocks, *target.parts}
        for module in wanted - self.handles.keys():
            remove_hooks_of(self, module)
            before, after = (
                OwnHook.on(module, function, owner=owner, is_whole=module is root)
                for function in (self.before, self.after)
            )
            self.handles[module] = [
                module.register_forward_pre_hook(before, with_kwargs=True, prepend=True),
                module.register_forward_hook(after, always_call=True),
            ]
        earlier, self.target = self.target, target
        if earlier is not None and earlier is not target:
            earlier.dismiss()
        self.remove_from(self.handles.keys() - wanted)

    def detour(self, target: Hooked) -> None:
        """Call another one for a while, on the same modules; the one before is not dismissed."""
        self.before_detour, self.target = self.target, target

    def end_detour(self, target: Hooked) -> None:
        """Call the one before again. Idempotent."""
        if self.target is target:
            self.target = self.before_detour

    def remove_from(self, modules: Iterable[nn.Module]) -> None:
        """Remove the hooks from these modules."""
        for module in list(modules):
            for handle in self.handles.get(module, ()):
                handle.remove()
            self.handles.pop(module, None)

    def remove(self) -> None:
        """Remove all hooks. Idempotent."""
        self.remove_from(self.handles)
        if self.target is not None:
            self.target.dismiss()
            self.target = None

    def enter(self, module: nn.Module, inputs: Any) -> Hooked | None:
        """Enter through a module; returns the managed component that let it in, None if none has the component any
        more."""
        while (target := self.target) is not None:
            if target.enter(module, inputs):
                return target
            if self.target is target:
                break
        return None

    @untraced
    def before(self, module: nn.Module, args: Any, kwargs: Any = None) -> Any:
        target = self.target
        if target is None or kwargs is None:  # removed meanwhile
            return None
        if peek_interpreter_stack() is not None:
            refuse_transforms()
        if module in target.parts:
            return target.before_part(target.parts[module], module, args, kwargs) if target.is_entered() else None
        if module in target.inner and target.is_entered():
            return None
        if module not in target.blocks or not target.is_entered():
            if _len_torch_dispatch_stack() or _get_tracing_state() is not None or fx._is_fx_tracing_flag:
                refuse_tracing(args, kwargs)
            target = self.enter(module, (args, kwargs))
            if target is None:
                return None
        if module in target.blocks:
            return target.before_block(target.blocks[module], module, args, kwargs)
        return target.before_entry(module, args, kwargs)

    @untraced
    def after(self, module: nn.Module, args: Any, output: Any) -> Any:
        target = self.target
        if target is None or not target.is_entered():
            return None
        if module in target.blocks:
            return target.after_block(target.blocks[module], module, output)
        if module in target.inner and not target.is_outermost(module):
            return None
        if module in target.parts and not target.is_outermost(module):
            return target.after_part(target.parts[module], module, output)
        return target.after_entry(module, output)


def remove_hooks_of(owner: object, module: nn.Module) -> None:
    """Remove the forward hooks of an object from a module.

    For those that have no handle: torch copies the hooks of a module to another one that it makes in its place, such
    as a quantized layer.
    """
    for hooks, *options in (
        (module._forward_pre_hooks, module._forward_pre_hooks_with_kwargs),
        (module._forward_hooks, module._forward_hooks_with_kwargs, module._forward_hooks_always_called),
    ):
        for number in [number for number, hook in hooks.items() if is_hook_of(owner, hook)]:
            del hooks[number]
            for option in options:
                option.pop(number, None)


def is_hook_of(owner: object, hook: Any) -> bool:
    return isinstance(hook, OwnHook) and getattr(hook.func, "__self__", None) is owner


def refuse_transforms() -> None:
    """Refuse a forward in a transform under which all that is made, weights of ours too, belongs to the transform.

    Raises:
        UnsafeState: it is not `torch.func.vmap`, which leaves alone what does not depend on its inputs.
    """
    kinds = [transform.key() for transform in torch._C._functorch.get_interpreter_stack() or []]
    others = [kind.name.lower() for kind in kinds if kind != TransformType.Vmap]
    if others:
        raise UnsafeState(f"a managed module cannot compute inside of torch.func.{others[-1]}: release it before")


def refuse_tracing(args: Any, kwargs: Any) -> None:
    """Refuse a forward that is traced: the graph would hold the weights where they are now, or replace them.

    Other dispatch modes count or log operators, or choose what a checkpoint keeps; those are allowed.

    Raises:
        UnsafeState: the forward is exported or traced, or runs with fake tensors.
    """
    modes = torch._C._TorchDispatchModeKey.__members__.values()  # of fake tensors, of proxies, of functional tensors
    makes_graph = _get_tracing_state() is not None or any(torch._C._get_dispatch_mode(key) is not None for key in modes)
    if not makes_graph and fx._is_fx_tracing_flag:  # perhaps another thread's
        makes_graph = any(isinstance(given, torch.fx.Proxy) for given in (*args, *kwargs.values()))
    if makes_graph:
        raise UnsafeState("a managed module cannot be exported or traced: release it before")
