"""Discovers components by name: in a module, a dict, a list, a pipeline, or any other object."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from types import MemberDescriptorType
from typing import Any

from torch import nn

from ..errors import InvalidInput

__all__ = ["components_of", "discover_components", "holds_pipeline"]

CONTAINERS = (dict, list, tuple)


def discover_components(target: Any) -> dict[str, nn.Module]:
    """Return the modules of a target by name.

    A target is a module, which is called ``model``; a dict or a list of modules; a pipeline with ``components``; or any
    other object with modules in its attributes or slots. Dicts, lists and pipelines are searched at every depth, other
    objects only at the top. A module in a list or a dict is called ``nets.0``; so is one in a pipeline where its own
    name is taken: ``pipe.vae``.

    A module with two names gets the first, one outside of pipelines before one inside; a module inside another one that
    was found belongs to that one. Reads no property but ``components``.

    Raises:
        InvalidInput: the target holds no module, two by one name, or one without a name.
    """
    found = list(walk(parts_of(target), "", set()))
    inside = {id(part) for *_, module in found for part in module.modules() if part is not module}
    names: dict[str, nn.Module] = {}
    known: set[int] = set()
    for own_name, path, module in sorted(found, key=lambda part: part[0] != part[1]):
        if id(module) in inside | known:
            continue
        name = own_name if own_name not in names else path
        if not name.strip():
            raise InvalidInput(
                f"a module of the {type(target).__name__} is called {name!r}; give it a name for plans and messages"
            )
        if name in names:
            raise InvalidInput(
                f"two modules of the {type(target).__name__} are called {name!r}; give each its own name"
            )
        names[name] = module
        known.add(id(module))
    if not names:
        raise InvalidInput(
            f"nothing to manage: the {type(target).__name__} holds no torch module; allowed: a module, a dict or a "
            "list of modules, a diffusers pipeline, an object with any of these as attributes"
        )
    return names


def walk(parts: Mapping[Any, Any], path: str, seen: set[int]) -> Iterator[tuple[str, str, nn.Module]]:
    """Yield the name of each module, its path, and the module."""
    for key, part in parts.items():
        name = f"{path}.{key}" if path else str(key)
        if isinstance(part, nn.Module):
            yield name, name, part
            continue
        inside = numbered(part) if isinstance(part, CONTAINERS) else components_of(part)
        if inside is None or id(part) in seen:
            continue
        seen.add(id(part))
        if isinstance(part, CONTAINERS):
            yield from walk(inside, name, seen)
        else:
            for own_name, own_path, module in walk(inside, "", seen):
                yield own_name, f"{name}.{own_path}", module


def parts_of(target: Any) -> Mapping[Any, Any]:
    """Return the parts to search, by name."""
    if isinstance(target, nn.Module | list | tuple):
        return {"model": target}
    if isinstance(target, dict):
        return target
    components = components_of(target)
    return attributes_of(target) if components is None else components


def numbered(container: dict[Any, Any] | list[Any] | tuple[Any, ...]) -> Mapping[Any, Any]:
    return container if isinstance(container, dict) else dict(enumerate(container))


def components_of(part: Any) -> dict[str, Any] | None:
    """Return the parts of a pipeline; None for anything else."""
    components = None if isinstance(part, type) else getattr(part, "components", None)
    if not isinstance(components, dict) or not any(isinstance(part, nn.Module) for part in components.values()):
        return None
    return components


def attributes_of(target: Any) -> dict[str, Any]:
    """Return an object's own attributes and slots, and the modules among its class attributes."""
    found = dict(getattr(target, "__dict__", {}))
    for kind in type(target).__mro__:
        for name, value in vars(kind).items():
            if isinstance(value, MemberDescriptorType):
                with suppress(AttributeError):  # a slot that is empty
                    found.setdefault(name, value.__get__(target))
            elif isinstance(value, nn.Module):
                found.setdefault(name, value)
    return found


def holds_pipeline(target: Any) -> bool:
    """Whether a pipeline, or an object that may be one, computes with the modules."""
    if isinstance(target, nn.Module):
        return False
    if not isinstance(target, CONTAINERS):
        return True
    return any(components_of(part) is not None for part in numbered(target).values() if not isinstance(part, nn.Module))
