"""What the case of the badges counts."""

from __future__ import annotations

import pytest

from highwater.benchmarks.badges import num_asks

SOON, LATER = 0.2, 1.0


@pytest.mark.parametrize(
    ("wishes", "asked"),
    [
        ([], 0),
        ([(1.0, SOON)], 1),
        ([(1.0, SOON), (1.1, SOON), (1.2, SOON)], 1),
        ([(1.0, SOON), (1.3, SOON), (1.4, SOON), (9.0, SOON)], 3),
        ([(1.0, LATER), (1.1, SOON), (1.2, LATER)], 1),
        ([(1.0, LATER), (1.1, SOON), (1.4, LATER)], 2),
    ],
)
def test_a_page_asks_once_for_what_comes_meanwhile(wishes: list[tuple[float, float]], asked: int) -> None:
    assert num_asks(wishes) == asked
