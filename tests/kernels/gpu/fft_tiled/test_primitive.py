"""gpu.conv.fft_tiled against the float64 definition, in every precision; its memory; what it refuses."""

from __future__ import annotations

from dataclasses import replace
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from tests.support.closeness import INPUTS, MACHINE, assert_close, random_input, random_weights
from znnpy.kernels import reference
from znnpy.kernels.contract import Variant
from znnpy.kernels.gpu.fft_tiled.primitive import ConvFftTiled, spectra_for
from znnpy.kernels.gpu.fft_tiled.tiles import SIDES, SIDES_Z, Cover, frequencies, plane_block
from znnpy.machine import Gpu
from znnpy.shapes import ConvShape, FilterShape, PoolShape, Precision, Vec3

if TYPE_CHECKING:
    from znnpy.kernels.contract import ConvWeights

TILED = ConvFftTiled()
LARGE = Gpu("large", (9, 0), 132, 2**37, 2**25, 232448, 233472, 4e12, 13000, ())
SMALL = replace(LARGE, name="small", capability=(8, 6), shared_block_bytes=101376, shared_multiprocessor_bytes=102400)
ALLOWED: dict[Precision, float] = {"fp32": 1e-6, "tf32": 1e-3, "fp16": 5e-3}
PRECISIONS: tuple[Precision, ...] = ("fp32", "tf32", "fp16")
SHAPES = [
    ConvShape(1, 1, 1, (2, 2, 2), (2, 2, 2), "none"),  # one voxel out
    ConvShape(2, 3, 5, (9, 21, 18), (3, 4, 5), "relu"),  # odd maps, several tiles
    ConvShape(1, 6, 10, (20, 17, 33), (1, 5, 2), "tanh"),
    ConvShape(3, 2, 4, (5, 6, 19), (5, 6, 4), "sigmoid"),
    ConvShape(1, 18, 9, (8, 16, 16), (2, 3, 3), "none"),  # more maps than a block has
]


def tiled(shape: ConvShape, tile: Vec3 = (8, 16, 16), group: int = 64, kernels: str = "kept") -> Variant:
    return Variant.of(tile=tile, group=group, spectra=spectra_for(shape), kernels=kernels)


def run(
    device: Any, shape: ConvShape, x: Any, weights: ConvWeights, variant: Variant, carried: int = 0, gap: int = 0
) -> tuple[Any, float]:
    """Output and its peak, from poisoned memory; the first `carried` planes apart, `gap` planes between images."""
    kind = np.dtype(np.float16 if shape.precision == "fp16" else np.float32)

    def images(values: Any, what: str) -> Any:
        plane = values[0, 0].size
        host = np.full((len(values), values.shape[1] + gap, plane), np.nan, kind)
        host[:, : values.shape[1]] = values.reshape(len(values), -1, plane)
        strides = (host.strides[0], *np.empty(values.shape[1:], kind).strides)
        return device.view(device.put(host, what), values.shape, kind, strides=strides)

    before = images(x[:, :carried], "before") if carried else None
    rest, out = images(x[:, carried:], "x"), images(np.full(shape.out_shape, np.nan), "out")
    finite = np.abs(x[np.isfinite(x)]).max(initial=0)
    peaks = device.put(np.array([finite if np.isfinite(x).all() else np.inf, 0], np.float32), "peaks")
    footprint = TILED.footprint(shape, variant, 1)
    held = device.allocated
    resident = TILED.prepare(weights, variant, device)
    assert device.allocated - held <= footprint.resident
    scratch = {s.name: device.put(np.full(s.nbytes, 0xFF, np.uint8), s.name) for s in footprint.scratch}
    if "kernels" in scratch:  # that of a later stage may be the same memory
        shared = device.put(
            np.full(max(scratch[name].nbytes for name in ("kernels", "columns")), 0xFF, np.uint8), "shared"
        )
        scratch.update(kernels=shared, columns=shared)
    at = device.address(peaks)
    step = TILED.bind(resident, shape, variant, device)
    step.run(rest, out, scratch, before, x_peak=at, out_peak=at + 4)
    device.synchronize(device.uploads)  # what is copied beside the kernels is there as early as it may be
    return device.get(out), float(device.get(peaks)[1])


def rms_error(out: Any, x: Any, weights: ConvWeights, shape: ConvShape) -> float:
    """Return the error relative to the rms answer; NaN and untouched voxels fail."""
    assert np.isfinite(out).all(), f"{(~np.isfinite(out)).sum()} of {out.size} voxels not finite"
    exact = reference.convolve(x, weights.weight, weights.bias, shape.activation)
    if shape.pools:
        exact = reference.fragments(exact, shape.pool)
    return float(np.sqrt(np.mean((out.astype(np.float64) - exact) ** 2) / np.mean(exact**2)))


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_output_equals_the_definition(device: Any, shape: ConvShape, precision: Precision) -> None:
    shape = replace(shape, precision=precision)
    x, weights = random_input(shape), random_weights(shape)
    out, peak = run(device, shape, x, weights, tiled(shape))
    assert rms_error(out, x, weights, shape) <= ALLOWED[precision]
    assert abs(peak - np.abs(out.astype(np.float64)).max()) <= 1e-3 * peak  # before it was rounded


def of_tile(device: Any, tile: Vec3, precision: Precision) -> float:
    """Return the error of a layer a little larger than a tile."""
    z, y, x = tile
    shape = ConvShape(1, 2, 3, (z + 1, y + 2, x - 1), (3, 2, 4), "none", precision=precision)
    values, weights = random_input(shape), random_weights(shape)
    out, _ = run(device, shape, values, weights, tiled(shape, tile))
    return rms_error(out, values, weights, shape)


@pytest.mark.parametrize(
    ("tile", "precision"),
    [
        ((16, 24, 24), "fp32"),
        pytest.param((24, 32, 32), "tf32", marks=pytest.mark.long),
        pytest.param((32, 16, 16), "fp32", marks=pytest.mark.long),
    ],
    ids=str,
)
def test_tiles_equal_the_definition(device: Any, tile: Vec3, precision: Precision) -> None:
    assert of_tile(device, tile, precision) <= ALLOWED[precision]


@pytest.mark.gpu
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("z", SIDES_Z)
def test_all_tiles_equal_the_definition(cuda_device: Any, z: int, side: int, precision: Precision) -> None:
    assert of_tile(cuda_device, (z, side, side), precision) <= ALLOWED[precision]


@pytest.mark.parametrize("group", [1, 2, 5, 1000])
def test_tiles_in_groups_give_the_same(device: Any, group: int) -> None:
    shape = ConvShape(2, 2, 3, (11, 40, 20), (3, 4, 5), "relu")  # 2 slabs of 3 rows of 2 tiles in an image
    x, weights = random_input(shape), random_weights(shape)
    out, _ = run(device, shape, x, weights, tiled(shape, group=group))
    assert rms_error(out, x, weights, shape) <= ALLOWED["fp32"]


@pytest.mark.parametrize("gap", [0, 2])
@pytest.mark.parametrize("carried", [0, 1, 2, 9])
def test_carried_planes_and_strided_images_equal_the_definition(device: Any, carried: int, gap: int) -> None:
    shape = ConvShape(2, 3, 5, (13, 18, 7), (3, 4, 5), "relu", precision="tf32")
    x, weights = random_input(shape), random_weights(shape)
    out, _ = run(device, shape, x, weights, tiled(shape), carried, gap)
    assert rms_error(out, x, weights, shape) <= ALLOWED["tf32"]


@pytest.mark.parametrize("kind", INPUTS)
def test_fp32_is_as_accurate_for_odd_inputs(device: Any, kind: str) -> None:
    shape = replace(SHAPES[1], activation="none")
    x, weights = random_input(shape, kind), random_weights(shape)
    out, _ = run(device, shape, x, weights, tiled(shape))
    if kind != "hot":
        assert_close(out, x, weights, shape)
    assert rms_error(out, x, weights, shape) <= ALLOWED["fp32"]


@pytest.mark.parametrize("size", [1e-30, 1e-6, 1.0, 1e6, 1e30])
@pytest.mark.parametrize("kind", INPUTS)
def test_spectra_in_float16_neither_overflow_nor_vanish(device: Any, kind: str, size: float) -> None:
    shape = replace(SHAPES[1], activation="none", precision="tf32")
    x = random_input(shape, kind) * np.float32(size)
    weights = random_weights(shape)
    weights.bias[...] = 0
    out, _ = run(device, shape, x, weights, tiled(shape))
    assert rms_error(out / size, x / size, weights, shape) <= ALLOWED["tf32"]


@pytest.mark.parametrize("size", [1e-20, 1e-4, 1e4, 1e20])
@pytest.mark.parametrize("precision", ["fp32", "tf32"])
def test_kernels_of_any_size_equal_the_definition(device: Any, precision: Precision, size: float) -> None:
    shape = replace(SHAPES[1], activation="none", precision=precision)
    x, weights = random_input(shape), random_weights(shape)
    weights.bias[...] = 0
    exact = reference.convolve(x, weights.weight, weights.bias, shape.activation)
    weights.weight[...] *= np.float32(size)
    out, _ = run(device, shape, x, weights, tiled(shape))
    error = np.sqrt(np.mean((out / np.float64(np.float32(size)) - exact) ** 2) / np.mean(exact**2))
    assert error <= ALLOWED[precision]


def test_largest_possible_sums_do_not_overflow(device: Any) -> None:
    """Equal values and equal weights put everything into one frequency."""
    shape = ConvShape(1, 16, 8, (8, 16, 16), (3, 5, 5), "none", precision="tf32")
    x, weights = np.ones(shape.in_shape, np.float32), random_weights(shape)
    weights.weight[...] = 1
    out, peak = run(device, shape, x, weights, tiled(shape))
    assert rms_error(out, x, weights, shape) <= ALLOWED["tf32"]
    assert np.isfinite(peak)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_peak_reports_a_result_not_finite(device: Any, precision: Precision, value: float) -> None:
    shape = replace(SHAPES[1], activation="none", precision=precision)
    x, weights = random_input(shape), random_weights(shape)
    x[1, 4, 4, 4, 1] = value
    _, peak = run(device, shape, x, weights, tiled(shape))
    assert not np.isfinite(peak)


def test_zeros_give_the_bias(device: Any) -> None:
    shape = replace(SHAPES[1], activation="none", precision="tf32")
    weights = random_weights(shape)
    out, _ = run(device, shape, np.zeros(shape.in_shape, np.float32), weights, tiled(shape))
    assert np.array_equal(out, np.broadcast_to(weights.bias, shape.out_shape))


@pytest.mark.parametrize("precision", PRECISIONS)
def test_vanishing_kernels_give_the_bias(device: Any, precision: Precision) -> None:
    """The factor that would scale their spectra is beyond float32."""
    shape = replace(SHAPES[1], activation="none", precision=precision)
    weights = random_weights(shape)
    weights.weight[...] *= np.float32(1e-37)
    out, _ = run(device, shape, random_input(shape), weights, tiled(shape))
    assert np.array_equal(out, np.broadcast_to(weights.bias, shape.out_shape).astype(out.dtype))


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("shape", [SHAPES[1], SHAPES[4]], ids=str)
def test_streamed_kernels_give_the_same_output(device: Any, shape: ConvShape, precision: Precision) -> None:
    shape = replace(shape, precision=precision)
    x, weights = random_input(shape), random_weights(shape)
    out, _ = run(device, shape, x, weights, tiled(shape, group=3, kernels="streamed"))
    assert rms_error(out, x, weights, shape) <= ALLOWED[precision]
    kept, _ = run(device, shape, x, weights, tiled(shape, group=3))
    assert np.array_equal(out, kept)


@pytest.mark.gpu
@pytest.mark.parametrize("precision", PRECISIONS)
def test_many_streamed_kernels_give_the_same_output(cuda_device: Any, precision: Precision) -> None:
    shape = ConvShape(1, 80, 84, (60, 33, 37), (3, 4, 3), "relu", precision=precision)
    x, weights = random_input(shape), random_weights(shape)
    for tile in ((16, 16, 16), (32, 32, 32)):
        out, _ = run(cuda_device, shape, x, weights, tiled(shape, tile, 4, "streamed"))
        assert rms_error(out, x, weights, shape) <= ALLOWED[precision]
        kept, _ = run(cuda_device, shape, x, weights, tiled(shape, tile, 4))
        assert np.array_equal(out, kept)


@pytest.mark.parametrize("kernels", ["kept", "streamed"])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_footprint_covers_the_preparation(
    device: Any, monkeypatch: pytest.MonkeyPatch, precision: Precision, kernels: str
) -> None:
    """The preparation takes more than the layer does as it runs; no arena exists at the same time."""
    shape = ConvShape(1, 20, 18, (4, 5, 6), (3, 4, 5), "relu", precision=precision)
    variant = tiled(shape, kernels=kernels)
    footprint = TILED.footprint(shape, variant, 1)
    assert footprint.allowance > 0
    allocate, held, peak = device.allocate, device.allocated, 0

    def noted(nbytes: int, what: str) -> Any:
        nonlocal peak
        array = allocate(nbytes, what)
        peak = max(peak, device.allocated - held)
        return array

    monkeypatch.setattr(device, "allocate", noted)
    resident = TILED.prepare(random_weights(shape), variant, device)
    assert device.allocated - held <= footprint.resident
    assert resident is not None
    most = footprint.resident + footprint.working(shape)  # with the allowance
    assert most - 4 * shape.fout <= peak <= most, "biases come last, when all else was given back"


def test_streaming_spares_resident_memory_and_costs_an_upload() -> None:
    here = replace(MACHINE, gpu=LARGE)
    for shape, many in (
        (ConvShape(1, 8, 8, (60, 60, 60), (3, 3, 3)), False),
        (ConvShape(1, 80, 80, (94,) * 3, (5, 5, 5)), True),
    ):
        variants = TILED.variants(shape, here)
        assert any(v.text("kernels") == "kept" for v in variants)
        assert any(v.text("kernels") == "streamed" for v in variants) == many
    kept, streamed = (tiled(shape, (32, 32, 32), kernels=kernels) for kernels in ("kept", "streamed"))
    whole, spared = (TILED.footprint(shape, variant, 1) for variant in (kept, streamed))
    assert (whole.host, spared.resident, spared.host) == (0, 4 * 80, whole.resident - 4 * 80)
    assert spared.working(shape) < whole.working(shape) + whole.resident // 4
    *alike, upload = TILED.work(shape, streamed)
    assert alike == list(TILED.work(shape, kept))
    groups = len(Cover(shape, (32, 32, 32), 64).groups)
    assert (upload.unit, upload.nbytes) == ("gpu_upload", spared.host * groups)


POOLED = [
    ConvShape(1, 3, 5, (13, 24, 19), (3, 4, 5), "relu", (2, 2, 2)),  # odd maps, several tiles
    ConvShape(2, 6, 10, (9, 22, 18), (3, 2, 2), "tanh", (1, 2, 2)),  # two images, two blocks along y
    ConvShape(1, 2, 18, (10, 9, 11), (2, 3, 1), "sigmoid", (2, 1, 2)),  # more than one warp along the maps
    ConvShape(2, 1, 1, (17, 6, 6), (3, 4, 2), "none", (2, 2, 1)),
    ConvShape(1, 2, 3, (3, 3, 34), (2, 2, 2), "none", (1, 1, 2)),
    ConvShape(1, 2, 3, (3, 4, 4), (2, 2, 2), "none", (1, 2, 1)),
    ConvShape(1, 2, 3, (4, 3, 3), (2, 2, 2), "none", (2, 1, 1)),
]


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("shape", POOLED, ids=str)
def test_fused_pooling_gives_fragments(device: Any, shape: ConvShape, precision: Precision) -> None:
    shape = replace(shape, precision=precision)
    x, weights = random_input(shape), random_weights(shape)
    out, peak = run(device, shape, x, weights, tiled(shape))
    assert rms_error(out, x, weights, shape) <= ALLOWED[precision]
    assert abs(peak - np.abs(out.astype(np.float64)).max()) <= 1e-3 * peak


@pytest.mark.parametrize(("group", "gap"), [(1, 2), (3, 0), (5, 2)])
def test_fused_pooling_works_in_groups_with_carried_planes(device: Any, group: int, gap: int) -> None:
    shape = ConvShape(2, 2, 3, (11, 25, 18), (3, 15, 4), "relu", (2, 2, 2), precision="tf32")  # a tile has 2 rows
    x, weights = random_input(shape), random_weights(shape)
    out, _ = run(device, shape, x, weights, tiled(shape, group=group), carried=3, gap=gap)
    assert rms_error(out, x, weights, shape) <= ALLOWED["tf32"]


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_fused_maximum_keeps_nan(device: Any, value: float) -> None:
    shape = replace(POOLED[0], activation="none")
    x, weights = random_input(shape), random_weights(shape)
    x[0, 7, 8, 9, 1] = value
    out, peak = run(device, shape, x, weights, tiled(shape))
    assert not np.isfinite(peak)
    # All results of its tile are none: windows that begin in their last rows and columns go on into others that are.
    assert not np.isfinite(reference.recombine(out, [shape.pool])[0, 4:7, 4:13, 4:12]).any()


@pytest.mark.gpu
@pytest.mark.parametrize("pool", [(2, 2, 2), (1, 2, 2), (2, 1, 2), (2, 2, 1), (2, 1, 1), (1, 2, 1), (1, 1, 2)], ids=str)
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("z", SIDES_Z)
def test_all_tiles_pool_into_fragments(cuda_device: Any, z: int, precision: Precision, pool: Vec3) -> None:
    shape = ConvShape(2, 17, 26, (2 * z, 49, 78), (4, 3, 4), "relu", pool, precision=precision)
    x, weights = random_input(shape), random_weights(shape)
    for group in (3, 1000):
        out, _ = run(cuda_device, shape, x, weights, tiled(shape, (z, 24, 24), group), carried=3, gap=1)
        assert rms_error(out, x, weights, shape) <= ALLOWED[precision]


@pytest.mark.parametrize("group", [1, 2, 7, 10**6])
@pytest.mark.parametrize("k", [1, 3, 16])
def test_pooling_groups_hold_every_window_once(k: int, group: int) -> None:
    """Windows along y of all groups, one after the other; k = 16: a tile has one row of results."""
    for size in range(k + 2, k + 60, 2):
        shape = ConvShape(2, 3, 3, (9, size, 40), (3, k, 3), "none", (1, 2, 1))
        cover = Cover(shape, (8, 16, 16), group)
        windows: dict[int, list[int]] = {}
        for g in cover.groups:
            first, rows = cover.rows_out(g)
            assert 1 < rows <= g.rows * cover.step[1]
            for slab in range(g.first, g.first + g.slabs):
                windows.setdefault(slab, []).extend(range(first, first + rows - 1))
        assert windows == {slab: list(range(cover.windows[1])) for slab in range(2 * cover.grid[0])}


def test_pooling_windows_beyond_two_are_refused() -> None:
    here, shape = replace(MACHINE, gpu=LARGE), ConvShape(1, 3, 3, (49, 49, 49), (3, 3, 3), "relu", (2, 2, 3))
    assert TILED.why_not(shape, here) == "fuses pooling by 1 or 2 along each axis, not by 2x2x3"
    assert TILED.why_not(replace(shape, pool=(2, 2, 2)), here) is None
    tall = ConvShape(1, 3, 3, (64, 63, 63), (32, 3, 3), "relu")
    assert TILED.why_not(tall, here) is None
    assert "larger than the tiles" in str(TILED.why_not(replace(tall, pool=(2, 1, 1)), here))


@pytest.mark.parametrize("fin", [1, 80, 130])
@pytest.mark.parametrize("fout", [3, 80, 170])
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.gpu
def test_many_maps_equal_the_definition(cuda_device: Any, precision: Precision, fin: int, fout: int) -> None:
    shape = ConvShape(1, fin, fout, (30, 33, 37), (3, 4, 3), "relu", precision=precision)
    x, weights = random_input(shape), random_weights(shape)
    for tile in ((16, 16, 16), (24, 24, 24), (32, 32, 32), (8, 32, 32)):
        out, _ = run(cuda_device, shape, x, weights, tiled(shape, tile))
        assert rms_error(out, x, weights, shape) <= ALLOWED[precision]


@pytest.mark.parametrize("fout", [3, 24, 160])
@pytest.mark.gpu
def test_sums_of_many_maps_on_tensor_cores_stay_exact(cuda_device: Any, fout: int) -> None:
    """A single sum would leave 1.2e-6 of these; the emulator's sums are exact."""
    shape = ConvShape(1, 160, fout, (30, 33, 37), (3, 4, 3), "none")
    x, weights = np.maximum(random_input(shape), 0), random_weights(shape)
    weights.bias[...] = 0
    out, _ = run(cuda_device, shape, x, weights, tiled(shape, (16, 16, 16)))
    assert rms_error(out, x, weights, shape) <= 6e-7


def test_maps_beyond_a_step_of_the_product_equal_the_definition(device: Any) -> None:
    shape = ConvShape(1, 90, 42, (3, 4, 4), (2, 2, 2), "none", precision="tf32")
    x, weights = random_input(shape), random_weights(shape)
    out, _ = run(device, shape, x, weights, tiled(shape))
    assert rms_error(out, x, weights, shape) <= ALLOWED["tf32"]


@pytest.mark.parametrize("group", [1, 7, 64, 10**6])
@pytest.mark.parametrize("shape", [*SHAPES, ConvShape(8, 80, 80, (50, 61, 45), (3, 3, 3))], ids=str)
def test_groups_cover_every_tile_once(shape: ConvShape, group: int) -> None:
    cover = Cover(shape, (16, 16, 16), group)
    tiles = [
        (slab, row)
        for g in cover.groups
        for slab in range(g.first, g.first + g.slabs)
        for row in range(g.row, g.row + g.rows)
    ]
    z, y, x = cover.grid
    assert sorted(tiles) == [(slab, row) for slab in range(shape.batch * z) for row in range(y)]
    assert sum(g.tiles for g in cover.groups) == cover.tiles
    assert all(g.tiles <= max(group, x) for g in cover.groups)
    assert sum(cover.rows_out(g)[1] * g.slabs for g in cover.groups) == shape.batch * z * shape.unpooled[1]


@pytest.mark.parametrize("group", [1, 7, 64, 200, 10**6])
@pytest.mark.parametrize("pool", [(1, 1, 1), (2, 2, 2), (1, 3, 2)], ids=str)
@pytest.mark.parametrize("tile", [(16, 16, 16), (8, 32, 32)], ids=str)
def test_groups_are_counted_and_measured_without_being_made(tile: Vec3, pool: Vec3, group: int) -> None:
    cover = Cover(ConvShape(3, 20, 30, (49, 62, 45), (3, 4, 3), pool=pool), tile, group)
    assert cover.count == len(cover.groups)
    for spectra in ("half", "split"):
        sizes = zip(*(cover.bytes_of(g, spectra) for g in cover.groups), strict=True)
        assert cover.most_bytes(spectra) == tuple(map(max, sizes))


@pytest.mark.parametrize("tile", [(8, 16, 16), (16, 24, 24), (32, 32, 32)], ids=str)
def test_frequencies_hold_a_real_spectrum(tile: Vec3) -> None:
    assert prod(tile) // 2 < frequencies(tile) <= prod(tile) // 2 + 2 * tile[1] + tile[1] * tile[2] // 8


def test_small_cards_have_smaller_blocks() -> None:
    shape = ConvShape(1, 80, 80, (50, 50, 50), (9, 9, 9))
    for precision in PRECISIONS:
        there = replace(shape, precision=precision)
        on_small = TILED.variants(there, replace(MACHINE, gpu=SMALL))
        assert {v.size("tile") for v in on_small} == {
            v.size("tile") for v in TILED.variants(there, replace(MACHINE, gpu=LARGE))
        }
    for side in SIDES:
        for spectra in ("half", "split"):
            block = plane_block(side, "half" if spectra == "half" else "split", 80, SMALL.shared_block_bytes)
            assert block is not None
            assert block.shared_bytes <= SMALL.shared_block_bytes


def test_unsupported_shape_gets_a_reason() -> None:
    here, shape = replace(MACHINE, gpu=LARGE), ConvShape(1, 3, 3, (50, 50, 50), (3, 3, 3))
    assert TILED.why_not(shape, here) is None
    assert TILED.why_not(shape, MACHINE) == "needs a CUDA device"
    old = replace(here, gpu=replace(LARGE, capability=(7, 5)))
    assert TILED.why_not(shape, old) == "needs tensor cores of sm_80 or newer, not sm_75"
    assert "tiles" in str(TILED.why_not(replace(shape, k=(3, 3, 40)), here))
    assert (
        TILED.why_not(replace(shape, k=(1, 1, 1)), here) == "a 1x1x1 kernel is one matrix product: see gpu.conv.direct"
    )
    assert "softmax" in str(TILED.why_not(replace(shape, activation="softmax"), here))
    assert TILED.why_not(PoolShape(1, 3, (3, 3, 3), (2, 2, 2)), here) == "computes convolutions, not pool"
    assert TILED.why_not(FilterShape(1, 3, (3, 3, 3), (2, 2, 2)), here) == "computes convolutions, not maxfilter"
