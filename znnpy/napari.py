"""A widget of napari that runs a network on an image layer, and adds the result as a layer.

Annotations are evaluated in this module, as magicgui makes the widget of them.
"""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from znnpy.errors import MissingExtraError, VolumeError
from znnpy.extras import install
from znnpy.messages import excerpt
from znnpy.option_values import RESULTS
from znnpy.run.pipeline import Event
from znnpy.trained import load_network
from znnpy.volume.source import Predicted

try:
    import napari
    from magicgui import magic_factory
    from napari.qt.threading import thread_worker
    from napari.utils import progress
except ImportError:
    raise MissingExtraError(f"znnpy.napari needs napari with Qt; `{install('napari')}`") from None

PARTS = 100  # in which progress is shown
NETWORKS = "*.yaml *.yml *.znni *.onnx *.pt2"


class _Cancelled(Exception):
    """The worker was asked to end."""


@dataclass(frozen=True)
class Prediction:
    """The maps that a network gives for the voxels of a layer, and where they lie among them."""

    maps: npt.NDArray[Any]  # (maps, z, y, x)
    place: Predicted


def predictions(data: npt.NDArray[Any], network: Path, options: dict[str, Any]) -> Iterator[float | Prediction]:
    """Yield the shares of the work that are done, and at last the prediction; closing the iterator ends the work."""
    net = load_network(network)
    slides = net.network.meaning == "sliding" and "window" not in options
    events: SimpleQueue[float] = SimpleQueue()
    cancelled: list[bool] = []

    def tell(event: Event) -> None:
        if cancelled:
            raise _Cancelled
        events.put(event.work_done)

    def computed() -> Prediction:
        border: Literal["reflect", "valid"] = "reflect" if slides else "valid"
        try:
            with net.session(data.shape, dtype=data.dtype, border=border, **options) as run:
                return Prediction(run(data, progress=tell), run.places[0])
        finally:
            events.put(1.0)

    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(computed)
        try:
            while (share := events.get()) < 1:
                yield share
            yield future.result()
        finally:
            cancelled.append(True)


def _added(viewer: napari.Viewer, layer: napari.layers.Image, found: Prediction, output: str) -> None:
    """Add the maps of a prediction to a viewer, each at the place of its voxels."""
    scale, translate = np.array(layer.scale[-3:]), np.array(layer.translate[-3:])
    shared = {"scale": scale * found.place.step, "translate": translate + scale * found.place.position}
    for number, one in enumerate(found.maps):
        name = f"{layer.name} {output}" + (f" {number}" if len(found.maps) > 1 else "")
        if output in ("labels", "above"):
            viewer.add_labels(one, name=name, **shared)
        else:
            viewer.add_image(one, name=name, **shared)


@magic_factory(  # type: ignore[untyped-decorator]
    call_button="Run",
    network={"mode": "r", "filter": NETWORKS, "tooltip": "network file"},
    window={"tooltip": "voxels z, y, x of a window; 0, 0, 0: not in windows", "options": {"min": 0, "max": 4096}},
    overlap={"min": 0.0, "max": 0.95, "step": 0.05, "tooltip": "share of a window by which it overlaps the next"},
    output={"choices": RESULTS, "tooltip": "what is added of the network's maps"},
    ram={"tooltip": "memory limit, such as 16G; empty: 3/4 of the machine's memory"},
)
def network_widget(
    viewer: napari.Viewer,
    image: napari.layers.Image,
    network: Path,
    window: tuple[int, int, int] = (0, 0, 0),
    overlap: float = 0.5,
    output: str = "maps",
    ram: str = "",
) -> Any:
    """Run a network on an image layer in a thread of its own; the result is as large as the image.

    Around the faces of the image a network that slides sees mirrored voxels.
    """
    data = np.asarray(image.data[0] if image.multiscale else image.data)
    if image.rgb or data.ndim not in (3, 4):
        raise VolumeError(
            f"layer {excerpt(image.name, 60)} has the shape {excerpt(data.shape, 60)}; choose one that is (z, y, x) or "
            "(channels, z, y, x), without colours"
        )
    options: dict[str, Any] = {"output": output, **({"ram": ram} if ram else {})}
    if any(window):
        options |= {"window": window, "overlap": overlap}
    bar = progress(total=PARTS, desc=f"{network.stem} on {image.name}")

    def tell(found: float | Prediction) -> None:
        if isinstance(found, Prediction):
            _added(viewer, image, found, output)
        else:
            bar.update(int(found * PARTS) - bar.n)

    worker = thread_worker(predictions)(data, network, options)
    worker.yielded.connect(tell)
    worker.finished.connect(bar.close)
    worker.start()
    return worker
