"""The device module ``torch.<name>``, as `torch.cuda` is for CUDA; has only the functions that are used.

Most functions are those of `torch.accelerator`. The others are used by torch's random numbers and autocast, by ComfyUI
and by diffusers.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import torch

_ops = torch.ops.highwater_simdevice
_accelerator = torch.accelerator


def create_module(
    name: str,
    describe: Callable[[int], str],
    flops_per_s: Callable[[int], float],
    has_peers: Callable[[int], bool],
) -> types.ModuleType:
    """Return the module for a backend called ``name``. Registers nothing.

    Args:
        describe: returns the configuration of a device as text, which is a part of the device's ``uuid``.
        flops_per_s: returns how fast a device computes, which is told as the clock of its one processor.
        has_peers: returns whether a device and others have access to each other's memory.
    """

    def index_of(device: Any = None) -> int:
        if device is None:
            return _accelerator.current_device_index()
        if isinstance(device, int):
            return device
        device = torch.device(device)
        return _accelerator.current_device_index() if device.index is None else device.index

    class device_of(_accelerator.device_index):
        """Make a device current for the body of a ``with``."""

        def __init__(self, device: Any) -> None:
            super().__init__(index_of(device))

    def get_rng_state(device: Any = None) -> torch.Tensor:
        return _ops.default_generator(index_of(device)).get_state()

    def set_rng_state(state: torch.Tensor, device: Any = None) -> None:
        _ops.default_generator(index_of(device)).set_state(state)

    def manual_seed(seed: int) -> None:
        _ops.default_generator(index_of()).manual_seed(int(seed))

    def manual_seed_all(seed: int) -> None:
        for index in range(_ops.num_devices()):
            _ops.default_generator(index).manual_seed(int(seed))

    def get_device_properties(device: Any = None) -> types.SimpleNamespace:
        total = _accelerator.get_memory_info(index_of(device))[1]
        uuid = f"{get_device_name(device)}, {describe(index_of(device))}"
        return types.SimpleNamespace(
            name=get_device_name(device),
            total_memory=total,
            uuid=uuid,
            multi_processor_count=1,
            clock_rate=flops_per_s(index_of(device)),
        )

    def can_device_access_peer(device: Any, peer: Any) -> bool:
        numbers = {index_of(device), index_of(peer)}
        return len(numbers) == 2 and all(map(has_peers, numbers))

    def get_device_name(device: Any = None) -> str:
        return f"simulated accelerator {index_of(device)}"

    # The runtime's functions, by the names that torch uses for CUDA and ROCm.
    cudart = types.SimpleNamespace(cudaHostRegister=_ops.host_register, cudaHostUnregister=_ops.host_unregister)

    module = types.ModuleType(f"torch.{name}", __doc__)
    functions = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "init": lambda: None,
        "_lazy_init": lambda: None,
        "_is_in_bad_fork": lambda: False,
        "device_count": _ops.num_devices,
        "current_device": _accelerator.current_device_index,
        "set_device": lambda device: _accelerator.set_device_index(index_of(device)),
        "device": device_of,
        "can_device_access_peer": can_device_access_peer,
        "get_device_name": get_device_name,
        "get_device_properties": get_device_properties,
        "synchronize": lambda device=None: _accelerator.synchronize(index_of(device)),
        "empty_cache": _accelerator.empty_cache,
        "ipc_collect": lambda: None,
        "cudart": lambda: cudart,
        "Stream": torch.Stream,
        "Event": torch.Event,
        "stream": lambda stream: stream,  # a torch.Stream is its own context manager
        "current_stream": lambda device=None: _accelerator.current_stream(index_of(device)),
        "set_stream": _accelerator.set_stream,
        "get_rng_state": get_rng_state,
        "set_rng_state": set_rng_state,
        "manual_seed": manual_seed,
        "manual_seed_all": manual_seed_all,
        "get_amp_supported_dtype": lambda: [torch.bfloat16, torch.float16],
        "is_bf16_supported": lambda including_emulation=True: True,
    }
    for per_device in (
        "memory_allocated",
        "max_memory_allocated",
        "memory_reserved",
        "max_memory_reserved",
        "memory_stats",
        "reset_peak_memory_stats",
    ):
        function = getattr(_accelerator, per_device)
        functions[per_device] = lambda device=None, function=function: function(index_of(device))
    # A function of `torch.cuda` and `torch.xpu`; `torch.accelerator` has only the flattened form.
    read_stats = torch._C._accelerator_getDeviceStats
    functions["memory_stats_as_nested_dict"] = lambda device=None: read_stats(index_of(device))
    functions["mem_get_info"] = lambda device=None: _accelerator.get_memory_info(index_of(device))
    for key, function in functions.items():
        setattr(module, key, function)
    return module
