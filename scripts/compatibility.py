"""Makes the table in ``docs/compatibility.md`` anew: `.venv/bin/python scripts/compatibility.py [NAME ...]`.

Without names all rows are made, which takes long; with names those alone. Exits with 1 where a row has changed.
"""

import logging
import os
import sys
import warnings

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("OMP_NUM_THREADS", "1")
warnings.simplefilter("ignore")
logging.disable(logging.WARNING)

from highwater.tests.compat.modes import run_modes  # noqa: E402
from highwater.tests.compat.pipelines import RECIPES  # noqa: E402
from highwater.tests.compat.table import read_rows, write_rows  # noqa: E402


def main(names: list[str]) -> int:
    unknown = [name for name in names if name not in RECIPES]
    if unknown:
        print(f"{unknown[0]} is unknown; allowed: {', '.join(RECIPES)}", file=sys.stderr)
        return 2
    before = read_rows("diffusers")
    rows = {name: cells for name, cells in before.items() if name in RECIPES}
    for name in names or RECIPES:
        rows[name] = run_modes(RECIPES[name])
        print(name, rows[name], flush=True)
        write_rows("diffusers", rows)
    return int(rows != before)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
