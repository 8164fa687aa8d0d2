"""The alternative to a split: a clone of the whole component on each device, which compute the calls of a step.

[Note: clones] ComfyUI makes them (its node MultiGPU CFG Split). It gives each device in turn as many calls as there are
for each, the first one first, and a device computes its own in one batch, so that what streams is copied once for them.
All clones share one copy in RAM. What inputs and outputs of calls take on their way is little, and left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ..errors import DoesNotFit, InvalidInput
from ..options.profile import OffloadProfile
from ..units import format_bytes, format_seconds
from ..weights.component import Component
from .capacity import Machine
from .device_plan import DevicePlan
from .plan import ComponentPlan
from .replanning import replan_shares
from .run import BlockTimes, Use
from .run_plan import run_seconds

__all__ = ["calls_of_each", "clone_seconds", "explain_clones", "plan_clones"]


def explain_clones(
    component: Component,
    plan: ComponentPlan,
    use: Use,
    machine: Machine,
    profile: OffloadProfile,
    forward_s: float | None,
) -> str:
    """Return the line that compares a plan with clones; empty where a device could not even stream all of it.

    Args:
        forward_s: what a forward takes by the plan; None where that is not known.
    """
    home = plan.shares[0].device
    rest = dict.fromkeys([*(share.device for share in plan.shares), *(one.name for one in machine.chosen_from)])
    devices = [home, *(name for name in rest if name != home)][: use.num_calls]
    if use.num_calls < 2 or len(devices) < 2 or "cpu" in devices or plan.store:
        return ""
    tried = [devices[:count] for count in range(2, len(devices) + 1) if all(calls_of_each(use.num_calls, count))]
    found = [
        (names, clones) for names in tried if (clones := plan_clones(component, plan, names, use, machine, profile))
    ]
    if not found:
        return ""
    times = [(clone_seconds(clones, use), number) for number, (_, clones) in enumerate(found)]
    known = [(seconds, number) for seconds, number in times if seconds is not None]
    seconds, number = min(known) if len(known) == len(times) else (None, len(found) - 1)
    names, clones = found[number]
    streams = [f"{share.device} streams {format_bytes(share.streamed_bytes)}" for share in clones if share.streamed]
    took = "time unknown" if seconds is None else f"about {format_seconds(seconds)} a forward"
    beside = f"; as planned {format_seconds(forward_s)}" if seconds is not None and forward_s is not None else ""
    return (
        f"instead: MultiGPU CFG Split, all of it on each of {' and '.join(names)}, one copy in RAM: {took}"
        f"{', ' if streams else ''}{', '.join(streams)}{beside}"
    )


def plan_clones(
    component: Component,
    plan: ComponentPlan,
    devices: Sequence[str],
    use: Use,
    machine: Machine,
    profile: OffloadProfile,
) -> tuple[DevicePlan, ...]:
    """Return the share of each clone; none where a device could not compute all of it."""
    shares: list[DevicePlan] = []
    numbers = tuple(range(len(component.blocks)))
    for device, calls in zip(devices, calls_of_each(use.num_calls, len(devices)), strict=True):
        times = use.times.get(device)
        seconds = {number: calls * times.blocks_s[number] for number in numbers} if times is not None else None
        whole = DevicePlan(device=device, blocks=numbers, resident=frozenset(), fixed_bytes=0, resident_bytes=0)
        try:
            shares += replan_shares(component, replace(plan, shares=(whole,)), machine, profile, seconds).shares
        except (DoesNotFit, InvalidInput):
            return ()
    return tuple(shares)


def clone_seconds(clones: Sequence[DevicePlan], use: Use) -> float | None:
    """Return what a forward takes with these clones; None where the times of a device, or its link, are not known."""
    longest_s = 0.0
    for clone, calls in zip(clones, calls_of_each(use.num_calls, len(clones)), strict=True):
        times = use.times.get(clone.device)
        if times is None:
            return None
        together = BlockTimes(
            blocks_s=tuple(calls * seconds for seconds in times.blocks_s), other_s=calls * times.other_s
        )
        seconds = run_seconds([clone], {clone.device: together}, 0.0)
        if seconds is None:
            return None
        longest_s = max(longest_s, seconds)
    return longest_s


def calls_of_each(num_calls: int, num_devices: int) -> list[int]:
    """Return how many calls each device computes ([Note: clones])."""
    most = -(-num_calls // num_devices)
    return [max(0, min(most, num_calls - most * index)) for index in range(num_devices)]
