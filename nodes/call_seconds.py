"""How long devices compute traced calls: by speeds that were stated, or as it was measured on this machine.

[Note: measured] A call that was measured itself counts before a rate, in one piece before the halves of a step apart. A
rate is that of this model in another size, or of another one with weights of the same dtype. The seconds of its blocks
are in proportion to their operations. Nothing is assumed: of what was neither measured nor has a rate there are none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

from .default_profile import profile_text
from .device_choices import missing_devices
from .plans import read_precisions

if TYPE_CHECKING:
    from ..memory.manager.manager import MemoryManager
    from ..memory.manager.speeds import CallKey
    from ..memory.planner.run import BlockTimes, Stretch
    from ..memory.tracing import EntryTrace, Kernel, Trace
    from ..memory.weights.component import Component
    from .described_hardware import DeviceRates
    from .planned_calls import PlannedCall

__all__ = [
    "BY_RATE",
    "MEASURED",
    "STATED",
    "CallSeconds",
    "Computed",
    "MeasuredSeconds",
    "StatedSeconds",
    "precision_asked",
    "times_of",
]

MEASURED, BY_RATE, STATED = "measured", "measured rate", "stated"


@dataclass(frozen=True, kw_only=True, slots=True)
class Computed:
    """What a call computes with: what tells it from other models, and in which dtype."""

    component: str
    """The digest of its content, as the loaded model has it."""
    dtype: str

    @classmethod
    def of(cls, component: Component, precision: str) -> Computed:
        """Return it of a component whose weights rest as a precision says; empty: as stored."""
        from ..memory.manager.needs import digest_component
        from ..memory.manager.speeds import main_dtype

        return cls(component=digest_component(component), dtype=main_dtype(component, precision))


class CallSeconds(Protocol):
    """Tells what traced calls take."""

    @property
    def rated(self) -> frozenset[str] | None:
        """The devices of which was said how fast they compute; None: that is measured."""
        ...

    @property
    def may_trace(self) -> bool:
        """Whether the trace of any call would tell anything."""
        ...

    def may_tell(self, computed: Callable[[], Computed]) -> bool:
        """Whether the trace of a call would."""
        ...

    def untraced(self, computed: Callable[[], Computed]) -> Iterable[CallKey]:
        """Return measured calls of the same model whose traces would tell a rate."""
        ...

    def note(self, trace: Trace, computed: Callable[[], Computed]) -> None:
        """Note how many operations a call has that may have been measured."""
        ...

    def times(
        self,
        trace: Trace,
        component: Component,
        computed: Callable[[], Computed],
        *,
        names: Sequence[str] | None,
        num_calls: int = 1,
    ) -> Mapping[str, BlockTimes]:
        """Return what a call takes by device.

        Args:
            names: what the trace calls the component's blocks; None: it tells nothing of them.
            num_calls: of how many such calls a step consists.
        """
        ...

    def followed(self, times: Mapping[str, BlockTimes], kernels: Sequence[Kernel]) -> Mapping[str, BlockTimes]:
        """Return the times of a call with what its caller computes between it and the next one."""
        ...


class StatedSeconds:
    """By speeds that were stated.

    Args:
        rates: by device, as far as they are known.
    """

    def __init__(self, rates: Mapping[str, DeviceRates]) -> None:
        self.rates = rates

    @property
    def rated(self) -> frozenset[str]:
        return frozenset(self.rates)

    @property
    def may_trace(self) -> bool:
        return bool(self.rates)

    def may_tell(self, computed: Callable[[], Computed]) -> bool:
        return bool(self.rates)

    def untraced(self, computed: Callable[[], Computed]) -> Iterable[CallKey]:
        return ()

    def note(self, trace: Trace, computed: Callable[[], Computed]) -> None: ...

    def times(
        self,
        trace: Trace,
        component: Component,
        computed: Callable[[], Computed],
        *,
        names: Sequence[str] | None,
        num_calls: int = 1,
    ) -> Mapping[str, BlockTimes]:
        return {device: self.times_on(rates, trace, component, names) for device, rates in self.rates.items()}

    def followed(self, times: Mapping[str, BlockTimes], kernels: Sequence[Kernel]) -> Mapping[str, BlockTimes]:
        return {
            device: replace(found, following=stretches_of([(None, kernels)], self.rates[device]))
            for device, found in times.items()
        }

    def times_on(
        self, rates: DeviceRates, trace: Trace, component: Component, names: Sequence[str] | None
    ) -> BlockTimes:
        if names is not None:
            return times_of(trace, component, rates, names)
        return by_bytes(times_of(trace, component, rates).pass_s, component, STATED)


class MeasuredSeconds:
    """As it was measured on this machine ([Note: measured])."""

    def __init__(self, manager: MemoryManager) -> None:
        self.manager = manager
        self.speeds = manager.capacity.speeds
        self.devices = {name: manager.capacity.speed_digest(name) for name in manager.devices}

    @property
    def rated(self) -> None:
        return None

    @property
    def problem(self) -> str:
        """Why the file of what was measured cannot be read; empty where it can, or there is none."""
        return self.speeds.problem

    @property
    def may_trace(self) -> bool:
        return bool(self.speeds.known)

    def may_tell(self, computed: Callable[[], Computed]) -> bool:
        if not self.speeds.known:
            return False
        found = computed()
        return any(
            key.device in self.devices.values()
            and (key.component == found.component or (key.dtype == found.dtype and call.work))
            for key, call in self.speeds.calls()
        )

    def untraced(self, computed: Callable[[], Computed]) -> Iterable[CallKey]:
        found = computed()
        return [
            key
            for key, call in self.speeds.calls()
            if key.component == found.component and key.dtype == found.dtype and not call.work
        ]

    def note(self, trace: Trace, computed: Callable[[], Computed]) -> None:
        for device in self.devices.values():
            self.measured(trace, computed(), device, 1)

    def times(
        self,
        trace: Trace,
        component: Component,
        computed: Callable[[], Computed],
        *,
        names: Sequence[str] | None,
        num_calls: int = 1,
    ) -> Mapping[str, BlockTimes]:
        if not self.speeds.known:
            return {}
        found = computed()
        times = {}
        for name, device in self.devices.items():
            seconds, source = self.measured(trace, found, device, num_calls), MEASURED
            if seconds is None:
                seconds, source = self.speeds.predict(device, found.dtype, found.component, trace.work), BY_RATE
            if seconds is not None:
                times[name] = by_flops(seconds, trace, component, names, source)
        return times

    def followed(self, times: Mapping[str, BlockTimes], kernels: Sequence[Kernel]) -> Mapping[str, BlockTimes]:
        return times  # what passes took between two calls was not measured

    def measured(self, trace: Trace, found: Computed, device: str, num_calls: int) -> float | None:
        """Return what a call takes by what was measured of it: in one with the others of its step, or alone."""
        for together in dict.fromkeys((num_calls, 1)):
            seconds = [
                self.seconds_of(key_of(found, device, entry, together), entry, together, trace)
                for entry in trace.entries
            ]
            known = [second for second in seconds if second is not None]
            if known and len(known) == len(seconds):
                return sum(known) / together
        return None

    def seconds_of(self, key: CallKey, entry: EntryTrace, together: int, trace: Trace) -> float | None:
        """Return what a pass takes as it was measured, and note its work; None where it was not."""
        call = self.speeds.known.get(key)
        if call is None:
            return None
        if not call.of_blocks:
            self.speeds.note_work(key, entry.work.times(together))
            return call.seconds
        blocks = trace.work_of_blocks
        if not blocks.flops or len(trace.entries) > 1:
            return None
        self.speeds.note_work(key, blocks.times(together))
        return call.seconds * trace.flops / blocks.flops  # what lies between the blocks was not measured

    def remember(self) -> None:
        """Write what traces told of measured calls to the file."""
        self.manager.leases.remember()


def key_of(found: Computed, device: str, entry: EntryTrace, together: int = 1) -> CallKey:
    """Return what a call was measured as, or so many of them in one, whose inputs have a larger first dimension."""
    from ..memory.manager.speeds import CallKey

    shapes = tuple((shape[0] * together, *shape[1:]) for shape in entry.shapes)
    return CallKey(found.component, device, found.dtype, entry.number, shapes)


def by_flops(
    seconds: float, trace: Trace, component: Component, names: Sequence[str] | None, source: str
) -> BlockTimes:
    """Return the seconds of a forward, with each block's share of them as large as its share of the operations."""
    from ..memory.planner.run import BlockTimes

    if names is None or not trace.flops:
        return by_bytes(seconds, component, source)
    found = trace.blocks
    blocks = tuple(seconds * (found[name].flops if name in found else 0) / trace.flops for name in names)
    return BlockTimes(blocks_s=blocks, other_s=max(0.0, seconds - sum(blocks)), source=source)


def by_bytes(seconds: float, component: Component, source: str) -> BlockTimes:
    """Return the seconds of a forward, with each block's share of them as large as its share of the weights."""
    from ..memory.planner.run import BlockTimes

    total_bytes = max(1, component.weight_bytes)
    blocks = tuple(seconds * block.weight_bytes / total_bytes for block in component.blocks)
    return BlockTimes(blocks_s=blocks, other_s=max(0.0, seconds - sum(blocks)), source=source)


def times_of(trace: Trace, component: Component, rates: DeviceRates, names: Sequence[str] | None = None) -> BlockTimes:
    """Return what each block of a component computes in a traced call on a device of these rates.

    Args:
        names: what the trace calls its blocks, in their order; None: as the component does.
    """
    from ..memory.planner.run import BlockTimes
    from ..memory.tracing import seconds_of

    seconds = seconds_of(trace, **speeds_of(rates))
    if names is None:
        names = [block.name for block in component.blocks]
    blocks = tuple(seconds.blocks.get(name, 0.0) for name in names)
    numbers = {name: number for number, name in enumerate(names)}
    return BlockTimes(
        blocks_s=blocks,
        other_s=max(0.0, seconds.total_s - sum(blocks)),
        launch_s=trace.num_kernels * rates.launch_s,
        source=STATED,
        copy_launch_s=rates.launch_s,
        stretches=stretches_of([(numbers.get(part.block), part.kernels) for part in trace.segments], rates),
    )


def stretches_of(parts: Iterable[tuple[int | None, Sequence[Kernel]]], rates: DeviceRates) -> tuple[Stretch, ...]:
    """Return what kernels take on a device of these rates, and the host that launches them; each with its block."""
    from ..memory.planner.run import Stretch
    from ..memory.tracing import launched

    return tuple(
        Stretch(
            block=block,
            launch_s=part.launch_s,
            busy_s=part.busy_s,
            end_s=part.end_s,
            copy_s=part.copy_s,
        )
        for block, kernels in parts
        for part in launched(kernels, **speeds_of(rates))
    )


def speeds_of(rates: DeviceRates) -> dict[str, float]:
    return {
        "flops_per_s": rates.flops_per_s,
        "memory_bytes_per_s": rates.memory_bytes_per_s,
        "launch_s": rates.launch_s,
        "link_bytes_per_s": rates.link_bytes_per_s,
    }


def precision_asked(call: PlannedCall) -> str:
    """Return in which form a call's loader lets weights rest, by its widgets; empty: as stored."""
    from ..memory.options.placement import AUTO
    from ..memory.options.profile import parse_profile
    from ..memory.planner.planning import chosen_precision

    asked, names = call.model.asked, [part.name for part in call.parts or (call.component,)]
    if not call.model.is_ours:
        return ""
    text = profile_text(asked.profile or AUTO)
    profile = parse_profile(text, devices=missing_devices(text, ()), components=names)
    request = None if asked.precision is None else read_precisions(asked.precision, names)
    precision, _ = chosen_precision(call.component, profile, request)
    return "" if precision.is_as_stored else precision.name
