"""Max- and average pooling of a graph on a GPU.

Method   A thread takes some maps of an output voxel. pool.cu.
Memory   None.
Bound    Memory: the input is read once, the output written once.
Exact    A maximum does not round. NaN in, NaN out.
Source   Definition.
Tested   tests/kernels/gpu/graph/test_lines.py
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from znnpy.graph_shapes import WindowPoolShape
from znnpy.kernels.contract import Kind, Variant
from znnpy.kernels.gpu.graph.inputs import TRIPLE, one_input
from znnpy.kernels.gpu.graph.layer import MovingLayer, given, why_not_here
from znnpy.kernels.gpu.graph.lines import Widths, grid_of, line_instances
from znnpy.layers import ZERO

if TYPE_CHECKING:
    from znnpy.kernels.gpu.device import Device
    from znnpy.kernels.gpu.kernel_source import KernelInstance
    from znnpy.machine import Machine
    from znnpy.shapes import Sized

SOURCE = "graph/pool.cu"
WINDOWS = np.dtype(
    [
        *((name, TRIPLE) for name in ("n", "m", "window", "stride", "before", "counted")),
        ("counts_padding", "i4"),
    ]
)
SIDE = 2  # windows that have code of their own


def instances() -> list[KernelInstance]:
    """Return all kernels."""
    return line_instances(SOURCE, "pool", 64, ", false, 0", ", false, 2", ", true, 0", ", true, 2")


@dataclass(frozen=True, slots=True)
class WindowPoolDirect(MovingLayer):
    """Max- and average pooling with any stride."""

    name: str = "gpu.window_pool.direct"
    kind: Kind = "window_pool"
    version: int = 1
    summary: str = "max- and average poolings of graphs, with any stride and padding"
    source: str = "definition"

    def why_not(self, shape: Sized, machine: Machine) -> str | None:
        return why_not_here(shape, machine, WindowPoolShape, "poolings over windows")

    def bind(self, resident: None, shape: Sized, variant: Variant, device: Device) -> _Step:
        del resident, variant
        return _Step(given(shape, WindowPoolShape), device)


class _Step:
    """A GraphDeviceStep."""

    def __init__(self, shape: WindowPoolShape, device: Device) -> None:
        self._shape, self._device = shape, device
        inside = shape.before == ZERO and all(behind <= 0 for behind in shape.behind)
        side = SIDE if inside and set(shape.window) == {SIDE} else 0
        average = str(shape.how == "average").lower()
        self._kernels = Widths(device, SOURCE, "pool", shape, [shape.f], f", {average}, {side}")
        found = np.zeros((), WINDOWS)
        for name in ("n", "window", "stride", "before"):
            found[name] = getattr(shape, name)
        counted = (behind - over for behind, over in zip(shape.behind, shape.overhang, strict=True))
        found["m"], found["counted"], found["counts_padding"] = shape.out, tuple(counted), shape.count_padding
        self._windows = found[()]

    def run(self, inputs: Sequence[Any], out: Any, scratch: Mapping[str, Any], *, out_peak: int = 0) -> None:
        del scratch
        width, kernel = self._kernels.widest(inputs[0], out)
        size = self._shape.out
        kernel(
            *grid_of(self._device, size[2] * self._shape.f // width, size),
            *(one_input(self._device, inputs[0]), self._windows, out, np.uint64(out_peak)),
        )
