"""What `Module.to` and its like do to a managed module: the next forward puts the engine's own tensors back."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from optimum import quanto
from safetensors.torch import save_file
from torch import nn

from highwater.memory import manage
from highwater.memory.errors import UnsafeState
from highwater.memory.weights.quantized_leaves import form_of, leaves_of

TIGHT = "0.45MiB"
X = torch.randn(2, 5, 64)
CONVERSIONS = {
    "as torch does": (),
    "by replacing": (torch.__future__.set_overwrite_module_params_on_conversion,),
    "by swapping": (torch.__future__.set_swap_module_params_on_conversion,),
}


@pytest.fixture(params=CONVERSIONS)
def conversion(request) -> Iterator[str]:
    """In which way torch gives converted weights to a module."""
    for choose in CONVERSIONS[request.param]:
        choose(True)
    yield request.param
    for choose in CONVERSIONS[request.param]:
        choose(False)


def quantized(toys, precision: str):
    net = toys.build_net()
    if precision == "qint8":
        blocks = torch.nn.ModuleList([*net.doubles, *net.singles])
        quanto.quantize(blocks, weights=quanto.qint8)
        quanto.freeze(blocks)
    return net.requires_grad_(False)


def weights_at_rest_are_in_their_slabs(managed) -> bool:
    groups = managed.members[0].managed.groups
    return all(
        group.host_slab.data_ptr() <= leaves_of(slot.held)[0].data_ptr() < group.host_slab.data_ptr() + group.slab_bytes
        for group in groups
        for slot in group.slots
        if not slot.is_quantized
    )


@pytest.mark.parametrize("precision", ["as stored", "fp8 scaled", "qint8"])
@pytest.mark.parametrize("profile", ["auto", TIGHT])
@pytest.mark.parametrize("device", ["cpu", "sim:0", "sim:1"])
@pytest.mark.parametrize("state", ["resident", "at rest"])
def test_the_next_forward_is_right_wherever_the_module_was_moved(
    toys, machine, sim, conversion: str, precision: str, profile: str, device: str, state: str
) -> None:
    net, precision = quantized(toys, precision), "as stored" if precision == "qint8" else precision
    is_tied = net.out.weight is net.embed.weight
    with machine(8, 8) as manager, torch.no_grad():
        with manage(net, profile, placement="gpu:0", precision=precision, manager=manager) as managed:
            managed_component = managed.members[0].managed
            want = net(X).cpu()
            if state == "at rest":
                managed_component.unload()
            net.to(device)
            for _ in range(2):
                assert torch.equal(net(X).cpu(), want)
            assert [sim.stats(n).used_bytes for n in (0, 1)] == [manager.ledger.used(f"gpu:{n}") for n in (0, 1)]
            net.to(device)
            managed_component.unload()
            assert weights_at_rest_are_in_their_slabs(managed)
            assert [sim.stats(n).used_bytes for n in (0, 1)] == [0, 0]
            net.to(device)
        assert all(tensor.device.type == "cpu" for tensor in (*net.parameters(), *net.buffers()))
        assert (net.out.weight is net.embed.weight) == is_tied


@pytest.mark.parametrize("state", ["resident", "at rest"])
def test_parts_that_were_moved_are_put_back_too(toys, machine, state: str) -> None:
    with machine(8) as manager, torch.no_grad():
        net = toys.build_net()
        with manage(net, placement="gpu:0", manager=manager) as managed:
            want = net(X).cpu()
            if state == "at rest":
                managed.members[0].managed.unload()
            net.doubles[1].to("cpu" if state == "resident" else "sim:0")
            assert torch.equal(net(X).cpu(), want)


def test_a_buffer_that_is_replaced_at_rest_is_taken_along(toys, machine) -> None:
    with machine(8) as manager, torch.no_grad():
        net = toys.build_net()
        with manage(net, placement="gpu:0", manager=manager):
            net.doubles[1].gain = torch.full((64,), 3.0, device="sim:0")
            net(X)
            assert torch.equal(net.doubles[1].gain.cpu(), torch.full((64,), 3.0))


@pytest.mark.parametrize("state", ["resident", "at rest"])
@pytest.mark.parametrize("precision", ["as stored", "fp8 scaled"])
@pytest.mark.parametrize("change", [torch.nn.Module.half, torch.nn.Module.double])
@pytest.mark.parametrize("evicts", [False, True])
def test_another_dtype_is_taken_over(
    toys, machine, conversion: str, state: str, precision: str, change, evicts: bool
) -> None:
    with machine(8) as manager, torch.no_grad():
        net, plain = toys.build_net(), toys.build_net()
        with manage(plain, placement="gpu:0", precision=precision, manager=manager):
            plain(X)  # rounds its weights as the other's are
        with manage(net, placement="gpu:0", precision=precision, manager=manager) as managed:
            assert torch.equal(net(X).cpu(), plain(X))
            for step in ("pass", "reprofile", "release"):
                for _ in range(2):
                    if state == "at rest":
                        managed.members[0].managed.unload()
                    before = next(net.parameters()).dtype
                    given = torch.nn.Module.float if before is not torch.float32 else change
                    given(net)
                    given(plain)
                    assert {tensor.dtype for tensor in net.parameters()} == {next(plain.parameters()).dtype}
                    if evicts:
                        managed.members[0].managed.unload()
                    if step == "reprofile":
                        managed.reprofile()
                    if step == "release":
                        managed.release()
                    inputs = X.to(next(plain.parameters()).dtype)
                    for _ in range(2):
                        assert torch.equal(net(inputs).cpu(), plain(inputs))
                        manager.ledger.check()
                    assert not managed.members[0].leases
        assert all(tensor.device.type == "cpu" for tensor in (*net.parameters(), *net.buffers()))
        assert (net.out.weight is net.embed.weight) == (plain.out.weight is plain.embed.weight)
        for name, tensor in plain.state_dict().items():
            assert torch.equal(net.state_dict()[name], tensor), name


def test_an_error_in_the_body_is_not_replaced_by_what_the_release_undid(toys, machine) -> None:
    with machine(8) as manager:
        net = toys.build_net()
        with pytest.raises(ValueError, match=r"^mine$"), manage(net, placement="gpu:0", manager=manager):
            net.embed.bias = torch.nn.Parameter(torch.zeros(64, device="meta"), requires_grad=False)
            raise ValueError("mine")
        assert not net.embed.bias.is_meta and not net._forward_pre_hooks


def test_a_release_tells_what_it_undid(toys, machine) -> None:
    with machine(8) as manager:
        net = toys.build_net()
        managed = manage(net, placement="gpu:0", manager=manager)
        net.embed.bias = torch.nn.Parameter(torch.zeros(64, device="meta"), requires_grad=False)
        with pytest.raises(UnsafeState, match=r"^model: 'embed.bias' was replaced; [^\n]*make it again now$"):
            managed.release()
        managed.release()
        assert not net.embed.bias.is_meta and not net._forward_pre_hooks


@pytest.mark.parametrize("state", ["resident", "at rest"])
def test_a_weight_of_another_shape_is_taken_over_by_reprofile_and_release(toys, machine, state: str) -> None:
    with machine(8) as manager, torch.no_grad():
        nets = [toys.build_net(), toys.build_net(seed=1)]
        plain = [toys.build_net(), toys.build_net(seed=1)]
        first, second = nets
        managed = manage({"first": first, "second": second}, placement="gpu:0", manager=manager)
        for then, shape in ((managed.reprofile, (1,)), (managed.reprofile, (192,)), (managed.release, (1,))):
            assert torch.equal(first(X).cpu(), plain[0](X))
            if state == "at rest":
                managed.members[0].managed.unload()
            for net in (first, plain[0]):
                net.singles[1].up.bias = torch.nn.Parameter(torch.ones(shape), requires_grad=False)
            then()
            manager.ledger.check()
        for net, other in zip(nets, plain, strict=True):  # released, all of it
            assert not net._forward_hooks
            assert torch.equal(net(X), other(X))
        assert first.singles[1].up.bias.shape == (1,)


@pytest.mark.parametrize("state", ["resident", "at rest"])
def test_what_rests_in_its_file_is_put_back_there(toys, machine, tmp_path, conversion: str, state: str) -> None:
    net, plain = (toys.build_net().half().float() for _ in range(2))  # of values that float16 has
    save_file({name: tensor.clone() for name, tensor in net.state_dict().items()}, tmp_path / "net.safetensors")
    with machine(8) as manager, torch.no_grad():
        files = {"net": [tmp_path / "net.safetensors"]}
        with manage({"net": net}, placement="gpu:0:disk", files=files, manager=manager) as managed:
            want = net(X).cpu()
            idle = manager.ledger.bytes_by_place("net").get("host")
            if state == "at rest":
                managed.members[0].managed.unload()
                net.to("sim:0")
                assert manager.ledger.bytes_by_place("net").get("host") == idle
            else:
                net.to("cpu")
            assert torch.equal(net(X).cpu(), want)
            net.half()
            assert torch.equal(net(X.half()).cpu(), plain.half()(X.half()))
            net.float()
            assert torch.equal(net(X).cpu(), want)
            managed.members[0].managed.unload()
            assert manager.ledger.bytes_by_place("net") == {"host": idle}
            assert all(parameter.is_meta for parameter in net.parameters())


def test_what_a_forward_wrote_into_buffers_stays(toys, machine, conversion: str) -> None:
    with machine(8) as manager, torch.no_grad():
        net = toys.build_net()
        with manage(net, placement="gpu:0", manager=manager) as managed:
            net(X)
            net.doubles[0].gain.mul_(2.0)
            net.doubles[1].gain = torch.full((64,), 3.0, device="sim:0")
            net.to("cpu")
            net(X)
            managed.members[0].managed.unload()
            assert torch.equal(net.doubles[0].gain, torch.ones(64))
            assert torch.equal(net.doubles[1].gain, torch.full((64,), 3.0))


def test_a_write_after_the_module_was_moved_is_kept(toys, machine) -> None:
    with machine(8) as manager, torch.no_grad():
        net = toys.build_net()
        with manage(net, placement="gpu:0", manager=manager) as managed:
            net(X)
            net.to("cpu")
            net(X)
            net.doubles[1].up.weight.fill_(7.0)
            managed.members[0].managed.unload()
            assert (net.doubles[1].up.weight == 7.0).all()


def test_what_computes_on_the_cpu_comes_back_there(toys, machine) -> None:
    with machine(8) as manager, torch.no_grad():
        net, want = toys.build_net(), toys.build_net()(X)
        with manage(net, placement="cpu", manager=manager):
            net.to("sim:0")
            assert torch.equal(net(X), want)
            assert net.out.weight is net.embed.weight


@pytest.mark.parametrize("num_writes", range(4))
def test_every_write_counts_also_after_the_weights_were_moved(toys, machine, conversion: str, num_writes: int) -> None:
    """As many writes before as the objects' counters lose: their sum stands still."""
    with machine(8) as manager, torch.no_grad():
        net, other = toys.build_net(), toys.build_net(seed=1)
        with manage(other, placement="gpu:0", manager=manager):
            want = other(X).cpu()
        with manage(net, "0.45MiB", placement="gpu:0", manager=manager):
            net(X)
            for _ in range(num_writes):  # to the weights that differ
                torch._foreach_mul_([weight for name, weight in net.named_parameters() if "norm" not in name], 1.0)
            net(X)
            net.to("sim:0")
            torch._foreach_copy_(list(net.parameters()), list(other.parameters()))
            assert torch.equal(net(X).cpu(), want)


@torch.no_grad()
@pytest.mark.parametrize("placement", ["gpu:0", "gpu:0:host", "gpu:0&gpu:1"])
@pytest.mark.parametrize("called", [False, True])
@pytest.mark.parametrize("which", ["embed", "out", "both, differently"])
def test_a_tied_weight_that_is_replaced_in_one_place_is_refused(
    toys, machine, which: str, called: bool, placement: str
) -> None:
    """In a plain module it is tied no more, and one weight is one weight here."""
    net, x = toys.build_net(), torch.randn(2, 5, 64)
    want, before = net(x), net.embed.weight.detach().clone()
    with machine(8, 8) as manager, manage(net, placement=placement, manager=manager):
        if called:
            net(x)
        for number, layer in enumerate((net.embed, net.out)):
            if which in (("embed", "out")[number], "both, differently"):
                layer.weight = nn.Parameter(before * (2 + number), requires_grad=False)
        with pytest.raises(UnsafeState, match="is tied, and was replaced in some of its places only; the change was"):
            net(x)
        assert torch.equal(net(x).cpu(), want)
    assert torch.equal(net.embed.weight, before) and net.out.weight is net.embed.weight


@torch.no_grad()
@pytest.mark.parametrize("placement", ["gpu:0", "gpu:0&gpu:1"])
def test_a_tied_weight_may_be_replaced_in_all_places(toys, machine, placement: str) -> None:
    net, plain, x = toys.build_net(), toys.build_net(), torch.randn(2, 5, 64)
    new = plain.embed.weight.detach() * 2
    plain.embed.weight = plain.out.weight = nn.Parameter(new.clone(), requires_grad=False)
    with machine(8, 8) as manager, manage(net, placement=placement, manager=manager):
        net(x)
        net.embed.weight = net.out.weight = nn.Parameter(new.clone(), requires_grad=False)
        assert torch.equal(net(x).cpu(), plain(x))
    assert torch.equal(net.embed.weight, new) and net.out.weight is net.embed.weight


@torch.no_grad()
def test_a_tied_quantized_weight_that_a_move_makes_two_equal_objects_is_tied_still(toys, machine) -> None:
    net, x = toys.build_net(), torch.randn(2, 5, 64)
    quanto.quantize(net, weights=quanto.qint8, include=["embed", "out"])
    quanto.freeze(net)
    net.out.weight = net.embed.weight
    want = net(x)
    with machine(8) as manager, manage(net, placement="gpu:0", manager=manager):
        first = net(x).cpu()
        form, leaves = form_of(net.embed.weight), [leaf.detach().cpu() for leaf in leaves_of(net.embed.weight)]
        for layer in (net.embed, net.out):  # as `Module.to` replaces what it cannot point elsewhere
            copied = form.assemble(iter([leaf.clone() for leaf in leaves]))
            layer.weight = nn.Parameter(copied, requires_grad=False)
        assert torch.equal(net(x).cpu(), first)
    assert torch.allclose(first, want, atol=1e-4)
