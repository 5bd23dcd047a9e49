"""Convolutions of graphs on tensor cores that read shared memory themselves: warpgroup.cu, for sm_90a, in float16.

Method   [maps x (taps, maps)] @ [(taps, maps) x voxels], where the right matrix is never built: the input of a tile is
         in shared memory, and a tap is an offset in it. With up to 32 maps, a row of the left matrix is a map of one of
         2 or 4 neighbouring lines. Layers with few tiles are cut along the sum too; sums.cu adds the parts.
Memory   Kernels; sums of the parts.
Bound    Arithmetic: 2 k^3 f f' flops a voxel. With few input maps: writing.
Source   Chetlur et al., cuDNN: efficient primitives for deep learning, 2014, 3.
Tested   tests/kernels/gpu/graph_gemm/test_primitive.py
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from znnpy.graph_shapes import GraphConvShape
from znnpy.kernels.contract import Footprint, Kind, Scratch, Variant, Work, why_not_two
from znnpy.kernels.gpu.graph.functions import numbers_of
from znnpy.kernels.gpu.graph_gemm.plan import (
    GROUP,
    MULTIPROCESSORS,
    PIECE,
    PRODUCTS,
    ROWS,
    SHARED,
    STEP,
    Columns,
    Plan,
    columns_of,
    cycles_of,
    plan_of,
    reach_of,
    resident_bytes,
)
from znnpy.kernels.gpu.kernel_source import KernelInstance
from znnpy.shapes import FLOAT16, FLOAT32

if TYPE_CHECKING:
    import numpy.typing as npt

    from znnpy.kernels.contract import ConvWeights
    from znnpy.kernels.gpu.device import Device
    from znnpy.layer_shapes import LayerShape
    from znnpy.machine import Machine

SOURCE, SUMS = "graph_gemm/warpgroup.cu", "graph_gemm/sums.cu"
CAPABILITY = (9, 0)  # the only one with these instructions
THREADS = 384  # as in warpgroup.cu
INPUTS = 4  # as in regions.cuh
FACTORS = (1, 2, 4, 8)  # of upsampled inputs
FLOPS_OF_CYCLE = 2867  # 0.7 of the rate of 64 x N x 16 products in N / 2 cycles, limited by a GPU's power
AT_ONCE, SUMS_THREADS = 4, 256  # maps of a thread of sums.cu, and threads of its blocks
STACK_BYTES, SPILLED_BYTES = 144, 704  # per thread, outside of the loop around products


def instances() -> list[KernelInstance]:
    """Return all kernels: those with 128 sums of a thread spill others while they write."""
    found = [KernelInstance(SUMS, f"add_parts<{count}>", 64) for count in (1, AT_ONCE)]
    for (n, count), taps in product(PRODUCTS, (1, 2, GROUP)):
        stack, spilled = (STACK_BYTES, SPILLED_BYTES) if n * count == max(a * b for a, b in PRODUCTS) else (0, 0)
        for moments in (False, True) if taps == GROUP else (False,):
            name = kernel_of(n, count, taps, moments=moments)
            found.append(KernelInstance(SOURCE, name, 168, stack_bytes=stack, spilled_bytes=spilled))
    return found


def kernel_of(n: int, products: int, taps: int, *, moments: bool) -> str:
    """Return the C++ name of the kernel, of that which finds moments too or of the other."""
    return f"convolve_by_warpgroups<{n}, {products}, {taps}, {str(moments).lower()}>"


@dataclass(frozen=True, slots=True)
class GraphConvWarpgroup:
    """Product of kernels and voxels on the tensor cores of an H100 or H200."""

    name: str = "gpu.graph_conv.warpgroup"
    kind: Kind = "graph_conv"
    version: int = 1
    summary: str = "float16 on an H100 or H200: any stride, several and upsampled inputs, on tensor cores"
    source: str = "Chetlur et al., cuDNN, 2014"

    def why_not(self, shape: LayerShape, machine: Machine) -> str | None:
        if not isinstance(shape, GraphConvShape):
            return f"computes convolutions of graphs, not {shape.kind}"
        gpu = machine.gpu
        if gpu is None:
            return "needs a CUDA device"
        if gpu.capability != CAPABILITY:
            return f"needs compute capability 9.0, that of an H100 or H200, not {'.'.join(map(str, gpu.capability))}"
        if gpu.shared_block_bytes < SHARED:
            return f"needs {SHARED:,} bytes of shared memory for a block, not {gpu.shared_block_bytes:,}"
        if shape.precision != "fp16":
            return f"computes in fp16, not in {shape.precision}"
        if shape.groups != 1:
            return f"computes one group of maps, not {shape.groups}"
        if shape.activation in ("softmax", "prelu"):
            return f"applies no {shape.activation}, which needs more than one value"
        if len(shape.fins) > INPUTS:
            return f"reads up to {INPUTS} inputs, not {len(shape.fins)}"
        if any(factor not in FACTORS for factors in shape.factors for factor in factors):
            return f"repeats voxels of upsampled inputs {', '.join(map(str, FACTORS))} times, not as often as here"
        if reason := why_not_two(shape):
            return reason
        if plan_of(shape, 1) is None:
            return f"the input of a tile does not fit the {SHARED:,} bytes of shared memory that a block has"
        return None

    def variants(self, shape: LayerShape, machine: Machine) -> Sequence[Variant]:
        """Return the fastest first; weights are stored for the inputs, columns of some lines, and chunks."""
        del machine
        assert isinstance(shape, GraphConvShape)
        inputs = "+".join(map(str, shape.fins))
        found = [
            (cycles_of(shape, plan), c) for c in columns_of(shape) if (plan := plan_of(shape, c.steps)) is not None
        ]
        return tuple(
            Variant.of(inputs=inputs, across=c.across, lines=c.lines, stride=shape.stride[1], steps=c.steps)
            for _, c in sorted(found, key=lambda pair: pair[0])
        )

    def footprint(self, shape: LayerShape, variant: Variant, threads: int) -> Footprint:
        del threads
        shape, plan = _planned(shape, variant)
        nbytes = plan.parts * prod(shape.out_shape) * FLOAT32
        scratch = (Scratch("sums", nbytes),) if plan.parts > 1 else ()
        return Footprint(resident=resident_bytes(plan.columns), scratch=scratch, raises_peak=True)

    def work(self, shape: LayerShape, variant: Variant) -> Sequence[Work]:
        shape, plan = _planned(shape, variant)
        flops = FLOPS_OF_CYCLE * MULTIPROCESSORS * cycles_of(shape, plan)
        nbytes = shape.in_bytes + shape.out_bytes + resident_bytes(plan.columns)
        return (Work("gpu_wgmma_half", flops, float(nbytes)),)

    def prepare(self, weights: ConvWeights | None, variant: Variant, device: Device) -> Weights:
        assert weights is not None
        fins = tuple(map(int, variant.text("inputs").split("+")))
        lines = variant.count("lines")
        kernels = arranged(
            weights.weight, fins, variant.count("across"), lines, variant.count("stride"), variant.count("steps")
        )
        maps = len(kernels) * (ROWS // lines)
        bias = np.pad(weights.bias, (0, maps - len(weights.bias))).astype(np.float32)
        return Weights(
            device.put(kernels, f"kernels of {self.name}"),
            device.put(bias, f"biases of {self.name}"),
        )

    def bind(self, resident: Weights, shape: LayerShape, variant: Variant, device: Device) -> WarpgroupStep:
        return WarpgroupStep(resident, *_planned(shape, variant), device)


class Weights(NamedTuple):
    """Weights on the device."""

    kernels: Any
    bias: Any


def _planned(shape: LayerShape, variant: Variant) -> tuple[GraphConvShape, Plan]:
    assert isinstance(shape, GraphConvShape)
    plan = plan_of(shape, variant.count("steps"))
    assert plan is not None, f"no tile of {shape} fits {SHARED} bytes of shared memory"
    return shape, plan


def arranged(
    weight: npt.NDArray[np.float32], fins: tuple[int, ...], across: int, lines: int, stride: int, steps: int
) -> npt.NDArray[np.float16]:
    """Return kernels as [block of maps][chunk][step][2][64][8], shifted along y for each line of a column.

    A step is a tap for 16 maps; they are filled up with zeros to a multiple of GROUP, if there are more.
    """
    if across > 1:  # the taps along x are maps
        weight = np.moveaxis(weight, 4, 1).reshape(len(weight), -1, *weight.shape[2:4], 1)
        fins = (fins[0] * across,)
    fout, _, kz, ky, kx = weight.shape
    maps, pieces = ROWS // lines, [-(-fin // PIECE) for fin in fins]
    blocks, chunks = -(-fout // maps), -(-sum(pieces) // (2 * steps))
    padded = np.zeros((blocks * maps, chunks * steps * STEP, kz, ky, kx), np.float32)
    to, of = 0, 0
    for fin, count in zip(fins, pieces, strict=True):
        padded[:fout, to : to + fin] = weight[:, of : of + fin]
        to, of = to + count * PIECE, of + fin
    reach = reach_of(ky, stride, lines)
    rows = np.zeros((blocks, lines, maps, chunks * steps * STEP, kz, reach, kx), np.float32)
    for line in range(lines):
        shift = line * stride
        rows[:, line, :, :, :, shift : shift + ky] = padded.reshape(blocks, maps, *padded.shape[1:])
    with np.errstate(over="ignore", invalid="ignore"):  # NaN and infinity show in the result
        halves = rows.astype(np.float16)
    cut = halves.reshape(blocks, ROWS, chunks, steps, 2, PIECE, kz * reach * kx)
    count = kz * reach * kx * steps
    missing = -count % min(count, GROUP)
    ordered = cut.transpose(0, 2, 6, 3, 4, 1, 5).reshape(blocks, chunks, count, 2, ROWS, PIECE)
    return np.pad(ordered, ((0, 0), (0, 0), (0, missing), *[(0, 0)] * 3))


class WarpgroupStep:
    """A GraphDeviceStep.

    moments  whether those of the output are found too, as in warpgroup.cu: only of whole sums, and without an addend
    """

    def __init__(
        self, weights: Weights, shape: GraphConvShape, plan: Plan, device: Device, *, moments: bool = False
    ) -> None:
        self._weights, self._shape, self._plan, self._device = weights, shape, plan, device
        assert not moments or (plan.parts == 1 and not shape.addend)
        self._moments = moments
        name = kernel_of(plan.n, plan.products, plan.columns.group, moments=moments)
        self._kernel = device.kernels(SOURCE, [name])[name]
        self._sums = device.kernels(SUMS, [f"add_parts<{count}>" for count in (1, AT_ONCE)]) if plan.parts > 1 else {}
        self._function = numbers_of(shape.activation, shape.parameters)
        planes, lines, width = plan.extent
        c: Columns = plan.columns
        self._sizes = tuple(
            np.int64(size)
            for size in (
                *(
                    len(shape.fins),
                    *shape.first,
                    *shape.n,
                    *shape.out_shape[1:],
                    c.pieces,
                    c.steps,
                    *c.k,
                    *c.stride,
                    *c.apart,
                ),
                *(*shape.before, *plan.tile, *plan.tiles, c.blocks, plan.parts, planes, lines, width, *plan.along),
                *(plan.regions, plan.kept, c.across, c.lines),
            )
        )

    def run(self, inputs: Sequence[Any], out: Any, scratch: Mapping[str, Any], *, out_peak: int = 0) -> None:
        """Compute the layer; see GraphDeviceStep. Moments go to the scratch of that name."""
        shape, plan, device = self._shape, self._plan, self._device
        addend = inputs[-1] if shape.addend else None
        steps = [0, 0, 0] if addend is None else [step // FLOAT16 for step in addend.strides[:3]]
        out_steps = [step // FLOAT16 for step in out.strides[:3]]
        z, y, x = plan.along  # from 8 columns to the next 8
        further = 2 * (z * out_steps[0] + y * plan.columns.lines * out_steps[1] + x * out_steps[2])
        whole = shape.fout % PIECE == 0
        wide = whole and self._is_wide(out) and (addend is None or self._is_wide(addend))
        sums = scratch["sums"] if plan.parts > 1 else None
        moments = scratch["moments"] if self._moments else None
        kernel_addend = None if plan.parts > 1 else addend
        self._kernel(
            (min(plan.items, device.gpu.multiprocessors),),
            (THREADS,),
            *self._arguments(inputs[: len(shape.fins)]),
            *(kernel_addend, *steps, out, *out_steps, sums, moments),
            *(np.uint64(0 if plan.parts > 1 else out_peak),),
            *(*self._weights, *self._sizes, np.int64(further), int(wide), *self._function),
            shared=plan.shared_bytes,
        )
        if plan.parts == 1:
            return
        at_once = AT_ONCE * FLOAT16
        together = [shape.fout * FLOAT16, device.address(out), *out.strides[:3]]
        count = AT_ONCE if all(nbytes % at_once == 0 for nbytes in together) else 1
        blocks = -(-prod(out.shape) // (count * SUMS_THREADS))
        self._sums[f"add_parts<{count}>"](
            (blocks,),
            (SUMS_THREADS,),
            *(sums, self._weights.bias, addend, *steps, out, *out_steps, np.uint64(out_peak)),
            *(plan.parts, *out.shape, *self._function),
        )

    def _arguments(self, inputs: Sequence[Any]) -> list[Any]:
        """Return what the kernel takes for its inputs; those that there are not have no maps."""
        arguments: list[Any] = []
        for index in range(INPUTS):
            if index >= len(inputs):
                arguments += [None, *[0] * 8]
                continue
            array, factors = inputs[index], self._shape.factors[index] if self._shape.factors else (1, 1, 1)
            wide = array.shape[3] % PIECE == 0 and self._plan.columns.across == 1 and self._is_wide(array)
            arguments += [array, *(step // FLOAT16 for step in array.strides[:3]), array.shape[3]]
            arguments += [*(FACTORS.index(factor) for factor in factors), int(wide)]
        return arguments

    def _is_wide(self, array: Any) -> bool:
        """Return whether pieces of its voxels may be copied at once."""
        nbytes = PIECE * FLOAT16
        return self._device.address(array) % nbytes == 0 and all(step % nbytes == 0 for step in array.strides[:3])
