"""Which card a device is, and what is chosen without a name: from what torch tells, recorded and simulated."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from highwater.memory import MemoryManager, manage
from highwater.memory.transfer import devices
from highwater.memory.transfer.device_facts import DeviceFacts, find_doubles, read_facts
from highwater.memory.units import GIB, MIB

NVIDIA = SimpleNamespace(
    name="NVIDIA GeForce RTX 4090",
    uuid="8f0b8e54-1c8e-6b7a-9d5e-6d0a3f6f1c11",
    total_memory=24 * GIB,
    is_integrated=0,
    pci_domain_id=0,
    pci_bus_id=0xC1,
    pci_device_id=0,
)
SPARK = SimpleNamespace(name="NVIDIA GB10", uuid="1-2", total_memory=119 * GIB, is_integrated=1)
ARC = SimpleNamespace(name="Intel(R) Arc(TM) Graphics", uuid="3-4", total_memory=28 * GIB, is_integrated_gpu=True)
# ROCm's words for a card without an identifier, "GPU-XX" and zeros, as torch shows bytes.
RADEON = SimpleNamespace(
    name="AMD Radeon Graphics", uuid="4750552d-5858-0000-0000-000000000000", total_memory=8 * GIB, is_integrated=0
)
BARE = SimpleNamespace(name="other", total_memory=GIB)


@pytest.mark.parametrize(
    ("properties", "wanted"),
    [
        (NVIDIA, DeviceFacts(name="", uuid=NVIDIA.uuid, pci_address="0000:c1:00", total_bytes=24 * GIB)),
        (SPARK, DeviceFacts(name="", uuid="1-2", total_bytes=119 * GIB, is_integrated=True)),
        (ARC, DeviceFacts(name="", uuid="3-4", total_bytes=28 * GIB, is_integrated=True)),
        (RADEON, DeviceFacts(name="", total_bytes=8 * GIB)),
        (BARE, DeviceFacts(name="", total_bytes=GIB)),
        (None, DeviceFacts(name="")),
    ],
)
def test_facts_are_read_by_the_names_of_every_backend(properties: object, wanted: DeviceFacts) -> None:
    assert read_facts("gpu:0", properties) == replace(wanted, name="gpu:0", model=getattr(properties, "name", ""))


def test_the_torch_that_is_installed_has_these_names() -> None:
    """Its declarations: a machine with neither backend has no object to ask."""
    declared = Path(torch.__file__).with_name("_C").joinpath("__init__.pyi").read_text(encoding="utf-8")
    for backend, names in {"Cuda": ("is_integrated", "uuid"), "Xpu": ("is_integrated_gpu", "uuid")}.items():
        body = declared.split(f"class _{backend}DeviceProperties:")[1].split("\nclass ")[0]
        assert all(f"    {name}: " in body for name in (*names, "total_memory", "name"))


facts = st.builds(
    DeviceFacts,
    name=st.just(""),
    uuid=st.sampled_from(["", "a", "b"]),
    pci_address=st.sampled_from(["", "0000:01:00", "0000:02:00"]),
    total_bytes=st.sampled_from([GIB, 2 * GIB]),
)


@given(st.lists(facts, max_size=6))
def test_a_double_is_a_card_that_stands_before_it_and_no_two_others_are_one(found: list[DeviceFacts]) -> None:
    named = {f"gpu:{number}": replace(each, name=f"gpu:{number}") for number, each in enumerate(found)}
    doubles = find_doubles(named.values())
    order = [*named]
    for name, first in doubles.items():
        assert order.index(first) < order.index(name) and first not in doubles
        assert named[name].is_card_of(named[first])
    kept = [device for name, device in named.items() if name not in doubles]
    assert not any(one.is_card_of(other) for one in kept for other in kept if one is not other)
    for one in found:
        for other in found:
            assert one.is_card_of(other) == other.is_card_of(one)
            knows = {(one.uuid, other.uuid), (one.pci_address, other.pci_address)}
            assert any(all(pair) for pair in knows) or not one.is_card_of(other), "unknown is not equal"


def tell(sim, monkeypatch: pytest.MonkeyPatch, *told: dict[str, object]) -> None:
    """Have each simulated device's properties say this, too."""
    find = torch.sim.get_device_properties

    def properties(device: object) -> SimpleNamespace:
        index = torch.device(device).index
        return SimpleNamespace(**{**vars(find(device)), **told[index]})

    monkeypatch.setattr(torch.sim, "get_device_properties", properties)


def test_a_card_that_torch_sees_twice_is_one(sim, monkeypatch: pytest.MonkeyPatch) -> None:
    with sim.cluster([sim.SimDeviceSpec(total_bytes=MIB)] * 3):
        assert [device.name for device in devices.list_devices()] == ["cpu", "gpu:0", "gpu:1", "gpu:2"]
        tell(sim, monkeypatch, {"uuid": "one"}, {"uuid": "one"}, {"uuid": "two"})
        assert [device.name for device in devices.list_devices()] == ["cpu", "gpu:0", "gpu:2"]
        assert devices.find_device("gpu:2").torch_device == torch.device("sim:2")
        assert [*MemoryManager().devices] == ["cpu", "gpu:0", "gpu:2"]


def test_two_cards_without_an_identifier_are_two(sim, monkeypatch: pytest.MonkeyPatch) -> None:
    with sim.cluster([sim.SimDeviceSpec(total_bytes=MIB)] * 2):
        tell(sim, monkeypatch, {"uuid": RADEON.uuid}, {"uuid": RADEON.uuid})
        found = devices.list_devices()
        assert [device.name for device in found] == ["cpu", "gpu:0", "gpu:1"]
        assert [device.card() for device in found] == [None] * 3


@torch.no_grad()
def test_an_integrated_gpu_computes_only_where_it_is_named(sim, toys, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has the most memory, which is the RAM."""
    net = toys.build_net()
    x = torch.randn(2, 5, 64, device="cpu")
    expected = net(x)
    with sim.cluster([sim.SimDeviceSpec(total_bytes=16 * MIB), sim.SimDeviceSpec(total_bytes=4 * MIB)]):
        tell(sim, monkeypatch, {"is_integrated": 1}, {"is_integrated": 0})
        for placement, wanted in {"auto": "gpu:1", "gpu:0": "gpu:0", "gpu:0&gpu:1": "gpu:0"}.items():
            manager = MemoryManager()
            manager.set_watermark("*", 0, 0)
            with manage(net, "unlimited", placement=placement, manager=manager) as managed:
                assert torch.equal(net(x).cpu(), expected)
                assert managed.plan.components[0].shares[0].device == wanted
                says = "auto: gpu:0 is integrated: used only where a placement names it"
                assert (says in managed.plan.text()) == (placement == "auto")
            manager.release_all()


@torch.no_grad()
def test_the_only_gpu_is_used_though_it_is_integrated(sim, toys, monkeypatch: pytest.MonkeyPatch) -> None:
    """As an APU's or a GB10's: the host of the program computes there, too."""
    with sim.cluster([sim.SimDeviceSpec(total_bytes=16 * MIB)]):
        tell(sim, monkeypatch, {"is_integrated": 1})
        manager = MemoryManager()
        with manage(toys.build_net(), "unlimited", manager=manager) as managed:
            assert managed.plan.components[0].shares[0].device == "gpu:0"
        manager.release_all()
