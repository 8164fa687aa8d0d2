"""Whole models from their files: `load_model` builds a module on the meta device, `load_weights` reads its weights.

[Note: modules on meta] What `load_model` returns has its weights on the meta device and knows its file, and so does a
copy of it. Nothing is read until the weights are needed: `manage` reads them straight into its slabs or leaves them on
disk; `load_weights` reads them into memory of the module's own. Until then all that needs them raises one line ([Note:
unread] in `runtime/tensors/unread_weight.py`). Only parameters are on the meta device. Buffers that a constructor
computes, such as the tables of rotary embeddings, are in no file: they have memory from the start.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from .errors import InvalidInput, quoted, reason_of, require
from .model_class import bounded_parameters, build_on_meta, find_class, read_config
from .name_matching import StoredWeight, match_names
from .runtime.holders import refuse_managed
from .runtime.tensors.unread_weight import Unread, mark_unread, unread_of
from .weights.quantized_leaves import Wrapper
from .weights.source import WeightsSource

__all__ = ["load_model", "load_weights", "source_of"]

Paths = str | Path | Sequence[str | Path]

SHARD_NUMBER = re.compile(r"-\d{5}-of-(\d{5})(?=\.safetensors$)")

sources: WeakKeyDictionary[nn.Module, WeightsSource] = WeakKeyDictionary()
"""The files of modules on the meta device."""


def load_model(
    path: Paths,
    model_class: Callable[..., nn.Module] | None = None,
    *,
    config: Mapping[str, Any] | str | Path | None = None,
    prefix: str = "",
    ignore_unexpected: bool = False,
) -> nn.Module:
    """Return the model of a file, in eval mode, with its weights still in the file ([Note: modules on meta]).

    Reads the header and the buffers. Each weight gets the dtype in which it is stored; one in eight bits without a
    scale, in which nothing computes, that of most others (bfloat16 where there is none). A module that was managed
    since, and whose weights still rest in the file when it is released, is such a module again: `manage` it or
    `load_weights` into it.

    Args:
        path: a safetensors file; one of the shards of a model, which stands for all; or a list of files.
        model_class: a class of diffusers or transformers, or what returns a module when it is called with the config's
            items, except those whose names begin with an underscore; by default the class that the config names under
            ``_class_name`` or ``architectures``.
        config: a dict or a JSON file; by default the metadata's ``config`` or ``config_base64``, else the
            ``config.json`` beside the file.
        prefix: what names in the file have before the module's names; names without it do not count.
        ignore_unexpected: accept weights in the file that the module lacks.

    Raises:
        InvalidInput: the file, the config or the class is missing or unusable, or the names and shapes of file and
            module differ. Errors of a given class pass through.
    """
    require(prefix, str, what="prefix", allowed="text")
    if model_class is not None:
        require(model_class, Callable, what="model_class", allowed="a class, or a function that returns a module")  # type: ignore[arg-type]
    paths = find_shards(path)
    source = WeightsSource(paths, prefix=prefix)
    source.find_encoded()
    known = read_config(paths[0], config)
    found = model_class or find_class(known, paths[0])
    try:
        with bounded_parameters(len(source.files), paths[0]):
            module = build_on_meta(found, known or {}, paths[0])
    except (InvalidInput, MemoryError):
        raise
    except Exception as error:
        if model_class is not None:
            raise
        raise InvalidInput(
            f"{paths[0]}: {found.__name__} cannot be made from its config: {reason_of(error)}"
        ) from error
    to_read = []
    weights = match_names(module, source, paths[0], ignore_unexpected=ignore_unexpected)
    for weight, dtype in with_dtypes(weights):
        with torch.inference_mode(False):
            device = "cpu" if weight.is_buffer else "meta"
            tensor = torch.empty(weight.held.shape, dtype=dtype, device=device)
        weight.replace_in(module, tensor)
        for name in weight.names:
            source.alias(name, weight.stored_name)
        if weight.is_buffer:
            to_read.append((weight.stored_name, tensor))
        else:
            mark_unread(module.get_parameter(weight.names[0]), Unread(source, frozenset(weight.names)))
    source.read_into(to_read)
    on_meta = [name for name, buffer in module.named_buffers() if buffer.is_meta]
    if on_meta:
        raise InvalidInput(
            f"{type(module).__name__}: its buffer {on_meta[0]!r} is computed from weights, which are not there yet; "
            "build the module yourself, then use load_weights"
        )
    sources[module] = source
    return module.train(False)


def load_weights(
    module: nn.Module, path: Paths | None = None, *, prefix: str = "", ignore_unexpected: bool = False
) -> None:
    """Read all weights and saved buffers of a module from a file, straight into the memory that they have.

    Weights on the meta device get memory, in the dtype that `load_model` gives them; others keep theirs. Needs at most
    as much memory more as the largest weight whose dtype differs.

    Args:
        path: as in `load_model`; by default the file that `load_model` built the module from.
        prefix, ignore_unexpected: as in `load_model`.

    Raises:
        InvalidInput: the names or shapes of file and module differ, or weights are quantized or on a device: the module
            is as it was. The file cannot be read: weights that had memory may hold anything.
        UnsafeState: the module is managed.
    """
    require(module, nn.Module, what="module", allowed="a torch module")
    require(prefix, str, what="prefix", allowed="text")
    refuse_managed(module)
    if path is None:
        known = sources.get(module) or source_of_copy(module)
        if known is None:
            raise InvalidInput(f"{type(module).__name__} did not come from load_model; name the file of its weights")
        source, place = known, next(file.path for file, _ in known.files.values())
        ignore_unexpected = True  # looked at when it was built
    else:
        paths = find_shards(path)
        source, place = WeightsSource(paths, prefix=prefix), paths[0]
        source.find_encoded()
    weights = match_names(module, source, place, ignore_unexpected=ignore_unexpected)
    for weight in weights:
        held = weight.held
        if Wrapper.of(held) or held.device.type not in ("cpu", "meta"):
            what = "quantized" if Wrapper.of(held) else f"on {held.device}"
            raise InvalidInput(f"{type(module).__name__}: {weight.names[0]!r} is {what}; allowed: plain weights on cpu")
    read_weights(module, weights, source)


def source_of(module: nn.Module) -> WeightsSource | None:
    """Return the files of a module on the meta device; None once a weight has memory, and may differ from its file."""
    is_on_meta = all(parameter.is_meta for parameter in module.parameters())
    return (sources.get(module) or source_of_copy(module)) if is_on_meta else None


def source_of_copy(module: nn.Module) -> WeightsSource | None:
    """Return the files of a copy of a module on the meta device: all its weights are unread, under their own names."""
    unread = {name: unread_of(parameter) for name, parameter in module.named_parameters()}
    found = {each.source for name, each in unread.items() if each is not None and name in each.names}
    is_whole = bool(unread) and all(each is not None and name in each.names for name, each in unread.items())
    return found.pop() if is_whole and len(found) == 1 else None


def find_shards(path: Paths) -> list[Path]:
    """Return the files of a model: those given, or all shards of the numbering that one belongs to."""
    if not isinstance(path, str | Path):
        if not isinstance(path, Sequence) or not all(isinstance(part, str | Path) for part in path):
            raise InvalidInput(f"path {quoted(path)}; allowed: the path of a .safetensors file, or a list of paths")
        if not path:
            raise InvalidInput("no file is named; expected one .safetensors file or more")
        return [Path(part) for part in path]
    path = Path(path)
    number = SHARD_NUMBER.search(path.name)
    if number is None:
        return [path]
    total = number[1]
    return [path.with_name(SHARD_NUMBER.sub(f"-{n:05}-of-{total}", path.name)) for n in range(1, int(total) + 1)]


@torch.inference_mode(False)
def read_weights(module: nn.Module, weights: Sequence[StoredWeight], source: WeightsSource) -> None:
    """Fill weights from their files: in place where dtype and layout allow, into new memory where there is none."""
    in_place, new, cast = [], [], []
    for weight, dtype in with_dtypes(weights):
        held = weight.held
        if held.is_meta:
            new.append((weight, torch.empty(held.shape, dtype=dtype)))
        elif held.dtype == weight.dtype and held.is_contiguous() and not held.is_inference():
            in_place.append((weight.stored_name, held.detach()))
        else:
            cast.append(weight)
    source.read_into([*in_place, *((weight.stored_name, tensor) for weight, tensor in new)])
    for weight, tensor in new:
        weight.replace_in(module, tensor)
    for weight in cast:
        tensor = torch.empty(weight.held.shape, dtype=weight.dtype)
        source.read_into([(weight.stored_name, tensor)])
        with torch.inference_mode(weight.held.is_inference()), torch.no_grad():
            weight.held.copy_(tensor)


def with_dtypes(weights: Sequence[StoredWeight]) -> Iterator[tuple[StoredWeight, torch.dtype]]:
    """Yield each weight with the dtype in which it computes."""
    counts = Counter(weight.dtype for weight in weights if weight.dtype.is_floating_point and weight.dtype.itemsize > 1)
    usual = max(counts, key=lambda dtype: counts[dtype], default=torch.bfloat16)
    for weight in weights:
        is_float8 = weight.dtype.is_floating_point and weight.dtype.itemsize == 1
        yield weight, usual if is_float8 else weight.dtype
