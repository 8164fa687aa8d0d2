"""One way to run a Flux-shaped transformer on a real device, measured in a process of its own.

``python gpu_worker.py REQUEST`` with a `Request` as JSON; every line of its output that begins with "RESULT " is one
`Row` as JSON. It runs under ComfyUI's Python, too, and beside libraries that patch torch's or each other's functions
when they are imported: so it imports nothing of ours, nor of others, before a method needs it.

Every number is measured: bytes and overlap of copies by torch's profiler in a step that is not timed, peaks by asking
the driver every two milliseconds while the first steps run, host bytes as what the machine has less of.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    del sys.path[0]  # this folder, whose comfy.py is not ComfyUI's

import torch
from torch import nn

NUM_WARM_UPS = 3
NUM_STEPS = 5
# Of a slower device fewer steps tell as much.
SLOW_STEP_S, NUM_SLOW_STEPS = 1.5, 2
POLL_S = 0.002
MARK = "RESULT "
# The transformer's configuration, and image tokens a side; text is 512 tokens, or 8.
SIZES: dict[str, dict[str, Any]] = {
    "12B": {"side": 64, "text": 512, "config": {"guidance_embeds": True}},
    "tiny": {
        "side": 4,
        "text": 8,
        "config": {
            "in_channels": 16,
            "num_layers": 2,
            "num_single_layers": 4,
            "attention_head_dim": 16,
            "num_attention_heads": 4,
            "joint_attention_dim": 32,
            "pooled_projection_dim": 32,
            "guidance_embeds": True,
            "axes_dims_rope": (4, 6, 6),
        },
    },
}
# The same in ComfyUI's words; there is no smaller one that it recognises.
COMFYUI_SIZES: dict[str, dict[str, Any]] = {
    "12B": {"hidden_size": 3072, "num_heads": 24, "depth": 19, "depth_single_blocks": 38, "context_in_dim": 4096},
    "tiny": {"hidden_size": 128, "num_heads": 1, "depth": 2, "depth_single_blocks": 4, "context_in_dim": 64},
}


@dataclass(kw_only=True)
class Request:
    """What to run: a method, the model's size, a device, and within how many bytes of weights.

    ``peaks`` are device bytes to be matched after the budgets; only Highwater can.
    """

    method: str
    size: str
    device: str
    budgets: list[int | None] = field(default_factory=lambda: [None])
    peaks: list[int] = field(default_factory=list)
    comfyui: str = ""
    arguments: list[str] = field(default_factory=list)


@dataclass(kw_only=True)
class Row:
    """What was measured; None is not known. ``overlap`` is the part of the copies' time in which kernels ran."""

    budget_bytes: int | None = None
    peak_to_match: int | None = None
    s_per_step: float | None = None
    moved_bytes: int | None = None
    overlap: float | None = None
    peak_bytes: int | None = None
    pinned_bytes: int | None = None
    host_bytes: int | None = None
    error: str = ""
    notes: dict[str, Any] = field(default_factory=dict)


def emit(row: Row) -> None:
    print(MARK + json.dumps(asdict(row)), flush=True)


def describe(error: BaseException) -> str:
    """Return an error as the one line that a row has room for."""
    text = (str(error).strip() or "no message").splitlines()[0]
    return f"{type(error).__name__}: {text[:120]}"


# -- measuring


class Meter:
    """Reads one device and the host; what it tells is since it was made."""

    def __init__(self, device: torch.device) -> None:
        import psutil

        self.device = device
        self.module = torch.get_device_module(device)
        self.host = psutil.virtual_memory
        self.free_host_bytes = int(self.host().available)
        torch.zeros(1, device=device)  # the driver's context is not the method's
        self.base_bytes = self.used_bytes()

    def used_bytes(self) -> int:
        free, total = self.module.mem_get_info(self.device)
        return int(total - free)

    def synchronize(self) -> None:
        torch.accelerator.synchronize(self.device)

    @contextmanager
    def peak(self, row: Row) -> Iterator[None]:
        """Ask the driver again and again; sets the row's peak."""
        done = threading.Event()
        peaks = [self.used_bytes()]

        def poll() -> None:
            while not done.wait(POLL_S):
                peaks[0] = max(peaks[0], self.used_bytes())

        thread = threading.Thread(target=poll, daemon=True)
        thread.start()
        try:
            yield
            self.synchronize()
            peaks[0] = max(peaks[0], self.used_bytes())
        finally:
            done.set()
            thread.join()
        row.peak_bytes = peaks[0] - self.base_bytes

    def pinned_bytes(self) -> int | None:
        """Return what torch's allocator has page-locked; what others lock through the driver it does not know."""
        stats = getattr(self.module, "host_memory_stats", dict)()
        return stats.get("allocated_bytes.current")

    def read_host(self, row: Row) -> None:
        row.host_bytes = self.free_host_bytes - int(self.host().available)
        row.pinned_bytes = self.pinned_bytes()


def measure(step: Callable[[], Any], meter: Meter, row: Row) -> None:
    """Fill a row: first steps with the driver watched, then timed ones, then one that the profiler sees."""

    def timed(num_steps: int) -> float:
        meter.synchronize()
        begin_s = time.perf_counter()
        for _ in range(num_steps):
            step()
        meter.synchronize()
        return (time.perf_counter() - begin_s) / num_steps

    with meter.peak(row):
        warm_s = min(timed(1) for _ in range(NUM_WARM_UPS))
    meter.read_host(row)
    row.s_per_step = timed(NUM_STEPS if warm_s < SLOW_STEP_S else NUM_SLOW_STEPS)
    row.moved_bytes, row.overlap = watch_copies(step, meter)


def watch_copies(step: Callable[[], Any], meter: Meter) -> tuple[int | None, float | None]:
    """Return the bytes that one step copies to the device, and the part of their time in which kernels ran."""
    if meter.device.type != "cuda":
        from highwater.headless import simdevice

        before = simdevice.stats(meter.device.index).h2d_bytes
        step()
        meter.synchronize()
        return simdevice.stats(meter.device.index).h2d_bytes - before, None
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        step()
        meter.synchronize()
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory, "trace.json")
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    return read_trace(events)


def read_trace(events: Iterable[dict[str, Any]]) -> tuple[int | None, float | None]:
    """Return the bytes of all copies to the device in a trace, and the part of their time in which kernels ran."""
    copies, kernels, num_bytes = [], [], 0
    for event in events:
        span = event.get("ts", 0.0), event.get("ts", 0.0) + event.get("dur", 0.0)
        if event.get("cat") == "gpu_memcpy" and "HtoD" in event["name"]:
            copies.append(span)
            num_bytes += event["args"]["bytes"]
        elif event.get("cat") == "kernel":
            kernels.append(span)
    if not kernels:  # the profiler has no access to this device
        return None, None
    copies, kernels = unite(copies), unite(kernels)
    copying = sum(end - begin for begin, end in copies)
    both = sum(
        max(0.0, min(end, kernel_end) - max(begin, kernel_begin))
        for begin, end in copies
        for kernel_begin, kernel_end in kernels
        if kernel_begin < end and begin < kernel_end
    )
    return num_bytes, both / copying if copying else None


def unite(spans: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return spans of time without overlaps, in order."""
    united: list[tuple[float, float]] = []
    for begin, end in sorted(spans):
        if united and begin <= united[-1][1]:
            united[-1] = united[-1][0], max(united[-1][1], end)
        else:
            united.append((begin, end))
    return united


# -- the model


def build_transformer(size: str) -> nn.Module:
    """Return a diffusers Flux transformer in bf16 in plain RAM, its weights cheap random numbers."""
    from diffusers import FluxTransformer2DModel

    torch.set_default_dtype(torch.bfloat16)
    with torch.device("meta"):
        model = FluxTransformer2DModel(**SIZES[size]["config"])
    torch.set_default_dtype(torch.float32)
    model.to_empty(device="cpu").eval().requires_grad_(False)
    for weight in model.parameters():
        fill(weight)
    return model


@torch.no_grad()
def fill(weight: torch.Tensor, values: torch.Tensor | None = None) -> None:
    """Write the same million random numbers again and again: as fast as memory, and no weight is a constant."""
    values = random_values() if values is None else values
    flat = weight.view(-1)
    whole = flat.numel() // values.numel() * values.numel()
    flat[:whole].view(-1, values.numel()).copy_(values)
    flat[whole:].copy_(values[: flat.numel() - whole])


def random_values() -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return (torch.randn(1 << 20, generator=generator) * 0.02).to(torch.bfloat16)


def make_inputs(size: str, device: torch.device) -> dict[str, torch.Tensor]:
    shape, config = SIZES[size], SIZES[size]["config"]
    num_tokens = shape["side"] ** 2

    def random(*sizes: int) -> torch.Tensor:
        return torch.randn(sizes, dtype=torch.bfloat16).to(device)

    return {
        "hidden_states": random(1, num_tokens, config.get("in_channels", 64)),
        "encoder_hidden_states": random(1, shape["text"], config.get("joint_attention_dim", 4096)),
        "pooled_projections": random(1, config.get("pooled_projection_dim", 768)),
        "timestep": torch.full((1,), 0.5, dtype=torch.bfloat16).to(device),
        "guidance": torch.full((1,), 3.5, dtype=torch.bfloat16).to(device),
        "img_ids": torch.zeros(num_tokens, 3, dtype=torch.bfloat16).to(device),
        "txt_ids": torch.zeros(shape["text"], 3, dtype=torch.bfloat16).to(device),
    }


def weight_bytes(model: nn.Module) -> int:
    return sum(weight.numel() * weight.element_size() for weight in model.parameters())


# -- the methods


def run_highwater(request: Request, device: torch.device, meter: Meter) -> None:
    """Ours, one manager for all budgets; then such budgets that the device holds at its peak what it held for others.

    The first budget that fits decides how the weights rest, so the smallest comes first.
    """
    from highwater.memory import MemoryManager, manage
    from highwater.memory.manager import keep_out_of_user_cache

    keep_out_of_user_cache()  # what earlier runs learned would change plans
    model, inputs = build_transformer(request.size), make_inputs(request.size, device)
    manager = MemoryManager()
    manager.set_watermark("*", 0, 0)
    budgets = list(request.budgets)
    managed = None
    while managed is None and budgets:
        try:
            managed = manage(model, profile=as_profile(budgets[0]), placement="gpu:0", manager=manager)
        except (ValueError, RuntimeError) as error:
            emit(Row(budget_bytes=budgets.pop(0), error=describe(error)))
    assert managed is not None, "no budget will do"
    beside_bytes = 0
    with managed:
        member = managed.members[0]

        def run(budget_bytes: int | None, peak_to_match: int | None = None) -> None:
            nonlocal beside_bytes
            row = Row(budget_bytes=budget_bytes, peak_to_match=peak_to_match)
            try:
                managed.reprofile(as_profile(budget_bytes))
                manager.commands.free_idle("another budget")  # caches of the last are not this one's
                manager.begin_run("warm-up", "benchmark")  # plans are made anew
                model(**inputs)
                manager.end_run()
                manager.begin_run("measured", "benchmark")  # now with what the first has shown
                measure(lambda: model(**inputs), meter, row)
                shares = member.managed.plan.shares
                held_bytes = sum(share.device_bytes for share in shares)
                beside_bytes = max(beside_bytes, (row.peak_bytes or 0) - held_bytes)
                row.pinned_bytes = manager.ledger.used("pinned")
                row.notes = {
                    "weights_on_device_bytes": held_bytes,
                    "streamed_blocks": sum(len(share.streamed) for share in shares),
                    "staging_bytes": shares[0].staging_bytes,
                }
            except Exception as error:
                row.error = describe(error)
            finally:
                manager.end_run()
            emit(row)

        for budget_bytes in budgets:
            run(budget_bytes)
        for peak_bytes in request.peaks:
            run(peak_bytes - beside_bytes, peak_bytes)


def as_profile(budget_bytes: int | None) -> str:
    return "unlimited" if budget_bytes is None else f"{(max(0, budget_bytes) + 0.5) / 1e6:.7f}MB"


def run_plain(request: Request, device: torch.device, meter: Meter) -> None:
    """All on the device: what a step takes where nothing moves."""
    model, inputs = build_transformer(request.size).to(device), make_inputs(request.size, device)
    run_step(model, inputs, meter, Row())


def run_diffusers(request: Request, device: torch.device, meter: Meter) -> None:
    """Group offload as its documentation recommends it for speed; it has no budget."""
    model, inputs = build_transformer(request.size), make_inputs(request.size, device)
    model.enable_group_offload(  # type: ignore[operator]
        onload_device=device,
        offload_device=torch.device("cpu"),
        offload_type="block_level",
        num_blocks_per_group=1,
        use_stream=True,
        record_stream=True,
    )
    run_step(model, inputs, meter, Row())


def run_accelerate(request: Request, device: torch.device, meter: Meter) -> None:
    """CPU offload: each layer's weights come for its forward and go; it has no budget."""
    from accelerate import cpu_offload

    model, inputs = build_transformer(request.size), make_inputs(request.size, device)
    run_step(cpu_offload(model, execution_device=device), inputs, meter, Row())


def run_mmgp(request: Request, device: torch.device, meter: Meter) -> None:
    """mmgp with pinned memory and asynchronous transfers, nothing quantized; its budget is in MiB."""
    from mmgp import offload

    (budget_bytes,) = request.budgets
    model, inputs = build_transformer(request.size), make_inputs(request.size, device)
    offload.all(
        {"transformer": model},
        pinnedMemory=True,
        quantizeTransformer=False,
        budgets={"transformer": 0 if budget_bytes is None else budget_bytes >> 20},
        asyncTransfers=True,
        perc_reserved_mem_max=0.9,
        verboseLevel=0,
    )
    run_step(model, inputs, meter, Row(budget_bytes=budget_bytes))


def run_step(model: nn.Module, inputs: dict[str, torch.Tensor], meter: Meter, row: Row) -> None:
    measure(lambda: model(**inputs), meter, row)
    emit(row)


def run_comfyui(request: Request) -> None:
    """ComfyUI's own Flux, patcher and sampler; what its budget leaves of the device is occupied beforehand.

    Core keeps some memory free for computing, so what it holds is not the budget: the peak tells.
    """
    sys.path.insert(0, request.comfyui)
    os.chdir(request.comfyui)
    base = tempfile.mkdtemp(prefix="highwater-gpu-")
    sys.argv = ["main.py", "--base-directory", base, "--disable-all-custom-nodes", *request.arguments]
    import main  # type: ignore[import-not-found]  # parses the arguments and starts dynamic VRAM as the program does

    import comfy.ldm.flux.model  # type: ignore[import-not-found]  # isort: skip
    import comfy.model_management
    import comfy.ops
    import comfy.sample
    import comfy.sd

    del main
    (budget_bytes,) = request.budgets
    device = comfy.model_management.get_torch_device()
    meter = Meter(device) if device.type != "cpu" else None
    config = {
        "in_channels": 16,
        "out_channels": 16,
        "vec_in_dim": 768,
        "mlp_ratio": 4.0,
        "axes_dim": [16, 56, 56],
        "theta": 10000,
        "patch_size": 2,
        "qkv_bias": True,
        "guidance_embed": True,
        "txt_ids_dims": [],
        **COMFYUI_SIZES[request.size],
    }
    operations = comfy.ops.disable_weight_init
    flux = comfy.ldm.flux.model.Flux(dtype=torch.bfloat16, device="meta", operations=operations, **config)
    state = {name: torch.empty(weight.shape, dtype=weight.dtype) for name, weight in flux.state_dict().items()}
    values = random_values()
    for weight in state.values():
        fill(weight, values)
    patcher = comfy.sd.load_diffusion_model_state_dict(state)
    del state, flux
    row = Row(budget_bytes=budget_bytes, notes={"patcher": type(patcher).__name__})
    occupied = []
    if budget_bytes is not None and meter is not None:
        free_bytes = meter.module.mem_get_info(device)[0]
        wanted = budget_bytes + int(comfy.model_management.minimum_inference_memory())
        occupied.append(torch.empty(max(0, free_bytes - wanted), dtype=torch.uint8, device=device))
        meter.base_bytes = meter.used_bytes()
    text = torch.randn(1, SIZES[request.size]["text"], config["context_in_dim"])
    condition = [[text, {"pooled_output": torch.randn(1, config["vec_in_dim"]), "guidance": 3.5}]]
    side = 2 * SIZES[request.size]["side"]
    noise = torch.randn(1, 16, side, side)

    def sample(num_steps: int, callback: Callable[..., None] | None = None) -> None:
        with torch.inference_mode():
            comfy.sample.sample(
                patcher, noise, num_steps, 1.0, "euler", "simple", condition, condition, torch.zeros_like(noise),
                callback=callback, disable_pbar=True, seed=0,
            )  # fmt: skip

    if meter is None:  # on the CPU there is nothing to measure but that it runs
        sample(1)
        emit(row)
        return
    with meter.peak(row):
        sample(NUM_WARM_UPS)
    meter.read_host(row)
    row.pinned_bytes = None  # locked through the driver, which torch does not see
    ends_s: list[float] = []

    def note_time(step: int, *_: Any) -> None:
        if step in (0, NUM_STEPS):
            meter.synchronize()
            ends_s.append(time.perf_counter())

    sample(NUM_STEPS + 1, note_time)
    row.s_per_step = (ends_s[1] - ends_s[0]) / NUM_STEPS
    moved_two, row.overlap = watch_copies(lambda: sample(2), meter)
    moved_one, _ = watch_copies(lambda: sample(1), meter)
    row.moved_bytes = moved_two - moved_one if moved_two is not None and moved_one is not None else None
    emit(row)


def run_machine(request: Request, device: torch.device, meter: Meter) -> None:
    """Tell what the device is and how fast pinned memory reaches it."""
    source = torch.empty(256 << 20, dtype=torch.uint8, pin_memory=True)
    target = torch.empty_like(source, device=device)
    speeds = []
    for _ in range(8):
        meter.synchronize()
        begin_s = time.perf_counter()
        target.copy_(source, non_blocking=True)
        meter.synchronize()
        speeds.append(source.numel() / (time.perf_counter() - begin_s))
    properties = meter.module.get_device_properties(device)
    notes = {"name": properties.name, "total_bytes": properties.total_memory, "link_bytes_per_s": max(speeds)}
    emit(Row(notes=notes))


METHODS: dict[str, Callable[[Request, torch.device, Meter], None]] = {
    "Highwater": run_highwater,
    "machine": run_machine,
    "on the device": run_plain,
    "diffusers": run_diffusers,
    "accelerate": run_accelerate,
    "mmgp": run_mmgp,
}


def run(request: Request) -> None:
    """Run one request; whatever goes wrong is a row, too."""
    try:
        if request.comfyui:
            run_comfyui(request)
            return
        if request.device.startswith("sim"):
            from highwater.headless import simdevice

            simdevice.install("sim", num_devices=1)
            simdevice.configure([simdevice.SimDeviceSpec(total_bytes=1 << 30)])
        device = torch.device(request.device)
        with torch.no_grad():
            METHODS[request.method](request, device, Meter(device))
    except Exception as error:
        emit(Row(error=describe(error)))
        raise


if __name__ == "__main__":
    run(Request(**json.loads(sys.argv[1])))
