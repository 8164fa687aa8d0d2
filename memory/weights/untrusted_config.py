"""Configs from files: refuses what would run or fetch code, and passes on only what a class declares.

[Note: foreign configs] A config chooses sizes, never programs. The libraries read more than sizes from it: modules to
import (``auto_map``), kernels to download (``attn_implementation``), checkpoints to unpickle (timm's arguments).
`check_config` refuses those by name, for folders whose configs a library reads itself. `declared_items` is for configs
that we hand to a class: what its signature does not declare stays behind.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..errors import InvalidInput, quoted
from .safetensors_header import open_regular, parse_integer

__all__ = ["check_config", "declared_items", "parse_config", "read_config_file", "walk_items"]

# The longest that are known list a few thousand shards' tensors, in less than a tenth of this.
MAX_CONFIG_BYTES = 32 << 20
MAX_CONFIG_DIGITS = 40

# Their values name code that is not the library's own, or a model elsewhere, whose config is not checked here.
CODE_KEYS = (
    "auto_map",
    "custom_pipeline",
    "custom_pipelines",
    "custom_generate",
    "trust_remote_code",
    "audio_tokenizer",
)
# Any other may be a kernel of the hub: flash_attention_2 becomes one where the package flash_attn is missing.
ATTENTION_KEY = re.compile(r"_?(attn|experts)_implementation(_internal)?")
OWN_ATTENTION = (None, "eager", "sdpa", "flex_attention", "grouped_mm", "batched_mm")
# The others run kernels of the hub, or packages that compile what they are given.
QUANT_METHODS = ("bitsandbytes", "quanto", "torchao")
# timm downloads or unpickles what its model_args name.
FETCHING_TYPES = ("timm_wrapper", "timm_backbone")
FETCHING_NAME = re.compile(r"(hf[-_]hub|local[-_]dir):", re.IGNORECASE)
# What older configs have under names that no signature has, beside numbers: these cannot name code.
OLDER_KEYS = ("rope_scaling", "torch_dtype")


def read_config_file(path: Path, expected: str = "the JSON file of a config") -> dict[str, Any]:
    """Return the object in a JSON file.

    Raises:
        InvalidInput: no such file, no regular one, longer than any config, not JSON, or not an object.
    """
    with open_regular(path, expected) as file:
        text = file.read(MAX_CONFIG_BYTES + 1)
    if len(text) > MAX_CONFIG_BYTES:
        raise InvalidInput(f"{path}: is longer than {MAX_CONFIG_BYTES >> 20} MiB; expected {expected}")
    return parse_config(text, f"{path}:")


def parse_config(text: str | bytes, where: str) -> dict[str, Any]:
    """Return the object that a JSON text is; ``where`` begins the line that refuses it."""
    try:
        config = json.loads(text, parse_int=parse_config_integer)
    except (ValueError, RecursionError) as error:
        raise InvalidInput(f"{where} is not valid JSON ({error})") from None
    if not isinstance(config, dict):
        raise InvalidInput(f"{where} is a JSON {type(config).__name__}, expected an object")
    return config


def parse_config_integer(digits: str) -> int:
    """As `parse_integer`, but a tokenizer without a longest text has 1000000000000000019884624838656 for it."""
    return int(digits) if len(digits) <= MAX_CONFIG_DIGITS else parse_integer(digits)


def check_config(config: Mapping[str, Any], where: str) -> None:
    """Refuse a config with which a library would run or fetch code. Looks at every level; imports nothing.

    Raises:
        InvalidInput: naming the key, after ``where``.
    """
    for key, value in walk_items(config):
        if key in CODE_KEYS and value:
            raise InvalidInput(
                f"{where}: names code of its own under {key!r}, which is never run here; "
                "use a model whose classes diffusers or transformers have"
            )
        if ATTENTION_KEY.fullmatch(key):
            for name in value.values() if isinstance(value, dict) else [value]:
                if name not in OWN_ATTENTION:
                    raise InvalidInput(
                        f"{where}: {key!r} is {quoted(name)}, which may be fetched as a program; remove it, or use one "
                        f"of {', '.join(filter(None, OWN_ATTENTION))}"
                    )
        if key == "quantization_config" and isinstance(value, dict):
            check_quantization(value, where)
        if key == "model_type" and value in FETCHING_TYPES:
            raise InvalidInput(f"{where}: 'model_type' {value!r} loads what its arguments name; it is not allowed here")
        if isinstance(value, str) and FETCHING_NAME.match(value):
            raise InvalidInput(
                f"{where}: {quoted(key)} is {quoted(value)}, which would be fetched; name no other place"
            )


def check_quantization(config: Mapping[str, Any], where: str) -> None:
    method = config.get("quant_method")
    if method is None and any(config.get(key) for key in ("load_in_4bit", "load_in_8bit")):
        method = "bitsandbytes"  # which older files do not name
    if method not in QUANT_METHODS:
        raise InvalidInput(
            f"{where}: is quantized by {quoted(method)}, whose kernels may be fetched as programs; "
            f"allowed: {', '.join(QUANT_METHODS)}"
        )


def walk_items(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield every key of every object in a config with its value, in no particular order."""
    left = [value]
    while left:
        inner = left.pop()
        if isinstance(inner, Mapping):
            yield from ((str(key), item) for key, item in inner.items())
            left += inner.values()
        elif isinstance(inner, Sequence) and not isinstance(inner, str):
            left += inner


def declared_items(taker: Callable[..., Any], config: Mapping[str, Any]) -> dict[str, Any]:
    """Return what of a config a class of transformers declares, at every level that has a class of its own.

    Beside that numbers, and what older configs call otherwise: a model of theirs would compute something else without.
    """
    declared = inspect.signature(taker).parameters
    levels = getattr(taker, "sub_configs", {})
    kept = {}
    for key, value in config.items():
        is_plain = isinstance(value, bool | int | float) or value is None
        if ATTENTION_KEY.fullmatch(str(key)) or not (key in declared or is_plain or key in OLDER_KEYS or key in levels):
            continue
        kept[key] = declared_below(levels[key], value) if key in levels and isinstance(value, Mapping) else value
    return kept


def declared_below(taker: Callable[..., Any], config: Mapping[str, Any]) -> dict[str, Any]:
    """Return what of a part's config is declared; of one whose class its ``model_type`` chooses, what names no code."""
    if hasattr(taker, "from_dict"):
        return {**declared_items(taker, config), **{key: config[key] for key in ("model_type",) if key in config}}
    check_config({key: value for key, value in config.items() if key != "auto_map"}, "the model's config")
    return {key: value for key, value in config.items() if key not in CODE_KEYS}
