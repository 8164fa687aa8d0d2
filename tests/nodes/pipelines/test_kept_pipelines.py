"""Weights of pipelines that a host drops: kept by the content of their files, and taken instead of reading again."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from highwater.headless.runner.output_cache import OutputCache
from highwater.headless.runner.runner import WorkflowRunner
from highwater.headless.runner.workflow import parse_workflow
from highwater.memory.manager import default
from highwater.memory.manager.manager import MemoryManager
from highwater.memory.planner import mixed_tiers
from highwater.nodes.forecast.queue_forecast import QueueForecast
from highwater.nodes.pipelines.sampling import LoadedPipeline
from highwater.tests.comfyui.test_kept_weights import pages_read
from highwater.tests.nodes.pipelines.test_pipelines import make_graph, read_pixels, rename_with_prefix, shard

MIB = 1 << 20
PROFILES = ["auto", "8MiB"]  # all blocks on the device, or streamed


class Host:
    """The headless host on a simulated device; its cache keeps the nodes of one workflow."""

    def __init__(self, manager: MemoryManager, models: Path, output: Path) -> None:
        self.manager = manager
        self.diffusers = models / "diffusers"
        cache = OutputCache(max_entries=3)
        self.runner = WorkflowRunner(manager, models_directory=models, output_directory=output, cache=cache)

    def picture(self, pipeline: str, **loaded: Any) -> torch.Tensor:
        graph = make_graph(pipeline, **{"placement": "gpu:0", **loaded})
        result = self.runner.run(parse_workflow(graph), name=pipeline)
        assert dict(self.manager.ledger.entries) == dict(self.manager.count_bytes())
        (saved,) = result.outputs["save"]["images"]
        return read_pixels(saved)

    def pictures(self, graph: dict[str, Any]) -> list[torch.Tensor]:
        """Run a graph with several pictures; return them by the ids of their nodes."""
        result = self.runner.run(parse_workflow(graph), name="several")
        assert dict(self.manager.ledger.entries) == dict(self.manager.count_bytes())
        return [read_pixels(saved) for _, shown in sorted(result.outputs.items()) for saved in shown.get("images", [])]

    def in_ram(self) -> int:
        """Return the bytes of RAM in the books."""
        entries = self.manager.ledger.entries.items()
        return sum(num_bytes for (place, _, _), num_bytes in entries if place in ("pinned", "host"))

    def events(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in self.manager.report()["events"] if event["kind"] == kind]

    def kept(self) -> dict[str, int]:
        """Return the bytes of each part that is kept."""
        parts = [part for part in self.manager.report()["components"] if part["engine"] == "kept"]
        return {part["id"]: sum(part["tiers"].values()) for part in parts}

    @property
    def pipe(self) -> Any:
        """The pipeline that is loaded."""
        values = [value for entry in self.runner.cache.entries.values() for value in entry.values]
        (loaded,) = [value for value in values if isinstance(value, LoadedPipeline)]
        return loaded.pipe

    def files(self, pipeline: str) -> list[Path]:
        return sorted((self.diffusers / pipeline).glob("*/*.safetensors"))

    @contextmanager
    def counting_pages(self, pipeline: str) -> Iterator[Callable[[], int]]:
        """Take the files out of RAM; yields what tells how many pages of them were read since."""
        files = self.files(pipeline)
        for path in files:
            with path.open("rb+") as file:
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        before = sum(map(pages_read, files))
        if before > 100:  # a file that others have mapped
            pytest.skip("NOT TESTED: this file system keeps the pages of a file that is not used")
        yield lambda: sum(map(pages_read, files)) - before


@pytest.fixture
def packs_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have all weights in RAM, as those are that no file has as they are."""
    monkeypatch.setattr(mixed_tiers, "LEAST_SPARED_BYTES", 1 << 40)


@pytest.fixture
def host(packs_all: None, bare_host: Host) -> Host:
    return bare_host


@pytest.fixture
def bare_host(sim: Any, models_directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Host]:
    models = tmp_path / "models"
    for name in ("tiny-sd", "tiny-flux"):
        shutil.copytree(models_directory / "diffusers" / name, models / "diffusers" / name)
    with sim.cluster([sim.SimDeviceSpec(total_bytes=256 * MIB)]):
        manager = MemoryManager()
        manager.set_watermark("*", 0, 0)
        manager.set_watermark("host", 0, 0)  # as if this machine had all the RAM that it needs
        monkeypatch.setattr(default, "made", [manager])
        host = Host(manager, models, tmp_path / "output")
        try:
            yield host
        finally:
            host.runner.cache.clear()
            manager.release_all()
            manager.ledger.check()


def bytes_read() -> int:
    """Return how many bytes this process has read from disks."""
    lines = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(lines["read_bytes"])


@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not tell what is mapped")
def test_what_rests_in_its_files_is_not_read_from_disks_again(bare_host: Host) -> None:
    want = bare_host.picture("tiny-sd")
    plans = [part["plan"] for part in bare_host.manager.report()["components"]]
    in_file = sum(plan["file_bytes"] for plan in plans)
    assert in_file > 8 * MIB
    bare_host.picture("tiny-flux")
    before = bytes_read()
    assert torch.equal(bare_host.picture("tiny-sd"), want)
    assert bytes_read() - before < in_file / 4, "what Python imports late, and what others push out"


@pytest.mark.parametrize("profile", PROFILES)
@pytest.mark.parametrize(("a", "b"), [("tiny-sd", "tiny-flux"), ("tiny-flux", "tiny-sd")])
def test_a_b_a_reads_the_files_of_a_once(host: Host, a: str, b: str, profile: str) -> None:
    expected = host.picture(a, profile=profile)
    host.picture(b, profile=profile)
    assert len(host.kept()) == 3 + (a == "tiny-flux")
    size = sum(path.stat().st_size for path in host.files(a))
    assert sum(host.kept().values()) > 0.9 * size
    with host.counting_pages(a) as num_pages:
        assert torch.equal(host.picture(a, profile=profile), expected)
        # Headers, and samples with what the system reads ahead of each.
        assert num_pages() * os.sysconf("SC_PAGE_SIZE") < size / 2
    assert sum(event["bytes"] for event in host.events("reuse")) > 0.9 * size


@pytest.mark.parametrize("change", ["shards", "names with a prefix"])
def test_files_of_other_forms_are_read_once_too(host: Host, change: str) -> None:
    folder = host.diffusers / "tiny-sd"
    if change == "shards":
        shard(folder / "unet" / "diffusion_pytorch_model.safetensors")
    else:
        rename_with_prefix(folder / "text_encoder" / "model.safetensors")
    expected = host.picture("tiny-sd")
    host.picture("tiny-flux")
    size = sum(path.stat().st_size for path in host.files("tiny-sd"))
    with host.counting_pages("tiny-sd") as num_pages:
        assert torch.equal(host.picture("tiny-sd"), expected)
        assert num_pages() * os.sysconf("SC_PAGE_SIZE") < size / 2
    assert sum(event["bytes"] for event in host.events("reuse")) > 0.9 * size


def test_what_is_kept_is_what_the_files_have(host: Host) -> None:
    host.picture("tiny-sd")
    host.picture("tiny-flux")
    files = {str(path): load_file(path) for path in host.files("tiny-sd")}
    for part in host.manager.kept.parts:
        for slab in part.slabs:
            for origin, view in slab.weights():
                assert torch.equal(files[origin.file.path][origin.tensor.name], view)


@pytest.mark.parametrize("weights", ["unet/diffusion_pytorch_model", "text_encoder/model"])
def test_a_file_that_was_replaced_is_read(host: Host, weights: str) -> None:
    before = host.picture("tiny-sd")
    host.picture("tiny-flux")
    path = host.diffusers / "tiny-sd" / f"{weights}.safetensors"
    times = path.stat()
    tensors = {name: tensor * 1.1 for name, tensor in load_file(path).items()}
    save_file(tensors, path.with_name("new"), metadata={"format": "pt"})
    path.with_name("new").replace(path)
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    after = host.picture("tiny-sd")
    assert not torch.equal(after, before)
    model = getattr(host.pipe, weights.partition("/")[0])
    name = next(iter(tensors))
    assert torch.equal(model.state_dict()[name].cpu(), tensors[name])


def test_a_file_that_is_replaced_as_it_is_loaded_gives_no_mix(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    from highwater.nodes.pipelines import diffusers_pipelines

    host.picture("tiny-sd")
    host.picture("tiny-flux")
    path = host.diffusers / "tiny-sd" / "unet" / "diffusion_pytorch_model.safetensors"
    tensors = {name: tensor * 1.1 for name, tensor in load_file(path).items()}
    load = diffusers_pipelines.load_pipeline
    calls = []

    def load_late(folder: Path, places: Any = None) -> Any:
        calls.append(dict(places or {}))
        if len(calls) == 1:
            save_file(tensors, path.with_name("new"), metadata={"format": "pt"})
            path.with_name("new").replace(path)
        return load(folder, places)

    monkeypatch.setattr(diffusers_pipelines, "load_pipeline", load_late)
    pipe, sources = diffusers_pipelines.load_with_sources(host.diffusers / "tiny-sd")
    assert len(calls) == 2 and calls[0] and not calls[1]
    assert all(torch.equal(weight, tensors[name]) for name, weight in pipe.unet.named_parameters())
    assert not any(source.loading for source in sources.values())


def test_another_config_reads_the_files_anew(host: Host) -> None:
    """What a library makes of the same file may differ then."""
    host.picture("tiny-sd")
    host.picture("tiny-flux")
    config = host.diffusers / "tiny-sd" / "unet" / "config.json"
    config.write_text(config.read_text(encoding="utf-8") + "\n", encoding="utf-8")
    num_reused = len(host.events("reuse"))
    host.picture("tiny-sd")
    reused = host.events("reuse")[num_reused:]
    assert len(reused) == 2 and sum(event["bytes"] for event in reused) < 6_000_000  # not the model's 26 MB
    assert len(host.kept()) == 4  # the other pipeline's


def test_weights_that_were_written_to_are_read_again(host: Host) -> None:
    expected = host.picture("tiny-sd")
    next(iter(host.pipe.unet.up_blocks.parameters())).data.mul_(2)
    host.picture("tiny-flux")
    assert torch.equal(host.picture("tiny-sd"), expected)
    host.picture("tiny-flux")
    assert torch.equal(host.picture("tiny-sd"), expected)


@pytest.mark.parametrize(
    "loaded",
    [
        {"placement": "cpu"},
        {"placement": "gpu:0:disk"},
        {"precision": "fp8 scaled"},
        {"placement": "diffusion=gpu:0,text=cpu,vae=gpu:0"},
    ],
    ids=str,
)
def test_kept_weights_under_other_choices(host: Host, loaded: dict[str, str]) -> None:
    expected = host.picture("tiny-sd", **loaded)
    host.picture("tiny-flux")
    as_stored = host.picture("tiny-sd")
    host.picture("tiny-flux")
    assert torch.equal(host.picture("tiny-sd", **loaded), expected)
    host.picture("tiny-flux")
    assert torch.equal(host.picture("tiny-sd"), as_stored)


def test_weights_that_compute_on_the_cpu_lie_in_no_kept_slab(host: Host) -> None:
    host.picture("tiny-sd")
    host.picture("tiny-flux")
    host.picture("tiny-sd", placement="cpu")
    for weight in host.pipe.unet.parameters():
        weight.data.zero_()  # as a LoRA that is fused
    assert all(slab.is_unused() for part in host.manager.kept.parts for slab in part.slabs)


def test_in_inference_mode(host: Host) -> None:
    """As ComfyUI executes nodes."""
    with torch.inference_mode():
        expected = host.picture("tiny-sd")
        host.picture("tiny-flux")
        assert torch.equal(host.picture("tiny-sd"), expected)
    assert sum(event["bytes"] for event in host.events("reuse")) > 30_000_000


def test_free_drops_them(host: Host) -> None:
    host.picture("tiny-sd")
    host.picture("tiny-flux")
    assert len(host.kept()) == 3
    host.manager.follow_free("test")
    assert host.kept() == {}
    host.runner.cache.clear()
    assert host.kept() == {} and not host.manager.ledger.entries


def test_without_most_of_the_weights_the_files_are_loaded(host: Host) -> None:
    expected = host.picture("tiny-sd")
    host.picture("tiny-flux")
    (unet,) = [part for part in host.manager.kept.parts if part.name == "unet"]
    host.manager.kept.give_up(unet, unet.slabs[: len(unet.slabs) // 2 + 1])
    assert torch.equal(host.picture("tiny-sd"), expected)
    assert sum(event["bytes"] for event in host.events("reuse")) < 6_000_000  # not of the model's 26 MB


def test_a_model_keeps_its_name(host: Host) -> None:
    names = []
    for pipeline in ("tiny-sd", "tiny-flux", "tiny-sd"):
        host.picture(pipeline)
        names.append((host.pipe.vae.config._name_or_path, host.pipe.text_encoder.config.name_or_path))
    assert names[2] == names[0]


def test_where_no_temporary_file_can_be_written_the_files_are_loaded(
    host: Host, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    expected = host.picture("tiny-sd")
    host.picture("tiny-flux")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "missing"))
    assert torch.equal(host.picture("tiny-sd"), expected)


def twice(pipeline: str, *, seed: int = 1, **second: Any) -> dict[str, Any]:
    """Return a graph that loads a pipeline twice, with different choices, and samples both."""
    graph = {}
    for name, loaded in {"one": {"profile": "8MiB"}, "two": {"profile": "9MiB", **second}}.items():
        own = make_graph(pipeline, sampled={"seed": seed}, placement="gpu:0", **loaded)
        own["sample"]["inputs"]["pipeline"] = [f"load {name}", 0]
        own["save"]["inputs"]["images"] = [f"sample {name}", 0]
        graph |= {f"{node_id} {name}": node for node_id, node in own.items()}
    return graph


def test_two_loaders_of_a_file_have_it_once_in_ram(host: Host) -> None:
    expected = host.picture("tiny-sd", profile="8MiB")
    alone = host.in_ram()
    host.runner.cache.clear()
    cache = host.runner.cache
    cache.max_entries = 6
    first, second = host.pictures(twice("tiny-sd"))
    assert torch.equal(first, expected) and torch.equal(second, expected)
    # Weights outside of blocks lie beside buffers, and each has its own.
    assert host.in_ram() < 1.3 * alone
    shared = [part for part in host.manager.report()["components"] if part["id"].startswith("shared/")]
    assert sum(sum(part["tiers"].values()) for part in shared) > 0.8 * alone

    pipes = [
        value.pipe for entry in cache.entries.values() for value in entry.values if isinstance(value, LoadedPipeline)
    ]
    weight, other = (next(iter(pipe.unet.up_blocks.parameters())) for pipe in pipes)
    before = other.detach().cpu().clone()
    weight.data.mul_(2)
    changed, unchanged = host.pictures(twice("tiny-sd", seed=2))
    assert torch.equal(other.detach().cpu(), before) and not torch.equal(weight.detach().cpu(), before)
    assert not torch.equal(changed, unchanged)
    del weight, other, pipes

    cache.max_entries = 3
    host.picture("tiny-flux")
    assert torch.equal(host.picture("tiny-sd"), expected)
    host.manager.follow_free("test")
    cache.clear()
    assert not host.manager.ledger.entries


@pytest.mark.parametrize("waits", ["tiny-sd", "tiny-flux"])
def test_parts_of_a_pipeline_that_a_waiting_workflow_names_leave_last(host: Host, waits: str) -> None:
    shutil.copytree(host.diffusers / "tiny-sd", host.diffusers / "third")
    of: dict[str, set[str]] = {}
    host.picture("tiny-sd")
    for name, following in (("tiny-sd", "tiny-flux"), ("tiny-flux", "third")):
        before = set(host.kept())
        host.picture(following)
        of[name] = set(host.kept()) - before
    assert (len(of["tiny-sd"]), len(of["tiny-flux"])) == (3, 4)
    queue = QueueForecast()
    queue.read("next", make_graph(waits, placement="gpu:0"))
    told = queue.foresee(None, None, (), ["next"], host.manager.known_components())
    host.manager.foresee(told.steps, told.num_running)
    order = [part.id for part, _ in host.manager.kept.in_order()]
    assert set(order[-len(of[waits]) :]) == of[waits]
