"""The node that says how much of a device is kept free."""

from __future__ import annotations

from dataclasses import dataclass

from comfy_api.latest import io

from .schema import make_schema

__all__ = ["HighwaterWatermark", "Watermark", "WatermarkType"]

WatermarkType = io.Custom("HIGHWATER_WATERMARK")


@dataclass(frozen=True, kw_only=True, slots=True)
class Watermark:
    """When free memory would fall under ``low_bytes``, others leave until ``high_bytes`` are free."""

    device: str
    low_bytes: int
    high_bytes: int

    @classmethod
    def parse(cls, device: str, low: str, high: str) -> Watermark:
        """Return the watermark that the widgets name.

        Raises:
            InvalidInput: not a size, or low above high.
        """
        from ..memory.errors import InvalidInput
        from ..memory.units import parse_bytes

        low_bytes, high_bytes = parse_bytes(low, what="low"), parse_bytes(high, what="high")
        if low_bytes > high_bytes:
            raise InvalidInput(f"low {low!r} is above high {high!r}; allowed: at most {high}")
        return cls(device=device.strip(), low_bytes=low_bytes, high_bytes=high_bytes)

    def apply(self) -> None:
        """Set it on the shared manager; idle models leave at once if less than the low mark is free.

        Raises:
            InvalidInput: the device is not here.
        """
        from ..memory import default_manager

        default_manager().set_watermark(self.device, self.low_bytes, self.high_bytes)


class HighwaterWatermark(io.ComfyNode):
    """Works alone on the canvas, as an output node, or linked to a loader, which puts it first."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return make_schema(
            node_id="HighwaterWatermark",
            display_name="Watermark",
            category="Highwater",
            description=(
                "Keeps memory free on a device. When free memory would fall under the low mark, models of "
                "other nodes and workflows leave until the high mark is free."
            ),
            search_aliases=["vram watermark", "keep free", "reserve vram", "evict"],
            inputs=[
                io.String.Input(
                    "device",
                    default="*",
                    tooltip="The device: gpu:0, gpu:1, ... or * for every one.",
                ),
                io.String.Input(
                    "low",
                    default="512MiB",
                    tooltip="Eviction starts when less than this would be free. A number and GiB, MiB, GB or MB.",
                ),
                io.String.Input(
                    "high",
                    default="1GiB",
                    tooltip="Eviction stops when this much is free. At least the low mark.",
                ),
            ],
            outputs=[
                WatermarkType.Output(
                    display_name="watermark",
                    tooltip="Link it to Load Pipeline, so that it is set before anything is loaded.",
                )
            ],
            is_output_node=True,
        )

    @classmethod
    def validate_inputs(cls, device: str | None = None, low: str | None = None, high: str | None = None) -> bool | str:
        from ..memory.errors import InvalidInput

        if device is None or low is None or high is None:
            return True  # linked: known when the node runs
        try:
            Watermark.parse(device, low, high)
        except InvalidInput as error:
            return str(error)
        return True

    @classmethod
    def execute(cls, device: str, low: str, high: str) -> io.NodeOutput:
        watermark = Watermark.parse(device, low, high)
        watermark.apply()
        return io.NodeOutput(watermark)
