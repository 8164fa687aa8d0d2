"""The patcher through which ComfyUI's models come and go under the manager's care.

[Note: host] Models reach a device in core's ``load_models_gpu()`` and nowhere else. It calls `HighwaterPatcher.load`
with a number of bytes; the manager decides what that means. A component's weight stores are views into its host slabs
and hold the patches of the clone that was loaded last, computed by core's own ``patch_weight_to_device``; the
originals are in ``backup``, as core expects. Core's cast-in-forward stays on as the safety net for calls of a layer
outside its block. To core we report the device bytes that the plan takes, not the whole weight: it would clear room
for bytes that never come. State hangs on the model, which all clones share (`Hosted`).
"""

from __future__ import annotations

import collections
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import comfy.model_management
import comfy.utils
import torch
from comfy.model_patcher import ModelPatcher, wipe_lowvram_weight
from comfy.patcher_extension import CallbacksMP

from ...memory.hosted_component import HostedWeight, device_name, watch_evictions
from ..progress import on_bar, showing_loadings
from .compiler import attach_to_compiler
from .core_fields import hang_on, mark_module, set_device_of, set_held_bytes, set_loaded
from .guides import refuse_inputs_elsewhere
from .hosted import UNLIMITED_BYTES, Hosted, Request, is_cpu
from .side_factors import factors_of, is_same
from .unmanaged import while_core_loads

__all__ = ["HighwaterPatcher"]

# The form in which core keeps the original of a patched weight.
Backup = collections.namedtuple("Backup", ["weight", "inplace_update"])


class HighwaterPatcher(ModelPatcher):
    """A patcher whose residency the manager decides. Works on any model that core has built a patcher for."""

    can_repatch = True
    """Whether other patches can be put on while the model stays on its device."""

    def __init__(
        self,
        model: torch.nn.Module,
        load_device: torch.device,
        offload_device: torch.device,
        size: int = 0,
        weight_inplace_update: bool = False,
    ) -> None:
        super().__init__(model, load_device, offload_device, size, weight_inplace_update=weight_inplace_update)
        self.take_model()

    def take_model(self) -> None:
        """Share what hangs on its model with all patchers of it; for a model that has nothing yet, hang that on it."""
        if not hasattr(self.model, "highwater"):
            hang_on(self.model, Hosted(type(self.model).__name__, "diffusion", Request()))
        self.highwater_token = self.model.highwater.token()

    @property
    def hosted(self) -> Hosted:
        return self.model.highwater

    # -- what core asks

    def model_size(self) -> int:
        """Return the bytes that the plan takes of the load device: what core has to clear, no more."""
        if is_cpu(self.load_device):
            return int(super().model_size())
        return self.hosted.planned_bytes(self.model, self.load_device)

    def partially_load(
        self, device_to: torch.device, extra_memory: float = 0, force_patch_weights: bool = False
    ) -> int | None:
        """Leave the device that another clone had it on: core would call it loaded wherever that is.

        Where only the patches differ, what is on the device stays there, and only their weights are written to.
        """
        before = self.hosted.loaded_on
        if before is not None and device_name(before) != device_name(device_to):
            extra_memory += self.model.model_loaded_weight_memory
            self.unpatch_model(self.offload_device, unpatch_weights=True)
        self.hosted.note_repatching(self.can_repatch)
        try:
            loaded: int | None = super().partially_load(device_to, extra_memory, force_patch_weights)
        finally:
            self.hosted.note_repatching(False)
        return loaded

    def load(
        self,
        device_to: torch.device | None = None,
        lowvram_model_memory: float = 0,
        force_patch_weights: bool = False,
        full_load: bool = False,
    ) -> None:
        """Bring the model to a device within core's bytes; cheap when nothing changed."""
        self.hosted.note_repatching(False)  # whatever fails from here on, core takes all of it off
        self.hosted.note_loaded(torch.device(device_to) if device_to is not None else None)
        if device_to is None or is_cpu(device_to):
            self.leave_host()
            self.check_inputs()
            return super().load(
                device_to,
                lowvram_model_memory=lowvram_model_memory,
                force_patch_weights=force_patch_weights,
                full_load=full_load,
            )
        with while_core_loads(), self.use_ejected():
            self.unpatch_hooks()
            watch_evictions(tell_core_of)
            attach_to_compiler()
            if self.hosted.patchable is None:  # asked once, of plain weights: core looks at their sizes, too
                self.hosted.note_patchable(self.keys_that_core_patches())
            with showing_loadings(on_bar(comfy.utils.ProgressBar(1).update_absolute)):
                self.hosted.join(self.model, torch.device(device_to))
            self.write_patches(torch.device(device_to))
            # Not `full_load`: core says so whenever its bytes exceed what we call our size, which is a plan's.
            limited = 0 < lowvram_model_memory < UNLIMITED_BYTES  # 0.1 byte is core's word for as little as possible
            self.clear_other_devices()
            with showing_loadings(on_bar(comfy.utils.ProgressBar(1).update_absolute)):
                self.hosted.load(int(lowvram_model_memory) if limited else None)
            self.check_inputs()
            self.mark_modules()
            set_loaded(self.model, device_to, self.patches_uuid)
            tell_core_of(self.model)
            logging.info("highwater: %s", self.hosted.summary())
            for callback in self.get_all_callbacks(CallbacksMP.ON_LOAD):
                callback(self, device_to, lowvram_model_memory, force_patch_weights, full_load)
            self.apply_hooks(self.forced_hooks, force_apply=True)

    def partially_unload(
        self, device_to: torch.device, memory_to_free: float = 0, force_patch_weights: bool = False
    ) -> int:
        """Ask the manager to free bytes of our load device, of components that it chooses; returns what was freed."""
        if not self.hosted.is_managed or is_cpu(self.load_device):
            return int(super().partially_unload(device_to, memory_to_free, force_patch_weights))
        with self.use_ejected():
            self.unpatch_hooks()
            # What core is about to load it takes off its list before it asks others for room.
            listed = {id(loaded.model.model) for loaded in comfy.model_management.current_loaded_models if loaded.model}
            return self.hosted.free_memory(
                self.load_device,
                int(memory_to_free),
                "ComfyUI asked for memory",
                is_loaded=lambda module: id(module) in listed,
            )

    def unpatch_model(self, device_to: torch.device | None = None, unpatch_weights: bool = True) -> None:
        if unpatch_weights and self.hosted.is_managed:
            self.eject_model()
            self.unpatch_hooks()
            self.hosted.settle()  # the weights at rest are written to below
            if not self.hosted.is_repatching:
                self.hosted.unload()
                self.write_originals()
            self.unmark_modules()
            backup = dict(self.backup)
            self.backup.clear()
            try:
                # No device: core would call ``Module.to``. That moves nothing here, but puts wrappers of its own around
                # quantized weights, whose scales are copies: what is written to those at rest would not show in them.
                super().unpatch_model(None, unpatch_weights)
            finally:
                self.backup.update(backup)
            if device_to is not None:
                set_device_of(self.model, device_to)
            return
        super().unpatch_model(device_to, unpatch_weights)

    # -- weight hooks: core writes into parameters between steps

    def patch_hooks(self, hooks: Any) -> None:
        if hooks is not None or self.hook_backup:
            self.hosted.settle()
        super().patch_hooks(hooks)

    def patch_hook_weight_to_device(
        self, hooks: Any, combined_patches: Any, key: str, original_weights: Any, memory_counter: Any
    ) -> None:
        with self.writing_hook(key):
            super().patch_hook_weight_to_device(hooks, combined_patches, key, original_weights, memory_counter)

    def patch_cached_hook_weights(self, cached_weights: Any, key: str, memory_counter: Any) -> None:
        with self.writing_hook(key):
            super().patch_cached_hook_weights(cached_weights, key, memory_counter)

    @contextmanager
    def writing_hook(self, key: str) -> Iterator[None]:
        """In the body core writes to a weight, and notes first what it was; of an encoded one we note how it rests."""
        weight = self.hosted.weights.get(key)
        if weight is not None and weight.is_encoded and key not in self.hook_backup:
            self.hosted.note_hooked(key, weight.leaves_at_rest())
        with self.hosted.decoded(key):
            yield

    def unpatch_hooks(self, whitelist_keys_set: set[str] | None = None) -> None:
        if self.hosted.is_managed and self.hook_backup:
            self.hosted.settle()
            for key in self.hosted.encoded_names & set(whitelist_keys_set or self.hook_backup) & set(self.hook_backup):
                self.hosted.weights[key].put_leaves(*self.hosted.hooked[key])
                self.hook_backup.pop(key)
        super().unpatch_hooks(whitelist_keys_set)

    def cleanup(self) -> None:
        """Called in the sampler's ``finally``, also after an interrupt that ran no hook."""
        self.hosted.recover()
        super().cleanup()

    # -- patches

    def write_patches(self, device: torch.device) -> None:
        """Make all weights contain their patches, and no others; what contains the same ones already is left alone.

        An encoded weight stays as it is if all that its patches do is to add a low-rank sum: that is added in decoding.
        Any other patched weight becomes the weight store's version, computed by core on the device; the original is
        kept.
        """
        patchable = self.hosted.patchable or ()
        weights = self.hosted.weights
        wanted = {key: self.patches[key] for key in weights if key in self.patches and key in patchable}
        factored = {}
        for key, patches in wanted.items():
            had = self.hosted.factored.get(key)
            factors = had[1] if had is not None and is_same(had[0], patches) else factors_of(patches, weights[key])
            if factors is not None and not self.is_hooked(key):
                factored[key] = list(patches), factors
        for key, (contained, _) in list(self.hosted.patched.items()):
            if key in factored or not is_same(contained, wanted.get(key, ())):
                self.write_original(key)
        self.hosted.set_patch_factors(factored)
        for key in wanted:
            if key not in factored and key not in self.hosted.patched:
                self.write_patch(key, weights[key], device)

    def is_hooked(self, key: str) -> bool:
        """Whether a hook patches a weight between steps: core computes that from the weight with its patches in it."""
        return any(key in patches for patches in self.hook_patches.values())

    def write_patch(self, key: str, weight: HostedWeight, device: torch.device) -> None:
        original = weight.original()
        resting = weight.leaves_at_rest() if weight.is_encoded else None
        self.hosted.note_patched(key, self.patches[key], resting)
        try:
            with weight.held_on(device):
                self.patch_weight_to_device(key, device_to=device)
        finally:  # core notes one of its own; whatever fails, the original can be written
            self.backup[key] = Backup(original, False)

    def keys_that_core_patches(self) -> frozenset[str]:
        """Return the keys whose patches core's own loader applies: it loads modules by its list, and leaves out
        parameters of a module that has submodules with weights, such as Wan's ``modulation``."""
        return frozenset(
            f"{name}.{parameter}" if name else parameter
            for *_, name, _module, parameters in self._load_list()
            for parameter in parameters
        )

    def write_originals(self) -> None:
        """Undo `write_patches`."""
        for key in list(self.hosted.patched):
            self.write_original(key)
        self.hosted.set_patch_factors({})

    def write_original(self, key: str) -> None:
        weight, (_, resting) = self.hosted.weights[key], self.hosted.patched[key]
        if resting is None:
            weight.overwrite(self.backup[key].weight)
        else:
            weight.put_leaves(*resting)
        self.backup.pop(key, None)  # last: a failure leaves what it takes to write it again
        self.hosted.take_patched(key)

    def get_key_patches(self, filter_prefix: str | None = None) -> dict[str, Any]:
        """Return what merging reads: the weight stores, which stay, and with them how encoded ones are decoded."""
        found: dict[str, Any] = super().get_key_patches(filter_prefix)
        for key, weight in self.hosted.weights.items():
            if key in found and key not in self.backup and key not in self.hook_backup:
                stored, widen = weight.reader()
                found[key][0] = (stored, widen or found[key][0][1])
        return found

    def model_state_dict_for_saving(self, model: torch.nn.Module | None = None, prefix: str = "") -> dict[str, Any]:
        """Return the state with the patches in it; encoded weights are decoded, which costs their wide bytes."""
        state: dict[str, Any] = super().model_state_dict_for_saving(model, prefix)
        for key, weight in self.hosted.weights.items():
            apart = weight.is_encoded or weight.rests_in_file
            if apart and key.startswith(prefix) and key[len(prefix) :] in state:
                state[key[len(prefix) :]] = weight.add_factors(weight.original())
        return state

    def check_inputs(self) -> None:
        """Make a ControlNet refuse inputs from another device; the manager's hooks come after that."""
        if self.hosted.kind == "control":
            self.hosted.check_inputs(self.model, refuse_inputs_elsewhere)

    def leave_host(self) -> None:
        """Give the weights back to core, unpatched: it loads them on the CPU itself."""
        if self.hosted.is_managed:
            self.unpatch_model(self.offload_device, unpatch_weights=True)
            self.hosted.release()

    # -- what core reads on modules and on the model

    def mark_modules(self) -> None:
        """Mark modules: their parameters contain the patches, and core casts them in calls outside of blocks."""
        for name, module in self.model.named_modules():
            if module._parameters:
                wrapped = {kind: self.weight_wrapper_patches.get(f"{name}.{kind}", []) for kind in ("weight", "bias")}
                mark_module(module, wrapped)
        for weight in self.hosted.weights.values():
            widens = [function for function in (weight.rescale(), weight.adder()) if function is not None]
            if widens and hasattr(weight.owner, "weight_function"):
                weight.owner.weight_function[:0] = widens

    def unmark_modules(self) -> None:
        for module in self.model.modules():
            wipe_lowvram_weight(module)

    def clear_other_devices(self) -> None:
        """Ask core for room on the other devices of a split; for the load device it has done so."""
        for device, num_bytes in self.hosted.missing_bytes().items():
            comfy.model_management.free_memory(num_bytes, device)


def tell_core_of(model: torch.nn.Module) -> None:
    """Update the number of a model's bytes that core reads; also when the manager has taken some."""
    set_held_bytes(model, model.highwater.held_bytes)
