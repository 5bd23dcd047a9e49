"""The table of all primitives. To add one: write it, test it, add a row."""

from __future__ import annotations

from collections.abc import Callable
from difflib import get_close_matches
from typing import Any, Protocol

from znnpy.kernels.contract import Kind, Primitive, Variant
from znnpy.kernels.cpu.bf16_conv import BF16_CONVOLUTIONS
from znnpy.kernels.cpu.conv_direct import ConvDirect
from znnpy.kernels.cpu.conv_direct_lanes import ConvDirectLanes, ConvFirst
from znnpy.kernels.cpu.conv_direct_naive import ConvDirectNaive
from znnpy.kernels.cpu.conv_fft_data import ConvFftData
from znnpy.kernels.cpu.conv_fft_lanes import ConvFftLanes
from znnpy.kernels.cpu.conv_fft_tasks import ConvFftTasks
from znnpy.kernels.cpu.conv_fft_tiled import ConvFftTiled
from znnpy.kernels.cpu.graph_conv_table import GRAPH_CONVOLUTIONS
from znnpy.kernels.cpu.graph_table import GRAPH_OPERATORS
from znnpy.kernels.cpu.pool import MaxFilter, MaxoutDirect, PoolFragments, PoolMax
from znnpy.kernels.cpu.pool_lanes import MaxFilterLanes, PoolFragmentsLanes, PoolMaxLanes
from znnpy.kernels.gpu.block.primitive import ConvBlock
from znnpy.kernels.gpu.conv_cudnn import ConvCudnn, ConvCudnnWorkspace
from znnpy.kernels.gpu.conv_direct import ConvDirect as GpuConvDirect
from znnpy.kernels.gpu.conv_fft import ConvFft
from znnpy.kernels.gpu.conv_first import ConvFirst as GpuConvFirst
from znnpy.kernels.gpu.cuconv.primitive import CuConv
from znnpy.kernels.gpu.fft_tiled.primitive import ConvFftTiled as GpuConvFftTiled
from znnpy.kernels.gpu.graph.table import GPU_GRAPH_OPERATORS
from znnpy.kernels.gpu.graph_gemm.table import GRAPH_PRODUCTS
from znnpy.kernels.gpu.host_ram.primitive import ConvHostRam
from znnpy.kernels.gpu.host_ram.timeline import Speeds as Speeds  # speeds of the link, which the planner passes in
from znnpy.kernels.gpu.implicit_gemm.primitive import ConvImplicitGemm
from znnpy.kernels.gpu.pool import MaxFilter as GpuMaxFilter
from znnpy.kernels.gpu.pool import MaxoutDirect as GpuMaxoutDirect
from znnpy.kernels.gpu.pool import PoolFragments as GpuPoolFragments
from znnpy.kernels.gpu.pool import PoolMax as GpuPoolMax
from znnpy.layer_shapes import LayerShape
from znnpy.machine import Machine
from znnpy.shapes import ConvShape

Seconds = Callable[[Primitive, ConvShape, Variant], float]


class DividedPrimitive(Primitive, Protocol):
    """A primitive for tensors in the memory of the host, which runs a layer on the GPU in parts."""

    def fastest(
        self,
        shape: ConvShape,
        machine: Machine,
        vram_bytes: int,
        speeds: Speeds,
        seconds: Seconds,
        *,
        within: float,
        few: bool,
    ) -> Any:
        """Return `variant` and `found.seconds` within so many bytes of the GPU; None where nothing fits."""

    def largest(self, shape: LayerShape, variant: Variant) -> tuple[Primitive, ConvShape, Variant]:
        """Return what computes the largest of the sub-layers of a variant, its shape and its variant."""


TABLE: tuple[Primitive, ...] = (
    ConvDirect(),
    ConvDirectNaive(),
    ConvFftData(),
    ConvFftTasks(),
    ConvFftTiled(),
    ConvFftLanes(),
    ConvFirst(),
    ConvDirectLanes(),
    PoolMax(),
    PoolFragments(),
    MaxFilter(),
    PoolMaxLanes(),
    PoolFragmentsLanes(),
    MaxFilterLanes(),
    MaxoutDirect(),
    GpuConvFftTiled(),
    ConvFft(),
    ConvCudnn(),
    ConvCudnnWorkspace(),
    GpuConvFirst(),
    ConvBlock(),
    CuConv(),
    ConvImplicitGemm(),
    GpuConvDirect(),
    GpuPoolMax(),
    GpuPoolFragments(),
    GpuMaxFilter(),
    GpuMaxoutDirect(),
    *GRAPH_CONVOLUTIONS,
    *BF16_CONVOLUTIONS,
    *GRAPH_OPERATORS,
    *GPU_GRAPH_OPERATORS,
    *GRAPH_PRODUCTS,
)

# Primitives that compute on a GPU with tensors in host memory: HostStep, for plans of mode gpu-host.
IN_HOST_RAM: tuple[DividedPrimitive, ...] = (
    ConvHostRam(
        (
            GpuConvFftTiled(),
            ConvImplicitGemm(),
            ConvCudnn(),
            ConvCudnnWorkspace(),
            ConvFft(),
            GpuConvDirect(),
        )
    ),
)


def find(name: str, table: tuple[Primitive, ...] | None = None) -> Primitive:
    """Return the primitive called `name`, for example "cpu.conv.direct"; KeyError lists similar names.

    name   a name that `znnpy primitives` lists.
    table  table to search; None: all primitives that a plan may choose.
    """
    known = TABLE if table is None else table
    for primitive in known:
        if primitive.name == name:
            return primitive
    names = [p.name for p in known]
    near = get_close_matches(name, names, n=2) or names
    raise KeyError(f"no primitive {name!r}; did you mean {' or '.join(near)}?")


def of_kind(kind: Kind, table: tuple[Primitive, ...] = TABLE) -> tuple[Primitive, ...]:
    """Return all primitives for one kind of layer."""
    return tuple(p for p in table if p.kind == kind)
