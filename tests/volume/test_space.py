"""The place of voxels in the specimen is read from OME-Zarr, moved with the region and written with the output."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import zarr

from tests.support.cli import Place
from tests.support.stored_outputs import attributes as attributes_of
from znnpy.volume import open_volume
from znnpy.volume.space import Space, image_of


def ome_volume(folder: Path) -> Path:
    """20x23x25 uint8 in an OME-Zarr group: voxels of 40x4x8 nm, the first at (100, 0, -8)."""
    path = folder / "volume.zarr"
    group = zarr.create_group(path)
    array = group.create_array("0", shape=(1, 20, 23, 25), chunks=(1, 10, 23, 25), dtype="u1")
    array[...] = np.random.default_rng(7).integers(0, 256, (1, 20, 23, 25), np.uint8)
    axes: list[dict[str, str]] = [{"name": "c", "type": "channel"}]
    axes += [{"name": name, "type": "space", "unit": "nanometer"} for name in "zyx"]
    steps = [
        {"type": "scale", "scale": [1.0, 40.0, 4.0, 8.0]},
        {"type": "translation", "translation": [0.0, 100.0, 0.0, -8.0]},
    ]
    image = {"axes": axes, "datasets": [{"path": "0", "coordinateTransformations": steps}]}
    group.attrs["ome"] = {"version": "0.5", "multiscales": [image]}
    return path


# The first voxel of the prediction lies 2, 3 and 3 voxels inside (field of view 6x8x7), and 4, 0 and 1 of the region.
SCALE, TRANSLATION = [40.0, 4.0, 8.0], [100.0 + 6 * 40, 3 * 4.0, -8.0 + 4 * 8]


def predict(place: Place, *arguments: str) -> Any:
    path = ome_volume(place.folder)
    result = place.run("infer", path, "--network", place.folder / "net.yaml", "--roi", "4:,:,1:", *arguments)
    assert result.exit_code == 0, result.output
    return result


@pytest.mark.slow
def test_zarr_output_lies_at_the_same_place(place: Place) -> None:
    result = predict(place)
    out = place.folder / "volume_tiny.zarr"
    assert result.stdout.startswith(f"{out}: ")
    attributes = attributes_of(out)
    assert (attributes["resolution"], attributes["translation"]) == (SCALE, TRANSLATION)
    assert (attributes["axes"], attributes["units"]) == ("z,y,x", "nanometer,nanometer,nanometer")
    assert (attributes["voxel_offset"], attributes["offset"]) == ([6, 3, 4], TRANSLATION)
    (image,) = attributes["ome"]["multiscales"]
    assert [axis["name"] for axis in image["axes"]] == ["c", "z", "y", "x"]
    scale, translation = image["datasets"][0]["coordinateTransformations"]
    assert (scale["scale"], translation["translation"]) == ([1.0, *SCALE], [0.0, *TRANSLATION])
    with open_volume(out) as volume:
        assert volume.space is not None
        assert (list(volume.space.scale), list(volume.space.translation)) == (SCALE, TRANSLATION)
        assert volume.space.units == ("nanometer",) * 3


@pytest.mark.slow
def test_hdf5_output_states_the_place(place: Place) -> None:
    predict(place, "--out", str(place.out))
    with h5py.File(place.out) as file:
        attributes = dict(file["prediction"].attrs)
    assert attributes["resolution"].tolist() == SCALE
    assert attributes["voxel_offset"].tolist() == [6, 3, 4]
    assert attributes["offset"].tolist() == TRANSLATION  # in units, as gunpowder and funlib read it
    assert attributes["translation"].tolist() == TRANSLATION
    assert (attributes["axes"], attributes["units"]) == ("z,y,x", "nanometer,nanometer,nanometer")


@pytest.mark.parametrize("suffix", ["h5", "zarr"])
def test_output_of_a_volume_without_place_states_none(place: Place, suffix: str) -> None:
    out = place.folder / f"x.{suffix}"
    assert place.run(*place.arguments[:-1], out).exit_code == 0
    attributes = attributes_of(out)
    assert not {"resolution", "translation", "axes", "units"} & attributes.keys()
    assert list(attributes["voxel_offset"]) == list(attributes["offset"]) == [2, 3, 3]


def test_units_may_be_missing() -> None:
    space = Space((2.0, 1.0, 1.0), units=("micrometer", None, "")).behind((1, 0, 5))
    attributes = space.attributes()
    assert attributes["units"] == "micrometer,,"
    assert attributes["translation"].tolist() == [2.0, 0.0, 5.0]
    image = image_of("prediction", [("0", space)], 1, "0.5")
    assert [axis.get("unit") for axis in image["axes"]] == ["micrometer", None, None]
    assert len(image["datasets"][0]["coordinateTransformations"][0]["scale"]) == 3


@pytest.mark.slow
@pytest.mark.parametrize("name", ["out.precomputed", "out.tif", "out.nii"])
@pytest.mark.parametrize(("size", "at"), [(1e-299, 1e299), (1e200, 0.0), (1.0, 1e30), (1e-15, 1e15)])
def test_impossible_voxel_sizes_are_left_out(place: Place, name: str, size: float, at: float) -> None:
    volume = ome_volume(place.folder)
    described = json.loads((volume / "zarr.json").read_text())
    steps = described["attributes"]["ome"]["multiscales"][0]["datasets"][0]["coordinateTransformations"]
    steps[0]["scale"], steps[1]["translation"] = [1.0, size, size, size], [0.0, at, at, at]
    (volume / "zarr.json").write_text(json.dumps(described))
    done = place.run("infer", volume, "--network", place.folder / "net.yaml", "--out", place.folder / name)
    if (size, at, name) == (1e-15, 1e15, "out.precomputed"):
        assert done.exit_code == 1
        assert "voxels from the origin" in done.stderr
        return
    assert done.exit_code == 0, done.stderr
    with open_volume(volume) as opened:
        assert (opened.space is None) == (size != 1e-15)
