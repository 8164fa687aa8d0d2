"""Modules that are asked where they are: what libraries make there is right, resident, streamed and split."""

from __future__ import annotations

import gc
from typing import Any

import diffusers
import pytest
import torch
import transformers
from torch import nn

from highwater.memory import manage

DIM = 32
WAYS = {
    "resident": {"placement": "gpu:0"},
    "streamed": {"placement": "gpu:0", "profile": "0.08MiB"},
    "second": {"placement": "gpu:1"},
    "split": {"placement": "gpu:0&gpu:1@0.5"},
}


def language_model(seed: int, num_layers: int) -> Any:
    torch.manual_seed(seed)
    config = transformers.LlamaConfig(
        hidden_size=DIM, intermediate_size=64, num_hidden_layers=num_layers, num_attention_heads=2, vocab_size=64,
        num_key_value_heads=2, bos_token_id=1, eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).eval().requires_grad_(False)


@pytest.mark.parametrize("way", WAYS)
@torch.no_grad()
def test_assisted_decoding_of_transformers(machine, way: str) -> None:
    tokens = torch.tensor([[1, 5, 9, 23, 40]])
    options = {"max_new_tokens": 12, "do_sample": False}
    model, helper = language_model(0, 4), language_model(1, 3)
    with machine(8, 8) as manager:
        model.to("sim:0"), helper.to("sim:0")
        want = model.generate(tokens.to("sim:0"), assistant_model=helper, **options).cpu()
        model.to("cpu"), helper.to("cpu")
        with manage({"model": model, "helper": helper}, manager=manager, **WAYS[way]) as managed:
            for _ in range(2):
                got = model.generate(tokens.to(model.device), assistant_model=helper, **options)
                assert torch.equal(got.cpu(), want)
            assert torch.equal(model.generate(tokens, **options).cpu(), want)
            assert helper.device == model.device == managed.device
        assert type(model) is transformers.LlamaForCausalLM and model.device == torch.device("cpu")
        del got
        gc.collect()


class Asking(nn.Module):
    """Answers as transformers' models do, and makes what it needs there."""

    def __init__(self, inner: nn.Module | None = None) -> None:
        super().__init__()
        self.embed = nn.Linear(DIM, DIM)
        self.blocks = nn.ModuleList(inner or nn.Linear(DIM, DIM) for _ in range(4))

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x) + torch.ones(DIM, device=self.device)
        for block in self.blocks:
            x = block(x)
        return x


class AskingBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(DIM, DIM)

    @property
    def device(self) -> torch.device:
        return self.linear.weight.device

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) + torch.ones(DIM, device=self.device)


def asking_net() -> Asking:
    torch.manual_seed(0)
    net = Asking()
    net.blocks = nn.ModuleList(AskingBlock() for _ in range(6))
    return net.eval().requires_grad_(False)


@pytest.mark.parametrize("way", WAYS)
@torch.no_grad()
def test_a_module_answers_with_the_device_where_it_computes(machine, way: str) -> None:
    net, x = asking_net(), torch.randn(2, DIM)
    want = net(x)
    with machine(8, 8) as manager, manage(net, manager=manager, **WAYS[way]) as managed:
        home = managed.device
        for _ in range(2):
            assert net.device == home
            assert torch.equal(net(x).cpu(), want)
        answers = {str(block.device) for block in net.blocks}
        assert answers == ({"sim:0", "sim:1"} if way == "split" else {str(home)})
        assert net.embed.weight.device.type == "sim"
        manager.free_memory("gpu:0", 8 << 20, "all of it")
        manager.free_memory("gpu:1", 8 << 20, "all of it")
        assert net.embed.weight.is_cpu and net.device == home
        managed.reprofile(placement="gpu:1")
        assert str(net.device) == "sim:1" and torch.equal(net(x).cpu(), want)
    assert net.device == torch.device("cpu") and torch.equal(net(x), want)


def test_the_class_of_a_managed_module_is_found_in_tables_of_classes(machine) -> None:
    net = asking_net()
    with machine(8) as manager:
        with manage(net, manager=manager):
            own = type(net)
            assert own is not Asking and isinstance(net, Asking)
            assert own == Asking and Asking == own and own in [Asking] and own in {Asking: 0} and Asking in {own}
            assert own != AskingBlock and AskingBlock not in {own}
            assert (str(own), own.__name__, repr(net)) == (str(Asking), "Asking", repr(asking_net()))
            assert {type(block) for block in net.blocks} == {AskingBlock}
        assert type(net) is Asking and not any("highwater" in name for name in vars(net))


@pytest.mark.parametrize("ending", ["refused", "reprofile refused", "discarded"])
def test_the_class_comes_back_whatever_happens(machine, ending: str) -> None:
    net = asking_net()
    with machine(8) as manager:
        if ending == "refused":
            with pytest.raises(ValueError, match="too small"):
                manage(net, "0.0001MiB", manager=manager)
        else:
            managed = manage(net, manager=manager)
            if ending == "discarded":
                managed.discard()
            else:
                with pytest.raises(ValueError, match="too small"):
                    managed.reprofile("0.0001MiB")
                assert str(net.device) == "sim:0"
                managed.release()
    assert type(net) is Asking and {type(block) for block in net.blocks} == {AskingBlock}


class Stays(nn.Module):
    """Knows its device by itself, as wrappers of other programs do."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(DIM, DIM)
        self.own = torch.device("cpu")

    @property
    def device(self) -> torch.device:
        return self.own

    @device.setter
    def device(self, value: torch.device) -> None:
        self.own = value


def test_a_device_that_can_be_set_is_the_programs_own(machine) -> None:
    net = Stays()
    with machine(8) as manager, manage(net, manager=manager):
        assert type(net) is Stays and net.device == torch.device("cpu")
        net.device = torch.device("meta")
    assert net.device == torch.device("meta")


def test_a_pipeline_is_made_of_the_parts_of_a_managed_one(machine) -> None:
    """diffusers looks for the class of each part in a list, and makes a pipeline of those that it finds."""
    unet = diffusers.UNet2DModel(
        sample_size=8, block_out_channels=(8, 8), down_block_types=("DownBlock2D",) * 2,
        up_block_types=("UpBlock2D",) * 2, layers_per_block=1, norm_num_groups=4,
    )  # fmt: skip
    pipe = diffusers.DDPMPipeline(unet=unet, scheduler=diffusers.DDPMScheduler())
    with machine(8) as manager, manage(pipe, manager=manager):
        assert str(pipe.device) == str(pipe._execution_device) == "sim:0"
        other = diffusers.DDIMPipeline.from_pipe(pipe)
        assert other.unet is unet
    assert pipe.device == torch.device("cpu")


class Pipeline:
    def __init__(self) -> None:
        self.transformer, self.vae = asking_net(), asking_net()


@torch.no_grad()
def test_the_parts_of_a_pipeline_answer_with_the_device_of_its_diffusion_model(machine) -> None:
    """So they do for `_execution_device`; inside their own forwards with their own."""
    x = torch.randn(2, DIM)
    with machine(8, 8) as manager, manage(pipe := Pipeline(), placement="vae=gpu:1", manager=manager) as managed:
        want = asking_net()(x)
        for _ in range(2):
            assert str(pipe.vae.device) == str(pipe.transformer.device) == "sim:0"
            assert torch.equal(pipe.vae(x.to(pipe.vae.device)).cpu(), want)
            managed.reprofile("0.08MiB")
