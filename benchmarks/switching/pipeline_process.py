"""The process of one engine: pipelines from their folders, A, B, A, changed prompts, and two experts in one call.

python -m highwater.benchmarks.switching.pipeline_process ENGINE FOLDER

Prints its `Engine` as JSON, on the last line.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from highwater.headless import simdevice
from highwater.memory import MemoryManager, manage
from highwater.memory.units import GIB, MIB

from ..loading import drop_pages
from .measured import SCALE, Engine, Ram, Run, cached_bytes, disk_bytes, private_bytes, until_steady
from .pipelines import CALLS, CHANGES, ENGINES, EXPERTS, FLUX, ROOMS, be_quiet
from .room import Room

DEVICE = "npu:0"
DEVICE_BYTES = 4 * GIB
# What every engine keeps free for computing; diffusers' ComponentsManager would keep 3 GB by default.
MARGIN_BYTES = 24 * MIB
TEXT = "a lighthouse"
# The parts of a pipeline in the order in which they compute; the VAEs are not 1 MiB large.
ORDER = ("text_encoder", "text_encoder_2", "transformer", "transformer_2")


class Highwater:
    """Our engine, with the same manager for all pipelines."""

    def __init__(self) -> None:
        self.manager = MemoryManager()
        self.manager.set_watermark("*", MARGIN_BYTES, MARGIN_BYTES)

    def take(self, pipe: Any, name: str) -> None:
        manage(pipe, placement="gpu:0", manager=self.manager, name=name)

    def settle_down(self) -> None:
        """Everything fits: nothing to do."""

    def missing_bytes(self, begun_with: int) -> int:
        """Return the bytes of the loads since there were so many events."""
        return sum(event.bytes for event in list(self.manager.event_log.events)[begun_with:] if event.kind == "load")

    def num_events(self) -> int:
        return len(self.manager.event_log.events)


class ModelOffload:
    """diffusers' own of one pipeline: a part goes to the device to compute, and the last one back."""

    def __init__(self) -> None:
        self.pipes: list[Any] = []

    def take(self, pipe: Any, name: str) -> None:
        pipe.enable_model_cpu_offload(device=DEVICE)
        self.pipes.append(pipe)

    def settle_down(self) -> None:
        """It keeps nothing on the device: take it away, and place all parts there."""
        for pipe in self.pipes:
            pipe.remove_all_hooks()
            pipe.to(DEVICE)


class Components:
    """diffusers' ComponentsManager, with its automatic offloading over all pipelines."""

    def __init__(self) -> None:
        import diffusers

        self.manager = diffusers.ComponentsManager()

    def take(self, pipe: Any, name: str) -> None:
        for part, module in pipe.components.items():
            if isinstance(module, torch.nn.Module):
                self.manager.add(f"{name}_{part}", module)
        self.manager.enable_auto_cpu_offload(device=DEVICE, memory_reserve_margin=f"{MARGIN_BYTES // MIB}MiB")

    def settle_down(self) -> None:
        """Everything fits: nothing to do."""


KINDS: Mapping[str, Callable[[], Any]] = dict(zip(ENGINES, (Highwater, ModelOffload, Components), strict=True))


class Process:
    """The pipelines of one engine while their runs are measured, beside a `Room`."""

    def __init__(self, name: str, folder: Path, *, private_at_start: int) -> None:
        self.folder = folder
        self.engine = KINDS[name]()
        self.private_at_start = private_at_start
        self.pipes: dict[str, Any] = {}
        self.parts: dict[str, int] = {}
        self.runs: list[Run] = []

    @contextmanager
    def limited(self, room_bytes: int) -> Iterator[None]:
        """In the body, let another program have the device but for the room and the margin."""
        self.room = Room(room_bytes)
        simdevice.occupy(0, DEVICE_BYTES - room_bytes - MARGIN_BYTES)
        yield
        simdevice.occupy(0, 0)

    def ram(self, *pipes: str) -> Ram:
        gc.collect()
        return Ram(
            private_bytes=max(0, private_bytes("self") - simdevice.stats(0).used_bytes - self.private_at_start),
            locked_bytes=simdevice.pinned().used_bytes,
            cached_bytes=cached_bytes(path for pipe in pipes for path in self.files(pipe)),
        )

    def files(self, pipe: str) -> list[Path]:
        return sorted((self.folder / pipe).glob("*/*.safetensors"))

    def load(self, pipe: str) -> None:
        import diffusers

        loaded = diffusers.DiffusionPipeline.from_pretrained(self.folder / pipe, torch_dtype=torch.bfloat16)
        loaded.set_progress_bar_config(disable=True)
        self.engine.take(loaded, pipe)
        self.pipes[pipe] = loaded
        for path in self.files(pipe):
            part = f"{pipe}/{path.parent.name}"
            self.parts[part] = self.parts.get(part, 0) + path.stat().st_size

    def run(self, name: str, pipe: str, text: str) -> Run:
        """Load the pipeline if it is not there, and call it once."""
        torch.accelerator.synchronize()
        simdevice.reset_stats()
        disk, begin_s = disk_bytes("self"), simdevice.clock_s()
        tells = isinstance(self.engine, Highwater)
        num_events = self.engine.num_events() if tells else 0
        if pipe not in self.pipes:
            self.load(pipe)
        with torch.no_grad():
            self.pipes[pipe](prompt=text, generator=torch.Generator().manual_seed(1), **CALLS[pipe])
        torch.accelerator.synchronize()
        stats = simdevice.stats(0)
        used = [f"{pipe}/{part}" for part in ORDER if f"{pipe}/{part}" in self.parts]
        return Run(
            name=name,
            seconds=simdevice.clock_s() - begin_s,
            disk_bytes=disk_bytes("self") - disk,
            to_device_bytes=stats.h2d_bytes,
            to_host_bytes=stats.d2h_bytes,
            missing_bytes=self.engine.missing_bytes(num_events) if tells else None,
            least_bytes=sum(self.room.use(part, self.parts[part]) for part in used),
        )

    def measure_pipelines(self) -> dict[str, Ram]:
        """A, B, A, then changed prompts; then the same with everything there, which tells what computing takes."""
        ram = {}
        with self.limited(ROOMS["A"]):
            runs = [self.run(name, pipe, TEXT) for name, pipe in [("A, first", "A"), ("B", "B"), ("A again", "A")]]
            ram["A, B, A"] = self.ram(*FLUX)
            runs += [self.run("changed prompt", "A", f"{TEXT}, number {number}") for number in range(CHANGES)]
            ram["changed prompts"] = self.ram(*FLUX)
        self.take_steady(runs, {"B": "B"})
        return ram

    def measure_experts(self) -> dict[str, Ram]:
        with self.limited(ROOMS[EXPERTS]):
            runs = [self.run("experts", EXPERTS, TEXT) for _ in range(3)]
            ram = {"experts": self.ram(EXPERTS)}
        self.take_steady(runs[1:], {})
        return ram

    def take_steady(self, runs: list[Run], pipe_of: Mapping[str, str]) -> None:
        """Add the runs with what they take with everything there; ``pipe_of``: by name, of others than the first."""
        self.engine.settle_down()
        steady = {pipe: until_steady(partial(self.run, "", pipe, TEXT)).seconds for pipe in self.pipes}
        self.runs += [replace(run, steady_s=steady[pipe_of.get(run.name, next(iter(self.pipes)))]) for run in runs]


def main() -> None:
    name, folder = sys.argv[1], Path(sys.argv[2])
    os.environ["HF_HUB_OFFLINE"] = "1"
    be_quiet()
    simdevice.install("npu", num_devices=1)
    simdevice.configure([simdevice.SimDeviceSpec(total_bytes=DEVICE_BYTES).slowed(SCALE)])
    for path in folder.glob("*/*/*.safetensors"):
        drop_pages(path)
    runs, ram, private_at_start = [], {}, private_bytes("self")
    for measure in (Process.measure_pipelines, Process.measure_experts):
        process = Process(name, folder, private_at_start=private_at_start)
        ram |= measure(process)
        runs += process.runs
        del process
        gc.collect()
    print(json.dumps(asdict(Engine(name=name, runs=runs, ram=ram))))


if __name__ == "__main__":
    main()
