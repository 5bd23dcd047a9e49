"""List all kernels that our primitives compile: tests compile them for every architecture without a GPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from znnpy.kernels.gpu import blend, conv_cudnn, conv_direct, conv_fft, conv_first, load_store, ops, pool
from znnpy.kernels.gpu.block import primitive as block
from znnpy.kernels.gpu.cuconv import primitive as cuconv
from znnpy.kernels.gpu.fft_tiled import kernel_instances as fft_tiled
from znnpy.kernels.gpu.graph import conv as graph_conv
from znnpy.kernels.gpu.graph import few_maps as graph_few_maps
from znnpy.kernels.gpu.graph import finish as graph_finish
from znnpy.kernels.gpu.graph import norm as graph_norm
from znnpy.kernels.gpu.graph import pad as graph_pad
from znnpy.kernels.gpu.graph import point as graph_point
from znnpy.kernels.gpu.graph import pool as graph_pool
from znnpy.kernels.gpu.graph import products as graph_products
from znnpy.kernels.gpu.graph import transpose_tensor as graph_transpose_tensor
from znnpy.kernels.gpu.graph import upsample as graph_upsample
from znnpy.kernels.gpu.graph_gemm import warpgroup as graph_gemm
from znnpy.kernels.gpu.host_ram import primitive as host_ram
from znnpy.kernels.gpu.implicit_gemm import floats, tensor, warpgroup
from znnpy.kernels.gpu.kernel_source import KernelInstance

ARCHITECTURES = (80, 86, 89, 90, 120)  # A100; RTX 30; RTX 40, L4, L40; H100, H200; RTX 50


def instances() -> tuple[KernelInstance, ...]:
    """Return instances of every source in kernels/gpu: the extremes of what its primitives use, and the commonest."""
    sources: Sequence[Callable[[], Sequence[KernelInstance]]] = (
        blend.instances,
        block.instances,
        conv_cudnn.instances,
        conv_direct.instances,
        conv_first.instances,
        cuconv.instances,
        fft_tiled.instances,
        graph_gemm.instances,
        host_ram.instances,
        floats.instances,
        tensor.instances,
        warpgroup.instances,
        ops.instances,
        pool.instances,
        graph_conv.instances,
        graph_few_maps.instances,
        graph_finish.instances,
        graph_norm.instances,
        graph_pad.instances,
        graph_point.instances,
        graph_pool.instances,
        graph_products.instances,
        graph_transpose_tensor.instances,
        graph_upsample.instances,
        _conv_fft,
        _load_store,
    )
    return tuple(instance for source in sources for instance in source())


def _load_store() -> list[KernelInstance]:
    types = (("uint8", "float32", "float32"), ("float64", "float16", "uint8"), ("int64", "float32", "float16"))
    names = dict.fromkeys(name for trio in types for name in load_store.kernel_names(*trio))
    return [KernelInstance(load_store.SOURCE, name, 80) for name in names]


def _conv_fft() -> list[KernelInstance]:
    most = conv_fft.TOGETHER
    names = [f"{kernel}<{value}>" for kernel in ("gather", "scatter") for value in ("float", "half")]
    names += ["pad", "transpose", "expand", "multiply<1, 1>", f"multiply<{most}, {most}>"]
    return [KernelInstance("conv_fft.cu", name, 128) for name in names]
