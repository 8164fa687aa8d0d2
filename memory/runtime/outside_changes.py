"""Changes that other code makes to a managed module: found before a pass, taken over, or undone and reported.

What is looked at: hooks of other offloaders, layers that come and go, weights that are moved, converted, replaced or
renamed. A quick look ([Note: steady looks] in `steady_look.py`) tells whether a close one is due.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial

from torch import nn
from torch._C._functorch import peek_interpreter_stack

from ..errors import UnsafeState
from ..planner.plan import ComponentPlan
from ..weights.component import Component
from .changes.converted_weights import give_up
from .changes.move_guard import MoveGuard
from .changes.other_offloaders import find_rival
from .changes.steady_look import SteadyLook
from .devices.device_share import DeviceShare, wait_for_copies
from .holders import find_holders
from .joined_layers import Joined, JoinedLayers
from .packing import Packing
from .tensors.parameter_slots import ParameterSlot
from .weight_places import WeightPlaces

__all__ = ["OutsideChanges"]


class OutsideChanges:
    """What other code may do to the module of one component, and what becomes of that.

    The caller holds the manager's lock. For a host that moves single weights itself, `begin` is never called: nothing
    but other offloaders is looked for then.

    Args:
        blocks: the modules of the component's blocks.
    """

    def __init__(
        self,
        owner: str,
        module: nn.Module,
        blocks: Sequence[nn.Module],
        shares: Sequence[DeviceShare],
        places: WeightPlaces,
    ) -> None:
        self.owner = owner
        self.module = module
        self.shares = shares
        self.places = places
        self.swaps = places.swaps
        first = blocks[0] if blocks else module
        self.marked_by_others = list(dict.fromkeys([module, *blocks, *first.modules()]))
        """A library that moves the weights, too, has its hooks on at least one of these modules."""
        self.moves: MoveGuard | None = None
        """Set from `begin` to `end`."""
        self.layers: JoinedLayers | None = None
        """Set from `begin` to `stop`."""
        self.look: SteadyLook | None = None
        """What the module held when a close look found nothing; None until then."""
        self.undone: str | None = None
        """The change of weights that `stop` found undone."""
        self.given_up: str | None = None
        """The conversion for which groups gave up; the component is to be packed anew ([Note: given up])."""
        self.packing: Packing | None = None
        """Set from `begin` to `stop`."""

    def begin(self, packing: Packing) -> None:
        """Look for changes from now on; the weights are packed."""
        self.moves, self.packing = self.guard_moves(), packing
        self.layers = JoinedLayers(self.owner, self.module, self.shares, packing, self.places)

    def stop(self, packing: Packing) -> None:
        """Look for layers no more, and note the changes so far: the weights are about to be given back."""
        if self.moves is not None:
            packing.written.note(self.swaps.names)
            if find_rival(self.marked_by_others) is None:  # else that was told, with the advice to release it
                self.undone = self.moves.take_undone()
        self.layers = self.look = None

    def end(self) -> None:
        """Look for nothing any more: the module has its weights again."""
        self.moves = None
        self.swaps.watch(())

    def guard_moves(self, after: MoveGuard | None = None) -> MoveGuard:
        groups = [(group, share.device.torch_device) for share in self.shares for group in share.groups]
        return MoveGuard(self.owner, groups, self.swaps, wait=partial(wait_for_copies, self.shares), after=after)

    # -- before a pass

    def is_steady(self) -> bool:
        """Whether one quick look finds the module as the last close one left it.

        A host looks after its modules itself.
        """
        if self.moves is None:
            return True
        return self.look is not None and self.look.is_steady() and self.moves.is_settled

    def refuse_rivals(self) -> None:
        """Refuse to compute while others move the weights, too. Looks where any of them would leave its mark.

        Raises:
            UnsafeState: they do.
        """
        rival = find_rival(self.marked_by_others)
        if rival is not None:
            raise UnsafeState(f"{self.owner} is managed, and has {rival}, or release it")

    def take_converted(self) -> bool:
        """Give up groups whose weights were converted or resized; returns whether any have, now or earlier.

        Raises:
            InvalidInput: weights that rest in a file are to be read for that, and the file has changed.
        """
        if self.moves is not None and self.moves.has_converted():
            self.put_back()
        return self.given_up is not None

    def have_layers_changed(self) -> bool:
        """Whether layers were added to the module or are gone from it, so that they have to `join`."""
        self.forget_look()
        if self.moves is None or self.layers is None:
            return False
        layers = self.layers
        return layers.have_changed() or (bool(layers.slots) and self.moves.is_moved() and layers.have_other_forms())

    def join(self, component: Component, plan: ComponentPlan, blocks: Mapping[nn.Module, int]) -> Joined:
        """Move layers into the blocks that they are in now, or out of theirs. Raises as `JoinedLayers.join`.

        The caller puts that in place, calls `guard_anew` and at last `accept`: until then layers count as changed.
        """
        assert self.layers is not None and self.moves is not None
        return self.layers.join(component, plan, self.moves, blocks)

    def guard_anew(self) -> None:
        """Watch the weights that the groups have after a `join`."""
        self.moves = self.guard_moves(after=self.moves)

    def accept(self, joined: Joined) -> None:
        """Take the module tree of the last `join` as current: all its consequences are in place."""
        assert self.layers is not None
        self.layers.take(joined.structure)

    def undo_moves(self, *, has_joined: bool) -> None:
        """Undo what ``Module.to`` and its like did; where nothing has changed, quick looks are enough from now on."""
        if self.moves is not None and not self.moves.put_back() and not has_joined:
            self.look = self.look_quickly()

    def look_quickly(self) -> SteadyLook | None:
        """Return what quick looks compare with from now on; None where a quick look does not tell enough."""
        assert self.layers is not None and self.moves is not None
        groups = [group for share in self.shares for group in share.groups]
        if any(slot.is_quantized for group in groups for slot in group.slots) or peek_interpreter_stack() is not None:
            return None  # torch.func's tensors have no place of their own
        modules = self.layers.structure.modules
        return SteadyLook(modules, self.marked_by_others, self.moves.plain_weights(), self.moves.samples())

    def forget_look(self) -> None:
        """Look closely the next time."""
        self.look = None

    def begin_loans(self) -> None:
        """A pass begins: what others lent to the module computes on the device of its block."""
        if self.swaps.loans:
            self.swaps.begin()

    def end_loans(self) -> None:
        """The pass is over: the module holds the others' own tensors again."""
        if self.swaps.loans:
            self.swaps.end()

    # -- between passes

    def put_back(self) -> None:
        """Undo what ``Module.to`` and its like did to the weights."""
        self.forget_look()
        if self.moves is not None:
            self.moves.put_back(keeps_converted=self.may_give_up())
            self.give_up_converted(self.moves)
            if self.moves.gone is not None:
                self.follow_renamed()

    def may_give_up(self) -> bool:
        """Whether converted weights are taken over: none is quantized or shared, and no other offloader has hooks."""
        if find_rival(self.marked_by_others) is not None:
            return False
        slots = [slot for share in self.shares for group in share.groups for slot in group.slots]
        return not (self.is_lending(slots) or self.places.manager.lenders() or any(slot.is_quantized for slot in slots))

    def is_lending(self, slots: Iterable[ParameterSlot]) -> bool:
        """Whether another component's module holds any of these weights.

        Modules that other code took out of ours hold weights, too, but are in no component.
        """
        own = set(self.module.modules())
        outside = {id(part) for slot in slots for part, _ in slot.owners if part not in own}
        return bool(outside) and any(holder is not self.places for holder in find_holders(outside))

    def give_up_converted(self, moves: MoveGuard) -> None:
        """Give up the groups of converted weights: they leave their devices, and their module has ordinary tensors."""
        converted = moves.take_converted()
        if not converted:
            return
        self.given_up = self.given_up or converted[0].change
        groups = {id(each.group) for each in converted}
        for share in self.shares:
            share.recover()
            for group in [group for group in share.groups if id(group) in groups]:
                if group.copy is not None:
                    share.drop_group(group)
                give_up(group, [each for each in converted if each.group is group])
            share.free_staging()
            share.forget_views()
        if self.packing is not None:
            self.packing.settle_books()

    def follow_renamed(self) -> None:
        """Update weights where other code has moved them within the module; forwards are refused from then on.

        Until the component is released, or planned anew with what such code has put into the module beside that.
        """
        if self.moves is not None:
            for name in self.places.follow_renamed():
                self.moves.note_gone(name)

    def describe_anew(self, component: Component, plan: ComponentPlan) -> tuple[Component, ComponentPlan]:
        """Return both by the names that the module gives weights now, before another plan is made."""
        self.follow_renamed()
        return (component, plan) if self.layers is None else self.layers.describe_anew(component, plan)

    def bring_layers_home(self) -> None:
        """Move weights of layers that have not joined yet to host memory."""
        if self.layers is not None:
            self.layers.return_to_host()

    # -- reports

    def tell_undone(self) -> None:
        """Report what was done to the weights and undone (`MoveGuard.tell_undone`). Raises `UnsafeState`."""
        if self.moves is not None:
            self.moves.tell_undone()

    def refuse(self) -> None:
        """Undo changes that cannot be taken over, such as another dtype, and raise `UnsafeState` for them."""
        self.follow_renamed()
        self.put_back()
        undone = self.moves.take_undone() if self.moves is not None else None
        if undone is not None:
            raise UnsafeState(f"{self.owner}: {undone}; the change was undone: release it before such changes")

    def tell_undone_at_release(self) -> None:
        """Raise `UnsafeState`, once, for a change that was made before the release and that this undid."""
        undone, self.undone = self.undone, None
        if undone is not None:
            raise UnsafeState(f"{self.owner}: {undone}; release() undid the change: make it again now")
