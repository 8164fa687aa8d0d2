"""A custom node pack that measures inside ComfyUI, where the device and the sampler are: a node and three routes.

It runs beside any loader, core's or ours, and imports nothing of ours but the file that measures.
"""

from __future__ import annotations

import importlib.util
import sys
import threading
import time
from pathlib import Path
from typing import Any

import comfy.model_management as model_management
import torch
from aiohttp import web
from server import PromptServer


def load_worker() -> Any:
    """Import `gpu_worker.py` by its path: the pack's own name is not known here."""
    spec = importlib.util.spec_from_file_location(
        "highwater_gpu_worker", Path(__file__).resolve().parents[2] / "gpu_worker.py"
    )
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


worker = load_worker()


class Card:
    """The device, what other programs are said to hold of it, and the peak since the last question."""

    def __init__(self) -> None:
        self.device = model_management.get_torch_device()
        self.meter = worker.Meter(self.device)
        self.ballast: torch.Tensor | None = None
        self.peak_bytes = 0
        self.stopped = threading.Event()
        self.thread: threading.Thread | None = None
        self.steps: dict[str, Any] = {}

    def leave(self, free_bytes: int) -> int:
        """Fill the device until so many bytes are free, or not at all for a negative number; returns what is free."""
        self.ballast = None
        self.meter.synchronize()
        self.meter.module.empty_cache()
        free = int(self.meter.module.mem_get_info(self.device)[0])
        if 0 <= free_bytes < free:
            with torch.inference_mode(False):
                self.ballast = torch.empty(free - free_bytes, dtype=torch.uint8, device=self.device)
        return int(self.meter.module.mem_get_info(self.device)[0])

    def watch(self) -> None:
        """Ask the driver again and again, from now on."""
        self.stop()
        self.steps = {}
        self.peak_bytes = self.held_bytes()
        self.stopped.clear()
        self.thread = threading.Thread(target=self.poll, daemon=True)
        self.thread.start()

    def poll(self) -> None:
        while not self.stopped.wait(worker.POLL_S):
            self.peak_bytes = max(self.peak_bytes, self.held_bytes())

    def stop(self) -> None:
        self.stopped.set()
        if self.thread is not None:
            self.thread.join()
            self.thread = None

    def held_bytes(self) -> int:
        """Return what the host holds: what is used beside the ballast and what was before anything was loaded."""
        ballast = 0 if self.ballast is None else self.ballast.numel()
        return self.meter.used_bytes() - self.meter.base_bytes - ballast

    def copied_bytes(self, step: Any) -> tuple[int | None, float | None]:
        """Make a step; returns the bytes that it copied to the device, and how much of that ran beside kernels."""
        simulated = sys.modules.get("highwater_test_simdevice")
        if simulated is None:
            return worker.watch_copies(step, self.meter)
        before = simulated.stats(self.device.index or 0).h2d_bytes
        step()
        self.meter.synchronize()
        return simulated.stats(self.device.index or 0).h2d_bytes - before, None


card: list[Card] = []


def the_card() -> Card:
    if not card:
        card.append(Card())
    return card[0]


class GpuMeasure:
    """Times the steps of the sampler behind it, from the second on; or counts the copies of the second."""

    INPUT_TYPES = classmethod(
        lambda cls: {
            "required": {
                "model": ("MODEL",),
                "num_steps": ("INT", {"default": 4}),
                "counts_copies": ("BOOLEAN", {"default": False}),
                "run": ("INT", {"default": 0}),
            }
        }
    )
    RETURN_TYPES = ("MODEL",)
    FUNCTION = "patch"
    CATEGORY = "test"

    def patch(self, model: Any, num_steps: int, counts_copies: bool, run: int) -> tuple[Any]:
        patched = model.clone()
        on = the_card()
        number, begin_s = 0, 0.0

        def measured(apply_model: Any, arguments: Any) -> Any:
            nonlocal number, begin_s
            number += 1
            outputs = []

            def step() -> None:
                outputs.append(apply_model(arguments["input"], arguments["timestep"], **arguments["c"]))

            if number == 2:
                on.meter.synchronize()
                begin_s = time.perf_counter()
            if number == 2 and counts_copies:
                on.steps["copied_bytes"], on.steps["overlap"] = on.copied_bytes(step)
            else:
                step()
            if number == num_steps > 1 and not counts_copies:
                on.meter.synchronize()
                on.steps["s_per_step"] = (time.perf_counter() - begin_s) / (num_steps - 1)
            return outputs[0]

        patched.set_model_unet_function_wrapper(measured)
        on.steps["patcher"] = type(patched).__name__
        return (patched,)


@PromptServer.instance.routes.post("/highwater_gpu/leave")
async def leave(request: web.Request) -> web.Response:
    return web.json_response({"free_bytes": the_card().leave((await request.json())["free_bytes"])})


@PromptServer.instance.routes.post("/highwater_gpu/watch")
async def watch(request: web.Request) -> web.Response:
    the_card().watch()
    return web.json_response({})


@PromptServer.instance.routes.get("/highwater_gpu/seen")
async def seen(request: web.Request) -> web.Response:
    """What was seen since the last ``watch``, which ends here."""
    the_card().stop()
    return web.json_response({**the_card().steps, "peak_bytes": the_card().peak_bytes})


NODE_CLASS_MAPPINGS = {"GpuMeasure": GpuMeasure}
