"""The least bytes that any policy moves for a trace: a true lower bound.

[Note: bound] At the begin of each pass of a component some of its bytes are on the device; the others are copied in
that pass, whether they stay or stream. So a byte saves one copy if it stays from one use to the next, and the passes
of a use after the first if it stays through them. What stays at any moment fits the device. The largest sum of what
is saved under that limit is a problem of intervals on a line, solved exactly as a flow of least cost; its solution is
in whole bytes. It leaves out staging memory and the bytes that a block needs while it computes: no policy can do
better, and some cannot do as well.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import networkx

from .traces import Use

__all__ = ["least_bytes"]


def least_bytes(uses: Iterable[Use], size_of: Callable[[str], int], capacity: int) -> int:
    """Return the bytes of all passes less the most that can be saved."""
    graph = networkx.MultiDiGraph()
    copied = point = 0
    last: dict[str, int] = {}
    for component, num_passes in uses:
        size = size_of(component)
        copied += size * num_passes
        if component in last:
            graph.add_edge(last[component], point, capacity=size, weight=-1)
        if num_passes > 1:
            graph.add_edge(point, point + 1, capacity=size, weight=1 - num_passes)
            graph.add_edge(point, point + 1, capacity=capacity, weight=0)
            point += 1
        last[component] = point  # what is there after its last pass
        graph.add_edge(point, point + 1, capacity=capacity, weight=0)
        point += 1
    if point == 0:
        return 0
    graph.add_node(0, demand=-capacity)
    graph.add_node(point, demand=capacity)
    return int(copied + networkx.min_cost_flow_cost(graph))
