"""A component in numbers, read from a module without moving it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import nn

from .class_declarations import Declarations
from .component import Component, TensorSpec, group_tensors, guess_kind
from .quantized_leaves import leaves_of
from .safetensors_header import TORCH_NAMES
from .sharing import NOTHING_SHARED, Shared

__all__ = ["component_from_module"]

ENCODABLE_CLASSES = (nn.Linear, nn.modules.conv._ConvNd, nn.Embedding)
SAFETENSORS_NAMES = {f"torch.{name}": word for word, name in TORCH_NAMES.items()} | {"torch.complex128": "C128"}


def component_from_module(
    module: nn.Module,
    *,
    name: str,
    kind: str | None = None,
    largest_bytes: int | None = None,
    cuts_whole: bool = False,
    pattern: str | None = None,
    shared: Shared = NOTHING_SHARED,
) -> Component:
    """Describe a module's parameters and buffers; weights tied across blocks count once, outside of blocks.

    ``largest_bytes``, ``cuts_whole`` and ``pattern`` as in `find_blocks`. Borrowed tensors are left out.
    """
    modules = dict(module.named_modules())
    declared = Declarations(module)
    specs, places = describe_parameters(module, modules, declared, shared)
    paths = dict(module.named_modules(remove_duplicate=False))
    kept_out_of_blocks: set[str] = set()
    while True:  # known blocks show which weights two of them share; without those the blocks may be others
        component = group_tensors(
            name,
            kind or guess_kind(name),
            specs,
            lambda path: is_callable(modules.get(path)),
            whole=declared.whole,
            kept_out_of_blocks=kept_out_of_blocks,
            largest_bytes=largest_bytes,
            cuts_whole=cuts_whole,
            pattern=pattern,
        )
        apart = find_apart(component, specs, paths, places)
        if apart <= kept_out_of_blocks:
            break
        kept_out_of_blocks |= apart
    return replace(component, buffers=describe_buffers(module, shared), shares=shared.texts)


def describe_parameters(
    module: nn.Module, modules: Mapping[str, nn.Module], declared: Declarations, shared: Shared
) -> tuple[list[TensorSpec], dict[str, tuple[frozenset[nn.Module], ...]]]:
    """Return the parameters that are not borrowed, each once; and where borrowers hold those that are lent."""
    names: dict[int, list[str]] = defaultdict(list)
    parameters = dict(module.named_parameters(remove_duplicate=False))
    for tensor_name, parameter in parameters.items():
        if id(parameter) not in shared.borrowed:
            names[id(parameter)].append(tensor_name)
    specs = []
    for aliases in names.values():
        parameter = parameters[aliases[0]]
        owner = modules[aliases[0].rpartition(".")[0]]
        leaves = leaf_bytes(parameter)
        specs.append(
            TensorSpec(
                name=aliases[0],
                dtype=SAFETENSORS_NAMES[str(parameter.dtype)],
                shape=tuple(parameter.shape),
                leaves=leaves,
                other_names=tuple(aliases[1:]),
                encodable=(
                    len(aliases) == 1
                    and id(parameter) not in shared.lent
                    and not leaves
                    and is_encodable(owner, aliases[0].rpartition(".")[2])
                    and not is_adapters(modules, aliases[0])
                ),
                kept_by=declared.why_wide(aliases[0]),
                layer_classes=layer_classes(type(owner)),
            )
        )
    places = {spec.name: shared.lent[number] for spec in specs if (number := id(parameters[spec.name])) in shared.lent}
    return specs, places


def layer_classes(kind: type) -> tuple[str, ...]:
    """Return the names of a layer's class and of those that it derives from, up to torch's own base."""
    classes = kind.__mro__[: kind.__mro__.index(nn.Module)] if kind is not nn.Module else (nn.Module,)
    return tuple(each.__name__ for each in classes)


def describe_buffers(module: nn.Module, shared: Shared) -> tuple[TensorSpec, ...]:
    """Return the buffers that are not borrowed, each once."""
    aliases_of: dict[int, list[str]] = defaultdict(list)
    for buffer_name, buffer in module.named_buffers(remove_duplicate=False):
        aliases_of[id(buffer)].append(buffer_name)
    return tuple(
        TensorSpec(
            name=name,
            dtype=SAFETENSORS_NAMES[str(buffer.dtype)],
            shape=tuple(buffer.shape),
            leaves=leaf_bytes(buffer),
            other_names=tuple(aliases_of[id(buffer)][1:]),
        )
        for name, buffer in module.named_buffers()
        if id(buffer) not in shared.borrowed
    )


def find_apart(
    component: Component,
    specs: Sequence[TensorSpec],
    paths: Mapping[str, nn.Module],
    places: Mapping[str, Sequence[frozenset[nn.Module]]],
) -> frozenset[str]:
    """Return the weights of blocks that are used elsewhere, too: a block may leave while another needs them.

    Args:
        paths: every module by each of its paths: a block that stands in two places is one block.
        places: the modules around each place of a weight in other components.
    """
    blocks = {paths[block.name] for block in component.blocks}

    def home(name: str) -> nn.Module | None:
        parts = name.split(".")
        above = (paths[".".join(parts[:end])] for end in range(len(parts)))
        return next((part for part in above if part in blocks), None)

    def homes(spec: TensorSpec) -> set[nn.Module | None]:
        others = (next(iter(blocks & above), None) for above in places.get(spec.name, ()))
        return {*map(home, (spec.name, *spec.other_names)), *others}

    tied = (spec for spec in specs if spec.other_names or spec.name in places)
    return frozenset(spec.name for spec in tied if len(homes(spec)) > 1)


def leaf_bytes(tensor: torch.Tensor) -> tuple[int, ...]:
    """Return the bytes of each tensor inside a quantized weight; nothing for a plain one."""
    if getattr(tensor, "rests_narrower", False):  # our own encoded weight counts as the plain one
        return ()
    leaves = leaves_of(tensor)
    return () if leaves[0] is tensor else tuple(leaf.numel() * leaf.element_size() for leaf in leaves)


def is_encodable(owner: nn.Module, parameter_name: str) -> bool:
    kind = type(owner)
    is_gpt2s = kind.__name__ == "Conv1D" and kind.__module__.startswith("transformers.")  # a linear layer, transposed
    return parameter_name == "weight" and (isinstance(owner, ENCODABLE_CLASSES) or is_gpt2s)


def is_adapters(modules: Mapping[str, nn.Module], name: str) -> bool:
    """Whether a weight is one of a layer that adapts another, such as a LoRA's, which holds that as ``base_layer``.

    peft's convention. Such weights are small, and what they add would be lost in an encoded form.
    """
    parts = name.split(".")
    return any(
        parts[depth] != "base_layer" and "base_layer" in getattr(modules.get(".".join(parts[:depth])), "_modules", ())
        for depth in range(len(parts))
    )


def is_callable(module: nn.Module | None) -> bool:
    """Whether calling the module may run its weights: lists, dicts and plain ``nn.Module`` have no forward to hook.

    False for subclasses of ``Sequential``, too: ComfyUI's UNet calls the children of its own subclass from outside.
    """
    if isinstance(module, nn.Sequential) and type(module) is not nn.Sequential:
        return False
    if module is None or isinstance(module, nn.ModuleList | nn.ModuleDict | nn.ParameterList):
        return False
    return type(module).forward is not nn.Module.forward or "forward" in vars(module)
