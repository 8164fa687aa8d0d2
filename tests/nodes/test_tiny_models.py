"""Tiny models that a loader makes when it first uses them: listed always, made once, complete or not at all."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from safetensors import safe_open

from highwater.headless.comfy_stub import comfy_api, folder_paths
from highwater.memory.errors import InvalidInput

comfy_api.install()
from highwater.nodes import tiny_models  # noqa: E402
from highwater.nodes.comfy_models import model_files  # noqa: E402

ALL = [(folder, name) for folder in model_files.KINDS for name in tiny_models.tiny_models(folder)]
VAE = "highwater-tiny-vae.safetensors"


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    before = folder_paths.models_directory
    folder_paths.models_directory = tmp_path
    yield tmp_path
    folder_paths.models_directory = before


def test_there_is_one_for_each_loader_of_the_first_example() -> None:
    assert [folder for folder, _ in ALL] == ["diffusion_models", "text_encoders", "vae"]
    assert all(name.startswith("highwater-tiny-") and name.endswith(".safetensors") for _, name in ALL)


@pytest.mark.parametrize(("folder", "name"), ALL)
def test_a_tiny_model_is_offered_before_it_is_made_and_once_after(models: Path, folder: str, name: str) -> None:
    assert model_files.list_model_files(folder) == []
    assert model_files.model_choices(folder) == [name]
    (models / folder).mkdir()
    (models / folder / "mine.safetensors").touch()
    (models / folder / name).touch()
    assert sorted(model_files.model_choices(folder)) == sorted(["mine.safetensors", name])


@pytest.mark.parametrize(("folder", "name"), ALL)
def test_what_is_made_is_what_the_recipe_says(models: Path, folder: str, name: str) -> None:
    path = Path(model_files.model_path(folder, name))
    assert path == models / folder / name
    recipe = tiny_models.RECIPES[folder][name]
    with safe_open(path, "pt") as file:
        assert {key: tuple(file.get_slice(key).get_shape()) for key in file.keys()} == recipe.shapes()  # noqa: SIM118
        values = file.get_tensor(next(key for key, shape in recipe.shapes().items() if len(shape) > 1)).float()
    assert values.isfinite().all() and abs(values.std().item() / recipe.scale - 1) < 0.2
    megabytes = path.stat().st_size / 1e6
    assert f"{name}: {round(megabytes)} MB of random weights" in tiny_models.tiny_model_notes(folder, [name, "x"])[0]
    assert [entry.name for entry in path.parent.iterdir()] == [name]
    plain = path.parent / "plain"
    plain.touch()
    assert path.stat().st_mode == plain.stat().st_mode  # whoever may read other models may read it


def test_it_is_the_same_on_every_machine(models: Path, tmp_path: Path) -> None:
    first = Path(model_files.model_path("vae", VAE)).read_bytes()
    (models / "vae" / VAE).unlink()
    assert Path(model_files.model_path("vae", VAE)).read_bytes() == first


def test_a_file_of_that_name_is_used_as_it_is(models: Path) -> None:
    (models / "vae").mkdir()
    (models / "vae" / VAE).write_bytes(b"mine")
    assert Path(model_files.model_path("vae", VAE)).read_bytes() == b"mine"


def test_threads_that_make_it_at_once_find_it_complete(models: Path) -> None:
    sizes: list[int] = []
    threads = [
        threading.Thread(target=lambda: sizes.append(os.path.getsize(model_files.model_path("vae", VAE))))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(sizes) == 4 and len(set(sizes)) == 1
    assert [entry.name for entry in (models / "vae").iterdir()] == [VAE]


def test_a_folder_that_cannot_be_written_is_named(models: Path) -> None:
    (models / "vae").touch()  # where the folder should be, so that root cannot write it either
    with pytest.raises(InvalidInput, match=r"vae: the tiny model cannot be made: \w"):
        model_files.model_path("vae", VAE)


def test_a_name_of_no_tiny_model_makes_nothing(models: Path) -> None:
    for name in ("highwater-tiny-sd.safetensors", f"../{VAE}", VAE.upper()):
        with pytest.raises(InvalidInput, match="is not in the folder vae"):
            model_files.model_path("vae", name)
    with pytest.raises(InvalidInput, match="is not in the folder vae"):
        model_files.find_model_file("vae", VAE)  # a plan or a report makes no files
    assert list(models.rglob("*.safetensors")) == []
