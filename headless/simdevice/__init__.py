"""Simulated accelerators: torch devices with capacity, streams and virtual time, without a GPU.

`install` compiles and registers the backend. Afterwards ``torch.device("sim:0")``, `torch.Stream`, `torch.Event`,
`torch.accelerator` and ``pin_memory()`` work as on a real device. This module configures the hardware (`cluster`,
`configure`), reads its counters (`stats`, `pinned`, `clock_s`, `races`) and injects faults (`fail_alloc`, `fail_copy`,
`fail_registration`). Bytes are exact and seconds are virtual: no wall clock is read. ``simdevice.cpp`` explains how it
works and what it leaves out.
"""

from __future__ import annotations

import contextlib
import gc
import threading
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from .build import CompilerMissing, default_build_directory, load_backend

__all__ = [
    "CompilerMissing",
    "DeviceStats",
    "PinnedStats",
    "SimDeviceSpec",
    "advance",
    "backed_memory",
    "clock_s",
    "cluster",
    "configure",
    "copy_engine",
    "copying_bytes",
    "default_build_directory",
    "fail_alloc",
    "fail_copy",
    "fail_registration",
    "install",
    "installed",
    "name",
    "occupy",
    "pinned",
    "races",
    "reset_clock",
    "reset_stats",
    "share_pages",
    "stats",
    "stream_time_s",
    "strict",
]

# Bytes of a device that are in use for longer than this after the body of a cluster count as leaked.
LONGEST_FREEING_S = 1.0
# The bytes that the copy engine moves at a time, while it holds the lock of the counters.
ENGINE_PIECE_BYTES = 4 << 20
ENGINE_PAUSE_S = 0.0002
UNLIMITED_BYTES = 1 << 60

_ops = torch.ops.highwater_simdevice
_name: str | None = None
_specs: list[SimDeviceSpec] = []
_unrestored: list[SimDeviceSpec] = []  # the hardware to restore when no device holds leftover bytes any more
_strict = {"defer_copies": False, "check_races": False}


@dataclass(frozen=True, kw_only=True, slots=True)
class SimDeviceSpec:
    """One device: its capacity and speed, in bytes, bytes per second and seconds.

    A kernel takes the longer of the times for its flops and its memory traffic. A copy takes ``latency_s`` plus its
    bytes over the link. The streams of a device share one engine that computes, and three links: from the host, to it,
    and one for both directions to other devices. Launching a kernel or a copy costs the host ``launch_s``. Every
    allocation is rounded up to ``round_to`` bytes. ``reserve_bytes`` are in use from the start, like a driver's
    context.
    """

    total_bytes: int
    h2d_bytes_per_s: float = 25e9
    d2h_bytes_per_s: float = 25e9
    peer_bytes_per_s: float = 25e9
    flops_per_s: float = 1e13
    memory_bytes_per_s: float = 1e12
    launch_s: float = 5e-6
    latency_s: float = 1e-5
    round_to: int = 1
    reserve_bytes: int = 0
    has_peer_access: bool = True

    def __post_init__(self) -> None:
        if not 0 <= self.reserve_bytes <= self.total_bytes:
            raise ValueError(f"reserve_bytes must be 0 to total_bytes ({self.total_bytes}), not {self.reserve_bytes}")
        if self.round_to < 1:
            raise ValueError(f"round_to must be at least 1 byte, not {self.round_to}")
        for field in ("h2d", "d2h", "peer", "memory"):
            if getattr(self, f"{field}_bytes_per_s") <= 0:
                raise ValueError(f"{field}_bytes_per_s must be positive")
        if self.flops_per_s <= 0 or self.launch_s < 0 or self.latency_s < 0:
            raise ValueError("flops_per_s must be positive, launch_s and latency_s not negative")

    def slowed(self, by: float) -> SimDeviceSpec:
        """Return the same with memory and links that are ``by`` times slower, for a model that is so much smaller.

        Its copies then take as long as those of the full size, beside launches and latencies that are as they are.
        """
        names = ("h2d_bytes_per_s", "d2h_bytes_per_s", "peer_bytes_per_s", "memory_bytes_per_s")
        return replace(self, **{name: getattr(self, name) / by for name in names})

    @property
    def _sizes(self) -> tuple[int, ...]:
        return self.total_bytes, self.reserve_bytes, self.round_to

    @property
    def _rates(self) -> tuple[float, ...]:
        bandwidths = (self.h2d_bytes_per_s, self.d2h_bytes_per_s, self.peer_bytes_per_s)
        return *bandwidths, self.flops_per_s, self.memory_bytes_per_s, self.launch_s, self.latency_s


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceStats:
    """One device's counters: ``used_bytes`` is the current number; peak and counts begin at the last reset.

    ``num_allocs`` counts allocations that succeeded; ``num_syncs`` counts waits for the whole device, not for a stream
    or an event. A copy between devices counts as ``peer`` on both.
    """

    used_bytes: int
    peak_bytes: int
    total_bytes: int
    num_allocs: int
    h2d_bytes: int
    d2h_bytes: int
    peer_bytes: int
    num_h2d: int
    num_d2h: int
    num_peer: int
    num_ooms: int
    num_kernels: int
    num_syncs: int


@dataclass(frozen=True, kw_only=True, slots=True)
class PinnedStats:
    """Pinned host memory. Allocations count as the power of two to which torch rounds them, registered ranges exactly.

    ``registered_bytes`` is the part of ``used_bytes`` in the ``num_registered`` ranges of ``cudart()``.
    """

    used_bytes: int
    peak_bytes: int
    registered_bytes: int
    num_registered: int


def install(name: str = "sim", num_devices: int = 4, build_directory: Path | str | None = None) -> None:
    """Compile (first use), load and register the backend as ``name``, with devices of 1 TiB each.

    Works once per process: torch cannot rename a backend, so a later call with another name raises `RuntimeError`, and
    one with the same name does nothing. Torch refuses names that it reserves (cuda, xpu, mps, ...). Raises
    `CompilerMissing`. From then on the process stores nothing that it learns in the user's cache.
    """
    global _name
    if _name is not None:
        if name != _name:
            raise RuntimeError(f"the simulated devices are installed as {_name!r} and cannot be renamed to {name!r}")
        return
    load_backend(None if build_directory is None else Path(build_directory))
    from ...memory.manager.default import keep_out_of_user_cache
    from ...memory.transfer.devices import WITH_FLOAT8
    from .module import create_module

    keep_out_of_user_cache()
    WITH_FLOAT8[name] = True  # not to be tried: a few bytes would be counted as some node's

    torch.utils.rename_privateuse1_backend(name)
    module = create_module(
        name,
        lambda index: repr(_specs[index]),
        lambda index: _specs[index].flops_per_s,
        lambda index: _specs[index].has_peer_access,
    )
    torch._register_device_module(name, module)
    torch.utils.generate_methods_for_privateuse1_backend()
    _name = name
    configure([SimDeviceSpec(total_bytes=1 << 40)] * num_devices)


def installed() -> bool:
    """Whether `install` has been called in this process."""
    return _name is not None


def name() -> str:
    """Return the backend's name, as in ``torch.device(f"{name()}:0")``."""
    if _name is None:
        raise RuntimeError("the simulated devices are not installed; call install() first")
    return _name


def configure(specs: Sequence[SimDeviceSpec], pinned_bytes: int | None = None) -> None:
    """Set the number of devices, their sizes and rates, and the cap on pinned memory (None: no cap).

    Resets peaks, counters and injected faults, not the clocks. Raises `RuntimeError` if it would drop a device that
    still holds allocations. A device that holds more than its new size keeps its allocations and can allocate nothing
    more.
    """
    name()
    _ops.configure(
        [size for spec in specs for size in spec._sizes],
        [float(rate) for spec in specs for rate in spec._rates],
        UNLIMITED_BYTES if pinned_bytes is None else pinned_bytes,
    )
    _specs[:] = specs
    _unrestored.clear()
    reset_stats()


@contextlib.contextmanager
def cluster(
    specs: Sequence[SimDeviceSpec],
    pinned_bytes: int | None = None,
    *,
    defer_copies: bool = True,
    check_races: bool = True,
) -> Iterator[None]:
    """Configure hardware for the body of a ``with``: clocks and counters at zero, strict checks on.

    After a body without an exception, raises `AssertionError` if a device or pinned memory still holds bytes that the
    body allocated or registered, if the error of a refused registration was not read, or if there were races. Bytes
    that were in use before the body, such as those in the traceback of a failed test, are first removed from the
    counters, with a warning.
    """
    _collect_garbage_that_holds_bytes()
    abandoned = _ops.abandon()
    if abandoned:
        warnings.warn(f"{abandoned} bytes from before this cluster are still allocated; not counted", stacklevel=3)
    specs_before = list(_unrestored or _specs)
    configure(specs, pinned_bytes)
    reset_clock()
    races()
    _ops.take_last_error()
    before = dict(_strict)
    strict(defer_copies=defer_copies, check_races=check_races)
    try:
        yield
        _collect_garbage_that_holds_bytes()
        _assert_clean()
    finally:
        _ops.finish_everything()
        races()
        strict(**before)
        if _devices_in_use():
            _unrestored[:] = specs_before
        else:
            configure(specs_before)
        _ops.take_last_error()
        fail_registration(0)
        for index in range(_ops.num_devices()):
            fail_alloc(index, 0)
            fail_copy(index, 0)


def _devices_in_use() -> list[int]:
    return [index for index in range(_ops.num_devices()) if stats(index).used_bytes]


def _collect_garbage_that_holds_bytes() -> None:
    """Finish all work, and run a full garbage collection (0.2 s in pytest's process) only if bytes are still in use.

    Waits for autograd's threads, which may free the last tensors of a backward pass a moment after it returned.
    """
    _ops.finish_everything()
    if _devices_in_use() or pinned().used_bytes:
        gc.collect()
    give_up_s = time.monotonic() + LONGEST_FREEING_S
    while (_devices_in_use() or pinned().used_bytes) and time.monotonic() < give_up_s:
        time.sleep(0.001)


def _assert_clean() -> None:
    problems = [
        f"{name()}:{i} still holds {stats(i).used_bytes} bytes in {_ops.live_allocs(i)} allocations"
        for i in _devices_in_use()
    ]
    if pinned().used_bytes:
        registered = f", {pinned().num_registered} registered ranges among them" if pinned().num_registered else ""
        problems.append(f"{pinned().used_bytes} bytes are still pinned{registered}")
    error = _ops.take_last_error()
    if error:
        problems.append(f"error {error} of a refused registration was not read: the next kernel would raise it")
    found = races()
    if found:
        problems.append(f"{len(found)} races, the first: {found[0]}")
    if problems:
        raise AssertionError("; ".join(problems))


def stats(index: int) -> DeviceStats:
    """Return the counters of one device."""
    return DeviceStats(**dict(zip(DeviceStats.__slots__, _ops.stats(index), strict=True)))


def pinned() -> PinnedStats:
    """Return the counters of pinned host memory. Bytes of a copy in flight count until it is done."""
    used, peak = _ops.pinned()
    registered, num_registered = _ops.registered()
    return PinnedStats(used_bytes=used, peak_bytes=peak, registered_bytes=registered, num_registered=num_registered)


def reset_stats() -> None:
    """Set all counters to zero and all peaks to the bytes in use."""
    _ops.reset_stats()


def reset_clock() -> None:
    """Finish all work, then set all clocks to zero. Operations that were unordered stay unordered."""
    _ops.reset_clock()


def clock_s() -> float:
    """Return the host's virtual time in seconds."""
    return _ops.host_time()


def stream_time_s(stream: torch.Stream) -> float:
    """Return the end of the stream's last queued operation, in virtual seconds."""
    return _ops.stream_time(stream.device_index, stream.stream_id)


def advance(where: torch.device | str | torch.Stream, seconds: float) -> None:
    """Run a simulated kernel of this length on a stream, or on a device's current stream. Costs the host a launch.

    It takes longer where kernels of other streams have the device's engine meanwhile.
    For the device "cpu" the host itself is busy for this time.
    """
    if isinstance(where, torch.Stream):
        _ops.advance(where.device_index, where.stream_id, seconds)
        return
    device = torch.device(where)
    if device.type == "cpu":
        _ops.advance_host(seconds)
    else:
        index = torch.accelerator.current_device_index() if device.index is None else device.index
        _ops.advance(index, -1, seconds)


def strict(*, defer_copies: bool | None = None, check_races: bool | None = None) -> None:
    """Switch late copies and race checks on or off (None: unchanged). ``simdevice.cpp`` explains both at its top."""
    if defer_copies is not None:
        _strict["defer_copies"] = defer_copies
    if check_races is not None:
        _strict["check_races"] = check_races
    _ops.strict(_strict["defer_copies"], _strict["check_races"])


def share_pages(allowed: bool) -> None:
    """Whether host ranges that share a page but no byte can be registered. A driver has been seen to allow it.

    That was 590.48.01 (lupinemachines/lupine pull request 878). The default is what is safe with any driver: no.
    """
    _ops.share_pages(allowed)


@contextlib.contextmanager
def copy_engine() -> Iterator[None]:
    """In the body, move asynchronous copies in a thread, as a card does while its host continues.

    For measurements of real seconds: see [Note: copy engine] in ``simdevice.cpp``.
    """
    ended = threading.Event()

    def move() -> None:
        while not ended.is_set():
            if not _ops.move_deferred(ENGINE_PIECE_BYTES):
                time.sleep(ENGINE_PAUSE_S)

    thread = threading.Thread(target=move, name="simdevice-copy-engine", daemon=True)
    _ops.copy_engine(True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        _ops.copy_engine(False)


@contextlib.contextmanager
def backed_memory(num_bytes: int) -> Iterator[None]:
    """In the body, give devices memory that the system has provided already, as long as so many bytes have room for it.

    For measurements of real seconds: see [Note: backed memory] in ``simdevice.cpp``. Takes the RAM at once.
    """
    _ops.back_memory(num_bytes)
    try:
        yield
    finally:
        _ops.back_memory(0)


def copying_bytes() -> int:
    """Return the bytes of asynchronous copies that have not been moved yet."""
    return _ops.move_deferred(0)


def races() -> list[str]:
    """Return the races found since the last call, oldest first, one sentence each (at most 1000)."""
    return _ops.races()


def occupy(index: int, num_bytes: int) -> None:
    """Set the bytes of a device that another program holds. Replaces its ``reserve_bytes`` until `cluster` ends."""
    if num_bytes < 0:
        raise ValueError(f"num_bytes must not be negative, not {num_bytes}")
    _ops.occupy(index, num_bytes)


def fail_alloc(index: int, nth: int) -> None:
    """Make the ``nth`` allocation on a device from now raise `torch.OutOfMemoryError` (1: the next, 0: none)."""
    _ops.fail_alloc(index, nth)


def fail_copy(index: int, nth: int) -> None:
    """Make the ``nth`` copy to, from or between this device and another raise `RuntimeError` (1: the next, 0: none)."""
    _ops.fail_copy(index, nth)


def fail_registration(nth: int) -> None:
    """Make the ``nth`` host registration from now return error 2, out of memory (1: the next, 0: none)."""
    _ops.fail_registration(nth)
