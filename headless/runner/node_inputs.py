"""What may stand at a node's input: a value of its type and within its limits, or a link to an output that fits."""

from __future__ import annotations

import difflib
import inspect
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ...memory.errors import allowed_values
from ...nodes.prompts import invalid_character
from ..comfy_stub.comfy_io import ComfyNode, Input, Schema

__all__ = ["MAX_TOLD", "Link", "check_link", "check_value", "describe", "expectation", "validated_names"]

ANY = "*"
MAX_TOLD = 10  # nodes in one line


@dataclass(frozen=True, kw_only=True, slots=True)
class Link:
    """The output of another node, used as an input."""

    node_id: str
    output: int


def check_link(link: list[Any], item: Input, schemas: Mapping[str, Schema]) -> Link:
    """Return a link whose node and output exist and whose type fits.

    Raises:
        ValueError: saying what is wrong with it.
    """
    if len(link) != 2 or not isinstance(link[0], str) or type(link[1]) is not int:
        raise ValueError(f'is {json.dumps(link)}; a link is ["node id", output index]')
    source_id, index = link
    if source_id not in schemas:
        near = difflib.get_close_matches(source_id[:100], list(schemas)[:1000], n=MAX_TOLD)
        told = list(dict.fromkeys([*near, *schemas]))[:MAX_TOLD]
        more = f" and {len(schemas) - len(told)} more" if len(schemas) > len(told) else ""
        raise ValueError(
            f"links to node {source_id[:100]!r}, which does not exist; {allowed_values(source_id[:100], told)}{more}"
        )
    outputs = schemas[source_id].outputs
    if not 0 <= index < len(outputs):
        choices = [f"{number} ({output.display_name or output.io_type})" for number, output in enumerate(outputs)]
        raise ValueError(f"links to output {index} of node {source_id}; allowed: {', '.join(choices) or 'none'}")
    if not types_fit(outputs[index].io_type, item.io_type):
        raise ValueError(f"takes {item.io_type}, but output {index} of node {source_id} is {outputs[index].io_type}")
    return Link(node_id=source_id, output=index)


def types_fit(given: str, taken: str) -> bool:
    """Whether two type names, each a comma-separated union, have something in common."""
    given_types, taken_types = set(given.split(",")), set(taken.split(","))
    return ANY in given_types | taken_types or bool(given_types & taken_types)


def check_value(value: Any, item: Input, *, limits: bool) -> Any:
    """Return a widget's value in its type.

    Args:
        limits: also check the range or the choices; off where the node checks the input itself.

    Raises:
        ValueError: saying what is wrong and what is allowed.
    """
    wrong = ValueError(f"is {describe(value)}; expected {expectation(item)}")
    if item.io_type == "INT":
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if type(value) is not int:
            raise wrong
    elif item.io_type == "FLOAT":
        if type(value) not in (int, float) or not math.isfinite(value):
            raise wrong
        value = float(value)
    elif item.io_type == "STRING":
        if not isinstance(value, str):
            raise wrong
        if (problem := invalid_character(value)) is not None:
            raise ValueError(f"{problem}; allowed: text that UTF-8 can encode")
    elif item.io_type == "BOOLEAN":
        if not isinstance(value, bool):
            raise wrong
    elif item.io_type == "COMBO":
        if value not in item.options["options"] and (limits or not isinstance(value, str)):
            choices = allowed_values(str(value), map(str, item.options["options"]))
            raise ValueError(f"is {describe(value)}; {choices}")
        return value
    else:  # a socket without a widget
        raise wrong
    minimum, maximum = item.options.get("min"), item.options.get("max")
    if limits and ((minimum is not None and value < minimum) or (maximum is not None and value > maximum)):
        raise wrong
    return value


def expectation(item: Input) -> str:
    """Return what may stand at an input, for people."""
    minimum, maximum = item.options.get("min"), item.options.get("max")
    span = f" from {minimum}" if minimum is not None else ""
    span += f" to {maximum}" if maximum is not None else ""
    words = {
        "INT": f"a whole number{span}",
        "FLOAT": f"a number{span}",
        "STRING": "text",
        "BOOLEAN": "true or false",
    }
    if item.io_type == "COMBO":
        return f"one of: {', '.join(map(str, item.options['options']))}"
    return words.get(item.io_type, f'a link ["node id", output index] to {item.io_type}')


def describe(value: Any) -> str:
    """Return a value in JSON, cut to one short line."""
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 60 else text[:57] + "..."


def validated_names(node_class: type[ComfyNode]) -> tuple[str, ...]:
    """Return the inputs that a node checks itself, which the host then leaves to it."""
    validate = getattr(node_class, "validate_inputs", None)
    if validate is None:
        return ()
    parameters = inspect.signature(validate).parameters.values()
    return tuple(p.name for p in parameters if p.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD)
