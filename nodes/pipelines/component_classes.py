"""The classes that a pipeline's folder may name: the component classes of diffusers and transformers.

A name in a downloaded file chooses among what these two libraries hold already. No module is imported because a file
names it, and nothing else in a module is reached: a class has to be what a component is.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from ...memory.lazy_names import LIBRARIES

__all__ = ["find_component_class", "find_pipeline_class"]

PIPELINES = "diffusers.pipelines."
# What stands for a class whose own requirements are not installed: to use it is an error that says which.
STAND_INS = ".utils.dummy_"
# As diffusers itself reads older folders.
OLDER_NAMES = {"CLIPFeatureExtractor": "CLIPImageProcessor"}


def find_pipeline_class(diffusers: Any, class_name: str, named_by: Path) -> Any:
    """Return the pipeline class; the library imports its module now.

    Raises:
        InvalidInput: the installed library has no such class, it is not a pipeline, or one that loads others by name.
    """
    from ...memory.errors import InvalidInput
    from ..file_names import shown

    pipeline_class = getattr(diffusers, class_name, None) if class_name.isidentifier() else None
    if not (inspect.isclass(pipeline_class) and issubclass(pipeline_class, diffusers.DiffusionPipeline)):
        raise InvalidInput(
            f"{named_by}: pipeline class {shown(class_name)} is unknown to diffusers {diffusers.__version__}; "
            "allowed: the name of one of its pipeline classes"
        )
    if pipeline_class._load_connected_pipes:
        raise InvalidInput(
            f"{named_by}: {class_name} loads a second pipeline by its name; load each of the two by itself"
        )
    return pipeline_class


def find_component_class(origin: Sequence[str], named_by: Path, component: str) -> Any:
    """Return the class of a component, which its library or one of diffusers' pipelines has.

    Raises:
        InvalidInput: no such class, or one that is no component.
    """
    from ...memory.errors import InvalidInput

    library, class_name = origin
    module = find_module(library)
    found = getattr(module, OLDER_NAMES.get(class_name, class_name), None) if module is not None else None
    home = getattr(found, "__module__", "")
    if inspect.isclass(found) and STAND_INS in home and home.split(".")[0] in LIBRARIES:
        found.from_pretrained(None)  # raises an ImportError that says what is missing
    if not (inspect.isclass(found) and home.split(".")[0] in LIBRARIES and issubclass(found, component_bases())):
        raise InvalidInput(
            f"{named_by}: component {component!r} comes from {library}.{class_name}, which is not a component of the "
            "installed diffusers and transformers; allowed: their models, schedulers, tokenizers and processors"
        )
    return found


def find_module(library: str) -> ModuleType | None:
    """Return one of the two libraries, or the module of a pipeline, which holds classes of its own."""
    import diffusers
    import transformers

    if library in LIBRARIES:
        return diffusers if library == "diffusers" else transformers
    module = getattr(diffusers.pipelines, library, None)
    is_pipelines = isinstance(module, ModuleType) and module.__name__.startswith(PIPELINES)
    return module if is_pipelines else None


def component_bases() -> tuple[type, ...]:
    """Return what components are; none of these looks for code by a name in a file, as the Auto classes do."""
    import diffusers
    import transformers

    return (
        diffusers.ModelMixin,
        diffusers.SchedulerMixin,
        diffusers.BaseGuidance,
        transformers.PreTrainedModel,
        transformers.PreTrainedTokenizerBase,
        transformers.FeatureExtractionMixin,
        transformers.ImageProcessingMixin,
        transformers.ProcessorMixin,
    )
