"""What the command line prints: progress, tables, and the report."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import rich.box
from rich.console import Console as RichConsole
from rich.progress import BarColumn, MofNCompleteColumn, Progress, Task, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from ...memory.errors import one_line
from ...memory.options.budget import exact_size
from ...memory.options.precision import Precision
from ...memory.units import format_bytes
from ...nodes.report_text import describe_all_runs

__all__ = ["Console"]

SIZE_WIDTH = 24
"""Of an input's size in a table: inputs of many tensors have long ones, and amounts stand beside them."""


class DoneColumn(MofNCompleteColumn):
    """Steps of how many, or bytes of how many where a task's total is ``in_bytes``."""

    def render(self, task: Task) -> Text:
        if not task.fields.get("in_bytes"):
            return super().render(task)
        return Text(f"{format_bytes(int(task.completed))} of {format_bytes(int(task.total or 0))}")


class Console:
    """Prints for people, or nothing at all when ``quiet``."""

    def __init__(self, *, quiet: bool = False) -> None:
        self.out = RichConsole(quiet=quiet, highlight=False)
        if not self.out.is_terminal:
            self.out = RichConsole(quiet=quiet, highlight=False, width=120)

    @property
    def is_live(self) -> bool:
        """Whether the output is a terminal: progress bars would only fill a file."""
        return self.out.is_terminal and not self.out.quiet

    def say(self, text: str) -> None:
        self.out.print(text, markup=False, soft_wrap=True)

    def note(self, text: str) -> None:
        """Print a line that must be read: beside a JSON document it goes to standard error."""
        if self.out.quiet:
            print(one_line(text), file=sys.stderr)
        else:
            self.say(one_line(text))

    def title(self, text: str) -> None:
        self.out.print()
        self.out.rule(text, align="left")

    def progress(self) -> Progress:
        return Progress(
            TextColumn("  {task.description}"),
            BarColumn(bar_width=30),
            DoneColumn(),
            TimeElapsedColumn(),
            console=self.out,
        )

    @contextmanager
    def byte_bar(self, text: str) -> Iterator[Callable[[int, int], None]]:
        """Show a bar while something is done, and yield what takes the bytes done and the bytes in all."""
        if not self.is_live:
            yield lambda done, total: None
            return
        with self.progress() as bars:
            task = bars.add_task(text, in_bytes=True)
            yield lambda done, total: bars.update(task, completed=done, total=total)

    def table(self, *columns: str, numbers: int = 0) -> Table:
        """Return a table whose last ``numbers`` columns are right-aligned."""
        table = Table(box=rich.box.SIMPLE, pad_edge=False)
        for index, column in enumerate(columns):
            table.add_column(column, justify="right" if index >= len(columns) - numbers else "left", no_wrap=True)
        return table

    def show_summary(self, report: Mapping[str, Any]) -> None:
        """Print bytes per node and device, every eviction with its reason, and the bytes moved per run."""
        for section in describe_all_runs(report):
            self.title(section.title)
            for line in section.lines:
                self.say(f"  {line}")

    def show_devices(self, devices: list[dict[str, Any]], findings: list[dict[str, Any]]) -> None:
        """Print the devices, a row each, then what hides or renumbers any, and the remedy."""
        table = self.table("device", "total", "free", "keep free (low, high)", "peer access", numbers=4)
        for device in devices:
            mark = device["watermark"]
            kept = (
                f"{format_bytes(mark['low_bytes'])}, {format_bytes(mark['high_bytes'])}" if mark["high_bytes"] else "-"
            )
            table.add_row(
                device["name"],
                format_bytes(device["total_bytes"]),
                format_bytes(device["free_bytes"]),
                kept,
                ", ".join(device["peers"]) or "-",
            )
        self.out.print(table)
        for finding in findings:
            self.say(f"{finding['text']}{finding['remedy'] and ': '}{finding['remedy']}")
        if len(devices) == 1:
            self.say("no accelerator found; --devices simulates one")

    def show_profiles(self, profiles: list[dict[str, Any]]) -> None:
        """Print the profiles, a row each."""
        columns = ("RAM", "VRAM", "budgets", "pinned", "quantize", "prefetch", "disk\nunload", "reserve", "compile")
        table = self.table("profile", *columns)
        for profile in profiles:
            budgets = [f"{target}={size}" for target, size in profile["budgets"].items()]
            reserve = [f"{target}={size}" for target, size in profile["reserve"].items()]
            table.add_row(
                "\n".join(dict.fromkeys([profile["name"], profile["title"]])),
                exact_size(profile["ram_bytes"]) if profile["ram_bytes"] else "any",
                exact_size(profile["vram_bytes"]) if profile["vram_bytes"] else "any",
                "\n".join(budgets) or "all that is free",
                profile["pinned"].replace("&", "\n"),
                profile["quantize"].replace("&", "\n"),
                str(profile["prefetch_blocks"] or "auto"),
                f"{profile['on_demand']}\n{profile['unload']}",
                "\n".join(reserve) or "none",
                "on" if profile["compile"] else "off",
            )
        self.out.print(table)
        self.say(
            "RAM and VRAM: the machine that a profile was made for. It works on any machine: its budgets rise to the "
            "minimum that a model needs.\n"
            "Every value can be changed, such as 4,diffusion=2GiB,prefetch=2,reserve=1GiB. Budgets that you set do not "
            "rise.\n"
            f"quantize: the parts kept in {Precision.ENCODED.name!r}, or what form= says, if no precision is set. "
            "language: text encoders such as T5 and Llama, not CLIP."
        )

    def show_needs(self, files: Iterable[Mapping[str, Any]]) -> None:
        """Print the needs that each file holds, or how many of them were forgotten."""
        for file in files:
            needs = file.get("needs")
            count = file["num_forgotten"] if needs is None else len(needs)
            told = f"{count} learned {'need' if count == 1 else 'needs'}"
            self.say(f"{file['path']}: {told}{' deleted' if needs is None else ''}")
            if needs:
                table = self.table("component", "device", "input size", "needed", "kept free next", numbers=2)
                for need in needs:
                    kept = need["kept_bytes"]
                    amount = "maximum" if kept is None else format_bytes(kept)
                    size = need["size"]
                    size = size if len(size) <= SIZE_WIDTH else f"{size[: SIZE_WIDTH - 3]}..."
                    row = need["component"], need["device"], size, format_bytes(need["seen_bytes"]), amount
                    table.add_row(*row)
                self.out.print(table)

    def show_findings(self, answer: Mapping[str, Any]) -> None:
        """Print what the doctor found, a warning's remedy below it, and the features that are in effect."""
        for finding in answer["findings"]:
            mark = "warning" if finding["is_warning"] else "ok"
            self.say(f"{mark:8}{finding['check']:14}{finding['text']}")
            if finding["remedy"]:
                self.say(f"{'':22}-> {finding['remedy']}")
        working = [name.replace("_", " ") for name, state in answer["features"].items() if state is True]
        self.say(f"{'':8}{'working':14}{', '.join(working) or 'nothing'}")
        self.say(f"{answer['num_warnings']} warnings" if answer["num_warnings"] else "no warnings")
