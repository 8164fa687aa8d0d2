"""What a workflow loads and computes, in the order in which it runs: what plans are made from."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

from ...memory.errors import one_line

if TYPE_CHECKING:
    from ...memory.options.precision import Precisions

__all__ = [
    "CONTROL",
    "DIFFUSION",
    "OTHER",
    "PIPELINE",
    "TEXT",
    "VAE",
    "VISION",
    "AppliedLora",
    "Asked",
    "Call",
    "LoadedModel",
    "NodeName",
    "Size",
    "Tiling",
    "WatermarkSetting",
    "WorkflowDescription",
    "WorkflowUse",
]

DIFFUSION, TEXT, VAE, CONTROL, VISION = "diffusion", "text", "vae", "control", "vision"
PIPELINE = "pipeline"
"""A folder of several components; which, its own index says."""
OTHER = "other"
"""A model of another kind, such as an upscale model: its file is known, and that it is used."""


class Call(str, Enum):
    """What a model computes."""

    ENCODE_TEXT = "encode text"
    ENCODE_VISION = "encode image as prompt"
    ENCODE = "encode"
    """A VAE turns images into latents."""
    SAMPLE = "sample"
    DECODE = "decode"
    """A VAE turns latents into images."""
    OTHER = "compute"


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeName:
    """Which node of the workflow; the id of one inside a subgraph is ``outer:inner``."""

    id: str
    title: str
    class_type: str

    @property
    def label(self) -> str:
        return one_line(f"node {self.id} ({self.title})")


@dataclass(frozen=True, kw_only=True, slots=True)
class Size:
    """The size of images, videos or latents, in pixels of the decoded result."""

    width: int
    height: int
    frames: int = 1
    batch: int = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Tiling:
    """How a node cuts what a VAE computes: edges in pixels, times in frames; 0 frames for a node that has none."""

    tile_size: int
    overlap: int
    temporal_size: int = 0
    temporal_overlap: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class AppliedLora:
    """A LoRA in effect while a model computes; what another node gives is None."""

    node: NodeName
    file: str | None
    strength: float | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Asked:
    """What the widgets of a loader, or of a Manage node behind it, say; None: the node has no such widget, or another
    node gives its value."""

    profile: str | None = None
    precision: str | Precisions | None = None
    """The words of the widget, or all that linked Precision nodes say."""
    placement: str | None = None
    engine: str | None = None
    weight_dtype: str | None = None
    """ComfyUI's own loader: ``default``, ``fp8_e4m3fn``, ``fp8_e4m3fn_fast`` or ``fp8_e5m2``."""
    device: str | None = None
    """ComfyUI's own loaders: ``default`` or ``cpu``."""
    text_type: str | None = None
    """Of text encoders in files of their own: for which models, such as ``flux``."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadedModel:
    """One loaded component."""

    node: NodeName
    kind: str
    files: tuple[str, ...]
    """As the widgets name them, below ``folder``; empty where another node gives a name."""
    folder: str
    """The host's folder of models: ``diffusion_models``, ``checkpoints``, ``diffusers`` for pipelines, ..."""
    part: str = ""
    """Which part of a checkpoint: ``model``, ``clip``, ``vae`` or ``clip_vision``."""
    asked: Asked = field(default_factory=Asked)
    managed_by: NodeName | None = None
    """The Manage node behind another loader."""
    is_ours: bool = False
    """Whether Highwater moves it."""
    loras: tuple[AppliedLora, ...] = ()
    """All that are in effect in any of its calls."""
    unknown: tuple[str, ...] = ()
    """What cannot be read off the workflow and why, one line each."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkflowUse:
    """One call of a model by one node."""

    node: NodeName
    call: Call
    model: int | None
    """Its place in `WorkflowDescription.models`; None where the workflow does not tell."""
    beside: tuple[int, ...] = ()
    """Models that compute within this call: ControlNets."""
    size: Size | None = None
    """Of what is sampled, encoded or decoded; None for text, and where it is not known."""
    prompt: str | None = None
    steps: int | None = None
    cfg: float | None = None
    conds: int | None = None
    """How many times a step evaluates the model for each latent: 1 without guidance, 2 with a negative prompt. Of a
    pipeline the most: those that take guidance as a number, such as Flux, evaluate once."""
    has_hooks: bool = False
    """Whether a conditioning changes weights while it is computed."""
    denoise: float | None = None
    tiling: Tiling | None = None
    references: tuple[Size | None, ...] = ()
    """Images that the diffusion model attends to beside what it samples."""
    loras: tuple[AppliedLora, ...] = ()
    unknown: tuple[str, ...] = ()
    """What of these is not known and why, one line each, naming the node."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WatermarkSetting:
    """The widgets of a Watermark node."""

    node: NodeName
    device: str
    low: str
    high: str


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkflowDescription:
    """A workflow's models, and its calls of them in the order in which they run."""

    models: tuple[LoadedModel, ...]
    uses: tuple[WorkflowUse, ...]
    watermarks: tuple[WatermarkSetting, ...] = ()
    unknown: tuple[NodeName, ...] = ()
    """Nodes that are not understood and take or give models, latents or conditioning."""
    broken: tuple[str, ...] = ()
    """What of the graph is no node, and links to nowhere; a line each."""
