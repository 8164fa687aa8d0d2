"""Plans of model files and pipeline folders, from their headers alone: nothing is loaded and nothing moves."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from ..memory.errors import InvalidInput
from ..memory.manager.module_plans import with_file
from ..memory.model_loading import load_model
from ..memory.options.placement import WORD, names_device, parse_placement
from ..memory.options.precision import PrecisionRequest, parse_precision
from ..memory.options.profile import SETTINGS, parse_profile
from ..memory.planner.plan import Machine, Plan
from ..memory.planner.request import PlanRequest, plan_request
from ..memory.weights.component import Component, component_from_files, guess_kind
from ..memory.weights.gguf_header import component_from_gguf, is_gguf
from ..memory.weights.known_forms import FORMS
from ..memory.weights.module_component import component_from_module
from ..memory.weights.safetensors_header import read_header
from ..memory.weights.source import WeightsSource

__all__ = [
    "describe_checkpoint",
    "describe_files",
    "describe_part",
    "describe_pipeline",
    "describer_of",
    "plan_files",
    "plan_pipeline",
    "read_precisions",
]

# What no name in a placement or a profile holds.
NO_NAME = re.compile(r"[^\w.\-]")
# Halves of characters that stand for no byte.
OTHER_HALF = re.compile("[\ud800-\udc7f\udd00-\udfff]")
# What a checkpoint's loader makes of it: each part's kind, and what its weights' names begin with.
CHECKPOINT_PARTS = {
    "model": ("diffusion", ("model.diffusion_model.",)),
    "clip": ("text", ("cond_stage_model.", "conditioner.", "text_encoders.")),
    "vae": ("vae", ("first_stage_model.", "vae.")),
}


def plan_files(
    paths: Sequence[Path],
    machine: Machine,
    *,
    profile: str,
    placement: str,
    precision: str | PrecisionRequest,
    is_hosted: bool = False,
) -> Plan:
    """Plan single-file models as if one workflow used them all; precision None is what the profile says.

    Args:
        is_hosted: for loaders of ComfyUI, which uses files only as stored.

    Raises:
        InvalidInput, DoesNotFit: as `plan_request`, and for a bad header.
    """
    names = [component_name(path) for path in paths]
    if len(set(names)) < len(names):
        raise InvalidInput(f"two files are named {max(names, key=names.count)!r}; plan them one at a time")
    parts = []
    for path, name in zip(paths, names, strict=True):
        if is_gguf(path):
            found = [component_from_gguf(path, name=name, kind=guess_kind(name))]
        else:
            found = describe_checkpoint(path, name) or [describe([path], name)]
        if not any(part.weight_bytes for part in found):
            raise InvalidInput(f"{path}: holds no weights, so there is nothing to plan")
        parts += [replace(part, stays_as_stored=is_hosted) for part in found]
    return plan_parts(parts, machine, profile=profile, placement=placement, precision=precision)


def component_name(path: Path) -> str:
    """Return what a file's model is called in a plan: its own name, as far as placements and profiles can write it."""
    # Where the system's encoding is not UTF-8, Python keeps the bytes of other letters as halves of characters.
    stem = OTHER_HALF.sub("_", path.stem).encode("utf-8", "surrogateescape").decode("utf-8", "replace")
    name = NO_NAME.sub("_", stem)
    is_free = WORD.fullmatch(name) is not None and not names_device(name) and name not in (*SETTINGS, "unlimited")
    return name if is_free else f"_{name}"


def plan_pipeline(
    folder: Path, machine: Machine, *, profile: str, placement: str, precision: str | PrecisionRequest
) -> Plan:
    """Plan the components of a pipeline folder, as `plan_files` does for files."""
    parts = describe_pipeline(folder)
    return plan_parts(parts, machine, profile=profile, placement=placement, precision=precision)


def describe_pipeline(folder: Path) -> list[Component]:
    """Return the components of a pipeline folder as they will be loaded, from its configs and headers.

    Imports diffusers. Raises `InvalidInput` as `load_pipeline`.
    """
    return describer_of(folder)(None, False)


def describer_of(folder: Path) -> Callable[[int | None, bool], list[Component]]:
    """Return what describes a pipeline folder in blocks of so many bytes at most, as `plan_in_blocks` asks for them."""
    from torch import nn

    from .pipelines.diffusers_pipelines import find_sources, load_pipeline

    pipe = load_pipeline(folder, without_weights=True)
    sources = find_sources(pipe, folder)

    def describe_parts(largest_bytes: int | None, cuts_whole: bool) -> list[Component]:
        found = []
        for name, module in pipe.components.items():
            if not isinstance(module, nn.Module):
                continue
            described = component_from_module(module, name=name, largest_bytes=largest_bytes, cuts_whole=cuts_whole)
            if name in sources:
                sources[name].alias_tied(described)
                described = with_file(described, sources[name], is_trusted=True)
            else:  # of quantized files
                described = describe(sorted((folder / name).glob("*.safetensors")), name)
            found.append(described)
        return found

    return describe_parts


def describe_files(paths: Sequence[Path]) -> Component:
    """Return the files of one model as a component. Raises `InvalidInput` for a bad header, or one of no weights."""
    found = describe(paths, "+".join(path.stem for path in paths))
    if not found.weight_bytes:
        raise InvalidInput(f"{paths[0]}: holds no weights, so there is nothing to plan")
    return found


def describe_part(path: Path, part: str) -> Component | None:
    """Return a part of a checkpoint, ``model``, ``clip`` or ``vae``; None where it has no such part."""
    if part not in CHECKPOINT_PARTS:
        return None
    kind, begins = CHECKPOINT_PARTS[part]
    found = component_from_files([path], name=f"{path.stem}/{part}", kind=kind, begins=begins)
    return found if found.weight_bytes else None


def plan_parts(
    parts: Sequence[Component], machine: Machine, *, profile: str, placement: str, precision: str | PrecisionRequest
) -> Plan:
    devices = [device.name for device in machine.devices]
    names = [part.name for part in parts]
    return plan_request(
        PlanRequest(
            components=tuple(parts),
            machine=machine,
            placement=parse_placement(placement, devices=devices, components=names),
            profile=parse_profile(profile, devices=devices, components=names),
            precision=read_precisions(precision, names),
        )
    )


def read_precisions(precision: str | PrecisionRequest, components: Sequence[str]) -> PrecisionRequest:
    """Return what a text names, or what was read before."""
    return parse_precision(precision, forms=FORMS, components=components) if isinstance(precision, str) else precision


def describe_checkpoint(path: Path, name: str) -> list[Component]:
    """Return the parts of a checkpoint, called ``name.model`` and so on; none for a file of one model alone."""
    weights = [tensor.name for tensor in read_header(path).tensors]
    has = {part: any(weight.startswith(begins) for weight in weights) for part, (_, begins) in CHECKPOINT_PARTS.items()}
    return [
        component_from_files([path], name=f"{name}.{part}", kind=kind, begins=begins)
        for part, (kind, begins) in CHECKPOINT_PARTS.items()
        if has["model"] and has[part]
    ]


def describe(paths: Sequence[Path], name: str) -> Component:
    """Return a model in numbers: as a module where a config beside the files names its class, else from the headers.

    A class declares which of its parts are one piece and which weights stay as stored. Building its module
    without memory imports its library.
    """
    header = component_from_files(paths, name=name)
    if not (paths[0].parent / "config.json").is_file():
        return header
    try:
        module = load_model(list(paths), ignore_unexpected=True)
    except InvalidInput:  # another model's config, or names that its library translates: the plan says what is missing
        return header
    described = component_from_module(module, name=name, kind=header.kind)
    source = WeightsSource(list(paths))
    source.find_encoded()
    source.note_bare(weight for weight, _ in module.named_parameters(remove_duplicate=False))
    encoded_as = source.encoded_as(described)
    return replace(described, has_file=True, can_map=header.can_map, encoded_as=encoded_as)
