"""The devices that nodes offer, and the fallback for a device that this machine lacks.

A workflow may come from a machine with other devices. A well-formed value passes the host's check whatever device it
names; the node that finds the device missing uses another and says so. Nonsense is refused before the run.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from itertools import permutations
from typing import TYPE_CHECKING, ClassVar, NoReturn

from ..memory.options.placement import AUTO, AUTO_PLACEMENT, names_device

if TYPE_CHECKING:
    from ..memory.options.budget import BudgetItem
    from ..memory.options.marks import Marks
    from ..memory.options.placement import Placement
    from ..memory.options.profile import OffloadProfile
    from ..memory.transfer.devices import Device

__all__ = [
    "ALL",
    "DEFAULT",
    "Choices",
    "accelerator_names",
    "device_names",
    "fit_marks",
    "fit_placement",
    "fit_profile",
    "missing_devices",
    "notes_of_auto",
    "part_placement_choices",
    "placement_choices",
    "resolve_part_placement",
    "resolve_placement",
    "resolve_watermark_device",
    "watermark_choices",
]

DEFAULT = "default"  # the host's word for "you choose"; the engine's is auto
ALL = "*"
CHECKPOINT_KINDS = ("diffusion", "text", "vae")
HOST = "host"  # the RAM
CPU = "cpu"
DEVICE_WORD = re.compile(r"[A-Za-z_][\w.\-]*(?::\d+)?")


class Choices(list[str]):
    """A combo's options, which also contain every value that ``check`` does not raise `InvalidInput` for.

    The host checks a combo by ``in`` and marks the one input. What a node's own ``validate_inputs`` refuses it marks
    on every input that the function names. The host also copies options, by calling their class with the items.
    """

    check: ClassVar[Callable[[str], object]]

    def __contains__(self, value: object) -> bool:
        from ..memory.errors import InvalidInput

        if not isinstance(value, str) or super().__contains__(value):
            return isinstance(value, str)
        try:
            type(self).check(value)
        except InvalidInput:
            return False
        return True


def device_names() -> list[str]:
    from ..memory.transfer.devices import list_devices

    return [device.name for device in list_devices()]


def accelerator_names() -> list[str]:
    from ..memory.transfer.devices import list_devices

    return [device.name for device in list_devices() if not device.is_cpu]


def missing_devices(text: str, here: Collection[str]) -> list[str]:
    """Return the devices that a placement or a profile names and that are not here, sorted."""
    from ..memory.options.placement import canonical_device, names_device

    return sorted({canonical_device(word) for word in DEVICE_WORD.findall(text) if names_device(word)} - {*here})


# -- how much memory a model may use


def fit_profile(profile: OffloadProfile, text: str) -> tuple[OffloadProfile, list[str]]:
    """Return a profile as this machine can follow it, and what the node that read it from a text has to say about it.

    What it says of devices that are not here counts no more, nor what would leave free all that a device has. Asks the
    driver for the devices' sizes where it names what stays free.
    """
    from ..memory.transfer.devices import list_devices

    here = device_names()
    missing = missing_devices(text, here)
    notes = []
    if missing:
        words, has = " or ".join(missing), ", ".join(here)
        notes.append(f"profile {text}: this machine has no {words}, so that is left out; it has {has}")

    def leaves_nothing(item: BudgetItem) -> bool:
        if not item.leave_bytes or item.target in missing:
            return False
        gpus = [device for device in list_devices() if not device.is_cpu]
        chosen = [device for device in gpus if device.name == item.target] or gpus
        return bool(chosen) and item.leave_bytes >= max(device.total_bytes() for device in chosen)

    for item in filter(leaves_nothing, (*profile.budgets, *profile.reserve)):
        size = item.size.removeprefix("-")
        notes.append(f"profile {text}: no device has more than the {size} that should stay free, so that is left out")
    return profile.without(lambda item: item.target in missing or leaves_nothing(item)), notes


# -- where a model computes


def resolve_placement(placement: str) -> tuple[Placement, list[str]]:
    """Return the placement of one model in the engine's form, and what the node has to say about it.

    Raises:
        InvalidInput: it is no placement on any machine; names the column.
    """
    parsed, missing = read_placement(placement, placement_choices)
    if parsed == AUTO_PLACEMENT:
        return parsed, notes_of_auto(placement)
    if not is_of_one(parsed):
        refuse_placement(placement, placement_choices())
    if missing:
        choices = ", ".join(placement_choices())
        note = f"placement {placement}: this machine has no {' or '.join(missing)}, so default is used"
        return AUTO_PLACEMENT, [f"{note}; allowed: {choices}"]
    return parsed, []


def resolve_part_placement(placement: str) -> tuple[Placement, list[str]]:
    """Return the placement of a checkpoint's parts, as `resolve_placement`: each part may have its own.

    What names a device that is not here is left out: ComfyUI chooses for these parts.
    """
    from ..memory.errors import InvalidInput

    parsed, missing = read_placement(placement, part_placement_choices)
    others = [item.component for item in parsed.items if item.component not in (ALL, *CHECKPOINT_KINDS)]
    if others:
        allowed = ", ".join(CHECKPOINT_KINDS)
        raise InvalidInput(f"placement {placement!r}: a checkpoint has no part {others[0]!r}; allowed: {allowed}")
    if any(not is_of_one(replace(parsed, items=(replace(item, component="*"),))) for item in parsed.items):
        refuse_placement(placement, part_placement_choices())
    if not missing:
        return parsed, notes_of_auto(placement)
    if [item.component for item in parsed.items] == ["*"]:
        return resolve_placement(placement)
    return fit_placement(parsed, placement)


def notes_of_auto(placement: str) -> list[str]:
    """Return what a loader of ComfyUI's models says of ``auto`` for all that it loads: it means its ``default``.

    Such a loader does not know which models others load, so that it could choose for them all.
    """
    if placement.strip() != AUTO:
        return []
    return [f"placement {placement}: loaders of ComfyUI's models read {AUTO} as {DEFAULT}: ComfyUI chooses the device"]


def read_placement(placement: str, choices: Callable[[], Choices]) -> tuple[Placement, list[str]]:
    """Return a placement, and which of its devices are not here."""
    from ..memory.errors import InvalidInput
    from ..memory.options.placement import parse_placement

    if placement in (DEFAULT, AUTO):
        return AUTO_PLACEMENT, []
    if not isinstance(placement, str):
        raise InvalidInput(f"placement {placement!r} is not text; allowed: {', '.join(choices())}")
    here = device_names()
    missing = missing_devices(placement, here)
    return parse_placement(placement, devices=[*here, *missing]), missing


def is_of_one(placement: Placement) -> bool:
    """Whether a placement is that of one model: one device, two that share it, or one and another that stores."""
    item = placement.items[0]
    devices = [share.device for share in item.devices]
    stores = item.tier is not None and item.tier not in (*devices, CPU) and names_device(item.tier)
    named = ":".join([*devices, item.tier or ""]) if stores and len(devices) == 1 else "&".join(devices)
    return str(placement) in (AUTO, named) and len(devices) <= 2


def refuse_placement(placement: str, choices: Choices) -> NoReturn:
    from ..memory.errors import InvalidInput

    allowed = ", ".join(choices)
    raise InvalidInput(f"placement {placement!r} is not one device or two joined by & or :; allowed: {allowed}")


def fit_placement(placement: Placement, text: str) -> tuple[Placement, list[str]]:
    """Return a placement as this machine can follow it, and what the node that read it from a text has to say about it.

    What names a device that is not here is left out: the plan chooses for these components.
    """
    here = device_names()
    missing = missing_devices(text, here)
    if not missing:
        return placement, []
    words, has = " or ".join(missing), ", ".join(here)
    note = f"placement {text}: this machine has no {words}, so what names it is left out; it has {has}"
    return placement.without(missing), [note]


class Placements(Choices):
    check = staticmethod(resolve_placement)


class PartPlacements(Choices):
    check = staticmethod(resolve_part_placement)


def placement_choices() -> Choices:
    """Return the host's ``default``, every device, and pairs of GPUs in both orders, joined by ``&`` and by ``:``.

    The first of a pair computes the ends (``&``), or everything (``:``).
    """
    return Placements(placements_of_one())


def part_placement_choices() -> Choices:
    """Return what `placement_choices` does, and the parts that may have another GPU for themselves."""
    others = [name for name in device_names() if name not in ("cpu", "gpu:0")]
    return PartPlacements([*placements_of_one(), *(f"text={other}" for other in others)])


def placements_of_one() -> list[str]:
    names = device_names()
    gpus = [name for name in names if name != "cpu"]
    return [DEFAULT, *names, *(sign.join(pair) for sign in "&:" for pair in permutations(gpus, 2))]


# -- what a watermark is for


def resolve_watermark_device(device: str) -> tuple[str, list[str]]:
    """Return ``gpu:N``, ``host`` (the RAM) or ``*``, and what the node has to say about it.

    Raises:
        InvalidInput: it is no accelerator on any machine, and not ``host``.
    """
    from ..memory.errors import InvalidInput, allowed_values
    from ..memory.options.placement import canonical_device, names_device

    if device == ALL:
        return ALL, []
    if isinstance(device, str) and device.strip().lower() == HOST:
        return HOST, []
    gpus = [name for name in device_names() if name != "cpu"]
    choices = allowed_values(str(device), [ALL, *gpus, HOST])
    word = device.strip() if isinstance(device, str) else ""
    name = canonical_device(word) if DEVICE_WORD.fullmatch(word) and names_device(word) else ""
    if name in ("", "cpu"):
        raise InvalidInput(f"watermark device {device!r} is not an accelerator and not {HOST}; {choices}")
    if name not in gpus:
        return ALL, [f"watermark {word}: this machine has no {name}, so it applies to every device (*); {choices}"]
    return name, []


class WatermarkDevices(Choices):
    check = staticmethod(resolve_watermark_device)


def watermark_choices() -> Choices:
    """Return ``*``, accelerators and ``host``; none of those before torch is loaded, which listing must not cost."""
    gpus = [name for name in device_names() if name != "cpu"] if "torch" in sys.modules else []
    return WatermarkDevices([ALL, *gpus, HOST])


def fit_marks(
    asked: Mapping[str, Marks], devices: Mapping[str, Device], *, instead: str
) -> tuple[dict[str, Marks], list[str]]:
    """Return the marks that this machine can keep, by device, and what to say of the others.

    Those of a device that is not here are left out, and of one, or a RAM, that is too small for them or on which the
    low one is above the high one: there, marks for every device (``*``) count if they fit. Asks the driver for the
    devices' sizes.

    Args:
        asked: by device, ``*`` or ``host``.
        instead: how a note ends on a device that is here, and whose marks are left out.
    """
    from ..memory.transfer.devices import HostMemory
    from ..memory.units import format_bytes

    totals = {name: device.total_bytes for name, device in devices.items() if not device.is_cpu}
    fitting: dict[str, Marks] = {}
    notes: list[str] = []
    for name, marks in sorted(asked.items(), key=lambda item: item[0] == ALL):
        low, high = marks.low, marks.high
        if name not in (ALL, HOST, *totals):
            has = ", ".join([*totals, HOST])
            notes.append(f"watermark {name}: this machine has no {name}, so that is left out; it has {has}")
            continue
        fit = []
        for target in [target for target in totals if target not in fitting] if name == ALL else [name]:
            total_bytes = HostMemory.now().total_bytes if target == HOST else totals[target]()
            if high.of(total_bytes) > total_bytes:
                notes.append(f"watermark {high}: {target} has {format_bytes(total_bytes)} only{instead}")
            elif low.of(total_bytes) > high.of(total_bytes):
                low_says, high_says = low.says(total_bytes), high.says(total_bytes)
                crossed = f"low {low_says} above high {high_says}"
                notes.append(f"watermark {low}:{high}: {target} would have {crossed}{instead}")
            else:
                fit.append(target)
        fitting |= {ALL: marks} if name == ALL and fit == [*totals] else dict.fromkeys(fit, marks)
    return fitting, notes
