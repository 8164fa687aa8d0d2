"""The only file that speaks to ``comfy.*``: ComfyUI's models under the manager's care, through its own patcher.

[Note: host] Models reach a device in core's ``load_models_gpu()`` and nowhere else. It calls `HighwaterPatcher.load`
with a number of bytes; the manager decides what that means. A component's masters are views into its host slabs and
hold the patches of the clone that was loaded last, computed by core's own ``patch_weight_to_device``; the originals are
in ``backup``, as core expects. Core's cast-in-forward stays on as the safety net for whoever calls a layer outside its
block. To core we report the device bytes that the plan takes, not the whole weight: it would clear room for bytes that
never come. State hangs on the model, which all clones share.
"""

from __future__ import annotations

import collections
import copy
import logging
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import comfy.model_management
import comfy.sd
import comfy.utils
import folder_paths
import torch
from comfy.model_patcher import ModelPatcher, wipe_lowvram_weight
from comfy.patcher_extension import CallbacksMP

from ..memory import default_manager
from ..memory.component import component_from_module
from ..memory.devices import list_devices
from ..memory.errors import DoesNotFit, InvalidInput
from ..memory.membership import Member
from ..memory.placement import parse_placement
from ..memory.plan import plan_components
from ..memory.profile import parse_profile
from ..memory.residency import Unit
from ..memory.upcast import FP8, Precision, parse_precision

__all__ = [
    "HighwaterPatcher",
    "Request",
    "device_options",
    "load_checkpoint",
    "load_clip_vision",
    "load_controlnet",
    "load_diffusion_model",
    "load_text_encoder",
    "load_vae",
    "manage_clip",
    "manage_model",
    "manage_vae",
    "notes_for",
]

# The form in which core keeps the original of a patched weight.
Backup = collections.namedtuple("Backup", ["weight", "inplace_update"])
# Core says "everything" with this many bytes.
UNLIMITED_BYTES = 1e30


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """What a node asks for; texts as its widgets hold them."""

    profile: str = "auto"
    precision: str = "as stored"
    placement: str = "auto"
    node_id: str | None = None


class Token:
    """Held by every patcher of one model: when the last is dropped, the component is released."""


class Hosted:
    """What all clones of one model share: how it was asked for, and its membership once it was loaded."""

    def __init__(self, name: str, kind: str, request: Request) -> None:
        self.name = name
        self.kind = kind
        self.request = request
        self.member: Member | None = None
        self.patched: set[str] = set()
        self.notes: list[str] = []
        self.token_ref: Callable[[], Token | None] = lambda: None

    def __deepcopy__(self, memo: dict[int, Any]) -> Hosted:
        return Hosted(self.name, self.kind, self.request)  # streams and slabs are not copied

    def token(self) -> Token:
        token = self.token_ref()
        if token is None:
            token = Token()
            self.token_ref = weakref.ref(token)
            weakref.finalize(token, self.release).atexit = False
        return token

    def release(self) -> None:
        """Leave every device and the books; the model's weights are ordinary tensors again."""
        member, self.member = self.member, None
        if member is not None:
            default_manager().remove(member)

    @property
    def units(self) -> list[Unit]:
        return [unit for share in self.member.attachment.shares for unit in share.units] if self.member else []

    def join(self, model: torch.nn.Module, device: torch.device) -> Member:
        """Take the model under management for a device, packed in host memory; again if the device changed."""
        if self.member is not None and self.member.attachment.primary.torch_device != device:
            self.release()
        if self.member is None:
            manager = default_manager()
            names = [found.name for found in list_devices()]
            placement = f"{self.name}={self.placement_on(device)}"
            (self.member,), _ = manager.add(
                {self.name: model},
                kinds={self.name: self.kind},
                placement=parse_placement(placement, devices=names, components=[self.name]),
                profile=parse_profile(self.request.profile, devices=names, components=[self.name]),
                precision=parse_precision(self.request.precision),
                name=None,
                node_id=self.request.node_id,
                is_hosted=True,
            )
        return self.member

    def placement_on(self, device: torch.device) -> str:
        """Return the placement in our grammar: what was asked for if it begins on this device, else the device."""
        here = name_of(device)
        asked = self.request.placement
        return asked if asked.partition("&")[0] == here else here

    def planned_bytes(self, model: torch.nn.Module, device: torch.device) -> int:
        """Return the bytes that the component takes, or would take, of a device."""
        if self.member is not None and self.member.attachment.is_loaded:
            return self.member.attachment.plan.device_bytes.get(name_of(device), 0)
        manager = default_manager()
        names = [found.name for found in list_devices()]
        part = component_from_module(model, name=self.name, kind=self.kind)
        try:
            plan = plan_components(
                [part],
                manager.machine(self.member),
                placement=parse_placement(self.placement_on(device), devices=names),
                profile=parse_profile(self.request.profile, devices=names, components=[self.name]),
                precision=parse_precision(self.request.precision),
            )
        except DoesNotFit:
            return part.weight_bytes
        return plan[self.name].device_bytes.get(name_of(device), 0)


class HighwaterPatcher(ModelPatcher):
    """A patcher whose residency the manager decides. Works on any model that core has built a patcher for."""

    def __init__(
        self,
        model: torch.nn.Module,
        load_device: torch.device,
        offload_device: torch.device,
        size: int = 0,
        weight_inplace_update: bool = False,
    ) -> None:
        super().__init__(model, load_device, offload_device, size, weight_inplace_update)
        if not hasattr(model, "highwater"):
            model.highwater = Hosted(type(model).__name__, "diffusion", Request())
        self.highwater_token = model.highwater.token()

    @property
    def hosted(self) -> Hosted:
        return self.model.highwater

    # -- what core asks

    def model_size(self) -> int:
        """Return the bytes that the plan takes of the load device: what core has to clear, no more."""
        if is_cpu(self.load_device):
            return int(super().model_size())
        return self.hosted.planned_bytes(self.model, self.load_device)

    def load(
        self,
        device_to: torch.device | None = None,
        lowvram_model_memory: float = 0,
        force_patch_weights: bool = False,
        full_load: bool = False,
    ) -> None:
        """Bring the model to a device within core's bytes; cheap when nothing changed."""
        if device_to is None or is_cpu(device_to):
            self.leave_host()
            return super().load(device_to, lowvram_model_memory, force_patch_weights, full_load)
        manager = default_manager()
        with self.use_ejected():
            self.unpatch_hooks()
            member = self.hosted.join(self.model, torch.device(device_to))
            self.write_patches(torch.device(device_to))
            limited = not full_load and 0 < lowvram_model_memory < UNLIMITED_BYTES
            ceilings = {name_of(device_to): int(lowvram_model_memory)} if limited else None
            self.clear_other_devices(member)
            manager.bring(member, ceilings)
            self.mark_modules()
            self.tell_core(device_to)
            self.model.current_weight_patches_uuid = self.patches_uuid
            plan = member.attachment.plan
            logging.info(
                "highwater: %s: %d of %d blocks resident, %.2f MB on %s",
                member.id,
                sum(len(share.resident) for share in plan.shares),
                plan.num_blocks,
                self.model.model_loaded_weight_memory / 2**20,
                " & ".join(share.device for share in plan.shares),
            )
            for callback in self.get_all_callbacks(CallbacksMP.ON_LOAD):
                callback(self, device_to, lowvram_model_memory, force_patch_weights, full_load)
            self.apply_hooks(self.forced_hooks, force_apply=True)

    def partially_unload(
        self, device_to: torch.device, memory_to_free: float = 0, force_patch_weights: bool = False
    ) -> int:
        """Let the manager choose who gives up bytes of our load device; returns what really was freed."""
        if self.hosted.member is None or is_cpu(self.load_device):
            return int(super().partially_unload(device_to, memory_to_free, force_patch_weights))
        with self.use_ejected():
            self.unpatch_hooks()
            freed = default_manager().give_up(
                name_of(self.load_device), int(memory_to_free), "ComfyUI asked for memory; idle longest"
            )
            tell_core_of_all()
            return freed

    def unpatch_model(self, device_to: torch.device | None = None, unpatch_weights: bool = True) -> None:
        if unpatch_weights and self.hosted.member is not None:
            self.eject_model()
            self.unpatch_hooks()
            self.hosted.member.attachment.heal_for(None)
            default_manager().leave(self.hosted.member)
            self.write_originals()
            self.unmark_modules()
        super().unpatch_model(device_to, unpatch_weights)

    def patch_hooks(self, hooks: Any) -> None:
        """Weight hooks write into parameters between steps; staged copies of old masters are seen by their version."""
        if self.hosted.member is not None and (hooks is not None or self.hook_backup):
            self.hosted.member.attachment.settle()
        super().patch_hooks(hooks)

    def unpatch_hooks(self, whitelist_keys_set: set[str] | None = None) -> None:
        if self.hosted.member is not None and self.hook_backup:
            self.hosted.member.attachment.settle()
        super().unpatch_hooks(whitelist_keys_set)

    def cleanup(self) -> None:
        """Called in the sampler's ``finally``, also after an interrupt that ran no hook."""
        if self.hosted.member is not None:
            self.hosted.member.attachment.heal_for(None)
        super().cleanup()

    # -- patches

    def write_patches(self, device: torch.device) -> None:
        """Make every patched weight the master's version, computed by core on the device; the original is kept."""
        wanted = set(self.patches) - self.hosted.patched
        for unit in self.hosted.units:
            for entry in unit.entries:
                key = entry.spec.name
                if key not in wanted or entry.is_buffer:
                    continue
                original = unit.wide(key, torch.device("cpu"))
                master = entry.held
                entry.hold(torch.nn.Parameter(unit.wide(key, device), requires_grad=False))
                try:
                    self.patch_weight_to_device(key, device_to=device)
                    patched = entry.held.detach()
                finally:
                    entry.hold(master)
                unit.overwrite(key, patched)
                self.backup[key] = Backup(original, False)
                self.hosted.patched.add(key)

    def write_originals(self) -> None:
        """Undo `write_patches`."""
        for unit in self.hosted.units:
            for entry in unit.entries:
                key = entry.spec.name
                if key in self.hosted.patched:
                    unit.overwrite(key, self.backup.pop(key).weight)
        self.hosted.patched.clear()

    def leave_host(self) -> None:
        """Give the weights back to core, unpatched: it loads them on the CPU itself."""
        if self.hosted.member is not None:
            self.unpatch_model(self.offload_device, unpatch_weights=True)
            self.hosted.release()

    # -- what core reads on modules and on the model

    def mark_modules(self) -> None:
        """Say that parameters hold the patches, and let core's casting stand by outside the blocks."""
        for name, module in self.model.named_modules():
            if not module._parameters:
                continue
            module.comfy_patched_weights = True
            if hasattr(module, "comfy_cast_weights"):
                wipe_lowvram_weight(module)
                module.prev_comfy_cast_weights = module.comfy_cast_weights
                module.comfy_cast_weights = True
                for attribute in ("weight", "bias"):
                    functions = list(self.weight_wrapper_patches.get(f"{name}.{attribute}", []))
                    setattr(module, f"{attribute}_function", functions)
        for unit in self.hosted.units:
            for entry in unit.entries:
                module, attribute = entry.owners[0]
                if entry.scale is not None and hasattr(module, "weight_function"):
                    module.weight_function.insert(0, Rescale(module, attribute, entry.scale))

    def unmark_modules(self) -> None:
        for module in self.model.modules():
            wipe_lowvram_weight(module)

    def tell_core(self, device: torch.device) -> None:
        """Keep the numbers on the model that core's arithmetic reads."""
        member = self.hosted.member
        assert member is not None
        self.model.model_lowvram = True  # core then asks again before every run, and `load` is cheap
        self.model.lowvram_patch_counter = 0
        self.model.device = torch.device(device)
        tell_core_of(self.model)

    def clear_other_devices(self, member: Member) -> None:
        """Ask core for room on the other devices of a split; for the load device it has done so."""
        for share in member.attachment.plan.shares[1:]:
            missing = share.device_bytes - default_manager().ledger.held(member.id, share.device)
            if missing > 0:
                device = default_manager().devices[share.device].torch_device
                comfy.model_management.free_memory(missing, device)


class Rescale:
    """A core weight function for eight-bit weights at rest: multiplies the scale back in where no block did."""

    def __init__(self, module: torch.nn.Module, attribute: str, scale: float) -> None:
        self.module = weakref.ref(module)
        self.attribute = attribute
        self.scale = scale

    def __call__(self, weight: torch.Tensor) -> torch.Tensor:
        module = self.module()
        at_rest = module is not None and module._parameters[self.attribute].dtype == FP8
        return weight * self.scale if at_rest else weight


def hosted_models() -> Iterator[torch.nn.Module]:
    """Yield every model that the manager holds for the host."""
    for member in list(default_manager().members.values()):
        if member.is_hosted:
            yield member.attachment.module


def tell_core_of(model: torch.nn.Module) -> None:
    member = model.highwater.member
    held = default_manager().ledger.held(member.id, member.attachment.primary.name) if member else 0
    model.model_loaded_weight_memory = held


def tell_core_of_all() -> None:
    """Update core's numbers of every hosted model: the manager may have chosen any of them."""
    for model in hosted_models():
        tell_core_of(model)


# -- devices


def is_cpu(device: Any) -> bool:
    return torch.device(device).type == "cpu"


def name_of(device: Any) -> str:
    """Return a torch device in our words: ``cpu`` or ``gpu:N``."""
    device = torch.device(device)
    return "cpu" if device.type == "cpu" else f"gpu:{device.index or 0}"


def device_options() -> list[str]:
    """Return what a placement widget offers: the host's ``default``, ``cpu`` and ``gpu:N``, and pairs for a split."""
    gpus = [device.name for device in list_devices() if not device.is_cpu]
    pairs = [f"{first}&{second}" for first in gpus for second in gpus if first != second]
    return ["default", "cpu", *gpus, *pairs]


def resolve_placement(placement: str, notes: list[str]) -> str:
    """Return a placement that this machine has; what it lacks becomes ``default``, and the note says so."""
    placement = "default" if placement in ("auto", "") else placement
    if placement in device_options():
        return placement
    notes.append(
        f"placement {placement!r} is not on this machine: default is used; here: {', '.join(device_options())}"
    )
    return "default"


def load_device_for(placement: str) -> torch.device:
    if placement == "cpu":
        return torch.device("cpu")
    if placement == "default":
        return comfy.model_management.get_torch_device()
    index = int(placement.partition("&")[0].partition(":")[2])
    return comfy.model_management.get_all_torch_devices()[index]


# -- making patchers ours

# What a patcher carries beside its model; shared containers are taken over by reference, as core's clone does.
PATCHER_STATE = (
    "patches", "patches_uuid", "object_patches", "weight_wrapper_patches", "model_options", "force_cast_weights",
    "backup", "backup_buffers", "object_patches_backup", "pinned", "attachments", "additional_models", "callbacks",
    "wrappers", "injections", "is_injected", "skip_injection", "hook_patches", "hook_patches_backup", "hook_backup",
    "cached_hook_patches", "current_hooks", "forced_hooks", "is_clip", "hook_mode", "is_multigpu_base_clone",
    "clone_base_uuid", "parent", "cached_patcher_init",
)  # fmt: skip


def adopt(patcher: ModelPatcher, *, name: str, kind: str, request: Request) -> HighwaterPatcher:
    """Return our patcher over the same model, with everything the other one carries. The other must not be used on.

    Raises:
        InvalidInput: the request cannot be met here.
    """
    notes: list[str] = []
    placement = resolve_placement(request.placement, notes)
    device = load_device_for(placement)
    precision = parse_precision(request.precision)
    names = [found.name for found in list_devices()]
    parse_profile(request.profile, devices=names)
    if is_cpu(device) and precision is Precision.FP8_SCALED:
        notes.append("fp8 scaled needs an accelerator: the weights stay as stored on the CPU")
    if patcher.loaded_size() > 0:
        comfy.model_management.unload_model_and_clones(patcher, all_devices=True)
    in_our_words = name_of(device) if placement == "default" else placement
    hosted = Hosted(name, kind, replace(request, placement=in_our_words))
    hosted.notes = notes
    patcher.model.highwater = hosted
    base = type(patcher)
    ours: type[HighwaterPatcher] = HighwaterPatcher
    if base is not ModelPatcher and not patcher.is_dynamic() and not issubclass(base, HighwaterPatcher):
        ours = managed_class(base)
    adopted = ours(patcher.model, device, patcher.offload_device, 0, patcher.weight_inplace_update)
    for attribute in PATCHER_STATE:
        if hasattr(patcher, attribute):
            setattr(adopted, attribute, getattr(patcher, attribute))
    return adopted


managed_classes: dict[type, type[HighwaterPatcher]] = {}


def managed_class(base: type) -> type[HighwaterPatcher]:
    """Return our class in front of another pack's patcher class, whose overrides stay in force."""
    if base not in managed_classes:
        managed_classes[base] = type(f"Managed{base.__name__}", (HighwaterPatcher, base), {})
    return managed_classes[base]


def notes_for(managed: Any) -> list[str]:
    """Return what a node should tell its user about a managed model: fallbacks, and what is not in effect."""
    patcher = getattr(managed, "patcher", managed)
    hosted = getattr(getattr(patcher, "model", None), "highwater", None)
    note = patcher.get_attachment("highwater.note") if isinstance(patcher, ModelPatcher) else None
    return [*(hosted.notes if hosted is not None else []), *([note] if note else [])]


# -- loading


def load_diffusion_model(path: str, request: Request) -> HighwaterPatcher:
    """Load a diffusion model file; the weights rest in host memory until core asks for them."""
    check_file(path)
    patcher = comfy.sd.load_diffusion_model(path, disable_dynamic=True)
    adopted = adopt(patcher, name=Path(path).stem, kind="diffusion", request=request)
    adopted.cached_patcher_init = (reload_diffusion_model, (path, request))
    return adopted


def reload_diffusion_model(path: str, request: Request, disable_dynamic: bool = True) -> HighwaterPatcher:
    return load_diffusion_model(path, request)


def load_text_encoder(paths: Sequence[str], clip_type: str, request: Request) -> Any:
    """Load a text encoder from one to four files; ``clip_type`` as core's loaders name it."""
    for path in paths:
        check_file(path)
    kind = getattr(comfy.sd.CLIPType, clip_type.upper(), comfy.sd.CLIPType.STABLE_DIFFUSION)
    clip = comfy.sd.load_clip(
        ckpt_paths=list(paths),
        embedding_directory=folder_paths.get_folder_paths("embeddings"),
        clip_type=kind,
        disable_dynamic=True,
    )
    name = "+".join(Path(path).stem for path in paths)
    clip.patcher = adopt(clip.patcher, name=name, kind="text", request=request)
    clip.patcher.cached_patcher_init = (reload_text_encoder, (list(paths), clip_type, request))
    return clip


def reload_text_encoder(
    paths: Sequence[str], clip_type: str, request: Request, disable_dynamic: bool = True
) -> HighwaterPatcher:
    patcher: HighwaterPatcher = load_text_encoder(paths, clip_type, request).patcher
    return patcher


def load_vae(path: str, request: Request) -> Any:
    """Load a VAE file."""
    check_file(path)
    weights, metadata = comfy.utils.load_torch_file(path, return_metadata=True)
    vae = comfy.sd.VAE(sd=weights, metadata=metadata)
    vae.throw_exception_if_invalid()
    adopt_vae(vae, Path(path).stem, request)
    vae.patcher.cached_patcher_init = (reload_vae, (path, request))
    return vae


def adopt_vae(vae: Any, name: str, request: Request) -> None:
    vae.patcher = adopt(vae.patcher, name=name, kind="vae", request=request)
    vae.device = vae.patcher.load_device  # where it sends latents and pixels


def reload_vae(path: str, request: Request, disable_dynamic: bool = True) -> HighwaterPatcher:
    patcher: HighwaterPatcher = load_vae(path, request).patcher
    return patcher


def load_checkpoint(path: str, request: Request) -> tuple[HighwaterPatcher, Any, Any]:
    """Load a checkpoint file: model, text encoder and VAE; None for those that it lacks."""
    check_file(path)
    model, clip, vae, _ = comfy.sd.load_checkpoint_guess_config(
        path,
        output_vae=True,
        output_clip=True,
        embedding_directory=folder_paths.get_folder_paths("embeddings"),
        disable_dynamic=True,
    )
    name = Path(path).stem
    model = adopt(model, name=name, kind="diffusion", request=request)
    model.cached_patcher_init = (reload_checkpoint, (path, request), 0)
    if clip is not None:
        clip.patcher = adopt(clip.patcher, name=f"{name}/clip", kind="text", request=request)
        clip.patcher.cached_patcher_init = (reload_checkpoint, (path, request), 1)
    if vae is not None:
        adopt_vae(vae, f"{name}/vae", request)
        vae.patcher.cached_patcher_init = (reload_checkpoint, (path, request), 2)
    return model, clip, vae


def reload_checkpoint(path: str, request: Request, disable_dynamic: bool = True) -> tuple[Any, Any, Any]:
    """Return the three patchers of a checkpoint, as core's factories with an index do."""
    model, clip, vae = load_checkpoint(path, request)
    return model, clip.patcher if clip is not None else None, vae.patcher if vae is not None else None


def load_controlnet(path: str, request: Request) -> Any:
    """Load a ControlNet; kinds without a patcher of their own (T2I adapters) are left to core, and the note says so."""
    import comfy.controlnet

    check_file(path)
    control = comfy.controlnet.load_controlnet(path)
    if control is None:
        raise InvalidInput(f"{path}: is not a ControlNet that ComfyUI knows")
    wrapped = getattr(control, "control_model_wrapped", None)
    if wrapped is not None:
        adopted = adopt(wrapped, name=Path(path).stem, kind="control", request=request)
        control.control_model_wrapped = adopted
        control.load_device = adopted.load_device
    return control


def load_clip_vision(path: str, request: Request) -> Any:
    """Load a CLIP vision model."""
    import comfy.clip_vision

    check_file(path)
    vision = comfy.clip_vision.load(path)
    if vision is None:
        raise InvalidInput(f"{path}: is not a CLIP vision model that ComfyUI knows")
    vision.patcher = adopt(vision.patcher, name=Path(path).stem, kind="vision", request=request)
    vision.load_device = vision.patcher.load_device
    return vision


# -- managing what another loader made


def manage_model(model: ModelPatcher, request: Request) -> ModelPatcher:
    """Return the model under management. A dynamic one is read again from its file: that costs its bytes in RAM."""
    static = make_static(model)
    if static is None:
        return annotate(model.clone(), "not managed: its loader gives no way to read it again (cached_patcher_init)")
    adopted = adopt(static, name=type(model.model).__name__, kind="diffusion", request=request)
    adopted.hosted.notes += static_note(model)
    return adopted


def manage_clip(clip: Any, request: Request) -> Any:
    """Return the text encoder under management; as `manage_model`."""
    managed = clip.clone()
    static = make_static(clip.patcher)
    if static is None:
        annotate(managed.patcher, "not managed: its loader gives no way to read it again (cached_patcher_init)")
        return managed
    managed.patcher = adopt(static, name=type(static.model).__name__, kind="text", request=request)
    managed.cond_stage_model = managed.patcher.model
    managed.patcher.hosted.notes += static_note(clip.patcher)
    return managed


def manage_vae(vae: Any, request: Request) -> Any:
    """Return the VAE under management; as `manage_model`."""
    managed = copy.copy(vae)
    static = make_static(vae.patcher)
    if static is None:
        annotate(managed.patcher, "not managed: its loader gives no way to read it again (cached_patcher_init)")
        return managed
    managed.patcher = static
    managed.first_stage_model = static.model
    adopt_vae(managed, type(static.model).__name__, request)
    managed.patcher.hosted.notes += static_note(vae.patcher)
    return managed


def make_static(patcher: ModelPatcher) -> ModelPatcher | None:
    """Return a clone that is not dynamic; None for a dynamic one whose file is not known."""
    if not patcher.is_dynamic():
        return patcher.clone()
    try:
        return patcher.clone(disable_dynamic=True)
    except RuntimeError:
        return None


def static_note(patcher: ModelPatcher) -> list[str]:
    return ["read again from its file: dynamic VRAM keeps a copy of its own"] if patcher.is_dynamic() else []


def annotate(patcher: ModelPatcher, note: str) -> ModelPatcher:
    patcher.set_attachments("highwater.note", note)
    return patcher


def check_file(path: str) -> None:
    """Refuse a damaged safetensors file before core reads it. Raises `InvalidInput`."""
    from ..memory.weights import read_header

    if path.endswith((".safetensors", ".sft")):
        read_header(path)
