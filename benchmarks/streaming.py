"""Step time of streamed models on simulated devices, beside the schedules of others and the best that a search finds.

The engine itself runs: it plans, packs, loads and streams a stand-in whose blocks have a 1024th of the bytes of the
real ones, over a link that is as much slower, and whose computes take the flops of the real ones at a card's rate. So
every time is that of the full size. Launches and latencies are set to nothing.

The bound of a run is its steps times the longer of all computing and all copying that the engine's choice of
residents leaves, plus one copy, that of the first streamed block. Whether that choice was good says the other ratio:
over the best schedule within the budget that a search finds.
"""

from __future__ import annotations

import contextlib
import json
import math
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from highwater.headless import simdevice
from highwater.memory import InvalidInput, MemoryManager, manage
from highwater.memory.transfer.devices import find_device
from highwater.memory.transfer.link_speed import link_bytes_per_s, remember_links_in

from .case import Result
from .schedules import (
    Outcome,
    Part,
    Work,
    least_seconds,
    run_comfyui,
    run_diffusers,
    run_mmgp,
    run_offsets,
)
from .search import Found, find_best, find_good
from .shapes import SHAPES, Shape, child_of_stack, outermost_number

NUM_STEPS = 8
NUM_WARM_UPS = 8
SCALE = 1024
ROUND_TO_BYTES = 256 * SCALE  # so that a scaled block is what an allocator would give
# What large products in bf16 reach; the data sheets say 25, 165 and 989 dense.
CARDS = {"RTX 3060": 20e12, "RTX 4090": 120e12, "H200": 600e12}
LINKS = {"6 GB/s": 6e9, "12 GB/s": 12e9, "25 GB/s": 25e9, "55 GB/s": 55e9}
BUDGETS = (0.10, 0.30, 0.60, 1.00)
# Of a dozen blocks staging memory for two alone takes a fifth.
SMALL_BUDGETS = (0.30, 0.45, 0.60, 0.80)
SMALL_BLOCKS = 11
PEERS = ("mmgp", "diffusers", "ComfyUI")
RESULTS = Path(__file__).parent / "results"


class TimedBlock(nn.Module):
    """A block that reads its weight and takes a given time on its device."""

    def __init__(self, weight_bytes: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(weight_bytes // 2, dtype=torch.bfloat16), requires_grad=False)

    def forward(self, x: torch.Tensor, compute_s: float) -> torch.Tensor:
        simdevice.advance(x.device, compute_s)
        return x * self.weight[:1]


class StandIn(nn.Module):
    """A model with blocks in the order in which the engine finds them, which run in the order of the work."""

    def __init__(self, work: Work, block_names: Sequence[str]) -> None:
        super().__init__()
        self.work = work
        self.number_of = {name: number for number, name in enumerate(block_names)}
        sizes = {part.name: part.weight_bytes // SCALE for part in work.parts}
        self.blocks = nn.ModuleList(TimedBlock(sizes[name]) for name in block_names)
        rest = torch.ones(work.rest_bytes // SCALE // 2, dtype=torch.bfloat16)
        self.rest = nn.Parameter(rest, requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for part in self.work.parts:
            if part.weight_bytes:
                x = self.blocks[self.number_of[part.name]](x, part.compute_s)
            else:
                simdevice.advance(x.device, part.compute_s)
        return x


def measure_engine(work: Work, block_names: Sequence[str], budget_bytes: int, *, pinned: str = "all") -> Found:
    """Return the virtual seconds of one run of the engine, its residents in place, nothing staged; and its choice.

    Args:
        pinned: of which components the weights are page-locked, as a profile says it: ``all`` or ``none``.

    Raises:
        InvalidInput: the engine cannot compute within the budget.
    """
    spec = simdevice.SimDeviceSpec(
        total_bytes=4 * work.weight_bytes // SCALE,
        h2d_bytes_per_s=work.link_bytes_per_s / SCALE,
        flops_per_s=1e30,
        memory_bytes_per_s=1e30,
        launch_s=0,
        latency_s=0,
    )
    with fresh_user_cache(), simdevice.cluster([spec]), torch.no_grad():
        # So little is copied of a stand-in that it would not tell the link's speed.
        link_bytes_per_s(find_device("gpu:0"), lambda: spec.h2d_bytes_per_s)
        manager = MemoryManager()
        manager.set_watermark("*", 0, 0)
        model = StandIn(work, block_names)
        profile = f"{(budget_bytes // SCALE + 0.5) / 1e6:.7f}MB,pinned={pinned}"
        with manage(model, profile=profile, placement="gpu:0", manager=manager) as managed:
            managed_component = managed.members[0].managed
            x = torch.ones(1, dtype=torch.bfloat16).to(f"{simdevice.name()}:0")
            for _ in range(NUM_WARM_UPS):  # what the engine learns about order and times, it has learned then
                model(x)
                torch.accelerator.synchronize(0)
            managed_component.settle()
            torch.accelerator.synchronize(0)
            begin_s = simdevice.clock_s()
            for _ in range(NUM_STEPS):
                model(x)
            seconds = simdevice.stream_time_s(torch.accelerator.current_stream(0)) - begin_s
            share = managed_component.plan.shares[0]
            begun = managed_component.shares[0].streamer.pass_number % len(share.offsets) if share.offsets else 0
            numbers = [int(block.name.rpartition(".")[2]) for block in managed_component.component.blocks]
            del x
    index_of = {part.name: index for index, part in enumerate(work.parts) if part.weight_bytes}
    names = [block_names[number] for number in numbers]
    offsets = [{index_of[names[block]]: begin * SCALE for block, begin in here.items()} for here in share.offsets]
    return Found(
        seconds=seconds,
        resident=frozenset(index_of[names[block]] for block in share.resident),
        staging_bytes=share.staging_bytes * SCALE,
        offsets=(*offsets[begun:], *offsets[:begun]),
    )


@contextlib.contextmanager
def fresh_user_cache() -> Iterator[None]:
    """Remember links in a folder of this case: the device's link is another in every case."""
    with tempfile.TemporaryDirectory(prefix="highwater-cache-") as directory:
        remember_links_in(Path(directory))
        try:
            yield
        finally:
            remember_links_in(None)  # as `simdevice` has it


def make_work(
    shape: Shape,
    group_of: Callable[[str], str | None],
    flops_per_s: float,
    link_bytes_per_s: float,
    *,
    round_to_bytes: int = ROUND_TO_BYTES,
) -> Work:
    """Return the work of one step at a card's rate, over a link, with what moves as one by its name for each path."""

    def rounded(num_bytes: int) -> int:
        return max(round(num_bytes / round_to_bytes), 1 if num_bytes else 0) * round_to_bytes

    stretches, rest_bytes = shape.stretches(group_of)
    parts = tuple(
        Part(weight_bytes=rounded(part.weight_bytes), compute_s=part.flops / flops_per_s, name=part.name)
        for part in stretches
    )
    return Work(parts=parts, rest_bytes=rounded(rest_bytes), link_bytes_per_s=link_bytes_per_s)


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One model on one card over one link within one budget; seconds are those of a whole run.

    ``engine`` is None where the engine refuses the budget; ``modelled_s`` is what the cost model says of its choice,
    ``least_s`` what nothing that holds no more than the budget can be faster than.
    ``found`` is the best that the search finds, beside staging memory that could be cut anywhere.
    """

    model: str
    budget: float
    card: str
    link: str
    weight_bytes: int
    budget_bytes: int
    streamed_bytes: int
    held_bytes: int
    compute_s: float
    bound_s: float
    least_s: float
    engine: Found | None
    modelled_s: float
    found: Found | None
    peers: dict[str, Outcome]

    @property
    def over_bound(self) -> float:
        return self.engine.seconds / self.bound_s if self.engine else math.nan

    @property
    def over_least(self) -> float:
        return self.engine.seconds / self.least_s if self.engine else math.nan

    @property
    def over_found(self) -> float:
        """Our time over that of the best schedule found."""
        return self.engine.seconds / self.found.seconds if self.engine and self.found else math.nan

    def to_json(self) -> dict[str, Any]:
        """Return the numbers; residents are counted, not listed."""
        numbers: dict[str, Any] = {name: getattr(self, name) for name in ("model", "budget", "card", "link")}
        for name in ("weight_bytes", "budget_bytes", "streamed_bytes", "held_bytes"):
            numbers[name] = getattr(self, name)
        numbers |= {
            "compute_s": shorten(self.compute_s),
            "bound_s": shorten(self.bound_s),
            "least_s": shorten(self.least_s),
        }
        for name, found in (("Highwater", self.engine), ("found", self.found)):
            if found:
                residents = len(found.resident)
                seconds = shorten(found.seconds)
                numbers[name] = {"s": seconds, "residents": residents, "staging_bytes": found.staging_bytes}
        for name, outcome in self.peers.items():
            numbers[name] = {"s": shorten(outcome.seconds), "held_bytes": outcome.peak_bytes}
        return numbers


def shorten(seconds: float) -> float:
    return float(f"{seconds:.6g}")


def run_case(shape: Shape, budget: float, card: str, link: str, *, is_small: bool) -> Case:
    """Run the engine and every other schedule once."""
    rates = CARDS[card], LINKS[link]
    work = make_work(shape, shape.block_of, *rates)
    budget_bytes = int(budget * work.weight_bytes)
    try:
        engine = measure_engine(work, shape.block_names, budget_bytes)
    except InvalidInput:
        engine = None
    resident = engine.resident if engine else frozenset(work.movable)
    streamed = [work.parts[index].weight_bytes for index in work.movable if index not in resident]
    bound_s = NUM_STEPS * max(work.compute_s, work.copy_s(sum(streamed))) + work.copy_s(streamed[0] if streamed else 0)

    modelled = run_offsets(
        work, *((resident, engine.staging_bytes, engine.offsets) if engine else (resident, 0, ())), NUM_STEPS
    )
    if is_small:
        found = find_best(work, budget_bytes, NUM_STEPS)
    else:
        found = find_good(work, budget_bytes, NUM_STEPS, resident if engine else None)
    return Case(
        model=shape.name,
        budget=budget,
        card=card,
        link=link,
        weight_bytes=work.weight_bytes,
        budget_bytes=budget_bytes,
        streamed_bytes=sum(streamed),
        held_bytes=modelled.peak_bytes if engine else 0,
        compute_s=work.compute_s,
        bound_s=bound_s,
        least_s=least_seconds(work, budget_bytes, NUM_STEPS),
        engine=engine,
        modelled_s=modelled.seconds,
        found=found,
        # A model with most of its blocks left out is not what their rules were made for.
        peers={} if is_small else run_peers(shape, budget, *rates),
    )


def run_peers(shape: Shape, budget: float, flops_per_s: float, link_bytes_per_s: float) -> dict[str, Outcome]:
    """Run the schedules of others, each by what it moves as one, within the same part of the weights."""
    rates = flops_per_s, link_bytes_per_s
    by_floor = make_work(shape, outermost_number, *rates)
    by_group = make_work(shape, child_of_stack, *rates)
    by_layer = make_work(shape, lambda path: path, *rates, round_to_bytes=1)
    layer_budget_bytes = int(budget * by_layer.weight_bytes)
    return {
        "mmgp": run_mmgp(by_floor, int(budget * by_floor.weight_bytes), NUM_STEPS),
        "diffusers": run_diffusers(by_group, NUM_STEPS),
        "ComfyUI": run_comfyui(by_layer, layer_budget_bytes, NUM_STEPS),
        "ComfyUI without streams": run_comfyui(by_layer, layer_budget_bytes, NUM_STEPS, num_streams=0),
    }


def describe(cases: Sequence[Case]) -> dict[str, str | float]:
    """Return one row for one model within one budget, over all cards and links."""
    first = cases[0]
    row: dict[str, str | float] = {
        "model": first.model,
        "budget": f"{first.budget:.0%}, {first.budget_bytes / 1e9:.2f} GB",
        "streams": "refused",
        **dict.fromkeys(("Highwater, worst", "at", "Highwater, mean", "over best found", "over what none beats"), "-"),
        **{f"{name} / ours": "-" for name in PEERS},
    }
    if any(case.engine is None for case in cases):
        return row
    worst = max(cases, key=lambda case: case.over_bound)
    row |= {
        "streams": f"{first.streamed_bytes / 1e9:.2f} GB",
        "Highwater, worst": worst.over_bound,
        "at": f"{worst.card}, {worst.link}" if first.streamed_bytes else "-",
        "Highwater, mean": mean(case.over_bound for case in cases),
        "over best found": max(case.over_found for case in cases),
    }
    if first.peers:  # of a few blocks one is so much that this says little
        row["over what none beats"] = max(case.over_least for case in cases)
    for name in PEERS if first.peers else ():
        outcome = first.peers[name]
        over_ours = mean(case.peers[name].seconds / case.engine.seconds for case in cases if case.engine)
        # A little more is what rounding makes of the budget.
        row[f"{name} / ours"] = f"{over_ours:.2f}" + ("*" if outcome.peak_bytes > 1.001 * first.budget_bytes else "")
    return row


def mean(ratios: Iterable[float]) -> float:
    """Return the geometric mean."""
    logarithms = [math.log(ratio) for ratio in ratios]
    return math.exp(sum(logarithms) / len(logarithms))


def measure() -> Result:
    """Measure three models, whole and with a dozen of their blocks; some minutes. Writes every case as JSON, too."""
    simdevice.install("sim", num_devices=1)
    cases: list[Case] = []
    rows = []
    for build in SHAPES:
        whole = build()
        thinned = whole.thinned(math.ceil(len(whole.block_names) / SMALL_BLOCKS))
        for shape, budgets in ((whole, BUDGETS), (thinned, SMALL_BUDGETS)):
            for budget in budgets:
                is_small = shape is not whole
                these = [run_case(shape, budget, card, link, is_small=is_small) for card in CARDS for link in LINKS]
                rows.append(describe(these))
                cases += these
    lines = ",\n".join(json.dumps(case.to_json()) for case in cases)
    (RESULTS / "streaming.json").write_text(f"[\n{lines}\n]\n", encoding="utf-8")
    ran = [case for case in cases if case.engine is not None]
    worst = max(ran, key=lambda case: case.over_bound)
    off = max(abs(case.modelled_s / case.engine.seconds - 1) for case in ran if case.engine)
    cards = ", ".join(f"{card} {rate / 1e12:.0f}" for card, rate in CARDS.items())
    return Result(
        question=(
            f"Virtual time of {NUM_STEPS} steps over max(compute, transfer) plus one copy, worst and geometric mean "
            f"over cards (TFLOP/s: {cards}) and links ({', '.join(LINKS)}); worst over the best schedule found, and "
            "over what none can beat that holds no more than the budget; then the times of others over ours, geometric "
            f"means. Bytes and links are 1/{SCALE} of the real ones, launches cost nothing. * holds more than the "
            "budget. The cost model and the engine differ by "
            f"{off:.0e} at most."
        ),
        rows=rows,
        ratio=max(case.over_found for case in ran),
        meaning=(
            "worst case over the best choice found beside memory that could be cut anywhere, all tried for the smaller "
            f"models; over max(compute, transfer) plus one copy {worst.over_bound:.3f}, target at most 1.05"
        ),
    )
