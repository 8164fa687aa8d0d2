"""A call that ran out of memory is repeated once, where its host can do that; it computes what it would have."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn

from highwater.memory.hosted_component import has_hooks_of_others, repeat_if_short
from highwater.memory.options.placement import parse_placement
from highwater.memory.options.precision import Precision
from highwater.memory.options.profile import parse_profile
from highwater.memory.units import MIB

DIM = 64
DEVICE = "sim:0"


class Layer(nn.Module):
    """A block that counts its calls in a buffer, takes ``scale`` times its input, and draws random numbers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(DIM, width), nn.Linear(width, DIM)
        self.register_buffer("num_calls", torch.zeros(4))

    def forward(self, x: torch.Tensor, scale: int) -> torch.Tensor:
        self.num_calls += 1
        large = x.new_zeros(x.numel() * scale) if scale else x[:0].flatten()
        noise = torch.randn(x.shape, device=x.device) + torch.randn(x.shape).to(x.device)
        return x + self.down(self.up(x)) * self.num_calls[0] + large[:1].sum() + 0.1 * noise


class Inner(nn.Module):
    """What a host's models do: changes inputs in place, empties lists, keeps caches and counters on itself."""

    def __init__(self, widths: list[int]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(width) for width in widths)
        self.norm = nn.LayerNorm(DIM)
        self.register_buffer("total", torch.zeros(1))
        self.step, self.cache = 0, {}
        self.scale = 0
        self.call: Callable[[Callable[[], Any], Any], Any] = lambda call, given: call()

    def forget(self) -> None:
        self.step, self.cache = 0, {}
        for buffer in self.buffers():
            buffer.zero_()

    def forward(self, x: torch.Tensor, control: dict[str, list[torch.Tensor]]) -> torch.Tensor:
        return self.call(lambda: self.compute(x, control), ((x,), {"control": control}))

    def compute(self, x: torch.Tensor, control: dict[str, list[torch.Tensor]]) -> torch.Tensor:
        self.step += 1
        self.cache[self.step] = self.step
        self.total += 1
        x.mul_(0.5)
        for layer in self.layers:
            x = layer(x, self.scale)
            if control["outputs"]:
                x = x + control["outputs"].pop()
        return self.norm(x) * self.total + len(self.cache)


class Model(nn.Module):
    def __init__(self, widths: list[int]) -> None:
        super().__init__()
        self.diffusion_model = Inner(widths)


def build(widths: list[int]) -> Model:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Model(widths).eval().requires_grad_(False)


def inputs(length: int = 64) -> tuple[torch.Tensor, dict[str, list[torch.Tensor]]]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(1, length, DIM, generator=generator).to(DEVICE)
    return x, {"outputs": [torch.randn(1, length, DIM, generator=generator).to(DEVICE) for _ in range(3)]}


@torch.inference_mode()
def sample(model: Model, *, steps: int = 3, length: int = 64) -> torch.Tensor:
    """As an ancestral sampler: noise of the CPU and of the device is added between the steps."""
    torch.manual_seed(7)
    x, _ = inputs(length)
    for _ in range(steps):
        _, control = inputs(length)
        x = model.diffusion_model(x, control) + 0.1 * torch.randn(x.shape, device=DEVICE)
        assert len(control["outputs"]) == max(0, 3 - len(model.diffusion_model.layers))
    return (x + torch.randn(x.shape).to(DEVICE)).cpu()


@contextmanager
def hosted(
    manager: Any,
    model: Model,
    profile: str = "auto",
    precision: Precision | None = None,
    placement: str = "gpu:0",
    *,
    why_not: str | None = None,
    is_hosted: bool = True,
) -> Iterator[Any]:
    """Load a model as a host does, one that can repeat its calls."""
    (member,), _ = manager.add(
        {"model": model},
        placement=parse_placement(placement, devices=["gpu:0", "gpu:1"]),
        profile=parse_profile(profile, devices=["gpu:0", "gpu:1"]),
        precision=precision,
        name=None,
        node_id=None,
        kinds={"model": "diffusion"},
        is_hosted=is_hosted,
    )
    inner = model.diffusion_model
    inner.call = lambda call, given: repeat_if_short(inner, call, given, why_not=lambda _: why_not, manager=manager)
    manager.hosting.load(member)
    yield member
    inner.call = lambda call, given: call()


def events(manager: Any, kind: str) -> list[dict[str, Any]]:
    return [event for event in manager.report()["events"] if event["kind"] == kind]


def assert_books(sim: Any, manager: Any) -> None:
    manager.recover()
    manager.ledger.check()
    for member in manager.members.values():
        assert not member.leases and not member.managed.passes.is_busy()
    for name, device in manager.devices.items():
        if not device.is_cpu:
            assert sim.stats(device.torch_device.index).used_bytes == manager.ledger.used(name)


FORMS = {
    "resident": ("auto", Precision.AS_STORED, "gpu:0"),
    "streamed": ("0.4MiB", Precision.AS_STORED, "gpu:0"),
    "pageable": ("0.4MiB,pinned=none", Precision.AS_STORED, "gpu:0"),
    "split": ("auto", Precision.AS_STORED, "gpu:0&gpu:1"),
    "split and streamed": ("gpu:0=0.3MiB,gpu:1=0.3MiB", Precision.AS_STORED, "gpu:0&gpu:1"),
    "fp8": ("auto", Precision.ENCODED, "gpu:0"),
    "fp8 streamed": ("0.25MiB", Precision.ENCODED, "gpu:0"),
}
WIDTHS = [256] * 6
# How many allocations apart those are that fail in the quick sample.
STRIDE = 23


@pytest.mark.parametrize(
    "stride", [STRIDE, pytest.param(1, marks=[pytest.mark.slow, pytest.mark.faults])], ids=["sample", "all"]
)
@pytest.mark.parametrize("form", FORMS)
def test_a_failed_allocation_of_a_step_leaves_the_result_as_it_is(sim, machine, form: str, stride: int) -> None:
    """Any of them, one after the other; what cannot be repeated is an error that leaves all right."""
    num_devices = 1 + form.startswith("split")
    with machine(*[16] * num_devices) as manager:
        model = build(WIDTHS)
        with hosted(manager, model, *FORMS[form]) as member:
            want = sample(model)
            after = state_of(model)
        manager.remove(member)
    counts = Counter[str]()
    for device, nth in failures(num_devices, stride):
        with machine(*[16] * num_devices) as manager:
            model = build(WIDTHS)
            with hosted(manager, model, *FORMS[form]) as member:
                sim.fail_alloc(device, nth)
                try:
                    got = sample(model)
                except torch.OutOfMemoryError:
                    got = None
                sim.fail_alloc(device, 0)
                if not sum(sim.stats(index).num_ooms for index in range(num_devices)):
                    counts[f"allocations on gpu:{device}"] = nth - 1
                    OVER.add(device)
                counts["repeated"] += bool(events(manager, "recover"))
                counts["errors"] += got is None
                if got is None:
                    model.diffusion_model.forget()
                    assert torch.equal(sample(model), want)
                else:
                    assert torch.equal(got, want), (device, nth)
                    assert state_of(model) == after
                assert_books(sim, manager)
            manager.remove(member)
    print(f"{form}: {dict(counts)}")
    assert counts["repeated"] > counts["errors"]


OVER: set[int] = set()


def failures(num_devices: int, stride: int) -> Iterator[tuple[int, int]]:
    """Yield device and number of the allocation that fails, until a device has no such allocation."""
    OVER.clear()
    for device in range(num_devices):
        nth = 1
        while device not in OVER:
            yield device, nth
            nth += stride


def state_of(model: Model) -> list[Any]:
    inner = model.diffusion_model
    return [inner.step, inner.cache, *(buffer.cpu().tolist() for buffer in inner.buffers())]


# -- a real shortage


def hungry(model: Model, scale: int) -> Model:
    model.diffusion_model.scale = scale
    return model


def room_for(machine: Any, scale: int, length: int) -> tuple[torch.Tensor, int, int]:
    """Return what a model gives that takes much beside its weights, what it takes there, and what they take."""
    with machine(512) as manager:
        model = hungry(build(WIDTHS), scale)
        with hosted(manager, model) as member:
            want = sample(model, length=length)
            need, weights = member.activation_bytes["gpu:0"], manager.ledger.used("gpu:0")
        manager.remove(member)
    return want, need, weights


SCALE, LENGTH = 16, 256


def test_a_step_that_does_not_fit_beside_the_weights_is_repeated_once(sim, machine) -> None:
    want, need, weights = room_for(machine, SCALE, LENGTH)
    with machine((weights * 0.8 + need) / MIB) as manager:
        model = hungry(build(WIDTHS), SCALE)
        with hosted(manager, model) as member:
            manager.begin_run("run", "run")
            assert torch.equal(sample(model, length=LENGTH), want)
            (told,) = events(manager, "recover")
            assert "ran out of memory on gpu:0" in told["reason"] and "the call is repeated once" in told["reason"]
            assert told["bytes"] > 0
            assert not events(manager, "error")
            manager.end_run()
            assert member.managed.plan.shares[0].streamed
            assert_books(sim, manager)
            manager.begin_run("next", "next")
            manager.hosting.unload(member)
            manager.hosting.load(member)
            model.diffusion_model.forget()
            assert torch.equal(sample(model, length=LENGTH), want)
            assert len(events(manager, "recover")) == 1
            assert member.managed.plan.shares[0].keeps_bytes >= need
        manager.remove(member)


def test_idle_components_leave_for_the_second_try(machine) -> None:
    want, need, weights = room_for(machine, SCALE, LENGTH)
    with machine((weights * 1.6 + need) / MIB) as manager:
        model, other = hungry(build(WIDTHS), SCALE), build([256] * 6)
        with hosted(manager, other) as idle, hosted(manager, model) as member:
            assert manager.ledger.held(idle.id, "gpu:0") > weights * 0.9
            assert torch.equal(sample(model, length=LENGTH), want)
            assert len(events(manager, "recover")) == 1
            assert {event["component"] for event in events(manager, "evict")} >= {idle.id}
            other.diffusion_model.forget()
            assert sample(other).isfinite().all()  # its host counts it as loaded: it can still compute
        for each in (member, idle):
            manager.remove(each)


def test_what_no_plan_fits_is_an_error_after_one_call(machine) -> None:
    _, need, weights = room_for(machine, SCALE, LENGTH)
    with machine((weights * 0.2 + need * 0.7) / MIB) as manager:
        model = hungry(build(WIDTHS), SCALE)
        with hosted(manager, model) as member:
            for number in range(3):
                with pytest.raises(
                    torch.OutOfMemoryError, match="Highwater: model ran out of memory on gpu:0"
                ) as caught:
                    sample(model, length=LENGTH)
                assert str(caught.value).count("Highwater:") == 1
                del caught
                assert len(events(manager, "error")) == number + 1
        manager.remove(member)


def test_a_second_failure_goes_on_and_is_learned(sim, machine) -> None:
    with machine(16) as manager:
        model = build(WIDTHS)
        with hosted(manager, model) as member:
            calls = []
            handle = model.diffusion_model.layers[2].register_forward_pre_hook(lambda *_: fail(sim, calls))
            with pytest.raises(torch.OutOfMemoryError, match="the next run keeps") as caught:
                sample(model)
            assert str(caught.value).count("Highwater:") == 1
            del caught
            handle.remove()
            assert len(calls) == 2 and len(events(manager, "recover")) == len(events(manager, "error")) == 1
            assert_books(sim, manager)
        manager.remove(member)


def fail(sim: Any, calls: list[int]) -> None:
    calls.append(1)
    sim.fail_alloc(0, 1)


@pytest.mark.parametrize("is_hosted", [True, False])
def test_where_it_is_refused_the_exception_goes_on(sim, machine, is_hosted: bool) -> None:
    """And a component that no host loads is never repeated: its caller may be in the middle of anything."""
    want, need, weights = room_for(machine, SCALE, LENGTH)
    with machine((weights * 0.8 + need) / MIB) as manager:
        model = hungry(build(WIDTHS), SCALE)
        with hosted(manager, model, why_not="another pack takes part in it", is_hosted=is_hosted) as member:
            if not is_hosted:
                inner = model.diffusion_model
                inner.call = lambda call, given: repeat_if_short(
                    inner, call, given, why_not=lambda _: None, manager=manager
                )
            with pytest.raises(torch.OutOfMemoryError, match="the next run keeps"):
                sample(model, length=LENGTH)
            assert not events(manager, "recover")
            assert model.diffusion_model.step == 1
            assert_books(sim, manager)
            model.diffusion_model.forget()
            assert torch.equal(sample(model, length=LENGTH), want)
        manager.remove(member)


def test_what_the_first_try_allocated_is_gone_in_the_second(sim, machine) -> None:
    alive: list[Any] = []

    class Keeping(Inner):
        def compute(self, x: torch.Tensor, control: dict[str, list[torch.Tensor]]) -> torch.Tensor:
            assert not any(large() is not None for large in alive)
            large = x.new_zeros(1 << 10)
            alive.append(weakref.ref(large))
            try:
                return super().compute(x, control)
            except torch.OutOfMemoryError as error:  # as attention does that tries smaller pieces, and gives up
                raise torch.OutOfMemoryError(str(error)) from error

    with machine(16) as manager:
        model = build(WIDTHS)
        model.diffusion_model.__class__ = Keeping
        with hosted(manager, model) as member:
            want = sample(model)
            model.diffusion_model.forget()
            calls: list[int] = []
            handle = model.diffusion_model.layers[4].register_forward_pre_hook(
                lambda *_: None if calls else fail(sim, calls)
            )
            assert torch.equal(sample(model), want)
            handle.remove()
            assert len(events(manager, "recover")) == 1 and len(alive) == 7
        manager.remove(member)


def test_an_input_that_the_call_resized_cannot_be_put_back(sim, machine) -> None:
    with machine(16) as manager:
        model = build(WIDTHS)
        with hosted(manager, model) as member:
            x, control = inputs()

            def resize(given: torch.Tensor) -> None:
                given.resize_(1, 32, DIM)
                sim.fail_alloc(0, 1)

            handle = model.diffusion_model.layers[1].register_forward_pre_hook(lambda *_, given=x: resize(given))
            with pytest.raises(torch.OutOfMemoryError, match="Highwater"):
                model.diffusion_model(x, control)
            handle.remove()
            del x, control, handle
            assert not events(manager, "recover")
            assert_books(sim, manager)
            assert not member.leases
        manager.remove(member)


@pytest.mark.parametrize("when", ["in the second try", "while room is made"])
def test_an_interrupt_of_the_second_try_leaves_the_books_true(sim, machine, monkeypatch, when: str) -> None:
    with machine(16) as manager:
        model = build(WIDTHS)
        with hosted(manager, model) as member:
            want = sample(model)
            model.diffusion_model.forget()
            calls: list[int] = []

            def trouble(*_: Any) -> None:
                calls.append(1)
                if len(calls) == 1:
                    sim.fail_alloc(0, 1)
                else:
                    raise KeyboardInterrupt

            handle = model.diffusion_model.layers[2].register_forward_pre_hook(trouble)
            if when == "while room is made":
                original = member.managed.load
                monkeypatch.setattr(member.managed, "load", lambda *given: (original(*given), trouble()))
            with pytest.raises(KeyboardInterrupt):
                sample(model)
            monkeypatch.undo()
            handle.remove()
            assert_books(sim, manager)
            model.diffusion_model.forget()
            assert torch.equal(sample(model), want)
        manager.remove(member)


def test_hooks_of_others_are_told_from_ours(machine) -> None:
    with machine(16) as manager:
        model = build(WIDTHS)
        with hosted(manager, model, "0.4MiB") as member:
            sample(model)
            assert not has_hooks_of_others(model)
            handle = model.diffusion_model.layers[1].up.register_forward_hook(lambda *_: None)
            assert has_hooks_of_others(model)
            handle.remove()
        manager.remove(member)
