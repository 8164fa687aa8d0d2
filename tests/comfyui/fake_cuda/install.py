"""Installs another comfy-aimdo beside the one that ComfyUI requires, for the tests of dynamic VRAM to run with.

python -m highwater.tests.comfyui.fake_cuda.install [VERSION|newest]

Prints the folder, so that this tries the newest:

COMFY_AIMDO_DIR=$(python -m highwater.tests.comfyui.fake_cuda.install newest) pytest tests/comfyui -m comfyui_dynamic
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from highwater.memory.user_folders import cache_folder

__all__ = ["AIMDO_VARIABLE", "NO_OTHER_AIMDO", "PINNED", "find_other_aimdo"]

PINNED = "0.6.0"
AIMDO_VARIABLE = "COMFY_AIMDO_DIR"
NO_OTHER_AIMDO = (
    f"NOT TESTED: no comfy-aimdo {PINNED} beside ComfyUI's own; "
    "python -m highwater.tests.comfyui.fake_cuda.install brings it"
)


def folder_of(version: str) -> Path:
    return Path(cache_folder(), "comfy-aimdo", version)


def find_other_aimdo() -> Path | None:
    """Return the folder that COMFY_AIMDO_DIR names, else that of the pinned version; None where there is none."""
    folder = Path(os.environ.get(AIMDO_VARIABLE) or folder_of(PINNED))
    return folder if (folder / "comfy_aimdo").is_dir() else None


def install(version: str) -> Path:
    """Have pip put a version into the cache, alone, if it is not there; "newest" is what the index has today."""
    folder = folder_of(version)
    if version != "newest" and (folder / "comfy_aimdo").is_dir():
        return folder
    package = "comfy-aimdo" if version == "newest" else f"comfy-aimdo=={version}"
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--upgrade", "--no-deps", "--only-binary", ":all:"]
    subprocess.run([*pip, "--target", str(folder), package], check=True, stdout=sys.stderr)
    return folder


if __name__ == "__main__":
    print(install(sys.argv[1] if sys.argv[1:] else PINNED))
