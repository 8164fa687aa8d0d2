"""Reads a prompt node by node, each after those that it is linked to: what they give, load and compute."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ...memory.errors import InvalidInput, quoted
from ..forecast.prompt_graph import MODEL_FILE, PromptGraph
from ..prompts import is_link, title_of
from .description import (
    CONTROL,
    DIFFUSION,
    OTHER,
    PIPELINE,
    TEXT,
    VAE,
    VISION,
    LoadedModel,
    NodeName,
    WatermarkSetting,
    WorkflowDescription,
    WorkflowUse,
)
from .image_rules import IMAGE_RULES
from .latent_rules import LATENT_RULES
from .loader_rules import LOADER_RULES, pass_any
from .node_values import Conditioning, Guide, Held, NodeReading, Passed, Picture, Rule, Steps
from .prompt_rules import PROMPT_RULES
from .sampling_rules import SAMPLING_RULES
from .value_rules import VALUE_RULES, taken_branch
from .video_rules import VIDEO_RULES

__all__ = ["RULES", "PromptReader"]

# Where a loader that is not known finds its file.
FOLDERS = {
    DIFFUSION: "diffusion_models",
    TEXT: "text_encoders",
    VAE: "vae",
    CONTROL: "controlnet",
    VISION: "clip_vision",
    OTHER: "",
    PIPELINE: "diffusers",
}


def set_watermark(node: NodeReading) -> Sequence[Any]:
    values = [node.text(name) for name in ("device", "low", "high")]
    for name, value in zip(("device", "low", "high"), values, strict=True):
        if value is None:
            raise InvalidInput(f"{node.name.label}: {name} {node.why_unread(name)}; a plan needs a fixed value")
    device, low, high = (value or "" for value in values)
    node.reader.watermarks.append(WatermarkSetting(node=node.name, device=device, low=low, high=high))
    return (None,)


RULES: dict[str, Rule] = {
    **LOADER_RULES,
    **PROMPT_RULES,
    **SAMPLING_RULES,
    **LATENT_RULES,
    **VIDEO_RULES,
    **IMAGE_RULES,
    **VALUE_RULES,
    "HighwaterWatermark": set_watermark,
    "HighwaterMemoryReport": pass_any("after"),
    "HighwaterLimits": pass_any(),
    "HighwaterPlan": pass_any(),
    "HighwaterSaveImage": pass_any(),
    "HighwaterQuantizeFile": pass_any(),
}
"""By class: what its outputs stand for."""


class PromptReader:
    """One prompt in API format, read once.

    Args:
        image_size: gives width and height of an image that a node names, or None.
    """

    def __init__(
        self,
        prompt: Mapping[str, Any],
        image_size: Callable[[str], tuple[int, int] | None],
    ) -> None:
        self.image_size = image_size
        self.prompt = {node_id: taken_branch(node_id, prompt) for node_id in prompt}
        self.graph = PromptGraph(self.prompt, outputs=ends_of(self.prompt))
        self.names = {
            node_id: NodeName(
                id=node_id, title=title_of({**node, **meta_of(prompt[node_id])}), class_type=node["class_type"]
            )
            for node_id, node in self.graph.nodes.items()
        }
        self.outputs: dict[str, Sequence[Any] | Passed] = {}
        self.models: list[LoadedModel] = []
        self.places: dict[tuple[Any, ...], int] = {}
        self.uses: list[WorkflowUse] = []
        self.watermarks: list[WatermarkSetting] = []
        self.unknown: dict[str, NodeName] = {}
        self.guessed: dict[tuple[str, str], Held | None] = {}

    def read(self) -> WorkflowDescription:
        """Raises `InvalidInput`: the links form a cycle, or a node of ours has widgets that a plan cannot do with."""
        for node_id in self.graph.order:
            waiting = next((link for link in self.graph.links[node_id] if link not in self.outputs), None)
            if waiting is not None:
                raise InvalidInput(
                    f"the links form a cycle: {self.names[node_id].label} needs {self.names[waiting].label}, "
                    "which needs it"
                )
            node = NodeReading(self, node_id, self.names[node_id], self.graph.nodes[node_id]["inputs"])
            rule = RULES.get(node.name.class_type)
            self.outputs[node_id] = rule(node) if rule is not None else self.pass_on(node)
        return self.describe()

    def pass_on(self, node: NodeReading) -> Passed:
        """Return what a node that is not understood was given; name it if that is of models, latents or prompts."""
        kept: dict[Any, Any] = {}
        for value in node.links():
            for each in value.values if isinstance(value, Passed) else (value,):
                if isinstance(each, Held | Conditioning | Picture | Guide | Steps):
                    kept.setdefault((type(each), getattr(each, "kind", getattr(each, "is_latent", None))), each)
                    is_image = isinstance(each, Picture) and not each.is_latent
                    if not isinstance(value, Passed) and not is_image and node.name.class_type not in HARMLESS:
                        self.name_unknown(node.name)
        return Passed(node.name, tuple(kept.values()))

    def name_unknown(self, name: NodeName) -> None:
        self.unknown[name.id] = name

    def guess_loader(self, node_id: str, kind: str) -> Held | None:
        """Return the model of a node that is not understood, if it names one model file and is asked for a model."""
        if not isinstance(self.outputs[node_id], Passed) or kind == PIPELINE:
            return None
        if (node_id, kind) not in self.guessed:
            inputs = self.graph.nodes[node_id]["inputs"]
            files = [value for value in inputs.values() if isinstance(value, str) and MODEL_FILE.search(value)]
            found = None
            if files:
                name = self.names[node_id]
                why = f"{name.label}: is not understood, and taken for a loader because it names {quoted(files[0])}"
                model = LoadedModel(
                    node=name, kind=kind, files=tuple(files), folder=FOLDERS[kind], unknown=(f"loader: {why}",)
                )
                found = Held(self.add_model(model), kind)
            self.guessed[node_id, kind] = found
        return self.guessed[node_id, kind]

    def add_model(self, model: LoadedModel) -> int:
        """Return the place of a model, which is one for all nodes behind the same loader and the same Manage node."""
        manager = model.managed_by.id if model.managed_by else ""
        key = (model.node.id, model.part, model.kind, manager, model.asked.device, model.asked.weight_dtype)
        if key not in self.places:
            self.places[key] = len(self.models)
            self.models.append(model)
        return self.places[key]

    def describe(self) -> WorkflowDescription:
        """Return what was read; without models whose place another one has taken, such as one that is managed."""
        used = {place for use in self.uses for place in (use.model, *use.beside) if place is not None}
        taken = {(self.models[place].node.id, self.models[place].part, self.models[place].kind) for place in used}
        kept = [
            place
            for place, model in enumerate(self.models)
            if place in used or (model.node.id, model.part, model.kind) not in taken
        ]
        places = {old: new for new, old in enumerate(kept)}
        loras: dict[int, dict[Any, None]] = {place: {} for place in kept}
        for use in self.uses:
            if use.model is not None:
                loras[use.model].update(dict.fromkeys(use.loras))
        return WorkflowDescription(
            models=tuple(replace(self.models[place], loras=tuple(loras[place])) for place in kept),
            uses=tuple(
                replace(
                    use,
                    model=None if use.model is None else places[use.model],
                    beside=tuple(places[place] for place in use.beside),
                )
                for use in self.uses
            ),
            watermarks=tuple(self.watermarks),
            unknown=tuple(self.unknown.values()),
        )


# They take models, latents or prompts, and compute nothing with them.
HARMLESS = frozenset(
    [
        "PreviewAny",
        "SaveLatent",
        "CheckpointSave",
        "CLIPSave",
        "VAESave",
        "ModelSave",
        "ImageOnlyCheckpointSave",
        "GetICLoRAParameters",
        "SamplerSASolver",
        "SamplingPercentToSigma",
        "LoraSave",
    ]
)
OUTPUTS = frozenset(
    [
        "HighwaterKeep",
        "HighwaterLimits",
        "HighwaterMemoryReport",
        "HighwaterPlan",
        "HighwaterQuantizeFile",
        "HighwaterRelease",
        "HighwaterSaveImage",
        "HighwaterVerify",
        "HighwaterVerifyPipeline",
        "HighwaterWatermark",
        "PreviewImage",
        "SaveImage",
        "SaveLatent",
    ]
)
"""The output nodes among those that are understood; any other node may be one."""


def ends_of(prompt: Mapping[str, Any]) -> list[str]:
    """Return the nodes for which a prompt is run: those that nothing is linked to, and that may be output nodes.

    A loader or a sampler without a link from its outputs does not run.
    """
    inputs = [node.get("inputs") for node in prompt.values() if isinstance(node, Mapping)]
    linked = {
        value[0] for given in inputs if isinstance(given, Mapping) for value in given.values() if is_link(value, prompt)
    }
    ends = [node_id for node_id in prompt if node_id not in linked]
    return [
        node_id for node_id in ends if class_of(prompt[node_id]) in OUTPUTS or class_of(prompt[node_id]) not in RULES
    ] or ends


def class_of(node: Any) -> str:
    return str(node.get("class_type")) if isinstance(node, Mapping) else ""


def meta_of(node: Any) -> dict[str, Any]:
    return {"_meta": node.get("_meta")} if isinstance(node, Mapping) else {}
