"""The JSON of our addresses, in one place: what a request may say, what is answered, and what pages are told unasked.

The server checks requests against these; the tests check answers, and the page's types are made of them
(`scripts/write_route_types.py`).
"""

from __future__ import annotations

import dataclasses
import types
from functools import cache
from typing import Any, Union, get_args, get_origin, get_type_hints, is_typeddict

from .json_schema import Schema, record

__all__ = ["REQUESTS", "answer_schemas", "message_schemas", "schema_of"]


def text(description: str) -> dict[str, Any]:
    return {"type": "string", "description": description}


COMPONENT = text("the id of a component, as the report has it")
DEVICE = text("a device, such as gpu:0")
PERIOD = "a time such as 60s or 10min"

REQUESTS: dict[str, Schema] = {
    "/highwater/follow": record({}),
    "/highwater/free": record({}),
    "/highwater/lend": record({"size": text("an amount such as 8GiB"), "for": text(PERIOD)}, {"device": DEVICE}),
    "/highwater/lend/give-back": record({}, {"device": DEVICE}),
    "/highwater/keep": record(
        {"component": COMPONENT},
        {
            "keep": {"type": "boolean", "description": "true or false"},
            "at_most": text("an amount such as 6GiB, or a percentage of the device such as 50%"),
        },
    ),
    "/highwater/release": record({}, {"component": COMPONENT, "device": DEVICE}),
    "/highwater/move": record(
        {"component": COMPONENT, "placement": text("a placement such as gpu:1, gpu:0&gpu:1@30% or cpu")}
    ),
    "/highwater/limits": record(
        {},
        {
            "keep_loaded": {
                "type": ["integer", "null"],
                "minimum": 1,
                "maximum": 1000,
                "description": "1 to 1000 components, or null for no limit",
            },
            "idle": {"type": ["string", "null"], "description": f"{PERIOD}, or null for no limit"},
        },
    ),
    "/highwater/watermark": record(
        {"marks": text("marks such as 1GiB:2GiB or gpu:0=5%:10%,host=4GiB:6GiB, or an empty text for the default ones")}
    ),
    "/highwater/look-ahead": record({"on": {"type": "boolean", "description": "true or false"}}),
    "/highwater/default-profile": record(
        {"profile": text("a profile such as 4 or 8GiB for loaders left at auto, or an empty text for none")}
    ),
    "/highwater/tiny-pipelines": record({}),
    "/highwater/needs/forget": record({}),
}
"""What the body of each POST may say. Needed fields are required; no other field is allowed.

A component or a device that this process lacks is answered with 404, also one that a placement names; only marks for a
device that is not here are left out, with a note. What is no component, device or amount anywhere is answered with 400.
"""

NUMBER: Schema = {"type": "number"}
BYTES: Schema = {"type": "integer", "minimum": 0}
NAME: Schema = {"type": "string"}
OPTIONAL_NAME: Schema = {"type": ["string", "null"]}


def listed(items: Schema) -> dict[str, Any]:
    return {"type": "array", "items": items}


def mapped(values: Schema) -> dict[str, Any]:
    return {"type": "object", "additionalProperties": values}


SHARE = record(
    {
        "device": NAME,
        "blocks": BYTES,
        "resident_blocks": BYTES,
        "streamed_blocks": BYTES,
        "prefetch_blocks": BYTES,
        "fixed_bytes": BYTES,
        "resident_bytes": BYTES,
        "streamed_bytes": BYTES,
        "read_bytes": BYTES,
        "stored_blocks": BYTES,
        "stored_bytes": BYTES,
        "staging_bytes": BYTES,
        "scratch_bytes": BYTES,
        "device_bytes": BYTES,
        "pass_s": {"type": ["number", "null"]},
        "limit_bytes": {"type": ["integer", "null"]},
        "limited_by": NAME,
        "keeps_bytes": BYTES,
    }
)
PRECISION_ROW = record(
    {
        "layer": NAME,
        "num_cast": BYTES,
        "cast_bytes": BYTES,
        "resting_bytes": BYTES,
        "saved_bytes": BYTES,
        "error": {"type": ["number", "null"]},
        "num_kept": BYTES,
        "kept_bytes": BYTES,
        "why_kept": mapped(BYTES),
    }
)
COMPONENT_PLAN = {
    "component": NAME,
    "kind": NAME,
    "weight_bytes": BYTES,
    "precision": NAME,
    "precision_rows": listed(PRECISION_ROW),
    "tier": NAME,
    "host_bytes": BYTES,
    "buffer_bytes": BYTES,
    "pinned_bytes": BYTES,
    "file_bytes": BYTES,
    "store": NAME,
    "stored_bytes": BYTES,
    "placement": NAME,
    "shares": listed(SHARE),
}
REASONS = {"reasons": listed(NAME)}
PLAN = record(
    {
        "placement": NAME,
        "profile": record({"name": NAME, "title": NAME, "text": NAME, "like": NAME, "explicit": NAME, **REASONS}),
        "components": listed(record(COMPONENT_PLAN | REASONS)),
    }
)
PROFILE = record(
    {
        "name": NAME,
        "title": NAME,
        "ram_bytes": {"type": ["integer", "null"]},
        "vram_bytes": {"type": ["integer", "null"]},
        "budgets": mapped(NAME),
        "pinned": NAME,
        "prefetch_blocks": {"type": ["integer", "null"]},
        "quantize": NAME,
        "form": NAME,
        "on_demand": NAME,
        "unload": NAME,
        "reserve": mapped(NAME),
        "compile": {"type": "boolean"},
    }
)
LENT = record({"num_bytes": BYTES, "missing_bytes": BYTES, "left_s": NUMBER})
PINNED = record({"num_bytes": BYTES, "limit_bytes": BYTES})
LOADER = record({"node_id": NAME, "workflow_id": OPTIONAL_NAME, "components": listed(NAME)})


@cache
def answer_schemas() -> dict[str, Schema]:
    """Return what each address answers, by its path; what cannot be answered is an ``error`` in words instead.

    To a browser's window ``/highwater/doctor`` answers text.
    """
    from ..memory.manager.departures import Departure
    from ..memory.manager.lending import LendingReport
    from ..memory.manager.report import ComponentReport, NodeReport, RunReport, Sample
    from .doctor import Finding
    from .learned_needs import ForgottenFile, NeedsOfFile

    mark, device, event = mark_schema(), device_schema(), event_schema()
    nodes, features = listed(schema_of(NodeReport)), mapped({"type": ["boolean", "string"]})
    component_plan = record(REASONS, COMPONENT_PLAN)  # that of a component that the host moves has reasons only
    report = {
        "devices": listed(device),
        "components": listed(with_fields(ComponentReport, plan=component_plan)),
        "nodes": nodes,
        "runs": listed(schema_of(RunReport)),
        "events": listed(event),
        "samples": listed(schema_of(Sample)),
        "open_nodes": nodes,
        "loaders": listed(LOADER),
        "host_features": features,
        "advice": listed(record({"text": NAME, "key": NAME, "values": mapped(NAME)})),
        "left_out": mapped(BYTES),
        "after_s": NUMBER,
    }
    departure = with_fields(Departure)
    departure["properties"]["text"] = NAME
    departure["required"].append("text")
    return {
        "/highwater/report": record({"version": {"type": "integer"}, "now_s": NUMBER, "server_id": NAME}, report),
        "/highwater/events": record({"events": listed(event), "left_out": BYTES}),
        "/highwater/follow": record({"devices": listed(NAME)}),
        "/highwater/free": record({"freed_bytes": mapped(BYTES)}),
        "/highwater/lend": schema_of(LendingReport),
        "/highwater/lend/give-back": record({"device": NAME, "lent_bytes": BYTES}),
        "/highwater/keep": record({"component": NAME, "keep": {"type": "boolean"}, "at_most": NAME}),
        "/highwater/release": record({"released": listed(departure)}),
        "/highwater/move": record({"component": NAME, "placement": NAME, "text": NAME}),
        "/highwater/limits": record(
            {"keep_loaded": {"type": ["integer", "null"]}, "idle_s": {"type": ["number", "null"]}}
        ),
        "/highwater/watermark": record({"watermarks": mapped(mark), "notes": listed(NAME)}),
        "/highwater/look-ahead": record({"on": {"type": "boolean"}}),
        "/highwater/default-profile": record({"profile": NAME, "title": NAME}),
        "/highwater/tiny-pipelines": record({"pipelines": mapped(NAME)}),
        "/highwater/profiles": record({"profiles": listed(PROFILE)}),
        "/highwater/devices": record(
            {
                "devices": listed(record({**device["properties"], "peers": listed(NAME)})),
                "hidden_by": mapped(NAME),
                "findings": listed(schema_of(Finding)),
            }
        ),
        "/highwater/plan": record({"plans": mapped(PLAN), "text": NAME}),
        "/highwater/doctor": record(
            {
                "comfyui": OPTIONAL_NAME,
                "findings": listed(schema_of(Finding)),
                "features": features,
                "num_warnings": {"type": "integer"},
            }
        ),
        "/highwater/needs": record({"files": listed(schema_of(NeedsOfFile))}),
        "/highwater/needs/forget": record({"files": listed(schema_of(ForgottenFile))}),
    }


@cache
def message_schemas() -> dict[str, Schema]:
    """Return what each type of the websocket's messages says (`page_messages.EVENT`)."""
    from ..memory.manager.report import NodeReport

    where = {"prompt_id": OPTIONAL_NAME, "workflow_id": OPTIONAL_NAME}
    told = {"node": schema_of(NodeReport)["properties"], "event": event_schema()["properties"]}
    told["node"] = {**told["node"], "devices": listed(device_schema())}
    return {
        type: record(
            {"type": {"type": "string", "enum": [type]}, "server_id": NAME, "now_s": NUMBER, **fields},
            {name: schema for name, schema in where.items() if name not in fields},
        )
        for type, fields in told.items()
    }


def mark_schema() -> dict[str, Any]:
    from ..memory.manager.watermark import WatermarkReport

    return with_fields(WatermarkReport, source={"type": "string", "enum": ["set", "setting", "default"]})


def device_schema() -> dict[str, Any]:
    from ..memory.manager.claims.neighbours import ProcessUse
    from ..memory.manager.report import DeviceReport

    uses = {name: BYTES for name in ProcessUse.__slots__ if name != "request"}
    return with_fields(
        DeviceReport,
        own_watermark=mark_schema(),
        lent={"anyOf": [LENT, {"type": "null"}]},
        neighbours=listed(record(uses)),
        pinned={"anyOf": [PINNED, {"type": "null"}]},
    )


def event_schema() -> dict[str, Any]:
    from ..memory.manager.report import EVENT_KINDS, Event

    return with_fields(Event, kind={"type": "string", "enum": [*EVENT_KINDS]})


def with_fields(of: type, **others: Schema) -> dict[str, Any]:
    """Return the schema of a dataclass in which some fields have schemas of their own."""
    found = schema_of(of)
    assert others.keys() <= found["properties"].keys()
    return {**found, "properties": {**found["properties"], **others}, "required": list(found["required"])}


def schema_of(of: Any) -> dict[str, Any]:
    """Return the schema of a dataclass, a TypedDict, or what their fields are annotated with."""
    simple: dict[Any, dict[str, Any]] = {
        str: {"type": "string"},
        int: {"type": "integer"},
        float: {"type": "number"},
        bool: {"type": "boolean"},
        type(None): {"type": "null"},
        Any: {},
    }
    if of in simple:
        return simple[of]
    origin, arguments = get_origin(of), get_args(of)
    if origin is list:
        return listed(schema_of(arguments[0]))
    if origin is dict:
        return mapped(schema_of(arguments[1]))
    if origin in (Union, types.UnionType):
        choices = [schema_of(argument) for argument in arguments]
        if all(choice.keys() == {"type"} for choice in choices):
            return {"type": [choice["type"] for choice in choices]}
        return {"anyOf": choices}
    if dataclasses.is_dataclass(of) or is_typeddict(of):
        return record({name: schema_of(hint) for name, hint in get_type_hints(of).items()})
    raise TypeError(f"{of} has no schema")
