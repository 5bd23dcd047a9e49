"""Run the primitives of graphs' layers on a GPU, from poisoned memory and with inputs among NaN."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from tests.support.closeness import MACHINE
from tests.support.graph_cases import inputs_for, weights_for
from znnpy.kernels import definition
from znnpy.machine import Gpu
from znnpy.shapes import GPU_PRECISIONS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from znnpy.graph_shapes import GraphShape
    from znnpy.kernels.contract import Primitive, Variant
    from znnpy.network import ConvWeights
    from znnpy.shapes import Precision

VERSIONS = (("cudnn-frontend", "1.28.0"),)
GPU = Gpu("some card", (9, 0), 132, 2**36, 2**25, 2**17, 2**17, 4e12, 13000, VERSIONS)
WITH_GPU = replace(MACHINE, gpu=GPU)


def stored(shape: Any, array: Any) -> Any:
    """Return values in the type in which a layer has them."""
    return array.astype(np.float16 if shape.precision == "fp16" else np.float32)


def rounded_inputs(shape: GraphShape) -> list[Any]:
    return [stored(shape, x) for x in inputs_for(shape)]


def among_nan(device: Any, x: Any) -> Any:
    """Copy an input to a place with NaN around it and between its voxels, at no particular address."""
    z, y, x_, f = x.shape
    larger = np.full((z + 1, y + 2, 2 * x_ + 3, f + 1), np.nan, x.dtype)
    part = larger[1:, 1 : 1 + y, 1 : 1 + 2 * x_ : 2, 1:]
    part[...] = x
    offset = part.__array_interface__["data"][0] - larger.__array_interface__["data"][0]
    return device.view(device.put(larger, "a larger input"), x.shape, x.dtype, offset=offset, strides=part.strides)


def side_by_side(device: Any, x: Any) -> Any:
    """Copy an input to a place with 8 maps of NaN behind those of each voxel, so that reads may be wide."""
    larger = np.full((*x.shape[:3], -(-x.shape[3] // 8) * 8 + 8), np.nan, x.dtype)
    larger[..., : x.shape[3]] = x
    return device.view(device.put(larger, "a larger input"), x.shape, x.dtype, strides=larger.strides)


def run(
    device: Any,
    primitive: Primitive,
    shape: Any,
    inputs: Sequence[Any],
    variant: Variant | None = None,
    weights: ConvWeights | None = None,
    place: Any = None,
    offset: int = 0,
) -> tuple[Any, float]:
    """Return the output, and its peak where the primitive raises it, else 0; fail if anything around is written.

    place   where inputs go; None: they are in C order
    offset  values before the output in its memory
    """
    assert primitive.why_not(shape, WITH_GPU) is None
    variant = variant or primitive.variants(shape, WITH_GPU)[0]
    footprint = primitive.footprint(shape, variant, 1)
    before = device.allocated if hasattr(device, "allocated") else 0
    resident = primitive.prepare(weights_for(shape) if weights is None else weights, variant, device)
    if hasattr(device, "allocated"):
        assert device.allocated - before <= footprint.resident
    on_device = [device.put(x, "x") if place is None else place(device, x) for x in inputs]
    host = np.full(int(np.prod(shape.out_shape)) + 2 * offset, np.nan, inputs[0].dtype)
    store = device.put(host, "out")
    out = device.view(store, shape.out_shape[1:], host.dtype, offset=offset * host.itemsize)
    scratch = {}
    for each in footprint.scratch:
        scratch[each.name] = device.put(np.full(each.nbytes, 0xFF, np.uint8), each.name)
    peak = device.put(np.zeros(1, np.float32), "peak")
    asked = {"out_peak": device.address(peak)} if footprint.raises_peak else {}
    step = primitive.bind(resident, shape, variant, device)
    step.run(on_device, out, scratch, **asked)
    found = device.get(store)
    assert np.isnan(found[:offset]).all(), "wrote before the output"
    assert np.isnan(found[len(found) - offset :]).all() or not offset, "wrote behind the output"
    for given, x in zip(on_device, inputs, strict=True):
        np.testing.assert_array_equal(device.get(given), x, err_msg="an input was modified")
    return found[offset : len(found) - offset].reshape(shape.out_shape[1:]), float(device.get(peak)[0])


def in_precision(shape: Any, precision: Precision) -> Any:
    return replace(shape, precision=precision)


def assert_near(out: Any, exact: Any, shape: Any) -> None:
    """Compare with the definition of inputs as they are stored."""
    share = 5e-3 if shape.precision == "fp16" else 1e-5
    np.testing.assert_allclose(out, exact, rtol=0, atol=share * max(1e-30, float(np.abs(exact).max())))


def cases(shapes: Sequence[Any], usual: Sequence[tuple[Any, Any, str]]) -> list[Any]:
    """Return every shape in one precision in order, and in one place; others follow with the next shapes.

    `usual` cases are among them, and only these are not marked `long`.
    """
    plain: list[tuple[Any, Precision]] = [(None, precision) for precision in GPU_PRECISIONS]
    placed: list[tuple[Any, Precision]] = [(among_nan, "fp32"), (side_by_side, "fp32"), (side_by_side, "fp16")]
    chosen = [(shape, *way) for number, shape in enumerate(shapes) for way in (plain[number % 3], placed[number % 3])]
    found = []
    for shape, place, precision in dict.fromkeys((*chosen, *usual)):
        marks = () if (shape, place, precision) in usual else pytest.mark.long
        name = f"{shape} {precision} {'in order' if place is None else place.__name__}"
        found.append(pytest.param(shape, place, precision, id=name, marks=marks))
    return found


def check(device: Any, primitive: Primitive, shape: Any, place: Any, variant: Variant | None = None) -> None:
    """Run one case, and compare output and peak with the definition."""
    inputs = rounded_inputs(shape)
    exact = definition.layer(shape, weights_for(shape), inputs)
    offset = 1 if place is among_nan else 0
    out, peak = run(device, primitive, shape, inputs, variant, place=place, offset=offset)
    variant = variant or primitive.variants(shape, WITH_GPU)[0]
    if primitive.footprint(shape, variant, 1).raises_peak:
        assert_near(out, exact, shape)
        assert abs(peak - np.abs(exact).max()) <= 1e-5 * np.abs(exact).max()
    else:
        np.testing.assert_array_equal(out, exact)
