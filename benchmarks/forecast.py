"""It said so before: what plans of random workflows predict, beside what then happens on simulated devices.

Each case is a workflow of one of the tests' pipelines (Flux, Stable Diffusion and Wan with random weights) at a random
size, with one condition or two, under a random budget or none, on one or two random devices. `highwater plan`'s own
call plans it from headers and traces; the placement that it prints then runs, on devices of that description. Compared
are, of each part: weights and staging memory, which have to be equal; activations, of a size that was never seen and
of one that was; and the virtual seconds of a forward. What profiles would encode stays as stored.
Simulated devices have neither kernels' workspaces nor fragmented memory, so a card takes more than is shown here.
"""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from statistics import median
from typing import Any
from unittest.mock import patch

import torch

from highwater.headless import simdevice
from highwater.headless.comfy_stub import folder_paths
from highwater.headless.comfy_stub.comfy_api import install
from highwater.memory import MemoryManager, manage
from highwater.memory.errors import DoesNotFit, InvalidInput
from highwater.memory.planner.plan import Plan
from highwater.memory.planner.run import Use
from highwater.memory.planner.run_plan import UsePlan
from highwater.memory.planner.tiles import choose_tiles
from highwater.memory.transfer.link_speed import state_links
from highwater.memory.units import GIB, MIB
from highwater.nodes.described_hardware import DescribedDevice, Hardware

from .case import Result

NUM_CASES = 20
SEED = 17
BATCH_SEED = 1000  # of its own: the other numbers of a case stay what they were
PIPELINES = ("tiny-flux", "tiny-sd", "tiny-wan")
# Models of 15 to 30 MiB: most of the first stream, most of the last stay.
DEVICE_MIB = ((17, 24), (20, 40), (40, 120))
STEPS = 4
# Forwards are timed in the second run, the last of more steps, after the blocks were measured and planned anew.
STEPS_AGAIN, NUM_TIMED = 8, 3
PRECISION = "as stored"  # profiles would encode some: nothing is predicted of the time in which weights are decoded
# The limits that a ratio of 1 stands for.
MOST_UNDER, MOST_OVER = 0.05, 0.30
MOST_SEEN_ELSEWHERE, MOST_SEEN = 0.10, 0.03
MOST_SECONDS = 0.05
# Parts that take less beside their weights are of no interest: the allocator's own pieces are as large.
LEAST_BYTES = 64 << 10


@dataclass(slots=True)
class Tally:
    """The worst of what was found, over all cases."""

    num_cases: int = 0
    num_parts: int = 0
    num_streaming: int = 0
    num_large: int = 0
    num_refused: int = 0
    unequal: list[str] = field(default_factory=list)
    under: float = 0.0
    over: float = 0.0
    elsewhere: float = 0.0
    same: float = 0.0
    seconds: float = 0.0
    num_oom: int = 0
    """Runs that failed."""
    num_retries: int = 0
    """Decodes that ran out of memory and went on in tiles."""
    worst: dict[str, str] = field(default_factory=dict)

    def note(self, what: str, value: float, where: str) -> None:
        if value > getattr(self, what):
            setattr(self, what, value)
            self.worst[what] = where


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One workflow, and the machine that it is planned for."""

    pipeline: str
    profile: str
    sampling: dict[str, Any]
    other: dict[str, Any]
    """The same at another size, which is sampled after it."""
    hardware: Hardware

    def __str__(self) -> str:
        size = "x".join(str(self.sampling[name]) for name in ("width", "height", "frames", "batch_size"))
        return f"{self.pipeline} {size} with {self.profile} on {self.hardware}"


def random_case(number: int) -> Case:
    """Return the case of a number: always the same one."""
    random = Random(SEED + number)
    name = random.choice(PIPELINES)
    most = 16 if name != "tiny-wan" else 6  # times 16 pixels
    sampling = {
        "prompt": "a red fox in the snow",
        "negative_prompt": "",
        "width": 16 * random.randint(2, most),
        "height": 16 * random.randint(2, most),
        "frames": random.choice([1, 5, 9]) if name == "tiny-wan" else 1,
        # Above 1 both halves of a step are one batch of two, or two forwards.
        "guidance": random.choice([1.0, 4.0]),
        "batch_size": Random(BATCH_SEED + number).choice([1, 1, 2, 3]),
    }
    devices = tuple(
        DescribedDevice(
            name=f"gpu:{index}",
            total_bytes=int(random.uniform(*random.choice(DEVICE_MIB)) * MIB),
            link_bytes_per_s=int(random.uniform(2, 25) * 1e9),
            flops_per_s=random.uniform(1, 20) * 1e12,
        )
        for index in range(random.choice([1, 1, 2]))
    )
    budget = f"{random.choice(['diffusion', 'gpu:0'])}={random.uniform(10, 24):.1f}MiB"
    other = {**sampling, "width": 16 * random.randint(2, most), "height": 16 * random.randint(2, most)}
    return Case(
        pipeline=name,
        profile=random.choice(["auto", "auto", "prefetch=2", budget, budget]),
        sampling=sampling,
        other=other,
        hardware=Hardware(devices=devices, host_bytes=8 * GIB),
    )


def graph_of(case: Case, sampling: dict[str, Any], placement: str, profile: str) -> dict[str, Any]:
    load = {"pipeline": case.pipeline, "profile": profile, "precision": PRECISION, "placement": placement}
    sample = {"pipeline": ["load", 0], "steps": STEPS, "seed": 1, **sampling}
    return {
        "load": {"class_type": "HighwaterLoadPipeline", "inputs": load},
        "sample": {"class_type": "HighwaterSamplePipeline", "inputs": sample},
    }


def plan_case(case: Case, sampling: dict[str, Any], placement: str = "auto", profile: str = "") -> Any:
    from highwater.nodes.graph_plans import plan_graph

    graph = graph_of(case, sampling, placement, profile or case.profile)
    return plan_graph(graph, source=case.pipeline, hardware=case.hardware)


@dataclass(slots=True)
class Measured:
    """What a run did, by component."""

    device_bytes: dict[str, dict[str, int]] = field(default_factory=dict)
    activations: dict[str, int] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    room_bytes: int | None = None
    """What the VAE had to decode in, where it was asked for tiles."""


class Watch:
    """Takes the virtual seconds of each part's forwards by events on the compute stream.

    Waits for nothing: while a forward ends, the copies for the next one run.
    """

    def __init__(self, pipe: Any) -> None:
        self.taken: dict[str, list[list[torch.Event]]] = {}
        for name, module in pipe.components.items():
            if isinstance(module, torch.nn.Module):
                module.register_forward_pre_hook(lambda *_, name=name: self.of(name).append([self.mark()]))
                module.register_forward_hook(lambda *_, name=name: self.of(name)[-1].append(self.mark()))

    def of(self, name: str) -> list[list[torch.Event]]:
        return self.taken.setdefault(name, [])

    def mark(self) -> torch.Event:
        event = torch.Event(device=torch.device("sim:0"), enable_timing=True)
        event.record(torch.accelerator.current_stream(0))
        return event

    def read(self) -> dict[str, float]:
        """Return the usual seconds of each part's forwards; waits for their ends.

        The first of several also waits for what left since, which a plan tells as what is loaded before. The others
        may be the first behind a new plan, with staging memory that is empty: once with the first times of blocks, and
        again as those change with the plan, since what waits for its weights was launched meanwhile. The seconds of a
        plan are those of forwards that follow each other, so the middle one of the last counts.
        """
        found = {}
        for name, events in self.taken.items():
            events[-1][1].synchronize()
            seconds = [begin.elapsed_time(end) / 1e3 for begin, end in events]
            found[name] = median(seconds[1:][-NUM_TIMED:] or seconds)
        self.taken.clear()
        return found


def run_case(case: Case, planned: Plan, samplings: list[dict[str, Any]], uses: list[Sequence[Use]]) -> list[Measured]:
    """Load a pipeline as placed and sample each of these in turn, with their steps; return what each did.

    Args:
        uses: what was predicted of each.
    """
    from highwater.nodes.pipelines import tiled_decode
    from highwater.nodes.pipelines.diffusers_pipelines import load_with_sources
    from highwater.nodes.pipelines.pipeline_folders import ready_pipeline
    from highwater.nodes.pipelines.sampling import LoadedPipeline, Sampling

    manager = MemoryManager()
    pipe, sources = load_with_sources(ready_pipeline(case.pipeline))
    # As the nodes do, which trace again what the plan has traced.
    managed = manage(
        pipe,
        profile=str(planned.profile),
        precision=PRECISION,
        placement=planned.placement,
        files=sources,
        name=case.pipeline,
        manager=manager,
        uses=uses[0],
    )
    found = []
    watch = Watch(pipe)
    forms = {Sampling(seed=1, **sampling).form for sampling in samplings}
    loaded = LoadedPipeline(pipe=pipe, managed=managed, traced=forms)
    try:
        for sampling, predicted in zip(samplings, uses, strict=True):
            managed.expect({use.component: (use.activation_bytes or 0) - use.held_bytes for use in predicted})
            one = Measured()
            peaks: dict[str, int] = {}
            held: dict[str, dict[str, int]] = {}
            note = watch_needs(manager, peaks, held)
            rooms: list[int] = []

            def choose(size: Any, cost: Any, budget_bytes: int, rooms: list[int] = rooms) -> Any:
                rooms.append(budget_bytes)  # nothing else: what tells the cost keeps the latents
                return choose_tiles(size, cost, budget_bytes)

            with patch.object(tiled_decode, "choose_tiles", choose):
                loaded.sample(Sampling(seed=1, **sampling), on_step=lambda *_: None)
            note()
            room_bytes = rooms[-1] if rooms else None
            found.append(
                replace(one, device_bytes=held, activations=peaks, seconds=watch.read(), room_bytes=room_bytes)
            )
    finally:
        managed.release()
    return found


def watch_needs(manager: MemoryManager, peaks: dict[str, int], held: dict[str, dict[str, int]]) -> Any:
    """Note, at the end of each pass, what it needed beside weights and what its component held."""
    from highwater.memory.manager import calibration, leases

    learn = calibration.learn_needs

    def noting(member: Any, capacity: Any, current: Any, needed: Any) -> None:
        home = member.managed.primary.name
        if current.is_completed:
            # Beside what the pipeline held as the pass began: latents, embeddings, frames that are decoded already.
            before = member.allocated_at_entry.get(home, 0) - sum(manager.ledger.by_component(home).values())
            peaks[member.name] = max(peaks.get(member.name, 0), needed.get(home, 0) + max(0, before))
            here = {share.device: manager.ledger.held(member.id, share.device) for share in member.managed.plan.shares}
            held.setdefault(member.name, here)
        learn(member, capacity, current, needed)

    leases.learn_needs = noting

    def restore() -> None:
        leases.learn_needs = learn

    return restore


def measure_one(number: int, tally: Tally) -> None:
    case = random_case(number)
    hardware, where = case.hardware, f"case {number}: {case}"
    try:
        plan = plan_case(case, case.sampling)
    except (DoesNotFit, InvalidInput):
        tally.num_refused += 1
        return
    (planned,) = plan.plans.values()
    specs = [
        simdevice.SimDeviceSpec(
            total_bytes=device.total_bytes,
            h2d_bytes_per_s=device.simulated_link_bytes_per_s,
            d2h_bytes_per_s=device.simulated_link_bytes_per_s,
            peer_bytes_per_s=device.simulated_link_bytes_per_s,
            flops_per_s=device.flops_per_s or 1e13,
        )
        for device in hardware.devices
    ]
    try:
        other_plan = plan_case(case, case.other, planned.placement, str(planned.profile))
    except (DoesNotFit, InvalidInput):
        tally.num_refused += 1
        return
    reserve = {device.name: device.kept_free_bytes for device in plan.machine.devices}
    if any(one.run.remaining_bytes(at) < -reserve[at] for one in (plan, other_plan) for at in one.run.devices):
        tally.num_refused += 1  # the plan says that activations take more than there is
        return
    uses, other_uses = ([use.use for use in one.run.uses] for one in (plan, other_plan))
    state_links(hardware.links)  # as `highwater run` does where devices are described
    with simdevice.cluster(specs, pinned_bytes=hardware.pinned_bytes):
        try:
            samplings = [
                {**case.sampling, "steps": STEPS},
                {**case.sampling, "steps": STEPS_AGAIN},
                {**case.other, "steps": STEPS},
            ]
            first, again, elsewhere = run_case(case, planned, samplings, [uses, uses, other_uses])
            num_failed = sum(simdevice.stats(index).num_ooms for index in range(len(specs)))
            if num_failed:
                tally.num_retries += 1
                tally.worst["num_retries"] = where
        except torch.OutOfMemoryError:
            tally.num_oom += 1
            tally.worst["num_oom"] = where
            return
        compare(tally, where, plan, planned, first, again)
        compare_elsewhere(tally, where, other_plan, elsewhere)
    tally.num_cases += 1


def compare(tally: Tally, where: str, plan: Any, planned: Any, first: Measured, again: Measured) -> None:
    predicted = {use.use.component: use for use in plan.run.uses}
    is_large = False
    for part in planned.components:
        measured = first.activations.get(part.component)
        use = predicted.get(part.component)
        if measured is None or use is None:
            continue
        tally.num_parts += 1
        tally.num_streaming += part.streams
        at = f"{where}, {part.component}"
        shares = {share.device: share.device_bytes for share in part.shares}
        if first.device_bytes[part.component] != shares:
            tally.unequal.append(f"{at}: planned {shares}, held {first.device_bytes[part.component]}")
        expected = activations_of(use)
        if expected is not None and max(measured, expected) >= LEAST_BYTES:
            tally.note("under", 1 - expected / max(1, measured), at)
            tally.note("over", expected / max(1, measured) - 1, at)
            seen = again.activations[part.component]
            tally.note("same", abs(seen / max(1, measured) - 1), at)
            is_large |= measured > first.device_bytes[part.component][part.shares[0].device]
        if use.pass_s is not None and part.component in again.seconds:
            tally.note("seconds", abs(use.pass_s / again.seconds[part.component] - 1), at)
    tally.num_large += is_large


def activations_of(use: UsePlan) -> int | None:
    """Return what a use is expected to take of its device beside weights, in tiles where it computes in them."""
    return None if use.use.activation_bytes is None else max(map(use.activation_bytes, use.held))


def compare_elsewhere(tally: Tally, where: str, plan: Any, measured: Measured) -> None:
    """Compare with the plan of the other size.

    That plan is of a pipeline that is loaded for this size. The one that runs stays in the blocks into which it was cut
    for the first size, so its model may leave other room for the decode: its tiles are those for the room there was.
    """
    for use in plan.run.uses:
        expected, found = activations_of(use), measured.activations.get(use.use.component)
        if use.use.tiling is not None and measured.room_bytes is not None:
            in_tiles = use.use.tiling.choose(measured.room_bytes)
            expected = activations_of(replace(use, in_tiles=in_tiles))
        if expected is not None and found is not None and max(expected, found) >= LEAST_BYTES:
            tally.note("elsewhere", abs(expected / max(1, found) - 1), f"{where}, {use.use.component}")


def measure(num_cases: int = NUM_CASES, only: Collection[int] = ()) -> Result:
    """Plan and run cases from the first on, or those of these numbers."""
    from highwater.nodes.pipelines.tiny_pipelines import ensure_pipelines

    install()
    simdevice.install("sim", num_devices=2)
    tally = Tally()
    with tempfile.TemporaryDirectory() as folder:
        folder_paths.configure(models=Path(folder), output=Path(folder) / "out")
        ensure_pipelines(Path(folder) / "diffusers")
        for number in sorted(only) or itertools.count():
            if not only and tally.num_cases >= num_cases:
                break
            measure_one(number, tally)
    return result_of(tally)


def result_of(tally: Tally) -> Result:
    def row(what: str, found: str, limit: str, key: str) -> dict[str, Any]:
        return {"what": what, "found": found, "limit": limit, "worst": tally.worst.get(key, "")}

    rows = [
        row("weights and staging not as planned", f"{len(tally.unequal)} of {tally.num_parts} parts", "0", ""),
        row("activations, size never seen: less than needed", f"{tally.under:.1%}", f"{MOST_UNDER:.0%}", "under"),
        row("activations, size never seen: more than needed", f"{tally.over:.1%}", f"{MOST_OVER:.0%}", "over"),
        row("activations, after another size", f"{tally.elsewhere:.1%}", f"{MOST_SEEN_ELSEWHERE:.0%}", "elsewhere"),
        row("activations, same size again", f"{tally.same:.1%}", f"{MOST_SEEN:.0%}", "same"),
        row("seconds of a forward", f"{tally.seconds:.1%}", f"{MOST_SECONDS:.0%}", "seconds"),
        row("runs that ran out of memory", str(tally.num_oom), "0", "num_oom"),
        row("decodes that did, and went on in tiles", str(tally.num_retries), "0", "num_retries"),
    ]
    worst = max(
        tally.under / MOST_UNDER,
        tally.over / MOST_OVER,
        tally.elsewhere / MOST_SEEN_ELSEWHERE,
        tally.same / MOST_SEEN,
        tally.seconds / MOST_SECONDS,
        float(bool(tally.unequal)) * 2,
        float(bool(tally.num_oom or tally.num_retries)) * 2,
    )
    return Result(
        question=(
            f"What do plans of {tally.num_cases} random workflows say before, beside what happens? "
            f"({tally.num_parts} parts, {tally.num_streaming} of them streamed; in {tally.num_large} workflows a part "
            f"takes more beside its weights than they do; {tally.num_refused} more were refused as too large)"
        ),
        rows=rows,
        ratio=worst,
        meaning="the worst of these over its limit; at most 1",
        more={"Of weights and staging, not as planned:": [{"where": line} for line in tally.unequal[:10]]}
        if tally.unequal
        else {},
    )
