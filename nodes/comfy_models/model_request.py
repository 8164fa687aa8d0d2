"""What a user asks of one of ComfyUI's models: the inputs, their checks, and the engine's words for them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from comfy_api.latest import io

from ...memory.options.placement import AUTO
from ...memory.options.precision import DEFAULT_PRECISION
from ..auto_placements import choose_placement
from ..default_profile import chosen_profile, profile_fingerprint
from ..device_choices import (
    DEFAULT,
    fit_profile,
    part_placement_choices,
    placement_choices,
    resolve_part_placement,
    resolve_placement,
)
from ..precision import options_input
from ..schema import make_schema
from ..watermark import DeviceWatermark, WatermarkType
from ..widget_values import precision_input, precisions_input, profile_input, read_precision, read_profile
from .model_files import files_fingerprint

if TYPE_CHECKING:
    from ...memory.options.precision import Precisions
    from ..host import Request

__all__ = ["ModelNode", "answer", "answer_with", "check_texts", "model_schema", "read_request", "request_inputs"]

DYNAMIC = "dynamic"
ENGINES = (AUTO, DYNAMIC, "blocks")


def request_inputs(*, optional: bool = False, is_several: bool = False) -> list[io.Input]:
    """Return the inputs that every node for a model ends with; lists devices, touches none.

    Args:
        is_several: for a node that loads several components, which may have a precision and a placement each.
        optional: for a node that has optional inputs of its own: the page puts those last otherwise.
    """
    return [
        profile_input(optional=optional),
        precisions_input() if is_several else precision_input(optional=optional),
        io.Combo.Input(
            "placement",
            optional=optional,
            options=part_placement_choices() if is_several else placement_choices(),
            default=DEFAULT,
            tooltip=(
                "Where the model computes. default: ComfyUI chooses. auto: Highwater does, from the plan of the whole "
                "workflow: the GPUs with which the run takes least time. gpu:0&gpu:1: splits its blocks over two "
                "devices. gpu:0:gpu:1: computes on the first; what does not fit streams from free memory of the "
                "second. If this machine lacks the device, default is used, and the node says so."
                + (" text=gpu:1: that part there, the others where ComfyUI chooses." if is_several else "")
            ),
        ),
        io.Combo.Input(
            "engine",
            optional=True,
            options=list(ENGINES),
            default=ENGINES[0],
            tooltip=(
                "What moves the weights. dynamic: ComfyUI's dynamic VRAM, kept within the budget. blocks: Highwater, "
                "block by block. auto: dynamic where ComfyUI has it on and it can do what is asked, else blocks."
            ),
        ),
        WatermarkType.Input(
            "watermark", optional=True, tooltip="From a Watermark node, which is then set before this model is loaded."
        ),
        options_input(),
    ]


def model_schema(
    *, inputs: Sequence[io.Input], optional_request: bool = False, is_several: bool = False, **fields: Any
) -> io.Schema:
    """Return the schema of a node for a model: inputs of its own, then those of `request_inputs`."""
    more = request_inputs(optional=optional_request, is_several=is_several)
    return make_schema(inputs=[*inputs, *more], hidden=[io.Hidden.unique_id, io.Hidden.prompt], **fields)


class ModelNode(io.ComfyNode):
    """A node for a model: checks the budget before anything is loaded, whatever the model is.

    All else is left to the host's own check of combos, which marks the one input and not all that are named here.
    """

    FOLDER = ""
    """The host's folder of the files that it loads."""
    FILES: tuple[str, ...] = ()
    """The inputs that name these files."""
    FOLLOWS_MODEL = False
    """Whether what it loads computes where the model does that it guides, if its widget does not say otherwise."""

    @classmethod
    def fingerprint_inputs(cls, **inputs: object) -> str:
        """Load again when a file or the default profile has changed: the host itself goes by names."""
        names = [name for name in map(inputs.get, cls.FILES) if isinstance(name, str)]
        return (files_fingerprint(cls.FOLDER, names) if names else "") + profile_fingerprint(inputs.get("profile"))

    @classmethod
    def validate_inputs(cls, profile: str | None = None) -> bool | str:
        return check_texts(profile=profile)


def check_texts(*, profile: str | None = None, precision: str | None = None) -> bool | str:
    """Return True, or what is wrong with a text; None is a linked widget's, which is read when the node runs."""
    from ...memory.errors import InvalidInput

    try:
        if profile is not None:
            read_profile(profile)
        if precision is not None:
            read_precision(precision)
    except InvalidInput as error:
        return str(error)
    return True


def read_request(
    node: type[ModelNode],
    *,
    is_several: bool = False,
    profile: str = AUTO,
    precision: str = DEFAULT_PRECISION.name,
    placement: str = DEFAULT,
    engine: str = ENGINES[0],
    watermark: DeviceWatermark | None = None,
    precision_options: Precisions | None = None,
) -> tuple[Request, list[str]]:
    """Return what the inputs of `request_inputs` ask for, and what the node has to say about it.

    A linked watermark is set now.

    Args:
        is_several: as of `request_inputs`.

    Raises:
        InvalidInput: a linked widget gave what the check before the run would have refused.
    """
    from ...memory.errors import InvalidInput, allowed_values
    from ..host import Request

    if engine not in ENGINES:
        raise InvalidInput(f"engine {engine!r} is unknown; {allowed_values(str(engine), ENGINES)}")
    asked, notes = fit_profile(*chosen_profile(profile))
    placement = placement.strip() if isinstance(placement, str) else placement
    if placement == AUTO and engine != DYNAMIC and not node.FOLLOWS_MODEL:
        placement, chosen_notes = choose_placement(node.hidden.prompt, node.hidden.unique_id)
        notes = [*notes, *chosen_notes]
    elif placement == AUTO and engine == DYNAMIC:
        notes = [*notes, f"placement {AUTO}: {DEFAULT} is used, as engine {DYNAMIC} splits nothing"]
    resolved, more_notes = (resolve_part_placement if is_several else resolve_placement)(placement)
    if watermark is not None:
        more_notes = [*more_notes, *watermark.apply()]
    request = Request(
        profile=asked,
        precision=read_precision(precision, precision_options),
        placement=resolved,
        node_id=node.hidden.unique_id,
        engine=engine,
    )
    return request, [*notes, *more_notes]


def answer_with(
    node: type[ModelNode], make: Callable[[Request], Any], asked: Mapping[str, Any], more_notes: Sequence[str] = ()
) -> io.NodeOutput:
    """Return the model that a node makes of what its inputs ask for. Raises as `read_request`."""
    request, notes = read_request(node, **asked)
    return answer(make(request), notes=[*notes, *more_notes])


def answer(*models: Any, notes: list[str]) -> io.NodeOutput:
    """Return a node's models, with what it and they have to say as the text on the node.

    The text is sent when it is empty, too: it takes away what an earlier run said.
    """
    from ..host import notes_for

    told = [*notes, *(note for model in models if model is not None for note in notes_for(model))]
    return io.NodeOutput(*models, ui={"text": list(dict.fromkeys(told))})
