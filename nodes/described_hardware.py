"""Hardware described in a line of text: a machine that is not here, to plan for, or to simulate.

devices = device { "," device } ; device = name "=" size [ "@" size "/s" ] [ "@" number "TFLOPS" ]
name = "gpu" | "gpu:" int | torch device name | "host"
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from ..memory.errors import InvalidInput
from ..memory.manager.watermark import default_host_watermark, default_watermark, unlearned_bytes
from ..memory.options.placement import INTEGER, WORD, Scanner, canonical_device, names_device
from ..memory.planner.capacity import DeviceCapacity, Machine, PeerLink
from ..memory.transfer.devices import HostMemory
from ..memory.transfer.pinned_memory import pin_limit_bytes
from ..memory.units import GIB, format_bytes, parse_bytes

__all__ = ["DescribedDevice", "DeviceRates", "Hardware", "parse_hardware"]

HOST = "host"
AMOUNT = re.compile(r"[^\s,@/;=]+")
SIZE = re.compile(r"\d+(?:\.\d+)?\s*[A-Za-z]*", re.ASCII)
FLOPS = re.compile(r"(\d+(?:\.\d+)?)\s*([TG])FLOPS", re.ASCII | re.IGNORECASE)
SCALES = {"T": 10**12, "G": 10**9}
# A million times the fastest device of today.
MOST_FLOPS = 10**21
# A PCIe 4.0 x16 slot moves about 25 GB/s: simulated devices do, of which it is not said; plans assume nothing.
DEFAULT_LINK_BYTES_PER_S = 25 * 10**9
DEFAULT_HOST_BYTES = 32 * GIB


@dataclass(frozen=True, kw_only=True, slots=True)
class DescribedDevice:
    """One accelerator: what it holds, how fast the host reaches it and how fast it computes.

    In bytes, bytes per second, and floating point operations per second in the dtype of the weights; None: not said.
    """

    name: str
    total_bytes: int
    link_bytes_per_s: int | None = None
    flops_per_s: float | None = None

    @property
    def simulated_link_bytes_per_s(self) -> int:
        """How fast the host reaches the device where it is simulated: as said, else as a usual one."""
        return self.link_bytes_per_s or DEFAULT_LINK_BYTES_PER_S

    def speed_from(self, other: DescribedDevice) -> int | None:
        """Return how fast copies from another device are, as the slower link of the two; None where one is not said."""
        speeds = [speed for speed in (self.link_bytes_per_s, other.link_bytes_per_s) if speed is not None]
        return min(speeds) if len(speeds) == 2 else None

    def __str__(self) -> str:
        computes = f"@{self.flops_per_s / 1e12:g}TFLOPS" if self.flops_per_s else ""
        moves = f"@{self.link_bytes_per_s / 1e9:g}GB/s" if self.link_bytes_per_s else ""
        return f"{self.name}={format_bytes(self.total_bytes)}{moves}{computes}"


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceRates:
    """How fast a device computes: operations and bytes of its memory per second, and seconds to launch a kernel.

    What no text says of a device is as of a simulated one.
    """

    flops_per_s: float
    link_bytes_per_s: float
    memory_bytes_per_s: float = 1e12
    launch_s: float = 5e-6


@dataclass(frozen=True, kw_only=True, slots=True)
class Hardware:
    """A machine that need not exist."""

    devices: tuple[DescribedDevice, ...]
    host_bytes: int = DEFAULT_HOST_BYTES

    @property
    def device_names(self) -> list[str]:
        return ["cpu", *(device.name for device in self.devices)]

    @property
    def pinned_bytes(self) -> int:
        memory = HostMemory(total_bytes=self.host_bytes, free_bytes=self.host_bytes)
        return pin_limit_bytes(memory, used_bytes=0)

    def machine(self) -> Machine:
        """Return the numbers that a plan is made from: everything free but what is kept by default."""
        capacities = [DeviceCapacity(name="cpu", total_bytes=self.host_bytes, available_bytes=self.host_bytes)]
        for device in self.devices:
            low = default_watermark(device.total_bytes).low_bytes
            capacities.append(
                DeviceCapacity(
                    name=device.name,
                    total_bytes=device.total_bytes,
                    available_bytes=device.total_bytes - low,
                    kept_free_bytes=low,
                    link_bytes_per_s=device.link_bytes_per_s,
                    unlearned_bytes=unlearned_bytes(device.total_bytes),
                    speed=device.flops_per_s,
                    peers=tuple(
                        PeerLink(device=other.name, is_direct=True, bytes_per_s=device.speed_from(other))
                        for other in self.devices
                        if other != device
                    ),
                )
            )
        kept = default_host_watermark(self.host_bytes).low_bytes
        return Machine(devices=tuple(capacities), pinned_bytes=self.pinned_bytes, host_kept_bytes=kept)

    @property
    def links(self) -> dict[tuple[str, str], float]:
        """How fast copies to each device are, from each other one and, without a name, from page-locked memory.

        As far as that was said.
        """
        found: dict[tuple[str, str], float | None] = {}
        for device in self.devices:
            found[device.name, ""] = device.link_bytes_per_s
            found |= {(device.name, other.name): device.speed_from(other) for other in self.devices if other != device}
        return {way: speed for way, speed in found.items() if speed is not None}

    @property
    def rates(self) -> dict[str, DeviceRates]:
        """How fast the devices compute of which that was said; nothing is assumed of the others."""
        return {
            device.name: DeviceRates(flops_per_s=device.flops_per_s, link_bytes_per_s=device.simulated_link_bytes_per_s)
            for device in self.devices
            if device.flops_per_s
        }

    def __str__(self) -> str:
        return ",".join([*map(str, self.devices), f"host={format_bytes(self.host_bytes)}"])


def parse_hardware(text: str) -> Hardware:
    """Parse ``gpu:0=16GiB@25GB/s@80TFLOPS,gpu:1=10GiB@12GB/s,host=32GiB``.

    Raises:
        InvalidInput: names the column, the value and what is allowed.
    """
    scanner = Scanner(text, what="devices")
    sizes: dict[str, tuple[int, int | None, float | None]] = {}
    for begin in scanner.items("@"):
        name = parse_name(scanner)
        if name in sizes:
            scanner.fail(f"{name!r} is given twice", at=begin)
        if not scanner.take("="):
            scanner.fail("'=' and a size must follow, such as gpu:0=16GiB@25GB/s")
        total = parse_amount(scanner)
        speed, flops = None, None
        if name == HOST and scanner.take("@"):
            begin = scanner.position
            is_flops = parse_flops(scanner) is not None
            told = "no TFLOPS: only devices compute" if is_flops else "no speed: that of copies stands at each device"
            scanner.fail(f"the host has {told}", at=begin)
        if scanner.take("@") and (flops := parse_flops(scanner)) is None:
            speed = parse_amount(scanner)
            if not scanner.take("/s"):
                scanner.fail("'/s' must follow a speed, such as 25GB/s")
            if scanner.take("@") and (flops := parse_flops(scanner)) is None:
                scanner.fail("a number of TFLOPS must follow, such as 80TFLOPS")
        sizes[name] = total, speed, flops
    host_bytes, *_ = sizes.pop("host", (DEFAULT_HOST_BYTES, None, None))
    names = sorted(sizes, key=lambda name: (len(name), name))
    if not names or names != [f"gpu:{number}" for number in range(len(names))]:
        raise InvalidInput(
            f"devices {text!r}: found {', '.join(names) or 'no gpu'}; allowed: gpu:0, gpu:1, ... without gaps, host"
        )
    devices = tuple(
        DescribedDevice(
            name=name, total_bytes=sizes[name][0], link_bytes_per_s=sizes[name][1], flops_per_s=sizes[name][2]
        )
        for name in names
    )
    return Hardware(devices=devices, host_bytes=host_bytes)


def parse_name(scanner: Scanner) -> str:
    begin = scanner.position
    match = scanner.match(WORD)
    word = match[0] if match else ""
    if word.lower() == HOST:
        return HOST
    if not names_device(word) or canonical_device(word) == "cpu":
        scanner.fail("a device is missing; allowed: gpu:0, gpu:1, ... or host", at=begin)
    if not scanner.take(":"):
        return canonical_device(word)
    number = scanner.match(INTEGER)
    if number is None:
        scanner.fail("the number of the gpu is missing, such as gpu:0")
    return canonical_device(f"{word}:{number[0]}")


def parse_flops(scanner: Scanner) -> float | None:
    """Consume how fast a device computes, in operations per second; None where something else comes."""
    scanner.skip_blanks()
    begin = scanner.position
    match = scanner.match(FLOPS)
    if match is None:
        return None
    flops = float(match[1]) * SCALES[match[2].upper()]
    if flops > MOST_FLOPS:
        scanner.fail(f"{match[0]!r} is too much; allowed: up to {MOST_FLOPS // 10**12}TFLOPS", at=begin)
    if not flops:
        scanner.fail(f"{match[0]!r} is zero; allowed: more than 0", at=begin)
    return flops


def parse_amount(scanner: Scanner) -> int:
    scanner.skip_blanks()
    begin = scanner.position
    word = scanner.match(AMOUNT)
    if word is None:
        scanner.fail("a size is missing; write a number and a unit, such as 16GiB", at=begin)
    scanner.go_to(begin)
    match = scanner.match(SIZE)
    if match is None or scanner.position < word.end():
        scanner.fail(f"{word[0]!r} is not a size; write a number and a unit, such as 16GiB", at=begin)
    try:
        amount = parse_bytes(match[0])
    except InvalidInput as error:
        scanner.fail(str(error), at=begin)
    if not amount:
        scanner.fail(f"{match[0]!r} is zero; allowed: more than 0", at=begin)
    return amount
