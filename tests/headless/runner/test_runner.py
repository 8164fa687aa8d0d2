"""What a run tells, and that a failed or interrupted one leaves a working runner behind."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

import pytest
import torch
from safetensors.torch import save_file

from highwater.headless.comfy_stub.comfy_api import ComfyAPISync
from highwater.headless.comfy_stub.comfy_io import AnyType, ComfyNode, Hidden, Int, NodeOutput, Schema
from highwater.headless.runner.runner import InterruptedRun, NodeFailed, WorkflowRunner
from highwater.headless.runner.workflow import InvalidWorkflow, Workflow, parse_workflow
from highwater.memory import MemoryManager, load_model, manage
from highwater.memory.errors import InvalidInput


class Step(ComfyNode):
    """Reports three steps of progress, then does what the test planned for it."""

    plan: ClassVar[Any] = None
    seen: ClassVar[list[Any]] = []

    @classmethod
    def define_schema(cls) -> Schema:
        return Schema(
            node_id="Step",
            display_name="One Step",
            inputs=[Int.Input("value"), AnyType.Input("after", optional=True)],
            outputs=[AnyType.Output()],
            hidden=[Hidden.unique_id],
            is_output_node=True,
        )

    @classmethod
    def execute(cls, value: int, after: Any = None) -> NodeOutput | None:
        Step.seen.append((cls.hidden.unique_id, cls.hidden.prompt, cls.hidden.extra_pnginfo))
        for step in range(3):
            ComfyAPISync().execution.set_progress(step + 1, 3)
        if Step.plan is not None and value == 2:
            return Step.plan()
        return NodeOutput(value, ui={"text": [str(value)]})


def chain() -> Workflow:
    """Three steps, one after another."""
    graph: dict[str, Any] = {
        str(i): {
            "class_type": "Step",
            "inputs": {"value": i, **({"after": [str(i - 1), 0]} if i > 1 else {})},
            "_meta": {"title": f"Number {i}"},
        }
        for i in (1, 2, 3)
    }
    return parse_workflow(graph, node_classes={"Step": Step})


@pytest.fixture
def runner(tmp_path: Path) -> Any:
    Step.plan = None
    Step.seen = []
    runner = WorkflowRunner(MemoryManager(), models_directory=tmp_path, output_directory=tmp_path)
    yield runner
    Step.plan = None


def test_a_run_tells_what_it_does_in_order(runner: WorkflowRunner) -> None:
    progress: list[Any] = []
    runner.on_progress = lambda *event: progress.append(event)
    events: list[Any] = []
    result = runner.run(chain(), name="chain", listener=lambda *event: events.append(event))
    one = [
        [("executing", i), *(("progress", i, s, 3) for s in (1, 2, 3)), ("executed", i, {"text": [i]})] for i in "123"
    ]
    assert events == [("cached", []), *one[0], *one[1], *one[2]]
    assert progress == [(i, s, 3) for i in "123" for s in (1, 2, 3)]
    assert (result.executed, result.cached) == (("1", "2", "3"), ())

    events.clear()
    again = runner.run(chain(), name="chain", listener=lambda *event: events.append(event))
    assert events == [("cached", ["1", "2", "3"]), *(("executed", i, {"text": [i]}) for i in "123")]
    assert (again.executed, again.cached) == ((), ("1", "2", "3"))
    assert again.outputs == result.outputs


def test_nodes_see_their_id_the_prompt_and_the_metadata_on_a_clone(runner: WorkflowRunner) -> None:
    workflow = chain()
    runner.run(workflow, name="chain", extra_pnginfo={"workflow": {"nodes": []}})
    assert Step.seen == [(i, workflow.prompt, {"workflow": {"nodes": []}}) for i in "123"]
    assert Step.hidden.unique_id is None


def test_the_manager_hears_of_every_run_and_executed_node(runner: WorkflowRunner) -> None:
    result = runner.run(chain(), name="chain")
    runner.run(chain(), name="chain")
    report = runner.manager.report()
    assert [(node["node_id"], node["title"], node["workflow_id"]) for node in report["nodes"]] == [
        (i, f"Number {i}", "chain") for i in "123"
    ]
    assert {node["run_id"] for node in report["nodes"]} == {result.run_id}
    assert [run["name"] for run in report["runs"]] == ["chain", "chain"]
    assert all(run["end_s"] is not None for run in report["runs"])


def raise_error(error: BaseException) -> None:
    raise error


@pytest.mark.parametrize(
    ("plan", "kind", "said"),
    [
        (lambda: raise_error(RuntimeError("no paper")), NodeFailed, "failed: RuntimeError: no paper"),
        (lambda: raise_error(InvalidInput("size 'A7' is not here")), InvalidWorkflow, "size 'A7' is not here"),
        (lambda: None, NodeFailed, "Step must return a NodeOutput of 1 values"),
        (lambda: NodeOutput(), NodeFailed, "Step must return a NodeOutput of 1 values"),
    ],
)  # fmt: skip
def test_an_error_names_the_node_and_the_rest_of_the_cache_stays(
    runner: WorkflowRunner, plan: Any, kind: type[Exception], said: str
) -> None:
    Step.plan = plan
    events: list[Any] = []
    with pytest.raises(kind, match=rf"^node 2 \(Number 2\).*{said}$") as caught:
        runner.run(chain(), name="chain", listener=lambda *event: events.append(event))
    assert caught.value.node_id == "2"
    assert events[-1] == ("error", "2", caught.value)
    assert runner.manager.report()["runs"][-1]["end_s"] is not None

    Step.plan = None
    result = runner.run(chain(), name="chain")
    assert (result.executed, result.cached) == (("2", "3"), ("1",))


def test_an_interrupt_stops_at_the_next_step_and_the_next_run_works(runner: WorkflowRunner) -> None:
    events: list[Any] = []

    def interrupt_in_the_middle(*event: Any) -> None:
        events.append(event)
        if event == ("progress", "2", 2, 3):
            runner.interrupt()

    with pytest.raises(InterruptedRun) as caught:
        runner.run(chain(), name="chain", listener=interrupt_in_the_middle)
    assert events[-2:] == [("progress", "2", 2, 3), ("error", "2", caught.value)]
    assert runner.manager.report()["runs"][-1]["end_s"] is not None
    result = runner.run(chain(), name="chain")
    assert (result.executed, result.cached) == (("2", "3"), ("1",))


def test_loadings_are_told_and_cancelled_after_the_block(runner: WorkflowRunner) -> None:
    events: list[Any] = []
    done: list[int] = []

    def load_four_blocks() -> NodeOutput:
        for block in (1, 2, 3, 4):
            for watcher in list(runner.manager.leases.watchers):
                watcher("unet", block, 4)
            done.append(block)
        return NodeOutput(2)

    def listen(*event: Any) -> None:
        events.append(event)
        if event[0] == "loading" and event[3] == 2:
            runner.interrupt()

    Step.plan = load_four_blocks
    with pytest.raises(InterruptedRun):
        runner.run(chain(), name="chain", listener=listen)
    assert [event for event in events if event[0] == "loading"] == [("loading", "2", "unet", n, 4) for n in (1, 2)]
    assert done == [1] and runner.manager.leases.watchers == []
    assert runner.run(chain(), name="chain").executed == ("2", "3")
    assert done == [1, 1, 2, 3, 4] and runner.manager.leases.watchers == []


def test_an_interrupt_between_runs_stops_nothing(runner: WorkflowRunner) -> None:
    runner.interrupt()
    assert runner.run(chain(), name="chain").executed == ("1", "2", "3")


def test_progress_outside_of_a_node_is_a_mistake() -> None:
    with pytest.raises(ValueError, match="outside of a node"):
        ComfyAPISync().execution.set_progress(1, 2)


def test_in_comfyui_the_cancel_button_ends_sampling(monkeypatch: pytest.MonkeyPatch) -> None:
    from highwater.headless.comfy_stub.comfy_api import executing_node
    from highwater.nodes.progress import report_progress

    class Cancelled(BaseException):
        """What ComfyUI raises."""

    def raise_cancelled() -> None:
        raise Cancelled

    reported: list[Any] = []
    model_management = ModuleType("comfy.model_management")
    monkeypatch.setattr(model_management, "throw_exception_if_processing_interrupted", raise_cancelled, raising=False)
    monkeypatch.setitem(sys.modules, "comfy.model_management", model_management)
    with executing_node(lambda *progress: reported.append(progress)), pytest.raises(Cancelled):
        report_progress(2, 4)
    assert reported == [(2, 4)]


@pytest.mark.parametrize("in_comfyui", [False, True])
def test_a_loading_is_shown_once(
    runner: WorkflowRunner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_comfyui: bool
) -> None:
    """Our own host shows those of every node: a second bar would jump between the same numbers."""
    from highwater.headless.comfy_stub.comfy_api import executing_node
    from highwater.nodes.progress import showing_loadings

    monkeypatch.setattr("highwater.memory.manager.default.made", [runner.manager])
    if in_comfyui:
        model_management = ModuleType("comfy.model_management")
        monkeypatch.setattr(model_management, "throw_exception_if_processing_interrupted", lambda: None, raising=False)
        monkeypatch.setitem(sys.modules, "comfy.model_management", model_management)

    path = tmp_path / "net.safetensors"
    save_file({"weight": torch.ones(8, 8), "bias": torch.ones(8)}, path)
    net = load_model(path, torch.nn.Linear, config={"in_features": 8, "out_features": 8})

    def take() -> NodeOutput:
        with showing_loadings():
            manage(net, placement="cpu", manager=runner.manager)
        return NodeOutput(2)

    told: list[Any] = []
    if in_comfyui:
        with executing_node(lambda *progress: told.append(("progress", "2", *progress))):
            take()
    else:
        Step.plan = take
        runner.run(chain(), name="chain", listener=lambda *event: told.append(event))
    runner.manager.release_all()
    num_bytes = (8 * 8 + 8) * 4
    assert (("loading", "2", "model", num_bytes, num_bytes) in told) != in_comfyui
    assert (("progress", "2", num_bytes, num_bytes) in told) == in_comfyui
    assert runner.manager.leases.watchers == []


def test_in_comfyui_the_cancel_button_ends_a_loading_at_every_step(
    runner: WorkflowRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also at those that the bar does not show."""
    from highwater.headless.comfy_stub.comfy_api import executing_node
    from highwater.nodes.progress import showing_loadings

    class Cancelled(BaseException):
        """What ComfyUI raises."""

    asked: list[int] = []

    def cancel_third() -> None:
        asked.append(len(asked) + 1)
        if len(asked) == 3:
            raise Cancelled

    model_management = ModuleType("comfy.model_management")
    monkeypatch.setattr(model_management, "throw_exception_if_processing_interrupted", cancel_third, raising=False)
    monkeypatch.setitem(sys.modules, "comfy.model_management", model_management)
    monkeypatch.setattr("highwater.memory.manager.default.made", [runner.manager])
    monkeypatch.setattr("highwater.nodes.progress.SHOWN_EVERY_S", 3600.0)
    shown: list[Any] = []
    with executing_node(lambda *progress: shown.append(progress)), pytest.raises(Cancelled), showing_loadings():
        for done in range(1, 5):
            for watcher in list(runner.manager.leases.watchers):
                watcher("unet", done, 4)
    assert shown == [(1, 4)] and asked == [1, 2, 3]
    assert runner.manager.leases.watchers == []


@pytest.mark.parametrize("interrupts", [False, True])
def test_a_model_that_is_read_from_its_file_shows_how_far_it_is(
    runner: WorkflowRunner, tmp_path: Path, interrupts: bool
) -> None:
    path = tmp_path / "net.safetensors"
    save_file({name: tensor.contiguous() for name, tensor in torch.nn.Linear(64, 64).state_dict().items()}, path)
    net = load_model(path, torch.nn.Linear, config={"in_features": 64, "out_features": 64})

    def read() -> NodeOutput:
        manage({"net": net}, placement="cpu", manager=runner.manager)
        return NodeOutput(2)

    Step.plan = read
    steps: list[Any] = []

    def listener(event: str, *details: Any) -> None:
        if event == "loading":
            steps.append(details)
            if interrupts:
                runner.interrupt()

    if interrupts:
        with pytest.raises(InterruptedRun):
            runner.run(chain(), name="chain", listener=listener)
        assert net.weight.is_meta and not runner.manager.members
    else:
        runner.run(chain(), name="chain", listener=listener)
        assert not net.weight.is_meta
    weight_bytes, num_bytes = 64 * 64 * 4, (64 * 64 + 64) * 4
    # One weight after the other: the interrupt is seen after the first.
    assert steps[-1] == ("2", "net", weight_bytes if interrupts else num_bytes, num_bytes)
    runner.manager.release_all()
