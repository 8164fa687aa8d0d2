"""Another profile or placement: blocks whose precision and tier stay are kept as they are packed, all else is right."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import nn

from highwater.memory import manage
from highwater.memory.api import Managed
from highwater.memory.runtime import managed_component, packing
from highwater.memory.runtime.blocks.bundle import Bundle
from highwater.memory.runtime.blocks.weight_group import WeightGroup
from highwater.memory.runtime.managed_component import ManagedComponent
from highwater.memory.transfer.pinned_memory import pinned_used_bytes
from highwater.memory.weights.file_reader import WeightsFile

X = torch.randn(2, 5, 64, generator=torch.Generator().manual_seed(0))
TIGHT = "0.45MiB"


def slabs_of(managed: Managed) -> dict[str, int]:
    """Return where each block rests in host memory."""
    groups = [group for member in managed.members for group in member.managed.groups if group.name]
    return {group.name: group.host_slab.data_ptr() for group in groups if group.host_slab is not None}


def computed(net: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return net(X).cpu()


def on_device(net: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return net.to("sim:0")(X.to("sim:0")).cpu()


@contextmanager
def nothing_packed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Fail when a block is packed, unpacked or read meanwhile; what is beside the blocks may be."""

    def refuse(original: Callable[..., object]) -> Callable[..., object]:
        def call(group: WeightGroup, *args: object, **options: object) -> object:
            assert not group.name, f"{original.__name__} of {group.name}"
            return original(group, *args, **options)

        return call

    with monkeypatch.context() as patch:
        for name in ("pack", "measure"):
            patch.setattr(WeightGroup, name, refuse(getattr(WeightGroup, name)))
        patch.setattr(packing, "unpack", refuse(packing.unpack))
        patch.setattr(managed_component, "read_into_memory", refuse(managed_component.read_into_memory))
        patch.setattr(WeightsFile, "read_into", lambda *args, **options: pytest.fail("reads its file"))
        yield


KEPT = {
    "one device": ({}, [{"profile": TIGHT}, {"profile": "auto"}, {"prefetch": 1}]),
    "pageable": ({"placement": "gpu:0:host"}, [{"profile": TIGHT}, {"profile": "auto"}]),
    "other device": ({}, [{"placement": "gpu:1"}, {"placement": "gpu:0"}]),
    "split": ({"placement": "gpu:0&gpu:1"}, [{"profile": TIGHT}, {"placement": "gpu:0&gpu:1@0.25"}]),
    "split and back": ({}, [{"placement": "gpu:0&gpu:1"}, {"placement": "gpu:0"}]),
    "eight bits": ({"precision": "fp8 scaled"}, [{"profile": TIGHT}, {"placement": "gpu:1"}]),
    "eight bits on the CPU": ({"precision": "fp8 scaled", "placement": "cpu"}, [{"profile": "4"}]),
}


@pytest.mark.parametrize("computes", [True, False], ids=["loaded", ""])
@pytest.mark.parametrize("form", KEPT)
def test_blocks_stay_where_they_are(toys, machine, monkeypatch, form: str, computes: bool) -> None:
    choices, changes = KEPT[form]
    net = toys.build_net()
    with machine(8, 8) as manager:
        managed = manage(net, manager=manager, **{"placement": "gpu:0", **choices})
        want = computed(net)
        before, locked = slabs_of(managed), pinned_used_bytes()
        assert len(before) >= 8
        for change in changes:
            change = {"prefetch_blocks": change["prefetch"]} if "prefetch" in change else change
            if computes:
                computed(net)
            with nothing_packed(monkeypatch):
                managed.reprofile(**change)
            assert slabs_of(managed) == before
            assert manager.ledger.used("pinned") == pinned_used_bytes() >= locked - (1 << 16)
            manager.ledger.check()
            assert torch.equal(computed(net), want)
        managed.release()
        assert torch.equal(computed(net) if form == "eight bits on the CPU" else on_device(net), want)
        net.to("cpu")


@pytest.fixture
def files(tmp_path: Path, toys) -> list[Path]:
    """All weights but one that is tied; buffers stay in memory."""
    path = tmp_path / "model.safetensors"
    names = {name for name, _ in toys.build_net().named_parameters()}
    save_file({name: weight for name, weight in toys.build_net().state_dict().items() if name in names}, path)
    return [path]


def test_blocks_stay_in_their_file(toys, machine, monkeypatch, files) -> None:
    net = toys.build_net()
    with machine(8, 8) as manager:
        managed = manage(net, manager=manager, placement="gpu:0:disk", files={"model": files})
        want = computed(net)
        assert torch.equal(want, on_device(toys.build_net()))
        stores = [group.at_rest.store for group in managed.members[0].managed.groups if group.name]
        for change in ({"profile": TIGHT}, {"placement": "gpu:1:disk"}, {"placement": "gpu:0&gpu:1:disk"}):
            with nothing_packed(monkeypatch):
                managed.reprofile(**change)
            assert stores == [group.at_rest.store for group in managed.members[0].managed.groups if group.name]
            assert torch.equal(computed(net), want)
            manager.ledger.check()
        net.singles[1].up.weight.data.mul_(2)  # from now on in RAM
        want = computed(net)
        managed.reprofile("auto", placement="gpu:0:disk")
        managed.reprofile(TIGHT, placement="gpu:0:disk")
        assert torch.equal(computed(net), want)
        managed.release()
        twin = toys.build_net()
        twin.singles[1].up.weight.data.mul_(2)
        assert torch.equal(net.singles[1].up.weight, twin.singles[1].up.weight)


def test_what_changes_is_packed_anew(toys, machine) -> None:
    net = toys.build_net()
    with machine(8, 8) as manager:
        managed = manage(net, manager=manager, placement="gpu:0")
        want = computed(net)
        for change in ({"placement": "gpu:0:host"}, {"precision": "fp8 scaled"}, {"placement": "gpu:0:pinned"}):
            before = slabs_of(managed)
            kept = [
                weakref.ref(group.at_rest.store)
                for group in managed.members[0].managed.groups
                if group.encoded or group.name
            ]
            managed.reprofile(**change)
            assert before.keys() == slabs_of(managed).keys() and not any(store() for store in kept)
            manager.ledger.check()
            assert pinned_used_bytes() == manager.ledger.used("pinned")
        assert not torch.equal(computed(net), want), "eight bits"


class Adapted(nn.Module):
    """A layer with factors beside it, as peft puts one in the place of ours: names change, objects do not."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.base_layer = layer
        self.down = nn.Linear(layer.in_features, 4, bias=False).requires_grad_(False)
        self.up = nn.Linear(4, layer.out_features, bias=False).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base_layer(x) + self.up(self.down(x))


@pytest.mark.parametrize("placement", ["gpu:0", "gpu:0:host", "gpu:0&gpu:1"])
@pytest.mark.parametrize("computes", [True, False], ids=["loaded", ""])
def test_blocks_with_added_layers_stay_where_they_are(toys, machine, monkeypatch, placement: str, computes) -> None:
    def adapt(net: nn.Module) -> None:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            for block in net.singles[1], net.doubles[0]:
                block.up = Adapted(block.up)

    net, twin = toys.build_net(), toys.build_net()
    adapt(twin)
    want = on_device(twin)
    with machine(8, 8) as manager:
        managed = manage(net, TIGHT, manager=manager, placement=placement)
        plain = computed(net)
        before = slabs_of(managed)
        adapt(net)
        for profile in ("auto", TIGHT):
            assert torch.equal(computed(net), want)
            added = [slab for slab in slabs_with_added(managed) if slab not in before.values()]
            assert len(added) == 2
            if not computes:
                managed.members[0].managed.unload()
            with nothing_packed(monkeypatch):
                managed.reprofile(profile)
            own = {bundle.name: bundle.own for bundle in bundles_of(managed) if bundle.name}
            assert {name: group.host_slab.data_ptr() for name, group in own.items()} == before
            assert set(added) <= set(slabs_with_added(managed))
            manager.ledger.check()
        assert torch.equal(computed(net), want)
        for block in net.singles[1], net.doubles[0]:
            block.up = block.up.base_layer
        assert torch.equal(computed(net), plain)
        with nothing_packed(monkeypatch):
            managed.reprofile("auto")
        assert slabs_of(managed) == before
        assert torch.equal(computed(net), plain)
        managed.release()
        assert all(map(torch.equal, net.parameters(), toys.build_net().parameters()))


def bundles_of(managed: Managed) -> list[Bundle]:
    return [bundle for member in managed.members for share in member.managed.shares for bundle in share.bundles]


def slabs_with_added(managed: Managed) -> list[int]:
    return [group.host_slab.data_ptr() for bundle in bundles_of(managed) if bundle.name for group in bundle.groups]


# --- Other code, which keeps and changes weights


def test_views_that_other_code_keeps_still_count_as_writes(toys, machine) -> None:
    net, twin = toys.build_net(), toys.build_net()
    with machine(8, 8) as manager, torch.no_grad():
        managed = manage(net, TIGHT, manager=manager, placement="gpu:0")
        views = [(part.singles[2].up.weight.data, part.doubles[0].up.weight) for part in (net, twin)]
        row = [part.singles[0].up.weight[3] for part in (net, twin)]
        for placement in ("gpu:1", "gpu:0&gpu:1", "gpu:0"):
            managed.reprofile(placement=placement)
            for (data, weight), part in zip(views, row, strict=True):
                data.add_(0.25)
                weight.mul_(1.5)
                part.zero_()
            assert torch.equal(computed(net), on_device(twin))
            twin.to("cpu")
            views[1] = twin.singles[2].up.weight.data, twin.doubles[0].up.weight
            row[1] = twin.singles[0].up.weight[3]
        views.clear()
        row.clear()
        del data, weight, part
        managed.release()
        assert all(map(torch.equal, net.parameters(), twin.parameters()))


def half(weight: torch.Tensor) -> torch.Tensor:
    return weight.detach().cpu() * 0.5


def change(name: str, net: nn.Module, number: int) -> None:
    """Do to a module what other code does, managed or not."""
    single, up = net.singles[number], net.doubles[number].up
    if name == "write":
        single.up.weight.mul_(1.25)
    elif name == "write data":
        single.up.weight.data.add_(0.5)
    elif name == "point data":
        single.up.weight.data = half(single.up.weight)
    elif name == "replace":
        up.weight = nn.Parameter(half(up.weight), requires_grad=False)
    elif name == "transpose":
        single.up.weight.data = half(single.up.weight).t().contiguous().t()
    elif name == "add layer" and not hasattr(single, "extra"):
        single.extra = nn.Linear(8, 8).requires_grad_(False)
    elif name == "take layer out" and hasattr(single, "extra"):
        del single.extra
    elif name == "load":
        single.load_state_dict({key: half(weight) for key, weight in single.state_dict().items()})


CHANGES = ["nothing", "write", "write data", "point data", "replace", "transpose", "load"]
CHANGES += ["add layer", "take layer out"]
CHOICES = [
    {"profile": TIGHT},
    {"profile": "auto"},
    {"placement": "gpu:0"},
    {"placement": "gpu:1"},
    {"placement": "gpu:0:host"},
    {"placement": "gpu:0&gpu:1"},
    {"placement": "cpu"},
    {},
]


@settings(max_examples=12)
@given(data=st.data())
def test_any_order_of_changes_and_profiles_computes_as_without_the_engine(toys, machine, data) -> None:
    net, twin = toys.build_net(), toys.build_net()
    with machine(8, 8) as manager, torch.no_grad():
        managed = manage(net, TIGHT, manager=manager, placement="gpu:0")
        for _ in range(data.draw(st.integers(1, 5), label="steps")):
            name, number = data.draw(st.sampled_from(CHANGES), label="change"), data.draw(st.integers(0, 2))
            for part in (net, twin):
                torch.manual_seed(number)
                change(name, part, number)
            if data.draw(st.booleans(), label="computes"):
                assert torch.equal(computed(net), on_device(twin))
                twin.to("cpu")
            managed.reprofile(**data.draw(st.sampled_from(CHOICES), label="choice"))
            manager.ledger.check()
            assert pinned_used_bytes() == manager.ledger.used("pinned")
        assert torch.equal(computed(net), on_device(twin))
        managed.release()
        twin.to("cpu")
        for (name, weight), other in zip(net.state_dict().items(), twin.state_dict().values(), strict=True):
            assert torch.equal(weight, other), name
        gc.collect()
        assert not pinned_used_bytes()


# --- All or nothing


@pytest.mark.parametrize("tier", ["", ":host"])
@pytest.mark.parametrize("stage", ["unpack", "prepare", "measure", "pack", "go on", "hook", "attach"])
def test_where_the_second_component_fails_both_are_as_they_were(toys, machine, monkeypatch, stage: str, tier) -> None:
    """To a plan that keeps the blocks, and to one that packs them anew."""
    nets = {"first": toys.build_net(), "second": toys.build_net(seed=1)}
    with machine(8, 8) as manager:
        managed = manage(nets, TIGHT, manager=manager, placement="gpu:0")
        want = {name: computed(net) for name, net in nets.items()}
        before, plans = slabs_of(managed), [member.managed.plan for member in managed.members]
        views = {
            name: net.singles[1].up.weight if tier else net.singles[1].up.weight.data for name, net in nets.items()
        }
        owner, name = {
            "unpack": (packing.Packing, "end"),
            "prepare": (managed_component, "build_shares"),
            "measure": (packing.Packing, "measure"),
            "pack": (packing.Packing, "pack"),
            "go on": (packing.Packing, "go_on"),
            "hook": (ManagedComponent, "hook"),
            "attach": (ManagedComponent, "attach"),
        }[stage]
        original, calls = getattr(owner, name), []

        def fail_second(self: object, *args: object, **options: object) -> object:
            calls.append(self)
            if len(calls) == 2:
                raise KeyboardInterrupt
            result = original(self, *args, **options)
            return result

        with monkeypatch.context() as patch:
            patch.setattr(owner, name, fail_second)
            with pytest.raises(KeyboardInterrupt):
                managed.reprofile("auto", placement=f"gpu:1{tier}")
        gc.collect()
        assert [member.managed.plan for member in managed.members] == plans
        if not tier:
            assert slabs_of(managed) == before
            assert manager.ledger.used("pinned") == pinned_used_bytes()
        manager.ledger.check()
        for part, net in nets.items():
            assert torch.equal(computed(net), want[part])
            with torch.no_grad():
                views[part].mul_(2.0)
        assert not any(torch.equal(computed(net), want[part]) for part, net in nets.items()), "views are the weights"
        views.clear()
        managed.release()
        for part, net in nets.items():
            twin = toys.build_net(seed=int(part == "second"))
            twin.singles[1].up.weight.data.mul_(2.0)
            assert all(map(torch.equal, net.parameters(), twin.parameters()))


def test_where_not_even_the_old_form_comes_back_the_weights_are_plain(toys, machine, monkeypatch) -> None:
    net = toys.build_net()
    with machine(8, 8) as manager:
        managed = manage(net, TIGHT, manager=manager, placement="gpu:0")
        computed(net)
        with monkeypatch.context() as patch:
            patch.setattr(packing.Packing, "pack", lambda *args: (_ for _ in ()).throw(KeyboardInterrupt))
            with pytest.raises(KeyboardInterrupt):
                managed.reprofile("auto")
        assert not manager.members and not manager.ledger.entries
        del managed
        gc.collect()
        assert not pinned_used_bytes()
        assert all(type(weight) is nn.Parameter for weight in net.parameters())
        assert all(map(torch.equal, net.parameters(), toys.build_net().parameters()))
        assert not any(module._forward_pre_hooks or module._forward_hooks for module in net.modules())
