"""`znnpy info`: how a volume is stored, and what `infer` would make of it, on one screen."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import h5py
import mrcfile
import nibabel
import numpy as np
import pytest
import tifffile
import zarr

from tests.cli.test_all_formats import INPUTS, SHARDED, n5, precomputed
from tests.support.cli import Place
from znnpy.volume.registry import open_volume

DESCRIBED = [  # name in INPUTS, format, chunks
    ("HDF5", "HDF5", "16x24x32 voxels; gzip 4"),
    ("numpy", "numpy .npy", "none: voxels lie in one row"),
    ("Zarr 2", "Zarr 2, OME-Zarr 0.4", "16x24x32 voxels; blosc lz4 5"),
    ("Zarr 3", "Zarr 3, OME-Zarr 0.5", "16x24x32 voxels; zstd 0"),
    ("Zarr 3 with shards", "Zarr 3, OME-Zarr 0.5", "16x24x32 voxels, in files of 32x48x64; zstd 0"),
    ("N5", "N5", "16x24x32 voxels; gzip"),
    ("precomputed", "Neuroglancer precomputed", "16x24x32 voxels; not compressed"),
    ("precomputed with shards", "Neuroglancer precomputed", "16x24x32 voxels; gzip"),
    ("OME-TIFF", "TIFF, OME-TIFF", "strips of 40x44 pixels; deflate"),
    ("slices", "a folder of 48 TIFF slices", "strips of 40x44 pixels; not compressed"),
    ("NIfTI", "NIfTI 1", "none: voxels lie in one row"),
    ("compressed NIfTI", "NIfTI 1", "none: voxels lie in one row, compressed as a whole by gzip"),
    ("MRC", "MRC, mode 6", "none: voxels lie in one row"),
    ("NRRD", "NRRD 5", "none: voxels lie in one row"),
]


def lines_of(place: Place, *arguments: object) -> dict[str, str]:
    """Return the lines of the description by their labels; lines without one join the one before."""
    result = place.run("info", *arguments)
    assert result.exit_code == 0, result.output
    lines: dict[str, str] = {}
    label = ""
    assert len(result.stdout.splitlines()) <= 24
    for line in result.stdout.splitlines():
        label = line[:10].strip() or label
        lines[label] = f"{lines[label]} | {line[11:].strip()}" if label in lines else line[11:]
    return lines


def net(place: Place) -> tuple[object, ...]:
    return "--network", place.folder / "net.yaml"


def test_hdf5_file_is_described(place: Place) -> None:
    path = place.folder / "packed.h5"
    with h5py.File(path, "w") as file:
        voxels = np.random.default_rng(1).integers(0, 256, (32, 24, 20), np.uint8)
        made = file.create_dataset("em/raw", data=voxels, chunks=(8, 12, 20), compression="gzip", shuffle=True)
        made.attrs["element_size_um"] = [0.04, 0.008, 0.008]
        file["labels"] = np.zeros(5, np.int16)
    found = lines_of(place, path, *net(place))
    assert found["volume"] == f"{path}: em/raw"
    assert found["format"] == "HDF5"
    assert found["voxels"] == "z 32, y 24, x 20; 1 channel; uint8; stored as (z,y,x) = (32, 24, 20)"
    assert found["bytes"].startswith("15.0 KiB, ")
    assert found["chunks"] == "8x12x20 voxels; shuffle, gzip 4"
    assert found["position"] == "voxels of 0.04 um x 0.008 um x 0.008 um, the first at 0 um, 0 um, 0 um"
    assert found["inside"] == "em/raw: 32x24x20 uint8 | labels: 5 int16"
    assert found["values"].startswith("0 to 255, mean 12")
    assert found["network"] == "tiny"
    valid, reflect = found["output"].split(" | ")
    assert valid == "border valid: 27x17x14 voxels, 25.1 KiB of float32 for each map"
    assert reflect.startswith("border reflect: 32x24x20 voxels")
    assert found["command"] == f"znnpy infer {path} --network {place.folder / 'net.yaml'}"


def ome_zarr(folder: Path, zarr_format: Any) -> Path:
    """Write an OME-Zarr image of two resolutions."""
    path = folder / "image.zarr"
    group = zarr.open_group(path, mode="w", zarr_format=zarr_format)
    for name, size in (("s0", 40), ("s1", 20)):
        shards = {"shards": (20, 20, 20)} if zarr_format == 3 else {}
        array = group.create_array(name, shape=(size,) * 3, dtype="uint8", chunks=(10, 10, 10), **shards)
        array[...] = np.full((size,) * 3, 120, np.uint8)
    datasets = [
        {"path": name, "coordinateTransformations": [{"type": "scale", "scale": [size] * 3}]}
        for name, size in (("s0", 8.0), ("s1", 16.0))
    ]
    axes = [{"name": name, "type": "space", "unit": "nanometer"} for name in "zyx"]
    image = {"axes": axes, "datasets": datasets, "version": "0.4"}
    group.attrs.update({"multiscales": [image]} if zarr_format == 2 else {"ome": {"multiscales": [image]}})
    return path


@pytest.mark.parametrize(("zarr_format", "named"), [(2, "Zarr 2, OME-Zarr 0.4"), (3, "Zarr 3, OME-Zarr 0.5")])
def test_resolutions_of_ome_zarr_are_listed_and_chosen(place: Place, zarr_format: int, named: str) -> None:
    path = ome_zarr(place.folder, zarr_format)
    found = lines_of(place, path, *net(place))
    assert found["format"] == named
    assert found["voxels"].startswith("z 40, y 40, x 40; 1 channel; uint8")
    assert found["chunks"].startswith("10x10x10 voxels" + (", in files of 20x20x20; zstd" if zarr_format == 3 else ";"))
    first, second = found["scales"].split(" | ")
    assert first == "s0: 40x40x40 uint8, voxels of 8 nm x 8 nm x 8 nm, the first at 0 nm, 0 nm, 0 nm"
    assert second.startswith("s1: 20x20x20 uint8, voxels of 16 nm")
    coarse = lines_of(place, path, *net(place), "--scale", 1)
    assert coarse["volume"] == f"{path}: s1"
    assert coarse["command"].endswith(" --scale 1")
    assert "holds 2 resolutions, from 0 to 1, and no 2; give" in place.refusal("info", path, "--scale", 2)
    assert "leave out --scale 1" in place.refusal("info", path, "--scale", 1, "--dataset", "s0")


@pytest.mark.parametrize(("name", "form", "chunks"), DESCRIBED)
def test_every_format_is_described(place: Place, name: str, form: str, chunks: str) -> None:
    voxels = np.random.default_rng(2).integers(0, 256, (48, 40, 44), np.uint8)
    found = lines_of(place, INPUTS[name](place.folder, voxels), *net(place))
    assert found["format"] == form
    assert found["chunks"] == chunks
    assert found["voxels"].startswith("z 48, y 40, x 44; 1 channel; uint")
    assert found["values"].startswith("0 to 255, mean 12")
    assert found["output"].startswith("border valid: 43x33x38 voxels")
    sizes = {"M": "400 angstrom x 80 angstrom x 40 angstrom", "NI": "0.04 um x 0.008 um x 0.004 um"}
    size = sizes.get(found["format"][:1], sizes.get(found["format"][:2], "40 nm x 8 nm x 4 nm"))
    is_without = name in ("numpy", "slices")
    assert found["position"].startswith("no voxel size is stated" if is_without else f"voxels of {size}, the first at")


def test_every_input_format_has_a_description() -> None:
    assert {name for name, _, _ in DESCRIBED} == INPUTS.keys()


def test_resolutions_of_n5_and_precomputed_are_listed(place: Place) -> None:
    voxels = np.zeros((48, 40, 44), np.uint8)
    path = n5(place.folder, voxels)
    group = place.folder / "image.n5"
    (group / "em").mkdir(parents=True)
    (group / "attributes.json").write_text('{"n5": "4.0.0"}')
    factors = [[1, 1, 1], [2, 2, 2]]
    (group / "em/attributes.json").write_text(json.dumps({"downsamplingFactors": factors}))
    path.rename(group / "em/s0")
    n5(place.folder, voxels[::2, ::2, ::2]).rename(group / "em/s1")
    found = lines_of(place, group, *net(place))
    assert found["format"] == "N5 4.0.0"
    assert "inside" not in found
    first, second = found["scales"].split(" | ")
    assert first.startswith("em/s0: 44x40x48 uint8, voxels of 40 nm")
    assert second.startswith("em/s1: 22x20x24 uint8, voxels of ")

    path = precomputed("two", key="fine")(place.folder, voxels)
    described = json.loads((path / "info").read_text())
    (finest,) = described["scales"]
    coarse = {**finest, "key": "coarse", "size": [22, 20, 24], "resolution": [8, 16, 80], **SHARDED}
    damaged = {**finest, "size": "large"}
    (path / "info").write_text(json.dumps({**described, "scales": [finest, coarse, damaged]}))
    found = lines_of(place, path, *net(place))
    first, second = found["scales"].split(" | ")
    assert first.startswith("fine: 44x40x48x1 uint8, voxels of 40 nm x 8 nm x 4 nm")
    assert second.startswith("coarse: 22x20x24x1 uint8, voxels of 80 nm x 16 nm x 8 nm")


def test_arrays_beside_those_of_the_image_are_listed(place: Place) -> None:
    path = ome_zarr(place.folder, 3)
    zarr.open_group(path, mode="r+").create_array("labels", shape=(5, 6), dtype="uint16")
    found = lines_of(place, path, *net(place))
    assert "labels: 5x6 uint16" in found["inside"].split(" | ")
    assert len(found["scales"].split(" | ")) == 2


def test_tiff_files_say_their_kind_series_and_points_of_time(place: Place) -> None:
    path, voxels = place.folder / "cells.tif", np.zeros((3, 24, 20, 22), np.uint8)
    tifffile.imwrite(path, voxels, imagej=True, metadata={"axes": "TZYX", "unit": "um", "spacing": 0.5})
    found = lines_of(place, path, *net(place), "--time", 1)
    assert found["format"] == "TIFF, ImageJ"
    assert found["time"] == "3 points"
    assert found["command"].endswith(" --time 1")
    with tifffile.TiffWriter(place.folder / "two.btf", bigtiff=True) as file:
        file.write(voxels[0], compression="lzw", predictor=True, tile=(16, 16), photometric="minisblack")
        file.write(np.zeros((9, 8, 7), np.uint16), photometric="minisblack")
    found = lines_of(place, place.folder / "two.btf", *net(place), "--dataset", "0")
    assert found["format"] == "BigTIFF"
    assert found["chunks"] == "tiles of 16x16 pixels; LZW of differences"
    assert found["inside"] == "0: 24x20x22 uint8 | 1: 9x8x7 uint16"


def test_headers_of_other_files_are_told_in_notes(place: Place) -> None:
    voxels = np.zeros((24, 20, 22), np.int16)
    np.save(place.folder / "columns.npy", np.asfortranarray(voxels))
    assert "the order of Fortran" in lines_of(place, place.folder / "columns.npy", *net(place))["note"]
    affine = np.array([[0, 2.0, 0, 5], [-1.0, 0, 0, 6], [0, 0.0, 3, 7], [0, 0, 0, 1]])
    nibabel.save(nibabel.Nifti2Image(voxels, affine), place.folder / "turned.nii")
    found = lines_of(place, place.folder / "turned.nii", *net(place))
    assert found["format"] == "NIfTI 2"
    assert found["note"] == "x, y and z run to the back, right, top"
    affine[2, 0] = 0.4
    scaled = nibabel.Nifti1Image(voxels, affine)
    scaled.header.set_slope_inter(0.5, 3)
    nibabel.save(scaled, place.folder / "scaled.nii")
    first, second = lines_of(place, place.folder / "scaled.nii", *net(place))["note"].split(" | ")
    assert first == "a voxel is the stored int16 number times 0.5, plus 3"
    assert second.endswith("right, top, at an angle")
    with mrcfile.new(place.folder / "bytes.mrc") as file:
        file.set_data(voxels.astype(np.int8))
    found = lines_of(place, place.folder / "bytes.mrc", *net(place))
    assert (found["format"], found["note"]) == ("MRC, mode 0", "its bytes are signed")


def test_volume_that_the_network_does_not_take_is_described_nevertheless(place: Place) -> None:
    np.save(place.folder / "two.npy", np.zeros((2, 4, 30, 30), np.float32))
    found = lines_of(place, place.folder / "two.npy", *net(place))
    assert found["format"] == "numpy .npy"
    assert found["chunks"] == "none: voxels lie in one row"
    assert found["position"] == "no voxel size is stated"
    assert found["network"].startswith("tiny does not take it: ")
    assert "has 2 channels" in found["network"]
    np.save(place.folder / "thin.npy", np.zeros((4, 30, 30), np.float32))
    thin = lines_of(place, place.folder / "thin.npy", *net(place))
    assert thin["output"].startswith("border valid: none, since ")
    assert "border reflect: 4x30x30 voxels" in thin["output"]


def test_description_as_json(place: Place) -> None:
    found = json.loads(place.run("info", place.volume, *net(place), "--json").stdout)
    assert found["size"] == [20, 23, 25]
    assert found["fit"]["outputs"]["reflect"] == [[20, 23, 25]]
    assert found["about"]["datasets"] == []
    assert found["dtype"] == "uint8"


def test_file_that_is_no_volume_is_an_error_that_lists_what_it_holds(place: Place) -> None:
    path = place.write_volume(np.zeros((9, 9, 9), np.uint8), "two.h5", other=np.zeros((9, 9, 9), np.uint8))
    assert "other (9x9x9 uint8), raw (9x9x9 uint8)" in place.refusal("info", path)


def test_resolution_and_point_of_time_are_part_of_the_job(place: Place) -> None:
    """The resolution is known by the name of its array, so that `verify` and a resumed run read the same one."""
    path, network = ome_zarr(place.folder, 2), place.folder / "net.yaml"
    out = place.folder / "coarse.h5"
    arguments = ("infer", path, "--network", network, "--out", out)
    assert place.run(*arguments, "--scale", 1).exit_code == 0
    with h5py.File(out) as file:
        job = json.loads(file["prediction"].attrs["job"])
        assert file["prediction"].attrs["resolution"].tolist() == [16.0] * 3
    assert job["volume"]["dataset"] == "s1"
    assert "time" not in job["volume"]
    assert place.run("verify", out, path, "--network", network, "--samples", 100).exit_code == 0
    assert place.run(*arguments, "--scale", 1, "--resume").exit_code == 0
    refused = place.run(*arguments, "--resume")
    assert "belongs to another job: volume." in refused.stderr


def test_point_of_time_is_named_in_the_job_and_read_by_verify(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int | None] = []
    whole = open_volume

    def of_a_series(place_: Any, dataset: str | None = None, *rest: Any, time: int | None = None, **more: Any) -> Any:
        asked.append(time)
        return whole(place_, dataset, *rest, **more)

    for module in ("sliceable", "registry"):
        monkeypatch.setattr(f"znnpy.volume.{module}.open_volume", of_a_series)
    monkeypatch.setattr("znnpy.verify.open_volume", of_a_series)
    assert place.infer("--time", 2).exit_code == 0
    assert asked == [2]
    with h5py.File(place.out) as file:
        assert json.loads(file["prediction"].attrs["job"])["volume"]["time"] == 2
    assert place.run("verify", place.out, place.volume, *net(place), "--samples", 100).exit_code == 0
    assert asked[-1] == 2
    refused = place.infer("--resume", "--time", 1)
    assert "volume.time was 2 and is 1 now" in refused.stderr
    assert "volume.time was 2 and is not given now" in place.infer("--resume").stderr
