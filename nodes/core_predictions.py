"""What ComfyUI's own classes say of calls of its models: what they reserve beside the weights, and what they compute.

Seconds come from a trace: core's class of the model computes once without memory, which takes some seconds for a large
one, whatever the sizes. It is only made where the rate of a device is known.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from ..memory.errors import InvalidInput
from ..memory.planner.run import BlockTimes
from ..memory.planner.tiles import TileChoice, Tiles, choose_tiles
from .lora_headers import LoraChanges, changes_by_names, weights_by_path
from .pipeline_predictions import times_of
from .planned_calls import PlannedCall, Prediction, calls_of_step, usual_passes
from .workflow_reading.description import DIFFUSION, PIPELINE, TEXT, Call, LoadedModel

if TYPE_CHECKING:
    from ..memory.tracing import Trace
    from ..memory.weights.component import Component
    from .described_hardware import DeviceRates
    from .host.core_needs import CodingNeeds, SamplingNeeds, TiledNeeds
    from .host.core_traces import CoreCall, Prompted
    from .workflow_reading.description import Size

__all__ = ["CorePredictor"]

Made = TypeVar("Made")


class CoreTiling:
    """The tiles in which a VAE of ours decodes or encodes by core's functions; `Tiling` of the planner.

    How long that takes core does not say.
    """

    def __init__(self, needs: TiledNeeds) -> None:
        self.needs = needs

    def choose(self, left_bytes: int) -> TileChoice | None:
        """Return the tiles; core makes some memory free for computing in any case, so they may take that."""
        return choose_tiles(self.needs.size, self.needs.num_bytes, max(left_bytes, self.needs.least_bytes))

    def num_forwards(self, tiles: Tiles) -> int:
        return self.needs.times_cut * tiles.count(self.needs.size)

    def work(self, tiles: Tiles) -> float:
        return self.needs.times_cut * tiles.work(self.needs.size)

    def times(self, tiles: Tiles) -> Mapping[str, BlockTimes]:
        return {}


class CorePredictor:
    """Predicts what core reserves and computes for a call, from the files' headers; each model is made once.

    Args:
        rates: by device, as far as they are known.
    """

    def __init__(self, rates: Mapping[str, DeviceRates] | None = None) -> None:
        self.rates = rates or {}
        self.made: dict[Any, Any] = {}
        self.traced: dict[Any, Trace | None] = {}
        """By what a call computes: models of the same shapes have one trace."""
        self.prompted: list[Prompted] = []
        """What the workflow's text encoders make of prompts, in order."""
        self.failed: dict[str, str] = {}
        """Why something of a file is not known, by what it is."""

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

        clip = self.text_encoder(call.model, call.paths) if self.rates else None
        if clip is None:
            return None
        prompt = call.use.prompt or ""
        trace = self.trace(call, clip.cond_stage_model, lambda: text_call(clip, prompt), prompt, brings_back=True)
        if trace is None:
            return None
        prompted = prompted_of(trace.output_shapes)
        self.prompted += [prompted] if prompted is not None else []
        return Prediction(
            activation_bytes=trace.peak_bytes, times=self.times(trace, call.component, clip.cond_stage_model)
        )

    def predict_sampling(self, call: PlannedCall, size: Size) -> Prediction | None:
        from .host.core_needs import reserves_for_gpus
        from .host.core_traces import step_call, usual_prompt

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
        trace = None
        if prompted is not None:
            trace = self.trace(
                call,
                needs.model,
                lambda: step_call(needs, each, prompted),
                (call.model.asked.weight_dtype, each, prompted),
            )
        reserved_bytes = needs.num_bytes(shape, num_conds=num_conds)
        takes_reserved = trace is None or reserves_for_gpus()
        return Prediction(
            num_passes=usual_passes(use),
            activation_bytes=reserved_bytes if takes_reserved else num_calls * trace.peak_bytes,
            carried_bytes=trace.carried_bytes if trace is not None else 0,
            times=self.times(trace, call.component, needs.model),
        )

    def predict_coding(self, call: PlannedCall, size: Size) -> Prediction | None:
        from .host.core_traces import coding_call

        needs, use = self.coding(call.paths[0]), call.use
        if needs is None:
            return None
        tile = use.tiling.tile_size if use.tiling is not None else None
        frames = use.tiling.temporal_size or None if use.tiling is not None else None
        decodes = use.call is Call.DECODE
        count = needs.decode_bytes if decodes else needs.encode_bytes
        choose = needs.decode_tiles if decodes else needs.encode_tiles
        tiled = choose(size.width, size.height, size.frames)
        trace, model = None, needs.vae.first_stage_model
        if use.tiling is None:  # how many tiles there are, and how large each is, core decides
            edges = size.width, size.height, size.frames, size.batch
            trace = self.trace(call, model, lambda: coding_call(needs, *edges, decodes=decodes), (edges, decodes))
        return Prediction(
            activation_bytes=count(size.width, size.height, size.frames, tile_size=tile, tile_frames=frames),
            times=self.times(trace, call.component, model),
            tiling=CoreTiling(tiled) if tiled is not None else None,
        )

    # -- traces

    def trace(
        self, call: PlannedCall, model: Any, make: Callable[[], CoreCall], given: Any, *, brings_back: bool = False
    ) -> Trace | None:
        """Return the trace of a call; None where no rate is known, or it cannot be traced.

        Args:
            model: core's, without memory.
            given: all of what the call computes with that is not the model.
        """
        from ..memory.tracing import Untraceable, trace_forward

        if not self.rates:
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

    def times(self, trace: Trace | None, component: Component, model: Any) -> Mapping[str, BlockTimes]:
        """Return what a traced call computes, by device."""
        if trace is None:
            return {}
        names = self.names_of(component, model)
        if names is not None:
            return {device: times_of(trace, component, rates, names) for device, rates in self.rates.items()}
        return {
            device: by_bytes(times_of(trace, component, rates).pass_s, component)
            for device, rates in self.rates.items()
        }

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


def by_bytes(pass_s: float, component: Component) -> BlockTimes:
    """Return the seconds of a forward, with each block's share of them as large as its share of the weights."""
    total_bytes = max(1, component.weight_bytes)
    blocks = tuple(pass_s * block.weight_bytes / total_bytes for block in component.blocks)
    return BlockTimes(blocks_s=blocks, other_s=max(0.0, pass_s - sum(blocks)))
