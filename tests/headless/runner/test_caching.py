"""Random graphs, edited between runs: exactly the nodes whose signature is new run, and every value is right."""

from __future__ import annotations

import copy
from typing import Any, ClassVar

from hypothesis import given, settings
from hypothesis import strategies as st

from highwater.headless.comfy_stub.comfy_io import AnyType, ComfyNode, Int, NodeOutput, Schema
from highwater.headless.runner.runner import WorkflowRunner
from highwater.headless.runner.workflow import parse_workflow
from highwater.memory import MemoryManager

NUM_NODES = 7


class Term(ComfyNode):
    """Returns the expression that it stands for, so that a value tells how it came about."""

    node_id = "Term"
    is_output = False
    calls: ClassVar[list[Any]] = []

    @classmethod
    def define_schema(cls) -> Schema:
        return Schema(
            node_id=cls.node_id,
            inputs=[
                Int.Input("value"),
                AnyType.Input("left", optional=True),
                AnyType.Input("right", optional=True),
            ],
            outputs=[AnyType.Output(), AnyType.Output()],
            is_output_node=cls.is_output,
        )

    @classmethod
    def execute(cls, value: int, left: Any = None, right: Any = None) -> NodeOutput:
        expression = (cls.node_id, value, cls.extra(), left, right)
        Term.calls.append(expression)
        return NodeOutput(("first", expression), ("second", expression), ui={"text": [repr(expression)]})

    @classmethod
    def extra(cls) -> int:
        """What the outside world adds to the expression."""
        return 0


class Watching(Term):
    """Depends on a file, say: its fingerprint tells when it changed."""

    node_id = "Watching"
    state = 0

    @classmethod
    def fingerprint_inputs(cls, value: int, **_: Any) -> Any:
        return {"state": Watching.state, "value": value}

    @classmethod
    def extra(cls) -> int:
        return Watching.state


class Restless(Term):
    """Runs every time."""

    node_id = "Restless"

    @classmethod
    def fingerprint_inputs(cls, **_: Any) -> float:
        return float("nan")


class Sink(Term):
    node_id = "Sink"
    is_output = True


CLASSES = {cls.node_id: cls for cls in (Term, Watching, Restless, Sink)}

# A node: its class, its value, and where its two inputs come from: an earlier node, or nowhere.
source = st.none() | st.tuples(st.integers(0, NUM_NODES - 1), st.integers(0, 1))
node = st.tuples(st.sampled_from(sorted(CLASSES)), st.integers(0, 2), source, source)
edit = st.tuples(st.integers(0, NUM_NODES - 1), node)


def build_graph(nodes: list[Any]) -> dict[str, Any]:
    graph = {}
    for number, (class_type, value, *sources) in enumerate(nodes):
        inputs: dict[str, Any] = {"value": value}
        for name, link in zip(("left", "right"), sources, strict=True):
            if link is not None and link[0] < number:
                inputs[name] = [str(link[0]), link[1]]
        graph[str(number)] = {"class_type": class_type, "inputs": inputs}
    graph["end"] = {"class_type": "Sink", "inputs": {"value": 0, "left": [str(len(nodes) - 1), 0]}}
    return graph


def expressions_of(graph: dict[str, Any]) -> dict[str, Any]:
    """The naive reference: what each needed node's expression is, without any cache."""
    values: dict[str, Any] = {}

    def value_of(id: str) -> Any:
        if id not in values:
            inputs = graph[id]["inputs"]
            class_type = graph[id]["class_type"]
            left, right = (
                (("first", "second")[inputs[name][1]], value_of(inputs[name][0])) if name in inputs else None
                for name in ("left", "right")
            )
            extra = Watching.state if class_type == "Watching" else 0
            values[id] = (class_type, inputs["value"], extra, left, right)
        return values[id]

    for id, entry in graph.items():
        if entry["class_type"] == "Sink":
            value_of(id)
    return values


def is_restless(expression: Any) -> bool:
    return isinstance(expression, tuple) and (
        expression[:1] == ("Restless",) or any(is_restless(part) for part in expression)
    )


@settings(max_examples=60)
@given(
    st.lists(node, min_size=NUM_NODES, max_size=NUM_NODES),
    st.lists(st.lists(edit, max_size=2) | st.sampled_from(["touch", "flip"]), min_size=1, max_size=4),
)
def test_exactly_what_changed_runs(tmp_path_factory: Any, nodes: list[Any], edits: list[Any]) -> None:
    Watching.state = 0
    folder = tmp_path_factory.getbasetemp()
    runner = WorkflowRunner(MemoryManager(), models_directory=folder, output_directory=folder)
    known: set[Any] = set()
    for change in [[], *edits]:
        if change == "touch":
            Watching.state += 1
        elif change == "flip":  # every link takes the other output of the same node
            nodes = [(*node[:2], *(link and (link[0], 1 - link[1]) for link in node[2:])) for node in nodes]
        else:
            nodes = copy.copy(nodes)
            for number, replacement in change:
                nodes[number] = replacement
        graph = build_graph(nodes)
        Term.calls.clear()
        result = runner.run(parse_workflow(graph, node_classes=CLASSES), name="random")
        expected = expressions_of(graph)

        assert set(result.executed) | set(result.cached) == set(expected)
        for id, expression in expected.items():
            if id in result.outputs:
                assert result.outputs[id]["text"] == [repr(expression)]
        new = {expression for expression in expected.values() if expression not in known}
        restless = [expression for expression in expected.values() if is_restless(expression)]
        steady = [expression for expression in new if not is_restless(expression)]
        assert sorted(map(repr, Term.calls)) == sorted(map(repr, steady + restless))
        assert len(result.executed) == len(Term.calls)
        known |= set(expected.values())


def test_the_oldest_results_leave_first_but_never_what_the_run_needs(tmp_path: Any) -> None:
    runner = WorkflowRunner(MemoryManager(), models_directory=tmp_path, output_directory=tmp_path)
    runner.cache.max_entries = 4

    def run(value: int) -> int:
        graph = {"1": {"class_type": "Sink", "inputs": {"value": value}}}
        return len(runner.run(parse_workflow(graph, node_classes=CLASSES), name="lru").executed)

    assert [run(value) for value in (1, 2, 3, 4, 1)] == [1, 1, 1, 1, 0]
    assert [run(value) for value in (5, 1, 2)] == [1, 0, 1]  # 2 was the least recently used
    chain = {
        str(i): {"class_type": "Sink", "inputs": {"value": i, **({"left": [str(i - 1), 0]} if i else {})}}
        for i in range(9)
    }
    workflow = parse_workflow(chain, node_classes=CLASSES)
    runner.run(workflow, name="long")
    assert runner.run(workflow, name="long").executed == ()
