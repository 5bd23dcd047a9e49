"""One volume in every format gives one prediction, byte for byte; every written format is read by another library."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import mrcfile
import nibabel
import nrrd
import numpy as np
import numpy.typing as npt
import pytest
import tensorstore
import tifffile
import zarr

import znnpy
from znnpy.planner.run_plan import RunPlan

NM = (40.0, 8.0, 4.0)  # voxel size z, y, x
CHUNK = (16, 24, 32)
Voxels = npt.NDArray[Any]


def ome(version: str) -> dict[str, Any]:
    axes = [{"name": name, "type": "space", "unit": "nanometer"} for name in "zyx"]
    steps = [{"type": "scale", "scale": list(NM)}]
    image = {"version": version, "axes": axes, "datasets": [{"path": "0", "coordinateTransformations": steps}]}
    return {"multiscales": [image]} if version == "0.4" else {"ome": {"version": version, "multiscales": [image]}}


def zarr_of(version: int, shards: tuple[int, ...] | None = None) -> Callable[[Path, Voxels], Path]:
    def write(folder: Path, voxels: Voxels) -> Path:
        path = folder / f"v{version}{'s' if shards else ''}.zarr"
        group = zarr.create_group(path, zarr_format=version, attributes=ome("0.4" if version == 2 else "0.5"))
        array = group.create_array("0", shape=voxels.shape, dtype=voxels.dtype, chunks=CHUNK, shards=shards)
        array[...] = voxels
        return path

    return write


def by_tensorstore(path: Path, spec: dict[str, Any], voxels: Voxels) -> Path:
    opened = tensorstore.open({**spec, "kvstore": f"file://{path}/"}, create=True).result()
    opened.write(voxels).result()
    return path


def n5(folder: Path, voxels: Voxels) -> Path:
    metadata = {
        "dimensions": list(voxels.shape[::-1]),
        "blockSize": list(CHUNK[::-1]),
        "dataType": "uint8",
        "compression": {"type": "gzip"},
        "resolution": list(NM[::-1]),
        "units": ["nm"] * 3,
    }
    return by_tensorstore(folder / "v.n5", {"driver": "n5", "metadata": metadata}, voxels.T)


def precomputed(name: str, **scale: Any) -> Callable[[Path, Voxels], Path]:
    def write(folder: Path, voxels: Voxels) -> Path:
        spec = {
            "driver": "neuroglancer_precomputed",
            "multiscale_metadata": {"type": "image", "data_type": "uint8", "num_channels": 1},
            "scale_metadata": {
                "size": list(voxels.shape[::-1]),
                "chunk_size": list(CHUNK[::-1]),
                "resolution": list(NM[::-1]),
                "encoding": "raw",
                **scale,
            },
        }
        return by_tensorstore(folder / f"{name}.precomputed", spec, voxels.T[..., np.newaxis])

    return write


SHARDED = {
    "sharding": {
        "@type": "neuroglancer_uint64_sharded_v1",
        "preshift_bits": 1,
        "minishard_bits": 1,
        "shard_bits": 2,
        "hash": "identity",
        "data_encoding": "gzip",
        "minishard_index_encoding": "gzip",
    }
}


def hdf5(folder: Path, voxels: Voxels) -> Path:
    with h5py.File(folder / "v.h5", "w") as file:
        made = file.create_dataset("raw", data=voxels, chunks=CHUNK, compression="gzip")
        made.attrs.update(resolution=NM, units="nanometer,nanometer,nanometer")
    return folder / "v.h5"


def npy(folder: Path, voxels: Voxels) -> Path:
    np.save(folder / "v.npy", voxels)
    return folder / "v.npy"


def ome_tiff(folder: Path, voxels: Voxels) -> Path:
    sizes = {
        f"PhysicalSize{axis}{end}": value
        for axis, size in zip("ZYX", NM, strict=True)
        for end, value in (("", size), ("Unit", "nm"))
    }
    tifffile.imwrite(folder / "v.ome.tif", voxels, ome=True, metadata={"axes": "ZYX", **sizes}, compression="zlib")
    return folder / "v.ome.tif"


def slices(folder: Path, voxels: Voxels) -> Path:
    (folder / "slices").mkdir()
    for number, plane in enumerate(voxels):
        tifffile.imwrite(folder / "slices" / f"plane{number}.tif", plane)
    return folder / "slices"


def nifti(name: str) -> Callable[[Path, Voxels], Path]:
    def write(folder: Path, voxels: Voxels) -> Path:
        image = nibabel.Nifti1Image(voxels.T, np.diag([*(size / 1000 for size in NM[::-1]), 1]))
        image.header.set_xyzt_units("micron")
        nibabel.save(image, folder / name)
        return folder / name

    return write


def mrc(folder: Path, voxels: Voxels) -> Path:
    with mrcfile.new(folder / "v.mrc") as file:
        file.set_data(voxels.astype(np.uint16))
        file.voxel_size = tuple(10 * size for size in NM[::-1])
    return folder / "v.mrc"


def nrrd_of(folder: Path, voxels: Voxels) -> Path:
    header = {
        "encoding": "raw",
        "space directions": np.diag(NM[::-1]),
        "space dimension": 3,
        "space units": ["nm"] * 3,
    }
    nrrd.write(str(folder / "v.nrrd"), voxels, header, index_order="C")
    return folder / "v.nrrd"


INPUTS: dict[str, Callable[[Path, Voxels], Path]] = {
    "HDF5": hdf5,
    "numpy": npy,
    "Zarr 2": zarr_of(2),
    "Zarr 3": zarr_of(3),
    "Zarr 3 with shards": zarr_of(3, (32, 48, 64)),
    "N5": n5,
    "precomputed": precomputed("plain"),
    "precomputed with shards": precomputed("sharded", **SHARDED),
    "OME-TIFF": ome_tiff,
    "slices": slices,
    "NIfTI": nifti("v.nii"),
    "compressed NIfTI": nifti("w.nii.gz"),
    "MRC": mrc,
    "NRRD": nrrd_of,
}
OTHER_DTYPE = ("MRC",)  # it has no uint8


def of_zarr(path: Path) -> tuple[Voxels, list[float]]:
    group = zarr.open_group(path, mode="r")
    attributes = group.attrs.asdict()
    (image,) = attributes.get("ome", attributes)["multiscales"]
    (_, *scale), _ = (list(one.values())[1] for one in image["datasets"][0]["coordinateTransformations"])
    return np.asarray(group["0"]), scale


def predicted(path: Path) -> Voxels:
    with h5py.File(path) as file:
        return np.asarray(file["prediction"])


def of_hdf5(path: Path) -> tuple[Voxels, list[float]]:
    with h5py.File(path) as file:
        return file["prediction"][...], file["prediction"].attrs["resolution"].tolist()


def of_n5(path: Path) -> tuple[Voxels, list[float]]:
    """Read blocks as the specification of N5 has them: a header of big-endian numbers, then gzip."""
    folder = path / "s0"
    about = json.loads((folder / "attributes.json").read_text())
    assert about["compression"]["type"] == "gzip"
    assert about["dataType"] == "float32"
    found = np.full(about["dimensions"], np.nan, np.float32)
    for file in (file for file in folder.rglob("*") if file.is_file() and file.name != "attributes.json"):
        content = file.read_bytes()
        axes = int.from_bytes(content[2:4], "big")
        sizes = np.frombuffer(content, ">u4", axes, 4).astype(int)
        values = np.frombuffer(gzip.decompress(content[4 + 4 * axes :]), ">f4").reshape(sizes, order="F")
        lo = np.array([int(part) for part in file.relative_to(folder).parts]) * about["blockSize"]
        there = found[tuple(slice(a, a + n) for a, n in zip(lo, sizes, strict=True))]
        there[...] = values[tuple(slice(n) for n in there.shape)]  # a block at the end may hold more
    return found.T, about["resolution"][2::-1]


def of_precomputed(path: Path) -> tuple[Voxels, list[float]]:
    """Read raw chunks as Neuroglancer's description has them: named by their voxels, x fastest."""
    about = json.loads((path / "info").read_text())
    (scale,) = about["scales"]
    assert scale["encoding"] == "raw"
    offset, size = scale.get("voxel_offset", [0, 0, 0]), scale["size"]
    found = np.full([*size, about["num_channels"]], np.nan, about["data_type"])
    for file in (path / scale["key"]).iterdir():
        spans = [[int(end) for end in part.split("-")] for part in file.name.split("_")]
        shape = [hi - lo for lo, hi in spans] + [about["num_channels"]]
        values = np.frombuffer(file.read_bytes(), about["data_type"]).reshape(shape, order="F")
        found[tuple(slice(lo - at, hi - at) for (lo, hi), at in zip(spans, offset, strict=True))] = values
    return found.T, scale["resolution"][::-1]


def of_tiff(path: Path) -> tuple[Voxels, list[float]]:
    with tifffile.TiffFile(path) as file:
        assert file.is_ome
        assert file.is_bigtiff
        pixels = tifffile.xml2dict(file.ome_metadata)["OME"]["Image"]["Pixels"]
        units = {"nm": 1.0, "µm": 1000.0}
        scale = [pixels[f"PhysicalSize{axis}"] * units[pixels[f"PhysicalSize{axis}Unit"]] for axis in "ZYX"]
        return file.asarray(), scale


def of_nifti(path: Path) -> tuple[Voxels, list[float]]:
    image = nibabel.load(path)
    nm = {"micron": 1e3, "mm": 1e6}[image.header.get_xyzt_units()[0]]
    return np.asarray(image.dataobj).T.squeeze(), [float(size) * nm for size in image.header.get_zooms()[2::-1]]


OUTPUTS: dict[str, Callable[[Path], tuple[Voxels, list[float]]]] = {
    "out.h5": of_hdf5,
    "out.zarr": of_zarr,
    "zarr2://two.zarr": of_zarr,
    "shards.zarr": of_zarr,
    "out.n5": of_n5,
    "out.precomputed": of_precomputed,
    "out.ome.tif": of_tiff,
    "out.nii": of_nifti,
}


@pytest.fixture(scope="module", params=[41, pytest.param(250, marks=pytest.mark.long)])
def ground(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Voxels, Voxels]:
    """Return a folder with a network and a plan, a volume, and what the plan predicts of it in HDF5."""
    folder, side = tmp_path_factory.mktemp("formats"), request.param
    rng = np.random.default_rng(8)
    voxels = rng.integers(1, 256, (side, side + 3, side - 2), np.uint8)
    weight = rng.standard_normal((2, 1, 3, 4, 2), np.float32)
    np.savez(folder / "n.npz", conv0_weight=weight, conv0_bias=np.ones(2, np.float32))
    layer = "- {type: conv, kernel: [3, 4, 2], out: 2, activation: relu}"
    (folder / "n.yaml").write_text(f"name: n\ninput_channels: 1\nweights: n.npz\nlayers:\n{layer}\n")
    made = znnpy.plan(folder / "n.yaml", volume=hdf5(folder, voxels), ram="2G", device="cpu", calibrate=False)
    assert isinstance(made, RunPlan)
    (folder / "plan.json").write_text(made.to_json())
    infer(folder, folder / "v.h5", "expected.h5")
    return folder, voxels, of_hdf5(folder / "expected.h5")[0]


def infer(folder: Path, volume: Path, out: str, **more: Any) -> Path:
    scheme, mark, name = out.rpartition("://")
    path = folder / name
    options = {"plan": folder / "plan.json"} | more
    znnpy.infer(volume, folder / "n.yaml", out=f"{scheme}{mark}{path}", overwrite=True, **options)
    return path


@pytest.mark.parametrize("name", INPUTS)
def test_every_format_gives_the_same_prediction(ground: tuple[Path, Voxels, Voxels], name: str, tmp_path: Path) -> None:
    folder, voxels, expected = ground
    volume = INPUTS[name](tmp_path, voxels)
    own = predicted(infer(folder, volume, "own.h5", plan=None, ram="2G", calibrate=False))
    assert np.abs(own - expected).max() <= 1e-5 * np.abs(expected).max()
    if name in OTHER_DTYPE:
        return
    assert predicted(infer(folder, volume, "same.h5")).tobytes() == expected.tobytes()


def test_jpeg_gives_the_prediction_of_its_decoded_voxels(ground: tuple[Path, Voxels, Voxels], tmp_path: Path) -> None:
    folder, voxels, expected = ground
    volume = precomputed("jpeg", encoding="jpeg", jpeg_quality=90)(tmp_path, voxels)
    spec = {"driver": "neuroglancer_precomputed", "kvstore": f"file://{volume}/"}
    decoded = tensorstore.open(spec).result().read().result()[..., 0].T
    assert not np.array_equal(decoded, voxels)
    found = predicted(infer(folder, volume, "jpeg.h5"))
    assert found.tobytes() == predicted(infer(folder, hdf5(tmp_path, decoded), "decoded.h5")).tobytes()
    assert found.tobytes() != expected.tobytes()


@pytest.mark.parametrize("name", OUTPUTS)
def test_every_output_is_read_by_another_library(ground: tuple[Path, Voxels, Voxels], name: str) -> None:
    folder, _, expected = ground
    sharded = name.startswith("shards")
    path = infer(folder, folder / "v.h5", name, **({"sharded": True} if sharded else {}))
    found, scale = OUTPUTS[name](path)
    assert found.shape == expected.shape
    assert found.tobytes() == expected.tobytes()
    assert scale == pytest.approx(NM, rel=1e-6)


def test_an_output_of_one_map_is_read_by_mrcfile(ground: tuple[Path, Voxels, Voxels], tmp_path: Path) -> None:
    folder, _, expected = ground
    one = tmp_path / "one"
    one.mkdir()
    with np.load(folder / "n.npz") as weights:
        np.savez(one / "n.npz", conv0_weight=weights["conv0_weight"][:1], conv0_bias=weights["conv0_bias"][:1])
    (one / "n.yaml").write_text((folder / "n.yaml").read_text().replace("out: 2", "out: 1"))
    path = infer(one, folder / "v.h5", "out.mrc", plan=None, ram="2G", calibrate=False, device="cpu")
    with mrcfile.open(path) as file:
        assert np.abs(file.data - expected[0]).max() <= 1e-5 * np.abs(expected).max()
        assert [float(file.voxel_size[axis]) for axis in "zyx"] == pytest.approx([10 * size for size in NM])
