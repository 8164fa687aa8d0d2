"""mmgp on a simulated device, if it is installed. It supports CUDA only, so the names of CUDA are replaced.

``pip install mmgp`` installs it; the engine contains none of it. Its source is read from where it was installed and
changed in memory only.
"""

from __future__ import annotations

import functools
import importlib.util
import sys
from types import ModuleType

__all__ = ["load_mmgp"]

REPLACED = {
    'torch.cuda.default_stream(torch.device("cuda"))': "torch.{name}.current_stream()",
    "torch.cuda.": "torch.{name}.",
    '"cuda"': '"{name}"',
    "'cuda'": '"{name}"',
    ".cuda(": ".{name}(",
    ".is_cuda": ".is_{name}",
}


@functools.cache
def load_mmgp(name: str) -> ModuleType | None:
    """Return ``mmgp.offload`` for the backend of this name; None where mmgp is not installed."""
    if importlib.util.find_spec("mmgp") is None:
        return None
    spec = importlib.util.find_spec("mmgp.offload")
    if spec is None or spec.origin is None:
        return None
    with open(spec.origin, encoding="utf-8") as file:
        source = file.read()
    for theirs, ours in REPLACED.items():
        source = source.replace(theirs, ours.format(name=name))
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    exec(compile(source, spec.origin, "exec"), module.__dict__)  # noqa: S102 (installed, with one line changed)
    return module
