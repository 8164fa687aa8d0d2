"""LoRAs through the real diffusers and peft: a managed pipeline gives what the unmanaged one gives, after each step."""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_model
from torch import nn

from highwater.memory import manage
from highwater.memory.errors import InvalidInput
from highwater.memory.options.precision import Precision
from highwater.memory.weights.cast_form import find_scale
from highwater.memory.weights.fp8 import encode_fp8

BaseTunerLayer = pytest.importorskip("peft.tuners.tuners_utils").BaseTunerLayer
pytestmark = pytest.mark.filterwarnings("ignore")

LAYERS = Precision("fp8 scaled", granularity="layer")
MODES = {
    "resident": {"profile": "auto", "placement": "gpu:0"},
    "streamed": {"budget": 0.6, "placement": "gpu:0"},
    "split": {"profile": "auto", "placement": "gpu:0&gpu:1"},
    "split and streamed": {"budget": 0.65, "placement": "gpu:0&gpu:1"},
    "eight bits": {"profile": "auto", "placement": "gpu:0", "precision": "fp8 scaled"},
    "eight bits, streamed": {"budget": 0.45, "placement": "gpu:0", "precision": "fp8 scaled"},
    "layers in eight bits": {"profile": "auto", "placement": "gpu:0", "precision": LAYERS},
    "layers in eight bits, streamed": {"budget": 0.3, "placement": "gpu:0", "precision": LAYERS},
    "disk": {"profile": "auto", "placement": "gpu:0:disk"},
    "disk, streamed": {"budget": 0.6, "placement": "gpu:0:disk"},
    "disk, split": {"profile": "auto", "placement": "gpu:0&gpu:1:disk"},
}


# In the quick suite those that stream, which have more to go wrong.
SOME = [mode if "streamed" in mode else pytest.param(mode, marks=pytest.mark.slow) for mode in MODES]


# -- pipelines of the shapes that matter


def build_flux() -> Any:
    from diffusers import FlowMatchEulerDiscreteScheduler, FluxPipeline, FluxTransformer2DModel

    transformer = FluxTransformer2DModel(
        in_channels=16,
        num_layers=2,
        num_single_layers=4,
        attention_head_dim=16,
        num_attention_heads=4,
        joint_attention_dim=32,
        pooled_projection_dim=32,
        guidance_embeds=True,
        axes_dims_rope=(4, 6, 6),
    )
    return FluxPipeline(
        FlowMatchEulerDiscreteScheduler(), None, build_clip(), None, None, None, transformer.to(torch.bfloat16)
    )


def build_sdxl() -> Any:
    from diffusers import EulerDiscreteScheduler, StableDiffusionXLPipeline, UNet2DConditionModel

    unet = UNet2DConditionModel(
        sample_size=8,
        block_out_channels=(32, 64),
        layers_per_block=1,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        cross_attention_dim=32,
        attention_head_dim=(2, 4),
        transformer_layers_per_block=(1, 3),
        use_linear_projection=True,
        addition_embed_type="text_time",
        addition_time_embed_dim=8,
        projection_class_embeddings_input_dim=6 * 8 + 32,
        norm_num_groups=8,
    )
    return StableDiffusionXLPipeline(None, build_clip(), None, None, None, unet, EulerDiscreteScheduler())


def build_wan() -> Any:
    from diffusers import FlowMatchEulerDiscreteScheduler, WanPipeline, WanTransformer3DModel

    transformer = WanTransformer3DModel(
        num_attention_heads=2,
        attention_head_dim=24,
        in_channels=4,
        out_channels=4,
        text_dim=32,
        freq_dim=32,
        ffn_dim=96,
        num_layers=6,
        rope_max_seq_len=32,
    )
    return WanPipeline(None, None, None, FlowMatchEulerDiscreteScheduler(), transformer.to(torch.bfloat16))


def build_clip() -> Any:
    from transformers import CLIPTextConfig, CLIPTextModel

    config = CLIPTextConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        projection_dim=32,
        num_hidden_layers=4,
        num_attention_heads=2,
        max_position_embeddings=16,
        bos_token_id=62,
        eos_token_id=63,
        pad_token_id=63,
    )
    return CLIPTextModel(config)


def flux_inputs() -> dict[str, Any]:
    return {
        "hidden_states": torch.randn(1, 16, 16).bfloat16(),
        "encoder_hidden_states": torch.randn(1, 6, 32).bfloat16(),
        "pooled_projections": torch.randn(1, 32).bfloat16(),
        "timestep": torch.tensor([0.5]).bfloat16(),
        "guidance": torch.tensor([3.5]).bfloat16(),
        "img_ids": torch.randn(16, 3),
        "txt_ids": torch.zeros(6, 3),
    }


def sdxl_inputs() -> dict[str, Any]:
    return {
        "sample": torch.randn(1, 4, 8, 8),
        "timestep": torch.tensor(5),
        "encoder_hidden_states": torch.randn(1, 6, 32),
        "added_cond_kwargs": {"text_embeds": torch.randn(1, 32), "time_ids": torch.randn(1, 6)},
    }


def wan_inputs() -> dict[str, Any]:
    return {
        "hidden_states": torch.randn(1, 4, 2, 4, 4).bfloat16(),
        "timestep": torch.tensor([500]),
        "encoder_hidden_states": torch.randn(1, 6, 32).bfloat16(),
    }


class Shape:
    """A pipeline, the name of its denoiser, inputs for that, and the layers that its LoRAs adapt."""

    def __init__(self, build: Callable[[], Any], denoiser: str, inputs: Callable[[], dict[str, Any]], targets: str):
        self.denoiser, self.targets = denoiser, targets.split()
        self.make, self.make_inputs = build, inputs

    def build(self) -> Any:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            pipe = self.make()
        for module in parts_of(pipe).values():
            module.eval().requires_grad_(False)
        return pipe

    def inputs(self) -> dict[str, Any]:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            return self.make_inputs()


SHAPES = {
    "flux": Shape(build_flux, "transformer", flux_inputs, "to_q to_v to_out.0 linear proj_out ff.net.2 x_embedder"),
    "sdxl": Shape(build_sdxl, "unet", sdxl_inputs, "to_q to_out.0 proj_in conv1 conv_shortcut ff.net.0.proj conv_in"),
    "wan": Shape(build_wan, "transformer", wan_inputs, "to_q to_k ffn.net.0.proj ffn.net.2 proj_out"),
}


def parts_of(pipe: Any) -> dict[str, nn.Module]:
    return {name: part for name, part in pipe.components.items() if isinstance(part, nn.Module)}


def lora_state(pipe: Any, shape: Shape, seed: int, *, rank: int = 4, dora: bool = False) -> dict[str, torch.Tensor]:
    """Return a LoRA file's contents: factors for the denoiser's targets and, where there is one, for the encoder's."""
    generator = torch.Generator().manual_seed(seed)
    state = {}
    for part, module in parts_of(pipe).items():
        targets = shape.targets if part == shape.denoiser else ["q_proj", "fc1"]
        if part != shape.denoiser and dora:
            continue
        for name, layer in module.named_modules():
            name = name.replace(".base_layer", "")
            if not isinstance(layer, nn.Linear | nn.Conv2d) or "lora" in name:
                continue
            if not any(name == target or name.endswith(f".{target}") for target in targets):
                continue
            out_size, in_size, *kernel = layer.weight.shape
            down = torch.randn(rank, in_size, *kernel, generator=generator) * 0.2
            up = torch.randn(out_size, rank, *([1] * len(kernel)), generator=generator) * 0.2
            state[f"{part}.{name}.lora_A.weight"] = down.to(layer.weight.dtype)
            state[f"{part}.{name}.lora_B.weight"] = up.to(layer.weight.dtype)
            if dora:
                magnitude = torch.rand(out_size, generator=generator) + 0.5
                state[f"{part}.{name}.lora_magnitude_vector"] = magnitude.to(layer.weight.dtype)
    return state


# -- the unmanaged pipeline, on the same simulated device


def outputs(pipe: Any, shape: Shape, device: str | None = None) -> list[torch.Tensor]:
    """Return what the denoiser and the text encoder compute."""
    to = (lambda value: value) if device is None else (lambda value: move(value, device))
    found = [getattr(pipe, shape.denoiser)(**to(shape.inputs()), return_dict=False)[0].cpu()]
    if getattr(pipe, "text_encoder", None) is not None:
        found.append(pipe.text_encoder(to(torch.arange(8)[None])).last_hidden_state.cpu())
    return found


def move(value: Any, device: str) -> Any:
    if isinstance(value, dict):
        return {name: move(inner, device) for name, inner in value.items()}
    return value.to(device) if isinstance(value, torch.Tensor) else value


def to_eight_bits(pipe: Any, names: dict[str, frozenset[str]]) -> None:
    """Give weights that will rest in eight bits the values that they have when decoded."""
    for part, module in parts_of(pipe).items():
        for name, weight in module.named_parameters():
            if name.replace(".base_layer", "") in {cast.replace(".base_layer", "") for cast in names.get(part, ())}:
                scale = find_scale(weight, name=name)
                weight.copy_(encode_fp8(weight.detach(), scale).to(weight.dtype) * scale)


class Pair:
    """A managed pipeline and an unmanaged one, to which the same is done."""

    def __init__(self, shape: Shape, mode: str, manager: Any, *, prepare: Callable[[Any], None] | None = None):
        self.shape = shape
        self.manager = manager
        self.own, self.other = shape.build(), shape.build()
        if prepare is not None:
            prepare(self.own)
            prepare(self.other)
        choices = dict(MODES[mode])
        if "disk" in mode:
            self.folder = tempfile.TemporaryDirectory(prefix="highwater-lora-")
            choices["files"] = {}
            for name, part in parts_of(self.own).items():
                choices["files"][name] = Path(self.folder.name) / f"{name}.safetensors"
                save_model(part, str(choices["files"][name]))
        if "budget" in choices:
            sizes = {name: num_bytes(part) for name, part in parts_of(self.own).items()}
            share = choices.pop("budget")
            devices = choices["placement"].removesuffix(":disk").split("&")
            budget = max(int(share * sizes[shape.denoiser]), 1)
            choices["budgets"] = ",".join(f"{device}={budget / (1 << 20):.4f}MiB" for device in devices)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.managed = manage(self.own, manager=manager, **choices)
        self.cast = {member.name: member.managed.plan.forms for member in self.managed.members}
        self.streams = "streamed" in mode
        to_eight_bits(self.other, self.cast)
        for part in parts_of(self.other).values():
            part.to("sim:0")

    def do(self, call: Callable[[Any], Any], *, writes: bool = False) -> None:
        """Do the same with both; ``writes`` to base weights, which the managed ones bring into eight bits again."""
        if writes:
            self.move_resting()
        call(self.own)
        call(self.other)
        if writes:
            for part in parts_of(self.other).values():
                part.to("sim:0")
            to_eight_bits(self.other, self.cast)

    def move_resting(self) -> None:
        """Put layers on the CPU that rest there in the managed pipeline: peft computes 16 bits in 32 there."""
        for part, module in parts_of(self.own).items():
            others = dict(parts_of(self.other)[part].named_modules())
            for name, layer in module.named_modules():
                if isinstance(layer, BaseTunerLayer):
                    base = layer.get_base_layer().weight
                    factors = [layer.get_parameter(key) for key in lora_b(layer)]
                    for factor in factors:  # peft would see the CPU from the second of a block on
                        if factor.is_meta:
                            factor.clone()
                    base, factors = layer.get_base_layer().weight, [layer.get_parameter(key) for key in lora_b(layer)]
                    if base.device.type == "cpu" or any(factor.device.type == "cpu" for factor in factors):
                        others[name].to("cpu")

    def check(self) -> list[torch.Tensor]:
        want = outputs(self.other, self.shape, "sim:0")
        for _ in range(2):
            got = outputs(self.own, self.shape)
            for one, other in zip(got, want, strict=True):
                assert torch.equal(one, other), (one - other).abs().max() / other.abs().max()
        self.manager.ledger.check()
        return want

    def end(self) -> None:
        """Release; all weights come back to host memory, as the other has them."""
        self.managed.release()
        for part, module in parts_of(self.own).items():
            other = dict(parts_of(self.other)[part].to("cpu").named_parameters())
            own = dict(module.named_parameters())
            assert own.keys() == other.keys()
            for name, weight in own.items():
                assert weight.device.type == "cpu" and type(weight) is nn.Parameter
                assert torch.equal(weight, other[name]), name
        assert not self.manager.ledger.entries


def lora_b(layer: nn.Module) -> list[str]:
    return [name for name, _ in layer.named_parameters() if "lora_B" in name]


def num_bytes(module: nn.Module) -> int:
    return sum(weight.numel() * weight.element_size() for weight in module.parameters())


@pytest.fixture(autouse=True)
def no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["flux", *(pytest.param(name, marks=pytest.mark.slow) for name in ("sdxl", "wan"))])
def test_everything_that_is_done_with_loras_is_as_without_the_engine(machine, name: str, mode: str) -> None:
    shape = SHAPES[name]
    with machine(64, 64) as manager:
        pair = Pair(shape, mode, manager)
        states = {seed: lora_state(pair.own, shape, seed) for seed in (1, 2, 3)}
        plain = pair.check()

        def load(key: str, seed: int, **options: Any) -> None:
            pair.do(lambda pipe: pipe.load_lora_weights(dict(states[seed]), adapter_name=key, **options))

        load("a", 1)
        first = pair.check()
        assert not any(torch.equal(one, other) for one, other in zip(plain, first, strict=True))
        pair.do(lambda pipe: pipe.set_adapters("a", 0.5))
        pair.check()
        load("b", 2)
        pair.do(lambda pipe: pipe.set_adapters(["a", "b"], [0.7, 0.4]))
        pair.check()
        pair.do(lambda pipe: pipe.fuse_lora(lora_scale=0.8), writes=True)
        pair.check()
        pair.do(lambda pipe: pipe.unfuse_lora(), writes=True)
        pair.check()
        pair.do(lambda pipe: pipe.fuse_lora(safe_fusing=True), writes=True)
        for member in pair.managed.members:
            member.managed.unload()
        pair.check()
        pair.do(lambda pipe: pipe.unfuse_lora(), writes=True)
        pair.do(lambda pipe: pipe.disable_lora())
        pair.check()
        pair.do(lambda pipe: pipe.enable_lora())
        pair.do(lambda pipe: pipe.delete_adapters("b"))
        pair.check()
        pair.do(lambda pipe: pipe.unload_lora_weights())
        pair.check()
        pair.end()


@pytest.mark.parametrize("mode", SOME)
def test_loras_that_were_there_before_are_managed_with_their_blocks(machine, mode: str) -> None:
    """They are none of what rests in eight bits."""
    shape = SHAPES["flux"]
    state = lora_state(shape.build(), shape, 1)
    with machine(64, 64) as manager:
        pair = Pair(shape, mode, manager, prepare=lambda pipe: pipe.load_lora_weights(dict(state), adapter_name="a"))
        assert not any("lora" in name for names in pair.cast.values() for name in names)
        pair.check()
        pair.do(lambda pipe: pipe.set_adapters("a", 0.3))
        pair.check()
        pair.do(lambda pipe: pipe.fuse_lora(), writes=True)
        pair.check()
        pair.do(lambda pipe: pipe.unload_lora_weights(), writes=True)
        pair.check()
        pair.end()


@pytest.mark.parametrize("mode", SOME)
def test_dora_and_hot_swapped_factors_are_as_without_the_engine(machine, mode: str) -> None:
    shape = SHAPES["flux"]
    with machine(64, 64) as manager:
        pair = Pair(shape, mode, manager)
        pair.check()
        dora = lora_state(pair.own, shape, 4, dora=True)
        states = {seed: of_transformer(lora_state(pair.own, shape, seed, rank=seed)) for seed in (3, 5)}
        pair.do(lambda pipe: pipe.load_lora_weights(dict(dora), adapter_name="d"))
        pair.check()
        pair.do(lambda pipe: pipe.delete_adapters("d"))
        pair.do(lambda pipe: pipe.load_lora_weights(dict(states[3]), adapter_name="a"))
        pair.check()
        # Of another rank: the parameters get other shapes where they are.
        pair.do(lambda pipe: pipe.load_lora_weights(copied(states[5]), adapter_name="a", hotswap=True))
        pair.check()
        pair.end()


def copied(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """peft gives a swapped adapter the very tensors of the file, and the file its old ones."""
    return {name: weight.clone() for name, weight in state.items()}


def of_transformer(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """diffusers swaps no adapters of text encoders."""
    return {name: weight for name, weight in state.items() if name.startswith("transformer.")}


@pytest.mark.parametrize("mode", ["resident", "streamed", "eight bits"])
def test_layers_that_never_computed_come_home_too(machine, sim, mode: str) -> None:
    shape = SHAPES["flux"]
    with machine(64, 64) as manager:
        pair = Pair(shape, mode, manager)
        pair.check()
        state = lora_state(pair.own, shape, 1)
        pair.do(lambda pipe: pipe.load_lora_weights(dict(state), adapter_name="a"))
        pair.end()
        assert not any(weight.device.type != "cpu" for weight in pair.own.transformer.parameters())


@pytest.mark.parametrize("mode", MODES)
def test_the_books_and_the_plan_count_added_layers_to_the_byte(machine, sim, mode: str) -> None:
    shape = SHAPES["flux"]
    with machine(64, 64) as manager:
        pair = Pair(shape, mode, manager)
        pair.check()
        state = lora_state(pair.own, shape, 1)
        members = pair.managed.members
        before = {member.id: member.managed.plan.weight_bytes for member in members}
        pair.do(lambda pipe: pipe.load_lora_weights(dict(state), adapter_name="a"))
        pair.check()
        for member in members:
            added = sum(w.nbytes for n, w in state.items() if n.startswith(f"{member.name}."))
            assert member.managed.plan.weight_bytes == before[member.id] + added
        last = max(members, key=lambda member: member.last_use)  # the one before may have left for it
        for part in last.managed.plan.shares:
            assert manager.ledger.held(last.id, part.device) == part.device_bytes
        for part in parts_of(pair.other).values():
            part.to("cpu")
        for index in (0, 1):
            assert sim.stats(index).used_bytes == manager.ledger.used(f"gpu:{index}")
        with pair.managed.manager.lease(members[0]):
            pass
        assert pair.managed.verify(lambda: pair.own.transformer(**shape.inputs(), return_dict=False)).is_equal
        for part in parts_of(pair.other).values():
            part.to("sim:0")
        pair.do(lambda pipe: pipe.unload_lora_weights())
        pair.check()
        assert {member.id: member.managed.plan.weight_bytes for member in members} == before
        pair.end()


def test_reprofile_takes_layers_along_that_never_computed(machine) -> None:
    shape = SHAPES["flux"]
    with machine(64, 64) as manager:
        pair = Pair(shape, "resident", manager)
        pair.check()
        state = lora_state(pair.own, shape, 1)
        pair.do(lambda pipe: pipe.load_lora_weights(dict(state), adapter_name="a"))
        pair.managed.reprofile("auto", placement="gpu:1")
        pair.check()
        pair.managed.reprofile("auto", placement="gpu:0")
        pair.do(lambda pipe: pipe.unload_lora_weights())
        pair.check()
        pair.end()


def test_a_layer_without_memory_is_refused_and_the_module_computes_without_it(toys, machine) -> None:
    net, x = toys.build_net(), torch.randn(2, 5, 64)
    with machine(8) as manager, manage(net, placement="gpu:0", manager=manager):
        want = net(x).cpu()
        net.singles[1].extra = nn.Linear(64, 64, device="meta")
        with pytest.raises(InvalidInput, match=r"^model: 'singles.1.extra.weight' was added without memory; [^\n]*"):
            net(x)
        del net.singles[1].extra
        assert torch.equal(net(x).cpu(), want)
