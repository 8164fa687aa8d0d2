"""Write the types of the pages' requests, answers and messages, for the check of the page's scripts: run it after a
change of `nodes/route_schemas.py`. A test fails where the file is not of these schemas.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from highwater.nodes.json_schema import Schema
from highwater.nodes.route_schemas import REQUESTS, answer_schemas, message_schemas

FILE = Path(__file__).resolve().parents[1] / "tests/web/types/routes.d.ts"
HEAD = "// Requests, answers and messages. Written by scripts/write_route_types.py from nodes/route_schemas.py.\n"
NAMES = {"string": "string", "integer": "number", "number": "number", "boolean": "boolean", "null": "null"}
IDENTIFIER = re.compile(r"[A-Za-z_]\w*")


def types_text() -> str:
    """Return the file's text: by address, without ``/highwater/``; messages by their type."""
    addresses = {"Requests": REQUESTS, "Answers": answer_schemas(), "Messages": message_schemas()}
    lines = [HEAD, "declare namespace Highwater {"]
    for name, schemas in addresses.items():
        fields = {path.removeprefix("/highwater/"): schema for path, schema in schemas.items()}
        lines.append(f"  interface {name} {fields_text(fields, set(fields), '  ')}")
    lines += [
        '  type Report = Answers["report"];',
        "  type Message = Messages[keyof Messages];",
        "}",
    ]
    return "\n".join([*lines, ""])


def type_text(schema: Schema, indent: str) -> str:
    """Return a schema as a type."""
    if "anyOf" in schema:
        return " | ".join(type_text(choice, indent) for choice in schema["anyOf"])
    if "enum" in schema:
        return " | ".join(f'"{value}"' for value in schema["enum"])
    kinds = schema.get("type", "unknown")
    if not isinstance(kinds, str):
        return " | ".join(NAMES[kind] for kind in kinds)
    if kinds == "array":
        items = type_text(schema["items"], indent)
        return f"({items})[]" if "|" in items.partition("{")[0] else f"{items}[]"
    if kinds == "object":
        return object_text(schema, indent)
    return NAMES.get(kinds, kinds)


def object_text(schema: Schema, indent: str) -> str:
    others: Any = schema.get("additionalProperties", {})
    if "properties" not in schema:
        return f"Record<string, {type_text(others, indent)}>"
    return fields_text(schema["properties"], set(schema["required"]), indent)


def fields_text(fields: dict[str, Schema], required: set[str], indent: str) -> str:
    if not fields:
        return "Record<string, never>"
    inner = f"{indent}  "
    lines = []
    for name, schema in fields.items():
        key = name if IDENTIFIER.fullmatch(name) else f'"{name}"'
        lines.append(f"{inner}{key}{'' if name in required else '?'}: {type_text(schema, inner)};")
    return "\n".join(["{", *lines, f"{indent}}}"])


if __name__ == "__main__":
    FILE.write_text(types_text(), encoding="utf-8")
