"""Sums of the results of windows on a GPU, and what is made of finished sums; blend.cu.

Everything is queued on `device.stream`. Boxes are (z, y, x, maps) with the maps of a voxel next to each other.

Bound    Memory: everything is read once and written once.
Source   First principles.
Tested   tests/kernels/gpu/test_blend.py
"""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from znnpy.kernels.gpu.kernel_source import KernelInstance

if TYPE_CHECKING:
    from collections.abc import Sequence

    from znnpy.kernels.gpu.device import Device

SOURCE = "blend.cu"
THREADS = 256
WAVES = 16  # blocks per multiprocessor: enough to hide each other's latency
KINDS = {"maps": 0, "softmax": 0, "sigmoid": 0, "labels": 1, "above": 2}  # as in blend.cu
FUNCTIONS = ("none", "softmax", "sigmoid")  # as in blend.cu
NAMES = {"float32": "float", "float16": "half", "uint8": "unsigned char"}
VALUES = ("float", "half")
REGISTERS = 64


def _families() -> list[list[str]]:
    """Return the kernels in the groups that are compiled together."""
    taking = [f"take<{kept}>" for kept in VALUES]
    adding = [f"add<{value}, {kept}>" for value in VALUES for kept in VALUES]
    clearing = [f"clear<{kept}>" for kept in VALUES]
    return [[*taking, *clearing, *adding], [f"finish<{out}>" for out in NAMES.values()]]


def instances() -> list[KernelInstance]:
    """Return all kernels."""
    return [KernelInstance(SOURCE, name, REGISTERS) for family in _families() for name in family]


def take(device: Device, row: Any, kept: Any, peak: int) -> None:
    """Compute row = kept, in float32.

    row   (z, y, x, maps) float32, lines in C order; overwritten
    kept  as large, float32 or float16; read only
    peak  address of a float32, raised to the largest |kept|
    """
    name = f"take<{NAMES[kept.dtype.name]}>"
    _launch(device, name, row.size, kept, *_steps(kept)[:2], row, *_steps(row)[:2], *row.shape, np.uint64(peak))


def clear(device: Device, sums: Any) -> None:
    """Write zeros to sums (z, y, x, maps) float32 or float16, lines in C order."""
    n_z, n_y, n_x, maps = sums.shape
    name = f"clear<{NAMES[sums.dtype.name]}>"
    _launch(device, name, sums.size, sums, *_steps(sums)[:2], n_z, n_y, n_x * maps)


def add(device: Device, sums: Any, result: Any, weights: Any, share: float, *, first: int, counts: bool) -> None:
    """Compute sums += result * weights * share, and add the weights to the last map of the sums where `counts`.

    sums     (z, y, x, all maps) float32 or float16, lines in C order; the maps of the result begin at `first`
    result   (z, y, x, maps) float32 or float16, any strides but that of the maps
    weights  (z, y, x) float32, any strides
    """
    maps, held = result.shape[3], sums.shape[3]
    _launch(
        device,
        f"add<{NAMES[result.dtype.name]}, {NAMES[sums.dtype.name]}>",
        prod(result.shape[:3]) * (maps + counts),
        *(sums, *_steps(sums)[:2], held, first, result, *_steps(result)[:3], weights, *_steps(weights)),
        *(*result.shape, float(share), int(counts)),
    )


def finish(
    device: Device, sums: Any, out: Any, *, members: int, function: str, kind: str, above: Any, peak: int
) -> None:
    """Turn finished sums into what is written.

    sums      (z, y, x, members * maps + 1) float32, lines in C order, the last map being the sums of the weights;
              overwritten
    out       (maps of the result, z, y, x) float32, float16 or uint8, any strides; maps as uint8 are
              `round(255 * clip(x, 0, 1))`, labels and what is above a threshold are whole numbers
    members   of an ensemble that are blended apart, whose functions are averaged
    function  of the means: none, softmax or sigmoid
    kind      as in `NetworkResult`
    above     thresholds in device memory, one for each map; None unless they are the kind
    peak      address of a float32, raised to the largest |value| before it is converted
    """
    maps = (sums.shape[3] - 1) // members
    _launch(
        device,
        f"finish<{NAMES[out.dtype.name]}>",
        prod(sums.shape[:3]),
        *(sums, *_steps(sums)[:2], out, *_steps(out), *sums.shape[:3]),
        *(maps, members, FUNCTIONS.index(function), KINDS[kind], above, np.uint64(peak)),
    )


def _steps(array: Any) -> Sequence[int]:
    return [stride // array.dtype.itemsize for stride in array.strides]


def _launch(device: Device, name: str, threads: int, *arguments: Any) -> None:
    family = next(names for names in _families() if name in names)
    blocks = max(1, min(-(-threads // THREADS), WAVES * device.gpu.multiprocessors))
    device.kernels(SOURCE, family)[name]((blocks,), (THREADS,), *arguments)
