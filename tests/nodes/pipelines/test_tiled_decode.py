"""A pipeline's VAE decodes in tiles that fit beside the model, and is set back; a failure halves them."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from highwater.memory import MemoryManager, manage
from highwater.memory.manager import default
from highwater.memory.planner.run import BlockTimes
from highwater.memory.planner.tiles import Tiles, choose_tiles
from highwater.memory.tracing import seconds_of
from highwater.nodes.pipelines.decode_bytes import cuts_well, decode_bytes, trace
from highwater.nodes.pipelines.decode_tiling import tiling_of
from highwater.nodes.pipelines.diffusers_pipelines import load_pipeline
from highwater.nodes.pipelines.sampling import Sampling, sample_images
from highwater.nodes.pipelines.tile_settings import set_to
from highwater.nodes.pipelines.tiled_decode import choosing_tiles, measure

MIB = 1 << 20
ATTRIBUTES = ("use_tiling", "tile_sample_min_size", "tile_latent_min_size", "tile_overlap_factor")


class Stack(nn.Module):
    """A diffusion model of 8 MiB that makes nothing of what it gets."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(512, 512) for _ in range(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


def build_vae(**options: Any) -> Any:
    from diffusers import AutoencoderKL

    torch.manual_seed(0)
    vae = AutoencoderKL(
        block_out_channels=(16, 16, 32, 32),
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        norm_num_groups=8,
        latent_channels=4,
        sample_size=64,
        **options,
    )
    return vae.eval().requires_grad_(False)


def build_video_vae() -> Any:
    from diffusers import AutoencoderKLWan

    torch.manual_seed(0)
    return AutoencoderKLWan(base_dim=8, dim_mult=[1, 1, 2, 2], num_res_blocks=1).eval().requires_grad_(False)


def build_framewise_vae() -> Any:
    """A VAE that decodes all frames at once, and can be told to decode runs of them."""
    from diffusers import AutoencoderKLLTXVideo

    torch.manual_seed(0)
    sides = {"block_out_channels": (8, 8, 8, 8), "decoder_block_out_channels": (32, 32, 32, 32)}
    layers = {"layers_per_block": (1, 1, 1, 1, 1), "decoder_layers_per_block": (1, 1, 1, 1, 1)}
    vae = AutoencoderKLLTXVideo(**sides, **layers, latent_channels=8, patch_size=1)
    return vae.eval().requires_grad_(False)


class Rig:
    """A managed pipeline whose model has just computed, on a simulated device."""

    def __init__(self, sim: Any, manager: MemoryManager, vae: Any) -> None:
        self.sim, self.manager, self.vae = sim, manager, vae
        self.plain = copy.deepcopy(vae)
        self.pipe = SimpleNamespace(transformer=Stack().eval().requires_grad_(False), vae=vae)
        self.managed = manage(
            {"transformer": self.pipe.transformer, "vae": vae}, placement="gpu:0", manager=manager, name="rig"
        )
        self.pipe.transformer(torch.ones(4, 512, device="sim:0"))

    def decode(self, z: torch.Tensor) -> torch.Tensor:
        with torch.no_grad(), choosing_tiles(self.pipe, self.manager.vae_room):
            return self.pipe.vae.decode(z.to("sim:0"), return_dict=False)[0].cpu()

    def events(self) -> list[dict[str, Any]]:
        return [event for event in self.manager.report()["events"] if event["reason"].startswith("VAE ")]

    def reasons(self) -> list[str]:
        return [event["reason"] for event in self.events()]

    def held(self, name: str) -> int:
        return self.manager.ledger.held(f"rig/{name}", "gpu:0")

    def expected(self, z: torch.Tensor, pixels: int, frames: int | None = None) -> torch.Tensor:
        """Return what the library decodes in tiles of these pixels, on the same device without the engine."""
        if frames is not None:
            self.plain.use_framewise_decoding = True
            self.plain.enable_tiling(pixels, pixels, frames, pixels * 3 // 4, pixels * 3 // 4, frames * 2 // 3)
        elif hasattr(self.plain, "tile_sample_min_size"):
            self.plain.tile_sample_min_size, self.plain.tile_latent_min_size = pixels, pixels // 8
            self.plain.enable_tiling()
        else:
            self.plain.enable_tiling(pixels, pixels, pixels * 3 // 4, pixels * 3 // 4)
        self.managed.release()
        with torch.no_grad():
            return self.plain.to("sim:0").decode(z.to("sim:0"), return_dict=False)[0].cpu()


@contextmanager
def rigged(sim: Any, mebibytes: int, vae: Any) -> Iterator[Rig]:
    with sim.cluster([sim.SimDeviceSpec(total_bytes=mebibytes * MIB)]):
        manager = MemoryManager()
        manager.set_watermark("*", 0, 0)
        manager.set_watermark("host", 0, 0)
        rig = Rig(sim, manager, vae)
        try:
            yield rig
            manager.ledger.check()
        finally:
            manager.release_all()
            manager.ledger.check()
            rig.plain.to("cpu")


def latents(height: int, width: int, *more: int, channels: int = 4) -> torch.Tensor:
    return torch.randn(1, channels, *more, height, width, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize(("size", "mebibytes"), [((48, 64), 64), ((64, 32), 48)])
def test_a_decode_that_does_not_fit_is_tiled_beside_the_model(sim: Any, size: tuple[int, int], mebibytes: int) -> None:
    z = latents(*size)
    with rigged(sim, mebibytes, build_vae()) as rig:
        before = {name: getattr(rig.vae, name) for name in ATTRIBUTES}
        whole = rig.held("transformer")
        sim.reset_stats()
        image = rig.decode(z)
        assert sim.stats(0).num_ooms == 0
        (event,) = rig.events()
        assert sim.stats(0).peak_bytes <= whole + rig.held("vae") + event["bytes"] <= mebibytes * MIB
        assert rig.held("transformer") == whole >= 8 * MIB
        assert {name: getattr(rig.vae, name) for name in ATTRIBUTES} == before
        assert "decode" not in vars(rig.vae)
        (reason,) = rig.reasons()
        assert reason.startswith("VAE decode in tiles of ")
        pixels = int(reason.split()[5])
        assert torch.equal(image, rig.expected(z, pixels))


def test_a_decode_that_fits_is_the_library_s(sim: Any) -> None:
    z = latents(32, 32)
    with rigged(sim, 256, build_vae()) as rig:
        image = rig.decode(z)
        assert rig.reasons() == []
        rig.managed.release()
        with torch.no_grad():
            expected = rig.plain.to("sim:0").decode(z.to("sim:0"), return_dict=False)[0].cpu()
        assert torch.equal(image, expected)


def test_a_real_failure_halves_the_tiles(sim: Any) -> None:
    """The first allocation of the decoder's last block fails, twice: untiled, then in tiles of half the size."""
    z = latents(32, 32)
    with rigged(sim, 256, build_vae()) as rig:
        left = 2

        def fail(*_: Any) -> None:
            nonlocal left
            left -= 1
            if left >= 0:
                sim.fail_alloc(0, 1)

        handle = rig.vae.decoder.register_forward_pre_hook(fail)
        image = rig.decode(z)
        handle.remove()
        assert [reason.partition(":")[0] for reason in rig.reasons()] == [
            "VAE decode ran out of memory untiled; next try in tiles of 128 px, overlap 32",
            "VAE decode ran out of memory in tiles of 128 px, overlap 32; next try in tiles of 64 px, overlap 16",
        ]
        assert torch.equal(image, rig.expected(z, 64))


def test_the_last_failure_is_raised_and_leaves_nothing(sim: Any) -> None:
    z = latents(16, 16)
    with rigged(sim, 256, build_vae()) as rig:
        handle = rig.vae.decoder.register_forward_pre_hook(lambda *_: sim.fail_alloc(0, 1))
        before = {name: getattr(rig.vae, name) for name in ATTRIBUTES}
        with pytest.raises(torch.OutOfMemoryError):
            rig.decode(z)
        handle.remove()
        sim.fail_alloc(0, 0)
        assert [reason.partition(":")[0] for reason in rig.reasons()] == [
            "VAE decode ran out of memory untiled; next try in tiles of 64 px, overlap 16"
        ]
        assert {name: getattr(rig.vae, name) for name in ATTRIBUTES} == before
        assert "decode" not in vars(rig.vae)


def test_a_users_own_tiles_are_untouched(sim: Any) -> None:
    z = latents(48, 64)
    with rigged(sim, 256, build_vae()) as rig:
        rig.vae.tile_sample_min_size, rig.vae.tile_latent_min_size = 128, 16
        rig.vae.enable_tiling()
        image = rig.decode(z)
        assert rig.reasons() == []
        assert (rig.vae.use_tiling, rig.vae.tile_sample_min_size) == (True, 128)
        assert torch.equal(image, rig.expected(z, 128))


def test_a_video_is_cut_in_its_pictures(sim: Any) -> None:
    z = latents(40, 40, 2, channels=16)
    with rigged(sim, 112, build_video_vae()) as rig:
        sim.reset_stats()
        video = rig.decode(z)
        assert sim.stats(0).num_ooms == 0
        (reason,) = rig.reasons()
        assert reason.startswith("VAE decode in tiles of ")
        assert rig.vae.use_tiling is False
        assert torch.equal(video, rig.expected(z, int(reason.split()[5])))


def test_a_video_is_cut_in_runs_of_frames_where_its_class_can(sim: Any) -> None:
    z = latents(8, 8, 6, channels=8)
    with rigged(sim, 88, build_framewise_vae()) as rig:
        sim.reset_stats()
        video = rig.decode(z)
        assert sim.stats(0).num_ooms == 0
        (reason,) = rig.reasons()
        assert reason.startswith("VAE decode in tiles of 64 px and 24 frames, overlap 16 px, 8 frames: ")
        assert reason.endswith("76.2MiB available")
        assert (rig.vae.use_tiling, rig.vae.use_framewise_decoding) == (False, False)
        assert (rig.vae.tile_sample_min_num_frames, rig.vae.tile_sample_stride_num_frames) == (16, 8)
        assert video.shape[2] == 41
        assert torch.equal(video, rig.expected(z, 64, frames=24))


@pytest.mark.parametrize("build", [build_vae, build_video_vae])
def test_the_bytes_of_a_decode_are_those_that_a_device_counts(sim: Any, build: Any) -> None:
    """The margin, a tenth, is for what kernels allocate themselves: the simulated device has none."""
    vae = build()
    shape = (1, 4, 40, 24) if build is build_vae else (1, 16, 2, 40, 24)
    predicted = decode_bytes(vae, shape, torch.float32).of(40 * 24) / 1.1
    with sim.cluster([sim.SimDeviceSpec(total_bytes=1024 * MIB)]):
        z = torch.zeros(shape, device="sim:0")
        before = sim.stats(0).used_bytes - z.nbytes
        weights = sum(weight.nbytes for weight in (*vae.parameters(), *vae.buffers()))
        vae.to("sim:0")
        sim.reset_stats()
        with torch.no_grad():
            vae.decode(z, return_dict=False)
        peak = sim.stats(0).peak_bytes - before - weights
        vae.to("cpu")
        del z
    assert predicted == pytest.approx(peak, rel=0.02)


def test_a_pipeline_that_a_node_samples_decodes_in_tiles(
    sim: Any, models_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same picture as on a large device, but for what tiles lose."""
    asked = Sampling(prompt="a fox", negative_prompt="", width=512, height=320, frames=1, steps=1, guidance=1.0, seed=1)
    images, reasons = [], []
    for mebibytes in (1024, 96):
        with sim.cluster([sim.SimDeviceSpec(total_bytes=mebibytes * MIB)]):
            manager = MemoryManager()
            manager.set_watermark("*", 0, 0)
            manager.set_watermark("host", 0, 0)
            monkeypatch.setattr(default, "made", [manager])
            pipe = load_pipeline(models_directory / "diffusers" / "tiny-sd")
            managed = manage(pipe, placement="gpu:0", manager=manager, name="tiny-sd")
            images.append(sample_images(pipe, asked, on_step=lambda *_: None))
            reasons.append([event["reason"] for event in manager.report()["events"] if "VAE " in event["reason"]])
            assert sim.stats(0).num_ooms == 0
            managed.release()
            del pipe, managed  # its scheduler has tensors there
    assert reasons[0] == []
    (reason,) = reasons[1]
    assert reason.startswith("VAE decode in tiles of ")
    assert 0 < (images[1] - images[0]).norm() / images[0].norm() < 0.2


def test_a_decode_has_the_room_beside_its_vae_as_that_is_planned_now(sim: Any) -> None:
    """Not as it was planned for the size that it decoded last."""
    with rigged(sim, 64, build_vae()) as rig:
        room, whole = rig.manager.vae_room, rig.managed.plan["vae"].shares[0].device_bytes
        place = room.place_of(rig.vae)
        assert place is not None and place.missing_bytes == whole
        rig.managed.expect({"vae": 64 * MIB})
        place = room.place_of(rig.vae)
        assert place is not None and place.missing_bytes < whole
        rig.managed.expect({"vae": MIB})
        place = room.place_of(rig.vae)
        assert place is not None and place.missing_bytes == whole


@pytest.mark.parametrize("pixels", [64, 96, 128])
@pytest.mark.parametrize(
    ("build", "shape"),
    [
        (build_vae, (1, 4, 24, 6)),
        (build_vae, (2, 4, 33, 40)),
        (build_video_vae, (1, 16, 2, 20, 28)),
        (build_framewise_vae, (1, 8, 3, 12, 8)),
    ],
    ids=["a strip", "two pictures", "a video", "a video at once"],
)
def test_the_bytes_of_tiles_are_those_that_their_tensors_have(build: Any, shape: tuple[int, ...], pixels: int) -> None:
    """Earlier tiles stay while one is decoded, and all while they are joined: never both at once."""
    vae = build()
    size, cost = measure(vae, torch.empty(shape, device="meta"))
    tiles = Tiles(pixels=pixels, overlap_pixels=pixels // 4, frames=size.whole_frames)
    with set_to(vae, tiles, size.pixels_per_latent), torch.device("meta"):
        traced, _ = trace(vae, shape, torch.float32)
    assert cost(tiles) / 1.1 == pytest.approx(traced, rel=0.05)


REAL = {
    "AutoencoderKL": (4, False),
    "AutoencoderKLFlux2": (32, False),
    "AutoencoderTiny": (4, False),
    "AutoencoderDC": (32, False),
    "AutoencoderKLKVAE": (16, False),
    "AutoencoderKLHunyuanVideo": (16, True),
    "AutoencoderKLMochi": (12, True),
    "AutoencoderKLMagvit": (16, True),
}


def build_on_meta(name: str) -> Any:
    """Return a VAE of the sizes of a real one, without memory."""
    import diffusers

    sides = {
        "block_out_channels": (128, 256, 512, 512),
        "down_block_types": ("DownEncoderBlock2D",) * 4,
        "up_block_types": ("UpDecoderBlock2D",) * 4,
        "layers_per_block": 2,
    }
    with torch.device("meta"):
        return getattr(diffusers, name)(**(sides if name == "AutoencoderKL" else {})).eval()


@pytest.mark.parametrize("name", REAL)
def test_tiles_of_real_sizes_take_no_more_than_predicted(name: str) -> None:
    vae, (channels, is_video) = build_on_meta(name), REAL[name]
    shape = (1, channels, *((2,) if is_video else ()), 20, 24)
    size, cost = measure(vae, torch.empty(shape, device="meta"))
    choice = choose_tiles(size, cost, cost(None) // 2)
    assert choice is not None
    whole_bytes, whole = trace(vae, shape, torch.float32)
    with set_to(vae, choice.tiles, size.pixels_per_latent):
        tiled_bytes, tiled = trace(vae, shape, torch.float32)
    assert tiled == whole
    assert whole_bytes <= cost(None)
    assert tiled_bytes <= choice.tile_bytes < whole_bytes
    assert cuts_well(vae, shape, torch.float32)


@pytest.mark.parametrize(("name", "channels"), [("AutoencoderKLCosmos", 16), ("AutoencoderKLHunyuanImageRefiner", 32)])
def test_classes_whose_tiles_do_not_work_are_told(name: str, channels: int) -> None:
    """One has settings that nothing reads; the tiles of the other are put together to less than the picture."""
    assert not cuts_well(build_on_meta(name), (1, channels, 2, 40, 48), torch.float32)


def test_a_class_without_tiles_decodes_in_one_piece_and_says_so(sim: Any) -> None:
    from diffusers import AsymmetricAutoencoderKL

    vae = AsymmetricAutoencoderKL(norm_num_groups=8).eval().requires_grad_(False)
    with rigged(sim, 256, vae) as rig:
        rig.decode(latents(32, 32))
        assert rig.reasons() == [
            "VAE decode in one piece, whatever is free: AsymmetricAutoencoderKL has no tiles that can be set"
        ]


RATES = {"flops_per_s": 1e12, "memory_bytes_per_s": 1e11, "launch_s": 2e-6}


@pytest.mark.parametrize(
    ("build", "shape", "part"),
    [
        (build_vae, (1, 4, 24, 12), 0.6),
        (build_framewise_vae, (1, 8, 6, 8, 8), 0.6),
    ],
    ids=["image", "runs of frames"],
)
def test_a_plan_tells_the_tiles_and_seconds_of_a_decode(
    sim: Any, build: Any, shape: tuple[int, ...], part: float
) -> None:
    vae = build()

    def times_of(trace: Any) -> dict[str, BlockTimes]:
        return {"gpu:0": BlockTimes(blocks_s=(seconds_of(trace, **RATES).total_s,))}

    whole_bytes, _ = trace(vae, shape, torch.float32)
    tiling = tiling_of(vae, [(shape, torch.float32)], whole_bytes, times_of)
    assert tiling is not None
    assert tiling.choose(2 * whole_bytes) is None
    choice = tiling.choose(int(part * whole_bytes))
    assert choice is not None and choice.fits
    tiles, (size, _) = choice.tiles, measure(vae, torch.empty(shape, device="meta"))
    assert bool(tiles.overlap_frames) == (build is build_framewise_vae)
    num_forwards = 0

    def count(*_: Any) -> None:
        nonlocal num_forwards
        num_forwards += 1

    with sim.cluster([sim.SimDeviceSpec(total_bytes=1024 * MIB, **RATES)]):
        z = torch.zeros(shape, device="sim:0")
        before = sim.stats(0).used_bytes - z.nbytes
        vae.to("sim:0")
        weights = sim.stats(0).used_bytes - before - z.nbytes
        sim.reset_stats()
        began_s = sim.clock_s()
        vae.decoder.register_forward_pre_hook(count)
        with torch.no_grad(), set_to(vae, tiles, size.pixels_per_latent):
            vae.decode(z, return_dict=False)
        torch.accelerator.synchronize("sim:0")
        seconds, peak = sim.clock_s() - began_s, sim.stats(0).peak_bytes - before - weights
        vae.to("cpu")
        del z
    assert tiling.times(tiles)["gpu:0"].pass_s == pytest.approx(seconds, rel=0.05)
    assert peak <= choice.tile_bytes
    assert tiling.num_forwards(tiles) == num_forwards
    assert tiling.work(tiles) > 1
