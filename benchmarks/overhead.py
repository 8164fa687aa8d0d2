"""What managing costs the host: CPU time of a forward over that of the plain module.

The layers compute nothing, so what is measured is hooks, books and queueing alone. The device is a simulated one: its
kernels and copies run beside the host, in a thread of their own, whose time does not count here, nor does that of
threads which read files. Every number is the smallest of many, the candidates take turns in one process. Beside ours
stand accelerate's hook that moves arguments to a device (`AlignDevicesHook`, nothing offloaded), diffusers' group
offloading of single blocks with a stream, its layerwise casting, and mmgp, if that is installed.

Other tables of this case: what a forward costs beside other devices and components, what joining, leaving and another
profile cost in copies of the weights, and how many objects a forward leaves to the garbage collector.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn

from highwater.headless import simdevice
from highwater.memory import MemoryManager, manage
from highwater.memory.units import slab_offsets

from . import mmgp_stand_in
from .case import Result

NUM_BLOCKS = 57
NUM_LAYERS = 4
DIM = 64
# A simulated device widens eight bits in the thread that is measured. Of so few that is next to nothing.
SMALL_DIM = 8
MISSING_BYTES = 256
NUM_ROUNDS = 60
NUM_WARM = 4
NUM_COMPONENTS = 1000
NUM_LARGE = 3
LARGE = {"num_blocks": 32, "num_layers": 4, "dim": 2048}
DEVICE = simdevice.SimDeviceSpec(total_bytes=1 << 36)

Forward = Callable[[], Any]


class IdleLinear(nn.Linear):
    """A linear layer, with its weight and bias, that returns what it is given."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


class Block(nn.Module):
    def __init__(self, num_layers: int, dim: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(IdleLinear(dim, dim, dtype=torch.bfloat16) for _ in range(num_layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Stack(nn.Module):
    """A transformer as far as its tree goes: a layer before the blocks, and one behind them."""

    def __init__(self, num_blocks: int, num_layers: int = NUM_LAYERS, dim: int = DIM) -> None:
        super().__init__()
        self.first = IdleLinear(dim, dim, dtype=torch.bfloat16)
        self.blocks = nn.ModuleList(Block(num_layers, dim) for _ in range(num_blocks))
        self.last = IdleLinear(dim, dim, dtype=torch.bfloat16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


def build(num_blocks: int, num_layers: int = NUM_LAYERS, dim: int = DIM) -> Stack:
    return Stack(num_blocks, num_layers, dim).eval().requires_grad_(False)


def build_flux() -> nn.Module:
    """Return Flux's transformer with all its blocks and small layers: the host's time is that of queueing kernels."""
    from diffusers import FluxTransformer2DModel

    shape = {"attention_head_dim": 16, "num_attention_heads": 2, "axes_dims_rope": (4, 6, 6)}
    widths = {"in_channels": 4, "joint_attention_dim": 32, "pooled_projection_dim": 32}
    return FluxTransformer2DModel(**shape, **widths).eval().requires_grad_(False)


def run_flux(model: nn.Module) -> Forward:
    tokens, text = 16, 8
    given = {
        "hidden_states": torch.randn(1, tokens, 4),
        "encoder_hidden_states": torch.randn(1, text, 32),
        "pooled_projections": torch.randn(1, 32),
        "timestep": torch.ones(1),
        "img_ids": torch.zeros(tokens, 3),
        "txt_ids": torch.zeros(text, 3),
    }
    placed = {name: tensor.to("sim:0") for name, tensor in given.items()}
    return lambda: model(**placed, return_dict=False)


# -- the candidates: each yields a forward


def run(model: nn.Module) -> Forward:
    x = torch.zeros(1, DIM, dtype=torch.bfloat16, device="sim:0")
    return lambda: model(x)


@contextmanager
def plain(model: Stack) -> Iterator[Forward]:
    yield run(model.to("sim:0"))


@contextmanager
def empty_hooks(model: Stack) -> Iterator[Forward]:
    for block in model.blocks:
        block.register_forward_pre_hook(lambda module, args, kwargs: None, with_kwargs=True)
        block.register_forward_hook(lambda module, args, output: None, always_call=True)
    yield run(model.to("sim:0"))


@contextmanager
def accelerate_hooks(model: Stack) -> Iterator[Forward]:
    from accelerate.hooks import AlignDevicesHook, add_hook_to_module

    for block in model.to("sim:0").blocks:
        add_hook_to_module(block, AlignDevicesHook(execution_device="sim:0"))
    yield run(model)


@contextmanager
def group_offloading(model: Stack) -> Iterator[Forward]:
    from diffusers.hooks import apply_group_offloading

    apply_group_offloading(
        model, torch.device("sim:0"), offload_type="block_level", num_blocks_per_group=1, use_stream=True
    )
    yield run(model)


@contextmanager
def layerwise_casting(model: Stack) -> Iterator[Forward]:
    from diffusers.hooks import apply_layerwise_casting

    apply_layerwise_casting(
        model.to("sim:0"), storage_dtype=torch.float8_e4m3fn, compute_dtype=torch.bfloat16, skip_modules_pattern=()
    )
    yield run(model)


@contextmanager
def mmgp(model: Stack) -> Iterator[Forward]:
    """Stream all blocks, page-locked, the next one ahead of its use."""
    offload = mmgp_stand_in.load_mmgp("sim")
    assert offload is not None
    budget_mb = 1.5 * bytes_of(model.blocks[0]) / 1e6
    choices = {"pinnedMemory": True, "quantizeTransformer": False, "budgets": {"transformer": budget_mb}}
    handle = offload.all({"transformer": model}, asyncTransfers=True, verboseLevel=0, **choices)
    torch.set_default_device(None)  # which it leaves on its device
    try:
        yield run(model)
    finally:
        handle.release()


@contextmanager
def ours(model: Stack, profile: str = "auto", **choices: Any) -> Iterator[Forward]:
    manager = MemoryManager()
    manager.set_watermark("*", 0, 0)
    with manage(model, profile, manager=manager, placement="gpu:0", **choices):
        yield run(model)


def streamed(model: Stack, *, missing_bytes: int = 0) -> AbstractContextManager[Forward]:
    """Stream all blocks through staging memory for three, less these bytes."""
    fixed_bytes = slab_bytes(model.first, model.last)
    return ours(model, f"{(fixed_bytes + 3 * slab_bytes(model.blocks[0]) - missing_bytes) / 1e6:.6f}MB")


def eight_bits(model: Stack) -> AbstractContextManager[Forward]:
    return ours(model, precision="fp8 scaled")


def bytes_of(module: nn.Module) -> int:
    return sum(parameter.nbytes for parameter in module.parameters())


def slab_bytes(*modules: nn.Module) -> int:
    return slab_offsets([parameter.nbytes for module in modules for parameter in module.parameters()])[1]


# -- measuring


def cpu_us(
    candidates: Mapping[str, Callable[[], AbstractContextManager[Forward]]], num_rounds: int
) -> dict[str, float]:
    """Return the smallest CPU microseconds of a forward of each, in this thread; they take turns."""
    best = dict.fromkeys(candidates, float("inf"))
    with ExitStack() as stack, torch.no_grad():
        forwards = {name: stack.enter_context(make()) for name, make in candidates.items()}
        stack.enter_context(uncollected())
        for round_number in range(NUM_WARM + num_rounds):
            for name, forward in forwards.items():
                begin = time.thread_time()
                forward()
                seconds = time.thread_time() - begin
                torch.accelerator.synchronize(0)
                if round_number >= NUM_WARM:
                    best[name] = min(best[name], 1e6 * seconds)
    return best


@contextmanager
def uncollected() -> Iterator[None]:
    """Leave garbage alone in the body: a collection that one candidate causes would meet any of them."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def process_s(call: Forward) -> float:
    """Return the CPU seconds of a call, of all threads."""
    with uncollected():
        begin = time.process_time()
        call()
        return time.process_time() - begin


def beside(
    plain_too: Mapping[str, Callable[[Stack], AbstractContextManager[Forward]]], **shape: int
) -> dict[str, float]:
    """Return what each costs per block over the plain module, by its name."""
    candidates = {name: partial(make, build(**shape)) for name, make in {"plain": plain, **plain_too}.items()}
    best = cpu_us(candidates, NUM_ROUNDS if shape["num_blocks"] < 100 else NUM_ROUNDS // 4)
    return {name: (us - best["plain"]) / shape["num_blocks"] for name, us in best.items()}


def real_forwards() -> tuple[float, float]:
    """Return the CPU microseconds of a forward of Flux's transformer, all resident, and of the plain module's."""

    @contextmanager
    def managed() -> Iterator[Forward]:
        manager = MemoryManager()
        manager.set_watermark("*", 0, 0)
        model = build_flux()
        with manage(model, manager=manager, placement="gpu:0"):
            yield run_flux(model)

    @contextmanager
    def unmanaged() -> Iterator[Forward]:
        yield run_flux(build_flux().to("sim:0"))

    best = cpu_us({"plain": unmanaged, "ours": managed}, NUM_ROUNDS)
    return best["ours"], best["plain"]


def cyclic_objects(make: Callable[[Stack], AbstractContextManager[Forward]]) -> int:
    """Return how many objects a steady forward leaves that only the garbage collector frees."""
    with make(build(NUM_BLOCKS)) as forward, torch.no_grad():
        for _ in range(NUM_WARM):
            forward()
        with uncollected():
            forward()
            return gc.collect()


def forwards_beside_others() -> tuple[float, float, float]:
    """Return the CPU microseconds of a forward alone and beside other components, and the CPU seconds to add those."""
    with ours(build(NUM_BLOCKS)) as alone, torch.no_grad():
        manager = MemoryManager()
        manager.set_watermark("*", 0, 0)
        handles: list[Any] = []
        model = build(NUM_BLOCKS)
        others = {f"other{number}": build(1, 1) for number in range(NUM_COMPONENTS)}

        def add() -> None:
            for name, other in others.items():
                handles.append(manage({name: other}, manager=manager, placement="gpu:0"))

        add_s = process_s(add)
        with manage(model, manager=manager, placement="gpu:0"):
            forwards = {"alone": alone, "beside": run(model)}
            best = cpu_us({name: partial(nullcontext, forward) for name, forward in forwards.items()}, NUM_ROUNDS)
        for handle in handles:
            handle.release()
    return best["alone"], best["beside"], add_s


def copies_of_weights() -> dict[str, float]:
    """Return the CPU seconds of managing and releasing, and of other profiles, over those of a copy of the weights."""
    model = build(**LARGE)
    manager = MemoryManager()
    manager.set_watermark("*", 0, 0)
    best: dict[str, float] = {}
    handles: list[Any] = []

    def note(name: str, call: Forward) -> None:
        best[name] = min(best.get(name, float("inf")), process_s(call))

    for _ in range(NUM_LARGE):
        note("copy", lambda: [parameter.detach().clone() for parameter in model.parameters()])
        note("manage", lambda: handles.append(manage(model, manager=manager, placement="gpu:0")))
        note("reprofile", lambda: handles[-1].reprofile("50%"))
        note("release", lambda: handles[-1].release())
    return {
        "manage + release": (best["manage"] + best["release"]) / best["copy"],
        "reprofile": best["reprofile"] / best["copy"],
    }


def measure() -> Result:
    """Measure all of it; some minutes."""
    simdevice.install("sim", num_devices=1)
    simdevice.configure([DEVICE])
    rows: list[dict[str, str | float]] = []

    def add_row(
        what: str, ours: float, peer: str, theirs: float | str, target: str, group: str = "us per block"
    ) -> float:
        ratio = ours / theirs if isinstance(theirs, float) else ours
        rows.append(
            {
                "what": what,
                "unit": group,
                "Highwater": ours,
                "beside": peer,
                "theirs": theirs,
                "ratio": ratio,
                "target": target,
            }
        )
        return ratio

    has_mmgp = mmgp_stand_in.load_mmgp("sim") is not None
    main_ratio = float("inf")
    for num_blocks in (8, NUM_BLOCKS, 512):
        shape = {"num_blocks": num_blocks}
        resident = beside({"accelerate": accelerate_hooks, "hooks": empty_hooks, "ours": ours}, **shape)
        ratio = add_row(
            f"all resident, {num_blocks} blocks", resident["ours"], "accelerate's hook", resident["accelerate"], "1.0"
        )
        add_row(f"all resident, {num_blocks} blocks", resident["ours"], "two empty hooks", resident["hooks"], "")
        if num_blocks == NUM_BLOCKS:
            main_ratio = ratio
        peers = {"group": group_offloading, "ours": streamed, "short": partial(streamed, missing_bytes=MISSING_BYTES)}
        streams = beside(peers | ({"mmgp": mmgp} if has_mmgp else {}), **shape)
        add_row(
            f"streamed, {num_blocks} blocks", streams["ours"], "diffusers' group offloading", streams["group"], "0.5"
        )
        # Then most blocks lie in two pieces, at the end of the staging memory and at its beginning, in a copy each.
        short = f"streamed, {num_blocks} blocks, staging memory {MISSING_BYTES} bytes short of three"
        add_row(short, streams["short"], "diffusers' group offloading", streams["group"], "0.5")
        if has_mmgp:
            add_row(f"streamed, {num_blocks} blocks", streams["ours"], "mmgp", streams["mmgp"], "")
        for num_layers in (1, NUM_LAYERS):
            for dim in (DIM, SMALL_DIM):
                both = {"layerwise": layerwise_casting, "ours": eight_bits}
                casts = beside(both, **shape, num_layers=num_layers, dim=dim)
                what = f"eight bits, {num_blocks} blocks of {num_layers}, {dim} wide"
                add_row(what, casts["ours"], "diffusers' layerwise casting", casts["layerwise"], "0.5")
    for num_devices in (1, 8):
        simdevice.configure([DEVICE] * num_devices)
        resident = beside({"accelerate": accelerate_hooks, "ours": ours}, num_blocks=NUM_BLOCKS)
        what = f"all resident, devices in the machine: {num_devices}"
        add_row(what, resident["ours"], "accelerate's hook", resident["accelerate"], "1.0")
    simdevice.configure([DEVICE])
    real, plain_us = real_forwards()
    what = "all resident, Flux's transformer with small layers"
    add_row(what, real, "the plain module", plain_us, "1.01", "us per forward")
    for what, make in {"all resident": ours, "streamed": streamed, "eight bits": eight_bits}.items():
        add_row(f"cyclic objects, {what}", cyclic_objects(make), "", "", "0", "objects per forward")
    alone, others, add_s = forwards_beside_others()
    add_row(f"a forward beside {NUM_COMPONENTS} components", others, "the same alone", alone, "1.2", "us per forward")
    add_row(f"adding {NUM_COMPONENTS} components", add_s, "", "", "5", "CPU seconds")
    for what, copies in copies_of_weights().items():
        add_row(what, copies, "a copy of the weights", 1.0, "1.2" if "release" in what else "0.1", "copies")
    return Result(
        question="CPU time of the host over that of the plain module; the layers compute nothing.",
        rows=rows,
        ratio=main_ratio,
        meaning=f"all resident, {NUM_BLOCKS} blocks: Highwater over accelerate's hook, target at most 1.0",
    )
