"""GPU poolings, fragments, max-filters and maxouts: a maximum does not round, so they equal the definition exactly."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from tests.support.closeness import MACHINE, random_input
from znnpy.kernels import reference
from znnpy.kernels.contract import Variant
from znnpy.kernels.gpu.pool import MaxFilter, MaxoutDirect, PoolFragments, PoolMax
from znnpy.machine import Gpu
from znnpy.shapes import ConvShape, FilterShape, MaxoutShape, PoolShape

if TYPE_CHECKING:
    from znnpy.kernels.contract import Primitive
    from znnpy.layer_shapes import LayerShape

GPU = Gpu("some card", (9, 0), 132, 2**36, 2**25, 2**17, 2**17, 4e12, 13000, ())
WITH_GPU = replace(MACHINE, gpu=GPU)
TABLE: tuple[Primitive, ...] = (PoolMax(), PoolFragments(), MaxFilter(), MaxoutDirect())
SHAPES: list[LayerShape] = [
    PoolShape(1, 1, (1, 1, 1), (1, 1, 1)),
    PoolShape(2, 5, (7, 9, 11), (2, 2, 2)),
    PoolShape(1, 8, (9, 5, 37), (2, 2, 2)),  # several blocks of a line
    PoolShape(1, 3, (5, 14, 5), (3, 5, 2)),  # no two axes alike
    PoolShape(3, 6, (7, 7, 5), (1, 2, 3)),
    PoolShape(2, 1, (41, 6, 4), (2, 1, 1)),  # z is cut
    PoolShape(1, 2, (13, 6, 6), (7, 1, 1)),  # wider than any window that has a kernel of its own
    PoolShape(1, 16, (3, 3, 3), (2, 2, 2)),  # one voxel a fragment
    PoolShape(2, 5, (8, 9, 10), (2, 3, 5), fragments=False),
    PoolShape(1, 4, (6, 6, 8), (3, 2, 1), fragments=False),
    PoolShape(1, 3, (4, 5, 6), (4, 5, 6), fragments=False),  # one voxel
    FilterShape(2, 3, (6, 7, 8), (2, 3, 4)),
    FilterShape(1, 12, (7, 9, 8), (2, 2, 1)),
    FilterShape(1, 1, (4, 5, 6), (4, 5, 6)),
    FilterShape(3, 2, (1, 9, 4), (1, 1, 1)),
    MaxoutShape(2, 12, (3, 4, 5), 3),
    MaxoutShape(1, 4, (2, 1, 3), 4),
    MaxoutShape(1, 3, (2, 1, 3), 1),
]
PRECISIONS = ["fp32", "fp16"]


def primitive_for(shape: LayerShape) -> Primitive:
    (found,) = [p for p in TABLE if p.why_not(shape, WITH_GPU) is None]
    return found


def exact(shape: LayerShape, x: Any) -> Any:
    match shape:
        case PoolShape(p=p, fragments=True):
            return reference.fragments(x, p)
        case PoolShape(p=p):
            return reference.max_pool(x, p)
        case FilterShape(p=p):
            return reference.max_filter(x, p)
        case MaxoutShape(of=of):
            return reference.maxout(x, of)
    raise AssertionError(shape)


def halved(shape: LayerShape, precision: str) -> tuple[LayerShape, Any]:
    """Return the shape in a precision, and an input in its stored type."""
    shape = replace(shape, precision=precision)  # type: ignore[arg-type]
    return shape, random_input(shape).astype(np.float16 if precision == "fp16" else np.float32)


def run(device: Any, shape: LayerShape, x: Any, out: Any, before: Any = None) -> None:
    step = primitive_for(shape).bind(None, shape, Variant(), device)
    step.run(x, out, {}, before)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_output_equals_the_definition(device: Any, shape: LayerShape, precision: str) -> None:
    shape, x = halved(shape, precision)
    on_device = device.put(x, "x")
    out = device.put(np.full(shape.out_shape, np.nan, x.dtype), "out")
    run(device, shape, on_device, out)
    np.testing.assert_array_equal(device.get(out), exact(shape, x))
    np.testing.assert_array_equal(device.get(on_device), x, err_msg="the input was modified")


@pytest.mark.parametrize("offset", [1, 2, 4, 16])
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("shape", [s for s in SHAPES if s.in_shape[0] > 1], ids=str)
def test_images_may_lie_anywhere(device: Any, shape: LayerShape, precision: str, offset: int) -> None:
    shape, x = halved(shape, precision)
    poison = np.array(np.nan, x.dtype)

    def apart(sizes: tuple[int, ...], values: Any) -> tuple[Any, Any]:
        """Make a buffer of NaN with images in it, `offset` values from its start and between each other."""
        step = int(np.prod(sizes[1:])) + offset
        host = np.full(offset + sizes[0] * step, poison)
        host[offset:].reshape(sizes[0], step)[:, : step - offset] = values
        store = device.put(host, "images")
        inner = tuple(np.empty(sizes[1:], x.dtype).strides)
        return store, device.view(
            store, sizes, x.dtype, offset=offset * x.itemsize, strides=(step * x.itemsize, *inner)
        )

    _, images = apart(shape.in_shape, x.reshape(len(x), -1))
    store, out = apart(shape.out_shape, poison)
    run(device, shape, images, out)
    np.testing.assert_array_equal(device.get(out), exact(shape, x))
    assert np.isnan(device.get(store)).sum() == offset * (1 + shape.out_shape[0]), "wrote between the images"


@pytest.mark.parametrize("carried", [1, 2, 6])
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("shape", [s for s in SHAPES if s.kind != "maxout" and s.in_shape[1] > 6], ids=str)
def test_the_first_planes_may_be_carried(device: Any, shape: LayerShape, precision: str, carried: int) -> None:
    shape, x = halved(shape, precision)
    out = device.put(np.full(shape.out_shape, np.nan, x.dtype), "out")
    before = device.put(np.ascontiguousarray(x[:, :carried]), "before")
    run(device, shape, device.put(np.ascontiguousarray(x[:, carried:]), "x"), out, before)
    np.testing.assert_array_equal(device.get(out), exact(shape, x))
    assert primitive_for(shape).footprint(shape, Variant(), 1).reads_carried


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("maps", [1, 4])
def test_nan_stays_nan(device: Any, maps: int, precision: str) -> None:
    shape, x = halved(PoolShape(1, maps, (5, 5, 5), (2, 2, 2)), precision)
    x[0, 2, 3, 1, -1] = np.nan
    x[0, 4, 4, 4, 0] = np.inf
    out = device.put(np.zeros(shape.out_shape, x.dtype), "out")
    run(device, shape, device.put(x, "x"), out)
    np.testing.assert_array_equal(device.get(out), reference.fragments(x, (2, 2, 2)))
    assert np.isnan(device.get(out)).sum() == 8


def test_unsupported_shape_gets_a_reason() -> None:
    pool, fragments, maxfilter, maxout = TABLE[0], TABLE[1], TABLE[2], TABLE[3]
    conv = ConvShape(1, 1, 1, (3, 3, 3), (1, 1, 1))
    dense, strided = PoolShape(1, 1, (3, 3, 3), (2, 2, 2)), PoolShape(1, 1, (2, 2, 2), (2, 2, 2), fragments=False)
    assert fragments.why_not(dense, MACHINE) == "needs a CUDA device"
    assert fragments.why_not(strided, WITH_GPU) == "plain pooling has no fragments: see gpu.pool.max"
    assert pool.why_not(dense, WITH_GPU) == "dense output needs every offset: see gpu.pool.fragments"
    assert maxfilter.why_not(conv, WITH_GPU) == "computes max-filters, not conv"
    assert maxout.why_not(dense, WITH_GPU) == "computes maxouts, not pool"
    assert {p.why_not(conv, MACHINE) for p in TABLE} == {"needs a CUDA device"}


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_work_counts_input_and_output_once(shape: LayerShape) -> None:
    primitive = primitive_for(shape)
    footprint = primitive.footprint(shape, Variant(), 1)
    assert footprint.working(shape) == shape.in_bytes + shape.out_bytes
    (work,) = primitive.work(shape, Variant())
    assert (work.unit, work.flops, work.nbytes) == ("gpu_stream", 0.0, shape.in_bytes + shape.out_bytes)
