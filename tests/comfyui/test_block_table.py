"""The rows of ``docs/blocks.md`` that are ComfyUI's, made anew by its own Python; half a minute."""

from __future__ import annotations

import pytest

from highwater.benchmarks.block_table import comfyui_rows
from highwater.tests.comfyui.host_process import HostFiles
from highwater.tests.engine.test_block_table import ROWS


@pytest.mark.slow
@pytest.mark.comfyui_cpu
def test_the_rows_are_what_is_found(host_files: HostFiles) -> None:
    rows = comfyui_rows(host_files.directory, host_files.python)
    assert [row.markdown() for row in rows] == [*ROWS["comfyui"].values()]
