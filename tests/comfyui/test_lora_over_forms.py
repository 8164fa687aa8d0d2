"""LoRAs over weights that rest encoded: what they add is not rounded away, in any mode, and a change moves little."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence

import pytest
import torch

from highwater.tests.comfyui.graphs import CORE, Graph, Link, Loaders, lora, sample_flux
from highwater.tests.comfyui.host_process import HostProcess
from highwater.tests.comfyui.test_equal import computes_at_once
from highwater.tests.comfyui.test_lora import sample as sample_sd

pytestmark = pytest.mark.slow(one_in=3)

FORMS = ["fp8 scaled", "int8", "qint4"]
MODES = {"resident": "auto", "streamed": "2.6MiB"}
SPLIT = "gpu:0&gpu:1"
PLAIN, FUSED, FEW, SECOND = "tiny_flux_lora", "flux_fused", "flux_few", "other_flux_lora"
# What is merged by core, and rounded to the form again.
MERGED = ["flux_dora", "flux_loha", "flux_lokr", "flux_oft", "flux_diff"]
Adapters = Sequence[tuple[str, float]]


def managed(graph: Graph, loaders: Loaders) -> Link:
    """A model whose weights our engine encodes; *Load Diffusion Model* gives int8 to ComfyUI's own tensors."""
    if loaders is CORE:
        return loaders.diffusion_model(graph)
    model = graph.add("UNETLoader", unet_name="tiny_flux.safetensors", weight_dtype="default")
    return graph.add("HighwaterManageModel", model=model, **loaders.request)


def sample(host: HostProcess, loaders: Loaders, adapters: Adapters = (), node: str = "") -> torch.Tensor:
    graph = Graph()
    model = managed(graph, loaders)
    graph.add("TestHold", value=model)
    for name, strength in adapters:
        if node:
            model = graph.add(node, model=model, lora_name=f"{name}.safetensors", strength_model=strength)
        else:
            model = lora(graph, model, strength, f"{name}.safetensors")
    graph.keep(sample_flux(graph, model))
    result = host.run(graph.nodes)
    assert result.outcome == "success", result.brief_error
    (latent,) = result.kept().values()
    return latent


@pytest.fixture(scope="module", autouse=True)
def leaves_nothing(gpu_host: HostProcess) -> Iterator[None]:
    """The next file's tests find no model of these."""
    yield
    gpu_host.forget()


@pytest.fixture(scope="module")
def of_core() -> Callable[[HostProcess, Adapters], torch.Tensor]:
    return functools.cache(lambda host, adapters: sample(host, CORE, adapters))


def likeness(one: torch.Tensor, other: torch.Tensor) -> float:
    return float(torch.cosine_similarity(one.double().flatten(), other.double().flatten(), dim=0))


def assert_acts_as_in_core(host: HostProcess, form: str, adapters: Adapters, of_core: Callable, least: float) -> None:
    """The effect is core's, and that of each mode the same to the bit; without adapters all is as before."""
    effect = of_core(host, adapters) - of_core(host, ())
    found = {}
    for mode, profile in MODES.items():
        host.forget()
        loaders = Loaders(precision=form, profile=profile)
        plain = sample(host, loaders)
        found[mode] = sample(host, loaders, adapters)
        assert likeness(found[mode] - plain, effect) > least, mode
        assert torch.equal(sample(host, loaders), plain)
    host.forget()
    found["split"] = sample(host, Loaders(precision=form, placement=SPLIT), adapters)
    assert all(torch.equal(latent, found["resident"]) for latent in found.values())


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    "adapters",
    [((PLAIN, 1.0),), ((FUSED, 1.0),), ((PLAIN, 1.0), (SECOND, -0.7), (FUSED, 0.5))],
    ids=["plain", "rows of a matrix", "three"],
)
def test_a_lora_acts_as_in_core(gpu_host: HostProcess, form: str, adapters: Adapters, of_core: Callable) -> None:
    assert_acts_as_in_core(gpu_host, form, adapters, of_core, 0.9)


@pytest.mark.parametrize("form", FORMS)
def test_a_weak_lora_is_not_rounded_away(gpu_host: HostProcess, form: str, of_core: Callable) -> None:
    """Each element changes by less than half a step: merged and rounded again, most would stay what they were."""
    assert_acts_as_in_core(gpu_host, form, ((PLAIN, 0.1),), of_core, 0.5)


@pytest.mark.parametrize("name", MERGED)
@pytest.mark.parametrize("form", FORMS)
def test_what_is_no_low_rank_sum_is_merged(gpu_host: HostProcess, form: str, name: str, of_core: Callable) -> None:
    assert_acts_as_in_core(gpu_host, form, ((name, 20.0 if "loha" in name else 1.0),), of_core, 0.7)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("form", ["as stored", "fp8 scaled", "qint4"])
def test_a_change_of_strength_is_written_in_place(gpu_host: HostProcess, form: str, mode: str) -> None:
    """What is on the device stays there, and nothing comes anew."""
    host, loaders = gpu_host, Loaders(precision=form, profile=MODES[mode] if form != "as stored" else "auto")
    wanted = []
    for strength in (1.0, 0.4):
        host.forget()
        wanted.append(sample(host, loaders, ((FEW, strength),)))
    assert not torch.equal(*wanted)
    host.forget()
    assert torch.equal(sample(host, loaders, ((FEW, 1.0),)), wanted[0])
    moment, (before,) = host.last_event_s(), host.part("components")
    assert torch.equal(sample(host, loaders, ((FEW, 0.4),)), wanted[1])
    (after,) = host.part("components")
    assert not [event for event in host.events_after(moment) if event["kind"] in {"evict", "load"}]
    if not after["plan"]["shares"][0]["streamed_blocks"]:
        assert after["bytes_moved"] == before["bytes_moved"]


@pytest.mark.parametrize("form", FORMS)
def test_cores_own_adapters_beside_the_weights_work(gpu_host: HostProcess, form: str, of_core: Callable) -> None:
    adapters = ((PLAIN, 1.0),)
    effect = of_core(gpu_host, adapters) - of_core(gpu_host, ())
    found = []
    for profile in MODES.values():
        gpu_host.forget()
        loaders = Loaders(precision=form, profile=profile)
        plain = sample(gpu_host, loaders)
        found.append(sample(gpu_host, loaders, adapters, "LoraLoaderBypassModelOnly"))
        assert likeness(found[-1] - plain, effect) > 0.9
    assert torch.equal(*found)


@pytest.mark.parametrize("form", ["fp8 scaled", "int8", "qint4"])
@pytest.mark.parametrize("case", ["clones_with_different_patches", "weight_hook", "merge", "lora_on_text"])
def test_what_comfyui_does_with_patches_is_alike_wherever_weights_rest(
    gpu_host: HostProcess, case: str, form: str, reference: Callable, ours: Callable
) -> None:
    found = {}
    budget = "2.6MiB" if "text" not in case else "diffusion=24MiB,text=100MiB"
    for mode, asked in (("resident", {}), ("streamed", {"profile": budget}), ("split", {"placement": SPLIT})):
        gpu_host.forget()
        found[mode] = ours(gpu_host, case, Loaders(kind="managed", precision=form, **asked))
    for name, expected in reference(gpu_host, case).items():
        assert all(torch.equal(tensors[name], found["resident"][name]) for tensors in found.values()), name
        assert likeness(found["resident"][name], expected) > 0.9, name


@pytest.mark.parametrize("form", ["fp8 scaled", "qint8", "qint4"])
def test_a_hook_on_a_weight_with_a_lora(gpu_host: HostProcess, form: str) -> None:
    """Core computes what the hook does from the patched weight, so the LoRA is merged where a hook is."""

    def run(loaders: Loaders, *, with_hook: bool = True, forgets: bool = True) -> torch.Tensor:
        if forgets:
            gpu_host.forget()
        graph = Graph()
        model = managed(graph, loaders)
        graph.add("TestHold", value=model)
        model = lora(graph, model, 1.0, f"{PLAIN}.safetensors")
        conditioning = graph.conditioning(1)
        if with_hook:
            hook = graph.add("CreateHookLoraModelOnly", lora_name=f"{SECOND}.safetensors", strength_model=0.8)
            whole = {"strength": 1.0, "set_cond_area": "default", "hooks": hook}
            conditioning = graph.add("ConditioningSetProperties", cond_NEW=conditioning, **whole)
        latent = graph.add("EmptySD3LatentImage", width=64, height=64, batch_size=1)
        graph.keep(graph.sampler(model, conditioning, graph.conditioning(2), latent, cfg=1.0, steps=2))
        result = gpu_host.run(graph.nodes)
        assert result.outcome == "success", result.brief_error
        (kept,) = result.kept().values()
        return kept

    want, without = run(CORE), run(CORE, with_hook=False)
    found = [run(Loaders(precision=form, profile=profile)) for profile in MODES.values()]
    assert torch.equal(*found)
    plain = run(Loaders(precision=form), with_hook=False)
    assert likeness(found[0] - plain, want - without) > (0.8 if form == "qint4" else 0.9)
    assert torch.equal(run(Loaders(precision=form), forgets=False), found[0])
    assert torch.equal(run(Loaders(precision=form), with_hook=False, forgets=False), plain)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", ["sd_convolution_lora", "sd_norm_differences", "sd_convolution_differences"])
def test_convolutions_norms_and_unknown_keys(gpu_host: HostProcess, name: str, form: str) -> None:
    def run(loaders: Loaders, lora_name: str | None) -> torch.Tensor:
        gpu_host.forget()
        return sample_sd(gpu_host, loaders, lora_name)

    before = len(gpu_host.log())
    effect = run(CORE, name) - run(CORE, None)
    plain = run(Loaders(precision=form), None)
    found = [run(Loaders(precision=form, **asked), name) for asked in ({}, {"profile": "24MiB"})]
    assert torch.equal(*found)
    split = run(Loaders(precision=form, placement=SPLIT), name)
    assert torch.equal(split, run(Loaders(precision=form, halves=computes_at_once(gpu_host)), name))
    assert likeness(found[0] - plain, effect) > 0.6
    if name == "sd_convolution_lora":
        assert "lora key not loaded: of_another_program" in gpu_host.log()[before:]


@pytest.mark.parametrize("form", FORMS)
def test_a_model_saved_with_a_lora_is_what_computes(gpu_host: HostProcess, form: str) -> None:
    gpu_host.forget()
    want = sample(gpu_host, Loaders(precision=form), ((PLAIN, 0.7),))
    graph = Graph()
    model = lora(graph, managed(graph, Loaders(precision=form)), 0.7, f"{PLAIN}.safetensors")
    graph.add("ModelSave", model=model, filename_prefix=f"saved/lora over {form}")
    assert gpu_host.run(graph.nodes).outcome == "success"
    (path,) = (gpu_host.base / "output" / "saved").glob(f"lora over {form}*.safetensors")
    target = gpu_host.base / "models" / "diffusion_models" / f"saved {form}.safetensors"
    path.rename(target)
    gpu_host.forget()
    graph = Graph()
    graph.keep(sample_flux(graph, CORE.diffusion_model(graph, target.name)))
    (got,) = gpu_host.run(graph.nodes).kept().values()
    assert torch.equal(got, want)
