"""How small the blocks of components are cut: as small as their devices need, so that copies can run ahead."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from ..errors import DoesNotFit, InvalidInput
from ..planner.plan import Plan
from ..planner.sizes import least_bytes
from ..weights.component import Component
from ..weights.form_numbers import AS_THEY_CAME

__all__ = ["plan_in_blocks"]

Components = TypeVar("Components", bound=Sequence[Component])


def plan_in_blocks(
    first: Components, describe: Callable[[int, bool], Components], plan_of: Callable[[Components], Plan]
) -> tuple[Components, Plan]:
    """Return components in blocks as small as their devices need, and their plan.

    Where a device cannot hold two blocks they are cut into the blocks inside them; parts that their class declares to
    be one piece are cut only where nothing else fits. Raises what the plan of the variant raises that needs least.

    Args:
        first: the components in the largest blocks.
        describe: returns them in blocks of so many bytes at most; True: even what is declared to be one piece is cut.
    """
    components, coarser = first, None
    found: tuple[Components, Plan] | None = None
    cuts_whole = False
    refusals: list[tuple[int, DoesNotFit | InvalidInput]] = []
    while True:
        if components == coarser and found is not None:
            return found
        try:
            plan = plan_of(components)
        except (DoesNotFit, InvalidInput) as error:
            if found is not None:
                return found
            # A cut block leaves non-block weights, which never stream: coarser blocks may need fewer bytes at least.
            # Without its traceback, which would keep this call, its callers and their modules alive in a cycle.
            refusals.append((sum(map(least_alone, components)), error.with_traceback(None)))
            if components == coarser and cuts_whole:
                raise take_least(refusals) from None  # from a call: a local name for it would make a cycle
            cuts_whole = cuts_whole or components == coarser  # nothing else fits
        else:
            found = components, plan
            if not is_tight(plan):
                return found
        coarser = components
        largest_bytes = max((block.weight_bytes for part in components for block in part.blocks), default=0) // 2
        components = describe(largest_bytes, cuts_whole)


def take_least(refusals: list[tuple[int, DoesNotFit | InvalidInput]]) -> DoesNotFit | InvalidInput:
    """Return the refusal of the variant that needs the fewest bytes, and clear the list."""
    least = min(refusals, key=lambda refusal: refusal[0])[1]
    refusals.clear()
    return least


def least_alone(component: Component) -> int:
    """Return the fewest bytes of one device with which a component can compute as it is stored."""
    return least_bytes(component, range(len(component.blocks)), AS_THEY_CAME, first=True)


def is_tight(plan: Plan) -> bool:
    """Whether staging memory holds no whole block beside the one that computes: copies would wait for computes."""
    shares = [share for part in plan.components for share in part.shares]
    return any(share.prefetch_blocks == 0 and len(share.streamed) > 1 for share in shares)
