"""Show a scene in Neuroglancer, which the package `neuroglancer` serves whole: nothing is loaded from elsewhere."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import numpy as np

from znnpy.errors import MissingExtraError, OutputError
from znnpy.extras import install
from znnpy.messages import option
from znnpy.view.scene import Layer, Matrix, Scene
from znnpy.view.voxels import ShownVoxels

if TYPE_CHECKING:
    from neuroglancer import Viewer

HOST = "127.0.0.1"  # the only address that is listened at: the volume is for this machine
AXES = ("x", "y", "z")  # order in which the viewer shows them
MIXED, CHOSEN = "c^", "c'"  # names of an axis of channels that are shown together, or one at a time
COLOURS = 3  # channels that one picture shows at a time, as red, green and blue
ALIKE = 1.01  # times the shortest edge of a voxel
DIGITS = 12  # of the directions of axes
PANEL = 400.0  # pixels along a cross-section into which the prediction fits at first

GREY = """#uicontrol invlerp normalized
void main() {
  emitGrayscale(normalized());
}
"""
PROBABILITY = """#uicontrol vec3 colour color(default="#ff3c14")
#uicontrol invlerp normalized
void main() {
  float value = normalized();
  emitRGBA(vec4(colour, value));
}
"""
_SHADES = """#uicontrol invlerp red(channel=0)
#uicontrol invlerp green(channel=1)
{blue}
void main() {{
  vec3 shade = vec3(red(), green(), {last});
  emit{kind};
}}
"""


def is_installed() -> bool:
    """Return whether the package neuroglancer is installed, without importing it."""
    return find_spec("neuroglancer") is not None


def require_neuroglancer() -> None:
    """Raise MissingExtraError if the package neuroglancer is not installed."""
    if not is_installed():
        raise MissingExtraError(
            f"the viewer needs the package neuroglancer, which is not installed; `{install('view')}`"
        )


@contextmanager
def served(scene: Scene, port: int = 0) -> Iterator[Viewer]:
    """Serve a viewer of the scene at this port of this machine, until the context ends; 0: at any free port.

    OutputError if the port is taken.
    """
    require_neuroglancer()
    import neuroglancer

    neuroglancer.set_server_bind_address(HOST, port)
    try:
        viewer = neuroglancer.Viewer()
    except OSError as error:
        raise OutputError(
            f"cannot listen at port {port} of {HOST}: {error.strerror or error}; give another {option('port')}"
        ) from error
    try:
        with viewer.txn() as state:
            fill(state, scene)
        yield viewer
    finally:
        neuroglancer.stop()


def fill(state: Any, scene: Scene) -> None:
    """Set the state of a viewer: the size of voxels, where one looks first, and the layers."""
    from neuroglancer import CoordinateSpace

    scales, units = _scales(scene)
    state.dimensions = CoordinateSpace(names=list(AXES), units=[units] * 3, scales=scales[::-1])
    low, high = scene.focus.corners
    middle = np.floor((low + high) / 2) + 0.5
    state.position = [float(at) for at in middle[::-1]]
    size = (high - low) * scales
    finest = min(scales)
    state.cross_section_scale = float(size.max() / finest / PANEL)
    state.projection_scale = float(2 * size.max() / finest)
    state.layout = "4panel"
    state.cross_section_background_color = "#000000"
    for layer in scene.layers:
        state.layers.append(name=layer.name, layer=_layer(layer, scales, units))
        if layer.volume.channels > 1 and _is_chosen(layer):
            state.layers[layer.name].local_position = [0.5]  # the first channel


def _is_chosen(layer: Layer) -> bool:
    """Return whether a picture shows one channel at a time, which the user of the viewer chooses."""
    return layer.kind == "labels" or layer.volume.channels > COLOURS


def _scales(scene: Scene) -> tuple[tuple[float, float, float], str]:
    """Return the size of a voxel of the scene (z, y, x), and its unit; a voxel is 1 where the size is not known."""
    return ((1.0, 1.0, 1.0), "") if scene.scale is None else (scene.scale, "m")


def _layer(layer: Layer, scales: Sequence[float], unit: str) -> Any:
    """Return a layer of the viewer."""
    from neuroglancer import ImageLayer, LayerDataSource, SegmentationLayer

    voxels = ShownVoxels(layer)
    source, transform = _source(layer, voxels, scales, unit)
    if layer.kind == "labels":
        meshes = {"mesh": False}  # a mesh would be made of a copy of the whole volume
        where = LayerDataSource(url=source, transform=transform, subsources=meshes)
        return SegmentationLayer(source=where, selected_alpha=0.35)
    where = LayerDataSource(url=source, transform=transform)
    return ImageLayer(source=where, shader=shader(layer), shader_controls=_controls(layer), opacity=1.0)


def _source(layer: Layer, voxels: ShownVoxels, scales: Sequence[float], unit: str) -> tuple[Any, Any]:
    """Return the voxels as a source that the viewer reads box by box, and their place in the scene."""
    from neuroglancer import CoordinateSpace, CoordinateSpaceTransform

    from znnpy.view.pyramid import PyramidVolume

    names, lead = list(AXES[::-1]), 0
    lengths = layer.place[:3, :3] * np.array(scales)[:, None]  # of the voxels' edges, along the axes of the scene
    edges = np.sqrt((lengths**2).sum(axis=0))
    sizes, units = edges.tolist(), [unit] * 3
    if voxels.ndim == 4:
        names, lead = [CHOSEN if _is_chosen(layer) else MIXED, *names], 1
        sizes, units = [1.0, *sizes], ["", *units]
    coarser = [
        ((*[1] * lead, *factors), ShownVoxels(layer, level))
        for factors, level in layer.coarser
        if edges.max() < ALIKE * edges.min()  # of others the viewer wants means of other blocks than are stored
    ]
    space = CoordinateSpace(names=names, units=units, scales=sizes)
    source = PyramidVolume(voxels, coarser, space, "segmentation" if layer.kind == "labels" else "image")
    matrix = np.eye(lead + 3, lead + 4)
    # The viewer's matrix is in units of length, so that the size of voxels is no part of it; its last column counts
    # voxels of the output. A voxel reaches from i to i + 1 there, while `place` speaks of the voxels' centres.
    linear = layer.place[:3, :3]
    matrix[lead:, lead:-1] = np.round(lengths / edges, DIGITS)
    matrix[lead:, -1] = layer.place[:3, 3] + 0.5 - linear.sum(axis=1) / 2
    within = [1.0] * lead + list(scales)
    output = CoordinateSpace(names=names, units=units, scales=within)
    return source, CoordinateSpaceTransform(output_dimensions=output, matrix=_plain(matrix))


def _plain(matrix: Matrix) -> list[list[float]]:
    return [[float(value) for value in row] for row in matrix]


def shader(layer: Layer) -> str:
    """Return the program by which the viewer turns values into colours."""
    channels = layer.volume.channels
    if not 2 <= channels <= COLOURS:
        return GREY if layer.kind == "grey" else PROBABILITY
    blue = "#uicontrol invlerp blue(channel=2)" if channels == COLOURS else ""
    kind = "RGB(shade)" if layer.kind == "grey" else "RGBA(vec4(shade, max(max(shade.r, shade.g), shade.b)))"
    return _SHADES.format(blue=blue, last="blue()" if blue else "0.0", kind=kind)


def _controls(layer: Layer) -> dict[str, Any]:
    """Return the values that the program draws as black and as white."""
    channels, contrast = layer.volume.channels, {"range": list(layer.contrast)}
    if not 2 <= channels <= COLOURS:
        return {"normalized": contrast}
    return dict.fromkeys(("red", "green", "blue")[:channels], contrast)
