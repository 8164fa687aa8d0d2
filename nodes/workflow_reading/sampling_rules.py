"""Nodes that sample; guiders and noise levels."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from .description import DIFFUSION, PIPELINE, VAE, Call
from .node_values import Guide, NodeReading, Picture, Rule, Steps
from .prompt_rules import encode_text

__all__ = ["SAMPLING_RULES"]

# A noise level; a text of so many characters has more of them than any sampler takes.
NUMBER = re.compile(r"\d+(\.\d*)?|\.\d+")
MAX_TEXT = 10_000

# -- guidance


def conds_for(cfg: float | None) -> int | None:
    """Return how often a step evaluates the model: at guidance 1 ComfyUI leaves the negative prompt out."""
    return None if cfg is None else 1 if abs(cfg - 1.0) < 1e-6 else 2


def guide(node: NodeReading) -> Sequence[Any]:
    cfg = node.number("cfg")
    conditioning = node.conditioning("positive", "negative")
    return (Guide(node.held("model", DIFFUSION), conds_for(cfg), cfg, conditioning),)


def guide_alone(node: NodeReading) -> Sequence[Any]:
    return (Guide(node.held("model", DIFFUSION), 1, 1.0, node.conditioning("conditioning")),)


def guide_twice(cfg: str, names: Sequence[str], node: NodeReading) -> Sequence[Any]:
    """Guiders of three evaluations: two prompts and a negative or empty one."""
    return (Guide(node.held("model", DIFFUSION), 3, node.number(cfg), node.conditioning(*names)),)


def guide_two_modalities(node: NodeReading) -> Sequence[Any]:
    values = node.number("video_cfg"), node.number("audio_cfg")
    conds = None if None in values else max(conds_for(value) or 1 for value in values)
    return (Guide(node.held("model", DIFFUSION), conds, values[0], node.conditioning("positive", "negative")),)


def guide_two_models(node: NodeReading) -> Sequence[Any]:
    """DualModelGuider: the negative prompt is evaluated by a second model."""
    cfg, other = node.number("cfg"), None
    if node.is_linked("model_negative"):
        other = node.held("model_negative", DIFFUSION)
    conditioning = node.conditioning("positive", "negative")
    conds = 1 if other else conds_for(cfg)
    return (Guide(node.held("model", DIFFUSION), conds, cfg, conditioning, (other,) if other else ()),)


# -- noise levels


def steps_of(node: NodeReading) -> Sequence[Any]:
    """Schedulers of as many steps as they say, from however much noise."""
    return (whole_steps(node, node.number("denoise", 1.0)),)


def fewer_steps(node: NodeReading) -> Sequence[Any]:
    """Schedulers whose steps become fewer with less noise."""
    steps, denoise = whole_steps(node, node.number("denoise", 1.0)), node.number("denoise", 1.0)
    if steps.number is None or denoise is None:
        return (replace(steps, number=None, why=f"steps: {node.name.label}: denoise {node.why_unread('denoise')}"),)
    return (replace(steps, number=round(steps.number * min(1.0, max(0.0, denoise)))),)


def whole_steps(node: NodeReading, denoise: float | None) -> Steps:
    number = node.whole("steps")
    why = "" if number is not None else f"steps: {node.name.label}: steps {node.why_unread('steps')}"
    return Steps(0 if denoise == 0 else number, denoise, why)


def manual_steps(node: NodeReading) -> Sequence[Any]:
    text = node.text("sigmas")
    if text is None:
        return (Steps(None, why=f"steps: {node.name.label}: sigmas {node.why_unread('sigmas')}"),)
    return (Steps(max(0, sum(1 for _ in NUMBER.finditer(text[:MAX_TEXT])) - 1), 1.0),)


def split_steps(node: NodeReading) -> Sequence[Any]:
    steps, at = read_steps(node), node.whole("step")
    if steps.number is None or at is None:
        why = steps.why or f"steps: {node.name.label}: step {node.why_unread('step')}"
        return (replace(steps, number=None, why=why),) * 2
    return replace(steps, number=min(at, steps.number)), replace(steps, number=max(0, steps.number - at))


def split_by_denoise(node: NodeReading) -> Sequence[Any]:
    steps, denoise = read_steps(node), node.number("denoise")
    if steps.number is None or denoise is None:
        return (replace(steps, number=None, why=steps.why or f"steps: {node.name.label}"),) * 2
    low = round(steps.number * min(1.0, max(0.0, denoise)))
    return replace(steps, number=steps.number - low), replace(steps, number=low)


def same_steps(node: NodeReading) -> Sequence[Any]:
    return (read_steps(node),)


def more_steps(node: NodeReading) -> Sequence[Any]:
    return (Steps(None, why=f"steps: {node.name.label}: adds as many as fall between two noise levels"),)


def read_steps(node: NodeReading) -> Steps:
    found = node.find("sigmas", lambda value: isinstance(value, Steps))
    if found is not None:
        return found  # type: ignore[no-any-return]
    where = f"come from {node.source('sigmas')}" if node.is_linked("sigmas") else "are not linked"
    return Steps(None, why=f"steps: {node.name.label}: sigmas {where}")


# -- sampling


def sample_with(node: NodeReading, guided: Guide, steps: Steps, latents: Picture, *, wanted: str = "model") -> None:
    """Note one call for each model that samples."""
    unknown = [steps.why] if steps.number is None else ["0 steps: it computes nothing"] if steps.number == 0 else []
    if guided.conds is None:
        unknown.append(f"conds: {node.name.label}: cfg is not known")
    references = tuple(size for _, size in guided.conditioning.references)
    for held in (guided.model, *guided.other_models):
        node.use(
            Call.SAMPLE,
            held,
            wanted=wanted,
            size=latents,
            beside=tuple(dict.fromkeys((*guided.conditioning.controls, *(held.patches if held else ())))),
            steps=steps.number,
            cfg=guided.cfg,
            conds=guided.conds,
            denoise=steps.denoise,
            references=references,
            unknown=unknown,
        )


def sample(node: NodeReading) -> Sequence[Any]:
    (guided,) = guide(node)
    (steps,) = steps_of(node)
    latents = node.picture("latent_image")
    sample_with(node, guided, steps, latents)
    return (latents,)


def sample_part(node: NodeReading) -> Sequence[Any]:
    """KSamplerAdvanced: some of the steps."""
    (guided,) = guide(node)
    steps = whole_steps(node, None)
    begin, end = node.whole("start_at_step", 0), node.whole("end_at_step", 10_000)
    if steps.number is not None and begin is not None and end is not None:
        done = max(0, min(steps.number, end) - begin)
        denoise = 1.0 - min(begin, steps.number) / steps.number if steps.number else 0.0
        steps = Steps(done, denoise)
    elif steps.number is not None:
        name = "start_at_step" if begin is None else "end_at_step"
        steps = Steps(None, why=f"steps: {node.name.label}: {name} {node.why_unread(name)}")
    latents = node.picture("latent_image")
    sample_with(node, guided, steps, latents)
    return (latents,)


def sample_custom(node: NodeReading) -> Sequence[Any]:
    (guided,) = guide(node)
    latents = node.picture("latent_image")
    sample_with(node, guided, read_steps(node), latents)
    return (latents, latents)


def sample_guided(node: NodeReading) -> Sequence[Any]:
    guided = node.find("guider", lambda value: isinstance(value, Guide)) or Guide(None, None, None)
    latents = node.picture("latent_image")
    sample_with(node, guided, read_steps(node), latents, wanted="guider")
    return (latents, latents)


def sample_pipeline(node: NodeReading) -> Sequence[Any]:
    """A whole pipeline: prompts, steps and decoding, in one node."""
    held, picture = node.held("pipeline", PIPELINE), pipeline_size(node)
    guidance, texts = node.number("guidance"), [node.text("prompt"), node.text("negative_prompt")]
    prompt = None if texts[0] is None else "\n".join(filter(None, texts))
    node.use(Call.ENCODE_TEXT, held, wanted="pipeline", prompt=prompt)
    sample_with(node, Guide(held, conds_above(guidance), guidance), whole_steps(node, 1.0), picture, wanted="pipeline")
    node.use(Call.DECODE, held, wanted="pipeline", size=picture)
    return (picture,)


def pipeline_size(node: NodeReading) -> Picture:
    """Return the size that a pipeline's own widgets give, to the pixel."""
    return replace(node.size(length="frames" if "frames" in node.inputs else None, step=1), is_latent=False)


def conds_above(guidance: float | None) -> int | None:
    """Return how often a step of a pipeline evaluates the model: diffusers guides above 1 only."""
    return None if guidance is None else 1 if guidance <= 1 else 2


def verify(node: NodeReading) -> Sequence[Any]:
    """HighwaterVerify: one call of each part that is linked to it."""
    latents, wide = node.picture("latent_image"), node.picture("image")
    if node.is_linked("model"):
        sample_with(node, guide(node)[0], Steps(1, 1.0), latents)
    if node.is_linked("clip"):
        encode_text(("text",), node)
    if node.is_linked("vae"):
        call = Call.ENCODE if node.is_linked("image") else Call.DECODE
        node.use(call, node.held("vae", VAE), wanted="vae", size=wide if call is Call.ENCODE else latents)
    return ()


def verify_pipeline(node: NodeReading) -> Sequence[Any]:
    """HighwaterVerifyPipeline: one step of a pipeline."""
    held, picture = node.held("pipeline", PIPELINE), pipeline_size(node)
    guidance = node.number("guidance")
    node.use(Call.ENCODE_TEXT, held, wanted="pipeline", prompt=node.text("prompt"))
    sample_with(node, Guide(held, conds_above(guidance), guidance), Steps(1, 1.0), picture, wanted="pipeline")
    node.use(Call.DECODE, held, wanted="pipeline", size=picture)
    return ()


# Guiders and noise levels; then samplers' methods and noise, which are not read.
SCHEDULERS = """
    BasicScheduler KarrasScheduler ExponentialScheduler PolyexponentialScheduler LaplaceScheduler VPScheduler
    BetaSamplingScheduler Ideogram4Scheduler Flux2Scheduler LTXVScheduler SDTurboScheduler
"""

SAMPLING_RULES: dict[str, Rule] = {
    "CFGGuider": guide,
    "BasicGuider": guide_alone,
    "DualCFGGuider": partial(guide_twice, "cfg_conds", ("cond1", "cond2", "negative")),
    "PerpNegGuider": partial(guide_twice, "cfg", ("positive", "negative", "empty_conditioning")),
    "LTXVDualCFGGuider": guide_two_modalities,
    "DualModelGuider": guide_two_models,
    **dict.fromkeys(SCHEDULERS.split(), steps_of),
    **dict.fromkeys(["AlignYourStepsScheduler", "GITSScheduler", "OptimalStepsScheduler"], fewer_steps),
    "ManualSigmas": manual_steps,
    "SplitSigmas": split_steps,
    "SplitSigmasDenoise": split_by_denoise,
    "FlipSigmas": same_steps,
    "SetFirstSigma": same_steps,
    "ExtendIntermediateSigmas": more_steps,
    "KSampler": sample,
    "KSamplerAdvanced": sample_part,
    "SamplerCustom": sample_custom,
    "SamplerCustomAdvanced": sample_guided,
    "HighwaterSamplePipeline": sample_pipeline,
    "HighwaterVerifyPipeline": verify_pipeline,
    "HighwaterVerify": verify,
}
