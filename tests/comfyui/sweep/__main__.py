"""Runs cells in this host process: one JSON line each on stdout. Started by `host_cells.run_cells`.

python -m highwater.tests.comfyui.sweep NAME... --modes MODE...
"""

from __future__ import annotations

import argparse
import json
import logging
import os

logging.disable(logging.ERROR)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="+")
    parser.add_argument("--modes", nargs="+", required=True)
    asked = parser.parse_args()
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the host prints is not ours

    from highwater.tests.comfyui.sweep.cells import cell

    for name in asked.names:
        for mode in asked.modes:
            print(json.dumps({"name": name, "mode": mode, "cell": cell(name, mode)}), file=out, flush=True)


if __name__ == "__main__":
    main()
