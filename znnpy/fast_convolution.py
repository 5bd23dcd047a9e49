"""Convolve arrays in memory with the fastest primitive, for `znnpy.ops.convolve` on the CPU.

Method  Convolutions with stride 1 use the primitive with the least predicted time among those that plans choose from,
        preparation of the kernels included, within a memory bound. All others are computed tap by tap.
Memory  In addition to x and the result: MOST_BYTES, or twice the bytes of x and the result if that is more, and a copy
        of x if it is padded, float16 or not in C order.
Tested  tests/kernels/cpu/test_ops.py, tests/test_fast_convolution.py
"""

from __future__ import annotations

from functools import lru_cache
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from znnpy.costs.model import assumed_rates
from znnpy.errors import ValuesOverflowError
from znnpy.kernels.aligned import aligned_bytes
from znnpy.kernels.table import TABLE
from znnpy.kernels.thread_pool import ThreadPool
from znnpy.machine import this_machine
from znnpy.shapes import ConvShape, Vec3

if TYPE_CHECKING:
    from znnpy.kernels.contract import Primitive, Variant
    from znnpy.network import ConvWeights
    from znnpy.shapes import Activation

MOST_BYTES = 2**26
SMALL = 2e7  # floating-point operations: fewer are faster tap by tap than with threads
PREPARED = 1e9  # bytes of kernels prepared per second, roughly, on any processor


def convolve(x: npt.NDArray[Any], out: npt.NDArray[Any], weights: ConvWeights, padding: Vec3, act: Activation) -> bool:
    """Write the convolution of x with stride 1 to `out`; return False, with `out` undefined, if tap by tap is faster.

    x, out  (S, z, y, x, f) float32 or float16, any strides.

    It also returns False if a result is not finite, since transforms would spread it over their tiles.
    """
    size = x.shape[1] + 2 * padding[0], x.shape[2] + 2 * padding[1], x.shape[3] + 2 * padding[2]
    k = weights.weight.shape[2], weights.weight.shape[3], weights.weight.shape[4]
    shape = ConvShape(x.shape[0], x.shape[4], len(weights.bias), size, k, act)
    found = fastest(shape)
    if found is None:
        return False
    primitive, variant = found
    around = [(0, 0), *((pad, pad) for pad in padding), (0, 0)]
    source = np.ascontiguousarray(np.pad(x, around) if any(padding) else x, np.float32)
    direct = out.dtype == np.float32 and out.flags.c_contiguous
    target = out if direct else np.empty(out.shape, np.float32)
    with ThreadPool(this_machine().cores) as pool:
        step = primitive.bind(primitive.prepare(weights, variant, pool), shape, variant, pool)
        scratch = {s.name: aligned_bytes(s.nbytes) for s in primitive.footprint(shape, variant, pool.threads).scratch}
        try:
            step.run(source, target, scratch)
        except ValuesOverflowError:
            return False
    if not direct:
        with np.errstate(over="ignore"):
            out[...] = target
    return True


@lru_cache(maxsize=256)
def fastest(shape: ConvShape) -> tuple[Primitive, Variant] | None:
    """Return the primitive and variant with the least predicted time within the memory bound; None: tap by tap."""
    if 2.0 * prod(shape.out_shape) * shape.fin * prod(shape.k) < SMALL:
        return None
    machine = this_machine()
    rates = assumed_rates(machine, machine.cores)
    bound = max(MOST_BYTES, 2 * (shape.in_bytes + shape.out_bytes))
    best: tuple[Primitive, Variant] | None = None
    least = np.inf
    for primitive in TABLE:
        if primitive.kind != "conv" or primitive.why_not(shape, machine) is not None:
            continue
        for variant in primitive.variants(shape, machine):
            footprint = primitive.footprint(shape, variant, machine.cores)
            extra = footprint.resident + footprint.allowance + sum(scratch.nbytes for scratch in footprint.scratch)
            seconds = rates.seconds(primitive, shape, variant) + footprint.resident / PREPARED
            if extra <= bound and seconds < least:
                best, least = (primitive, variant), seconds
    return best
