"""Sums of windows on a device against numpy in float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from znnpy.kernels.gpu import blend

RNG = np.random.default_rng(3)
TYPES = pytest.mark.parametrize("dtype", ["float32", "float16"])


def part_of(device: Any, host: npt.NDArray[Any]) -> tuple[Any, Any]:
    """Return an array as a part of a larger one, full of NaN, in the memory of a device, and this larger one."""
    z, y, x, maps = host.shape
    whole = np.full((z + 2, y + 3, x + 1, maps), np.nan, host.dtype)
    whole[1:-1, 2:-1, 1:] = host
    there = device.put(whole, "sums")
    return there[1:-1, 2:-1, 1:], there


def word(device: Any) -> Any:
    return device.put(np.zeros(1, np.float32), "a peak")


def near(found: npt.NDArray[Any], exact: npt.NDArray[Any], dtype: str) -> None:
    np.testing.assert_allclose(found, exact, rtol=0, atol=(1e-6 if dtype == "float32" else 2e-3) * abs(exact).max())


@TYPES
def test_what_was_kept_is_taken_in_float32(device: Any, dtype: str) -> None:
    host = RNG.normal(size=(3, 4, 5, 3)).astype(dtype)
    host[1, 2, 3, 1] = -7
    kept, _ = part_of(device, host)
    row, whole = part_of(device, np.full(host.shape, np.nan, np.float32))
    peak = word(device)
    blend.take(device, row, kept, device.address(peak))
    assert device.get(peak)[0] == 7
    found = device.get(whole)
    np.testing.assert_array_equal(found[1:-1, 2:-1, 1:], host.astype(np.float32))
    assert np.isnan(found).sum() == found.size - host.size


def test_infinite_sums_raise_the_peak(device: Any) -> None:
    host = np.ones((2, 2, 2, 2), np.float16)
    host[1, 1, 0, 1] = np.inf
    row, peak = device.put(np.zeros(host.shape, np.float32), "row"), word(device)
    blend.take(device, row, device.put(host, "kept"), device.address(peak))
    assert device.get(peak)[0] == np.inf


@TYPES
def test_a_part_is_cleared(device: Any, dtype: str) -> None:
    sums, whole = part_of(device, np.ones((3, 4, 5, 3), dtype))
    blend.clear(device, sums)
    found = device.get(whole)
    assert (found[1:-1, 2:-1, 1:] == 0).all()
    assert np.isnan(found).sum() == found.size - 3 * 4 * 5 * 3


@pytest.mark.parametrize("counts", [True, False])
@TYPES
@pytest.mark.parametrize("kept", ["float32", "float16"])
def test_results_are_added_times_their_weights(device: Any, dtype: str, kept: str, counts: bool) -> None:
    size, maps = (3, 4, 5), 2
    before = RNG.normal(size=(*size, 2 * maps + 1)).astype(kept)
    given, factors = RNG.normal(size=(*size, maps)).astype(dtype), RNG.uniform(0.1, 1, size).astype(np.float32)
    sums, whole = part_of(device, before)
    result = device.put(np.ascontiguousarray(given[::-1, :, ::-1]), "result")[::-1, :, ::-1]  # mirrored
    weights = device.put(np.ascontiguousarray(factors.transpose(2, 0, 1)), "weights").transpose(1, 2, 0)
    blend.add(device, sums, result, weights, 0.25, first=maps, counts=counts)
    exact = before.astype(np.float64)
    exact[..., maps : 2 * maps] += given * factors[..., None] * 0.25
    exact[..., -1] += factors * counts
    found = device.get(whole)
    near(found[1:-1, 2:-1, 1:], exact, kept)
    assert np.isnan(found).sum() == found.size - exact.size


@pytest.mark.parametrize("out", ["float32", "float16", "uint8"])
@pytest.mark.parametrize("members", [1, 3])
@pytest.mark.parametrize("function", ["none", "softmax", "sigmoid"])
def test_means_are_written_in_any_order_of_axes(device: Any, function: str, members: int, out: str) -> None:
    size, maps = (3, 4, 5), 4
    totals, means = RNG.uniform(0.5, 2, (*size, 1)), RNG.normal(size=(*size, members, maps)) * 3
    sums = np.concatenate((means.reshape(*size, -1) * totals, totals), axis=3).astype(np.float32)
    exact = means
    if function == "softmax":
        exact = np.exp(means) / np.exp(means).sum(axis=4, keepdims=True)
    if function == "sigmoid":
        exact = 1 / (1 + np.exp(-means))
    exact = np.moveaxis(exact.mean(axis=3), 3, 0)
    there, _ = part_of(device, sums)
    target = device.put(np.zeros((maps, *size[::-1]), out), "out")
    peak = word(device)
    blend.finish(
        device, there, target.transpose(0, 3, 2, 1),
        members=members, function=function, kind="maps", above=None, peak=device.address(peak),
    )  # fmt: skip
    found = device.get(target).transpose(0, 3, 2, 1)
    assert device.get(peak)[0] == pytest.approx(abs(exact).max(), rel=1e-4)
    if out == "uint8":
        assert (abs(found - np.round(255 * exact.clip(0, 1))) <= 1).all()
    else:
        near(found, exact, out)


def test_labels_and_thresholds_are_whole_numbers(device: Any) -> None:
    size, maps = (3, 4, 5), 4
    totals, means = RNG.uniform(0.5, 2, (*size, 1)), RNG.normal(size=(*size, maps))
    means[0, 0, 0] = 1  # the first of equal ones
    means[1, 1, 1, 2] = np.nan  # as numpy: NaN is the largest
    sums = np.concatenate((means * totals, totals), axis=3).astype(np.float32)
    labels = device.put(np.full((1, *size), 99, np.uint8), "out")
    arguments: dict[str, Any] = {"members": 1, "function": "none", "peak": 0}
    blend.finish(device, device.put(sums, "sums"), labels, kind="labels", above=None, **arguments)
    means32 = (sums[..., :-1] / sums[..., -1:]).astype(np.float32)
    np.testing.assert_array_equal(device.get(labels)[0], means32.argmax(axis=3))
    limits = np.array([0.1, -0.2, 0, 5], np.float32)
    above = device.put(np.full((maps, *size), 99, np.uint8), "out")
    blend.finish(device, device.put(sums, "sums"), above, kind="above", above=device.put(limits, "above"), **arguments)
    np.testing.assert_array_equal(device.get(above), np.moveaxis(means32 > limits, 3, 0))
