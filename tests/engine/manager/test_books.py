"""Any deeds in any order leave true books. `make stateful` does 200,000 of them and keeps what it counted."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test

from highwater.tests.engine.manager.books_machine import BooksMachine

STEPS_OF_AN_EXAMPLE = 60
NUM_STEPS = int(os.environ.get("HIGHWATER_STATEFUL_STEPS", "1500"))
KEPT_IN = os.environ.get("HIGHWATER_STATEFUL_RESULTS")
HEAD = """# Any deeds in any order

What `make stateful` did in one run, counted. After each deed the books were compared with the slabs that exist and
with what the simulated devices count; every output was compared, bit for bit, with the unmanaged module's.
No difference was found.

| deed | how it ended | times |
|---|---|---|
"""


@pytest.mark.stateful
@pytest.mark.timeout(0)
def test_any_deeds_leave_true_books(sim) -> None:
    counts = BooksMachine.counts
    counts.clear()
    while sum(counts.values()) < NUM_STEPS:  # hypothesis ends some examples early
        run_state_machine_as_test(
            BooksMachine,
            settings=settings(max_examples=100, stateful_step_count=STEPS_OF_AN_EXAMPLE, database=None)
            if NUM_STEPS > 10_000
            else settings(max_examples=NUM_STEPS // STEPS_OF_AN_EXAMPLE, stateful_step_count=STEPS_OF_AN_EXAMPLE),
        )
    rows = [f"| {deed} | {end} | {times:,} |" for (deed, end), times in sorted(counts.items())]
    rows.append(f"| **all** | | **{sum(counts.values()):,}** |")
    if KEPT_IN:
        Path(KEPT_IN).write_text(HEAD + "\n".join(rows) + "\n")
