"""A volume gives the same prediction in whatever format it is, and the prediction is the same in every format."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import h5py
import nibabel
import nrrd
import numpy as np
import numpy.typing as npt
import pytest
import tifffile

from tests.support.cli import Place
from tests.support.stored_outputs import stored
from znnpy.volume.registry import store_for

pytestmark = pytest.mark.slow


def copies(folder: Path, voxels: npt.NDArray[Any]) -> list[Path]:
    """Write a volume in other formats."""
    tifffile.imwrite(folder / "stack.tif", voxels, photometric="minisblack")
    tifffile.imwrite(folder / "packed.tif", voxels, photometric="minisblack", compression="zstd", tile=(16, 16))
    (folder / "slices").mkdir()
    for number, plane in enumerate(voxels):
        tifffile.imwrite(folder / "slices" / f"s{number}.tif", plane)
    for name in ("v.nii", "w.nii.gz"):
        nibabel.save(nibabel.Nifti1Image(voxels.T, np.diag([4, 8, 40, 1])), folder / name)
    nrrd.write(str(folder / "v.nrrd"), voxels, {"encoding": "raw"}, index_order="C")
    return [folder / name for name in ("stack.tif", "packed.tif", "slices", "v.nii", "w.nii.gz", "v.nrrd")]


def test_every_format_gives_the_same_prediction(place: Place, caplog: pytest.LogCaptureFixture) -> None:
    with h5py.File(place.volume) as file:
        voxels = np.asarray(file["raw"])
    plan = place.folder / "plan.json"
    network = ("--network", place.folder / "net.yaml")
    assert place.run("plan", place.folder / "net.yaml", "--volume", place.volume, "--out", plan).exit_code == 0
    assert place.infer("--plan", plan).exit_code == 0
    expected = stored(place.out)
    for path in copies(place.folder, voxels):
        out = place.folder / f"{path.name}.h5"
        result = place.run("infer", path, *network, "--plan", plan, "--out", out)
        assert result.exit_code == 0, result.output
        np.testing.assert_array_equal(stored(out), expected)
    for name in ("out.tif", "out.ome.tiff", "out.nii", "out.zarr"):
        with caplog.at_level(logging.WARNING):
            result = place.run("infer", place.folder / "v.nii", *network, "--plan", plan, "--out", place.folder / name)
        assert result.exit_code == 0, result.output
        np.testing.assert_array_equal(stored(place.folder / name), expected)
        result = place.run("verify", place.folder / name, place.folder / "v.nii", *network, "--samples", 100)
        assert result.exit_code == 0, result.output
        again = place.run("infer", place.folder / "v.nii", *network, "--out", place.folder / name, "--resume")
        assert again.exit_code == 0, again.output
        kept = store_for(place.folder / name).attributes_of(place.folder / name)
        assert list(kept["voxel_offset"]) == [2, 3, 3]
    np.testing.assert_allclose(nibabel.load(place.folder / "out.nii").affine[:3, 3], (3 * 4, 3 * 8, 2 * 40))


@pytest.mark.parametrize(("name", "said"), [("out.nii.gz", "give out.nii in --out"), ("out.mrc", "2 maps, and")])
def test_outputs_that_do_not_suit_are_refused_at_once(place: Place, name: str, said: str) -> None:
    result = place.run("infer", place.volume, "--network", place.folder / "net.yaml", "--out", place.folder / name)
    assert result.exit_code == 1
    assert said in result.output
    assert not list(place.folder.glob("out*"))
