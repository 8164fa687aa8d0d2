"""One queued prompt, and what became of it, as the page asks for it."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from ...nodes.prompts import workflow_id_of
from ..runner.workflow import Workflow

__all__ = ["Job", "JobStatus", "now_ms"]

MAX_ID_LENGTH = 200


class JobStatus(str, Enum):
    """What the page calls the states of a job."""

    PENDING = "pending"
    IN_PROGRESS = "in_progress"
    COMPLETED = "completed"
    FAILED = "failed"
    CANCELLED = "cancelled"

    @property
    def is_final(self) -> bool:
        return self not in (JobStatus.PENDING, JobStatus.IN_PROGRESS)


@dataclass(kw_only=True, slots=True, eq=False)
class Job:
    """One queued prompt and what became of it. Times in milliseconds since 1970, as the page wants them."""

    workflow: Workflow
    extra_data: Mapping[str, Any]
    client_id: str | None
    num_bytes: int = 0
    """About what it takes of memory: its request, and what its nodes have shown."""
    number: float = 0.0
    id: str = field(default_factory=lambda: str(uuid.uuid4()))
    status: JobStatus = JobStatus.PENDING
    create_ms: int = field(default_factory=lambda: now_ms())
    start_ms: int | None = None
    end_ms: int | None = None
    outputs: dict[str, dict[str, Any]] = field(default_factory=dict)
    finished_nodes: list[str] = field(default_factory=list)
    current_node: str | None = None
    is_interrupted: bool = False
    error: dict[str, Any] | None = None
    messages: list[tuple[str, dict[str, Any]]] = field(default_factory=list)

    @property
    def extra_pnginfo(self) -> Mapping[str, Any] | None:
        found = self.extra_data.get("extra_pnginfo")
        return found if isinstance(found, Mapping) else None

    @property
    def workflow_id(self) -> str | None:
        """The id of the page's graph, which tells equal node ids of two workflows apart."""
        found = workflow_id_of(self.extra_data)
        return found[:MAX_ID_LENGTH] if found is not None else None

    # -- what becomes of it

    def enter(self, number: float) -> None:
        """Note its number in the queue: the least runs first."""
        self.number = number

    def interrupt(self) -> None:
        """Note that it is to stop at its next step."""
        self.is_interrupted = True

    def begin(self) -> None:
        self.status, self.start_ms = JobStatus.IN_PROGRESS, now_ms()

    def skip(self, node_ids: Iterable[str]) -> None:
        """Note nodes whose results are known already."""
        self.finished_nodes += node_ids

    def begin_node(self, node_id: str) -> None:
        """Note that a node runs now, and that the one before has finished."""
        if self.current_node is not None:
            self.finished_nodes.append(self.current_node)
        self.current_node = node_id

    def fail_at(self, node_id: str) -> None:
        """Note the node that failed."""
        self.current_node = node_id

    def show(self, node_id: str, shown: dict[str, Any], num_bytes: int) -> None:
        """Keep what a node shows, and about how much memory that takes."""
        self.num_bytes += num_bytes
        self.outputs[node_id] = shown

    def stop(self, error: dict[str, Any] | None) -> None:
        """Note when it ended, and why it failed if it did; `finish` makes that its status."""
        self.end_ms = now_ms()
        if error is not None:
            self.error = {**error, "prompt_id": self.id, "timestamp": self.end_ms}

    def finish(self, status: JobStatus) -> None:
        self.status = status

    def note(self, event: str, data: dict[str, Any]) -> None:
        """Keep a message for the history."""
        self.messages.append((event, data))

    # -- what pages ask for

    def names(self, node_id: str | None) -> dict[str, Any]:
        """Return what a message about one of its nodes, or about none any more, begins with."""
        return {"node": node_id, "display_node": node_id, "prompt_id": self.id}

    def class_of(self, node_id: str) -> str:
        return str(self.workflow.prompt[node_id]["class_type"])

    def queue_entry(self) -> list[Any]:
        """Return the job as ``GET /queue`` lists it."""
        return [self.number, self.id, self.workflow.prompt, self.extra_data, list(self.workflow.output_ids)]

    def summary(self) -> dict[str, Any]:
        """Return the job as ``GET /jobs`` lists it; the first image stands for its outputs."""
        files = [
            {**item, "nodeId": node_id, "mediaType": kind}
            for node_id, shown in self.outputs.items()
            for kind, items in shown.items()
            for item in items
            if isinstance(item, dict) and "filename" in item
        ]
        return {
            "id": self.id,
            "status": self.status.value,
            "priority": self.number,
            "create_time": self.create_ms,
            "execution_start_time": self.start_ms,
            "execution_end_time": self.end_ms,
            "outputs_count": len(files),
            "previewable_outputs_count": len(files),
            "preview_output": files[0] if files else None,
            "execution_error": self.error,
            "workflow_id": self.workflow_id,
        }

    def detail(self) -> dict[str, Any]:
        """Return the job as ``GET /jobs/{id}`` shows it, with its graph."""
        return {
            **self.summary(),
            "update_time": self.end_ms or self.start_ms or self.create_ms,
            "outputs": dict(self.outputs),
            "workflow": {"prompt": self.workflow.prompt, "extra_data": self.extra_data},
        }

    def history(self) -> dict[str, Any]:
        """Return the job as ``GET /history`` shows it."""
        succeeded = self.status is JobStatus.COMPLETED
        return {
            "prompt": self.queue_entry(),
            "outputs": self.outputs,
            "status": {
                "status_str": "success" if succeeded else "error",
                "completed": succeeded,
                "messages": [list(message) for message in self.messages],
            },
            "meta": {},
        }


def now_ms() -> int:
    return time.time_ns() // 1_000_000
