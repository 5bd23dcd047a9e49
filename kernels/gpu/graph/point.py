"""Layers of a graph that take their inputs voxel by voxel, on a GPU: sums, products, concatenations, scales, functions.

Method   A thread takes some maps of a voxel of all inputs; for softmax a few threads share a voxel. point.cu.
Memory   None but the weights of a scale or a prelu.
Bound    Memory: the inputs are read once, the output is written once.
Source   Definition.
Tested   tests/kernels/gpu/graph/test_lines.py
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from znnpy.graph_shapes import PointShape
from znnpy.kernels.contract import Footprint, Kind, Variant, Work
from znnpy.kernels.gpu.graph.functions import numbers_of
from znnpy.kernels.gpu.graph.inputs import MOST_INPUTS, TRIPLE, all_inputs
from znnpy.kernels.gpu.graph.layer import GpuLayer, given, why_not_here
from znnpy.kernels.gpu.graph.lines import Widths, grid_of, lanes_for, line_instances
from znnpy.shapes import FLOAT32

if TYPE_CHECKING:
    from znnpy.kernels.contract import ConvWeights
    from znnpy.kernels.gpu.device import Device
    from znnpy.kernels.gpu.kernel_source import KernelInstance
    from znnpy.machine import Machine
    from znnpy.shapes import Sized

SOURCE = "graph/point.cu"
HOWS = ("add", "multiply", "concat", "scale", "function")  # in the order of How in point.cu
POINT = np.dtype(
    [
        ("n", TRIPLE),
        *((name, "i4") for name in ("inputs", "maps", "how", "function", "slopes")),
        *((name, "f4") for name in ("a", "b")),
    ]
)


def instances() -> list[KernelInstance]:
    """Return all kernels."""
    return [*line_instances(SOURCE, "values", 64), *line_instances(SOURCE, "softmax", 64)]


class Resident(NamedTuple):
    """The weights of a scale, a prelu or a norm."""

    weight: Any  # factors or slopes
    bias: Any


def upload_terms(weights: ConvWeights | None, device: Device, name: str) -> Resident | None:
    """Upload one factor, or slope, and one offset for each map; None if there are no weights."""
    if weights is None:
        return None
    return Resident(
        device.put(weights.weight.reshape(-1), f"factors of {name}"), device.put(weights.bias, f"offsets of {name}")
    )


@dataclass(frozen=True, slots=True)
class PointLines(GpuLayer):
    """Sums, products, concatenations, scales, and functions of each value."""

    name: str = "gpu.point.lines"
    kind: Kind = "point"
    version: int = 1
    summary: str = "sums, products, concatenations, scales and functions, voxel by voxel"
    source: str = "definition"

    def why_not(self, shape: Sized, machine: Machine) -> str | None:
        if reason := why_not_here(shape, machine, PointShape, "layers voxel by voxel"):
            return reason
        inputs = len(given(shape, PointShape).fins)
        return f"takes up to {MOST_INPUTS} inputs, not {inputs}" if inputs > MOST_INPUTS else None

    def footprint(self, shape: Sized, variant: Variant, threads: int) -> Footprint:
        del variant, threads
        shape = given(shape, PointShape)
        weighted = shape.how == "scale" or shape.activation == "prelu"
        copies = shape.how == "concat" and shape.activation == "none"
        return Footprint(resident=2 * FLOAT32 * shape.f if weighted else 0, raises_peak=not copies)

    def work(self, shape: Sized, variant: Variant) -> Sequence[Work]:
        del variant
        return (Work("gpu_stream", 0.0, shape.in_bytes + shape.out_bytes),)

    def prepare(self, weights: ConvWeights | None, variant: Variant, device: Device) -> Resident | None:
        del variant
        return upload_terms(weights, device, self.name)

    def bind(self, resident: Any, shape: Sized, variant: Variant, device: Device) -> _Step:
        del variant
        return _Step(resident, given(shape, PointShape), device)


class _Step:
    """A GraphDeviceStep."""

    def __init__(self, resident: Resident | None, shape: PointShape, device: Device) -> None:
        self._shape, self._device = shape, device
        self._terms = (None, None) if resident is None else resident
        self._soft = shape.activation == "softmax"
        maps = shape.fins if shape.how == "concat" else (shape.f,)
        self._kernels = Widths(device, SOURCE, "softmax" if self._soft else "values", shape, maps)
        found = np.zeros((), POINT)
        found["n"], found["inputs"], found["maps"] = shape.n, len(shape.fins), shape.f
        found["how"] = HOWS.index(shape.how)
        found["function"], found["a"], found["b"] = numbers_of(shape.activation, shape.parameters)
        found["slopes"] = resident.weight.size if resident is not None and shape.activation == "prelu" else 0
        self._point = found[()]

    def run(self, inputs: Sequence[Any], out: Any, scratch: Mapping[str, Any], *, out_peak: int = 0) -> None:
        del scratch
        shape, device = self._shape, self._device
        structs = all_inputs(device, inputs)
        for index in shape.single:
            structs["parts"][index]["step"] = 0
        whole = [shape.how == "concat" or maps == shape.f for maps in shape.fins]
        for index, has_all in enumerate(whole):
            structs["parts"][index]["factor"] = (1, 1, int(has_all))
        read = [x for x, has_all in zip(inputs, whole, strict=True) if has_all]
        width, kernel = self._kernels.widest(*read, out)
        lanes = lanes_for(shape.f, width) if self._soft else shape.f // width
        kernel(
            *grid_of(device, shape.n[2] * lanes, shape.n),
            *(structs, self._point, *self._terms, out, np.uint64(out_peak)),
            *((lanes,) if self._soft else ()),
        )
