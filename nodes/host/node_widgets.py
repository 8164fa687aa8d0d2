"""The widgets of the nodes that are installed: a graph in the page's format has their values by place alone."""

from __future__ import annotations

from collections.abc import Mapping

import nodes

__all__ = ["widgets_of"]

# The types for which the page makes a widget, beside a list of choices.
WIDGETS = frozenset({"INT", "FLOAT", "STRING", "BOOLEAN", "COMBO", "COMFY_DYNAMICCOMBO_V3"})


def widgets_of(class_type: str) -> list[str] | None:
    """Return the names of a class's widgets in order; None for one that is not installed, or does not say them."""
    found = nodes.NODE_CLASS_MAPPINGS.get(class_type)
    try:
        inputs = found.INPUT_TYPES() if found is not None else None
    except Exception:  # another pack's code, which may raise anything; its node then goes by what the graph lists
        return None
    if not isinstance(inputs, Mapping):
        return None
    groups = [inputs.get(name) for name in ("required", "optional")]
    given = {name: spec for group in groups if isinstance(group, Mapping) for name, spec in group.items()}
    return [name for name, spec in given.items() if is_widget(spec)]


def is_widget(spec: object) -> bool:
    """Whether the page shows an input as a widget: a number, a text or a choice that is not forced to be a link."""
    if not isinstance(spec, tuple | list) or not spec:
        return False
    options = spec[1] if len(spec) > 1 and isinstance(spec[1], Mapping) else {}
    return (isinstance(spec[0], list) or spec[0] in WIDGETS) and not options.get("forceInput")
