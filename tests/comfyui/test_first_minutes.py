"""The first five minutes: a ComfyUI without any model, the examples, one click on Run, an image and badges."""

from __future__ import annotations

import re
from pathlib import Path

from highwater.tests.comfyui.host_process import HostFiles, HostProcess
from highwater.tests.comfyui.page_script import PageScript

DEVICE_BYTES = 1844 << 20
FIRST = "highwater-first-image"


def test_the_first_example_runs_in_a_host_without_models(
    host_files: HostFiles,
    frontend_arguments: list[str],
    in_page: PageScript,
    tmp_path: Path,
) -> None:
    """About 140 s. Examples that need models name them, and the page offers to download these."""
    (tmp_path / "no_models").mkdir()
    examples = sorted(path.stem for path in (Path(__file__).parents[2] / "workflows").glob("*.json"))
    ordered = [FIRST, *(name for name in examples if name != FIRST)]
    with HostProcess(
        host_files,
        models=tmp_path / "no_models",
        total_bytes=[DEVICE_BYTES, DEVICE_BYTES],
        arguments=frontend_arguments,
    ) as host:
        in_page.run("first_minutes.mjs", host, [*ordered])
        made = sorted(path.relative_to(host.base / "models") for path in host.base.glob("models/*/*"))
        images = sorted((host.base / "output").iterdir())
    assert [path.as_posix() for path in made] == [
        "diffusion_models/highwater-tiny-flux.safetensors",
        "text_encoders/highwater-tiny-clip-l.safetensors",
        "vae/highwater-tiny-vae.safetensors",
    ]
    assert [path.name for path in images] == ["first-image_00001_.png", "first-image_00002_.png"]


def test_tiny_models_on_a_host_without_a_gpu(host_files: HostFiles, tmp_path: Path) -> None:
    """The text encoder was listed twice there: ComfyUI warned of a memory leak."""
    (tmp_path / "no_models").mkdir()
    tiny = {"unet_name": "flux", "clip_name1": "clip-l", "vae_name": "vae"}
    request = {"profile": "auto", "precision": "as stored", "placement": "default"}
    loaders = zip(("DiffusionModel", "TextEncoder", "VAE"), tiny.items(), strict=True)
    graph = {
        kind: {
            "class_type": f"HighwaterLoad{kind}",
            "inputs": {
                widget: f"highwater-tiny-{name}.safetensors",
                **request,
                **({"type": "flux"} if kind == "TextEncoder" else {}),
            },
        }
        for kind, (widget, name) in loaders
    }
    graph |= {
        "text": {"class_type": "CLIPTextEncode", "inputs": {"clip": ["TextEncoder", 0], "text": "a fox"}},
        "latent": {"class_type": "EmptySD3LatentImage", "inputs": {"width": 64, "height": 64, "batch_size": 1}},
        "sampler": {
            "class_type": "KSampler",
            "inputs": {
                "model": ["DiffusionModel", 0],
                "positive": ["text", 0],
                "negative": ["text", 0],
                "latent_image": ["latent", 0],
                "seed": 1,
                "steps": 1,
                "cfg": 1.0,
                "sampler_name": "euler",
                "scheduler": "simple",
                "denoise": 1.0,
            },
        },
        "decode": {"class_type": "VAEDecode", "inputs": {"samples": ["sampler", 0], "vae": ["VAE", 0]}},
        "save": {"class_type": "SaveImage", "inputs": {"images": ["decode", 0], "filename_prefix": "first"}},
    }
    with HostProcess(host_files, models=tmp_path / "no_models") as host:
        for text in ("a fox", "a heron"):
            graph["text"]["inputs"]["text"] = text
            result = host.run(graph)
            assert result.outcome == "success", result.brief_error
            notes = [line for output in result.outputs.values() for line in output.get("text", [])]
            assert not notes or "highwater-tiny-vae.safetensors: 5 MB of random weights" in "".join(notes)
        assert "memory leak" not in host.log()
        (line,) = (line for line in host.log().splitlines() if re.match(r"(\[INFO\] )?Highwater \d", line))
        assert "no accelerator" in line and "dynamic VRAM is off; models stay while" in line
