"""What ComfyUI's own classes say that calls of its models take beside the weights."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from ..memory.errors import InvalidInput
from ..memory.planner.tiles import TileChoice, Tiles, choose_tiles
from .workflow_plans import PlannedCall, Prediction
from .workflow_reading.description import PIPELINE, Call

if TYPE_CHECKING:
    from ..memory.planner.run import BlockTimes
    from .host.core_needs import CodingNeeds, SamplingNeeds, TiledNeeds
    from .workflow_reading.description import Size, WorkflowUse

__all__ = ["CorePredictor"]


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
    """Predicts what core reserves for a call, from the files' headers; each model is made once, without memory."""

    def __init__(self) -> None:
        self.sampling: dict[tuple[Path, str], SamplingNeeds | None] = {}
        self.coding: dict[Path, CodingNeeds | None] = {}

    def __call__(self, call: PlannedCall) -> Prediction | None:
        """Return what a call takes; None for pipelines, text encoders, and where core cannot say it."""
        use, size = call.use, call.use.size
        if call.model.kind == PIPELINE or size is None or len(call.paths) != 1:
            return None
        if use.call is Call.SAMPLE and call.component.kind == "diffusion":
            return self.predict_sampling(call, use, size)
        if use.call in (Call.DECODE, Call.ENCODE) and call.component.kind == "vae":
            return self.predict_coding(call.paths[0], use, size)
        return None

    def predict_sampling(self, call: PlannedCall, use: WorkflowUse, size: Size) -> Prediction | None:
        from .host.core_needs import sampling_needs  # importable in ComfyUI alone

        key = call.paths[0], call.model.asked.weight_dtype or "default"
        if key not in self.sampling:
            try:
                self.sampling[key] = sampling_needs(str(key[0]), weight_dtype=key[1])
            except InvalidInput:
                self.sampling[key] = None
        needs = self.sampling[key]
        if needs is None:
            return None
        shape = needs.latent_shape(size.width, size.height, size.frames, size.batch)
        return Prediction(
            num_passes=max(1, use.steps or 1), activation_bytes=needs.num_bytes(shape, num_conds=use.conds or 1)
        )

    def predict_coding(self, path: Path, use: WorkflowUse, size: Size) -> Prediction | None:
        from .host.core_needs import coding_needs

        if path not in self.coding:
            try:
                self.coding[path] = coding_needs(str(path))
            except InvalidInput:
                self.coding[path] = None
        needs = self.coding[path]
        if needs is None:
            return None
        tile = use.tiling.tile_size if use.tiling is not None else None
        frames = use.tiling.temporal_size or None if use.tiling is not None else None
        count = needs.decode_bytes if use.call is Call.DECODE else needs.encode_bytes
        tiles = needs.decode_tiles if use.call is Call.DECODE else needs.encode_tiles
        tiled = tiles(size.width, size.height, size.frames)
        return Prediction(
            activation_bytes=count(size.width, size.height, size.frames, tile_size=tile, tile_frames=frames),
            tiling=CoreTiling(tiled) if tiled is not None else None,
        )
