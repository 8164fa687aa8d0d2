"""diffusers' pipelines, tiny: what ``docs/compatibility.md`` says of each is what happens."""

from __future__ import annotations

import diffusers
import pytest

from highwater.tests.compat.modes import EQUAL, run_modes
from highwater.tests.compat.not_built import NOT_BUILT
from highwater.tests.compat.pipelines import RECIPES
from highwater.tests.compat.recipes import LIMITED
from highwater.tests.compat.table import read_rows

SECTION = "diffusers"
# One of each shape runs always; all others with `make test-slow`, some each day.
ALWAYS = ("StableDiffusionXLPipeline", "FluxPipeline", "WanPipeline")


@pytest.mark.parametrize(
    "name", [name if name in ALWAYS else pytest.param(name, marks=pytest.mark.slow) for name in RECIPES]
)
def test_a_row_of_the_table_is_what_happens(name: str, sim: object) -> None:
    assert run_modes(RECIPES[name]) == read_rows(SECTION)[name]


@pytest.mark.slow
@pytest.mark.parametrize("name", LIMITED)
def test_what_has_no_row_is_still_not_right_in_every_mode(name: str, sim: object) -> None:
    made, _ = LIMITED[name]
    cells = run_modes(made)
    assert not all(cell == EQUAL or cell.startswith("-") for cell in cells.values()), f"{name} can have a row"


def test_the_table_has_every_pipeline_and_each_is_equal_resident_and_streamed() -> None:
    rows = read_rows(SECTION)
    assert rows.keys() == RECIPES.keys()
    for name, cells in rows.items():
        assert cells["resident"] == EQUAL and cells["streamed"] in (EQUAL, "- (no blocks to stream)"), name


def test_a_class_has_either_a_row_or_a_reason_for_having_none() -> None:
    with_recipe = {name.split(",")[0] for name in [*RECIPES, *LIMITED]}
    assert not with_recipe & NOT_BUILT.keys()
    assert list(NOT_BUILT) == sorted(NOT_BUILT)
    assert all(hasattr(diffusers, name) for name in [*with_recipe, *NOT_BUILT])
