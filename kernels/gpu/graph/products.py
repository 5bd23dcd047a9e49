"""Launch conv.cu: convolutions and transposed convolutions as matrix products on float32 units.

Tested  tests/kernels/gpu/graph/test_conv.py, test_transpose.py
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

from znnpy.graph_shapes import GraphConvShape, TransposeShape
from znnpy.kernels.gpu.graph.functions import numbers_of
from znnpy.kernels.gpu.graph.inputs import TRIPLE
from znnpy.kernels.gpu.graph.layer import value_type
from znnpy.kernels.gpu.kernel_source import KernelInstance
from znnpy.shapes import FLOAT32

if TYPE_CHECKING:
    from znnpy.kernels.contract import ConvWeights
    from znnpy.kernels.gpu.device import Device
    from znnpy.machine import Machine
    from znnpy.shapes import Sized

SOURCE = "graph/conv.cu"
THREADS, DEEP = 128, 8  # as in conv.cu
SOFTMAX_BYTES = 8  # size of Softmax in functions.cuh
ProductKind = Literal["TAPS", "FLAT", "PHASES", "COLUMNS"]  # as in conv.cu
KINDS: tuple[ProductKind, ...] = ("TAPS", "FLAT", "PHASES", "COLUMNS")
PROBLEM = np.dtype(  # as in problem.cuh
    [
        *((name, TRIPLE) for name in ("n", "m", "k", "before", "stride", "dilation", "first")),
        *((name, "i4") for name in ("inputs", "fin", "fout", "groups", "pitch", "wide")),
        *((name, TRIPLE) for name in ("out", "shift")),
        *((name, "i4") for name in ("channels", "function")),
        *((name, "f4") for name in ("a", "b")),
    ],
    align=True,
)


class Tile(NamedTuple):
    """The results of a thread and of a block."""

    voxels: int  # of a thread
    maps: int
    columns: int  # threads side by side
    registers: int
    slower: float  # than the largest tile, for a product: rough

    @property
    def block(self) -> tuple[int, int]:
        """Return the voxels and maps of a block."""
        return self.voxels * THREADS // self.columns, self.maps * self.columns

    def kernel(self, shape: Sized, kind: ProductKind) -> str:
        """Return the name of the kernel."""
        return f"convolve<{value_type(shape)}, {self.voxels}, {self.maps}, {self.columns}, {kind}>"

    def shared_bytes(self, *, soft: bool) -> int:
        """Return the bytes of what is staged, and for softmax of its sums."""
        return 2 * FLOAT32 * DEEP * sum(self.block) + (SOFTMAX_BYTES * self.voxels * THREADS if soft else 0)

    def blocks(self, voxels: int, maps: int, groups: int = 1) -> int:
        """Return the blocks of so many voxels of so many maps a group."""
        of_voxels, of_maps = self.block
        return -(-voxels // of_voxels) * groups * -(-maps // of_maps)


TILES = {
    "64": Tile(8, 8, 8, 255, 1.0),
    "32": Tile(8, 4, 8, 168, 1.3),
    "16": Tile(8, 4, 4, 168, 1.4),
    "8": Tile(4, 4, 2, 168, 2.0),
    "4": Tile(4, 4, 1, 168, 2.5),
    "small": Tile(4, 4, 8, 128, 2.0),  # of images of few voxels
}


def instances() -> list[KernelInstance]:
    """Return all kernels."""
    shapes = [GraphConvShape((1,), 1, (1, 1, 1), (1, 1, 1), precision=p) for p in ("fp16", "fp32")]
    each = [(tile, shape, kind) for tile in TILES.values() for shape in shapes for kind in KINDS]
    return [KernelInstance(SOURCE, tile.kernel(shape, kind), tile.registers) for tile, shape, kind in each]


def tiles_for(voxels: int, maps: int, groups: int, machine: Machine) -> tuple[str, ...]:
    """Return the narrowest tile that holds all maps of a group, and the next; small ones for a GPU left idle."""
    names = [next((name for name in ("4", "8", "16", "32") if maps <= TILES[name].block[1]), "64")]
    if names == ["64"]:
        names.append("32")
    assert machine.gpu is not None, "why_not says so"
    idle = TILES[names[0]].blocks(voxels, maps, groups) < 2 * machine.gpu.multiprocessors
    return (*names, "small") if idle and maps > TILES["16"].block[1] else tuple(names)


class Resident(NamedTuple):
    """The weights of a convolution."""

    weights: Any  # (rows, pitch) float32
    bias: Any  # (pitch,) float32


def pitch_of(maps: int) -> int:
    """Return the values from row to row of weights."""
    return -(-maps // 4) * 4


def upload(rows: Any, bias: Any, device: Device, name: str) -> Resident:
    """Upload weights (rows, maps) and a bias for each map."""
    more = pitch_of(len(bias)) - len(bias)
    return Resident(
        device.put(np.pad(rows, ((0, 0), (0, more))), f"kernels of {name}"),
        device.put(np.pad(bias, (0, more)), f"biases of {name}"),
    )


def tap_rows(weights: ConvWeights | None, *, transposed: bool = False) -> Any:
    """Return kernels as rows (taps and maps of a group, maps of the output)."""
    assert weights is not None
    weight = weights.weight
    if transposed:  # (f, f' / groups, z, y, x), and f has all groups
        groups = len(weights.bias) // weight.shape[1]
        parts = np.split(weight, groups)
        weight = np.concatenate([part.swapaxes(0, 1) for part in parts])
    return weight.transpose(2, 3, 4, 1, 0).reshape(-1, len(weights.bias))


def problem_of(shape: GraphConvShape) -> Any:
    """Return a struct of a convolution."""
    found = np.zeros((), PROBLEM)
    for name in ("n", "k", "before", "stride", "dilation", "first"):
        found[name] = getattr(shape, name)
    found["m"], found["inputs"], found["groups"] = shape.out, len(shape.fins), shape.groups
    found["fin"], found["fout"] = shape.fin // shape.groups, shape.fout // shape.groups
    return _with_maps(found, shape.fout, shape)


def places_of(shape: TransposeShape) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the first place q of outputs j along each axis, and their number: q * stride + phase = j + first."""
    low = tuple(first // stride for first, stride in zip(shape.first, shape.stride, strict=True))
    ends = zip(shape.first, shape.m, shape.stride, strict=True)
    return low, tuple((first + m - 1) // stride + 1 - q for (first, m, stride), q in zip(ends, low, strict=True))


def transposed_problem(shape: TransposeShape, *, columns: bool) -> Any:
    """Return a struct of a transposed convolution; `columns`: as one product for all phases."""
    found = np.zeros((), PROBLEM)
    low, places = places_of(shape)
    for name in ("n", "stride", "dilation"):
        found[name] = getattr(shape, name)
    found["m"], found["before"] = places, tuple(-q for q in low)
    found["shift"] = tuple(q * s - first for q, s, first in zip(low, shape.stride, shape.first, strict=True))
    found["out"], found["channels"], found["inputs"], found["groups"] = shape.m, shape.fout, 1, shape.groups
    found["fin"], found["fout"] = shape.fin // shape.groups, shape.fout // shape.groups
    found["k"] = (1, 1, 1) if columns else shape.k
    if columns:
        found["fout"] = columns_of(shape)
    return _with_maps(found, int(found["fout"]) * shape.groups, shape)


def columns_of(shape: TransposeShape) -> int:
    """Return the columns of one product for all phases."""
    z, y, x = shape.stride
    return z * y * x * shape.fout


def _with_maps(found: Any, maps: int, shape: GraphConvShape | TransposeShape) -> Any:
    found["pitch"], found["wide"] = pitch_of(maps), found["groups"] == 1 or found["fout"] % 4 == 0
    found["function"], found["a"], found["b"] = numbers_of(shape.activation, shape.parameters)
    return found[()]
