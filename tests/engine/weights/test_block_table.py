"""``docs/blocks.md`` is true: every row is made anew, and what a class keeps out of eight bits is not cast.

A row takes up to a second, so the rows take turns; those of models in which blocks were once missed always come along.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

import pytest
from torch import nn

from highwater.benchmarks.block_table import (
    FAMILIES,
    SIZES,
    TABLE,
    TITLES,
    Build,
    diffusers_models,
    row_of,
    transformers_models,
)
from highwater.memory.options.precision import Precision
from highwater.memory.planner.form_choice import choose_forms
from highwater.memory.weights.module_component import component_from_module

os.environ.setdefault("HF_HUB_OFFLINE", "1")

PATTERNS = ("_skip_layerwise_casting_patterns", "_keep_in_fp32_modules", "_keep_in_fp32_modules_strict")
ALWAYS = ("JoyImageEditTransformer3DModel", "FluxTransformer2DModel", "CosmosControlNetModel", "AutoencoderKLKVAE")


def rows_in_table(family: str) -> dict[str, str]:
    """Return the lines of a family by model."""
    part = TABLE.read_text(encoding="utf-8").partition(f"## {TITLES[family]}")[2].partition("\n## ")[0]
    lines = [line for line in part.splitlines() if line.startswith("| ") and not line.startswith("| model ")]
    return {line.split(" | ")[0].removeprefix("| "): line for line in lines}


ROWS = {family: rows_in_table(family) for family in FAMILIES}


@pytest.fixture(scope="session")
def models() -> Mapping[str, Build]:
    return diffusers_models() | transformers_models()


def test_the_table_has_every_model(models) -> None:
    assert {*ROWS["diffusers"], *ROWS["transformers"]} == {*models}
    for family in ("comfyui", "comfyui vaes"):
        assert {*ROWS[family]} == {name for name, size in SIZES[family].items() if not isinstance(size, str)}
    assert len(models) > 150 and len(ROWS["comfyui"]) > 95


@pytest.mark.parametrize("family", FAMILIES)
def test_what_never_streams_is_little_or_has_a_line(family: str) -> None:
    for line in ROWS[family].values():
        _, _, blocks, _, share, why = line.removesuffix(" |").split(" | ")
        assert (float(share.strip().rstrip("%")) <= 5.0) == (why.strip() == ""), line
        assert int(blocks) > 1 or "never streams" in why, line


@pytest.mark.parametrize(
    "model",
    [
        model if model in ALWAYS else pytest.param(model, marks=pytest.mark.slow)
        for family in ("diffusers", "transformers")
        for model in ROWS[family]
    ],
)
def test_a_row_is_what_is_found(models, model: str) -> None:
    module = models[model]()
    component = component_from_module(module, name="model")
    assert row_of(model, component).markdown() in (ROWS["diffusers"] | ROWS["transformers"]).values()
    for name in choose_forms(component, Precision.ENCODED):
        assert not evict_last(module, name), f"{name} is cast against its class"


def evict_last(module: nn.Module, name: str) -> bool:
    """Whether any class declares it, as diffusers asks: at every module on the way down, by the path to there."""
    owner, outer = module, ""
    for part in (*name.split("."), ""):
        inner = name.removeprefix(outer).removeprefix(".")
        steps = [inner[: match.start()] for match in re.finditer(r"\.|$", inner)]
        for attribute in PATTERNS:
            declared = getattr(type(owner), attribute, None)
            for pattern in declared if isinstance(declared, list | set | tuple) else ():
                if any(re.search(pattern, step) for step in steps):
                    return True
        if not isinstance(getattr(owner, part, None), nn.Module):
            return False
        owner, outer = getattr(owner, part), f"{outer}.{part}".removeprefix(".")
    return False
