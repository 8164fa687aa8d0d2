"""`manage`, the public Python function: takes a module, a dict of modules or a pipeline; returns a handle."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import NoneType, TracebackType
from typing import Any

import torch
from torch import nn

from .errors import InvalidInput, allowed_values, quoted, require
from .manager.claims.kept import EVERYTHING_KEPT, parse_limit
from .manager.default import default_manager
from .manager.departures import Departure
from .manager.manager import MemoryManager
from .manager.member import Member
from .model_loading import source_of
from .options.placement import AUTO, Placement, parse_placement
from .options.precision import Precision, PrecisionRequest, Precisions, parse_precision
from .options.profile import OffloadProfile
from .options.profile_arguments import build_profile
from .pipeline_parts import Parts
from .planner.plan import Plan
from .planner.run import Use
from .runtime.changes.other_offloaders import ExecutionMark
from .transfer.devices import list_devices
from .verification.findings import Verification
from .verify import verify
from .weights.discovery import components_of, discover_components, holds_pipeline
from .weights.known_forms import FORMS
from .weights.source import WeightsSource

__all__ = ["Managed", "manage"]


class Managed:
    """Modules under management; `release`, or leaving the ``with`` block, restores them.

    Args:
        choices: what the user chose, as `read_choices` returns it.
    """

    def __init__(
        self, manager: MemoryManager, members: list[Member], plan: Plan, pipeline: Any, choices: dict[str, Any]
    ) -> None:
        self.manager = manager
        self.members = members
        self.planned = plan
        """What was planned as it was managed, or given another profile."""
        self.pipeline = pipeline
        self.choices = choices
        self.left_to_others: set[Member] = set()
        """Components that this handle released while other handles keep them."""
        self.parts = None if pipeline is None else Parts(pipeline, self.has_devices)
        self.mark_execution_device()

    @property
    def components(self) -> tuple[str, ...]:
        return tuple(member.name for member in self.members)

    @property
    def plan(self) -> Plan:
        """The plan in force: what was planned, and what replaced that since, as after an out-of-memory error.

        What a run does is left out where it was reckoned for other shares.
        """
        parts = tuple(member.managed.plan for member in self.members)
        before = {part.component: part.shares for part in self.planned.components}
        is_same = all(
            [(share.device, share.resident, share.device_bytes) for share in part.shares]
            == [(share.device, share.resident, share.device_bytes) for share in before.get(part.component, ())]
            for part in parts
        )
        return replace(self.planned, components=parts, run=self.planned.run if is_same else None)

    @property
    def device(self) -> torch.device:
        """Where inputs and latents should live: the device of the diffusion model, else of the first component."""
        diffusion = (m for m in self.members if m.managed.component.kind == "diffusion")
        return next(diffusion, self.members[0]).managed.primary.torch_device

    def expect(self, activation_bytes: Mapping[str, int]) -> None:
        """Tell what the forwards to come of components are predicted to take beside weights and inputs, by name.

        Plans keep that free on the component's first device until a forward of that size was seen. Moves nothing.
        """
        self.manager.expect(
            {member: activation_bytes[member.name] for member in self.members if member.name in activation_bytes}
        )

    def has_devices(self) -> bool:
        """Whether any component computes on an accelerator."""
        return any(not member.managed.primary.is_cpu for member in self.members)

    def mark_execution_device(self) -> None:
        # A diffusers pipeline whose weights rest on the host asks its modules' `_hf_hook.execution_device` where to
        # make latents; the convention is accelerate's, the attribute is ours and leaves with `release`.
        if self.pipeline is not None:
            inner = self.find_inner_components()
            for member in self.members:
                mark = ExecutionMark(member.id, self.device, partial(self.manager.load_now, member))
                for module in (member.managed.module, *inner.get(member, ())):
                    module._hf_hook = mark
                member.watch(self.parts.refuse_new if self.parts is not None else None)
                member.add_marker(self)
                if member.managed.answers is not None:
                    member.managed.answers.report_outside(self.device)

    def unmark_execution_device(self) -> bool:
        """Remove what `mark_execution_device` left; returns whether it was there."""
        for member in self.members:
            member.remove_marker(self)
        leaving, inner = [m for m in self.members if m not in self.left_to_others], self.find_inner_components()
        modules = [module for member in leaving for module in (member.managed.module, *inner.get(member, ()))]
        marked = [module for module in modules if isinstance(vars(module).get("_hf_hook"), ExecutionMark)]
        if self.pipeline is None or not marked:
            return False
        for module in marked:
            del module._hf_hook
        return True

    def find_inner_components(self) -> dict[Member, list[nn.Module]]:
        """Return the pipeline's components that are parts of managed modules, by the member that contains them."""
        components = (components_of(self.pipeline) or {}).values()
        roots = {member.managed.module for member in self.members}
        others = [part for part in components if isinstance(part, nn.Module) and part not in roots]
        if not others:
            return {}
        trees = {member: set(member.managed.module.modules()) for member in self.members}
        return {member: [part for part in others if part in tree] for member, tree in trees.items()}

    def report(self) -> dict[str, Any]:
        """Return the manager's report, which these components are part of."""
        return self.manager.report()

    def keep(self, kept: bool = True, *, at_most: str | None = None) -> Managed:
        """Evict these components only when nothing else is left to evict; returns the handle.

        Args:
            at_most: how much of a device each of them keeps, such as ``"6GiB"`` or ``"50%"``; None: all that it holds.

        Raises:
            InvalidInput: not an amount, or more than a device has.
        """
        limit = EVERYTHING_KEPT if at_most is None else parse_limit(at_most)
        self.manager.commands.keep(self.members, kept, limit)
        return self

    def unload(self, device: str | None = None, *, reason: str = "unloaded by its user") -> list[Departure]:
        """Take these components off a device, or off all, now; they are loaded again when they are used.

        Returns what each of them freed, as the driver counts it.

        Args:
            reason: for the event log.

        Raises:
            InvalidInput: no such device.
            UnsafeState: one of them computes; those before it have left.
        """
        return [
            left
            for member in self.members
            for left in self.manager.commands.release_from(member, device, reason=reason)
        ]

    def reprofile(
        self,
        profile: str | int | OffloadProfile | None = None,
        *,
        placement: str | None = None,
        precision: str | PrecisionRequest = None,
        **overrides: Any,
    ) -> Plan:
        """Give the components another profile, placement or precision; they leave their devices until the next use.

        What is not given stays as it is. Without any argument the weights are packed again, with layers that were
        added and without those that were removed. Takes what `manage` takes; overrides change the given profile, or
        else the current one. Modules that replaced others in a pipeline, or are new in it, are managed from then on.

        Raises:
            InvalidInput, DoesNotFit: nothing has changed.
            UnsafeState: one of them computes, or was released.
        """
        new = self.parts.find_new() if self.parts is not None else {}
        choices = read_choices(
            self.choices["profile"] if profile is None else profile,
            self.choices["placement"] if placement is None else placement,
            self.choices["precision"] if precision is None else precision,
            list(dict.fromkeys([*self.components, *new])),
            overrides,
        )
        was_marked = self.unmark_execution_device()  # the manager takes no module that has accelerate's hooks
        try:
            if new:
                self.take_parts(new, choices)
            else:
                self.planned = self.manager.replace(self.members, **choices)
        finally:
            if was_marked:
                self.mark_execution_device()
        self.choices = choices
        return self.plan

    def take_parts(self, new: Mapping[str, nn.Module], choices: dict[str, Any]) -> None:
        """Manage the new modules of the pipeline in place of those that they replace. Raises as `reprofile`."""
        assert self.parts is not None
        before = list(self.members)
        old = [member for member in before if member.name in new]
        with self.manager.exclusive():
            self.manager.refuse_computing(before)
            self.manager.refuse_lending([member for member in old if not self.is_others(member)])
            for member in old:
                if self.is_others(member):
                    member.drop_holder()
                else:
                    self.manager.remove(member)
        added: list[Member] = []
        try:
            added = self.join(new, choices)
            taken = {member.name: member for member in added}
            kept = [taken.pop(member.name, member) for member in before]
            self.planned = self.manager.replace([*kept, *taken.values()], **choices)
        except BaseException:
            for member in added:
                self.manager.remove(member)
            former = self.join({member.name: member.managed.module for member in old}, self.choices)
            again = {member.name: member for member in former}
            self.members = [again.get(member.name, member) for member in before]
            raise
        self.members = [*kept, *taken.values()]
        self.parts.note_taken(new)

    def join(self, modules: Mapping[str, nn.Module], choices: dict[str, Any]) -> list[Member]:
        """Manage more modules as part of this handle's call of `manage`."""
        if not modules:
            return []
        sources = {name: source for name, module in modules.items() if (source := source_of(module)) is not None}
        members, _ = self.manager.add(dict(modules), **choices, sources=sources, name=None, node_id=None)
        for member in members:
            member.come_with(self.members[0])
        return members

    def run_micro_batches(self, calls: Sequence[Callable[[], Any]], component: str | None = None) -> list[Any]:
        """Make independent calls of a split module so that its devices compute at the same time; returns the results.

        Each result has the same bits as if the calls were made one after the other. They are where nothing can overlap:
        on one device, or where blocks stream; see `ManagedComponent.run_micro_batches`. A placement such as
        ``gpu:0&gpu:1/6`` cuts the blocks so that they overlap most. No call may take what another one returns, nor
        write to what another one reads, but for what the module itself writes to its arguments. Calls in which other
        managed components compute, too, are waited for.

        Args:
            calls: such as ``[lambda: model(first), lambda: model(second)]``.
            component: which component they call; None: the split one.

        Raises:
            InvalidInput: no such component, or what is to be called is no function.
            Exception: what a call raises; the later ones are not made then.
        """
        calls = list(calls) if isinstance(calls, Iterable) else [calls]
        if not all(map(callable, calls)):
            raise InvalidInput("run_micro_batches takes functions without arguments, such as lambda: model(first)")
        by_name = {member.name: member for member in self.members}
        if component is not None and component not in by_name:
            raise InvalidInput(
                f"this call manages no component {quoted(component)}; {allowed_values(component, by_name)}"
            )
        split = [member for member in self.members if len(member.managed.shares) > 1] or self.members
        member = split[0] if component is None else by_name[component]
        return member.managed.run_micro_batches(calls)

    def verify(self, *args: Any, **kwargs: Any) -> Verification:
        """Make one call with the engine and one without, and compare them: bit by bit, and block by block.

        What is called is the module, or the pipeline, that was managed; or the first argument, where that is a
        function or another module (``managed.verify(vae.decode, latents)``). Arguments are copied first, and whatever
        the call changes (random states, buffers, caches, where the weights are) is put back; see `verify.verify`.

        Raises:
            InvalidInput: several modules and nothing that calls them.
            UnsafeState, DoesNotFit: the managed call was refused.
        """
        call, rest = self.choose_call(args)
        objects = [] if self.pipeline is None else [self.pipeline]
        return verify(self.manager, self.members, call, *rest, objects=objects, **kwargs)

    def choose_call(self, args: tuple[Any, ...]) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """Return what to call, and its arguments."""
        if args and callable(args[0]) and not isinstance(args[0], torch.Tensor):
            return args[0], args[1:]
        if callable(self.pipeline):
            return self.pipeline, args
        if len(self.members) > 1:
            raise InvalidInput(
                f"verify: there are {len(self.members)} modules ({', '.join(self.components)}); "
                "give the function that calls them first, as in managed.verify(vae.decode, latents)"
            )
        return self.members[0].managed.module, args

    def is_others(self, member: Member) -> bool:
        """Whether another handle manages a component, too, so that it stays when this one releases it."""
        return member in self.left_to_others or member.num_holders > 1

    def leave_to_others(self) -> None:
        """Leave to other handles the components that they manage, too. Idempotent."""
        for member in self.members:
            if member not in self.left_to_others and member.num_holders > 1:
                self.left_to_others.add(member)
                member.drop_holder()
                if self.parts is not None and member.look == self.parts.refuse_new:
                    member.watch(None)

    def release(self) -> None:
        """Remove the modules from devices and their hooks; their weights are in plain memory again. Idempotent.

        Weights that rested in RAM stay where they are, without a copy, as tensors with a storage of their own; a
        deleted one gives its pages back, except those that it shares with a neighbour ([Note: pieces] in
        `transfer/slab_memory.py`). ``resize_`` cannot enlarge such a storage. On Windows, and where the driver has no
        call to lock memory, they are copied. Encoded weights come back decoded. Those that rest in
        their file are read from it, except where the module came without memory and was not written to: it leaves
        without, and `load_weights` reads them.

        Raises:
            InvalidInput: weights rest in a file that has changed: they stay without memory, all else is released.
                Call it again when the file is restored to read them.
            UnsafeState: one of them computes; or, when all are released, weights were changed meanwhile to what the
                engine cannot take over: these are as they were before.
        """
        self.leave(tells=True)

    def leave(self, *, tells: bool) -> None:
        """Release the modules; ``tells``: raise for changes that this undid."""
        if sys.is_finalizing():  # torch cannot be called any more, and all memory goes with the process
            return
        with self.manager.exclusive():
            leaving = [member for member in self.members if not self.is_others(member)]
            self.manager.refuse_computing(leaving)
            self.manager.refuse_lending(leaving)
            self.leave_to_others()
            self.unmark_execution_device()
            for member in leaving:
                self.manager.remove(member)
        if tells:
            for member in leaving:  # now: they are removed when the lock is free
                member.managed.changes.tell_undone_at_release()

    def discard(self) -> None:
        """Release modules that are no longer used: they keep no weights, so nothing is copied or read from files.

        For finalizers: never waits, like `MemoryManager.remove`.
        """
        if sys.is_finalizing():
            return
        self.leave_to_others()
        self.unmark_execution_device()
        for member in self.members:
            if member not in self.left_to_others:
                self.manager.discard(member)

    def __enter__(self) -> Managed:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if any(
            self.manager.has(member) for member in self.members
        ):  # else it was released before: nothing is left to do
            self.leave(tells=exc is None)  # what went wrong in the body is not replaced by another error


def manage(
    target: Any,
    profile: str | int | OffloadProfile = AUTO,
    *,
    placement: str | Placement = AUTO,
    precision: str | PrecisionRequest = None,
    files: Mapping[str, str | Path | Sequence[str | Path] | WeightsSource] | None = None,
    blocks: Mapping[str, str] | None = None,
    manager: MemoryManager | None = None,
    name: str | None = None,
    node_id: str | None = None,
    uses: Sequence[Use] = (),
    **overrides: Any,
) -> Managed:
    """Take modules under management; they move when they compute, and leave when others need the memory.

    Packs every weight into host slabs, page-locked where that helps; nothing goes to a device yet. Modules and their
    parameters stay the same objects.

    Args:
        target: a module, a dict or a list of modules, a diffusers pipeline, or an object that has any of these as
            attributes (`discover_components`).
        profile: ``auto`` fills what is free; ``1`` to ``5`` or their names as in mmgp; a budget such as ``6GiB`` or
            ``gpu:0=80%`` limits the weights. `highwater profiles` prints them all.
        placement: where each component computes and rests, in the placement grammar.
        precision: how the blocks' weights rest: ``as stored``, ``fp8 scaled`` or another storage form, for each
            component as in ``diffusion=fp8 scaled,text=bf16``, or a `Precision`, such as
            ``Precision.of(torch.float8_e5m2, granularity="layer")``; None, or ``by profile``, is what the profile says.
        files: the safetensors files of components by name, one path or several; those may rest on disk, at tier
            ``disk`` or where RAM is short, and their modules may be on the meta device. What `load_model` built knows
            its own.
        blocks: the blocks of components, as a glob of module paths such as ``layers.*``, where the structure does not
            show them.
        manager: the manager to join; by default the process-wide one.
        name: a prefix for the components' ids; ``node_id`` the node that loads them, for the report.
        uses: what the run to come computes with them, as far as that is known: it chooses devices for ``auto``, and
            what forwards are predicted to take beside the weights stays free.
        overrides: fields of the profile: ``budgets``, ``pinned``, ``prefetch_blocks``, ``quantize``, ``on_demand``,
            ``unload``, ``reserve``, ``compile``. Each replaces the whole field: ``budgets`` leaves none of the
            profile's own, while the text ``4,vae=1GiB`` keeps its others.

    Raises:
        InvalidInput: one line naming the value and what is allowed; the target is as it was.
        DoesNotFit: a component's least form exceeds its device; the target is as it was.
    """
    require(manager, (MemoryManager, NoneType), what="manager", allowed="a MemoryManager or None")
    require(name, (str, NoneType), what="name", allowed="text or None")
    require(node_id, (str, NoneType), what="node_id", allowed="text or None")
    require(uses, (list, tuple), what="uses", allowed="a list of Use")
    for use in uses:
        require(use, Use, what="one of uses", allowed="a Use")
    modules = discover_components(target)
    if manager is None:
        manager = default_manager()
    sources = {component: source for component, module in modules.items() if (source := source_of(module)) is not None}
    choices = read_choices(profile, placement, precision, list(modules), overrides)
    named = read_files({} if files is None else files)
    for component, source in named.items():
        if component in modules and any(parameter.is_meta for parameter in modules[component].parameters()):
            source.find_encoded()
    members, plan = manager.add(
        modules,
        **choices,
        sources=sources | named,
        patterns=read_patterns(blocks),
        name=name,
        node_id=node_id,
        uses=uses,
    )
    return Managed(manager, members, plan, target if holds_pipeline(target) else None, choices)


def read_patterns(blocks: Any) -> dict[str, str] | None:
    """Return the patterns of blocks by component. Raises `InvalidInput`."""
    if blocks is None:
        return None
    if not isinstance(blocks, Mapping) or not all(isinstance(text, str) for item in blocks.items() for text in item):
        raise InvalidInput(f"blocks {quoted(blocks)}; allowed: a dict of patterns by component, such as layers.*")
    return dict(blocks)


def read_files(files: Any) -> dict[str, WeightsSource]:
    """Return the weight sources of components from the paths of their files. Raises `InvalidInput`."""
    if not isinstance(files, Mapping):
        raise InvalidInput(f"files {quoted(files)}; allowed: a dict of paths by component")
    sources = {}
    for component, paths in files.items():
        several = [paths] if isinstance(paths, str | Path) else paths
        if isinstance(several, list | tuple) and several and all(isinstance(path, str | Path) for path in several):
            sources[component] = WeightsSource(several)
        elif isinstance(paths, WeightsSource):
            sources[component] = paths
        else:
            raise InvalidInput(
                f"files of {quoted(component)}: {quoted(paths)}; allowed: the path of a .safetensors file, or a list"
            )
    return sources


def read_choices(
    profile: str | int | OffloadProfile,
    placement: str | Placement,
    precision: str | PrecisionRequest,
    components: Sequence[str],
    overrides: Mapping[str, Any],
) -> dict[str, Any]:
    """Return what the user chose, parsed for this machine. Raises `InvalidInput`."""
    devices = [device.name for device in list_devices()]
    if not isinstance(placement, Placement):
        placement = parse_placement(placement, devices=devices, components=components)
    if not isinstance(precision, Precision | Precisions):
        precision = parse_precision(precision, forms=FORMS, components=components)
    return {
        "placement": placement,
        "profile": build_profile(profile, devices=devices, components=components, **overrides),
        "precision": precision,
    }
