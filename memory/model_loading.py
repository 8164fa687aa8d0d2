"""Whole models from their files: the class and its config, a module without memory, and weights read where they belong.

[Note: bare modules] What `load_model` returns has its weights on the meta device and knows its file. Nothing is read
until the weights are needed: `manage` reads them straight into its slabs or leaves them on disk; `load_weights` reads
them into memory of the module's own. Only parameters are bare. Buffers that a constructor computes, such as the tables
of rotary embeddings, are in no file: they are real from the start.
"""

from __future__ import annotations

import binascii
import inspect
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.utils.weak import WeakTensorKeyDictionary

from .errors import InvalidInput, allowed_values, quoted, require
from .lazy_names import import_library
from .runtime.managed_component import refuse_managed
from .runtime.parameter_slots import split_owner
from .weights.file_reader import torch_dtype
from .weights.quantized_leaves import Wrapper
from .weights.safetensors_header import TensorHeader, read_header
from .weights.source import WeightsSource
from .weights.untrusted_config import check_config, declared_items, parse_config, read_config_file

__all__ = ["bounded_parameters", "load_model", "load_weights", "source_of"]

Paths = str | Path | Sequence[str | Path]

BASE64 = re.compile(r"[A-Za-z0-9+/]*={0,2}", re.ASCII)
SHARD_NUMBER = re.compile(r"-\d{5}-of-(\d{5})(?=\.safetensors$)")
# What diffusers reads of a config beside the arguments of its class.
DIFFUSERS_NOTES = ("_class_name", "_diffusers_version", "_use_default_values")
# How many weights a model may have beside twice those in its files: some are computed, or taken again and again.
NUM_UNSTORED = 10_000
MAX_REASON = 300  # characters of what a library says
# How many names an error lists of each kind.
NUM_LISTED = 3

sources: WeakKeyDictionary[nn.Module, WeightsSource] = WeakKeyDictionary()
"""Where the weights of bare modules are."""


def load_model(
    path: Paths,
    model_class: Callable[..., nn.Module] | None = None,
    *,
    config: Mapping[str, Any] | str | Path | None = None,
    prefix: str = "",
    ignore_unexpected: bool = False,
) -> nn.Module:
    """Return the model of a file, in eval mode, with its weights still in the file ([Note: bare modules]).

    Costs the header and the buffers. Each weight gets the dtype that it is stored in. What was managed since and still
    rests in the file when it is released is such a module again: `manage` it or `load_weights` into it.

    Args:
        path: a safetensors file; one of the shards of a model, which stands for all; or a list of files.
        model_class: a class of diffusers or transformers, or what returns a module when it is called with the config's
            items, those aside whose names begin with an underscore; by default the class that the config names under
            ``_class_name`` or ``architectures``.
        config: a dict or a JSON file; by default the metadata's ``config`` or ``config_base64``, else the
            ``config.json`` beside the file.
        prefix: what the names in the file have before those of the module; names without it do not count.
        ignore_unexpected: let the file have weights that the module lacks.

    Raises:
        InvalidInput: the file, the config or the class is not there or not usable, or the names and shapes of file and
            module differ. What a given class raises for the config comes through.
    """
    require(prefix, str, what="prefix", allowed="a text")
    if model_class is not None:
        require(model_class, Callable, what="model_class", allowed="a class, or a function that returns a module")  # type: ignore[arg-type]
    paths = find_shards(path)
    source = WeightsSource(paths, prefix=prefix)
    known = read_config(paths[0], config)
    found = model_class or find_class(known, paths[0])
    try:
        with bounded_parameters(len(source.files), paths[0]):
            module = build_bare(found, known or {}, paths[0])
    except (InvalidInput, MemoryError):
        raise
    except Exception as error:
        if model_class is not None:
            raise
        reason = " ".join(str(error).split())[:MAX_REASON] or type(error).__name__
        raise InvalidInput(f"{paths[0]}: {found.__name__} cannot be made from its config: {reason}") from error
    to_read = []
    for weight in match_names(module, source, paths[0], ignore_unexpected=ignore_unexpected):
        with torch.inference_mode(False):
            device = "cpu" if weight.is_buffer else "meta"
            tensor = torch.empty(weight.header.shape, dtype=weight.dtype, device=device)
        weight.replace_in(module, tensor)
        if weight.is_buffer:
            to_read.append((weight.stored_name, tensor))
        for name in weight.names:
            source.alias(name, weight.stored_name)
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

    What is on the meta device gets memory, in the dtype of the file; what has memory keeps it and its dtype. Beside
    that it costs at most the largest weight whose dtype differs.

    Args:
        path: as in `load_model`; by default the file that `load_model` built the module from.
        prefix, ignore_unexpected: as in `load_model`.

    Raises:
        InvalidInput: the names or shapes of file and module differ, or weights are quantized or on a device: the module
            is as it was. The file cannot be read: weights that had memory may hold anything.
        UnsafeState: the module is managed.
    """
    require(module, nn.Module, what="module", allowed="a torch module")
    require(prefix, str, what="prefix", allowed="a text")
    refuse_managed(module)
    if path is None:
        known = sources.get(module)
        if known is None:
            raise InvalidInput(f"{type(module).__name__} did not come from load_model; name the file of its weights")
        source, place = known, next(file.path for file, _ in known.files.values())
        ignore_unexpected = True  # looked at when it was built
    else:
        paths = find_shards(path)
        source, place = WeightsSource(paths, prefix=prefix), paths[0]
    weights = match_names(module, source, place, ignore_unexpected=ignore_unexpected)
    for weight in weights:
        held = weight.held
        if Wrapper.of(held) or held.device.type not in ("cpu", "meta"):
            what = "quantized" if Wrapper.of(held) else f"on {held.device}"
            raise InvalidInput(f"{type(module).__name__}: {weight.names[0]!r} is {what}; allowed: plain weights on cpu")
    read_weights(module, weights, source)


def source_of(module: nn.Module) -> WeightsSource | None:
    """Return where the weights of a bare module are; None once any of them has memory, which may differ by then."""
    is_bare = all(parameter.is_meta for parameter in module.parameters())
    return sources.get(module) if is_bare else None


# -- what stands beside the weights


def find_shards(path: Paths) -> list[Path]:
    """Return the files of a model: those given, or all shards of the numbering that one belongs to."""
    if not isinstance(path, str | Path):
        if not isinstance(path, Sequence) or not all(isinstance(part, str | Path) for part in path):
            raise InvalidInput(f"path {quoted(path)}: allowed is the path of a .safetensors file, or a list of paths")
        if not path:
            raise InvalidInput("no file is named; expected one .safetensors file or more")
        return [Path(part) for part in path]
    path = Path(path)
    number = SHARD_NUMBER.search(path.name)
    if number is None:
        return [path]
    total = number[1]
    return [path.with_name(SHARD_NUMBER.sub(f"-{n:05}-of-{total}", path.name)) for n in range(1, int(total) + 1)]


def read_config(path: Path, given: Mapping[str, Any] | str | Path | None) -> dict[str, Any] | None:
    """Return the config of a model: the one given, else the one inside its file, else the one beside it, else None.

    Raises:
        InvalidInput: it is not a JSON object; names where it stands.
    """
    if isinstance(given, Mapping):
        return dict(given)
    if given is not None:
        require(given, (str, Path), what="config", allowed="a dict, or the path of a JSON file")
        return read_config_file(Path(given))
    metadata = read_header(path).metadata
    if "config_base64" in metadata:  # as mmgp writes it
        where = f"{path}: config_base64 in its metadata"
        try:
            return parse_config(decode_base64(metadata["config_base64"]), where)
        except ValueError as error:
            raise error if isinstance(error, InvalidInput) else InvalidInput(f"{where} is not base64") from None
    if "config" in metadata:
        return parse_config(metadata["config"], f"{path}: config in its metadata")
    beside = path.with_name("config.json")
    return read_config_file(beside) if beside.is_file() else None


def decode_base64(text: str) -> bytes:
    """Return the bytes of a text in base64. Raises ValueError for any other text."""
    if not BASE64.fullmatch(text):
        raise ValueError("not base64")
    return binascii.a2b_base64(text)


def find_class(config: Mapping[str, Any] | None, path: Path) -> Callable[..., nn.Module]:
    """Return the class that a config names, of diffusers or transformers; imports that library now.

    No other library is asked, whatever the file says: a name in a file must not choose what code runs.
    """
    if config is None:
        raise InvalidInput(f"{path}: has no config in its metadata nor a config.json beside it; pass one, or a class")
    if isinstance(config.get("_class_name"), str):
        library, name = "diffusers", config["_class_name"]
    elif isinstance(config.get("architectures"), list) and config["architectures"]:
        library, name = "transformers", str(config["architectures"][0])
    else:
        raise InvalidInput(f"{path}: its config names no class under '_class_name' or 'architectures'; pass a class")
    try:
        found = getattr(import_library(library), name, None)
    except ModuleNotFoundError as error:
        raise InvalidInput(f"{path}: is a {name}: {error.name} is not installed, pip install {library}") from None
    # A library hands on names of other libraries, too.
    is_own = name.isidentifier() and str(getattr(found, "__module__", "")).split(".")[0] == library
    if not (is_own and inspect.isclass(found) and issubclass(found, nn.Module)):
        raise InvalidInput(
            f"{path}: its config names the class {quoted(name)}, which {library} does not have; pass a class"
        )
    return found


# -- bare modules


def build_bare(model_class: Callable[..., nn.Module], config: dict[str, Any], path: Path) -> nn.Module:
    """Return a module whose parameters have no memory; its buffers are on the CPU. Leaves torch's random state.

    The class gets what its signature declares ([Note: foreign configs] in `weights/untrusted_config.py`).
    """
    with bare_parameters(), torch.inference_mode(False), torch.random.fork_rng(devices=[]), torch.device("cpu"):
        if hasattr(model_class, "config_class"):  # transformers
            declared = declared_items(model_class.config_class, config)
            check_config(declared, f"{path}: its config")
            return model_class(model_class.config_class.from_dict(declared))
        if hasattr(model_class, "from_config"):  # diffusers
            names = {*inspect.signature(model_class).parameters, *getattr(model_class, "_deprecated_kwargs", ())}
            known = {key: value for key, value in config.items() if key in names or key in DIFFUSERS_NOTES}
            built: nn.Module = model_class.from_config(known)
            return built
        return model_class(**accepted_items(model_class, config, path))


def accepted_items(taker: Callable[..., nn.Module], config: dict[str, Any], path: Path) -> dict[str, Any]:
    """Return the config for what takes its items as keywords; a name with an underscore is the file's own note.

    Raises:
        InvalidInput: an item that it does not take.
    """
    items = {key: value for key, value in config.items() if not key.startswith("_")}
    parameters = inspect.signature(taker).parameters.values()
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters):
        return items
    names = [parameter.name for parameter in parameters if parameter.kind is not inspect.Parameter.POSITIONAL_ONLY]
    for key in items:
        if key not in names:
            raise InvalidInput(
                f"{path}: its config has {quoted(key)}, which {getattr(taker, '__name__', taker)} does not take; "
                f"{allowed_values(key, names)}"
            )
    return items


@contextmanager
def bounded_parameters(num_stored: int, place: str | Path) -> Iterator[None]:
    """Refuse a model that this thread builds with far more weights than its files have; a config may ask for any.

    Raises:
        InvalidInput: from where the model is built.
    """
    thread_id = threading.get_ident()
    limit = NUM_UNSTORED + 2 * num_stored
    num_taken = 0

    def count(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        nonlocal num_taken
        num_taken += threading.get_ident() == thread_id
        if num_taken > limit:
            raise InvalidInput(
                f"{place}: its config asks for a {type(module).__name__} and more than {limit} weights, the files have "
                f"{num_stored}; they do not belong together"
            )

    handle = register_module_parameter_registration_hook(count)
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def bare_parameters() -> Iterator[None]:
    """Take the memory of parameters as modules of this thread register them; tied ones stay one object.

    Initialising them is free from then on. torch.empty gave them addresses only: no page of them was ever touched.
    torch knows the hook for all threads; in others it does nothing.
    """
    thread_id = threading.get_ident()
    on_meta = WeakTensorKeyDictionary()

    def strip(module: nn.Module, name: str, parameter: nn.Parameter | None) -> nn.Parameter | None:
        if parameter is None or parameter.is_meta or threading.get_ident() != thread_id:
            return None
        if parameter not in on_meta:
            on_meta[parameter] = nn.Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)
        stripped: nn.Parameter = on_meta[parameter]
        return stripped

    handle = register_module_parameter_registration_hook(strip)  # type: ignore[arg-type]  # what it returns counts
    try:
        yield
    finally:
        handle.remove()


# -- names


@dataclass(frozen=True, slots=True)
class StoredWeight:
    """One weight or saved buffer of a module, by all names that the module has for it, and where it is stored."""

    names: list[str]
    held: torch.Tensor
    is_buffer: bool
    stored_name: str
    header: TensorHeader
    dtype: torch.dtype

    def replace_in(self, module: nn.Module, tensor: torch.Tensor) -> None:
        """Put another tensor at every place that holds this one; weights from a file ask for no gradients."""
        held = tensor if self.is_buffer else nn.Parameter(tensor, requires_grad=False)
        for name in self.names:
            owner, attribute = split_owner(module, name)
            (owner._buffers if self.is_buffer else owner._parameters)[attribute] = held  # type: ignore[assignment]


def match_names(module: nn.Module, source: WeightsSource, path: Path, *, ignore_unexpected: bool) -> list[StoredWeight]:
    """Find every weight and saved buffer of a module in its files; a tied one by any of its names.

    Raises:
        InvalidInput: one line with the first names that are missing, unexpected, or have another shape.
    """
    parameters = dict(module.named_parameters(remove_duplicate=False))
    buffers = dict(module.named_buffers(remove_duplicate=False))
    saved = parameters.keys() | module.state_dict(keep_vars=True).keys()
    tensors: dict[str, torch.Tensor] = {**parameters, **buffers}
    names: dict[int, list[str]] = {}
    for name, tensor in tensors.items():
        if name in saved:
            names.setdefault(id(tensor), []).append(name)
    weights, missing, misshapen = [], [], []
    for aliases in names.values():
        held = tensors[aliases[0]]
        stored_name = next((name for name in aliases if name in source.files), None)
        if stored_name is None:
            missing.append(aliases[0])
            continue
        header = source.files[stored_name][1]
        dtype = torch_dtype(header.dtype)
        if header.shape != tuple(held.shape) or dtype is None:
            misshapen.append(f"{stored_name} is {header.dtype} {list(header.shape)}, not {list(held.shape)}")
        else:
            weights.append(StoredWeight(aliases, held, aliases[0] in buffers, stored_name, header, dtype))
    # What a class of transformers or diffusers declares to be in its files without being in the model.
    ignored = [re.compile(pattern) for pattern in getattr(module, "_keys_to_ignore_on_load_unexpected", None) or ()]
    unexpected = [
        name
        for name in source.files
        if name not in tensors and not ignore_unexpected and not any(pattern.search(name) for pattern in ignored)
    ]
    wrong = [
        f"{len(found)} {kind} ({', '.join(found[:NUM_LISTED])}{', ...' if len(found) > NUM_LISTED else ''})"
        for kind, found in (("missing", missing), ("unexpected", unexpected), ("of another shape", misshapen))
        if found
    ]
    if wrong:
        raise InvalidInput(
            f"{path}: its weights do not fit {type(module).__name__}: {'; '.join(wrong)}"
            f"{suggest_prefix(missing, list(source.files))}"
        )
    return weights


def suggest_prefix(missing: Sequence[str], stored: Sequence[str]) -> str:
    """Return the end of an error line: the one prefix under which the file has a missing weight."""
    for name in missing:
        prefixes = {other.removesuffix(name) for other in stored if other.endswith(f".{name}")}
        if len(prefixes) == 1:
            return f"; did you mean prefix={prefixes.pop()!r}?"
    return ""


@torch.inference_mode(False)
def read_weights(module: nn.Module, weights: Sequence[StoredWeight], source: WeightsSource) -> None:
    """Fill weights from their files: in place where dtype and layout allow, into new memory where there is none."""
    in_place, new, cast = [], [], []
    for weight in weights:
        held = weight.held
        if held.is_meta:
            new.append((weight, torch.empty(held.shape, dtype=weight.dtype)))
        elif held.dtype == weight.dtype and held.is_contiguous() and not held.is_inference():
            in_place.append((weight.stored_name, held.detach()))
        else:
            cast.append(weight)
    source.read_into([*in_place, *((weight.stored_name, tensor) for weight, tensor in new)])
    for weight, tensor in new:
        weight.replace_in(module, tensor)
    for weight in cast:
        tensor = torch.empty(weight.header.shape, dtype=weight.dtype)
        source.read_into([(weight.stored_name, tensor)])
        with torch.inference_mode(weight.held.is_inference()), torch.no_grad():
            weight.held.copy_(tensor)
