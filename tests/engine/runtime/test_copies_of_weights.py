"""Deep copies of weights and of layers of a managed module: those of an unmanaged module, with the same sharing."""

from __future__ import annotations

import copy
import gc
import io
import itertools
import pickle
from pathlib import Path
from typing import Any

import diffusers
import peft
import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import nn
from torch.nn.utils.parametrize import is_parametrized

from highwater.memory import manage
from highwater.memory.errors import UnsafeState

DIM = 64
WAYS: dict[str, dict[str, Any]] = {
    "resident": {"placement": "gpu:0"},
    "streamed": {"placement": "gpu:0", "profile": "0.5MiB"},
    "split": {"placement": "gpu:0&gpu:1"},
    "CPU": {"placement": "cpu"},
    "on disk": {"placement": "gpu:0:disk", "profile": "0.5MiB"},
    "fp8": {"placement": "gpu:0", "precision": "fp8 scaled"},
    "fp8 streamed": {"placement": "gpu:0", "precision": "fp8 scaled", "profile": "0.3MiB"},
}


def take(net: Any, way: str, manager: Any, folder: Path) -> Any:
    options = dict(WAYS[way])
    if way == "on disk":
        save_file({name: weight.clone() for name, weight in net.state_dict().items()}, folder / "net.safetensors")
        options["files"] = {"model": folder / "net.safetensors"}
    return manage(net, manager=manager, **options)


def tensors_of(net: Any, *, with_state: bool) -> list[torch.Tensor]:
    """Return weights, buffers, detached weights (tied ones twice) and overlapping views of detached ones."""
    weights = list(net.parameters())
    detached = list(net.state_dict().values()) if with_state else [net.embed.weight.detach() for _ in range(2)]
    views = [weights[0].detach()[1:3], weights[0].detach()[2:5].t(), weights[1].detach(), weights[0].detach().view(-1)]
    return [*weights, *net.buffers(), *detached, *views]


def sharing(tensors: list[torch.Tensor]) -> list[tuple[int, int]]:
    """Return which two are the same object or share bytes."""
    places = []
    for tensor in tensors:
        steps = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        places.append((tensor.data_ptr(), tensor.data_ptr() + (steps + 1) * tensor.itemsize))
    return [
        (i, j)
        for (i, one), (j, other) in itertools.combinations(enumerate(places), 2)
        if tensors[i] is tensors[j] or (one[0] < other[1] and other[0] < one[1])
    ]


def compare_copies(plain: Any, net: Any, *, eight_bits: bool, with_state: bool) -> None:
    wanted, ours = (tensors_of(each, with_state=with_state) for each in (plain, net))

    @given(st.lists(st.integers(0, len(wanted) - 1), max_size=12))
    def check(numbers: list[int]) -> None:
        want, got = ([*copy.deepcopy([tensors[number] for number in numbers])] for tensors in (wanted, ours))
        for copied, original, number in zip(got, want, numbers, strict=True):
            assert torch.equal(copied.cpu(), original)
            assert type(copied) is type(original) and copied.stride() == original.stride()
            assert copied is not ours[number]
        if not eight_bits:  # their state has copies already
            assert sharing(got) == sharing(want)
        assert [i for i, one in enumerate(got) for other in got[:i] if one is other] == [
            i for i, one in enumerate(want) for other in want[:i] if one is other
        ]
        with torch.no_grad():
            for copied in {id(copied): copied for copied in got}.values():
                copied.zero_()  # the originals are compared below

    check()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("forwards", [0, 1])
def test_lists_of_weights_are_copied_as_those_of_an_unmanaged_module(
    toys, machine, tmp_path: Path, way: str, forwards: int
) -> None:
    plain, net = toys.build_net(), toys.build_net()
    with machine(64, 64) as manager:
        with take(net, way, manager, tmp_path):
            if way.startswith("fp8"):
                with torch.no_grad():
                    for weight, own in zip(plain.parameters(), net.parameters(), strict=True):
                        weight.copy_(own.cpu())
            for _ in range(forwards):
                net(torch.ones(2, DIM, device="sim:0"))
            compare_copies(
                plain, net, eight_bits=way.startswith("fp8"), with_state=not way.startswith(("fp8", "on disk"))
            )
            gc.collect()
        for own, want in zip(net.state_dict().values(), plain.state_dict().values(), strict=True):
            assert torch.equal(own, want)


class Layers(nn.Module):
    """Blocks of layers of many kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.LayerNorm(DIM),
                nn.Linear(DIM, DIM),
                nn.BatchNorm1d(DIM),
                nn.utils.weight_norm(nn.Linear(DIM, DIM)),
                nn.utils.parametrizations.weight_norm(nn.Linear(DIM, DIM)),
            )
            for _ in range(4)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            for layer in block:
                x = layer(x)
        return x


def build_layers() -> Any:
    torch.manual_seed(0)
    with torch.no_grad():  # else what weight_norm computes cannot be copied, managed or not
        return Layers().eval().requires_grad_(False)


def hooks_of(module: nn.Module) -> list[Any]:
    return [
        (name, type(part).__name__)
        for part in module.modules()
        for name, table in vars(part).items()
        if "_hooks" in name and isinstance(table, dict)
        for _ in table
    ]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("forwards", [0, 1])
@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
def test_copies_of_layers_are_plain_layers(machine, tmp_path: Path, way: str, forwards: int) -> None:
    plain, net = build_layers(), build_layers()
    x = torch.randn(2, DIM)
    with machine(64, 64) as manager:
        managed = take(net, way, manager, tmp_path)
        for _ in range(forwards):
            net(x.to("sim:0"))
        own = [part for name, part in net.named_modules() if name]
        copies = [copy.deepcopy(part) for part in own] + copy.deepcopy(own)
        theirs = [part for name, part in plain.named_modules() if name] * 2
        for copied, want in zip(copies, theirs, strict=True):
            assert type(copied).__name__ == type(want).__name__ and hooks_of(copied) == hooks_of(want)
            assert copied.state_dict().keys() == want.state_dict().keys()
            copied.cpu()
            if not way.startswith("fp8"):
                assert all(map(torch.equal, copied.state_dict().values(), want.state_dict().values()))
            if not any(map(is_parametrized, want.modules())):  # torch pickles none of those
                assert pickle.dumps(copied)
        with pytest.raises(UnsafeState, match="release it before copying"):
            copy.deepcopy([net.blocks[0], net])
        layers = [(copied, want) for copied, want in zip(copies, theirs, strict=True) if type(want) is nn.Linear]
        for copied, want in layers:
            if not way.startswith("fp8"):
                assert torch.equal(copied(x), want(x))
        net(x.to("sim:0"))
        managed.release()
        del copies, layers, copied, own
        gc.collect()


def test_inner_models_are_copied_with_their_own_class(machine) -> None:
    config = transformers.CLIPTextConfig(
        hidden_size=32, intermediate_size=37, num_attention_heads=4, num_hidden_layers=3, vocab_size=99
    )
    model = transformers.CLIPTextModelWithProjection(config).eval().requires_grad_(False)
    own = type(model.text_model)
    with machine(64) as manager, manage({"model": model}, placement="gpu:0", manager=manager):
        copied = copy.deepcopy(model.text_model)
        assert type(copied) is own and copied.device == torch.device("cpu")
        assert vars(copied).keys() == vars(own(config)).keys()
        assert torch.equal(next(copied.parameters()), next(model.text_model.parameters()))
        with pytest.raises(UnsafeState, match="release it before"):
            copy.deepcopy({"model": model})


def build_unet() -> Any:
    torch.manual_seed(0)
    return diffusers.UNet2DModel(
        sample_size=8, block_out_channels=(32, 32), layers_per_block=1,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"), up_block_types=("AttnUpBlock2D", "UpBlock2D"),
    ).eval().requires_grad_(False)  # fmt: skip


def run_unet(model: Any, device: str) -> torch.Tensor:
    return model(torch.ones(1, 3, 8, 8, device=device), torch.tensor(3, device=device)).sample.cpu()


def build_flux() -> Any:
    torch.manual_seed(0)
    return diffusers.FluxTransformer2DModel(
        patch_size=1, in_channels=4, num_layers=2, num_single_layers=4, attention_head_dim=16, num_attention_heads=2,
        joint_attention_dim=32, pooled_projection_dim=32, axes_dims_rope=[4, 4, 8],
    ).eval().requires_grad_(False)  # fmt: skip


def run_flux(model: Any, device: str) -> torch.Tensor:
    drawn = torch.Generator().manual_seed(1)
    given = {
        "hidden_states": torch.randn(1, 16, 4, generator=drawn),
        "encoder_hidden_states": torch.randn(1, 8, 32, generator=drawn),
        "pooled_projections": torch.randn(1, 32, generator=drawn),
        "timestep": torch.tensor([0.5]),
        "img_ids": torch.zeros(16, 3),
        "txt_ids": torch.zeros(8, 3),
    }
    return model(**{name: value.to(device) for name, value in given.items()}).sample.cpu()


def lora(saved: str, targets: list[str]) -> Any:
    return peft.LoraConfig(target_modules=targets, modules_to_save=[saved], r=2, init_lora_weights="gaussian")


def tuning(targets: list[str]) -> Any:
    return peft.LNTuningConfig(target_modules=targets)


def change(model: Any) -> None:
    """Change what peft copied, so that a copy of another layer, or one that is not used, shows."""
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "modules_to_save.default" in name or "ln_tuning_layers" in name:
                weight.mul_(1.5)


TUNED = {
    "unet, saved": (build_unet, run_unet, lambda: lora("conv1", ["to_q", "to_k"])),
    "unet, norms": (build_unet, run_unet, lambda: tuning(["norm1", "norm2"])),
    "flux, saved": (build_flux, run_flux, lambda: lora("proj_mlp", ["to_q", "to_k"])),
    "flux, norms": (build_flux, run_flux, lambda: tuning(["norm_q", "norm_k"])),
}


@pytest.mark.parametrize("tuned", TUNED)
@pytest.mark.parametrize("way", ["resident", "streamed", "split", "on disk"])
@pytest.mark.parametrize("forwards", [0, 1])
def test_peft_tunes_copies_of_layers(machine, tmp_path: Path, tuned: str, way: str, forwards: int) -> None:
    build, run, config = TUNED[tuned]
    results = []
    with machine(64, 64) as manager:
        for managed in (False, True):
            model = build()
            bytes_of_weights = sum(weight.nbytes for weight in model.parameters())
            options = {**WAYS, "streamed": {"placement": "gpu:0", "profile": f"{bytes_of_weights / 2**21:.3f}MiB"}}
            if managed and way == "on disk":
                save_file(model.state_dict(), tmp_path / "net.safetensors")
                options["on disk"] = {"placement": "gpu:0:disk", "files": {"model": tmp_path / "net.safetensors"}}
            handle = manage({"model": model}, manager=manager, **options[way]) if managed else model.to("sim:0")
            outputs = [run(model, "sim:0") for _ in range(forwards)]
            torch.manual_seed(5)
            peft.inject_adapter_in_model(config(), model)
            model.requires_grad_(False)
            if not managed:
                model.to("sim:0")
            outputs.append(run(model, "sim:0"))
            change(model)
            outputs += [run(model, "sim:0") for _ in range(2)]
            if managed:
                handle.release()
            model.cpu()
            results.append((outputs, {name: weight.clone() for name, weight in model.state_dict().items()}))
            del model, handle
            gc.collect()
    (wanted, kept), (got, left) = results
    assert not torch.equal(wanted[-1], wanted[-3])
    assert all(map(torch.equal, got, wanted))
    assert kept.keys() == left.keys() and all(torch.equal(kept[name], left[name]) for name in kept)


@pytest.mark.parametrize("way", ["streamed", "on disk", "fp8"])
def test_saved_weights_have_their_values(toys, machine, tmp_path: Path, way: str) -> None:
    net = toys.build_net()
    with machine(64) as manager, take(net, way, manager, tmp_path):
        saved = io.BytesIO()
        torch.save([dict(net.named_parameters()), net.embed.weight.detach()], saved)
        saved.seek(0)
        weights, detached = torch.load(saved)
        for name, weight in net.named_parameters():
            assert torch.equal(weights[name], weight.clone()) and type(weights[name]) is nn.Parameter
        assert torch.equal(detached, net.embed.weight.clone())


@pytest.mark.parametrize("way", ["streamed", "on disk", "fp8", "fp8 streamed"])
@torch.no_grad()
def test_moving_weights_to_shared_memory_is_refused(toys, machine, tmp_path: Path, way: str) -> None:
    """Torch moves whole storages there, in which other weights lie, too."""
    net, other, x = toys.build_net(), toys.build_net(), torch.randn(2, 3, DIM)
    with machine(8, 8) as manager:
        managed = take(net, way, manager, tmp_path)
        want = net(x).cpu()
        if way == "fp8":
            managed.members[0].managed.unload()
        with pytest.raises(UnsafeState, match=r"^a weight of a managed module [^\n]*: release the module first$"):
            net.share_memory()
        assert torch.equal(net(x).cpu(), want)
        managed.release()
        if "fp8" not in way:
            assert all(torch.equal(weight, other.get_parameter(name)) for name, weight in net.named_parameters())
        assert torch.equal(net.share_memory()(x), want)
