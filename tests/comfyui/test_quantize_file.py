"""Files that `quantize_file` makes: ComfyUI's own loaders run them without this pack, ours give the same bits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from highwater.memory.quantizing import quantize_file
from highwater.tests.comfyui.graphs import CORE, Graph, Loaders, lora, sample_flux
from highwater.tests.comfyui.host_process import HostProcess, PromptRefused, PromptResult

pytestmark = pytest.mark.slow(one_in=3)

FORMS = ("fp8-scaled", "int8")
SOURCES = {"flux": "tiny_flux.safetensors", "wan": "tiny_wan.safetensors"}
WAYS = {
    "resident": Loaders(),
    "streamed": Loaders(profile="4MiB"),
    "split": Loaders(placement="gpu:0&gpu:1"),
    "managed": Loaders(kind="managed"),
}

Tensors = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def made(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a file of each model in each form."""
    folder = tmp_path_factory.mktemp("made")
    for name, source in SOURCES.items():
        for form in FORMS:
            quantize_file(models / "diffusion_models" / source, folder / f"{name}_{form}.safetensors", form)
    return folder


def serve(host: HostProcess, made: Path) -> None:
    for path in made.iterdir():
        (host.base / "models" / "diffusion_models" / path.name).symlink_to(path)


@pytest.fixture(scope="module")
def gpu_host(start_gpu_host: Callable[..., HostProcess], made: Path) -> Iterator[HostProcess]:
    with start_gpu_host() as host:
        serve(host, made)
        yield host


@pytest.fixture(scope="module")
def wanted(start_gpu_host: Callable[..., HostProcess], made: Path) -> dict[tuple[str, str, bool], Tensors]:
    """Return what ComfyUI alone computes, of each file as it was and quantized, with a LoRA and without."""
    with start_gpu_host(with_pack=False) as host:
        serve(host, made)
        return {
            (name, form, with_lora): sample(host, CORE, name, form, with_lora)
            for name in SOURCES
            for form in ("", *FORMS)
            for with_lora in ((False, True) if name == "flux" else (False,))
        }


def sample(host: HostProcess, loaders: Loaders, name: str, form: str, with_lora: bool = False) -> Tensors:
    host.forget()
    graph = Graph()
    model = loaders.diffusion_model(graph, f"{name}_{form}.safetensors" if form else SOURCES[name])
    if name == "wan":
        # Of two lengths, so that core does not batch them either: activations in eight bits share a scale.
        positive, negative = (graph.conditioning(seed, num_tokens=8 + seed, width=4096) for seed in (1, 2))
        latent = graph.add("EmptyHunyuanLatentVideo", width=64, height=64, length=5, batch_size=1)
        graph.keep(graph.sampler(model, positive, negative, latent, cfg=3.0))
    else:
        graph.keep(sample_flux(graph, lora(graph, model, 0.7) if with_lora else model))
    return host.run(graph.nodes).kept()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", SOURCES)
def test_comfyui_alone_computes_nearly_what_the_source_gives(wanted: dict, name: str, form: str) -> None:
    for key, want in wanted[name, "", False].items():
        got = wanted[name, form, False][key]
        assert got.isfinite().all()
        assert 0 < (got - want).norm() / want.norm() < 0.1


@pytest.mark.parametrize("with_lora", [False, True])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", SOURCES)
def test_our_loaders_give_the_same_bits(
    gpu_host: HostProcess, wanted: dict, name: str, form: str, way: str, with_lora: bool
) -> None:
    if (name, form, with_lora) not in wanted:
        pytest.skip("there is no LoRA for it")
    got = sample(gpu_host, WAYS[way], name, form, with_lora)
    for key, want in wanted[name, form, with_lora].items():
        assert torch.equal(got[key], want)


@pytest.mark.parametrize("form", FORMS)
def test_its_weights_reach_the_device_as_they_are_in_the_file(gpu_host: HostProcess, made: Path, form: str) -> None:
    gpu_host.forget()
    with gpu_host.books() as devices:
        sample(gpu_host, Loaders(), "flux", form)
    file_bytes = (made / f"flux_{form}.safetensors").stat().st_size
    assert 0.9 * file_bytes < devices[0]["h2d_bytes"] < 1.1 * file_bytes + (1 << 20)


@pytest.mark.parametrize("with_lora", [False, True])
@pytest.mark.parametrize("way", ["resident", "streamed", "split"])
@pytest.mark.parametrize("name", SOURCES)
def test_int8_on_loading_is_what_the_file_would_be(
    gpu_host: HostProcess, wanted: dict, name: str, way: str, with_lora: bool
) -> None:
    if (name, "int8", with_lora) not in wanted:
        pytest.skip("there is no LoRA for it")
    got = sample(gpu_host, replace(WAYS[way], precision="int8"), name, "", with_lora)
    for key, want in wanted[name, "int8", with_lora].items():
        assert torch.equal(got[key], want)
    (part,) = gpu_host.get("/highwater/report")["components"]
    assert "weights in int8, in ComfyUI's own tensors" in str(part)


@pytest.mark.parametrize("with_lora", [False, True])
@pytest.mark.parametrize("form", ["qint8", "qint4", "qfloat8"])
def test_forms_of_optimum_quanto_compute_alike_wherever_weights_rest(
    gpu_host: HostProcess, wanted: dict, form: str, with_lora: bool
) -> None:
    got = {
        way: sample(gpu_host, replace(WAYS[way], precision=form), "flux", "", with_lora)
        for way in ("resident", "streamed", "split", "managed")
    }
    for key, want in wanted["flux", "", with_lora].items():
        assert all(torch.equal(each[key], got["resident"][key]) for each in got.values())
        assert 0 < (got["resident"][key] - want).norm() / want.norm() < (0.3 if form == "qint4" else 0.1)


@pytest.mark.expects_errors
def test_the_node_writes_a_file_that_the_page_then_offers(gpu_host: HostProcess, wanted: dict) -> None:
    def write(**asked: object) -> PromptResult:
        graph = Graph()
        file = "diffusion_models/tiny_flux.safetensors"
        widgets = {"file": file, "to": "int8", "exclude": "", "name": "", "replace": False}
        graph.add("HighwaterQuantizeFile", **{**widgets, **asked})
        return gpu_host.run(graph.nodes)

    (told,) = [output["text"] for output in write().outputs.values() if "text" in output]
    assert "weights in int8" in told[0] and told[0].startswith("tiny_flux-int8.safetensors: ")
    offered = gpu_host.get("/object_info/UNETLoader")["UNETLoader"]["input"]["required"]["unet_name"]
    assert "tiny_flux-int8.safetensors" in str(offered)
    gpu_host.forget()
    graph = Graph()
    graph.keep(sample_flux(graph, CORE.diffusion_model(graph, "tiny_flux-int8.safetensors")))
    for key, tensor in gpu_host.run(graph.nodes).kept().items():
        assert torch.equal(tensor, wanted["flux", "int8", False][key])
    written = gpu_host.base / "models" / "diffusion_models" / "tiny_flux-int8.safetensors"
    before = written.read_bytes()
    refused = write(exclude="img_attn")
    assert refused.outcome == "error"
    assert "tiny_flux-int8.safetensors exists already; name another one, or turn replace on" in refused.error
    assert written.read_bytes() == before
    write(exclude="img_attn", replace=True)
    assert len(written.read_bytes()) > len(before)


@pytest.mark.expects_errors
@pytest.mark.parametrize(("name", "why"), [("../evil", "leads to another folder"), ("a:b", "leads to another folder")])
def test_a_name_that_leads_elsewhere_is_refused(gpu_host: HostProcess, name: str, why: str) -> None:
    graph = Graph()
    graph.add(
        "HighwaterQuantizeFile", file="diffusion_models/tiny_flux.safetensors", to="int8", exclude="", name=name,
        replace=False,
    )  # fmt: skip
    with pytest.raises(PromptRefused) as refused:
        gpu_host.queue(graph.nodes)
    assert why in refused.value.text


@pytest.mark.parametrize("with_lora", [False, True])
@pytest.mark.parametrize("name", SOURCES)
def test_a_file_in_qint8_computes_as_its_codes_in_cores_own_int8(
    gpu_host: HostProcess, models: Path, name: str, with_lora: bool
) -> None:
    if with_lora and name != "flux":
        pytest.skip("there is no LoRA for it")
    folder = gpu_host.base / "models" / "diffusion_models"
    quanto, own = folder / f"{name}_qint8.safetensors", folder / f"{name}_qint8_own.safetensors"
    if not quanto.exists():
        quantize_file(models / "diffusion_models" / SOURCES[name], quanto, "qint8")
        save_file(in_cores_names(load_file(quanto)), own)
    want = sample(gpu_host, CORE, name, "qint8_own", with_lora)
    for way in ("resident", "streamed", "split"):
        got = sample(gpu_host, WAYS[way], name, "qint8", with_lora)
        assert all(torch.equal(got[key], want[key]) for key in want), way


def in_cores_names(tensors: Tensors) -> Tensors:
    """Return the tensors of a file in qint8 as ComfyUI's int8 files have them, written by hand."""
    told = torch.tensor(list(b'{"format": "int8_tensorwise"}'), dtype=torch.uint8)
    made = {}
    for name, tensor in tensors.items():
        layer, _, kind = name.removesuffix("._data").removesuffix("._scale").rpartition(".")
        if name.endswith("._data"):
            made |= {f"{layer}.weight": tensor, f"{layer}.comfy_quant": told.clone()}
        elif name.endswith("._scale"):
            made[f"{layer}.weight_scale"] = tensor.float()
        elif kind not in ("input_scale", "output_scale"):
            made[name] = tensor
    return made


def test_a_text_encoder_in_qint8_computes_as_its_codes_stand_for(gpu_host: HostProcess, models: Path) -> None:
    folder = gpu_host.base / "models" / "text_encoders"
    quantize_file(models / "text_encoders" / "clip_l.safetensors", folder / "clip_qint8.safetensors", "qint8")
    save_file(in_cores_names(load_file(folder / "clip_qint8.safetensors")), folder / "clip_own.safetensors")

    def encode(loaders: Loaders, name: str) -> Tensors:
        gpu_host.forget()
        graph = Graph()
        clip = loaders.text_encoder(graph, name)
        graph.keep(graph.add("CLIPTextEncode", clip=clip, text="a red fox"))
        return gpu_host.run(graph.nodes).kept()

    want = encode(CORE, "clip_own.safetensors")
    got = encode(Loaders(), "clip_qint8.safetensors")
    assert want and all(torch.equal(got[key], want[key]) for key in want)


@pytest.mark.expects_errors
@pytest.mark.parametrize("form", ["qint4", "qfloat8"])
def test_other_codes_of_optimum_quanto_are_refused_with_who_loads_them(
    gpu_host: HostProcess, models: Path, form: str
) -> None:
    path = gpu_host.base / "models" / "diffusion_models" / f"quanto_{form}.safetensors"
    quantize_file(models / "diffusion_models" / "tiny_flux.safetensors", path, form)
    graph = Graph()
    graph.keep(sample_flux(graph, Loaders().diffusion_model(graph, path.name)))
    refused = gpu_host.run(graph.nodes)
    assert refused.outcome == "error"
    assert "is in another form of optimum-quanto than qint8 with a scale for each row" in refused.error
