"""List the convolutions of graphs with stride 1 on the CPU. To add one: write it, test it, add a row."""

from __future__ import annotations

from typing import TYPE_CHECKING

from znnpy.kernels.cpu.conv_direct import ConvDirect
from znnpy.kernels.cpu.conv_direct_naive import ConvDirectNaive
from znnpy.kernels.cpu.conv_fft_data import ConvFftData
from znnpy.kernels.cpu.conv_fft_tasks import ConvFftTasks
from znnpy.kernels.cpu.conv_fft_tiled import ConvFftTiled
from znnpy.kernels.cpu.graph_conv_direct import GraphConvDirectLanes
from znnpy.kernels.cpu.graph_conv_lanes import GraphConvFftLanes
from znnpy.kernels.cpu.graph_gathered import Gathered

if TYPE_CHECKING:
    from znnpy.kernels.contract import Primitive

GRAPH_CONVOLUTIONS: tuple[Primitive, ...] = (
    GraphConvFftLanes(),
    GraphConvDirectLanes(),
    Gathered(ConvDirect()),
    Gathered(ConvDirectNaive()),
    Gathered(ConvFftData()),
    Gathered(ConvFftTasks()),
    Gathered(ConvFftTiled()),
)
