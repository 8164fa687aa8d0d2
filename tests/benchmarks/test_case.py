"""What a case's result looks like."""

from __future__ import annotations

from highwater.benchmarks.case import Result


def test_every_table_has_its_sentence_and_its_own_columns() -> None:
    more = {"What else was seen.": [{"feature": "LoRA", "dynamic": "equal"}]}
    lines = Result(question="", rows=[{"run": "A", "ratio": 0.5}], ratio=0.5, meaning="", more=more).markdown()
    assert lines == [
        "| run | ratio |",
        "|----:|------:|",
        "|   A | 0.500 |",
        "",
        "What else was seen.",
        "",
        "| feature | dynamic |",
        "|--------:|--------:|",
        "|    LoRA |   equal |",
    ]
