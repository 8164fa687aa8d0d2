"""What each part of a pipeline takes beside its weights, found by running the pipeline on torch's meta device."""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

from .diffusers_pipelines import quiet_libraries

if TYPE_CHECKING:
    from torch import nn

    from ...memory.tracing import CallTrace
    from .sampling import Sampling

__all__ = ["trace_pipeline"]


def trace_pipeline(
    pipe: Any, sampling: Sampling, *, blocks: Mapping[str, Collection[str]] | None = None
) -> list[CallTrace]:
    """Return the calls that a pipeline makes of its parts for one step, in order: text encoders, denoiser, VAE.

    The pipeline's own code runs, with twins of its parts on the meta device, so each call has the inputs that it would
    have, and what the pipeline holds meanwhile counts: latents, embeddings, both halves of a guided step. Weights are
    neither read nor needed in memory; the pipeline is not changed. Costs a few seconds for a large one.

    Args:
        sampling: its number of steps does not matter.
        blocks: as in `trace_calls`.

    Raises:
        InvalidInput: as `sample_images`.
        Untraceable: a part, or the pipeline between them, needs values of tensors.
    """
    from torch import nn

    from ...memory.tracing import trace_calls
    from .sampling import arguments_of

    parts = {name: part for name, part in pipe.components.items() if isinstance(part, nn.Module)}
    arguments = arguments_of(pipe, sampling) | {"num_inference_steps": 1, "output_type": "pt"}
    arguments.pop("callback_on_step_end", None)

    def run(twins: dict[str, nn.Module]) -> None:
        with quiet_libraries():
            twin_of(pipe, twins)(**arguments)

    return trace_calls(parts, run, blocks=blocks)


def twin_of(pipe: Any, twins: dict[str, nn.Module]) -> Any:
    """Return a pipeline of the same class with other modules, and a scheduler of its own, which keeps state."""
    twin = object.__new__(type(pipe))
    vars(twin).update(vars(pipe) | twins)
    vars(twin)["scheduler"] = copy.deepcopy(pipe.scheduler)
    vars(twin)["_progress_bar_config"] = {"disable": True}
    return twin
