"""Volumes that do not hold all their voxels: an error, or what the user asked for, and the run says how many."""

from __future__ import annotations

import json
from pathlib import Path

import h5py
import numpy as np
import numpy.typing as npt
import pytest

from tests.support.cli import Place
from tests.support.messages import assert_holds
from znnpy.patches import Box
from znnpy.view.scene import opened_scene

pytestmark = pytest.mark.slow

Grey = npt.NDArray[np.uint8]


def grey(place: Place) -> Grey:
    with h5py.File(place.volume) as file:
        return np.array(file["raw"])


def in_two_files(place: Place) -> Grey:
    """Make the volume a virtual dataset whose second file is missing; return its voxels with 50 there."""
    voxels = grey(place)
    with h5py.File(place.folder / "first.h5", "w") as file:
        file["a"] = voxels[:12]
    layout = h5py.VirtualLayout(voxels.shape, "u1")
    layout[:12] = h5py.VirtualSource("first.h5", "a", (12, 23, 25))
    layout[12:] = h5py.VirtualSource("second.h5", "a", (8, 23, 25))
    with h5py.File(place.volume, "w") as file:
        file.create_virtual_dataset("raw", layout)
    voxels[12:] = 50
    return voxels


def test_missing_source_file_is_refused_or_filled(place: Place) -> None:
    voxels = in_two_files(place)
    sentence = place.refusal(*place.arguments)
    assert_holds(sentence, "raw: voxels (z, y, x) = (12, 0, 0) to (19, 22, 24)", "second.h5", "--fill-missing")
    assert "(12, 0, 0)" in place.refusal("plan", place.folder / "net.yaml", "--volume", place.volume)
    assert place.run("plan", place.folder / "net.yaml", "--volume", place.volume, "--fill-missing", "50").exit_code == 0
    result = place.infer("--fill-missing", "50", "--paranoid")
    assert result.exit_code == 0, result.stderr
    filled = place.prediction()
    assert "are missing" in place.refusal("verify", place.out, place.volume, "--network", place.folder / "net.yaml")
    arguments = ("verify", place.out, place.volume, "--network", place.folder / "net.yaml", "--samples", "50")
    assert place.run(*arguments, "--fill-missing", "50").exit_code == 0
    assert "samples_sha256" in place.refusal(*arguments, "--fill-missing", "200")
    assert "fill_missing" in place.refusal(*place.arguments, "--fill-missing", "51", "--resume")
    place.write_volume(voxels)
    assert place.infer("--overwrite").exit_code == 0
    np.testing.assert_array_equal(place.prediction(), filled)


def test_a_prediction_of_a_volume_with_missing_files_is_looked_at_over_it(place: Place) -> None:
    voxels = in_two_files(place)
    assert place.infer("--fill-missing", "50").exit_code == 0
    np.save(place.folder / "copy.npy", voxels)
    for volume in (place.volume, place.folder / "copy.npy"):
        found = np.zeros((1, *voxels.shape), np.uint8)
        with opened_scene(str(place.out), str(volume)) as scene:
            scene.layers[0].volume.read(Box((0, 0, 0), (20, 23, 25)), found)
        np.testing.assert_array_equal(found[0], voxels)


def test_fill_value_without_a_number_is_refused(place: Place) -> None:
    in_two_files(place)
    assert "holds uint8 voxels, which cannot hold 300; give another --fill-missing" in place.refusal(
        *place.arguments, "--fill-missing", "300"
    )
    result = place.infer("--fill-missing", "grey")
    assert (result.exit_code, "'grey' is not a number such as 0 or 127.5" in result.stderr) == (2, True)


def in_chunks(place: Place, name: str, missing: int) -> tuple[Path, Grey]:
    """Write the volume in 8 chunks, of which the last ones are missing, and return its voxels."""
    voxels = grey(place)
    path = place.folder / name
    at = [(z, y, x) for z in (0, 10) for y in (0, 12) for x in (0, 13)]
    for z, y, x in at[8 - missing :]:
        voxels[z : z + 10, y : y + 12, x : x + 13] = 9
    if path.suffix == ".h5":
        with h5py.File(path, "w") as file:
            data = file.create_dataset("raw", voxels.shape, "u1", chunks=(10, 12, 13), fillvalue=9)
            for z, y, x in at[: 8 - missing]:
                data[z : z + 10, y : y + 12, x : x + 13] = voxels[z : z + 10, y : y + 12, x : x + 13]
    else:
        zarr = pytest.importorskip("zarr")
        array = zarr.create_array(path, shape=voxels.shape, chunks=(10, 12, 13), dtype="u1", fill_value=9)
        array[...] = voxels
    return path, voxels


@pytest.mark.parametrize("name", ["chunks.h5", "chunks.zarr"])
@pytest.mark.parametrize("missing", [0, 3, 5])
def test_missing_chunks_are_counted_or_refused(place: Place, name: str, missing: int) -> None:
    path, voxels = in_chunks(place, name, missing)
    arguments = ["infer", path, "--network", place.folder / "net.yaml", "--out", place.out]
    if missing:
        result = place.run(*arguments, "--missing-chunks", "error")
        assert result.exit_code == 1
        assert "leave out --missing-chunks error to read the fill value" in result.stderr
        assert not place.out.exists()
    result = place.run(*arguments, "--overwrite")
    assert result.exit_code == 0
    line = f"volume     {missing} of 8 chunks are missing and were read as the fill value"
    assert (line in result.stdout) == bool(missing)
    warning = "warning: 5 of 8 chunks of the volume are missing and were read as its fill value: is it complete?"
    assert (warning in result.stdout) == (missing == 5)
    filled = place.prediction()
    place.write_volume(voxels)
    assert json.loads(place.infer("--overwrite", "--json").stdout)["chunks"]["missing"] == 0
    np.testing.assert_array_equal(place.prediction(), filled)


def test_missing_chunks_outside_the_roi_are_not_counted(place: Place) -> None:
    path, _ = in_chunks(place, "chunks.h5", 4)
    arguments = ["infer", path, "--network", place.folder / "net.yaml", "--out", place.out, "--roi", "0:10,:,:"]
    assert place.run(*arguments, "--missing-chunks", "error").exit_code == 0
