"""Core's own models that no node of ours has asked for: their bytes are read, as for the page's badges."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from comfy.model_patcher import ModelPatcher

from ...memory.hosted_component import ObservedModel, observe_host
from .core_loading import ByModel, entry_of, listed
from .dynamic_models import is_dynamic, kind_of
from .hosted import hosted_of
from .model_names import name_of
from .unmanaged import UnmanagedModel, is_unmanaged

__all__ = ["observe_core"]


class CoreModel(ObservedModel):
    """A model of core's that is whole in torch's memory: on a device, in RAM, or in part on each."""

    def __init__(self, model: torch.nn.Module, name: str, kind: str) -> None:
        self.name, self.kind = name, kind
        self.counts = UnmanagedModel(model, name, kind)
        self.names_file, self.result = self.counts.names_file, self.counts.result
        self.weight_bytes = int(self.counts.describe()["weight_bytes"])

    def device_bytes(self) -> Mapping[str, int]:
        return self.counts.device_bytes()

    def find_load(self) -> object:
        """Return core's finalizer of the model's entry: it makes a new one whenever it loads a model for a use."""
        return getattr(entry_of(self.counts.model_ref()), "model_finalizer", None)

    def host_bytes(self) -> Mapping[str, int]:
        return {"host": max(0, self.weight_bytes - sum(self.device_bytes().values()))}

    def describe(self) -> Mapping[str, Any]:
        return {
            "component": self.name,
            "kind": self.kind,
            "engine": "core",
            "weight_bytes": self.weight_bytes,
            "shares": [],
            "reasons": ["not managed: no node of Highwater manages it"],
        }


seen: ByModel[CoreModel] = ByModel()


def read_core() -> list[CoreModel]:
    """Return the models that core has loaded at any time and still has, without those that others here count."""
    for entry in listed():
        patcher = entry.model
        if isinstance(patcher, ModelPatcher) and seen.get(patcher.model) is None and not is_dynamic(patcher):
            kind = kind_of(patcher)
            name = name_of(patcher.model, kind, getattr(patcher, "cached_patcher_init", None))
            seen.add(patcher.model, CoreModel(patcher.model, name, kind))
    return [found for found in seen.values() if not is_counted_elsewhere(found)]


def is_counted_elsewhere(found: CoreModel) -> bool:
    model = found.counts.model_ref()
    return model is None or hosted_of(model) is not None or is_unmanaged(model)


def observe_core() -> None:
    """Make the manager count core's own models. Idempotent."""
    observe_host(read_core)
