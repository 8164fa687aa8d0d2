"""Nodes, memory and the queue, as the web page asks for them."""

from __future__ import annotations

import asyncio
import os
import platform
import sys
from collections.abc import AsyncIterator, Mapping
from typing import Any

from aiohttp import web

from ...memory.errors import InvalidInput
from ...nodes.boundaries import FEATURES
from ...nodes.page_messages import EVENT, page_message
from ...nodes.routes import PROMPT_RUNS, make_routes
from ..comfy_stub.comfy_api import object_info
from ..comfy_stub.comfy_io import ComfyNode
from ..commands.doctor import examine
from ..runner.runner import WorkflowRunner
from ..runner.workflow import InvalidWorkflow, parse_workflow
from .job import Job
from .page_requests import Route, answer_json, read_count, read_object, texts, weigh_json
from .page_sockets import PageSockets
from .prompt_queue import PromptQueue

__all__ = ["RunRoutes"]


class RunRoutes:
    """Answers from the runner, its queue and its memory manager."""

    def __init__(self, runner: WorkflowRunner, node_classes: Mapping[str, type[ComfyNode]]) -> None:
        self.runner = runner
        self.node_classes = node_classes
        self.sockets = PageSockets()
        self.queue = PromptQueue(runner, self.sockets.publish)

    def routes(self) -> list[Route]:
        return [
            ("GET", "/ws", self.open_socket),
            *make_routes(
                is_running=lambda: self.runner.is_running,
                host_features=lambda: dict.fromkeys(FEATURES, True),
                examine=lambda: examine(None, os.environ),
                find_manager=lambda: self.runner.manager,
                find_loaders=self.runner.loader_rows,
            ),
            ("GET", "/system_stats", self.get_system_stats),
            ("GET", "/object_info", self.get_object_info),
            ("GET", "/object_info/{class_id}", self.get_object_info),
            ("GET", "/prompt", self.get_status),
            ("POST", "/prompt", self.post_prompt),
            ("GET", "/queue", self.get_queue),
            ("POST", "/queue", self.post_queue),
            ("POST", "/interrupt", self.post_interrupt),
            ("POST", "/free", self.post_free),
            ("GET", "/jobs", self.get_jobs),
            ("POST", "/jobs/cancel", self.post_cancel),
            ("GET", "/jobs/{job_id}", self.get_job),
            ("POST", "/jobs/{job_id}/cancel", self.post_cancel),
            ("GET", "/history", self.get_history),
            ("POST", "/history", self.post_history),
            ("GET", "/history/{job_id}", self.get_history),
        ]

    async def run(self, app: web.Application) -> AsyncIterator[None]:
        """Run the worker as long as the application; what the manager tells goes to every page."""
        self.sockets.open()
        manager = self.runner.manager
        unsubscribe = manager.subscribe(lambda message: self.sockets.publish(EVENT, page_message(message)))
        self.queue.start()
        yield
        unsubscribe()
        await asyncio.to_thread(self.queue.close)

    async def close_sockets(self, app: web.Application) -> None:
        await self.sockets.close()

    async def open_socket(self, request: web.Request) -> web.StreamResponse:
        greetings: list[tuple[str, dict[str, Any]]] = [("status", {"status": self.queue.status()})]
        job = self.queue.running
        if job is not None and job.current_node and job.client_id == request.query.get("clientId"):
            # The page was reloaded while its job runs.
            greetings.append(("executing", job.names(job.current_node)))
        return await self.sockets.serve_page(request, greetings)

    # -- nodes and memory

    async def get_object_info(self, request: web.Request) -> web.StreamResponse:
        """Return the nodes, or one of them; the choices are read from the folders each time."""
        class_id = request.match_info.get("class_id")
        classes = [node for id, node in self.node_classes.items() if class_id in (None, id)]
        return web.json_response(await asyncio.to_thread(object_info, classes))

    async def get_system_stats(self, request: web.Request) -> web.StreamResponse:
        import torch

        from ... import __version__
        from ...memory.transfer.devices import HostMemory

        found = await asyncio.to_thread(self.runner.manager.device_reports)
        memory = HostMemory.now()
        devices = [
            {
                "name": device.name,
                "type": device.name.partition(":")[0],
                "index": index,
                "vram_total": device.total_bytes,
                "vram_free": device.free_bytes,
                "torch_vram_total": device.managed_bytes,
                "torch_vram_free": 0,
            }
            for index, device in enumerate(found)
        ]
        system = {
            "os": sys.platform,
            "ram_total": memory.total_bytes,
            "ram_free": memory.free_bytes,
            "comfyui_version": f"none (highwater {__version__})",
            "python_version": platform.python_version(),
            "pytorch_version": torch.__version__,
            "embedded_python": False,
            "argv": sys.argv,
        }
        return web.json_response({"system": system, "devices": devices})

    # -- the queue

    async def get_status(self, request: web.Request) -> web.StreamResponse:
        return web.json_response(self.queue.status())

    async def post_prompt(self, request: web.Request) -> web.StreamResponse:
        """Check a prompt in full and queue it; an error names the node that it concerns."""
        body = await read_object(request)
        num_bytes = weigh_json(await request.read())
        graph = body.get("prompt")
        targets = body.get("partial_execution_targets")
        try:
            if graph is None:
                raise InvalidInput("the request has no 'prompt'; expected a workflow in API format")
            if targets is not None:
                graph = keep_ancestors(graph, targets)
            workflow = await asyncio.to_thread(parse_workflow, graph, source="prompt", node_classes=self.node_classes)
        except InvalidInput as error:
            return web.json_response(self.explain_refusal(error, graph), status=400)
        extra_data, client_id = body.get("extra_data"), body.get("client_id")
        job = Job(
            workflow=workflow,
            extra_data=extra_data if isinstance(extra_data, dict) else {},
            client_id=client_id if isinstance(client_id, str) else None,
            num_bytes=num_bytes,
        )
        number = body.get("number")
        self.queue.submit(
            job, number=number if isinstance(number, int | float) else None, front=body.get("front") is True
        )
        return web.json_response({"prompt_id": job.id, "number": job.number, "node_errors": {}})

    def explain_refusal(self, error: InvalidInput, graph: Any) -> dict[str, Any]:
        """Return ComfyUI's form of a validation error, which marks the node and its input in the page."""
        message = str(error).removeprefix("prompt: ")
        node_id = error.node_id if isinstance(error, InvalidWorkflow) else None
        if node_id is None or not isinstance(graph[node_id], dict):
            return {
                "error": {"type": "invalid_prompt", "message": message, "details": message, "extra_info": {}},
                "node_errors": {},
            }
        assert isinstance(error, InvalidWorkflow)
        class_id = str(graph[node_id].get("class_type"))
        if class_id not in self.node_classes:
            where = {"node_id": node_id, "class_type": class_id, "node_title": class_id}
            return {
                "error": {"type": "missing_node_type", "message": message, "details": message, "extra_info": where},
                "node_errors": {},
            }
        # Of ComfyUI's types, these two are the ones whose details the page shows at once and word for word.
        kind = "exception_during_inner_validation" if error.input_name else "exception_during_validation"
        problem = {
            "type": kind,
            "message": "Invalid input",
            "details": message.partition("): ")[2] or message,  # the page names the node itself
            "extra_info": {"input_name": error.input_name} if error.input_name else {},
        }
        return {
            "error": {
                "type": "prompt_outputs_failed_validation",
                "message": "Prompt outputs failed validation",
                "details": message,
                "extra_info": {},
            },
            "node_errors": {
                node_id: {"errors": [problem], "dependent_outputs": [], "class_type": class_id},
            },
        }

    async def get_queue(self, request: web.Request) -> web.StreamResponse:
        jobs = self.queue.jobs()
        by_status = {
            "queue_running": [job.queue_entry() for job in jobs if job.status.value == "in_progress"],
            "queue_pending": [job.queue_entry() for job in jobs if job.status.value == "pending"],
        }
        return await answer_json(by_status)

    async def post_queue(self, request: web.Request) -> web.StreamResponse:
        body = await read_object(request)
        self.queue.drop_waiting(None if body.get("clear") else texts(body.get("delete", ())))
        return web.Response()

    async def post_interrupt(self, request: web.Request) -> web.StreamResponse:
        body = await read_object(request)
        job_id = body.get("prompt_id")
        self.queue.interrupt(job_id if isinstance(job_id, str) else None)
        return web.Response()

    async def post_free(self, request: web.Request) -> web.StreamResponse:
        """Forget all cached results, and with them the models that they hold; not while a prompt runs."""
        if not self.runner.forget_results():
            return web.json_response({"error": PROMPT_RUNS}, status=409)
        return web.Response()

    async def post_cancel(self, request: web.Request) -> web.StreamResponse:
        """Stop jobs, waiting or running; finished ones stay as they are."""
        if "job_id" in request.match_info:
            ids = [request.match_info["job_id"]]
        else:
            ids = texts((await read_object(request)).get("job_ids", ()))
        self.queue.drop_waiting(ids)
        for job_id in ids:
            self.queue.interrupt(job_id)
        return web.json_response({"cancelled": ids})

    async def get_jobs(self, request: web.Request) -> web.StreamResponse:
        offset, limit = read_count(request, "offset", 0), read_count(request, "limit", 200)
        wanted = request.query["status"].split(",") if request.query.get("status") else None
        jobs = [job for job in self.queue.jobs() if wanted is None or job.status.value in wanted]
        page = jobs[offset : offset + limit]
        pagination = {
            "offset": offset,
            "limit": limit,
            "total": len(jobs),
            "has_more": offset + len(page) < len(jobs),
        }
        return await answer_json({"jobs": [job.summary() for job in page], "pagination": pagination})

    async def get_job(self, request: web.Request) -> web.StreamResponse:
        for job in self.queue.jobs():
            if job.id == request.match_info["job_id"]:
                return await answer_json(job.detail())
        return web.json_response({"error": "no such job"}, status=404)

    async def get_history(self, request: web.Request) -> web.StreamResponse:
        job_id = request.match_info.get("job_id")
        finished = [job for job in self.queue.jobs() if job.status.is_final and job_id in (None, job.id)]
        newest = finished[: read_count(request, "max_items", len(finished))]
        return await answer_json({job.id: job.history() for job in reversed(newest)})

    async def post_history(self, request: web.Request) -> web.StreamResponse:
        body = await read_object(request)
        self.queue.forget(None if body.get("clear") else texts(body.get("delete", ())))
        return web.Response()


def keep_ancestors(graph: Any, targets: Any) -> Any:
    """Return the part of a graph that the targets need, for running single output nodes from the page.

    Raises:
        InvalidInput: a target is not a node of the graph.
    """
    if not isinstance(graph, dict):
        return graph  # the check of the whole graph says what is wrong
    if not isinstance(targets, list) or not all(isinstance(target, str) for target in targets):
        raise InvalidInput("partial_execution_targets is not a list of node ids")
    for target in targets:
        if target not in graph:
            raise InvalidInput(f"partial execution target {target[:100]!r} is not in the prompt")
    wanted, kept = list(targets), set()
    while wanted:
        node_id = wanted.pop()
        if node_id in kept or node_id not in graph:
            continue
        kept.add(node_id)
        inputs = graph[node_id].get("inputs") if isinstance(graph[node_id], dict) else None
        for value in inputs.values() if isinstance(inputs, dict) else ():
            if isinstance(value, list) and value and isinstance(value[0], str):
                wanted.append(value[0])
    return {node_id: node for node_id, node in graph.items() if node_id in kept}
