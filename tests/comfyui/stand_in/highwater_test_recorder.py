"""Stands in for the part of comfy-aimdo 0.6.0 that records a forward's allocations, and for core's calls of it.

Core from 0.35 on makes these calls around its blocks (`begin`, `iterate`, `end`), and other code `pause_malloc_graph`.
The recorder takes the place of the driver for the simulated devices, so it sees each allocation and each freeing. What
ends a process there is a line in `faults` here:

- memory of a block that is there when the block ends: freed by a later one, it is the end;
- memory of an outer block that is freed in an inner one;
- recorded memory that is freed in a pause: the driver does not know it;
- memory of another device than the one that is recorded.

Freeing memory that was not recorded is none of these. Pauses do not nest: the end of an inner one ends all. The cases
of `fake_cuda/toy.py` show that comfy-aimdo does so.
"""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from threading import get_ident
from typing import Any

__all__ = ["Recorder"]

CLAIM = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_int64)
RELEASE = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class Scope:
    """What is recorded between two calls; by name."""

    def __init__(self, name: str) -> None:
        self.name = name


@dataclass
class Allocation:
    device: int
    num_bytes: int
    scope: Scope | None
    """None: it was not recorded."""


class Recording:
    """The recording of one thread."""

    def __init__(self) -> None:
        self.scopes: list[Scope] = []
        self.is_paused = False
        self.num_pauses = 0


class Recorder:
    """Records what the simulated devices allocate in blocks.

    Args:
        library: the path of the simulated devices' library.
        device: the one that is recorded.
    """

    known: dict[int, Allocation] = {}  # noqa: RUF012  of all recorders: a failed test leaves some
    addresses = itertools.count(1 << 20, 1 << 12)

    def __init__(self, library: str, device: int = 0) -> None:
        self.library = ctypes.CDLL(library)
        self.device = device
        self.recordings: dict[int, Recording] = {}
        self.faults: list[str] = []
        self.num_recorded = 0
        self.num_pauses = 0
        self.functions = CLAIM(self.claim), RELEASE(self.release)
        self.library.highwater_sim_route.argtypes = [CLAIM, RELEASE]
        self.library.highwater_sim_charge.argtypes = [ctypes.c_int, ctypes.c_int64]
        self.library.highwater_sim_refund.argtypes = [ctypes.c_int, ctypes.c_int64]

    def take_allocations(self) -> None:
        """Serve every allocation from now on."""
        self.library.highwater_sim_route(*self.functions)

    def leave(self) -> None:
        """End that. Raises `AssertionError` if something is left, which only the recorder can free."""
        assert not self.known, f"{len(self.known)} allocations are left"
        self.library.highwater_sim_route(CLAIM(), RELEASE())

    def forget(self) -> None:
        """Forget what was told until now."""
        self.faults.clear()
        self.num_recorded = self.num_pauses = 0

    # -- what the simulated devices call

    def claim(self, num_bytes: int) -> int | None:
        device = self.library.highwater_sim_current_device()
        if self.library.highwater_sim_charge(device, num_bytes):
            return None
        recording = self.recordings.get(get_ident())
        scope = recording.scopes[-1] if recording is not None and not recording.is_paused else None
        if scope is not None:
            self.num_recorded += 1
            if device != self.device:
                self.faults.append(f"{scope.name}: {num_bytes} bytes of device {device} were recorded")
        address = next(self.addresses)
        self.known[address] = Allocation(device, num_bytes, scope)
        return address

    def release(self, address: int) -> None:
        allocation = self.known.pop(address)
        self.library.highwater_sim_refund(allocation.device, allocation.num_bytes)
        recording, scope = self.recordings.get(get_ident()), allocation.scope
        if scope is None or recording is None or scope not in recording.scopes:
            return  # of a block that has ended: that it was there then is told
        if recording.is_paused:
            self.faults.append(f"{scope.name}: {allocation.num_bytes} recorded bytes were freed in a pause")
        elif scope is not recording.scopes[-1]:
            self.faults.append(f"{scope.name}: {allocation.num_bytes} bytes were freed in {recording.scopes[-1].name}")

    # -- what core calls

    def begin(self) -> None:
        """A forward begins to be recorded in this thread."""
        recording = self.recordings[get_ident()] = Recording()
        recording.scopes.append(Scope("the forward"))

    def iterate(self, name: str | None) -> None:
        """A block begins, and ends the one before; None: the last one ends."""
        recording = self.recordings[get_ident()]
        if len(recording.scopes) > 1:
            self.pop(recording)
        if name is not None:
            recording.scopes.append(Scope(name))

    def end(self) -> None:
        """The forward ends."""
        recording = self.recordings[get_ident()]
        self.pop(recording)
        assert not recording.scopes and not recording.is_paused
        self.recordings.pop(get_ident())

    def abort(self) -> None:
        """An error ended the forward: nothing more is recorded."""
        self.recordings.pop(get_ident(), None)

    def pop(self, recording: Recording) -> None:
        scope = recording.scopes.pop()
        for allocation in list(self.known.values()):
            if allocation.scope is scope:
                self.faults.append(f"{scope.name}: {allocation.num_bytes} bytes outlive it")

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """Record the body, as a whole."""
        self.begin()
        try:
            yield
        except BaseException:
            self.abort()
            raise
        self.end()

    def pause_malloc_graph(self, sync: bool = False) -> Pausing:
        return Pausing(self)


class Pausing:
    """As core's: it looks for the recording at both ends."""

    def __init__(self, recorder: Recorder) -> None:
        self.find: Callable[[], Recording | None] = lambda: recorder.recordings.get(get_ident())
        self.recorder = recorder

    def __enter__(self) -> None:
        recording = self.find()
        if recording is not None:
            recording.is_paused = True
            self.recorder.num_pauses += 1

    def __exit__(self, *_: Any) -> None:
        recording = self.find()
        if recording is not None:
            recording.is_paused = False
