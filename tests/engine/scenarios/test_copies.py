"""Managed models that are copied, pickled, or asked for another of their class."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import diffusers
import pytest
import torch
import transformers
from torch import nn

from highwater.memory import manage
from highwater.memory.errors import UnsafeState


def of_diffusers() -> Any:
    return diffusers.UNet2DModel(
        sample_size=8, block_out_channels=(32, 32), layers_per_block=1,
        down_block_types=("DownBlock2D", "DownBlock2D"), up_block_types=("UpBlock2D", "UpBlock2D"),
    )  # fmt: skip


def of_transformers() -> Any:
    config = transformers.CLIPTextConfig(
        hidden_size=32, intermediate_size=37, num_attention_heads=4, num_hidden_layers=3, vocab_size=99
    )
    return transformers.CLIPTextModel(config)


def plain() -> Any:
    return nn.Sequential(*[nn.Linear(8, 8) for _ in range(4)])


MODELS = [of_diffusers, of_transformers, plain]
COPIES = {
    "pickle": pickle.dumps,
    "torch.save": lambda model: torch.save(model, io.BytesIO()),
    "deepcopy": copy.deepcopy,
}


@pytest.mark.parametrize("build", MODELS)
@pytest.mark.parametrize("way", COPIES)
def test_what_cannot_be_copied_is_refused_in_one_line(machine, build: Callable[[], Any], way: str) -> None:
    model = build().eval().requires_grad_(False)
    with machine(64) as manager:
        with manage({"model": model}, placement="gpu:0", manager=manager), pytest.raises(UnsafeState, match="release"):
            COPIES[way](model)
        COPIES[way](model)


@pytest.mark.parametrize("build", MODELS[:2])
def test_another_of_the_class_of_a_managed_model_is_of_its_own(machine, build: Callable[[], Any]) -> None:
    model = build().eval().requires_grad_(False)
    own = type(model)
    with machine(64) as manager:
        with manage({"model": model}, placement="gpu:0", manager=manager):
            config = model.config
            others = [
                model.__class__(config) if build is of_transformers else model.__class__(**config),
                type(model)._from_config(config) if build is of_transformers else type(model).from_config(config),
            ]
            shallow = copy.copy(model)
            assert shallow.device == model.device
            for other in others:
                assert type(other) is own and other.device == torch.device("cpu")
                assert other.load_state_dict(model.state_dict())
                assert isinstance(other, type(model)) and isinstance(model, own)
        assert shallow.device == torch.device("cpu") == model.device
        assert type(pickle.loads(pickle.dumps(model))) is own
        assert type(model) is own
