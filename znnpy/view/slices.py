"""Draw slices of a scene with Pillow alone: three planes through the middle, each array beside the others."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from znnpy.messages import excerpt
from znnpy.view.scene import Layer, Scene
from znnpy.view.voxels import ShownVoxels

if TYPE_CHECKING:
    from PIL import Image

AXES = "zyx"
MOST_SIDE = 1024.0  # voxels of the scene along a side of a slice; of larger ones the middle is drawn
PIXELS = 420  # along the longer side of a slice
GAP, LINE = 10, 18  # pixels between slices, and above each for its title
SPREAD = 0x9E3779B97F4A7C15  # Fibonacci hashing: the highest bits of the product depend on all bits of a label
COLOURS = 3
ROUNDING = 1e-9  # of positions, in voxels

Colours = npt.NDArray[np.uint8]  # (y, x, 3)


@dataclass(frozen=True, slots=True)
class Slice:
    """A plane of an array, drawn.

    axis    0: z; the plane stands across it
    at      position along the axis, in voxels of the scene
    """

    layer: str
    axis: int
    at: int
    picture: Image.Image

    @property
    def title(self) -> str:
        """The array, and where the plane lies."""
        return f"{excerpt(self.layer, 24)}, {AXES[self.axis]} = {self.at}"


def slices(scene: Scene, axes: Sequence[int] = (0, 1, 2)) -> list[list[Slice]]:
    """Draw planes through the middle of the prediction, each across one axis; the arrays of a plane are in one list.

    An array whose axes are turned against those of the scene is left out.
    """
    low, high = _window(scene)
    middle = np.floor((low + high) / 2)
    layers = [layer for layer in scene.layers if layer.is_straight]
    return [
        [
            Slice(layer.name, axis, int(middle[axis]), _drawn(layer, axis, middle[axis], low, high, scene))
            for layer in layers
        ]
        for axis in axes
    ]


def left_out(scene: Scene) -> list[str]:
    """Say which arrays are not drawn."""
    return [
        f"{excerpt(layer.name)} is left out: its axes are turned against those of the volume"
        for layer in scene.layers
        if not layer.is_straight
    ]


def sheet(scene: Scene) -> bytes:
    """Return a PNG with a row for each of three planes, and a column for each array."""
    from PIL import Image, ImageDraw

    rows = slices(scene)
    widths = [max(row[column].picture.width for row in rows) for column in range(len(rows[0]))]
    heights = [max(one.picture.height for one in row) + LINE for row in rows]
    size = (sum(widths) + GAP * (len(widths) + 1), sum(heights) + GAP * (len(heights) + 1))
    whole = Image.new("RGB", size, "white")
    pen = ImageDraw.Draw(whole)
    y = GAP
    for row, height in zip(rows, heights, strict=True):
        x = GAP
        for one, width in zip(row, widths, strict=True):
            pen.text((x, y), one.title, fill="black")
            whole.paste(one.picture, (x, y + LINE))
            x += width + GAP
        y += height + GAP
    return png(whole)


def png(picture: Image.Image) -> bytes:
    """Return the bytes of a picture as PNG."""
    saved = io.BytesIO()
    picture.save(saved, "PNG", optimize=True)
    return saved.getvalue()


def _window(scene: Scene) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Return the corners of what is drawn: the box of the prediction, or the middle of a large one."""
    low, high = scene.focus.corners
    middle, half = (low + high) / 2, np.minimum(high - low, MOST_SIDE) / 2
    return np.floor(middle - half), np.ceil(middle + half)


def _drawn(
    layer: Layer,
    axis: int,
    at: float,
    low: npt.NDArray[np.float64],
    high: npt.NDArray[np.float64],
    scene: Scene,
) -> Image.Image:
    """Draw one plane of an array; black where it holds no voxels."""
    from PIL import Image

    across = [one for one in range(3) if one != axis]
    where, inside = [], []
    for one in range(3):
        positions = np.array([at]) if one == axis else np.arange(low[one], high[one])
        step, offset = layer.place[one, one], layer.place[one, 3]
        found = np.floor((positions - offset) / step + 0.5 + ROUNDING)
        index = np.clip(found, -1, layer.volume.size[one]).astype(np.int64)
        inside.append((index >= 0) & (index < layer.volume.size[one]))
        where.append(index)
    shape = tuple(len(where[one]) for one in across)
    colours = np.zeros((*shape, COLOURS), np.uint8)
    if all(one.any() for one in inside):
        kept = [index[held] for index, held in zip(where, inside, strict=True)]
        voxels = _read(layer, kept)[(slice(None), *(0 if one == axis else slice(None) for one in range(3)))]
        first, second = (inside[one] for one in across)
        colours[np.ix_(first, second)] = _coloured(layer, voxels)
    picture = Image.fromarray(colours)
    sizes = [1.0] * 3 if scene.scale is None else list(scene.scale)
    height, width = (count * sizes[one] for count, one in zip(shape, across, strict=True))
    scale = PIXELS / max(height, width)
    size = (max(1, round(width * scale)), max(1, round(height * scale)))
    return picture.resize(size, Image.Resampling.NEAREST if layer.kind == "labels" else Image.Resampling.BILINEAR)


def _read(layer: Layer, where: Sequence[npt.NDArray[np.int64]]) -> npt.NDArray[Any]:
    """Read voxels (c, z, y, x) at indices along each axis."""
    first = [int(index.min()) for index in where]
    slices_ = tuple(slice(lo, int(index.max()) + 1) for lo, index in zip(first, where, strict=True))
    voxels = ShownVoxels(layer)
    channels = slice(0, min(COLOURS, layer.volume.channels))
    read = voxels[slices_][None] if voxels.ndim == 3 else voxels[channels, *slices_]
    z, y, x = (index - lo for index, lo in zip(where, first, strict=True))
    return read[np.ix_(np.arange(len(read)), z, y, x)]


def _coloured(layer: Layer, voxels: npt.NDArray[Any]) -> Colours:
    """Return the colours of a plane, (c, y, x): labels by their number, one channel in grey, others as colours."""
    if layer.kind == "labels":
        return _label_colours(voxels[0])
    low, high = layer.contrast
    shades = np.clip((np.nan_to_num(voxels.astype(np.float64)) - low) / (high - low), 0, 1)
    shown = np.rint(255 * shades).astype(np.uint8)
    if len(shown) == 1:
        return np.repeat(shown[0][..., None], COLOURS, axis=2)
    shown = np.concatenate([shown, np.zeros((COLOURS - len(shown), *shown.shape[1:]), np.uint8)])
    return np.moveaxis(shown, 0, 2)


def _label_colours(labels: npt.NDArray[Any]) -> Colours:
    """Return a colour for each label, and black for 0."""
    mixed = labels.astype(np.uint64) * np.uint64(SPREAD)
    parts = [(mixed >> np.uint64(shift)) & np.uint64(0xFF) for shift in (56, 48, 40)]
    colours = 64 + np.stack(parts, axis=2) * np.uint64(191) // np.uint64(255)
    colours[labels == 0] = 0
    return colours.astype(np.uint8)
