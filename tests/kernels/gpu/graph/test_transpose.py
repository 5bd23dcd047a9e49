"""gpu.conv_transpose.direct against the float64 definition."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.closeness import MACHINE
from tests.support.graph_cases import CONVS, TRANSPOSES, with_parameters
from tests.support.graph_on_gpu import WITH_GPU, among_nan, cases, check, in_precision
from znnpy.graph_shapes import TransposeShape
from znnpy.kernels.contract import Variant
from znnpy.kernels.gpu.graph.products import TILES
from znnpy.kernels.gpu.graph.transpose import TransposeDirect, takes_columns

DIRECT = TransposeDirect()
MORE = [
    TransposeShape(9, 70, (2, 1, 3), (4, 2, 5), (2, 2, 2), (0, 0, 1), (2, 2, 2), activation="softmax"),
    TransposeShape(4, 8, (2, 3, 3), (5, 8, 7), (5, 4, 3), (1, -1, 0), (2, 3, 4), (3, 2, 1), groups=2),
    TransposeShape(8, 24, (2, 3, 4), (3, 4, 7), (2, 2, 2), (0, 1, 0), (2, 2, 2), activation="elu"),
]
EACH: list[Any] = [with_parameters(shape) for shape in (*TRANSPOSES, *MORE)]
USUAL = [(EACH[-1], None, "fp32"), (MORE[1], None, "fp16")]


@pytest.mark.parametrize(("shape", "place", "precision"), cases(EACH, USUAL))
def test_output_equals_the_definition(device: Any, shape: Any, place: Any, precision: Any) -> None:
    check(device, DIRECT, in_precision(shape, precision), place)


@pytest.mark.long
@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize("kernel", ["phases", "columns"])
def test_every_tile_takes_every_shape(device: Any, kernel: str, tile: str) -> None:
    for shape in (EACH[1], MORE[2]):
        assert takes_columns(shape)
        check(device, DIRECT, in_precision(shape, "fp16"), among_nan, Variant.of(kernel=kernel, tile=tile))


def test_kernels_as_large_as_the_stride_are_one_product() -> None:
    shape = TransposeShape(64, 32, (32, 32, 32), (64, 64, 64), (2, 2, 2), (0, 0, 0), (2, 2, 2))
    assert [str(v) for v in DIRECT.variants(shape, WITH_GPU)] == ["kernel=columns tile=64", "kernel=columns tile=32"]
    (work,) = DIRECT.work(shape, Variant.of(kernel="columns", tile="64"))
    assert (work.unit, work.flops) == ("gpu_direct", 2 * 32**3 * 256 * 64)
    footprint = DIRECT.footprint(shape, Variant.of(kernel="columns", tile="64"), 1)
    assert (footprint.resident, footprint.raises_peak) == (4 * 256 * 65, True)
    assert {str(v) for v in DIRECT.variants(EACH[2], WITH_GPU)} == {"kernel=phases tile=4"}


def test_unsupported_shape_gets_a_reason() -> None:
    assert DIRECT.why_not(EACH[0], MACHINE) == "needs a CUDA device"
    assert DIRECT.why_not(CONVS[0], WITH_GPU) == f"computes transposed convolutions, not {CONVS[0]}"
    assert DIRECT.why_not(EACH[0], WITH_GPU) is None
