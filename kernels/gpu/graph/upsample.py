"""Upsampling of a graph by whole factors on a GPU.

Method   A thread writes some maps of an output voxel: a copy, or the mean of eight voxels by their distances.
         upsample.cu.
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

from znnpy.graph_shapes import UpsampleShape
from znnpy.kernels.contract import Kind, Variant
from znnpy.kernels.gpu.graph.inputs import one_input, triple
from znnpy.kernels.gpu.graph.layer import MovingLayer, given, why_not_here
from znnpy.kernels.gpu.graph.lines import Widths, grid_of, line_instances

if TYPE_CHECKING:
    from znnpy.kernels.gpu.device import Device
    from znnpy.kernels.gpu.kernel_source import KernelInstance
    from znnpy.machine import Machine
    from znnpy.shapes import Sized

SOURCE = "graph/upsample.cu"


def instances() -> list[KernelInstance]:
    """Return all kernels."""
    return [*line_instances(SOURCE, "nearest", 64), *line_instances(SOURCE, "linear", 80)]


@dataclass(frozen=True, slots=True)
class UpsampleRepeat(MovingLayer):
    """Upsampling by whole factors."""

    name: str = "gpu.upsample.repeat"
    kind: Kind = "upsample"
    version: int = 1
    summary: str = "upsampling by whole factors, nearest or linear"
    source: str = "definition"

    def why_not(self, shape: Sized, machine: Machine) -> str | None:
        return why_not_here(shape, machine, UpsampleShape, "upsampling")

    def bind(self, resident: None, shape: Sized, variant: Variant, device: Device) -> _Step:
        del resident, variant
        return _Step(given(shape, UpsampleShape), device)


class _Step:
    """A GraphDeviceStep."""

    def __init__(self, shape: UpsampleShape, device: Device) -> None:
        self._shape, self._device = shape, device
        self._kernels = Widths(device, SOURCE, shape.how, shape, [shape.f])

    def run(self, inputs: Sequence[Any], out: Any, scratch: Mapping[str, Any], *, out_peak: int = 0) -> None:
        del scratch
        shape = self._shape
        width, kernel = self._kernels.widest(inputs[0], out)
        kernel(
            *grid_of(self._device, shape.m[2] * shape.f // width, shape.m),
            one_input(self._device, inputs[0], factor=shape.factor),
            *(triple(shape.first), triple(shape.m), out),
            *((triple(shape.n), np.uint64(out_peak)) if shape.how == "linear" else ()),
        )
