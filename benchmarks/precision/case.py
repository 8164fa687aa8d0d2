"""The four tables, and the worst of their ratios."""

from __future__ import annotations

import math

import torch

from highwater.memory.weights.form_errors import measure_error
from highwater.memory.weights.known_forms import FORMS

from ..case import Result
from .models import measure_models
from .steps import measure_steps
from .text_encoder import measure_text_encoder

__all__ = ["measure"]

DEVIATIONS = (0.05, 0.02, 0.01, 0.005, 0.002)
ROUND_TRIP_TARGET, MODEL_TARGET, STEP_TARGET = 0.027, 0.8, 0.55
OURS = "fp8 scaled"


def measure() -> Result:
    """Measure all of it; about two minutes. What is not here, such as ComfyUI, is a row that says so."""
    weights, worst_round_trip = measure_round_trips()
    models, worst_model = measure_models(OURS)
    texts = measure_text_encoder()
    steps, worst_step = measure_steps(OURS)
    ratios = [worst_round_trip / ROUND_TRIP_TARGET, worst_model / MODEL_TARGET, worst_step / STEP_TARGET]
    return Result(
        question=(
            "What random normal weights of 1024 x 1024 in bf16 lose at rest, by their standard deviation, relative to "
            "their size: the root mean square over rows."
        ),
        rows=weights,
        ratio=math.nan if any(map(math.isnan, ratios)) else max(ratios),
        meaning=(
            f"the worst of {OURS}'s error over {ROUND_TRIP_TARGET} ({ratios[0]:.3f}), that of whole models over "
            f"{MODEL_TARGET} of ComfyUI's fp8_e4m3fn ({ratios[1]:.3f}), and a streamed step over {STEP_TARGET} of that "
            f"in bf16 ({ratios[2]:.3f}); target at most 1"
        ),
        more={
            "Whole tiny models with random weights, by their standard deviation (norms near 1, biases 0.02), of "
            "ComfyUI's own classes, in float32: the error of their outputs, relative to their size. ComfyUI: all "
            "weights in fp8_e4m3fn, cast as they compute, by its own layers.": models,
            "A real text encoder, all-MiniLM-L6-v2, in float32: bytes at rest, and the cosine similarity of the "
            "embeddings of eight sentences to those of the original, the least and the mean.": texts,
            "A step of a model whose blocks all stream, in virtual time on one compute stream, widening included; "
            "bytes are those over the link.": steps,
        },
    )


def measure_round_trips() -> tuple[list[dict[str, str | float]], float]:
    """Return a row for each deviation, and the worst error of the form that we recommend."""
    rows: list[dict[str, str | float]] = []
    for deviation in DEVIATIONS:
        generator = torch.Generator().manual_seed(0)
        weight = (torch.randn(1024, 1024, generator=generator) * deviation).bfloat16()
        errors = {name: measure_error(load(), weight, name="w") for name, (_, load) in FORMS.items()}
        rows.append({"deviation": f"{deviation:g}", **{name: f"{error:.4f}" for name, error in errors.items()}})
        rows[-1]["worst"] = errors[OURS]
    worst = max(float(row.pop("worst")) for row in rows)
    return rows, worst
