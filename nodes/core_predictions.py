"""What ComfyUI's own classes say of calls of its models: what they reserve beside the weights, and what they compute.

Seconds come from a trace: core's class of the model computes once without memory, which takes some seconds for a large
one, whatever the sizes. It is only made where how fast a device computes was said or measured.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from ..memory.errors import InvalidInput
from ..memory.planner.run import BlockTimes
from ..memory.planner.tiles import TileChoice, Tiles, choose_tiles
from .call_seconds import MEASURED, Computed, StatedSeconds, precision_asked
from .lora_headers import LoraChanges, changes_by_names, weights_by_path
from .planned_calls import PlannedCall, Prediction, calls_of_step, usual_passes
from .workflow_reading.description import DIFFUSION, PIPELINE, TEXT, Call, LoadedModel

if TYPE_CHECKING:
    from ..memory.tracing import Shapes, Trace
    from ..memory.weights.component import Component
    from .call_seconds import CallSeconds
    from .host.core_needs import CodingNeeds, SamplingNeeds, TiledNeeds
    from .host.core_traces import CoreCall, Prompted
    from .workflow_reading.description import Size

__all__ = ["CorePredictor"]

Made = TypeVar("Made")
Shape: TypeAlias = tuple[int, ...]


class CoreTiling:
    """The tiles in which a VAE of ours decodes or encodes by core's functions; `Tiling` of the planner.

    Args:
        batch: how many pictures are cut, one after the other.
        times_of: returns what tiles of these shapes take, each so often, by device; kept as long as what is planned.
    """

    beside_model = True

    def __init__(
        self,
        needs: TiledNeeds,
        *,
        batch: int = 1,
        times_of: Callable[[Mapping[Shape, int]], Mapping[str, BlockTimes]] = lambda shapes: {},
    ) -> None:
        self.needs = needs
        self.batch = batch
        self.times_of = times_of
        self.known: dict[Tiles, Mapping[str, BlockTimes]] = {}

    def choose(self, left_bytes: int) -> TileChoice | None:
        """Return the tiles; core makes some memory free for computing in any case, so they may take that."""
        return choose_tiles(self.needs.size, self.needs.num_bytes, max(left_bytes, self.needs.least_bytes))

    def num_forwards(self, tiles: Tiles) -> int:
        return self.batch * sum(self.needs.tile_shapes(tiles).values())

    def work(self, tiles: Tiles) -> float:
        volume = sum(count * prod(shape[2:]) for shape, count in self.needs.tile_shapes(tiles).items())
        return volume / prod(self.needs.shape[2:])

    def times(self, tiles: Tiles) -> Mapping[str, BlockTimes]:
        """Return what all tiles take by device: each size is traced once. Joining them, on the CPU, is not in it."""
        if tiles not in self.known:
            shapes = self.needs.tile_shapes(tiles)
            self.known[tiles] = self.times_of({shape: self.batch * count for shape, count in shapes.items()})
        return self.known[tiles]


class CorePredictor:
    """Predicts what core reserves and computes for a call, from the files' headers; each model is made once.

    Args:
        seconds: tells what traced calls take; None: nothing does.
    """

    def __init__(self, seconds: CallSeconds | None = None) -> None:
        self.seconds = seconds or StatedSeconds({})
        self.made: dict[Any, Any] = {}
        self.digests: dict[Any, Computed] = {}
        """What tells a model of core's, as its loader lets it rest, from others."""
        self.traced: dict[Any, Trace | None] = {}
        """By what a call computes: models of the same shapes have one trace."""
        self.prompted: list[Prompted] = []
        """What the workflow's text encoders make of prompts, in order."""
        self.failed: dict[str, str] = {}
        """Why something of a file is not known, by what it is."""

    @property
    def kept_free_bytes(self) -> int:
        """What core keeps free of weights on each GPU for computing, whatever is asked of it."""
        from .host.core_needs import kept_free_bytes

        return kept_free_bytes()

    def __call__(self, call: PlannedCall) -> Prediction | None:
        """Return what a call takes; None for pipelines, and where core cannot say it."""
        use, size, kind = call.use, call.use.size, call.component.kind
        if call.model.kind == PIPELINE:
            return None
        if use.call is Call.ENCODE_TEXT and kind == "text":
            return self.predict_text(call)
        if size is None or len(call.paths) != 1:
            return None
        if use.call is Call.SAMPLE and kind == "diffusion":
            return self.predict_sampling(call, size)
        if use.call in (Call.DECODE, Call.ENCODE) and kind == "vae":
            return self.predict_coding(call, size)
        return None

    def predict_text(self, call: PlannedCall) -> Prediction | None:
        from .host.core_traces import prompted_of, text_call  # importable in ComfyUI alone

        clip = self.text_encoder(call.model, call.paths) if self.seconds.may_trace else None
        if clip is None:
            return None
        prompt = call.use.prompt or ""
        trace = self.trace(call, clip.cond_stage_model, lambda: text_call(clip, prompt), prompt, brings_back=True)
        if trace is None:
            return None
        prompted = prompted_of(trace.output_shapes)
        self.prompted += [prompted] if prompted is not None else []
        return Prediction(activation_bytes=trace.peak_bytes, times=self.times(trace, call, clip.cond_stage_model))

    def predict_sampling(self, call: PlannedCall, size: Size) -> Prediction | None:
        from .host.core_needs import reserves_for_gpus
        from .host.core_traces import usual_prompt

        needs, use = self.sampling(call.model, call.paths[0]), call.use
        if needs is None:
            return None
        num_calls, _ = calls_of_step(call)
        num_conds = use.conds or 1
        shape = needs.latent_shape(size.width, size.height, size.frames, size.batch)
        # Of conditionings each is a call, of one the halves of its batch.
        each = needs.latent_shape(size.width, size.height, size.frames, -(-size.batch * num_conds // num_calls))
        usual = usual_prompt(needs)
        prompted = next((each for each in self.prompted if usual is None or each.width == usual.width), usual)
        trace = self.trace_step(call, needs, each, prompted) if prompted is not None else None
        times = self.times(trace, call, needs.model, num_calls=num_calls)
        if trace is not None and prompted is not None and not is_measured(times):
            usual_prompted = prompted

            def trace_of(shapes: Shapes) -> Trace | None:
                latents, *others = shapes or ((),)
                if latents[1:2] != each[1:2] or len(latents) != len(each) or not others or len(others[0]) != 3:
                    return None
                tokens = replace(usual_prompted, num_tokens=others[0][1])
                return self.trace_step(call, needs, latents, tokens)

            if self.trace_measured(call, needs.model, trace_of):
                times = self.times(trace, call, needs.model, num_calls=num_calls)
        reserved_bytes = needs.num_bytes(shape, num_conds=num_conds)
        takes_reserved = trace is None or reserves_for_gpus()
        return Prediction(
            num_passes=usual_passes(use),
            activation_bytes=reserved_bytes if takes_reserved else num_calls * trace.peak_bytes,
            carried_bytes=trace.carried_bytes if trace is not None else 0,
            times=times,
        )

    def trace_step(
        self, call: PlannedCall, needs: SamplingNeeds, latent_shape: Shape, prompted: Prompted
    ) -> Trace | None:
        """Return the trace of one call of a diffusion model; None as `trace`."""
        from .host.core_traces import step_call

        given = call.model.asked.weight_dtype, latent_shape, prompted
        return self.trace(call, needs.model, lambda: step_call(needs, latent_shape, prompted), given)

    def trace_measured(self, call: PlannedCall, model: Any, trace_of: Callable[[Shapes], Trace | None]) -> bool:
        """Trace a call of the same model that was measured, for the rate that it tells; returns whether there is one.

        Args:
            model: core's, without memory.
            trace_of: returns the trace of a call with inputs of these shapes.
        """
        computed = self.computed(call, model)
        for key in self.seconds.untraced(computed):
            trace = trace_of(key.shapes)
            if trace is not None:
                self.seconds.note(trace, computed)
                return True
        return False

    def predict_coding(self, call: PlannedCall, size: Size) -> Prediction | None:
        needs, use = self.coding(call.paths[0]), call.use
        if needs is None:
            return None
        tile = use.tiling.tile_size if use.tiling is not None else None
        frames = use.tiling.temporal_size or None if use.tiling is not None else None
        decodes = use.call is Call.DECODE
        count = needs.decode_bytes if decodes else needs.encode_bytes
        choose = needs.decode_tiles if decodes else needs.encode_tiles
        tiled = choose(size.width, size.height, size.frames)
        model = needs.vae.first_stage_model
        trace: Trace | None = None
        whole: Shape = ()
        if use.tiling is None:  # how many tiles there are, and how large each is, core decides
            shape_of = needs.latent_shape if decodes else needs.pixel_shape
            whole = (size.batch, *shape_of(size.width, size.height, size.frames)[1:])
            trace = self.trace_coding(call, needs, whole)
        tiling = None
        if tiled is not None:

            def times_of(shapes: Mapping[Shape, int]) -> Mapping[str, BlockTimes]:
                traces = [(self.trace_coding(call, needs, shape), count) for shape, count in shapes.items()]
                return self.times(joined([(each, count) for each, count in traces if each], len(traces)), call, model)

            tiling = CoreTiling(tiled, batch=size.batch, times_of=times_of)
        times = self.times(trace, call, model)
        if trace is not None and not is_measured(times):

            def trace_of(shapes: Shapes) -> Trace | None:
                inputs = shapes[0] if shapes else ()
                is_alike = len(inputs) == len(whole) and inputs[1] == whole[1]
                return self.trace_coding(call, needs, inputs) if is_alike else None

            if self.trace_measured(call, model, trace_of):
                times = self.times(trace, call, model)
        return Prediction(
            activation_bytes=count(size.width, size.height, size.frames, tile_size=tile, tile_frames=frames),
            times=times,
            tiling=tiling,
        )

    def trace_coding(self, call: PlannedCall, needs: CodingNeeds, shape: Shape) -> Trace | None:
        """Return the trace of a decode or encode of latents or pictures of a shape; None as `trace`."""
        from .host.core_traces import coding_call

        decodes = call.use.call is Call.DECODE
        model = needs.vae.first_stage_model
        return self.trace(call, model, lambda: coding_call(needs, shape, decodes=decodes), (shape, decodes))

    # -- traces

    def trace(
        self, call: PlannedCall, model: Any, make: Callable[[], CoreCall], given: Any, *, brings_back: bool = False
    ) -> Trace | None:
        """Return the trace of a call; None where it would tell no seconds, or cannot be traced.

        Args:
            model: core's, without memory.
            given: all of what the call computes with that is not the model.
        """
        from ..memory.tracing import Untraceable, trace_forward

        if not self.seconds.may_trace or not self.seconds.may_tell(self.computed(call, model)):
            return None
        weights = (*call.component.blocks, call.component.non_block)
        forms = tuple((tensor.name, tensor.shape, tensor.dtype) for block in weights for tensor in block.tensors)
        key = type(model), call.use.call, forms, given
        if key not in self.traced:
            try:
                made = make()
                self.traced[key] = trace_forward(
                    made.model,
                    made.args,
                    made.kwargs,
                    method=made.method,
                    blocks=self.names_of(call.component, model),
                    brings_back=brings_back,
                )
            except (InvalidInput, Untraceable) as error:
                self.traced[key] = None
                self.failed[f"seconds of {call.paths[0].name}"] = str(error)
        return self.traced[key]

    def names_of(self, component: Component, model: Any) -> list[str] | None:
        """Return what core's model calls a component's blocks; None where it has not all of them."""
        from .host.core_traces import paths_of_modules

        return paths_of_modules(model, [block.name for block in component.blocks])

    def times(
        self, trace: Trace | None, call: PlannedCall, model: Any, *, num_calls: int = 1
    ) -> Mapping[str, BlockTimes]:
        """Return what a traced call computes, by device, where a step consists of so many."""
        if trace is None:
            return {}
        names = self.names_of(call.component, model)
        return self.seconds.times(trace, call.component, self.computed(call, model), names=names, num_calls=num_calls)

    def computed(self, call: PlannedCall, model: Any) -> Callable[[], Computed]:
        """Return what tells what a call computes with, of core's model without memory."""
        from ..memory.weights.module_component import component_from_module

        key = id(model), call.model, call.component.name  # models stay as long as this

        def find() -> Computed:
            if key not in self.digests:
                component = component_from_module(model, name=call.component.name)
                self.digests[key] = Computed.of(component, precision_asked(call))
            return self.digests[key]

        return find

    # -- models without memory

    def sampling(self, model: LoadedModel, path: Path) -> SamplingNeeds | None:
        from .host.core_needs import sampling_needs

        dtype = model.asked.weight_dtype or "default"
        return self.make(path, (path, dtype), lambda: sampling_needs(str(path), weight_dtype=dtype))

    def coding(self, path: Path) -> CodingNeeds | None:
        from .host.core_needs import coding_needs

        return self.make(path, (path, "vae"), lambda: coding_needs(str(path)))

    def text_encoder(self, model: LoadedModel, paths: Sequence[Path]) -> Any:
        from .host.core_needs import text_encoder

        kind = None if model.part else model.asked.text_type or "stable_diffusion"
        return self.make(paths[0], (*paths, kind), lambda: text_encoder(list(map(str, paths)), text_type=kind))

    def make(self, path: Path, key: Any, make: Callable[[], Made]) -> Made | None:
        """Return what was made for a key, of a file; None where core cannot."""
        if key not in self.made:
            try:
                self.made[key] = make()
            except InvalidInput as error:
                self.made[key] = None
                self.failed[f"needs of {path.name}"] = str(error).removeprefix(f"{path}: ")
        found: Made | None = self.made[key]
        return found

    # -- LoRAs

    def read_lora(self, component: Component, model: LoadedModel, paths: Sequence[Path], lora: Path) -> LoraChanges:
        """Return what a LoRA changes of a component, by all names that core knows. Raises as `changes_by_names`."""
        from .host.core_loras import changes_in_core

        by_names = changes_by_names(component, model, paths, lora)
        made = None
        if model.kind == DIFFUSION and len(paths) == 1:
            needs = self.sampling(model, paths[0])
            made = needs.model if needs is not None else None
        elif model.kind == TEXT:
            clip = self.text_encoder(model, paths)
            made = clip.cond_stage_model if clip is not None else None
        if made is None:
            return by_names
        known = weights_by_path(component)
        ranks: dict[str, int] = {}
        others: set[str] = set()
        num_unknown = 0
        changes = changes_in_core(str(lora), made, is_text=model.kind == TEXT)
        for key, found in changes.items():
            parts = key.removesuffix(".weight").split(".")
            weight = next((known[end] for at in range(len(parts)) if (end := ".".join(parts[at:])) in known), None)
            if weight is None or not key.endswith(".weight"):
                num_unknown += key.endswith(".weight")
            elif None in found:
                others.add(weight.name)
            else:
                ranks[weight.name] = sum(rank for rank in found if rank is not None)
        return LoraChanges(
            ranks=ranks,
            others=frozenset(others),
            num_layers=len(changes),
            num_unknown=num_unknown,
            file_bytes=by_names.file_bytes,
        )


def is_measured(times: Mapping[str, BlockTimes]) -> bool:
    """Whether a call itself was measured, on any device."""
    return any(time.source == MEASURED for time in times.values())


def joined(traces: Sequence[tuple[Trace, int]], num_shapes: int) -> Trace | None:
    """Return calls one after the other, each so often, as one trace; its bytes are not told. None if one is missing."""
    from ..memory.tracing import Trace

    if len(traces) < num_shapes:
        return None
    return Trace(
        segments=tuple(segment for trace, count in traces for segment in trace.segments * count),
        entries=tuple(entry for trace, count in traces for entry in trace.entries * count),
        peak_bytes=0,
        output_bytes=0,
    )
