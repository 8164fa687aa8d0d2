"""Runs two calls in two threads, the second one at a chosen line of the first."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import highwater.memory

__all__ = ["Interleaving", "lines_of"]

ENGINE = str(Path(highwater.memory.__file__).parent)
LOOK_EVERY_S = 0.001
# After so many looks that find the second thread at the same instruction, it waits for the first one.
LOOKS_UNTIL_WAITING = 15


class Interleaving:
    """Two calls: ``first`` in a thread of its own, which stops before a line; there ``second`` runs in another.

    The first goes on when the second has ended or waits for it. A second call that is only slow is taken for waiting
    after a while; then both run at once, which is a legal interleaving, too.

    Args:
        room: the folder of the engine whose lines count, or the beginning of the names of files; ``/``: all lines.
        step: what counts as a line: ``line``, or ``opcode`` for each instruction of the interpreter.
    """

    def __init__(self, first: Callable[[], Any], second: Callable[[], Any], *, room: str, step: str = "line") -> None:
        self.calls = first, second
        self.step = step
        self.room = os.path.join(ENGINE, room)
        self.outcomes: list[Any] = [None, None]
        """What each call returned or raised."""
        self.lines: list[tuple[CodeType, int]] = []
        """The lines of the room that the first call ran through."""

    def run(self, stop_at: int) -> list[Any]:
        """Run both, the second before the line of this number; returns what they returned or raised."""
        self.stop_at = stop_at
        self.threads = [threading.Thread(target=self.work, args=(number,), daemon=True) for number in range(2)]
        self.threads[0].start()
        for thread in self.threads:
            if thread.ident is not None:
                thread.join(600)
                assert not thread.is_alive(), "hangs"
        return self.outcomes

    def work(self, number: int) -> None:
        if number == 0:
            sys.settrace(self.trace)
        try:
            self.outcomes[number] = self.calls[number]()
        except BaseException as error:
            self.outcomes[number] = error
        finally:
            sys.settrace(None)

    def trace(self, frame: FrameType, event: str, arg: Any) -> Any:
        if not frame.f_code.co_filename.startswith(self.room):
            return None
        frame.f_trace_opcodes = self.step == "opcode"
        return self.trace_line

    def trace_line(self, frame: FrameType, event: str, arg: Any) -> Any:
        if event == self.step:
            if len(self.lines) == self.stop_at:
                self.run_second()
            self.lines.append((frame.f_code, frame.f_lineno if event == "line" else frame.f_lasti))
        return self.trace_line

    def run_second(self) -> None:
        second = self.threads[1]
        second.start()
        at, num_looks = None, 0
        while num_looks < LOOKS_UNTIL_WAITING:
            second.join(LOOK_EVERY_S)
            if not second.is_alive():
                return
            frame = sys._current_frames().get(second.ident)
            found = (id(frame), frame.f_lasti) if frame is not None else None
            num_looks = num_looks + 1 if found == at else 0
            at = found


def lines_of(call: Callable[[], Any], *, room: str, step: str = "line") -> list[tuple[int, str]]:
    """Return each line of a room that a call runs through: when it did last, as a number of lines, and its place."""
    alone = Interleaving(call, lambda: None, room=room, step=step)
    alone.run(-1)
    last = {line: number for number, line in enumerate(alone.lines)}
    return sorted((number, f"{Path(code.co_filename).name}:{line}") for (code, line), number in last.items())
