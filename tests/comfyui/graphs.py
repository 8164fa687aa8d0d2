"""API-format graphs over the random models, with loaders of core's or of ours in the same places."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

__all__ = ["CASES", "CORE", "Graph", "Loaders", "sample_flux"]

Link = list[Any]  # a node's id and the number of its output
# A new number makes the host run a sampler again whose inputs it has seen.
new_run = itertools.count(1)


@dataclass
class Graph:
    """A prompt that grows node by node."""

    nodes: dict[str, dict[str, Any]] = field(default_factory=dict)

    def add(self, class_type: str, **inputs: Any) -> Link:
        """Add a node; returns the link to its first output."""
        node_id = str(len(self.nodes) + 1)
        self.nodes[node_id] = {"class_type": class_type, "inputs": inputs, "_meta": {"title": class_type}}
        return [node_id, 0]

    def keep(self, value: Link, name: str = "kept") -> None:
        self.add("TestKeep", value=value, name=name)

    def conditioning(self, seed: int, *, num_tokens: int = 8, width: int = 64) -> Link:
        return self.add(
            "TestConditioning", seed=seed, num_tokens=num_tokens, width=width, pooled_width=768, run=next(new_run)
        )

    def sampler(
        self, model: Link, positive: Link, negative: Link, latent: Link, *, cfg: float = 1.0, steps: int = 2
    ) -> Link:
        return self.add(
            "KSampler",
            model=model,
            positive=positive,
            negative=negative,
            latent_image=latent,
            seed=3,
            steps=steps,
            cfg=cfg,
            sampler_name="euler",
            scheduler="simple",
            denoise=1.0,
        )


@dataclass(frozen=True, kw_only=True)
class Loaders:
    """Which nodes load: core's, ours, or core's followed by our Manage node."""

    kind: str = "ours"
    profile: str = "auto"
    precision: str = "as stored"
    placement: str = "default"
    engine: str = "auto"
    weight_dtype: str = "default"  # of core's diffusion model
    halves: bool = False  # core computes the conditionings of a step one after the other

    @property
    def request(self) -> dict[str, str]:
        names = ("profile", "precision", "placement", "engine")
        return {name: getattr(self, name) for name in names}

    def diffusion_model(self, graph: Graph, name: str = "tiny_flux.safetensors") -> Link:
        if self.kind == "ours":
            return graph.add("HighwaterLoadDiffusionModel", unet_name=name, **self.request)
        model = graph.add("UNETLoader", unet_name=name, weight_dtype=self.weight_dtype)
        return self.manage(graph, "HighwaterManageModel", model=model)

    def text_encoder(self, graph: Graph, name: str = "clip_l.safetensors") -> Link:
        if self.kind == "ours":
            return graph.add("HighwaterLoadTextEncoder", clip_name1=name, type="stable_diffusion", **self.request)
        clip = graph.add("CLIPLoader", clip_name=name, type="stable_diffusion", device="default")
        return self.manage(graph, "HighwaterManageCLIP", clip=clip)

    def vae(self, graph: Graph, name: str = "tiny_vae.safetensors") -> Link:
        if self.kind == "ours":
            return graph.add("HighwaterLoadVAE", vae_name=name, **self.request)
        return self.manage(graph, "HighwaterManageVAE", vae=graph.add("VAELoader", vae_name=name))

    def checkpoint(self, graph: Graph, name: str = "shallow_sd.safetensors") -> tuple[Link, Link, Link]:
        ours = self.kind == "ours"
        node = "HighwaterLoadCheckpoint" if ours else "CheckpointLoaderSimple"
        node_id, _ = graph.add(node, ckpt_name=name, **(self.request if ours else {}))
        model, clip, vae = ([node_id, index] for index in range(3))
        return (
            self.manage(graph, "HighwaterManageModel", model=model),
            self.manage(graph, "HighwaterManageCLIP", clip=clip),
            self.manage(graph, "HighwaterManageVAE", vae=vae),
        )

    def controlnet(self, graph: Graph, name: str = "shallow_sd_control.safetensors") -> Link:
        if self.kind == "ours":
            return graph.add("HighwaterLoadControlNet", control_net_name=name, **self.request)
        return graph.add("ControlNetLoader", control_net_name=name)

    def clip_vision(self, graph: Graph, name: str = "clip_vision.safetensors") -> Link:
        if self.kind == "ours":
            return graph.add("HighwaterLoadCLIPVision", clip_name=name, **self.request)
        return graph.add("CLIPVisionLoader", clip_name=name)

    def manage(self, graph: Graph, node: str, **model: Link) -> Link:
        (link,) = model.values()
        if self.halves and "model" in model:
            link = graph.add("TestHalves", model=link)
        return graph.add(node, **model, **self.request) if self.kind == "managed" else link


CORE = Loaders(kind="core")
CORE_IN_HALVES = Loaders(kind="core", halves=True)


def sample_flux(
    graph: Graph, model: Link, *, cfg: float = 1.0, steps: int = 2, batch: int = 1, size: int = 64, seed: int = 1
) -> Link:
    latent = graph.add("EmptySD3LatentImage", width=size, height=size, batch_size=batch)
    return graph.sampler(model, graph.conditioning(seed), graph.conditioning(2), latent, cfg=cfg, steps=steps)


def lora(graph: Graph, model: Link, strength: float, name: str = "tiny_flux_lora.safetensors") -> Link:
    return graph.add("LoraLoaderModelOnly", model=model, lora_name=name, strength_model=strength)


# -- what is compared: each case builds a graph that keeps tensors


def plain(graph: Graph, loaders: Loaders) -> None:
    graph.keep(sample_flux(graph, loaders.diffusion_model(graph)))


def images(graph: Graph, loaders: Loaders) -> None:
    latent = sample_flux(graph, loaders.diffusion_model(graph))
    graph.keep(graph.add("VAEDecode", samples=latent, vae=loaders.vae(graph)))


def encoded_image(graph: Graph, loaders: Loaders) -> None:
    image = graph.add("EmptyImage", width=64, height=64, batch_size=1, color=0x336699)
    graph.keep(graph.add("VAEEncode", pixels=image, vae=loaders.vae(graph)))


def autoencoder(graph: Graph, loaders: Loaders) -> None:
    vae = loaders.vae(graph, "autoencoder.safetensors")
    image = graph.add("EmptyImage", width=64, height=64, batch_size=1, color=0x336699)
    latent = graph.add("VAEEncode", pixels=image, vae=vae)
    graph.keep(latent, "latent")
    graph.keep(graph.add("VAEDecode", samples=latent, vae=vae), "image")


def lora_at_1(graph: Graph, loaders: Loaders) -> None:
    graph.keep(sample_flux(graph, lora(graph, loaders.diffusion_model(graph), 1.0)))


def quantized(graph: Graph, loaders: Loaders) -> None:
    """A file in eight bits with scales, which core keeps as tensors of a class of its own; with a LoRA beside it."""
    model = loaders.diffusion_model(graph, "tiny_flux_fp8.safetensors")
    graph.keep(sample_flux(graph, model))
    graph.keep(sample_flux(graph, lora(graph, model, 1.0)), "kept-lora")


def quantized_alone(graph: Graph, loaders: Loaders) -> None:
    graph.keep(sample_flux(graph, loaders.diffusion_model(graph, "tiny_flux_fp8.safetensors")))


def lora_at_half(graph: Graph, loaders: Loaders) -> None:
    graph.keep(sample_flux(graph, lora(graph, loaders.diffusion_model(graph), 0.5)))


def two_loras(graph: Graph, loaders: Loaders) -> None:
    model = lora(graph, loaders.diffusion_model(graph), 1.0)
    graph.keep(sample_flux(graph, lora(graph, model, -0.7, "other_flux_lora.safetensors")))


def model_sampling(graph: Graph, loaders: Loaders) -> None:
    model = loaders.diffusion_model(graph)
    model = graph.add("ModelSamplingFlux", model=model, max_shift=1.5, base_shift=0.5, width=128, height=128)
    graph.keep(sample_flux(graph, model))


def skipped_blocks(graph: Graph, loaders: Loaders) -> None:
    model = loaders.diffusion_model(graph)
    model = graph.add(
        "SkipLayerGuidanceDiTSimple",
        model=model,
        double_layers="1",
        single_layers="2,3",
        start_percent=0.0,
        end_percent=1.0,
    )
    graph.keep(sample_flux(graph, model, cfg=3.0))


def clones_with_different_patches(graph: Graph, loaders: Loaders) -> None:
    model = loaders.diffusion_model(graph)
    graph.keep(sample_flux(graph, lora(graph, model, 1.0)), "kept")
    graph.keep(sample_flux(graph, lora(graph, model, 0.5, "other_flux_lora.safetensors")), "kept-other")
    graph.keep(sample_flux(graph, model), "kept-plain")


def guided(graph: Graph, loaders: Loaders) -> None:
    graph.keep(sample_flux(graph, loaders.diffusion_model(graph), cfg=3.0))


def batch_of_two(graph: Graph, loaders: Loaders) -> None:
    graph.keep(sample_flux(graph, loaders.diffusion_model(graph), batch=2, cfg=3.0))


def two_prompts(graph: Graph, loaders: Loaders) -> None:
    """Combined conditionings of different lengths: the sampler calls the model more than once per step."""
    model = loaders.diffusion_model(graph)
    positive = graph.add(
        "ConditioningCombine",
        conditioning_1=graph.conditioning(1, num_tokens=8),
        conditioning_2=graph.conditioning(5, num_tokens=5),
    )
    latent = graph.add("EmptySD3LatentImage", width=64, height=64, batch_size=1)
    graph.keep(graph.sampler(model, positive, graph.conditioning(2), latent, cfg=3.0))


def weight_hook(graph: Graph, loaders: Loaders) -> None:
    """A LoRA that holds for one conditioning only: core writes it into the weights between two calls."""
    model = lora(graph, loaders.diffusion_model(graph), 0.5, "other_flux_lora.safetensors")
    hooks = graph.add("CreateHookLoraModelOnly", lora_name="tiny_flux_lora.safetensors", strength_model=0.8)
    positive = graph.add(
        "ConditioningSetProperties",
        cond_NEW=graph.conditioning(1),
        strength=1.0,
        set_cond_area="default",
        hooks=hooks,
    )
    latent = graph.add("EmptySD3LatentImage", width=64, height=64, batch_size=1)
    graph.keep(graph.sampler(model, positive, graph.conditioning(2), latent, cfg=3.0))


def merge(graph: Graph, loaders: Loaders) -> None:
    model = loaders.diffusion_model(graph)
    other = loaders.diffusion_model(graph, "other_flux.safetensors")
    graph.keep(sample_flux(graph, graph.add("ModelMergeSimple", model1=model, model2=other, ratio=0.3)))


def wan(graph: Graph, loaders: Loaders) -> None:
    model = loaders.diffusion_model(graph, "tiny_wan.safetensors")
    positive, negative = (graph.conditioning(seed, width=4096) for seed in (1, 2))
    latent = graph.add("EmptyHunyuanLatentVideo", width=64, height=64, length=5, batch_size=1)
    graph.keep(graph.sampler(model, positive, negative, latent, cfg=3.0))


def merge_wan(graph: Graph, loaders: Loaders) -> None:
    """Core's loader leaves parameters of modules with children, such as ``modulation``, without patches."""
    model = loaders.diffusion_model(graph, "tiny_wan.safetensors")
    other = loaders.diffusion_model(graph, "other_wan.safetensors")
    merged = graph.add("ModelMergeSimple", model1=model, model2=other, ratio=0.3)
    positive, negative = (graph.conditioning(seed, width=4096) for seed in (1, 2))
    latent = graph.add("EmptyHunyuanLatentVideo", width=64, height=64, length=5, batch_size=1)
    graph.keep(graph.sampler(merged, positive, negative, latent, cfg=3.0))
    graph.keep(graph.sampler(model, positive, negative, latent, cfg=3.0), "kept-plain")


def text(graph: Graph, loaders: Loaders) -> None:
    clip = loaders.text_encoder(graph)
    graph.keep(graph.add("CLIPTextEncode", text="a lighthouse at (high:1.2) water", clip=clip))


def vision(graph: Graph, loaders: Loaders) -> None:
    image = graph.add("EmptyImage", width=64, height=64, batch_size=1, color=0x336699)
    graph.keep(graph.add("CLIPVisionEncode", clip_vision=loaders.clip_vision(graph), image=image, crop="center"))


def sd_conditioning(graph: Graph, clip: Link) -> tuple[Link, Link]:
    return graph.add("CLIPTextEncode", text="high water", clip=clip), graph.add("CLIPTextEncode", text="", clip=clip)


def checkpoint(graph: Graph, loaders: Loaders) -> None:
    model, clip, vae = loaders.checkpoint(graph)
    latent = graph.add("EmptyLatentImage", width=32, height=32, batch_size=1)
    latent = graph.sampler(model, *sd_conditioning(graph, clip), latent, cfg=3.0, steps=1)
    graph.keep(graph.add("VAEDecode", samples=latent, vae=vae))


def lora_on_text(graph: Graph, loaders: Loaders) -> None:
    """One LoRA for both models of a checkpoint, at different strengths; then the text encoder without it."""
    model, clip, _ = loaders.checkpoint(graph)
    node_id, _ = graph.add(
        "LoraLoader",
        model=model,
        clip=clip,
        lora_name="shallow_sd_lora.safetensors",
        strength_model=1.0,
        strength_clip=0.7,
    )
    positive, negative = sd_conditioning(graph, [node_id, 1])
    latent = graph.add("EmptyLatentImage", width=32, height=32, batch_size=1)
    graph.keep(graph.sampler([node_id, 0], positive, negative, latent, cfg=3.0, steps=1))
    graph.keep(positive, "kept-text")
    graph.keep(sd_conditioning(graph, clip)[0], "kept-plain-text")


def controlnet(graph: Graph, loaders: Loaders) -> None:
    model, clip, _ = loaders.checkpoint(graph)
    positive, negative = sd_conditioning(graph, clip)
    image = graph.add("EmptyImage", width=32, height=32, batch_size=1, color=0x336699)
    node_id, _ = graph.add(
        "ControlNetApplyAdvanced",
        positive=positive,
        negative=negative,
        control_net=loaders.controlnet(graph),
        image=image,
        strength=1.0,
        start_percent=0.0,
        end_percent=1.0,
    )
    latent = graph.add("EmptyLatentImage", width=32, height=32, batch_size=1)
    graph.keep(graph.sampler(model, [node_id, 0], [node_id, 1], latent, cfg=3.0, steps=1))


CASES: dict[str, Callable[[Graph, Loaders], None]] = {
    case.__name__: case
    for case in (
        plain,
        images,
        encoded_image,
        autoencoder,
        lora_at_1,
        lora_at_half,
        two_loras,
        model_sampling,
        skipped_blocks,
        clones_with_different_patches,
        guided,
        batch_of_two,
        two_prompts,
        weight_hook,
        merge,
        quantized,
        quantized_alone,
        wan,
        merge_wan,
        text,
        vision,
        checkpoint,
        lora_on_text,
        controlnet,
    )
}
