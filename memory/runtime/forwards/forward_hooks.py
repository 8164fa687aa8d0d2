"""The forward hooks of a module. They stay in place while the managed components that they call change.

`ForwardHooks` and `Forwards` are two classes because they live for different times. The hooks belong to the module:
`ForwardHooks` has torch's handles of them, knows which modules have them now, and makes other threads wait. A component
that gets another profile hands it over to the one that follows (`lead_to`). `Forwards` belongs to one component with
one plan: it has the open pass, the lease, the blocks and their devices, and ends with the component. Each knows the
other while the hooks lead there: weights that move need all hooks back first. `Forwards.dismiss` ends that.

[Note: one set of hooks] Another thread may call the module at any time, also while the module gets another profile or
is released. So the hooks stay until its weights are complete again. A hook makes such a thread wait for the manager's
lock, and then calls the managed component that has the module by then; for that component the called module may be
another block. torch reads the list of hooks before it calls the first. A hook that is removed meanwhile is still
called, but without the keyword arguments for which it was registered.

[Note: hooks of quiet passes] In a quiet pass (`forward_blocks.py`) a block's call needs no work, but torch takes two
microseconds to call its hooks. So after the second quiet pass in a row only the entries keep their hooks before calls,
and the root its hook after calls. A block that other code then calls by itself computes as in the plain module: its
inputs have to be on the device, and the call does not count as a use of the component. The hooks come back before
weights move, and with the next pass that is not quiet. A call that began without them keeps the component from being
evicted: it is found on the stack of its thread (`thread_stacks.py`). Where code has once called a block by itself while
there were hooks, they stay for good.

[Note: changes of hooks] No lock orders what adds and removes hooks: the thread that runs the pass may, while it holds
the component's lease, or one that holds the manager's lock while there is no lease. A pass is not over before that, so
what it learned (which parts of blocks need hooks no more) has its effect before the lease is given back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from threading import Event, get_ident
from typing import Any
from weakref import ref

import torch
from torch import nn
from torch._C import _get_tracing_state, _len_torch_dispatch_stack
from torch._C._functorch import TransformType, peek_interpreter_stack
from torch.fx import _symbolic_trace as fx
from torch.utils.hooks import RemovableHandle

from ...errors import UnsafeState
from ..tensors.deep_copies import OwnHook
from ..tensors.encoded_weight import NOT_TRACED
from .compiled_blocks import untraced
from .forward_blocks import Forwards
from .thread_stacks import find_unseen

__all__ = ["ForwardHooks", "remove_hooks_of"]


class Gate:
    """Disables a module's hooks for one thread that computes without the engine; other threads wait."""

    def __init__(self) -> None:
        self.thread_id = get_ident()
        self.is_open = Event()

    def is_passed(self) -> bool:
        """Whether this is the thread that computes. Other threads wait here until the gate opens."""
        if self.thread_id == get_ident():
            return True
        self.is_open.wait()
        return False


class ForwardHooks:
    """The hooks of one component's module: on its entries, its blocks and their parts.

    They call the `Forwards` of the managed component that has the module now.
    """

    def __init__(self) -> None:
        self.target: Forwards | None = None
        self.gate: Gate | None = None
        """Set while a thread computes without the engine."""
        self.handles: dict[nn.Module, RemovableHandle] = {}
        """The hooks before calls, by module."""
        self.exits: dict[nn.Module, RemovableHandle] = {}
        """The hooks after calls, by module."""
        self.left: set[nn.Module] = set()
        """The modules that may be called without hooks, or whose calls that began so may be under way."""
        self.is_complete = False
        """Whether all modules have the hooks that they need in passes that are not quiet."""
        self.is_called_inside = False
        """Whether other code has called a block by itself ([Note: hooks of quiet passes])."""
        self.owner, self.root = "", ref(nn.Module())
        self.was_quiet = False
        """Whether the last pass was quiet."""

    def lead_to(self, target: Forwards, *, owner: str, root: nn.Module) -> None:
        """Call these forwards from now on, in place of the former ones.

        Args:
            owner: the component's name.
            root: the component's module; copying it is refused.
        """
        self.owner, self.root = owner, ref(root)
        self.add_to(target)
        earlier, self.target = self.target, target
        if earlier is not None and earlier is not target:
            earlier.dismiss()
        self.end_detour()
        self.remove_from(self.handles.keys() - target.hooked)
        target.take_hooks(self.watch_inside, self.find_unseen, self.remove_from)

    def own_hook(self, module: nn.Module, function: Callable[..., Any]) -> OwnHook:
        return OwnHook.on(module, function, owner=self.owner, is_root=module is self.root())

    def add_to(self, target: Forwards) -> None:
        """Add the missing hooks to all modules where forwards need them."""
        root, hooked = self.root(), target.hooked
        for module in hooked - self.handles.keys():
            remove_own(self, *lists_before(module))  # left by an interrupt, or copied along with the module
            before = self.own_hook(module, self.before if module is root else self.before_inside)
            self.handles[module] = module.register_forward_pre_hook(before, with_kwargs=True, prepend=True)
        for module in hooked - self.exits.keys():
            remove_own(self, *lists_after(module))
            after = self.own_hook(module, self.after if module is root else self.after_inside)
            self.exits[module] = module.register_forward_hook(after, always_call=True)
        self.is_complete = True

    def watch_inside(self) -> None:
        """Add the hooks that quiet passes do without, unless they are there."""
        if not self.is_complete and self.target is not None:
            self.add_to(self.target)

    def leave_inside(self, target: Forwards) -> None:
        """Remove the hooks that quiet passes do without."""
        self.is_complete = False
        root = self.root()
        for module in [module for module in self.exits if module is not root]:
            self.exits.pop(module).remove()
        inside = self.handles.keys() - {*target.entries, *target.inner}
        self.left |= inside
        self.remove_from(inside)

    def find_unseen(self) -> set[int]:
        """Return the threads in which calls are under way that began without hooks."""
        if not self.left:
            return set()
        current = self.target.passes.open if self.target is not None else None
        threads = find_unseen(self.left, HOOKS) - {current.thread_id if current is not None else 0}
        if not threads and self.is_complete:
            self.left = set()
        return threads

    def detour(self) -> None:
        """Disable the hooks for this thread; other threads wait until `end_detour`. Requires that no pass is open."""
        self.gate = Gate()

    def end_detour(self) -> None:
        """Enable the hooks again. Idempotent."""
        gate, self.gate = self.gate, None
        if gate is not None:
            gate.is_open.set()

    def remove_from(self, modules: Iterable[nn.Module]) -> None:
        """Remove the hooks from these modules."""
        for module in list(modules):
            for handles in (self.handles, self.exits):
                if module in handles:
                    handles.pop(module).remove()

    def remove(self) -> None:
        """Remove all hooks. Idempotent."""
        self.remove_from(self.handles)
        self.is_complete = False
        self.end_detour()
        if self.target is not None:
            self.target.dismiss()
            self.target = None

    # -- what torch calls

    @untraced
    def before_inside(self, module: nn.Module, args: Any, kwargs: Any = None) -> Any:
        """Hook before calls of all modules but the root; returns at once in a quiet pass (`Forwards.quiet_thread`)."""
        target = self.target
        if target is not None and kwargs is not None and self.gate is None:
            if target.quiet_thread == get_ident():
                return None
            number, current = target.blocks.get(module), target.passes.here
            if number is not None and current is not None:
                if peek_interpreter_stack() is not None:
                    refuse_transforms()
                return target.before_block(number, module, args, kwargs, current)
        return self.before(module, args, kwargs)

    @untraced
    def after_inside(self, module: nn.Module, args: Any, output: Any) -> Any:
        target = self.target
        if target is not None and target.quiet_thread == get_ident():
            return None
        return self.after(module, args, output)

    @untraced
    def before(self, module: nn.Module, args: Any, kwargs: Any = None) -> Any:
        target = self.target
        if target is None or kwargs is None or (self.gate is not None and self.gate.is_passed()):
            return None  # kwargs is None if the hook was removed meanwhile ([Note: one set of hooks])
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
        if module not in target.blocks:
            return target.before_entry(module, args, kwargs)
        current = target.passes.here
        assert current is not None
        return target.before_block(target.blocks[module], module, args, kwargs, current)

    def enter(self, module: nn.Module, inputs: Any) -> Forwards | None:
        """Enter through a module; returns the forwards that let it in, None if the module is no longer managed."""
        while (target := self.target) is not None:
            if target.enter(module, inputs):
                if target.passes.depth == 1:
                    self.note_entry(target, module)
                return target
            if self.target is target:
                break
        return None

    def note_entry(self, target: Forwards, module: nn.Module) -> None:
        """Note through which module a pass begins; decides which hooks it needs ([Note: hooks of quiet passes])."""
        is_quiet = target.quiet_thread != 0
        self.is_called_inside |= module in target.blocks and module not in target.entries
        if is_quiet and self.was_quiet and self.is_complete and not self.is_called_inside:
            self.leave_inside(target)
        self.was_quiet = is_quiet

    @untraced
    def after(self, module: nn.Module, args: Any, output: Any) -> Any:
        target = self.target
        current = target.passes.here if target is not None else None
        if target is None or current is None:
            return None
        number = target.blocks.get(module)
        if number is not None:
            return target.after_block(number, module, output, current)
        if current.outermost is not module:
            if module in target.inner:
                return None
            if module in target.parts:
                return target.after_part(target.parts[module], module, output, current)
        return target.after_entry(module, output, current)


HOOKS = (ForwardHooks.before.__code__, ForwardHooks.before_inside.__code__)


def remove_hooks_of(owner: object, module: nn.Module) -> None:
    """Remove the forward hooks that are methods of an object from a module.

    For hooks without a handle: torch copies the hooks of a module to a module that replaces it, such as a quantized
    layer.
    """
    for hooks, *options in (lists_before(module), lists_after(module)):
        remove_own(owner, hooks, *options)


def remove_own(owner: object, hooks: dict[int, Any], *options: dict[int, bool]) -> None:
    """Remove the hooks that are methods of an object from torch's list of hooks and from those of their options."""
    for number in [number for number, hook in hooks.items() if is_hook_of(owner, hook)]:
        del hooks[number]
        for option in options:
            option.pop(number, None)


def lists_before(module: nn.Module) -> tuple[dict[int, Any], ...]:
    """Return torch's list of a module's hooks before calls, and those of their options."""
    return module._forward_pre_hooks, module._forward_pre_hooks_with_kwargs


def lists_after(module: nn.Module) -> tuple[dict[int, Any], ...]:
    """Return torch's list of a module's hooks after calls, and those of their options."""
    return module._forward_hooks, module._forward_hooks_with_kwargs, module._forward_hooks_always_called


def is_hook_of(owner: object, hook: Any) -> bool:
    return isinstance(hook, OwnHook) and getattr(hook.func, "__self__", None) is owner


def refuse_transforms() -> None:
    """Refuse a forward in a torch.func transform that would make our weights its own.

    Raises:
        UnsafeState: a transform is active that is not `torch.func.vmap`; vmap does not change tensors that are
            independent of its inputs.
    """
    kinds = [transform.key() for transform in torch._C._functorch.get_interpreter_stack() or []]
    others = [kind.name.lower() for kind in kinds if kind != TransformType.Vmap]
    if others:
        raise UnsafeState(f"a managed module cannot compute inside torch.func.{others[-1]}: release it first")


def refuse_tracing(args: Any, kwargs: Any) -> None:
    """Refuse a traced forward: its graph would contain the weights at their current addresses, or replace them.

    Allows other dispatch modes, which count or log operators, or choose what a checkpoint keeps.

    Raises:
        UnsafeState: the forward is exported or traced, or runs with fake tensors.
    """
    modes = torch._C._TorchDispatchModeKey.__members__.values()  # fake tensors, proxies, functional tensors
    makes_graph = _get_tracing_state() is not None or any(torch._C._get_dispatch_mode(key) is not None for key in modes)
    if not makes_graph and fx._is_fx_tracing_flag:  # perhaps set by another thread
        makes_graph = any(isinstance(given, torch.fx.Proxy) for given in (*args, *kwargs.values()))
    if makes_graph:
        raise UnsafeState(NOT_TRACED)
