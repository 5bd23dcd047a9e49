"""Outputs: what is written, and what is refused."""

from __future__ import annotations

import json
import os
import shutil
from collections import namedtuple
from collections.abc import Iterator
from pathlib import Path

import h5py
import numpy as np
import pytest

from tests.support.small_outputs import (
    COLUMNS,
    HEADER,
    JOB,
    PATCH,
    SIZE,
    expected,
    finish,
    furnished,
    interrupt,
    names,
    output,
    stored,
    write,
)
from znnpy.errors import OutputError
from znnpy.patches import Box
from znnpy.volume import store as store_module
from znnpy.volume.hdf5_store import Hdf5Store
from znnpy.volume.output import Output
from znnpy.volume.store import OutputArray


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks that no patch fits, several along every axis."""
    monkeypatch.setattr(store_module, "CHUNK", 6)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return furnished(tmp_path)


@pytest.mark.parametrize("dtype", ["f4", "f2", "u1"])
@pytest.mark.parametrize("maps", [1, 3])
def test_every_voxel_is_written(path: Path, maps: int, dtype: str) -> None:
    finish(path, "new", maps, dtype)
    assert names(path) == {"volume.h5", "out.h5"}
    with h5py.File(path) as file:
        dataset = file["prediction"]
        assert dataset.shape == (SIZE if maps == 1 else (3, *SIZE))
        assert dataset.chunks == ((6, 5, 5) if maps == 1 else (1, 6, 5, 5))
        assert dataset.dtype == np.dtype(dtype)
        assert dataset.compression is None
        np.testing.assert_array_equal(dataset[:].reshape(maps, *SIZE), expected(maps, dtype))
        assert dataset.attrs["offset"].tolist() == [1, 2, 3]
        assert len(dataset.attrs["plan"]) == 100_000
        assert json.loads(dataset.attrs["job"]) == JOB


@pytest.mark.parametrize("maps", [1, 3])
def test_random_boxes_are_written(tmp_path: Path, maps: int) -> None:
    rng = np.random.default_rng(11)
    shape = (maps, *SIZE)
    Hdf5Store.create(tmp_path / "s.h5", [OutputArray(shape)], np.dtype("f4"), {})
    opened = Hdf5Store(tmp_path / "s.h5", [OutputArray(shape)], np.dtype("f4"))
    twin = np.zeros(shape, np.float32)
    for _ in range(40):
        ends = [sorted(rng.choice(n + 1, 2, replace=False)) for n in SIZE]
        box = Box((ends[0][0], ends[1][0], ends[2][0]), (ends[0][1], ends[1][1], ends[2][1]))
        voxels = rng.standard_normal((maps, *box.size)).astype(np.float32)
        opened.write(box, voxels)
        twin[(slice(None), *box.slices)] = voxels
    opened.close()
    np.testing.assert_array_equal(stored(tmp_path / "s.h5").reshape(shape), twin)


def test_wrong_array_is_refused(path: Path) -> None:
    with output(path) as opened:
        with pytest.raises(ValueError, match="is not open for writing"):
            opened.write(COLUMNS[0].steps[0].write, expected())
        opened.begin(HEADER, {})
        with pytest.raises(ValueError, match=r"float64 \(1, 4, 7, 5\) does not fill"):
            opened.write(Box((0, 0, 0), PATCH), np.zeros((1, *PATCH)))
        with pytest.raises(ValueError, match="no column 12 of 12"):
            opened.finish_column(12)
        with pytest.raises(ValueError, match=r"12 of 12 columns of .* are not finished"):
            opened.complete()


def test_output_is_readable_while_it_is_written(path: Path) -> None:
    with output(path) as opened:
        opened.begin(HEADER, {})
        write(opened, range(3), expected())
        seen = stored(path.with_name("out.h5.partial"))
        np.testing.assert_array_equal(
            seen[COLUMNS[2].steps[0].write.slices], expected()[0][COLUMNS[2].steps[0].write.slices]
        )


def test_new_output_refuses_an_existing_file(path: Path) -> None:
    path.write_text("precious")
    with pytest.raises(
        OutputError, match=r"the output .*out\.h5 exists; give overwrite=True to replace it, or another"
    ):
        output(path).__enter__()
    assert path.read_text() == "precious"
    path.unlink()
    interrupt(path, 5)
    message = (
        r"unfinished run left .*out\.h5\.partial with 5 of 12 columns done; continue with resume=True, or start again"
    )
    with pytest.raises(OutputError, match=message):
        output(path).__enter__()


def test_volume_as_output_is_refused(path: Path, tmp_path: Path) -> None:
    volume = tmp_path / "volume.h5"
    (tmp_path / "soft.h5").symlink_to(volume)
    (tmp_path / "hard.h5").hardlink_to(volume)
    (tmp_path / "out.h5.partial").symlink_to(volume)
    for name in ("volume.h5", "soft.h5", "hard.h5", "out.h5"):
        for mode in ("new", "overwrite", "resume"):
            with pytest.raises(OutputError, match=r"is the volume .*volume\.h5 itself; give another name as `out`"):
                output(tmp_path / name, mode).__enter__()
    assert volume.read_bytes() == b"the volume"


@pytest.mark.parametrize("name", ["out.npy", "out", "out.png"])
def test_unwritable_formats_are_refused(path: Path, name: str) -> None:
    message = rf"{name} has suffix '.*', and only \.h5, .*, \.n5, .* and \.map are written; give one"
    with pytest.raises(OutputError, match=message):
        output(path.with_name(name))


def test_unwritable_places_are_refused(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match=r"there is no folder .*nowhere to write out\.h5 in; create it first"):
        output(tmp_path / "nowhere" / "out.h5").__enter__()
    (tmp_path / "folder.h5").mkdir()
    with pytest.raises(OutputError, match="is a folder; give the name of a file in `out`"):
        output(tmp_path / "folder.h5").__enter__()


@pytest.fixture
def nobody() -> Iterator[None]:
    """Root may write everywhere; be somebody else for a while."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


def test_folder_without_permission_is_refused(nobody: None) -> None:
    with pytest.raises(OutputError, match=r"/ may not be written to \(Permission denied\); change its permissions or"):
        output(Path("/out.h5")).__enter__()


def test_second_run_with_the_same_output_is_refused(path: Path) -> None:
    with output(path) as first:
        first.begin(HEADER, {})
        write(first, range(2), expected())
        for mode in ("new", "overwrite", "resume"):
            with pytest.raises(
                OutputError, match=r"another run is writing .*out\.h5 \(it holds .*out\.h5\.lock\); wait"
            ):
                output(path, mode).__enter__()
        write(first, range(2, len(COLUMNS)), expected())
        first.complete()
    assert names(path) == {"volume.h5", "out.h5"}
    np.testing.assert_array_equal(stored(path), expected()[0])


def test_lock_left_by_a_killed_run_does_not_block(path: Path) -> None:
    path.with_name("out.h5.lock").touch()
    finish(path)
    assert names(path) == {"volume.h5", "out.h5"}


Usage = namedtuple("Usage", "total used free")


def test_too_little_disk_space_is_refused_before_the_start(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    needed = (2 * 3 * 2) * (6 * 5 * 5) * 4  # chunks of 6x5x5 float32
    assert OutputArray((1, *SIZE)).nbytes(np.dtype("f4")) == needed
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: Usage(10**9, 10**9, needed - 1))
    message = r"the output needs 7\.03 KiB, which is 1 B more than the 7\.03 KiB that are free in .*; make room"
    with pytest.raises(OutputError, match=message):
        output(path).__enter__()
    assert names(path) == {"volume.h5"}
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: Usage(10**9, 10**9, needed))
    finish(path)


def test_small_columns_share_a_sync(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced = []
    real = Hdf5Store.sync

    def counted(self: Hdf5Store) -> None:
        synced.append(1)
        real(self)

    monkeypatch.setattr(Hdf5Store, "sync", counted)
    finish(path)
    assert len(synced) <= 3  # the first column, the end, and one for a slow second


def test_place_without_locks_is_not_mistaken_for_another_run() -> None:
    with (
        pytest.raises(OutputError, match=r"cannot create /proc/out\.h5\.lock, which keeps a second run away"),
        output(Path("/proc/out.h5")),
    ):
        pass


def test_folder_without_a_name_is_refused() -> None:
    with pytest.raises(OutputError, match=r"the output '\.' is a folder"):
        Output(Path("."), inputs={}, arrays=(OutputArray((1, *SIZE)),), dtype=np.dtype("f4"), mode="new", job={})
