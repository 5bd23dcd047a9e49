"""`ops.convolve` takes the fastest way within a bound of memory, and gives what the definition gives."""

from __future__ import annotations

import tracemalloc
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from znnpy import fast_convolution, ops
from znnpy.kernels.reference import convolve as by_definition
from znnpy.machine import this_machine
from znnpy.network import ConvWeights
from znnpy.shapes import ACTIVATIONS, Activation, ConvShape, Vec3


def layer(size: Vec3, fin: int, fout: int, k: Vec3) -> tuple[npt.NDArray[np.float32], ConvWeights]:
    rng = np.random.default_rng(fin + fout)
    kernels = rng.standard_normal((fout, fin, *k)).astype(np.float32) / np.float32(np.sqrt(fin * np.prod(k)))
    return rng.standard_normal((2, *size, fin)).astype(np.float32), ConvWeights(
        kernels, rng.standard_normal(fout).astype(np.float32)
    )


def assert_close(found: npt.NDArray[Any], exact: npt.NDArray[Any], rms: float = 1e-6) -> None:
    assert found.shape == exact.shape
    assert np.sqrt(np.mean((found - exact) ** 2)) <= rms * np.sqrt(np.mean(exact**2))


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize(
    ("size", "fin", "fout", "k", "padding"),
    [
        ((20, 21, 22), 8, 12, (3, 3, 3), (0, 0, 0)),
        ((20, 21, 22), 8, 12, (3, 3, 3), (1, 2, 1)),
        ((1, 180, 181), 1, 20, (1, 5, 5), (0, 2, 2)),
        ((16, 17, 18), 40, 30, (1, 1, 1), (0, 0, 0)),
        ((24, 25, 26), 6, 5, (5, 4, 3), (4, 3, 2)),
    ],
)
def test_output_equals_the_definition(
    size: Vec3, fin: int, fout: int, k: Vec3, padding: Vec3, activation: Activation
) -> None:
    x, weights = layer(size, fin, fout, k)
    padded = np.pad(x.astype(np.float64), [(0, 0), *((pad, pad) for pad in padding), (0, 0)])
    exact = by_definition(padded, weights.weight, weights.bias, activation)
    out = np.full(exact.shape, np.nan, np.float32)
    assert fast_convolution.convolve(x, out, weights, padding, activation), "the layer is large enough"
    assert_close(out, exact)
    assert_close(ops.convolve(x, weights, padding=padding, activation=activation), exact)


def test_flipped_kernels_float16_and_any_strides_are_accepted() -> None:
    x, weights = layer((20, 21, 22), 8, 12, (3, 3, 3))
    turned = ConvWeights(weights.weight[:, :, ::-1, ::-1, ::-1], weights.bias)
    exact = by_definition(x.astype(np.float64), turned.weight, turned.bias, "none")
    assert_close(ops.convolve(x, weights, mode="convolution"), exact)
    half = x.astype(np.float16)
    exact = by_definition(half.astype(np.float64), weights.weight, weights.bias, "none")
    found = ops.convolve(half, weights)
    assert found.dtype == np.float16
    assert_close(found, exact, 1e-3)
    spread = np.full((2, 20, 42, 22, 8), np.nan, np.float32)
    spread[:, :, ::2] = x
    out = np.full((2, 18, 12, 20, 19), np.nan, np.float32).transpose(0, 1, 4, 3, 2)
    exact = by_definition(x.astype(np.float64), weights.weight, weights.bias, "relu")
    assert ops.convolve(spread[:, :, ::2], weights, activation="relu", out=out) is out
    assert_close(out, exact)


def test_method_may_be_forced(monkeypatch: pytest.MonkeyPatch) -> None:
    x, weights = layer((20, 21, 22), 8, 12, (3, 3, 3))

    def refuse(*given: Any) -> bool:
        raise AssertionError("not asked for")

    monkeypatch.setattr(fast_convolution, "convolve", refuse)
    ops.convolve(x, weights, method="direct")
    ops.convolve(x, weights, method="implicit_gemm")
    ops.convolve(x, weights, stride=(2, 1, 1))
    with pytest.raises(AssertionError, match="not asked for"):
        ops.convolve(x, weights)


@pytest.mark.parametrize("bad", [np.nan, np.inf, 3e38])
def test_values_not_finite_do_not_spread(bad: float) -> None:
    """Values that are not finite stay where tap by tap puts them; a transform would spread them over its tile."""
    x, weights = layer((20, 21, 22), 8, 12, (3, 3, 3))
    x[1, 10, 11, 12] = bad
    with np.errstate(all="ignore"):
        direct = ops.convolve(x, weights, method="direct")
        found = ops.convolve(x, weights)
    np.testing.assert_array_equal(np.isfinite(found), np.isfinite(direct))
    clear = np.isfinite(direct)
    np.testing.assert_allclose(found[clear], direct[clear], atol=1e-5 * np.abs(direct[clear]).max())


def test_result_not_finite_is_computed_again_by_taps() -> None:
    """A result that is not finite is computed again, tap by tap."""
    x, weights = layer((20, 21, 22), 8, 12, (3, 3, 3))
    x[:] = np.inf
    out = np.zeros((2, 18, 19, 20, 12), np.float32)
    assert not fast_convolution.convolve(x, out, weights, (0, 0, 0), "none")


LAYERS = [(maps, n, k) for maps, n in (((1, 16), 96), ((32, 32), 40), ((32, 32), 96)) for k in (1, 3, 5)]
SHAPES = [ConvShape(1, *maps, (n, n, n), (k, k, k)) for maps, n, k in LAYERS]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_chosen_method_stays_within_its_memory(shape: ConvShape) -> None:
    found = fast_convolution.fastest(shape)
    assert found is not None
    primitive, variant = found
    machine = this_machine()
    footprint = primitive.footprint(shape, variant, machine.cores)
    beside = footprint.resident + footprint.allowance + sum(scratch.nbytes for scratch in footprint.scratch)
    assert beside <= max(fast_convolution.MOST_BYTES, 2 * (shape.in_bytes + shape.out_bytes))


def test_memory_stays_below_its_bound() -> None:
    x, weights = layer((40, 41, 42), 16, 16, (5, 5, 5))
    out = np.empty((2, 36, 37, 38, 16), np.float32)
    fast_convolution.convolve(x, out, weights, (0, 0, 0), "none")
    tracemalloc.start()
    fast_convolution.convolve(x, out, weights, (0, 0, 0), "none")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak <= max(fast_convolution.MOST_BYTES, 2 * (x.nbytes + out.nbytes)) + 2**20


def test_small_layers_run_in_the_calling_thread() -> None:
    assert fast_convolution.fastest(ConvShape(1, 4, 4, (8, 8, 8), (3, 3, 3))) is None
