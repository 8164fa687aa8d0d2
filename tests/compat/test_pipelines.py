"""diffusers' pipelines, tiny: what ``docs/compatibility.md`` says of each is what happens."""

from __future__ import annotations

import pytest

from highwater.tests.compat.modes import EQUAL, run_modes
from highwater.tests.compat.pipelines import RECIPES
from highwater.tests.compat.table import read_rows

SECTION = "diffusers"
# One of each shape runs always; all others with `make test-slow`, some each day.
ALWAYS = ("StableDiffusionXLPipeline", "FluxPipeline", "WanPipeline")


@pytest.mark.parametrize(
    "name", [name if name in ALWAYS else pytest.param(name, marks=pytest.mark.slow) for name in RECIPES]
)
def test_a_row_of_the_table_is_what_happens(name: str, sim: object) -> None:
    assert run_modes(RECIPES[name]) == read_rows(SECTION)[name]


def test_the_table_has_every_pipeline_and_each_is_equal_resident_and_streamed() -> None:
    rows = read_rows(SECTION)
    assert rows.keys() == RECIPES.keys()
    for name, cells in rows.items():
        assert cells["resident"] == EQUAL and cells["streamed"] in (EQUAL, "- (no blocks to stream)"), name
