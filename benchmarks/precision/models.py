"""Whole tiny models of ComfyUI's classes: our forms beside its own fp8, in a process of its Python."""

from __future__ import annotations

import itertools
import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from highwater.tests.comfyui.host_process import find_host

__all__ = ["measure_models"]

FORMS = ("fp8 scaled", "fp8 per row", "fp8 plain", "e5m2 scaled")
# The models by the names that `tests/comfyui/own_models.py` has for them.
MODELS = {"Flux": "flux", "SD3": "sd3", "Z-Image": "lumina", "Wan": "wan"}
# Of the weights: as small as those of large models, where the tiny ones' blocks change little; or so that each layer
# keeps the size of what it gets.
DEVIATIONS = {"0.02": lambda fan_in: 0.02, "1 / sqrt(inputs)": lambda fan_in: fan_in**-0.5}
CORE = "ComfyUI fp8_e4m3fn"


def measure_models(ours: str, forms: Sequence[str] = FORMS) -> tuple[list[dict[str, Any]], float]:
    """Return a row for each model, and the worst of our error over core's; NaN without ComfyUI.

    Args:
        ours: the form whose error is compared; one of ``forms``.
    """
    files = find_host()
    if files is None:
        return [{"model": "not run: no ComfyUI at ~/comfy/ComfyUI; name one in COMFYUI_DIR"}], math.nan
    with tempfile.TemporaryDirectory() as folder:
        # The script imports the package by its name, whatever its folder is called.
        Path(folder, "highwater").symlink_to(Path(__file__).parents[2])
        command = [str(files.python), __file__, str(files.directory), *forms]
        environment = os.environ | {"PYTHONPATH": folder, "PYTHONDONTWRITEBYTECODE": "1"}
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or len(found) < len(MODELS) * len(DEVIATIONS):
        raise SystemExit(f"benchmarks precision: {(done.stderr.strip().splitlines() or ['no result'])[-1]}")
    rows = [
        {
            "model": errors["model"],
            "deviation": errors["deviation"],
            **{name: f"{errors[name]:.4f}" for name in (*forms, CORE)},
            f"{ours} over ComfyUI": errors[ours] / errors[CORE],
        }
        for errors in found
    ]
    return rows, max(row[f"{ours} over ComfyUI"] for row in rows)


# -- the process in ComfyUI's Python


def measure_all(forms: Sequence[str]) -> None:
    """Print the errors of each model as a line of JSON."""
    import torch

    from highwater.headless import simdevice
    from highwater.tests.comfyui import own_models

    simdevice.install("sim", num_devices=1)
    for (label, name), (size, deviation) in itertools.product(MODELS.items(), DEVIATIONS.items()):
        torch.manual_seed(1)
        model, inputs = own_models.MODELS[name]()
        fill(model, deviation)
        inputs = inputs | {"transformer_options": own_models.options(), "control": None}
        with torch.inference_mode():
            (want,) = own_models.outputs_of(model, inputs)
            errors = {CORE: error_of(core_output(own_models, name, model, inputs), want)}
            for form in forms:
                errors[form] = error_of(our_output(own_models, model, inputs, form), want)
        print(json.dumps({"model": label, "deviation": size, **errors}), flush=True)


def fill(model: Any, deviation: Callable[[int], float]) -> None:
    """Give a model normal weights of a deviation by the number of a layer's inputs, and norms near 1.

    Buffers that a checkpoint brings, such as SD3's positions, are whatever the memory held until then.
    """
    import torch

    generator = torch.Generator().manual_seed(0)
    model.eval().requires_grad_(False)
    for name, parameter in model.named_parameters():
        fan_in = math.prod(parameter.shape[1:]) if parameter.dim() > 1 else 0
        values = torch.randn(parameter.shape, generator=generator) * (deviation(fan_in) if fan_in else 0.02)
        is_norm = parameter.dim() == 1 and name.endswith(("scale", "weight"))
        parameter.data = values + 1.0 if is_norm else values
    saved = model.state_dict()
    for name, buffer in model.named_buffers():
        if name in saved and buffer.is_floating_point():
            buffer.copy_(torch.randn(buffer.shape, generator=generator) * 0.02)


def core_output(own_models: Any, name: str, model: Any, inputs: Any) -> Any:
    """Return what core's layers compute from the same weights in fp8_e4m3fn."""
    import comfy.ops
    import torch

    before = dict(own_models.KIND)
    own_models.KIND.update(dtype=torch.float8_e4m3fn, operations=comfy.ops.manual_cast)
    try:
        narrow, _ = own_models.MODELS[name]()
    finally:
        own_models.KIND.update(before)
    narrow.load_state_dict(model.state_dict())
    (output,) = own_models.outputs_of(narrow.eval().requires_grad_(False), inputs)
    return output


def our_output(own_models: Any, model: Any, inputs: Any, form: str) -> Any:
    """Return what a copy computes on a simulated device, its blocks' weights at rest in a form."""
    import copy

    from highwater.headless import simdevice
    from highwater.memory import MemoryManager, manage

    model = copy.deepcopy(model)
    with simdevice.cluster([simdevice.SimDeviceSpec(total_bytes=256 << 20)]):
        manager = MemoryManager()
        manager.set_watermark("*", 0, 0)
        with manage({"diffusion": model}, placement="gpu:0", precision=form, manager=manager):
            (output,) = own_models.outputs_of(model, inputs)
    return output


def error_of(output: Any, want: Any) -> float:
    return float((output.double() - want.double()).norm() / want.double().norm())


if __name__ == "__main__":
    asked = sys.argv[2:]
    sys.argv[1:] = sys.argv[1:2]  # `own_models` finds ComfyUI's folder there
    measure_all(asked)
