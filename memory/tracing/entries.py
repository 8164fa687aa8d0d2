"""Notes in a trace where an engine would see passes of a module begin and end: at its own call or its children's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from torch import nn

from .call_shapes import Shapes, shapes_of
from .recorder import Recorder
from .trace import EntryTrace, Work

__all__ = ["follow_entries"]


def follow_entries(recorder: Recorder, twin: nn.Module) -> None:
    """Tell a recorder of the passes of a twin; those of what calls each other inside of one are none."""
    entries = Entries(recorder)
    for number, module in enumerate((twin, *twin.children())):
        module.register_forward_pre_hook(partial(entries.begin, number), with_kwargs=True)
        module.register_forward_hook(entries.end, prepend=True)  # before what takes the trace there


class Entries:
    """The open passes of one twin, the outermost first."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self.open: list[tuple[int, Shapes, int, int]] = []
        """Number, shapes, and where each began: behind so many segments of the recorder, and kernels of the next."""

    def begin(self, number: int, _module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        shapes = () if self.open else shapes_of((args, kwargs))
        self.open.append((number, shapes, len(self.recorder.segments), len(self.recorder.kernels)))

    def end(self, _module: nn.Module, _args: Any, _output: Any) -> None:
        number, shapes, num_segments, before = self.open.pop()
        if self.open:
            return
        since = [kernel for segment in self.recorder.segments[num_segments:] for kernel in segment.kernels]
        work = Work.of([*since, *self.recorder.kernels][before:])
        self.recorder.entries.append((num_segments, EntryTrace(number, shapes, work)))
