"""A, B, A inside the real ComfyUI: our loaders beside core's, same host, same simulated devices, virtual time.

Two tiny models of 7.8 MiB each take turns on a device with room for a given number of bytes of weights. Each loader
gets a host process of its own; times are the devices' virtual seconds, bytes are what the device counted.
The default cache of 0.33 forgets a loader that the next prompt does not name, core's and ours alike, and nothing would
be left for "A again": the hosts run with the flag that the README names for that.
"""

from __future__ import annotations

from highwater.tests.comfyui.graphs import CORE, Graph, Loaders, new_run, sample_flux
from highwater.tests.comfyui.host_process import HostFiles, HostProcess, find_host
from highwater.tests.comfyui.model_files import ensure_model_files

from .case import Result

MIB, GIB = 1 << 20, 1 << 30
DEVICE_BYTES = 1844 * MIB
# Core keeps this much free for computing, whatever there is (its own rule in 0.33).
KEPT_BY_CORE = int(0.8 * GIB)
NUM_STEPS = 8
ROOMS = ((24, "both fit"), (12, "one and a half fit"), (5, "less than one fits"))
RUNS = ("tiny_flux", "other_flux", "tiny_flux")
# Loaders stay in the host's cache while 4 GB of RAM are free.
KEEP_LOADED = ("--cache-ram", "4", "4")


def occupy(host: HostProcess, weight_bytes: int) -> None:
    """Leave so many bytes of the first device for weights."""
    graph = Graph()
    graph.add("TestOccupy", device=0, free_bytes=KEPT_BY_CORE + weight_bytes, run=next(new_run))
    host.run(graph.nodes)


def measure_runs(files: HostFiles, loaders: Loaders, room_bytes: int) -> list[tuple[float, int]]:
    """Return virtual seconds and bytes copied to the device for each run of A, B, A."""
    measured = []
    options = {"total_bytes": [DEVICE_BYTES], "strict": False, "arguments": KEEP_LOADED}
    with HostProcess(files, models=ensure_model_files(), **options) as host:
        occupy(host, room_bytes)
        for name in RUNS:
            graph = Graph()
            model = loaders.diffusion_model(graph, f"{name}.safetensors")
            graph.keep(sample_flux(graph, model, steps=NUM_STEPS))
            begin_s = host.ask_devices("read")["clock_s"]
            with host.books() as devices:
                result = host.run(graph.nodes)
            assert result.outcome == "success", result
            measured.append((host.ask_devices("read")["clock_s"] - begin_s, devices[0]["h2d_bytes"]))
    return measured


def measure() -> Result:
    """Measure three amounts of room; about two minutes.

    Raises:
        SystemExit: no ComfyUI here.
    """
    files = find_host()
    if files is None:
        raise SystemExit("benchmarks comfy: no ComfyUI at ~/comfy/ComfyUI; name one in COMFYUI_DIR")
    rows, ratios = [], []
    for room, label in ROOMS:
        core = measure_runs(files, CORE, room * MIB)
        ours = measure_runs(files, Loaders(), room * MIB)
        for run, (core_run, our_run) in zip(("A", "B", "A again"), zip(core, ours, strict=True), strict=True):
            rows.append(
                {
                    "room for weights": f"{room} MiB, {label}",
                    "run": run,
                    "core, ms": 1e3 * core_run[0],
                    "Highwater, ms": 1e3 * our_run[0],
                    "core, MiB copied": core_run[1] / MIB,
                    "Highwater, MiB copied": our_run[1] / MIB,
                    "time ratio": our_run[0] / core_run[0],
                }
            )
        ratios.append(sum(seconds for seconds, _ in ours) / sum(seconds for seconds, _ in core))
    return Result(
        question=(
            f"Virtual time and bytes of A, B, A ({NUM_STEPS} steps each, tiny Flux) in ComfyUI with "
            f"`{' '.join(KEEP_LOADED)}`, core's loader (static, without offload streams on this device) beside ours."
        ),
        rows=rows,
        ratio=max(ratios),
        meaning="worst of the three rooms, ours over core's time for all three runs",
    )
