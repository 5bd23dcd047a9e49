"""List the primitives of graphs' layers on a GPU. To add one: write it, test it, add a row."""

from __future__ import annotations

from typing import TYPE_CHECKING

from znnpy.kernels.gpu.graph.conv import GraphConvDirect
from znnpy.kernels.gpu.graph.copied import COPIED_CONVOLUTIONS
from znnpy.kernels.gpu.graph.cudnn import GraphConvCudnn, GraphConvCudnnWorkspace
from znnpy.kernels.gpu.graph.few_maps import GraphConvFewMaps
from znnpy.kernels.gpu.graph.norm import GlobalPoolPasses, NormPasses
from znnpy.kernels.gpu.graph.pad import PadCopy
from znnpy.kernels.gpu.graph.point import PointLines
from znnpy.kernels.gpu.graph.pool import WindowPoolDirect
from znnpy.kernels.gpu.graph.transpose import TransposeDirect
from znnpy.kernels.gpu.graph.transpose_tensor import TransposeTensor
from znnpy.kernels.gpu.graph.upsample import UpsampleRepeat

if TYPE_CHECKING:
    from znnpy.kernels.contract import Primitive

GPU_GRAPH_OPERATORS: tuple[Primitive, ...] = (
    GraphConvDirect(),
    GraphConvCudnn(),
    GraphConvCudnnWorkspace(),
    GraphConvFewMaps(),
    *COPIED_CONVOLUTIONS,
    TransposeDirect(),
    TransposeTensor(),
    WindowPoolDirect(),
    UpsampleRepeat(),
    PointLines(),
    PadCopy(),
    NormPasses(),
    GlobalPoolPasses(),
)
