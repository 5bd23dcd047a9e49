"""Direct convolutions on the unit that multiplies matrices of bfloat16: AMX, or AVX512-BF16.

Method   An implicit matrix product: for every tap, places by maps times maps by maps. A thread takes some rows and
         columns of places and follows them along z. It packs each plane of the inputs once, as bfloat16 with zeros
         around them, into a ring of planes in L2, where the unit reads it for every tap. With few maps the inputs of
         all taps are gathered place by place instead. A block of places and two panels of maps is summed in registers
         over all taps, in float32; bias, addend, function and rounding follow while it is in L1.
Words    Float32 values are divided into words of bfloat16. Six products of three words have the error of float32; three
         products of two words have an rms error of about 5e-6, for precision bf16x2.
Memory   The packed kernels; a ring of planes per thread.
Bound    Compute: the unit. With few maps memory, and with one map the gathering.
Source   Implicit matrix products: Chetlur et al., cuDNN, 2014; tiles as in Georganas et al., Harnessing Deep Learning
         via a Single Building Block, 2020. Words: Henry, Tang, Heinecke, Leveraging the bfloat16 Artificial
         Intelligence Datatype For Higher-Precision Computations, 2019.
Tested   tests/kernels/cpu/test_bf16_conv.py
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np

from znnpy.graph_shapes import GraphConvShape, TransposeShape
from znnpy.kernels.aligned import aligned_bytes
from znnpy.kernels.contract import ALIGNMENT, Footprint, Kind, Scratch, Variant, Work
from znnpy.kernels.cpu.activations import code_of, parameters_of
from znnpy.kernels.cpu.bf16_problem import (
    MOST_SIDES,
    MOST_TAPS,
    STEP,
    STEP_CYCLES,
    WIDTH,
    Division,
    Phase,
    Problem,
    division,
    folds,
    kernel_phases,
    problem_of,
    products_of,
)
from znnpy.kernels.cpu.ending import divided
from znnpy.kernels.cpu.graph_calls import compute_units, moved_bytes
from znnpy.kernels.cpu.native.library import STREAM_BYTES, UNITS, unit_library, why_not_bf16
from znnpy.kernels.dtypes import bfloat16
from znnpy.layers import ONE
from znnpy.machine import AMX, AVX512_BF16
from znnpy.shapes import FLOAT16, FLOAT32, ConvShape

if TYPE_CHECKING:
    import numpy.typing as npt

    from znnpy.kernels.contract import Array, Bytes, ConvWeights, Unit
    from znnpy.kernels.thread_pool import ThreadPool
    from znnpy.machine import Machine
    from znnpy.shapes import Precision, Sized, Vec3

SOURCE = "implicit matrix products after cuDNN 2014; words after Henry, Tang, Heinecke 2019"
PACKING = 4  # copies of the kernels of two panels that packing them takes
TAP_BYTES = 256  # Python memory of a tap
CALL_BYTES = 2**17  # Python memory and stack of calls into the library, per thread
CALL_FLOPS = 20e9  # per call into the library; the stop flag is checked between calls
AnyConv: TypeAlias = ConvShape | GraphConvShape | TransposeShape
WORDS: Mapping[Precision, int] = {"fp32": 3, "bf16x2": 2, "bf16": 1}


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
        ("taps", ctypes.c_void_p),
        ("count", ctypes.c_int64),
        ("kernels", ctypes.c_void_p),
        *((name, ctypes.c_int64 * 3) for name in ("at", "lo", "hi")),
    )


class _Conv(ctypes.Structure):
    """The arguments of a call: struct Bf16Conv in bf16_conv.hpp."""

    _fields_ = (
        ("images", ctypes.c_int64),
        *((name, ctypes.c_int64 * 3) for name in ("places", "stride", "lead", "held", "step")),
        *((name, ctypes.c_int64) for name in ("depth", "steps", "words", "fin", "fout")),
        *((name, ctypes.c_int64 * 3) for name in ("windows", "pool", "unit")),
        ("sides", ctypes.c_int64 * 2),
        ("side", (ctypes.c_int64 * MOST_SIDES) * 2),
        *((name, ctypes.c_int64) for name in ("height", "pitch", "slot", "flat", "fold")),
        ("window", ctypes.c_int64 * 3),
        *((name, ctypes.c_int64) for name in ("dilation_y", "floats", "before_pool", "past")),
        *((name, ctypes.c_int64) for name in ("out_image", "out_plane", "out_row", "inputs", "phases")),
        *((name, ctypes.c_void_p) for name in ("from_", "phase", "bias", "out")),
        ("function", ctypes.c_int64),
        ("a", ctypes.c_double),
        ("b", ctypes.c_double),
        ("addend", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("add_plane", "add_row", "add_voxel")),
    )


class Resident(NamedTuple):
    """The prepared weights, of each phase."""

    kernels: Sequence[Bytes]  # two panels after two panels (step, tap, word, panel, pair of maps, map, 2)
    bias: Array  # padded to whole panels


class _Bf16Conv:
    """The common part of the primitives, which differ in the layers that they accept and in the unit."""

    __slots__ = ()
    unit: str

    def variants(self, shape: Sized, machine: Machine) -> Sequence[Variant]:
        del machine
        shape = as_any_conv(shape)
        words = WORDS[shape.precision]
        if isinstance(shape, TransposeShape):
            return (Variant.of(words=words, fold=0, stride=shape.stride, dilation=shape.dilation),)
        return (Variant.of(words=words, fold=int(folds(problem_of(shape), words, self.unit))),)

    def footprint(self, shape: Sized, variant: Variant, threads: int) -> Footprint:
        problem = problem_of(as_any_conv(shape))
        found = self._division(problem, variant, threads)
        most = max(len(phase.taps) for phase in problem.phases)
        padded = STEP * found.steps if found.fold else STEP * found.steps * most
        workers = min(threads, found.units)
        return Footprint(
            resident=_kernel_bytes(problem, found, variant) + FLOAT32 * (problem.width + WIDTH),
            scratch=(Scratch("planes", workers * _worker_bytes(found)),),
            allowance=(len(problem.phases) + 1) * ALIGNMENT
            + PACKING * FLOAT32 * WIDTH * padded
            + workers * CALL_BYTES
            + TAP_BYTES * problem.taps,
        )

    def work(self, shape: Sized, variant: Variant) -> Sequence[Work]:
        shape = as_any_conv(shape)
        problem = problem_of(shape)
        found = self._division(problem, variant, 2)
        steps = found.multiplied * products_of(variant.count("words")) + found.packed / STEP_CYCLES[self.unit]
        unit: Unit = "amx_product" if self.unit == AMX else "bf16_product"
        return (Work(unit, 2.0 * STEP * WIDTH * steps, moved_bytes(shape)),)

    def _division(self, problem: Problem, variant: Variant, threads: int) -> Division:
        return division(problem, variant.count("words"), bool(variant.count("fold")), self.unit, threads)

    def prepare(self, weights: ConvWeights | None, variant: Variant, pool: ThreadPool) -> Resident:
        del pool
        assert weights is not None
        kernels, words, fold = weights.weight, variant.count("words"), bool(variant.count("fold"))
        fout = len(weights.bias)
        bias = np.zeros(WIDTH * -(-fout // WIDTH), np.float32)
        bias[:fout] = weights.bias
        if not any(name == "stride" for name, _ in variant.parameters):
            return Resident((_packed(kernels.reshape(*kernels.shape[:2], -1), words, fold),), bias)
        kernels = kernels.swapaxes(0, 1)
        k = kernels.shape[2], kernels.shape[3], kernels.shape[4]
        phases = kernel_phases(k, variant.size("stride"), variant.size("dilation"))
        return Resident(tuple(_packed(_taken(kernels, taps), words, fold) for taps in phases), bias)

    def bind(self, resident: Any, shape: Sized, variant: Variant, pool: ThreadPool) -> _ChainStep | _GraphStep:
        shape = as_any_conv(shape)
        problem = problem_of(shape)
        found = self._division(problem, variant, pool.threads)
        step = _ChainStep if isinstance(shape, ConvShape) else _GraphStep
        return step(resident, shape, problem, found, variant.count("words"), self.unit, pool)


def _taken(kernels: Array, taps: Sequence[Vec3]) -> Array:
    """Return some places of kernels (f', f, z, y, x) as (f', f, taps)."""
    if not taps:
        return np.zeros((*kernels.shape[:2], 0), np.float32)
    return np.stack([kernels[:, :, z, y, x] for z, y, x in taps], axis=-1)


def _packed(kernels: Array, words: int, fold: bool) -> Bytes:
    """Return kernels (f', f, taps) in the order in which the unit reads them, divided into words."""
    fout, fin, taps = kernels.shape
    depth = -(-(fin * taps if fold else fin) // STEP) * STEP
    count = 1 if fold else taps
    panels = -(-fout // 16)
    store = aligned_bytes(FLOAT16 * 16 * panels * depth * count * words)
    values, first = store.view(bfloat16()), 0
    for map_ in range(0, fout, WIDTH):
        some = kernels[map_ : map_ + WIDTH]
        width = 16 if fout - map_ <= 16 else WIDTH
        whole = np.zeros((width, depth, count), np.float32)
        if fold:
            whole[: len(some), : fin * taps, 0] = some.swapaxes(1, 2).reshape(len(some), -1)
        else:
            whole[: len(some), :fin] = some
        # (panel, map, step, pair, 2, tap) becomes (step, tap, panel, pair, map, 2)
        rest = whole.reshape(width // 16, 16, depth // STEP, STEP // 2, 2, count).transpose(2, 5, 0, 3, 1, 4).copy()
        size = rest.size * words
        target = values[first : first + size].reshape(depth // STEP, count, words, *rest.shape[2:])
        for word in range(words):
            target[:, :, word] = rest
            rest -= target[:, :, word].astype(np.float32)
        first += size
    return store


def _kernel_bytes(problem: Problem, found: Division, variant: Variant) -> int:
    """Return the bytes of the packed kernels."""
    taps = 1 if found.fold else problem.taps
    return FLOAT16 * problem.width * STEP * found.steps * taps * variant.count("words")


def _worker_bytes(found: Division) -> int:
    """Return the scratch of a thread, in whole cache lines."""
    return -(-found.worker_bytes // ALIGNMENT) * ALIGNMENT


def as_any_conv(shape: Sized) -> AnyConv:
    """Return `shape` as a convolution of a chain or of a graph; TypeError if it is another layer."""
    if not isinstance(shape, ConvShape | GraphConvShape | TransposeShape):
        raise TypeError(f"a primitive for convolutions was given {shape}; ask why_not first")
    return shape


def _why_neither(shape: AnyConv, machine: Machine, unit: str) -> str | None:
    """Return None if the unit computes a convolution of the right kind, else a reason."""
    if shape.precision not in WORDS:
        return f"computes in {', '.join(WORDS)}, not in {shape.precision}"
    if not isinstance(shape, ConvShape) and shape.groups > 1:
        return "computes no groups"
    if shape.activation == "softmax" and shape.fout > WIDTH:
        return f"applies a softmax to up to {WIDTH} maps, not to {shape.fout}"
    if shape.activation == "prelu":
        return "applies no prelu, whose slope may differ from map to map"
    if prod(shape.k) > MOST_TAPS:
        return f"takes kernels of up to {MOST_TAPS} taps, not {prod(shape.k)}"
    if not isinstance(shape, ConvShape) and max(shape.stride) > MOST_SIDES:
        return f"takes strides of up to {MOST_SIDES}, not {max(shape.stride)}"
    return why_not_bf16(machine, unit)


@dataclass(frozen=True, slots=True)
class GraphConvBf16(_Bf16Conv):
    """Direct convolution of a graph on one unit, with any stride and dilation, over several padded arrays."""

    unit: str
    kind: Kind = "graph_conv"
    version: int = 1
    source: str = SOURCE

    @property
    def name(self) -> str:
        return f"cpu.graph_conv.{self.unit}"

    @property
    def summary(self) -> str:
        return f"small kernels, any stride and dilation, and bf16 (needs {UNITS[self.unit]})"

    def why_not(self, shape: Sized, machine: Machine) -> str | None:
        if not isinstance(shape, GraphConvShape):
            return f"computes convolutions of graphs, not {shape}"
        return _why_neither(shape, machine, self.unit)


@dataclass(frozen=True, slots=True)
class TransposeBf16(_Bf16Conv):
    """Direct transposed convolution on one unit, with any stride and dilation."""

    unit: str
    kind: Kind = "conv_transpose"
    version: int = 1
    source: str = SOURCE

    @property
    def name(self) -> str:
        return f"cpu.conv_transpose.{self.unit}"

    @property
    def summary(self) -> str:
        return f"any kernel, stride and dilation, without groups, and bf16 (needs {UNITS[self.unit]})"

    def why_not(self, shape: Sized, machine: Machine) -> str | None:
        if not isinstance(shape, TransposeShape):
            return f"computes transposed convolutions, not {shape}"
        return _why_neither(shape, machine, self.unit)


@dataclass(frozen=True, slots=True)
class ConvBf16(_Bf16Conv):
    """Direct convolution of a chain on one unit."""

    unit: str
    kind: Kind = "conv"
    version: int = 1
    source: str = SOURCE

    @property
    def name(self) -> str:
        return f"cpu.conv.{self.unit}"

    @property
    def summary(self) -> str:
        return f"small kernels, and bf16 (needs {UNITS[self.unit]})"

    def why_not(self, shape: Sized, machine: Machine) -> str | None:
        if not isinstance(shape, ConvShape):
            return f"computes convolutions, not {shape}"
        if shape.pools and shape.activation == "softmax":
            return "softmax needs all maps of a voxel before the maxima of the windows are taken"
        return _why_neither(shape, machine, self.unit)


BF16_CONVOLUTIONS = tuple(
    primitive(unit) for primitive in (ConvBf16, GraphConvBf16, TransposeBf16) for unit in (AMX, AVX512_BF16)
)


class _Step:
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
        self._compute = unit_library(unit).znnpy_bf16_conv
        a, b = parameters_of(shape.activation, () if isinstance(shape, ConvShape) else shape.parameters)
        sides = ((0,), (0,)) if found.fold else (problem.sides(1), problem.sides(2))
        self._conv = c = _Conv(
            images=problem.images, depth=found.depth, steps=found.steps, words=words, fin=problem.fin,
            fout=problem.fout, height=found.height, pitch=found.pitch, slot=found.slot, flat=found.flat,
            fold=found.fold, dilation_y=problem.dilation[1], floats=shape.precision != "bf16",
            before_pool=found.before_pool, inputs=len(problem.fins), phases=len(problem.phases),
            bias=resident.bias.ctypes.data, function=code_of(shape.activation), a=a, b=b,
        )  # fmt: skip
        c.places[:], c.stride[:], c.lead[:], c.held[:] = problem.places, problem.stride, problem.lead, problem.held
        c.step[:], c.window[:], c.windows[:], c.pool[:] = problem.step, problem.k, problem.windows, problem.pool
        c.unit[:] = found.unit
        for axis, along in enumerate(sides):
            c.sides[axis] = len(along)
            c.side[axis][: len(along)] = along
        self._tables = [_tap_table(problem, found, phase, sides) for phase in problem.phases]
        self._phases = (_Phase * len(problem.phases))()
        for target, phase, table, kernels in zip(
            self._phases, problem.phases, self._tables, resident.kernels, strict=True
        ):
            target.taps, target.count, target.kernels = table.ctypes.data, len(table), kernels.ctypes.data
            target.at[:], target.lo[:], target.hi[:] = phase.at, phase.lo, phase.hi
        c.phase = ctypes.addressof(self._phases)
        self._most = max(1, int(CALL_FLOPS * found.units // max(1.0, 2.0 * STEP * WIDTH * found.multiplied)))

    def _run(self, inputs: Sequence[Array], addend: Array | None, out: Array, scratch: Mapping[str, Bytes]) -> None:
        """Compute the layer of arrays (S, z, y, x, f); an addend is (z, y, x, f)."""
        shape, found = self._shape, self._division
        c = _Conv.from_buffer_copy(self._conv)  # a copy, since steps may run at the same time
        arrays = (_Input * len(inputs))()
        for number, (target, array) in enumerate(zip(arrays, inputs, strict=True)):
            target.x, target.maps = array.ctypes.data, array.shape[4]
            target.image, target.plane, target.row, target.voxel = _pitches(array)
            target.factor[:] = ONE
            if isinstance(shape, GraphConvShape) and shape.upsampled and shape.factors[number] != ONE:
                target.factor[:], target.first[:] = shape.factors[number], shape.first
        c.from_, c.out = ctypes.addressof(arrays), out.ctypes.data
        c.out_image, c.out_plane, c.out_row, _ = _pitches(out)
        whole = (shape.fout * out.itemsize | c.out | c.out_image * out.itemsize) % ALIGNMENT == 0
        c.past = whole and shape.out_bytes > STREAM_BYTES
        if addend is not None:
            c.addend = addend.ctypes.data
            _, c.add_plane, c.add_row, c.add_voxel = _pitches(addend[np.newaxis])
        buffers = scratch["planes"].reshape(-1, _worker_bytes(found))
        compute_units(self._compute, c, found.units, self._most, out, self._pool, buffers)


class _ChainStep(_Step):
    def run(self, x: Array, out: Array, scratch: Mapping[str, Bytes]) -> None:
        self._run([x], None, out, scratch)


class _GraphStep(_Step):
    def run(self, inputs: Sequence[Array], out: Array, scratch: Mapping[str, Bytes]) -> None:
        addend = None
        if isinstance(self._shape, GraphConvShape):
            inputs, addend = divided(self._shape, inputs)
        self._run([x[np.newaxis] for x in inputs], addend, out[np.newaxis], scratch)


def _pitches(x: Array) -> list[int]:
    """Return the values from image to image, plane to plane, row to row and voxel to voxel."""
    return [stride // x.itemsize for stride in x.strides[:4]]


def _tap_table(
    problem: Problem, found: Division, phase: Phase, sides: tuple[Sequence[int], Sequence[int]]
) -> npt.NDArray[np.int64]:
    """Return the planes, and the bytes in a plane, from a place's first input to that of each tap."""
    table = np.zeros((len(phase.taps), 2), np.int64)
    if found.fold:
        table[:, 0] = [tap[0] for tap in phase.taps]
        return np.ascontiguousarray(table[:: problem.k[1] * problem.k[2]])  # one for each plane of the kernel
    (_, sy, sx) = problem.stride
    for row, (z, y, x) in zip(table, phase.taps, strict=True):
        lattice = sides[0].index(y % sy) * len(sides[1]) + sides[1].index(x % sx)
        row[:] = z, ((lattice * found.height + y // sy) * found.pitch + x // sx) * found.voxel
    return table
