"""What a user asks of one of ComfyUI's models: the widgets, their checks, and the engine's words for them.

A workflow may come from a machine with other devices. One that is well-formed passes the checks whatever it names;
the node that finds a device missing uses ``default`` and says so.
"""

from __future__ import annotations

import difflib
import re
from itertools import permutations
from typing import TYPE_CHECKING, Any

from comfy_api.latest import io

from .pipeline import PRECISIONS

if TYPE_CHECKING:
    from .host import Request

__all__ = [
    "AUTO",
    "DEFAULT",
    "ModelNode",
    "answer",
    "find_model_file",
    "list_model_files",
    "read_request",
    "request_inputs",
]

DEFAULT, AUTO = "default", "auto"  # the host's word and the engine's for "you choose"
DEVICE_WORD = re.compile(r"[A-Za-z_][\w.\-]*(?::\d+)?")
NUM_FILES_TOLD = 20


def request_inputs(*, optional: bool = False) -> list[io.Input]:
    """Return the three widgets that every node for a model ends with; lists devices, touches none.

    Args:
        optional: for a node that has optional inputs of its own: the page puts those last otherwise.
    """
    return [
        io.String.Input(
            "profile",
            optional=optional,
            default=AUTO,
            tooltip=(
                "auto uses what is free. Or a budget for the weights: 6GiB, 80%, -1GiB (leave that free), "
                "unlimited; per device: gpu:0=8GiB,gpu:1=4GiB."
            ),
        ),
        io.Combo.Input(
            "precision",
            optional=optional,
            options=PRECISIONS,
            default=PRECISIONS[0],
            tooltip="fp8 scaled halves the bytes of 16-bit block weights, with a scale per tensor.",
        ),
        io.Combo.Input(
            "placement",
            optional=optional,
            options=list_placements(),
            default=DEFAULT,
            tooltip=(
                "Where it computes: default lets ComfyUI choose, gpu:0&gpu:1 splits its blocks over two devices. "
                "A device that is not here means default, and the node says so."
            ),
        ),
    ]


def list_placements() -> list[str]:
    """Return the host's ``default``, every device, and pairs of GPUs in both orders: the first computes the ends."""
    names = device_names()
    gpus = [name for name in names if name != "cpu"]
    return [DEFAULT, *names, *(f"{first}&{second}" for first, second in permutations(gpus, 2))]


def device_names() -> list[str]:
    from ..memory.devices import list_devices

    return [device.name for device in list_devices()]


class ModelNode(io.ComfyNode):
    """A node for a model: checks the request before anything is loaded, whatever the model is.

    The file is left to the host's own check of combos, which the page knows how to show; so is the precision.
    """

    @classmethod
    def validate_inputs(cls, profile: str | None = None, placement: str | None = None) -> bool | str:
        """Naming ``placement`` here takes its check from the host, which would refuse a device that is not here.

        The host marks both inputs whichever is wrong; the message says which one is meant.
        """
        from ..memory.errors import InvalidInput

        try:
            check_profile(profile)
            resolve_placement(placement)
        except InvalidInput as error:
            return str(error)
        return True


def check_profile(profile: str | None) -> None:
    """Check a profile; None is a linked widget, known when the node runs.

    Raises:
        InvalidInput: naming the column and what is allowed there.
    """
    from ..memory.profile import parse_profile

    if profile is not None:
        parse_profile(profile, devices=device_names())


def resolve_placement(placement: str | None) -> tuple[str, list[str]]:
    """Return a placement in the engine's words, and what the node has to say about it.

    Raises:
        InvalidInput: it is no placement on any machine; names the column.
    """
    from ..memory.errors import InvalidInput
    from ..memory.placement import canonical_device, names_device, parse_placement

    if placement in (None, DEFAULT, AUTO):
        return AUTO, []
    choices = f"allowed: {', '.join(list_placements())}"
    if not isinstance(placement, str):
        raise InvalidInput(f"placement {placement!r} is not a text; {choices}")
    here = device_names()
    named = {canonical_device(word) for word in DEVICE_WORD.findall(placement) if names_device(word)}
    missing = sorted(named - {*here})
    parsed = parse_placement(placement, devices=[*here, *missing])
    devices = [share.device for share in parsed.items[0].devices]
    if str(parsed) != "&".join(devices) or len(devices) > 2:
        raise InvalidInput(f"placement {placement!r} is more than a node takes: one device, or two; {choices}")
    if missing:
        return AUTO, [f"placement {placement}: this machine has no {' or '.join(missing)}; default is used; {choices}"]
    return str(parsed), []


def read_request(node: type[io.ComfyNode], profile: str, precision: str, placement: str) -> tuple[Request, list[str]]:
    """Return what the widgets ask for, and what the node has to say about it.

    Raises:
        InvalidInput: a linked widget gave what the check before the run would have refused.
    """
    from .host import Request

    check_profile(profile)
    resolved, notes = resolve_placement(placement)
    return Request(profile=profile, precision=precision, placement=resolved, node_id=node.hidden.unique_id), notes


def list_model_files(folder: str) -> list[str]:
    """Return the files of one of the host's model folders; the host remembers them until a folder changes."""
    import folder_paths

    return folder_paths.get_filename_list(folder)


def find_model_file(folder: str, name: str) -> str:
    """Return the path of a file that `list_model_files` named.

    Raises:
        InvalidInput: no such file; a link may name one that this machine lacks.
    """
    import folder_paths

    from ..memory.errors import InvalidInput, allowed_values

    names = list_model_files(folder)
    path = folder_paths.get_full_path(folder, name) if name in names else None
    if path is None:
        near = difflib.get_close_matches(name, names, n=NUM_FILES_TOLD)
        told = list(dict.fromkeys([*near, *names]))[:NUM_FILES_TOLD]
        more = f" and {len(names) - len(told)} more" if len(names) > len(told) else ""
        choices = allowed_values(name, told) if told else "there is none"
        raise InvalidInput(f"{name!r} is not in the folder {folder}; {choices}{more}")
    return path


def answer(*models: Any, notes: list[str]) -> io.NodeOutput:
    """Return a node's models, with what it and they have to say as the text on the node.

    The text is sent when it is empty, too: it takes away what an earlier run said.
    """
    from .host import notes_for

    told = [*notes, *(note for model in models if model is not None for note in notes_for(model))]
    return io.NodeOutput(*models, ui={"text": list(dict.fromkeys(told))})
