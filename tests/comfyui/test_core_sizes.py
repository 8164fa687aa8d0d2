"""What is read off a workflow is what ComfyUI's nodes make: sizes of latents and images, and numbers of steps."""

from __future__ import annotations

import json
import os
import random
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

from highwater.headless.comfy_stub import comfy_api
from highwater.tests.comfyui.host_process import HostFiles

comfy_api.install()
from highwater.nodes.workflow_reading.node_values import Picture, Steps  # noqa: E402
from highwater.nodes.workflow_reading.prompt_reading import PromptReader  # noqa: E402

SCRIPT = Path(__file__).with_name("core_sizes.py")
NUM_CASES = 12
Case = tuple[str, dict[str, Any], dict[str, dict[str, int]]]
# By class: pixels in a cell of its latents, and frames in one.
CELLS = {
    "EmptyFlux2LatentImage": (16, 1), "EmptyHiDreamO1LatentImage": (1, 1), "EmptyHunyuanVideo15Latent": (16, 4),
    "HunyuanVideo15ImageToVideo": (16, 4), "Wan22ImageToVideoLatent": (16, 4), "EmptyLTXVLatentVideo": (32, 8),
    "EmptyMochiLatentVideo": (8, 6),
    "EmptyCosmosLatentVideo": (8, 8), "EmptyHunyuanImageLatent": (32, 1), "EmptyChromaRadianceLatentImage": (1, 1),
}  # fmt: skip
IMAGES = ["EmptyLatentImage", "EmptySD3LatentImage", "EmptyFlux2LatentImage", "EmptyHiDreamO1LatentImage"]
VIDEOS = [
    "EmptyHunyuanLatentVideo", "EmptyHunyuanVideo15Latent", "EmptyLTXVLatentVideo", "EmptyMochiLatentVideo",
    "EmptyCosmosLatentVideo", "EmptyARVideoLatent",
]  # fmt: skip
# By class: pixels in a cell and channels of its VAE, and the images that the node may be given.
CONDITIONED: dict[str, tuple[int, int, tuple[str, ...]]] = {
    "WanImageToVideo": (8, 16, ("start_image",)),
    "WanFunControlToVideo": (8, 16, ("start_image", "control_video")),
    "Wan22FunControlToVideo": (8, 16, ("ref_image", "control_video")),
    "WanFunInpaintToVideo": (8, 16, ("start_image", "end_image")),
    "WanFirstLastFrameToVideo": (8, 16, ("start_image", "end_image")),
    "WanCameraImageToVideo": (8, 16, ("start_image",)),
    "WanVaceToVideo": (8, 16, ("control_video", "reference_image")),
    "WanHuMoImageToVideo": (8, 16, ("ref_image",)),
    "Wan22ImageToVideoLatent": (16, 48, ("start_image",)),
    "HunyuanImageToVideo": (8, 16, ("start_image",)),
    "HunyuanVideo15ImageToVideo": (16, 32, ("start_image",)),
    "Kandinsky5ImageToVideo": (8, 16, ("start_image",)),
}
MORE_WIDGETS: dict[str, dict[str, Any]] = {
    "WanVaceToVideo": {"strength": 1.0},
    "Wan22ImageToVideoLatent": {"batch_size": 1},  # without an image it makes one, whatever is asked for
    "HunyuanImageToVideo": {"guidance_type": "v1 (concat)"},
}
RESIZE_TYPES: dict[str, Callable[[random.Random], dict[str, Any]]] = {
    "scale dimensions": lambda rng: {
        "width": rng.choice([0, 300, 512]),
        "height": rng.choice([0, 128, 333]),
        "crop": "center",
    },
    "scale by multiplier": lambda rng: {"multiplier": rng.choice([0.5, 1.5, 2.0])},
    "scale longer dimension": lambda rng: {"longer_size": rng.randint(64, 700)},
    "scale shorter dimension": lambda rng: {"shorter_size": rng.randint(64, 700)},
    "scale width": lambda rng: {"width": rng.randint(64, 700)},
    "scale height": lambda rng: {"height": rng.randint(64, 700)},
    "scale total pixels": lambda rng: {"megapixels": rng.choice([0.1, 0.3])},
}


def make_cases(rng: random.Random) -> list[Case]:
    cases: list[Case] = []

    def edge(step: int = 16) -> int:
        return step * rng.randint(4, 40)

    def size(**more: int) -> dict[str, int]:
        return {"width": edge(), "height": edge(), "batch": rng.randint(1, 3), "frames": 1, **more}

    def add(name: str, inputs: dict[str, Any], **pictures: dict[str, int]) -> None:
        cases.append((name, inputs, pictures))

    for _ in range(NUM_CASES):
        for name in IMAGES:
            add(name, {"width": edge(32), "height": edge(32), "batch_size": rng.randint(1, 4)})
        frames = {"length": 1 + 24 * rng.randint(0, 4), "batch_size": rng.randint(1, 2)}
        for name in VIDEOS:
            add(name, {"width": edge(32), "height": edge(32), **frames})
        for name, (cell, channels, images) in CONDITIONED.items():
            few = {"batch": rng.randint(1, 5)}
            shown = {image: size(**few) for image in images if rng.random() < 0.6}
            widgets = {"width": edge(), "height": edge(), **frames, **MORE_WIDGETS.get(name, {})}
            prompts = {} if name == "Wan22ImageToVideoLatent" else {"positive": 0, "negative": 0}
            prompts = {"positive": 0} if name == "HunyuanImageToVideo" else prompts
            add(name, {**widgets, **prompts, "vae": [cell, channels]}, **shown)
        video = size(frames=1 + 4 * rng.randint(1, 6))
        crop = {"width": edge(8), "height": edge(8), "x": 0, "y": 0}
        widths = {"width": rng.choice([0, edge(8)]), "height": rng.choice([0, edge(8)])}
        add("LatentUpscale", {"upscale_method": "nearest-exact", "crop": "disabled", **widths}, samples=size())
        by = rng.choice([0.5, 1.25, 1.5, 2.0])
        add("LatentUpscaleBy", {"upscale_method": "nearest-exact", "scale_by": by}, samples=rng.choice([size(), video]))
        add("LatentCrop", crop, samples=size())
        add("RepeatLatentBatch", {"amount": rng.randint(1, 3)}, samples=rng.choice([size(), video]))
        add("LatentFromBatch", {"batch_index": 0, "length": rng.randint(1, 4)}, samples=size())
        add("LatentBatch", {}, samples1=size(), samples2=size())
        add("TrimVideoLatent", {"trim_amount": rng.randint(0, 1)}, samples=video)
        dim = {"dim": rng.choice("xyt")}
        add("LatentCut", {**dim, "index": 0, "amount": rng.randint(1, 9)}, samples=video)
        add("LatentConcat", dim, samples1=video, samples2=video)
        add("ImageScale", {"upscale_method": "bilinear", "crop": "disabled", **widths}, image=size())
        add("ImageScaleBy", {"upscale_method": "bilinear", "scale_by": by}, image=size())
        megapixels = {"megapixels": rng.choice([0.1, 0.25, 0.5]), "resolution_steps": 1}
        add("ImageScaleToTotalPixels", {"upscale_method": "bilinear", **megapixels}, image=size())
        largest = {"largest_size": rng.randint(64, 512)}
        add("ImageScaleToMaxDimension", {"upscale_method": "bilinear", **largest}, image=size())
        add("FluxKontextImageScale", {}, image=size())
        padding = {name: rng.randint(0, 64) for name in ("left", "top", "right", "bottom")}
        add("ImagePadForOutpaint", {**padding, "feathering": 0}, image=size())
        add("ImageCrop", crop, image=size())
        add("RepeatImageBatch", {"amount": rng.randint(1, 3)}, image=size())
        shape = rng.choice(["1:1 (Square)", "16:9 (Widescreen)", "2:3 (Portrait Photo)"])
        add("ResolutionSelector", {"aspect_ratio": shape, "megapixels": rng.choice([0.5, 1.0, 2.0]), "multiple": 8})
        for kind, widgets in RESIZE_TYPES.items():
            more = {f"resize_type.{name}": value for name, value in widgets(rng).items()}
            add("ResizeImageMaskNode", {"resize_type": kind, "scale_method": "area", **more}, input=size())
        steps = {"steps": rng.randint(1, 30)}
        add("KarrasScheduler", {**steps, "sigma_max": 14.6, "sigma_min": 0.03, "rho": 7.0})
        add("ExponentialScheduler", {**steps, "sigma_max": 14.6, "sigma_min": 0.03})
        add("Flux2Scheduler", {**steps, "width": edge(), "height": edge()})
        denoise = {"denoise": rng.choice([0.3, 0.55, 1.0])}
        add("AlignYourStepsScheduler", {"model_type": "SDXL", "steps": rng.randint(10, 30), **denoise})
        add("GITSScheduler", {"coeff": 1.2, "steps": rng.randint(4, 20), **denoise})
        add("OptimalStepsScheduler", {"model_type": "FLUX", "steps": rng.randint(3, 20), **denoise})
        add("ManualSigmas", {"sigmas": rng.choice(["1, 0.5", "1.0 0.9,.3;0", "14.6, 2, 1.5, 0.0"])})
        expression = rng.choice(["a // 2 + b", "round(a / 3)", "min(a, b) * 8", "max(a, 512) / 64"])
        add("ComfyMathExpression", {"expression": expression, "values.a": edge(), "values.b": rng.randint(1, 9)})
    return cases


def read_outputs(case: Case) -> tuple[Any, list[list[int]]]:
    """Return what the outputs of a node, and what it encodes, are read as; pictures come from nodes of given sizes."""
    name, inputs, pictures = case
    prompt: dict[str, Any] = {"node": {"class_type": name, "inputs": dict(inputs)}}
    if "vae" in inputs:
        prompt["vae"] = {"class_type": "VAELoader", "inputs": {"vae_name": "x"}}
        prompt["node"]["inputs"]["vae"] = ["vae", 0]
    for key, size in pictures.items():
        is_image = not key.startswith("samples")
        source = "EmptyImage" if is_image else "EmptyHunyuanLatentVideo"
        given = {
            "width": size["width"],
            "height": size["height"],
            "batch_size": size["batch"],
            "length": size["frames"],
        }
        prompt[key] = {"class_type": source, "inputs": given}
        prompt["node"]["inputs"][key] = [key, 0]
    prompt["end"] = {"class_type": "SaveImage", "inputs": {"images": ["node", 0]}}
    reader = PromptReader(prompt, lambda image: None)
    sizes = [use.size for use in reader.read().uses]
    return reader.outputs["node"], [[size.frames, size.height, size.width] for size in sizes if size is not None]


def agrees(case: Case, told: Any, made: Any) -> bool:
    """Whether what was read of one output is what the node made."""
    if isinstance(told, Steps):
        return made == {"steps": told.number}
    if not isinstance(told, Picture):
        return told is None or made is None or abs(told - made) < 1e-6
    size = told.size
    if size is None:
        return False
    if "image" in made:
        return made["image"][:3] == [size.batch, size.height, size.width]
    batch, _, *edges = made["latent"]
    cell, frames = CELLS.get(case[0], (8, 4))
    length = [(size.frames - 1) // frames + 1] if len(edges) == 3 else []
    return [batch, *edges] == [size.batch, *length, size.height // cell, size.width // cell]


def test_sizes_and_steps_are_those_that_the_nodes_make(host_files: HostFiles, tmp_path: Path) -> None:
    cases = make_cases(random.Random(0))
    (tmp_path / "cases.json").write_text(json.dumps(cases))
    command = [str(host_files.python), str(SCRIPT), str(tmp_path / "cases.json"), str(tmp_path / "made.json")]
    environment = os.environ | {"PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(command, cwd=host_files.directory, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    made = json.loads((tmp_path / "made.json").read_text())
    assert len(made) == len(cases)
    failed = {case[0] for case, results in zip(cases, made, strict=True) if results is None}
    assert not failed, done.stderr[-4000:]
    wrong = []
    for case, (results, encoded) in zip(cases, made, strict=True):
        outputs, encodes = read_outputs(case)
        wrong += [(case, encodes, encoded)] if encodes != encoded else []
        compared = [(told, result) for told, result in zip(outputs, results, strict=False) if told is not None]
        compared = [pair for pair in compared if isinstance(pair[0], Picture | Steps | int | float)]
        assert compared, case
        wrong += [(case, told, result) for told, result in compared if result and not agrees(case, told, result)]
    assert not wrong, f"{len(wrong)} of {len(cases)}, such as {wrong[-1]}; { ({case[0] for case, *_ in wrong}) }"
