"""Starts a host process that runs cells (`sweep`), and reads what it says. Knows nothing of pytest."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from highwater.headless.simdevice import default_build_directory
from highwater.tests.comfyui.host_process import HERE, REPOSITORY, HostFiles, bytecode_directory

__all__ = ["run_cells"]

DEVICE_BYTES = 1844 << 20


def run_cells(files: HostFiles, names: Sequence[str], modes: Sequence[str]) -> Iterator[tuple[str, str, str]]:
    """Yield name, mode and cell of each as it is done, in one process of an unmodified ComfyUI.

    Raises:
        RuntimeError: the process ended before all were done; with the end of what it wrote.
    """
    with tempfile.TemporaryDirectory(prefix="highwater-sweep-") as folder:
        Path(folder, "highwater").symlink_to(REPOSITORY)
        settings = {
            "simdevice": str(REPOSITORY / "headless" / "simdevice"),
            "build_directory": str(default_build_directory()),
            "total_bytes": [DEVICE_BYTES, DEVICE_BYTES],
            "socket": f"{folder}/books",
            "strict": True,
        }
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(HERE / "stand_in"), folder]),
            "PYTHONPYCACHEPREFIX": str(bytecode_directory()),
            "CUDA_VISIBLE_DEVICES": "",
            "OMP_NUM_THREADS": "1",
            "HIGHWATER_TEST_SIMDEVICE": json.dumps(settings),
        }
        environment.pop("PYTHONDONTWRITEBYTECODE", None)
        command = [str(files.python), "-m", "highwater.tests.comfyui.sweep", *names, "--modes", *modes]
        with open(f"{folder}/log.txt", "w+") as log:
            process = subprocess.Popen(
                command, cwd=files.directory, env=environment, stdout=subprocess.PIPE, stderr=log, text=True
            )
            num_done = 0
            try:
                assert process.stdout is not None
                for line in process.stdout:
                    said = json.loads(line)
                    num_done += 1
                    yield said["name"], said["mode"], said["cell"]
            finally:
                process.kill() if num_done < len(names) * len(modes) else None
                process.wait()
            if num_done < len(names) * len(modes):
                log.seek(0)
                raise RuntimeError(f"the host ended with {process.returncode}:\n{log.read()[-4000:]}")
