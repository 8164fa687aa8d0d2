"""The rows of ``docs/blocks.md`` that are ComfyUI's, made anew by its own Python; half a minute."""

from __future__ import annotations

import pytest

from highwater.benchmarks.block_table import SIZES, comfyui_rows
from highwater.tests.comfyui.host_process import HostFiles
from highwater.tests.comfyui.sweep.names import CLASSES
from highwater.tests.engine.weights.test_block_table import ROWS


@pytest.mark.slow
@pytest.mark.comfyui_cpu
def test_the_rows_are_what_is_found(host_files: HostFiles) -> None:
    for family, rows in comfyui_rows(host_files.directory, host_files.python).items():
        assert [row.markdown() for row in rows] == [*ROWS[family].values()]


def test_every_class_of_autoencoders_has_a_row_or_is_left_out_by_name() -> None:
    sizes = SIZES["comfyui vaes"].items()
    assert {name if isinstance(size, str) else size["class"].rpartition(".")[2] for name, size in sizes} == CLASSES
