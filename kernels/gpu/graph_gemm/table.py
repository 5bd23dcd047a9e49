"""List the convolutions of graphs on tensor cores of a GPU. To add one: write it, test it, add a row."""

from __future__ import annotations

from typing import TYPE_CHECKING

from znnpy.kernels.gpu.graph_gemm.normed import GraphConvNormed
from znnpy.kernels.gpu.graph_gemm.phases import GraphConvPhases
from znnpy.kernels.gpu.graph_gemm.warpgroup import GraphConvWarpgroup

if TYPE_CHECKING:
    from znnpy.kernels.contract import Primitive

GRAPH_PRODUCTS: tuple[Primitive, ...] = (GraphConvWarpgroup(), GraphConvPhases(), GraphConvNormed())
