"""Compares what core's classes need and compute, as told from files' headers, with what they say and do once loaded.

usage: core_needs.py PACK OUTPUT.json FILE...   (in ComfyUI's folder, by its Python; PACK is imported as highwater)
"""

import importlib.util
import json
import sys
import warnings
from collections import Counter
from pathlib import Path

pack, output, *files = sys.argv[1:]
sys.path.insert(0, ".")
sys.argv[1:] = ["--cpu"]
import comfy.options  # noqa: E402

comfy.options.enable_args_parsing()
import comfy.lora  # noqa: E402
import comfy.lora_convert  # noqa: E402
import comfy.sd  # noqa: E402
import comfy.utils  # noqa: E402
import torch  # noqa: E402
from torch.nn.attention import SDPBackend, sdpa_kernel  # noqa: E402
from torch.utils._pytree import tree_map_only  # noqa: E402
from torch.utils.flop_counter import FlopCounterMode  # noqa: E402

spec = importlib.util.spec_from_file_location("highwater", Path(pack, "__init__.py"), submodule_search_locations=[pack])
sys.modules["highwater"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(sys.modules["highwater"])
from highwater.memory.planner.tiles import Tiles  # noqa: E402
from highwater.memory.tracing import trace_forward  # noqa: E402
from highwater.nodes.core_predictions import CorePredictor  # noqa: E402
from highwater.nodes.host.core_needs import coding_needs, sampling_needs, text_encoder  # noqa: E402
from highwater.nodes.host.core_traces import (  # noqa: E402
    CoreCall,
    coding_call,
    prompted_of,
    step_call,
    text_call,
    usual_prompt,
)
from highwater.nodes.host.side_factors import low_rank_of  # noqa: E402
from highwater.nodes.plans import describe_files  # noqa: E402
from highwater.nodes.workflow_reading import LoadedModel, NodeName  # noqa: E402

warnings.simplefilter("error", UserWarning)
SIZES = [(512, 512, 1, 1), (1024, 768, 1, 2), (832, 480, 81, 1)]
REFERENCE = (1024, 1024)


def sampling(file: str) -> None:
    told, loaded = sampling_needs(file), comfy.sd.load_diffusion_model(file).model
    assert all(weight.is_meta for weight in told.model.parameters())
    assert told.model.get_dtype_inference() == loaded.get_dtype_inference()
    reference = told.latent_shape(*REFERENCE)
    shapes = loaded.extra_conds_shapes(reference_latents=[torch.empty(reference)])
    for size in SIZES:
        batch, *rest = shape = told.latent_shape(*size)
        for conds in (1, 2):
            expected = int(loaded.memory_required([batch * conds, *rest]))
            add(file, size, expected, told.num_bytes(shape, num_conds=conds))
        with_reference = {name: [found] for name, found in shapes.items()}
        expected = int(loaded.memory_required(shape, cond_shapes=with_reference))
        add(file, "reference", expected, told.num_bytes(shape, references=[reference]))
    call = step_call(told, told.latent_shape(64, 96, 1, 2), usual_prompt(told))
    compare_flops(file, call, loaded)


def coding(file: str) -> None:
    told = coding_needs(file)
    if "checkpoints" in file:
        loaded = comfy.sd.load_checkpoint_guess_config(file, output_clip=False)[2]
    else:
        loaded = comfy.sd.VAE(sd=comfy.utils.load_torch_file(file))
    assert all(weight.is_meta for weight in told.vae.first_stage_model.parameters())
    for width, height, *_ in SIZES:
        latents = (1, loaded.latent_channels, height // 8, width // 8)
        add(file, "decode", int(loaded.memory_used_decode(latents, loaded.vae_dtype)), told.decode_bytes(width, height))
        pixels = (1, 3, height, width)
        add(file, "encode", int(loaded.memory_used_encode(pixels, loaded.vae_dtype)), told.encode_bytes(width, height))
        tile = int(loaded.memory_used_decode((1, loaded.latent_channels, 32, 32), loaded.vae_dtype))
        add(file, "tile", tile, told.decode_bytes(width, height, tile_size=256))
        squares = Tiles(pixels=256, overlap_pixels=64)
        for what, tiling, used, unit in (
            ("decode", told.decode_tiles(width, height), loaded.memory_used_decode, 8),
            ("encode", told.encode_tiles(width, height), loaded.memory_used_encode, 1),
        ):
            channels = loaded.latent_channels if what == "decode" else 3
            cuts = [(256, 256), (128, 512), (512, 128)]
            tile = max(
                int(used((1, channels, min(h, height) // unit, min(w, width) // unit), loaded.vae_dtype))
                for h, w in cuts
            )
            add(file, f"{what} in tiles", tile, tiling.num_bytes(squares))
            small = Tiles(pixels=128, overlap_pixels=32)
            cut, planned = shapes_cut(loaded, what, tiling.shape, small, unit), tiling.tile_shapes(small)
            for shape in sorted({*cut, *planned}):
                add(file, f"{what} of {shape}", cut[shape], planned[shape])

    latents, pixels = told.latent_shape(64, 96), told.pixel_shape(64, 96)
    compare_flops(file, coding_call(told, (2, *latents[1:]), decodes=True), loaded.first_stage_model)
    compare_flops(file, coding_call(told, (2, *pixels[1:]), decodes=False), loaded.first_stage_model)


def shapes_cut(
    vae: comfy.sd.VAE, what: str, shape: tuple[int, ...], tiles: Tiles, unit: int
) -> Counter[tuple[int, ...]]:
    """Return the shapes of which core computes the tiles of a shape, and how often each."""
    cut: Counter[tuple[int, ...]] = Counter()

    def note(source: torch.Tensor) -> torch.Tensor:
        cut[tuple(source.shape)] += 1
        batch, _, height, width = source.shape
        if what == "decode":
            return torch.zeros(batch, 3, height * 8, width * 8)
        return torch.zeros(batch, vae.latent_channels, height // 8, width // 8)

    model = vae.first_stage_model
    own = getattr(model, what)
    numbers = {"tile_x": tiles.pixels // unit, "tile_y": tiles.pixels // unit, "overlap": tiles.overlap_pixels // unit}
    setattr(model, what, note)
    source = torch.zeros(shape)
    with torch.inference_mode():
        if what == "decode":
            vae.decode_tiled(source, **numbers)
        else:
            vae.encode_tiled(source.movedim(1, -1), **numbers)
    setattr(model, what, own)
    return cut


def text(file: str) -> None:
    """What it computes, and the shapes that it gives."""
    is_checkpoint = "checkpoints" in file
    told = text_encoder([file], text_type=None if is_checkpoint else "stable_diffusion")
    if is_checkpoint:
        loaded = comfy.sd.load_checkpoint_guess_config(file, output_vae=False)[1]
    else:
        loaded = comfy.sd.load_clip([file])
    assert all(weight.is_meta for weight in told.cond_stage_model.parameters())
    call = text_call(told, "a fox " * 50)  # more than one window of tokens
    prompted = compare_flops(file, call, loaded.cond_stage_model)
    output, pooled = loaded.encode_from_tokens(*call.args, return_pooled=True)
    made = prompted_of(prompted)
    assert (made.num_tokens, made.width, made.pooled_width) == (*output.shape[1:], pooled.shape[1])


def zeros_in_ram(tensor: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(tensor, device="cpu")


def lora(file: str) -> None:
    """What it changes of a model, and by sums of which ranks, is what core then patches."""
    model = str(Path(file).parents[1] / "diffusion_models/tiny_flux.safetensors")
    patcher = comfy.sd.load_diffusion_model(model)
    tensors = comfy.lora_convert.convert_lora(comfy.utils.load_torch_file(file, safe_load=True))
    patcher.add_patches(comfy.lora.load_lora(tensors, comfy.lora.model_lora_keys_unet(patcher.model, {})))
    shapes = {key: weight.shape for key, weight in patcher.model.state_dict().items()}
    sums = {
        key.removeprefix("diffusion_model."): [low_rank_of(patch, shapes[key]) for patch in patches]
        for key, patches in patcher.patches.items()
    }
    told = CorePredictor().read_lora(
        describe_files([Path(model)]),
        LoadedModel(
            node=NodeName(id="1", title="load", class_type="UNETLoader"), kind="diffusion", files=(model,), folder=""
        ),
        [Path(model)],
        Path(file),
    )
    assert told.ranks == {name: sum(each.down.shape[0] for each in found) for name, found in sums.items() if all(found)}
    assert told.others == {name for name, found in sums.items() if not all(found)}
    assert told.num_unknown == 0
    add(file, "patched", len(sums), len(told.ranks) + len(told.others))


def compare_flops(file: str, call: CoreCall, loaded: torch.nn.Module) -> list[tuple[int, ...]]:
    """Add what a call of the loaded model computes, and of the one without memory; return its outputs' shapes."""
    trace = trace_forward(call.model, call.args, call.kwargs, method=call.method, brings_back=True)
    args, kwargs = tree_map_only(torch.Tensor, zeros_in_ram, (call.args, dict(call.kwargs)))
    counter = FlopCounterMode(display=False)
    # In products that are counted: torch has no count of its attention for the CPU.
    with torch.inference_mode(), sdpa_kernel(SDPBackend.MATH), counter:
        getattr(loaded, call.method)(*args, **kwargs)
    add(file, f"{call.method} flops", counter.get_total_flops(), trace.flops)
    return list(trace.output_shapes)


def add(file: str, what: object, expected: int, told: int) -> None:
    found.append([Path(file).stem, str(what), expected, told])


found: list[list[object]] = []
for file in files:
    if "loras" in file:
        lora(file)
        continue
    if "vae" not in file and "text_encoders" not in file:
        sampling(file)
    if "diffusion_models" not in file and "text_encoders" not in file:
        coding(file)
    if "text_encoders" in file or "checkpoints" in file:
        text(file)
with open(output, "w") as written:
    json.dump(found, written)
