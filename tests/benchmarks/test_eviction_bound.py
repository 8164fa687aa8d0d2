"""The bound of the eviction benchmark is one: no schedule of a small trace moves less, found by trying all."""

from __future__ import annotations

import itertools
from functools import cache

from hypothesis import given, settings
from hypothesis import strategies as st

from highwater.benchmarks.eviction.bound import least_bytes

names = st.sampled_from("abc")
uses = st.lists(st.tuples(names, st.integers(1, 3)), max_size=6)
sizes = st.fixed_dictionaries({name: st.integers(1, 3) for name in "abc"})


def best_of_all(trace: list[tuple[str, int]], sizes: dict[str, int], capacity: int) -> int:
    """Return the fewest blocks that are copied; tries every choice of what stays after each pass."""
    passes = [name for name, count in trace for _ in range(count)]

    @cache
    def from_here(number: int, held: tuple[int, ...]) -> int:
        if number == len(passes):
            return 0
        here = "abc".index(passes[number])
        copied = sizes[passes[number]] - held[here]
        most = [range(sizes["abc"[i]] + 1) if i == here else range(held[i] + 1) for i in range(3)]
        choices = (after for after in itertools.product(*most) if sum(after) <= capacity)
        return copied + min(from_here(number + 1, after) for after in choices)

    return from_here(0, (0, 0, 0))


@settings(max_examples=60, deadline=None)
@given(trace=uses, sizes=sizes, capacity=st.integers(0, 6))
def test_no_schedule_of_a_small_trace_moves_less(
    trace: list[tuple[str, int]], sizes: dict[str, int], capacity: int
) -> None:
    least = least_bytes(trace, sizes.__getitem__, capacity)
    assert least == best_of_all(trace, sizes, capacity), "as good as the best, where memory beside blocks is free"
