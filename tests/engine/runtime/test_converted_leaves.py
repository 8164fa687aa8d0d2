"""Weights that their file has in another form than the one in which they rest: cast and encoded as they are read."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from highwater.memory import InvalidInput, MemoryManager, load_model, manage
from highwater.memory.api import Managed
from highwater.memory.errors import UnsafeState
from highwater.memory.manager import module_plans
from highwater.memory.planner import sizes
from highwater.memory.runtime.blocks.weight_store import FileStore
from highwater.memory.transfer import bounce_buffers
from highwater.memory.weights.file_reader import WeightsFile

TIGHT = "0.3MiB"
X = torch.randn(2, 5, 64, generator=torch.Generator().manual_seed(0))


@dataclass(frozen=True, kw_only=True)
class Case:
    """What the file has, how the module computes, and in which precision it rests."""

    stored: torch.dtype
    wide: torch.dtype
    precision: str = "as stored"

    def file(self, toys, folder: Path) -> Path:
        """The toy network's weights, as the file has them; fp8 without a scale."""
        state = {name: tensor for name, tensor in toys.build_net().state_dict().items() if "gain" not in name}
        del state["out.weight"]  # tied
        save_file({name: tensor.to(self.stored) for name, tensor in state.items()}, folder / "net.safetensors")
        return folder / "net.safetensors"

    def bare(self, toys) -> nn.Module:
        """The network without memory for its weights."""
        net = toys.bare_net()
        for parameter in net.parameters():
            parameter.data = parameter.data.to(self.wide)
        return self.with_buffers(net)

    def with_buffers(self, net: nn.Module) -> nn.Module:
        for name, buffer in list(net.named_buffers()):
            owner, _, attribute = name.rpartition(".")
            net.get_submodule(owner)._buffers[attribute] = buffer.to(self.wide)
        return net

    def loaded(self, toys) -> nn.Module:
        """The network as a library loads it from the file, in its own dtype."""
        return toys.build_net().to(self.stored).to(self.wide)

    @property
    def x(self) -> torch.Tensor:
        return X.to(self.wide)


BF16, F16, F32, FP8 = torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn
CASES = {
    "widened": Case(stored=BF16, wide=F32),
    "narrowed": Case(stored=F32, wide=BF16),
    "other sixteen bits": Case(stored=F16, wide=BF16),
    "from eight bits": Case(stored=FP8, wide=BF16),
    "encoded": Case(stored=BF16, wide=BF16, precision="fp8 scaled"),
    "encoded from float32": Case(stored=F32, wide=F32, precision="fp8 scaled"),
    "widened and encoded": Case(stored=F16, wide=F32, precision="fp8 scaled"),
    "narrowed and encoded": Case(stored=F32, wide=BF16, precision="fp8 scaled"),
}


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest) -> Case:
    return CASES[request.param]


@pytest.fixture
def file(toys, case: Case, tmp_path: Path) -> Path:
    return case.file(toys, tmp_path)


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The bytes that each reading brought from files."""
    counted: list[int] = []
    read_into = WeightsFile.read_into

    def count(self, targets, **options) -> bool:
        targets = list(targets)
        counted.append(sum(target[1].nbytes for target in targets))
        return read_into(self, targets, **options)

    monkeypatch.setattr(WeightsFile, "read_into", count)
    return counted


def on_disk(case: Case, net: nn.Module, file: Path, manager: MemoryManager, profile: str = "auto") -> Managed:
    return manage(
        {"net": net},
        placement="gpu:0:disk",
        profile=profile,
        precision=case.precision,
        files={"net": file},
        manager=manager,
    )


def in_ram(case: Case, net: nn.Module, manager: MemoryManager, profile: str = "auto") -> torch.Tensor:
    """Return what the network computes in the same precision with its weights in RAM."""
    with manage({"net": net}, placement="gpu:0:host", profile=profile, precision=case.precision, manager=manager):
        return net(case.x).cpu()


@torch.no_grad()
@pytest.mark.parametrize("profile", ["auto", TIGHT])
@pytest.mark.parametrize("buffer_bytes", [None, 4096])
def test_it_computes_as_from_ram_and_costs_none(
    toys, machine, case: Case, file: Path, monkeypatch, profile: str, buffer_bytes: int | None
) -> None:
    """Buffers of a page are smaller than weights: these pass in parts, cut anywhere."""
    if buffer_bytes is not None:
        monkeypatch.setattr(sizes, "BOUNCE_BUFFER_BYTES", buffer_bytes)
        monkeypatch.setattr(bounce_buffers, "CACHED_BYTES", 1001)
    with machine(8) as manager:
        want = in_ram(case, case.loaded(toys), manager, profile)
        net = case.bare(toys)
        with on_disk(case, net, file, manager, profile) as managed:
            (member,) = managed.members
            idle = manager.ledger.bytes_by_place("net")
            assert idle == {"host": sum(buffer.nbytes for buffer in net.buffers())}
            assert all(parameter.is_meta and parameter.dtype is case.wide for parameter in net.parameters())
            for _ in range(3):
                assert torch.equal(net(case.x).cpu(), want)
                manager.ledger.check()
            plan = member.managed.plan
            assert plan.streams == (profile == TIGHT)
            assert manager.ledger.bytes_by_place("net")["gpu:0"] == plan.device_bytes["gpu:0"]
            member.managed.unload()
            assert manager.ledger.bytes_by_place("net") == idle
            assert torch.equal(net(case.x).cpu(), want)
        assert all(parameter.is_meta for parameter in net.parameters()), "as it came"


@torch.no_grad()
def test_a_plan_says_what_is_made_of_the_file_and_what_a_pass_reads(
    toys, machine, case: Case, file: Path, read
) -> None:
    with machine(8) as manager, on_disk(case, case.bare(toys), file, manager, TIGHT) as managed:
        (member,) = managed.members
        net, plan = member.managed.module, member.managed.plan
        told = [reason for reason in plan.reasons if "in its file are" in reason]
        assert any(" cast from " in reason for reason in told) == (case.stored is not case.wide)
        assert any(" encoded as they are read: " in reason for reason in told) == (case.precision != "as stored")
        net(case.x)
        for _ in range(2):
            read.clear()
            net(case.x)
            (share,) = member.managed.plan.shares
            padding = 256 * sum(len(block.tensors) for block in member.managed.component.blocks)
            # What a slot still has of the last pass is not read again.
            assert 0.7 * share.read_bytes - padding <= sum(read) <= share.read_bytes


@torch.no_grad()
def test_what_is_resident_is_read_once(toys, machine, case: Case, file: Path, read) -> None:
    stored_bytes = sum(tensor.nbytes for tensor in load_file(file).values())
    with machine(8) as manager, on_disk(case, case.bare(toys), file, manager) as managed:
        net = managed.members[0].managed.module
        read.clear()
        net(case.x)
        assert sum(read) == stored_bytes, "measured in the buffer in which they are encoded"
        net(case.x)
        assert sum(read) == stored_bytes


@torch.no_grad()
def test_it_moves_between_ram_and_file(toys, machine, case: Case, file: Path) -> None:
    with machine(8) as manager:
        want = in_ram(case, case.loaded(toys), manager)
        net = case.bare(toys)
        with on_disk(case, net, file, manager) as managed:
            for tier in ("pinned", "disk", "host", "disk"):
                managed.reprofile("auto", placement=f"gpu:0:{tier}", precision=case.precision)
                assert managed.members[0].managed.plan.tier == tier
                stores = [group.at_rest.store for group in managed.members[0].managed.groups]
                assert all(isinstance(store, FileStore) == (tier == "disk") for store in stores)
                assert torch.equal(net(case.x).cpu(), want)
                manager.ledger.check()


@torch.no_grad()
@pytest.mark.parametrize("profile", ["auto", TIGHT])
@pytest.mark.parametrize("has_run", [False, True])
def test_other_code_sees_the_weights_that_compute(toys, machine, case: Case, file: Path, profile, has_run) -> None:
    with machine(8) as manager:
        ram = case.loaded(toys)
        with manage({"net": ram}, placement="gpu:0:host", precision=case.precision, manager=manager):
            want = {name: tensor.clone() for name, tensor in ram.state_dict().items()}
        net = case.bare(toys)
        with on_disk(case, net, file, manager, profile) as managed:
            if has_run:
                net(case.x)
            state = net.state_dict()
            assert all(torch.equal(state.pop(name).cpu(), tensor) for name, tensor in want.items())
            assert torch.equal(net.singles[1].up.weight.to("sim:0").cpu(), want["singles.1.up.weight"])
            assert torch.equal(net.singles[1].up.weight.abs().cpu(), want["singles.1.up.weight"].abs())
            found = managed.verify(lambda: net(case.x))
            assert found.is_equal, str(found)
            manager.ledger.check()


@torch.no_grad()
@pytest.mark.parametrize("is_used", [False, True])
def test_a_weight_that_other_code_keeps_is_the_one_that_computed(
    toys, machine, case, file: Path, is_used: bool
) -> None:
    with machine(8) as manager:
        ram = case.loaded(toys)
        with manage({"net": ram}, placement="gpu:0:host", precision=case.precision, manager=manager):
            want = ram.singles[1].up.weight.clone()
        net = case.bare(toys)
        with on_disk(case, net, file, manager):
            net(case.x)
            if is_used:
                net.singles[1].up.weight.abs()
            kept = net.singles[1].up.weight
        assert torch.equal(kept, want) and net.singles[1].up.weight.is_meta


@torch.no_grad()
@pytest.mark.parametrize("profile", ["auto", TIGHT])
@pytest.mark.parametrize("has_run", [False, True])
def test_what_is_written_counts_wherever_it_rests_then(
    toys, machine, case: Case, file: Path, profile: str, has_run: bool
) -> None:
    def write(net: nn.Module) -> None:
        net.singles[1].up.weight.mul_(1.5)
        net.doubles[0].norm.bias.add_(0.25)

    with machine(8) as manager:
        ram = case.loaded(toys)
        with manage({"net": ram}, placement="gpu:0:host", precision=case.precision, manager=manager):
            write(ram)
            want = ram(case.x).cpu()
        net = case.bare(toys)
        with on_disk(case, net, file, manager, profile) as managed:
            if has_run:
                net(case.x)
            write(net)
            for tier in ("disk", "pinned", "disk"):
                assert torch.equal(net(case.x).cpu(), want)
                managed.members[0].managed.unload()
                manager.ledger.check()
                managed.reprofile(profile, placement=f"gpu:0:{tier}", precision=case.precision)
            assert torch.equal(net(case.x).cpu(), want)
            stores = {group.name: group.at_rest.store for group in managed.members[0].managed.groups}
            assert not isinstance(stores["singles.1"], FileStore) or case.precision == "as stored"
            assert isinstance(stores["singles.2"], FileStore), "nothing was written to it"
        assert not any(parameter.is_meta for parameter in net.parameters())


@torch.no_grad()
def test_what_a_library_has_loaded_is_not_taken_for_its_file(toys, machine, case: Case, file: Path) -> None:
    """It may have changed what it converted: tier ``disk`` is refused, and a profile that sets it keeps it in RAM."""
    net = case.loaded(toys)
    net.doubles[1].norm.weight.mul_(3)
    with machine(8) as manager:
        want = in_ram(case, net, manager)
        with pytest.raises(InvalidInput, match="tier 'disk' is not available for net"):
            on_disk(case, net, file, manager)
        choices = {"placement": "gpu:0", "precision": case.precision, "files": {"net": file}, "manager": manager}
        with manage({"net": net}, "auto,disk=*", **choices):
            assert torch.equal(net(case.x).cpu(), want)
        with manage({"net": net}, "auto", **choices) as managed:
            assert torch.equal(net(case.x).cpu(), want)
            with pytest.raises(InvalidInput, match="tier 'disk' is not available for net"):
                managed.reprofile("auto", placement="gpu:0:disk", precision=case.precision)
            assert torch.equal(net(case.x).cpu(), want)
        assert not any(parameter.is_meta for parameter in net.parameters())


@torch.no_grad()
@pytest.mark.parametrize("convert", [nn.Module.float, nn.Module.half])
def test_what_is_converted_rests_in_ram_and_in_the_books(toys, machine, case: Case, file: Path, convert) -> None:
    with machine(8) as manager:
        ram = case.loaded(toys)
        with manage({"net": ram}, placement="gpu:0:host", precision=case.precision, manager=manager):
            ram(case.x)
            convert(ram)
            x = case.x.to(ram.embed.weight.dtype)
            want = ram(x).cpu()
        net = case.bare(toys)
        with on_disk(case, net, file, manager):
            net(case.x)
            convert(net)
            assert torch.equal(net(x).cpu(), want)
            manager.ledger.check()


@torch.no_grad()
@pytest.mark.parametrize("profile", ["auto", "gpu:0=0.3MiB,gpu:1=0.3MiB"])
def test_two_devices_read_their_blocks(toys, machine, case: Case, file: Path, profile: str) -> None:
    with machine(8, 8) as manager:
        choices = {"profile": profile, "precision": case.precision, "manager": manager}
        with manage({"net": case.loaded(toys)}, placement="gpu:0&gpu:1:host", **choices) as managed:
            want = managed.members[0].managed.module(case.x).cpu()
        net = case.bare(toys)
        with manage({"net": net}, placement="gpu:0&gpu:1:disk", files={"net": file}, **choices):
            for _ in range(2):
                assert torch.equal(net(case.x).cpu(), want)
                manager.ledger.check()


@pytest.mark.parametrize("profile", ["auto", TIGHT])
def test_gradients_are_those_from_ram(toys, machine, case: Case, file: Path, profile: str) -> None:
    def gradient(net: nn.Module) -> torch.Tensor:
        x = case.x.clone().requires_grad_()
        net(x).float().square().sum().backward()
        assert x.grad is not None
        return x.grad

    with machine(8) as manager:
        choices = {"profile": profile, "precision": case.precision, "manager": manager}
        with manage({"net": case.loaded(toys)}, placement="gpu:0:host", **choices) as managed:
            want = gradient(managed.members[0].managed.module)
        with on_disk(case, case.bare(toys), file, manager, profile) as managed:
            assert torch.equal(gradient(managed.members[0].managed.module), want)


@torch.no_grad()
@pytest.mark.parametrize("profile", ["auto", TIGHT])
def test_a_model_from_its_file_is_encoded_as_it_is_read(toys, machine, tmp_path: Path, profile: str) -> None:
    case = CASES["encoded from float32"]
    file = case.file(toys, tmp_path)
    save_file({**load_file(file), **dict(toys.build_net().named_buffers())}, file)
    with machine(8) as manager:
        want = in_ram(case, case.loaded(toys), manager, profile)
        net = load_model(file, toys.Net, config={})
        with on_disk(case, net, file, manager, profile):
            assert torch.equal(net(case.x).cpu(), want)
        with pytest.raises(UnsafeState, match="is still in"):
            net(case.x)
        with manage({"net": net}, profile, placement="gpu:0:disk", precision=case.precision, manager=manager):
            assert torch.equal(net(case.x).cpu(), want)


@torch.no_grad()
@pytest.mark.parametrize("precision", ["as stored", "fp8 scaled"])
def test_weights_without_elements_are_no_obstacle(machine, tmp_path: Path, precision: str) -> None:
    build = lambda: nn.Sequential(*(nn.Linear(8, width, dtype=F32) for width in (8, 0, 8, 8)))  # noqa: E731
    full, x = build().requires_grad_(False), torch.randn(2, 8)
    full[1].forward = lambda x: x
    save_file({name: weight.to(BF16) for name, weight in full.named_parameters()}, tmp_path / "net.safetensors")
    net = build().to("meta").requires_grad_(False)
    net[1].forward = lambda x: x
    full.to(BF16).to(F32)
    with machine(8) as manager:
        with manage({"net": full}, placement="gpu:0:host", precision=precision, manager=manager):
            want = full(x).cpu()
        files = {"net": tmp_path / "net.safetensors"}
        with manage({"net": net}, placement="gpu:0:disk", precision=precision, files=files, manager=manager):
            assert torch.equal(net(x).cpu(), want)


@contextmanager
def streaming(case: Case, net: nn.Module, file: Path, manager: MemoryManager) -> Iterator[Managed]:
    with on_disk(case, net, file, manager, TIGHT) as managed:
        assert managed.members[0].managed.plan.streams
        yield managed


@torch.no_grad()
def test_what_a_forward_writes_stays(toys, machine, case: Case, file: Path) -> None:
    class Grows(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.weight.mul_(2)
            return super().forward(x)

    def grown(net: nn.Module) -> nn.Module:
        for block in (*net.doubles, *net.singles):
            block.up.__class__ = Grows
        return net

    with machine(8) as manager:
        ram = grown(case.loaded(toys))
        with manage({"net": ram}, TIGHT, placement="gpu:0:host", precision=case.precision, manager=manager):
            want = [ram(case.x).cpu() for _ in range(3)]
        net = grown(case.bare(toys))
        with streaming(case, net, file, manager):
            assert all(torch.equal(net(case.x).cpu(), each) for each in want)
            manager.ledger.check()


@torch.no_grad()
@pytest.mark.parametrize("profile", ["auto", TIGHT])
@pytest.mark.parametrize("buffer_bytes", [None, 4096])
def test_a_weight_that_cannot_be_encoded_is_refused_by_name(
    toys, machine, tmp_path: Path, monkeypatch, profile: str, buffer_bytes: int | None
) -> None:
    if buffer_bytes is not None:
        monkeypatch.setattr(sizes, "BOUNCE_BUFFER_BYTES", buffer_bytes)
    case = CASES["encoded"]
    file = case.file(toys, tmp_path)
    state = load_file(file)
    state["singles.3.down.weight"][7, 7] = float("nan")
    save_file(state, file)
    refusal = r"'singles\.3\.down\.weight' holds NaN or infinity; exclude it, or use precision"
    with machine(8) as manager, pytest.raises(InvalidInput, match=refusal):
        on_disk(case, case.bare(toys), file, manager, profile)
    # Nothing is measured before it is read where no error is too large.
    monkeypatch.setattr(module_plans, "weights_to_measure", lambda *_: (None, []))
    with machine(8) as manager, on_disk(case, case.bare(toys), file, manager, profile) as managed:
        net = managed.members[0].managed.module
        for _ in range(2):
            with pytest.raises(InvalidInput, match=refusal):
                net(case.x)
            manager.ledger.check()


def test_eight_bits_with_a_scale_beside_them_are_not_cast(toys, machine, tmp_path: Path) -> None:
    """Their values are products: only the library that wrote them knows how."""
    case = CASES["from eight bits"]
    file = case.file(toys, tmp_path)
    state = load_file(file)
    save_file({**state, "singles.2.up.scale_weight": torch.tensor(2.0)}, file)
    with machine(8) as manager, pytest.raises(InvalidInput, match="no file is known that has its weights"):
        on_disk(case, case.bare(toys), file, manager)
