"""Files that a volume is made of are never replaced by what a command writes."""

from __future__ import annotations

import os
from pathlib import Path

import h5py
import numpy as np
import pytest

import znnpy
from tests.support.cli import Place
from znnpy.errors import OutputError
from znnpy.volume import open_volume

pytestmark = pytest.mark.slow

SIZE = (20, 23, 25)


def nested(place: Place) -> dict[str, Path]:
    """linked.h5 -> middle.h5 -> virtual.h5 -> inner.h5 (virtual) -> source.h5, external raw file voxels.h5."""
    names = ("linked", "middle", "virtual", "inner", "source")
    paths = {name: place.folder / f"{name}.h5" for name in names} | {"raw": place.folder / "voxels.h5"}
    paths["raw"].write_bytes(np.random.default_rng(3).integers(0, 256, SIZE, np.uint8).tobytes())
    external = [(str(paths["raw"]), 0, h5py.h5f.UNLIMITED)]
    with h5py.File(paths["source"], "w") as file:
        file.create_dataset("a", SIZE, np.uint8, external=external)
    for name, source, inside in (("inner", "source", "a"), ("virtual", "inner", "raw")):
        layout = h5py.VirtualLayout(SIZE, np.uint8)
        layout[:] = h5py.VirtualSource(paths[source], inside, SIZE)
        with h5py.File(paths[name], "w") as file:
            file.create_virtual_dataset("raw", layout)
    for name, target in (("middle", "virtual"), ("linked", "middle")):
        with h5py.File(paths[name], "w") as file:
            file["raw"] = h5py.ExternalLink(str(paths[target]), "raw")
    return paths


def test_files_of_a_volume_are_not_replaced(place: Place) -> None:
    paths = nested(place)
    with open_volume(paths["linked"], "raw") as volume:
        assert {os.path.realpath(file) for file in volume.files} == {os.path.realpath(p) for p in paths.values()}
    before = place.state()
    infer = ("infer", paths["linked"], "--dataset", "raw", "--network", place.folder / "net.yaml", "--overwrite")
    plan = ("plan", place.folder / "net.yaml", "--volume", paths["linked"], "--dataset", "raw", "--overwrite")
    for path in paths.values():
        for arguments in (infer, plan):
            said = place.refusal(*arguments, "--out", path)
            assert f"{path} itself; give another name as --out" in said
    (place.folder / "same.png").hardlink_to(paths["source"])
    said = place.refusal(*plan, "--plot", place.folder / "same.png")
    assert "source.h5 itself; give another name as --plot" in said
    (place.folder / "same.png").unlink()
    paths["raw"].rename(place.folder / "out.h5.partial")
    paths["raw"].symlink_to("out.h5.partial")
    said = place.refusal(*infer, "--out", place.out)
    assert "out.h5.partial" in said
    assert "itself; give another name as --out" in said
    (place.folder / "out.h5.partial").rename(paths["raw"])
    assert place.state() == before


def test_zarr_array_behind_a_link_is_not_replaced(place: Place) -> None:
    zarr = pytest.importorskip("zarr")
    there = place.folder / "there.zarr"
    zarr.create_array(there, data=np.full(SIZE, 7, np.uint8))
    zarr.open_group(place.folder / "group.zarr", mode="w")
    (place.folder / "group.zarr" / "raw").symlink_to(there)
    arguments = ("infer", place.folder / "group.zarr", "--dataset", "raw", "--network", place.folder / "net.yaml")
    assert "itself; give another name as --out" in place.refusal(*arguments, "--out", there, "--overwrite")
    assert (zarr.open_array(there, mode="r")[:] == 7).all()


def test_folder_of_a_given_zarr_array_is_not_replaced(place: Place) -> None:
    zarr = pytest.importorskip("zarr")
    group, net = place.folder / "group.zarr", place.folder / "net.yaml"
    array = zarr.open_group(group, mode="w").create_array("raw.zarr", data=np.full(SIZE, 7, np.uint8))
    for out in (group, group / "raw.zarr", group / "raw.zarr" / "inside.zarr"):
        with pytest.raises(OutputError, match=r"give another name as `out`"):
            znnpy.infer(array, net, out=out, overwrite=True, threads=1)
    assert (zarr.open_group(group, mode="r")["raw.zarr"][:] == 7).all()


def test_file_behind_a_view_of_a_memory_map_is_not_replaced(place: Place) -> None:
    path = place.folder / "voxels.h5"
    np.full(SIZE, 7, np.uint8).tofile(path)
    for volume in (np.asarray(np.memmap(path, np.uint8, "r", shape=SIZE)), np.memmap(path, np.uint8, "r", shape=SIZE)):
        with pytest.raises(OutputError, match=r"voxels\.h5 itself; give another name as `out`"):
            znnpy.infer(volume, place.folder / "net.yaml", out=path, overwrite=True, threads=1)
    assert path.read_bytes() == bytes([7]) * volume.size


def test_sources_of_a_given_dataset_are_not_replaced(place: Place) -> None:
    paths = nested(place)
    before = place.state()
    for name in ("virtual", "inner", "source", "raw"):
        with h5py.File(paths["linked"]) as file, pytest.raises(OutputError, match="itself; give another name as"):
            znnpy.infer(file["raw"], place.folder / "net.yaml", out=paths[name], overwrite=True, threads=1)
    assert place.state() == before


@pytest.mark.parametrize("option", ["--out", "--plot"])
def test_plan_does_not_replace_the_weights(place: Place, option: str) -> None:
    weights = place.folder / "net.npz"
    before = place.state()
    path = weights if option == "--out" else place.folder / "net.png"
    if option == "--plot":
        path.symlink_to(weights)
    plan = ("plan", place.folder / "net.yaml", "--shape", "30,30,30", "--overwrite", option, path)
    assert f"net.npz itself; give another name as {option}" in place.refusal(*plan)
    assert place.state()["net.npz"] == before["net.npz"]


@pytest.mark.parametrize("option", ["--out", "--export"])
def test_measurement_does_not_replace_the_weights(place: Place, option: str) -> None:
    weights = place.folder / "net.npz"
    before = place.state()
    said = place.refusal("measure", place.folder / "net.yaml", "--overwrite", option, weights)
    assert f"net.npz itself; give another name as {option}" in said
    assert place.state() == before
