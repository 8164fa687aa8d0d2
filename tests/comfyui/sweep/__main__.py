"""Computes cells in this host process, as `host_cells.CellProcess` asks: a line of JSON in, a line of JSON out.

python -m highwater.tests.comfyui.sweep <<< '["Flux", "streamed"]'
"""

from __future__ import annotations

import gc
import json
import logging
import os
import sys

logging.disable(logging.ERROR)


def main() -> None:
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the host prints is not ours

    from highwater.tests.comfyui.sweep.cells import cell

    gc.freeze()  # cells collect often, and what the host has imported is most of what there is to look through
    for line in sys.stdin:
        name, mode = json.loads(line)
        print(json.dumps(cell(name, mode)), file=out, flush=True)


if __name__ == "__main__":
    main()
