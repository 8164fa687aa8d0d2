"""A component under the manager's care: how it was asked for, when it was used, what was learned of it."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping
from typing import Protocol, TypeAlias
from weakref import WeakSet

from ..options.placement import PlacementItem
from ..options.precision import PrecisionRequest
from ..options.profile import OffloadProfile, covers
from ..runtime.blocks.pristine_slab import KnownOrigins
from ..runtime.forwards.input_size import Size
from ..runtime.managed_component import ManagedComponent
from ..runtime.packing import Ending
from .claims.kept import EVERYTHING_KEPT, KeepLimit
from .returns import Returns

__all__ = ["Choices", "Member"]

Choices: TypeAlias = tuple[PlacementItem, OffloadProfile, PrecisionRequest]
"""Placement, profile and precision that were chosen for a component."""

# Outside of runs, after so many passes what an older, larger one needed counts less.
PASSES_OF_A_RUN = 64


class ExecutionMarker(Protocol):
    """Tells a pipeline where its parts compute."""

    def mark_execution_device(self) -> None: ...


class Member:
    """One component under the manager.

    Args:
        is_hosted: a host decides when it comes and goes: entering it takes a lease and loads nothing.
        rank: of the members that hold a weight, the one with the lowest rank owns it.
        choices: the placement, profile and precision that were chosen for it, to compare with another call's.
        patterns: what a block is, by component, where structure does not tell.
        reasons: what was decided for it before it was planned, such as what moves it.
        origins: what its weights were read from.
    """

    def __init__(
        self,
        member_id: str,
        name: str,
        *,
        node_id: str | None,
        workflow_id: str | None,
        profile: OffloadProfile,
        is_hosted: bool,
        rank: int,
        choices: Choices,
        patterns: Mapping[str, str] | None,
        reasons: Iterable[str] = (),
        origins: KnownOrigins | None = None,
    ) -> None:
        self.id = member_id
        self.name = name
        self.node_id = node_id
        self.workflow_id = workflow_id
        self.profile = profile
        self.is_hosted = is_hosted
        self.rank = rank
        self.choices = choices
        self.patterns = patterns
        self.reasons = tuple(reasons)
        self.origins: KnownOrigins = origins or {}
        self.proven: Collection[int] | None = None
        """Where those of them lie that are known to be right; None: all are. Others are compared with the files."""
        self.managed: ManagedComponent
        self.call: WeakSet[Member] = WeakSet([self])
        """The members that came with the same call of `Registry.add`: they share a profile's budget for a device."""
        self.look: Callable[[], None] | None = None
        """Called before it computes; raises if the pipeline that it is a part of has an unmanaged part now."""
        self.markers: WeakSet[ExecutionMarker] = WeakSet()
        """Handles of pipelines that it is a part of: they tell these where it computes."""
        self.lenders: tuple[Member, ...] = ()
        """The owners of weights that its module borrows ([Note: sharing] in `weights/sharing.py`), by their ranks."""
        self.borrowers: WeakSet[Member] = WeakSet()
        """The members whose lender it is, or was before they were released."""
        self.num_holders = 1
        """The number of calls of `Registry.add` that returned it and have not released it."""
        self.evict_last = False
        """It leaves a device only when nothing else is left to evict, up to its limit."""
        self.keep_limit = EVERYTHING_KEPT
        self.is_moved = False
        """It was given another placement than its choices say, on request."""
        self.was_evicted = False
        """Blocks of it left its devices while its host counts it as loaded: it is planned when it is entered."""
        self.ending = Ending.RESTORED
        """What its module gets when it is released: ordinary weights, or none if the module is no longer used."""
        self.leaves_weights = False
        """Its module is not used any more: released, its weights may be kept ([Note: kept weights])."""
        self.leases: set[object] = set()
        """What keeps it from being evicted now: passes, and leases for other uses."""
        self.last_use = 0
        self.last_use_s: float | None = None
        self.planned_in_epoch = -1
        """The epoch of `LiveCapacity` in which it was planned; -1: it is to be planned again."""
        self.activation_bytes: Counter[str] = Counter()
        """What its forwards needed of a device beside what was there, in this run and the last."""
        self.activation_before: Counter[str] = Counter()
        self.tile_bytes = 0
        """What its plan keeps free for the tiles in which it decodes; 0: they take what fits beside the model."""
        self.allocated_at_entry: dict[str, int] = {}
        self.foreign_at_plan: dict[str, int] = {}
        """The bytes of each device that others than torch's allocator had when it was planned."""
        self.settled: set[Size] = set()
        """The input sizes for which what is loaded now leaves enough free, as far as is known."""
        self.is_wary = False
        """Another part of the same call ran out of memory, and this one has not completed a run since."""
        self.short_on: set[str] = set()
        """The devices that had too little memory for what was planned to be loaded."""
        self.spoiled: set[Size] = set()
        """The input sizes of passes that failed because another program took memory: only the first time is excused."""
        self.num_passes = 0
        """The completed passes outside of runs, up to as many as count as a run."""
        self.step: object = None
        """The node of a run in which its last pass began."""
        self.passes_in_step = 0
        self.passes_before: int | None = None
        """How many passes it made in the step before that one."""
        self.returns = Returns()
        self.ahead_bytes = 0
        """What was read, and copied to its devices, before it was loaded, since it joined; a block may count twice."""
        self.hidden_s = 0.0
        """How long that took: its loading waited so much less."""
        self.digest: str | None = None
        """The digest of its component's content, once it was asked for."""
        self.block_seconds: dict[int, float] | None = None
        """The measured compute time of each block, in the order in which they ran."""
        self.taken_seconds: dict[str, dict[int, float]] = {}
        """The measured times by device, while those of other devices of a split are missing."""

    def came_from(self, origins: KnownOrigins, proven: Collection[int] | None) -> None:
        """Note what its weights may have been read from, and where those lie for which that is known (None: all)."""
        self.origins, self.proven = origins, proven

    def come_with(self, other: Member) -> None:
        """Join the other one's call: the members of a call share a budget for a device."""
        self.call.discard(self)
        self.call = other.call
        self.call.add(self)

    def borrow_from(self, lenders: Iterable[Member]) -> None:
        """Note the members that own weights which its module uses, too."""
        self.lenders = tuple(lenders)
        for lender in self.lenders:
            lender.borrowers.add(self)

    def add_marker(self, marker: ExecutionMarker) -> None:
        """Take a handle that tells a pipeline where this computes."""
        self.markers.add(marker)

    def remove_marker(self, marker: ExecutionMarker) -> None:
        """Forget a handle that tells its pipeline nothing any more. Idempotent."""
        self.markers.discard(marker)

    def mark_again(self) -> None:
        """Make the handles tell their pipelines where this computes: it was moved."""
        for marker in list(self.markers):
            marker.mark_execution_device()

    def watch(self, look: Callable[[], None] | None) -> None:
        """Set the function that is called before each use and may refuse it; None for none."""
        self.look = look

    def keep(self, kept: bool, limit: KeepLimit = EVERYTHING_KEPT) -> None:
        """Evict it last (True) up to a limit, or in the usual order (False)."""
        self.evict_last, self.keep_limit = kept, limit

    def note_move(self, is_moved: bool) -> None:
        """Note that it was given another placement on request (True), or placed as its choices say again (False)."""
        self.is_moved = is_moved

    def note_use(self, number: int, now_s: float) -> None:
        """Note that it is used now.

        Args:
            number: grows with every use of any member.
        """
        self.last_use, self.last_use_s = number, now_s

    def note_entry(self, allocated_bytes: dict[str, int]) -> None:
        """Note the bytes that were allocated on its devices when its pass began."""
        self.allocated_at_entry = allocated_bytes

    def note_beside(self, device: str, num_bytes: int) -> None:
        """Note bytes that others took of a device while its pass runs, as if they had been there at its begin."""
        if device in self.allocated_at_entry:
            self.allocated_at_entry = self.allocated_at_entry | {device: self.allocated_at_entry[device] + num_bytes}

    def note_lender_entry(self, lender: Member) -> None:
        """Add what was allocated when a lender was entered for its pass: the lender takes a part of the free memory."""
        self.allocated_at_entry |= lender.allocated_at_entry

    def note_tiles(self, num_bytes: int) -> None:
        """Note what its plan keeps free for the tiles in which it decodes."""
        self.tile_bytes = num_bytes

    def note_activations(self, device: str, num_bytes: int) -> None:
        """Note what a forward needed of a device beside the weights; the most counts."""
        self.activation_bytes[device] = max(self.activation_bytes[device], num_bytes)

    def note_foreign(self, device: str, num_bytes: int) -> None:
        """Note the bytes of a device that others than torch's allocator have while it is planned."""
        self.foreign_at_plan[device] = num_bytes

    def note_pass(self, step: object) -> None:
        """Note a completed pass in a node of a run; None: outside of nodes, where nothing tells when a use ends."""
        if step is not None:
            if step != self.step:
                self.passes_before = self.passes_in_step or None
                self.step, self.passes_in_step = step, 0
            self.passes_in_step += 1

    def passes_left(self, step: object) -> int | None:
        """Return how many passes it still makes in a node, if these are as many as in the last one; None if unknown."""
        if step is None or step != self.step:
            return self.passes_in_step or None
        if self.passes_before is None or self.passes_before <= self.passes_in_step:
            return None
        return self.passes_before - self.passes_in_step

    @property
    def shares_files(self) -> bool:
        """Whether its weights may lie in memory of other components with the same files ([Note: common weights])."""
        source = self.managed.source
        is_loaded = source is not None and source.loading is not None
        return self.is_hosted or (is_loaded and not self.lenders and not self.borrowers)

    @property
    def content(self) -> Hashable | None:
        """What its weights were read from, equal for all objects of the same files; None where that is not known."""
        files: frozenset[Hashable] = frozenset(
            each[1].file for leaves in self.origins.values() for each in leaves if each is not None
        )
        if not files and self.managed.source is not None:
            files = self.managed.source.paths
        return (self.managed.component.kind, self.name, files) if files else None

    def go_on_with(self, returns: Returns) -> None:
        """Take over how often its content came back as another object."""
        self.returns = returns

    def note_planned(self, epoch: int) -> None:
        """Note the epoch of `LiveCapacity` by whose plan it was loaded."""
        self.planned_in_epoch = epoch
        self.was_evicted = False

    def add_holder(self) -> None:
        """Note that one more call manages it."""
        self.num_holders += 1

    def drop_holder(self) -> None:
        """Note that one of the calls that manage it has released it."""
        self.num_holders -= 1

    def discard_weights(self) -> None:
        """Note that its module is not used any more: released, it gets no weights back."""
        self.ending = Ending.DISCARDED
        self.leave_weights()

    def leave_weights(self) -> None:
        """Note that its module is not used any more, as far as its owner knows."""
        self.leaves_weights = True

    @property
    def is_left(self) -> bool:
        """Whether its owner dropped a module that gets its weights back all the same: something may use it."""
        return self.leaves_weights and self.ending is Ending.RESTORED

    # -- its managed component, and what is decided for it

    def use(self, managed: ManagedComponent) -> None:
        """Take another managed component as its own."""
        self.managed = managed

    def take_profile(self, profile: OffloadProfile, choices: Choices) -> None:
        """Set another profile and its other choices; times of blocks are measured again."""
        self.profile, self.choices = profile, choices
        self.block_seconds, self.taken_seconds = None, {}
        self.outdate_plan()

    @property
    def leaves_after_use(self) -> bool:
        """Whether its profile unloads it after use: not while it is kept, nor before it was used."""
        component = self.managed.component
        is_asked = covers(self.profile.unload, component.name, component.kind)
        return is_asked and bool(self.last_use) and not self.evict_last

    @property
    def leaves_free(self) -> bool:
        """Whether its profile says how many bytes of a device stay free."""
        return bool(self.profile.budgets or self.profile.reserve)

    def outdate_plan(self) -> None:
        """Plan it again before its next pass."""
        self.planned_in_epoch = -1

    # -- what passes tell

    def note_digest(self, digest: str) -> None:
        """Keep the digest of its component's content, which takes long to compute."""
        self.digest = digest

    def note_times(self, device: str, seconds: dict[int, float]) -> None:
        """Store the times of the blocks on one of its devices. With those of all devices it is planned again."""
        self.taken_seconds[device] = seconds
        devices = [share.device.name for share in self.managed.shares]
        if all(name in self.taken_seconds for name in devices):
            taken = [self.taken_seconds.pop(name).items() for name in devices]
            self.block_seconds = dict(itertools.chain(*taken))
            self.outdate_plan()

    def note_shortage(self) -> None:
        """Note that a pass ran out of memory: the next one is planned anew."""
        self.outdate_plan()
        self.settled.clear()

    def excuse(self, size: Size) -> bool:
        """Whether the failure of a pass may be blamed on another program: once for each input size."""
        is_first = size not in self.spoiled
        self.spoiled.add(size)
        return is_first

    def beware(self) -> None:
        """Note that another component of the same call ran out of memory: plan its next pass with more free memory."""
        self.is_wary = True

    def note_hidden(self, num_bytes: int, seconds: float) -> None:
        """Add bytes that were read, and copied to its devices, before it was loaded, and the seconds that this took."""
        self.ahead_bytes += num_bytes
        self.hidden_s += seconds

    def note_evicted(self, *, counts_as_loaded: bool) -> None:
        """Note that blocks of it leave a device. ``counts_as_loaded``: its host may enter it without loading it."""
        self.was_evicted = counts_as_loaded

    def note_unload(self) -> None:
        """Note that its host does not count it as loaded any more."""
        self.was_evicted = False

    def note_failed_load(self, device: str) -> None:
        """Note that a device had too little memory to load it as planned: next time it gets the least form."""
        self.short_on.add(device)

    def forget_failed_load(self, device: str) -> None:
        """Note that a device may be short of memory no more."""
        self.short_on.discard(device)

    def count_pass(self) -> bool:
        """Count a pass outside of runs; returns True, and starts again, each time that enough passes count as a run."""
        self.num_passes = (self.num_passes + 1) % PASSES_OF_A_RUN
        return self.num_passes == 0

    def end_run(self) -> bool:
        """End a run: needs of the run before it are forgotten; returns whether this run measured any."""
        if not self.activation_bytes:
            return False
        self.activation_before, self.activation_bytes = self.activation_bytes, Counter()
        self.short_on.clear()
        self.is_wary = False
        return True
