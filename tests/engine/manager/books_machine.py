"""A state machine over a manager on simulated devices: any deeds in any order, and books that are true after each.

Two devices with less memory than the components have together, so that deeds make others leave. After each step the
ledger is compared with the slabs that exist, and its sums with what the devices themselves count. Every output is
compared, bit for bit, with that of the component without the engine (in eight bits: with its own first one). Some
components are a host's and come from files: what they leave is kept, used again, or dropped, and files are replaced.
"""

from __future__ import annotations

import functools
import gc
import os
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import pytest
import safetensors.torch
import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from torch import nn

from highwater.headless import simdevice
from highwater.memory import MemoryManager, manage
from highwater.memory.api import Managed
from highwater.memory.errors import DoesNotFit, InvalidInput, UnsafeState
from highwater.memory.hosted_component import FileTensors, HostedComponent
from highwater.memory.manager.policies.named import POLICIES
from highwater.memory.options.idle_limits import IdleLimits
from highwater.memory.options.profile import parse_profile
from highwater.memory.transfer.devices import HostMemory
from highwater.tests.engine.conftest import build_net
from highwater.tests.engine.manager.test_steered import Host, Paged

KIB = 1 << 10
TOTAL_BYTES = 400 * KIB
"""Of each device; the components have 66 to 260 KiB."""
MOST_COMPONENTS = 5
MOST_HOSTED = 3
NUM_FILES = 2
NUM_CONTENTS = 5
WIDTHS = (16, 24, 32)
GPUS = st.sampled_from([0, 1])

PROFILES = st.sampled_from(["auto", "0.08MiB", "gpu:0=0.1MiB,gpu:1=0.05MiB", "1", "4", "5", "60%", "unlimited"])
PLACEMENTS = st.sampled_from(
    ["auto", "gpu:0", "gpu:1", "gpu:0&gpu:1", "gpu:0&gpu:1@0.3", "gpu:0:host", "gpu:1:gpu:0", "gpu:0:gpu:1"]
)
PRECISIONS = st.sampled_from(["as stored", "as stored", "fp8 scaled"])
REFUSALS = (InvalidInput, DoesNotFit, UnsafeState)


IDLE_S = 1000.0
LATER_S = 2000.0
"""How much later it is after `later`: longer than any loan, and than a component may be idle."""


class SmallPages(Paged):
    PAGE_BYTES = 32 * KIB


class Interrupt(BaseException):
    """What a host raises in the middle of a block."""


@dataclass(eq=False)
class Component:
    """One component, and what it computes without the engine, or did first."""

    name: str
    module: nn.Module
    handle: Managed
    is_exact: bool
    placement: str
    expected: dict[int, torch.Tensor] = field(default_factory=dict)
    leases: list[ExitStack] = field(default_factory=list)


@dataclass(eq=False)
class Hosted:
    """A component of a host, from a file; its module goes with it."""

    path: Path
    module: nn.Module
    hosted: HostedComponent
    device: torch.device
    expected: dict[int, torch.Tensor]


class Files:
    """Files of weights, which a program may replace, and what their models compute."""

    def __init__(self, folder: Path) -> None:
        self.paths = [folder / f"model{number}.safetensors" for number in range(NUM_FILES)]
        self.expected: dict[Path, dict[int, torch.Tensor]] = {}
        self.num_written = 0
        for path in self.paths:
            self.replace(path)

    def replace(self, path: Path) -> None:
        """Put another file of the same size in its place."""
        content, self.expected[path] = content_of_file(self.num_written % NUM_CONTENTS)
        self.num_written += 1
        path.with_suffix(".new").write_bytes(content)
        os.replace(path.with_suffix(".new"), path)


@functools.cache
def content_of_file(number: int) -> tuple[bytes, dict[int, torch.Tensor]]:
    """Return the bytes of a file, in which a tied weight has both its names, and what its model computes."""
    net = net_of_files(seed=1000 + number)
    weights = {name: weight.clone() for name, weight in net.state_dict().items()}
    return safetensors.torch.save(weights), compute(net)


def net_of_files(seed: int) -> nn.Module:
    return build_net(seed=seed, dim=24, doubles=2, singles=2)


def compute(module: nn.Module) -> dict[int, torch.Tensor]:
    with torch.no_grad():
        return {size: module(input_of(module, size)) for size in (1, 5)}


@contextmanager
def raising_at(module: nn.Module, error: type[BaseException]) -> Iterator[None]:
    """Raise at the first call of a module in the body, once."""
    raised = []

    def fail(*_: Any) -> None:
        if not raised:
            raised.append(True)
            raise error("on purpose")

    handle = module.register_forward_pre_hook(fail)
    try:
        yield
    finally:
        handle.remove()


class BooksMachine(RuleBasedStateMachine):
    """Deeds of programs, hosts, users and other programs; see the rules."""

    counts: ClassVar[Counter[tuple[str, str]]] = Counter()
    """How often each deed was done, by how it ended, over all examples."""

    @initialize(
        low=st.integers(0, 64), span=st.integers(0, 64), policy=st.sampled_from(sorted(POLICIES)), peer=st.booleans()
    )
    def begin(self, low: int, span: int, policy: str, peer: bool) -> None:
        self.stack = ExitStack()
        specs = [simdevice.SimDeviceSpec(total_bytes=TOTAL_BYTES, has_peer_access=peer) for _ in range(2)]
        self.stack.enter_context(simdevice.cluster(specs))
        self.manager = MemoryManager(policy=POLICIES[policy]())
        self.note("begin", policy)
        self.manager.set_watermark("*", low * KIB, (low + span) * KIB)
        self.host = Host()
        self.manager.hosting.steer(self.host)
        # Its thread would move something between two looks at the books; the rule `later` does what it does.
        self.manager.caretaker.alarm.set = lambda delay_s: None  # type: ignore[method-assign]
        # So would this one's; the rule `load_early` does what it does.
        self.manager.leases.look_ahead.find_wanted = lambda: iter(())  # type: ignore[method-assign]
        patch = self.stack.enter_context(pytest.MonkeyPatch.context())
        for room in ("hosted_component", "file_tensors"):
            patch.setattr(f"highwater.memory.{room}.default_manager", lambda: self.manager)
        self.files = Files(Path(self.stack.enter_context(tempfile.TemporaryDirectory())))
        self.hosted: list[Hosted] = []
        self.components: list[Component] = []
        self.num_made = 0
        self.occupied = [0, 0]

    def note(self, deed: str, how: str = "done") -> None:
        self.counts[deed, how] += 1

    def pick(self, number: int) -> Component:
        return self.components[number % len(self.components)]

    # -- components

    @precondition(lambda self: len(self.components) < MOST_COMPONENTS)
    @rule(width=st.sampled_from(WIDTHS), profile=PROFILES, placement=PLACEMENTS, precision=PRECISIONS)
    def register(self, width: int, profile: str, placement: str, precision: str) -> None:
        name = f"net{self.num_made}"
        module = build_net(seed=self.num_made, dim=width, doubles=2, singles=2)
        self.num_made += 1
        expected = compute(module) if precision == "as stored" else {}
        try:
            handle = manage({name: module}, profile, placement=placement, precision=precision, manager=self.manager)
        except REFUSALS as error:
            self.note("register", type(error).__name__)
            return
        component = Component(name, module, handle, precision == "as stored", placement, expected)
        self.components.append(component)
        self.note("register")

    @precondition(lambda self: self.components)
    @rule(number=st.integers(0, 9), size=st.sampled_from([1, 5]))
    def forward(self, number: int, size: int) -> None:
        self.run(self.pick(number), size, "forward")

    def run(self, component: Component, size: int, deed: str) -> None:
        """Compute once; what does not fit is refused."""
        try:
            with torch.no_grad():
                actual = component.module(input_of(component.module, size)).cpu()
        except (DoesNotFit, InvalidInput, torch.OutOfMemoryError) as error:
            self.note(deed, type(error).__name__)
            return
        expected = component.expected.setdefault(size, actual)
        assert torch.equal(actual, expected), f"{component.name} computes something else"
        self.note(deed)

    @precondition(lambda self: self.components)
    @rule(number=st.integers(0, 9), profile=PROFILES, placement=PLACEMENTS)
    def reprofile(self, number: int, profile: str, placement: str) -> None:
        component = self.pick(number)
        try:
            component.handle.reprofile(profile, placement=placement)
        except REFUSALS as error:
            self.note("reprofile", type(error).__name__)
            return
        component.placement = placement
        self.note("reprofile")

    @precondition(lambda self: self.components)
    @rule(number=st.integers(0, 9))
    def release(self, number: int) -> None:
        component = self.pick(number)
        if component.leases:
            self.note("release", "leased")
            return
        component.handle.release()
        self.components.remove(component)
        if component.is_exact:
            for size, output in compute(component.module).items():
                assert torch.equal(output, component.expected[size]), f"{component.name} after its release"
        self.note("release")

    @precondition(lambda self: self.components)
    @rule(number=st.integers(0, 9))
    def forget(self, number: int) -> None:
        """A program drops a component and its handle without a word."""
        component = self.pick(number)
        if component.leases:
            return
        self.components.remove(component)
        self.manager.discard(component.handle.members[0])
        self.note("forget")

    @precondition(lambda self: self.components)
    @rule(number=st.integers(0, 9), kept=st.booleans())
    def keep(self, number: int, kept: bool) -> None:
        self.pick(number).handle.keep(kept)
        self.note("keep")

    # -- components of a host, from files

    @precondition(lambda self: len(self.hosted) < MOST_HOSTED)
    @rule(number=st.integers(0, NUM_FILES - 1), device=GPUS, profile=st.sampled_from(["auto", "0.08MiB"]))
    def load_file(self, number: int, device: int, profile: str) -> None:
        self.load(self.files.paths[number], torch.device(f"sim:{device}"), profile)

    def load(self, path: Path, device: torch.device, profile: str) -> None:
        """As a host does it: from kept weights where there are some."""
        self.num_made += 1
        with FileTensors() as files:
            found = files.read(path)
            tensors = found[0] if found is not None else safetensors.torch.load_file(path)
            if found is None:
                files.watch(path, tensors)
            module = net_of_files(seed=0)
            module.load_state_dict(tensors)
            origins = files.origins(module)
        hosted = HostedComponent(
            f"hosted{self.num_made}", "diffusion", profile=parse_profile(profile, devices=["gpu:0", "gpu:1"])
        )
        hosted.came_from(origins)
        try:
            hosted.join(module, device)
        except REFUSALS as error:
            self.note("load a file", type(error).__name__)
            return
        assert not files.were_written()
        self.hosted.append(Hosted(path, module, hosted, device, self.files.expected[path]))
        self.note("load a file", "read" if found is None else "of kept weights")

    @precondition(lambda self: self.hosted)
    @rule(number=st.integers(0, 9), size=st.sampled_from([1, 5]))
    def sample(self, number: int, size: int) -> None:
        """A host loads a model, and computes with it."""
        part = self.hosted[number % len(self.hosted)]
        try:
            part.hosted.load()
            with torch.no_grad():
                actual = part.module(input_of(part.module, size).to(part.device)).cpu()
        except (DoesNotFit, InvalidInput, torch.OutOfMemoryError) as error:
            self.note("sample", type(error).__name__)
            return
        assert torch.equal(actual, part.expected[size]), f"{part.hosted.name} computes something else"
        self.note("sample")

    @precondition(lambda self: self.hosted)
    @rule(number=st.integers(0, 9))
    def unload(self, number: int) -> None:
        self.hosted[number % len(self.hosted)].hosted.unload()
        self.note("unload")

    @precondition(lambda self: self.hosted)
    @rule(number=st.integers(0, 9), in_run=st.sampled_from([True, True, True, False]), again=st.booleans())
    def drop(self, number: int, in_run: bool, again: bool) -> None:
        """A host forgets a model, mostly as a run begins, and may load its file again: what is as in there is kept."""
        before = len(self.manager.kept.parts)
        if in_run:
            self.manager.begin_run("drop", "a run")
        dropped = self.hosted.pop(number % len(self.hosted))
        dropped.hosted.leave()
        kept = len(self.manager.kept.parts) > before
        assert in_run or not kept
        if in_run:
            self.manager.end_run()
        self.note("drop", "kept" if kept else "gone")
        if again:
            self.books_are_true()
            self.load(dropped.path, dropped.device, "auto")

    @rule(number=st.integers(0, NUM_FILES - 1))
    def replace_file(self, number: int) -> None:
        self.files.replace(self.files.paths[number])
        self.note("replace a file")

    @rule(is_short=st.booleans())
    def change_watermark_of_host(self, is_short: bool) -> None:
        """All RAM is to be free, or none."""
        mark = HostMemory.now().total_bytes if is_short else 0
        self.manager.set_watermark("host", mark, mark)
        kept = self.manager.kept
        assert not (is_short and any(not kept.is_held(part) for part in kept.parts))
        self.note("watermark of the RAM", "short" if is_short else "enough")

    # -- leases

    @precondition(lambda self: self.components)
    @rule(number=st.integers(0, 9))
    def lease(self, number: int) -> None:
        component = self.pick(number)
        stack = ExitStack()
        held: AbstractContextManager[None] = self.manager.lease(component.handle.members[0])
        try:
            stack.enter_context(held)
        except (DoesNotFit, InvalidInput, torch.OutOfMemoryError) as error:
            self.note("lease", type(error).__name__)
            return
        component.leases.append(stack)
        self.note("lease")

    @precondition(lambda self: any(component.leases for component in self.components))
    @rule()
    def end_lease(self) -> None:
        component = next(component for component in self.components if component.leases)
        component.leases.pop().close()
        self.note("end of a lease")

    # -- loans and idle limits

    @rule(device=GPUS, kib=st.integers(1, 450))
    def lend(self, device: int, kib: int) -> None:
        gpu = self.manager.devices[f"gpu:{device}"]
        try:
            report = self.manager.commands.lend(kib * KIB, 60, gpu.name)
        except REFUSALS as error:
            self.note("lend", type(error).__name__)
            return
        assert (report.lent_bytes, report.free_bytes) == (kib * KIB, gpu.driver_free_bytes())
        self.note("lend")

    @rule(device=GPUS)
    def give_back(self, device: int) -> None:
        try:
            self.manager.commands.take_back(f"gpu:{device}")
        except UnsafeState as error:
            self.note("give back", type(error).__name__)
            return
        self.note("give back")

    @rule(num_loaded=st.none() | st.integers(1, 4), idle_s=st.sampled_from([None, IDLE_S]))
    def limit_idle(self, num_loaded: int | None, idle_s: float | None) -> None:
        self.manager.commands.set_idle_limits(IdleLimits(num_loaded=num_loaded, idle_s=idle_s))
        if num_loaded is not None:
            assert len(self.loaded()) <= max(num_loaded, len(self.loaded() & self.fixed()))
        self.note("idle limits")

    def loaded(self) -> set[str]:
        """Return the components with bytes on a device."""
        return self.manager.idle.loaded()

    def fixed(self) -> set[str]:
        """Return the components that do not leave: leased ones."""
        return {c.name for c in self.components if c.leases}

    @rule()
    def later(self) -> None:
        """Every loan's time is up, and everything has been idle for long; what looks after it does."""
        self.manager.event_log.begin -= LATER_S
        self.manager.look()
        assert not self.manager.capacity.loans.running()
        if self.manager.idle.limits.idle_s is not None and not any(c.leases for c in self.components):
            assert self.loaded() <= self.fixed() | {component.id for component in self.host.held}
        self.note("later")

    # -- memory

    @rule(device=GPUS, kib=st.integers(0, 500))
    def evict(self, device: int, kib: int) -> None:
        held = {c.name: self.manager.ledger.held(c.name, f"gpu:{device}") for c in self.components if c.leases}
        self.manager.free_memory(f"gpu:{device}", kib * KIB, "a test asked")
        for name, num_bytes in held.items():
            assert self.manager.ledger.held(name, f"gpu:{device}") == num_bytes, f"{name} is leased"
        self.note("evict")

    @rule()
    def free_idle(self) -> None:
        self.manager.commands.free_idle("a test asked")
        for component in self.components:
            if not component.leases:
                held = self.manager.ledger.bytes_by_place(component.name)
                assert not any(held.get(f"gpu:{index}") for index in range(2)), component.name
        self.note("free all idle")

    @rule(device=st.sampled_from(["gpu:0", "gpu:1", "*"]), low=st.integers(0, 300), span=st.integers(0, 100))
    def change_watermark(self, device: str, low: int, span: int) -> None:
        self.manager.set_watermark(device, low * KIB, (low + span) * KIB)
        self.note("watermark")

    @rule(device=GPUS, kib=st.integers(0, 350))
    def other_program(self, device: int, kib: int) -> None:
        """Another program takes memory of a device, or gives it back."""
        free = self.manager.devices[f"gpu:{device}"].free_bytes() + self.occupied[device]
        self.occupied[device] = min(kib * KIB, free)
        simdevice.occupy(device, self.occupied[device])
        self.note("another program")

    @rule(pages=st.integers(0, 8))
    def steer(self, pages: int) -> None:
        """The host of a component that it moves brings pages of it, or takes them away."""
        self.host.held.clear()
        room = self.manager.devices["gpu:0"].free_bytes() // SmallPages.PAGE_BYTES
        component = SmallPages("dynamic", min(pages, room))
        component.leave_first = lambda device: None
        self.host.held.append(component)
        self.manager.hosting.note_use(component)
        self.note("pages of the host")

    # -- trouble

    @precondition(lambda self: self.components)
    @rule(number=st.integers(0, 9), device=GPUS, nth=st.integers(1, 40), kind=st.sampled_from(["alloc", "copy"]))
    def fail(self, number: int, device: int, nth: int, kind: str) -> None:
        component = self.pick(number)
        arm = simdevice.fail_alloc if kind == "alloc" else simdevice.fail_copy
        arm(device, nth)
        try:
            with torch.no_grad():
                actual = component.module(input_of(component.module, 1)).cpu()
            expected = component.expected.setdefault(1, actual)
            assert torch.equal(actual, expected), f"{component.name} computes something else"
            self.note(f"failing {kind}", "not reached, or mended")
        except (DoesNotFit, InvalidInput, RuntimeError) as error:
            self.note(f"failing {kind}", type(error).__name__)
        finally:
            arm(device, 0)

    @precondition(lambda self: self.components)
    @rule(
        number=st.integers(0, 9),
        block=st.integers(0, 3),
        error=st.sampled_from([Interrupt, ValueError, torch.OutOfMemoryError]),
    )
    def interrupt(self, number: int, block: int, error: type[BaseException]) -> None:
        component = self.pick(number)
        blocks = [*component.module.doubles, *component.module.singles]
        try:
            with torch.no_grad(), raising_at(blocks[block].down, error):
                component.module(input_of(component.module, 1))
        except (DoesNotFit, InvalidInput) as refusal:
            self.note("interrupt", type(refusal).__name__)
        except (Interrupt, ValueError, torch.OutOfMemoryError) as raised:
            self.note("interrupt", type(raised).__name__)
            self.manager.recover()
        else:
            raise AssertionError("the error was lost")

    @rule(number=st.integers(0, 1000))
    def prompt(self, number: int) -> None:
        """A run with a node begins and ends."""
        self.manager.begin_run(str(number), "a run")
        self.manager.begin_node("1", "a node")
        self.manager.end_node()
        self.manager.end_run()
        self.note("run")

    @rule(steps=st.lists(st.sets(st.integers(0, 9), max_size=3), max_size=5), num_running=st.integers(0, 2))
    def foresee(self, steps: list[set[int]], num_running: int) -> None:
        """A host says which components its prompts will use, one of which may be gone by now."""
        known = sorted([*self.manager.members, "gone"])
        self.manager.foresee([[known[number % len(known)] for number in step] for step in steps], num_running)
        self.note("foresee")

    @precondition(lambda self: len(self.components) > 1)
    @rule(number=st.integers(0, 9), next_number=st.integers(0, 9), most=st.integers(1, 9))
    def load_early(self, number: int, next_number: int, most: int) -> None:
        """While one component computes, blocks of the next one are copied to memory that is free."""
        self.run(self.pick(number), 1, "forward")
        running, coming = (self.pick(each).handle.members[0].id for each in (number, next_number))
        self.manager.foresee([[running], [coming]])
        early = self.manager.leases.look_ahead.early
        before = {member: self.manager.ledger.bytes_by_place(member) for member in self.manager.members}
        copied = 0
        while copied < most and (begun := early.begin(coming)[0]) is not None:
            share, copy = begun
            share.early.fill(copy)
            copied += 1
        for member in before.keys() - {coming}:
            assert self.manager.ledger.bytes_by_place(member) == before[member], "nothing leaves for it"
        self.note("load early", "blocks" if copied else "nothing")

    # -- the books

    @invariant()
    def books_are_true(self) -> None:
        if not hasattr(self, "manager"):
            return
        self.manager.ledger.check()
        for index in range(2):
            pages = sum(component.device_bytes().get(f"gpu:{index}", 0) for component in self.host.held)
            used = simdevice.stats(index).used_bytes - pages
            assert self.manager.ledger.used(f"gpu:{index}") == used, f"gpu:{index}"
        assert self.manager.ledger.used("pinned") == simdevice.pinned().used_bytes

    def teardown(self) -> None:
        if not hasattr(self, "manager"):
            return
        for component in self.components:
            for stack in component.leases:
                stack.close()
        self.hosted.clear()
        gc.collect()  # exceptions and modules in cycles hold weights
        self.manager.release_all()
        self.manager.ledger.check()
        assert not self.manager.kept.parts
        self.host.held.clear()
        self.components.clear()
        for index in range(2):
            simdevice.occupy(index, 0)
        gc.collect()  # exceptions and modules in cycles hold weights
        self.stack.close()


def input_of(module: nn.Module, size: int) -> torch.Tensor:
    """Return an input of a number of tokens."""
    return torch.linspace(-1, 1, size * module.embed.in_features).reshape(1, size, -1)
