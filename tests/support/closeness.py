"""How a primitive is run and judged: poisoned buffers, float64 definitions, a plain float32 twin for the tolerance."""

from __future__ import annotations

import hashlib
import tracemalloc
from collections import OrderedDict
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from znnpy.kernels import reference
from znnpy.kernels.aligned import aligned_bytes
from znnpy.kernels.contract import ConvWeights
from znnpy.kernels.thread_pool import ThreadPool
from znnpy.machine import this_machine

if TYPE_CHECKING:
    from collections.abc import Callable

    from znnpy.kernels.contract import Array, Bytes, Footprint, Primitive, Variant
    from znnpy.layer_shapes import LayerShape
    from znnpy.shapes import Activation, ConvShape, Vec3

MACHINE = this_machine()
GUARD = 4096  # bytes on either side of a scratch buffer that nobody may write
INPUTS = ("normal", "relu", "shifted", "hot")
KEPT_BYTES = 2**26  # of answers
_KEPT: OrderedDict[bytes, npt.NDArray[Any]] = OrderedDict()  # by what was asked; the latest asked for comes last


@dataclass(frozen=True)
class Ran:
    """The results of one run of a primitive."""

    out: Array
    footprint: Footprint
    peak_bytes: int  # what the run allocated besides its buffers
    touched: dict[str, float]  # the part of every scratch buffer that was written, between 0 and 1


def run(
    primitive: Primitive,
    shape: LayerShape,
    x: Array,
    weights: ConvWeights | None = None,
    variant: Variant | None = None,
    threads: int = 1,
    out: Array | None = None,
) -> Ran:
    """Prepare, bind and run once; output NaN and scratch 0xFF beforehand, unless `out` is given.

    Fails when a byte before or behind a scratch buffer changes.
    """
    variant = variant or primitive.variants(shape, MACHINE)[0]
    footprint = primitive.footprint(shape, variant, threads)
    stores = {s.name: aligned(s.nbytes + 2 * GUARD) for s in footprint.scratch}
    scratch = {name: store[GUARD : len(store) - GUARD] for name, store in stores.items()}
    out = np.full(shape.out_shape, np.nan, np.float32) if out is None else out
    with ThreadPool(threads) as pool:
        step = primitive.bind(primitive.prepare(weights, variant, pool), shape, variant, pool)
        tracemalloc.start()
        try:
            step.run(x, out, scratch)
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
    for name, store in stores.items():
        assert (store[:GUARD] == 0xFF).all(), f"wrote before {name}"
        assert (store[len(store) - GUARD :] == 0xFF).all(), f"wrote beyond {name}"
    touched = {name: float(np.mean(store != 0xFF)) for name, store in scratch.items()}
    return Ran(out, footprint, peak, touched)


def images_on(device: Any, values: Any, what: str, *, gap: int = 0) -> Any:
    """`values` on a device, as they lie; `gap` values between images, which are NaN."""
    images = np.full((len(values), values[0].size + gap), np.nan, values.dtype)
    images[:, : values[0].size] = values.reshape(len(values), -1)
    strides = (images.strides[0], *np.empty(values.shape[1:], values.dtype).strides)
    return device.view(device.put(images, what), values.shape, values.dtype, strides=strides)


def run_on(
    device: Any,
    primitive: Primitive,
    shape: ConvShape,
    x: Array,
    weights: ConvWeights,
    variant: Variant,
    *,
    carried: int = 0,
    gap: int = 0,
) -> tuple[Any, float]:
    """Output and its peak, from poisoned memory; the first `carried` planes apart, `gap` values between images.

    Fails where the device does not keep what the footprint says.
    """
    kind = np.dtype(np.float16 if shape.precision == "fp16" else np.float32)
    before = images_on(device, x[:, :carried].astype(kind), "before", gap=gap) if carried else None
    rest = images_on(device, x[:, carried:].astype(kind), "x", gap=gap)
    out = images_on(device, np.full(shape.out_shape, np.nan, kind), "out", gap=gap)
    peaks = device.put(np.array([np.abs(x).max(), 0], np.float32), "peaks")
    held, promised = device.allocated, primitive.footprint(shape, variant, 1)
    resident = primitive.prepare(weights, variant, device)
    assert device.allocated - held == promised.resident
    scratch = {s.name: device.put(np.full(s.nbytes, 0xFF, np.uint8), s.name) for s in promised.scratch}
    address = device.address(peaks)
    arguments = {"x_peak": address} if promised.reads_peak else {}
    step = primitive.bind(resident, shape, variant, device)
    step.run(rest, out, scratch, before, out_peak=address + peaks.dtype.itemsize, **arguments)
    return device.get(out), float(device.get(peaks)[1])


def random_weights(shape: ConvShape, seed: int = 7) -> ConvWeights:
    rng = np.random.default_rng(seed)
    scale = np.float32(np.sqrt(2 / (shape.fin * np.prod(shape.k))))
    return ConvWeights(
        rng.standard_normal((shape.fout, shape.fin, *shape.k), np.float32) * scale,
        rng.standard_normal(shape.fout, np.float32),
    )


def random_input(shape: LayerShape, kind: str = "normal", seed: int = 20261120) -> Array:
    """Return random input that is normal, relu (half zeros), shifted (mean 10) or hot (one voxel of 10^6)."""
    x = np.random.default_rng(seed).standard_normal(shape.in_shape, np.float32)
    if kind == "relu":
        np.maximum(x, np.float32(0), out=x)
    elif kind == "shifted":
        x += np.float32(10)
    elif kind == "hot":
        x[tuple(n // 2 for n in x.shape)] = 1e6
    return x


def aligned(nbytes: int) -> Bytes:
    """Scratch as the arena gives it: on a cache line, full of 0xFF (float32: NaN)."""
    store = aligned_bytes(nbytes)
    store[...] = 0xFF
    return store


def kept(
    question: str, arrays: tuple[npt.NDArray[Any], ...], answer: Callable[[], npt.NDArray[Any]]
) -> npt.NDArray[Any]:
    """`answer()`, read only; worked out once for the same question and values, of those that were asked last."""
    asked = hashlib.blake2b(question.encode())
    for array in arrays:
        asked.update(f"{array.dtype} {array.shape}".encode())
        asked.update(array.tobytes())
    key = asked.digest()
    if key not in _KEPT:
        _KEPT[key] = answer()
        _KEPT[key].flags.writeable = False
    _KEPT.move_to_end(key)
    found = _KEPT[key]
    while sum(array.nbytes for array in _KEPT.values()) > KEPT_BYTES:
        _KEPT.popitem(last=False)
    return found


def definition(x: npt.NDArray[Any], weights: ConvWeights, activation: Activation) -> npt.NDArray[np.float64]:
    """`reference.convolve`, kept."""
    given = x, weights.weight, weights.bias
    return kept(f"definition {activation}", given, lambda: reference.convolve(*given, activation))


def fragments(x: npt.NDArray[Any], p: Vec3) -> npt.NDArray[np.float64]:
    """`reference.fragments`, of those windows alone that are part of a fragment: test_reference.py compares the two."""
    m = [n // w for n, w in zip(x.shape[1:4], p, strict=True)]
    found = np.full((len(x), *p, *m, x.shape[4]), -np.inf)
    for offset in product(*map(range, p)):
        for d in product(*map(range, p)):
            z, y, x0 = (
                slice(o + e, o + e + (count - 1) * w + 1, w) for o, e, count, w in zip(offset, d, m, p, strict=True)
            )
            largest = found[:, offset[0], offset[1], offset[2]]
            np.maximum(largest, x[:, z, y, x0], out=largest)
    return found.reshape(-1, *m, x.shape[4])


def twin(x: Array, weights: ConvWeights, shape: ConvShape) -> npt.NDArray[Any]:
    """Return the convolution in plain float32, tap by tap, whose rounding is the yardstick; it is cached."""
    given = x, weights.weight, weights.bias
    return kept(f"twin {shape.activation}", given, lambda: _twin(x, weights, shape))


def _twin(x: Array, weights: ConvWeights, shape: ConvShape) -> npt.NDArray[Any]:
    out = np.broadcast_to(weights.bias, shape.out_shape).copy()
    mz, my, mx = shape.out
    for z, y, x0 in product(*map(range, shape.k)):
        out += x[:, z : z + mz, y : y + my, x0 : x0 + mx] @ weights.weight[:, :, z, y, x0].T
    with np.errstate(over="ignore"):
        match shape.activation:
            case "relu":
                np.maximum(out, np.float32(0), out=out)
            case "tanh":
                np.tanh(out, out=out)
            case "sigmoid":
                out = np.reciprocal(1 + np.exp(-out))
            case "softmax":
                out = np.exp(out - out.max(axis=-1, keepdims=True))
                out /= out.sum(axis=-1, keepdims=True)
    assert out.dtype == np.float32
    return out


def assert_close(out: Array, x: Array, weights: ConvWeights, shape: ConvShape) -> None:
    """Rms error at most 3 times that of plain float32, or 1e-6 of the rms answer; NaN and untouched voxels fail."""
    assert np.isfinite(out).all(), f"{(~np.isfinite(out)).sum()} of {out.size} voxels not finite"
    exact = definition(x, weights, shape.activation)
    limit = max(3 * _rms(twin(x, weights, shape) - exact), 1e-6 * _rms(exact))
    error = _rms(out - exact)
    worst = np.unravel_index(np.abs(out - exact).argmax(), out.shape)
    assert error <= limit, f"rms error {error:.2e} > {limit:.2e}; worst voxel (s, z, y, x, f) = {worst}"


def error_of(out: Array, x: Array, weights: ConvWeights, shape: ConvShape) -> float:
    """Rms, of the rms of the definition."""
    exact = definition(x, weights, shape.activation)
    assert out.shape == exact.shape
    return _rms(out - exact) / _rms(exact)


def _rms(values: npt.NDArray[Any]) -> float:
    return float(np.sqrt(np.mean(np.square(values, dtype=np.float64))))
