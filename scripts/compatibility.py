"""Makes the tables in ``docs/compatibility.md`` anew: `.venv/bin/python scripts/compatibility.py [NAME ...]`.

Without names all rows are made, which takes long; with names those alone. `--comfyui` and `--diffusers` name all of one
table; the first needs a ComfyUI, as the tests do. Exits with 1 where a row has changed.
"""

import logging
import os
import sys
import warnings
from collections.abc import Callable, Sequence
from itertools import product

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("OMP_NUM_THREADS", "1")
warnings.simplefilter("ignore")
logging.disable(logging.WARNING)

from highwater.tests.comfyui.host_cells import start_cell_process  # noqa: E402
from highwater.tests.comfyui.host_process import find_host  # noqa: E402
from highwater.tests.comfyui.sweep.names import ROWS  # noqa: E402
from highwater.tests.compat.modes import MODES, run_modes  # noqa: E402
from highwater.tests.compat.pipelines import RECIPES  # noqa: E402
from highwater.tests.compat.recipes import LIMITED  # noqa: E402
from highwater.tests.compat.table import Rows, read_rows, write_refused, write_rows  # noqa: E402


def make_diffusers(names: Sequence[str], rows: Rows, save: Callable[[], None]) -> None:
    for name in names:
        rows[name] = dict(run_modes(RECIPES[name]))
        print(name, rows[name], flush=True)
        save()


def make_comfyui(names: Sequence[str], rows: Rows, save: Callable[[], None]) -> None:
    files = find_host()
    if files is None:
        sys.exit("no ComfyUI at ~/comfy/ComfyUI; name one in COMFYUI_DIR, its Python in COMFYUI_PYTHON")
    with start_cell_process(files) as process:
        for name, mode in product(names, MODES):
            cell = process.compute(name, mode)
            rows.setdefault(name, {})[mode] = cell
            print(name, mode, cell, flush=True)
            save()


SECTIONS = {
    "diffusers": ("--diffusers", list(RECIPES), make_diffusers),
    "ComfyUI 0.33": ("--comfyui", ROWS, make_comfyui),
}


def main(asked: list[str]) -> int:
    allowed = [name for option, names, _ in SECTIONS.values() for name in (option, *names)]
    unknown = [name for name in asked if name not in allowed]
    if unknown:
        print(f"{unknown[0]} is unknown; allowed: {', '.join(allowed)}", file=sys.stderr)
        return 2
    has_changed = False
    for section, (option, names, make) in SECTIONS.items():
        chosen = [name for name in names if not asked or option in asked or name in asked]
        if chosen:
            before = read_rows(section)
            rows = {name: dict(cells) for name, cells in before.items() if name in names}
            make(chosen, rows, lambda section=section, rows=rows: write_rows(section, rows))
            has_changed = has_changed or rows != before
    write_refused({name: why for name, (_, why) in LIMITED.items()})
    return int(has_changed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
