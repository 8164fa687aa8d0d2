"""Checks a value against a JSON schema, of the few words that ours have; says in one line what is wrong."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, TypeAlias

from ..memory.errors import InvalidInput, allowed_values, quoted

__all__ = ["Schema", "check_json", "find_fault", "record"]

Schema: TypeAlias = Mapping[str, Any]
"""A JSON schema: ``type``, ``enum``, ``minimum``, ``maximum``, ``items``, ``anyOf``, ``properties``, ``required``,
``additionalProperties``, and ``description``, which says to people what is allowed."""

TYPES: dict[str, type | tuple[type, ...]] = {
    "string": str,
    "integer": int,
    "number": (int, float),
    "boolean": bool,
    "null": type(None),
    "array": list,
    "object": dict,
}


def record(needed: Mapping[str, Schema], others: Mapping[str, Schema] | None = None) -> dict[str, Any]:
    """Return the schema of an object with these fields and no other."""
    fields = {**needed, **(others or {})}
    return {"type": "object", "properties": fields, "required": list(needed), "additionalProperties": False}


def check_json(value: Any, schema: Schema, what: str) -> None:
    """Raise `InvalidInput` where a value is not what a schema allows; the message names the field."""
    fault = find_fault(value, schema, what)
    if fault is not None:
        raise InvalidInput(fault)


def find_fault(value: Any, schema: Schema, at: str) -> str | None:
    """Return the first thing that is wrong with a value, in words; None where it is as its schema says."""
    return next(find_faults(value, schema, at), None)


def find_faults(value: Any, schema: Schema, at: str) -> Iterator[str]:
    if "anyOf" in schema:
        faults = [find_fault(value, choice, at) for choice in schema["anyOf"]]
        if None not in faults:
            yield next(fault for fault in reversed(faults) if fault)
        return
    if not is_allowed(value, schema):
        yield f"{at} {quoted(value)}; allowed: {schema.get('description') or allowed_types(schema)}"
    elif isinstance(value, dict):
        yield from find_faults_of_fields(value, schema, at)
    elif isinstance(value, list) and "items" in schema:
        for number, item in enumerate(value):
            yield from find_faults(item, schema["items"], f"{at}[{number}]")


def find_faults_of_fields(value: Mapping[str, Any], schema: Schema, at: str) -> Iterator[str]:
    fields: Mapping[str, Schema] = schema.get("properties", {})
    others: Schema | bool = schema.get("additionalProperties", True)
    for name in schema.get("required", ()):
        if name not in value:
            yield f"{name} is missing in {at}; needed: {', '.join(schema['required'])}"
    for name, part in value.items():
        if name in fields:
            yield from find_faults(part, fields[name], name)
        elif others is False:
            yield f"{quoted(name)} is unknown in {at}; {allowed_values(name, fields)}"
        elif isinstance(others, Mapping):
            yield from find_faults(part, others, f"{at}[{quoted(name)}]")


def is_allowed(value: Any, schema: Schema) -> bool:
    """Whether a value has the type of a schema, is one of its values, and in its range."""
    if "type" in schema and not any(has_type(value, name) for name in types_of(schema)):
        return False
    if "enum" in schema and value not in schema["enum"]:
        return False
    if isinstance(value, int | float) and not isinstance(value, bool):
        return bool(schema.get("minimum", -math.inf) <= value <= schema.get("maximum", math.inf))
    return True


def has_type(value: Any, name: str) -> bool:
    """Whether a value is of a JSON type; true and false are no numbers."""
    return isinstance(value, TYPES[name]) and (name == "boolean" or not isinstance(value, bool))


def types_of(schema: Schema) -> list[str]:
    return [schema["type"]] if isinstance(schema["type"], str) else list(schema["type"])


def allowed_types(schema: Schema) -> str:
    if "enum" in schema:
        return ", ".join(map(str, schema["enum"]))
    articles = {"integer": "a whole number", "array": "an array", "object": "an object", "boolean": "true or false"}
    return " or ".join(articles.get(name, name if name == "null" else f"a {name}") for name in types_of(schema))
