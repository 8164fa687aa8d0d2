"""Weights that a user writes while their module is managed: what computes next computes with them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from highwater.memory import manage
from highwater.memory.runtime.blocks import resident_copy
from highwater.memory.runtime.blocks.resident_copy import content_tag

PROFILES = ["auto", "0.8MiB", "0.55MiB", "0.45MiB"]


def load(net: nn.Module, state: dict[str, torch.Tensor]) -> None:
    net.load_state_dict(state)


def copy(net: nn.Module, state: dict[str, torch.Tensor]) -> None:
    for name, parameter in net.named_parameters():
        parameter.copy_(state[name])


def assign_data(net: nn.Module, state: dict[str, torch.Tensor]) -> None:
    for name, parameter in net.named_parameters():
        parameter.data = state[name].clone()


def assign(net: nn.Module, state: dict[str, torch.Tensor]) -> None:
    """Another parameter in all places of each one."""
    for name, parameter in list(net.named_parameters()):
        new = nn.Parameter(state[name].clone(), parameter.requires_grad)
        for module in net.modules():
            for attribute in [own for own, held in module._parameters.items() if held is parameter]:
                setattr(module, attribute, new)


def add_to_data(net: nn.Module, state: dict[str, torch.Tensor]) -> None:
    """As peft's ``merge()`` does it."""
    for name, parameter in net.named_parameters():
        parameter.data += state[name].to(parameter.device) - parameter.data
        parameter.data.copy_(state[name])  # the sum is rounded


def copy_to_data(net: nn.Module, state: dict[str, torch.Tensor]) -> None:
    for name, parameter in net.named_parameters():
        parameter.data.copy_(state[name])


def assign_data_of_one(net: nn.Module, state: dict[str, torch.Tensor]) -> None:
    """Other memory for each weight but one of a block; all are written in the end."""
    for name, parameter in net.named_parameters():
        if name.endswith("norm.weight"):
            parameter.copy_(state[name])
        else:
            parameter.data = state[name].clone()


@pytest.mark.parametrize("write", [load, copy, assign_data, assign_data_of_one, add_to_data, copy_to_data, assign])
@pytest.mark.parametrize("profile", PROFILES)
@pytest.mark.parametrize("num_passes", [0, 1, 3])
@torch.no_grad()
def test_the_next_pass_computes_with_what_was_written(
    toys, machine, profile: str, num_passes: int, write: Callable[[nn.Module, dict[str, torch.Tensor]], None]
) -> None:
    net, other, x = toys.build_net(0), toys.build_net(1), torch.randn(2, 5, 64)
    state = {name: tensor.clone() for name, tensor in other.state_dict().items()}
    with machine(8) as manager:
        want = other.to("sim:0")(x.to("sim:0")).cpu()
        other.to("cpu")
        with manage(net, profile=profile, placement="gpu:0", manager=manager):
            for _ in range(num_passes):
                net(x)
            torch.accelerator.synchronize(0)  # no copy under way: what was staged is old
            write(net, state)
            for _ in range(5):
                assert torch.equal(net(x).cpu(), want)
        assert all(torch.equal(parameter, state[name]) for name, parameter in net.named_parameters())


@pytest.mark.parametrize("profile", PROFILES)
@pytest.mark.parametrize("tier", ["pinned", "disk"])
@torch.no_grad()
def test_one_element_written_through_data_counts_and_outlives_the_device(
    toys, machine, tmp_path, profile: str, tier: str
) -> None:
    net, x = toys.build_net(), torch.randn(2, 5, 64)
    save_file({name: tensor.clone() for name, tensor in net.state_dict().items()}, tmp_path / "net.safetensors")
    files = {"net": [tmp_path / "net.safetensors"]} if tier == "disk" else None
    with machine(8) as manager:
        choices = {"placement": f"gpu:0:{tier}", "files": files, "manager": manager}
        with manage({"net": net}, profile, **choices) as managed:
            for number, block in enumerate([*net.doubles, *net.singles]):
                net(x)
                torch.accelerator.synchronize(0)
                data = block.up.weight.data
                data[number, 3] = 7.0
                block.norm.bias.data.neg_().add_(1.0)
                del data
                got = net(x).cpu()
                other = toys.build_net()
                other.load_state_dict({name: tensor.cpu() for name, tensor in net.state_dict().items()})
                assert torch.equal(got, on_device(other, x))
                assert other.get_parameter(f"{name_of(net, block)}.up.weight")[number, 3] == 7.0
                if number % 2:
                    managed.members[0].managed.unload()
                assert torch.equal(net(x).cpu(), got)
        for number, block in enumerate([*net.doubles, *net.singles]):
            assert block.up.weight[number, 3] == 7.0 and (block.norm.bias == 1.0).all()
            assert type(block.up.weight) is nn.Parameter


def name_of(net: nn.Module, module: nn.Module) -> str:
    return next(name for name, found in net.named_modules() if found is module)


def on_device(net: nn.Module, x: torch.Tensor) -> torch.Tensor:
    output = net.to("sim:0")(x.to("sim:0")).cpu()
    net.to("cpu")
    return output


@torch.no_grad()
def test_words_that_change_places_are_another_content() -> None:
    """The tag of a resident copy: swapped rows, swapped words, flipped signs, one bit."""
    for num_words in (2, 3, 7, 64, 1000, (1 << 20) + 5000):
        words = torch.randint(-(2**62), 2**62, (num_words,))
        tag = int(content_tag(words.view(torch.uint8)))
        for change in (
            words.flip(0),
            words.roll(1),
            words.neg(),
            words ^ torch.tensor([1] + [0] * (num_words - 1)),
            words.view(torch.float32).neg().view(torch.int64),
        ):
            assert int(content_tag(change.clone().view(torch.uint8))) != tag


@torch.no_grad()
def test_reading_writes_nothing_back(toys, machine) -> None:
    """A resident copy that was read through ``.data`` leaves without being copied, and nothing is streamed anew."""
    net, x = toys.build_net(), torch.randn(2, 5, 64)
    with machine(8) as manager, manage(net, "auto", placement="gpu:0", manager=manager) as managed:
        net(x)
        assert all(parameter.data.isfinite().all() for parameter in net.parameters())
        versions = [group.host_slab._version for group in managed.members[0].managed.groups]
        managed.members[0].managed.unload()
        assert versions == [group.host_slab._version for group in managed.members[0].managed.groups]
        manager.ledger.check()


@pytest.mark.parametrize("when", ["as it comes", "as it leaves"])
def test_a_device_without_memory_for_a_tag_copies_back(toys, machine, monkeypatch, when: str) -> None:
    """What cannot be compared is taken for written."""
    net, x = toys.build_net(), torch.randn(2, 5, 64)

    def fail(slab: torch.Tensor) -> torch.Tensor:
        raise torch.OutOfMemoryError

    with machine(8) as manager, torch.no_grad(), manage(net, placement="gpu:0", manager=manager) as managed:
        if when == "as it comes":
            monkeypatch.setattr(resident_copy, "content_tag", fail)
        net(x)
        monkeypatch.setattr(resident_copy, "content_tag", fail)
        net.doubles[1].up.weight.data.fill_(3.0)
        net.doubles[1].gain.data.fill_(2.0)
        managed.members[0].managed.unload()
        assert (net.doubles[1].up.weight == 3.0).all() and (net.doubles[1].gain == 2.0).all()


def test_a_buffer_written_through_data_on_the_device_is_kept(toys, machine) -> None:
    net, x = toys.build_net(), torch.randn(2, 5, 64)
    with machine(8) as manager, torch.no_grad(), manage(net, placement="gpu:0", manager=manager) as managed:
        net(x)
        net.doubles[1].gain.data.fill_(2.0)
        managed.members[0].managed.unload()
        assert (net.doubles[1].gain == 2.0).all()


@pytest.mark.parametrize("name", ["embed.weight", "singles.2.up.weight"])
@pytest.mark.parametrize("profile", ["auto", "0.6MiB"])
def test_data_of_another_shape_is_taken_over(toys, machine, name: str, profile: str) -> None:
    """As transformers resizes embeddings; here without the layers beside it, so that torch refuses to compute."""
    net, x = toys.build_net(), torch.randn(1, 3, 64)
    with machine(8) as manager, manage(net, profile, placement="gpu:0", manager=manager), torch.no_grad():
        want = net(x).cpu()
        weight = net.get_parameter(name).cpu().clone()
        net.get_parameter(name).data = torch.zeros(weight.shape[0] + 1, weight.shape[1])
        for _ in range(2):
            with pytest.raises(RuntimeError, match="size"):
                net(x)
        assert net.get_parameter(name).shape == (weight.shape[0] + 1, weight.shape[1])
        net.get_parameter(name).data = weight
        assert torch.equal(net(x).cpu(), want)


FIRST_ALIASES = {
    "data": lambda weight: weight.data,
    "a view": lambda weight: weight.data.view(-1)[: weight.numel() // 2],
    "detached": lambda weight: weight.detach(),
    "data of detached": lambda weight: weight.detach().data,
}
VIEWS = {
    "data of a view": lambda weight: weight.view(-1).data,
    "data of a view of a view": lambda weight: weight.view(-1)[3:].data,
    "data of a view of detached": lambda weight: weight.detach().view(-1).data,
    "a view of data of a view": lambda weight: weight.view(-1).data[1:],
    "data of rows": lambda weight: weight[2:7].data,
    "data of columns": lambda weight: weight[..., ::3].data,
    "data of the transposed": lambda weight: weight.mT.data if weight.ndim > 1 else weight.squeeze().data,
    "data of T": lambda weight: weight.T.data if weight.ndim == 2 else weight.unsqueeze(0).data,
    "data of reshaped": lambda weight: torch.reshape(weight, (-1,)).data,
    "data of expanded": lambda weight: weight.expand_as(weight).data,
    "data of chunks": lambda weight: [part.data for part in weight.chunk(2)],
    "data of split": lambda weight: [part.data for part in torch.split(weight, 3)],
    "data of unbound": lambda weight: [part.data for part in weight.unbind()],
    "data of each row": lambda weight: [part.data for part in weight],
    "data as other numbers": lambda weight: weight.view(torch.int32).data.view(torch.float32),
    "data of a parameter of it": lambda weight: nn.Parameter(weight, requires_grad=False).data,
    "data of a parameter of a view": lambda weight: nn.Parameter(weight[1:], requires_grad=False).data,
    "data of a view in inference": torch.inference_mode()(lambda weight: weight.view(-1).data),
    "a view in inference": torch.inference_mode()(lambda weight: weight.view(-1)),
    "data of as_tensor": lambda weight: torch.as_tensor(weight).data,
    "data of contiguous": lambda weight: weight.contiguous().data,
}


ALIASES = FIRST_ALIASES | VIEWS
WHERE = [
    (placement, profile)
    for placement in ("gpu:0", "gpu:0&gpu:1")
    for profile in ("0.6MiB", "0.6MiB,pinned=none", "0.45MiB", "auto")
]


@pytest.mark.parametrize(
    ("placement", "profile", "alias"),
    [
        pytest.param(*where, alias, marks=[pytest.mark.slow] if alias in VIEWS and where != WHERE[0] else [])
        for where in WHERE
        for alias in ALIASES
    ],
)
@torch.no_grad()
def test_what_is_written_through_an_alias_counts_whenever_it_was_taken(
    toys, machine, profile: str, placement: str, alias: str
) -> None:
    """Before earlier forwards, too, in any block and again and again, as long as its weight rests where it did."""
    net, other, x = toys.build_net(), toys.build_net(), torch.randn(2, 5, 64)
    with machine(8, 8) as manager, manage(net, profile, placement=placement, manager=manager):
        net(x)
        names = [name for name, _ in net.named_parameters() if "weight" in name]
        taken = {name: ALIASES[alias](net.get_parameter(name)) for name in names}
        for _ in range(2):
            net(x)
        for number, (name, data) in enumerate(taken.items()):
            for one in (data, ALIASES[alias](other.get_parameter(name))):
                for part in one if isinstance(one, list) else [one]:
                    part.mul_(0.5 + number / 8)
            del one, part
            assert torch.equal(net(x).cpu(), on_device(other, x)), name
        del data
        taken.clear()


UNSEEN = {
    "data of data": lambda weight: weight.data.data,
    "numpy": lambda weight: weight.numpy(),
    "numpy of data": lambda weight: weight.data.numpy(),
    "numpy of a view": lambda weight: weight.view(-1).numpy(),
    "an array": lambda weight: np.asarray(weight),
    "DLPack": lambda weight: torch.from_dlpack(weight.detach()),
    "storage": lambda weight: torch.empty(0).set_(weight.untyped_storage(), weight.storage_offset(), weight.shape),
    "data of data of a view": lambda weight: weight.view(-1).data.data,
}


def names_at_rest(net) -> list[str]:
    return [name for name, held in net.named_parameters() if "weight" in name and held.device.type == "cpu"]


@pytest.mark.parametrize("alias", UNSEEN)
@torch.no_grad()
def test_what_is_written_at_once_counts(toys, machine, alias: str) -> None:
    """Even where torch keeps no count of what shares the memory: taking it counts."""
    net, other, x = toys.build_net(), toys.build_net(), torch.randn(2, 5, 64)
    with machine(8) as manager, manage(net, "0.6MiB", placement="gpu:0", manager=manager):
        net(x)
        names = names_at_rest(net)
        for number, name in enumerate(names):
            net(x)
            torch.accelerator.synchronize(0)
            for which in (net, other):
                data = UNSEEN[alias](which.get_parameter(name))
                data *= 0.5 + number / 8
                del data
            assert torch.equal(net(x).cpu(), on_device(other, x)), name


@pytest.mark.parametrize("alias", UNSEEN)
@torch.no_grad()
def test_reading_data_tells_of_what_was_written_unseen(toys, machine, alias: str) -> None:
    net, other, x = toys.build_net(), toys.build_net(), torch.randn(2, 5, 64)
    with machine(8) as manager, manage(net, "0.6MiB", placement="gpu:0", manager=manager):
        net(x)
        names = names_at_rest(net)
        taken = {name: UNSEEN[alias](net.get_parameter(name)) for name in names}
        for _ in range(2):
            net(x)
        for number, (name, data) in enumerate(taken.items()):
            data *= 0.5 + number / 8
            other.get_parameter(name).mul_(0.5 + number / 8)
            net.get_parameter(name).data  # noqa: B018 - counts as a write
            assert torch.equal(net(x).cpu(), on_device(other, x)), name
        del data
        taken.clear()
