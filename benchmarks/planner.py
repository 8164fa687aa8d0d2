"""How good plans are: the devices that one request chooses, beside the best of all choices, measured on devices.

Random instances that are small enough to try everything: up to four components of one run, two or three simulated
devices, each component on any one of them, and those of many steps also split over any two, in both orders, cut in
three ways. Each way to place a component is planned in full, and every combination of them is reckoned as a run. The
few that come out fastest run on simulated devices, together with the chosen one; the virtual seconds of their third run
count. So the best of all is the best of those that ran.

The second table is what planning itself takes: thousands of blocks on eight devices, the first time, in seconds of one
core.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import permutations, product
from random import Random
from typing import Any

import torch
from torch import nn

from highwater.headless import simdevice
from highwater.memory import MemoryManager, manage
from highwater.memory.errors import DoesNotFit, InvalidInput
from highwater.memory.options.marks import parse_watermarks
from highwater.memory.options.placement import parse_placement
from highwater.memory.options.profile import OffloadProfile
from highwater.memory.planner.capacity import DeviceCapacity, Machine
from highwater.memory.planner.plan import DevicePlan
from highwater.memory.planner.request import PlanRequest, plan_request
from highwater.memory.planner.run import BlockTimes, Use
from highwater.memory.planner.run_plan import first_and_further
from highwater.memory.units import GIB, KIB, MIB
from highwater.memory.weights.component import Block, Component, TensorSpec
from highwater.memory.weights.module_component import component_from_module

from .case import Result

NUM_INSTANCES = 40
SEED = 5
NUM_MEASURED = 3
STEPS = 8
CUTS = ("", "@0.3", "@0.6")
MOST_MEAN, MOST_WORST = 0.02, 0.10
MOST_SCALE_S = 0.1
KINDS = ("text", "diffusion", "vae", "control")
HIDDEN_BYTES = 64 * KIB


class Layer(nn.Module):
    """Computes for a given time, by the device, and returns a copy of its input."""

    def __init__(self, weight_bytes: int, seconds: dict[str, float]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(max(1, weight_bytes // 2), dtype=torch.bfloat16), requires_grad=False)
        self.seconds = seconds

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        simdevice.advance(hidden.device, self.seconds[f"gpu:{hidden.device.index}"])
        return hidden.clone()  # so that nothing runs before this has


class Part(nn.Module):
    def __init__(self, sizes: Sequence[int], seconds: dict[str, float]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(size, seconds) for size in sizes)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            hidden = layer(hidden)
        return hidden


@dataclass(frozen=True, kw_only=True, slots=True)
class Instance:
    """Components of a run by name: block bytes, seconds of a block by device, forwards; and the devices."""

    parts: dict[str, tuple[tuple[int, ...], dict[str, float], int]]
    devices: tuple[tuple[int, float], ...]
    """Bytes, and bytes per second from the host."""

    @property
    def names(self) -> list[str]:
        return [f"gpu:{index}" for index in range(len(self.devices))]


def random_instance(random: Random) -> Instance:
    count = random.choice([2, 2, 3])
    devices = tuple((int(random.uniform(12, 56) * MIB), random.uniform(2, 20) * 1e9) for _ in range(count))
    speeds = [random.uniform(0.3, 1.0) for _ in range(count)]
    parts = {}
    for number in range(random.randint(1, 4)):
        kind = KINDS[number] if number < len(KINDS) else "text"
        block_bytes = int(random.uniform(1.1, 4) * MIB)
        block_s = random.uniform(0.2, 3.0) * block_bytes / 10e9
        passes = STEPS if kind in ("diffusion", "control") else 1
        seconds = {f"gpu:{index}": block_s / speed for index, speed in enumerate(speeds)}
        parts[f"{kind}_{number}"] = (block_bytes,) * random.randint(2, 12), seconds, passes
    return Instance(parts=parts, devices=devices)


def machine_of(instance: Instance) -> Machine:
    devices = [DeviceCapacity(name="cpu", total_bytes=8 * GIB, available_bytes=8 * GIB)]
    devices += [
        DeviceCapacity(
            name=f"gpu:{index}",
            total_bytes=size,
            available_bytes=size - MIB,
            kept_free_bytes=MIB,
            link_bytes_per_s=link,
        )
        for index, (size, link) in enumerate(instance.devices)
    ]
    return Machine(devices=tuple(devices), pinned_bytes=4 * GIB)


def uses_of(instance: Instance) -> tuple[Use, ...]:
    return tuple(
        Use(
            component=name,
            num_passes=passes,
            activation_bytes=2 * HIDDEN_BYTES,
            held_bytes=HIDDEN_BYTES,
            carried_bytes=HIDDEN_BYTES,
            times={device: BlockTimes(blocks_s=(block_s,) * len(sizes)) for device, block_s in seconds.items()},
        )
        for name, (sizes, seconds, passes) in instance.parts.items()
    )


def request_for(instance: Instance, modules: dict[str, nn.Module], placement: str) -> PlanRequest:
    machine = machine_of(instance)
    names = [device.name for device in machine.devices]
    return PlanRequest(
        components=tuple(component_from_module(module, name=name) for name, module in modules.items()),
        machine=machine,
        profile=OffloadProfile(),
        placement=parse_placement(placement, devices=names, components=list(modules)),
        uses=uses_of(instance),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Option:
    """One way to place a component, planned by itself."""

    placement: str
    shares: tuple[DevicePlan, ...]
    pass_s: float


def options_of(instance: Instance, modules: dict[str, nn.Module], name: str) -> list[Option]:
    """Return every way to place a component: on one device, or over two, each cut in three ways."""
    sizes, _, passes = instance.parts[name]
    texts = list(instance.names)
    if len(sizes) > 2 and passes > 1:
        splits = [f"{one}&{other}" for one, other in permutations(instance.names, 2)]
        texts += [f"{split}{cut}" for split in splits for cut in CUTS]
    found = []
    for text in texts:
        alone = replace(instance, parts={name: instance.parts[name]})
        try:
            plan = plan_request(request_for(alone, {name: modules[name]}, f"{name}={text}"))
        except (DoesNotFit, InvalidInput):
            continue
        if plan.run is not None and (pass_s := plan.run.uses[0].pass_s) is not None:
            found.append(Option(placement=plan.placement, shares=plan[name].shares, pass_s=pass_s))
    return found


def fastest_placements(instance: Instance, modules: dict[str, nn.Module]) -> list[str]:
    """Return the placements of which runs are reckoned to be fastest."""
    options = [options_of(instance, modules, name) for name in instance.parts]
    uses, machine = uses_of(instance), machine_of(instance)
    reckoned: dict[str, float] = {}
    for chosen in product(*options):
        shares = {name: option.shares for name, option in zip(instance.parts, chosen, strict=True)}
        passes = {number: option.pass_s for number, option in enumerate(chosen)}
        run = first_and_further(shares, uses, machine, pass_s=passes)
        if run.seconds is not None:
            reckoned[",".join(option.placement for option in chosen)] = run.seconds
    return sorted(reckoned, key=reckoned.__getitem__)[:NUM_MEASURED]


def run_seconds(instance: Instance, modules: dict[str, nn.Module], placement: str) -> float:
    """Return the virtual seconds of the third run with a placement."""
    specs = [
        simdevice.SimDeviceSpec(
            total_bytes=size, h2d_bytes_per_s=link, d2h_bytes_per_s=link, peer_bytes_per_s=link, launch_s=0,
            latency_s=0, flops_per_s=1e30, memory_bytes_per_s=1e30,
        )
        for size, link in instance.devices
    ]  # fmt: skip
    with simdevice.cluster(specs, pinned_bytes=4 * GIB), torch.no_grad():
        manager = MemoryManager()
        manager.commands.set_default_watermarks(parse_watermarks("1MiB:1MiB"))
        managed = manage(dict(modules), placement=placement, manager=manager, name="run", uses=uses_of(instance))
        try:
            for turn in range(3):
                if turn == 2:
                    begin_s = now_s(len(specs))
                for name, (_, _, passes) in instance.parts.items():
                    home = managed_home(managed, name)
                    hidden = torch.zeros(HIDDEN_BYTES, dtype=torch.uint8, device=home)
                    for _ in range(passes):
                        hidden = modules[name](hidden)
                    now_s(len(specs))  # the next one needs its result
            del hidden
            return now_s(len(specs)) - begin_s
        finally:
            managed.release()


def managed_home(managed: Any, name: str) -> torch.device:
    return next(m for m in managed.members if m.name == name).managed.primary.torch_device


def now_s(count: int) -> float:
    for index in range(count):
        torch.accelerator.synchronize(index)
    return simdevice.clock_s()


def measure_instance(random: Random) -> tuple[float, str] | None:
    """Return by what part the chosen placement is slower than the best one, and what was chosen; None: none fits."""
    instance = random_instance(random)
    modules = {name: Part(sizes, seconds) for name, (sizes, seconds, _) in instance.parts.items()}
    try:
        chosen = plan_request(request_for(instance, modules, "auto"))
    except (DoesNotFit, InvalidInput):
        return None
    fastest = fastest_placements(instance, modules)
    measured = {placement: run_seconds(instance, modules, placement) for placement in {*fastest, chosen.placement}}
    best_s = min(measured.values())
    return measured[chosen.placement] / best_s - 1, f"{instance.devices}: {chosen.placement}"


def measure_scale() -> list[dict[str, Any]]:
    """Return what it takes to plan thousands of blocks on eight devices, each case for the first time."""
    rows = []
    for is_even, part in product((True, False), (0.5, 0.9)):
        component = many_blocks(2000, is_even=is_even)
        names = [f"gpu:{index}" for index in range(8)]
        room = int(component.weight_bytes / len(names) * part)
        devices = [DeviceCapacity(name="cpu", total_bytes=64 * GIB, available_bytes=64 * GIB)]
        devices += [
            DeviceCapacity(name=name, total_bytes=24 * GIB, available_bytes=room, link_bytes_per_s=25e9)
            for name in names
        ]
        request = PlanRequest(
            components=(component,),
            machine=Machine(devices=tuple(devices), pinned_bytes=32 * GIB),
            placement=parse_placement("&".join(names), devices=["cpu", *names]),
        )
        begin_s = time.process_time()
        plan = plan_request(request)
        seconds = time.process_time() - begin_s
        rows.append(
            {
                "blocks": "of one size" if is_even else "of three sizes",
                "fit": f"{part:.0%}",
                "streamed": sum(len(share.streamed) for share in plan.components[0].shares),
                "ms of one core": seconds * 1000,
            }
        )
    return rows


def many_blocks(count: int, *, is_even: bool) -> Component:
    random = Random(1)
    sizes = [1024 if is_even else random.choice([512, 1024, 3000]) for _ in range(count)]
    blocks = tuple(
        Block(
            name=f"layers.{number}",
            tensors=(TensorSpec(name=f"layers.{number}.weight", dtype="BF16", shape=(1024, size)),),
        )
        for number, size in enumerate(sizes)
    )
    return Component(name="model", kind="diffusion", blocks=blocks, non_block=Block(name="", tensors=()), has_file=True)


def measure(num_instances: int = NUM_INSTANCES) -> Result:
    scale = measure_scale()
    simdevice.install("sim", num_devices=3)
    random = Random(SEED)
    found: list[tuple[float, str]] = []
    num_refused = 0
    while len(found) < num_instances:
        one = measure_instance(random)
        if one is None:
            num_refused += 1
        else:
            found.append(one)
    slower = sorted(part for part, _ in found)
    mean, (worst, where) = sum(slower) / len(slower), max(found)
    slowest_s = max(row["ms of one core"] for row in scale) / 1000
    rows = [
        {"what": "slower than the best, on average", "found": f"{mean:.2%}", "limit": f"{MOST_MEAN:.0%}"},
        {"what": "slower than the best, at worst", "found": f"{worst:.2%}", "limit": f"{MOST_WORST:.0%}"},
        {"what": "the best itself", "found": f"{sum(part <= 1e-6 for part in slower)} of {len(slower)}", "limit": "-"},
        {"what": "2,000 blocks on 8 devices", "found": f"{slowest_s * 1000:.0f} ms", "limit": "100 ms"},
    ]
    return Result(
        question=(
            f"How much slower than the best placement is the one that is chosen? {len(found)} random instances "
            f"({num_refused} more do not fit); the worst: {where}"
        ),
        rows=rows,
        ratio=max(mean / MOST_MEAN, worst / MOST_WORST, slowest_s / MOST_SCALE_S),
        meaning="the worst of these over its limit; at most 1",
        more={"Planning a split of 2,000 blocks over 8 devices for the first time:": scale},
    )
