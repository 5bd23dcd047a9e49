"""Outputs of every chunked format, read by other libraries: voxels, positions and metadata."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorstore
import zarr

from tests.support.small_outputs import COLUMNS, HEADER, JOB, SIZE, expected, write
from tests.support.stored_outputs import stored
from znnpy.errors import OutputError, ResumeError
from znnpy.volume import column_record
from znnpy.volume import store as store_module
from znnpy.volume.journal import Journal, journal_path
from znnpy.volume.location import Location
from znnpy.volume.output import Output
from znnpy.volume.registry import store_for
from znnpy.volume.space import Space
from znnpy.volume.store import OutputArray, Storage

SPACE = Space((40.0, 4.0, 8.0), (80.0, 8.0, 24.0), ("nanometer",) * 3)
OWN = {"voxel_offset": np.array([2, 2, 3]), "offset": np.array([2, 2, 3])}
STORAGES = [
    ("out.zarr", Storage()),
    ("out.zarr", Storage("zarr2")),
    ("out.zarr", Storage(sharded=True)),
    ("out.n5", Storage()),
    ("out.precomputed", Storage()),
    ("out", Storage("precomputed")),
]


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "CHUNK", 6)


def output(
    path: Path, storage: Storage, maps: int = 1, dtype: str = "f4", space: Space | None = SPACE, mode: Any = "new"
) -> Output:
    arrays = (OutputArray((maps, *SIZE), "", OWN, space),)
    return Output(path, inputs={}, arrays=arrays, dtype=np.dtype(dtype), mode=mode, job=JOB, storage=storage)


def made(path: Path, storage: Storage, **how: Any) -> Path:
    maps, dtype = how.get("maps", 1), how.get("dtype", "f4")
    with output(path, storage, **how) as opened:
        opened.begin(HEADER, {"network": "net"}, [COLUMNS])
        write(opened, range(len(COLUMNS)), expected(maps, dtype))
        opened.complete()
    return path


@pytest.mark.parametrize("dtype", ["u1", "f2", "f4"])
@pytest.mark.parametrize("maps", [1, 3])
@pytest.mark.parametrize(("name", "storage"), STORAGES, ids=str)
def test_voxels_are_read_back(tmp_path: Path, name: str, storage: Storage, maps: int, dtype: str) -> None:
    path = tmp_path / name
    if dtype == "f2" and not name.endswith(".zarr"):
        with pytest.raises(OutputError, match=r"has no float16; choose output_dtype='float32'"):
            output(path, storage, maps, dtype)
        return
    found = stored(made(path, storage, maps=maps, dtype=dtype))
    assert found.dtype == np.dtype(dtype)
    np.testing.assert_array_equal(found.reshape(maps, *SIZE), expected(maps, dtype))
    assert {item.name for item in tmp_path.iterdir()} == {name}


@pytest.mark.parametrize(("name", "storage"), STORAGES, ids=str)
def test_zeros_are_read_back(tmp_path: Path, name: str, storage: Storage) -> None:
    """Zarr and N5 leave chunks of zeros out; readers of precomputed take missing ones for an error."""
    path = tmp_path / name
    with output(path, storage) as opened:
        opened.begin(HEADER, {}, [COLUMNS])
        write(opened, range(len(COLUMNS)), np.zeros((1, *SIZE), np.float32))
        opened.complete()
    assert not stored(path).any()
    files = [file for file in path.rglob("*") if "-" in file.name]
    assert len(files) == (12 if "precomputed" in (storage.prefix, path.suffix[1:]) else 0)


@pytest.mark.parametrize("prefix", [None, "zarr2"])
@pytest.mark.parametrize("maps", [1, 2])
def test_ome_metadata_are_valid(tmp_path: Path, maps: int, prefix: str | None) -> None:
    path = made(tmp_path / "out.zarr", Storage(prefix, multiscale=2), maps=maps)
    group: Any = zarr.open_group(path, mode="r")
    said = dict(group.attrs) if prefix else group.attrs["ome"]
    (image,) = said["multiscales"]
    version = image["version"] if prefix else said["version"]
    assert version == ("0.4" if prefix else "0.5")
    assert [axis["name"] for axis in image["axes"]] == ["c"] * (maps > 1) + ["z", "y", "x"]
    assert [one["path"] for one in image["datasets"]] == ["0", "1", "2"]
    lead = [1.0] * (maps > 1)
    for level, one in enumerate(image["datasets"]):
        scale, translation = one["coordinateTransformations"]
        factor = 2.0**level
        assert scale["scale"] == lead + [factor * size for size in SPACE.scale]
        shift = (factor - 1) / 2
        assert translation["translation"][-3:] == [
            a + shift * b for a, b in zip(SPACE.translation, SPACE.scale, strict=True)
        ]
    assert len(said["omero"]["channels"]) == maps
    models = pytest.importorskip("ome_zarr_models")
    (models.v04 if prefix else models.v05).Image.from_zarr(group)


@pytest.mark.parametrize(("name", "prefix"), [("out.zarr", None), ("out.zarr", "zarr2")])
def test_offset_is_in_units_and_voxel_offset_in_voxels(tmp_path: Path, name: str, prefix: str | None) -> None:
    """Programs that know `resolution` read `offset` in units, of the array itself."""
    group: Any = zarr.open_group(made(tmp_path / name, Storage(prefix)), mode="r")
    for node in (group, group["0"]):
        assert node.attrs["voxel_offset"] == [2, 2, 3]
        assert node.attrs["offset"] == list(SPACE.translation)
        assert node.attrs["resolution"] == list(SPACE.scale)


def test_offset_is_in_voxels_where_no_resolution_is_known(tmp_path: Path) -> None:
    group: Any = zarr.open_group(made(tmp_path / "out.zarr", Storage(), space=None), mode="r")
    assert group["0"].attrs["offset"] == group["0"].attrs["voxel_offset"] == [2, 2, 3]
    assert "resolution" not in group["0"].attrs


@pytest.mark.parametrize("maps", [1, 2])
def test_n5_has_its_vectors_in_the_order_of_its_readers(tmp_path: Path, maps: int) -> None:
    path = made(tmp_path / "out.n5", Storage(multiscale=1), maps=maps)
    lone = maps == 1
    for file in (path / "attributes.json", path / "s0" / "attributes.json"):
        said = json.loads(file.read_text())
        assert said["axes"] == ["x", "y", "z"] if lone else ["x", "y", "z", "c"]
        assert said["resolution"] == [8.0, 4.0, 40.0] + [1.0] * (not lone)
        assert said["units"] == ["nm"] * 3 + [""] * (not lone)
        assert said["offset"] == [24.0, 8.0, 80.0] + [0.0] * (not lone)
        assert said["voxel_offset"] == [3, 2, 2] + [0] * (not lone)
    opened = tensorstore.open({"driver": "n5", "kvstore": f"file://{path}/s0/"}, read=True).result()
    assert [str(unit) for unit in opened.dimension_units[:3]] == ["8 nm", "4 nm", "40 nm"]
    assert json.loads((path / "s1" / "attributes.json").read_text())["downsamplingFactors"][:3] == [2, 2, 2]
    assert store_for(path).attributes_of(path)["voxel_offset"] == [2, 2, 3]  # (z, y, x) again


def test_precomputed_is_read_by_cloud_volume(tmp_path: Path) -> None:
    cloudvolume = pytest.importorskip("cloudvolume")
    path = made(tmp_path / "out.precomputed", Storage(multiscale=1), maps=2)
    volume = cloudvolume.CloudVolume(f"precomputed://file://{path}", progress=False)
    assert list(volume.resolution) == [8, 4, 40]
    assert list(volume.voxel_offset) == [3, 2, 2]
    np.testing.assert_array_equal(np.asarray(volume[:]).T, expected(2))
    assert json.loads((path / "znnpy.json").read_text())["network"] == "net"


@pytest.mark.parametrize(
    ("space", "said"),
    [
        (None, "the voxel size of the volume is not known"),
        (Space((1.0, 1.0, 1.0), (0.5, 0.0, 0.0), ("nanometer",) * 3), "placed up to 0.5 voxels away"),
        (Space((1.0, 1.0, 1.0), (0.0, 0.0, 0.0), (None,) * 3), "the volume's are in None"),
        (Space((0.004, 0.004, 0.004), (0.008, 0.0, 0.0), ("micrometer",) * 3), ""),
    ],
)
def test_what_precomputed_cannot_hold_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, space: Space | None, said: str
) -> None:
    with caplog.at_level(logging.WARNING, "znnpy"):
        path = made(tmp_path / "out.precomputed", Storage(), space=space)
    assert said in caplog.text
    assert bool(caplog.text) == bool(said)
    if not said:
        (scale,) = json.loads((path / "info").read_text())["scales"]
        assert (scale["resolution"], scale["voxel_offset"]) == ([4.0, 4.0, 4.0], [0, 0, 2])


@pytest.mark.parametrize("name", ["out.n5", "out.precomputed"])
def test_shards_are_for_zarr(tmp_path: Path, name: str) -> None:
    with pytest.raises(
        OutputError, match=r"have a file for each chunk, and only Zarr 3 has shards; leave out `sharded`"
    ):
        output(tmp_path / name, Storage(sharded=True))


@pytest.mark.parametrize(("name", "storage"), STORAGES, ids=str)
def test_a_resumed_run_keeps_the_chunks_that_are_there(tmp_path: Path, name: str, storage: Storage) -> None:
    """Its plan could give others, as one with another limit of memory does."""
    path = tmp_path / name
    with output(path, storage) as opened:
        opened.begin(HEADER, {}, [COLUMNS])
        write(opened, range(5), expected())
    lock = next(file for file in path.with_name(f"{name}.partial").rglob("*") if file.is_file()).with_name("0.__lock")
    lock.write_bytes(b"half a chunk")
    storage = Storage(storage.prefix, storage.sharded, budget=4096)
    with output(path, storage, mode="resume") as opened:
        assert not lock.exists()
        assert opened.done == frozenset(range(5))
        write(opened, range(5, len(COLUMNS)), expected())
        opened.complete()
    np.testing.assert_array_equal(stored(path), expected()[0])


def recorded(path: Path) -> set[int]:
    """Return the columns that the journal has, as a run after a kill would read it."""
    journal = Journal(journal_path(path))
    assert journal.open()
    found = journal.read()
    journal.close()
    assert found is not None
    return set(found[1])


@pytest.mark.parametrize(("name", "storage"), STORAGES, ids=str)
def test_a_column_is_recorded_only_when_its_chunks_are_on_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, storage: Storage
) -> None:
    """Chunks here hold voxels of several columns; what the journal has is what a kill leaves."""
    monkeypatch.setattr(column_record, "SYNC_SECONDS", 0.0)
    monkeypatch.setattr(store_module, "CHUNK", 64)  # one chunk
    path = tmp_path / name
    partial, last = path.with_name(f"{name}.partial"), len(COLUMNS) - 1
    with output(path, storage) as opened:
        opened.begin(HEADER, {})
        write(opened, range(last), expected())
        assert recorded(path) == set()
        assert not stored(partial).any()
        write(opened, range(last, last + 1), expected())
        assert recorded(path) == set(range(len(COLUMNS)))
        np.testing.assert_array_equal(stored(partial), expected()[0])
        opened.complete()
        assert opened.rewritten == 0


def test_columns_do_not_wait_for_their_chunks_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(column_record, "SYNC_SECONDS", 0.0)
    monkeypatch.setattr(column_record, "PATIENCE_SECONDS", -1.0)
    monkeypatch.setattr(store_module, "CHUNK", 64)
    path = tmp_path / "out.zarr"
    with output(path, Storage()) as opened:
        opened.begin(HEADER, {})
        for index in range(len(COLUMNS)):
            write(opened, range(index, index + 1), expected())
            assert recorded(path) == set(range(index + 1))
        opened.complete()
        assert opened.rewritten == len(COLUMNS) - 1
    np.testing.assert_array_equal(stored(path), expected()[0])


@pytest.mark.parametrize("change", ["chunks", "codecs"])
def test_a_changed_layout_is_refused(tmp_path: Path, change: str) -> None:
    path = tmp_path / "out.zarr"
    with output(path, Storage()) as opened:
        opened.begin(HEADER, {}, [COLUMNS])
        write(opened, range(5), expected())
    file = path.with_name("out.zarr.partial") / "0" / "zarr.json"
    document = json.loads(file.read_text())
    if change == "chunks":
        document["chunk_grid"]["configuration"]["chunk_shape"] = [0, 7, 5]
    else:
        document["codecs"] = document["codecs"][:1]
    file.write_text(json.dumps(document))
    with pytest.raises(ResumeError, match=r"is damaged \(.*; remove it and start again"):
        output(path, Storage(), mode="resume").__enter__()


@pytest.mark.parametrize(
    ("name", "store"),
    [
        ("out.zarr", "ZarrStore"),
        ("zarr2://out.zarr", "ZarrStore"),
        ("out.n5", "N5Store"),
        ("out.precomputed", "PrecomputedStore"),
        ("precomputed://out", "PrecomputedStore"),
        ("out.h5", "Hdf5Store"),
    ],
)
def test_names_choose_the_format(name: str, store: str) -> None:
    assert store_for(Location.of(name)).__name__ == store


@pytest.mark.parametrize(("name", "storage"), [*STORAGES, ("out.h5", Storage())])
def test_orientation_is_said_to_be_lost_once(
    tmp_path: Path, name: str, storage: Storage, caplog: pytest.LogCaptureFixture
) -> None:
    space = Space.turned(np.array([[0, -4.0, 0, 0], [8.0, 0, 0, 0], [0, 0, 40.0, 0]]), "nanometer")
    arrays = tuple(OutputArray((1, *SIZE), f"outputs/{one}", OWN, space) for one in "ab")
    with (
        caplog.at_level(logging.WARNING),
        Output(
            tmp_path / name, inputs={}, arrays=arrays, dtype=np.dtype("f4"), mode="new", job=JOB, storage=storage
        ) as opened,
    ):
        opened.begin(HEADER, {})
    (said,) = [record.message for record in caplog.records if "turned or mirrored" in record.message]
    assert "which " in said
    assert " cannot hold: the output has its voxels in the order of the volume" in said
