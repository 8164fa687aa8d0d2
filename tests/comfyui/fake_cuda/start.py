"""Runs in a host process before comfy-aimdo looks for a driver, and holds all that this rig replaces in others' code.

The list, with reasons; nothing else of core, comfy-aimdo or torch is another, on disk or in memory:

1. `comfy_aimdo.torch.get_tensor_from_raw_ptr`: torch makes tensors over a raw address only for the device type "cuda",
   and refuses a simulated device of that name. Ours makes the same tensor for the simulated device.
2. `ModelPatcher.get_free_memory`: core tells comfy-aimdo the device's number only where its type is "cuda", and would
   count the evictable pages of the first device for the second.
3. `model_management.set_torch_device` and `cuda_device_context`: core makes a device current only for other types;
   comfy-aimdo asks the driver which device is current, and core orders its copies with that device's stream.

The rest is core's own doing: ``--enable-dynamic-vram`` overrides its checks for NVIDIA and for torch's version.

With kind "nvidia" core also does what it does for NVIDIA's devices only (copies on streams of their own, page-locked
copies of weights, prefetch), since it asks by the device type "cuda":

4. `model_management.is_device_cuda`: true for the simulated devices. ``--async-offload 2`` is what core then chooses.
5. `model_management.synchronize`: core waits for no device of our type.
6. `model_management.MIN_WEIGHT_MEMORY_RATIO` and `MAX_PINNED_MEMORY`: what core sets where it finds NVIDIA; the latter
   is smaller than core's, which is most of the machine's RAM.
7. `torch.cuda`'s `Stream`, `stream`, `current_stream`, `synchronize`, `set_device` and `cudart`: those of the simulated
   devices. `torch.cuda.is_available` stays false.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator
from typing import Any

import torch


class Driver:
    """The fake driver, loaded into this process: its counters, and faults on demand."""

    def __init__(self, path: str, simdevice: str) -> None:
        ctypes.CDLL(simdevice, mode=ctypes.RTLD_GLOBAL)  # loaded already; now the driver finds its functions, too
        self.library = ctypes.CDLL(path, mode=ctypes.RTLD_GLOBAL)
        self.library.fake_cuda_name.restype = ctypes.c_char_p
        self.library.fake_cuda_fail.argtypes = [ctypes.c_char_p, ctypes.c_longlong]
        for name in ("num_calls", "mapped_bytes", "copied_to_device", "copied_to_host"):
            getattr(self.library, f"fake_cuda_{name}").restype = ctypes.c_longlong
        self.library.fake_cuda_take_allocations(0)

    def read(self) -> dict[str, Any]:
        """Return what was done since the last reset; ``mapped_bytes`` is the present number, of all devices."""
        names = []
        while name := self.library.fake_cuda_name(len(names)):
            names.append(name.decode())
        return {
            "calls": {name: self.library.fake_cuda_num_calls(number) for number, name in enumerate(names)},
            **{
                name: getattr(self.library, f"fake_cuda_{name}")()
                for name in ("mapped_bytes", "copied_to_device", "copied_to_host")
            },
        }

    def reset(self) -> None:
        self.library.fake_cuda_reset()

    def fail(self, function: str, nth: int) -> None:
        """Make the nth call of a function from now return "out of memory" (1: the next, 0: none)."""
        if not self.library.fake_cuda_fail(function.encode(), nth):
            raise ValueError(f"the fake CUDA driver has no function {function!r}")


kind = ""
MAX_PINNED_BYTES = 1 << 30


def start(path: str, simdevice: str, as_kind: str) -> Driver:
    """Load the driver once torch knows the simulated devices, and replace what has to be in comfy-aimdo (1)."""
    global kind
    if as_kind not in ("core", "nvidia"):
        raise ValueError(f"dynamic is {as_kind!r}; allowed: 'core', 'nvidia'")
    kind = as_kind
    driver = Driver(path, simdevice)
    import comfy_aimdo.torch

    comfy_aimdo.torch.get_tensor_from_raw_ptr = tensor_at
    return driver


def tensor_at(address: int, num_bytes: int, device: Any) -> torch.Tensor:
    return torch.ops.highwater_simdevice.tensor_at(address, num_bytes, torch.device(device))


def replace_in_core() -> None:
    """Replace (2) and (3), and what the kind asks for; called once core is imported and before its first model."""
    import comfy.model_management as management
    import comfy.model_patcher
    import comfy_aimdo.model_vbar

    devices = torch.get_device_module()

    def get_free_memory(self: Any, device: torch.device) -> int:
        free: int = management.get_free_memory(device)
        index = devices.current_device() if device.index is None else device.index
        return free if management.is_device_cpu(device) else free + comfy_aimdo.model_vbar.vbars_analyze(index)

    comfy.model_patcher.ModelPatcher.get_free_memory = get_free_memory
    management.set_torch_device = devices.set_device

    @contextlib.contextmanager
    def device_context(device: torch.device) -> Iterator[None]:
        before = devices.current_device()
        if device.index is not None and not management.is_device_cpu(device):
            devices.set_device(device.index)
        try:
            yield
        finally:
            devices.set_device(before)

    management.cuda_device_context = device_context
    if kind == "nvidia":
        act_as_nvidia(management, devices)


def act_as_nvidia(management: Any, devices: Any) -> None:
    simulated = torch.accelerator.current_accelerator().type

    class Stream(torch.Stream):
        def __new__(cls, device: Any = None, priority: int = 0) -> Any:
            return super().__new__(cls, device=torch.device(device or simulated))

        @property
        def cuda_stream(self) -> int:
            return self.stream_id

    management.is_device_cuda = lambda device: management.is_device_type(device, simulated)
    management.synchronize = devices.synchronize
    management.MIN_WEIGHT_MEMORY_RATIO = 0.0
    management.MAX_PINNED_MEMORY = MAX_PINNED_BYTES
    torch.cuda.Stream = Stream
    for name in ("stream", "current_stream", "synchronize", "set_device", "cudart"):
        setattr(torch.cuda, name, getattr(devices, name))
