"""Answers questions outside of a workflow: profiles, devices, a plan, and whether the pack works.

The command line prints these answers, and the host's server sends them (`routes.py`).
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..memory.options.placement import AUTO
from ..memory.options.precision import BY_PROFILE
from .doctor import examine_comfyui
from .driver_gpus import driver_gpus, find_nvml
from .visible_devices import HIDING_VARIABLES, Sight, explain_sight, read_sight

if TYPE_CHECKING:
    from ..memory import MemoryManager

__all__ = [
    "describe_devices",
    "describe_profiles",
    "examine_host",
    "findings_text",
    "host_root",
    "make_tiny_pipelines",
    "plan_models",
    "sight_of_host",
    "start_environment",
]

# A plan asked for by an address: what it may say beside the models, and what holds without.
PLAN_WORDS = {"profile": AUTO, "placement": AUTO, "precision": BY_PROFILE}


def describe_profiles() -> dict[str, Any]:
    """Return the profiles with every value."""
    from ..memory.options.profile import PROFILES

    return {"profiles": [profile.to_json() for profile in PROFILES.values()]}


def describe_devices(
    manager: MemoryManager, environment: Mapping[str, str], *, is_host: bool = False
) -> dict[str, Any]:
    """Return the devices with total and free bytes, the peers of each, and what hides or renumbers devices.

    Args:
        environment: the variables that decide.
        is_host: whether this process is a ComfyUI, whose flags decide, too.
    """
    from ..memory.transfer.devices import find_device, peers_of

    reports = manager.device_reports()
    if is_host:
        sight = sight_of_host(environment)
    else:
        sight = read_sight(drivers=driver_gpus(nvml=find_nvml()), environment=environment)
    return {
        "devices": [asdict(report) | {"peers": peers_of(find_device(report.name))} for report in reports],
        "hidden_by": {name: environment[name] for name in HIDING_VARIABLES if name in environment},
        "findings": [asdict(finding) for finding in explain_sight(sight)],
    }


def plan_models(manager: MemoryManager, asked: Iterable[tuple[str, str]]) -> dict[str, Any]:
    """Plan models of the host's folders, as if one workflow used them all.

    Args:
        asked: names and values: ``file`` is a model's folder and name, such as ``vae/ae.safetensors``, ``pipeline`` a
            folder below ``diffusers``, either of them any number of times; ``profile``, ``placement``, ``precision``.

    Raises:
        InvalidInput, DoesNotFit: as the nodes that load; also for a word that is none of these.
    """
    from ..memory.errors import InvalidInput, allowed_values
    from .pipelines.pipeline_folders import find_pipeline
    from .plan_table import plan_text
    from .plans import plan_files, plan_pipeline

    words, files, pipelines = dict(PLAN_WORDS), [], []
    for name, value in asked:
        if name == "file":
            files.append(find_model(value))
        elif name == "pipeline":
            pipelines.append(value)
        elif name in words:
            words[name] = value
        else:
            raise InvalidInput(f"{name}={value!r}: {allowed_values(name, ['file', 'pipeline', *words])}")
    if not files and not pipelines:
        raise InvalidInput("no model to plan; add ?file=diffusion_models/name.safetensors or ?pipeline=name")
    machine = manager.machine()
    plans = {"files": plan_files(files, machine, is_hosted=True, **words)} if files else {}
    plans |= {name: plan_pipeline(find_pipeline(name), machine, **words) for name in pipelines}
    texts = {name: plan_text({name: plan}, None, machine) for name, plan in plans.items()}
    text = "\n\n".join(text if len(texts) == 1 else f"{name}\n\n{text}" for name, text in texts.items())
    return {"plans": {name: plan.to_json() for name, plan in plans.items()}, "text": text}


def find_model(named: str) -> Path:
    """Return the path of ``folder/name``. Raises `InvalidInput` where the host has no such file for our loaders."""
    from ..memory.errors import InvalidInput, allowed_values
    from .comfy_models.model_files import KINDS, SAFETENSORS, find_model_file

    folder, slash, name = named.partition("/")
    if not slash or not name.endswith(SAFETENSORS):
        raise InvalidInput(
            f"file={named!r} cannot be planned; allowed: folder/name.safetensors, such as vae/ae.safetensors"
        )
    if folder not in KINDS:  # the host lists others, such as custom_nodes, file by file
        raise InvalidInput(f"file={named!r}: {folder!r} is not a model folder; {allowed_values(folder, KINDS)}")
    return Path(find_model_file(folder, name))


def make_tiny_pipelines() -> dict[str, Any]:
    """Make the missing tiny pipelines in the host's folder of pipelines: about 10 s, 60 MB.

    Returns where each is below the host's folder of models.

    Raises:
        InvalidInput: the folder cannot be written, or the libraries that make them do not work.
    """
    import folder_paths

    from ..memory.errors import InvalidInput, reason_of
    from .pipelines.tiny_pipelines import ensure_pipelines

    try:
        folders = ensure_pipelines(folder_paths.get_folder_paths("diffusers")[0])
    except (InvalidInput, MemoryError):
        raise
    except Exception as error:  # diffusers imports its parts when they are used: any of them may be broken
        raise InvalidInput(f"the tiny pipelines cannot be made: {reason_of(error)}") from error
    return {"pipelines": {name: f"diffusers/{folder.name}" for name, folder in folders.items()}}


def start_environment() -> dict[str, str]:
    """Return the variables that this process was started with.

    Python's own copy of them does not tell what the user set: ComfyUI writes there what ``--cuda-device`` chooses.
    """
    import psutil

    return psutil.Process().environ()


def sight_of_host(environment: Mapping[str, str] | None = None) -> Sight:
    """Return what this process, a ComfyUI, sees of the GPUs that drivers have. Allocates no device memory."""
    return read_sight(
        drivers=driver_gpus(nvml=find_nvml()),
        environment=start_environment() if environment is None else environment,
        flags=sys.argv[1:],
        root=host_root(),
    )


def host_root() -> Path:
    """Return the folder of the ComfyUI that this process is."""
    import folder_paths

    return Path(folder_paths.__file__).parent  # --base-directory moves `base_path`


def examine_host(features: Mapping[str, bool | str]) -> dict[str, Any]:
    """Examine this process, a ComfyUI; `highwater doctor` does the same from outside."""
    return examine_comfyui(
        host_root(),
        flags=sys.argv[1:],
        environment=start_environment(),
        drivers=driver_gpus(nvml=find_nvml()),
        features=features,
        is_dynamic=getattr(sys.modules.get("comfy.memory_management"), "aimdo_enabled", None),
    )


def findings_text(found: Mapping[str, Any]) -> str:
    """Return what `examine_host` found as text: warnings with their remedies first, then the rest."""
    findings = sorted(found["findings"], key=lambda finding: not finding["is_warning"])
    lines = [f"Highwater: {found['num_warnings'] or 'no'} warning{'s' if found['num_warnings'] != 1 else ''}", ""]
    for finding in findings:
        lines.append(f"{'WARNING' if finding['is_warning'] else 'ok':<8}{finding['check']}: {finding['text']}")
        if finding["remedy"]:
            lines.append(f"{'':<8}what to do: {finding['remedy']}")
    return "\n".join([*lines, ""])
