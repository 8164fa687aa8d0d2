"""The graphs in the pictures of the help pages: for each node of ours one that computes, and what is seen then."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from highwater.tests.comfyui.graphs import Graph, Link

__all__ = ["HELP_GRAPHS", "MODEL_NAMES", "HelpGraph"]

FLUX, CLIP, VAE = (f"highwater-tiny-{name}.safetensors" for name in ("flux", "clip-l", "vae"))
# The names in the pictures of files that tests/comfyui/model_files.py makes.
MODEL_NAMES = {
    "checkpoints/tiny-sd.safetensors": "checkpoints/shallow_sd.safetensors",
    "controlnet/tiny-control.safetensors": "controlnet/shallow_sd_control.safetensors",
    "vae/tiny-vae.safetensors": "vae/tiny_vae.safetensors",
    "clip_vision/clip-vision.safetensors": "clip_vision/clip_vision.safetensors",
}
REQUEST = {"profile": "auto", "precision": "as stored", "placement": "default", "engine": "auto"}
EXAMPLE = {"prompt": "a red fox in the snow", "width": 64, "height": 64, "seed": 1}


@dataclass(frozen=True, kw_only=True)
class HelpGraph:
    """A graph, and what the node of the page shows after its run: its badge, and a part of its text.

    The page quotes the badge. Where that is not the same in each run, it is left open here.
    """

    graph: dict[str, Any]
    badge: str = ""
    text: str = ""
    width: int = 300  # of the node; the panel with help shows about 220 to 340 pixels
    height: int = 0  # of a node whose text needs more than the page gives it

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def prompt(graph: Graph, clip: Link) -> Link:
    return graph.add("CLIPTextEncode", text="a red fox in the snow", clip=clip)


def sample(graph: Graph, model: Link, positive: Link, *, size: int = 256, steps: int = 4) -> Link:
    negative = graph.add("ConditioningZeroOut", conditioning=positive)
    latent = graph.add("EmptySD3LatentImage", width=size, height=size, batch_size=1)
    return graph.sampler(model, positive, negative, latent, steps=steps)


def decode(graph: Graph, samples: Link, vae: Link) -> Link:
    return graph.add("PreviewImage", images=graph.add("VAEDecode", samples=samples, vae=vae))


def flux(graph: Graph, **request: str) -> Link:
    return graph.add("HighwaterLoadDiffusionModel", unet_name=FLUX, **REQUEST | request)


def text_encoder(graph: Graph, **request: str) -> Link:
    return graph.add("HighwaterLoadTextEncoder", clip_name1=CLIP, type="flux", **REQUEST | request)


def vae(graph: Graph, **request: str) -> Link:
    return graph.add("HighwaterLoadVAE", vae_name=VAE, **REQUEST | request)


def image(graph: Graph, model: Link | None = None, clip: Link | None = None, decoder: Link | None = None) -> Link:
    """Sample and decode, with loaders of ours for what is not given; return the latent."""
    model, clip, decoder = model or flux(graph), clip or text_encoder(graph), decoder or vae(graph)
    latent = sample(graph, model, prompt(graph, clip))
    decode(graph, latent, decoder)
    return latent


def load_diffusion_model(graph: Graph) -> None:
    image(graph, model=flux(graph, profile="16MiB"))


def load_text_encoder(graph: Graph) -> None:
    image(graph, clip=text_encoder(graph, precision="fp8 scaled", placement="gpu:1"))


def load_vae(graph: Graph) -> None:
    image(graph, decoder=vae(graph))


def stable_diffusion(graph: Graph, **request: str) -> tuple[Link, Link, Link]:
    node_id, _ = graph.add("HighwaterLoadCheckpoint", ckpt_name="tiny-sd.safetensors", **REQUEST | request)
    return [node_id, 0], [node_id, 1], [node_id, 2]


def checkpoint(graph: Graph) -> tuple[Link, Link, Link]:
    """Load one as ComfyUI does."""
    node_id, _ = graph.add("CheckpointLoaderSimple", ckpt_name="tiny-sd.safetensors")
    return [node_id, 0], [node_id, 1], [node_id, 2]


def load_checkpoint(graph: Graph) -> None:
    model, clip, decoder = stable_diffusion(graph, profile="256MiB")
    decode(graph, sample(graph, model, prompt(graph, clip), size=64, steps=1), decoder)


def load_controlnet(graph: Graph) -> None:
    model, clip, decoder = stable_diffusion(graph)
    text = prompt(graph, clip)
    control = graph.add("HighwaterLoadControlNet", control_net_name="tiny-control.safetensors", **REQUEST)
    picture = graph.add("EmptyImage", width=64, height=64, batch_size=1, color=0x336699)
    guided, _ = graph.add(
        "ControlNetApplyAdvanced",
        positive=text,
        negative=text,
        control_net=control,
        image=picture,
        strength=1.0,
        start_percent=0.0,
        end_percent=1.0,
    )
    latent = graph.add("EmptyLatentImage", width=64, height=64, batch_size=1)
    decode(graph, graph.sampler(model, [guided, 0], [guided, 1], latent, steps=1), decoder)


def load_clip_vision(graph: Graph) -> None:
    request = REQUEST | {"profile": "256MiB"}
    vision = graph.add("HighwaterLoadCLIPVision", clip_name="clip-vision.safetensors", **request)
    picture = graph.add("EmptyImage", width=64, height=64, batch_size=1, color=0x336699)
    graph.keep(graph.add("CLIPVisionEncode", clip_vision=vision, image=picture, crop="center"))


def manage_model(graph: Graph) -> None:
    model, clip, decoder = checkpoint(graph)
    managed = graph.add("HighwaterManageModel", model=model, **REQUEST | {"profile": "32MiB"})
    decode(graph, sample(graph, managed, prompt(graph, clip), size=64, steps=1), decoder)


def manage_clip(graph: Graph) -> None:
    model, clip, decoder = checkpoint(graph)
    managed = graph.add("HighwaterManageCLIP", clip=clip, **REQUEST | {"precision": "fp8 scaled"})
    decode(graph, sample(graph, model, prompt(graph, managed), size=64, steps=1), decoder)


def manage_vae(graph: Graph) -> None:
    decoder = graph.add("VAELoader", vae_name="tiny-vae.safetensors")
    image(graph, decoder=graph.add("HighwaterManageVAE", vae=decoder, **REQUEST | {"placement": "gpu:1"}))


def quantize_file(graph: Graph) -> None:
    graph.add(
        "HighwaterQuantizeFile", file="checkpoints/tiny-sd.safetensors", to="int8", exclude="", name="", replace=True
    )


def keep(graph: Graph) -> None:
    image(graph, clip=graph.add("HighwaterKeep", model=text_encoder(graph), keep=True, at_most="unlimited"))


def release(graph: Graph) -> None:
    clip = text_encoder(graph)
    released, _ = graph.add("HighwaterRelease", model=clip, after=prompt(graph, clip))
    decode(graph, sample(graph, flux(graph), [released, 1]), vae(graph))


def watermark(graph: Graph) -> None:
    marks = graph.add("HighwaterWatermark", device="gpu:0", low="256MiB", high="384MiB")
    model = graph.add("HighwaterLoadDiffusionModel", unet_name=FLUX, **REQUEST, watermark=marks)
    image(graph, model=model)


def precision(graph: Graph) -> None:
    widgets = {
        "storage": "float8_e4m3fn", "scale": "usual", "compute": "the model's", "granularity": "block",
        "skips": "declared", "exclude": "", "exclude_classes": "", "error_limit": 0.0, "component": "*",
    }  # fmt: skip
    options = graph.add("HighwaterPrecision", **widgets)
    model = graph.add("HighwaterLoadDiffusionModel", unet_name=FLUX, **REQUEST, precision_options=options)
    image(graph, model=model)


def limits(graph: Graph) -> None:
    graph.add("HighwaterLimits", max_loaded=2, idle_minutes=10)
    image(graph)


def memory_report(graph: Graph) -> None:
    latent = sample(graph, flux(graph, profile="16MiB"), prompt(graph, text_encoder(graph)))
    graph.add("HighwaterMemoryReport", after=latent)


def plan(graph: Graph) -> None:
    latent = sample(graph, flux(graph, profile="16MiB"), prompt(graph, text_encoder(graph)))
    image = graph.add("VAEDecode", samples=latent, vae=graph.add("HighwaterLoadVAE", vae_name=VAE, **REQUEST))
    graph.add("PreviewImage", images=image)
    planned = graph.add("HighwaterPlan", devices="")
    graph.add("PreviewImage", images=(planned[0], 1))


def verify(graph: Graph) -> None:
    text = prompt(graph, text_encoder(graph))
    latent = graph.add("EmptySD3LatentImage", width=256, height=256, batch_size=1)
    model = flux(graph, profile="16MiB")
    graph.add("HighwaterVerify", text="", cfg=1.0, seed=1, model=model, positive=text, latent_image=latent)


def pipeline(graph: Graph, **request: str) -> Link:
    values = {"profile": "auto", "precision": "as stored", "placement": "auto"} | request
    return graph.add("HighwaterLoadPipeline", pipeline="tiny-flux", **values)


def sample_pipeline(graph: Graph, *, size: int = 64, **request: str) -> None:
    loaded = pipeline(graph, **request)
    options = {"negative_prompt": "", "frames": 1, "steps": 4, "guidance": 3.5, "width": size, "height": size}
    images = graph.add("HighwaterSamplePipeline", pipeline=loaded, **EXAMPLE | options)
    graph.add("HighwaterSaveImage", images=images, filename_prefix="fox")


def load_pipeline(graph: Graph) -> None:
    sample_pipeline(graph, profile="12MiB")


def save_image(graph: Graph) -> None:
    sample_pipeline(graph, size=128)


def verify_pipeline(graph: Graph) -> None:
    graph.add("HighwaterVerifyPipeline", pipeline=pipeline(graph, profile="12MiB"), **EXAMPLE, frames=1, guidance=3.5)


# By node, in the order of the runs: what a node keeps, sets or counts is no part of an earlier picture.
BUILD: dict[str, tuple[Callable[[Graph], None], dict[str, Any]]] = {
    "HighwaterMemoryReport": (memory_report, {"text": "Last events", "width": 560, "height": 500}),
    "HighwaterPlan": (plan, {"text": "component", "width": 640, "height": 420}),
    "HighwaterLoadDiffusionModel": (load_diffusion_model, {"badge": "streams 11/12", "width": 360}),
    "HighwaterLoadTextEncoder": (load_text_encoder, {"badge": "155M gpu:1", "width": 360}),
    "HighwaterLoadVAE": (load_vae, {"badge": "4.7M gpu:0", "width": 360}),
    "HighwaterLoadCheckpoint": (load_checkpoint, {"badge": "streams 5/46"}),
    "HighwaterLoadControlNet": (load_controlnet, {"badge": "29.2M gpu:0", "width": 350}),
    "HighwaterLoadCLIPVision": (load_clip_vision, {"badge": "streams 16/24"}),
    "HighwaterManageModel": (manage_model, {"badge": "streams 6/9"}),
    "HighwaterManageCLIP": (manage_clip, {"badge": "155M gpu:0"}),
    "HighwaterManageVAE": (manage_vae, {"badge": "4.7M gpu:1"}),
    "HighwaterVerify": (verify, {"text": "equal", "width": 420}),
    "HighwaterQuantizeFile": (quantize_file, {"text": "weights in int8", "width": 360}),
    "HighwaterRelease": (release, {"text": "free", "width": 260}),
    "HighwaterKeep": (keep, {"text": "evicted last", "width": 260}),
    "HighwaterWatermark": (watermark, {"width": 260}),
    "HighwaterPrecision": (precision, {"width": 300}),
    "HighwaterLimits": (limits, {"text": "at most 2", "width": 310}),
    "HighwaterLoadPipeline": (load_pipeline, {"badge": "streams 11/33"}),
    "HighwaterSamplePipeline": (sample_pipeline, {"badge": "+1.3M gpu:0"}),
    "HighwaterSaveImage": (save_image, {"width": 260, "height": 230}),
    "HighwaterVerifyPipeline": (verify_pipeline, {"text": "equal", "width": 420}),
}


def build(make: Callable[[Graph], None]) -> dict[str, Any]:
    graph = Graph()
    make(graph)
    # Without titles of its own the page gives each node its name.
    return {node_id: {key: node[key] for key in ("class_type", "inputs")} for node_id, node in graph.nodes.items()}


HELP_GRAPHS = {node_id: HelpGraph(graph=build(make), **shown) for node_id, (make, shown) in BUILD.items()}
