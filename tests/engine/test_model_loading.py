"""Models from their files: the same as their libraries make, nothing read before it is wanted, errors in one line."""

from __future__ import annotations

import base64
import gc
import json
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.utils._python_dispatch import TorchDispatchMode

from highwater.memory import InvalidInput, load_model, load_weights, manage
from highwater.memory.errors import UnsafeState
from highwater.memory.model_class import parameters_on_meta, read_config

TIGHT = "0.45MiB"
TOKENS = torch.arange(1, 9).reshape(1, 8)


def flux():
    from diffusers import FluxTransformer2DModel

    model = FluxTransformer2DModel(
        in_channels=16,
        num_layers=2,
        num_single_layers=3,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=32,
        pooled_projection_dim=24,
        axes_dims_rope=(4, 6, 6),
    )
    inputs = {
        "hidden_states": torch.randn(1, 9, 16),
        "encoder_hidden_states": torch.randn(1, 5, 32),
        "pooled_projections": torch.randn(1, 24),
        "timestep": torch.tensor([0.5]),
        "img_ids": torch.rand(9, 3),
        "txt_ids": torch.zeros(5, 3),
    }
    return model, json.loads(model.to_json_string()), inputs


def transformers_model(name: str, config_name: str, **sizes: object):
    import transformers

    config = getattr(transformers, config_name)(**sizes)
    model = getattr(transformers, name)(config)
    return model, {**config.to_dict(), "architectures": [name]}, {"input_ids": TOKENS}


def clip():
    return transformers_model(
        "CLIPTextModel",
        "CLIPTextConfig",
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=2,
        bos_token_id=1,
        eos_token_id=2,
    )


def t5():
    return transformers_model(
        "T5EncoderModel", "T5Config", vocab_size=64, d_model=32, d_kv=16, d_ff=64, num_layers=3, num_heads=2
    )


def llama():
    """Tied weights, and a rotary table that stands in no file."""
    return transformers_model(
        "LlamaForCausalLM",
        "LlamaConfig",
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=2,
        tie_word_embeddings=True,
    )


MODELS = {"flux": flux, "clip": clip, "t5": t5, "llama": llama}


def save(module: torch.nn.Module, path, metadata=None, prefix: str = "", drop: str = "-"):
    """Write a module's weights, tied ones once; those whose names hold ``drop`` under their other name."""
    names = {id(tensor): name for name, tensor in module.state_dict(keep_vars=True).items() if drop not in name}
    state = module.state_dict()
    save_file({prefix + name: state[name].contiguous() for name in names.values()}, path, metadata)
    return path


def encoded(config) -> dict[str, str]:
    """A config as mmgp keeps it."""
    return {"config_base64": base64.b64encode(json.dumps(config, default=str).encode()).decode()}


def tensors_of(output) -> torch.Tensor:
    return output[0] if isinstance(output, tuple) else next(iter(output.values()))


@pytest.fixture(scope="module", params=MODELS)
def saved(request, tmp_path_factory):
    """A model of a library, its file with the config inside, and what it computes."""
    torch.manual_seed(0)
    model, config, inputs = MODELS[request.param]()
    model.eval()
    path = save(model, tmp_path_factory.mktemp("models") / f"{request.param}.safetensors", encoded(config))
    with torch.no_grad():
        return model, path, inputs, tensors_of(model(**inputs))


# -- models of libraries


def test_a_model_is_what_its_library_makes_of_it(saved) -> None:
    model, path, inputs, want = saved
    built = load_model(path)
    assert type(built) is type(model) and not built.training
    assert all(parameter.is_meta for parameter in built.parameters())
    for name, buffer in model.named_buffers():
        assert torch.equal(built.get_buffer(name), buffer)
    load_weights(built)
    assert list(built.state_dict()) == list(model.state_dict())
    assert len(list(built.parameters())) == len(list(model.parameters()))  # tied ones are
    with torch.no_grad():
        assert torch.equal(tensors_of(built(**inputs)), want)


@pytest.mark.parametrize("placement", ["gpu:0", "gpu:0:disk", "cpu"])
def test_a_model_is_managed_without_naming_its_file_again(saved, machine, placement: str) -> None:
    model, path, inputs, want = saved
    weight_bytes = sum(parameter.nbytes for parameter in model.parameters())
    profile = "auto" if placement == "cpu" else f"{0.6 * weight_bytes / (1 << 20):.3f}MiB"  # some blocks stream
    with machine(8) as manager, torch.no_grad():
        if placement != "cpu":
            model.to("sim:0")
            want = tensors_of(model(**{name: tensor.to("sim:0") for name, tensor in inputs.items()})).cpu()
            model.to("cpu")
        built = load_model(path)
        with manage({"transformer": built}, profile, placement=placement, manager=manager) as managed:
            for _ in range(2):
                assert torch.equal(tensors_of(built(**inputs)).cpu(), want)
            tier = {"gpu:0": "pinned", "gpu:0:disk": "disk", "cpu": "host"}[placement]
            assert managed.report()["components"][0]["plan"]["tier"] == tier
        if placement == "gpu:0:disk":
            assert all(parameter.is_meta for parameter in built.parameters())  # as it came
            load_weights(built)
        assert torch.allclose(tensors_of(built(**inputs)), saved[3], atol=1e-5)


# -- where the config comes from


@pytest.mark.parametrize("place", ["metadata", "metadata in base64", "beside", "dict", "path"])
def test_a_config_is_found_where_it_is(tmp_path, place: str) -> None:
    model, config, _ = clip()
    text = json.dumps(config)
    metadata = {"metadata": {"config": text}, "metadata in base64": encoded(config)}.get(place)
    path = save(model, tmp_path / "model.safetensors", metadata)
    elsewhere = tmp_path / ("config.json" if place == "beside" else "clip.json")
    elsewhere.write_text(text if place in ("beside", "path") else "not this one")
    before = dict(config)
    given = {"dict": config, "path": elsewhere}.get(place)
    built = load_model(path, config=given)
    assert type(built) is type(model)
    assert config == before


def test_shards_are_one_model(toys, tmp_path) -> None:
    net = toys.build_net()
    state = load_file(save(net, tmp_path / "whole.safetensors"))
    names = sorted(state, key=lambda name: name[::-1])
    paths = [tmp_path / f"model-{number:05}-of-00003.safetensors" for number in (1, 2, 3)]
    for number, path in enumerate(paths):
        save_file({name: state[name] for name in names[number::3]}, path)
    for given in (paths, paths[1], str(paths[0])):
        built = load_model(given, toys.Net)
        load_weights(built)
        assert all(torch.equal(tensor, net.state_dict()[name]) for name, tensor in built.state_dict().items())
    paths[2].unlink()
    with pytest.raises(InvalidInput, match=r"00003-of-00003\.safetensors: no such file"):
        load_model(paths[0], toys.Net)


def test_one_model_of_a_file_that_holds_several(toys, tmp_path) -> None:
    net = toys.build_net()
    path = save(torch.nn.ModuleDict({"unet": net, "vae": toys.build_net(1)}), tmp_path / "checkpoint.safetensors")
    built = load_model(path, toys.Net, prefix="unet.")
    load_weights(built)
    assert all(torch.equal(tensor, net.state_dict()[name]) for name, tensor in built.state_dict().items())
    with pytest.raises(InvalidInput, match=r"missing.*did you mean prefix='unet\.'"):
        load_model(save(torch.nn.ModuleDict({"unet": net}), tmp_path / "prefixed.safetensors"), toys.Net)


# -- bare modules


@pytest.mark.parametrize("alias", ["embed.weight", "out.weight"])
def test_a_tied_weight_is_found_by_any_of_its_names(toys, machine, tmp_path, alias: str) -> None:
    net = toys.build_net()
    other = {"embed.weight": "out.weight", "out.weight": "embed.weight"}[alias]
    path = save(net, tmp_path / "net.safetensors", drop=other)
    assert alias in load_file(path) and other not in load_file(path)
    x = torch.randn(2, 5, 64)
    for placement in ("gpu:0", "gpu:0:disk"):
        with machine(8) as manager, torch.no_grad():
            built = load_model(path, toys.Net)
            assert built.out.weight is built.embed.weight
            want = toys.build_net().to("sim:0")(x.to("sim:0")).cpu()
            with manage(built, TIGHT, placement=placement, manager=manager):
                assert torch.equal(built(x).cpu(), want)
            assert built.out.weight is built.embed.weight


def test_a_parameter_that_was_tied_before_it_was_taken_stays_tied() -> None:
    def build() -> torch.nn.Module:
        shared = torch.nn.Parameter(torch.zeros(3))
        modules = torch.nn.ModuleList(torch.nn.Module() for _ in range(2))
        for module in modules:
            module.weight = shared
        return modules

    with parameters_on_meta():
        first, second = build()
    assert first.weight is second.weight and first.weight.is_meta


class Written(TorchDispatchMode):
    """Counts the bytes of CPU tensors that anything writes; allocating alone writes nothing."""

    num_bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        output = func(*args, **(kwargs or {}))
        if isinstance(output, torch.Tensor) and not output.is_meta and "empty" not in str(func) and not func.is_view:
            self.num_bytes += output.nbytes
        return output


def test_building_writes_no_weight(toys, tmp_path) -> None:
    net = toys.build_net()
    path = save(net, tmp_path / "net.safetensors")
    with Written() as usual:
        toys.Net()
    weight_bytes = sum(parameter.nbytes for parameter in net.parameters())
    assert usual.num_bytes > weight_bytes
    with Written() as written:
        load_model(path, toys.Net)
    assert written.num_bytes <= sum(buffer.nbytes for buffer in net.buffers())


def test_weights_have_the_dtypes_of_the_file(toys, tmp_path) -> None:
    net = toys.build_net(dtype=torch.bfloat16)
    net.doubles.half()
    net.singles[1].norm.float()
    path = save(net, tmp_path / "net.safetensors")
    built = load_model(path, toys.Net)
    want = {name: tensor.dtype for name, tensor in net.state_dict().items()}
    assert {name: tensor.dtype for name, tensor in built.state_dict().items()} == want
    load_weights(built)
    assert {name: tensor.dtype for name, tensor in built.state_dict().items()} == want
    assert not any(parameter.requires_grad for parameter in built.parameters())


def test_building_is_seen_by_nobody_else(toys, tmp_path) -> None:
    """Neither another thread's modules nor the random numbers change, and nothing is left of it."""
    path = save(toys.build_net(), tmp_path / "net.safetensors")
    beside = []

    def build(**sizes: int) -> torch.nn.Module:
        thread = threading.Thread(target=lambda: beside.append(torch.nn.Linear(3, 3)))
        thread.start()
        thread.join()
        torch.randn(8)
        return toys.Net(**sizes)

    state = torch.get_rng_state()
    load_model(path, build)
    assert torch.equal(torch.get_rng_state(), state)
    assert not beside[0].weight.is_meta
    with pytest.raises(InvalidInput, match=r"config has 'colour', which Net does not take; allowed: "):
        load_model(path, toys.Net, config={"colour": "red"})
    assert not torch.nn.Linear(3, 3).weight.is_meta


def test_a_model_loaded_in_inference_mode_computes_outside_of_it(toys, tmp_path) -> None:
    class WithTable(toys.Net):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("table", torch.ones(3), persistent=False)

    net = toys.build_net()
    path = save(net, tmp_path / "net.safetensors")
    with torch.inference_mode():
        built = load_model(path, WithTable)
        load_weights(built)
    assert not any(tensor.is_inference() for tensor in [*built.parameters(), *built.buffers()])
    x = torch.randn(1, 3, 64)
    assert torch.equal(built(x), net(x))


def test_a_buffer_made_of_weights_is_refused(tmp_path) -> None:
    class Normed(torch.nn.Linear):
        def __init__(self) -> None:
            super().__init__(4, 4)
            self.register_buffer("norm", self.weight.norm(), persistent=False)

    with pytest.raises(InvalidInput, match=r"buffer 'norm' is computed from weights.*use load_weights"):
        load_model(save(torch.nn.Linear(4, 4), tmp_path / "net.safetensors"), Normed)


# -- filling a module


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_weights_are_read_into_the_memory_that_is_there(toys, tmp_path, mode) -> None:
    net = toys.build_net()
    path = save(net, tmp_path / "net.safetensors")
    with mode():
        other = toys.build_net(1, dtype=torch.float32)
        other.doubles[0].to(torch.float64)
    before = {name: (id(parameter), parameter.data_ptr()) for name, parameter in other.named_parameters()}
    load_weights(other, path)
    assert {name: (id(parameter), parameter.data_ptr()) for name, parameter in other.named_parameters()} == before
    assert other.doubles[0].up.weight.dtype is torch.float64
    for name, tensor in other.state_dict().items():
        assert torch.equal(tensor, net.state_dict()[name].to(tensor.dtype))


def test_what_has_no_memory_gets_it(toys, tmp_path) -> None:
    net = toys.build_net()
    path = save(net, tmp_path / "net.safetensors")
    other = toys.build_net(1)
    other.doubles.to("meta", torch.float64)
    load_weights(other, path)
    assert all(torch.equal(tensor, net.state_dict()[name]) for name, tensor in other.state_dict().items())


def test_weights_with_memory_are_not_taken_from_the_file_again(toys, machine, tmp_path) -> None:
    """They may have changed since: only a bare module may rest where it came from."""
    path = save(toys.build_net(), tmp_path / "net.safetensors")
    x = torch.randn(1, 3, 64)
    with machine(8) as manager, torch.no_grad():
        built = load_model(path, toys.Net)
        load_weights(built)
        built.embed.bias.add_(1.0)
        want = built(x)
        with pytest.raises(InvalidInput, match="tier 'disk' is not available"):
            manage(built, placement="gpu:0:disk", manager=manager)
        with manage(built, manager=manager):
            assert torch.allclose(built(x).cpu(), want, atol=1e-5)


@pytest.mark.parametrize("precision", ["as stored", "fp8 scaled"])
def test_a_managed_module_is_not_written_to(toys, machine, tmp_path, precision: str) -> None:
    net = toys.build_net()
    path = save(net, tmp_path / "net.safetensors")
    block = save(net.doubles[0], tmp_path / "block.safetensors")
    with machine(8) as manager:
        with manage(net, precision=precision, manager=manager):
            for module, file in ((net, path), (net.doubles[0], block)):
                with pytest.raises(UnsafeState, match="model is managed: release it"):
                    load_weights(module, file)
        load_weights(net, path)


def test_weights_elsewhere_are_refused(toys, machine, tmp_path) -> None:
    path = save(toys.build_net(), tmp_path / "net.safetensors")
    with machine(8):
        on_device = toys.build_net().to("sim:0")
        with pytest.raises(InvalidInput, match=r"'embed\.weight' is on sim:0; allowed"):
            load_weights(on_device, path)
        del on_device
    with pytest.raises(InvalidInput, match="did not come from load_model"):
        load_weights(toys.build_net())


def test_a_file_that_changed_is_refused_by_name_and_the_module_stays_bare(toys, tmp_path) -> None:
    path = save(toys.build_net(), tmp_path / "net.safetensors")
    built = load_model(path, toys.Net)
    save(toys.build_net(1), path)
    with pytest.raises(InvalidInput, match=r"net\.safetensors: was "):
        load_weights(built)
    assert all(parameter.is_meta for parameter in built.parameters())


# -- errors


def test_names_and_shapes_that_differ_are_told_in_one_line(toys, tmp_path) -> None:
    state = load_file(save(toys.build_net(), tmp_path / "net.safetensors"))
    for number in range(5):
        del state[f"singles.{number}.up.weight"]
        state[f"extra.{number}"] = torch.zeros(1)
    state["doubles.0.norm.bias"] = torch.zeros(3)
    save_file(state, tmp_path / "other.safetensors")
    net = toys.build_net()
    before = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    for load in (lambda path: load_model(path, toys.Net), lambda path: load_weights(net, path)):
        with pytest.raises(InvalidInput) as error:
            load(tmp_path / "other.safetensors")
        assert str(error.value) == (
            f"{tmp_path / 'other.safetensors'}: its weights do not fit Net: "
            "5 missing (singles.0.up.weight, singles.1.up.weight, singles.2.up.weight, ...); "
            "5 unexpected (extra.0, extra.1, extra.2, ...); "
            "1 of another shape (doubles.0.norm.bias is F32 [3], not [64])"
        )
    assert all(torch.equal(tensor, before[name]) for name, tensor in net.state_dict().items())


def test_unexpected_weights_may_be_ignored(toys, tmp_path) -> None:
    net = toys.build_net()
    state = load_file(save(net, tmp_path / "net.safetensors"))
    save_file(state | {"extra": torch.zeros(1)}, tmp_path / "net.safetensors")
    built = load_model(tmp_path / "net.safetensors", toys.Net, ignore_unexpected=True)
    load_weights(built)
    assert all(torch.equal(tensor, net.state_dict()[name]) for name, tensor in built.state_dict().items())


def test_what_a_class_declares_unexpected_is_passed_by(tmp_path) -> None:
    """The encoder of T5 is often stored with its decoder, CLIP with a table of positions that it computes."""
    for model, config, extra in ((*t5()[:2], "decoder.block.0.weight"), (*clip()[:2], "embeddings.position_ids")):
        path = save(model, tmp_path / "model.safetensors")
        save_file({**load_file(path), extra: torch.zeros(1)}, path)
        load_weights(load_model(path, config=config))


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (None, r"has no config in its metadata nor a config\.json beside it"),
        ({}, "names no class under '_class_name' or 'architectures'"),
        ({"_class_name": "FluxTransformer4D"}, "'FluxTransformer4D', which diffusers does not have"),
        ({"_class_name": "FluxPipeline"}, "'FluxPipeline', which diffusers does not have"),
        ({"architectures": ["os"]}, "'os', which transformers does not have"),
        ("missing.json", r"missing\.json: no such file"),
    ],
)
def test_a_config_that_names_no_model_is_refused(tmp_path, config, words: str) -> None:
    path = save(torch.nn.Linear(2, 2), tmp_path / "net.safetensors")
    with pytest.raises(InvalidInput, match=words) as error:
        load_model(path, config=config)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("metadata", "words"),
    [
        ({"config": "{"}, "config in its metadata is not valid JSON"),
        ({"config": "[1]"}, "config in its metadata is a JSON list, expected an object"),
        ({"config_base64": "?"}, "config_base64 in its metadata is not base64"),
        ({"config_base64": base64.b64encode(b"\xff{").decode()}, "config_base64 in its metadata is not valid JSON"),
    ],
)
def test_a_damaged_config_is_told_with_its_place(tmp_path, metadata, words: str) -> None:
    path = save(torch.nn.Linear(2, 2), tmp_path / "net.safetensors", metadata)
    with pytest.raises(InvalidInput, match=rf"net\.safetensors: {words}"):
        load_model(path)


HOSTILE_ITEMS = {
    "a kernel of the hub": {"attn_implementation": "evil/kernel"},
    "a kernel for each part": {"_attn_implementation": {"": "evil/kernel", "text_config": "evil/kernel"}},
    "what another class set": {"_attn_implementation_internal": "evil/kernel", "experts_implementation": "evil/kernel"},
    "code of its own": {"auto_map": {"AutoModel": "modeling_evil.Evil"}, "custom_generate": "evil/generate"},
    "weights elsewhere": {"transformers_weights": "../../evil.safetensors", "name_or_path": "//host/share"},
    "kernels of a quantizer": {"quantization_config": {"quant_method": "mxfp4"}},
    "methods of the config": {"to_dict": "text", "__class__": "text"},
}


@pytest.mark.parametrize("kind", HOSTILE_ITEMS)
@pytest.mark.parametrize("make", [clip, llama, flux], ids=["clip", "llama", "flux"])
def test_a_config_reaches_a_class_only_as_far_as_that_declares_it(tmp_path, monkeypatch, make, kind: str) -> None:
    """What is not declared is not there: not on the config, and not in what the library does with it."""
    import transformers.modeling_utils

    torch.manual_seed(0)
    model, config, inputs = make()
    asked: list[object] = []
    monkeypatch.setattr(transformers.modeling_utils, "lazy_import_flash_attention", lambda *a, **k: asked.append(a))
    path = save(model, tmp_path / "m.safetensors", encoded(config | HOSTILE_ITEMS[kind]))
    built = load_model(path)
    load_weights(built)
    with torch.no_grad():
        assert torch.equal(tensors_of(built(**inputs)), tensors_of(model.eval()(**inputs)))
    assert not asked
    for name in HOSTILE_ITEMS[kind]:
        held = getattr(built.config, name, None)
        assert "evil" not in str(held) and "mxfp4" not in str(held) and held != "text"


def test_a_part_of_a_config_is_held_to_its_own_class(tmp_path) -> None:
    from transformers import SiglipConfig

    from highwater.memory.weights.untrusted_config import declared_items

    parts = {"vision_config": {"hidden_size": 32, "attn_implementation": "evil/kernel", "auto_map": {"a": "b"}}}
    kept = declared_items(SiglipConfig, {**parts, "initializer_factor": 0.5, "made_up": 3, "made_up_text": "x"})
    assert kept == {"vision_config": {"hidden_size": 32}, "initializer_factor": 0.5, "made_up": 3}


def test_what_older_configs_call_otherwise_still_counts(tmp_path) -> None:
    model, config, _ = llama()
    rope = {"rope_theta": 77.0, "rope_scaling": {"rope_type": "linear", "factor": 2.0}}
    old = {key: value for key, value in config.items() if key != "rope_parameters"} | rope
    built = load_model(save(model, tmp_path / "m.safetensors"), config=old)
    assert built.config.rope_parameters == {"rope_type": "linear", "factor": 2.0, "rope_theta": 77.0}


@pytest.mark.parametrize("name", ["os.system", "utils", "PreTrainedModel\0", "__class__", "x" * 9999, "Tensor"])
def test_no_name_in_a_config_reaches_another_module(tmp_path, name: str) -> None:
    path = save(torch.nn.Linear(2, 2), tmp_path / "net.safetensors")
    for config in ({"_class_name": name}, {"architectures": [name]}):
        with pytest.raises(InvalidInput, match=r"which (diffusers|transformers) does not have") as error:
            load_model(path, config=config)
        assert str(error.value).isprintable() and len(str(error.value)) < 400 + len(str(path))


@pytest.mark.parametrize(
    ("make", "change"),
    [
        (clip, {"vocab_size": "many"}),
        (clip, {"num_attention_heads": 0}),
        (llama, {"rope_scaling": {"rope_type": "evil"}, "rope_parameters": {"rope_type": "evil"}}),
        (flux, {"num_layers": "x\ny" * 999}),
    ],
)
def test_what_a_library_raises_for_its_config_is_one_line(tmp_path, make, change) -> None:
    model, config, _ = make()
    path = save(model, tmp_path / "m.safetensors", encoded(config | change))
    with pytest.raises(InvalidInput, match=r"m\.safetensors: \w+ cannot be made from its config: ") as error:
        load_model(path)
    assert str(error.value).isprintable() and len(str(error.value)) < 500 + len(str(path))


@pytest.mark.parametrize(("make", "name"), [(t5, "num_layers"), (flux, "num_single_layers")], ids=["t5", "flux"])
def test_a_config_for_endless_layers_is_refused(tmp_path, monkeypatch, make, name: str) -> None:
    monkeypatch.setattr("highwater.memory.model_class.NUM_UNSTORED", 100)
    model, config, _ = make()
    path = save(model, tmp_path / "m.safetensors")
    with pytest.raises(InvalidInput, match=r"more than \d+ weights, the files have \d+; they do not belong together"):
        load_model(path, config=config | {name: 1 << 62, "num_decoder_layers": 1})


def test_a_config_that_would_never_end_is_not_read(tmp_path) -> None:
    path = save(torch.nn.Linear(2, 2), tmp_path / "net.safetensors")
    beside = tmp_path / "given.json"
    beside.symlink_to("/dev/zero")
    with pytest.raises(InvalidInput, match=r"given\.json: is no regular file"):
        load_model(path, config=beside)
    beside.unlink()
    with beside.open("wb") as file:
        file.truncate(1 << 40)  # holes only
    with pytest.raises(InvalidInput, match="is longer than 32 MiB"):
        load_model(path, config=beside)
    for text, words in (("[" * 100_000, "not valid JSON"), ('{"a": ' + "9" * 4000 + "}", "a number of 4000 digits")):
        beside.unlink()
        beside.write_text(text)
        with pytest.raises(InvalidInput, match=words):
            load_model(path, config=beside)


def test_a_model_goes_when_nobody_holds_it(toys, tmp_path) -> None:
    """What is remembered of its file keeps it no longer alive than its user does."""
    path = save(toys.build_net(), tmp_path / "net.safetensors")
    built = weakref.ref(load_model(path, toys.Net))
    gc.collect()
    assert built() is None


def test_a_file_that_is_replaced_while_its_model_is_built_is_named(tmp_path, toys) -> None:
    path = save(toys.build_net(), tmp_path / "net.safetensors")
    read_config(path, None)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(InvalidInput, match=r"net\.safetensors: was checked, but cannot be read now: .*; load it again"):
        read_config(path, None)
    path.unlink()
    with pytest.raises(InvalidInput, match=r"net\.safetensors: was checked, but cannot be read now: .*; load it again"):
        read_config(path, None)


def test_threads_may_load_models_at_once(tmp_path) -> None:
    """torch keeps the hooks by which models are built for all threads, and fails where they change meanwhile."""
    save_file(torch.nn.Linear(3, 3).state_dict(), tmp_path / "layer.safetensors")

    def load(_: int) -> torch.nn.Module:
        return load_model(tmp_path / "layer.safetensors", lambda: torch.nn.Linear(3, 3))

    with ThreadPoolExecutor(8) as threads:
        assert len(list(threads.map(load, range(400)))) == 400
