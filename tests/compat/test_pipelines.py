"""diffusers' pipelines, tiny: what ``docs/compatibility.md`` says of each is what happens."""

from __future__ import annotations

from typing import Any

import diffusers
import pytest
import torch
from torch import nn

from highwater import MemoryManager, OffloadProfile, manage
from highwater.tests.compat.modes import (
    EQUAL,
    MODES,
    Recipe,
    exceeds_budget,
    run_modes,
    smallest_budgets,
    two_devices,
    what_did_not_happen,
)
from highwater.tests.compat.not_built import NOT_BUILT
from highwater.tests.compat.pipelines import RECIPES
from highwater.tests.compat.recipes import LIMITED
from highwater.tests.compat.table import DOCUMENT, LIMITS, ending, read_rows, refused_cells

SECTION = "diffusers"
# One of each shape runs always; all others with `make test-slow`, some each day.
ALWAYS = ("StableDiffusionXLPipeline", "FluxPipeline", "WanPipeline")
# Their models compute between blocks, hand them more than tensors, or add to what they return.
SPLIT = (
    "ChromaPipeline", "CosmosTextToWorldPipeline", "Flux2Pipeline", "FluxControlNetPipeline", "FluxPipeline",
    "HiDreamImagePipeline", "HunyuanVideoPipeline", "QwenImageControlNetPipeline",
    "StableDiffusion3ControlNetPipeline", "WanVACEPipeline",
)  # fmt: skip
WITH_LORA = ("FluxPipeline", "StableDiffusionXLPipeline", "WanPipeline")


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


def test_every_class_has_a_row_or_a_reason_for_having_none() -> None:
    exported = {name for name in dir(diffusers) if "Pipeline" in name}
    with_recipe = {name.partition(",")[0] for name in [*RECIPES, *LIMITED]}
    assert exported - with_recipe - NOT_BUILT.keys() == set(), "neither a recipe nor a reason"
    assert with_recipe & NOT_BUILT.keys() == set(), "a recipe and a reason for having none"
    assert (with_recipe | NOT_BUILT.keys()) - exported == set(), "diffusers has no such class"


def test_what_is_refused_or_left_out_is_named_at_the_end_of_the_document() -> None:
    text = DOCUMENT.read_text(encoding="utf-8")
    assert text.endswith(ending(text, {name: why for name, (_, why) in LIMITED.items()}))
    for mistake in ("fails", "differs", "no reference"):
        assert f"| {mistake}: " not in text, mistake


class Deaf(nn.Module):
    """Computes with its model's blocks, and leaves what they say out where it is deaf."""

    def __init__(self, share: float) -> None:
        super().__init__()
        self.transformer = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
        self.share = share

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.share * self.transformer(x)


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_equal_says_something_only_where_the_reference_is_another_one(share: float, sim: object) -> None:
    def call(pipe: Any) -> torch.Tensor:
        return pipe(torch.ones(1, 64, device=next(pipe.parameters()).device))

    cells = run_modes(Recipe(name="deaf", build=lambda: Deaf(share), call=call, lora_targets=("0", "1", "2", "3")))
    assert [cells[mode] for mode in ("resident", "streamed", "split")] == [EQUAL] * 3
    for mode, what in {"fp8": "fp8", "LoRA": "a LoRA"}.items():
        assert cells[mode] == (EQUAL if share else f"no reference: {what} changes nothing without Highwater")


class Two:
    """A pipeline of two models with blocks."""

    def __init__(self) -> None:
        self.components = {name: nn.Sequential(*(nn.Linear(64, 64) for _ in range(6))) for name in ("first", "second")}


def test_a_component_that_is_not_in_a_mode_is_named(sim: object) -> None:
    with two_devices():
        manager = MemoryManager()
        manager.set_watermark("*", 0, 0)
        with manage(Two(), manager=manager, placement="first=gpu:0&gpu:1,second=gpu:0") as handle:
            whole = "fails: second has blocks to cut between and is not split"
            assert what_did_not_happen(MODES["split"], handle) == whole
            small = smallest_budgets(handle)
            for member in handle.members:
                component, plan = member.managed.component, member.managed.plan
                assert exceeds_budget(component, plan, small) and not exceeds_budget(component, plan, OffloadProfile())
            handle.reprofile(small, placement="gpu:0&gpu:1")
            assert what_did_not_happen(MODES["split and streamed"], handle) == ""


def test_each_refused_cell_is_named_with_whose_limit_it_is() -> None:
    text = "| resident | x |\n\n## here\n\n| a |" + " equal |" * 6 + " refused (split): budget 1MiB is too small: b |\n"
    assert refused_cells(text) == [f"here, a, ControlNet: {LIMITS['is too small']}"]
    with pytest.raises(ValueError, match="whose limit is 'refused: for no reason'"):
        refused_cells("## here\n| a | refused: for no reason |" + " - |" * 6)


def test_splits_and_loras_are_equal() -> None:
    rows = read_rows(SECTION)
    for mode, names in {"split": SPLIT, "LoRA": WITH_LORA}.items():
        assert {name: rows[name][mode] for name in names} == dict.fromkeys(names, EQUAL), mode
