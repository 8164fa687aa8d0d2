"""What the case of the badges counts."""

from __future__ import annotations

import pytest

from highwater.benchmarks.badges import num_asks


@pytest.mark.parametrize(("times", "asked"), [([], 0), ([1.0], 1), ([1.0, 1.1, 1.2], 1), ([1.0, 1.3, 1.4, 9.0], 3)])
def test_a_page_asks_once_for_what_comes_meanwhile(times: list[float], asked: int) -> None:
    assert num_asks(times, 0.2) == asked
