"""Names in workflows become paths in the host's folders, or a line that says which file is not there."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from PIL import Image

from highwater.headless.comfy_stub import comfy_api, folder_paths

comfy_api.install()
from highwater.nodes.workflow_reading.model_paths import find_files, find_loras, image_size  # noqa: E402
from highwater.nodes.workflow_reading.reading import read_workflow  # noqa: E402


@pytest.fixture
def models(tmp_path: Path) -> Iterator[Path]:
    before = folder_paths.models_directory, folder_paths.output_directory
    folder_paths.configure(models=tmp_path / "models", output=tmp_path / "output")
    yield tmp_path / "models"
    folder_paths.models_directory, folder_paths.output_directory = before


def touch(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()
    return path.resolve()


def graph() -> dict[str, Any]:
    text_encoders = {"clip_name1": "l.safetensors", "clip_name2": "t5.safetensors"}
    loras = {"model": ["1", 0], "clip": ["2", 0], "lora_name": "a.safetensors"}
    return {
        "1": {"class_type": "UnetLoaderGGUF", "inputs": {"unet_name": "flux/dev-Q8_0.gguf"}},
        "2": {"class_type": "DualCLIPLoader", "inputs": text_encoders},
        "3": {"class_type": "VAELoader", "inputs": {"vae_name": "taef1"}},
        "4": {"class_type": "LoraLoader", "inputs": loras},
        "5": {"class_type": "CLIPTextEncode", "inputs": {"clip": ["4", 1], "text": "x"}},
        "6": {"class_type": "EmptyLatentImage", "inputs": {"width": 64, "height": 64}},
        "7": {"class_type": "KSampler", "inputs": {"model": ["4", 0], "positive": ["5", 0], "negative": ["5", 0],
                                                   "latent_image": ["6", 0], "cfg": 1, "steps": 1}},
        "8": {"class_type": "VAEDecode", "inputs": {"samples": ["7", 0], "vae": ["3", 0]}},
        "9": {"class_type": "SaveImage", "inputs": {"images": ["8", 0]}},
    }  # fmt: skip


def test_files_are_found_in_the_folders_of_their_kinds(models: Path) -> None:
    flux = touch(models / "unet/flux/dev-Q8_0.gguf")
    first = touch(models / "clip/l.safetensors")
    vae = [touch(models / f"vae_approx/taef1_{part}.pth") for part in ("decoder", "encoder")]
    lora = touch(models / "loras/a.safetensors")
    found = read_workflow(graph())
    files = {model.kind: find_files(model) for model in found.models}
    assert (files["diffusion"].paths, files["diffusion"].missing) == ((flux,), ())
    assert list(files["vae"].paths) == vae
    assert files["text"].paths == (first,)
    assert files["text"].missing == ("node 2 (DualCLIPLoader): 't5.safetensors' is not in the folder text_encoders",)
    assert [find_loras(model.loras).paths for model in found.models if model.kind == "diffusion"] == [(lora,)]


@pytest.mark.parametrize("name", ["", "none.safetensors", "../../secret", "a\0b", "x" * 5000, "/etc/hosts", "."])
def test_names_that_no_file_has_are_one_line(models: Path, name: str) -> None:
    touch(models.parent / "secret")
    for class_type, widget in (
        ("UNETLoader", "unet_name"),
        ("VAELoader", "vae_name"),
        ("HighwaterLoadPipeline", "pipeline"),
    ):
        loader = {"class_type": class_type, "inputs": {widget: name, "profile": "auto", "precision": "as stored"}}
        for model in read_workflow({"1": loader}).models:
            files = find_files(model)
            assert not files.paths and len(files.missing) == len(model.files)
            assert all("\n" not in line for line in files.missing)


def test_a_pipeline_is_a_folder(models: Path) -> None:
    touch(models / "diffusers/mine/model_index.json")
    loader = {"class_type": "HighwaterLoadPipeline", "inputs": {"pipeline": "mine", "profile": "auto"}}
    (model,) = read_workflow({"1": loader}).models
    assert find_files(model).paths == ((models / "diffusers/mine").resolve(),)


def test_images_have_the_size_in_which_they_are_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    host = ModuleType("folder_paths")
    host.get_annotated_filepath = lambda name: str(tmp_path / name)  # type: ignore[attr-defined]
    assert image_size("plain.png") is None, "the stub has no input folder"
    monkeypatch.setitem(sys.modules, "folder_paths", host)
    image = Image.new("RGB", (30, 20))
    image.save(tmp_path / "plain.png")
    turned = Image.Exif()
    turned[0x0112] = 6
    image.save(tmp_path / "turned.jpg", exif=turned)
    (tmp_path / "broken.png").write_bytes(b"\x89PNG\r\n\x1a\n")
    assert image_size("plain.png") == (30, 20)
    assert image_size("turned.jpg") == (20, 30)
    assert image_size("broken.png") is image_size("none.png") is None
