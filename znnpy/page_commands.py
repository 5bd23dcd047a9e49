"""The commands that show volumes and runs: `znnpy view` and `znnpy report`. This module imports no numpy."""

from __future__ import annotations

import os
import platform
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from znnpy.command_options import NEW_FILE, PLACE, json_option
from znnpy.command_runtime import Command, print_json, print_lines
from znnpy.errors import OutputError
from znnpy.files import Inputs, regular_file, write_asked
from znnpy.stopping import Terminated, working
from znnpy.volume.location import path_of, volume_location

if TYPE_CHECKING:
    from znnpy.view.scene import Scene

SCREENSHOT = (1280, 960)  # pixels
MOST_PORT = 2**16 - 1
HOURS = 3600.0


@click.command(cls=Command)
@click.argument("prediction", type=PLACE)
@click.argument("volume", type=PLACE, required=False)
@click.argument("labels", type=PLACE, nargs=-1)
@click.option(
    "--port",
    type=click.IntRange(1, MOST_PORT),
    metavar="N",
    help="Listen at this port of this machine [default: a free one].",
)
@click.option(
    "--screenshot", type=NEW_FILE, help="Save what the viewer shows to this file, NAME.png, and end. Needs Chromium."
)
@click.option("--slices", type=NEW_FILE, help="Save three slices to this file, NAME.png, and end. Needs no viewer.")
@click.option("--overwrite", is_flag=True, help="Replace the file given as --screenshot or --slices.")
@json_option
def view(
    prediction: str,
    volume: str | None,
    labels: tuple[str, ...],
    port: int | None,
    screenshot: Path | None,
    slices: Path | None,
    overwrite: bool,
    as_json: bool,
) -> None:
    """Look at PREDICTION in the browser, over VOLUME, with LABELS above it.

    Prints the link of a viewer, Neuroglancer, that this machine alone can open and that needs no network. It reads the
    files themselves, in every format that znnpy reads. Where the package neuroglancer is not installed, a picture of
    three slices is saved instead. Ctrl-C ends the viewer.
    """
    from znnpy.view.neuroglancer import is_installed, require_neuroglancer
    from znnpy.view.scene import opened_scene

    if screenshot is not None and slices is not None:
        raise click.UsageError("--screenshot and --slices save different pictures: give one of them")
    if port is not None and slices is not None:
        raise click.UsageError("--port is of the viewer, and --slices needs none: give one of them")
    notes = []
    if screenshot is not None:
        from znnpy.view.browser import require_browser

        require_neuroglancer()
        require_browser()
    elif slices is None and not is_installed():
        from znnpy.extras import install

        slices = Path(f"{Path(volume_location(prediction).name).stem}_slices.png")
        notes.append(f"the package neuroglancer is not installed, so slices are drawn; `{install('view')}`")
    picture = screenshot or slices
    if overwrite and picture is None:
        raise click.UsageError("--overwrite replaces the file given as --screenshot or --slices: give one of them too")
    target = None if picture is None else _picture_file(picture, screenshot, overwrite, (prediction, volume, *labels))
    with working(), opened_scene(prediction, volume, labels) as scene:
        if target is None:
            _serve(scene, port, as_json)
            return
        if screenshot is not None:
            drawn = _screenshot(scene, port)
        else:
            from znnpy.view.slices import left_out, sheet

            notes += left_out(scene)
            drawn = sheet(scene)
        write_asked(target, drawn, "slices" if screenshot is None else "screenshot", overwrite=overwrite)
        said = [f"picture    {target}", *_layers(scene), *(f"note       {note}" for note in (*scene.notes, *notes))]
        if as_json:
            print_json({"picture": str(target), **_as_json(scene, notes)})
        else:
            print_lines(said)


def _picture_file(path: Path, screenshot: Path | None, overwrite: bool, inputs: tuple[str | None, ...]) -> Path:
    """Return the path of a picture; OutputError if it may not be written there."""
    argument = "slices" if screenshot is None else "screenshot"
    if path.suffix.lower() != ".png":
        raise OutputError(f"{path} does not end in .png: give a --{argument} that does")
    read = [found for place in inputs if (found := path_of(place)) is not None]
    return regular_file(path, overwrite, argument, inputs={"array": read})


def _serve(scene: Scene, port: int | None, as_json: bool) -> None:
    """Serve a viewer until Ctrl-C."""
    from znnpy.view.neuroglancer import served

    with served(scene, port or 0) as viewer:
        link = viewer.get_viewer_url()
        try:
            if as_json:
                print_json({"link": link, **_as_json(scene, [])})
            else:
                said = [f"viewer     {link}", *_tunnel(link), *_layers(scene)]
                print_lines([*said, *(f"note       {note}" for note in scene.notes), "Ctrl-C ends it"])
            while True:
                time.sleep(HOURS)
        except Terminated:
            raise
        except KeyboardInterrupt:
            return


def _tunnel(link: str) -> list[str]:
    """Say how to open the link from where one came, if this is a remote machine."""
    if "SSH_CONNECTION" not in os.environ:
        return []
    place = link.split("/")[2]
    return [f"remotely   `ssh -N -L {place.rpartition(':')[2]}:{place} {platform.node()}`, then the same link"]


def _screenshot(scene: Scene, port: int | None) -> bytes:
    """Return a PNG of what the viewer shows."""
    from znnpy.view.browser import screenshot
    from znnpy.view.neuroglancer import served

    with served(scene, port or 0) as viewer:
        return screenshot(viewer, SCREENSHOT)[0]


def _layers(scene: Scene) -> list[str]:
    """List the layers, one a line."""
    from znnpy.messages import excerpt
    from znnpy.shapes import text

    kinds = {"grey": "grey", "prediction": "in colour by its value", "labels": "in a colour for each number"}
    return [
        f"layer      {excerpt(layer.name, 40)}: {text(layer.volume.shape)} {layer.volume.dtype}, {kinds[layer.kind]}"
        for layer in scene.layers
    ]


def _as_json(scene: Scene, notes: list[str]) -> dict[str, Any]:
    """Return the layers as plain dictionaries: places in voxels of the scene, whose size is in meters."""
    layers = [
        {
            "name": layer.name,
            "kind": layer.kind,
            "shape": list(layer.volume.shape),
            "dtype": layer.volume.dtype.name,
            "place": layer.place[:3].tolist(),
            "contrast": list(layer.contrast),
        }
        for layer in scene.layers
    ]
    return {"voxel_meters": scene.scale, "layers": layers, "notes": [*scene.notes, *notes]}


@click.command(cls=Command)
@click.argument("run", type=PLACE)
@click.argument("volume", type=PLACE, required=False)
@click.option("--out", type=NEW_FILE, required=True, help="Write the page to this file, NAME.html.")
@click.option("--overwrite", is_flag=True, help="Replace the file given as --out.")
@json_option
def report(run: str, volume: str | None, out: Path, overwrite: bool, as_json: bool) -> None:
    """Make a page of RUN that any browser shows without a network.

    RUN is the file that `znnpy infer --record` wrote: the page shows what ran where, the plan beside what was measured,
    slices, memory over time, the machine, and how to reproduce it. Of a prediction alone it shows slices, over VOLUME
    if that is given, and the plan.
    """
    target = page_file(out, overwrite, "out", {"run": path_of(run), "volume": path_of(volume)})
    from znnpy.pages.run_page import run_page

    with working():
        made = run_page(run, volume)
        write_asked(target, made, overwrite=overwrite)
    if as_json:
        print_json({"page": str(target), "bytes": len(made.encode())})
    else:
        print_lines([f"page       {target}"])


def page_file(path: Path, overwrite: bool, argument: str, inputs: Inputs) -> Path:
    """Return the path of a page; OutputError if it may not be written, MissingExtraError if a package is missing."""
    from znnpy.pages.page import require_report

    if path.suffix.lower() not in (".html", ".htm"):
        raise OutputError(f"{path} does not end in .html: give a --{argument} that does")
    require_report()
    return regular_file(path, overwrite, argument, inputs=inputs)
