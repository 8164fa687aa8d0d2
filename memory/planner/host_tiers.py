"""Where weights rest while they are not on a device: page-locked RAM, pageable RAM, or their file.

[Note: host memory] Unlike the bytes of a device, which components take in turns, those of the host are taken by all
components at once. So one decision is made for all of them: which components rest in RAM, the diffusion model first,
because it is read in every step; and which of their parts are page-locked, streamed blocks first, because those are
copied in every pass. Both leave free what the RAM's watermark says: what exceeds that rests in its file (which blocks
of a component do is decided in `mixed_tiers.py`), or is pageable if it is in RAM already. A component of which anything
rests in its file costs two bounce buffers per device, through which that is read. Every such copy passes through them,
so they are page-locked before all else, if its profile page-locks it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product

from ..errors import InvalidInput, allowed_values
from ..options.placement import PlacementItem, names_device
from ..options.precision import Precision
from ..options.profile import OffloadProfile, covers
from ..units import LOCK_LIMIT_BYTES, format_bytes
from ..weights.component import Block, Component
from ..weights.form_numbers import Forms
from ..weights.known_forms import forms_in_file
from .capacity import Machine
from .device_plan import DevicePlan
from .form_choice import explain_reading
from .precision_table import PrecisionRow
from .sizes import NUM_BOUNCE_BUFFERS, Sizes

__all__ = ["NOT_AHEAD", "StoreSpec", "choose_tiers", "explain_lacking", "lock_pages", "may_be_pinned", "whose"]

# In which order components get the RAM: what is read most often first.
KINDS_BY_USE = ("diffusion", "control", "vae", "vision", "text")
KINDS_OF_STEPS = ("diffusion", "control")
# [Note: blocking copies] in `runtime/devices/prefetch.py`.
NOT_AHEAD = "pageable copies are synchronous and cannot be prefetched"


@dataclass(frozen=True, kw_only=True, slots=True)
class StoreSpec:
    """What one component keeps off its devices, filled in as it is decided.

    ``tier`` None is RAM, and whether page-locked is still open. ``pinned`` has the names of the blocks whose weight
    stores are page-locked, and ``""`` for the weights in no block and the buffers.
    """

    sizes: Sizes
    item: PlacementItem
    precision: Precision
    precision_rows: tuple[PrecisionRow, ...] = ()
    forms_by_profile: bool
    num_devices: int
    on_cpu: bool
    shares: tuple[DevicePlan, ...] = ()
    tier: str | None = None
    store: str = ""
    """The other device from whose memory its blocks stream; ``tier`` is then where these copies come from."""
    is_short: bool = False
    """Whether RAM does not hold all of it beside what comes first: which blocks rest in its file is still open."""
    in_file: frozenset[str] = frozenset()
    """What rests in its file, named as in ``pinned``; everything at tier ``disk``."""
    takes_ram_to_stream: bool = False
    """Whether what rests in its file gets room in RAM as soon as it streams."""
    maps_file: bool = False
    """Whether what rests in its file streams from a mapping of it, while RAM has room for its pages."""
    file_bytes: int = 0
    """The bytes of these."""
    pinned: frozenset[str] = frozenset()
    pinned_bytes: int = 0
    locks_buffers: bool = False
    """Whether the buffers through which its file is read are page-locked."""
    oversize_bytes: int = 0
    """What would be page-locked if it were not in pieces larger than such a slab."""
    reasons: tuple[str, ...] = ()

    @property
    def component(self) -> Component:
        return self.sizes.component

    @property
    def forms(self) -> Forms:
        return self.sizes.forms

    @property
    def cast(self) -> Forms:
        """The forms of the weights that are encoded here, and not in their file already."""
        stored = forms_in_file(self.component)
        return {name: numbers for name, numbers in self.forms.items() if name not in stored} if stored else self.forms

    @property
    def has_file(self) -> bool:
        return bool(getattr(self.component, "has_file", False))

    @property
    def can_rest_on_disk(self) -> bool:
        """Whether its weights can stay in its file: not where the user requested a form that takes whole weights."""
        return self.has_file and not self.on_cpu and (not self.cast or self.forms_by_profile or self.encodes_as_read)

    @property
    def encodes_as_read(self) -> bool:
        """Whether the form that was requested can be had each time when its file is read."""
        return not self.component.stays_as_stored and all(numbers.in_parts for numbers in self.cast.values())

    @property
    def lacking_bytes(self) -> Mapping[str, int]:
        """What no file has as it is and so is in RAM already: its bytes, by where it is, named as in ``pinned``."""
        found = {block.name: self.component.lacking_bytes(block) for block in self.lacking_blocks}
        return {name: num_bytes for name, num_bytes in found.items() if num_bytes}

    @property
    def unfiled(self) -> frozenset[str]:
        """Of what no file has more than half of the bytes as they are, named as in ``pinned``: it rests in RAM."""
        lacking = self.lacking_bytes
        return frozenset(
            block.name for block in self.lacking_blocks if 0 < block.weight_bytes <= 2 * lacking.get(block.name, 0)
        )

    @property
    def lacking_blocks(self) -> tuple[Block, ...]:
        """The blocks, and the non-block weights, of which no file may have some weights as they are."""
        return (*self.component.blocks, self.component.non_block) if self.has_file and self.component.lacking else ()

    @property
    def ram_bytes(self) -> int:
        """The bytes of all weights at rest in RAM."""
        return self.sizes.all_resident_bytes

    @property
    def unread_bytes(self) -> int:
        """The bytes of those among them that are not in RAM yet."""
        return self.ram_bytes - sum(self.lacking_bytes.values())

    @property
    def host_bytes(self) -> int:
        """The bytes of RAM, page-locked or not, with those of buffers."""
        return self.resting_host_bytes + (self.bounce_bytes if self.in_file else 0)

    @property
    def resting_host_bytes(self) -> int:
        """The bytes of RAM that weights rest in."""
        return self.ram_bytes - self.file_bytes

    @property
    def names(self) -> frozenset[str]:
        """The names of all that rests by itself: of the blocks, and ``""`` for the rest."""
        return frozenset((*(block.name for block in self.component.blocks), ""))

    def resting_in_file(self, names: frozenset[str], reasons: tuple[str, ...]) -> StoreSpec:
        """Return it with what rests in its file, and why: its tier is ``disk`` if that is everything.

        What no file has as it is rests in RAM nevertheless: single weights where they are.
        """
        names -= self.unfiled
        is_all, lacking = names == self.names, self.lacking_bytes
        in_file = sum(num_bytes for name, num_bytes, _ in self.lockable_parts() if name in names)
        return replace(
            self,
            in_file=names,
            file_bytes=(self.ram_bytes if is_all else in_file) - sum(lacking.get(name, 0) for name in names),
            tier="disk" if is_all else None if self.tier == "disk" else self.tier,
            is_short=False,
            reasons=reasons,
        )

    @property
    def bounce_bytes(self) -> int:
        """The bytes of the buffers through which a file is read; an upper bound until the shares are known."""
        everything = range(len(self.component.blocks))
        widths = [
            self.sizes.bounce_buffer_bytes(share.blocks, first=index == 0) for index, share in enumerate(self.shares)
        ]
        widths = widths or [self.sizes.bounce_buffer_bytes(everything, first=True)] * self.num_devices
        return NUM_BOUNCE_BUFFERS * sum(widths)

    @property
    def rank(self) -> int:
        kind = self.component.kind
        return KINDS_BY_USE.index(kind) if kind in KINDS_BY_USE else 0

    @property
    def has_many_passes(self) -> bool:
        """Whether a run passes through it in every step."""
        return self.component.kind in KINDS_OF_STEPS

    def lockable_parts(self) -> list[tuple[str, int, bool]]:
        """Return what can rest or be page-locked by itself: its name, its bytes, and whether it streams."""
        names = [block.name for block in self.component.blocks]
        streams = [False] * len(names)
        for share in self.shares:
            for number in share.streamed:
                streams[number] = True
        shares = [share.blocks for share in self.shares] or [tuple(range(len(names)))]
        fixed = [self.sizes.fixed_bytes(blocks, first=index == 0) for index, blocks in enumerate(shares)]
        return [*zip(names, self.sizes.blocks, streams, strict=True), ("", sum(fixed), False)]


def choose_tiers(stores: Sequence[StoreSpec], machine: Machine, profile: OffloadProfile) -> list[StoreSpec]:
    """Return the components with their tiers: the requested one, else ``disk`` if the profile says so.

    Those for which RAM is short are marked.

    Raises:
        InvalidInput: a tier that cannot be had; lists those that can.
    """
    decided = [origin_of(part, machine) if is_store(part) else replace(part, tier=asked_tier(part)) for part in stores]
    # What has no file is in RAM already, and the bytes that are free do not count it.
    open_parts = [index for index, part in enumerate(decided) if part.can_rest_on_disk]
    left = machine.host_bytes - sum(
        part.bounce_bytes if part.can_rest_on_disk else part.unread_bytes for part in decided if part.has_file
    )
    for index in sorted(open_parts, key=lambda index: (decided[index].tier is None, decided[index].rank)):
        part = decided[index]
        asked = part.tier is None and covers(profile.on_demand, part.component.name, part.component.kind)
        is_short = part.tier is None and not asked and part.unread_bytes > left + part.bounce_bytes
        if (asked or is_short or part.tier == "disk") and part.cast and part.forms_by_profile:
            reason = f"stays as stored: profile {profile.name} quantizes only weights that are kept in RAM"
            part = replace(part, sizes=part.sizes.as_they_came, reasons=(reason,))
        if asked or part.tier == "disk":
            reasons = ("profile sets disk: kept in its file until it is used",) if asked else ()
            part = part.resting_in_file(part.names, (*reasons, *explain_lacking(part), *part.reasons))
        elif is_short:
            part = replace(part, is_short=True)
        else:
            if part.unread_bytes > left + part.bounce_bytes:  # its user wants it there
                part = replace(part, reasons=(*part.reasons, explain_excess(part, left)))
            left -= part.unread_bytes - part.bounce_bytes
        decided[index] = part
    return [
        replace(part, reasons=(f"tier disk is not available: {why_unavailable(part)}; stays in RAM",))
        if not part.can_rest_on_disk and covers(profile.on_demand, part.component.name, part.component.kind)
        else part
        for part in decided
    ]


def explain_excess(part: StoreSpec, left: int) -> str:
    """Say that a component is to rest in RAM that the machine does not have."""
    have = format_bytes(max(0, left + part.bounce_bytes))
    need = format_bytes(part.unread_bytes)
    return f"tier {part.tier!r} needs {need} of RAM, {have} available; tier 'disk' needs none"


def is_store(part: StoreSpec) -> bool:
    """Whether another device is to store what streams."""
    return part.item.tier is not None and part.item.tier != "device" and names_device(part.item.tier)


def origin_of(part: StoreSpec, machine: Machine) -> StoreSpec:
    """Return a component that another device stores, with where its weights come from ([Note: store]).

    Raises:
        InvalidInput: that device cannot store it.
    """
    store, text = part.item.tier, f"placement {str(part.item)!r}"
    assert store is not None
    devices = [share.device for share in part.item.devices]
    if part.on_cpu or store == "cpu":
        why = "it computes on the CPU" if part.on_cpu else "the CPU's memory is tier 'host'"
    elif part.num_devices > 1:
        why = "a split over several devices streams from RAM or its file"
    elif store in devices or (not devices and len(machine.accelerators) < 2):
        why = "it computes there"
    else:
        origin = "disk" if part.can_rest_on_disk and not (part.cast and part.forms_by_profile) else "host"
        reasons = () if origin == "disk" else (f"rests in RAM, too: {why_in_ram(part)}",)
        return replace(part, tier=origin, store=store, reasons=(*part.reasons, *reasons))
    allowed = ["host"] if part.on_cpu else ["device", "pinned", "host", *["disk"] * part.can_rest_on_disk]
    raise InvalidInput(f"{text}: {store} cannot store {part.component.name}: {why}; {allowed_values(store, allowed)}")


def why_in_ram(part: StoreSpec) -> str:
    """Return why a component's file is not where its stored blocks come from."""
    if part.can_rest_on_disk:
        return "its profile quantizes it, and no file has that"
    return why_unavailable(part)


def asked_tier(part: StoreSpec) -> str | None:
    allowed = ["host"] if part.on_cpu else ["device", "pinned", "host"]
    if part.can_rest_on_disk:
        allowed.append("disk")
    if part.item.tier is not None and part.item.tier not in allowed:
        raise InvalidInput(
            f"placement {str(part.item)!r}: tier {part.item.tier!r} is not available for {part.component.name}: "
            f"{why_unavailable(part)}; {allowed_values(part.item.tier, allowed)}"
        )
    if part.item.forbids_ram and part.lacking_bytes:
        num_bytes = sum(part.lacking_bytes.values())
        raise InvalidInput(
            f"placement {str(part.item)!r}: {format_bytes(num_bytes)} of {part.component.name} are in no file as they "
            "are, and have to rest in RAM; allowed: disk"
        )
    return part.item.tier


def explain_lacking(part: StoreSpec) -> tuple[str, ...]:
    """Return what of a component has to rest in RAM although the rest can stay in its file."""
    unfiled, lacking = part.unfiled, part.lacking_bytes
    whole = sum(size for name, size, _ in part.lockable_parts() if name in unfiled)
    num_bytes = whole + sum(size for name, size in lacking.items() if name not in unfiled)
    return (f"{format_bytes(num_bytes)} rest in RAM: no file has these as they are",) if num_bytes else ()


def why_unavailable(part: StoreSpec) -> str:
    """Return why a component cannot be kept in the tier that was requested."""
    if part.on_cpu:
        return "it computes on the CPU"
    if not part.has_file:
        return "no file is known that has its weights as they are"
    if part.component.stays_as_stored:
        return (
            f"precision {part.precision.name!r} was requested, and of a model that a host moves, or that came with its "
            "weights, files are used only as stored"
        )
    return f"precision {part.precision.name!r} was requested, which needs whole weights in RAM"


def lock_pages(stores: Sequence[StoreSpec], machine: Machine, profile: OffloadProfile) -> list[StoreSpec]:
    """Return the components with their page-locked parts: as much as the limit allows, streamed blocks first.

    Buffers through which files are read come before all weights; components that the user placed at tier ``pinned``
    come before those that the plan places there.
    """
    left = machine.lockable_bytes
    stores = list(stores)
    for index, part in sorted(enumerate(stores), key=lambda numbered: numbered[1].rank):
        if part.in_file and may_be_pinned(part, profile) and part.bounce_bytes <= left:
            stores[index] = replace(part, pinned_bytes=part.bounce_bytes, locks_buffers=True)
            left -= part.bounce_bytes
    pinned: list[dict[str, int]] = [{} for _ in stores]
    lockable = {index: part.lockable_parts() for index, part in enumerate(stores) if may_be_pinned(part, profile)}
    order = sorted(
        (stores[index].tier is None, is_resident, stores[index].rank, index)
        for index, is_resident in product(lockable, (False, True))
    )
    for _, is_resident, _, index in order:
        in_file = stores[index].in_file
        for name, num_bytes, streams in lockable[index]:
            # No call locks more at once.
            is_next = streams is not is_resident and name not in in_file and 0 < num_bytes < LOCK_LIMIT_BYTES
            if is_next and num_bytes <= left:
                pinned[index][name] = num_bytes
                left -= num_bytes
    return [finish(part, names, machine, profile) for part, names in zip(stores, pinned, strict=True)]


def may_be_pinned(part: StoreSpec, profile: OffloadProfile) -> bool:
    """Whether the weights in RAM, or the buffers of their file, should be page-locked if the machine allows it."""
    if part.tier in (None, "disk"):
        return not part.on_cpu and covers(profile.pinned, part.component.name, part.component.kind)
    return part.tier == "pinned"


def finish(part: StoreSpec, pinned: dict[str, int], machine: Machine, profile: OffloadProfile) -> StoreSpec:
    """Return the component with its final tier, and why not all its weights or buffers are page-locked."""
    if part.in_file:
        part = replace(part, reasons=(*part.reasons, *explain_reading(part.component, part.forms, part.in_file)))
    if part.in_file and not part.locks_buffers and not part.maps_file:
        part = replace(part, reasons=(*part.reasons, explain(part, machine, profile)))
    if part.tier not in (None, "pinned"):
        return part
    if may_be_pinned(part, profile):
        in_ram = [size for name, size, _ in part.lockable_parts() if name not in part.in_file]
        part = replace(part, oversize_bytes=sum(size for size in in_ram if size >= LOCK_LIMIT_BYTES))
    return replace(
        part,
        tier=part.tier or ("pinned" if pinned else "host"),
        pinned=frozenset(pinned),
        pinned_bytes=part.pinned_bytes + sum(pinned.values()),
        reasons=(*part.reasons, *explain_pageable(part, pinned, machine, profile)),
    )


def explain_pageable(part: StoreSpec, pinned: dict[str, int], machine: Machine, profile: OffloadProfile) -> list[str]:
    """Return why not all weights in RAM are page-locked."""
    pinned_bytes, lacking = sum(pinned.values()), part.lacking_bytes
    # Single weights beside what rests in the file stay where they are.
    slab_bytes = part.resting_host_bytes - sum(lacking.get(name, 0) for name in part.in_file)
    if part.on_cpu or pinned_bytes == slab_bytes:
        return []
    if not may_be_pinned(part, profile):
        return [f"kept in pageable RAM: profile {profile.name} page-locks {whose(profile)}; {NOT_AHEAD}"]
    reasons = []
    if part.oversize_bytes:
        reasons.append(
            f"{format_bytes(part.oversize_bytes)} in pieces of 2 GiB or more are kept in pageable RAM: "
            f"page-locked slabs are smaller; {NOT_AHEAD}"
        )
    if pinned_bytes + part.oversize_bytes == slab_bytes:
        return reasons
    if not pinned:
        need = format_bytes(slab_bytes)
        reasons.append(f"kept in pageable RAM: it needs {need}, {all_may_lock(machine)}; {NOT_AHEAD}")
        return reasons
    streamed = [name for name, _, streams in part.lockable_parts() if streams and name not in part.in_file]
    num_locked = len(pinned.keys() & set(streamed))
    blocks = f" with {num_locked} of {len(streamed)} streamed blocks" if streamed else ""
    reasons.append(
        f"page-locks {format_bytes(pinned_bytes)} of {format_bytes(slab_bytes)}{blocks}: "
        f"{all_may_lock(machine)}; {NOT_AHEAD}"
    )
    return reasons


def explain(part: StoreSpec, machine: Machine, profile: OffloadProfile) -> str:
    """Return why the buffers through which a file is read are pageable."""
    buffers = f"is read through pageable buffers of {format_bytes(part.bounce_bytes)}"
    if not may_be_pinned(part, profile):
        return f"{buffers}: profile {profile.name} page-locks {whose(profile)}"
    return f"{buffers}: {all_may_lock(machine)}"


def whose(profile: OffloadProfile) -> str:
    return "only other components" if profile.pinned else "no component"


def all_may_lock(machine: Machine) -> str:
    limit_bytes = machine.lockable_bytes if machine.lock_limit_bytes is None else machine.lock_limit_bytes
    limit = f"the limit of page-locked memory for all components is {format_bytes(limit_bytes)}"
    if machine.lockable_bytes == machine.pinned_bytes:
        return limit
    return f"{limit}, with {format_bytes(machine.host_kept_bytes)} of RAM reserved"
