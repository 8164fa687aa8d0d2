"""A loaded pipeline, and what it makes: images, or the frames of a video."""

from __future__ import annotations

import inspect
import sys
import weakref
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from .diffusers_pipelines import quiet_libraries

if TYPE_CHECKING:
    import torch

    from ...memory import Managed
    from ...memory.manager.vae_room import VaeRoom
    from ..watermark import DeviceWatermark

__all__ = ["FRAME_STEP", "PIXEL_STEP", "LoadedPipeline", "Sampling", "arguments_of", "sample_images"]

# Pixels per latent (8) times latents per patch (2): what every supported pipeline can cut.
PIXEL_STEP = 16
FRAME_STEP = 4
# What diffusers calls how many it makes at once of each prompt.
BATCH_ARGUMENTS = ("num_images_per_prompt", "num_videos_per_prompt")


@dataclass(frozen=True, kw_only=True, eq=False)
class LoadedPipeline:
    """The value that our nodes pass on; dropping the last reference (a host's cached output) frees its memory.

    Has no slots: `weakref.finalize` needs a weak reference, and ``weakref_slot`` exists only since Python 3.11.
    """

    pipe: Any
    managed: Managed
    watermark: DeviceWatermark | None = None
    traced: set[Sampling] = field(default_factory=set)
    """The sizes of which is known what they take."""

    def __post_init__(self) -> None:
        # A host has no call for "this output was dropped". At interpreter exit the process frees everything.
        weakref.finalize(self, self.managed.discard).atexit = False

    def sample(self, sampling: Sampling, *, on_step: Callable[[int, int], None]) -> torch.Tensor:
        """Make images as `sample_images` does, under the watermark of this pipeline's own workflow.

        The watermark is set again because another workflow may have set its own since this one was loaded.
        """
        if self.watermark is not None:
            self.watermark.apply()
        self.expect_needs(sampling)
        return sample_images(self.pipe, sampling, on_step=on_step, vae_room=self.managed.manager.vae_room)

    def expect_needs(self, sampling: Sampling) -> None:
        """Tell what each part will take at this size, so that the first run of it keeps that free.

        Traces a step on the meta device, the first time that a size is sampled: a second or so. Where that cannot be
        traced, what runs need is learned from them.
        """
        from ...memory.tracing import Untraceable
        from .pipeline_traces import trace_pipeline

        form = sampling.form
        if form in self.traced or not self.managed.has_devices():
            return
        self.traced.add(form)
        try:
            calls = trace_pipeline(self.pipe, sampling)
        except Untraceable:
            return
        peaks: dict[str, int] = {}
        for call in calls:
            peaks[call.part] = max(peaks.get(call.part, 0), call.trace.peak_bytes)
        self.managed.expect(peaks)


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampling:
    """What one call of a pipeline is asked for; sizes in pixels."""

    prompt: str
    negative_prompt: str
    width: int
    height: int
    frames: int
    steps: int
    guidance: float
    seed: int
    batch_size: int = 1

    @property
    def form(self) -> Sampling:
        """What of it decides how much memory it takes: size, frames, batch, and whether a step has two conditions."""
        return replace(self, prompt="", negative_prompt="", seed=0, steps=1, guidance=float(self.guidance > 1))


def sample_images(
    pipe: Any, sampling: Sampling, *, on_step: Callable[[int, int], None], vae_room: VaeRoom | None = None
) -> torch.Tensor:
    """Run a pipeline; return its images or frames as [B, H, W, C] float32 from 0 to 1 on the CPU.

    The noise is drawn on the CPU, so that a seed gives the same image on every device. ``on_step`` is called
    with the steps done and asked for; what it raises (an interrupt) ends the call. The VAE decodes in tiles where one
    piece does not fit beside what stays on its device.

    Raises:
        InvalidInput: a size, a batch or a number of frames that the pipeline cannot make.
    """
    import torch

    from ...memory import default_manager
    from .tiled_decode import choosing_tiles

    arguments = arguments_of(pipe, sampling)
    if "callback_on_step_end" in inspect.signature(pipe.__call__).parameters:
        arguments["callback_on_step_end"] = report_steps(sampling.steps, on_step)
    with quiet_libraries(), choosing_tiles(pipe, vae_room or default_manager().vae_room):
        images = pipe(**arguments)[0]
    # Videos come as [batch, frames, H, W, C].
    return torch.from_numpy(images).reshape(-1, *images.shape[-3:]).float().clamp(0.0, 1.0)


def arguments_of(pipe: Any, sampling: Sampling) -> dict[str, Any]:
    """Return what a pipeline is called with, of the arguments that it takes.

    Raises:
        InvalidInput: a size or a number of frames that the pipeline cannot make.
    """
    import torch

    accepted = inspect.signature(pipe.__call__).parameters
    check_sampling(pipe, sampling, accepted)
    wanted = {
        "prompt": sampling.prompt,
        "negative_prompt": sampling.negative_prompt,
        "width": sampling.width,
        "height": sampling.height,
        "num_frames": sampling.frames,
        "num_inference_steps": sampling.steps,
        "guidance_scale": sampling.guidance,
        **dict.fromkeys(BATCH_ARGUMENTS, sampling.batch_size),
        "generator": torch.Generator("cpu").manual_seed(sampling.seed),
        "output_type": "np",
        "return_dict": False,
    }
    if "max_sequence_length" in accepted:
        wanted["max_sequence_length"] = min(accepted["max_sequence_length"].default, longest_prompt(pipe))
    return {name: value for name, value in wanted.items() if name in accepted}


def longest_prompt(pipe: Any) -> int:
    """Return how many tokens the pipeline's tokenizers allow at most; padding beyond that only costs memory."""
    tokenizers = [part for part in pipe.components.values() if hasattr(part, "model_max_length")]
    return max((tokenizer.model_max_length for tokenizer in tokenizers), default=sys.maxsize)


def check_sampling(pipe: Any, sampling: Sampling, accepted: Collection[str]) -> None:
    """Refuse what the library would round or quietly ignore; it accepts arguments of these names."""
    from ...memory.errors import InvalidInput
    from ..prompts import invalid_character

    for name in ("prompt", "negative_prompt"):
        if (problem := invalid_character(getattr(sampling, name))) is not None:
            raise InvalidInput(f"{name} {problem}; allowed: text that UTF-8 can encode")
    for name in ("width", "height"):
        pixels = getattr(sampling, name)
        if pixels % PIXEL_STEP:
            raise InvalidInput(f"{name} {pixels} is not allowed; allowed: multiples of {PIXEL_STEP}")
    if sampling.batch_size > 1 and not any(name in accepted for name in BATCH_ARGUMENTS):
        raise InvalidInput(
            f"batch_size {sampling.batch_size} is not allowed; allowed: 1, as {type(pipe).__name__} makes one at a time"
        )
    if sampling.frames > 1 and "num_frames" not in accepted:
        raise InvalidInput(
            f"frames {sampling.frames} is not allowed; allowed: 1, as {type(pipe).__name__} makes single images"
        )
    if sampling.frames % FRAME_STEP != 1:
        raise InvalidInput(f"frames {sampling.frames} is not allowed; allowed: 1, 5, 9, 13, ... (4n + 1)")


def report_steps(steps: int, on_step: Callable[[int, int], None]) -> Callable[..., dict[str, Any]]:
    """Return the callback that the pipeline calls after every step."""

    def step_ended(_pipe: Any, step: int, _timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        on_step(step + 1, steps)
        return tensors

    return step_ended
