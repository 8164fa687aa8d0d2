"""The open calls of a forward that compute on another device than their callers: arguments there, outputs back."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import nn

from .device_hops import DeviceHops, Visit
from .recording_pauses import Pause, host_recordings
from .shared_states import Stores, find_shared_states

__all__ = ["DeviceCalls"]


class Call:
    """A call of an entry, a block, a part of one, or another module.

    ``previous`` is the index of the accelerator that was current before the call; None if the call does not change it.
    ``pause`` keeps what it allocates out of a host's recording.
    """

    def __init__(self, module: nn.Module, visit: Visit, previous: int | None, pause: Pause | None) -> None:
        self.module = module
        self.visit = visit
        self.previous = previous
        self.pause = pause

    def end_pause(self) -> None:
        if self.pause is not None:
            self.pause.end()


class DeviceCalls:
    """Calls on other devices in one component's forwards, the outermost first."""

    def __init__(self, hops: DeviceHops) -> None:
        self.hops = hops
        self.open: list[Call] = []
        self.shared_states: Mapping[nn.Module, list[Any]] = {}
        """By block, the objects of other libraries' hooks and attention processors that the block shares with others.
        """
        self.stores: Stores | None = None

    def find_states(self, blocks: Collection[nn.Module], away: Collection[nn.Module]) -> None:
        """Find the objects that blocks share with one another or with the caller of the module.

        Args:
            away: the blocks that compute on another device than the module's caller.
        """
        self.stores = self.stores or Stores(away)
        states = find_shared_states(blocks)
        for block, processor in self.stores.find():
            states[block].append(processor)
        self.shared_states = states

    def enter(
        self,
        module: nn.Module,
        given: tuple[Any, Any],
        device: torch.device,
        *,
        source: torch.device | None,
        target: torch.device | None,
    ) -> Any:
        """Enter a call that computes on another device; returns its arguments there, None if they need no copy.

        Args:
            source, target: as in `DeviceHops.visit`.
        """
        shared = self.shared_states.get(module, ()) if target is not None else ()
        pause = None if target is None else host_recordings.begin()  # the copies here are kept
        try:
            visit = self.hops.visit(given, device, source=source, target=target, shared=shared)
        except BaseException:
            if pause is not None:
                pause.end()
            raise
        if visit is None:
            return None
        call = Call(module, visit, None if target is None else torch.accelerator.current_device_index(), pause)
        self.open.append(call)
        if call.previous is not None:  # other libraries launch kernels on the current device
            torch.accelerator.set_device_index(device.index)
        return visit.lent.value

    def leave(self, module: nn.Module, output: Any, *, failed: bool) -> Any:
        """Leave a call, if it is open; returns its output for the caller."""
        if not self.open or self.open[-1].module is not module:
            return output
        call = self.open.pop()
        if call.previous is not None:
            torch.accelerator.set_device_index(call.previous)
        call.end_pause()  # first: what the caller gets is its own
        if not failed:
            return call.visit.end(output)
        call.visit.give_back_states()
        return None

    def recover(self, *, is_here: bool, keeps_copies: bool = False) -> None:
        """Undo and forget the calls that an interrupt left open, and all kept copies: the pass is over.

        Args:
            is_here: whether they are calls of this thread, whose current device they changed.
            keeps_copies: keep the copies for the next pass of the same step.
        """
        before = [call.previous for call in self.open if call.previous is not None]
        for call in self.open:
            call.end_pause()
            call.visit.give_back_states()
        self.open.clear()
        if before and is_here:
            torch.accelerator.set_device_index(before[0])
        if self.hops.twins and not keeps_copies:
            with host_recordings.paused():
                self.hops.forget()
