"""The node that says in full how weights rest: in which dtype, which of them, and how much is widened at once."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from comfy_api.latest import io

from .schema import make_schema

if TYPE_CHECKING:
    from ..memory.options.precision import Precisions

__all__ = ["HighwaterPrecision", "PrecisionType", "options_input", "split"]

PrecisionType = io.Custom("HIGHWATER_PRECISION")

# Words of the widgets, which are the engine's own but for these.
USUAL, THE_MODELS = "usual", "the model's"
DECLARED, NONE = "declared", "none"
ALL = "*"
STORAGE = ["float8_e4m3fn", "float8_e5m2", "int8", "qint8", "qint4", "qfloat8", "bfloat16", "float16"]
COMPONENTS = [ALL, "diffusion", "text", "vae", "control", "vision"]
# Not the comma of a repetition, as in \d{1,3}.
SEPARATORS = re.compile(r",(?![^{]*\})|\n")


def options_input() -> io.Input:
    """Return the input of a loader that takes what the node gives."""
    return PrecisionType.Input(
        "precision_options",
        optional=True,
        tooltip=(
            "From a Precision node, which then counts in place of the input precision, for the parts that it is for."
        ),
    )


class HighwaterPrecision(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return make_schema(
            node_id="HighwaterPrecision",
            display_name="Precision",
            description=(
                "How the weights of a model rest, in all its options: link it to a loader. Weights of blocks rest in a "
                "smaller dtype and are widened just before they compute; embedders, norms and output layers never are."
            ),
            search_aliases=["layerwise casting", "layerwise upcasting", "storage dtype"],
            inputs=[
                io.Combo.Input(
                    "storage",
                    options=[
                        "float8_e4m3fn",
                        "float8_e5m2",
                        "int8",
                        "qint8",
                        "qint4",
                        "qfloat8",
                        "bfloat16",
                        "float16",
                    ],
                    default="float8_e4m3fn",
                    tooltip=(
                        "The dtype at rest. float8_e4m3fn halves 16-bit weights: the 23.8 GB of a Flux become 15.2, at "
                        "an error of 0.027 in each weight. float8_e5m2: the same at 0.053. int8: 255 steps per row, "
                        "15.2 GB at 0.009. qint8, qint4, qfloat8: as optimum-quanto; qint4: 11.2 GB at 0.1. bfloat16 "
                        "and float16 halve 32-bit weights, at 0.002 or less, and leave 16-bit ones as they are."
                    ),
                ),
                io.Combo.Input(
                    "scale",
                    options=[USUAL, "tensor", "row", NONE],
                    default=USUAL,
                    tooltip=(
                        "By what float8 weights are multiplied when they are widened. usual: one power of two per "
                        "tensor. row: one per row, 4 bytes each, better where single rows are large. none: as "
                        "ComfyUI's fp8_e4m3fn, which loses 0.28 of weights around 0.002."
                    ),
                ),
                io.Combo.Input(
                    "compute",
                    options=[THE_MODELS, "bfloat16", "float16", "float32"],
                    default=THE_MODELS,
                    tooltip="The dtype in which the model computes. Another one than it has is refused, not converted.",
                ),
                io.Combo.Input(
                    "granularity",
                    options=["block", "layer", "component"],
                    default="block",
                    tooltip=(
                        "How much is widened at once. block: 0.45 GB of a Flux. layer: a fifth of that memory, for "
                        "more and smaller copies; not over two devices. component: each block once per call, and it "
                        "stays wide until the call ends, which takes 17 GB beside: for blocks that run several times."
                    ),
                ),
                io.Combo.Input(
                    "skips",
                    options=[DECLARED, NONE],
                    default=DECLARED,
                    tooltip=(
                        "declared: what the model's classes list as sensitive stays as stored, and so do positions and "
                        "32-bit weights of a 16-bit model. none: only what is excluded below, and what loses too much."
                    ),
                ),
                io.String.Input(
                    "exclude",
                    default="",
                    tooltip=(
                        "Weights that stay as stored: regular expressions that are looked for in their names, with "
                        "commas between, such as attn, blocks\\.[01]\\.."
                    ),
                ),
                io.String.Input(
                    "exclude_classes",
                    default="",
                    tooltip="Classes of layers whose weights stay as stored, with commas between, such as Conv2d.",
                ),
                io.Float.Input(
                    "error_limit",
                    default=0.0,
                    min=0.0,
                    max=10.0,
                    step=0.01,
                    tooltip=(
                        "Weights that would lose more than this, relative to their size, stay as stored. Measured "
                        "once for each file. 0: 0.06 for float8_e4m3fn, 0.12 for float8_e5m2, 0.02 for int8, 0.2 for "
                        "qint4, 0.01 for 16 bits. 10: none stays for its error."
                    ),
                ),
                io.Combo.Input(
                    "component",
                    options=COMPONENTS,
                    default=ALL,
                    tooltip="For which part of a checkpoint or pipeline this is meant. *: for each.",
                ),
                PrecisionType.Input(
                    "others", optional=True, tooltip="From a Precision node for other parts of the same model."
                ),
            ],
            outputs=[
                PrecisionType.Output(display_name="precision_options", tooltip="Link it to a loader or a Manage node.")
            ],
        )

    @classmethod
    def validate_inputs(
        cls,
        storage: str | None = None,
        scale: str | None = None,
        compute: str | None = None,
        exclude: str | None = None,
    ) -> bool | str:
        """Check what the lists of words cannot; None is a linked widget, read when the node runs."""
        from ..memory.errors import InvalidInput

        try:
            if None not in (storage, scale, compute):
                read_options(storage=storage, scale=scale, compute=compute)
            if exclude is not None:
                read_options(exclude=exclude)
        except InvalidInput as error:
            return str(error)
        return True

    @classmethod
    def execute(cls, others: Precisions | None = None, **asked: Any) -> io.NodeOutput:
        return io.NodeOutput(combine(read_options(**asked), others))


def read_options(
    *,
    storage: Any = "float8_e4m3fn",
    scale: Any = USUAL,
    compute: Any = THE_MODELS,
    granularity: str = "block",
    skips: str = DECLARED,
    exclude: str = "",
    exclude_classes: str = "",
    error_limit: float = 0.0,
    component: str = ALL,
) -> Precisions:
    """Return what the widgets say.

    Raises:
        InvalidInput: one line that names the widget and what is allowed.
    """
    from ..memory.errors import InvalidInput, allowed_values
    from ..memory.options.precision import Precision, PrecisionItem, Precisions

    if component not in COMPONENTS:
        raise InvalidInput(f"component {component!r} is unknown; {allowed_values(str(component), COMPONENTS)}")
    if skips not in (DECLARED, NONE):
        raise InvalidInput(f"skips {skips!r} is unknown; {allowed_values(str(skips), [DECLARED, NONE])}")
    precision = Precision.of(
        storage,
        None if compute == THE_MODELS else compute,
        scale=None if scale == USUAL else scale,
        granularity=granularity,
        honours_declared=skips == DECLARED,
        exclude=split(exclude),
        exclude_classes=split(exclude_classes),
        error_limit=error_limit or None,
    )
    return Precisions((PrecisionItem(component=component, precision=precision),))


def split(text: str) -> list[str]:
    return [word.strip() for word in SEPARATORS.split(str(text)) if word.strip()]


def combine(own: Precisions, others: Precisions | None) -> Precisions:
    """Return both together. Raises `InvalidInput` where two are for one component."""
    from ..memory.errors import InvalidInput
    from ..memory.options.precision import Precisions

    items = (*(others.items if others is not None else ()), *own.items)
    names = [item.component for item in items]
    if len({*names}) < len(names):
        raise InvalidInput(f"component {own.items[0].component!r} has two Precision nodes; choose another component")
    return Precisions(items)
