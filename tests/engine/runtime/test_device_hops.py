"""Whatever a parent does between its blocks, and a callee with what it is given: a split computes the same."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict, namedtuple
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from highwater.memory import manage
from highwater.memory.options.placement import parse_placement
from highwater.memory.options.profile import parse_profile

WIDTH = 64
PLACES = {
    "resident": ("auto", "gpu:0"),
    "streamed": ("0.1MiB", "gpu:0"),
    "split": ("auto", "gpu:0&gpu:1"),
    "split and streamed": ("gpu:0=0.1MiB,gpu:1=0.08MiB", "gpu:0&gpu:1"),
    "three devices": ("auto", "gpu:1&gpu:0&gpu:2"),
}
MODES = {"no_grad": torch.no_grad, "inference": torch.inference_mode}
Pair = namedtuple("Pair", ["shift", "scale"])


@dataclasses.dataclass
class Modulation:
    shift: torch.Tensor
    scale: torch.Tensor


@dataclasses.dataclass(frozen=True)
class Frozen:
    inner: list[Modulation]


class Slotted:
    """A plain object that holds a tensor, as LTX's compressed timesteps do."""

    __slots__ = ("data", "note")

    def __init__(self, data: torch.Tensor) -> None:
        self.data, self.note = data, "kept"


# -- blocks: each takes a tensor [B, T, D] and side inputs


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("kept", torch.zeros(2, 4, WIDTH))

    def new(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(x))


class Plain(Base):
    def forward(self, x: torch.Tensor, side: Any) -> torch.Tensor:
        return x + self.new(x)


class InPlace(Base):
    def forward(self, x: torch.Tensor, side: Any) -> None:
        x.add_(self.new(x))


class InPlaceAndReturned(Base):
    def forward(self, x: torch.Tensor, side: Any) -> torch.Tensor:
        x[:, 1:] *= self.new(x)[:, 1:]
        return x


class Viewing(Base):
    """Returns views of what it was given, with a new tensor in between."""

    def forward(self, x: torch.Tensor, side: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        x[:, 0].mul_(0.5)
        return x[:, :2], self.new(x), x.view(2, 4, WIDTH)


class Chunks(Base):
    """Returns two views of one new tensor."""

    def forward(self, x: torch.Tensor, side: Any) -> list[torch.Tensor]:
        return list(self.new(x).chunk(2, dim=1))


class Remembering(Base):
    """Returns a buffer of its own, which the next call overwrites."""

    def forward(self, x: torch.Tensor, side: Any) -> torch.Tensor:
        self.kept.copy_(self.new(x)[:2, :4])
        return self.kept


class Modulated(Base):
    def forward(self, x: torch.Tensor, side: Any) -> dict[str, torch.Tensor]:
        mod, pair, plain = side["mod"], side["pair"], side["plain"]
        x = self.new(x) * mod.inner[0].scale + mod.inner[0].shift
        return OrderedDict(x=x + pair.shift - pair.scale * plain.data)


class Communicating(Base):
    """Empties, fills and changes the containers that it is given."""

    def forward(self, x: torch.Tensor, side: Any) -> torch.Tensor:
        side["count"] = side.get("count", 0) + 1
        side["last"] = self.new(x)
        if side["queue"]:
            x = x + side["queue"].pop(0)
        side["queue"].append(side["last"] * 0.5)
        side["fresh"]["inside"] = [side["last"]]
        side["mod"].inner[0].shift = side["mod"].inner[0].shift + 1
        side["plain"].data.mul_(0.9)
        return x


KINDS = [Plain, InPlace, InPlaceAndReturned, Viewing, Chunks, Remembering, Modulated, Communicating]


class Program(nn.Module):
    """Runs a list of steps over named tensors; the weights of the rest are used without a call."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.position = nn.Parameter(torch.randn(1, 4, WIDTH))
        self.blocks = nn.ModuleList(kind() for kind in KINDS)
        self.steps: list[tuple[Any, ...]] = []

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        first = self.embed(x) + self.position
        tensors = [first, first * 2]
        shifts = self.embed(first[:, :1]).chunk(2, dim=0)
        side = {
            "mod": Frozen([Modulation(shifts[0], shifts[1])]),
            "pair": Pair(*self.embed(first[:, 1:2]).split(1, dim=0)),
            "plain": Slotted(first[:, 2:3].clone()),
            "queue": [],
            "fresh": {},
        }
        collected = []
        for step, one, other in self.steps:
            a, b = tensors[one % len(tensors)], tensors[other % len(tensors)]
            if isinstance(step, int):
                whole = a if a.shape == first.shape else first
                result = self.blocks[step](whole, side=side)
                if isinstance(result, dict):
                    result = list(result.values())
                tensors += [result] if isinstance(result, torch.Tensor) else result or []
            elif step == "add":
                tensors.append(a + b[:, :1])
            elif step == "add_":
                a.add_(b[:, :1] * 0.5)
            elif step == "cat":
                tensors.append(torch.cat([a, b], dim=1)[:, -4:])
            elif step == "view":
                tensors.append(a[:, :3])
            elif step == "collect":
                collected.append(a)
            elif step == "join" and collected:
                tensors.append(sum(tensor.mean(dim=1, keepdim=True) for tensor in collected) + first)
            elif step == "read" and side["queue"]:
                tensors.append(side["queue"][-1] + side["last"].mean() + side["fresh"]["inside"][0])
        return [*tensors, *side["queue"], side["mod"].inner[0].shift, side["plain"].data]


steps = st.tuples(
    st.integers(0, len(KINDS) - 1) | st.sampled_from(["add", "add_", "cat", "view", "collect", "join", "read"]),
    st.integers(0, 20),
    st.integers(0, 20),
)


def build() -> Program:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Program().eval().requires_grad_(False)


def assert_same(got: list[torch.Tensor], want: list[torch.Tensor], device: str) -> None:
    assert len(got) == len(want)
    for place, (one, other) in enumerate(zip(got, want, strict=True)):
        assert str(one.device) == device
        assert torch.equal(one.cpu(), other.cpu()), place


programs_of_steps = st.lists(st.lists(steps, min_size=4, max_size=14), min_size=1, max_size=2)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("place", PLACES)
@given(programs=programs_of_steps)
@settings(max_examples=6)
def test_any_program_computes_the_same(machine, place: str, mode: str, programs: list[list[tuple[Any, ...]]]) -> None:
    run_programs(machine, place, mode, programs)


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("place", PLACES)
@given(programs=programs_of_steps)
@settings(max_examples=150, suppress_health_check=list(HealthCheck))
def test_many_programs_compute_the_same(machine, place: str, mode: str, programs: list[list[tuple[Any, ...]]]) -> None:
    run_programs(machine, place, mode, programs)


def run_programs(machine: Any, place: str, mode: str, programs: list[list[tuple[Any, ...]]]) -> None:
    profile, placement = PLACES[place]
    home = "sim:1" if placement.startswith("gpu:1") else "sim:0"
    with machine(4, 4, 4) as manager, MODES[mode]():
        plain, net = build().to(home), build()
        x = torch.randn(2, 4, WIDTH)
        with manage(net, profile, placement=placement, manager=manager):
            for program in [*programs, programs[0]]:
                plain.steps = net.steps = program
                assert_same(net(x), plain(x.to(home)), home)
        del plain


# -- what entries are given


class Filling(nn.Module):
    """Decodes into a buffer that it is given, as LTX's and MiniMax's decoders do; its return value is nothing new."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Plain() for _ in range(4))

    def forward(self, parts: list[torch.Tensor], out: dict[str, Any], note: Slotted | None = None) -> Any:
        place = 0
        while parts:  # emptied, so that the memory of each part is free once it is decoded
            x = parts.pop(0)
            for block in self.blocks:
                x = block(x, None)
            out["video"][:, place : place + 4].copy_(x)
            out["seen"] = out.get("seen", 0) + 1
            place += 4
        out["last"][0].mul_(2)
        if note is not None:
            note.data += 1
            note.note = "written"
        return out["video"], out, note


def outputs_of(
    net: nn.Module, device: str, buffers: str, mode: Any, *, strided: bool = False
) -> tuple[list[torch.Tensor], list[Any]]:
    """Run a filling net; returns what its caller then has, and which of its outputs are its inputs."""
    torch.manual_seed(1)
    with mode():
        parts = [torch.randn(2, 4, WIDTH).to(device) for _ in range(2)]
        whole = torch.zeros(2, 10, 2 * WIDTH).to(buffers)
        video = whole[:, 1:9, ::2] if strided else whole[:, 1:9, :WIDTH]
        out = {"video": video, "last": (torch.ones(3).to(device),)}
        note = Slotted(torch.zeros(3).to(device))
        a, b, c = net(parts, out=out, note=note)
        assert parts == [] and out["seen"] == 2 and note.note == "written"
        return [whole.cpu(), out["last"][0].cpu(), note.data.cpu(), a.cpu()], [a is video, b is out, c is note]


@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("place", PLACES)
def test_what_a_callee_writes_into_its_arguments_reaches_the_caller(
    machine, place: str, mode: str, strided: bool
) -> None:
    profile, placement = PLACES[place]
    home = "sim:1" if placement.startswith("gpu:1") else "sim:0"
    net = Filling().eval().requires_grad_(False)
    with machine(4, 4, 4) as manager:
        net.to(home)
        want, _ = outputs_of(net, home, home, MODES[mode], strided=strided)
        net.to("cpu")
        with manage(net, profile, placement=placement, manager=manager):
            for device, buffers in [("cpu", "cpu"), (home, "cpu"), (home, home)]:
                got, own = outputs_of(net, device, buffers, MODES[mode], strided=strided)
                assert own == [True, True, True], (device, buffers)
                assert all(map(torch.equal, got, want))


@pytest.mark.parametrize("place", ["resident", "streamed", "split", "split and streamed"])
def test_what_a_host_gives_stays_where_it_is(machine, place: str) -> None:
    """A hosted component gets the very objects: its host places them."""
    given: list[Any] = []

    class Looking(Filling):
        def forward(self, parts: list[torch.Tensor], out: dict[str, Any], note: Slotted | None = None) -> Any:
            given.extend([parts, out, note, out["video"], note.data])
            return super().forward(parts, out, note)

    profile, placement = PLACES[place]
    net = Looking().eval().requires_grad_(False)
    with machine(4, 4) as manager, torch.inference_mode():
        (member,), _ = manager.add(
            {"vae": net},
            kinds={"vae": "vae"},
            placement=parse_placement(placement, devices=["cpu", "gpu:0", "gpu:1"]),
            profile=parse_profile(profile, devices=["cpu", "gpu:0", "gpu:1"], components=["vae"]),
            precision=None,
            name=None,
            node_id=None,
            is_hosted=True,
        )
        manager.hosting.load(member)
        parts = [torch.randn(2, 4, WIDTH, device="sim:0")]
        out = {"video": torch.zeros(2, 4, WIDTH), "last": [torch.ones(3)]}
        note = Slotted(torch.zeros(3))
        want = [parts, out, note, out["video"], note.data]
        output = net(parts, out, note)
        assert all(one is other for one, other in zip(given, want, strict=True))
        assert output[0] is want[3] and out["video"].abs().sum() > 0
        del parts


# -- between devices


def test_an_output_of_the_second_device_makes_one_hop_and_none_back(machine) -> None:
    net = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(8))).requires_grad_(False)
    with machine(4, 4) as manager, torch.no_grad():
        managed = manage(net, placement="gpu:0&gpu:1@0.5", manager=manager)
        x = torch.randn(3, WIDTH, device="sim:0")
        hops = managed.members[0].managed.forwards.hops
        for passes in range(1, 3):
            net(x)
            assert hops.num_hops == passes * 5  # one there, and home from each of the four
            assert not hops.twins and not hops.twins_inside
        del x


class Sharing(nn.Module):
    """Blocks that call a module of the rest, and parts of blocks that call parts."""

    class Block(nn.Module):
        def __init__(self, norm: nn.Module) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)
            self.inner = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())
            self.call = [norm]  # not its own

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.call[0](self.linear(x) + x)

        def other(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x)

    def __init__(self, *, is_block: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        if is_block:
            self.norm = nn.Sequential(self.norm, nn.Linear(WIDTH, WIDTH))
        self.blocks = nn.ModuleList(self.Block(self.norm) for _ in range(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x) + block.inner(self.norm(x)) + x
        return x


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("is_block", [False, True])
def test_a_block_elsewhere_may_call_what_is_at_home(machine, is_block: bool, place: str, mode: str) -> None:
    profile, placement = PLACES[place]
    home = "sim:1" if placement.startswith("gpu:1") else "sim:0"
    net, x = Sharing(is_block=is_block).eval().requires_grad_(False), torch.randn(2, 3, WIDTH)
    with machine(4, 4, 4) as manager, MODES[mode]():
        want = net.to(home)(x.to(home)).cpu()
        net.to("cpu")
        with manage(net, profile.replace("0.1MiB", "0.2MiB"), placement=placement, manager=manager):
            for _ in range(2):
                assert torch.equal(net(x).cpu(), want)


def test_kernels_are_launched_on_the_device_of_their_block(machine) -> None:
    """Those of others go to the current device, and so does what is made on "the" accelerator."""

    class Here(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x) + torch.ones(WIDTH, device="sim")

    net = nn.Sequential(*(Here() for _ in range(4))).requires_grad_(False)
    with machine(4, 4) as manager, torch.no_grad():
        manage(net, placement="gpu:0&gpu:1", manager=manager)
        net(torch.randn(2, WIDTH))
        assert torch.accelerator.current_device_index() == 0
        for error in (RuntimeError, KeyboardInterrupt):

            def fail(*_: object, error: type[BaseException] = error) -> None:
                raise error

            handle = net[3].linear.register_forward_hook(fail)
            with pytest.raises(error):
                net(torch.randn(2, WIDTH))
            handle.remove()
            manager.begin_run("next", "next")
            assert torch.accelerator.current_device_index() == 0


class Stubborn(nn.Module):
    """Its parent, or one of its blocks, uses what is on another device without being handed it."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.where = where
        self.bias = nn.Parameter(torch.ones(WIDTH))
        self.blocks = nn.ModuleList(Plain() for _ in range(4))
        self.blocks[3].parent = [self]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.where == "before":
            x = x + self.blocks[3].linear.bias
        for number, block in enumerate(self.blocks):
            x = block(x, None)
            if self.where == "in" and number == 3:
                x = self.inside(x)
        return x + self.blocks[3].linear.bias if self.where == "after" else x

    def inside(self, x: torch.Tensor) -> torch.Tensor:
        return x


@pytest.mark.parametrize(
    ("where", "words"),
    [
        ("before", r"before its first block"),
        ("in", r"in block blocks\.3"),
        ("after", r"after block blocks\.3"),
    ],
)
def test_tensors_of_two_devices_are_told_with_component_block_and_remedy(machine, where: str, words: str) -> None:
    class Selfish(Plain):
        def forward(self, x: torch.Tensor, side: Any) -> torch.Tensor:
            return super().forward(x, side) + self.parent[0].bias

    words = f"^dit cannot be split: {words} an operation got tensors on gpu:0 and gpu:1; place it on gpu:0 alone"
    net = Stubborn(where).requires_grad_(False)
    if where == "in":
        net.blocks[3].__class__ = Selfish
    x = torch.randn(2, 3, WIDTH)
    with machine(4, 4) as manager, torch.no_grad():
        with manage({"dit": net}, placement="gpu:0&gpu:1", manager=manager):
            for _ in range(2):
                with pytest.raises(RuntimeError, match=words):
                    net(x)
        with manage({"dit": net}, placement="gpu:0", manager=manager):
            net(x)


def test_another_error_stays_what_it_is(machine) -> None:
    net = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4))).requires_grad_(False)
    with machine(4, 4) as manager, torch.no_grad(), manage(net, placement="gpu:0&gpu:1", manager=manager):
        with pytest.raises(RuntimeError, match=r"^mat1 and mat2 shapes"):
            net(torch.randn(2, WIDTH + 1))
        net[3].register_forward_hook(lambda *_: (_ for _ in ()).throw(ValueError("the feature is on by default")))
        with pytest.raises(ValueError, match=r"^the feature is on by default$"):
            net(torch.randn(2, WIDTH))


@pytest.mark.parametrize("num_blocks", [0, 1, 2])
def test_what_has_too_few_blocks_computes_on_the_first_devices(machine, num_blocks: int) -> None:
    vae = nn.Sequential(*(nn.Conv2d(4, 4, 3) for _ in range(num_blocks)))
    if not num_blocks:
        vae = nn.Conv2d(4, 4, 3)
    vae.requires_grad_(False)
    net = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4))).requires_grad_(False)
    x = torch.randn(1, 4, 9, 9)
    with machine(4, 4, 4) as manager, torch.no_grad():
        want = vae.to("sim:0")(x.to("sim:0")).cpu()
        vae.to("cpu")
        with manage({"vae": vae, "dit": net}, placement="gpu:0&gpu:1&gpu:2@0.2", manager=manager) as managed:
            plan = managed.plan["vae"]
            assert [share.device for share in plan.shares] == ["gpu:0", "gpu:1"][: max(1, num_blocks // 2 * 2)]
            assert any("split" in reason and "computes on" in reason for reason in plan.reasons), plan.reasons
            assert len(managed.plan["dit"].shares) == 3
            assert torch.equal(vae(x).cpu(), want)
            parse_placement(
                managed.plan.placement, devices=["cpu", "gpu:0", "gpu:1", "gpu:2"], components=["vae", "dit"]
            )


def test_a_split_cuts_its_blocks_in_the_order_in_which_they_run(machine) -> None:
    """Before the first pass that is the order of their names; the results are right in both."""

    class Alternating(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
            self.decoder = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for one, other in zip(self.decoder, self.encoder, strict=True):
                x = other(one(x))
            return x

    net, x = Alternating().requires_grad_(False), torch.randn(2, WIDTH)
    with machine(4, 4) as manager, torch.no_grad():
        want = net.to("sim:0")(x.to("sim:0")).cpu()
        net.to("cpu")
        managed = manage(net, placement="gpu:0&gpu:1@0.5", manager=manager)
        num_hops = []
        for _ in range(2):
            managed_component = managed.members[0].managed
            assert torch.equal(net(x).cpu(), want)
            num_hops.append(managed_component.forwards.hops.num_hops - 1)  # one is that of the input, from the host
            managed.reprofile("auto", placement="gpu:0&gpu:1@0.5")
        assert num_hops == [8, 5]  # home from each of four blocks, and there before each, or before the first
        managed.release()
        second = manage(net, placement="gpu:0&gpu:1@0.5", manager=manager).members[0].managed
        assert [second.component.blocks[number].name for number in second.plan.shares[1].blocks] == [
            "decoder.2", "encoder.2", "decoder.3", "encoder.3",
        ]  # fmt: skip
