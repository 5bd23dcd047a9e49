"""Direct convolutions on the unit that multiplies matrices of bfloat16: AMX, or AVX512-BF16.

Method   An implicit matrix product: for every tap, places by maps times maps by maps. A thread takes some rows and
         columns of places and follows them along z. It packs each plane of the inputs once, as bfloat16 with zeros
         around them, into a ring of planes in L2, where the unit reads it for every tap. With few maps the inputs of
         all taps are gathered place by place instead. With few maps of the output the taps along x are maps too, and
         neighbours add theirs. A block of places and two panels of maps is summed in registers
         over all taps, in float32; bias, addend, function and rounding follow while it is in L1. Maxima over windows
         side by side, as a second output, are raised by these results as they come: a unit of work holds windows whole,
         and the first result of a window begins its maximum.
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

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

from znnpy.graph_shapes import GraphConvShape, TransposeShape
from znnpy.kernels.contract import (
    ALIGNMENT,
    Footprint,
    Kind,
    Scratch,
    Variant,
    Work,
    why_not_fp32_or_bf16,
    why_not_normed,
)
from znnpy.kernels.cpu.bf16_division import STEP, STEP_CYCLES, WIDTH, Division, division, folds, products_of
from znnpy.kernels.cpu.bf16_kernels import AT_ONCE, Resident, folds_taps, packed_kernels
from znnpy.kernels.cpu.bf16_problem import (
    AnyConv,
    Problem,
    maps_of,
    problem_of,
    shifted,
    shifts_of,
    upsampled_input,
    why_not_repeated,
)
from znnpy.kernels.cpu.bf16_steps import MOST_SIDES, ChainStep, GraphStep, worker_bytes
from znnpy.kernels.cpu.graph_calls import moved_bytes
from znnpy.kernels.cpu.native.library import UNITS, why_not_bf16
from znnpy.machine import AMX, AVX512_BF16
from znnpy.shapes import FLOAT16, FLOAT32, ConvShape

if TYPE_CHECKING:
    from znnpy.kernels.contract import ConvWeights, Unit
    from znnpy.kernels.thread_pool import ThreadPool
    from znnpy.layer_shapes import LayerShape
    from znnpy.machine import Machine
    from znnpy.shapes import Precision, Sized

WHAT: Mapping[Kind, str] = {
    "conv": "convolutions",
    "graph_conv": "convolutions of graphs",
    "conv_transpose": "transposed convolutions",
}
SUMMARIES: Mapping[Kind, str] = {
    "conv": "small kernels",
    "graph_conv": "small kernels, any stride and dilation",
    "conv_transpose": "any kernel, stride and dilation, without groups",
}
MOST_TAPS = 4096  # of a kernel
PACKING = 3  # copies of the kernels that are divided into words at once
COPIES = 3  # of all kernels that dividing them into phases takes
TAP_BYTES = 256  # Python memory of a tap
CALL_BYTES = 2**17  # Python memory and stack of calls into the library, per thread
WORDS: Mapping[Precision, int] = {"fp32": 3, "bf16x2": 2, "bf16": 1}


@dataclass(frozen=True, slots=True)
class Bf16Conv:
    """Direct convolution of one kind on one unit: of chains, of graphs, or transposed."""

    unit: str
    kind: Kind
    version: int = 1
    source: str = "implicit matrix products after cuDNN 2014; words after Henry, Tang, Heinecke 2019"

    @property
    def name(self) -> str:
        return f"cpu.{self.kind}.{self.unit}"

    @property
    def summary(self) -> str:
        return f"{SUMMARIES[self.kind]}, and bf16 (needs {UNITS[self.unit]})"

    def why_not(self, shape: LayerShape, machine: Machine) -> str | None:
        if not isinstance(shape, AnyConv) or shape.kind != self.kind:
            return f"computes {WHAT[self.kind]}, not {shape.kind}"
        if isinstance(shape, ConvShape) and shape.pools and shape.activation == "softmax":
            return "softmax needs all maps of a voxel before the maxima of the windows are taken"
        return _why_not(shape, machine, self.unit)

    def variants(self, shape: Sized, machine: Machine) -> Sequence[Variant]:
        del machine
        shape = as_any_conv(shape)
        words = WORDS[shape.precision]
        if isinstance(shape, TransposeShape):
            return (Variant.of(words=words, stride=shape.stride, dilation=shape.dilation),)
        if isinstance(shape, GraphConvShape) and (low := upsampled_input(shape)) is not None:
            ((begin, end),) = maps_of(shape.fins, (low,))
            return (Variant.of(words=words, upsampled=shape.factors[low], from_map=begin, to_map=end),)
        fold = folds(problem_of(shape), words, self.unit)
        if not fold and (shifts := shifts_of(shape)) > 1:
            return (Variant.of(words=words, fold=0, shifts=shifts),)
        return (Variant.of(words=words, fold=int(fold)),)

    def footprint(self, shape: Sized, variant: Variant, threads: int) -> Footprint:
        shape = as_any_conv(shape)
        problem = _problem(shape, variant)
        found = self._division(problem, variant, threads)
        copies = int(found.fold or problem.shifts > 1) if len(problem.groups) == len(problem.phases) == 1 else COPIES
        workers = min(threads, found.units)
        taps = sum(problem.taps)
        return Footprint(
            resident=_kernel_bytes(problem, found, variant) + FLOAT32 * WIDTH * -(-problem.fout // WIDTH),
            scratch=(Scratch("planes", workers * worker_bytes(found)),),
            allowance=(len(problem.phases) + 1) * ALIGNMENT
            + PACKING * FLOAT32 * max(AT_ONCE, WIDTH * STEP * max(packed.steps for packed in found.groups))
            + copies * shape.weight_bytes
            + workers * CALL_BYTES
            + TAP_BYTES * taps,
        )

    def work(self, shape: Sized, variant: Variant) -> Sequence[Work]:
        shape = as_any_conv(shape)
        problem = _problem(shape, variant)
        found = self._division(problem, variant, 2)
        steps = found.multiplied * products_of(variant.count("words")) + found.packed / STEP_CYCLES[self.unit]
        unit: Unit = "amx_product" if self.unit == AMX else "bf16_product"
        return (Work(unit, 2.0 * STEP * WIDTH * steps, moved_bytes(shape)),)

    def _division(self, problem: Problem, variant: Variant, threads: int) -> Division:
        return division(problem, variant.count("words"), folds_taps(variant), self.unit, threads)

    def prepare(self, weights: ConvWeights | None, variant: Variant, pool: ThreadPool) -> Resident:
        del pool
        assert weights is not None
        return packed_kernels(weights, variant)

    def bind(self, resident: Any, shape: Sized, variant: Variant, pool: ThreadPool) -> ChainStep | GraphStep:
        shape = as_any_conv(shape)
        problem = _problem(shape, variant)
        found = self._division(problem, variant, pool.threads)
        step = ChainStep if isinstance(shape, ConvShape) else GraphStep
        return step(resident, shape, problem, found, variant.count("words"), self.unit, pool)


def _problem(shape: AnyConv, variant: Variant) -> Problem:
    """Return a layer as a problem, as a variant computes it."""
    problem = problem_of(shape)
    return shifted(problem) if any(name == "shifts" for name, _ in variant.parameters) else problem


def _kernel_bytes(problem: Problem, found: Division, variant: Variant) -> int:
    """Return the bytes of the packed kernels."""
    taps = (1,) if found.fold else problem.taps
    steps = sum(packed.steps * count for packed, count in zip(found.groups, taps, strict=True))
    return FLOAT16 * problem.width * STEP * steps * variant.count("words")


def as_any_conv(shape: Sized) -> AnyConv:
    """Return `shape` as a convolution of a chain or of a graph; TypeError if it is another layer."""
    if not isinstance(shape, ConvShape | GraphConvShape | TransposeShape):
        raise TypeError(f"a primitive for convolutions was given {shape}; ask why_not first")
    return shape


def _why_not(shape: AnyConv, machine: Machine, unit: str) -> str | None:
    """Return None if the unit computes a convolution of the right kind, else a reason."""
    if reason := why_not_fp32_or_bf16(shape):
        return reason
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
    if isinstance(shape, GraphConvShape) and (
        reason := why_not_repeated(shape) or _why_not_kept(shape) or why_not_normed(shape)
    ):
        return reason
    return why_not_bf16(machine, unit)


def _why_not_kept(shape: GraphConvShape) -> str | None:
    """Return None if the maxima of the outputs, if they are wanted, can be taken as these come, else a reason."""
    if shape.pooled is None:
        return None
    if shape.activation == "softmax":
        return "takes maxima of all functions but a softmax"
    return None if upsampled_input(shape) is None else "takes no maxima where outputs come by phases"


BF16_CONVOLUTIONS = tuple(Bf16Conv(unit, kind) for kind in WHAT for unit in (AMX, AVX512_BF16))
