"""Modules that hold their weights in unusual ways, each resident, streamed, widened and on the CPU: as without us."""

from __future__ import annotations

import copy
import gc
import warnings
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, prune
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from highwater.memory import DoesNotFit, InvalidInput, manage
from highwater.memory.options.precision import Precision
from highwater.memory.planner.form_choice import choose_forms
from highwater.memory.weights.cast_form import find_scale
from highwater.memory.weights.fp8 import encode_fp8
from highwater.memory.weights.module_component import component_from_module

DIM = 64
X = torch.randn(2, DIM, generator=torch.Generator().manual_seed(0))
WAYS = ["resident", "streamed", "eight bits", "eight bits, streamed", "on the CPU"]


class Layer(nn.Module):
    def __init__(self, linear: nn.Module | None = None) -> None:
        super().__init__()
        self.linear = linear or nn.Linear(DIM, DIM)
        self.gate = nn.Linear(DIM, DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.linear(x)) * self.gate(x)


class Stack(nn.Module):
    """Six layers behind an embedder."""

    def __init__(self, build: Callable[[], nn.Module] = Layer) -> None:
        super().__init__()
        self.embed = nn.Linear(DIM, DIM)
        self.layers = nn.ModuleList(build() for _ in range(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return x


class Caching(Layer):
    """Makes a table where it computes, once, and keeps it in one of several ways."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.tables: dict[str, torch.Tensor] = {}
        self.table: torch.Tensor | None
        if how == "empty buffer":
            self.register_buffer("table", None, persistent=False)
        else:
            self.table = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.how == "in a dict":
            table = self.tables.setdefault("table", torch.arange(DIM, device=x.device, dtype=x.dtype))
        elif self.table is None:
            table = torch.arange(DIM, device=x.device, dtype=x.dtype)
            if self.how == "late buffer":
                del self.table
                self.register_buffer("table", table, persistent=False)
            else:
                self.table = table
        else:
            table = self.table
        return x + torch.sin(self.linear(x) + table)


class Listing(Layer):
    """Computes with a weight that it also has in a list and in a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = [self.linear.weight, "no weight"]
        self.named = {"bias": self.linear.bias}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(nn.functional.linear(x, self.weights[0], self.named["bias"])) * self.gate(x)


class Holding(Layer):
    """Has a parameter, or a buffer, of an unusual form."""

    def __init__(self, tensor: torch.Tensor, *, is_buffer: bool = False) -> None:
        super().__init__()
        if is_buffer:
            self.register_buffer("odd", tensor)
        else:
            self.odd = nn.Parameter(tensor, requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        return y * self.odd.abs() if self.odd.dim() == 1 and self.odd.numel() else y + self.odd.float().sum()


class Gathered(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.several = nn.ParameterList(torch.randn(DIM) for _ in range(2))
        self.named = nn.ParameterDict({"a": torch.randn(DIM)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.several[0] + self.several[1] * self.named["a"]


class Recurrent(Layer):
    """Its recurrent layer has its weights in a list, too, and weak references to those of the last call."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.linear(x)[0]) * self.gate(x)


def recurrent(kind: type[nn.RNNBase], **form: object) -> Callable[[], nn.Module]:
    return lambda: Stack(lambda: Recurrent(kind(DIM, **form)))


def holding(make: Callable[[], torch.Tensor], *, is_buffer: bool = False) -> Callable[[], nn.Module]:
    return lambda: Stack(lambda: Holding(make(), is_buffer=is_buffer))


def views_of_one() -> nn.Module:
    net = Stack()
    flat = torch.randn(6 * DIM)
    for layer, part in zip(net.layers, flat.split(DIM), strict=True):
        layer.linear.bias = nn.Parameter(part)
    return net


def normed(norm: Callable[[nn.Module], nn.Module]) -> Callable[[], nn.Module]:
    return lambda: Stack(lambda: Layer(norm(nn.Linear(DIM, DIM))))


def tied(what: str) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        net = Stack()
        one, other = net.layers[1], net.layers[4]
        match what:
            case "weight":
                other.linear.weight = one.linear.weight
            case "layer":
                other.linear = one.linear
            case "block":
                net.layers[4] = one
            case "all":
                for layer in net.layers:
                    layer.linear.weight = one.linear.weight
            case "with the rest":
                other.linear.weight = net.embed.weight
            case "with the root":
                net.weight = one.linear.weight
        return net

    return build


NETS: dict[str, Callable[[], nn.Module]] = {
    "plain": Stack,
    "weight_norm of the old kind": normed(nn.utils.weight_norm),
    "spectral_norm of the old kind": normed(nn.utils.spectral_norm),
    "pruned": normed(lambda layer: prune.random_unstructured(layer, "weight", 0.5)),
    "weight_norm": normed(parametrizations.weight_norm),
    "spectral_norm": normed(parametrizations.spectral_norm),
    "orthogonal": normed(parametrizations.orthogonal),
    **{f"tied: {what}": tied(what) for what in ("weight", "layer", "block", "all", "with the rest", "with the root")},
    "weights in lists": lambda: Stack(Listing),
    "parameter lists and dicts": lambda: Stack(Gathered),
    "RNN": recurrent(nn.RNN, hidden_size=DIM),
    "GRU": recurrent(nn.GRU, hidden_size=DIM),
    "LSTM": recurrent(nn.LSTM, hidden_size=DIM, num_layers=2),
    "LSTM of both directions": recurrent(nn.LSTM, hidden_size=DIM // 2, bidirectional=True),
    "views of one tensor": views_of_one,
    "expanded": holding(lambda: torch.randn(1).expand(DIM)),
    "no elements": holding(lambda: torch.zeros(0, DIM)),
    "a scalar": holding(lambda: torch.tensor(2.0)),
    "transposed": holding(lambda: torch.randn(DIM, 8).t()),
    "with gaps": holding(lambda: torch.randn(8, 2 * DIM)[:, ::2]),
    "complex": holding(lambda: torch.randn(DIM, dtype=torch.complex64)),
    "conjugated": holding(lambda: torch.randn(DIM, dtype=torch.complex64).conj(), is_buffer=True),
    "integers": holding(lambda: torch.arange(DIM)),
    "booleans": holding(lambda: torch.ones(8, 8, dtype=torch.bool), is_buffer=True),
    **{
        f"cache: {how}": lambda how=how: Stack(lambda: Caching(how))
        for how in ("attribute", "in a dict", "empty buffer", "late buffer")
    },
}


def build_net(name: str) -> nn.Module:
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of the norms of the old kind
        torch.manual_seed(0)
        return NETS[name]().eval().requires_grad_(False)


def round_to_eight_bits(net: nn.Module) -> None:
    for name in choose_forms(component_from_module(net, name="model"), Precision.ENCODED):
        weight = net.get_parameter(name)
        scale = find_scale(weight, name=name)
        weight.copy_(encode_fp8(weight, scale).to(weight.dtype) * scale)


def manage_so(net: nn.Module, way: str, manager) -> object:
    """Return the module under management in one of the ways; as little as computes where it streams."""
    if way == "on the CPU":
        return manage(net, placement="cpu", manager=manager)
    chosen = {"precision": "fp8 scaled"} if way.startswith("eight bits") else {}
    num_bytes = sum(weight.nbytes for weight in (*net.parameters(), *net.buffers()))
    for share in (0.3, 0.4, 0.5, 0.6, 0.7, 0.8) if way.endswith("streamed") else ():
        try:
            managed = manage(
                net, f"{share * num_bytes / (1 << 20):.4f}MiB", placement="gpu:0", manager=manager, **chosen
            )
        except (DoesNotFit, InvalidInput):
            continue
        if managed.plan.components[0].shares[0].streamed:
            return managed
        managed.release()
    return manage(net, placement="gpu:0", manager=manager, **chosen)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", NETS)
@torch.no_grad()
def test_odd_modules_compute_as_without_us_and_come_back_whole(machine, sim, name: str, way: str) -> None:
    net, plain = build_net(name), build_net(name)
    device = "cpu" if way == "on the CPU" else "sim:0"
    state = {key: tensor.clone() for key, tensor in net.state_dict().items()}
    with machine(8) as manager:
        if way.startswith("eight bits"):
            round_to_eight_bits(plain)
        plain.to(device)
        want = [plain(X.to(device)).cpu() for _ in range(3)]
        del plain
        gc.collect()  # parametrized layers are cycles
        for _ in range(2):
            with manage_so(net, way, manager) as managed:
                for expected in want:
                    assert torch.equal(net(X).cpu(), expected)
                    managed.members[0].managed.unload()
            assert sim.stats(0).used_bytes == 0
        for part in net.modules():
            assert all(value.device.type == "cpu" for value in vars(part).values() if isinstance(value, torch.Tensor))
        assert net.state_dict().keys() == state.keys()
        if not way.startswith("eight bits"):
            assert all(torch.equal(tensor, state[key]) for key, tensor in net.state_dict().items())
            assert torch.allclose(net(X), want[-1], atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("way", WAYS)
def test_a_recurrent_layer_never_makes_its_list_of_weights_anew(machine, way: str) -> None:
    """Where it does, cuDNN packs the weights into device memory of its own, and those in the list stay there."""
    with machine(8) as manager:
        net = build_net("LSTM")
        layers = [layer.linear for layer in net.layers]
        lists = [layer._flat_weights for layer in layers]
        with manage_so(net, way, manager):
            for _ in range(2):
                net(X)
                assert all(layer._flat_weights is known for layer, known in zip(layers, lists, strict=True))
        assert not any(layer._weights_have_changed() for layer in layers)


class Packed(nn.Module):
    """Two recurrent layers, the second of which gets what the first returns, packed."""

    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(kind(DIM, DIM, batch_first=True) for _ in range(3))

    def forward(self, packed: PackedSequence) -> torch.Tensor:
        for layer in self.layers:
            packed, _ = layer(packed)
        return pad_packed_sequence(packed, batch_first=True)[0]


@torch.no_grad()
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_packed_sequences_keep_the_sizes_of_their_batches_on_the_cpu(machine, kind: type[nn.Module], way: str) -> None:
    torch.manual_seed(0)
    net = Packed(kind).eval()
    plain = copy.deepcopy(net)
    device = "cpu" if way == "on the CPU" else "sim:0"
    packed = pack_padded_sequence(torch.randn(2, 4, DIM), [4, 2], batch_first=True)
    with machine(8) as manager:
        if way.startswith("eight bits"):
            round_to_eight_bits(plain)
        want = plain.to(device)(packed.to(device)).cpu()
        with manage_so(net, way, manager):
            for _ in range(2):
                assert torch.equal(net(packed).cpu(), want)
                assert torch.equal(net(packed.to(device)).cpu(), want)
        del plain


@torch.no_grad()
def test_a_recurrent_layer_that_was_moved_meanwhile_computes_and_comes_back(machine, sim) -> None:
    net = build_net("LSTM")
    with machine(8) as manager:
        plain = build_net("LSTM").to("sim:0")
        with manage(net, placement="gpu:0", manager=manager):
            net.to("sim:0")  # makes the list anew
            assert torch.equal(net(X).cpu(), plain(X.to("sim:0")).cpu())
        assert {weight.device.type for layer in net.layers for weight in layer.linear._flat_weights} == {"cpu"}
        del plain
        assert sim.stats(0).used_bytes == 0


@torch.no_grad()
@pytest.mark.parametrize("way", [*WAYS[:2], "split", "eight bits"])
def test_encodec_computes_as_without_us(machine, sim, way: str) -> None:
    """It is a part of MusicGen, and has an LSTM between its convolutions."""
    transformers = pytest.importorskip("transformers")
    config = transformers.EncodecConfig(
        hidden_size=32, num_filters=8, upsampling_ratios=[4, 2], codebook_size=64, codebook_dim=32
    )
    torch.manual_seed(0)
    net = transformers.EncodecModel(config).eval()
    sound = torch.randn(1, 1, 320)
    state = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    with machine(8, 8) as manager:
        plain = copy.deepcopy(net)
        if way == "eight bits":
            round_to_eight_bits(plain)
        want = plain.to("sim:0")(sound.to("sim:0")).audio_values.cpu()
        del plain
        gc.collect()
        split = manage(net, placement="gpu:0&gpu:1", manager=manager) if way == "split" else None
        with split or manage_so(net, way, manager):
            for _ in range(2):
                assert torch.equal(net(sound).audio_values.cpu(), want)
        assert sim.stats(0).used_bytes == sim.stats(1).used_bytes == 0
    assert all(torch.equal(tensor, state[name]) for name, tensor in net.state_dict().items() if way != "eight bits")


@torch.no_grad()
@pytest.mark.parametrize("name", ["weight_norm of the old kind", "spectral_norm of the old kind", "pruned"])
def test_computed_weights_take_no_more_memory_than_one_layer_does(machine, sim, name: str) -> None:
    with machine(8) as manager:
        net = build_net(name)
        with manage(net, placement="gpu:0", manager=manager):
            for _ in range(2):
                net(X)
                assert sim.stats(0).used_bytes == manager.ledger.used("gpu:0")


@torch.no_grad()
def test_weights_tied_between_blocks_are_in_none_of_them(toys) -> None:
    component = component_from_module(build_net("tied: weight"), name="model")
    assert [block.name for block in component.blocks] == [f"layers.{number}" for number in range(6)]
    assert "layers.1.linear.weight" in {tensor.name for tensor in component.non_block.tensors}
    inside = component_from_module(build_net("tied: block"), name="model")
    assert "layers.1.linear.weight" not in {tensor.name for tensor in inside.non_block.tensors}


class Asking(Stack):
    """Makes a tensor where its first weight is, which lies in a block."""

    def __init__(self) -> None:
        super().__init__()
        del self.embed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = next(self.parameters())
        x = x + torch.ones(DIM, device=first.device, dtype=first.dtype)
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.mark.parametrize("way", WAYS)
@torch.no_grad()
def test_a_parent_that_asks_a_weight_of_a_block_for_its_device(machine, way: str) -> None:
    net = nn.Sequential(Layer(), Asking(), Layer()).eval().requires_grad_(False)
    with machine(8) as manager, manage_so(net, way, manager) as managed:
        for _ in range(2):
            got = net(X).cpu()
        managed.reprofile("unlimited")
        assert torch.equal(net(X).cpu(), got)
    net(X)


class Using(Asking):
    """Computes with a weight of a block that is not there."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x @ next(self.parameters()))


@pytest.mark.parametrize("way", WAYS)
@torch.no_grad()
def test_a_parent_that_uses_a_weight_of_a_block(machine, way: str) -> None:
    """It computes where the block is resident; else one line says why it fails, and what helps."""
    net = nn.Sequential(Layer(), Using(), Layer()).eval().requires_grad_(False)
    words = (
        r"^\w+: a tensor on cpu was used with weights on gpu:0 (before its first block|after block 0): .*choose a "
        r"profile with all blocks resident, or larger blocks, if the module uses weights of a block, or their \.device"
    )
    with machine(8) as manager, manage_so(net, way, manager) as managed:
        for _ in range(2):
            if way.endswith("streamed"):
                with pytest.raises(RuntimeError, match=words):
                    net(X)
            else:
                assert net(X).shape == X.shape
            assert not managed.members[0].leases
        managed.reprofile("unlimited")
        net(X)
    net(X)


@pytest.mark.parametrize("way", ["resident", "streamed", "split"])
@torch.no_grad()
def test_layers_that_torch_quantizes_in_place_compute_as_without_us(toys, machine, way: str) -> None:
    """Torch copies the hooks of each layer to the one that takes its place, without the keyword arguments."""
    net, plain = toys.build_net(), toys.build_net()
    x = torch.randn(2, 4, DIM, generator=torch.Generator().manual_seed(1))
    quantize = partial(torch.ao.quantization.quantize_dynamic, qconfig_spec={nn.Linear}, inplace=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with machine(8, 8) as manager:
            split = manage(net, placement="gpu:0&gpu:1", manager=manager) if way == "split" else None
            with split or manage_so(net, way, manager):
                quantize(net)
                want = quantize(plain)(x)
                assert torch.equal(net(x).cpu(), want)
                assert torch.equal(net(x).cpu(), want)
            assert torch.equal(net(x), want)
        copy.deepcopy(net)
    assert not any(part._forward_pre_hooks or part._forward_hooks for part in net.modules())


class Doubled(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(x)


@pytest.mark.parametrize("way", ["resident", "streamed", "split"])
@torch.no_grad()
def test_a_layer_that_takes_the_hooks_of_the_one_before_it_computes_once(machine, way: str) -> None:
    """As torch's quantization does: blocks, layers inside them and the embedder, each with its weights."""
    net = nn.Sequential(*[nn.Linear(DIM, DIM) for _ in range(6)]) if way == "streamed" else build_net("plain")
    plain = copy.deepcopy(net)
    with machine(8, 8) as manager:
        split = manage(net, placement="gpu:0&gpu:1", manager=manager) if way == "split" else None
        with split or manage_so(net, way, manager):
            for root in (net, plain):
                for name, layer in [(n, part) for n, part in root.named_modules() if isinstance(part, nn.Linear)]:
                    new = Doubled(DIM, DIM)
                    new.weight, new.bias = layer.weight, layer.bias
                    for hook in layer._forward_pre_hooks.values():
                        new.register_forward_pre_hook(hook)
                    for hook in layer._forward_hooks.values():
                        new.register_forward_hook(hook)
                    root.set_submodule(name, new)
            for _ in range(2):
                assert torch.allclose(net(X).cpu(), plain(X), rtol=1e-4, atol=1e-4)
    assert not any(part._forward_pre_hooks or part._forward_hooks for part in net.modules())
    assert torch.equal(net(X), plain(X))
