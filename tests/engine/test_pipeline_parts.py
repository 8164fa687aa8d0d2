"""A managed pipeline that gets other parts, or is offloaded, moved and cast by its library's own methods."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from typing import Any

import diffusers
import pytest
import torch
from torch import nn

from highwater.memory import InvalidInput, manage
from highwater.memory.errors import UnsafeState

DIM = 64
X = torch.randn(2, 5, DIM)


class Pipeline:
    """Text, then the model, as pipelines go; its parts are attributes, as diffusers' are."""

    def __init__(self, toys) -> None:
        self.text_encoder, self.unet = toys.build_net(seed=1), toys.build_net()
        self.image_encoder = None

    @property
    def components(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("text_encoder", "unet", "image_encoder")}

    def __call__(self) -> torch.Tensor:
        x = self.unet(self.text_encoder(X))
        return x if self.image_encoder is None else self.image_encoder(x)


def refused(name: str, kind: str) -> Any:
    line = rf"^{name} of the Pipeline is now a {kind} that is not managed: call reprofile\(\) of the handle"
    return pytest.raises(UnsafeState, match=line)


@pytest.mark.parametrize("profile", ["auto", "0.45MiB"])
@torch.no_grad()
def test_another_part_is_refused_until_it_is_taken(toys, machine, profile: str) -> None:
    with machine(8) as manager:
        pipe = Pipeline(toys)
        with manage(pipe, profile, placement="gpu:0", manager=manager) as managed:
            pipe()
            old, pipe.unet = pipe.unet, toys.build_net(seed=7)
            for _ in range(2):
                with refused("unet", "Net"):
                    pipe()
            managed.reprofile()
            assert managed.components == ("text_encoder", "unet") and {*manager.members} == {*managed.components}
            assert all(weight.is_cpu for weight in old.parameters()) and not old._forward_hooks
            assert str(pipe.unet._hf_hook.execution_device) == "sim:0"
            got = pipe()
            assert str(got.device) == "sim:0"
            assert managed.plan["unet"].streams == (profile != "auto")
        pipe.text_encoder.to("sim:0"), pipe.unet.to("sim:0")
        assert torch.equal(pipe.unet(pipe.text_encoder(X.to("sim:0"))), got)
        pipe.text_encoder.to("cpu"), pipe.unet.to("cpu")
        del got


@pytest.mark.parametrize("profile", ["auto", "0.45MiB"])
@torch.no_grad()
def test_a_part_that_wraps_a_managed_one_and_a_new_one_is_refused_until_it_is_taken(toys, machine, profile) -> None:
    class Multi(nn.Module):
        def __init__(self, *nets: nn.Module) -> None:
            super().__init__()
            self.nets = nn.ModuleList(nets)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.nets[0](x) + self.nets[1](x)

    plain = Pipeline(toys)
    plain.image_encoder = Multi(plain.unet, toys.build_net(seed=3))
    want = plain()
    with machine(8) as manager:
        pipe = Pipeline(toys)
        with manage(pipe, profile, placement="gpu:0", manager=manager) as managed:
            pipe()
            pipe.image_encoder = Multi(pipe.unet, pipe.text_encoder)  # nothing of it is new
            pipe()
            pipe.image_encoder = Multi(pipe.unet, toys.build_net(seed=3))
            with refused("image_encoder", "Multi"):
                pipe()
            managed.reprofile("auto")
            for _ in range(2):
                assert torch.allclose(pipe().cpu(), want, atol=1e-5)
        assert torch.equal(pipe(), want)


@torch.no_grad()
def test_a_part_that_came_is_refused_until_it_is_taken(toys, machine) -> None:
    with machine(8) as manager:
        pipe = Pipeline(toys)
        with manage(pipe, placement="gpu:0", manager=manager) as managed:
            pipe()
            pipe.image_encoder = toys.build_net(seed=3)
            with refused("image_encoder", "Net"):
                pipe()
            managed.reprofile("0.45MiB")
            assert managed.components == ("text_encoder", "unet", "image_encoder")
            assert str(pipe().device) == "sim:0" and managed.plan["image_encoder"].streams
        assert all(weight.is_cpu for weight in pipe.image_encoder.parameters())


@torch.no_grad()
def test_what_computes_all_the_same_is_let_be(toys, machine) -> None:
    with machine(8) as manager:
        pipe = Pipeline(toys)
        with manage(pipe, placement="gpu:0", manager=manager) as managed:
            want = pipe().cpu()
            pipe.unet = nn.Sequential(pipe.unet)  # as torch.compile and peft wrap it
            assert torch.equal(pipe().cpu(), want)
            managed.reprofile("0.45MiB")
            assert torch.equal(pipe().cpu(), want) and managed.components == ("text_encoder", "unet")
            pipe.unet = toys.build_net().to("sim:0")
            assert torch.equal(pipe().cpu(), want)
            other = pipe.unet = toys.build_net()
            with manage(other, placement="gpu:0", manager=manager):
                assert torch.equal(pipe().cpu(), want)
            pipe.unet = None
            pipe.text_encoder(X)
            managed.reprofile("auto")
        with manage(pipe := Pipeline(toys), placement="cpu", manager=manager):
            pipe.unet = toys.build_net()
            assert torch.equal(pipe(), want)


@torch.no_grad()
def test_a_part_that_cannot_be_taken_changes_nothing_else(toys, machine) -> None:
    with machine(8) as manager:
        pipe = Pipeline(toys)
        with manage(pipe, placement="gpu:0", manager=manager) as managed:
            want = pipe().cpu()
            own, pipe.unet = pipe.unet, nn.Linear(DIM, DIM, device="meta")
            with pytest.raises(InvalidInput, match="is on meta; allowed: cpu"):
                managed.reprofile("0.45MiB")
            assert managed.components == ("text_encoder", "unet") and not managed.plan["unet"].streams
            pipe.unet = own
            assert torch.equal(pipe().cpu(), want)


def build_diffusion() -> diffusers.DDPMPipeline:
    torch.manual_seed(0)
    unet = diffusers.UNet2DModel(
        sample_size=8, block_out_channels=(8, 16), down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"), layers_per_block=1, norm_num_groups=4, attention_head_dim=4,
    )  # fmt: skip
    pipe = diffusers.DDPMPipeline(unet=unet.eval().requires_grad_(False), scheduler=diffusers.DDPMScheduler())
    pipe.set_progress_bar_config(disable=True)
    return pipe


def run(pipe: diffusers.DDPMPipeline) -> torch.Tensor:
    images = pipe(num_inference_steps=2, generator=torch.Generator().manual_seed(0), output_type="np").images
    return torch.from_numpy(images)


def offload(target: Any, **options: Any) -> None:
    target.enable_group_offload(torch.device("sim:0"), offload_device=torch.device("cpu"), **options)


AT_ONCE = "unet is managed: release it before another library adds or removes offloading hooks"
OFFLOADED = "unet is managed, and has diffusers' group offloading: load it without, or release it"
CAST = r"unet is managed, and has diffusers' layerwise casting: load it without and use precision='fp8 scaled', or"
METHODS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "enable_model_cpu_offload": (lambda pipe: pipe.enable_model_cpu_offload(device="sim:0"), AT_ONCE),
    "enable_sequential_cpu_offload": (lambda pipe: pipe.enable_sequential_cpu_offload(device="sim:0"), AT_ONCE),
    "enable_group_offload of blocks": (
        lambda pipe: offload(pipe, offload_type="block_level", num_blocks_per_group=1),
        OFFLOADED,
    ),
    "enable_group_offload of leaves": (
        lambda pipe: offload(pipe.unet, offload_type="leaf_level"),
        OFFLOADED,
    ),
    "enable_layerwise_casting": (
        lambda pipe: pipe.unet.enable_layerwise_casting(torch.float8_e4m3fn, compute_dtype=torch.float32),
        CAST,
    ),
    "remove_all_hooks": (lambda pipe: pipe.remove_all_hooks(), AT_ONCE),
    "to the device": (lambda pipe: pipe.to("sim:0"), ""),
    "to the host": (lambda pipe: pipe.to("cpu"), ""),
    "maybe_free_model_hooks": (lambda pipe: pipe.maybe_free_model_hooks(), ""),
    "reset_device_map": (lambda pipe: pipe.reset_device_map(), ""),
}


@pytest.mark.parametrize("profile", ["auto", "0.06MiB"])
@pytest.mark.parametrize("runs", [True, False])
@pytest.mark.filterwarnings("ignore")
def test_a_pipeline_converted_there_and_back_has_rounded_weights(machine, profile: str, runs: bool) -> None:
    with machine(8) as manager:
        manager.set_watermark("*", 0, 0)
        pipe = build_diffusion()
        plain = diffusers.DDPMPipeline(copy.deepcopy(pipe.unet), pipe.scheduler)
        managed = manage(pipe, profile, placement="gpu:0", manager=manager)
        if runs:
            assert torch.equal(run(pipe), run(plain))
        for _ in range(2):
            for each in (pipe, plain):
                each.to(torch.float16)
                each.to(torch.float32)
            assert torch.equal(run(pipe), run(plain))
            assert managed.plan["unet"].streams == (profile != "auto")
        managed.release()
        weights = pipe.unet.state_dict()
        assert all(torch.equal(weights[name], weight) for name, weight in plain.unet.state_dict().items())
        del pipe, plain, weights
        gc.collect()


@pytest.mark.parametrize("profile", ["auto", "0.06MiB"])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.filterwarnings("ignore")
def test_the_methods_of_a_pipeline_are_right_or_refused_in_a_line(machine, method: str, profile: str) -> None:
    act, words = METHODS[method]
    with machine(8) as manager:
        manager.set_watermark("*", 0, 0)
        pipe = build_diffusion()
        saved = copy.deepcopy(pipe.unet.state_dict())
        managed = manage(pipe, profile, placement="gpu:0", manager=manager)
        assert managed.plan["unet"].streams == (profile != "auto")
        want = run(pipe)
        if words:
            with pytest.raises(UnsafeState, match=f"^{words}[^\n]*$") as raised:
                act(pipe)
                run(pipe)
            del raised
        else:
            act(pipe)
            assert torch.equal(run(pipe), want)
        managed.release()
        weights = pipe.unet.state_dict()
        assert all(torch.equal(weights[name].cpu(), saved[name]) for name in saved if not weights[name].is_meta)
        assert type(pipe.unet) is diffusers.UNet2DModel
        del pipe, weights
        gc.collect()
