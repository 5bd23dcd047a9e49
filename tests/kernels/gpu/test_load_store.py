"""A GPU session moves data by exact copies, which equal those of numpy bit for bit."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from tests.support.emulator import SMALL_GPU, EmulatedDevice
from znnpy.kernels import reference
from znnpy.kernels.gpu.load_store import C_NAMES, LoadStore
from znnpy.network import Normalise
from znnpy.shapes import turn

if TYPE_CHECKING:
    from znnpy.shapes import Vec3

RAW = sorted(C_NAMES)
NO_WINDOWS: tuple[Vec3, ...] = ()


def moves(device: Any, **changed: Any) -> LoadStore:
    return LoadStore(device, **({"raw": np.uint8, "values": np.float32, "out": np.float32} | changed))


def word(device: Any) -> Any:
    """Make a peak of zero."""
    return device.put(np.zeros(1, np.float32), "peak")


def poisoned(device: Any, shape: tuple[int, ...], dtype: Any) -> Any:
    nbytes = prod(shape) * np.dtype(dtype).itemsize
    return device.put(np.full(nbytes, 0xFF, np.uint8).view(dtype).reshape(shape), "out")


def grey(dtype: str, shape: tuple[int, ...], seed: int = 1) -> Any:
    """Values over the whole range that float32 tells apart in each type; the last is the largest."""
    rng = np.random.default_rng(seed)
    kind = np.dtype(dtype)
    if kind.kind == "f":
        floats = 1000 * rng.standard_normal(shape)
        floats.flat[-1] = 9000
        return floats.astype(kind)
    info = np.iinfo(kind)
    values = rng.integers(max(info.min, -(2**40)), min(info.max, 2**40), shape, dtype=kind, endpoint=True)
    values.flat[0], values.flat[-1] = info.min, info.max
    return values


def normalised(raw: Any, normalise: Normalise | None) -> Any:
    """Normalise as on a CPU: (c, z, y, x) to (z, y, x, c) float32."""
    wide = raw.dtype.itemsize > 2 and raw.dtype != np.float32
    dtype = np.float64 if wide else np.float32
    out = np.empty((*raw.shape[1:], len(raw)), np.float32)
    for channel, values in enumerate(raw):
        if normalise is None:
            out[..., channel] = values
            continue
        centred = np.subtract(values, dtype(normalise.mean[channel]), dtype=dtype, casting="unsafe").astype(np.float32)
        out[..., channel] = centred / np.float32(normalise.std[channel])
    return out


@pytest.mark.parametrize("given", [True, False], ids=["normalised", "as it is"])
@pytest.mark.parametrize("raw_type", RAW)
def test_patches_are_loaded_as_on_the_cpu(device: Any, raw_type: str, given: bool) -> None:
    raw = grey(raw_type, (1, 5, 7, 9))
    normalise = Normalise((117.3,), (31.7,)) if given else None
    m = moves(device, raw=raw_type, normalise=normalise)
    out, peak = poisoned(device, (5, 7, 9, 1), np.float32), word(device)
    m.load(device.put(raw, "raw"), out, device.address(peak))
    exact = normalised(raw, normalise)
    np.testing.assert_array_equal(device.get(out), exact)
    assert device.get(peak)[0] == np.abs(exact).max()


@pytest.mark.parametrize("axis", [0, 1, 2])
@pytest.mark.parametrize(("channels", "n"), [(1, (3, 4, 5)), (2, (5, 37, 41)), (3, (34, 3, 6)), (5, (2, 3, 33))])
def test_patches_are_loaded_transposed_and_interleaved(device: Any, channels: int, n: Vec3, axis: int) -> None:
    raw = grey("uint16", (channels, *n))
    normalise = Normalise(tuple(100.0 + c for c in range(channels)), tuple(30.0 + c for c in range(channels)))
    m = moves(device, raw=np.uint16, values=np.float16, normalise=normalise)
    axes = (0, *(1 + along for along in turn(axis)))
    exact = normalised(raw.transpose(axes), normalise)
    out, peak = poisoned(device, exact.shape, np.float16), word(device)
    m.load(device.put(raw, "raw").transpose(axes), out, device.address(peak))
    np.testing.assert_array_equal(device.get(out), exact.astype(np.float16))
    assert device.get(peak)[0] == np.abs(exact).max()  # before it was rounded


def test_patch_may_begin_at_any_address(device: Any) -> None:
    raw = grey("uint8", (1, 4, 5, 6))
    store = device.put(np.concatenate([np.zeros(3, np.uint8), raw.reshape(-1)]), "raw")
    out = poisoned(device, (4, 5, 6, 1), np.float32)
    moves(device).load(device.view(store, raw.shape, np.uint8, offset=3), out)
    np.testing.assert_array_equal(device.get(out)[..., 0], raw[0])


@pytest.mark.parametrize("worst", [np.inf, np.nan, -1e39])
def test_peak_reports_values_beyond_float32(device: Any, worst: float) -> None:
    raw = np.ones((1, 3, 3, 3))
    raw[0, 1, 2, 0] = worst
    m, peak = moves(device, raw=np.float64), word(device)
    m.load(device.put(raw, "raw"), poisoned(device, (3, 3, 3, 1), np.float32), device.address(peak))
    assert not np.isfinite(device.get(peak)[0])


@pytest.mark.parametrize("axis", [0, 1, 2])
@pytest.mark.parametrize("out_type", ["float32", "float16", "uint8"])
@pytest.mark.parametrize(
    ("windows", "m", "maps"),
    [
        (NO_WINDOWS, (3, 5, 4), 1),
        (((2, 3, 1), (1, 2, 4)), (2, 1, 3), 3),
        (((2, 2, 2),), (17, 2, 19), 9),
        (((1, 1, 3), (1, 1, 2)), (1, 2, 50), 2),
    ],
    ids=str,
)
def test_fragments_are_stored_at_their_positions(
    device: Any, windows: tuple[Vec3, ...], m: Vec3, maps: int, out_type: str, axis: int
) -> None:
    images = prod(map(prod, windows))
    rng = np.random.default_rng(5)
    fragments = (0.6 * rng.standard_normal((images, *m, maps)) + 0.5).astype(np.float32)
    fragments.flat[:3] = 0.5 / 255, 1.5 / 255, 2.5 / 255  # halves go to even
    dense = reference.recombine(fragments, windows)[0].transpose(3, 0, 1, 2).astype(np.float32)
    if out_type == "uint8":
        dense = np.rint(np.float32(255) * np.clip(dense, 0, 1))
    axes = (0, *(1 + along for along in turn(axis)))
    store = poisoned(device, tuple(np.empty(dense.shape).transpose(np.argsort(axes)).shape), out_type)
    peak = word(device)
    mover = moves(device, out=out_type, windows=windows)
    mover.store(0, device.put(fragments, "fragments"), store.transpose(axes), device.address(peak))
    np.testing.assert_array_equal(device.get(store).transpose(axes), dense.astype(out_type))
    assert device.get(peak)[0] == np.abs(fragments).max()


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_long_periods_fit_the_shared_memory_of_any_card(axis: int) -> None:
    windows: tuple[Vec3, ...] = ((1, 1, 16), (1, 1, 16))
    fragments = np.random.default_rng(7).standard_normal((256, 35, 2, 2, 8)).astype(np.float32)
    dense = reference.recombine(fragments, windows)[0].transpose(3, 0, 1, 2)
    axes = (0, *(1 + along for along in turn(axis)))
    with EmulatedDevice(SMALL_GPU) as small:
        store = poisoned(small, np.empty(dense.shape).transpose(np.argsort(axes)).shape, np.float32)
        mover = moves(small, windows=windows)
        mover.store(0, small.put(fragments, "fragments"), store.transpose(axes))
        np.testing.assert_array_equal(small.get(store).transpose(axes), dense)


def test_fragments_may_be_stored_in_parts(device: Any) -> None:
    windows: tuple[Vec3, ...] = ((2, 2, 1), (1, 3, 2))
    fragments = np.random.default_rng(6).standard_normal((24, 2, 3, 5, 2)).astype(np.float16)
    store = poisoned(device, (2, 4, 18, 10), np.float32)
    mover = moves(device, values=np.float16, windows=windows)
    for first, count in ((7, 10), (0, 7)):
        mover.store(first, device.put(fragments[first : first + count], "part"), store)
    before = device.get(store)
    mover.store(17, device.put(fragments[17:], "part"), store)
    dense = reference.recombine(fragments, windows)[0].transpose(3, 0, 1, 2)
    np.testing.assert_array_equal(device.get(store), dense)
    untouched = np.isnan(before)
    assert untouched.mean() == 7 / 24
    np.testing.assert_array_equal(before[~untouched], dense[~untouched])


def test_peak_reports_values_beyond_float16(device: Any) -> None:
    fragments = np.array([1.0, -70000.0], np.float32).reshape(1, 1, 1, 2, 1)
    peak = word(device)
    store = poisoned(device, (1, 1, 1, 2), np.float16)
    moves(device, out=np.float16).store(0, device.put(fragments, "fragments"), store, device.address(peak))
    assert device.get(peak)[0] == 70000


@pytest.mark.parametrize("maps", [1, 2, 3, 8])
@pytest.mark.parametrize(("carried", "new"), [(1, 1), (3, 2), (2, 5), (7, 1), (6, 6), (9, 13)])
@pytest.mark.parametrize("join", [True, False], ids=["joined", "apart"])
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_carried_planes_are_copied(device: Any, dtype: Any, carried: int, new: int, maps: int, join: bool) -> None:
    rng = np.random.default_rng(carried)
    planes = carried + new if join else new
    kept = rng.standard_normal((3, carried, 2, 5, maps)).astype(dtype)
    store = rng.standard_normal((6, planes, 2, 5, maps)).astype(dtype)  # every second image is somebody else's
    on_device, x = device.put(kept, "kept"), device.put(store, "x")
    moves(device).keep(on_device, x[::2], join=join)
    fresh = store[::2]
    whole = np.concatenate([kept, fresh[:, carried:] if join else fresh], axis=1)
    np.testing.assert_array_equal(device.get(on_device), whole[:, -carried:])
    after = device.get(x)
    np.testing.assert_array_equal(after[::2], whole if join else fresh)
    np.testing.assert_array_equal(after[1::2], store[1::2])


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize("n", [(1, 1, 1), (3, 5, 7), (2, 4, 16)], ids=str)
def test_zeros_and_peaks_equal_numpy(device: Any, dtype: Any, n: Vec3) -> None:
    values = np.random.default_rng(8).standard_normal((4, *n, 3)).astype(dtype)
    values[0] = 100  # of an image that is not asked for
    values[1, -1, -1, -1, -1] = -9
    x, peak, m = device.put(values, "x"), word(device), moves(device, values=dtype)
    m.peak(x[1::2], device.address(peak))
    assert device.get(peak)[0] == 9
    m.clear(x[1::2])
    after = device.get(x)
    assert not after[1::2].any()
    np.testing.assert_array_equal(after[::2], values[::2])


@pytest.mark.parametrize("offset", [1, 2, 4])
def test_images_may_begin_at_any_address(device: Any, offset: int) -> None:
    """A wide access to an unaligned address is an error on a device, not in the emulator."""
    values = np.random.default_rng(9).standard_normal(2 * (offset + 96) + offset).astype(np.float32)
    whole, peak, m = device.put(values, "images"), word(device), moves(device)
    sizes, strides = (2, 3, 2, 4, 4), (4 * (96 + offset), 128, 64, 16, 4)
    x = device.view(whole, sizes, np.float32, offset=4 * offset, strides=strides)
    kept = device.view(whole, (2, 1, 2, 4, 4), np.float32, offset=4 * offset, strides=strides)
    images = np.lib.stride_tricks.as_strided(values[offset:], sizes, strides).copy()
    m.peak(x, device.address(peak))
    assert device.get(peak)[0] == np.abs(images).max()
    m.keep(kept, x[:, 1:], join=False)
    np.testing.assert_array_equal(device.get(kept)[:, 0], images[:, 2])
    m.clear(x)
    after = device.get(whole)
    assert (after == 0).sum() == 192
    assert (after[-offset:] == values[-offset:]).all()


@pytest.mark.parametrize("worst", [np.inf, -np.inf, np.nan])
def test_peak_of_values_not_finite_is_not_finite(device: Any, worst: float) -> None:
    values = np.ones((1, 2, 3, 5, 1), np.float32)
    values[0, 1, 1, 1, 0] = worst
    peak = word(device)
    moves(device).peak(device.put(values, "x"), device.address(peak))
    assert not np.isfinite(device.get(peak)[0])
