"""ComfyUI's queue of prompts, as it is now: the only place that reads it.

A queue has had more fields with newer versions, and other packs may put anything into it: fields are taken by their
place, and what is no prompt is left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

__all__ = ["QueuedPrompt", "WaitingQueue", "read_queue"]


@dataclass(frozen=True, kw_only=True, slots=True)
class QueuedPrompt:
    """A prompt that runs or waits: its graph in API format, what was sent beside it, and the nodes to execute."""

    id: str
    graph: Any
    extra_data: Any
    outputs: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class WaitingQueue:
    """The prompts that run, and those that wait in the order in which they will run."""

    running: tuple[QueuedPrompt, ...] = ()
    waiting: tuple[QueuedPrompt, ...] = ()
    frees: bool = False
    """Whether the host was asked to unload models or to free memory, and does so once no prompt runs."""
    lost: str | None = None
    """Why it could not be read; None where it was."""

    def running_prompt(self, prompt_id: str) -> QueuedPrompt | None:
        return next((prompt for prompt in self.running if prompt.id == prompt_id), None)


def read_queue(server: Any) -> WaitingQueue:
    """Return the queue of ComfyUI's ``PromptServer``; copies no graph. Never raises."""
    read = getattr(getattr(server, "prompt_queue", None), "get_current_queue_volatile", None)
    if read is None:
        return WaitingQueue(lost="missing: this ComfyUI does not tell its queue (get_current_queue_volatile)")
    try:
        running, waiting = read()
        # The queue is a heap: only its first entry is where it belongs.
        return WaitingQueue(
            running=tuple(prompts_of(running)),
            waiting=tuple(prompts_of(in_turn(waiting))),
            frees=has_free_flag(server.prompt_queue),
        )
    except Exception as error:  # of the host, or of what another pack made of its queue
        return WaitingQueue(lost=f"failed: {type(error).__name__}: {error}")


def has_free_flag(queue: Any) -> bool:
    """Whether one of the flags is set that ``/free`` sets; the host takes them after a prompt, or when it is idle."""
    read = getattr(queue, "get_flags", None)
    flags = read(reset=False) if read is not None else {}
    return any(bool(flags.get(name)) for name in ("unload_models", "free_memory"))


def in_turn(entries: Iterable[Any]) -> list[Any]:
    """Return the entries by their numbers, equal ones as they come; those without a number last."""
    listed = list(entries)

    def turn(entry: Any) -> tuple[bool, float]:
        number = entry[0] if isinstance(entry, (list, tuple)) and entry else None
        is_number = isinstance(number, (int, float)) and number == number
        return not is_number, number if is_number else 0.0  # type: ignore[return-value]

    return sorted(listed, key=turn)


def prompts_of(entries: Iterable[Any]) -> Iterator[QueuedPrompt]:
    for entry in entries:
        if isinstance(entry, (list, tuple)) and len(entry) > 3 and isinstance(entry[1], str):
            outputs = entry[4] if len(entry) > 4 and isinstance(entry[4], (list, tuple)) else ()
            named = tuple(output for output in outputs if isinstance(output, str))
            yield QueuedPrompt(id=entry[1], graph=entry[2], extra_data=entry[3], outputs=named)
