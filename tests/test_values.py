"""The report says what range of values a run wrote, and whether the grey values it read are odd."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

import znnpy
from tests.support.cli import Place
from znnpy import values
from znnpy.values import Tally, Values


def assert_values(found: Values | None, written: npt.NDArray[np.float64]) -> None:
    assert found is not None
    assert (found.lowest, found.highest) == (written.min(), written.max())
    assert found.mean == pytest.approx(written.mean())


@pytest.mark.parametrize("piece", [7, values.PIECE])
def test_tally_equals_numpys_min_max_and_mean_of_finite_values(piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(values, "PIECE", piece)
    rng = np.random.default_rng(4)
    parts = [rng.standard_normal((2, 3, 4, 5)).astype(np.float32), rng.standard_normal((2, 1, 4, 5)).astype(np.float32)]
    parts[0][0, 1, 2, 3], parts[0][1, 2, 0, 0], parts[1][:, 0] = np.inf, -np.inf, np.nan
    tally = Tally()
    for part in parts:
        tally.add(part.transpose(0, 3, 2, 1))
    finite = parts[0][np.isfinite(parts[0])].astype(np.float64)
    assert_values(tally.values, finite)


def test_tally_without_finite_values_is_empty() -> None:
    tally = Tally()
    tally.add(np.full((1, 2, 3, 4), np.nan, np.float32))
    assert tally.values is None


def test_report_states_range_and_mean_of_the_output(place: Place) -> None:
    report = znnpy.infer(place.volume, place.folder / "net.yaml", out=place.out, threads=1, patch=(4, 4, 4))
    written = place.prediction().astype(np.float64)
    assert_values(report.values, written)
    mean = f"{written.mean():.3g}"
    assert f"values     {written.min():.3g} to {written.max():.3g}, mean {mean}" in report.lines()
    assert report.as_json()["values"]["mean"] == pytest.approx(written.mean())
    assert report.warnings == tuple(w for w in report.warnings if "sampled mean" not in w)


def test_uint8_outputs_are_reported_as_255_times_the_value(place: Place) -> None:
    report = znnpy.infer(place.volume, place.folder / "net.yaml", out=place.out, output_dtype="uint8", threads=1)
    (line,) = [line for line in report.lines() if line.startswith("values")]
    assert line.endswith(", which are 255 times the network's")


def floats_for_a_network_of_bytes(place: Place) -> Path:
    """Write a volume from 0 to 1, and net.yaml with the mean and deviation of bytes."""
    place.write_network(normalise={"mean": 130.0, "std": 33.5})
    return place.write_volume(np.random.default_rng(5).random((20, 23, 25), np.float32), "floats.h5")


def test_command_line_warns_on_stderr(place: Place) -> None:
    volume = floats_for_a_network_of_bytes(place)
    arguments = ["infer", str(volume), "--network", str(place.folder / "net.yaml"), "--threads", "1", "--json"]
    done = subprocess.run([sys.executable, "-m", "znnpy", *arguments], capture_output=True, text=True, check=True)
    assert "the network expects about 130 +- 33.5: is the volume scaled to 0..1" in done.stderr
    assert any("the sampled mean" in warning for warning in json.loads(done.stdout)["warnings"])


def test_odd_grey_values_give_a_warning_with_both_numbers(place: Place, caplog: pytest.LogCaptureFixture) -> None:
    """Floats from 0 to 1 in a network that was trained on bytes give the warning."""
    volume = floats_for_a_network_of_bytes(place)
    with caplog.at_level(logging.WARNING, "znnpy"):
        report = znnpy.infer(volume, place.folder / "net.yaml", out=place.out, threads=1)
    (warning,) = [warning for warning in report.warnings if "sampled mean" in warning]
    assert "the sampled mean of channel 0 is 0.4985 +- 0.2904" in warning
    assert "the network expects about 130 +- 33.5" in warning
    assert warning in caplog.messages
    assert f"warning: {warning}" in report.lines()
