"""Coarser levels are means of 2x2x2 voxels, of fewer at the ends."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from tests.support.small_outputs import COLUMNS, HEADER, JOB, SIZE, expected, write
from tests.support.stored_outputs import stored
from znnpy.errors import OutputError
from znnpy.volume import coarser_levels
from znnpy.volume import store as store_module
from znnpy.volume.chunked_formats import levels_of
from znnpy.volume.coarser_levels import mean
from znnpy.volume.output import Output
from znnpy.volume.store import OutputArray, Storage


def by_definition(voxels: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
    """Return the mean of every block of up to 2x2x2 voxels, one by one."""
    z, y, x = (-(-size // 2) for size in voxels.shape[-3:])
    found = np.empty((*voxels.shape[:-3], z, y, x))
    for k, j, i in np.ndindex(z, y, x):
        block = voxels[..., 2 * k : 2 * k + 2, 2 * j : 2 * j + 2, 2 * i : 2 * i + 2].astype(np.float64)
        found[..., k, j, i] = block.mean((-3, -2, -1))
    return found


@pytest.mark.parametrize("shape", [(1, 4, 6, 8), (3, 5, 7, 9), (2, 1, 1, 1), (1, 1, 4, 3)])
def test_means_include_the_ends(shape: tuple[int, ...]) -> None:
    voxels = np.random.default_rng(1).standard_normal(shape).astype(np.float32)
    np.testing.assert_allclose(mean(voxels), by_definition(voxels), rtol=1e-5, atol=1e-6)


def test_whole_numbers_are_rounded_and_floats_keep_their_type() -> None:
    voxels = np.random.default_rng(1).integers(0, 256, (1, 5, 6, 7), np.uint8)
    assert mean(voxels).dtype == np.uint8
    np.testing.assert_array_equal(mean(voxels), np.rint(by_definition(voxels)))
    assert (mean(np.full((1, 3, 3, 3), 255, np.uint8)) == 255).all()
    half = np.full((1, 2, 2, 2), 60000, np.float16)  # their sum is no float16
    assert mean(half).dtype == np.float16
    assert mean(half).item() == 60000
    assert np.isnan(mean(np.full((1, 2, 2, 2), np.nan, np.float32))).all()


@pytest.mark.parametrize(
    ("size", "asked", "levels"), [((8, 6, 6), 9, 3), ((9, 1, 1), 9, 4), ((1, 1, 1), 5, 0), ((500, 9, 9), 2, 2)]
)
def test_levels_end_at_one_voxel(size: tuple[int, int, int], asked: int, levels: int) -> None:
    assert levels_of(size, asked) == levels


FORMATS = [
    ("out.zarr", Storage(multiscale=3)),
    ("out.zarr", Storage("zarr2", multiscale=3)),
    ("out.zarr", Storage(sharded=True, multiscale=3)),
    ("out.n5", Storage(multiscale=3)),
    ("out.precomputed", Storage(multiscale=3)),
]


@pytest.mark.parametrize("maps", [1, 2])
@pytest.mark.parametrize("most", [8, 2**18])  # values of a block
@pytest.mark.parametrize(("name", "storage"), FORMATS, ids=str)
def test_every_format_holds_the_levels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, storage: Storage, maps: int, most: int
) -> None:
    monkeypatch.setattr(store_module, "CHUNK", 6)
    monkeypatch.setattr(coarser_levels, "MOST_VALUES", most)
    path = tmp_path / name
    arrays = (OutputArray((maps, *SIZE)),)
    with Output(path, inputs={}, arrays=arrays, dtype=np.dtype("u1"), mode="new", job=JOB, storage=storage) as opened:
        opened.begin(HEADER, {}, [COLUMNS])
        write(opened, range(len(COLUMNS)), expected(maps, "u1"))
        opened.complete()
        assert opened.rewritten == 0
    finer = expected(maps, "u1") if maps > 1 else expected(maps, "u1")[0]
    np.testing.assert_array_equal(stored(path), finer)
    for level in (1, 2, 3):
        finer = np.rint(by_definition(finer)).astype(np.uint8)
        np.testing.assert_array_equal(stored(path, level=level), finer, err_msg=str(level))


def test_hdf5_refuses_levels_and_shards(tmp_path: Path) -> None:
    for word, storage in (("multiscale", Storage(multiscale=2)), ("sharded", Storage(sharded=True))):
        with pytest.raises(
            OutputError, match=rf"HDF5 outputs have no .*; leave out `{word}`, or give a name that ends"
        ):
            Output(
                tmp_path / "out.h5",
                inputs={},
                arrays=(OutputArray((1, *SIZE)),),
                dtype=np.dtype("f4"),
                mode="new",
                job=JOB,
                storage=storage,
            )
