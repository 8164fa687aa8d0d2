"""Part e: encoded weights on the card: where widening is queued, what it costs, and steps in each form beside bf16.

``python -m highwater.benchmarks.gpu.widening REQUEST`` is the process that measures.

The first rows are of twelve stand-ins of a block, four matrices of 113 million weights, with so many tokens: on the
card in eight bits, or copied to it from page-locked memory in each pass. They are widened on the compute stream into
one scratch memory, or on a stream of its own into two in turn, so that the next one is widened while one computes.
Then what each form takes to widen such a block, and whether that gives the same bits as on the CPU.
"""

from __future__ import annotations

import gc
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch.nn import functional

from ..case import Result
from ..gpu_worker import MARK, Meter, Row, as_profile, build_transformer, describe, make_inputs, measure, weight_bytes
from .record import RecordedRow, cell
from .setting import TIME_IS_UP, Setting, follow

__all__ = ["run", "tabulate"]

SIZES = {False: "12B", True: "tiny"}
NUM_BLOCKS, NUM_TIMES = 12, 4
WIDTHS = {"12B": 3072, "tiny": 64}
TOKENS = (256, 1024, 4608, 16384)
WAYS = ("not widened", "compute stream", "own stream")
FORMS = ("as stored", "fp8 scaled", "int8", "qint8", "qint4")
BUDGETS = {"12B": (0.1, 0.3, 1.0), "tiny": (0.6, 1.0)}


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """What to measure: the model's size, the device, and the keys that are there already."""

    size: str
    device: str
    measured: Sequence[str]


def block_key(tokens: int, *, streams: bool) -> str:
    return f"{tokens} tokens, {'copied' if streams else 'on the card'}"


def form_key(form: str) -> str:
    return f"widening {form}"


def step_key(form: str, share: float) -> str:
    return f"{form}, {share:.0%}"


def keys(size: str) -> Iterator[str]:
    for tokens in TOKENS:
        for streams in (False, True):
            yield block_key(tokens, streams=streams)
    yield from map(form_key, FORMS[1:])
    for form in FORMS:
        yield from (step_key(form, share) for share in BUDGETS[size])


def run(setting: Setting) -> None:
    size = SIZES[setting.rehearses]
    measured = [key for key in keys(size) if setting.is_measured(key)]
    if len(measured) == len([*keys(size)]):
        return
    request = Request(size=size, device=setting.device, measured=measured)
    arguments = ["-m", "highwater.benchmarks.gpu.widening", json.dumps(asdict(request))]

    def use(told: dict[str, Any]) -> None:
        setting.add(told["key"], told["values"], told["values"].get("error", ""))

    problem = follow(arguments, setting.environment(), setting.left_s(), use)
    there = {row.key for row in setting.record.rows(setting.part)}
    for key in keys(size):
        if problem and (key not in there or (problem == TIME_IS_UP and not setting.is_measured(key))):
            setting.add(key, {}, problem)


def tabulate(rows: Sequence[RecordedRow], setting: Setting) -> list[Result]:
    size, by_key = SIZES[setting.rehearses], {row.key: row for row in rows}
    blocks, gains = [], []
    for tokens in TOKENS:
        for streams in (False, True):
            key = block_key(tokens, streams=streams)
            if key not in by_key:
                continue
            times = by_key[key].values
            gain = times["own stream"] / times["compute stream"] if "own stream" in times else None
            gains += [] if gain is None else [gain]
            told = {way: f"{1e3 * times[way]:.3f}" if times.get(way) else "-" for way in WAYS}
            blocks.append({"block": key, **told, "own over compute stream": "-" if gain is None else f"{gain:.3f}"})
    widenings = [
        {
            "form": form,
            "ms": cell(row.error) or f"{1e3 * row.values['seconds']:.3f}",
            "as on the CPU": row.values.get("is_equal", "-"),
        }
        for form in FORMS[1:]
        if (row := by_key.get(form_key(form))) is not None
    ]
    steps, ratios = [], []
    for form in FORMS:
        for share in BUDGETS[size]:
            row, plain = by_key.get(step_key(form, share)), by_key.get(step_key(FORMS[0], share))
            if row is None:
                continue
            values, ratio = row.values, None
            if plain is not None and values.get("s_per_step") and plain.values.get("s_per_step"):
                ratio = values["s_per_step"] / plain.values["s_per_step"]
                ratios += [ratio] if form != FORMS[0] else []
            steps.append(
                {
                    "weights": "bf16" if form == FORMS[0] else form,
                    "budget": f"{share:.0%}",
                    "s/step": cell(row.error) or f"{values['s_per_step']:.4f}",
                    "over bf16": "-" if ratio is None else f"{ratio:.3f}",
                    "to device, GB/step": in_gb(values.get("moved_bytes")),
                    "peak device, GB": in_gb(values.get("peak_bytes")),
                }
            )
    name = setting.card["name"]
    results = []
    if blocks:
        results.append(
            Result(
                question=f"Milliseconds of a block of 113 million weights in float8_e4m3fn on {name}, by where it is "
                f"widened to bf16; the best of {NUM_TIMES} passes of {NUM_BLOCKS}.",
                rows=blocks,
                ratio=min(gains, default=float("nan")),
                meaning="a stream of its own over the compute stream, the best of them",
            )
        )
    if widenings:
        results.append(
            Result(
                question=f"Milliseconds to widen a block of 113 million weights to bf16 on {name}, by its form.",
                rows=widenings,
                ratio=float(all(row["as on the CPU"] for row in widenings)),
                meaning="1 where all of them give the same bits as on the CPU",
            )
        )
    if steps:
        results.append(
            Result(
                question=f"A step of a {size} Flux transformer on {name}; budgets are parts of its weights in bf16.",
                rows=steps,
                ratio=max(ratios, default=float("nan")),
                meaning="seconds of a step in such a form over bf16 within the same budget, the worst",
            )
        )
    return results


def in_gb(num_bytes: int | None) -> str:
    return "-" if num_bytes is None else f"{num_bytes / 1e9:.2f}"


# -- the process that measures


def emit(key: str, values: dict[str, Any]) -> None:
    print(MARK + json.dumps({"key": key, "values": values}), flush=True)


def measure_all(request: Request) -> None:
    """Measure each key; what goes wrong is a row, too."""
    if request.device.startswith("sim"):
        from highwater.headless import simdevice

        simdevice.install("sim", num_devices=1)
        simdevice.configure([simdevice.SimDeviceSpec(total_bytes=4 << 30)])
    device = torch.device(request.device)
    for tokens in TOKENS:
        for streams in (False, True):
            key = block_key(tokens, streams=streams)
            if key not in request.measured:
                emit(key, measure_blocks(device, WIDTHS[request.size], tokens, streams=streams))
    for form in FORMS[1:]:
        if form_key(form) not in request.measured:
            emit(form_key(form), measure_form(device, WIDTHS[request.size], form))
    for form in FORMS:
        wanted = [share for share in BUDGETS[request.size] if step_key(form, share) not in request.measured]
        if wanted:
            measure_steps(request.size, device, form, wanted)


def shapes_of(width: int) -> list[tuple[int, int]]:
    return [(3 * width, width), (width, width), (4 * width, width), (width, 4 * width)]


@torch.no_grad()
def measure_blocks(device: torch.device, width: int, tokens: int, *, streams: bool) -> dict[str, Any]:
    """Return the seconds of a block by the way in which it is widened; "not widened" is that of the computes alone."""
    shapes = shapes_of(width)
    sizes = [rows * columns for rows, columns in shapes]
    count = sum(sizes)
    module = torch.get_device_module(device)
    one = torch.full((count,), 0x38, dtype=torch.uint8)  # 1.0
    host = [one.pin_memory() if streams else one.to(device) for _ in range(NUM_BLOCKS)]
    staging = [torch.empty(count, dtype=torch.uint8, device=device) for _ in range(2)]
    scratch = [torch.empty(count, dtype=torch.bfloat16, device=device) for _ in range(2)]
    x = torch.full((tokens, width), 0.02, dtype=torch.bfloat16, device=device)
    copying, beside, main = module.Stream(device), module.Stream(device), module.current_stream(device)

    def widen(codes: torch.Tensor, wide: torch.Tensor) -> None:
        for part, target in zip(codes.split(sizes), wide.split(sizes), strict=True):
            target.copy_(part.view(torch.float8_e4m3fn)).mul_(0.5)

    def compute(wide: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        first, second, up, down = (p.view(s) for p, s in zip(wide.split(sizes), shapes, strict=True))
        hidden = functional.linear(functional.linear(x, first)[:, :width], second)
        return functional.linear(functional.gelu(functional.linear(hidden, up)), down) * 1e-6

    def run_pass(way: str) -> None:
        y = x
        widened: list[Any] = [None, None]
        computed: list[Any] = [None, None]
        for number in range(NUM_BLOCKS):
            turn = number % 2
            codes, copied = host[number], None
            if streams and way != WAYS[0]:
                with copying:
                    if widened[turn] is not None:
                        copying.wait_event(widened[turn])
                    codes = staging[turn].copy_(host[number], non_blocking=True)
                    copied = copying.record_event()
            if way == WAYS[0]:
                y = compute(scratch[0], y)
                continue
            own = way == WAYS[2]
            stream, target = (beside, scratch[turn]) if own else (main, scratch[0])
            with stream:
                for event in (copied, computed[turn] if own else None):
                    if event is not None:
                        stream.wait_event(event)
                widen(codes, target)
                widened[turn] = stream.record_event()
            main.wait_event(widened[turn])
            y = compute(target, y)
            computed[turn] = main.record_event()

    def time_of(way: str) -> float:
        run_pass(way)
        torch.accelerator.synchronize(device)
        best = float("inf")
        for _ in range(NUM_TIMES):
            begin_s = time.perf_counter()
            run_pass(way)
            torch.accelerator.synchronize(device)
            best = min(best, time.perf_counter() - begin_s)
        return best / NUM_BLOCKS

    try:
        return {way: time_of(way) for way in WAYS if not (streams and way == WAYS[0])}
    except Exception as error:
        return {"error": describe(error)}


@torch.no_grad()
def measure_form(device: torch.device, width: int, name: str) -> dict[str, Any]:
    """Return the seconds to widen a block on the device, the best of some, and whether it is as on the CPU."""
    from highwater.memory.weights.known_forms import FORMS as FORM_TYPES

    try:
        weights = [0.02 * torch.randn(shape, dtype=torch.bfloat16) for shape in shapes_of(width)]
        forms = [FORM_TYPES[name][1]().measure(weight, name="weight") for weight in weights]
        codes = [form.encode(weight) for form, weight in zip(forms, weights, strict=True)]
        on_device = [[leaf.to(device) for leaf in leaves] for leaves in codes]
        wide = [torch.empty_like(weight, device=device) for weight in weights]
        best = float("inf")
        for _ in range(1 + NUM_TIMES):
            torch.accelerator.synchronize(device)
            begin_s = time.perf_counter()
            for form, leaves, target in zip(forms, on_device, wide, strict=True):
                form.decode_into(target, leaves)
            torch.accelerator.synchronize(device)
            best = min(best, time.perf_counter() - begin_s)
        decoded = [form.decode(leaves, torch.bfloat16) for form, leaves in zip(forms, codes, strict=True)]
        is_equal = all(torch.equal(target.cpu(), want) for target, want in zip(wide, decoded, strict=True))
        return {"seconds": best, "is_equal": is_equal}
    except Exception as error:
        return {"error": describe(error)}


@torch.no_grad()
def measure_steps(size: str, device: torch.device, form: str, shares: Sequence[float]) -> None:
    """Emit a row for each budget of one model, managed in a form."""
    from highwater.memory import MemoryManager, manage
    from highwater.memory.manager import keep_out_of_user_cache

    keep_out_of_user_cache()
    gc.collect()
    torch.accelerator.empty_cache()  # of the forms before, which the meter would take for others' memory
    model, inputs, meter = build_transformer(size), make_inputs(size, device), Meter(device)
    manager = MemoryManager()
    manager.set_watermark("*", 0, 0)
    whole = weight_bytes(model)

    def budget(share: float) -> str:
        return as_profile(None if share == 1.0 else int(share * whole))

    step: Callable[[], Any] = lambda: model(**inputs)  # noqa: E731
    with manage(model, budget(shares[0]), precision=form, placement="gpu:0", manager=manager) as managed:
        for share in shares:
            row = Row()
            try:
                managed.reprofile(budget(share))
                manager.commands.free_idle("another budget")
                for name in ("warm-up", "measured"):  # plans are made anew, with what the first has shown
                    manager.begin_run(name, "benchmark")
                    step()
                    manager.end_run()
                measure(step, meter, row)
            except Exception as error:
                row.error = describe(error)
            emit(step_key(form, share), asdict(row))


if __name__ == "__main__":
    measure_all(Request(**json.loads(sys.argv[1])))
