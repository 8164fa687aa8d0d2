"""Why torch does not see a GPU, or numbers it otherwise than its driver, and which flag or variable changes that.

All is computed from what `Sight` records, so that it can be tried without a GPU.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ..memory.transfer.device_facts import DeviceFacts
from .driver_gpus import DriverGpu, read_text
from .findings import Finding, flag_value

__all__ = ["HIDING_VARIABLES", "HostRules", "Sight", "explain_sight", "host_rules", "read_sight"]

# What selects the devices that torch sees, by the maker of the GPUs, the strongest first; HIP reads CUDA's, too.
VARIABLES = {
    "nvidia": ("CUDA_VISIBLE_DEVICES",),
    "amd": ("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL"),
    "intel": ("ZE_AFFINITY_MASK", "ONEAPI_DEVICE_SELECTOR"),
}
HIDING_VARIABLES = tuple(dict.fromkeys(name for names in VARIABLES.values() for name in names))
# ComfyUI writes what these flags say over the variables.
WRITTEN_BY_FLAG = {
    "--cuda-device": ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"),
    "--default-device": ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"),
    "--oneapi-device-selector": ("ONEAPI_DEVICE_SELECTOR",),
}
ORDER, BY_ADDRESS = "CUDA_DEVICE_ORDER", "PCI_BUS_ID"
ALL = "all"
KNOWS_ALL = re.compile(r"""cuda_device\s*[!=]=\s*["']all["']""")
FORCES_FIRST = re.compile(r"""CUDA_VISIBLE_DEVICES["']\]\s*=\s*["']0["']""")
WINDOWS = "ComfyUI's default on Windows"
WITH_PINNED_OFF = "--cuda-device all --disable-pinned-memory"


@dataclass(frozen=True, kw_only=True, slots=True)
class HostRules:
    """What a version of ComfyUI does about devices as it starts."""

    knows_all: bool = False
    """Whether ``--cuda-device all`` means all; older versions hide every device then."""
    forces_first_on_windows: bool = False
    """Whether it shows the first device alone on Windows, unless a flag or a variable says otherwise."""
    show_all: str = ""
    """The flags that show all devices on Windows."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sight:
    """What torch sees, what the drivers have, and what stands between them."""

    seen: tuple[DeviceFacts, ...] = ()
    """Torch's accelerators."""
    doubles: Mapping[str, str] = field(default_factory=dict)
    """Devices that are left out because they are the card of an earlier one: their names and those of the earlier."""
    vendor: str = ""
    """Whose devices torch was built for: ``nvidia``, ``amd``, ``intel``; empty: none."""
    drivers: tuple[DriverGpu, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    """The variables with which the process was started."""
    flags: Sequence[str] | None = None
    """What ComfyUI was started with; None: it does not run."""
    rules: HostRules = HostRules()
    is_windows: bool = False
    torch_version: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Hider:
    """A flag or variable that selects devices."""

    name: str
    value: str
    remedy: str

    @property
    def text(self) -> str:
        if self.name.isidentifier():
            return f"{self.name}={self.value!r}"
        return f"{self.name} {self.value}".strip()

    def num_shown(self, num_gpus: int) -> int:
        """How many of so many GPUs it leaves: drivers read a list up to the first item that is no GPU."""
        if self.name == WINDOWS:
            return min(1, num_gpus)
        items = [] if self.name == "--cpu" else [item.strip() for item in self.value.split(",")]
        shown = 0
        for item in items:
            if not (item.startswith(("GPU-", "MIG-")) or (item.isdecimal() and int(item) < num_gpus)):
                break
            shown += 1
        return min(shown, num_gpus)


def host_rules(main: str) -> HostRules:
    """Return what the text of ComfyUI's ``main.py`` does about devices."""
    show_all = WITH_PINNED_OFF if WITH_PINNED_OFF in main else "--cuda-device all"
    return HostRules(
        knows_all=bool(KNOWS_ALL.search(main)),
        forces_first_on_windows=bool(FORCES_FIRST.search(main)),
        show_all=show_all,
    )


def explain_sight(sight: Sight) -> list[Finding]:
    """Return one finding for each thing that hides or renumbers devices, with the exact flag or variable to set."""
    found = [*explain_hidden(sight), *explain_numbers(sight), *explain_kinds(sight)]
    return [Finding(check="devices", text=text, is_warning=warns, remedy=remedy) for text, warns, remedy in found]


Told = tuple[str, bool, str]


def explain_hidden(sight: Sight) -> Iterator[Told]:
    """Yield what hides devices: the text, whether a GPU is hidden for certain, and the remedy."""
    gpus = own_gpus(sight)
    is_sure = sight.vendor in ("", "nvidia")
    hiders = list(find_hiders(sight, gpus))
    for hider in hiders:
        num_hidden = len(gpus) - hider.num_shown(len(gpus))
        hides = f"hides {tell_hidden(sight, gpus, num_hidden)}" if num_hidden else "selects the devices that torch sees"
        yield f"{hider.text} {hides}", bool(num_hidden) and is_sure, hider.remedy
    if sight.is_windows and sight.flags is None and sight.rules.forces_first_on_windows:
        yield f"ComfyUI shows the first GPU alone on Windows, unless started with {sight.rules.show_all}", False, ""
    if gpus and not sight.vendor:
        text = f"the driver has {tell_number(gpus)}, but torch {sight.torch_version} is built for none"
        yield text, True, "install a build of torch for CUDA, see https://pytorch.org/get-started"
    elif is_sure and not hiders and len(gpus) > len(sight.seen) + len(sight.doubles):
        text = f"the driver has {tell_number(gpus)}, but torch sees {len(sight.seen) or 'none'}"
        yield text, True, "give a container all of them (docker --gpus all), or install a newer torch or driver"


def find_hiders(sight: Sight, gpus: Sequence[DriverGpu]) -> Iterator[Hider]:
    """Yield what is in effect: a flag of ComfyUI counts instead of the variables over which it is written."""
    flags, rules = sight.flags, sight.rules
    numbers = ",".join(map(str, range(len(gpus)))) or "0,1"
    written: set[str] = set()
    for flag, variables in WRITTEN_BY_FLAG.items():
        value = flag_value(flags, flag)
        if value is None or (flag == "--cuda-device" and value == ALL and rules.knows_all):
            continue
        written |= {*variables}
        if flag == "--cuda-device" and value == ALL:
            remedy = f"this version of ComfyUI hides every GPU then: start it with --cuda-device {numbers}"
            yield Hider(name=flag, value=value, remedy=remedy)
        elif flag == "--cuda-device":
            without = "" if sight.is_windows and rules.forces_first_on_windows else ", or without the flag"
            yield Hider(name=flag, value=value, remedy=f"start ComfyUI with --cuda-device {numbers}{without}")
        elif flag == "--oneapi-device-selector":
            yield Hider(name=flag, value=value, remedy="start ComfyUI without the flag")
    if "--cpu" in (flags or ()):
        yield Hider(name="--cpu", value="", remedy="start ComfyUI without --cpu")
    for name in VARIABLES.get(sight.vendor, HIDING_VARIABLES):
        value = sight.environment.get(name)
        if value is None or name in written:
            continue
        if name == "CUDA_VISIBLE_DEVICES" and forces_first(sight):
            continue  # on Windows a process's variables are also those that it wrote itself
        remedy = f"start without the variable {name}"
        if len(gpus) > 1:
            remedy += f", or with {name}={numbers}"
        yield Hider(name=name, value=value, remedy=remedy)
    if forces_first(sight) and (len(gpus) > 1 or not gpus):
        yield Hider(name=WINDOWS, value="", remedy=f"start ComfyUI with {rules.show_all}")


def forces_first(sight: Sight) -> bool:
    """Whether ComfyUI runs and shows the first device alone because it runs on Windows."""
    asked = [flag_value(sight.flags, flag) for flag in ("--cuda-device", "--default-device")]
    is_default = sight.environment.get("CUDA_VISIBLE_DEVICES", "0") == "0" and asked == [None, None]
    return sight.is_windows and sight.flags is not None and sight.rules.forces_first_on_windows and is_default


def explain_numbers(sight: Sight) -> Iterator[Told]:
    """Yield how torch's numbers differ from those of ``nvidia-smi``, which counts by the places of the cards."""
    gpus = own_gpus(sight) if sight.vendor == "nvidia" else []
    first = flag_value(sight.flags, "--default-device")
    if first is not None:
        yield f"--default-device {first}: gpu:0 is CUDA's device {first}, the others follow in their order", False, ""
    places = {device.name: find_gpu(device, gpus) for device in sight.seen}
    by_address = sight.environment.get(ORDER) == BY_ADDRESS
    remedy = "" if by_address else f"start with the variable {ORDER}={BY_ADDRESS} to have nvidia-smi's numbers"
    if None in places.values():
        if len({gpu.model for gpu in gpus}) > 1 and not by_address:
            yield "CUDA numbers GPUs of several models by their speed, nvidia-smi by their places", False, remedy
        return
    moved = [(name, place) for name, place in places.items() if place is not None and name != f"gpu:{place}"]
    if moved:
        told = ", ".join(f"{name} is nvidia-smi's {place} ({gpus[place].model})" for name, place in moved)
        selects = first is not None or any(find_hiders(sight, gpus))
        warns = not (by_address or selects)
        yield told, warns, remedy if warns else ""


def explain_kinds(sight: Sight) -> Iterator[Told]:
    """Yield which devices ``auto`` leaves alone, and which count once."""
    integrated = [device.name for device in sight.seen if device.is_integrated]
    if integrated and len(integrated) < len(sight.seen):
        for name in integrated:
            yield f"{name} is integrated: used only where a placement names it", False, ""
    for name, first in sight.doubles.items():
        yield f"{name} is the card that {first} is: it counts once", False, ""


def read_sight(
    *,
    drivers: Sequence[DriverGpu],
    environment: Mapping[str, str],
    flags: Sequence[str] | None = None,
    root: Path | None = None,
) -> Sight:
    """Return what this process sees; imports torch, allocates no device memory.

    Args:
        flags: what ComfyUI was started with; None: it does not run.
        root: ComfyUI's folder, if there is one.
    """
    import torch

    from ..memory.transfer.devices import list_devices, list_doubles

    seen = [device for device in list_devices() if not device.is_cpu]
    if seen and seen[0].torch_device.type not in ("cuda", "xpu"):
        vendor = seen[0].torch_device.type
    elif torch.version.hip:
        vendor = "amd"
    elif torch.version.cuda:
        vendor = "nvidia"
    else:
        vendor = "intel" if torch.xpu._is_compiled() else ""
    return Sight(
        seen=tuple(device.facts() for device in seen),
        doubles=list_doubles(),
        vendor=vendor,
        drivers=tuple(drivers),
        environment=environment,
        flags=flags,
        rules=host_rules(read_text(root / "main.py") if root else ""),
        is_windows=sys.platform == "win32",
        torch_version=torch.__version__,
    )


def own_gpus(sight: Sight) -> list[DriverGpu]:
    """Return the GPUs that this torch could have: of its maker, or NVIDIA's where it was built for none."""
    return [gpu for gpu in sight.drivers if gpu.vendor == (sight.vendor or "nvidia")]


def find_gpu(device: DeviceFacts, gpus: Sequence[DriverGpu]) -> int | None:
    """Return the driver's number of a device that torch sees, if either tells the uuid or the address of it."""
    for number, gpu in enumerate(gpus):
        if (device.uuid and device.uuid.lower() == gpu.uuid) or (
            device.pci_address and device.pci_address == gpu.pci_address
        ):
            return number
    return None


def tell_hidden(sight: Sight, gpus: Sequence[DriverGpu], num_hidden: int) -> str:
    """Return ``1 of 2 NVIDIA GPUs: 1 (NVIDIA H200)``; without numbers where it is not known which they are."""
    places = {find_gpu(device, gpus) for device in sight.seen}
    told = f"{num_hidden} of {tell_number(gpus)}"
    missing = [f"{number} ({gpu.model})" for number, gpu in enumerate(gpus) if number not in places]
    return f"{told}: {', '.join(missing)}" if None not in places and len(missing) == num_hidden else told


def tell_number(gpus: Sequence[DriverGpu]) -> str:
    maker = {"nvidia": "NVIDIA", "amd": "AMD", "intel": "Intel"}[gpus[0].vendor]
    return f"{len(gpus)} {maker} GPU{'s' if len(gpus) > 1 else ''}"
