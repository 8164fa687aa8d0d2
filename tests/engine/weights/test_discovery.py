"""Modules are found wherever users keep them: pipelines, lists and dicts in the attributes of their own objects."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from highwater.memory import InvalidInput, discover_components, manage


class Pipeline:
    """As diffusers' are."""

    def __init__(self, **components: Any) -> None:
        self.components = components


class Slots:
    __slots__ = ("__hidden", "empty", "vae")

    def __init__(self, vae: nn.Module, hidden: nn.Module) -> None:
        self.vae = vae
        self.__hidden = hidden


class OfTheClass:
    vae = nn.Identity()

    @property
    def never_asked(self) -> nn.Module:
        raise AssertionError


class Wrapper(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)


one, two, three = (nn.Linear(2, 2) for _ in range(3))
wrapper = Wrapper(one)

TARGETS = {
    "a module": (one, {"model": one}),
    "a dict": ({"unet": one, "steps": 4}, {"unet": one}),
    "a list": ([one, two], {"model.0": one, "model.1": two}),
    "a pipeline": (Pipeline(transformer=one, scheduler=4), {"transformer": one}),
    "attributes": (SimpleNamespace(vae=one, strength=0.5), {"vae": one}),
    "a pipeline in an attribute": (SimpleNamespace(pipe=Pipeline(unet=one, vae=two)), {"unet": one, "vae": two}),
    "a pipeline in a dict": ({"pipe": Pipeline(unet=one)}, {"unet": one}),
    "two pipelines": (
        SimpleNamespace(pipe=Pipeline(unet=one, vae=two), refiner=Pipeline(unet=three, vae=two)),
        {"unet": one, "vae": two, "refiner.unet": three},
    ),
    "a pipeline whose name is taken": (
        SimpleNamespace(pipe=Pipeline(vae=one), vae=two),
        {"vae": two, "pipe.vae": one},
    ),
    "lists and dicts": (
        SimpleNamespace(nets=[one, None], more={"a": two, "b": (three,)}),
        {"nets.0": one, "more.a": two, "more.b.0": three},
    ),
    "a dict of pipelines": (SimpleNamespace(pipes={"base": Pipeline(unet=one)}), {"unet": one}),
    "a pipeline in a pipeline": (Pipeline(prior=Pipeline(unet=one), unet=two), {"unet": two, "prior.unet": one}),
    "a list in a pipeline": (
        SimpleNamespace(pipe=Pipeline(nets=[one, two], vae=three)),
        {"nets.0": one, "nets.1": two, "vae": three},
    ),
    "slots": (Slots(one, two), {"_Slots__hidden": two, "vae": one}),
    "the class": (OfTheClass(), {"vae": OfTheClass.vae}),
    "one under two names": (SimpleNamespace(model=one, same=one, nets=[one]), {"model": one}),
    "one inside another": (SimpleNamespace(model=one, wrapper=wrapper), {"wrapper": wrapper}),
    "components that are no parts": (SimpleNamespace(components={"button": 1}, vae=one), {"vae": one}),
}


@pytest.mark.parametrize("kind", TARGETS)
def test_modules_are_found_by_name(kind: str) -> None:
    target, wanted = TARGETS[kind]
    found = discover_components(target)
    assert list(found) == list(wanted)
    assert all(found[name] is module for name, module in wanted.items())


def test_what_holds_itself_comes_to_an_end() -> None:
    nets: list[Any] = [one]
    nets.append(nets)
    assert discover_components(SimpleNamespace(nets=nets)) == {"nets.0": one}
    pipe = Pipeline(vae=one)
    pipe.components["self"] = pipe
    assert discover_components(SimpleNamespace(pipe=pipe, pipeline=pipe)) == {"vae": one}


@pytest.mark.parametrize("target", [7, "a model", None, Pipeline(), SimpleNamespace(nets=[], pipe=Pipeline()), Wrapper])
def test_nothing_to_manage_says_what_is_allowed(target: Any) -> None:
    said = f"nothing to manage: the {type(target).__name__} holds no torch module; allowed: a module, a dict or a list"
    with pytest.raises(InvalidInput, match=re.escape(said)):
        discover_components(target)


@pytest.mark.parametrize("name", ["", "  "])
def test_a_component_needs_a_name(name: str) -> None:
    with pytest.raises(InvalidInput, match=rf"^a module of the dict is called '{name}'; give it a name"):
        discover_components({"vae": nn.Linear(2, 2), name: nn.Linear(2, 2)})


def test_two_modules_of_one_name_are_refused() -> None:
    with pytest.raises(InvalidInput, match=r"two modules of the dict are called 'nets\.0'"):
        discover_components({"nets.0": one, "nets": [two]})


@torch.no_grad()
def test_each_name_that_is_found_can_be_placed(toys, machine) -> None:
    app = SimpleNamespace(pipe=Pipeline(vae=toys.build_net()), nets=[toys.build_net(1)], vae=toys.build_net(2))
    x = torch.randn(1, 3, 64)
    with machine(8, 8) as manager:
        want = [toys.build_net(seed).to("sim:0")(x.to("sim:0")).cpu() for seed in range(3)]
        placement = "vae=gpu:0,nets.0=gpu:1,pipe.vae=gpu:1"
        with manage(app, placement=placement, budgets={"pipe.vae": "0.45MiB"}, manager=manager) as managed:
            assert managed.components == ("nets.0", "vae", "pipe.vae")
            shares = {part.component: part.shares[0] for part in managed.plan.components}
            assert [shares[name].device for name in managed.components] == ["gpu:1", "gpu:0", "gpu:1"]
            assert shares["pipe.vae"].streamed and not shares["vae"].streamed
            for net, wanted in zip((app.pipe.components["vae"], app.nets[0], app.vae), want, strict=True):
                assert torch.equal(net(x).cpu(), wanted)


@torch.no_grad()
def test_a_pipeline_in_a_dict_knows_where_it_computes(toys, machine) -> None:
    """As a pipeline by itself does; a dict of modules is not asked."""
    net = toys.build_net()
    with machine(8) as manager:
        with manage({"pipe": Pipeline(unet=net)}, manager=manager):
            assert str(net._hf_hook.execution_device) == "sim:0"
        with manage({"unet": net}, manager=manager):
            assert not hasattr(net, "_hf_hook")
