"""Time each operation of a graph's plan by itself, and say what share of the machine it reaches.

The time is the median of a few runs after one that does not count, of operations above a quarter of a second of two.

The least time of an operation is that of moving its input and output once at the bandwidth of a copy, or that of the
fewest multiply-adds of any method at the rate of a large matrix product, whichever is longer. Methods are the direct
one and the FFT by tiles with its transforms, for the best of the tiles with sides up to SIDE.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from itertools import product
from math import ceil, log2, prod
from statistics import median
from typing import Any

import numpy as np
from threadpoolctl import threadpool_limits

from benchmarks.graph_children import planned
from benchmarks.harness.isolate import Answer, Request

SIDE = 32  # longest side of a tile
SIDES = (8, 12, 16, 20, 24, 28, 32)
REPEATS = 3
COPIED_BYTES = 2**28
MATRIX = 3072


def copy_rate(pool: Any) -> float:
    """Measure the bytes per second of a copy by all threads; bytes read and bytes written count."""
    source, target = np.ones(COPIED_BYTES, np.uint8), np.zeros(COPIED_BYTES, np.uint8)

    def piece(lo: int, hi: int, worker: int) -> None:
        del worker
        target[lo:hi] = source[lo:hi]

    return 2 * COPIED_BYTES / _seconds(lambda: pool.each(piece, COPIED_BYTES))


def product_rate(threads: int) -> float:
    """Measure the operations per second of a product of random float32 matrices by BLAS."""
    a, b = (np.random.default_rng(seed).standard_normal((MATRIX, MATRIX), np.float32) for seed in (1, 2))
    with threadpool_limits(threads):
        return 2 * MATRIX**3 / _seconds(lambda: a @ b)


def _seconds(work: Callable[[], Any]) -> float:
    """Return the median seconds of a few runs after one that does not count."""
    spent = []
    for _ in range(REPEATS + 1):
        begin = time.perf_counter()
        work()
        spent.append(time.perf_counter() - begin)
    return median(spent[1:])


def least_multiply_adds(shape: Any) -> float:
    """Return the multiply-adds of the method that needs the fewest, for a convolution; 0 for other layers."""
    if shape.kind == "conv_transpose":
        taps = prod(shape.k) / prod(shape.stride)  # of each output, by phases
        return float(prod(shape.out_shape) * taps * shape.fin / shape.groups)
    if shape.kind != "graph_conv":
        return 0.0
    summed = sum(maps * _taps(shape, index) for index, maps in enumerate(shape.fins))  # for each output
    direct: float = float(prod(shape.out_shape) * summed / shape.groups)
    if not shape.plain:
        return direct
    out = shape.out_shape[1:4]
    return min(direct, *(_by_tiles(shape, out, tile) for tile in product(SIDES, repeat=3)))


def _factor(shape: Any, index: int) -> tuple[int, int, int]:
    """Return how often each voxel of an input counts along each axis."""
    factor: tuple[int, int, int] = shape.factors[index] if shape.factors else (1, 1, 1)
    return factor


def _taps(shape: Any, index: int) -> int:
    """Return the taps of the kernel, those that meet the same voxel of an input taken together."""
    return prod((k - 1) // factor + 1 for k, factor in zip(shape.k, _factor(shape, index), strict=True))


def _by_tiles(shape: Any, out: tuple[int, ...], tile: tuple[int, ...]) -> float:
    """Return the multiply-adds of the FFT by tiles: transforms, and products of half of the frequencies."""
    steps = [side - k + 1 for side, k in zip(tile, shape.k, strict=True)]
    if min(steps) < 1:
        return float("inf")
    tiles: int = prod(ceil(n / step) for n, step in zip(out, steps, strict=True))
    points = prod(tile)
    maps = sum(maps / prod(_factor(shape, index)) for index, maps in enumerate(shape.fins)) + shape.fout
    transforms = 2.5 * points * log2(points) * maps  # of real values, flops
    products = 8.0 * (points / 2) * shape.fin * shape.fout
    return float(tiles * (transforms + products) / 2)


def layers(request: Request) -> Iterator[Answer]:
    """Plan a run and time the operations of its plan; the request is that of `graph_children.run_znnpy`."""
    from znnpy.kernels.table import find
    from znnpy.kernels.thread_pool import ThreadPool
    from znnpy.measure.layer_timer import CpuTimer

    plan = planned(request)
    sums = product_rate(request["threads"])
    with ThreadPool(request["threads"]) as pool:
        copies = copy_rate(pool)
        timer = CpuTimer(pool)
        for choice in plan.main.choices:
            primitive = find(choice.primitive)
            spent = timer.seconds(primitive, choice.shape, choice.variant)
            nbytes, adds = choice.shape.in_bytes + choice.shape.out_bytes, least_multiply_adds(choice.shape)
            nbytes += getattr(choice.shape, "weight_bytes", 0)
            least = max(nbytes / copies, 2.0 * adds / sums)
            yield {
                "shape": str(choice.shape),
                "primitive": f"{choice.primitive} {choice.variant}",
                "seconds": (spent,),
                "bytes": nbytes,
                "multiply_adds": adds,
                "copy_bytes_per_second": copies,
                "sgemm_flops": sums,
                "share": least / spent,
                "executions": choice.executions,
            }
