"""The forward hooks of a module: they stay in place while the attachments that they call come and go.

[Note: one set of hooks] Another thread may come to the module at any time, also while it gets another profile or is
released. So it meets hooks until its weights are whole again; they lead it into the wait for the manager's lock, and
afterwards to the attachment that the module has by then. torch takes the list of hooks before it calls the first; one
that is removed meanwhile is still called, but without the keyword arguments that it was registered for.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any, Protocol

from torch import nn
from torch.utils.hooks import RemovableHandle

__all__ = ["Hooked", "Hooks"]


class Hooked(Protocol):
    """What the hooks call."""

    def enter(self, module: nn.Module) -> bool:
        """Enter through a module, into a pass of its own if none is open; False if the component is another's now."""
        ...

    def is_entered(self) -> bool:
        """Whether this thread is in the middle of a pass."""
        ...

    def before_entry(self, args: Any, kwargs: Any) -> Any: ...

    def after_entry(self, module: nn.Module, output: Any) -> Any: ...

    def before_block(self, number: int, module: nn.Module, args: Any, kwargs: Any) -> Any: ...

    def after_block(self, number: int, module: nn.Module, output: Any) -> Any: ...

    def before_part(self, number: int, args: Any, kwargs: Any) -> Any: ...

    def after_part(self, number: int, output: Any) -> Any: ...

    def dismiss(self) -> None:
        """Let nobody in any more."""
        ...


class Hooks:
    """The hooks of one component's module, on its entries, its blocks and what is inside these.

    They call the attachment that has it now.
    """

    def __init__(self) -> None:
        self.target: Hooked | None = None
        self.handles: list[RemovableHandle] = []
        self.part_handles: dict[int, list[RemovableHandle]] = {}
        """By block, those on the modules inside it."""

    def lead_to(self, target: Hooked, entries: Collection[nn.Module], blocks: Mapping[nn.Module, int]) -> None:
        """Call this attachment from now on, in place of the one before; the first one has the hooks registered.

        Args:
            entries: through which a forward may come.
            blocks: the number of each block's module; one may be an entry, too.
        """
        before, self.target = self.target, target
        if before is not None:
            before.dismiss()
            return
        for entry in entries:
            if entry not in blocks:
                self.handles += register(entry, self.before_entry, self.after_entry)
        for block, number in blocks.items():
            self.handles += register(block, self.before_block(number), self.after_block(number))

    def watch_parts(self, parts: Mapping[nn.Module, int]) -> None:
        """Call the attachment before and after modules inside blocks, too, until `forget_parts`."""
        for number in list(self.part_handles):
            self.forget_parts(number)
        for part, number in parts.items():
            before, after = self.before_part(number), self.after_part(number)
            self.part_handles.setdefault(number, []).extend(register(part, before, after))

    def forget_parts(self, number: int) -> None:
        """Let the modules inside a block be called without us."""
        for handle in self.part_handles.pop(number, ()):
            handle.remove()

    def remove(self) -> None:
        """Call nobody any more. Idempotent."""
        for handle in self.handles:
            handle.remove()
        self.handles = []
        for number in list(self.part_handles):
            self.forget_parts(number)
        if self.target is not None:
            self.target.dismiss()
            self.target = None

    def enter(self, module: nn.Module) -> Hooked | None:
        """Enter through a module; returns the attachment that let it in, None if none has the component any more."""
        while (target := self.target) is not None:
            if target.enter(module):
                return target
            if self.target is target:
                break
        return None

    def before_entry(self, module: nn.Module, args: Any, kwargs: Any = None) -> Any:
        if kwargs is None:  # removed meanwhile
            return None
        target = self.enter(module)
        return target.before_entry(args, kwargs) if target is not None else None

    def after_entry(self, module: nn.Module, args: Any, output: Any) -> Any:
        return self.target.after_entry(module, output) if self.target is not None else None

    def before_block(self, number: int) -> Callable[..., Any]:
        def before(module: nn.Module, args: Any, kwargs: Any = None) -> Any:
            target = self.target
            if target is not None and kwargs is not None and not target.is_entered():  # called from outside
                target = self.enter(module)
            if target is None or kwargs is None:
                return None
            return target.before_block(number, module, args, kwargs)

        return before

    def after_block(self, number: int) -> Callable[..., Any]:
        def after(module: nn.Module, args: Any, output: Any) -> Any:
            target = self.target
            return target.after_block(number, module, output) if target is not None and target.is_entered() else None

        return after

    def before_part(self, number: int) -> Callable[..., Any]:
        def before(module: nn.Module, args: Any, kwargs: Any = None) -> Any:
            target = self.target
            if target is None or kwargs is None or not target.is_entered():
                return None
            return target.before_part(number, args, kwargs)

        return before

    def after_part(self, number: int) -> Callable[..., Any]:
        def after(module: nn.Module, args: Any, output: Any) -> Any:
            target = self.target
            return target.after_part(number, output) if target is not None and target.is_entered() else None

        return after


def register(module: nn.Module, before: Callable[..., Any], after: Callable[..., Any]) -> list[RemovableHandle]:
    return [
        module.register_forward_pre_hook(before, with_kwargs=True, prepend=True),
        module.register_forward_hook(after, always_call=True),
    ]
