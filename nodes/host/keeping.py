"""Keeping and releasing what a link carries, whichever moves it: our blocks, core's dynamic VRAM, or core alone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from comfy.model_patcher import ModelPatcher

from ...memory.errors import InvalidInput
from ...memory.hosted_component import (
    EVERYTHING_KEPT,
    Departure,
    HostedComponent,
    KeepLimit,
    SteeredComponent,
    keep_steered,
    take_off_steered,
)
from .core_loading import listed
from .dynamic_models import attach_to_core, dynamic_model_of, is_dynamic, kind_of
from .hosted import hosted_of
from .model_names import name_of
from .unmanaged import UnmanagedModel, see_model

__all__ = ["keep", "release", "seeing_loaded_models"]

LIMITED_BY_US = "ComfyUI's dynamic VRAM knows no such limit: by itself it evicts all of it last"
MOVED_BY_CORE = "ComfyUI moves it, and may unload it in an order of its own"


def keep(link: Any, kept: bool, limit: KeepLimit) -> list[str]:
    """Evict a model last up to a limit, or in the usual order; returns what its node has to say.

    Raises:
        InvalidInput: the link carries no model, or the limit exceeds its device.
    """
    patcher = find_patcher(link)
    component = find_component(patcher)
    if isinstance(component, HostedComponent):
        component.keep(kept, limit, patcher.load_device)
    else:
        keep_steered(component, kept, limit)
    if not kept:
        return [f"{component.name} is evicted in the usual order"]
    told = [f"{component.name} is evicted last" + (f", up to {limit} of a device" if limit != EVERYTHING_KEPT else "")]
    if isinstance(component, UnmanagedModel):
        return [*told, MOVED_BY_CORE]
    limits_dynamic = isinstance(component, SteeredComponent) and limit != EVERYTHING_KEPT
    return [*told, *([LIMITED_BY_US] if limits_dynamic else [])]


def release(link: Any, reason: str) -> tuple[str, list[Departure]]:
    """Take a model off every device now; returns its name, and what that freed of each.

    Raises:
        InvalidInput: the link carries no model.
        UnsafeState: the model computes.
    """
    component = find_component(find_patcher(link))
    if isinstance(component, HostedComponent):
        return component.name, component.take_off(reason)
    return component.name, take_off_steered(component, reason)


@contextmanager
def seeing_loaded_models(*, idle: bool) -> Iterator[None]:
    """Make the manager see whatever core has loaded, also what no node of ours has touched.

    Args:
        idle: nothing runs in the host, so that what core moves by itself may leave in the body, by core's own way.
    """
    found = [find_component(entry.model) for entry in listed() if isinstance(entry.model, ModelPatcher)]
    ended = [each for each in found if isinstance(each, UnmanagedModel) and not each.runs and not each.has_run]
    for component in ended if idle else ():
        component.note_idle(True)
    try:
        yield
    finally:
        for component in ended if idle else ():
            component.note_idle(False)


def find_patcher(link: Any) -> ModelPatcher:
    """Return the patcher of a model, text encoder, VAE, ControlNet or vision model. Raises `InvalidInput`."""
    candidates = (link, getattr(link, "patcher", None), getattr(link, "control_model_wrapped", None))
    for patcher in candidates:
        if isinstance(patcher, ModelPatcher):
            return patcher
    raise InvalidInput(
        f"a {type(link).__name__} has no model that leaves a device by itself; "
        "allowed: a model, text encoder, VAE, ControlNet, CLIP vision model, or pipeline"
    )


def find_component(patcher: ModelPatcher) -> HostedComponent | SteeredComponent:
    hosted = hosted_of(patcher.model)
    if hosted is not None:
        return hosted
    if is_dynamic(patcher):
        attach_to_core()
        return dynamic_model_of(patcher)
    kind = kind_of(patcher)
    name = name_of(patcher.model, kind, getattr(patcher, "cached_patcher_init", None))
    return see_model(patcher, name=name, kind=kind)
