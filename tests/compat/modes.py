"""One pipeline in every mode of management, each compared with the same pipeline unmanaged on the same device.

Knows nothing of pytest: ``scripts/compatibility`` makes the table in ``docs/compatibility.md`` with it, too. All
randomness is seeded before each run; the devices are simulated, so equal means equal to the bit.
"""

from __future__ import annotations

import copy
import functools
import gc
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from highwater import BudgetItem, Managed, MemoryManager, OffloadProfile, manage
from highwater.headless import simdevice
from highwater.memory.errors import DoesNotFit, InvalidInput, UnsafeState
from highwater.memory.planner.plan import ComponentPlan
from highwater.memory.planner.sizes import block_bytes, least_bytes
from highwater.memory.weights.cast_form import find_scale
from highwater.memory.weights.component import Component
from highwater.memory.weights.fp8 import decode_fp8_into, encode_fp8

__all__ = ["MODES", "Outputs", "Recipe", "run_modes"]

Outputs = dict[str, torch.Tensor]
MIB = 1 << 20
DEVICE_BYTES = 512 * MIB
SPLIT = "gpu:0&gpu:1"
EQUAL = "equal"


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """A tiny pipeline: how it is built, what of it is called, and what it does not have.

    Args:
        build: returns the pipeline, on the CPU; called under a seed.
        call: runs it and returns what came out; the pipeline says where its inputs belong.
        lora_targets: the last names of the layers of the diffusion model that take a LoRA; none: it takes none.
        guides: the names of its ControlNets.
    """

    name: str
    build: Callable[[], Any]
    call: Callable[[Any], Any]
    lora_targets: tuple[str, ...] = ()
    guides: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Mode:
    """How a pipeline is managed."""

    title: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    streams: bool = False
    with_lora: bool = False
    needs_guide: bool = False


MODES = {
    "resident": Mode(title="resident"),
    "streamed": Mode(title="streamed", streams=True),
    "split": Mode(title="split", arguments={"placement": SPLIT}),
    "split and streamed": Mode(title="split and streamed", arguments={"placement": SPLIT}, streams=True),
    "fp8": Mode(title="fp8", arguments={"precision": "fp8 scaled"}),
    "LoRA": Mode(title="LoRA", streams=True, with_lora=True),
    "ControlNet": Mode(title="ControlNet", streams=True, needs_guide=True),
}


def run_modes(recipe: Recipe, modes: Mapping[str, Mode] = MODES) -> dict[str, str]:
    """Return for each mode ``equal``, ``-`` where the pipeline has no such thing, or in what it differs.

    What Highwater refuses stands there as ``refused: `` and its line; anything else that is raised, as ``fails: ``.
    """
    references: dict[str, Outputs] = {}
    with only_new_garbage():
        return {name: run_mode(recipe, mode, references) for name, mode in modes.items()}


def run_mode(recipe: Recipe, mode: Mode, references: dict[str, Outputs]) -> str:
    if (mode.with_lora and not recipe.lora_targets) or (mode.needs_guide and not recipe.guides):
        return "-"
    try:
        with two_devices():
            outputs, missing, cast = run_managed(recipe, mode)
    except (InvalidInput, DoesNotFit, UnsafeState) as error:
        return f"refused: {error}"
    except Exception as error:
        return f"fails: {type(error).__name__}: {error}"
    if missing:
        return missing
    if "plain" not in references:
        with two_devices():
            references["plain"] = run_unmanaged(recipe, with_lora=False, cast={})
    changed_by = "a LoRA" if mode.with_lora else "fp8" if any(cast.values()) else ""
    if not changed_by:
        return compare(outputs, references["plain"])
    if changed_by not in references:
        with two_devices():
            references[changed_by] = run_unmanaged(recipe, with_lora=mode.with_lora, cast=cast)
    if compare(references[changed_by], references["plain"]) == EQUAL:
        return f"no reference: {changed_by} changes nothing without Highwater"
    return compare(outputs, references[changed_by])


def what_did_not_happen(mode: Mode, handle: Managed) -> str:
    """Return a cell for a mode that no component can be in, or that one which can be in it is not in; else nothing.

    In ``split`` belong components of two blocks and more, in ``streamed`` those of more than their budget holds.
    """
    members = {member.name: (member.managed.component, member.managed.plan) for member in handle.members}
    if "placement" in mode.arguments:
        cuttable = {name: plan for name, (component, plan) in members.items() if len(component.blocks) > 1}
        if not cuttable:
            return "- (no blocks to split)"
        if whole := [name for name, plan in cuttable.items() if len(plan.shares) < 2]:
            return f"fails: {whole[0]} has blocks to cut between and is not split"
    if mode.streams:
        large = [
            name for name, (component, plan) in members.items() if exceeds_budget(component, plan, handle.plan.profile)
        ]
        streamed = [name for name, (_, plan) in members.items() if plan.streams]
        if not streamed and not large:
            return "- (no blocks to stream)"
        if still := [name for name in large if name not in streamed]:
            return f"fails: {still[0]} has more blocks than its budget holds and does not stream"
    if mode.arguments.get("precision") and not any(plan.forms for _, plan in members.values()):
        return "- (nothing to cast)"
    return ""


def exceeds_budget(component: Component, plan: ComponentPlan, profile: OffloadProfile) -> bool:
    """Whether a device's part of a component is larger than what the profile lets the component take there."""
    limits = [item.limit_bytes for item in profile.budgets if item.target == component.name]
    needs = [
        share.fixed_bytes + sum(block_bytes(component.blocks[number], plan.forms) for number in share.blocks)
        for share in plan.shares
    ]
    return max(needs) > max(limits, default=MIB * MIB)


def run_managed(recipe: Recipe, mode: Mode) -> tuple[Outputs, str, dict[str, frozenset[str]]]:
    """Return what a managed pipeline gives, what did not happen, and the weights that rested in eight bits.

    Afterwards the books are empty and every weight is on the CPU.
    """
    pipe = build(recipe, with_lora=mode.with_lora)
    manager = MemoryManager()
    manager.set_watermark("*", 0, 0)
    with manage(pipe, manager=manager, **mode.arguments) as handle:
        if mode.streams:
            handle.reprofile(smallest_budgets(handle), **mode.arguments)
        outputs = run(recipe, pipe)
        missing = what_did_not_happen(mode, handle)
        cast = {member.name: member.managed.plan.forms for member in handle.members}
    manager.ledger.check()
    left = [name for name, module in modules_of(pipe).items() for weight in module.parameters() if not weight.is_cpu]
    assert not left, f"weights of {left[0]} are not on the CPU after release()"
    return outputs, missing, cast


def smallest_budgets(handle: Managed) -> OffloadProfile:
    """Return budgets with which each component has room for one block beside the one that computes."""
    budgets = []
    for member in handle.members:
        component, plan = member.managed.component, member.managed.plan
        least = [
            least_bytes(component, share.blocks, plan.forms, first=number == 0)
            for number, share in enumerate(plan.shares)
        ]
        largest = max((block.weight_bytes for block in component.blocks), default=0)
        budgets.append(BudgetItem(target=component.name, limit_bytes=max(least) + largest))
    return OffloadProfile(budgets=tuple(budgets))


def build(recipe: Recipe, *, with_lora: bool) -> Any:
    torch.manual_seed(0)
    pipe = recipe.build()
    for module in modules_of(pipe).values():
        module.eval().requires_grad_(False)
    if with_lora:
        from peft import LoraConfig, inject_adapter_in_model

        torch.manual_seed(1)
        model = next(getattr(pipe, name) for name in ("transformer", "unet", "prior") if getattr(pipe, name, None))
        config = LoraConfig(r=4, lora_alpha=4, init_lora_weights=False, target_modules=list(recipe.lora_targets))
        if hasattr(model, "add_adapter"):
            model.add_adapter(config)
        else:  # the pipeline can load a LoRA, but the class of its model has none of diffusers' methods for it
            inject_adapter_in_model(config, model)
        model.requires_grad_(False)
    if hasattr(pipe, "set_progress_bar_config"):
        pipe.set_progress_bar_config(disable=True)
    return pipe


def run_unmanaged(recipe: Recipe, *, with_lora: bool, cast: Mapping[str, frozenset[str]]) -> Outputs:
    """Return what the pipeline gives on one device by its own means; weights in ``cast`` went through eight bits."""
    pipe = build(recipe, with_lora=with_lora)
    with torch.no_grad():
        for name, module in modules_of(pipe).items():
            resting = {weight_name.replace(".base_layer.", ".") for weight_name in cast.get(name, ())}
            for weight_name, weight in module.named_parameters():  # some have their LoRA only later
                if weight_name.replace(".base_layer.", ".") in resting:
                    scale = find_scale(weight, name=weight_name)
                    decode_fp8_into(weight, encode_fp8(weight, scale), scale)
    pipe.to("sim:0")
    return run(recipe, pipe)


def run(recipe: Recipe, pipe: Any) -> Outputs:
    torch.manual_seed(2)
    outputs = dict(tensors_in(recipe.call(pipe), "output"))
    assert outputs, f"{recipe.name} gives nothing that can be compared"
    return outputs


def compare(got: Outputs, want: Outputs) -> str:
    if got.keys() != want.keys():
        return f"differs: {sorted(got)} instead of {sorted(want)}"
    for name, wanted in want.items():
        if not wanted.isfinite().all():
            return f"no reference: {name} is not finite without Highwater"
        if got[name].shape != wanted.shape:
            return f"differs: {name} is {list(got[name].shape)} instead of {list(wanted.shape)}"
        if not torch.equal(got[name], wanted):
            error = (got[name].double() - wanted.double()).norm() / wanted.double().norm()
            return f"differs: {name} by {error.item():.2g} of its norm"
    return EQUAL


@contextmanager
def two_devices() -> Iterator[None]:
    """Two empty devices that defer copies and look for races."""
    gc.collect()
    simdevice.install("sim", num_devices=2)
    with simdevice.cluster([simdevice.SimDeviceSpec(total_bytes=DEVICE_BYTES) for _ in range(2)]):
        yield
        forget_caches()
        gc.collect()  # pipelines keep inputs and schedules of their last run


@contextmanager
def only_new_garbage() -> Iterator[None]:
    """The collector looks at nothing that was there before: the libraries' million objects take it two seconds."""
    gc.collect()
    KNOWN_CACHES.clear()
    KNOWN_CACHES.extend(caches())
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


KNOWN_CACHES: list[Any] = []


def caches() -> list[Any]:
    """The caches of functions of diffusers."""
    return [
        found
        for found in gc.get_objects()
        if type(found) is functools._lru_cache_wrapper and str(found.__module__).startswith("diffusers.")
    ]


def forget_caches() -> None:
    """Empty the caches of functions of diffusers, some of which keep tensors on the device that they were made for."""
    for found in [*KNOWN_CACHES, *caches()]:
        found.cache_clear()


def modules_of(pipe: Any) -> dict[str, nn.Module]:
    parts = pipe.components if hasattr(pipe, "components") else {"model": pipe}
    return {name: part for name, part in parts.items() if isinstance(part, nn.Module)}


def tensors_in(value: Any, name: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield every tensor, array, picture and text of an output with a name."""
    import numpy as np
    from PIL import Image

    if isinstance(value, torch.Tensor):
        yield name, copy.deepcopy(value.detach()).cpu()
    elif isinstance(value, np.ndarray | Image.Image):
        yield name, torch.from_numpy(np.array(value))
    elif isinstance(value, str):
        yield name, torch.tensor(list(value.encode()))
    elif isinstance(value, Mapping):
        for key, part in value.items():
            yield from tensors_in(part, f"{name}.{key}")
    elif isinstance(value, list | tuple):
        for number, part in enumerate(value):
            yield from tensors_in(part, f"{name}.{number}")
