"""The environment of a process with simulated GPUs that ComfyUI takes for an NPU's, with dynamic VRAM if asked for."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path

from highwater.headless.simdevice import default_build_directory
from highwater.tests.comfyui.fake_cuda.build import ensure_driver

__all__ = ["simulated_gpus"]

HERE = Path(__file__).parent


def simulated_gpus(
    total_bytes: Sequence[int],
    socket: Path | str,
    *,
    strict: bool = True,
    dynamic: str = "",
    aimdo: Path | str | None = None,
    import_from: Sequence[Path | str] = (),
    runtime: Path | None = None,
    slowed: float = 1,
) -> dict[str, str]:
    """Return the variables that the stand-in for ``torch_npu`` reads.

    Args:
        total_bytes: the size of each device.
        socket: where the process answers questions about its devices.
        strict: the devices defer copies and look for races.
        dynamic: the kind of `fake_cuda.start`: "core", "nvidia", or none.
        aimdo: the folder of another comfy-aimdo than the one that is installed.
        import_from: more folders from which to import.
        runtime: the folder through which processes share devices; None: one of its own beside the socket.
        slowed: by how much the devices' memory and links are slower than those of a `SimDeviceSpec`.
    """
    settings = {
        "simdevice": str(HERE.parents[1] / "headless" / "simdevice"),
        "build_directory": str(default_build_directory()),
        "total_bytes": list(total_bytes),
        "socket": str(socket),
        "strict": strict,
        "slowed": slowed,
    }
    if dynamic:
        start = HERE / "fake_cuda" / "start.py"
        settings["driver"] = {"start": str(start), "path": str(ensure_driver()), "kind": dynamic}
    runtime = runtime or Path(socket).parent / "run"
    runtime.mkdir(mode=0o700, exist_ok=True)
    folders = [HERE / "stand_in", *([] if aimdo is None else [aimdo]), *import_from]
    return {
        "PYTHONPATH": os.pathsep.join(map(str, folders)),
        "CUDA_VISIBLE_DEVICES": "",
        "XDG_RUNTIME_DIR": str(runtime),
        "HIGHWATER_TEST_SIMDEVICE": json.dumps(settings),
    }
