"""What forwards need of a device beside the weights: seen in passes, learned from failures, by size of the input.

[Note: needs] A completed pass shows its peak, and the next plan keeps that free. A pass that ran out of memory shows
only that it needs more than was free. So the next plan keeps everything free beside the least form that can compute:
if any plan fits, that one does, and its peak then is the need. Where this peak is less than what had been free at the
failure (the allocator's memory was in pieces, or another program held some of it for a moment), a little more than that
is kept free, and less from run to run. A pass that failed beside the least form does not fit: keeping more free than
the device can give would only evict others in vain, until it can give more.

[Note: other devices] What tensors take does not depend on the card, only what kernels take beside them does. So where a
device has not seen an input size, what another one of its type needed counts as a first estimate: its peak, or what was
not enough there. What stays free after a failure does not count, as it follows from that card's size.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from ..planner.capacity import EVERYTHING, KeptFree
from ..planner.run import with_slack
from ..runtime.forwards.input_size import Size
from ..transfer.devices import Device
from ..weights.component import Component

__all__ = ["Key", "Need", "Needs", "digest_component", "digest_device"]


DIGEST_LENGTH = 32
# The first characters of a device's digest: its type, and so its allocator.
TYPE_LENGTH = 8
# A run that needed less takes a quarter of the difference off, and a 32nd of what was free at a failure.
DECAY = 4
FAILURE_DECAY = 32
# After so many failures what was futile is tried again.
PATIENCE = 4
MAX_SIZES = 256
PREDICTED = "predicted for this size"
ELSEWHERE = "a run on another device needed it"


def digest_component(component: Component) -> str:
    """Return a digest of what a component consists of: names, dtypes and shapes; equal files have equal ones."""
    content = hashlib.sha256()
    for tensor in sorted(
        (tensor for block in (*component.blocks, component.non_block) for tensor in block.tensors),
        key=lambda tensor: tensor.name,
    ):
        content.update(f"{tensor.name} {tensor.dtype} {tensor.shape}\n".encode())
    return content.hexdigest()[:DIGEST_LENGTH]


def digest_device(device: Device) -> str:
    """Return a digest of a device's name and size, which begins with that of its type; equal cards have equal ones."""
    name = "" if device.is_cpu else str(device.module.get_device_properties(device.torch_device).name)
    of_type = hashlib.sha256(device.torch_device.type.encode()).hexdigest()[:TYPE_LENGTH]
    of_card = hashlib.sha256(f"{name} {device.total_bytes()}".encode()).hexdigest()
    return (of_type + of_card)[:DIGEST_LENGTH]


def is_within(size: Size, other: Size) -> bool:
    """Whether each input of a size is at most as large as the same input of the other."""
    return len(size) == len(other) and size[:2] == other[:2] and all(map(int.__le__, size[2:], other[2:]))


def kept_bytes(kept: KeptFree) -> int:
    return kept.num_bytes


@dataclass(slots=True)
class Need:
    """What forwards of one component with inputs of one size need of one device, in bytes beside its weights."""

    seen_bytes: int = 0
    """The peak of completed forwards."""
    failed_bytes: int = 0
    """What was free when a forward ran out of memory; 0 where none did."""
    guard_bytes: int = 0
    """What is kept free since a forward completed after a failure; 0 where none did."""
    futile_bytes: int = 0
    """What was free when a forward ran out of memory beside the least form."""
    used_s: int = 0
    """When it was used last, in seconds since 1970."""
    run_bytes: int = 0
    """The peak in this run; not remembered."""
    patience: int = PATIENCE

    @property
    def is_open(self) -> bool:
        """Whether a forward failed and none completed since."""
        return bool(self.failed_bytes) and not self.guard_bytes

    def kept(self) -> KeptFree:
        if self.is_open:
            why = "the last run of this size ran out of memory"
            return KeptFree(num_bytes=EVERYTHING, why=why, futile_bytes=self.futile_bytes)
        return KeptFree(num_bytes=max(self.seen_bytes, self.guard_bytes), why="an earlier run needed it")

    def estimate(self) -> int:
        """Return what another device probably needs ([Note: other devices])."""
        return with_slack(max(self.seen_bytes, self.failed_bytes))

    def fail(self, free_bytes: int, *, is_least: bool) -> None:
        """Note that a forward ran out of memory, and how much had been free beside the weights.

        Args:
            is_least: the weights had their least form.
        """
        self.failed_bytes, self.guard_bytes = max(1, self.failed_bytes, free_bytes), 0
        self.used_s = int(time.time())
        if is_least:
            self.futile_bytes, self.patience = max(self.futile_bytes, free_bytes), PATIENCE
        elif self.futile_bytes:
            self.patience -= 1
            if not self.patience:
                self.futile_bytes, self.patience = 0, PATIENCE

    def succeed(self, peak_bytes: int, free_bytes: Callable[[], int]) -> bool:
        """Note that a forward completed; returns whether the need has changed and is to be written to the file.

        Args:
            free_bytes: returns what was free beside the weights; called only where it matters.
        """
        is_news = self.is_open or peak_bytes > self.seen_bytes or not self.used_s
        self.run_bytes = max(self.run_bytes, peak_bytes)
        self.seen_bytes = max(self.seen_bytes, peak_bytes)
        if self.is_open:
            self.futile_bytes = 0
            if self.seen_bytes > self.failed_bytes:
                self.guard_bytes, self.failed_bytes = with_slack(self.seen_bytes), 0
            else:
                self.guard_bytes = max(free_bytes(), with_slack(self.failed_bytes))
        if is_news:
            self.used_s = int(time.time())
        return is_news

    def decay(self) -> bool:
        """End a run; returns whether less is kept free from now on."""
        peak, self.run_bytes = self.run_bytes, 0
        if not peak or self.is_open:
            return False
        before = self.seen_bytes, self.guard_bytes, self.failed_bytes
        self.seen_bytes -= (self.seen_bytes - peak) // DECAY
        self.failed_bytes -= -(-self.failed_bytes // FAILURE_DECAY)
        if self.failed_bytes <= self.seen_bytes:
            self.failed_bytes = 0
        least = with_slack(max(self.seen_bytes, self.failed_bytes))
        if self.guard_bytes:
            self.guard_bytes = max(least, self.guard_bytes - -(-(self.guard_bytes - least) // DECAY))
        return before != (self.seen_bytes, self.guard_bytes, self.failed_bytes)


Key = tuple[str, str]
"""Digests of a component's content, dtypes included, and of a device. A file of needs adds a version."""


@dataclass(slots=True)
class Needs:
    """The needs of all components by key and input size, and which of them are not written to the file yet."""

    known: dict[Key, dict[Size, Need]] = field(default_factory=dict)
    last: dict[Key, Size] = field(default_factory=dict)
    """The input size that was used last."""
    changed: set[tuple[Key, Size]] = field(default_factory=set)
    expected: dict[Key, int] = field(default_factory=dict)
    """What forwards to come are predicted to take, in this process."""

    def expect(self, key: Key, num_bytes: int) -> bool:
        """Note what forwards to come are predicted to take; returns whether that is news."""
        is_news = self.expected.get(key) != num_bytes
        self.expected[key] = num_bytes
        return is_news

    def get(self, key: Key, size: Size) -> Need:
        """Return the need at a size, new where there was none."""
        sizes = self.known.setdefault(key, {})
        found = sizes.get(size)
        if found is None:
            while len(sizes) >= MAX_SIZES:
                oldest = min(sizes, key=lambda other: sizes[other].used_s)
                del sizes[oldest]
                self.changed.discard((key, oldest))
            found = sizes[size] = Need()
        self.last[key] = size
        return found

    def kept(self, key: Key, size: Size | None = None, *, fears: bool = True) -> KeptFree | None:
        """Return what to keep free for an input size, for the last one if None; None where nothing is known.

        What was seen at a size counts before what was predicted of it, and what this device showed before others.

        Args:
            fears: whether a failure without a completed forward since counts; else only completed ones do.
        """
        own = self.kept_here(key, size, fears=fears)
        if own is not None and (own.is_known or own.num_bytes == EVERYTHING):
            return own
        return max(filter(None, (own, self.seen_elsewhere(key, size, fears))), key=kept_bytes, default=None)

    def kept_here(self, key: Key, size: Size | None, *, fears: bool) -> KeptFree | None:
        """As `kept`, by what is known of this device."""
        sizes = self.known.get(key)
        expected = self.expected.get(key)
        predicted = None if expected is None else KeptFree(num_bytes=with_slack(expected), why=PREDICTED)
        if not sizes:
            return predicted
        if size is None and predicted is not None:
            return max(filter(None, (self.seen(key, sizes, None, fears), predicted)), key=kept_bytes)
        seen = self.seen(key, sizes, size, fears)
        if predicted is None or (seen is not None and (seen.is_known or seen.num_bytes == EVERYTHING)):
            return seen
        return predicted if seen is None or seen.num_bytes < predicted.num_bytes else seen

    def seen_elsewhere(self, key: Key, size: Size | None, fears: bool) -> KeptFree | None:
        """Return what forwards on other devices of the same type showed; arguments as of `kept`."""
        component, device = key
        found = [
            (other, need)
            for (content, card), sizes in list(self.known.items())
            if content == component and card != device and card[:TYPE_LENGTH] == device[:TYPE_LENGTH]
            for other, need in list(sizes.items())
            if need.estimate() and (fears or not need.is_open)
        ]
        if size is None and found:
            size = self.last.get(key) or max(found, key=lambda entry: entry[1].used_s)[0]
        amounts = [need.estimate() for other, need in found if size is not None and is_within(other, size)]
        return KeptFree(num_bytes=max(amounts), why=ELSEWHERE, is_known=False) if amounts else None

    def seen(self, key: Key, sizes: Mapping[Size, Need], size: Size | None, fears: bool) -> KeptFree | None:
        """Return what forwards showed; arguments as of `kept`."""
        size = self.last.get(key) if size is None else size
        if size is None:
            size = max(sizes, key=lambda other: sizes[other].used_s)
        exact = sizes.get(size)
        if exact is not None and not (exact.is_open and not fears):
            return self.bounded(sizes, size, exact) if exact.is_open else exact.kept()
        # A larger input needs no less than a smaller one.
        smaller = [need for other, need in sizes.items() if is_within(other, size) and (fears or not need.is_open)]
        if not smaller:
            return None
        most = max((need.kept() for need in smaller), key=kept_bytes)
        why = most.why if most.num_bytes == EVERYTHING else "a run of a smaller size needed as much"
        return KeptFree(num_bytes=most.num_bytes, why=why, is_known=False)

    def bounded(self, sizes: Mapping[Size, Need], size: Size, need: Need) -> KeptFree:
        """Return what to keep free after a failure: at most what a larger input needed that completed."""
        larger = [
            other.kept()
            for at, other in sizes.items()
            if at != size and is_within(size, at) and not other.is_open and other.seen_bytes > need.failed_bytes
        ]
        return min([*larger, need.kept()], key=kept_bytes)

    def change(self, key: Key, size: Size) -> None:
        """Note that the need at a size is to be written to the file."""
        self.changed.add((key, size))

    def decay(self, keys: Iterable[Key]) -> None:
        """End a run in which these components computed."""
        for key in keys:
            for size, need in self.known.get(key, {}).items():
                if need.decay():
                    self.change(key, size)

    def take_changed(self) -> list[tuple[Key, Size, Need]]:
        """Return what is to be written to the file, and count it as written."""
        changed = set(self.changed)
        self.changed -= changed  # another thread may add some meanwhile
        return [(key, size, replace(need)) for key, size, need in self.entries(changed)]

    def keep_changed(self, which: Iterable[tuple[Key, Size]]) -> None:
        """Count these as not written: writing them failed."""
        self.changed |= set(which)

    def restore(self, entries: Iterable[tuple[Key, Size, Need]]) -> None:
        """Take over what was read from the file."""
        for key, size, need in entries:
            self.known.setdefault(key, {})[size] = need

    def entries(self, which: Iterable[tuple[Key, Size]]) -> Iterator[tuple[Key, Size, Need]]:
        for key, size in sorted(which):
            need = self.known.get(key, {}).get(size)
            if need is not None:
                yield key, size, need
