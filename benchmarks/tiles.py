"""What tiles cost and what they lose: VAEs of diffusers in one piece, and in the tiles that smaller devices give.

Peaks and seconds are those of a simulated device, whose seconds are virtual; "predicted" is what the tiles are chosen
by, the traced bytes and a tenth. The pictures are decoded for real from smooth random latents, with random weights:
the layers have the order of the real VAEs and fewer channels. Errors of trained VAEs differ; what normalises over a
whole picture, as these do, differs most in small tiles.
"""

from __future__ import annotations

from typing import Any

import torch

from highwater.headless import simdevice
from highwater.memory.planner.tiles import Tiles, choose_tiles
from highwater.nodes.pipelines.tile_settings import set_to
from highwater.nodes.pipelines.tiled_decode import measure as measure_decode
from highwater.nodes.pipelines.tiny_pipelines import build_vae

from .case import Result

MIB = 1 << 20
# The tiles of these parts of what one piece needs.
BUDGETS = (0.75, 0.5, 0.33)
SIDE = 64  # latents: 512 pixels
CARD = simdevice.SimDeviceSpec(total_bytes=4096 * MIB)


def build_sd_vae() -> Any:
    """AutoencoderKL as SD, SDXL and Flux have it, with an eighth of the channels."""
    from diffusers import AutoencoderKL

    return AutoencoderKL(
        block_out_channels=(16, 32, 64, 64),
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        layers_per_block=2,
        norm_num_groups=8,
        latent_channels=16,
    )


def build_tiny_vae() -> Any:
    """The VAE of the pack's own tiny pipelines."""
    from diffusers import AutoencoderKL

    return build_vae(AutoencoderKL, latent_channels=16)


def build_wan_vae() -> Any:
    """AutoencoderKLWan as Wan 2.1 has it, with a twelfth of the channels; it normalises each pixel by itself."""
    from diffusers import AutoencoderKLWan

    return AutoencoderKLWan(base_dim=8, dim_mult=[1, 2, 4, 4], num_res_blocks=1)


CASES = {
    "tiny pipelines', 512 px": (build_tiny_vae, (1, 16, SIDE, SIDE)),
    "AutoencoderKL / 8, 512 px": (build_sd_vae, (1, 16, SIDE, SIDE)),
    "AutoencoderKLWan / 12, 5 frames of 320 px": (build_wan_vae, (1, 16, 2, 40, 40)),
}


def smooth_latents(shape: tuple[int, ...]) -> torch.Tensor:
    """Return random latents that change over four of them, as those of pictures do."""
    rough = torch.randn(*shape[:-2], shape[-2] // 4, shape[-1] // 4, generator=torch.Generator().manual_seed(1))
    flat = rough.flatten(0, -3).unsqueeze(0)
    wide = torch.nn.functional.interpolate(flat, size=shape[-2:], mode="bicubic")
    return wide.reshape(shape)


def decode(vae: Any, z: torch.Tensor, tiles: Tiles | None, per_latent: int) -> tuple[torch.Tensor, int, float]:
    """Return what a VAE decodes, the bytes beside its weights at the peak, and the virtual seconds."""
    before = simdevice.stats(0).used_bytes - z.nbytes
    simdevice.reset_stats()
    torch.accelerator.synchronize(0)
    begin_s = simdevice.clock_s()
    with torch.no_grad(), set_to(vae, tiles, per_latent):
        image = vae.decode(z, return_dict=False)[0]
    torch.accelerator.synchronize(0)
    return image.cpu(), simdevice.stats(0).peak_bytes - before, simdevice.clock_s() - begin_s


def run_case(name: str) -> list[dict[str, Any]]:
    build, shape = CASES[name]
    torch.manual_seed(0)
    vae = build().eval().requires_grad_(False)
    rows = []
    with simdevice.cluster([CARD]):
        vae.to(f"{simdevice.name()}:0")
        z = smooth_latents(shape).to(f"{simdevice.name()}:0")
        size, cost = measure_decode(vae, z)
        chosen = [choose_tiles(size, cost, int(cost(None) * budget)) for budget in BUDGETS]
        found = [choice.tiles for choice in chosen if choice is not None]
        exact, _, whole_s = decode(vae, z, None, size.pixels_per_latent)
        for tiles in [None, *dict.fromkeys(found)]:
            image, peak_bytes, seconds = decode(vae, z, tiles, size.pixels_per_latent)
            error = float((image - exact).norm() / exact.norm())
            rows.append(
                {
                    "VAE": name,
                    "tile, px": tiles.pixels if tiles is not None else "untiled",
                    "overlap, px": tiles.overlap_pixels if tiles is not None else "-",
                    "predicted, MiB": cost(tiles) / MIB,
                    "measured, MiB": peak_bytes / MIB,
                    "relative error": error,
                    "largest error": float((image - exact).abs().max()),
                    "ms": 1e3 * seconds,
                    "times untiled": seconds / whole_s,
                    "measured : predicted": peak_bytes / cost(tiles),
                }
            )
        del z
        vae.to("cpu")
    return rows


def measure() -> Result:
    """Measure three VAEs; about two minutes."""
    simdevice.install("sim", num_devices=1)
    rows = [row for name in CASES for row in run_case(name)]
    return Result(
        question=(
            "What a VAE takes of a simulated device in one piece and in the tiles that three quarters, half and a "
            "third of that give, by prediction and by the device's count; how far the picture is from the untiled one, "
            "as a part of its norm; and the virtual time. Random weights."
        ),
        rows=rows,
        ratio=max(row["measured : predicted"] for row in rows),
        meaning="the most that a decode took of what its tiles were chosen by; at most 1",
    )
