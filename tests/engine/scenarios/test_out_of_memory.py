"""After a forward ran out of memory the next one fits, if any plan does, and the user reads what was done."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import nn

from highwater.memory import manage
from highwater.memory.manager.watermark import unlearned_bytes
from highwater.memory.options.placement import parse_placement
from highwater.memory.options.profile import parse_profile
from highwater.memory.planner.sizes import least_bytes
from highwater.memory.units import GIB, KIB, MIB

DIM = 64
TRIES = 2


class Hungry(nn.Module):
    """Layers beside which a forward takes ``scale`` times its input at one place, or at each.

    Args:
        place: the number of a layer, or -1 for all; from ``len(widths)`` on beside them all.
    """

    def __init__(self, widths: list[int], place: int = -1, scale: int = 1) -> None:
        super().__init__()
        pairs = ((nn.Linear(DIM, width), nn.Linear(width, DIM)) for width in widths)
        self.layers = nn.ModuleList(Greedy(nn.Sequential(*pair)) for pair in pairs)
        self.place, self.scale = place, scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number, layer in enumerate(self.layers):
            x = layer(x, self.scale if self.place in (-1, number) else 0)
        return take(x, self.scale) if self.place >= len(self.layers) else x


class Greedy(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor, scale: int) -> torch.Tensor:
        return take(self.inner(x), scale)


def take(x: torch.Tensor, scale: int) -> torch.Tensor:
    """Return the input as it is, after half of what is taken and then the other half were there for a moment."""
    if not scale:
        return x
    first = x.new_zeros(x.numel() * scale // 2)
    second = x.new_zeros(x.numel() * scale // 2)
    return x + (first[:1] + second[:1])


def build(widths: list[int], place: int = -1, scale: int = 1, seed: int = 0) -> Hungry:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Hungry(widths, place, scale).eval().requires_grad_(False)


def least_of(member) -> int:
    managed_component = member.managed
    plan = managed_component.plan
    return sum(
        least_bytes(managed_component.component, share.blocks, plan.forms, first=not index)
        for index, share in enumerate(plan.shares)
    )


def tries_until_it_fits(manager, forward: Callable[[], torch.Tensor]) -> tuple[int, torch.Tensor, list[str]]:
    """Run until it comes through; the books are right after each failure."""
    lines = []
    for number in range(1, 5):
        try:
            return number, forward(), lines
        except torch.OutOfMemoryError as error:
            lines.append(str(error).splitlines()[-1])
        manager.ledger.check()
        for member in manager.members.values():
            assert not member.leases and not member.managed.passes.is_busy()
            assert not any(share.computing for share in member.managed.shares)
    raise AssertionError(lines)


SHAPES = {
    "activations larger than all weights": ([64] * 12, -1, 24, 1024),
    "small weights": ([16] * 6, -1, 8, 1024),
    "a peak in one block": ([256] * 8, 5, 8, 768),
    "a peak in the first block": ([256] * 8, 0, 8, 768),
    "a peak beside the blocks": ([256] * 8, 8, 8, 768),
    "large weights": ([512] * 8, -1, 4, 256),
    "unequal blocks": ([64, 512, 64, 256, 128, 512, 64, 64], 3, 8, 512),
}


@torch.no_grad()
@pytest.mark.parametrize("precision", ["as stored", "fp8 scaled"])
@pytest.mark.parametrize("shape", SHAPES, ids=SHAPES)
@pytest.mark.parametrize("has_runs", [True, False], ids=["runs", "no runs"])
def test_the_second_try_fits_if_any_plan_does(sim, machine, shape: str, precision: str, has_runs: bool) -> None:
    widths, place, scale, length = SHAPES[shape]
    x = torch.randn(1, length, DIM)
    with machine(512) as manager, manage(build(widths, place, scale), precision=precision, manager=manager) as managed:
        (member,) = managed.members
        want = member.managed.module(x).cpu()
        need, whole, least = member.activation_bytes["gpu:0"], manager.ledger.used("gpu:0"), least_of(member)
    # With the input there it fits beside the least form, and not beside all weights.
    for slack in (0, (whole - least) // 2):
        with machine((least + need + slack) / MIB) as manager:
            module = build(widths, place, scale)
            with manage(module, precision=precision, manager=manager) as managed:

                def forward(module=module, manager=manager) -> torch.Tensor:
                    if has_runs:
                        manager.begin_run("r", "r")
                    try:
                        return module(x).cpu()
                    finally:
                        manager.end_run()

                tries, found, lines = tries_until_it_fits(manager, forward)
                assert tries == TRIES
                assert torch.equal(found, want)
                assert "the next run keeps" in lines[0] and "free for model" in lines[0]
                for _ in range(4):  # and so it stays
                    assert torch.equal(forward(), want)
                (share,) = managed.members[0].managed.plan.shares
                assert share.keeps_bytes >= need
                if slack > need // 8:
                    assert share.device_bytes > least + slack // 4  # not much more leaves than has to
            if precision == "as stored":
                pairs = zip(
                    module.state_dict().values(), build(widths, place, scale).state_dict().values(), strict=True
                )
                assert all(torch.equal(found, want) for found, want in pairs)


@torch.no_grad()
def test_an_error_says_what_was_asked_for_and_what_holds_the_device(sim, machine) -> None:
    x = torch.randn(1, 1024, DIM)
    with machine(6) as manager:
        other, module = build([64] * 4), build([1024] * 8, 3, 12)
        with manage({"text_encoder": other}, manager=manager), manage({"transformer": module}, manager=manager):
            other(x[:, :1])
            sim.occupy(0, MIB // 2)
            with pytest.raises(torch.OutOfMemoryError) as caught:
                module(x)
            line = str(caught.value).splitlines()[-1]
            del caught  # its frames hold tensors
            sim.occupy(0, 0)
            assert re.search(
                r"transformer ran out of memory on gpu:0: [\d.]+MiB more were asked for; of 6.00MiB: ", line
            )
            for holder in ("transformer [2-4]", "text_encoder 0.1", "activations and other tensors 0."):
                assert re.search(rf"{holder}[\d.]*MiB", line), line
            assert "the driver and other programs 0.50MiB, free" in line


@torch.no_grad()
def test_what_was_learned_is_said_by_plan_and_event(sim, machine) -> None:
    x = torch.randn(1, 1024, DIM)
    with machine(6) as manager, manage(build([1024] * 8, 3, 12), manager=manager) as managed:
        with pytest.raises(
            torch.OutOfMemoryError, match=r"(?s)Tried to allocate.*\nHighwater: model ran out of memory on"
        ):
            managed.members[0].managed.module(x)
        (event,) = [event for event in manager.report()["events"] if event["kind"] == "error"]
        assert "the next run keeps" in event["reason"] and event["component"] == "model"
        for _ in range(2):
            managed.members[0].managed.module(x)
        assert "free for activations: an earlier run needed it" in managed.members[0].managed.plan.text()


# -- any shape


@settings(max_examples=25)
@given(
    widths=st.lists(st.sampled_from([8, 64, 128, 300]), min_size=1, max_size=10),
    place=st.integers(-1, 10),
    scale=st.integers(0, 40),
    length=st.sampled_from([1, 60, 400]),
    exclude=st.floats(0, 1.2),
    others=st.integers(0, 2),
)
def test_what_fits_any_plan_fits_in_two_tries(
    machine, widths: list[int], place: int, scale: int, length: int, exclude: float, others: int
) -> None:
    x = torch.randn(1, length, DIM)
    with torch.no_grad():
        with machine(512) as manager, manage(build(widths, place, scale), manager=manager) as managed:
            (member,) = managed.members
            want = member.managed.module(x).cpu()
            need, whole, least = member.activation_bytes["gpu:0"], manager.ledger.used("gpu:0"), least_of(member)
        total = least + need + int(exclude * (whole - least)) + 1
        with machine(total / MIB) as manager:
            idle = {f"idle{number}": build([64], seed=number) for number in range(others)}
            for name, module in idle.items():
                assume(sum(weight.numel() * 4 for weight in module.parameters()) + 64 * KIB < total)
                manage({name: module}, manager=manager)
                module(torch.zeros(1, 1, DIM))
            module = build(widths, place, scale)
            with manage(module, manager=manager):
                for number in range(4):
                    manager.begin_run(str(number), "r")
                    tries, found, _ = tries_until_it_fits(manager, lambda: module(x).cpu())
                    assert tries <= (TRIES if not number else 1)
                    assert torch.equal(found, want)
                    manager.end_run()


@torch.no_grad()
@pytest.mark.parametrize("short", [0, 1])
def test_a_split_makes_room_where_it_is_missing(machine, short: int) -> None:
    widths, x = [256] * 12, torch.randn(1, 512, DIM)
    place = 2 if short == 0 else 9
    with machine(512, 512) as manager:
        module = build(widths, place, 16)
        with manage(module, placement="gpu:0&gpu:1@0.5", manager=manager) as managed:
            want = module(x).cpu()
            need = managed.members[0].activation_bytes[f"gpu:{short}"]
            share = managed.members[0].managed.plan.shares[short]
            other = managed.members[0].managed.plan.shares[1 - short]
            room = share.device_bytes // 3 + need
    sizes = [8.0, 8.0]
    sizes[short] = room / MIB
    with machine(*sizes) as manager:
        module = build(widths, place, 16)
        with manage(module, placement="gpu:0&gpu:1@0.5", manager=manager) as managed:
            tries, found, lines = tries_until_it_fits(manager, lambda: module(x).cpu())
            assert tries == TRIES and torch.equal(found, want)
            assert f"ran out of memory on gpu:{short}" in lines[0]
            for _ in range(3):
                assert torch.equal(module(x).cpu(), want)
            shares = managed.members[0].managed.plan.shares
            assert len(shares[1 - short].resident) == len(other.resident)  # nothing was wrong there


@torch.no_grad()
def test_idle_components_leave_for_what_a_failure_told(machine) -> None:
    x = torch.randn(1, 1024, DIM)
    with machine(6) as manager:
        other = build([512] * 8)
        module = build([256] * 8, 3, 16)
        with manage({"text_encoder": other}, manager=manager), manage({"transformer": module}, manager=manager):
            manager.begin_run("1", "1")
            other(x[:, :1])
            held = manager.ledger.held("text_encoder", "gpu:0")
            with pytest.raises(torch.OutOfMemoryError, match="free for transformer"):
                module(x)
            assert manager.ledger.held("text_encoder", "gpu:0") == held
            manager.begin_run("2", "2")
            other(x[:, :1])
            module(x)
            manager.begin_run("3", "3")
            module(x)
            assert manager.ledger.held("transformer", "gpu:0") > 0
            evictions = [event for event in manager.report()["events"] if event["kind"] == "evict"]
            assert {event["component"] for event in evictions} == {"text_encoder"}


@torch.no_grad()
def test_a_failure_of_one_part_is_a_warning_to_the_others_of_its_call(machine) -> None:
    """A pipeline whose transformer fails, and whose VAE would have: the second run is through."""
    x, latents = torch.randn(1, 1024, DIM), torch.randn(1, 512, DIM)
    with machine(6) as manager:
        transformer, vae = build([256] * 8, 3, 16), build([256] * 8, 3, 36, seed=1)
        with manage({"transformer": transformer, "vae": vae}, manager=manager):

            def pipeline() -> torch.Tensor:
                manager.begin_run("run", "run")
                try:
                    transformer(x)
                    vae(latents[:, :1])  # as a convolution before the decoder
                    return vae(latents)
                finally:
                    manager.end_run()

            tries, _, _ = tries_until_it_fits(manager, pipeline)
            assert tries == TRIES
            for _ in range(3):
                pipeline()


# -- what does not fit, and what is not ours


@torch.no_grad()
def test_what_no_plan_fits_is_said_and_evicts_nobody_in_vain(machine) -> None:
    x = torch.randn(1, 1024, DIM)
    with machine(6) as manager:
        other, module = build([64] * 4), build([256] * 8, 3, 64)  # needs 16 MiB
        manage({"text_encoder": other}, manager=manager), manage({"transformer": module}, manager=manager)
        lines = []
        for number in range(6):
            manager.begin_run(str(number), "run")
            other(x[:, :1])
            with pytest.raises(torch.OutOfMemoryError) as caught:
                module(x)
            lines.append(str(caught.value).splitlines()[-1])
            del caught  # its frames hold tensors
            assert manager.ledger.held("text_encoder", "gpu:0") or number == 1
            manager.end_run()
        assert "the next run keeps" in lines[0]
        assert all("no plan leaves more: choose a smaller size" in line for line in lines[1:4])
        # Encoded, a block would need scratch to be widened in: more than it saves.
        assert all("fewer frames; the next run loads it as usual" in line for line in lines[1:4])
        assert [bool(re.search(r"with [\d.]+MiB free it failed, too", line)) for line in lines] == [
            number in (2, 3, 4) for number in range(6)
        ]
        assert torch.equal(module(x[:, :4]).cpu(), build([256] * 8, 3, 64).to("sim:0")(x[:, :4].to("sim:0")).cpu())


@torch.no_grad()
def test_what_another_program_takes_in_a_pass_is_not_learned(machine, sim) -> None:
    x = torch.randn(1, 256, DIM)
    with machine(3.6) as manager, manage(build([256] * 12, 6, 8), manager=manager) as managed:
        module = managed.members[0].managed.module
        want = module(x).cpu()
        plan = managed.members[0].managed.plan
        handle = module.layers[2].register_forward_hook(lambda *_: sim.occupy(0, 2 * MIB))
        with pytest.raises(torch.OutOfMemoryError, match=r"another program took [\d.]+MiB meanwhile"):
            module(x)
        handle.remove()
        sim.occupy(0, 0)
        assert torch.equal(module(x).cpu(), want)
        assert managed.members[0].managed.plan.shares[0].resident == plan.shares[0].resident
        key = manager.capacity.key_of(managed.members[0].managed.component, "gpu:0")
        assert not any(need.failed_bytes for need in manager.capacity.needs.known[key].values())


@torch.no_grad()
def test_memory_that_is_taken_in_every_pass_is_learned_the_second_time(machine, sim) -> None:
    """A library that allocates past torch, in the same process, looks like another program."""
    x = torch.randn(1, 64, DIM)
    with machine(3.6) as manager, manage(build([256] * 12, 6, 8), manager=manager) as managed:
        module = managed.members[0].managed.module
        module.layers[2].register_forward_pre_hook(lambda *_: sim.occupy(0, 2 * MIB))
        module.register_forward_pre_hook(lambda *_: sim.occupy(0, 0), prepend=True)
        for words in ("another program took", "the next run keeps"):
            with pytest.raises(torch.OutOfMemoryError, match=words):
                module(x)
            sim.occupy(0, 0)
        for _ in range(3):
            module(x)
            sim.occupy(0, 0)


@torch.no_grad()
def test_what_the_forward_handles_itself_is_no_failure(machine) -> None:
    class Careful(Hungry):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            try:
                return super().forward(x)
            except torch.OutOfMemoryError:
                pass
            self.scale = 1
            return super().forward(x)

    x = torch.randn(1, 1024, DIM)
    with machine(6) as manager:
        module = Careful([256] * 8, 3, 64).eval().requires_grad_(False)
        with manage(module, manager=manager) as managed:
            module(x)
            assert not [event for event in manager.report()["events"] if event["kind"] == "error"]
            (need,) = manager.capacity.needs.known[
                manager.capacity.key_of(managed.members[0].managed.component, "gpu:0")
            ].values()
            assert not need.failed_bytes


@torch.no_grad()
def test_an_error_that_is_handled_around_a_forward_is_none_of_it(machine) -> None:
    class Silent(Hungry):
        def forward(self, x: torch.Tensor) -> None:
            super().forward(x)

    with machine(6) as manager:
        module = Silent([64] * 4).eval().requires_grad_(False)
        with manage(module, manager=manager):
            try:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
            except torch.OutOfMemoryError as error:
                assert module(torch.randn(1, 4, DIM)) is None
                assert str(error).count("\n") == 0
        assert not [event for event in manager.report()["events"] if event["kind"] == "error"]


@torch.no_grad()
def test_a_need_never_makes_a_component_impossible(machine) -> None:
    """At tier device, or under a budget, the user's word counts, whatever was learned."""
    x = torch.randn(1, 512, DIM)
    for choices in ({"placement": "gpu:0:device"}, {"profile": "1.2MiB"}, {"profile": "auto,reserve=0.5MiB"}):
        with machine(4) as manager, manage(build([512] * 8, 3, 64), manager=manager, **choices) as managed:
            module = managed.members[0].managed.module
            for _ in range(4):
                with pytest.raises(torch.OutOfMemoryError):
                    module(x)
            module(x[:, :1])


@torch.no_grad()
def test_a_failure_while_loading_loads_less_the_next_time(machine, sim) -> None:
    x = torch.randn(1, 4, DIM)
    with machine(8) as manager, manage(build([256] * 8), manager=manager) as managed:
        module = managed.members[0].managed.module
        want = build([256] * 8).to("sim:0")(x.to("sim:0")).cpu()
        sim.fail_alloc(0, 1)  # a later one is tried again without tags, and this fails one only
        with pytest.raises(torch.OutOfMemoryError, match="while it was loaded; the next run loads as little"):
            module(x)
        assert not manager.ledger.used("gpu:0")
        assert torch.equal(module(x).cpu(), want)
        assert managed.members[0].managed.plan.shares[0].streamed
        for _ in range(2):
            manager.begin_run("later", "later")
            assert torch.equal(module(x).cpu(), want)
        assert not managed.members[0].managed.plan.shares[0].streamed


# -- what a host loads


def host(manager, modules: dict[str, nn.Module], kinds: dict[str, str]) -> list:
    members, _ = manager.add(
        modules,
        placement=parse_placement("gpu:0", devices=["gpu:0"]),
        profile=parse_profile("auto", devices=["gpu:0"]),
        precision=None,
        name=None,
        node_id=None,
        kinds=kinds,
        is_hosted=True,
    )
    return members


@torch.no_grad()
@pytest.mark.parametrize("unloads", [True, False])
def test_a_hosted_model_shrinks_as_it_is_entered(machine, unloads: bool) -> None:
    """Its host may load it again after a failure, as much of it as before, or not."""
    x = torch.randn(1, 512, DIM)
    with machine(512) as manager, manage(build([256] * 12, 5, 12), manager=manager) as managed:
        want = managed.members[0].managed.module(x).cpu()
        need = managed.members[0].activation_bytes["gpu:0"]
    with machine(0.6 + need / MIB) as manager:
        module, other = build([256] * 12, 5, 12), build([64] * 4, seed=1)
        member, control = host(
            manager, {"model": module, "control": other}, {"model": "diffusion", "control": "control"}
        )
        for number in range(4):
            manager.begin_run(str(number), "run")
            manager.hosting.load(control)
            manager.hosting.load(member)
            if not number:
                with pytest.raises(torch.OutOfMemoryError, match="the next run keeps"):
                    module(x.to("sim:0"))
                if unloads:
                    manager.hosting.unload(member)
                    manager.hosting.unload(control)
            else:
                for _ in range(2):
                    other(x[:, :1].to("sim:0"))
                    assert torch.equal(module(x.to("sim:0")).cpu(), want)
            manager.end_run()
        assert member.managed.plan.shares[0].resident
        errors = [event for event in manager.report()["events"] if event["kind"] == "error"]
        assert [event["component"] for event in errors] == ["model"]


@torch.no_grad()
def test_a_vae_whose_host_goes_on_in_tiles_is_not_kept_small_by_what_failed(machine) -> None:
    whole, tile = torch.randn(1, 4096, DIM), torch.randn(1, 256, DIM)
    with machine(6) as manager:
        vae, other = build([128] * 4, 2, 16), build([256] * 8, seed=1)  # 16 MiB for the whole, never to be had
        member, model = host(manager, {"vae": vae, "model": other}, {"vae": "vae", "model": "diffusion"})
        for number in range(5):
            manager.begin_run(str(number), "run")
            manager.hosting.load(model)
            other(tile.to("sim:0"))
            manager.hosting.load(member)
            with pytest.raises(torch.OutOfMemoryError):
                vae(whole.to("sim:0"))
            manager.hosting.load(member)
            for _ in range(4):
                vae(tile.to("sim:0"))
            assert len(member.managed.plan.shares[0].resident) == 4
            if number > 1:  # the first failure asks for all there is once more, which does not do
                assert len(model.managed.plan.shares[0].resident) == 8
            manager.end_run()


@torch.no_grad()
def test_a_peak_inside_a_nested_component_counts_for_the_outer_one_and_the_node(machine) -> None:
    inner = build([64] * 2, seed=1)

    class Outer(Hungry):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = take(x, 32)
            x = inner(x)
            return super().forward(x)

    x = torch.randn(1, 512, DIM)
    with machine(64) as manager:
        outer = Outer([64] * 4, scale=0).eval().requires_grad_(False)
        with manage({"inner": inner}, manager=manager), manage({"outer": outer}, manager=manager) as managed:
            manager.begin_run("run", "run")
            manager.begin_node("1", "Sample")
            outer(x)
            node = manager.end_node()
            taken = 32 * x.numel() * 4
            assert managed.members[0].activation_bytes["gpu:0"] >= taken  # not what was loaded of the inner one
            assert managed.members[0].activation_bytes["gpu:0"] < taken + 4 * x.numel() * 4
            assert node["peak_bytes"]["gpu:0"] >= node["activation_bytes"]["gpu:0"] >= taken
            (device,) = [device for device in manager.report()["devices"] if device["name"] == "gpu:0"]
            assert device["peak_bytes"] == node["peak_bytes"]["gpu:0"]


@torch.no_grad()
def test_a_node_that_fails_is_reported_with_its_peak(machine) -> None:
    x = torch.randn(1, 1024, DIM)
    with machine(6) as manager, manage(build([256] * 8, 3, 64), manager=manager) as managed:
        manager.begin_run("run", "run")
        manager.begin_node("1", "Sample")
        with pytest.raises(torch.OutOfMemoryError):
            managed.members[0].managed.module(x)
        manager.end_run()
        (node,) = manager.report()["nodes"]
        assert node["peak_bytes"]["gpu:0"] > node["weights_bytes"]["gpu:0"]


# -- sizes, margins, decay


@torch.no_grad()
def test_a_larger_input_needs_no_less_and_a_smaller_one_has_a_need_of_its_own(machine) -> None:
    module = build([256] * 8, 3, 8)
    with machine(16) as manager, manage(module, manager=manager) as managed:
        (member,) = managed.members
        for length in (1024, 64):
            manager.begin_run(str(length), "run")
            module(torch.randn(1, length, DIM))
        for number in range(2):
            manager.begin_run(str(number), "run")
            module(torch.randn(1, 64, DIM))
        sizes = manager.capacity.needs.known[manager.capacity.key_of(member.managed.component, "gpu:0")]
        small, large = sorted(need.seen_bytes for need in sizes.values())
        assert large > 10 * small
        for size, need in sizes.items():
            larger = (*size[:2], *(part + 8 for part in size[2:]))
            assert manager.capacity.needed(member, "gpu:0", size).num_bytes == need.seen_bytes
            assert not manager.capacity.needed(member, "gpu:0", larger).is_known
            assert manager.capacity.needed(member, "gpu:0", larger).num_bytes == need.seen_bytes


@torch.no_grad()
def test_a_need_that_is_met_no_more_decays(machine) -> None:
    class Changing(Hungry):
        """Needs less from some run on, with inputs of the same size."""

    module = Changing([256] * 8, 3, 24).eval().requires_grad_(False)
    x = torch.randn(1, 512, DIM)
    with machine(4) as manager, manage(module, manager=manager) as managed:
        tries_until_it_fits(manager, lambda: module(x))
        module(x)
        (member,) = managed.members
        kept = [manager.capacity.needed(member, "gpu:0").num_bytes]
        resident = len(member.managed.plan.shares[0].resident)
        module.scale = 1
        for number in range(24):
            manager.begin_run(str(number), "run")
            module(x)
            kept.append(manager.capacity.needed(member, "gpu:0").num_bytes)
        assert all(later <= earlier for earlier, later in itertools.pairwise(kept))
        assert kept[-1] < kept[0] // 3
        assert len(member.managed.plan.shares[0].resident) > resident


@pytest.mark.parametrize(
    ("total", "kept"),
    [(64 * MIB, 64 * MIB * 15 // 100), (GIB - 1, (GIB - 1) * 15 // 100), (GIB, GIB // 2), (2 * GIB, GIB // 2),
     (3 * GIB, GIB // 2), (4 * GIB, 4 * GIB * 15 // 100), (24 * GIB, 24 * GIB * 15 // 100), (80 * GIB, 4 * GIB)],
)  # fmt: skip
def test_before_anything_is_known_a_part_of_the_device_stays_free(total: int, kept: int) -> None:
    assert unlearned_bytes(total) == kept


@torch.no_grad()
@pytest.mark.parametrize(
    ("name", "choices", "watermark", "kept"),
    [("transformer", {}, None, True), ("vae", {}, None, True), ("text_encoder", {}, None, False),
     ("transformer", {}, 0, False), ("transformer", {"profile": "transformer=unlimited"}, None, False),
     ("transformer", {"profile": "auto,reserve=1MiB"}, None, False)],
)  # fmt: skip
def test_diffusion_models_and_vaes_leave_it_free_unless_the_user_says_what_is(
    machine, name: str, choices: dict[str, str], watermark: int | None, kept: bool
) -> None:
    x = torch.randn(1, 1, DIM)
    with machine(20) as manager:
        manager.capacity.watermarks.marks.clear()
        if watermark is not None:
            manager.set_watermark("*", watermark, watermark)
        low = manager.capacity.watermarks.of("gpu:0").low_bytes
        other, module = build([1024] * 4, seed=1), build([1024] * 30)  # 2 and 15 MiB
        with (
            manage({"text_encoder": other}, manager=manager),
            manage({name: module}, manager=manager, **choices) as managed,
        ):
            text = managed.plan.text()
            assert ("keeps 3.00MiB free for activations: " in text) is False  # it fits, nothing streams
            other(x)
            module(x)
            free = manager.devices["gpu:0"].free_bytes()
            assert (free >= 3 * MIB) is kept
            assert free >= low


# -- another card


@torch.no_grad()
def test_what_one_card_needed_is_kept_free_on_another(machine) -> None:
    """The first run on a smaller card fits; from then on its own need counts there."""
    widths, x = [256] * 8, torch.randn(1, 768, DIM)
    with machine(512) as manager, manage(build(widths, 5, 8), manager=manager) as managed:
        want = managed.members[0].managed.module(x).cpu()
        need, whole = managed.members[0].activation_bytes["gpu:0"], manager.ledger.used("gpu:0")
    with machine(512, (need + whole // 2) / MIB) as manager:
        manage(build(widths, 5, 8), placement="gpu:0", manager=manager).members[0].managed.module(x)
        module = build(widths, 5, 8)
        with manage(module, placement="gpu:1", manager=manager) as managed:
            assert torch.equal(module(x).cpu(), want)
            assert not [event for event in manager.report()["events"] if event["kind"] == "error"]
            for _ in range(2):
                manager.begin_run("later", "later")
                assert torch.equal(module(x).cpu(), want)
            assert "an earlier run needed it" in managed.members[0].managed.plan.text()


@torch.no_grad()
def test_the_plan_of_the_handle_is_the_one_in_force(machine) -> None:
    x = torch.randn(1, 1024, DIM)
    with machine(6) as manager, manage(build([1024] * 8, 3, 12), manager=manager) as managed:
        module = managed.members[0].managed.module
        assert not managed.plan["model"].streams
        with pytest.raises(torch.OutOfMemoryError, match="the next run keeps") as caught:
            module(x)
        kept = re.search(r"keeps ([\d.]+MiB) free", str(caught.value))
        del caught
        module(x)
        assert managed.plan["model"] is managed.members[0].managed.plan
        assert managed.plan["model"].streams
        assert kept is not None and f"keeps {kept[1]} free for activations" in managed.plan.text()
        assert managed.reprofile("1.5MiB")["model"] is managed.plan["model"]


@torch.no_grad()
def test_what_helps_is_said_only_where_the_numbers_say_so(machine) -> None:
    """A device with more room is named; tier 'device' is told to be the reason."""
    x = torch.randn(1, 1024, DIM)
    for sizes, choices, told in (
        ((4,), {}, "tiles, or fewer frames; the next run loads it as usual"),
        ((4, 2), {}, "tiles, or fewer frames; the next run loads it as usual"),
        ((4, 9), {}, "fewer frames, or placement gpu:1; the next run loads it as usual"),
        ((4,), {"placement": "gpu:0:device"}, "or tier 'pinned'; the next run loads all of it again, as tier 'device'"),
    ):
        choices = {"placement": "gpu:0"} | choices
        with machine(*sizes) as manager, manage(build([256] * 8, 3, 64), manager=manager, **choices) as managed:
            for _ in range(2):
                with pytest.raises(torch.OutOfMemoryError) as caught:
                    managed.members[0].managed.module(x)
                line = str(caught.value)
                del caught
            assert told in line, line
