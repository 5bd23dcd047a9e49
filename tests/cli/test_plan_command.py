"""`znnpy plan` says why other primitives were not chosen, and plots throughput against memory."""

from __future__ import annotations

import errno
import json
from pathlib import Path

import pytest
from PIL import Image

import znnpy
from tests.support.cli import Place
from znnpy import progress
from znnpy.plots.figures import DPI, WIDTH
from znnpy.report.memory_sweep import Point

pytestmark = pytest.mark.slow


def test_reasons_are_printed_and_in_json(place: Place) -> None:
    arguments = ("plan", place.folder / "net.yaml", "--volume", place.volume, "--device", "cpu")
    document = json.loads(place.run(*arguments, "--json").stdout)
    rows = document["why_not"]
    assert [row["primitive"] for row in rows if row["taken"]] == [
        c["primitive"] for c in document["plan"]["workers"][0]["plan"]["stages"][0]["choices"]
    ]
    told = place.run(*arguments, "--why").stdout
    for row in rows:
        assert row["primitive"] in told
    assert "dense output needs every offset" in " ".join(told.split())
    assert "why not" not in place.run(*arguments).stdout


def plot_words(place: Place, plot: Path) -> tuple[object, ...]:
    arguments = ("--ram", "1G", "--threads", 1, "--device", "cpu", "--plot", plot)
    return ("plan", place.folder / "net.yaml", "--volume", place.volume, *arguments)


def test_plot_shows_throughput_against_memory(place: Place) -> None:
    """Points of columns and of patches, the plan among them; the file is a picture, and there only when it is whole."""
    picture = place.folder / "curves.png"
    place.write_small_volume()
    result = place.run(*plot_words(place, picture), "--json")
    assert result.exit_code == 0, result.stderr
    document = json.loads(result.stdout)
    with Image.open(picture) as image:
        assert image.format == "PNG"
        assert image.width == WIDTH * DPI
        assert len(image.convert("RGB").getcolors(2**20) or []) > 4
    assert not list(place.folder.glob("*.partial"))
    assert {curve["cover"] for curve in document["curves"]} == {"columns", "patches"}
    within = [curve for curve in document["curves"] if curve["limit_bytes"] >= document["peak_bytes"]]
    assert max(curve["voxels_per_second"] for curve in within) == document["voxels_per_second"]
    assert "curves.png exists already; give another --plot" in place.refusal(*plot_words(place, picture))
    assert place.run(*plot_words(place, picture), "--overwrite", "--cover", "patches").exit_code == 0


def test_unwritable_plot_is_refused_before_planning(place: Place) -> None:
    """One sentence, before anything is planned."""
    assert "does not end in .png: give a --plot that does" in place.refusal(*plot_words(place, place.folder / "a.jpg"))
    assert "is not a folder; give another --plot" in place.refusal(*plot_words(place, place.folder / "gone" / "a.png"))
    (place.folder / "folder.png").mkdir()
    assert "is a folder; give another --plot" in place.refusal(*plot_words(place, place.folder / "folder.png"))


def test_no_plot_is_written_without_a_plan(place: Place) -> None:
    arguments = plot_words(place, place.folder / "curves.png")
    place.write_small_volume()
    assert "nothing fits" in place.refusal(*arguments, "--ram", "1M")


def test_full_disk_leaves_the_old_plot(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    picture = place.folder / "curves.png"
    picture.write_bytes(b"old")
    place.write_small_volume()

    def full(self: Path, target: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    result = place.run(*plot_words(place, picture), "--overwrite")
    assert result.exit_code == 1
    assert result.stderr.strip().splitlines()[-1] == (
        f"Error: cannot write {picture}: No space left on device; give another --plot"
    )
    assert picture.read_bytes() == b"old"
    assert not list(place.folder.glob("*.partial"))


def test_progress_of_the_curves_shows_time_left(place: Place, capsys: pytest.CaptureFixture[str]) -> None:
    plan = znnpy.plan(place.folder / "net.yaml", shape=(30, 30, 30), device="cpu")
    found: list[Point] = []
    with pytest.MonkeyPatch.context() as patch, progress.curves() as into:
        patch.setattr(progress, "SECONDS_BETWEEN_LINES", 0.0)
        into(found)(Point(2**31, plan.main, 0.25))
    assert found[0].limit == 2**31
    assert capsys.readouterr().err.startswith("curves  25%  limit 2.00 GiB, about ")


def test_impossible_limits_and_volumes_are_refused(place: Place) -> None:
    """One sentence each, with the numbers and what to do."""
    arguments = ("plan", place.folder / "net.yaml", "--device", "cpu")
    small = place.refusal(*arguments, "--shape", "7,11,9", "--ram", "1M")
    assert "nothing fits in 1.0 MiB of RAM: the smallest need is " in small
    assert "; allow at least --ram " in small
    assert "smaller than the field of view along z" in place.refusal(*arguments, "--shape", "2,30,30")
    for option, value in (("--ram", "0"), ("--ram", "-1G"), ("--threads", "0"), ("--threads", "-2")):
        assert place.run(*arguments, f"{option}={value}").exit_code == 2


def test_output_below_the_pooling_period_is_planned(place: Place) -> None:
    """The patch is as large as the period, and what is beyond the output is not written."""
    fov = place.network.field_of_view
    shape = ",".join(map(str, fov))
    document = json.loads(place.run("plan", place.folder / "net.yaml", "--shape", shape, "--json").stdout)
    assert document["plan"]["workers"][0]["plan"]["output"] == [1, 1, 1]
    assert document["plan"]["workers"][0]["plan"]["patch_out"] == list(place.network.period) != [1, 1, 1]


def test_limit_above_the_machine_is_planned_with_a_note(place: Place) -> None:
    arguments = ("plan", place.folder / "net.yaml", "--shape", "30,30,30", "--device", "cpu", "--ram", "512T")
    result = place.run(*arguments)
    assert result.exit_code == 0
    assert "the limit of 512 TiB is above the " in " ".join(result.stdout.split())
