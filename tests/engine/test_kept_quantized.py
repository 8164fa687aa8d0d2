"""`load_quantized`: a file in a storage form is made once beside the model's, and anew when that has changed."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from highwater.memory import load_model, load_quantized, load_weights, manage, quantize_file
from highwater.memory.errors import InvalidInput
from highwater.tests.engine.scenarios.test_quantized_files import WORDS, Net, X


@pytest.fixture
def path(tmp_path: Path) -> Path:
    torch.manual_seed(1)
    save_file(Net().state_dict(), tmp_path / "model.safetensors")
    return tmp_path / "model.safetensors"


def versions(folder: Path) -> dict[str, int]:
    return {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}


@torch.no_grad()
@pytest.mark.parametrize("word", WORDS)
def test_the_first_call_makes_the_file_and_others_read_it(path: Path, word: str, machine: Any) -> None:
    quantize_file(path, path.with_name("wanted.safetensors"), word)
    wanted = load_model(path.with_name("wanted.safetensors"), Net)
    load_weights(wanted)
    done: list[tuple[int, int]] = []
    load_quantized(path, word, Net, progress=lambda *told: done.append(told))
    before = versions(path.parent)
    assert done and f"model-{word}.safetensors" in before
    done.clear()
    with machine(4) as manager:
        model = load_quantized(path, WORDS[word], Net, progress=lambda *told: done.append(told))
        with manage({"diffusion": model}, manager=manager, placement="gpu:0:disk"):
            assert torch.equal(model(X).cpu(), wanted(X))
    assert not done and versions(path.parent) == before


@torch.no_grad()
def test_it_is_made_anew_when_the_model_or_what_is_asked_for_has_changed(path: Path) -> None:
    def load(**asked: Any) -> torch.Tensor:
        model = load_quantized(path, "int8", Net, **asked)
        load_weights(model)
        return model(X)

    first = load()
    excluded = load(exclude=["up"])
    assert not torch.equal(excluded, first)
    assert torch.equal(load(), first)
    torch.manual_seed(2)
    save_file(Net().state_dict(), path)
    os.utime(path, ns=(1, 1))
    second = load()
    assert not torch.equal(second, first)
    assert torch.equal(load(), second)


@pytest.mark.parametrize("content", ["another file", "ours, by hand"])
def test_a_file_of_that_name_that_it_has_not_made_is_never_replaced(path: Path, content: str) -> None:
    target = path.with_name("model-int8.safetensors")
    target.write_text(content)
    if content == "ours, by hand":
        target.unlink()
        quantize_file(path, target, "int8", exclude=["up"])
    before = target.read_bytes()
    said = r"model-int8\.safetensors: was not made by load_quantized.*load_model"
    with pytest.raises(InvalidInput, match=said) as told:
        load_quantized(path, "int8", Net)
    assert "\n" not in str(told.value)
    assert target.read_bytes() == before


def test_bad_input_leaves_nothing(path: Path) -> None:
    for form, asked in (("int7", {}), ("int8", {"exclude": "up"}), ("int8", {"exclude": ["("]})):
        with pytest.raises(InvalidInput):
            load_quantized(path, form, Net, **asked)
    assert [each.name for each in path.parent.iterdir()] == [path.name]


@torch.no_grad()
def test_threads_that_load_it_at_once_make_it_once(path: Path) -> None:
    made: list[int] = []

    def load(_: int) -> torch.Tensor:
        progress = lambda done, whole: made.append(done) if done == whole else None  # noqa: E731
        model = load_quantized(path, "qint4", Net, progress=progress)
        load_weights(model)
        return model(X)

    with ThreadPoolExecutor(4) as threads:
        first, *others = threads.map(load, range(4))
    assert all(torch.equal(first, other) for other in others)
    assert len(made) == 1
