"""A real browser draws the viewer: skipped, with a word, where there is none."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from PIL import Image

from tests.support.browser import needs_browser
from tests.support.viewed_files import block, written
from znnpy.errors import MissingExtraError, OutputError
from znnpy.inference import infer
from znnpy.view import browser
from znnpy.view.browser import page_screenshot, require_browser, screenshot
from znnpy.view.neuroglancer import served
from znnpy.view.scene import opened_scene

pytestmark = pytest.mark.slow

SIZE = (400, 400)
CONNECTED = "python state event source connected"  # what the viewer writes to the console when all is well


def box_where(found: npt.NDArray[np.bool_]) -> tuple[int, int, int, int]:
    """Return the first and last row and column that hold True."""
    rows, columns = np.flatnonzero(found.any(axis=1)), np.flatnonzero(found.any(axis=0))
    return int(rows[0]), int(rows[-1]), int(columns[0]), int(columns[-1])


def drawn_plane(viewer: Any, scale: float, position: list[float] | None = None) -> npt.NDArray[np.int_]:
    """Return the pixels of a plane across z, without lines, after nothing unusual was written to the console."""
    with viewer.txn() as state:
        state.layout, state.cross_section_scale = "xy", scale
        state.position = position or state.position
        state.show_axis_lines = state.show_scale_bar = state.show_default_annotations = False
    drawn, console = screenshot(viewer, SIZE)
    assert [line for line in console if CONNECTED not in line] == []
    assert any(CONNECTED in line for line in console)
    return np.asarray(Image.open(io.BytesIO(drawn)).convert("RGB")).astype(int)


@needs_browser
def test_layers_are_drawn_where_they_lie(tmp_path: Path) -> None:
    """A bright block of the volume, with a prediction of half its resolution over its left half, and labels below.

    The picture is 5 pixels for each voxel, and its middle is voxel 32, 32.
    """
    pytest.importorskip("neuroglancer", reason="the viewer is not installed")
    volume = np.full((64, 64, 64), 20, np.uint8)
    volume[16:32, 16:32, 16:32] = 255
    below = written(tmp_path / "v.h5", volume, (8.0, 8.0, 8.0))
    above = written(
        tmp_path / "p.h5", block((32, 32, 32), (8, 8, 8), (16, 16, 12)), (16.0, 16.0, 16.0), (4.0, 4.0, 4.0)
    )
    labels = np.zeros((64, 64, 64), np.uint16)
    labels[:, 44:60, 16:48] = 3
    cells = written(tmp_path / "l.h5", labels, (8.0, 8.0, 8.0))
    with opened_scene(str(above), str(below), [str(cells)]) as scene, served(scene) as viewer:
        pixels = drawn_plane(viewer, 0.2, [32, 32, 24.5])
    assert pixels.shape[:2] == SIZE[::-1]
    red, green, blue = (pixels[..., channel] for channel in range(3))
    top, left, middle, right = 200 - 16 * 5, 200 - 16 * 5, 200 - 8 * 5, 200
    assert box_where((red > 200) & (green < 120)) == pytest.approx((top, right - 1, left, middle - 1), abs=2)
    assert box_where((red > 200) & (green > 200) & (blue > 200)) == pytest.approx(
        (top, right - 1, middle, right - 1), abs=2
    )
    coloured = (np.abs(red - green) + np.abs(green - blue) > 20) & (np.arange(400) > 210)[:, None]
    assert box_where(coloured) == pytest.approx((200 + 12 * 5, 200 + 28 * 5 - 1, left, 200 + 16 * 5 - 1), abs=2)


@needs_browser
@pytest.mark.long
@pytest.mark.parametrize("channels", [2, 3, 5])
def test_channels_are_drawn(tmp_path: Path, channels: int) -> None:
    """The first channel holds the upper half and the second the right half; of five, the first is shown at first."""
    pytest.importorskip("neuroglancer", reason="the viewer is not installed")
    maps = np.zeros((channels, 32, 32, 32), np.float32)
    maps[0, :, :16] = maps[1, :, :, 16:] = 1
    with opened_scene(str(written(tmp_path / "p.h5", maps))) as scene, served(scene) as viewer:
        pixels = drawn_plane(viewer, 0.1)
    found = [tuple(pixels[row, column] > 127) for row in (100, 300) for column in (100, 300)]
    red, yellow, black, green = (True, False, False), (True, True, False), (False,) * 3, (False, True, False)
    assert found == ([red, yellow, black, green] if channels <= 3 else [red, red, black, black])


@needs_browser
@pytest.mark.long
@pytest.mark.parametrize("name", ["out.zarr", "zarr2://out.zarr", "out.n5", "out.precomputed"])
def test_every_format_is_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """A network of one voxel copies a bright block into each format, where the viewer finds it."""
    pytest.importorskip("neuroglancer", reason="the viewer is not installed")
    monkeypatch.chdir(tmp_path)
    volume = np.zeros((64, 64, 64), np.uint8)
    volume[16:32, 16:32, 16:32] = 255
    network = {"name": "copy", "input_channels": 1, "weights": "net.npz", "normalise": {"mean": 0.0, "std": 255.0}}
    Path("net.yaml").write_text(json.dumps({**network, "layers": [{"type": "conv", "kernel": 1, "out": 1}]}))
    np.savez("net.npz", conv0_weight=np.ones((1, 1, 1, 1, 1), "f4"), conv0_bias=np.zeros(1, "f4"))
    infer(volume, "net.yaml", out=name, device="cpu", calibrate=False, threads=1)
    with opened_scene(name) as scene, served(scene) as viewer:
        pixels = drawn_plane(viewer, 0.2, [32, 32, 24.5])
    assert box_where(pixels[..., 0] > 127) == pytest.approx((120, 199, 120, 199), abs=2)


@needs_browser
def test_errors_of_a_page_are_read_from_its_console(tmp_path: Path) -> None:
    page, picture = tmp_path / "page.html", tmp_path / "page.png"
    page.write_text("<body style='background: #00f'><script>console.log('fine'); undefined.x</script>")
    console = page_screenshot(page, picture, (120, 90))
    assert "fine" in console[0]
    assert "TypeError" in console[1]
    assert len(console) == 2
    drawn = Image.open(picture).convert("RGB")
    assert drawn.size == (120, 90)
    assert drawn.getpixel((60, 45)) == (0, 0, 255)


def test_missing_browser_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda name: None)
    with pytest.raises(MissingExtraError, match="needs Chromium or Chrome"):
        require_browser()


def program(folder: Path, code: str) -> str:
    """Write a program that stands for a browser."""
    path = folder / "browser"
    path.write_text(f"#!{sys.executable}\n{code}\n")
    path.chmod(0o700)
    return str(path)


@pytest.mark.parametrize(
    ("code", "sentence"),
    [("raise SystemExit(7)", "exit code 7"), ("import time; time.sleep(60)", "drawn nothing in time")],
)
def test_a_browser_that_draws_nothing_is_no_success(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str, sentence: str
) -> None:
    pytest.importorskip("neuroglancer", reason="the viewer is not installed")
    monkeypatch.setattr(browser, "find_browser", lambda: program(tmp_path, code))
    array = written(tmp_path / "p.h5", np.zeros((4, 4, 4), np.float32))
    with (
        opened_scene(str(array)) as scene,
        served(scene) as viewer,
        pytest.raises(OutputError, match=sentence),
    ):
        screenshot(viewer, SIZE, seconds=1.0)


@pytest.mark.parametrize(
    ("code", "sentence"), [("raise SystemExit(7)", "exit code 7"), ("import time; time.sleep(60)", "within 1 s")]
)
def test_a_page_that_is_not_drawn_is_no_success(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str, sentence: str
) -> None:
    monkeypatch.setattr(browser, "find_browser", lambda: program(tmp_path, code))
    with pytest.raises(OutputError, match=sentence):
        page_screenshot(tmp_path / "page.html", tmp_path / "page.png", SIZE, seconds=1.0)
    assert not (tmp_path / "page.png").exists()
