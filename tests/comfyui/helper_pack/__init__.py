"""A custom node pack for the tests only: seeded conditioning, exact outputs, trouble on purpose, occupied memory."""

from __future__ import annotations

import collections
import faulthandler
import functools
import gc
import hashlib
import os
import runpy
import signal
import sys
import threading
import time
import types
import zlib
from pathlib import Path
from typing import Any

import comfy.model_management as model_management
import comfy.model_patcher as model_patcher
import folder_paths
import safetensors.torch
import torch
from aiohttp import web
from server import PromptServer

from .deeds import TestDeeds
from .gguf_like import TestGGUFModel, TestGGUFText
from .lifeline import end_with_standard_input
from .nunchaku_like import TestNunchakuModel
from .other_packs import TestAlongside, TestGuide, TestItemHalves, TestPerPicture
from .recording import TestRecord, TestRecordControl, TestRecorded

end_with_standard_input()

if "highwater_test_fake_cuda" in sys.modules:
    sys.modules["highwater_test_fake_cuda"].replace_in_core()

# The harness asks for all stacks when it waits in vain.
faulthandler.register(signal.SIGUSR1, all_threads=True)


class TestHalves:
    """Makes core compute the conditionings of a step one after the other, each alone."""

    INPUT_TYPES = classmethod(lambda cls: {"required": {"model": ("MODEL",)}})
    RETURN_TYPES = ("MODEL",)
    FUNCTION = "patch"
    CATEGORY = "test"

    def patch(self, model: Any) -> tuple[Any]:
        def one_by_one(executor: Any, inner: Any, conds: Any, *args: Any, **kwargs: Any) -> list[Any]:
            alone = [
                [cond if place == index else None for place, cond in enumerate(conds)] for index in range(len(conds))
            ]
            return [executor(inner, each, *args, **kwargs)[index] for index, each in enumerate(alone)]

        patched = model.clone()
        patched.add_wrapper_with_key("calc_cond_batch", "test", one_by_one)
        return (patched,)


class TestConditioning:
    """Random conditioning instead of a text encoder; ``run`` does nothing but make the prompt a new one."""

    INPUT_TYPES = classmethod(
        lambda cls: {
            "required": {
                "seed": ("INT", {"default": 0}),
                "num_tokens": ("INT", {"default": 8}),
                "width": ("INT", {"default": 64, "max": 1 << 16}),
                "pooled_width": ("INT", {"default": 768}),
            },
            "optional": {"run": ("INT", {"default": 0})},
        }
    )
    RETURN_TYPES = ("CONDITIONING",)
    FUNCTION = "make"
    CATEGORY = "test"

    def make(self, seed: int, num_tokens: int, width: int, pooled_width: int, run: int = 0) -> tuple[Any]:
        generator = torch.Generator().manual_seed(seed)
        tokens = torch.randn(1, num_tokens, width, generator=generator)
        pooled = torch.randn(1, pooled_width, generator=generator)
        return ([[tokens, {"pooled_output": pooled}]],)


class TestKeep:
    """Writes every tensor in what comes in to a file in the output folder, bit for bit."""

    INPUT_TYPES = classmethod(lambda cls: {"required": {"value": ("*",), "name": ("STRING", {"default": "kept"})}})
    RETURN_TYPES = ()
    FUNCTION = "keep"
    CATEGORY = "test"
    OUTPUT_NODE = True

    def keep(self, value: Any, name: str) -> dict[str, Any]:
        tensors = {key: tensor.contiguous() for key, tensor in tensors_in(value)}
        safetensors.torch.save_file(tensors, os.path.join(folder_paths.get_output_directory(), f"{name}.safetensors"))
        return {"ui": {"kept": [name]}}


def tensors_in(value: Any, name: str = "value") -> Any:
    if isinstance(value, torch.Tensor):
        yield name, value.detach().cpu().clone()
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from tensors_in(item, f"{name}.{key}")
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from tensors_in(item, f"{name}.{index}")
    elif type(value).__name__ == "Output":  # what CLIP vision returns
        yield from tensors_in(vars(value), name)


class TestTrouble:
    """Makes something happen at the n-th call of a sub-module, in the middle of a block; ``greedy`` at each of them."""

    INPUT_TYPES = classmethod(
        lambda cls: {
            "required": {
                "model": ("MODEL",),
                "kind": (["interrupt", "wait for interrupt", "error", "out of memory", "greedy"],),
                "module": ("STRING", {"default": "diffusion_model.single_blocks.1.linear2"}),
                "call": ("INT", {"default": 2}),
            },
            "optional": {"num_bytes": ("INT", {"default": 0, "max": 1 << 40})},
        }
    )
    RETURN_TYPES = ("MODEL",)
    FUNCTION = "patch"
    CATEGORY = "test"

    def patch(self, model: Any, kind: str, module: str, call: int, num_bytes: int = 0) -> tuple[Any]:
        patched = model.clone()
        num_calls = 0

        def trouble(*_: Any) -> None:
            nonlocal num_calls
            num_calls += 1
            if kind == "greedy":
                torch.empty(num_bytes, dtype=torch.uint8, device=patched.load_device)
            elif num_calls == call:
                make_trouble(kind, patched.load_device)

        def with_trouble(apply_model: Any, arguments: Any) -> Any:
            handle = apply_model.__self__.get_submodule(module).register_forward_pre_hook(trouble)
            try:
                return apply_model(arguments["input"], arguments["timestep"], **arguments["c"])
            finally:
                handle.remove()

        patched.set_model_unet_function_wrapper(with_trouble)
        return (patched,)


class TestShort:
    """Lets an allocation of a call of the model fail, from outside: by its number, or because little is left free."""

    INPUT_TYPES = classmethod(
        lambda cls: {
            "required": {
                "model": ("MODEL",),
                "call": ("INT", {"default": 2}),
                "nth": ("INT", {"default": 0, "max": 1 << 20}),
                "free_bytes": ("INT", {"default": -1, "min": -1, "max": 1 << 50}),
                "taking_part": (["nothing", "wrapper", "function wrapper", "hook", "patch", "method"],),
            }
        }
    )
    RETURN_TYPES = ("MODEL",)
    FUNCTION = "patch"
    CATEGORY = "test"

    def patch(self, model: Any, call: int, nth: int, free_bytes: int, taking_part: str) -> tuple[Any]:
        patched = model.clone()
        simdevice = sys.modules["highwater_test_simdevice"]
        index = patched.load_device.index or 0
        num_calls = 0

        def shorten(executor: Any, *args: Any, **kwargs: Any) -> Any:
            nonlocal num_calls
            num_calls += 1
            diffusion_model = executor.class_obj.diffusion_model
            handle = None
            if taking_part == "hook":
                handle = diffusion_model.single_blocks[1].register_forward_hook(lambda *_: None)
            if taking_part == "method":
                diffusion_model.forward_orig = diffusion_model.forward_orig
            if num_calls == call:
                if nth:
                    simdevice.fail_alloc(index, nth)
                if free_bytes >= 0:
                    free = model_management.get_free_memory(patched.load_device)
                    simdevice.occupy(index, max(0, int(free) - free_bytes))
            try:
                return executor(*args, **kwargs)
            finally:
                simdevice.fail_alloc(index, 0)
                if free_bytes >= 0:
                    simdevice.occupy(index, 0)
                if handle is not None:
                    handle.remove()
                if taking_part == "method":
                    del diffusion_model.forward_orig

        patched.add_wrapper_with_key("apply_model", "test", shorten)
        if taking_part == "wrapper":
            patched.add_wrapper_with_key("diffusion_model", "test", lambda executor, *args, **kw: executor(*args, **kw))
        if taking_part == "function wrapper":
            patched.set_model_unet_function_wrapper(
                lambda apply_model, given: apply_model(given["input"], given["timestep"], **given["c"])
            )
        if taking_part == "patch":
            patched.set_model_patch(lambda given: given, "post_input")
        return (patched,)


class TestShortVAE:
    """Lets an allocation of the first calls of a VAE's decoder fail, from outside."""

    INPUT_TYPES = classmethod(
        lambda cls: {
            "required": {
                "vae": ("VAE",),
                "calls": ("INT", {"default": 1}),
                "nth": ("INT", {"default": 3}),
                "run": ("INT", {"default": 0}),
            }
        }
    )
    RETURN_TYPES = ("VAE",)
    FUNCTION = "shorten"
    CATEGORY = "test"

    def shorten(self, vae: Any, calls: int, nth: int, run: int) -> tuple[Any]:
        simdevice = sys.modules["highwater_test_simdevice"]
        decoder = vae.first_stage_model.taesd_decoder
        left = calls

        def fail(*_: Any) -> None:
            nonlocal left
            left -= 1
            if left >= 0:
                simdevice.fail_alloc(vae.device.index or 0, nth)
            if left == 0:
                handle.remove()

        handle = decoder.register_forward_pre_hook(fail)
        return (vae,)


def make_trouble(kind: str, device: torch.device) -> None:
    if kind == "error":
        raise RuntimeError("trouble on purpose")
    if kind == "interrupt":
        raise model_management.InterruptProcessingException
    if kind == "out of memory":
        if device.type == "cpu":
            raise torch.OutOfMemoryError("trouble on purpose")
        torch.empty(1 << 50, dtype=torch.uint8, device=device)
    PromptServer.instance.send_sync("highwater_test.waiting", {})
    until_s = time.monotonic() + 600
    while time.monotonic() < until_s:
        model_management.throw_exception_if_processing_interrupted()
        time.sleep(0.005)
    raise RuntimeError("nobody interrupted")


class TestFlip:
    """Flips a bit of a managed model's weight in host memory as it begins to compute; core's own load has none."""

    INPUT_TYPES = classmethod(
        lambda cls: {
            "required": {
                "model": ("MODEL",),
                "block": ("STRING", {"default": "diffusion_model.single_blocks.1"}),
                "run": ("INT", {"default": 0}),
            }
        }
    )
    RETURN_TYPES = ("MODEL",)
    FUNCTION = "patch"
    CATEGORY = "test"

    def patch(self, model: Any, block: str, run: int) -> tuple[Any]:
        patched = model.clone()
        flipped: list[Any] = []

        def with_flip(apply_model: Any, arguments: Any) -> Any:
            hosted = getattr(apply_model.__self__, "highwater", None)
            if hosted is not None and not flipped:
                (group,) = (group for group in hosted.member.managed.groups if group.name == block)
                flipped.append(group)
                hosted.settle()
                with torch.inference_mode(False):
                    group.resting_slab[1] ^= 0x40
            return apply_model(arguments["input"], arguments["timestep"], **arguments["c"])

        patched.set_model_unet_function_wrapper(with_flip)
        return (patched,)


class TestWrite:
    """Writes a weight of a text encoder in RAM; core's own load of it has what was in the memory before."""

    INPUT_TYPES = classmethod(lambda cls: {"required": {"clip": ("CLIP",), "key": ("STRING", {"default": ""})}})
    RETURN_TYPES = ("CLIP",)
    FUNCTION = "write"
    CATEGORY = "test"

    def write(self, clip: Any, key: str) -> tuple[Any]:
        weight = clip.patcher.model.get_parameter(key)
        with torch.no_grad(), torch.inference_mode(weight.is_inference()):
            weight.fill_(0.5)
        return (clip,)


class PackedTensor(torch.Tensor):
    """As other packs keep quantized weights: bytes that only their own patcher knows to unpack."""


class PackedPatcher(model_patcher.ModelPatcher):
    """As the patcher of another pack."""


class TestForeign:
    """Makes of a model what packs with a format of their own make: weights, or a patcher, of their own class."""

    INPUT_TYPES = classmethod(lambda cls: {"required": {"model": ("MODEL",), "kind": (["weights", "patcher"],)}})
    RETURN_TYPES = ("MODEL",)
    FUNCTION = "make"
    CATEGORY = "test"

    def make(self, model: Any, kind: str) -> tuple[Any]:
        foreign = model.clone()
        if kind == "patcher":
            foreign.__class__ = PackedPatcher
        else:
            layer = foreign.model.diffusion_model.final_layer.linear
            layer.weight = torch.nn.Parameter(layer.weight.data.as_subclass(PackedTensor), requires_grad=False)
        return (foreign,)


class TestHold:
    """Takes anything and does nothing: what made it stays in the host's cache as long as prompts name it."""

    INPUT_TYPES = classmethod(lambda cls: {"required": {"value": ("*",)}})
    RETURN_TYPES = ()
    FUNCTION = "hold"
    CATEGORY = "test"
    OUTPUT_NODE = True

    def hold(self, value: Any) -> dict[str, Any]:
        return {}


class TestWeights:
    """Tells the dtype, shape and check sum of every weight of a model at rest, and which files are mapped read-only.

    A write to a weight in one of those ends the host.

    ``write`` then writes zeros to each in place, and through ``.data``.
    """

    INPUT_TYPES = classmethod(
        lambda cls: {
            "required": {"value": ("*",), "write": ("BOOLEAN", {"default": False}), "run": ("INT", {"default": 0})}
        }
    )
    RETURN_TYPES = ()
    FUNCTION = "tell"
    CATEGORY = "test"
    OUTPUT_NODE = True

    def tell(self, value: Any, write: bool, run: int) -> dict[str, Any]:
        holder = getattr(value, "control_model_wrapped", None) or value
        model = getattr(holder, "patcher", holder).model
        tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        plain = {key: inner for name, tensor in tensors.items() for key, inner in plain_tensors(name, tensor)}
        weights = {}
        for name, tensor in plain.items():
            raw = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
            weights[name] = [str(tensor.dtype), list(tensor.shape), tensor.is_contiguous(), zlib.crc32(raw)]
        if write:
            for tensor in plain.values():
                tensor.zero_()
                tensor.data.fill_(0)
        with open("/proc/self/maps") as maps:
            files = [line.split() for line in maps if line.strip().endswith(".safetensors")]
            mapped = sorted({os.path.basename(line[-1]) for line in files if "w" not in line[1]})
        return {"ui": {"weights": [weights], "mapped": mapped}}


def plain_tensors(name: str, tensor: torch.Tensor) -> Any:
    """Yield a tensor, or of a wrapper those that it is made of."""
    if not hasattr(tensor, "__tensor_flatten__"):
        yield name, tensor
        return
    for part in tensor.__tensor_flatten__()[0]:
        yield from plain_tensors(f"{name}.{part}", getattr(tensor, part))


outliving: list[Any] = []


class TestOutlive:
    """Holds the module of a patcher, and not the patcher, until it is called again."""

    INPUT_TYPES = classmethod(
        lambda cls: {"required": {"hold": ("BOOLEAN", {"default": True})}, "optional": {"model": ("MODEL",)}}
    )
    RETURN_TYPES = ()
    FUNCTION = "outlive"
    CATEGORY = "test"
    OUTPUT_NODE = True

    def outlive(self, hold: bool, model: Any = None) -> dict[str, Any]:
        outliving[:] = [model.model] if hold else []
        return {}


occupied: dict[str, torch.Tensor] = {}


class TestOccupy:
    """Holds memory of a device until it is called again: as much as leaves ``free_bytes``, or none for a negative."""

    INPUT_TYPES = classmethod(
        lambda cls: {
            "required": {
                "device": ("INT", {"default": 0}),
                "free_bytes": ("INT", {"default": -1, "min": -1, "max": 1 << 50}),
                "run": ("INT", {"default": 0}),
            }
        }
    )
    RETURN_TYPES = ()
    FUNCTION = "occupy"
    CATEGORY = "test"
    OUTPUT_NODE = True

    def occupy(self, device: int, free_bytes: int, run: int) -> dict[str, Any]:
        name = f"{model_management.get_torch_device().type}:{device}"
        occupied.pop(name, None)
        if free_bytes >= 0:
            free = model_management.get_free_memory(torch.device(name))
            with torch.inference_mode(False):
                occupied[name] = torch.empty(int(free) - free_bytes, dtype=torch.uint8, device=name)
        return {"ui": {"free": [int(model_management.get_free_memory(torch.device(name)))]}}


class TestFree:
    """Tells how much a model takes for free on each device: what is not in use, and what core's own may evict."""

    INPUT_TYPES = classmethod(lambda cls: {"required": {"model": ("MODEL",), "run": ("INT", {"default": 0})}})
    RETURN_TYPES = ()
    FUNCTION = "tell"
    CATEGORY = "test"
    OUTPUT_NODE = True

    def tell(self, model: Any, run: int) -> dict[str, Any]:
        devices = model_management.get_all_torch_devices()
        return {"ui": {"free": [int(model.get_free_memory(device)) for device in devices]}}


def describe_functions() -> dict[str, str]:
    """Return every function that hangs on a module or class of the host or of torch, with what it is made of."""
    described = {}
    for module_name, module in list(sys.modules.items()):
        if module is None or not is_watched(module_name):
            continue
        for name, value in list(vars(module).items()):
            key = f"{module_name}:{name}"
            if isinstance(value, type):
                described[key] = f"class {value.__module__}.{value.__qualname__}"
                for attribute, member in list(vars(value).items()):
                    described |= describe(f"{key}.{attribute}", member)
            else:
                described |= describe(key, value)
    return described


def is_watched(module_name: str) -> bool:
    top = module_name.partition(".")[0]
    if top in ("comfy", "comfy_execution", "comfy_api", "comfy_extras", "comfy_config", "api_server", "app", "utils"):
        return True
    if top in ("execution", "nodes", "server", "folder_paths", "node_helpers", "latent_preview", "protocol"):
        return module_name == top
    prefixes = ("torch.nn.modules", "torch.nn.functional", "torch.nn.parameter", "torch.cuda", "torch.accelerator")
    return module_name in ("torch", "torch._tensor", "safetensors.torch") or module_name.startswith(prefixes)


def describe(key: str, value: Any) -> dict[str, str]:
    """Return one line for a function, a method or a property; nothing for what holds no code."""
    value = getattr(value, "__func__", value)
    if isinstance(value, property):
        parts = {"get": value.fget, "set": value.fset}
        return {k: v for part, function in parts.items() for k, v in describe(f"{key}.{part}", function).items()}
    if isinstance(value, types.BuiltinFunctionType):
        return {key: f"builtin {value.__module__}.{value.__qualname__}"}
    if not isinstance(value, types.FunctionType):
        return {}
    code = value.__code__
    digest = hashlib.sha256(code.co_code + repr(code.co_names).encode()).hexdigest()[:16]
    place = f"{os.path.basename(code.co_filename)}:{code.co_firstlineno}"
    return {key: f"{value.__module__}.{value.__qualname__} {place} {digest}"}


@PromptServer.instance.routes.get("/highwater_test/functions")
async def send_functions(request: web.Request) -> web.Response:
    return web.json_response(describe_functions())


def managers() -> list[Any]:
    """Return the pack's manager, if it has one by now."""
    modules = [m for name, m in list(sys.modules.items()) if name.endswith("highwater.memory.manager.default")]
    return [manager for manager in (module.existing_manager() for module in modules) if manager is not None]


@PromptServer.instance.routes.post("/highwater_test/keep")
async def keep(request: web.Request) -> web.Response:
    """Evict the steered components of a name last, or in the usual order."""
    asked = await request.json()
    for manager in managers():
        named = [component for component in manager.steered.components() if component.name == asked["name"]]
        manager.commands.keep(named, asked["kept"])
    return web.json_response({})


@PromptServer.instance.routes.post("/highwater_test/read_in_unload")
async def read_in_unload(request: web.Request) -> web.Response:
    """Let another thread read the report in the middle of the next unload of each model that core has loaded."""

    def make_reading(unpatch: Any) -> Any:
        def reading(*arguments: Any, **named: Any) -> None:
            unpatch(*arguments, **named)
            thread = threading.Thread(target=lambda: [manager.report() for manager in managers()])
            thread.start()
            thread.join()

        return reading

    for loaded in model_management.current_loaded_models:
        loaded.model.unpatch_model = make_reading(loaded.model.unpatch_model)
    return web.json_response({})


@PromptServer.instance.routes.post("/highwater_test/forget_needs")
async def forget_needs(request: web.Request) -> web.Response:
    """Delete what the pack learned of models' needs: tests share a host, and some run it out of memory."""
    for manager in managers():
        with manager.exclusive():
            needs = manager.capacity.needs
            speeds = manager.capacity.speeds
            measured = (speeds.known, speeds.changed, speeds.written, *speeds.left.values())
            for learned in (needs.known, needs.last, needs.changed, *measured):
                learned.clear()
            manager.capacity.outdate_plans()
    return web.json_response({})


calls: list[str] = []


def count_calls() -> None:
    """Count, from now on, the texts that are read as a profile or a placement, and the plans that are made."""
    for module_name, name in (
        ("options.placement", "Scanner.__init__"),
        ("manager.module_plans", "plan_request"),
        ("manager.live_capacity", "replan"),
    ):
        (module,) = (m for n, m in list(sys.modules.items()) if n.endswith(f"highwater.memory.{module_name}"))
        *owners, attribute = name.split(".")
        owner = functools.reduce(getattr, owners, module)
        setattr(owner, attribute, counted(getattr(owner, attribute), name.partition(".")[0]))


def counted(function: Any, name: str) -> Any:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        calls.append(f"{name} {kwargs['what']}" if "what" in kwargs else name)
        return function(*args, **kwargs)

    return call


@PromptServer.instance.routes.get("/highwater_test/calls")
async def send_calls(request: web.Request) -> web.Response:
    """What was called since this was last asked; nothing is counted before the first time."""
    if not counting:
        counting.append(True)
        count_calls()
    found = collections.Counter(calls)
    calls.clear()
    return web.json_response(found)


counting: list[bool] = []


@PromptServer.instance.routes.get("/highwater_test/loaded")
async def send_loaded(request: web.Request) -> web.Response:
    """What core's list of loaded models refers to: its patcher, the patcher's model, and the model that was loaded.

    From the first time on Python collects no cycles by itself: what only that would free shows up.
    """
    gc.disable()
    entries = []
    for loaded in model_management.current_loaded_models:
        patcher, real = loaded.model, loaded.real_model and loaded.real_model()
        entries.append(
            {
                "device": str(loaded.device),
                "patcher": type(patcher).__name__ if patcher is not None else None,
                "model": type(real).__name__ if real is not None else None,
                "same": patcher is not None and patcher.model is real,
                "outlives": any(real is module for module in outliving),
            }
        )
    return web.json_response(entries)


@PromptServer.instance.routes.get("/highwater_test/held")
async def send_held(request: web.Request) -> web.Response:
    """The resident bytes of the process, and if asked for how many objects of each kind it holds."""
    from highwater_test_held import count_held, resident_bytes  # where the stand-in for `torch_npu` is

    held = count_held() if "count" in request.query else {}
    return web.json_response({**resident_bytes(), "held": held})


@PromptServer.instance.routes.post("/highwater_test/shorten_record")
async def shorten(request: web.Request) -> web.Response:
    from highwater_test_held import shorten_record

    asked = await request.json()
    for manager in managers():
        with manager.exclusive():
            shorten_record(manager.event_log, asked["num_entries"])
    return web.json_response({})


# The example for authors of other packs is a pack of its own.
EXAMPLE = Path(__file__).resolve().parents[3] / "docs" / "frame_cache" / "__init__.py"

NODE_CLASS_MAPPINGS = {
    **runpy.run_path(str(EXAMPLE))["NODE_CLASS_MAPPINGS"],
    "TestAlongside": TestAlongside,
    "TestConditioning": TestConditioning,
    "TestDeeds": TestDeeds,
    "TestFlip": TestFlip,
    "TestForeign": TestForeign,
    "TestFree": TestFree,
    "TestGGUFModel": TestGGUFModel,
    "TestGGUFText": TestGGUFText,
    "TestGuide": TestGuide,
    "TestHalves": TestHalves,
    "TestHold": TestHold,
    "TestItemHalves": TestItemHalves,
    "TestKeep": TestKeep,
    "TestNunchakuModel": TestNunchakuModel,
    "TestOccupy": TestOccupy,
    "TestOutlive": TestOutlive,
    "TestPerPicture": TestPerPicture,
    "TestRecord": TestRecord,
    "TestRecordControl": TestRecordControl,
    "TestRecorded": TestRecorded,
    "TestShort": TestShort,
    "TestShortVAE": TestShortVAE,
    "TestTrouble": TestTrouble,
    "TestWeights": TestWeights,
    "TestWrite": TestWrite,
}
