"""What the convolutions of graphs share: the shapes they accept, the same layer without padding, activations."""

from __future__ import annotations

from typing import TYPE_CHECKING

from znnpy.graph_shapes import GraphConvShape
from znnpy.layers import DEFAULT_PARAMETERS
from znnpy.shapes import FLOAT32, ConvShape

if TYPE_CHECKING:
    from znnpy.kernels.contract import Array
    from znnpy.kernels.thread_pool import ThreadPool
    from znnpy.shapes import Activation, LayerShape


def as_graph_conv(shape: object) -> GraphConvShape:
    """Return `shape` as a convolution of a graph; TypeError if it is another kind of layer."""
    if not isinstance(shape, GraphConvShape):
        raise TypeError(f"a primitive for convolutions of graphs was given {shape}; ask why_not first")
    return shape


def why_not_plain(shape: object) -> str | None:
    """Return None if `shape` is a convolution of a graph in fp32 without stride, dilation and groups, else a reason."""
    if not isinstance(shape, GraphConvShape):
        return f"computes convolutions of graphs, not {getattr(shape, 'kind', shape)}"
    if not shape.plain:
        return "computes convolutions with stride 1, dilation 1 and one group"
    return None if shape.precision == "fp32" else f"computes in fp32, not in {shape.precision}"


def padded_conv(shape: GraphConvShape, activation: Activation = "none") -> ConvShape:
    """Return the convolution of one array that holds the maps of all inputs and the padding."""
    return ConvShape(1, shape.fin, shape.fout, shape.padded, shape.k, activation)


def slope(shape: GraphConvShape) -> float | None:
    """Return what negative results are multiplied by, 0 for ReLU; None for functions that are not of this kind."""
    match shape.activation:
        case "none":
            return 1.0
        case "relu":
            return 0.0
        case "leaky_relu":
            return (shape.parameters or DEFAULT_PARAMETERS["leaky_relu"])[0]
        case _:
            return None


def activation_bytes(shape: GraphConvShape, threads: int) -> int:
    """Return the bytes that `finish` allocates."""
    if slope(shape) is not None:
        return 0
    from znnpy.kernels.cpu.activations import temporary_bytes

    return threads * temporary_bytes(shape.activation, shape.fout)


def finish(shape: GraphConvShape, out: Array, pool: ThreadPool) -> None:
    """Apply a function that is neither ReLU nor leaky ReLU to the results (z, y, x, f') in place."""
    if slope(shape) is None:
        from znnpy.kernels.cpu.activations import activate_graph

        activate_graph(shape.activation, shape.parameters, out, pool)
