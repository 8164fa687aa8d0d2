"""Core's dynamic models as the manager sees them: what each holds, and what it can be asked to give back."""

from __future__ import annotations

import threading
import weakref
from collections import Counter
from collections.abc import Hashable, Mapping
from typing import Any

import comfy.model_base
import comfy.model_management
import torch
from comfy.clip_vision import IMAGE_ENCODERS
from comfy.model_patcher import ModelPatcher

from ...memory.hosted_component import SteeredComponent, device_name, steer_host
from . import aimdo
from .byte_budgets import Budget, budget_of, text_of
from .core_fields import recorded_dtype
from .core_loading import ByModel, entry_of, is_needed_by_load, listed, unload
from .hosted import is_cpu
from .model_names import content_of, name_of
from .node_results import result_of

__all__ = ["attach_to_core", "core_memory", "dynamic_model_of", "is_dynamic", "kind_of"]


def is_dynamic(patcher: Any) -> bool:
    """Whether core's dynamic VRAM moves the model of a patcher; ComfyUI 0.8.0 has none."""
    return hasattr(patcher, "is_dynamic") and bool(patcher.is_dynamic())


class DynamicModel(SteeredComponent):
    """A model that core's dynamic VRAM moves, as the manager sees it; all patchers of the model share it."""

    def __init__(self, model: torch.nn.Module, name: str, kind: str, content: Hashable | None = None) -> None:
        super().__init__(name, kind)
        self.names_file = name != type(model).__name__
        self.result = result_of(model)
        self.read_from = content
        self.by_dtype = count_by_dtype(model)
        self.model_ref = weakref.ref(model)
        self.patcher_ref: weakref.ref[ModelPatcher] | None = None
        self.budget: Budget | None = None
        """What the clone that has it asked for when it was loaded; None: no node asked for anything."""
        self.limit_bytes: int | None = None
        """Its bytes; None where nothing limits them."""
        self.asked: weakref.WeakKeyDictionary[ModelPatcher, Budget] = weakref.WeakKeyDictionary()
        """What nodes ask for, by the patchers that they gave out."""
        self.running: weakref.WeakSet[ModelPatcher] = weakref.WeakSet()
        """The patchers with which it samples now."""
        self.seen_bytes: dict[str, int] = {}
        """Its bytes by device when the thread in which core loads it last read them.

        Another thread may read them while core unloads it, before core says so.
        """
        self.core_thread: int | None = None

    # -- what is there

    @property
    def patcher(self) -> ModelPatcher | None:
        return self.patcher_ref() if self.patcher_ref is not None else None

    def ranges(self) -> dict[str, Any]:
        """Return the model's range of addresses on each device on which it has been loaded."""
        model = self.model_ref()
        found = dict(model.dynamic_vbars) if model is not None else {}
        return {device_name(device): vbar for device, vbar in found.items() if vbar is not None}

    @property
    def loaded_patcher(self) -> ModelPatcher | None:
        """The patcher through which core has it loaded."""
        entry = entry_of(self.model_ref())
        return entry.model if entry is not None else None

    @property
    def is_computing(self) -> bool:
        """Whether a layer of it computes, it samples, or core loads it or others for the same use.

        A model that core does not have in its list may be about to be loaded, and counts as computing, too.
        """
        entry = entry_of(self.model_ref())
        if entry is None or self.running or is_needed_by_load(entry):
            return True
        return any(page & aimdo.PINNED for page in self.pages())

    @property
    def is_in_use(self) -> bool:
        entry = entry_of(self.model_ref())
        loads = entry is not None and is_needed_by_load(entry)
        return bool(self.running) or loads or any(page & aimdo.PINNED for page in self.pages())

    def pages(self) -> list[int]:
        """Return the marks of each page of its ranges; none where this comfy-aimdo does not tell."""
        known = [vbar for vbar in self.ranges().values() if hasattr(vbar, "get_residency")]
        return [page for vbar in known for page in vbar.get_residency()]

    @property
    def current_budget(self) -> Budget | None:
        """The budget that holds: none where core has loaded the model through a patcher that no node of ours gave."""
        loaded = self.loaded_patcher
        return self.budget if loaded is None else budget_of(loaded)

    @property
    def budget_bytes(self) -> int | None:
        """The most bytes that it may have of its device; None where nothing limits them."""
        return None if self.current_budget is None else self.limit_bytes

    def origin(self) -> list[str]:
        """Return where its budget comes from, where no node named it."""
        budget = self.current_budget
        return [budget.request.profile.origin] if budget is not None and budget.request.profile.origin else []

    def asked_by(self) -> tuple[str | None, str | None]:
        budget = self.current_budget
        return (None, None) if budget is None else (budget.request.node_id, budget.workflow_id)

    def device_bytes(self) -> Mapping[str, int]:
        patcher = self.patcher
        if patcher is None or is_cpu(patcher.load_device):
            return {}
        found = {device: int(vbar.loaded_size()) for device, vbar in self.ranges().items()}
        found[device_name(patcher.load_device)] = self.weight_bytes + self.staging_bytes
        if threading.get_ident() == self.core_thread:
            self.seen_bytes = found
        return found

    @property
    def whole_bytes(self) -> int:
        """The bytes of all its weights on a device."""
        return sum(self.by_dtype.values())

    @property
    def dtype(self) -> str:
        """The dtype that most bytes of its weights have on a device."""
        return max(self.by_dtype, key=lambda dtype: self.by_dtype[dtype], default="")

    @property
    def weight_bytes(self) -> int:
        """The bytes of its weights on the device of its last load: pages, and small weights outside of them."""
        patcher = self.patcher
        return int(patcher.loaded_size()) if patcher is not None else 0

    @property
    def staging_bytes(self) -> int:
        """The bytes through which core copies while it samples; core has one set for a device."""
        patcher = self.patcher
        if patcher is None or not self.running:
            return 0
        buffers = list(getattr(comfy.model_management, "STREAM_AIMDO_CAST_BUFFERS", {}).values())
        return sum(int(buffer.size()) for buffer in buffers if buffer.device == patcher.load_device.index)

    def passing_bytes(self) -> Mapping[str, int]:
        patcher = self.patcher
        return {device_name(patcher.load_device): self.staging_bytes} if patcher is not None else {}

    def wanted_bytes(self) -> Mapping[str, int]:
        patcher, most = self.patcher, self.budget_bytes
        if patcher is None or is_cpu(patcher.load_device):
            return {}
        whole = self.whole_bytes
        return {device_name(patcher.load_device): whole if most is None else min(whole, most)}

    def paged_bytes(self, device: str) -> int:
        vbar, patcher = self.ranges().get(device), self.patcher
        if vbar is None or patcher is None:
            return 0
        return int(vbar.loaded_size()) + (self.staging_bytes if device_name(patcher.load_device) == device else 0)

    def host_bytes(self) -> Mapping[str, int]:
        patcher = self.patcher
        if patcher is None or is_cpu(patcher.load_device):
            return {}
        pinned = int(patcher.pinned_memory_size())
        return {"pinned": pinned, "host": max(0, int(patcher.loaded_ram_size()) - pinned)}

    def choices(self) -> dict[str, str]:
        budget, patcher = self.current_budget, self.patcher
        found = super().choices() | ({} if budget is None else {"profile": str(budget.request.profile)})
        if patcher is None:
            return found
        return found | {"placement": device_name(patcher.load_device), "dtype": self.dtype}

    def content(self) -> Hashable | None:
        return self.read_from

    @property
    def is_in_effect(self) -> bool:
        """Whether its weights are within the budget; staging comes on top."""
        limit = self.budget_bytes
        return limit is None or self.weight_bytes <= limit

    def describe(self) -> Mapping[str, Any]:
        patcher = self.patcher
        device = device_name(patcher.load_device) if patcher is not None else "cpu"
        pages = self.pages()
        return {
            "component": self.name,
            "kind": self.kind,
            "engine": self.engine,
            "weight_bytes": self.whole_bytes,
            "budget_bytes": self.budget_bytes,
            "page_bytes": aimdo.PAGE_BYTES,
            "resident_pages": sum(page & aimdo.RESIDENT for page in pages),
            "placement": device,
            "shares": [],
            "reasons": [text_of(self.name, self.budget_bytes, device), *self.origin()],
        }

    def is_part_with(self, other: DynamicModel) -> bool:
        """Whether a node loaded it and another one of one file."""
        asked = self.budget, other.budget
        return other is not self and None not in asked and asked[0].request.origin is asked[1].request.origin

    # -- what is done

    def free_memory(self, device: str, num_bytes: int) -> int:
        vbar = self.ranges().get(device)
        return int(vbar.free_memory(num_bytes)) if hasattr(vbar, "free_memory") else 0

    def take_off(self, device: str) -> int:
        model, before = self.model_ref(), self.device_bytes().get(device, 0)
        self.seen_bytes = {}  # the manager tells of what leaves now: core's detaching has nothing to add
        if model is not None:
            unload(model)
        return max(0, before - self.device_bytes().get(device, 0))

    def leave_first(self, device: str) -> None:
        vbar = self.ranges().get(device)
        if hasattr(vbar, "deprioritize") and self.paged_bytes(device):
            vbar.deprioritize()

    # -- what is noted

    def see(self, patcher: ModelPatcher) -> None:
        """Note a patcher of the model through which core has it loaded."""
        self.patcher_ref = weakref.ref(patcher)

    def ask(self, patcher: ModelPatcher, budget: Budget) -> list[str]:
        """Note what a node asks for; returns what the node has to say because other nodes ask, too."""
        chain = ancestors_of(patcher)  # of nodes behind each other the last one counts, and nothing is shared
        others = [
            other for known, other in list(self.asked.items()) if id(known) not in chain and other.is_other(budget)
        ]
        self.asked[patcher] = budget
        if self.budget is None:
            self.name, self.kind, self.budget = budget.name, budget.kind, budget
        nodes = sorted({f"node {other.request.node_id}" for other in others})
        shared = (
            f"shares the memory of the same model behind {' and '.join(nodes)}; the one loaded last sets the budget"
        )
        return [shared] if nodes else []

    def note_budget(self, patcher: ModelPatcher, budget: Budget, num_bytes: int | None) -> None:
        """Note the budget that holds from now on: core loaded the model through a patcher that has it."""
        self.see(patcher)
        self.budget, self.limit_bytes = budget, num_bytes
        self.core_thread = threading.get_ident()

    def note_running(self, patcher: ModelPatcher, runs: bool) -> None:
        """Note that sampling with a patcher begins or has ended."""
        self.see(patcher)
        if runs:
            self.running.add(patcher)
        else:
            self.running.discard(patcher)


class CoreMemory:
    """Core's memory management, as the manager steers it: its dynamic models, in the order of their last load."""

    def __init__(self) -> None:
        self.known: ByModel[DynamicModel] = ByModel()

    def of(self, patcher: ModelPatcher) -> DynamicModel:
        """Return what stands for the model of a patcher."""
        component = self.known.get(patcher.model)
        if component is None:
            kind, source = kind_of(patcher), getattr(patcher, "cached_patcher_init", None)
            made = DynamicModel(patcher.model, name_of(patcher.model, kind, source), kind, content_of(kind, source))
            component = self.known.add(patcher.model, made)
        if component.patcher is None:
            component.see(patcher)
        return component

    def components(self) -> list[DynamicModel]:
        """Return the dynamic models that core has loaded, the last loaded first, then others that nodes manage."""
        loaded = [entry.model for entry in listed()]
        found = [self.of(patcher) for patcher in loaded if patcher is not None and is_dynamic(patcher)]
        return list(dict.fromkeys([*found, *(component for component in self.known.values() if component.asked)]))

    def keep_free(self, num_bytes: int | None) -> None:
        aimdo.keep_free(num_bytes)

    def pinned_bytes(self) -> int:
        return int(getattr(comfy.model_management, "TOTAL_PINNED_MEMORY", 0))

    def paged_bytes(self, device: str) -> int:
        return sum(component.paged_bytes(device) for component in self.components())


core_memory = CoreMemory()


def dynamic_model_of(patcher: ModelPatcher) -> DynamicModel:
    """Return what stands for the model of a dynamic patcher in the manager."""
    return core_memory.of(patcher)


def attach_to_core() -> None:
    """Make the manager see core's dynamic models and keep room beside them, where there are any. Idempotent."""
    if aimdo.is_on():
        steer_host(core_memory)


def ancestors_of(patcher: ModelPatcher) -> set[int]:
    """Return the ids of a patcher and of those of which it is a clone."""
    found: set[int] = set()
    while patcher is not None:
        found.add(id(patcher))
        patcher = patcher.parent
    return found


def count_by_dtype(model: torch.nn.Module) -> Counter[str]:
    """Return the bytes that a model's weights take on a device by dtype: core converts some as it brings them there."""
    sizes: Counter[str] = Counter()
    for module in model.modules():
        for name, weight in module._parameters.items():
            if weight is not None:
                # A weight of a class of its own, as of eight bits with scales, stays what it is.
                recorded = recorded_dtype(module, name) if type(weight.data) is torch.Tensor else None
                dtype = recorded or weight.dtype
                num_bytes = weight.numel() * dtype.itemsize if recorded else weight.nbytes
                sizes[str(dtype).removeprefix("torch.")] += num_bytes
    return sizes


def kind_of(patcher: ModelPatcher) -> str:
    """Return what a model of core's is, as far as its patcher tells."""
    if patcher.is_clip:
        return "text"
    if isinstance(patcher.model, comfy.model_base.BaseModel):
        return "diffusion"
    if isinstance(patcher.model, tuple(IMAGE_ENCODERS.values())):
        return "vision"
    if "controlnet" in type(patcher.model).__name__.lower():  # core's classes have nothing else in common
        return "control"
    source = getattr(patcher, "cached_patcher_init", None)
    return "vae" if source is not None and "vae" in getattr(source[0], "__name__", "") else "other"
