"""List the kernels of the fused tiled FFT: every tile size, with blocks for large and for small shared memory."""

from __future__ import annotations

from znnpy.kernels.gpu.fft_tiled.primitive import _Product
from znnpy.kernels.gpu.fft_tiled.tiles import COLUMN_THREADS, PLANE_BLOCKS, POOL_THREADS, SIDES_Z, PlaneBlock
from znnpy.kernels.gpu.kernel_source import KernelInstance

_REGISTERS = 65536  # registers of a multiprocessor
_MOST = 255  # registers of a thread
_SHARED = (99 << 10, 163 << 10, 227 << 10)  # bytes a block may have: RTX, A100, H100
_TYPES = (("Halves", "half2", "float"), ("Quick", "half2", "half"), ("Split", "float2", "float"))


def instances() -> list[KernelInstance]:
    """Return all instances, for `znnpy.kernels.gpu.kernel_instances`."""
    return [*_columns(), *_planes(), *_products(), *_weights()]


def _columns() -> list[KernelInstance]:
    plain, pooling = _fair(COLUMN_THREADS, 2), _fair(POOL_THREADS, 4)
    return [
        KernelInstance(f"fft_tiled/{source}.cu", name, registers)
        for side in SIDES_Z
        for stored, number, value in _TYPES
        for source, name, registers in (
            ("forward", f"forward_z<{side}, {stored}, {value}>", plain),
            ("inverse", f"inverse_z<{side}, {number}, {value}>", plain),
            ("inverse", f"inverse_z_pool<{side}, {number}, {value}>", pooling),
        )
    ]


def _planes() -> list[KernelInstance]:
    found = []
    for (side, spectra), blocks in PLANE_BLOCKS.items():
        for maps, threads, count in dict.fromkeys((blocks[0], blocks[-1])):
            block, registers = PlaneBlock(side, spectra, maps, threads, count), _fair(threads, count)
            spills = (64, 120) if side > 16 else (0, 0)  # sm_120 spills, since its compiler keeps less in registers
            found += [
                KernelInstance("fft_tiled/forward.cu", block.forward(), registers),
                KernelInstance("fft_tiled/inverse.cu", block.inverse, registers, (), *spills),
            ]
    return found


def _products() -> list[KernelInstance]:
    found: dict[str, KernelInstance] = {}
    for spectra in ("half", "split"):
        for maps, shared_bytes in ((8, _SHARED[0]), (80, _SHARED[0]), (80, _SHARED[2]), (128, _SHARED[1])):
            product = _Product.of(spectra, 2 * maps, 2 * maps, shared_bytes)
            if product is not None:
                registers = _fair(product.threads, product.block[-1])
                found[product.name] = KernelInstance("fft_tiled/product.cu", product.name, registers)
    return list(found.values())


def _weights() -> list[KernelInstance]:
    names = [f"forward_z<{max(SIDES_Z)}, Floats, float>"]
    return [
        *(KernelInstance("fft_tiled/forward.cu", name, _fair(COLUMN_THREADS, 2)) for name in names),
        KernelInstance("fft_tiled/weights.cu", "weight_bounds", 64),
        KernelInstance(
            "fft_tiled/weights.cu", "pack_weights", 128, stack_bytes=16
        ),  # an array indexed by word; runs once
    ]


def _fair(threads: int, blocks: int) -> int:
    """Return the registers per thread that leave space for `blocks` blocks on a multiprocessor."""
    return min(_MOST, _REGISTERS // (threads * blocks) // 8 * 8)
