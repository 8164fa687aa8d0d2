"""Nodes that give numbers and texts, and choose between what is linked to them."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from ..prompts import is_link
from .node_values import NodeReading, Rule

__all__ = ["VALUE_RULES", "compute", "taken_branch"]

SWITCH = "ComfySwitchNode"
# An expression that is longer, or reaches beyond, gives a number that no size has.
MAX_LENGTH, LARGEST = 1_000, 1e12

OPERATORS: dict[type[ast.AST], Callable[..., Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod, ast.USub: operator.neg, ast.UAdd: operator.pos,
    ast.Lt: operator.lt, ast.LtE: operator.le, ast.Gt: operator.gt, ast.GtE: operator.ge, ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
}  # fmt: skip
FUNCTIONS: dict[str, Callable[..., Any]] = {
    "min": min, "max": max, "abs": abs, "round": round, "int": int, "float": float,
    "floor": lambda value: int(value // 1), "ceil": lambda value: -int(-value // 1),
}  # fmt: skip


def compute(expression: str, values: Mapping[str, Any]) -> float | None:
    """Return the value of an arithmetic expression; None for anything else, or what is too large to be a size."""
    if len(expression) > MAX_LENGTH:
        return None
    try:
        found = evaluate(ast.parse(expression.strip(), mode="eval").body, values)
    except (ArithmeticError, LookupError, RecursionError, SyntaxError, TypeError, ValueError, MemoryError):
        return None
    return found if isinstance(found, int | float) else None


def evaluate(node: ast.AST, values: Mapping[str, Any]) -> Any:
    """Raises many errors for what is no arithmetic; no operator makes a number much longer than its own are."""
    if isinstance(node, ast.Constant) and isinstance(node.value, int | float):
        result = node.value
    elif isinstance(node, ast.Name):
        result = values[node.id]
    elif isinstance(node, ast.BinOp):
        result = OPERATORS[type(node.op)](evaluate(node.left, values), evaluate(node.right, values))
    elif isinstance(node, ast.UnaryOp):
        result = OPERATORS[type(node.op)](evaluate(node.operand, values))
    elif isinstance(node, ast.Compare) and len(node.ops) == 1:
        result = OPERATORS[type(node.ops[0])](evaluate(node.left, values), evaluate(node.comparators[0], values))
    elif isinstance(node, ast.IfExp):
        result = evaluate(node.body if evaluate(node.test, values) else node.orelse, values)
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and not node.keywords:
        result = FUNCTIONS[node.func.id](*(evaluate(argument, values) for argument in node.args))
    else:
        raise ValueError("not arithmetic")
    if not isinstance(result, int | float) or not abs(result) < LARGEST:
        raise ValueError("not a size")
    return result


def give_value(name: str, node: NodeReading) -> Sequence[Any]:
    return (node.value(name),)


def calculate(node: NodeReading) -> Sequence[Any]:
    """ComfyMathExpression: as a float, as an integer, as a truth."""
    expression = node.text("expression")
    values = {name.rpartition(".")[2]: node.number(name) for name in node.inputs if name.startswith("values.")}
    known = {name: value for name, value in values.items() if value is not None}
    found = compute(expression, known) if expression is not None else None
    return (None, None, None) if found is None else (float(found), int(found), bool(found))


def convert(node: NodeReading) -> Sequence[Any]:
    number = node.number("value")
    return (number, None if number is None else int(number))


def choose(node: NodeReading) -> Sequence[Any]:
    """ComfySwitchNode: the branch that is taken; where that is not known, the one that is there."""
    switch = node.value("switch")
    names = ("on_true", "on_false") if switch is True or switch not in (False, None) else ("on_false", "on_true")
    return (next((node.value(name) for name in names if name in node.inputs), None),)


def join_texts(node: NodeReading) -> Sequence[Any]:
    first, second = node.text("string_a"), node.text("string_b")
    return (None if first is None or second is None else f"{first}{node.text('delimiter') or ''}{second}",)


def taken_branch(node_id: str, prompt: Mapping[str, Any]) -> Any:
    """Return a node as it runs: a switch without the branch that it does not take, which does not run either."""
    node = prompt[node_id]
    if not isinstance(node, Mapping) or node.get("class_type") != SWITCH or not isinstance(node.get("inputs"), Mapping):
        return node
    switch = node["inputs"].get("switch")
    if is_link(switch, prompt):
        source: Any = prompt[switch[0]]
        is_constant = isinstance(source, Mapping) and source.get("class_type") == "PrimitiveBoolean"
        inputs = source.get("inputs") if is_constant else None
        switch = inputs.get("value") if isinstance(inputs, Mapping) else None
    if not isinstance(switch, bool):
        return node
    left_out = "on_false" if switch else "on_true"
    return {**node, "inputs": {name: value for name, value in node["inputs"].items() if name != left_out}}


VALUE_RULES: dict[str, Rule] = {
    **dict.fromkeys(
        ["PrimitiveInt", "PrimitiveFloat", "PrimitiveBoolean", "PrimitiveString", "PrimitiveStringMultiline"],
        partial(give_value, "value"),
    ),
    "SeedNode": partial(give_value, "seed"),
    "CustomCombo": partial(give_value, "choice"),
    "ComfyMathExpression": calculate,
    "ComfyNumberConvert": convert,
    "StringConcatenate": join_texts,
    SWITCH: choose,
    "Reroute": lambda node: tuple(node.links()[:1]),
}
