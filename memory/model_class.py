"""The config of a model's file, the class that it names, and a module of that class without memory for its weights."""

from __future__ import annotations

import binascii
import inspect
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.utils.weak import WeakTensorKeyDictionary

from .errors import InvalidInput, allowed_values, quoted, require
from .lazy_names import import_library
from .weights.untrusted_config import check_config, declared_items, parse_config, read_config_file

__all__ = ["bounded_parameters", "build_on_meta", "find_class", "parameters_on_meta", "read_config"]

BASE64 = re.compile(r"[A-Za-z0-9+/]*={0,2}", re.ASCII)
# What diffusers reads of a config beside the arguments of its class.
DIFFUSERS_NOTES = ("_class_name", "_diffusers_version", "_use_default_values")
# How many weights a model may have beside twice those in its files: some are computed, or taken again and again.
NUM_UNSTORED = 10_000

one_builder = threading.RLock()


def read_config(path: Path, given: Mapping[str, Any] | str | Path | None) -> dict[str, Any] | None:
    """Return the config of a model: the given one, else the one in its file, else the one beside it, else None.

    The caller has checked the file's header.

    Raises:
        InvalidInput: it is not a JSON object; the message names its place.
    """
    if isinstance(given, Mapping):
        return dict(given)
    if given is not None:
        require(given, (str, Path), what="config", allowed="a dict, or the path of a JSON file")
        return read_config_file(Path(given))
    metadata = read_metadata(path)
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


def read_metadata(path: Path) -> dict[str, str]:
    """Return the texts in a safetensors file's header. Raises `InvalidInput` if the file was replaced by a bad one."""
    try:
        with safe_open(path, framework="np") as file:
            return file.metadata() or {}
    except (OSError, SafetensorError) as error:
        raise InvalidInput(f"{path}: was checked, but cannot be read now: {error}; load it again") from error


def decode_base64(text: str) -> bytes:
    """Return the bytes of a text in base64. Raises ValueError for any other text."""
    if not BASE64.fullmatch(text):
        raise ValueError("not base64")
    return binascii.a2b_base64(text)


def find_class(config: Mapping[str, Any] | None, path: Path) -> Callable[..., nn.Module]:
    """Return the class that a config names, of diffusers or transformers; imports that library now.

    Only those two libraries, whatever the file says: a name in a file must not choose what code runs.
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
    # A library also exports names of other libraries.
    is_own = name.isidentifier() and str(getattr(found, "__module__", "")).split(".")[0] == library
    if not (is_own and inspect.isclass(found) and issubclass(found, nn.Module)):
        raise InvalidInput(
            f"{path}: its config names the class {quoted(name)}, which {library} does not have; pass a class"
        )
    return found


def build_on_meta(model_class: Callable[..., nn.Module], config: dict[str, Any], path: Path) -> nn.Module:
    """Return a module whose parameters have no memory; its buffers are on the CPU. Keeps torch's random state.

    The class gets what its signature declares ([Note: foreign configs] in `weights/untrusted_config.py`).
    """
    with parameters_on_meta(), torch.inference_mode(False), torch.random.fork_rng(devices=[]), torch.device("cpu"):
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
    """Return the items of a config as keywords for a function; names with an underscore are the file's own notes.

    Raises:
        InvalidInput: the function does not take one of the items.
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

    with hooked(count):
        yield


@contextmanager
def hooked(function: Callable[..., Any]) -> Iterator[None]:
    """Have torch call a function for each parameter that a module registers; one thread after the other.

    torch goes through these hooks in all threads, and fails where another thread adds or removes one.
    """
    with one_builder:
        handle = register_module_parameter_registration_hook(function)
        try:
            yield
        finally:
            handle.remove()


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Put parameters on the meta device as modules of this thread register them; tied ones stay one object.

    Initialising them is free from then on. Before that torch.empty gave them addresses only: no page was touched. torch
    calls the hook in all threads; in others it does nothing.
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

    with hooked(strip):
        yield
