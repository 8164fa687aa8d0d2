"""diffusers' pipelines in float16 whose VAE computes in float32: each call converts it, and converts it back."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from highwater.tests.compat.modes import EQUAL, MODES, Recipe, modules_of, run_modes
from highwater.tests.compat.pipelines import RECIPES

CONVERTED = ("StableDiffusionXLPipeline", "StableDiffusionXLImg2ImgPipeline", "KolorsPipeline")


@pytest.mark.parametrize(
    "name", [CONVERTED[0], *(pytest.param(name, marks=pytest.mark.slow) for name in CONVERTED[1:])]
)
def test_a_part_that_its_pipeline_converts_computes_as_without_the_engine(name: str, sim: object) -> None:
    recipe = RECIPES[name]

    def build() -> Any:
        pipe = recipe.build()
        for module in modules_of(pipe).values():
            module.to(torch.float16)
        assert pipe.vae.config.force_upcast
        return pipe

    def call(pipe: Any) -> list[Any]:
        outputs = []
        for _ in range(2):
            torch.manual_seed(2)
            outputs.append(recipe.call(pipe))
            assert pipe.vae.dtype is torch.float16
        return outputs

    modes = {mode: MODES[mode] for mode in ("resident", "streamed", "split", "fp8")}
    cells = run_modes(Recipe(name=name, build=build, call=call), modes)
    assert cells == dict.fromkeys(modes, EQUAL)
