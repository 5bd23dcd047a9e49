"""Voxel sizes in attributes of HDF5 datasets: carried to outputs, and ignored with a line of the log where odd."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from tests.support.cli import Place
from znnpy.volume import open_volume
from znnpy.volume.space import Space

NM = ("nanometer",) * 3


def made(path: Path, **attributes: Any) -> Path:
    with h5py.File(path, "w") as file:
        file["main"] = np.random.default_rng(7).integers(0, 256, (20, 23, 25), np.uint8)
        file["main"].attrs.update(attributes)
    return path


@pytest.mark.parametrize(
    ("attributes", "space"),
    [
        ({}, None),
        ({"element_size_um": [0.04, 0.004, 0.008]}, Space((0.04, 0.004, 0.008), units=("micrometer",) * 3)),
        ({"element_size_um": np.array([2, 1, 1], ">i4")}, Space((2.0, 1.0, 1.0), units=("micrometer",) * 3)),
        (Space((40.0, 4.0, 8.0), (1.0, -2.0, 3.0), NM).attributes(), Space((40.0, 4.0, 8.0), (1.0, -2.0, 3.0), NM)),
        (
            {"resolution": [3.0, 2.0, 1.0], "units": np.bytes_(b"nm,,")},
            Space((3.0, 2.0, 1.0), units=("nm", None, None)),
        ),
        ({"resolution": [3.0, 2.0, 1.0], "element_size_um": "odd"}, Space((3.0, 2.0, 1.0))),
    ],
    ids=range(6),
)
def test_voxel_size_is_read_from_attributes(tmp_path: Path, attributes: dict[str, Any], space: Space | None) -> None:
    with open_volume(made(tmp_path / "v.h5", **attributes)) as volume:
        assert volume.space == space


@pytest.mark.parametrize(
    "attributes",
    [
        {"element_size_um": [0.04, 0.004]},
        {"element_size_um": "0.04"},
        {"element_size_um": [0.0, 1.0, 1.0]},
        {"element_size_um": [np.nan, 1.0, 1.0]},
        {"element_size_um": [np.inf, 1.0, 1.0]},
        {"element_size_um": np.array([1j, 1, 1])},
        {"element_size_um": np.ones(60_000, np.uint8)},
        {"element_size_um": h5py.Empty("f8")},
        {"resolution": [1.0, 1.0, 1.0], "axes": "x,y,z"},
        {"resolution": [1.0, 1.0, 1.0], "axes": 3},
        {"resolution": [1.0, 1.0, 1.0], "units": "nm,nm"},
        {"resolution": [1.0, 1.0, 1.0], "units": "n" * 60_000},
        {"resolution": [1.0, 1.0, 1.0], "units": "\x1b,nm,nm"},
        {"resolution": [1.0, 1.0, 1.0], "units": np.bytes_(b"\xff,,")},
        {"resolution": [1.0, 1.0, 1.0], "translation": [np.nan, 0.0, 0.0]},
    ],
    ids=range(15),
)
def test_odd_attributes_are_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, attributes: dict[str, Any]
) -> None:
    caplog.set_level(logging.INFO, "znnpy")
    with open_volume(made(tmp_path / "v.h5", **attributes)) as volume:
        assert volume.space is None
    (line,) = [message for message in caplog.messages if "voxel size" in message]
    assert "v.h5: main: the voxel size in its attributes is not used: " in line
    assert len(line) < 500


@pytest.mark.slow
def test_output_carries_the_voxel_size(place: Place) -> None:
    path = made(place.folder / "em.h5", element_size_um=[0.04, 0.004, 0.008])
    result = place.run("infer", path, "--network", place.folder / "net.yaml", "--out", place.out, "--roi", "4:,:,1:")
    assert result.exit_code == 0, result.output
    with open_volume(place.out, "prediction") as volume:
        assert volume.space is not None
        assert volume.space.scale == (0.04, 0.004, 0.008)
        np.testing.assert_allclose(volume.space.translation, (6 * 0.04, 3 * 0.004, 4 * 0.008))
        assert volume.space.units == ("micrometer",) * 3
