"""What the parts of a pipeline are predicted to take in a run, from traces of one step on the meta device."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from .device_choices import accelerator_names
from .planned_calls import PlannedCall, Prediction, calls_of, use_of
from .workflow_reading.description import PIPELINE, Call, WorkflowUse

if TYPE_CHECKING:
    from ..memory.planner.run import BlockTimes, Stretch, Tiling, Use
    from ..memory.tracing import CallTrace, Kernel, Trace
    from ..memory.weights.component import Component
    from .described_hardware import DeviceRates
    from .pipelines.sampling import Sampling

__all__ = ["PipelinePredictor", "know_rates", "times_of"]


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
        rates: by device, as far as they are known.
        loaded: the pipeline where it is loaded already.
    """

    def __init__(self, rates: Mapping[str, DeviceRates], loaded: Any = None) -> None:
        self.rates = rates
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

        by_device = self.rates  # what a plan keeps holds no pipeline

        def times(trace: Trace) -> dict[str, BlockTimes]:
            return {device: times_of(trace, component, rates) for device, rates in by_device.items()}

        # Of several calls of a step it is behind the last alone.
        following = calls[0].following if len(calls) == 1 and num_passes > 1 else ()
        largest_times = {
            device: replace(found, following=stretches_of([(None, following)], by_device[device]))
            for device, found in times(largest.trace).items()
        }

        return Prediction(
            num_passes=num_passes,
            activation_bytes=largest.peak_bytes,
            held_bytes=largest.held_bytes,
            carried_bytes=largest.trace.carried_bytes,
            times=largest_times,
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
    predict = PipelinePredictor(described_rates, pipe)
    found = []
    for model in described.models:
        if model.node.id == node_id:
            for call in calls_of(described, model, components, (Path(),)):
                predicted = predict(call)
                if predicted is not None:
                    found.append(use_of(call, predicted))
    return tuple(found), {sampling.form for _, sampling, _ in predict.traced}


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
        steps=1,
        guidance=sample.cfg if sample.cfg is not None else 1.0,
        seed=0,
    )


def times_of(trace: Trace, component: Component, rates: DeviceRates, names: Sequence[str] | None = None) -> BlockTimes:
    """Return what each block of a component computes in a traced call on a device of these rates.

    Args:
        names: what the trace calls its blocks, in their order; None: as the component does.
    """
    from ..memory.planner.run import BlockTimes
    from ..memory.tracing import seconds_of

    seconds = seconds_of(trace, **speeds_of(rates))
    if names is None:
        names = [block.name for block in component.blocks]
    blocks = tuple(seconds.blocks.get(name, 0.0) for name in names)
    numbers = {name: number for number, name in enumerate(names)}
    return BlockTimes(
        blocks_s=blocks,
        other_s=max(0.0, seconds.total_s - sum(blocks)),
        copy_launch_s=rates.launch_s,
        stretches=stretches_of([(numbers.get(part.block), part.kernels) for part in trace.segments], rates),
    )


def stretches_of(parts: Iterable[tuple[int | None, Sequence[Kernel]]], rates: DeviceRates) -> tuple[Stretch, ...]:
    """Return what kernels take on a device of these rates, and the host that launches them; each with its block."""
    from ..memory.planner.run import Stretch
    from ..memory.tracing import launched

    return tuple(
        Stretch(
            block=block,
            launch_s=part.launch_s,
            busy_s=part.busy_s,
            end_s=part.end_s,
            copy_s=part.copy_s,
        )
        for block, kernels in parts
        for part in launched(kernels, **speeds_of(rates))
    )


def speeds_of(rates: DeviceRates) -> dict[str, float]:
    return {
        "flops_per_s": rates.flops_per_s,
        "memory_bytes_per_s": rates.memory_bytes_per_s,
        "launch_s": rates.launch_s,
        "link_bytes_per_s": rates.link_bytes_per_s,
    }
