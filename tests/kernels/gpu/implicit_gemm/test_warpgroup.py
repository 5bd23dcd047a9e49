"""units=warpgroup of gpu.conv.implicit_gemm: paths of its kernel, its plans, and what tensor cores cut off."""

from __future__ import annotations

from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.closeness import MACHINE, error_of, random_input, random_weights, run_on
from tests.support.emulator import EmulatedDevice
from znnpy.errors import DeviceError
from znnpy.kernels import reference
from znnpy.kernels.contract import ConvWeights, Variant
from znnpy.kernels.gpu.implicit_gemm import tensor, warpgroup
from znnpy.kernels.gpu.implicit_gemm.lowering import Lowering
from znnpy.kernels.gpu.implicit_gemm.primitive import ConvImplicitGemm
from znnpy.machine import Gpu
from znnpy.shapes import ConvShape, Precision, Sliding, Vec3

GEMM = ConvImplicitGemm()
GPU = Gpu("some card", (9, 0), 132, 2**36, 2**25, 227 * 1024, 228 * 1024, 4e12, 13000, ())
ALLOWED: dict[Precision, float] = {"fp32": 1e-6, "tf32": 1e-3, "fp16": 2e-3}
PRECISIONS: tuple[Precision, ...] = ("fp32", "tf32", "fp16")


def problem_of(fin: int, fout: int, n: Vec3, k: Vec3, precision: Precision) -> Lowering:
    return Lowering.of(ConvShape(1, fin, fout, n, k, "relu", precision=precision))


# images, maps in and out, n, k; bytes of shared memory, taps at once; planes of k at once, stages
CUTS = [
    ((2, 8, 6, (4, 9, 12), (3, 4, 5)), 113 * 1024, 16, (3, 1)),
    ((1, 20, 6, (9, 9, 12), (7, 3, 3)), 40 * 1024, 5, (1, 14)),  # a plane of k at once
    ((2, 1, 6, (11, 9, 20), (9, 3, 9)), 28 * 1024, 3, (1, 9)),  # folded
    ((2, 3, 6, (4, 9, 20), (2, 3, 5)), 113 * 1024, 16, (2, 3)),  # folded, a map after the other
    ((3, 17, 20, (2, 20, 21), (1, 2, 2)), 113 * 1024, 3, (1, 1)),  # planes of all images in a row
    ((1, 40, 33, (4, 20, 9), (2, 2, 3)), 56 * 1024, 4, None),
]


@pytest.mark.parametrize("carried", [0, 1])
@pytest.mark.parametrize(("sizes", "shared", "most", "cut"), CUTS)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_every_division_of_a_layer_equals_the_definition(
    device: Any,
    monkeypatch: pytest.MonkeyPatch,
    precision: Precision,
    sizes: tuple[int, int, int, Vec3, Vec3],
    shared: int,
    most: int,
    cut: tuple[int, int] | None,
    carried: int,
) -> None:
    """Divisions by two blocks, tile after tile, and groups of few taps are tried."""
    monkeypatch.setattr(device, "gpu", replace(device.gpu, multiprocessors=1))
    monkeypatch.setattr(warpgroup, "MOST_GROUP", dict.fromkeys(PRECISIONS, most))
    monkeypatch.setattr(warpgroup, "shared_of", lambda _: shared)
    monkeypatch.setattr(warpgroup, "plan_of", warpgroup.plan_of.__wrapped__)
    monkeypatch.setattr(warpgroup, "_cuts", warpgroup._cuts.__wrapped__)
    shape = ConvShape(*sizes, "relu", precision=precision)
    plan = warpgroup.plan_of(Lowering.of(shape), shape.batch, shared)
    assert plan is not None
    assert cut in (None, (plan.depth, plan.stages))
    assert plan.group <= most
    x, weights = random_input(shape), random_weights(shape)
    if precision == "fp16":
        x = x.astype(np.float16).astype(np.float32)
    out, peak = run(device, shape, x, weights, carried)
    assert error_of(out, x, weights, shape) <= ALLOWED[precision]
    assert peak == pytest.approx(np.abs(out).max(), rel=1e-3 if precision == "fp16" else 0)


@pytest.mark.parametrize("staged", [1, 2, 4])
@pytest.mark.parametrize("fout", [16, 21, 32, 136])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_every_way_of_storing_results_equals_the_definition(
    device: Any, monkeypatch: pytest.MonkeyPatch, precision: Precision, fout: int, staged: int
) -> None:
    """Rows of voxels at once, a voxel at a time with gaps between or in slices, value by value; many tiles a block.

    Where values come from is remembered from stage to stage, and the last stage has half as many maps.
    """
    n = (4, 10, 22) if fout == 136 else (6, 19, 22)
    shape = ConvShape(2, 24, fout, n, (2, 2, 2), "relu", precision=precision)
    plan = warpgroup.plan_of.__wrapped__(Lowering.of(shape), 2, warpgroup.SHARED)
    assert plan is not None
    staged = min(staged, 2 * warpgroup.matrices_of(plan.maps, precision) // warpgroup.WARPGROUPS)
    plan = plan._replace(staged=staged)
    monkeypatch.setattr(warpgroup, "plan_of", lambda *_: plan)
    monkeypatch.setattr(device, "gpu", replace(device.gpu, multiprocessors=1))
    slices = -(-fout // plan.maps)
    blocks = warpgroup.RESIDENT // slices
    assert plan.remembers
    assert slices == (2 if fout == 136 else 1)
    assert prod(warpgroup.tiles_of(Lowering.of(shape), 2, plan.tile)) > (warpgroup.TILES + 1) * blocks
    x, weights = random_input(shape), random_weights(shape)
    if precision == "fp16":
        x = x.astype(np.float16).astype(np.float32)
    out, peak = run(device, shape, x, weights)
    assert error_of(out, x, weights, shape) <= ALLOWED[precision]
    assert peak == pytest.approx(np.abs(out).max(), rel=1e-3 if precision == "fp16" else 0)


@pytest.mark.parametrize("precision", ["fp32", "tf32"])
def test_only_overflowing_values_become_infinite(device: Any, precision: Precision) -> None:
    """The factor that scales the sums back, 2^139, is beyond float32."""
    shape = ConvShape(1, 5, 6, (3, 7, 9), (2, 2, 2), "none", precision=precision)
    x, weights = np.zeros(shape.in_shape, np.float32), random_weights(shape)
    x[0, 1, 3, 4, 2] = 1e30
    weights.weight[...] = np.abs(weights.weight) * np.float32(1e20)
    out, peak = run(device, shape, x, weights)
    with np.errstate(over="ignore"):
        exact = reference.convolve(x, weights.weight, weights.bias, "none").astype(np.float32)
    assert np.isinf(exact).any()
    np.testing.assert_array_equal(out, exact)
    assert peak == np.inf


def run(device: Any, shape: ConvShape, x: Any, weights: ConvWeights, carried: int = 0) -> tuple[Any, float]:
    variant = Variant.of(units="warpgroup", precision=shape.precision)
    return run_on(device, GEMM, shape, x, weights, variant, carried=carried, gap=8)


@pytest.mark.parametrize("padding", [(0, 0, 0), (1, 1, 1), (0, 2, 1), (2, 0, 3)])
@pytest.mark.parametrize(("fin", "n", "k"), [(3, (3, 9, 9), (1, 3, 3)), (16, (2, 2, 9), (3, 2, 3))])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_padding_equals_the_definition(
    device: Any, precision: Precision, fin: int, n: Vec3, k: Vec3, padding: Vec3
) -> None:
    if any(a + 2 * p < b for a, p, b in zip(n, padding, k, strict=True)):
        padding = (1, *padding[1:])
    problem = Lowering(fin, 5, n, k, "relu", precision, Sliding(padding=padding))
    rng = np.random.default_rng(7)
    x = rng.standard_normal((2, *n, fin), np.float32).astype(problem.dtype)
    weights = ConvWeights(rng.standard_normal((5, fin, *k), np.float32), rng.standard_normal(5, np.float32))
    out = device.put(np.full((2, *problem.out, 5), np.nan, problem.dtype), "out")
    product = warpgroup.WarpgroupProduct(warpgroup.prepare(weights, precision, device), problem, 2, device)
    peak = device.put(np.abs(x).max(keepdims=True).astype(np.float32), "peak")
    product.run(device.put(x, "x"), out, None, device.address(peak), 0)
    pads = [(0, 0), *((pad, pad) for pad in padding), (0, 0)]
    padded = np.pad(x, pads)
    shape = ConvShape(2, fin, 5, padded.shape[1:4], k, "relu")
    assert error_of(device.get(out), padded, weights, shape) <= ALLOWED[precision]


@pytest.mark.parametrize("fout", [3, 16, 40, 80])
@pytest.mark.parametrize(("fin", "k"), [(80, (4, 4, 4)), (1, (5, 5, 5)), (80, (2, 2, 2))])
def test_sums_of_positive_products_are_exact_in_fp32(device: Any, fin: int, k: Vec3, fout: int) -> None:
    """Truncation of tensor cores would add up; the emulator does not truncate."""
    shape = ConvShape(1, fin, fout, (k[0] + 1, k[1] + 1, k[2] + 9), k, "none", precision="fp32")
    x, weights = np.abs(random_input(shape)), random_weights(shape)
    weights.weight[...] = np.abs(weights.weight)
    out, _ = run(device, shape, x, weights)
    assert error_of(out, x, weights, shape) <= 1e-6


@pytest.mark.parametrize("k", [(1, 1, 1), (1, 3, 3), (2, 2, 2), (3, 3, 3), (5, 5, 5), (7, 7, 7), (9, 9, 9)], ids=str)
@pytest.mark.parametrize("fout", [16, 80, 128])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_tiling_fits_two_blocks_in_a_multiprocessor(precision: Precision, fout: int, k: Vec3) -> None:
    """It holds for any number of input maps, and tiles cover the output."""
    for fin in (*range(1, 20), 80, 100, 128, 200, 300):
        problem = problem_of(fin, fout, (40 + k[0], 50, 61), k, precision)
        plan = warpgroup.plan_of(problem, 1, warpgroup.SHARED)
        assert plan is not None, fin
        assert plan.shared_bytes(precision) <= warpgroup.SHARED
        assert 1 <= plan.group <= warpgroup.MOST_GROUP[precision]
        voxels = warpgroup.MATRIX * warpgroup.matrices_of(plan.maps, precision)
        assert prod(plan.tile) == voxels
        assert prod(warpgroup.tiles_of(problem, 1, plan.tile)) * voxels >= prod(problem.out)


@pytest.mark.parametrize(
    ("fin", "k", "wanted"), [(1, (3, 3, 3), (3, 2, 1)), (4, (1, 1, 1), (1, 1, 1)), (3, (2, 5, 9), (2, 3, 2))]
)
def test_few_maps_are_folded_if_that_saves_work(fin: int, k: Vec3, wanted: Vec3) -> None:
    matrix = warpgroup.Matrix.of(fin, k)
    assert matrix.k == wanted
    assert matrix.folded == (wanted != k)


def test_gpus_without_warpgroup_instructions_are_refused() -> None:
    shape = ConvShape(1, 8, 8, (9, 9, 9), (3, 3, 3), "relu")
    units = [v.text("units") for v in GEMM.variants(shape, replace(MACHINE, gpu=GPU))]
    assert units == ["warpgroup", "tensor", "float"]
    for capability in ((8, 0), (8, 9), (10, 0), (12, 0)):
        gpu = replace(GPU, capability=capability)
        assert [v.text("units") for v in GEMM.variants(shape, replace(MACHINE, gpu=gpu))] == ["tensor", "float"]
    assert not warpgroup.applies(replace(Lowering.of(shape), sliding=Sliding((1, 2, 1))), GPU)
    assert not warpgroup.applies(replace(Lowering.of(shape), activation="softmax"), GPU)


def test_work_counts_empty_parts_of_tiles() -> None:
    """17 lines of output need tiles that are nearly empty."""
    shape = ConvShape(1, 80, 80, (17, 17, 17), (2, 2, 2), "relu", precision="tf32")
    (whole,) = GEMM.work(shape, Variant.of(units="warpgroup", precision="tf32"))
    (more,) = GEMM.work(replace(shape, n=(17, 18, 17)), Variant.of(units="warpgroup", precision="tf32"))
    assert whole.unit == "gpu_wgmma_half"
    assert more.flops > 17 / 16 * whole.flops
    (tensors,) = GEMM.work(shape, Variant.of(units="tensor", precision="tf32"))
    assert tensors.flops == tensor.flops_of(Lowering.of(shape), 1, tensor.LARGE)


BULK = str(Path(__file__).parent / "bulk.cu")


def bulk_copied(device: Any, fault: str, rounds: int) -> Any:
    """Copy (rounds, 128) numbers in and out by a kernel that adds 1; return them and their old values."""
    values = np.random.default_rng(11).integers(0, 1000, (rounds, 128)).astype(np.float32)
    out = device.put(np.full_like(values, np.nan), "a result")
    name = f"bulk_copies<{fault}>"
    device.kernels(BULK, [name])[name]((1,), (128,), device.put(values, "values"), out, rounds)
    return device.get(out), values


@pytest.mark.parametrize("rounds", [1, 2, 3, 8])
def test_bulk_copies_arrive_and_leave(device: Any, rounds: int) -> None:
    """Both barriers of arrival go through both parities."""
    out, values = bulk_copied(device, "NO_FAULT", rounds)
    assert np.array_equal(out, values + 1)


@pytest.mark.parametrize("fault", ["NOBODY_WAITS", "COMES_EARLY", "OVERWRITES", "COMMITS_LATE"])
def test_bulk_copy_without_a_wait_changes_the_answer(fault: str) -> None:
    with EmulatedDevice() as device:
        out, values = bulk_copied(device, fault, 3)
    assert not np.array_equal(out, values + 1)


@pytest.mark.parametrize(
    ("fault", "told"), [("WRONG_PHASE", "nothing is on its way"), ("ODD_BYTES", "multiples of 16")]
)
def test_invalid_bulk_copy_is_reported(fault: str, told: str) -> None:
    with EmulatedDevice() as device, pytest.raises(DeviceError, match=told):
        bulk_copied(device, fault, 3)
