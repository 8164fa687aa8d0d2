"""Weights of components that left, kept in their slabs in case that their files are loaded again.

[Note: kept weights] A host may drop a model that it loads again a moment later. What such a model leaves is kept, by
the content of its files ([Note: same file] in `weights/file_origin.py`): slabs with weights as the files have them,
or as the host converted those to another dtype when it loaded them, never what was patched, written to or encoded, and
nothing of the host's: no module, no patcher. They are the first to leave when RAM is short, in the order of the
eviction policy: waiting prompts that name their files are uses to come. A loader gets them as tensors of the file
(`FileTensors`), while nothing else uses their memory, and its component goes on with the slabs where it packs them as
they are. Else they are copied.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Container, Iterable, Sequence

import torch

from ..errors import InvalidInput
from ..options.precision import Precision
from ..runtime.blocks.pristine_slab import PristineSlab
from ..runtime.devices.ledger import Entry, Kind, Ledger
from ..transfer.pinned_memory import ArenaLock, count_slabs
from ..units import format_bytes
from ..weights.file_origin import FileIdentity, Origin, differs
from .event_log import EventLog
from .forecast import Forecast, KnownComponent
from .member import Member
from .members import Members
from .policies.candidate import Candidate, EvictionPolicy
from .report import ComponentReport
from .watermark import Watermark

__all__ = ["KEPT", "KeptWeights"]

# As the engine of such a component in the report: nothing moves it.
KEPT = "kept"
NUMBERED = re.compile(r"#\d+(/|$)")


class KeptPart:
    """What one component left."""

    def __init__(
        self,
        name: str,
        kind: str,
        slabs: Sequence[PristineSlab],
        now_s: float,
        *,
        is_common: bool = False,
        of: str = "",
    ) -> None:
        self.name = name
        self.kind = kind
        self.of = NUMBERED.sub(r"\1", of) or name
        """The id of the component that left it, without the number that tells equal ones apart."""
        self.slabs = list(slabs)
        self.kept_s = now_s
        self.id = ""
        self.is_common = is_common
        """Whether components share it, or did."""
        self.is_unwanted = False
        """Whether it leaves as soon as nothing has its memory: its file has changed, or all was to be dropped."""

    def take_id(self, part_id: str) -> None:
        """Note its name in the books."""
        self.id = part_id

    def count_bytes(self) -> dict[str, int]:
        """Return its bytes of RAM by tier."""
        return {tier: n for tier, n in count_slabs(slab.slab.data for slab in self.slabs).items() if n}

    def reject(self) -> None:
        """Drop it as soon as no tensor has its memory. Until then no other model gets it."""
        self.is_unwanted = True

    def take(self, slabs: Iterable[PristineSlab]) -> None:
        """Have these, too."""
        self.slabs += slabs

    def locks(self) -> list[ArenaLock]:
        """Return the page-locked arenas of its slabs."""
        return list({id(lock): lock for slab in self.slabs if (lock := slab.slab.lock) is not None}.values())

    def files(self) -> list[FileIdentity]:
        """Return the files that it has weights of."""
        return list(dict.fromkeys(origin.file for slab in self.slabs for origin in slab.origins if origin is not None))

    def give_up(self, slabs: Iterable[PristineSlab]) -> None:
        """Have these no more."""
        gone = {id(slab) for slab in slabs}
        self.slabs = [slab for slab in self.slabs if id(slab) not in gone]


class KeptWeights:
    """The kept weights of a manager, the oldest first. The caller holds the manager's lock."""

    def __init__(
        self, members: Members, ledger: Ledger, event_log: EventLog, forecast: Forecast, policy: EvictionPolicy
    ) -> None:
        self.members = members
        self.ledger = ledger
        self.event_log = event_log
        self.forecast = forecast
        self.policy = policy
        self.parts: list[KeptPart] = []

    def keep(self, member: Member, slabs: Sequence[PristineSlab]) -> None:
        """Keep what a component left; nothing without slabs, and no arena of which most is of no use."""
        slabs = self.keep_beside_shared(slabs)
        useful = Counter[int]()
        for slab in slabs:
            useful[id(slab.slab.lock)] += slab.num_bytes
        slabs = [s for s in slabs if s.slab.lock is None or 2 * useful[id(s.slab.lock)] >= s.slab.lock.slab_bytes]
        if not slabs:
            return
        part = KeptPart(member.name, member.managed.component.kind, slabs, self.event_log.now_s, of=member.id)
        for slab in slabs:
            if slab.slab.lock is not None:
                slab.slab.lock.copy_by([])  # its copies are done, and the streams are the component's
        part.take_id(self.members.name_other(f"kept/{'+'.join(file.name for file in part.files())}", part))
        self.parts.append(part)
        self.enter(part)
        num_bytes = sum(part.count_bytes().values())
        self.event_log.note(
            "keep", part.id, num_bytes, "host", f"{member.id} left; its weights stay until RAM is short"
        )

    def keep_beside_shared(self, slabs: Sequence[PristineSlab]) -> list[PristineSlab]:
        """Keep slabs in arenas that components share, which stay with those; returns the other slabs."""
        others = []
        for slab in slabs:
            lock = slab.slab.lock
            if lock is None or not lock.is_shared:
                others.append(slab)
                continue
            next(part for part in self.parts if any(lock is each for each in part.locks())).take([slab])
        return others

    def share(self, member: Member, slabs: Sequence[PristineSlab]) -> None:
        """Take slabs of a component that shares them from now on, with their arenas."""
        kind, now_s = member.managed.component.kind, self.event_log.now_s
        part = KeptPart(member.name, kind, slabs, now_s, is_common=True, of=member.id)
        part.take_id(self.members.name_other(f"shared/{'+'.join(file.name for file in part.files())}", part))
        for lock in part.locks():
            lock.share(True)
        self.parts.append(part)
        self.enter(part)
        num_bytes = sum(part.count_bytes().values())
        self.event_log.note(
            "share", part.id, num_bytes, "host", f"{member.id} and another component have the same file"
        )

    def sharers(self, part: KeptPart) -> list[str]:
        """Return the components that share slabs of a part."""
        if not part.is_common:
            return []
        slabs = {id(slab.slab.data) for slab in part.slabs}
        return [
            member.id
            for member in list(self.members.values())
            if member.shares_files
            and any(group.at_rest.is_shared and id(group.host_slab) in slabs for group in member.managed.groups)
        ]

    def is_held(self, part: KeptPart) -> bool:
        """Whether its memory would stay if it were dropped: components share it, or a model that left still has it."""
        return bool(self.sharers(part)) or any(slab.is_viewed() for slab in part.slabs)

    def drop_unwanted(self) -> None:
        """Drop what was to be dropped while something had its memory, and no longer has."""
        for part in [part for part in self.parts if part.is_unwanted]:
            self.drop(part, "nothing has its memory any more")

    def find(self, file: FileIdentity, taken: Container[int] = ()) -> dict[Origin, torch.Tensor]:
        """Return the weights of a file that are kept and that nothing else uses, as views.

        What is kept of a file that was replaced or written to leaves.

        Args:
            taken: the addresses of slabs' storages of which the same loading has weights of other files.
        """
        found: dict[Origin, torch.Tensor] = {}
        for part in [part for part in self.parts if not part.is_unwanted]:
            own = [slab for slab in part.slabs if any(each is not None and each.file == file for each in slab.origins)]
            unused = [slab for slab in own if slab.is_unused() or address_of(slab.slab.data) in taken]
            weights = [pair for slab in unused for pair in slab.weights() if pair[0].file == file]
            if any(other.path == file.path and other != file for other in part.files()):
                self.drop(part, f"{file.name} was replaced or written to")
            elif weights and self.is_changed(file, weights):
                self.drop(part, f"{file.name} has other bytes now")
            else:
                found |= dict(weights)
        return found

    def note_reuse(self, found: Collection[Origin]) -> None:
        """Note that weights of files are used in the place of these files."""
        for file in dict.fromkeys(origin.file for origin in found):
            num_bytes = sum({each.tensor: each.tensor.weight_bytes for each in found if each.file == file}.values())
            self.event_log.note("reuse", file.name, num_bytes, "host", "loaded again: taken from RAM")

    def is_changed(self, file: FileIdentity, weights: Sequence[tuple[Origin, torch.Tensor]]) -> bool:
        """Whether a file has other values than some of its kept weights, compared here and there."""
        try:
            return differs(file.path, weights)
        except InvalidInput:
            return True

    def slabs(self) -> list[PristineSlab]:
        """Return all slabs: a component that was loaded from them may lie in some."""
        return [slab for part in self.parts for slab in part.slabs]

    def hand_over(self, member: Member) -> None:
        """Forget the slabs that a member, which was just packed, goes on with, or has copied."""
        if not self.parts:
            return
        at_rest = [group.at_rest for group in member.managed.groups]
        there = {origin for each in at_rest for origin in each.origins if origin is not None}
        stores = {id(each.host_slab) for each in at_rest}
        for part in [part for part in self.parts if not self.sharers(part)]:
            taken = [slab for slab in part.slabs if id(slab.slab.data) in stores]
            copied = [slab for slab in part.slabs if slab not in taken and not there.isdisjoint(slab.origins)]
            if any(slab.is_viewed() for slab in copied):
                part.reject()
            gone = [*taken, *(slab for slab in copied if not slab.is_viewed())]
            if gone:
                self.give_up(part, gone)

    def give_up(self, part: KeptPart, slabs: Sequence[PristineSlab]) -> None:
        before = part.locks()
        part.give_up(slabs)
        after = part.locks()
        self.enter(part)
        left = [lock for lock in before if lock.is_shared and not any(lock is each for each in after)]
        for lock in left:
            lock.share(False)
        for member in list(self.members.values()) if left else ():  # one may have more of the arena
            if member.is_hosted:
                member.managed.packing.settle_books()
        if not part.slabs:
            self.parts.remove(part)

    def drop(self, part: KeptPart, reason: str) -> int:
        """Drop one part; returns the bytes that are free again, page-locked or not.

        A part whose memory would stay leaves when that ends; it is in the books until then.
        """
        if self.is_held(part):
            part.reject()
            return 0
        num_bytes = sum(part.count_bytes().values())
        self.event_log.note("drop", part.id, num_bytes, "host", reason)
        self.give_up(part, list(part.slabs))
        return num_bytes

    def in_order(self) -> list[tuple[KeptPart, str]]:
        """Return the parts in the policy's order, with the reason for which each comes before the next."""
        by_id = {part.id: part for part in self.parts}
        candidates = [
            Candidate(
                component=part.id,
                device_bytes=sum(part.count_bytes().values()),
                last_use=number,
                idle_s=max(0.0, self.event_log.now_s - part.kept_s),
                next_use=self.forecast.next_use(part.id),
            )
            for number, part in enumerate(self.parts)
        ]
        return [(by_id[victim.component], victim.reason) for victim in self.policy.order(candidates)]

    def drop_until(self, num_bytes: int, cause: str) -> int:
        """Drop parts, in the policy's order, until so many bytes are free again; returns how many are.

        Those whose memory would stay are passed over.
        """
        freed = 0
        for part, reason in self.in_order():
            if freed >= num_bytes:
                break
            if not self.is_held(part):
                freed += self.drop(part, f"{cause}; {reason}")
        return freed

    def trim(self, free_bytes: int, mark: Watermark) -> None:
        """Drop parts until the RAM's high mark is free, if less than its low mark is."""
        if free_bytes < mark.low_bytes:
            cause = f"RAM is short: {format_bytes(free_bytes)} free, {format_bytes(mark.low_bytes)} reserved"
            self.drop_until(mark.high_bytes - free_bytes, cause)

    def make_lockable(self, num_bytes: int) -> None:
        """Drop parts, in the policy's order, until so many bytes are no longer page-locked.

        Parts in use count, and stay.
        """
        used = [part for part in self.parts if not all(slab.is_unused() for slab in part.slabs)]
        num_bytes -= sum(part.count_bytes().get("pinned", 0) for part in used)
        for part, reason in self.in_order() if num_bytes > 0 else ():
            if num_bytes > 0 and part not in used:
                num_bytes -= part.count_bytes().get("pinned", 0)
                self.drop(part, f"its page-locked memory is needed for another component; {reason}")

    def drop_all(self, reason: str) -> int:
        """Drop everything; returns the bytes that are free again."""
        return sum(self.drop(part, reason) for part in list(self.parts))

    # -- the books

    def enter(self, part: KeptPart) -> None:
        """Enter in the ledger what a part has now."""
        held = part.count_bytes()
        for tier in ("pinned", "host"):
            self.ledger.settle(tier, part.id, Kind.WEIGHTS, held.get(tier, 0))

    def count_bytes(self) -> Counter[Entry]:
        """Return the bytes of each part in each place, counted from the slabs, for `Ledger.check`."""
        return Counter(
            {(tier, part.id, Kind.WEIGHTS): n for part in list(self.parts) for tier, n in part.count_bytes().items()}
        )

    def held(self) -> Counter[str]:
        """Return the bytes of RAM that all of them take which may leave, or a newcomer lies in, by tier."""
        total = Counter[str]()
        for part in [part for part in self.parts if not part.is_unwanted and not self.sharers(part)]:
            total.update(part.count_bytes())
        return total

    def known(self) -> list[KnownComponent]:
        """Return what hosts find each by: what a prompt names is used when that is loaded again. Takes no lock."""
        return [
            KnownComponent(id=part.id, name=part.of, kind=part.kind, node_id=None, workflow_id=None)
            for part in list(self.parts)
        ]

    def reports(self) -> list[ComponentReport]:
        """Return what the report says of each."""
        return [kept_report(part, self.sharers(part)) for part in self.parts]


def address_of(tensor: torch.Tensor) -> int:
    """Return the address of a tensor's storage."""
    return tensor.untyped_storage().data_ptr()


def kept_report(part: KeptPart, sharers: Sequence[str]) -> ComponentReport:
    files = ", ".join(file.name for file in part.files())
    reason = f"kept in RAM in case that {files} is loaded again; leaves first when RAM is short"
    if part.is_unwanted:
        reason = "a model that left still has it; leaves with that"
    if sharers:
        reason = f"{' and '.join(sharers)} have {files} once in RAM"
    return ComponentReport(
        id=part.id,
        name=part.name,
        kind=part.kind,
        node_id=None,
        workflow_id=None,
        tiers=part.count_bytes(),
        precision=Precision.AS_STORED.name,
        in_effect=True,
        leased=False,
        last_use_s=part.kept_s,
        bytes_moved=None,
        plan={"reasons": [reason]},
        engine=KEPT,
    )
