"""What each engine computes: ``dynamic`` beside core's dynamic VRAM, ``blocks`` beside a host without it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial

import torch

from highwater.tests.comfyui.graphs import CASES, CORE, Graph, Loaders, sample_flux
from highwater.tests.comfyui.host_process import HostProcess

from .hosts import MIB, Part, Rig, Tensors, difference, kept_by, leave

__all__ = ["measure_features"]


class Refused(Exception):
    """What was asked for cannot be done, and the node said why."""


def run_graph(host: HostProcess, graph: Graph) -> Tensors:
    result = host.run(graph.nodes)
    if result.outcome != "success":
        raise Refused(result.error.splitlines()[0].rpartition("InvalidInput ")[2])
    return kept_by(graph, result)


def run_case(name: str, host: HostProcess, loaders: Loaders) -> Tensors:
    graph = Graph()
    CASES[name](graph, loaders)
    return run_graph(host, graph)


def with_node(node: str, settings: dict[str, str | int], host: HostProcess, loaders: Loaders) -> Tensors:
    graph = Graph()
    model = graph.add(node, model=loaders.diffusion_model(graph), **settings)
    graph.keep(sample_flux(graph, model, cfg=3.0))
    return run_graph(host, graph)


def after_trouble(kind: str, host: HostProcess, loaders: Loaders) -> Tensors:
    """Return what the next prompt computes after trouble in the middle of a block of the second step."""
    graph = Graph()
    model = loaders.diffusion_model(graph)
    graph.add("TestHold", value=model)
    module = "diffusion_model.single_blocks.1.linear2"
    graph.keep(sample_flux(graph, graph.add("TestTrouble", model=model, kind=kind, module=module, call=2)))
    outcome = host.run(graph.nodes).outcome
    assert outcome == ("interrupted" if kind == "interrupt" else "error"), outcome
    return run_case("plain", host, loaders)


def after_free(host: HostProcess, loaders: Loaders) -> Tensors:
    """Return what the next prompt computes after /free, which leaves no byte of a model on the device."""
    leave(host, -1)
    run_case("lora_at_1", host, loaders)
    host.forget()
    used = [device["used_bytes"] for device in host.ask_devices("read")["devices"]]
    assert used == [0, 0], used
    return run_case("plain", host, loaders)


def asking(host: HostProcess, loaders: Loaders, **asked: str) -> Tensors:
    return run_case("plain", host, loaders if loaders.kind == "core" else replace(loaders, **asked))


Feature = Callable[[HostProcess, Loaders], Tensors]
FEATURES: dict[str, Feature] = {
    "plain": partial(run_case, "plain"),
    "guided": partial(run_case, "guided"),
    "prompts of two lengths": partial(run_case, "two_prompts"),
    "LoRA": partial(run_case, "lora_at_1"),
    "two LoRAs": partial(run_case, "two_loras"),
    "clones with LoRAs of their own": partial(run_case, "clones_with_different_patches"),
    "LoRA for one prompt (hook)": partial(run_case, "weight_hook"),
    "ControlNet": partial(run_case, "controlnet"),
    "merge": partial(run_case, "merge"),
    "merge (Wan)": partial(run_case, "merge_wan"),
    "quantized file, also with a LoRA": partial(run_case, "quantized"),
    "checkpoint": partial(run_case, "checkpoint"),
    "LoRA on a text encoder": partial(run_case, "lora_on_text"),
    "VAE": partial(run_case, "autoencoder"),
    "CLIP vision": partial(run_case, "vision"),
    "Select Device": partial(with_node, "SelectModelDevice", {"device": "gpu:1"}),
    "MultiGPU clones": partial(with_node, "MultiGPU_WorkUnits", {"max_gpus": 2}),
    "after an interrupt": partial(after_trouble, "interrupt"),
    "after out of memory": partial(after_trouble, "out of memory"),
    "after an error in a block": partial(after_trouble, "error"),
    "after /free": after_free,
    "placement gpu:1": partial(asking, placement="gpu:1"),
}
# What core's dynamic VRAM cannot do: engine dynamic refuses it, engine auto takes blocks.
ONLY_BLOCKS: dict[str, Feature] = {
    "placement gpu:0&gpu:1": partial(asking, placement="gpu:0&gpu:1"),
    "precision fp8 scaled": partial(asking, precision="fp8 scaled"),
    "profile 4MiB,prefetch=2": partial(asking, profile="4MiB,prefetch=2"),
}
OF_CHECKPOINT = "diffusion=30MiB,text=120MiB,control=20MiB"
# In MiB the tiny Flux has 7.8, CLIP-L 236, the shallow SD 49, its ControlNet 29, the autoencoder 160, CLIP vision 580.
BLOCK_BUDGETS = {
    "ControlNet": OF_CHECKPOINT,
    "checkpoint": OF_CHECKPOINT,
    "LoRA on a text encoder": OF_CHECKPOINT,
    "VAE": "vae=100MiB",
    "CLIP vision": "vision=300MiB",
}
# Less than comfy-aimdo keeps free: no page of core's models gets memory, which is what a budget below a page means.
FULL_DEVICE_BYTES = 240 * MIB


@dataclass(frozen=True, kw_only=True, slots=True)
class Reference:
    """A host without the pack."""

    dynamic: bool
    free_bytes: int = -1


RESIDENT, STREAMED = Reference(dynamic=True), Reference(dynamic=True, free_bytes=FULL_DEVICE_BYTES)
STATIC = Reference(dynamic=False)


@dataclass(frozen=True, kw_only=True, slots=True)
class Column:
    """An engine as a user asks for it, and the hosts of which one computes the same."""

    loaders: Loaders
    references: tuple[Reference, ...]
    budgets: Mapping[str, str] = field(default_factory=dict)

    def loaders_for(self, feature: str) -> Loaders:
        return replace(self.loaders, profile=self.budgets.get(feature, self.loaders.profile))


DYNAMIC, BLOCKS = Loaders(engine="dynamic"), Loaders(engine="blocks")
COLUMNS = {
    "dynamic": Column(loaders=DYNAMIC, references=(RESIDENT,)),
    "dynamic, Manage, 20MiB": Column(
        loaders=replace(DYNAMIC, kind="managed", profile="20MiB"), references=(STREAMED, RESIDENT)
    ),
    "blocks": Column(loaders=BLOCKS, references=(STATIC,)),
    "blocks, Manage, streamed": Column(
        loaders=replace(BLOCKS, kind="managed", profile="4MiB"), references=(STATIC,), budgets=BLOCK_BUDGETS
    ),
}
NO_MANAGE_NODE = "no Manage node for it"


def compute(name: str, host: HostProcess, loaders: Loaders) -> Tensors | str:
    """Return the tensors of a feature, or why there are none."""
    try:
        return {**FEATURES, **ONLY_BLOCKS}[name](host, loaders)
    except Refused as refused:
        said = str(refused).removeprefix("engine dynamic of tiny_flux: ")
        return f"refused: {said.removesuffix('; allowed: engine auto or blocks')}"


def compare(name: str, actual: Tensors | str, expected: Tensors | str) -> str:
    """Return what a cell says."""
    if isinstance(actual, str) or isinstance(expected, str):
        return actual if isinstance(actual, str) else f"core alone {expected}"
    if "fp8" not in name:
        return difference(actual, expected)
    similarity = min(
        torch.nn.functional.cosine_similarity(actual[key].flatten().double(), tensor.flatten().double(), dim=0).item()
        for key, tensor in expected.items()
    )
    return f"close: cosine {similarity:.4f}; 8 bits instead of 16" if similarity > 0.99 else f"DIFFERS: {similarity}"


def is_right(name: str, column: Column, cell: str) -> bool:
    """Whether a cell says what it should: equal, or for what only blocks can do, why engine dynamic refuses."""
    is_dynamic, is_managed = column.loaders.engine == "dynamic", column.loaders.kind == "managed"
    if is_dynamic and (name in ONLY_BLOCKS or (name == "placement gpu:1" and is_managed)):
        return cell.startswith("refused: ")
    return cell == "equal" or (name in ONLY_BLOCKS and cell.startswith("close: "))


def measure_features(rig: Rig) -> Part:
    """Compute each feature with core and with each engine; about three minutes."""
    names = [*FEATURES, *ONLY_BLOCKS]
    expected: dict[Reference, dict[str, Tensors | str]] = {}
    for is_dynamic in (True, False):
        with rig.start(with_pack=False, dynamic=is_dynamic) as host:
            for reference in (RESIDENT, STREAMED) if is_dynamic else (STATIC,):
                host.forget()
                expected[reference] = {}
                for name in names:
                    leave(host, reference.free_bytes)
                    expected[reference][name] = compute(name, host, CORE)
    rows, held = [], []
    with rig.start(with_pack=True) as host:
        for name in names:
            row = {"feature": name}
            for title, column in COLUMNS.items():
                if name == "CLIP vision" and column.loaders.kind == "managed":
                    row[title] = NO_MANAGE_NODE
                    continue
                actual = compute(name, host, column.loaders_for(name))
                cells = [compare(name, actual, expected[reference][name]) for reference in column.references]
                row[title] = "equal" if "equal" in cells else cells[0]
                held.append(is_right(name, column, row[title]))
            rows.append(row)
        host.ask_devices("read")
        held.append(host.races == [])
    sentence = (
        "What each engine computes on a host with dynamic VRAM, bit for bit beside core without the pack: `dynamic` "
        "beside core's dynamic VRAM, at a budget of less than a page beside core's on a full or an empty device (core "
        "rounds a weight that a LoRA changes where it keeps it, not where it streams it); `blocks` beside a host with "
        "`--disable-dynamic-vram`."
    )
    return Part(sentence=sentence, rows=rows, num_held=sum(held), num_checks=len(held))
