"""Convolutions of upsampled inputs by phases: each voxel is multiplied once, and not once for every repetition of it.

Method   Where an input repeats voxels twice along an axis, the three taps of an output voxel fall on two voxels of it:
         for even voxels the first two taps on one, for odd ones the last two. So the output has two phases along such
         an axis, each the convolution of the small input with two taps, and up to eight in all. warpgroup.cu computes
         each into its voxels, and then the other inputs with what is there as the addend.
Memory   Kernels of all phases and of the other inputs; sums of the parts of one of these.
Bound    Arithmetic: 2 (2^3 f1 + 3^3 f2) f' flops a voxel, where f1 maps are upsampled, in place of 2 3^3 (f1 + f2) f'.
Exact    What the upsampled input gives is rounded to float16 before the rest is added.
Source   Shi et al., Is the deconvolution layer the same as a convolutional layer?, 2016 (phases of upsampled layers).
Tested   tests/kernels/gpu/graph_gemm/test_phases.py
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from znnpy.geometry import vector
from znnpy.graph_shapes import GraphConvShape
from znnpy.kernels.contract import ConvWeights, Footprint, Kind, Scratch, Variant, Work
from znnpy.kernels.gpu.graph_gemm.warpgroup import GraphConvWarpgroup, Weights
from znnpy.layers import ONE
from znnpy.shapes import Vec3

if TYPE_CHECKING:
    from znnpy.kernels.gpu.device import Device
    from znnpy.layer_shapes import LayerShape
    from znnpy.machine import Machine

PRODUCTS = GraphConvWarpgroup()
TWICE = (1, 2)  # how often an input may repeat voxels along an axis
TAPS = 3  # of the kernel along an axis of which voxels are repeated
SETTINGS = ("across", "lines", "stride", "steps")  # of a variant of warpgroup


class Part(NamedTuple):
    """The part of an axis that a phase computes.

    taken   voxels of the input in memory
    given   voxels of the output
    before, behind  voxels of padding
    """

    taken: slice
    given: slice
    before: int
    behind: int


class Phase(NamedTuple):
    """A convolution of the upsampled input whose results are some voxels of the output."""

    shape: GraphConvShape
    which: Vec3  # 0 or 1 along each axis
    taken: tuple[slice, slice, slice]
    given: tuple[slice, slice, slice]


@dataclass(frozen=True, slots=True)
class GraphConvPhases:
    """Products of kernels and voxels by phases, on the tensor cores of an H100 or H200."""

    name: str = "gpu.graph_conv.phases"
    kind: Kind = "graph_conv"
    version: int = 1
    summary: str = "float16 on an H100 or H200, of an upsampled input: a third of the arithmetic for it"
    source: str = "Shi et al. 2016"

    def why_not(self, shape: LayerShape, machine: Machine) -> str | None:
        if not isinstance(shape, GraphConvShape) or not shape.upsampled:
            return f"computes convolutions of upsampled inputs: see {PRODUCTS.name}"
        if reason := PRODUCTS.why_not(shape, machine):
            return reason
        factors = [factor for factor in shape.factors if factor != ONE]
        if len(factors) > 1:
            return f"one input may be upsampled, not {len(factors)}"
        for factor, k, first, before, behind, n in zip(
            factors[0], shape.k, shape.first, shape.before, shape.behind, shape.n, strict=True
        ):
            if factor not in TWICE:
                return f"repeats voxels twice along an axis, not {factor} times"
            if factor > 1 and k != TAPS:
                return f"takes {TAPS} taps along an axis of which voxels are repeated, not {k}"
            if factor > 1 and ((before and first) or (behind and (first + n) % factor)):
                return "a volume that is upsampled begins and ends with whole voxels"
        if (shape.stride, shape.dilation) != (ONE, ONE):
            return "takes strides and dilations of 1"
        for part in (*(phase.shape for phase in phases_of(shape)), *rest_of(shape)):
            if reason := PRODUCTS.why_not(part, machine):
                return reason
        return None

    def variants(self, shape: LayerShape, machine: Machine) -> Sequence[Variant]:
        """Return the fastest first: a variant for phases with one for the other inputs, if there are any."""
        assert isinstance(shape, GraphConvShape)
        inputs = "+".join(map(str, shape.fins))
        which = upsampled_of(shape)
        first = PRODUCTS.variants(phases_of(shape)[0].shape, machine)
        others = [PRODUCTS.variants(rest, machine) for rest in rest_of(shape)]
        found = []
        for by_phase, *rest in product(first, *others):
            settings = {f"phase_{name}": by_phase.count(name) for name in SETTINGS}
            settings |= {f"rest_{name}": one.count(name) for one in rest for name in SETTINGS}
            found.append(Variant.of(inputs=inputs, upsampled=which, factor=shape.factors[which], **settings))
        return tuple(found)

    def footprint(self, shape: LayerShape, variant: Variant, threads: int) -> Footprint:
        parts = _parts(shape, variant)
        known = [PRODUCTS.footprint(part, how, threads) for part, how in parts]
        # Weights are those of all phases, also where the output is so small that some have no voxel.
        assert isinstance(shape, GraphConvShape)
        count = prod(variant.size("factor"))
        resident = known[0].resident * count + sum(one.resident for one in known[len(phases_of(shape)) :])
        sums = max((scratch.nbytes for one in known for scratch in one.scratch), default=0)
        return Footprint(resident=resident, scratch=(Scratch("sums", sums),) if sums else (), raises_peak=True)

    def work(self, shape: LayerShape, variant: Variant) -> Sequence[Work]:
        known = [work for part, how in _parts(shape, variant) for work in PRODUCTS.work(part, how)]
        return (Work(known[0].unit, sum(work.flops for work in known), sum(work.nbytes for work in known)),)

    def prepare(self, weights: ConvWeights | None, variant: Variant, device: Device) -> Prepared:
        assert weights is not None
        fins, which = [int(maps) for maps in variant.text("inputs").split("+")], variant.count("upsampled")
        begin = sum(fins[:which])
        upsampled = weights.weight[:, begin : begin + fins[which]]
        others = np.delete(weights.weight, np.s_[begin : begin + fins[which]], axis=1)
        alone = len(fins) == 1
        bias = weights.bias if alone else np.zeros_like(weights.bias)
        factor, (phase, rest) = variant.size("factor"), _split(variant)
        by_phase = {
            one: PRODUCTS.prepare(ConvWeights(kernels_of(upsampled, factor, one), bias), phase, device)
            for one in product(*map(range, factor))
        }
        return Prepared(by_phase, None if alone else PRODUCTS.prepare(ConvWeights(others, weights.bias), rest, device))

    def bind(self, resident: Prepared, shape: LayerShape, variant: Variant, device: Device) -> _Step:
        assert isinstance(shape, GraphConvShape)
        return _Step(resident, shape, variant, device)


class Prepared(NamedTuple):
    """Weights on the device: of each phase, and of the other inputs."""

    phases: dict[tuple[int, ...], Weights]
    rest: Weights | None


def _split(variant: Variant) -> tuple[Variant, Variant]:
    """Return the variants for phases and for the other inputs; the latter is empty if there are none."""
    fins, which = variant.text("inputs").split("+"), variant.count("upsampled")
    phase = Variant.of(inputs=fins[which], **{name: variant.count(f"phase_{name}") for name in SETTINGS})
    others = "+".join(fins[:which] + fins[which + 1 :])
    if not others:
        return phase, Variant()
    return phase, Variant.of(inputs=others, **{name: variant.count(f"rest_{name}") for name in SETTINGS})


def _parts(shape: LayerShape, variant: Variant) -> list[tuple[GraphConvShape, Variant]]:
    """Return the convolutions that compute a layer, each with its variant."""
    assert isinstance(shape, GraphConvShape)
    phase, rest = _split(variant)
    return [*((one.shape, phase) for one in phases_of(shape)), *((one, rest) for one in rest_of(shape))]


def upsampled_of(shape: GraphConvShape) -> int:
    """Return which of the inputs is upsampled."""
    return next(index for index, factor in enumerate(shape.factors) if factor != ONE)


def rest_of(shape: GraphConvShape) -> list[GraphConvShape]:
    """Return the convolution of the inputs that are not upsampled, which adds what is there; none if there are none."""
    fins = tuple(maps for maps, factor in zip(shape.fins, shape.factors, strict=True) if factor == ONE)
    return [replace(shape, fins=fins, factors=(), first=(0, 0, 0), addend=True)] if fins else []


def phases_of(shape: GraphConvShape) -> list[Phase]:
    """Return the convolutions of the upsampled input, one for each phase of which the output has a voxel."""
    which = upsampled_of(shape)
    factor, sizes = shape.factors[which], shape.size_of(which)
    axes = zip(shape.n, shape.out_shape[1:4], shape.before, shape.behind, shape.first, sizes, factor, strict=True)
    parts = [list(_parts_of_axis(*axis)) for axis in axes]
    last: dict[str, Any] = {} if len(shape.fins) == 1 else {"activation": "none", "parameters": ()}
    found = []
    for numbers in product(*(range(len(axis)) for axis in parts)):
        z, y, x = (axis[number] for axis, number in zip(parts, numbers, strict=True))
        if any(part.given.start >= part.given.stop for part in (z, y, x)):
            continue
        one = replace(
            shape,
            fins=(shape.fins[which],), factors=(), first=(0, 0, 0), **last,
            k=vector(k if times == 1 else 2 for k, times in zip(shape.k, factor, strict=True)),
            n=vector(part.taken.stop - part.taken.start for part in (z, y, x)),
            before=(z.before, y.before, x.before), behind=(z.behind, y.behind, x.behind),
        )  # fmt: skip
        found.append(Phase(one, vector(numbers), (z.taken, y.taken, x.taken), (z.given, y.given, x.given)))
    return found


def _parts_of_axis(n: int, m: int, before: int, behind: int, first: int, size: int, times: int) -> Iterator[Part]:
    """Yield what each phase computes along an axis; of voxels that are not repeated there is one."""
    if times == 1:
        yield Part(slice(0, n), slice(0, m), before, behind)
        return
    for phase in range(2):
        skipped = (phase - first + before) % 2  # outputs before the first one of this phase
        count = -(-(m - skipped) // 2)
        low = (skipped - before + first) // 2  # the voxel in memory that the first tap reads; -1: it is padding
        high = low + count + 1
        yield Part(slice(max(0, low), min(size, high)), slice(skipped, m, 2), max(0, -low), max(0, high - size))


def kernels_of(weight: npt.NDArray[np.float32], factor: Vec3, phase: Sequence[int]) -> npt.NDArray[np.float32]:
    """Return the kernels (f', f, kz, ky, kx) of a phase: along repeated axes two taps, one of them the sum of two."""
    for axis, (times, odd) in enumerate(zip(factor, phase, strict=True), 2):
        if times == 1:
            continue
        first, middle, last = np.split(weight, TAPS, axis)
        weight = np.concatenate((first, middle + last) if odd else (first + middle, last), axis)
    return weight


class _Step:
    """A GraphDeviceStep."""

    def __init__(self, weights: Prepared, shape: GraphConvShape, variant: Variant, device: Device) -> None:
        self._shape = shape
        self._which = upsampled_of(shape)
        phase, rest = _split(variant)
        self._phases = [
            (PRODUCTS.bind(weights.phases[one.which], one.shape, phase, device), one) for one in phases_of(shape)
        ]
        self._rest = [PRODUCTS.bind(weights.rest, one, rest, device) for one in rest_of(shape) if weights.rest]

    def run(self, inputs: Sequence[Any], out: Any, scratch: Mapping[str, Any], *, out_peak: int = 0) -> None:
        """Compute the layer; see GraphDeviceStep."""
        shape = self._shape
        addend = [inputs[-1]] if shape.addend else []
        peak = 0 if self._rest else out_peak
        for step, one in self._phases:
            taken = [inputs[self._which][one.taken], *(array[one.given] for array in addend)]
            step.run(taken, out[one.given], scratch, out_peak=peak)
        others = [array for index, array in enumerate(inputs[: len(shape.fins)]) if index != self._which]
        for step in self._rest:
            step.run([*others, out], out, scratch, out_peak=out_peak)
