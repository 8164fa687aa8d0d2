"""What a hook of another library keeps of a call on the second device comes home with the output of the module."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import pytest
import torch
from torch import nn

from highwater.memory import manage

WIDTH = 64
PLACES = {
    "resident": ("auto", "gpu:0"),
    "split": ("auto", "gpu:0&gpu:1"),
    "split and streamed": ("gpu:0=0.1MiB,gpu:1=0.05MiB", "gpu:0&gpu:1"),
    "home is the second": ("auto", "gpu:1&gpu:0"),
    "three devices": ("auto", "gpu:0&gpu:1&gpu:2"),
}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, *, side: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(x)) + side


class Overheard(nn.Module):
    """Returns what hooks on its blocks heard, as transformers does with hidden states."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(6))
        self.form = form
        self.heard: list[Any] = []

    def listen(self) -> None:
        for block in self.blocks:
            block.register_forward_hook(self.hear, with_kwargs=True)

    def hear(self, module: nn.Module, args: Any, kwargs: Any, out: torch.Tensor) -> None:
        self.heard.append((args[0], args[0][:, :1], kwargs["side"], out))

    def forward(self, x: torch.Tensor) -> Any:
        self.heard = []
        side = x * 0.5
        x = self.embed(x)
        for block in self.blocks:
            x = block(x, side=side)
        heard, self.heard = self.heard, []
        if self.form == "tuple":
            return x, tuple(heard)
        return OrderedDict(last=x, heard=heard)


def tensors_of(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    return [tensor for held in (value.values() if isinstance(value, dict) else value) for tensor in tensors_of(held)]


def build(form: str) -> Overheard:
    torch.manual_seed(0)
    return Overheard(form).eval().requires_grad_(False)


@pytest.mark.parametrize("is_early", [False, True], ids=["hooked later", "hooked before"])
@pytest.mark.parametrize("form", ["tuple", "mapping"])
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_what_hooks_keep_is_on_the_home_device(machine, place: str, mode: Any, form: str, is_early: bool) -> None:
    profile, placement = PLACES[place]
    home = torch.device("sim", int(placement[4]))
    with machine(4, 4, 4) as manager, mode():
        x = torch.randn(2, 3, WIDTH, device=home)
        model = build(form).to(home)
        model.listen()
        wanted = tensors_of(model(x))
        model = build(form)
        if is_early:
            model.listen()
        with manage(model, profile, placement=placement, manager=manager):
            if not is_early:
                model.listen()
            for _ in range(2):
                got = tensors_of(model(x))
                assert {tensor.device for tensor in got} == {home}
                assert all(map(torch.equal, got, wanted))
        del model, x, wanted, got


@pytest.mark.parametrize("called", ["", "model", "model.language_model"])
def test_hidden_states_of_a_language_model_behind_a_vision_tower_are_on_one_device(machine, called: str) -> None:
    """The first layer computes on the second device, and transformers keeps what it was given."""
    from transformers import Gemma3Config, Gemma3ForConditionalGeneration

    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4}
    text = sizes | {"vocab_size": 64, "num_hidden_layers": 3, "num_key_value_heads": 2, "head_dim": 8}
    vision = sizes | {"num_hidden_layers": 3, "image_size": 16, "patch_size": 8}
    marks = {"image_token_index": 60, "boi_token_index": 61, "eoi_token_index": 62}
    model = Gemma3ForConditionalGeneration(Gemma3Config(text_config=text, vision_config=vision, **marks))
    model.eval().requires_grad_(False)
    part = model.get_submodule(called)
    with machine(4, 4) as manager, torch.no_grad():
        ids = torch.arange(12, device="sim:0")[None]
        model.to("sim:0")
        wanted = torch.stack(part(input_ids=ids, output_hidden_states=True).hidden_states)
        with manage(model.to("cpu"), placement="gpu:0&gpu:1", manager=manager):
            for _ in range(2):
                got = torch.stack(part(input_ids=ids, output_hidden_states=True).hidden_states)
                assert torch.equal(got, wanted)
        del model, part, ids, wanted, got
