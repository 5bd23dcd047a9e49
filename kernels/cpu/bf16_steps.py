"""Call the direct convolution on the unit for bfloat16 for one shape.

Tested   tests/kernels/cpu/test_bf16_conv.py
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from znnpy.graph_shapes import GraphConvShape
from znnpy.kernels.contract import ALIGNMENT
from znnpy.kernels.cpu.activations import code_of, parameters_of
from znnpy.kernels.cpu.bf16_division import STEP, WIDTH, Division
from znnpy.kernels.cpu.bf16_problem import AnyConv, Phase, Problem, upsampled_input
from znnpy.kernels.cpu.ending import divided
from znnpy.kernels.cpu.graph_calls import compute_units
from znnpy.kernels.cpu.native.library import STREAM_BYTES, unit_library
from znnpy.layers import ONE
from znnpy.shapes import ConvShape

if TYPE_CHECKING:
    import numpy.typing as npt

    from znnpy.kernels.contract import Array, Bytes
    from znnpy.kernels.cpu.bf16_kernels import Resident
    from znnpy.kernels.thread_pool import ThreadPool

MOST_GROUPS, MOST_SIDES = 2, 16  # as in bf16_conv.hpp
CALL_FLOPS = 20e9  # per call into the library; the stop flag is checked between calls


class _Input(ctypes.Structure):
    """One of the arrays: struct Bf16Input in bf16_conv.hpp."""

    _fields_ = (
        ("x", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("image", "plane", "row", "voxel", "maps")),
        *((name, ctypes.c_int64 * 3) for name in ("factor", "first")),
    )


class _Phase(ctypes.Structure):
    """One phase: struct Bf16Phase in bf16_conv.hpp."""

    _fields_ = (
        ("taps", ctypes.c_void_p * MOST_GROUPS),
        ("count", ctypes.c_int64 * MOST_GROUPS),
        ("kernels", ctypes.c_void_p),
        *((name, ctypes.c_int64 * 3) for name in ("at", "lo", "hi")),
    )


class _Group(ctypes.Structure):
    """Inputs that are read alike: struct Bf16Group in bf16_conv.hpp."""

    _fields_ = (
        *((name, ctypes.c_int64 * 3) for name in ("stride", "lead", "held")),
        *((name, ctypes.c_int64) for name in ("depth", "steps", "fin", "inputs")),
        ("sides", ctypes.c_int64 * 2),
        ("side", (ctypes.c_int64 * MOST_SIDES) * 2),
        *((name, ctypes.c_int64) for name in ("height", "slot", "ring")),
        ("from_", ctypes.c_void_p),
    )


class _Conv(ctypes.Structure):
    """The arguments of a call: struct Bf16Conv in bf16_conv.hpp."""

    _fields_ = (
        ("step", ctypes.c_int64 * 3),
        *((name, ctypes.c_int64) for name in ("words", "fout", "shifts")),
        *((name, ctypes.c_int64 * 3) for name in ("windows", "pool", "unit", "before")),
        *((name, ctypes.c_int64) for name in ("pitch", "flat", "fold")),
        ("window", ctypes.c_int64 * 3),
        *((name, ctypes.c_int64) for name in ("dilation_y", "floats", "gathered", "lists", "factors", "before_pool")),
        *((name, ctypes.c_int64) for name in ("past", "out_image", "out_plane", "out_row", "groups", "phases")),
        ("group", _Group * MOST_GROUPS),
        *((name, ctypes.c_void_p) for name in ("phase", "bias", "out")),
        ("function", ctypes.c_int64),
        ("a", ctypes.c_double),
        ("b", ctypes.c_double),
        ("addend", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("add_plane", "add_row", "add_voxel")),
        ("maxima", ctypes.c_void_p),
        *((name, ctypes.c_int64 * 3) for name in ("max_window", "max_first", "max_count")),
        *((name, ctypes.c_int64) for name in ("max_plane", "max_row")),
    )


class Bf16Step:
    """The convolution of one shape."""

    def __init__(
        self,
        resident: Resident,
        shape: AnyConv,
        problem: Problem,
        found: Division,
        words: int,
        unit: str,
        pool: ThreadPool,
    ) -> None:
        self._shape, self._division, self._pool, self._resident = shape, found, pool, resident
        self._groups = problem.groups
        self._compute = unit_library(unit).znnpy_bf16_conv
        a, b = parameters_of(shape.activation, () if isinstance(shape, ConvShape) else shape.parameters)
        self._conv = c = _Conv(
            words=words, fout=problem.fout, shifts=problem.shifts, pitch=found.pitch,
            flat=found.flat, fold=found.fold,
            dilation_y=problem.dilation[1], floats=shape.precision != "bf16", gathered=found.gathered,
            lists=found.lists, factors=found.factors, before_pool=found.before_pool, groups=len(problem.groups),
            phases=len(problem.phases), bias=resident.bias.ctypes.data, function=code_of(shape.activation), a=a, b=b,
        )  # fmt: skip
        c.step[:], c.window[:] = problem.step, problem.k
        c.windows[:], c.pool[:], c.unit[:], c.before[:] = problem.windows, problem.pool, found.unit, problem.before
        if isinstance(shape, GraphConvShape) and (pooled := shape.pooled) is not None:
            c.max_window[:], c.max_first[:], c.max_count[:] = pooled.window, pooled.first, pooled.m
        for number, (target, group, packed) in enumerate(zip(c.group, problem.groups, found.groups, strict=False)):
            target.stride[:], target.lead[:], target.held[:] = group.stride, group.lead, group.held
            target.depth, target.steps, target.height = packed.depth, packed.steps, packed.height
            target.slot, target.ring, target.fin, target.inputs = packed.slot, packed.ring, group.fin, len(group.inputs)
            for axis, along in enumerate(_sides(problem, found, number)):
                target.sides[axis] = len(along)
                target.side[axis][: len(along)] = along
        self._tables = []
        self._phases = (_Phase * len(problem.phases))()
        for target, phase, kernels in zip(self._phases, problem.phases, resident.kernels, strict=True):
            target.kernels = kernels.ctypes.data
            target.at[:], target.lo[:], target.hi[:] = phase.at, phase.lo, phase.hi
            for number in range(len(problem.groups)):
                table = _tap_table(problem, found, phase, number)
                target.taps[number], target.count[number] = table.ctypes.data, len(table)
                self._tables.append(table)
        c.phase = ctypes.addressof(self._phases)
        self._most = max(1, int(CALL_FLOPS * found.units // max(1.0, 2.0 * STEP * WIDTH * found.multiplied)))

    def _run(
        self,
        inputs: Sequence[Array],
        addend: Array | None,
        out: Array,
        scratch: Mapping[str, Bytes],
        pooled: Array | None = None,
    ) -> None:
        """Compute the layer of arrays (S, z, y, x, f); an addend and what is pooled are (z, y, x, f)."""
        shape, found = self._shape, self._division
        c = _Conv.from_buffer_copy(self._conv)  # a copy, since steps may run at the same time
        tables = [(_Input * len(group.inputs))() for group in self._groups]
        for target, group, arrays in zip(c.group, self._groups, tables, strict=False):
            target.from_ = ctypes.addressof(arrays)
            for one, number in zip(arrays, group.inputs, strict=True):
                array = inputs[number]
                one.x, one.maps = array.ctypes.data, array.shape[4]
                one.image, one.plane, one.row, one.voxel = _pitches(array)
                one.factor[:] = ONE
                if isinstance(shape, GraphConvShape) and shape.upsampled and upsampled_input(shape) is None:
                    one.factor[:], one.first[:] = shape.factors[number], shape.first
        c.out = out.ctypes.data
        c.out_image, c.out_plane, c.out_row, _ = _pitches(out)
        whole = (shape.fout * out.itemsize | c.out | c.out_image * out.itemsize) % ALIGNMENT == 0
        c.past = whole and shape.out_bytes > STREAM_BYTES
        if addend is not None:
            c.addend = addend.ctypes.data
            _, c.add_plane, c.add_row, c.add_voxel = _pitches(addend[np.newaxis])
        if pooled is not None:
            c.maxima = pooled.ctypes.data
            _, c.max_plane, c.max_row, _ = _pitches(pooled[np.newaxis])
        buffers = scratch["planes"].reshape(-1, worker_bytes(found))
        compute_units(self._compute, c, found.units, self._most, out, self._pool, buffers)


class ChainStep(Bf16Step):
    """A convolution of a chain."""

    def run(self, x: Array, out: Array, scratch: Mapping[str, Bytes]) -> None:
        self._run([x], None, out, scratch)


class GraphStep(Bf16Step):
    """A convolution of a graph."""

    def run(
        self, inputs: Sequence[Array], out: Array, scratch: Mapping[str, Bytes], pooled: Array | None = None
    ) -> None:
        addend = None
        if isinstance(self._shape, GraphConvShape):
            inputs, addend = divided(self._shape, inputs)
        self._run([x[np.newaxis] for x in inputs], addend, out[np.newaxis], scratch, pooled)


def _pitches(x: Array) -> list[int]:
    """Return the values from image to image, plane to plane, row to row and voxel to voxel."""
    return [stride // x.itemsize for stride in x.strides[:4]]


def _sides(problem: Problem, found: Division, group: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return where the packed lattices of a group begin along y and x."""
    return ((0,), (0,)) if found.fold else problem.sides[group]


def _tap_table(problem: Problem, found: Division, phase: Phase, group: int) -> npt.NDArray[np.int64]:
    """Return the planes, and the bytes in a plane, from a place's first input to that of each tap of a group."""
    taps = phase.taps[group]
    table = np.zeros((len(taps), 2), np.int64)
    if found.fold:
        table[:, 0] = [tap[0] for tap in taps]
        return np.ascontiguousarray(table[:: problem.k[1] * problem.k[2]])  # one for each plane of the kernel
    (_, sy, sx), height = problem.groups[group].stride, found.groups[group].height
    along_y, along_x = _sides(problem, found, group)
    for row, (z, y, x) in zip(table, taps, strict=True):
        lattice = along_y.index(y % sy) * len(along_x) + along_x.index(x % sx)
        row[:] = z, 2 * STEP * ((lattice * height + y // sy) * found.pitch + x // sx)
    return table


def worker_bytes(found: Division) -> int:
    """Return the scratch of a thread, in whole cache lines."""
    return -(-found.worker_bytes // ALIGNMENT) * ALIGNMENT
