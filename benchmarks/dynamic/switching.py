"""A, B, A without and with the pack: what budgets and a watermark do to bytes, pages and results."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from highwater.tests.comfyui.graphs import CORE, Graph, Loaders, sample_flux
from highwater.tests.comfyui.host_process import HostProcess

from .hosts import DEVICE_BYTES, MIB, PAGE_BYTES, Part, Rig, Tensors, difference, kept_by, leave

__all__ = ["measure_switches"]

MODELS = {"A": "wide_flux", "B": "other_wide_flux"}  # 335 and 347 MiB: 11 pages each
RUNS = ("A", "B", "A")
DEFAULT_HEADROOM = 256 * MIB  # comfy-aimdo's own
ROOMS = {"both fit": -1, "one and a half fit": DEFAULT_HEADROOM + 528 * MIB}
MANAGED = Loaders(kind="managed", engine="dynamic")


@dataclass(frozen=True, kw_only=True, slots=True)
class Asked:
    """What is asked before one A, B, A: a share of each model's bytes, and bytes to keep free of the device."""

    share: float | None = None
    watermark: int = 0

    @property
    def words(self) -> str:
        budget = "no budget" if self.share is None else f"{self.share:.0%}"
        return f"{budget}, {self.watermark // MIB} MiB kept free" if self.watermark else budget


ROUNDS = (
    Asked(),
    Asked(share=0.4),
    Asked(share=0.7, watermark=500 * MIB),
    Asked(share=0.7),
    Asked(share=0.4),
    Asked(),
)
# Under pressure core itself ends with up to 143 MiB more than its headroom free: below that a budget cannot be reached.
SLACK_BYTES = 5 * PAGE_BYTES
ORDER = [(room, asked, run) for room in ROOMS for asked in ROUNDS for run in RUNS]


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """What one prompt did to the first device, and what the device holds after it."""

    kept: Tensors
    copied_bytes: int
    num_mapped: int
    num_unmapped: int
    paged_bytes: int
    free_bytes: int
    entries: dict[str, dict[str, Any]]
    """The manager's entry of each model; none without the pack."""


def sample(host: HostProcess, asked: Asked, run: str, weight_bytes: dict[str, int] | None) -> Run:
    """Sample with one model; the loaders of both stay in the host's cache.

    Args:
        weight_bytes: of each model; None means core alone, which has neither budgets nor a watermark.
    """
    graph = Graph()
    mark = f"{asked.watermark // MIB}MiB"
    if weight_bytes is not None:
        graph.add("HighwaterWatermark", device="*", low=mark, high=mark)
    for name, file in MODELS.items():
        model = CORE.diffusion_model(graph, f"{file}.safetensors")
        graph.add("TestHold", value=model)
        if name == run:
            if weight_bytes is not None:
                budget = {} if asked.share is None else {"profile": f"{budget_of(asked, weight_bytes[name]) / MIB}MiB"}
                model = graph.add("HighwaterManageModel", model=model, **{**MANAGED.request, **budget})
            graph.keep(sample_flux(graph, model))
    host.ask_devices("reset")
    result = host.run(graph.nodes)
    read = host.ask_devices("read")
    device, calls = read["devices"][0], read["driver"]["calls"]
    found = [] if weight_bytes is None else host.part("components")
    return Run(
        kept=kept_by(graph, result),
        copied_bytes=device["h2d_bytes"],
        num_mapped=calls["cuMemMap"],
        num_unmapped=calls["cuMemUnmap"],
        paged_bytes=read["driver"]["mapped_bytes"],
        free_bytes=DEVICE_BYTES - device["used_bytes"],
        entries={name: entry for name, file in MODELS.items() for entry in found if entry["name"] == file},
    )


def budget_of(asked: Asked, weight_bytes: int) -> int | None:
    return None if asked.share is None else int(weight_bytes * asked.share)


def run_all(host: HostProcess, weight_bytes: dict[str, int] | None) -> list[Run]:
    runs, here = [], ""
    for room, asked, run in ORDER:
        if room != here:
            here = room
            host.forget()
            leave(host, ROOMS[room])
        runs.append(sample(host, asked, run, weight_bytes))
    assert host.races == [], host.races
    return runs


def measure_switches(rig: Rig) -> Part:
    """Run both rooms without and with the pack; about a minute."""
    with rig.start(with_pack=False) as host:
        cores = run_all(host, None)
    paths = {name: rig.models / "diffusion_models" / f"{file}.safetensors" for name, file in MODELS.items()}
    weight_bytes = {name: path.stat().st_size for name, path in paths.items()}
    with rig.start(with_pack=True) as host:
        ours = run_all(host, weight_bytes)
    rows, held = [], []
    for number, ((room, asked, run), core, our) in enumerate(zip(ORDER, cores, ours, strict=True)):
        budget = budget_of(asked, weight_bytes[run])
        result = difference(our.kept, core.kept)
        resident = our.entries[run]["tiers"].get("gpu:0", 0)
        spare = DEVICE_BYTES if ROOMS[room] < 0 else ROOMS[room]
        spare -= max(asked.watermark, DEFAULT_HEADROOM) + (budget or 0)
        held.append(result == "equal")
        held.append(budget is None or resident <= budget)
        held.append(budget is None or spare < SLACK_BYTES or budget - PAGE_BYTES <= resident)
        held.append(our.free_bytes >= asked.watermark)
        held.append(0 <= resident_bytes(our) - our.paged_bytes < MIB)
        held.append(number >= len(RUNS) or moved(our) == moved(core))
        rows.append(
            {
                "room": room,
                "asked": asked.words,
                "run": run,
                "budget": "" if budget is None else f"{budget / MIB:.1f}",
                "resident": f"{resident / MIB:.1f}",
                "below": "" if budget is None else f"{(budget - resident) / MIB:.1f}",
                "free": f"{our.free_bytes / MIB:.0f}",
                "copied": f"{our.copied_bytes / MIB:.1f}",
                "pages in": our.num_mapped,
                "out": our.num_unmapped,
                "core: copied": f"{core.copied_bytes / MIB:.1f}",
                "core: pages in": core.num_mapped,
                "core: out": core.num_unmapped,
                "result": result if spare >= SLACK_BYTES or budget is None else f"{result}; the watermark limits it",
            }
        )
    sentence = (
        "A, B, A under core's dynamic VRAM with the pack, and as core does it without (columns `core`, which has no "
        "budget): models of 335 and 347 MiB, 2 steps each; MiB. A budget is kept to at most one page of 32 MiB below, "
        "unless the watermark leaves less. `pages in` are faults that gave a page memory; `result` compares with core."
    )
    return Part(sentence=sentence, rows=rows, num_held=sum(held), num_checks=len(held))


def resident_bytes(run: Run) -> int:
    """Return what the manager says is resident of both models."""
    return sum(entry["tiers"].get("gpu:0", 0) for entry in run.entries.values())


def moved(run: Run) -> tuple[int, int, int]:
    return run.copied_bytes, run.num_mapped, run.num_unmapped
