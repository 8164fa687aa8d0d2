"""Pipelines of the diffusers library: loaded from their folders.

Works in both hosts; diffusers and torch are imported when a pipeline is opened, never before.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
import re
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .pipeline_folders import (
    MODEL_CONFIG,
    MODEL_INDEX,
    check_pipeline,
    component_origins,
    is_quantized,
    read_json,
    weights_files,
)

if TYPE_CHECKING:
    from ...memory.weights.source import WeightsSource

__all__ = ["find_sources", "import_diffusers", "load_pipeline", "load_with_sources", "quiet_libraries"]

# Older ones import what a folder names, and run Python files in it. The floor of the optional requirements, too.
OLDEST_DIFFUSERS = (0, 42)
TO_INSTALL = f"pip install 'diffusers>={'.'.join(map(str, OLDEST_DIFFUSERS))}' transformers accelerate"
# Where the tokenizers of transformers, in Rust, have the error that they end with; it is no `Exception`.
PANICS = "pyo3_runtime"

# What transformers keeps in float32 in every dtype; what it lists where diffusers does, only beside float16.
KEPT_STRICTLY = "_keep_in_fp32_modules_strict"


def load_pipeline(folder: Path, places: Mapping[str, Path] | None = None, *, without_weights: bool = False) -> Any:
    """Load a pipeline into host memory, each component in the dtype of its file; never asks the network.

    The folder names classes, and nothing else of it may choose what runs ([Note: downloaded folders] in
    `pipeline_files.py`, and `component_classes.py`).

    Args:
        places: other folders for components, by name.
        without_weights: for its models to have forms of weights only, on the meta device; no weight is read.

    Raises:
        InvalidInput: diffusers is not installed or too old, or the folder is not one that it can load in full.
    """
    from ...memory.errors import InvalidInput, reason_of
    from .component_classes import find_component_class, find_pipeline_class

    dtypes = check_pipeline(folder)
    diffusers = import_diffusers()
    named_by = folder / MODEL_INDEX
    index = read_json(named_by)
    # The libraries report a mismatch of files and configuration, or a broken installation, with whatever they like.
    try:
        with quiet_libraries():
            pipeline_class = find_pipeline_class(diffusers, index["_class_name"], named_by)
            components = {
                name: load_component(
                    (places or {}).get(name, folder / name),
                    find_component_class(origin, named_by, name),
                    dtypes.get(name),
                    without_weights=without_weights,
                )
                for name, origin in taken_components(pipeline_class, folder, index).items()
            }
            pipe = pipeline_class.from_pretrained(
                folder, local_files_only=True, use_safetensors=True, trust_remote_code=False, **components
            )
    except (InvalidInput, MemoryError):
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__module__ != PANICS:
            raise  # an interrupt
        raise InvalidInput(f"{folder}: diffusers cannot load it: {reason_of(error)}") from error
    for name in places or {}:
        name_after(getattr(pipe, name), folder / name)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def load_with_sources(folder: Path) -> tuple[Any, dict[str, WeightsSource]]:
    """Load a pipeline as `load_pipeline` does, with weights that are kept of it; return it with its files.

    The files know how they were loaded, unless one was replaced meanwhile: then weights may be of either.
    """
    from ...memory.stand_in import open_stand_in
    from .component_loadings import read_loadings

    dtypes = check_pipeline(folder)
    loadings = read_loadings(folder, dtypes)
    with contextlib.ExitStack() as opened:
        found = {
            name: opened.enter_context(open_stand_in(loading, weights_files(folder / name)))
            for name, loading in loadings.items()
        }
        stand_ins = {name: stand_in for name, stand_in in found.items() if stand_in is not None}
        pipe = load_pipeline(folder, {name: stand_in.folder for name, stand_in in stand_ins.items()})
        is_filled = all(stand_in.fill(getattr(pipe, name)) for name, stand_in in stand_ins.items())
    after = read_loadings(folder, dtypes)
    if stand_ins and (after != loadings or not is_filled):
        pipe = load_pipeline(folder)
        after = {}
    sources = find_sources(pipe, folder)
    for name, source in sources.items():
        if name in after and after[name] == loadings.get(name):
            source.was_loaded(after[name])
    return pipe, sources


def find_sources(pipe: Any, folder: Path) -> dict[str, WeightsSource]:
    """Return the files of a loaded pipeline's components, in which they may rest; reads their headers.

    Models of quantized files know theirs."""
    from torch import nn

    return {
        name: find_source(model, paths)
        for name, model in pipe.components.items()
        if isinstance(model, nn.Module) and (paths := weights_files(folder / name)) and not is_quantized(paths)
    }


def find_source(model: Any, paths: Sequence[Path]) -> WeightsSource:
    from ...memory.weights.source import WeightsSource

    source = WeightsSource(paths)
    if any(name in source.files for name, _ in model.named_parameters()):
        return source
    # transformers 5 drops a word that all names begin with, such as the text_model of CLIP.
    words = {name.partition(".")[0] for name in source.files}
    return WeightsSource(paths, prefix=f"{words.pop()}.") if len(words) == 1 else source


def taken_components(pipeline_class: Any, folder: Path, index: dict[str, Any]) -> dict[str, tuple[str, str]]:
    """Return where the components come from that a pipeline takes; the library would look for others by itself.

    Raises:
        InvalidInput: a component is neither a library and a class nor null.
    """
    from ...memory.errors import InvalidInput, reason_of

    origins = component_origins(folder, index)
    parameters = inspect.signature(pipeline_class).parameters.values()
    needed = {parameter.name for parameter in parameters if parameter.default is parameter.empty}
    for name in sorted(needed | set(pipeline_class._optional_components)):
        origin = index.get(name)
        if name not in origins and origin is not None and not (isinstance(origin, list) and None in origin):
            raise InvalidInput(
                f"{folder / MODEL_INDEX}: component {name!r} is {reason_of(repr(origin))}; allowed: [library, class]"
            )
    return {name: origins[name] for name in origins if any(name == parameter.name for parameter in parameters)}


def load_component(place: Path, component_class: Any, dtype: str | None, *, without_weights: bool = False) -> Any:
    """Load one component of a pipeline from its folder; one with weights has a dtype.

    Raises:
        InvalidInput: a weight is missing or has another shape; the library would fill in random numbers.
    """
    from torch import nn
    from transformers import PreTrainedTokenizerBase, ProcessorMixin

    from ...memory.errors import InvalidInput

    if issubclass(component_class, nn.Module):
        if dtype is None:
            raise InvalidInput(
                f"{place / MODEL_CONFIG}: no such file; expected the config of {component_class.__name__}"
            )
        if without_weights:
            return build_without_weights(place, component_class, dtype)
        return load_model(place, component_class, dtype)
    # Those two look for other classes by names in their files; the rest have no such argument.
    remote = (
        {"trust_remote_code": False} if issubclass(component_class, PreTrainedTokenizerBase | ProcessorMixin) else {}
    )
    return component_class.from_pretrained(place, local_files_only=True, **remote)


def name_after(model: Any, place: Path) -> None:
    """Call a model that was loaded from another folder after its own, as the libraries do."""
    if hasattr(model, "register_to_config"):
        model.register_to_config(_name_or_path=place)
    else:
        model.config.update({"name_or_path": place})


def count_tensors(path: Path) -> int:
    """Return how many tensors a safetensors file has, whose header `check_weights` has read."""
    from safetensors import safe_open

    with safe_open(path, framework="np") as file:
        return len(file.keys())


def load_model(place: Path, model_class: Any, dtype: str) -> Any:
    """Load one model of a pipeline; of quantized files it stays in them for now. Raises as `load_component`."""
    paths = weights_files(place)
    if is_quantized(paths or sorted(place.glob("*.safetensors"))):
        return load_quantized(place, paths, model_class)
    import torch

    from ...memory.errors import InvalidInput
    from ...memory.model_class import bounded_parameters

    num_stored = sum(map(count_tensors, place.glob("*.safetensors")))
    with bounded_parameters(num_stored, place):
        model, info = model_class.from_pretrained(
            place,
            torch_dtype=getattr(torch, dtype),
            use_safetensors=True,
            local_files_only=True,
            output_loading_info=True,
        )
    lost = sorted(map(str, [*info["missing_keys"], *info["mismatched_keys"]]))
    if lost:
        raise InvalidInput(
            f"{place}: {len(lost)} weights of {model_class.__name__} are missing or have the wrong shape, "
            f"such as {lost[0]}"
        )
    return model


def build_without_weights(place: Path, model_class: Any, dtype: str) -> Any:
    """Build one model of a pipeline with weights on the meta device, in the dtypes that they would be loaded in."""
    import torch
    import transformers

    from ...memory.model_class import bounded_parameters, build_on_meta
    from ...memory.weights.untrusted_config import read_config_file

    num_stored = sum(map(count_tensors, place.glob("*.safetensors")))
    config, default = read_config_file(place / MODEL_CONFIG), torch.get_default_dtype()
    torch.set_default_dtype(getattr(torch, dtype))  # as the libraries do: buffers get it too
    try:
        with bounded_parameters(num_stored, place):
            model = build_on_meta(model_class, config, place)
    finally:
        torch.set_default_dtype(default)
    wide = set(getattr(model, KEPT_STRICTLY, None) or ())
    if dtype == "float16" or not isinstance(model, transformers.PreTrainedModel):
        wide.update(getattr(model, "_keep_in_fp32_modules", None) or ())
    for name, weight in model.named_parameters():
        if weight.is_floating_point():
            is_wide = not wide.isdisjoint(name.split("."))
            weight.data = weight.data.to(torch.float32 if is_wide else getattr(torch, dtype))
    return model.train(False)


def load_quantized(place: Path, paths: Sequence[Path], model_class: Any) -> Any:
    """Load a model of quantized files, whose codes go as they are to where they rest; the libraries lack their scales.

    Raises:
        InvalidInput: which files it is made of is not plain, or they are of a format or a class that cannot be read.
    """
    from ...memory.errors import InvalidInput
    from ...memory.model_loading import load_model as load_from_file

    if not paths:
        raise InvalidInput(f"{place}: has several files of weights, one of them quantized; keep those of one variant")
    return load_from_file(paths, model_class, config=place / MODEL_CONFIG)


def import_diffusers() -> Any:
    """Import diffusers (several seconds the first time).

    Raises:
        InvalidInput: diffusers or transformers is not installed or fails as it is imported, or diffusers is older
            than what is tested.
    """
    from ...memory.errors import InvalidInput, reason_of

    # transformers holds the text encoders; without accelerate a model is initialised twice over in RAM, and
    # those that keep some layers in fp32 (Wan) cannot be loaded at all.
    try:
        import accelerate  # noqa: F401
        import transformers  # noqa: F401

        with quiet_libraries():  # not around transformers: importing it sets its log level
            import diffusers
    except ModuleNotFoundError as error:
        raise InvalidInput(f"{error.name} is not installed, and pipelines need it; run: {TO_INSTALL}") from None
    except Exception as error:  # a broken or mismatched installation fails with whatever it likes
        raise InvalidInput(f"diffusers cannot be imported: {reason_of(error)}; run: {TO_INSTALL}") from error
    numbers = tuple(map(int, re.findall(r"\d+", diffusers.__version__)[:2]))
    if numbers < OLDEST_DIFFUSERS:
        raise InvalidInput(
            f"diffusers {diffusers.__version__} may run code from a pipeline folder; allowed: "
            f"{'.'.join(map(str, OLDEST_DIFFUSERS))} or newer; run: {TO_INSTALL}"
        )
    return diffusers


@contextlib.contextmanager
def quiet_libraries() -> Iterator[None]:
    """Silence hints and progress bars of diffusers and transformers; errors still come through."""
    with contextlib.ExitStack() as restored:
        restored.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        for name in ("diffusers", "transformers"):
            logger = logging.getLogger(name)
            restored.callback(logger.setLevel, logger.level)
            logger.setLevel(logging.ERROR)
            library_logging = getattr(getattr(sys.modules.get(name), "utils", None), "logging", None)
            if library_logging is not None and library_logging.is_progress_bar_enabled():
                restored.callback(library_logging.enable_progress_bar)
                library_logging.disable_progress_bar()
        yield
