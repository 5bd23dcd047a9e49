"""Gather the inputs of a block of outputs for one matrix product: the common part of (transposed) convolutions by BLAS.

Method   The inputs of a block are a box of voxels. If it reaches into padding, or there are several inputs, it is
         copied into a patch with zeros and the maps of all inputs. Each output's inputs are then copied as a row of a
         matrix [voxels x taps]. With few maps the runs of a row would be short, so taps become rows: [taps x voxels],
         which BLAS reads transposed.
Source   Lowering: Chellapilla, Puri, Simard 2006.
Tested   tests/kernels/cpu/test_graph_operators.py
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

import numpy as np

from znnpy.kernels.cpu.graph_layer import box

if TYPE_CHECKING:
    from znnpy.kernels.contract import Array, Bytes
    from znnpy.shapes import Vec3

SHORT_RUN = 16  # floats; below this, copying runs is slower than copying single floats along x


@dataclass(frozen=True, slots=True)
class Taps:
    """The voxels that an output reads: along an axis `first`, `first + step`, .. from the output's own place."""

    first: Vec3
    count: Vec3
    step: Vec3  # may be negative
    stride: Vec3  # from the place of one output to that of the next


def patch(inputs: Sequence[Array], low: Vec3, size: Vec3, store: Bytes | None) -> Array:
    """Return the box (z, y, x, all maps) of the inputs that begins at `low`, with zeros where there are no voxels.

    It is a view if there is one input that has them all, in float32; else it is written to `store`.
    """
    n = inputs[0].shape[:3]
    inside = all(at >= 0 and at + count <= most for at, count, most in zip(low, size, n, strict=True))
    if inside and len(inputs) == 1 and inputs[0].dtype == np.float32:
        return inputs[0][box(low, size)]
    whole = np.ndarray((*size, sum(part.shape[3] for part in inputs)), np.float32, store)
    if not inside:
        whole[...] = 0
    begin = [max(0, at) for at in low]
    end = [max(at, min(at0 + count, most)) for at, at0, count, most in zip(begin, low, size, n, strict=True)]
    source = tuple(slice(b, e) for b, e in zip(begin, end, strict=True))
    target = tuple(slice(b - at, e - at) for b, e, at in zip(begin, end, low, strict=True))
    first = 0
    for part in inputs:
        maps = part.shape[3]
        np.copyto(whole[(*target, slice(first, first + maps))], part[source])
        first += maps
    return whole


def is_by_tap(taps: Taps, fin: int, groups: int) -> bool:
    """Return whether taps are the rows of the gathered matrix."""
    run = fin // groups * (taps.count[2] if taps.step[2] == 1 and groups == 1 else 1)
    return run < SHORT_RUN


def columns(voxels: Array, taps: Taps, size: Vec3, groups: int, store: Bytes) -> Array:
    """Return the matrices (groups, outputs, taps * f) of a block of `size` outputs, written to `store` or a view.

    voxels  (z, y, x, f): the box that the block reads; place 0 is its first voxel.
    """
    fin, count = voxels.shape[3] // groups, prod(taps.count)
    outputs = prod(size)
    corner = voxels[taps.first[0] :, taps.first[1] :, taps.first[2] :]
    sz, sy, sx, sf = voxels.strides
    places = sz * taps.stride[0], sy * taps.stride[1], sx * taps.stride[2]
    steps = sz * taps.step[0], sy * taps.step[1], sx * taps.step[2]
    windows = np.lib.stride_tricks.as_strided(
        corner, (*size, *taps.count, groups, fin), (*places, *steps, sf * fin, sf), writeable=False
    )
    if count == 1 and groups == 1:
        try:
            return windows.reshape(1, outputs, fin, copy=False)
        except ValueError:  # its lines are no neighbours
            pass
    if is_by_tap(taps, voxels.shape[3], groups):
        by_tap = np.ndarray((groups, *taps.count, fin, *size), np.float32, store)
        np.copyto(by_tap, windows.transpose(6, 3, 4, 5, 7, 0, 1, 2))
        return by_tap.reshape(groups, count * fin, outputs).transpose(0, 2, 1)
    rows = np.ndarray((groups, *size, *taps.count, fin), np.float32, store)
    np.copyto(rows, windows.transpose(6, 0, 1, 2, 3, 4, 5, 7))
    return rows.reshape(groups, outputs, count * fin)
