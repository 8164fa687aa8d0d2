"""What it costs a streamed step to see what others write to weights, add to a model or put in its place.

Looks are taken by the host while a pass begins and when a block is entered. Their time is real: CPU time of the thread
that computes, in passes of diffusers' Flux with its 57 blocks, its real number of modules and weights, and a tiny
width, half of it streamed on a simulated device. The step beside which they stand is a given one of 300 ms. A host runs
ahead of its device, so a step that takes longer by all of it is the worst case. How long the tiny passes themselves
take says nothing: their kernels compute on this host.

Content tags are found on the device when a copy has come and when it is dropped, so never in a step in which nothing is
loaded or dropped. Their time is virtual: the engine runs a stand-in for Flux with a 1024th of its bytes, over a link
and beside memory that are as much slower, whose blocks compute as long as the flops of Flux at 1024x1024 take on the
card. A kernel takes its memory traffic over the memory's speed; launches cost nothing.
"""

from __future__ import annotations

import time
import unittest.mock
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from statistics import median
from typing import Any

import torch

from highwater.headless import simdevice
from highwater.memory import MemoryManager, manage
from highwater.memory.runtime.blocks.bundle import Bundle
from highwater.memory.runtime.blocks.placed_tensors import PlacedTensors
from highwater.memory.runtime.changes.move_guard import MoveGuard
from highwater.memory.runtime.devices.loading_tags import LoadingTags
from highwater.memory.runtime.managed_component import ManagedComponent
from highwater.memory.runtime.outside_changes import OutsideChanges
from highwater.memory.transfer.devices import find_device
from highwater.memory.transfer.link_speed import link_bytes_per_s

from .case import Result
from .schedules import Work
from .shapes import flux
from .streaming import CARDS, SCALE, StandIn, fresh_user_cache, make_work

STEP_S = 0.3
NUM_PASSES = 40
NUM_STEPS = 20
CARD = "RTX 4090"
LINK_BYTES_PER_S = 25e9
MEMORY_BYTES_PER_S = 1e12
BUDGET = 0.60
NUM_WARM_UPS = 8
LAYERS, OBJECTS, VERSIONS = "look: layers and addresses", "look: objects of a block", "look: versions of a block"
ALL = "all looks"
LOOKS: tuple[tuple[str, type, str], ...] = (
    (LAYERS, ManagedComponent, "take_changes"),
    (LAYERS, OutsideChanges, "refuse_rivals"),
    (LAYERS, MoveGuard, "tell_undone"),
    (OBJECTS, PlacedTensors, "is_as_placed"),
    (VERSIONS, Bundle, "version"),
)


class Stopwatch:
    """CPU seconds of this thread in looks, by kind; a look inside another one counts as part of that."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self.is_running = False

    def time(self, what: str, look: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any) -> Any:
            if self.is_running:
                return look(*args)
            self.is_running = True
            begin_s = time.thread_time()
            try:
                return look(*args)
            finally:
                self.seconds[what] += time.thread_time() - begin_s
                self.is_running = False

        return timed


@contextmanager
def watched_looks() -> Iterator[Stopwatch]:
    watch = Stopwatch()
    with ExitStack() as stack:
        for what, owner, name in LOOKS:
            look = vars(owner)[name]
            is_property = isinstance(look, property)
            timed = watch.time(what, look.fget if is_property else look)
            stack.enter_context(unittest.mock.patch.object(owner, name, property(timed) if is_property else timed))
        yield watch


def tiny_flux() -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    """Return Flux with all its blocks, 32 wide, and inputs for it."""
    from diffusers import FluxTransformer2DModel

    torch.manual_seed(0)
    model = FluxTransformer2DModel(
        num_attention_heads=2,
        attention_head_dim=16,
        axes_dims_rope=(4, 4, 8),
        joint_attention_dim=32,
        pooled_projection_dim=32,
        guidance_embeds=True,
    )
    inputs = {
        "hidden_states": torch.randn(1, 16, 64),
        "encoder_hidden_states": torch.randn(1, 4, 32),
        "pooled_projections": torch.randn(1, 32),
        "timestep": torch.ones(1),
        "guidance": torch.ones(1),
        "img_ids": torch.zeros(16, 3),
        "txt_ids": torch.zeros(4, 3),
    }
    return model.eval().requires_grad_(False), inputs


def measure_looks() -> list[dict[str, Any]]:
    """Return a row for each kind of look, and for all: medians over passes between which nothing is changed."""
    model, inputs = tiny_flux()
    num_weights, num_modules = len(list(model.parameters())), len(list(model.modules()))
    weight_bytes = sum(weight.nbytes for weight in model.parameters())
    taken: dict[str, list[float]] = defaultdict(list)
    with fresh_user_cache(), simdevice.cluster([simdevice.SimDeviceSpec(total_bytes=1 << 30)]), torch.no_grad():
        manager = MemoryManager()
        manager.set_watermark("*", 0, 0)
        profile = f"{weight_bytes / 2e6:.6f}MB"
        with manage(model, profile=profile, placement="gpu:0", manager=manager) as managed, watched_looks() as watch:
            share = managed.members[0].managed.plan.shares[0]
            num_blocks, num_streamed = len(share.blocks), len(share.streamed)
            for number in range(NUM_WARM_UPS + NUM_PASSES):
                watch.seconds.clear()
                model(**inputs)
                if number >= NUM_WARM_UPS:  # by then all is loaded, timed and planned
                    for what in (LAYERS, OBJECTS, VERSIONS):
                        taken[what].append(watch.seconds[what])
                    taken[ALL].append(sum(watch.seconds.values()))
    said = {
        LAYERS: f"a pass begins: {num_modules} modules, {num_weights} weights",
        OBJECTS: f"a block is entered, each of {num_blocks}",
        VERSIONS: f"a pass begins, and a streamed block is entered, each of {num_streamed}",
        ALL: "the three together",
    }
    return [row(what, "real CPU", said[what], median(seconds), STEP_S) for what, seconds in taken.items()]


def row(what: str, clock: str, when: str, cost_s: float, step_s: float) -> dict[str, Any]:
    """``step_s`` is what the step takes without it."""
    return {
        "what": what,
        "time": clock,
        "when": when,
        "step without, ms": 1e3 * step_s,
        "it costs, ms": 1e3 * cost_s,
        "of the step": f"{cost_s / step_s:.2%}",
    }


def measure_run(work: Work, block_names: list[str], *, tags: bool, evicts: bool) -> float:
    """Return the virtual seconds of a run: residents loaded, steps, all dropped.

    Args:
        tags: find content tags.
        evicts: drop one resident block after every step, and load it again: the largest.
    """
    spec = simdevice.SimDeviceSpec(
        total_bytes=4 * work.weight_bytes // SCALE,
        h2d_bytes_per_s=work.link_bytes_per_s / SCALE,
        memory_bytes_per_s=MEMORY_BYTES_PER_S / SCALE,
        flops_per_s=1e30,
        launch_s=0,
        latency_s=0,
    )
    with ExitStack() as stack:
        stack.enter_context(fresh_user_cache())
        stack.enter_context(simdevice.cluster([spec]))
        stack.enter_context(torch.no_grad())
        if not tags:
            stack.enter_context(unittest.mock.patch.object(LoadingTags, "follow", lambda *_: None))
            stack.enter_context(unittest.mock.patch.object(LoadingTags, "finish", lambda tags: tags.copies.drain()))
        link_bytes_per_s(find_device("gpu:0"), lambda: spec.h2d_bytes_per_s)
        manager = MemoryManager()
        manager.set_watermark("*", 0, 0)
        model = StandIn(work, block_names)
        profile = f"{(int(BUDGET * work.weight_bytes) // SCALE + 0.5) / 1e6:.7f}MB"
        managed = stack.enter_context(manage(model, profile=profile, placement="gpu:0", manager=manager))
        managed_component = managed.members[0].managed
        x = torch.ones(1, dtype=torch.bfloat16).to(f"{simdevice.name()}:0")
        for _ in range(NUM_WARM_UPS):  # what the engine learns about order and times, it has learned then
            model(x)
            torch.accelerator.synchronize(0)
        share = managed_component.shares[0]
        resident = managed_component.plan.shares[0].resident
        largest = max(resident, key=lambda number: managed_component.component.blocks[number].weight_bytes)
        managed_component.unload()
        torch.accelerator.synchronize(0)
        begin_s = simdevice.clock_s()
        managed_component.load(managed_component.plan)
        for _ in range(NUM_STEPS):
            model(x)
            if evicts:
                share.drop_blocks([largest])
                managed_component.load(managed_component.plan)
        managed_component.unload()
        torch.accelerator.synchronize(0)
        seconds = simdevice.clock_s() - begin_s
        del x
    return seconds


def measure_tags() -> list[dict[str, Any]]:
    """Return a row for a run that loads its residents and drops them, and one for steps that evict a block."""
    shape = flux()
    work = make_work(shape, shape.block_of, CARDS[CARD], LINK_BYTES_PER_S)
    names = list(shape.block_names)
    whole, evicting = (
        [measure_run(work, names, tags=tags, evicts=evicts) for tags in (False, True)] for evicts in (False, True)
    )
    evicting_s = [with_block - without for with_block, without in zip(evicting, whole, strict=True)]
    return [
        row(
            "tags of all residents",
            "virtual",
            f"all are loaded before {NUM_STEPS} steps and dropped after them; a {NUM_STEPS}th of it",
            (whole[1] - whole[0]) / NUM_STEPS,
            whole[0] / NUM_STEPS,
        ),
        row(
            "tag of one block",
            "virtual",
            "the largest resident is dropped after each step and loaded again",
            (evicting_s[1] - evicting_s[0]) / NUM_STEPS,
            evicting[0] / NUM_STEPS,
        ),
    ]


def measure() -> Result:
    """Measure looks and tags; under a minute."""
    simdevice.install("sim", num_devices=1)
    looks, tags = measure_looks(), measure_tags()
    rows = [*looks, *tags]
    worst = max(found["it costs, ms"] / found["step without, ms"] for found in (looks[-1], *tags))
    return Result(
        question=(
            "What a streamed step of Flux costs more because others' writes, layers and replacements are seen. Looks: "
            f"medians of {NUM_PASSES} passes, beside a step of {1e3 * STEP_S:.0f} ms. Tags: Flux at 1024x1024, an "
            f"{CARD}, {LINK_BYTES_PER_S / 1e9:.0f} GB/s, device memory of {MEMORY_BYTES_PER_S / 1e12:.0f} TB/s, "
            f"{BUDGET:.0%} of its bytes as budget."
        ),
        rows=rows,
        ratio=worst,
        meaning="the most of a step that all looks, or tags, take; target at most 0.02",
    )
