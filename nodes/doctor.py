"""Checks whether the pack works and what prevents it: looks at ComfyUI's files and at devices; changes nothing.

Every check takes what it looks at and returns `Finding`s, so that it can be tried without a ComfyUI.
"""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Any

from ..memory.units import format_bytes
from .driver_gpus import DriverGpu, read_text
from .dynamic_needs import METHODS, what_is_lost
from .findings import Finding, flag_value
from .visible_devices import Sight, explain_sight, read_sight

__all__ = ["REQUIRED_COMFYUI", "Finding", "examine_comfyui"]

# As ``requires-comfyui`` in pyproject.toml, which is not installed with the package.
REQUIRED_COMFYUI = (0, 33, 0)
# Without any of these core uses dynamic VRAM on NVIDIA devices.
STATIC_FLAGS = ("--disable-dynamic-vram", "--highvram", "--gpu-only", "--novram", "--cpu")
# What each feature needs of the host: a file, and a name in it.
PROVIDERS = ("comfy_execution/cache_provider.py", "register_cache_provider")
HANDLERS = ("comfy_execution/progress.py", "add_progress_handler")
FEATURE_NEEDS = {
    "nodes": (("comfy_api/latest/__init__.py", "ComfyExtension"),),
    "managed_models": (("comfy/model_patcher.py", "cached_patcher_init"),),
    "run_boundaries": (PROVIDERS,),
    "node_boundaries": (PROVIDERS, HANDLERS),
    "events": (PROVIDERS,),
    "forecast": (PROVIDERS, ("execution.py", "get_current_queue_volatile")),
    "free": (("server.py", '"/free"'),),
    "second_try": (("comfy/patcher_extension.py", "DIFFUSION_MODEL"),),
}
# What does not work without a feature.
WITHOUT_FEATURE = {
    "nodes": "ComfyUI does not list Highwater's nodes",
    "managed_models": "models cannot be moved by blocks",
    "run_boundaries": "no numbers by run, and the watermark is kept only when a model is loaded, not between prompts",
    "node_boundaries": "no numbers by node, and evictions do not know the rest of the running prompt",
    "events": "the page hears of evictions only with the next report",
    "forecast": "evictions do not know the waiting prompts: the least recently used model leaves first",
    "free": "weights that Highwater keeps in RAM stay there after ComfyUI's /free, until RAM is short",
    "second_try": "a step that runs out of memory is not repeated",
}
# Packs that decide over memory too, and what they do; by folder name, in lower case with dashes.
CONFLICTING_PACKS = {
    "comfyui-multigpu": "replaces ComfyUI's load_models_gpu, get_torch_device, soft_empty_cache and partially_load",
    "comfyui-reservedvram": "replaces the amount of memory that ComfyUI keeps free on every device",
    "comfyui-wanblockswap": "swaps the blocks of a model by itself",
    "comfyui-wanvideowrapper": "loads its models by itself: neither ComfyUI nor Highwater can evict them",
    "comfyui-seedvr2-videoupscaler": "loads its models by itself: neither ComfyUI nor Highwater can evict them",
    "raylight": "loads models in worker processes: neither ComfyUI nor Highwater can evict them",
    "comfyui-distorchmemorymanager": "purges the caches of other packs between nodes",
    "comfyui-vram-manager": "purges the caches of other packs between nodes",
    "comfyui-memory-cleanup": "unloads all models, those that ComfyUI would keep too",
    "comfyui-unload-model": "unloads all models, those that ComfyUI would keep too",
}
MMGP = "moves its models with mmgp: neither ComfyUI nor Highwater can evict them"
OUR_NAME = re.compile(r"""^name\s*=\s*["']highwater(-memory)?["']""", re.MULTILINE)


def examine_comfyui(
    root: Path | None,
    *,
    flags: Sequence[str] | None,
    environment: Mapping[str, str],
    drivers: Sequence[DriverGpu],
    features: Mapping[str, bool | str] | None = None,
    is_dynamic: bool | None = None,
) -> dict[str, Any]:
    """Look at everything; imports torch.

    Args:
        root: ComfyUI's folder, if there is one.
        flags: what it was started with; None: it does not run.
        environment: the variables that decide which devices torch sees.
        drivers: the GPUs that drivers have, hidden or not.
        features: what is in effect in the host that asks; read off its files otherwise.
        is_dynamic: whether that host has turned dynamic VRAM on; None: no host asks.
    """
    findings: list[Finding] = []
    if root is None:
        features = dict.fromkeys(FEATURE_NEEDS, "missing: ComfyUI was not found")
        findings.append(
            Finding(
                check="ComfyUI",
                text="not found; the command line and Python programs work without it",
                is_warning=True,
                remedy="name its folder with --comfyui DIR or in the variable COMFYUI_DIR",
            )
        )
    else:
        features = {**check_features(root), **(features or {})}
        custom_nodes = Path(flag_value(flags, "--base-directory") or root) / "custom_nodes"
        findings += [
            *check_host(root, flags),
            *check_pack(custom_nodes, flags),
            *check_dynamic_vram(root, flags, is_dynamic),
            *check_packs(custom_nodes),
        ]
    sight = read_sight(drivers=drivers, environment=environment, flags=flags, root=root)
    findings += [*check_torch(root), *check_devices(sight)]
    findings += [*check_sharing(), *check_pinning(), check_return(), check_compiler(environment)]
    findings += [
        Finding(check="features", text=f"{name}: {state}; {WITHOUT_FEATURE[name]}", is_warning=True)
        for name, state in features.items()
        if root is not None and state is not True
    ]
    if features["run_boundaries"] is True:
        text = "run boundaries: from the first run with a Highwater node on, ComfyUI hashes all nodes of each run"
        findings.append(Finding(check="features", text=text))
    return {
        "comfyui": str(root) if root else None,
        "findings": [asdict(finding) for finding in findings],
        "features": dict(features),
        "num_warnings": sum(finding.is_warning for finding in findings),
    }


# -- ComfyUI


def check_host(root: Path, flags: Sequence[str] | None) -> list[Finding]:
    """Compare the host's version with the one that the nodes need."""
    version = version_of(root)
    text = f"{version or 'unknown version'} at {root}, "
    text += "not running" if flags is None else f"running with {' '.join(flags) or 'no flags'}"
    numbers = tuple(int(number) for number in re.findall(r"\d+", version)[:3])
    if not numbers or numbers >= REQUIRED_COMFYUI:
        return [Finding(check="ComfyUI", text=text)]
    needed = ".".join(map(str, REQUIRED_COMFYUI))
    return [Finding(check="ComfyUI", text=text, is_warning=True, remedy=f"update it: {needed} or newer is supported")]


def version_of(root: Path) -> str:
    """Return the version that ComfyUI's files name, or nothing."""
    for name in ("comfyui_version.py", "pyproject.toml"):
        found = re.search(r"""^(?:__version__|version)\s*=\s*["']([^"']+)""", read_text(root / name), re.MULTILINE)
        if found:
            return found[1]
    return ""


def check_features(root: Path) -> dict[str, bool | str]:
    """Return for every feature True if the host's files have what it needs, else what is missing."""
    states: dict[str, bool | str] = {}
    for feature, needs in FEATURE_NEEDS.items():
        lacking = [f"{file} has no {name}" for file, name in needs if name not in read_text(root / file)]
        states[feature] = f"missing: {lacking[0]}" if lacking else True
    return states


def check_pack(custom_nodes: Path, flags: Sequence[str] | None = None) -> list[Finding]:
    """Say where the host finds this pack, if it does."""
    if "--disable-all-custom-nodes" in (flags or ()):
        text, remedy = "not loaded: --disable-all-custom-nodes", "start ComfyUI without it"
        return [Finding(check="pack", text=text, is_warning=True, remedy=remedy)]
    places = [pack for pack in list_packs(custom_nodes) if OUR_NAME.search(read_text(pack / "pyproject.toml"))]
    if len(places) == 1:
        return [Finding(check="pack", text=f"installed as {places[0]}")]
    if places:
        text, remedy = f"installed {len(places)} times: {', '.join(map(str, places))}", "keep one of them"
    else:
        text, remedy = "not in custom_nodes: ComfyUI does not load it", "link or clone it there"
    return [Finding(check="pack", text=text, is_warning=True, remedy=remedy)]


def check_packs(custom_nodes: Path) -> list[Finding]:
    """Name other packs that manage memory; a disabled pack (``.disabled``) is ignored."""
    findings = []
    for pack in list_packs(custom_nodes):
        name = re.sub(r"-(main|master)$", "", pack.name.lower().replace("_", "-"))
        does = CONFLICTING_PACKS.get(name)
        if does is None and re.search(r"^mmgp\b", read_text(pack / "requirements.txt"), re.MULTILINE):
            does = MMGP
        if does is not None:
            remedy = "do not use its nodes and Highwater's in one workflow"
            findings.append(Finding(check="other packs", text=f"{pack.name} {does}", is_warning=True, remedy=remedy))
    return findings


def list_packs(custom_nodes: Path) -> list[Path]:
    """Return the folders that the host imports."""
    packs = sorted(custom_nodes.iterdir()) if custom_nodes.is_dir() else []
    return [
        pack for pack in packs if pack.is_dir() and not pack.name.endswith(".disabled") and pack.name[0] not in "._"
    ]


def check_dynamic_vram(root: Path, flags: Sequence[str] | None, is_dynamic: bool | None = None) -> list[Finding]:
    """Say whether models can be dynamic, and what this version of comfy-aimdo cannot do for them."""
    version = installed_version("comfy-aimdo", root)
    if version is None:
        return [Finding(check="dynamic VRAM", text="off: comfy-aimdo is not installed")]
    off = [flag for flag in flags or () if flag in STATIC_FLAGS]
    if off:
        return [Finding(check="dynamic VRAM", text=f"off: {', '.join(off)} (comfy-aimdo {version})")]
    if is_dynamic is False:
        text = f"off: ComfyUI turns it on for NVIDIA GPUs with torch 2.8 or newer (comfy-aimdo {version})"
        return [Finding(check="dynamic VRAM", text=text)]
    unknown = "" if flags is not None else f", unless started with {', '.join(STATIC_FLAGS)}"
    where = "" if is_dynamic else f" for NVIDIA GPUs{unknown}"
    text = f"on{where} (comfy-aimdo {version}); engine auto uses it where it can do what is asked"
    return [
        Finding(check="dynamic VRAM", text=text),
        *(
            Finding(check="dynamic VRAM", text=line, is_warning=True, remedy="update ComfyUI and its requirements")
            for line in lost_of(f"comfy-aimdo {version}", root)
        ),
    ]


def lost_of(version: str, root: Path) -> list[str]:
    """Return what a version of comfy-aimdo cannot do, by the names in its files; nothing where it is not found."""
    found = (folder / "comfy_aimdo" for folder in site_packages(root))
    package = next((folder for folder in found if (folder / "model_vbar.py").is_file()), None)
    if package is None:
        return []
    vbar, control = ((package / name).read_text(errors="replace") for name in ("model_vbar.py", "control.py"))
    methods = {name for name in METHODS if f"def {name}(" in vbar}
    return what_is_lost(version, methods=methods, sets_headroom="simple_vram_headroom" in control)


def installed_version(name: str, root: Path | None) -> str | None:
    """Return a distribution's version in ComfyUI's own Python if it has one, else in this one."""
    folders = [str(folder) for folder in site_packages(root)] if root else []
    found = metadata.distributions(name=name, **({"path": folders} if folders else {}))
    return next((distribution.version for distribution in found), None)


def site_packages(root: Path) -> list[Path]:
    """Return where the Python that lies in or beside ComfyUI's folder keeps its packages."""
    pythons = [
        folder / name
        for folder in (root, root.parent)
        for name in ("venv", ".venv", "python_embeded", "python_embedded")
    ]
    patterns = ("lib/python3*/site-packages", "Lib/site-packages")
    return [found for python in pythons for pattern in patterns for found in python.glob(pattern)]


# -- the machine


def check_torch(root: Path | None) -> list[Finding]:
    """Name the torch of this Python, and ComfyUI's if that is another."""
    import torch

    text = f"{torch.__version__} in this Python"
    theirs = installed_version("torch", root)
    if theirs is not None and theirs != torch.__version__:
        text += f", {theirs} in ComfyUI's"
    return [Finding(check="torch", text=text)]


def check_devices(sight: Sight) -> list[Finding]:
    """List what torch sees, and what hides or renumbers the rest."""
    from ..memory.transfer.devices import list_devices

    shown = ", ".join(f"{device.name} {format_bytes(device.total_bytes())}" for device in list_devices())
    return [Finding(check="devices", text=shown), *explain_sight(sight)]


def check_sharing() -> list[Finding]:
    """Say which other processes with this pack are seen on each device, or why none can be."""
    from ..memory.manager.default import shared_folder
    from ..memory.manager.sharing_check import describe_sharing
    from ..memory.transfer.devices import list_devices

    return [Finding(check="sharing", **asdict(state)) for state in describe_sharing(list_devices(), shared_folder())]


def check_pinning() -> list[Finding]:
    """Say how much RAM can be pinned, and try to pin some if there is an accelerator."""
    import torch

    from ..memory.transfer.devices import HostMemory
    from ..memory.transfer.pinned_memory import pin_limit_bytes

    memory = HostMemory.now()
    limit_bytes = format_bytes(pin_limit_bytes(memory))
    text = f"up to {limit_bytes} of {format_bytes(memory.total_bytes)} RAM can be page-locked (pinned) now"
    limit = locked_limit()
    if limit is not None:
        text += f"; ulimit -l is {format_bytes(limit)}"
    findings = [Finding(check="pinning", text=text)]
    if torch.accelerator.is_available():
        try:
            torch.empty(1, pin_memory=True)
        except RuntimeError as error:
            reason = str(error).splitlines()[0]
            remedy = "raise ulimit -l or the container's limit; without pinned memory each copy blocks the CPU"
            findings.append(Finding(check="pinning", text=f"failed: {reason}", is_warning=True, remedy=remedy))
    return findings


def check_return() -> Finding:
    """Say which memory goes back to the system when models are released."""
    from ..memory.transfer.host_heap import describe_return

    return Finding(check="release", text=describe_return())


def locked_limit() -> int | None:
    """Return ``ulimit -l`` in bytes, or None where there is no limit or no such thing."""
    if sys.platform == "win32":
        return None
    import resource

    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    return None if limit == resource.RLIM_INFINITY else limit


def check_compiler(environment: Mapping[str, str]) -> Finding:
    """Say whether there is a C++ compiler: torch.compile and the simulated devices need one."""
    names = [environment["CXX"].split()[0]] if environment.get("CXX", "").strip() else ["c++", "g++", "clang++", "cl"]
    found = next(filter(None, map(shutil.which, names)), None)
    if found is not None:
        return Finding(check="compiler", text=found)
    remedy = "install g++ or clang++, or name a compiler in the variable CXX"
    return Finding(
        check="compiler",
        text="none found: torch.compile and simulated devices do not work",
        is_warning=True,
        remedy=remedy,
    )
