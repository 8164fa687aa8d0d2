"""Components on demand: what each use of one does before it is loaded, and that none of them returns wrong values.

Elsewhere: writes, reading for good and conversions (runtime/test_weights_on_disk.py, test_converted_weights.py), copies
of parts and saved weights (runtime/test_copies_of_weights.py), copies of managed modules in RAM (test_copies.py).
"""

from __future__ import annotations

import copy
import io
import json
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
import transformers
from safetensors.torch import save_file
from torch import nn

from highwater.memory import InvalidInput, load_model, load_weights, manage
from highwater.memory.errors import UnsafeState
from highwater.memory.weights.source import WeightsSource

STATES = ("unread", "unloaded", "loaded", "of a pipeline")
MANAGED = STATES[1:]


class Toy(nn.Module):
    """A convolution, a buffer that forwards change, and layers without bias, which torch computes from no memory."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 3, padding=1)
        self.blocks = nn.ModuleList(nn.Linear(32, 32, bias=False) for _ in range(4))
        self.register_buffer("gain", torch.ones(32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.conv(x)
        for block in self.blocks:
            x = x + block(x) * self.gain
        return x


def toy() -> tuple[nn.Module, dict[str, Any], dict[str, Any]]:
    return Toy(), {}, {"x": torch.randn(1, 4, 32, 32)}


def of_transformers() -> tuple[nn.Module, dict[str, Any], dict[str, Any]]:
    config = transformers.CLIPTextConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=2,
        bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    model = transformers.CLIPTextModel(config)
    return model, {**config.to_dict(), "architectures": ["CLIPTextModel"]}, {"input_ids": torch.arange(1, 9)[None]}


def of_diffusers() -> tuple[nn.Module, dict[str, Any], dict[str, Any]]:
    model = diffusers.UNet2DModel(
        sample_size=8, block_out_channels=(32, 32), layers_per_block=1,
        down_block_types=("DownBlock2D", "DownBlock2D"), up_block_types=("UpBlock2D", "UpBlock2D"),
    )  # fmt: skip
    return model, json.loads(model.to_json_string()), {"sample": torch.randn(1, 3, 8, 8), "timestep": torch.tensor([3])}


@dataclass
class Saved:
    """A model, its file, and what it returns for its inputs."""

    model: nn.Module
    path: Path
    config: dict[str, Any]
    inputs: dict[str, torch.Tensor]
    want: torch.Tensor

    def load(self) -> Any:
        model_class = Toy if isinstance(self.model, Toy) else None
        return load_model(self.path, model_class, config=self.config)

    def result(self, module: nn.Module) -> torch.Tensor:
        return result_of(module, self.inputs)


def result_of(module: nn.Module, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    with torch.no_grad():
        result = module(**inputs)
    return (result if isinstance(result, torch.Tensor) else next(iter(result.values()))).cpu()


@pytest.fixture(scope="module", params=[toy, of_transformers, of_diffusers], ids=lambda build: build.__name__)
def saved(request, sim, tmp_path_factory) -> Saved:
    torch.manual_seed(0)
    model, config, inputs = request.param()
    model.eval().requires_grad_(False)
    path = tmp_path_factory.mktemp("models") / "model.safetensors"
    save_file({name: tensor.contiguous() for name, tensor in model.state_dict().items()}, path)
    want = result_of(model.to("sim:0"), {name: tensor.to("sim:0") for name, tensor in inputs.items()})
    return Saved(model.to("cpu"), path, config, inputs, want)


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the weights that were read from files."""
    names: list[str] = []
    read_into = WeightsSource.read_into

    def record(self, targets, **options) -> None:
        targets = list(targets)
        names.extend(name for name, *_ in targets)
        read_into(self, targets, **options)

    monkeypatch.setattr(WeightsSource, "read_into", record)
    return names


@pytest.fixture
def component(machine, saved: Saved, toys, reads: list[str]):
    """Return a context manager: a component in one of the states, and its manager (None: it is not managed)."""

    @contextmanager
    def build(state: str) -> Iterator[tuple[Any, Any]]:
        module = saved.load()
        if state == "unread":
            reads.clear()
            yield module, None
            return
        with machine(8, 8) as manager:
            parts = {"part": module}
            placement = "part=gpu:0:disk"
            if state == "of a pipeline":
                parts["net"], placement = toys.build_net(), f"{placement},net=gpu:0"
            with manage(parts, placement=placement, manager=manager):
                if state == "loaded":
                    saved.result(module)
                reads.clear()
                yield module, manager

    return build


def first_layer(module: nn.Module) -> Any:
    return next(part for part in module.modules() if isinstance(part, nn.Linear))


def set_for_each(name: str, value: object) -> Callable[[nn.Module], None]:
    def act(module: nn.Module) -> None:
        for weight in module.parameters():
            setattr(weight, name, value)

    return act


def hook_and_unhook(module: nn.Module) -> None:
    module.register_forward_hook(lambda *_: None).remove()
    module.register_forward_pre_hook(lambda *_: None)
    module.register_state_dict_post_hook(lambda *_: None)


def put_attributes(module: Any) -> None:
    module.note = [1, 2]
    assert hasattr(module, "note") and module.note == [1, 2]
    del module.note
    assert not hasattr(module, "note") and getattr(module, "note", 3) == 3


def check_metadata(module: Any) -> None:
    forms = [(name, weight.shape, weight.dtype) for name, weight in module.named_parameters()]
    assert pickle.loads(pickle.dumps(forms)) == copy.deepcopy(forms) == forms
    if hasattr(module, "config"):
        config = pickle.loads(pickle.dumps(module.config))
        assert dict(config) == dict(module.config) if isinstance(config, dict) else config == module.config
        assert copy.deepcopy(module.config) is not module.config


def check_names(module: Any) -> None:
    assert module and repr(module) and dir(module)
    assert [name for name, _ in module.named_parameters()] and list(module.named_modules()) and module in {module}
    assert all(isinstance(weight, nn.Parameter) and repr(weight) for weight in module.parameters())
    assert len(set(module.parameters())) == len(list(module.parameters()))
    for part in module.modules():
        assert isinstance(part, nn.Module) and hasattr(part, "forward") and not hasattr(part, "no such name")
    assert callable(module.forward) and isinstance(module, type(module))
    with pytest.raises(AttributeError, match="no_such_name"):
        module.no_such_name  # noqa: B018


def check_modes(module: Any) -> None:
    assert module.train(True) is module and all(part.training for part in module.modules())
    assert module.eval() is module and module.train(False) is module
    assert not any(part.training for part in module.modules())


def check_gradients(module: Any) -> None:
    for wanted in (True, False):
        assert module.requires_grad_(wanted) is module
        assert {weight.requires_grad for weight in module.parameters()} == {wanted}
    module.zero_grad()


def check_same_dtype(module: Any) -> None:
    assert module.to(torch.float32) is module and module.float() is module
    assert module.to(dtype=torch.float32, non_blocking=True) is module


ASKS: dict[str, Callable[[Any], object]] = {
    "names": check_names,
    "metadata": check_metadata,
    "modes": check_modes,
    "gradients": check_gradients,
    "requires_grad =": set_for_each("requires_grad", False),
    "grad =": set_for_each("grad", None),
    "attributes": put_attributes,
    "attributes of weights": set_for_each("note", 1),
    "hooks": hook_and_unhook,
    "its own dtype": check_same_dtype,
    "its own format": lambda module: module.to(memory_format=torch.contiguous_format),
    "a shallow copy": copy.copy,
    "an optimizer": lambda module: torch.optim.SGD(module.parameters(), lr=0.1),
    "apply": lambda module: module.apply(lambda part: part.extra_repr()),
}


@pytest.mark.parametrize("state", STATES)
def test_what_needs_no_values_reads_nothing(component, saved, reads, state: str) -> None:
    with component(state) as (module, manager):
        places = manager and manager.ledger.bytes_by_place("part")
        classes = [type(weight) for weight in module.parameters()]
        for name, ask in ASKS.items():
            ask(module)
            assert not reads, name
            assert (manager and manager.ledger.bytes_by_place("part")) == places, name
            assert [type(weight) for weight in module.parameters()] == classes, name
        if manager is None:
            load_weights(module)
            assert_equal_states(module, saved.model)
        else:
            assert torch.equal(saved.result(module), saved.want)


def assert_equal_states(module: nn.Module, want: nn.Module) -> None:
    state, wanted = module.state_dict(), want.state_dict()
    assert list(state) == list(wanted)
    assert all(torch.equal(state[name].cpu(), tensor) for name, tensor in wanted.items())


# -- moves

MOVES: dict[str, Callable[[nn.Module], object]] = {
    "to another device": lambda module: module.to("sim:1"),
    "to its device": lambda module: module.to(torch.device("sim:0"), torch.float32, non_blocking=True),
    "to the CPU": lambda module: module.cpu(),
    "channels last": lambda module: module.to(memory_format=torch.channels_last),
}


@pytest.mark.parametrize("state", MANAGED)
def test_a_move_reads_nothing_and_the_next_call_computes(component, saved, reads, state: str) -> None:
    """A pipeline moves all its parts; where this one computes, its plan says."""
    with component(state) as (module, manager):
        places = manager.ledger.bytes_by_place("part")
        for name, move in MOVES.items():
            assert move(module) is module
            assert not reads and manager.ledger.bytes_by_place("part") == places, name
            assert torch.equal(saved.result(module), saved.want), name
            assert manager.ledger.held("part", "gpu:0") and not manager.ledger.held("part", "gpu:1")
            manager.ledger.check()
            if state != "loaded":
                manager.members["part"].managed.unload()
            reads.clear()


@pytest.mark.parametrize("state", MANAGED)
def test_a_move_to_meta_is_undone(component, saved, reads, state: str) -> None:
    """What is on a device loses its values by that, which is told once; what has none yet loses nothing."""
    with component(state) as (module, _):
        assert module.to("meta") is module and not reads
        if state == "loaded":
            with pytest.raises(UnsafeState, match=r"^part: .* was replaced; the change was undone"):
                saved.result(module)
        assert torch.equal(saved.result(module), saved.want)


@torch.no_grad()
@pytest.mark.parametrize("state", ["unloaded", "of a pipeline"])
def test_one_weight_is_moved_by_a_copy_that_stays_nowhere(component, saved, reads, state: str) -> None:
    with component(state) as (module, manager):
        places = manager.ledger.bytes_by_place("part")
        weight, want = first_layer(module).weight, first_layer(saved.model).weight
        moved = [weight.to("sim:1"), weight.to("cpu", copy=True), weight.to(device="sim:0"), weight.to("meta")]
        assert [each.device.type for each in moved] == ["sim", "cpu", "sim", "meta"]
        assert all(torch.equal(each.cpu(), want) for each in moved[:3])
        moved.clear()
        assert len(reads) == 3 and manager.ledger.bytes_by_place("part") == places
        assert weight.cpu() is weight.to(torch.float32) is weight
        assert torch.equal(saved.result(module), saved.want)


@torch.no_grad()
@pytest.mark.parametrize("state", ["unloaded", "of a pipeline"])
def test_what_is_made_like_a_weight_is_where_the_weight_says_it_is(component, reads, state: str) -> None:
    with component(state) as (module, _):
        weight = first_layer(module).weight
        other = torch.arange(3, dtype=torch.float16)
        taken = [other.to(weight), other.type_as(weight), weight.new_tensor([0.0, 1.0, 2.0])]
        made = [torch.zeros_like(weight), torch.zeros_like(input=weight), weight.data.new_zeros(weight.shape)]
        for each in (*made, *taken):
            assert each.device == weight.device == torch.device("cpu") and each.dtype is weight.dtype
        assert all(each.tolist() == other.tolist() for each in taken)
        assert all(each.shape == weight.shape and each.is_contiguous() and not each.any() for each in made)
        assert torch.zeros_like(weight, device="meta").is_meta
        assert not reads


# -- before it is managed or read

REFUSAL = r"^'\S+' is still in \S+: manage .* load_weights\(model\)"
USES: dict[str, Callable[[Any, dict[str, torch.Tensor]], object]] = {
    "call": lambda module, inputs: module(**inputs),
    "call of a shallow copy": lambda module, inputs: copy.copy(module)(**inputs),
    "call of a part": lambda module, _: first_layer(module)(torch.ones(1, first_layer(module).in_features)),
    "operator": lambda module, _: first_layer(module).weight + 1,
    "product": lambda module, _: torch.ones(1, first_layer(module).out_features) @ first_layer(module).weight,
    "values": lambda module, _: first_layer(module).weight.tolist(),
    "data": lambda module, _: first_layer(module).weight.data.sum(),
    "write": lambda module, _: nn.init.zeros_(first_layer(module).weight),
    "assigned data": lambda module, _: setattr(first_layer(module).weight, "data", torch.zeros(2)),
    "numpy": lambda module, _: first_layer(module).weight.numpy(),
    "device": lambda module, _: module.to("sim:0"),
    "CPU": lambda module, _: module.cpu(),
    "dtype": lambda module, _: module.half(),
    "dtype of a weight": lambda module, _: first_layer(module).weight.to(torch.ones(2, dtype=torch.float16)),
    "another tensor's": lambda module, _: torch.ones(2).to(first_layer(module).weight),
    "form of another": lambda module, _: torch.ones(2).type_as(first_layer(module).weight),
    "pickle": lambda module, _: pickle.dumps(module),
    "pickle of a weight": lambda module, _: pickle.dumps(first_layer(module).weight),
    "save": lambda module, _: torch.save(module, io.BytesIO()),
    "save of its state": lambda module, _: torch.save(module.state_dict(), io.BytesIO()),
    "file of its state": lambda module, _: save_file(module.state_dict(), "never.safetensors"),
    "shared memory": lambda module, _: module.share_memory(),
    "vector": lambda module, _: nn.utils.parameters_to_vector(module.parameters()),
}


def test_what_needs_unread_values_is_one_line_that_names_the_file(component, saved, machine, reads) -> None:
    with component("unread") as (module, _), torch.no_grad():
        for name, use in USES.items():
            with pytest.raises(UnsafeState, match=REFUSAL) as refusal:
                use(module, saved.inputs)
                pytest.fail(f"{name} went through")
            assert str(saved.path) in str(refusal.value) and "\n" not in str(refusal.value), name
        assert not reads
        with machine(8) as manager, manage({"part": module}, placement="gpu:0:disk", manager=manager):
            assert torch.equal(saved.result(module), saved.want)


@pytest.mark.filterwarnings("ignore:.*copying from a non-meta parameter:UserWarning")
def test_values_for_an_unread_module_are_taken_whole_or_not_at_all(component, saved) -> None:
    with component("unread") as (module, _):
        with pytest.raises(RuntimeError, match="is still in"):
            module.load_state_dict(saved.model.state_dict())  # torch alone would warn, and change nothing
        module.load_state_dict(saved.model.state_dict(), assign=True)
        assert torch.equal(saved.result(module), saved.result(saved.model))
        assert pickle.loads(pickle.dumps(module)) is not None


@torch.no_grad()
@pytest.mark.parametrize("state", MANAGED)
def test_unread_values_reach_no_managed_module(component, saved, state: str) -> None:
    with component(state) as (module, _):
        other = first_layer(saved.load()).weight
        for use in (
            lambda weight: weight.copy_(other),
            lambda weight: weight + other,
            lambda weight: other.add_(weight),
        ):
            with pytest.raises(UnsafeState, match=REFUSAL):
                use(first_layer(module).weight)
        assert torch.equal(saved.result(module), saved.want)


def test_shapes_are_computed_from_shapes(component, saved) -> None:
    with component("unread") as (module, _), torch.no_grad():
        result = module.to("meta")(**{name: tensor.to("meta") for name, tensor in saved.inputs.items()})
        result = result if isinstance(result, torch.Tensor) else next(iter(result.values()))
        assert result.is_meta and result.shape == saved.want.shape


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy])
@pytest.mark.parametrize("placement", ["gpu:0:disk", "gpu:0:pinned", "cpu"])
def test_a_copy_of_an_unread_module_knows_its_file(component, saved, machine, copied, placement: str) -> None:
    with component("unread") as (module, _), machine(8) as manager:
        other = copied(module)
        assert type(other) is type(module) and other is not module
        shares = next(other.parameters()) is next(module.parameters())
        assert shares == (copied is copy.copy)
        with manage({"part": other}, placement=placement, manager=manager):
            want = saved.result(saved.model) if placement == "cpu" else saved.want
            assert torch.equal(saved.result(other), want)
        if copied is copy.deepcopy:
            with pytest.raises(UnsafeState, match="is still in"):
                saved.result(module)
        load_weights(module)
        assert_equal_states(module, saved.model)


@pytest.mark.parametrize("change", [lambda module: setattr(module, "more", nn.Linear(2, 2)), None])
def test_what_is_not_the_module_of_a_file_cannot_be_managed_and_says_why(component, machine, change) -> None:
    with component("unread") as (module, _), machine(8) as manager:
        if change is not None:
            change(module)
        target = module if change is not None else first_layer(module)
        with pytest.raises(InvalidInput, match=r"^part: '\S+' is still in .*as load_model returned it"):
            manage({"part": target}, placement="gpu:0", manager=manager)


@pytest.mark.parametrize("placement", ["gpu:0:disk", "gpu:0:pinned", "gpu:0:host", "cpu"])
def test_after_its_release_a_module_is_unread_again_or_a_plain_one(component, saved, machine, placement: str) -> None:
    with component("unread") as (module, _), machine(8) as manager:
        with pytest.raises(InvalidInput):
            manage({"part": module}, "0.0001MiB", placement="gpu:0:disk", manager=manager)
        for _ in range(2):
            with manage({"part": module}, placement=placement, manager=manager):
                weight = first_layer(module).weight
                saved.result(module)
        if placement == "gpu:0:disk":
            for use in (lambda: saved.result(module), lambda: pickle.dumps(module), weight.sum):
                with pytest.raises(UnsafeState, match="is still in"):
                    use()
            load_weights(module)
        assert torch.equal(saved.result(module), saved.result(saved.model))
        assert all(type(each) is nn.Parameter and not vars(each) for each in module.parameters())
        assert_equal_states(pickle.loads(pickle.dumps(module)), saved.model)


# -- while it is managed


@pytest.mark.parametrize("state", MANAGED)
def test_a_managed_one_refuses_to_be_copied_whole_and_reads_nothing(component, saved, reads, state: str) -> None:
    with component(state) as (module, _):
        for way in (pickle.dumps, copy.deepcopy, lambda module: torch.save(module, io.BytesIO())):
            with pytest.raises(UnsafeState, match=r"^part is managed: release it before (copying|pickling) its module"):
                way(module)
        assert not reads
        assert torch.equal(saved.result(module), saved.want)


@torch.no_grad()
@pytest.mark.parametrize("state", MANAGED)
def test_its_values_can_be_pickled_and_saved(component, saved, reads, state: str) -> None:
    with component(state) as (module, manager):
        places = manager.ledger.bytes_by_place("part")
        file = io.BytesIO()
        torch.save(module.state_dict(), file)
        state_dict = torch.load(io.BytesIO(file.getvalue()))
        assert state_dict.keys() == saved.model.state_dict().keys()
        assert all(torch.equal(state_dict[name].cpu(), each) for name, each in saved.model.state_dict().items())
        del state_dict
        assert manager.ledger.bytes_by_place("part") == places
        taken = [pickle.loads(pickle.dumps(first_layer(module).weight)), first_layer(module).weight.clone()]
        assert all(torch.equal(taken.pop().cpu(), first_layer(saved.model).weight) for _ in range(2))


@torch.no_grad()
@pytest.mark.parametrize("state", MANAGED)
def test_hooks_and_copies_that_were_made_before_it_is_loaded_see_it_compute(component, saved, state: str) -> None:
    with component(state) as (module, _):
        seen: list[Any] = []
        module.register_forward_pre_hook(lambda *_: seen.append("before"))
        first_layer(module).register_forward_hook(lambda layer, *_: seen.append(layer.weight.device.type))
        shallow = copy.copy(module)
        assert torch.equal(saved.result(shallow), saved.want)
        assert torch.equal(saved.result(module), saved.want)
        assert seen == ["before", "sim", "before", "sim"]


@torch.no_grad()
@pytest.mark.parametrize("state", MANAGED)
def test_a_layer_that_is_called_by_itself_computes(component, saved, state: str) -> None:
    """A block, in the toy; a layer that holds non-block weights, or one inside a block, in the others."""
    with component(state) as (module, _):
        layer, plain = first_layer(module), copy.deepcopy(first_layer(saved.model))
        x = torch.ones(2, layer.in_features, device="sim:0" if state == "loaded" else "cpu")
        result = layer(x)
        assert torch.equal(result, plain.to(result.device)(x.to(result.device)))
        del result, plain, x
        assert torch.equal(saved.result(module), saved.want)


class Pipeline(diffusers.DiffusionPipeline):
    def __init__(self, part: nn.Module, net: nn.Module) -> None:
        super().__init__()
        self.register_modules(part=part, net=net)


@pytest.mark.parametrize("saved", [of_transformers, of_diffusers], indirect=True)
def test_a_pipeline_moves_and_freezes_all_its_parts_and_reads_nothing(saved, machine, reads) -> None:
    net, *_ = of_diffusers()
    pipe = Pipeline(saved.load(), net.eval().requires_grad_(False))
    with machine(8) as manager, manage(pipe, placement="part=gpu:0:disk,net=gpu:0", manager=manager):
        reads.clear()
        for move in (lambda: pipe.to("sim:0"), lambda: pipe.to(torch.float32), lambda: pipe.to("cpu", torch.float32)):
            assert move() is pipe
        for part in pipe.components.values():
            part.requires_grad_(False).eval()
        assert pipe.device == torch.device("sim:0") and pipe.dtype is torch.float32
        assert not reads and set(manager.ledger.bytes_by_place("part")) <= {"host"}
        assert torch.equal(saved.result(pipe.part), saved.want)


# -- what puts it into RAM


def in_ram(manager: Any) -> tuple[int, int]:
    """The bytes that blocks of the component take in RAM beside its buffers, and those of which the log tells."""
    events = [event for event in manager.report()["events"] if event["component"] == "part" and event["kind"] == "plan"]
    groups = manager.members["part"].managed.groups
    return sum(group.slab_bytes for group in groups if group.host_slab is not None), sum(e["bytes"] for e in events)


def write(weight: torch.Tensor) -> None:
    weight.mul_(2.0)


def write_in_a_forward(module: nn.Module, saved: Saved) -> None:
    handle = first_layer(module).register_forward_hook(lambda layer, *_: write(layer.weight))
    saved.result(module)
    handle.remove()


WAYS_INTO_RAM: dict[str, Callable[[Any, Saved], object]] = {
    "used": lambda module, _: first_layer(module).weight.sum(),
    "written": lambda module, _: write(first_layer(module).weight),
    "written by a forward": write_in_a_forward,
    "pickled": lambda module, _: pickle.dumps(first_layer(module).weight),
}


@torch.no_grad()
@pytest.mark.parametrize("saved", [toy], indirect=True)
@pytest.mark.parametrize("profile", ["auto", "tight"])
@pytest.mark.parametrize("is_loaded", [False, True])
@pytest.mark.parametrize("way", WAYS_INTO_RAM)
def test_all_that_comes_to_rest_in_ram_is_in_the_log(saved, machine, profile: str, is_loaded: bool, way: str) -> None:
    weight_bytes = sum(weight.nbytes for weight in saved.model.parameters())
    profile = f"{0.8 * weight_bytes / (1 << 20):.4f}MiB" if profile == "tight" else profile
    with machine(8) as manager:
        module = saved.load()
        with manage({"part": module}, profile, placement="part=gpu:0:disk", manager=manager):
            if is_loaded:
                saved.result(module)
            assert in_ram(manager) == (0, 0)
            WAYS_INTO_RAM[way](module, saved)
            manager.members["part"].managed.unload()
            num_bytes, told_bytes = in_ram(manager)
            assert told_bytes == num_bytes
            assert num_bytes or (is_loaded and "written" not in way)


class Double(nn.Module):
    """Computes in another dtype than what is around it."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x.to(self.layer.weight.dtype)).to(x.dtype)


@torch.no_grad()
def test_a_part_that_is_converted_takes_the_component_into_ram(machine, tmp_path, reads) -> None:
    """The file does not hold the component as it is any more."""
    torch.manual_seed(0)
    build = lambda: nn.Sequential(*(Double(nn.Linear(8, 8)) for _ in range(4)))  # noqa: E731
    plain, x = build().requires_grad_(False), torch.randn(2, 8)
    save_file(plain.state_dict(), tmp_path / "net.safetensors")
    module = load_model(tmp_path / "net.safetensors", build, config={})
    with machine(8) as manager, manage({"part": module}, placement="gpu:0:disk", manager=manager):
        for each in (module, plain):
            each[1].double()
        assert {name.split(".")[0] for name in reads} == {"1"}
        assert torch.equal(module(x).cpu(), plain.to("sim:0")(x.to("sim:0")).cpu())
        plain.to("cpu")
        assert any("they rest in RAM" in event["reason"] for event in manager.report()["events"])
