"""ComfyUI with its default cache: A, B, A, changed prompts, and two experts in one graph, by core and by the pack."""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from highwater.memory.units import MIB
from highwater.nodes.tiny_models import clip_l
from highwater.tests.comfyui.graphs import CORE, Graph, Link, Loaders, new_run
from highwater.tests.comfyui.host_process import HostFiles, HostProcess
from highwater.tests.comfyui.model_files import flux, write_random

from ..loading import drop_pages
from .measured import SCALE, Engine, Ram, Run, cached_bytes, disk_bytes, private_bytes, until_steady
from .room import Room

__all__ = ["CHANGES", "measure_hosts", "write_models"]

# Flux has 19 and 38 blocks of width 3072: a 64th of their bytes each.
MODELS = {
    "diffusion_models/A": lambda: flux(19, 38, width=384, text_width=768),
    "diffusion_models/B": lambda: flux(19, 28, width=384, text_width=768),
    "text_encoders/text": clip_l,
}
PIECE_BYTES = 16 * MIB
DEVICE_BYTES = 4096 * MIB
ROOM_BYTES = 520 * MIB
CHANGES = 10
NUM_STEPS = 2
TEXT = "a lighthouse"
# Its default, named: what a prompt does not name is forgotten after it.
DEFAULT_CACHE = "--cache-ram"


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """A host and its loaders; ``kept_bytes`` is what the engine keeps free beside weights."""

    name: str
    loaders: Loaders
    dynamic: str
    kept_bytes: int

    @property
    def with_pack(self) -> bool:
        return self.loaders is not CORE

    @property
    def tells_loads(self) -> bool:
        """Whether the pack itself moves the weights, and records which copies stay."""
        return self.with_pack and not self.dynamic


# 0.8 GiB is core's own rule in 0.33, 256 MiB comfy-aimdo's.
STATIC_KEPT, DYNAMIC_KEPT = int(0.8 * 1024) * MIB, 256 * MIB
SETTINGS = (
    Setting(name="Highwater", loaders=Loaders(), dynamic="", kept_bytes=STATIC_KEPT),
    Setting(name="core, static", loaders=CORE, dynamic="", kept_bytes=STATIC_KEPT),
    Setting(name="core, dynamic", loaders=CORE, dynamic="nvidia", kept_bytes=DYNAMIC_KEPT),
    Setting(name="Highwater over core, dynamic", loaders=Loaders(), dynamic="nvidia", kept_bytes=DYNAMIC_KEPT),
)


def write_models(folder: Path) -> dict[str, Path]:
    """Write the models as files without holes, which no disk reads; returns them by name."""
    paths = {}
    for name, shapes in MODELS.items():
        path = folder / f"{name}.safetensors"
        with_holes = path.with_suffix(".holes")
        write_random(with_holes, shapes(), scale=0.02, seed=1)
        with with_holes.open("rb") as source, path.open("wb") as target:
            while piece := source.read(PIECE_BYTES):
                target.write(piece)
            target.flush()
            os.fsync(target.fileno())
        with_holes.unlink()
        paths[path.stem] = path
    return paths


class Host:
    """A host while its runs are measured, beside a `Room` that tells what each run misses."""

    def __init__(self, setting: Setting, process: HostProcess, paths: dict[str, Path]) -> None:
        self.setting = setting
        self.process = process
        self.paths = paths
        self.parts = {name: path.stat().st_size for name, path in paths.items()}
        self.private_at_start = self.private_bytes()
        self.room = Room(ROOM_BYTES)
        self.runs: list[Run] = []

    def private_bytes(self) -> int:
        """Return its own dirty pages, without those that are a simulated device's memory."""
        read = self.process.ask_devices("read")
        return private_bytes(self.process.process.pid) - int(read["devices"][0]["used_bytes"])

    def ram(self) -> Ram:
        return Ram(
            private_bytes=max(0, self.private_bytes() - self.private_at_start),
            locked_bytes=self.process.ask_devices("read")["pinned"]["used_bytes"],
            cached_bytes=cached_bytes(self.paths.values()),
        )

    @contextlib.contextmanager
    def limited(self) -> Iterator[None]:
        """In the body, let another program have the device but for the room and what the engine keeps free."""
        taken = DEVICE_BYTES - ROOM_BYTES - self.setting.kept_bytes
        self.process.ask_devices("occupy", device=0, num_bytes=taken)
        yield
        self.process.ask_devices("occupy", device=0, num_bytes=0)

    def run(self, name: str, graph: Graph, *used: str) -> Run:
        """Run a prompt that computes with these parts in this order; those it does not name are forgotten."""
        pid = self.process.process.pid
        last_event_s = self.process.last_event_s() if self.setting.tells_loads else 0.0
        begin_s, disk = self.process.ask_devices("read")["clock_s"], disk_bytes(pid)
        with self.process.books() as devices:
            result = self.process.run(graph.nodes)
        assert result.outcome == "success", result.brief_error
        seconds = self.process.ask_devices("read")["clock_s"] - begin_s
        loads = self.process.events_after(last_event_s) if self.setting.tells_loads else []
        missing = sum(event["bytes"] for event in loads if event["kind"] == "load")
        return Run(
            name=name,
            seconds=seconds,
            disk_bytes=disk_bytes(pid) - disk,
            to_device_bytes=devices[0]["h2d_bytes"],
            to_host_bytes=devices[0]["d2h_bytes"],
            missing_bytes=missing if self.setting.tells_loads else None,
            least_bytes=sum(self.room.use(part, self.parts[part]) for part in used),
        )

    # -- prompts

    def sample(self, name: str, model: str, text: str, *, encodes: bool) -> Run:
        """Sample with one model; ``encodes``: whether the text is another than in the prompt before."""
        loaders, graph = self.setting.loaders, Graph()
        clip = loaders.text_encoder(graph, "text.safetensors")
        positive, negative = (graph.add("CLIPTextEncode", text=each, clip=clip) for each in (text, ""))
        latent = graph.add("EmptySD3LatentImage", width=64, height=64, batch_size=1)
        loaded = loaders.diffusion_model(graph, f"{model}.safetensors")
        graph.keep(sampler(graph, loaded, positive, negative, latent, 0, NUM_STEPS))
        for other in {"A", "B"} - {model}:
            self.room.forget(other)
        return self.run(name, graph, *(["text"] if encodes else []), model)

    def sample_with_both(self, name: str) -> Run:
        """Sample the first half of the steps with one expert, the second with the other."""
        graph = Graph()
        positive, negative = (graph.conditioning(seed, width=768) for seed in (1, 2))
        latent = graph.add("EmptySD3LatentImage", width=64, height=64, batch_size=1)
        models = [self.setting.loaders.diffusion_model(graph, f"{model}.safetensors") for model in ("A", "B")]
        for number, model in enumerate(models):
            first = number * NUM_STEPS
            latent = sampler(graph, model, positive, negative, latent, first, first + NUM_STEPS, 2 * NUM_STEPS)
        graph.keep(latent)
        return self.run(name, graph, "A", "B")

    def measure_workflows(self) -> dict[str, Ram]:
        """A, B, A, then changed prompts; then the same with all the device, which tells what computing takes."""
        ram = {}
        with self.limited():
            runs = [
                self.sample(name, model, TEXT, encodes=number == 0)
                for number, (name, model) in enumerate([("A, first", "A"), ("B", "B"), ("A again", "A")])
            ]
            ram["A, B, A"] = self.ram()
            for number in range(CHANGES):
                runs.append(self.sample("changed prompt", "A", f"{TEXT}, number {number}", encodes=True))
            ram["changed prompts"] = self.ram()
        numbers = itertools.count(1)
        changed = until_steady(lambda: self.sample("", "A", f"{TEXT}, {next(numbers)} times", encodes=True))
        steady = {"A, first": changed, "changed prompt": changed}
        for name, model in (("A again", "A"), ("B", "B")):
            self.sample("", model, TEXT, encodes=True)
            steady[name] = until_steady(partial(self.sample, "", model, TEXT, encodes=False))
        self.runs += [replace(run, steady_s=steady[run.name].seconds) for run in runs]
        return ram

    def measure_experts(self) -> dict[str, Ram]:
        self.process.forget()
        self.room = Room(ROOM_BYTES)
        with self.limited():
            runs = [self.sample_with_both(name) for name in ("experts, first", "experts", "experts")]
            ram = {"experts": self.ram()}
        steady = until_steady(lambda: self.sample_with_both(""))
        self.runs += [replace(run, steady_s=steady.seconds) for run in runs[1:]]
        return ram


def sampler(
    graph: Graph,
    model: Link,
    positive: Link,
    negative: Link,
    latent: Link,
    first: int,
    last: int,
    num_steps: int = NUM_STEPS,
) -> Link:
    """Sample from the step ``first`` to the step ``last``."""
    inputs: dict[str, Any] = {"model": model, "positive": positive, "negative": negative, "latent_image": latent}
    return graph.add(
        "KSamplerAdvanced",
        **inputs,
        add_noise="enable" if first == 0 else "disable",
        noise_seed=next(new_run),
        steps=num_steps,
        cfg=1.0,
        sampler_name="euler",
        scheduler="simple",
        start_at_step=first,
        end_at_step=last,
        return_with_leftover_noise="enable" if last < num_steps else "disable",
    )


def measure_hosts(files: HostFiles, folder: Path, tell: Callable[[str], None]) -> list[Engine]:
    """Run everything in one host for each engine."""
    paths = write_models(folder)
    engines = []
    for setting in SETTINGS:
        tell(setting.name)
        for path in paths.values():
            drop_pages(path)
        with HostProcess(
            files,
            models=folder,
            with_pack=setting.with_pack,
            total_bytes=[DEVICE_BYTES],
            strict=False,
            dynamic=setting.dynamic,
            slowed=SCALE,
            arguments=[DEFAULT_CACHE, *([] if setting.dynamic else ["--disable-dynamic-vram"])],
        ) as process:
            host = Host(setting, process, paths)
            ram = host.measure_workflows() | host.measure_experts()
        engines.append(Engine(name=setting.name, runs=host.runs, ram=ram))
    return engines
