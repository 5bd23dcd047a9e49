"""Layers that `znnpy measure` runs to learn the speed of a machine: every kind, small and large, few maps and many."""

from __future__ import annotations

from collections.abc import Iterator

from znnpy.layer_shapes import LayerShape
from znnpy.option_values import DeviceKind
from znnpy.shapes import ConvShape, FilterShape, MaxoutShape, PoolShape, Precision, Vec3

SIDES: dict[DeviceKind, tuple[int, ...]] = {"cpu": (48, 24, 12, 6), "gpu": (144, 64, 24, 8)}  # side of one output image
CONVS: tuple[tuple[int, int, int, int], ...] = (  # maps in and out, kernel, window of a pooling in one with it
    (1, 16, 5, 1),
    (1, 80, 3, 2),
    (16, 16, 3, 1),
    (80, 80, 3, 1),
    (32, 48, 5, 2),
    (80, 80, 5, 1),
    (32, 32, 7, 1),
    (80, 3, 1, 1),
)
# A few layers larger than all caches, on a CPU: side of an output image, maps, kernel.
LARGE: tuple[tuple[int, int, int], ...] = ((112, 80, 3), (96, 80, 5))
LARGE_POOLED = 64, 80, 2  # side of a fragment, maps, window
POOLED: tuple[tuple[int, int], ...] = ((16, 2), (80, 2), (16, 3))  # maps, window


def samples(device: DeviceKind, precision: Precision) -> Iterator[LayerShape]:
    """Yield all sample layers, large ones first; together they use every unit of every primitive that applies."""
    if device == "cpu":
        yield from _large(precision)
    for side in SIDES[device]:
        for fin, fout, k, p in CONVS:
            n = p * side + p - 1 + k - 1 if p > 1 else side + k - 1
            yield ConvShape(1, fin, fout, _cube(n), _cube(k), "relu", pool=_cube(p), precision=precision)
        for maps, p in POOLED:
            yield PoolShape(1, maps, _cube(p * side + p - 1), _cube(p), precision=precision)
            yield PoolShape(1, maps, _cube(p * side), _cube(p), fragments=False, precision=precision)
            yield FilterShape(1, maps, _cube(side + p - 1), _cube(p), precision)
            if maps % p == 0:
                yield MaxoutShape(1, maps, _cube(side), p, precision)


def _large(precision: Precision) -> Iterator[LayerShape]:
    for side, maps, k in LARGE:
        yield ConvShape(1, maps, maps, _cube(side + k - 1), _cube(k), "relu", precision=precision)
    side, maps, p = LARGE_POOLED
    yield PoolShape(1, maps, _cube(p * side + p - 1), _cube(p), precision=precision)


def _cube(side: int) -> Vec3:
    return side, side, side
