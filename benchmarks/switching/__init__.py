"""What it costs to switch models and prompts: seconds, bytes from disk and over the link, and RAM, beside others.

In the real ComfyUI with its default cache, and for diffusers pipelines, all on simulated devices whose models, links
and memory have a 64th of real sizes and speeds, so that seconds are those of the full size. The device has room for
one model and a part of another; each fits alone, so that nothing has to stream.

- A, B, A: two models take turns. ComfyUI's cache forgets a model that a prompt does not name; pipelines all stay.
- Changed prompts: ten texts, one after the other, for A. Text encoder and model do not fit together.
- Experts: two models, one after the other, inside one sampling, again and again (Wan 2.2).

`switch`: the virtual seconds of a prompt less those of the same prompt, by the same engine, with everything on the
device. Virtual time knows the link, kernels and launches; reading from disk, page-locking and Python take none of it.

`from disk`: what the process had the system read from disks, by calls and by touching mapped files (``read_bytes`` of
``/proc/PID/io``). Before the first run the system is told to forget the files; what it then keeps in RAM is its choice.

`missing`: the weights that the plan has on the device and that were not there when their model's turn came, by the
load events. So `over missing`, the ratio of the case, is how much longer a switch takes than its copies have to. The
link has one speed, from page-locked memory and from other.

`least`: what would be missing if the device kept, of its room, the bytes that were used last (`Room`). It is the same
for every engine, and also counts what an engine evicts beyond need. No engine needs all of the room.

Private RAM are dirty pages that only this process has, without those that are a simulated device's memory, beyond those
that it had before its first prompt: weights, page-locked or not, and code and buffers that prompts load. Cached are
pages of the models' files, which the system drops when RAM is short.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from highwater.memory.units import MIB
from highwater.tests.comfyui.host_process import find_host

from ..case import Result
from .hosts import measure_hosts
from .measured import SCALE
from .pipelines import measure_pipelines

__all__ = ["measure"]

TARGET_RATIO = 1.1


def measure() -> Result:
    """Measure four hosts and three processes with pipelines; twelve minutes on two busy cores.

    Raises:
        SystemExit: no ComfyUI here, or a system other than Linux.
    """
    files = find_host()
    if files is None:
        raise SystemExit("benchmarks switching: no ComfyUI at ~/comfy/ComfyUI; name one in COMFYUI_DIR")
    if sys.platform != "linux":
        raise SystemExit("benchmarks switching: needs Linux, which tells what is read from disks and who has a page")
    with tempfile.TemporaryDirectory(prefix="highwater-switching-") as folder:
        engines = measure_hosts(files, Path(folder, "models"), tell)
        engines += measure_pipelines(Path(folder, "pipelines"), tell)
    ours = [run for engine in engines for run in engine.runs if run.over_missing is not None]
    worst = max(ours, key=lambda run: run.over_missing or 0)
    changed = [run for run in ours if run.name == "changed prompt"]
    return Result(
        question=(
            "What a switch costs on a device with room for one model, not for two, in ComfyUI with its default cache "
            "and for diffusers pipelines: virtual seconds of the full size (models, links and memory are "
            f"{SCALE} times smaller and slower), and MiB of the small models. `switch`: beyond the same prompt with "
            "everything on the device. `from disk`: read from disks, not from the page cache. `missing`: weights that "
            "were not on the device when their turn came; `over missing`: the switch over the time of their copies. "
            "`least`: what a device would lack that keeps what was used last, the same for each engine. Of changed "
            "prompts (ten) and experts (two models in one sampling) the slowest."
        ),
        rows=[row for engine in engines for row in engine.run_rows()],
        more={
            "RAM after these runs, MiB. `private`: the process's own pages beyond those at its start, page-locked ones "
            "among them. `cached`: pages of the models' files, which the system drops when RAM is short.": [
                row for engine in engines for row in engine.ram_rows()
            ]
        },
        ratio=worst.over_missing or 0,
        meaning=(
            f"the worst switch of Highwater ({worst.name}) over the time of its missing bytes, target at most "
            f"{TARGET_RATIO}; over the least: {max(run.over_least or 0 for run in ours):.3f}; a changed prompt reads "
            f"{max(run.disk_bytes for run in changed) / MIB:.1f} MiB from disk, target 0"
        ),
    )


def tell(engine: str) -> None:
    print(f"switching: {engine}", file=sys.stderr, flush=True)
