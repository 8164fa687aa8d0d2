"""Prompts in the order in which they run, one at a time, and what the page is told about each of them.

[Note: threads] Requests are answered on the event loop, workflows run in one worker thread, and both touch the
queue under one lock. Nothing is published under the lock, and `Publish` may be called from any thread.
"""

from __future__ import annotations

import json
import threading
import traceback
from collections.abc import Callable, Iterable
from typing import Any

from ...memory.errors import InvalidInput
from ..runner.runner import InterruptedRun, Upcoming, WorkflowRunner
from .job import Job, JobStatus, now_ms
from .page_requests import weigh_json

__all__ = ["PromptQueue", "Publish"]

# (event, data, client id): to one client's page, or to every page when the id is None.
Publish = Callable[[str, dict[str, Any], "str | None"], None]

# Finished jobs that stay listed; the page asks for 200 at a time. Fewer where they are large.
MAX_FINISHED = 200
MAX_FINISHED_BYTES = 128 << 20
MAX_WAITING_BYTES = 512 << 20
MAX_WAITING = 10_000
MAX_ERROR_LENGTH = 10_000


class PromptQueue:
    """Runs jobs one after another and publishes ComfyUI's events about them."""

    def __init__(self, runner: WorkflowRunner, publish: Publish) -> None:
        self.runner = runner
        self.publish = publish
        self.changed = threading.Condition()
        self.waiting: list[Job] = []
        self.running: Job | None = None
        self.finished: list[Job] = []
        self.num_submitted = 0
        self.closing = False
        self.worker = threading.Thread(target=self.work, name="highwater-prompts", daemon=True)

    # -- requests

    def start(self) -> None:
        self.worker.start()

    def close(self) -> None:
        """Interrupt the running job and end the worker; waits up to 10 s for a step to end."""
        with self.changed:
            self.closing = True
            self.waiting.clear()
            self.changed.notify_all()
            if self.running is not None:
                self.running.interrupt()
                self.runner.interrupt()
        if self.worker.is_alive():
            self.worker.join(timeout=10)

    def submit(self, job: Job, *, number: float | None = None, front: bool = False) -> None:
        """Queue a job: at the end, at a given number, or before all others.

        Raises:
            InvalidInput: too many wait already, or too large ones.
        """
        with self.changed:
            waiting_bytes = sum(other.num_bytes for other in self.waiting)
            if len(self.waiting) >= MAX_WAITING or waiting_bytes + job.num_bytes > MAX_WAITING_BYTES:
                raise InvalidInput(
                    f"the queue is full: {len(self.waiting)} prompts wait, about {waiting_bytes >> 20} MiB; allowed: "
                    f"{MAX_WAITING} prompts, {MAX_WAITING_BYTES >> 20} MiB"
                )
            self.num_submitted += 1
            last = self.num_submitted if number is None else number
            job.enter(-self.num_submitted if front else last)
            self.waiting.append(job)
            self.waiting.sort(key=lambda waiting: waiting.number)
            self.changed.notify_all()
        self.publish_status()

    def drop_waiting(self, ids: Iterable[str] | None = None) -> None:
        """Take waiting jobs out of the queue, all of them by default; unknown ids are none."""
        wanted = None if ids is None else set(ids)
        with self.changed:
            self.waiting = [job for job in self.waiting if wanted is not None and job.id not in wanted]
        self.publish_status()

    def interrupt(self, job_id: str | None = None) -> None:
        """Stop the running job at its next step, if it is the one that is meant."""
        with self.changed:
            if self.running is not None and job_id in (None, self.running.id):
                self.running.interrupt()
                self.runner.interrupt()

    def forget(self, ids: Iterable[str] | None = None) -> None:
        """Remove finished jobs from the history, all of them by default; their files stay."""
        wanted = None if ids is None else set(ids)
        with self.changed:
            self.finished = [job for job in self.finished if wanted is not None and job.id not in wanted]

    def jobs(self) -> list[Job]:
        """Return every known job: waiting, running, then finished with the newest first."""
        with self.changed:
            running = [self.running] if self.running else []
            return [*self.waiting, *running, *reversed(self.finished)]

    def num_remaining(self) -> int:
        with self.changed:
            return len(self.waiting) + (self.running is not None)

    def status(self) -> dict[str, Any]:
        return {"exec_info": {"queue_remaining": self.num_remaining()}}

    def publish_status(self) -> None:
        self.publish("status", {"status": self.status()}, None)

    # -- the worker

    def work(self) -> None:
        while (job := self.take()) is not None:
            self.run(job)

    def take(self) -> Job | None:
        """Wait for the next job; None when the queue closes."""
        with self.changed:
            self.changed.wait_for(lambda: self.waiting or self.closing)
            if self.closing:
                return None
            self.running = self.waiting.pop(0)
            return self.running

    def run(self, job: Job) -> None:
        """Run a job to success, failure or cancellation; the worker survives every error of a node."""
        job.begin()
        self.tell(job, "execution_start", {})
        try:
            self.runner.run(
                job.workflow,
                name=name_of(job),
                run_id=job.id,
                upcoming=self.upcoming,
                extra_pnginfo=job.extra_pnginfo,
                listener=lambda event, *details: self.on_event(job, event, *details),
            )
        except InterruptedRun:
            self.finish(job, JobStatus.CANCELLED, "execution_interrupted", self.stopped_at(job))
        # A node may raise anything, SystemExit too: the page shows it, and the next job runs. Ctrl+C is raised in the
        # main thread, never in this one.
        except BaseException as error:
            # The page names the node itself: it is told what the node raised, not the runner's wrapping.
            described = describe(error.__cause__ or error)
            self.finish(job, JobStatus.FAILED, "execution_error", {**self.stopped_at(job), **described})
        else:
            self.finish(job, JobStatus.COMPLETED, "execution_success", {})

    def upcoming(self) -> list[Upcoming]:
        """Return the workflows that wait, the next first."""
        with self.changed:
            return [Upcoming(id=job.id, name=name_of(job), workflow=job.workflow) for job in self.waiting]

    def finish(self, job: Job, status: JobStatus, event: str, data: dict[str, Any]) -> None:
        job.stop(data if status is JobStatus.FAILED else None)
        self.tell(job, event, data)
        with self.changed:
            job.finish(status)
            self.running = None
            self.finished = newest_within([*self.finished, job])
        self.publish("executing", job.names(None), job.client_id)
        self.publish_status()

    def stopped_at(self, job: Job) -> dict[str, Any]:
        node_id = job.current_node
        return {
            "node_id": node_id or "",
            "node_type": job.class_of(node_id) if node_id else "",
            "executed": list(job.finished_nodes),
        }

    def tell(self, job: Job, event: str, data: dict[str, Any]) -> None:
        """Publish an event of the kind that the history keeps."""
        data = {**data, "prompt_id": job.id, "timestamp": now_ms()}
        job.note(event, data)
        self.publish(event, data, job.client_id)

    def on_event(self, job: Job, event: str, *details: Any) -> None:
        """Pass on what the runner says while it runs; called in the worker thread."""
        if job.is_interrupted:  # asked for between being taken and being run, when the runner forgets it
            self.runner.interrupt()
        match event, details:
            case "error", (node_id, _):
                job.fail_at(node_id)
            case "cached", (node_ids,):
                job.skip(node_ids)
                self.tell(job, "execution_cached", {"nodes": list(node_ids)})
            case "executing", (node_id,):
                job.begin_node(node_id)
                self.publish("executing", job.names(node_id), job.client_id)
                self.publish_progress(job, node_id, 0, 1, "running")
            case ("progress", (node_id, value, maximum)) | ("loading", (node_id, _, value, maximum)):
                data = {"node": node_id, "prompt_id": job.id, "value": value, "max": maximum}
                self.publish("progress", data, job.client_id)
                self.publish_progress(job, node_id, value, maximum, "running")
            case "executed", (node_id, shown):
                job.show(node_id, shown, count_bytes(node_id, shown))
                self.publish("executed", job.names(node_id) | {"output": shown}, job.client_id)

    def publish_progress(self, job: Job, node_id: str, value: float, maximum: float, state: str) -> None:
        """Say how far a node is; the page takes the whole state each time, and one node runs at a time."""
        node = {
            "value": value,
            "max": maximum,
            "state": state,
            "node_id": node_id,
            "real_node_id": node_id,
            "display_node_id": node_id,
            "parent_node_id": None,
            "prompt_id": job.id,
        }
        self.publish("progress_state", {"prompt_id": job.id, "nodes": {node_id: node}}, job.client_id)


def name_of(job: Job) -> str:
    """Return the name by which the report, and so the page, tells equal node ids of two workflows apart."""
    return job.workflow_id or job.id


def newest_within(jobs: list[Job]) -> list[Job]:
    """Return the newest of finished jobs, as many as may be kept, the last one always."""
    kept: list[Job] = []
    for job in reversed(jobs[-MAX_FINISHED:]):
        if kept and sum(other.num_bytes for other in kept) + job.num_bytes > MAX_FINISHED_BYTES:
            break
        kept.append(job)
    return kept[::-1]


def count_bytes(node_id: str, shown: Any) -> int:
    """Return about how many bytes of memory it takes what a node shows.

    Raises:
        ValueError: it cannot be sent to a page: the next to ask for the history would be told nothing at all.
    """
    try:
        return weigh_json(json.dumps(shown, allow_nan=False).encode())
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"node {node_id} shows a value that is not valid JSON: {error}") from error


def describe(error: BaseException) -> dict[str, Any]:
    """Return an error as the page shows it: what it says, its full type name and where it came from."""
    kind = type(error)
    name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    try:
        message = str(error)
    except Exception:  # the __str__ of a node's own error may raise anything
        message = f"{name}, whose message cannot be read"
    return {
        "exception_message": message[:MAX_ERROR_LENGTH],
        "exception_type": name,
        "traceback": traceback.format_tb(error.__traceback__, limit=-50),
        "current_inputs": {},
        "current_outputs": [],
    }
