"""Padding of a graph on a GPU, and crops.

Method   A thread copies some maps of a voxel. pad.cu.
Memory   None.
Bound    Memory: the input is read once, the output written once.
Source   Definition.
Tested   tests/kernels/gpu/graph/test_lines.py
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from znnpy.graph_shapes import PadShape
from znnpy.kernels.contract import Kind, Variant
from znnpy.kernels.gpu.graph.inputs import one_input, triple
from znnpy.kernels.gpu.graph.layer import MovingLayer, given, why_not_here
from znnpy.kernels.gpu.graph.lines import Widths, grid_of, line_instances
from znnpy.layers import PAD_MODES, ZERO

if TYPE_CHECKING:
    from znnpy.kernels.gpu.device import Device
    from znnpy.kernels.gpu.kernel_source import KernelInstance
    from znnpy.machine import Machine
    from znnpy.shapes import Sized

SOURCE = "graph/pad.cu"


def instances() -> list[KernelInstance]:
    """Return all kernels."""
    return line_instances(SOURCE, "pad", 64)


@dataclass(frozen=True, slots=True)
class PadCopy(MovingLayer):
    """Padding with zeros, mirrored or repeated voxels."""

    name: str = "gpu.pad.copy"
    kind: Kind = "pad"
    version: int = 1
    summary: str = "padding at the faces of a volume, and crops"
    source: str = "definition"

    def why_not(self, shape: Sized, machine: Machine) -> str | None:
        return why_not_here(shape, machine, PadShape, "padding")

    def bind(self, resident: None, shape: Sized, variant: Variant, device: Device) -> _Step:
        del resident, variant
        return _Step(given(shape, PadShape), device)


class _Step:
    """A GraphDeviceStep."""

    def __init__(self, shape: PadShape, device: Device) -> None:
        self._shape, self._device = shape, device
        self._kernels = Widths(device, SOURCE, "pad", shape, [shape.f])

    def run(self, inputs: Sequence[Any], out: Any, scratch: Mapping[str, Any], *, out_peak: int = 0) -> None:
        del scratch, out_peak  # a copy passes on the peak of its input
        shape = self._shape
        width, kernel = self._kernels.widest(inputs[0], out)
        kernel(
            *grid_of(self._device, shape.m[2] * shape.f // width, shape.m),
            one_input(self._device, inputs[0]),
            *(triple(size) for size in (shape.first, shape.low, shape.high, shape.m, ZERO)),
            *(PAD_MODES.index(shape.how), out, shape.f, np.uint64(0)),
        )
