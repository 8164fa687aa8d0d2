"""Copies between devices: arguments to the device where the callee computes, outputs and changes back.

[Note: home] In a split the parent of the blocks sees tensors of one device only: the home device, on which the
non-block weights compute. A block on another device gets copies of its arguments, and its outputs are copied home. So a
parent may join outputs, add to them, collect them, or skip other blocks at every step. This costs one copy home per
such block. The next block on that device needs no copy back if it takes the output unchanged, because the original is
kept beside its copy, and computes while the copy is on its way ([Note: hops beside computing] in
`transfer/hop_streams.py`). If the parent returns tensors that another library's hooks kept from a call on another
device, they are copied home with the parent's output.

[Note: twins] A caller's tensor (outside) and the callee's copy of it (inside) are twins. Torch counts the writes to a
tensor (`_version`), so twins are equal as long as neither count has changed. What a callee wrote to its copy is written
back. If a callee returns its copy, the caller gets its own tensor. Tensors that share memory outside share it inside.
Torch does not count writes to inference tensors: those outside are copied each time; copies inside are made as ordinary
tensors, so that each write to one is seen.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from ...transfer.hop_streams import send_beside
from ..tensors.nested_tensors import Lent, find_tensors, replace_tensors
from ..tensors.reported_device import device_of
from .recording_pauses import host_recordings
from .shared_states import exchange, tensors_of

__all__ = ["DeviceHops", "Visit"]


class Twin:
    """A weak reference to a tensor outside a call, and its copy inside. Kept until the tensor outside dies."""

    __slots__ = ("call", "inside", "inside_version", "outside", "outside_version")

    def __init__(self, outside: weakref.ref[torch.Tensor], inside: torch.Tensor, call: int) -> None:
        self.outside = outside
        self.inside = inside
        self.call = call
        """The number of the micro-batch that made it; another one may use it, but must not write to it."""
        self.note_equal()

    def note_equal(self) -> None:
        """Note that the two tensors are equal now."""
        self.outside_version = version_of(self.outside())
        self.inside_version = version_of(self.inside)

    def is_written(self) -> bool:
        """Whether the copy inside was written to since the two were last equal."""
        return self.inside_version is None or version_of(self.inside) != self.inside_version

    def fits(self, outside: torch.Tensor) -> bool:
        """Whether this twin can be used for the tensor: same object and shape; no autograd graph unless equal."""
        inside = self.inside
        has_graph = torch.is_grad_enabled() and (outside.requires_grad or inside.requires_grad)
        return (
            self.outside() is outside and outside.shape == inside.shape and (not has_graph or self.is_current(outside))
        )

    def is_current(self, outside: torch.Tensor) -> bool:
        """Whether the two are still equal."""
        return self.outside_version is not None and (
            version_of(outside) == self.outside_version and not self.is_written()
        )


class DeviceHops:
    """Copies tensors between devices, once per tensor, device and pass."""

    def __init__(self) -> None:
        self.twins: dict[tuple[int, torch.device], Twin] = {}
        """By the id of the tensor outside, and the device of its copy."""
        self.twins_inside: dict[int, Twin] = {}
        """By the id of the copy inside."""
        self.num_hops = 0
        self.bytes_moved = 0
        self.call = 0
        """The number of the micro-batch that computes now."""
        self.note_use: Callable[[torch.Tensor], None] | None = None

    def begin_call(self, number: int, note_use: Callable[[torch.Tensor], None] | None) -> None:
        """Copy for a micro-batch from now on.

        Args:
            note_use: called with each kept copy that is used again, perhaps on other streams than those of its call.
        """
        self.call, self.note_use = number, note_use

    def forget(self) -> None:
        """Drop the kept copies at the end of a pass."""
        self.twins.clear()
        self.twins_inside.clear()

    def visit(
        self,
        value: Any,
        device: torch.device,
        *,
        source: torch.device | None,
        target: torch.device | None,
        shared: Sequence[Any] = (),
    ) -> Visit | None:
        """Copy a callee's arguments to its device; None if no tensor has to be copied there or back.

        Args:
            source: the device whose tensors are copied; None: tensors of all other devices.
            target: the device to which the callee's outputs are copied; None leaves them on the callee's device.
            shared: objects that the callee uses beside its arguments (`find_shared_states`).
        """
        given = find_tensors(value)
        if shared:
            given = list({id(tensor): tensor for tensor in [*given, *tensors_of(shared)]}.values())
        found = [
            tensor
            for tensor in given
            if (
                device_of(tensor) == source
                if source is not None
                else device_of(tensor) != device and not tensor.is_meta
            )
        ]
        if not found and target is None:
            return None
        pairs = [pair for group in groups_of(found) for pair in zip(group, self.twins_of(group, device), strict=True)]
        return Visit(self, value, device, target, pairs, shared)

    def twins_of(self, group: Sequence[torch.Tensor], device: torch.device) -> list[Twin]:
        """Return the twins on a device of tensors that share memory: known twins, made equal, or new ones."""
        known = [
            twin
            for own in group
            if (twin := self.twins.get((id(own), device))) is not None
            and twin.fits(own)
            and (twin.call == self.call or twin.is_current(own))
        ]
        if len(known) < len(group) or len({memory_of(twin.inside) for twin in known}) > 1:
            return [self.pair(own, copy) for own, copy in zip(group, self.copy(group, device), strict=True)]
        if not all(twin.is_current(own) for twin, own in zip(known, group, strict=True)):
            for own, twin in zip(group, known, strict=True):
                # The copy is newer if only the copy was written to; in all other cases the caller's tensor is.
                if twin.is_written() and twin.outside_version == version_of(own) is not None:
                    self.count(own.copy_(twin.inside))
                else:
                    self.count(twin.inside.copy_(own))
            for twin in known:
                twin.note_equal()
        for twin in known if self.note_use is not None else ():
            assert self.note_use is not None
            self.note_use(twin.inside)
        return known

    def pair(self, outside: torch.Tensor, inside: torch.Tensor) -> Twin:
        """Make two tensors twins."""
        key = id(outside), inside.device
        forget = partial(drop, self.twins, key, self.twins_inside, id(inside))
        twin = Twin(weakref.ref(outside, forget), inside, self.call)
        before = self.twins.get(key)
        if before is not None:
            self.twins_inside.pop(id(before.inside), None)
        self.twins[key] = self.twins_inside[id(inside)] = twin
        return twin

    def copy(self, group: Sequence[torch.Tensor], device: torch.device, *, beside: bool = False) -> list[torch.Tensor]:
        """Return copies on a device. Tensors that share memory are copied in one go, and their copies share memory.

        Args:
            beside: let their own device compute on meanwhile, where that is possible.
        """
        with ordinary_tensors():
            if len(group) == 1:
                send = send_while_computing if beside and can_go_beside(group[0], device) else copy_as_it_lies
                return [self.count(send(group[0], device))]
            begin, end = min(range_of(tensor)[0] for tensor in group), max(range_of(tensor)[1] for tensor in group)
            all_of_it = self.count(group[0].as_strided((end - begin,), (1,), begin).to(device))
            return [
                all_of_it.as_strided(tensor.size(), tensor.stride(), tensor.storage_offset() - begin).detach()
                for tensor in group
            ]

    def return_to(self, value: Any, home: torch.device, others: Iterable[torch.device]) -> Any:
        """Return a value with its tensors of other devices copied to the home device."""
        for device in others:
            value = Visit(self, None, device, home, [], ()).bring(value)
        return value

    def count(self, copy: torch.Tensor) -> torch.Tensor:
        self.num_hops += 1
        self.bytes_moved += copy.nbytes
        return copy


class Visit:
    """One call on another device: its arguments, and how results are copied back.

    Args:
        pairs: each tensor that was copied, with its twin; referenced here, because the caller may drop a view to which
            the callee writes.
    """

    def __init__(
        self,
        hops: DeviceHops,
        value: Any,
        device: torch.device,
        target: torch.device | None,
        pairs: list[tuple[torch.Tensor, Twin]],
        shared: Sequence[Any],
    ) -> None:
        self.hops = hops
        self.device = device
        self.target = target
        self.pairs = pairs
        self.brought: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        """The callee's tensors that were brought home, and the caller's tensors for them, by the callee's ids."""
        self.shared = shared
        others = {id(outside): twin.inside for outside, twin in pairs}
        self.lent = Lent(value, others)
        exchange(shared, others)

    def end(self, output: Any) -> Any:
        """Write back what the callee wrote into its arguments; returns its output with the caller's tensors."""
        written = [(outside, twin) for outside, twin in self.pairs if twin.is_written()]
        for outside, twin in written:
            if outside.shape != twin.inside.shape:
                outside.resize_(twin.inside.shape)
            write_back(outside, twin.inside)
        for _, twin in self.pairs if written else ():  # all: twins that share memory were written to together
            twin.note_equal()
        self.lent.come_back(self.bring)
        self.give_back_states()
        return self.bring(output)

    def give_back_states(self) -> None:
        """Put the caller's tensors back into shared objects, also after a failure. Idempotent."""
        if self.shared:
            exchange(self.shared, self.brought_home(tensors_of(self.shared)))

    def bring(self, value: Any) -> Any:
        """Return a value with the callee's tensors and containers replaced by the caller's."""
        others: dict[int, Any] = self.brought_home(find_tensors(value))
        return replace_tensors(value, others | self.lent.owned)

    def brought_home(self, tensors: Iterable[torch.Tensor]) -> dict[int, torch.Tensor]:
        """Copy tensors on the callee's device home; returns all that were brought so far, by the callee's ids."""
        strangers = []
        for tensor in tensors:
            if device_of(tensor) == self.device and id(tensor) not in self.brought:
                own = self.own(tensor)
                if own is not None:
                    self.brought[id(tensor)] = tensor, own
                elif self.target is not None:
                    strangers.append(tensor)
        for group in groups_of(strangers):
            assert self.target is not None
            for tensor, own in zip(group, self.hops.copy(group, self.target, beside=True), strict=True):
                self.hops.pair(own, ordinary(tensor))
                self.brought[id(tensor)] = tensor, own
        return {number: own for number, (_, own) in self.brought.items()}

    def own(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Return the caller's tensor, or a view of it, of which a callee's tensor is the copy; else None."""
        for own, twin in self.pairs:
            if twin.inside is tensor:
                return own
        if self.target is None:
            return None
        earlier = self.hops.twins_inside.get(id(tensor))
        if earlier is not None and earlier.inside is tensor:
            outside = earlier.outside()
            if outside is not None and outside.device == self.target:
                if earlier.is_written():  # in an earlier call: it is no argument of this one
                    outside.copy_(tensor)
                    earlier.note_equal()
                return outside
        for own, twin in self.pairs:
            if is_view_of(tensor, twin.inside) and is_plain(own) and own.stride() == twin.inside.stride():
                begin = own.storage_offset() - twin.inside.storage_offset() + tensor.storage_offset()
                view = own.as_strided(tensor.size(), tensor.stride(), begin)
                self.hops.pair(view, ordinary(tensor))
                return view
        return None


def drop(
    twins: dict[tuple[int, torch.device], Twin],
    key: tuple[int, torch.device],
    inside: dict[int, Twin],
    inside_id: int,
    dead: weakref.ref[torch.Tensor],
) -> None:
    """Forget the twin of a tensor that has died."""
    twin = twins.get(key)
    if twin is not None and twin.outside is dead:
        del twins[key]
        inside.pop(inside_id, None)


def version_of(tensor: torch.Tensor | None) -> int | None:
    """Return how often a tensor was written to; None if torch does not count its writes."""
    return None if tensor is None or tensor.is_inference() else tensor._version


@contextmanager
def ordinary_tensors() -> Iterator[None]:
    """In the body, create ordinary tensors, not inference tensors, whose writes are not counted."""
    if torch.is_inference_mode_enabled():
        with torch.inference_mode(False), torch.no_grad():
            yield
    else:
        yield


def ordinary(tensor: torch.Tensor) -> torch.Tensor:
    """Return an ordinary tensor in the memory of an inference tensor; other tensors unchanged."""
    if not tensor.is_inference() or not is_plain(tensor):
        return tensor
    with torch.inference_mode(False), torch.no_grad():
        other = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        return other.set_(tensor.untyped_storage(), tensor.storage_offset(), tensor.size(), tensor.stride())


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether a tensor is a plain strided tensor, with no subclass, lazy conjugation or transform."""
    return (
        type(tensor) in (torch.Tensor, torch.nn.Parameter)
        and tensor.layout is torch.strided
        and not (tensor.is_conj() or tensor.is_neg())
        and not torch._C._functorch.is_functorch_wrapped_tensor(tensor)
    )


def memory_of(tensor: torch.Tensor) -> int:
    """Return a key that is equal for tensors that share memory; a key of its own for a tensor that is not plain."""
    return tensor.untyped_storage()._cdata if is_plain(tensor) else id(tensor)


def copy_as_it_lies(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a copy on a device, with the same strides if possible; `Tensor.to` removes gaps."""
    begin, end = range_of(tensor)
    if tensor.requires_grad or not is_plain(tensor) or end - begin <= tensor.numel() or 0 in tensor.stride():
        return tensor.to(device)
    return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=device).copy_(tensor)


def can_go_beside(tensor: torch.Tensor, device: torch.device) -> bool:
    """Whether a tensor can be copied to a device while its own one computes on: no gradient, and without gaps."""
    if tensor.requires_grad or not is_plain(tensor) or "cpu" in (tensor.device.type, device.type):
        return False
    begin, end = range_of(tensor)
    return end - begin == tensor.numel() > 0 and 0 not in tensor.stride()


def send_while_computing(tensor: torch.Tensor, device: torch.device, into: torch.Tensor | None = None) -> torch.Tensor:
    """Return a copy of a tensor for which `can_go_beside` holds; takes its bytes once more until that has left."""
    with host_recordings.paused():
        held = tensor.clone()
    sent = send_beside(held, device, into)
    with host_recordings.paused():
        del held
    return sent


def write_back(outside: torch.Tensor, inside: torch.Tensor) -> None:
    """Write what a callee wrote to its copy to the caller's tensor."""
    if can_go_beside(inside, outside.device) and outside.device != inside.device and not outside.requires_grad:
        send_while_computing(inside, outside.device, into=outside)
    else:
        outside.copy_(inside)


def is_view_of(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether a tensor is a view into another one's memory, without an autograd graph."""
    if tensor.dtype != other.dtype or tensor.requires_grad or memory_of(tensor) != memory_of(other):
        return False
    return range_of(other)[0] <= range_of(tensor)[0] and range_of(tensor)[1] <= range_of(other)[1]


def range_of(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the index in its storage of a tensor's first element, and of the element behind its last."""
    begin = int(tensor.storage_offset())
    if not tensor.numel():
        return begin, begin
    steps = zip(tensor.size(), tensor.stride(), strict=True)
    return begin, begin + 1 + sum(int(size - 1) * int(step) for size, step in steps)


def groups_of(tensors: Iterable[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Return the tensors in groups; those that overlap or touch in the same memory form one group."""
    by_memory: dict[tuple[int, torch.dtype], list[torch.Tensor]] = {}
    groups = []
    for tensor in tensors:
        if tensor.requires_grad or not is_plain(tensor):
            groups.append([tensor])
        else:
            by_memory.setdefault((memory_of(tensor), tensor.dtype), []).append(tensor)
    for sharing in by_memory.values():
        end = -1
        for tensor in sorted(sharing, key=range_of) if len(sharing) > 1 else sharing:
            if range_of(tensor)[0] > end:
                groups.append([])
            groups[-1].append(tensor)
            end = max(end, range_of(tensor)[1])
    return groups
