"""`znnpy view`: prints a link, or saves a picture, and refuses what it cannot show in one sentence."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.support.browser import needs_browser
from tests.support.cli import Place
from tests.support.messages import assert_holds
from tests.support.viewed_files import RESOLUTION, grey, written

pytestmark = pytest.mark.slow

PROGRAM = (sys.executable, "-m", "znnpy")
LINK = re.compile(r"http://127\.0\.0\.1:\d+/v/[0-9a-f]+/")


@pytest.fixture
def prediction(place: Place) -> Path:
    return written(place.folder / "p.h5", np.linspace(0, 1, 480, dtype="f4").reshape(6, 8, 10), RESOLUTION)


@contextmanager
def viewing(*arguments: object, **environment: str) -> Iterator[subprocess.Popen[str]]:
    words = [*PROGRAM, "view", *map(str, arguments)]
    process = subprocess.Popen(
        words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, **environment}
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def size_of(picture: Path) -> tuple[int, int]:
    """Return width and height of a PNG."""
    with Image.open(picture) as opened:
        assert opened.format == "PNG"
        return opened.size


def lines_until(process: subprocess.Popen[str], last: str) -> list[str]:
    """Return what a process prints until a line that begins with `last`."""
    assert process.stdout is not None
    found: list[str] = []
    for line in process.stdout:
        found.append(line.rstrip())
        if line.startswith(last):
            return found
    raise AssertionError(found)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 0), (signal.SIGTERM, 143)])
def test_viewer_is_served_until_it_is_stopped(
    place: Place, prediction: Path, number: signal.Signals, code: int
) -> None:
    pytest.importorskip("neuroglancer", reason="the viewer is not installed")
    with viewing(prediction, place.volume, prediction, SSH_CONNECTION="10.0.0.1 1 10.0.0.2 22") as process:
        link, remotely, *layers, note, last = lines_until(process, "Ctrl-C")
        assert LINK.fullmatch(link.removeprefix("viewer     "))
        port = link.split(":")[2].split("/")[0]
        assert f"ssh -N -L {port}:127.0.0.1:{port} " in remotely
        assert layers == [
            "layer      volume: 1x20x23x25 uint8, grey",
            "layer      prediction: 1x6x8x10 float32, in colour by its value",
            "layer      p.h5: 1x6x8x10 float32, in a colour for each number",
            "note       the size of a voxel is not stated, so positions are in voxels",
        ]
        assert "in the middle" in note
        assert last == "Ctrl-C ends it"
        with urllib.request.urlopen(link.removeprefix("viewer     ")) as page:
            assert page.status == 200
        process.send_signal(number)
        assert process.wait(20) == code
        assert process.stderr is not None
        assert process.stderr.read() == ("stopped by SIGTERM\n" if code else "")


def test_link_is_in_the_json(place: Place, prediction: Path) -> None:
    pytest.importorskip("neuroglancer", reason="the viewer is not installed")
    with viewing(prediction, "--json", SSH_CONNECTION="") as process:
        document = json.loads("\n".join(lines_until(process, "}")))
    assert LINK.fullmatch(document["link"])
    (layer,) = document["layers"]
    assert (layer["name"], layer["kind"], layer["shape"]) == ("prediction", "prediction", [1, 6, 8, 10])
    assert document["voxel_meters"] == pytest.approx([40e-9, 8e-9, 8e-9])
    assert layer["place"] == np.eye(3, 4).tolist()


def test_slices_need_no_viewer(place: Place, prediction: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("znnpy.view.neuroglancer.find_spec", lambda name: None)
    picture = place.folder / "slices.png"
    done = place.run("view", prediction, place.volume, "--slices", picture)
    assert done.exit_code == 0
    assert done.stdout.splitlines()[0] == f"picture    {picture}"
    assert "not installed" not in done.stdout
    assert size_of(picture)[0] > 800
    assert "exists already; give another --slices" in place.refusal("view", prediction, "--slices", picture)
    document = json.loads(place.run("view", prediction, "--slices", picture, "--overwrite", "--json").stdout)
    assert document["picture"] == str(picture)
    assert size_of(picture)[0] < 800


def test_without_the_viewer_slices_are_drawn(place: Place, prediction: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("znnpy.view.neuroglancer.find_spec", lambda name: None)
    monkeypatch.chdir(place.folder)
    done = place.run("view", prediction)
    assert done.exit_code == 0
    assert_holds(done.stdout.splitlines()[-1], "the package neuroglancer is not installed", "pip install")
    assert size_of(place.folder / "p_slices.png")[0] < 800
    assert "p_slices.png exists already" in place.refusal("view", prediction)


@needs_browser
def test_screenshot_shows_the_volume(place: Place) -> None:
    pytest.importorskip("neuroglancer", reason="the viewer is not installed")
    volume = np.full((32, 32, 32), 20, np.uint8)
    volume[8:24, 8:24, 8:24] = 255
    below = written(place.folder / "v.h5", volume, (8.0, 8.0, 8.0))
    above = written(place.folder / "p.h5", np.zeros((32, 32, 32), "f4"), (8.0, 8.0, 8.0))
    picture = place.folder / "shot.png"
    done = place.run("view", above, below, "--screenshot", picture)
    assert done.exit_code == 0, done.stderr
    with Image.open(picture) as opened:
        pixels = np.asarray(opened.convert("RGB"))
    assert pixels.shape == (960, 1280, 3)
    share = (pixels.min(axis=2) > 230).mean()
    assert 0.04 < share < 0.5
    assert (pixels.max(axis=2) < 40).mean() > 0.2


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--slices", "a.jpg"), "a.jpg does not end in .png: give a --slices that does"),
        (("--slices", "gone/a.png"), "is not a folder; give another --slices"),
        (("--slices", "p.png"), "is the array p.png itself; give another name as --slices"),
    ],
)
def test_pictures_that_cannot_be_saved_are_refused(
    place: Place, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], sentence: str
) -> None:
    monkeypatch.chdir(place.folder)
    written(Path("p.h5"), grey())
    Path("p.png").symlink_to("p.h5")
    assert sentence in place.refusal("view", "p.png" if "p.png" in arguments else "p.h5", *arguments)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--slices", "a.png", "--screenshot", "b.png"), "--screenshot and --slices save different pictures"),
        (("--slices", "a.png", "--port", "8000"), "--port is of the viewer"),
        (("--overwrite",), "--overwrite replaces the file given as --screenshot or --slices"),
        (("--port", "0"), "0 is not in the range 1<=x<=65535"),
    ],
)
def test_options_that_do_not_go_together_are_refused(
    place: Place, prediction: Path, arguments: tuple[str, ...], sentence: str
) -> None:
    done = place.run("view", prediction, *arguments)
    assert done.exit_code == 2
    assert sentence in done.stderr


def test_screenshot_without_the_package_or_a_browser_is_refused(
    place: Place, prediction: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ("view", prediction, "--screenshot", place.folder / "a.png")
    with monkeypatch.context() as context:
        context.setattr("znnpy.view.neuroglancer.find_spec", lambda name: None)
        assert "needs the package neuroglancer" in place.refusal(*words)
    pytest.importorskip("neuroglancer", reason="the viewer is not installed")
    monkeypatch.setattr("znnpy.view.browser.find_browser", lambda: None)
    assert "needs Chromium or Chrome" in place.refusal(*words)


def test_what_is_no_volume_is_refused(place: Place, prediction: Path) -> None:
    picture = place.folder / "a.png"
    assert "there is no file" in place.refusal("view", place.folder / "gone.h5", "--slices", picture)
    assert "there is no file" in place.refusal("view", prediction, place.folder / "gone.h5", "--slices", picture)
    (place.folder / "text.h5").write_text("no volume")
    assert "text.h5" in place.refusal("view", place.folder / "text.h5", "--slices", picture)
