"""Core's dynamic VRAM, steered, on a simulated rig: bytes and pages of A, B, A, equality by feature, injected faults.

ComfyUI and comfy-aimdo are unmodified (``tests/comfyui/fake_cuda``); needs Linux. No times are measured.
"""

from __future__ import annotations

from ..case import Result
from .faults import measure_faults
from .features import measure_features
from .hosts import Rig
from .switching import measure_switches

__all__ = ["measure"]


def measure() -> Result:
    """Measure all three tables; about five minutes.

    Raises:
        SystemExit: no ComfyUI here.
    """
    rig = Rig.find()
    switches, features, faults = measure_switches(rig), measure_features(rig), measure_faults(rig)
    num_held = switches.num_held + features.num_held + faults.num_held
    num_checks = switches.num_checks + features.num_checks + faults.num_checks
    return Result(
        question=switches.sentence,
        rows=switches.rows,
        more={part.sentence: part.rows for part in (features, faults)},
        ratio=num_held / num_checks,
        meaning=f"{num_held} of {num_checks} checks hold, without faults that core alone does not survive; target 1",
    )
