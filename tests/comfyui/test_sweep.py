"""ComfyUI's architectures, tiny: what ``docs/compatibility.md`` says of each is what happens in the real host."""

from __future__ import annotations

import pytest

from highwater.tests.comfyui.host_cells import run_cells
from highwater.tests.comfyui.host_process import HostFiles
from highwater.tests.comfyui.sweep.names import ROWS
from highwater.tests.compat.table import MODES, read_rows

SECTION = "ComfyUI 0.33"
# One of each shape runs always, and the autoencoder that fills a buffer of core's; all others with `make test-slow`,
# some each day.
ALWAYS = ("Flux", "SD 1.5", "VAE LTX-Video")
# Their models compute between blocks, or hand them more than tensors; core's ControlNets add to what blocks return.
SPLIT = ("Chroma", "Cosmos 1", "Flux", "Flux 2", "HiDream", "HunyuanVideo", "Wan 2.1 VACE")
WITH_CONTROLNET = ("Flux", "SD3", "Qwen-Image")
WITH_LORA = ("Flux", "SDXL", "Wan 2.1 t2v")


@pytest.mark.comfyui_gpus
@pytest.mark.parametrize("name", [row if row in ALWAYS else pytest.param(row, marks=pytest.mark.slow) for row in ROWS])
def test_a_row_of_the_table_is_what_happens(host_files: HostFiles, name: str) -> None:
    cells = {mode: cell for _, mode, cell in run_cells(host_files, [name], MODES)}
    assert cells == read_rows(SECTION)[name]


def test_the_table_has_every_architecture_and_each_is_equal_resident_and_streamed() -> None:
    rows = read_rows(SECTION)
    assert rows.keys() == set(ROWS)
    for name, cells in rows.items():
        assert not any(cell.startswith("FAILED") for cell in cells.values()), (name, cells)
        assert cells["resident"] == "equal", name
        assert cells["streamed"] == "equal" or cells["streamed"].startswith("-"), name


def test_splits_loras_and_controlnets_are_equal() -> None:
    rows = read_rows(SECTION)
    for mode, names in {"split": SPLIT, "ControlNet": WITH_CONTROLNET, "LoRA": WITH_LORA}.items():
        assert {name: rows[name][mode] for name in names} == dict.fromkeys(names, "equal"), mode
