"""The attributes of an output, whoever wrote them: what znnpy writes is read, and everything else is one sentence."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import zarr

from znnpy.errors import VolumeError
from znnpy.volume.location import Location
from znnpy.volume.provenance import Provenance

VOLUME: dict[str, Any] = {"dataset": "raw", "shape": [1, 20, 23, 25], "dtype": "uint8", "samples_sha256": "a" * 64}
VOLUME |= {"bytes": 100, "mtime_ns": 5}
JOB: dict[str, Any] = {"network": "b" * 64, "weights": "c" * 64, "volume": VOLUME, "roi": "1:2,3:4,5:6"}
JOB |= {"border": "valid", "output_dtype": "float32", "allow_nan": False}
RIGHT: dict[str, Any] = {"job": json.dumps(JOB), "offset": np.array([2, 3, 4]), "network": "net", "precision": "tf32"}


def hdf5(path: Path, write: Callable[[h5py.AttributeManager, h5py.Dataset], None]) -> Path:
    with h5py.File(path, "w") as file:
        dataset = file.create_dataset("prediction", (2, 2, 2), "f4")
        write(dataset.attrs, dataset)
    return path


def written(folder: Path, suffix: str, **attributes: Any) -> Path:
    """Write an output with these attributes in place of the right ones; None leaves one out."""
    entries = {name: value for name, value in {**RIGHT, **attributes}.items() if value is not None}
    if suffix == ".h5":
        return hdf5(folder / "out.h5", lambda attrs, dataset: attrs.update(entries))
    plain = {name: value.tolist() if hasattr(value, "tolist") else value for name, value in entries.items()}
    zarr.create_array(folder / "out.zarr", shape=(2, 2, 2), dtype="f4", attributes=plain, overwrite=True)
    return folder / "out.zarr"


def short(text: str) -> str:
    """Return an id for a case whose text may be long."""
    return text[:20]


def refusal(path: Path) -> str:
    with pytest.raises(VolumeError) as caught:
        Provenance.of(Location(str(path)))
    sentence = str(caught.value)
    assert len(sentence) < 400 + len(str(path))
    assert sentence.isprintable()
    return sentence


@pytest.mark.parametrize("suffix", [".h5", ".zarr"])
def test_written_attributes_are_read_back(tmp_path: Path, suffix: str) -> None:
    found = Provenance.of(Location(str(written(tmp_path, suffix))))
    assert (found.network, found.offsets, found.precision) == ("net", ((2, 3, 4),), "tf32")
    assert (found.job.roi, found.job.border, found.job.volume.shape) == ("1:2,3:4,5:6", "valid", (1, 20, 23, 25))
    assert Provenance.of(Location(str(written(tmp_path, suffix, precision=None)))).precision == "fp32"


def test_how_an_output_is_stored_is_read_where_it_is_stated(tmp_path: Path) -> None:
    job = Provenance.of(Location(str(written(tmp_path, ".h5")))).job
    assert (job.allow_nan, job.fill_missing, job.format, job.sharded, job.multiscale) == (False, None, None, False, 0)
    stated = {"allow_nan": True, "fill_missing": "nan", "format": "zarr2", "sharded": True, "multiscale": 3}
    job = Provenance.of(Location(str(written(tmp_path, ".h5", job=json.dumps({**JOB, **stated}))))).job
    assert {name: getattr(job, name) for name in stated} == stated


@pytest.mark.parametrize(
    "odd",
    [
        {"allow_nan": 1},
        {"fill_missing": 5},
        {"fill_missing": "5 --out x"},
        {"format": "../x"},
        {"sharded": "yes"},
        {"multiscale": -1},
        {"multiscale": 2**40},
    ],
    ids=str,
)
def test_odd_statements_on_how_an_output_is_stored_are_refused(tmp_path: Path, odd: dict[str, Any]) -> None:
    said = refusal(written(tmp_path, ".h5", job=json.dumps({**JOB, **odd})))
    assert f"is damaged: {next(iter(odd))}: " in said


@pytest.mark.parametrize("suffix", [".h5", ".zarr"])
def test_offset_in_voxels_comes_first(tmp_path: Path, suffix: str) -> None:
    """Once a resolution is known, `offset` is in its units; outputs of early versions have `offset` alone."""
    place = {"voxel_offset": np.array([5, 6, 7]), "offset": np.array([20.0, 24.0, 28.0])}
    assert Provenance.of(Location.of(written(tmp_path, suffix, **place))).offsets == ((5, 6, 7),)
    assert Provenance.of(Location.of(written(tmp_path, suffix))).offsets == ((2, 3, 4),)


@pytest.mark.parametrize("suffix", [".h5", ".zarr", ".npy"])
@pytest.mark.parametrize("name", ["job", "offset", "network"])
def test_missing_attributes_are_refused(tmp_path: Path, suffix: str, name: str) -> None:
    if suffix == ".npy":
        np.save(tmp_path / "out.npy", np.zeros((2, 2, 2)))
        assert "was not written by znnpy" in refusal(tmp_path / "out.npy")
    else:
        assert "was not written by znnpy" in refusal(written(tmp_path, suffix, **{name: None}))


ODD_TEXTS: list[Any] = [5, 1.5, float("nan"), True, [1, 2], ["a", "b"]]
ODD_OFFSETS: list[Any] = [
    5,
    1.5,
    "abc",
    "",
    [1, 2],
    [1, 2, 3, 4],
    [1.0, 2.0, 3.0],
    [float("nan")] * 3,
    [True, False, True],
    [],
]


@pytest.mark.parametrize("suffix", [".h5", ".zarr"])
@pytest.mark.parametrize(
    ("name", "value"),
    [(name, value) for name in ("job", "network", "precision") for value in ODD_TEXTS]
    + [("offset", value) for value in [*ODD_OFFSETS, [[1, 2, 3]], list(range(3000))]],
)
def test_attributes_of_other_types_and_lengths_are_refused(tmp_path: Path, suffix: str, name: str, value: Any) -> None:
    assert f"the attribute {name} of " in refusal(written(tmp_path, suffix, **{name: value}))


def empty(attrs: h5py.AttributeManager, dataset: h5py.Dataset, name: str) -> None:
    attrs[name] = h5py.Empty("f4")


def compound(attrs: h5py.AttributeManager, dataset: h5py.Dataset, name: str) -> None:
    attrs[name] = np.array((1, 2.0), dtype=[("a", "i4"), ("b", "f4")])


def reference(attrs: h5py.AttributeManager, dataset: h5py.Dataset, name: str) -> None:
    attrs.create(name, dataset.ref, dtype=h5py.ref_dtype)


def bitfield(attrs: h5py.AttributeManager, dataset: h5py.Dataset, name: str) -> None:
    h5py.h5a.create(dataset.id, name.encode(), h5py.h5t.STD_B8LE, h5py.h5s.create(h5py.h5s.SCALAR))


def array_type(attrs: h5py.AttributeManager, dataset: h5py.Dataset, name: str) -> None:
    kind = h5py.h5t.array_create(h5py.h5t.STD_I32LE, (4,))
    h5py.h5a.create(dataset.id, name.encode(), kind, h5py.h5s.create(h5py.h5s.SCALAR))


def not_utf8(attrs: h5py.AttributeManager, dataset: h5py.Dataset, name: str) -> None:
    kind = h5py.h5t.py_create(h5py.string_dtype(), logical=True)
    attribute = h5py.h5a.create(dataset.id, name.encode(), kind, h5py.h5s.create(h5py.h5s.SCALAR))
    value = np.empty((), h5py.string_dtype())
    value[()] = b"\xff\xfe{"
    attribute.write(value)


@pytest.mark.parametrize("name", ["job", "offset", "precision"])
@pytest.mark.parametrize("odd", [empty, compound, reference, bitfield, array_type, not_utf8])
def test_hdf5_types_are_read(tmp_path: Path, name: str, odd: Callable[..., None]) -> None:
    def write(attrs: h5py.AttributeManager, dataset: h5py.Dataset) -> None:
        attrs.update({key: value for key, value in RIGHT.items() if key != name})
        odd(attrs, dataset, name)

    sentence = refusal(hdf5(tmp_path / "out.h5", write))
    assert f"the attribute {name} of " in sentence or "says it was predicted in " in sentence


@pytest.mark.parametrize("precision", ["int4", "", "\x1b[2J", "x" * 10**6], ids=short)
def test_unknown_precision_is_refused(tmp_path: Path, precision: str) -> None:
    assert "which this version does not know" in refusal(written(tmp_path, ".h5", precision=precision))


def changed(**entries: Any) -> str:
    return json.dumps({**JOB, **entries})


def of_volume(**entries: Any) -> str:
    return changed(volume={**VOLUME, **entries})


def without(entries: dict[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in entries.items() if key != name}


@pytest.mark.parametrize(
    ("job", "where"),
    [
        *(
            (text, "the whole")
            for text in ("", "{", "[" * 10**5, "1" * 10**4, "NaN", "null", "[]", json.dumps(JOB)[:-5])
        ),
        *((json.dumps(without(JOB, name)), name) for name in ("network", "weights", "volume", "roi", "border")),
        *((changed(volume=without(VOLUME, name)), f"volume.{name}") for name in ("dataset", "shape", "dtype")),
        *((changed(network=value), "network") for value in (*ODD_TEXTS, "b" * 63, "B" * 64, "x" * 10**6)),
        *((changed(volume=value), "volume") for value in ODD_TEXTS),
        *(
            (changed(roi=value), "roi")
            for value in (5, "0:5", ":,:,:", "-1:5,0:5,0:5", "٣:٥,0:5,0:5", "0:" + "9" * 5000)
        ),
        *((changed(border=value), "border") for value in (5, "x", None)),
        *((changed(output_dtype=value), "output_dtype") for value in (5, "f4", "\x1b[2J")),
        *((of_volume(dataset=value), "volume.dataset") for value in (None, 3, True, [1], "x" * 10**6)),
        *((of_volume(dtype=value), "volume.dtype") for value in (None, 3, "x" * 10**6)),
        (of_volume(shape=[1, 20, 23]), "volume.shape"),
        (of_volume(shape=[1, 20, 23, -25]), "volume.shape.3"),
        (of_volume(shape=[1, 20, 23, 10**30]), "volume.shape.3"),
        (of_volume(shape=[1, 20.0, 23, 25]), "volume.shape.1"),
        (of_volume(shape=["1", 20, 23, 25]), "volume.shape.0"),
        (of_volume(shape=[1, 20, 23, True]), "volume.shape.3"),
        (of_volume(samples_sha256="none"), "volume.samples_sha256"),
    ],
    ids=short,
)
def test_foreign_job_is_refused(tmp_path: Path, job: str, where: str) -> None:
    assert re.search(rf"the attribute job of .* is damaged: {where}[.:]", refusal(written(tmp_path, ".h5", job=job)))
