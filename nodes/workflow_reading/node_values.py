"""What the outputs of nodes stand for while a workflow is read, and what one node sees of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ...memory.errors import quoted
from ..prompts import is_link
from .description import AppliedLora, Asked, Call, LoadedModel, NodeName, Size, WorkflowUse

if TYPE_CHECKING:
    from .prompt_reading import PromptReader

__all__ = [
    "MAX_ATTACHED",
    "MAX_NUMBER",
    "Conditioning",
    "Guide",
    "Held",
    "NodeReading",
    "Passed",
    "Picture",
    "Rule",
    "Steps",
]

# The largest edge, count or number of steps that is taken for one.
MAX_NUMBER = 1 << 24
# Attached to one model or prompt; a graph of more is no workflow, and the first ones stand for it.
MAX_ATTACHED = 200
# How the names of inputs begin that take latents; other pictures are images.
LATENT_INPUTS = ("samples", "latent", "video_latent", "av_latent", "stage_c", "vae_conditioning")


@dataclass(frozen=True, slots=True)
class Held:
    """A loaded model on a link, with the LoRAs that are applied on the way."""

    model: int
    kind: str
    loras: tuple[AppliedLora, ...] = ()
    patches: tuple[int, ...] = ()
    """Models that compute within it."""


@dataclass(frozen=True, slots=True)
class Conditioning:
    """Encoded prompts, with the ControlNets and the images that were attached to them."""

    controls: tuple[int, ...] = ()
    references: tuple[tuple[str, Size | None], ...] = ()
    """Each with the node and the input that attached it."""
    has_hooks: bool = False
    """Whether hooks change weights where it is computed."""

    def joined(self, other: Conditioning) -> Conditioning:
        """Return what both have; what has come on two ways is there once."""
        return Conditioning(
            tuple(dict.fromkeys(self.controls + other.controls))[:MAX_ATTACHED],
            tuple(dict.fromkeys(self.references + other.references))[:MAX_ATTACHED],
            self.has_hooks or other.has_hooks,
        )


@dataclass(frozen=True, slots=True)
class Picture:
    """Images or latents on a link: their size, or why it is not known."""

    size: Size | None
    is_latent: bool = True
    why: str = ""
    is_single: bool = False
    """Whether it is one image, whatever its size."""


@dataclass(frozen=True, slots=True)
class Guide:
    """A guider: what is sampled with, under which guidance."""

    model: Held | None
    conds: int | None
    cfg: float | None
    conditioning: Conditioning = Conditioning()
    other_models: tuple[Held, ...] = ()


@dataclass(frozen=True, slots=True)
class Steps:
    """The noise levels of a sampler: how many steps they make."""

    number: int | None
    denoise: float | None = None
    why: str = ""


@dataclass(frozen=True, slots=True)
class Passed:
    """What a node that is not understood may pass on: the first of each kind that it was given."""

    node: NodeName
    values: tuple[Any, ...]

    def first(self, matches: Callable[[Any], bool]) -> Any:
        return next((value for value in self.values if matches(value)), None)


def has_slot(outputs: Sequence[Any], slot: Any) -> bool:
    """Whether what a node's outputs stand for is known of one."""
    return isinstance(slot, int) and not isinstance(slot, bool) and 0 <= slot < len(outputs)


class NodeReading:
    """One node of a prompt, whose inputs have been read already."""

    def __init__(self, reader: PromptReader, node_id: str, name: NodeName, inputs: dict[str, Any]) -> None:
        self.reader = reader
        self.id = node_id
        self.name = name
        self.inputs = inputs

    # -- inputs

    def links(self) -> list[Any]:
        """Return the values on all links of the node."""
        return [self.value(name) for name, value in self.inputs.items() if is_link(value, self.reader.graph.nodes)]

    def value(self, name: str) -> Any:
        """Return a widget's value, or what a link stands for; None for neither."""
        value: Any = self.inputs.get(name)
        if is_link(value, self.reader.graph.nodes):
            outputs = self.reader.outputs.get(value[0])
            if isinstance(outputs, Passed) or outputs is None:
                return outputs
            return outputs[value[1]] if has_slot(outputs, value[1]) else None
        return value

    def is_linked(self, name: str) -> bool:
        return is_link(self.inputs.get(name), self.reader.graph.nodes)

    def source(self, name: str) -> str:
        """Return the label of the node that an input is linked to, and the output, if it is not known to have one."""
        source, slot = self.inputs[name]
        label, outputs = self.reader.names[source].label, self.reader.outputs.get(source)
        if outputs is None or isinstance(outputs, Passed) or has_slot(outputs, slot):
            return label
        return f"output {quoted(slot)} of {label}, which is not known to have one"

    def find(self, name: str, matches: Callable[[Any], bool]) -> Any:
        """Return an input's value if it matches, or what a node that is not understood may pass on; else None."""
        value = self.value(name)
        if isinstance(value, Passed):
            self.reader.name_unknown(value.node)
            return value.first(matches)
        return value if matches(value) else None

    def held(self, name: str, kind: str) -> Held | None:
        found = self.find(name, lambda value: isinstance(value, Held) and value.kind == kind)
        if found is None and self.is_linked(name):
            found = self.reader.guess_loader(self.inputs[name][0], kind)
        return found  # type: ignore[no-any-return]

    def conditioning(self, *names: str) -> Conditioning:
        joined = Conditioning()
        for name in names:
            found = self.find(name, lambda value: isinstance(value, Conditioning))
            joined = joined.joined(found or Conditioning())
        return joined

    def picture(self, name: str) -> Picture:
        """Return the images or latents of an input; their size may be unknown."""
        value, is_latent = self.value(name), name.startswith(LATENT_INPUTS)
        if isinstance(value, Picture):
            return value
        if isinstance(value, Passed):
            if is_latent:
                self.reader.name_unknown(value.node)
            why = f"size: {value.node.label} is not understood"
        elif self.is_linked(name):
            source = self.source(name)
            why = f"size: {source}{',' if ', ' in source else ''} does not tell"
        else:
            why = f"size: {self.name.label}: input {name!r} is not linked"
        return Picture(None, is_latent=is_latent, why=why)

    def number(self, name: str, default: float | None = None) -> float | None:
        """Return a number of a widget or link; the default for a widget that the workflow does not give."""
        value = self.value(name) if name in self.inputs else default
        if isinstance(value, str):
            try:
                value = float(value)
            except ValueError:
                return None
        if isinstance(value, bool) or not isinstance(value, int | float):
            return None
        return value if abs(value) <= MAX_NUMBER and math.isfinite(value) else None

    def whole(self, name: str, default: int | None = None) -> int | None:
        number = self.number(name, default)
        return None if number is None or number < 0 else int(number)

    def text(self, name: str) -> str | None:
        """Return a widget's text; a host makes one of a number that a program wrote in its place."""
        value = self.value(name)
        return str(value) if isinstance(value, str | int | float) and not isinstance(value, bool) else None

    def size(self, *, length: str | None = None, step: int = 8, batch: str = "batch_size") -> Picture:
        """Return latents of the size that the node's own widgets give, in whole cells of ``step`` pixels."""
        names = ["width", "height", *([length] if length else [])]
        numbers = {name: self.whole(name) for name in names}
        numbers[batch] = self.whole(batch, 1)
        for name, value in numbers.items():
            fewest = step if name in ("width", "height") else 1
            if value is None or value < fewest:
                why = self.why_unread(name) if value is None else f"{value} is less than {fewest}"
                return Picture(None, why=f"size: {self.name.label}: {name} {why}")
        frames = numbers[length] if length else 1
        return Picture(
            Size(
                width=numbers["width"] // step * step,  # type: ignore[operator]
                height=numbers["height"] // step * step,  # type: ignore[operator]
                frames=frames or 1,
                batch=numbers[batch] or 1,
            )
        )

    def why_unread(self, name: str) -> str:
        """Return why an input's value is not known, for a message that begins with its name."""
        if self.is_linked(name):
            return f"comes from {self.source(name)}"
        if name not in self.inputs:
            return "is missing"
        number = self.number(name)
        if number is not None and number < 0:
            return f"{number:g} is less than 0"
        return f"is beyond {MAX_NUMBER}" if is_number(self.value(name)) else "is not a number"

    # -- what it does

    def load(
        self,
        kind: str,
        folder: str,
        widgets: Sequence[str],
        *,
        part: str = "",
        asked: Asked | None = None,
        is_ours: bool = False,
    ) -> Held:
        """Note a model that this node loads, once for each of its parts.

        Args:
            widgets: those that name its files; ``none`` and nothing stand for no file.
        """
        files, unknown = [], []
        for widget in widgets:
            name = self.value(widget)
            if isinstance(name, str) and name not in ("", "none"):
                files.append(name)
            elif not isinstance(name, str) and (self.is_linked(widget) or widget == widgets[0]):
                is_given = widget in self.inputs and not self.is_linked(widget)
                why = "is no file name" if is_given else self.why_unread(widget)
                unknown.append(f"file: {self.name.label}: {widget} {why}")
        model = LoadedModel(
            node=self.name,
            kind=kind,
            files=tuple(files),
            folder=folder,
            part=part,
            asked=asked or Asked(),
            is_ours=is_ours,
            unknown=tuple(unknown),
        )
        return Held(self.reader.add_model(model), kind)

    def manage(self, held: Held, asked: Asked) -> Held:
        """Note that this node manages a model of another loader from here on."""
        model = replace(self.reader.models[held.model], asked=asked, managed_by=self.name, is_ours=True)
        return replace(held, model=self.reader.add_model(model))

    def use(
        self,
        call: Call,
        held: Held | None,
        *,
        size: Picture | None = None,
        unknown: Sequence[str] = (),
        wanted: str = "",
        **fields: Any,
    ) -> None:
        """Note a call of a model.

        Args:
            wanted: the input that gives the model, for the message where none is known.
        """
        lines = [*unknown]
        if held is None:
            origin = f"comes from {self.source(wanted)}" if self.is_linked(wanted) else "is not linked"
            lines.append(f"model: {self.name.label}: {wanted} {origin}")
        if size is not None and size.size is None:
            lines.append(size.why)
        self.reader.uses.append(
            WorkflowUse(
                node=self.name,
                call=call,
                model=held.model if held else None,
                loras=held.loras if held else (),
                size=size.size if size else None,
                unknown=tuple(dict.fromkeys(lines)),
                **fields,
            )
        )


def is_number(value: Any) -> bool:
    """Whether a value is a number, or the text of one, of whatever size."""
    try:
        return not isinstance(value, bool) and not math.isnan(float(value))
    except OverflowError:
        return True
    except (TypeError, ValueError):
        return False


Rule = Callable[[NodeReading], Sequence[Any]]
"""What a node's outputs stand for, in their order; notes models and calls on the way."""
