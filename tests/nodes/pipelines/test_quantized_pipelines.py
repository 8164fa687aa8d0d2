"""Pipelines of which a file is quantized: loaded as they are, with the same pictures wherever they rest."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from highwater.headless.runner.output_cache import OutputCache
from highwater.headless.runner.runner import WorkflowRunner
from highwater.headless.runner.workflow import InvalidWorkflow, parse_workflow
from highwater.memory import quantize_file
from highwater.memory.manager import default
from highwater.memory.manager.manager import MemoryManager
from highwater.nodes.plans import plan_pipeline
from highwater.tests.nodes.pipelines.test_pipelines import make_graph, read_pixels

MIB = 1 << 20
NAME = "tiny-flux"
FILES = {
    "transformer": "transformer/diffusion_pytorch_model.safetensors",
    "text_encoder_2": "text_encoder_2/model.safetensors",
}
WORDS = ["fp8-scaled", "qint8", "qint4"]
PLACES = {
    "resident": {"placement": "gpu:0"},
    "streamed": {"placement": "gpu:0", "profile": "diffusion=8MiB"},
    "on disk": {"placement": "transformer=gpu:0:disk,text_encoder_2=gpu:0:disk,*=gpu:0"},
    "split": {"placement": "diffusion=gpu:0&gpu:1,*=gpu:0"},
}  # fmt: skip


class Host:
    def __init__(self, manager: MemoryManager, models: Path, output: Path) -> None:
        self.manager, self.folder = manager, models / "diffusers" / NAME
        cache = OutputCache(max_entries=3)
        self.runner = WorkflowRunner(manager, models_directory=models, output_directory=output, cache=cache)

    def picture(self, **loaded: Any) -> torch.Tensor:
        result = self.runner.run(parse_workflow(make_graph(NAME, **loaded)), name="quantized")
        assert dict(self.manager.ledger.entries) == dict(self.manager.count_bytes())
        (saved,) = result.outputs["save"]["images"]
        return read_pixels(saved)

    def quantize(self, component: str, word: str) -> None:
        path = self.folder / FILES[component]
        quantize_file(path, path.with_name("made"), word)
        path.with_name("made").replace(path)


@pytest.fixture
def host(sim: Any, models_directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Host]:
    shutil.copytree(models_directory / "diffusers" / NAME, tmp_path / "models" / "diffusers" / NAME)
    with sim.cluster([sim.SimDeviceSpec(total_bytes=256 * MIB)] * 2):
        manager = MemoryManager()
        manager.set_watermark("*", 0, 0)
        manager.set_watermark("host", 0, 0)
        monkeypatch.setattr(default, "made", [manager])
        host = Host(manager, tmp_path / "models", tmp_path / "output")
        try:
            yield host
        finally:
            host.runner.cache.clear()
            manager.release_all()
            manager.ledger.check()


@pytest.mark.parametrize("word", WORDS)
def test_a_quantized_file_gives_one_picture_wherever_it_rests(host: Host, word: str) -> None:
    plain = host.picture(placement="gpu:0")
    for component in FILES:
        host.quantize(component, word)
    found = {}
    for place, loaded in PLACES.items():
        found[place] = host.picture(**loaded)
        parts = {part["name"]: part for part in host.manager.report()["components"] if part["engine"] != "kept"}
        for name in FILES:
            told = [reason for reason in parts[name]["plan"]["reasons"] if "as in their file" in reason]
            assert told, (place, name, parts[name]["plan"]["reasons"])
    assert all(torch.equal(picture, found["resident"]) for picture in found.values())
    assert not torch.equal(found["resident"], plain)
    assert (found["resident"] - plain).abs().double().mean() < 40  # of 255


@pytest.mark.parametrize("word", ["int8", "qint4"])
def test_a_plan_from_headers_has_the_bytes_of_the_plan_that_runs(host: Host, word: str) -> None:
    for component in FILES:
        host.quantize(component, word)
    planned = plan_pipeline(
        host.folder, host.manager.machine(), profile="diffusion=8MiB", placement="gpu:0", precision="as stored"
    )
    host.picture(placement="gpu:0", profile="diffusion=8MiB")
    for part in host.manager.report()["components"]:
        told = planned[part["name"]]
        assert told.weight_bytes == part["plan"]["weight_bytes"]
        assert told.device_bytes["gpu:0"] == part["plan"]["shares"][0]["device_bytes"]


@pytest.mark.parametrize("word", ["int8", "qint4"])
def test_what_is_damaged_is_refused_in_one_line(host: Host, word: str) -> None:
    host.quantize("transformer", word)
    path = host.folder / FILES["transformer"]
    tensors = load_file(path)
    name = next(name for name in tensors if name.endswith((".weight_scale", "._scale")) and tensors[name].dim())
    save_file(tensors | {name: tensors[name][1:].clone()}, path)
    with pytest.raises(InvalidWorkflow) as refused:
        host.picture(placement="gpu:0")
    assert "weight" in str(refused.value) and "\n" not in str(refused.value)
