"""What is read off workflows: models, and their calls in the order in which they run."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from highwater.headless.comfy_stub import comfy_api
from highwater.memory.errors import InvalidInput
from highwater.tests.comfyui.graphs import CASES, CORE, Graph, Loaders
from highwater.tests.page_graphs import prompt_of
from highwater.tests.web.help_graphs import HELP_GRAPHS

comfy_api.install()
from highwater.nodes.comfy_models import manage, models, quantize, verify  # noqa: E402
from highwater.nodes.workflow_reading.description import (  # noqa: E402
    DIFFUSION,
    PIPELINE,
    TEXT,
    VAE,
    Call,
    Size,
    Tiling,
    WorkflowDescription,
    WorkflowUse,
)
from highwater.nodes.workflow_reading.prompt_reading import RULES  # noqa: E402
from highwater.nodes.workflow_reading.reading import read_workflow  # noqa: E402
from highwater.nodes.workflow_reading.value_rules import compute  # noqa: E402
from highwater.nodes.workflow_reading.widget_names import KNOWN_WIDGETS  # noqa: E402

PACK = Path(__file__).parents[3]
PAGES = sorted((PACK / "workflows").glob("*.json"))
PROMPTS = sorted((PACK / "headless/workflows").glob("*.json"))
VALUES = ("INT", "FLOAT", "STRING", "BOOLEAN", "COMBO")
OURS = {
    **comfy_api.list_node_classes(),
    **{
        name: node
        for module in (models, manage, quantize, verify)
        for name, node in vars(module).items()
        if name in module.__all__
    },
}


def node(name: str, **inputs: Any) -> dict[str, Any]:
    return {"class_type": name, "inputs": inputs}


def text_to_image(**changed: Any) -> dict[str, Any]:
    """A prompt of ComfyUI's own nodes; ``changed`` replaces nodes, or takes them out."""
    graph = {
        "model": node("UNETLoader", unet_name="flux.safetensors", weight_dtype="fp8_e4m3fn"),
        "clip": node("DualCLIPLoader", clip_name1="l.safetensors", clip_name2="t5.safetensors", type="flux"),
        "vae": node("VAELoader", vae_name="ae.safetensors"),
        "positive": node("CLIPTextEncode", clip=["clip", 0], text="a fox"),
        "negative": node("CLIPTextEncode", clip=["clip", 0], text=""),
        "latent": node("EmptySD3LatentImage", width=1024, height=768, batch_size=2),
        "sample": node(
            "KSampler",
            model=["model", 0], positive=["positive", 0], negative=["negative", 0], latent_image=["latent", 0],
            seed=1, steps=20, cfg=3.5, sampler_name="euler", scheduler="simple", denoise=1.0,
        ),
        "decode": node("VAEDecode", samples=["sample", 0], vae=["vae", 0]),
        "save": node("SaveImage", images=["decode", 0], filename_prefix="x"),
    }  # fmt: skip
    graph |= changed
    return {name: each for name, each in graph.items() if each is not None}


def use(description: WorkflowDescription, call: Call = Call.SAMPLE) -> WorkflowUse:
    (found,) = [each for each in description.uses if each.call is call]
    return found


def labels(description: WorkflowDescription) -> list[str]:
    return [name.class_type for name in description.unknown]


# -- our examples


@pytest.mark.parametrize("path", [*PAGES, *PROMPTS], ids=lambda path: path.stem)
def test_of_our_examples_all_is_known(path: Path) -> None:
    found = read_workflow(json.loads(path.read_text(encoding="utf-8")))
    assert not found.unknown
    assert found.models and all(model.files and model.is_ours and not model.unknown for model in found.models)
    assert {each.model for each in found.uses} == set(range(len(found.models)))
    for each in found.uses:
        assert not each.unknown
        assert each.call is Call.ENCODE_TEXT or each.size is not None
        assert each.call is not Call.SAMPLE or (each.steps and each.conds)
        assert each.call is not Call.ENCODE_TEXT or each.prompt


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_a_page_graph_reads_as_the_prompt_that_the_page_queues(path: Path) -> None:
    graph = json.loads(path.read_text(encoding="utf-8"))
    core = json.loads((PACK / "tests/core_nodes.json").read_text(encoding="utf-8"))
    info = {**core, **{name: info_of(each) for name, each in OURS.items()}}
    titles = {str(each["id"]): each.get("title", "") for each in graph["nodes"]}
    prompt = prompt_of(graph, info)
    for node_id, each in prompt.items():
        each["_meta"] = {"title": titles[node_id]}
    assert read_workflow(prompt) == read_workflow(graph)


def info_of(node_class: Any) -> dict[str, Any]:
    """Return of a class's inputs what `prompt_of` needs."""
    given = node_class.GET_SCHEMA().inputs
    return {
        "input": {
            "required": {each.id: [each.io_type, {"control_after_generate": "seed" in each.id}] for each in given}
        }
    }


@pytest.mark.parametrize("name", sorted(OURS))
def test_the_widgets_of_our_nodes_are_those_of_their_schemas(name: str) -> None:
    widgets = tuple(each.id for each in OURS[name].GET_SCHEMA().inputs if each.io_type in VALUES)
    assert KNOWN_WIDGETS.get(name, ()) == widgets


@pytest.mark.parametrize("name", sorted(OURS))
def test_every_node_of_ours_is_understood(name: str) -> None:
    assert name in RULES


# -- models


def test_models_and_calls_of_a_prompt() -> None:
    found = read_workflow(text_to_image())
    assert [(model.kind, model.folder, model.files) for model in found.models] == [
        (DIFFUSION, "diffusion_models", ("flux.safetensors",)),
        (TEXT, "text_encoders", ("l.safetensors", "t5.safetensors")),
        (VAE, "vae", ("ae.safetensors",)),
    ]
    assert found.models[0].asked.weight_dtype == "fp8_e4m3fn" and not found.models[0].is_ours
    assert [(each.call, each.model) for each in found.uses] == [
        (Call.ENCODE_TEXT, 1),
        (Call.ENCODE_TEXT, 1),
        (Call.SAMPLE, 0),
        (Call.DECODE, 2),
    ]
    sampled = use(found)
    assert (sampled.size, sampled.steps, sampled.cfg, sampled.conds) == (
        Size(width=1024, height=768, batch=2),
        20,
        3.5,
        2,
    )
    assert use(found, Call.DECODE).size == sampled.size
    assert not found.unknown and not any(each.unknown for each in found.uses)


def test_a_prompt_that_is_the_same_is_encoded_once_and_guidance_of_one_asks_the_model_once() -> None:
    graph = text_to_image(negative=None)
    graph["sample"]["inputs"] |= {"negative": ["positive", 0], "cfg": 1.0}
    found = read_workflow(graph)
    assert use(found, Call.ENCODE_TEXT).prompt == "a fox"
    assert use(found).conds == 1


def test_what_nothing_takes_does_not_run() -> None:
    graph = text_to_image(other=node("UNETLoader", unet_name="other.safetensors"))
    graph["lost"] = node("VAEDecode", samples=["sample", 0], vae=["vae", 0])
    assert read_workflow(graph) == read_workflow(text_to_image())


def test_each_part_of_a_checkpoint_is_a_model() -> None:
    graph = text_to_image(model=node("CheckpointLoaderSimple", ckpt_name="sd.safetensors"), clip=None, vae=None)
    graph["positive"]["inputs"]["clip"] = graph["negative"]["inputs"]["clip"] = ["model", 1]
    graph["decode"]["inputs"]["vae"] = ["model", 2]
    found = read_workflow(graph)
    assert [(model.part, model.kind) for model in found.models] == [("model", DIFFUSION), ("clip", TEXT), ("vae", VAE)]


def test_loras_follow_the_model_and_the_text_encoder_each_at_its_strength() -> None:
    graph = text_to_image(
        lora=node(
            "LoraLoader", model=["model", 0], clip=["clip", 0], lora_name="a.safetensors",
            strength_model=0.8, strength_clip=0.0,
        ),
        second=node("LoraLoaderModelOnly", model=["lora", 0], lora_name="b.safetensors", strength_model=1.5),
    )  # fmt: skip
    graph["sample"]["inputs"]["model"] = ["second", 0]
    graph["positive"]["inputs"]["clip"] = ["lora", 1]
    found = read_workflow(graph)
    assert [(lora.file, lora.strength) for lora in use(found).loras] == [("a.safetensors", 0.8), ("b.safetensors", 1.5)]
    assert found.models[use(found).model or 0].loras == use(found).loras
    assert not any(each.loras for each in found.uses if each.call is Call.ENCODE_TEXT)


def test_a_model_behind_a_manage_node_has_what_that_asks_for() -> None:
    manager = node("HighwaterManageModel", model=["model", 0], profile="6GiB", precision="int8", placement="gpu:0")
    graph = text_to_image(manager=manager)
    graph["sample"]["inputs"]["model"] = ["manager", 0]
    found = read_workflow(graph)
    (model,) = [model for model in found.models if model.kind == DIFFUSION]
    assert model.files == ("flux.safetensors",) and model.is_ours
    assert model.managed_by is not None and model.managed_by.id == "manager"
    assert (model.asked.profile, model.asked.precision, model.asked.placement) == ("6GiB", "int8", "gpu:0")


def test_precision_nodes_count_in_place_of_the_loaders_own_words() -> None:
    graph = text_to_image(
        model=node("HighwaterLoadDiffusionModel", unet_name="x.safetensors", profile="3", precision="as stored",
                   placement="default", precision_options=["precision", 0]),
        precision=node("HighwaterPrecision", storage="float8_e4m3fn", scale="row", component="*"),
    )  # fmt: skip
    (model,) = [model for model in read_workflow(graph).models if model.kind == DIFFUSION]
    assert "fp8 per row" in str(model.asked.precision)
    graph["precision"]["inputs"]["storage"] = ["other", 0]
    graph["other"] = node("PrimitiveStringMultiline", value="float8_e4m3fn")
    (linked,) = [model for model in read_workflow(graph).models if model.kind == DIFFUSION]
    assert linked == model
    graph["other"] = node("Foreign")
    with pytest.raises(InvalidInput, match="storage comes from node other"):
        read_workflow(graph)


def test_a_linked_file_name_is_said_not_to_be_known_and_a_given_one_is_read() -> None:
    graph = text_to_image(name=node("Foreign"))
    graph["vae"]["inputs"]["vae_name"] = ["name", 0]
    (vae,) = [model for model in read_workflow(graph).models if model.kind == VAE]
    assert vae.files == () and vae.unknown == ("file: node vae (VAELoader): vae_name comes from node name (Foreign)",)
    graph["name"] = node("PrimitiveString", value="ae.safetensors")
    (vae,) = [model for model in read_workflow(graph).models if model.kind == VAE]
    assert vae.files == ("ae.safetensors",) and not vae.unknown


def test_a_gguf_loader_is_read() -> None:
    graph = text_to_image(
        model=node("UnetLoaderGGUF", unet_name="flux-Q4_K_S.gguf"),
        clip=node("DualCLIPLoaderGGUF", clip_name1="l.safetensors", clip_name2="t5-Q8_0.gguf", type="flux"),
    )
    found = read_workflow(graph)
    assert [model.files for model in found.models][:2] == [("flux-Q4_K_S.gguf",), ("l.safetensors", "t5-Q8_0.gguf")]
    assert not found.unknown


# -- nodes that are not understood


def test_an_unknown_node_is_named_and_passes_its_model_on() -> None:
    graph = text_to_image(patch=node("SomePatch", model=["model", 0], amount=3))
    graph["sample"]["inputs"]["model"] = ["patch", 0]
    found = read_workflow(graph)
    assert labels(found) == ["SomePatch"]
    assert replace(found, unknown=()) == read_workflow(text_to_image())


def test_an_unknown_loader_that_names_a_file_is_taken_for_one() -> None:
    found = read_workflow(text_to_image(model=node("FancyLoader", path="x/big.gguf", fast=True)))
    assert labels(found) == ["FancyLoader"]
    (model,) = [model for model in found.models if model.kind == DIFFUSION]
    assert model.files == ("x/big.gguf",) and "FancyLoader" in model.unknown[0]


def test_an_unknown_sampler_is_named_and_the_rest_is_read() -> None:
    graph = text_to_image()
    graph["sample"]["class_type"] = "FancySampler"
    found = read_workflow(graph)
    assert labels(found) == ["FancySampler"]
    assert [each.call for each in found.uses] == [Call.ENCODE_TEXT, Call.ENCODE_TEXT, Call.DECODE]
    assert use(found, Call.DECODE).size is None
    assert use(found, Call.DECODE).unknown == ("size: node sample (FancySampler) is not understood",)


def test_nodes_that_have_nothing_to_do_with_memory_are_not_named() -> None:
    graph = text_to_image(
        blur=node("FancyBlur", image=["decode", 0]),
        maths=node("FancyMaths", a=3),
        shown=node("PreviewAny", source=["positive", 0]),
    )
    graph["save"]["inputs"]["images"] = ["blur", 0]
    assert not read_workflow(graph).unknown


def test_the_request_that_queues_a_prompt_is_read_as_the_prompt() -> None:
    request = {"client_id": "x", "prompt": text_to_image(), "extra_data": {}}
    assert read_workflow(request) == read_workflow(text_to_image())
    assert read_workflow(text_to_image(prompt=node("PrimitiveString", value="x"))).uses


def test_nodes_that_other_packs_resolve_in_the_page_are_named() -> None:
    graph = text_to_image(model=node("GetNode", Constant="the_model"))
    found = read_workflow(graph)
    assert labels(found) == ["GetNode"]
    assert use(found).model is None and use(found).size is not None


# -- sizes and steps


def sized(latent: dict[str, Any], **more: Any) -> Size | None:
    return use(read_workflow(text_to_image(latent=latent, **more))).size


def test_sizes_are_followed_through_nodes_and_numbers() -> None:
    width = node("PrimitiveInt", value=1030)
    empty = node("EmptyLatentImage", width=["width", 0], height=512, batch_size=1)
    assert sized(empty, width=width) == Size(width=1024, height=512)
    upscaled = node("LatentUpscaleBy", samples=["first", 0], upscale_method="bicubic", scale_by=1.5)
    assert sized(upscaled, first=empty, width=width) == Size(width=1536, height=768)
    half = node("ComfyMathExpression", expression="a // 2", **{"values.a": ["width", 0]})
    small = node("EmptyLatentImage", width=["half", 1], height=512, batch_size=1)
    assert sized(small, half=half, width=width) == Size(width=512, height=512)
    video = node("EmptyHunyuanLatentVideo", width=848, height=480, length=25, batch_size=1)
    assert sized(video) == Size(width=848, height=480, frames=25)


def test_a_second_pass_samples_what_the_first_one_gave_upscaled() -> None:
    graph = text_to_image(
        bigger=node(
            "LatentUpscale", samples=["sample", 0], upscale_method="area", width=1536, height=0, crop="disabled"
        )
    )
    graph["again"] = {"class_type": "KSampler", "inputs": {**graph["sample"]["inputs"], "latent_image": ["bigger", 0]}}
    graph["again"]["inputs"] |= {"denoise": 0.4, "steps": 8}
    graph["decode"]["inputs"]["samples"] = ["again", 0]
    first, second = (each for each in read_workflow(graph).uses if each.call is Call.SAMPLE)
    assert second.size == Size(width=1536, height=1152, batch=2) and first.size == Size(width=1024, height=768, batch=2)
    assert (second.steps, second.denoise) == (8, 0.4)


def test_images_are_encoded_and_their_size_is_asked_for() -> None:
    latent = node("VAEEncode", pixels=["image", 0], vae=["vae", 0])
    graph = text_to_image(latent=latent, image=node("LoadImage", image="cat.png"))
    found = read_workflow(graph, image_size=lambda name: (1023, 517) if name == "cat.png" else None)
    assert use(found, Call.ENCODE).size == use(found).size == Size(width=1016, height=512)
    found = read_workflow(graph)
    assert use(found).size is None and "cat.png" in use(found).unknown[0] and not found.unknown


def test_images_go_on_through_a_preview() -> None:
    latent = node("VAEEncode", pixels=["shown", 0], vae=["vae", 0])
    image = node("EmptyImage", width=256, height=128, batch_size=3, color=0)
    assert sized(latent, shown=node("PreviewImage", images=["image", 0]), image=image) == Size(
        width=256, height=128, batch=3
    )


def test_one_image_of_unknown_size_has_the_size_that_it_is_given() -> None:
    scaled = node("ImageScale", image=["image", 0], upscale_method="area", width=640, height=480, crop="center")
    latent = node("VAEEncode", pixels=["scaled", 0], vae=["vae", 0])
    image = node("LoadImage", image="cat.png")
    assert sized(latent, scaled=scaled, image=image) == Size(width=640, height=480)
    scaled["inputs"]["height"] = 0
    assert sized(latent, scaled=scaled, image=image) is None
    assert sized(latent, scaled=scaled, image=node("FancyImages")) is None


def test_tiles_of_a_decoder_are_read() -> None:
    decode = node("VAEDecodeTiled", samples=["sample", 0], vae=["vae", 0], tile_size=256, overlap=32,
                  temporal_size=64, temporal_overlap=8)  # fmt: skip
    found = use(read_workflow(text_to_image(decode=decode)), Call.DECODE)
    assert found.tiling == Tiling(tile_size=256, overlap=32, temporal_size=64, temporal_overlap=8)
    assert use(read_workflow(text_to_image()), Call.DECODE).tiling is None


@pytest.mark.parametrize(
    ("steps", "begin", "end", "done"), [(20, 0, 10, 10), (20, 10, 10_000, 10), (8, 8, 20, 0), (4, 0, 0, 0)]
)
def test_an_advanced_sampler_does_some_of_the_steps(steps: int, begin: int, end: int, done: int) -> None:
    graph = text_to_image()
    graph["sample"]["class_type"] = "KSamplerAdvanced"
    graph["sample"]["inputs"] |= {"steps": steps, "start_at_step": begin, "end_at_step": end}
    assert use(read_workflow(graph)).steps == done


def custom(guider: dict[str, Any], sigmas: dict[str, Any], **more: Any) -> WorkflowUse:
    sample = node("SamplerCustomAdvanced", noise=["noise", 0], guider=["guider", 0], sampler=["sampler", 0],
                  sigmas=["sigmas", 0], latent_image=["latent", 0])  # fmt: skip
    others = {"noise": node("RandomNoise", noise_seed=1), "sampler": node("KSamplerSelect", sampler_name="euler")}
    found = read_workflow(text_to_image(sample=sample, guider=guider, sigmas=sigmas, **others, **more))
    assert not found.unknown
    return use(found)


def test_guiders_and_schedulers() -> None:
    alone = node("BasicGuider", model=["model", 0], conditioning=["positive", 0])
    guided = node("CFGGuider", model=["model", 0], positive=["positive", 0], negative=["negative", 0], cfg=4.0)
    basic = node("BasicScheduler", model=["model", 0], scheduler="simple", steps=12, denoise=0.5)
    assert (custom(alone, basic).steps, custom(alone, basic).conds, custom(alone, basic).denoise) == (12, 1, 0.5)
    assert custom(guided, basic).conds == 2
    assert custom(alone, node("ManualSigmas", sigmas="1.0, 0.75, .5, 0")).steps == 3
    assert custom(alone, node("SplitSigmas", sigmas=["basic", 0], step=5), basic=basic).steps == 5
    missing = custom(alone, node("ExtendIntermediateSigmas", sigmas=["basic", 0], steps=2), basic=basic)
    assert missing.steps is None and missing.unknown


def test_controlnets_compute_within_the_sampling_and_references_beside_it() -> None:
    graph = text_to_image(
        net=node("ControlNetLoader", control_net_name="depth.safetensors"),
        image=node("EmptyImage", width=512, height=512, batch_size=1, color=0),
        control=node("ControlNetApplyAdvanced", positive=["positive", 0], negative=["negative", 0],
                     control_net=["net", 0], image=["image", 0], strength=1.0, start_percent=0.0, end_percent=1.0),
        encoded=node("VAEEncode", pixels=["image", 0], vae=["vae", 0]),
        reference=node("ReferenceLatent", conditioning=["control", 0], latent=["encoded", 0]),
    )  # fmt: skip
    graph["sample"]["inputs"] |= {"positive": ["reference", 0], "negative": ["control", 1]}
    found = read_workflow(graph)
    assert [found.models[place].files for place in use(found).beside] == [("depth.safetensors",)]
    assert use(found).references == (Size(width=512, height=512),)
    assert not found.unknown


def test_a_video_from_an_image_encodes_the_whole_length() -> None:
    video = node("WanImageToVideo", positive=["positive", 0], negative=["negative", 0], vae=["vae", 0],
                 start_image=["image", 0], width=832, height=480, length=81, batch_size=1)  # fmt: skip
    graph = text_to_image(latent=video, image=node("LoadImage", image="x.png"))
    graph["sample"]["inputs"] |= {"positive": ["latent", 0], "negative": ["latent", 1], "latent_image": ["latent", 2]}
    found = read_workflow(graph)
    assert use(found, Call.ENCODE).size == use(found).size == Size(width=832, height=480, frames=81)
    del graph["latent"]["inputs"]["start_image"]
    assert Call.ENCODE not in [each.call for each in read_workflow(graph).uses]


def test_only_the_branch_of_a_switch_that_is_taken_runs() -> None:
    graph = text_to_image(
        lora=node("LoraLoaderModelOnly", model=["model", 0], lora_name="turbo.safetensors", strength_model=1.0),
        turbo=node("PrimitiveBoolean", value=False),
        switch=node("ComfySwitchNode", switch=["turbo", 0], on_false=["model", 0], on_true=["lora", 0]),
    )
    graph["sample"]["inputs"]["model"] = ["switch", 0]
    assert not use(read_workflow(graph)).loras
    graph["turbo"]["inputs"]["value"] = True
    assert [lora.file for lora in use(read_workflow(graph)).loras] == ["turbo.safetensors"]


def test_a_pipeline_is_one_model_of_three_calls() -> None:
    graph = json.loads((PACK / "headless/workflows/demo_wan.json").read_text())
    found = read_workflow(graph)
    (pipeline,) = found.models
    assert (pipeline.kind, pipeline.folder, pipeline.files) == (PIPELINE, "diffusers", ("tiny-wan",))
    assert [each.call for each in found.uses] == [Call.ENCODE_TEXT, Call.SAMPLE, Call.DECODE]
    assert use(found).size == Size(width=64, height=64, frames=5)


def test_watermarks_are_read() -> None:
    graph = json.loads((PACK / "headless/workflows/demo_sd.json").read_text())
    graph["9"] = node("HighwaterWatermark", device="gpu:0", low="1GiB", high="10%")
    (mark,) = read_workflow(graph).watermarks
    assert (mark.device, mark.low, mark.high) == ("gpu:0", "1GiB", "10%")


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("a + b * 2", 13), ("(a - 1) / 4", 0.5), ("round(a / 2)", 2), ("max(a, b, 100)", 100), ("ceil(a / 2)", 2),
        ("a if a > b else b", 5), ("a ** b", None), ("a * 1e12", None), ("c", None), ("a.b", None), ("(", None),
        ("__import__('os')", None), ("1 / 0", None), ("-" * 900 + "1", 1), ("(" * 900, None), ("'x' * 9", None),
    ],
)  # fmt: skip
def test_arithmetic_is_computed_and_nothing_else(expression: str, value: float | None) -> None:
    assert compute(expression, {"a": 3, "b": 5}) == value


# -- the graphs of other tests


def case(name: str, loaders: Loaders) -> dict[str, Any]:
    graph = Graph()
    CASES[name](graph, loaders)
    return graph.nodes


@pytest.mark.parametrize("name", sorted(CASES))
def test_the_graphs_that_compare_us_with_core_read_alike(name: str) -> None:
    """What core's loaders and ours load and compute differs in who moves it, and in what is asked of it."""
    cores, ours, managed = (
        read_workflow(case(name, loaders)) for loaders in (CORE, Loaders(), Loaders(kind="managed"))
    )
    foreign = {node.class_type for found in (cores, ours, managed) for node in found.unknown}
    assert all(class_type.startswith("Test") for class_type in foreign)
    for found in (ours, managed):
        used = {use.model for use in found.uses}
        moved = [model for place, model in enumerate(found.models) if place in used]
        assert all(model.is_ours for model in moved if model.kind in (DIFFUSION, TEXT, VAE))
        assert [described(found, use) for use in found.uses] == [described(cores, use) for use in cores.uses]


def described(found: WorkflowDescription, use: WorkflowUse) -> tuple[Any, ...]:
    model = None if use.model is None else found.models[use.model]
    files = None if model is None else (model.files, model.part, model.kind)
    return (use.call, files, use.size, use.steps, use.cfg, use.conds, len(use.loras), len(use.beside), use.prompt)


@pytest.mark.parametrize("name", sorted(HELP_GRAPHS))
def test_the_graphs_in_the_help_are_understood(name: str) -> None:
    found = read_workflow(HELP_GRAPHS[name].graph)
    assert all(node.class_type.startswith("Test") for node in found.unknown)


def test_reading_loads_no_torch(run_python: Callable[[str], None]) -> None:
    run_python("""
import sys
from highwater.headless.comfy_stub import comfy_api
comfy_api.install()
from highwater.nodes.workflow_reading import find_files, find_loras, image_size, read_workflow
loader = {"class_type": "HighwaterLoadPipeline", "inputs": {"pipeline": "x", "profile": "auto"}}
assert find_files(read_workflow({"1": loader}).models[0]).missing
assert "torch" not in sys.modules
""")
