"""What the parts of a pipeline are predicted to take in a run, from traces of one step on the meta device."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from .call_seconds import Computed, MeasuredSeconds, StatedSeconds, precision_asked
from .device_choices import accelerator_names
from .planned_calls import PlannedCall, Prediction, calls_of, use_of
from .workflow_reading.description import PIPELINE, Call, WorkflowUse

if TYPE_CHECKING:
    from ..memory.planner.run import BlockTimes, Tiling, Use
    from ..memory.tracing import CallTrace, Trace
    from ..memory.weights.component import Component
    from .call_seconds import CallSeconds
    from .described_hardware import DeviceRates
    from .pipelines.sampling import Sampling

__all__ = ["PipelinePredictor", "know_rates", "known_seconds"]


Blocks: TypeAlias = tuple[tuple[str, tuple[str, ...]], ...]
"""The parts of a pipeline, each with the paths of its blocks."""
described_rates: dict[str, DeviceRates] = {}
"""By device, how fast those compute that this process simulates."""


def know_rates(rates: Mapping[str, DeviceRates]) -> None:
    """Note how fast the devices of this process compute, as far as that was said."""
    described_rates.clear()
    described_rates.update(rates)


class PipelinePredictor:
    """Predicts calls of pipelines by running their own code without weights, once for each size and cut into blocks.

    Args:
        seconds: tells what traced calls take.
        loaded: the pipeline where it is loaded already.
    """

    def __init__(self, seconds: CallSeconds, loaded: Any = None) -> None:
        self.seconds = seconds
        self.loaded = loaded
        self.described: dict[Path, Any] = {}
        """Pipelines without weights, by folder."""
        self.traced: dict[tuple[Path, Sampling, Blocks], Sequence[CallTrace]] = {}
        self.failed: dict[tuple[Path, Sampling], str] = {}
        """Why a size of a pipeline cannot be traced."""

    def __call__(self, call: PlannedCall) -> Prediction | None:
        """Return what a part takes in a call of a pipeline; None for other models, and where it cannot be traced."""
        from ..memory.errors import InvalidInput
        from ..memory.tracing import Untraceable

        use, folder, sampling = call.use, call.paths[0], sampling_of(call.of_node)
        if call.model.kind != PIPELINE or sampling is None or (folder, sampling) in self.failed:
            return None
        blocks = tuple((own_name(part), tuple(block.name for block in part.blocks)) for part in call.parts)
        if (folder, sampling, blocks) not in self.traced:
            try:
                self.traced[folder, sampling, blocks] = self.trace(folder, sampling, blocks)
            except (InvalidInput, Untraceable) as error:
                self.failed[folder, sampling] = str(error)
                return None
        component = call.component
        calls = [traced for traced in self.traced[folder, sampling, blocks] if traced.part == own_name(component)]
        if use.call is Call.DECODE:
            calls = [traced for traced in calls if traced.method == "decode"] or calls
        if not calls:
            return None
        num_passes = len(calls) * (max(1, use.steps or 1) if use.call is Call.SAMPLE else 1)
        largest = max(calls, key=lambda call: call.peak_bytes)

        seconds, names = self.seconds, [block.name for block in component.blocks]  # what a plan keeps holds no pipeline
        computed = cache(lambda: Computed.of(component, precision_asked(call)))

        def times(trace: Trace) -> Mapping[str, BlockTimes]:
            return seconds.times(trace, component, computed, names=names)

        # Of several calls of a step it is behind the last alone.
        following = calls[0].following if len(calls) == 1 and num_passes > 1 else ()
        return Prediction(
            num_passes=num_passes,
            activation_bytes=largest.peak_bytes,
            held_bytes=largest.held_bytes,
            carried_bytes=largest.trace.carried_bytes,
            times=seconds.followed(times(largest.trace), following),
            tiling=self.tiling(folder, component, largest, times) if largest.method == "decode" else None,
        )

    def trace(self, folder: Path, sampling: Sampling, blocks: Blocks) -> Sequence[CallTrace]:
        from .pipelines.pipeline_traces import trace_pipeline

        return trace_pipeline(self.pipeline(folder), sampling, blocks=dict(blocks))

    def tiling(
        self, folder: Path, part: Component, call: CallTrace, times: Callable[[Trace], Mapping[str, BlockTimes]]
    ) -> Tiling | None:
        """Return how the VAE of a pipeline decodes in tiles; only its part ``vae`` does."""
        from .pipelines.decode_tiling import tiling_of

        vae = self.pipeline(folder).components.get("vae") if call.part == "vae" else None
        blocks = [block.name for block in part.blocks]
        return tiling_of(vae, call.inputs, call.trace.peak_bytes, times, blocks) if vae is not None else None

    def pipeline(self, folder: Path) -> Any:
        """Return the pipeline of a folder, without weights where it is not loaded."""
        from .pipelines.diffusers_pipelines import load_pipeline

        if self.loaded is not None:
            return self.loaded
        if folder not in self.described:
            self.described[folder] = load_pipeline(folder, without_weights=True)
        return self.described[folder]


def own_name(component: Component) -> str:
    """Return what a pipeline calls its part, which in a workflow of several may have its loader's number."""
    return component.name.partition(" (")[0]


def predict_uses(prompt: Any, node_id: str, pipe: Any) -> tuple[tuple[Use, ...], set[Sampling]]:
    """Return what a workflow computes with a loaded pipeline, and the sizes; nothing where that cannot be told.

    Args:
        prompt: the workflow, in API format.
        node_id: of the node that loads it.
    """
    from torch import nn

    from ..memory.errors import InvalidInput
    from ..memory.weights.module_component import component_from_module
    from .workflow_reading import read_workflow

    if not accelerator_names():
        return (), set()
    try:
        described = read_workflow(prompt)
    except InvalidInput:
        return (), set()
    components = [
        component_from_module(module, name=name)
        for name, module in pipe.components.items()
        if isinstance(module, nn.Module)
    ]
    predict = PipelinePredictor(known_seconds(), pipe)
    found = []
    for model in described.models:
        if model.node.id == node_id:
            for call in calls_of(described, model, components, (Path(),)):
                predicted = predict(call)
                if predicted is not None:
                    found.append(use_of(call, predicted))
    return tuple(found), {sampling.form for _, sampling, _ in predict.traced}


def known_seconds() -> CallSeconds:
    """Return what tells how long devices of this process compute: as was said of simulated ones, or measured."""
    from ..memory import default_manager

    return StatedSeconds(described_rates) if described_rates else MeasuredSeconds(default_manager())


def sampling_of(uses: Sequence[WorkflowUse]) -> Sampling | None:
    """Return what a node asks of a pipeline; None where its size is not known."""
    from .pipelines.sampling import Sampling

    sample = next((use for use in uses if use.call is Call.SAMPLE and use.size is not None), None)
    if sample is None or sample.size is None:
        return None
    prompt = next((use.prompt for use in uses if use.call is Call.ENCODE_TEXT and use.prompt), "")
    return Sampling(
        prompt=prompt,
        negative_prompt="",
        width=sample.size.width,
        height=sample.size.height,
        frames=sample.size.frames,
        batch_size=sample.size.batch,
        steps=1,
        guidance=sample.cfg if sample.cfg is not None else 1.0,
        seed=0,
    )
