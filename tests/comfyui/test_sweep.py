"""ComfyUI's architectures, tiny: what ``docs/compatibility.md`` says of each is what happens in the real host."""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest

from highwater.tests.comfyui.host_cells import CellProcess, start_cell_process
from highwater.tests.comfyui.host_process import HostFiles
from highwater.tests.comfyui.sweep.guided import GUIDED
from highwater.tests.comfyui.sweep.names import CLASSES, ROWS
from highwater.tests.compat.table import MODES, read_rows

SECTION = "ComfyUI 0.33"
# One of each shape runs always, and the autoencoders that fill a buffer of core's; all others with `make test-slow`,
# some each day.
ALWAYS = ("Flux", "SD 1.5", "VAE LTX-Video", "VAE MiniMax H3")
# Their models compute between blocks, or hand them more than tensors; core's ControlNets add to what blocks return.
SPLIT = ("Chroma", "Cosmos 1", "Flux", "Flux 2", "HiDream", "HunyuanVideo", "Wan 2.1 VACE")
WITH_CONTROLNET = ("Flux", "SD3", "Qwen-Image")
WITH_LORA = ("Flux", "SDXL", "Wan 2.1 t2v")


@pytest.fixture(scope="module")
def cell_process(host_files: HostFiles) -> Iterator[CellProcess]:
    with start_cell_process(host_files) as process:
        yield process


@pytest.mark.comfyui_gpus
@pytest.mark.parametrize("name", [row if row in ALWAYS else pytest.param(row, marks=pytest.mark.slow) for row in ROWS])
def test_a_row_of_the_table_is_what_happens(cell_process: CellProcess, name: str) -> None:
    cells = {mode: cell_process.compute(name, mode) for mode in MODES}
    assert cells == read_rows(SECTION)[name]


def test_the_table_has_every_architecture_and_each_is_equal_resident_and_streamed() -> None:
    rows = read_rows(SECTION)
    assert rows.keys() == set(ROWS)
    for name, cells in rows.items():
        assert not any(cell.startswith("FAILED") for cell in cells.values()), (name, cells)
        assert cells["resident"] == "equal", name
        assert cells["streamed"] == "equal" or cells["streamed"].startswith("-"), name


@pytest.mark.comfyui_cpu
def test_every_autoencoder_that_core_picks_by_a_file_has_a_row(host_files: HostFiles) -> None:
    code = ast.parse((host_files.directory / "comfy" / "sd.py").read_text(encoding="utf-8"))
    vae = next(node for node in code.body if isinstance(node, ast.ClassDef) and node.name == "VAE")
    made = {
        ast.unparse(node.value.func).rpartition(".")[2]
        for node in ast.walk(vae)
        if isinstance(node, ast.Assign)
        and ast.unparse(node.targets[0]) == "self.first_stage_model"
        and isinstance(node.value, ast.Call)
        and ast.unparse(node.value.func) != "self.first_stage_model.eval"
    }
    assert made == CLASSES


def test_splits_loras_and_controlnets_are_equal() -> None:
    rows = read_rows(SECTION)
    for mode, names in {"split": SPLIT, "ControlNet": WITH_CONTROLNET, "LoRA": WITH_LORA}.items():
        assert {name: rows[name][mode] for name in names} == dict.fromkeys(names, "equal"), mode
    for name in GUIDED:
        assert {rows[name][mode] for mode in ("resident", "streamed", "split", "split and streamed")} == {"equal"}, name
