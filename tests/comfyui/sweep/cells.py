"""Compares a small model under the manager with core's own load of it, in one host process; the host's Python runs it.

A cell is an architecture in a mode. Its word: ``equal``, to the bit; ``refused:`` with our line; ``-`` for what does
not exist; or ``FAILED:`` with what happened. What rests in eight bits is compared with core's own load of weights that
went through them.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import sys
import traceback
import weakref
from collections.abc import Iterator
from functools import partial
from typing import Any

import comfy.lora
import comfy.model_management
import comfy.sample
import comfy.sd
import comfy.supported_models
import torch
from comfy.model_patcher import ModelPatcher

from highwater.memory import default_manager
from highwater.memory.errors import DoesNotFit, InvalidInput, UnsafeState
from highwater.memory.manager.module_plans import plan_modules
from highwater.memory.options.placement import parse_placement
from highwater.memory.options.precision import Precision
from highwater.memory.options.profile import parse_profile
from highwater.memory.weights.cast_form import find_scale
from highwater.memory.weights.fp8 import decode_fp8_into, encode_fp8
from highwater.nodes.host.adopting import adopt
from highwater.nodes.host.hosted import Request
from highwater.nodes.host.micro_batches import compute_halves_in_turn
from highwater.tests.comfyui.sweep.architectures import ARCHITECTURES, Architecture
from highwater.tests.comfyui.sweep.autoencoders import build_vae, run_vae
from highwater.tests.comfyui.sweep.controls import guide
from highwater.tests.comfyui.sweep.guided import GUIDED
from highwater.tests.comfyui.sweep.weights import fill

__all__ = ["cell"]

SPLIT = "gpu:0&gpu:1"
GPUS = ["gpu:0", "gpu:1"]
# Of a model's bytes, as a budget for one device.
PERCENTS = (5, 10, 15, 20, 25, 30, 35, 40, 50, 60, 70, 80, 90, 95, 97)
Tensor = torch.Tensor


class Different(Exception):
    """The managed model gave something else; the argument says by how much."""


# -- models


def build(architecture: Architecture, seed: int = 0) -> ModelPatcher:
    """Return core's patcher of a small model with the same random weights every time."""
    kind = getattr(comfy.supported_models, architecture.model)
    config = kind(dict(architecture.config))
    device = comfy.model_management.get_torch_device()
    dtype = torch.bfloat16 if torch.bfloat16 in config.supported_inference_dtypes else torch.float32
    manual = comfy.model_management.unet_manual_cast(dtype, device, config.supported_inference_dtypes)
    config.set_inference_dtype(dtype, manual)
    model = config.get_model({}, "")
    fill(model, seed)
    offload = comfy.model_management.unet_offload_device()
    patcher = ModelPatcher(model, load_device=device, offload_device=offload)
    patcher.cached_patcher_init = (rebuild, (architecture, seed))
    return patcher


def rebuild(architecture: Architecture, seed: int, disable_dynamic: bool = True) -> ModelPatcher:
    return build(architecture, seed)


def lora_for(patcher: ModelPatcher, rank: int = 2) -> dict[str, Tensor]:
    """Return a LoRA file's tensors for every second matrix of a diffusion model."""
    generator = torch.Generator().manual_seed(7)
    matrices = [
        (name.removesuffix(".weight"), parameter.shape)
        for name, parameter in patcher.model.diffusion_model.named_parameters()
        if name.endswith(".weight") and parameter.ndim == 2
    ]
    tensors = {}
    for name, (num_out, num_in) in matrices[::2]:
        tensors[f"diffusion_model.{name}.lora_A.weight"] = torch.randn(rank, num_in, generator=generator) * 0.1
        tensors[f"diffusion_model.{name}.lora_B.weight"] = torch.randn(num_out, rank, generator=generator) * 0.1
    return tensors


# -- running


def conditioning(architecture: Architecture, seed: int, control: Any) -> list[Any]:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randn(1, *architecture.text, generator=generator)
    options: dict[str, Any] = architecture.extras(generator)
    options["pooled_output"] = torch.randn(1, architecture.pooled, generator=generator) if architecture.pooled else None
    if control is not None:
        options["control"] = control
    return [[tokens, options]]


def sample(architecture: Architecture, patcher: ModelPatcher, control: Any = None) -> Tensor:
    """Run one step of the real sampler, guided."""
    noise = torch.randn(architecture.latent, generator=torch.Generator().manual_seed(0))
    positive, negative = (conditioning(architecture, seed, control) for seed in (1, 2))
    with torch.inference_mode():
        result = comfy.sample.sample(
            patcher, noise, 1, architecture.cfg, "euler", "simple", positive, negative, torch.zeros_like(noise), seed=3
        )
    return result.clone()


def pass_through_eight_bits(model: torch.nn.Module, names: frozenset[str]) -> None:
    """Give weights the values that they have after they rested in eight bits."""
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name in names:
                scale = find_scale(weight, name=name)
                decode_fp8_into(weight, encode_fp8(weight, scale), scale)


references: dict[tuple[str, bool, bool, bool, frozenset[str]], Tensor] = {}


def reference(
    architecture: Architecture,
    cast: frozenset[str],
    *,
    has_lora: bool = False,
    has_control: bool = False,
    in_halves: bool = False,
) -> Tensor:
    """Return what core's own load gives, with weights that went through eight bits; made once.

    Args:
        in_halves: each conditioning of a step is computed alone.
    """
    key = (architecture.name, has_lora, has_control, in_halves, cast)
    without: dict[str, Tensor] = {}
    if has_control and key not in references:
        without["the ControlNet"] = reference(architecture, cast, in_halves=in_halves)
    if has_lora and key not in references:
        without["the LoRA"] = reference(architecture, cast, in_halves=in_halves)
    if cast and key not in references:
        without["eight bits"] = reference(architecture, frozenset(), has_control=has_control)
    if key not in references:
        patcher = build(architecture)
        if in_halves:
            compute_halves_in_turn(patcher)
        pass_through_eight_bits(patcher.model, cast)
        if has_lora:
            patcher, _ = comfy.sd.load_lora_for_models(patcher, None, lora_for(patcher), 1.0, 0.0)
        control = None
        if has_control:
            patcher, control = guide(architecture, patcher, None)
        result = sample(architecture, patcher, control)
        refuse_nothing(result)
        for what, plain in without.items():
            refuse_same(result, plain, what)
        references[key] = result
        comfy.model_management.unload_all_models()
    return references[key]


def refuse_same(result: Tensor, plain: Tensor, without: str) -> None:
    if torch.equal(result, plain):
        raise AssertionError(f"core's own result is the same without {without}: the configuration is no test")


def refuse_nothing(result: Tensor) -> None:
    if not result.isfinite().all() or not result.any():
        raise AssertionError("core's own result is not finite, or nothing: the configuration is no test")


# -- cells


class Nothing(Exception):
    """Nothing of the model can do it; the argument says what."""


def streamed_request(model: torch.nn.Module, kind: str, placement: str) -> Request:
    """Return a request with a small budget that fits and makes blocks stream. Raises `Nothing`."""
    fitting: list[Request] = []
    whole = sum(parameter.nbytes for parameter in model.parameters()) / (1 << 20)
    devices = placement.split("&") if placement != "auto" else ["gpu:0"]
    for percents in sorted(itertools.product(PERCENTS, repeat=len(devices)), key=sum):
        text = ",".join(
            f"{device}={whole * percent / 100:.3f}MiB" for device, percent in zip(devices, percents, strict=True)
        )
        profile = parse_profile(text, devices=GPUS)
        try:
            plan = plan_modules(
                {"probe": model},
                default_manager().capacity.machine(None),
                placement=parse_placement(placement if len(devices) > 1 else devices[0], devices=GPUS),
                profile=profile,
                precision=None,
                kinds={"probe": kind},
                sources={},
            ).plan
        except (DoesNotFit, InvalidInput):
            continue
        if all(share.streamed for share in plan["probe"].shares):
            fitting.append(Request(profile=profile, placement=parse_placement(placement, devices=GPUS)))
            if len(fitting) > 2:
                break
    if not fitting:
        raise Nothing("no blocks to stream")
    return fitting[-1]


FORMS = ("resident", "streamed", "split", "split and streamed")


def request_for(model: torch.nn.Module, kind: str, form: str) -> Request:
    placement = SPLIT if form.startswith("split") else "auto"
    if form.endswith("streamed"):
        return streamed_request(model, kind, placement)
    precision = Precision.ENCODED if form == "fp8" else Precision.AS_STORED
    return Request(placement=parse_placement(placement, devices=GPUS), precision=precision)


def request_for_control(form: str, model: torch.nn.Module) -> Request:
    """Return a request for the ControlNet of a model that is managed in a form: as that one, where it can."""
    try:
        return request_for(model, "control", "resident" if form == "fp8" else form)
    except Nothing:
        return Request(placement=parse_placement(SPLIT if form.startswith("split") else "auto", devices=GPUS))
    finally:
        gc.collect()  # the frames of what did not fit, from which that model is seen which it guides


def compare(architecture: Architecture, form: str, *, has_lora: bool = False, has_control: bool = False) -> None:
    """Sample twice under the manager and compare. Raises `Different`."""
    request = request_for(build(architecture).model, "diffusion", form)
    patcher = adopt(build(architecture), name=architecture.model, kind="diffusion", request=request)
    if has_lora:
        patcher, _ = comfy.sd.load_lora_for_models(patcher, None, lora_for(patcher), 1.0, 0.0)
    control = None
    if has_control:
        patcher, control = guide(architecture, patcher, partial(request_for_control, form))
    results = [sample(architecture, patcher, control) for _ in ATTEMPTS]
    cast = check_plan(patcher, form)
    in_halves = patcher.hosted.computes_at_once
    kept = weakref.ref(patcher.model)
    del patcher, control
    comfy.model_management.unload_all_models()
    if kept() is not None:
        raise Different("its memory stays until Python collects cycles")
    check(results, reference(architecture, cast, has_lora=has_lora, has_control=has_control, in_halves=in_halves))


ATTEMPTS = ("first", "second")


def check_plan(patcher: Any, form: str) -> frozenset[str]:
    """Return the names of the weights that rest in eight bits, if the plan is as asked for. Raises `Nothing`."""
    plan = patcher.hosted.member.managed.plan
    cast = frozenset(patcher.hosted.encoded_names)
    if form == "fp8" and not cast:
        raise Nothing("no weights that eight bits take")
    assert form == "fp8" or not cast, "eight bits, though none were asked for"
    num_devices = 2 if form.startswith("split") and plan.num_blocks > 1 else 1
    assert len(plan.shares) == num_devices, "not split as asked"
    assert form not in ("resident", "split", "fp8") or not plan.streams, "streams, though it should stay"
    assert not form.endswith("streamed") or plan.streams, "stays, though it should stream"
    return cast


def check(results: list[Tensor], expected: Tensor) -> None:
    """Compare the results of runs. Raises `Different`."""
    for attempt, actual in zip(ATTEMPTS, results, strict=True):
        if not torch.equal(actual, expected):
            error = ((actual - expected).norm() / expected.norm()).item()
            raise Different(f"relative error {error:.2g} in the {attempt} run")


def compare_vae(name: str, form: str) -> None:
    """Decode and encode twice under the manager and compare. Raises `Different`."""
    vae = build_vae(name)
    request = request_for(vae.first_stage_model, "vae", form)
    vae.patcher = adopt(vae.patcher, name="vae", kind="vae", request=request)
    results = [run_vae(name, vae) for _ in ATTEMPTS]
    cast = check_plan(vae.patcher, form)
    del vae
    comfy.model_management.unload_all_models()
    check(results, vae_reference(name, cast))


def vae_reference(name: str, cast: frozenset[str]) -> Tensor:
    """Return what core's own load gives, with weights that went through eight bits; made once."""
    key = (name, cast)
    if key not in vae_references:
        vae = build_vae(name)
        pass_through_eight_bits(vae.first_stage_model, cast)
        result = run_vae(name, vae)
        del vae
        comfy.model_management.unload_all_models()
        refuse_nothing(result)
        if cast:
            refuse_same(result, vae_reference(name, frozenset()), "eight bits")
        vae_references[key] = result
    return vae_references[key]


vae_references: dict[tuple[str, frozenset[str]], Tensor] = {}


@contextlib.contextmanager
def clean_host() -> Iterator[None]:
    """Start and end with nothing loaded, no races, and nothing left on the simulated devices."""
    simdevice = sys.modules["highwater_test_simdevice"]
    gc.collect()
    gc.disable()
    simdevice.races()
    try:
        yield
        races = simdevice.races()
        if races:
            raise Different(f"{len(races)} races, the first: {races[0]}")
    finally:
        gc.enable()
        comfy.model_management.unload_all_models()
        gc.collect()


def cell(name: str, mode: str) -> str:
    architecture = (ARCHITECTURES | GUIDED).get(name)
    if mode in ("LoRA", "ControlNet") and name not in ARCHITECTURES:
        return "-"
    if mode == "ControlNet" and ARCHITECTURES[name].control is None:
        return "-"
    has_control = mode == "ControlNet" or name in GUIDED
    forms = [form for form in FORMS if form != "split and streamed"] if mode in ("LoRA", "ControlNet") else [mode]
    for form in forms:
        where = f" ({form})" if len(forms) > 1 else ""
        try:
            with clean_host():
                if architecture is not None:
                    compare(architecture, form, has_lora=mode == "LoRA", has_control=has_control)
                else:
                    compare_vae(name, form)
        except Nothing as what:
            return f"- ({what})"
        except (DoesNotFit, InvalidInput, UnsafeState) as error:
            return f"refused{where}: {error}"
        except Different as error:
            return f"FAILED{where}: {error}"
        except Exception as error:
            traceback.print_exc()
            return f"FAILED{where}: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"[:300]
    return "equal"
