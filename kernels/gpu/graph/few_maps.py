"""Convolution of one voxel with few maps out, such as the last layer of a network.

Method   A thread computes all maps of a voxel in registers, and reads its inputs some neighbouring maps at a time.
         few_maps.cu. An addend, the function and softmax ride along.
Memory   None besides kernels, in float32 in every precision.
Bound    Memory: the inputs are read once, the output is written once.
Source   The definition.
Tested   tests/kernels/gpu/graph/test_few_maps.py
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from znnpy.graph_shapes import GraphConvShape
from znnpy.kernels.contract import Footprint, Kind, Variant, Work
from znnpy.kernels.gpu.graph.functions import numbers_of
from znnpy.kernels.gpu.graph.inputs import INPUT, MOST_INPUTS, TRIPLE, all_inputs, one_input
from znnpy.kernels.gpu.graph.layer import GpuLayer, given, why_not_here
from znnpy.kernels.gpu.graph.lines import Widths, grid_of, line_instances
from znnpy.kernels.gpu.kernel_source import KernelInstance
from znnpy.layers import ONE
from znnpy.shapes import FLOAT32, Sized

if TYPE_CHECKING:
    from znnpy.kernels.contract import ConvWeights
    from znnpy.kernels.gpu.device import Device
    from znnpy.machine import Machine

SOURCE = "graph/few_maps.cu"
OUTS = (1, 2, 4, 8)  # maps of a thread; fewer are padded
MOST_MAPS = 1024  # of the inputs: their weights are in shared memory
REGISTERS = 80
NUMBERS = ("inputs", "maps", "out", "function", "softmax")
FEW = np.dtype([("n", TRIPLE), *((name, "i4") for name in NUMBERS), ("a", "f4"), ("b", "f4")], align=True)


def instances() -> list[KernelInstance]:
    """Return all kernels."""
    return line_instances(SOURCE, "few_maps", REGISTERS, *(f", {out}" for out in OUTS))


class Resident(NamedTuple):
    """Kernels and biases on the device, padded with zeros to one of OUTS."""

    weight: Any  # (f, maps of a thread) float32
    bias: Any


def _padded(fout: int) -> int:
    return next(out for out in OUTS if out >= fout)


@dataclass(frozen=True, slots=True)
class GraphConvFewMaps(GpuLayer):
    """Convolutions of one voxel with up to 8 maps out."""

    name: str = "gpu.graph_conv.few_maps"
    kind: Kind = "graph_conv"
    version: int = 1
    summary: str = "1x1x1 convolutions with up to 8 maps out, at the speed of memory"
    source: str = "definition"

    def why_not(self, shape: Sized, machine: Machine) -> str | None:
        if reason := why_not_here(shape, machine, GraphConvShape, "convolutions of graphs"):
            return reason
        shape = given(shape, GraphConvShape)
        if shape.k != ONE or not shape.plain or shape.padded != shape.n or shape.upsampled:
            return "computes 1x1x1 without stride, groups, padding or upsampled inputs: see gpu.graph_conv.direct"
        if shape.fout > OUTS[-1] or shape.fin > MOST_MAPS:
            return f"computes up to {OUTS[-1]} maps of up to {MOST_MAPS}, not {shape.fout} of {shape.fin}"
        if shape.activation == "prelu":
            return "knows no slopes: see gpu.graph_conv.direct"
        return None if len(shape.fins) <= MOST_INPUTS else f"takes up to {MOST_INPUTS} inputs, not {len(shape.fins)}"

    def footprint(self, shape: Sized, variant: Variant, threads: int) -> Footprint:
        del variant, threads
        shape = given(shape, GraphConvShape)
        return Footprint(resident=FLOAT32 * (shape.fin + 1) * _padded(shape.fout), raises_peak=True)

    def work(self, shape: Sized, variant: Variant) -> Sequence[Work]:
        del variant
        shape = given(shape, GraphConvShape)
        flops = 2.0 * prod(shape.n) * shape.fin * _padded(shape.fout)
        return (Work("gpu_stream", flops, shape.in_bytes + shape.out_bytes),)

    def prepare(self, weights: ConvWeights | None, variant: Variant, device: Device) -> Resident:
        del variant
        assert weights is not None
        fout, fin = weights.weight.shape[:2]
        weight, bias = np.zeros((fin, _padded(fout)), np.float32), np.zeros(_padded(fout), np.float32)
        weight[:, :fout], bias[:fout] = weights.weight.reshape(fout, fin).T, weights.bias
        return Resident(device.put(weight, f"kernels of {self.name}"), device.put(bias, f"biases of {self.name}"))

    def bind(self, resident: Any, shape: Sized, variant: Variant, device: Device) -> _Step:
        del variant
        return _Step(resident, given(shape, GraphConvShape), device)


class _Step:
    """A GraphDeviceStep."""

    def __init__(self, resident: Resident, shape: GraphConvShape, device: Device) -> None:
        self._resident, self._shape, self._device = resident, shape, device
        out = _padded(shape.fout)
        self._shared = FLOAT32 * shape.fin * out
        self._kernels = Widths(device, SOURCE, "few_maps", shape, shape.fins, f", {out}")
        found = np.zeros((), FEW)
        found["n"], found["inputs"], found["maps"], found["out"] = shape.n, len(shape.fins), shape.fin, shape.fout
        found["function"], found["a"], found["b"] = numbers_of(shape.activation, shape.parameters)
        found["softmax"] = shape.activation == "softmax"
        self._few = found[()]

    def run(self, inputs: Sequence[Any], out: Any, scratch: Mapping[str, Any], *, out_peak: int = 0) -> None:
        del scratch
        shape, device = self._shape, self._device
        maps = inputs[: len(shape.fins)]
        addend = one_input(device, inputs[-1]) if shape.addend else np.zeros((), INPUT)[()]
        _, kernel = self._kernels.widest(*maps)
        kernel(
            *grid_of(device, shape.n[2], shape.n),
            *(all_inputs(device, maps), self._few, *self._resident, addend, out, np.uint64(out_peak)),
            shared=self._shared,
        )
