"""Pass the inputs of a layer to kernels, by value: inputs.cuh declares the same structs.

Tested  tests/kernels/gpu/graph/test_conv.py
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import numpy as np

from znnpy.layers import ONE

if TYPE_CHECKING:
    from znnpy.kernels.gpu.device import Device
    from znnpy.shapes import Vec3

MOST_INPUTS = 16  # as in inputs.cuh
TRIPLE = np.dtype([("z", "i4"), ("y", "i4"), ("x", "i4")])
INPUT = np.dtype(
    [("data", "u8"), ("step", "i8", 3), ("first", "i4"), ("maps", "i4"), ("wide", "i4"), ("factor", TRIPLE)], align=True
)
INPUTS = np.dtype([("parts", INPUT, MOST_INPUTS)], align=True)


def steps_of(array: Any) -> tuple[int, int, int]:
    """Return the values between neighbouring voxels of (z, y, x, f) along z, y and x."""
    z, y, x = (int(stride) // array.dtype.itemsize for stride in array.strides[:3])
    return z, y, x


def width_of(device: Device, maps: Sequence[int], *arrays: Any, most: int) -> int:
    """Return the most neighbouring maps that every voxel of all arrays has at an address that is a multiple of them.

    maps  numbers of maps that are divided by it too
    most  a power of two
    """
    numbers = [*maps]
    for array in arrays:
        address = device.address(array)
        if address % array.dtype.itemsize:
            raise ValueError(f"an array begins at {address}, which is no multiple of its {array.dtype.itemsize} bytes")
        numbers += [address // array.dtype.itemsize, *steps_of(array)]
    return next(width for width in (8, 4, 2, 1) if width <= most and all(n % width == 0 for n in numbers))


def one_input(device: Device, array: Any, first: int = 0, starts: Sequence[int] = (), factor: Vec3 = ONE) -> Any:
    """Return a struct of one input.

    first   maps of the inputs before it
    starts  maps of it with which groups begin
    """
    found = np.zeros((), INPUT)
    wide = width_of(device, starts, array, most=4) == 4
    found["data"], found["step"], found["first"] = device.address(array), steps_of(array), first
    found["maps"], found["wide"], found["factor"] = array.shape[3], wide, factor
    return found[()]


def all_inputs(device: Device, arrays: Sequence[Any], groups: int = 1, factors: Sequence[Vec3] = ()) -> Any:
    """Return a struct of all inputs, whose maps together are divided into so many groups."""
    found = np.zeros((), INPUTS)
    firsts = [0, *accumulate(array.shape[3] for array in arrays)]
    for index, (array, first) in enumerate(zip(arrays, firsts, strict=False)):
        begins = range(0, firsts[-1], firsts[-1] // groups)
        starts = [at - first for at in begins if first < at < first + array.shape[3]]
        found["parts"][index] = one_input(device, array, first, starts, factors[index] if factors else ONE)
    return found[()]


def triple(size: Vec3) -> Any:
    """Return a struct of three numbers."""
    return np.array(size, TRIPLE)[()]
