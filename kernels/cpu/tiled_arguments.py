"""The arguments of calls into the tiled FFT convolution in compiled code, as tiled.hpp declares them."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

from znnpy.kernels.cpu.ending import Ending
from znnpy.kernels.cpu.native.library import LANES, blocks

if TYPE_CHECKING:
    from znnpy.kernels.contract import Array


class Channels(ctypes.Structure):
    """One block of channels of the input: struct Channels in tiled.hpp."""

    _fields_ = (
        ("x", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("plane", "row", "voxel", "lanes", "part", "parts", "maps")),
        *((name, ctypes.c_int64) for name in ("upsampled", "slot")),
    )


class Tiling(ctypes.Structure):
    """The arguments of a call: struct Tiling in tiled.hpp."""

    _fields_ = (
        *((name, ctypes.c_int64 * 3) for name in ("n", "k", "p", "tile", "lead", "held")),
        *((name, ctypes.c_int64 * 3) for name in ("factor", "low_lead", "low_held", "skip", "step", "counts")),
        *((name, ctypes.c_int64) for name in ("fin", "fout", "in_", "low_in", "low_from", "low_to")),
        *((name, ctypes.c_int64) for name in ("first", "tiles", "chunk", "column_pitch", "tile_pitch")),
        *((name, ctypes.c_int64) for name in ("low_column_pitch", "low_tile_pitch", "x_image", "out_image")),
        *((name, ctypes.c_int64) for name in ("relu", "kept", "stream", "half", "carried", "before_image")),
        ("slope", ctypes.c_double),
        *((name, ctypes.c_void_p) for name in ("channels", "before", "out", "spectra", "low", "kernels", "bias")),
        ("words", ctypes.c_int64),
        ("multiply", ctypes.c_void_p),
        ("ending", Ending),
    )


def input_blocks(x: Array, maps: int, slot: int = 0, *, upsampled: bool = False) -> list[Channels]:
    """Return the blocks of channels of an array (.., z, y, x, f); only those of a voxel must be neighbours.

    slot  the number of the first among the blocks that are upsampled, or among the others
    """
    plane, row, voxel = (stride // x.itemsize for stride in x.strides[-4:-1])
    count = blocks(maps)
    return [
        Channels(
            x=x.ctypes.data + x.itemsize * LANES * block,
            plane=plane,
            row=row,
            voxel=voxel,
            lanes=min(LANES, maps - LANES * block),
            part=block,
            parts=count,
            maps=maps,
            upsampled=upsampled,
            slot=slot + block,
        )
        for block in range(count)
    ]
