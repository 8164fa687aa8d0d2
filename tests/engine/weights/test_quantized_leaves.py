"""Quantized weights travel as their leaves: the same bytes, whatever the wrapper says of itself."""

from __future__ import annotations

import re

import pytest
import torch
from optimum import quanto

from highwater.memory import manage
from highwater.memory.weights.module_component import component_from_module
from highwater.memory.weights.quantized_leaves import Wrapper, leaves_of

QTYPES = {"qint8": quanto.qint8, "qfloat8": quanto.qfloat8_e4m3fn, "qint4": quanto.qint4, "qint2": quanto.qint2}
# Budgets as parts of the component's bytes.
PLACES = {
    "resident": ("auto", "gpu:0"),
    "streamed": ("{0.55}", "gpu:0"),
    "split and streamed": ("gpu:0={0.45},gpu:1={0.3}", "gpu:0&gpu:1"),
    "cpu": ("auto", "cpu"),
}


def quantized_net(toys, qtype: str):
    net = toys.build_net()
    blocks = torch.nn.ModuleList([*net.doubles, *net.singles])
    quanto.quantize(blocks, weights=QTYPES[qtype])
    quanto.freeze(blocks)
    return net.requires_grad_(False)


@pytest.mark.parametrize("qtype", QTYPES)
def test_a_weight_is_what_its_leaves_make(toys, qtype: str) -> None:
    weight = quantized_net(toys, qtype).doubles[0].up.weight
    wrapper = Wrapper.of(weight)
    assert wrapper is not None
    again = wrapper.assemble(iter([leaf.clone() for leaf in leaves_of(weight)]))
    assert type(again) is type(weight)
    assert torch.equal(again.dequantize(), weight.dequantize())


@pytest.mark.parametrize("qtype", QTYPES)
def test_the_books_count_leaf_bytes(toys, qtype: str) -> None:
    net = quantized_net(toys, qtype)
    component = component_from_module(net, name="net")
    weights = {id(parameter): parameter for parameter in net.parameters()}.values()
    assert component.weight_bytes == sum(leaf.nbytes for weight in weights for leaf in leaves_of(weight))
    assert component.weight_bytes < component_from_module(toys.build_net(), name="net").weight_bytes / 2


@pytest.mark.slow(one_in=4)
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("qtype", QTYPES)
@pytest.mark.parametrize("place", PLACES)
def test_equal_to_unmanaged(toys, machine, sim, place: str, qtype: str, mode) -> None:
    if (place, mode) == ("cpu", torch.inference_mode) and qtype in ("qint4", "qint2"):
        pytest.skip("quanto's own: such a weight made outside of inference mode does not compute inside it")
    profile, placement = PLACES[place]
    x = torch.randn(2, 5, 64)
    net = quantized_net(toys, qtype)
    weight_bytes = component_from_module(net, name="net").weight_bytes / toys.MIB
    profile = re.sub(r"{([\d.]+)}", lambda part: f"{float(part[1]) * weight_bytes:.3f}MiB", profile)
    with machine(8, 8) as manager, mode():
        resident = quantized_net(toys, qtype).to("cpu" if place == "cpu" else "sim:0")
        want = resident(x.to("cpu" if place == "cpu" else "sim:0")).cpu()
        del resident
        with manage(net, profile=profile, placement=placement, manager=manager) as managed:
            for _ in range(3):
                assert torch.equal(net(x).cpu(), want)
            for index in range(2):
                assert manager.ledger.used(f"gpu:{index}") == sim.stats(index).used_bytes
            share = managed.report()["components"][0]["plan"]["shares"][0]
            assert (share["streamed_blocks"] == 0) == (place in ("resident", "cpu"))
    again = quantized_net(toys, qtype)
    with torch.no_grad():
        assert torch.equal(net(x), again(x))
    given_back = net.doubles[0].up.weight
    assert type(given_back) is type(again.doubles[0].up.weight)
    assert not given_back.is_inference()
