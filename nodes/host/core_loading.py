"""What core has loaded, whether it is loading now, its callbacks, and one thing of ours for each of its models."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Mapping
from typing import Any, Generic, TypeVar

import comfy.model_management
import torch
from comfy.model_patcher import ModelPatcher

from .hosted import UNLIMITED_BYTES

__all__ = ["ByModel", "entry_of", "is_needed_by_load", "listed", "loading", "set_callbacks", "unload"]

T = TypeVar("T")


class ByModel(Generic[T]):
    """One thing for each model, as long as the model exists.

    Takes no lock: a garbage collection may release a model in the middle of any call. Each change is one step of a
    dict.
    """

    def __init__(self) -> None:
        self.found: dict[int, tuple[weakref.ref[torch.nn.Module], T]] = {}

    def get(self, model: torch.nn.Module) -> T | None:
        """Return what belongs to a model; None for one without."""
        known = self.found.get(id(model))
        return known[1] if known is not None and known[0]() is model else None

    def add(self, model: torch.nn.Module, thing: T) -> T:
        """Give a model a thing if it has none; returns the one that it has."""
        key = id(model)

        def forget(dead: weakref.ref[torch.nn.Module]) -> None:
            known = self.found.get(key)
            if known is not None and known[0] is dead:
                self.found.pop(key, None)

        mine = weakref.ref(model, forget), thing
        known = self.found.setdefault(key, mine)
        if known[0]() is not model:  # of a model that had the same place in memory
            self.found[key] = known = mine
        return known[1]

    def values(self) -> list[T]:
        """Return the things of all models that exist."""
        return [thing for model, thing in list(self.found.values()) if model() is not None]


class Loading(threading.local):
    """Whether core is loading models in this thread."""

    now = False

    def note(self, now: bool) -> bool:
        """Set it; returns what it was."""
        before, self.now = self.now, now
        return before


loading = Loading()


def listed() -> list[Any]:
    """Return core's entries of loaded models, the last loaded first."""
    return list(comfy.model_management.current_loaded_models)


def entry_of(model: torch.nn.Module | None) -> Any:
    """Return core's entry of a model; None while it is not loaded, or core is about to load it."""
    return next((each for each in listed() if each.model is not None and each.model.model is model), None)


def is_needed_by_load(entry: Any) -> bool:
    """Whether core loads models now and has loaded this one for the same use."""
    return bool(entry.currently_used) and loading.now


def unload(model: torch.nn.Module, num_bytes: float = UNLIMITED_BYTES) -> None:
    """Take at least so many bytes of a model and its clones off their device, by core's own way to clear room."""
    here = [loaded for loaded in listed() if loaded.model is not None and loaded.model.model is model]
    for device in {loaded.device for loaded in here}:
        others = [loaded for loaded in listed() if not any(loaded is own for own in here)]
        wanted = num_bytes + comfy.model_management.get_free_memory(device)
        comfy.model_management.free_memory(wanted, device, keep_loaded=others)


def set_callbacks(patcher: ModelPatcher, key: str, callbacks: Mapping[str, Callable[..., None]]) -> None:
    """Have core call functions at its steps with a patcher and its clones, in place of those set with the same key."""
    for when, callback in callbacks.items():
        patcher.remove_callbacks_with_key(when, key)
        patcher.add_callback_with_key(when, key, callback)
