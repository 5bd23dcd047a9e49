"""List the primitives of graphs' layers on the CPU. To add one: write it, test it, add a row."""

from __future__ import annotations

from typing import TYPE_CHECKING

from znnpy.kernels.cpu.graph_conv_depthwise import GraphConvDepthwise
from znnpy.kernels.cpu.graph_conv_strided import GraphConvStrided
from znnpy.kernels.cpu.graph_conv_taps import GraphConvTaps
from znnpy.kernels.cpu.graph_norm import GlobalPoolLines, NormLines
from znnpy.kernels.cpu.graph_norm_lanes import GlobalPoolLanes, NormLanes
from znnpy.kernels.cpu.graph_pad import PadCopy
from znnpy.kernels.cpu.graph_point import PointLines
from znnpy.kernels.cpu.graph_point_lanes import PointLanes
from znnpy.kernels.cpu.graph_pool import PoolWindows
from znnpy.kernels.cpu.graph_pool_lanes import PoolLanes
from znnpy.kernels.cpu.graph_transpose import TransposePhases
from znnpy.kernels.cpu.graph_transpose_lanes import TransposeLanes
from znnpy.kernels.cpu.graph_upsample import UpsampleRepeat
from znnpy.kernels.cpu.graph_upsample_lanes import UpsampleLanes

if TYPE_CHECKING:
    from znnpy.kernels.contract import Primitive

GRAPH_OPERATORS: tuple[Primitive, ...] = (
    GraphConvTaps(),
    GraphConvDepthwise(),
    GraphConvStrided(),
    TransposePhases(),
    TransposeLanes(),
    PoolWindows(),
    PoolLanes(),
    UpsampleRepeat(),
    UpsampleLanes(),
    PointLines(),
    PointLanes(),
    PadCopy(),
    NormLines(),
    NormLanes(),
    GlobalPoolLines(),
    GlobalPoolLanes(),
)
