"""The node that says how much of a device is kept free."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from comfy_api.latest import io

from .device_choices import ALL, fit_marks, resolve_watermark_device, watermark_choices
from .schema import make_schema

if TYPE_CHECKING:
    from ..memory.options.marks import Mark, Marks

__all__ = ["DeviceWatermark", "HighwaterWatermark", "WatermarkType"]

WatermarkType = io.Custom("HIGHWATER_WATERMARK")


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceWatermark:
    """A watermark and the device that it is for, ``*`` for every one: what the node passes on its link."""

    device: str
    marks: Marks

    @classmethod
    def parse(cls, device: str, low: str, high: str) -> DeviceWatermark:
        """Return what the widgets name.

        Raises:
            InvalidInput: not a size and no percentage, or low above high.
        """
        from ..memory.options.marks import Marks

        return cls(device=device.strip(), marks=Marks(low=parse_mark("low", low), high=parse_mark("high", high)))

    def apply(self) -> list[str]:
        """Set it on the shared manager; idle models leave at once if less than the low mark is free.

        A device, or a RAM, that is too small for it keeps the marks that it has; returns what to say of them.
        """
        from ..memory import default_manager

        manager = default_manager()
        fitting, notes = fit_marks(
            {self.device: self.marks}, manager.devices, instead=" and keeps the marks that it has"
        )
        for device, marks in fitting.items():
            manager.set_watermark(device, marks.low.setting, marks.high.setting)
        return notes


class HighwaterWatermark(io.ComfyNode):
    """Works alone on the canvas, as an output node, or linked to a loader, which puts it first."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        from ..memory.manager.watermark import Watermark
        from ..memory.units import format_bytes

        default = Watermark()
        return make_schema(
            node_id="HighwaterWatermark",
            display_name="Watermark",
            description=(
                "Keeps memory free on a device. When free memory would fall below the low mark, idle models are "
                "evicted until the high mark is free: first those that no waiting prompt uses, the least recently used "
                "one before the others; then those that are needed last."
                " Of the RAM (host), weights of dropped models leave, in the same order, and plans leave the low mark "
                "free."
            ),
            search_aliases=["vram watermark", "keep free", "reserve vram", "evict"],
            inputs=[
                io.Combo.Input(
                    "device",
                    options=watermark_choices(),
                    default=ALL,
                    tooltip=(
                        "The device, * for all of them, or host for the RAM. If this machine lacks it, * is used, and "
                        "the node says so."
                    ),
                ),
                io.String.Input(
                    "low",
                    default=format_bytes(default.low_bytes),
                    tooltip=(
                        "Eviction starts when less than this would be free. A number with GiB, MiB, GB or MB, "
                        "or a part of the total, such as 10%."
                    ),
                ),
                io.String.Input(
                    "high",
                    default=format_bytes(default.high_bytes),
                    tooltip="Eviction stops when this much is free. Written like the low mark, and not less than it.",
                ),
            ],
            outputs=[
                WatermarkType.Output(
                    display_name="watermark",
                    tooltip="Link it to a loader or a Manage node to set it before that model is loaded.",
                )
            ],
            is_output_node=True,
        )

    @classmethod
    def validate_inputs(cls, low: str | None = None, high: str | None = None) -> bool | str:
        """Check the marks against each other. Their device may be smaller than on the machine that they are from.

        Not naming ``device`` leaves it to the host's check of combos. The host marks both marks whichever is wrong; the
        message says which one is meant.
        """
        from ..memory.errors import InvalidInput

        try:
            check_marks(low, high)
        except InvalidInput as error:
            return str(error)
        return True

    @classmethod
    def execute(cls, device: str, low: str, high: str) -> io.NodeOutput:
        resolved, notes = resolve_watermark_device(device)
        watermark = DeviceWatermark.parse(resolved, low, high)
        return io.NodeOutput(watermark, ui={"text": [*notes, *watermark.apply()]})


def check_marks(low: str | None, high: str | None) -> None:
    """Check what is known of two marks; None is a linked one, known when the node runs.

    Raises:
        InvalidInput: not a size, or low above high.
    """
    if low is not None and high is not None:
        DeviceWatermark.parse(ALL, low, high)
    for name, text in (("low", low), ("high", high)):
        if text is not None:
            parse_mark(name, text)


def parse_mark(name: str, text: object) -> Mark:
    """Return one mark. Raises `InvalidInput`, also for a number without a unit."""
    from ..memory.options.marks import read_mark

    return read_mark(str(text), what=name)
