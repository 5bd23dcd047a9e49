"""Do what others leave to do of a convolution of a graph: bias, addend, function and peak, in place.

Method  finish.cu
Tested  tests/kernels/gpu/graph/test_cudnn.py, test_copied.py
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from znnpy.kernels.gpu.graph.functions import numbers_of
from znnpy.kernels.gpu.graph.inputs import INPUT, TRIPLE, one_input
from znnpy.kernels.gpu.graph.lines import Widths, grid_of, line_instances

if TYPE_CHECKING:
    from znnpy.graph_shapes import GraphConvShape
    from znnpy.kernels.gpu.device import Device
    from znnpy.kernels.gpu.kernel_source import KernelInstance
    from znnpy.shapes import Activation

SOURCE = "graph/finish.cu"
FINISH = np.dtype(  # as in finish.cu
    [
        ("n", TRIPLE),
        *((name, "i4") for name in ("maps", "writes", "biased", "adds", "function")),
        *((name, "f4") for name in ("a", "b")),
    ]
)


def instances() -> list[KernelInstance]:
    """Return all kernels."""
    return line_instances(SOURCE, "finish", 64)


def is_done(shape: GraphConvShape, finish: Activation | None) -> bool:
    """Return whether nothing is left to do after a convolution that finishes so; None: it adds no bias."""
    return finish == shape.activation and not shape.addend


class Finish:
    """The rest of a layer, once its sums are in its output."""

    def __init__(self, shape: GraphConvShape, device: Device) -> None:
        self._shape, self._device = shape, device
        self._kernels = Widths(device, SOURCE, "finish", shape, (shape.fout,))

    def run(self, out: Any, bias: Any, addend: Sequence[Any], finish: Activation | None, out_peak: int) -> None:
        """Queue the kernel, unless nothing is left to do.

        out     (z, y, x, f'): the output, or some of its planes
        finish  the function that is applied, after the bias; None: the bias is to be added too
        """
        shape = self._shape
        if is_done(shape, finish) and not out_peak:
            return
        found = np.zeros((), FINISH)
        found["n"], found["maps"], found["adds"] = out.shape[:3], shape.fout, len(addend)
        found["writes"], found["biased"] = not is_done(shape, finish), finish is not None
        found["function"], found["a"], found["b"] = numbers_of(shape.activation, shape.parameters)
        width, kernel = self._kernels.widest(out, *addend)
        more = one_input(self._device, addend[0]) if addend else np.zeros((), INPUT)[()]
        kernel(
            *grid_of(self._device, shape.out[2] * (shape.fout // width), out.shape[:3]),
            *(out, bias, more, found[()], np.uint64(out_peak)),
        )
