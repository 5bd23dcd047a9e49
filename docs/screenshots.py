"""Make the pictures of viewing.md from the volume of `znnpy demo`: `python docs/screenshots.py docs/images`.

It takes about a minute, and needs Chromium, scipy, and the extras `view` and `report`.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from contextlib import chdir
from io import BytesIO
from pathlib import Path

import h5py
import numpy as np
import numpy.typing as npt
from PIL import Image
from scipy import ndimage

from znnpy import demo
from znnpy.inference import infer
from znnpy.machine import this_machine
from znnpy.network_files import read_network
from znnpy.options import PlanOptions
from znnpy.pages.plan_page import plan_page
from znnpy.pages.run_page import run_page
from znnpy.planning import plan_as_asked
from znnpy.view.browser import page_screenshot, screenshot
from znnpy.view.neuroglancer import served
from znnpy.view.scene import opened_scene
from znnpy.view.slices import sheet

SIZE = 160  # voxels of the demo along each axis
MOST_BYTES = 290_000  # of a picture
VIEW, PAGE = (960, 720), (1100, 1950)  # pixels
PLANNED = (1024, 1024, 1024)


def cells(truth: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint16]:
    """Return a number for each cell: pieces between the membranes, each grown to the middle of its membranes."""
    pieces, _ = ndimage.label(truth == 0)
    nearest = ndimage.distance_transform_edt(pieces == 0, return_distances=False, return_indices=True)
    grown: npt.NDArray[np.uint16] = pieces[tuple(nearest)].astype(np.uint16)
    return grown


def save(picture: Image.Image, path: Path) -> None:
    """Write a picture with as many colours as fit into MOST_BYTES, 256 at most."""
    for colours in (256, 128, 64, 32, 16):
        saved = BytesIO()
        picture.convert("RGB").quantize(colours, dither=Image.Dither.NONE).save(saved, "PNG", optimize=True)
        if saved.tell() <= MOST_BYTES:
            path.write_bytes(saved.getvalue())
            return
    raise SystemExit(f"{path} takes {saved.tell():,} bytes with {colours} colours")


def draw(images: Path, size: int) -> None:
    """Make all pictures, with files of the demo in the current folder."""
    folder = Path("demo")
    demo.run(folder, (size, size, size))
    volume, prediction, labels = (str(folder / name) for name in ("volume.h5", "prediction.h5", "cells.h5"))
    with h5py.File(folder / "truth.h5") as truth, h5py.File(labels, "w") as file:
        file["cells"] = cells(truth["truth"][()])
    record = folder / "run.json"
    infer(volume, out=prediction, overwrite=True, record=record, device="cpu")
    with opened_scene(prediction, volume, [labels]) as scene:
        drawn = Image.open(BytesIO(sheet(scene)))
        save(drawn.resize((drawn.width * 2 // 3, drawn.height * 2 // 3)), images / "slices.png")
        with served(scene) as viewer:
            save(Image.open(BytesIO(screenshot(viewer, VIEW)[0])), images / "view.png")
    asked = PlanOptions(shape=PLANNED, device="cpu")
    planned = plan_as_asked(asked)
    network = read_network(asked.network, None).network if isinstance(asked.network, str) else None
    assert network is not None, "the network that ships"
    pages = {"report": run_page(str(record)), "plan": plan_page(planned, network, this_machine(), asked, ())}
    for name, html in pages.items():
        page, picture = folder / f"{name}.html", folder / f"{name}.png"
        page.write_text(html)
        page_screenshot(page, picture.absolute(), PAGE)
        with Image.open(picture) as opened:
            save(opened, images / f"{name}.png")


def main() -> None:
    """Read the arguments, and make the pictures in a folder that is removed afterwards."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("images", type=Path, help="folder to write to")
    parser.add_argument("--size", type=int, default=SIZE, help="voxels of the demo along each axis")
    asked = parser.parse_args()
    images = Path(os.path.abspath(asked.images))
    with tempfile.TemporaryDirectory(prefix="znnpy-") as folder, chdir(folder):
        draw(images, asked.size)


if __name__ == "__main__":
    main()
