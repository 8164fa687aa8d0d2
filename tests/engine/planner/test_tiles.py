"""The tiles of a VAE: they fit, they cover, and more memory never gives smaller ones."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from highwater.memory.errors import InvalidInput
from highwater.memory.planner.tiles import TiledSize, Tiles, candidates, choose_tiles, halve_tiles

MIB = 1 << 20

sizes = st.builds(
    TiledSize,
    height=st.integers(1, 4096),
    width=st.integers(1, 4096),
    frames=st.integers(1, 200),
    pixels_per_latent=st.sampled_from([1, 4, 8, 16, 32]),
    frames_per_latent=st.sampled_from([1, 4, 8]),
)
budgets = st.integers(0, 1 << 36)


def cost_of(size: TiledSize, bytes_per_pixel: int = 4000, fixed: int = 5 * MIB):
    def cost(tiles: Tiles | None) -> int:
        volume = size.height * size.width * size.frames if tiles is None else tiles.volume(size)
        return fixed + bytes_per_pixel * volume

    return cost


def starts(length: int, tile: int, overlap: int) -> list[int]:
    """Where tiles begin along one side, as in ComfyUI and diffusers."""
    return list(range(0, length - overlap, tile - overlap)) if length > tile else [0]


@given(size=sizes, budget=budgets)
def test_the_choice_fits_or_is_the_smallest(size: TiledSize, budget: int) -> None:
    cost = cost_of(size)
    choice = choose_tiles(size, cost, budget)
    if choice is None:
        assert cost(None) <= budget or choose_tiles(size, cost, 0) is None
        return
    assert cost(None) > budget
    assert choice.tile_bytes == cost(choice.tiles)
    smallest = choose_tiles(size, cost, 0)
    assert smallest is not None
    assert choice.tile_bytes <= budget or choice.tiles.volume(size) == smallest.tiles.volume(size)


@given(size=sizes, budget=budgets, more=budgets)
def test_a_larger_budget_never_gives_a_smaller_tile(size: TiledSize, budget: int, more: int) -> None:
    cost = cost_of(size)
    small, large = choose_tiles(size, cost, budget), choose_tiles(size, cost, budget + more)
    if large is not None:
        assert small is not None
        assert large.tiles.volume(size) >= small.tiles.volume(size)


@given(size=sizes, budget=budgets)
def test_tiles_cover_the_picture_and_are_whole_latents(size: TiledSize, budget: int) -> None:
    choice = choose_tiles(size, cost_of(size), budget)
    tiles = choice.tiles if choice is not None else None
    while tiles is not None:
        assert not tiles.covers(size)
        assert tiles.pixels % (4 * size.pixels_per_latent) == 0
        assert tiles.overlap_pixels * 4 == tiles.pixels
        assert tiles.frames % size.frames_per_latent == tiles.overlap_frames % size.frames_per_latent == 0
        assert tiles.overlap_frames < tiles.frames
        assert (tiles.overlap_frames > 0) == (tiles.frames < size.frames)
        for length, tile, overlap in (
            (size.height, tiles.pixels, tiles.overlap_pixels),
            (size.width, tiles.pixels, tiles.overlap_pixels),
            (size.frames, tiles.frames, tiles.overlap_frames),
        ):
            begins = starts(length, tile, overlap)
            assert begins[-1] + tile >= length
            assert all(after - before + overlap <= tile for before, after in itertools.pairwise(begins))
        tiles = halve_tiles(size, tiles)


@given(size=sizes)
def test_each_half_is_strictly_smaller_and_halving_ends(size: TiledSize) -> None:
    cost, tiles, tries = cost_of(size), halve_tiles(size, None), 0
    before = size.height * size.width * size.frames + 1
    while tiles is not None:
        tries += 1
        assert tiles.volume(size) <= before
        assert tries < 40
        smaller = halve_tiles(size, tiles)
        if smaller is not None:
            assert (smaller.pixels, smaller.frames) < (tiles.pixels, tiles.frames)
            assert smaller.pixels == tiles.pixels or smaller.frames == tiles.frames
            assert cost(smaller) <= cost(tiles)
        before, tiles = tiles.volume(size), smaller


def test_a_picture_that_fits_is_not_tiled() -> None:
    size = TiledSize(height=1024, width=1024)
    assert choose_tiles(size, cost_of(size), 6000 * MIB) is None


def test_an_image_gets_the_largest_tile_that_fits() -> None:
    """4000 bytes per pixel: 500 MiB hold 131,072 pixels, and 352 px are 123,904."""
    size = TiledSize(height=1024, width=1024)
    choice = choose_tiles(size, cost_of(size, fixed=0), 500 * MIB)
    assert choice is not None
    assert (choice.tiles.pixels, choice.tiles.overlap_pixels) == (352, 88)
    assert choice.reason() == "VAE decode in tiles of 352 px, overlap 88: untiled needs 3.91GiB, 500MiB available"


def test_the_smallest_tile_says_that_others_make_room() -> None:
    size = TiledSize(height=1024, width=1024)
    choice = choose_tiles(size, cost_of(size), 10 * MIB)
    assert choice is not None
    assert choice.tiles.pixels == 64
    assert not choice.fits
    assert choice.reason().endswith("the smallest tile needs 20.6MiB, so other models make room")


@given(size=sizes, budget=budgets)
def test_a_tile_below_256_pixels_is_chosen_only_where_none_of_256_fits(size: TiledSize, budget: int) -> None:
    cost = cost_of(size)
    choice = choose_tiles(size, cost, budget)
    if choice is None or choice.tiles.pixels >= size.least_pixels(256):
        return
    assert choice.tiles.pixels >= min(64, size.whole_pixels)
    larger = [tiles for tiles in candidates(size) if tiles.pixels >= size.least_pixels(256)]
    assert all(cost(tiles) > budget for tiles in larger)
    assert ("colors may differ" in choice.reason()) == (choice.tiles.pixels < min(256, max(size.height, size.width)))


@pytest.mark.parametrize(("mebibytes", "pixels"), [(300, 256), (250, 224), (100, 128), (30, 64)])
def test_a_small_budget_gets_the_largest_small_tile_that_fits(mebibytes: int, pixels: int) -> None:
    size = TiledSize(height=1024, width=1024)
    choice = choose_tiles(size, cost_of(size), mebibytes * MIB)
    assert choice is not None and choice.fits
    assert choice.tiles.pixels == pixels


@given(size=sizes, budget=budgets)
def test_the_work_of_tiles_counts_what_overlaps(size: TiledSize, budget: int) -> None:
    """By hand: each pixel as often as tiles hold it, along each side."""
    choice = choose_tiles(size, cost_of(size), budget)
    if choice is None:
        return
    tiles = choice.tiles
    times = 1.0
    for length, tile, overlap in (
        (size.height, tiles.pixels, tiles.overlap_pixels),
        (size.width, tiles.pixels, tiles.overlap_pixels),
        (size.frames, tiles.frames, tiles.overlap_frames),
    ):
        held = [min(begin + tile, length) - begin for begin in starts(length, tile, overlap)]
        times *= sum(held) / length
    assert tiles.work(size) == pytest.approx(times)
    assert tiles.work(size) >= 1


def test_a_video_that_costs_nothing_per_frame_keeps_all_its_frames() -> None:
    """A causal VAE that keeps one frame at a time, as Wan's: cutting its frames would only cost seams."""
    size = TiledSize(height=480, width=832, frames=81, frames_per_latent=4)

    def cost(tiles: Tiles | None) -> int:
        pixels = 480 * 832 if tiles is None else min(tiles.pixels, 480) * min(tiles.pixels, 832)
        return 4000 * pixels

    choice = choose_tiles(size, cost, 1000 * MIB)
    assert choice is not None
    assert (choice.tiles.frames, choice.tiles.overlap_frames) == (84, 0)
    assert "frames" not in choice.reason()


def test_a_long_video_of_small_frames_is_cut_in_time() -> None:
    size = TiledSize(height=256, width=256, frames=121, pixels_per_latent=32, frames_per_latent=8)
    choice = choose_tiles(size, cost_of(size), 10_000 * MIB)
    assert choice is not None
    assert choice.tiles.text() == "256 px and 32 frames, overlap 64 px, 8 frames"


def test_a_picture_as_small_as_a_tile_is_left_whole() -> None:
    size = TiledSize(height=64, width=48)
    assert choose_tiles(size, cost_of(size), 0) is None


@pytest.mark.parametrize("value", [0, -8, True, 8.0])
def test_sizes_are_whole_numbers_from_one(value: object) -> None:
    with pytest.raises(InvalidInput, match="height"):
        TiledSize(height=value, width=64)  # type: ignore[arg-type]
