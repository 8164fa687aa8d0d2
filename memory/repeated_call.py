"""Repeats a host's call of a model once if it ran out of memory.

[Note: second try] Only the host can repeat a call: torch raises what a layer raised, whatever its hooks do. The second
try begins outside of the ``except`` and after the frames of the first are cleared, so the first one's activations are
gone. It computes the same: what the call may have changed is put back. Where that cannot be known, because other code
takes part in the call, the caller says so and the exception goes on.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from .call_state import CallState
from .manager.default import existing_manager
from .manager.member import Member
from .manager.oom_message import read_shortage
from .runtime.forwards.recording_pauses import host_recordings
from .verification.snapshot import hook_tables, is_our_hook

if TYPE_CHECKING:
    from .manager.manager import MemoryManager

__all__ = ["has_hooks_of_others", "repeat_if_short"]

MAX_CAUSES = 8


def repeat_if_short(
    module: nn.Module,
    call: Callable[[], Any],
    given: Any,
    *,
    why_not: Callable[[nn.Module], str | None],
    manager: MemoryManager | None = None,
) -> Any:
    """Return what a call returns; if it runs out of memory of a device, make room and call once more.

    Args:
        module: the module through which the running pass of a hosted component was entered; for others the call is
            never repeated.
        given: the arguments of the call, which it may change.
        why_not: asked when the call failed, with the component's module: why it cannot be repeated, None if it can.
        manager: that of the component; None: the one that the process shares.
    """
    manager = existing_manager() if manager is None else manager
    member = manager.computing(module) if manager is not None else None
    state = save_state(module, member, given) if member is not None else None
    if manager is None or member is None or state is None:
        return call()
    try:
        return call()
    except Exception as error:
        if read_shortage(error) is None or why_not(member.managed.module) is not None:
            raise
        failed = error
    try:
        clear_frames(failed)
        if not state.can_put_back() or not manager.make_room_in_pass(member, failed, state.put_back):
            raise failed
    finally:  # else the exception and this frame, which its traceback names, would hold each other
        del failed, state
    return call()


def save_state(module: nn.Module, member: Member, given: Any) -> CallState | None:
    """Return the state of a call before it begins; None if even that does not fit."""
    managed = member.managed
    try:
        with host_recordings.paused():
            devices = [device.torch_device for device in managed.accelerators]
            return CallState(module, managed.buffers, given, devices)
    except torch.OutOfMemoryError:
        return None


def clear_frames(error: BaseException) -> None:
    """Drop the local variables of the calls that an exception ended; its traceback still names them."""
    causes: list[BaseException | None] = [error]
    for _ in range(MAX_CAUSES):
        cause = causes.pop() if causes else None
        if cause is not None:
            traceback.clear_frames(cause.__traceback__)
            causes += [cause.__cause__, cause.__context__]


def has_hooks_of_others(module: nn.Module) -> bool:
    """Whether other code has forward hooks on a module or anything below it."""
    return any(
        not is_our_hook(hook) for part in module.modules() for table in hook_tables(part) for hook in table.values()
    )
