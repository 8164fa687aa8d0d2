"""The part of ComfyUI's V3 ``io`` that our node files use: types, schema, node base class and node output.

Written against the public behaviour of ComfyUI 0.33; what `object_info` reports must equal what the real host
reports for the same classes, so option names and their defaults follow it exactly.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any, ClassVar

__all__ = [
    "AnyType",
    "Boolean",
    "Clip",
    "ClipVision",
    "Combo",
    "ComfyNode",
    "Conditioning",
    "ControlNet",
    "Custom",
    "Float",
    "Hidden",
    "HiddenHolder",
    "Image",
    "Input",
    "Int",
    "Latent",
    "Model",
    "NodeOutput",
    "NumberDisplay",
    "Output",
    "Schema",
    "String",
    "Vae",
]


class NumberDisplay(str, Enum):
    number = "number"
    slider = "slider"


class Hidden(str, Enum):
    """Values that the host, not the user, gives to a node."""

    unique_id = "UNIQUE_ID"
    prompt = "PROMPT"
    extra_pnginfo = "EXTRA_PNGINFO"


@dataclass(frozen=True, kw_only=True, slots=True)
class HiddenHolder:
    """What ``cls.hidden`` is while a node runs."""

    unique_id: str | None = None
    prompt: Any = None
    extra_pnginfo: Any = None


# Python name -> name in object_info.
SOCKET_OPTIONS = {
    "display_name": "display_name",
    "tooltip": "tooltip",
    "lazy": "lazy",
    "raw_link": "rawLink",
    "advanced": "advanced",
}
WIDGET_OPTIONS = {
    **SOCKET_OPTIONS,
    "default": "default",
    "socketless": "socketless",
    "force_input": "forceInput",
}
NUMBER_OPTIONS = {**WIDGET_OPTIONS, "min": "min", "max": "max", "step": "step", "display_mode": "display"}


class Input:
    """An input of a node: a socket, or a widget where its type has one."""

    io_type: ClassVar[str] = ""
    names: ClassVar[Mapping[str, str]] = SOCKET_OPTIONS
    preset: ClassVar[Mapping[str, Any]] = {}  # reported even when not given

    def __init__(self, id: str, *, optional: bool = False, **options: Any) -> None:
        unknown = options.keys() - self.names.keys()
        if unknown:
            raise TypeError(f"input {id!r}: unknown options {sorted(unknown)}; allowed: {sorted(self.names)}")
        self.id = id
        self.optional = optional
        self.options = {**self.preset, **{name: plain(value) for name, value in options.items()}}

    def as_dict(self) -> dict[str, Any]:
        """Return the options as object_info spells them."""
        return {self.names[name]: value for name, value in self.options.items() if value is not None}


class Output:
    """An output of a node."""

    io_type: ClassVar[str] = ""

    def __init__(
        self,
        id: str | None = None,
        display_name: str | None = None,
        tooltip: str | None = None,
        is_output_list: bool = False,
    ) -> None:
        self.id = id
        self.display_name = display_name or id
        self.tooltip = tooltip
        self.is_output_list = is_output_list


def plain(value: Any) -> Any:
    return value.value if isinstance(value, Enum) else value


def Custom(io_type: str) -> Any:
    """Return a type with a socket of this name."""
    return define_type(io_type)


def define_type(
    io_type: str, names: Mapping[str, str] = SOCKET_OPTIONS, preset: Mapping[str, Any] | None = None
) -> Any:
    """Return a class with ``Input`` and ``Output`` bound to a type name."""
    members = {"io_type": io_type}
    input_class = type("Input", (Input,), {**members, "names": names, "preset": preset or {}})
    output_class = type("Output", (Output,), members)
    return type(io_type, (), {**members, "Input": input_class, "Output": output_class})


Image = define_type("IMAGE")
Model = define_type("MODEL")
Clip = define_type("CLIP")
Vae = define_type("VAE")
Conditioning = define_type("CONDITIONING")
Latent = define_type("LATENT")
ControlNet = define_type("CONTROL_NET")
ClipVision = define_type("CLIP_VISION")
AnyType = define_type("*")
Boolean = define_type("BOOLEAN", {**WIDGET_OPTIONS, "label_on": "label_on", "label_off": "label_off"})
Int = define_type("INT", {**NUMBER_OPTIONS, "control_after_generate": "control_after_generate"})
Float = define_type("FLOAT", {**NUMBER_OPTIONS, "round": "round"})
String = define_type(
    "STRING",
    {
        **WIDGET_OPTIONS,
        "multiline": "multiline",
        "placeholder": "placeholder",
        "dynamic_prompts": "dynamicPrompts",
    },
    {"multiline": False},
)
Combo = define_type(
    "COMBO",
    {
        **WIDGET_OPTIONS,
        "multiselect": "multiselect",
        "options": "options",
        "control_after_generate": "control_after_generate",
    },
    {"multiselect": False},
)


@dataclass(kw_only=True, slots=True)
class Schema:
    """What a node is called, takes and gives; the host reads it, the node only returns it."""

    node_id: str
    display_name: str | None = None
    category: str = "sd"
    inputs: list[Input] = field(default_factory=list)
    outputs: list[Output] = field(default_factory=list)
    hidden: list[Hidden] = field(default_factory=list)
    description: str = ""
    search_aliases: list[str] = field(default_factory=list)
    is_output_node: bool = False
    is_deprecated: bool = False
    is_experimental: bool = False
    is_dev_only: bool = False
    not_idempotent: bool = False
    essentials_category: str | None = None

    def node_info(self, python_module: str) -> dict[str, Any]:
        """Return this node's entry of object_info, as JSON would hold it."""
        sockets: dict[str, dict[str, Any]] = {"required": {}}
        for item in self.inputs:
            section = sockets.setdefault("optional" if item.optional else "required", {})
            section[item.id] = [item.io_type, item.as_dict()]
        if self.hidden:
            sockets["hidden"] = {item.name: [item.value] for item in self.hidden}
        return {
            "input": sockets,
            "input_order": {section: list(items) for section, items in sockets.items()},
            "is_input_list": False,
            "output": [item.io_type for item in self.outputs],
            "output_is_list": [item.is_output_list for item in self.outputs],
            "output_name": [item.display_name or item.io_type for item in self.outputs],
            "output_tooltips": [item.tooltip or None for item in self.outputs],
            "output_matchtypes": None,
            "name": self.node_id,
            "display_name": self.display_name,
            "description": self.description,
            "python_module": python_module,
            "category": self.category,
            "output_node": self.is_output_node,
            "deprecated": self.is_deprecated,
            "experimental": self.is_experimental,
            "dev_only": self.is_dev_only,
            "api_node": False,
            "price_badge": None,
            "search_aliases": self.search_aliases or None,
            "essentials_category": self.essentials_category,
            "has_intermediate_output": False,
        }


class ComfyNode(ABC):
    """Base class of all nodes. ``validate_inputs`` and ``fingerprint_inputs`` exist where a node defines them."""

    hidden: ClassVar[HiddenHolder] = HiddenHolder()

    @classmethod
    @abstractmethod
    def define_schema(cls) -> Schema:
        """Return what the node is called, takes and gives."""

    @classmethod
    @abstractmethod
    def execute(cls, **inputs: Any) -> NodeOutput:
        """Return the values of the outputs for those of the inputs."""

    @classmethod
    def GET_SCHEMA(cls) -> Schema:
        """Return the schema with what the host adds: output nodes get the prompt and the PNG metadata.

        Raises:
            TypeError: the class lacks what every node has, as in the host.
        """
        if lacking := sorted(cls.__abstractmethods__):
            raise TypeError(f"{cls.__name__} has no {' and no '.join(lacking)}")
        schema = cls.define_schema()
        if not schema.is_output_node:
            return schema
        added = [hidden for hidden in (Hidden.prompt, Hidden.extra_pnginfo) if hidden not in schema.hidden]
        return replace(schema, hidden=[*schema.hidden, *added])

    @classmethod
    def with_hidden(cls, hidden: HiddenHolder) -> type[ComfyNode]:
        """Return a clone of the class that carries the values, so that a node class is never written to."""
        return type(cls.__name__, (cls,), {"hidden": hidden, "__module__": cls.__module__})


class NodeOutput:
    """The values of a node's outputs in their order, and what the page shows on the node."""

    def __init__(self, *args: Any, ui: Any = None) -> None:
        self.args = args
        self.ui = ui

    def ui_dict(self) -> dict[str, list[Any]]:
        """Return what the page shows as plain lists; empty without any."""
        shown = self.ui if isinstance(self.ui, dict) else self.ui.as_dict() if self.ui is not None else {}
        return {name: list(values) for name, values in shown.items()}
