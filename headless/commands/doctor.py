"""Finds ComfyUI, running or not, and what it learned; has it examined."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...memory.errors import InvalidInput
from ...memory.manager.needs_file import FILE_NAME, cache_path
from ...nodes.doctor import examine_comfyui
from ...nodes.driver_gpus import DriverGpu, driver_gpus, find_nvml, from_listing

__all__ = ["examine", "find_comfyui", "find_needs_files"]


def examine(named: Path | None, environment: Mapping[str, str]) -> dict[str, Any]:
    """Look at everything; imports torch and may start ``nvidia-smi``.

    Args:
        named: ComfyUI's folder if the user named one.
        environment: the variables that decide.

    Raises:
        InvalidInput: the named folder is not ComfyUI's.
    """
    root = find_comfyui(named, environment)
    flags = running_flags(root) if root is not None else None
    return examine_comfyui(root, flags=flags, environment=environment, drivers=list_drivers())


def find_comfyui(named: Path | None, environment: Mapping[str, str]) -> Path | None:
    """Return ComfyUI's folder: the named one, $COMFYUI_DIR, the one that this pack lies in, or ``~/comfy/ComfyUI``.

    Raises:
        InvalidInput: the folder that the user named is not ComfyUI's.
    """
    if named is None and environment.get("COMFYUI_DIR"):
        named, source = Path(environment["COMFYUI_DIR"]), "COMFYUI_DIR"
    else:
        source = "--comfyui"
    if named is not None:
        if not is_comfyui(named):
            raise InvalidInput(f"{source} {str(named)!r}: no ComfyUI found there; expected a folder with main.py")
        return named.resolve()
    pack = Path(__file__).absolute().parents[2]  # not resolved: custom_nodes may hold a link
    candidates = (pack.parents[1], Path.home() / "comfy" / "ComfyUI")
    return next((folder for folder in candidates if is_comfyui(folder)), None)


def is_comfyui(folder: Path) -> bool:
    return (folder / "main.py").is_file() and (folder / "comfy").is_dir() and (folder / "execution.py").is_file()


def find_needs_files(named: Path | None, comfyui: Path | None, environment: Mapping[str, str]) -> list[Path]:
    """Return the files that may hold needs: the named one, else the user's and that of ComfyUI in its usual folder.

    Raises:
        InvalidInput: there is no ComfyUI where the user says.
    """
    if named is not None:
        return [named]
    host = find_comfyui(comfyui, environment)
    found = [cache_path(), host / "user" / "__highwater" / FILE_NAME if host is not None else None]
    return [path for path in found if path is not None]


def running_flags(root: Path) -> list[str] | None:
    """Return the arguments that this ComfyUI runs with now, or None if it does not."""
    import psutil

    for process in psutil.process_iter(["cmdline", "cwd"]):
        # What belongs to others shows neither.
        arguments, folder = process.info["cmdline"] or [], process.info["cwd"] or "/"
        for index, argument in enumerate(arguments[1:], start=1):
            if Path(argument).name == "main.py" and Path(folder, argument).resolve() == root.resolve() / "main.py":
                return list(arguments[index + 1 :])
    return None


def list_drivers() -> tuple[DriverGpu, ...]:
    """Return the GPUs that drivers have, hidden or not; asks ``nvidia-smi`` where nothing else tells of NVIDIA's."""
    found = driver_gpus(nvml=find_nvml())
    tool = shutil.which("nvidia-smi")
    if tool is None or any(gpu.vendor == "nvidia" for gpu in found):
        return found
    try:
        listed = subprocess.run([tool, "-L"], capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return found
    return (*from_listing(listed.stdout), *found)
