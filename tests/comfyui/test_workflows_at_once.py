"""Workflows of several clients in one queue, and interrupts at any time: each result is core's, and nothing is left."""

from __future__ import annotations

import random
import threading
import time
import uuid

import pytest
import torch

from highwater.tests.comfyui.graphs import CORE, Graph, Loaders, lora, sample_flux
from highwater.tests.comfyui.host_process import HostProcess, PromptResult

STREAMED = Loaders(profile="4MiB")
WORKFLOWS = {
    "plain": (Loaders(), 0.0, 1),
    "streamed": (STREAMED, 0.0, 2),
    "lora": (STREAMED, 0.7, 3),
    "other device": (Loaders(placement="gpu:1"), 0.0, 4),
}
NUM_ROUNDS = 3


class Queued:
    """A prompt in the queue, whose result goes into a file of its own."""

    def __init__(self, host: HostProcess, loaders: Loaders, strength: float, seed: int) -> None:
        self.host, self.name = host, uuid.uuid4().hex
        graph = Graph()
        model = loaders.diffusion_model(graph)
        if strength:
            model = lora(graph, model, strength)
        graph.keep(sample_flux(graph, model, seed=seed), name=self.name)
        self.prompt_id = host.queue(graph.nodes)

    def end(self) -> PromptResult:
        return self.host.wait_for(self.prompt_id)

    def latent(self) -> torch.Tensor:
        result = self.end()
        assert result.outcome == "success", result.brief_error
        (tensor,) = result.kept(self.name).values()
        return tensor


@pytest.fixture(scope="module")
def expected(gpu_host: HostProcess) -> dict[str, torch.Tensor]:
    return {name: Queued(gpu_host, CORE, strength, seed).latent() for name, (_, strength, seed) in WORKFLOWS.items()}


def test_clients_queue_different_workflows_at_once(gpu_host: HostProcess, expected: dict[str, torch.Tensor]) -> None:
    """The weights fit the device only together with what streams; two of the workflows load the same file."""
    gpu_host.forget()
    prompts: list[tuple[str, Queued]] = []

    def client(name: str) -> None:
        for _ in range(NUM_ROUNDS):
            prompts.append((name, Queued(gpu_host, *WORKFLOWS[name])))

    clients = [threading.Thread(target=client, args=[name]) for name in WORKFLOWS]
    for each in clients:
        each.start()
    for each in clients:
        each.join()
    assert len(prompts) == NUM_ROUNDS * len(WORKFLOWS)
    for name, prompt in prompts:
        assert torch.equal(prompt.latent(), expected[name])
    leave_nothing(gpu_host)


@pytest.mark.expects_errors
def test_an_interrupt_at_any_time_leaves_the_next_run_as_it_is(
    gpu_host: HostProcess, expected: dict[str, torch.Tensor]
) -> None:
    """While it reads the file, packs, loads or samples; some come after the end."""
    dice = random.Random(0)
    for attempt in range(12):
        name = dice.choice([*WORKFLOWS])
        if attempt % 3 == 0:
            gpu_host.forget()
        num_messages = len(gpu_host.messages)
        stopped = Queued(gpu_host, *WORKFLOWS[name])
        gpu_host.wait_for_message("execution_start", after=num_messages)
        time.sleep(dice.random() * 0.6)
        gpu_host.post("/interrupt")
        assert stopped.end().outcome in ("interrupted", "success")
        again = Queued(gpu_host, *WORKFLOWS[name])
        if again.end().outcome == "interrupted":  # by the one that came after the end of the first
            again = Queued(gpu_host, *WORKFLOWS[name])
        assert torch.equal(again.latent(), expected[name])
        assert not any(component["leased"] for component in gpu_host.part("components"))
    leave_nothing(gpu_host)


def leave_nothing(host: HostProcess) -> None:
    host.forget()
    books = host.ask_devices("read")
    assert [device["used_bytes"] for device in books["devices"]] == [0, 0]
    assert books["pinned"]["used_bytes"] == 0
