"""Storage forms: whatever a form makes of a weight, the engine computes with what the form's own `decode` gives.

Two forms that the engine does not know are defined here and nowhere else: eight bits with a scale per row, and four
bits with one, packed in pairs. A line registers each; all else goes by the name that a user writes.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import nn

from highwater.memory import MemoryManager, manage
from highwater.memory.errors import InvalidInput, UnsafeState
from highwater.memory.options.placement import parse_placement
from highwater.memory.options.precision import Precision, parse_precision
from highwater.memory.options.profile import parse_profile
from highwater.memory.planner.sizes import block_bytes, wide_bytes
from highwater.memory.weights.component import TensorSpec
from highwater.memory.weights.form_numbers import ROW, FormNumbers, LeafNumbers
from highwater.memory.weights.fp8 import ScaledFp8
from highwater.memory.weights.known_forms import FORMS, encoded_form, numbers_of
from highwater.memory.weights.storage_form import EncodedForm

X = torch.randn(2, 5, 64, generator=torch.Generator().manual_seed(0))


class RowInt8(EncodedForm):
    numbers = FormNumbers(
        name="int8 rows",
        rests="in int8",
        leaves=(LeafNumbers(bits=8), LeafNumbers(bits=32, group=ROW)),
    )
    largest = 127

    @classmethod
    def empty_leaves(cls, weight: torch.Tensor) -> list[torch.Tensor]:
        return [torch.empty_like(weight, dtype=torch.int8), torch.empty(weight.shape[0], device="meta")]

    @classmethod
    def measure(cls, weight: torch.Tensor, *, name: str) -> RowInt8:
        if not weight.isfinite().all():
            raise InvalidInput(f"weight {name!r} holds NaN or infinity; use precision 'as stored'")
        return cls()

    @classmethod
    def of_stored(cls, shape: torch.Size, scale: float) -> RowInt8:
        return cls()

    def encode(self, weight: torch.Tensor) -> list[torch.Tensor]:
        rows = weight.detach().float().flatten(1)
        scales = rows.abs().amax(1).clamp(min=1e-30) / self.largest
        codes = (rows / scales[:, None]).round().to(torch.int8)
        return [self.pack(codes.view(weight.shape)), scales]

    def decode(self, leaves: Sequence[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
        codes, scales = leaves
        codes = self.unpack(codes, len(scales))
        return (codes.float() * scales.view(-1, *[1] * (codes.dim() - 1))).to(dtype)

    def decode_into(self, wide: torch.Tensor, leaves: Sequence[torch.Tensor]) -> None:
        wide.copy_(self.decode(leaves, wide.dtype).view(wide.shape))

    def pack(self, codes: torch.Tensor) -> torch.Tensor:
        return codes

    def unpack(self, codes: torch.Tensor, num_rows: int) -> torch.Tensor:
        return codes


class PackedInt4(RowInt8):
    """For matrices with an even number of columns."""

    numbers = FormNumbers(
        name="int4 rows",
        rests="in int4",
        leaves=(LeafNumbers(bits=4), LeafNumbers(bits=32, group=ROW)),
        suits=lambda tensor: math.prod(tensor.shape[1:]) % 2 == 0,
    )
    largest = 7

    @classmethod
    def empty_leaves(cls, weight: torch.Tensor) -> list[torch.Tensor]:
        codes = torch.empty(weight.numel() // 2, dtype=torch.uint8, device="meta")
        return [codes, torch.empty(weight.shape[0], device="meta")]

    def pack(self, codes: torch.Tensor) -> torch.Tensor:
        low, high = (codes.reshape(-1, 2) + 8).to(torch.uint8).unbind(1)
        return low | (high << 4)

    def unpack(self, codes: torch.Tensor, num_rows: int) -> torch.Tensor:
        pairs = torch.stack([codes & 15, codes >> 4], 1)
        return pairs.view(num_rows, -1).to(torch.int8) - 8


KNOWN = {name: load() for name, (_, load) in FORMS.items()}
TOYS = {form.numbers.name: form for form in (RowInt8, PackedInt4)}
MODES = {
    "resident": ("auto", "gpu:0"),
    "streamed": ("gpu:0=0.35MiB", "gpu:0"),
    "split": ("auto", "gpu:0&gpu:1"),
    "split and streamed": ("gpu:0=0.3MiB,gpu:1=0.3MiB", "gpu:0&gpu:1"),
    "cpu": ("auto", "cpu"),
}


# One of a kind; the others differ from these in their dtype alone.
DISTINCT = ("fp8 scaled", "fp8 per row", "bf16", "int8", "qint8", "qint4")


def find_form(name: str, monkeypatch: pytest.MonkeyPatch) -> type[EncodedForm]:
    if name in TOYS:
        register(TOYS[name], monkeypatch)
    return (KNOWN | TOYS)[name]


@pytest.fixture(params=[*TOYS, *DISTINCT])
def form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> type[EncodedForm]:
    """Return a form that a user can name."""
    return find_form(request.param, monkeypatch)


@pytest.fixture(params=[*TOYS, *KNOWN])
def any_form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> type[EncodedForm]:
    """Return any of them."""
    return find_form(request.param, monkeypatch)


def has_16_bits(form: type[EncodedForm]) -> bool:
    """Whether a form is one of float32 weights alone."""
    return form.numbers.leaves[0].bits == 16


def register(form: type[EncodedForm], monkeypatch: pytest.MonkeyPatch) -> None:
    """Do what a line of `known_forms` does."""
    monkeypatch.setitem(FORMS, form.numbers.name, (form.numbers, lambda: form))


def coded(form: type[EncodedForm], weight: torch.Tensor) -> torch.Tensor:
    """Return what a weight is after it rested in a form."""
    measured = form.measure(weight, name="w")
    return measured.decode(measured.encode(weight.detach()), weight.dtype).view(weight.shape)


def is_encoded(name: str) -> bool:
    return name.startswith(("doubles", "singles")) and name.endswith(("up.weight", "down.weight"))


@torch.no_grad()
def code_weights(net: nn.Module, form: type[EncodedForm]) -> nn.Module:
    for name, weight in net.named_parameters():
        if is_encoded(name):
            weight.copy_(coded(form, weight))
    return net


def managed_net(
    net: nn.Module,
    manager: MemoryManager,
    mode: str,
    form: type[EncodedForm],
    *,
    is_hosted: bool = False,
    **options: Any,
) -> Any:
    profile, placement = MODES[mode]
    if not is_hosted:
        return manage(net, profile, placement=placement, precision=form.numbers.name, manager=manager, **options)
    names = ["gpu:0", "gpu:1", "cpu"]
    (member,), _ = manager.add(
        {"model": net},
        placement=parse_placement(placement, devices=names),
        profile=parse_profile(profile, devices=names, components=["model"]),
        precision=Precision(form.numbers.name),
        name=None,
        node_id=None,
        is_hosted=True,
    )
    return member


@pytest.mark.parametrize("mode", [mode for mode in MODES if mode != "cpu"])
@torch.no_grad()
def test_a_form_goes_by_its_name_wherever_a_user_meets_one(toys, machine, any_form, mode: str) -> None:
    form = any_form
    name, rests = form.numbers.name, form.numbers.rests
    assert parse_precision(name, forms=FORMS) == Precision(name)
    with pytest.raises(InvalidInput, match=f"allowed: as stored, .*{name}"):
        parse_precision("int3", forms=FORMS)
    want = toys.build_net()(X)
    with machine(4, 4) as manager:
        net = toys.build_net()
        with managed_net(net, manager, mode, form) as managed:
            got = net(X).cpu()
            assert 0 < (got - want).norm() / want.norm() < (0.3 if "int4" in name else 0.05)
            plan = managed.members[0].managed.plan
            assert f" {name}, kept" in plan.text() and plan.to_json()["precision"] == name
            assert [component["precision"] for component in manager.report()["components"]] == [name]
            found = managed.verify(lambda: net(X))
            assert any(f"weights {rests}; the reference decodes the stored values" in note for note in found.notes)


@torch.no_grad()
def test_a_weight_that_does_not_suit_its_form_rests_as_it_came(machine, monkeypatch) -> None:
    register(PackedInt4, monkeypatch)
    net = nn.Sequential(*(nn.Sequential(nn.Linear(64, 33), nn.Linear(33, 64)) for _ in range(3))).requires_grad_(False)
    want = copy.deepcopy(net)
    for block in want:
        block[0].weight.copy_(coded(PackedInt4, block[0].weight))
    with machine(4) as manager, manage(net, placement="gpu:0", precision="int4 rows", manager=manager) as managed:
        assert torch.equal(net(X).cpu(), want(X))
        (plan,) = managed.plan.components
        assert sorted(plan.forms) == [f"{number}.0.weight" for number in range(3)]


def test_a_profile_that_quantizes_says_how_weights_rest(toys, machine, form) -> None:
    with machine(4) as manager, torch.no_grad():
        for net in (toys.build_net(), nn.Sequential(nn.LayerNorm(4), nn.LayerNorm(4))):
            profile = f"1,form={form.numbers.name}"
            with manage({"diffusion": net}, profile, placement="gpu:0", manager=manager) as managed:
                (plan,) = managed.plan.components
                is_kept = isinstance(net, nn.Sequential)
                assert plan.precision == Precision("as stored" if is_kept else form.numbers.name)
                why = f"rest {form.numbers.rests}: everything" if is_kept else f"kept {form.numbers.rests}: profile 1"
                assert why in plan.text()


@pytest.mark.parametrize("group", [1, ROW, 32])
@given(shape=st.lists(st.integers(0, 70), min_size=1, max_size=4), bits=st.integers(1, 64))
def test_a_leaf_counts_its_groups_row_by_row(group: int, shape: list[int], bits: int) -> None:
    columns = math.prod(shape[1:])
    groups = shape[0] * len(range(0, columns, group or max(1, columns)))
    spec = TensorSpec(name="w", dtype="F32", shape=tuple(shape))
    assert LeafNumbers(bits=bits, group=group).num_bytes(spec) == -(-groups * bits // 8)


def test_a_precision_that_no_form_has_is_refused(toys, machine) -> None:
    with machine(4) as manager:
        for given, why in (
            ("int3", "unknown; .*allowed: as stored, fp8 scaled"),
            (Precision("int3"), "unknown; "),
            (8, "8;"),
        ):
            with pytest.raises(InvalidInput, match=f"precision .*{why}"):
                manage(toys.build_net(), placement="gpu:0", precision=given, manager=manager)
    with pytest.raises(InvalidInput, match="precision 8; allowed: the name of a storage form"):
        Precision(8)  # type: ignore[arg-type]


def test_known_forms_have_the_numbers_of_their_class() -> None:
    for name, (numbers, load) in FORMS.items():
        assert load().numbers is numbers and numbers.name == name


@pytest.mark.parametrize("shape", [(64, 384), (3, 2), (5, 8, 3, 2)])
@pytest.mark.parametrize("dtype", ["BF16", "F16", "F32"])
def test_numbers_say_what_leaves_take(any_form: type[EncodedForm], dtype: str, shape: tuple[int, ...]) -> None:
    form = any_form
    numbers = numbers_of(Precision(form.numbers.name))
    assert numbers is form.numbers
    spec = TensorSpec(name="w", dtype=dtype, shape=shape, encodable=True)
    torch_dtype = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}[dtype]
    weight = torch.randn(shape).to(torch_dtype)
    empty = form.empty_leaves(weight.to("meta"))
    leaves = form.measure(weight, name="w").encode(weight)
    assert encoded_form(numbers) is form and numbers.takes(spec) == (dtype == "F32" or not has_16_bits(form))
    assert numbers.leaf_bytes(spec) == tuple(leaf.nbytes for leaf in empty) == tuple(leaf.nbytes for leaf in leaves)
    assert [(leaf.shape, leaf.dtype) for leaf in empty] == [(leaf.shape, leaf.dtype) for leaf in leaves]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_every_way_to_decode_gives_the_same_bits(any_form: type[EncodedForm], dtype: torch.dtype, machine) -> None:
    form = any_form
    weights = [torch.randn(6, 2 * n, generator=torch.Generator().manual_seed(n)).to(dtype) for n in (1, 40, 3000)]
    forms = [form.measure(weight, name="w") for weight in weights]
    leaves = [form.encode(weight) for form, weight in zip(forms, weights, strict=True)]
    wants = [one.decode(own, dtype).view(6, -1) for one, own in zip(forms, leaves, strict=True)]
    with machine(4):
        for device in ("cpu", "sim:0"):
            there = [[leaf.to(device) for leaf in own] for own in leaves]
            wide = [torch.empty_like(weight, device=device) for weight in weights]
            for one, target, own in zip(forms, wide, there, strict=True):
                one.decode_into(target, own)
            assert all(torch.equal(got.cpu(), want) for got, want in zip(wide, wants, strict=True))
            for target in wide:
                target.fill_(9)
            form.decode_all(forms, wide, there)
            assert all(torch.equal(got.cpu(), want) for got, want in zip(wide, wants, strict=True))
            del there, wide, target, own


@pytest.mark.parametrize("is_hosted", [False, True], ids=["managed", "hosted"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("mode", MODES)
@torch.no_grad()
def test_a_forward_computes_with_what_the_form_decodes(toys, machine, form, mode: str, dtype, is_hosted: bool) -> None:
    x = X.to(dtype)
    plain = toys.build_net(dtype=dtype)
    wanted = {name for name, _ in plain.named_parameters() if is_encoded(name)}
    if dtype is torch.float32 or not has_16_bits(form):
        code_weights(plain, form)
    else:
        wanted = set()  # what has 16 bits already rests as it came
    with machine(4, 4) as manager:
        net = toys.build_net(dtype=dtype)
        managed = managed_net(net, manager, mode, form, is_hosted=is_hosted)
        managed = managed if is_hosted else managed.members[0]
        given = x.to("sim:0") if is_hosted and mode != "cpu" else x
        for _ in range(3):
            if is_hosted:
                manager.hosting.load(managed)
            assert torch.equal(net(given).cpu(), plain(x))
            manager.ledger.check()
        plan, component = managed.managed.plan, managed.managed.component
        assert wanted == {*plan.forms}
        groups = {group.name: group for group in managed.managed.groups}
        for block in component.blocks:
            assert block_bytes(block, plan.forms) == groups[block.name].slab_bytes
            assert wide_bytes(block, plan.forms) == groups[block.name].layout.wide.slab_bytes
        managed.managed.unload()
        if not is_hosted:
            assert torch.equal(net(x).cpu(), plain(x))
        manager.remove(managed)
        del groups, managed, given
        for (name, got), want in zip(net.named_parameters(), plain.parameters(), strict=True):
            assert type(got) is nn.Parameter and got.device.type == "cpu", name
            assert torch.equal(got, want), name
        assert torch.equal(net(x), plain(x))


@pytest.mark.parametrize("mode", MODES)
@torch.no_grad()
def test_at_rest_weights_read_and_copy_as_decoded(toys, machine, form, mode: str) -> None:
    plain = code_weights(toys.build_net(), form)
    with machine(4, 4) as manager:
        net = toys.build_net()
        with managed_net(net, manager, mode, form):
            net(X)
            for (name, got), want in zip(net.named_parameters(), plain.parameters(), strict=True):
                assert (got.shape, got.dtype, got.stride()) == (want.shape, want.dtype, want.stride())
                assert torch.equal(got.cpu(), want), name
            state = net.state_dict()
            assert all(torch.equal(state[name].cpu(), want) for name, want in plain.state_dict().items())
            del state, got  # views of what is on a device
            copied = copy.deepcopy(net.singles[0].up.weight)
            assert type(copied) is nn.Parameter and torch.equal(copied.cpu(), plain.singles[0].up.weight)
            del copied


@pytest.mark.parametrize("mode", MODES)
@torch.no_grad()
def test_a_merged_lora_rests_in_its_form(toys, machine, form, mode: str) -> None:
    plain = code_weights(toys.build_net(), form)
    lora = {
        name: 0.1 * torch.randn(w.shape[0], 2) @ torch.randn(2, w.shape[1])
        for name, w in plain.named_parameters()
        if is_encoded(name)
    }
    with machine(4, 4) as manager:
        net = toys.build_net()
        with managed_net(net, manager, mode, form):
            net(X)
            for name, delta in lora.items():
                weight = net.get_parameter(name)
                weight.data += delta.to(weight.device)
                own = plain.get_parameter(name)
                own.copy_(coded(form, own + delta))
            assert torch.equal(net(X).cpu(), plain(X))
            for name in list(lora)[:3]:  # whole weights, as who loads others writes them
                net.get_parameter(name).copy_(lora[name])
                plain.get_parameter(name).copy_(coded(form, lora[name]))
            assert torch.equal(net(X).cpu(), plain(X))
        assert torch.equal(net(X), plain(X))


@pytest.mark.parametrize("mode", MODES)
@torch.no_grad()
def test_what_a_forward_writes_rests_in_its_form(toys, machine, form, mode: str) -> None:
    plain = code_weights(toys.build_net(), form)
    with machine(4, 4) as manager:
        net = toys.build_net()

        def double(module: nn.Module, args: Any, output: Any) -> None:
            module.up.weight.mul_(2.0)

        with managed_net(net, manager, mode, form):
            net(X)
            hook = net.singles[1].register_forward_hook(double)
            want = plain(X)
            assert torch.equal(net(X).cpu(), want)
            hook.remove()
            up = plain.singles[1].up.weight
            up.copy_(coded(form, 2.0 * up))
            assert torch.equal(net(X).cpu(), plain(X))


@pytest.mark.parametrize("is_loaded", [False, True], ids=["at rest", "loaded"])
@pytest.mark.parametrize("mode", [mode for mode in MODES if mode != "cpu"])
@torch.no_grad()
def test_a_host_overwrites_weights_in_their_form(toys, machine, form, mode: str, is_loaded: bool) -> None:
    plain = code_weights(toys.build_net(), form)
    with machine(4, 4) as manager:
        net = toys.build_net()
        member = managed_net(net, manager, mode, form, is_hosted=True)
        if is_loaded:
            manager.hosting.load(member)
        for block in (*plain.doubles, *plain.singles):
            block.up.weight.copy_(coded(form, 3.0 * block.up.weight))
        for group in member.managed.groups:
            for slot in group.slots:
                if slot.spec.name.endswith("up.weight"):
                    wide = group.wide(slot.spec.name, torch.device("cpu"))
                    assert wide.dtype is torch.float32 and wide.is_contiguous()
                    group.overwrite(slot.spec.name, 3.0 * wide)
        for round_number in range(2):
            manager.hosting.load(member)
            assert torch.equal(net(X.to("sim:0")).cpu(), plain(X)), round_number
            member.managed.unload()
        del group, slot
        manager.remove(member)
        del member
        assert torch.equal(net(X), plain(X))


@pytest.mark.parametrize("mode", MODES)
@torch.no_grad()
def test_weights_of_one_block_may_rest_in_different_forms(toys, machine, monkeypatch, mode: str) -> None:
    forms = {"up.weight": PackedInt4, "down.weight": ScaledFp8}
    register(PackedInt4, monkeypatch)
    plain = toys.build_net()
    names = [name for name, _ in plain.named_parameters() if is_encoded(name)][1:]  # and one that rests as it came
    kinds = {name: forms[name.partition(".")[2].partition(".")[2]] for name in names}
    monkeypatch.setattr(
        "highwater.memory.planner.planning.choose_forms",
        lambda *_: {name: kind.numbers for name, kind in kinds.items()},
    )
    for name, kind in kinds.items():
        weight = plain.get_parameter(name)
        weight.copy_(coded(kind, weight))
    with machine(4, 4) as manager:
        net = toys.build_net()
        with managed_net(net, manager, mode, ScaledFp8) as managed:
            for _ in range(2):
                assert torch.equal(net(X).cpu(), plain(X))
                manager.ledger.check()
            found = managed.verify(lambda: net(X))
            assert found.is_equal, str(found)
        assert torch.equal(net(X), plain(X))


@pytest.mark.parametrize("mode", MODES)
@torch.no_grad()
def test_weights_of_one_block_may_have_different_dtypes(toys, machine, form, mode: str) -> None:
    """Those are decoded apart: a foreach copy on CUDA may take all targets for what the first is."""
    if has_16_bits(form):
        pytest.skip("float32 weights alone can rest so")
    plain = toys.build_net(dtype=torch.bfloat16)
    with machine(4, 4) as manager:
        net = toys.build_net(dtype=torch.bfloat16)
        for each in (net, plain):
            for block in (*each.doubles, *each.singles):
                block.down.half()
                block.down.register_forward_pre_hook(lambda module, args: (args[0].half(),))
                block.down.register_forward_hook(lambda module, args, output: output.bfloat16())
        code_weights(plain, form)
        with managed_net(net, manager, mode, form) as managed:
            x = X.bfloat16()
            assert torch.equal(net(x).cpu().float(), plain(x).float())
            groups = [group for group in managed.members[0].managed.groups if group.encoded]
            for group in groups:
                for decodings in group.views.decodings.values():
                    assert {len({wide.dtype for wide in targets}) for _, _, targets, _ in decodings} == {1}
                    assert len(decodings) == 2
            assert any(group.views.decodings for group in groups)
            del groups, group, decodings


@pytest.mark.parametrize("mode", MODES)
@torch.no_grad()
def test_what_replaces_an_encoded_weight_counts_as_it_is(toys, machine, form, mode: str) -> None:
    """The new layer's weight has the name of the old one, which other code keeps, but rests as it came."""
    plain = code_weights(toys.build_net(), form)
    with machine(4, 4) as manager:
        net = toys.build_net()
        with managed_net(net, manager, mode, form) as managed:
            net(X)
            kept = net.singles[2].up.weight
            net.singles[2].up = copy.deepcopy(plain.singles[3].up)
            plain.singles[2].up = plain.singles[3].up
            for _ in range(2):
                assert torch.equal(net(X).cpu(), plain(X))
                manager.ledger.check()
            member = managed.members[0].managed
            for share in member.shares:
                for number, bundle in share.blocks.items():
                    assert block_bytes(member.component.blocks[number], member.plan.forms) == bundle.slab_bytes
        assert kept.device.type == "cpu"


@pytest.mark.parametrize("mode", MODES)
def test_verify_agrees(toys, machine, form, mode: str) -> None:
    with machine(4, 4) as manager, torch.no_grad():
        net = toys.build_net()
        with managed_net(net, manager, mode, form) as managed:
            net(X)
            found = managed.verify(lambda: net(X))
            assert found.is_equal, str(found)


@pytest.mark.parametrize("tier", ["pinned", "host", "disk"])
@torch.no_grad()
def test_weights_without_memory_are_encoded_from_their_file(toys, machine, form, tier: str, tmp_path: Path) -> None:
    plain = toys.build_net()
    path = tmp_path / "net.safetensors"
    save_file({name: weight.contiguous() for name, weight in plain.named_parameters()}, path)
    code_weights(plain, form)
    with torch.device("meta"):
        net = toys.Net().eval().requires_grad_(False)
    for name, buffer in plain.named_buffers():
        owner, _, attribute = name.rpartition(".")
        net.get_submodule(owner)._buffers[attribute] = buffer.clone()
    with machine(4) as manager:
        options = {"precision": form.numbers.name, "files": {"net": [path]}, "manager": manager}
        if tier == "disk" and not form.numbers.in_parts:
            with pytest.raises(InvalidInput, match="which needs whole weights in RAM; allowed: device, pinned, host"):
                manage({"net": net}, placement="gpu:0:disk", **options)
            return
        with manage({"net": net}, placement=f"gpu:0:{tier}", **options) as managed:
            assert torch.equal(net(X).cpu(), plain(X))
            found = managed.verify(lambda: net(X))
            assert found.is_equal, str(found)
        if tier == "disk":
            assert all(weight.is_meta for weight in net.parameters()), "as it came: its file has it"
        else:
            assert torch.equal(net(X), plain(X))


@torch.no_grad()
def test_messages_say_how_weights_rest(toys, machine, form) -> None:
    rests = form.numbers.rests
    state = toys.build_net(seed=1).state_dict()
    with machine(4) as manager:
        net = toys.build_net()
        with managed_net(net, manager, "resident", form):
            with pytest.raises(UnsafeState, match=f"rests {rests}: release it"):
                net.load_state_dict(state)
            net.singles[1].up.weight = nn.Parameter(torch.zeros(192, 64, device="meta"), requires_grad=False)
            with pytest.raises(UnsafeState, match=rf"which rests {rests}, was replaced by"):
                net(X)
            assert torch.equal(net(X).cpu(), code_weights(toys.build_net(), form)(X))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_what_a_form_refuses_stays_as_it_was(toys, machine, form, value: float) -> None:
    with machine(4) as manager:
        net = toys.build_net()
        with torch.no_grad():
            net.singles[4].down.weight[3, 5] = value
        before = {name: (weight, weight.data_ptr()) for name, weight in net.named_parameters()}
        with pytest.raises(InvalidInput, match=r"singles\.4\.down\.weight.*NaN or infinity"):
            managed_net(net, manager, "resident", form)
        assert all(net.get_parameter(name) is w and w.data_ptr() == at for name, (w, at) in before.items())
