"""Voxels of HDF5 datasets that lie in other files: those that are missing are named, and circles are found first."""

from __future__ import annotations

import os
import re
import resource
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import numpy.typing as npt
import pytest

from znnpy.errors import VolumeError
from znnpy.patches import Box
from znnpy.volume import open_volume
from znnpy.volume.base import Chunks, MissingVoxels, Volume
from znnpy.volume.hdf5_links import open_file

UNLIMITED = h5py.h5s.UNLIMITED
VOXELS = np.arange(1, 121, dtype=np.uint8).reshape(4, 5, 6)


def whole(volume: Volume) -> npt.NDArray[Any]:
    out: npt.NDArray[Any] = np.full(volume.shape[1:], 77, volume.dtype)
    volume.read(Box((0, 0, 0), volume.size), out[np.newaxis])
    return out


def virtual(path: Path, shape: tuple[int, ...], *parts: tuple[Any, h5py.VirtualSource], name: str = "main") -> Path:
    layout = h5py.VirtualLayout(shape, "u1")
    for where, source in parts:
        layout[where] = source
    with h5py.File(path, "a") as file:
        file.create_virtual_dataset(name, layout, fillvalue=9)
    return path


def series(path: Path, name: str) -> Path:
    """Planes of a virtual dataset that grows, of files `name` with %b for their number."""
    with h5py.File(path, "w") as file:
        made = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        space = h5py.h5s.create_simple((4, 5, 6), (UNLIMITED, 5, 6))
        space.select_hyperslab((0, 0, 0), (UNLIMITED, 1, 1), stride=(1, 5, 6), block=(1, 5, 6))
        made.set_virtual(space, name.encode(), b"a", h5py.h5s.create_simple((1, 5, 6)))
        h5py.h5d.create(file.id, b"main", h5py.h5t.NATIVE_UINT8, space, made)
    return path


def stored(path: Path, array: npt.NDArray[Any]) -> Path:
    with h5py.File(path, "w") as file:
        file["a"] = array
    return path


def refused(path: Path, message: str, fill: float | None = None) -> None:
    with pytest.raises(VolumeError, match=message):
        open_volume(path, "main", MissingVoxels(fill))


def test_missing_file_or_dataset_is_named_or_filled(tmp_path: Path) -> None:
    stored(tmp_path / "there.h5", VOXELS[:2])
    parts = [
        (np.s_[:2], h5py.VirtualSource("there.h5", "a", (2, 5, 6))),
        (np.s_[2, :, 1:4], h5py.VirtualSource("there.h5", "b", (5, 3))),
        (np.s_[3], h5py.VirtualSource("gone.h5", "a", (5, 6))),
    ]
    path = virtual(tmp_path / "v.h5", (4, 5, 6), *parts)
    refused(
        path,
        r"v\.h5: main: voxels \(z, y, x\) = \(2, 0, 1\) to \(2, 4, 3\) are missing: the source file there\.h5 holds no "
        r"dataset b; and 1 other regions are missing; put it where it should be, or give `fill_missing` with the value",
    )
    expected = np.full((4, 5, 6), 9, np.uint8)  # the fill value where nothing is mapped
    expected[:2] = VOXELS[:2]
    expected[2, :, 1:4] = expected[3] = 50
    with open_volume(path, "main", MissingVoxels(50)) as volume:
        np.testing.assert_array_equal(whole(volume), expected)
        part = np.zeros((1, 2, 3, 2), np.uint8)
        volume.read(Box((1, 1, 2), (3, 4, 4)), part)
        np.testing.assert_array_equal(part[0], expected[1:3, 1:4, 2:4])
    for value in (0.5, 300, -1, np.nan):
        refused(path, rf"holds uint8 voxels, which cannot hold {value}; give another `fill_missing`", value)


def test_missing_voxels_of_a_nested_source_are_found(tmp_path: Path) -> None:
    stored(tmp_path / "there.h5", VOXELS)
    virtual(
        tmp_path / "inner.h5",
        (4, 5, 6),
        (np.s_[:3], h5py.VirtualSource("there.h5", "a", (4, 5, 6))[:3]),
        (np.s_[3], h5py.VirtualSource("gone.h5", "a", (5, 6))),
    )
    inner = h5py.VirtualSource("inner.h5", "main", (4, 5, 6))
    path = virtual(tmp_path / "v.h5", (8, 5, 6), (np.s_[3:6], inner[1:4]))
    refused(
        path, r"voxels \(z, y, x\) = \(5, 0, 0\) to \(5, 4, 5\) are missing: the source file gone\.h5 is missing; put"
    )
    with open_volume(path, "main", MissingVoxels(70)) as volume:
        expected = np.full((8, 5, 6), 9, np.uint8)
        expected[3:5], expected[5] = VOXELS[1:3], 70
        np.testing.assert_array_equal(whole(volume), expected)
    path = virtual(tmp_path / "whole.h5", (4, 5, 6), (np.s_[:3], inner[:3]))
    with open_volume(path) as volume:  # what is missing of its source is not mapped
        np.testing.assert_array_equal(whole(volume)[:3], VOXELS[:3])
    path = virtual(tmp_path / "planes.h5", (7, 5, 6), (np.s_[::2], inner))
    refused(
        path,
        r"\(0, 0, 0\) to \(6, 4, 5\) are missing: the source file gone\.h5 is missing; put it where it should be$",
        1,
    )


def test_mapping_beyond_the_source_is_refused(tmp_path: Path) -> None:
    stored(tmp_path / "there.h5", VOXELS[:2])
    source = h5py.VirtualSource("there.h5", "a", (4, 5, 6))
    message = r"the source dataset a has shape \(2, 5, 6\), and more of it is mapped; put it where it should be$"
    refused(virtual(tmp_path / "all.h5", (4, 5, 6), (np.s_[:], source)), message, 1)
    refused(virtual(tmp_path / "part.h5", (4, 5, 6), (np.s_[1:4], source[:3])), message, 1)


@pytest.mark.parametrize("lost", [0, 2, 3])
def test_series_of_files_with_a_gap_is_refused(tmp_path: Path, lost: int) -> None:
    """HDF5 ends the dataset before the first file that is missing."""
    for number in range(4):
        if number != lost:
            stored(tmp_path / f"p{number}.h5", VOXELS[number : number + 1])
    path = series(tmp_path / "v.h5", "p%b.h5")
    message = rf"= \({lost}, 0, 0\) to \(3, 4, 5\) are missing: the source file p{lost}\.h5 is missing; put it"
    refused(path, message if lost else r"is empty: \(0, 5, 6\)", 1)
    stored(tmp_path / f"p{lost}.h5", VOXELS[lost : lost + 1])
    with open_volume(path) as volume:
        np.testing.assert_array_equal(whole(volume), VOXELS)


@pytest.mark.parametrize("kept", [None, 0, 70, 119])
def test_missing_external_files_are_named(tmp_path: Path, kept: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "v.h5"
    Path("one.raw").write_bytes(b"..." + VOXELS.tobytes()[:45])
    Path("two.raw").write_bytes(VOXELS.tobytes()[45:])
    with h5py.File(path, "w") as file:
        file.create_dataset("main", (4, 5, 6), "u1", external=[("one.raw", 3, 45), ("two.raw", 0, 75)])
    with open_volume(path) as volume:
        np.testing.assert_array_equal(whole(volume), VOXELS)
    if kept is None:
        Path("one.raw").unlink()
        first, why, begin, end = r"\(0, 0, 0\)", r"one\.raw is missing", 0, 45
    elif kept == 0:
        Path("one.raw").write_bytes(b"")
        first, why, begin, end = r"\(0, 0, 0\)", "one.raw is 0 bytes long, and 48 are needed", 0, 45
    else:
        os.truncate("two.raw", kept - 45)
        at = np.unravel_index(kept, VOXELS.shape)
        first = re.escape(str(tuple(map(int, at))))
        why, begin, end = f"two.raw is {kept - 45} bytes long, and 75 are needed", kept, 120
    refused(path, rf"voxels \(z, y, x\) = {first} to .* are missing: the external file {why}; .*`fill_missing`")
    expected = VOXELS.copy()
    expected.reshape(-1)[begin:end] = 200
    with open_volume(path, None, MissingVoxels(200)) as volume:
        np.testing.assert_array_equal(whole(volume), expected)


def circle(path: Path, kind: str) -> Path:
    """Write a virtual dataset that is its own source."""
    if kind == "series":
        return series(path, ".")
    if kind == "by name":
        return virtual(path, (4, 5, 6), (np.s_[:], h5py.VirtualSource(path.name, "main", (4, 5, 6))))
    other = path.with_name("other.h5")
    virtual(other, (4, 5, 6), (np.s_[:], h5py.VirtualSource(path.name, "main", (4, 5, 6))))
    return virtual(path, (4, 5, 6), (np.s_[:], h5py.VirtualSource(other.name, "main", (4, 5, 6))))


@pytest.mark.slow
@pytest.mark.parametrize("named", [True, False], ids=["named", "found"])
@pytest.mark.parametrize("kind", ["by name", "through another"])
def test_cycles_are_found_before_a_read(tmp_path: Path, kind: str, named: bool) -> None:
    """Read the dataset in a child process, which HDF5 would crash without the check."""
    path = circle(tmp_path / "v.h5", kind)
    arguments = ["--dataset", "main"] if named else []
    command = [sys.executable, "-m", "znnpy", "infer", str(path), *arguments, "--out", str(tmp_path / "out.h5")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (1, "")
    assert re.fullmatch(r"Error: .*v\.h5: a virtual dataset is its own source, which no .*\n", done.stderr), done.stderr


def test_sources_already_open_are_accepted(tmp_path: Path) -> None:
    stored(tmp_path / "there.h5", VOXELS)
    path = virtual(tmp_path / "v.h5", (4, 5, 6), (np.s_[:], h5py.VirtualSource("there.h5", "a", (4, 5, 6))))
    with open_volume(path) as first, open_volume(path) as second:
        for _ in range(2):
            np.testing.assert_array_equal(whole(first), VOXELS)
            np.testing.assert_array_equal(whole(second), VOXELS)
    with h5py.File(path), h5py.File(tmp_path / "there.h5"), open_volume(path) as volume:
        np.testing.assert_array_equal(whole(volume), VOXELS)
    strong = h5py.h5f.CLOSE_STRONG
    with closing(open_file(path, strong)), open_volume(path) as volume:
        np.testing.assert_array_equal(whole(volume), VOXELS)
    with closing(open_file(tmp_path / "there.h5", strong)):  # HDF5 would read its fill value
        refused(path, r"there\.h5 is a source of a virtual dataset and open in this process: close it", 7)
    (tmp_path / "there.h5").write_bytes(b"rubbish")
    refused(path, r"there\.h5 is a source of a virtual dataset and cannot be read as HDF5: .*; copy it again", 7)


def test_pipes_are_not_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    os.mkfifo("pipe")
    message = r"refers to .*pipe, which is a pipe, a socket or a device, not a regular file; put the intended file"
    refused(virtual(tmp_path / "v.h5", (4, 5, 6), (np.s_[:], h5py.VirtualSource("pipe", "a", (4, 5, 6)))), message, 1)
    with h5py.File("e.h5", "w") as file:
        file.create_dataset("main", (4, 5, 6), "u1", external=[("pipe", 0, 120)])
    refused(tmp_path / "e.h5", message, 1)
    with h5py.File("l.h5", "w") as file:
        file["main"] = h5py.ExternalLink("pipe", "/a")
    refused(tmp_path / "l.h5", message)
    refused(tmp_path / "pipe", "pipe cannot be read: it is a pipe, a socket or a device")


def test_links_to_sources_are_followed(tmp_path: Path) -> None:
    stored(tmp_path / "other.h5", VOXELS)
    with h5py.File(tmp_path / "v.h5", "w") as file:
        file["loop"], file["back"] = h5py.SoftLink("/back"), h5py.SoftLink("loop")
        file["deep/main"] = h5py.SoftLink("../deep/./beside")
        file["deep/beside"] = h5py.ExternalLink("other.h5", "/a")
        file["nothing"] = h5py.ExternalLink("other.h5", "/b")
        file["around"] = h5py.ExternalLink("v.h5", "/around")
        file["nowhere"] = h5py.ExternalLink("gone.h5", "/a")
    path = tmp_path / "v.h5"
    with pytest.raises(VolumeError, match=r"v\.h5: the links of loop form a cycle; name a dataset that is not a"):
        open_volume(path, "loop")
    with open_volume(path, "deep/beside") as volume:
        np.testing.assert_array_equal(whole(volume), VOXELS)
    with pytest.raises(VolumeError, match=r"link nowhere of v\.h5 leads to the file gone\.h5, which is missing; put"):
        open_volume(path, "nowhere")
    with pytest.raises(VolumeError, match=r"link nothing of v\.h5 leads to /b of other\.h5, which is missing; put it"):
        open_volume(path, "nothing")
    with pytest.raises(VolumeError, match=r"v\.h5: the links of /around form a cycle; name a dataset"):
        open_volume(path, "around")


def test_name_outside_utf8_is_read(tmp_path: Path) -> None:
    path = tmp_path / "v.h5"
    with h5py.File(path, "w") as file:
        space = h5py.h5s.create_simple((4, 5, 6))
        h5py.h5d.create(file.id, b"caf\xe9", h5py.h5t.NATIVE_UINT8, space).write(space, space, VOXELS)
    for name in (None, "caf\\xe9", os.fsdecode(b"caf\xe9")):
        with open_volume(path, name) as volume:
            assert volume.dataset == "caf\\xe9"
            np.testing.assert_array_equal(whole(volume), VOXELS)


def test_more_files_than_the_process_may_open_are_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """HDF5 reads the fill value from a source that it cannot open."""
    for number in range(2):
        stored(tmp_path / f"p{number}.h5", VOXELS[number])
    parts = [(np.s_[number], h5py.VirtualSource(f"p{number}.h5", "a", (5, 6))) for number in range(2)]
    path = virtual(tmp_path / "v.h5", (2, 5, 6), *parts)
    monkeypatch.setattr(resource, "getrlimit", lambda which: (200, 4096))
    refused(path, r"v\.h5 is made of 2 files, and this process may have 200 open; allow more with `ulimit -n 258`")


def half_written(path: Path, **made: Any) -> Path:
    """Write a source of two chunks, the second of which was never written."""
    with h5py.File(path, "w") as file:
        file.create_dataset("a", (4, 5, 6), "u1", chunks=(2, 5, 6), **made)[:2] = VOXELS[:2]
    return path


def test_unwritten_chunks_of_sources_are_counted_or_refused(tmp_path: Path) -> None:
    part = h5py.VirtualSource(half_written(tmp_path / "s.h5", fillvalue=3), "a", (4, 5, 6))
    inner = virtual(tmp_path / "i.h5", (4, 5, 6), (np.s_[:], part))
    path = virtual(tmp_path / "v.h5", (4, 5, 6), (np.s_[:], h5py.VirtualSource(inner, "main", (4, 5, 6))))
    with open_volume(path) as volume:
        volume.expect(Box((0, 0, 0), (3, 5, 6)))
        assert volume.chunks == Chunks(30, 90, "voxels")
        assert (whole(volume)[2:] == 3).all()
    with open_volume(path, missing_voxels=MissingVoxels(chunks="error")) as volume:
        volume.expect(Box((0, 0, 0), (2, 5, 6)))
        with pytest.raises(VolumeError, match=r"v\.h5: main: 60 of 120 voxels were never written: chunks of the sour"):
            volume.expect(Box((0, 0, 0), (4, 5, 6)))


def test_unwritten_source_without_fill_value_is_refused(tmp_path: Path) -> None:
    part = h5py.VirtualSource(half_written(tmp_path / "s.h5", fill_time="never"), "a", (4, 5, 6))
    with open_volume(virtual(tmp_path / "v.h5", (4, 5, 6), (np.s_[:], part))) as volume:
        volume.expect(Box((0, 0, 0), (2, 5, 6)))
        with pytest.raises(VolumeError, match=r"60 of 120 voxels were never written, and .* no fill value"):
            volume.expect(Box((0, 0, 0), (4, 5, 6)))
        assert not whole(volume)[2:].any()  # and not what memory held before


def test_unmapped_voxels_are_counted_or_refused(tmp_path: Path) -> None:
    source = stored(tmp_path / "s.h5", VOXELS[:1])
    part = h5py.VirtualSource(source, "a", (1, 5, 6))
    path = virtual(tmp_path / "v.h5", (4, 5, 6), (np.s_[1:2], part), (np.s_[3:4], part))
    with open_volume(path) as volume:
        volume.expect(Box((0, 0, 0), (4, 5, 6)))
        assert volume.chunks == Chunks(60, 120, "voxels")
    with open_volume(path, missing_voxels=MissingVoxels(chunks="error")) as volume:
        volume.expect(Box((1, 0, 0), (2, 5, 6)))
        with pytest.raises(
            VolumeError, match=r"30 of 90 voxels were never written: no source is mapped to \(z, y, x\)"
        ):
            volume.expect(Box((1, 0, 0), (4, 5, 6)))
