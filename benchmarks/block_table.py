"""Which blocks are found in every model that diffusers, their text encoders and ComfyUI have, at their real sizes.

Models are built on torch's meta device, without a byte of weights: about 200 of them in a minute. Sizes are a class's
defaults or those in ``model_sizes.json``, numbers that the models' publishers give. The command
``python -m benchmarks.block_table`` writes ``docs/blocks.md``; the tests make its rows anew.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import inspect
import json
import os
import pkgutil
import runpy
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import nn

from highwater.memory.planner.sizes import explain_non_block
from highwater.memory.weights.component import Component
from highwater.memory.weights.module_component import component_from_module

__all__ = [
    "FAMILIES",
    "TABLE",
    "Row",
    "comfyui_rows",
    "diffusers_models",
    "markdown",
    "rows_of",
    "transformers_models",
]

HERE = Path(__file__).parent
TABLE = HERE.parent / "docs" / "blocks.md"
SIZES = json.loads((HERE / "model_sizes.json").read_text(encoding="utf-8"))
FAMILIES = ("diffusers", "transformers", "comfyui", "comfyui vaes")
PACKAGES = ("transformers", "unets", "autoencoders", "controlnets")
TITLES = {
    "diffusers": "Transformers, UNets, VAEs and ControlNets of diffusers",
    "transformers": "Text and image encoders of transformers",
    "comfyui": "Diffusion models of ComfyUI",
    "comfyui vaes": "VAEs of ComfyUI",
}
Build = Callable[[], nn.Module]
GIB, MIB = 1 << 30, 1 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One model: what is found in it, and why more of it never streams than should."""

    model: str
    weight_bytes: int
    num_blocks: int
    largest_bytes: int
    non_block_bytes: int
    why: str

    def markdown(self) -> str:
        share = self.non_block_bytes / max(1, self.weight_bytes)
        cells = [
            self.model,
            f"{self.weight_bytes / GIB:.2f}",
            str(self.num_blocks),
            f"{self.largest_bytes / MIB:.0f}",
            f"{share:.1%}",
            self.why,
        ]
        return f"| {' | '.join(cells)} |"


def row_of(name: str, component: Component) -> Row:
    return Row(
        model=name,
        weight_bytes=component.weight_bytes,
        num_blocks=len(component.blocks),
        largest_bytes=max((block.weight_bytes for block in component.blocks), default=0),
        non_block_bytes=component.non_block.weight_bytes,
        why=explain_non_block(component),
    )


def rows_of(models: Mapping[str, Build]) -> list[Row]:
    return [row_of(name, component_from_module(build(), name="model")) for name, build in models.items()]


def on_meta(build: type[nn.Module], config: Mapping[str, Any], device: str = "meta") -> nn.Module:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(device), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of what is deprecated inside of the class
            return build(**config)
    finally:
        torch.set_default_dtype(before)


def diffusers_models() -> dict[str, Build]:
    """Return what builds every model class of diffusers at its real size or sizes, by class and, where given, name.

    Building raises what a class raises that neither its defaults nor the sizes build: a new one wants a line there.
    """
    from diffusers import ModelMixin

    models: dict[str, Build] = {}
    for name, model_class in sorted(find_classes(ModelMixin).items()):
        configs = SIZES["diffusers"].get(name, [{}])
        if isinstance(configs, str):  # why it is left out
            continue
        for config in configs:
            title = f"{name}, {config['model']}" if "model" in config else name
            values = {key: value for key, value in config.items() if key != "model"}
            models[title] = functools.partial(on_meta, model_class, values)
    return models


def find_classes(base: type) -> dict[str, type[nn.Module]]:
    classes = {}
    for package in PACKAGES:
        folder = importlib.import_module(f"diffusers.models.{package}")
        for entry in pkgutil.iter_modules(folder.__path__, f"{folder.__name__}."):
            module = importlib.import_module(entry.name)
            for name, value in vars(module).items():
                is_own = inspect.isclass(value) and value.__module__ == module.__name__
                if is_own and issubclass(value, base) and not inspect.isabstract(value):
                    classes[name] = value
    return classes


def transformers_models() -> dict[str, Build]:
    """Return what builds the encoders that pipelines use, by name and class."""
    import transformers

    models: dict[str, Build] = {}
    for name, size in SIZES["transformers"].items():
        model_class = getattr(transformers, size["class"])
        config = model_class.config_class(**{key: value for key, value in size.items() if key != "class"})
        models[f"{name}, {size['class']}"] = functools.partial(on_meta, model_class, {"config": config})
    return models


def comfyui_models() -> dict[str, Build]:
    """Return what builds the diffusion model of every class in ComfyUI's list; only inside of its own process."""
    import comfy.supported_models

    models: dict[str, Build] = {}
    for model_class in comfy.supported_models.models:
        size = SIZES["comfyui"].get(model_class.__name__)
        if size is None:
            raise KeyError(f"{model_class.__name__}: model_sizes.json has no size for it")
        if not isinstance(size, str):
            models[model_class.__name__] = functools.partial(build_comfyui, model_class, size)
    return models


def build_comfyui(model_class: Callable[..., Any], size: Mapping[str, Any]) -> nn.Module:
    size = {key: getattr(torch, value) if key.endswith("dtype") else value for key, value in size.items()}
    device = size.pop("device", "meta")  # the CPU where a constructor computes; its weights are never touched
    build = size.pop("build", None)
    config = model_class(size)
    config.set_inference_dtype(torch.bfloat16, None)
    if build is None:
        model: nn.Module = config.get_model({}, "", device=device).diffusion_model
        return model
    # What is around the model reads a file.
    module, _, name = build.rpartition(".")
    operations = importlib.import_module("comfy.ops").disable_weight_init
    parts = {key: value for key, value in config.unet_config.items() if key != "audio_model"}
    part: nn.Module = getattr(importlib.import_module(module), name)(**parts, device=device, operations=operations)
    return part


def comfyui_vaes() -> dict[str, Build]:
    """Return what builds each autoencoder that ComfyUI picks by a file; only inside of its own process."""
    models: dict[str, Build] = {}
    for name, size in SIZES["comfyui vaes"].items():
        if isinstance(size, str):  # why it is left out
            continue
        config = {key: value for key, value in size.items() if key not in ("class", "device")}
        module, _, class_name = size["class"].rpartition(".")
        model_class = getattr(importlib.import_module(module), class_name)
        if "operations" in inspect.signature(model_class).parameters:
            config["operations"] = importlib.import_module("comfy.ops").disable_weight_init
        # The CPU where a constructor computes; its weights are never touched.
        models[name] = functools.partial(on_meta, model_class, config, size.get("device", "meta"))
    return models


def comfyui_rows(directory: Path, python: Path) -> dict[str, list[Row]]:
    """Return the rows of ComfyUI's models by family, made by its own Python in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "highwater").symlink_to(HERE.parent)
        command = [python, "-m", "highwater.benchmarks.block_table", "--inside", directory]
        environment = os.environ | {"PYTHONPATH": folder, "PYTHONDONTWRITEBYTECODE": "1"}
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"ComfyUI at {directory}: {done.stderr[-2000:]}")
    families = json.loads(done.stdout.splitlines()[-1])
    return {family: [Row(**row) for row in rows] for family, rows in families.items()}


def markdown(rows: Mapping[str, list[Row]], comfyui: str) -> str:
    """Return the whole page."""
    lines = [
        "# Blocks",
        "",
        "The blocks that Highwater finds in each model at its real size, in bfloat16. Blocks can be streamed;",
        "non-block weights always stay on the device. If these are more than 5 % of a model, the last column",
        "lists them. `python -m benchmarks.block_table` makes these tables; the sizes that differ from the",
        "defaults of a class are in `benchmarks/model_sizes.json`.",
        "",
        f"diffusers {version('diffusers')}, transformers {version('transformers')}, ComfyUI {comfyui}.",
    ]
    for family in FAMILIES:
        lines += ["", f"## {TITLES[family]}", ""]
        lines += ["| model | GiB | blocks | largest, MiB | never streams | why |", "|---|--:|--:|--:|--:|---|"]
        lines += [row.markdown() for row in rows[family]]
        left_out = {name: why for name, why in SIZES[family].items() if isinstance(why, str)}
        if left_out:
            listed = "; ".join(f"{name} ({why})" for name, why in left_out.items())
            lines += ["", f"Left out: {listed}."]
    return "\n".join([*lines, ""])


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.block_table", description=__doc__)
    parser.add_argument("--inside", metavar="DIR", help="print the rows of the ComfyUI in this folder, as its Python")
    options = parser.parse_args()
    if options.inside:
        sys.argv = sys.argv[:1]
        sys.path.insert(0, options.inside)
        os.chdir(options.inside)
        sys.argv.append("--cpu")
        import comfy.options

        comfy.options.enable_args_parsing()
        found = {"comfyui": rows_of(comfyui_models()), "comfyui vaes": rows_of(comfyui_vaes())}
        print(json.dumps({family: [asdict(row) for row in rows] for family, rows in found.items()}))
        return 0
    from highwater.tests.comfyui.host_process import find_host

    host = find_host()
    if host is None:
        raise SystemExit("no ComfyUI at ~/comfy/ComfyUI; name one in COMFYUI_DIR")
    os.environ["HF_HUB_OFFLINE"] = "1"
    rows = {
        "diffusers": rows_of(diffusers_models()),
        "transformers": rows_of(transformers_models()),
        **comfyui_rows(host.directory, host.python),
    }
    comfyui = runpy.run_path(str(host.directory / "comfyui_version.py"))["__version__"]
    TABLE.write_text(markdown(rows, comfyui), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
