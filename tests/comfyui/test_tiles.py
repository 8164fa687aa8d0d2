"""VAEs of our loaders choose their tiles beforehand: they decode as core's tiled node does, and the model stays."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from highwater.tests.comfyui.graphs import CORE, Graph, Link, Loaders, new_run
from highwater.tests.comfyui.host_process import HostProcess, PromptResult

MIB, GIB = 1 << 20, 1 << 30
# What core wants free for computing, whatever there is (its own rule in 0.33).
KEPT_BY_CORE = int(0.8 * GIB)
MODEL_BYTES = 8_160_000  # the tiny Flux, rounded down
TILES = re.compile(r"VAE (?:decode|encode) in tiles of (\d+) px, overlap (\d+): untiled needs \S+, \S+ available$")
VIDEO_TILES = re.compile(r"VAE decode in tiles of (\d+) px and (\d+) frames, overlap (\d+) px, (\d+) frames: untiled ")
WIDTH, HEIGHT = 512, 256


# A VAE of Wan 2.1 with a twelfth of the channels: core estimates its bytes without looking at those.
MAKE_VIDEO_VAE = """
import sys, torch
from safetensors.torch import save_file
path, sys.argv[1:] = sys.argv[1], ["--cpu"]
import comfy.options
comfy.options.enable_args_parsing()
from comfy.ldm.wan.vae import WanVAE
torch.manual_seed(0)
vae = WanVAE(dim=8, z_dim=16, dim_mult=[1, 2, 4, 4], num_res_blocks=2, attn_scales=[],
             temperal_downsample=[False, True, True], image_channels=3, conv_out_channels=3, dropout=0.0)
for name, weight in vae.named_parameters():
    torch.nn.init.ones_(weight) if "gamma" in name else torch.nn.init.normal_(weight, std=0.05)
save_file(vae.state_dict(), path)
"""
VIDEO_VAE = "small_wan_vae.safetensors"


def occupy(host: HostProcess, free_bytes: int) -> None:
    graph = Graph()
    graph.add("TestOccupy", device=0, free_bytes=free_bytes, run=next(new_run))
    assert host.run(graph.nodes).outcome == "success"


@pytest.fixture(scope="module")
def static_host(start_gpu_host: Callable[..., HostProcess]) -> Iterator[HostProcess]:
    """In fp32 small pictures need as much by core's estimate as larger ones in bf16."""
    with start_gpu_host(arguments=["--fp32-vae"]) as host:
        yield host


@pytest.fixture
def static(static_host: HostProcess) -> Iterator[HostProcess]:
    """A host whose first GPU has a little more than what core keeps free for computing."""
    yield from shortened(static_host)


@pytest.fixture
def dynamic(start_dynamic_host: Callable[..., HostProcess]) -> Iterator[HostProcess]:
    with start_dynamic_host(arguments=["--fp32-vae"]) as host:
        yield from shortened(host)


def shortened(host: HostProcess) -> Iterator[HostProcess]:
    host.forget()
    occupy(host, KEPT_BY_CORE + 40 * MIB)
    yield host
    occupy(host, -1)
    host.forget()


def sampled(graph: Graph, loaders: Loaders, width: int = WIDTH, height: int = HEIGHT) -> Link:
    latent = graph.add("EmptySD3LatentImage", width=width, height=height, batch_size=1)
    model = loaders.diffusion_model(graph)
    return graph.sampler(model, graph.conditioning(1), graph.conditioning(2), latent, steps=1)


def decode(
    host: HostProcess, loaders: Loaders, *, short: int = 0, tiled: dict[str, int] | None = None, **size: int
) -> Any:
    """Sample and decode; returns the result and the events. ``tiled``: by core's tiled node, with these numbers."""
    graph = Graph()
    latent, vae = sampled(graph, loaders, **size), loaders.vae(graph)
    if short:
        vae = graph.add("TestShortVAE", vae=vae, calls=short, nth=3, run=next(new_run))
    if tiled is None:
        image = graph.add("VAEDecode", samples=latent, vae=vae)
    else:
        image = graph.add("VAEDecodeTiled", samples=latent, vae=vae, temporal_size=64, temporal_overlap=8, **tiled)
    graph.keep(image)
    begin_s = host.last_event_s()
    result = host.run(graph.nodes)
    assert result.outcome == "success", result.brief_error
    return result, host.events_after(begin_s)


def image_of(result: PromptResult) -> torch.Tensor:
    (image,) = result.kept().values()
    return image


def tile_events(events: list[dict[str, Any]]) -> list[str]:
    return [event["reason"] for event in events if event["reason"].startswith("VAE ")]


def in_cores_tiles(host: HostProcess, reasons: list[str], **size: int) -> torch.Tensor:
    """Return what core decodes in the tiles of the one event that tells of some."""
    (reason,) = reasons
    found = TILES.match(reason)
    assert found is not None, reason
    tiled = {"tile_size": int(found[1]), "overlap": int(found[2])}
    return image_of(decode(host, CORE, tiled=tiled, **size)[0])


def test_a_decode_that_does_not_fit_is_tiled_beside_the_model(static: HostProcess) -> None:
    """By core's estimate it needs more than is free, and core would unload the model for it."""
    with static.books() as devices:
        result, events = decode(static, Loaders())
    assert devices[0]["num_ooms"] == 0
    assert devices[0]["peak_bytes"] <= devices[0]["total_bytes"]
    held = {part["name"]: part["tiers"].get("gpu:0", 0) for part in static.part("components")}
    assert held["tiny_flux"] >= MODEL_BYTES
    assert not [event for event in events if event["kind"] == "evict"]
    assert torch.equal(image_of(result), in_cores_tiles(static, tile_events(events)))


@pytest.mark.parametrize("tiled", [{"tile_size": 128, "overlap": 32}])
def test_a_users_own_tiles_are_untouched(static: HostProcess, tiled: dict[str, int]) -> None:
    result, events = decode(static, Loaders(), tiled=tiled, width=256)
    assert not tile_events(events)
    assert torch.equal(image_of(result), image_of(decode(static, CORE, tiled=tiled, width=256)[0]))


def test_tiles_are_halved_after_a_real_failure(static: HostProcess) -> None:
    """Untiled fails, tiles of half the size fail, and those of a quarter are what core decodes at these numbers."""
    result, events = decode(static, Loaders(), short=2, width=256)
    assert tile_events(events) == [
        "VAE decode ran out of memory untiled; next try in tiles of 128 px, overlap 32: 136MiB",
        "VAE decode ran out of memory in tiles of 128 px, overlap 32; next try in tiles of 64 px, overlap 16: 34.0MiB",
    ]
    assert {event["kind"] for event in events if event["reason"] in tile_events(events)} == {"recover"}
    assert not [event for event in events if event["kind"] == "evict"]
    expected = decode(static, CORE, tiled={"tile_size": 64, "overlap": 16}, width=256)[0]
    assert torch.equal(image_of(result), image_of(expected))


def test_a_decode_that_fits_is_core_s(static: HostProcess) -> None:
    result, events = decode(static, Loaders(), width=256)
    assert not tile_events(events)
    assert torch.equal(image_of(result), image_of(decode(static, CORE, width=256)[0]))


@pytest.mark.parametrize("loaders", [Loaders(kind="managed")], ids=["managed"])
def test_managed_vaes_choose_their_tiles_too(static: HostProcess, loaders: Loaders) -> None:
    result, events = decode(static, loaders)
    assert torch.equal(image_of(result), in_cores_tiles(static, tile_events(events)))


def test_an_encode_that_does_not_fit_is_tiled(static: HostProcess) -> None:
    def run(loaders: Loaders, **tiled: int) -> tuple[torch.Tensor, list[str]]:
        graph = Graph()
        image = graph.add("EmptyImage", width=640, height=HEIGHT, batch_size=1, color=0x336699)
        node = "VAEEncodeTiled" if tiled else "VAEEncode"
        more = {"temporal_size": 64, "temporal_overlap": 8, **tiled} if tiled else {}
        graph.keep(graph.add(node, pixels=image, vae=loaders.vae(graph), **more))
        begin_s = static.last_event_s()
        result = static.run(graph.nodes)
        assert result.outcome == "success", result.brief_error
        (latent,) = result.kept().values()
        return latent, tile_events(static.events_after(begin_s))

    latent, reasons = run(Loaders())
    (found,) = (TILES.match(reason) for reason in reasons)
    assert found is not None
    tiled = {"tile_size": int(found[1]), "overlap": int(found[2])}
    expected, _ = run(CORE, **tiled)
    assert torch.equal(latent, expected)
    # What a user sets is not chosen anew.
    latent, reasons = run(Loaders(), **tiled)
    assert torch.equal(latent, expected) and not reasons


def test_a_dynamic_vae_chooses_its_tiles_too(dynamic: HostProcess) -> None:
    with dynamic.books() as devices:
        result, events = decode(dynamic, Loaders(engine="dynamic"))
    assert devices[0]["num_ooms"] == 0
    assert torch.equal(image_of(result), in_cores_tiles(dynamic, tile_events(events)))


@pytest.mark.parametrize(
    ("width", "height", "length", "told"),
    [
        pytest.param(384, 320, 5, TILES, id="in-its-pictures"),
        pytest.param(256, 256, 17, VIDEO_TILES, id="in-its-frames", marks=pytest.mark.slow),
    ],
)
def test_a_video_that_does_not_fit_is_tiled(
    static: HostProcess, width: int, height: int, length: int, told: re.Pattern[str]
) -> None:
    """By core's estimate up to four latents of frames need as much as one, and five three times that."""
    path = static.base / "models" / "vae" / VIDEO_VAE
    command = [str(static.files.python), "-B", "-c", MAKE_VIDEO_VAE, str(path)]
    subprocess.run(command, cwd=static.files.directory, check=True, capture_output=True)

    def build(loaders: Loaders, tiled: dict[str, int] | None = None) -> Graph:
        graph = Graph()
        latent = graph.add("EmptyHunyuanLatentVideo", width=width, height=height, length=length, batch_size=1)
        positive, negative = (graph.conditioning(seed, width=4096) for seed in (1, 2))
        model = loaders.diffusion_model(graph, "tiny_wan.safetensors")
        samples = graph.sampler(model, positive, negative, latent, steps=1)
        node, more = ("VAEDecode", {}) if tiled is None else ("VAEDecodeTiled", tiled)
        graph.keep(graph.add(node, samples=samples, vae=loaders.vae(graph, VIDEO_VAE), **more))
        return graph

    def run(loaders: Loaders, tiled: dict[str, int] | None = None) -> tuple[torch.Tensor, list[str]]:
        begin_s = static.last_event_s()
        result = static.run(build(loaders, tiled).nodes)
        assert result.outcome == "success", result.brief_error
        return image_of(result), tile_events(static.events_after(begin_s))

    video, reasons = run(Loaders())
    (found,) = (told.match(reason) for reason in reasons)
    assert found is not None, reasons
    names = ("tile_size", "overlap") if told is TILES else ("tile_size", "temporal_size", "overlap", "temporal_overlap")
    tiled = {"temporal_size": 64, "temporal_overlap": 8, **dict(zip(names, map(int, found.groups()), strict=True))}
    assert video.shape[0] == length
    assert video.std() > 0
    assert torch.equal(video, run(CORE, tiled)[0])
    run(Loaders())  # of the tiles of each shape the second is timed
    graph = build(Loaders())
    plan = graph.add("HighwaterPlan", devices="")
    graph.add("PreviewImage", images=(plan[0], 1))
    (text,) = static.run(graph.nodes).outputs[plan[0]]["text"]
    decoding = next(line for line in text.splitlines() if re.match(r"small_wan_vae +decode", line))
    assert f" in tiles of {found[1]} px" in decoding and re.search(r"  1 +\d+(\.\d+)? m?s ", decoding), decoding
    # Each tile of the plan ran: else a rate would tell it.
    assert re.search(r"^seconds of forwards: .*small_wan_vae as measured here", text, re.MULTILINE), text


@pytest.mark.parametrize(
    ("more_bytes", "devices"),
    [
        pytest.param(40 * MIB, "", id="what-core-makes-free"),
        # The picture lacks less for one piece than the model has, which would be back within a thirtieth of the run.
        pytest.param(440 * MIB, "gpu:0=1218MiB@25GB/s@10TFLOPS,host=16GiB", id="nearly-one-piece"),
    ],
)
def test_a_decode_is_planned_in_the_tiles_in_which_it_runs(static: HostProcess, more_bytes: int, devices: str) -> None:
    """Of the model nothing leaves, by the plan and in the run."""
    occupy(static, KEPT_BY_CORE + more_bytes)
    loaders = Loaders(profile="unlimited")
    graph = Graph()
    image = graph.add("VAEDecode", samples=sampled(graph, loaders), vae=loaders.vae(graph))
    graph.keep(image)
    plan = graph.add("HighwaterPlan", devices=devices)
    graph.add("PreviewImage", images=(plan[0], 1))
    begin_s = static.last_event_s()
    result = static.run(graph.nodes)
    assert result.outcome == "success", result.brief_error
    (text,) = result.outputs[plan[0]]["text"]
    events = static.events_after(begin_s)
    (found,) = (TILES.match(reason) for reason in tile_events(events))
    decoding = next(line for line in text.splitlines() if re.match(r"tiny_vae +decode", line))
    assert found is not None and f" in tiles of {found[1]} px, overlap {found[2]};" in decoding, (text, events)
    assert "tiny_flux" not in decoding, decoding
    assert not [event for event in events if event["kind"] == "evict"]
    held = {part["name"]: part["tiers"].get("gpu:0", 0) for part in static.part("components")}
    assert held["tiny_flux"] >= MODEL_BYTES


def test_a_text_encoder_leaves_before_a_decode_is_tiled(static: HostProcess) -> None:
    """With what the text encoder has the decode fits in one piece; of the model nothing leaves."""
    occupy(static, KEPT_BY_CORE + 580 * MIB)
    graph = Graph()
    encoder = Loaders().text_encoder(graph)
    graph.keep(graph.add("CLIPTextEncode", text="a fox", clip=encoder), "text")
    latent = sampled(graph, Loaders())
    graph.keep(latent, "latent")
    assert static.run(graph.nodes).outcome == "success"
    held = {part["name"]: part["tiers"].get("gpu:0", 0) for part in static.part("components")}
    assert held["tiny_flux"] >= MODEL_BYTES and held["clip_l"] > 100 * MIB
    graph.keep(graph.add("VAEDecode", samples=latent, vae=Loaders().vae(graph)), "image")
    begin_s = static.last_event_s()
    result = static.run(graph.nodes)
    assert result.outcome == "success", result.brief_error
    events = static.events_after(begin_s)
    assert not tile_events(events)
    evicted = [(event["component"], event["reason"].split(";")[0]) for event in events if event["kind"] == "evict"]
    assert evicted == [("clip_l", "the VAE decodes")]
