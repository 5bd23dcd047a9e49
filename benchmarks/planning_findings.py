"""Section VI-A of the paper again: is one image at a time the best, and are all poolings best as fragments?

A scheme says how many patches a step takes together (the paper's S), and which poolings give fragments. One that does
not is plain max-pooling: all layers are computed again for every offset of its window, which is how all subsamplings
are computed where nobody knows fragments. The planner searches patches of every scheme in the same way: all fragments
go through a layer before any goes through the next, as in the paper.

Source  Zlateski, Lee, Seung, ZNNi (SC16), section VI.A, Fig. 4, and Table I for `theory`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from math import inf, log2, prod
from typing import Any

from planning_plans import Ground

from znnpy.errors import NoPlanError
from znnpy.network import Conv, Network, Pool
from znnpy.planner.plan import Plan
from znnpy.planner.schemes import Scheme, shapes_of
from znnpy.shapes import ConvShape

BATCHES = (1, 2, 4, 8)
FFT_OPERATIONS = 2.5  # of a real transform of n values, over n log2 n
THEORY_SIDES = (1, 2, 4, 8, 16, 32, 64, 128)  # of each fragment's output


@dataclass(frozen=True, slots=True)
class Best:
    """Of one scheme, as predicted."""

    scheme: Scheme
    plan: Plan | None  # its choices and counts; it does not run. None: nothing fits
    seconds: float = inf  # for the whole output


def schemes(network: Network) -> Iterator[Scheme]:
    """One and more images with all poolings as fragments; one image with every mixture of poolings."""
    pools = sum(isinstance(layer, Pool) for layer in network.layers)
    for images in BATCHES:
        yield Scheme(images, (True,) * pools)
    for fragments in product((True, False), repeat=pools):
        if not all(fragments):
            yield Scheme(1, fragments)


def best(ground: Ground, network: Network, pick: Plan, scheme: Scheme) -> Best:
    """The planner's fastest patches of one scheme that fit."""
    try:
        plan = ground.plan(network, pick.output, scheme=scheme)
    except NoPlanError:
        return Best(scheme, None)
    return Best(scheme, plan, plan.seconds)


def theory_network(poolings: int) -> Network:
    """Like the paper's: convolutions of 5x5x5, a pooling of 2x2x2 behind each of the first, 80 maps."""
    conv, pool = Conv((5, 5, 5), 80, "relu"), Pool((2, 2, 2))
    return Network(f"{poolings} poolings", 1, (*(conv, pool) * poolings, conv, conv, conv, Conv((5, 5, 5), 3, "relu")))


def theory(poolings: int) -> list[dict[str, Any]]:
    """Fig. 4: operations per output voxel of patches of one voxel over those of larger ones, against memory.

    Operations are those of Table I for convolutions by FFT; bytes are those of the largest layer: all transforms of its
    input or of its output, whichever are more.
    """
    network = theory_network(poolings)

    def cost(side: int, scheme: Scheme) -> tuple[float, int]:
        shapes = shapes_of(network, (side, side, side), scheme)
        convs = [shape for shape in shapes if isinstance(shape, ConvShape)]
        outputs = prod(shapes[-1].out_shape[:4])
        return sum(map(_operations, convs)) / outputs, max(4 * s.batch * max(s.fin, s.fout) * prod(s.n) for s in convs)

    naive, _ = cost(1, Scheme(1, (False,) * poolings))
    found = []
    for images in BATCHES:
        scheme = Scheme(images, (True,) * poolings)
        for side in THEORY_SIDES:
            operations, nbytes = cost(side, scheme)
            found.append({"images": images, "side": side, "gib": nbytes / 2**30, "speedup": naive / operations})
    return found


def _operations(shape: ConvShape) -> float:
    """Of one convolution by FFT: transforms of images, products, pruned transforms of kernels."""
    n, k = shape.n[0], shape.k[0]
    transforms = 3 * FFT_OPERATIONS * n**3 * log2(n) * shape.batch * (shape.fin + shape.fout)
    products = 4 * shape.batch * shape.fin * shape.fout * n**3
    return transforms + products + shape.fin * shape.fout * FFT_OPERATIONS * n * log2(n) * (k * k + k * n + n * n)


def theory_verdict(points: Sequence[dict[str, Any]], gib: float) -> dict[str, Any]:
    """The images at a time with the highest speedup within so much memory."""
    within = [point for point in points if point["gib"] <= gib]
    most = max(within, key=lambda point: point["speedup"])
    return {"gib": gib, "images": most["images"], "speedup": most["speedup"]}
