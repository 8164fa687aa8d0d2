"""One file loaded by two nodes: its weights are in RAM once, and a change of one model leaves the other as it is."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from highwater.tests.comfyui.graphs import CASES, CORE, Graph, Loaders, lora, sample_flux
from highwater.tests.comfyui.host_process import HostProcess

FILE, OTHER = "tiny_flux.safetensors", "other_flux.safetensors"
# Other settings make other nodes of them for ComfyUI's cache; these change nothing of the weights.
FIRST, SECOND = Loaders(), Loaders(profile="1GiB")


@pytest.fixture
def host(gpu_host: HostProcess) -> Iterator[HostProcess]:
    gpu_host.forget()
    yield gpu_host
    gpu_host.forget()


def sample_all(host: HostProcess, *models: tuple[Loaders, float], seeds: tuple[int, ...] = (1,)) -> list[torch.Tensor]:
    """Sample in one prompt with a model of each loader, with a LoRA where a strength is given."""
    graph = Graph()
    links, names = [], []
    for loaders, strength in models:
        link = loaders.diffusion_model(graph, FILE)
        links.append(lora(graph, link, strength) if strength else link)
    for seed in seeds:
        for number, link in enumerate(links):
            names.append(f"kept-{seed}-{number}")
            graph.keep(sample_flux(graph, link, seed=seed), names[-1])
    result = host.run(graph.nodes)
    return [result.kept(name)["value.samples"] for name in names]


def ram(host: HostProcess) -> int:
    """Return the bytes of RAM that the report has for all components."""
    parts = host.part("components")
    return sum(num_bytes for part in parts for tier, num_bytes in part["tiers"].items() if tier in ("pinned", "host"))


def page_locked(host: HostProcess) -> int:
    return int(host.ask_devices("read")["pinned"]["used_bytes"])


def shared(host: HostProcess) -> list[dict[str, Any]]:
    return [part for part in host.part("components") if part["id"].startswith("shared/")]


def test_two_loaders_of_a_file_have_its_blocks_once(host: HostProcess) -> None:
    (expected,) = sample_all(host, (CORE, 0))
    host.forget()
    locked = page_locked(host)
    sample_all(host, (FIRST, 0))
    one, one_locked = ram(host), page_locked(host) - locked
    host.forget()
    pictures = sample_all(host, (FIRST, 0), (SECOND, 0))
    assert all(torch.equal(picture, expected) for picture in pictures)
    (part,) = shared(host)
    assert "have tiny_flux.safetensors once in RAM" in part["plan"]["reasons"][0]
    assert ram(host) < 1.2 * one  # the weights outside of blocks are there twice
    assert page_locked(host) - locked < 1.2 * one_locked
    assert page_locked(host) - locked == sum(part["tiers"].get("pinned", 0) for part in host.part("components"))


def test_a_lora_on_one_leaves_the_other_as_it_is(host: HostProcess) -> None:
    plain, patched = sample_all(host, (CORE, 0), (CORE, 1.0))
    host.forget()
    locked = page_locked(host)
    sample_all(host, (FIRST, 0), (SECOND, 0))
    assert shared(host)
    expected = {0: plain, 1.0: patched}
    for strengths in [(0, 1.0), (0, 0), (1.0, 0), (0, 1.0), (1.0, 1.0)]:
        actual = sample_all(host, *zip((FIRST, SECOND), strengths, strict=True))
        for picture, strength in zip(actual, strengths, strict=True):
            assert torch.equal(picture, expected[strength]), strengths
        in_books = sum(part["tiers"].get("pinned", 0) for part in host.part("components"))
        assert page_locked(host) - locked == in_books


def test_a_weight_hook_on_one_leaves_the_other_as_it_is(host: HostProcess, reference: Callable) -> None:
    """Core writes the hook's LoRA into the weights between two calls."""
    (plain,) = sample_all(host, (CORE, 0))
    hooked = reference(host, "weight_hook")["kept value.samples"]
    host.forget()
    for _ in range(2):
        graph = Graph()
        other = SECOND.diffusion_model(graph, FILE)
        graph.keep(sample_flux(graph, other), "kept-before")
        CASES["weight_hook"](graph, FIRST)
        graph.keep(sample_flux(graph, other, seed=1, steps=2), "kept-after")
        result = host.run(graph.nodes)
        assert torch.equal(result.kept()["value.samples"], hooked)
        for name in ("kept-before", "kept-after"):
            assert torch.equal(result.kept(name)["value.samples"], plain)


def test_one_that_leaves_leaves_the_other_working(host: HostProcess) -> None:
    (plain,) = sample_all(host, (CORE, 0))
    host.forget()
    sample_all(host, (FIRST, 0), (SECOND, 0))
    (again,) = sample_all(host, (SECOND, 0))  # the default cache drops the first
    assert torch.equal(again, plain)
    assert len([part for part in host.part("components") if part["engine"] == "blocks"]) == 1
    host.forget()
    assert not host.part("components")


def test_after_both_left_the_file_is_not_read(host: HostProcess) -> None:
    (plain,) = sample_all(host, (CORE, 0))
    host.forget()
    sample_all(host, (FIRST, 0), (SECOND, 0))
    graph = Graph()
    graph.keep(sample_flux(graph, Loaders().diffusion_model(graph, OTHER)))
    assert host.run(graph.nodes).outcome == "success"
    begin_s = host.last_event_s()
    (again,) = sample_all(host, (FIRST, 0))
    assert torch.equal(again, plain)
    assert [event["kind"] for event in host.events_after(begin_s)].count("reuse") == 1
