"""Compares what core's classes need, as told from files' headers, with what they say once they are loaded.

usage: core_needs.py PACK OUTPUT.json FILE...   (in ComfyUI's folder, by its Python; PACK is imported as highwater)
"""

import importlib.util
import json
import sys
import warnings
from pathlib import Path

pack, output, *files = sys.argv[1:]
sys.path.insert(0, ".")
sys.argv[1:] = ["--cpu"]
import comfy.options  # noqa: E402

comfy.options.enable_args_parsing()
import comfy.sd  # noqa: E402
import comfy.utils  # noqa: E402
import torch  # noqa: E402

spec = importlib.util.spec_from_file_location("highwater", Path(pack, "__init__.py"), submodule_search_locations=[pack])
sys.modules["highwater"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(sys.modules["highwater"])
from highwater.memory.planner.tiles import Tiles  # noqa: E402
from highwater.nodes.host.core_needs import coding_needs, sampling_needs  # noqa: E402

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


def add(file: str, what: object, expected: int, told: int) -> None:
    found.append([Path(file).stem, str(what), expected, told])


found: list[list[object]] = []
for file in files:
    if "vae" not in file:
        sampling(file)
    if "diffusion_models" not in file:
        coding(file)
with open(output, "w") as written:
    json.dump(found, written)
