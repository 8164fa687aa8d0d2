"""Part d: two budgets on one card, as a stand-in for two cards, and beside them one budget of the same bytes.

The engine gets the card under two names and splits a model over them: two shares with their own staging memory, copy
streams and budgets. What it cannot show is the link between two cards, and that two cards copy at the same time.

``python -m highwater.benchmarks.gpu.two_budgets REQUEST`` is the process that measures.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from highwater.memory import MemoryManager
from highwater.memory.manager import keep_out_of_user_cache
from highwater.memory.options.placement import parse_placement
from highwater.memory.options.profile import parse_profile
from highwater.memory.transfer.devices import CPU, Device

from ..case import Result
from ..gpu_worker import MARK, Meter, Row, build_transformer, describe, make_inputs, measure, weight_bytes
from .record import RecordedRow, cell
from .setting import TIME_IS_UP, Setting, follow

__all__ = ["run", "tabulate"]

# Parts of the weights for all budgets together; half of the least has to hold the tiny model's largest block.
SHARES = {"12B": (0.3, 0.6, 1.2), "tiny": (0.6, 0.8, 1.2)}
SIZES = {False: "12B", True: "tiny"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """What to measure: the model's size, the device, and the keys that are there already."""

    size: str
    device: str
    measured: Sequence[str]


def keys(size: str) -> Iterator[tuple[str, int, float]]:
    """Yield key, number of budgets, and the part of the weights that they allow together, the most telling first."""
    for share in SHARES[size]:
        for number in (2, 1):
            yield f"{number} of {share / number:.1%}", number, share


def run(setting: Setting) -> None:
    size = SIZES[setting.rehearses]
    measured = [key for key, _, _ in keys(size) if setting.is_measured(key)]
    if len(measured) == len([*keys(size)]):
        return
    request = Request(size=size, device=setting.device, measured=measured)
    arguments = ["-m", "highwater.benchmarks.gpu.two_budgets", json.dumps(asdict(request))]

    def use(told: dict[str, Any]) -> None:
        setting.add(told["key"], told["values"], told["values"]["error"])

    problem = follow(arguments, setting.environment(), setting.left_s(), use)
    there = {row.key for row in setting.record.rows(setting.part)}
    for key, _, _ in keys(size):
        if problem and (key not in there or (problem == TIME_IS_UP and not setting.is_measured(key))):
            setting.add(key, {}, problem)


def tabulate(rows: Sequence[RecordedRow], setting: Setting) -> list[Result]:
    by_key = {row.key: row for row in rows}
    table, ratios = [], []
    for key, number, share in keys(SIZES[setting.rehearses]):
        row = by_key.get(key)
        if row is None:
            continue
        values, one = row.values, by_key.get(f"1 of {share:.1%}")
        ratio = None
        if number == 2 and one is not None and values.get("s_per_step") and one.values.get("s_per_step"):
            ratio = values["s_per_step"] / one.values["s_per_step"]
            ratios.append(ratio)
        notes = values.get("notes", {})
        table.append(
            {
                "budgets": key,
                "s/step": cell(row.error) or f"{values['s_per_step']:.4f}",
                "over one budget": "-" if ratio is None else f"{ratio:.3f}",
                "to device, GB/step": in_gb(values.get("moved_bytes")),
                "overlap": "-" if values.get("overlap") is None else f"{values['overlap']:.0%}",
                "peak device, GB": in_gb(values.get("peak_bytes")),
                "streamed blocks": str(notes.get("streamed", "-")),
                "output": "-" if "equal" not in notes else "equal" if notes["equal"] else "DIFFERS",
            }
        )
    return [
        Result(
            question=(
                f"A {SIZES[setting.rehearses]} Flux transformer split over one card under two names, each with a "
                f"budget (parts of the weights), beside one budget of the same bytes, on {setting.card['name']}."
            ),
            rows=table,
            ratio=max(ratios, default=float("nan")),
            meaning="seconds per step, two budgets over one, worst of them",
        )
    ]


def in_gb(num_bytes: int | None) -> str:
    return "-" if num_bytes is None else f"{num_bytes / 1e9:.4g}"


# -- the process that measures


def measure_all(request: Request) -> None:
    """Measure each key with one and the same model; what goes wrong is a row, too."""
    if request.device.startswith("sim"):
        from highwater.headless import simdevice

        simdevice.install("sim", num_devices=1)
        simdevice.configure([simdevice.SimDeviceSpec(total_bytes=1 << 30)])
    keep_out_of_user_cache()
    device = torch.device(request.device)
    model, inputs = build_transformer(request.size), make_inputs(request.size, device)
    meter = Meter(device)
    first: torch.Tensor | None = None
    for key, number, share in keys(request.size):
        if key in request.measured:
            continue
        row = Row(budget_bytes=int(share * weight_bytes(model)))
        try:
            output = measure_one(model, inputs, number, row, meter)
            first = output if first is None else first
            row.notes["equal"] = torch.equal(output, first)
        except Exception as error:
            row.error = describe(error)
        print(MARK + json.dumps({"key": key, "values": asdict(row)}), flush=True)


def measure_one(
    model: torch.nn.Module, inputs: dict[str, torch.Tensor], number: int, row: Row, meter: Meter
) -> torch.Tensor:
    """Fill a row for one or two budgets; returns the output, in RAM."""
    names = [f"gpu:{index}" for index in range(number)]
    manager = MemoryManager(devices=[CPU, *(Device(name, meter.device) for name in names)])
    manager.set_watermark("*", 0, 0)
    assert row.budget_bytes is not None
    profile = ",".join(f"{name}={(row.budget_bytes // number + 0.5) / 1e6:.7f}MB" for name in names)
    choices = {
        "placement": parse_placement("&".join(names), devices=[*manager.devices], components=["transformer"]),
        "profile": parse_profile(profile, devices=[*manager.devices], components=["transformer"]),
        "precision": None,
    }
    meter.module.empty_cache()
    try:
        members, _ = manager.add({"transformer": model}, **choices, name=None, node_id=None)
        for _ in range(2):
            manager.begin_run("warm-up", "benchmark")  # plans are made anew, with what the first run has shown
            output = model(**inputs, return_dict=False)[0].cpu()
            manager.end_run()
        measure(lambda: model(**inputs), meter, row)
        plan = members[0].managed.plan
        row.notes = {
            "streamed": [len(share.streamed) for share in plan.shares],
            "weights_on_device_bytes": [share.device_bytes for share in plan.shares],
        }
        return output
    finally:
        manager.release_all()


if __name__ == "__main__":
    with torch.no_grad():
        measure_all(Request(**json.loads(sys.argv[1])))
