"""Runs one case: prints its table, writes it to ``benchmarks/results/NAME.md``, ends with its ratio."""

from __future__ import annotations

import argparse
import json
import platform
import sys
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

from .case import Result

CASES = (
    "badges",
    "comfy",
    "dynamic",
    "eviction",
    "forecast",
    "gpu",
    "gpu_streaming",
    "guards",
    "hops",
    "import_cost",
    "loading",
    "locking",
    "overhead",
    "overlap",
    "planner",
    "precision",
    "quantize",
    "split",
    "stores",
    "streaming",
    "switching",
    "tiers",
    "tiles",
)
RESULTS = Path(__file__).parent / "results"
PACKAGES = ("torch", "diffusers", "safetensors")


def describe_machine() -> str:
    """Return what the numbers were made on: system, processor, cores, and the versions that matter."""
    import psutil

    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    model = next(
        (line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.processor()
    )
    memory = f"{psutil.virtual_memory().total / 2**30:.0f} GiB"
    versions = ", ".join(f"{package} {version(package)}" for package in PACKAGES if find_spec(package) is not None)
    return (
        f"{platform.system()} {platform.machine()}, {model}, {psutil.cpu_count()} cores, {memory}; "
        f"Python {platform.python_version()}, {versions}"
    )


def write_result(name: str, result: Result, options: str = "") -> None:
    text = [
        f"# {name}",
        "",
        result.question,
        "",
        *result.markdown(),
        "",
        f"ratio: {result.ratio:.4f} ({result.meaning})",
        "",
    ]
    text += [f"- machine: {describe_machine()}", f"- command: `python -m benchmarks {name}{options}`", ""]
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{name}.md").write_text("\n".join(text), encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("name", choices=sorted(CASES))
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the table")
    parser.add_argument(
        "--part", choices=[*"abcde"], help="of gpu: a tests, b streaming, c ComfyUI, d two budgets, e precision"
    )
    parser.add_argument("--cases", type=int, help="of forecast: how many workflows to plan and run; 200 take an hour")
    parser.add_argument("--resume", action="store_true", help="of gpu: measure what an earlier run has not")
    parser.add_argument("--rehearse", action="store_true", help="of gpu: on simulated devices, with small shapes")
    parser.add_argument("--instances", type=int, help="of planner: how many random instances (1000)")
    parser.add_argument(
        "--only", type=int, nargs="+", help="of planner and forecast: the numbers, from 0, of those to run"
    )
    options = parser.parse_args()
    if options.name == "gpu":
        if options.json:
            parser.error("gpu: --json is not for it; its rows are in gpu.jsonl")
        from .gpu.packages import refuse_missing

        refuse_missing(rehearses=options.rehearse)
        from .gpu.command import PARTS, run_parts

        return run_parts(
            options.part or [*PARTS],
            resume=options.resume,
            rehearses=options.rehearse,
            describe_machine=describe_machine,
        )
    if options.part or options.resume or options.rehearse:
        parser.error(f"--part, --resume and --rehearse are options of gpu, not of {options.name}")
    if options.instances is not None and (options.name != "planner" or options.instances < 1):
        parser.error("--instances is an option of planner: 1 or more")
    if options.cases is not None and (options.name != "forecast" or options.cases < 1):
        parser.error("--cases is an option of forecast: 1 or more")
    if options.only and (options.name not in ("planner", "forecast") or min(options.only) < 0):
        parser.error("--only is an option of planner and forecast: 0 or more")
    asked = {"only": options.only, "num_instances": options.instances, "num_cases": options.cases}
    asked = {name: value for name, value in asked.items() if value is not None}
    result: Result = import_module(f".{options.name}", __package__).measure(**asked)
    given = {"--instances": options.instances, "--cases": options.cases}
    if not options.only:  # a few are no result
        write_result(options.name, result, "".join(f" {name} {n}" for name, n in given.items() if n is not None))
    if options.json:
        print(
            json.dumps(
                {
                    "case": options.name,
                    "ratio": result.ratio,
                    "meaning": result.meaning,
                    "rows": result.rows,
                    "more": result.more,
                }
            )
        )
    else:
        print("\n".join([result.question, "", *result.markdown(), "", f"ratio: {result.ratio:.4f} ({result.meaning})"]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
