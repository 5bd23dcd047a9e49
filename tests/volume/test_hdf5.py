"""Reading HDF5: every type, every way a file can be unfit, and the sentences that say so."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import numpy.typing as npt
import pytest

from znnpy.errors import VolumeError
from znnpy.patches import Box
from znnpy.planner.memory import READER_BYTES
from znnpy.volume import hdf5, open_volume
from znnpy.volume.base import Volume
from znnpy.volume.hdf5_links import INDEX_BYTES

Store = Callable[..., Path]


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """`store(name=array, ...)`: an HDF5 file with these datasets."""

    def write(**datasets: Any) -> Path:
        path = tmp_path / "volume.h5"
        with h5py.File(path, "w") as file:
            for name, array in datasets.items():
                file[name] = array
        return path

    return write


def voxels(shape: tuple[int, ...], dtype: str) -> npt.NDArray[Any]:
    return np.random.default_rng(20261120).integers(0, 100, shape).astype(dtype)


def whole(volume: Volume) -> npt.NDArray[Any]:
    out = np.full(volume.shape, 77, volume.dtype)
    volume.read(Box((0, 0, 0), volume.size), out)
    return out


DTYPES = ["u1", "i1", "<u2", ">u2", "<i4", ">i4", "<u8", ">i8", "<f2", ">f2", "<f4", ">f4", "<f8", ">f8"]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(5, 7, 9), (2, 5, 7, 9)], ids=str)
def test_every_number_type_is_read(store: Store, dtype: str, shape: tuple[int, ...]) -> None:
    stored = voxels(shape, dtype)
    with open_volume(store(main=stored)) as volume:
        assert volume.size == (5, 7, 9)
        assert volume.shape == (shape[0] if len(shape) == 4 else 1, 5, 7, 9)
        assert volume.dtype == np.dtype(dtype).newbyteorder("=")
        assert volume.dtype.isnative
        np.testing.assert_array_equal(whole(volume), stored.reshape(volume.shape))


def test_box_is_read(store: Store) -> None:
    stored = voxels((3, 11, 13, 17), ">u2")
    with open_volume(store(main=stored)) as volume:
        out = np.zeros((3, 4, 1, 9), np.uint16)
        volume.read(Box((2, 12, 5), (6, 13, 14)), out)
        np.testing.assert_array_equal(out, stored[:, 2:6, 12:13, 5:14])


def test_only_volume_is_found_in_nested_groups(tmp_path: Path) -> None:
    path = tmp_path / "nested.h5"
    stored = voxels((4, 5, 6), "u1")
    with h5py.File(path, "w") as file:
        file["a/b/raw"] = stored
        file["a/table"] = np.zeros((4, 5))
        file["mask"] = np.zeros((4, 5, 6), bool)
        file["note"] = "words"
        file["link"] = h5py.SoftLink("/a/b/raw")
    with open_volume(path) as volume:
        assert volume.dataset == "a/b/raw"
        np.testing.assert_array_equal(whole(volume)[0], stored)
    for name in ("/a/b/raw", "link"):
        with open_volume(path, name) as volume:
            assert volume.dataset == name.strip("/")
            np.testing.assert_array_equal(whole(volume)[0], stored)
    for name in ("a/b", "a/b/raw/deeper"):
        with pytest.raises(VolumeError, match=rf"no dataset '{name}'; it holds .*, note \(scalar object\)"):
            open_volume(path, name)


def test_several_datasets_are_listed(store: Store) -> None:
    path = store(raw=voxels((4, 5, 6), "u1"), labels=voxels((2, 4, 5, 6), "<u8"), table=np.zeros(3))
    message = (
        "holds 2 datasets that could be the volume: labels (2x4x5x6 uint64), raw (4x5x6 uint8); name one with `dataset`"
    )
    with pytest.raises(VolumeError, match=re.escape(message)):
        open_volume(path)
    with open_volume(path, "raw") as volume:
        assert volume.size == (4, 5, 6)


def test_unknown_dataset_is_refused(store: Store) -> None:
    path = store(raw=voxels((4, 5, 6), "u1"))
    with pytest.raises(VolumeError, match=r"has no dataset 'rwa'; it holds raw \(4x5x6 uint8\)"):
        open_volume(path, "rwa")


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (np.zeros((4, 5, 6), bool), "holds bool voxels, .*store it as uint8"),
        (np.zeros((4, 5, 6), "c8"), r"holds complex \(complex64\) voxels, .*such as its magnitude"),
        (np.zeros((4, 5, 6), [("a", "f4")]), r"holds compound \(.*'a'.*\) voxels, .*dataset of its own"),
        (np.zeros((4, 5, 6), "S3"), r"holds text \(\|S3\) voxels, .*another dataset with `dataset`"),
        (np.zeros((4, 5), "u1"), r"has 2 axes \(4, 5\), and a volume has 3 \(z, y, x\) or 4"),
        (np.zeros((2, 1, 3, 4, 5), "u1"), r"has 5 axes \(2, 1, 3, 4, 5\), and a volume has 3"),
        (np.zeros((4, 0, 5), "u1"), r"is empty: \(4, 0, 5\)"),
        (h5py.Empty("f4"), "has no axes, and a volume has 3"),
    ],
    ids=["bool", "complex", "compound", "text", "2D", "5D", "empty", "null"],
)
def test_datasets_other_than_volumes_are_refused(store: Store, array: Any, message: str) -> None:
    path = store(main=array)
    with pytest.raises(VolumeError, match=r"volume\.h5: main " + message):
        open_volume(path, "main")
    with pytest.raises(VolumeError, match=r"volume\.h5: main " + message):
        open_volume(path)
    path = store(main=array, other=array)
    with pytest.raises(VolumeError, match=r"holds no 3D or 4D dataset of numbers but main \("):
        open_volume(path)


def test_file_without_datasets_is_refused(store: Store) -> None:
    with pytest.raises(
        VolumeError, match="holds no 3D or 4D dataset of numbers and no other dataset; store the volume as"
    ):
        open_volume(store())


def test_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(VolumeError, match=r"there is no file .*nowhere\.h5; check the path"):
        open_volume(tmp_path / "nowhere.h5")


def test_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(VolumeError, match="is a folder, not an HDF5 file"):
        open_volume(tmp_path)


def test_file_of_another_format_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "volume.h5"
    path.write_text("just words")
    with pytest.raises(VolumeError, match=r"is not an HDF5 file \(10 bytes without its signature\); convert it"):
        open_volume(path)


def test_cut_file_is_refused(store: Store) -> None:
    path = store(main=voxels((50, 50, 50), "<f8"))
    size = path.stat().st_size
    os.truncate(path, 100_000)
    with pytest.raises(VolumeError, match=f"is cut short: 100000 bytes of the {size} its header promises; copy it"):
        open_volume(path)


def test_damaged_chunk_is_distinguished_from_a_damaged_file(tmp_path: Path) -> None:
    path = tmp_path / "volume.h5"
    with h5py.File(path, "w") as file:
        made = file.create_dataset("main", data=voxels((16, 16, 16), "u1"), chunks=(8, 8, 8), compression="gzip")
        where = made.id.get_chunk_info_by_coord((8, 0, 0))
    with path.open("r+b") as raw:
        raw.seek(where.byte_offset)
        raw.write(b"\0" * where.size)
    with open_volume(path) as volume:
        good = np.zeros((1, 8, 16, 16), np.uint8)
        volume.read(Box((0, 0, 0), (8, 16, 16)), good)
        with pytest.raises(VolumeError, match=r"cannot be read at \(z, y, x\) = \(8, 0, 0\) to \(9, 1, 1\): .*damaged"):
            volume.read(Box((8, 0, 0), (9, 1, 1)), np.zeros((1, 1, 1, 1), np.uint8))


def test_virtual_dataset_without_its_files_is_refused(tmp_path: Path) -> None:
    layout = h5py.VirtualLayout((4, 5, 6), "u2")
    stored = voxels((4, 5, 6), "u2")
    for z in range(4):
        with h5py.File(tmp_path / f"plane{z}.h5", "w") as file:
            file["plane"] = stored[z]
        layout[z] = h5py.VirtualSource(f"plane{z}.h5", "plane", (5, 6))
    path = tmp_path / "volume.h5"
    with h5py.File(path, "w") as file:
        file.create_virtual_dataset("main", layout)
    with open_volume(path) as volume:
        np.testing.assert_array_equal(whole(volume)[0], stored)
    for z in (3, 2):
        (tmp_path / f"plane{z}.h5").unlink()
    message = (
        r"main: voxels \(z, y, x\) = \(2, 0, 0\) to \(2, 4, 5\) are missing: the source file plane2\.h5 is missing; "
        r"and 1 other regions are missing; put it where it should be, or give `fill_missing` with the value to read"
    )
    with pytest.raises(VolumeError, match=message):
        open_volume(path)


def test_unreadable_file_is_refused(store: Store) -> None:
    path = store(main=voxels((4, 5, 6), "u1"))
    program = """
import os, sys
from pathlib import Path
from znnpy.errors import VolumeError
from znnpy.volume import hdf5
from znnpy.volume.base import Reading
from znnpy.volume.location import Location
os.chdir(Path(sys.argv[1]).parent)
if os.geteuid() == 0:
    os.seteuid(65534)  # root may read everything
try:
    hdf5.open_volume(Location(Path(sys.argv[1]).name), Reading())
except VolumeError as error:
    print(error)
"""
    path.chmod(0)
    done = subprocess.run([sys.executable, "-c", program, str(path)], check=True, capture_output=True, text=True)
    assert done.stdout == "volume.h5 may not be read by this user (Permission denied); change its permissions\n"


def test_file_locked_by_a_writer_is_refused(store: Store) -> None:
    path = store(main=voxels((4, 5, 6), "u1"))
    holder = "import h5py, sys; f = h5py.File(sys.argv[1], 'r+'); print('open', flush=True); sys.stdin.read()"
    with subprocess.Popen(
        [sys.executable, "-c", holder, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as program:
        assert program.stdout is not None
        assert program.stdout.readline() == b"open\n"
        with pytest.raises(VolumeError, match=r"is locked: another program .*\(errno 11\); close that program, or set"):
            open_volume(path)
        program.communicate()
    with open_volume(path) as volume:
        assert volume.size == (4, 5, 6)


FILTERED = """
import sys, h5py, hdf5plugin, numpy as np
with h5py.File(sys.argv[1], "w") as file:
    data = np.arange(1000, dtype="u2").reshape(10, 10, 10)
    file.create_dataset("main", data=data, chunks=(5, 5, 5), **hdf5plugin.Zstd())
"""
WITHOUT_PLUGIN = """
import sys
from pathlib import Path
sys.modules["hdf5plugin"] = None  # as if it were not installed
from znnpy.errors import VolumeError
from znnpy.volume import hdf5
from znnpy.volume.base import Reading
from znnpy.volume.location import Location
hdf5.find_spec = lambda name: None
try:
    hdf5.open_volume(Location(sys.argv[1]), Reading())
except VolumeError as error:
    print(error)
"""
WITH_PLUGIN = """
import sys
from pathlib import Path
import numpy as np
from znnpy.patches import Box
from znnpy.planner.memory import READER_BYTES
from znnpy.volume import hdf5
from znnpy.volume.base import Reading
from znnpy.volume.location import Location
assert "hdf5plugin" not in sys.modules
with hdf5.open_volume(Location(sys.argv[1]), Reading()) as volume:
    out = np.zeros(volume.shape, volume.dtype)
    volume.read(Box((0, 0, 0), volume.size), out)
    print((out.ravel() == np.arange(1000)).all())
"""


@pytest.mark.slow
def test_missing_filter_is_named(tmp_path: Path) -> None:
    pytest.importorskip("hdf5plugin")
    path = tmp_path / "volume.h5"

    def python(program: str) -> str:
        done = subprocess.run([sys.executable, "-c", program, str(path)], check=True, capture_output=True, text=True)
        return done.stdout

    python(FILTERED)
    message = python(WITHOUT_PLUGIN)
    assert "main is compressed with HDF5 filter 32015 (HDF5 zstd filter), which is not installed here" in message
    assert "`pip install 'hdf5plugin>=5.0'`" in message
    assert python(WITH_PLUGIN) == "True\n"


def test_large_chunks_are_counted(tmp_path: Path) -> None:
    path = tmp_path / "volume.h5"
    with h5py.File(path, "w") as file:
        file.create_dataset("small", (256, 256, 256), "u1", chunks=(64, 64, 64))
        file.create_dataset("large", (256, 512, 512), "u1", chunks=(256, 512, 512), compression="lzf")
        file.create_dataset("plain", (256, 512, 512), "u1", chunks=(256, 512, 512))
    with open_volume(path, "small") as volume:
        assert volume.extra_bytes == 0
    with open_volume(path, "plain") as volume:
        assert volume.extra_bytes == 0
    with open_volume(path, "large") as volume:
        assert volume.extra_bytes == 4 * 2**26 + INDEX_BYTES + hdf5.SPARE_BYTES - READER_BYTES


def test_identity_depends_on_the_content_and_not_on_the_path(tmp_path: Path, store: Store) -> None:
    path = store(main=voxels((30, 20, 25), "u1"))
    with open_volume(path) as volume:
        before = volume.identity()
    moved = path.rename(tmp_path / "moved.h5")
    with open_volume(moved) as volume:
        assert volume.identity() == before
    with h5py.File(moved, "r+") as file:
        file["main"][15, 10, 12] ^= 1
    os.utime(moved, ns=(before["mtime_ns"], before["mtime_ns"]))
    with open_volume(moved) as volume:
        after = volume.identity()
    assert {key for key in before if before[key] != after[key]} == {"samples_sha256"}


def test_npy_file_is_opened(tmp_path: Path) -> None:
    stored = voxels((2, 4, 5, 6), ">f4")
    np.save(tmp_path / "volume.npy", stored)
    with open_volume(tmp_path / "volume.npy") as volume:
        np.testing.assert_array_equal(whole(volume), stored)
        assert volume.identity()["bytes"] == (tmp_path / "volume.npy").stat().st_size
    with pytest.raises(VolumeError, match="holds one array, so there is no dataset 'main'"):
        open_volume(tmp_path / "volume.npy", "main")
    with pytest.raises(VolumeError, match="there is no file"):
        open_volume(tmp_path / "none.npy")
    np.save(tmp_path / "pickled.npy", np.array([{"a": 1}], dtype=object), allow_pickle=True)
    with pytest.raises(VolumeError, match=r"pickled\.npy holds object \(object\) voxels, .*; store it as numbers"):
        open_volume(tmp_path / "pickled.npy")


def test_file_opened_by_the_caller_is_read(tmp_path: Path) -> None:
    """Other code of this process may have the file open before and while the volume is; closing releases the file."""
    path = tmp_path / "volume.h5"
    voxels = np.arange(60, dtype=np.uint8).reshape(3, 4, 5)
    with h5py.File(path, "w") as file:
        file["raw"] = voxels
    with h5py.File(path, "r") as file, open_volume(path) as volume:
        out = np.empty((1, 3, 4, 5), np.uint8)
        volume.read(Box((0, 0, 0), (3, 4, 5)), out)
        assert (out[0] == voxels).all()
        assert (file["raw"][:] == voxels).all()
    with open_volume(path), h5py.File(path, "r") as file:
        assert (file["raw"][:] == voxels).all()
    with h5py.File(path, "r+") as file:
        file["raw"][0] = 7
