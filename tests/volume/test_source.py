"""Input patches against np.pad of the whole volume: regions, borders, patches that stand out, NaN."""

from __future__ import annotations

import re
import tracemalloc
from itertools import product

import numpy as np
import numpy.typing as npt
import pytest

from tests.support.messages import assert_holds
from znnpy.errors import ShapeError, VolumeError
from znnpy.network import Conv, Network, Normalise
from znnpy.option_values import Border
from znnpy.patches import Box
from znnpy.shapes import Vec3
from znnpy.volume import source as source_module
from znnpy.volume.array import ArrayVolume
from znnpy.volume.roi import parse_roi
from znnpy.volume.source import Source


def network(fov: Vec3, channels: int = 1, normalise: Normalise | None = None) -> Network:
    return Network("probe", channels, (Conv(fov, 1),), normalise)


def volume(size: Vec3, dtype: str = "i2", channels: int = 1) -> tuple[npt.NDArray[np.int16], ArrayVolume]:
    array = np.random.default_rng(7).integers(1, 1000, (channels, *size)).astype(dtype)
    return array, ArrayVolume(array)


def padded(array: npt.NDArray[np.int16], fov: Vec3) -> npt.NDArray[np.int16]:
    """Return the whole volume with numpy's own mirror around it: (c, *(size + fov - 1))."""
    pads = [((k - 1) // 2, k - 1 - (k - 1) // 2) for k in fov]
    return np.pad(array, [(0, 0), *pads], mode="reflect")


FOVS = [(1, 1, 1), (3, 5, 2), (4, 1, 6), (7, 8, 9)]
SIZES = [(9, 8, 10), (13, 3, 9), (2, 9, 1)]
PATCHES = [(1, 1, 1), (4, 3, 2), (6, 20, 7)]


@pytest.mark.parametrize("slab", [1, 300, 2**22], ids=["row by row", "some planes", "at once"])
@pytest.mark.parametrize("patch", PATCHES, ids=str)
@pytest.mark.parametrize("fov", FOVS, ids=str)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_reflected_border_equals_numpys_pad(
    size: Vec3, fov: Vec3, patch: Vec3, slab: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(source_module, "SLAB_BYTES", slab)
    array, opened = volume(size, channels=2)
    means = (5.2, 70_000.0)  # the second is beyond int16
    source = Source(
        opened, roi=None, border="reflect", network=network(fov, 2, Normalise(means, (1.0, 1.0))), allow_nan=False
    )
    assert source.output == size
    assert source.offset == (0, 0, 0)
    whole = padded(array, fov)
    beyond = np.stack(
        [np.pad(channel, [(0, 50)] * 3, constant_values=fill) for channel, fill in zip(whole, (5, 32767), strict=True)]
    )
    extent = tuple(p + k - 1 for p, k in zip(patch, fov, strict=True))
    out = np.zeros((2, *extent), np.int16)
    for lo in product(*(sorted({0, 1, n // 2, max(0, n - p)}) for n, p in zip(size, patch, strict=True))):
        out.fill(-1)
        assert source.read((lo[0], lo[1], lo[2]), out) is None
        z, y, x = (slice(at, at + e) for at, e in zip(lo, extent, strict=True))
        np.testing.assert_array_equal(out, beyond[:, z, y, x])


def test_valid_source_without_roi_is_the_volume() -> None:
    array, opened = volume((9, 8, 10))
    source = Source(opened, roi=None, border="valid", network=network((4, 3, 2)), allow_nan=False)
    assert source.output == (6, 6, 9)
    assert source.offset == (1, 1, 0)
    out = np.zeros((1, 5, 4, 4), np.int16)
    source.read((1, 2, 3), out)
    np.testing.assert_array_equal(out, array[:, 1:6, 2:6, 3:7])


def test_valid_border_reads_nothing_outside_the_roi() -> None:
    array, opened = volume((9, 8, 10))
    roi = Box((2, 1, 3), (7, 6, 9))
    source = Source(
        opened, roi=roi, border="valid", network=network((4, 3, 2), 1, Normalise((-3.6,), (1.0,))), allow_nan=False
    )
    assert source.output == (2, 3, 5)
    assert source.offset == (3, 2, 3)
    out = np.zeros((1, 7, 5, 6), np.int16)
    source.read((0, 0, 0), out)
    expected = np.full((1, 7, 5, 6), -4, np.int16)  # the mean, rounded
    expected[:, :5] = array[(slice(None), *roi.slices)]
    np.testing.assert_array_equal(out, expected)


def test_reflected_border_reads_voxels_around_the_roi() -> None:
    fov = (6, 3, 4)
    array, opened = volume((9, 8, 10))
    roi = Box((1, 3, 8), (4, 6, 10))
    source = Source(opened, roi=roi, border="reflect", network=network(fov), allow_nan=False)
    assert source.output == (3, 3, 2)
    assert source.offset == (1, 3, 8)
    out = np.zeros((1, 8, 5, 5), np.int16)
    source.read((0, 0, 0), out)
    np.testing.assert_array_equal(out, padded(array, fov)[:, 1:9, 3:8, 8:13])


def test_unsigned_mean_is_representable() -> None:
    opened = ArrayVolume(np.ones((3, 3, 3), np.uint8))
    for mean, fill in ((-7.0, 0), (130.4, 130), (999.0, 255)):
        net = network((2, 2, 2), 1, Normalise((mean,), (1.0,)))
        out = np.zeros((1, 9, 9, 9), np.uint8)
        Source(opened, roi=None, border="valid", network=net, allow_nan=False).read((0, 0, 0), out)
        assert out[0, 8, 8, 8] == fill
        assert (out[0, :3, :3, :3] == 1).all()


@pytest.mark.parametrize("shape", [(40, 40, 40), (1, 400, 160), (2, 3, 9000)], ids=str)
@pytest.mark.parametrize("border", ["valid", "reflect"])
@pytest.mark.parametrize("allow_nan", [False, True])
def test_reading_takes_little_memory_for_any_shape(
    shape: Vec3, border: Border, allow_nan: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All NaN, at once: the mask, and a few slabs."""
    monkeypatch.setattr(source_module, "SLAB_BYTES", 2**15)
    array = np.full(shape, np.nan, np.float32)
    net = network((1, 1, 1) if border == "valid" else (2, 2, 3))
    source = Source(ArrayVolume(array), roi=None, border=border, network=net, allow_nan=allow_nan)
    extent = net.patch_in(shape)
    out = np.zeros((1, *extent), np.float32)
    tracemalloc.start()
    try:
        if allow_nan:
            mask = source.read((0, 0, 0), out)
            assert mask is not None
            assert mask.all()
        else:
            with pytest.raises(VolumeError, match=f"{array.size} voxels are NaN .* first at \\(0, 0, 0\\)"):
                source.read((0, 0, 0), out)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    indices = 8 * 6 * sum(extent)
    assert peak <= 4 * max(2**15, 4 * extent[2]) + indices + allow_nan * out.size + 2**14


def with_holes() -> npt.NDArray[np.float32]:
    array = np.random.default_rng(3).standard_normal((2, 9, 8, 10)).astype(np.float32)
    array[1, 2, 3, 4] = np.nan
    array[0, 6, 0, 9] = np.inf
    array[0, 2, 3, 4] = -np.inf
    return array


@pytest.fixture(params=[1, 400, 2**22], ids=["row by row", "some planes", "at once"])
def slabs(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source_module, "SLAB_BYTES", request.param)


@pytest.mark.usefixtures("slabs")
def test_nan_is_refused_with_count_and_first_position() -> None:
    source = Source(ArrayVolume(with_holes()), roi=None, border="valid", network=network((3, 3, 3), 2), allow_nan=False)
    out = np.zeros((2, 9, 8, 10), np.float32)
    with pytest.raises(VolumeError) as caught:
        source.read((0, 0, 0), out)
    assert_holds(
        caught.value, "2 voxels are NaN", "(0, 0, 0) and (8, 7, 9)", "the first at (2, 3, 4)", "allow_nan=True"
    )
    with pytest.raises(VolumeError, match=r"1 voxel is NaN .* \(4, 0, 1\) and \(8, 7, 9\), the first at \(6, 0, 9\)"):
        source.read((4, 0, 1), np.zeros((2, 5, 8, 9), np.float32))
    assert source.read((3, 1, 0), np.zeros((2, 6, 7, 10), np.float32)) is None


@pytest.mark.usefixtures("slabs")
def test_mirrored_nan_counts_once_and_is_named_where_it_lies() -> None:
    source = Source(
        ArrayVolume(with_holes()), roi=None, border="reflect", network=network((9, 9, 9), 2), allow_nan=False
    )
    with pytest.raises(VolumeError, match=r"2 voxels are NaN .*, the first at \(2, 3, 4\)"):
        source.read((0, 0, 0), np.zeros((2, 17, 16, 18), np.float32))


@pytest.mark.usefixtures("slabs")
@pytest.mark.parametrize("border", ["valid", "reflect"])
def test_allowed_nan_is_replaced_by_the_mean_and_masked(border: Border) -> None:
    array = with_holes()
    net = network((3, 3, 3), 2, Normalise((0.25, -2.0), (1.0, 1.0)))
    source = Source(ArrayVolume(array), roi=None, border=border, network=net, allow_nan=True)
    repaired = array.copy()
    for channel, mean in enumerate((0.25, -2.0)):
        repaired[channel][~np.isfinite(array[channel])] = mean
    bad = ~np.isfinite(array).all(axis=0)
    pad = 1 if border == "reflect" else 0
    extent = (9 + 2 * pad, 8 + 2 * pad, 10 + 2 * pad)
    out = np.full((2, extent[0] + 2, *extent[1:]), np.nan, np.float32)  # two planes stand out
    mask = source.read((0, 0, 0), out)
    assert mask is not None
    np.testing.assert_array_equal(mask[:-2], np.pad(bad, pad, mode="reflect"))
    np.testing.assert_array_equal(out[:, :-2], np.pad(repaired, [(0, 0)] + [(pad, pad)] * 3, mode="reflect"))
    assert not mask[-2:].any()
    assert (out[1, -2:] == -2.0).all()


def test_nan_outside_the_roi_is_ignored() -> None:
    roi = Box((3, 1, 0), (9, 8, 10))
    source = Source(ArrayVolume(with_holes()), roi=roi, border="valid", network=network((3, 3, 3), 2), allow_nan=False)
    assert source.read((0, 0, 0), np.zeros((2, 12, 7, 10), np.float32)) is None


def test_wrong_number_of_channels_is_refused() -> None:
    message = (
        "the array has 2 channels, (c, z, y, x) = (2, 4, 5, 6), and network probe takes 1; "
        "give a volume with 1, axes in this order"
    )
    with pytest.raises(VolumeError, match=re.escape(message)):
        Source(volume((4, 5, 6), channels=2)[1], roi=None, border="valid", network=network((1, 1, 1)), allow_nan=False)


def test_volume_smaller_than_the_field_of_view_is_refused() -> None:
    _, opened = volume((9, 8, 10))
    net = network((3, 11, 3))
    with pytest.raises(ShapeError, match=r"volume is smaller than the field of view along y: 9x8x10 against 3x11x3"):
        Source(opened, roi=None, border="valid", network=net, allow_nan=False)
    with pytest.raises(
        ShapeError,
        match=r"`roi` .* along z: 2x8x10 against 3x11x3; .* 1 voxels",
    ):
        Source(opened, roi=Box((0, 0, 0), (2, 8, 10)), border="valid", network=net, allow_nan=False)
    assert Source(opened, roi=None, border="reflect", network=net, allow_nan=False).output == (9, 8, 10)


def test_roi_is_parsed() -> None:
    assert parse_roi("1:5,2:6,3:7", (9, 8, 10)) == Box((1, 2, 3), (5, 6, 7))
    assert parse_roi(" 1: , :6,: ", (9, 8, 10)) == Box((1, 0, 0), (9, 6, 10))
    assert parse_roi("0:9,0:8,0:10", (9, 8, 10)) == Box((0, 0, 0), (9, 8, 10))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("1:5,2:6", "'1:5,2:6' is not of the form z0:z1,y0:y1,x0:x1; .* \\(the volume is 9x8x10\\)"),
        ("1:5,2:6,-3:7", "is not of the form"),
        ("1:5,2:6,3", "is not of the form"),
        ("1:5,2:6,3:7:2", "is not of the form"),
        ("", "is not of the form"),
        ("1:10,2:6,3:7", "reaches outside the volume along z: 1:10 of 0:9; give a region inside 9x8x10 voxels"),
        ("1:5,2:6,12:", "is empty along x: 12:10"),
        ("1:5,6:6,3:7", "is empty along y: 6:6; give an end beyond 6, at most 8"),
    ],
)
def test_invalid_roi_is_refused(text: str, message: str) -> None:
    with pytest.raises(VolumeError, match=message):
        parse_roi(text, (9, 8, 10))


def test_unknown_border_is_refused() -> None:
    with pytest.raises(ValueError, match="'valid' or 'reflect', not 'mirror'"):
        Source(volume((4, 5, 6))[1], roi=None, border="mirror", network=network((1, 1, 1)), allow_nan=False)  # type: ignore[arg-type]
