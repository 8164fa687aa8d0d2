"""What a pipeline's parts take, traced, is what a simulated device measures while the pipeline runs."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

from highwater.headless.commands.planning import plan_workflow
from highwater.memory import MemoryManager, manage
from highwater.memory.tracing import seconds_of
from highwater.nodes.described_hardware import parse_hardware
from highwater.nodes.pipelines.diffusers_pipelines import load_pipeline, load_with_sources
from highwater.nodes.pipelines.pipeline_traces import trace_pipeline
from highwater.nodes.pipelines.sampling import Sampling, sample_images

NAMES = ["tiny-flux", "tiny-sd", "tiny-wan"]
RATES = {"flops_per_s": 1e11, "memory_bytes_per_s": 1e10, "launch_s": 1e-6}


def sampling(
    width: int = 64, height: int = 64, frames: int = 1, guidance: float = 4.0, batch_size: int = 1
) -> Sampling:
    return Sampling(
        prompt="a cat",
        negative_prompt="",
        width=width,
        height=height,
        frames=frames,
        steps=1,
        guidance=guidance,
        seed=1,
        batch_size=batch_size,
    )


@pytest.fixture(scope="module")
def pipes(models_directory: Path) -> dict[str, Any]:
    return {name: load_pipeline(models_directory / "diffusers" / name) for name in NAMES}


def measure_calls(sim: ModuleType, pipe: Any, asked: Sampling) -> list[tuple[str, int, float]]:
    """Run a pipeline that a device has; return its parts' calls: which, the peak beside weights, and the seconds."""
    sim.configure([sim.SimDeviceSpec(total_bytes=1 << 36, **RATES)])
    found: list[tuple[str, int, float]] = []
    began_s = 0.0

    def begin() -> None:
        nonlocal began_s
        torch.accelerator.synchronize("sim:0")
        sim.reset_stats()
        began_s = sim.clock_s()

    def end(name: str) -> None:
        torch.accelerator.synchronize("sim:0")
        found.append((name, sim.stats(0).peak_bytes - before, sim.clock_s() - began_s))

    parts = {name: part for name, part in pipe.components.items() if isinstance(part, nn.Module)}
    decode = pipe.vae.decode

    def timed(*args: Any, **kwargs: Any) -> Any:
        begin()
        result = decode(*args, **kwargs)
        end("vae")
        return result

    handles = [part.register_forward_pre_hook(lambda *_: begin()) for name, part in parts.items()]
    handles += [part.register_forward_hook(lambda *_, name=name: end(name)) for name, part in parts.items()]
    pipe.to("sim:0")
    before = sim.stats(0).used_bytes
    pipe.vae.decode = timed
    try:
        sample_images(pipe, asked, on_step=lambda *_: None)
    finally:
        del pipe.vae.decode
        for handle in handles:
            handle.remove()
        pipe.to("cpu")
    return found


@pytest.mark.parametrize(
    "asked",
    [sampling(), sampling(128, 96), sampling(96, 128, guidance=1.0), sampling(64, 96, batch_size=3)],
    ids=["small", "larger", "without guidance", "three at once"],
)
@pytest.mark.parametrize("name", NAMES)
def test_parts_take_what_was_traced(sim, pipes: dict[str, Any], name: str, asked: Sampling) -> None:
    assert_traced(sim, pipes[name], asked)


def test_frames_take_what_was_traced(sim, pipes: dict[str, Any]) -> None:
    assert_traced(sim, pipes["tiny-wan"], sampling(64, 96, frames=5))


def assert_traced(sim: ModuleType, pipe: Any, asked: Sampling) -> None:
    traced, measured = trace_pipeline(pipe, asked), measure_calls(sim, pipe, asked)
    assert [call.part for call in traced] == [name for name, _, _ in measured]
    for call, (_, peak_bytes, seconds) in zip(traced, measured, strict=True):
        assert peak_bytes == pytest.approx(call.peak_bytes, rel=0.01)
        assert seconds == pytest.approx(seconds_of(call.trace, **RATES).total_s, rel=0.03)


@pytest.mark.parametrize("name", NAMES)
def test_a_folder_is_traced_without_its_weights(models_directory: Path, pipes: dict[str, Any], name: str) -> None:
    folder = models_directory / "diffusers" / name
    built = load_pipeline(folder, without_weights=True)
    for part, loaded in pipes[name].components.items():
        if isinstance(loaded, nn.Module):
            twin = built.components[part]
            forms = {key: (weight.shape, weight.dtype) for key, weight in loaded.named_parameters()}
            assert {key: (weight.shape, weight.dtype) for key, weight in twin.named_parameters()} == forms
            assert all(weight.is_meta for weight in twin.parameters())
            assert not twin.training
    assert trace_pipeline(built, sampling(96, 64)) == trace_pipeline(pipes[name], sampling(96, 64))


def test_a_managed_pipeline_is_traced_as_it_rests(sim, models_directory: Path) -> None:
    pipe = load_pipeline(models_directory / "diffusers" / "tiny-flux")
    wanted = trace_pipeline(pipe, sampling())
    with sim.cluster([sim.SimDeviceSpec(total_bytes=1 << 30)]):
        manager = MemoryManager()
        with manage(pipe, placement="gpu:0", profile="8MiB", manager=manager):
            before, blocks = sim.stats(0), [dict(vars(part)) for part in pipe.transformer.modules()]
            assert trace_pipeline(pipe, sampling()) == wanted
            assert sim.stats(0) == before
            assert [dict(vars(part)) for part in pipe.transformer.modules()] == blocks
            manager.ledger.check()


def test_a_trace_leaves_the_pipeline_and_random_numbers_alone(pipes: dict[str, Any]) -> None:
    pipe = pipes["tiny-sd"]
    image = sample_images(pipe, sampling(), on_step=lambda *_: None)
    state, held, config = torch.get_rng_state(), dict(vars(pipe)), dict(pipe.scheduler.__dict__)
    trace_pipeline(pipe, sampling(128, 128))
    assert torch.equal(torch.get_rng_state(), state)
    assert vars(pipe) == held
    assert all(pipe.scheduler.__dict__[name] is value for name, value in config.items())
    assert torch.equal(sample_images(pipe, sampling(), on_step=lambda *_: None), image)


def test_sizes_that_a_pipeline_cannot_make_are_refused(pipes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="width 65 is not allowed"):
        trace_pipeline(pipes["tiny-sd"], sampling(width=65))


def test_a_plan_has_the_blocks_that_the_loader_cuts(sim: ModuleType, models_directory: Path, tmp_path: Path) -> None:
    # The budget holds one of the UNet's blocks and a part of another: it is cut into smaller ones.
    load = {"pipeline": "tiny-sd", "profile": "diffusion=13.7MiB", "precision": "as stored", "placement": "auto"}
    sample = {"pipeline": ["load", 0], "prompt": "a cat", "negative_prompt": "", "width": 64, "height": 64}
    sample |= {"frames": 1, "steps": 1, "guidance": 4.0, "seed": 1}
    workflow = tmp_path / "workflow.json"
    nodes = {"load": ("HighwaterLoadPipeline", load), "sample": ("HighwaterSamplePipeline", sample)}
    workflow.write_text(
        json.dumps({name: {"class_type": kind, "inputs": inputs} for name, (kind, inputs) in nodes.items()})
    )
    hardware = parse_hardware("gpu:0=64MiB@10GB/s@8TFLOPS,host=8GiB")
    planned = plan_workflow(workflow, hardware, models_directory, {})
    (plan,), run = planned.plans.values(), planned.run
    assert run is not None
    sim.configure([sim.SimDeviceSpec(total_bytes=64 << 20)], pinned_bytes=hardware.pinned_bytes)
    pipe, sources = load_with_sources(models_directory / "diffusers" / "tiny-sd")
    managed = manage(
        pipe,
        profile=load["profile"],
        precision=load["precision"],
        placement=plan.placement,
        files=sources,
        manager=MemoryManager(),
        uses=[use.use for use in run.uses],
    )
    try:
        for part in plan.components:
            loaded = managed.plan[part.component]
            assert [share.blocks for share in part.shares] == [share.blocks for share in loaded.shares]
            assert [share.device_bytes for share in part.shares] == [share.device_bytes for share in loaded.shares]
        assert plan["unet"].streams
        # The times are those of the smaller blocks, too.
        (use,) = [use.use for use in run.uses if use.use.component == "unet"]
        assert all(len(times.blocks_s) == len(plan["unet"].shares[0].blocks) for times in use.times.values())
        assert all(min(times.blocks_s) > 0 for times in use.times.values())
    finally:
        managed.release()
