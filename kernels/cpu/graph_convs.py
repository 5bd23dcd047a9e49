"""Hold what convolutions of graphs with stride 1 have in common: which they accept, and what they compute."""

from __future__ import annotations

from typing import TYPE_CHECKING

from znnpy.graph_shapes import GraphConvShape
from znnpy.kernels.cpu.graph_layer import why_not_kind
from znnpy.layers import DEFAULT_PARAMETERS
from znnpy.shapes import ConvShape

if TYPE_CHECKING:
    from znnpy.shapes import Sized


def why_not_stride_1(shape: Sized, *, bf16: bool = False) -> str | None:
    """Return None if `shape` is a convolution of a graph with stride 1, dilation 1 and one group, else a reason.

    bf16  whether values may be bfloat16 too
    """
    if reason := why_not_kind(shape, GraphConvShape, "convolutions of graphs", bf16=bf16):
        return reason
    assert isinstance(shape, GraphConvShape)
    return None if shape.plain else "computes stride 1, dilation 1 and one group: see cpu.graph_conv.taps"


def why_not_upsampled(shape: Sized) -> str | None:
    """Return None unless an input of a convolution of a graph is upsampled."""
    if isinstance(shape, GraphConvShape) and shape.upsampled:
        return "its inputs have all voxels in memory, and none counts several times: see cpu.graph_conv.fft_lanes"
    return None


def padded_conv(shape: GraphConvShape) -> ConvShape:
    """Return the convolution of one array that holds the maps of all inputs and the padding, without activation."""
    return ConvShape(1, shape.fin, shape.fout, shape.padded, shape.k)


def slope(shape: GraphConvShape) -> float | None:
    """Return the factor of negative results if that is all that follows them, else None."""
    if shape.addend:
        return None
    match shape.activation:
        case "none":
            return 1.0
        case "relu":
            return 0.0
        case "leaky_relu":
            return (shape.parameters or DEFAULT_PARAMETERS["leaky_relu"])[0]
        case _:
            return None
