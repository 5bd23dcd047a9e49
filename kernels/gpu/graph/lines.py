"""Choose the vectors and the grids of kernels that memory binds: lines.cuh says what they are for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from znnpy.kernels.gpu.graph.inputs import width_of
from znnpy.kernels.gpu.graph.layer import value_type
from znnpy.kernels.gpu.kernel_source import KernelInstance

if TYPE_CHECKING:
    from znnpy.kernels.gpu.device import Device
    from znnpy.shapes import Sized, Vec3

THREADS, FEWEST = 256, 8  # of a block; of a line in a block
MOST_ALONG = 65535  # blocks of a grid along y and z
VECTOR_BYTES = 16
WAVES = 64  # blocks for each multiprocessor, at most
WIDTHS = {"float": (1, 2, 4), "half": (1, 2, 4, 8)}


def line_instances(source: str, name: str, registers: int, *more: str) -> list[KernelInstance]:
    """Return kernels `name<type, width, more ..>` for all types and widths."""
    tails = more or ("",)
    return [
        KernelInstance(source, f"{name}<{kind}, {width}{tail}>", registers)
        for kind, widths in WIDTHS.items()
        for width in widths
        for tail in tails
    ]


class Widths:
    """Kernels of one layer for every width of vectors.

    The one for arrays that begin anywhere a vector may is compiled at once, others when they are first wanted.

    maps  numbers of maps that are divided into vectors
    """

    def __init__(
        self, device: Device, source: str, name: str, shape: Sized, maps: Sequence[int], tail: str = ""
    ) -> None:
        self._device, self._source, self._maps = device, source, maps
        self._name = f"{name}<{value_type(shape)}, {{}}{tail}>"
        self._most = VECTOR_BYTES // shape.itemsize
        self.widest()

    def widest(self, *arrays: Any) -> tuple[int, Any]:
        """Return the widest vector to which all voxels of arrays are aligned, and its kernel."""
        width = width_of(self._device, self._maps, *arrays, most=self._most)
        name = self._name.format(width)
        return width, self._device.kernels(self._source, [name])[name]


def grid_of(device: Device, along: int, size: Vec3, waves: int = WAVES) -> tuple[tuple[int, int, int], tuple[int, int]]:
    """Return grid and block for lines of so many threads, size[1] of them in each of size[0] planes.

    Threads of a large image loop over planes, so that what they prepare counts for several voxels.

    waves  blocks for each multiprocessor, at most, unless a plane needs more
    """
    wide = THREADS
    while wide > FEWEST and wide // 2 >= along:
        wide //= 2
    high = THREADS // wide
    across, down = -(-along // wide), min(-(-size[1] // high), MOST_ALONG)
    planes = max(1, waves * device.gpu.multiprocessors // (across * down))
    return (across, down, min(size[0], planes, MOST_ALONG)), (wide, high)


def lanes_for(maps: int, width: int) -> int:
    """Return how many lanes of a warp share a voxel whose maps are all needed together."""
    vectors = maps // width
    return next(lanes for lanes in (1, 2, 4, 8, 16, 32) if lanes >= vectors or lanes == 32)
