"""A region by physical position: the voxels whose centres lie from its first end on, and before its second."""

from __future__ import annotations

import json

import h5py
import numpy as np
import pytest

from tests.support.cli import Place
from znnpy.errors import VolumeError
from znnpy.patches import Box
from znnpy.volume.lengths import length_of, meters
from znnpy.volume.roi import parse_roi
from znnpy.volume.space import Space

SIZE = (100, 200, 300)
NM = ("nanometer",) * 3
SPACE = Space((40.0, 8.0, 8.0), (0.0, 80.0, -16.0), NM)


@pytest.mark.parametrize(
    ("roi", "lo", "hi"),
    [
        ("400nm:800nm,:,:", (10, 0, 0), (20, 200, 300)),
        ("0.4um:0.8um,80nm:160nm,:", (10, 0, 0), (20, 10, 300)),
        ("0.4 µm : 0.8μm, 100:150, 0nm:", (10, 100, 2), (20, 150, 300)),
        (":4000Å,:0.00016mm,-16nm:0.000000064m", (0, 0, 0), (10, 10, 10)),
        ("401nm:799nm,:,:", (11, 0, 0), (20, 200, 300)),
        ("4000angstrom:80e,:,:".replace("80e", "0.00008cm"), (10, 0, 0), (20, 200, 300)),
    ],
)
def test_positions_become_voxels(roi: str, lo: tuple[int, int, int], hi: tuple[int, int, int]) -> None:
    assert parse_roi(roi, SIZE, SPACE) == Box(lo, hi)


def test_sizes_that_are_not_exact_in_binary_make_no_difference() -> None:
    """0.3 um is a little less than three tenths: 30 um are voxel 100 all the same."""
    space = Space((0.3, 0.1, 0.7), units=("micrometer", "um", "µm"))
    assert parse_roi("3um:30um,1um:20um,7um:70um", (100, 200, 100), space) == Box((10, 10, 10), (100, 200, 100))


@pytest.mark.parametrize(
    ("roi", "space", "said"),
    [
        ("4um:8um,:,:", SPACE, "outside the volume along z: 100:200 of 0:100 \\(4um:8um,:,: in voxels\\)"),
        ("-40nm:8nm,:,:", SPACE, "outside the volume along z: -1:1 of 0:100"),
        ("401nm:410nm,:,:", SPACE, "is empty along z: 11:11 \\(401nm:410nm,:,: in voxels\\)"),
        ("1um:50,:,:", SPACE, "one end along z in voxels and one with a unit"),
        ("1um:2um,:,:", None, "states no voxel size in its metadata, so it is not known where 1um lies"),
        ("1um:2um,:,:", Space((1.0, 1.0, 1.0)), "states no unit of length in its metadata, and pm, nm, um, mm"),
        (
            "1um:2um,:,:",
            Space((1.0, 1.0, 1.0), units=("furlong", None, None)),
            "states the unit furlong in its metadata",
        ),
        ("1parsec:2um,:,:", SPACE, "'1parsec:2um,:,:' is not of the form z0:z1,y0:y1,x0:x1"),
        ("um:2um,:,:", SPACE, "is not of the form"),
    ],
)
def test_regions_that_are_not_in_the_volume_are_errors(roi: str, space: Space | None, said: str) -> None:
    with pytest.raises(VolumeError, match=said):
        parse_roi(roi, SIZE, space)


@pytest.mark.parametrize("name", ["nanometer", "nm", "Nanometre", "nanometers"])
def test_units_are_known_by_all_their_names(name: str) -> None:
    unit = meters(name)
    assert unit is not None
    assert unit * 10**9 == 1


@pytest.mark.parametrize("text", ["", "10", "nm", "1e3nm", "10 lightyears", "1.2.3um"])
def test_other_texts_are_no_lengths(text: str) -> None:
    assert length_of(text) is None


def test_report_says_which_voxels_a_region_has(place: Place) -> None:
    with h5py.File(place.volume, "r+") as file:
        file["raw"].attrs["element_size_um"] = [0.04, 0.01, 0.01]
    result = place.infer("--roi", "0.08um:0.72um,1:,0nm:240nm")
    assert result.exit_code == 0, result.stderr
    assert "region     2:18,1:23,0:24 in voxels, from 0.08um:0.72um,1:,0nm:240nm\n" in result.stdout
    by_position = place.prediction()
    assert place.infer("--overwrite", "--roi", "2:18,1:,:24").exit_code == 0
    np.testing.assert_array_equal(place.prediction(), by_position)
    assert place.infer("--resume", "--roi", "80nm:0.72um,1:,:24").exit_code == 0
    checked = place.run("verify", place.out, place.volume, "--network", place.folder / "net.yaml", "--samples", 100)
    assert checked.exit_code == 0
    planned = ("plan", place.folder / "net.yaml", "--volume", place.volume, "--json", "--roi")
    texts = [place.run(*planned, roi).stdout for roi in ("0.08um:0.72um,1:,0nm:240nm", "2:18,1:,:24")]
    assert [json.loads(text)["plan"]["workers"][0]["plan"]["output"] for text in texts] == [[11, 15, 18]] * 2


def test_volume_without_a_voxel_size_takes_voxels_alone(place: Place) -> None:
    said = place.refusal(*place.arguments, "--roi", "1um:2um,:,:")
    assert "states no voxel size in its metadata" in said
    assert "give --roi in voxels, of which it has 20x23x25" in said
    result = place.infer("--roi", "1:2:3,:,:")
    assert result.exit_code == 2
    assert "'1:2:3,:,:' is not of the form z0:z1,y0:y1,x0:x1" in result.stderr
